"""Options of requests that make no sense, or are not there yet, where a step emits frames."""

from __future__ import annotations

from graphengine.sampling_params import SamplingParams

_OF_TEXT = ("stop", "structured_outputs", "include_stop_str_in_output")
_OF_TOKENS = (
    *("min_tokens", "stop_token_ids", "stop_token_sequences", "allowed_token_ids", "bad_words"),
    *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logprobs", "prompt_logprobs", "forced_tokens"),
)
_USUAL = SamplingParams()


def check_frame_params(params: SamplingParams) -> None:
    """ValueError, with name and value, for an option of text or of single tokens."""
    for names, why in (
        (_OF_TEXT, "frames have no text"),
        (_OF_TOKENS, "it is for tokens, and each step of this model emits a frame of codes"),
    ):
        for name in names:
            value = getattr(params, name)
            if value != getattr(_USUAL, name):
                raise ValueError(f"{name}={value!r:.99}: {why}")
