"""Differences between the supported versions of Triton, 3.6 to 3.9.

Kernels are written once and use this module's names for whatever was renamed or moved:

    3.7  `thread_barrier` became `barrier`
    3.8  `async_copy_global_to_shared` became `async_load`, and `async_copy_shared_to_global`
         `async_store`; from 3.9 on the old names raise
    3.9  `_reinterpret` became `reinterpret`
    3.9  a `FutureKernel` loses its `future` once it has a result or has failed
    3.10 products and sums are no longer contracted unless a launch asks for it

Nothing else in this package uses private parts of Triton or Gluon.
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
"""The newest version that the kernels were tried with."""

OPTIONS = {"enable_fp_fusion": True}
"""Options of every launch. Fusing a product and a sum rounds once, not twice, and changes bits."""

UNFUSED = {"enable_fp_fusion": False}
"""Options of kernels whose bits must be equal to another kernel's, or to those of PyTorch: which
products and sums a compiler fuses depends on the code around them."""

sync_threads = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait for all threads of the program."""

load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Begin a copy from global to shared memory: (memory, pointers, mask)."""

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Begin a TMA copy of a tile to shared memory: (descriptor, place, mbarrier, memory, pred)."""

store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Begin a TMA copy of a tile from shared memory: (descriptor, place, memory)."""


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """View shared memory with another type, shape and layout."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


def future_of(kernel: triton.FutureKernel) -> Future[Any] | None:
    """The pending compilation of a kernel; None, from 3.9 on, once its result was asked for."""
    return cast("Future[Any] | None", kernel.future)


def bits_of_triton(device: str) -> dict[str, str]:
    """The Triton version that kernel bits on this device type depend on: {"triton": "3.6"}."""
    return {} if device == "cpu" else {"triton": _minor(triton.__version__)}


def warn_if_untried(version: str | None = None) -> None:
    """Warn if a version of Triton, by default the installed one, is newer than `NEWEST`."""
    version = version or str(triton.__version__)
    if tuple(map(int, _minor(version).split("."))) > tuple(map(int, NEWEST.split("."))):
        warnings.warn(
            f"triton {version} is newer than {NEWEST}, the newest that the kernels were tried with",
            stacklevel=2,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
