"""State checkpoints of recurrent layers: sessions and prefixes go on from them, with the tokens of
an engine that keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import toy_family
from engines.conversations import converse
from engines.small_engine import assert_idle, greedy, run, sampled
from engines.speculation import write_draft_model
from graphengine import Engine, SessionSnapshot
from graphengine.buckets import StaticBuffers
from graphengine.host.state_checkpoints import BlockCopy, StateCopy
from graphengine.models.families import registry
from graphengine.models.states import Recurrent, recurrent_field, recurrent_fields
from graphengine.opening.state_checkpoint_tensors import StateCheckpointTensors
from graphengine.speculative import DraftModel, NGram

STATE = recurrent_field(*toy_family.RECURRENT)
VOCAB = toy_family.CONFIG["vocab_size"]
HEAD = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
LONG = [(7 * index) % 59 for index in range(40)]
NINE = greedy(9, ignore_eos=True)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, toy_family.ARCHITECTURE, toy_family.read_config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    toy_family.write_checkpoint(folder / "toy")
    toy_family.write_checkpoint(folder / "other", seed=1)
    write_draft_model(folder / "dense", "llama", VOCAB, None)
    return folder


def open_toy(folder: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 3, "max_seq_len": 160, "block_size": 8, "prefill_buckets": (4, 16)}
    options = sizes | {"row_family": "dot"} | options
    return Engine.from_pretrained(folder / "toy", device="cpu", **options)


@pytest.fixture
def alone(folder: Path) -> Iterator[Engine]:
    """An engine that keeps nothing."""
    with open_toy(folder, session_states=0) as engine:
        yield engine


def close(engine: Engine) -> None:
    """Nobody holds anything."""
    run(engine)
    assert_idle(engine)
    states, pool = engine.scheduler.reuse.states, engine.scheduler.pool
    assert not states.held and len(states._vacant) == states.count
    assert pool.vacant == pool.count


MODES: dict[str, Callable[[Path], Any]] = {
    "off": lambda folder: None,
    "ngram": lambda folder: NGram(k=3),
    "dense": lambda folder: DraftModel(folder / "dense", k=2),
}


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("off", {}),
        ("off", {"lookahead": 0, "session_states": 1}),
        ("off", {"session_states": 12, "session_blocks": 12}),
        ("ngram", {"session_states": 2}),
        ("off", {"steps_per_launch": 3}),
        ("ngram", {"lookahead": 0}),
        ("dense", {}),
    ],
)
def test_conversations_have_the_tokens_of_whole_prompts(
    folder: Path, alone: Engine, mode: str, options: dict[str, Any]
) -> None:
    """With rewinds to anywhere, and forks."""
    with open_toy(folder, speculative=MODES[mode](folder), **options) as engine:
        with engine.session() as session:
            said = converse(session, 0, 16, vocab_size=VOCAB, alone=alone)
        assert len(said) > 16
        assert engine.counters["sessions/reused_tokens"] > 150
        assert engine.counters["states/kept"] > 16
        close(engine)


def test_a_draft_model_with_states_of_its_own_keeps_none(folder: Path, alone: Engine) -> None:
    mode = DraftModel(folder / "other", k=2)
    with open_toy(folder, speculative=mode) as engine, engine.session() as session:
        converse(session, 0, 3, vocab_size=VOCAB, alone=alone)
        assert engine.counters["sessions/reused_tokens"] == engine.counters["states/kept"] == 0
        assert engine.memory.state_places == 0


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_state_at_the_end_of_a_turn_is_that_of_its_tokens(folder: Path, k: int) -> None:
    """To the bit that of the slot, which was fed every token but the last; so is it in the slot of
    the turn that goes on there.
    """
    mode = NGram(k=k) if k else None
    with open_toy(folder, speculative=mode) as engine, engine.session() as session:
        session.append(HEAD * 2)
        session.generate(NINE)
        (state,) = session._context.states[-1:]
        assert state.position == len(session) - 1 == session.cached_tokens
        entries = engine.runtime.buffers[STATE][0]
        assert len(entries) == 1 + k
        newest = (state.position - 1) % len(entries)
        wanted = entries[newest].clone()
        engine.runtime.copy_states(engine.scheduler.reuse.states.before)
        (found,) = engine.runtime.read_states(state.place)
        assert torch.equal(found[0], wanted)
        entries.fill_(torch.nan)
        session.append([1, 2])
        turn = session.submit(NINE)
        engine.core.plan()
        assert turn.job.placed.slot == 0 and turn.cached_tokens == state.position
        engine.runtime.copy_states(engine.scheduler.reuse.states.before)
        assert torch.equal(entries[newest], wanted)
        turn.cancel()


# Where a session returns to.


def test_a_rewind_goes_back_to_the_nearest_state(folder: Path, alone: Engine) -> None:
    with open_toy(folder, session_states=12) as engine, engine.session() as session:
        ends = []
        for appended in (LONG, HEAD, HEAD):
            session.append(appended)
            session.generate(NINE)
            ends.append(len(session) - 1)
        assert session.cached_tokens == ends[-1] == 40 + 9 + 2 * 19 - 1

        def again(length: int, cached: int) -> None:
            before = engine.counters["states/rewound_past"]
            session.rewind(len(session) - length)
            assert engine.counters["states/rewound_past"] - before == length - cached
            session.append([5])
            assert session.cached_tokens == cached
            context = list(session.token_ids)
            result = session.generate(NINE)
            assert result.cached_tokens == cached
            assert result.token_ids == alone.generate(context, NINE).token_ids

        # The end of the second turn's prompt, then the first turn's end, and ends of chunks.
        again(ends[1] - 1, ends[0] + 11)
        again(ends[0] + 3, ends[0])
        again(45, 40)
        again(39, 32)
        again(17, 16)
        again(9, 0)
        session.rewind(len(session) - 9)
    # Entering `with` closed the session.


def test_a_turn_that_leaves_nothing_changes_nothing(folder: Path, alone: Engine) -> None:
    """One that was cancelled, in its prompt or in its reply."""
    with open_toy(folder) as engine, engine.session() as session:
        session.append(HEAD)
        session.generate(NINE)
        session.append(LONG)
        for steps in (1, 8):
            turn = session.submit(NINE)
            for _ in range(steps):
                engine.step()
            assert bool(turn.token_ids) is (steps > 1) and not turn.finished
            turn.cancel()
            run(engine)
            assert session.cached_tokens == 18 and len(session) == 19 + 40
        context = list(session.token_ids)
        assert session.generate(NINE).token_ids == alone.generate(context, NINE).token_ids


@pytest.mark.parametrize("lookahead", [0, 1])
def test_where_the_host_ends_a_turn_the_state_may_have_passed(
    folder: Path, alone: Engine, lookahead: int
) -> None:
    with open_toy(folder, lookahead=lookahead) as engine, engine.session() as session:
        session.append(HEAD)
        turn = session.submit(greedy(40, ignore_eos=True))
        engine.stop_callback = lambda active: [turn.id] if len(turn.token_ids) > 5 else []
        run(engine)
        engine.stop_callback = None
        assert len(session) == 16
        # Its prompt's end is still there.
        assert session.cached_tokens == (10 if lookahead else 15)
        session.append([1])
        context = list(session.token_ids)
        assert session.generate(NINE).token_ids == alone.generate(context, NINE).token_ids


def test_places_go_to_where_sessions_have_come_to(folder: Path, alone: Engine) -> None:
    """Points on the way go first, then the session that was used longest ago."""
    with open_toy(folder, session_states=3) as engine:
        sessions = [engine.session() for _ in range(4)]
        for index, session in enumerate(sessions):
            session.append([*LONG, index])
            session.generate(NINE)
            assert session.cached_tokens == 49
        assert [session.evicted for session in sessions] == [True, False, False, False]
        assert engine.counters["sessions/evicted"] == 1
        assert engine.stats()["kv"] | {"session_states": 3, "states": 3} == engine.stats()["kv"]
        assert "state checkpoints 3 of 3, of 96 B each" in str(engine.report())
        # One that goes on takes no other's place.
        for _ in range(3):
            sessions[1].append([8])
            context = list(sessions[1].token_ids)
            result = sessions[1].generate(NINE)
            assert result.cached_tokens == len(context) - 2
            assert result.token_ids == alone.generate(context, NINE).token_ids
        assert [session.evicted for session in sessions] == [True, False, False, False]
        for session in sessions:
            session.close()
        close(engine)


def test_blocks_that_requests_need_take_states_with_them(folder: Path, alone: Engine) -> None:
    with open_toy(folder, kv_blocks=22, swap_blocks=60) as engine:
        session, other = engine.session(), engine.session()
        for each in (session, other):
            each.append(LONG)
            each.generate(NINE)
        prompts = [[index, *LONG] for index in range(3)]
        params = [sampled(60, seed=seed) for seed in range(3)]
        found = [result.token_ids for result in engine.generate(prompts, params)]
        assert session.evicted and not session.cached_tokens
        assert engine.counters["pauses"] > 0
        assert found == [result.token_ids for result in alone.generate(prompts, params)]
        for each in (session, other):
            each.append([1])
            context = list(each.token_ids)
            assert each.generate(NINE).token_ids == alone.generate(context, NINE).token_ids
            each.close()
        close(engine)


def test_forks_share_states_and_write_into_copies(folder: Path, alone: Engine) -> None:
    """At the same time, from the midst of one block."""
    with open_toy(folder) as engine, engine.session() as session:
        session.append(HEAD)
        session.generate(NINE)
        forks = [session, *(session.fork() for _ in range(2))]
        held = len(engine.scheduler.reuse.states.held)
        contexts, turns = [], []
        for index, fork in enumerate(forks):
            fork.append([index + 1] * 3)
            contexts.append(list(fork.token_ids))
            turns.append(fork.submit(sampled(20, seed=index)))
            assert fork.cached_tokens == 18
        assert len(engine.scheduler.reuse.states.held) == held
        run(engine)
        params = [sampled(20, seed=index) for index in range(3)]
        wanted = alone.generate(contexts, params)
        assert [tuple(turn.token_ids) for turn in turns] == [one.token_ids for one in wanted]
        assert all(turn.cached_tokens == 18 for turn in turns)
        for fork in forks[1:]:
            fork.close()


# Snapshots.


@pytest.fixture
def kept(folder: Path, tmp_path: Path) -> SessionSnapshot:
    with open_toy(folder, speculative=NGram(k=2)) as engine, engine.session() as session:
        session.append(LONG)
        session.generate(sampled(13, seed=3))
        kept: SessionSnapshot = session.snapshot(tmp_path / "session")
    assert kept.position == 52 and kept.blocks == 7 and len(kept.states) == 1
    return kept


@pytest.mark.parametrize("k", [0, 1, 5])
def test_a_session_goes_on_in_an_engine_with_other_drafts(
    folder: Path, tmp_path: Path, alone: Engine, kept: SessionSnapshot, k: int
) -> None:
    """Its states' entries are laid out by position: there are more or fewer of them."""
    context = [*kept.token_ids, 8, 9]
    params = greedy(20, ignore_eos=True)
    wanted = alone.generate(context, params).token_ids
    with open_toy(folder, speculative=NGram(k=k) if k else None) as engine:
        for source in (kept, tmp_path / "session"):
            with engine.restore_session(source) as session:
                assert session.cached_tokens == 52
                session.append([8, 9])
                result = session.generate(params)
                assert result.token_ids == wanted and result.cached_tokens == 52
        close(engine)


