"""Trees of the best drafts: each run's lanes and the kept nodes, against plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.tree import TreeLanes, TreeTables
from graphengine.kernels.draft.draft import Fusion, combine_hidden_reference
from graphengine.kernels.draft.trees.dynamic_tree import (
    DraftedTrees,
    Expanded,
    expand_tree,
    expand_tree_reference,
    keep_best,
    keep_best_reference,
)
from graphengine.kernels.draft.trees.top_drafts import TopDrafts
from graphengine.kernels.draft.trees.tree_candidates import Candidates, Children
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.step.state import DecodeLanes

POISON, CANARY = 2**31 - 1, 776.0
V, H = 40, 24
SLOT = [2, -1, 0]
SETTINGS = settings(max_examples=extent(12, 60), deadline=None, derandomize=True)


@dataclass(frozen=True)
class Twin:
    expand: Callable[..., Any]
    keep: Callable[..., Any]
    device: str

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def fusion(self) -> Fusion:
        draw = torch.Generator().manual_seed(1)
        table = torch.randn(V, H, generator=draw).to(self.device)
        norms = torch.randn(2, H, generator=draw).to(self.device)
        return Fusion(table, norms[0], norms[1], eps=1e-5, start="hidden")


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(expand_tree_reference, keep_best_reference, "cpu")
    return Twin(expand_tree, keep_best, request.getfixturevalue("device"))


@dataclass(frozen=True)
class Node:
    """A candidate; `path` has the ranks from the root on."""

    number: int
    score: float
    token: int
    parent: int | None
    """The parent's number; None for the root."""
    depth: int


@dataclass
class Lane:
    """A lane of a run in plain Python; it may be padded."""

    node: Node | None
    entry: int
    ancestors: list[int]
    live: bool = True


def best(nodes: list[Node], count: int) -> list[Node]:
    return sorted(nodes, key=lambda node: (-node.score, node.number))[:count]


