"""Drafts of a tree: the best tokens after each lane, and the growth of a level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.philox import gumbel, philox_uint32
from graphengine.kernels.draft.draft import (
    Fusion,
    Start,
    begin_module_draft,
    begin_module_draft_reference,
    combine_hidden_reference,
)
from graphengine.kernels.draft.trees.top_drafts import (
    MAX_CHILDREN,
    top_drafts,
    top_drafts_reference,
)
from graphengine.kernels.draft.trees.tree import (
    ParentRun,
    TreeLevel,
    grow_tree,
    grow_tree_reference,
)
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_reference
from graphengine.kernels.step.state import DecodeLanes

POISON, CANARY = 2**31 - 1, 776.0
V, H = 40, 24
SETTINGS = settings(max_examples=extent(10, 50), deadline=None, derandomize=True)


@dataclass(frozen=True)
class Twin:
    top: Callable[..., Any]
    grow: Callable[..., Any]
    begin: Callable[..., Any]
    device: str

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def lanes(self, token: list[int], slot: list[int], position: list[int]) -> DecodeLanes:
        return DecodeLanes(*map(self.ints, (token, slot, position)))

    def fusion(self) -> Fusion:
        draw = torch.Generator().manual_seed(1)
        table = torch.randn(V, H, generator=draw).to(self.device)
        norms = torch.randn(2, H, generator=draw).to(self.device)
        return Fusion(table, norms[0], norms[1], eps=1e-5)


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(top_drafts_reference, grow_tree_reference, begin_module_draft_reference, "cpu")
    return Twin(top_drafts, grow_tree, begin_module_draft, request.getfixturevalue("device"))


# The best drafts.


def best_by_sampling(
    logits: torch.Tensor, slot: int, position: int, params: SamplingTensors, ids: torch.Tensor,
    count: int,
) -> list[int]:  # fmt: skip
    """What is sampled of a row, then what is sampled without that, and so on."""
    columns = torch.full((1, int(ids.max()) + 1), -torch.inf)
    columns[0, ids] = logits
    found = []
    for _ in range(count):
        where = torch.tensor([slot], dtype=torch.int32), torch.tensor([position], dtype=torch.int32)
        found.append(int(sample_reference(columns, *where, params)))
        if found[-1] >= 0:
            columns[0, found[-1]] = -torch.inf
    return found


@given(seed=st.integers(0, 999), count=st.integers(1, 6), columns=st.sampled_from([7, 30, 1100]))
@SETTINGS
def test_they_are_what_would_be_sampled(twin: Twin, seed: int, count: int, columns: int) -> None:
    """Greedily and with noise; stop ids wait for min_len; of a part of the vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(5, columns, generator=draw)
    # Ties, and ids that are no candidates.
    logits[:, ::3] = logits[:, ::3].round()
    logits[0, 2:5] = -torch.inf
    logits[4, 1] = torch.nan
    ids = torch.arange(columns) * 2 + 1 if seed % 2 else torch.arange(columns)
    params = SamplingTensors.neutral(3, stop_ids=2)
    params.temperature[1:] = torch.tensor([1.0, 0.4])
    params.seed[:] = torch.tensor([4, 5, seed])
    params.stop_ids[2] = ids[:2]
    params.min_len[2] = 13
    slot, position, ahead = [0, 1, -1, 2, 1], [3, 4, POISON, 10, 5], 2
    logits[2] = torch.nan
    drafts = twin.top(
        logits.to(twin.device),
        twin.ints(slot),
        twin.ints(position),
        SamplingTensors(*(field.to(twin.device) for field in params)),
        count=count,
        ahead=ahead,
        token_ids=ids.to(twin.device, torch.int32) if seed % 2 else None,
    )
    for lane in (0, 1, 3):
        expected = best_by_sampling(
            logits[lane], slot[lane], position[lane] + ahead - 1, params, ids, count
        )
        assert drafts.token[lane].tolist() == expected, f"{lane=}"
        score = logits[lane].clone()
        if temperature := float(params.temperature[slot[lane]]):
            seed = int(params.seed[slot[lane]])
            noise = gumbel(philox_uint32(seed, position[lane] + ahead, ids.numpy()))
            score = score / temperature + torch.from_numpy(noise)
        if position[lane] + ahead < int(params.min_len[slot[lane]]):
            score[:2] = -torch.inf
        column = [ids.tolist().index(token) for token in expected if token >= 0]
        values = score.log_softmax(0)[column]
        torch.testing.assert_close(
            drafts.log_probability[lane, : len(column)].cpu(), values, rtol=1e-5, atol=1e-5
        )
        assert bool((drafts.log_probability[lane, len(column) :] == -torch.inf).all())
    # A NaN spoils its row.
    assert drafts.token[4].tolist() == [-1] * count


