"""Sessions of a model whose steps emit frames: each turn is that of the whole conversation, which
keeps the KV of what was said, also when the listener interrupts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from checkpoints.csm_models import logits_of, write_csm
from engines.small_engine import assert_idle, greedy, open_engine, run
from graphengine import Engine, PromptParts, SamplingParams

HEAD, TAIL, LAST = [300, 5, 17, 8, 200, 31, 77, 12, 4], [300, 9, 41], [300, 2, 7, 7]
FRAMES, PLACES = 12, 5
SIZES: dict[str, Any] = {
    "dtype": "float32", "max_seq_len": 128, "buckets": (1, 3), "prompt_embeds": True,
    "block_size": 8,
}  # fmt: skip
Codes = NDArray[np.integer[Any]]


@pytest.fixture(scope="module")
def csm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("csm")
    return path, write_csm(path, PLACES)


def assert_greedy(model: Any, history: list[Any], codes: Codes) -> None:
    """These frames are what transformers' decoders say after text and frames."""
    frames = torch.tensor(codes).long()
    prompt = [
        torch.tensor(each).long() if isinstance(each, np.ndarray) else each for each in history
    ]
    assert torch.equal(logits_of(model, prompt, frames).argmax(-1), frames)


@pytest.mark.parametrize("steps", [1, 3])
def test_turns_go_on_after_frames(csm: tuple[Path, Any], device: str, steps: int) -> None:
    """Three turns, the KV of all whole blocks kept; also from a snapshot and from a fork."""
    path, model = csm
    with open_engine(path, device=device, **SIZES | {"steps_per_launch": steps}) as engine:
        with engine.session() as session:
            session.append(HEAD)
            first = session.generate(greedy(FRAMES, ignore_eos=True)).codes
            assert_greedy(model, HEAD, first)
            assert session.token_ids == (*HEAD, *[-1] * FRAMES)
            # The last frame has no KV yet.
            assert session.cached_tokens == (len(HEAD) + FRAMES - 1) // 8 * 8 == 16
            end = np.zeros((1, PLACES), np.int64)
            session.append(PromptParts(engine.embed_frames(end), TAIL))
            second = session.generate(greedy(FRAMES, ignore_eos=True))
            assert second.cached_tokens == 16
            history = [*HEAD, first, end, *TAIL]
            assert_greedy(model, history, second.codes)
            session.append(LAST)
            copy, fork = session.snapshot(), session.fork()
            history += [second.codes, *LAST]
            for each in (session, fork, engine.restore_session(copy)):
                third = each.generate(greedy(4, ignore_eos=True))
                assert third.cached_tokens == 32
                assert_greedy(model, history, third.codes)
                each.close()
        whole = PromptParts(
            HEAD, engine.embed_frames(first), engine.embed_frames(end), TAIL,
            engine.embed_frames(second.codes), LAST,
        )  # fmt: skip
        assert np.array_equal(engine.generate(whole, greedy(4, ignore_eos=True)).codes, third.codes)
        run(engine)
        assert_idle(engine)


def until(engine: Engine, request: Any, frames: int) -> None:
    while len(request.token_ids) < frames:
        engine.step()


@pytest.mark.parametrize("lookahead", [0, 2])
def test_an_interrupted_reply_is_what_was_said(
    csm: tuple[Path, Any], device: str, lookahead: int
) -> None:
    """No step lies between the interruption and the next turn, and a neighbour goes on."""
    path, model = csm
    with open_engine(path, device=device, **SIZES | {"lookahead": lookahead}) as engine:
        alone = engine.generate(HEAD, greedy(30, ignore_eos=True)).codes
        neighbour = engine.submit(HEAD, greedy(30, ignore_eos=True))
        session = engine.session()
        session.append(HEAD)
        turn = session.submit(greedy(30, ignore_eos=True))
        until(engine, turn, 10)
        session.interrupt()
        said = turn.result()
        assert said.finish_reason == "stop" and np.array_equal(said.codes, alone[:10])
        assert len(session) == len(HEAD) + 10 and session.cached_tokens == 16
        session.append(TAIL)
        reply = session.submit(greedy(FRAMES, ignore_eos=True))
        events = run(engine)
        (last,) = [each for each in events if each.request is turn]
        assert last.finish_reason == "stop" and not last.token_ids and last.codes is None
        assert reply.cached_tokens == 16
        assert_greedy(model, [*HEAD, said.codes, *TAIL], reply.result().codes)
        assert np.array_equal(neighbour.result().codes, alone)
        # Who has heard less of it goes back.
        session.rewind(len(session) - len(HEAD) - 4)
        session.append(TAIL)
        heard = session.generate(greedy(FRAMES, ignore_eos=True))
        assert heard.cached_tokens == 8
        assert_greedy(model, [*HEAD, said.codes[:4], *TAIL], heard.codes)
        session.close()
        run(engine)
        assert_idle(engine)


