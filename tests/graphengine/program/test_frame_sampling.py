"""Codes are drawn from the distributions of transformers' decoders, with noise of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints.csm_models import logits_of, write_csm
from engines.frames import of_place
from engines.small_engine import open_engine
from graphengine import CodeSampling, SamplingParams
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_reference
from graphengine.program.frame_step import CODE_STRIDE

PROMPT = [300, 5, 17, 8, 200, 31, 77]
FRAMES, PLACES = 6, 5
SIZES: dict[str, Any] = {"dtype": "float32", "max_seq_len": 64, "buckets": (1, 2, 3)}


@pytest.fixture(scope="module")
def csm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("csm")
    return path, write_csm(path, PLACES)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=FRAMES, ignore_eos=True, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.3, "top_k": 4},
    "filters": {"temperature": 0.9, "top_p": 0.7, "min_p": 0.02, "top_n_sigma": 1.5},
    "other codes": {"temperature": 0.0, "codes": CodeSampling(temperature=0.7)},
    "each code": {
        "temperature": 1.1,
        "top_k": 3,
        "codes": CodeSampling(
            temperature=(0.5, 0.0, 2.0, 1.0), top_k=(-1, 2, 5, 0), top_p=(1.0, 1.0, 1.0, 0.6)
        ),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_codes_are_drawn_as_the_sampler_says(csm: tuple[Path, Any], device: str, name: str) -> None:
    """Code k of the frame at position p has the noise of position p + k * CODE_STRIDE."""
    path, model = csm
    seen = set()
    with open_engine(path, device=device, **SIZES) as engine:
        for seed in range(3):
            result = engine.generate(PROMPT, params(seed=seed, **OPTIONS[name]))
            logits = logits_of(model, PROMPT, torch.tensor(result.codes).long())
            for place in range(PLACES):
                sampling = SamplingTensors.neutral(1)
                for option, value in {**of_place(OPTIONS[name], place), "seed": seed}.items():
                    getattr(sampling, option).fill_(value)
                positions = [
                    len(PROMPT) - 1 + frame + place * CODE_STRIDE for frame in range(FRAMES)
                ]
                drawn = sample_reference(
                    logits[:, place].contiguous(),
                    torch.zeros(FRAMES, dtype=torch.int32),
                    torch.tensor(positions, dtype=torch.int32),
                    sampling,
                )
                assert drawn.tolist() == result.codes[:, place].tolist(), f"{seed=} {place=}"
            seen.add(result.codes.tobytes())
    assert len(seen) == 3


def test_codes_do_not_depend_on_neighbours_or_buckets(csm: tuple[Path, Any], device: str) -> None:
    """Greedy, with a temperature and with filters side by side, in every bucket."""
    path, _ = csm
    asked = [
        params(temperature=0.0),
        params(temperature=0.8, seed=3),
        params(temperature=1.2, codes=CodeSampling(top_k=3), seed=4),
    ]
    with open_engine(path, device=device, **SIZES) as engine:
        alone = [engine.generate(PROMPT, each).codes for each in asked]
        together = engine.generate([PROMPT] * 3, asked)
        pair = engine.generate([PROMPT] * 2, asked[:0:-1])
        assert not np.array_equal(alone[0], alone[1])
        for one, other in zip(alone, together, strict=True):
            assert np.array_equal(one, other.codes)
        assert np.array_equal(pair[0].codes, alone[2])
        assert np.array_equal(pair[1].codes, alone[1])
    other_sizes = SIZES | {"buckets": (3,), "prefill_buckets": (8,), "lookahead": 0}
    with open_engine(path, device=device, **other_sizes) as engine:
        for each, one in zip(asked, alone, strict=True):
            assert np.array_equal(engine.generate(PROMPT, each).codes, one)


def test_options_of_codes_are_checked(csm: tuple[Path, Any]) -> None:
    for options, message in (
        ({"temperature": -1.0}, "codes: temperature=-1.0 must be 0, or in"),
        ({"temperature": (0.5, "1")}, "codes: temperature='1' must be a number, a sequence"),
        ({"top_k": 1.5}, "codes: top_k=1.5 must be an integer, a sequence of them or None"),
        ({"top_k": [3, -2]}, r"codes: top_k=-2 must be in \[1, "),
        ({"top_p": 1.5}, r"codes: top_p=1.5 must be in \[0, 1\]"),
        ({"top_p": True}, "codes: top_p=True must be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            CodeSampling(**options)
    short = params(codes=CodeSampling(top_k=(1, 2, 3)))
    with open_engine(csm[0], device="cpu", **SIZES) as engine:
        message = "codes: top_k has 3 numbers, and a frame has 4 codes after its first"
        with pytest.raises(ValueError, match=message):
            engine.submit(PROMPT, short)
    with open_engine(device="cpu") as engine:
        message = "codes=CodeSampling.* is for models whose steps emit frames of codes"
        with pytest.raises(ValueError, match=message):
            engine.submit("x", short)
