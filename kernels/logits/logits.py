"""Change logits in place as requests ask, by allowed tokens and by earlier tokens.

    lm_head -> process_logits -> sample_tiles -> verify_commit_publish -> note_tokens (`noted.py`)

Every live lane's logits go through these steps, in this order:

1. Ids from `vocabulary` on become -inf: a padded vocabulary is never sampled past its end.
2. Mask: ids whose bit is 0 become -inf. The mask is the slot's own, or that of the state which its
   automaton is in.
3. Bad words: the last token of each word whose other tokens came just before becomes -inf.
4. Bias: l + bias[id].
5. Repetition: l > 0 ? l / r : l * r, for ids of the prompt or the output.
6. Frequency: l - f * (times that the id is in the output).
7. Presence: l - p, for ids that are in the output at all.

All steps are in float32, each operation rounded once. A NaN below `vocabulary` stays NaN, whatever
is asked: the sampler must see that the logits are broken. The rest of sampling, min_len included,
is in `sampling.py`.

Order and formulae are those of vLLM's V1 (`vllm/v1/sample/sampler.py`: allowed ids, bad words, min
tokens, logit bias, penalties; `vllm/model_executor/layers/utils.py: apply_penalties`), which has
the last two steps from OpenAI's API. Step 5 is transformers' RepetitionPenaltyLogitsProcessor (N.
Keskar et al., "CTRL", 2019), to the bit; vLLM multiplies by 1 / r. Step 4 is its
SequenceBiasLogitsProcessor for single tokens, step 3 its NoBadWordsLogitsProcessor. In step 3 the
two differ: transformers looks for a bad word's beginning in prompt and output, vLLM only in the
output; `bad_words_start` says which.

Under speculation the state at a row's lane j includes its drafts 1 .. j, as if they were output. In
a tree it includes the drafts on the path to node j.

Letters: S slots, R rows, K drafts a row, W = K + 1 lanes a row, N = R * W lanes, V columns of the
logits, P positions, M masks a slot, B biases, Q bad words of at most L tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_table, check_vector, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.core.tree import TreeLanes, ancestors_of, check_tree_lanes
from graphengine.kernels.core.triton_versions import UNFUSED
from graphengine.kernels.logits.automata import (
    GrammarAutomata,
    check_automata,
    follow_reference,
    mask_reference,
)
from graphengine.kernels.logits.logits_triton import (
    ALL_STEPS,
    COUNT_MASK,
    USES_AUTOMATON,
    USES_BAD_WORDS,
    USES_BIAS,
    USES_COUNTS,
    USES_GRAMMAR,
    USES_MASK,
    USES_REPETITION,
    process_kernel,
)
from graphengine.kernels.logits.logprobs import LogprobTensors, check_logits, check_raw, check_wants
from graphengine.kernels.step.state import DecodeLanes, check_draft_count

_BLOCK = 2048
_MAX_BLOCK_B = 1024


class LogitsTensors(NamedTuple):
    """The options on the logits of each slot; host-owned except for the last two. All are dense,
    but rows of the last two may be padded."""

    flags: torch.Tensor
    """int32 [S]: which of the other tensors apply, USES_*; 0 leaves the logits unchanged."""
    repetition_penalty: torch.Tensor
    """float32 [S], above 0."""
    presence_penalty: torch.Tensor
    """float32 [S]"""
    frequency_penalty: torch.Tensor
    """float32 [S]"""
    bias_ids: torch.Tensor
    """int32 [S, B]: -1 for none; no id twice."""
    bias_values: torch.Tensor
    """float32 [S, B], finite or -inf."""
    bitmask: torch.Tensor
    """int32 [S, M, V / 32 rounded up]: bit id % 32 of word id // 32 is 1 if the id is allowed. M is
    W or more, one mask for each lane of a row, or 1 for all of them."""
    bad_words: torch.Tensor
    """int32 [S, Q, L]: the last column has the banned tokens, the others the tokens that must
    precede each, with -1 in front of shorter ones; -1 throughout for none."""
    bad_words_start: torch.Tensor
    """int32 [S]: the first position where a bad word may begin. 0: prompt and output, as in
    transformers; the prompt's length: only the output, as in vLLM."""
    counts: torch.Tensor
    """int32 [S, V]: IN_PROMPT if the id is in the prompt, plus the times it was emitted;
    device-owned."""
    history: torch.Tensor
    """int32 [S, P]: the token at each position; device-owned."""


