"""Options of requests that make no sense, or are not there yet, where a step emits frames."""

from __future__ import annotations

from graphengine.models.inner.inner_decoder import InnerDecoder
from graphengine.options.code_sampling import DrawnCode
from graphengine.sampling_params import SamplingParams

_OF_TEXT = ("stop", "structured_outputs", "include_stop_str_in_output")
_OF_TOKENS = (
    *("min_tokens", "stop_token_ids", "stop_token_sequences", "allowed_token_ids", "bad_words"),
    *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("prompt_logprobs", "forced_tokens"),
)
_USUAL = SamplingParams()


def read_frame_params(params: SamplingParams, inner: InnerDecoder | None) -> tuple[DrawnCode, ...]:
    """How each code after a frame's first is drawn; empty where a step emits tokens.

    ValueError, with name and value, for an option of text or of single tokens where it emits
    frames, and for `codes` where it does not.
    """
    if inner is None:
        if params.codes is not None:
            raise ValueError(
                f"codes={params.codes!r:.99} is for models whose steps emit frames of codes: this "
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
