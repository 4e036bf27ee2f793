"""Items: how ranks give each other words without a barrier, inside a kernel.

An item is one aligned 64-bit word: 32 bits of a rank's part in the low half, a tag in the high one.
A rank stores the items of its part, or of what it has for each rank, straight into the memory of
every rank, its own among them, and polls its own memory until the items of all ranks have the tag
that is due. A 64-bit access is never torn, and no item is believed because of another one: so
neither fences nor flags are needed, and it does not matter in what order stores arrive.

Memory is in units of UNIT items. The tag of a unit counts the launches that have used it, on all
ranks alike; it is the device's own, so replays advance it, and wraps at 2**32. A launch writes
whole units, so that an item is never older than its unit's last tag but one.

A unit has two halves, used in turn. A rank stores with tag t + 2 only after it has seen all items
of tag t + 1, which every rank stores only after its launch with tag t is complete: so nobody still
reads what is overwritten.

Every program stores all its items before it waits for the first one, and all programs of a launch
are resident at the same time. So ranks may run them in any order.

A wait ends without the items once the host says so, or after a limit. From then on waits of this
rank are `over`: it takes its own part for that of the others, so that indices remain valid, and
gives the others nothing, so that nobody believes what it makes of that.

The scheme is that of NCCL's LL protocol and of one-shot all-reduces in TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from graphengine.kernels.core.dispatch import INTERPRETED

UNIT = 256
"""Words of a unit."""
PROGRAMS = 128
"""Of a launch, at most: a GPU of 32 multiprocessors or more runs so many at the same time."""

# Polls of a wait, each of about a microsecond, between two looks at the host's words.
_PATIENCE = tl.constexpr(256)


class PeerItems(NamedTuple):
    """The memory in which a rank gets items, and where those of all ranks are.

    Letters: R ranks, U units.
    """

    items: torch.Tensor
    """int64 [2, R, U, UNIT], on this device: of each half what each rank has stored."""
    addresses: torch.Tensor
    """int64 [R], on this device: where `items` of each rank are mapped for this one."""
    tags: torch.Tensor
    """int32 [U], on this device: the last one of each unit; equal on all ranks."""
    over: torch.Tensor
    """int32 [1], on this device: not 0 once the waits of this rank are over."""
    watch: torch.Tensor
    """int64 [2], pinned: not 0 once waits are over, which host and device may say; and the
    nanoseconds for which one lasts at most."""

    @classmethod
    def over_items(
        cls, items: torch.Tensor, addresses: Sequence[int], watch: torch.Tensor | None = None
    ) -> PeerItems:
        """Of ranks that have exchanged nothing yet: `items` hold zeros on each of them.

        The limit of waits is 0 until the host sets it. `watch` holds zeros, in memory that another
        process reads, too; None: in memory of its own.
        """
        _, ranks, units, _ = items.shape
        assert len(addresses) == ranks, f"{ranks=}, {addresses=}"
        return cls(
            items=items,
            addresses=torch.tensor(addresses, dtype=torch.int64, device=items.device),
            tags=torch.zeros(units, dtype=torch.int32, device=items.device),
            over=torch.zeros(1, dtype=torch.int32, device=items.device),
            watch=(
                torch.zeros(2, dtype=torch.int64, pin_memory=items.is_cuda)
                if watch is None
                else watch
            ),
        )


@dataclass(frozen=True, slots=True)
class Peers:
    """What one of several ranks pushes with."""

    rank: int
    tensors: PeerItems

    @property
    def ranks(self) -> int:
        return self.tensors.items.shape[1]

    @property
    def units(self) -> int:
        """Of the largest launch."""
        return self.tensors.items.shape[2]


def item_bytes(ranks: int, units: int) -> int:
    """Bytes of `PeerItems.items`."""
    return 2 * ranks * units * UNIT * 8


def push_options(peers: Peers) -> dict[str, Any]:
    """Keyword arguments that every launch which pushes has."""
    return {
        "peers": peers.tensors,
        "rank": peers.rank,
        "units": peers.units,
        "RANKS": peers.ranks,
        "UNIT": UNIT,
        "TIMED": not INTERPRETED,
        "num_warps": 4,
    }


def push_words_reference(
    items_of_ranks: Sequence[torch.Tensor], rank: int, words_UW: torch.Tensor, tags_U: torch.Tensor
) -> None:
    """What `rank` stores in the items of all ranks, or of those for which it has these words, in
    plain PyTorch.

    words_UW  int32, UNIT columns: its words, of the first units
    tags_U    int32, of at least these units: the last ones, which are left as they are
    """
    units = torch.arange(len(words_UW))
    # Torch adds int32 as the device does: past the largest comes the smallest.
    tags = tags_U[: len(words_UW)] + 1
    items_UW = (tags.long() << 32)[:, None] | (words_UW.long() & 0xFFFF_FFFF)
    for items in items_of_ranks:
        items[(tags & 1).long(), rank, units] = items_UW


@triton.jit
def map_peers(peers, rank, RANKS: tl.constexpr):
    """Where to store: the items of all ranks from the next one on, this one's last."""
    mapped = ()
    for ahead in tl.static_range(1, RANKS + 1):
        address = tl.load(peers.addresses + (rank + ahead) % RANKS)
        mapped += (tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16),)  # type: ignore[assignment]
    return mapped


