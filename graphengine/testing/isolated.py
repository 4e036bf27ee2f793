"""Runs code in a Python process of its own, so that it may break the CUDA context."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphengine.testing.arguments import number
from graphengine.testing.errors import GraphCheckError, hide_frame

__tracebackhide__ = hide_frame

# The child searches modules where this process does, so that it finds the test module's imports. It
# calls the function named in its last argument, if any.
_CHILD = """
import importlib.util, json, sys

path, name, search = sys.argv[1:]
sys.path[:] = json.loads(search)
spec = importlib.util.spec_from_file_location("isolated", path)
module = sys.modules["isolated"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
if name:
    getattr(module, name)()
"""

_MOST_SHOWN = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedRun:
    """How a process ended: its exit status (a signal's number negated) and its output."""

    status: int
    stdout: str
    stderr: str


def run_isolated(
    program: Callable[[], object] | str,
    *,
    timeout: float = 120.0,
    status: int | None = 0,
) -> IsolatedRun:
    """Run `program` in a fresh Python process and return how it ended.

    `program` is a function without arguments at the top level of a file (of the test module, say,
    which the child imports anew), or source text. Nothing is pickled or forked: the child shares
    no state, no fixtures and no CUDA context with this process.

    GraphCheckError, with the end of what the child wrote, if it ends with another exit status than
    `status` (None allows all; an exception is 1, a signal its number negated), or not within
    `timeout` seconds, after which it is killed with all processes that it started and that have not
    left its group. ValueError for a function that the child could not find or that a call would not
    run: a generator function or an `async def`.
    """
    number("timeout", timeout, zero=False)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(program, str):
            path, name = Path(folder, "isolated.py"), ""
            path.write_text(textwrap.dedent(program), encoding="utf-8")
        else:
            path, name = _place_of(program)
        command = [sys.executable, "-c", _CHILD, str(path), name, json.dumps(sys.path)]
        run = _run(command, name or "the program", timeout)
    if status is not None and run.status != status:
        raise GraphCheckError(
            f"{name or 'the program'} ended with {_describe(run.status)}, expected "
            f"{_describe(status)}{_shown('stdout', run.stdout)}{_shown('stderr', run.stderr)}"
        )
    return run


def _run(command: list[str], name: str, timeout: float) -> IsolatedRun:
    """Like `subprocess.run`, but a timeout or an error also kills what the child started."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            _kill(child)
            raise GraphCheckError(
                f"{name} did not end within {timeout:g} s and was killed"
                f"{_shown('stdout', late.stdout)}{_shown('stderr', late.stderr)}"
            ) from None
        except BaseException:
            _kill(child)
            raise
    return IsolatedRun(status=child.returncode, stdout=stdout, stderr=stderr)


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill the child's group, which is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _place_of(function: Callable[[], object]) -> tuple[Path, str]:
    name = getattr(function, "__qualname__", repr(function))
    source = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if source is None or not name.isidentifier():
        raise ValueError(f"{name} is no function at the top level of a file")
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    if any(is_of_kind(function) for is_of_kind in kinds):
        raise ValueError(f"a call of {name} runs none of its body: it has `yield` or `async`")
    return Path(source).resolve(), name


def _describe(status: int) -> str:
    if status < 0:
        # Real-time signals have numbers only.
        names = {int(known): f" ({known.name})" for known in signal.Signals}
        return f"signal {-status}{names.get(-status, '')}"
    return f"exit status {status}"


def _shown(name: str, text: str | bytes | None) -> str:
    if isinstance(text, bytes):  # of a process that was killed
        text = text.decode(errors="replace")
    return f"\n{name}:\n{text[-_MOST_SHOWN:].rstrip()}" if text else ""
