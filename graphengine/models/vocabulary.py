"""The logits of a step, where each rank computes those of its own rows of a head.

All ranks have equally many rows. If the rows do not divide evenly, the last ranks' parts begin
earlier and share rows with their neighbours; both compute the same bits for these. So the best
candidate of all ranks is the best of all logits, and gathered logits equal those that a single rank
would compute. Rows of a packed head lie in blocks, and each part begins at a block.

Letters: N lanes, V rows of the head, H hidden, C tiles of its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.packed import BLOCK_ROWS, rows_of
from graphengine.models.launches import RankGroup


class Vocabulary:
    """All rows of a head `[V, H]`, for an engine of one rank.

    head       the weight that a step multiplies by
    token_ids  int32, ascending: the token of each of its rows; None: row v is token v
    bias       of each of its rows; None: it has none
    """

    def __init__(
        self, head: AnyWeight, token_ids: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        self.head = head
        self.token_ids = token_ids
        self.bias = bias

    def candidates(self, best_NC: Tensor, health_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the candidates of this rank's tiles into the candidates of all ranks."""
        return best_NC, health_NC

    def logits(self, logits_NV: Tensor) -> Tensor:
        """Logits `[N, V]` of all rows, from those of this rank's rows."""
        return logits_NV


class VocabularyPart(Vocabulary):
    """This rank's rows of a head, in a `group` of ranks."""

    def __init__(
        self,
        head: AnyWeight,
        group: RankGroup,
        token_ids: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        rank, ranks = group.share
        rows, together = head.shape[0], 1 if isinstance(head, Tensor) else BLOCK_ROWS
        # The rows past the last whole block lengthen each part, so that the last one ends at V.
        blocks = rows // together
        of_rank = -(-blocks // ranks)
        count = of_rank * together + rows % together
        self._starts = [min(each * of_rank, blocks - of_rank) * together for each in range(ranks)]
        self._count, self._group = count, group
        start = self._starts[rank]
        if token_ids is None:
            device = head.device if isinstance(head, Tensor) else head.codes.device
            token_ids = torch.arange(rows, dtype=torch.int32, device=device)
        own = slice(start, start + count)
        part = head[own] if isinstance(head, Tensor) else rows_of(head, start, count)
        super().__init__(part, token_ids[own], None if bias is None else bias[own])

    def candidates(self, best_NC: Tensor, health_NC: Tensor) -> tuple[Tensor, Tensor]:
        pushed = self._group.push_candidates(best_NC, health_NC)
        return pushed or (self._beside(best_NC), self._beside(health_NC))

    def _beside(self, part_NC: Tensor) -> Tensor:
        # With one tile per rank, the flattened parts are a view.
        return self._group.gather(part_NC).transpose(0, 1).flatten(1).contiguous()

    def logits(self, logits_NV: Tensor) -> Tensor:
        parts = self._group.gather(logits_NV)
        # Keep each rank's logits up to where the next rank's begin.
        ends = [*self._starts[1:], self._starts[-1] + self._count]
        bounds = zip(parts, self._starts, ends, strict=True)
        return torch.cat([part[:, : end - start] for part, start, end in bounds], dim=1)


def vocabulary_of(
    head: AnyWeight,
    group: RankGroup | None,
    token_ids: Tensor | None = None,
    bias: Tensor | None = None,
) -> Vocabulary:
    """This rank's part of a head; the whole head if there is no group."""
    if group is None:
        return Vocabulary(head, token_ids, bias)
    return VocabularyPart(head, group, token_ids, bias)
