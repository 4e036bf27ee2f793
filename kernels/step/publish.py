"""The last kernel of a prefill: it writes the rows' tokens into the mailbox for the host to read.

`record` has the layout of the words.

Letters: R rows of a bucket, W tokens a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.step.record import pack_state, state_payload, tag_items, tag_of
from graphengine.kernels.step.state import EMITTED, SlotState, check_state

_EMITTED = tl.constexpr(EMITTED)


def publish(
    mailbox_items: torch.Tensor,
    state: SlotState,
    token_R: torch.Tensor,
    flags_R: torch.Tensor,
    slot_R: torch.Tensor,
) -> None:
    """Write this replay's records into the mailbox, then count the replay in `state.sequence`.

    With seq = sequence + 1, entry seq % entries gets all items of *all* its lanes, each one aligned
    64-bit store that carries its own tag, since no order among stores may be trusted:

        items[entry, lane, i] = (seq & 0xffffffff) << 32 | payload i

    The payloads are those of `record`: `count` is 1 where the flags have EMITTED and else 0, and
    `fed` equals `count`. For padded lanes and those past R every payload is 0, and nothing is read.

    Args:
        mailbox_items: int64 [entries, lanes, items], lanes >= R, items >= 2; the device's memory
            or pinned host memory. The entry is overwritten: its reader must be done with it.
        state: epoch is read, sequence updated in place.
        token_R, flags_R, slot_R: int32 [R]; flags below 16.
    """
    check_state(state)
    rows = slot_R.numel()
    check_lanes(rows, token=token_R, flags=flags_R, slot=slot_R)
    entries, lanes, items = check_mailbox(mailbox_items, rows)
    if not use_triton(state.sequence):
        publish_reference(mailbox_items, state, token_R, flags_R, slot_R)
        return
    launcher(_publish_kernel, (1,))(
        mailbox_items,
        state.sequence,
        state.epoch,
        token_R,
        flags_R,
        slot_R,
        rows,
        entries,
        lanes,
        ITEMS=items,
        BLOCK=triton.next_power_of_2(lanes),
        BLOCK_I=triton.next_power_of_2(items),
    )


def publish_reference(
    mailbox_items: torch.Tensor,
    state: SlotState,
    token_R: torch.Tensor,
    flags_R: torch.Tensor,
    slot_R: torch.Tensor,
) -> None:
    """Plain twin of `publish`."""
    count_R = flags_R & EMITTED
    publish_tokens_reference(
        mailbox_items, state, token_R[:, None], flags_R, count_R, count_R, slot_R
    )


def publish_tokens_reference(
    mailbox_items: torch.Tensor,
    state: SlotState,
    token_RW: torch.Tensor,
    flags_R: torch.Tensor,
    count_R: torch.Tensor,
    fed_R: torch.Tensor,
    slot_R: torch.Tensor,
) -> None:
    """`publish_reference` of the first `count` of a row's W tokens; W below the mailbox's items."""
    entries, lanes, items = mailbox_items.shape
    rows, width = token_RW.shape
    live = slot_R >= 0
    epoch = state.epoch[slot_R.where(live, 0).long()]
    emitted = torch.arange(width, device=token_RW.device) < count_R.where(live, 0)[:, None]
    payload = torch.zeros(lanes, items, dtype=torch.int64)
    payload[:rows, :width] = token_RW.long().where(emitted, 0)
    numbers = (fed_R.long(), count_R.long(), flags_R.long())
    payload[:rows, -1] = pack_state(epoch.long(), *numbers).where(live, 0)
    sequence = state.sequence + 1
    mailbox_items[sequence % entries] = tag_items(sequence) | payload
    state.sequence.copy_(sequence)


def check_mailbox(mailbox_items: torch.Tensor, rows: int, tokens: int = 1) -> tuple[int, int, int]:
    """The mailbox's (entries, lanes, items); ValueError unless `rows` rows of `tokens` fit it."""
    shape, dtype = tuple(mailbox_items.shape), mailbox_items.dtype
    dense = dtype == torch.int64 and mailbox_items.is_contiguous()
    if len(shape) != 3 or not dense:
        raise ValueError(
            f"mailbox must be a dense int64 [entries, lanes, items], not {dtype} {shape}"
        )
    entries, lanes, items = shape
    if rows > lanes or entries < 1:
        raise ValueError(f"{rows} rows do not fit a mailbox of {entries} entries x {lanes} lanes")
    if tokens >= items:
        raise ValueError(
            f"a mailbox must be of {tokens + 1} items a lane or more for {tokens} tokens and the "
            f"state, not {items}"
        )
    return entries, lanes, items


@triton.jit
def _publish_kernel(
    items_ptr,
    sequence_ptr,
    epoch_ptr,
    token_ptr,
    flags_ptr,
    slot_ptr,
    rows,
    entries,
    lanes,
    ITEMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    sequence = tl.load(sequence_ptr) + 1
    lane = tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + lane, mask=lane < rows, other=-1)
    live = slot >= 0
    flags = tl.load(flags_ptr + lane, mask=live, other=0)
    count = flags & _EMITTED
    token = tl.load(token_ptr + lane, mask=count != 0, other=0)
    epoch = tl.load(epoch_ptr + slot, mask=live, other=0)

    i = tl.arange(0, BLOCK_I)[None, :]
    state = state_payload(epoch, count, count, flags)[:, None]
    payload = tl.where(i == 0, token[:, None].to(tl.int64), tl.where(i == ITEMS - 1, state, 0))
    item_ptr = items_ptr + ((sequence % entries) * lanes + lane)[:, None] * ITEMS + i
    tl.store(item_ptr, tag_of(sequence) | payload, mask=(lane < lanes)[:, None] & (i < ITEMS))
    # Every warp has read the sequence before one of them overwrites it.
    tl.debug_barrier()
    tl.store(sequence_ptr, sequence)
