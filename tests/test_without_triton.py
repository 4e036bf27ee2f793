"""Where triton is not installed, as on macOS and Windows: imports, the CPU, the plugin, reports.

What else these systems lack is missing too.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import triton

from graphengine.kernels.core import stand_in

MARK = "--- "
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

    # What torch and the standard library have of these, they need on this system.
    import ctypes, multiprocessing.connection, os, pathlib, signal, socket, subprocess, tempfile
    import torch

    for name in ("fcntl", "grp", "nvtx", "pwd", "resource", "termios", "tty"):
        sys.modules[name] = None
    missing = {
        os: ["fork", "getuid", "killpg", "sched_getaffinity", "sysconf", "O_PATH", "O_DIRECTORY"],
        signal: ["SIGKILL", "SIGALRM", "SIGHUP"],
        socket: ["AF_UNIX"],
    }
    for module, names in missing.items():
        for name in names:
            delattr(module, name)
    # Windows, with 16 GiB of which 8 are available.
    class WinDLL:
        def __init__(self, name):
            assert name == "kernel32"

        def GlobalMemoryStatusEx(self, status):
            assert status._obj.size == 64
            status._obj.total, status._obj.available = 16 << 30, 8 << 30
            return 1

    ctypes.WinDLL = WinDLL
    is_file = pathlib.Path.is_file
    pathlib.Path.is_file = lambda path: str(path) != "/proc/meminfo" and is_file(path)
"""


# What each of the tests below asks, one after the other in one process without triton. The first
# are about what the import of the kernels alone leaves behind.
QUESTIONS = {
    "the stand-in": """
        import importlib.util
        import graphengine.kernels
        print(importlib.util.find_spec("triton"), [n for n in sys.modules if "triton" == n[:6]])
        import torch.utils._triton
        print(torch.utils._triton.has_triton_package())
    """,
    "kernels": """
        import pathlib
        root = pathlib.Path(graphengine.kernels.__file__).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(["graphengine.kernels", *parts]).removesuffix(".__init__")
            if name not in sys.modules:
                print(name)
    """,
    "a launch": """
        from graphengine.kernels.step.begin import _begin_decode_kernel as kernel
        try:
            kernel[(1,)](None)
        except RuntimeError as error:
            print(error)
    """,
    "memory": """
        from graphengine.opening.budget.host_memory import available_host_bytes
        print(available_host_bytes())
    """,
    "the plugin": """
        import graphengine.testing, graphengine.testing.plugin
        for name in graphengine.testing.__all__:
            getattr(graphengine.testing, name)
        import graphengine.cli.main, graphengine.profiles.bench, graphengine.profiles.report
        from graphengine.cli.main import main
        from graphengine.observe.environment import environment
        key = graphengine.testing.environment_key()
        print(key.rpartition("_")[2], environment("cpu")["triton"])
    """,
}
ENGINE = """
    from graphengine import (Engine, SamplingParams)
    from graphengine.demo import checkpoint_path
    from graphengine.speculative import MTP

    options = {"device": "cpu", "max_batch": 3, "max_seq_len": 64, "speculative": MTP(k=2)}
    with Engine.from_pretrained(checkpoint_path(), **options) as engine:
        params = SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=8, logprobs=1)
        print(engine.generate("def f(", params).token_ids)
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the code of each question prints in a process that cannot find triton."""
    parts = [HIDE]
    for name, code in (QUESTIONS | {"an engine": ENGINE}).items():
        parts += [f"print({MARK + name!r})", code]
    source = "\n".join(map(textwrap.dedent, parts))
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [part.partition("\n") for part in done.stdout.split(MARK)[1:]]
    return {name: lines for name, _, lines in found}


@pytest.mark.usefixtures("cpu_defaults")
def test_an_engine_runs_on_the_cpu_with_the_same_tokens(
    printed: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    exec(textwrap.dedent(ENGINE), {})
    assert printed["an engine"] == capsys.readouterr().out != ""


def test_nothing_of_the_stand_in_remains(printed: dict[str, str]) -> None:
    assert printed["the stand-in"] == "None []\nFalse\n"


def test_the_plugin_and_the_reports_can_be_imported(printed: dict[str, str]) -> None:
    assert printed["the plugin"] == "triton-none None\n"


def test_the_memory_is_what_windows_says(printed: dict[str, str]) -> None:
    assert printed["memory"] == f"{8 << 30}\n"


def test_a_launch_says_what_is_missing(printed: dict[str, str]) -> None:
    assert "_kernel is a Triton kernel, and triton is not installed" in printed["a launch"]
    assert 'device="cpu"' in printed["a launch"]


def test_every_kernel_is_imported_while_the_stand_in_is_there(printed: dict[str, str]) -> None:
    assert printed["kernels"] == ""


@pytest.mark.parametrize("number", [1, 2, 3, 8, 9, 1023, 1024, 1025])
def test_sizes_are_those_of_triton(number: int) -> None:
    module = stand_in.module("triton")
    assert module.next_power_of_2(number) == triton.next_power_of_2(number)
    assert module.cdiv(number, 8) == triton.cdiv(number, 8)


def test_where_triton_is_installed_nothing_is_put_in_its_place() -> None:
    assert stand_in.put_in_place() == []
