"""Requests and sessions of a real engine in any order: no token is wrong, nothing leaks.

The pool is short, so that requests pause and sessions are evicted. What a request says is held
against an engine that keeps nothing, with the whole of its prompt. `test_blocks.py` does the same
with hypothesis, on a simulated device.

GRAPHENGINE_LONG=5 runs each case with five seeds, until all has happened 50 times.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from checkpoints import toy_family
from checkpoints.mtp_modules import write_random
from engines.small_engine import open_engine, run
from engines.speculation import write_draft_model
from extent import SEEDS, extent
from graphengine import Engine, Event, Request, Result, SamplingParams, Session, SessionSnapshot
from graphengine.models.families import registry
from graphengine.speculative import MTP, DraftModel, NGram, Speculative

SIZES: dict[str, Any] = {"device": "cpu", "max_seq_len": 72, "max_batch": 3, "row_family": "dot"}
SHORT: dict[str, Any] = {"kv_blocks": 15, "swap_blocks": 40, "prefix_caching": True}
CASES: dict[str, tuple[Callable[[Path], Speculative | None], dict[str, Any]]] = {
    "plain-0": (lambda path: None, {"lookahead": 0}),
    "plain-1": (lambda path: None, {}),
    "bounded": (lambda path: None, {"session_blocks": 12}),
    "eagle": (lambda path: MTP(k=3), {}),
    "vanilla": (lambda path: MTP(k=2, style="vanilla"), {}),
    "ngram": (lambda path: NGram(k=3), {}),
    "model": (lambda path: DraftModel(path, k=2), {"lookahead": 0}),
}
HAPPENED = (
    "pauses", "resumes", "prefix/hits", "prefix/evicted_blocks", "sessions/evicted",
    "sessions/reused_tokens", "finished/cancelled", "finished/deadline", "rewinds", "forks",
    "snapshots", "restores", "stopped", "callbacks", "logprobs",
)  # fmt: skip
# With a model that has a recurrent layer, whose KV is of use only together with state checkpoints.
RECURRENT: dict[str, tuple[Callable[[Path], Speculative | None], dict[str, Any]]] = {
    "plain-0": (lambda path: None, {"lookahead": 0, "session_states": 8, "kv_blocks": 19}),
    "plain-1": (lambda path: None, {"session_states": 8, "kv_blocks": 19}),
    "bounded": (lambda path: None, {"session_blocks": 16, "kv_blocks": 19}),
    "ngram": (lambda path: NGram(k=3), {"session_states": 6, "kv_blocks": 19}),
    "model": (lambda path: DraftModel(path, k=2), {"session_states": 6}),
}
OF_STATES = ("states/evicted", "states/rewound_past")
# How often each of these happens at least, and at how many tokens that is given up.
TIMES, TOKENS = (50, 400_000) if SEEDS else (1, 20_000)


class World:
    """An engine, what is asked of it at random, and what its sessions must hold."""

    def __init__(self, engine: Engine, dice: random.Random) -> None:
        self.engine, self.dice = engine, dice
        self.requests: list[Request] = []
        self.sessions: list[Session] = []
        self.tokens: dict[Session, list[int]] = {}
        self.turns: dict[Session, Request] = {}
        self.snapshots: list[SessionSnapshot] = []
        self.heads = [self.draw(24) for _ in range(3)]
        self.counters = Counter[str]()

    def draw(self, most: int) -> list[int]:
        return [self.dice.randrange(97) for _ in range(self.dice.randrange(1, most))]

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.dice.randrange(1, 30),
            temperature=self.dice.choice([0.0, 1.0]),
            ignore_eos=self.dice.random() < 0.8,
            repetition_penalty=self.dice.choice([1.0, 1.0, 1.0, 1.5]),
            logprobs=self.dice.choice([None, None, None, 2]),
            stop_token_ids=tuple(self.draw(8)) if self.dice.random() < 0.2 else (),
        )

    def options(self) -> dict[str, Any]:
        """Options of a request: who waits after whom, and at times a deadline that has come
        already.
        """
        late = self.dice.random() < 0.05
        return {
            "priority": self.dice.choice([0, 0, 0, -1, 1]),
            "deadline_s": 1e-6 if late else None,
        }

    def heard(self, session: Session) -> Callable[[Event], None]:
        """Begins another turn where the one before ends, within the step."""

        def heard(event: Event) -> None:
            if event.finish_reason not in ("stop", "length") or self.dice.random() < 0.3:
                return
            if session not in self.tokens or session.turn is not None or len(session) > 50:
                return
            self.settle(session)
            prompt = self.draw(6)
            session.append(prompt)
            self.tokens[session] += prompt
            self.begin(session)
            self.counters["callbacks"] += 1

        return heard

    def begin(self, session: Session) -> None:
        heard = self.heard(session) if self.dice.random() < 0.3 else None
        self.turns[session] = session.submit(self.params(), on_event=heard, **self.options())
        self.requests.append(self.turns[session])

    def settle(self, session: Session) -> None:
        """Note what the turn that has ended said."""
        turn = self.turns.pop(session, None)
        if turn is not None and turn.finish_reason in ("stop", "length"):
            self.tokens[session] += turn.token_ids

    def idle(self) -> Session | None:
        """A session between two turns, which holds what it should."""
        if not self.sessions:
            return None
        # Half of the time one that was not evicted, of which there are few.
        kept = [one for one in self.sessions if one.cached_tokens and one not in self.turns]
        session = self.dice.choice(kept if kept and self.dice.random() < 0.5 else self.sessions)
        turn = self.turns.get(session)
        if turn is not None and not turn.finished:
            with pytest.raises(ValueError, match="under way"):
                session.append([1])
            return None
        self.settle(session)
        assert session.turn is None and list(session.token_ids) == self.tokens[session]
        return session

    def keep(self, session: Session, tokens: list[int]) -> None:
        assert list(session.token_ids) == tokens
        self.sessions.append(session)
        self.tokens[session] = tokens

    def act(self) -> None:
        dice, engine = self.dice, self.engine
        action = dice.choices(
            ("submit", "open", "turn", "rewind", "fork", "save", "restore", "close", "cancel"),
            (6, 3, 12, 2, 5, 4, 4, 2, 2),
        )[0]
        session = self.idle()
        crowded = len(self.sessions) > 5
        if action == "submit":
            prompt = dice.choice(self.heads) + self.draw(8)
            self.requests.append(engine.submit(prompt, self.params(), **self.options()))
        elif action == "open" and not crowded:
            self.keep(engine.session(), [])
        elif action == "cancel" and self.requests:
            dice.choice(self.requests[-6:]).cancel()
        elif action == "restore" and self.snapshots and not crowded:
            full = [one for one in self.snapshots if one.blocks]
            kept = dice.choice(full if full and dice.random() < 0.8 else self.snapshots)
            try:
                self.keep(engine.restore_session(kept), list(kept.token_ids))
            except ValueError as error:
                assert "KV blocks" in str(error)
            else:
                self.counters["restores"] += kept.blocks > 0
        elif action == "close" and self.sessions:
            chosen = dice.choice(self.sessions)
            chosen.close()
            self.sessions.remove(chosen)
            del self.tokens[chosen]
        elif session is None:
            return
        elif action == "turn":
            prompt = self.draw(14) if len(session) else dice.choice(self.heads) + self.draw(4)
            if len(session) + len(prompt) > 60:
                self.rewind(session, len(session) // 2)
            session.append(prompt)
            self.tokens[session] += prompt
            self.begin(session)
        elif action == "rewind" and len(session):
            self.rewind(session, dice.randrange(len(session)))
        elif action == "fork" and not crowded:
            self.keep(session.fork(), list(self.tokens[session]))
            self.counters["forks"] += session.cached_tokens > 0
        elif action == "save":
            self.snapshots.append(session.snapshot())
            self.counters["snapshots"] += self.snapshots[-1].blocks > 0

    def rewind(self, session: Session, count: int) -> None:
        session.rewind(count)
        del self.tokens[session][len(self.tokens[session]) - count :]
        self.counters["rewinds"] += 1

    def finish(self) -> None:
        """Nothing is held but what the index of prefixes keeps."""
        run(self.engine)
        for session in self.sessions:
            session.close()
        scheduler = self.engine.scheduler
        pool, reuse = scheduler.pool, scheduler.reuse
        assert pool.free == pool.count and scheduler.swap.free == scheduler.swap.count
        assert not any(scheduler.slots) and not reuse.contexts
        held = reuse.states.held
        assert all(state.tokens and not state.holders for state in held)
        assert set(pool.idle) == set(reuse._key_of).union(*(state.blocks for state in held))


def short_of(happened: Counter[str], needed: Sequence[str]) -> list[str]:
    return [each for each in needed if happened[each] < TIMES]


def live_through(
    path: Path,
    name: str,
    seed: int,
    *,
    cases: Mapping[str, tuple[Callable[[Path], Speculative | None], dict[str, Any]]] = CASES,
    drafter: Path | None = None,
    needed: Sequence[str] = HAPPENED,
    **more: Any,
) -> None:
    """Ask for anything until all has happened; then compare every request with one alone."""
    mode, options = cases[name]
    options = SIZES | options | more
    with open_engine(path, **SHORT | options, speculative=mode(drafter or path)) as engine:
        world = World(engine, random.Random(f"{name}/{seed}"))
        happened = Counter[str]()
        while short_of(happened, needed) and happened["tokens"] < TOKENS:
            world.act()
            for _ in range(world.dice.randrange(5)):
                engine.step(timeout=world.dice.choice([None, 0]))
            if world.dice.random() < 0.1:
                run(engine)
            happened = engine.counters + world.counters
            happened["logprobs"] = sum(bool(one.logprobs) for one in world.requests)
            happened["stopped"] = sum(isinstance(one.stop_reason, int) for one in world.requests)
        world.finish()
    with open_engine(path, **SIZES | more) as alone:
        spoken = [request for request in world.requests if request.token_ids]
        expected = alone.generate(
            [list(request.prompt_token_ids) for request in spoken],
            [asked_of(request) for request in spoken],
        )
        for request, result in zip(spoken, expected, strict=True):
            compare(request, result)
    short = short_of(happened, needed)
    assert not short, {each: happened[each] for each in short}


def asked_of(request: Request) -> SamplingParams:
    """The prompt as it was asked; of a turn that was cut short no more than it said."""
    params = dataclasses.replace(request.params, seed=request.seed)
    if request.finish_reason in ("cancelled", "deadline"):
        params = dataclasses.replace(params, max_tokens=len(request.token_ids))
    return params


def compare(request: Request, expected: Result) -> None:
    """With the same request in an engine that keeps nothing."""
    said = tuple(request.token_ids)
    assert said == expected.token_ids[: len(said)], f"{request}"
    if request.finish_reason not in ("cancelled", "deadline"):
        assert said == expected.token_ids, f"{request}"
        assert request.finish_reason == expected.finish_reason
        assert request.stop_reason == expected.stop_reason
    if request.params.logprobs is not None:
        assert request.logprobs is not None and len(request.logprobs) == len(said)
        for token, ours, theirs in zip(
            said, request.logprobs, expected.logprobs or (), strict=False
        ):
            assert abs(ours[token].logprob - theirs[token].logprob) < 1e-3, f"{request}"


# Seeds by which all has happened early.
EARLY = {"plain-0": 9, "bounded": 4, "eagle": 7, "vanilla": 8, "model": 13}
EARLY_OF_STATES = {"plain-0": 21, "plain-1": 26, "bounded": 2, "ngram": 23, "model": 12}
RUNS = extent([(name, EARLY.get(name, 0)) for name in CASES], [*product(CASES, range(SEEDS or 1))])


@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_any_order_of_calls_gives_the_tokens_of_requests_alone(
    tmp_path: Path, name: str, seed: int
) -> None:
    live_through(write_random(tmp_path / "modules", "mimo"), name, seed)


@pytest.mark.parametrize(
    ("name", "seed"),
    extent(
        [(name, EARLY_OF_STATES.get(name, 0)) for name in RECURRENT],
        [*product(RECURRENT, range(SEEDS or 1))],
    ),
)
def test_so_does_a_model_whose_states_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    monkeypatch.setitem(registry.FAMILIES, toy_family.ARCHITECTURE, toy_family.read_config)
    path = toy_family.write_checkpoint(tmp_path / "toy", vocab_size=97)
    needed = OF_STATES + tuple(each for each in HAPPENED if each != "prefix/evicted_blocks")
    if name == "model":
        # A prompt's end depends on the token after it, in the draft model's KV: fewer are shared.
        needed = tuple(each for each in needed if each != "prefix/hits")
    dense = write_draft_model(tmp_path / "dense", "llama", 97, None)
    live_through(path, name, seed, cases=RECURRENT, drafter=dense, needed=needed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain-1", "vanilla"])
def test_the_same_on_a_gpu(tmp_path: Path, name: str) -> None:
    """In float32: there a reply's KV leaves no choice between two tokens to its last bits."""
    path = write_random(tmp_path / "modules", "mimo")
    live_through(path, name, 0, device="cuda", dtype="float32")
