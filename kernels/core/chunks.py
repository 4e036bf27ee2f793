"""Launches that have the chunks of P prompts, one after the other: which lanes and tiles are whose.

`query_start`, int32 [P + 1], says where each chunk begins, and then where the last one ends, as in
attention (`kernels/attention/prefill.py`). Launches without it have one chunk.

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
def first_tile(first, chunk, SIZE: tl.constexpr, SPARE: tl.constexpr):
    """The number of the first tile of a chunk that begins at lane `first`."""
    return first // SIZE + SPARE * chunk


@triton.jit
def chunk_of_tile(
    query_start_ptr,
    tile,
    PROMPTS: tl.constexpr,
    SIZE: tl.constexpr,
    SPARE: tl.constexpr,
    ROWS: tl.constexpr = 1,
):
    """The number of a tile's chunk, the chunk's first lane and number of lanes, and which of its
    tiles it is.

    A number that no tile has is that of a tile past the end of a chunk. With ROWS, the rows of a
    lane, tiles are of SIZE rows, and the first row and the number of rows take the lanes' place.
    """
    p = tl.arange(0, triton.next_power_of_2(PROMPTS))
    starts = tl.load(query_start_ptr + p, mask=p < PROMPTS, other=0) * ROWS
    begun = (p < PROMPTS) & (first_tile(starts, p, SIZE, SPARE) <= tile)
    chunk = tl.sum(begun.to(tl.int32), 0) - 1
    first, count = lanes_of_chunk(query_start_ptr, chunk)
    first *= ROWS
    count *= ROWS
    return chunk, first, count, tile - first_tile(first, chunk, SIZE, SPARE)


@triton.jit
def lanes_of_chunk(query_start_ptr, chunk):
    """A chunk's first lane, and how many it has."""
    first = tl.load(query_start_ptr + chunk)
    return first, tl.load(query_start_ptr + chunk + 1) - first
