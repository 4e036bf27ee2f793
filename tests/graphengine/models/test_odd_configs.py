"""Hybrids, gpt-oss and Gemmas: every key with every odd value is read, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import (
    GEMMA2_KEYS,
    GEMMA4_KEYS,
    GEMMA_KEYS,
    GPT_OSS_KEYS,
    GRANITE_KEYS,
    KEYS,
    LFM2_KEYS,
    NEMOTRON_KEYS,
    QWEN3_5_KEYS,
    Key,
    unknown_keys,
)
from graphengine.models.states import Paged

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
}  # fmt: skip
M, A = "linear_attention", "full_attention"
FAMILIES: dict[str, tuple[tuple[Key, ...], dict[str, Any]]] = {
    "GraniteMoeHybrid": (
        GRANITE_KEYS,
        {"num_local_experts": 0, "layer_types": [M, A], "mamba_n_heads": 4, "mamba_d_head": 64},
    ),
    "NemotronH": (
        NEMOTRON_KEYS,
        {"hybrid_override_pattern": "M*", "mamba_num_heads": 4, "n_groups": 1, "head_dim": 64},
    ),
    "Qwen3_5": (QWEN3_5_KEYS, {"layer_types": [M, A], "head_dim": 64}),
    "Lfm2": (LFM2_KEYS, {"layer_types": ["conv", A]}),
    "GptOss": (GPT_OSS_KEYS, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma2": (GEMMA2_KEYS, {"head_dim": 64}),
    "Gemma3": (GEMMA_KEYS, {"head_dim": 64}),
    "Gemma4": (GEMMA4_KEYS, {"head_dim": 64}),
}
DEEP: list[Any] = []
for _ in range(2000):
    DEEP = [DEEP]
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 10**18, -(10**400), 0.0, 0.5, -0.5, 1e308, math.nan,
    math.inf, "", "1", "default", "float64", "M*", [], [1], [None], ["x"], [[]], [0.1, 0.2],
    [0.2, {"__float__": "Infinity"}], [M, A], [A, M, A], {}, {"x": 1}, {"full_attention": {}},
    DEEP,
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_with_every_odd_value(family: str) -> None:
    keys, own = FAMILIES[family]
    plain = SIZES | own | {"architectures": [f"{family}ForCausalLM"]}
    assert read_model_config(plain).num_layers == 2
    for name in {key.name for key in KEYS + keys} | {"text_config", "quantization_config"}:
        for value in ODD:
            config = plain | {name: value}
            try:
                model = read_model_config(config)
            except ValueError as error:
                assert str(error), name
                continue
            unknown_keys(config)
            assert len(model.states) == model.num_layers <= 1024, name
            assert any(isinstance(state, Paged) for layer in model.states for state in layer)
