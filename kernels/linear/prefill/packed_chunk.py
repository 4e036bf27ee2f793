"""The linears of prefill with weights of 8 and 4 bits, laid out by `packed.pack`.

A chunk's lanes are multiplied by codes that become halves on their way to the tensor cores: no copy
of a weight in 16 bits is ever in memory. A weight has the same values as in decode: codes are
exact, and scales multiply the float32 sums, or the codes where that is exact.

In the kernels the weight's format determines the order in which columns are added up: a lane's bits
depend neither on other lanes nor on how many there are. Tiles of rows and lanes may be of any size.

Letters: N lanes, K input features, M weight rows, F ffn width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.devices import H200, device_of, processors_of
from graphengine.kernels.core.dispatch import use_gluon, use_wgmma
from graphengine.kernels.core.lanes import check_rows, check_vector, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import Targets
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.gluon.packed_chunk_codes import UNIT
from graphengine.kernels.linear.gluon.packed_chunk_gluon import packed_chunk_kernel
from graphengine.kernels.linear.kinds import CODES
from graphengine.kernels.linear.launches import launch_linear, packed_misfit
from graphengine.kernels.linear.packed import BLOCK_ROWS, PackedWeight, unpack
from graphengine.kernels.linear.packed_cut import packed_plan
from graphengine.kernels.linear.prefill.chunk_tiles import (
    ChunkProduct,
    Tile,
    described,
)
from graphengine.kernels.linear.prefill.lane_codes import LaneCodes, lane_values
from graphengine.kernels.linear.prefill.linear_swiglu import GLUON_DTYPES
from graphengine.kernels.linear.prefill.packed_chunk_fp8 import (
    Fp8Tile,
    check_lane_codes,
    launch_fp8,
)
from graphengine.kernels.linear.quantised import WeightFormat, dequantise
from graphengine.kernels.linear.reference import matmul_groups
from graphengine.kernels.norm_rope.activation import Activation, activated_reference, gate_code

# Blocks of rows of a weight that the reference holds in float32 at a time.
_REFERENCE_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class ChunkTile(Tile):
    """A `Tile`, of up to 128 lanes if sums are scaled by groups.

    depth  1, 2 or 4: columns of a step, in multiples of what the format needs. The products of a
           unit of 64 columns run while the next unit of the step is converted
    """

    depth: int = 1


# Relative times of tiles of these lanes and warp groups, with e4m3 weights on an H200.
_TILE_TIMES = {(256, 2): 1.5, (128, 2): 1.0, (128, 1): 0.62}


def packed_chunk_product(
    x_NK: torch.Tensor | LaneCodes,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    swiglu: bool = False,
    activation: Activation = "silu",
    pdl: bool = False,
    tile: ChunkTile | Fp8Tile | None = None,
    delta: torch.Tensor | None = None,
    any_lanes: bool = False,
) -> torch.Tensor:
    """`x @ weight^T` (+ delta + bias) into `out`.

    Args:
        x_NK: dense rows, any number of them. Padded lanes hold anything, and so do their results.
            Lanes in 8 bits are multiplied as they are, if `takes_fp8` accepts the weight.
        weight: in any format.
        bias: [M] in the dtype of `out`.
        out: [N, M] in x's dtype, with lanes in 8 bits in any; dense rows; for a SwiGLU gates, then
            ups. With `swiglu` [N, F]: silu(gate) * up in float32, rounded once.
        activation: of the gates, in place of silu.
        pdl: the launch before may still run, and does not write the weight.
        delta: dense [N, M] in the dtype of `out`, added to the products.
        any_lanes: the reference, too, sums in an order that does not depend on N. The kernels
            always do.

    The kernels run on Hopper GPUs, and want x or `out` in float16 or bfloat16, K a multiple of 8,
    columns in order, and a format that is common. With such an x other GPUs run the decode kernel,
    as all do for other formats; otherwise the reference runs. ValueError for what does not fit.
    """
    if isinstance(x_NK, LaneCodes):
        check_lane_codes(x_NK, weight)
        rows, dtype = x_NK.codes, out.dtype
    else:
        check_rows(x_NK=x_NK)
        rows, dtype = x_NK, x_NK.dtype
    (lanes, columns), (M, K) = rows.shape, weight.shape
    if columns != K:
        raise ValueError(f"x has K={columns} input features, the weight {K}")
    if swiglu and not weight.swiglu:
        raise ValueError(f"a weight of {M} rows is not laid out as a SwiGLU")
    if bias is not None:
        check_vector("bias", bias, M, dtype)
    if delta is not None:
        check_vector("delta", delta.view(-1), lanes * M, dtype)
    out = output_rows(out, (lanes, M // 2 if swiglu else M), dtype=dtype, like=out)
    gate: Activation | Literal[False] = swiglu and activation
    product = ChunkProduct(rows, weight, bias, out, gate, pdl, delta)
    if use_wgmma(rows) and weight.format.is_common:
        _launch(product, x_NK, tile)
    elif rows is x_NK and decodes_chunk(rows, weight) and swiglu == weight.swiglu:
        decode_chunk(rows, weight, bias, out=out, swiglu=gate, delta=delta)
    else:
        packed_chunk_reference(
            x_NK,
            weight,
            bias,
            out=out,
            swiglu=swiglu,
            activation=activation,
            delta=delta,
            any_lanes=any_lanes,
        )
    return out


def decodes_chunk(x_NK: torch.Tensor, weight: PackedWeight) -> bool:
    """Whether `decode_chunk` can run."""
    return use_gluon(x_NK) and packed_misfit(x_NK, weight) is None


def decode_chunk(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    swiglu: Activation | Literal[False] = False,
    delta: torch.Tensor | None = None,
) -> None:
    """The product of any number of lanes by decode's kernel; operands have been checked.

    Programs that read the same weights for different lanes run together, so weights are read from
    memory about once.
    """
    plan = packed_plan(weight.format, *weight.shape, "dot", device_of(x_NK) or H200)
    live = torch.zeros(len(x_NK), dtype=torch.int32, device=x_NK.device)
    call = LinearCall(x_NK, weight, live, bias=bias, delta_NM=delta, plan=plan)
    launch_linear(call, Targets(out=out, gate=gate_code(swiglu)))


def packed_chunk_reference(
    x_NK: torch.Tensor | LaneCodes,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    swiglu: bool = False,
    activation: Activation = "silu",
    delta: torch.Tensor | None = None,
    any_lanes: bool = False,
) -> torch.Tensor:
    """`packed_chunk_product` in plain PyTorch: products in float32, rounded once.

    Only some rows of the weight are in float32 at a time.
    """
    x = lane_values(x_NK) if isinstance(x_NK, LaneCodes) else x_NK.float()
    M = weight.shape[0]
    for first in range(0, len(weight.codes), _REFERENCE_BLOCKS):
        part = _blocks_of(weight, first, _REFERENCE_BLOCKS)
        floats = dequantise(unpack(part))
        y = matmul_groups(x, floats) if any_lanes else x @ floats.t()
        if not weight.swiglu:
            start = first * BLOCK_ROWS
            rows = [slice(start, start + part.shape[0])]
        else:
            start, half = first * (BLOCK_ROWS // 2), part.shape[0] // 2
            rows = [slice(s, s + half) for s in (start, M // 2 + start)]
        if bias is not None:
            y += torch.cat([bias[each] for each in rows]).float()
        if delta is not None:
            y += torch.cat([delta[:, each] for each in rows], dim=1).float()
        if swiglu:
            gate, up = y.chunk(2, dim=1)
            y, rows = activated_reference(gate, activation) * up, rows[:1]
        for each, values in zip(rows, y.chunk(len(rows), dim=1), strict=True):
            out[:, each] = values.to(out.dtype)
    return out


def _blocks_of(weight: PackedWeight, first: int, count: int) -> PackedWeight:
    """`count` blocks of rows of a weight from `first` on, as a weight."""
    (M, K), part = weight.shape, slice(first, first + count)
    rows = slice(first * BLOCK_ROWS, (first + count) * BLOCK_ROWS)
    whole = M // 2 if weight.swiglu else M
    block = BLOCK_ROWS // 2 if weight.swiglu else BLOCK_ROWS
    outputs = min(whole - first * block, count * block)
    return weight._replace(
        shape=(2 * outputs if weight.swiglu else outputs, K),
        codes=weight.codes[part],
        scales=None if weight.scales is None else weight.scales[part],
        zeros=None if weight.zeros is None else weight.zeros[part],
        row_scales=None if weight.row_scales is None else weight.row_scales[rows],
        factors=None if weight.factors is None else weight.factors[part],
    )


class ChunkForm(NamedTuple):
    """How the columns of a weight are added up: part of the numerics.

    group   columns that share a scale; 0: all of them, so that only rows have scales
    folded  scales multiply the halves instead of sums
    units   units of 64 columns whose sum is scaled
    width   columns of a unit whose sum is scaled
    """

    group: int
    folded: bool
    units: int
    width: int


def chunk_form(weight: PackedWeight, dtype: torch.dtype) -> ChunkForm:
    """How the kernel adds up the columns of a weight for inputs of this dtype."""
    scales, kind = weight.scales, weight.format
    if scales is None:
        return ChunkForm(0, False, 1, UNIT)
    group = kind.columns or max(UNIT, triton.next_power_of_2(weight.shape[1]))
    # A half holds the product of two small floats exactly, a bfloat16 a power of two times a code.
    exact = scales.dtype == torch.float8_e4m3fn or (
        scales.dtype == torch.uint8 and dtype == torch.bfloat16
    )
    if exact and CODES[kind.code].folds and weight.zeros is None:
        return ChunkForm(group, True, 1, UNIT)
    return ChunkForm(group, False, 2 if group >= 2 * UNIT else 1, min(group, UNIT))


def chunk_tile(form: ChunkForm, M: int, lanes: int, processors: int) -> ChunkTile:
    """A tile for this many lanes and rows on a GPU of this many multiprocessors."""
    if lanes <= 64:
        # A step has few products against its other costs, so take long steps.
        width = max(16, triton.next_power_of_2(lanes))
        units = (4 if width < 64 else 2) if form.width == UNIT else 1
        return ChunkTile(width, 1, max(1, units // form.units))
    depth = 1 if form.units > 1 or form.width < UNIT else 2
    tiles = [ChunkTile(128, 2, depth), ChunkTile(128, 1, depth)]
    if lanes > 128 and (form.group == 0 or form.folded):
        tiles.insert(0, ChunkTile(256))

    def time(tile: ChunkTile) -> float:
        """Relative time of the program with the most tiles."""
        count = triton.cdiv(lanes, tile.lanes) * triton.cdiv(M, tile.rows)
        return float(triton.cdiv(count, processors) * _TILE_TIMES[tile.lanes, tile.warp_groups])

    return min(tiles, key=time)


def _launch(
    product: ChunkProduct, x: torch.Tensor | LaneCodes, tile: ChunkTile | Fp8Tile | None
) -> None:
    """Launch the Hopper kernel for these inputs."""
    if product.weight.order is not None:
        columns = product.weight.order.numel()
        raise ValueError(f"the prefill kernel takes columns in order, and {columns} have another")
    if isinstance(x, LaneCodes):
        assert not isinstance(tile, ChunkTile), f"{tile=}"
        launch_fp8(product, x.scales, tile)
    else:
        assert not isinstance(tile, Fp8Tile), f"{tile=}"
        _launch_halves(product, tile)


def _launch_halves(product: ChunkProduct, tile: ChunkTile | None) -> None:
    x, weight, _, out, gate, pdl, _ = product
    if (misfit := packed_misfit(x, weight)) is not None:
        raise ValueError(misfit)
    (lanes, K), M, kind = x.shape, weight.shape[0], weight.format
    if not linear_gluon.is_aligned(x):
        # The address of the inputs must not change the bits of the result.
        x = x.clone(memory_format=torch.contiguous_format)
    processors = processors_of(x)
    form = chunk_form(weight, x.dtype)
    tile = tile or chunk_tile(form, M, lanes, processors)
    lines = UNIT * kind.bits // 64
    launcher(packed_chunk_kernel, product.grid(tile, processors))(
        described(x, [tile.lanes, form.width], GLUON_DTYPES[x.dtype]),
        described(weight.codes.view(len(weight.codes), -1, 64), [4, lines, 64], gl.int16),
        product.factors,
        out,
        lanes,
        out.stride(0),
        M=M,
        K=K,
        SWIGLU=gate_code(gate),
        SPLIT_ROWS=weight.swiglu and not gate,
        **chunk_options(form, kind, tile),
        **launch_options(pdl),
    )


def chunk_options(form: ChunkForm, kind: WeightFormat, tile: ChunkTile) -> dict[str, Any]:
    """Constants and compiler options of a launch that multiplies a weight of this kind."""
    return {
        "CODE": kind.code,
        "GROUP": form.group,
        "FOLD": form.folded,
        "WARP_GROUPS": tile.warp_groups,
        "PART": form.units,
        "DEPTH": form.units * tile.depth,
        "STAGES": stages_of(form, kind.bits, tile),
        **tile.options,
    }


def stages_of(form: ChunkForm, bits: int, tile: ChunkTile) -> int:
    """Steps that fit shared memory beside the outputs on their way to memory."""
    step = form.units * tile.depth * UNIT * (tile.lanes * 2 + tile.rows * bits // 8)
    return tile.stages_of(step, tile.lanes * tile.rows * 2)
