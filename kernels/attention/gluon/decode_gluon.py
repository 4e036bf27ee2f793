"""Gluon kernel of decode attention, which `decode.py` launches for half precision on a GPU.

It differs from `decode_triton.py` in controlling its own copies: `cp.async` fills a ring of tiles
of keys and values in shared memory, across the borders of splits, heads and rows. Its first tiles
are being copied before the launch waits for its inputs, so memory is busy while the launch before
drains.

Scores and sums of a tile are products on `mma.sync`, whose 16 rows are independent: the query heads
of one kv head, of all lanes of a row.

It serves splits of 256 and 512 tokens: those of `dot` engines, and of `fma` engines for long
requests. For short requests of `fma` engines it is slower than the Triton kernel: the registers
that `fma` holds leave its programs no room to start early.

Letters as in `decode.py`, and: M rows of a product, T tokens of a tile, D' head_dim padded.
"""

from __future__ import annotations

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphengine.kernels.attention.gluon.decode_gluon_combine import SplitResults, keep_split
from graphengine.kernels.attention.gluon.decode_gluon_heads import (
    BLOCK,
    half_precision,
    insert_new_tokens,
    kv_scales_of,
    load_heads,
    new_queries,
)
from graphengine.kernels.attention.gluon.decode_gluon_ring import fill_ring, new_ring, refill_ring
from graphengine.kernels.attention.gluon.decode_gluon_tile import (
    attend_tile,
    join_streams,
    joined_rows_layout,
    no_tiles,
    product_layout,
)
from graphengine.kernels.attention.gluon.decode_gluon_units import (
    Shape,
    heads_of,
    is_inside,
    is_seen,
    schedule_of,
    unit_after,
    unit_at,
    units_of_program,
)
from graphengine.kernels.attention.reference import DecodeCall
from graphengine.kernels.core.devices import device_of, processors_of
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import FP8_KV, position_limit
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.triton_versions import sync_threads
from graphengine.kernels.linear.plans import dot_columns
from graphengine.kernels.norm_rope.rope import head_norms

_WARPS = 4
COPIED_BYTES = 16
"""Bytes that a thread copies at once; the address is a multiple of it."""

_DTYPES = (torch.float16, torch.bfloat16)
_LEAST_HEAD_DIM = 32
# Longer heads have shorter splits, which `decode_triton.py` reads.
_MOST_HEAD_DIM = 256
_LEAST_SPLIT = 256
# Bytes of keys and values in shared memory: two programs fit an SM of an H200.
_RING_BYTES = 64 * 1024
_PROGRAMS = 2
# Bytes of the keys of a tile.
_TILE_BYTES = 16 * 1024
_MOST_TOKENS = 128
# Rows of a product.
_LEAST_ROWS = 16
_MOST_ROWS = 32
_COMBINE_SPLITS = 8
# Splits that are first combined as a group, and the most groups.
_SUPER = 64
_MOST_SUPERS = 32
COUNTERS = _MOST_SUPERS + 1
"""Counters that a tile of rows needs."""
# Values that a program stores at a time for a lane that failed.
_CHUNK = gl.constexpr(1024)

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)


def takes(qkv_NX: torch.Tensor, kv: torch.Tensor, split_tokens: int) -> bool:
    """Whether `decode_attention_kernel` serves this cache.

    The two kernels need not agree in the last bit, so nothing here may depend on the number of
    lanes.
    """
    head_dim = kv.shape[4]
    piece = COPIED_BYTES // kv.dtype.itemsize
    return (
        split_tokens >= _LEAST_SPLIT
        and _runs_on(qkv_NX)
        and qkv_NX.dtype in _DTYPES
        and kv.dtype in (qkv_NX.dtype, FP8_KV)
        and _LEAST_HEAD_DIM <= head_dim <= _MOST_HEAD_DIM
        and head_dim % piece == 0
        and kv.stride(0) % piece == 0
        and kv.data_ptr() % COPIED_BYTES == 0
    )


def _runs_on(tensor: torch.Tensor) -> bool:
    """Whether the tensor's GPU can run the kernel; Gluon has no interpreter."""
    device = device_of(tensor)
    return not INTERPRETED and device is not None and device.holds_attention_ring


