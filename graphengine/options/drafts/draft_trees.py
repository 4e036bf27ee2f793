"""Shapes of draft trees: which nodes a step verifies, and which token each node holds.

A static tree is written as Medusa and EAGLE write theirs: a list of paths from the root, which is
the last sampled token, each a list of ranks. `[0, 1]` is the second best token after the best one.
A dynamic tree has only a size: each step chooses its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from graphengine.kernels.draft.trees.top_drafts import MAX_CHILDREN
from graphengine.kernels.step.record import MAX_DRAFTS
from graphengine.options.checks import is_int, keep_plain_numbers, shown

Path = tuple[int, ...]


class Generation(NamedTuple):
    """The nodes of one depth, which are drafted together.

    parent  for each node, the index of its parent among the nodes of the depth before that have
            children
    rank    for each node, 0 for the best token after its parent, 1 for the second best, ...
    node    the number of each node
    inner   indices of the nodes that have children
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]
    node: tuple[int, ...]
    inner: tuple[int, ...]

    @property
    def drawn(self) -> int:
        """Drafts that are drawn for each parent."""
        return 1 + max(self.rank)


@dataclass(frozen=True)
class StaticTree:
    """A tree whose nodes are the same in every step.

    paths  to each node but the root, in the order of their numbers, 1 and up: by depth, then by
           ranks
    """

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: object) -> StaticTree:
        """The tree of a list of paths in any order. ValueError unless they are one."""
        if not isinstance(paths, Sequence) or isinstance(paths, str | bytes) or not paths:
            raise ValueError(f"tree={shown(paths)} must be a list of paths, such as [[0], [0, 0]]")
        if len(paths) > MAX_DRAFTS:
            raise ValueError(f"the tree has {len(paths)} nodes, at most {MAX_DRAFTS} are verified")
        found = [_path(path) for path in paths]
        known = set(found)
        for path in found:
            if found.count(path) > 1:
                raise ValueError(f"the tree has the path {list(path)} {found.count(path)} times")
            if path[:-1] and path[:-1] not in known:
                raise ValueError(
                    f"the tree has the path {list(path)}, and not its parent {list(path[:-1])}"
                )
        tree = cls(tuple(sorted(known, key=lambda path: (len(path), path))))
        if tree.depth == len(tree.paths):
            raise ValueError(
                f"tree={shown(paths)} is a chain of {tree.depth} drafts: k={tree.depth} is the "
                f"same without a tree"
            )
        return tree

    @property
    def nodes(self) -> int:
        """Number of nodes, without the root."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.paths[-1])

    @property
    def drawn(self) -> int:
        """Drafts that are drawn after a node, at most."""
        return max(generation.drawn for generation in self.generations)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The number of each node's parent; the root's is 0."""
        number = {path: index for index, path in enumerate(((), *self.paths))}
        return tuple(number[path[:-1]] for path in self.paths)

    def ancestors(self, node: int) -> list[int]:
        """Numbers of a node's ancestors, the root first."""
        path = self.paths[node - 1] if node else ()
        number = {path: index for index, path in enumerate(((), *self.paths))}
        return [number[path[:length]] for length in range(len(path))]

    @cached_property
    def generations(self) -> tuple[Generation, ...]:
        """The generations of depth 1, 2, ..."""
        found, parents = [], [0]
        numbered = enumerate(self.paths, start=1)
        for _, members in groupby(numbered, key=lambda numbered: len(numbered[1])):
            children = list(members)
            inner = tuple(index for index, (node, _) in enumerate(children) if node in self.parents)
            found.append(
                Generation(
                    parent=tuple(parents.index(self.parents[node - 1]) for node, _ in children),
                    rank=tuple(path[-1] for _, path in children),
                    node=tuple(node for node, _ in children),
                    inner=inner,
                )
            )
            parents = [children[index][0] for index in inner]
        return tuple(found)

    def describe(self) -> str:
        """Text for reports: "tree of 7 nodes, 3 deep"."""
        return f"tree of {self.nodes} nodes, {self.depth} deep"


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicTree:
    """A tree of the nodes that the drafter finds most probable, as in EAGLE-2.

    A step drafts the best `top_k` tokens after the last sampled one, then after the best `top_k` of
    these by the product of the probabilities along their paths, and so on `depth` times. The best
    `nodes` of them all are verified. Source: Li et al., arXiv:2406.16858.

    nodes  number of nodes, without the root
    top_k  tokens that are drafted after a node, and nodes of each depth that get children
    depth  of the deepest node, at most
    """

    nodes: int
    top_k: int
    depth: int

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("nodes", self.nodes, 2, MAX_DRAFTS),
            ("top_k", self.top_k, 2, MAX_CHILDREN),
            ("depth", self.depth, 2, MAX_DRAFTS),
        ):
            if not is_int(value) or not least <= value <= most:
                raise ValueError(
                    f"a tree's {name}={value!r} must be an integer in [{least}, {most}]"
                )
        for name, value in (("top_k", self.top_k), ("depth", self.depth)):
            if value > self.nodes:
                raise ValueError(f"a tree of nodes={self.nodes} cannot use {name}={value}")
        if self.nodes > self.candidates:
            raise ValueError(
                f"top_k={self.top_k} and depth={self.depth} make {self.candidates} candidates, "
                f"fewer than nodes={self.nodes}"
            )
        keep_plain_numbers(self)

    @property
    def candidates(self) -> int:
        """Number of candidates that the nodes are chosen from."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def drawn(self) -> int:
        """Drafts that are drawn after a node."""
        return self.top_k

    def describe(self) -> str:
        """Text for reports: "tree of the best 16 nodes, up to 5 deep, 4 after a node"."""
        size = f"tree of the best {self.nodes} nodes"
        return f"{size}, up to {self.depth} deep, {self.top_k} after a node"


Tree = StaticTree | DynamicTree
TreeOption = Sequence[Sequence[int]] | DynamicTree
"""A tree as an option gives it."""


def read_tree(tree: TreeOption | None) -> Tree | None:
    """The shape of an option; None for chains. ValueError unless it is a tree."""
    return tree if tree is None or isinstance(tree, DynamicTree) else StaticTree.of(tree)


def check_tree(tree: Tree, k: int, *, usual: int, style: str) -> None:
    """ValueError unless the tree goes with these options; `usual` is the default of k."""
    if k not in (usual, tree.nodes):
        raise ValueError(f"k={k!r} drafts a step, and the tree has {tree.nodes} nodes")
    if style != "eagle":
        raise ValueError(f"a tree goes with style='eagle', not with style={style!r}")


def _path(path: object) -> Path:
    if not isinstance(path, Sequence) or isinstance(path, str | bytes) or not path:
        raise ValueError(f"the tree's path {shown(path)} must be a list of ranks, such as [0, 1]")
    for rank in path:
        if not is_int(rank) or not 0 <= rank < MAX_CHILDREN:
            raise ValueError(
                f"the tree's path {shown(path)} has the rank {rank!r}: ranks are integers in "
                f"[0, {MAX_CHILDREN - 1}]"
            )
    if len(path) > MAX_DRAFTS:
        raise ValueError(
            f"the tree's path {shown(path)} has {len(path)} tokens, at most {MAX_DRAFTS} are "
            f"verified"
        )
    return tuple(map(int, path))