@triton.jit
def same_for_all(words, RANKS: tl.constexpr):
    """Words of a unit for `push_words`, which all ranks get."""
    found = ()
    for _ in tl.static_range(RANKS):
        found += (words,)  # type: ignore[assignment]
    return found


@triton.jit
def own_for_each(word_ptrs, mask, stride, rank, RANKS: tl.constexpr):
    """Words of a unit for `push_words`, of which each rank gets its own: those for a rank are
    `stride` words past those for the rank before it.

    All are asked for before the first is used.
    """
    found = ()
    for ahead in tl.static_range(1, RANKS + 1):
        to = ((rank + ahead) % RANKS).to(tl.int64)
        found += (tl.load(word_ptrs + to * stride, mask=mask, other=0),)  # type: ignore[assignment]
    return found


@triton.jit
def push_words(
    peers, mapped, words, unit, units, rank, over, RANKS: tl.constexpr, UNIT: tl.constexpr
):
    """Store int32 words of a unit at all ranks, for each those that are in its place in `mapped`;
    where waits are over at this rank alone.
    """
    tag = tl.load(peers.tags + unit) + 1
    at = _places(unit, units, tag, rank, RANKS, UNIT)
    if over == 0:
        for each in tl.static_range(RANKS - 1):
            tl.store(mapped[each] + at, _items(words[each], tag))
    tl.store(mapped[RANKS - 1] + at, _items(words[RANKS - 1], tag))


@triton.jit
def _items(words, tag):
    return (tag.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def take_words(
    peers, unit, units, rank, over, RANKS: tl.constexpr, UNIT: tl.constexpr, TIMED: tl.constexpr
):
    """The int32 words of all ranks in a unit, in their order; and whether waits are over.

    It waits for them. Where waits are over the words are those that this rank has stored at itself.
    The unit has its new tag afterwards.
    """
    tag = tl.load(peers.tags + unit) + 1
    item_ptrs = peers.items + _places(unit, units, tag, 0, RANKS, UNIT)
    stride = units.to(tl.int64) * UNIT
    words, missing = _look(item_ptrs, stride, tag, RANKS)
    polls = 0
    began = tl.full([], 0, tl.int64)
    while (missing != 0) & (over == 0):
        polls += 1
        if polls % _PATIENCE == 0:
            now = _clock(polls, TIMED)
            if began == 0:
                began = now
            said = tl.load(peers.watch, volatile=True)
            limit = tl.load(peers.watch + 1, volatile=True)
            over = ((said != 0) | (now - began >= limit)).to(tl.int32)
        words, missing = _look(item_ptrs, stride, tag, RANKS)
    if over != 0:
        tl.store(peers.over, 1)
        tl.store(peers.watch, 1)
        words, missing = _look(item_ptrs + rank * stride, 0, tag, RANKS)
    tl.store(peers.tags + unit, tag)
    return words, over


@triton.jit
def _places(unit, units, tag, rank, RANKS: tl.constexpr, UNIT: tl.constexpr):
    """Where items with this tag from this rank are in the memory of each; int64 [UNIT]."""
    half = (tag & 1).to(tl.int64)
    return ((half * RANKS + rank) * units + unit) * UNIT + tl.arange(0, UNIT)


@triton.jit
def _look(item_ptrs, stride, tag, RANKS: tl.constexpr):
    """What is there of each rank's words, and whether any is missing.

    No load waits for another one.
    """
    words = ()
    missing = tl.zeros(item_ptrs.shape, tl.int32)
    for rank in tl.static_range(RANKS):
        item = tl.load(item_ptrs + rank * stride, volatile=True)
        words += (item.to(tl.int32),)  # type: ignore[assignment]
        missing |= ((item >> 32).to(tl.int32) != tag).to(tl.int32)
    return words, tl.max(missing, 0)


@triton.jit
def _clock(polls, TIMED: tl.constexpr):
    """Nanoseconds; in the interpreter, which has no clock, polls."""
    if TIMED:
        return globaltimer()
    else:
        return polls.to(tl.int64)


@triton.jit
def sum_words(words, DTYPE: tl.constexpr, RANKS: tl.constexpr):
    """Float32 sums of the values in the ranks' words: two a word where DTYPE has 16 bits."""
    total = _values(words[0], DTYPE)
    for rank in tl.static_range(1, RANKS):
        total += _values(words[rank], DTYPE)
    return total


@triton.jit
def _values(words, DTYPE: tl.constexpr):
    """The values in these words, as float32."""
    if DTYPE.primitive_bitwidth == 32:
        return words.to(DTYPE, bitcast=True)
    else:
        low = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), [2 * words.shape[0]])
