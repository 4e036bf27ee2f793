"""Requests whose grammars the device follows say what they say with the host's masks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engines.guided import CHOICE, SETTINGS, WORDS, schema
from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, greedy, open_engine
from engines.speculation import (
    BEST,
    TREE,
    Outcome,
    open_plain,
    open_speculating,
    outcome,
    run_with,
)
from extent import extent
from graphengine import Engine, Request, SamplingParams, StructuredOutputsParams
from graphengine.automata.byte_automaton import byte_automaton
from graphengine.automata.regex_syntax import parse_regex
from graphengine.automata.token_automaton import TokenAutomaton, token_automaton
from graphengine.automata.vocabulary import make_vocabulary
from graphengine.config import EngineConfig
from graphengine.requests.grammar_pool import DeviceGuide, GrammarPool
from graphengine.speculative import MTP, NGram, RelaxedAcceptance, Speculative, UserProvided

llguidance = pytest.importorskip("llguidance")

POOL = {"grammar_pool_mib": 1}
SCHEMA = schema(["name", "size"])
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json": SCHEMA},
    {"regex": WORDS},
    {"choice": [*CHOICE]},
)
DRAFTERS: dict[str, Speculative | None] = {
    "plain": None,
    "ngram": NGram(k=3),
    "mtp": MTP(k=3),
    "tree": MTP(tree=TREE),
    "dynamic": MTP(tree=BEST),
}


def guided(asked: dict[str, Any], max_tokens: int = 40, **options: Any) -> SamplingParams:
    params = StructuredOutputsParams(**asked)
    return SamplingParams(max_tokens=max_tokens, structured_outputs=params, **options)


def jobs() -> list[tuple[str, SamplingParams]]:
    prompts = (PROMPT, OTHER, LONG, PROMPT)
    return [
        (prompts[at], guided(asked, **SETTINGS[at]))
        for at in range(len(SETTINGS))
        for number, asked in enumerate(GRAMMARS)
        if extent(at == number, True)
    ]


def follow_on_host(engine: Engine) -> None:
    """Have the host make the masks of every request from now on."""
    engine.core.intake._grammar_pool = None


def served(engine: Engine, *, where: str) -> list[tuple[Outcome, Any]]:
    requests = [engine.submit(*job) for job in jobs()]
    assert {request.grammar for request in requests} == {where}
    run_with(engine)
    assert_idle(engine)
    return [(outcome(each), each.logprobs and tuple(each.logprobs)) for each in requests]


@pytest.fixture(scope="module")
def by_host() -> Callable[[str], list[tuple[Outcome, Any]]]:
    """What each of `jobs` says with the host's masks, without drafts, on a device."""
    known: dict[str, list[tuple[Outcome, Any]]] = {}

    def results(device: str) -> list[tuple[Outcome, Any]]:
        if device not in known:
            with open_plain(device=device, **POOL) as engine:
                follow_on_host(engine)
                known[device] = served(engine, where="host")
                assert engine.counters["guided/steps"] > 0
        return known[device]

    return results


ByHost = Callable[[str], list[tuple[Outcome, Any]]]


@pytest.mark.parametrize(
    ("name", "lookahead"),
    extent(
        [("plain", 0), ("plain", 1), ("mtp", 1), ("tree", 1)],
        [(name, lookahead) for name in DRAFTERS for lookahead in (0, 1)],
    ),
)
def test_tokens_are_those_of_the_hosts_masks(
    by_host: ByHost, device: str, name: str, lookahead: int
) -> None:
    options = {"device": device, "lookahead": lookahead, **POOL}
    drafter = DRAFTERS[name]
    engine = open_plain(**options) if drafter is None else open_speculating(drafter, **options)
    with engine:
        found, wanted = served(engine, where="device"), by_host(device)
        if name in ("tree", "dynamic") and device == "cuda":
            # Trees cut the keys of attention otherwise: log-probabilities have other bits.
            found, wanted = ([(said, None) for said, _ in each] for each in (found, wanted))
        assert found == wanted
        # The device emits nothing after the end of an output, and the host waits for nothing.
        assert engine.counters["discarded_tokens"] == 0
        assert engine.counters["guided/steps"] == 0
        assert engine.counters["guided/device"] == len(jobs())
        if drafter is not None:
            assert engine.acceptance.accepted > 0


