"""Rank tokens that a request's filters leave out after those they keep, for several drafts per
lane.

The best draft is then the one that the filters give. Tokens that the filters drop from the draft's
logits may still be kept in the target's, so they stay: they rank after all kept ones.

    cutoff   one program per lane   the set that the filters keep, as a threshold (`cutoff.py`)
    defer    (lane, vocab tile)     lower the logits outside the set

Letters: N lanes, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.logits.logprobs import check_logits
from graphengine.kernels.sample.candidates import (
    SamplingTensors,
    check_parameters,
    scaled_tile,
    sortable_key,
)
from graphengine.kernels.sample.cutoff import find_cutoffs
from graphengine.kernels.sample.sampling import kept_reference

FAR = tl.constexpr(10000.0)
"""How far filtered logits are lowered, over the temperature: far more than noise makes up for. It
is finite, so that filtered tokens keep their order."""

_BLOCK = 1024


def defer_filtered(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    *,
    ahead: int,
    pdl: bool = False,
) -> None:
    """Lower in place the logits that each live lane's filters leave out. Two launches.

    Args:
        logits_NV: float32, dense rows, any stride between them.
        slot_N, position_N: int32; older than the launch before.
        params: indexed by slot; host-owned.
        ahead: positions from a lane to the token that its logits predict.
        pdl: the launches may overlap the ones before, by the rules of `core.pdl`.

    Stop ids that min_len still forbids may or may not be lowered. ValueError for a shape, dtype or
    number that does not fit.
    """
    lanes, vocabulary = check_logits(logits_NV)
    check_lanes(lanes, slot=slot_N, position=position_N)
    check_parameters(params)
    if not use_triton(logits_NV):
        defer_filtered_reference(logits_NV, slot_N, position_N, params, ahead=ahead)
        return
    cut_key_N, cut_id_N = find_cutoffs(logits_NV, slot_N, position_N, params, ahead=ahead, pdl=pdl)
    launcher(_defer_kernel, (lanes, triton.cdiv(vocabulary, _BLOCK)))(
        logits_NV,
        slot_N,
        params.temperature,
        cut_key_N,
        cut_id_N,
        logits_NV.stride(0),
        vocabulary,
        BLOCK=_BLOCK,
        **launch_options(pdl),
    )


def defer_filtered_reference(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    *,
    ahead: int,
) -> None:
    """Plain twin of `defer_filtered`: one lane after the other."""
    ids = np.arange(logits_NV.shape[1])
    for lane in live_lanes(slot_N).tolist():
        slot, logits = int(slot_N[lane]), logits_NV[lane].numpy(force=True)
        there = logits > -np.inf
        if int(position_N[lane]) + ahead < int(params.min_len[slot]):
            there &= ~np.isin(ids, params.stop_ids[slot].numpy(force=True))
        columns = np.flatnonzero(there)
        row: list[Any] = [tensor[slot].numpy(force=True) for tensor in params[:5]]
        temperature, *filters = row
        if temperature <= 0 or not columns.size:
            continue
        _, kept = kept_reference(logits[columns], temperature, *filters)
        far = columns[~kept]
        logits[far] -= np.float32(FAR.value) * temperature
        logits_NV[lane] = torch.from_numpy(logits)


@triton.jit
def _defer_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    cut_key_ptr,
    cut_id_ptr,
    logits_stride,
    vocabulary,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane and tile. Without filters all keys lie above the cut."""
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
    wait_for_inputs(PDL)

    if (slot >= 0) & (temperature > 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits_ptr + lane.to(tl.int64) * logits_stride + column
        logits = tl.load(at, mask=column < vocabulary, other=float("-inf"))
        key = sortable_key(scaled_tile(logits, temperature))
        cut = tl.load(cut_key_ptr + lane)
        kept = (key > cut) | ((key == cut) & (column <= tl.load(cut_id_ptr + lane)))
        tl.store(at, logits - FAR * temperature, mask=(logits > float("-inf")) & (kept == 0))
