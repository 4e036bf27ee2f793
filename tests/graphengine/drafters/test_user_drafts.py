"""When drafts of a caller are verified, and what becomes of those that no step can verify."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, greedy, run
from engines.speculation import ENDLESS, open_plain, open_speculating
from graphengine import Engine, EngineConfig, Request
from graphengine.requests.caller_drafts import NO_DRAFTS
from graphengine.requests.request import Phase
from graphengine.speculative import GateOptions, SaveHiddenStates, UserProvided

K = 3
ASKED = greedy(24, **ENDLESS)


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[int, ...]]:
    """What each prompt is answered."""
    prompts = (PROMPT, LONG, OTHER)
    with open_plain(device="cpu") as engine:
        answers = engine.generate(prompts, ASKED)
    return {prompt: one.token_ids for prompt, one in zip(prompts, answers, strict=True)}


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with open_speculating(UserProvided(K), device="cpu") as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """One for all; idle before and after each test."""
    shared.counters["drafts/stale"] = 0
    yield shared
    for request in [*shared.scheduler.active, *shared.scheduler.waiting]:
        request.cancel()
    run(shared)
    assert_idle(shared)


def stale(engine: Engine) -> int:
    return int(engine.stats()["counters"].get("drafts/stale", 0))


def accounted(engine: Engine, *requests: Request) -> int:
    """Drafts that were judged, are stale, or wait for their step."""
    judged = sum(request.acceptance.proposed for request in requests)
    return judged + stale(engine) + sum(len(request.job.drafts.token_ids) for request in requests)


@pytest.mark.parametrize("beside", [True, False], ids=["beside-another", "alone"])
def test_drafts_before_prefill_wait_for_the_first_decode_step(
    engine: Engine, known: dict[str, tuple[int, ...]], beside: bool
) -> None:
    """The first is for the token that the prompt's last chunk samples; the others stand after."""
    if beside:
        engine.submit(OTHER, ASKED)
        engine.step()
        engine.step()
    request = engine.submit(PROMPT, ASKED)
    engine.draft(request, known[PROMPT][:K])
    assert request.job.drafts.token_ids == known[PROMPT][:K]
    while not request.token_ids:
        engine.step()
    assert request.job.drafts.token_ids == known[PROMPT][:K]
    assert request.job.drafts.after(request.token_ids) == known[PROMPT][1:K]
    engine.step()
    # Two drafts right, and a token of the step's own after them.
    assert tuple(request.token_ids) == known[PROMPT][: K + 1]
    assert request.acceptance.proposed == request.acceptance.accepted == K - 1
    assert request.job.drafts.token_ids == () and stale(engine) == 1


def test_drafts_in_the_middle_of_a_prompt_wait_too(
    engine: Engine, known: dict[str, tuple[int, ...]]
) -> None:
    request = engine.submit(LONG, ASKED)
    engine.submit(OTHER, ASKED)
    engine.step()
    assert 0 < request.job.placed.prefilled < request.job.prompt_len
    engine.draft(request, known[LONG][:2])
    while len(request.token_ids) < 2:
        engine.step()
    assert tuple(request.token_ids) == known[LONG][:3]
    assert request.acceptance.per_position == [1] and stale(engine) == 1


def test_drafts_that_the_first_token_contradicts_are_stale(
    engine: Engine, known: dict[str, tuple[int, ...]]
) -> None:
    request = engine.submit(PROMPT, ASKED)
    engine.submit(OTHER, ASKED)
    wrong = (known[PROMPT][0] + 1) % 4096
    engine.draft(request, (wrong, *known[PROMPT][1:K]))
    while len(request.token_ids) < 2:
        engine.step()
    assert len(request.token_ids) == 2, "a step of one token: nothing was verified"
    assert request.acceptance.proposed == 0 and stale(engine) == K
    assert request.job.drafts.token_ids == ()


def test_a_step_of_others_uses_nothing_up(
    engine: Engine, known: dict[str, tuple[int, ...]]
) -> None:
    """One decodes while another, with drafts, is still prefilled: each has its own."""
    first = engine.submit(PROMPT, ASKED)
    engine.step()
    second = engine.submit(LONG, ASKED)
    engine.draft(second, known[LONG][:K])
    engine.draft(first, known[PROMPT][1 : 1 + K])
    engine.step()
    assert tuple(first.token_ids) == known[PROMPT][: 2 + K]
    assert first.job.drafts.token_ids == () and second.job.drafts.token_ids == known[LONG][:K]


def unread(engine: Engine, patch: pytest.MonkeyPatch, timeout: float = 0.0) -> None:
    """A step that launches and does not wait for what it launched."""
    with patch.context() as nothing_there:
        nothing_there.setattr(engine.runtime.mailbox, "wait", lambda *args, **options: None)
        assert engine.step(timeout=timeout) == []


