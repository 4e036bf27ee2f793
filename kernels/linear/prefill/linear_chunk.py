"""A product of any number of lanes whose bits do not depend on that number, for prefill.

A BLAS picks its tiles, and with them the order of its sums, by the number of lanes. Here all
columns of a weight are summed in one order, so a prompt's chunk has the same bits alone and in one
launch with chunks of other prompts.

On Hopper a persistent GEMM in Gluon, as in `linear_swiglu`: each program goes through its tiles of
128 lanes, and through the columns of each, as one sequence of steps, with the tensor memory
accelerator (TMA) some steps ahead of `wgmma`, across tiles as well. Source: the persistent matmuls
of Triton's and Gluon's tutorials, which are CUTLASS's. Gluon has no interpreter: on a CPU the
reference runs.

Letters: N lanes, K input features, M outputs; B outputs of a tile.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from graphengine.kernels.core.devices import device_of, processors_of
from graphengine.kernels.core.lanes import check_lanes, check_rows, check_vector, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import LOGITS
from graphengine.kernels.linear.gluon.chunk_gluon import (
    ask_inputs,
    ask_weights,
    multiply_tile,
    store_piece,
)
from graphengine.kernels.linear.launches import is_launched, launch_linear
from graphengine.kernels.linear.prefill.chunk_tiles import described
from graphengine.kernels.linear.prefill.linear_swiglu import (
    ALIGNMENT,
    GLUON_DTYPES,
    LANES,
    fits_tma,
)
from graphengine.kernels.linear.reference import linear_reference, matmul_groups

_COLUMNS = 64
_WARPS = 8
# Outputs of a tile -> steps in shared memory. Tiles of fewer outputs read more shared memory for
# each, which does not matter with few lanes.
_STAGES = {256: 4, 128: 6, 64: 8}
# Outputs of a tile -> its speed, as a share of the widest tile's, where all processors are busy.
_SPEEDS = {256: 1.0, 128: 0.9, 64: 0.7}
# A result goes to memory in pieces of this many outputs.
_STORED = 128

_wait_for_inputs = gluon.jit(wait_for_inputs.fn)


def tile_outputs(lanes: int, outputs: int, processors: int) -> int:
    """B for this many lanes and outputs: no part of the numerics."""

    def speed(width: int) -> float:
        tiles = triton.cdiv(lanes, LANES) * triton.cdiv(outputs, width)
        busy: float = tiles / (triton.cdiv(tiles, processors) * processors)
        return _SPEEDS[width] * busy

    return max(_STAGES, key=speed)


def linear_chunk(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    bias_M: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x @ weight^T (+ bias).

    Args:
        x_NK: dense rows, any stride between them. On a GPU float16 or bfloat16, in memory and rows
            that are aligned to 16 bytes. Padded lanes hold anything, and so do their results.
        weight_MK: in x's dtype, laid out like x.
        bias_M: dense, in x's dtype.
        out: [N, M] in x's dtype, laid out like x; may not share memory with it.
        pdl: the launch before may still run, and does not write the weight.

    Returns:
        [N, M] in x's dtype; sums in float32, rounded once. A lane's bits do not depend on the other
        lanes, on its own index or on N. ValueError for a shape, dtype or alignment that does not
        fit.
    """
    check_rows(x_NK=x_NK, weight_MK=weight_MK)
    (N, K), (M, columns) = x_NK.shape, weight_MK.shape
    if columns != K or weight_MK.dtype != x_NK.dtype:
        raise ValueError(
            f"weight_MK is {weight_MK.dtype} {tuple(weight_MK.shape)}: x_NK, {x_NK.dtype} "
            f"{tuple(x_NK.shape)}, takes rows of {K} in its dtype"
        )
    if bias_M is not None:
        check_vector("bias_M", bias_M, M, x_NK.dtype)
    out = output_rows(out, (N, M), dtype=x_NK.dtype, like=x_NK)
    if device_of(x_NK) is None:
        return linear_chunk_reference(x_NK, weight_MK, bias_M, out=out)
    for name, rows in {"x_NK": x_NK, "weight_MK": weight_MK, "out": out}.items():
        if not fits_tma(rows):
            raise ValueError(
                f"{name} is {rows.dtype} in rows {rows.stride(0) * rows.itemsize} bytes apart from "
                f"{rows.data_ptr():#x}: it must be 16-bit, in rows aligned to {ALIGNMENT} bytes"
            )
    _launch(x_NK, weight_MK, bias_M, out, pdl)
    return out


