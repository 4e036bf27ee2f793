"""Options of requests that make no sense, or are not there yet, where a step emits frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphengine.models.inner.drawn import FrameCoder
from graphengine.models.inner.parallel_heads import ParallelHeads
from graphengine.options.code_sampling import DrawnCode
from graphengine.sampling_params import SamplingParams

_OF_TEXT = ("stop", "structured_outputs", "include_stop_str_in_output")
_OF_TOKENS = (
    *("min_tokens", "stop_token_ids", "stop_token_sequences", "allowed_token_ids", "bad_words"),
    *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("prompt_logprobs", "forced_tokens"),
)
_USUAL = SamplingParams()


def read_frame_params(params: SamplingParams, inner: FrameCoder | None) -> tuple[DrawnCode, ...]:
    """How each code after a frame's first is drawn; empty where a step emits tokens.

    ValueError, with name and value, for an option of text or of single tokens where it emits
    frames, and for `codes` and `forced_codes` where it does not.
    """
    if inner is None:
        for name in ("codes", "forced_codes"):
            value = getattr(params, name)
            if value is not None:
                raise ValueError(
                    f"{name}={value!r:.99} is for models whose steps emit frames of codes: this "
                    f"one emits tokens"
                )
        return ()
    for names, why in (
        (_OF_TEXT, "frames have no text"),
        (_OF_TOKENS, "it is for tokens, and each step of this model emits a frame of codes"),
    ):
        for name in names:
            value = getattr(params, name)
            if value != getattr(_USUAL, name):
                raise ValueError(f"{name}={value!r:.99}: {why}")
    if params.logprobs:
        raise ValueError(
            f"logprobs={params.logprobs}: frames have the log-probabilities of their own codes "
            f"alone, logprobs=0"
        )
    return params.drawn_codes(inner.steps - 1)


def given_frames(
    params: SamplingParams, inner: FrameCoder | None, most: int
) -> NDArray[np.int16] | None:
    """The codes that a request of at most `most` frames gives, int16 [F, K]; None if it gives none.

    ValueError for codes that the model does not have, and for too many frames.
    """
    forced = params.given_codes
    if forced is None or inner is None:
        return None
    forced.check(inner.steps, inner.codes)
    if len(forced.codes) > most:
        raise ValueError(
            f"forced_codes of {len(forced.codes)} frames: max_tokens and max_seq_len leave room "
            f"for {most}"
        )
    return forced.codes


def check_frame_prompt(prompt: Sequence[int], inner: FrameCoder | None) -> None:
    """ValueError for an id in a prompt that stands for a frame of sound."""
    if isinstance(inner, ParallelHeads):
        inner.check_prompt(prompt)
