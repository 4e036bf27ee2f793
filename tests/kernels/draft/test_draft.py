"""What surrounds the runs of a draft module: its inputs, and its drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.draft import draft as module
from graphengine.kernels.draft.draft import (
    DraftTiles,
    Fusion,
    Hidden,
    advance_module_draft,
    begin_module_draft,
    begin_module_draft_reference,
    combine_hidden,
    combine_hidden_reference,
    commit_draft,
    commit_draft_reference,
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
NOTHING = -(2**63)
FINITE, NAN = 1, 2
# Exact in every dtype.
CANARY = 776.0
VOCABULARY = 50
HIDDEN = 24
LIMIT = 1000
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Twin:
    combine: Callable[..., torch.Tensor]
    begin: Callable[..., Any]
    commit: Callable[..., DecodeLanes]
    device: str

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def fusion(
        self, H: int = HIDDEN, dtype: torch.dtype = torch.float32, *, hidden_first: bool = False
    ) -> Fusion:
        """Rows of the embedding are far apart."""
        draw = torch.Generator().manual_seed(H)
        wide = torch.randn(VOCABULARY, H + 3, generator=draw).to(self.device, dtype)
        norms = torch.randn(2, H, generator=draw).to(self.device, dtype)
        return Fusion(wide[:, :H], norms[0], norms[1], eps=1e-5, hidden_first=hidden_first)

    def stream(
        self, lanes: int, H: int = HIDDEN, groups: int = 3, dtype: torch.dtype = torch.float32
    ) -> Residual:
        """Hidden states whose rows are far apart; their x is not what is scaled."""
        draw = torch.Generator().manual_seed(lanes)
        wide = torch.randn(lanes, H + 5, generator=draw).to(self.device, dtype)
        squares = (torch.rand(groups, lanes, generator=draw) + 0.5) * H / groups
        return Residual(
            x=torch.full((lanes, H + 2), CANARY, device=self.device)[:, :H],
            scaled=wide[:, :H],
            squares=squares.to(self.device),
        )

    def tiles(self, drafts: Sequence[int | None], tiles: int = 3) -> DraftTiles:
        """Tiles that yield these drafts: below 0 for no valid logits, None for a lane of poison."""
        best = torch.full((len(drafts), tiles), NOTHING, dtype=torch.int64)
        health = torch.zeros((len(drafts), tiles), dtype=torch.int32)
        for lane, draft in enumerate(drafts):
            if draft is None:
                best[lane], health[lane] = 2**63 - 1, FINITE
            elif draft < 0:
                health[lane, (5 * lane) % tiles] = (0, NAN)[lane % 2]
            else:
                best[lane] = -5 << 32 | LAST_ID
                best[lane, (7 * lane + tiles - 1) % tiles] = 1 << 32 | (LAST_ID - draft)
                health[lane, (5 * lane) % tiles] = FINITE
        return DraftTiles(best.to(self.device), health.to(self.device))


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(
            combine_hidden_reference, begin_module_draft_reference, commit_draft_reference, "cpu"
        )
    device = request.getfixturevalue("device")
    return Twin(combine_hidden, begin_module_draft, commit_draft, device)


def combined_row(
    token: int, hidden: Hidden, source: int, fusion: Fusion, hidden_eps: float
) -> torch.Tensor:
    """One row by the formula, in float64 but for the rounding of the hidden state."""
    H = fusion.embedding.shape[1]
    if not 0 <= token < VOCABULARY:
        return torch.full((2 * H,), math.nan, dtype=torch.float64)
    if isinstance(hidden, Residual):
        square = hidden.squares[:, source].double().sum() / H
        value = hidden.scaled[source].double() / (square + hidden_eps).sqrt()
        value = value.to(hidden.scaled.dtype)
    else:
        value = hidden[source]
    halves = []
    for row, weight in (
        (fusion.embedding[token], fusion.embedding_norm),
        (value, fusion.hidden_norm),
    ):
        wide = row.double()
        halves.append(wide / (wide.square().mean() + fusion.eps).sqrt() * weight.double())
    return torch.cat(halves[::-1] if fusion.hidden_first else halves).cpu()


def check_combined(
    combined: torch.Tensor,
    lanes: DecodeLanes,
    hidden: Hidden,
    sources: Sequence[int],
    fusion: Fusion,
    hidden_eps: float,
) -> None:
    """Every live lane's row."""
    assert combined.shape == (lanes.slot.numel(), 2 * fusion.embedding.shape[1])
    for lane, (token, slot) in enumerate(
        zip(lanes.token.tolist(), lanes.slot.tolist(), strict=True)
    ):
        if slot >= 0:
            expected = combined_row(token, hidden, sources[lane], fusion, hidden_eps)
            tolerance = TOLERANCE[combined.dtype]
            torch.testing.assert_close(
                combined[lane].cpu().double(),
                expected,
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
            )


