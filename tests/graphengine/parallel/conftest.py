"""How tests of ranks start their processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from graphengine.parallel import ranks

# Before a child collects anything: a group of gloo that its parent has dropped, but not collected,
# would join threads there that only the parent has. Such a child hangs, or ends by SIGSEGV.
os.register_at_fork(after_in_child=gc.freeze)


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks on a CPU are forked: they need not import torch and the engine, which takes seconds of
    each. The programs of `test_rank_failures.py` and `test_torchrun.py` start them as users do.
    """
    if torch.cuda.is_available():  # A fork has no CUDA.
        yield
        return
    forking = SimpleNamespace(get_context=lambda method: multiprocessing.get_context("fork"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "multiprocessing", forking)
        yield
