"""Requests that ask something of their logits, and what transformers and vLLM make of the same.

transformers generates with its own processors (repetition penalty, sequence bias, bad words) and
with vLLM's frequency and presence penalties and its allowed ids, written down here anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from graphengine import Result, SamplingParams

LOGPROB_TOLERANCE = 1e-5
"""Absolute up to a log-probability of 1, relative beyond: logits themselves are float32."""


class Counted(LogitsProcessor):
    """vLLM's `apply_penalties`: over the output alone."""

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
    """What `params` ask for, in the order of vLLM's sampler."""
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


class Expected(NamedTuple):
    """What transformers generates greedily."""

    token_ids: tuple[int, ...]
    raw: torch.Tensor
    """float32 [tokens, V], log-softmax of the model's logits."""
    processed: torch.Tensor
    """The same of the processed ones."""


@torch.no_grad()
def generate(model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams) -> Expected:
    output: Any = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=params.max_tokens,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=processors(params, len(prompt)),
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    raw, processed = (torch.cat(rows).float() for rows in (output.logits, output.scores))
    tokens = tuple(output.sequences[0, len(prompt) :].tolist())
    return Expected(tokens, raw.log_softmax(-1), processed.log_softmax(-1))


def assert_logprobs(result: Result, expected_TV: torch.Tensor, top: int) -> None:
    """The result's log-probabilities are those of the table, a row for each token."""
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    rows = zip(result.token_ids, result.logprobs, expected_TV, strict=True)
    for index, (token, logprobs, expected_V) in enumerate(rows):
        assert next(iter(logprobs)) == token
        chosen = logprobs[token]
        # Ranks count ids of at least the token's logit; what is this close may lie on either side.
        slack = LOGPROB_TOLERANCE * max(1, abs(float(expected_V[token])))
        above, below = (
            int((expected_V >= expected_V[token] + sign * slack).sum()) for sign in (1, -1)
        )
        assert above <= chosen.rank <= below, f"token {index}: {chosen=}, {above=}, {below=}"
        others = list(logprobs)[1:]
        assert top - 1 <= len(others) <= top
        values = [logprobs[other].logprob for other in others]
        assert values == sorted(values, reverse=True)
        best = expected_V.topk(top).values if top else expected_V[:0]
        listed = [*others, token] if len(others) < top else others
        found = sorted((logprobs[other].logprob for other in listed), reverse=True)
        torch.testing.assert_close(
            torch.tensor(found),
            best,
            rtol=LOGPROB_TOLERANCE,
            atol=LOGPROB_TOLERANCE,
            check_dtype=False,
        )
        for other, (value, _) in logprobs.items():
            wanted = float(expected_V[other])
            assert abs(value - wanted) <= LOGPROB_TOLERANCE * max(1, abs(wanted)), (
                f"token {index}, id {other}: {value}, not {wanted}"
            )


def random_options(dice: random.Random, vocab_size: int) -> dict[str, Any]:
    """Some of the options that a request may have, each now and then."""

    def ids(count: int) -> list[int]:
        return dice.sample(range(vocab_size), count)

    drawn: dict[str, Callable[[], Any]] = {
        "allowed_token_ids": lambda: ids(vocab_size // 2),
        "bad_words": lambda: [ids(dice.randrange(1, 4)) for _ in range(dice.randrange(1, 20))],
        "logit_bias": lambda: {token: dice.uniform(-5, 5) for token in ids(20)},
        "repetition_penalty": lambda: dice.uniform(0.8, 1.5),
        "frequency_penalty": lambda: dice.uniform(-0.5, 1.5),
        "presence_penalty": lambda: dice.uniform(-0.5, 1.5),
        "logprobs": lambda: dice.choice([0, 1, 5, 20]),
        "prompt_logprobs": lambda: dice.choice([0, 3]),
        # Of two tokens among many, so that some come up.
        "stop_token_sequences": lambda: [ids(2) for _ in range(8)],
    }
    return {name: draw() for name, draw in drawn.items() if dice.random() < 0.35}