def linear_chunk_logits(
    x_NK: torch.Tensor, weight_MK: torch.Tensor, slot_N: torch.Tensor
) -> torch.Tensor:
    """x @ weight^T in float32, by decode's kernel of the family `dot`.

    It is for weights of few rows, such as a router's: programs that read the same rows for
    different lanes run together.

    Args:
        x_NK: float32, float16 or bfloat16; dense rows, any stride between them.
        weight_MK: in x's dtype, dense rows.
        slot_N: int32, -1 = padded lane.

    Returns:
        New [N, M]; padded lanes hold anything. A lane's bits do not depend on the other lanes, on
        its own index or on N. ValueError for a shape or dtype that does not fit.
    """
    check_rows(x_NK=x_NK, weight_MK=weight_MK)
    lanes, K = x_NK.shape
    if weight_MK.shape[1] != K or weight_MK.dtype != x_NK.dtype:
        raise ValueError(
            f"weight_MK is {weight_MK.dtype} {tuple(weight_MK.shape)}: x_NK, {x_NK.dtype} "
            f"{tuple(x_NK.shape)}, takes rows of {K} in its dtype"
        )
    check_lanes(lanes, slot_N=slot_N)
    call = LinearCall(x_NK, weight_MK, slot_N).planned(LOGITS.kind)
    if not is_launched(call):
        return linear_reference(call, LOGITS)
    out = LOGITS.outputs(call)
    launch_linear(call, LOGITS.targets(out))
    return out


def _launch(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    bias_M: torch.Tensor | None,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    N, M = out.shape
    processors = processors_of(out)
    B = tile_outputs(N, M, processors)
    dtype = GLUON_DTYPES[out.dtype]
    tiles = triton.cdiv(N, LANES) * triton.cdiv(M, B)
    launcher(_chunk_kernel, (min(processors, tiles),))(
        described(x_NK, [LANES, _COLUMNS], dtype),
        described(weight_MK, [B, _COLUMNS], dtype),
        bias_M,
        described(out, [LANES, min(B, _STORED)], dtype),
        LANE_TILES=triton.cdiv(N, LANES),
        M=M,
        K=x_NK.shape[1],
        LANES=LANES,
        B=B,
        BLOCK_K=_COLUMNS,
        STAGES=_STAGES[B],
        WARPS=_WARPS,
        num_warps=_WARPS,
        **launch_options(pdl),
    )


@gluon.jit
def _chunk_kernel(
    inputs,
    weights,
    bias_ptr,
    out,
    LANE_TILES: gl.constexpr,
    M: gl.constexpr,
    K: gl.constexpr,
    LANES: gl.constexpr,
    B: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs take tiles alternately, lanes first, so that running programs share weights."""
    dtype: gl.constexpr = inputs.dtype
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: gl.constexpr = LANE_TILES * ((M + B - 1) // B)
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, B, 16])
    x = gl.allocate_shared_memory(dtype, [STAGES, LANES, BLOCK_K], inputs.layout)
    w = gl.allocate_shared_memory(dtype, [STAGES, B, BLOCK_K], weights.layout)
    y = gl.allocate_shared_memory(dtype, out.block_shape, out.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(arrived.index(index), count=1)
    fence_async_shared()
    programs = gl.num_programs(0)
    own_tiles = (TILES - gl.program_id(0) + programs - 1) // programs
    steps = own_tiles * STEPS

    for first in gl.static_range(STAGES - 1):
        ask_weights(inputs, weights, w, arrived, first, steps, 0, LANE_TILES, STEPS, STAGES)
    _wait_for_inputs(PDL, True)
    for first in gl.static_range(STAGES - 1):
        ask_inputs(inputs, x, arrived, first, steps, LANE_TILES, STEPS, STAGES)

    step = 0
    for turn in range(own_tiles):
        sums = gl.zeros([LANES, B], gl.float32, product)
        sums, step = multiply_tile(
            *(inputs, weights, x, w, arrived, sums, step, steps), 0, LANE_TILES, STEPS, STAGES
        )
        tile = gl.program_id(0) + turn * programs
        lane, output = tile % LANE_TILES * LANES, tile // LANE_TILES * B
        if bias_ptr is not None:
            at = output + gl.arange(0, B, gl.SliceLayout(0, product))
            sums += gl.load(bias_ptr + at, mask=at < M, other=0.0).to(gl.float32)[None, :]
        PIECES: gl.constexpr = B // out.block_shape[1]
        if PIECES == 1:
            store_piece(sums.to(dtype), y, out, [lane, output])
        else:
            pieces = gl.permute(gl.reshape(sums, [LANES, PIECES, B // PIECES]), [0, 2, 1])
            low, high = gl.split(pieces)
            store_piece(low.to(dtype), y, out, [lane, output])
            store_piece(high.to(dtype), y, out, [lane, output + B // PIECES])
    tma.store_wait(0)


def linear_chunk_reference(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    bias_M: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear_chunk` in plain PyTorch, with the same bits at any number of lanes."""
    out = output_rows(out, (len(x_NK), len(weight_MK)), dtype=x_NK.dtype, like=x_NK)
    product = matmul_groups(x_NK.float(), weight_MK.float())
    return out.copy_(product if bias_M is None else product + bias_M.float())
