"""Pieces of a chunk: prefill cuts it at absolute multiples of PIECE positions, so that what is
computed for a piece does not depend on the chunk that it is in.

A chunk that begins within a piece has the rest of that piece, and may end within one more.

A launch has one chunk, whose live lanes come first. Or it has those of P prompts, one after the
other: `query_start` then says where each begins, as in attention (`kernels/attention/prefill.py`).
Programs take tiles of lanes of one chunk. The tiles of chunk p are numbered from
`query_start[p] // size + spare * p` on, which leaves at least enough numbers for the chunks before
it, whatever their lengths: one spare tile a chunk if its tiles begin with it, two if they begin at
multiples of positions. So no program adds up the tiles of other chunks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.lanes import check_lanes

PIECE = 64
"""Positions of a piece."""
# Spare tiles of a chunk that is cut into pieces.
SPARE = 2
_SPARE = tl.constexpr(SPARE)


def piece_count(lanes: int, prompts: int | None = None) -> int:
    """The most pieces that a chunk of this many lanes may overlap.

    prompts  number of prompts whose chunks have these lanes together; None: it is one chunk
    """
    if prompts is not None:
        return tile_count(lanes, prompts, size=PIECE, spare=SPARE)
    return int(triton.cdiv(lanes, PIECE)) + 1


def tile_count(lanes: int, prompts: int, *, size: int, spare: int) -> int:
    """Numbers for the tiles of `prompts` chunks with this many lanes together."""
    return lanes // size + spare * prompts


def check_chunks(query_start_P1: torch.Tensor | None) -> int | None:
    """P, the number of chunks; None: there is one. ValueError for what is no int32 [P + 1]."""
    if query_start_P1 is None:
        return None
    shape = tuple(query_start_P1.shape)
    if query_start_P1.dtype != torch.int32 or len(shape) != 1 or shape[0] < 2:
        raise ValueError(
            f"query_start must be a dense int32 [P + 1] of 1 or more chunks, not "
            f"{query_start_P1.dtype} {list(shape)}"
        )
    check_lanes(shape[0], query_start=query_start_P1)
    return shape[0] - 1


def chunks_of(query_start_P1: torch.Tensor | None) -> list[slice]:
    """The lanes of each chunk, for references: on a GPU this waits for the device."""
    if query_start_P1 is None:
        return [slice(None)]
    return [slice(first, end) for first, end in pairwise(query_start_P1.tolist())]


@triton.jit
def live_lanes(slot_ptr, lanes, BLOCK_T: tl.constexpr):
    """How many of a chunk's lanes are live; these come first."""
    t = tl.arange(0, BLOCK_T)
    slots = tl.load(slot_ptr + t, mask=t < lanes, other=-1)
    return tl.sum((slots >= 0).to(tl.int32), 0)


@triton.jit
def first_tile(first, chunk, SIZE: tl.constexpr, SPARE: tl.constexpr):
    """The number of the first tile of a chunk that begins at lane `first`."""
    return first // SIZE + SPARE * chunk


@triton.jit
def chunk_of_tile(
    query_start_ptr, tile, PROMPTS: tl.constexpr, SIZE: tl.constexpr, SPARE: tl.constexpr
):
    """The first lane and the number of lanes of a tile's chunk, and which of its tiles it is.

    A number that no tile has is that of a tile past the end of a chunk.
    """
    p = tl.arange(0, triton.next_power_of_2(PROMPTS))
    starts = tl.load(query_start_ptr + p, mask=p < PROMPTS, other=0)
    begun = (p < PROMPTS) & (first_tile(starts, p, SIZE, SPARE) <= tile)
    chunk = tl.sum(begun.to(tl.int32), 0) - 1
    first, count = lanes_of_chunk(query_start_ptr, chunk)
    return first, count, tile - first_tile(first, chunk, SIZE, SPARE)


@triton.jit
def lanes_of_chunk(query_start_ptr, chunk):
    """A chunk's first lane, and how many it has."""
    first = tl.load(query_start_ptr + chunk)
    return first, tl.load(query_start_ptr + chunk + 1) - first


@triton.jit
def first_piece(first, chunk, PIECE: tl.constexpr):
    """The number of a chunk's first piece, where a launch has several chunks."""
    return first_tile(first, chunk, PIECE, _SPARE).to(tl.int64)


@triton.jit
def lanes_of_piece(
    slot_ptr,
    position_ptr,
    query_start_ptr,
    lanes,
    piece,
    PROMPTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Lanes [PIECE] of a piece, and which of them are live lanes of its chunk."""
    if query_start_ptr is None:
        begin = 0
        count = live_lanes(slot_ptr, lanes, BLOCK_T)
        t = piece * PIECE + tl.arange(0, PIECE)
        if tl.load(slot_ptr) >= 0:
            t -= tl.load(position_ptr) % PIECE
    else:
        begin, count, own = chunk_of_tile(query_start_ptr, piece, PROMPTS, PIECE, _SPARE)
        # A chunk without lanes may begin past the last lane.
        position = tl.load(position_ptr + begin, mask=count > 0, other=0)
        t = own * PIECE - position % PIECE + tl.arange(0, PIECE)
    return (begin + t).to(tl.int64), (t >= 0) & (t < count)
