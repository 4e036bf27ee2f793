"""The logits of the distribution that a token is drawn from, for requests that want its logprobs.

    sample_tiles -> verify_commit_publish -> write_sampled_logits -> rank_logits

They are the processed logits after what `sampling.py` does to them: stop ids that wait for min_len
at -inf, divided by the temperature, and at -inf where a filter leaves the token out. A softmax of
them gives the probabilities of the draw. A greedy request has no such distribution: its logits keep
temperature 1 and all tokens.

    cutoff   one program per lane   the set that the filters keep, as a threshold (`cutoff.py`)
    write    (lane, vocab tile)     the logits

Letters: S slots, N lanes, V vocabulary.
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
from graphengine.kernels.logits.logprobs import (
    LogprobTensors,
    check_logits,
    check_raw,
    check_wants,
)
from graphengine.kernels.sample.candidates import (
    SamplingTensors,
    check_parameters,
    mask_stop_ids,
    scaled_tile,
    sortable_key,
)
from graphengine.kernels.sample.cutoff import find_cutoffs
from graphengine.kernels.sample.sampling import kept_reference

SAMPLED = tl.constexpr(2)
"""Value of `LogprobTensors.raw` for log-probabilities of the distribution that is drawn from."""

_BLOCK = 1024


def write_sampled_logits(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    wants: LogprobTensors,
    *,
    out_NV: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Write the logits of each lane's draw, where its slot wants their logprobs. Two launches.

    Args:
        logits_NV: float32, dense rows, any stride between them; only read.
        slot_N, position_N: int32, of the queries; older than the launch before.
        params, wants: indexed by slot; host-owned.
        out_NV: float32 [N, V], dense rows: what `rank_logits` reads as `raw_NV`. Lanes whose slot
            has another `wants.raw` than SAMPLED are left alone.
        pdl: the launches may overlap the ones before, by the rules of `core.pdl`.

    ValueError for a shape, dtype or number that does not fit.
    """
    lanes, vocabulary = check_logits(logits_NV)
    check_lanes(lanes, slot=slot_N, position=position_N)
    stop_ids = check_parameters(params)
    check_wants(wants, params.temperature.numel())
    check_raw(out_NV, logits_NV)
    if not use_triton(logits_NV):
        write_sampled_logits_reference(logits_NV, slot_N, position_N, params, wants, out_NV=out_NV)
        return
    cut_key_N, cut_id_N = find_cutoffs(logits_NV, slot_N, position_N, params, ahead=1, pdl=pdl)
    launcher(_write_kernel, (lanes, triton.cdiv(vocabulary, _BLOCK)))(
        logits_NV,
        slot_N,
        position_N,
        params.temperature,
        params.stop_ids,
        params.min_len,
        *wants,
        cut_key_N,
        cut_id_N,
        out_NV,
        logits_NV.stride(0),
        out_NV.stride(0),
        vocabulary,
        stop_ids,
        BLOCK=_BLOCK,
        **launch_options(pdl),
    )


def write_sampled_logits_reference(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    wants: LogprobTensors,
    *,
    out_NV: torch.Tensor,
) -> None:
    """Plain twin of `write_sampled_logits`: one lane after the other."""
    for lane in live_lanes(slot_N).tolist():
        slot = int(slot_N[lane])
        if wants.wanted[slot] < 0 or wants.raw[slot] != SAMPLED.value:
            continue
        logits_V = logits_NV[lane].clone()
        if int(position_N[lane]) + 1 < int(params.min_len[slot]):
            stops = params.stop_ids[slot]
            logits_V[stops[(stops >= 0) & (stops < logits_V.numel())].long()] = -torch.inf
        row: list[Any] = [tensor[slot].numpy(force=True) for tensor in params[:5]]
        temperature, *filters = row
        logits = logits_V.numpy(force=True)
        columns = np.flatnonzero(logits > -np.inf)
        if temperature > 0 and columns.size:
            scaled, kept = kept_reference(logits[columns], temperature, *filters)
            logits[columns] = np.where(kept, scaled, np.float32(-np.inf))
        out_NV[lane] = torch.from_numpy(logits)


@triton.jit
def _write_kernel(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    stop_ids_ptr,
    min_len_ptr,
    wanted_ptr,
    wants_raw_ptr,
    cut_key_ptr,
    cut_id_ptr,
    out_ptr,
    logits_stride,
    out_stride,
    vocabulary,
    stop_ids,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane and tile. Without filters all keys lie above the cut."""
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg").to(tl.int64)
    live = slot >= 0
    wanted = tl.load(wanted_ptr + slot, mask=live, other=-1)
    source = tl.load(wants_raw_ptr + slot, mask=live, other=0)
    temperature = tl.load(temperature_ptr + slot, mask=live, other=0.0)
    wait_for_inputs(PDL)

    if (wanted >= 0) & (source == SAMPLED):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocabulary
        at = lane.to(tl.int64)
        logits = tl.load(logits_ptr + at * logits_stride + column, mask=inside, other=float("-inf"))
        if tl.load(position_ptr + lane) + 1 < tl.load(min_len_ptr + slot):
            logits = mask_stop_ids(logits, column, True, stop_ids_ptr + slot * stop_ids, stop_ids)
        drawn = logits
        if temperature > 0:
            scaled = scaled_tile(logits, temperature)
            key = sortable_key(scaled)
            cut = tl.load(cut_key_ptr + lane)
            kept = (key > cut) | ((key == cut) & (column <= tl.load(cut_id_ptr + lane)))
            drawn = tl.where(kept, scaled, float("-inf"))
            # A lane with a NaN samples nothing, and its log-probabilities say so.
            drawn = tl.where(logits == logits, drawn, logits)
        tl.store(out_ptr + at * out_stride + column, drawn, mask=inside)
