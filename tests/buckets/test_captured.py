"""CapturedGraph: the same steps on a CPU device and in a CUDA graph; failed captures.

The failures matter most: whatever a step does wrong while it is captured, the process, the stream
and the pool must work afterwards.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from graphengine.buckets import CapturedGraph, Field, StaticBuffers, capture_all, count_nodes
from graphengine.buckets import captured as captured_module
from graphengine.buckets.driver import Driver
from launches.libcuda_stand_in import driver_library

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LANES = 8
MIB = 2**20


class Program:
    """total += x in static buffers, with `scratch` floats of memory from the graph's pool."""

    def __init__(self, device: str, scratch: int = 0) -> None:
        self.buffers = StaticBuffers(
            [
                Field(name="x", shape=(LANES,), dtype=torch.float32),
                Field(name="total", shape=(LANES,), dtype=torch.float32, owner="device"),
            ],
            device,
        )
        self.scratch = scratch
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.scratch:
            torch.empty(self.scratch, device=self.buffers.device).fill_(1)
        torch.add(self.buffers.total, self.buffers.x, out=self.buffers.total)

    def total(self) -> list[float]:
        return self.buffers.total.tolist()


def on(graph: CapturedGraph) -> torch.cuda.StreamContext:
    return torch.cuda.stream(graph.stream)  # does nothing for None


@pytest.mark.parametrize("device", DEVICES)
def test_replays_advance_the_state_as_calls_would(device: str) -> None:
    program = Program(device)
    graph = CapturedGraph(program, name="decode/8", device=device, buffers=program.buffers)
    graph.warm_up()
    assert program.calls == 2
    report = graph.capture()
    assert report is graph.report
    assert report.name == "decode/8"
    with on(graph):
        program.buffers.reset()
        program.buffers.load({"x": [1, 2, 3]}, sequence=1)
        for _ in range(3):
            graph.replay()
        program.buffers.load({"x": [1]}, sequence=4)
        graph.replay()
        assert program.total() == [4, 6, 9, 0, 0, 0, 0, 0]
    assert program.calls == (6 if device == "cpu" else 3)
    graph.close()


@pytest.mark.parametrize("device", DEVICES)
def test_life_cycle(device: str) -> None:
    program = Program(device)
    graph = CapturedGraph(program, name="b", device=device, warmups=1)
    with on(graph):
        with pytest.raises(RuntimeError, match="bucket 'b' is not captured yet"):
            graph.replay()
        with pytest.raises(RuntimeError, match="bucket 'b' is not captured yet"):
            _ = graph.report
        graph.capture()  # warms up by itself
        with pytest.raises(RuntimeError, match="capture of bucket 'b' was already tried"):
            graph.capture()
        graph.replay()
        graph.close()
        graph.close()
        for use in (graph.replay, graph.warm_up, graph.capture):
            with pytest.raises(ValueError, match="bucket 'b' is closed"):
                use()
    assert graph.report.warm_up_ms >= 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_warm_up_that_fails_names_the_bucket(device: str) -> None:
    def step() -> None:
        raise KeyError("weights")

    graph = CapturedGraph(step, name="prefill/64", device=device)
    with pytest.raises(
        RuntimeError, match="warm-up of bucket 'prefill/64' failed: 'weights'"
    ) as caught:
        graph.capture()
    assert isinstance(caught.value.__cause__, KeyError)
    graph.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_moved_buffer_is_named(device: str) -> None:
    program = Program(device)
    graph = CapturedGraph(program, name="b", device=device, buffers=program.buffers)
    graph.capture()
    with on(graph):
        graph.replay()
        program.buffers["total"].data = torch.zeros(LANES, device=device)
        # Checking every address at every replay would take a tenth of the host's time.
        with pytest.raises(RuntimeError, match="static buffer 'total' moved from 0x"):
            for _ in range(captured_module.CHECK_EVERY):
                graph.replay()
    graph.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_lives_as_long_as_its_graph(device: str) -> None:
    class Watched:
        freed = False

        def __del__(self) -> None:
            Watched.freed = True

    def step(weights: Watched = Watched()) -> None:  # noqa: B008
        torch.zeros(1, device=device)

    graph = CapturedGraph(step, name="b", device=device)
    graph.capture()
    del step
    gc.collect()
    assert not Watched.freed
    graph.close()
    gc.collect()
    assert Watched.freed


