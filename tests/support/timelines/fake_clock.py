"""A clock under a test's control, and engines that spend its time, to test latency figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from graphengine import Result
from graphengine.requests.request import Timings


class Clock:
    """Called, it is `time.perf_counter`; each call may take a while, and a sleep takes its
    argument.
    """

    def __init__(self, per_call: float = 0.0) -> None:
        self.now = 0.0
        self.per_call = per_call

    def __call__(self) -> float:
        self.now += self.per_call
        return self.now

    def nanoseconds(self) -> int:
        return round(1e9 * self())

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def module(self) -> Any:
        """Stands in for the module `time` of the code under test."""
        return SimpleNamespace(
            perf_counter=self, perf_counter_ns=self.nanoseconds, monotonic=self, sleep=self.sleep
        )


def result(*moments: float, tokens: tuple[int, ...] | None = None) -> Result:
    """A result whose tokens came at `moments`; submitted at 0."""
    return Result(
        request_id=1,
        prompt_token_ids=(1,),
        token_ids=tuple(range(len(moments))) if tokens is None else tokens,
        text="",
        finish_reason="length",
        seed=0,
        timings=Timings(submitted=0.0, tokens=list(moments)),
    )


@dataclass(kw_only=True)
class Row:
    """A request of a `TimedEngine`: `tokens` of them are to come."""

    tokens: int
    timings: Timings = field(default_factory=lambda: Timings(submitted=0.0))

    @property
    def finished(self) -> bool:
        return len(self.timings.tokens) >= self.tokens


class TimedEngine:
    """Each step gives every request a token. Step i spends `before[i]` seconds on its own work,
    `waits[i]` in its mailbox and `after[i]` on its own work again; on an idle engine a wait takes
    `again` seconds.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        before: Sequence[float],
        waits: Sequence[float],
        after: Sequence[float],
        again: float,
    ) -> None:
        self.clock = clock
        self.spent = list(zip(before, waits, after, strict=True))
        self.again = again
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=100))
        self.runtime = SimpleNamespace(mailbox=_Mailbox(self._wait))
        self.rows: list[Row] = []
        self.steps = 0

    def submit(self, prompt: Sequence[int], params: Any) -> Row:
        self.rows.append(Row(tokens=params.max_tokens))
        return self.rows[-1]

    @property
    def busy(self) -> bool:
        return not all(row.finished for row in self.rows)

    def step(self) -> list[Row]:
        before, _, after = self.spent[self.steps]
        self.clock.now += before
        self.runtime.mailbox.wait(self.steps, lanes=len(self.rows))
        for row in self.rows:
            row.timings.tokens.append(self.clock.now)
        self.clock.now += after
        self.steps += 1
        return list(self.rows)

    def _wait(self) -> None:
        self.clock.now += self.spent[self.steps][1] if self.busy else self.again


class _Mailbox:
    def __init__(self, spend: Callable[[], None]) -> None:
        self._spend = spend

    def wait(self, sequence: int, *, lanes: int) -> None:
        self._spend()
