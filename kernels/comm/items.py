"""Items: words that ranks exchange inside a kernel without a barrier.

An item is one aligned 64-bit word: 32 bits of a rank's part in the low half, a tag in the high one.
A rank stores the items of its part, or of its part for each rank, directly into the memory of every
rank, itself included, and polls its own memory until the items of all ranks have the tag that is
due. A 64-bit access is never torn, and each item is checked by its own tag. So neither fences nor
flags are needed, and stores may arrive in any order.

The tag of a word counts the launches that have used it, equally on all ranks; it lives on the
device, so replays advance it, and wraps at 2**32. So an item is never older than the last but one
tag of its word, whichever words a launch uses. A launch uses both words of an aligned pair or
neither: the two share a tag, and a thread that has both accesses their items as 16 bytes.

There are two halves, which a word's items use alternately. A rank stores with tag t + 2 only after
it has seen the items of tag t + 1, which every rank stores only after its launch with tag t is
complete. So no rank still reads the overwritten words.

A launch that only pushes stores all its items before it waits for the first one, and all its
programs are resident at the same time. So ranks may run its programs in any order. A product stores
and waits tile by tile, and may have more programs than are resident. They start in the order of
their numbers, as on every GPU so far; single-pass scans rely on this as well. So the first of all
waiting tiles is running on all ranks, and ends.

A wait ends without the items once the host says so, or after a limit. From then on waits of this
rank are `over`: it uses its own part in place of the other ranks' parts, so that indices remain
valid, and sends the others nothing, so that no rank trusts its results.

The scheme is that of NCCL's LL protocol and of one-shot all-reduces in TensorRT-LLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.pdl import wait_for_inputs

UNIT = 256
"""Words in a unit. Memory is counted in units, and a program of a push handles one at a time."""
PROGRAMS = 128
"""Most programs of a launch: a GPU with 32 or more multiprocessors runs this many at the same time.
"""

# Polls of a wait between two looks at the clock; a poll takes about a microsecond.
_PATIENCE = tl.constexpr(256)
# Time between two looks at the host's words. On two H200s a look by 128 programs takes 0.8 ms.
# Meanwhile the other ranks wait, and they must not start looking because of that.
_PAUSE_NS = tl.constexpr(4_000_000)


class PeerItems(NamedTuple):
    """The memory in which a rank receives items, and the addresses at which it stores its own.

    Letters: R ranks, U units.
    """

    items: torch.Tensor
    """int64 [2, R, U, UNIT], on this device: in each half, the items that each rank has stored."""
    outboxes: torch.Tensor
    """int64 [R], on this device: addresses of this rank's place in the first half, at all ranks
    from the next one on, its own last."""
    tags: torch.Tensor
    """int32 [U, UNIT], on this device: the last tag of each word; equal on all ranks."""
    over: torch.Tensor
    """int32 [1], on this device: not 0 once the waits of this rank are over."""
    waited: torch.Tensor
    """int64 [1], on this device: total nanoseconds that the first program of each launch has
    waited, including the wait for the pushing launch to end if it may begin before that."""
    watch: torch.Tensor
    """int64 [2], pinned: not 0 once host or device says that waits are over; and the limit of a
    wait in nanoseconds."""

    @classmethod
    def over_items(
        cls,
        rank: int,
        items: torch.Tensor,
        addresses: Sequence[int],
        watch: torch.Tensor | None = None,
    ) -> PeerItems:
        """Items of ranks that have exchanged nothing yet. `items` hold zeros on each of them, and
        are mapped for this rank at `addresses`.

        The limit of waits is 0 until the host sets it. `watch` holds zeros and may be in memory
        that another process also reads; None: it gets memory of its own.
        """
        _, ranks, units, unit = items.shape
        assert len(addresses) == ranks, f"{ranks=}, {addresses=}"
        assert items.numel() < 2**31, f"{list(items.shape)} items have no int32 index"
        own = rank * units * unit * items.itemsize
        outboxes = [address + own for address in from_next_on(rank, addresses)]
        return cls(
            items=items,
            outboxes=torch.tensor(outboxes, dtype=torch.int64, device=items.device),
            tags=torch.zeros(units, unit, dtype=torch.int32, device=items.device),
            over=torch.zeros(1, dtype=torch.int32, device=items.device),
            waited=torch.zeros(1, dtype=torch.int64, device=items.device),
            watch=(
                torch.zeros(2, dtype=torch.int64, pin_memory=items.is_cuda)
                if watch is None
                else watch
            ),
        )


def from_next_on(rank: int, addresses: Sequence[int]) -> list[int]:
    """Rotate the ranks' addresses: the next rank's first, this rank's last."""
    return [*addresses[rank + 1 :], *addresses[: rank + 1]]


