"""Text that streams into frames while they are spoken: which frame each row is added to, and that
the frames are those of transformers with the same rows there.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints.talker_models import (
    END,
    FIRST_CODES,
    HIDDEN,
    frames_by_hand,
    frames_of,
    write_talker,
)
from engines.small_engine import assert_idle, open_engine, run
from extent import extent
from graphengine import CodeSampling, Engine, Feed, Request, SamplingParams

FRAMES = 14
SIZES: dict[str, Any] = {"dtype": "float32", "prompt_embeds": True, "max_seq_len": 96}


def rows_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1000 * seed + count))


PAD = rows_of(1, seed=99)[0]
PROMPT = rows_of(7)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("talker")
    return path, write_talker(path, 3)


def asked(rows: Tensor | None = None, frames: int = FRAMES, **options: Any) -> SamplingParams:
    feed = Feed(PAD, rows)
    return SamplingParams(max_tokens=frames, feed=feed, ignore_eos=True, **options)


def greedy(rows: Tensor | None = None, frames: int = FRAMES, **options: Any) -> SamplingParams:
    return asked(rows, frames, temperature=0.0, **options)


def placed(request: Request, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The text with the rows at the frames that the engine gave them to, and the pad."""
    text = PAD.repeat(1 + max(request.fed_frames, default=-1), 1)
    text[list(request.fed_frames)] = rows
    return text, PAD


def expected(model: Any, prompt: Tensor, request: Request, rows: Tensor) -> Any:
    """transformers' frames with the rows at the frames that the engine gave them to."""
    return frames_of(model, prompt, *placed(request, rows), len(request.token_ids)).numpy()


def step_until(engine: Engine, request: Request, frames: int) -> None:
    while len(request.token_ids) < frames:
        engine.step()


LAUNCHES = [(0, 1), (1, 1), (2, 1), (1, 3)]


@pytest.mark.parametrize(("lookahead", "steps"), LAUNCHES)
def test_rows_count_from_the_first_frame_that_is_not_launched(
    talker: tuple[Path, Any], device: str, lookahead: int, steps: int
) -> None:
    """A row that comes late changes no frame that was launched, and is not lost."""
    path, model = talker
    options = {"lookahead": lookahead, "steps_per_launch": steps}
    rows = rows_of(6, seed=1)
    with open_engine(path, device=device, **SIZES | options) as engine:
        request = engine.submit(PROMPT, greedy(rows[:2]))
        step_until(engine, request, 5)
        read = len(request.token_ids)
        first = engine.feed(request, rows[2:5])
        # What was read is launched. Steps are launched only in `step()`.
        assert read - 1 <= first <= read + (lookahead + 1) * steps
        assert request.fed_frames == (0, 1, *range(first, first + 3))
        # The next rows follow these, though nothing was launched since.
        assert engine.feed(request, rows[5:]) == first + 3
        run(engine)
        assert_idle(engine)
        assert engine.counters["feed/late"] == first - 2
        in_time = [frame for frame in request.fed_frames if frame < FRAMES - 1]
        assert request.padded_frames == FRAMES - 1 - len(in_time)
        wanted = expected(model, PROMPT, request, rows)
        assert np.array_equal(request.result().codes, wanted)
        # The rows at other frames give other codes: the comparison above can fail.
        plain = frames_of(model, PROMPT, rows, PAD, FRAMES).numpy()
        assert not np.array_equal(wanted, plain)


def test_rows_that_come_in_parts_and_in_time_are_those_of_a_whole(
    talker: tuple[Path, Any], device: str
) -> None:
    """Before the prompt is fed, while it is, and one by one while the reply is spoken."""
    path, model = talker
    rows = rows_of(12, seed=1)
    wanted = frames_of(model, PROMPT, rows, PAD, FRAMES).numpy()
    with open_engine(path, device=device, **SIZES | {"prefill_buckets": (4,)}) as engine:
        request = engine.submit(PROMPT, greedy(rows[:1]))
        assert engine.feed(request, rows[1:3]) == 1
        engine.step()
        assert not request.token_ids
        given = 3
        while not request.finished:
            if given < len(rows):
                # A caller's memory may change as soon as the call returns.
                row = rows[given : given + 1].clone()
                assert engine.feed(request, row) == given
                row.fill_(torch.nan)
                given += 1
            engine.step()
        assert request.fed_frames == tuple(range(12))
        assert request.padded_frames == 1 and engine.counters["feed/late"] == 0
        assert np.array_equal(request.result().codes, wanted)


