"""Sessions of a real engine: what a turn says, what is kept, saved and restored, and refused."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints.mtp_modules import write_random
from engines.conversations import SIZES, TURNS, converse
from engines.small_engine import LONG, OTHER, PROMPT, greedy, open_engine, run, sampled
from graphengine import Chat, Engine, SamplingParams, SessionSnapshot
from graphengine.speculative import MTP, DraftModel, NGram, RelaxedAcceptance, SaveHiddenStates

DOT = {"row_family": "dot"}
CASES: dict[str, dict[str, Any]] = {
    "plain-0": {"lookahead": 0},
    "plain-1": {},
    "fma": {"max_batch": 1, "row_family": "fma"},
    "eagle-0": {"speculative": MTP(k=3), "lookahead": 0},
    "eagle-1": {"speculative": MTP(k=3)},
    "tree": {"speculative": MTP(tree=[[0], [1], [0, 0], [1, 0]])},
    "ngram": {"speculative": NGram(k=3)},
    "model": {"speculative": DraftModel("the model itself", k=2)},
    "vanilla": {"speculative": MTP(k=2, style="vanilla")},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("modules"), "mimo")


def options_of(name: str, path: Path) -> dict[str, Any]:
    """Options of the named case, for a model at `path`."""
    options = SIZES | DOT | CASES[name]
    return options | ({"speculative": DraftModel(path, k=2)} if name == "model" else {})


def on(device: str) -> dict[str, Any]:
    """In float32: there a reply's KV leaves no choice between two tokens to its last bits."""
    return SIZES | {"device": device, "dtype": "float32"}


def assert_nothing_leaks(engine: Engine) -> None:
    run(engine)
    scheduler = engine.scheduler
    pool, reuse = scheduler.pool, scheduler.reuse
    assert not engine.busy and not scheduler.active and not any(scheduler.slots)
    assert pool.free == pool.count and scheduler.swap.free == scheduler.swap.count
    pool.evict(len(pool.idle))  # type: ignore[misc]
    assert pool.vacant == pool.count and not reuse.contexts and not reuse._block_of


# What a turn says.


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_says_what_requests_of_the_whole_of_it_say(name: str, small: Path) -> None:
    """Many turns with rewinds and forks, against an engine that keeps nothing."""
    options = options_of(name, small)
    family = {
        "row_family": options.get("row_family", "dot"),
        "max_batch": options.get("max_batch", 3),
    }
    with (
        open_engine(small, **options) as engine,
        open_engine(small, **SIZES | family) as alone,
        engine.session() as session,
    ):
        vocab = engine.model.config.vocab_size
        converse(session, 0, TURNS, vocab_size=vocab, alone=alone)
        assert engine.counters["sessions/reused_tokens"] > 300
        assert engine.counters["sessions/evicted"] == 0
        session.close()
        assert_nothing_leaks(engine)


