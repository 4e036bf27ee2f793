"""How steps with a grammar are run: lookahead, drafts of callers, what fails, what is refused."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers

from engines.small_engine import (
    LONG,
    OTHER,
    PROMPT,
    assert_idle,
    greedy,
    open_engine,
    run,
    step_until,
)
from engines.speculation import DOT, Job, open_plain, open_speculating, outcome, run_with
from extent import extent
from graphengine import Engine, Request, SamplingParams, StructuredOutputsParams
from graphengine.demo import checkpoint_path
from graphengine.requests.grammars import Guide, _hidden
from graphengine.speculative import (
    MTP,
    NGram,
    RelaxedAcceptance,
    SaveHiddenStates,
    Speculative,
    UserProvided,
)

llguidance = pytest.importorskip("llguidance")

LIST = r"\[([0-9]{1,3}, ){6}[a-z]{2,5}\]"


def regex(pattern: str, max_tokens: int = 60, **options: Any) -> SamplingParams:
    options = options or {"temperature": 0.0}
    asked = StructuredOutputsParams(regex=pattern)
    return SamplingParams(max_tokens=max_tokens, structured_outputs=asked, **options)


# Masks and drafts.


def test_requests_without_a_grammar_never_ask_for_masks(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_speculating(MTP(k=3), device=device) as engine:
        for name in ("updates", "fetch_drafts", "wait"):
            monkeypatch.setattr(type(engine.runtime.masks), name, None)
        assert len(engine.generate([PROMPT, LONG], greedy(20))) == 2


class Pending:
    """An event that is not there until it was asked so often."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.polls -= 1
        return self.polls <= 0


def test_a_step_without_time_does_not_wait_for_drafts() -> None:
    with open_speculating(NGram(k=3), device="cpu") as engine:
        expected = engine.generate(PROMPT, regex(LIST)).token_ids
        request = engine.submit(PROMPT, regex(LIST))
        step_until(engine, lambda: len(request.token_ids) > 3)
        said = len(request.token_ids)
        engine.runtime.masks._fetched.append((0, Pending(3)))
        for _ in range(2):
            assert engine.step(timeout=0) == [] and engine.busy
            assert not engine.core.in_flight and len(request.token_ids) == said
        assert engine.step(timeout=0)
        engine.runtime.masks._fetched.append((0, Pending(50)))
        assert engine.step()
        run(engine)
        assert tuple(request.token_ids) == expected


def test_drafts_that_never_come_break_the_engine() -> None:
    with open_speculating(NGram(k=3), device="cpu", wait="block", wait_limit_s=0.01) as engine:
        request = engine.submit(PROMPT, regex(LIST))
        step_until(engine, lambda: len(request.token_ids) > 3)
        engine.runtime.masks._fetched.append((0, Pending(10**9)))
        with pytest.raises(TimeoutError, match=r"waited 0\.01 s for the drafts of replay \d+"):
            engine.step()
        with pytest.raises(RuntimeError, match="the engine is broken"):
            engine.step()


@pytest.mark.gpu
@pytest.mark.parametrize("speculative", [None, MTP(k=3)], ids=["plain", "mtp"])
def test_a_guided_step_synchronises_and_allocates_nothing(
    speculative: Speculative | None,
) -> None:
    with open_engine(device="cuda", speculative=speculative, max_seq_len=512) as engine:
        request = engine.submit(PROMPT, regex("[a-z ]{3000}", 400))
        engine.submit(PROMPT, greedy(400, ignore_eos=True))
        step_until(engine, lambda: len(request.token_ids) > 8)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(40):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        # Its row takes part in every other step, beside a row without a grammar.
        assert not request.finished and engine.counters["guided/steps"] > 20
        request.cancel()
        run(engine)


# Drafts.


def test_a_callers_drafts_are_accepted_as_far_as_the_grammar_allows_them(device: str) -> None:
    params = regex(LIST)
    with open_plain(device=device) as engine:
        known = engine.generate(PROMPT, params).token_ids
        forbidden = engine.tokenizer.encode("import", add_special_tokens=False)[0]
    for right in range(4):
        with open_speculating(UserProvided(3), device=device) as engine:
            request = engine.submit(PROMPT, params)

            def drafts(request: Request, right: int = right) -> list[int]:
                ahead = [*known[len(request.token_ids) :], 0, 0, 0][:3]
                return [*ahead[:right], *[forbidden] * (3 - right)]

            counts = [len(event.token_ids) for event in run_with(engine, drafts)]
            assert tuple(request.token_ids) == known and request.finish_reason == "stop"
            # After the prompt's chunk each step is worth the right drafts and one more.
            assert all(count == right + 1 for count in counts[1:-1])