def test_snapshots_are_checked(folder: Path, kept: SessionSnapshot, tmp_path: Path) -> None:
    def changed(**parts: Any) -> SessionSnapshot:
        fields = ("origin", "token_ids", "caches", "states", "position")
        return SessionSnapshot.make(**{name: getattr(kept, name) for name in fields} | parts)

    wrong = {
        r"states are \(\(2, 24\),\)": changed(states=[torch.zeros(2, 24)]),
        r"position=54 .* must be in \[1, 53\]": changed(position=54),
        r"of 0 blocks at most": changed(states=(), position=0),
        r"of 6 blocks at most": changed(position=48),
    }
    with open_toy(folder) as engine:
        for match, snapshot in wrong.items():
            with pytest.raises(ValueError, match=match):
                engine.restore_session(snapshot)
        kept.states[0][0, 3] += 1
        with pytest.raises(ValueError, match="state_0 of the session is not what was kept"):
            engine.restore_session(kept)
        close(engine)
    with (
        open_toy(folder, session_states=0) as engine,
        pytest.raises(ValueError, match=r"1 states of recurrent layers: .*session_states=0"),
    ):
        engine.restore_session(tmp_path / "session")


# Faults that the tests above must see.


def of_one_token_before(copy: StateCopy) -> StateCopy:
    return copy._replace(position=copy.position - 1)