def check_cleared(residual: Residual, slot: torch.Tensor) -> None:
    """The stream is 0 in live lanes, whole in padded ones, and whole between the rows."""
    lanes, H = residual.x.shape
    for lane, live in enumerate((slot >= 0).tolist()):
        assert (residual.x[lane] == (0.0 if live else CANARY)).all()
    beyond = residual.x.as_strided((lanes, 2), residual.x.stride(), H)
    assert (beyond == CANARY).all()


# combine_hidden.


@pytest.mark.parametrize("hidden_first", [False, True])
@pytest.mark.parametrize("kind", ["stream", "plain"])
@pytest.mark.parametrize("chosen", [False, True])
def test_both_halves_are_normed(twin: Twin, dtypes, hidden_first, kind, chosen):
    for dtype in dtypes:
        slot = twin.ints([4, -1, 0, 7, 2, -1])
        token = twin.ints([0, HUGE, VOCABULARY - 1, 17, 17, LOWEST])
        sources = [3, HUGE, 8, 8, 0, LOWEST] if chosen else list(range(6))
        stream = twin.stream(9, dtype=dtype)
        hidden: Hidden = stream if kind == "stream" else stream.scaled
        for lane in (1, 5):
            stream.scaled[lane] = math.nan
            stream.squares[:, lane] = math.nan
        fusion = twin.fusion(dtype=dtype, hidden_first=hidden_first)
        residual = twin.stream(6)
        combined = twin.combine(
            token,
            slot,
            hidden,
            twin.ints(sources) if chosen else None,
            fusion,
            hidden_eps=0.25,
            residual=residual,
        )
        assert combined.dtype == dtype
        lanes = DecodeLanes(token, slot, slot)
        check_combined(combined, lanes, hidden, sources, fusion, 0.25)
        check_cleared(residual, slot)


@pytest.mark.parametrize("start", ["hidden", "normed"])
def test_the_stream_starts_with_the_hidden_state(twin: Twin, dtypes, start):
    """With float32 rows beside an embedding in half precision, all the way through a step."""
    for dtype in dtypes:
        wide = torch.randn(6, HIDDEN + 2, generator=torch.Generator().manual_seed(1))
        hidden = wide.to(twin.device)[:, :HIDDEN]
        fusion = twin.fusion(dtype=dtype)._replace(start=start)
        slot, token = twin.ints([4, -1, 0, 7, 2, -1]), twin.ints([0, HUGE, 9, 17, 17, LOWEST])
        residual, lanes = twin.stream(6), DecodeLanes(token, slot, slot)
        combined = twin.combine(token, slot, hidden, None, fusion, residual=residual)
        assert combined.dtype == dtype
        check_combined(combined, lanes, hidden, range(6), fusion, 0.0)
        check_started(residual, slot, hidden, range(6), fusion)
        lanes, target = fed_lanes(twin, 3, [5, 8], [3, 2])
        first = twin.begin(target, twin.ints([2, 1]), lanes, hidden, fusion, residual=residual)
        check_combined(first.combined, first.lanes, hidden, range(6), fusion, 0.0)
        check_started(residual, first.lanes.slot, hidden, range(6), fusion)
        if twin.combine is combine_hidden:
            one, draft = twin.stream(2), twin.ints([[0] * 2] * 9).view(9, 2)
            following = advance_module_draft(
                twin.tiles([7, None, 9, None, None, None]),
                first.rows,
                hidden,
                fusion,
                draft,
                index=0,
                limit=LIMIT,
                source_R=twin.ints([2, 0]),
                residual=one,
            )
            assert following.lanes.token.tolist() == [9, 7]
            check_combined(following.combined, following.lanes, hidden, [2, 0], fusion, 0.0)
            check_started(one, following.lanes.slot, hidden, [2, 0], fusion)


