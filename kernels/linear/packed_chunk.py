"""The linears of prefill with weights of 8 and 4 bits, laid out by `packed.pack`.

A chunk's lanes are multiplied by codes that become halves on their way to the tensor cores: no copy
of a weight in 16 bits is ever in memory. A weight has the same values as in decode: codes are
exact, and scales multiply the float32 sums, or the codes where that is exact.

The weight's format determines the order in which columns are added up: a lane's bits depend neither
on other lanes nor on how many there are. Tiles of rows and lanes may be of any size.

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
from graphengine.kernels.core.lanes import check_rows, check_vector, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.gluon.packed_chunk_codes import UNIT
from graphengine.kernels.linear.gluon.packed_chunk_gluon import Factors, packed_chunk_kernel
from graphengine.kernels.linear.kinds import CODES
from graphengine.kernels.linear.packed import BLOCK_ROWS, PackedWeight, unpack
from graphengine.kernels.linear.packed_linear import packed_linear_chunk, takes_chunk
from graphengine.kernels.linear.quantised import dequantise
from graphengine.kernels.norm_rope.activation import Activation, activated_reference, gate_code

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# Programs a multiprocessor -> bytes of shared memory that each may use.
_SHARED = {1: 226 * 1024, 2: 113 * 1024 - 512}
# Registers a thread when a program of one warp group begins; it then takes those of other threads.
_REGISTERS = 128
_LEAST_STAGES, _MOST_STAGES = 3, 8
# Blocks of rows of a weight that the reference holds in float32 at a time.
_REFERENCE_BLOCKS = 128


class ChunkTile(NamedTuple):
    """What a program multiplies at a time; no part of the numerics.

    lanes        a power of two from 16 to 256, or to 128 if sums are scaled by groups
    warp_groups  1 or 2, of 64 rows each
    depth        1, 2 or 4: columns of a step, in multiples of what the format needs
    """

    lanes: int
    warp_groups: int = 2
    depth: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.warp_groups

    @property
    def programs(self) -> int:
        """Programs of a multiprocessor."""
        return 2 if self.warp_groups == 1 and self.lanes <= 64 else 1


# Relative times of a tile, with e4m3 weights on an H200.
_TILE_TIMES = {ChunkTile(256): 1.5, ChunkTile(128): 1.0, ChunkTile(128, 1): 0.62}


def packed_chunk_product(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    swiglu: bool = False,
    activation: Activation = "silu",
    pdl: bool = False,
    tile: ChunkTile | None = None,
) -> torch.Tensor:
    """`x @ weight^T` (+ bias) into `out`.

    Args:
        x_NK: dense rows, any number of them. Padded lanes hold anything, and so do their results.
        weight: in any format.
        bias: [M] in x's dtype.
        out: [N, M] in x's dtype, dense rows; for a SwiGLU gates, then ups. With `swiglu` [N, F]:
            silu(gate) * up in float32, rounded once.
        activation: of the gates, in place of silu.
        pdl: the launch before may still run, and does not write the weight.

    The kernel runs on Hopper GPUs, and wants x in float16 or bfloat16, K a multiple of 8, and
    columns in order. With these operands other GPUs run the decode kernel; otherwise the reference
    runs. ValueError for what does not fit.
    """
    check_rows(x_NK=x_NK)
    (lanes, columns), (M, K) = x_NK.shape, weight.shape
    if columns != K:
        raise ValueError(f"x has K={columns} input features, the weight {K}")
    if swiglu and not weight.swiglu:
        raise ValueError(f"a weight of {M} rows is not laid out as a SwiGLU")
    if bias is not None:
        check_vector("bias", bias, M, x_NK.dtype)
    out = output_rows(out, (lanes, M // 2 if swiglu else M), dtype=x_NK.dtype, like=x_NK)
    if use_wgmma(x_NK):
        _launch(x_NK, weight, bias, out, swiglu and activation, pdl, tile)
    elif takes_chunk(x_NK, weight) and swiglu == weight.swiglu:
        packed_linear_chunk(x_NK, weight, bias, activation=activation, out=out)
    else:
        packed_chunk_reference(x_NK, weight, bias, out=out, swiglu=swiglu, activation=activation)
    return out


def packed_chunk_reference(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    swiglu: bool = False,
    activation: Activation = "silu",
) -> torch.Tensor:
    """`packed_chunk_product` in plain PyTorch: products in float32, rounded once.

    Only some rows of the weight are in float32 at a time.
    """
    x, M = x_NK.float(), weight.shape[0]
    for first in range(0, len(weight.codes), _REFERENCE_BLOCKS):
        part = _blocks_of(weight, first, _REFERENCE_BLOCKS)
        y = x @ dequantise(unpack(part)).t()
        if not weight.swiglu:
            start = first * BLOCK_ROWS
            rows = [slice(start, start + part.shape[0])]
        else:
            start, half = first * (BLOCK_ROWS // 2), part.shape[0] // 2
            rows = [slice(s, s + half) for s in (start, M // 2 + start)]
        if bias is not None:
            y += torch.cat([bias[each] for each in rows]).float()
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


def _chunk_form(weight: PackedWeight, dtype: torch.dtype) -> ChunkForm:
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
    """A tile for so many lanes and rows on a GPU of so many multiprocessors."""
    if lanes <= 64:
        # A step has few products against its other costs, so take long steps.
        width = max(16, triton.next_power_of_2(lanes))
        units = (4 if width < 64 else 2) if form.width == UNIT else 1
        return ChunkTile(width, 1, max(1, units // form.units))
    tiles = [ChunkTile(128), ChunkTile(128, 1)]
    if lanes > 128 and (form.group == 0 or form.folded):
        tiles.insert(0, ChunkTile(256))

    def time(tile: ChunkTile) -> float:
        """Relative time of the program with the most tiles."""
        count = triton.cdiv(lanes, tile.lanes) * triton.cdiv(M, tile.rows)
        return float(triton.cdiv(count, processors) * _TILE_TIMES[tile])

    return min(tiles, key=time)


def _launch(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    swiglu: Activation | Literal[False],
    pdl: bool,
    tile: ChunkTile | None,
) -> None:
    """Launch the kernel on operands that fit each other."""
    if x_NK.dtype not in _DTYPES:
        raise ValueError(f"packed weights take float16 and bfloat16 inputs, not {x_NK.dtype}")
    (lanes, K), M, kind = x_NK.shape, weight.shape[0], weight.format
    if K % linear_gluon.ALIGNMENT:
        raise ValueError(
            f"packed weights take a multiple of {linear_gluon.ALIGNMENT} input features on a GPU, "
            f"not K={K}"
        )
    if weight.order is not None:
        raise ValueError(
            f"the prefill kernel takes columns in order, and {weight.order.numel()} have another"
        )
    if not linear_gluon.is_aligned(x_NK):
        # The address of the inputs must not change the bits of the result.
        x_NK = x_NK.clone(memory_format=torch.contiguous_format)
    processors = processors_of(x_NK)
    form = _chunk_form(weight, x_NK.dtype)
    tile = tile or chunk_tile(form, M, lanes, processors)
    lines, blocks = UNIT * kind.bits // 64, tile.rows // BLOCK_ROWS
    tiles = triton.cdiv(len(weight.codes), blocks) * triton.cdiv(lanes, tile.lanes)
    programs = min(tiles, processors * tile.programs)
    launcher(packed_chunk_kernel, (programs,))(
        _described(x_NK, [tile.lanes, form.width], _DTYPES[x_NK.dtype]),
        _described(weight.codes.view(len(weight.codes), -1, 64), [blocks, lines, 64], gl.int16),
        Factors(weight.scales, weight.zeros, weight.row_scales, bias),
        out,
        lanes,
        out.stride(0),
        M=M,
        K=K,
        CODE=kind.code,
        GROUP=form.group,
        FOLD=form.folded,
        SWIGLU=gate_code(swiglu),
        SPLIT_ROWS=weight.swiglu and not swiglu,
        WARP_GROUPS=tile.warp_groups,
        PART=form.units,
        DEPTH=form.units * tile.depth,
        STAGES=_stages(form, kind.bits, tile),
        num_warps=4,
        maxnreg=_REGISTERS if tile.warp_groups == 1 else None,
        **launch_options(pdl),
    )


def _stages(form: ChunkForm, bits: int, tile: ChunkTile) -> int:
    """Steps that fit shared memory beside the outputs on their way to memory."""
    step = form.units * tile.depth * UNIT * (tile.lanes * 2 + tile.rows * bits // 8)
    stages = min(_MOST_STAGES, (_SHARED[tile.programs] - tile.lanes * tile.rows * 2) // step)
    if stages < _LEAST_STAGES:
        raise ValueError(f"{tile}: {stages} of {_LEAST_STAGES} steps of {step} bytes fit")
    return stages


def _described(tensor: torch.Tensor, box: list[int], dtype: gl.dtype) -> TensorDescriptor:
    """A tensor's descriptor for the TMA, which reads zeros past the edges."""
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return TensorDescriptor.from_tensor(tensor, box, layout)
