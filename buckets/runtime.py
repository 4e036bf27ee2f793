"""The CUDA runtime library that torch has loaded, called directly where a step has no time to lose,
and for what torch has no function.

Its functions return a status, 0 for success. These are functions of the runtime, not of the driver,
because torch's profiler shows the runtime's calls. The "last error" is cleared after a failure, so
that torch never finds it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

HOST_TO_DEVICE = 1
"""`cudaMemcpyKind`."""


@functools.cache
def runtime() -> Any:
    """The library; None where there is no such file."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD)
        pointer = ctypes.c_void_p
        library.cudaGraphLaunch.argtypes = (pointer, pointer)
        library.cudaEventRecord.argtypes = (pointer, pointer)
        library.cudaEventElapsedTime.argtypes = (ctypes.POINTER(ctypes.c_float), pointer, pointer)
        copy = (pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer)
        library.cudaMemcpyAsync.argtypes = copy
        return library
    except (OSError, AttributeError):
        return None
