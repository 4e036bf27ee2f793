"""Configs of published checkpoints, at their true sizes and shrunk to small ones with all keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Config = dict[str, Any]


class Published(NamedTuple):
    """What a checkpoint's folder says of it.

    source      where the files were found
    config      its `config.json`
    quant_file  its `hf_quant_config.json`, None: it has none
    """

    source: str
    config: Config
    quant_file: Config | None


def _read() -> dict[str, Published]:
    text = Path(__file__).with_name("published_configs.json").read_text()
    return {
        name: Published(found["source"], found["config"], found.get("hf_quant_config"))
        for name, found in json.loads(text).items()
    }


PUBLISHED: Mapping[str, Published] = _read()
"""Checkpoint -> its configs, sorted by name."""

_HEAD_DIM = 32
_SIZES: Config = {
    "vocab_size": 131, "intermediate_size": 48, "block_ff_dim": 48, "block_multiple_of": 16,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 24, "moe_latent_size": 20, "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40, "shared_intermediate_size": 40,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": _HEAD_DIM, "sliding_window": 8,
    "sliding_window_size": 8, "attention_head_dim": _HEAD_DIM, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "projector_hidden_size": 32, "global_head_dim": 2 * _HEAD_DIM, "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131,
}  # fmt: skip
_AT_MOST = {
    "num_experts_per_tok": 3, "experts_per_token": 3, "top_k_experts": 3, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip
_VISION: Config = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1,
    "num_attention_heads": 2, "num_heads": 2, "head_dim": 16, "projection_dim": 32,
    "num_patches": 16, "num_position_embeddings": 16, "fullatt_block_indexes": [0],
}  # fmt: skip
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern")
_INTERVALS = ("full_attention_interval", "no_rope_layer_interval", "sliding_window_pattern")
# Sizes that published configs leave to the model's class, of a tower's language model.
_LEFT_OUT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def shrunk(config: Config) -> Config:
    """The config with small sizes in the same relations, and without quantised weights.

    Layers are as many as it takes to have one of each kind. Keys of sizes that are missing in a
    `text_config` are added; all other keys are those of `config`.
    """
    small = {name: value for name, value in config.items() if name != "quantization_config"}
    text = small.get("text_config")
    if isinstance(text, dict):
        text = {**dict.fromkeys(_LEFT_OUT, 32), **text}
        text.pop("quantization_config", None)
        small["text_config"] = text = _shrunk_decoder(text)
        for name in small.keys() & {"vocab_size", "projector_hidden_size"}:
            small[name] = _SIZES[name]
    else:
        small = text = _shrunk_decoder(small)
    small = {name: _small_id(name, value) for name, value in small.items()}
    if "vision_config" in small:
        small["vision_config"] = _shrunk_tower(small["vision_config"], text["hidden_size"])
    return small


def _shrunk_decoder(text: Config) -> Config:
    if "n_layer" in text:
        return _shrunk_gpt(text)
    layers = _layers(text)
    depth = text.get("num_hidden_layers") or len(text["layers_block_type"])
    small = {name: _small_id(name, value) for name, value in text.items()}
    for name, value in small.items():
        if isinstance(value, int) and name in _SIZES:
            small[name] = _SIZES[name] if value else value
        elif isinstance(value, int) and name in _AT_MOST:
            small[name] = min(value, _AT_MOST[name])
        elif isinstance(value, list | str) and len(value) == depth:
            small[name] = value[:layers]
    small["num_hidden_layers"] = layers
    if small.get("full_attn_idxs"):
        small["full_attn_idxs"] = [index for index in small["full_attn_idxs"] if index < layers]
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    small["num_attention_heads"] = min(heads // kv_heads, 3) * min(kv_heads, 2)
    if "num_key_value_heads" in text:
        small["num_key_value_heads"] = min(kv_heads, 2)
    own_heads = "head_dim" in text or "kv_lora_rank" in text
    width = 48 if own_heads else small["num_attention_heads"] * _HEAD_DIM
    for name in text.keys() & {"hidden_size", "block_dim", "conv_dim", "conv_dim_out"}:
        small[name] = width
    if "rotary_dim" in text:
        head_dim = text.get("head_dim") or text["hidden_size"] // heads
        small["rotary_dim"] = text["rotary_dim"] * _HEAD_DIM // head_dim
    if "attention_head_dim" in text:
        # transformers knows the other name alone, and the published size as its default.
        small["head_dim"] = _HEAD_DIM
    if "num_heads" in text:
        small["num_heads"] = small["num_attention_heads"]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(name), dict):
            small[name] = _shrunk_rope(small[name], text)
    return small


def _shrunk_gpt(config: Config) -> Config:
    """The config under the names that GPT-2 and its like have for sizes."""
    sizes = {"n_layer": 2, "n_embd": 2 * _HEAD_DIM, "n_head": 2, "vocab_size": _SIZES["vocab_size"]}
    sizes |= {"n_inner": 48} if config.get("n_inner") else {}
    sizes |= {"rotary_dim": 16} if "rotary_dim" in config else {}
    return {name: sizes.get(name, _small_id(name, value)) for name, value in config.items()}


def _layers(text: Config) -> int:
    """The number of layers that it takes to have one of each kind, and at least two."""
    intervals = [text[name] for name in _INTERVALS if isinstance(text.get(name), int)]
    kinds = [text[name] for name in _KINDS if text.get(name)]
    depths = [max(each.index(kind) for kind in each) + 1 for each in kinds]
    return max([2, *intervals, *depths])


def _small_id(name: str, value: Any) -> Any:
    """A token id below the small vocabulary's size."""
    if not name.endswith(("_token_id", "_token_index")):
        return value
    if isinstance(value, list):
        return [each % _SIZES["vocab_size"] for each in value]
    return value if value is None else value % _SIZES["vocab_size"]


def _shrunk_rope(rope: Config, text: Config) -> Config:
    """Settings of RoPE for as many pairs as a small head turns."""
    part = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1
    pairs = int(_HEAD_DIM * part) // 2
    small = dict(rope)
    for name in rope.keys() & {"long_factor", "short_factor"}:
        small[name] = rope[name][:pairs]
    if sections := rope.get("mrope_section"):
        small["mrope_section"] = _shares(sections, pairs)
    return {
        name: _shrunk_rope(value, text) if isinstance(value, dict) else value
        for name, value in small.items()
    }


def _shares(sections: Sequence[int], total: int) -> list[int]:
    """Sections in the same proportions, of this total."""
    shares = [section * total // sum(sections) for section in sections]
    return [share + (index < total - sum(shares)) for index, share in enumerate(shares)]


def _shrunk_tower(vision: Config, hidden_size: int) -> Config:
    sizes = {**_VISION, "out_hidden_size": hidden_size}
    small = {name: sizes.get(name, value) for name, value in vision.items()}
    if "image_size" in vision:
        small["image_size"] = 2 * vision["patch_size"]
    if vision.get("deepstack_visual_indexes"):
        small["deepstack_visual_indexes"] = [0]
    return small
