"""The kernel of `linear.py`'s family `dot` for half precision on a GPU, in Gluon.

It is `linear_triton.dot_kernel` with explicit copies. Unlike Triton's pipeliner it has the first
STAGES tiles of weights on the way to shared memory before it waits for its inputs, so memory is
busy while the launch before drains. `takes` says which launches come here.

The copy of each of these tiles is a group, and the inputs of the same tiles come through registers:
a copy of inputs issued after the weights would be complete only when all of them are, and the first
product would wait for them. Weights arrive in the order they are requested, so the first products
free their room in time.

One `mma.sync` (16 lanes, 8 outputs, 16 columns) after the other adds up a lane's output over the
tiles in order, whether a program has 16 lanes or 32. Other sums have layouts of their own, whose
threads and warps lie the same way along the summed dimension for both.

Letters: N lanes, L lanes of a program, K input features, M weight rows, B outputs of a program.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphengine.kernels.core.devices import stages_that_fit
from graphengine.kernels.core.dispatch import use_gluon
from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.core.triton_versions import load_async, sync_threads
from graphengine.kernels.linear.gluon.linear_gluon_epilogue import (
    epilogue,
    exchange_layout,
    is_last,
    lanes_of,
    load_lanes,
    load_rows,
    ptrs_of_part,
    row_layout,
    sum_splits,
)
from graphengine.kernels.linear.plans import LinearPlan

ALIGNMENT = 8
"""16-bit elements that a thread copies at once: 16 bytes, at a multiple of 16 bytes."""

_DTYPES = (torch.float16, torch.bfloat16)
# Outputs of one `mma.sync`.
_LEAST_OUTPUTS = 8

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)


def takes(
    weight_MK: torch.Tensor, plan: LinearPlan, *, swiglu: bool, out_dtype: torch.dtype
) -> bool:
    """Whether `dot_kernel` serves a linear other than a sampler's.

    The two kernels need not agree in the last bit, so nothing here may depend on the number of
    lanes or on the address of the inputs. It does not serve logits, which are float32, because
    `SampleTiles` promises the same bits as theirs.
    """
    outputs = plan.block_m // 2 if swiglu else plan.block_m
    return (
        plan.family == "dot"
        and use_gluon(weight_MK)
        and out_dtype != torch.float32
        and weight_MK.dtype in _DTYPES
        and outputs >= _LEAST_OUTPUTS
        and weight_MK.shape[1] % ALIGNMENT == 0
        and is_aligned(weight_MK)
    )


def is_aligned(rows: torch.Tensor) -> bool:
    """Whether every row is aligned for a copy."""
    return rows.stride(0) % ALIGNMENT == 0 and rows.data_ptr() % (2 * ALIGNMENT) == 0


def stages(plan: LinearPlan, splits: int, K: int) -> int:
    """Tiles in shared memory at once: no more than there are, and at least two for a loop."""
    return min(max(2, plan.stages), -(-K // (plan.block_k * splits)))


def fitting_stages(plan: LinearPlan, splits: int, K: int, lanes: int, x: torch.Tensor) -> int:
    """`stages`, but no more than fit shared memory with the inputs of `lanes` lanes of `x`.

    ValueError where the GPU does not hold even two.
    """
    stage = (plan.block_m + lanes) * plan.block_k * x.itemsize
    return stages_that_fit(stages(plan, splits, K), stage, 0, x, plan)


@gluon.constexpr_function
def _copy_layout(columns, warps):
    """Layout of copies: 16 bytes a thread, threads along the columns first: whole rows at once."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def _shared_layout(columns):
    """Layout of rows with swizzled 16-byte pieces, so that 8 rows of one column share no bank."""
    rows_of_128_bytes = max(1, 64 // columns)
    return gl.SwizzledSharedLayout(8, rows_of_128_bytes, max(1, 8 // rows_of_128_bytes), [1, 0])


@gluon.jit(do_not_specialize=["lanes", "x_pitch", "weight_pitch", "eps"])
def dot_kernel(
    x_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    delta_ptr,
    slot_ptr,
    out_ptr,
    residual,
    peers,
    partial_ptr,
    arrivals_ptr,
    lanes,
    x_pitch,
    weight_pitch,
    out_stride,
    eps,
    M: gl.constexpr,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    SWIGLU: gl.constexpr,
    SPLITS: gl.constexpr,
    L: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN_K: gl.constexpr,
    WARPS: gl.constexpr,
    RANKS: gl.constexpr,
    SIZE: gl.constexpr,
    TIMED: gl.constexpr,
    PDL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One program for L (16 or 32) lanes, BLOCK_M weight rows, and a part of K.

    Pitches are strides in units of 8 elements, which the compiler must know to copy 16 bytes.
    STAGES is what `stages` gives.
    """
    TILES: gl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    gl.static_assert(STAGES <= TILES and (STAGES > 1 or TILES == 1))
    OUTPUTS: gl.constexpr = M // 2 if SWIGLU else M
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    B: gl.constexpr = BLOCK_M // PARTS
    copied: gl.constexpr = _copy_layout(BLOCK_K, WARPS)
    shared: gl.constexpr = _shared_layout(BLOCK_K)
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    rows: gl.constexpr = row_layout(B, WARPS)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    weights = gl.allocate_shared_memory(dtype, [STAGES * PARTS, B, BLOCK_K], shared)
    inputs = gl.allocate_shared_memory(dtype, [STAGES, L, BLOCK_K], shared)
    tile = gl.program_id(1)
    split = gl.program_id(2)

    # Rows past the end repeat the last one: cheaper than a mask, and never stored.
    row = gl.minimum(tile * B + gl.arange(0, B, gl.SliceLayout(1, copied)), OUTPUTS - 1)
    k = split * (TILES * BLOCK_K) + gl.arange(0, BLOCK_K, gl.SliceLayout(0, copied))
    row_ptrs = weight_ptr + row.to(gl.int64) * (weight_pitch.to(gl.int64) * 8)
    gate_ptrs = row_ptrs[:, None] + k[None, :]
    up_ptrs = gate_ptrs + weight_pitch.to(gl.int64) * (OUTPUTS * 8)
    for stage in gl.static_range(STAGES):
        _copy(weights, stage * PARTS, gate_ptrs, up_ptrs, k, stage * BLOCK_K, K, EVEN_K, SWIGLU)
        # The loop closes the last group, so that it closes one for each of its tiles.
        if stage < STAGES - 1 or STAGES == 1:
            async_copy.commit_group()
    output = tile * B + gl.arange(0, B, gl.SliceLayout(0, rows))
    norm, bias, up_bias = load_rows(residual, bias_ptr, output, OUTPUTS, SWIGLU)
    _wait_for_inputs(PDL, OVERLAP)

    # Padded lanes hold anything: a row of a product touches no other row.
    x_lane = lanes_of(L, copied)
    lane_ptrs = x_ptr + x_lane.to(gl.int64) * (x_pitch.to(gl.int64) * 8)
    x_ptrs = lane_ptrs[:, None] + k[None, :]
    x_inside = (x_lane < lanes)[:, None]
    first = ()
    for stage in gl.static_range(STAGES):
        inside = _inside(x_inside, k + stage * BLOCK_K, K, EVEN_K)
        x = gl.load(x_ptrs + stage * BLOCK_K, mask=inside, other=0.0, cache_modifier=".cg")
        first += (x,)  # type: ignore[assignment]
    lane = lanes_of(L, rows)
    # With splits only the last program to arrive needs them, along with the others' parts.
    of_lanes = None
    if SPLITS == 1:
        of_lanes = load_lanes(
            lane,
            output,
            lanes,
            slot_ptr,
            squares_ptr,
            residual,
            delta_ptr,
            peers,
            GROUPS,
            OUTPUTS,
            WARPS,
            RANKS,
        )
    for stage in gl.static_range(STAGES):
        inputs.index(stage).store(first[stage])

    y = gl.zeros([L, B], gl.float32, product)
    up = y
    for t in range(TILES):
        # Groups complete in order: those of the tiles up to this one are complete.
        async_copy.wait_group(max(STAGES - 2, 0))
        sync_threads()
        if TILES > STAGES:
            # The previous tile is no longer read.
            ahead = t + STAGES - 1
            if (t > 0) & (ahead < TILES):
                step = ahead * BLOCK_K
                free = ahead % STAGES
                _copy(weights, free * PARTS, gate_ptrs, up_ptrs, k, step, K, EVEN_K, SWIGLU)
                inside = _inside(x_inside, k + step, K, EVEN_K)
                load_async(inputs.index(free), x_ptrs + step, inside)
        async_copy.commit_group()
        operand = inputs.index(t % STAGES).load(gl.DotOperandLayout(0, product, 2))
        y = _multiply(operand, weights.index(t % STAGES * PARTS), y)
        if SWIGLU:
            up = _multiply(operand, weights.index(t % STAGES * PARTS + 1), up)

    if SPLITS == 1:
        whole, whole_up = _in_rows(y, up, rows, SWIGLU)
    else:
        pitch = gl.num_programs(1).to(gl.int64) * BLOCK_M * lanes
        ptrs = ptrs_of_part(partial_ptr, tile, L, B, BLOCK_M, product) + split * pitch
        stored = (lanes_of(L, product) < lanes)[:, None]
        gl.store(ptrs, y, mask=stored)
        if SWIGLU:
            gl.store(ptrs + B, up, mask=stored)
        if not is_last(arrivals_ptr, tile, SPLITS):
            return
        of_lanes = load_lanes(
            lane,
            output,
            lanes,
            slot_ptr,
            squares_ptr,
            residual,
            delta_ptr,
            peers,
            GROUPS,
            OUTPUTS,
            WARPS,
            RANKS,
        )
        part_ptrs = ptrs_of_part(partial_ptr, tile, L, B, BLOCK_M, rows)
        whole = sum_splits(part_ptrs, lane, lanes, pitch, SPLITS, L, B, rows)
        whole_up = whole
        if SWIGLU:
            whole_up = sum_splits(part_ptrs + B, lane, lanes, pitch, SPLITS, L, B, rows)
    epilogue(
        whole,
        whole_up,
        norm,
        bias,
        up_bias,
        of_lanes,
        lane,
        output,
        tile,
        lanes,
        eps,
        bias_ptr,
        delta_ptr,
        out_ptr,
        out_stride,
        residual,
        K,
        GROUPS,
        OUTPUTS,
        SWIGLU,
        peers=peers,
        RANKS=RANKS,
        SIZE=SIZE,
        TIMED=TIMED,
    )


@gluon.jit
def _in_rows(y, up, rows: gl.constexpr, SWIGLU: gl.constexpr):
    """Bring sums [L, B] into the epilogue's layout, and in a SwiGLU those of the ups.

    This takes one exchange; `convert_layout` takes four, with barriers between them.
    """
    exchange: gl.constexpr = exchange_layout(y.shape[1])
    exchanged = gl.allocate_shared_memory(gl.float32, y.shape, exchange, y)
    exchanged_up = exchanged
    if SWIGLU:
        exchanged_up = gl.allocate_shared_memory(gl.float32, up.shape, exchange, up)
    return exchanged.load(rows), exchanged_up.load(rows)


@gluon.jit
def _copy(
    weights,
    at,
    gate_ptrs,
    up_ptrs,
    k,
    step,
    K: gl.constexpr,
    EVEN_K: gl.constexpr,
    SWIGLU: gl.constexpr,
):
    """Request columns `k + step` of the weight rows; columns past K become 0."""
    if EVEN_K:
        load_async(weights.index(at), gate_ptrs + step)
        if SWIGLU:
            load_async(weights.index(at + 1), up_ptrs + step)
    else:
        inside = (k + step < K)[None, :]
        load_async(weights.index(at), gate_ptrs + step, inside)
        if SWIGLU:
            load_async(weights.index(at + 1), up_ptrs + step, inside)


@gluon.jit
def _inside(x_inside, k, K: gl.constexpr, EVEN_K: gl.constexpr):
    """Where there is an input: in lanes that exist, and not past K."""
    if EVEN_K:
        inside = x_inside & (k >= 0)[None, :]
    else:
        inside = x_inside & (k < K)[None, :]
    return inside


@gluon.jit
def _multiply(x, weights, y):
    """y [L, B] + x [L, BLOCK_K] @ weights [B, BLOCK_K]^T"""
    layout: gl.constexpr = gl.DotOperandLayout(1, y.type.layout, 2)
    return mma_v2(x, weights.permute((1, 0)).load(layout), y)
