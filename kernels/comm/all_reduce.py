"""All-reduce of a part that is too large to be pushed as items, in one kernel.

A part is cut into segments, one per program. Two ranks use one shot: a program stores its segment
at the other rank, and adds up both ranks' segments. More ranks use two shots, a reduce-scatter and
an all-gather: a segment is cut into shares, one per rank; a program stores each share at the rank
that owns it, adds up its own share, and stores the sum at all ranks. So a rank sends 2 (R - 1) / R
of a part instead of R - 1 parts.

Words are stored as they are, and then a flag says that they have arrived: a fence before it and an
acquire on the other side order them. Items carry a tag each instead, which takes twice the bytes.
Programs of the same number, on all ranks, wait for each other and for no other program.

With two shots a rank begins a launch once its last one is complete. By then all others have read
the shares that it had stored, and no sum is stored at a rank before that rank has begun the same
launch. So neither words nor flags need two halves. With one shot another rank may be a launch late,
so there are two halves, used alternately.

Sums are bit-equal to `push_sum`'s, and waits end as its waits do. The scheme is that of the
one-shot and two-shot all-reduces of TensorRT-LLM and of PyTorch's symmetric memory.

Letters: R ranks, P programs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.flags import (
    FlaggedMemory,
    flag_words,
    set_flags,
    wait_for_flags,
)
from graphengine.kernels.comm.items import (
    PROGRAMS,
    Peers,
    map_addresses,
    push_options,
    sum_to_words,
    turn_of,
)
from graphengine.kernels.comm.push import words_of
from graphengine.kernels.core.lanes import FLOAT_DTYPES
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs

BLOCK, LEAST_BLOCK = 4096, 512
"""Words that a program handles at a time, at most and at least. Small parts use small blocks, so
that all programs get some.
"""


def all_reduce_words(words: int, ranks: int, programs: int = PROGRAMS) -> int:
    """int32 values of `FlaggedMemory.own` for parts of `words` words; 0 for 0 words."""
    if not words:
        return 0
    half = _owned(ranks) * programs * BLOCK * blocks_of(words, ranks, programs)
    return 2 * half + flag_words(ranks, programs)


def _shots(ranks: int) -> int:
    return 1 if ranks == 2 else 2


def _owned(ranks: int) -> int:
    """Number of shares in a segment."""
    return 1 if _shots(ranks) == 1 else ranks


def blocks_of(words: int, ranks: int, programs: int, block: int = BLOCK) -> int:
    """Number of blocks in a share."""
    return math.ceil(words / (_owned(ranks) * programs * block))


def block_of(words: int, ranks: int, programs: int) -> int:
    """The smallest block that holds a share of a part of `words` words, or else the largest."""
    block = LEAST_BLOCK
    while block < BLOCK and blocks_of(words, ranks, programs, block) > 1:
        block *= 2
    return block


def all_reduce(
    peers: Peers, memory: FlaggedMemory, part_NC: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """Add up all ranks' parts, from rank 0 on: `[N, C]`.

    All ranks call it with parts of one shape and dtype, after the same calls. A part of more than
    `memory.size` words takes several launches. With two shots the halves of `memory` hold shares
    and sums; with one shot they are used alternately.

    Args:
        part_NC: dense, of any float dtype, on the device of `peers`; its bytes a multiple of 4.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        A new tensor. ValueError for another shape, size or dtype.
    """
    if part_NC.dtype not in FLOAT_DTYPES:
        raise ValueError(f"parts are {part_NC.dtype}, not one of {FLOAT_DTYPES}")
    part_W, total = words_of(part_NC), torch.empty_like(part_NC)
    size, programs = memory.size, len(memory.tags)
    sums = total.view(-1).view(torch.int32).split(size)
    for part, out in zip(part_W.split(size), sums, strict=True):
        words = part.numel()
        block = block_of(words, peers.ranks, programs)
        launcher(_all_reduce_kernel, (programs,))(
            part,
            out,
            # Its pointer tells the kernel the dtype of the values.
            out.view(total.dtype),
            words,
            blocks_of(words, peers.ranks, programs, block),
            peers.rank,
            peers.tensors,
            memory,
            **push_options(peers) | {"SIZE": size},
            SHOTS=_shots(peers.ranks),
            BLOCK=block,
            EVEN=words % block == 0,
            # Eight words per thread.
            num_warps=block // 256,
            **launch_options(pdl),
        )
    return total


@triton.jit(do_not_specialize=["words", "blocks", "rank"])
def _all_reduce_kernel(
    part_ptr,
    out_ptr,
    value_ptr,
    words,
    blocks,
    rank,
    peers,
    memory,
    SHOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store sums as words of `out`, whose values have `value_ptr`'s dtype; EVEN: all blocks are
    whole.

    The place of a giver's words at the taker depends on how many ranks the giver is ahead of the
    taker.
    """
    DTYPE: tl.constexpr = value_ptr.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    share = blocks * BLOCK
    segment = program * share * (RANKS if SHOTS == 2 else 1)
    wait_for_inputs(PDL)
    boxes = map_addresses(memory.boxes, tl.int32, RANKS)
    targets = map_addresses(memory.boxes, tl.int32, RANKS, program)
    tag = tl.load(memory.tags + program) + 1
    # Atomic, so that all threads get one thread's value and agree.
    over = tl.atomic_add(peers.over, 0, sem="relaxed")
    half = (tag & 1) if SHOTS == 1 else 0
    shares, shared = half * SIZE, 2 * SIZE + half * RANKS * programs + program
    sums, summed = SIZE, 2 * SIZE + RANKS * programs + program

    if over == 0:
        for each in tl.static_range(RANKS - 1):
            ahead = turn_of(program, each, RANKS)
            # This rank is ahead of the taker by the remaining ranks.
            place = shares + ((RANKS - 2 - ahead) * programs + program) * share
            first = segment
            if SHOTS == 2:
                first += (rank + 1 + ahead) % RANKS * share
            _store_share(part_ptr, first, words, targets[each] + place, blocks, BLOCK, EVEN)
        set_flags(boxes, shared, programs, tag, RANKS, TIMED)
    over, waited = wait_for_flags(peers, memory.own + shared, programs, tag, over, RANKS, TIMED)

    first = segment
    if SHOTS == 2:
        first += rank * share
    for block in range(blocks):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = _inside(first + block * BLOCK, words, BLOCK, EVEN)
        own = tl.load(part_ptr + first + at, mask=inside, other=0)
        found = ()
        for other in tl.static_range(RANKS):
            place = shares + ((other + RANKS - rank - 1) % RANKS * programs + program) * share
            is_other = (rank != other) & (over == 0)
            given = tl.load(memory.own + place + at, mask=is_other, other=0)
            found += (tl.where(is_other, given, own),)  # type: ignore[assignment]
        total = sum_to_words(found, DTYPE, RANKS)
        tl.store(out_ptr + first + at, total, mask=inside)
        if SHOTS == 2:  # noqa: SIM102  (known to the compiler, where the other is not)
            if over == 0:
                for each in tl.static_range(RANKS - 1):
                    tl.store(targets[each] + sums + first + at, total)

    if SHOTS == 2:
        if over == 0:
            set_flags(boxes, summed, programs, tag, RANKS, TIMED)
        over, late = wait_for_flags(peers, memory.own + summed, programs, tag, over, RANKS, TIMED)
        waited += late
        for ahead in tl.static_range(RANKS - 1):
            first = segment + (rank + 1 + ahead) % RANKS * share
            _take_share(
                memory.own + sums, part_ptr, out_ptr, first, words, over, blocks, BLOCK, EVEN
            )

    tl.store(memory.tags + program, tag)
    if program == 0:
        tl.store(peers.waited, tl.load(peers.waited) + waited)


@triton.jit
def _store_share(part_ptr, first, words, box_ptr, blocks, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Store the part's words from `first` on at another rank, in whole blocks."""
    for block in range(blocks):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = _inside(first + block * BLOCK, words, BLOCK, EVEN)
        tl.store(box_ptr + at, tl.load(part_ptr + first + at, mask=inside, other=0))


@triton.jit
def _take_share(
    sum_ptr, part_ptr, out_ptr, first, words, over, blocks, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    """Copy a share of the sum, which another rank has stored here, to `out`. Once waits are over,
    copy this rank's part instead.
    """
    for block in range(blocks):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        inside = _inside(first + block * BLOCK, words, BLOCK, EVEN)
        if over == 0:
            given = tl.load(sum_ptr + at)
        else:
            given = tl.load(part_ptr + at, mask=inside, other=0)
        tl.store(out_ptr + at, given, mask=inside)


@triton.jit
def _inside(first, words, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Which words of a block exist: all or none in whole blocks, so that accesses are wide."""
    if EVEN:
        return first < words
    else:
        return first + tl.arange(0, BLOCK) < words
