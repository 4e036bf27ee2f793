"""The record of a lane, which a replay's last kernel writes for the host, and its one codec.

A lane of a mailbox entry is a few items, each one aligned 64-bit word: a tag in the high half and
32 bits of payload in the low half. The last item's payload is the lane's *state word*; the payloads
before it are the tokens that the row got, and then zeros. Every lane of an entry carries the same
tag, the replay's sequence number.

    bits of a state word    meaning
    0 to 3                  flags, as in `state`: EMITTED, STOP, LENGTH, INVALID
    4 to 9                  count: tokens emitted, those of the lane's first items
    10 to 15                fed: the row's live lanes, its own token and its drafts
    16 to 31                the low bits of the epoch, which names the stay in the slot

All code that packs or unpacks a state word uses this module: kernels call `state_payload`, their
references `pack_state`. The host uses `FLAGS_AND_COUNT` where every nanosecond of a token counts,
and `unpack_state` elsewhere.

Sixteen bits of an epoch are enough. A scheduler counts the stays of an engine, at most one begins
in each of 64 slots a step, and the mailbox's ring holds the replays of a few steps. So epochs in
the ring at the same time are some hundreds apart, and two that share 16 bits are 65536 apart or
more. On the device epochs are compared whole.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

FLAG_BITS = 4
COUNT_BITS = 6
EPOCH_BITS = 16

COUNT_SHIFT = FLAG_BITS
FED_SHIFT = COUNT_SHIFT + COUNT_BITS
EPOCH_SHIFT = FED_SHIFT + COUNT_BITS

FLAG_MASK = (1 << FLAG_BITS) - 1
COUNT_MASK = (1 << COUNT_BITS) - 1
EPOCH_MASK = (1 << EPOCH_BITS) - 1
FLAGS_AND_COUNT_MASK = (1 << FED_SHIFT) - 1

MAX_DRAFTS = 31
"""Drafts of a row, at most. With its own token a row then feeds 32 lanes, half of `MAX_LANES`; a
state word could count 62 drafts."""

FLAGS_AND_COUNT = [(low & FLAG_MASK, low >> COUNT_SHIFT) for low in range(1 << FED_SHIFT)]
"""(flags, count) of a state word, by its bits in FLAGS_AND_COUNT_MASK: a look-up takes less time
than two shifts, and half the time of a call."""

_COUNT_SHIFT = tl.constexpr(COUNT_SHIFT)
_FED_SHIFT = tl.constexpr(FED_SHIFT)
_EPOCH_SHIFT = tl.constexpr(EPOCH_SHIFT)
_EPOCH_MASK = tl.constexpr(EPOCH_MASK)

Integers = TypeVar("Integers", int, torch.Tensor, NDArray[np.int64])


class LaneState(NamedTuple):
    """The contents of a state word."""

    flags: int
    emitted: int
    """Tokens emitted: the word's count."""
    fed: int
    """Live lanes of the row."""
    epoch: int
    """Its low EPOCH_BITS bits."""


def pack_state(epoch: Integers, fed: Integers, count: Integers, flags: Integers) -> Integers:
    """Pack state words from integers, int64 tensors or arrays; only an epoch's low bits are kept.

    fed, count  0 to COUNT_MASK
    flags       0 to FLAG_MASK
    """
    return (epoch & EPOCH_MASK) << EPOCH_SHIFT | fed << FED_SHIFT | count << COUNT_SHIFT | flags


def unpack_state(state: int) -> LaneState:
    """Unpack a state word, 0 to 2**32 - 1."""
    flags, count = FLAGS_AND_COUNT[state & FLAGS_AND_COUNT_MASK]
    return LaneState(flags, count, fed_of(state), state >> EPOCH_SHIFT)


def fed_of(state: int) -> int:
    """The row's live lanes, from a state word."""
    return state >> FED_SHIFT & COUNT_MASK


def tag_items(sequence: torch.Tensor) -> torch.Tensor:
    """The tag for each payload of replay `sequence`, int64: its low 32 bits in the high half."""
    return (sequence & 0xFFFFFFFF) << 32


@triton.jit
def state_payload(epoch, fed, count, flags):
    """The state word of each lane, int64: `pack_state` in a kernel, from int32."""
    numbers = (fed << _FED_SHIFT) | (count << _COUNT_SHIFT) | flags
    return ((epoch.to(tl.int64) & _EPOCH_MASK) << _EPOCH_SHIFT) | numbers.to(tl.int64)


@triton.jit
def tag_of(sequence):
    """`tag_items` in a kernel, from an int64 sequence number."""
    return (sequence & 0xFFFFFFFF) << 32