def of_another_slot(copy: StateCopy) -> StateCopy:
    return copy._replace(slot=(copy.slot + 1) % 3)


@pytest.mark.parametrize("fault", [of_one_token_before, of_another_slot, None])
def test_faults_are_found(
    folder: Path,
    alone: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[StateCopy], StateCopy] | None,
) -> None:
    """A state of another token, or of another slot; a block that is not copied."""
    right = StateCheckpointTensors.copy

    def copy(self: StateCheckpointTensors, copies: list[Any]) -> None:
        changed: list[Any] = []
        for each in copies:
            if isinstance(each, BlockCopy):
                changed += [each] if fault else []
            elif fault is None or each.back:
                changed.append(each)
            else:
                changed.append(fault(each))
        right(self, changed)

    with open_toy(folder, speculative=NGram(k=2)) as engine, engine.session() as session:
        monkeypatch.setattr(StateCheckpointTensors, "copy", copy)
        with pytest.raises(AssertionError):
            converse(session, 0, 10, vocab_size=VOCAB, alone=alone)


# Prefixes.


def test_prompts_begin_with_the_nearest_kept_state(folder: Path, alone: Engine) -> None:
    with open_toy(folder, prefix_caching=True, session_states=16) as engine:

        def ask(prompt: list[int], cached: int) -> None:
            result = engine.generate(prompt, NINE)
            assert result.cached_tokens == cached
            assert result.token_ids == alone.generate(prompt, NINE).token_ids

        ask(LONG, 0)
        # The end of a prompt, the ends of chunks, and nothing of a reply.
        ask([*LONG, 1, 2, 3], 40)
        ask([*LONG, 1, 2, 3, 4], 43)
        ask(LONG, 32)
        ask([*LONG[:35], 60, 60], 32)
        ask([*LONG[:31], 60, 60], 16)
        ask([1, *LONG], 0)
        assert engine.counters["prefix/hits"] == 5
        # A session's turn takes what is more: the state of its own, or that of all.
        with engine.session() as session:
            session.append([*LONG, 9])
            assert session.generate(NINE).cached_tokens == 40
            session.append([1])
            context = list(session.token_ids)
            result = session.generate(NINE)
            assert result.cached_tokens == 49
            assert result.token_ids == alone.generate(context, NINE).token_ids


