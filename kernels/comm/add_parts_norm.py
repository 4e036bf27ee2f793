"""The sum of a chunk's parts, the residual and the norm behind it in one kernel, each rank for some
of the lanes.

A rank keeps the residual stream of its own lanes alone, one run of them, and all ranks have what
the norm makes of all lanes: the sequence parallelism of Megatron-LM (Korthikanti et al. 2022),
whose reduce-scatter and all-gather are here the two ends of one launch. The parts lie in memory
that all ranks map. Once a program of all ranks has begun, which shows that their parts are
complete, it reads those of its lanes at all ranks, and stores the normed lanes at all ranks.

A rank ends a launch once all others have stored what they give it, and so have read what they need
of it; and nothing is stored at a rank before that rank has begun the same launch, when its last
product has read what was there. So neither parts nor normed lanes need two halves.

Sums are those of `push_sum`, and the norm is that of `add_rms_norm`, to the bit. Waits end as those
of `take_words` do.

Letters: R ranks, P programs, N lanes, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.flags import flag_words, set_flags, wait_for_flags
from graphengine.kernels.comm.items import Peers, from_next_on, map_addresses, push_options
from graphengine.kernels.core.lanes import FLOAT_DTYPES, check_lanes, check_rows, check_vector
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.norm_rope.norm import row_options, store_normed

LANE_PROGRAMS = 256
"""Of a launch, at most; of lanes that have a program each, some are read while others are stored.
"""

# Words in which memory is counted: what begins there is aligned for 16 bytes a thread.
_ALIGNED = 4


class SplitMemory(NamedTuple):
    """Where a rank has its part of each product of a chunk, and gets the normed lanes."""

    own: torch.Tensor
    """int32, on this device: words of a part, as many of normed lanes, then two flags for each
    program of each rank."""
    boxes: torch.Tensor
    """int64 [R], on this device: addresses of `own` at all ranks from the next one on, this one's
    last."""
    tags: torch.Tensor
    """int32 [P], on this device: the last one of each program; equal on all ranks."""

    @classmethod
    def over(
        cls, rank: int, own: torch.Tensor, addresses: Sequence[int], programs: int = LANE_PROGRAMS
    ) -> SplitMemory:
        """Of ranks that have summed nothing yet: `own` holds zeros on each of them, and is mapped
        for this one at `addresses`.
        """
        boxes = from_next_on(rank, addresses)
        return cls(
            own=own,
            boxes=torch.tensor(boxes, dtype=torch.int64, device=own.device),
            tags=torch.zeros(programs, dtype=torch.int32, device=own.device),
        )

    @property
    def size(self) -> int:
        """Words of a part, at most."""
        return (self.own.numel() - flag_words(len(self.boxes), len(self.tags))) // 2

    def part(self, lanes: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """`[lanes, hidden]`, dense: where this rank's part of a product belongs. ValueError where
        it has no room.
        """
        return self._view(0, lanes, hidden, dtype)

    def normed(self, lanes: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """`[lanes, hidden]`, dense: where the normed lanes come; else as `part`."""
        return self._view(self.size, lanes, hidden, dtype)

    def _view(self, start: int, lanes: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        words = math.ceil(lanes * hidden * dtype.itemsize / 4)
        if words > self.size:
            raise ValueError(
                f"{lanes} lanes of {hidden} values in {dtype} take {words} words: there are "
                f"{self.size}"
            )
        values = self.own[start : start + words].view(dtype)
        return values[: lanes * hidden].view(lanes, hidden)


def split_words(words: int, ranks: int, programs: int = LANE_PROGRAMS) -> int:
    """int32 values of `SplitMemory.own` for parts of so many words; none for none."""
    if not words:
        return 0
    half = math.ceil(words / _ALIGNED) * _ALIGNED
    return 2 * half + flag_words(ranks, programs)


def lanes_of_rank(lanes: int, rank: int, ranks: int) -> slice:
    """Which lanes of a chunk a rank has; the last ranks have fewer, or none."""
    each = -(-lanes // ranks)
    return slice(min(rank * each, lanes), min((rank + 1) * each, lanes))


def add_parts_rms_norm(
    peers: Peers,
    memory: SplitMemory,
    x_NH: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    bias_H: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x += the sum of all ranks' parts, then `rms_norm` of x: of this rank's lanes, by
    `lanes_of_rank`.

    All ranks call it with lanes of this shape and dtype, after the same calls, once their part is
    in `memory.part(N, H, dtype)`; it is lost with the next one.

    Args:
        x_NH: float32, the residual stream, with dense rows, any stride between them; those of other
            ranks' lanes are neither read nor written.
        weight_H, slot_N, eps: as of `add_rms_norm`.
        dtype: of the parts, to which their sum is rounded, and of the normed lanes.
        bias_H: added to the sum, and rounded with it once more; any float dtype.
        pdl: the launch before, whatever it is, may still run; it does not write weight and bias.

    Returns:
        `memory.normed(N, H, dtype)`, which all ranks have of all live lanes, with the same bits;
        until the next call. Padded lanes are not written. ValueError for a shape or dtype that does
        not fit.
    """
    check_rows(x_NH=x_NH)
    lanes, H = x_NH.shape
    if x_NH.dtype != torch.float32:
        raise ValueError(f"x_NH is {x_NH.dtype}, not torch.float32")
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"parts are {dtype}, not one of {FLOAT_DTYPES}")
    for name, vector in (("weight_H", weight_H), ("bias_H", bias_H)):
        if vector is None:
            continue
        if vector.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} is {vector.dtype}, not one of {FLOAT_DTYPES}")
        check_vector(name, vector, H, vector.dtype)
    check_lanes(lanes, slot_N=slot_N)
    part, normed = memory.part(lanes, H, dtype), memory.normed(lanes, H, dtype)
    most = -(-lanes // peers.ranks)
    launcher(_add_parts_rms_norm_kernel, (min(most, len(memory.tags)),))(
        x_NH,
        # For its dtype.
        part,
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
        **row_options(H),
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
    """A lane after the other of this rank's, of which there are `most` at most; SIZE words are a
    half of the memory.
    """
    DTYPE: tl.constexpr = part_ptr.dtype.element_ty
    PACKED: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    program, programs = tl.program_id(0), tl.num_programs(0)
    h = tl.arange(0, BLOCK_H)
    first_weight = tl.load(weight_ptr + h, mask=h < H, other=0.0)
    slot_ptr += RANK * most
    x_ptr += (RANK * most).to(tl.int64) * x_stride
    end = min(most, lanes - RANK * most)
    wait_for_inputs(PDL)
    # Asked for before the first wait.
    boxes = map_addresses(memory.boxes, tl.int32, RANKS)
    targets = map_addresses(memory.boxes, DTYPE, RANKS)
    tag = tl.load(memory.tags + program) + 1
    slot = tl.load(slot_ptr + program, mask=program < end, other=-1)
    # One thread's value, so that all agree.
    over = tl.atomic_add(peers.over, 0, sem="relaxed")
    begun, ended = 2 * SIZE + program, 2 * SIZE + RANKS * PROGRAMS + program

    if over == 0:
        set_flags(boxes, begun, PROGRAMS, tag, RANKS, TIMED)
    over, waited = wait_for_flags(peers, memory.own + begun, PROGRAMS, tag, over, RANKS, TIMED)

    part_ptrs = _readable(targets, over, RANKS)
    for own in range(program, end, programs):
        live = slot >= 0
        following = own + programs
        slot = tl.load(slot_ptr + following, mask=following < end, other=-1)
        if live:
            x_row_ptr = x_ptr + tl.cast(own, tl.int64) * x_stride
            at = (RANK * most + own).to(tl.int64) * H
            x = _add_parts(x_row_ptr, part_ptrs, at, bias_ptr, h, H, RANK, RANKS)
            squares = x * x
            for start in tl.range(BLOCK_H, H, BLOCK_H):
                more = _add_parts(x_row_ptr, part_ptrs, at, bias_ptr, start + h, H, RANK, RANKS)
                squares += more * more
            scale = tl.rsqrt(tl.sum(squares) / H + eps)

            at += SIZE * PACKED
            _store_at_all(x, scale, first_weight, targets, at, h, over, H, RANKS)
            if H > BLOCK_H:
                # The sums above are read again, maybe by other threads than stored them.
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
def _readable(box_ptrs, over, RANKS: tl.constexpr):
    """The same pointers; where waits are over the last one, this rank's, in place of all."""
    found = ()
    for ahead in tl.static_range(RANKS):
        box_ptr = tl.where(over == 0, box_ptrs[ahead], box_ptrs[RANKS - 1])
        found += (tl.multiple_of(box_ptr, 16),)  # type: ignore[assignment]
    return found


@triton.jit
def _add_parts(
    x_ptr,
    part_ptrs,
    at,
    bias_ptr,
    h,
    H: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Add the sum of columns `h` of all ranks' parts, from `at` on, to x in place and return what x
    is then; 0 past the end.
    """
    # All are asked for before the first is used, by each rank in another order: else all would ask
    # one rank at a time.
    parts = ()
    for ahead in tl.static_range(RANKS):
        parts += (tl.load(part_ptrs[ahead] + at + h, mask=h < H, other=0.0),)  # type: ignore[assignment]
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
    """Float32, of values of the parts' dtype, in the order of the ranks; the parts are those of
    the ranks from the next one on.
    """
    total = parts[RANKS - 1 - RANK].to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += parts[(rank + RANKS - RANK - 1) % RANKS].to(tl.float32)
    return total.to(parts[0].dtype).to(tl.float32)


@triton.jit
def _store_at_all(x, scale, weight, targets, at, h, over, H: tl.constexpr, RANKS: tl.constexpr):
    """Store normed columns at all ranks; where waits are over at this rank alone."""
    if over == 0:
        for ahead in tl.static_range(RANKS - 1):
            store_normed(x, scale, weight, targets[ahead] + at, h, H)
    store_normed(x, scale, weight, targets[RANKS - 1] + at, h, H)
