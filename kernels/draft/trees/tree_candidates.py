"""Candidates of a tree that grows by its drafts' probabilities: scores, numbers and order.

A draft's score is the logarithm of the product of its own and its ancestors' probabilities.
Candidates of a row are numbered from 0: T of depth 1, then T * T of each depth; draft r after lane
b of a run is candidate b * T + r of its depth. Of equal scores the lower number is better.

Letters as in `dynamic_tree.py`, which grows the tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.draft.trees.top_drafts import TopDrafts
from graphengine.kernels.sample.candidates import LAST_ID, sortable_key
from graphengine.kernels.step.state import DecodeLanes

NOTHING = tl.constexpr(-(2**63))
"""Below every candidate."""


class Candidates(NamedTuple):
    """The candidates found for each row; a tree reads only candidates that were written while it
    grew.
    """

    score: torch.Tensor
    """float32 [R, C]: -inf for no candidate."""
    token: torch.Tensor
    """int32 [R, C]"""
    expanded: torch.Tensor
    """int32 [R, D - 1, T]: candidate number of each lane of the runs at depth 1, 2, ...; -1 for
    none."""

    @classmethod
    def new(cls, rows: int, top_k: int, depth: int, device: torch.device) -> Candidates:
        """Uninitialised candidates, for trees at least 2 deep."""
        count = first_candidate(depth, top_k)
        score = torch.empty(rows, count, dtype=torch.float32, device=device)
        token = torch.empty_like(score, dtype=torch.int32)
        return cls(score, token, token.new_empty(rows, depth - 1, top_k))


class Children(NamedTuple):
    """The drafts after the lanes of a run."""

    drafts: TopDrafts
    """T drafts of each of the M lanes; only these may come from the launch before."""
    parents: DecodeLanes
    """R * P lanes; their tokens are not read. Padded ones have no children."""
    score: torch.Tensor | None = None
    """float32 [R * P]: the parents' scores; None for the roots, whose score is 0."""
    source: torch.Tensor | None = None
    """int32 [R * P]: the lane of the run that each parent is; None: M is R * P."""

    @property
    def top_k(self) -> int:
        """T"""
        return self.drafts.token.shape[1]


def first_candidate(depth: int, top_k: int) -> int:
    """The number of the first candidate at a depth (1 and up), and so how many are above it."""
    return 0 if depth == 1 else top_k + (depth - 2) * top_k * top_k


def check_children(children: Children, rows: DecodeLanes) -> tuple[int, int]:
    """Return (R, P); ValueError unless the lanes and drafts fit each other."""
    (token, value), parents, score, source = children
    count, lanes = rows.slot.numel(), parents.slot.numel()
    check_lanes(count, **{f"rows.{name}": field for name, field in rows._asdict().items()})
    check_lanes(lanes, **{f"parents.{name}": field for name, field in parents._asdict().items()})
    if count < 1 or lanes < 1 or lanes % count:
        raise ValueError(f"{lanes} parents are no whole number of lanes for each of {count} rows")
    for name, part, dtype in (("token", token, torch.int32), ("value", value, torch.float32)):
        shape = tuple(part.shape)
        if part.dtype != dtype or len(shape) != 2 or not part.is_contiguous():
            raise ValueError(
                f"a draft's {name} must be dense {dtype} [M, T], not {part.dtype} {shape}"
            )
        if shape != tuple(token.shape):
            raise ValueError(f"drafts of shape {tuple(token.shape)} have values of shape {shape}")
    if source is not None:
        check_lanes(lanes, source=source)
    elif token.shape[0] != lanes:
        raise ValueError(f"drafts of {token.shape[0]} lanes are not those of {lanes} parents")
    if score is not None and (score.dtype != torch.float32 or tuple(score.shape) != (lanes,)):
        raise ValueError(f"score must be float32 [{lanes}], not {score.dtype} {tuple(score.shape)}")
    return count, lanes // count


def check_found(found: Candidates, rows: int, top_k: int) -> int:
    """Return D - 1; ValueError unless the tensors fit trees of one depth."""
    runs = found.expanded.shape[1] if found.expanded.dim() == 3 else 0
    shape = (rows, first_candidate(1 + runs, top_k))
    sizes = ((rows, runs, top_k), shape, shape)
    parts = (found.expanded, found.score, found.token)
    dtypes = (torch.int32, torch.float32, torch.int32)
    for part, size, dtype in zip(parts, sizes, dtypes, strict=True):
        fits = tuple(part.shape) == size and part.dtype == dtype and part.is_contiguous()
        if runs < 1 or not fits:
            raise ValueError(
                f"candidates of {rows} rows and {top_k} drafts a lane must be dense {dtype} "
                f"{list(size)}, not {part.dtype} {list(part.shape)}"
            )
    return runs


def children_reference(children: Children, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Score and token of each row's candidates, [R, P * T]; -inf for no candidate."""
    (token, value), parents, score, source = children
    lanes = torch.arange(parents.slot.numel()) if source is None else source.long()
    has_parent = parents.slot >= 0
    lanes = lanes.to(token.device).where(has_parent, 0)
    token, value = token[lanes], value[lanes].clamp(max=0.0)
    if score is not None:
        value = score[:, None] + value
    value = value.where(has_parent[:, None] & (token >= 0), -torch.inf)
    return value.view(rows, -1), token.view(rows, -1)


class _ChildArgs(NamedTuple):
    token: torch.Tensor
    value: torch.Tensor
    slot: torch.Tensor
    score: torch.Tensor | None
    source: torch.Tensor | None


def child_args(children: Children) -> _ChildArgs:
    (token, value), parents, score, source = children
    return _ChildArgs(token, value, parents.slot, score, source)


@triton.jit
def load_parents(children, row, child, wanted, P: tl.constexpr, T: tl.constexpr):
    """Load, before the wait, whether each child's parent is live, its score, and its lane of the
    run.
    """
    parent = row * P + child // T
    has_parent = tl.load(children.slot + parent, mask=wanted, other=-1, cache_modifier=".cg") >= 0
    score = tl.zeros_like(child).to(tl.float32)
    if children.score is not None:
        score = tl.load(children.score + parent, mask=has_parent, other=0.0, cache_modifier=".cg")
    source = parent
    if children.source is not None:
        source = tl.load(children.source + parent, mask=has_parent, other=0, cache_modifier=".cg")
    return has_parent, score, source


@triton.jit
def load_children(children, child, has_parent, score, source, T: tl.constexpr):
    """Load (score, token) of each child; (-inf, -1) for no child."""
    at = source * T + child % T
    token = tl.load(children.token + at, mask=has_parent, other=-1)
    value = tl.load(children.value + at, mask=has_parent, other=0.0)
    value = score + tl.minimum(value, 0.0)
    return tl.where(token >= 0, value, float("-inf")), token


@triton.jit
def ranked(score, number):
    """Pack score and number in an int64 that sorts by score; of equal scores the lower number is
    greater.
    """
    packed = (sortable_key(score).to(tl.int64) << 32) | (number ^ LAST_ID).to(tl.int64)
    return tl.where(score > float("-inf"), packed, NOTHING)


@triton.jit
def next_best(packed, last):
    """The greatest packed value below `last`; NOTHING if there is none."""
    return tl.max(tl.where(packed < last, packed, NOTHING), 0)


@triton.jit
def number_of(packed):
    """The number of a packed candidate, which must not be NOTHING."""
    return (packed & LAST_ID).to(tl.int32) ^ LAST_ID
