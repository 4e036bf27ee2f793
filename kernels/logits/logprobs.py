"""Log-probabilities of the sampled tokens, and of the most probable tokens.

    rank_logits                 any time after `process_logits`    a lane's normaliser, its top n
    token_log_probabilities     after `verify_commit_publish`      logprobs of the emitted tokens
    publish_logprobs            last                               writes them into their mailbox

A lane's log-probabilities are log_softmax(l) = (l - max l) - log(sum(exp(l - max l))), in float32,
over the ids below `vocabulary`, as PyTorch has it. Token j's come from the logits of its row's lane
j, after which it was sampled. They are those of the raw logits, which vLLM calls `raw_logprobs`, or
of the processed ones: after `process_logits`, before min_len, temperature and filters (vLLM's
`processed_logprobs` are after these).

The top n are ordered by logit and then by lower id. Ids at -inf are not among them: if fewer ids
are left, the other places have id -1 and -inf. A token's rank is one more than the number of ids
with a larger logit: equal logits share the best rank. (vLLM gives them the worst: it counts ids
with at least the token's logit.)

A lane with a NaN, or +inf, among its logits has NaN for its log-probabilities. The order of sums
depends only on the vocabulary.

Letters: S slots, R rows, W lanes of a row, N = R * W lanes, V columns of the logits, C tiles of the
vocabulary, T = 20 places for the most probable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.logits.logprobs_triton import (
    MAX_LOGPROBS,
    rank_merge_kernel,
    rank_tile_kernel,
    token_kernel,
)
from graphengine.kernels.sample.sampling import MAX_VOCABULARY

_BLOCK = 4096
_TILE_WARPS = 8
# One program reads a whole row: few rounds of many loads.
_TOKEN_BLOCK = 16384
_TOKEN_WARPS = 32


class LogprobTensors(NamedTuple):
    """Which log-probabilities each slot wants; host-owned."""

    wanted: torch.Tensor
    """int32 [S]: how many of the most probable tokens besides the sampled one, up to 20; below 0:
    no log-probabilities at all."""
    raw: torch.Tensor
    """int32 [S]: not 0 for log-probabilities of the raw logits, or of those that
    `write_sampled_logits` puts in their place. For a slot without logits flags raw and processed
    are the same, and 0 saves a copy."""


class RankedLogits(NamedTuple):
    """A lane's normaliser and top n, in new tensors; undefined in lanes that want nothing."""

    largest: torch.Tensor
    """float32 [N]: the largest logit, NaNs aside."""
    log_total: torch.Tensor
    """float32 [N]: log(sum(exp(l - largest)))"""
    top_id: torch.Tensor
    """int32 [N, T]: the most probable ids, as many as are wanted; then -1."""
    top_value: torch.Tensor
    """float32 [N, T]: their log-probabilities; then -inf."""


class TokenLogprobs(NamedTuple):
    """Log-probability and rank of each emitted token, in new tensors; undefined in other lanes."""

    value: torch.Tensor
    """float32 [N]: its log-probability."""
    rank: torch.Tensor
    """int32 [N]: 1, and one more for each id with a larger logit."""


