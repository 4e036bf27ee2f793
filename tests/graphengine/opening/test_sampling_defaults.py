"""Sampling options that a checkpoint recommends."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints.few_layers import few_layers
from engines.small_engine import PROMPT, open_engine
from graphengine import SamplingParams


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(few_layers(), tmp_path / "model")
    return tmp_path / "model"


def recommend(folder: Path, **told: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]} | told))
    return folder


def test_they_are_the_defaults_of_an_engine_that_asks(folder: Path, device: str) -> None:
    told = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 3, "do_sample": True}
    path = recommend(folder, **told)
    options: dict[str, Any] = {"device": device, "dtype": "float32"}
    expected = SamplingParams(temperature=0.6, top_k=20)
    with open_engine(path, sampling_defaults="checkpoint", **options) as engine:
        assert engine.default_params == expected
        found = engine.generate(PROMPT)
        given = replace(engine.default_params, seed=found.seed)
        assert engine.generate(PROMPT, given).token_ids == found.token_ids
        # Parameters that are given are not mixed with the file's.
        assert engine.submit(PROMPT, SamplingParams(top_k=3)).params.temperature == 1
        with engine.session() as session:
            session.append(PROMPT)
            assert session.submit().params == expected
        engine.drain()
    with open_engine(path, **options) as engine:
        assert engine.default_params == SamplingParams() == engine.submit(PROMPT).params
        engine.drain()


def test_no_sampling_is_greedy(folder: Path) -> None:
    path = recommend(folder, do_sample=False, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    with open_engine(path, sampling_defaults="checkpoint") as engine:
        assert engine.default_params == SamplingParams(temperature=0, repetition_penalty=1.1)


def test_values_that_no_request_has_are_refused(folder: Path) -> None:
    path = recommend(folder, top_p=1.5)
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p=1\.5 must be in "):
        open_engine(path, sampling_defaults="checkpoint")
    open_engine(path).close()
