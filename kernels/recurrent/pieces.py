"""Pieces of a chunk: prefill cuts it at absolute multiples of PIECE positions, so that what is
computed for a piece does not depend on the chunk that it is in.

A chunk that begins within a piece has the rest of that piece, and may end within one more.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIECE = 64
"""Positions of a piece."""


def piece_count(lanes: int) -> int:
    """The most pieces that a chunk of this many lanes may overlap."""
    return int(triton.cdiv(lanes, PIECE)) + 1


@triton.jit
def live_lanes(slot_ptr, lanes, BLOCK_T: tl.constexpr):
    """How many of a chunk's lanes are live; these come first."""
    t = tl.arange(0, BLOCK_T)
    slots = tl.load(slot_ptr + t, mask=t < lanes, other=-1)
    return tl.sum((slots >= 0).to(tl.int32), 0)


@triton.jit
def lanes_of_piece(
    slot_ptr, position_ptr, lanes, piece, BLOCK_T: tl.constexpr, PIECE: tl.constexpr
):
    """Lanes [PIECE] of a chunk's piece, and which of them are live lanes of the chunk."""
    live = live_lanes(slot_ptr, lanes, BLOCK_T)
    lane = piece * PIECE + tl.arange(0, PIECE)
    if tl.load(slot_ptr) >= 0:
        lane -= tl.load(position_ptr) % PIECE
    return lane.to(tl.int64), (lane >= 0) & (lane < live)
