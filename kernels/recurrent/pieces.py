"""Pieces of a chunk: prefill cuts it at absolute multiples of PIECE positions, so that what is
computed for a piece does not depend on the chunk that it is in.

A chunk that begins within a piece has the rest of that piece, and may end within one more.

A launch has one chunk, whose live lanes come first, or those of P prompts (`core/chunks.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.chunks import chunk_of_tile, first_tile, tile_count

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


@triton.jit
def live_lanes(slot_ptr, lanes, BLOCK_T: tl.constexpr):
    """How many of a chunk's lanes are live; these come first."""
    t = tl.arange(0, BLOCK_T)
    slots = tl.load(slot_ptr + t, mask=t < lanes, other=-1)
    return tl.sum((slots >= 0).to(tl.int32), 0)


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
        _, begin, count, own = chunk_of_tile(query_start_ptr, piece, PROMPTS, PIECE, _SPARE)
        # A chunk without lanes may begin past the last lane.
        position = tl.load(position_ptr + begin, mask=count > 0, other=0)
        t = own * PIECE - position % PIECE + tl.arange(0, PIECE)
    return (begin + t).to(tl.int64), (t >= 0) & (t < count)
