"""The plugin as pytest loads it: what it imports and when, what it offers, and what it skips."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from forked_pytest import run_apart

import graphengine
import graphengine.buckets
import graphengine.testing
from graphengine.testing import plugin

pytest_plugins = ["pytester"]

NEED_GPU = {"no_sync", "no_alloc", "check_no_alloc", "no_leaked_pool", "keep_graphs"}
# Functions that check nothing by themselves.
HELPERS = {
    "diff_structures",
    "diff_text",
    "environment_key",
    "logprob_agreement",
    "normalise",
    "normalise_name",
    "read_structure",
}

# The plugin's cost for a start of pytest, in a process in which pytest is already loaded.
LOADING = """
import json, sys
import pytest
before = set(sys.modules)
import graphengine.testing.plugin
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_loading_imports_next_to_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADING], capture_output=True, check=True, text=True
    )
    imported = json.loads(done.stdout)
    ours = [name for name in imported if name.startswith("graphengine")]
    snapshots = ["graphengine.testing.snapshots", "graphengine.testing.snapshots.golden"]
    own = ["graphengine.testing", "graphengine.testing.plugin", *snapshots]
    assert ours == ["graphengine", *own]
    assert len(imported) <= 10, imported


def test_torch_is_imported_by_the_first_fixture_that_is_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_before(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("graphengine")
            assert not {"torch", "triton"} & set(sys.modules)

        def test_after(assert_pointers_stable):
            assert "torch" in sys.modules
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=2)


def test_fixtures_that_need_a_gpu_skip_without_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile(
        """
        def test_sync(no_sync): raise AssertionError
        def test_alloc(no_alloc): raise AssertionError
        def test_replays(check_no_alloc): raise AssertionError
        def test_pool(no_leaked_pool): raise AssertionError
        def test_keep(keep_graphs): raise AssertionError
        def test_capture(needs_gpu): raise AssertionError
        """
    )
    result = run_apart(pytester, "-rs")
    result.assert_outcomes(skipped=6)
    result.stdout.fnmatch_lines(["SKIPPED*needs an NVIDIA GPU: torch.cuda.is_available() is False"])


def test_the_fixture_is_the_function(pytester: pytest.Pytester) -> None:
    names = [name for name in fixtures() if hasattr(graphengine.testing, name)]
    on_cpu = sorted(set(names) - NEED_GPU - {"graph_snapshot"})
    pytester.makepyfile(
        f"""
        import graphengine.testing
        import pytest

        @pytest.mark.parametrize("name", {on_cpu})
        def test_it(name, request):
            assert request.getfixturevalue(name) is getattr(graphengine.testing, name)
        """
    )
    pytester.runpytest("-p", "no:hypothesispytest").assert_outcomes(passed=len(on_cpu))


def test_fixtures_of_a_module_may_use_them(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names = sorted(fixtures() - {"graph_snapshot"})
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.fixture(scope="module", params={names})
        def check(request):
            return request.getfixturevalue(request.param)

        def test_it(check):
            pass
        """
    )
    skipped = len(NEED_GPU | {"needs_gpu"})
    result = run_apart(pytester, "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=len(names) - skipped, skipped=skipped)


def test_every_check_is_a_fixture() -> None:
    checks = {
        name
        for name in graphengine.testing.__all__
        if inspect.isfunction(getattr(graphengine.testing, name))
    }
    assert checks - HELPERS == fixtures() - {"needs_gpu"}


def fixtures() -> set[str]:
    tree = ast.parse(inspect.getsource(plugin))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


@pytest.mark.parametrize(
    ("option", "expected"), [("", "update=False"), ("--graph-snapshot-update", "update=True")]
)
def test_a_snapshot_lies_beside_its_test(
    option: str, expected: str, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("size", [8])
        def test_it(graph_snapshot, size):
            print(f"{graph_snapshot.folder} {graph_snapshot.name} update={graph_snapshot.update}")
        """
    )
    result = pytester.runpytest("-p", "no:hypothesispytest", "-s", *filter(None, [option]))
    folder = pytester.path / "__snapshots__" / "test_a_snapshot_lies_beside_its_test"
    result.stdout.fnmatch_lines([f"*{folder} test_it[[]8] {expected}*"])


# The packages that import their names late.


@pytest.mark.parametrize("package", [graphengine, graphengine.buckets, graphengine.testing])
def test_late_names_are_those_that_type_checkers_see(package: typing.Any) -> None:
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and "not" not in ast.unparse(node.test)
    ]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == package._HOMES
    assert set(seen) == set(package.__all__) <= set(dir(package))
    for name in seen:
        assert getattr(package, name) is not None


@pytest.mark.parametrize("package", [graphengine, graphengine.buckets, graphengine.testing])
def test_a_name_that_is_not_there(package: typing.Any) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'x'"):
        _ = package.x


# The page for new users.

