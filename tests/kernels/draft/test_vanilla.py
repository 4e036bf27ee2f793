"""What surrounds the runs of several draft modules, against a simulation that knows only pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.attention.decode import (
    decode_attention,
    decode_attention_arrivals,
)
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.draft import vanilla as module
from graphengine.kernels.draft.draft import DraftTiles, Fusion, begin_module_draft, commit_draft
from graphengine.kernels.draft.vanilla import (
    DraftChain,
    Emitted,
    ModuleRun,
    advance_vanilla_draft,
    advance_vanilla_draft_reference,
    begin_vanilla_draft,
    begin_vanilla_draft_reference,
    new_draft_chain,
)
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables
from graphengine.kernels.step.state import DecodeLanes
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)
from launches.finish import Twin

HUGE, LOWEST = 2**31 - 1, -(2**31)
LIMIT = 1000
CANARY = 776.0
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


def begin(twin: Twin, *arguments: Any, **options: Any) -> Any:
    op = begin_vanilla_draft_reference if twin.reference else begin_vanilla_draft
    return op(*arguments, **options)


def advance(twin: Twin, *arguments: Any, **options: Any) -> Any:
    op = advance_vanilla_draft_reference if twin.reference else advance_vanilla_draft
    return op(*arguments, **options)


# What ends up in the modules' caches: symbols for hidden states, one row of a request at a time.

SYMBOLS = 128
"""Hidden states of positions 0..63, then those of modules; as many token ids."""

Row = tuple[int, int]
"""(symbol of the hidden state, token) that a module was fed."""
Cache = dict[tuple[int, int], Row]
"""By (module, position)."""


def true_hidden(position: int) -> int:
    """H of the specification."""
    assert position < 64
    return position


@dataclass
class Request:
    """A request as the specification sees it: what it feeds, emits and drafts, step by step."""

    drafts: int
    prompt: list[int]
    slot: int = 0
    tokens: list[int] = field(default_factory=list)
    """The prompt, and after it what was emitted."""
    draft: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def length(self) -> int:
        """L: tokens that the target has in its cache."""
        return len(self.tokens) - 1

    def module_hidden(self, number: int) -> int:
        """h of module `number` (from 1) at its last row in this step."""
        symbol = 64 + self.steps * self.drafts + number - 1
        assert symbol < SYMBOLS
        return symbol


class Step(NamedTuple):
    """What one step (or the prefill) makes known."""

    start: int
    """Position of the first token that was fed."""
    fed: list[int]
    emitted: list[int]
    """The target's tokens after the first of them."""
    drafts: list[int]
    """What the modules say."""


class Pools:
    """Section 3 of the specification: the modules' rows come out of pools of `size` last tokens."""

    def __init__(self, request: Request, size: int) -> None:
        self.request, self.size = request, size
        self.tokens, self.hidden = [0] * size, [0] * size
        self.cache: Cache = {}

    def prefill(self, prompt: Sequence[int], first: int, drafts: Sequence[int]) -> None:
        hidden = [true_hidden(position) for position in range(len(prompt))]
        self._run([*prompt[1:], first], hidden, 0, drafts)
        self.tokens = (self.tokens + list(prompt))[-self.size :]
        self.hidden = (self.hidden + hidden)[-self.size :]

    def step(self, step: Step) -> None:
        count = len(step.emitted)
        fed_hidden = [true_hidden(step.start + j) for j in range(len(step.fed))]
        chosen = slice(count, count + self.size)
        self.tokens = (self.tokens + step.fed)[chosen]
        self.hidden = (self.hidden + fed_hidden)[chosen]
        end = step.start + count
        ids = [*self.tokens[1:], step.emitted[-1]]
        self._run(ids, self.hidden, end - self.size, step.drafts)

    def _run(self, ids: list[int], hidden: list[int], start: int, drafts: Sequence[int]) -> None:
        for number, draft in enumerate(drafts, start=1):
            for index, row in enumerate(zip(hidden, ids, strict=True)):
                if start + index >= 0:
                    self.cache[number, start + index] = row
            ids = [*ids[1:], draft]
            hidden = [*hidden[1:], self.request.module_hidden(number)]


FUSION = Fusion(torch.eye(SYMBOLS), torch.ones(SYMBOLS), torch.ones(SYMBOLS), eps=1e-6)


def one_hot(symbols: Sequence[int], device: str) -> torch.Tensor:
    """[M, SYMBOLS]; NaN for a symbol below 0."""
    rows = torch.eye(SYMBOLS)[[max(symbol, 0) for symbol in symbols]]
    rows[[symbol < 0 for symbol in symbols]] = torch.nan
    return rows.to(device)


