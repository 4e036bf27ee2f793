"""A lane as a program of `decode_triton.py` sees it: its token's place, and the tokens it attends.

Letters as in `decode_triton.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from graphengine.kernels.core.paged import cache_offsets


class Shape(NamedTuple):
    """Compile-time constants of the kernel."""

    Q: Any
    G: Any
    D: Any
    padded: Any
    """D'"""
    block_size: Any
    group: Any
    """Query heads of a kv head."""
    group_rows: Any
    """M"""
    head_tiles: Any
    """Programs that share a kv head's query heads."""
    normed: Any
    """Whether queries and keys are normed before the rotation; `NORMED_AFTER`: after it."""
    fp8: Any
    """Whether the cache is of e4m3."""
    window: Any
    """0: a lane sees all tokens up to its own."""
    softcap: Any
    table_rows: Any
    """Rows of RoPE's tables, where slots have shifts; 0: positions are rows."""
    split: Any
    """Tokens of a split."""
    row_lanes: Any
    """W"""
    depth: Any
    """The greatest depth of the rows' trees; 0: they are chains."""
    siblings: Any
    """Most siblings of a lane."""
    loop_stages: Any
    combine_rows: Any
    combine_splits: Any
    """Splits whose results are loaded together."""


class Lane(NamedTuple):
    """A lane's token, and the tokens that it sees."""

    index: Any
    """int64: its number in the launch."""
    slot: Any
    live: Any
    """Whether the lane is not padded."""
    inside: Any
    """Whether the lane is live, and the cache has its position and entry."""
    position: Any
    """The lane's position; 0 unless it is inside."""
    shift: Any
    """Added to a position to find its row of RoPE's tables."""
    entry: Any
    """Where the lane's own key and value belong, as the position of that entry in a chain."""
    used: Any
    """Number of splits with older tokens that the lane sees."""
    skipped: Any
    """Number of splits before them, which the lane does not see."""
    first_seen: Any
    """The first token that the lane sees."""
    siblings: Any
    """Number of tokens from `cached` on, which this launch appends."""
    cached: Any
    """Tokens below this were appended by earlier launches."""
    root: Any
    """If the launch has one lane per row: older tokens from here on are the lane's ancestors."""
    ancestors: Any
    """int32 pointer to the ancestors' numbers in their row; 0 if there is no tree."""


class HeadCache(NamedTuple):
    """The keys and values of one kv head of one slot."""

    keys: Any
    """Pointer to the head's key in entry 0 of block 0."""
    table: Any
    """int32 pointer to the slot's row of the block table."""
    block_stride: Any


class Dimensions(NamedTuple):
    """The D' dimensions of a head, including padding."""

    number: Any
    """int32 [D']"""
    mask: Any
    """bool [D']: False for padding."""


@triton.jit
def dimensions_of(shape):
    """The dimensions of every head."""
    number = tl.arange(0, shape.padded)
    return Dimensions(number, number < shape.D)


@triton.jit
def load_lane(index, slot_ptr, position_ptr, shift_ptr, tree, limit, shape):
    """Load lane number `index` of the launch; positions and entries must stay below `limit`."""
    # Loaded together: one after the other would cost another trip to L2.
    slot = tl.load(slot_ptr + index, cache_modifier=".cg")
    position = tl.load(position_ptr + index, cache_modifier=".cg")
    live = slot >= 0
    inside = live & (position >= 0) & (position < limit)
    shift = 0
    if shape.table_rows > 0:
        shift = tl.load(shift_ptr + slot, mask=live, other=0)
        inside = inside & (position + shift >= 0) & (position + shift < shape.table_rows)
    entry = position
    depth = 0
    ancestors = 0
    if shape.depth > 0:
        depth = tl.load(tree.depth + index, mask=live, other=0, cache_modifier=".cg")
        node = tl.load(tree.node + index, mask=live, other=0, cache_modifier=".cg")
        ancestors = tree.ancestor + index * shape.depth
        entry = position - depth + node
        inside = inside & (entry < limit)
        depth = tl.where(inside, depth, 0)
    entry = tl.where(inside, entry, 0)
    position = tl.where(inside, position, 0)
    used, skipped, first_seen = _splits_seen(position, shape)
    siblings, cached, root = _tokens_elsewhere(index, position, depth, shape)
    return Lane(
        index=index,
        slot=slot,
        live=live,
        inside=inside,
        position=position,
        shift=shift,
        entry=entry,
        used=used,
        skipped=skipped,
        first_seen=first_seen,
        siblings=siblings,
        cached=cached,
        root=root,
        ancestors=ancestors,
    )


