"""What a request asks of the sampler. Field names and defaults follow vLLM's `SamplingParams`."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass

INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234e38
# Below it the quotients leave float32's range, and tokens tie that do not.
MIN_TEMPERATURE = 1e-6

_INTEGERS = {"top_k": False, "min_tokens": False, "seed": True, "max_tokens": True}
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "remove_eos")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request; checked when it is made.

    temperature     0 is greedy; otherwise logits are divided by it, and it is at least 1e-6
    top_k           keep the k most probable tokens; 0 or -1 keeps all
    top_p           keep the shortest prefix of the tokens, by probability, that reaches top_p
    min_p           keep tokens at least min_p times as probable as the most probable one
    seed            of the request's own random numbers; None: the engine draws one and reports it
    max_tokens      new tokens at most; None: up to max_seq_len
    min_tokens      end-of-sequence and stop token ids cannot be sampled before this many new tokens
    stop            strings that end the request; one that is complete with one of the first
                    `min_tokens` tokens does not
    stop_token_ids  token ids that end the request, beside the checkpoint's end-of-sequence ids
    ignore_eos      the checkpoint's end-of-sequence ids do not end the request

    What ended a request is in its token ids; of its text these decide:

    include_stop_str_in_output  the text ends with the stop string, or the text of the stop token
    skip_special_tokens         special tokens have no text
    remove_eos                  an end-of-sequence token that ended the request has no text even
                                where `include_stop_str_in_output` (`remove_EOD` of Megatron's text
                                generation controller)

    And of its prompt, if that is text:

    add_bos  True: it begins with exactly one BOS token, False: with none (Megatron's `add_BOS`);
             None: as the tokenizer's files have it
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    remove_eos: bool = False
    add_bos: bool | None = None

    def __post_init__(self) -> None:
        for name, optional in _INTEGERS.items():
            value = getattr(self, name)
            if not (is_int(value) or (optional and value is None)):
                raise ValueError(f"{name}={value!r} must be an integer")
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise ValueError(f"{name}={value!r} must be a number")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.add_bos, bool | None):
            raise ValueError(f"add_bos={self.add_bos!r} must be True, False or None")
        self._freeze("stop_token_ids", "a list of token ids")
        if not isinstance(self.stop, str | None):
            self._freeze("stop", "a string or a list of strings")
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= FLOAT32_MAX):
            raise ValueError(
                f"temperature={self.temperature} must be 0, or finite and at least "
                f"{MIN_TEMPERATURE}"
            )
        if not -1 <= self.top_k <= INT32_MAX:
            raise ValueError(f"top_k={self.top_k} must be positive, or 0 or -1 for all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p} must be in [0, 1]")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be in [0, 2**63)")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1, or None")
        if not 0 <= self.min_tokens <= INT32_MAX // 2:
            raise ValueError(f"min_tokens={self.min_tokens} must be in [0, {INT32_MAX // 2}]")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        for stop in self.stop_strings:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop={self.stop!r} must be strings that are not empty")
        for token in self.stop_token_ids:
            if not is_int(token):
                raise ValueError(f"stop_token_ids holds {token!r}, which is not an integer")

    def _freeze(self, name: str, meaning: str) -> None:
        """Keep a tuple of the field's items: the caller may change the list later."""
        value = getattr(self, name)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError(f"{name}={value!r} must be {meaning}")
        object.__setattr__(self, name, tuple(value))

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p can leave a token out; greedy ignores them."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def is_int(value: object) -> bool:
    """Whether `value` is an integer, numpy's included; True and 1.0 are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
