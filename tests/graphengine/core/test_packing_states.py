"""Prefills that feed several prompts of models that keep latents: no bit depends on which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints.family_models import FamilyModel
from checkpoints.random_models import make
from engines.packed_replies import assert_alike, prompt_of
from engines.small_engine import open_engine
from extent import extent
from graphengine import Engine

LENGTHS = (5, 20, 1, 40, 9)
OPTIONS = {"device": "cpu", "dtype": "float32", "prompts_per_prefill": 4, "max_batch": 5}
# A BLAS gives products of so many columns other bits at other numbers of lanes.
LATENTS: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 384,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 384,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "queries without a latent": ("DeepseekV2", LATENTS | {"q_lora_rank": None}),
    "queries with a latent": ("Glm4MoeLite", LATENTS | {"q_lora_rank": 256}),
}


def packing(path: Path, **options: Any) -> Engine:
    return open_engine(path, **OPTIONS | options)


@pytest.mark.parametrize("name", extent(["queries with a latent"], [*MODELS]))
def test_prompts_of_latents(name: str, tmp_path: Path) -> None:
    family, sizes = MODELS[name]
    FamilyModel(lambda: make(family, **sizes)).write(tmp_path, 0)
    prompts = [prompt_of(length, vocabulary=250) for length in LENGTHS]
    prompts[-1] = prompts[1] + prompts[-1]
    assert_alike(lambda: packing(tmp_path, prefix_caching=True), prompts, packed=2)