def check_started(
    residual: Residual,
    slot: torch.Tensor,
    hidden: torch.Tensor,
    sources: Sequence[int],
    fusion: Fusion,
) -> None:
    """Live lanes of the stream are the hidden states, or their halves of the input."""
    for lane in torch.nonzero(slot >= 0).flatten().tolist():
        expected = hidden[sources[lane]].double().cpu()
        if fusion.start == "normed":
            expected = combined_row(0, hidden, sources[lane], fusion, 0.0)[HIDDEN:]
            torch.testing.assert_close(residual.x[lane].cpu().double(), expected)
        else:
            assert torch.equal(residual.x[lane].cpu().double(), expected)


def test_a_token_outside_the_vocabulary_gives_nan(twin: Twin):
    token = twin.ints([-1, VOCABULARY, HUGE, LOWEST, 3])
    slot = twin.ints([0, 1, 2, 3, 4])
    combined = twin.combine(token, slot, twin.stream(5), None, twin.fusion(), hidden_eps=1e-5)
    assert combined[:4].isnan().all()
    assert combined[4].isfinite().all()


@pytest.mark.parametrize("H, groups, lanes", [(8, 1, 1), (1000, 40, 3), (5000, 157, 2)])
def test_widths(twin: Twin, H, groups, lanes):
    hidden = twin.stream(lanes, H, groups)
    token, slot = twin.ints(range(lanes)), twin.ints(range(lanes))
    combined = twin.combine(token, slot, hidden, None, twin.fusion(H), hidden_eps=1e-6)
    check_combined(
        combined, DecodeLanes(token, slot, slot), hidden, range(lanes), twin.fusion(H), 1e-6
    )


def test_a_lane_keeps_its_bits(twin: Twin, dtypes):
    H, lanes = 1536, 6
    for dtype in dtypes:
        hidden, fusion = twin.stream(lanes, H, 24, dtype), twin.fusion(H, dtype)
        token, slot = twin.ints([3, 1, 4, 1, 5, 9]), twin.ints(range(lanes))
        together = twin.combine(token, slot, hidden, None, fusion, hidden_eps=1e-5)
        for lane in range(lanes):
            one = slice(lane, lane + 1)
            alone = Residual(hidden.x[one], hidden.scaled[one], hidden.squares[:, one].contiguous())
            row = twin.combine(token[one], slot[:1], alone, None, fusion, hidden_eps=1e-5)
            assert torch.equal(row[0], together[lane]), f"{lane=}"


def test_prefill_takes_many_lanes(twin: Twin):
    """A chunk of 200 lanes of a bucket of 256."""
    lanes = 256
    slot = twin.ints([5] * 200 + [-1] * 56)
    token = twin.ints([7 * lane % VOCABULARY for lane in range(200)] + [HUGE] * 56)
    hidden = twin.stream(lanes).scaled
    hidden[200:] = math.nan
    combined = twin.combine(token, slot, hidden, None, twin.fusion())
    check_combined(
        combined, DecodeLanes(token, slot, slot), hidden, range(lanes), twin.fusion(), 0.0
    )


# begin_module_draft.


def test_first_run_of_the_specification(twin: Twin):
    """EFGH in at 4..7, the target says FGXY, three tokens emitted: F G X go in at 4, 5, 6."""
    E, F, G, X, Y = range(5)
    lanes = DecodeLanes(twin.ints([E, F, G, HUGE]), twin.ints([2] * 4), twin.ints([4, 5, 6, 7]))
    hidden, residual = twin.stream(4), twin.stream(4)
    first = twin.begin(
        twin.ints([F, G, X, Y]),
        twin.ints([3]),
        lanes,
        hidden,
        twin.fusion(),
        hidden_eps=1e-5,
        residual=residual,
    )
    assert first.lanes.slot.tolist() == [2, 2, 2, -1]
    assert first.lanes.token.tolist()[:3] == [F, G, X]
    assert first.lanes.position.tolist()[:3] == [4, 5, 6]
    assert [field.tolist() for field in first.rows] == [[X], [2], [6]]
    assert first.source.tolist() == [2]
    check_combined(first.combined, first.lanes, hidden, range(4), twin.fusion(), 1e-5)
    check_cleared(residual, first.lanes.slot)


