"""Requests that ask something of their logits, and what transformers and vLLM make of the same.

transformers has processors of its own (repetition penalty, sequence bias, bad words). vLLM's
frequency and presence penalties and its allowed ids are written again here.
"""

from __future__ import annotations

import importlib.util
import math
import random
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from graphengine import Result, SamplingParams, StructuredOutputsParams
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_reference
from graphengine.sampling_params import SAMPLER_FIELDS
from launches.rounding_bounds import assert_best, in_float64, room_of


class Counted(LogitsProcessor):
    """vLLM's `apply_penalties`, over the output only."""

    def __init__(self, prompt_len: int, frequency: float, presence: float) -> None:
        self.prompt_len, self.frequency, self.presence = prompt_len, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt_len :], minlength=scores.shape[1])
        scores = scores - self.frequency * counts
        return scores - self.presence * (counts > 0)


class Allowed(LogitsProcessor):
    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.ids] = scores[:, self.ids]
        return masked


def processors(params: SamplingParams, prompt_len: int) -> LogitsProcessorList:
    """The processors that `params` ask for, in the order of vLLM's sampler."""
    found = LogitsProcessorList()
    if params.allowed_token_ids is not None:
        found.append(Allowed(params.allowed_token_ids))
    if params.bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.logit_bias:
        biases = {(token,): value for token, value in params.logit_bias.items()}
        found.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.frequency_penalty or params.presence_penalty:
        found.append(Counted(prompt_len, params.frequency_penalty, params.presence_penalty))
    return found


class Table(NamedTuple):
    """Log-probabilities by transformers, a row for each token."""

    exact: torch.Tensor
    """float64 [tokens, V], of its model in float64."""
    room: torch.Tensor
    """float64 [tokens]: the error allowed for them in float32 (`launches/rounding_bounds.py`)."""


class Expected(NamedTuple):
    """Logits by transformers for each token after a prompt."""

    raw: Table
    """Log-probabilities of the model's logits."""
    processed: Table
    """Log-probabilities of the processed logits."""
    choice: Table
    """What is expected of the logits that it generates from: no stop ids before `min_tokens`."""


@torch.no_grad()
def expect(
    model: PreTrainedModel,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    params: SamplingParams | None = None,
    stop_ids: Sequence[int] = (),
) -> Expected:
    """The tables of these tokens after the prompt."""
    params = params or SamplingParams()
    process = processors(params, len(prompt))
    bar = LogitsProcessorList()
    if params.min_tokens:
        least = (len(prompt), params.min_tokens, list(stop_ids))
        bar.append(MinNewTokensLengthLogitsProcessor(*least, device="cpu"))
    sequence = torch.tensor([[*prompt, *token_ids]])
    raw = in_float64(model)(sequence).logits[0, len(prompt) - 1 : -1]
    processed, choice = [raw[:0]], [raw[:0]]
    for end, row in zip(range(len(prompt), sequence.shape[1]), raw, strict=True):
        processed.append(process(sequence[:, :end], row[None]))
        choice.append(bar(sequence[:, :end], processed[-1]))
    found = (raw, torch.cat(processed), torch.cat(choice))
    room = room_of(model, *found)
    return Expected(*(Table(each.log_softmax(-1), room) for each in found))


def assert_greedy(
    result: Result, expected: Expected, params: SamplingParams, stop_ids: Sequence[int] = ()
) -> None:
    """The result's tokens are what transformers generates greedily, to the same end."""
    assert_best(result.token_ids, *expected.choice, params)
    ended = bool(result.token_ids) and result.token_ids[-1] in stop_ids
    assert ended or len(result.token_ids) == params.max_tokens, f"{result.token_ids=} {params}"
    assert not set(result.token_ids[:-1]) & set(stop_ids), f"{result.token_ids=} {stop_ids=}"


def assert_logprobs(result: Result, table: Table, top: int) -> None:
    """The result's log-probabilities are those of the table."""
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    rows = zip(result.token_ids, result.logprobs, *table, strict=True)
    for index, (token, logprobs, exact_V, near) in enumerate(rows):
        assert next(iter(logprobs)) == token
        room = float(near)
        # Ranks count ids with a larger logit; logits this close may be on either side.
        chosen, exact = logprobs[token], exact_V[token]
        above, below = (int((exact_V > exact + step).sum()) for step in (2 * room, -2 * room))
        assert above < chosen.rank <= max(below, 1), f"token {index}: {chosen=}, {above=}, {below=}"
        others = list(logprobs)[1:]
        assert top - 1 <= len(others) <= top
        values = [logprobs[other].logprob for other in others]
        assert values == sorted(values, reverse=True)
        listed = [*others, token] if len(others) < top else others
        found = sorted((logprobs[other].logprob for other in listed), reverse=True)
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), exact_V.topk(top).values, rtol=0, atol=room
        )
        for other, (value, _) in logprobs.items():
            wanted = float(exact_V[other])
            assert value == wanted or abs(value - wanted) <= room, (
                f"token {index}, id {other}: {value}, not {wanted} within {room}"
            )


