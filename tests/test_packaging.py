"""What is installed: the package list, and a wheel that works without the checkout.

An editable install forgives everything that these tests look for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import graphengine
from graphengine.kernels.core.triton_versions import NEWEST
from planted.cases import CPU_CASES

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
# Import name -> folder, the most specific one last.
FOLDERS = {name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()}


def package_folders() -> dict[str, Path]:
    """Import name -> folder, of every folder on disk that holds a Python file."""
    found = {}
    for name, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            below = file.parent.relative_to(folder).parts
            found[".".join([name, *below])] = file.parent
    return found


def wheel_path(file: Path) -> str:
    """Where a file of the checkout lies in the wheel."""
    package = next(name for name, folder in package_folders().items() if folder == file.parent)
    return f"{package.replace('.', '/')}/{file.name}"


def checkout_files() -> list[str]:
    """The files that git knows or would add, relative to the root; not those that it ignores."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


# The list.


def test_every_package_on_disk_is_listed() -> None:
    listed = SETUPTOOLS["packages"]
    assert sorted(listed) == sorted(package_folders())
    assert len(set(listed)) == len(listed)


def test_every_package_has_an_init() -> None:
    missing = [
        name for name, path in package_folders().items() if not (path / "__init__.py").exists()
    ]
    assert not missing


def test_no_folder_with_python_is_left_out() -> None:
    """A folder at the top is a package, or tests, or no place for code."""
    python = [Path(name) for name in checkout_files() if name.endswith(".py")]
    tops = {path.parts[0] for path in python if len(path.parts) > 1}
    assert tops - {"docs", "examples", "plugin", "tests", "training"} == {
        folder.name for folder in FOLDERS.values()
    }


def test_tests_are_no_package() -> None:
    """Only their helpers' rooms are: pytest imports test files by path."""
    packages = {path.parent.parent for path in (ROOT / "tests").rglob("__init__.py")}
    assert packages == {ROOT / "tests" / "support"}


# What an import does.

IMPORT_EVERYTHING = """
    import ctypes, importlib, json, sys, types
    import torch, triton

    def refuse(name):
        def refused(*arguments, **options):
            raise AssertionError(f"an import calls {name}")
        return refused

    calls = {
        torch.cuda: [
            "is_available", "device_count", "init", "_lazy_init", "synchronize", "current_device",
            "get_device_capability", "get_device_name", "get_device_properties", "mem_get_info",
        ],
        torch._C: [name for name in dir(torch._C) if name.startswith("_cuda_")],
    }
    try:
        from cuda.bindings import driver
    except ImportError:
        pass
    else:
        calls[driver] = [
            name for name, value in vars(driver).items()
            if name.startswith("cu") and callable(value) and not isinstance(value, type)
        ]
    for module, names in calls.items():
        for name in names:
            # Classes that others inherit from stay what they are.
            if not isinstance(getattr(module, name, None), type):
                setattr(module, name, refuse(name))
    sys.addaudithook(
        lambda event, found: refuse("the driver")()
        if event == "ctypes.dlopen" and "libcuda.so" in str(found[0]) else None
    )
    for name in json.loads(sys.argv[1]):
        importlib.import_module(name)
    from graphengine import EngineConfig
    try:
        EngineConfig()
    except AssertionError as error:
        print(error)
    torch.cuda.is_available = lambda: True
    print(EngineConfig().device)
    torch.cuda.is_available = lambda: False
    print(EngineConfig().device)
"""


