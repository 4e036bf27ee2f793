"""Inputs of the pairs of a chunk, copied side by side for each expert, so that the tensor memory
accelerator (TMA) can load those of a block of pairs as one box.

Letters: P pairs, K input features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.experts.pairs import PairProduct

# Rows and columns that a program copies at a time.
_ROWS, _COLUMNS = 16, 256


def in_order(product: PairProduct, *, codes: bool = False) -> torch.Tensor:
    """Copy the inputs of grouped pairs into a new [P, K], in the order of the grouping.

    Rows after those of the live pairs hold anything. With `codes` columns are in the order of
    `unit_halves`, in which a thread has its own codes; then there are [P, K rounded up to 16], with
    zeros past K.
    """
    x, grouping = product.x, product.grouping
    assert grouping is not None
    pairs, K = product.routes.expert.numel(), x.shape[1]
    gathered = x.new_empty(pairs, triton.cdiv(K, 16) * 16 if codes else K)
    columns = min(_COLUMNS, triton.next_power_of_2(gathered.shape[1]))
    launcher(gather_kernel, (product.block_count, triton.cdiv(gathered.shape[1], columns)))(
        x,
        grouping.order,
        grouping.blocks,
        gathered,
        x.stride(0),
        K=K,
        WIDTH=gathered.shape[1],
        CODES=codes,
        OF_ROW=pairs // len(x),
        BLOCKS=product.block_count,
        ROWS=_ROWS,
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
    CODES: tl.constexpr,
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
        if CODES:
            sixteens = tl.reshape(x, (ROWS, BLOCK_K // 16, 4, 2, 2))
            x = tl.reshape(tl.permute(sixteens, (0, 1, 3, 2, 4)), (ROWS, BLOCK_K))
        out_ptrs = out_ptr + (first + place).to(tl.int64)[:, None] * WIDTH + k[None, :]
        tl.store(out_ptrs, x, mask=there[:, None] & (k < WIDTH)[None, :])
