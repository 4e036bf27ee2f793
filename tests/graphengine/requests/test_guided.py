"""Requests with a grammar: what they say, their masks, and what their neighbours notice of them."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.guided import CHOICE, SETTINGS, WORDS, schema
from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, greedy, open_engine, run
from engines.speculation import (
    DRAFTING,
    Outcome,
    open_plain,
    open_speculating,
    outcome,
    run_with,
)
from extent import extent
from graphengine import Engine, Request, SamplingParams, StructuredOutputsParams
from graphengine.buckets import StaticBuffers
from graphengine.demo import checkpoint_path
from graphengine.host.step_plan import Plan
from graphengine.requests.processing import MASKS
from graphengine.speculative import MTP, GateOptions, NGram, Speculative

llguidance = pytest.importorskip("llguidance")

SCHEMA = schema(["name", "size", "tags"])
NESTED = 'start: "(" start ")" | /[0-9]{1,4}/'
GUIDED = {
    "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex=WORDS),
    "choice": StructuredOutputsParams(choice=[*CHOICE]),
    "grammar": StructuredOutputsParams(grammar=NESTED),
}
DRAFTERS = {"ngram": NGram(k=3), "mtp": MTP(k=3), "vanilla": MTP(k=1, style="vanilla")}


def ask(asked: StructuredOutputsParams, max_tokens: int = 60, **options: Any) -> SamplingParams:
    options = options or {"temperature": 0.0}
    return SamplingParams(max_tokens=max_tokens, structured_outputs=asked, **options)


def regex(pattern: str, max_tokens: int = 60, **options: Any) -> SamplingParams:
    return ask(StructuredOutputsParams(regex=pattern), max_tokens, **options)


def is_right(kind: str, text: str) -> bool:
    if kind == "json":
        found = json.loads(text)
        return list(found) == ["name", "size", "tags"] and -5 <= found["size"] <= 99
    if kind == "regex":
        return re.fullmatch(WORDS, text) is not None
    if kind == "choice":
        return text in CHOICE
    return re.fullmatch(r"\(*[0-9]{1,4}\)*", text) is not None and text.count("(") == text.count(
        ")"
    )


# Each setting with some kinds, and each kind with some settings.
ASKED = [
    (setting, kind)
    for setting in range(len(SETTINGS))
    for at, kind in enumerate(GUIDED)
    if extent((setting + at) % 2 == 0, True)
]


def jobs() -> list[tuple[str, SamplingParams]]:
    prompts = (PROMPT, OTHER, LONG, PROMPT)
    return [(prompts[setting], ask(GUIDED[kind], **SETTINGS[setting])) for setting, kind in ASKED]


def served(engine: Engine, *, together: bool) -> list[tuple[Outcome, Any]]:
    if together:
        requests: list[Any] = [engine.submit(*job) for job in jobs()]
        run_with(engine)
    else:
        requests = [engine.generate(*job) for job in jobs()]
    assert_idle(engine)
    return [(outcome(each), each.logprobs and tuple(each.logprobs)) for each in requests]


@pytest.fixture(scope="module")
def alone() -> Callable[[str], list[tuple[Outcome, Any]]]:
    """What each of `jobs` says by itself, without drafts, on a device."""
    known: dict[str, list[tuple[Outcome, Any]]] = {}

    def results(device: str) -> list[tuple[Outcome, Any]]:
        if device not in known:
            with open_plain(device=device) as engine:
                known[device] = served(engine, together=False)
        return known[device]

    return results


Alone = Callable[[str], list[tuple[Outcome, Any]]]


def test_outputs_match_their_grammars(alone: Alone, device: str) -> None:
    results = alone(device)
    for (_, kind), ((_, text, reason), _) in zip(ASKED, results, strict=True):
        assert reason == "stop" and is_right(kind, text), f"{kind}: {text!r}"
    assert len({text for (_, text, _), _ in results}) > len(results) / 2


def test_together_they_say_the_same(alone: Alone, device: str) -> None:
    with open_plain(device=device) as engine:
        assert served(engine, together=True) == alone(device)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_nothing(alone: Alone, device: str, name: str) -> None:
    with open_speculating(DRAFTERS[name], device=device) as engine:
        assert served(engine, together=True) == alone(device)
        assert engine.acceptance.accepted > 0
        # The device emits nothing after the end of an output.
        assert engine.counters["discarded_tokens"] == 0


def test_the_gate_changes_nothing(alone: Alone, device: str) -> None:
    gate = GateOptions(window=3, off_below=1.0, on_above=1.0, probe_every=4)
    with open_speculating(NGram(k=3), device=device, gate=gate) as engine:
        assert served(engine, together=True) == alone(device)
        counters = engine.counters
        assert counters["gate/off"] and counters["gate/steps/0"] and counters["gate/steps/3"]


def test_a_model_that_drafts_changes_nothing(device: str) -> None:
    params = ask(GUIDED["json"], seed=3)
    with open_plain(device=device) as engine:
        expected = engine.generate(PROMPT, params)
    with open_speculating(DRAFTING["model"], device=device) as engine:
        # It is the target itself, but knows nothing of the grammar.
        assert engine.generate(PROMPT, params).token_ids == expected.token_ids
        assert engine.acceptance.accepted > 0


@pytest.mark.parametrize("speculative", [None, NGram(k=3)], ids=["plain", "ngram"])
def test_pauses_change_nothing(alone: Alone, device: str, speculative: Speculative | None) -> None:
    pool = {"kv_blocks": 12, "swap_blocks": 64, "device": device}
    engine = open_plain(**pool) if speculative is None else open_speculating(speculative, **pool)
    requests = []
    with engine:
        for index, job in enumerate(jobs()):
            if index % 2 == 0:
                # It takes the pool from those after it.
                engine.submit(OTHER, greedy(60, ignore_eos=True))
            requests.append(engine.submit(*job))
        run_with(engine)
        assert [outcome(request) for request in requests] == [said for said, _ in alone(device)]
        assert engine.counters["pauses"] >= 1
        assert any(request.pauses for request in requests)
        assert_idle(engine)


# Where an output ends.


@pytest.mark.parametrize("speculative", [None, MTP(k=3)], ids=["plain", "mtp"])
def test_an_output_ends_where_nothing_can_follow(
    device: str, speculative: Speculative | None
) -> None:
    with open_engine(device=device, speculative=speculative, row_family="dot") as engine:
        eos = engine.eos_ids
        done = engine.generate(PROMPT, regex("return"))
        assert done.text == "return" and done.finish_reason == "stop" and done.stop_reason is None
        assert done.token_ids[-1] not in eos
        # It is whole with the last token that it may have.
        count = len(done.token_ids)
        assert engine.generate(PROMPT, regex("return", count)).finish_reason == "stop"
        cut = engine.generate(PROMPT, regex("(return ){40}", 5))
        assert cut.finish_reason == "length" and len(cut.token_ids) == 5
        # Where it may go on, an end-of-sequence token ends it.
        words, likely = "( and| or| not)*", {eos[0]: 6.0}
        ended = [
            engine.generate(PROMPT, regex(words, 9, seed=seed, logit_bias=likely))
            for seed in range(8)
        ]
        assert all(
            re.fullmatch(words, result.text) for result in ended if result.finish_reason == "stop"
        )
        assert all(
            (result.token_ids[-1] in eos) == (result.finish_reason == "stop") for result in ended
        )
        assert any(result.finish_reason == "stop" for result in ended)
        shown = engine.generate(
            PROMPT,
            regex(
                "a?",
                temperature=0.0,
                logit_bias={eos[0]: 50.0},
                skip_special_tokens=False,
                include_stop_str_in_output=True,
            ),
        )
        assert shown.token_ids == (eos[0],) and shown.text == engine.tokenizer.id_to_token(eos[0])


def test_patterns_of_many_bytes(device: str) -> None:
    pattern = "[é日]{2,4}(😀|ß)!"
    with open_engine(device=device) as engine:
        for seed in range(6):
            result = engine.generate(PROMPT, regex(pattern, seed=seed))
            assert re.fullmatch(pattern, result.text), result.text


def test_json_options(device: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}
    with open_engine(device=device) as engine:

        def text(bias: int = 0, **options: Any) -> str:
            asked = StructuredOutputsParams(**options)
            params = ask(asked, max_tokens=40, seed=3, logit_bias={bias: 50.0} if bias else None)
            result: str = engine.generate('{"a": 1}\n', params).text
            return result

        closed = {"disable_additional_properties": True, "disable_any_whitespace": True}
        assert json.loads(text(json=schema, **closed)).keys() <= {"a"}
        required = schema | {"required": ["a"], "additionalProperties": False}
        (bars,) = engine.tokenizer.encode("__", add_special_tokens=False)
        spaced = text(bars, json=json.dumps(required), whitespace_pattern="__")
        assert "__" in spaced and json.loads(spaced.replace("__", "")).keys() == {"a"}
        assert text(json_object=True, disable_any_whitespace=True).startswith("{")


# What text may hold.

ODD = "".join(map(chr, [*range(0x110), 0x2028, 0xFEFF, 0xFFFF, 0x1F600, 0x10FFFF]))


def says(engine: Engine, **asked: Any) -> Any:
    """What a request says at a temperature where each of the allowed tokens comes up."""
    return engine.generate(
        PROMPT, ask(StructuredOutputsParams(**asked), 1000, temperature=50.0, seed=1)
    )


def test_choices_may_be_many_and_of_any_characters(device: str) -> None:
    with open_engine(device=device, max_seq_len=1024) as engine:
        many = [f"c{index}" for index in range(3000)]
        texts = {engine.generate(PROMPT, ask(StructuredOutputsParams(choice=many), seed=seed)).text
                 for seed in range(5)}  # fmt: skip
        assert texts <= {*many} and len(texts) > 2
        for choice in (ODD, "".join(f"{a}{b}" for a in '\\"/|\n-' for b in "\\]})+#/d")):
            result = says(engine, choice=[choice])
            assert result.text == choice and result.finish_reason == "stop"
        # The shorter one of two is whole as well.
        (eos, *_) = engine.eos_ids
        two = ask(
            StructuredOutputsParams(choice=["yes", "yes\x01"]), seed=1, logit_bias={eos: 50.0}
        )
        assert engine.generate(PROMPT, two).text == "yes"


@pytest.mark.parametrize("speculative", [None, NGram(k=3)], ids=["plain", "ngram"])
def test_names_of_special_tokens_are_text(device: str, speculative: Speculative | None) -> None:
    with open_engine(device=device, speculative=speculative) as engine:
        (eos,) = engine.eos_ids
        name = engine.tokenizer.id_to_token(eos)
        const = f"a{name}b"
        for asked, text in (
            ({"choice": [name]}, name),
            ({"choice": ["x" + name, "x<|end"]}, None),
            ({"regex": re.escape(const)}, const),
            ({"json": {"const": const}}, json.dumps(const)),
            ({"grammar": f'start: "{const}" // {name}'}, const),
            ({"grammar": f"start: %json {json.dumps({'const': const})}"}, json.dumps(const)),
        ):
            result = says(engine, **asked)
            assert result.finish_reason == "stop" and eos not in result.token_ids[:-1]
            assert result.text in ([text] if text else ["x" + name, "x<|end"]), asked
        # A Lark grammar may still name the token itself.
        for grammar in (f'start: "x/" {name}', f'start: "x" /\\// <[{eos}]>'):
            result = says(engine, grammar=grammar)
            assert result.text == "x/" and result.finish_reason == "stop"
            assert result.token_ids[-1] == eos


@pytest.mark.parametrize("speculative", extent([NGram(k=3)], [None, NGram(k=3)]), ids=str)
def test_end_of_sequence_ids_that_are_text(
    device: str, tmp_path: Path, speculative: Speculative | None
) -> None:
    for file in checkpoint_path().iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    text = (tmp_path / "tokenizer.json").read_text()
    ends = [json.loads(text)["model"]["vocab"][token] for token in "ab"]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, *ends]}))
    with open_engine(tmp_path, device=device, speculative=speculative) as engine:
        assert engine.eos_ids == (0, *ends)
        with pytest.raises(ValueError, match="no token that the grammar allows"):
            says(engine, choice=["a"])
        # Of "ab" there is a token.
        assert says(engine, choice=["ab"]).text == "ab"
        closed = set()
        patterns = ("c([abc]x?)*", "x[abc]{2,5}", "(ab|ba|c)+")
        for seed in range(12):
            asked = [regex(pattern, seed=seed, temperature=3.0) for pattern in patterns]
            results = engine.generate([PROMPT] * len(asked), asked)
            for pattern, result in zip(patterns, results, strict=True):
                assert result.finish_reason != "error", result
                if result.finish_reason == "stop":
                    assert re.fullmatch(pattern, result.text), result
                    closed.add(result.token_ids[-1])
                assert not {0, *ends} & set(result.token_ids[:-1])
        assert closed >= {*ends}


def test_bans_beside_a_grammar_are_errors_of_it(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_engine(device=device) as engine:
        tokens = {token for word in ("z", "q") for token in engine.tokenizer.encode(word)}
        for options, named in (
            ({"bad_words": ["z", "q"]}, "bad_words"),
            ({"logit_bias": dict.fromkeys(tokens, -math.inf)}, "logit_bias"),
        ):
            errors = engine.counters["guided/errors"]
            with caplog.at_level(logging.ERROR, logger="graphengine"):
                result = engine.generate(PROMPT, regex("z|q", seed=1, **options))
            assert result.finish_reason == "error" and not result.token_ids
            assert engine.counters["guided/errors"] == errors + 1
            assert f"where structured_outputs and {named} allow a token" in caplog.text
        free = ask(GUIDED["choice"], seed=1, bad_words=["yes"], logit_bias={5: 1.0})
        assert engine.generate(PROMPT, free).finish_reason == "stop"
        assert engine.counters["guided/errors"] == 2
        assert_idle(engine)


# Masks.


def synchronize(engine: Engine) -> None:
    if engine.config.device != "cpu":
        torch.cuda.synchronize()


class MaskWatch:
    """Compares the masks that a step is launched with with llguidance's own.

    They are read from the device's table, and so are the drafts, once `load` has run.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.checked = self.followed = self.plain = 0
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        self.tokenizer = llguidance.LLTokenizer(
            tokenizer.to_json(),
            n_vocab=engine.model.config.vocab_size,
            eos_token=list(engine.eos_ids),
        )
        self.words = engine.runtime.buffers["allowed_bits"].shape[2]
        load = engine.core.load

        def watched(plan: Plan) -> None:
            drafts = engine.core.needs.length > 0 and not engine.core.needs.host_drafts
            # This is another stream than the engine's.
            synchronize(engine)
            table = engine.runtime.buffers["draft_tokens"].tolist() if drafts else None
            given = {request: request.job.drafts.token_ids for request in plan.rows}
            load(plan)
            synchronize(engine)
            rows = list(plan.rows)
            if plan.prefill is not None and plan.prefill.final:
                rows.append(plan.prefill.request)
            masks = engine.runtime.buffers["allowed_bits"].cpu().numpy()
            for request in rows:
                slot = request.job.placed.slot
                following = given.get(request, ()) if table is None else table[slot]
                following = following[: plan.width - 1] if request in given else ()
                self.check(request, masks[slot], following)

        monkeypatch.setattr(engine.core, "load", watched)

    def check(self, request: Request, masks_WV: Any, drafts: Sequence[int]) -> None:
        if request.job.guide is None:
            assert (masks_WV == -1).all(), "a neighbour's masks are all ones"
            self.plain += 1
            return
        matcher = llguidance.LLMatcher(self.tokenizer, request.job.guide._grammar)
        assert matcher.consume_tokens(request.token_ids)
        allowed = np.full(self.words, -1, dtype=np.int32)
        ids = request.params.allowed_token_ids
        if ids is not None:
            allowed[:] = 0
            for token in ids:
                allowed[token // 32] |= np.uint32(1 << token % 32).view(np.int32)
        for index in range(1 + len(drafts)):
            own = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: self.words]
            assert (masks_WV[index] == (own & allowed)).all(), f"{request}: mask {index}"
            self.checked += 1
            self.followed += index > 0
            forbidden = index == len(drafts) or drafts[index] < 0
            if forbidden or not own[drafts[index] // 32] >> drafts[index] % 32 & 1:
                break
            assert matcher.consume_token(drafts[index])
            if matcher.is_stopped():
                assert not masks_WV[index + 1].any(), "nothing comes after the end"
                break
        assert not matcher.is_error()


@pytest.mark.parametrize("name", extent(("plain", "ngram", "mtp"), ("plain", *DRAFTERS)))
def test_masks_are_llguidances(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculative = DRAFTERS.get(name)
    engine = (
        open_plain(device=device)
        if speculative is None
        else open_speculating(speculative, device=device)
    )
    with engine:
        watch = MaskWatch(engine, monkeypatch)
        for asked in GUIDED.values():
            engine.submit(PROMPT, ask(asked, seed=2))
            engine.submit(OTHER, greedy(12, ignore_eos=True, logprobs=0))
            engine.submit(PROMPT, ask(asked, allowed_token_ids=range(1, 4096), seed=4))
        run_with(engine)
        assert watch.checked > 50 and watch.plain > 20
        assert (watch.followed > 5) == (speculative is not None)
        # A slot forgets the masks of its last request.
        engine.generate(PROMPT, greedy(1, logprobs=0))
        run(engine)
        assert bool((engine.runtime.buffers["allowed_bits"] == -1).all())


def test_masks_keep_no_request_alive() -> None:
    with open_engine(device="cpu") as engine:
        request = engine.submit(PROMPT, ask(GUIDED["choice"]))
        run(engine)
        assert request.finished
        assert not [each for each in engine.runtime.masks._held if isinstance(each, Request)]


def test_a_guided_step_copies_masks_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lookahead: with it, a row that sits out in turn changes the lanes of the others."""
    with open_engine(device=device, max_batch=4, lookahead=0) as engine:
        (field,) = [field for field in engine.runtime.buffers.fields if field.group == MASKS]
        assert field.name == "allowed_bits" and field.shape == (4, 1, 128)
        loaded: list[dict[str, Any]] = []
        load = StaticBuffers.load

        def watched(self: StaticBuffers, updates: dict[str, Any], **options: Any) -> Any:
            loaded.append(updates)
            return load(self, updates, **options)

        monkeypatch.setattr(StaticBuffers, "load", watched)
        engine.submit(PROMPT, ask(GUIDED["regex"]))
        engine.submit(PROMPT, greedy(40, ignore_eos=True))
        run(engine)
    steady = [updates for updates in loaded if updates.keys() == {"allowed_bits"}]
    assert len(steady) > 5
    assert all(len(updates["allowed_bits"].values) == 1 for updates in steady)


@pytest.mark.parametrize("speculative", [None, NGram(k=3)], ids=["plain", "ngram"])
def test_a_stop_string_may_end_it_first(device: str, speculative: Speculative | None) -> None:
    """Where the grammar would go on; where it ends first, there is no stop reason."""
    form = StructuredOutputsParams(regex=r"[a-c]{40}")
    with open_engine(device=device, speculative=speculative, row_family="dot") as engine:
        whole = engine.generate(PROMPT, greedy(structured_outputs=form, max_tokens=60))
        assert len(whole.text) == 40 and whole.stop_reason is None
        stop = whole.text[6:9]
        at = whole.text.index(stop)
        for inside in (False, True):
            result = engine.generate(
                PROMPT,
                greedy(
                    structured_outputs=form,
                    stop=["zzz", stop],
                    max_tokens=60,
                    include_stop_str_in_output=inside,
                ),
            )
            assert result.text == whole.text[: at + len(stop) * inside]
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        ended = engine.generate(PROMPT, greedy(structured_outputs=form, stop="zzz", max_tokens=60))
        assert ended.token_ids == whole.token_ids and ended.stop_reason is None
        assert_idle(engine)