@st.composite
def verified_steps(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[int]]:
    """(W, slot or -1 of each row, live lanes of each row, tokens that each row emitted)."""
    W = draw(st.integers(1, 5))
    slots = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True))
    slots = [draw(st.sampled_from([slot, slot, -1])) for slot in slots]
    live = [draw(st.integers(1, W)) if slot >= 0 else 0 for slot in slots]
    counts = [draw(st.integers(0, number)) for number in live]
    return W, slots, live, counts


def fed_lanes(
    twin: Twin, W: int, slots: Sequence[int], live: Sequence[int]
) -> tuple[DecodeLanes, torch.Tensor]:
    """Lanes of rows at positions 10 * slot, and the target's tokens; padded ones are poison."""
    fields: list[list[int]] = [[], [], [], []]
    for slot, number in zip(slots, live, strict=True):
        for lane in range(W):
            values = (slot + lane, slot, 10 * slot + lane, slot + 20 + lane)
            if lane >= number:
                values = (HUGE, -1, LOWEST, HUGE)
            for field, value in zip(fields, values, strict=True):
                field.append(value)
    token, slot_N, position, target = map(twin.ints, fields)
    return DecodeLanes(token, slot_N, position), target


@settings(deadline=None, max_examples=extent(13, 40))
@given(step=verified_steps())
def test_first_run_takes_in_what_was_emitted(twin: Twin, step):
    W, slots, live, counts = step
    lanes, target = fed_lanes(twin, W, slots, live)
    # A padded row's count means nothing.
    given_counts = [count if slot >= 0 else HUGE for slot, count in zip(slots, counts, strict=True)]
    N = W * len(slots)
    hidden, residual = twin.stream(N), twin.stream(N)
    hidden.scaled[lanes.slot < 0] = math.nan
    fusion = twin.fusion()
    before = [tensor.clone() for tensor in (*lanes, target)]
    first = twin.begin(
        target,
        twin.ints(given_counts),
        lanes,
        hidden,
        fusion,
        hidden_eps=1e-5,
        residual=residual,
    )
    for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        for j in range(W):
            lane = row * W + j
            if j >= count:
                assert first.lanes.slot[lane] == -1
                continue
            fields = [int(field[lane]) for field in first.lanes]
            assert fields == [slot + 20 + j, slot, 10 * slot + j]
        if count == 0:
            assert (first.rows.slot[row], first.source[row]) == (-1, row * W)
            continue
        last = count - 1
        assert [int(field[row]) for field in first.rows] == [
            slot + 20 + last,
            slot,
            10 * slot + last,
        ]
        assert first.source[row] == row * W + last
    check_combined(first.combined, first.lanes, hidden, range(N), fusion, 1e-5)
    check_cleared(residual, first.lanes.slot)
    assert all(map(torch.equal, before, (*lanes, target)))


# commit_draft and advance_module_draft.


