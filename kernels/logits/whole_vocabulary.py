"""Write the whole vocabulary's log-probabilities of prompt tokens to memory of the caller's.

    rank_logits -> write_prompt_rows

A captured graph does not know that memory: a host-owned field holds its address. Row p of it gets
log_softmax of the logits at position p, in the arithmetic of `logprobs.py`: what
`token_log_probabilities` reports for a token is the row's value at its id, bit for bit.

Letters: N lanes, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.logits.logprobs import RankedLogits, check_logits, check_ranked

_BLOCK = 4096


def write_prompt_rows(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    ranked: RankedLogits,
    memory_2: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Write a row of log-probabilities for each live lane; one launch.

    Args:
        logits_NV: float32, dense rows, any stride between them; only read.
        slot_N, position_N: int32; slot -1 for a padded lane, for which nothing is written.
        ranked: from `rank_logits` of the same logits.
        memory_2: int64 [2], host-owned: the address of float32 rows of V values, on the logits'
            device, and the values from one row to the next. Address 0: nothing is written.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. `slot_N` must be
            older than that one.

    ValueError for a shape or dtype that does not fit. Nothing checks the memory at the address.
    """
    lanes, vocabulary = check_logits(logits_NV)
    check_lanes(lanes, slot=slot_N, position=position_N)
    check_ranked(ranked, lanes)
    check_vector("memory", memory_2, 2, torch.int64)
    if not use_triton(logits_NV):
        write_prompt_rows_reference(logits_NV, slot_N, position_N, ranked, memory_2)
        return
    if not lanes:
        return
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    launcher(_write_kernel, (lanes, triton.cdiv(vocabulary, block)))(
        logits_NV,
        slot_N,
        position_N,
        ranked.largest,
        ranked.log_total,
        memory_2,
        logits_NV.stride(0),
        vocabulary,
        BLOCK=block,
        **launch_options(pdl),
    )


def write_prompt_rows_reference(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    ranked: RankedLogits,
    memory_2: torch.Tensor,
) -> None:
    """Plain twin of `write_prompt_rows`, for memory of the CPU: one lane after the other."""
    address, stride = map(int, memory_2)
    if not address:
        return
    for lane in live_lanes(slot_N).tolist():
        row = (logits_NV[lane] - ranked.largest[lane]) - ranked.log_total[lane]
        start = address + 4 * stride * int(position_N[lane])
        ctypes.memmove(start, row.contiguous().data_ptr(), 4 * row.numel())


@triton.jit
def _write_kernel(
    logits_ptr,
    slot_ptr,
    position_ptr,
    largest_ptr,
    log_total_ptr,
    memory_ptr,
    logits_stride,
    vocabulary,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane and tile."""
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    address = tl.load(memory_ptr)
    stride = tl.load(memory_ptr + 1)
    wait_for_inputs(PDL)

    if (slot >= 0) & (address != 0):
        rows = address.to(tl.pointer_type(tl.float32))
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocabulary
        logits = tl.load(logits_ptr + lane.to(tl.int64) * logits_stride + column, mask=inside)
        value = (logits - tl.load(largest_ptr + lane)) - tl.load(log_total_ptr + lane)
        position = tl.load(position_ptr + lane).to(tl.int64)
        tl.store(rows + position * stride + column, value, mask=inside)