def test_drafts_that_are_no_tokens_do_no_harm(device: str) -> None:
    with open_plain(device=device) as engine:
        known = engine.generate(PROMPT, regex(LIST)).token_ids
    with open_speculating(UserProvided(3), device=device) as engine:
        dice = random.Random(0)

        def drafts(request: Request) -> list[int]:
            return [dice.randrange(4096) for _ in range(dice.randrange(4))]

        request = engine.submit(PROMPT, regex(LIST))
        run_with(engine, drafts)
        assert tuple(request.token_ids) == known


@pytest.mark.parametrize("speculative", [NGram(k=3), MTP(k=3)], ids=["ngram", "mtp"])
def test_relaxed_acceptance_takes_no_forbidden_draft(device: str, speculative: Speculative) -> None:
    # Every token begins a thinking phase, in which any draft among the best 4000 would do.
    anything = RelaxedAcceptance(
        topk=4000, delta=1.0, begin_token_ids=range(1, 4096), end_token_ids=[0]
    )
    with open_speculating(speculative, device=device, relaxed_acceptance=anything) as engine:
        for pattern in (LIST, "(ab|cd|[e-h]{3}){9}!", r"[a-z ]{20,40}\."):
            for prompt in (PROMPT, OTHER, LONG):
                result = engine.generate(prompt, regex(pattern, 80))
                assert result.finish_reason == "stop", result.text
                assert re.fullmatch(pattern, result.text), result.text
        assert engine.acceptance.accepted > 0


# What goes wrong.


