"""Decode attention over the paged cache: one token per lane, from its QKV product to its heads'
sums.

A row of speculative decoding is W lanes of one slot at consecutive positions. Each lane attends
those before it, and results are bit-equal to decoding the row's tokens one by one. The same holds
where the lanes are the nodes of a tree, each of which attends its ancestors (`core/tree.py`).

One kernel rotates the token's query and key, appends key and value to the cache, and attends.
FlashDecoding (Dao, Haziza, Massa, Sizov 2023): a lane's keys are cut into splits,
programs attend splits for the query heads of one kv head (GQA) and leave partial results, and the
last program to arrive combines them. Splits have a fixed length counted from position 0, and the
tile size is fixed by dtype and head_dim. So a lane's order of summation depends only on its own
position.

Tokens that a launch appends are not read back from the cache: they are taken from the QKV product,
rounded as the cache holds them. So keys and values of older tokens can be loaded before that
product is known, which hides their latency (`pdl.py`).

Splits of 256 tokens and more, in half precision on a GPU, use the kernel of `decode_gluon.py`: its
programs share the live splits of all lanes evenly, and the lanes of a row share what is read. All
others, and Triton's interpreter, use that of `decode_triton.py`, with a grid for each lane.

Letters: N lanes of a launch, W lanes of a row, S slots, B blocks of a slot's table, Q query heads,
G kv heads, D head_dim, C splits, P positions of the tables, X = (Q + 2G) * D. `paged.py` has the
cache's layout.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.attention.gluon import decode_gluon
from graphengine.kernels.attention.reference import DecodeCall, decode_attention_reference
from graphengine.kernels.attention.scores import check_scores
from graphengine.kernels.attention.triton.decode_triton import Partials, decode_attention_kernel
from graphengine.kernels.attention.triton.decode_triton_lanes import Shape
from graphengine.kernels.core.devices import H200, device_of
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.core.launching import Launch, launcher, take_counters
from graphengine.kernels.core.paged import (
    FP8_KV,
    check_cache,
    checked_output,
    position_limit,
)
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.core.tree import TreeLanes, check_tree_lanes
from graphengine.kernels.linear.plans import dot_columns
from graphengine.kernels.norm_rope.rope import (
    check_norm_weights,
    check_rope,
    check_rope_rows,
    head_norms,
)

SPLIT_TOKENS = 64
SPLITS = (64, 128, 256, 512)
"""Allowed values of `split_tokens`."""
TREE_SPLIT = 128
"""Most tokens of a split for lanes of a tree: only the Triton kernel supports trees."""
MAX_HEAD_DIM = 512

# `tl.dot` needs 16 rows: the query heads of one kv head, padded. 16 rows compile to mma.sync.
_GROUP_ROWS = 16
# Keys that the programs of a launch attend at once: a tile for each SM of an H200, or two short
# ones. The programs of a lane with more splits loop; no bit depends on it.
_MAX_KEYS = 132 * 128
# With short heads an SM has room for more programs than that.
_LEAST_PROGRAMS = 4
# Most float32 elements of partials, and most splits, that the combining program loads at a time.
_COMBINE_ELEMENTS = 8192
_COMBINE_SPLITS = 8
_LOOP_STAGES = 3
# More lanes than these hide each other's latency without the stages.
_LOOP_LANES = 16
# Keeps the siblings of a lane within two splits.
_MAX_ROW_TOKENS = 64
_ROW_REGISTERS = 128


def decode_attention(
    qkv_NX: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    launch: Launch,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    max_seq_len: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_after: bool = False,
    kv_scales: torch.Tensor | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    split_tokens: int = SPLIT_TOKENS,
    tokens_per_row: int = 1,
    tree: TreeLanes | None = None,
    rope_shift_S: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append one token per lane to the cache and attend keys 0..position of the lane's slot.

    Args:
        qkv_NX: [N, (Q + 2G) * D], a lane is [queries | keys | values]; rows dense, any row stride.
        cos, sin: float32 [P, D/2] from `rope_tables`.
        kv: one layer's cache, in qkv's dtype or in FP8_KV. Written in place: one key and value per
            live lane.
        block_table_SB: int32. slot_N: int32, -1 = padded lane; live rows name different slots.
        position_N: int32, where the lane's token belongs.
        launch: must have counters, dense, at least `decode_attention_arrivals`. With PDL, slots,
            positions and the cache's older entries must have been written at least two launches
            earlier.
        scale: factor on the scores, usually 1/sqrt(D).
        max_seq_len: positions stay below it. It sets the grid and the workspace
            (`decode_attention_workspace_bytes`), never the result, unless it is above 2,048 splits.
        q_norm_weight, k_norm_weight: [D] each in qkv's dtype, or neither: RMSNorm of each head
            before the rotation, rounded where Qwen3's reference rounds. Float32 weights are those
            of Gemma 3, whose reference rounds once.
        norm_after: norm heads after the rotation, which is rounded (`rope.py`).
        kv_scales: float32 [2, G], all positive, of a cache of FP8_KV.
        window, sinks, softcap: as described in `scores.py`. The cache is not read before a lane's
            window, or before the window of its row's first lane.
        split_tokens: keys of a split, one of SPLITS: part of the numerics. Short ones suit few
            lanes. A kernel that has only shorter splits uses its longest.
        tokens_per_row: W, never part of the numerics. Lane r*W + j is padded, or has row r's slot
            and the position of lane r*W plus j. A row's live lanes are contiguous; padded ones
            before them would have positions below 0.
        tree: the lanes' places in trees (`core/tree.py`); splits must then have at most TREE_SPLIT
            tokens. With rows of several tokens lane r*W + j is node j of row r's tree, and the
            ancestors of a live lane are live; with W = 1 the ancestors are in the cache already,
            and lanes may share a slot. Must be written as early as the positions.
        rope_shift_S: int32 [S], added to the positions of a slot's lanes to find their rows of the
            tables (`rope.py`, `RopeRows`); None: positions are rows. As early as the slots.
        out: [N, Q * D] in qkv's dtype; may not share memory with qkv or kv.

    Returns:
        [N, Q * D] in qkv's dtype. Rotation in float32, rounded once; softmax and sums in float32.
        Padded lanes are ignored and not written. A live lane is NaN and appends nothing if its
        position or entry is negative, max_seq_len or more, past the tables or past its block table;
        so is one whose row of the tables is none of theirs.
    """
    call = DecodeCall(
        qkv_NX=qkv_NX,
        cos=cos,
        sin=sin,
        kv=kv,
        block_table_SB=block_table_SB,
        slot_N=slot_N,
        position_N=position_N,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=scale,
        max_seq_len=max_seq_len,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
        eps=eps,
        norm_after=norm_after,
        kv_scales=kv_scales,
        window=window,
        sinks=sinks,
        softcap=softcap,
        tree=tree,
        rope_shift_S=rope_shift_S,
    )
    _check_call(call)
    _check_rows(call, split_tokens, tokens_per_row)
    out = checked_output(out, (call.lanes, num_heads * call.head_dim), like=qkv_NX)
    if not use_triton(qkv_NX):
        return decode_attention_reference(**call._asdict(), out=out)
    attend = decode_gluon.attend if decode_gluon.takes(qkv_NX, kv, split_tokens) else _attend
    needed = decode_attention_arrivals(call.lanes, num_heads=num_heads, num_kv_heads=num_kv_heads)
    attend(
        call,
        take_counters(launch.arrivals, needed, f"decode attention of {call.lanes} lanes"),
        out,
        split_tokens=split_tokens,
        tokens_per_row=tokens_per_row,
        pdl=launch.pdl,
    )
    return out


