"""Checks requests' options on logits, and lays them out in static fields for the device.

A request without any of these options has no `Processing`, and its steps skip all of this. The
fields are a group of their own, copied when a request with options comes or goes; the padding of
each field asks for nothing. `logits_step.py` reads them. Masks are a separate group, which
`masks.py` fills.

Letters: S slots, W tokens of a row in the widest step, V vocabulary, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphengine.buckets import Field, StaticBuffers
from graphengine.config import EngineConfig
from graphengine.kernels.logits.automata import GrammarAutomata
from graphengine.kernels.logits.logits import LogitsTensors
from graphengine.kernels.logits.logits_triton import (
    USES_AUTOMATON,
    USES_BAD_WORDS,
    USES_BIAS,
    USES_GRAMMAR,
    USES_MASK,
)
from graphengine.kernels.logits.sampled_logits import SAMPLED
from graphengine.options.checks import shown
from graphengine.options.logits_params import LogprobsMode
from graphengine.prompts import token_id
from graphengine.sampling_params import LOGITS_FIELDS, SamplingParams
from graphengine.text.tokenizer import Tokenizer
from graphengine.text.tokenizer_files import WRITE_TOKENIZER

GROUP = "options"
MASKS = "masks"
"""Group of `allowed_bits`, which a step with a grammar copies again."""


AUTOMATON_TABLES, AUTOMATON_STATE = "grammar_tables", "grammar_state"
AUTOMATON_START = "grammar_start"


@dataclass(frozen=True, kw_only=True, slots=True)
class Processing:
    """A slot's values for the fields of `processing_fields`, by name; None stands for padding.

    flags   its `logits_flags`: which of the others change its logits
    mask    [V / 32 rounded up] of `allowed_token_ids`, None without; a grammar, and a caller who
            forces tokens, have masks of their own
    """

    flags: int
    values: dict[str, Any]
    mask: NDArray[np.int32] | None = None

    def with_automaton(self, start: int) -> Processing:
        """These options, with the masks of an automaton in place of those that the host makes.

        start  where the automaton's region of the pool starts
        """
        flags = self.flags & ~USES_GRAMMAR | USES_AUTOMATON
        values = self.values | {"logits_flags": flags, AUTOMATON_START: start}
        return replace(self, flags=flags, values=values)


def make_processing(
    params: SamplingParams,
    *,
    prompt_len: int,
    vocabulary: int,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
) -> Processing | None:
    """The options on logits in `params`; None if there are none. ValueError for options that the
    engine cannot serve.

    vocabulary  number of ids that can be sampled
    """
    flags, values, mask = 0, dict[str, Any](), None
    if params.allowed_token_ids is not None:
        mask = _bitmask(params.allowed_token_ids, vocabulary)
    if params.structured_outputs is not None or params.forced_tokens:
        flags |= USES_GRAMMAR
    elif mask is not None:
        flags |= USES_MASK
    if params.bad_words:
        flags |= USES_BAD_WORDS
        words = _bad_words(params, vocabulary, tokenizer, config)
        values["bad_words"] = _from_the_end(words, config.max_bad_word_tokens)
    if params.logit_bias:
        flags |= USES_BIAS
        _check_count("logit_bias", len(params.logit_bias), "max_logit_bias", config)
        values["bias_ids"] = [
            token_id(token, vocabulary, "logit_bias") for token in params.logit_bias
        ]
        values["bias_values"] = [float(value) for value in params.logit_bias.values()]
    for name, field in LOGITS_FIELDS.items():
        number = field.number(getattr(params, name))
        if number != field.pad:
            flags |= field.flag
            values[name] = number
    if params.logprobs is not None:
        _check_count("logprobs", params.logprobs, "max_logprobs", config)
        values["logprobs_wanted"] = params.logprobs
        values["logprobs_raw"] = _logprobs_source(params, config, changed=bool(flags))
    if params.prompt_logprobs is not None:
        if not config.prompt_logprobs:
            raise ValueError(
                f"prompt_logprobs={params.prompt_logprobs} are for an engine that is opened with "
                f"prompt_logprobs=True"
            )
        _check_count("prompt_logprobs", params.prompt_logprobs, "max_logprobs", config)
        values["prompt_logprobs_wanted"] = params.prompt_logprobs
    if sequences := params.stop_token_sequences:
        for ids in sequences:
            _check_tokens("stop_token_sequences", ids, config.max_stop_sequence_tokens, vocabulary)
        _check_count("stop_token_sequences", len(sequences), "max_stop_sequences", config)
        values["stop_sequences"] = _from_the_end(sequences, config.max_stop_sequence_tokens)
    if not values and not flags:
        return None
    values |= {"logits_flags": flags, "output_start": prompt_len}
    return Processing(flags=flags, values=values, mask=mask)


def check_prompt_rows(out: object, tokens: int, vocabulary: int, device: torch.device) -> None:
    """ValueError unless `out` is memory of `device` for a row of log-probabilities a token."""
    wanted = f"float32 [{tokens}, {vocabulary}] on {device} with dense rows"
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"prompt_logprobs_out={shown(out)} must be a tensor, {wanted}")
    if out.shape != (tokens, vocabulary) or out.dtype != torch.float32 or out.device != device:
        raise ValueError(
            f"prompt_logprobs_out must be {wanted}, not {out.dtype} {list(out.shape)} on "
            f"{out.device}"
        )
    if out.stride(1) != 1 or (tokens > 1 and out.stride(0) < vocabulary):
        raise ValueError(
            f"prompt_logprobs_out must be {wanted} that do not overlap, not with strides "
            f"{out.stride()}"
        )
    if out.requires_grad:
        raise ValueError(
            "prompt_logprobs_out is written behind autograd's back: it must not require gradients"
        )


def _logprobs_source(params: SamplingParams, config: EngineConfig, *, changed: bool) -> int:
    """The value of `logprobs_raw`. ValueError for a mode that the engine does not serve.

    changed  whether the request's options change its logits; raw and processed ones are else equal
    """
    mode = params.logprobs_mode or config.logprobs_mode
    served = _SERVED_MODES[config.logprobs_mode]
    if mode not in served:
        raise ValueError(
            f"logprobs_mode={mode!r}: this engine was opened with "
            f"logprobs_mode={config.logprobs_mode!r}, which serves {' and '.join(served)}"
        )
    if mode == "sampled_logprobs":
        # Without any of these the sampler draws from the processed logits themselves.
        same = params.temperature in (0, 1) and not params.filtered and not params.min_tokens
        # Codes after a frame's first may be drawn otherwise.
        same = same and params.codes is None
        return 0 if same else SAMPLED.value
    return int(changed and mode == "raw_logprobs")


_SERVED_MODES: Mapping[LogprobsMode, tuple[LogprobsMode, ...]] = {
    "raw_logprobs": ("raw_logprobs", "processed_logprobs"),
    "processed_logprobs": ("processed_logprobs",),
    "sampled_logprobs": ("raw_logprobs", "processed_logprobs", "sampled_logprobs"),
}


def check_something_is_left(
    params: SamplingParams, asked: Processing | None, stop_ids: Sequence[int]
) -> None:
    """ValueError if no allowed id can be the first token, because `asked` bans all of them."""
    allowed = params.allowed_token_ids
    if asked is None or allowed is None:
        return
    words = asked.values.get("bad_words", ())
    bans = {
        "logit_bias of -inf": [i for i, v in (params.logit_bias or {}).items() if v == -math.inf],
        "bad_words of one token": [ids[-1] for ids in words if all(each < 0 for each in ids[:-1])],
        "min_tokens, of stop ids,": stop_ids if params.min_tokens else (),
    }
    if not set(allowed).difference(*bans.values()):
        who = " and ".join(name for name, ids in bans.items() if {*ids} & {*allowed})
        raise ValueError(
            f"allowed_token_ids={allowed!r} leave no token to begin with: {who} ban them"
        )


def processing_fields(
    config: EngineConfig, *, vocab_size: int, max_seq_len: int, width: int
) -> list[Field]:
    """The static fields of requests' options on logits, and of their tokens so far.

    width  W
    """
    S, int32 = config.max_batch, torch.int32
    words = -(-vocab_size // 32)

    def host(name: str, *shape: int, dtype: torch.dtype, pad: float, meaning: str) -> Field:
        return Field(
            name=name, shape=shape, dtype=dtype, owner="host", pad=pad, meaning=meaning, group=GROUP
        )

    ids: Callable[..., Field] = partial(host, dtype=int32)
    bad_words = (config.max_bad_words, config.max_bad_word_tokens)
    sequences = (config.max_stop_sequences, config.max_stop_sequence_tokens)
    noted: dict[str, Any] = {"dtype": int32, "owner": "device"}
    return [
        *(_automaton_fields(config) if config.grammar_pool_mib else ()),
        ids("logits_flags", S, pad=0, meaning="which of these change logits; 0 for none"),
        *(
            host(name, S, dtype=field.dtype, pad=field.pad, meaning=field.meaning)
            for name, field in LOGITS_FIELDS.items()
        ),
        ids("bias_ids", S, config.max_logit_bias, pad=-1, meaning="ids with a bias; -1 for none"),
        host(
            "bias_values",
            S,
            config.max_logit_bias,
            dtype=torch.float32,
            pad=0,
            meaning="their biases",
        ),
        Field(
            name="allowed_bits",
            shape=(S, width, words),
            dtype=int32,
            pad=-1,
            meaning="by lane of the row, a bit for each id, 1 if it is allowed",
            group=MASKS,
        ),
        ids("bad_words", S, *bad_words, pad=-1, meaning="sequences that may not be completed"),
        ids("output_start", S, pad=0, meaning="where bad words and stop sequences may begin"),
        ids(
            "logprobs_wanted", S, pad=-1, meaning="most probable tokens to report; -1: no logprobs"
        ),
        ids("prompt_logprobs_wanted", S, pad=-1, meaning="the same of its prompt"),
        ids(
            "logprobs_raw",
            S,
            pad=0,
            meaning="1: of the logits as they were; 2: of those that are drawn from",
        ),
        ids("stop_sequences", S, *sequences, pad=-1, meaning="sequences that end the request"),
        Field(name="counts", shape=(S, vocab_size), meaning="what was said, by id", **noted),
        Field(
            name="history", shape=(S, max_seq_len), meaning="what was said, by position", **noted
        ),
    ]


def _automaton_fields(config: EngineConfig) -> list[Field]:
    """The pool of automata, and where the slots are in theirs."""
    S, int32 = config.max_batch, torch.int32
    device: dict[str, Any] = {"dtype": int32, "owner": "device"}
    return [
        Field(
            name=AUTOMATON_TABLES,
            shape=(config.grammar_pool_mib * 2**18,),
            meaning="tables of grammars' automata, region after region",
            **device,
        ),
        Field(
            name=AUTOMATON_START,
            shape=(S,),
            dtype=int32,
            meaning="where the automaton's region starts",
            group=GROUP,
        ),
        Field(name=AUTOMATON_STATE, shape=(S,), meaning="the automaton's state", **device),
    ]


def grammar_automata(buffers: StaticBuffers) -> GrammarAutomata:
    """The fields of `_automaton_fields`, as the kernels' argument."""
    names = (AUTOMATON_TABLES, AUTOMATON_START, AUTOMATON_STATE)
    return GrammarAutomata(*(buffers[name] for name in names))


