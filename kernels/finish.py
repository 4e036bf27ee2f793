"""The last kernel of a decode step: each row's token chosen, committed and published.

Letters: S slots, R rows, C tiles of the vocabulary, E stop ids a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.dispatch import use_triton
from graphengine.kernels.lanes import check_int32, check_lanes
from graphengine.kernels.pdl import launch_options, wait_for_inputs
from graphengine.kernels.sampling import check_tiles, token_of_tiles, token_of_tiles_reference
from graphengine.kernels.state import (
    EMITTED,
    DecodeLanes,
    SlotState,
    StopTensors,
    check_limits,
    check_mailbox,
    check_state,
    commit_flags,
    commit_tokens_reference,
    load_limits,
    publish_reference,
    stop_ids_block,
    store_items,
)

_EMITTED = tl.constexpr(EMITTED)

_MAX_BLOCK_C = 16384


def finish_decode(
    best_RC: torch.Tensor,
    health_RC: torch.Tensor,
    lanes: DecodeLanes,
    state: SlotState,
    limits: StopTensors,
    mailbox_items: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take each live row's token out of its tiles and into its slot's state, and publish it.

    The query's K and V are in the cache by now: kv_len grows by one, and the token becomes the next
    query. It ends the request if it is a stop id or if the sequence with it, kv_len + 1 tokens,
    reaches max_len. A row without valid logits stops with the flag INVALID alone, and its
    next_token stays. Then the row's two mailbox items are written as by `publish`, for the lanes
    of the R rows only; state.sequence counts the replay once all rows have.

    Args:
        best_RC, health_RC: from `sample_tiles` or from an lm_head with the sampler folded in.
        lanes: from `begin_decode`.
        state: next_token, kv_len, running and sequence are updated in place; epoch is read.
        limits: host-owned.
        mailbox_items: int64 [entries, lanes, 2], lanes >= R; the device's memory or pinned host
            memory. The entry is overwritten: its reader must be done with it.
        arrivals: dense int32; element 0 is zero before and after.
        pdl: the launch may overlap the one before, by the rules of `kernels.pdl`. At least one
            launch must lie between this one and `begin_decode`.

    Returns:
        token_R: new int32 [R]; -1 for a row without valid logits, undefined in a padded lane.
        flags_R: new int32 [R]; EMITTED | STOP | LENGTH or INVALID, 0 in a padded lane.
        ValueError for a shape or dtype that does not fit.
    """
    slots = check_state(state)
    stop_ids = check_limits(limits, slots)
    rows = lanes.slot.numel()
    check_lanes(rows, **lanes._asdict())
    tiles = check_tiles(best_RC, health_RC, rows)
    entries, mailbox_lanes = check_mailbox(mailbox_items, rows)
    check_int32(arrivals=arrivals)
    if not use_triton(best_RC):
        return finish_decode_reference(best_RC, health_RC, lanes, state, limits, mailbox_items)
    token_R, flags_R = torch.empty_like(lanes.slot), torch.empty_like(lanes.slot)
    block_c = min(triton.next_power_of_2(tiles), _MAX_BLOCK_C)
    _finish_decode_kernel[(rows,)](
        best_RC,
        health_RC,
        lanes.slot,
        state.next_token,
        state.kv_len,
        state.running,
        state.epoch,
        state.sequence,
        limits.stop_ids,
        limits.max_len,
        mailbox_items,
        arrivals,
        token_R,
        flags_R,
        tiles,
        stop_ids,
        entries,
        mailbox_lanes,
        BLOCK_C=block_c,
        BLOCK_E=stop_ids_block(stop_ids),
        num_warps=min(max(block_c // 256, 1), 32),
        **launch_options(pdl),
    )
    return token_R, flags_R


def finish_decode_reference(
    best_RC: torch.Tensor,
    health_RC: torch.Tensor,
    lanes: DecodeLanes,
    state: SlotState,
    limits: StopTensors,
    mailbox_items: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain twin of `finish_decode`, which needs no arrivals."""
    token_R = token_of_tiles_reference(best_RC, health_RC)
    flags_R = torch.zeros_like(token_R)
    live = lanes.slot >= 0
    slot = lanes.slot[live].long()
    state.kv_len[slot] += 1
    flags_R[live] = commit_tokens_reference(state, token_R[live], slot, limits)
    rows = token_R.numel()
    publish_reference(mailbox_items[:, :rows], state, token_R, flags_R, lanes.slot)
    return token_R, flags_R


@triton.jit
def _finish_decode_kernel(
    best_ptr,
    health_ptr,
    slot_ptr,
    next_token_ptr,
    kv_len_ptr,
    running_ptr,
    epoch_ptr,
    sequence_ptr,
    stop_ids_ptr,
    max_len_ptr,
    items_ptr,
    arrivals_ptr,
    token_ptr,
    flags_ptr,
    tiles,
    stop_ids,
    entries,
    mailbox_lanes,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. All that it reads but the tiles is older than the launch before."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row, cache_modifier=".cg")
    live = slot >= 0
    stop_ids_E, max_len = load_limits(stop_ids_ptr, max_len_ptr, slot, live, stop_ids, BLOCK_E)
    kv_len = tl.load(kv_len_ptr + slot, mask=live, other=0, cache_modifier=".cg") + 1
    epoch = tl.load(epoch_ptr + slot, mask=live, other=0, cache_modifier=".cg")
    sequence = tl.load(sequence_ptr, cache_modifier=".cg") + 1
    wait_for_inputs(PDL)

    token = token_of_tiles(best_ptr, health_ptr, row, tiles, live, BLOCK_C)
    flags = commit_flags(token, kv_len, live, stop_ids_E, max_len)
    # Every warp has read the slot's state before one of them overwrites it.
    tl.debug_barrier()
    tag = (sequence & 0xFFFFFFFF) << 32
    entry_ptr = items_ptr + (sequence % entries) * mailbox_lanes * 2
    store_items(entry_ptr, row, tag, tl.where(live, token, 0), epoch, flags, True)
    tl.store(next_token_ptr + slot, token, mask=(flags & _EMITTED) != 0)
    tl.store(kv_len_ptr + slot, kv_len, mask=live)
    tl.store(running_ptr + slot, 0, mask=live & (flags != _EMITTED))
    tl.store(token_ptr + row, token, mask=live)
    tl.store(flags_ptr + row, flags)

    # The sequence moves on only after every program has read it.
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(sequence_ptr, sequence)
        tl.store(arrivals_ptr, 0)
