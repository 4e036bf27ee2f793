"""Publish log-probabilities to the host, in a mailbox of their own with the format of the first.

Row r writes lane r, and only the items that its reader asks for. Token j has 2 + 2 * top items,
from item j * (2 + 2 * top) on:

    0           bits of the token's log-probability, float32
    1           its rank
    2 + 2 * i   id of the i-th most probable token, its 32 bits: 0xffffffff for none
    3 + 2 * i   bits of its log-probability, float32

Each item is (sequence & 0xffffffff) << 32 | payload, one aligned 64-bit store that is trusted only
because of its own tag, in entry sequence % entries. `sequence` is what `verify_commit_publish` has
counted, so tag and entry are those of the replay's record in the first mailbox. For each token that
the row emitted, the items of the token itself and of the min(wanted, top) most probable tokens are
written. The host knows both numbers; how many tokens were emitted it knows from that record. All
other items stay as they were.

Letters: S slots, R rows, W lanes of a row, N = R * W lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.logits.logprobs import (
    LogprobTensors,
    RankedLogits,
    TokenLogprobs,
    check_emitted,
    check_ranked,
    check_wants,
)
from graphengine.kernels.logits.logprobs_triton import MAX_LOGPROBS
from graphengine.kernels.step.publish import check_mailbox
from graphengine.kernels.step.record import tag_items, tag_of

_TOP = tl.constexpr(MAX_LOGPROBS)


def logprob_items(top: int) -> int:
    """Items of a token; ValueError unless `top` is 0 to MAX_LOGPROBS."""
    if not 0 <= top <= MAX_LOGPROBS:
        raise ValueError(f"top={top}, not 0..{MAX_LOGPROBS}")
    return 2 + 2 * top


def publish_logprobs(
    mailbox_items: torch.Tensor,
    sequence_1: torch.Tensor,
    count_R: torch.Tensor,
    slot_N: torch.Tensor,
    wants: LogprobTensors,
    ranked: RankedLogits,
    tokens: TokenLogprobs,
    *,
    top: int,
    pdl: bool = False,
) -> None:
    """Write the log-probabilities that the rows' slots want; one launch. The module's docstring
    says where.

    Args:
        mailbox_items: int64 [entries, lanes, items], lanes >= R, items >= W * (2 + 2 * top); the
            device's memory or pinned host memory. Its reader must be done with the entry.
        sequence_1: int64 [1], `SlotState.sequence` after `verify_commit_publish`; only read.
        count_R: int32, tokens that each row emitted, those of its first lanes.
        slot_N: int32, -1 for a padded lane; only each row's first is read.
        wants: indexed by slot; `wanted` is read.
        ranked, tokens: those of the emitted tokens.
        top: how many most probable tokens a reader gets at most, 0..20; the layout depends on it.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. `slot_N` must be
            older than that one.

    ValueError for a shape, dtype or number that does not fit.
    """
    lanes, rows = slot_N.numel(), count_R.numel()
    check_lanes(lanes, slot=slot_N, rank=tokens.rank)
    check_vector("value", tokens.value, lanes, torch.float32)
    check_vector("sequence", sequence_1, 1, torch.int64)
    width = check_emitted(tokens.rank, count_R, lanes)
    check_ranked(ranked, lanes)
    check_wants(wants, wants.wanted.numel())
    items_of_token = logprob_items(top)
    entries, mailbox_lanes, items = check_mailbox(mailbox_items, rows)
    if items < width * items_of_token:
        raise ValueError(
            f"{width} tokens of {items_of_token} items do not fit a mailbox of {items} items a lane"
        )
    if not use_triton(slot_N):
        publish_logprobs_reference(
            mailbox_items, sequence_1, count_R, slot_N, wants, ranked, tokens, top=top
        )
        return
    if not rows:
        return
    launcher(_publish_kernel, (lanes,))(
        mailbox_items,
        sequence_1,
        count_R,
        slot_N,
        wants.wanted,
        ranked.top_id,
        ranked.top_value,
        *tokens,
        entries,
        mailbox_lanes,
        items,
        top,
        W=width,
        BLOCK_I=triton.next_power_of_2(items_of_token),
        num_warps=1,
        **launch_options(pdl),
    )


def publish_logprobs_reference(
    mailbox_items: torch.Tensor,
    sequence_1: torch.Tensor,
    count_R: torch.Tensor,
    slot_N: torch.Tensor,
    wants: LogprobTensors,
    ranked: RankedLogits,
    tokens: TokenLogprobs,
    *,
    top: int,
) -> None:
    """Plain twin of `publish_logprobs`."""
    width = slot_N.numel() // max(count_R.numel(), 1)
    sequence = int(sequence_1)
    entry = mailbox_items[sequence % mailbox_items.shape[0]]
    tag = tag_items(torch.tensor(sequence))
    for row, count in enumerate(count_R.tolist()):
        slot = int(slot_N[row * width])
        wanted = min(int(wants.wanted[slot]), top) if slot >= 0 else -1
        if wanted < 0:
            continue
        for j in range(min(count, width)):
            lane = row * width + j
            payload = torch.empty(2 + 2 * wanted, dtype=torch.int32)
            payload[0] = tokens.value[lane].view(torch.int32)
            payload[1] = tokens.rank[lane]
            payload[2::2] = ranked.top_id[lane, :wanted]
            payload[3::2] = ranked.top_value[lane, :wanted].view(torch.int32)
            first = j * logprob_items(top)
            entry[row, first : first + payload.numel()] = tag | (payload.long() & 0xFFFFFFFF)


@triton.jit
def _publish_kernel(
    items_ptr,
    sequence_ptr,
    count_ptr,
    slot_ptr,
    wanted_ptr,
    top_id_ptr,
    top_value_ptr,
    value_ptr,
    rank_ptr,
    entries,
    mailbox_lanes,
    items,
    top,
    W: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0)
    row = lane // W
    j = lane % W
    slot = tl.load(slot_ptr + row * W, cache_modifier=".cg")
    live = slot >= 0
    wanted = tl.minimum(tl.load(wanted_ptr + slot, mask=live, other=-1), top)
    wait_for_inputs(PDL)

    emitted = (wanted >= 0) & (j < tl.load(count_ptr + row, mask=live, other=0))
    sequence = tl.load(sequence_ptr)
    i = tl.arange(0, BLOCK_I)
    place = lane * _TOP + (i - 2) // 2
    beside = emitted & (i >= 2) & (i < 2 + 2 * wanted)
    top_id = tl.load(top_id_ptr + place, mask=beside, other=0)
    top_value = tl.load(top_value_ptr + place, mask=beside, other=0.0)
    value = tl.load(value_ptr + lane, mask=emitted, other=0.0)
    rank = tl.load(rank_ptr + lane, mask=emitted, other=0)
    payload = tl.where(i % 2 == 0, top_id, top_value.to(tl.int32, bitcast=True))
    payload = tl.where(i == 0, value.to(tl.int32, bitcast=True), payload)
    payload = tl.where(i == 1, rank, payload)
    entry_ptr = items_ptr + ((sequence % entries) * mailbox_lanes + row) * items
    item_ptr = entry_ptr + j * (2 + 2 * top) + i
    words = tag_of(sequence) | (payload.to(tl.int64) & 0xFFFFFFFF)
    tl.store(item_ptr, words, mask=emitted & (i < 2 + 2 * wanted))
