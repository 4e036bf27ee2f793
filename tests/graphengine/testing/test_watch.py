"""no_sync and no_alloc: without a GPU over stand-ins for torch's hooks; natively in a graph.

What they catch and let pass is in test_planted_faults.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from graphengine.buckets import CapturedGraph
from graphengine.testing import GraphCheckError, check_no_alloc, no_alloc, no_sync
from graphengine.testing.checks import watch


class Device:
    """The part of a CUDA device that the checks use."""

    def __init__(self) -> None:
        self.mode = 0
        self.waits = 0
        self.free = 2**30
        self.stats: dict[str, int] = {}
        self.host_stats: dict[str, int] = {}

    def begin(self) -> None:
        """Before this the allocator has no statistics, as in torch."""
        for name in (
            watch._ALLOCATIONS,
            watch._ALLOCATED_BYTES,
            watch._SEGMENTS,
            watch._SEGMENT_BYTES,
        ):
            self.stats.setdefault(name, 0)

    def synchronize(self, device: object = None) -> None:
        self.waits += 1

    def read_item(self) -> None:
        if self.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    def allocate(self, size: int, segments: int = 0) -> None:
        self.stats[watch._ALLOCATIONS] += 1
        self.stats[watch._ALLOCATED_BYTES] += size
        self.stats[watch._SEGMENTS] += segments
        self.stats[watch._SEGMENT_BYTES] += 2**21 * segments


def of_module(name: str, source: str) -> Callable[..., None]:
    """The function `f` of `source`, as if it were written in module `name`."""
    names: dict[str, Callable[..., None]] = {}
    exec(source, {"__name__": name, "torch": torch}, names)
    return names["f"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    def set_mode(mode: int | str) -> None:
        device.mode = mode if isinstance(mode, int) else ("default", "warn", "error").index(mode)

    for name, function in (
        ("is_available", lambda: True),
        ("init", device.begin),
        ("get_sync_debug_mode", lambda: device.mode),
        ("set_sync_debug_mode", set_mode),
        ("synchronize", of_module("torch.cuda", "def f(d=None): torch._C._cuda_synchronize()")),
        ("memory_stats", lambda _: dict(device.stats)),
        ("mem_get_info", lambda _: (device.free, 2**31)),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.cuda.memory, "host_memory_stats", lambda: device.host_stats)
    monkeypatch.setattr(torch._C, "_cuda_synchronize", device.synchronize, raising=False)
    monkeypatch.setattr(watch, "_WAITS", ((torch._C, "_cuda_synchronize", "it"), *watch._WAITS[1:]))
    return device


def wait() -> None:
    torch.cuda.synchronize()


# no_sync.


def test_an_operation_that_waits_is_reported_with_its_stack(device: Device) -> None:
    with pytest.raises(GraphCheckError) as caught, no_sync():
        device.read_item()
    lines = str(caught.value).splitlines()
    assert lines[0] == "the block waits for the device:"
    assert lines[2].strip() == "device.read_item()", lines
    assert "in read_item" in str(caught.value)
    assert not [line for line in lines if "watch.py" in line and "test_watch.py" not in line]


def test_an_explicit_wait_is_reported_and_does_not_wait(device: Device) -> None:
    message = r"(?s)device by it:.*in wait\n.*synchronize\(\)"
    with pytest.raises(GraphCheckError, match=message), no_sync():
        wait()
    assert device.waits == 0
    wait()
    assert device.waits == 1


@pytest.mark.parametrize("kind", [torch.cuda.Stream, torch.cuda.Event])
def test_streams_and_events_are_watched(device: Device, kind: type) -> None:
    message = rf"device by {kind.__name__}.synchronize\(\)"
    with pytest.raises(GraphCheckError, match=message), no_sync():
        kind.synchronize(object())  # type: ignore[attr-defined]


def test_a_wait_whose_error_is_caught_is_reported(device: Device) -> None:
    message = r"(?s)in wait\n.*\(its error was caught"
    with pytest.raises(GraphCheckError, match=message), no_sync():
        with contextlib.suppress(RuntimeError):
            wait()
        assert device.mode == 2


def test_a_wait_under_another_error_is_found(device: Device) -> None:
    with pytest.raises(GraphCheckError, match="the block waits for the device:"), no_sync():
        try:
            device.read_item()
        except RuntimeError as cause:
            raise ValueError("capture failed") from cause


def test_other_errors_pass(device: Device) -> None:
    with pytest.raises(KeyError), no_sync():
        raise KeyError("x")


def test_a_wait_that_is_handled_around_the_block_is_not_the_blocks(device: Device) -> None:
    try:
        raise RuntimeError(watch._SYNC_MESSAGE)
    except RuntimeError:
        with pytest.raises(KeyError, match="mine"), no_sync():
            {}["mine"]
        with pytest.raises(GraphCheckError, match="in read_item"), no_sync():
            device.read_item()


def test_a_wait_that_was_caught_is_reported_under_a_later_error(device: Device) -> None:
    message = r"(?s)in wait\n.*\(its error was caught in the block, which then raised KeyError: 'x'"
    with pytest.raises(GraphCheckError, match=message) as caught, no_sync():
        with contextlib.suppress(RuntimeError):
            wait()
        raise KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_changed_is_put_back(device: Device, mode: int, fails: bool) -> None:
    device.mode = mode
    before = torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize
    try:
        with no_sync():
            assert device.mode == 2
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert device.mode == mode
    assert (torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize) == before
    wait()
    assert device.waits == 1


def test_a_capture_may_wait_where_it_begins(device: Device) -> None:
    begin = of_module("torch.cuda.graphs", "def f(step): torch.cuda.synchronize(); step()")
    with no_sync():
        begin(lambda: None)
        assert device.mode == 2
    assert device.waits == 1
    with pytest.raises(GraphCheckError, match="in wait"), no_sync():
        begin(wait)


# no_alloc.


def test_memory_that_is_given_out_is_reported(device: Device) -> None:
    device.begin()
    device.allocate(100)
    message = (
        r"allocated 2.0 KiB in 2 allocations \(allocation.all.allocated from 1 to 3\), and the "
        r"allocator grew by 1 segments of 2.0 MiB; allowed are 512 bytes"
    )
    with pytest.raises(GraphCheckError, match=message), no_alloc(tolerance_bytes=512):
        device.allocate(1024)
        device.allocate(1024, segments=1)


def test_what_is_tolerated_passes(device: Device) -> None:
    with no_alloc():
        pass
    with no_alloc(tolerance_bytes=512):
        device.allocate(512)


def test_memory_of_the_driver_is_compared_after_the_first_replay(device: Device) -> None:
    lost = [2**20, 2**21, 0]

    def replay() -> None:
        device.free -= lost.pop(0)

    with pytest.raises(GraphCheckError, match=r"free memory fell by 2.0 MiB over 2 replays"):
        check_no_alloc(replay, replays=2)


def test_allocations_of_the_first_replay_do_not_count(device: Device) -> None:
    sizes = [512, 0, 0]
    check_no_alloc(lambda: device.allocate(sizes.pop(0)), replays=2)
    assert not sizes


def test_replays_that_check_nothing_are_refused(device: Device) -> None:
    def generator() -> Iterator[None]:
        yield

    with pytest.raises(ValueError, match="replays=0 must be at least 1"):
        check_no_alloc(lambda: None, replays=0)
    with pytest.raises(ValueError, match="returned a generator, so none of its body ran"):
        check_no_alloc(generator)
    with pytest.raises(ValueError, match="replay=None is not callable"):
        check_no_alloc(None)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    for block in (no_sync, no_alloc):
        with pytest.raises(RuntimeError, match=f"{block.__name__} needs a CUDA device"), block():
            pass
    with pytest.raises(RuntimeError, match="check_no_alloc needs a CUDA device"):
        check_no_alloc(lambda: None)


# From here on: a GPU.


@pytest.mark.gpu
def test_a_sound_capture_and_its_replays_pass_natively() -> None:
    x = torch.zeros(8, device="cuda")
    captured = CapturedGraph(lambda: x.add_(1), name="b", device="cuda")
    captured.warm_up()
    graph = torch.cuda.CUDAGraph()
    with no_sync(), torch.cuda.graph(graph), no_alloc():
        x.add_(1)
    with no_sync():
        captured.capture()
    with no_sync(), no_alloc():
        for _ in range(100):
            graph.replay()
            captured.replay()
    captured.close()


@pytest.mark.parametrize("counter", ["active_requests.allocated", "num_host_alloc"])
def test_pinned_memory_in_each_replay_is_counted(device: Device, counter: str) -> None:
    device.host_stats = {counter: 5}
    check_no_alloc(lambda: None, replays=3)

    def replay() -> None:
        device.host_stats[counter] += 1

    message = "3 replays took pinned memory of the host 3 times: allocate what a step copies"
    with pytest.raises(GraphCheckError, match=message):
        check_no_alloc(replay, replays=3)


@pytest.mark.gpu
@pytest.mark.alone
def test_replays_leave_the_free_memory_of_the_driver_natively() -> None:
    x = torch.zeros(8, device="cuda")
    captured = CapturedGraph(lambda: x.add_(1), name="b", device="cuda")
    captured.capture()
    check_no_alloc(captured.replay)
    captured.close()


@pytest.mark.gpu
def test_the_real_waits_are_reported_with_the_line_that_called_them_natively() -> None:
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    for call in (torch.cuda.synchronize, torch.accelerator.synchronize):
        with pytest.raises(GraphCheckError, match=r"(?s)synchronize\(\):.*call\(\)"), no_sync():
            call()
    for waiting in (event, stream):
        with pytest.raises(GraphCheckError, match=r"(?s)waiting\.synchronize\(\)"), no_sync():
            waiting.synchronize()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_wait_in_the_step_of_a_captured_graph_is_found_natively() -> None:
    x = torch.zeros(8, device="cuda")
    captured = CapturedGraph(
        lambda: x.add_(x.sum().item()), name="decode/8", device="cuda", warmups=0
    )
    captured.warm_up()
    message = r"(?s)waits for the device:.*x\.sum\(\)\.item\(\)"
    with pytest.raises(GraphCheckError, match=message), no_sync():
        captured.capture()
    captured.close()
    torch.cuda.synchronize()