class Kernels:
    """What the kernels' lanes feed the modules, for several requests at once."""

    def __init__(self, twin: Twin, requests: Sequence[Request]) -> None:
        self.twin, self.requests = twin, requests
        self.drafts = requests[0].drafts
        self.caches: dict[int, Cache] = {request.slot: {} for request in requests}
        self.fusion = FUSION._replace(
            **{name: getattr(FUSION, name).to(twin.device) for name in FUSION._fields[:3]}
        )
        self.table = twin.ints([[77] * self.drafts] * 8)

    def prefill(self, request: Request, step: Step) -> None:
        """The chunk's own lanes are torch's work; after them it is a step of the last token."""
        cache, everything = self.caches[request.slot], [*request.tokens, step.emitted[0]]
        for number in range(1, self.drafts + 1):
            for lane in range(len(step.fed)):
                if lane >= number - 1:
                    row = (true_hidden(lane), everything[lane + 1])
                    cache[number, lane - number + 1] = row
        last = step._replace(start=len(step.fed) - 1, fed=step.fed[-1:])
        emitted = self._emitted([request], [last], 1)
        rows = emitted.lanes
        hidden = one_hot([request.module_hidden(1)], self.twin.device)
        self._draft([request], [last], emitted, rows, None, hidden)

    def step(self, steps: Sequence[Step | None], width: int, *, drafting: bool = True) -> None:
        """None is a padded row."""
        requests = self.requests
        emitted = self._emitted(requests, steps, width)
        N = len(requests) * width
        residual = self._stream(N)
        first = begin_module_draft(
            emitted.token_N,
            emitted.count_R,
            emitted.lanes,
            emitted.hidden,
            self.fusion,
            residual=residual,
        )
        self._record(1, width, first.lanes, first.combined)
        if not drafting:
            for number in range(2, self.drafts + 1):
                taken = begin(
                    self.twin, emitted, self.fusion, module=number, residual=self._stream(N)
                )
                self._record(number, width, taken.lanes, taken.combined)
            return
        hidden = self._output(requests, 1, first.source, N)
        self._draft(requests, steps, emitted, first.rows, first.source, hidden)

    def _emitted(
        self, requests: Sequence[Request], steps: Sequence[Step | None], width: int
    ) -> Emitted:
        fields: list[list[int]] = [[] for _ in range(5)]
        counts = []
        for request, step in zip(requests, steps, strict=True):
            counts.append(HUGE if step is None else len(step.emitted))
            for j in range(width):
                values = (HUGE, -1, HUGE, LOWEST, -1)
                if step is not None and j < len(step.fed):
                    position = step.start + j
                    target = step.emitted[j] if j < len(step.emitted) else HUGE
                    hidden = true_hidden(position) if j < len(step.emitted) else -1
                    values = (step.fed[j], request.slot, position, target, hidden)
                for column, value in zip(fields, values, strict=True):
                    column.append(value)
        ints = self.twin.ints
        lanes = DecodeLanes(*(ints(column) for column in fields[:3]))
        hidden_N = one_hot(fields[4], self.twin.device)
        return Emitted(ints(fields[3]), ints(counts), lanes, hidden_N)

    def _draft(
        self,
        requests: Sequence[Request],
        steps: Sequence[Step | None],
        emitted: Emitted,
        rows: DecodeLanes,
        source: torch.Tensor | None,
        hidden: torch.Tensor,
    ) -> None:
        device, count = self.twin.device, len(requests)
        chain = new_draft_chain(count, self.drafts, SYMBOLS, dtype=torch.float32, device=device)
        chain.token.fill_(HUGE)
        chain.hidden.fill_(torch.nan)
        width = emitted.token_N.numel() // count
        for number in range(1, self.drafts + 1):
            drafts = [HUGE if step is None else step.drafts[number - 1] for step in steps]
            tiles = self._tiles(drafts, rows, source, hidden.shape[0])
            if number == self.drafts:
                index = number - 1
                commit_draft(tiles, rows, self.table, index=index, limit=LIMIT, source_R=source)
                return
            lanes = count * (width + number)
            following = advance(
                self.twin,
                ModuleRun(tiles, rows, source, hidden),
                emitted,
                chain,
                self.fusion,
                self.table,
                module=number + 1,
                residual=self._stream(lanes),
            )
            self._record(number + 1, width + number, following.lanes, following.combined)
            _, rows, source, _ = following
            assert source is not None
            hidden = self._output(requests, number + 1, source, lanes)

    def _tiles(
        self, drafts: list[int], rows: DecodeLanes, source: torch.Tensor | None, lanes: int
    ) -> DraftTiles:
        tokens: list[int | None] = [None] * lanes
        for row, draft in enumerate(drafts):
            if rows.slot[row] >= 0:
                tokens[row if source is None else int(source[row])] = draft
        return DraftTiles(*self.twin.tiles(tokens))

    def _output(
        self, requests: Sequence[Request], number: int, source: torch.Tensor, lanes: int
    ) -> torch.Tensor:
        """A module's output, NaN but in the last lane of each row."""
        symbols = [-1] * lanes
        for request, lane in zip(requests, source.tolist(), strict=True):
            symbols[lane] = request.module_hidden(number)
        return one_hot(symbols, self.twin.device)

    def _stream(self, lanes: int) -> Residual:
        return new_residual(lanes, SYMBOLS, 1, dtype=torch.float32, device=self.twin.device)

    def _record(self, number: int, width: int, lanes: DecodeLanes, combined: torch.Tensor) -> None:
        """What the module appends to its cache; rows of `width` stand as attention wants them."""
        token, slot, position = (column.tolist() for column in lanes)
        halves = combined.view(-1, 2, SYMBOLS)
        origins: dict[int, set[int]] = {}
        for lane, owner in enumerate(slot):
            if owner < 0:
                continue
            row = (int(halves[lane, 1].argmax()), int(halves[lane, 0].argmax()))
            assert row[1] == token[lane]
            assert not halves[lane].isnan().any()
            assert position[lane] >= 0
            self.caches[owner][number, position[lane]] = row
            origins.setdefault(owner, set()).add(position[lane] - lane % width)
        assert all(len(origin) == 1 for origin in origins.values())