def test_prompts_that_come_together_share_what_the_first_leaves(
    folder: Path, alone: Engine
) -> None:
    """They were admitted before there was anything to share."""
    prompts = [[*LONG, index] for index in range(3)]
    with open_toy(folder, prefix_caching=True, prefill_buckets=(8,)) as engine:
        results = engine.generate(prompts, NINE)
        assert [result.cached_tokens for result in results] == [0, 40, 40]
        wanted = alone.generate(prompts, NINE)
        assert [one.token_ids for one in results] == [one.token_ids for one in wanted]


@pytest.mark.parametrize(("mode", "cached"), [("off", 8), ("dense", 0)])
def test_prompts_find_what_a_drafter_has_finished(
    folder: Path, alone: Engine, mode: str, cached: int
) -> None:
    """The draft model's KV of a chunk's last token is there once the next chunk is launched."""
    options = {"speculative": MODES[mode](folder), "prefill_buckets": (8,), "lookahead": 0}
    with open_toy(folder, prefix_caching=True, **options) as engine:
        request = engine.submit(LONG, NINE)
        engine.step()
        request.cancel()
        run(engine)
        result = engine.generate(LONG, NINE)
        assert result.cached_tokens == cached
        assert result.token_ids == alone.generate(LONG, NINE).token_ids
        assert engine.generate([*LONG, 1], NINE).cached_tokens == (40 if mode == "off" else 32)


# Copies.


def test_entries_are_found_by_position_and_those_before_the_first_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States of several tokens, in slots with more and with fewer entries; caches come along."""
    state = Recurrent("inputs", (3,), None, depth=3, apart=True)
    layers = [(state,), ()]

    def tensors(width: int) -> tuple[StateCheckpointTensors, Tensor, Tensor]:
        fields = recurrent_fields(layers, 2, width, torch.float32)
        buffers = StaticBuffers(fields, torch.device("cpu"), staging_blocks=2)
        cache = torch.arange(24.0).view(2, 4, 3)
        made = StateCheckpointTensors(layers, buffers, 2, [cache, cache.new_zeros(0, 4, 3)])
        return made, buffers[recurrent_field(0, "inputs")], cache

    def value(position: int) -> Tensor:
        return torch.tensor([1.0, 10.0, 100.0]) * position

    few, slots, cache = tensors(1)
    assert slots.shape == (2, 4, 3) and few.nbytes == 2 * 3 * 3 * 4
    for position in range(7, 11):
        slots[1, position % 4] = value(position)
    few.copy([StateCopy(1, 1, 10, False), BlockCopy(1, 3)])
    (kept,) = few.read(1)
    assert torch.equal(kept, torch.stack([value(position) for position in (7, 8, 9)]))
    assert torch.equal(cache[:, 3], cache[:, 1]) and cache[1, 3, 0] == 15
    many, wider, _ = tensors(5)
    wider.fill_(torch.nan)
    many.write(0, [kept])
    many.copy([StateCopy(0, 0, 10, True)])
    for position in (7, 8, 9):
        assert torch.equal(wider[0, position % 8], value(position))
    assert wider.isnan().sum() == 3 * (16 - 3)
    # The first token alone: its entry, and nothing of positions below 0.
    wider[0, 0] = value(3)
    many.copy([StateCopy(1, 0, 1, False), StateCopy(1, 1, 1, True)])
    assert torch.equal(many.read(1)[0][2], value(3)) and not many.read(1)[0][:2].any()
    assert torch.equal(wider[1, 0], value(3)) and wider[1, 1:].isnan().all()


def test_the_budget_has_the_places(folder: Path) -> None:
    with open_toy(folder, session_states=5) as engine:
        lines = {line.name: line.bytes for line in engine.memory.budget.lines}
        said = lines["states of recurrent layers (5 of sessions and prefixes)"]
        assert said == engine.runtime.state_checkpoints.nbytes == 5 * 4 * toy_family.WIDTH
        assert engine.memory.state_bytes == 4 * toy_family.WIDTH
