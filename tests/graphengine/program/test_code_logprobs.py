"""Log-probabilities of codes are those of transformers' logits, before or after the filters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints.csm_models import logits_of, write_csm
from engines.small_engine import open_engine, run
from graphengine import CodeSampling, Engine, SamplingParams
from graphengine.kernels.sample.sampling import kept_reference

PROMPT = [300, 5, 17, 8, 200, 31, 77]
FRAMES, PLACES = 6, 5
SIZES: dict[str, Any] = {"dtype": "float32", "max_seq_len": 64, "buckets": (1, 2, 3)}
CODES = CodeSampling(temperature=(0.5, 0.0, 2.0, 1.0), top_k=(-1, 2, 5, 0), top_p=(1, 1, 1, 0.6))
DRAWN = {"temperature": 1.3, "top_k": 4, "seed": 5, "codes": CODES}


@pytest.fixture(scope="module")
def csm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("csm")
    return path, write_csm(path, PLACES)


@pytest.fixture
def engine(csm: tuple[Path, Any], device: str) -> Iterator[Engine]:
    sizes = SIZES | {"logprobs_mode": "sampled_logprobs"}
    with open_engine(csm[0], device=device, **sizes) as opened:
        yield opened


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": FRAMES, "ignore_eos": True, "logprobs": 0} | options)


def chosen(logits: Tensor, codes: Any) -> Any:
    """[frames, K]: log-softmax of these logits at the codes."""
    index = torch.tensor(codes).long()[..., None]
    return logits.log_softmax(-1).gather(-1, index)[..., 0].numpy()


def drawn_from(logits: Tensor) -> Tensor:
    """The logits of what `DRAWN` draws from."""
    left = torch.full_like(logits, -torch.inf)
    for place in range(PLACES):
        temperature = (1.3, *CODES.temperature)[place]
        top_k, top_p = (4, *CODES.top_k)[place], (1, *CODES.top_p)[place]
        for frame, row in enumerate(logits[:, place]):
            if not temperature:
                left[frame, place] = row
                continue
            filters = np.int32(max(top_k, 0)), np.float32(top_p), np.float32(0), np.float32(0)
            scaled, kept = kept_reference(row.numpy(), np.float32(temperature), *filters)
            left[frame, place][torch.from_numpy(kept)] = torch.from_numpy(scaled[kept])
    return left


def test_they_are_those_of_transformers(csm: tuple[Path, Any], engine: Engine) -> None:
    """Of greedy and of drawn codes side by side, raw and as they are drawn."""
    asked = [
        params(temperature=0.0),
        params(**DRAWN, logprobs_mode="raw_logprobs"),
        params(**DRAWN, logprobs_mode="sampled_logprobs"),
    ]
    greedy, raw, sampled = engine.generate([PROMPT] * 3, asked)
    assert np.array_equal(raw.codes, sampled.codes)
    for result in (greedy, raw):
        logits = logits_of(csm[1], PROMPT, torch.tensor(result.codes).long())
        assert result.codes_logprobs.dtype == np.float32
        np.testing.assert_allclose(result.codes_logprobs, chosen(logits, result.codes), atol=1e-4)
    logits = drawn_from(logits_of(csm[1], PROMPT, torch.tensor(sampled.codes).long()))
    wanted = chosen(logits, sampled.codes)
    np.testing.assert_allclose(sampled.codes_logprobs, wanted, atol=1e-4)
    assert np.abs(wanted - raw.codes_logprobs).max() > 0.1
    assert raw.logprobs is None and raw.cumulative_logprob == pytest.approx(
        float(raw.codes_logprobs.astype(np.float64).sum())
    )
    # Codes that are drawn from all codes at temperature 1 have the same ones either way.
    usual = params(seed=3, temperature=1.0)
    logits = logits_of(csm[1], PROMPT, torch.tensor(engine.generate(PROMPT, usual).codes).long())
    found = engine.generate(PROMPT, usual)
    np.testing.assert_allclose(found.codes_logprobs, chosen(logits, found.codes), atol=1e-4)


def test_only_those_who_ask_get_them(engine: Engine) -> None:
    """Events and results have them, and neighbours and buckets change no bit."""
    alone = engine.generate(PROMPT, params(**DRAWN))
    requests = [
        engine.submit(PROMPT, params(**DRAWN)),
        engine.submit(PROMPT, params(**DRAWN, logprobs=None)),
    ]
    events = [event for event in run(engine) if event.token_ids]
    asked, other = (request.result() for request in requests)
    assert other.codes_logprobs is None and np.array_equal(asked.codes, other.codes)
    assert np.array_equal(asked.codes_logprobs, alone.codes_logprobs)
    of_events = [each.codes_logprobs for each in events if each.request is requests[0]]
    assert of_events == [tuple(row) for row in asked.codes_logprobs.tolist()]
    assert all(each.codes_logprobs is None for each in events if each.request is requests[1])
    written = json.loads(json.dumps(asked.to_dict()))
    assert written["codes_logprobs"] == asked.codes_logprobs.tolist()
    assert written["logprobs"] is None
    assert other.to_dict()["codes_logprobs"] is None


def test_launches_of_several_steps_have_them_too(csm: tuple[Path, Any], engine: Engine) -> None:
    wanted = engine.generate(PROMPT, params(**DRAWN)).codes_logprobs
    options = SIZES | {"logprobs_mode": "sampled_logprobs", "steps_per_launch": 3}
    with open_engine(csm[0], device=engine.config.device, **options) as other:
        found = other.generate(PROMPT, params(**DRAWN)).codes_logprobs
    assert np.array_equal(found, wanted)


def test_what_is_refused(csm: tuple[Path, Any]) -> None:
    with open_engine(csm[0], device="cpu", **SIZES) as engine:
        message = "logprobs=2: frames have the log-probabilities of their own codes alone"
        with pytest.raises(ValueError, match=message):
            engine.submit(PROMPT, params(logprobs=2))
        with pytest.raises(ValueError, match="logprobs_mode='sampled_logprobs': this engine"):
            engine.submit(PROMPT, params(logprobs_mode="sampled_logprobs"))


def test_a_wrong_place_shows(
    csm: tuple[Path, Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of the codes of the place before are no codes' own."""
    from graphengine.program.code_logprobs import CodeLogprobs

    right = engine.generate(PROMPT, params(temperature=0.0))
    noted = CodeLogprobs.note

    def wrong(self: Any, place: int, logits: Tensor, code: Tensor, *given: Any, **how: Any) -> None:
        noted(self, place, logits, code + 1, *given, **how)

    monkeypatch.setattr(CodeLogprobs, "note", wrong)
    with open_engine(csm[0], device="cpu", **SIZES) as other:
        found = other.generate(PROMPT, params(temperature=0.0))
    assert np.array_equal(found.codes, right.codes)
    assert np.abs(found.codes_logprobs - right.codes_logprobs).max() > 0.1
