"""All-reduce of a part that is too large to be pushed whole: in two shots, a reduce-scatter and an
all-gather in one kernel.

A part is cut into segments, one a program, and a segment into shares, one a rank. A program stores
each share of its segment at the rank that owns it, adds up its own share as the others have it, and
stores the sum at all ranks. So a rank sends 2 (R - 1) / R of a part, in place of R - 1 parts.

Words are stored as they are, and a flag behind them says that they are there: release and acquire
order them, where items have a tag each, which takes twice the bytes. Programs of one number, on all
ranks, wait for each other and for no other program. A rank begins a launch once its last one is
complete; then all others have read what it had stored before, and begun the launch whose flags it
waits for. So neither words nor flags need two halves.

Sums are those of `push_sum`, to the bit, and waits end as its waits do. The scheme is that of the
two-shot all-reduces of NCCL's Simple protocol, TensorRT-LLM and PyTorch's symmetric memory.

Letters: R ranks, P programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.items import (
    PATIENCE,
    PAUSE_NS,
    PROGRAMS,
    Peers,
    clock,
    is_over,
    push_options,
    sum_to_words,
)
from graphengine.kernels.comm.push import words_of
from graphengine.kernels.core.lanes import FLOAT_DTYPES
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs

BLOCK = 4096
"""Words that a program has at a time."""


class TwoShotMemory(NamedTuple):
    """Where a rank gets shares and sums, and where it stores those that it gives."""

    own: torch.Tensor
    """int32, on this device: words of shares, as many of sums, and two flags for each program of
    each rank."""
    boxes: torch.Tensor
    """int64 [R], on this device: addresses of `own` at all ranks from the next one on, this one's
    last."""
    tags: torch.Tensor
    """int32 [P], on this device: the last one of each program; equal on all ranks."""

    @classmethod
    def over(
        cls, rank: int, own: torch.Tensor, addresses: Sequence[int], programs: int = PROGRAMS
    ) -> TwoShotMemory:
        """Of ranks that have summed nothing yet: `own` holds zeros on each of them, and is mapped
        for this one at `addresses`.
        """
        ranks = len(addresses)
        boxes = [addresses[(rank + ahead) % ranks] for ahead in range(1, ranks + 1)]
        return cls(
            own=own,
            boxes=torch.tensor(boxes, dtype=torch.int64, device=own.device),
            tags=torch.zeros(programs, dtype=torch.int32, device=own.device),
        )

    @property
    def capacity(self) -> int:
        """Words of the largest launch."""
        return (self.own.numel() - _flags(len(self.boxes), len(self.tags))) // 2


def two_shot_words(words: int, ranks: int, programs: int = PROGRAMS) -> int:
    """int32 values of `TwoShotMemory.own` for parts of so many words; none for none."""
    if not words:
        return 0
    capacity = ranks * programs * BLOCK * _blocks(words, ranks, programs)
    return 2 * capacity + _flags(ranks, programs)


def _flags(ranks: int, programs: int) -> int:
    return 2 * ranks * programs


def _blocks(words: int, ranks: int, programs: int) -> int:
    """Of a share."""
    return math.ceil(words / (ranks * programs * BLOCK))


def two_shot_sum(
    peers: Peers, memory: TwoShotMemory, part_NC: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """`[N, C]`: the sum of all ranks' parts, from rank 0 on.

    All ranks call it with a part of this shape and dtype, after the same calls. A part of more than
    `memory.capacity` words takes several launches.

    Args:
        part_NC: dense, of any float dtype, on the device of `peers`; its bytes a multiple of 4.
        pdl: the launch may overlap the one before, by the rules of `kernels.pdl`.

    Returns:
        A new tensor. ValueError for another shape, size or dtype.
    """
    if part_NC.dtype not in FLOAT_DTYPES:
        raise ValueError(f"parts are {part_NC.dtype}, not one of {FLOAT_DTYPES}")
    part_W, total = words_of(part_NC), torch.empty_like(part_NC)
    capacity, programs = memory.capacity, len(memory.tags)
    sums = total.view(-1).view(torch.int32).split(capacity)
    for part, out in zip(part_W.split(capacity), sums, strict=True):
        launcher(_two_shot_kernel, (programs,))(
            part,
            out,
            # For the dtype that is added in.
            out.view(total.dtype),
            part.numel(),
            _blocks(part.numel(), peers.ranks, programs),
            peers.rank,
            peers.tensors,
            memory,
            CAPACITY=capacity,
            BLOCK=BLOCK,
            EVEN=part.numel() % BLOCK == 0,
            num_warps=16,
            **{name: value for name, value in push_options(peers).items() if name != "SIZE"},
            **launch_options(pdl),
        )
    return total


@triton.jit(do_not_specialize=["words", "blocks", "rank"])
def _two_shot_kernel(
    part_ptr,
    out_ptr,
    value_ptr,
    words,
    blocks,
    rank,
    peers,
    memory,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    RANKS: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Words `out`, of values of the dtype that `value_ptr` points to; EVEN are whole blocks."""
    DTYPE: tl.constexpr = value_ptr.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    share = blocks * BLOCK
    segment = program * RANKS * share
    wait_for_inputs(PDL)
    boxes = _map_boxes(memory, RANKS)
    over = tl.load(peers.over)
    tag = tl.load(memory.tags + program) + 1
    # Flags of shares, and behind them those of sums; of each rank those of its programs.
    shared = 2 * CAPACITY + program
    summed = shared + RANKS * programs

    for ahead in tl.static_range(RANKS - 1):
        first = segment + (rank + 1 + ahead) % RANKS * share
        if over == 0:
            for block in range(blocks):
                at = block * BLOCK + tl.arange(0, BLOCK)
                there = _there(first + block * BLOCK, words, BLOCK, EVEN)
                given = tl.load(part_ptr + first + at, mask=there, other=0)
                tl.store(boxes[ahead] + (rank * programs + program) * share + at, given)
            _say(boxes[ahead] + shared + rank * programs, tag)

    waited = tl.cast(0, tl.int64)
    for ahead in tl.static_range(RANKS - 1):
        flag_ptr = memory.own + shared + (rank + 1 + ahead) % RANKS * programs
        over, late = _wait_for(peers, flag_ptr, tag, over, TIMED)
        waited += late

    first = segment + rank * share
    for block in range(blocks):
        at = block * BLOCK + tl.arange(0, BLOCK)
        there = _there(first + block * BLOCK, words, BLOCK, EVEN)
        own = tl.load(part_ptr + first + at, mask=there, other=0)
        found = ()
        for other in tl.static_range(RANKS):
            given = tl.load(memory.own + (other * programs + program) * share + at)
            found += (tl.where((rank == other) | (over != 0), own, given),)  # type: ignore[assignment]
        total = sum_to_words(found, DTYPE, RANKS)
        tl.store(out_ptr + first + at, total, mask=there)
        if over == 0:
            for ahead in tl.static_range(RANKS - 1):
                tl.store(boxes[ahead] + CAPACITY + first + at, total)
    if over == 0:
        for ahead in tl.static_range(RANKS - 1):
            _say(boxes[ahead] + summed + rank * programs, tag)

    for ahead in tl.static_range(RANKS - 1):
        owner = (rank + 1 + ahead) % RANKS
        first = segment + owner * share
        over, late = _wait_for(peers, memory.own + summed + owner * programs, tag, over, TIMED)
        waited += late
        for block in range(blocks):
            at = block * BLOCK + tl.arange(0, BLOCK)
            there = _there(first + block * BLOCK, words, BLOCK, EVEN)
            if over == 0:
                given = tl.load(memory.own + CAPACITY + first + at)
            else:
                given = tl.load(part_ptr + first + at, mask=there, other=0)
            tl.store(out_ptr + first + at, given, mask=there)

    tl.store(memory.tags + program, tag)
    if program == 0:
        tl.store(peers.waited, tl.load(peers.waited) + waited)


