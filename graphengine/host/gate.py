"""The gate of speculative decoding: it chooses among the draft lengths that an engine has captured.

TensorRT-LLM's gate switches speculation off for good once a rolling mean of accepted drafts is
low; this gate can switch it on again. It sees only numbers, so the same calls give the same
lengths.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence


class Gate:
    """Chooses the draft length of each step by how many drafts are accepted.

    lengths      draft lengths that may be used, ascending; the gate starts with the last one
    window       records needed to judge a length
    off_below    mean accepted drafts a step below which the next shorter length is used
    on_above     mean accepted drafts a step that the next longer length must exceed to be kept
    probe_every  steps after which the next longer length is tried
    max_live     rows above which the shortest length is used; None: no limit
    schedule     the longest length for a number of live rows; None: any
    counters     the counters to add to; None: its own

    The rule: a *settled* length is judged by its `window` latest records, once there are that many.
    If their mean is below `off_below`, the next shorter length is settled. After every
    `probe_every` steps planned at a settled length that is not the longest, a *probe* starts: the
    next longer length is used until it has `window` records. If their mean is above `on_above` it
    is settled; otherwise the length before the probe is settled again. Records are dropped at each
    of these changes, so that a length is kept for `window` records or `probe_every` steps. A mean
    is over steps: accepted drafts divided by the steps of the records.

    `max_live` is independent of this: while more rows are live, steps use the first length and are
    not counted; afterwards the gate continues where it was. The same holds while the schedule
    allows only the first length. If the schedule allows only a length shorter than the one in use,
    steps use the shorter one.

    Counters: `gate/off` and `gate/on` (a shorter, a longer length was settled), `gate/probes`,
    `gate/overloaded` (steps at the first length due to `max_live` or the schedule),
    `gate/steps/K` (steps of length K).
    """

    def __init__(
        self,
        *,
        lengths: Sequence[int],
        window: int,
        off_below: float,
        on_above: float,
        probe_every: int,
        max_live: int | None = None,
        schedule: Callable[[int], int] | None = None,
        counters: Counter[str] | None = None,
    ) -> None:
        self.lengths = tuple(lengths)
        if not self.lengths or self.lengths != tuple(sorted({*self.lengths})):
            raise ValueError(f"lengths={self.lengths} must be ascending draft lengths")
        if self.lengths[0] < 0:
            raise ValueError(f"lengths={self.lengths} must not be negative")
        for name, value in (("window", window), ("probe_every", probe_every)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= off_below <= on_above:
            raise ValueError(f"{off_below=} must lie between 0 and {on_above=}")
        if max_live is not None and max_live < 1:
            raise ValueError(f"{max_live=} must be at least 1, or None")
        self.window = window
        self.off_below = off_below
        self.on_above = on_above
        self.probe_every = probe_every
        self.max_live = max_live
        self._schedule = schedule
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._level = len(self.lengths) - 1
        self._probing = False
        self._steps = 0
        self._forget()

    @property
    def drafts(self) -> int:
        """The length in use, ignoring `max_live`."""
        return self.lengths[self._level]

    @property
    def probing(self) -> bool:
        """Whether the length in use is a probe."""
        return self._probing

    @property
    def mean(self) -> float | None:
        """Mean accepted drafts a step in the records of the length in use; None without records."""
        return self._accepted / self._recorded if self._recorded else None

    def record(self, accepted: int, steps: int) -> None:
        """Record the drafts that `steps` verifying steps accepted, of a request or a single row.

        Nothing is recorded with `steps` = 0, or while the length is 0: such steps were in flight
        when the length changed.
        """
        assert accepted >= 0 and steps >= 0, f"{accepted=} {steps=}"
        if not steps or not self.drafts:
            return
        if len(self._records) == self.window:
            old_accepted, old_steps = self._records.popleft()
            self._accepted -= old_accepted
            self._recorded -= old_steps
        self._records.append((accepted, steps))
        self._accepted += accepted
        self._recorded += steps
        if len(self._records) == self.window:
            self._judge(self._accepted / self._recorded)

    def next_drafts(self, live_rows: int) -> int:
        """The drafts of the next step with `live_rows` live rows. Counts nothing."""
        if self._overloaded(live_rows):
            return self.lengths[0]
        most = self.drafts if self._schedule is None else self._schedule(live_rows)
        return min(self.drafts, most)

    def launched(self, live_rows: int, steps: int = 1) -> None:
        """Count a launch of `steps` decode steps of `next_drafts(live_rows)` drafts."""
        self.counters[f"gate/steps/{self.next_drafts(live_rows)}"] += steps
        if self._overloaded(live_rows):
            self.counters["gate/overloaded"] += steps
        elif not self._probing and self._level + 1 < len(self.lengths):
            self._steps += steps
            if self._steps >= self.probe_every:
                self.counters["gate/probes"] += 1
                self._use(self._level + 1, probing=True)

    def _overloaded(self, live_rows: int) -> bool:
        if self.max_live is not None and live_rows > self.max_live:
            return True
        return self._schedule is not None and self._schedule(live_rows) <= self.lengths[0]

    def _judge(self, mean: float) -> None:
        """Judge a full window by its `mean`."""
        if self._probing:
            kept = mean > self.on_above
            self.counters["gate/on"] += kept
            self._use(self._level if kept else self._level - 1, probing=False)
        elif mean < self.off_below and self._level:
            self.counters["gate/off"] += 1
            self._use(self._level - 1, probing=False)

    def _use(self, level: int, *, probing: bool) -> None:
        self._level, self._probing = level, probing
        self._steps = 0
        self._forget()

    def _forget(self) -> None:
        self._records: deque[tuple[int, int]] = deque()
        self._accepted = self._recorded = 0