def follow(
    request: Request, emitted: list[int], drafts: list[int], *, verified: int | None = None
) -> Step:
    """The step that emits these tokens of the drafts it verified, and drafts anew."""
    fed = [request.tokens[-1], *request.draft[:verified]]
    step = Step(request.length, fed, emitted, drafts)
    request.tokens += emitted
    request.draft = drafts
    return step


def test_the_worked_example(twin: Twin):
    """ABCD, E and FGH; then FGX of FGXY with NOP; then K of XNOP."""
    A, B, C, D, E, F, G, H, X, N, O, P, K = range(1, 14)  # noqa: E741
    request = Request(3, [A, B, C, D], slot=5, tokens=[A, B, C, D])
    kernels = Kernels(twin, [request])
    cache = kernels.caches[5]

    def rows(number: int, *positions: int) -> list[Row]:
        return [cache[number, position] for position in positions]

    h_E, h_F = request.module_hidden(1), request.module_hidden(2)
    prefill = Step(0, request.prompt, [E], [F, G, H])
    kernels.prefill(request, prefill)
    assert rows(1, 0, 1, 2, 3) == [(0, B), (1, C), (2, D), (3, E)]
    assert rows(2, 0, 1, 2, 3) == [(1, C), (2, D), (3, E), (h_E, F)]
    assert rows(3, 0, 1, 2, 3) == [(2, D), (3, E), (h_E, F), (h_F, G)]
    assert kernels.table[5].tolist() == [F, G, H]
    request.tokens, request.draft, request.steps = [*request.prompt, E], [F, G, H], 1

    h_X, h_N = request.module_hidden(1), request.module_hidden(2)
    kernels.step([follow(request, [F, G, X], [N, O, P])], 4)
    assert rows(1, 4, 5, 6) == [(4, F), (5, G), (6, X)]
    # GXN and XNO at 4..6; what the prefill had drafted in front of them is true by now.
    assert rows(2, 3, 4, 5, 6) == [(4, F), (5, G), (6, X), (h_X, N)]
    assert rows(3, 2, 3, 4, 5, 6) == [(4, F), (5, G), (6, X), (h_X, N), (h_N, O)]
    assert kernels.table[5].tolist() == [N, O, P]
    request.steps = 2

    kernels.step([follow(request, [K], [A, B, C])], 4)
    assert rows(1, 5, 6, 7) == [(5, G), (6, X), (7, K)]
    assert set(cache) == {(number, position) for number in (1, 2, 3) for position in range(8)}


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Request], list[list[Any]]]:
    """Requests, and for each step what every one of them emits: None for a padded row."""
    drafts = draw(st.integers(1, 4))
    requests = []
    token = st.integers(0, SYMBOLS - 1)
    for slot in draw(st.permutations(range(8)))[: draw(st.integers(1, 3))]:
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        requests.append(Request(drafts, prompt, slot=slot, tokens=list(prompt)))
    # How many drafts are accepted, the token after them, and what is drafted.
    accepted = st.one_of(st.integers(0, drafts), st.just(drafts))
    drafted = st.lists(token, min_size=drafts, max_size=drafts)
    row = st.tuples(accepted, token, drafted)
    rows = st.lists(st.one_of(row, row, st.none()), min_size=len(requests), max_size=len(requests))
    return requests, [
        [draw(row) for _ in requests],
        *draw(st.lists(rows, max_size=5)),
    ]


