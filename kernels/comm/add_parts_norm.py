"""The sum of a chunk's parts, the residual and the norm after it in one kernel, with the lanes
divided among the ranks.

A rank keeps the residual stream of its own lanes only, a contiguous run, and all ranks get the
normed values of all lanes: the sequence parallelism of Megatron-LM (Korthikanti et al. 2022), whose
reduce-scatter and all-gather are here the two ends of one launch. A program first stores its rank's
parts of other ranks' lanes at those ranks. Then it adds up all ranks' parts of its own lanes, and
stores the normed lanes at all ranks. Flags tell when either has arrived.

Programs work in shifts: each stores its parts once the program one shift earlier has stored its
own. So links are busy while other programs wait for flags, and they carry more with few stores at a
time. In one process on four H200s 1,024 lanes of 4,096 values took 43 us, and 49 without shifts.

A rank ends a launch once it has the normed lanes of all others, which by then have read the parts
that it had stored. No lane is stored at a rank before that rank has begun the same launch, and by
then its last product has read the previous contents. So neither parts nor normed lanes need two
halves.

Sums are bit-equal to those of `push_sum`, and the norm to that of `add_rms_norm`. Waits end as
those of `take_words` do.

Letters: R ranks, P programs, N lanes, H hidden.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.flags import (
    FlaggedMemory,
    doze,
    flag_words,
    set_flags,
    wait_for_flags,
)
from graphengine.kernels.comm.items import Peers, map_addresses, push_options, turn_of
from graphengine.kernels.core.lanes import FLOAT_DTYPES, check_lanes, check_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.triton_versions import UNFUSED
from graphengine.kernels.norm_rope.norm import check_weight, row_options, store_normed

LANE_PROGRAMS = 256
"""Most programs of a launch. With more than one per multiprocessor some store while others wait."""

_SHIFTS = tl.constexpr(4)
"""Groups of consecutive programs; the groups store their parts one after the other."""

# Memory is counted in multiples of this many words, so that it is aligned for 16 bytes per thread.
_ALIGNED = 4


def split_has_room(memory: FlaggedMemory, lanes: int, hidden: int, dtype: torch.dtype) -> bool:
    """Whether this memory has room to split chunks of this many lanes."""
    return _words_needed(memory, lanes, hidden, dtype) <= memory.size


def split_normed(
    memory: FlaggedMemory, lanes: int, hidden: int, dtype: torch.dtype
) -> torch.Tensor:
    """View of `memory` that receives the normed lanes: dense `[lanes, hidden]`. ValueError if there
    is no room.
    """
    if not split_has_room(memory, lanes, hidden, dtype):
        raise ValueError(
            f"{lanes} lanes of {hidden} values in {dtype} take "
            f"{_words_needed(memory, lanes, hidden, dtype)} words: there are {memory.size}"
        )
    values = memory.own[memory.size : 2 * memory.size].view(dtype)
    return values[: lanes * hidden].view(lanes, hidden)


def _words_needed(memory: FlaggedMemory, lanes: int, hidden: int, dtype: torch.dtype) -> int:
    """Words for the normed lanes, or for a full share of parts from every other rank if these are
    more.
    """
    ranks = len(memory.boxes)
    most = max(lanes, (ranks - 1) * -(-lanes // ranks))
    return math.ceil(most * hidden * dtype.itemsize / 4)


def split_words(words: int, ranks: int, programs: int = LANE_PROGRAMS) -> int:
    """int32 values of `FlaggedMemory.own` for chunks of `words` words whose lanes ranks divide."""
    if not words:
        return 0
    half = math.ceil(words / _ALIGNED) * _ALIGNED
    return 2 * half + flag_words(ranks, programs)


def split_lanes(lanes: int, rank: int, ranks: int) -> slice:
    """The lanes of a chunk that a rank owns; the last ranks have fewer, or none."""
    each = -(-lanes // ranks)
    return slice(min(rank * each, lanes), min((rank + 1) * each, lanes))


def add_parts_rms_norm(
    peers: Peers,
    memory: FlaggedMemory,
    part_NH: torch.Tensor,
    x_NH: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    bias_H: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute x += the sum of all ranks' parts, then `rms_norm` of x, for this rank's lanes
    (`split_lanes`).

    All ranks call it with parts of one shape and dtype, after the same calls. The halves of
    `memory` hold the other ranks' parts of this one's lanes, and the normed lanes.

    Args:
        part_NH: dense, of any float dtype; the sum is rounded to it, and the normed lanes have it.
            Not in `memory`.
        x_NH: float32, the residual stream, with dense rows, any stride between them; rows of other
            ranks' lanes are neither read nor written.
        weight_H, slot_N, eps: as in `add_rms_norm`.
        bias_H: added to the rounded sum, which is then rounded again; any float dtype.
        pdl: the launch before, whatever it is, may still run; it does not write weight and bias.

    Returns:
        `split_normed` of the part's shape and dtype: all ranks have all live lanes, with the same
        bits, until the next call. Padded lanes are not written. ValueError for a shape or dtype
        that does not fit.
    """
    check_rows(x_NH=x_NH)
    lanes, H = x_NH.shape
    if x_NH.dtype != torch.float32:
        raise ValueError(f"x_NH is {x_NH.dtype}, not torch.float32")
    if part_NH.dtype not in FLOAT_DTYPES:
        raise ValueError(f"parts are {part_NH.dtype}, not one of {FLOAT_DTYPES}")
    if part_NH.shape != x_NH.shape or not part_NH.is_contiguous():
        raise ValueError(
            f"a part must be a dense {list(x_NH.shape)}, as x_NH is, not {list(part_NH.shape)}"
        )
    check_weight(weight_H, H)
    if bias_H is not None:
        check_weight(bias_H, H, "bias_H")
    check_lanes(lanes, slot_N=slot_N)
    normed = split_normed(memory, lanes, H, part_NH.dtype)
    most, options = -(-lanes // peers.ranks), row_options(H)
    # With up to four ranks all programs are resident on an H200: of those with 16 warps, one per
    # multiprocessor. Elsewhere they start in the order of their numbers, as `items` says of
    # products, so the first of the waiting ones are running.
    programs = min(most, len(memory.tags), LANE_PROGRAMS * 8 // max(options["num_warps"], 8))
    launcher(_add_parts_rms_norm_kernel, (programs,))(
        x_NH,
        part_NH,
        bias_H,
        weight_H,
        slot_N,
        lanes,
        most,
        x_NH.stride(0),
        eps,
        peers.tensors,
        memory,
        RANK=peers.rank,
        PROGRAMS=len(memory.tags),
        **push_options(peers) | {"SIZE": memory.size},
        **options,
        **UNFUSED,
        **launch_options(pdl),
    )
    return normed


@triton.jit(do_not_specialize=["lanes", "most"])
def _add_parts_rms_norm_kernel(
    x_ptr,
    part_ptr,
    bias_ptr,
    weight_ptr,
    slot_ptr,
    lanes,
    most,
    x_stride,
    eps,
    peers,
    memory,
    RANK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SIZE: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANKS: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Handle this rank's lanes, `most` at most, one after the other; SIZE words are a half of the
    memory. No other rank uses a rank's own flags, the last ones of either kind: those of the first
    kind tell the programs of a shift that it is their turn.
    """
    DTYPE: tl.constexpr = part_ptr.dtype.element_ty
    PACKED: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    program, programs = tl.program_id(0), tl.num_programs(0)
    h = tl.arange(0, BLOCK_H)
    first_weight = tl.load(weight_ptr + h, mask=h < H, other=0.0)
    x_ptr += (RANK * most).to(tl.int64) * x_stride
    end = min(most, lanes - RANK * most)
    wait_for_inputs(PDL)
    # Loaded before the first wait.
    boxes = map_addresses(memory.boxes, tl.int32, RANKS)
    targets = map_addresses(memory.boxes, DTYPE, RANKS, program)
    tag = tl.load(memory.tags + program) + 1
    # Atomic, so that all threads get one thread's value and agree.
    over = tl.atomic_add(peers.over, 0, sem="relaxed")
    given, ended = 2 * SIZE + program, 2 * SIZE + RANKS * PROGRAMS + program

    turn_ptr = memory.own + 2 * SIZE + (RANKS - 1) * PROGRAMS + program
    shift = tl.cdiv(programs, _SHIFTS)
    has_next = program + shift < programs
    next_tag = tl.load(memory.tags + program + shift, mask=has_next, other=0) + 1

    if program >= shift:
        _wait_for_turn(turn_ptr, tag, TIMED)
    if over == 0:
        for own in range(program, most, programs):
            _give_parts(part_ptr, targets, slot_ptr, own, most, lanes, H, BLOCK_H, RANK, RANKS)
    tl.debug_barrier()
    tl.store(turn_ptr + shift, next_tag, mask=has_next)
    if over == 0:
        set_flags(boxes, given, PROGRAMS, tag, RANKS, TIMED)
    slot_ptr += RANK * most
    slot = tl.load(slot_ptr + program, mask=program < end, other=-1)
    over, waited = wait_for_flags(peers, memory.own + given, PROGRAMS, tag, over, RANKS, TIMED)

    for own in range(program, end, programs):
        live = slot >= 0
        following = own + programs
        slot = tl.load(slot_ptr + following, mask=following < end, other=-1)
        if live:
            x_row_ptr = x_ptr + tl.cast(own, tl.int64) * x_stride
            at = (RANK * most + own).to(tl.int64) * H
            part_ptrs = _parts_of(
                part_ptr + at, targets[RANKS - 1] + own * H, most * H, over, RANKS
            )
            x = _add_parts(x_row_ptr, part_ptrs, bias_ptr, h, H, RANK, RANKS)
            squares = x * x
            for start in tl.range(BLOCK_H, H, BLOCK_H):
                more = _add_parts(x_row_ptr, part_ptrs, bias_ptr, start + h, H, RANK, RANKS)
                squares += more * more
            scale = tl.rsqrt(tl.sum(squares) / H + eps)

            at += SIZE * PACKED
            _store_at_all(x, scale, first_weight, targets, at, h, over, H, RANKS)
            if H > BLOCK_H:
                # The sums above are read again, maybe by other threads than those that stored them.
                tl.debug_barrier()
            for start in tl.range(BLOCK_H, H, BLOCK_H):
                more = tl.load(x_row_ptr + start + h, mask=start + h < H, other=0.0)
                weight = tl.load(weight_ptr + start + h, mask=start + h < H, other=0.0)
                _store_at_all(more, scale, weight, targets, at, start + h, over, H, RANKS)

    if over == 0:
        set_flags(boxes, ended, PROGRAMS, tag, RANKS, TIMED)
    over, late = wait_for_flags(peers, memory.own + ended, PROGRAMS, tag, over, RANKS, TIMED)
    tl.store(memory.tags + program, tag)
    if program == 0:
        tl.store(peers.waited, tl.load(peers.waited) + waited + late)


@triton.jit
def _wait_for_turn(turn_ptr, tag, TIMED: tl.constexpr):
    """Wait until the program one shift earlier has given its parts. It began earlier and waits for
    no other rank until then, so this wait has no limit.
    """
    found = tl.load(turn_ptr, volatile=True)
    while found != tag:
        doze(TIMED)
        found = tl.load(turn_ptr, volatile=True)


@triton.jit
def _give_parts(
    part_ptr,
    targets,
    slot_ptr,
    own,
    most,
    lanes,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Store this rank's part of lane number `own` of each other rank at that rank.

    A rank holds the parts of all others one after the other, from the next rank's on. `targets` are
    in this program's order, by `turn_of`.
    """
    program = tl.program_id(0)
    for start in tl.static_range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        parts, live = (), ()
        for each in tl.static_range(RANKS - 1):
            lane = (RANK + 1 + turn_of(program, each, RANKS)) % RANKS * most + own
            live += (tl.load(slot_ptr + lane, mask=lane < lanes, other=-1) >= 0,)  # type: ignore[assignment]
        for each in tl.static_range(RANKS - 1):
            lane = (RANK + 1 + turn_of(program, each, RANKS)) % RANKS * most + own
            row_ptr = part_ptr + lane.to(tl.int64) * H
            parts += (tl.load(row_ptr + h, mask=(h < H) & live[each], other=0.0),)  # type: ignore[assignment]
        for each in tl.static_range(RANKS - 1):
            at = ((RANKS - 2 - turn_of(program, each, RANKS)) * most + own).to(tl.int64) * H
            tl.store(targets[each] + at + h, parts[each], mask=(h < H) & live[each])


@triton.jit
def _parts_of(own_ptr, given_ptr, stride, over, RANKS: tl.constexpr):
    """Pointers to all ranks' parts of a lane, from the next rank's on. Once waits are over, all
    point to this rank's own part.
    """
    found = ()
    for ahead in tl.static_range(RANKS - 1):
        other_ptr = given_ptr + ahead * stride.to(tl.int64)
        found += (tl.where(over == 0, other_ptr, own_ptr),)  # type: ignore[assignment]
    return found + (own_ptr,)  # noqa: RUF005  (Triton knows no stars)


@triton.jit
def _add_parts(
    x_ptr, part_ptrs, bias_ptr, h, H: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr
):
    """Add the sum of columns `h` of all ranks' parts to x in place and return the new x; 0 past the
    end.
    """
    # All loads are issued before the first result is used.
    parts = ()
    for ahead in tl.static_range(RANKS):
        parts += (tl.load(part_ptrs[ahead] + h, mask=h < H, other=0.0),)  # type: ignore[assignment]
    x = tl.load(x_ptr + h, mask=h < H, other=0.0)
    total = _rounded_sum(parts, RANK, RANKS)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        total = total.to(part_ptrs[0].dtype.element_ty).to(tl.float32)
    x += total
    tl.store(x_ptr + h, x, mask=h < H)
    return x


@triton.jit
def _rounded_sum(parts, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Sum the parts in rank order, in float32, rounded to the parts' dtype. `parts` begins with the
    next rank's.
    """
    total = parts[RANKS - 1 - RANK].to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += parts[(rank + RANKS - RANK - 1) % RANKS].to(tl.float32)
    return total.to(parts[0].dtype).to(tl.float32)


@triton.jit
def _store_at_all(x, scale, weight, targets, at, h, over, H: tl.constexpr, RANKS: tl.constexpr):
    """Store normed columns at all ranks; once waits are over, at this rank alone."""
    if over == 0:
        for each in tl.static_range(RANKS - 1):
            store_normed(x, scale, weight, targets[each] + at, h, H)
    store_normed(x, scale, weight, targets[RANKS - 1] + at, h, H)