def process_logits(
    logits_NV: torch.Tensor,
    lanes: DecodeLanes,
    tensors: LogitsTensors,
    *,
    num_speculative_tokens: int = 0,
    tree: TreeLanes | None = None,
    vocabulary: int | None = None,
    steps: int = ALL_STEPS,
    raw_NV: torch.Tensor | None = None,
    wants: LogprobTensors | None = None,
    automata: GrammarAutomata | None = None,
    pdl: bool = False,
) -> None:
    """Change the logits of each live lane in place; the module's docstring says how. One launch.

    Lane r * W + j has row r's logits after its j-th token, which is the last committed one for j =
    0 and draft j otherwise. A prompt's last lane is processed with K = 0, once `note_prompt` has
    noted the whole prompt.

    Args:
        logits_NV: float32, dense rows, any stride between them.
        lanes: from `gather_and_embed`; a row's padded lanes come last.
        tensors: indexed by slot; only read. Counts include the row's first lane, history reaches
            up to it.
        num_speculative_tokens: K, 0..MAX_DRAFTS.
        tree: given where the rows are trees of W nodes; the bitmask then has a mask for each node.
            Older than the launch before.
        vocabulary: ids below it exist, 1..V; None for V. Past it all live lanes get -inf, with or
            without flags.
        steps: USES_*: which of the steps that the slots' flags ask for are done.
        raw_NV: float32, of `logits_NV`'s shape, dense rows: where a slot wants log-probabilities of
            the raw logits, those below `vocabulary` are copied there first. Other lanes of it are
            left alone. Given together with `wants`.
        wants: indexed by slot; host-owned.
        automata: what slots with USES_AUTOMATON follow; a lane's mask is that of the state after
            its drafts. Only read, and older than the launch before. None: no slot has that flag.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. `lanes` must be
            older than that one.

    ValueError for a shape, dtype or number that does not fit.
    """
    _, columns = check_logits(logits_NV)
    call = _Call(
        logits_NV,
        lanes,
        tensors,
        num_speculative_tokens,
        tree,
        columns if vocabulary is None else vocabulary,
        steps,
        raw_NV,
        wants,
        automata,
    )
    _check(call)
    if not use_triton(logits_NV):
        process_logits_reference(**call._asdict())
    elif len(logits_NV):
        _process(call, pdl)


class _Call(NamedTuple):
    """The arguments of `process_logits`; its reference takes them by the same names."""

    logits_NV: torch.Tensor
    lanes: DecodeLanes
    tensors: LogitsTensors
    num_speculative_tokens: int
    tree: TreeLanes | None
    vocabulary: int
    steps: int
    raw_NV: torch.Tensor | None
    wants: LogprobTensors | None
    automata: GrammarAutomata | None

    @property
    def width(self) -> int:
        return self.num_speculative_tokens + 1


def _check(call: _Call) -> None:
    """ValueError for a shape, dtype or number that does not fit the logits."""
    lane_count, columns = call.logits_NV.shape
    width = check_draft_count(call.num_speculative_tokens)
    check_lanes(lane_count, **call.lanes._asdict())
    if lane_count % width:
        raise ValueError(f"{lane_count} lanes must be rows of {width}")
    if call.tree is not None:
        check_tree_lanes(call.tree, lane_count, width)
    vocabulary, raw_NV, wants = call.vocabulary, call.raw_NV, call.wants
    if not 1 <= vocabulary <= columns:
        raise ValueError(f"vocabulary={vocabulary} is outside 1 .. {columns}, the logits' columns")
    slots = check_logits_tensors(call.tensors, vocabulary, width)
    if call.automata is not None:
        check_automata(call.automata, slots)
    if (raw_NV is None) != (wants is None):
        raise ValueError("raw_NV and wants are wanted together or not at all")
    if raw_NV is not None and wants is not None:
        check_raw(raw_NV, call.logits_NV)
        check_wants(wants, slots)