def replay(
    twin: Twin, requests: list[Request], history: list[list[Any]], size: int
) -> tuple[Kernels, list[Pools]]:
    """Both ways through a history, after each step of which every cache is compared."""
    kernels = Kernels(twin, requests)
    pools = [Pools(request, size) for request in requests]
    drafts = requests[0].drafts
    for request, pool, (_, first, drafted) in zip(requests, pools, history[0], strict=True):
        kernels.prefill(request, Step(0, request.prompt, [first], drafted))
        pool.prefill(request.prompt, first, drafted)
        request.tokens.append(first)
        request.draft, request.steps = drafted, 1
    for rows in history[1:]:
        steps: list[Step | None] = []
        for request, pool, row in zip(requests, pools, rows, strict=True):
            if row is None:
                steps.append(None)
                continue
            accepted, token, drafted = row
            emitted = [*request.draft[:accepted], token]
            steps.append(follow(request, emitted, drafted))
            pool.step(steps[-1])  # type: ignore[arg-type]
        kernels.step(steps, drafts + 1)
        for request in requests:
            assert kernels.table[request.slot].tolist() == request.draft
            request.steps += 1
    return kernels, pools


@settings(deadline=None, max_examples=extent(4, 10))
@given(problem=histories())
def test_caches_are_those_of_pools(twin: Twin, problem):
    """Pools have 2K tokens, so that a module's rows reach back to all that it was fed of drafts."""
    requests, history = problem
    kernels, pools = replay(twin, requests, history, 2 * requests[0].drafts)
    for request, pool in zip(requests, pools, strict=True):
        assert kernels.caches[request.slot] == pool.cache
        for (number, position), (hidden, token) in pool.cache.items():
            if position + number < len(request.tokens):
                assert hidden == true_hidden(position + number - 1)
                assert token == request.tokens[position + number]


@settings(deadline=None, max_examples=extent(4, 10))
@given(problem=histories())
def test_pools_of_one_more_than_drafts_leave_only_hidden_states_behind(twin: Twin, problem):
    """The specification's K + 1: no row is missing and no token differs, but where most drafts were
    accepted some rows keep a module's hidden state, which here are the target's by then.
    """
    requests, history = problem
    kernels, pools = replay(twin, requests, history, 1 + requests[0].drafts)
    for request, pool in zip(requests, pools, strict=True):
        cache = kernels.caches[request.slot]
        assert cache.keys() == pool.cache.keys()
        for at, (hidden, token) in pool.cache.items():
            assert cache[at][1] == token
            if cache[at][0] != hidden:
                assert hidden >= 64
                assert cache[at][0] == true_hidden(sum(at) - 1)


@settings(deadline=None, max_examples=extent(4, 8))
@given(problem=histories(), data=st.data())
def test_without_drafts_the_caches_stay_true(twin: Twin, problem, data):
    """Steps that verify and draft nothing between others: what is true is there, up to the end."""
    requests, history = problem
    kernels, _ = replay(twin, requests, history, 1)
    for _ in range(data.draw(st.integers(1, 3))):
        steps: list[Step | None] = [
            follow(request, [data.draw(st.integers(0, SYMBOLS - 1))], [], verified=0)
            for request in requests
        ]
        kernels.step(steps, 1, drafting=False)
    for request in requests:
        for (number, position), (hidden, token) in kernels.caches[request.slot].items():
            if position + number < len(request.tokens):
                assert hidden == true_hidden(position + number - 1)
                assert token == request.tokens[position + number]
        for number in range(1, request.drafts + 1):
            for position in range(len(request.tokens) - number):
                assert (number, position) in kernels.caches[request.slot]


# One launch: its numbers, its padding, and what it leaves of the chain.


HIDDEN, VOCABULARY = 24, 50


def random_rows(
    lanes: int, H: int, dtype: torch.dtype, device: str, *, seed: int, groups: int = 3
) -> Residual:
    """Hidden states whose rows are far apart; a lane's are the same among however many."""
    wide, squares = torch.empty(lanes, H + 5), torch.empty(groups, lanes)
    for lane in range(lanes):
        draw = torch.Generator().manual_seed(1000 * seed + lane)
        wide[lane] = torch.randn(H + 5, generator=draw)
        squares[:, lane] = (torch.rand(groups, generator=draw) + 0.5) * H / groups
    x = torch.full((lanes, H + 2), CANARY, device=device)[:, :H]
    return Residual(x, wide.to(device, dtype)[:, :H], squares.to(device))


