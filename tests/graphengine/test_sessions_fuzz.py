"""Requests and sessions of a real engine in any order: no token is wrong, nothing leaks.

The pool is short, so that requests pause and sessions are evicted. What a request says is held
against an engine that keeps nothing, with the whole of its prompt. `test_blocks.py` does the same
with hypothesis, on a simulated device.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mtp_checkpoints import write_random

from graphengine import Engine, Request, SamplingParams, Session, SessionSnapshot
from graphengine.speculative import MTP, DraftModel, NGram, Speculative
from stepping import open_engine, run

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
    "sessions/reused_tokens", "finished/cancelled", "rewinds", "forks", "snapshots", "restores",
)  # fmt: skip


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
        )

    def idle(self) -> Session | None:
        """A session between two turns, which holds what it should."""
        if not self.sessions:
            return None
        session = self.dice.choice(self.sessions)
        turn = self.turns.get(session)
        if turn is not None and not turn.finished:
            with pytest.raises(ValueError, match="under way"):
                session.append([1])
            return None
        if turn is not None:
            if turn.finish_reason in ("stop", "length"):
                self.tokens[session] += turn.token_ids
            del self.turns[session]
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
            self.requests.append(engine.submit(prompt, self.params()))
        elif action == "open" and not crowded:
            self.keep(engine.session(), [])
        elif action == "cancel" and self.requests:
            dice.choice(self.requests[-6:]).cancel()
        elif action == "restore" and self.snapshots and not crowded:
            kept = dice.choice(self.snapshots)
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
        elif session is None:
            return
        elif action == "turn":
            prompt = self.draw(14) if len(session) else dice.choice(self.heads) + self.draw(4)
            if len(session) + len(prompt) > 60:
                self.rewind(session, len(session) // 2)
            session.append(prompt)
            self.tokens[session] += prompt
            self.turns[session] = session.submit(self.params())
            self.requests.append(self.turns[session])
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
        assert set(pool.idle) == set(reuse._key_of)


@pytest.mark.parametrize("name", CASES)
def test_any_order_of_calls_gives_the_tokens_of_requests_alone(tmp_path: Path, name: str) -> None:
    path = write_random(tmp_path / "modules", "mimo")
    mode, options = CASES[name]
    with open_engine(path, **SIZES | SHORT | options, speculative=mode(path)) as engine:
        world = World(engine, random.Random(name))
        happened = Counter[str]()
        while not all(happened[each] for each in HAPPENED) and happened["tokens"] < 9_000:
            world.act()
            for _ in range(world.dice.randrange(5)):
                engine.step(timeout=world.dice.choice([None, 0]))
            if world.dice.random() < 0.1:
                run(engine)
            happened = engine.counters + world.counters
        world.finish()
    with open_engine(path, **SIZES) as alone:
        for request in world.requests:
            if not request.token_ids:
                continue
            params = dataclasses.replace(request.params, seed=request.seed)
            expected = alone.generate(list(request.prompt_token_ids), params)
            said = tuple(request.token_ids)
            if request.finish_reason == "cancelled":
                assert said == expected.token_ids[: len(said)], f"{request}"
            else:
                assert said == expected.token_ids, f"{request}"
                assert request.finish_reason == expected.finish_reason
    assert all(happened[each] for each in HAPPENED), dict(happened)
