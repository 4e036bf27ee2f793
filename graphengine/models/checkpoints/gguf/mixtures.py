"""Keys of `config.json` that follow from several metadata keys: kinds of layers, and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphengine.models.checkpoints.gguf.file import GgufFile
from graphengine.options.checks import shown

_KV_HEADS = "attention.head_count_kv"
_SIGMOID = 2


def convolutions(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The layers of LFM2 that attend, by their heads of keys and values, and the convolutions."""
    heads = _of_layers(file, own, _KV_HEADS, config["num_hidden_layers"])
    biases = (f"blk.{layer}.shortconv.in_proj.bias" for layer in range(len(heads)))
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "num_key_value_heads": max(heads),
        "conv_bias": any(name in file.tensors for name in biases),
    }


def granite_hybrid(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The layers of Granite 4 that attend, and the sizes of the others."""
    heads = _of_layers(file, own, _KV_HEADS, config["num_hidden_layers"])
    of_mamba, inner = _mamba_heads(file, own)
    return {
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "num_key_value_heads": max(heads),
        "mamba_n_heads": of_mamba,
        "mamba_d_head": inner // of_mamba,
        "mamba_expand": _quotient(file, "ssm.inner_size", inner, config["hidden_size"]),
    }


def nemotron(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The kind of each layer of Nemotron-H: a layer with a feed-forward has nothing else."""
    layers = config["num_hidden_layers"]
    heads = _of_layers(file, own, _KV_HEADS, layers)
    widths = _of_layers(file, own, "feed_forward_length", layers)
    wide = "moe" if config.get("n_routed_experts") else "mlp"
    of_mamba, inner = _mamba_heads(file, own)
    return {
        "layers_block_type": [
            wide if width else "attention" if count else "mamba"
            for count, width in zip(heads, widths, strict=True)
        ],
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths) or 1,
        "mamba_num_heads": of_mamba,
        "mamba_head_dim": inner // of_mamba,
    }


def gated_delta(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The heads of Qwen3-Next's gated delta nets, and the size of a value."""
    heads, inner = _mamba_heads(file, own)
    return {
        "linear_num_key_heads": _count(file, own, "ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def latents(file: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """The sizes of DeepSeek's latent attention, and how its experts are chosen.

    Files have one head of latents, or the keys and values that each head makes of them.
    """
    rotated = _count(file, own, "rope.dimension_count")
    suffix = "_mla" if "attention.key_length_mla" in own else ""
    key = _count(file, own, f"attention.key_length{suffix}")
    scores = own.get("expert_gating_func", 1)
    if scores not in (1, _SIGMOID):
        raise ValueError(
            f"{file.path} has expert_gating_func={shown(scores)}: must be 1 (softmax) or "
            f"{_SIGMOID} (sigmoid)"
        )
    of_v3 = scores == _SIGMOID
    told: dict[str, Any] = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": _count(file, own, f"attention.value_length{suffix}"),
        "q_lora_rank": own.get("attention.q_lora_rank"),
        "scoring_func": "sigmoid" if of_v3 else "softmax",
        "architectures": [f"DeepseekV{3 if of_v3 else 2}ForCausalLM"],
    }
    if not of_v3:
        told["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return told


def _of_layers(file: GgufFile, own: Mapping[str, Any], key: str, layers: Any) -> list[int]:
    """A number for each layer; the file may write one number that all layers share. ValueError for
    anything else.
    """
    found = own.get(key)
    counts: list[Any] = found if isinstance(found, list) else [found] * layers
    if len(counts) != layers or not all(type(count) is int for count in counts):
        raise ValueError(
            f"{file.path} has {key}={shown(found)}: must be a number for each of {layers} layers"
        )
    return counts


def _mamba_heads(file: GgufFile, own: Mapping[str, Any]) -> tuple[int, int]:
    """The heads of recurrent layers, and the values of all of them."""
    heads, inner = (_count(file, own, f"ssm.{name}") for name in ("time_step_rank", "inner_size"))
    _quotient(file, "ssm.inner_size", inner, heads)
    return heads, inner


def _count(file: GgufFile, own: Mapping[str, Any], key: str) -> int:
    count = own.get(key)
    if type(count) is not int or count < 1:
        raise ValueError(f"{file.path} has {key}={shown(count)}: must be an integer of 1 or more")
    return count


def _quotient(file: GgufFile, key: str, number: int, of: int) -> int:
    if number % of:
        raise ValueError(f"{file.path} has {key}={number}: must be a multiple of {of}")
    return number // of
