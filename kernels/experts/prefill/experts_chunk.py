"""Products of the pairs of a chunk with experts in 16 bits, on Hopper: the rows of each expert's
pairs are put side by side, and the tensor cores multiply blocks of them (`experts_chunk_gluon.py`).

Letters: E experts, P pairs, K input features, M weight rows of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from graphengine.kernels.core.devices import processors_of
from graphengine.kernels.core.dispatch import use_wgmma
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.experts.pairs import (
    NO_ACTIVATION,
    ActivationArgs,
    ExpertWeight,
    PairProduct,
)
from graphengine.kernels.experts.plans import MOST_COUNTED
from graphengine.kernels.experts.prefill.experts_chunk_gluon import (
    BOX_ROWS,
    COLUMNS,
    GROUP_ROWS,
    LEAST_WIDTH,
    experts_chunk_kernel,
)
from graphengine.kernels.experts.prefill.gathered import in_order
from graphengine.kernels.linear.prefill.chunk_tiles import Tile, described
from graphengine.kernels.linear.prefill.linear_swiglu import ALIGNMENT, GLUON_DTYPES


@dataclass(frozen=True, slots=True)
class ExpertTile(Tile):
    """The tile that a program multiplies at a time; it does not affect the numerics.

    lanes        most pairs: 32, 64 or 128
    warp_groups  1 or 2, of 128 weight rows each
    """

    @property
    def rows(self) -> int:
        return GROUP_ROWS * self.warp_groups

    @property
    def programs(self) -> int:
        """Programs of a multiprocessor."""
        return 2 if self.warp_groups == 1 else 1

    @property
    def stages(self) -> int:
        """Steps that fit shared memory beside the outputs on their way to memory."""
        step = (self.rows + self.lanes) * COLUMNS * 2
        return self.stages_of(step, self.warp_groups * self.lanes * BOX_ROWS * 2)

    def row_tiles(self, outputs: int, gated: bool) -> int:
        """Tiles of an expert with this many outputs; those of a gate have two rows."""
        return -(-outputs * (2 if gated else 1) // self.rows)


def fits_experts_chunk(weight: ExpertWeight) -> bool:
    """Whether the kernel can multiply a chunk with this weight, given that Triton kernels run."""
    return (
        isinstance(weight, torch.Tensor)
        and weight.dtype in GLUON_DTYPES
        and not weight.shape[2] * weight.itemsize % ALIGNMENT
        and not weight.data_ptr() % ALIGNMENT
        and use_wgmma(weight)
    )


def takes_experts_chunk(product: PairProduct, activation: ActivationArgs) -> bool:
    """Whether the kernel takes this product of a chunk, given that Triton kernels run at all."""
    return (
        fits_experts_chunk(product.weight_EMK)
        and activation.squares_TN is None
        and product.grouping is not None
        and product.grouping.size <= MOST_COUNTED
    )


def launch_experts_chunk(
    product: PairProduct,
    out: torch.Tensor,
    activation: ActivationArgs | None = None,
    *,
    tile: ExpertTile | None = None,
) -> None:
    """Put the inputs of a product that `takes_experts_chunk` accepts in order, and multiply them.

    out         [P, outputs] in the dtype of x, dense
    activation  None: down, whose products are the outputs
    tile        in place of the one that `tile_of` chooses
    """
    weight, grouping = product.weight_EMK, product.grouping
    assert isinstance(weight, torch.Tensor) and grouping is not None
    experts, M, K = weight.shape
    gated = activation is not None and activation.gated
    processors = processors_of(weight)
    used = min(experts, product.routes.expert.numel())
    tile = tile or tile_of(out.shape[1], gated, grouping.size, used, processors)
    tiles = product.block_count * tile.row_tiles(out.shape[1], gated)
    dtype = GLUON_DTYPES[weight.dtype]
    constants = (activation or NO_ACTIVATION).options
    launcher(experts_chunk_kernel, (min(tiles, processors * tile.programs),))(
        described(in_order(product), [LEAST_WIDTH, COLUMNS], dtype),
        described(weight.view(experts * M, K), [BOX_ROWS, COLUMNS], dtype),
        product.bias_EM,
        grouping.order,
        grouping.blocks,
        out,
        M=M,
        K=K,
        SWIGLU=gated,
        LIMIT=constants["LIMIT"],
        SLOPE=constants["SLOPE"],
        BLOCKS=product.block_count,
        EXPERTS=experts,
        L=tile.lanes,
        WARP_GROUPS=tile.warp_groups,
        STAGES=tile.stages,
        **tile.options,
        **launch_options(product.pdl),
    )


def tile_of(outputs: int, gated: bool, size: int, experts: int, processors: int) -> ExpertTile:
    """The tile for blocks of at most `size` pairs of about this many experts.

    Two warp groups share inputs; one, with half of the rows, gives more processors work.
    """
    lanes = max(LEAST_WIDTH, triton.next_power_of_2(size))
    tile = ExpertTile(lanes)
    if experts * tile.row_tiles(outputs, gated) < processors:
        return ExpertTile(lanes, warp_groups=1)
    return tile