def test_no_import_asks_the_driver() -> None:
    """A process that has asked it cannot fork, nor choose its devices by CUDA_VISIBLE_DEVICES."""
    modules = [
        ".".join([name, *(() if file.stem == "__init__" else (file.stem,))])
        for name, folder in package_folders().items()
        for file in folder.glob("*.py")
    ]
    assert {"graphengine.config", "graphengine.kernels.step.swap", "graphengine.profiles"} < {
        *modules
    }
    code = textwrap.dedent(IMPORT_EVERYTHING)
    command = [sys.executable, "-P", "-c", code, json.dumps(sorted(modules))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The one who asks is the config, each time that one is made.
    assert done.stdout.split("\n") == ["an import calls is_available", "cuda", "cpu", ""]


FORK_BEHIND_THE_IMPORT = """
    import os, sys
    import graphengine, torch
    from graphengine import profiles

    child = os.fork()
    if not child:
        print(torch.zeros(1, device="cuda").item(), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(graphengine.EngineConfig().device)
    sys.exit(status)
"""


@pytest.mark.gpu
def test_a_child_forked_after_the_import_may_use_the_gpu() -> None:
    command = [sys.executable, "-P", "-c", textwrap.dedent(FORK_BEHIND_THE_IMPORT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0.0\ncpu\n"), done.stderr


# The name.

WORD = r"[ \t]+['\"]?[\w./\-\[\],=<>~!:]+['\"]?"
INSTALLER = rf"\b(?:pip3?|pipx|uv|poetry|conda)(?:{WORD})*?[ \t]+(?:install|add)"
# By itself or with extras; on an index that name is somebody else's.
STRANGER = re.compile(rf"{INSTALLER}(?:{WORD})*?[ \t]+['\"]?graphengine(?![\w,-])|graphengine\[")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("pip install graphengine", True),
        ("uv pip install -U pytest 'graphengine==0.1'", True),
        ("with the extra `graphengine[report]`", True),
        ("pip install graphengine-decode", False),
        (
            "pip install '.[guided]' in the checkout of graphengine, or pip install llguidance",
            False,
        ),
        ("pip install ./graphengine_decode-0.1.0-py3-none-any.whl", False),
    ],
)
def test_what_installs_somebody_elses_package(line: str, wrong: bool) -> None:
    assert bool(STRANGER.search(line)) is wrong


def test_no_text_tells_to_install_somebody_elses_package() -> None:
    """The distribution is called graphengine-decode, and no index has it yet."""
    found = []
    for name in checkout_files():
        if name != "tests/test_packaging.py" and b"\0" not in (data := (ROOT / name).read_bytes()):
            lines = data.decode("utf-8", errors="replace").splitlines()
            found += [
                f"{name}:{number}: {line.strip()[:200]}"
                for number, line in enumerate(lines, start=1)
                if STRANGER.search(line)
            ]
    assert not found


# The wheel.


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to build from: it stays clean, and ignored files stay out."""
    folder = tmp_path_factory.mktemp("source")
    for name in checkout_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


# Calls the hooks of its arguments. Compression would take half of the time.
BACKEND = """
    import sys, zlib
    compressobj = zlib.compressobj
    zlib.compressobj = lambda level=-1, *options: compressobj(0, *options)
    import setuptools.build_meta
    folder, *hooks = sys.argv[1:]
    for hook in hooks:
        getattr(setuptools.build_meta, hook)(folder)
"""


def build(source: Path, folder: Path, *hooks: str) -> None:
    """Call these hooks of the build backend (PEP 517), as pip and `build` do."""
    code = textwrap.dedent(BACKEND)
    command = [sys.executable, "-P", "-c", code, str(folder), *hooks]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr


def unpack(wheel: Path) -> Path:
    """The wheel's files, unpacked as an installer would."""
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    build(source, folder, "build_wheel", "build_sdist")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    return unpack(wheel)


@pytest.fixture(scope="module")
def plugin(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin's own distribution, unpacked."""
    folder = tmp_path_factory.mktemp("plugin")
    build(source / "plugin", folder, "build_wheel")
    (path,) = folder.glob("*.whl")
    return unpack(path)


def with_wheel(installed: Path) -> dict[str, str]:
    """The environment of a process that finds the unpacked wheel and the dependencies."""
    libraries = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    return environment | {"PYTHONPATH": os.pathsep.join([str(installed), *libraries])}


def run_installed(installed: Path, code: str) -> dict[str, Any]:
    """Run `code` with the unpacked wheel and the dependencies alone; it prints JSON.

    It runs in the checkout, which `-P` keeps off the path; `-S` leaves out the hooks of editable
    installs.
    """
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=with_wheel(installed),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.endswith(".py")}
    on_disk = {
        wheel_path(file) for folder in package_folders().values() for file in folder.glob("*.py")
    }
    assert names == on_disk


@pytest.mark.slow
def test_the_wheel_holds_the_data_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
        description = archive.read(metadata).decode()
        licences = [
            archive.read(metadata.replace("METADATA", f"licenses/{name}"))
            for name in ("LICENSE", "graphengine/demo/PSF-LICENSE.txt")
        ]
    assert "graphengine/py.typed" in names
    for device in ("h200", "h100-80gb-hbm3"):
        assert f"graphengine/tuned/nvidia-{device}.json" in names
    demo = ROOT / "graphengine" / "demo"
    assert licences == [
        (ROOT / "LICENSE").read_bytes(),
        (demo / "PSF-LICENSE.txt").read_bytes(),
    ]
    assert "\nName: graphengine-decode\n" in description
    assert "License-Expression: Apache-2.0 AND PSF-2.0\n" in description
    # An index has the description and no other page to link to.
    assert "\nDescription-Content-Type: text/markdown\n" in description
    assert "\n# graphengine\n" in description
    assert not re.findall(r"\]\((?!https?:)", description)
    assert "[console_scripts]\ngraphengine = graphengine.cli.main:main" in entry_points
    assert "[pytest11]\ngraphengine = graphengine.testing.plugin" in entry_points
    assert "graphengine/testing/README.md" in names
    assert {
        f"graphengine/profiles/runs/page/page.{kind}" for kind in ("html", "css", "js")
    } <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"graphengine", metadata.split("/")[0]}


