"""The logits of a drafter: the target's lm_head or the rows of it that are kept, and greedy drafts.

Letters: S slots, N lanes, H hidden, V vocabulary, D draft vocabulary, C tiles of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.kernels import (
    DecodeLanes,
    DraftTiles,
    LinearPlan,
    Residual,
    SamplingTensors,
    linear_sample,
)
from graphengine.models.dense import DecodeLaunch
from graphengine.speculative import offsets


class DraftHead:
    """lm_head with the greedy sampler folded in.

    weight  [V, H], the lm_head
    ids     int64 [D], ascending: the rows of it that make up the draft vocabulary, which are
            copied; None: all
    plan    how the product is cut
    eps     of the norm whose scaled stream is fed
    """

    def __init__(
        self, weight: Tensor, ids: Tensor | None, *, plan: LinearPlan, eps: float, slots: int
    ) -> None:
        device = weight.device
        self.weight, self.d2t = weight, None
        if ids is not None:
            self.weight = weight.index_select(0, ids.to(device))
            self.d2t = offsets(ids, weight.shape[0]).to(device)
        self._plan, self._eps = plan, eps
        # Temperature 0, and no stop id that would have to wait.
        whole = torch.zeros(slots, dtype=torch.int32, device=device)
        self._greedy = SamplingTensors(
            temperature=whole.float(),
            top_k=whole,
            top_p=torch.ones_like(whole, dtype=torch.float32),
            min_p=whole.float(),
            seed=whole.long(),
            stop_ids=whole.new_full((slots, 1), -1),
            min_len=whole,
        )

    def tiles(
        self, hidden: Residual | Tensor, lanes: DecodeLanes, launch: DecodeLaunch
    ) -> DraftTiles:
        """The most probable draft behind each lane, by tile. `hidden` is [N, H] behind the final
        norm, or the stream scaled for it.
        """
        x, squares = (
            (hidden, None) if isinstance(hidden, Tensor) else (hidden.scaled, hidden.squares)
        )
        best, health = linear_sample(
            x,
            self.weight,
            lanes.slot,
            lanes.position,
            self._greedy,
            squares_TN=squares,
            eps=self._eps,
            plan=self._plan,
            arrivals=launch.arrivals,
            pdl=launch.pdl,
        )
        return DraftTiles(best, health, self.d2t)