def attend(
    call: DecodeCall,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    *,
    split_tokens: int,
    tokens_per_row: int,
    pdl: bool,
) -> None:
    """Run `decode_attention` for a checked call that `takes` accepts."""
    qkv, kv, table = call.qkv_NX, call.kv, call.block_table_SB
    rows = call.lanes // tokens_per_row
    splits = -(-call.max_seq_len // split_tokens)
    live = splits
    if call.window:
        live = min(splits, (call.window + tokens_per_row - 3) // split_tokens + 2)
    at_once = _PROGRAMS * processors_of(qkv)
    of_kv_head = call.num_heads // call.num_kv_heads * tokens_per_row
    shape = _shape(
        call.num_heads,
        kv,
        tile_rows=_tile_rows(of_kv_head, rows * call.num_kv_heads * live, at_once),
        max_seq_len=call.max_seq_len,
        split=split_tokens,
        row_lanes=tokens_per_row,
        normed=head_norms(call.q_norm_weight, after=call.norm_after),
        window=call.window,
        softcap=call.softcap,
        table_rows=0 if call.rope_shift_S is None else call.cos.shape[0],
    )
    supers = -(-splits // shape.super)
    units = rows * call.num_kv_heads * shape.row_tiles * live
    launcher(decode_attention_kernel, (min(units, at_once),))(
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
        call.sinks,
        arrivals,
        _new_parts(qkv, call.lanes * call.num_heads * splits, call.head_dim),
        _new_parts(qkv, call.lanes * call.num_heads * supers, call.head_dim),
        out,
        call.scale * math.log2(math.e),
        call.eps,
        qkv.stride(0),
        kv.stride(0) * kv.dtype.itemsize // COPIED_BYTES,
        table.stride(0),
        rows,
        splits,
        supers,
        position_limit(call.cos, kv, table, call.max_seq_len),
        Shape(*(gl.constexpr(value) for value in shape)),
        ROWS_PADDED=triton.next_power_of_2(rows),
        num_warps=_WARPS,
        **launch_options(pdl),
    )


def _tile_rows(of_kv_head: int, units: int, at_once: int) -> int:
    """Choose M for this many rows (lanes x query heads) of a kv head; no bit depends on it.

    With 32 rows a tile is read once for twice as many heads, but a thread's registers do not hold
    their sums. On an H200 a layer of Llama 8B then takes 14 us with 6 lanes of one row; it takes
    9.2 with 8 lanes in tiles of 16, and 7.4 with one lane. So tiles have 16 rows unless that makes
    too many programs to run at once.

    units  most units of one tile of rows
    """
    tiles = -(-of_kv_head // _LEAST_ROWS)
    if tiles * units <= at_once:
        return _LEAST_ROWS
    return min(max(_LEAST_ROWS, 1 << (of_kv_head - 1).bit_length()), _MOST_ROWS)


def _shape(
    heads: int,
    kv: torch.Tensor,
    *,
    tile_rows: int,
    max_seq_len: int,
    split: int,
    row_lanes: int,
    normed: int,
    window: int,
    softcap: float,
    table_rows: int,
) -> Shape:
    block_size, kv_heads, head_dim = kv.shape[2:]
    padded = dot_columns(head_dim)
    of_kv_head = heads // kv_heads * row_lanes
    tile = min(_MOST_TOKENS, _TILE_BYTES // (padded * kv.dtype.itemsize))
    splits = -(-max_seq_len // split)
    together = max(_SUPER, triton.next_power_of_2(-(-splits // _MOST_SUPERS)))
    if window:
        # A window sees few splits: they form one group, however long the table is.
        together = triton.next_power_of_2(splits)
    return Shape(
        Q=heads,
        G=kv_heads,
        D=head_dim,
        padded=padded,
        row_lanes=row_lanes,
        rows=tile_rows,
        row_tiles=-(-of_kv_head // tile_rows),
        block_size=block_size,
        split=split,
        super=together,
        tile=tile,
        streams=2 if padded > 128 else 4,
        stages=_RING_BYTES // (2 * tile * padded * kv.dtype.itemsize),
        normed=normed,
        fp8=kv.dtype == FP8_KV,
        combine_rows=min(16, triton.next_power_of_2(of_kv_head)),
        combine_splits=_COMBINE_SPLITS,
        window=window,
        softcap=float(softcap),
        table_rows=table_rows,
    )


def _new_parts(like: torch.Tensor, parts: int, head_dim: int) -> SplitResults:
    """Uninitialised parts: programs read only parts that the same launch wrote."""
    acc = like.new_empty((parts, head_dim), dtype=torch.float32)
    largest = like.new_empty((2, parts), dtype=torch.float32)
    return SplitResults(acc, largest[0], largest[1])


@gluon.constexpr_function
def _copy_layout(columns):
    """Layout with 16 bytes per thread, threads along the columns first: whole rows at a time."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit(do_not_specialize=["rows", "splits", "supers", "position_limit"])
def decode_attention_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    block_table_ptr,
    slot_ptr,
    position_ptr,
    shift_ptr,
    q_norm_ptr,
    k_norm_ptr,
    kv_scales_ptr,
    sinks_ptr,
    arrivals_ptr,
    parts,
    super_parts,
    out_ptr,
    scale_log2,
    eps,
    qkv_stride,
    kv_pitch,
    table_stride,
    rows,
    splits,
    supers,
    position_limit,
    shape,
    ROWS_PADDED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs share the live splits of all rows and heads evenly; each has consecutive ones.

    `kv_pitch` is a stride in units of 16 bytes: the compiler must know the unit to copy 16 bytes.
    """
    TILES: gl.constexpr = shape.split // shape.tile
    copied: gl.constexpr = _copy_layout(shape.padded)
    product: gl.constexpr = product_layout(shape.streams)
    dtype: gl.constexpr = kv_ptr.dtype.element_ty
    ring = new_ring(dtype, shape)
    source = (kv_ptr, block_table_ptr, kv_pitch, table_stride, kv_scales_ptr)

    # Neither of the last two launches writes slots, positions, tables, older keys and values.
    lanes = (slot_ptr, position_ptr, shift_ptr)
    schedule, failed = schedule_of(lanes, rows, position_limit, ROWS_PADDED, shape)
    first, end = units_of_program(schedule)
    tiles = (end - first) * TILES
    unit = unit_at(schedule, first, shape)
    ahead, entries = fill_ring(schedule, source, ring, first, tiles, unit, shape)

    _wait_for_inputs(PDL, True)
    if failed:
        _fail_lanes(lanes, out_ptr, rows * shape.row_lanes, position_limit, shape)
    if first >= end:
        return

    qkv = (qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, qkv_stride, eps, shift_ptr)
    results = (parts, super_parts, arrivals_ptr, out_ptr, sinks_ptr, splits, supers)
    queries = new_queries(qkv_ptr.dtype.element_ty, shape)
    keys = gl.zeros([BLOCK, shape.padded], dtype, copied)
    values = keys
    q_of = -1
    row = gl.arange(0, shape.rows, joined_rows_layout(shape.padded, shape.streams))
    factor = gl.full_like(row, 1, dtype=gl.float32) * scale_log2
    value_scale = 1.0
    waiting = 0
    tile = 0
    for u in range(first, end):
        start = unit.split * shape.split
        q_wanted = unit.row_first + unit.head
        if (q_of != q_wanted) | (start + shape.split > unit.cached):
            new_q, keys, values = load_heads(qkv, source, unit, start, shape, copied)
            if shape.fp8:
                key_scale, value_scale = kv_scales_of(source, unit, shape)
                new_q, power = half_precision(new_q)
                power = gl.convert_layout(power, factor.type.layout)
                factor = power * (scale_log2 * key_scale)
            queries.store(new_q)
            q_of = q_wanted
        head, position, live = heads_of(unit, row, shape)
        largest, total, acc = no_tiles(product, shape)
        for t in range(TILES):
            async_copy.wait_group(shape.stages - 1)
            sync_threads()
            stage = tile % shape.stages
            token = start + t * shape.tile
            there = token < unit.length
            if shape.window > 0:
                there &= is_seen(unit, token + shape.tile - 1, shape)
            if there:
                if token + shape.tile > unit.cached:
                    insert_new_tokens(qkv, source, ring, stage, unit, token, (keys, values), shape)
                state = (largest, total, acc)
                largest, total, acc = attend_tile(
                    queries, ring, stage, token, position, state, factor, shape
                )
            tile += 1
            step = tile + shape.stages - 1
            ahead, entries = refill_ring(
                schedule, source, ring, stage, ahead, entries, step, first, tiles, shape
            )
        result = join_streams((largest, total, acc), value_scale, shape)
        heads = (row, head, live)
        waiting = keep_split(results, result, unit, heads, waiting, u, end, shape)
        unit = unit_after(schedule, unit, u + 1, shape)


@gluon.jit
def _fail_lanes(of_lanes, out_ptr, lanes, position_limit, shape):
    """Store NaN for live lanes at positions outside the cache."""
    WIDTH: gl.constexpr = shape.Q * shape.D
    at = gl.arange(0, _CHUNK, gl.BlockedLayout([4], [32], [4], [0]))
    nothing = gl.full([_CHUNK], float("nan"), out_ptr.dtype.element_ty, at.type.layout)
    slot_ptr, position_ptr, shift_ptr = of_lanes
    for lane in range(gl.program_id(0), lanes, gl.num_programs(0)):
        slot = gl.load(slot_ptr + lane, cache_modifier=".cg")
        position = gl.load(position_ptr + lane, cache_modifier=".cg")
        inside = is_inside(slot, position, shift_ptr, position_limit, shape)
        if (slot >= 0) & ~inside:
            for start in range(0, WIDTH, _CHUNK):
                ptrs = out_ptr + lane * WIDTH + start + at
                gl.store(ptrs, nothing, mask=start + at < WIDTH)