@pytest.mark.slow
def test_the_wheel_holds_the_demo(wheel: Path) -> None:
    """The checkpoint byte for byte, and the texts beside the code that belong to it."""
    demo = ROOT / "graphengine" / "demo"
    files = [
        file
        for file in demo.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".py"
    ]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for file in files:
            name = file.relative_to(ROOT).as_posix()
            assert name in names, f"{name} is not in the wheel"
            assert archive.read(name) == file.read_bytes(), name


@pytest.fixture(scope="module")
def imported(installed: Path) -> dict[str, Any]:
    """What the import of the unpacked wheel finds, and what transformers then does."""
    return run_installed(
        installed,
        """
        import importlib, importlib.util, json, sys
        import graphengine
        parts = ["kernels", "buckets", "profiles"]
        names = ["graphengine"] + [f"graphengine.{part}" for part in parts]
        files = {name: importlib.import_module(name).__file__ for name in names}
        found = {"files": files, "tops": [part for part in parts if part in sys.modules]}
        if importlib.util.find_spec("transformers"):
            import transformers.integrations.hub_kernels
            spec = importlib.util.find_spec("kernels")
            found["kernels"] = spec and spec.origin
            found["ours"] = [name for name in ("buckets", "profiles") if name in sys.modules]
        print(json.dumps(found))
        """,
    )


@pytest.mark.slow
def test_the_wheel_imports_outside_of_the_checkout(
    installed: Path, imported: dict[str, Any]
) -> None:
    assert imported["tops"] == []
    assert imported["files"] == {
        name: str(installed / name.replace(".", "/") / "__init__.py")
        for name in (
            "graphengine",
            "graphengine.kernels",
            "graphengine.buckets",
            "graphengine.profiles",
        )
    }


TRITON_OF_TORCH = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}
"""What each torch for CUDA asks for: pip refuses another one beside it."""


def pins_of(constraints: str) -> dict[str, str]:
    """The minor versions in a file of constraints, by package."""
    lines = (ROOT / constraints).read_text().splitlines()
    pins = (line.split("==") for line in lines if "==" in line)
    return {name: version.rsplit(".", 1)[0] for name, version in pins}


def test_constraints_fit_each_other_on_any_index() -> None:
    pins = pins_of("constraints.txt")
    assert TRITON_OF_TORCH[pins["torch"]] == pins["triton"]


def test_continuous_integration_has_the_oldest_and_the_newest_triton() -> None:
    assert pins_of("constraints-minimum.txt")["triton"] == min(TRITON_OF_TORCH.values())
    assert pins_of("constraints-newest.txt")["triton"] == NEWEST
    assert "minimum newest" in (ROOT / ".ci/run").read_text()