@pytest.mark.parametrize("speculative", [None, NGram(k=3)], ids=["plain", "ngram"])
def test_nothing_left_to_say_is_an_error(
    device: str, speculative: Speculative | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Digits are allowed, the word after them is not."""
    with open_engine(device=device, speculative=speculative, **DOT) as engine:
        digits = [engine.tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "0123"]
        params = regex("[0-9]{3} end", allowed_token_ids=digits, seed=3)
        beside = engine.submit(OTHER, greedy(20, ignore_eos=True))
        with caplog.at_level(logging.ERROR, logger="graphengine"):
            result = engine.generate(PROMPT, params)
        assert result.finish_reason == "error" and len(result.token_ids) == 3
        assert re.fullmatch("[0-3]{3}", result.text)
        assert engine.counters["guided/errors"] == engine.counters["finished/error"] == 1
        assert f"request {result.request_id}: its grammar allows nothing" in caplog.text
        run(engine)
        assert beside.finish_reason == "length"
        # A request that ends by its length asks for no more.
        whole = engine.generate(PROMPT, dataclasses.replace(params, max_tokens=3))
        assert whole.finish_reason == "length" and whole.token_ids == result.token_ids
        assert_idle(engine)


def test_allowed_ids_and_a_grammar_are_intersected(device: str) -> None:
    pattern = "[a-z]{4,12}!"
    with open_engine(device=device) as engine:
        free = engine.generate(PROMPT, regex(pattern, seed=1))
        allowed = sorted(set(range(1, 4096)) - set(free.token_ids[:-1]))
        limited = engine.generate(PROMPT, regex(pattern, seed=1, allowed_token_ids=allowed))
        assert limited.finish_reason == "stop" and set(limited.token_ids) <= set(allowed)
        assert re.fullmatch(pattern, limited.text)


class FailingMatcher:
    """A matcher that fails, for good, after so many tokens of a draft."""

    def __init__(self, matcher: Any, tokens: int) -> None:
        self.matcher, self.left = matcher, tokens

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.left -= len(tokens)
        return 0 if self.left < 0 else int(self.matcher.try_consume_tokens(tokens))

    def consume_token(self, token: int) -> bool:
        self.left -= 1
        return self.left >= 0 and bool(self.matcher.consume_token(token))

    def is_error(self) -> bool:
        return self.left < 0

    def get_error(self) -> str:
        return "too complex\n<state>\nof the parser"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


def make_guide(pattern: str, width: int = 4, allowed: Any = None) -> tuple[Guide, Any]:
    text = (checkpoint_path() / "tokenizer.json").read_text()
    tokenizer = llguidance.LLTokenizer(text, n_vocab=4096, eos_token=[0])
    grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
    sizes: dict[str, Any] = {"width": width, "words": 128, "vocabulary": 4096, "allowed": allowed}
    return Guide(tokenizer, grammar, **sizes), tokenizer


def test_a_matcher_that_fails_on_drafts_is_made_again() -> None:
    guide, tokenizer = make_guide("[0-9]{2} ?[0-9]{2} ?[0-9]{2}")
    said, drafts = tokenizer.tokenize_str("12 3"), tokenizer.tokenize_str("456")
    assert guide.take(said) == (len(said), None)
    guide.follow(drafts)
    expected = guide.masks.copy()
    guide.matcher = FailingMatcher(guide.matcher, 1)  # type: ignore[assignment]
    guide.follow(drafts)
    assert (guide.masks[:2] == expected[:2]).all() and not guide.masks[2:].any()
    assert not guide.matcher.is_error()
    guide.follow(drafts)
    assert (guide.masks == expected).all()
    guide.matcher = FailingMatcher(guide.matcher, 1)  # type: ignore[assignment]
    assert guide.take(drafts) == (1, "error")
    assert guide.trouble == "too complex"


def test_a_token_that_a_grammar_forbids_is_an_error() -> None:
    guide, tokenizer = make_guide("[0-9]{4}")
    assert guide.take(tokenizer.tokenize_str("1x")) == (1, "error")


def test_masks_are_those_of_before_once_drafts_were_followed() -> None:
    """Whatever was tried: ends, end-of-sequence tokens, ids that are none."""
    guide, _ = make_guide("([a-z]{2,3},)*")
    dice = random.Random(3)
    for _ in range(40):
        before = guide.masks[0].copy()
        for _ in range(8):
            allowed = np.flatnonzero(np.unpackbits(before.view(np.uint8), bitorder="little"))
            drafts = [int(dice.choice(allowed)), 0, dice.randrange(-1, 5000), int(allowed[-1])]
            dice.shuffle(drafts)
            guide.follow(drafts[:3])
            guide._fill(0)
            assert (guide.masks[0] == before).all()
        token = int(dice.choice([each for each in allowed if each]))
        assert guide.take([token]) == (1, None)
    while not guide._allows(0, 0):
        allowed = np.flatnonzero(np.unpackbits(guide.masks[0].view(np.uint8), bitorder="little"))
        assert guide.take([int(allowed[0])]) == (1, None)
    assert guide.take([0]) == (1, "stop")


# Ways to end.


def test_cancels_and_deadlines_free_the_slot(device: str) -> None:
    with open_engine(device=device) as engine:
        expected = engine.generate(PROMPT, regex(LIST)).token_ids
        request = engine.submit(PROMPT, regex(LIST))
        late = engine.submit(PROMPT, regex(LIST), deadline_s=1e-6)
        step_until(engine, lambda: len(request.token_ids) > 4)
        assert late.finish_reason == "deadline"
        request.cancel()
        again = engine.submit(PROMPT, regex(LIST))
        engine.step()
        assert request.finish_reason == "cancelled"
        assert expected[: len(request.token_ids)] == tuple(request.token_ids)
        plain = engine.submit(PROMPT, greedy(20))
        run(engine)
        assert tuple(again.token_ids) == expected
        assert tuple(plain.token_ids) == engine.generate(PROMPT, greedy(20)).token_ids
        assert engine.scheduler.guided == 0 and engine.scheduler.lookahead == 1
        assert_idle(engine)


def test_a_prompt_without_drafts_may_have_a_grammar(tmp_path: Path) -> None:
    with open_engine(device="cpu", speculative=SaveHiddenStates(tmp_path)) as engine:
        result = engine.generate(PROMPT, regex("[xyz]{3}", 1))
        assert len(result.token_ids) == 1 and set(result.text) <= set("xyz")


# Churn.

SIZES = {"cpu": (100, 1), "cuda": (6000, 20)}
PATTERNS = (LIST, "(yes|no|maybe)", "[a-z]{2,30};?", r'\{"a": [0-9]+(, "b": (true|null))?\}')


def random_job(dice: random.Random) -> Job:
    prompt = tuple(dice.randrange(1, 4096) for _ in range(dice.randrange(1, 50)))
    options: dict[str, Any] = {"max_tokens": dice.randrange(1, 30)}
    options |= {"temperature": 0.0} if dice.random() < 0.4 else {"seed": dice.randrange(999)}
    if dice.random() < 0.3:
        options["allowed_token_ids"] = range(dice.choice([0, 0, 60]), 4096, dice.choice([1, 1, 2]))
    if dice.random() < 0.3:
        options["logprobs"] = dice.randrange(3)
    if dice.random() < 0.5:
        options["structured_outputs"] = StructuredOutputsParams(regex=dice.choice(PATTERNS))
    return Job(prompt, SamplingParams(**options))


# Grammars without drafts are among the options of test_churn.py as well.
@pytest.mark.parametrize("speculative", extent([NGram(k=3)], [None, NGram(k=3), MTP(k=2)]), ids=str)
def test_each_request_says_what_it_says_alone(device: str, speculative: Speculative | None) -> None:
    tokens, times = SIZES[device]
    dice = random.Random(11)
    requests: list[Request] = []
    pool: dict[str, Any] = {"kv_blocks": 18, "swap_blocks": 300, "max_batch": 5}
    with open_engine(device=device, speculative=speculative, **pool, **DOT) as engine:
        counted = ("pauses", "finished/cancelled", "finished/stop", "slot_reuses")
        while engine.counters["tokens"] < tokens or any(
            engine.counters[name] < times for name in counted
        ):
            for _ in range(dice.randrange(9)):
                job = random_job(dice)
                try:
                    requests.append(engine.submit(job.prompt, job.params))
                except ValueError as error:
                    assert "may be sampled" in str(error)
            for _ in range(dice.randrange(30)):
                engine.step(timeout=dice.choice([None, None, 0, 0.001]))
                alive = [request for request in requests if not request.finished]
                if alive and dice.random() < 0.05:
                    dice.choice(alive).cancel()
        # Enough has happened: those who still wait for their first step go away.
        for request in [*engine.scheduler.waiting]:
            if not request.token_ids:
                request.cancel()
        run_with(engine)
        assert_idle(engine)
    guided = [
        request for request in requests if request.job.guide is not None and request.token_ids
    ]
    assert len(guided) > 5 and len(requests) > len(guided) + 5
    answered = [each for each in requests if each.token_ids or each.finish_reason != "cancelled"]
    with open_plain(device=device) as plain:
        found = plain.generate(
            [each.prompt_token_ids for each in answered], [compared(each) for each in answered]
        )
    for request, expected in zip(answered, found, strict=True):
        got = len(request.token_ids)
        if request.finish_reason == "cancelled":
            assert tuple(request.token_ids) == expected.token_ids[:got], f"{request}"
        else:
            assert outcome(request) == outcome(expected), f"{request}"
        if expected.logprobs is not None:
            assert request.logprobs == list(expected.logprobs[:got])
        structured = request.params.structured_outputs
        if structured is not None and request.finish_reason == "stop":
            assert re.fullmatch(str(structured.regex), request.text), request.text


def compared(request: Request) -> SamplingParams:
    """What a cancelled request would have said further is compared with nothing."""
    if request.finish_reason != "cancelled":
        return request.params
    return dataclasses.replace(request.params, max_tokens=len(request.token_ids))


# Tokenizers.


def byte_fallback_checkpoint(folder: Path, rows: int = 331) -> Path:
    """A random model whose tokenizer falls back to bytes; its vocabulary is padded to `rows`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = ["▁the", "▁quick", "▁", "fox", "ing", "é", "日", "▁a", "b", "c", "."]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: index for index, name in enumerate(names)}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    library.add_special_tokens(["<s>", "</s>"])
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*fallback, decoders.Strip(" ", 1, 0)])
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
    }  # fmt: skip
    config = LlamaConfig(vocab_size=rows, eos_token_id=[2, 1], **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("speculative", [None, NGram(k=3)], ids=["plain", "ngram"])
def test_a_tokenizer_with_byte_fallback(
    device: str, tmp_path: Path, speculative: Speculative | None
) -> None:
    path = byte_fallback_checkpoint(tmp_path)
    with open_engine(path, device=device, speculative=speculative) as engine:
        for seed in range(4):
            for pattern in ("fox( the| a){2,4}ing[bc]{3}", "[é日ß]{3,6}b", "(the|quick)c{1,9}"):
                result = engine.generate([5, 6, 7], regex(pattern, 80, seed=seed))
                assert result.finish_reason == "stop"
                assert re.fullmatch(pattern, result.text), result.text
                assert max(result.token_ids) < engine.tokenizer.vocab_size
        # Either end-of-sequence token may end it.
        ends = {engine.generate([5], regex("b*", 90, seed=s)).token_ids[-1] for s in range(30)}
        assert {1, 2} <= ends


def test_spaces_of_a_metaspace_decoder(tmp_path: Path) -> None:
    """llguidance takes its marks for text."""
    path = byte_fallback_checkpoint(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    library.save(str(path / "tokenizer.json"))
    with open_engine(path) as engine:
        pattern = "( the| quick){2}é"
        result = engine.generate("b", regex(pattern, 30, seed=1))
        assert result.finish_reason == "stop" and re.fullmatch(pattern, result.text), result


def test_text_after_a_text_keeps_its_first_space(tmp_path: Path) -> None:
    """The tokenizer puts a space before a text, and takes it away again."""
    with open_engine(byte_fallback_checkpoint(tmp_path)) as engine:
        tokenizer = engine.tokenizer
        the, quick = map(tokenizer.token_to_id, ("▁the", "▁quick"))
        # Also where nothing before it has text: a grammar's word is kept.
        for prompt in ("b", [1]):
            choice = StructuredOutputsParams(choice=[" the", " quick"])
            result = engine.generate(prompt, SamplingParams(structured_outputs=choice, seed=1))
            assert result.text in (" the", " quick")
        assert engine.generate("b", regex("  c", 8, seed=1)).text == "  c"
        says_the = SamplingParams(max_tokens=2, allowed_token_ids=[the])
        assert engine.generate("b", says_the).text == " the the"
        assert engine.generate([1], says_the).text == "the the"
        # Right after an added token a text gets that space, as the next turn of a chat encodes it.
        added = [*tokenizer.encode("b"), 2]
        assert engine.generate(added, says_the).text == "the the"
        spaces = SamplingParams(max_tokens=2, allowed_token_ids=[tokenizer.token_to_id("▁")])
        said = engine.generate(added, spaces)
        assert said.text == " "
        assert tuple(tokenizer.encode_after(said.text, added)) == said.token_ids
        word = StructuredOutputsParams(choice=[" the"])
        assert engine.generate(added, SamplingParams(structured_outputs=word)).text == " the"
        stops = SamplingParams(max_tokens=2, allowed_token_ids=[quick], stop=" quick")
        assert engine.generate("b", stops).token_ids == (quick,)
        parts = engine.generate("bc", says_the).prompt_token_ids
        with engine.session() as session:
            session.append("b")
            session.append("c")
            assert session.token_ids == parts and tokenizer.decode(parts) == "bc"
            assert session.generate(says_the).text == " the the"
            session.append("b")
            assert tokenizer.decode(session.token_ids) == "bc the theb"
        word = engine.submit("b", SamplingParams(bad_words=["c"])).job.processing
        assert word is not None and {ids[-1] for ids in word.values["bad_words"]} == {
            tokenizer.token_to_id("c")
        }


def test_special_tokens_are_hidden_in_each_kind_of_tokenizer() -> None:
    names = ["<unk>", "<s>", "<", "s>", "a", "b", "ab", "end", "s", ">"]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [("<", "s>"), ("a", "b")]
    for model, pieces in (
        (models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"), ["<", "s", ">", "ab"]),
        (models.Unigram([(name, -1.0) for name in names], unk_id=0), ["<", "s>", "ab"]),
        (models.WordLevel(vocabulary, unk_token="<unk>"), ["<unk>\ufffe"]),
    ):
        library = tokenizers.Tokenizer(model)
        library.add_special_tokens(["<unk>", "<s>"])
        library.add_tokens(["end"])
        text, special = _hidden(library.to_str(), [1, 7])
        assert special == {"<unk>": 0, "<s>": 1, "end": 7}
        hidden = tokenizers.Tokenizer.from_str(text)
        assert hidden.get_vocab_size() == len(names)
        assert hidden.encode("<s>ab").tokens == pieces
        assert hidden.id_to_token(7) == "end\ufffe" and hidden.id_to_token(6) == "ab"


# What is refused.

ASKED = StructuredOutputsParams(regex="a+")
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 2}, r"min_tokens=2 contradicts structured_outputs: the grammar and stop"),
    ({"ignore_eos": True}, "ignore_eos=True contradicts structured_outputs"),
    ({"stop_token_ids": [0, 9]}, r"stop_token_ids=\(9,\) contradicts structured_outputs"),
    ({"stop_token_sequences": [[4, 5]]}, r"stop_token_sequences=\(\(4, 5\),\) contradicts"),
]