def random_fusion(H: int, dtype: torch.dtype, device: str, *, hidden_first: bool) -> Fusion:
    draw = torch.Generator().manual_seed(H)
    wide = torch.randn(VOCABULARY, H + 3, generator=draw).to(device, dtype)
    norms = torch.randn(2, H, generator=draw).to(device, dtype)
    return Fusion(wide[:, :H], norms[0], norms[1], eps=1e-5, hidden_first=hidden_first)


def after_norm(hidden: Residual | torch.Tensor, lane: int, eps: float) -> torch.Tensor:
    """A lane's hidden state in the model's dtype."""
    if isinstance(hidden, torch.Tensor):
        return hidden[lane]
    value = hidden.scaled[lane].double()
    square = hidden.squares[:, lane].double().sum() / len(value)
    return (value / (square + eps).sqrt()).to(hidden.scaled.dtype)


def combined_row(token: int, hidden: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    """By the formula, in float64."""
    halves = []
    for row, weight in (
        (fusion.embedding[token], fusion.embedding_norm),
        (hidden, fusion.hidden_norm),
    ):
        wide = row.double()
        halves.append(wide / (wide.square().mean() + fusion.eps).sqrt() * weight.double())
    return torch.cat(halves[::-1] if fusion.hidden_first else halves)


@dataclass(frozen=True)
class Problem:
    """A launch of module `number` of several rows."""

    number: int
    drafts: int
    width: int
    starts: list[int]
    counts: list[int]
    """Emitted tokens; 0 for a row without valid logits, -1 for a padded one."""
    newest: list[int]
    """The draft that is committed: -1 for none; -2 where the chain had ended before."""
    plain: bool = False
    hidden_first: bool = False
    H: int = HIDDEN


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    drafts = draw(st.integers(2, 5))
    width = draw(st.integers(1, 5))
    rows = draw(st.integers(1, 4))

    def each(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    return Problem(
        number=draw(st.integers(2, drafts)),
        drafts=drafts,
        width=width,
        starts=each(st.one_of(st.integers(0, 1), st.integers(0, 9))),
        counts=each(st.integers(-1, width)),
        newest=each(st.one_of(st.integers(0, 9), st.integers(-2, 9))),
        plain=draw(st.booleans()),
        hidden_first=draw(st.booleans()),
    )


class Setup:
    """The operands of a launch, poison wherever nothing may be read, and what it is to leave."""

    def __init__(self, twin: Twin, problem: Problem, dtype: torch.dtype) -> None:
        self.twin, self.problem = twin, problem
        self.shift = shift = problem.number - 1
        self.rows, self.W = rows, W = len(problem.starts), problem.width
        self.width = W + shift
        N, M, K = rows * W, rows * (W + shift - 1), problem.drafts
        sizes: Any = {"H": problem.H, "dtype": dtype, "device": twin.device}
        self.fusion = random_fusion(**sizes, hidden_first=problem.hidden_first)
        self.hidden = random_rows(N, **sizes, seed=1)
        self.output = random_rows(M, **sizes, seed=2, groups=5)
        self.older = random_rows(rows * K, **sizes, seed=3).scaled.view(rows, K, -1)
        self.residual = random_rows(rows * self.width, **sizes, seed=4)
        self.chain = new_draft_chain(rows, K, problem.H, dtype=dtype, device=twin.device)
        self.chain.token.fill_(HUGE)
        self.chain.hidden.fill_(torch.nan)
        self.slot, self.position, self.target = [-1] * N, [HUGE] * N, [LOWEST] * N
        self.row_slot, self.row_position = [-1] * rows, [LOWEST] * rows
        self.source = [HUGE] * rows
        self.drafts: list[int | None] = [None] * M
        self.table = [[77] * K for _ in range(rows)]
        self.expected_table = [[77] * K for _ in range(rows)]
        # Of live lanes: token, position and hidden state; and of rows that draft on.
        self.wanted: dict[int, tuple[int, int, torch.Tensor]] = {}
        self.newest: dict[int, tuple[int, int, torch.Tensor]] = {}
        for row in range(rows):
            self._emit(row)
            if problem.counts[row] > 0 and problem.newest[row] != -2:
                self._draft(row)
        for lane in set(range(M)) - {lane for lane in self.source if lane != HUGE}:
            self.output.scaled[lane] = torch.nan
            self.output.squares[:, lane] = torch.nan
        self.before = [tensor.clone() for tensor in self.chain]

    def _want(self, row: int, j: int, token: int, hidden: torch.Tensor) -> None:
        position = self.problem.starts[row] + j - self.shift
        if position >= 0:
            self.wanted[row * self.width + j] = (token, position, hidden)

    def _emit(self, row: int) -> None:
        count, first = self.problem.counts[row], row * self.W
        # A row's first lane is live, whether it emitted or not.
        if count >= 0:
            self.slot[first], self.position[first] = row, self.problem.starts[row]
        for j in range(max(count, 0)):
            self.slot[first + j], self.target[first + j] = row, 20 + j
            self._want(row, j, 20 + j, after_norm(self.hidden, first + j, 0.25))
        silent = slice(first + max(count, 0), first + self.W)
        self.hidden.scaled[silent] = torch.nan
        self.hidden.squares[:, silent] = torch.nan

    def _draft(self, row: int) -> None:
        problem, shift = self.problem, self.shift
        count, draft = problem.counts[row], problem.newest[row]
        place = problem.starts[row] + count - 1
        self.row_slot[row], self.row_position[row] = row, place
        source = self.source[row] = row * (self.width - 1) + count + shift - 2
        self.drafts[source] = draft
        for step in range(shift - 1):
            self.chain.token[row, step] = 30 + step
            self.chain.hidden[row, step] = self.older[row, step]
            self._want(row, count + step, 30 + step, self.older[row, step])
        self.table[row][shift - 1 :] = [99] * (problem.drafts - shift + 1)
        self.expected_table[row][shift - 1 :] = [draft] + [-1] * (problem.drafts - shift)
        if draft >= 0:
            value = after_norm(self.output.scaled if problem.plain else self.output, source, 0.5)
            self._want(row, count + shift - 1, draft, value)
            self.newest[row] = (draft, place, value)

    def run(self) -> Any:
        ints, problem = self.twin.ints, self.problem
        table = ints(self.table)
        following = advance(
            self.twin,
            ModuleRun(
                DraftTiles(*self.twin.tiles(self.drafts)),
                DecodeLanes(ints([HUGE] * self.rows), ints(self.row_slot), ints(self.row_position)),
                ints(self.source),
                self.output.scaled if problem.plain else self.output,
                0.5,
            ),
            Emitted(
                ints(self.target),
                ints([HUGE if count < 0 else count for count in problem.counts]),
                DecodeLanes(ints([LOWEST] * len(self.slot)), ints(self.slot), ints(self.position)),
                self.hidden,
                0.25,
            ),
            self.chain,
            self.fusion,
            table,
            module=problem.number,
            residual=self.residual,
        )
        assert table.tolist() == self.expected_table
        return following


def check_launch(twin: Twin, problem: Problem, dtype: torch.dtype) -> torch.Tensor:
    """A launch whose padding is poison; returns its combined rows, 0 where they are padded."""
    setup = Setup(twin, problem, dtype)
    following = setup.run()
    shown = torch.zeros_like(following.combined)
    for lane, cleared in enumerate(setup.residual.x):
        if lane not in setup.wanted:
            assert following.lanes.slot[lane] == -1, f"{lane=}"
            assert (cleared == CANARY).all()
            continue
        token, position, hidden = setup.wanted[lane]
        fields = [int(column[lane]) for column in following.lanes]
        assert fields == [token, lane // setup.width, position]
        expected = combined_row(token, hidden, setup.fusion)
        assert_close(following.combined[lane].double(), expected, dtype)
        assert (cleared == 0).all()
        shown[lane] = following.combined[lane]
    check_rows_of(setup, following, dtype)
    return shown


def check_rows_of(setup: Setup, following: Any, dtype: torch.dtype) -> None:
    """Where each row goes on, and that nothing but its newest draft was written to the chain."""
    shift, chain = setup.shift, setup.chain
    for row, count in enumerate(setup.problem.counts):
        if row not in setup.newest:
            assert following.rows.slot[row] == -1
            continue
        token, position, hidden = setup.newest[row]
        assert [int(column[row]) for column in following.rows] == [token, row, position]
        assert following.source[row] == row * setup.width + count + shift - 1
        assert chain.token[row, shift - 1] == token
        assert_close(chain.hidden[row, shift - 1], hidden, dtype)
        for before, after in zip(setup.before, chain, strict=True):
            before[row, shift - 1] = after[row, shift - 1]
    assert torch.equal(setup.before[0], chain.token)
    assert torch.equal(setup.before[1].nan_to_num(CANARY), chain.hidden.nan_to_num(CANARY))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=extent(13, 40))
@given(problem=problems())
def test_a_launch(twin: Twin, problem):
    check_launch(twin, problem, torch.float32)


def test_drafts_below_position_zero_are_padded(twin: Twin):
    """With a prompt of one token the first modules' drafts have no place in the fourth's cache."""
    problem = Problem(number=4, drafts=4, width=2, starts=[0, 1], counts=[1, 2], newest=[5, 6])
    check_launch(twin, problem, torch.float32)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("number", [2, 4])
def test_dtypes_and_widths(twin: Twin, dtypes, number, plain):
    for dtype in dtypes:
        for H in extent((8, 2100), (8, 1000, 2100)):
            check_launch(
                twin,
                Problem(
                    number, 4, 3, [0, 5, 9], [2, -1, 3], [4, 4, 7], plain, hidden_first=True, H=H
                ),
                dtype,
            )


def test_a_row_keeps_its_bits(twin: Twin, dtypes):
    """Alone as beside others, whatever they do."""
    shared: Any = {"number": 3, "drafts": 3, "width": 4, "H": 1536}
    for dtype in dtypes:
        alone = Problem(**shared, starts=[5], counts=[3], newest=[4])
        among = Problem(**shared, starts=[5, 1, 7, 2], counts=[3, 4, -1, 0], newest=[4, -1, 3, 2])
        row, rows = (check_launch(twin, problem, dtype) for problem in (alone, among))
        assert torch.equal(row, rows[: len(row)])


# What does not fit.


def arguments() -> dict[str, Any]:
    """Arguments of module 3 with K = 3, for two rows of two lanes."""
    twin = Twin("cpu", reference=True)
    sizes: Any = {"H": HIDDEN, "dtype": torch.float32, "device": "cpu"}
    lanes = DecodeLanes(*(twin.ints([0, 0, 1, 1]) for _ in range(3)))
    rows = DecodeLanes(*(twin.ints([0, 1]) for _ in range(3)))
    output = random_rows(6, **sizes, seed=2)
    return {
        "run": ModuleRun(DraftTiles(*twin.tiles([1] * 6)), rows, twin.ints([1, 4]), output, 1e-5),
        "emitted": Emitted(
            twin.ints([1] * 4), twin.ints([1, 1]), lanes, random_rows(4, **sizes, seed=1), 1e-5
        ),
        "chain": new_draft_chain(2, 3, HIDDEN, dtype=torch.float32, device="cpu"),
        "fusion": random_fusion(**sizes, hidden_first=False),
        "draft_SK": twin.ints([[0] * 3] * 2),
        "module": 3,
        "residual": random_rows(8, **sizes, seed=3),
    }


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("module", lambda x: 1, "module=1 must be 2 or more: the first begins the draft"),
        ("module", lambda x: 5, "draft index 3 is not in a table of 3 drafts a slot"),
        (
            "chain",
            lambda x: DraftChain(x.token[:, :1], x.hidden[:, :1]),
            r"chain.token must be \[2, 2 or more\], not \(2, 1\)",
        ),
        (
            "chain",
            lambda x: x._replace(token=x.token.long()),
            "chain.token must be a dense torch.i",
        ),
        (
            "chain",
            lambda x: x._replace(hidden=x.hidden[..., :5]),
            r"chain.hidden must be \[2, 2, 24\], not \[2, 2, 5\]",
        ),
        (
            "chain",
            lambda x: x._replace(hidden=x.hidden.mT.contiguous().mT),
            "chain.token and chain.hidden must be dense",
        ),
        (
            "chain",
            lambda x: x._replace(hidden=x.hidden.double()),
            "chain.hidden is torch.float64, the hidden states torch.float32",
        ),
        (
            "emitted",
            lambda x: x._replace(count_R=x.count_R.repeat(2)),
            "2 rows were drafted for, and 4 emitted",
        ),
        (
            "emitted",
            lambda x: x._replace(hidden=x.hidden.scaled[:3]),
            r"hidden must be \[4 or more",
        ),
        ("run", lambda x: x._replace(hidden=x.hidden.scaled[:3]), r"hidden must be \[6 or more"),
        ("run", lambda x: x._replace(source=x.source[:1]), r"source must be a dense \[2\]"),
        (
            "residual",
            lambda x: x._replace(x=x.x[:4]),
            r"out must be torch.float32 \[8, 24\]",
        ),
    ],
)
def test_what_does_not_fit(name, change, message):
    good = arguments()
    advance_vanilla_draft(**good)
    with pytest.raises(ValueError, match=message):
        advance_vanilla_draft(**good | {name: change(good[name])})


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


