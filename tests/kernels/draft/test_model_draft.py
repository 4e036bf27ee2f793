"""What surrounds the runs of a draft model: its lanes, and their embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.draft import model_draft as module
from graphengine.kernels.draft.draft import DraftTiles, commit_draft
from graphengine.kernels.draft.model_draft import (
    ModelDraft,
    advance_model_draft,
    begin_model_draft,
    begin_model_draft_reference,
)
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

HUGE, LOWEST = 2**31 - 1, -(2**31)
LAST_ID = 2**31 - 1
# Exact in every dtype.
CANARY = 776.0
VOCABULARY = 60
HIDDEN = 24
LIMIT = 100


@dataclass(frozen=True)
class Twin:
    begin: Callable[..., ModelDraft]
    device: str

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def weights(
        self, H: int = HIDDEN, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An embedding, whose rows are far apart, and the weight of a norm."""
        draw = torch.Generator().manual_seed(H)
        wide = torch.randn(VOCABULARY, H + 3, generator=draw).to(self.device, dtype)
        return wide[:, :H], torch.randn(H, generator=draw).to(self.device, dtype)

    def residual(
        self, lanes: int, H: int = HIDDEN, groups: int = 3, dtype: torch.dtype = torch.float32
    ) -> Residual:
        """Full of canaries, its rows far apart."""
        wide = torch.full((2, lanes, H + 5), CANARY, device=self.device)
        return Residual(
            x=wide[0, :, :H],
            scaled=wide[1].to(dtype)[:, :H],
            squares=torch.full((groups, lanes), CANARY, device=self.device),
        )


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(begin_model_draft_reference, "cpu")
    return Twin(begin_model_draft, request.getfixturevalue("device"))


def check_stream(
    residual: Residual, lanes: DecodeLanes, embedding: torch.Tensor, weight: torch.Tensor
) -> None:
    """What `gather_and_embed` would have left; canaries in padded lanes and between the rows."""
    slots, tokens = lanes.slot.tolist(), lanes.token.tolist()
    for lane, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
        x, scaled = residual.x[lane].cpu(), residual.scaled[lane].cpu()
        squares = residual.squares[:, lane].cpu()
        if slot < 0:
            for tensor in (x, scaled, squares):
                assert (tensor == CANARY).all()
            continue
        row = torch.full((x.numel(),), torch.nan)
        if 0 <= token < VOCABULARY:
            row = embedding[token].cpu().float()
        product = (row * weight.cpu().float()).to(scaled.dtype)
        torch.testing.assert_close(x, row, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(scaled, product, rtol=0, atol=0, equal_nan=True)
        expected = torch.zeros(squares.numel(), dtype=torch.float64)
        expected[0] = row.double().square().sum()
        torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=0, equal_nan=True)
    beyond = residual.x.as_strided((len(slots), 5), residual.x.stride(), residual.x.shape[1])
    assert (beyond == CANARY).all(), "something was written between the rows"


@settings(deadline=None, max_examples=extent(16, 50))
@given(data=st.data())
def test_the_last_two_tokens_are_fed(twin: Twin, data):
    W = data.draw(st.integers(1, 5))
    slots = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True))
    slots = [data.draw(st.sampled_from([slot, slot, -1])) for slot in slots]
    starts = [data.draw(st.sampled_from([0, 7, LIMIT - 2, LIMIT - 1])) for _ in slots]
    counts = [data.draw(st.integers(0, W)) for _ in slots]
    rows = len(slots)
    token, slot_N, position, target = (torch.full((rows, W), HUGE) for _ in range(4))
    for row, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
        slot_N[row] = -1
        live = data.draw(st.integers(count, W)) if slot >= 0 else 0
        for j in range(live):
            token[row, j], slot_N[row, j] = slot + j, slot
            position[row, j], target[row, j] = start + j, 30 + slot + j
        if slot >= 0 and not live:
            slot_N[row, 0], position[row, 0] = slot, start
    flat = [twin.ints(x.flatten().tolist()) for x in (token, slot_N, position, target)]
    residual, weights = twin.residual(2 * rows), twin.weights()
    given_counts = [count if slot >= 0 else HUGE for slot, count in zip(slots, counts, strict=True)]
    draft = twin.begin(
        flat[3],
        twin.ints(given_counts),
        DecodeLanes(*flat[:3]),
        *weights,
        residual,
        limit=LIMIT,
    )
    for row, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
        if slot < 0 or count == 0:
            assert draft.lanes.slot[2 * row : 2 * row + 2].tolist() == [-1, -1]
            assert draft.rows.slot[row] == -1
            continue
        last = start + count - 1
        for lane, fed in ((2 * row, slot + count - 1), (2 * row + 1, 30 + slot + count - 1)):
            at = last + lane % 2
            fields = [int(field[lane]) for field in draft.lanes]
            assert fields == [fed, slot, at] if at < LIMIT else fields[1] == -1
        second = [int(field[row]) for field in draft.rows]
        assert second == fields if last + 1 < LIMIT else second[1] == -1
    assert draft.source.tolist() == list(range(1, 2 * rows, 2))
    check_stream(residual, draft.lanes, *weights)


def test_unknown_tokens_and_odd_widths(twin: Twin, dtypes):
    for dtype in dtypes:
        for H, groups in ((1, 1), (1000, 40), (2048, 64)):
            lanes = DecodeLanes(
                twin.ints([VOCABULARY, 3]), twin.ints([0, 1]), twin.ints([5, LIMIT - 2])
            )
            residual = twin.residual(4, H, groups, dtype)
            weights = twin.weights(H, dtype)
            draft = twin.begin(
                twin.ints([-1, 4]), twin.ints([1, 1]), lanes, *weights, residual, limit=LIMIT
            )
            assert draft.lanes.slot.tolist() == [0, 0, 1, 1]
            check_stream(residual, draft.lanes, *weights)


