"""Prefills that feed several prompts to experts: no bit depends on who else is in the chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints.family_models import MODELS, FamilyModel
from checkpoints.quantised_models import KINDS, write_model
from checkpoints.random_models import make
from engines.packed_replies import assert_alike, prompt_of
from engines.small_engine import open_engine
from extent import LONG, extent
from graphengine import Engine

LENGTHS = (5, 20, 1, 40, 9)
OPTIONS = {"device": "cpu", "dtype": "float32", "prompts_per_prefill": 4, "max_batch": 5}
# A BLAS gives products of so many columns other bits at other numbers of lanes.
SIZES: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 256,
    "num_hidden_layers": extent(1, 2),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
WIDE: dict[str, dict[str, Any]] = {
    "Qwen3Moe": SIZES | {"moe_intermediate_size": 256, "num_experts": 8},
    "GptOss": SIZES | {"num_local_experts": 8, "sliding_window": 19},
    "Mixtral": SIZES | {"num_local_experts": 8},
    # With a feed-forward that every token takes, through a gate of its own.
    "Qwen2Moe": SIZES
    | {"moe_intermediate_size": 256, "num_experts": 8, "shared_expert_intermediate_size": 256},
}
OF_FAMILIES = [
    ("Gemma4ForCausalLM", 2),
    ("Glm4MoeForCausalLM", 0),
    ("Glm4MoeForCausalLM", 1),
    ("GptOssForCausalLM", 0),
    ("HunYuanMoEV1ForCausalLM", 0),
    ("MiniMaxM2ForCausalLM", 0),
    ("MiniMaxM2ForCausalLM", 1),
    ("MixtralForCausalLM", 0),
    ("Qwen2MoeForCausalLM", 0),
    ("Qwen2MoeForCausalLM", 1),
    ("Qwen3MoeForCausalLM", 0),
    ("Qwen3VLMoeForConditionalGeneration", 0),
]
"""Models whose layers have keys and values, and experts."""


def packing(path: Path, **options: Any) -> Engine:
    return open_engine(path, **OPTIONS | options)


def assert_packs(path: Path, *, vocabulary: int = 250, **options: Any) -> None:
    prompts = [prompt_of(length, vocabulary=vocabulary) for length in LENGTHS]
    prompts[-1] = prompts[1] + prompts[-1]
    assert_alike(lambda: packing(path, **options), prompts, packed=2)
    with packing(path, **options) as engine:
        assert engine.model.weights.routed is not None


@pytest.mark.parametrize("family", extent(["GptOss", "Qwen2Moe"], [*WIDE]))
def test_experts_of_wide_models(family: str, tmp_path: Path) -> None:
    FamilyModel(lambda: make(family, **WIDE[family])).write(tmp_path, 0)
    assert_packs(tmp_path, prefix_caching=family != "GptOss")


@pytest.mark.parametrize("kind", extent(["mxfp4"], [*KINDS]))
def test_experts_in_8_and_4_bits(kind: str, tmp_path: Path) -> None:
    sizes = SIZES | {"moe_intermediate_size": 256, "num_experts": 4}
    model = write_model(tmp_path / "model", KINDS[kind], family="qwen3-moe", **sizes)
    assert_packs(model.path, vocabulary=97)


@pytest.mark.skipif(not LONG, reason="the wide models have all kinds of layers in a short run")
@pytest.mark.parametrize(("architecture", "index"), OF_FAMILIES)
def test_experts_of_all_families(architecture: str, index: int, tmp_path: Path) -> None:
    MODELS[architecture][index].write(tmp_path, 0)
    assert_packs(tmp_path)
