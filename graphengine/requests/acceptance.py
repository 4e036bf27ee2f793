"""Acceptance of drafts: tokens per step, and how often the draft at each position is accepted."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """Counts over decode steps that could verify drafts, of one request or of a whole engine.

    steps    rows recorded
    tokens   tokens that they emitted: each emits one token of its own after its accepted drafts

    Positions count a step's drafts from 0; a draft is accepted only if all drafts before it are.
    """

    steps: int = 0
    tokens: int = 0
    # Numbers of steps by verified drafts, and by accepted drafts: [n] counts steps with n of them.
    _verified: list[int] = field(default_factory=list)
    _matched: list[int] = field(default_factory=list)

    def record(self, width: int, count: int, matched: int | None) -> None:
        """Count one row of one step.

        width    tokens that it fed and that were verified: 1 and its live drafts. Drafts past the
                 request's end or after a stop do not count, as they were not verified
        count    tokens that it emitted, 0 .. width
        matched  drafts accepted, 0 .. width - 1; None where acceptance was forced: then the row
                 counts only for the tokens a step
        """
        assert 0 <= count <= width, f"{count=} of {width=}"
        self.steps += 1
        self.tokens += count
        if matched is None:
            return
        assert 0 <= matched < width, f"{matched=} of {width=}"
        if len(self._verified) < width:
            more = [0] * (width - len(self._verified))
            self._verified += more
            self._matched += more
        self._verified[width - 1] += 1
        self._matched[matched] += 1

    def reset(self) -> None:
        """Set all counts to zero, as a benchmark does after its warm-up."""
        self.steps = self.tokens = 0
        self._verified.clear()
        self._matched.clear()

    @property
    def proposed(self) -> int:
        """Drafts that were verified."""
        return sum(drafts * steps for drafts, steps in enumerate(self._verified))

    @property
    def accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(drafts * steps for drafts, steps in enumerate(self._matched))

    @property
    def proposed_per_position(self) -> list[int]:
        """Steps that verified a draft at each position."""
        return _at_least(self._verified)

    @property
    def per_position(self) -> list[int]:
        """Steps that accepted the draft at each position."""
        return _at_least(self._matched)

    @property
    def mean_length(self) -> float | None:
        """The acceptance length: tokens a step, the step's own included. None without steps."""
        return self.tokens / self.steps if self.steps else None

    @property
    def rate(self) -> float | None:
        """Share of the verified drafts that was accepted. None without drafts."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def rates(self) -> list[float]:
        """For each position, the share of the steps with a draft there that accepted it."""
        pairs = zip(self.per_position, self.proposed_per_position, strict=True)
        return [accepted / proposed for accepted, proposed in pairs]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for a report in JSON."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "mean_length": self.mean_length,
            "rate": self.rate,
            "per_position": self.per_position,
            "proposed_per_position": self.proposed_per_position,
            "rates": self.rates,
        }

    def __str__(self) -> str:
        """`2.31 tokens a step (1.31 of 3.00 drafts; 71% 40% 20% by position) in 812 steps`."""
        if not self.steps:
            return "no speculative steps"
        parts = ""
        if self.proposed:
            judged = sum(self._verified)
            shares = " ".join(f"{share:.0%}" for share in self.rates)
            parts = (
                f" ({self.accepted / judged:.2f} of {self.proposed / judged:.2f} drafts; "
                f"{shares} by position)"
            )
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{self.mean_length:.2f} tokens a step{parts} in {steps}"


def _at_least(histogram: list[int]) -> list[int]:
    """Turn `histogram[n]`, steps with n drafts, into a list: [p] has steps with more than p."""
    return list(accumulate(reversed(histogram[1:])))[::-1]