def test_several_steps_a_launch_change_nothing(by_host: ByHost, device: str) -> None:
    """Outputs end inside launches, and the host learns of it later."""
    options = {"device": device, "lookahead": 2, "steps_per_launch": 4, **POOL}
    with open_plain(**options) as engine:
        assert served(engine, where="device") == by_host(device)
        assert engine.counters["discarded_tokens"] == 0
        assert engine.counters["guided/steps"] == 0
        assert engine.scheduler.lookahead == 2


def test_pauses_change_nothing(by_host: ByHost, device: str) -> None:
    with open_plain(device=device, kv_blocks=12, swap_blocks=64, **POOL) as engine:
        requests = []
        for index, job in enumerate(jobs()):
            if index % 5 == 0:
                # It takes the pool from those after it.
                engine.submit(OTHER, greedy(60, ignore_eos=True))
            requests.append(engine.submit(*job))
        run_with(engine)
        assert [outcome(request) for request in requests] == [said for said, _ in by_host(device)]
        assert engine.counters["pauses"] >= 1 and any(request.pauses for request in requests)
        assert {request.grammar for request in requests} == {"device"}
        assert_idle(engine)


def test_relaxed_acceptance_takes_no_forbidden_draft(device: str) -> None:
    # Every token begins a thinking phase, in which any draft among the best 4000 would do.
    relaxed = RelaxedAcceptance(
        topk=4000, delta=1.0, begin_token_ids=range(1, 4096), end_token_ids=[0]
    )
    with open_speculating(MTP(k=3), device=device, relaxed_acceptance=relaxed, **POOL) as engine:
        params = guided({"regex": WORDS}, temperature=0.0)
        requests = [engine.submit(prompt, params) for prompt in (PROMPT, OTHER, LONG)]
        run_with(engine)
        for request in requests:
            assert request.grammar == "device" and request.finish_reason == "stop"
            assert byte_automaton_accepts(WORDS, request.text), request.text


def byte_automaton_accepts(pattern: str, text: str) -> bool:
    automaton = byte_automaton(parse_regex(pattern, lambda name: ()), 1000)
    state = automaton.follow(0, text.encode())
    return state >= 0 and bool(automaton.accepts[state])


def test_a_callers_drafts_are_verified(device: str) -> None:
    """Drafts of a grammar's only text, with one that it forbids, and ids that are no tokens."""
    with open_speculating(UserProvided(k=3), device=device, **POOL) as engine:
        text = "return value"
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        request = engine.submit(PROMPT, guided({"choice": [text]}, temperature=0.0))

        def drafts(each: Request) -> list[int]:
            said = len(each.token_ids)
            return [*ids[said : said + 1], 5, 4095][:3]

        run_with(engine, drafts)
        assert request.text == text and request.grammar == "device"
        assert request.finish_reason == "stop"


# Lookahead.


def test_lookahead_is_kept(device: str) -> None:
    with open_engine(device=device, max_batch=3, lookahead=1, **POOL) as engine:
        plain = engine.submit(PROMPT, greedy(40, ignore_eos=True))
        request = engine.submit(LONG, guided({"regex": r"[a-z ]{40}"}, seed=1))
        seen = []
        while not request.finished:
            engine.step()
            seen.append((len(engine.core.in_flight), engine.scheduler.lookahead))
        assert request.grammar == "device" and request.grammar_reason == ""
        assert seen[:-1].count((1, 1)) >= len(seen) - 3 and len(seen) > 5
        assert engine.scheduler.guided == 0
        # One whose grammar the host follows costs the others nothing: it sits out.
        slow = engine.submit(PROMPT, guided({"grammar": "start: /[a-z ]{40}/"}, seed=1))
        assert slow.grammar == "host" and slow.grammar_reason == "it is context-free"
        for _ in range(4):
            engine.step()
            assert engine.scheduler.lookahead == 1
        assert engine.counters["guided/sat_out"] > 0 and not plain.finished
        run_with(engine)
        assert plain.finish_reason == "length" and engine.scheduler.lookahead == 1