@pytest.mark.parametrize("device", DEVICES)
def test_capture_all(device: str) -> None:
    program = Program(device)
    names: list[str] = []
    graphs = capture_all(
        {"decode/8": program, "decode/4": program},
        device=device,
        buffers=program.buffers,
        on_capture=lambda report: names.append(report.name),
    )
    assert names == list(graphs) == ["decode/8", "decode/4"]
    with on(graphs["decode/8"]):
        program.buffers.reset()
        program.buffers.load({"x": [1] * LANES}, sequence=1)
        for graph in graphs.values():
            graph.replay()
        assert program.total() == [2] * LANES
    for graph in graphs.values():
        graph.close()


@pytest.mark.parametrize("device", DEVICES)
def test_capture_all_closes_what_it_captured_when_it_fails(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close = CapturedGraph.close

    def watched_close(graph: CapturedGraph) -> None:
        closed.append(graph.name)
        close(graph)

    monkeypatch.setattr(CapturedGraph, "close", watched_close)

    def step() -> None:
        raise ValueError("boom")

    with pytest.raises(RuntimeError, match="bucket 'c' failed: boom"):
        capture_all({"a": Program(device), "b": Program(device), "c": step}, device=device)
    assert closed == ["c", "b", "a"]


def test_on_a_cpu_nothing_is_captured() -> None:
    program = Program("cpu")
    graph = CapturedGraph(program, name="b", device="cpu", warmups=0)
    report = graph.capture()
    assert program.calls == 0
    assert (report.nodes, report.node_kinds, report.bytes) == (None, None, 0)
    assert graph.graph is None


def test_a_failed_capture_is_ended_by_the_driver_then_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of the recovery, without a GPU: torch only ever ends a valid capture."""
    calls: list[str] = []

    def end(stream: int, graph: object) -> int:
        calls.append(f"driver ends {stream}")
        return 901

    def begin(stream: int, mode: int) -> int:
        calls.append(f"driver begins {stream}, mode {mode}")
        return 0

    class Graph:
        def capture_end(self) -> None:
            calls.append("torch ends")

    class Stream:
        cuda_stream = 5

    library = driver_library(cuStreamEndCapture=end, cuStreamBeginCapture_v2=begin)
    monkeypatch.setattr(captured_module, "driver", lambda: Driver(library))
    captured_module._abandon(Graph(), Stream(), torch.device("cuda", 0), (0, 1))  # type: ignore[arg-type]
    assert calls == ["driver ends 5", "driver begins 5, mode 1", "torch ends"]


class Library:
    """Stands in for the CUDA runtime; `status` is what its launch returns."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[object] = []

    def cudaGraphLaunch(self, graph: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        self.calls.append((graph.value, stream.value))
        return self.status

    def cudaGetLastError(self) -> int:
        self.calls.append("cleared")
        return self.status


class RawGraph:
    def raw_cuda_graph_exec(self) -> int:
        return 2**48 + 8


class RawStream:
    cuda_stream = 2**47


@pytest.mark.parametrize("status", [0, 400])
def test_a_direct_launch_is_one_call_and_a_refused_one_goes_to_torch(status: int) -> None:
    library = Library(status)
    launch = captured_module._direct_launch(
        library,
        RawGraph(),  # type: ignore[arg-type]
        RawStream(),  # type: ignore[arg-type]
        otherwise=lambda: library.calls.append("torch"),
    )
    launch()
    assert library.calls == [(2**48 + 8, 2**47), *(["cleared", "torch"] if status else [])]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA runtime")
def test_without_a_cuda_runtime_there_is_no_library() -> None:
    assert captured_module.runtime() is None


def test_each_warm_up_and_capture_is_inside_what_is_put_around_it() -> None:
    said: list[str] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        said.append(f"begin {name}")
        yield
        said.append(f"end {name}")

    steps = {name: partial(said.append, f"step {name}") for name in ("b", "a")}
    for graph in capture_all(steps, device="cpu", warmups=1, around=around).values():
        graph.close()
    assert said == ["begin b", "step b", "end b", "begin a", "step a", "end a"]


# From here on: a GPU.


def scratch_step(program: Program, then: Callable[[], object]) -> Callable[[], None]:
    """Allocate from the pool, launch a kernel, then do something else."""

    def step() -> None:
        work = program.buffers.x * 2
        work = torch.empty(4 * MIB, device="cuda").fill_(work.numel())
        then()
        work.add_(1)

    return step


def raise_it() -> None:
    raise ValueError("boom")


def synchronise() -> None:
    torch.cuda.synchronize()


def read_an_item() -> None:
    torch.ones(1, device="cuda").item()


def synchronise_and_hide_it() -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return
    raise AssertionError("a synchronisation is not possible while capturing")


FAILURES = [
    (raise_it, "boom", ValueError),
    (synchronise, "captur", RuntimeError),
    (read_an_item, "captur", RuntimeError),
    (synchronise_and_hide_it, "captur", RuntimeError),
]


def failure_of(graph: CapturedGraph) -> tuple[str, type[BaseException]]:
    """Message and cause of a failing capture, without a reference to the step's frames."""
    try:
        graph.capture()
    except RuntimeError as error:
        assert error.__cause__ is not None
        return str(error), type(error.__cause__)
    raise AssertionError("the capture succeeded")


def require_usable_process() -> None:
    """Allocation, random numbers, synchronisation and pinned memory work outside any capture."""
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    numbers = torch.randn(1000, device="cuda").to("cpu")
    assert numbers.isfinite().all()
    pinned = torch.ones(1000, pin_memory=True)
    assert pinned.to("cuda", non_blocking=True).sum().item() == 1000
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize(("failure", "message", "kind"), FAILURES)
def test_a_failed_capture_leaves_everything_usable(
    failure: Callable[[], object], message: str, kind: type[Exception]
) -> None:
    program = Program("cuda", scratch=4 * MIB)
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    # What torch keeps after the first capture of a process must not be counted below.
    first = CapturedGraph(program, name="first", device="cuda", stream=stream)
    first.capture()
    first.close()
    gc.collect()
    require_usable_process()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    bad = CapturedGraph(
        scratch_step(program, failure),
        name="decode/8",
        device="cuda",
        stream=stream,
        pool=pool,
        warmups=0,  # so that it is the capture that fails
    )
    text, cause = failure_of(bad)
    assert text.startswith("capture of bucket 'decode/8' failed: ")
    assert message in text.removeprefix("capture")
    assert issubclass(cause, kind)
    assert bad.graph not in captured_module._unfinished_graphs
    require_usable_process()
    with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="not captured yet"):
        bad.replay()

    # The same pool and stream, with the failed graph still there and after it is gone.
    good = CapturedGraph(program, name="decode/4", device="cuda", stream=stream, pool=pool)
    good.capture()
    bad.close()
    better = CapturedGraph(program, name="decode/2", device="cuda", stream=stream, pool=pool)
    better.capture()
    require_usable_process()
    with torch.cuda.stream(stream):
        program.buffers.reset()
        program.buffers.load({"x": [1, 2]}, sequence=1)
        good.replay()
        better.replay()
        assert program.total() == [2, 4, 0, 0, 0, 0, 0, 0]

    good.close()
    better.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= allocated
    assert torch.cuda.memory_reserved() <= reserved


@pytest.mark.gpu
def test_a_forked_stream_that_is_not_joined() -> None:
    program = Program("cuda")
    side = torch.cuda.Stream()

    def step() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            program()

    bad = CapturedGraph(step, name="decode/8", device="cuda", warmups=1)
    text, _ = failure_of(bad)
    assert text.startswith("capture of bucket 'decode/8' failed: ")
    assert "unjoined" in text
    known = captured_module._unfinished_graphs
    assert [graph for graph in known if graph is bad.graph]
    bad.close()
    torch.cuda.empty_cache()
    good = CapturedGraph(program, name="decode/4", device="cuda")  # with a pool of its own
    good.capture()
    require_usable_process()
    with on(good):
        program.buffers.reset()
        program.buffers.load({"x": [3]}, sequence=1)
        good.replay()
        assert program.total()[0] == 3
    good.close()


@pytest.mark.gpu
def test_nodes_are_counted_by_kind() -> None:
    x = torch.ones(LANES, device="cuda")
    y = torch.zeros(LANES, device="cuda")

    def step() -> None:
        torch.add(x, 1, out=y)
        torch.mul(y, 2, out=y)
        x.copy_(y)

    graph = CapturedGraph(step, name="b", device="cuda")
    report = graph.capture()
    assert report.nodes == 3
    assert report.node_kinds == {"kernel": 2, "memcpy": 1, "memset": 0, "other": 0}
    assert graph.graph is not None
    assert count_nodes(graph.graph) == report.node_kinds
    assert report.capture_ms > 0
    graph.close()


@pytest.mark.gpu
def test_a_graph_is_adjusted_before_it_is_instantiated() -> None:
    program, adjusted = Program("cuda"), list[str]()

    def adjust(name: str, graph: torch.cuda.CUDAGraph) -> None:
        assert graph.raw_cuda_graph()
        adjusted.append(name)

    graphs = capture_all({"a": program, "b": program}, device="cuda", adjust=adjust)
    assert adjusted == ["a", "b"]
    for graph in graphs.values():
        graph.close()
    refusing = CapturedGraph(program, name="c", device="cuda", adjust=lambda graph: 1 / 0)
    with pytest.raises(RuntimeError, match="capture of bucket 'c' failed: division by zero"):
        refusing.capture()
    refusing.close()


@pytest.mark.gpu
def test_smaller_buckets_reuse_the_largest_ones_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    large, small = Program("cuda", scratch=64 * MIB), Program("cuda", scratch=16 * MIB)
    graphs = capture_all({"large": large, "small": small}, device="cuda")
    bytes_of_large = 4 * 64 * MIB
    assert graphs["large"].report.reserved_bytes >= bytes_of_large
    assert graphs["large"].report.bytes >= bytes_of_large
    assert graphs["small"].report.reserved_bytes == 0
    assert graphs["small"].report.allocated_bytes == 0
    for graph in graphs.values():
        graph.close()


@pytest.mark.gpu
def test_replays_allocate_and_synchronise_nothing() -> None:
    program = Program("cuda", scratch=MIB)
    graph = CapturedGraph(program, name="b", device="cuda", buffers=program.buffers)
    graph.capture()
    with on(graph):
        program.buffers.reset()
        program.buffers.load({"x": [1]}, sequence=1)
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(1000):
                graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
        assert program.total()[0] == 1000
    graph.close()


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["found", "missing", "refusing"])
def test_replays_go_to_the_stream_of_the_capture_whichever_is_current(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library != "found":
        stand_in = Library(400) if library == "refusing" else None
        monkeypatch.setattr(captured_module, "runtime", lambda: stand_in)
    program = Program("cuda")
    graph = CapturedGraph(program, name="decode/8", device="cuda", buffers=program.buffers)
    graph.capture()
    assert graph.is_direct == (library != "missing")
    with on(graph):
        program.buffers.reset()
        program.buffers.load({"x": [1, 2]}, sequence=1)
        torch.cuda._sleep(20_000_000)
    for _ in range(3):
        graph.replay()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert graph.stream is not None
    assert not graph.stream.query(), "the replays wait for what the stream held"
    graph.stream.synchronize()
    assert program.total() == [3, 6, 0, 0, 0, 0, 0, 0]
    graph.close()


@pytest.mark.gpu
@pytest.mark.parametrize("warmups", [0, 2])
def test_a_step_that_draws_random_numbers_gets_new_ones_in_each_replay(warmups: int) -> None:
    numbers = torch.zeros(LANES, device="cuda")
    graph = CapturedGraph(lambda: numbers.uniform_(), name="b", device="cuda", warmups=warmups)
    graph.capture()
    assert not graph.is_direct
    drawn = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        drawn.append(numbers.tolist())
    assert len(set(map(tuple, drawn))) == 3
    graph.close()


@pytest.mark.gpu
def test_the_default_stream_cannot_be_captured() -> None:
    with pytest.raises(ValueError, match="bucket 'b': the default stream"):
        CapturedGraph(Program("cuda"), name="b", device="cuda", stream=torch.cuda.default_stream())


@pytest.mark.gpu
def test_a_capture_inside_a_capture_is_refused() -> None:
    program = Program("cuda")
    stream = torch.cuda.Stream()
    inner = CapturedGraph(program, name="inner", device="cuda", stream=stream, warmups=0)
    messages: list[str] = []

    def step() -> None:
        program()
        messages.append(failure_of(inner)[0])

    outer = CapturedGraph(step, name="outer", device="cuda", stream=stream, warmups=0)
    outer.capture()
    assert messages == ["warm-up of bucket 'inner' failed: another capture is under way"]
    with on(outer):
        program.buffers.reset()
        program.buffers.load({"x": [1]}, sequence=1)
        outer.replay()
        assert program.total()[0] == 1
    inner.close()
    outer.close()
    require_usable_process()


@pytest.mark.gpu
def test_another_thread_may_use_the_device_during_a_capture() -> None:
    program = Program("cuda")
    results: list[float] = []

    def elsewhere() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(torch.ones(32 * MIB, device="cuda").sum().item())

    def step() -> None:
        program()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        program()

    graph = CapturedGraph(step, name="b", device="cuda", warmups=1)
    graph.capture()
    assert results == [32 * MIB] * 2
    with on(graph):
        program.buffers.reset()
        program.buffers.load({"x": [1]}, sequence=1)
        graph.replay()
        assert program.total()[0] == 2
    graph.close()
