"""A vocabulary that ranks share: their best candidates and logits are those of all of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import SampleTiles, StoreLogits
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import pack
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import check_tiles, token_of_tiles_reference
from graphengine.models.launches import Share
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.vocabulary import Vocabulary, vocabulary_of

LANES, HIDDEN = 3, 8


class Absent:
    """Stands for the other ranks: gathers what each of them would bring."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.parts: list[Tensor] = []

    def reduce(self, part_NH: Tensor) -> Tensor:
        raise AssertionError("nothing is summed here")

    def push_candidates(self, best_NC: Tensor, health_NC: Tensor) -> tuple[Tensor, Tensor] | None:
        return None

    def gather(self, part_NC: Tensor) -> Tensor:
        assert torch.equal(part_NC, self.parts[self.share.rank])
        return torch.stack(self.parts)


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize(("packed", "cap"), [(False, 0.0), (True, 0.0), (False, 0.8)])
@pytest.mark.parametrize(("tokens", "ranks"), [(300, 2), (301, 4), (5, 4), (9, 8), (4, 4), (64, 2)])
def test_the_best_and_the_logits_are_those_of_one_rank(
    tokens: int, ranks: int, packed: bool, cap: float, trimmed: bool
) -> None:
    """Also where the rows of the head are of some tokens only."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(LANES, HIDDEN, generator=generator)
    rows = torch.randn(tokens, HIDDEN, generator=generator)
    # Two tokens are as good as each other: the lower id wins, whosever it is.
    rows[-1] = rows[tokens // 3]
    head = pack(quantise(rows, KIND_FORMATS["int8"])) if packed else rows
    slot, position = torch.arange(3).int(), torch.tensor([4, 5, 6]).int()
    params = SamplingTensors.neutral(3)
    params.temperature[1:] = 1.0

    def best_of(vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        sampling = SampleTiles(position, params, token_ids=vocabulary.token_ids, cap=cap)
        return linear(LinearCall(x, vocabulary.head, slot), sampling)

    ids = torch.arange(tokens, dtype=torch.int32) * 3 + 1 if trimmed else None
    whole = vocabulary_of(head, None, ids)
    expected = token_of_tiles_reference(*whole.candidates(*best_of(whole)))
    logits = whole.logits(linear(LinearCall(x, head, slot), StoreLogits(cap=cap)))
    groups = [Absent(Share(rank, ranks)) for rank in range(ranks)]
    parts = [vocabulary_of(head, group, ids) for group in groups]
    found = [best_of(part) for part in parts]
    products = [linear(LinearCall(x, part.head, slot), StoreLogits(cap=cap)) for part in parts]
    for part, group, own, product in zip(parts, groups, found, products, strict=True):
        # In the order in which a rank asks.
        group.parts = [best for best, _ in found]
        best = part.candidates(own[0], own[0])[0]
        group.parts = [health for _, health in found]
        health = part.candidates(own[1], own[1])[0]
        check_tiles(best, health, LANES)
        assert torch.equal(token_of_tiles_reference(best, health), expected)
        group.parts = products
        torch.testing.assert_close(part.logits(product), logits)


def test_candidates_that_a_kernel_has_pushed_are_not_gathered() -> None:
    group, pushed = Absent(Share(1, 2)), (torch.zeros(3, 2), torch.ones(3, 2))
    group.push_candidates = lambda *own: pushed  # type: ignore[method-assign]
    found = vocabulary_of(torch.zeros(8, 4), group).candidates(*pushed)
    assert found[0] is pushed[0] and found[1] is pushed[1]