def decode_attention_arrivals(lanes: int, *, num_heads: int, num_kv_heads: int) -> int:
    """Number of int32 counters that `decode_attention` of `lanes` needs."""
    return lanes * num_kv_heads * _head_tiles(num_heads, num_kv_heads) * decode_gluon.COUNTERS


def decode_attention_workspace_bytes(
    lanes: int, *, num_heads: int, head_dim: int, max_seq_len: int, split_tokens: int = SPLIT_TOKENS
) -> int:
    """Bytes of float32 workspace that one `decode_attention` call allocates (for the budget)."""
    partials = -(-max_seq_len // split_tokens) + 1
    return lanes * num_heads * partials * (head_dim + 2) * 4


class _Cut(NamedTuple):
    """How the lanes' keys are divided among programs."""

    split_tokens: int
    """Tokens of a split, which is one tile."""
    splits: int
    """Most splits of a lane."""
    grid: tuple[int, int, int]
    """Lanes, tiles of query heads, and programs that share a lane's splits."""


def _cut(call: DecodeCall, split_tokens: int, tokens_per_row: int) -> _Cut:
    split_tokens = min(split_tokens, longest_split(call.qkv_NX, call.head_dim))
    splits = _most_splits(call.max_seq_len, call.window, split_tokens)
    tiles = call.num_kv_heads * _head_tiles(call.num_heads, call.num_kv_heads)
    least = _LEAST_PROGRAMS if call.head_dim <= 64 else 1
    programs = max(least, _MAX_KEYS // (split_tokens * call.lanes * tiles))
    # The kernel needs a lane's last two splits in two programs if they may hold siblings.
    programs = min(splits, max(programs, 2 if tokens_per_row > 1 else 1))
    return _Cut(split_tokens, splits, (call.lanes, tiles, programs))


def longest_split(like: torch.Tensor, head_dim: int) -> int:
    """Longest split (one tile of `decode_triton.py`) in keys, for the tensor's GPU or else an H200.

    A program's shared memory must hold the keys, their values and the queries, in the tensor's
    dtype. ValueError if even the shortest split is too long for it.
    """
    shared_bytes = (device_of(like) or H200).shared_bytes
    row_bytes = dot_columns(head_dim) * like.dtype.itemsize
    for split in (128, SPLIT_TOKENS):
        tile_bytes = (2 * split + _GROUP_ROWS) * row_bytes
        if tile_bytes <= shared_bytes:
            return split
    raise ValueError(
        f"decode attention: {SPLIT_TOKENS} keys of {head_dim} dimensions in {like.dtype} and their "
        f"values take {tile_bytes} bytes of shared memory, and a program of this GPU has "
        f"{shared_bytes}"
    )


def _attend(
    call: DecodeCall,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    *,
    split_tokens: int,
    tokens_per_row: int,
    pdl: bool,
) -> None:
    """Run `decode_attention` for a checked call with the kernel of `decode_triton.py`."""
    qkv, kv, table = call.qkv_NX, call.kv, call.block_table_SB
    cut = _cut(call, split_tokens, tokens_per_row)
    shape = _shape(call, cut.split_tokens, tokens_per_row)
    launcher(decode_attention_kernel, cut.grid)(
        qkv,
        call.cos,
        call.sin,
        kv,
        table,
        call.slot_N,
        call.position_N,
        call.rope_shift_S,
        call.q_norm_weight,
        call.k_norm_weight,
        call.kv_scales,
        None if call.kv_scales is None else kv.view(torch.uint8),
        call.sinks,
        arrivals,
        _new_partials(qkv, (call.lanes, call.num_heads, cut.splits + 1), call.head_dim),
        out,
        call.tree,
        call.scale * math.log2(math.e),
        call.eps,
        qkv.stride(0),
        kv.stride(0),
        table.stride(0),
        cut.splits,
        position_limit(call.cos, kv, table, call.max_seq_len),
        Shape(*(tl.constexpr(value) for value in shape)),
        **_compiler_options(qkv.dtype, shape),
        **launch_options(pdl),
    )


def _most_splits(max_seq_len: int, window: int, split_tokens: int) -> int:
    """Most splits that hold a lane's older keys: a window may begin at a split's last token."""
    splits = -(-max_seq_len // split_tokens)
    return min(splits, max(window - 2, 0) // split_tokens + 2) if window else splits


def _head_tiles(num_heads: int, num_kv_heads: int) -> int:
    return -(-(num_heads // num_kv_heads) // _GROUP_ROWS)


def _new_partials(like: torch.Tensor, partials: tuple[int, ...], head_dim: int) -> Partials:
    """Uninitialised partials: the combining program reads only those of its own lane's programs."""
    acc = like.new_empty((*partials, head_dim), dtype=torch.float32)
    largest = like.new_empty(partials, dtype=torch.float32)
    return Partials(acc, largest, torch.empty_like(largest))


def _shape(call: DecodeCall, split: int, row_lanes: int) -> Shape:
    """Compile-time shape; its parts that fix the order of summation depend only on dtype, head
    shape and split length.

    A split is one tile. A program's threads hold its first one in registers before the wait;
    float32 runs on plain FMA units.
    """
    block_size, kv_heads, head_dim = call.kv.shape[2:]
    group = call.num_heads // kv_heads
    padded = dot_columns(head_dim)
    combine_rows = min(_GROUP_ROWS, triton.next_power_of_2(group))
    combine_splits = max(1, _COMBINE_ELEMENTS // (combine_rows * padded))
    return Shape(
        Q=call.num_heads,
        G=kv_heads,
        D=head_dim,
        padded=padded,
        block_size=block_size,
        group=group,
        group_rows=_GROUP_ROWS,
        head_tiles=_head_tiles(call.num_heads, kv_heads),
        normed=head_norms(call.q_norm_weight, after=call.norm_after),
        fp8=call.kv.dtype == FP8_KV,
        window=call.window,
        softcap=float(call.softcap),
        table_rows=0 if call.rope_shift_S is None else call.cos.shape[0],
        split=split,
        row_lanes=row_lanes,
        depth=call.depth,
        siblings=call.depth or row_lanes - 1,
        loop_stages=_loop_stages(call.lanes, head_dim, split),
        combine_rows=combine_rows,
        combine_splits=min(combine_splits, _COMBINE_SPLITS),
    )


def _loop_stages(lanes: int, head_dim: int, split: int) -> int:
    """Splits that a program loads at once; no bit depends on it."""
    return _LOOP_STAGES if lanes <= _LOOP_LANES and head_dim <= 64 and split > 64 else 1


def _compiler_options(dtype: torch.dtype, shape: Shape) -> dict[str, int]:
    """Warps, which fix the order of summation with the shape, and registers, which change no bit.

    Without a limit the code for siblings would take so many registers that an SM holds one program
    fewer; it fits into less.
    """
    options = {"num_warps": min(16, max(4, shape.padded * dtype.itemsize // 32))}
    if shape.row_lanes == 1 or dtype.itemsize > 2:
        return options
    return options | {"maxnreg": _ROW_REGISTERS}


def _check_call(call: DecodeCall) -> None:
    """Raise ValueError unless tables, cache, norms and score options fit the QKV product."""
    qkv, kv, heads, kv_heads = call.qkv_NX, call.kv, call.num_heads, call.num_kv_heads
    head_dim = check_rope(qkv, call.cos, call.sin, kv, heads, kv_heads, call.kv_scales)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim} is outside 1..{MAX_HEAD_DIM}")
    check_cache(kv, call.block_table_SB, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    if call.max_seq_len < 1:
        raise ValueError(f"max_seq_len={call.max_seq_len} must be at least 1")
    check_norm_weights(call.q_norm_weight, call.k_norm_weight, qkv, head_dim)
    check_rope_rows(None, call.rope_shift_S, lanes=call.lanes, head_dim=head_dim)
    check_scores(
        window=call.window,
        sinks=call.sinks,
        softcap=call.softcap,
        heads=heads,
        device=qkv.device,
    )


def _check_rows(call: DecodeCall, split_tokens: int, tokens_per_row: int) -> None:
    """Raise ValueError unless the kernels support these splits, rows and trees."""
    if split_tokens not in SPLITS:
        raise ValueError(f"split_tokens={split_tokens} is not one of {SPLITS}")
    lanes = call.lanes
    check_lanes(lanes, slot_N=call.slot_N, position_N=call.position_N)
    if not 1 <= tokens_per_row <= _MAX_ROW_TOKENS or lanes % tokens_per_row:
        raise ValueError(
            f"tokens_per_row={tokens_per_row} must divide {lanes} lanes, 1..{_MAX_ROW_TOKENS}"
        )
    if call.tree is None:
        return
    if split_tokens > TREE_SPLIT:
        raise ValueError(
            f"split_tokens={split_tokens}: lanes of a tree want splits of at most {TREE_SPLIT}"
        )
    check_tree_lanes(call.tree, lanes, None if tokens_per_row == 1 else tokens_per_row)