README = Path(__file__).parents[3] / "graphengine" / "testing" / "README.md"
FAULT = {"self.model(self.x)": "self.model(self.x - self.x.mean(0))"}


def write_example(
    pytester: pytest.Pytester, changes: Mapping[str, str] = MappingProxyType({})
) -> None:
    """The test file that a reader of the page writes; then with some changes."""
    _, _, rest = README.read_text().partition("```python\n")
    source = rest.partition("```")[0]
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    pytester.makepyfile(test_mlp=source)


def test_the_example_of_the_page_passes_and_skips_without_a_gpu(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_example(pytester)
    result = run_apart(pytester, "-rs")
    result.assert_outcomes(passed=3, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*needs an NVIDIA GPU*"])


def test_the_fault_of_the_page_is_told_as_the_page_says(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_example(pytester, FAULT)
    result = run_apart(pytester)
    result.assert_outcomes(passed=2, failed=1, skipped=2)
    text = " ".join(README.read_text().split())
    begin = text.index("poison 'NaN, largest' in")
    shown = text[begin : text.index("A step that returns", begin)].strip()
    before, _, after = shown.partition("0.11343829333782196")  # the weights are drawn anew
    printed = result.stdout.str()
    assert before in printed and after in printed


@pytest.mark.parametrize(
    ("sound", "broken", "test"),
    [
        (
            "self.replay = self.step",
            "self.replay = lambda: None",
            "a_replay_computes_what_the_step",
        ),
        (
            "self.replay = self.step",
            "x = self.x.clone(); self.replay = lambda: self.y.copy_(self.model(x))",
            "a_replay_computes_what_the_step",
        ),
        ("self.y.copy_(self.model(self.x))", "self.model(self.x)", "unused_lanes_change_nothing"),
        (
            "mlp.model.requires_grad_(False)",
            "mlp.x = torch.zeros(8, 16)",
            "tensors_stay_where_they_were_captured",
        ),
        (
            "mlp.model.requires_grad_(False)",
            "mlp.model.double()",
            "tensors_stay_where_they_were_captured",
        ),
    ],
)
def test_the_tests_of_the_page_see_what_is_broken(
    sound: str, broken: str, test: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_example(pytester, {sound: broken})
    result = pytester.runpytest_inprocess("-p", "no:hypothesispytest")
    result.stdout.fnmatch_lines([f"FAILED test_mlp.py::test_{test}*"])


@pytest.mark.gpu
def test_the_example_of_the_page_passes_natively(pytester: pytest.Pytester) -> None:
    write_example(pytester)
    pytester.runpytest_subprocess("--graph-snapshot-update").assert_outcomes(passed=5)
    pytester.runpytest_subprocess().assert_outcomes(passed=5)


@pytest.mark.gpu
def test_the_fault_of_the_page_is_told_natively(pytester: pytest.Pytester) -> None:
    """On a GPU the golden file knows, too: there are kernels that it does not have."""
    write_example(pytester)
    pytester.runpytest_subprocess("--graph-snapshot-update").assert_outcomes(passed=5)
    write_example(pytester, FAULT)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=3, failed=2)
    assert "poison 'NaN, largest' in the padding of x, y changed y" in result.stdout.str()
    result.stdout.fnmatch_lines(["*graph 'test_the_kernels_are_those_on_file' is not the one in*"])
    result.stdout.fnmatch_lines(["*+ node [[]*] kernel *"])


def test_the_page_lists_every_fixture() -> None:
    text = README.read_text().partition("## Recipes")[0]
    assert [name for name in fixtures() if f"`{name}" not in text] == []


def test_pytest_shows_what_each_fixture_does(pytester: pytest.Pytester) -> None:
    lines = pytester.runpytest("--fixtures", "-p", "no:hypothesispytest").outlines
    for name in fixtures():
        (place,) = [n for n, line in enumerate(lines) if re.match(rf"{name}( |$)", line)]
        assert 30 < len(lines[place + 1]) < 90, name
        assert lines[place + 2] == "", f"{name} takes more than a line"


# The recipes.


def recipes(language: str) -> list[str]:
    text = README.read_text().partition("## Recipes")[2]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_recipes_for_ci_workers_and_markers_work(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_ci, for_workers, *_ = recipes("python")
    (markers,) = recipes("toml")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makeconftest(for_ci + for_workers)
    pytester.makepyprojecttoml(markers)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpu
        def test_it(needs_gpu): pass
        """
    )
    run_apart(pytester).assert_outcomes(skipped=1)
    monkeypatch.setenv("REQUIRE_GPU", "1")
    result = run_apart(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*REQUIRE_GPU is set, and torch.cuda.is_available() is False*"])


def test_workers_get_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    _, for_workers, *_ = recipes("python")
    for worker, expected in (("gw0", "0"), ("gw3", "3"), ("gw5", "1")):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        exec(for_workers, {})
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
