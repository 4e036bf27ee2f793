"""The metadata that llama.cpp's converter writes of a `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_NORMS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_ROTATED = ("phi2", "stablelm", "gptneox", "glm4moe", "minimax-m2")


def metadata_of(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without the prefix of the architecture, and their values."""
    given = _sizes(config) | _rope(arch, config)
    if first(config, *_EXPERTS) is not None:
        given |= _experts(config)
    given |= _OF_ARCHITECTURES.get(arch, lambda _: {})(config)
    return {key: value for key, value in given.items() if value is not None}


def first(config: Mapping[str, Any], *names: str) -> Any:
    """The first of these keys that is not null."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = first(config, "num_attention_heads", "n_head"), _hidden(config)
    width = config.get("head_dim")
    return {
        "context_length": first(config, "max_position_embeddings", "n_positions"),
        "embedding_length": hidden,
        "block_count": first(config, "num_hidden_layers", "n_layer"),
        "feed_forward_length": first(config, "intermediate_size", "n_inner") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": first(config, "rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": first(config, *_NORMS),
        "attention.key_length": width,
        "attention.value_length": width,
        "vocab_size": config["vocab_size"],
    }


def _hidden(config: Mapping[str, Any]) -> int:
    hidden: int = first(config, "hidden_size", "n_embd")
    return hidden


def _rope(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    width = config.get("head_dim") or _hidden(config) // first(
        config, "num_attention_heads", "n_head"
    )
    given: dict[str, Any] = {"rope.freq_base": rope.get("rope_theta")}
    if arch in _ROTATED:
        part = first(rope, "partial_rotary_factor") or first(
            config, "partial_rotary_factor", "rotary_pct"
        )
        given["rope.dimension_count"] = int(part * width)
    elif not arch.startswith("gpt2"):
        given["rope.dimension_count"] = width
    if rope.get("rope_type") in ("linear", "yarn"):
        given["rope.scaling.type"] = rope["rope_type"]
        given["rope.scaling.factor"] = rope["factor"]
        given["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope":
        trained = rope.get("original_max_position_embeddings")
        scale = config["max_position_embeddings"] / trained
        given["rope.scaling.original_context_length"] = trained
        given["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(trained))
    return given


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "expert_count": first(config, *_EXPERTS),
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }


def _gemma2(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: config[name] for name in names} | _window(config)


def _window(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window": config.get("sliding_window")}


def _exaone4(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["sliding_window"] is None:
        return {}
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {**_window(config), "attention.sliding_window_pattern": kinds}


def _granite(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = [kind == "full_attention" for kind in config["layer_types"]]
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] * kind for kind in kinds],
        "shortconv.l_cache": config["conv_L_cache"],
    }


def _lfm2moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_lfm2(config),
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
    }


def _parallel(config: Mapping[str, Any]) -> dict[str, Any]:
    # The converter does not write these models' base of RoPE.
    return {"use_parallel_residual": config["use_parallel_residual"], "rope.freq_base": None}


def _cohere(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": config["logit_scale"], "rope.scaling.type": "none", **_window(config)}


def _minimax(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["intermediate_size"], "expert_gating_func": 2}


def _qwen2moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}


def _glm4moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def _olmo(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config.get("clip_qkv")}


_OF_ARCHITECTURES = {
    "gemma2": _gemma2,
    "gemma3": _window,
    "phi3": _window,
    "exaone4": _exaone4,
    "granite": _granite,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "stablelm": _parallel,
    "gptneox": _parallel,
    "command-r": _cohere,
    "cohere2": _cohere,
    "minimax-m2": _minimax,
    "qwen2moe": _qwen2moe,
    "glm4moe": _glm4moe,
    "olmo": _olmo,
}