def test_each_pair_of_torch_and_triton_is_admitted_and_on_the_page() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    admitted = {each.name: each.specifier for each in map(Requirement, asked)}
    page = (ROOT / "docs/installing.md").read_text()
    for torch, triton in TRITON_OF_TORCH.items():
        assert admitted["torch"].contains(f"{torch}.0"), torch
        assert admitted["triton"].contains(f"{triton}.0"), triton
        assert re.search(rf"\| [\d., ]*{re.escape(torch)}[\d., ]* \| {triton} \|", page), torch
    assert max(TRITON_OF_TORCH.values()) == NEWEST


def test_one_version_is_everywhere() -> None:
    versions = [
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["version"]
        for folder in ("", "plugin")
    ]
    assert versions == [graphengine.__version__] * 2
    assert f"\nversion: {graphengine.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {graphengine.__version__} " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_the_source_distribution_has_what_builds_and_explains(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "Makefile", "constraints.txt", "constraints-minimum.txt", "constraints-newest.txt",
        "LICENSE", "README.md",
        "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "docs/design.md",
        "plugin/pyproject.toml", "profiles/pictures/stall.png", "kernels/core/philox.py",
        "graphengine/demo/PSF-LICENSE.txt", "graphengine/demo/checkpoint/model.safetensors",
    } <= names  # fmt: skip
    assert not [name for name in names if name.startswith("tests")]


# The plugin's own distribution.


@pytest.mark.slow
def test_the_plugin_has_no_engine(plugin: Path) -> None:
    files = {path.relative_to(plugin).as_posix() for path in plugin.rglob("*") if path.is_file()}
    package = {name for name in files if name.startswith("graphengine/")}
    ours = {"__init__.py", "py.typed", "testing/README.md"}
    for folder, name in (("graphengine/testing", "testing"), ("buckets", "buckets")):
        below = (ROOT / folder).rglob("*.py")
        ours |= {f"{name}/{path.relative_to(ROOT / folder).as_posix()}" for path in below}
    assert package == {f"graphengine/{name}" for name in ours}
    (licence,) = plugin.glob("*.dist-info/licenses/LICENSE")
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
    (metadata,) = plugin.glob("*.dist-info/METADATA")
    required = re.findall(r"^Requires-Dist: ([\w-]+)", metadata.read_text(), re.MULTILINE)
    assert required == ["torch", "pytest"]


# Hides the modules named in its first argument from all that pytest then imports.
HIDING = """
    import json, sys

    class Hide:
        def __init__(self, finder, names):
            self.finder, self.names = finder, names

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in self.names:
                return None
            return self.finder.find_spec(name, path, target)

    hidden = {*json.loads(sys.argv[1])}
    sys.meta_path[:] = [Hide(finder, hidden) for finder in sys.meta_path]

    import pytest
    sys.exit(pytest.main(sys.argv[2:]))
"""