def test_neighbours_say_what_they_say_alone(device: str) -> None:
    with open_plain(device=device, lookahead=1, **POOL) as engine:
        alone = engine.generate(PROMPT, greedy(30)).token_ids
        request = engine.submit(PROMPT, greedy(30))
        others = [engine.submit(OTHER, guided(asked, 20, seed=3)) for asked in GRAMMARS[:2]]
        run_with(engine)
        assert tuple(request.token_ids) == alone
        assert {other.grammar for other in others} == {"device"}


# Who follows a grammar.


def test_the_choice_is_visible(device: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = guided({"regex": "a+"}, 3)
    with open_engine(device=device) as engine:
        request = engine.submit(PROMPT, plain)
        assert request.grammar == "host"
        assert request.grammar_reason == "the engine has no grammar_pool_mib"
        assert engine.submit(PROMPT, greedy(1)).grammar is None
        run_with(engine)
    with open_engine(device=device, **POOL) as engine, caplog.at_level(logging.INFO):
        cases = {
            "it is context-free": guided({"grammar": 'start: "a"+'}, 3),
            "there are allowed_token_ids beside it": guided(
                {"regex": "[a-z]+"}, 3, allowed_token_ids=range(3000)
            ),
            "its regular expression has a lazy quantifier": guided({"regex": "a+?b"}, 3),
        }
        for reason, params in cases.items():
            request = engine.submit(PROMPT, params)
            assert (request.grammar, request.grammar_reason) == ("host", reason)
            log = f"request {request.id}: the host follows its grammar: {reason}"
            assert log in caplog.messages
        assert engine.counters["guided/host"] == len(cases)
        run_with(engine)
        assert engine.counters["guided/steps"] > 0
        assert_idle(engine)


def test_a_full_pool_leaves_grammars_to_the_host(device: str) -> None:
    with open_engine(device=device, max_batch=4, max_seq_len=128, **POOL) as engine:
        # Each of them takes more than half of the pool.
        large = [guided({"regex": rf"{start}\w{{1,4}}"}, 8, seed=1) for start in "abc"]
        first = engine.submit(PROMPT, large[0])
        same = engine.submit(PROMPT, large[0])
        second = engine.submit(PROMPT, large[1])
        small = engine.submit(PROMPT, guided({"regex": "ab"}))
        assert [each.grammar for each in (first, same, second, small)] == [
            "device", "device", "host", "device",
        ]  # fmt: skip
        assert "bytes, and" in second.grammar_reason and "of the pool's 1048576 are in use" in (
            second.grammar_reason
        )
        run_with(engine)
        # Without users they make room.
        again = engine.submit(PROMPT, large[1])
        assert again.grammar == "device"
        run_with(engine)
        assert outcome(again) == outcome(second)
        assert_idle(engine)


def test_what_ends_gives_its_place_back(device: str) -> None:
    with open_engine(device=device, kv_blocks=8, max_seq_len=128, **POOL) as engine:
        pool = engine.core.intake._grammar_pool
        assert pool is not None and pool.used_words == 0
        params = guided({"regex": r"[a-z]{90}"}, seed=1)
        requests = [engine.submit(PROMPT, params) for _ in range(3)]
        assert pool.used_words > 0
        engine.step()
        requests[0].cancel()
        requests[2].cancel()
        late = engine.submit(PROMPT, params, deadline_s=1e-9)
        run_with(engine)
        assert [each.finish_reason for each in (*requests, late)] == [
            "cancelled", "stop", "cancelled", "deadline",
        ]  # fmt: skip
        assert pool.used_words == 0
        # One that cannot be queued takes nothing.
        with pytest.raises(ValueError, match="KV blocks"):
            engine.submit(LONG * 2, guided({"regex": r"[a-z]{90}"}, 120))
        assert pool.used_words == 0


def test_a_failed_copy_to_the_pool_queues_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(device=device, **POOL) as engine:
        pool = engine.core.intake._grammar_pool
        assert pool is not None

        def fail(_: TokenAutomaton) -> None:
            raise RuntimeError("the copy failed")

        with monkeypatch.context() as patch:
            patch.setattr(pool, "_new", fail)
            with pytest.raises(RuntimeError, match="the copy failed"):
                engine.submit(PROMPT, guided({"regex": "ab"}))
        assert not engine.busy and pool.used_words == 0
        request = engine.submit(PROMPT, guided({"regex": "ab"}))
        run_with(engine)
        assert request.text == "ab" and request.grammar == "device"
        assert_idle(engine)


def test_bans_that_leave_nothing_are_an_error(device: str) -> None:
    with open_engine(device=device, **POOL) as engine:
        (token,) = engine.tokenizer.encode("a", add_special_tokens=False)
        params = guided({"regex": "a"}, logit_bias={token: -float("inf")})
        request = engine.submit(PROMPT, params)
        run_with(engine)
        assert request.grammar == "device" and request.finish_reason == "error"
        assert engine.counters["guided/errors"] == 1
        assert_idle(engine)


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="grammar_pool_mib=4 is for an engine of one rank, not"):
        EngineConfig(device="cpu", tensor_parallel=2, grammar_pool_mib=4)
    with pytest.raises(ValueError, match="grammar_pool_mib=4097"):
        EngineConfig(device="cpu", grammar_pool_mib=4097)


