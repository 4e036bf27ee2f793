"""The logits of a step, of which each of several ranks computes those of its own tokens.

Every rank has as many rows of lm_head. Where ranks do not divide the vocabulary the last ones begin
earlier, and some rows are two ranks': both compute the same bits for them. So the best candidate of
all ranks is the best of all logits, and gathered logits are those of one rank.

Letters: N lanes, V vocabulary, C tiles of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.kernels import AnyWeight
from graphengine.models.contract import RankGroup


class Vocabulary:
    """All rows of lm_head `[V, H]`: those of an engine of one rank.

    head       what a step multiplies by
    token_ids  int32, the token of each of its rows; None: row v is token v
    """

    def __init__(self, head: AnyWeight) -> None:
        self.head = head
        self.token_ids: Tensor | None = None

    def candidates(self, best_NC: Tensor, health_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tiles of the vocabulary."""
        return best_NC, health_NC

    def logits(self, logits_NV: Tensor) -> Tensor:
        """`[N, V]` of the whole vocabulary."""
        return logits_NV


class VocabularyPart(Vocabulary):
    """The rows that this rank of `group` has."""

    def __init__(self, head: Tensor, group: RankGroup) -> None:
        rank, ranks = group.share
        count = -(-len(head) // ranks)
        self._starts = [min(each * count, len(head) - count) for each in range(ranks)]
        self._count, self._group = count, group
        first = self._starts[rank]
        super().__init__(head[first : first + count])
        ids = torch.arange(first, first + count, dtype=torch.int32, device=head.device)
        self.token_ids = ids

    def candidates(self, best_NC: Tensor, health_NC: Tensor) -> tuple[Tensor, Tensor]:
        return self._beside(best_NC), self._beside(health_NC)

    def _beside(self, part_NC: Tensor) -> Tensor:
        return self._group.gather(part_NC).transpose(0, 1).flatten(1)

    def logits(self, logits_NV: Tensor) -> Tensor:
        parts = self._group.gather(logits_NV)
        # Each rank's up to where the next one begins.
        ends = [*self._starts[1:], self._starts[-1] + self._count]
        bounds = zip(parts, self._starts, ends, strict=True)
        return torch.cat([part[:, : end - start] for part, start, end in bounds], dim=1)
