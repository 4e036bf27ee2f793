"""Chained draft modules: which hidden state each lane reads, and what is kept for the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.draft import vanilla as module
from graphengine.kernels.draft.draft import DraftTiles, Fusion
from graphengine.kernels.draft.vanilla import (
    Emitted,
    ModuleRun,
    Recycled,
    advance_vanilla_draft,
    advance_vanilla_draft_reference,
    begin_vanilla_draft,
    begin_vanilla_draft_reference,
    new_draft_chain,
)
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.step.state import DecodeLanes
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)
from launches.finish import Twin

HUGE = 2**31 - 1
CANARY = 776.0
SLOTS, VOCABULARY = 5, 50
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


@dataclass(frozen=True)
class Problem:
    """A launch of module `number` of several rows, each in the slot of its place in reverse."""

    number: int
    drafts: int
    width: int
    starts: list[int]
    counts: list[int]
    """Emitted tokens; 0 for a row that emitted none, -1 for a padded one."""
    newest: list[int]
    """The draft that is committed: -1 for none; -2 where the chain had ended before."""
    plain: bool = False
    hidden_first: bool = False
    H: int = 24


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    drafts, width = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    rows = draw(st.integers(1, 4))

    def each(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    return Problem(
        number=draw(st.integers(2, drafts)),
        drafts=drafts,
        width=width,
        starts=each(st.one_of(st.integers(0, 2), st.integers(0, 9))),
        counts=each(st.integers(-1, width)),
        newest=each(st.one_of(st.integers(0, 9), st.integers(-2, 9))),
        plain=draw(st.booleans()),
        hidden_first=draw(st.booleans()),
    )


def rows_of(lanes: int, H: int, dtype: torch.dtype, device: str, *, seed: int) -> Residual:
    """Hidden states whose rows are far apart."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(lanes, H + 5, generator=draw).to(device, dtype)
    squares = ((torch.rand(3, lanes, generator=draw) + 0.5) * H / 3).to(device)
    return Residual(torch.full((lanes, H + 2), CANARY, device=device)[:, :H], wide[:, :H], squares)