@dataclass(frozen=True, slots=True)
class Peers:
    """A rank's number and its memory for pushes."""

    rank: int
    tensors: PeerItems

    @property
    def ranks(self) -> int:
        return self.tensors.items.shape[1]

    @property
    def units(self) -> int:
        """Units of the largest launch."""
        return self.tensors.items.shape[2]

    @property
    def words(self) -> int:
        """Words of the largest launch."""
        return self.units * UNIT

    def hold(self, part: torch.Tensor) -> bool:
        """Whether one launch can push `part`."""
        return part.nbytes <= 4 * self.words


def item_bytes(ranks: int, units: int) -> int:
    """Bytes of `PeerItems.items`."""
    return 2 * ranks * units * UNIT * 8


def push_options(peers: Peers | None) -> dict[str, Any]:
    """Constexprs of a launch that pushes; with None, of a product that does not push."""
    return {
        "RANKS": 0 if peers is None else peers.ranks,
        "SIZE": 0 if peers is None else peers.words,
        "TIMED": not INTERPRETED,
    }


def check_words(peers: Peers, words: int, what: str) -> None:
    """Raise ValueError for more words than these ranks have memory for."""
    if words > peers.words:
        raise ValueError(
            f"{what} takes {words} words: there are {peers.words} in {peers.units} units"
        )


def check_part(peers: Peers | None, shape: Sequence[int], *, launched: bool) -> None:
    """Raise ValueError if no kernel is launched to push a part of this shape, or if these ranks
    have no memory for it. With None nothing is pushed.
    """
    if peers is None:
        return
    if not launched:
        raise ValueError(f"a part {list(shape)} for {peers.ranks} ranks is not on a GPU")
    if shape[-1] % 2:
        raise ValueError(f"a part {list(shape)} has an odd number of columns: words go in pairs")
    check_words(peers, math.prod(shape), f"a part {list(shape)}")


def push_words_reference(
    items_of_ranks: Sequence[torch.Tensor],
    rank: int,
    words: torch.Tensor,
    at: torch.Tensor,
    tags: torch.Tensor,
) -> None:
    """Store `rank`'s words in the items of all given ranks, in plain PyTorch.

    words  int32, any shape; at: int64, of that shape: which words of the memory they are
    tags   the last tags, of `PeerItems`; they are not changed
    """
    # Torch adds int32 as the device does: past the largest comes the smallest.
    due = tags.view(-1)[at] + 1
    for items in items_of_ranks:
        found = (due.long() << 32) | (words.long() & 0xFFFF_FFFF)
        items.view(2, len(items[0]), -1)[(due & 1).long(), rank, at] = found


@triton.jit
def map_peers(peers, RANKS: tl.constexpr):
    """Pointers to store at: those of `PeerItems.outboxes`."""
    return map_addresses(peers.outboxes, tl.int64, RANKS)


@triton.jit
def map_addresses(address_ptr, DTYPE: tl.constexpr, RANKS: tl.constexpr, first=0):
    """Pointers to DTYPE, aligned to 16 bytes: those of the other ranks in the order of `turn_of`,
    then this rank's.
    """
    mapped = ()
    for each in tl.static_range(RANKS):
        ahead = turn_of(first, each, RANKS) if each < RANKS - 1 else each
        address = tl.load(address_ptr + ahead)
        mapped += (tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16),)  # type: ignore[assignment]
    return mapped


