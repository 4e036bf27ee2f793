"""Trees of drafts in plain PyTorch: what a module would draft, one node after the other.

It is independent of the engine's: each node's path is run again from the root, as a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphengine import DynamicTree, Engine, Request, SamplingParams
from graphengine.kernels.core.philox import gumbel, philox_uint32
from graphengine.options.drafts.draft_trees import StaticTree, Tree

Run = Callable[[int, Any, int], tuple[Tensor, Any]]
"""A module's run: from a token, the hidden state before it and its position to logits [V], -inf for
what is not drafted, and the next hidden state.
"""


class Root(NamedTuple):
    """A module after the last token of a sequence."""

    run: Run
    logits: Tensor
    hidden: Any
    position: int
    """The state of the first node's run."""

    def after(self, path: list[int]) -> Tensor:
        """Logits after these drafts."""
        logits, hidden = self.logits, self.hidden
        for index, token in enumerate(path):
            logits, hidden = self.run(token, hidden, self.position + index)
        return logits


class Node(NamedTuple):
    token: int
    parent: int
    depth: int


def log_probabilities(logits: Tensor, params: SamplingParams, position: int) -> Tensor:
    """Log-probabilities of a draft that is drawn for this position, of what the request's noise
    leaves.
    """
    if params.temperature:
        assert params.seed is not None
        noise = gumbel(philox_uint32(params.seed, position, torch.arange(len(logits)).numpy()))
        logits = logits / params.temperature + torch.from_numpy(noise)
    return logits.log_softmax(0)


def plain_tree(tree: Tree, root: Root, params: SamplingParams) -> list[Node]:
    """The nodes 1, 2, ..."""

    def ranked(path: list[int]) -> Tensor:
        return log_probabilities(root.after(path), params, root.position + len(path) + 1)

    if isinstance(tree, StaticTree):
        return _static(tree, ranked)
    return _dynamic(tree, ranked)


def _static(tree: StaticTree, ranked: Callable[[list[int]], Tensor]) -> list[Node]:
    nodes: list[Node] = []
    for index, path in enumerate(tree.paths):
        above = [nodes[node - 1].token for node in tree.ancestors(index + 1)[1:]]
        token = int(ranked(above).argsort(descending=True, stable=True)[path[-1]])
        nodes.append(Node(token, tree.parents[index], len(path)))
    return nodes


class _Candidate(NamedTuple):
    score: float
    number: int
    path: list[int]
    parent: int | None


def _best(candidates: list[_Candidate], count: int) -> list[_Candidate]:
    return sorted(candidates, key=lambda each: (-each.score, each.number))[:count]


def _dynamic(tree: DynamicTree, ranked: Callable[[list[int]], Tensor]) -> list[Node]:
    found: list[_Candidate] = []
    expanded: list[_Candidate] = [_Candidate(0.0, -1, [], None)]
    for _ in range(tree.depth):
        level: list[_Candidate] = []
        for above in expanded:
            values, tokens = ranked(above.path).topk(tree.top_k)
            for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
                number = len(found) + len(level)
                path = [*above.path, token]
                level.append(_Candidate(above.score + value, number, path, above.number))
        found += level
        expanded = _best(level, tree.top_k)
    node_of = {-1: 0}
    nodes = []
    for node, each in enumerate(_best(found, tree.nodes), start=1):
        assert each.parent is not None
        node_of[each.number] = node
        nodes.append(Node(each.path[-1], node_of[each.parent], len(each.path)))
    return nodes


def drafted_tree(engine: Engine, request: Request) -> list[Node]:
    """What an engine drafted for a request: the tree that its next step verifies."""
    slot, drafter = request.job.placed.slot, engine.core.drafter
    assert drafter.trees is not None
    drafts = engine.runtime.buffers["draft_tokens"][slot].tolist()
    parents = drafter.parents
    of_slot = parents[slot].tolist() if isinstance(parents, torch.Tensor) else parents
    depths, ancestors = (part[slot].tolist() for part in drafter.trees)
    nodes = []
    for node, (token, parent) in enumerate(zip(drafts, of_slot, strict=True), start=1):
        # As verification reads them.
        path = ancestors[node][: depths[node]]
        above = ancestors[parent][: depths[parent]]
        assert path == [*above, parent], f"ancestors of node {node}: {path}, of its parent {above}"
        nodes.append(Node(token, parent, depths[node]))
    return nodes