@triton.jit
def _map_boxes(memory, RANKS: tl.constexpr):
    """Where to store: pointers of `TwoShotMemory.boxes`."""
    boxes = ()
    for ahead in tl.static_range(RANKS):
        address = tl.load(memory.boxes + ahead)
        boxes += (tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16),)  # type: ignore[assignment]
    return boxes


@triton.jit
def _there(first, words, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Which words of a block there are; of whole blocks all or none, so that accesses are wide."""
    if EVEN:
        return first < words
    else:
        return first + tl.arange(0, BLOCK) < words


@triton.jit
def _say(flag_ptr, tag):
    """That all which this program has stored is there."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, tag, sem="release", scope="sys")


@triton.jit
def _wait_for(peers, flag_ptr, tag, over, TIMED: tl.constexpr):
    """Wait until a flag has this tag. Whether waits are over, as in `take_words`, and for how long
    this one has lasted.
    """
    PAUSE: tl.constexpr = PAUSE_NS if TIMED else 0
    began = clock(0, TIMED)
    looked = began
    polls = 0
    found = tl.load(flag_ptr, volatile=True)
    while (found != tag) & (over == 0):
        polls += 1
        if polls % PATIENCE == 0:
            now = clock(polls, TIMED)
            if now - looked >= PAUSE:
                looked = now
                over = is_over(peers, now - began)
        found = tl.load(flag_ptr, volatile=True)
    if over == 0:
        # What was stored before the flag is there for all threads, which wait for this one's value.
        found = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        over = (found != tag).to(tl.int32)
    if over != 0:
        tl.store(peers.over, 1)
        tl.store(peers.watch, 1)
    return over, clock(polls, TIMED) - began
