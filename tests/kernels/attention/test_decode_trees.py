"""Decode attention of rows that are trees: each path has the bits of its tokens as a chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.attention.decode import (
    SPLITS,
    TREE_SPLIT,
    decode_attention,
    decode_attention_arrivals,
)
from graphengine.kernels.attention.reference import decode_attention_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables
from launches.trees import POISON, Shape, shapes

NATIVE = torch.cuda.is_available() and not INTERPRETED
SETTINGS = settings(deadline=None, max_examples=examples(5, 20), derandomize=not NATIVE)
SENTINEL = -555.0
D, G, GROUP = 64, 2, 2
HEADS = G * GROUP
BUSHY = Shape((0, 0, 1, 1, 2, 3, 6))

Op = tuple[Callable[..., torch.Tensor], str]


@pytest.fixture(scope="module", params=["triton", "reference"])
def op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return decode_attention_reference, "cpu"
    return decode_attention, request.getfixturevalue("device")


class Case:
    """Rows of one shape: slot r has `lengths[r]` cached tokens, and a tree of new ones after."""

    def __init__(
        self, op: Op, place_cache: Callable[..., Any], shape: Shape, lengths: Sequence[int],
        *, dtype: torch.dtype = torch.float32, window: int = 0, split: int = 64, seed: int = 0,
    ) -> None:  # fmt: skip
        self.function, self.device = op
        self.shape, self.lengths = shape, tuple(lengths)
        self.dtype, self.window, self.split = dtype, window, split
        generator = torch.Generator().manual_seed(seed)
        rows = len(lengths)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.qkv_RWX = draw(rows, shape.width, (HEADS + 2 * G) * D)
        self.norms = 1 + 0.2 * draw(2, D)
        self._cached = draw(2, rows, max(1, *lengths), G, D).to(self.device)
        self._place = lambda: place_cache(
            *self._cached, lengths, block_size=16, placement=seed, poison=True, room=shape.width
        )
        self.limit = max(lengths) + shape.width
        self.tables = rope_tables(
            RopeConfig(), head_dim=D, max_positions=self.limit, device=self.device
        )
        self.cache = self._place()

    def fresh(self) -> None:
        self.cache = self._place()

    def run(
        self, qkv_NX: torch.Tensor, slots: list[int], positions: list[int], width: int,
        tree: TreeLanes | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run it, and check that padded lanes' products are not read, nor their outputs written."""
        padded = torch.tensor(slots) < 0
        qkv_NX = qkv_NX.masked_fill(padded[:, None], torch.nan)
        out = torch.full((len(slots), HEADS * D), SENTINEL, dtype=self.dtype, device=self.device)
        options: dict[str, Any] = {
            "num_heads": HEADS, "num_kv_heads": G, "scale": D**-0.5, "max_seq_len": self.limit,
            "q_norm_weight": self.norms[0].to(self.device), "eps": 1e-6, "window": self.window,
            "k_norm_weight": self.norms[1].to(self.device), "tree": tree, "out": out,
        }  # fmt: skip
        arguments = [
            qkv_NX.to(self.device), *self.tables, self.cache.kv, self.cache.block_table_SB,
            *(torch.tensor(x, dtype=torch.int32, device=self.device) for x in (slots, positions)),
        ]  # fmt: skip
        if self.function is decode_attention:
            counters = decode_attention_arrivals(len(slots), num_heads=HEADS, num_kv_heads=G)
            arrivals = torch.zeros(counters, dtype=torch.int32, device=self.device)
            arguments.append(Launch(arrivals=arrivals))
            options |= {"split_tokens": self.split, "tokens_per_row": width}
        self.function(*arguments, **options)
        assert bool((out[padded.to(self.device)] == SENTINEL).all()), "a padded lane was written"
        return out

    def lanes(self, nodes: Sequence[int], live: Callable[[int, int], bool]) -> tuple[Any, Any]:
        """Slots and positions of these nodes in each row, poisoned where not `live(row, node)`."""
        slots, positions = [], []
        for row, length in enumerate(self.lengths):
            for node in nodes:
                is_live = live(row, node)
                slots.append(row if is_live else -1)
                positions.append(length + self.shape.depths[node] if is_live else POISON)
        return slots, positions

    def at_once(self, live: Callable[[int, int], bool] = lambda row, node: True) -> torch.Tensor:
        """All nodes of all rows in one launch."""
        nodes, rows = range(self.shape.width), len(self.lengths)
        tree = self.shape.lanes(rows, self.device)
        lanes = self.lanes(nodes, live)
        out = self.run(self.qkv_RWX.flatten(0, 1), *lanes, self.shape.width, tree)
        return out.view(rows, self.shape.width, -1)

    def by_level(self) -> torch.Tensor:
        """A launch for each depth, as those of a drafter."""
        rows, width = len(self.lengths), self.shape.width
        out = torch.empty(rows, width, HEADS * D, dtype=self.dtype, device=self.device)
        for depth in range(self.shape.most + 1):
            nodes = [node for node in range(width) if self.shape.depths[node] == depth]
            lanes = self.lanes(nodes, lambda row, node: True)
            tree = self.shape.lanes(rows, self.device, nodes)
            level = self.run(self.qkv_RWX[:, nodes].flatten(0, 1), *lanes, 1, tree)
            out[:, nodes] = level.view(rows, len(nodes), -1)
        return out

    def as_chain(self, node: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The path to a node as a chain in a fresh cache: its output [R, Q * D], and its entry."""
        self.fresh()
        path = self.shape.path(node)
        slots = [row for row in range(len(self.lengths)) for _ in path]
        positions = [length + j for length in self.lengths for j in range(len(path))]
        out = self.run(self.qkv_RWX[:, path].flatten(0, 1), slots, positions, len(path))
        last = torch.stack([self.entry(row, len(path) - 1) for row in range(len(self.lengths))])
        return out.view(len(self.lengths), len(path), -1)[:, -1], last

    def entry(self, row: int, offset: int) -> torch.Tensor:
        """[2, G, D]: key and value so many entries after the row's older ones."""
        token = self.lengths[row] + offset
        block = int(self.cache.block_table_SB[row, token // 16])
        return self.cache.kv[block, :, token % 16].clone()


def check_tree(case: Case) -> None:
    """Every node, in one launch and level by level, has its chain's bits, as its entry has."""
    whole, width = case.at_once(), case.shape.width
    rows = range(len(case.lengths))
    entries = torch.stack(
        [torch.stack([case.entry(row, node) for node in range(width)]) for row in rows]
    )
    untouched = case.cache.all_layers.clone()
    case.fresh()
    levels = case.by_level()
    assert torch.equal(levels, whole)
    assert torch.equal(case.cache.all_layers.view(torch.uint8), untouched.view(torch.uint8))
    for node in range(width):
        expected, entry = case.as_chain(node)
        assert torch.equal(whole[:, node], expected), f"{node=} of {case.shape} at {case.lengths}"
        assert torch.equal(entries[:, node], entry), f"{node=} of {case.shape} at {case.lengths}"


@SETTINGS
@given(
    shape=shapes(6),
    lengths=st.lists(st.one_of(st.integers(0, 8), st.integers(57, 66)), min_size=1, max_size=2),
    window=st.sampled_from([0, 0, 3, 60]),
    seed=st.integers(0, 99),
)
def test_paths_have_the_bits_of_chains(
    op: Op,
    place_cache: Callable[..., Any],
    shape: Shape,
    lengths: list[int],
    window: int,
    seed: int,
) -> None:
    """Around the ends of splits and blocks, with siblings between the nodes of a path."""
    dtype = (torch.float32, torch.float16)[seed % 2]
    check_tree(Case(op, place_cache, shape, lengths, dtype=dtype, window=window, seed=seed))


def test_nodes_without_a_draft_are_not_read(op: Op, place_cache: Callable[..., Any]) -> None:
    """A padded subtree, and a row that has only its root."""
    case = Case(op, place_cache, BUSHY, (62, 3))
    expected = case.at_once()
    case.fresh()
    without = {1, 3, 4, 6, 7}
    actual = case.at_once(lambda row, node: node not in without if row == 0 else node == 0)
    kept = [node for node in range(BUSHY.width) if node not in without]
    assert torch.equal(actual[0, kept], expected[0, kept])
    assert torch.equal(actual[1, 0], expected[1, 0])


def test_an_entry_past_the_limit_fails(op: Op, place_cache: Callable[..., Any]) -> None:
    """The position is inside, the entry is not: NaN, and nothing is appended."""
    case = Case(op, place_cache, Shape((0, 0, 0)), (5,))
    case.limit -= 2
    out = case.at_once()
    assert not out[0, :2].isnan().any()
    assert bool(out[0, 2:].isnan().all())
    assert bool(case.entry(0, 2).isnan().all())


def test_what_does_not_fit_is_refused(op: Op, place_cache: Callable[..., Any]) -> None:
    if op[0] is decode_attention_reference:
        pytest.skip("the reference checks nothing")
    case = Case(op, place_cache, BUSHY, (5,), split=next(s for s in SPLITS if s > TREE_SPLIT))
    with pytest.raises(ValueError, match=r"split_tokens=256: lanes of a tree want .* most 128"):
        case.at_once()
    case.split = 64
    tree = BUSHY.lanes(1, op[1])
    qkv, lanes = case.qkv_RWX.flatten(0, 1), case.lanes(range(8), lambda row, node: True)
    with pytest.raises(ValueError, match=r"tree's depth must be a dense int32 \[8\].* \(7,\)"):
        case.run(qkv, *lanes, 8, tree._replace(depth=tree.depth[:7]))
    with pytest.raises(ValueError, match=r"tree's ancestor must be a dense int32 \[8, 'D'\]"):
        case.run(qkv, *lanes, 8, tree._replace(ancestor=tree.ancestor.long()))
    deep = tree._replace(ancestor=torch.zeros(8, 9, dtype=torch.int32, device=op[1]))
    with pytest.raises(ValueError, match="a tree of 8 nodes cannot have a depth of 9"):
        case.run(qkv, *lanes, 8, deep)
