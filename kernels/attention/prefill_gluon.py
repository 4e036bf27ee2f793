"""Prefill attention of many rows on Hopper, in Gluon: what `prefill_attention` launches there.

Bit for bit its Triton kernel, whose tiles of keys it goes through in the same order, as long as
values are finite. (A weight of 0 makes NaN of one that is not: here in the rows of all tokens whose
last tile of keys has it, there from its own tile of rows on.) What differs is when things happen. A
warp of its own has the tensor memory accelerator (TMA) bring tiles of keys and of values, a block
of the cache at a time; two warp groups have half of the rows each, and while one turns scores into
weights, `wgmma` is at its sums of the tile before and at the other's scores. Where there are few
tiles one warp group has half as many rows, so that more multiprocessors have some. Source:
FlashAttention-3 (Shah et al. 2024). Gluon has no interpreter: a CPU interprets the Triton kernel.

`wgmma` multiplies e4m3 by e4m3 alone. So of such a cache four warps, in place of the one, copy
tiles to shared memory and write what they stand for beside them, in the queries' dtype.

Letters as in `prefill_attention`.
"""

from __future__ import annotations

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphengine.kernels.attention.prefill_gluon_tiles import COLUMNS, bring_tiles, convert_tiles
from graphengine.kernels.core.dispatch import use_wgmma
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import token_capacity
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.triton_versions import reinterpret, sync_threads

ROWS = 128
"""Rows of a tile: 64 for each of two warp groups."""
FEW_ROWS = 64
"""Rows of a tile with one warp group."""
KEYS = 128
"""Keys of a tile, as many as in the Triton kernel."""
LEAST_PROGRAMS = {64: 128, 128: 64}
"""Programs of ROWS by head_dim. With fewer, the Triton kernel's shorter tiles are faster."""
FEW_PROGRAMS = range(64, 133)
"""Programs of FEW_ROWS: at most one for each multiprocessor, where a second one has no room. They
take seven to nine tenths of the time of the faster of the other two kernels.
"""

_WARPS = 4
_PART_ROWS = gl.constexpr(64)
"""Of a warp group."""
# Tiles of keys in shared memory, and of values: of e4m3 two as they are and two as numbers.
_STAGES = gl.constexpr(3)
_STAGES_FP8 = gl.constexpr(2)
# Of a thread, in the warp groups and in the warp that brings tiles, or the four that convert them.
_REGISTERS = gl.constexpr((240, 24))
_REGISTERS_ALONE = gl.constexpr((64,))
_REGISTERS_FP8 = gl.constexpr((208, 96))
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)


def takes_wgmma(q_NQD: torch.Tensor, kv: torch.Tensor, segments: int) -> bool:
    """Whether to use `attend` for these queries in so many segments: it can run, and is faster.

    It needs a Hopper GPU, 16-bit heads of 64 or 128 in a cache of their dtype, or of FP8_KV, whose
    rows are aligned to 16 bytes.
    """
    least = LEAST_PROGRAMS.get(q_NQD.shape[2])
    if least is None or q_NQD.dtype not in _DTYPES or not use_wgmma(q_NQD):
        return False
    few = _has_few_rows(q_NQD, kv, segments)
    return (few or math.prod(_grid(q_NQD, kv, segments, ROWS)) >= least) and has_token_rows(kv)


def has_token_rows(kv: torch.Tensor) -> bool:
    """Whether the TMA can see a cache as rows of a token's keys, or values, of all kv heads."""
    token = kv.shape[3] * kv.shape[4]
    return (
        not kv.data_ptr() % 16
        and not kv.stride(0) % token
        and kv.shape[0] * kv.stride(0) // token < 2**31
    )