def test_several_requests_are_fed_at_their_own_times(talker: tuple[Path, Any], device: str) -> None:
    """In a pool that is too small for all, so that they pause between rows."""
    path, model = talker
    prompts = [rows_of(30), rows_of(21), rows_of(12)]
    texts = [rows_of(9, seed=seed) for seed in (1, 2, 3)]
    blocks = sum(-(-len(prompt) // 8) for prompt in prompts) + 2
    pool = {"kv_blocks": blocks, "swap_blocks": 2 * blocks, "max_seq_len": 64, "max_batch": 3}
    with open_engine(path, device=device, **SIZES | pool) as engine:
        requests = [engine.submit(prompt, greedy(frames=24)) for prompt in prompts]
        given = [0, 0, 0]
        for turn in range(200):
            which = turn % 3
            request, done = requests[which], given[which]
            if not request.finished and done < 9 and turn % 4:
                engine.feed(request, texts[which][done : done + 2])
                given[which] = min(9, done + 2)
            engine.step()
        assert not engine.busy and engine.counters["pauses"] >= 1
        for prompt, text, request in zip(prompts, texts, requests, strict=True):
            wanted = expected(model, prompt, request, text)
            assert np.array_equal(request.result().codes, wanted)
        assert engine.counters["feed/late"] > 0


def test_samples_of_a_prompt_are_fed_apart(talker: tuple[Path, Any], device: str) -> None:
    path, model = talker
    rows = rows_of(8, seed=1)
    with open_engine(path, device=device, **SIZES) as engine:
        one, other = engine.submit_many(PROMPT, greedy(rows[:2]), n=2)
        engine.feed(one, rows[2:])
        run(engine)
        for request, text in ((one, rows), (other, rows[:2])):
            wanted = frames_of(model, PROMPT, text, PAD, FRAMES).numpy()
            assert np.array_equal(request.result().codes, wanted)


def test_draws_do_not_depend_on_when_rows_came(talker: tuple[Path, Any], device: str) -> None:
    path, _ = talker
    rows = rows_of(8, seed=1)
    params = asked(rows, temperature=0.9, codes=CodeSampling(top_k=4), seed=5)
    late = asked(temperature=0.9, codes=CodeSampling(top_k=4), seed=5)
    with open_engine(path, device=device, **SIZES) as engine:
        wanted = engine.generate(PROMPT, params).codes
        request = engine.submit(PROMPT, late)
        for row in rows:
            engine.feed(request, row[None])
            engine.step()
        run(engine)
        assert request.fed_frames == tuple(range(8))
        assert np.array_equal(request.result().codes, wanted)


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
def test_options_of_tokens_are_for_first_codes(talker: tuple[Path, Any], device: str) -> None:
    """As transformers' talker has them: suppressed ids, a repetition penalty, a least length."""
    path, model = talker
    rows = rows_of(4, seed=1)
    plain = frames_of(model, PROMPT, rows, PAD, FRAMES)
    suppressed = [i for i in range(40, FIRST_CODES) if i != END]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {"allowed_token_ids": [*range(40), END]},
            {"suppress_tokens": suppressed},
        ),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    ]
    with open_engine(path, device=device, **SIZES) as engine:
        for options, of_transformers in cases:
            wanted = frames_of(model, PROMPT, rows, PAD, FRAMES, **of_transformers)
            assert not torch.equal(wanted, plain)
            found = engine.generate(PROMPT, greedy(rows, **options)).codes
            assert np.array_equal(found, wanted.numpy()), options
        stop = int(plain[4, 0])
        first = plain[:, 0].tolist().index(stop)
        stopped = engine.generate(PROMPT, greedy(rows, stop_token_ids=[stop]))
        assert np.array_equal(stopped.codes, plain[: first + 1]) and stopped.stop_reason == stop
        with pytest.raises(ValueError, match=r"repetition_penalty=1.7 beside logprobs=0: log-pro"):
            engine.submit(PROMPT, greedy(rows, logprobs=0, repetition_penalty=1.7))
        for name, value in {"forced_tokens": True, "bad_words": [[3]]}.items():
            with pytest.raises(ValueError, match=f"{name}=.*each step of this model emits a frame"):
                engine.submit(PROMPT, greedy(**{name: value}))


