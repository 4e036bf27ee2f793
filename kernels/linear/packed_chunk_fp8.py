"""The linears of prefill with weights and activations in 8 bits: e4m3 times e4m3.

Lanes are quantised by `quantise_lanes`; the weight is laid out by `packed.pack`, with one scale for
all columns of a row or scales for groups of 128 columns or a multiple.

The tensor cores sum these products with about 14 bits of mantissa. Each sum covers 128 columns;
sums are then scaled and added up in float32, from the first columns to the last, in every format: a
lane's bits depend neither on other lanes nor on how many there are. Tiles of rows and lanes may be
of any size.

Letters: N lanes, K input features, M weight rows, F ffn width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graphengine.kernels.core.devices import processors_of
from graphengine.kernels.core.dispatch import use_wgmma
from graphengine.kernels.core.lanes import check_vector, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import FP8_KV
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.linear.gluon.packed_chunk_fp8_gluon import (
    LINES,
    STEP,
    packed_chunk_fp8_kernel,
)
from graphengine.kernels.linear.gluon.packed_chunk_gluon import Factors
from graphengine.kernels.linear.kinds import CODES
from graphengine.kernels.linear.lane_codes import LANES_AT_ONCE, WORD, LaneCodes, lane_values
from graphengine.kernels.linear.packed import BLOCK_ROWS, PackedWeight
from graphengine.kernels.linear.packed_chunk import packed_chunk_reference
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.kernels.norm_rope.activation import Activation, gate_code

_DTYPES = (torch.float16, torch.bfloat16)
# Programs a multiprocessor -> bytes of shared memory that each may use.
_SHARED = {1: 226 * 1024, 2: 113 * 1024 - 512}
# Registers a thread when a program of one warp group begins; it then takes those of other threads.
_REGISTERS = 128
_LEAST_STAGES, _MOST_STAGES = 3, 8
# Most lanes of a part, whose sums of a step are in a warp group's registers beside all totals.
_MOST_OF_PART = 128


class Fp8Tile(NamedTuple):
    """What a program multiplies at a time; no part of the numerics.

    lanes        a power of two from 16 to 256
    warp_groups  1 or 2, of 64 rows each
    """

    lanes: int
    warp_groups: int = 2

    @property
    def rows(self) -> int:
        return 64 * self.warp_groups

    @property
    def parts(self) -> int:
        """Parts in which the lanes are multiplied, one after the other."""
        return max(1, self.lanes // _MOST_OF_PART)

    @property
    def programs(self) -> int:
        """Programs of a multiprocessor."""
        return 2 if self.warp_groups == 1 and self.lanes <= 64 else 1

    @property
    def stages(self) -> int:
        """Steps that fit shared memory beside the outputs on their way to memory."""
        step = STEP * (self.lanes + self.rows)
        outputs = 2 * self.rows * self.lanes // self.parts
        return min(_MOST_STAGES, (_SHARED[self.programs] - outputs) // step)


# About what a step costs relative to 128 lanes and rows: smaller tiles multiply less at a time.
_COSTS = {Fp8Tile(256): 1.9, Fp8Tile(128): 1.0, Fp8Tile(128, 1): 0.65}


def takes_fp8(kind: WeightFormat, columns: int) -> bool:
    """Whether a weight in this format, of so many columns, can be multiplied by e4m3 lanes."""
    is_fp8 = CODES[kind.code].stored == FP8_KV
    return is_fp8 and kind.columns % STEP == 0 and columns % WORD == 0


def packed_chunk_fp8_product(
    x: LaneCodes,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    swiglu: bool = False,
    activation: Activation = "silu",
    pdl: bool = False,
    tile: Fp8Tile | None = None,
) -> torch.Tensor:
    """`x @ weight^T` (+ bias) into `out`.

    Args:
        x: any number of lanes. Padded lanes hold anything, and so do their results.
        weight: one that `takes_fp8` accepts.
        bias: [M] in the dtype of `out`.
        out: [N, M] in float32 (on a CPU), float16 or bfloat16, dense rows; for a SwiGLU gates, then
            ups. With `swiglu` [N, F]: silu(gate) * up in float32, rounded once.
        activation: of the gates, in place of silu.
        pdl: the launch before may still run, and does not write the weight.

    The kernel runs on Hopper GPUs; elsewhere the reference does. ValueError for what does not fit.
    """
    (lanes, columns), (M, K) = x.codes.shape, weight.shape
    if not takes_fp8(weight.format, K):
        raise ValueError(f"a weight {[M, K]} in {weight.format.label} takes no e4m3 activations")
    if columns != K:
        raise ValueError(f"x has K={columns} input features, the weight {K}")
    if len(x.scales) % LANES_AT_ONCE or len(x.scales) < lanes:
        raise ValueError(
            f"x has {lanes} lanes and {len(x.scales)} scales, which are to be a multiple of "
            f"{LANES_AT_ONCE}"
        )
    if swiglu and not weight.swiglu:
        raise ValueError(f"a weight of {M} rows is not laid out as a SwiGLU")
    if bias is not None:
        check_vector("bias", bias, M, out.dtype)
    width = M // 2 if swiglu else M
    out = output_rows(out, (lanes, width), dtype=out.dtype, like=x.scales)
    if not use_wgmma(x.codes):
        return packed_chunk_fp8_reference(
            x, weight, bias, out=out, swiglu=swiglu, activation=activation
        )
    _launch(x, weight, bias, out, swiglu and activation, pdl, tile)
    return out


def packed_chunk_fp8_reference(
    x: LaneCodes,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    swiglu: bool = False,
    activation: Activation = "silu",
) -> torch.Tensor:
    """`packed_chunk_fp8_product` in plain PyTorch: codes are dequantised, products are float32."""
    return packed_chunk_reference(
        lane_values(x), weight, bias, out=out, swiglu=swiglu, activation=activation
    )


def fp8_tile(M: int, lanes: int, processors: int) -> Fp8Tile:
    """A tile for so many lanes and rows on a GPU of so many multiprocessors."""
    if lanes <= 64:
        return Fp8Tile(max(16, triton.next_power_of_2(lanes)), 1)

    def cost(tile: Fp8Tile) -> float:
        tiles = triton.cdiv(lanes, tile.lanes) * triton.cdiv(M, tile.rows)
        rounds: int = triton.cdiv(tiles, processors * tile.programs)
        return rounds * _COSTS[tile]

    return min(_COSTS, key=cost)


def _launch(
    x: LaneCodes,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    swiglu: Activation | Literal[False],
    pdl: bool,
    tile: Fp8Tile | None,
) -> None:
    """Launch the kernel on operands that fit each other."""
    if out.dtype not in _DTYPES:
        raise ValueError(f"packed weights have float16 and bfloat16 outputs, not {out.dtype}")
    if weight.order is not None:
        raise ValueError(
            f"the prefill kernel takes columns in order, and {weight.order.numel()} have another"
        )
    lanes, (M, K) = len(x.codes), weight.shape
    processors = processors_of(x.codes)
    tile = tile or fp8_tile(M, lanes, processors)
    assert tile.lanes <= LANES_AT_ONCE, f"{tile=}"
    if tile.stages < _LEAST_STAGES:
        raise ValueError(f"{tile}: {tile.stages} of {_LEAST_STAGES} steps fit")
    blocks = tile.rows // BLOCK_ROWS
    tiles = triton.cdiv(len(weight.codes), blocks) * triton.cdiv(lanes, tile.lanes)
    programs = min(tiles, processors * tile.programs)
    words = weight.codes.view(torch.int32).view(len(weight.codes), -1, 32)
    launcher(packed_chunk_fp8_kernel, (programs,))(
        _described(x.codes, [tile.lanes // tile.parts, STEP], gl.float8e4nv),
        _described(words, [blocks, LINES, 32], gl.int32),
        x.scales,
        Factors(weight.scales, weight.zeros, weight.row_scales, bias),
        out,
        lanes,
        out.stride(0),
        M=M,
        K=K,
        GROUP=weight.format.columns,
        SWIGLU=gate_code(swiglu),
        SPLIT_ROWS=weight.swiglu and not swiglu,
        WARP_GROUPS=tile.warp_groups,
        PARTS=tile.parts,
        STAGES=tile.stages,
        num_warps=4,
        maxnreg=_REGISTERS if tile.warp_groups == 1 else None,
        **launch_options(pdl),
    )


def _described(tensor: torch.Tensor, box: list[int], dtype: gl.dtype) -> TensorDescriptor:
    """A tensor's descriptor for the TMA, which reads zeros past the edges."""
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return TensorDescriptor.from_tensor(tensor, box, layout)
