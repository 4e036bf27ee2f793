"""Products of the pairs of a chunk with packed experts, on Hopper: the rows of each expert's pairs
are put side by side, and the tensor cores multiply blocks of them (`packed_chunk_gluon.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.devices import processors_of
from graphengine.kernels.core.dispatch import use_wgmma
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.experts.packed.packed_chunk_gluon import packed_experts_chunk_kernel
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.experts.pairs import NO_ACTIVATION, ActivationArgs, PairProduct
from graphengine.kernels.linear.gluon.packed_chunk_codes import UNIT
from graphengine.kernels.linear.gluon.packed_chunk_gluon import Factors
from graphengine.kernels.linear.packed import BLOCK_ROWS
from graphengine.kernels.linear.packed_cut import PACKED_COLUMNS
from graphengine.kernels.linear.prefill.chunk_tiles import described
from graphengine.kernels.linear.prefill.linear_swiglu import GLUON_DTYPES
from graphengine.kernels.linear.prefill.packed_chunk import (
    ChunkForm,
    ChunkTile,
    chunk_form,
    chunk_options,
)

BLOCK_PAIRS = (64, 128)
"""Pairs of a tile. More would not fit registers where sums are scaled by groups."""
# The pairs that are loaded at a time, and the least that are multiplied.
_BOX_PAIRS = 32
# Of a program that puts inputs in order, at a time.
_GATHERED_ROWS, _GATHERED_COLUMNS = 16, 256


def takes_chunk(product: PairProduct, activation: ActivationArgs) -> bool:
    """Whether the kernel takes this product of a chunk, given that Triton kernels run at all."""
    weight, x, grouping = product.weight_EMK, product.x, product.grouping
    return (
        isinstance(weight, PackedExperts)
        and weight.format.is_common
        and weight.shape[2] % PACKED_COLUMNS == 0
        and x.dtype in GLUON_DTYPES
        and use_wgmma(x)
        and activation.squares_TN is None
        and grouping is not None
        and grouping.size <= BLOCK_PAIRS[-1]
    )


def launch_chunk(
    product: PairProduct, out: torch.Tensor, activation: ActivationArgs = NO_ACTIVATION
) -> None:
    """Put the inputs of a product that `takes_chunk` accepts in order, and multiply them.

    out  [P, outputs] in the dtype of x, dense
    """
    weight, grouping = product.weight_EMK, product.grouping
    assert isinstance(weight, PackedExperts) and grouping is not None
    (experts, M, K), kind, swiglu = weight.shape, weight.format, weight.swiglu
    x = _in_order(product)
    form = chunk_form(weight.expert(0), x.dtype)
    processors = processors_of(x)
    tile = tile_of(form, kind.bits, grouping.size)
    lines, rows = UNIT * kind.bits // 64, tile.rows // BLOCK_ROWS
    row_tiles = triton.cdiv(weight.codes.shape[1], rows)
    grid = (min(product.block_count * row_tiles, processors * tile.programs),)
    codes = weight.codes.view(experts * weight.codes.shape[1], -1, 64)
    constants = activation.options
    launcher(packed_experts_chunk_kernel, grid)(
        described(x, [_BOX_PAIRS, form.width], GLUON_DTYPES[x.dtype]),
        described(codes, [4, lines, 64], gl.int16),
        Factors(weight.scales, weight.zeros, weight.row_scales, product.bias_EM),
        grouping.order,
        grouping.blocks,
        out,
        M=M,
        K=K,
        SWIGLU=swiglu,
        LIMIT=constants["LIMIT"],
        SLOPE=constants["SLOPE"],
        BLOCKS=product.block_count,
        EXPERTS=experts,
        L=tile.lanes,
        **chunk_options(form, kind, tile),
        **launch_options(product.pdl),
    )


def tile_of(form: ChunkForm, bits: int, size: int) -> ChunkTile:
    """The tile for blocks of this many pairs, of a weight of 4 or 8 bits; it affects speed only."""
    lanes = next(lanes for lanes in BLOCK_PAIRS if lanes >= size)
    # Where registers allow it a third warp group hides the others' waits.
    scaled = form.group > 0 and not form.folded
    warp_groups = 3 if bits == 4 and (lanes == BLOCK_PAIRS[0] or not scaled) else 2
    units = 4 if bits == 8 and lanes == BLOCK_PAIRS[0] else 2
    depth = max(1, units // form.units) if form.width == UNIT else 1
    return ChunkTile(lanes, warp_groups, depth)


def _in_order(product: PairProduct) -> torch.Tensor:
    """The inputs of the pairs in the order of the grouping, with columns in that of `unit_halves`:
    [P, K rounded up to 16], zeros past K; rows past the live ones hold anything.
    """
    x, grouping = product.x, product.grouping
    assert grouping is not None
    pairs, K = product.routes.expert.numel(), x.shape[1]
    gathered = x.new_empty(pairs, triton.cdiv(K, 16) * 16)
    columns = min(_GATHERED_COLUMNS, triton.next_power_of_2(K))
    launcher(gather_kernel, (product.block_count, triton.cdiv(gathered.shape[1], columns)))(
        x,
        grouping.order,
        grouping.blocks,
        gathered,
        x.stride(0),
        K=K,
        WIDTH=gathered.shape[1],
        OF_ROW=pairs // len(x),
        BLOCKS=product.block_count,
        ROWS=_GATHERED_ROWS,
        BLOCK_K=columns,
        num_warps=4,
        **launch_options(product.pdl),
    )
    return gathered


@triton.jit
def gather_kernel(
    x_ptr,
    order_ptr,
    blocks_ptr,
    out_ptr,
    x_stride,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    OF_ROW: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for a block of pairs and BLOCK_K columns, ROWS at a time; OF_ROW pairs share a
    row of x.
    """
    block = tl.program_id(0)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    wait_for_inputs(PDL)
    if tl.load(blocks_ptr + block) < 0:
        return
    first = tl.load(blocks_ptr + BLOCKS + block)
    count = tl.load(blocks_ptr + 2 * BLOCKS + block)
    for start in range(0, count, ROWS):
        place = start + tl.arange(0, ROWS)
        there = place < count
        row = tl.load(order_ptr + first + place, mask=there, other=0) // OF_ROW
        x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
        x = tl.load(x_ptrs, mask=there[:, None] & (k < K)[None, :], other=0.0)
        # The order of columns in which `unit_halves` has a thread's own codes.
        sixteens = tl.reshape(x, (ROWS, BLOCK_K // 16, 4, 2, 2))
        x = tl.reshape(tl.permute(sixteens, (0, 1, 3, 2, 4)), (ROWS, BLOCK_K))
        out_ptrs = out_ptr + (first + place).to(tl.int64)[:, None] * WIDTH + k[None, :]
        tl.store(out_ptrs, x, mask=there[:, None] & (k < WIDTH)[None, :])
