"""A request's options. Field names and defaults follow vLLM's `SamplingParams`.

A number that the device needs has its static field in its row. `fields.py` and `processing.py` lay
out and fill these fields, so a new option is a row here and its use in a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from numpy.typing import ArrayLike

from graphengine.kernels.logits.logits_triton import USES_COUNTS, USES_REPETITION
from graphengine.kernels.logits.logprobs_triton import MAX_LOGPROBS
from graphengine.options.checks import INT32_MAX, is_int, shown
from graphengine.options.code_sampling import (
    FLOAT32_MAX,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    CodeSampling,
    DrawnCode,
)
from graphengine.options.frames import Feed, ForcedCodes
from graphengine.options.logits_params import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    BadWord,
    LogprobsMode,
    frozen_bad_words,
    frozen_ids,
    frozen_logit_bias,
    frozen_sequences,
    token_bias,
)
from graphengine.options.table import (
    SEED,
    Bound,
    Flag,
    SlotField,
    check_options,
    documented,
    option,
    read_integers,
    rows,
    within,
)
from graphengine.routing_record import RoutingRecord
from graphengine.structured_outputs import StructuredOutputsParams

# The least normal float32: a smaller number may be 0 on the device, which turns the option off.
FLOAT32_TINY = 1.1754944e-38

_LOGPROBS = Bound(
    f"be an integer in [0, {MAX_LOGPROBS}], or None for none",
    lambda count: 0 <= count <= MAX_LOGPROBS,
    whole=True,
)


_MAX_TOKENS = "be at least 1, or None, or 0 with prompt_logprobs"


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request; checked when it is made.

    Logits are changed in the order of `kernels/logits/logits.py` and sampled in that of
    `kernels/sample/sampling.py`. A request's token ids include the token that ended it, whatever
    its text shows.
    """

    temperature: float = option(
        1.0,
        TEMPERATURE,
        doc="0 is greedy, other values divide the logits; they are at least 1e-6",
        flag=Flag(common=True, metavar="T"),
        slot=SlotField(dtype=torch.float32, pad=0, meaning="0 is greedy"),
    )
    top_k: int = option(
        0,
        TOP_K,
        doc="keep the k most probable tokens; 0 or -1 keeps all",
        flag=Flag(common=True, metavar="K"),
        slot=SlotField(
            dtype=torch.int32, pad=0, meaning="0 keeps all tokens", off=(-1,), filters=True
        ),
    )
    top_p: float = option(
        1.0,
        TOP_P,
        doc="""keep the shortest prefix of the tokens, most probable first, that sums to top_p; 0
        keeps the most probable token""",
        flag=Flag(common=True, metavar="P"),
        slot=SlotField(dtype=torch.float32, pad=1, meaning="1 keeps all tokens", filters=True),
    )
    min_p: float = option(
        0.0,
        within(0, 1),
        doc="keep tokens at least min_p times as probable as the most probable one",
        flag=Flag(),
        slot=SlotField(dtype=torch.float32, pad=0, meaning="0 keeps all tokens", filters=True),
    )
    top_n_sigma: float = option(
        0.0,
        Bound(
            f"be 0, or in [{FLOAT32_TINY}, {FLOAT32_MAX}]",
            lambda value: value == 0 or FLOAT32_TINY <= value <= FLOAT32_MAX,
        ),
        doc="""keep tokens whose logit is at most this many standard deviations (of all logits)
        below the largest; it applies before top_k and top_p; 0 keeps all""",
        flag=Flag(),
        slot=SlotField(dtype=torch.float32, pad=0, meaning="0 keeps all tokens", filters=True),
    )
    seed: int | None = option(
        None,
        SEED,
        doc="""seed of the request's random numbers; None: the engine draws one and reports it, the
        same in every process unless `EngineConfig.seed` differs""",
        flag=Flag(
            common=True,
            metavar="N",
            help="seed of the request's random numbers (left out: the same in every run, unless "
            "--engine-seed changes)",
        ),
        slot=SlotField(dtype=torch.int64, pad=0, meaning="Philox key"),
    )
    max_tokens: int | None = option(
        256,
        Bound(_MAX_TOKENS, lambda count: count >= 0),
        doc="""most new tokens; None: up to max_seq_len; 0, with `prompt_logprobs`, only scores the
        prompt""",
        flag=Flag(
            common=True,
            metavar="N",
            help="most new tokens; none: as many as fit; 0, with --prompt-logprobs, only scores "
            "the prompt",
        ),
    )
    min_tokens: int = option(
        0,
        within(0, INT32_MAX // 2),
        doc="""end-of-sequence and stop token ids cannot be sampled before this many new tokens;
        with `ignore_eos`, only stop token ids are banned (vLLM bans both)""",
        flag=Flag(),
    )
    stop: str | Sequence[str] | None = option(
        None,
        doc="""strings that end the request; they do not if they are complete within the first
        `min_tokens` tokens""",
        flag=Flag(common=True, many=True),
    )
    stop_token_ids: Sequence[int] | None = option(
        None,
        doc="""token ids that end the request, in addition to the checkpoint's end-of-sequence ids;
        None: no others""",
        flag=Flag(parse=read_integers, metavar="ID,..."),
    )
    ignore_eos: bool = option(
        False, doc="the checkpoint's end-of-sequence ids do not end the request", flag=Flag()
    )
    include_stop_str_in_output: bool = option(
        False,
        doc="keep the stop string, or the text of the stop token, at the end of the text",
        flag=Flag(name="include-stop"),
    )
    skip_special_tokens: bool = option(
        True,
        doc="leave special tokens out of the text",
        flag=Flag(name="special-tokens", inverse=True, help="show special tokens in the text"),
    )
    remove_eos: bool = option(
        False,
        doc="""leave the checkpoint's end-of-sequence tokens out of all text, even where special
        tokens and what ended the request are shown (`remove_EOD` of Megatron's text generation
        controller)""",
        flag=Flag(),
    )
    add_bos: bool | None = option(
        None,
        doc="""a text prompt begins with exactly one BOS token (True) or with none (False), as with
        Megatron's `add_BOS`; None: as the tokenizer's files say""",
        flag=Flag(),
    )
    allowed_token_ids: Sequence[int] | None = option(
        None,
        doc="the only ids that may be sampled; None: all",
        flag=Flag(parse=read_integers, metavar="ID,..."),
    )
    bad_words: Sequence[BadWord] | None = option(
        None,
        doc="""words, or sequences of token ids, that the output may not contain: the last token of
        one is not sampled where it would complete it. A word is banned both with and without a
        space before it, however many tokens either form takes""",
        flag=Flag(name="bad-word", many=True),
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        doc="values that are added to the logits of these ids, in [-1e20, 1e20] or -inf",
        flag=Flag(metavar="ID=V", parse=token_bias, many=True, collect=dict),
        hashed=False,
    )
    repetition_penalty: float = option(
        1.0,
        within(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        doc="""divides positive logits of ids in the prompt or the output, and multiplies negative
        ones; above 1 it discourages repetition; in [1e-6, 1e6]""",
        flag=Flag(),
        slot=SlotField(
            dtype=torch.float32, pad=1, meaning="1 changes nothing", flag=USES_REPETITION
        ),
    )
    frequency_penalty: float = option(
        0.0,
        within(-MAX_PENALTY, MAX_PENALTY),
        doc="""subtracted from an id's logit once for each time that the id is in the output; in
        [-2, 2]""",
        flag=Flag(),
        slot=SlotField(dtype=torch.float32, pad=0, meaning="0 changes nothing", flag=USES_COUNTS),
    )
    presence_penalty: float = option(
        0.0,
        within(-MAX_PENALTY, MAX_PENALTY),
        doc="subtracted from an id's logit if the id is in the output at all; in [-2, 2]",
        flag=Flag(),
        slot=SlotField(dtype=torch.float32, pad=0, meaning="0 changes nothing", flag=USES_COUNTS),
    )
    logprobs: int | None = option(
        None,
        _LOGPROBS,
        doc="""return the log-probability of each new token, and those of this many of the most
        probable tokens, up to 20; None: none. Where steps emit frames, 0 returns those of their
        codes (`Result.codes_logprobs`)""",
        flag=Flag(),
    )
    logprobs_mode: LogprobsMode | None = option(
        None,
        doc="""logits that `logprobs` are computed from, as in the engine's `logprobs_mode`; an
        engine opened with "sampled_logprobs" serves all modes, one with "raw_logprobs" also
        "processed_logprobs"; None: the engine's mode""",
    )
    prompt_logprobs: int | None = option(
        None,
        _LOGPROBS,
        doc="""return the same for the prompt's tokens, from unprocessed logits; the engine must be
        opened with `prompt_logprobs`; None (Megatron's `skip_prompt_log_probs`): none""",
        flag=Flag(
            help="return the log-probability of each prompt token, from unprocessed logits, and "
            "those of this many of the most probable tokens, up to 20"
        ),
    )
    stop_token_sequences: Sequence[Sequence[int]] = option(
        (),
        doc="""sequences of one or more token ids that end the request once the output contains one
        whole, unless it is complete within the first `min_tokens` tokens. `min_tokens` bans none
        of them. They stay in the text, because the beginning of one may already have been
        delivered""",
        flag=Flag(name="stop-token-sequence", parse=read_integers, metavar="ID,...", many=True),
    )
    structured_outputs: StructuredOutputsParams | None = option(
        None,
        doc="""form of the output: JSON, a match of a regular expression, ...; only this form,
        `stop` and `max_tokens` then decide where the output ends, so stop tokens and sequences,
        `min_tokens` and `ignore_eos` are refused at submit; None: any output""",
    )

    forced_tokens: bool = option(
        False,
        doc="""`Engine.force` may choose the request's next token. While such a request is active,
        the engine has no lookahead. `bad_words` and `structured_outputs` are refused together with
        it at submit""",
    )
    routing: RoutingRecord | ArrayLike | None = option(
        None,
        doc="""expert ids [tokens, layers with experts, experts per token], such as the `routing`
        of a `Result`, in an engine opened with `record_routing`. From the prompt's first token on,
        tokens take these experts instead of the router's choice, weighted by the router's own
        scores. Tokens past the record, and tokens whose ids are all -1, are routed as usual. The
        request begins with no KV of other requests; None: the router chooses""",
        hashed=False,
    )
    codes: CodeSampling | None = option(
        None,
        doc="""how the codes of a frame after the first are drawn, for a model whose steps emit
        frames: `CodeSampling`; None: as its first code is""",
    )
    forced_codes: ForcedCodes | ArrayLike | None = option(
        None,
        doc="""codes [frames, codes of a frame] that the request's first frames have, whatever the
        model says, for a model whose steps emit frames; -1 for a code that is drawn. What follows
        is conditioned on them, and `logprobs` are theirs; None: all codes are drawn""",
        hashed=False,
    )

    feed: Feed | None = option(
        None,
        doc="""embeddings that are added to the frames of a reply, for a model into which text
        streams while it speaks, or codes of a user who speaks meanwhile: `Feed`, with the pad for
        frames without one; `Engine.feed` gives more; None: none, for other models""",
        hashed=False,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not isinstance(self.feed, Feed | None):
            raise ValueError(f"feed={shown(self.feed)} must be a Feed, or None")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError(f"max_tokens=0 must {_MAX_TOKENS}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", ())
        self._freeze("stop_token_ids", "a list of token ids")
        for token in self.stop_tokens:
            if not is_int(token):
                raise ValueError(f"stop_token_ids holds {shown(token)}, which is not an integer")
        if not isinstance(self.stop, str | None):
            self._freeze("stop", "a string or a list of strings")
        for stop in self.stop_strings:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop={shown(self.stop)} must be strings that are not empty")
        frozen: dict[str, object] = {
            "stop_token_ids": tuple(map(int, self.stop_tokens)),
            "bad_words": frozen_bad_words(self.bad_words),
            "logit_bias": frozen_logit_bias(self.logit_bias),
            "stop_token_sequences": frozen_sequences(
                "stop_token_sequences", self.stop_token_sequences
            ),
        }
        if self.routing is not None:
            frozen["routing"] = RoutingRecord(self.routing)
        if self.forced_codes is not None:
            frozen["forced_codes"] = ForcedCodes(self.forced_codes)
        if self.allowed_token_ids is not None:
            frozen["allowed_token_ids"] = frozen_ids("allowed_token_ids", self.allowed_token_ids)
        for name, value in frozen.items():
            object.__setattr__(self, name, value)

    def _freeze(self, name: str, meaning: str) -> None:
        """Keep a tuple of the field's items: the caller may change the list later."""
        value = getattr(self, name)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError(f"{name}={shown(value)} must be {meaning}")
        object.__setattr__(self, name, tuple(value))

    @property
    def routing_record(self) -> RoutingRecord | None:
        """`routing` as the checked record."""
        assert self.routing is None or isinstance(self.routing, RoutingRecord), f"{self.routing=}"
        return self.routing

    @property
    def given_codes(self) -> ForcedCodes | None:
        """`forced_codes` as the checked codes."""
        given = self.forced_codes
        assert given is None or isinstance(given, ForcedCodes), f"{given=}"
        return given

    @property
    def room(self) -> int:
        """Tokens that `max_seq_len` must hold after a prompt: 0 where it is only scored."""
        return 0 if self.max_tokens == 0 else 1

    def drawn_codes(self, count: int) -> tuple[DrawnCode, ...]:
        """How each of the `count` codes of a frame after the first is drawn.

        ValueError for sequences of another length.
        """
        usual = DrawnCode(self.temperature, max(self.top_k, 0), self.top_p)
        return (self.codes or CodeSampling()).drawn(count, usual)

    @property
    def filtered(self) -> bool:
        """Whether a filter can leave a token out of a draw; greedy ignores them."""
        return self.temperature > 0 and any(
            field.number(getattr(self, name)) != field.pad for name, field in _FILTERS.items()
        )

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_SLOT_FIELDS = {row.name: row.slot for row in rows(SamplingParams) if row.slot is not None}
SAMPLER_FIELDS = {name: field for name, field in _SLOT_FIELDS.items() if not field.flag}
"""Static fields of the options that the sampler reads."""
LOGITS_FIELDS = {name: field for name, field in _SLOT_FIELDS.items() if field.flag}
"""Static fields of the options that change logits before the sampler."""
_FILTERS = {name: field for name, field in SAMPLER_FIELDS.items() if field.filters}
