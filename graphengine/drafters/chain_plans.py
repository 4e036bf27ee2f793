"""The plans of a drafter that drafts token by token, with launches of two widths."""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphengine.kernels.linear.plans import RowFamily
from graphengine.models.linears import LinearPlans, Linears
from graphengine.models.plans.choosing import choose_plans


class ChainPlans(NamedTuple):
    """Plans of the first launch, with several lanes a row, and of the later ones, with one lane a
    row, which extend the chain.
    """

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
        """Choose both with `choose_plans`, with its errors; families as in `Drafter.allocate`."""
        first, _ = choose_plans(linears, dtype, family, device)
        if chain_family == family:
            return cls(first, first)
        later, _ = choose_plans(linears, dtype, chain_family, device)
        return cls(first, later)
