"""Relaxed acceptance: in a greedy row's thinking phase a draft passes if it is probable enough.

    decode    (lm_head) -> relaxed_acceptance -> verify_commit_publish -> update_relaxed_delta
    prefill   commit_prefill -> relaxed_delta_prompt

Each slot has a device-owned `delta`, float32, that is part of its state: it is copied along when
its request pauses, and is 0 outside a thinking phase. With a delta of 0, only the target's own
choice and exact ties with it pass.

Lane j, whose logits predict the token after its own, judges the draft in lane j + 1:

1. p = softmax of the logits, without temperature and filters, in float32: exp(logit - largest) /
   total. The total is summed in fixed point, floor(exp(..) * 2^40) as int64, so the order of
   summation does not matter.
2. Candidates are the `topk` ids with the largest p, ties to the lower id. Ids whose logit is -inf
   are excluded: forbidden tokens arrive here like that (`process_logits`).
3. The draft in lane j + 1 passes if it is a candidate and p[draft] >= p[first] - delta, in float32.

`verify_commit_publish` checks whether the drafts before it passed: it emits the leading run that
did, and then the target's own token. The rule is TensorRT-LLM's (`_torch/speculative/mtp`).

Letters: S slots, R rows, K drafts of a row, N = R * (K + 1) lanes, V vocabulary, T tokens of a
prefill bucket, C chunks of prompts in it. Lane r * (K + 1) + j is row r's j-th token.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_int32, check_lanes, check_vector
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.sample.candidates import MASS_SCALE, SamplingTensors, check_parameters
from graphengine.kernels.sample.sampling import MAX_VOCABULARY
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes, stop_ids_block

_BLOCK = 4096
_WARPS = 32


def relaxed_acceptance(
    logits_NV: torch.Tensor,
    lanes: DecodeLanes,
    delta_S: torch.Tensor,
    params: SamplingTensors,
    *,
    topk: int,
    num_speculative_tokens: int,
    pdl: bool = False,
) -> torch.Tensor:
    """Find the drafts that pass by the relaxed rule of the module's docstring.

    A stop id of the row never passes at a position below the row's min_len, where the sampler would
    not draw it either. Nothing passes after logits with a NaN or without a finite maximum.

    Args:
        logits_NV: float32 [N, V] with dense rows, any stride between them; only read.
        lanes: from `gather_and_embed`; lane j + 1 holds the draft that lane j judges.
        delta_S: float32 [S], device-owned; only read.
        params: indexed by slot; host-owned. Only temperature, stop_ids and min_len are read.
        topk: candidates per lane, at least 1.
        num_speculative_tokens: K, 0 included.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. At least one
            launch must lie between this one and the writers of `lanes` and `delta_S`.

    Returns:
        relaxed_N: new int32 [N]; 1 where the next lane's draft passes. 0 elsewhere: in a row's last
        lane, before a padded lane, in padded lanes, in rows that are not greedy.
        ValueError for a shape, dtype or number that does not fit.
    """
    stop_ids = _check_acceptance(logits_NV, lanes, delta_S, params, topk, num_speculative_tokens)
    if not use_triton(logits_NV):
        return relaxed_acceptance_reference(
            logits_NV,
            lanes,
            delta_S,
            params,
            topk=topk,
            num_speculative_tokens=num_speculative_tokens,
        )
    vocabulary = logits_NV.shape[1]
    relaxed_N = torch.empty_like(lanes.slot)
    if relaxed_N.numel():
        launcher(_relaxed_kernel, (relaxed_N.numel(),))(
            logits_NV,
            *lanes,
            delta_S,
            params.temperature,
            params.stop_ids,
            params.min_len,
            relaxed_N,
            logits_NV.stride(0),
            vocabulary,
            topk,
            stop_ids,
            W=num_speculative_tokens + 1,
            BLOCK=min(_BLOCK, triton.next_power_of_2(max(vocabulary, _WARPS * 32))),
            BLOCK_E=stop_ids_block(stop_ids),
            num_warps=_WARPS,
            **launch_options(pdl),
        )
    return relaxed_N


def relaxed_acceptance_reference(
    logits_NV: torch.Tensor,
    lanes: DecodeLanes,
    delta_S: torch.Tensor,
    params: SamplingTensors,
    *,
    topk: int,
    num_speculative_tokens: int,
) -> torch.Tensor:
    """Plain twin of `relaxed_acceptance`, in numpy: one lane after the other."""
    relaxed_N = torch.zeros_like(lanes.slot)
    width = num_speculative_tokens + 1
    token, slots, position = (field.tolist() for field in lanes)
    for lane, slot in enumerate(slots):
        judges = slot >= 0 and (lane + 1) % width != 0 and slots[lane + 1] >= 0
        if not judges or params.temperature[slot] != 0:
            continue
        draft = token[lane + 1]
        waits = position[lane] + 1 < int(params.min_len[slot])
        if waits and draft in params.stop_ids[slot].tolist():
            continue
        logits_V = logits_NV[lane].numpy(force=True)
        p_V = _probabilities(logits_V)
        if p_V is not None and 0 <= draft < p_V.size and logits_V[draft] > -np.inf:
            delta = delta_S[slot].numpy(force=True)
            relaxed_N[lane] = int(_passes(p_V, draft, topk, delta))
    return relaxed_N


def _probabilities(logits_V: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """The float32 softmax by the module's arithmetic; None unless the maximum is finite."""
    largest = logits_V.max()  # NaN if one is among them
    if not np.isfinite(largest):
        return None
    with np.errstate(over="ignore"):
        mass_V = np.exp(logits_V - largest)
    total = (mass_V * np.float32(MASS_SCALE.value)).astype(np.int64).sum()
    p_V: NDArray[np.float32] = mass_V / (total.astype(np.float32) / np.float32(MASS_SCALE.value))
    return p_V