@triton.jit
def _splits_seen(position, shape):
    """`used`, `skipped` and `first_seen` of a `Lane`."""
    used = (position + shape.split - 1) // shape.split
    first_seen = 0
    skipped = 0
    if shape.window:
        first_seen = tl.maximum(position - (shape.window - 1), 0)
        skipped = tl.minimum(first_seen // shape.split, used)
        # A window of one token has no older keys.
        used = tl.where(first_seen < position, used - skipped, 0)
    return used, skipped, first_seen


@triton.jit
def _tokens_elsewhere(index, position, depth, shape):
    """`siblings`, `cached` and `root` of a `Lane`."""
    siblings = 0
    cached = position
    root = position
    if shape.depth > 0 and shape.row_lanes == 1:
        root = position - depth
    if shape.row_lanes > 1:
        siblings = (index % shape.row_lanes).to(tl.int32)
        if shape.depth > 0:
            siblings = depth
        cached = position - siblings
    return siblings, cached, root


@triton.jit
def early_split(lane, first_split, programs, shape):
    """The split that the program of `first_split` loads before its wait, counted from the first
    split that the lane sees."""
    if shape.row_lanes == 1:
        return first_split
    else:
        # Siblings lie in the last two splits at most, each of which is the last of its program.
        return first_split + tl.maximum(lane.used - 1 - first_split, 0) // programs * programs


@triton.jit
def lane_of_row(lane, shape):
    """The lane's number in its row."""
    # In a chain all lanes before a lane are its siblings.
    return lane.siblings if shape.depth == 0 else (lane.index % shape.row_lanes).to(tl.int32)


@triton.jit
def tokens_of(lane, split, shape):
    """The tokens of a split; splits are counted from the first that the lane sees."""
    return (lane.skipped + split) * shape.split + tl.arange(0, shape.split)


@triton.jit
def is_seen(lane, token, shape):
    """Whether the tokens are older ones that the lane sees."""
    if shape.window:
        return (token < lane.position) & (token >= lane.first_seen)
    else:
        return token < lane.position


@triton.jit
def load_older(cache, lane, token, dim, dtype: tl.constexpr, shape):
    """Load keys and values [tokens, D'] of seen tokens below `cached`; those of others are 0."""
    older = token < lane.cached
    if shape.window:
        older &= token >= lane.first_seen
    if shape.depth > 0 and shape.row_lanes == 1:
        in_tree = older & (token >= lane.root)
        node = tl.load(lane.ancestors + (token - lane.root), mask=in_tree, other=0)
        token = tl.where(in_tree, lane.root + node, token)
    TOKEN_STRIDE: tl.constexpr = shape.G * shape.D
    entry = cache_offsets(
        cache.table, token, older, cache.block_stride, shape.block_size, TOKEN_STRIDE
    )
    key_ptrs = cache.keys + entry[:, None] + dim.number[None, :]
    mask = older[:, None] & dim.mask[None, :]
    # Values first: keys go into the product at once, which would delay these loads.
    value_ptrs = key_ptrs + shape.block_size * TOKEN_STRIDE
    values = tl.load(value_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    keys = tl.load(key_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    return keys.to(dtype), values.to(dtype)