class Setup:
    """The operands of a launch, NaN wherever nothing may be read, and what it is to leave."""

    def __init__(self, twin: Twin, problem: Problem, dtype: torch.dtype, drafting: bool) -> None:
        self.twin, self.problem, self.drafting = twin, problem, drafting
        rows, shift = len(problem.starts), problem.number - 1
        drafted = shift if drafting else 0
        # Lanes of a row, now and in the run of the module before.
        self.width = problem.width + drafted
        self.ran = self.width - 1 if drafting else self.width
        sizes: Any = {"H": problem.H, "dtype": dtype, "device": twin.device}
        draw = torch.Generator().manual_seed(5)
        embedding = torch.randn(VOCABULARY, problem.H, generator=draw).to(twin.device, dtype)
        norms = torch.randn(2, problem.H, generator=draw).to(twin.device, dtype)
        self.fusion = Fusion(
            embedding, norms[0], norms[1], eps=1e-5, hidden_first=problem.hidden_first
        )
        # The target's, which nobody is to read.
        self.hidden = rows_of(rows * problem.width, **sizes, seed=1)
        self.hidden.scaled.fill_(torch.nan)
        stream = rows_of(rows * self.ran, **sizes, seed=2)
        self.output: Residual | torch.Tensor = stream.scaled if problem.plain else stream
        self.kept = torch.randn(SLOTS, problem.drafts - 1, problem.H, generator=draw)
        self.kept = self.kept.to(twin.device, dtype)
        self.expected_kept = self.kept.clone()
        self.residual = rows_of(rows * self.width, **sizes, seed=3)
        self.chain = new_draft_chain(
            rows, problem.drafts, problem.H, dtype=dtype, device=twin.device
        )
        self.chain.hidden.fill_(torch.nan)
        lanes = rows * problem.width
        self.slot, self.position, self.target = [-1] * lanes, [HUGE] * lanes, [HUGE] * lanes
        self.row_slot, self.row_position, self.source = [-1] * rows, [HUGE] * rows, [HUGE] * rows
        self.tokens: list[int | None] = [None] * (rows * self.ran)
        # Of live lanes: token, position and hidden state.
        self.wanted: dict[int, tuple[int, int, torch.Tensor]] = {}
        read: set[int] = set()
        for row, count in enumerate(problem.counts):
            if count >= 0:
                read |= self._row(row, count)
        unread = [lane for lane in range(rows * self.ran) if lane not in read]
        stream.scaled[unread] = torch.nan

    def _row(self, row: int, count: int) -> set[int]:
        """Returns which lanes of the run before are read."""
        problem, shift = self.problem, self.problem.number - 1
        slot, start = SLOTS - 1 - row, problem.starts[row]
        first, ran = row * problem.width, row * self.ran
        self.slot[first], self.position[first] = slot, start
        tokens = [20 + j for j in range(count)]
        for j, token in enumerate(tokens):
            self.slot[first + j], self.target[first + j] = slot, token
            self.position[first + j] = start + j
        if self.drafting and count and problem.newest[row] != -2:
            self.row_slot[row], self.row_position[row] = slot, start + count - 1
            self.source[row] = ran + count + shift - 2
            self.tokens[self.source[row]] = problem.newest[row]
            for step in range(shift - 1):
                self.chain.token[row, step] = 30 + step
            tokens += [30 + step for step in range(shift - 1)]
            tokens += [problem.newest[row]] * (problem.newest[row] >= 0)
        read = set()
        for j, token in enumerate(tokens):
            position = start + j - shift
            if position < 0:
                continue
            hidden = self.kept[slot, shift - 1].clone() if j == 0 else self._made(ran + j - 1)
            self.wanted[row * self.width + j] = (token, position, hidden)
            read |= {ran + j - 1} if j else set()
        if count:
            self.expected_kept[slot, shift - 1] = self._made(ran + count - 1)
            read.add(ran + count - 1)
        return read

    def _made(self, lane: int) -> torch.Tensor:
        """A lane of the run before, after its norm."""
        if isinstance(self.output, torch.Tensor):
            return self.output[lane].clone()
        value = self.output.scaled[lane].double()
        square = self.output.squares[:, lane].double().sum() / len(value)
        return (value / (square + 0.5).sqrt()).to(self.kept.dtype)

    def run(self) -> Any:
        ints, problem = self.twin.ints, self.problem
        emitted = Emitted(
            ints(self.target),
            ints([HUGE if count < 0 else count for count in problem.counts]),
            DecodeLanes(ints([HUGE] * len(self.slot)), ints(self.slot), ints(self.position)),
            self.hidden,
        )
        options: Any = {"module": problem.number, "residual": self.residual}
        if not self.drafting:
            begin = begin_vanilla_draft_reference if self.twin.reference else begin_vanilla_draft
            recycled = Recycled(self.output, self.kept, 0.5)
            return begin(emitted, self.fusion, **options, recycled=recycled)
        advance = advance_vanilla_draft_reference if self.twin.reference else advance_vanilla_draft
        rows = DecodeLanes(
            ints([HUGE] * len(self.row_slot)), ints(self.row_slot), ints(self.row_position)
        )
        tiles = DraftTiles(*self.twin.tiles(self.tokens))
        run = ModuleRun(tiles, rows, ints(self.source), self.output, 0.5)
        table = ints([[77] * problem.drafts] * SLOTS)
        return advance(run, emitted, self.chain, self.fusion, table, **options, kept=self.kept)


def check_launch(twin: Twin, problem: Problem, dtype: torch.dtype, drafting: bool) -> None:
    setup = Setup(twin, problem, dtype, drafting)
    following = setup.run()
    fusion, tolerance = setup.fusion, TOLERANCE[dtype]
    close: Any = {"rtol": tolerance, "atol": tolerance}
    for lane, cleared in enumerate(setup.residual.x):
        if lane not in setup.wanted:
            assert following.lanes.slot[lane] == -1 and (cleared == CANARY).all(), f"{lane=}"
            continue
        token, position, hidden = setup.wanted[lane]
        slot = SLOTS - 1 - lane // setup.width
        assert [int(column[lane]) for column in following.lanes] == [token, slot, position]
        assert (cleared == 0).all()
        halves = []
        for row, weight in (
            (fusion.embedding[token], fusion.embedding_norm), (hidden, fusion.hidden_norm)
        ):  # fmt: skip
            wide = row.double()
            halves.append(wide / (wide.square().mean() + fusion.eps).sqrt() * weight.double())
        expected = torch.cat(halves[::-1] if fusion.hidden_first else halves)
        torch.testing.assert_close(following.combined[lane].double(), expected, **close)
    torch.testing.assert_close(setup.kept, setup.expected_kept, **close)
    assert setup.chain.hidden.isnan().all()