@triton.jit
def turn_of(first, each, RANKS: tl.constexpr):
    """The peer visited at turn `each`, counted from `first` (any number, taken modulo the peers).

    Programs that store much at all others should not all begin with the same one: 6.3 MB to three
    took 23 us where all programs stored to one peer after the other, and 19 where each program
    stored to one (four H200s).
    """
    OTHERS: tl.constexpr = RANKS - 1 if RANKS > 1 else 1
    return (first + each) % OTHERS


@triton.jit
def same_for_all(words, RANKS: tl.constexpr):
    """Give every rank the same words, in the form that `push_words` takes."""
    found = ()
    for _ in tl.static_range(RANKS):
        found += (words,)  # type: ignore[assignment]
    return found


@triton.jit
def own_for_each(word_ptrs, mask, stride, rank, RANKS: tl.constexpr):
    """Load each rank's own words, in the form that `push_words` takes. Words for consecutive ranks
    are `stride` words apart.

    All loads are issued before the first result is used.
    """
    found = ()
    for ahead in tl.static_range(1, RANKS + 1):
        to = ((rank + ahead) % RANKS).to(tl.int64)
        found += (tl.load(word_ptrs + to * stride, mask=mask, other=0),)  # type: ignore[assignment]
    return found


@triton.jit
def next_tags(peers, word, mask):
    """The tags that are due for these words of the memory; int32, in the shape of `word`.

    mask  which words exist; None: all
    """
    if mask is None:
        tag = tl.load(peers.tags + word, cache_modifier=".cg")
    else:
        tag = tl.load(peers.tags + word, mask=mask, other=0, cache_modifier=".cg")
    return tag + 1


@triton.jit
def push_words(mapped, words, word, tag, mask, over, RANKS: tl.constexpr, SIZE: tl.constexpr):
    """Store int32 words at all ranks; once waits are over, at this rank alone. `words` has one
    entry per rank, in the order of `mapped`.

    word, tag, mask  which words of the memory they are, and their tags, by `next_tags`
    """
    at = _place(word, tag, RANKS, SIZE)
    if over == 0:
        for each in tl.static_range(RANKS - 1):
            tl.store(mapped[each] + at, _items(words[each], tag), mask=mask)
    tl.store(mapped[RANKS - 1] + at, _items(words[RANKS - 1], tag), mask=mask)


@triton.jit
def _place(word, tag, RANKS: tl.constexpr, SIZE: tl.constexpr):
    """Offsets of a rank's items with these tags from its first word of the first half."""
    at = (tag & 1) * (RANKS * SIZE) + word
    # The compiler cannot know that the two words of a pair share a tag.
    if len(at.shape) == 2:
        if at.shape[1] > 1:
            at = tl.max_contiguous(tl.multiple_of(at, [1, 2]), [1, 2])
    else:
        at = tl.max_contiguous(tl.multiple_of(at, [2]), [2])
    return at


