"""The driver's functions through ctypes: arguments, results, and errors by name."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from graphengine.buckets import driver as module
from graphengine.buckets.driver import Driver
from graphengine.buckets.graphs import nodes
from launches.libcuda_stand_in import driver_library

STREAM, GRAPH = 2**47 + 8, 2**48 + 16


def name_of(status: int, text: Any) -> int:
    if status != 901:
        return 1
    text[0] = b"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    return 0


@pytest.mark.parametrize(("number", "status"), [(0, "none"), (1, "active"), (2, "invalidated")])
def test_a_stream_says_whether_it_is_captured(number: int, status: str) -> None:
    def is_capturing(stream: int, found: Any) -> int:
        assert stream == STREAM
        found[0] = number
        return 0

    library = driver_library(cuStreamIsCapturing=is_capturing)
    assert Driver(library).capture_status(STREAM) == status


@pytest.mark.parametrize("ended", [0, 901])
def test_a_dropped_capture_leaves_no_graph(ended: int) -> None:
    calls: list[object] = []

    def end(stream: int, graph: Any) -> int:
        calls.append(("end", stream))
        graph[0] = None if ended else GRAPH
        return ended

    def destroy(graph: int) -> int:
        calls.append(("destroy", graph))
        return 0

    Driver(driver_library(cuStreamEndCapture=end, cuGraphDestroy=destroy)).drop_capture(STREAM)
    assert calls == [("end", STREAM), *([] if ended else [("destroy", GRAPH)])]


@pytest.mark.parametrize("types", [[], [0, 1, 2, 0, 5, 13, 0]])
def test_nodes_are_counted(monkeypatch: pytest.MonkeyPatch, types: list[int]) -> None:
    def get_nodes(graph: int, found: Any, count: Any) -> int:
        assert graph == GRAPH
        if found:
            assert count[0] == len(types)
            for place in range(len(types)):
                found[place] = STREAM + place
        count[0] = len(types)
        return 0

    def get_type(node: int, found: Any) -> int:
        found[0] = types[node - STREAM]
        return 0

    library = Driver(driver_library(cuGraphGetNodes=get_nodes, cuGraphNodeGetType=get_type))
    assert library.nodes(GRAPH) == [(STREAM + place, kind) for place, kind in enumerate(types)]
    monkeypatch.setattr(module, "driver", lambda: library)
    graph: Any = SimpleNamespace(raw_cuda_graph=lambda: GRAPH)
    kinds = {"kernel": 3, "memcpy": 1, "memset": 1, "other": 2} if types else {}
    assert nodes.count_nodes(graph) == dict.fromkeys(nodes.KINDS, 0) | kinds
    monkeypatch.setattr(module, "driver", lambda: None)
    assert nodes.count_nodes(graph) is None


def test_begin_and_upload_pass_their_handles() -> None:
    calls: list[tuple[int, int]] = []

    def note(first: int, second: int) -> int:
        calls.append((first, second))
        return 0

    library = Driver(driver_library(cuStreamBeginCapture_v2=note, cuGraphUpload=note))
    library.begin_capture(STREAM)
    library.upload(GRAPH, STREAM)
    assert calls == [(STREAM, 1), (GRAPH, STREAM)]


def test_errors_have_names() -> None:
    library = driver_library(cuStreamBeginCapture_v2=lambda *_: 901, cuGetErrorName=name_of)
    failed = "cuStreamBeginCapture failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    with pytest.raises(RuntimeError, match=f"^{failed}$"):
        Driver(library).begin_capture(STREAM)
    with pytest.raises(RuntimeError, match=r"^cuGraphUpload failed: CUresult 999$"):
        Driver(library).upload(GRAPH, STREAM)


def test_a_library_without_a_function_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def opens(name: str) -> object:
        assert name == "libcuda.so.1"
        return SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", opens)
    module.driver.cache_clear()
    assert module.driver() is None
    module.driver.cache_clear()


WITHOUT_BINDINGS = """
    import sys
    import torch
    from graphengine.buckets import CapturedGraph, count_nodes
    from graphengine.buckets.graphs import nodes

    class Loud:
        def __getattr__(self, name):
            raise AssertionError(f"cuda-bindings are asked for {name}")

    nodes.driver = Loud()
    x = torch.zeros(8, device="cuda")
    graph = CapturedGraph(lambda: x.add_(1), name="b", device="cuda")
    print(graph.capture().nodes)
    graph.replay()
    torch.cuda.synchronize()
    graph.close()

    def fails():
        x.add_(1)
        raise KeyError("deliberate")

    failing = CapturedGraph(fails, name="b", device="cuda", warmups=0)
    try:
        failing.capture()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.gpu
def test_a_capture_goes_past_cuda_bindings() -> None:
    command = [sys.executable, "-P", "-c", textwrap.dedent(WITHOUT_BINDINGS)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\ncapture of bucket 'b' failed: 'deliberate'\n"