def test_a_fresh_process_goes_on_where_another_stopped(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "session.safetensors"
    with open_engine(small, **SIZES) as engine, engine.session() as session:
        vocab = engine.model.config.vocab_size
        first = converse(session, 0, 11, vocab_size=vocab)
        kept = session.snapshot(file)
        assert kept.blocks * 8 == session.cached_tokens > 0
        whole = first + converse(session, 11, TURNS, vocab_size=vocab)
    code = (
        "import runpy, sys; folder, *sys.argv = sys.argv[1:]; sys.path.insert(0, folder); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script = Path(converse.__code__.co_filename)
    arguments = [str(script.parents[1]), str(script), str(small), str(file), "11"]
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert first + json.loads(done.stdout) == whole


@pytest.mark.parametrize("name", ["plain-1", "eagle-1", "tree", "model", "vanilla"])
def test_what_is_kept_is_what_a_prefill_would_write(name: str, small: Path) -> None:
    """KV of the target and of its drafter, wherever in a block the turn ends."""
    options = options_of(name, small)
    with open_engine(small, **options) as engine:
        vocab, dice = engine.model.config.vocab_size, random.Random(0)
        for tokens in range(3, 12):
            prompt = [dice.randrange(vocab) for _ in range(21)]
            with engine.session() as spoken, engine.session() as read:
                spoken.append(prompt)
                spoken.generate(sampled(tokens, seed=1))
                read.append([*spoken.token_ids, 1, 2, 3])
                read.generate(greedy(1))
                found, expected = spoken.snapshot(), read.snapshot()
                count = found.blocks
                look = engine.core.needs.tokens_after
                assert count == (21 + tokens - max(1, look)) // 8
                assert len(found.caches) == (1 if name == "plain-1" else 2)
                for ours, theirs in zip(found.caches, expected.caches, strict=True):
                    torch.testing.assert_close(ours, theirs[:, :count], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "speculative", [None, NGram(k=3), MTP(k=3)], ids=["plain", "ngram", "relaxed"]
)
def test_what_is_skipped_is_known_to_all_that_reads_tokens(device: str, speculative: Any) -> None:
    """Penalties over the prompt, n-grams of it, and thinking that began in it."""
    options = on(device) | DOT | {"speculative": speculative, "max_seq_len": 256}
    if isinstance(speculative, MTP):
        options["relaxed_acceptance"] = RelaxedAcceptance(
            topk=4, delta=0.5, begin_token_ids=(5,), end_token_ids=(6,)
        )
    asked = [
        greedy(20, repetition_penalty=1.5, logprobs=1),
        greedy(20, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.4),
        greedy(20, bad_words=("return",), stop_token_sequences=((300, 301),)),
        greedy(20),
    ]
    with open_engine(**options) as engine, open_engine(**options) as alone:
        for params in asked:
            with engine.session() as session:
                session.append([5, 9, 9, 7])
                session.append(LONG)
                session.generate(greedy(1, ignore_eos=True))
                # Somebody else leaves what it said in the slot.
                engine.generate(OTHER, greedy(3, repetition_penalty=1.3))
                expected = alone.generate(list(session.token_ids), params)
                result = session.generate(params)
                assert result.cached_tokens >= 32
                assert result.token_ids == expected.token_ids
                assert result.acceptance == expected.acceptance
                if params.logprobs is not None:
                    pairs = zip(result.logprobs or (), expected.logprobs or (), strict=True)
                    for ours, theirs in pairs:
                        assert ours.keys() == theirs.keys()
        noted = engine.counters["replays/prefill/32/note"]
        assert noted >= 3 and alone.counters["replays/prefill/32/note"] == 0
        if isinstance(speculative, NGram):
            assert engine.acceptance.accepted > 0


def test_a_request_that_asks_for_nothing_skips_without_a_replay(engine: Engine) -> None:
    with engine.session() as session:
        session.append(LONG)
        session.generate(greedy(4))
        before = dict(engine.counters)
        session.append("x")
        result = session.generate(greedy(2, ignore_eos=True))
        replays = {
            name: count - before.get(name, 0)
            for name, count in engine.counters.items()
            if name.startswith("replays/") and count != before.get(name, 0)
        }
        assert sum(count for name, count in replays.items() if "prefill" in name) == 1
        assert not any("note" in name for name in replays)
        assert result.cached_tokens == (len(session) - 4) // 8 * 8


def test_what_is_noted_is_not_recorded_as_fed(engine: Engine) -> None:
    with engine.session() as session:
        session.append(LONG)
        session.generate(greedy(4, ignore_eos=True))
        engine.recorder.start(capacity=64)
        result = session.generate(greedy(3, repetition_penalty=1.3))
        engine.recorder.stop()
        replays = engine.recorder.replays()
        assert result.cached_tokens == 32
        assert replays["prompt_tokens"].sum() == len(session) - 3 - result.cached_tokens
        names = [engine.recorder.buckets[index] for index in replays["bucket"]]
        noted = [name.endswith("/note") for name in names]
        assert sum(replays["live"][noted]) == result.cached_tokens


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    with open_engine(**SIZES, prompt_logprobs=True) as engine, engine.session() as session:
        session.append(LONG)
        session.generate(greedy(4))
        result = session.generate(greedy(3, prompt_logprobs=1))
        assert result.cached_tokens == 0 and result.prompt_logprobs is not None
        assert None not in result.prompt_logprobs[1:]
        assert session.generate(greedy(3)).cached_tokens > 0


# The ways to run a turn.


def test_streams_and_callbacks_bring_a_turns_events(engine: Engine) -> None:
    with engine.session() as session, engine.session() as other:
        for one in (session, other):
            one.append(PROMPT)
        text = "".join(event.text for event in session.stream(greedy(6, ignore_eos=True)))
        heard: list[str] = []
        request = other.submit(
            greedy(6, ignore_eos=True), on_event=lambda event: heard.append(event.text), priority=2
        )
        assert other.turn is request and request.priority == 2
        run(engine)
        assert text == "".join(heard) == request.text and other.turn is None
        assert session.token_ids == other.token_ids

        async def listen() -> str:
            return "".join(
                [event.text async for event in session.astream(greedy(4, ignore_eos=True))]
            )

        assert asyncio.run(listen()) == other.generate(greedy(4, ignore_eos=True)).text


def test_a_callback_may_begin_the_next_turn(engine: Engine) -> None:
    with engine.session() as session:
        session.append(PROMPT)
        turns = []

        def heard(event: Any) -> None:
            if event.finish_reason and len(turns) < 3:
                session.append("\n")
                turns.append(session.submit(greedy(3, ignore_eos=True), on_event=heard))

        turns.append(session.submit(greedy(3, ignore_eos=True), on_event=heard))
        run(engine)
        assert len(turns) == 3 and all(turn.finished for turn in turns)
        assert turns[2].prompt_token_ids == session.token_ids[:-3]


def test_closing_a_stream_undoes_the_turn(engine: Engine) -> None:
    with engine.session() as session:
        session.append(PROMPT)
        before = session.token_ids
        stream = session.stream(greedy(40, ignore_eos=True))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        run(engine)
        assert session.token_ids == before and session.turn is None
        assert session.generate(greedy(3)).finish_reason == "length"


def test_a_turn_that_is_cut_short_keeps_what_was_said(engine: Engine) -> None:
    with engine.session() as session:
        session.append(LONG)
        turn = session.submit(greedy(40, ignore_eos=True))
        while len(turn.token_ids) < 9:
            engine.step()
        engine.stop_callback = lambda active: [turn.id]
        run(engine)
        engine.stop_callback = None
        assert turn.finish_reason == "stop"
        assert session.token_ids == (*turn.prompt_token_ids, *turn.token_ids)
        assert session.cached_tokens == (len(session) - 1) // 8 * 8
        expected = engine.generate(list(session.token_ids), greedy(5))
        assert session.generate(greedy(5)).token_ids == expected.token_ids


def test_a_turn_that_is_stopped_while_it_is_fed_keeps_what_was_fed() -> None:
    with open_engine(**SIZES, lookahead=0) as engine, engine.session() as session:
        session.append(list(range(100)))
        turn = session.submit(greedy(5))
        engine.step()
        engine.stop_callback = lambda active: [turn.id]
        engine.step()
        engine.stop_callback = None
        run(engine)
        assert turn.finish_reason == "stop" and not turn.token_ids
        assert 32 - 8 <= session.cached_tokens <= 64 and len(session) == 100
        expected = engine.generate(list(range(100)), greedy(5))
        assert session.generate(greedy(5)).token_ids == expected.token_ids


def test_stop_tokens_and_stop_text_stay_in_the_conversation(engine: Engine) -> None:
    with engine.session() as session:
        session.append(PROMPT)
        said = session.generate(greedy(30, ignore_eos=True)).text
        session.rewind(30)
        result = session.generate(greedy(30, stop=said[4:7], ignore_eos=True))
        assert result.finish_reason == "stop" and not result.text.endswith(said[4:7])
        assert session.token_ids[-len(result.token_ids) :] == result.token_ids


# What the conversation is.


def test_text_after_other_tokens_has_no_special_ones(engine: Engine) -> None:
    assert engine.tokenizer is not None
    with engine.session() as session:
        session.append("def f", add_bos=False)
        session.append("(x):")
        plain = [
            engine.tokenizer.encode(part, add_special_tokens=False) for part in ("def f", "(x):")
        ]
        assert session.token_ids == tuple(plain[0] + plain[1])
        session.append([1, 2])
        assert session.token_ids[-2:] == (1, 2)


def test_chats_begin_a_conversation_and_update_goes_on_with_it(chat_checkpoint: Path) -> None:
    with (
        open_engine(chat_checkpoint, device="cpu", max_seq_len=256) as engine,
        engine.session() as session,
    ):
        messages = [{"role": "user", "content": "a" * 30}]
        session.append(Chat(messages=messages))
        first = session.generate(greedy(12, ignore_eos=True))
        messages += [{"role": "assistant", "content": first.text}]
        messages += [{"role": "user", "content": "and now?"}]
        with pytest.raises(ValueError, match=r"\d+ tokens stand before them: give all messages"):
            session.append(messages)
        session.update(messages)
        assert engine.tokenizer is not None
        assert list(session.token_ids) == Chat(messages=messages).token_ids(engine.tokenizer)
        expected = engine.generate(messages, greedy(8))
        second = session.generate(greedy(8))
        assert second.token_ids == expected.token_ids and second.cached_tokens >= 16
        session.update([7, 8])
        assert session.token_ids == (7, 8) and session.cached_tokens == 0


def test_a_fork_shares_its_blocks_and_goes_its_own_way(engine: Engine) -> None:
    pool = engine.scheduler.pool
    with engine.session() as session:
        session.append(LONG)
        session.generate(greedy(4, ignore_eos=True))
        idle = len(pool.idle)
        with session.fork() as fork:
            assert len(pool.idle) == idle and fork.token_ids == session.token_ids
            fork.append("a")
            session.append("b")
            ours, theirs = session.submit(greedy(6)), fork.submit(greedy(6))
            run(engine)
            assert ours.cached_tokens == theirs.cached_tokens > 0
            for turn in (ours, theirs):
                expected = engine.generate(list(turn.prompt_token_ids), greedy(6))
                assert tuple(turn.token_ids) == expected.token_ids
        assert session.cached_tokens > 0
    assert not pool.idle


# Evictions.


def test_an_evicted_session_says_so_and_goes_on(device: str) -> None:
    sizes = on(device) | {"max_batch": 1, "kv_blocks": 20}
    with open_engine(**sizes) as engine, engine.session() as session:
        session.append(LONG)
        session.generate(greedy(4, ignore_eos=True))
        assert session.cached_tokens > 0 and not session.evicted
        engine.generate(list(range(100)), greedy(40, ignore_eos=True))
        assert session.evicted and session.cached_tokens == 0
        assert engine.counters["sessions/evicted"] == 1
        assert "sessions/evicted" in str(engine.report())
        assert "evicted=True" in repr(session)
        branch = session.fork()
        assert branch.evicted and session.snapshot().blocks == 0
        session.append("\n")
        expected = engine.generate(list(session.token_ids), greedy(5))
        result = session.generate(greedy(5))
        assert result.cached_tokens == 0 and result.token_ids == expected.token_ids
        assert not session.evicted and session.cached_tokens > 0


def test_session_blocks_bound_what_is_kept() -> None:
    with open_engine(**SIZES, session_blocks=6) as engine:
        with engine.session() as first, engine.session() as second:
            for session in (first, second):
                session.append(list(range(40)))
                session.generate(greedy(2, ignore_eos=True))
            assert first.evicted and not second.evicted
            kept = second.snapshot()
            second.append(list(range(40)))
            second.generate(greedy(2, ignore_eos=True))
            # It has ten, of which the first six are kept.
            assert not second.evicted and second.cached_tokens == 48
            assert engine.counters["sessions/evicted"] == 1
            count = engine.scheduler.pool.count
            assert engine.stats()["kv"] == {
                "blocks": count, "vacant": count - 6, "idle": 6, "session_blocks": 6,
            }  # fmt: skip
            assert (
                f"KV blocks {count}: {count - 6} vacant, 6 kept by idle sessions and prefixes "
                "(at most 6)" in str(engine.report())
            )
        assert kept.blocks == 5
        with engine.restore_session(kept) as restored:
            assert restored.cached_tokens == 40
    with (
        open_engine(**SIZES, session_blocks=4) as engine,
        pytest.raises(ValueError, match="a session of 5 KV blocks exceeds session_blocks=4"),
    ):
        engine.restore_session(kept)


def test_a_session_that_is_forgotten_leaks_nothing() -> None:
    with open_engine(**SIZES, max_batch=1, kv_blocks=20) as engine:
        session = engine.session()
        session.append(LONG)
        session.generate(greedy(4))
        del session
        gc.collect()
        assert_nothing_leaks(engine)


# Snapshots.


@pytest.fixture(scope="module")
def kept() -> SessionSnapshot:
    with open_engine(**SIZES) as engine, engine.session() as session:
        session.append(LONG)
        session.generate(greedy(6, ignore_eos=True))
        return session.snapshot()


def test_a_conversation_on_a_device_is_saved_and_goes_on(device: str, tmp_path: Path) -> None:
    file = tmp_path / "session.safetensors"
    options = on(device) | DOT | {"speculative": MTP(k=3)}
    with open_engine(**options) as engine, engine.session() as session:
        vocab = engine.model.config.vocab_size
        first = converse(session, 0, 5, vocab_size=vocab)
        session.snapshot(file)
        whole = first + converse(session, 5, 9, vocab_size=vocab)
    with open_engine(**options) as other, other.restore_session(file) as restored:
        assert restored.cached_tokens > 0
        assert first + converse(restored, 5, 9, vocab_size=vocab) == whole


def test_a_snapshot_outlives_its_engine(kept: SessionSnapshot, tmp_path: Path) -> None:
    file = tmp_path / "session.safetensors"
    kept.save(file)
    read = SessionSnapshot.load(str(file))
    assert read.origin == kept.origin and read.token_ids == kept.token_ids
    assert all(map(torch.equal, read.caches, kept.caches)) and read.nbytes == kept.nbytes > 0
    # Not what the tensors hold.
    assert f"of {len(kept.token_ids)} tokens, " in repr(kept) and len(repr(kept)) < 100
    with open_engine(**SIZES) as engine:
        for source in (kept, file, str(file)):
            with engine.restore_session(source) as session:
                assert (
                    session.token_ids == kept.token_ids and session.cached_tokens == 8 * kept.blocks
                )
                expected = engine.generate(list(kept.token_ids), greedy(4))
                assert session.generate(greedy(4)).token_ids == expected.token_ids
        assert_nothing_leaks(engine)


OTHERS = [
    ({"block_size": 16}, r"block_size=8, the engine of 16"),
    ({"dtype": "bfloat16"}, r"dtype='float32', the engine of 'bfloat16'"),
    ({"prefill_buckets": (16, 32)}, r"numerics_id='[0-9a-f]+', the engine of '[0-9a-f]+'"),
    ({"speculative": MTP(k=1)}, r"caches=.*, the engine of "),
    ({"max_seq_len": 40}, r"a session of \d+ tokens exceeds max_seq_len=40"),
    ({"kv_blocks": 4}, r"a session of 5 KV blocks, but 4 of the pool's 4 are free"),
]


@pytest.mark.parametrize(("options", "message"), OTHERS)
def test_a_session_of_another_engine_is_refused(
    kept: SessionSnapshot, options: dict[str, Any], message: str
) -> None:
    with open_engine(**SIZES | options) as engine, pytest.raises(ValueError, match=message):
        engine.restore_session(kept)


def test_a_session_that_fills_max_seq_len_is_restored(kept: SessionSnapshot) -> None:
    """A turn that ends by length leaves it so; with one token more it cannot be restored."""
    with open_engine(**SIZES) as engine:
        limit = engine.memory.max_seq_len
        ids = [*kept.token_ids, *[1] * limit][:limit]
        whole = SessionSnapshot.make(kept.origin, ids, kept.caches)
        with engine.restore_session(whole) as session:
            assert len(session) == limit
            with pytest.raises(ValueError, match=f"{limit} tokens leaves no room for a new one"):
                session.generate(greedy(1))
            session.rewind(1)
            assert session.generate(greedy()).finish_reason == "length" and len(session) == limit
        longer = SessionSnapshot.make(kept.origin, [*ids, 1], kept.caches)
        with pytest.raises(ValueError, match=f"{limit + 1} tokens exceeds max_seq_len={limit}$"):
            engine.restore_session(longer)


def test_a_session_of_another_model_is_refused(kept: SessionSnapshot, small: Path) -> None:
    with (
        open_engine(small, **SIZES) as engine,
        pytest.raises(ValueError, match=r"model='[0-9a-f]{16}', the engine of '[0-9a-f]{16}'"),
    ):
        engine.restore_session(kept)


@pytest.mark.parametrize("content", [None, b"", b"no header", b"\x02\0\0\0\0\0\0\0{}"])
def test_what_is_no_snapshot_is_refused(engine: Engine, tmp_path: Path, content: Any) -> None:
    file = tmp_path / "other.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.safetensors is no snapshot of a session"):
        engine.restore_session(file)


def test_a_loaded_snapshot_is_no_longer_of_its_file(kept: SessionSnapshot, tmp_path: Path) -> None:
    """A view of the mapped file would change with it, and end the process where it is cut short."""
    file = tmp_path / "session.safetensors"
    kept.save(file)
    read = SessionSnapshot.load(file)
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert all(map(torch.equal, read.caches, kept.caches))
    os.truncate(file, 10)
    assert all(map(torch.equal, read.caches, kept.caches)) and read.token_ids == kept.token_ids


def damaged(kept: SessionSnapshot) -> Iterator[tuple[str, SessionSnapshot]]:
    """Snapshots that fit the engine in all else, and the part that is not what was kept."""
    first, *others = kept.token_ids
    yield "token_ids", replace(kept, token_ids=(first + 1, *others))
    yield "token_ids", replace(kept, token_ids=(*others, first))
    yield "token_ids", replace(kept, token_ids=(*kept.token_ids, first))
    flipped = kept.caches[0].clone()
    flipped.view(torch.int32).view(-1)[-1] ^= 1
    yield "cache_0", replace(kept, caches=(flipped,))
    yield "cache_0", replace(kept, caches=(kept.caches[0][:, 1:].contiguous(),))
    elsewhere = replace(kept.origin, numerics_id="0" * 16)
    made = SessionSnapshot.make(elsewhere, kept.token_ids, kept.caches)
    yield "origin", replace(made, origin=kept.origin)
    yield "origin", replace(kept, digests={})


def test_a_snapshot_that_was_changed_is_refused(kept: SessionSnapshot, tmp_path: Path) -> None:
    """A token, their order, one bit of the KV, a block, what it is from; in memory and in files."""
    file = tmp_path / "session.safetensors"
    with open_engine(**SIZES) as engine:
        for part, changed in damaged(kept):
            changed.save(file)
            for source in (changed, file):
                message = (
                    rf"^{part} of the session is not what was kept: its SHA-256 is [0-9a-f]{{64}}"
                )
                with pytest.raises(ValueError, match=message):
                    engine.restore_session(source)
        for wrong in ({"origin": None}, {"origin": {}}, {"digests": None}, {"digests": ()}):
            (name,) = wrong
            with pytest.raises(ValueError, match=rf"^the session's {name}=.* must be of type [OM]"):
                engine.restore_session(replace(kept, **wrong))  # type: ignore[arg-type]
        pool = engine.scheduler.pool
        assert pool.free == pool.count
        same = replace(kept, token_ids=list(kept.token_ids))  # type: ignore[arg-type]
        engine.restore_session(same).close()


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "null": ({"session": "null"}, "session=None in its metadata must be an object"),
    "number": ({"session": "5"}, "session=5 in its metadata must be an object"),
    "text": ({"session": '"x"'}, "session='x' in its metadata must be an object"),
    "list": ({"session": "[1]"}, r"session=\[1\] in its metadata must be an object"),
    "nested": ({"session": "[" * 100_000}, "RecursionError"),
    "no-json": ({"session": "{"}, "JSONDecodeError"),
    "schema": ({"schema": True}, "it has schema True, not"),
    "old": ({"schema": 2}, "it has schema 2, not 4: .* before 3 have no digests"),
    "no-digests": ({"digests": None}, "digests=None in its metadata must be an object of strings"),
    "digests": ({"digests": {"token_ids": 5}}, r"digests={'token_ids': 5} in its metadata must be"),
    "no-caches": ({"caches": []}, r"caches=\[\] in its metadata must be a list"),
    "shape": ({"caches": [5]}, r"caches=\[5\] in its metadata must be lists of integers"),
    "half": ({"caches": [[1.5]]}, r"caches=\[\[1.5\]\] in its metadata must be lists of int"),
    "size": ({"block_size": "8"}, "block_size='8' in its metadata has the wrong type"),
    "dtype": ({"dtype": None}, "dtype=None in its metadata has the wrong type"),
    "unknown": ({"other": 1}, "unexpected keyword argument 'other'"),
    "0-d": ({"cache_0": torch.tensor(1.0)}, r"cache 0 is \(\), of blocks of shape"),
    "1-d": ({"cache_0": torch.zeros(5)}, r"cache 0 is \(5,\), of blocks of shape"),
    "no-ids": ({"token_ids": torch.tensor(3)}, "not iterable"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_with_what_is_wrong(
    kept: SessionSnapshot, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "session.safetensors"
    kept.save(file)
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["session"])
        tensors = {key: opened.get_tensor(key).clone() for key in ("cache_0", "token_ids")}
    changed, message = MALFORMED[name]
    tensors |= {key: value for key, value in changed.items() if isinstance(value, torch.Tensor)}
    about |= {key: value for key, value in changed.items() if key not in tensors}
    text = changed.get("session", json.dumps(about))
    save_file(tensors, file, {"session": text})
    with pytest.raises(ValueError, match=rf"session\.safetensors is no snapshot.*{message}"):
        SessionSnapshot.load(file)


def test_a_snapshot_of_other_caches_is_refused(
    engine: Engine, small: Path, kept: SessionSnapshot
) -> None:
    cache = kept.caches[0]
    others: dict[str, dict[str, Any]] = {
        "has 0 caches, the engine 1": {"caches": ()},
        "has 2 caches, the engine 1": {"caches": (cache, cache)},
        "has None caches, the engine 1": {"caches": None},
        r"cache 0 of the session must be a tensor, not \[1\]": {"caches": ([1],)},
        r"cache 0 of the session is torch.float32 \(\)": {"caches": (torch.tensor(1.0),)},
        "cache 0 .* must be a dense tensor on the CPU .*not torch.strided on meta": {
            "caches": (cache.to("meta"),)
        },
        "cache 0 .* not torch.sparse_coo on cpu": {"caches": (cache.to_sparse(),)},
        "cache 0 .* on cpu, requires_grad=True": {"caches": (cache.clone().requires_grad_(),)},
        r"cache 0 of the session is torch.float16": {"caches": (cache.half(),)},
        "the session's token_ids=None must be a tuple": {"token_ids": None},
    }
    with open_engine(**SIZES) as other:
        for message, change in others.items():
            with pytest.raises(ValueError, match=message):
                other.restore_session(replace(kept, **change))
    with open_engine(small, **options_of("vanilla", small)) as other, other.session() as session:
        session.append([1] * 33)
        session.generate(greedy(1, ignore_eos=True))
        snapshot = session.snapshot()
        # The last of four blocks looks at two tokens after it.
        assert snapshot.blocks == 4
        with pytest.raises(ValueError, match="of 3 blocks at most"):
            other.restore_session(replace(snapshot, token_ids=snapshot.token_ids[:33]))


def test_what_a_drafter_keeps_is_of_its_weights_and_not_of_its_path(
    small: Path, tmp_path: Path
) -> None:
    moved, tuned = tmp_path / "moved", tmp_path / "tuned"
    for folder in (moved, tuned):
        shutil.copytree(small, folder)
    for file in tuned.glob("*.safetensors"):
        tensors = load_file(file)
        tensors |= {name: tensor + 1 for name, tensor in tensors.items() if ".mtp_layers." in name}
        save_file(tensors, file)
    for mode in (MTP(k=2), DraftModel(small, k=2)):
        with open_engine(small, **SIZES, speculative=mode) as engine, engine.session() as session:
            session.append(list(range(40)))
            session.generate(greedy(3))
            snapshot = session.snapshot()
        if isinstance(mode, MTP):
            other = open_engine(tuned, **SIZES, speculative=mode)
            refused = r"drafter='[0-9a-f]{16}', the engine of '[0-9a-f]{16}'"
            with other, pytest.raises(ValueError, match=refused):
                other.restore_session(snapshot)
        again = MTP(k=2) if isinstance(mode, MTP) else DraftModel(moved, k=2)
        with open_engine(moved, **SIZES, speculative=again) as engine:
            assert engine.restore_session(snapshot).cached_tokens == 40


@pytest.mark.parametrize(
    ("changed", "named"),
    [("model.layers.1.mlp.up_proj", "model"), ("model.mtp_layers.0.mlp.up_proj", "drafter")],
)
def test_packed_weights_tell_models_apart(
    small: Path, tmp_path: Path, changed: str, named: str
) -> None:
    """Two models that differ in them alone; the same weights again are the same model."""
    tuned = tmp_path / "tuned"
    shutil.copytree(small, tuned)
    (file,) = tuned.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {f"{changed}.weight": -tensors[f"{changed}.weight"]}, file)
    options = SIZES | {"quantize": "int8", "speculative": MTP(k=1)}
    with open_engine(small, **options) as engine, engine.session() as session:
        session.append(list(range(40)))
        session.generate(greedy(3))
        snapshot = session.snapshot()
    with open_engine(small, **options) as engine:
        assert engine.restore_session(snapshot).cached_tokens == 40
    refused = rf"{named}='[0-9a-f]{{16}}', the engine of '[0-9a-f]{{16}}'"
    with open_engine(tuned, **options) as other, pytest.raises(ValueError, match=refused):
        other.restore_session(snapshot)


def test_a_snapshot_of_too_many_blocks_or_strange_tokens_is_refused(
    kept: SessionSnapshot,
) -> None:
    with open_engine(**SIZES) as engine:
        short = replace(kept, token_ids=kept.token_ids[:9])
        with pytest.raises(ValueError, match="of 1 blocks at most"):
            engine.restore_session(short)
        ids = (99999, *kept.token_ids[1:])
        strange = SessionSnapshot.make(kept.origin, ids, kept.caches)
        with pytest.raises(ValueError, match="token id 99999"):
            engine.restore_session(strange)
        with pytest.raises(ValueError, match="source=7 must be a SessionSnapshot"):
            engine.restore_session(7)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="7 is no path of a snapshot"):
            SessionSnapshot.load(7)  # type: ignore[arg-type]