def test_an_interruption_before_the_first_frame_leaves_nothing(
    csm: tuple[Path, Any], device: str
) -> None:
    """While it waits, and in the middle of its prompt; without a turn nothing happens."""
    with open_engine(csm[0], device=device, **SIZES | {"prefill_buckets": (4,)}) as engine:
        session = engine.session()
        session.interrupt()
        session.append(HEAD)
        wanted = engine.generate(HEAD, greedy(4)).codes
        for steps in (0, 1):
            turn = session.submit(greedy(4))
            for _ in range(steps):
                engine.step()
            session.interrupt()
            assert turn.finished and not turn.token_ids and len(session) == len(HEAD)
            run(engine)
        turn = session.submit(greedy(4))
        turn.cancel()
        session.interrupt()
        run(engine)
        assert turn.finish_reason == "cancelled"
        assert np.array_equal(session.generate(greedy(4)).codes, wanted)
        session.interrupt()
        session.close()
        with pytest.raises(ValueError, match="the session is closed"):
            session.append(TAIL)


def test_streams_end_with_an_interruption(csm: tuple[Path, Any], device: str) -> None:
    with open_engine(csm[0], device=device, **SIZES) as engine:
        session = engine.session()
        session.append(HEAD)
        seen = 0
        for event in session.stream(greedy(30, ignore_eos=True)):
            seen += len(event.token_ids)
            if seen == 5 and event.finish_reason is None:
                session.interrupt()
        assert event.finish_reason == "stop" and len(session) == len(HEAD) + 5
        session.close()


def test_a_frame_that_ended_a_reply_is_kept_as_end_codes(
    csm: tuple[Path, Any], device: str
) -> None:
    """Whatever its last code, which nobody judges: so transformers' processor ends sound."""
    path, model = csm
    ending = np.zeros((3, PLACES), np.int64)
    ending[:2], ending[2, -1] = 3, 9
    with open_engine(path, device=device, **SIZES) as engine, engine.session() as session:
        session.append(HEAD)
        first = session.generate(greedy(FRAMES, forced_codes=ending))
        assert first.finish_reason == "stop" and np.array_equal(first.codes, ending)
        session.append(TAIL)
        reply = session.generate(greedy(FRAMES, ignore_eos=True)).codes
    kept = ending.copy()
    kept[2] = 0
    assert_greedy(model, [*HEAD, kept, *TAIL], reply)


def test_text_is_interrupted_too(device: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with open_engine(device=device) as engine, engine.session() as session:
        session.append("def add(a, b):")
        start = len(session)
        turn = session.submit(params)
        until(engine, turn, 6)
        session.interrupt()
        assert session.token_ids[start:] == tuple(turn.token_ids) and len(turn.token_ids) == 6
        rest = session.generate(SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        whole = engine.generate("def add(a, b):", params)
        assert (*turn.token_ids, *rest.token_ids) == whole.token_ids[:16]


def test_sessions_want_embeddings(csm: tuple[Path, Any]) -> None:
    options = SIZES | {"prompt_embeds": False}
    with (
        open_engine(csm[0], device="cpu", **options) as engine,
        pytest.raises(ValueError, match=r"emits a frame of 5 codes.*prompt_embeds=True"),
    ):
        engine.session()
