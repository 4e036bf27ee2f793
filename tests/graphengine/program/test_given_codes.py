"""Codes that a request gives for its first frames: they stand, the rest follows from them, and
their log-probabilities are those of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from checkpoints.csm_models import logits_of, write_csm
from engines.small_engine import assert_idle, greedy, open_engine, run
from graphengine import Engine, PromptParts, SamplingParams

PROMPT = [300, 5, 17, 8, 200, 31, 77]
FRAMES, PLACES, CODES = 6, 5, 37
SIZES: dict[str, Any] = {
    "dtype": "float32", "max_seq_len": 64, "buckets": (1, 3), "prompt_embeds": True,
}  # fmt: skip
Codes = NDArray[np.integer[Any]]


@pytest.fixture(scope="module")
def csm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("csm")
    return path, write_csm(path, PLACES)


@pytest.fixture
def engine(csm: tuple[Path, Any], device: str) -> Iterator[Engine]:
    with open_engine(csm[0], device=device, **SIZES) as opened:
        yield opened
        assert_idle(opened)


def some_codes(frames: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(1, CODES, (frames, PLACES))


def log_softmax(model: Any, codes: Codes) -> Any:
    """[frames, K, V] of these frames after `PROMPT`."""
    return logits_of(model, PROMPT, torch.tensor(codes).long()).log_softmax(-1)


def test_known_frames_are_scored(csm: tuple[Path, Any], engine: Engine) -> None:
    known = some_codes(FRAMES)
    params = greedy(FRAMES, forced_codes=known, logprobs=0, ignore_eos=True)
    result = engine.generate(PROMPT, params)
    assert np.array_equal(result.codes, known)
    index = torch.tensor(known)[..., None]
    wanted = log_softmax(csm[1], known).gather(-1, index)[..., 0].numpy()
    np.testing.assert_allclose(result.codes_logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 3])
def test_free_codes_follow_from_given_ones(csm: tuple[Path, Any], device: str, steps: int) -> None:
    """Greedy codes among given ones are the most probable ones after them, also in later frames;
    neighbours without given codes are not changed, and neither is the next request in the slot.
    """
    given = some_codes(4)
    given[np.random.default_rng(5).random(given.shape) < 0.5] = -1
    given[1], given[3, 0] = -1, 3
    options = SIZES | {"steps_per_launch": steps}
    with open_engine(csm[0], device=device, **options) as engine:
        alone = engine.generate(PROMPT, greedy(FRAMES, ignore_eos=True)).codes
        free, bound = engine.generate(
            [PROMPT] * 2,
            [
                greedy(FRAMES, ignore_eos=True),
                greedy(FRAMES, ignore_eos=True, forced_codes=given),
            ],
        )
        after = engine.generate(PROMPT, greedy(FRAMES, ignore_eos=True)).codes
    assert np.array_equal(free.codes, alone) and np.array_equal(after, alone)
    found = bound.codes
    fixed = np.full(found.shape, -1)
    fixed[:4] = given
    best = log_softmax(csm[1], found).argmax(-1).numpy()
    assert np.array_equal(found, np.where(fixed >= 0, fixed, best))
    assert (found != alone).any(axis=1)[1:].all()


def test_a_cut_off_reply_goes_on(engine: Engine) -> None:
    """Forced or as embeddings in the prompt, what was said leads to what would have been said."""
    params: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "seed": 7, "ignore_eos": True}
    whole = engine.generate(PROMPT, SamplingParams(max_tokens=2 * FRAMES, **params)).codes
    said = whole[:FRAMES]
    going_on = SamplingParams(max_tokens=2 * FRAMES, forced_codes=said, **params)
    assert np.array_equal(engine.generate(PROMPT, going_on).codes, whole)
    # The noise is that of the position, so a prompt with the frames leads to the same ones.
    prompt = PromptParts(PROMPT, engine.embed_frames(said))
    rest = engine.generate(prompt, SamplingParams(max_tokens=FRAMES, **params)).codes
    assert np.array_equal(rest, whole[FRAMES:])
    draws = engine.generate(PROMPT, SamplingParams(max_tokens=2 * FRAMES, **params | {"seed": 8}))
    assert not np.array_equal(draws.codes, whole)


def test_requests_with_given_codes_pause_and_are_samples(
    csm: tuple[Path, Any], device: str
) -> None:
    given = some_codes(20)
    pool = {"kv_blocks": 6, "swap_blocks": 12, "max_seq_len": 48}
    with open_engine(csm[0], device=device, **SIZES | pool) as engine:
        requests = engine.submit_many(PROMPT, greedy(24, forced_codes=given, ignore_eos=True), n=2)
        run(engine)
        assert engine.counters["pauses"] >= 1
        codes = [request.result().codes for request in requests]
    assert all(np.array_equal(each[:20], given) for each in codes)
    assert np.array_equal(*codes)


def test_a_given_frame_of_end_codes_ends_a_request(engine: Engine) -> None:
    given = some_codes(4)
    given[2, :-1] = 0
    result = engine.generate(PROMPT, greedy(FRAMES, forced_codes=given))
    assert result.finish_reason == "stop" and np.array_equal(result.codes, given[:3])
    longer = engine.generate(PROMPT, greedy(FRAMES, forced_codes=given, ignore_eos=True))
    assert len(longer.codes) == FRAMES and np.array_equal(longer.codes[:4], given)


def test_what_is_refused(engine: Engine) -> None:
    for codes, message in (
        (
            some_codes(3)[:, :4],
            r"of shape \[3, 4\]: a frame of this model has 5 codes",
        ),
        (
            [[1] * 5, [1, 2, 37, 4, 5]],
            r"\[1\]\[2\]=37: a codebook of this model has 37",
        ),
        (some_codes(FRAMES + 1), "of 7 frames: max_tokens and max_seq_len leave room for 6"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(PROMPT, greedy(FRAMES, forced_codes=codes))
    for given, message in (
        ([[1, -2]], r"forced_codes\[0\]\[1\]=-2 must be a code, or -1 for one that is drawn"),
        ([[0.5]], r"must be integers \[frames, codes of a frame\], not float64 \[1, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(forced_codes=given)
    with open_engine(device="cpu") as other:
        message = r"forced_codes=ForcedCodes\(shape=\(1, 2\)\) is for models whose"
        with pytest.raises(ValueError, match=message):
            other.submit("x", SamplingParams(forced_codes=[[1, 2]]))


def test_they_are_compared_by_their_codes() -> None:
    tensor = torch.tensor([[1, -1], [2, 3]])
    one, other = SamplingParams(forced_codes=tensor), SamplingParams(forced_codes=tensor.tolist())
    assert one == other and one != SamplingParams(forced_codes=[[1, -1]])
    tensor.zero_()
    assert one == other