def test_a_file_that_cannot_be_written_is_an_os_error(engine: Engine, tmp_path: Path) -> None:
    with engine.session() as session:
        session.append(PROMPT)
        with pytest.raises(
            OSError, match=r"cannot be written to .*: there is no folder '.*missing'"
        ):
            session.snapshot(tmp_path / "missing" / "file")
        with pytest.raises(OSError, match=r"cannot be written to .*: it is a folder"):
            session.snapshot(tmp_path)
        for wrong in ("", "\0", tmp_path, "~nobody-of-this-name/file"):
            with pytest.raises(OSError, match="the session cannot be written to"):
                session.snapshot(wrong)
            with pytest.raises(ValueError, match="is no snapshot of a session"):
                engine.restore_session(wrong)
        with pytest.raises(ValueError, match="path=5 must be that of a file"):
            session.snapshot(5)  # type: ignore[arg-type]
        assert session.snapshot(tmp_path / "file").blocks == 0
        assert [file.name for file in tmp_path.iterdir()] == ["file"]


# What is refused.


def test_a_turn_at_a_time(engine: Engine, tmp_path: Path) -> None:
    with engine.session() as session:
        session.append(PROMPT)
        turn = session.submit(greedy(30, ignore_eos=True))
        engine.step()
        before = session.token_ids
        calls = [
            lambda: session.submit(greedy(2)),
            lambda: session.generate(greedy(2)),
            lambda: session.append("x"),
            lambda: session.update("x"),
            lambda: session.rewind(1),
            lambda: session.fork(),
            lambda: session.snapshot(tmp_path / "none"),
        ]
        for call in calls:
            with pytest.raises(
                ValueError, match=f"is under way, request {turn.id}: it must finish"
            ):
                call()
        assert session.token_ids == before and session.turn is turn
        session.close()
        run(engine)
        assert turn.finish_reason == "cancelled"
        with engine.session() as other:
            other.append("x")
            late = other.submit(greedy(8))
            late.cancel()
            message = f"under way, request {late.id}: it is cancelled at the next step"
            with pytest.raises(ValueError, match=message):
                other.append("y")
            engine.step()
            other.append("y")
        for call in calls:
            with pytest.raises(ValueError, match="the session is closed"):
                call()
        session.close()