@settings(deadline=None, max_examples=extent(20, 60))
@given(data=st.data())
def test_commit(twin: Twin, data):
    slots = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True))
    rows = [data.draw(st.sampled_from([slot, slot, -1])) for slot in slots]
    K = data.draw(st.integers(1, 5))
    index = data.draw(st.integers(0, K - 1))
    M = data.draw(st.integers(len(rows), 8))
    sources = data.draw(st.permutations(range(M)))[: len(rows)]
    chosen = len(rows) < M or data.draw(st.booleans())
    sources = sources if chosen else range(len(rows))
    positions = [data.draw(st.sampled_from([5, LIMIT - 2, LIMIT - 1, LIMIT])) for _ in rows]
    drafts = [data.draw(st.integers(-1, 9)) for _ in range(M)]

    table = twin.ints([list(range(100, 100 + K))] * 8)
    expected = table.tolist()
    live_sources = {source for source, slot in zip(sources, rows, strict=True) if slot >= 0}
    lanes = twin.commit(
        twin.tiles(
            [draft if lane in live_sources else None for lane, draft in enumerate(drafts)],
            tiles=data.draw(st.integers(1, 6)),
        ),
        DecodeLanes(
            twin.ints([HUGE] * len(rows)),
            twin.ints(rows),
            twin.ints([p if slot >= 0 else HUGE for p, slot in zip(positions, rows, strict=True)]),
        ),
        table,
        index=index,
        limit=LIMIT,
        source_R=twin.ints([s if r >= 0 else HUGE for s, r in zip(sources, rows, strict=True)])
        if chosen
        else None,
    )
    for row, (slot, source, position) in enumerate(zip(rows, sources, positions, strict=True)):
        if slot < 0:
            assert lanes.slot[row] == -1
            continue
        token = drafts[source]
        expected[slot][index:] = [token] + [-1] * (K - index - 1)
        if token < 0 or position + 1 >= LIMIT:
            assert lanes.slot[row] == -1
        else:
            assert [int(field[row]) for field in lanes] == [token, slot, position + 1]
    assert table.tolist() == expected


@pytest.mark.parametrize("source", [None, [5, 0, 2, 1]])
@pytest.mark.parametrize("kind", ["stream", "plain"])
@pytest.mark.parametrize("tiles", [1, 5000])
def test_advance_is_commit_and_combine(device, source, kind, tiles):
    """Bit for bit; here the last row's draft is not valid, and the third is padded."""
    twin = Twin(combine_hidden, begin_module_draft, commit_draft, device)
    M = 4 if source is None else 6
    rows = DecodeLanes(twin.ints([HUGE] * 4), twin.ints([3, 1, -1, 0]), twin.ints([7, 8, HUGE, 9]))
    drafts: list[int | None] = [4, 5, 6, 7, 8, 9]
    drafts[3 if source is None else 1] = -1
    stream = twin.stream(M)
    hidden: Hidden = stream if kind == "stream" else stream.scaled
    source_R = None if source is None else twin.ints(source)
    steps: dict[str, Any] = {"index": 1, "limit": LIMIT, "source_R": source_R}

    tables = [torch.full((5, 3), 100, dtype=torch.int32, device=device) for _ in range(2)]
    streams = [twin.stream(4), twin.stream(4)]
    lane_tiles = twin.tiles(drafts[:M], tiles)
    following = advance_module_draft(
        lane_tiles,
        rows,
        hidden,
        twin.fusion(),
        tables[0],
        hidden_eps=0.5,
        residual=streams[0],
        **steps,
    )
    lanes = commit_draft(lane_tiles, rows, tables[1], **steps)
    combined = combine_hidden(
        lanes.token,
        lanes.slot,
        hidden,
        source_R,
        twin.fusion(),
        hidden_eps=0.5,
        residual=streams[1],
    )
    assert lanes.slot.tolist() == [3, 1, -1, -1]
    assert torch.equal(following.lanes.slot, lanes.slot)
    assert torch.equal(following.lanes.token[:2], lanes.token[:2])
    assert torch.equal(following.lanes.position[:2], lanes.position[:2])
    assert torch.equal(following.combined[:2], combined[:2])
    assert torch.equal(*tables)
    assert torch.equal(streams[0].x, streams[1].x)
    check_cleared(streams[0], lanes.slot)


def test_a_chain_of_three_drafts(twin: Twin):
    """N, O, P after the last emitted token; a row without a draft stays out of the chain."""
    table = twin.ints([[100, 100, 100]] * 4)
    rows = DecodeLanes(twin.ints([1, 2]), twin.ints([3, 0]), twin.ints([6, 20]))
    source: torch.Tensor | None = twin.ints([2, 5])
    for index, drafts in enumerate([[None, None, 11, None, None, -1], [12, None], [13, None]]):
        rows = twin.commit(
            twin.tiles(drafts), rows, table, index=index, limit=LIMIT, source_R=source
        )
        source = None
    assert table.tolist() == [[-1, -1, -1], [100] * 3, [100] * 3, [11, 12, 13]]
    assert rows.slot.tolist() == [3, -1]
    assert (rows.token[0], rows.position[0]) == (13, 9)


# What does not fit.