class Growth:
    """A growth of three rows, the second of them padded, with drafts that are drawn."""

    def __init__(self, twin: Twin, top_k: int, depth: int, nodes: int, limit: int, seed: int):
        self.twin, self.T, self.D, self.K, self.limit = twin, top_k, depth, nodes, limit
        self.draw = torch.Generator().manual_seed(seed)
        self.root = [5, POISON, 2]
        self.nodes: list[list[Node]] = [[], [], []]
        self.lanes = [[Lane(None, 0, [], slot >= 0)] for slot in SLOT]
        self.rows = DecodeLanes(twin.ints([POISON] * 3), twin.ints(SLOT), twin.ints(self.root))
        device = torch.device(twin.device)
        self.found = Candidates.new(3, top_k, depth, device)
        for part in self.found:
            part.fill_(-7)
        self.drafted = DraftedTrees(
            twin.ints([[555] * nodes] * 3),
            twin.ints([[555] * nodes] * 3),
            TreeTables(
                twin.ints([[555] * (1 + nodes)] * 3), twin.ints([[[555] * depth] * (1 + nodes)] * 3)
            ),
        )
        self.source = twin.ints([4, POISON, 1])
        self.parents, self.score, self.above = self.rows, None, None

    def run(self) -> tuple[TopDrafts, torch.Tensor]:
        """Drafts and hidden states of a run; the first has more lanes than the rows."""
        lanes = 5 if self.source is not None else 3 * self.T
        token = torch.randint(-1, V, (lanes, self.T), generator=self.draw, dtype=torch.int32)
        # Eighths, so that sums are exact and there are ties.
        value = -torch.randint(0, 5, (lanes, self.T), generator=self.draw) / 8.0
        hidden = torch.randn(lanes, H, generator=self.draw)
        device = self.twin.device
        return TopDrafts(token.to(device), value.to(device)), hidden.to(device)

    def children(self, drafts: TopDrafts, depth: int) -> Children:
        """The children for a launch; in plain Python they are added to `nodes`."""
        first = 0 if depth == 1 else self.T + (depth - 2) * self.T**2
        for row, lanes in enumerate(self.lanes):
            for b, lane in enumerate(lanes):
                at = int(self.source[row]) if self.source is not None else row * self.T + b
                for r in range(self.T if lane.live else 0):
                    token = int(drafts.token[at, r])
                    above = lane.node.score if lane.node else 0.0
                    score = above + float(drafts.log_probability[at, r])
                    parent = lane.node.number if lane.node else None
                    if token >= 0:
                        number = first + b * self.T + r
                        self.nodes[row].append(Node(number, score, token, parent, depth))
        return Children(drafts, self.parents, self.score, self.source)

    def expand(self, depth: int) -> None:
        twin, T = self.twin, self.T
        drafts, hidden = self.run()
        children = self.children(drafts, depth)
        residual = new_residual(3 * T, H, 1, dtype=torch.float32, device=torch.device(twin.device))
        residual.x.fill_(CANARY)
        tree = TreeLanes.new(3 * T, self.D, torch.device(twin.device))
        tree.ancestor.fill_(555)
        following = twin.expand(
            children, hidden, self.rows, self.found, tree, twin.fusion(),
            depth=depth, limit=self.limit, residual=residual, above=self.above,
        )  # fmt: skip
        expected = []
        for row in range(3):
            chosen = best([node for node in self.nodes[row] if node.depth == depth], T)
            expected.append([self.lane(row, depth, i, chosen[i : i + 1]) for i in range(T)])
        self.check(following, tree, expected, drafts, hidden, residual)
        self.lanes, self.above, self.source = expected, tree, None
        self.parents, self.score = following.lanes, following.score

    def lane(self, row: int, depth: int, place: int, node: list[Node]) -> Lane:
        entry = 1 + (depth - 1) * self.T + place
        if not node:
            return Lane(None, entry, [], live=False)
        parents = [each for each in self.lanes[row] if each.node is None or
                   each.node.number == node[0].parent]  # fmt: skip
        (parent,) = [each for each in parents if each.live]
        fits = self.root[row] + max(entry, depth) < self.limit
        return Lane(node[0], entry, [*parent.ancestors, parent.entry], live=fits)

    def check(
        self, following: Expanded, tree: TreeLanes, expected: list[list[Lane]],
        drafts: TopDrafts, hidden: torch.Tensor, residual: Any,
    ) -> None:  # fmt: skip
        depth = 1 + max((len(lane.ancestors) for row in expected for lane in row), default=0) - 1
        for row, lanes in enumerate(expected):
            for place, lane in enumerate(lanes):
                at = row * self.T + place
                assert int(following.lanes.slot[at]) == (SLOT[row] if lane.live else -1)
                if not lane.live or lane.node is None:
                    assert float(following.score[at]) == -torch.inf
                    assert bool((residual.x[at] == CANARY).all())
                    continue
                assert int(following.lanes.token[at]) == lane.node.token
                assert int(following.lanes.position[at]) == self.root[row] + lane.node.depth
                assert float(following.score[at]) == lane.node.score
                found = tree.ancestor[at].tolist()
                assert found == [*lane.ancestors, *[555] * (self.D - depth)]
                source = self.source_of(row, lane.node)
                stream = new_residual(1, H, 1, dtype=torch.float32, device="cpu")
                combined = combine_hidden_reference(
                    torch.tensor([lane.node.token], dtype=torch.int32),
                    torch.zeros(1, dtype=torch.int32),
                    hidden[source : source + 1].cpu(),
                    None,
                    Fusion(*(x.cpu() if isinstance(x, torch.Tensor) else x
                             for x in self.twin.fusion())),
                    residual=stream,
                )  # fmt: skip
                torch.testing.assert_close(
                    following.combined[at].cpu(), combined[0], rtol=1e-5, atol=1e-5
                )
                assert torch.equal(residual.x[at].cpu(), stream.x[0])

    def source_of(self, row: int, node: Node) -> int:
        if self.source is not None:
            return int(self.source[row])
        numbers = [lane.node.number if lane.node else None for lane in self.lanes[row]]
        return row * self.T + numbers.index(node.parent)

    def keep(self) -> None:
        drafts, _ = self.run()
        self.twin.keep(self.children(drafts, self.D), self.rows, self.found, self.drafted)
        draft, parent, (depth, ancestor) = self.drafted
        assert bool((ancestor[1] == 555).all()) and bool((draft[1] == 555).all())
        for row, slot in enumerate(SLOT):
            if slot < 0:
                continue
            kept = best(self.nodes[row], self.K)
            node_of = {node.number: 1 + index for index, node in enumerate(kept)}
            lost = self.K - len(kept)
            assert draft[slot].tolist() == [*(node.token for node in kept), *[-1] * lost]
            paths: dict[int | None, list[int]] = {None: [0]}
            for node in kept:
                # That its parent has a path here is that ancestors are kept.
                path = paths[node.parent]
                paths[node.number] = [*path, node_of[node.number]]
                at = node_of[node.number]
                assert int(parent[slot, at - 1]) == path[-1]
                assert int(depth[slot, at]) == len(path) == node.depth
                assert ancestor[slot, at].tolist() == [*path, *[0] * (self.D - len(path))]
            assert int(depth[slot, 0]) == 0
            assert parent[slot, len(kept) :].tolist() == [0] * lost


