"""Parts of configs that families spell alike: Llama's attention and SwiGLU, and their layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from graphengine.kernels.experts.router import MAX_EXPERTS, Router
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mlp import UngatedActivation
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import unsupported
from graphengine.models.sublayers import Attending, Layer, usual_layer


def read_attention(settings: dict[str, Any], **switches: Any) -> GroupedQueryAttention:
    """Grouped-query attention of these settings, and of `switches`, which take precedence."""
    values = {
        "hidden_size": settings["hidden_size"],
        "num_heads": settings["num_attention_heads"],
        "num_kv_heads": settings["num_key_value_heads"],
        "head_dim": settings["head_dim"],
        "norm_eps": settings["rms_norm_eps"],
        "qkv_bias": settings["attention_bias"],
        "output_bias": settings["attention_bias"],
    }
    return GroupedQueryAttention(**values | switches)


def read_mlp(settings: dict[str, Any], **switches: Any) -> Swiglu:
    """The SwiGLU of these settings, and of `switches`, which take precedence."""
    values = {
        "hidden_size": settings["hidden_size"],
        "ffn_size": settings["intermediate_size"],
        "norm_eps": settings["rms_norm_eps"],
    }
    return Swiglu(**values | switches)


_UNGATED: dict[str, UngatedActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def ungated_activation(key: str, name: Any) -> UngatedActivation:
    """The activation of a feed-forward without gates, by transformers' name, which `key` has.

    ValueError for one that is not known.
    """
    if not isinstance(name, str) or name not in _UNGATED:
        raise unsupported(key, name, ", ".join(map(repr, _UNGATED)))
    return _UNGATED[name]


def composed(
    settings: dict[str, Any], architecture: str, layers: tuple[Layer, ...], **values: Any
) -> DecoderConfig:
    """The model of these layers; `values` take precedence over `settings`."""
    if "rope" not in values:
        values["rope"] = hf_config.rope(settings)
    rope, positions = values["rope"], settings["max_position_embeddings"]
    shared = {
        "vocab_size": settings["vocab_size"],
        "hidden_size": settings["hidden_size"],
        "norm_eps": settings["rms_norm_eps"],
        "max_positions": positions if rope is None else rope.most_positions(positions),
        "tie_embeddings": settings["tie_word_embeddings"],
    }
    return DecoderConfig(architecture=architecture, layers=layers, **shared | values)


def decoder_config(
    settings: dict[str, Any],
    architecture: str,
    attention: Attending,
    mlp: Swiglu,
    *,
    post_norms: bool = False,
    **values: Any,
) -> DecoderConfig:
    """The model whose layers are this attention, each with its window, and this SwiGLU."""
    windows = settings["windows"] or (0,) * settings["num_hidden_layers"]
    layers = tuple(
        usual_layer(_with_window(attention, window), mlp, post_norms=post_norms)
        for window in windows
    )
    local_rope = hf_config.local_rope(settings)
    return composed(settings, architecture, layers, mlp=mlp, local_rope=local_rope, **values)


def _with_window(attention: Attending, window: int) -> Attending:
    if isinstance(attention, GroupedQueryAttention):
        return replace(attention, window=window)
    return attention


def with_experts(model: DecoderConfig, experts: Experts, where: Collection[int]) -> DecoderConfig:
    """The model with these experts in place of the feed-forwards of some layers."""
    layers = tuple(
        (*layer[:-1], layer[-1]._replace(block=experts)) if index in where else layer
        for index, layer in enumerate(model.layers)
    )
    return replace(model, layers=layers)


def sparse_layers(settings: dict[str, Any]) -> list[int]:
    """The layers with experts, by the keys of Qwen's families."""
    step, dense = settings["decoder_sparse_step"], settings["mlp_only_layers"]
    layers = range(settings["num_hidden_layers"])
    return [index for index in layers if (index + 1) % step == 0 and index not in dense]


def expert_count(
    settings: dict[str, Any], name: str, chosen_name: str = "num_experts_per_tok"
) -> int:
    """The experts of a layer, by the key of this name. ValueError if the other key lets tokens
    choose more experts than that.
    """
    count: int = settings[name]
    chosen = settings[chosen_name]
    if count > MAX_EXPERTS:
        raise unsupported(name, count, f"at most {MAX_EXPERTS}")
    if count and not 1 <= chosen <= count:
        raise unsupported(chosen_name, chosen, f"1 to {name}={count}")
    return count


def corrected_router(settings: dict[str, Any], count: int) -> Router:
    """The checked router of DeepSeek-V3 and its like, among `count` experts.

    Scores are sigmoids, corrected for the choice, and groups are chosen by their two best experts.
    """
    router = Router(
        top_k=settings["num_experts_per_tok"],
        scores="sigmoid",
        normalised=settings["norm_topk_prob"],
        scale=settings["routed_scaling_factor"],
        groups=settings["n_group"],
        top_groups=settings["topk_group"],
        group_best=2,
    )
    check_router(settings, router, count)
    return router


def check_router(settings: dict[str, Any], router: Router, count: int) -> None:
    """Raise ValueError, with the config's keys, for a router that cannot choose among `count`."""
    try:
        router.check(count)
    except ValueError as error:
        names = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
        given = ", ".join(f"{name}={settings[name]}" for name in names)
        raise ValueError(f"config.json: {given}: {error}") from error
