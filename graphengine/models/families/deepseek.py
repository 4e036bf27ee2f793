"""DeepSeek-V2 and V3: latent attention, and experts in all layers but the first.

Missing keys have the defaults of transformers' configs of the two. These leave out some keys of
DeepSeek's own code: `moe_layer_freq` is read as in that code, and keys that would change the
results and are not implemented here are refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from graphengine.kernels.attention.latent import MAX_LATENT, MAX_ROTATED
from graphengine.kernels.experts.router import MAX_EXPERTS, Router
from graphengine.kernels.norm_rope.rope_config import RopeConfig
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.mla import LatentAttention
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import LATENT_KEYS, HfConfig, unsupported
from graphengine.models.hf.decoder_config import (
    check_router,
    decoder_config,
    read_mlp,
    with_experts,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """The differences between versions: routing methods, their scores, and the values of missing
    keys.
    """

    defaults: hf_config.FamilyDefaults
    methods: tuple[str, ...]
    scores: str
    missing: dict[str, Any]


_V2 = Version(
    defaults=hf_config.FamilyDefaults(
        max_positions=2048, keys=LATENT_KEYS, routes=True, latent=True, biases=()
    ),
    methods=("greedy", "group_limited_greedy"),
    scores="softmax",
    missing={
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
)
_V3 = Version(
    defaults=hf_config.FamilyDefaults(
        max_positions=4096, keys=LATENT_KEYS, routes=True, latent=True, biases=()
    ),
    methods=("noaux_tc",),
    scores="sigmoid",
    missing={
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
)


def read_v2(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `DeepseekV2ForCausalLM` checkpoint."""
    return read_latent(config, architecture, _V2)


def read_v3(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `DeepseekV3ForCausalLM` checkpoint."""
    return read_latent(config, architecture, _V3)


def read_latent(
    config: HfConfig, architecture: str, version: Version, layers: Collection[int] | None = None
) -> DecoderConfig:
    """The model with latent attention, and with experts as in this version.

    layers  which layers have experts; None: `first_k_dense_replace` and `moe_layer_freq` say so
    """
    # null has a meaning here that a `Key` cannot express: queries have no latent.
    has_no_q_rank = "q_lora_rank" in config and config["q_lora_rank"] is None
    given = {**config}
    if has_no_q_rank:
        del given["q_lora_rank"]
    settings = hf_config.read_settings(given, version.defaults)
    for name, value in version.missing.items():
        if settings[name] is None:
            settings[name] = value
    if not settings["rope_interleave"]:
        raise unsupported("rope_interleave", False, "True")
    settings["head_dim"] = settings["qk_rope_head_dim"]
    q_rank = None if has_no_q_rank else settings["q_lora_rank"]
    model = decoder_config(settings, architecture, _attention(settings, q_rank), read_mlp(settings))
    return with_routed_experts(settings, model, version, layers)


def _attention(settings: dict[str, Any], q_rank: int | None) -> LatentAttention:
    plain, rotated = settings["qk_nope_head_dim"], settings["qk_rope_head_dim"]
    if settings["kv_lora_rank"] > MAX_LATENT:
        raise unsupported("kv_lora_rank", settings["kv_lora_rank"], f"at most {MAX_LATENT}")
    if rotated % 2 or rotated > MAX_ROTATED:
        raise unsupported("qk_rope_head_dim", rotated, f"even, at most {MAX_ROTATED}")
    return LatentAttention(
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_attention_heads"],
        kv_rank=settings["kv_lora_rank"],
        q_rank=q_rank,
        plain_dim=plain,
        rotated_dim=rotated,
        value_dim=settings["v_head_dim"],
        scale=(plain + rotated) ** -0.5 * _scale_of(hf_config.rope(settings)),
        norm_eps=settings["rms_norm_eps"],
    )


def _scale_of(rope: RopeConfig) -> float:
    """Factor on the scores from scaled RoPE with `mscale_all_dim`, in addition to the factor in
    RoPE's tables.
    """
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def with_routed_experts(
    settings: dict[str, Any],
    model: DecoderConfig,
    version: Version,
    layers: Collection[int] | None = None,
) -> DecoderConfig:
    """The model with the experts that `settings` give it, routed as in this version.

    layers  as in `read_latent`
    """
    count, first = settings["n_routed_experts"], settings["first_k_dense_replace"]
    if layers is None:
        every = settings["moe_layer_freq"]
        layers = [index for index in range(first, model.num_layers) if index % every == 0]
    if not count or not layers:
        return model
    if count > MAX_EXPERTS:
        raise unsupported("n_routed_experts", count, f"at most {MAX_EXPERTS}")
    width, shared = settings["moe_intermediate_size"], settings["n_shared_experts"]
    router = _router(settings, version)
    check_router(settings, router, count)
    experts = Experts(
        hidden_size=model.hidden_size,
        ffn_size=width,
        experts=count,
        router=router,
        norm_eps=model.norm_eps,
        shared=Swiglu(
            hidden_size=model.hidden_size,
            ffn_size=width * shared,
            norm_eps=model.norm_eps,
            role="shared_",
        )
        if shared
        else None,
        corrected=version.scores == "sigmoid",
    )
    return with_experts(model, experts, layers)


def _router(settings: dict[str, Any], version: Version) -> Router:
    """The router of this version; ValueError for a routing method of another one."""
    method = settings["topk_method"] or version.methods[0]
    if method not in version.methods:
        raise unsupported("topk_method", method, ", ".join(map(repr, version.methods)))
    scores = settings["scoring_func"] or version.scores
    if scores != version.scores:
        raise unsupported("scoring_func", scores, repr(version.scores))
    normalised = settings["norm_topk_prob"]
    if normalised and version.scores == "softmax":
        # DeepSeek's code divides by the sum instead of scaling; transformers scales in any case.
        raise unsupported("norm_topk_prob", normalised, "False")
    chosen = settings["num_experts_per_tok"]
    if chosen is None:
        raise ValueError("config.json lacks 'num_experts_per_tok'")
    grouped = method != "greedy"
    return Router(
        top_k=chosen,
        scores="sigmoid" if version.scores == "sigmoid" else "softmax",
        normalised=normalised,
        scale=settings["routed_scaling_factor"],
        groups=settings["n_group"] if grouped else 1,
        top_groups=settings["topk_group"] if grouped else 1,
        group_best=2 if version.scores == "sigmoid" else 1,
    )