def combine_arguments() -> dict[str, Any]:
    twin = Twin(combine_hidden, begin_module_draft, commit_draft, "cpu")
    return {
        "token_N": twin.ints([1, 2]),
        "slot_N": twin.ints([0, 1]),
        "hidden": twin.stream(2),
        "source_N": None,
        "fusion": twin.fusion(),
        "residual": twin.stream(2),
    }


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("token_N", lambda x: x.long(), "token must be int32, not torch.int64"),
        ("slot_N", lambda x: x[:1], r"slot must be a dense \[2\], not \(1,\)"),
        ("source_N", lambda x: torch.zeros(3, dtype=torch.int32), r"source must be a dense \[2\]"),
        ("hidden", lambda x: x.scaled[:1], r"hidden must be \[2 or more, 24\], not \[1, 24\]"),
        ("hidden", lambda x: x.scaled[:, :8], r"hidden must be \[2 or more, 24\], not \[2, 8\]"),
        ("hidden", lambda x: x.scaled.double(), "hidden is torch.float64, not one of"),
        (
            "hidden",
            lambda x: x._replace(squares=x.squares[:, :1]),
            r"squares must be a dense float32 \[T, 2\], not torch.float32 \(3, 1\)",
        ),
        ("fusion", lambda x: x._replace(embedding=x.embedding.t()), "embedding must be a matrix"),
        (
            "fusion",
            lambda x: x._replace(hidden_norm=x.hidden_norm[:5]),
            r"hidden_norm must be a dense torch.float32 \[24\], not torch.float32 \(5,\)",
        ),
        (
            "fusion",
            lambda x: x._replace(embedding_norm=x.embedding_norm.int()),
            "embedding_norm must be one of .*, not torch.int32",
        ),
        ("residual", lambda x: x._replace(x=x.x[:1]), r"out must be torch.float32 \[2, 24\]"),
    ],
)
def test_what_cannot_be_combined(name, change, message):
    arguments = combine_arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        combine_hidden(**arguments)


def test_what_cannot_begin():
    arguments = combine_arguments()
    lanes = DecodeLanes(*(torch.zeros(2, dtype=torch.int32) for _ in range(3)))
    fusion = arguments["fusion"]

    def begin(count: int, **changes: Any) -> None:
        given = {"hidden": arguments["hidden"], "lanes": lanes} | changes
        begin_module_draft(
            arguments["token_N"],
            torch.zeros(count, dtype=torch.int32),
            given["lanes"],
            given["hidden"],
            fusion,
            residual=arguments["residual"],
        )

    begin(1)
    begin(2)
    with pytest.raises(ValueError, match="2 lanes are no whole number of lanes for each of 3 rows"):
        begin(3)
    with pytest.raises(ValueError, match="for each of 0 rows"):
        begin(0)
    with pytest.raises(ValueError, match=r"lanes.slot must be a dense \[2\], not \(1,\)"):
        begin(1, lanes=lanes._replace(slot=lanes.slot[:1]))
    with pytest.raises(ValueError, match=r"hidden must be \[2 or more, 24\], not \[1, 24\]"):
        begin(1, hidden=arguments["hidden"].scaled[:1])


@pytest.mark.parametrize("advance", [False, True])
def test_what_cannot_be_committed(advance):
    twin = Twin(combine_hidden, begin_module_draft, commit_draft, "cpu")
    rows = DecodeLanes(*(twin.ints([0, 1]) for _ in range(3)))
    good: dict[str, Any] = {
        "tiles": twin.tiles([1, 2, 3]),
        "rows": rows,
        "draft_SK": twin.ints([[0, 0]] * 2),
        "index": 1,
        "limit": 5,
        "source_R": twin.ints([0, 2]),
    }
    if advance:
        good |= {"hidden": twin.stream(3), "fusion": twin.fusion(), "residual": twin.stream(2)}
    op: Callable[..., Any] = advance_module_draft if advance else commit_draft
    op(**good)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"index": 2}, "draft index 2 is not in a table of 2 drafts a slot"),
        ({"index": -1}, "draft index -1 is not in a table of 2 drafts a slot"),
        ({"source_R": None}, r"best must be \[2, C\], not \(3, 3\)"),
        ({"source_R": twin.ints([0])}, r"source must be a dense \[2\], not \(1,\)"),
        (
            {"draft_SK": twin.ints([[0, 0]] * 2).t()},
            r"draft_tokens must be a dense int32 \[S, K\], not torch.int32 \(2, 2\)",
        ),
        ({"draft_SK": twin.ints([0, 0])}, r"draft_tokens must be a dense int32 \[S, K\]"),
        ({"rows": rows._replace(position=rows.slot.long())}, "rows.position must be int32"),
    ]
    if advance:
        wrong.append(({"hidden": twin.stream(2)}, r"hidden must be \[3 or more, 24\]"))
        wrong.append(({"residual": twin.stream(3)}, r"out must be torch.float32 \[2, 24\]"))
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            op(**good | change)


