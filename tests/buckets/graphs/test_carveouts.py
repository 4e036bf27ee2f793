"""Which kernels of a graph ask for cache in place of shared memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphengine.buckets import CapturedGraph, prefer_cache
from graphengine.buckets.driver import driver
from graphengine.buckets.graphs import carveouts
from graphengine.buckets.graphs.carveouts import CarveoutLibrary, Needs, wants_cache
from launches.libcuda_stand_in import driver_library

# An H200's multiprocessors.
COUNT = 132
NODE, FUNCTION = 70, 90
DEVICE = torch.device("cpu")


@pytest.mark.parametrize(
    "needs, cache",
    [
        # A program has a multiprocessor for itself, though six would fit.
        (Needs(programs=64, resident=6, shared=14 * 1024), True),
        (Needs(programs=132, resident=6, shared=63 * 1024), True),
        (Needs(programs=132, resident=6, shared=63 * 1024 + 1), False),
        # Two share one.
        (Needs(programs=133, resident=6, shared=14 * 1024), False),
        (Needs(programs=133, resident=1, shared=14 * 1024), True),
        (Needs(programs=133, resident=6, shared=3 * 1024), True),
        # Weights in registers: 4.3 and 11.7 KB of all programs.
        (Needs(programs=1000, resident=4, shared=64), True),
        (Needs(programs=3072, resident=11, shared=64), False),
    ],
)
def test_launches_with_little_shared_memory_want_cache(needs: Needs, cache: bool) -> None:
    assert wants_cache(needs, COUNT) == cache


def test_needs_are_read_and_cache_is_asked_for() -> None:
    asked: list[tuple[int, int, list[int]]] = []

    def get_params(node: int, params: Any) -> int:
        found = params[0]
        found.function = FUNCTION + node - NODE
        found.grid, found.block, found.shared_bytes = (8, 3, 2), (32, 4, 1), 5000
        return 0

    def get_attribute(found: Any, attribute: int, function: int) -> int:
        assert (attribute, function) == (1, FUNCTION)
        found[0] = 24
        return 0

    def occupancy(found: Any, function: int, threads: int, dynamic: int) -> int:
        assert (function, threads, dynamic) == (FUNCTION, 128, 5000)
        found[0] = 3
        return 0

    def set_attribute(node: int, attribute: int, value: Any) -> int:
        asked.append((node, attribute, value[:16]))
        return 0

    library = CarveoutLibrary(
        driver_library(
            carveouts._PROTOTYPES,
            cuGraphKernelNodeGetParams_v2=get_params,
            cuFuncGetAttribute=get_attribute,
            cuOccupancyMaxActiveBlocksPerMultiprocessor=occupancy,
            cuGraphKernelNodeSetAttribute=set_attribute,
        )
    )
    assert library.needs(NODE) == Needs(programs=48, resident=3, shared=5024)
    assert library.needs(NODE - FUNCTION) is None, "a kernel without a function"
    library.ask_for_cache(NODE)
    assert asked == [(NODE, 14, [0] * 16)]


class _Nodes:
    """Kernels NODE and NODE + 2, and a copy between them."""

    def nodes(self, graph: int) -> list[tuple[int, int]]:
        assert graph == 5
        return [(NODE, 0), (NODE + 1, 1), (NODE + 2, 0)]


class _Kernels:
    """Of a kernel, what it needs; the second, where it is there, is refused by the driver."""

    def __init__(self, needs: dict[int, Needs], refused: int | None = None) -> None:
        self._needs, self._refused = needs, refused
        self.asked: list[int] = []

    def needs(self, node: int) -> Needs:
        return self._needs[node]

    def ask_for_cache(self, node: int) -> None:
        if node == self._refused:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        self.asked.append(node)


LITTLE, MUCH = Needs(64, 6, 14 * 1024), Needs(256, 2, 60 * 1024)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Any:
    facts = SimpleNamespace(multi_processor_count=COUNT)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(carveouts, "driver", _Nodes)
    return SimpleNamespace(raw_cuda_graph=lambda: 5)


def test_kernels_that_need_little_ask(monkeypatch: pytest.MonkeyPatch, graph: Any) -> None:
    kernels = _Kernels({NODE: MUCH, NODE + 2: LITTLE})
    monkeypatch.setattr(carveouts, "_library", lambda: kernels)
    assert prefer_cache(graph, DEVICE) == 1
    assert kernels.asked == [NODE + 2]


def test_a_driver_that_refuses_is_logged(
    monkeypatch: pytest.MonkeyPatch, graph: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = _Kernels({NODE: LITTLE, NODE + 2: LITTLE}, refused=NODE + 2)
    monkeypatch.setattr(carveouts, "_library", lambda: kernels)
    with caplog.at_level("INFO"):
        assert prefer_cache(graph, DEVICE) == 1
    assert "kernels do not ask for cache: CUDA_ERROR_INVALID_VALUE" in caplog.text


def test_without_a_driver_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, graph: Any) -> None:
    monkeypatch.setattr(carveouts, "_library", lambda: None)
    assert prefer_cache(graph, DEVICE) == 0


@pytest.mark.gpu
def test_a_captured_graph_has_what_its_kernels_ask_for() -> None:
    """An elementwise kernel has no shared memory."""
    gpu = torch.device("cuda")
    x = torch.ones(1 << 20, device=gpu)
    asked: list[int] = []

    def adjust(graph: torch.cuda.CUDAGraph) -> None:
        asked.append(prefer_cache(graph, gpu))

    graph = CapturedGraph(lambda: x.mul_(2), name="doubling", device=gpu, adjust=adjust)
    graph.capture()
    assert asked == [1] and graph.graph is not None
    library = driver()
    assert library is not None
    ((node, kind),) = library.nodes(int(graph.graph.raw_cuda_graph()))
    value = (ctypes.c_int * 16)()
    read = ctypes.CDLL("libcuda.so.1").cuGraphKernelNodeGetAttribute
    assert kind == 0 and read(ctypes.c_void_p(node), 14, value) == 0
    assert value[0] == 0
    x.fill_(1)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, torch.full_like(x, 2))
    graph.close()
