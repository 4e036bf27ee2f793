"""Log-probabilities of the codes of a frame.

    code_logprobs           once a code is known     its log-probability
    publish_code_logprobs   last                     writes those of a frame into a mailbox

A code's log-probability is log_softmax(l)[code] = (l[code] - max l) - log(sum(exp(l - max l))), in
float32, as PyTorch has it. The order of the sum depends on the number of codes alone. With a NaN
or +inf among the logits it is NaN.

In the mailbox, row r writes lane r: item k is (sequence & 0xffffffff) << 32 | the bits of the
float32 of code k, one aligned 64-bit store in entry sequence % entries that is trusted only because
of its own tag. Sequence is the step counter after the step has published, so tag and entry are
those of the replay's record in the first mailbox. Rows without a frame, and rows whose slot wants
no log-probabilities, write nothing.

Letters: N lanes, S slots, K codes of a frame, V codes of a codebook.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.logits.logprobs import (
    LogprobTensors,
    check_logits,
    check_raw,
    check_wants,
)
from graphengine.kernels.logits.sampled_logits import SAMPLED
from graphengine.kernels.step.publish import check_mailbox
from graphengine.kernels.step.record import tag_items, tag_of

_MAX_BLOCK = 4096


def code_logprobs(
    logits_NV: torch.Tensor,
    code_N: torch.Tensor,
    slot_N: torch.Tensor,
    wants: LogprobTensors,
    out_N: torch.Tensor,
    *,
    sampled_NV: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write the log-probability of each lane's code, where its slot wants it; one launch.

    Args:
        logits_NV: float32, dense rows, any stride between them; only read.
        code_N: int32. A code outside 0..V-1 has -inf, or NaN where the logits do.
        slot_N: int32, -1 = padded lane.
        wants: indexed by slot: `wanted` below 0 asks for none.
        out_N: float32, dense. Padded lanes, and lanes whose slot wants none, are left alone.
        sampled_NV: float32 [N, V], dense rows: what `write_sampled_logits` wrote; read instead of
            `logits_NV` for slots with `wants.raw` SAMPLED. None where no slot has it.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    lanes, codes = check_logits(logits_NV)
    check_lanes(lanes, code=code_N, slot=slot_N)
    check_wants(wants, wants.wanted.numel())
    check_vector("out", out_N, lanes, torch.float32)
    if sampled_NV is not None:
        check_raw(sampled_NV, logits_NV)
    if not use_triton(logits_NV):
        code_logprobs_reference(logits_NV, code_N, slot_N, wants, out_N, sampled_NV=sampled_NV)
        return
    block = min(triton.next_power_of_2(codes), _MAX_BLOCK)
    launcher(_code_logprobs_kernel, (lanes,))(
        logits_NV,
        sampled_NV,
        code_N,
        slot_N,
        *wants,
        out_N,
        logits_NV.stride(0),
        0 if sampled_NV is None else sampled_NV.stride(0),
        codes,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        **launch_options(pdl),
    )


def code_logprobs_reference(
    logits_NV: torch.Tensor,
    code_N: torch.Tensor,
    slot_N: torch.Tensor,
    wants: LogprobTensors,
    out_N: torch.Tensor,
    *,
    sampled_NV: torch.Tensor | None = None,
) -> None:
    """Plain twin of `code_logprobs`: one lane after the other."""
    codes = logits_NV.shape[1]
    for lane in live_lanes(slot_N).tolist():
        slot, code = int(slot_N[lane]), int(code_N[lane])
        if int(wants.wanted[slot]) < 0:
            continue
        sampled = sampled_NV is not None and int(wants.raw[slot]) == SAMPLED.value
        row_V = (sampled_NV if sampled and sampled_NV is not None else logits_NV)[lane]
        found = row_V.log_softmax(0)
        known = 0 <= code < codes
        out_N[lane] = found[code] if known else found.sum() - torch.inf


def publish_code_logprobs(
    mailbox_items: torch.Tensor,
    sequence_1: torch.Tensor,
    count_R: torch.Tensor,
    slot_R: torch.Tensor,
    wants: LogprobTensors,
    value_KR: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Write the log-probabilities of the rows' frames, where their slots want them; one launch.
    The module's docstring says where.

    Args:
        mailbox_items: int64 [entries, lanes, items], lanes >= R, items >= K; the device's memory or
            pinned host memory. Its reader must be done with the entry.
        sequence_1: int64 [1], `SlotState.sequence` after the step has published; only read.
        count_R: int32, 0 for a row without a frame.
        slot_R: int32, -1 for a padded row.
        wants: indexed by slot; `wanted` is read.
        value_KR: float32, dense.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    rows = slot_R.numel()
    check_lanes(rows, slot=slot_R, count=count_R)
    check_vector("sequence", sequence_1, 1, torch.int64)
    check_wants(wants, wants.wanted.numel())
    shape, dtype = tuple(value_KR.shape), value_KR.dtype
    dense = dtype == torch.float32 and value_KR.is_contiguous()
    if len(shape) != 2 or shape[1] != rows or not dense:
        raise ValueError(f"value must be a dense float32 [K, {rows}], not {dtype} {shape}")
    entries, mailbox_lanes, items = check_mailbox(mailbox_items, rows, 0)
    if items < shape[0]:
        raise ValueError(f"{shape[0]} codes do not fit a mailbox of {items} items a lane")
    if not use_triton(slot_R):
        publish_code_logprobs_reference(mailbox_items, sequence_1, count_R, slot_R, wants, value_KR)
        return
    if not rows:
        return
    launcher(_publish_kernel, (rows,))(
        mailbox_items,
        sequence_1,
        count_R,
        slot_R,
        wants.wanted,
        value_KR,
        rows,
        entries,
        mailbox_lanes,
        items,
        K=shape[0],
        BLOCK_K=triton.next_power_of_2(shape[0]),
        num_warps=1,
        **launch_options(pdl),
    )


def publish_code_logprobs_reference(
    mailbox_items: torch.Tensor,
    sequence_1: torch.Tensor,
    count_R: torch.Tensor,
    slot_R: torch.Tensor,
    wants: LogprobTensors,
    value_KR: torch.Tensor,
) -> None:
    """Plain twin of `publish_code_logprobs`."""
    sequence = int(sequence_1)
    entry = mailbox_items[sequence % mailbox_items.shape[0]]
    bits_KR = value_KR.view(torch.int32).long() & 0xFFFFFFFF
    for row in live_lanes(slot_R).tolist():
        if int(count_R[row]) and int(wants.wanted[int(slot_R[row])]) >= 0:
            entry[row, : len(bits_KR)] = tag_items(torch.tensor(sequence)) | bits_KR[:, row]


@triton.jit
def _code_logprobs_kernel(
    logits_ptr,
    sampled_ptr,
    code_ptr,
    slot_ptr,
    wanted_ptr,
    wants_raw_ptr,
    out_ptr,
    logits_stride,
    sampled_stride,
    codes,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + lane)
    live = slot >= 0
    if tl.load(wanted_ptr + slot, mask=live, other=-1) >= 0:
        row_ptr = logits_ptr + lane.to(tl.int64) * logits_stride
        # Not one `if`: without sampled logits there is nothing to compile for.
        if sampled_ptr is not None:  # noqa: SIM102
            if tl.load(wants_raw_ptr + slot) == SAMPLED:
                row_ptr = sampled_ptr + lane.to(tl.int64) * sampled_stride
        largest_B = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, codes, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            tile = tl.load(row_ptr + ids, mask=ids < codes, other=float("-inf"))
            largest_B = tl.maximum(largest_B, tile)
        largest = tl.max(largest_B, 0)
        total_B = tl.zeros([BLOCK], tl.float32)
        for start in range(0, codes, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            tile = tl.load(row_ptr + ids, mask=ids < codes, other=float("-inf"))
            total_B += tl.exp(tile - largest)
        code = tl.load(code_ptr + lane)
        known = (code >= 0) & (code < codes)
        logit = tl.load(row_ptr + code, mask=known, other=float("-inf"))
        tl.store(out_ptr + lane, (logit - largest) - tl.log(tl.sum(total_B, 0)))


@triton.jit
def _publish_kernel(
    items_ptr,
    sequence_ptr,
    count_ptr,
    slot_ptr,
    wanted_ptr,
    value_ptr,
    rows,
    entries,
    mailbox_lanes,
    items,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + row)
    live = slot >= 0
    wanted = tl.load(wanted_ptr + slot, mask=live, other=-1)
    count = tl.load(count_ptr + row, mask=live, other=0)
    shown = (wanted >= 0) & (count > 0)
    sequence = tl.load(sequence_ptr)
    k = tl.arange(0, BLOCK_K)
    there = shown & (k < K)
    value = tl.load(value_ptr + k * rows + row, mask=there, other=0.0)
    words = tag_of(sequence) | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    entry_ptr = items_ptr + ((sequence % entries) * mailbox_lanes + row) * items
    tl.store(entry_ptr + k, words, mask=there)
