"""Ranks on a CPU that are forked: they need not import torch and the engine, which takes seconds of
each.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from graphengine.parallel import ranks

# Before a child collects anything: a group of gloo that its parent has dropped, but not collected,
# would join threads there that only the parent has. Such a child hangs, or ends by SIGSEGV.
os.register_at_fork(after_in_child=gc.freeze)


@contextmanager
def ranks_are_forked() -> Iterator[None]:
    """Inside, engines fork their ranks; with a GPU they spawn them, as a fork has no CUDA.

    Other engines with threads of gloo may be open, but idle: then these hold no lock.
    """
    if torch.cuda.is_available():
        yield
        return
    forking = SimpleNamespace(get_context=lambda method: multiprocessing.get_context("fork"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "multiprocessing", forking)
        yield


@contextmanager
def ranks_are_spawned() -> Iterator[None]:
    """Inside, engines spawn their ranks, as those of users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "multiprocessing", multiprocessing)
        yield
