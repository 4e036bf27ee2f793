"""The plans of a drafter that drafts one token after the other: its launches are of two widths."""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphengine.kernels import RowFamily
from graphengine.models.contract import NeedsArrivals, arrival_counters
from graphengine.models.linears import LinearPlans, Linears
from graphengine.models.tuning import choose_plans


class ChainPlans(NamedTuple):
    """Of the launch with several lanes a row, and of those with one, which extend the chain."""

    first: LinearPlans
    later: LinearPlans

    @classmethod
    def chosen(
        cls,
        linears: Linears,
        dtype: torch.dtype,
        device: torch.device,
        *,
        family: RowFamily,
        chain_family: RowFamily,
    ) -> ChainPlans:
        """As `choose_plans` does, with its errors; families as of `Drafter.allocate`."""
        first, _ = choose_plans(linears, dtype, family, device)
        if chain_family == family:
            return cls(first, first)
        later, _ = choose_plans(linears, dtype, chain_family, device)
        return cls(first, later)

    def arrivals(self, config: NeedsArrivals, linears: Linears, *, widest: int, rows: int) -> int:
        """Counters of both kinds of launches: of `widest` lanes at most, and of a lane a row."""
        return max(
            arrival_counters(config, linears, self.first, widest),
            arrival_counters(config, linears, self.later, rows),
        )