def schema_of_depth(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "wat"}}, "json='.*' cannot be served: Invalid type: wat"),
    ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, r"minLength \(5\) is greater"),
    ({"json": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
    ({"regex": "ab["}, r"regex='ab\[' cannot be served: (?s:.*)unclosed character class"),
    ({"regex": "(?!a)b"}, "look-around"),
    (
        {"regex": r"[^\s\S]"},
        "cannot be served: no text meets the grammar: a rule or a .ref may lead",
    ),
    ({"grammar": "start: start"}, "cannot be served: no text meets the grammar"),
    ({"json": {"anyOf": [{"$ref": "#"}]}}, "cannot be served: no text meets the grammar"),
    ({"json": {"$ref": "#"}}, r"json='.*' cannot be served: \$ref '#' leads back to the schema"),
    ({"json": {"const": 2**53 + 1}}, "than the constant 9007199254740993; a string could hold it"),
    ({"json": {"enum": ["a", 2**62 + 1]}}, "than the constant 4611686018427387905"),
    (
        {"json": '{"exclusiveMinimum": 10, "exclusiveMaximum": 10.5}'},
        "with exclusiveMinimum 10 and exclusiveMaximum 10.5 llguidance would allow 10",
    ),
    ({"json": {"patternProperties": {"a": {}}, "minProperties": 2}}, "minProperties 2 asks for 2"),
    ({"grammar": 'start: "a" foo'}, 'unknown name: "foo"'),
    ({"grammar": 'start: "x" <wat>'}, "unknown special token: (?s:.*)"),
    ({"regex": "(((((a{50}){50}){50}){50}){50})"}, "too many expressions constructed$"),
    ({"grammar": 'start: "a" start'}, "Too many items"),
    ({"json": schema_of_depth(150)}, "cannot be served: recursion limit exceeded"),
    ({"json": schema_of_depth(300), "disable_additional_properties": True}, "cannot be served: "),
    ({"choice": ["\ud800"]}, "surrogates not allowed"),
    ({"grammar": "nope" * 80}, r"grammar='(nope){49}nop\.\.\. cannot be served"),
]

MADE: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of json, regex, choice, grammar, json_object, not 0$"),
    ({"regex": "a", "choice": ["b"]}, "not 2: regex, choice"),
    ({"json": {1, 2}}, "must be a JSON schema, as a mapping or as text"),
    ({"json": {"a": {1}}}, "is no JSON: "),
    ({"json": "{bad"}, "json='{bad' is no JSON: "),
    ({"json": "[1]"}, "is no JSON schema, which is an object"),
    ({"json": "false"}, "is no JSON schema, which is an object"),
    ({"regex": 3}, "regex=3 must be a string"),
    ({"grammar": b"a"}, "grammar=b'a' must be a string"),
    ({"regex": "a\\"}, "ends with a backslash that escapes nothing"),
    ({"regex": r"\d\\\ "[:-1]}, "ends with a backslash that escapes nothing"),
    ({"json_object": True, "whitespace_pattern": " \\"}, "whitespace_pattern=' .* ends with a"),
    ({"json": schema_of_depth(20_000)}, "json is nested too deep: maximum recursion"),
    ({"json": '{"a":' * 20_000 + "{}" + "}" * 20_000}, r"json='.{50}'\.\.\. is nested too deep: "),
    ({"choice": "yes"}, "choice='yes' must be a list of strings"),
    ({"choice": []}, r"choice=\[\] must hold a string at least"),
    ({"choice": ["a", ""]}, "must be strings that are not empty"),
    ({"choice": [1]}, "must be strings that are not empty"),
    ({"json_object": False}, "json_object=False must be True, or None"),
    ({"regex": "a", "disable_any_whitespace": True}, "is for json and json_object, not for regex"),
    ({"json_object": True, "whitespace_pattern": 4}, "whitespace_pattern=4 must be a string"),
    ({"json_object": True, "disable_any_whitespace": 1}, "=1 must be True or False"),
    (
        {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
        "whitespace_pattern=' ' contradicts disable_any_whitespace=True",
    ),
]


def test_what_contradicts_a_grammar_is_refused() -> None:
    with open_engine(device="cpu") as engine:
        for options, message in REFUSED:
            with pytest.raises(ValueError, match=message):
                engine.submit("x", SamplingParams(structured_outputs=ASKED, **options))
        # These are end-of-sequence tokens anyway.
        params = SamplingParams(structured_outputs=ASKED, stop_token_ids=[0])
        assert engine.submit("x", params).job.stops.ids == (0,)
        for options, message in WRONG:
            params = SamplingParams(structured_outputs=StructuredOutputsParams(**options))
            with pytest.raises(ValueError, match=message) as raised:
                engine.submit("x", params)
            assert "<state>" not in str(raised.value)
        params = SamplingParams(structured_outputs=ASKED, allowed_token_ids=[5])
        with pytest.raises(ValueError, match="with allowed_token_ids beside it: no token that the"):
            engine.submit("x", params)
        run(engine)
        assert_idle(engine)
    with (
        open_speculating(MTP(k=3), device="cpu", forced_acceptance=1) as engine,
        pytest.raises(ValueError, match="forced_acceptance=1 takes drafts that a grammar forbids"),
    ):
        engine.submit("x", SamplingParams(structured_outputs=ASKED))


@pytest.mark.parametrize(("options", "message"), MADE)
def test_what_is_no_structured_output_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**options)