def meta_launch(number: int, rows: int = R) -> Callable[[], Any]:
    lanes = rows * (W + number - 2)
    tiles = DraftTiles(new(lanes, TILES, dtype=torch.int64), new_ints(lanes, TILES))
    return lambda: advance_vanilla_draft(
        ModuleRun(tiles, meta_lanes(rows), new_ints(rows), meta_stream(lanes), 1e-6),
        meta_emitted(rows),
        new_draft_chain(rows, K, H, dtype=torch.bfloat16, device="meta"),
        META_FUSION,
        new_ints(9, K),
        module=number,
        residual=meta_stream(rows * (W + number - 1)),
        pdl=True,
    )


def meta_emitted(rows: int) -> Emitted:
    lanes = rows * W
    return Emitted(new_ints(lanes), new_ints(rows), meta_lanes(lanes), meta_stream(lanes), 1e-6)


META_FUSION = Fusion(new(128256, H), new(H), new(H), eps=1e-5)
LAUNCHES: dict[str, Callable[[], Any]] = {
    "begin": lambda: begin_vanilla_draft(
        meta_emitted(R), META_FUSION, module=2, residual=meta_stream(R * W), pdl=True
    ),
    "second": meta_launch(2),
    "third": meta_launch(3),
    "one row": meta_launch(3, rows=1),
}
TILES_READ = {"commit.best", "commit.health"}
NEW = {
    "begin": set(),
    "second": TILES_READ,
    "third": TILES_READ,
    "one row": TILES_READ,
}
WEIGHTS = {"fusion.embedding_norm", "fusion.hidden_norm"}


