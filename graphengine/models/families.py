"""The model families, by the architecture name that a checkpoint's `config.json` carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphengine.models import llama, qwen2, qwen3
from graphengine.models.dense import DenseConfig
from graphengine.models.hf_config import HfConfig

FAMILIES: Mapping[str, Callable[[HfConfig], DenseConfig]] = {
    "LlamaForCausalLM": llama.read_config,
    "MiMoForCausalLM": qwen2.read_config,
    "Qwen2ForCausalLM": qwen2.read_config,
    "Qwen3ForCausalLM": qwen3.read_config,
}


def read_model_config(config: HfConfig) -> DenseConfig:
    """The model's configuration. ValueError names an unknown architecture and lists the known."""
    architectures = config.get("architectures") or ["(none)"]
    family = FAMILIES.get(architectures[0])
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"unknown architecture {architectures[0]!r}; known: {known}")
    return family(config)
