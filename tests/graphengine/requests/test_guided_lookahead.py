"""A request whose grammar the host follows sits out until its token was read; others run ahead."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated_device import naps, simulated
from engines.small_engine import (
    LONG,
    OTHER,
    PROMPT,
    assert_idle,
    greedy,
    open_engine,
    run,
    sampled,
    step_until,
)
from engines.speculation import TREE, open_plain, open_speculating, outcome
from extent import extent
from graphengine import Engine, Request, SamplingParams, StructuredOutputsParams
from graphengine.speculative import MTP, NGram, Speculative

pytest.importorskip("llguidance")

LIST = r"\[([0-9]{1,3}, ){6}[a-z]{2,5}\]"
# The host follows every Lark grammar; a pool has the device follow the regular expression.
LARK = 'start: "[" (/[0-9]{1,3}/ ", ")~6 /[a-z]{2,5}/ "]"'
POOL = {"grammar_pool_mib": 1}


def asked(max_tokens: int = 40, *, by_host: bool = True, **options: Any) -> SamplingParams:
    grammar: dict[str, Any] = {"grammar": LARK} if by_host else {"regex": LIST}
    params = StructuredOutputsParams(**grammar)
    return SamplingParams(max_tokens=max_tokens, structured_outputs=params, **options)


class Launch(NamedTuple):
    """The requests that a launch sampled for, and how many launches were not read before it."""

    requests: frozenset[Request]
    ahead: int


def watch_launches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The engine's launches from now on; none has a request whose last token was not read."""
    core, launches = engine.core, list[Launch]()
    replay = core.replay

    def watched(plan: Any) -> None:
        unread = [each for step in core.in_flight for each in step]
        sampling = [*plan.rows, *(chunk.request for chunk in plan.chunks if chunk.final)]
        for request in plan.rows:
            if request.grammar == "host":
                assert not any(request in each.requests for each in unread), "it was not read"
        launches.append(Launch(frozenset(sampling), core.launches))
        replay(plan)

    monkeypatch.setattr(core, "replay", watched)
    return launches


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_others_are_launched_ahead_while_it_sits_out(
    device: str, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(device=device, lookahead=lookahead) as engine:
        expected = [engine.generate(OTHER, greedy(80, ignore_eos=True)).token_ids]
        expected.append(engine.generate(PROMPT, asked(temperature=0.0)).token_ids)
        plain = engine.submit(OTHER, greedy(80, ignore_eos=True))
        step_until(engine, lambda: len(plain.token_ids) > 2)
        before = engine.counters.copy()
        launches = watch_launches(engine, monkeypatch)
        guided = engine.submit(PROMPT, asked(temperature=0.0))
        step_until(engine, lambda: len(guided.token_ids) == 3)
        del launches[:]
        step_until(engine, lambda: len(guided.token_ids) == 8)
        # The plain row is in each launch, and each but the first is made ahead.
        assert launches and all(plain in launch.requests for launch in launches)
        assert {launch.ahead for launch in launches} == {lookahead}
        assert len(engine.core.in_flight) == lookahead
        # The other one is in one of them for each that may be in flight.
        turns = [guided in launch.requests for launch in launches]
        assert sum(turns) == 5 and len(turns) == 5 * (lookahead + 1)
        for first in range(0, len(turns), lookahead + 1):
            assert sum(turns[first : first + lookahead + 1]) == 1
        run(engine)
        assert [plain.result().token_ids, guided.result().token_ids] == expected
        assert guided.grammar == "host" and re.fullmatch(LIST, guided.text)
        counted = engine.counters - before
        assert counted["guided/steps"] == len(guided.token_ids)
        sat_out = counted["guided/sat_out"]
        assert lookahead * 5 <= sat_out <= lookahead * len(guided.token_ids)
        assert counted["discarded_tokens"] == 0
        assert_idle(engine)


def idle_ticks(other: SamplingParams) -> int:
    """Ticks without work of a device whose host sleeps two at a time, for a request with a grammar
    and another beside it.
    """
    with open_engine(device="cpu", lookahead=2, max_batch=2) as engine:
        requests = [engine.submit(OTHER, other), engine.submit(PROMPT, asked(seed=2))]
        with simulated(engine) as device:
            step_until(engine, lambda: min(len(each.token_ids) for each in requests) > 2)
            before = device.idle
            while len(requests[1].token_ids) < 12:
                for _ in range(2):
                    engine.step(timeout=0)
                device.sleep(2)
            idle = device.idle - before
            run(engine)
        assert_idle(engine)
    return idle


def test_a_late_host_stalls_no_plain_row() -> None:
    assert idle_ticks(sampled(90, seed=1)) == 0
    assert idle_ticks(asked(seed=1)) > 8


def test_requests_that_all_wait_stay_in_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come one after the other, beside a plain one; without it each launch has all."""
    with open_engine(device=device, lookahead=2) as engine:
        launches = watch_launches(engine, monkeypatch)
        plain = engine.submit(OTHER, greedy(14, ignore_eos=True))
        requests = []
        for seed in range(2):
            requests.append(engine.submit(PROMPT, asked(seed=seed)))
            step_until(engine, lambda: len(requests[-1].token_ids) == 1)
        step_until(engine, lambda: plain.finished and not engine.core.in_flight)
        del launches[:]
        step_until(engine, lambda: any(request.finished for request in requests))
        assert len(launches) > 4
        assert {*launches} == {Launch(frozenset(requests), 0)}
        run(engine)


# Tokens.

Action = tuple[Any, ...]
OPTIONS = st.sampled_from(
    [{"temperature": 0.0}, {"seed": 3}, {"seed": 4, "top_k": 30, "logprobs": 1}]
)
PARAMS = st.one_of(
    st.builds(lambda n, options: asked(n, **options), st.integers(1, 30), OPTIONS),
    st.builds(lambda n, options: asked(n, by_host=False, **options), st.integers(1, 30), OPTIONS),
    st.builds(
        lambda n, options: SamplingParams(max_tokens=n, **options), st.integers(1, 40), OPTIONS
    ),
    st.builds(
        lambda n, options: asked(n, stop=["7", "3,"], **options), st.integers(9, 30), OPTIONS
    ),
    st.builds(lambda n: sampled(n, seed=5, forced_tokens=True), st.integers(1, 9)),
)
SUBMIT = st.tuples(st.just("submit"), st.sampled_from([PROMPT, OTHER, LONG]), PARAMS)
STEP = st.tuples(st.just("step"), st.integers(1, 9), st.sampled_from([None, 0]))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 5), st.just(None))
ACTIONS = st.lists(SUBMIT | SUBMIT | STEP | CANCEL, min_size=3, max_size=14)


class Engines:
    """Engines by their lookahead and steps per launch, opened once; `calm` has none of either."""

    def __init__(self) -> None:
        self.calm = open_plain(device="cpu", lookahead=0, max_batch=8, **POOL)
        self._opened: dict[tuple[int, int], Engine] = {}

    def __call__(self, lookahead: int, steps: int) -> Engine:
        if (lookahead, steps) not in self._opened:
            self._opened[lookahead, steps] = open_plain(
                device="cpu",
                lookahead=lookahead,
                steps_per_launch=steps,
                # A pool in which three long requests pause each other.
                kv_blocks=18,
                swap_blocks=64,
                **POOL,
            )
        return self._opened[lookahead, steps]

    def close(self) -> None:
        for engine in (self.calm, *self._opened.values()):
            engine.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    found = Engines()
    yield found
    found.close()


def act(engine: Engine, actions: list[Action], sleep: Any) -> list[Request]:
    """Do what the callers do, and run the engine to its end; all their requests."""
    requests: list[Request] = []
    for action, *values in actions:
        if action == "submit":
            requests.append(engine.submit(*values))
        elif action == "cancel" and requests:
            requests[values[0] % len(requests)].cancel()
        elif action == "step":
            for _ in range(values[0]):
                engine.step(timeout=values[1])
                sleep()
    run(engine)
    assert_idle(engine)
    return requests


def check_alone(calm: Engine, requests: list[Request]) -> None:
    """Each has what it gets in a calm engine, or the beginning if it was cancelled."""
    prompts = [list(request.prompt_token_ids) for request in requests]
    alone = calm.generate(prompts, [request.params for request in requests]) if requests else []
    for request, expected in zip(requests, alone, strict=True):
        count = len(request.token_ids)
        assert tuple(request.token_ids) == expected.token_ids[:count], f"{request}"
        if expected.logprobs is not None:
            assert request.logprobs == list(expected.logprobs[:count])
        if request.finish_reason != "cancelled":
            assert outcome(request) == outcome(expected)
            assert request.stop_reason == expected.stop_reason


@settings(max_examples=extent(15, 400))
@given(
    lookahead=st.integers(0, 2),
    steps=st.sampled_from([1, 1, 3]),
    actions=ACTIONS,
    seed=st.integers(0, 9),
)
def test_tokens_do_not_depend_on_who_sits_out(
    engines: Engines, lookahead: int, steps: int, actions: list[Action], seed: int
) -> None:
    engine = engines(lookahead, steps)
    with simulated(engine) as device:
        late = naps(random.Random(seed), most=6)
        requests = act(engine, actions, lambda: device.sleep(next(late)))
    check_alone(engines.calm, requests)


def test_pauses_change_nothing(engines: Engines) -> None:
    engine = engines(2, 1)
    before = engine.counters.copy()
    jobs: list[tuple[str, SamplingParams]] = [
        (LONG, sampled(40, seed=1)),
        (LONG, sampled(40, seed=2)),
        (LONG, asked(40, seed=1)),
        (LONG, asked(40, seed=3)),
    ]
    requests = [engine.submit(*job) for job in jobs]
    run(engine)
    check_alone(engines.calm, requests)
    counted = engine.counters - before
    assert counted["pauses"] and counted["guided/sat_out"]
    assert any(request.pauses for request in requests if request.grammar == "host")


def test_a_session_goes_on_after_a_turn_that_sat_out(engines: Engines) -> None:
    engine = engines(2, 1)
    with engine.session() as session:
        session.append(LONG)
        turn = session.submit(asked(seed=1))
        beside = engine.submit(OTHER, sampled(40, seed=1))
        before = engine.counters["guided/sat_out"]
        run(engine)
        assert engine.counters["guided/sat_out"] > before
        session.append(OTHER)
        following = session.submit(asked(seed=2))
        again = engine.submit(OTHER, sampled(40, seed=1))
        run(engine)
        assert following.cached_tokens > turn.cached_tokens
        check_alone(engines.calm, [turn, beside, following, again])
    assert_idle(engine)


@pytest.mark.parametrize(
    "speculative", extent([NGram(k=3)], [NGram(k=3), MTP(k=3), MTP(tree=TREE)]), ids=str
)
def test_masks_follow_drafts_that_came_in_time(
    engines: Engines, speculative: Speculative, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of drafts is queued on the device, behind which others' steps are queued."""
    with open_speculating(speculative, device="cpu", lookahead=2, **POOL) as engine:
        launches = watch_launches(engine, monkeypatch)
        with simulated(engine) as device:
            late = naps(random.Random(3), most=3)
            requests = [
                engine.submit(OTHER, sampled(60, seed=1)),
                engine.submit(PROMPT, asked(60, temperature=0.0)),
                engine.submit(PROMPT, asked(60, seed=2)),
                engine.submit(PROMPT, asked(60, seed=2, by_host=False)),
            ]
            while engine.busy:
                engine.step(timeout=0)
                device.sleep(next(late))
        check_alone(engines.calm, requests)
        assert engine.acceptance.accepted > 0
        assert engine.counters["guided/sat_out"] > 5
        assert max(launch.ahead for launch in launches) == 2