# What the PTX says.

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
H, N, R, TILES, VOCABULARY_8B = 4096, 16, 4, 4008, 128256


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def new_ints(*shape: int) -> torch.Tensor:
    return new(*shape, dtype=torch.int32)


def new_stream(lanes: int) -> Residual:
    wide, sums = new(lanes, H, dtype=torch.float32), new(128, lanes, dtype=torch.float32)
    return Residual(wide, new(lanes, H), sums)


def new_lanes(lanes: int) -> DecodeLanes:
    return DecodeLanes(*(new_ints(lanes) for _ in range(3)))


FUSION = Fusion(new(VOCABULARY_8B, H), new(H), new(H), eps=1e-5)
DRAFT_TILES = DraftTiles(new(N, TILES, dtype=torch.int64), new_ints(N, TILES))
COMMIT: dict[str, Any] = {"index": 0, "limit": 9, "source_R": new_ints(R), "pdl": True}
LAUNCHES: dict[str, Callable[[], Any]] = {
    "combine": lambda: combine_hidden(
        new_ints(N), new_ints(N), new_stream(N), None, FUSION, residual=new_stream(N), pdl=True
    ),
    "combine some": lambda: combine_hidden(
        new_ints(N), new_ints(N), new(99, H), new_ints(N), FUSION, pdl=True
    ),
    "begin": lambda: begin_module_draft(
        new_ints(N),
        new_ints(R),
        new_lanes(N),
        new_stream(N),
        FUSION,
        residual=new_stream(N),
        pdl=True,
    ),
    "advance": lambda: advance_module_draft(
        DRAFT_TILES,
        new_lanes(R),
        new_stream(N),
        FUSION,
        new_ints(9, 3),
        residual=new_stream(R),
        **COMMIT,
    ),
    "commit": lambda: commit_draft(DRAFT_TILES, new_lanes(R), new_ints(9, 3), **COMMIT),
    # Triton compiles a size of 1 in.
    "advance one": lambda: advance_module_draft(
        DraftTiles(new(1, 1, dtype=torch.int64), new_ints(1, 1)),
        new_lanes(1),
        new(1, H),
        FUSION._replace(hidden_first=True),
        new_ints(9, 1),
        index=0,
        limit=9,
        residual=new_stream(1),
        pdl=True,
    ),
}
# What the launch before may have written; besides it only the embedding waits, for its token.
NEW = {
    "combine": {"token_ptr"},
    "combine some": {"token_ptr"},
    "begin": {"target_ptr", "count_ptr"},
    "advance": {"commit.best", "commit.health"},
    "commit": {"commit.best", "commit.health"},
    "advance one": {"commit.best", "commit.health"},
}
WEIGHTS = {"fusion.embedding_norm", "fusion.hidden_norm"}


@compiles
@pytest.mark.parametrize("name", LAUNCHES)
def test_only_what_is_new_is_read_after_the_wait(name):
    launch = record_launch(module, LAUNCHES[name])
    assert launch.grid == ({"advance": R, "commit": R, "advance one": 1}.get(name, N),)
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    late = {load.argument for load in loads if load.after_wait}
    assert late == NEW[name] | ({"fusion.embedding"} if name != "commit" else set())
    early = {(load.argument, load.past_l1) for load in loads if not load.after_wait}
    assert early.isdisjoint({(argument, True) for argument in late})
    assert {argument for argument, past_l1 in early if not past_l1} <= WEIGHTS