def _passes(p_V: NDArray[np.float32], draft: int, topk: int, delta: NDArray[np.float32]) -> bool:
    tied_below = np.count_nonzero(p_V[:draft] == p_V[draft])
    rank = np.count_nonzero(p_V > p_V[draft]) + tied_below
    return bool(rank < topk and p_V[draft] >= p_V.max() - delta)


def update_relaxed_delta(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    delta_S: torch.Tensor,
    begin_ids: torch.Tensor,
    end_ids: torch.Tensor,
    relaxed_delta: float,
    *,
    pdl: bool = False,
) -> None:
    """Scan the tokens that a step emitted: BEGIN sets the slot's delta, END makes it 0.

    The last BEGIN or END among a row's emitted tokens wins; without one the delta stays. An id in
    both lists counts as END.

    Args:
        token_N, count_R: from `verify_commit_publish`: row r emitted the tokens of its first count
            lanes. A row has N / R lanes.
        lanes: from `gather_and_embed`; only the slots are read. A row is live if its first lane is.
        delta_S: float32 [S], updated in place.
        begin_ids, end_ids: dense int32 [any], on the device; no kernel writes them.
        relaxed_delta: the delta that BEGIN sets; frozen into a captured graph.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. At least one
            launch must lie between this one and `gather_and_embed`.

    ValueError for a shape or dtype that does not fit.
    """
    rows, width = _check_step(token_N, count_R, lanes)
    scan = _scan_args(delta_S, begin_ids, end_ids, relaxed_delta)
    if not use_triton(delta_S):
        update_relaxed_delta_reference(
            token_N, count_R, lanes, delta_S, begin_ids, end_ids, relaxed_delta
        )
        return
    if rows:
        launcher(_update_kernel, (rows,))(
            token_N,
            count_R,
            lanes.slot,
            *scan,
            W=width,
            BLOCK_W=triton.next_power_of_2(width),
            num_warps=1,
            **launch_options(pdl),
        )


def update_relaxed_delta_reference(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    delta_S: torch.Tensor,
    begin_ids: torch.Tensor,
    end_ids: torch.Tensor,
    relaxed_delta: float,
) -> None:
    """Plain twin of `update_relaxed_delta`."""
    width = token_N.numel() // max(count_R.numel(), 1)
    tokens, slots = token_N.tolist(), lanes.slot.tolist()
    for row, count in enumerate(count_R.tolist()):
        first = row * width
        if slots[first] >= 0:
            emitted = tokens[first : first + min(max(count, 0), width)]
            _scan(emitted, delta_S, slots[first], begin_ids, end_ids, relaxed_delta)