def test_the_budget_has_a_line_for_automata() -> None:
    with open_engine(device="cpu", **POOL) as engine:
        lines = {line.name: line.bytes for line in engine.core.memory.budget.lines}
        assert lines["automata of grammars"] == 2**20
        assert engine.core.runtime.buffers["grammar_tables"].nbytes == 2**20
    with open_engine(device="cpu") as engine:
        assert "automata of grammars" not in engine.core.memory.budget.table()


# The pool alone.


def automaton(pattern: str) -> TokenAutomaton:
    vocabulary = make_vocabulary([bytes([byte]) for byte in range(97, 105)] + [b""], [8])
    found = byte_automaton(parse_regex(pattern, lambda name: ()), 100)
    return token_automaton(found, vocabulary, max_steps=10**6, max_bytes=10**6)


def test_a_pool_has_regions_for_those_that_use_them() -> None:
    tables = torch.zeros(90, dtype=torch.int32)
    pool = GrammarPool(tables, None)
    short, long = automaton("ab"), automaton("abcdefgh")
    first = pool.take(b"1", short)
    assert first == 0 and pool.words == 90
    words = pool.used_words
    assert 20 < words < 40
    held = tables[:words].clone()
    assert pool.take(b"1", short) == 0 and pool.used_words == words
    assert pool.take(b"2", short) == words
    # No room: two are in use.
    assert pool.take(b"3", long) is None
    pool.give_back(b"1")
    assert pool.take(b"3", long) is None
    pool.give_back(b"1")
    pool.give_back(b"2")
    # It stays for the next request, until its room is wanted.
    assert pool.used_words == 0 and torch.equal(tables[:words], held)
    assert pool.take(b"2", short) == words
    pool.give_back(b"2")
    assert pool.take(b"3", long) == 0
    assert not torch.equal(tables[:words], held)
    with pytest.raises(AssertionError, match="32 has no user"):
        pool.give_back(b"2")


def test_a_guide_follows_its_automaton() -> None:
    pool = GrammarPool(torch.zeros(200, dtype=torch.int32), None)
    compiled = automaton("ab|abc|h")
    assert pool.take(b"1", compiled) == 0

    def guide() -> DeviceGuide:
        return DeviceGuide(compiled, pool, b"1")

    assert guide().take([0, 1]) == (2, None)
    assert guide().take([0, 1, 2]) == (3, "stop")
    assert guide().take([0, 1, 8]) == (3, "stop")
    assert guide().take([7, 7, 7]) == (1, "stop")
    lost = guide()
    assert lost.take([0, 5, 1]) == (1, "error")
    assert lost.trouble == "its automaton does not allow token 5"
    assert (lost.where, lost.reason) == ("device", "")
    lost.release()
    assert pool.used_words == 0
