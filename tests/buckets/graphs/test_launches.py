"""Parameters of captured kernels: over a stand-in for libcuda, and natively."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.buckets import CapturedGraph, KernelLaunch, inspect_graph, read_launches
from graphengine.buckets.graphs import launches
from graphengine.buckets.graphs.launches import Library

SIZES = {7: (8, 4, 24), 9: (2,)}
"""By the handle of a function or kernel: the bytes of its parameters."""


class Driver:
    """Nodes of two kernels; node 1 is of a CUfunction, node 2 of a CUkernel."""

    def __init__(self, **nodes: Any) -> None:
        self.kept: list[Any] = []
        self.asked = 0
        self.nodes = {
            1: {"function": 7, "values": (b"A" * 8, b"\5\0\0\0", b"B" * 24)},
            2: {"kernel": 9, "values": (b"\7\0",)},
            3: {"function": 7, "values": None, "extra": 64},
            4: {"function": 8, "values": ()},
            5: {"function": 8, "values": (b"A" * 8,)},
        }

    def read_node(self, node: int, params: Any) -> int:
        if node not in self.nodes:
            return 1
        known = self.nodes[node]
        found = params.contents
        found.function, found.kernel = known.get("function"), known.get("kernel")
        found.extra = known.get("extra")
        values = known["values"]
        if values:
            buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, buffers))
            self.kept += [buffers, pointers]
            found.parameters = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        return 0

    def read_size(self, handle: int, place: int, offset: Any, size: Any) -> int:
        self.asked += 1
        sizes = SIZES.get(handle, ())
        if place >= len(sizes):
            return 1
        size.contents.value = sizes[place]
        return 0

    def library(self, *without: str) -> Library:
        functions = {
            "cuGraphKernelNodeGetParams_v2": self.read_node,
            "cuFuncGetParamInfo": self.read_size,
            "cuKernelGetParamInfo": self.read_size,
        }
        return Library(
            SimpleNamespace(
                **{
                    name: ctypes.CFUNCTYPE(ctypes.c_int, *launches._PROTOTYPES[name])(function)
                    for name, function in functions.items()
                    if name not in without
                }
            )
        )


def test_parameters_are_read_by_their_sizes() -> None:
    driver = Driver()
    library = driver.library()
    assert library.read(1) == {"function": 7, "parameters": (b"A" * 8, b"\5\0\0\0", b"B" * 24)}
    assert library.read(2) == {"function": 9, "parameters": (b"\7\0",)}
    asked = driver.asked
    library.read(1)
    assert driver.asked == asked, "sizes of a function are asked for once"


def test_what_the_driver_does_not_tell_is_none() -> None:
    assert Driver().library().read(3) == {"function": 7, "parameters": None}, "packed by the caller"
    assert Driver().library().read(4) == {"function": 8, "parameters": ()}, "none"
    assert Driver().library().read(5) == {"function": 8, "parameters": None}
    older = Driver().library("cuFuncGetParamInfo", "cuKernelGetParamInfo")  # before CUDA 12.4
    assert older.read(1) == {"function": 7, "parameters": None}


def test_a_refusal_of_the_driver_is_told() -> None:
    with pytest.raises(RuntimeError, match="cuGraphKernelNodeGetParams failed with CUresult 1"):
        Driver().library().read(99)


def test_words_are_where_addresses_can_be() -> None:
    data = (b"abcd", bytes(range(8)), (1).to_bytes(8, "little") + (2).to_bytes(8, "little") + b"x")
    launch = KernelLaunch(path="0", name="norm", parameters=data)
    assert list(launch.words()) == [(1, 0, 0x0706050403020100), (2, 0, 1), (2, 8, 2)]
    assert list(KernelLaunch(path="0", name="norm", parameters=None).words()) == []


@pytest.mark.gpu
def test_addresses_and_numbers_of_a_captured_kernel_natively() -> None:
    x, y = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    captured = CapturedGraph(
        lambda: (torch.add(x, 1.5, out=y), y.zero_(), torch.exp(x, out=y)), name="b", device="cuda"
    )
    captured.capture()
    assert captured.graph is not None
    found = read_launches(captured.graph)
    kernels = [node for node in inspect_graph(captured.graph).nodes if node.kind == "kernel"]
    assert [(each.path, each.name) for each in found] == [
        (str(node.index), node.name) for node in kernels
    ]
    assert all(each.function for each in found)
    addresses = [{value for _, _, value in each.words()} for each in found]
    assert {x.data_ptr(), y.data_ptr()} <= addresses[0]
    assert {x.data_ptr(), y.data_ptr()} <= addresses[-1]
    captured.close()
