"""Kernels of a graph that ask for cache in place of shared memory.

    CapturedGraph(step, ..., adjust=lambda graph: prefer_cache(graph, device))

A multiprocessor has one memory, which is its L1 cache and the shared memory of its programs. The
driver divides it anew for each kernel: by default so that as many programs fit as registers allow,
also where the launch has fewer. What is left to the cache limits how many loads can be on their
way, those of the next kernel, which starts early, too.

So a kernel that needs little shared memory asks here for as much cache as the driver can give it.
This is a hint: it changes no result, and the driver may decide otherwise.

Source: CUDA Driver API, "CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT".
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from graphengine.buckets.driver import Functions, driver, loaded
from graphengine.buckets.graphs.launches import KernelNodeParams

_log = logging.getLogger(__name__)

LONE_BYTES, TOGETHER_BYTES = 64 * 1024, 8 * 1024
"""The most shared memory with which a kernel asks for cache: of a program that has a multiprocessor
for itself, and of all programs that share one."""

# What CUDA itself takes of shared memory for each program.
_OWN_BYTES = 1024
_KERNEL_NODE = 0
_STATIC_BYTES = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_CARVEOUT = 14  # CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_MOST_CACHE = 0  # CU_SHAREDMEM_CARVEOUT_MAX_L1
# CUlaunchAttributeValue is a union of this many words of 32 bits.
_VALUE_WORDS = 16

_INT = ctypes.POINTER(ctypes.c_int)
_PROTOTYPES: Mapping[str, tuple[Any, ...]] = {
    "cuGraphKernelNodeGetParams_v2": (ctypes.c_void_p, ctypes.POINTER(KernelNodeParams)),
    "cuGraphKernelNodeSetAttribute": (ctypes.c_void_p, ctypes.c_int, _INT),
    "cuFuncGetAttribute": (_INT, ctypes.c_int, ctypes.c_void_p),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (
        _INT,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_size_t,
    ),
}


class Needs(NamedTuple):
    """What a launch of a kernel takes.

    programs  how many the launch has
    resident  how many fit on a multiprocessor at once, with all of its memory as shared memory
    shared    bytes of shared memory of each
    """

    programs: int
    resident: int
    shared: int


def wants_cache(needs: Needs, multiprocessors: int) -> bool:
    """Whether a launch uses so little shared memory that it had better have cache."""
    together = min(needs.resident, -(-needs.programs // multiprocessors))
    used = together * (needs.shared + _OWN_BYTES)
    return used <= (LONE_BYTES if together == 1 else TOGETHER_BYTES)


def prefer_cache(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
    """Have kernels with little shared memory ask for cache; returns how many do.

    `graph` was captured with `keep_graph=True` and is not instantiated yet: later it has no effect.
    Kernels of nested graphs, and those of libraries without a `CUfunction`, are left as they are. A
    driver that refuses is logged. RuntimeError for a graph that is not kept or not captured.
    """
    handle = int(graph.raw_cuda_graph())
    library, nodes = _library(), driver()
    if library is None or nodes is None:
        return 0
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    asked = 0
    try:
        for node, kind in nodes.nodes(handle):
            needs = library.needs(node) if kind == _KERNEL_NODE else None
            if needs is not None and wants_cache(needs, multiprocessors):
                library.ask_for_cache(node)
                asked += 1
    except RuntimeError as refused:
        _log.info("kernels do not ask for cache: %s", refused)
    return asked


class CarveoutLibrary(Functions):
    """The driver's functions for kernel nodes; `library` is libcuda, or stands in for it."""

    def __init__(self, library: Any) -> None:
        super().__init__(library, _PROTOTYPES)

    def needs(self, node: int) -> Needs | None:
        """What a kernel node needs; None if its function is not a `CUfunction`."""
        params = KernelNodeParams()
        self.call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        if not params.function:
            return None
        resident, static = ctypes.c_int(), ctypes.c_int()
        self.call("cuFuncGetAttribute", ctypes.byref(static), _STATIC_BYTES, params.function)
        self.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(resident),
            params.function,
            math.prod(params.block),
            params.shared_bytes,
        )
        shared = params.shared_bytes + static.value
        return Needs(math.prod(params.grid), max(1, resident.value), shared)

    def ask_for_cache(self, node: int) -> None:
        """Have a kernel node ask for as much cache as there is beside one of its programs."""
        value = (ctypes.c_int * _VALUE_WORDS)(_MOST_CACHE)
        self.call("cuGraphKernelNodeSetAttribute", node, _CARVEOUT, value)


@functools.cache
def _library() -> CarveoutLibrary | None:
    return loaded(CarveoutLibrary)
