"""The kernels that a captured graph launches: each one's function and the bytes of its parameters.

    for launch in read_launches(graph):           # a torch.cuda.CUDAGraph(keep_graph=True)
        print(launch.path, launch.name, launch.parameters)

A graph freezes these bytes: addresses of tensors and numbers of the host. They differ from one
capture to the next, which is why a `GraphStructure` has none of them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, SupportsInt

import torch

from graphengine.buckets.graphs.introspect import inspect_graph
from graphengine.buckets.graphs.structure import GraphNode, GraphStructure

_WORD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """One kernel node.

    `path` names it as in messages: "3" is node 3, "4/0/2" node 2 of graph 0 of node 4. `function`
    is the driver's handle of the compiled kernel; two variants of one name have different ones.
    `parameters` are the bytes of each parameter in their order, None where the driver does not
    tell.
    """

    path: str
    name: str | None
    function: int = 0
    grid: tuple[int, int, int] | None = None
    parameters: tuple[bytes, ...] | None = ()

    def words(self) -> Iterator[tuple[int, int, int]]:
        """(parameter, offset in it, value) of each aligned word of 8 bytes, where addresses are."""
        for place, value in enumerate(self.parameters or ()):
            for offset in range(0, len(value) - _WORD + 1, _WORD):
                yield place, offset, int.from_bytes(value[offset : offset + _WORD], "little")


def read_launches(graph: torch.cuda.CUDAGraph | SupportsInt) -> list[KernelLaunch]:
    """The kernels of a graph in the order of its structure, nested graphs included.

    `graph` and errors are as for `inspect_graph`. Bodies that cannot be looked into are left out.
    """
    handles: list[int] = []
    structure = inspect_graph(graph, on_kernel=lambda handle: handles.append(int(handle)))
    library = _library()
    return [
        KernelLaunch(path=path, name=node.name, grid=node.grid, **library.read(handle))
        for (path, node), handle in zip(_kernels(structure, ""), handles, strict=True)
    ]


def _kernels(structure: GraphStructure, path: str) -> Iterator[tuple[str, GraphNode]]:
    """Kernel nodes with their paths, in the order in which `inspect_graph` reads them."""
    for node in structure.nodes:
        if node.kind == "kernel":
            yield f"{path}{node.index}", node
        for number, nested in enumerate(node.graphs or ()):
            yield from _kernels(nested, f"{path}{node.index}/{number}/")


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


_SIZE = ctypes.POINTER(ctypes.c_size_t)
# The names that libcuda exports. The last two came with CUDA 12.4.
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuGraphKernelNodeGetParams_v2": (ctypes.c_void_p, ctypes.POINTER(KernelNodeParams)),
    "cuFuncGetParamInfo": (ctypes.c_void_p, ctypes.c_size_t, _SIZE, _SIZE),
    "cuKernelGetParamInfo": (ctypes.c_void_p, ctypes.c_size_t, _SIZE, _SIZE),
}


class Library:
    """Reads kernel nodes; `library` is libcuda, or stands in for it.

    cuda-bindings are not used, as they hand out the parameters of a node by a copy of their own.
    """

    def __init__(self, library: Any) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in _PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, ctypes.c_int
                self._functions[name] = function
        self._sizes: dict[int, tuple[int, ...]] = {}

    def read(self, node: int) -> dict[str, Any]:
        """`function` and `parameters` of a kernel node; RuntimeError if the driver refuses."""
        params = KernelNodeParams()
        status = self._functions["cuGraphKernelNodeGetParams_v2"](node, ctypes.byref(params))
        if status:
            raise RuntimeError(f"cuGraphKernelNodeGetParams failed with CUresult {status}")
        return {
            "function": params.function or params.kernel or 0,
            "parameters": self._parameters(params),
        }

    def _parameters(self, params: KernelNodeParams) -> tuple[bytes, ...] | None:
        if not params.parameters:
            return None if params.extra else ()
        sizes = self._parameter_sizes(params.function or 0, params.kernel or 0)
        if sizes is None:
            return None
        return tuple(
            ctypes.string_at(params.parameters[place], size) for place, size in enumerate(sizes)
        )

    def _parameter_sizes(self, function: int, kernel: int) -> tuple[int, ...] | None:
        """Bytes of each parameter; None if no call of the driver tells."""
        for call, handle in (("cuFuncGetParamInfo", function), ("cuKernelGetParamInfo", kernel)):
            if not handle or call not in self._functions:
                continue
            if handle not in self._sizes:
                self._sizes[handle] = self._ask_sizes(self._functions[call], handle)
            if self._sizes[handle]:
                return self._sizes[handle]
        return None

    @staticmethod
    def _ask_sizes(function: Any, handle: int) -> tuple[int, ...]:
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        # It fails for the first number past the last parameter.
        while not function(handle, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return tuple(sizes)


@functools.cache
def _library() -> Library:
    return Library(ctypes.CDLL("libcuda.so.1"))