def drawn_by(logits_V: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The sampler's plain twin of one row after `position`."""
    tensors = SamplingTensors.neutral(1)
    asked = {name: getattr(params, name) for name in SAMPLER_FIELDS}
    tensors = tensors._replace(
        **{name: torch.full_like(getattr(tensors, name), asked[name]) for name in asked}
    )
    slot, at = (torch.tensor([value], dtype=torch.int32) for value in (0, position))
    return int(sample_reference(logits_V[None], slot, at, tensors))


def each_option(result: Result, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Each option, with a value that changes `result`, which was generated without options."""
    said, prompt = result.token_ids, set(result.prompt_token_ids)
    # Bad words begin only in the output; those of transformers may begin in the prompt.
    pairs = [list(said[i : i + 2]) for i in (1, 5, 9) if said[i] not in prompt]
    return {
        "allowed_token_ids": {"allowed_token_ids": list(range(3, vocab_size, 3))},
        "bad_words": {"bad_words": [[said[0]], *pairs, [said[3]]]},
        "logit_bias": {"logit_bias": {said[0]: -3.5, said[2]: 1.25, 7: 4.0, 11: -math.inf}},
        "repetition_penalty": {"repetition_penalty": 1.4},
        "encouraged repetition": {"repetition_penalty": 0.8},
        "frequency_penalty": {"frequency_penalty": 1.3},
        "presence_penalty": {"presence_penalty": 1.75},
        "negative penalties": {"presence_penalty": -2.0, "frequency_penalty": -0.25},
        "all of it": {
            "allowed_token_ids": list(range(1, vocab_size, 2)),
            "bad_words": [[said[0]], *pairs],
            "logit_bias": {said[2]: 1.25, 7: 4.0},
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.7,
            "presence_penalty": 0.4,
        },
    }


HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
GRAMMARS = (
    StructuredOutputsParams(regex="[a-z ]{2,30};?"),
    StructuredOutputsParams(choice=["yes", "no", "not at all"]),
    StructuredOutputsParams(
        json={"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"]},
        disable_any_whitespace=True,
    ),
)
# A grammar has no room for these; and among half of the ids it might find none.
BESIDE_NO_GRAMMAR = (
    *("stop", "stop_token_ids", "stop_token_sequences", "min_tokens", "ignore_eos"),
    "allowed_token_ids",
)


def consistent(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that contradict a grammar, if they have one."""
    if "structured_outputs" not in options:
        return options
    return {name: value for name, value in options.items() if name not in BESIDE_NO_GRAMMAR}


def random_options(
    dice: random.Random, vocab_size: int, *, grammars: bool = False
) -> dict[str, Any]:
    """Some of the options that a request may have besides the sampler's, each now and then.

    grammars  of an engine with a tokenizer and an end-of-sequence token; `consistent` goes with it
    """

    def ids(count: int) -> list[int]:
        return dice.sample(range(vocab_size), count)

    def letters() -> str:
        return "".join(dice.choices(string.ascii_letters, k=dice.choice([1, 1, 2])))

    drawn: dict[str, Callable[[], Any]] = {
        "allowed_token_ids": lambda: ids(vocab_size // 2),
        "bad_words": lambda: [
            letters() if dice.random() < 0.3 else ids(dice.randrange(1, 4))
            for _ in range(dice.randrange(1, 20))
        ],
        "logit_bias": lambda: {token: dice.uniform(-5, 5) for token in ids(20)},
        "repetition_penalty": lambda: dice.uniform(0.8, 1.5),
        "frequency_penalty": lambda: dice.uniform(-0.5, 1.5),
        "presence_penalty": lambda: dice.uniform(-0.5, 1.5),
        "logprobs": lambda: dice.choice([0, 1, 5, 20]),
        "prompt_logprobs": lambda: dice.choice([0, 3]),
        # Two tokens among many, so that some come up.
        "stop_token_sequences": lambda: [ids(2) for _ in range(8)],
        "stop_token_ids": lambda: ids(2),
        "stop": lambda: [letters() for _ in range(3)],
        "include_stop_str_in_output": lambda: True,
        "skip_special_tokens": lambda: False,
        "remove_eos": lambda: True,
        "logprobs_mode": lambda: dice.choice(["raw_logprobs", "processed_logprobs"]),
    }
    options = {name: draw() for name, draw in drawn.items() if dice.random() < 0.35}
    if grammars and dice.random() < 0.2:
        options["structured_outputs"] = dice.choice(GRAMMARS)
    return options