def test_wrong_arguments_are_refused_with_the_limits(engine: Engine) -> None:
    with engine.session() as session:
        with pytest.raises(ValueError, match="the session is empty"):
            session.generate()
        session.append([1, 2, 3])
        for wrong in (-1, 4, 1.0, True, None):
            with pytest.raises(ValueError, match=r"n_tokens=.* must be in \[0, 3\]"):
                session.rewind(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="add_bos=True, but 3 tokens are in front"):
            session.append("x", add_bos=True)
        with pytest.raises(ValueError, match="add_bos=True is for the `append` of a session"):
            session.generate(SamplingParams(add_bos=True))
        with pytest.raises(ValueError, match="params must be SamplingParams, not 3"):
            session.generate(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prompt of 125 tokens after 3 of the session leaves"):
            session.append([1] * 125)
        for wrong_prompt in ("", [], [99999], 5, [{"role": "user", "content": "x"}]):
            with pytest.raises(ValueError, match=r"empty|outside|text, token ids|chat messages"):
                session.append(wrong_prompt)  # type: ignore[arg-type]
        assert session.token_ids == (1, 2, 3)
        session.append([1] * 124)
        assert session.generate(greedy(None, ignore_eos=True)).finish_reason == "length"
        with pytest.raises(
            ValueError, match="128 tokens leaves no room for a new one in max_seq_len"
        ):
            session.submit()
        session.rewind(1)
        session.generate()


def test_a_closed_engine_says_so() -> None:
    engine = open_engine(**SIZES)
    session = engine.session()
    session.append(PROMPT)
    session.generate(greedy(8, ignore_eos=True))
    assert session.cached_tokens > 0
    turn = session.submit(greedy(20))
    engine.step()
    engine.close()
    assert turn.finish_reason == "cancelled" and len(session) == len(session.token_ids) > 0
    assert (session.cached_tokens, session.evicted) == (0, False)
    for call in (session.generate, session.fork, session.snapshot, engine.session):
        with pytest.raises(ValueError, match="the engine is closed"):
            call()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.restore_session("x")
    session.close()


def test_an_engine_that_saves_hidden_states_has_no_sessions(tmp_path: Path) -> None:
    mode = SaveHiddenStates(tmp_path)
    with (
        open_engine(device="cpu", speculative=mode) as engine,
        pytest.raises(ValueError, match="needs whole prompts: it has no sessions"),
    ):
        engine.session()
    with pytest.raises(ValueError, match="prefix_caching=True, but speculative=SaveHiddenStates"):
        open_engine(device="cpu", speculative=mode, prefix_caching=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session_blocks": -1}, "session_blocks=-1 must not be negative"),
        ({"session_blocks": 1.5}, "session_blocks=1.5 must be an integer"),
        ({"prefix_caching": 1}, "prefix_caching=1 must be True or False"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(device="cpu", **options)


# Prefixes of other requests.


@pytest.fixture
def caching() -> Iterator[Engine]:
    with open_engine(**SIZES, prefix_caching=True) as engine:
        yield engine


def test_a_reused_prefix_gives_what_the_same_chunk_cuts_give_unshared(caching: Engine) -> None:
    """To the bit: log-probabilities are equal, too."""
    dice = random.Random(3)
    head = [dice.randrange(4000) for _ in range(61)]
    asked = sampled(8, seed=1, logprobs=3)
    caching.generate(head, greedy(1))
    for tail in (1, 5, 30):
        prompt = head + [dice.randrange(4000) for _ in range(tail)]
        result = caching.generate(prompt, asked)
        assert result.cached_tokens == 56
        with open_engine(**SIZES) as alone, alone.session() as session:
            # A turn of the head, without its reply, leaves the cuts of the request that reused it.
            session.append(head)
            session.generate(greedy(1))
            session.update(prompt)
            cut = session.generate(asked)
            assert cut.cached_tokens == 56
        assert result.token_ids == cut.token_ids and result.logprobs == cut.logprobs


def test_many_prompts_of_few_heads_share_them(device: str) -> None:
    dice = random.Random(5)
    heads = [[dice.randrange(4000) for _ in range(40)] for _ in range(3)]
    tails = [[dice.randrange(4000) for _ in range(dice.randrange(1, 30))] for _ in range(18)]
    prompts = [dice.choice(heads) + tail for tail in tails]
    asked = [sampled(6, seed=index) for index in range(len(prompts))]
    for index in range(0, len(asked), 4):
        asked[index] = greedy(6, repetition_penalty=1.4)
    with open_engine(**on(device), prefix_caching=True, kv_blocks=80) as engine:
        # All at once: who is fed later finds what was fed before.
        found = engine.generate(prompts, asked)
        counters = dict(engine.counters)
        assert_nothing_leaks(engine)
    with open_engine(**on(device)) as alone:
        expected = alone.generate(prompts, asked)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
    hits = [result.cached_tokens for result in found]
    assert sorted(hits)[:3] == [0, 0, 0] and min(sorted(hits)[3:]) >= 40
    assert counters["prefix/queries"] == 18 and counters["prefix/hits"] == 15
    assert counters["prefix/hit_tokens"] == sum(hits)
    assert counters["prefix/queried_tokens"] == sum(map(len, prompts))
    assert alone.counters["prefix/queries"] == 0


@pytest.mark.parametrize("name", ["eagle-1", "ngram", "model", "vanilla"])
def test_drafters_share_prefixes_too(name: str, small: Path) -> None:
    """Their caches hold what they would: as many drafts are accepted as without sharing."""
    options = options_of(name, small)
    with (
        open_engine(small, **options, prefix_caching=True) as engine,
        open_engine(small, **options) as alone,
    ):
        vocab, dice = engine.model.config.vocab_size, random.Random(1)
        head = [dice.randrange(vocab) for _ in range(40)]
        for tail in ([], [3], [4], [4, 5, 6, 7, 8], [4, 5, 6, 7, 8, 9, 10, 11, 12]):
            ours, theirs = (
                one.generate(head + tail, greedy(16, ignore_eos=True)) for one in (engine, alone)
            )
            assert ours.token_ids == theirs.token_ids
            assert ours.acceptance == theirs.acceptance
            if tail:
                assert ours.cached_tokens >= (40 if len(tail) > 5 else 32)
        assert engine.counters["prefix/hits"] == 4


def test_a_sessions_first_turn_uses_prefixes_and_leaves_some(caching: Engine) -> None:
    caching.generate(LONG, greedy(1))
    with caching.session() as session:
        session.append(LONG)
        first = session.generate(greedy(9, ignore_eos=True))
        assert first.cached_tokens >= 24
        assert caching.counters["sessions/reused_tokens"] == 0
        session.append("\n")
        assert session.generate(greedy(3)).cached_tokens > first.cached_tokens
        assert caching.counters["prefix/queries"] == 2