@compiles
@pytest.mark.parametrize("name", LAUNCHES)
def test_only_what_is_new_is_read_after_the_wait(name):
    launch = record_launch(module, LAUNCHES[name])
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    late = {load.argument for load in loads if load.after_wait}
    assert late == NEW[name] | {"fusion.embedding"}
    early = {(load.argument, load.past_l1) for load in loads if not load.after_wait}
    assert early.isdisjoint({(argument, True) for argument in late})
    assert {argument for argument, past_l1 in early if not past_l1} <= WEIGHTS


# Rows whose first lanes are padded, since they would stand below position 0.


HEADS, KV_HEADS, D = 4, 2, 64


def attend(
    qkv: torch.Tensor,
    slot: list[int],
    position: list[int],
    lanes: list[int],
    tables: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
    tokens_per_row: int,
) -> torch.Tensor:
    """A launch of some of the lanes."""
    device, ints = tables[0].device, partial(torch.tensor, dtype=torch.int32)
    counters = decode_attention_arrivals(len(lanes), num_heads=HEADS, num_kv_heads=KV_HEADS)
    return decode_attention(
        qkv[lanes].to(device),
        *tables,
        cache.kv,
        cache.block_table_SB,
        ints([slot[lane] for lane in lanes], device=device),
        ints([position[lane] for lane in lanes], device=device),
        Launch(arrivals=ints([0] * counters, device=device)),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        scale=D**-0.5,
        max_seq_len=64,
        tokens_per_row=tokens_per_row,
        out=torch.full((len(lanes), HEADS * D), CANARY, dtype=qkv.dtype, device=device),
    )


