"""Where triton is not installed, as on macOS and Windows: imports, the CPU, the plugin, reports."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import triton

from graphengine.kernels.core import stand_in

HIDE = """
    import sys

    class Hide:
        def __init__(self, finder):
            self.finder = finder

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "triton":
                return None
            return self.finder.find_spec(name, path, target)

    sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
"""


def without_triton(code: str) -> str:
    """What `code` prints in a process that cannot find triton."""
    source = textwrap.dedent(HIDE) + textwrap.dedent(code)
    command = [sys.executable, "-P", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_engine_runs_on_the_cpu_with_the_same_tokens() -> None:
    code = """
        from graphengine import Engine, SamplingParams
        from graphengine.demo import checkpoint_path
        from graphengine.speculative import MTP

        options = {"device": "cpu", "max_batch": 3, "max_seq_len": 64, "speculative": MTP(k=2)}
        with Engine.from_pretrained(checkpoint_path(), **options) as engine:
            params = SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=8, logprobs=1)
            print(engine.generate("def f(", params).token_ids)
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    plain = subprocess.run(command, capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    assert without_triton(code) == plain.stdout != ""


def test_nothing_of_the_stand_in_remains() -> None:
    code = """
        import importlib.util
        import graphengine.kernels
        print(importlib.util.find_spec("triton"), [n for n in sys.modules if "triton" == n[:6]])
        import torch.utils._triton
        print(torch.utils._triton.has_triton_package())
    """
    assert without_triton(code) == "None []\nFalse\n"


def test_the_plugin_and_the_reports_can_be_imported(tmp_path: Path) -> None:
    code = """
        import graphengine.testing, graphengine.testing.plugin
        for name in graphengine.testing.__all__:
            getattr(graphengine.testing, name)
        import graphengine.cli.main, graphengine.profiles.bench, graphengine.profiles.report
        from graphengine.cli.main import main
        from graphengine.observe.environment import environment
        key = graphengine.testing.environment_key()
        print(key.rpartition("_")[2], environment("cpu")["triton"])
    """
    assert without_triton(code) == "triton-none None\n"


def test_a_launch_says_what_is_missing() -> None:
    code = """
        from graphengine.kernels.step.begin import _begin_decode_kernel as kernel
        try:
            kernel[(1,)](None)
        except RuntimeError as error:
            print(error)
    """
    printed = without_triton(code)
    assert "_kernel is a Triton kernel, and triton is not installed" in printed
    assert 'device="cpu"' in printed


def test_every_kernel_is_imported_while_the_stand_in_is_there() -> None:
    code = """
        import pathlib, graphengine.kernels
        root = pathlib.Path(graphengine.kernels.__file__).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(["graphengine.kernels", *parts]).removesuffix(".__init__")
            if name not in sys.modules:
                print(name)
    """
    assert without_triton(code) == ""


@pytest.mark.parametrize("number", [1, 2, 3, 8, 9, 1023, 1024, 1025])
def test_sizes_are_those_of_triton(number: int) -> None:
    module = stand_in.module("triton")
    assert module.next_power_of_2(number) == triton.next_power_of_2(number)
    assert module.cdiv(number, 8) == triton.cdiv(number, 8)


def test_where_triton_is_installed_nothing_is_put_in_its_place() -> None:
    assert stand_in.put_in_place() == []
