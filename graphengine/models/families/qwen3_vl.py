"""The language models of Qwen3-VL: Qwen3, dense or with experts, with RoPE of three axes, and
features of the vision tower that are added to the stream after the first layers (DeepStack).

Their own config is `text_config`. `vision_config` says from how many levels of the tower features
come (Meng et al. 2024, "DeepStack").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphengine.models.blocks.expert_names import ExpertNames
from graphengine.models.blocks.experts import Experts
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families import qwen3, qwen3_moe
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    HfConfig,
    Key,
    checked_language_model,
    read_keys,
    unsupported,
)
from graphengine.models.sublayers import Block

# transformers' defaults for missing keys; in other families these keys must be there.
_SIZES: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}
_MOE_SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "head_dim": None,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}
_EXPERTS = 60
_SECTIONS = (24, 20, 20)
_LEVELS = (Key("deepstack_visual_indexes", "integers", (0, 1023), default=(8, 16, 24), null=True),)
# As transformers 5 saves them.
_UNTRANSPOSED = ExpertNames(products=("experts.gate_up_proj", "experts.down_proj"), ending="")
EXPERT_NAMES = _UNTRANSPOSED._replace(transposed=True, other=_UNTRANSPOSED)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen3VLForConditionalGeneration` checkpoint."""
    told = _SIZES | _language_model(config)
    model = qwen3.read_config(hf_config.of_one_axis(told), architecture)
    return _beside_tower(model, told, config)


def read_moe(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen3VLMoeForConditionalGeneration` checkpoint."""
    told = _SIZES | _MOE_SIZES | _language_model(config)
    if told.get("norm_topk_prob") is False:
        raise unsupported("norm_topk_prob", False, "null or True")
    if told.get("num_local_experts") is None:
        told.setdefault("num_experts", _EXPERTS)
    told["norm_topk_prob"] = True
    model = qwen3_moe.read_config(hf_config.of_one_axis(told), architecture)

    def named(block: Block) -> Block:
        return replace(block, names=EXPERT_NAMES) if isinstance(block, Experts) else block

    return _beside_tower(model.with_blocks(named), told, config)


def _language_model(config: HfConfig) -> dict[str, Any]:
    """The language model's own config."""
    text = checked_language_model(config, ("rope_scaling",))
    return {**text, "tie_word_embeddings": config.get("tie_word_embeddings", False)}


def _beside_tower(model: DecoderConfig, told: dict[str, Any], config: HfConfig) -> DecoderConfig:
    """The model with RoPE of three axes, and with as many levels of features as its tower has."""
    assert model.rope is not None
    axes = hf_config.with_axes(model.rope, told)
    sections = axes.sections or _SECTIONS
    tower = config.get("vision_config") or {}
    if not isinstance(tower, dict):
        raise unsupported("vision_config", tower, "a JSON object")
    levels = len(read_keys(tower, _LEVELS, inside="vision_config")["deepstack_visual_indexes"])
    if levels >= model.num_layers:
        raise unsupported(
            "vision_config.deepstack_visual_indexes",
            tower.get("deepstack_visual_indexes"),
            f"fewer levels than num_hidden_layers={model.num_layers}",
        )
    rope = replace(axes, sections=sections, interleaved=True)
    return replace(model, rope=rope, deepstack=levels)
