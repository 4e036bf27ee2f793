"""Decode attention of half precision on a GPU, in Gluon: what `decode.py` launches there.

It is `decode_triton.py` with its copies in hand: a ring of tiles of keys and values in shared
memory, which `cp.async` fills across the borders of splits, heads and rows. Its first tiles are on
the way before the launch waits for its inputs, so memory is busy while the launch before drains.

Scores and sums of a tile are products on `mma.sync`, whose 16 rows know nothing of each other: the
query heads of one kv head, of all lanes of a row.

It serves splits of 256 and 512 tokens: those of `dot` engines, and of `fma` engines for long
requests. For short ones it is slower there than the Triton kernel: what `fma` holds in registers
leaves its programs no room to start early in.

Letters as in `decode.py`, and: M rows of a product, T tokens of a tile, D' head_dim padded.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphengine.kernels.attention.decode_gluon_combine import (
    LOG2E,
    LOWEST,
    Parts,
    arrive,
    store_part,
    store_result,
)
from graphengine.kernels.attention.decode_gluon_heads import (
    BLOCK,
    half_precision,
    insert_new_tokens,
    kv_scales_of,
    load_heads,
    shared_layout,
)
from graphengine.kernels.attention.decode_gluon_ring import (
    copy_tile,
    fill_ring,
    load_entries,
    ring_layout,
    stream_tokens,
)
from graphengine.kernels.attention.decode_gluon_units import (
    Shape,
    first_split,
    heads_of,
    is_seen,
    schedule_of,
    unit_after,
    unit_at,
)
from graphengine.kernels.attention.reference import DecodeCall
from graphengine.kernels.attention.scores import tanh
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import FP8_KV, position_limit
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.plans import dot_columns

_WARPS = 4
COPIED_BYTES = 16
"""What one copy of a thread takes, at a multiple of as many bytes."""

_DTYPES = (torch.float16, torch.bfloat16)
_LEAST_HEAD_DIM = 32
_LEAST_SPLIT = 256
# Bytes of keys and values in shared memory: two programs fit an SM of an H200.
_RING_BYTES = 64 * 1024
_PROGRAMS = 2
# Of the keys of a tile.
_TILE_BYTES = 16 * 1024
_MOST_TOKENS = 128
# Of a product.
_LEAST_ROWS = 16
_MOST_ROWS = 32
_COMBINE_SPLITS = 8
# Splits that are put together before they join others, and how often that is done at most.
_SUPER = 64
_MOST_SUPERS = 32
COUNTERS = _MOST_SUPERS + 1
"""Counters that a tile of rows needs."""
# Values that a program stores at a time in a lane that failed.
_CHUNK = gl.constexpr(1024)

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)
_tanh = gluon.jit(tanh.fn)


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
        and head_dim >= _LEAST_HEAD_DIM
        and head_dim % piece == 0
        and kv.stride(0) % piece == 0
        and kv.data_ptr() % COPIED_BYTES == 0
    )


def _runs_on(tensor: torch.Tensor) -> bool:
    """Gluon has no interpreter; `cp.async` and `mma.sync` came with sm_80."""
    if INTERPRETED or not tensor.is_cuda:
        return False
    return torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def attend(
    call: DecodeCall,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    *,
    split_tokens: int,
    tokens_per_row: int,
    pdl: bool,
) -> None:
    """`decode_attention` of a checked call that `takes`."""
    qkv, kv, table = call.qkv_NX, call.kv, call.block_table_SB
    rows = call.lanes // tokens_per_row
    splits = -(-call.max_seq_len // split_tokens)
    live = splits
    if call.window:
        live = min(splits, (call.window + tokens_per_row - 3) // split_tokens + 2)
    at_once = _PROGRAMS * _multiprocessors(qkv.device)
    of_kv_head = call.num_heads // call.num_kv_heads * tokens_per_row
    shape = _shape(
        call.num_heads,
        kv,
        tile_rows=_tile_rows(of_kv_head, rows * call.num_kv_heads * live, at_once),
        max_seq_len=call.max_seq_len,
        split=split_tokens,
        row_lanes=tokens_per_row,
        normed=call.q_norm_weight is not None,
        window=call.window,
        softcap=call.softcap,
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
    """M for so many lanes and query heads of a kv head; no bit depends on it.

    With 32 rows a tile is read once for twice as many heads, but a thread's registers do not hold
    their sums. On an H200 a layer of Llama 8B takes 14 us with 6 lanes of one row then, 9.2 with 8
    lanes in tiles of 16, 7.4 with one lane. So tiles have 16 where programs of those are not too
    many to run at once.

    units  that there are at most of one tile of rows
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
    normed: bool,
    window: int,
    softcap: float,
) -> Shape:
    block_size, kv_heads, head_dim = kv.shape[2:]
    padded = dot_columns(head_dim)
    of_kv_head = heads // kv_heads * row_lanes
    tile = min(_MOST_TOKENS, _TILE_BYTES // (padded * kv.dtype.itemsize))
    splits = -(-max_seq_len // split)
    together = max(_SUPER, triton.next_power_of_2(-(-splits // _MOST_SUPERS)))
    if window:
        # What a window sees is few splits: one group, whatever else the table has.
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
    )


def _new_parts(like: torch.Tensor, parts: int, head_dim: int) -> Parts:
    """Uninitialised: what is read was written by programs of the same launch."""
    acc = like.new_empty((parts, head_dim), dtype=torch.float32)
    largest = like.new_empty((2, parts), dtype=torch.float32)
    return Parts(acc, largest[0], largest[1])


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@gluon.constexpr_function
def _copy_layout(columns):
    """16 bytes a thread, threads along the columns first: whole rows at a time."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.constexpr_function
def _join_layout(columns, streams):
    """`sums_layout` of [streams, rows, D']."""
    across = min(columns // 4, 32)
    return gl.BlockedLayout([streams, 1, 4], [1, 32 // across, across], [1, 4, 1], [2, 1, 0])


@gluon.jit(do_not_specialize=["rows", "splits", "supers", "position_limit"])
def decode_attention_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    block_table_ptr,
    slot_ptr,
    position_ptr,
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
    """Programs share the live splits of all rows and heads evenly, each some consecutive ones.

    The pitch is a stride in units of 16 bytes, which the compiler must know to copy 16 bytes.
    """
    TILES: gl.constexpr = shape.split // shape.tile
    STAGES: gl.constexpr = shape.stages
    STREAMS: gl.constexpr = shape.streams
    copied: gl.constexpr = _copy_layout(shape.padded)
    ringed: gl.constexpr = ring_layout(shape.padded, STREAMS, shape.fp8)
    product: gl.constexpr = gl.NVMMADistributedLayout(
        [2, 0], [STREAMS, 1, 4 // STREAMS], [1, 16, 8]
    )
    shared: gl.constexpr = shared_layout(shape.padded, 3, shape.fp8)
    dtype: gl.constexpr = kv_ptr.dtype.element_ty
    q_dtype: gl.constexpr = gl.float16 if shape.fp8 else qkv_ptr.dtype.element_ty
    ring_shape: gl.constexpr = [STAGES, STREAMS, shape.tile // STREAMS, shape.padded]
    ring_keys = gl.allocate_shared_memory(dtype, ring_shape, shared)
    ring_values = gl.allocate_shared_memory(dtype, ring_shape, shared)
    ring = (ring_keys, ring_values)
    source = (kv_ptr, block_table_ptr, kv_pitch, table_stride, kv_scales_ptr)

    # Neither of the last two launches writes slots, positions, tables, older keys and values.
    schedule, failed = schedule_of(slot_ptr, position_ptr, rows, position_limit, ROWS_PADDED, shape)
    units = gl.max(schedule[4], axis=0).to(gl.int64)
    first = (gl.program_id(0) * units // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1) * units // gl.num_programs(0)).to(gl.int32)
    tiles = (end - first) * TILES
    unit = unit_at(schedule, first, shape)
    ahead, entries = fill_ring(schedule, source, ring, first, tiles, unit, shape, ringed)

    _wait_for_inputs(PDL, True)
    if failed:
        _fail_lanes(slot_ptr, position_ptr, out_ptr, rows * shape.row_lanes, position_limit, shape)
    if first >= end:
        return

    qkv = (qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, qkv_stride, eps)
    q_shape: gl.constexpr = [shape.rows, shape.padded]
    q_rows = gl.allocate_shared_memory(q_dtype, q_shape, shared_layout(shape.padded, 2, False))
    queries = q_rows.reshape([1, shape.rows, shape.padded])
    keys = gl.zeros([BLOCK, shape.padded], dtype, copied)
    values = keys
    q_of = -1
    joined: gl.constexpr = gl.SliceLayout(0, _join_layout(shape.padded, STREAMS))
    row = gl.arange(0, shape.rows, gl.SliceLayout(1, joined))
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
            q_rows.store(new_q)
            q_of = q_wanted
        head, position, stored = heads_of(unit, row, shape)
        per_row: gl.constexpr = gl.SliceLayout(2, product)
        largest = gl.full([STREAMS, shape.rows], LOWEST, gl.float32, per_row)
        total = gl.zeros([STREAMS, shape.rows, shape.tile // STREAMS], gl.float32, product)
        acc = gl.zeros([STREAMS, shape.rows, shape.padded], gl.float32, product)
        for t in range(TILES):
            async_copy.wait_group(STAGES - 1)
            gl.thread_barrier()
            stage = tile % STAGES
            token = start + t * shape.tile
            there = token < unit.length
            if shape.window > 0:
                there &= is_seen(unit, token + shape.tile - 1, shape)
            if there:
                if token + shape.tile > unit.cached:
                    insert_new_tokens(qkv, source, ring, stage, unit, token, (keys, values), shape)
                state = (acc, largest, total)
                acc, largest, total = _attend_tile(
                    queries,
                    ring_keys.index(stage),
                    ring_values.index(stage),
                    token,
                    position,
                    state,
                    factor,
                    shape,
                )
            tile += 1
            step = tile + STAGES - 1
            if step < tiles:
                # The tile is no longer read.
                gl.thread_barrier()
                copy_tile(source, ring, stage, entries, ahead, step % TILES, True, shape)
                if (step + 1) % TILES == 0:
                    ahead = unit_after(schedule, ahead, first + (step + 1) // TILES, shape)
                entries = load_entries(
                    source, ahead, (step + 1) % TILES, step + 1 < tiles, shape, ringed
                )
            async_copy.commit_group()
        acc_of_all, largest_of_all, weight = _join_streams(acc, largest, total, shape)
        if shape.fp8:
            acc_of_all *= value_scale
        if unit.row_splits - first_split(unit, shape) == 1:
            state = (acc_of_all, largest_of_all, weight)
            store_result(out_ptr, state, sinks_ptr, unit, row, shape)
        else:
            part = head.to(gl.int64) * splits + unit.split
            store_part(parts, (acc_of_all, largest_of_all, weight), part, stored, shape)
            waiting += 1
            after = unit.split + 1
            if (after == unit.row_splits) | (after % shape.super == 0) | (u + 1 == end):
                counts = (splits, supers)
                arrive(
                    arrivals_ptr,
                    waiting,
                    parts,
                    super_parts,
                    out_ptr,
                    sinks_ptr,
                    unit,
                    counts,
                    shape,
                )
                waiting = 0
        unit = unit_after(schedule, unit, u + 1, shape)


@gluon.jit
def _attend_tile(queries, keys, values, start, position, state, factor, shape):
    """`state` after a tile: sums of values [M, D'] (of e4m3: even dimensions first), largest score
    [M] in log2 units, and weights [M, T], of which each column is a sum over tiles.

    `factor` [M] makes scores of products.
    """
    acc, largest, total = state
    layout: gl.constexpr = acc.type.layout
    # Of e4m3 a thread loads 4 keys' dimensions at a time.
    wide: gl.constexpr = 4 if shape.fp8 else 2
    q_layout: gl.constexpr = gl.DotOperandLayout(0, layout, wide)
    all_streams: gl.constexpr = [shape.streams, shape.rows, shape.padded]
    q, _ = gl.broadcast(queries.load(q_layout), gl.zeros(all_streams, queries.dtype, q_layout))
    right = keys.permute((0, 2, 1)).load(gl.DotOperandLayout(1, layout, wide)).to(q.dtype)
    per_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    factor = gl.convert_layout(factor, per_row)[None, :, None]
    scores = mma_v2(q, right, gl.zeros_like(total)) * factor
    if shape.softcap > 0:
        scores = _capped(scores, shape.softcap)
    token = stream_tokens(start, shape, gl.SliceLayout(1, layout))
    position = gl.convert_layout(position, per_row)
    scores = gl.where(token[:, None, :] <= position[None, :, None], scores, float("-inf"))
    if shape.window > 0:
        outside = token[:, None, :] <= position[None, :, None] - shape.window
        scores = gl.where(outside, float("-inf"), scores)
    new_largest = gl.maximum(largest, gl.max(scores, axis=2))
    weights = gl.exp2(scores - new_largest[:, :, None])
    rescale = gl.exp2(largest - new_largest)[:, :, None]
    left = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, layout, 2))
    operand: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    if shape.fp8:
        right = _even_and_odd(values, operand)
    else:
        right = values.load(operand)
    acc = mma_v2(left, right, acc * rescale)
    return acc, new_largest, total * rescale + weights


@gluon.jit
def _capped(scores, softcap: gl.constexpr):
    """Scores in log2 units after the soft cap, which is in the scores' own."""
    cap_log2: gl.constexpr = softcap * LOG2E
    return _tanh(scores * (1.0 / cap_log2)) * cap_log2


@gluon.jit
def _even_and_odd(values, operand: gl.constexpr):
    """Values of e4m3 [streams, tokens, D'] in float16: even dimensions, then odd ones.

    `ldmatrix` transposes 16 bits at a time, so two dimensions of a token come as one. The assembly
    takes those of two tokens, and gives what `mma.sync` wants: two tokens of each dimension.
    """
    STREAMS: gl.constexpr = values.shape[0]
    TOKENS: gl.constexpr = values.shape[1]
    PAIRS: gl.constexpr = values.shape[2] // 2
    pairs = values._reinterpret(gl.int16, [STREAMS, TOKENS, PAIRS], shared_layout(PAIRS, 3, False))
    even, odd = gl.inline_asm_elementwise(
        """{
        .reg .b32 bytes;
        .reg .b16 low, high;
        prmt.b32 bytes, $2, 0, 0x3120;
        mov.b32 {low, high}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs.load(operand)],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    both = gl.join(even, odd).permute((0, 1, 3, 2)).reshape([STREAMS, TOKENS, 2 * PAIRS])
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def _join_streams(acc, largest, total, shape):
    """Sums of values [M, D'], largest scores [M] and sums of weights [M] of all streams."""
    whole = gl.max(largest, axis=0)
    rescale = gl.exp2(largest - whole[None, :])
    weight = gl.sum(gl.sum(total, axis=2) * rescale, axis=0)
    acc *= rescale[:, :, None]
    all_streams: gl.constexpr = acc.shape
    if shape.fp8:
        halves = acc.reshape([shape.streams, shape.rows, 2, shape.padded // 2])
        acc = halves.permute((0, 1, 3, 2)).reshape(all_streams)
    # A thread has a sum's parts of all streams, so that they are added without a shuffle.
    joined: gl.constexpr = _join_layout(shape.padded, shape.streams)
    acc = gl.sum(gl.convert_layout(acc, joined), axis=0)
    per_row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc, gl.convert_layout(whole, per_row), gl.convert_layout(weight, per_row)


@gluon.jit
def _fail_lanes(slot_ptr, position_ptr, out_ptr, lanes, position_limit, shape):
    """NaN for live lanes at a position that no cache has."""
    WIDTH: gl.constexpr = shape.Q * shape.D
    at = gl.arange(0, _CHUNK, gl.BlockedLayout([4], [32], [4], [0]))
    nothing = gl.full([_CHUNK], float("nan"), out_ptr.dtype.element_ty, at.type.layout)
    for lane in range(gl.program_id(0), lanes, gl.num_programs(0)):
        slot = gl.load(slot_ptr + lane, cache_modifier=".cg")
        position = gl.load(position_ptr + lane, cache_modifier=".cg")
        if (slot >= 0) & ((position < 0) | (position >= position_limit)):
            for start in range(0, WIDTH, _CHUNK):
                ptrs = out_ptr + lane * WIDTH + start + at
                gl.store(ptrs, nothing, mask=start + at < WIDTH)
