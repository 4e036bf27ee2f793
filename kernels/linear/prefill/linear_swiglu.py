"""Gate, up and SwiGLU of many lanes in one kernel on Hopper, in Gluon: for prefill.

The BLAS writes gates and ups to memory, and `swiglu` reads them again: for 1,024 tokens of an 8B
model 56 MiB, more memory than all else that a prefill graph needs. Here they stay in registers,
next to each other: one `wgmma` has a tile's gates and ups, and reads its lanes once.

A persistent GEMM: each program goes through its tiles of 128 lanes, and through the columns of
each, as one sequence of steps, with the tensor memory accelerator (TMA) some steps ahead of
`wgmma`, across tiles as well. Source: the persistent matmuls of Triton's and Gluon's tutorials,
which are CUTLASS's. Gluon has no interpreter: on a CPU the reference runs.

Letters: N lanes, K input features, F outputs; B outputs of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from graphengine.kernels.core.devices import device_of, processors_of
from graphengine.kernels.core.dispatch import use_wgmma
from graphengine.kernels.core.lanes import check_rows, check_vector, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.gluon.chunk_gluon import (
    ask_inputs,
    ask_weights,
    multiply_tile,
    store_piece,
)
from graphengine.kernels.linear.linear_triton import load_delta
from graphengine.kernels.linear.prefill.chunk_tiles import described
from graphengine.kernels.norm_rope.activation import (
    Activation,
    activated,
    activated_reference,
    gate_code,
)

LANES = 128
"""Lanes of a tile: two warp groups of 64."""

_COLUMNS = 64
_WARPS = 8
ALIGNMENT = 16
"""The TMA wants rows whose pitch and address are multiples of this many bytes."""

GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# Outputs of a tile -> steps in shared memory. Tiles of fewer outputs read more shared memory for
# each, which does not matter with one tile of lanes.
_STAGES = {128: 4, 64: 6}

# Gluon and Triton compile the same text, but a function belongs to one of them.
_activated = gluon.jit(activated.fn)
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)
_load_delta = gluon.jit(load_delta.fn)


class _DeltaArgs(NamedTuple):
    """The delta that is added to the products of these lanes, dense [N, 2F]."""

    rows: torch.Tensor
    lanes: int


def fuses_swiglu(weight_MK: torch.Tensor, lanes: int | None) -> bool:
    """Whether `linear_swiglu` can serve this many lanes, and faster than BLAS and `swiglu`; None:
    whether it can.

    It needs a Hopper GPU, 16-bit weights in aligned rows, more than half a tile of lanes, and tiles
    that keep the multiprocessors busy: the BLAS has tiles of more shapes.
    """
    if not use_wgmma(weight_MK) or not _can_be_fused(weight_MK):
        return False
    outputs = weight_MK.shape[0] // 2
    return lanes is None or tile_outputs(lanes, outputs, processors_of(weight_MK)) is not None


def _can_be_fused(weight_MK: torch.Tensor) -> bool:
    """Whether the TMA takes the weight's rows, and dense rows of the result."""
    outputs = weight_MK.shape[0] // 2
    return fits_tma(weight_MK) and not outputs * weight_MK.itemsize % ALIGNMENT


def tile_outputs(lanes: int, outputs: int, processors: int) -> int | None:
    """B for this many lanes and outputs; None where the BLAS is faster.

    Found on an H200 with the weights of llama 1B and 8B: up to two tiles of lanes take as long as
    loading their weights from memory, for which 4 of 5 processors suffice.
    """
    if 2 * lanes <= LANES:
        return None
    for width in _STAGES if lanes <= LANES else (128,):
        tiles = triton.cdiv(lanes, LANES) * triton.cdiv(outputs, width)
        busy = tiles / (triton.cdiv(tiles, processors) * processors)
        if busy >= (0.8 if lanes <= 2 * LANES else 0.9):
            return width
    return None


