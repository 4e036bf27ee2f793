"""The few functions of the CUDA driver that are needed here, called directly.

cuda-bindings would do, but their first call asks the driver for every function that they know, and
a sanitizer reports an error for each one that is newer than the driver. These are functions of the
driver, not of the runtime: a failing one sets no "last error" that torch would find later. Handles
are integers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Library = TypeVar("Library")

_STATUSES = ("none", "active", "invalidated")
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_HANDLE = ctypes.c_void_p
_HANDLES = ctypes.POINTER(ctypes.c_void_p)
_ENUM = ctypes.POINTER(ctypes.c_int)
_SIZE = ctypes.POINTER(ctypes.c_size_t)
# The names that the library exports; cuda.h maps its own names to them.
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuStreamIsCapturing": (_HANDLE, _ENUM),
    "cuStreamBeginCapture_v2": (_HANDLE, ctypes.c_int),
    "cuStreamEndCapture": (_HANDLE, _HANDLES),
    "cuGraphDestroy": (_HANDLE,),
    "cuGraphUpload": (_HANDLE, _HANDLE),
    "cuGraphGetNodes": (_HANDLE, _HANDLES, _SIZE),
    "cuGraphNodeGetType": (_HANDLE, _ENUM),
}
_ERRORS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class Functions:
    """Functions of `library`, which is libcuda or stands in for it; AttributeError if it lacks one.

    prototypes  the types of each function's arguments, by the name that the library exports
    """

    def __init__(self, library: Any, prototypes: Mapping[str, tuple[Any, ...]]) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in {**_ERRORS, **prototypes}.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. RuntimeError, with the name of the error, where it fails."""
        status = self._functions[name](*arguments)
        if status:
            text = ctypes.c_char_p()
            self._functions["cuGetErrorName"](status, ctypes.byref(text))
            said = text.value.decode() if text.value else f"CUresult {status}"
            raise RuntimeError(f"{name.removesuffix('_v2')} failed: {said}")


class Driver(Functions):
    """The driver's functions for captures. RuntimeError, with the name of the error, where one
    fails.
    """

    def __init__(self, library: Any) -> None:
        super().__init__(library, _PROTOTYPES)

    def capture_status(self, stream: int) -> str:
        """Whether the stream is captured: "none", "active" or "invalidated"."""
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return _STATUSES[status.value]

    def begin_capture(self, stream: int) -> None:
        """Begin a capture of this thread alone: other threads may use CUDA meanwhile."""
        self.call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)

    def drop_capture(self, stream: int) -> None:
        """End the stream's capture, which may be invalid, and free its partial graph."""
        graph = ctypes.c_void_p()
        if not self._functions["cuStreamEndCapture"](stream, ctypes.byref(graph)) and graph.value:
            self.call("cuGraphDestroy", graph)

    def upload(self, executable: int, stream: int) -> None:
        """Queue the transfer of an instantiated graph to the device."""
        self.call("cuGraphUpload", executable, stream)

    def nodes(self, graph: int) -> list[tuple[int, int]]:
        """The handle and the CUgraphNodeType of each node of a graph that is not instantiated."""
        count = ctypes.c_size_t()
        self.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
        if not count.value:
            return []
        nodes = (ctypes.c_void_p * count.value)()
        self.call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
        found, kind = [], ctypes.c_int()
        for node in nodes:
            self.call("cuGraphNodeGetType", node, ctypes.byref(kind))
            found.append((int(node or 0), kind.value))
        return found


def loaded(functions: Callable[[Any], Library]) -> Library | None:
    """These functions of libcuda; None without a GPU, or where the driver lacks one of them."""
    try:
        return functions(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


@functools.cache
def driver() -> Driver | None:
    """The driver of this process, once something is on a GPU; None without a GPU."""
    return loaded(Driver)
