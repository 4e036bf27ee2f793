"""The model families, by the names that a checkpoint's `config.json` carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphengine.models import llama, qwen2, qwen3
from graphengine.models.config_schema import HfConfig, read_key
from graphengine.models.dense import DenseConfig

FAMILIES: Mapping[str, Callable[[HfConfig, str], DenseConfig]] = {
    "LlamaForCausalLM": llama.read_config,
    "MiMoForCausalLM": qwen2.read_config,
    "Qwen2ForCausalLM": qwen2.read_config,
    "Qwen3ForCausalLM": qwen3.read_config,
}

# A model saved without its lm_head has the weights of the whole one, where embeddings are tied.
_BASE_MODELS = {name.replace("ForCausalLM", "Model"): name for name in FAMILIES}
_MODEL_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}


def read_model_config(config: HfConfig) -> DenseConfig:
    """The model's configuration, from `config.json` alone.

    ValueError names what is wrong or not supported; an unknown architecture with the known ones.
    """
    architecture = _architecture(config)
    return FAMILIES[architecture](config, architecture)


def _architecture(config: HfConfig) -> str:
    """One of `FAMILIES`: that of `architectures`, and of `model_type` where there are none."""
    architectures, model_type = read_key(config, "architectures"), read_key(config, "model_type")
    known = ", ".join(sorted(FAMILIES))
    if architectures:
        name: str = architectures[0]
        name = _BASE_MODELS.get(name, name)
        if name not in FAMILIES:
            raise ValueError(f"unknown architecture {name!r}; known: {known}")
        return name
    if model_type not in _MODEL_TYPES:
        raise ValueError(
            f"unknown architecture: config.json has no architectures, and "
            f"model_type={model_type!r}; known: {known}"
        )
    return _MODEL_TYPES[model_type]
