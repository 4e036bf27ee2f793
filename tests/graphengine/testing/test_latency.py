"""latency_budget: order of calls, ratios and messages, by a clock that the test moves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphengine.testing import GraphCheckError, latency_budget
from graphengine.testing.checks import latency


class Clock:
    """Stands in for the host's clock; a call made by `taking` moves it by its next duration."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def taking(self, name: str, *seconds: float) -> Callable[[], None]:
        """The last duration goes on for ever."""
        left = list(seconds)

        def call() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(latency, "cuda_in_use", lambda: False)
    return clock


def test_the_two_are_called_in_turns_and_warm_ups_do_not_count(clock: Clock) -> None:
    replay, reference = clock.taking("replay", 9.0, 2.0), clock.taking("reference", 8.0, 4.0)
    found = latency_budget(replay, reference, median=1.0, p99=1.0, repeats=3, warmup=1)
    assert clock.calls == ["reference", "replay"] * 4
    assert (found.median_us, found.reference_median_us) == pytest.approx((2e6, 4e6))
    assert (found.median_ratio, found.p99_ratio) == pytest.approx((0.5, 0.5))
    assert found.repeats == 3


def test_medians_and_the_slowest_hundredth_have_budgets_of_their_own(clock: Clock) -> None:
    slow = [1.0] * 98 + [5.0, 9.0]
    budgets = {"median": 1.1, "repeats": 100, "warmup": 0}
    found = latency_budget(clock.taking("a", *slow), clock.taking("b", 1.0), **budgets)  # type: ignore[arg-type]
    assert (found.median_ratio, found.p99_ratio) == pytest.approx((1.0, 5.0))
    message = (
        r"^p99 ratio 5.000 is over its budget of 3: median 1000000.0 us against 1000000.0 us of "
        r"the reference \(ratio 1.000\), p99 .* \(ratio 5.000\), 100 calls each, alternately$"
    )
    with pytest.raises(GraphCheckError, match=message):
        latency_budget(clock.taking("a", *slow), clock.taking("b", 1.0), p99=3, **budgets)  # type: ignore[arg-type]


def test_both_budgets_are_named_where_both_are_broken(clock: Clock) -> None:
    with pytest.raises(GraphCheckError, match=r"median ratio 2.000 .* and p99 ratio 2.000"):
        latency_budget(clock.taking("a", 2.0), clock.taking("b", 1.0), median=1.5, p99=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"repeats": 2.5}, "repeats=2.5 is no integer"),
        ({"warmup": -1}, "warmup=-1 must be at least 0"),
        ({"median": math.nan}, "median=nan must be greater than 0"),
        ({"median": 0}, "median=0 must be greater than 0"),
        ({"median": "1"}, "median='1' is no number"),
        ({"p99": math.nan}, "p99=nan must be greater than 0"),
        ({"p99": -1}, "p99=-1 must be greater than 0"),
        ({"reference": None}, "reference=None is not callable"),
        ({"replay": 3}, "replay=3 is not callable"),
    ],
    ids=str,
)
def test_budgets_that_check_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    calls = {"replay": lambda: None, "reference": lambda: None}
    with pytest.raises(ValueError, match=message):
        latency_budget(**{**calls, "median": 1, **options})


def test_a_replay_of_which_a_call_runs_nothing_is_refused(clock: Clock) -> None:
    def generator() -> Iterator[None]:
        yield

    for calls in ((generator, lambda: None), (lambda: None, generator)):
        with pytest.raises(ValueError, match="returned a generator, so none of its body ran"):
            latency_budget(*calls, median=1)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("own_stream", [False, True])
def test_events_measure_the_stream_that_is_given_natively(own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else None
    torch.zeros(1, device="cuda")
    found = latency_budget(
        lambda: torch.cuda._sleep(2_000_000),
        lambda: torch.cuda._sleep(1_000_000),
        median=2.5,
        repeats=20,
        stream=stream,
    )
    assert found.median_ratio > 1.5
    assert found.reference_median_us > 200