def _grid(q_NQD: torch.Tensor, kv: torch.Tensor, segments: int, rows: int) -> tuple[int, int, int]:
    lanes, heads, _ = q_NQD.shape
    kv_heads = kv.shape[3]
    return kv_heads, triton.cdiv(lanes * (heads // kv_heads), rows), segments


def _has_few_rows(q_NQD: torch.Tensor, kv: torch.Tensor, segments: int) -> bool:
    """Whether tiles have FEW_ROWS. Rows know nothing of each other: bits are the same."""
    programs = math.prod(_grid(q_NQD, kv, segments, FEW_ROWS))
    return kv.dtype == q_NQD.dtype and programs in FEW_PROGRAMS


def attend(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    *,
    query_start_P1: torch.Tensor,
    slot_P: torch.Tensor,
    position_P: torch.Tensor,
    scale: float,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """`paged_prefill_attention` of checked arguments that `takes_wgmma`."""
    blocks, _, block_size, kv_heads, head_dim = kv.shape
    token = kv_heads * head_dim
    block_rows = kv.stride(0) // token
    rows = kv.as_strided(((blocks - 1) * block_rows + 2 * block_size, token), (token, 1))
    box = [block_size, COLUMNS.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, _DTYPES[q_NQD.dtype])
    fp8, segments = kv_scales is not None, slot_P.shape[0]
    tile_rows = FEW_ROWS if _has_few_rows(q_NQD, kv, segments) else ROWS
    launcher(_attend_kernel, _grid(q_NQD, kv, segments, tile_rows))(
        q_NQD,
        rows.view(torch.int32) if fp8 else TensorDescriptor.from_tensor(rows, box, layout),
        kv_scales,
        block_table_SB,
        query_start_P1,
        slot_P,
        position_P,
        out,
        scale * math.log2(math.e),
        q_NQD.stride(0),
        block_rows,
        block_table_SB.stride(0),
        token_capacity(kv, block_table_SB),
        Q=q_NQD.shape[1],
        G=kv_heads,
        D=head_dim,
        BLOCK_SIZE=block_size,
        LAYOUT=layout,
        FP8=fp8,
        ROWS=tile_rows,
        TILE=KEYS,
        WARPS=_WARPS,
        num_warps=_WARPS,
        **launch_options(pdl),
    )


@gluon.jit(do_not_specialize=["position_limit"])
def _attend_kernel(
    q_ptr,
    cache,
    kv_scales_ptr,
    block_table_ptr,
    query_start_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    scale_log2,
    q_stride,
    block_rows,
    table_stride,
    position_limit,
    Q: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
    FP8: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program a kv head, tile of (token, head of the group) rows, and segment.

    The last tiles of a segment have most keys and start first. `cache` has a row for a token's keys
    and one for its values, of all kv heads: those of a block follow each other, keys first. Of e4m3
    it is a pointer to them, and the numbers are converted on their way to shared memory.
    """
    GROUP: gl.constexpr = Q // G
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    PARTS: gl.constexpr = ROWS // _PART_ROWS
    part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_PART_ROWS, D], dtype)
    queries = gl.allocate_shared_memory(dtype, [PARTS, _PART_ROWS, D], part)
    STAGES: gl.constexpr = _STAGES_FP8 if FP8 else _STAGES
    pieces: gl.constexpr = [STAGES * (D // COLUMNS), TILE, COLUMNS]
    keys = gl.allocate_shared_memory(dtype, pieces, LAYOUT)
    values = gl.allocate_shared_memory(dtype, pieces, LAYOUT)
    barriers = _all_barriers(STAGES, PARTS)

    kv_head = gl.program_id(0)
    first_row = (gl.num_programs(1) - 1 - gl.program_id(1)) * ROWS
    segment = gl.program_id(2)
    _wait_for_inputs(PDL, True)
    slot = gl.load(slot_ptr + segment)
    first_position = gl.load(position_ptr + segment)
    first_lane = gl.load(query_start_ptr + segment)
    tokens = gl.load(query_start_ptr + segment + 1) - first_lane
    if (slot < 0) | (first_row >= tokens * GROUP):
        return

    place = (kv_head, first_row, first_lane, tokens, first_position)
    tiles, common, written = _reach_of(place, position_limit, ROWS, GROUP, TILE)
    last_block = gl.maximum(written - 1, 0) // BLOCK_SIZE
    table_row_ptr = block_table_ptr + slot.to(gl.int64) * table_stride
    value_scale = 1.0
    if FP8:
        scale_log2 *= gl.load(kv_scales_ptr + kv_head)
        value_scale = gl.load(kv_scales_ptr + G + kv_head)
    tensors = (q_ptr, out_ptr, queries, keys, values)
    reach = (tiles, common, written, position_limit)
    rows = (tensors, barriers, place, reach, (scale_log2, value_scale), q_stride)
    source = (cache, table_row_ptr, last_block, block_rows, kv_head * D)
    brought = (source, keys, values, barriers, tiles)
    # This is one warp group. The others begin after a barrier, which follows the wait.
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_attend_rows, (rows, gl.constexpr(0), Q, G, FP8)),
                (bring_tiles, (brought, D)),
            ],
            [1],
            _REGISTERS_ALONE,
        )
    elif FP8:
        gl.warp_specialize(
            [
                (_attend_rows, (rows, gl.constexpr(0), Q, G, FP8)),
                (_attend_rows, (rows, gl.constexpr(1), Q, G, FP8)),
                (convert_tiles, (brought, written, BLOCK_SIZE, D, G)),
            ],
            [WARPS, 4],
            _REGISTERS_FP8,
        )
    else:
        gl.warp_specialize(
            [
                (_attend_rows, (rows, gl.constexpr(0), Q, G, FP8)),
                (_attend_rows, (rows, gl.constexpr(1), Q, G, FP8)),
                (bring_tiles, (brought, D)),
            ],
            [WARPS, 1],
            _REGISTERS,
        )


@gluon.jit
def _reach_of(place, position_limit, ROWS: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr):
    """How many tiles of keys a tile of rows attends to; to how many of these all of its rows do;
    and how many tokens were appended: keys from there on may be anything.
    """
    _, first_row, _, tokens, first_position = place
    last_token = gl.minimum(tokens - 1, (first_row + ROWS - 1) // GROUP)
    end = gl.minimum(first_position + last_token + 1, position_limit)
    # One of nothing where no token is inside of the block table.
    tiles = gl.maximum((end + TILE - 1) // TILE, 1)
    common = gl.minimum(first_position + first_row // GROUP + 1, end) // TILE
    written = gl.minimum(first_position + tokens, position_limit)
    return tiles, common, written


@gluon.jit
def _all_barriers(stages: gl.constexpr, parts: gl.constexpr):
    """Of each stage: its keys, and its values, are there; all warp groups have used either. And
    of the last tile's values: all have cleared theirs.
    """
    keys_there = _new_barriers(stages, 1)
    values_there = _new_barriers(stages, 1)
    keys_free = _new_barriers(stages, parts)
    values_free = _new_barriers(stages, parts)
    cleared = _new_barriers(1, parts)
    fence_async_shared()
    return keys_there, values_there, keys_free, values_free, cleared


@gluon.jit
def _new_barriers(barriers: gl.constexpr, arrivals: gl.constexpr):
    """In shared memory; a phase of one is over when so many have arrived."""
    new = gl.allocate_shared_memory(gl.int64, [barriers, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(barriers):
        mbarrier.init(new.index(index), count=arrivals)
    return new


@gluon.jit
def _free(barrier):
    """Arrive once all warps of the group are here."""
    sync_threads()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _attend_rows(rows, PART: gl.constexpr, Q: gl.constexpr, G: gl.constexpr, FP8: gl.constexpr):
    """A warp group: its part of the program's rows over all of its tiles.

    During an iteration `wgmma` computes the scores of a tile and the sums of the previous one;
    sums are still under way while scores become weights.
    """
    tensors, barriers, place, reach, scales, q_stride = rows
    scale_log2, value_scale = scales
    q_ptr, out_ptr, queries, keys, values = tensors
    keys_there, values_there, keys_free, values_free, cleared = barriers
    tiles, common, written, position_limit = reach
    dtype: gl.constexpr = queries.dtype
    PARTS: gl.constexpr = queries.shape[0]
    ROWS: gl.constexpr = queries.shape[1]
    D: gl.constexpr = queries.shape[2]
    TILE: gl.constexpr = keys.shape[1]
    STAGES: gl.constexpr = keys.shape[0] // (D // COLUMNS)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    result_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], dtype)
    queries = queries.index(PART)
    # wgmma takes 64 consecutive columns as one tile.
    keys = reinterpret(keys, dtype, [STAGES, TILE, D], tile_layout)
    values = reinterpret(values, dtype, [STAGES, TILE, D], tile_layout)

    heads = _place_heads(place, PART, ROWS, Q // G, D)
    _load_queries(queries, q_ptr, heads, q_stride)
    position = _positions(place, PART, ROWS, Q // G, gl.SliceLayout(1, scores_layout))
    largest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, scores_layout))
    acc = gl.zeros([ROWS, D], gl.float32, result_layout)
    mbarrier.wait(keys_there.index(0), 0)
    scores = _begin_scores(queries, keys.index(0), scores_layout)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    _free(keys_free.index(0))
    weights, _, largest, total = _weigh(
        scores, 0, position, largest, total, scale_log2, common <= 0
    )
    weights = weights.to(dtype)
    mbarrier.wait(keys_there.index(1), 0, pred=tiles > 1)

    for tile in range(1, tiles):
        stage = tile % STAGES
        scores = _begin_scores(queries, keys.index(stage), scores_layout)
        before = (tile - 1) % STAGES
        mbarrier.wait(values_there.index(before), (tile - 1) // STAGES & 1)
        acc = _begin_sums(weights, values.index(before), acc, result_layout)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        _free(keys_free.index(stage))
        weights, rescale, largest, total = _weigh(
            scores, tile, position, largest, total, scale_log2, tile >= common
        )
        weights = weights.to(dtype)
        # The next iteration's wait. Here it keeps the compiler from moving weights past the sums.
        after = (tile + 1) % STAGES
        mbarrier.wait(keys_there.index(after), (tile + 1) // STAGES & 1, pred=tile + 1 < tiles)
        acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))
        _free(values_free.index(before))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, result_layout))[:, None]

    last = (tiles - 1) % STAGES
    mbarrier.wait(values_there.index(last), (tiles - 1) // STAGES & 1)
    if not FP8 and tiles * TILE > written:
        first_key = (tiles - 1) * TILE
        _clear_unwritten(values.index(last), first_key, written, cleared, PART, PARTS)
    acc = _begin_sums(weights, values.index(last), acc, result_layout)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))

    inside = (position >= 0) & (position < position_limit)
    factor = gl.where(inside, 1.0 / total, float("nan"))
    result = acc * gl.convert_layout(factor, gl.SliceLayout(1, result_layout))[:, None]
    if FP8:
        result *= value_scale
    _store_result(out_ptr, queries, result, heads, Q)


@gluon.constexpr_function
def _dense_layout(D):
    """Of heads [rows, D] in global memory: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])


@gluon.jit
def _place_heads(
    place, PART: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr
):
    """Lanes and query heads of the rows of a part [R], which of them are there, and dimensions."""
    kv_head, first_row, first_lane, tokens, _ = place
    dense: gl.constexpr = _dense_layout(D)
    row = first_row + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, dense))
    dim = gl.arange(0, D, gl.SliceLayout(0, dense))
    lane = (first_lane + row // GROUP).to(gl.int64)
    head = kv_head * GROUP + row % GROUP
    live = (row // GROUP < tokens)[:, None]
    return lane, head, live, dim


@gluon.jit
def _positions(
    place, PART: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr
):
    """The position of each row of a part [R]."""
    _, first_row, _, _, first_position = place
    token = (first_row + PART * ROWS + gl.arange(0, ROWS, layout)) // GROUP
    return first_position + token


@gluon.jit
def _load_queries(queries, q_ptr, heads, q_stride):
    """Put the queries of a part into shared memory, for `wgmma`."""
    lane, head, live, dim = heads
    D: gl.constexpr = queries.shape[1]
    at = (lane * q_stride + head * D)[:, None] + dim[None, :]
    queries.store(gl.load(q_ptr + at, mask=live, other=0.0))
    fence_async_shared()
    sync_threads()


@gluon.jit
def _store_result(out_ptr, room, result, heads, Q: gl.constexpr):
    """Store the result of a part, in whole rows by way of `room` in shared memory."""
    lane, head, live, dim = heads
    D: gl.constexpr = room.shape[1]
    room.store(result.to(room.dtype))
    at = (lane * (Q * D) + head * D)[:, None] + dim[None, :]
    gl.store(out_ptr + at, room.load(_dense_layout(D)), mask=live)


@gluon.jit
def _clear_unwritten(values, first_key, written, cleared, PART: gl.constexpr, PARTS: gl.constexpr):
    """Make 0 of the values of a tile that were not appended. No row weighs them, but 0 times NaN is
    NaN. Each warp group clears its part of them, and waits for the other.
    """
    COUNT: gl.constexpr = values.shape[0] // PARTS
    dense: gl.constexpr = _dense_layout(values.shape[1])
    own = values.slice(PART * COUNT, COUNT)
    key = first_key + PART * COUNT
    key += gl.arange(0, COUNT, gl.SliceLayout(1, dense))
    own.store(gl.where((key < written)[:, None], own.load(dense), 0.0))
    fence_async_shared()
    _free(cleared.index(0))
    mbarrier.wait(cleared.index(0), 0)


@gluon.jit
def _begin_scores(queries, keys, layout: gl.constexpr):
    """Scores of all rows and a tile of keys, once they are waited for."""
    ROWS: gl.constexpr = queries.shape[0]
    TILE: gl.constexpr = keys.shape[0]
    nothing = gl.zeros([ROWS, TILE], gl.float32, layout)
    return warpgroup_mma(queries, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _begin_sums(weights, values, acc, layout: gl.constexpr):
    """`acc` and a tile's weighted values, once they are waited for."""
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, layout, k_width=2))
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def _weigh(scores, tile, position, largest, total, scale_log2, masked):
    """A tile's weights, the factor of what was summed before, each row's new maximum and total.

    The maximum stays in the scores' own units: scaled and subtracted in one operation.
    """
    TILE: gl.constexpr = scores.shape[1]
    if masked:
        key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(scores, axis=1))
    weights = gl.exp2(gl.fma(scores, scale_log2, -(new_largest * scale_log2)[:, None]))
    rescale = gl.exp2((largest - new_largest) * scale_log2)
    return weights, rescale, new_largest, total * rescale + gl.sum(weights, axis=1)
