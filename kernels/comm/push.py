"""All-gather, all-reduce and reduce-scatter by pushes: one kernel stores this rank's part, or its
part for each rank, into the memory of all ranks, and takes theirs as they arrive. `items` explains
how.

Sums are float32, in rank order, rounded once: all ranks get the same bits, those of `sum_parts`.

Letters: R ranks, N lanes, C columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.items import (
    PROGRAMS,
    UNIT,
    Peers,
    map_peers,
    next_tags,
    own_for_each,
    push_options,
    push_words,
    same_for_all,
    sum_words,
    take_words,
)
from graphengine.kernels.core.lanes import FLOAT_DTYPES
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs


def push_gather(peers: Peers, part_NC: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Gather the parts of all ranks, in rank order: `[R, N, C]`.

    All ranks call it with parts of one shape and dtype, after the same calls. A part of more than
    `peers.units` units takes several launches.

    Args:
        part_NC: dense, of any dtype, on the device of `peers`; its bytes a multiple of 4.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        A new tensor. ValueError for another shape or size.
    """
    part_W = words_of(part_NC)
    gathered = part_NC.new_empty((peers.ranks, *part_NC.shape))
    out_RW = gathered.view(peers.ranks, -1).view(torch.int32)
    pieces = zip(part_W.split(peers.words), out_RW.split(peers.words, dim=1), strict=True)
    for part, out in pieces:
        _launch(peers, part[None], out, out_stride=out.stride(0), pdl=pdl)
    return gathered


def push_sum(peers: Peers, part_NC: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Add up all ranks' parts, from rank 0 on: `[N, C]`. Otherwise like `push_gather`.

    Args:
        part_NC: any float dtype; the sum has the same dtype.

    Returns:
        A new tensor. ValueError for another shape, size or dtype.
    """
    if part_NC.dtype not in FLOAT_DTYPES:
        raise ValueError(f"parts are {part_NC.dtype}, not one of {FLOAT_DTYPES}")
    total = torch.empty_like(part_NC)
    _sum(peers, words_of(part_NC)[None], total, pdl=pdl)
    return total


def push_own_sum(peers: Peers, parts_RNC: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Add up the parts that all ranks have for this one, from rank 0 on: `[N, C]`. Otherwise like
    `push_sum`.

    Args:
        parts_RNC: this rank's part for each rank, in rank order; dense.

    Returns:
        A new tensor. ValueError for another shape, size or dtype, or another number of parts.
    """
    if parts_RNC.dim() != 3 or len(parts_RNC) != peers.ranks:
        raise ValueError(
            f"parts for {peers.ranks} ranks must be a dense [{peers.ranks}, N, C], not "
            f"{list(parts_RNC.shape)}"
        )
    if parts_RNC.dtype not in FLOAT_DTYPES:
        raise ValueError(f"parts are {parts_RNC.dtype}, not one of {FLOAT_DTYPES}")
    words = [words_of(part) for part in parts_RNC]
    total = torch.empty_like(parts_RNC[0])
    _sum(peers, parts_RNC.view(-1).view(torch.int32).view(len(words), -1), total, pdl=pdl)
    return total


def _sum(peers: Peers, part_DW: torch.Tensor, total: torch.Tensor, *, pdl: bool) -> None:
    """Push the same words to all ranks (D = 1), or to each rank its own, and add up the received
    words.
    """
    size = peers.words
    out_W = total.view(-1).view(torch.int32)
    for part, out in zip(part_DW.split(size, dim=1), out_W.split(size), strict=True):
        # The pointer's type tells the kernel the dtype of the values.
        _launch(peers, part, out.view(total.dtype), pdl=pdl)


def words_of(part: torch.Tensor) -> torch.Tensor:
    """The part as int32 `[words]`."""
    if part.dim() != 2 or part.numel() == 0 or not part.is_contiguous() or part.nbytes % 4:
        raise ValueError(
            f"a part must be a dense [N, C] of a multiple of 4 bytes, not {part.dtype} "
            f"{list(part.shape)} of {part.nbytes} bytes"
        )
    return part.view(-1).view(torch.int32)


def _launch(
    peers: Peers, part_DW: torch.Tensor, out: torch.Tensor, *, out_stride: int = 0, pdl: bool
) -> None:
    parts, words = part_DW.shape
    launcher(_push_kernel, (min(triton.cdiv(words, UNIT), PROGRAMS),))(
        part_DW,
        out,
        words,
        part_DW.stride(0),
        out_stride,
        peers.rank,
        peers.tensors,
        OWN=parts > 1,
        SUM=out.dim() == 1,
        UNIT=UNIT,
        num_warps=4,
        **push_options(peers),
        **launch_options(pdl),
    )


@triton.jit(do_not_specialize=["words", "part_stride", "out_stride", "rank"])
def _push_kernel(
    part_ptr,
    out_ptr,
    words,
    part_stride,
    out_stride,
    rank,
    peers,
    OWN: tl.constexpr,
    SUM: tl.constexpr,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program stores several units of words, all of them before it waits for the first.

    With OWN there is a part for each rank, else one for all. With SUM `out` holds the summed
    values, in the parts' dtype, else the words of each rank.
    """
    first, step, end = tl.program_id(0), tl.num_programs(0), tl.cdiv(words, UNIT)
    mapped = map_peers(peers, RANKS)
    wait_for_inputs(PDL)
    over = tl.load(peers.over)
    for unit in range(first, end, step):
        word = unit * UNIT + tl.arange(0, UNIT)
        if OWN:
            pushed = own_for_each(part_ptr + word, word < words, part_stride, rank, RANKS)
        else:
            pushed = same_for_all(tl.load(part_ptr + word, mask=word < words, other=0), RANKS)
        push_words(mapped, pushed, word, next_tags(peers, word, None), None, over, RANKS, SIZE)
    for unit in range(first, end, step):
        word = unit * UNIT + tl.arange(0, UNIT)
        tag = next_tags(peers, word, None)
        found, over = take_words(peers, mapped, word, tag, None, over, RANKS, SIZE, TIMED)
        if SUM:
            DTYPE: tl.constexpr = out_ptr.dtype.element_ty
            PACKED: tl.constexpr = 32 // DTYPE.primitive_bitwidth
            value = unit * UNIT * PACKED + tl.arange(0, UNIT * PACKED)
            total = sum_words(found, DTYPE, RANKS)
            tl.store(out_ptr + value, total.to(DTYPE), mask=value < words * PACKED)
        else:
            for each in tl.static_range(RANKS):
                row_ptr = out_ptr + each * out_stride.to(tl.int64)
                tl.store(row_ptr + word, found[each], mask=word < words)