def test_wrong_counts_are_refused(device: str) -> None:
    logits, ints = (
        torch.zeros(1, 5, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    params = SamplingTensors.neutral(1, device=device)
    for columns, count, most in ((5, 6, 5), (5, 0, 5), (99, 17, MAX_CHILDREN)):
        logits = torch.zeros(1, columns, device=device)
        with pytest.raises(
            ValueError, match=f"{count} drafts of a lane, not 1..{most}, of a draft"
        ):
            top_drafts(logits, ints, ints, params, count=count, ahead=1)


# A level.


@dataclass(frozen=True)
class Level:
    """Children in rows of `parents` lanes: (parent, rank, inner) each; numbers from `first`."""

    parents: int
    children: tuple[tuple[int, int, bool], ...]
    first: int

    def on(self, twin: Twin) -> TreeLevel:
        parent, rank, _ = zip(*self.children, strict=True)
        inner = [index for index, (*_, inner) in enumerate(self.children) if inner]
        numbers = range(self.first, self.first + len(self.children))
        return TreeLevel(*map(twin.ints, (parent, rank, [*numbers], inner)))


@st.composite
def levels(draw: st.DrawFn) -> Level:
    parents = draw(st.integers(1, 3))
    child = st.tuples(st.integers(0, parents - 1), st.integers(0, 2), st.booleans())
    children = draw(st.lists(child, min_size=1, max_size=6))
    return Level(parents, tuple(children), draw(st.integers(1, 4)))


@given(level=levels(), data=st.data())
@SETTINGS
def test_a_level_grows(twin: Twin, level: Level, data: st.DataObject) -> None:
    """Drafts, lanes, inputs and streams, child by child; a padded row and padded parents."""
    rows, n, limit = 3, level.parents, 12
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    gathered, start = data.draw(st.booleans()), data.draw(st.sampled_from(get_args(Start)))
    fusion = twin.fusion()._replace(start=start)
    lanes = rows * n + 2 if gathered else rows * n
    source = torch.randperm(lanes, generator=draw)[: rows * n].tolist()
    token = torch.randint(-1, V, (lanes, 3), generator=draw).tolist()
    root = [data.draw(st.integers(0, 10)) for _ in range(rows)]
    row_slot = [2, -1, 0]
    parent_slot = [
        slot if data.draw(st.integers(0, 4)) else -1 for slot in row_slot for _ in range(n)
    ]
    position = [each + data.draw(st.integers(0, 2)) for each in root for _ in range(n)]
    for r, slot in enumerate(row_slot):
        for k in range(r * n, r * n + n):
            if parent_slot[k] < 0:
                position[k] = POISON
                token[source[k] if gathered else k] = [POISON] * 3
        if slot < 0:
            root[r] = POISON
    inner = sum(each for *_, each in level.children)
    hidden = torch.randn(lanes, H, generator=draw).to(twin.device)
    residual = None
    if inner:
        residual = new_residual(rows * inner, H, 1, dtype=torch.float32, device=twin.device)
        residual.x.fill_(CANARY)
    columns = level.first + len(level.children)
    table = torch.full((3, columns), 555, dtype=torch.int32, device=twin.device)
    found = twin.grow(
        ParentRun(twin.ints(token), hidden, 0.0, twin.ints(source) if gathered else None),
        twin.lanes([POISON] * (rows * n), parent_slot, position),
        twin.lanes([POISON] * rows, row_slot, root),
        level.on(twin),
        table,
        fusion,
        limit=limit,
        residual=residual,
    )
    assert (found is None) == (inner == 0)
    expected = torch.full((3, columns), 555, dtype=torch.int32)
    for r, slot in enumerate(row_slot):
        lane = r * inner
        for index, (k, rank, is_inner) in enumerate(level.children):
            parent, node = r * n + k, level.first + index
            at = source[parent] if gathered else parent
            has_parent = slot >= 0 and parent_slot[parent] >= 0
            draft = token[at][rank] if has_parent else -1
            if slot >= 0:
                expected[slot, node - 1] = draft
            if not is_inner:
                continue
            assert found is not None and residual is not None
            after = position[parent] + 1
            live = draft >= 0 and after < limit and root[r] + node < limit
            assert int(found.lanes.slot[lane]) == (slot if live else -1)
            begun = torch.full((H,), CANARY)
            if live:
                assert int(found.lanes.token[lane]) == draft
                assert int(found.lanes.position[lane]) == after
                stream = new_residual(1, H, 1, dtype=torch.float32, device="cpu")
                row = combine_hidden_reference(
                    torch.tensor([draft], dtype=torch.int32),
                    torch.zeros(1, dtype=torch.int32),
                    hidden[at : at + 1].cpu(),
                    None,
                    Fusion(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in fusion)),
                    residual=stream,
                )
                begun = stream.x[0]
                torch.testing.assert_close(found.combined[lane].cpu(), row[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(residual.x[lane].cpu(), begun, rtol=1e-5, atol=1e-5)
            lane += 1
    assert torch.equal(table.cpu(), expected)


def test_operands_that_do_not_fit_are_refused(device: str) -> None:
    twin = Twin(top_drafts, grow_tree, begin_module_draft, device)
    level, fusion = Level(2, ((0, 0, True), (1, 1, False)), 1), twin.fusion()
    hidden = torch.zeros(4, H, device=device)
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    parents, rows = (twin.lanes([0] * n, [0] * n, [0] * n) for n in (4, 2))
    stream = new_residual(2, H, 1, dtype=torch.float32, device=torch.device(device))
    token = twin.ints([[1, 2]] * 4)
    good: dict[str, Any] = {
        "run": ParentRun(token, hidden, 0.0), "parents": parents, "rows": rows,
        "level": level.on(twin), "draft_SK": table, "fusion": fusion, "residual": stream,
    }  # fmt: skip
    grow_tree(**good, limit=9)
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"rows": twin.lanes([0] * 3, [0] * 3, [0] * 3)},
            "4 parents are no whole number .* 3 rows",
        ),
        (
            {"run": ParentRun(token[:3], hidden, 0.0)},
            "drafts of 3 lanes are not those of 4 parents",
        ),
        ({"run": ParentRun(token.long(), hidden, 0.0)}, r"dense int32 \[M, T\], not torch.int64"),
        ({"residual": None}, "a level of 1 inner nodes wants a stream exactly if it has some"),
        ({"level": level.on(twin)._replace(rank=twin.ints([1]))}, r"rank must be .*\[2\].*\(1,\)"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            grow_tree(**(good | change), limit=9)


# What a module takes in after a tree.


def test_hidden_states_are_found_by_the_path(twin: Twin) -> None:
    """The result is that without a path, of hidden states in the order of the path."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, H, generator=draw).to(twin.device)
    source = [0, 3, 4, 5, 7, 5]
    operands = (
        twin.ints([4, 5, 6, 7, 8, POISON]),
        twin.ints([3, 2]),
        twin.lanes([POISON] * 6, [1, 1, 1, 0, 0, -1], [9, 10, 11, 3, 4, POISON]),
    )
    results = []
    for states, found in ((hidden, twin.ints(source)), (hidden[source], None)):
        residual = new_residual(6, H, 1, dtype=torch.float32, device=torch.device(twin.device))
        results.append(
            twin.begin(*operands, states, twin.fusion(), source_N=found, residual=residual)
        )
    live = [0, 1, 2, 3, 4]
    assert results[0].lanes.slot.tolist() == [1, 1, 1, 0, 0, -1]
    assert torch.equal(results[0].combined[live], results[1].combined[live])
    assert torch.equal(results[0].source, results[1].source)
