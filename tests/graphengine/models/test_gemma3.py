"""Gemma 3 against transformers: norms on both sides, GeGLU, local and global layers, text alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
)

from graphengine import Engine, SamplingParams
from graphengine.models.families import read_model_config

TOKENS = 64
SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 54, "intermediate_size": 76, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512, "bos_token_id": 2,
    "eos_token_id": [1, 106], "pad_token_id": 0,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
SCALED = {
    FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    SLIDING: {"rope_type": "default", "rope_theta": 300.0},
}


def _text(layers: int, window: int, **options: Any) -> Gemma3TextConfig:
    sizes = {"num_hidden_layers": layers, "sliding_window": window}
    return Gemma3TextConfig(**SIZES | sizes | options)


# Blocks have 8 tokens. Windows: in a block, over blocks' edges, longer than the prompts.
CONFIGS: dict[str, Callable[[], Gemma3TextConfig]] = {
    "pattern-6": lambda: _text(7, 5),
    "pattern-2": lambda: _text(
        3, 19, sliding_window_pattern=2, rope_parameters=SCALED, query_pre_attn_scalar=37
    ),
    "types": lambda: _text(
        3, 100, layer_types=[FULL, SLIDING, FULL], num_attention_heads=3, num_key_value_heads=3,
        hidden_size=57, intermediate_size=33, tie_word_embeddings=False,
    ),
    "biases": lambda: _text(
        2, 8, sliding_window_pattern=1, attention_bias=True, head_dim=96, rms_norm_eps=1e-3
    ),
}  # fmt: skip
WINDOWS = {
    "pattern-6": (5,) * 5 + (0, 5), "pattern-2": (19, 0, 19), "types": (0, 100, 0), "biases": (),
}  # fmt: skip


def _with_vision(layers: int, window: int, **options: Any) -> PreTrainedModel:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = _text(layers, window, **options).to_dict()
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    return Gemma3ForConditionalGeneration(config)


@pytest.fixture(scope="session")
def gemmas(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gemma3")
    return {
        name: write_model(lambda make=make: Gemma3ForCausalLM(make()), folder / name, seed)
        for seed, (name, make) in enumerate(CONFIGS.items())
    }


@pytest.fixture(scope="session")
def with_vision(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]) -> Any:
    path = tmp_path_factory.mktemp("gemma3") / "vision"
    return write_model(lambda: _with_vision(3, 5, sliding_window_pattern=2), path, 7)


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def config_of(oracle: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((oracle.path / "config.json").read_text())
    return config


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 3, "max_seq_len": 176, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **({"prefill_buckets": (16, 64)} | options))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens(
    gemmas: dict[str, Any], device: str, eager: Callable[[Engine], Any], name: str
) -> None:
    oracle = gemmas[name]
    assert read_model_config(config_of(oracle)).windows == WINDOWS[name]  # type: ignore[attr-defined]
    with open_engine(oracle.path, device=device, lookahead=0) as engine:
        assert engine.eos_ids == (1, 106)
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            result = engine.generate(prompt, greedy())
            assert len(result.token_ids) == TOKENS
            oracle.assert_greedy(result)
            oracle.assert_logits(result, seen)
