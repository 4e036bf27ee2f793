"""Products of the pairs of a chunk with packed experts, on Hopper: the rows of each expert's pairs
are put side by side, and the tensor cores multiply blocks of them (`packed_chunk_gluon.py`).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.devices import processors_of
from graphengine.kernels.core.dispatch import use_wgmma
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.experts.packed.packed_chunk_gluon import packed_experts_chunk_kernel
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.experts.pairs import (
    NO_ACTIVATION,
    ActivationArgs,
    ExpertWeight,
    PairProduct,
)
from graphengine.kernels.experts.prefill.gathered import in_order
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

# Pairs of a tile. More would not fit registers where sums are scaled by groups.
_BLOCK_PAIRS = (64, 128)
# The pairs that are loaded at a time, and the least that are multiplied.
_BOX_PAIRS = 32


def fits_packed_chunk(weight: ExpertWeight, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply a chunk of this dtype with this weight, given that Triton
    kernels run.
    """
    return (
        isinstance(weight, PackedExperts)
        and weight.format.is_common
        and weight.shape[2] % PACKED_COLUMNS == 0
        and dtype in GLUON_DTYPES
        and use_wgmma(weight.codes)
    )


def takes_chunk(product: PairProduct, activation: ActivationArgs) -> bool:
    """Whether the kernel takes this product of a chunk, given that Triton kernels run at all."""
    weight, x, grouping = product.weight_EMK, product.x, product.grouping
    return (
        fits_packed_chunk(weight, x.dtype)
        and activation.squares_TN is None
        and grouping is not None
        and grouping.size <= _BLOCK_PAIRS[-1]
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
    x = in_order(product, codes=True)
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
    lanes = next(lanes for lanes in _BLOCK_PAIRS if lanes >= size)
    # Where registers allow it a third warp group hides the others' waits.
    scaled = form.group > 0 and not form.folded
    warp_groups = 3 if bits == 4 and (lanes == _BLOCK_PAIRS[0] or not scaled) else 2
    units = 4 if bits == 8 and lanes == _BLOCK_PAIRS[0] else 2
    depth = max(1, units // form.units) if form.width == UNIT else 1
    return ChunkTile(lanes, warp_groups, depth)