def test_parameters_are_values() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    asked = StructuredOutputsParams(json=schema)
    schema["properties"] = {}
    assert asked.schema == {"type": "object", "properties": {"b": {}, "a": {}}}
    assert list(asked.schema["properties"]) == ["b", "a"]
    assert asked == dataclasses.replace(asked) and hash(asked)
    assert hash(SamplingParams(structured_outputs=asked))
    assert StructuredOutputsParams(choice=["a"]).choice == ("a",)
    with pytest.raises(ValueError, match="structured_outputs='a' must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="a")  # type: ignore[arg-type]


def test_additional_properties_are_closed_where_nothing_is_said_of_them() -> None:
    inner = {"properties": {"x": {}}, "additionalProperties": True}
    schema = {"properties": {"properties": {"properties": {"a": {}}}, "b": inner}, "anyOf": [inner]}
    asked = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert asked.schema["additionalProperties"] is False
    assert asked.schema["properties"]["b"] == inner == asked.schema["anyOf"][0]
    assert asked.schema["properties"]["properties"]["additionalProperties"] is False


def test_what_an_engine_lacks_for_a_grammar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    params = SamplingParams(structured_outputs=ASKED)

    def without(name: str, **config: Any) -> Engine:
        from graphengine.demo import checkpoint_path

        folder = tmp_path / name
        folder.mkdir()
        for file in checkpoint_path().iterdir():
            if file.name not in (name, "generation_config.json"):
                (folder / file.name).symlink_to(file)
        return open_engine(folder, device="cpu", **config)

    with (
        without("tokenizer.json") as engine,
        pytest.raises(ValueError, match=r"need a tokenizer; the checkpoint has no tokenizer\.json"),
    ):
        engine.submit([1], params)
    with open_engine(device="cpu") as engine:
        engine.core.intake._grammars._eos_ids = []
        with pytest.raises(ValueError, match="need an end-of-sequence token; the checkpoint names"):
            engine.submit("x", params)
    with open_engine(device="cpu") as engine:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(
            ValueError, match=r"need llguidance: pip install '\.\[guided\]' in the checkout"
        ):
            engine.submit("x", params)
        monkeypatch.undo()
        engine.core.intake._grammars._vocab_size = 100
        with pytest.raises(ValueError, match="llguidance cannot use the tokenizer: vocab size too"):
            engine.submit("x", params)
