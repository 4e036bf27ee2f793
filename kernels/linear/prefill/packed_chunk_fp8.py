"""Prefill's kernel for weights and activations in 8 bits: e4m3 times e4m3.

Lanes are quantised by `quantise_lanes`; the weight is laid out by `packed.pack`, with one scale for
all columns of a row or scales for groups of 128 columns or a multiple.

The tensor cores sum these products with about 14 bits of mantissa. Each sum covers 128 columns;
sums are then scaled and added up in float32, from the first columns to the last, in every format: a
lane's bits depend neither on other lanes nor on how many there are. Tiles of rows and lanes may be
of any size.

Letters: N lanes, K input features, M weight rows, F ffn width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.devices import processors_of
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import FP8_KV
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.linear.gluon.packed_chunk_fp8_gluon import (
    LINES,
    STEP,
    packed_chunk_fp8_kernel,
)
from graphengine.kernels.linear.kinds import CODES
from graphengine.kernels.linear.packed import BLOCK_ROWS, PackedWeight
from graphengine.kernels.linear.prefill.chunk_tiles import ChunkProduct, Tile, described
from graphengine.kernels.linear.prefill.lane_codes import (
    LANES_AT_ONCE,
    WORD,
    LaneCodes,
)
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.kernels.norm_rope.activation import gate_code

_DTYPES = (torch.float16, torch.bfloat16)
# Most lanes of a part, whose sums of a step are in a warp group's registers beside all totals.
_MOST_OF_PART = 128


@dataclass(frozen=True, slots=True)
class Fp8Tile(Tile):
    """A `Tile`, whose lanes may be multiplied in parts."""

    @property
    def parts(self) -> int:
        """Parts in which the lanes are multiplied, one after the other."""
        return max(1, self.lanes // _MOST_OF_PART)

    @property
    def stages(self) -> int:
        """Steps that are in shared memory."""
        outputs = 2 * self.rows * self.lanes // self.parts
        return self.stages_of(STEP * (self.lanes + self.rows), outputs)


# About what a step costs relative to 128 lanes and rows: smaller tiles multiply less at a time.
_COSTS = {Fp8Tile(256): 1.9, Fp8Tile(128): 1.0, Fp8Tile(128, 1): 0.65}


def takes_fp8(kind: WeightFormat, columns: int) -> bool:
    """Whether a weight in this format, of this many columns, can be multiplied by e4m3 lanes."""
    is_fp8 = CODES[kind.code].stored == FP8_KV
    return is_fp8 and kind.columns % STEP == 0 and columns % WORD == 0


def check_lane_codes(x: LaneCodes, weight: PackedWeight) -> None:
    """Raise ValueError unless these lanes are whole, and the weight can be multiplied by such."""
    lanes, (M, K) = len(x.codes), weight.shape
    if not takes_fp8(weight.format, K):
        raise ValueError(f"a weight {[M, K]} in {weight.format.label} takes no e4m3 activations")
    if len(x.scales) % LANES_AT_ONCE or len(x.scales) < lanes:
        raise ValueError(
            f"x has {lanes} lanes and {len(x.scales)} scales, which are to be a multiple of "
            f"{LANES_AT_ONCE}"
        )


def fp8_tile(M: int, lanes: int, processors: int) -> Fp8Tile:
    """A tile for this many lanes and rows on a GPU of this many multiprocessors."""
    if lanes <= 64:
        return Fp8Tile(max(16, triton.next_power_of_2(lanes)), 1)

    def cost(tile: Fp8Tile) -> float:
        tiles = triton.cdiv(lanes, tile.lanes) * triton.cdiv(M, tile.rows)
        rounds: int = triton.cdiv(tiles, processors * tile.programs)
        return rounds * _COSTS[tile]

    return min(_COSTS, key=cost)


def launch_fp8(product: ChunkProduct, scales: torch.Tensor, tile: Fp8Tile | None) -> None:
    """Launch the kernel for lanes with these scales, whose columns are in order."""
    codes, weight, _, out, gate, pdl, _ = product
    if out.dtype not in _DTYPES:
        raise ValueError(f"packed weights have float16 and bfloat16 outputs, not {out.dtype}")
    lanes, (M, K) = len(codes), weight.shape
    processors = processors_of(codes)
    tile = tile or fp8_tile(M, lanes, processors)
    assert tile.lanes <= LANES_AT_ONCE, f"{tile=}"
    words = weight.codes.view(torch.int32).view(len(weight.codes), -1, 32)
    launcher(packed_chunk_fp8_kernel, product.grid(tile, processors))(
        described(codes, [tile.lanes // tile.parts, STEP], gl.float8e4nv),
        described(words, [tile.rows // BLOCK_ROWS, LINES, 32], gl.int32),
        scales,
        product.factors,
        out,
        lanes,
        out.stride(0),
        M=M,
        K=K,
        GROUP=weight.format.columns,
        SWIGLU=gate_code(gate),
        SPLIT_ROWS=weight.swiglu and not gate,
        WARP_GROUPS=tile.warp_groups,
        PARTS=tile.parts,
        STAGES=tile.stages,
        **tile.options,
        **launch_options(pdl),
    )
