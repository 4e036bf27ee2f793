"""Options on a request's logits: limits, with vLLM's names and ranges, and copies of lists.

`processing.py` turns them into what the device reads, once the engine's limits are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from graphengine.options.checks import check_number, is_int, shown

MAX_PENALTY = 2.0
# Within these limits, products and quotients stay in float32's range at any temperature.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
MAX_BIAS = 1e20

BadWord = str | Sequence[int]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "sampled_logprobs"]
"""The logits that log-probabilities are computed from."""


def token_bias(text: str) -> tuple[int, float]:
    """A token id and its bias, from `ID=V`. ValueError for any other text."""
    token, equals, value = text.partition("=")
    try:
        if equals:
            return int(token), float(value)
    except ValueError:
        pass
    raise ValueError(f"{text!r} must be ID=V, a token id and a number")


def frozen_logit_bias(bias: object) -> dict[int, float] | None:
    """A copy; ValueError unless it is a mapping from ids to numbers in range, or -inf."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias={shown(bias)} must be a mapping from token ids to numbers")
    for token, value in bias.items():
        if not is_int(token) or token < 0:
            raise ValueError(f"logit_bias is for {shown(token)}, which is not a token id")
        check_number(f"logit_bias[{token}]", value)
        if not (abs(value) <= MAX_BIAS or value == -math.inf):
            raise ValueError(
                f"logit_bias[{token}]={shown(value)} must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], "
                f"or -inf"
            )
    return {int(token): float(value) for token, value in bias.items()}


def frozen_ids(name: str, ids: object) -> tuple[int, ...]:
    """A copy; ValueError unless it is a sequence of at least one integer."""
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"{name}={shown(ids)} must be a list of token ids")
    for token in ids:
        if not is_int(token) or token < 0:
            raise ValueError(f"{name} holds {shown(token)}, which is not a token id")
    if not ids:
        raise ValueError(f"{name}={shown(ids)} must hold a token id at least")
    return tuple(int(token) for token in ids)


def frozen_sequences(name: str, sequences: object) -> tuple[tuple[int, ...], ...]:
    """A copy; ValueError unless it is a list of lists of token ids."""
    return tuple(frozen_ids(f"a sequence of {name}", ids) for ids in _listed(name, sequences))


def frozen_bad_words(words: object) -> tuple[str | tuple[int, ...], ...] | None:
    """A copy; ValueError unless it is a list of strings, or of lists of token ids."""
    if words is None:
        return None
    frozen: list[str | tuple[int, ...]] = []
    for word in _listed("bad_words", words):
        if isinstance(word, str):
            if not word:
                raise ValueError(f"bad_words={shown(words)} must hold no empty string")
            frozen.append(word)
        else:
            frozen.append(frozen_ids("a word of bad_words", word))
    return tuple(frozen)


def _listed(name: str, value: object) -> Sequence[object]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"{name}={shown(value)} must be a list")
    return value
