"""All-gather and all-reduce by pushes: one kernel that stores this rank's part into the memory of
all ranks, and takes theirs as it comes. `items` says how.

Sums are float32, in the order of the ranks, rounded once: all ranks get the same bits, those of
`sum_parts`.

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
    push_options,
    push_words,
    sum_words,
    take_words,
)
from graphengine.kernels.core.lanes import FLOAT_DTYPES
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs


def push_gather(peers: Peers, part_NC: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """`[R, N, C]`: the parts of all ranks, in their order.

    All ranks call it with a part of this shape and dtype, after the same calls. A part of more than
    `peers.units` units takes several launches.

    Args:
        part_NC: dense, of any dtype, on the device of `peers`; its bytes a multiple of 4.
        pdl: the launch may overlap the one before, by the rules of `kernels.pdl`.

    Returns:
        A new tensor. ValueError for another shape or size.
    """
    part_W = _words_of(part_NC)
    gathered = part_NC.new_empty((peers.ranks, *part_NC.shape))
    out_RW = gathered.view(peers.ranks, -1).view(torch.int32)
    pieces = zip(
        part_W.split(peers.units * UNIT), out_RW.split(peers.units * UNIT, dim=1), strict=True
    )
    for part, out in pieces:
        _launch(peers, part, out, out_stride=out.stride(0), pdl=pdl)
    return gathered


def push_sum(peers: Peers, part_NC: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """`[N, C]`: the sum of all ranks' parts, from rank 0 on; else as `push_gather`.

    Args:
        part_NC: any float dtype, which is the sum's too.

    Returns:
        A new tensor. ValueError for another shape, size or dtype.
    """
    if part_NC.dtype not in FLOAT_DTYPES:
        raise ValueError(f"parts are {part_NC.dtype}, not one of {FLOAT_DTYPES}")
    part_W, total = _words_of(part_NC), torch.empty_like(part_NC)
    out_W = total.view(-1).view(torch.int32)
    size = peers.units * UNIT
    pieces = zip(part_W.split(size), out_W.split(size), strict=True)
    for part, out in pieces:
        # The pointer's type is the dtype that is added in.
        _launch(peers, part, out.view(part_NC.dtype), pdl=pdl)
    return total


def _words_of(part: torch.Tensor) -> torch.Tensor:
    """The part as int32 `[words]`."""
    if part.dim() != 2 or part.numel() == 0 or not part.is_contiguous() or part.nbytes % 4:
        raise ValueError(
            f"a part must be a dense [N, C] of a multiple of 4 bytes, not {part.dtype} "
            f"{list(part.shape)} of {part.nbytes} bytes"
        )
    return part.view(-1).view(torch.int32)


def _launch(
    peers: Peers, part_W: torch.Tensor, out: torch.Tensor, *, out_stride: int = 0, pdl: bool
) -> None:
    words = part_W.numel()
    launcher(_push_kernel, (min(triton.cdiv(words, UNIT), PROGRAMS),))(
        part_W,
        out,
        words,
        out_stride,
        SUM=out.dim() == 1,
        **push_options(peers),
        **launch_options(pdl),
    )


@triton.jit(do_not_specialize=["words", "out_stride", "rank", "units"])
def _push_kernel(
    part_ptr,
    out_ptr,
    words,
    out_stride,
    peers,
    rank,
    units,
    SUM: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program so many units of words, all of which it stores before it waits for the first.

    With SUM `out` are values of the dtype that is summed, else words of each rank.
    """
    first, step, end = tl.program_id(0), tl.num_programs(0), tl.cdiv(words, UNIT)
    mapped = map_peers(peers, rank, RANKS)
    wait_for_inputs(PDL)
    over = tl.load(peers.over)
    for unit in range(first, end, step):
        word = unit * UNIT + tl.arange(0, UNIT)
        part = tl.load(part_ptr + word, mask=word < words, other=0)
        push_words(peers, mapped, part, unit, units, rank, over, RANKS, UNIT)
    for unit in range(first, end, step):
        found, over = take_words(peers, unit, units, rank, over, RANKS, UNIT, TIMED)
        if SUM:
            DTYPE: tl.constexpr = out_ptr.dtype.element_ty
            PACKED: tl.constexpr = 32 // DTYPE.primitive_bitwidth
            value = unit * UNIT * PACKED + tl.arange(0, UNIT * PACKED)
            total = sum_words(found, DTYPE, RANKS)
            tl.store(out_ptr + value, total.to(DTYPE), mask=value < words * PACKED)
        else:
            word = unit * UNIT + tl.arange(0, UNIT)
            for each in tl.static_range(RANKS):
                row_ptr = out_ptr + each * out_stride.to(tl.int64)
                tl.store(row_ptr + word, found[each], mask=word < words)
