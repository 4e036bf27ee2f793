"""LFM2: short gated convolutions, attention in some layers, and experts in most layers of some."""

from __future__ import annotations

from typing import Any

from graphengine.kernels.experts.router import Router
from graphengine.models.blocks.expert_names import ExpertNames
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.short_conv import ShortConv
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    LFM2_KEYS,
    LFM2_MOE_KEYS,
    HfConfig,
    read_keys,
)
from graphengine.models.hf.decoder_config import (
    composed,
    expert_count,
    read_attention,
    read_mlp,
    with_experts,
)
from graphengine.models.sublayers import Sublayer

DEFAULTS = hf_config.FamilyDefaults(max_positions=128_000, keys=LFM2_KEYS, biases=())
_ATTENTION, _CONV = "full_attention", "conv"
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {"num_key_value_heads": 8, "tie_word_embeddings": True, "rope_theta": 1_000_000.0}


MOE_DEFAULTS = hf_config.FamilyDefaults(
    max_positions=128_000, keys=LFM2_KEYS + LFM2_MOE_KEYS, biases=(), routes=True
)
# Gates, ups and down of the dense layers.
_NAMES = ("w1", "w3", "w2")
EXPERT_NAMES = ExpertNames(
    correction="expert_bias", products=tuple(f"experts.{{}}.{name}" for name in _NAMES)
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Lfm2ForCausalLM` checkpoint."""
    return _read(config, architecture, DEFAULTS)


def read_moe(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Lfm2MoeForCausalLM` checkpoint: experts after the first few layers."""
    model = _read({"block_auto_adjust_ff_dim": False, **config}, architecture, MOE_DEFAULTS)
    settings = read_keys(config, LFM2_MOE_KEYS)
    experts = Experts(
        hidden_size=model.hidden_size,
        ffn_size=settings["moe_intermediate_size"],
        experts=expert_count(settings, "num_experts"),
        router=Router(
            top_k=settings["num_experts_per_tok"],
            scores="sigmoid",
            normalised=settings["norm_topk_prob"],
            least_sum=1e-6,
            scale=settings["routed_scaling_factor"],
        ),
        norm_eps=model.norm_eps,
        corrected=settings["use_expert_bias"],
        names=EXPERT_NAMES,
    )
    return with_experts(model, experts, range(settings["num_dense_layers"], model.num_layers))


def _read(config: HfConfig, architecture: str, defaults: hf_config.FamilyDefaults) -> DecoderConfig:
    told = _with_new_names({**_MISSING, **config})
    types = told.pop("layer_types", None)
    settings = hf_config.read_settings(told, defaults)
    hidden, eps = settings["hidden_size"], settings["norm_eps"]
    attention = read_attention(
        settings, norm_eps=eps, qk_norm=True, names=("out_proj", "layernorm")
    )
    conv = ShortConv(
        hidden_size=hidden,
        channels=hidden,
        taps=settings["conv_L_cache"],
        norm_eps=eps,
        bias=settings["conv_bias"],
    )
    mlp = read_mlp(settings, ffn_size=_ffn_size(settings), norm_eps=eps, names=_NAMES)
    mixers = {
        _ATTENTION: Sublayer("operator_norm", "self_attn.", attention),
        _CONV: Sublayer("operator_norm", "conv.", conv),
    }
    after = Sublayer("ffn_norm", "feed_forward.", mlp)
    layers = tuple((mixers[kind], after) for kind in _layer_types(types, settings))
    return composed(
        settings, architecture, layers, norm_eps=eps, final_norm_name="model.embedding_norm"
    )


def _with_new_names(config: HfConfig) -> dict[str, Any]:
    """Rename two older keys; if both names are there, the older one wins, as in transformers."""
    told = dict(config)
    for old, new in (
        ("tie_embedding", "tie_word_embeddings"),
        ("block_ff_dim", "intermediate_size"),
    ):
        if told.get(old) is not None:
            told[new] = told[old]
        told.pop(old, None)
    return told


def _ffn_size(settings: dict[str, Any]) -> int:
    """Width of the SwiGLU: `intermediate_size`, or two thirds of it, scaled and rounded up."""
    size: int = settings["intermediate_size"]
    if not settings["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    multiplier = settings["block_ffn_dim_multiplier"]
    multiple: int = settings["block_multiple_of"]
    if multiplier is None:
        return size
    return -(-int(multiplier * size) // multiple) * multiple


def _layer_types(types: Any, settings: dict[str, Any]) -> list[str]:
    layers, attending = settings["num_hidden_layers"], settings["full_attn_idxs"]
    if types is None:
        attending = range(layers) if attending is None else attending
        types = [_ATTENTION if index in attending else _CONV for index in range(layers)]
    return hf_config.types_of_layers(types, settings, (_CONV, _ATTENTION), (_ATTENTION,))