def test_given_codes_go_on_with_the_text(talker: tuple[Path, Any], device: str) -> None:
    """A reply that was cut off, and what its codes score: as they did when they were drawn."""
    path, _ = talker
    rows = rows_of(9, seed=1)
    params = asked(rows, temperature=0.9, seed=3, logprobs=0)
    with open_engine(path, device=device, **SIZES) as engine:
        whole = engine.generate(PROMPT, params)
        again = engine.generate(PROMPT, replace(params, forced_codes=whole.codes[:6]))
        assert np.array_equal(again.codes, whole.codes)
        assert whole.codes_logprobs.shape == (FRAMES, 3)
        assert np.isfinite(whole.codes_logprobs).all() and (whole.codes_logprobs <= 0).all()
        assert np.array_equal(again.codes_logprobs, whole.codes_logprobs)
        for codes, message in (
            ([[52, 37, 0]], r"forced_codes\[0\]\[1\]=37: a codebook of this model has 37 codes"),
            ([[53, 0, 0]], r"forced_codes\[0\]\[0\]=53: a codebook of this model has 53 codes"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit(PROMPT, greedy(rows, forced_codes=codes))


def test_calls_that_are_refused(talker: tuple[Path, Any]) -> None:
    path, _ = talker
    with open_engine(path, device="cpu", **SIZES) as engine, open_engine(device="cpu") as tokens:
        request = engine.submit(PROMPT, greedy(frames=3))
        for rows, message in (
            (rows_of(2)[:, :70], r"embeds of shape \[2, 70\]: the model takes \[n, 72\]"),
            (rows_of(1)[0], r"embeds of shape \[72\] and torch.float32 must be of floating point"),
            (rows_of(2).long(), r"the model takes \[n, 72\], not torch.int64"),
            (rows_of(2) / 0, "row 0 is not finite"),
            ([[0.0] * HIDDEN], "must be a tensor"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.feed(request, rows)  # type: ignore[arg-type]
        assert request.fed_frames == () and engine.feed(request, rows_of(0)) == 0
        with pytest.raises(ValueError, match="stream into the frames of this model: it has no ses"):
            engine.session()
        with pytest.raises(ValueError, match="request=1 must be a Request"):
            engine.feed(1, rows_of(1))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="feed is for models that add an embedding to each"):
            tokens.feed(request, rows_of(1))
        run(engine)
        with pytest.raises(ValueError, match=r"request 1 has ended \('length'\): nothing streams"):
            engine.feed(request, rows_of(1))
        with open_engine(path, device="cpu", **SIZES) as another:
            mine = another.submit(PROMPT, greedy(frames=3))
            with pytest.raises(ValueError, match=r"request 1 is of another engine"):
                engine.feed(mine, rows_of(1))
            mine.cancel()
            run(another)


def test_the_budget_has_the_rings(talker: tuple[Path, Any]) -> None:
    """Sixteen rows and the pad for each slot, or as many rows as a launch has steps."""
    for steps, ring in ((1, 16), (20, 20)):
        options = {"steps_per_launch": steps, "max_batch": 3}
        with open_engine(talker[0], device="cpu", **SIZES | options) as engine:
            lines = {line.name: line.bytes for line in engine.memory.budget.lines}
            assert lines["embeddings of frames"] == 3 * ((ring + 1) * HIDDEN * 4 + 4)


@pytest.mark.parametrize("seed", range(extent(1, 40)))
def test_any_timing_gives_the_frames_of_its_rows(
    talker: tuple[Path, Any], device: str, seed: int
) -> None:
    """Requests come, are fed and are cancelled at random, with any lookahead."""
    path, model = talker
    dice = random.Random(seed)
    options = {
        "lookahead": dice.randrange(3),
        "steps_per_launch": dice.choice((1, 1, 2, 5, 17)),
        "max_batch": 2,
        "kv_blocks": 14,
        "swap_blocks": 28,
    }
    asked_for: list[tuple[Tensor, Request, list[Tensor]]] = []
    with open_engine(path, device=device, **SIZES | options) as engine:
        for turn in range(60):
            if len(asked_for) < 6 and turn % 7 == 0:
                prompt = rows_of(dice.randrange(1, 30), seed=50 + turn)
                first = rows_of(dice.randrange(4), seed=turn)
                params = greedy(first, dice.randrange(2, 36))
                asked_for.append((prompt, engine.submit(prompt, params), [first]))
            for _, request, given in asked_for:
                if not request.finished and dice.random() < 0.3:
                    given.append(rows_of(dice.choice((1, 1, 2, 18)), seed=100 + turn))
                    engine.feed(request, given[-1])
            if dice.random() < 0.05 and asked_for and not asked_for[-1][1].finished:
                asked_for.pop()[1].cancel()
            engine.step()
        run(engine)
        assert_idle(engine)
    for prompt, request, given in asked_for:
        rows = torch.cat(given)
        wanted = frames_by_hand(model, prompt, *placed(request, rows), len(request.token_ids))
        assert np.array_equal(request.result().codes, wanted.numpy())
