"""pytest in a forked process, which need not import torch and may do to itself what it likes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch


def run_apart(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """As `runpytest_subprocess`, which takes four seconds more, and which a GPU needs: a fork has
    no CUDA.
    """
    if torch.cuda.is_available():
        return pytester.runpytest_subprocess(*options)
    read, write = multiprocessing.Pipe(duplex=False)
    run: Callable[..., pytest.RunResult] = pytester.runpytest_inprocess

    def work(write: Connection) -> None:
        result = run(*options)
        write.send((int(result.ret), result.outlines, result.errlines, result.duration))

    process = multiprocessing.get_context("fork").Process(target=work, args=(write,))
    process.start()
    write.close()
    try:
        ret, outlines, errlines, duration = read.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"pytest ended with status {process.exitcode}") from None
    process.join()
    return pytest.RunResult(ret, outlines, errlines, duration)