def relaxed_delta_prompt(
    chunk: PrefillLanes,
    token_C: torch.Tensor,
    final_C: torch.Tensor,
    delta_S: torch.Tensor,
    begin_ids: torch.Tensor,
    end_ids: torch.Tensor,
    relaxed_delta: float,
) -> None:
    """Scan prompts' chunks as `update_relaxed_delta` scans a step; after a prompt's final chunk
    also scan its first sampled token.

    A prompt's first chunk, at position 0, begins with a delta of 0; later chunks begin with the
    delta that the chunks before them left. A chunk without lanes changes nothing.

    Args:
        chunk: the lanes of C chunks, whose slots differ.
        token_C: int32, from `sample`; read only after final chunks. -1, for logits that were not
            valid, is no mark.
        final_C: int32, not 0 for a prompt's last chunk.
        delta_S, begin_ids, end_ids, relaxed_delta: as in `update_relaxed_delta`.

    ValueError for a shape or dtype that does not fit.
    """
    tokens, chunks = chunk.slot.numel(), chunk.last.numel()
    check_lanes(tokens, token=chunk.token, slot=chunk.slot, position=chunk.position)
    check_lanes(chunks, sampled=token_C, final=final_C)
    check_lanes(chunks + 1, query_start=chunk.query_start)
    scan = _scan_args(delta_S, begin_ids, end_ids, relaxed_delta)
    if not use_triton(delta_S):
        relaxed_delta_prompt_reference(
            chunk, token_C, final_C, delta_S, begin_ids, end_ids, relaxed_delta
        )
        return
    launcher(_prompt_kernel, (chunks,))(
        chunk.token,
        chunk.slot,
        chunk.position,
        chunk.query_start,
        token_C,
        final_C,
        *scan,
        BLOCK_T=triton.next_power_of_2(max(tokens, 1)),
    )


def relaxed_delta_prompt_reference(
    chunk: PrefillLanes,
    token_C: torch.Tensor,
    final_C: torch.Tensor,
    delta_S: torch.Tensor,
    begin_ids: torch.Tensor,
    end_ids: torch.Tensor,
    relaxed_delta: float,
) -> None:
    """Plain twin of `relaxed_delta_prompt`."""
    for index, (first, end) in enumerate(pairwise(chunk.query_start.tolist())):
        if end == first:
            continue
        slot = int(chunk.slot[first])
        if int(chunk.position[first]) == 0:
            delta_S[slot] = 0.0
        seen = chunk.token[first:end].tolist()
        if int(final_C[index]) != 0:
            seen.append(int(token_C[index]))
        _scan(seen, delta_S, slot, begin_ids, end_ids, relaxed_delta)


def _scan(
    tokens: list[int],
    delta_S: torch.Tensor,
    slot: int,
    begin_ids: torch.Tensor,
    end_ids: torch.Tensor,
    relaxed_delta: float,
) -> None:
    """Update the slot's delta by each of the tokens, in order."""
    begin, end = set(begin_ids.tolist()), set(end_ids.tolist())
    for token in tokens:
        if token in end:
            delta_S[slot] = 0.0
        elif token in begin:
            delta_S[slot] = relaxed_delta


def _check_acceptance(
    logits_NV: torch.Tensor,
    lanes: DecodeLanes,
    delta_S: torch.Tensor,
    params: SamplingTensors,
    topk: int,
    num_speculative_tokens: int,
) -> int:
    """Return the number of stop ids per slot; ValueError unless everything fits."""
    shape, strides = tuple(logits_NV.shape), logits_NV.stride()
    if len(shape) != 2 or logits_NV.dtype != torch.float32 or strides[1] != 1:
        raise ValueError(
            f"logits must be float32 [N, V] with dense rows, "
            f"not {logits_NV.dtype} {shape} with strides {strides}"
        )
    count, vocabulary = shape
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        raise ValueError(f"a vocabulary of {vocabulary} is outside 1 .. {MAX_VOCABULARY}")
    if topk < 1:
        raise ValueError(f"topk={topk} must be at least 1")
    if num_speculative_tokens < 0 or count % (num_speculative_tokens + 1) != 0:
        raise ValueError(
            f"{count} lanes are no rows of num_speculative_tokens={num_speculative_tokens} + 1"
        )
    check_lanes(count, **lanes._asdict())
    check_vector("delta", delta_S, params.temperature.numel(), torch.float32)
    return check_parameters(params)


