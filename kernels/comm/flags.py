"""Flags that programs of the same number, on all ranks, set to tell each other how far they are.

A flag is a word in the memory of the rank that waits for it; it is set once it holds the tag that
is due. A fence before it and an acquire by the waiting rank order what was stored before it.

Letters: R ranks, P programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.items import clock, from_next_on, look_at_host


class FlaggedMemory(NamedTuple):
    """Memory in which a rank receives data for one kind of launch, and the addresses of the others'
    memory.
    """

    own: torch.Tensor
    """int32, on this device: two halves of words, then two flags for each program of each rank."""
    boxes: torch.Tensor
    """int64 [R], on this device: addresses of all ranks' `own`, from the next rank on, this one's
    last."""
    tags: torch.Tensor
    """int32 [P], on this device: the last tag of each program; equal on all ranks."""

    @classmethod
    def over(cls, rank: int, own: torch.Tensor, addresses: Sequence[int], programs: int) -> Self:
        """Memory for ranks that have launched nothing yet. `own` holds zeros on each of them, and
        is mapped for this rank at `addresses`.
        """
        boxes = from_next_on(rank, addresses)
        return cls(
            own=own,
            boxes=torch.tensor(boxes, dtype=torch.int64, device=own.device),
            tags=torch.zeros(programs, dtype=torch.int32, device=own.device),
        )

    @property
    def size(self) -> int:
        """Words in each half."""
        return (self.own.numel() - flag_words(len(self.boxes), len(self.tags))) // 2


def flag_words(ranks: int, programs: int) -> int:
    """Words that the flags take: two for each program of each rank."""
    return 2 * ranks * programs


@triton.jit
def set_flags(boxes, flag, programs, tag, RANKS: tl.constexpr, TIMED: tl.constexpr):
    """Tell all other ranks that everything this program stored at them has arrived."""
    tl.debug_barrier()
    if TIMED:
        # Only the thread that stores the flags fences; the barrier has ordered the other threads'
        # stores.
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first fence.acq_rel.sys; // dummy $0
            }""",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    for ahead in tl.static_range(RANKS - 1):
        flag_ptr = boxes[ahead] + flag + (RANKS - 2 - ahead) * programs
        tl.atomic_xchg(flag_ptr, tag, sem="relaxed", scope="sys")


@triton.jit
def wait_for_flags(peers, flag_ptr, programs, tag, over, RANKS: tl.constexpr, TIMED: tl.constexpr):
    """Wait until the flags of all other ranks have this tag. Returns whether waits are over, as in
    `take_words`, and how long this one has lasted.
    """
    began = clock(0, TIMED)
    looked = began
    polls = 0
    # Each thread of the program waits by itself, and looks at the clock at a different time.
    ended = over
    missing = _missing(flag_ptr, programs, tag, RANKS)
    while (missing != 0) & (ended == 0):
        polls += 1
        doze(TIMED)
        ended, looked = look_at_host(peers, polls, began, looked, ended, TIMED)
        missing = _missing(flag_ptr, programs, tag, RANKS)
    for ahead in tl.static_range(RANKS - 1):
        # One thread looks and the others wait for it. So all agree whether waits are over, and see
        # all data stored before the flag.
        found = tl.atomic_add(flag_ptr + ahead * programs, 0, sem="acquire", scope="sys")
        over |= (found != tag).to(tl.int32)
    if over != 0:
        tl.store(peers.over, 1)
        tl.store(peers.watch, 1)
    return over, clock(polls, TIMED) - began


@triton.jit
def doze(TIMED: tl.constexpr):
    """Sleep some 200 ns between two polls: polls by all threads slow down stores that arrive
    meanwhile. In one process on four H200s a chunk's sums took 51 us without, and 49 with 100 ns;
    in shifts of four, 44 with 32 ns and 43 with 200.
    """
    if TIMED:
        tl.inline_asm_elementwise(
            "nanosleep.u32 200; // dummy $0",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _missing(flag_ptr, programs, tag, RANKS: tl.constexpr):
    """Count the flags that have another tag; no load waits for another one."""
    missing = 0
    for ahead in tl.static_range(RANKS - 1):
        found = tl.load(flag_ptr + ahead * programs, volatile=True)
        missing += (found != tag).to(tl.int32)
    return missing
