"""What requests ask of their logits, in mixed batches and with drafts, against others' definitions.

Drafts change nothing, so the oracle knows none: each request of a batch says what transformers
chooses for it alone, with log-probabilities of the same sequence (`engines/logit_options.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from checkpoints.vanilla_modules import target_model, write_agreeing
from engines.logit_options import (
    Expected,
    assert_greedy,
    assert_logprobs,
    drawn_by,
    each_option,
    expect,
)
from engines.small_engine import OTHER, PROMPT, assert_idle, greedy, open_engine, run
from graphengine import Engine, Result, SamplingParams
from graphengine.speculative import MTP, NGram, Speculative
from launches.rounding_bounds import assert_best, in_float64, room_of

TOKENS = 15
LENGTHS = (5, 17, 40, 9)


class Case(NamedTuple):
    """A checkpoint, the drafter, and which log-probabilities there are."""

    name: str
    speculative: Speculative | None
    mode: str


CASES = {
    "plain-random": Case("llama-biases", None, "processed_logprobs"),
    "plain-demo": Case("demo", None, "raw_logprobs"),
    "ngram-random": Case("qwen3-tied-128", NGram(k=3), "raw_logprobs"),
    "ngram-demo": Case("demo", NGram(k=3), "processed_logprobs"),
    "eagle-demo": Case("demo", MTP(k=3), "raw_logprobs"),
    "vanilla-random": Case("vanilla", MTP(k=3, style="vanilla"), "processed_logprobs"),
}


@pytest.fixture(scope="module")
def oracles(checkpoints: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_agreeing(tmp_path_factory.mktemp("vanilla"))
    return checkpoints | {"vanilla": SimpleNamespace(path=path, model=target_model())}


@pytest.fixture(scope="module")
def engines(oracles: dict[str, Any]) -> Iterator[Callable[[str, str], Engine]]:
    """The engine of each case, opened when it is first asked for."""
    opened: dict[tuple[str, str], Engine] = {}

    def engine(name: str, device: str) -> Engine:
        if (name, device) not in opened:
            case = CASES[name]
            opened[name, device] = open_engine(
                oracles[case.name].path, device=device, dtype="float32", row_family="dot",
                speculative=case.speculative, logprobs_mode=case.mode, prompt_logprobs=True,
            )  # fmt: skip
        return opened[name, device]

    yield engine
    for each in opened.values():
        each.close()


def prompts(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def table_of(expected: Expected, case: Case) -> Any:
    return expected.raw if case.mode == "raw_logprobs" else expected.processed


@pytest.mark.parametrize("name", CASES)
def test_a_mixed_batch_says_what_transformers_says_of_each(
    oracles: dict[str, Any], engines: Callable[..., Engine], device: str, name: str
) -> None:
    """Every option alone, all of them together, and none, in one batch."""
    case, engine = CASES[name], engines(name, device)
    vocab_size = engine.model.config.vocab_size
    asked: list[tuple[list[int], SamplingParams]] = []
    every = prompts(vocab_size)
    plain = engine.generate(every, greedy(TOKENS, ignore_eos=True))
    changes = [each_option(result, vocab_size) for result in plain]
    for index, option in enumerate((*changes[0], "nothing", "prompt")):
        which = index % len(every)
        options = changes[which].get(option, {})
        if option == "prompt":
            options = {"prompt_logprobs": 3, "repetition_penalty": 1.3}
        params = greedy(TOKENS - index, ignore_eos=True, logprobs=index % 5, **options)
        asked.append((every[which], params))
    drafted = engine.acceptance.accepted
    requests = [engine.submit(*each) for each in asked]
    run(engine)
    for (prompt, params), request in zip(asked, requests, strict=True):
        result, model = request.result(), oracles[case.name].model
        expected = expect(model, prompt, result.token_ids, params)
        assert_greedy(result, expected, params)
        assert params.logprobs is not None
        assert_logprobs(result, table_of(expected, case), params.logprobs)
    assert (engine.acceptance.accepted > drafted) == (case.speculative is not None)
    assert_idle(engine)


OFF_BY_LITTLE: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": dict.fromkeys(range(0, 250, 2), 0.001)},
    "repetition_penalty": {"repetition_penalty": 1.001},
    "frequency_penalty": {"frequency_penalty": 0.001},
    "presence_penalty": {"presence_penalty": 0.001},
}


@pytest.mark.parametrize("name", ["plain-random", "ngram-demo"])
def test_what_is_granted_to_rounding_swallows_no_fault(
    oracles: dict[str, Any], engines: Callable[..., Engine], device: str, name: str
) -> None:
    """Neither an option that is off by a thousandth nor one that is lost."""
    model, engine = oracles[CASES[name].name].model, engines(name, device)
    vocab_size = engine.model.config.vocab_size
    prompt = prompts(vocab_size)[1]
    result = engine.generate(prompt, greedy(TOKENS, ignore_eos=True, logprobs=4))
    for option, little in OFF_BY_LITTLE.items():
        expected = expect(model, prompt, result.token_ids, greedy(TOKENS, **little))
        with pytest.raises(AssertionError, match=r"chosen=|not close|within"):
            assert_logprobs(result, expected.processed, 4)
            pytest.fail(f"{option} of {little} passes")
    for option, lost in each_option(result, vocab_size).items():
        params = greedy(TOKENS, **lost)
        expected = expect(model, prompt, result.token_ids, params)
        with pytest.raises(AssertionError, match="less than the best"):
            assert_greedy(result, expected, params)
            pytest.fail(f"{option} passes")


@pytest.mark.parametrize("name", ["plain-demo", "ngram-random", "eagle-demo", "vanilla-random"])
def test_min_tokens_goes_with_each_option(
    oracles: dict[str, Any], engines: Callable[..., Engine], device: str, name: str
) -> None:
    """It is what transformers' MinNewTokensLengthLogitsProcessor does, for EOS and stop ids.

    It is no part of processed log-probabilities, as `EngineConfig.logprobs_mode` says.
    """
    case, engine = CASES[name], engines(name, device)
    prompt = prompts(engine.model.config.vocab_size)[1]
    plain = engine.generate(prompt, greedy(TOKENS, ignore_eos=True))
    stops = sorted({plain.token_ids[1], plain.token_ids[6], plain.token_ids[13]})
    least = 8
    late = 0
    every = each_option(plain, engine.model.config.vocab_size)
    barred = {"min_tokens": least, "stop_token_ids": stops, "logprobs": 2}
    asked = [greedy(TOKENS, **barred, **options) for options in every.values()]
    freely = [greedy(TOKENS, stop_token_ids=stops, **options) for options in every.values()]
    results, without = (
        engine.generate([prompt] * len(every), params) for params in (asked, freely)
    )
    stop_ids = (*engine.eos_ids, *stops)
    for params, result, early in zip(asked, results, without, strict=True):
        model = oracles[case.name].model
        expected = expect(model, prompt, result.token_ids, params, stop_ids)
        assert_greedy(result, expected, params, stop_ids)
        assert_logprobs(result, table_of(expected, case), 2)
        assert not set(result.token_ids[:least]) & set(stop_ids)
        ended = result.token_ids[-1] in stop_ids
        assert result.finish_reason == ("stop" if ended else "length")
        late += len(early.token_ids) <= least < len(result.token_ids)
    assert late > 0


# Sampling.

DRAWN: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8, "seed": 11},
    "top_k": {"temperature": 1.3, "top_k": 12, "seed": 2**62 + 5},
    "top_p": {"top_p": 0.7, "seed": 13},
    "min_p": {"min_p": 0.05, "temperature": 1.7, "seed": 0},
    "top_n_sigma": {"top_n_sigma": 1.5, "temperature": 1.7, "seed": 17},
    "all": {
        "top_n_sigma": 3.0,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "temperature": 0.9,
        "seed": 15,
    },
}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_a_seed_draws_from_transformers_processed_logits(
    oracles: dict[str, Any], engines: Callable[..., Engine], device: str, name: str
) -> None:
    """Token by token: the sampler's plain twin on what transformers' processors leave."""
    case, engine = CASES[name], engines(name, device)
    prompt = prompts(engine.model.config.vocab_size)[1]
    plain = engine.generate(prompt, greedy(TOKENS, ignore_eos=True))
    every = list(each_option(plain, engine.model.config.vocab_size).values())
    asked = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, **every[index - 1 - at], **drawn)
        for at, drawn in enumerate(DRAWN.values())
        for index in range(2)
    ]
    near = 0
    for params, result in zip(asked, engine.generate([prompt] * len(asked), asked), strict=True):
        assert result.seed == params.seed and len(result.token_ids) == TOKENS
        expected = expect(oracles[case.name].model, prompt, result.token_ids, params)
        rows = zip(result.token_ids, *expected.processed, strict=True)
        for position, (token, exact_V, room) in enumerate(rows, start=len(prompt) - 1):
            drawn = drawn_by(exact_V.float(), params, position)
            if token == drawn:
                continue
            # Rounding decides where the two lie so near that this turns one into the other.
            exact_V[token] += room
            exact_V[drawn] -= room
            again = drawn_by(exact_V.float(), params, position)
            assert token == again, f"{position=}: {token}, not {drawn}, of {params}"
            near += 1
    assert near <= 1, f"{near} of {len(asked) * TOKENS} tokens were decided by rounding"


# What transformers has no definition of.


def vllm_apply_bad_words(
    logits_V: torch.Tensor, bad_words: Sequence[Sequence[int]], past_tokens_ids: Sequence[int]
) -> None:
    """vLLM's `_apply_bad_words_single_batch` (`vllm/v1/sample/ops/bad_words.py`), written anew.

    `past_tokens_ids` are those of the output alone.
    """
    for bad_word_ids in bad_words:
        if len(bad_word_ids) > len(past_tokens_ids) + 1:
            continue
        prefix_length = len(bad_word_ids) - 1
        last_token_id = bad_word_ids[-1]
        actual_prefix = past_tokens_ids[-prefix_length:] if prefix_length > 0 else []
        if list(actual_prefix) == list(bad_word_ids[:prefix_length]):
            logits_V[last_token_id] = -torch.inf


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain-random", "ngram-random", "eagle-demo"])
def test_bad_words_are_those_of_vllm(
    oracles: dict[str, Any], engines: Callable[..., Engine], device: str, name: str
) -> None:
    """A word that begins in the prompt is not banned, one of several tokens in the output is."""
    case, engine = CASES[name], engines(name, device)
    prompt = prompts(engine.model.config.vocab_size)[0]
    said = engine.generate(prompt, greedy(TOKENS, ignore_eos=True)).token_ids
    alone = [token for token in said if token != said[0]][-1:]
    words = [
        [prompt[-1], said[0]], [*prompt[-2:], *said[:2]], said[3:5], said[6:9], said[2:7], alone
    ]  # fmt: skip
    result = engine.generate(prompt, greedy(TOKENS, ignore_eos=True, bad_words=words))
    tokens, model = result.token_ids, oracles[case.name].model
    sequence = torch.tensor([[*prompt, *tokens]])
    logits_TV = in_float64(model)(sequence).logits[0, len(prompt) - 1 : -1]
    room_T = room_of(model, logits_TV)
    for index, logits_V in enumerate(logits_TV):
        vllm_apply_bad_words(logits_V, words, tokens[:index])
    assert_best(tokens, logits_TV, room_T, words)
    assert len(tokens) == TOKENS and tokens != said
    assert alone and tokens[0] == said[0]


# What a result has of it.


@pytest.mark.parametrize("name", ["plain-demo", "eagle-demo"])
def test_logprobs_in_plain_json(engines: Callable[..., Engine], device: str, name: str) -> None:
    engine = engines(name, device)
    params = greedy(7, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    plain, result = engine.generate([PROMPT, OTHER], [greedy(7), params])
    found = json.loads(json.dumps(result.to_dict()))
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == len(result.prompt_token_ids)
    for tokens, lists, own in (
        (result.token_ids, found["logprobs"], result.logprobs),
        (result.prompt_token_ids[1:], found["prompt_logprobs"][1:], result.prompt_logprobs[1:]),
    ):
        for token, entries, logprobs in zip(tokens, lists, own, strict=True):
            assert entries[0]["token_id"] == token
            assert {entry["token_id"]: (entry["logprob"], entry["rank"]) for entry in entries} == (
                dict(logprobs)
            )
    assert result.cumulative_logprob == sum(entries[0]["logprob"] for entries in found["logprobs"])
    # A request that asks for none gets none, whatever its neighbour asks for.
    assert plain.logprobs is plain.prompt_logprobs is plain.cumulative_logprob is None
    nothing = plain.to_dict()
    assert nothing["logprobs"] is None and nothing["prompt_logprobs"] is None


def test_a_prompts_logprobs_do_not_depend_on_what_is_asked_of_the_output(
    engines: Callable[..., Engine], device: str
) -> None:
    """They are of the logits as they are; and those of the output may be left out."""
    engine = engines("plain-random", device)
    prompt = prompts(engine.model.config.vocab_size)[2]
    plain = engine.generate(prompt, greedy(3, prompt_logprobs=2, ignore_eos=True))
    assert plain.logprobs is None and plain.prompt_logprobs is not None
    changes: dict[str, dict[str, Any]] = each_option(
        engine.generate(prompt, greedy(TOKENS, ignore_eos=True)), engine.model.config.vocab_size
    )
    for options in changes.values():
        result: Result = engine.generate(
            prompt, greedy(3, prompt_logprobs=2, logprobs=1, ignore_eos=True, **options)
        )
        assert result.prompt_logprobs == plain.prompt_logprobs