def _check_step(
    token_N: torch.Tensor, count_R: torch.Tensor, lanes: DecodeLanes
) -> tuple[int, int]:
    """Return (rows, lanes per row) of a step; ValueError unless everything fits."""
    count, rows = token_N.numel(), count_R.numel()
    check_lanes(count, token=token_N, slot=lanes.slot)
    check_lanes(rows, count=count_R)
    if count == rows == 0:
        return 0, 1
    if rows == 0 or count == 0 or count % rows != 0:
        raise ValueError(f"{count} lanes are no rows of one width: there are {rows} rows")
    return rows, count // rows


def _scan_args(
    delta_S: torch.Tensor, begin_ids: torch.Tensor, end_ids: torch.Tensor, relaxed_delta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, int, int]:
    """The arguments of a scan for BEGIN and END, counts of ids last; ValueError unless they fit."""
    check_vector("delta", delta_S, delta_S.numel(), torch.float32)
    for name, ids in (("begin_ids", begin_ids), ("end_ids", end_ids)):
        check_int32(**{name: ids})
        if ids.dim() != 1 or not ids.is_contiguous():
            raise ValueError(f"{name} must be a dense vector, not {tuple(ids.shape)}")
    return delta_S, begin_ids, end_ids, float(relaxed_delta), begin_ids.numel(), end_ids.numel()


@triton.jit
def _mass_tile(logits_ptr, start, vocabulary, largest, BLOCK: tl.constexpr):
    """The ids from `start` on and exp(logit - largest) of each, 0 past the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + ids, mask=ids < vocabulary, other=float("-inf"))
    return ids, tl.exp(logits - largest)


@triton.jit
def _largest_logit(logits_ptr, vocabulary, BLOCK: tl.constexpr):
    """The row's largest logit; NaN if any logit is NaN."""
    column = tl.full([BLOCK], float("-inf"), tl.float32)
    nans = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + ids, mask=ids < vocabulary, other=float("-inf"))
        column = tl.maximum(column, logits)
        nans = nans | (logits != logits).to(tl.int32)
    return tl.where(tl.max(nans, 0) != 0, float("nan"), tl.max(column, 0))


@triton.jit
def _total_mass(logits_ptr, vocabulary, largest, BLOCK: tl.constexpr):
    """The float32 sum of exp(logit - largest), summed in fixed point."""
    column = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocabulary, BLOCK):
        _, mass = _mass_tile(logits_ptr, start, vocabulary, largest, BLOCK)
        column += (mass * MASS_SCALE).to(tl.int64)
    # A power of two: exact.
    return tl.sum(column, 0).to(tl.float32) * (1.0 / MASS_SCALE)


@triton.jit
def _rank(logits_ptr, vocabulary, largest, total, draft, p_draft, BLOCK: tl.constexpr):
    """Number of ids that rank before the draft, by probability and then by id."""
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        ids, mass = _mass_tile(logits_ptr, start, vocabulary, largest, BLOCK)
        p = tl.div_rn(mass, total)
        # Past the vocabulary p is 0 and the id is no lower than any draft's.
        before += ((p > p_draft) | ((p == p_draft) & (ids < draft))).to(tl.int32)
    return tl.sum(before, 0)