def required_by(*names: str) -> set[str]:
    """These distributions and all that they require here, extras aside."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        each = waiting.pop()
        if (name := canonicalize_name(each.name)) in found:
            continue
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            found.add(name)
            waiting += map(Requirement, importlib.metadata.requires(name) or ())
    return found


def hidden_from(*names: str) -> list[str]:
    """Modules of all distributions here that these neither are nor require."""
    known = required_by(*names)
    return [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if module != "graphengine" and not known & {canonicalize_name(name) for name in owners}
    ]


def first_block(page: Path, heading: str = "") -> str:
    """The first Python of the page past a heading."""
    return (
        page.read_text("utf-8")
        .partition(heading)[2]
        .partition("```python\n")[2]
        .partition("```")[0]
    )


@pytest.mark.slow
def test_the_plugin_runs_with_torch_and_pytest_alone(plugin: Path, tmp_path: Path) -> None:
    """The tests of its pages and of each fixture, and what it says where an engine is wanted."""
    hidden = hidden_from("torch", "pytest")
    assert {"numpy", "safetensors", "tokenizers", "nvtx"} <= {*hidden}
    on_cpu = {case.check: case for case in reversed(CPU_CASES)}
    source = (plugin / "graphengine" / "testing" / "plugin.py").read_text("utf-8")
    fixtures = re.findall(r"^@pytest\.fixture.*\ndef (\w+)", source, re.MULTILINE)
    others = [name for name in fixtures if name not in on_cpu]
    assert "no_sync" in others and len(on_cpu) + len(others) == len(fixtures)
    programs = {
        "step": first_block(ROOT / "plugin" / "README.md", "# "),
        "readme": first_block(ROOT / "README.md", "## 2. "),
        "mlp": first_block(ROOT / "graphengine" / "testing" / "README.md", "## A first test"),
        "engine": "def test_engine():\n    from graphengine import Engine\n",
        "numpy": "def test_numpy():\n    from graphengine.buckets import StaticBuffers\n",
        **{name: case.source(case.sound) for name, case in on_cpu.items()},
        **{name: f"def test_{name}({name}):\n    assert {name}\n" for name in others},
    }
    for name, program in programs.items():
        (tmp_path / f"test_{name}.py").write_text(program)
    options = ["-p", "graphengine.testing.plugin", "-p", "no:cacheprovider", "-q"]
    options += [f"--rootdir={tmp_path}", "--graph-snapshot-update"]
    code = textwrap.dedent(HIDING)
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code, json.dumps(hidden), *options],
        cwd=tmp_path,
        env=with_wheel(plugin)
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    # Those of the pages: one each of the first two, three of five of the third.
    passed, skipped = len(on_cpu) + 5, len(others) + 2
    assert f"2 failed, {passed} passed, {skipped} skipped" in done.stdout, done.stdout + done.stderr
    assert "graphengine.Engine is part of the distribution graphengine-decode" in done.stdout
    assert "No module named 'numpy'" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wheel", "plugin"])
def test_python_in_the_root_finds_the_checkout(request: pytest.FixtureRequest, how: str) -> None:
    """Its folder stands in for an installed package, and `kernels` and others beside it count."""
    code = "import graphengine, graphengine.kernels as k, graphengine.profiles.tables.pages as t\n"
    code += "print(graphengine.__file__, k.__file__, t.__file__, sep='\\n')"
    environment = with_wheel(request.getfixturevalue("installed" if how == "wheel" else how))
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [
        str(ROOT / name)
        for name in ("graphengine/__init__.py", "kernels/__init__.py", "profiles/tables/pages.py")
    ], done.stderr


# Run from the checkout's root, as `python -m pytest tests/...` is, where Python looks there first.

WHERE = """
from pathlib import Path

import graphengine
import graphengine.testing
from graphengine import (buckets, kernels)


def test_it(assert_pointers_stable):
    assert assert_pointers_stable is graphengine.testing.assert_pointers_stable
    print("found in", Path(graphengine.__file__).parents[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["as here", "wheel"])
def test_tests_run_from_the_checkout_without_an_option(
    request: pytest.FixtureRequest, tmp_path: Path, how: str
) -> None:
    # Beside a conftest like that of tests/, so that nothing is written into the checkout.
    (tmp_path / "conftest.py").write_text(
        f"import runpy\n\nrunpy.run_path({str(ROOT / 'tests' / 'conftest.py')!r})\n"
    )
    (tmp_path / "test_where.py").write_text(WHERE)
    installed = Path(graphengine.__file__).parents[1]
    environment = dict(os.environ)
    if how == "wheel":
        installed = request.getfixturevalue("installed")
        environment = with_wheel(installed)
    environment.pop("PYTHONSAFEPATH", None)
    options = ["-p", "graphengine.testing.plugin", "-p", "no:cacheprovider", "-sq"]
    options += [f"--rootdir={tmp_path}", f"--confcutdir={tmp_path}", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, *["-S"][: how == "wheel"], "-m", "pytest", *options, str(tmp_path)],
        cwd=ROOT,
        env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"found in {installed}\n" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_transformers_does_not_find_our_kernels(installed: Path, imported: dict[str, Any]) -> None:
    """Hugging Face has a package `kernels`, which transformers imports where it finds one."""
    assert imported["ours"] == []
    assert not str(imported["kernels"]).startswith((str(ROOT), str(installed)))
