"""Withheld drafts, against plain Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.draft import confidence as module
from graphengine.kernels.draft.confidence import (
    follow_acceptance,
    follow_acceptance_reference,
    withhold_drafts,
    withhold_drafts_reference,
)
from graphengine.kernels.draft.draft import commit_draft_reference
from graphengine.kernels.draft.trees.top_drafts import TopDrafts
from graphengine.kernels.step.state import DecodeLanes
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch

HUGE, NAN = 2**31 - 1, math.nan
SETTINGS = settings(max_examples=extent(15, 60), deadline=None)


@dataclass(frozen=True)
class Twin:
    follow: Callable[..., None]
    withhold: Callable[..., Any]
    device: str

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def floats(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(follow_acceptance_reference, withhold_drafts_reference, "cpu")
    return Twin(follow_acceptance, withhold_drafts, request.getfixturevalue("device"))


@given(data=st.data())
@SETTINGS
def test_the_share_follows_what_is_accepted(twin: Twin, data: st.DataObject) -> None:
    """Rows of any slot and number of drafts, beside padded ones and some that emit nothing."""
    W = data.draw(st.integers(1, 5))
    share = [data.draw(st.floats(0, 1, width=32)) for _ in range(4)]
    slots = data.draw(st.permutations([0, 2, 3, -1]))
    recent, lanes, counts = twin.floats(share), [], []
    for slot in slots:
        fed = data.draw(st.integers(1, W)) if slot >= 0 else 0
        count = data.draw(st.integers(0, fed)) if slot >= 0 else HUGE
        lanes += [slot] * fed + [-1] * (W - fed)
        counts.append(count)
        if slot >= 0 and count:
            seen = (count - 1) / (fed - 1) if fed > 1 else 1.0
            share[slot] += (seen - share[slot]) / 16
    twin.follow(recent, twin.ints(counts), twin.ints(lanes))
    assert recent.tolist() == pytest.approx(share, abs=1e-6)


@given(data=st.data())
@SETTINGS
def test_a_chain_ends_where_it_is_not_sure_enough(twin: Twin, data: st.DataObject) -> None:
    """A chain of three drafts, each committed; the first run has more lanes than rows."""
    least = data.draw(st.sampled_from([0.05, 0.3, 0.7]))
    share = [data.draw(st.sampled_from([0.1, 0.5, 1.0])) for _ in range(4)]
    slots = data.draw(st.permutations([0, 1, 3, -1]))
    table = twin.ints([[-7] * 3] * 4)
    sure = twin.floats([NAN] * 4)
    rows = DecodeLanes(*map(twin.ints, ([HUGE] * 4, slots, [5] * 4)))
    source = twin.ints([2 * row + 1 if slots[row] >= 0 else HUGE for row in range(4)])
    expected = {slot: [-1] * 3 for slot in slots if slot >= 0}
    product = dict.fromkeys(expected, 1.0)
    for index in range(3):
        lanes = 4 if index else 8
        token, chance = [[HUGE]] * lanes, [[NAN]] * lanes
        for row, slot in enumerate(slots):
            if slot < 0:
                continue
            lane = row if index else 2 * row + 1
            p = data.draw(st.sampled_from([0.02, 0.2, 0.61, 0.97]))
            token[lane] = [data.draw(st.sampled_from([-1, 4, 70_000]))]
            chance[lane] = [math.log(p)]
            ended = index and expected[slot][index - 1] < 0
            product[slot] *= math.sqrt(p * share[slot])
            if not ended and product[slot] >= least:
                expected[slot][index] = token[lane][0]
        tiles = twin.withhold(
            TopDrafts(twin.ints(token), twin.floats(chance)),
            rows.slot,
            None if index else source,
            twin.floats(share),
            sure,
            least=least,
            first=index == 0,
        )
        assert tiles.best.shape == (lanes, 1)
        rows = commit_draft_reference(
            tiles, rows, table, index=index, limit=99, source_R=None if index else source
        )
    for slot, drafts in expected.items():
        assert table[slot].tolist() == drafts, f"{product=}"
    assert table[2].tolist() == [-7] * 3


def test_a_product_that_forgets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts of chance 0.6 are 0.36 together: the second is not verified from 0.5 on."""
    twin = Twin(follow_acceptance_reference, withhold_drafts_reference, "cpu")
    drafts = TopDrafts(twin.ints([[3]]), twin.floats([[math.log(0.36)]]))
    kept = []
    for forgets in (False, True):
        sure = twin.floats([0.0])
        for index in range(2):
            tiles = twin.withhold(
                drafts, twin.ints([0]), None, twin.floats([1.0]), sure,
                least=0.5, first=forgets or index == 0,
            )  # fmt: skip
            kept.append(int(module.tile_of_token_reference(twin.ints([3]), sure >= 0.5)[1]))
            assert int(tiles.health[0, 0]) == kept[-1]
    assert kept[0] == kept[2] == kept[3] != kept[1]


def test_what_does_not_fit() -> None:
    twin = Twin(follow_acceptance, withhold_drafts, "cpu")
    recent = twin.floats([1.0] * 2)
    with pytest.raises(ValueError, match="3 lanes are no whole number of lanes for each of 2 rows"):
        follow_acceptance(recent, twin.ints([1, 1]), twin.ints([0] * 3))
    with pytest.raises(ValueError, match=r"recent must be a dense torch\.float32"):
        follow_acceptance(recent.double(), twin.ints([1, 1]), twin.ints([0] * 2))
    good: dict[str, Any] = {
        "drafts": TopDrafts(twin.ints([[1], [2]]), twin.floats([[0.0], [0.0]])),
        "slot_R": twin.ints([0, 1]),
        "source_R": None,
        "recent_S": recent,
        "sure_R": twin.floats([0.0] * 2),
        "least": 0.5,
        "first": True,
    }
    withhold_drafts(**good)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"least": 0.0}, "least=0.0 must be above 0 and at most 1"),
        ({"sure_R": recent[:1]}, r"sure must be a dense torch.float32 \[2\]"),
        ({"source_R": twin.ints([1])}, r"source must be a dense \[2\]"),
        ({"slot_R": twin.ints([1]), "sure_R": recent[:1]}, r"drafts must be \[1, 1\], not \(2, 1"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            withhold_drafts(**good | change)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_what_is_new_is_read_after_the_wait() -> None:
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def follow() -> None:
        follow_acceptance(floats(4), ints(2), ints(8), pdl=True)

    def withhold() -> None:
        drafts = TopDrafts(ints(8, 1), floats(8, 1))
        withhold_drafts(
            drafts, ints(2), ints(2), floats(4), floats(2), least=0.5, first=False, pdl=True
        )

    for call in (follow, withhold):
        ptx, _ = compile_launch(record_launch(module, call))
        assert_waits_before_it_shows(ptx)
