"""The metadata that llama.cpp's converter writes of a `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from checkpoints.gguf_conversion import layers_of

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ATTENDING = ("attention", "full_attention")
_NORMS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_ROTATED = ("phi2", "stablelm", "gptneox", "glm4moe", "minimax-m2", "qwen3next")


def metadata_of(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without the prefix of the architecture, and their values."""
    given = _sizes(config) | _rope(arch, config)
    if first(config, *_EXPERTS):
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
        "block_count": layers_of(config),
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


def _gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["intermediate_size"], **_window(config)}


def _granite_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = config.get("layer_types") or config["layers_block_type"]
    heads = config["num_key_value_heads"]
    return {
        **_granite(config),
        **_mamba(config, "mamba_d_conv", "mamba_d_state", "mamba_n_groups"),
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "attention.head_count_kv": [heads * (kind in _ATTENDING) for kind in kinds],
        "expert_count": config["num_local_experts"],
        "expert_feed_forward_length": None,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "rope.scaling.finetuned": False,
        "context_length": 2**20,
    }


def _mamba(config: Mapping[str, Any], taps: str, size: str, groups: str) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config[taps],
        "ssm.state_size": config[size],
        "ssm.group_count": config[groups],
    }


def _nemotron(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = config.get("layers_block_type") or config["layer_types"]
    width = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
    heads = config["num_key_value_heads"]
    given = {
        **_mamba(config, "conv_kernel", "ssm_state_size", "n_groups"),
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "attention.head_count_kv": [heads * (kind in _ATTENDING) for kind in kinds],
        "feed_forward_length": [width * (kind in ("moe", "mlp")) for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.layer_norm_epsilon": None,
        "rope.scaling.finetuned": False,
        "rope.dimension_count": None,
    }
    if "moe" not in kinds:
        return {**given, **dict.fromkeys(_experts(config))}
    return {
        **given,
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
        "moe_latent_size": config.get("moe_latent_size"),
    }


def _qwen3next(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    return {
        **_qwen2moe(config),
        **_mamba(config, "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
        "ssm.inner_size": inner,
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "full_attention_interval": config.get("full_attention_interval", 4),
    }


def _deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    rotated, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    rope = config["rope_parameters"]
    of_all = rope.get("mscale_all_dim")
    dense = config.get("first_k_dense_replace")
    if dense is None:
        dense = (config.get("mlp_layer_types") or []).count("dense")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": latent,
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": None if of_all is None else 0.1 * of_all,
        "expert_gating_func": None if config["model_type"] == "deepseek_v2" else 2,
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": dense,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
    }


def _mistral3(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


_OF_ARCHITECTURES = {
    "mistral3": _mistral3,
    "gpt-oss": _gpt_oss,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "qwen3next": _qwen3next,
    "deepseek2": _deepseek,
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