@pytest.mark.parametrize("width", [2, 4])
def test_attention_of_rows_that_begin_below_zero(
    device: str, dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], width: int
) -> None:
    """The bits of decoding the live lanes one by one; the padded ones are poison."""
    # Lanes below 0 of each row; the last row begins after two tokens, and ends in padding.
    below = [*range(width), -2]
    lengths = [0] * width + [2]
    tables = rope_tables(RopeConfig(), head_dim=D, max_positions=64, device=device)
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(width)
        X = (HEADS + 2 * KV_HEADS) * D
        qkv = torch.randn(len(below) * width, X, generator=generator).to(dtype)
        cached = torch.randn(2, len(below), 2, KV_HEADS, D, generator=generator).to(dtype)
        slot, position = [], []
        for row, missing in enumerate(below):
            for j in range(width):
                live = j >= missing and (missing >= 0 or j < width - 1)
                slot.append(row if live else -1)
                position.append(j - missing if live else (j - missing, HUGE, LOWEST)[j % 3])
                if not live:
                    qkv[row * width + j] = torch.nan
        caches = [
            place_cache(
                *cached.to(device), lengths, block_size=8, placement=3, poison=True, room=width
            )
            for _ in range(2)
        ]
        every = list(range(len(slot)))
        together = attend(qkv, slot, position, every, tables, caches[0], width)
        for j in range(width):
            lanes = list(range(j, len(slot), width))
            alone = attend(qkv, slot, position, lanes, tables, caches[1], 1)
            assert torch.equal(alone, together[lanes])
        live = torch.tensor(slot) >= 0
        assert not together[live.to(device)].isnan().any()
        assert (together[~live.to(device)] == CANARY).all()
        first, second = (cache.all_layers.view(torch.uint8) for cache in caches)
        assert torch.equal(first, second)
