"""Arguments that the launches of the experts' kernels share, already checked by `experts.py`.

Letters: N lanes, k experts of a lane, P = N * k pairs, E experts, K input features and M rows of an
expert's weight, T groups of columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.experts.grouping import Grouping
from graphengine.kernels.experts.held import held_options
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.norm_rope.activation import UNGATED_LIMIT, Gating, gating_constants

ExpertWeight = torch.Tensor | PackedExperts


class PairProduct(NamedTuple):
    """A product of each pair's inputs with the weight of its expert."""

    x: torch.Tensor
    """[N, K], shared by the pairs of a lane, or [P, K]."""
    weight_EMK: ExpertWeight
    bias_EM: torch.Tensor | None
    slot_N: torch.Tensor
    routes: Routes
    grouping: Grouping | None
    """None: pair by pair."""
    held: range | None
    pdl: bool

    @property
    def lanes(self) -> int:
        return len(self.slot_N)

    @property
    def top_k(self) -> int:
        return self.routes.expert.shape[1]

    @property
    def order(self) -> torch.Tensor | None:
        return None if self.grouping is None else self.grouping.order

    @property
    def blocks(self) -> torch.Tensor | None:
        return None if self.grouping is None else self.grouping.blocks

    @property
    def block_count(self) -> int:
        """Number of blocks; 0 if pairs are not grouped."""
        return 0 if self.grouping is None else self.grouping.blocks.shape[1]

    @property
    def units(self) -> int:
        """Number of blocks, or of pairs if they are not grouped."""
        return self.routes.expert.numel() if self.grouping is None else self.block_count

    @property
    def options(self) -> dict[str, Any]:
        """Options of every launch."""
        return {**held_options(self.held), **launch_options(self.pdl)}


class ActivationArgs(NamedTuple):
    """The activation of a product of gates and ups, or of ups; NO_ACTIVATION for down."""

    squares_TN: torch.Tensor | None = None
    """Sums of squares of the inputs, by whose rms the product is divided; None: they are normed."""
    eps: float = 0.0
    gating: Gating = "silu"
    gated: bool = True
    """Whether there are gates; without them ups go through a squared ReLU."""

    @property
    def options(self) -> dict[str, Any]:
        """Constexprs of a kernel."""
        ungated = {} if self.gated else {"LIMIT": UNGATED_LIMIT}
        groups = 0 if self.squares_TN is None else len(self.squares_TN)
        return {"GROUPS": groups, **gating_constants(self.gating), **ungated}


NO_ACTIVATION = ActivationArgs()