@given(data=st.data())
@SETTINGS
def test_a_tree_grows(twin: Twin, data: st.DataObject) -> None:
    top_k, depth = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 4))
    nodes = data.draw(st.integers(depth, 11))
    limit, seed = data.draw(st.sampled_from([9, 14, 99])), data.draw(st.integers(0, 99))
    growth = Growth(twin, top_k, depth, nodes, limit, seed)
    for level in range(1, depth):
        growth.expand(level)
    growth.keep()


def test_operands_that_do_not_fit_are_refused(device: str) -> None:
    twin = Twin(expand_tree, keep_best, device)
    on = torch.device(device)
    rows = DecodeLanes(*(twin.ints([0, 1]) for _ in range(3)))
    lanes = DecodeLanes(*(twin.ints([0] * 6) for _ in range(3)))
    drafts = TopDrafts(twin.ints([[1, 2, 3]] * 2), torch.zeros(2, 3, device=on))
    many = TopDrafts(twin.ints([[1, 2, 3]] * 6), torch.zeros(6, 3, device=on))
    good: dict[str, Any] = {
        "children": Children(drafts, rows), "hidden": torch.zeros(6, H, device=on), "rows": rows,
        "found": Candidates.new(2, 3, 3, on), "tree": TreeLanes.new(6, 3, on),
        "fusion": twin.fusion(), "depth": 1,
        "residual": new_residual(6, H, 1, dtype=torch.float32, device=on),
    }  # fmt: skip
    expand_tree(**good, limit=9)
    value = drafts.log_probability
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"depth": 3}, "depth 3 is not above the last of trees that are 3 deep"),
        ({"depth": 2}, "1 parents a row are not those of candidates at depth 2"),
        ({"children": Children(many, lanes)}, "3 parents a row are not those of .* depth 1"),
        ({"children": Children(many, rows)}, "drafts of 6 lanes are not those of 2 parents"),
        ({"found": Candidates.new(2, 2, 3, on)}, r"2 rows and 3 drafts a lane must .*\[2, 2, 3\]"),
        (
            {"children": Children(TopDrafts(drafts.token.long(), value), rows)},
            r"token must be dense torch.int32 \[M, T\], not torch.int64 \(2, 3\)",
        ),
        (
            {"children": Children(TopDrafts(drafts.token, value[:, :2].contiguous()), rows)},
            r"drafts of shape \(2, 3\) have values of shape \(2, 2\)",
        ),
        (
            {"children": Children(drafts, rows, torch.zeros(3, device=on))},
            r"score must be float32 \[2\], not torch.float32 \(3,\)",
        ),
        ({"children": Children(drafts, lanes._replace(slot=rows.slot))}, "must be"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            expand_tree(**(good | change), limit=9)
    tables = TreeTables(twin.ints([[0] * 5] * 2), twin.ints([[[0] * 3] * 5] * 2))
    trees = DraftedTrees(twin.ints([[0] * 4] * 2), twin.ints([[0] * 4] * 2), tables)
    keep: dict[str, Any] = {
        "children": Children(many, lanes), "rows": rows, "found": good["found"], "trees": trees,
    }  # fmt: skip
    keep_best(**keep)
    with pytest.raises(ValueError, match="1 parents a row are not the 3 lanes of the last run"):
        keep_best(**keep | {"children": Children(drafts, rows)})
    with pytest.raises(ValueError, match=r"parents must be \[2, 4\] as the drafts, not \[2, 3\]"):
        keep_best(**keep | {"trees": trees._replace(parent=twin.ints([[0] * 3] * 2))})
    deeper = tables._replace(ancestor=twin.ints([[[0] * 4] * 5] * 2))
    with pytest.raises(ValueError, match="trees that are 4 deep are not for a depth of 3"):
        keep_best(**keep | {"trees": trees._replace(tables=deeper)})