# Names of the fields that kernels know by other names.
_FIELD_NAMES = {
    "flags": "logits_flags",
    "bitmask": "allowed_bits",
    "bad_words_start": "output_start",
}


def logits_tensors(buffers: StaticBuffers) -> LogitsTensors:
    """The fields that change logits, as the kernels' argument."""
    names = (_FIELD_NAMES.get(name, name) for name in LogitsTensors._fields)
    return LogitsTensors(*(buffers[name] for name in names))


_HOST_FIELDS = (
    "logits_flags",
    *LOGITS_FIELDS,
    "bias_ids",
    "bias_values",
    "bad_words",
    "output_start",
    "logprobs_wanted",
    "prompt_logprobs_wanted",
    "logprobs_raw",
    "stop_sequences",
)


def processing_updates(asked: Sequence[Processing | None]) -> dict[str, Any]:
    """All host-owned fields of `processing_fields` except the masks; `asked` is by slot."""
    names = list(_HOST_FIELDS)
    if any(slot is not None and slot.flags & USES_AUTOMATON for slot in asked):
        # An engine without a pool has no such field.
        names.append(AUTOMATON_START)
    return {name: [slot and slot.values.get(name) for slot in asked] for name in names}


def _bitmask(ids: Sequence[int], vocabulary: int) -> NDArray[np.int32]:
    """A mask [words] in which the bit of each id is set."""
    words = np.zeros(-(-vocabulary // 32), dtype=np.uint32)
    index = np.array([token_id(token, vocabulary, "allowed_token_ids") for token in ids])
    np.bitwise_or.at(words, index // 32, np.uint32(1) << (index % 32).astype(np.uint32))
    return words.view(np.int32)


def _bad_words(
    params: SamplingParams, vocabulary: int, tokenizer: Tokenizer | None, config: EngineConfig
) -> list[Sequence[int]]:
    """The token sequences that bad words expand to."""
    found: list[Sequence[int]] = []
    for word in params.bad_words or ():
        if not isinstance(word, str):
            found.append(word)
            continue
        if tokenizer is None:
            raise ValueError(
                f"bad_words hold {word!r}, but the checkpoint has no tokenizer.json: give token "
                f"ids. {WRITE_TOKENIZER}"
            )
        try:
            forms = _forms_of_word(word, tokenizer)
        except ValueError as error:
            raise ValueError(f"bad_words hold {shown(word)}: {error}") from error
        if not forms:
            raise ValueError(f"bad_words hold {word!r}, which comes to no token")
        found += forms
    found = list(dict.fromkeys(map(tuple, found)))
    for ids in found:
        _check_tokens("bad_words", ids, config.max_bad_word_tokens, vocabulary)
    _check_count("bad_words", len(found), "max_bad_words", config)
    return found


def _forms_of_word(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of a word with and without a space before it, at the beginning of a text and
    inside one. (vLLM drops the form with a space where the two differ in length.)

    A form that ends with another form is left out: the other one already bans its last token.
    """
    bare = word.lstrip(" ") or word
    forms = [
        tuple(encode(text))
        for encode in (
            partial(tokenizer.encode, add_special_tokens=False),
            tokenizer.encode_inside,
        )
        for text in (bare, f" {bare}")
    ]
    known = {*forms}
    return [
        form
        for form in dict.fromkeys(forms)
        if form and not any(form[start:] in known for start in range(1, len(form)))
    ]


def _from_the_end(sequences: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """The sequences, left-padded with -1 to `width`."""
    return [[-1] * (width - len(ids)) + list(ids) for ids in sequences]


def _check_tokens(name: str, ids: Sequence[int], most: int, vocabulary: int) -> None:
    if len(ids) > most:
        raise ValueError(
            f"{name} hold a sequence of {len(ids)} tokens; max_{_SINGULAR[name]}_tokens={most}"
        )
    for token in ids:
        token_id(token, vocabulary, name)


_SINGULAR = {"bad_words": "bad_word", "stop_token_sequences": "stop_sequence"}


def _check_count(name: str, count: int, limit: str, config: EngineConfig) -> None:
    most = getattr(config, limit)
    if count > most:
        spellings = " (words have up to four spellings)" if name == "bad_words" else ""
        values = (
            f"{name}={count}"
            if "logprobs" in name
            else f"{name} come to {count} entries{spellings}; they"
        )
        raise ValueError(f"{values} exceed {limit}={most}")