@triton.jit
def _items(words, tag):
    return (tag.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def take_words(
    peers,
    mapped,
    word,
    tag,
    mask,
    over,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Wait for the int32 words of all ranks; return them in rank order, and whether waits are over.

    Once waits are over, the words are those that this rank has stored at itself. EARLY: it stored
    them in the launch before, which may still run.
    The tags of these words of the memory are updated.
    """
    at = _place(word, tag, RANKS, SIZE)
    item_ptrs = peers.items + at
    began = clock(0, TIMED)
    looked = began
    words, missing = _look(item_ptrs, SIZE, tag, mask, RANKS)
    polls = 0
    while (missing != 0) & (over == 0):
        polls += 1
        over, looked = look_at_host(peers, polls, began, looked, over, TIMED)
        words, missing = _look(item_ptrs, SIZE, tag, mask, RANKS)
    if over != 0:
        tl.store(peers.over, 1)
        tl.store(peers.watch, 1)
        wait_for_inputs(EARLY, False)
        words, missing = _look(mapped[RANKS - 1] + at, 0, tag, mask, RANKS)
    tl.store(peers.tags + word, tag, mask=mask)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(peers.waited, tl.load(peers.waited) + (clock(polls, TIMED) - began))
    return words, over


@triton.jit
def look_at_host(peers, polls, began, looked, over, TIMED: tl.constexpr):
    """Check the host's words if a look is due after this many polls of a wait.

    Returns whether waits are over and when the words were looked at last; both unchanged if no look
    is due.
    """
    PAUSE: tl.constexpr = _PAUSE_NS if TIMED else 0
    if polls % _PATIENCE == 0:
        now = clock(polls, TIMED)
        if now - looked >= PAUSE:
            looked = now
            said = tl.load(peers.watch, volatile=True)
            limit = tl.load(peers.watch + 1, volatile=True)
            over = ((said != 0) | (now - began >= limit)).to(tl.int32)
    return over, looked


@triton.jit
def _look(item_ptrs, stride, tag, mask, RANKS: tl.constexpr):
    """Load each rank's words; return them, and whether any is still missing.

    No load waits for another one.
    """
    words = ()
    missing = (tag != tag).to(tl.int32)
    for rank in tl.static_range(RANKS):
        if mask is None:
            item = tl.load(item_ptrs + rank * stride, volatile=True)
            late = (item >> 32).to(tl.int32) != tag
        else:
            item = tl.load(item_ptrs + rank * stride, mask=mask, other=0, volatile=True)
            late = mask & ((item >> 32).to(tl.int32) != tag)
        words += (item.to(tl.int32),)  # type: ignore[assignment]
        missing |= late.to(tl.int32)
    if len(missing.shape) == 2:
        missing = tl.max(missing, 1)
    return words, tl.max(missing, 0)


@triton.jit
def clock(polls, TIMED: tl.constexpr):
    """The time in nanoseconds; in the interpreter, which has no clock, the number of polls."""
    if TIMED:
        return globaltimer()
    else:
        return tl.cast(polls, tl.int64)


@triton.jit
def sum_words(words, DTYPE: tl.constexpr, RANKS: tl.constexpr):
    """Float32 sums of the values in the ranks' words; a word holds two values of 16-bit dtypes."""
    total = _values(words[0], DTYPE)
    for rank in tl.static_range(1, RANKS):
        total += _values(words[rank], DTYPE)
    return total


@triton.jit
def sum_to_words(words, DTYPE: tl.constexpr, RANKS: tl.constexpr):
    """`sum_words` rounded to DTYPE, packed in words like the inputs."""
    if DTYPE.primitive_bitwidth == 32:
        return sum_words(words, DTYPE, RANKS).to(tl.int32, bitcast=True)
    else:
        low, high = _halves(words[0], DTYPE)
        for rank in tl.static_range(1, RANKS):
            more, above = _halves(words[rank], DTYPE)
            low += more
            high += above
        low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        high = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        return (high << 16) | (low & 0xFFFF)


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """The two 16-bit values in each of these words, as float32."""
    low = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _values(words, DTYPE: tl.constexpr):
    """The values in these words, as float32."""
    if DTYPE.primitive_bitwidth == 32:
        return words.to(DTYPE, bitcast=True)
    else:
        low, high = _halves(words, DTYPE)
        return tl.reshape(tl.join(low, high), [2 * words.shape[0]])


@triton.jit
def begin_sum(peers, word, mask, RANKS: tl.constexpr):
    """Load the inputs of `sum_of_ranks` for these words of the memory, before the part is known."""
    over = tl.load(peers.over, cache_modifier=".cg")
    return map_peers(peers, RANKS), next_tags(peers, word, mask), over


@triton.jit
def push_part(begun, part, word, mask, RANKS: tl.constexpr, SIZE: tl.constexpr):
    """Only push this rank's float32 part: a later launch takes the words of all ranks.

    begun, word, mask  as in `sum_of_ranks`
    """
    mapped, tag, over = begun
    words = same_for_all(part.to(tl.int32, bitcast=True), RANKS)
    push_words(mapped, words, word, tag, mask, over, RANKS, SIZE)


@triton.jit
def sum_of_ranks(
    peers,
    begun,
    part,
    word,
    mask,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Push this rank's float32 `part`, wait for all ranks' parts, and sum them in rank order.
    `word` says which words of the memory the values use, `mask` which of them exist.
    """
    push_part(begun, part, word, mask, RANKS, SIZE)
    mapped, tag, over = begun
    found, over = take_words(peers, mapped, word, tag, mask, over, RANKS, SIZE, TIMED)
    return sum_words(found, tl.float32, RANKS)
