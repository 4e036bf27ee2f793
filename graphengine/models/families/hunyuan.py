"""Hunyuan v1, dense and with experts: norms of each head's query and key after RoPE.

RoPE of the type `dynamic` with an `alpha` has a larger base at all lengths.
"""

from __future__ import annotations

from typing import Any

from graphengine.kernels.experts.router import Router
from graphengine.models.blocks.expert_names import ExpertNames
from graphengine.models.blocks.experts import Experts
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, Key, read_keys, unsupported
from graphengine.models.hf.decoder_config import (
    decoder_config,
    expert_count,
    read_attention,
    read_mlp,
    with_experts,
)

# Keys that other code for these models reads, and transformers does not.
_FIXED = {
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
    "norm_type": ("rms", "hf_rms"),
    **dict.fromkeys(("use_cla", "use_mla", "position_embedding_xdrope"), (False,)),
}
DEFAULTS = hf_config.FamilyDefaults(max_positions=2048, fixed=_FIXED | {"num_experts": (0, 1)})
MOE_DEFAULTS = hf_config.FamilyDefaults(
    max_positions=2048,
    keys=(
        Key("num_experts", "integer", (1, 2**16), default=1),
        Key("num_experts_per_tok", "integer", (1, 2**16), default=1),
    ),
    routes=True,
    fixed=_FIXED
    | {
        "num_shared_expert": (1,),
        "use_mixed_mlp_moe": (True,),
        "moe_layer_num_skipped": (0,),
        "group_limited_greedy": (False,),
        "norm_topk_prob": (True,),
    },
)
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {"vocab_size": 290_943, "rms_norm_eps": 1e-5}
NAMES = ExpertNames(
    router="gate.wg",
    shared="shared_mlp.",
    other=ExpertNames(
        products=("experts.gate_up_proj", "experts.down_proj"),
        ending="",
        router="gate.wg",
        shared="shared_mlp.",
    ),
)
_ROPE = (
    Key("alpha", "number", (1e-3, 1e9)),
    Key("rope_theta", "number", (1.01, 1e30), default=None, null=True),
)
# One value, or a list of one for each layer.
_LISTED = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `HunYuanDenseV1ForCausalLM` checkpoint."""
    return _read(hf_config.read_settings(_spelled_out(config), DEFAULTS), architecture)


def read_moe(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `HunYuanMoEV1ForCausalLM` checkpoint."""
    told = _spelled_out(config)
    for name in _LISTED:
        if isinstance(values := told.get(name), list):
            if len({*values}) != 1:
                raise unsupported(name, values, "the same for every layer")
            told[name] = values[0]
    width = told.pop("moe_intermediate_size", None)
    if width not in (None, told.get("intermediate_size")):
        # transformers ignores it.
        expected = f"null, or intermediate_size={told.get('intermediate_size')}"
        raise unsupported("moe_intermediate_size", width, expected)
    if (chosen := told.pop("moe_topk", None)) is not None:
        told["num_experts_per_tok"] = chosen
    settings = hf_config.read_settings(told, MOE_DEFAULTS)
    model = _read(settings, architecture)
    experts = Experts(
        hidden_size=model.hidden_size,
        ffn_size=settings["intermediate_size"],
        experts=expert_count(settings, "num_experts"),
        router=Router(top_k=settings["num_experts_per_tok"], normalised=True),
        norm_eps=model.norm_eps,
        shared=read_mlp(settings, role="shared_"),
        names=NAMES,
    )
    return with_experts(model, experts, range(model.num_layers))


def _read(settings: dict[str, Any], architecture: str) -> DecoderConfig:
    attention = read_attention(
        settings, qk_norm="after", names=("o_proj", "query_layernorm", "key_layernorm")
    )
    return decoder_config(settings, architecture, attention, read_mlp(settings))


def _spelled_out(config: HfConfig) -> dict[str, Any]:
    """The config in the other families' keys: RoPE without an `alpha`, heads by one name."""
    told = _MISSING | dict(config)
    # It matters only with `use_cla`, which is refused.
    told.pop("cla_share_factor", None)
    if told.get("head_dim") is None:
        told["head_dim"] = told.get("attention_head_dim")
    for name in ("rope_scaling", "rope_parameters"):
        given = told.get(name)
        if not isinstance(given, dict) or given.get("alpha") is None:
            continue
        if given.get("rope_type", given.get("type")) == "dynamic":
            told[name] = _stretched(told, given, name)
    return told


def _stretched(told: dict[str, Any], given: dict[str, Any], name: str) -> dict[str, Any]:
    """RoPE with the base that its `alpha` makes."""
    values = read_keys(given, _ROPE, inside=name)
    rest = read_keys(told)
    head_dim = rest["head_dim"] or rest["hidden_size"] // rest["num_attention_heads"]
    if head_dim <= 2:
        raise unsupported(f"{name}.alpha", given["alpha"], f"null in heads of {head_dim} values")
    theta = values["rope_theta"] or rest["rope_theta"]
    theta *= values["alpha"] ** (head_dim / (head_dim - 2))
    return {"rope_type": "default", "rope_theta": theta}
