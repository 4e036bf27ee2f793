"""Gluon kernel for prefill attention of many rows on Hopper, launched by `prefill.py`.

It goes through the tiles of keys in the same order as the Triton kernel, and gives the same bits as
long as values are finite. (A weight of 0 times a value that is not finite is NaN: here in the rows
of all tokens whose last tile of keys has it, there from its own tile of rows on.) Only the schedule
differs. A dedicated warp has the tensor memory accelerator (TMA) bring tiles of keys and of values,
one cache block at a time. Two warp groups have half of the rows each, and while one turns scores
into weights, `wgmma` computes its sums of the tile before and the other's scores. With few tiles
there is one warp group with half as many rows, so that more multiprocessors have work. Source:
FlashAttention-3 (Shah et al. 2024). Gluon has no interpreter: a CPU interprets the Triton kernel.

`wgmma` multiplies e4m3 only by e4m3. So for an e4m3 cache four warps replace the one: they copy
tiles to shared memory as they are, and from there to other tiles in the queries' dtype.

Letters as in `prefill.py`.
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

from graphengine.kernels.attention.gluon.prefill_gluon_tiles import (
    COLUMNS,
    bring_tiles,
    convert_tiles,
)
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
"""Least number of programs with ROWS rows, by head_dim. With fewer, the Triton kernel's shorter
tiles are faster."""
FEW_PROGRAMS = range(64, 133)
"""Numbers of programs with FEW_ROWS rows: at most one per multiprocessor, which has no room for a
second. They take seven to nine tenths of the time of the faster of the other two kernels.
"""

_WARPS = 4
_PART_ROWS = gl.constexpr(64)
"""Rows of a warp group."""
# Tiles of keys, and of values, in shared memory; with e4m3 two raw and two converted ones.
_STAGES = gl.constexpr(3)
_STAGES_FP8 = gl.constexpr(2)
# Registers per thread of the warp groups, and of the warp that brings tiles or the four that
# convert them.
_REGISTERS = gl.constexpr((240, 24))
_REGISTERS_ALONE = gl.constexpr((64,))
_REGISTERS_FP8 = gl.constexpr((208, 96))
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)


def takes_wgmma(q_NQD: torch.Tensor, kv: torch.Tensor, segments: int) -> bool:
    """Whether to use `attend` for these queries in this many segments: it can run, and is faster.

    It needs a Hopper GPU, 16-bit heads of 64 or 128, and a cache of their dtype or FP8_KV whose
    rows are aligned to 16 bytes.
    """
    least = LEAST_PROGRAMS.get(q_NQD.shape[2])
    if least is None or q_NQD.dtype not in _DTYPES or not use_wgmma(q_NQD):
        return False
    few = _has_few_rows(q_NQD, kv, segments)
    return (few or math.prod(_grid(q_NQD, kv, segments, ROWS)) >= least) and has_token_rows(kv)


def has_token_rows(kv: torch.Tensor) -> bool:
    """Whether the TMA can read the cache as rows of a token's keys, or values, of all kv heads."""
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
    """Whether tiles have FEW_ROWS rows. Rows are independent, so the bits are the same."""
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
    """Run `paged_prefill_attention` for checked arguments that `takes_wgmma` accepts."""
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
    """One program per kv head, tile of (token, head of the group) rows, and segment.

    The last tiles of a segment have the most keys and start first. `cache` has one row for a
    token's keys of all kv heads and one for its values; a block's rows follow each other, keys
    first. With e4m3 `cache` is a pointer to the rows, and numbers are converted on their way to
    shared memory.
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
    # This code runs in one warp group. The others begin after a barrier, which follows the wait.
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
    """Number of key tiles that a tile of rows attends to; number of those that all its rows fully
    attend to; and number of appended tokens, after which keys are arbitrary.
    """
    _, first_row, _, tokens, first_position = place
    last_token = gl.minimum(tokens - 1, (first_row + ROWS - 1) // GROUP)
    end = gl.minimum(first_position + last_token + 1, position_limit)
    # At least one tile, even if no token is inside the block table.
    tiles = gl.maximum((end + TILE - 1) // TILE, 1)
    common = gl.minimum(first_position + first_row // GROUP + 1, end) // TILE
    written = gl.minimum(first_position + tokens, position_limit)
    return tiles, common, written


@gluon.jit
def _all_barriers(stages: gl.constexpr, parts: gl.constexpr):
    """Create all barriers. Per stage: keys have arrived, values have arrived, all warp groups have
    used the keys, or the values. For the last tile's values: all warp groups have cleared their
    part.
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
    """Create barriers in shared memory; a phase ends after `arrivals` arrivals."""
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
    """Code of a warp group: attend its part of the program's rows over all tiles.

    During an iteration `wgmma` computes the scores of a tile and the sums of the previous one; the
    sums are still being computed while scores become weights.
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
        # This is the next iteration's wait. Waiting here keeps the compiler from moving weights
        # past the sums.
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
    """Layout of heads [rows, D] in global memory, with 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])


@gluon.jit
def _place_heads(
    place, PART: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr
):
    """Lanes and query heads of a part's rows [R], which of the rows exist, and dimensions."""
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
    """Store the result of a part through shared memory (`room`), so that whole rows are stored."""
    lane, head, live, dim = heads
    D: gl.constexpr = room.shape[1]
    room.store(result.to(room.dtype))
    at = (lane * (Q * D) + head * D)[:, None] + dim[None, :]
    gl.store(out_ptr + at, room.load(_dense_layout(D)), mask=live)


@gluon.jit
def _clear_unwritten(values, first_key, written, cleared, PART: gl.constexpr, PARTS: gl.constexpr):
    """Zero the values of a tile that were not appended. Their weights are 0, but 0 times NaN is
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
    """Begin to compute the scores of all rows and a tile of keys; valid after a wait."""
    ROWS: gl.constexpr = queries.shape[0]
    TILE: gl.constexpr = keys.shape[0]
    nothing = gl.zeros([ROWS, TILE], gl.float32, layout)
    return warpgroup_mma(queries, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _begin_sums(weights, values, acc, layout: gl.constexpr):
    """Begin to add a tile's weighted values to `acc`; valid after a wait."""
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, layout, k_width=2))
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def _weigh(scores, tile, position, largest, total, scale_log2, masked):
    """A tile's weights, the factor for earlier sums, and each row's new maximum and total.

    The maximum stays in the scores' own units, so that one operation scales and subtracts.
    """
    TILE: gl.constexpr = scores.shape[1]
    if masked:
        key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(scores, axis=1))
    weights = gl.exp2(gl.fma(scores, scale_log2, -(new_largest * scale_log2)[:, None]))
    rescale = gl.exp2((largest - new_largest) * scale_log2)
    return weights, rescale, new_largest, total * rescale + gl.sum(weights, axis=1)