def rank_logits(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    wants: LogprobTensors,
    *,
    vocabulary: int | None = None,
    raw_NV: torch.Tensor | None = None,
    source_N: torch.Tensor | None = None,
    pdl: bool = False,
) -> RankedLogits:
    """Compute each lane's normaliser and its most probable tokens; two launches.

    Args:
        logits_NV: float32, dense rows, any stride between them; only read.
        slot_N: int32, -1 for a padded lane. Lanes may be those of a prompt or of decode rows.
        wants: indexed by slot.
        vocabulary: ids below it exist, 1..V; None for V.
        raw_NV: float32 [N, V], dense rows: what `process_logits` copied; read instead of
            `logits_NV` for the slots with `wants.raw`. None where nothing is processed.
        source_N: int32, the row of the logits that each lane takes; None for its own.
        pdl: the launches may overlap the ones before, by the rules of `core.pdl`. `slot_N` must
            be older than the launch before.

    ValueError for a shape, dtype or number that does not fit.
    """
    lanes, vocabulary = _check(logits_NV, slot_N, wants, vocabulary, raw_NV, source_N)
    if not use_triton(logits_NV):
        return rank_logits_reference(
            logits_NV, slot_N, wants, vocabulary=vocabulary, raw_NV=raw_NV, source_N=source_N
        )
    ranked = _new_ranked(slot_N)
    if not lanes:
        return ranked
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    tiles = triton.cdiv(vocabulary, block)
    largest_NC = ranked.largest.new_empty(lanes, tiles)
    total_NC = torch.empty_like(largest_NC)
    top_NCT = torch.empty((lanes, tiles, MAX_LOGPROBS), dtype=torch.int64, device=slot_N.device)
    raw_stride = 0 if raw_NV is None else raw_NV.stride(0)
    launcher(rank_tile_kernel, (lanes, tiles))(
        logits_NV,
        raw_NV,
        slot_N,
        source_N,
        *wants,
        largest_NC,
        total_NC,
        top_NCT,
        logits_NV.stride(0),
        raw_stride,
        vocabulary,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), _TILE_WARPS),
        **launch_options(pdl),
    )
    block_ct = triton.next_power_of_2(tiles * MAX_LOGPROBS)
    launcher(rank_merge_kernel, (lanes,))(
        logits_NV,
        raw_NV,
        slot_N,
        source_N,
        *wants,
        largest_NC,
        total_NC,
        top_NCT,
        *ranked,
        logits_NV.stride(0),
        raw_stride,
        tiles,
        BLOCK_C=triton.next_power_of_2(tiles),
        BLOCK_CT=block_ct,
        num_warps=min(max(block_ct // 256, 1), 32),
        **launch_options(pdl),
    )
    return ranked


def rank_logits_reference(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    wants: LogprobTensors,
    *,
    vocabulary: int | None = None,
    raw_NV: torch.Tensor | None = None,
    source_N: torch.Tensor | None = None,
) -> RankedLogits:
    """Plain twin of `rank_logits`: one lane after the other."""
    vocabulary = logits_NV.shape[1] if vocabulary is None else vocabulary
    ranked = _new_ranked(slot_N)
    for lane in live_lanes(slot_N).tolist():
        slot = int(slot_N[lane])
        wanted = min(int(wants.wanted[slot]), MAX_LOGPROBS)
        if wanted < 0:
            continue
        row = lane if source_N is None else int(source_N[lane])
        logits_V = _source(logits_NV, raw_NV, row, int(wants.raw[slot]))[:vocabulary]
        largest = logits_V.nan_to_num(-torch.inf, torch.inf, -torch.inf).max()
        base = largest.where(largest > -torch.inf, 0.0)
        ranked.largest[lane] = largest
        ranked.log_total[lane] = (logits_V - base).exp().sum().log()
        candidates = (logits_V > -torch.inf).nonzero()[:, 0]
        order = logits_V[candidates].argsort(descending=True, stable=True)
        ids = candidates[order[:wanted]]
        ranked.top_id[lane], ranked.top_value[lane] = -1, -torch.inf
        ranked.top_id[lane, : ids.numel()] = ids.to(torch.int32)
        values = (logits_V[ids] - largest) - ranked.log_total[lane]
        ranked.top_value[lane, : ids.numel()] = values
    return ranked


def token_log_probabilities(
    logits_NV: torch.Tensor,
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    slot_N: torch.Tensor,
    wants: LogprobTensors,
    ranked: RankedLogits,
    *,
    vocabulary: int | None = None,
    raw_NV: torch.Tensor | None = None,
    source_N: torch.Tensor | None = None,
    pdl: bool = False,
) -> TokenLogprobs:
    """Log-probability and rank of each token that a row emitted: token j's from lane j's logits.

    Args:
        token_N, count_R: int32, from `verify_commit_publish`: row r emitted the tokens of its first
            count lanes. A row is N / R lanes wide. For a prompt R is N: `token_N` is the token
            after each lane, and `count_R` is 1 where it is asked for.
        ranked: from `rank_logits` of the same logits.
        The others as in `rank_logits`.

    ValueError for a shape, dtype or number that does not fit.
    """
    lanes, vocabulary = _check(logits_NV, slot_N, wants, vocabulary, raw_NV, source_N)
    width = check_emitted(token_N, count_R, lanes)
    check_ranked(ranked, lanes)
    if not use_triton(logits_NV):
        return token_log_probabilities_reference(
            logits_NV,
            token_N,
            count_R,
            slot_N,
            wants,
            ranked,
            vocabulary=vocabulary,
            raw_NV=raw_NV,
            source_N=source_N,
        )
    tokens = TokenLogprobs(torch.empty_like(ranked.largest), torch.empty_like(token_N))
    if lanes:
        launcher(token_kernel, (lanes,))(
            logits_NV,
            raw_NV,
            token_N,
            count_R,
            slot_N,
            source_N,
            *wants,
            ranked.largest,
            ranked.log_total,
            *tokens,
            logits_NV.stride(0),
            0 if raw_NV is None else raw_NV.stride(0),
            vocabulary,
            W=width,
            BLOCK=min(_TOKEN_BLOCK, triton.next_power_of_2(max(vocabulary, _TOKEN_WARPS * 32))),
            num_warps=_TOKEN_WARPS,
            **launch_options(pdl),
        )
    return tokens


def token_log_probabilities_reference(
    logits_NV: torch.Tensor,
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    slot_N: torch.Tensor,
    wants: LogprobTensors,
    ranked: RankedLogits,
    *,
    vocabulary: int | None = None,
    raw_NV: torch.Tensor | None = None,
    source_N: torch.Tensor | None = None,
) -> TokenLogprobs:
    """Plain twin of `token_log_probabilities`: one lane after the other."""
    vocabulary = logits_NV.shape[1] if vocabulary is None else vocabulary
    tokens = TokenLogprobs(torch.empty_like(ranked.largest), torch.empty_like(token_N))
    width = token_N.numel() // max(count_R.numel(), 1)
    for lane in live_lanes(slot_N).tolist():
        slot, token = int(slot_N[lane]), int(token_N[lane])
        if int(wants.wanted[slot]) < 0 or lane % width >= int(count_R[lane // width]):
            continue
        row = lane if source_N is None else int(source_N[lane])
        logits_V = _source(logits_NV, raw_NV, row, int(wants.raw[slot]))[:vocabulary]
        logit = logits_V.new_tensor(-torch.inf)
        if 0 <= token < vocabulary:
            logit = logits_V[token]
        tokens.value[lane] = (logit - ranked.largest[lane]) - ranked.log_total[lane]
        tokens.rank[lane] = 1 + (logits_V > logit).sum().to(torch.int32)
    return tokens


def _source(
    logits_NV: torch.Tensor, raw_NV: torch.Tensor | None, lane: int, raw: int
) -> torch.Tensor:
    return logits_NV[lane] if raw_NV is None or raw == 0 else raw_NV[lane]


def _new_ranked(slot_N: torch.Tensor) -> RankedLogits:
    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=slot_N.device)

    lanes = slot_N.numel()
    return RankedLogits(
        new(lanes),
        new(lanes),
        new(lanes, MAX_LOGPROBS, dtype=torch.int32),
        new(lanes, MAX_LOGPROBS),
    )


def check_logits(logits_NV: torch.Tensor) -> tuple[int, int]:
    """(N, V); ValueError unless it is float32 [N, V] with dense rows and a vocabulary that fits."""
    shape, strides = tuple(logits_NV.shape), logits_NV.stride()
    if len(shape) != 2 or logits_NV.dtype != torch.float32 or strides[1] != 1:
        raise ValueError(
            f"logits must be float32 [N, V] with dense rows, "
            f"not {logits_NV.dtype} {shape} with strides {strides}"
        )
    if not 1 <= shape[1] <= MAX_VOCABULARY:
        raise ValueError(f"a vocabulary of {shape[1]} is outside 1 .. {MAX_VOCABULARY}")
    return shape[0], shape[1]


def check_raw(raw_NV: torch.Tensor, logits_NV: torch.Tensor) -> None:
    """Raise ValueError unless `raw_NV` is float32 of the logits' shape with dense rows."""
    if raw_NV.shape != logits_NV.shape or raw_NV.dtype != torch.float32 or raw_NV.stride(1) != 1:
        raise ValueError(
            f"raw must be float32 {list(logits_NV.shape)} with dense rows, "
            f"not {raw_NV.dtype} {list(raw_NV.shape)} with strides {raw_NV.stride()}"
        )


def check_wants(wants: LogprobTensors, slots: int) -> None:
    """Raise ValueError unless both are dense int32 [slots]."""
    check_lanes(slots, wanted=wants.wanted, raw=wants.raw)


def check_emitted(token_N: torch.Tensor, count_R: torch.Tensor, lanes: int) -> int:
    """W; ValueError unless there is a token for each of `lanes` lanes, in R rows of one width."""
    check_lanes(lanes, token=token_N)
    rows = count_R.numel()
    check_lanes(rows, count=count_R)
    if lanes == rows == 0:
        return 1
    if rows == 0 or lanes == 0 or lanes % rows:
        raise ValueError(f"{lanes} lanes are no whole number of lanes for each of {rows} rows")
    return lanes // rows


def check_ranked(ranked: RankedLogits, lanes: int) -> None:
    """Raise ValueError unless all tensors fit `lanes` lanes."""
    check_vector("largest", ranked.largest, lanes, torch.float32)
    check_vector("log_total", ranked.log_total, lanes, torch.float32)
    tops = (("top_id", ranked.top_id, torch.int32), ("top_value", ranked.top_value, torch.float32))
    for name, tensor, dtype in tops:
        shape = (lanes, MAX_LOGPROBS)
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a dense {dtype} {list(shape)}, "
                f"not {tensor.dtype} {list(tensor.shape)}"
            )


def _check(
    logits_NV: torch.Tensor,
    slot_N: torch.Tensor,
    wants: LogprobTensors,
    vocabulary: int | None,
    raw_NV: torch.Tensor | None,
    source_N: torch.Tensor | None,
) -> tuple[int, int]:
    """(N, vocabulary); ValueError unless everything fits."""
    lanes, columns = check_logits(logits_NV)
    if source_N is not None:
        lanes = slot_N.numel()
        check_lanes(lanes, source=source_N)
    check_lanes(lanes, slot=slot_N)
    check_wants(wants, wants.wanted.numel())
    if raw_NV is not None:
        check_raw(raw_NV, logits_NV)
    vocabulary = columns if vocabulary is None else vocabulary
    if not 1 <= vocabulary <= columns:
        raise ValueError(f"vocabulary={vocabulary} is outside 1 .. {columns}, the logits' columns")
    return lanes, vocabulary
