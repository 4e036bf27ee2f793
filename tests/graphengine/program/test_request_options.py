"""What requests ask of their logits, against transformers; and that nobody else pays for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.few_layers import few_layers
from engines.logit_options import assert_greedy, assert_logprobs, each_option, expect
from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, greedy, open_engine, run
from engines.speculation import DOT, open_plain, open_speculating, run_with
from extent import extent
from graphengine import Engine, Request, Result, SamplingParams
from graphengine.core import engine_core as core
from graphengine.host.step_plan import Plan
from graphengine.kernels.logits.logprobs_mailbox import publish_logprobs
from graphengine.program import logits_step as logits_step_module
from graphengine.program.fields import host_updates
from graphengine.requests.processing import GROUP
from graphengine.speculative import MTP, DraftModel, NGram, Speculative

MODEL_NAMES = ["llama-biases", "qwen3-tied-128", "demo"]
TOKENS = 14
LENGTHS = extent((5, 40), (5, 17, 40))


OPTIONS = [
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "repetition_penalty",
    "encouraged repetition",
    "frequency_penalty",
    "presence_penalty",
    "negative penalties",
    "all of it",
]


def ask(max_tokens: int = TOKENS, **asked: Any) -> SamplingParams:
    return greedy(max_tokens, ignore_eos=True, **asked)


@pytest.fixture(scope="module")
def engines(checkpoints: dict[str, Any]) -> Iterator[Callable[..., Engine]]:
    """An engine of a checkpoint for each set of options, opened when it is first asked for."""
    opened: dict[str, Engine] = {}

    def engine(name: str, device: str, **config: Any) -> Engine:
        key = f"{name} {device} {config}"
        if key not in opened:
            path = checkpoints[name].path
            opened[key] = open_engine(path, device=device, dtype="float32", **config)
        return opened[key]

    yield engine
    for each in opened.values():
        each.close()


@pytest.fixture(scope="module")
def said_plainly(engines: Callable[..., Engine]) -> Callable[[str, str, str, Any], Result]:
    """What the engine of a checkpoint, a device and a mode says where nothing is asked; once."""
    known: dict[str, Result] = {}

    def of(name: str, device: str, mode: str, prompt: list[int]) -> Result:
        key = f"{name} {device} {mode} {prompt}"
        if key not in known:
            known[key] = engines(name, device, logprobs_mode=mode).generate(prompt, ask())
        return known[key]

    return of


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_tokens_and_logprobs_are_those_of_transformers(
    checkpoints: dict[str, Any],
    engines: Callable[..., Engine],
    said_plainly: Callable[[str, str, str, Any], Result],
    device: str,
    name: str,
    option: str,
) -> None:
    oracle = checkpoints[name]
    modes = ("raw_logprobs", "processed_logprobs")
    changed = 0
    for prompt, mode in zip(oracle.prompts(LENGTHS), cycle(modes), strict=False):
        engine = engines(name, device, logprobs_mode=mode)
        plain = said_plainly(name, device, mode, prompt)
        params = ask(logprobs=4, **each_option(plain, engine.model.config.vocab_size)[option])
        result = engine.generate(prompt, params)
        expected = expect(oracle.model, prompt, result.token_ids, params)
        assert_greedy(result, expected, params)
        table = expected.raw if mode == "raw_logprobs" else expected.processed
        assert_logprobs(result, table, 4)
        changed += result.token_ids != plain.token_ids
    assert changed


@pytest.mark.parametrize("top", [0, 1, 20])
def test_logprobs_alone_change_nothing(
    checkpoints: dict[str, Any], engines: Callable[..., Engine], device: str, top: int
) -> None:
    engine, oracle = engines("llama-biases", device), checkpoints["llama-biases"]
    for prompt in oracle.prompts(LENGTHS):
        result = engine.generate(prompt, ask(logprobs=top))
        assert result.token_ids == engine.generate(prompt, ask()).token_ids
        expected = expect(oracle.model, prompt, result.token_ids)
        assert_greedy(result, expected, ask())
        assert_logprobs(result, expected.raw, top)
        assert result.cumulative_logprob == pytest.approx(
            sum(
                logprobs[token].logprob
                for token, logprobs in zip(result.token_ids, result.logprobs, strict=True)
            )
        )


# Mixed batches.


def mixed_params(engine: Engine) -> list[SamplingParams]:
    """Everything there is, beside requests that ask for nothing; greedy and sampled ones."""
    vocab_size = engine.model.config.vocab_size
    said = engine.generate(PROMPT, ask()).token_ids
    return [
        ask(TOKENS),
        ask(TOKENS + 3, repetition_penalty=1.3, logprobs=2),
        SamplingParams(seed=3, max_tokens=20, presence_penalty=1.5, logprobs=0, ignore_eos=True),
        ask(9, allowed_token_ids=range(5, vocab_size, 2), logprobs=20),
        SamplingParams(seed=4, max_tokens=30, top_k=20, frequency_penalty=-0.5, ignore_eos=True),
        ask(TOKENS, bad_words=[said[3:5], said[8:9]], logit_bias={said[0]: -5.0}, logprobs=1),
        SamplingParams(seed=5, temperature=0.8, max_tokens=17, ignore_eos=True),
        ask(1, repetition_penalty=2.0, logprobs=5),
        ask(TOKENS, logprobs=7),
        ask(TOKENS, stop_token_sequences=[said[6:9], said[12:14]], logprobs=3),
        ask(TOKENS, stop_token_sequences=[said[6:9], said[12:14]], logprobs=3),
    ]  # fmt: skip


PROMPTS = (PROMPT, OTHER, LONG, "x", OTHER * 3)


def said_by(result: Request | Result) -> tuple[Any, ...]:
    logprobs = None if result.logprobs is None else tuple(result.logprobs)
    return tuple(result.token_ids), result.finish_reason, logprobs


def served(engine: Engine, params: list[SamplingParams], *, together: bool) -> list[Any]:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    if together:
        requests = [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
        run_with(engine)
    else:
        requests = [engine.generate(*pair) for pair in zip(prompts, params, strict=True)]
        run(engine)
    assert_idle(engine)
    return [said_by(request) for request in requests]


Alone = Callable[[str], tuple[list[SamplingParams], list[Any]]]


@pytest.fixture(scope="module")
def alone() -> Alone:
    """By device, `mixed_params` and what each of them says by itself."""

    @cache
    def of(device: str) -> tuple[list[SamplingParams], list[Any]]:
        with open_plain(device=device) as engine:
            params = mixed_params(engine)
            return params, served(engine, params, together=False)

    return of


def test_a_mixed_batch_says_what_each_says_alone(device: str, alone: Alone) -> None:
    params, expected = alone(device)
    with open_plain(device=device) as engine:
        assert served(engine, params, together=True) == expected
        assert {reason for _, reason, _ in expected} == {"length", "stop"}
        assert engine.counters["replays/prefill/8/full"] and engine.counters["replays/prefill/8"]


@pytest.mark.parametrize(
    ("speculative", "company"),
    [(NGram(k=3), (False, True)), (MTP(k=3), (True,)), (MTP(k=1), (True,))],
    ids=str,
)
def test_speculation_changes_nothing(
    device: str, alone: Alone, speculative: Speculative, company: tuple[bool, ...]
) -> None:
    params, expected = alone(device)
    with open_speculating(speculative, device=device) as engine:
        for together in company:
            got = served(engine, params, together=together)
            for mine, theirs in zip(got, expected, strict=True):
                assert mine == theirs
        assert engine.acceptance.accepted > 0


def test_pauses_change_nothing(device: str) -> None:
    with open_plain(device=device) as engine:
        params = mixed_params(engine)
        params = [params[index] for index in (1, 2, 4, 5, 8)] * 2
        expected = served(engine, params, together=False)
    with open_plain(device=device, kv_blocks=12, swap_blocks=64) as engine:
        assert served(engine, params, together=True) == expected
        assert engine.counters["pauses"] >= 2


# Stop sequences.


@pytest.mark.parametrize("speculative", [None, NGram(k=3)], ids=["plain", "ngram"])
def test_the_earliest_stop_sequence_ends_a_request(
    device: str, speculative: Speculative | None
) -> None:
    with open_engine(device=device, speculative=speculative, **DOT) as engine:
        said = engine.generate(PROMPT, ask()).token_ids

        def stopped(*sequences: tuple[int, ...], **more: Any) -> Result:
            return engine.generate(PROMPT, ask(stop_token_sequences=sequences, **more))

        def end(ids: tuple[int, ...], least: int = 0) -> int:
            ends = range(max(len(ids), least), len(said) + 1)
            return next(n for n in ends if said[n - len(ids) : n] == ids)

        for first, last in ((2, 4), (3, 9), (0, 2), (10, 12)):
            ids = said[first:last]
            result = stopped((1, 2, 3), ids)
            assert result.finish_reason == "stop" and result.token_ids == said[: end(ids)]
            assert result.stop_reason == ids and result.to_dict()["stop_reason"] == list(ids)
            # Parts of it may have been streamed, so its text stays.
            assert result.text == engine.tokenizer.decode(result.token_ids)
        result = stopped(said[9:12], said[4:6], logprobs=1)
        count = min(end(said[9:12]), end(said[4:6]))
        assert result.token_ids == said[:count] and len(result.logprobs or ()) == count
        assert stopped(said[5:6]).token_ids == said[: end(said[5:6])]
        assert stopped(said[:1]).token_ids == said[:1]
        # What the prompt ends with is none of it, and what ends before min_tokens does not count.
        prompt = engine.core.intake.prompt(PROMPT, ask()).ids
        assert stopped((prompt[-1], said[0])).token_ids == said
        late = stopped(said[2:4], min_tokens=5)
        later = [n for n in range(6, len(said) + 1) if said[n - 2 : n] == said[2:4]]
        assert late.token_ids == said[: later[0] if later else len(said)]
        assert stopped((0, 1, 0)).finish_reason == "length"


def test_a_sequence_of_one_token_stops_as_longer_ones_do(engine: Engine) -> None:
    """Its text stays and it is the stop reason, unlike those of a stop token id."""
    said = engine.generate(PROMPT, ask()).token_ids
    sequence = engine.generate(PROMPT, ask(stop_token_sequences=[said[2:3]]))
    token = engine.generate(PROMPT, ask(stop_token_ids=said[2:3]))
    assert sequence.token_ids == token.token_ids == said[: said.index(said[2]) + 1]
    assert (sequence.stop_reason, token.stop_reason) == (said[2:3], said[2])
    assert engine.tokenizer is not None
    assert sequence.text == engine.tokenizer.decode(sequence.token_ids)
    assert token.text == engine.tokenizer.decode(token.token_ids[:-1])
    # The first token, which the prompt's last chunk samples.
    first = engine.generate(PROMPT, ask(stop_token_sequences=[[7, 8], said[:1]]))
    assert first.token_ids == said[:1] and first.stop_reason == said[:1]
    # They are not counted as stop token ids.
    many = engine.config.max_stop_ids - len(engine.eos_ids)
    full = ask(stop_token_sequences=[said[2:3]], stop_token_ids=range(4000, 4000 + many))
    assert engine.generate(PROMPT, full).token_ids == sequence.token_ids
    run(engine)


@pytest.mark.parametrize("size", [1, 2])
def test_min_tokens_bans_no_stop_sequence(engine: Engine, size: int) -> None:
    """Nor does one end the request that token number `min_tokens` or one before it completes."""
    said = engine.generate(PROMPT, ask()).token_ids
    for least in range(size, 8):
        sequence = said[least - size : least]
        params = ask(stop_token_sequences=[sequence], min_tokens=least)
        ends = (n for n in range(least + 1, len(said) + 1) if said[n - size : n] == sequence)
        result = engine.generate(PROMPT, params)
        assert result.token_ids == said[: next(ends, len(said))]
        earlier = engine.generate(PROMPT, dataclasses.replace(params, min_tokens=least - 1))
        assert len(earlier.token_ids) == next(
            n for n in range(least, len(said) + 1) if said[n - size : n] == sequence
        )
    run(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bad_words": [[5]]}, r"\(5,\) leave no token to begin with: bad_words of one token ban"),
        ({"logit_bias": {5: -math.inf}}, r"logit_bias of -inf ban them"),
        ({"min_tokens": 2, "stop_token_ids": [5]}, "min_tokens, of stop ids, ban them"),
    ],
)
def test_what_leaves_no_token_is_refused(
    engine: Engine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, ask(allowed_token_ids=[5], **options))
    assert (
        engine.generate(PROMPT, ask(allowed_token_ids=[5, 6], **options)).finish_reason != "error"
    )


def test_bad_words_count_once(engine: Engine) -> None:
    assert engine.generate(PROMPT, ask(bad_words=["foo"] * 200)).finish_reason == "length"


def test_events_bring_the_logprobs_of_their_tokens(engine: Engine) -> None:
    ends = engine.generate(PROMPT, ask()).segments[3].text
    request = engine.submit(PROMPT, ask(logprobs=2, stop=ends))
    plain = engine.submit(PROMPT, ask())
    events = run(engine)
    for event in events:
        if event.request is plain:
            assert event.logprobs is None
        elif event.token_ids:
            assert event.logprobs is not None
            assert [next(iter(each)) for each in event.logprobs] == list(event.token_ids)
    assert plain.logprobs is None and plain.result().cumulative_logprob is None
    assert request.finish_reason == "stop"
    assert request.logprobs is not None and len(request.logprobs) == len(request.token_ids)


def test_a_step_without_time_does_not_wait_for_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Callable[[], None]] = []

    def hold(mailbox: torch.Tensor, sequence: torch.Tensor, *arguments: Any, **more: Any) -> None:
        held.append(partial(publish_logprobs, mailbox, sequence.clone(), *arguments, **more))

    with open_engine(device="cpu") as engine:
        monkeypatch.setattr(logits_step_module, "publish_logprobs", hold)
        request = engine.submit(PROMPT, ask(3, logprobs=1))
        for _ in range(3):
            assert engine.step(timeout=0) == []
        assert not request.token_ids and len(held) == 2
        for count in (1, 2, 3):
            held.pop(0)()
            (event,) = engine.step(timeout=0)
            assert len(event.token_ids) == len(event.logprobs or ()) == 1
            assert len(request.token_ids) == count
        while held or engine.busy:
            while held:
                held.pop(0)()
            engine.step(timeout=0)
        assert_idle(engine)


# Others do not pay.


def test_plain_steps_run_none_of_it(
    device: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {field.name for field in engine.runtime.buffers.fields if field.group == GROUP}
    assert "logits_flags" in names and "temperature" not in names
    plans: list[Plan] = []
    loaded: list[dict[str, Any]] = []

    def updates(plan: Plan, *arguments: Any, **more: Any) -> dict[str, Any]:
        plans.append(plan)
        loaded.append(host_updates(plan, *arguments, **more))
        return loaded[-1]

    monkeypatch.setattr(core, "host_updates", updates)
    if device == "cpu":
        for name in ("process_logits", "rank_logits", "note_tokens", "note_prompt"):
            monkeypatch.setattr(logits_step_module, name, None)
    full = {name: n for name, n in engine.counters.items() if name.endswith("/full")}
    for params in (ask(), SamplingParams(seed=1)):
        engine.generate([PROMPT, LONG], params)
    assert full == {name: n for name, n in engine.counters.items() if name.endswith("/full")}
    assert not any(plan.options_changed or plan.full for plan in plans)
    assert not any(names & each.keys() for each in loaded)
    # In steady state there is nothing to load at all.
    assert len(loaded) > 30 and sum(map(bool, loaded)) < len(loaded) / 2


def test_a_slot_forgets_what_its_last_request_asked(engine: Engine) -> None:
    expected = engine.generate(PROMPT, SamplingParams(seed=1, top_k=9))
    engine.generate(
        PROMPT, ask(allowed_token_ids=[5, 6], stop_token_sequences=[[5, 5]], logprobs=1)
    )
    again = engine.generate(PROMPT, SamplingParams(seed=1, top_k=9))
    assert again.token_ids == expected.token_ids and again.logprobs is None
    for field in engine.runtime.buffers.fields:
        if field.group == GROUP:
            assert bool((engine.runtime.buffers[field.name] == field.pad).all()), field.name


# A padded vocabulary.


PADDED = [
    ask(),
    ask(logprobs=3),
    SamplingParams(seed=1, top_k=50, ignore_eos=True),
    SamplingParams(seed=2, temperature=1.5, ignore_eos=True, logprobs=20),
    ask(repetition_penalty=0.7, logprobs=20),
    ask(frequency_penalty=-2.0, presence_penalty=-2.0),
    ask(logit_bias={5: 2.0}, bad_words=[[9], [7, 8]]),
    SamplingParams(seed=3, top_p=0.9, min_p=0.01, presence_penalty=1.0, ignore_eos=True),
]


@pytest.mark.parametrize("speculative", [None, NGram(k=3)], ids=["plain", "ngram"])
def test_ids_without_a_token_are_never_sampled(
    device: str, tmp_path: Path, speculative: Speculative | None
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from graphengine.demo import checkpoint_path

    tokens, rows = 4096, 4160
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, tie_word_embeddings=False, **sizes))
    with torch.no_grad():
        # Of two opposite rows one has the largest logit.
        model.lm_head.weight[tokens] = 50.0
        model.lm_head.weight[tokens + 1] = -50.0
    model.save_pretrained(tmp_path)
    options: dict[str, Any] = {"device": device, "speculative": speculative, "row_family": "dot"}
    prompts = [[1, 2, 3]] * len(PADDED)
    with open_engine(tmp_path, **options) as engine:
        for result in engine.generate(prompts, PADDED):
            assert max(result.token_ids) >= tokens
    (tmp_path / "tokenizer.json").symlink_to(checkpoint_path() / "tokenizer.json")
    with open_engine(tmp_path, **options, prompt_logprobs=True) as engine:
        for result in engine.generate(prompts, PADDED):
            assert max(result.token_ids) < tokens
            for each in result.logprobs or ():
                assert max(each) < tokens
        only = engine.generate([1, 2, 3], ask(allowed_token_ids=[tokens - 1], logprobs=20))
        assert set(only.token_ids) == {tokens - 1}
        prompt = engine.generate([1, 2, 3], ask(1, prompt_logprobs=20)).prompt_logprobs
        assert prompt is not None and max(max(each) for each in prompt if each) < tokens
        with pytest.raises(ValueError, match="4100 is outside the vocabulary of 4096"):
            engine.submit("x", ask(allowed_token_ids=[4100]))


# What is refused.

LIMITS = {
    "max_logit_bias": 2, "max_bad_words": 2, "max_bad_word_tokens": 3, "max_stop_sequences": 1,
    "max_stop_sequence_tokens": 2, "max_logprobs": 4,
}  # fmt: skip

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {1: 1, 2: 1, 3: 1}}, "3 entries.*max_logit_bias=2"),
    ({"logit_bias": {4096: 1}}, "logit_bias: token id 4096 is outside the vocabulary of 4096"),
    ({"allowed_token_ids": [4096]}, "allowed_token_ids: token id 4096 is outside"),
    ({"stop_token_ids": [4096]}, "stop_token_ids: token id 4096 is outside"),
    (
        {"bad_words": [[1], [2], [3]]},
        r"3 entries \(words have up to four.*max_bad_words=2",
    ),
    ({"bad_words": [[1, 2, 3, 4]]}, "4 tokens; max_bad_word_tokens=3"),
    ({"bad_words": [[1, 4096]]}, "4096 is outside"),
    ({"stop_token_sequences": [[1, 2], [2, 3]]}, "2 entries.*max_stop_sequences=1"),
    ({"stop_token_sequences": [[1], [2]]}, "2 entries.*max_stop_sequences=1"),
    ({"stop_token_sequences": [[1, 2, 3]]}, "3 tokens; max_stop_sequence_tokens=2"),
    ({"stop_token_sequences": [[1, 4096]]}, "4096 is outside"),
    ({"logprobs": 5}, "logprobs=5 exceed max_logprobs=4"),
]


def test_what_an_engine_has_no_room_for_is_refused() -> None:
    with open_engine(**LIMITS) as engine:
        for options, message in REFUSED:
            with pytest.raises(ValueError, match=message):
                engine.submit("x", SamplingParams(**options))
        fitting = {"logprobs": 4, "bad_words": [[1, 2, 3], [4]], "logit_bias": {1: 2, 3: 4}}
        assert engine.generate("x", ask(3, **fitting)).finish_reason == "length"
        assert_idle(engine)


def test_a_bad_word_that_cannot_be_encoded_is_named(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"bad_words hold .*: text to encode has a lone surrogate"):
        engine.submit("a", SamplingParams(bad_words=["x\ud800"]))


def test_bad_words_are_tokenised_with_and_without_a_space(engine: Engine) -> None:
    def encode(text: str) -> list[int]:
        return engine.tokenizer.encode(text, add_special_tokens=False)

    same = next(
        text
        for text in ("return", "self", "in", "not", "is")
        if len(encode(text)) == len(encode(" " + text)) == 1
    )
    assert len(encode("that")) == 2 and len(encode(" that")) == len(encode("\n")) == 1
    words = [" " + same, "for x in y", "that", "\n"]
    request = engine.submit("x", ask(bad_words=words))
    assert request.job.processing is not None
    listed = request.job.processing.values["bad_words"]
    found = [[token for token in ids if token >= 0] for ids in listed]
    # " \n" ends with the token of "\n", which is banned already.
    forms = [same, f" {same}", "for x in y", " for x in y", "that", " that", "\n"]
    assert found == [encode(form) for form in forms]
    request.cancel()
    run(engine)


@pytest.mark.parametrize("word", ["that", " that", "\n"])
def test_a_bad_word_is_banned_however_many_tokens_it_has(engine: Engine, word: str) -> None:
    (token,) = engine.tokenizer.encode(" that" if "that" in word else word, False)
    likely = {"logit_bias": {token: 1000.0}}
    assert engine.generate(PROMPT, ask(3, **likely)).token_ids == (token,) * 3
    assert token not in engine.generate(PROMPT, ask(3, **likely, bad_words=[word])).token_ids


# Prompts.


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_prompt_logprobs_are_those_of_transformers(
    checkpoints: dict[str, Any], engines: Callable[..., Engine], device: str, name: str
) -> None:
    oracle = checkpoints[name]
    engine = engines(name, device, prompt_logprobs=True)
    # One chunk of 8 tokens or 32, a full one, and several.
    prompts = oracle.prompts((1, 2, 8, 20, 32, 33, 75))
    tops = (0, 5, 20, 1, 3, 0, 4)
    asked = [ask(6, prompt_logprobs=top, repetition_penalty=1.2) for top in tops]
    results = engine.generate([*prompts, prompts[3]], [*asked, ask(6)])
    run(engine)
    for prompt, top, result in zip(prompts, tops, results[:-1], strict=True):
        assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        assert result.logprobs is None
        later = dataclasses.replace(
            result, token_ids=tuple(prompt[1:]), logprobs=result.prompt_logprobs[1:]
        )
        assert_logprobs(later, expect(oracle.model, prompt[:1], prompt[1:]).raw, top)
        assert result.token_ids == engine.generate(prompt, ask(6, repetition_penalty=1.2)).token_ids
    assert results[-1].prompt_logprobs is None
    run(engine)
    assert_idle(engine)


@pytest.mark.parametrize("speculative", [NGram(k=3), MTP(k=3)], ids=["ngram", "mtp"])
def test_prompt_logprobs_of_an_engine_with_drafts(device: str, speculative: Speculative) -> None:
    params = ask(9, prompt_logprobs=3, logprobs=2)
    with open_plain(device=device, prompt_logprobs=True) as engine:
        expected = [engine.generate(prompt, params) for prompt in PROMPTS]
    with open_speculating(speculative, device=device, prompt_logprobs=True) as engine:
        for got, each in zip(engine.generate(list(PROMPTS), params), expected, strict=True):
            assert said_by(got) == said_by(each)
            assert got.prompt_logprobs == each.prompt_logprobs


def test_a_prompt_is_scored_without_a_new_token(device: str) -> None:
    """Scores are those with one new token, but for that token; a session's turn and a stop token
    alike.
    """
    with open_plain(device=device, prompt_logprobs=True) as engine:
        prompts = [engine.tokenizer.encode(each) for each in PROMPTS]  # type: ignore[union-attr]
        expected = engine.generate(prompts, ask(1, prompt_logprobs=3))
        discarded = engine.counters["discarded_tokens"]
        stops = [result.token_ids[0] for result in expected]
        scoring = ask(0, prompt_logprobs=3, logprobs=2, stop_token_ids=stops)
        for got, each in zip(engine.generate(prompts, scoring), expected, strict=True):
            assert got.prompt_logprobs == each.prompt_logprobs
            assert got.token_ids == () and got.text == "" and got.logprobs == ()
            assert got.finish_reason == "length" and got.stop_reason is None
            assert got.timings.time_to_first_token is None and got.timings.finished is not None
        assert engine.counters["discarded_tokens"] == discarded + len(prompts)
        with engine.session() as session:
            session.append(prompts[0])
            (event,) = session.stream(scoring)
            assert event.token_ids == () and event.finish_reason == "length"
            assert session.token_ids == tuple(prompts[0])
            assert (
                session.generate(ask(4)).token_ids == engine.generate(prompts[0], ask(4)).token_ids
            )
        run(engine)
        assert_idle(engine)


@pytest.mark.parametrize("mode", ["plain", "mtp", "ngram", "draft model"])
def test_a_prompt_that_is_only_scored_may_fill_the_sequence(mode: str) -> None:
    """Nothing is written for the token that is dropped, past the last position."""
    speculative = {
        "plain": None,
        "mtp": MTP(k=2),
        "ngram": NGram(k=2),
        "draft model": DraftModel(few_layers(), k=2),
    }[mode]
    scoring = ask(0, prompt_logprobs=2)
    with open_engine(prompt_logprobs=True, speculative=speculative, device="cpu") as engine:
        limit, size = engine.memory.max_seq_len, engine.memory.block_size
        prompt = (engine.tokenizer.encode(LONG) * 8)[:limit]
        less = engine.generate(prompt[:-1], scoring)
        buffers = engine.runtime.buffers
        names = ["counts", "history", *["token_history"] * (mode == "ngram")]
        tables = [buffers[name] for name in names]
        for table in tables:
            table[1:] = 77
        for cache, _ in engine.runtime.caches:
            cache.fill_(-3.0)
        result = engine.generate(prompt, scoring)
        assert len(result.prompt_logprobs) == limit and result.token_ids == ()
        assert result.prompt_logprobs[:-1] == less.prompt_logprobs
        assert prompt[-1] in result.prompt_logprobs[-1]
        for table in tables:
            assert (table[1:] == 77).all()
        for cache, _ in engine.runtime.caches:
            # Block 0 is the dummy.
            written = (cache[:, 1:] != -3.0).flatten(2).any(dim=2).any(dim=0).sum()
            assert written in (0, limit // size)
        with pytest.raises(ValueError, match=f"{limit + 1} tokens exceeds max_seq_len={limit}"):
            engine.submit([*prompt, 1], scoring)
        with pytest.raises(ValueError, match=f"{limit} tokens leaves no room for a new one"):
            engine.submit(prompt, ask(1, prompt_logprobs=2))
        with engine.session() as session:
            session.append(prompt[:-1])
            session.generate(ask(1))
            assert len(session) == limit
            assert len(session.generate(scoring).prompt_logprobs) == limit
        run(engine)
        assert_idle(engine)


def test_prompt_logprobs_take_an_engine_that_is_opened_for_them(engine: Engine) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs=2 are for an engine that is opened with"):
        engine.submit("x", ask(prompt_logprobs=2))
    assert not any(key.variant == "prompt" for key in engine.runtime.graphs)