@pytest.mark.parametrize("tiles", [1, 700])
def test_advance_is_commit_and_embed(device, tiles):
    twin = Twin(begin_model_draft, device)
    rows = DecodeLanes(twin.ints([HUGE] * 4), twin.ints([3, 1, -1, 0]), twin.ints([7, 8, HUGE, 9]))
    best = torch.full((8, tiles), -(2**63), dtype=torch.int64)
    best[:, tiles // 2] = 1 << 32 | (LAST_ID - 20)
    health = torch.ones(8, tiles, dtype=torch.int32)
    # The last row's draft is not valid.
    health[7, 0] = 2
    drafts = DraftTiles(best.to(device), health.to(device))
    steps: dict[str, Any] = {"index": 1, "limit": LIMIT, "source_R": twin.ints([1, 3, 5, 7])}
    tables = [torch.full((5, 3), 100, dtype=torch.int32, device=device) for _ in range(2)]
    residual, weights = twin.residual(4), twin.weights()
    scale = 2.5 if tiles == 1 else 1.0

    following = advance_model_draft(
        drafts, rows, tables[0], *weights, residual, **steps, embedding_scale=scale
    )
    lanes = commit_draft(drafts, rows, tables[1], **steps)
    assert following.slot.tolist() == lanes.slot.tolist() == [3, 1, -1, -1]
    for field, expected in zip(following, lanes, strict=True):
        assert torch.equal(field[:2], expected[:2])
    assert torch.equal(*tables)
    assert tables[0].tolist() == [[100, -1, -1], [100, 20, -1], [100] * 3, [100, 20, -1], [100] * 3]
    check_stream(residual, following, weights[0] * scale, weights[1])


def test_a_scale_is_that_of_the_embedding(twin: Twin):
    embedding, weight = twin.weights()
    residual, lanes = twin.residual(2), DecodeLanes(*map(twin.ints, ([7], [1], [3])))
    options = {"limit": LIMIT, "embedding_scale": 6.5}
    draft = twin.begin(
        twin.ints([9]), twin.ints([1]), lanes, embedding, weight, residual, **options
    )
    assert draft.lanes.token.tolist() == [7, 9]
    check_stream(residual, draft.lanes, embedding * 6.5, weight)


def test_what_does_not_fit():
    twin = Twin(begin_model_draft, "cpu")
    lanes = DecodeLanes(*(twin.ints([0, 1, 2, 3]) for _ in range(3)))
    embedding, weight = twin.weights()
    good: dict[str, Any] = {
        "token_N": twin.ints([0] * 4),
        "count_R": twin.ints([1, 1]),
        "lanes": lanes,
        "embedding_VH": embedding,
        "norm_weight_H": weight,
        "residual": twin.residual(4),
        "limit": LIMIT,
    }
    begin_model_draft(**good)
    stream = good["residual"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"count_R": twin.ints([1] * 3)}, "4 lanes are no whole number of lanes for each of 3"),
        ({"embedding_VH": embedding.int()}, "embedding is torch.int32, not one of"),
        ({"norm_weight_H": weight[:3]}, r"norm_weight must be a dense torch.float32 \[24\]"),
        ({"norm_weight_H": weight.int()}, "norm_weight must be one of .*, not torch.int32"),
        ({"residual": twin.residual(2)}, r"out must be torch.float32 \[4, 24\]"),
        (
            {"residual": stream._replace(scaled=stream.scaled[:, :3])},
            r"out must be torch.float32 \[4, 24\]",
        ),
        (
            {"residual": stream._replace(squares=stream.squares[:, :3])},
            r"squares must be a dense float32 \[T, 4\], not torch.float32 \(3, 3\)",
        ),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            begin_model_draft(**good | change)


# What the PTX says.

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")


def launch_of(name: str) -> Any:
    """In bfloat16 at the width of a small model, with PDL."""
    H, N, R, K = 2048, 16, 4, 3

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def ints(*shape: int) -> torch.Tensor:
        return new(*shape, dtype=torch.int32)

    def stream(lanes: int) -> Residual:
        wide, sums = new(lanes, H, dtype=torch.float32), new(64, lanes, dtype=torch.float32)
        return Residual(wide, new(lanes, H), sums)

    weights = new(128256, H), new(H)
    if name == "begin":
        lanes = DecodeLanes(ints(N), ints(N), ints(N))
        return record_launch(
            module,
            lambda: begin_model_draft(
                ints(N),
                ints(R),
                lanes,
                *weights,
                stream(2 * R),
                limit=99,
                embedding_scale=50.5,
                pdl=True,
            ),
        )
    rows = DecodeLanes(ints(R), ints(R), ints(R))
    tiles = DraftTiles(new(2 * R, 4008, dtype=torch.int64), ints(2 * R, 4008))
    return record_launch(
        module,
        lambda: advance_model_draft(
            tiles,
            rows,
            ints(9, K),
            *weights,
            stream(R),
            index=0,
            limit=99,
            source_R=ints(R),
            pdl=True,
        ),
    )


@compiles
@pytest.mark.parametrize(
    "name, new",
    [
        ("begin", {"target_ptr", "count_ptr", "fed_token_ptr"}),
        ("advance", {"commit.best", "commit.health"}),
    ],
)
def test_only_what_is_new_is_read_after_the_wait(name, new):
    ptx, names = compile_launch(launch_of(name))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    late = {load.argument for load in loads if load.after_wait}
    assert late == new | {"stream.embedding"}
    past_caches = {load.argument for load in loads if load.past_l1}
    early = {load.argument for load in loads if not load.after_wait}
    assert early - past_caches == {"stream.norm"}