@triton.jit
def _relaxed_kernel(
    logits_ptr,
    token_ptr,
    slot_ptr,
    position_ptr,
    delta_ptr,
    temperature_ptr,
    stop_ids_ptr,
    min_len_ptr,
    relaxed_ptr,
    logits_stride,
    vocabulary,
    topk,
    stop_ids,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane. Only the logits may come from the launch before."""
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg").to(tl.int64)
    last = lane % W == W - 1
    next_slot = tl.load(slot_ptr + lane + 1, mask=last == 0, other=-1, cache_modifier=".cg")
    live = (slot >= 0) & (next_slot >= 0)
    draft = tl.load(token_ptr + lane + 1, mask=live, other=-1, cache_modifier=".cg")
    position = tl.load(position_ptr + lane, mask=live, other=0, cache_modifier=".cg")
    delta = tl.load(delta_ptr + slot, mask=live, other=0.0, cache_modifier=".cg")
    temperature = tl.load(temperature_ptr + slot, mask=live, other=1.0)
    waits = live & (position + 1 < tl.load(min_len_ptr + slot, mask=live, other=0))
    e = tl.arange(0, BLOCK_E)
    source = stop_ids_ptr + slot * stop_ids + e
    stop_ids_E = tl.load(source, mask=waits & (e < stop_ids), other=-1)
    judges = live & (temperature == 0) & (draft >= 0) & (draft < vocabulary)
    judges = judges & (tl.max((stop_ids_E == draft).to(tl.int32), 0) == 0)
    wait_for_inputs(PDL)

    passes = tl.full((), 0, tl.int32)
    if judges:
        logits_ptr += lane.to(tl.int64) * logits_stride
        logit = tl.load(logits_ptr + draft)
        largest = _largest_logit(logits_ptr, vocabulary, BLOCK)
        # With few allowed ids a forbidden one may be among the `topk`, and delta may be p[first] or
        # more. So forbidden drafts are excluded here.
        if (tl.abs(largest) < float("inf")) & (logit > float("-inf")):
            total = _total_mass(logits_ptr, vocabulary, largest, BLOCK)
            p_draft = tl.div_rn(tl.exp(logit - largest), total)
            if p_draft >= tl.div_rn(1.0, total) - delta:
                rank = _rank(logits_ptr, vocabulary, largest, total, draft, p_draft, BLOCK)
                passes = (rank < topk).to(tl.int32)
    tl.store(relaxed_ptr + lane, passes)


@triton.jit
def _is_one_of(token, ids_ptr, ids):
    """int32: 1 where a token is one of the `ids` ids at `ids_ptr`."""
    found = token * 0
    for i in range(ids):
        found = found | (token == tl.load(ids_ptr + i)).to(tl.int32)
    return found


@triton.jit
def _last_mark(token, taken, begin_ptr, end_ptr, begin_ids, end_ids, BLOCK: tl.constexpr):
    """The last mark among the `taken` tokens [BLOCK]: 2 for BEGIN, 1 for END, 3 for an id in both
    lists, which counts as END; 0 if there is none."""
    ends = _is_one_of(token, end_ptr, end_ids)
    mark = ends + 2 * _is_one_of(token, begin_ptr, begin_ids)
    order = tl.arange(0, BLOCK) * 4 + mark
    last = tl.max(tl.where(taken & (mark != 0), order, 0), 0)
    return last & 3


@triton.jit
def _update_kernel(
    token_ptr,
    count_ptr,
    slot_ptr,
    delta_ptr,
    begin_ptr,
    end_ptr,
    relaxed_delta,
    begin_ids,
    end_ids,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row * W, cache_modifier=".cg")
    wait_for_inputs(PDL)
    live = slot >= 0
    count = tl.load(count_ptr + row, mask=live, other=0)
    j = tl.arange(0, BLOCK_W)
    taken = (j < count) & (j < W)
    token = tl.load(token_ptr + row * W + j, mask=taken, other=-1)
    mark = _last_mark(token, taken, begin_ptr, end_ptr, begin_ids, end_ids, BLOCK_W)
    tl.store(delta_ptr + slot, tl.where(mark == 2, relaxed_delta, 0.0), mask=live & (mark != 0))


@triton.jit
def _prompt_kernel(
    chunk_token_ptr,
    chunk_slot_ptr,
    chunk_position_ptr,
    query_start_ptr,
    token_ptr,
    final_ptr,
    delta_ptr,
    begin_ids_ptr,
    end_ids_ptr,
    relaxed_delta,
    begin_ids,
    end_ids,
    BLOCK_T: tl.constexpr,
):
    """One program per chunk. The first sampled token comes after the chunk."""
    chunk = tl.program_id(0)
    begin = tl.load(query_start_ptr + chunk)
    end = tl.load(query_start_ptr + chunk + 1)
    live = end > begin
    slot = tl.load(chunk_slot_ptr + begin, mask=live, other=-1)
    first = tl.load(chunk_position_ptr + begin, mask=live, other=0) == 0
    final = live & (tl.load(final_ptr + chunk) != 0)
    lane = begin + tl.arange(0, BLOCK_T)
    token = tl.load(chunk_token_ptr + lane, mask=lane < end, other=-1)
    mark = _last_mark(token, lane < end, begin_ids_ptr, end_ids_ptr, begin_ids, end_ids, BLOCK_T)

    one = tl.arange(0, 1)
    sampled = tl.load(token_ptr + chunk + one, mask=final, other=-1)
    after = final & (one == 0)
    own = _last_mark(sampled, after, begin_ids_ptr, end_ids_ptr, begin_ids, end_ids, 1)
    mark = tl.where(own != 0, own, mark)
    changes = live & (first | (mark != 0))
    tl.store(delta_ptr + slot, tl.where(mark == 2, relaxed_delta, 0.0), mask=changes)
