"""What differs between the versions of Triton that the kernels are compiled with, 3.6 to 3.9.

Kernels are written once, with the names of this module for what has changed its name or its place:

    3.7  `thread_barrier` became `barrier`
    3.8  `async_copy_global_to_shared` became `async_load`, and `async_copy_shared_to_global`
         `async_store`; from 3.9 on the former names raise
    3.9  `_reinterpret` became `reinterpret`
    3.9  a `FutureKernel` has no `future` any more once it has a result, or failed
    3.10 products and sums are no longer contracted unless a launch asks for it

Nothing else here uses what Triton or Gluon keep private.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from typing import Any, cast

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

NEWEST = "3.9"
"""The newest version that was tried."""

OPTIONS = {"enable_fp_fusion": True}
"""Of every launch. Bits depend on whether a product and a sum are rounded once or twice."""

sync_threads = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait for all threads of the program."""

load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""(memory, pointers, mask): begin a copy from global to shared memory."""

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(descriptor, place, mbarrier, memory, pred): begin to copy a tile to shared memory by the TMA."""

store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""(descriptor, place, memory): begin to copy a tile from shared memory by the TMA."""


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same shared memory as another type, shape and layout."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


def future_of(kernel: triton.FutureKernel) -> Future[Any] | None:
    """The compilation that is awaited; None where its result was asked for, from 3.9 on."""
    return cast("Future[Any] | None", kernel.future)


def bits_of_triton(device: str) -> dict[str, str]:
    """What of Triton the bits of kernels on this type of device depend on: {"triton": "3.6"}."""
    return {} if device == "cpu" else {"triton": _minor(triton.__version__)}


def warn_if_untried(version: str | None = None) -> None:
    """Warn of a version of Triton, by default the one at hand, that is newer than `NEWEST`."""
    version = version or str(triton.__version__)
    if tuple(map(int, _minor(version).split("."))) > tuple(map(int, NEWEST.split("."))):
        warnings.warn(
            f"triton {version} is newer than {NEWEST}, the newest that the kernels were tried with",
            stacklevel=2,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