def linear_swiglu(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    *,
    activation: Activation = "silu",
    out: torch.Tensor | None = None,
    pdl: bool = False,
    delta_NM: torch.Tensor | None = None,
) -> torch.Tensor:
    """silu(gate) * up of each lane, where [gate F | up F] = x @ weight^T (+ delta).

    Args:
        x_NK: float16 or bfloat16, dense rows in memory that is aligned to 16 bytes, any aligned
            stride between them. Padded lanes hold anything, and so do their results.
        weight_MK: [2F, K] in x's dtype, laid out like x.
        activation: of the gates, in place of silu.
        out: [N, F] in x's dtype, laid out like x; may not share memory with it.
        pdl: the launch before may still run, and does not write the weight.
        delta_NM: dense [N, 2F] in x's dtype.

    Returns:
        [N, F] in x's dtype; sums and SwiGLU in float32, rounded once. A lane's bits do not depend
        on the other lanes, on its own index or on N. ValueError for a shape or dtype that does not
        fit, and for memory that `fuses_swiglu` would not have taken.
    """
    check_rows(x_NK=x_NK, weight_MK=weight_MK)
    (N, K), (M, columns) = x_NK.shape, weight_MK.shape
    if M % 2 or columns != K or weight_MK.dtype != x_NK.dtype:
        raise ValueError(
            f"weight_MK is {weight_MK.dtype} {tuple(weight_MK.shape)}: x_NK, {x_NK.dtype} "
            f"{tuple(x_NK.shape)}, takes an even number of rows of {K}"
        )
    out = output_rows(out, (N, M // 2), dtype=x_NK.dtype, like=x_NK)
    if delta_NM is not None:
        check_vector("delta_NM", delta_NM.view(-1), N * M, x_NK.dtype)
    if device_of(x_NK) is None:
        return linear_swiglu_reference(
            x_NK, weight_MK, activation=activation, out=out, delta_NM=delta_NM
        )
    for name, rows in {"x_NK": x_NK, "weight_MK": weight_MK, "out": out}.items():
        if not fits_tma(rows):
            raise ValueError(
                f"{name} is {rows.dtype} in rows {rows.stride(0) * rows.itemsize} bytes apart from "
                f"{rows.data_ptr():#x}: it must be 16-bit, in rows aligned to {ALIGNMENT} bytes"
            )
    _launch(x_NK, weight_MK, out, activation, pdl, delta_NM)
    return out


def fits_tma(rows: torch.Tensor) -> bool:
    """Whether the TMA takes these rows, of a dtype that `wgmma` multiplies here."""
    apart = rows.stride(0) * rows.itemsize
    return rows.dtype in GLUON_DTYPES and not apart % ALIGNMENT and not rows.data_ptr() % ALIGNMENT


def _launch(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    out: torch.Tensor,
    activation: Activation,
    pdl: bool,
    delta_NM: torch.Tensor | None,
) -> None:
    N, F = out.shape
    processors = processors_of(out)
    B = tile_outputs(N, F, processors) or 128
    dtype = GLUON_DTYPES[out.dtype]
    tiles = triton.cdiv(N, LANES) * triton.cdiv(F, B)
    launcher(_swiglu_kernel, (min(processors, tiles),))(
        described(x_NK, [LANES, _COLUMNS], dtype),
        described(weight_MK, [B, _COLUMNS], dtype),
        described(out, [LANES, B], dtype),
        None if delta_NM is None else _DeltaArgs(delta_NM, N),
        LANE_TILES=triton.cdiv(N, LANES),
        F=F,
        K=x_NK.shape[1],
        LANES=LANES,
        B=B,
        BLOCK_K=_COLUMNS,
        STAGES=_STAGES[B],
        WARPS=_WARPS,
        ACTIVATION=gate_code(activation),
        num_warps=_WARPS,
        **launch_options(pdl),
    )


@gluon.jit
def _swiglu_kernel(
    inputs,
    weights,
    out,
    delta,
    LANE_TILES: gl.constexpr,
    F: gl.constexpr,
    K: gl.constexpr,
    LANES: gl.constexpr,
    B: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs take tiles alternately, lanes first, so that running programs share weights."""
    dtype: gl.constexpr = inputs.dtype
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: gl.constexpr = LANE_TILES * ((F + B - 1) // B)
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * B, 16])
    x = gl.allocate_shared_memory(dtype, [STAGES, LANES, BLOCK_K], inputs.layout)
    w = gl.allocate_shared_memory(dtype, [STAGES, 2 * B, BLOCK_K], weights.layout)
    y = gl.allocate_shared_memory(dtype, [LANES, B], out.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(arrived.index(index), count=1)
    fence_async_shared()
    programs = gl.num_programs(0)
    own_tiles = (TILES - gl.program_id(0) + programs - 1) // programs
    steps = own_tiles * STEPS

    for first in gl.static_range(STAGES - 1):
        ask_weights(inputs, weights, w, arrived, first, steps, F, LANE_TILES, STEPS, STAGES)
    _wait_for_inputs(PDL, True)
    for first in gl.static_range(STAGES - 1):
        ask_inputs(inputs, x, arrived, first, steps, LANE_TILES, STEPS, STAGES)

    step = 0
    for turn in range(own_tiles):
        both = gl.zeros([LANES, 2 * B], gl.float32, product)
        both, step = multiply_tile(
            *(inputs, weights, x, w, arrived, both, step, steps), F, LANE_TILES, STEPS, STAGES
        )
        gate, up = gl.split(gl.permute(gl.reshape(both, [LANES, 2, B]), [0, 2, 1]))
        if delta is not None:
            of_tile = gl.program_id(0) + turn * programs
            layout: gl.constexpr = gate.type.layout
            lane = of_tile % LANE_TILES * LANES + gl.arange(0, LANES, gl.SliceLayout(1, layout))
            output = of_tile // LANE_TILES * B + gl.arange(0, B, gl.SliceLayout(0, layout))
            there = (lane < delta.lanes)[:, None] & (output < F)[None, :]
            gate += _load_delta(delta.rows, lane, output, there, 2 * F)
            up += _load_delta(delta.rows, lane, F + output, there, 2 * F)
        result = (_activated(gate, ACTIVATION) * up).to(dtype)
        tile = gl.program_id(0) + turn * programs
        at = [tile % LANE_TILES * LANES, tile // LANE_TILES * B]
        store_piece(result, y, out, at)
    tma.store_wait(0)


def linear_swiglu_reference(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    *,
    activation: Activation = "silu",
    out: torch.Tensor | None = None,
    delta_NM: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear_swiglu` in plain PyTorch."""
    shape = (len(x_NK), len(weight_MK) // 2)
    out = output_rows(out, shape, dtype=x_NK.dtype, like=x_NK)
    both = x_NK.float() @ weight_MK.float().t()
    if delta_NM is not None:
        both = both + delta_NM.float()
    gate, up = both.chunk(2, dim=1)
    return out.copy_(activated_reference(gate, activation) * up)