@pytest.mark.parametrize("right", [True, False])
def test_drafts_given_while_a_step_is_unread_stand_after_the_tokens_of_the_call(
    engine: Engine, known: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """The step was launched without them, and brings the token of the first."""
    request = engine.submit(PROMPT, ASKED)
    engine.step()
    assert len(request.token_ids) == 1
    unread(engine, monkeypatch)
    drafts = known[PROMPT][1 : 1 + K]
    if not right:
        drafts = ((drafts[0] + 1) % 4096, *drafts[1:])
    engine.draft(request, drafts)
    engine.step()
    assert tuple(request.token_ids) == known[PROMPT][:2]
    engine.step()
    assert tuple(request.token_ids) == known[PROMPT][: 2 + K if right else 3]
    assert request.acceptance.proposed == (K - 1 if right else 0)
    assert stale(engine) == (1 if right else K)


def test_drafts_of_a_request_that_ends_first_are_counted(engine: Engine) -> None:
    over, cancelled = engine.submit(PROMPT, greedy(1)), engine.submit(PROMPT, ASKED)
    engine.draft(over, (1, 2, 3))
    engine.draft(cancelled, (1, 2))
    cancelled.cancel()
    run(engine)
    assert over.job.drafts == cancelled.job.drafts == NO_DRAFTS and stale(engine) == 5


def test_another_call_replaces_the_drafts(
    engine: Engine, known: dict[str, tuple[int, ...]]
) -> None:
    request = engine.submit(PROMPT, ASKED)
    engine.step()
    engine.draft(request, (7, 7, 7))
    engine.draft(request, known[PROMPT][1:3])
    engine.step()
    assert tuple(request.token_ids) == known[PROMPT][:4] and stale(engine) == 0


def test_drafts_outlast_a_pause(known: dict[str, tuple[int, ...]]) -> None:
    """A short pool: who is paused first gets drafts then.

    Nothing is lost: what was given was judged, is stale or waits.
    """
    prompts = [PROMPT, OTHER]
    said = [known[prompt] for prompt in prompts]
    pool: dict[str, Any] = {"kv_blocks": 5, "swap_blocks": 10}
    with open_speculating(UserProvided(K), device="cpu", **pool) as engine:
        requests = [engine.submit(prompt, ASKED) for prompt in prompts]
        given: dict[Request, int] = {}
        while engine.busy:
            for request, tokens in zip(requests, said, strict=True):
                done = len(request.token_ids)
                if request.phase is Phase.PAUSED and request not in given:
                    given[request] = done
                    engine.draft(request, tokens[done : done + K])
                elif request.phase is Phase.PAUSED and done == given[request]:
                    assert len(request.job.drafts.token_ids) == K, "a step of another used them up"
            engine.step()
        assert given, "nobody was paused"
        for request in given:
            # Those of its first step after the pause, all right.
            assert request.acceptance.per_position == [1] * K, f"{request.acceptance}"
        assert [tuple(request.token_ids) for request in requests] == said
        assert stale(engine) == 0 and accounted(engine, *requests) == K * len(given)


def test_drafts_outlast_steps_without_drafts(known: dict[str, tuple[int, ...]]) -> None:
    """A gate that drafts for one row at most: two rows decode a token each meanwhile."""
    gate = GateOptions(max_live=1)
    with open_speculating(UserProvided(K), device="cpu", gate=gate) as engine:
        request, other = engine.submit(PROMPT, ASKED), engine.submit(OTHER, ASKED)
        while not (request.token_ids and other.token_ids):
            engine.step()
        done = len(request.token_ids)
        engine.draft(request, known[PROMPT][done : done + K])
        engine.step()
        assert len(request.token_ids) == done + 1
        assert (
            request.job.drafts.after(request.token_ids) == known[PROMPT][done + 1 : done + K]
            and stale(engine) == 0
        )
        other.cancel()
        engine.step()
        assert tuple(request.token_ids) == known[PROMPT][: done + 1 + K]
        assert request.acceptance.accepted == K - 1 and stale(engine) == 1


def test_drafts_of_the_caller_leave_no_lookahead() -> None:
    """The documentation of `lookahead` says so."""
    doc = EngineConfig.__doc__ or ""
    said = doc[doc.index("    lookahead ") : doc.index("    memory_fraction ")]
    for mode in (UserProvided(2), SaveHiddenStates("somewhere")):
        assert EngineConfig(device="cpu", speculative=mode, lookahead=1).lookahead == 0
        assert type(mode).__name__ in said
