"""What a request asks of the sampler. Field names and defaults follow vLLM's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphengine.checks import INT32_MAX, check_number, is_int
from graphengine.logits_params import (
    BadWord,
    check_logits_params,
    frozen_bad_words,
    frozen_ids,
    frozen_logit_bias,
    frozen_sequences,
)
from graphengine.structured_outputs import StructuredOutputsParams

FLOAT32_MAX = 3.4028234e38
# Below it the quotients leave float32's range, and tokens tie that do not.
MIN_TEMPERATURE = 1e-6

_INTEGERS = {"top_k": False, "min_tokens": False, "seed": True, "max_tokens": True}
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
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
    min_tokens      end-of-sequence and stop token ids cannot be sampled before this many new
                    tokens; with `ignore_eos`, stop token ids alone (vLLM's bans both)
    stop            strings that end the request; one that is complete with one of the first
                    `min_tokens` tokens does not
    stop_token_ids  token ids that end the request, beside the checkpoint's end-of-sequence ids;
                    None: no others
    ignore_eos      the checkpoint's end-of-sequence ids do not end the request

    What ended a request is in its token ids; of its text these decide:

    include_stop_str_in_output  the text ends with the stop string, or the text of the stop token
    skip_special_tokens         special tokens have no text
    remove_eos                  the checkpoint's end-of-sequence tokens have no text wherever they
                                stand, even where special tokens and what ended the request do
                                (`remove_EOD` of Megatron's text generation controller)

    And of its prompt, if that is text:

    add_bos  True: it begins with exactly one BOS token, False: with none (Megatron's `add_BOS`);
             None: as the tokenizer's files have it
    What is done to the logits in front of that, in the order of `kernels/logits.py`:

    allowed_token_ids   no other ids are sampled; None: all may be
    bad_words           words, or sequences of token ids, whose last token is not sampled where it
                        would complete them in the output; a word counts with and without a space
                        in front, as of vLLM
    logit_bias          what is added to the logits of these ids: in [-1e20, 1e20], or -inf
    repetition_penalty  divides positive logits of ids in prompt or output, multiplies the others;
                        above 1 against repetition; in [1e-6, 1e6]
    frequency_penalty   subtracted for each time that the id is in the output; in [-2, 2]
    presence_penalty    subtracted if the id is in the output at all; in [-2, 2]

    And:

    logprobs              log-probabilities of each new token, and of so many of the most probable
                          ones beside it, up to 20; None: none
    prompt_logprobs       the same of the prompt's tokens, of the logits as they are; of an engine
                          that is opened with `prompt_logprobs`; None (Megatron's
                          `skip_prompt_log_probs`): none
    stop_token_sequences  sequences of token ids that end the request where the output holds one of
                          them as a whole; in front of min_tokens they do not. They stay in the
                          text: the beginning of one may have been delivered
    structured_outputs    what the output must be: JSON, a match of a regular expression, ...; None:
                          anything. It alone decides where the output ends, `max_tokens` aside:
                          beside it `stop`, stop tokens and sequences, `min_tokens` and `ignore_eos`
                          are refused at submit
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    remove_eos: bool = False
    add_bos: bool | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[BadWord] | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_sequences: Sequence[Sequence[int]] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, optional in _INTEGERS.items():
            value = getattr(self, name)
            if not (is_int(value) or (optional and value is None)):
                raise ValueError(f"{name}={value!r} must be an integer")
        for name in _NUMBERS:
            check_number(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.add_bos, bool | None):
            raise ValueError(f"add_bos={self.add_bos!r} must be True, False or None")
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", ())
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
        for token in self.stop_tokens:
            if not is_int(token):
                raise ValueError(f"stop_token_ids holds {token!r}, which is not an integer")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(
                f"structured_outputs={self.structured_outputs!r} must be StructuredOutputsParams, "
                f"or None"
            )
        check_logits_params(self)
        frozen: dict[str, object] = _plain_numbers(self) | {
            "bad_words": frozen_bad_words(self.bad_words),
            "logit_bias": frozen_logit_bias(self.logit_bias),
            "stop_token_sequences": frozen_sequences(
                "stop_token_sequences", self.stop_token_sequences
            ),
        }
        if self.allowed_token_ids is not None:
            frozen["allowed_token_ids"] = frozen_ids("allowed_token_ids", self.allowed_token_ids)
        for name, value in frozen.items():
            object.__setattr__(self, name, value)

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
    def stop_tokens(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _plain_numbers(params: SamplingParams) -> dict[str, object]:
    """Python's own numbers in place of NumPy's, which wrap around, and of fractions."""
    integers = {name: getattr(params, name) for name in (*_INTEGERS, "logprobs", "prompt_logprobs")}
    return {
        **{name: int(value) for name, value in integers.items() if value is not None},
        **{name: float(getattr(params, name)) for name in _NUMBERS},
        "stop_token_ids": tuple(map(int, params.stop_tokens)),
    }