def _process(call: _Call, pdl: bool) -> None:
    """`process_logits` for a checked call, on a GPU."""
    tensors, tree, raw, wants = call.tensors, call.tree, call.raw_NV, call.wants
    lane_count, columns = call.logits_NV.shape
    B, (masks, words) = tensors.bias_ids.shape[1], tensors.bitmask.shape[1:]
    Q, L = tensors.bad_words.shape[1:]
    block = min(_BLOCK, triton.next_power_of_2(columns))
    launcher(process_kernel, (lane_count, triton.cdiv(columns, block)))(
        call.logits_NV,
        raw,
        *call.lanes,
        tensors,
        call.automata,
        *((None, None) if tree is None else tree[1:]),
        None if wants is None else wants.wanted,
        None if wants is None else wants.raw,
        call.logits_NV.stride(0),
        0 if raw is None else raw.stride(0),
        tensors.counts.stride(0),
        tensors.history.stride(0),
        columns,
        call.vocabulary,
        tensors.history.shape[1],
        masks,
        words,
        call.steps,
        W=call.width,
        DEPTH=0 if tree is None else tree.ancestor.shape[1],
        B=B,
        Q=Q,
        L=L,
        BLOCK=block,
        BLOCK_B=min(triton.next_power_of_2(max(B, 1)), _MAX_BLOCK_B),
        BLOCK_Q=triton.next_power_of_2(max(Q, 1)),
        num_warps=min(max(block // 512, 1), 4),
        # Products are rounded before they are subtracted, as the plain twin's are.
        **UNFUSED,
        **launch_options(pdl),
    )


def process_logits_reference(
    logits_NV: torch.Tensor,
    lanes: DecodeLanes,
    tensors: LogitsTensors,
    *,
    num_speculative_tokens: int = 0,
    tree: TreeLanes | None = None,
    vocabulary: int | None = None,
    steps: int = ALL_STEPS,
    raw_NV: torch.Tensor | None = None,
    wants: LogprobTensors | None = None,
    automata: GrammarAutomata | None = None,
) -> None:
    """Plain twin of `process_logits`: one lane and one step after the other."""
    width = num_speculative_tokens + 1
    vocabulary = logits_NV.shape[1] if vocabulary is None else vocabulary
    tokens, positions = lanes.token.tolist(), lanes.position.tolist()
    for lane in live_lanes(lanes.slot).tolist():
        slot, j = int(lanes.slot[lane]), lane % width
        logits_NV[lane, vocabulary:] = -torch.inf
        logits_V = logits_NV[lane, :vocabulary]
        if raw_NV is not None and wants is not None and wants.wanted[slot] >= 0 and wants.raw[slot]:
            raw_NV[lane, :vocabulary] = logits_V
        flags = int(tensors.flags[slot]) & steps
        before = range(j) if tree is None else ancestors_of(tree, lane)
        fed = [tokens[lane - j + node] for node in before] + [tokens[lane]]
        if flags & (USES_MASK | USES_GRAMMAR):
            masks = tensors.bitmask[slot]
            _mask_reference(logits_V, masks[j if len(masks) > 1 else 0])
        if flags & USES_AUTOMATON and automata is not None:
            state = follow_reference(automata, slot, int(automata.state[slot]), fed[1:])
            _mask_reference(logits_V, mask_reference(automata, slot, state))
        if flags & USES_BAD_WORDS:
            start = int(tensors.bad_words_start[slot])
            context = tokens_from(start, tensors.history[slot], positions[lane] - len(before), fed)
            _ban_reference(logits_V, tensors.bad_words[slot], context)
        if flags & USES_BIAS:
            ids, values = tensors.bias_ids[slot], tensors.bias_values[slot]
            there = (ids >= 0) & (ids < vocabulary)
            logits_V[ids[there].long()] += values[there]
        if flags & (USES_REPETITION | USES_COUNTS):
            _penalise_reference(logits_V, tensors, slot, flags, fed[1:])


def tokens_from(start: int, history_P: torch.Tensor, first: int, fed: list[int]) -> list[int]:
    """The tokens from position `start` on: history up to `first`, and `fed` from there on.

    Positions past the end of `history_P` have -2, which no id equals.
    """
    start = max(start, 0)
    known: list[int] = history_P[start : max(first, start)].tolist()
    known += [-2] * (first - start - len(known))
    return known + fed[max(start - first, 0) :]


def _mask_reference(logits_V: torch.Tensor, word: torch.Tensor) -> None:
    ids = torch.arange(logits_V.numel(), device=logits_V.device)
    allowed = (word[ids // 32] >> (ids % 32)) & 1 != 0
    logits_V.masked_fill_(~allowed & ~logits_V.isnan(), -torch.inf)


def _ban_reference(logits_V: torch.Tensor, bad_words_QL: torch.Tensor, before: list[int]) -> None:
    """Ban bad words; `before` are the tokens among which one may begin, up to the lane's own."""
    for *padded, banned in bad_words_QL.tolist():
        prefix = [token for token in padded if token >= 0]
        matched = len(prefix) <= len(before) and before[len(before) - len(prefix) :] == prefix
        if matched and 0 <= banned < logits_V.numel() and not logits_V[banned].isnan():
            logits_V[banned] = -torch.inf


def _penalise_reference(
    logits_V: torch.Tensor, tensors: LogitsTensors, slot: int, flags: int, drafts: list[int]
) -> None:
    counts_V = tensors.counts[slot, : logits_V.numel()]
    count_V = counts_V & COUNT_MASK
    for draft in drafts:
        if 0 <= draft < logits_V.numel():
            count_V[draft] += 1
    if flags & USES_REPETITION:
        seen_V, r = (counts_V < 0) | (count_V > 0), tensors.repetition_penalty[slot]
        penalised_V = torch.where(logits_V > 0, logits_V / r, logits_V * r)
        logits_V.copy_(torch.where(seen_V, penalised_V, logits_V))
    if flags & USES_COUNTS:
        logits_V -= tensors.frequency_penalty[slot] * count_V
        logits_V -= tensors.presence_penalty[slot] * (count_V > 0)


def check_logits_tensors(tensors: LogitsTensors, vocabulary: int, width: int) -> int:
    """The number of slots; ValueError unless all tensors fit it and `width` lanes a row."""
    slots = tensors.flags.numel()
    check_lanes(slots, flags=tensors.flags, bad_words_start=tensors.bad_words_start)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        check_vector(name, getattr(tensors, name), slots, torch.float32)
    check_table("bias_ids", tensors.bias_ids, slots, 2)
    biases = tensors.bias_values
    fits = biases.shape == tensors.bias_ids.shape and biases.is_contiguous()
    if biases.dtype != torch.float32 or not fits:
        raise ValueError(
            f"bias_values must be a dense torch.float32 {list(tensors.bias_ids.shape)}, "
            f"not {biases.dtype} {list(biases.shape)}"
        )
    check_table("bitmask", tensors.bitmask, slots, 3)
    masks, words = tensors.bitmask.shape[1:]
    if (masks != 1 and masks < width) or words * 32 < vocabulary:
        raise ValueError(
            f"a bitmask of {masks} x {words} words a slot does not fit: it must be of 1 mask or of "
            f"{width} and more, for {vocabulary} ids"
        )
    check_table("bad_words", tensors.bad_words, slots, 3)
    if tensors.bad_words.shape[2] < 1:
        raise ValueError(f"bad words of 0 tokens: {tuple(tensors.bad_words.shape)}")
    check_noted(tensors.counts, tensors.history, slots)
    if tensors.counts.shape[1] < vocabulary:
        raise ValueError(
            f"counts of {tensors.counts.shape[1]} ids a slot do not do for {vocabulary} ids"
        )
    return slots


def check_noted(counts_SV: torch.Tensor, history_SP: torch.Tensor, slots: int) -> None:
    """Raise ValueError unless both are int32 [slots, 1 or more] with dense rows."""
    for name, table in (("counts", counts_SV), ("history", history_SP)):
        shape, dtype = tuple(table.shape), table.dtype
        fits = len(shape) == 2 and shape[0] == slots and shape[1] > 0 and table.stride(1) == 1
        if dtype != torch.int32 or not fits:
            raise ValueError(
                f"{name} must be int32 [{slots}, 1 or more] with dense rows, not {dtype} {shape}"
            )
