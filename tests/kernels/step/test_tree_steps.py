"""A step whose rows are trees: its lanes, the walk to the accepted path, and the move of its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.step.begin import RowTrees
from graphengine.kernels.step.finish import verify_commit_publish
from graphengine.kernels.step.finish_reference import (
    FinishedStep,
    verify_commit_publish_reference,
)
from graphengine.kernels.step.move import move_path, move_path_reference
from graphengine.kernels.step.record import unpack_state
from graphengine.kernels.step.state import EMITTED, INVALID, LENGTH, STOP, DecodeLanes
from graphengine.kernels.step.walk import AcceptedPath
from launches.finish import HUGE, LOWEST, Twin, read_entry
from launches.trees import POISON, Shape, shapes

EPOCH, KV_LEN = 41, 9
SETTINGS = settings(max_examples=extent(12, 60), deadline=None, derandomize=True)
#   0 - 1 - 3 - 6
#     \   \ 4
#      2 - 5
WORKED = Shape((0, 0, 1, 1, 2, 3))


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


# The lanes.


def check_begin(
    twin: Twin, shape: Shape, kv_lens: list[int], drafts: list[list[int]], *, max_len: int,
    limit: int,
) -> None:  # fmt: skip
    """Row r of slot r, after a padded row, against the rules one node after the other."""
    slots, width = len(kv_lens), shape.width
    state = twin.state(slots)
    state.kv_len.copy_(twin.ints(kv_lens))
    state.running.fill_(1)
    state.next_token.copy_(twin.ints(range(slots)))
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(8, 16, generator=generator).to(twin.device)
    residual = new_residual((1 + slots) * width, 16, 1, dtype=torch.float32, device=twin.device)
    tree = TreeLanes.new((1 + slots) * width, shape.most, torch.device(twin.device))
    for part in tree:
        part.fill_(-7)
    lanes = twin.begin(
        state,
        state.epoch.clone(),
        twin.ints([-1, *range(slots)]),
        embedding,
        torch.ones(16, device=twin.device),
        residual,
        draft_SK=twin.ints(drafts),
        max_len_S=twin.ints([max_len] * slots),
        num_speculative_tokens=width - 1,
        trees=RowTrees(shape.tables(slots, twin.device), tree, limit),
    )
    assert lanes.slot[:width].tolist() == [-1] * width
    for slot, kv_len in enumerate(kv_lens):
        for node in range(width):
            lane, depth = (1 + slot) * width + node, shape.depths[node]
            token = drafts[slot][node - 1] if node else slot
            live = token >= 0 and kv_len + node < limit
            live &= node == 0 or kv_len + depth + 1 < max_len
            assert int(lanes.slot[lane]) == (slot if live else -1), f"{slot=} {node=}"
            if not live:
                assert [int(part[lane].flatten()[0]) for part in tree] == [-7] * 3
                continue
            assert (int(lanes.token[lane]), int(lanes.position[lane])) == (token, kv_len + depth)
            assert (int(tree.node[lane]), int(tree.depth[lane])) == (node, depth)
            assert tree.ancestor[lane, :depth].tolist() == shape.path(node)[:-1]
            assert torch.equal(residual.x[lane], embedding[token])


@given(shape=shapes(), data=st.data())
@SETTINGS
def test_lanes_are_nodes(twin: Twin, shape: Shape, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 3))
    draft = st.sampled_from([0, 1, 2, 3, 4, -1])
    count = shape.width - 1
    check_begin(
        twin,
        shape,
        data.draw(st.lists(st.integers(0, 20), min_size=slots, max_size=slots)),
        [data.draw(st.lists(draft, min_size=count, max_size=count)) for _ in range(slots)],
        max_len=data.draw(st.sampled_from([5, 15, 22, 100])),
        limit=data.draw(st.sampled_from([22, 25, 40])),
    )


def test_trees_that_do_not_fit_are_refused(twin: Twin) -> None:
    if twin.reference:
        pytest.skip("the reference checks nothing")
    state, device = twin.state(2), torch.device(twin.device)
    embedding, norm = torch.zeros(8, 16, device=device), torch.ones(16, device=device)
    residual = new_residual(7, 16, 1, dtype=torch.float32, device=device)
    tables, lanes = WORKED.tables(2, twin.device), TreeLanes.new(7, 3, device)

    def begin(trees: RowTrees, drafts: int = 6) -> None:
        twin.begin(
            state, state.epoch, twin.ints([0]), embedding, norm, residual,
            draft_SK=twin.ints([[1] * 6] * 2), max_len_S=twin.ints([9, 9]),
            num_speculative_tokens=drafts, trees=trees,
        )  # fmt: skip

    begin(RowTrees(tables, lanes, 9))
    wrong = {
        r"depth must be int32 \[2, 7\].*\(1, 7\)": (tables._replace(depth=tables.depth[:1]), lanes),
        r"ancestor must be int32 \[2, 7, 'D'\].*int64": (
            tables._replace(ancestor=tables.ancestor.long()),
            lanes,
        ),
        r"the lanes' trees have a depth of 2, the tables' 3": (tables, TreeLanes.new(7, 2, device)),
        r"tree's node must be a dense int32 \[7\].*\(6,\)": (
            tables,
            lanes._replace(node=lanes.node[1:]),
        ),
    }
    for message, (bad_tables, bad_lanes) in wrong.items():
        with pytest.raises(ValueError, match=message):
            begin(RowTrees(bad_tables, bad_lanes, 9))
    residual = new_residual(1, 16, 1, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="trees are wanted for 0 drafts a row"):
        begin(RowTrees(tables, lanes, 9), drafts=0)


# The walk.


@dataclass(kw_only=True)
class Row:
    """A row's tree: what each node but the root was fed, and what each sampled.

    None in `fed` is a node without a draft, whose descendants have none either.
    """

    fed: list[int | None]
    sampled: list[int]
    stop_ids: tuple[int, int, int] = (-1, -1, -1)
    max_len: int = HUGE

    def live(self, shape: Shape, node: int) -> bool:
        return all(self.fed[each - 1] is not None for each in shape.path(node)[1:])

    def walk(self, shape: Shape, forced: int | None) -> tuple[list[int], list[int], int]:
        """(nodes, tokens emitted, flags), one token after the other."""
        nodes, emitted = [], []
        node: int | None = 0
        while node is not None:
            token = self.sampled[node]
            if token < 0:
                return nodes, emitted, EMITTED if emitted else INVALID
            nodes.append(node)
            emitted.append(token)
            flags = EMITTED | STOP * (token in self.stop_ids)
            flags |= LENGTH * (KV_LEN + len(emitted) + 1 >= self.max_len)
            if flags != EMITTED:
                return nodes, emitted, flags
            depth = len(nodes) - 1
            children = [
                child
                for child in range(1, shape.width)
                if shape.parents[child - 1] == node and self.live(shape, child)
                if (self.fed[child - 1] == token if forced is None else depth < forced)
            ]
            node = children[0] if children else None
        return nodes, emitted, EMITTED


def check_walk(
    twin: Twin, shape: Shape, rows: list[Row | None], forced: int | None = None
) -> FinishedStep:
    """One step of these rows, None for a padded one, against `Row.walk`."""
    width, length = shape.width, shape.most + 1
    state, limits = twin.state(len(rows), sequence=6), twin.limits(len(rows))
    state.running.fill_(1)
    state.kv_len.fill_(KV_LEN)
    state.next_token.fill_(77)
    state.epoch.fill_(EPOCH)
    slot, fed, sampled, position = ([] for _ in range(4))
    tree = shape.lanes(len(rows), twin.device)
    for r, row in enumerate(rows):
        for node in range(width):
            live = row is not None and row.live(shape, node)
            slot.append(r if live else -1)
            # A padded lane holds poison: tokens and tiles that would be accepted.
            fed.append(((LOWEST, *row.fed)[node] if row else None) if live else 3)
            sampled.append(row.sampled[node] if row and live else None)
            position.append(KV_LEN + shape.depths[node] if live else POISON)
            if not live:
                for part in tree:
                    part[r * width + node] = POISON
        if row:
            limits.stop_ids[r] = twin.ints(row.stop_ids)
            limits.max_len[r] = row.max_len
    mailbox = twin.mailbox(4, len(rows) + 1, width + 1)
    lanes = DecodeLanes(twin.ints(fed), twin.ints(slot), twin.ints(position))
    operands = (*twin.tiles(sampled), lanes, state, limits, mailbox)
    options: dict[str, Any] = {"num_speculative_tokens": width - 1, "forced": forced, "tree": tree}
    if twin.reference:
        step = verify_commit_publish_reference(*operands, **options)
    else:
        launch = Launch(arrivals=twin.ints([0]))
        step = verify_commit_publish(*operands, launch, **options)
    assert step.path is not None
    records: list[Any] = []
    for r, row in enumerate(rows):
        nodes, emitted, flags = row.walk(shape, forced) if row else ([], [], 0)
        count, first = len(emitted), r * length
        assert (int(step.flags_R[r]), int(step.count_R[r])) == (flags, count), f"{row} of {shape}"
        assert step.token_N[first : first + count].tolist() == emitted
        path, source = step.path.lanes, step.path.source[first : first + length].tolist()
        assert source == [r * width + node for node in (*nodes, *[0] * (length - count))]
        slots = path.slot[first : first + length].tolist()
        assert slots == [r] * count + [-1] * (length - count)
        assert path.position[first : first + count].tolist() == [KV_LEN + j for j in range(count)]
        assert path.token[first : first + count].tolist() == [fed[at] for at in source[:count]]
        records.append((7, tuple(emitted), EPOCH if row else 0, flags))
        deepest = max(
            (d for n, d in enumerate(shape.depths) if row and row.live(shape, n)), default=-1
        )
        word = int(mailbox[3, r, -1]) & 0xFFFFFFFF
        assert unpack_state(word).fed == deepest + 1
        if row:
            assert int(state.running[r]) == (flags == EMITTED)
            assert int(state.kv_len[r]) == KV_LEN + max(count, 1)
            assert int(state.next_token[r]) == [77, *emitted][-1]
    assert read_entry(mailbox, 3) == [*records, None]
    return step


FED: list[int | None] = [5, 4, 8, 9, 6, 7]
WALKS: dict[str, tuple[Row, list[int], int]] = {
    "second child, then its child": (
        Row(fed=FED, sampled=[4, 1, 6, 1, 1, 7, 1]), [4, 6, 7], EMITTED,
    ),
    "to a leaf": (Row(fed=FED, sampled=[5, 8, 1, 7, 1, 1, 2]), [5, 8, 7, 2], EMITTED),
    "no child": (Row(fed=FED, sampled=[6, 8, 1, 7, 1, 1, 2]), [6], EMITTED),
    "a cousin's draft": (Row(fed=FED, sampled=[5, 6, 1, 1, 1, 7, 1]), [5, 6], EMITTED),
    "the root alone": (Row(fed=[None] * 6, sampled=[4] * 7), [4], EMITTED),
    "a stop on the path": (
        Row(fed=FED, sampled=[5, 8, 1, 7, 1, 1, 2], stop_ids=(2, 8, -1)),
        [5, 8], EMITTED | STOP,
    ),
    "a stop beside the path": (
        Row(fed=FED, sampled=[5, 8, 3, 1, 3, 3, 3], stop_ids=(3, -1, -1)),
        [5, 8, 1], EMITTED,
    ),
    "the length": (
        Row(fed=FED, sampled=[5, 8, 1, 7, 1, 1, 2], max_len=KV_LEN + 4),
        [5, 8, 7], EMITTED | LENGTH,
    ),
    "no valid logits on the path": (
        Row(fed=FED, sampled=[5, -1, 1, 7, 1, 1, 2]), [5], EMITTED,
    ),
    "no valid logits": (Row(fed=FED, sampled=[-1] * 7), [], INVALID),
}  # fmt: skip


@pytest.mark.parametrize("case", WALKS)
def test_one_row(twin: Twin, case: str) -> None:
    row, emitted, flags = WALKS[case]
    assert row.walk(WORKED, None)[1:] == (emitted, flags), "the walk of the tests is wrong"
    check_walk(twin, WORKED, [None, row, row, None])


@given(shape=shapes(), data=st.data())
@SETTINGS
def test_matches_a_walk_in_plain_python(twin: Twin, shape: Shape, data: st.DataObject) -> None:
    """Few tokens make walks long; forced ones take the first path."""
    count = shape.width - 1
    token = st.sampled_from([0, 0, 1, 2])
    fed = st.lists(st.one_of(*[token] * 8, st.none()), min_size=count, max_size=count)
    sampled = st.lists(st.one_of(*[token] * 9, st.just(-1)), min_size=count + 1, max_size=count + 1)
    rows: list[Row | None] = [
        Row(
            fed=data.draw(fed),
            sampled=data.draw(sampled),
            stop_ids=data.draw(st.sampled_from([(-1, -1, -1), (-1, -1, -1), (-1, 2, 1)])),
            max_len=KV_LEN + data.draw(st.sampled_from([2, 3, 4, 100])),
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    forced = data.draw(st.sampled_from([None, None, 0, 2, 50]))
    check_walk(twin, shape, [*rows, None], forced)


# The move.


def check_move(
    twin: Twin, shape: Shape, lengths: list[int], nodes: list[int | None], dtype: Any
) -> None:
    """The path to `nodes[r]`, None for a row that emitted nothing, in two layers."""
    rows, width, length, block_size = len(lengths), shape.width, shape.most + 1, 8
    columns = -(-(max(lengths) + width) // block_size)
    generator = torch.Generator().manual_seed(sum(lengths))
    blocks = 1 + rows * columns
    cache = torch.randn(2, blocks, 2, block_size, 3, 5, generator=generator)
    table = (1 + torch.randperm(blocks - 1, generator=generator)).view(rows, columns)
    cache, table = cache.to(twin.device, dtype), table.to(twin.device, torch.int32)
    slots, positions, sources = [], [], []
    expected = cache.clone().view(torch.int8)
    before = expected.clone()

    def entry(row: int, offset: int) -> tuple[Any, ...]:
        token = lengths[row] + offset
        return slice(None), int(table[row, token // block_size]), slice(None), token % block_size

    for row, node in enumerate(nodes):
        path = [] if node is None else shape.path(node)
        spare = length - len(path)
        slots += [row] * len(path) + [-1] * spare
        positions += [lengths[row] + j for j in range(len(path))] + [POISON] * spare
        sources += [row * width + each for each in (*path, *[0] * spare)]
        for j, each in enumerate(path):
            expected[entry(row, j)] = before[entry(row, each)]
    lanes = DecodeLanes(*(twin.ints(x) for x in ([POISON] * len(slots), slots, positions)))
    move = move_path_reference if twin.reference else move_path
    move(cache, table, AcceptedPath(lanes, twin.ints(sources)), rows=rows, width=width)
    assert torch.equal(cache.view(torch.int8), expected), f"{shape} at {lengths} to {nodes}"


@given(shape=shapes(), data=st.data())
@SETTINGS
def test_the_entries_of_a_path_are_moved_together(
    twin: Twin, shape: Shape, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, 3))
    node = st.one_of(st.none(), *[st.integers(0, shape.width - 1)] * 4)
    check_move(
        twin,
        shape,
        data.draw(st.lists(st.integers(0, 20), min_size=rows, max_size=rows)),
        data.draw(st.lists(node, min_size=rows, max_size=rows)),
        data.draw(st.sampled_from([torch.float32, torch.float16, torch.float8_e4m3fn])),
    )


def test_a_move_that_does_not_fit_is_refused(twin: Twin) -> None:
    if twin.reference:
        pytest.skip("the reference checks nothing")
    cache = torch.zeros(1, 2, 2, 8, 1, 4, device=twin.device)
    table = twin.ints([[1]])
    path = AcceptedPath.new(4, table)
    with pytest.raises(ValueError, match="4 lanes are no paths of 3 rows, of 1 to 5 tokens"):
        move_path(cache, table, path, rows=3, width=5)
    with pytest.raises(ValueError, match="4 lanes are no paths of 1 rows, of 1 to 3 tokens"):
        move_path(cache, table, path, rows=1, width=3)
    with pytest.raises(ValueError, match=r"a cache must be .* \(1, 2, 8, 2, 1, 4\)"):
        move_path(cache.transpose(2, 3), table, path, rows=1, width=5)