@settings(deadline=None, max_examples=12)
@given(problem=problems(), drafting=st.booleans())
def test_a_launch(twin: Twin, problem: Problem, drafting: bool) -> None:
    """Padding, rows that emitted nothing, chains that ended, prompts shorter than the chain."""
    check_launch(twin, problem, torch.float32, drafting)


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("drafting", [True, False])
def test_dtypes_and_widths(
    twin: Twin, dtypes: tuple[torch.dtype, ...], number: int, drafting: bool
) -> None:
    shared: Any = {"number": number, "drafts": 4, "width": 3, "starts": [0, 5, 9]}
    for dtype in dtypes:
        for H in (8, 264):
            problem = Problem(**shared, counts=[2, -1, 3], newest=[4, 4, 7], H=H)
            check_launch(twin, problem, dtype, drafting)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :1], r"kept must be \[slots, 2 or more, 24\], not \[5, 1, 24\]"),
        (lambda x: x[..., :7], r"kept must be \[slots, 2 or more, 24\], not \[5, 2, 7\]"),
        (lambda x: x.double(), "kept is torch.float64, the hidden states torch.float32"),
        (lambda x: x.mT.contiguous().mT, "kept must be dense"),
    ],
)
@pytest.mark.parametrize("drafting", [True, False])
def test_what_does_not_fit(change: Any, message: str, drafting: bool) -> None:
    problem = Problem(3, 3, 2, [4, 4], [1, 2], [1, 2])
    setup = Setup(Twin("cpu", reference=False), problem, torch.float32, drafting)
    setup.kept = change(setup.kept)
    with pytest.raises(ValueError, match=message):
        setup.run()


# What the PTX says.

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
R, W, K, TILES, H = 4, 4, 3, 4008, 4096


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def new_ints(*shape: int) -> torch.Tensor:
    return new(*shape, dtype=torch.int32)


def meta_lanes(lanes: int) -> DecodeLanes:
    return DecodeLanes(*(new_ints(lanes) for _ in range(3)))


def meta_stream(lanes: int) -> Residual:
    return new_residual(lanes, H, 128, dtype=torch.bfloat16, device="meta")


def meta_launch(number: int, *, drafting: bool) -> Any:
    lanes = R * W
    emitted = Emitted(new_ints(lanes), new_ints(R), meta_lanes(lanes), meta_stream(lanes), 1e-6)
    fusion = Fusion(new(128256, H), new(H), new(H), eps=1e-5)
    kept = new(9, K - 1, H)
    if not drafting:
        recycled = Recycled(meta_stream(lanes), kept, 1e-6)
        residual = meta_stream(lanes)
        return begin_vanilla_draft(
            emitted, fusion, module=number, residual=residual, recycled=recycled
        )
    ran = R * (W + number - 2)
    tiles = DraftTiles(new(ran, TILES, dtype=torch.int64), new_ints(ran, TILES))
    return advance_vanilla_draft(
        ModuleRun(tiles, meta_lanes(R), new_ints(R), meta_stream(ran), 1e-6),
        emitted,
        new_draft_chain(R, K, H, dtype=torch.bfloat16, device="meta"),
        fusion,
        new_ints(9, K),
        module=number,
        residual=meta_stream(R * (W + number - 1)),
        kept=kept,
        pdl=True,
    )


@compiles
@pytest.mark.parametrize("number", [2, 3])
def test_only_the_tiles_are_read_after_the_wait(number: int) -> None:
    launch = record_launch(module, lambda: meta_launch(number, drafting=True))
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    late = {load.argument for load in global_loads(ptx, names) if load.after_wait}
    assert late == {"commit.best", "commit.health", "fusion.embedding"}


@compiles
def test_without_drafts_it_compiles() -> None:
    """It reads what the launch before wrote, so it may not begin early."""
    ptx, _ = compile_launch(record_launch(module, lambda: meta_launch(2, drafting=False)))
    assert "griddepcontrol.wait" not in ptx
