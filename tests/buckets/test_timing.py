"""ReplayTimer: times of replays on the device, without waiting for them."""

from __future__ import annotations

import math

import pytest
import torch

from graphengine.buckets import ReplayTimer, timing

# Another process on the GPU would have a part of each time.
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

# About 1, 2 and 4 ms on a clock of 1 to 2 GHz; only the ratios matter.
CYCLES = (2_000_000, 4_000_000, 8_000_000)


@pytest.fixture(params=["runtime", "torch"])
def timer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ReplayTimer:
    """With CUDA's runtime library, and with torch's events only."""
    if request.param == "torch":
        monkeypatch.setattr(timing, "runtime", lambda: None)
    made = ReplayTimer(torch.cuda.Stream(), 3)
    assert (made._library is None) == (request.param == "torch")
    torch.cuda.synchronize()
    return made


def work(timer: ReplayTimer, cycles: int) -> None:
    with torch.cuda.stream(timer._stream):
        torch.cuda._sleep(cycles)


def test_pairs_time_what_lies_between_them(timer: ReplayTimer) -> None:
    for pair, cycles in enumerate(CYCLES):
        work(timer, cycles)
        timer.begin(pair)
        work(timer, cycles)
        timer.end(pair)
    torch.cuda.synchronize()
    times = [timer.microseconds(pair) for pair in range(3)]
    assert times[0] > 100
    assert times[1] == pytest.approx(2 * times[0], rel=0.2)
    assert times[2] == pytest.approx(4 * times[0], rel=0.2)


def test_what_is_not_done_is_unknown_and_not_waited_for(timer: ReplayTimer) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        timer.begin(0)
        work(timer, 200_000_000)
        timer.end(0)
        assert math.isnan(timer.microseconds(0))
        assert not timer._stream.query(), "it waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Nor is an error left that torch would find.
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    assert timer.microseconds(0) > 1000


def test_a_pair_that_is_used_again_tells_the_later_time(timer: ReplayTimer) -> None:
    for cycles in (CYCLES[2], CYCLES[0]):
        timer.begin(1)
        work(timer, cycles)
        timer.end(1)
        torch.cuda.synchronize()
        last = timer.microseconds(1)
    timer.begin(0)
    work(timer, CYCLES[2])
    timer.end(0)
    torch.cuda.synchronize()
    assert timer.microseconds(0) == pytest.approx(4 * last, rel=0.2)


def test_events_go_to_their_stream_whichever_is_current(timer: ReplayTimer) -> None:
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)
        timer.begin(0)
        timer.end(0)
    timer._stream.synchronize()
    assert 0 <= timer.microseconds(0) < 1000
    assert not other.query()
    torch.cuda.synchronize()
