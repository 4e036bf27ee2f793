"""What surrounds the run of a block drafter, against what its lanes mean one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.draft import block as block_module
from graphengine.kernels.draft import markov as markov_module
from graphengine.kernels.draft.block import (
    begin_block_draft,
    begin_block_draft_reference,
    commit_block_draft,
    commit_block_draft_reference,
)
from graphengine.kernels.draft.draft import DraftTiles
from graphengine.kernels.draft.markov import (
    MarkovHead,
    markov_draft,
    markov_draft_reference,
    markov_logits,
    markov_logits_reference,
)
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import (
    sample_reference,
    sample_tiles_reference,
    token_of_tiles_reference,
)
from graphengine.kernels.step.state import DecodeLanes
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch
from launches.finish import Twin

POISON, CANARY = 2**31 - 1, 777
V, H, MASK = 40, 24, 31


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


def ints(values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def embedded(token: int, table: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = table[token].float()
    return x, (x * norm.float()).to(table.dtype), x.square().sum()


def begun(twin: Twin, width: int, limit: int, dtype: torch.dtype) -> tuple[Any, Residual, Any]:
    """Four rows of 3 lanes: all stay, one stays, none stay, and one that is padded."""
    draw = torch.Generator().manual_seed(width)
    table = torch.randn(V, H, generator=draw).to(twin.device, dtype)
    norm = torch.randn(H, generator=draw).to(twin.device, dtype)
    slot = ints([5, 5, 5, 2, 2, -1, 1, 1, 1, -1, -1, -1], twin.device)
    position = ints([7, 8, 9, 20, 21, POISON, 3, 4, 5, *[POISON] * 3], twin.device)
    token = ints([11, 12, 13, 14, POISON, 0, POISON, 0, 0, POISON, 0, 0], twin.device)
    count = ints([3, 1, 0, POISON], twin.device)
    residual = new_residual(4 * width, H, 2, dtype=dtype, device=twin.device)
    for part in residual[:3]:
        part.fill_(CANARY)
    op = begin_block_draft_reference if twin.reference else begin_block_draft
    draft = op(
        token, count, DecodeLanes(token, slot, position), table, norm, residual,
        width=width, mask_token=MASK, limit=limit,
    )  # fmt: skip
    return draft, residual, (table, norm)


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_block_follows_what_was_verified(twin: Twin, width: int, dtype: torch.dtype) -> None:
    limit = 23
    draft, residual, (table, norm) = begun(twin, width, limit, dtype)
    assert draft.context_slot.tolist() == [5, 5, 5, 2, -1, -1, *[-1] * 6]
    assert draft.start.tolist() == [width * row for row in range(5)]
    # Of the live rows; row 1's block would reach past the limit.
    assert draft.seen[:2].tolist() == [10 + width, min(21 + width, limit)]
    expected = [(5, 10, 13), (2, 21, 14)]
    slots = draft.lanes.slot.view(4, width).tolist()
    assert slots[2:] == [[-1] * width] * 2 and draft.rows.slot.tolist() == [5, 2, -1, -1]
    for row, (slot, first, newest) in enumerate(expected):
        assert [int(field[row]) for field in draft.rows] == [newest, slot, first]
        for number in range(width):
            lane, inside = row * width + number, first + number < limit
            assert slots[row][number] == (slot if inside else -1)
            got = [part[..., lane, :] for part in residual[:2]] + [residual.squares[:, lane].sum()]
            if not inside:
                assert all(bool((part == CANARY).all()) for part in got[:2])
                continue
            token = newest if number == 0 else MASK
            assert [int(field[lane]) for field in draft.lanes] == [token, slot, first + number]
            for part, wanted in zip(got, embedded(token, table, norm), strict=True):
                torch.testing.assert_close(part, wanted)


@pytest.mark.parametrize("extra", [0, 1])
def test_drafts_are_those_of_the_last_lanes(twin: Twin, extra: int) -> None:
    """One row has a part past the limit, one has a NaN, and one is padded, which has no drafts."""
    drafts, draw = 3, torch.Generator().manual_seed(extra)
    width = drafts + extra
    slot = torch.tensor([4, 0, -1, 2]).repeat_interleave(width).int()
    slot[2 * width - 2 : 2 * width] = -1
    logits = torch.randn(4 * width, V, generator=draw)
    logits[4 * width - 2] = torch.nan
    params = SamplingTensors.neutral(5)
    every = torch.zeros_like(slot)
    tiles = sample_tiles_reference(logits, every, every, params, tile=16)
    table = torch.full((5, drafts), CANARY, dtype=torch.int32)
    lanes = DecodeLanes(torch.full_like(slot, POISON), slot, torch.full_like(slot, POISON))
    table, lanes = table.to(twin.device), DecodeLanes(*(x.to(twin.device) for x in lanes))
    op = commit_block_draft_reference if twin.reference else commit_block_draft
    op(DraftTiles(*(x.to(twin.device) for x in tiles)), lanes, table, rows=4)
    token = logits.argmax(dim=1).view(4, width)[:, -drafts:].tolist()
    assert table[4].tolist() == token[0]
    assert table[0].tolist() == [token[1][0], -1, -1]
    assert table[2].tolist() == [token[3][0], -1, token[3][2]]
    assert bool((table[[1, 3]] == CANARY).all())


@pytest.mark.parametrize("rank", [5, 256])
def test_each_draft_follows_the_one_before(twin: Twin, rank: int) -> None:
    """Greedily and with noise; stop ids wait; no padded row, and no token without a row of w1."""
    draw, width, index = torch.Generator().manual_seed(rank), 3, 1
    vocabulary = 70
    logits = torch.randn(12, vocabulary, generator=draw)
    wide = torch.randn(2, vocabulary, rank + 3, generator=draw) / rank**0.5 * 2
    w1, w2 = wide[0, :-2, :rank], wide[1, :, :rank]
    params = SamplingTensors.neutral(3, stop_ids=1)
    params.temperature[1] = 0.7
    params.seed[1] = 9
    # What no fast sampler looks at.
    params.top_n_sigma[1], params.top_k[1] = 1e-3, 1
    lanes = DecodeLanes(ints([3, 67, POISON, 69], "cpu"), ints([0, 1, -1, 2], "cpu"),
                        ints([5, 6, POISON, 7], "cpu"))  # fmt: skip
    summed = logits[index::width].clone()
    for row, token in ((0, 3), (1, 67)):
        summed[row] += w2 @ w1[token]
    params.stop_ids[0], params.min_len[0] = int(summed[0].argmax()), 7
    plain = params._replace(top_n_sigma=params.top_n_sigma * 0, top_k=params.top_k * 0)
    expected = sample_reference(summed, lanes.slot, lanes.position, plain)
    moved = [x.to(twin.device) for x in (logits, w1, w2)]
    arguments = (
        moved[0], MarkovHead(*moved[1:]), DecodeLanes(*(x.to(twin.device) for x in lanes)),
        SamplingTensors(*(x.to(twin.device) for x in params)),
    )  # fmt: skip
    if twin.reference:
        tiles = DraftTiles(*markov_draft_reference(*arguments, index=index))
    else:
        tiles = markov_draft(*arguments, index=index)
    op = markov_logits_reference if twin.reference else markov_logits
    whole = op(*arguments[:3], index=index).cpu()
    torch.testing.assert_close(whole[:2], summed[:2], rtol=1e-5, atol=1e-5)
    assert bool(whole[3].isnan().all())
    token = token_of_tiles_reference(tiles.best.cpu(), tiles.health.cpu())
    assert token[:2].tolist() == expected[:2].tolist() and int(token[3]) == -1
    assert int(token[0]) != int(params.stop_ids[0])


def test_what_does_not_fit_is_refused() -> None:
    lanes = DecodeLanes(*(ints([1, 1], "cpu") for _ in range(3)))
    table, norm = torch.zeros(V, H), torch.ones(H)
    residual = new_residual(4, H, 1, dtype=torch.float32, device="cpu")

    def begin(**changes: Any) -> None:
        sizes = {"width": 2, "mask_token": 3, "limit": 9} | changes
        begin_block_draft(lanes.token, ints([1, 1], "cpu"), lanes, table, norm, residual, **sizes)

    begin()
    for changes, message in (
        ({"mask_token": V}, "mask_token=40 is none of the embedding's 40 tokens"),
        ({"mask_token": -1}, "mask_token=-1 is none"),
        ({"width": 0}, "a block of 0 lanes must have 1 or more"),
        ({"width": 3}, r"out must be torch.float32 \[6, 24\]"),
    ):
        with pytest.raises(ValueError, match=message):
            begin(**changes)
    tiles = DraftTiles(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="2 lanes of 1 rows are no blocks with 3 drafts each"):
        commit_block_draft(tiles, lanes, torch.zeros(2, 3, dtype=torch.int32), rows=1)
    params = SamplingTensors.neutral(2)
    head = MarkovHead(torch.zeros(V, 4), torch.zeros(V, 5))
    with pytest.raises(
        ValueError,
        match=r"w1 torch.float32 \[40, 4\] and w2 torch.float32 \[40, 5\] is none of one",
    ):
        markov_draft(torch.zeros(2, V), head, lanes, params, index=0)
    head = MarkovHead(torch.zeros(V, 1025), torch.zeros(V, 1025))
    with pytest.raises(ValueError, match="a head of rank 1025: at most 1024"):
        markov_draft(torch.zeros(2, V), head, lanes, params, index=0)
    head = MarkovHead(torch.zeros(V, 4), torch.zeros(V, 4))
    with pytest.raises(ValueError, match="lane 1 of 2 blocks is not among the logits of 2 lanes"):
        markov_draft(torch.zeros(2, V), head, lanes, params, index=1)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_kernels_compile_for_sm_90_and_wait_before_they_show() -> None:
    """A block of Qwen3-8B, and a head of rank 256 for its vocabulary."""
    meta, bf16 = {"device": "meta"}, torch.bfloat16
    rows, width, vocabulary, hidden = 2, 7, 151_936, 4096

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, **meta)

    def lanes(count: int) -> DecodeLanes:
        return DecodeLanes(*(new(count) for _ in range(3)))

    residual = new_residual(rows * width, hidden, 1, dtype=bf16, device="meta")
    tiles = DraftTiles(new(rows * width, 1187, dtype=torch.int64), new(rows * width, 1187))
    head = MarkovHead(*(new(vocabulary, 256, dtype=bf16) for _ in range(2)))
    params = SamplingTensors.neutral(rows, device="meta")
    calls = {
        block_module: [
            lambda: begin_block_draft(
                new(16), new(rows), lanes(16), new(vocabulary, hidden, dtype=bf16),
                new(hidden, dtype=bf16), residual, width=width, mask_token=151_669, limit=4096,
                pdl=True,
            ),
            lambda: commit_block_draft(tiles, lanes(14), new(4, 7), rows=rows, pdl=True),
        ],
        markov_module: [
            lambda: markov_draft(
                new(14, vocabulary, dtype=torch.float32), head, lanes(rows), params, index=3,
                pdl=True,
            ),
            lambda: markov_logits(
                new(14, vocabulary, dtype=torch.float32), head, lanes(rows), index=3, pdl=True
            ),
        ],
    }  # fmt: skip
    for module, launches in calls.items():
        for call in launches:
            ptx, _ = compile_launch(record_launch(module, call))
            assert_waits_before_it_shows(ptx)
