"""Adapters' additions to the products of prompts' chunks; all lanes of a chunk have one adapter.

The BLAS writes a product, and `add_chunk_delta` adds to it, as the order of the BLAS's own sums
must not depend on there being an adapter. Where gates and ups never reach memory, `chunk_delta`
computes what their kernel adds before the activation.

A launch has one chunk, or those of P prompts (`core/chunks.py`). A lane's bits depend neither on
the other lanes nor on their number.

Letters as in `slots.py`, and: T lanes of the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.chunks import check_chunks, chunk_of_tile, chunks_of, tile_count
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_vector, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.lora.reference import chunk_delta_reference
from graphengine.kernels.lora.slots import LoraSlots

# Lanes, rows of A and columns of a program that shrinks; weight rows of one that expands.
_BLOCK_T, _BLOCK_Q, _BLOCK_K, _BLOCK_M = 32, 32, 64, 128


def add_chunk_delta(
    out_TM: torch.Tensor,
    x_TK: torch.Tensor,
    slots: LoraSlots,
    adapter_P: torch.Tensor,
    query_start_P1: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """out += scale * B (A x), in place, rounded once more; without an adapter nothing is written.

    Two kernels on the current stream, without a host sync.

    out_TM          the product, in x's dtype; dense rows
    x_TK            its inputs; padded lanes hold anything, and so do their results
    adapter_P       int32: the slot of each chunk's adapter, -1: none
    query_start_P1  int32: lane where each chunk begins, then where the last one ends; lanes past it
                    are padded. None: all lanes are of one chunk

    Sums are float32; A x is rounded to x's dtype. ValueError for a shape or dtype that does not
    fit.
    """
    output_rows(out_TM, (len(x_TK), slots.rows), dtype=x_TK.dtype, like=x_TK)
    return _run(out_TM, x_TK, slots, adapter_P, query_start_P1, adds=True, pdl=pdl)


def chunk_delta(
    x_TK: torch.Tensor,
    slots: LoraSlots,
    adapter_P: torch.Tensor,
    query_start_P1: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """New `[T, M]` in x's dtype: scale * B (A x); -0.0 without an adapter. Else like
    `add_chunk_delta`.
    """
    out = torch.empty(len(x_TK), slots.rows, dtype=x_TK.dtype, device=x_TK.device)
    return _run(out, x_TK, slots, adapter_P, query_start_P1, adds=False, pdl=pdl)


def _run(
    out_TM: torch.Tensor,
    x_TK: torch.Tensor,
    slots: LoraSlots,
    adapter_P: torch.Tensor,
    query_start_P1: torch.Tensor | None,
    *,
    adds: bool,
    pdl: bool,
) -> torch.Tensor:
    slots.check(x_TK)
    prompts = check_chunks(query_start_P1)
    check_vector("adapter_P", adapter_P, prompts or 1, torch.int32)
    if not use_triton(x_TK):
        for chunk, adapter in zip(chunks_of(query_start_P1), adapter_P.tolist(), strict=True):
            chunk_delta_reference(out_TM[chunk], x_TK[chunk], slots, adapter, adds=adds)
        return out_TM
    (lanes, K), rows, options = x_TK.shape, slots.rows, launch_options(pdl)
    between = x_TK.new_empty(lanes, slots.parts * slots.rank)
    tiles = triton.cdiv(lanes, _BLOCK_T)
    if prompts is not None:
        tiles = tile_count(lanes, prompts, size=_BLOCK_T, spare=1)
    launcher(_shrink_kernel, (tiles, triton.cdiv(between.shape[1], _BLOCK_Q)))(
        x_TK,
        adapter_P,
        query_start_P1,
        slots.down_AQK,
        slots.scale_AP,
        between,
        lanes,
        x_TK.stride(0),
        K=K,
        RANK=slots.rank,
        PARTS=slots.parts,
        PROMPTS=prompts,
        BLOCK_T=_BLOCK_T,
        BLOCK_Q=_BLOCK_Q,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
        **options,
    )
    launcher(_expand_kernel, (tiles, triton.cdiv(rows, _BLOCK_M)))(
        between,
        adapter_P,
        query_start_P1,
        slots.up_AMR,
        slots.part_M,
        out_TM,
        lanes,
        out_TM.stride(0),
        M=rows,
        RANK=slots.rank,
        PARTS=slots.parts,
        ADDS=adds,
        PROMPTS=prompts,
        BLOCK_T=_BLOCK_T,
        BLOCK_M=_BLOCK_M,
        BLOCK_R=max(16, triton.next_power_of_2(slots.rank)),
        num_warps=4,
        **options,
    )
    return out_TM


@triton.jit
def _lanes_of_tile(query_start_ptr, lanes, PROMPTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """The number of the program's chunk, its tile's first lane, and the lane where the chunk ends,
    which a tile may be past.
    """
    chunk, first, count, tile = 0, 0, lanes, tl.program_id(0)
    if query_start_ptr is not None:
        chunk, first, count, tile = chunk_of_tile(query_start_ptr, tile, PROMPTS, BLOCK_T, 1)
    return chunk, first + tile * BLOCK_T, first + count


@triton.jit(do_not_specialize=["lanes"])
def _shrink_kernel(
    x_ptr,
    adapter_ptr,
    query_start_ptr,
    down_ptr,
    scale_ptr,
    between_ptr,
    lanes,
    x_stride,
    K: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    PROMPTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_T lanes and BLOCK_Q rows of A."""
    ROWS: tl.constexpr = PARTS * RANK
    row = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    wait_for_inputs(PDL)
    chunk, begin, end = _lanes_of_tile(query_start_ptr, lanes, PROMPTS, BLOCK_T)
    adapter = tl.load(adapter_ptr + chunk)
    if (adapter < 0) | (begin >= end):
        return
    lane = begin + tl.arange(0, BLOCK_T)
    x_ptrs = x_ptr + lane.to(tl.int64) * x_stride
    row_ptrs = down_ptr + (adapter.to(tl.int64) * ROWS + tl.minimum(row, ROWS - 1)) * K
    y = tl.zeros((BLOCK_T, BLOCK_Q), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptrs[:, None] + k[None, :], mask=(lane < end)[:, None] & (k < K)[None, :], other=0.0
        )
        down = tl.load(row_ptrs[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
        y = tl.dot(x, down, y, input_precision="ieee")
    part = tl.minimum(row // RANK, PARTS - 1)
    y *= tl.load(scale_ptr + adapter * PARTS + part)[None, :]
    at = lane.to(tl.int64)[:, None] * ROWS + row[None, :]
    stored = (lane < end)[:, None] & (row < ROWS)[None, :]
    tl.store(between_ptr + at, y.to(between_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["lanes"])
def _expand_kernel(
    between_ptr,
    adapter_ptr,
    query_start_ptr,
    up_ptr,
    part_ptr,
    out_ptr,
    lanes,
    out_stride,
    M: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    PROMPTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_T lanes and BLOCK_M weight rows: a product for each part."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    part = tl.load(part_ptr + m, mask=m < M, other=-1)
    wait_for_inputs(PDL)
    chunk, begin, end = _lanes_of_tile(query_start_ptr, lanes, PROMPTS, BLOCK_T)
    if begin >= end:
        return
    adapter = tl.load(adapter_ptr + chunk)
    lane = begin + tl.arange(0, BLOCK_T)
    stored = (lane < end)[:, None] & (m < M)[None, :]
    out_ptrs = out_ptr + lane.to(tl.int64)[:, None] * out_stride + m[None, :]
    if adapter < 0:
        if not ADDS:
            # A constant -0.0 would become 0.0.
            nothing = tl.full((BLOCK_T, BLOCK_M), -(2**31), tl.int32)
            nothing = nothing.to(tl.float32, bitcast=True)
            tl.store(out_ptrs, nothing.to(out_ptr.dtype.element_ty), mask=stored)
        return
    lane_ptrs = between_ptr + lane.to(tl.int64) * (PARTS * RANK)
    row_ptrs = up_ptr + (adapter.to(tl.int64) * M + m) * RANK
    y = tl.zeros((BLOCK_T, BLOCK_M), dtype=tl.float32)
    for each in tl.static_range(PARTS):
        between = tl.load(
            lane_ptrs[:, None] + (each * RANK + r)[None, :],
            mask=(lane < end)[:, None] & (r < RANK)[None, :],
            other=0.0,
        )
        up = tl.load(
            row_ptrs[None, :] + r[:, None],
            mask=(r < RANK)[:, None] & (part == each)[None, :],
            other=0.0,
        )
        y = tl.dot(between, up, y, input_precision="ieee")
    if ADDS:
        y += tl.load(out_ptrs, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=stored)
