"""Nemotron-H and Nemotron 3: each layer is a norm and either Mamba2, attention, an MLP or experts.

Attention has no position encoding, and the MLP and the experts have a squared ReLU and no gates. In
Super and Ultra experts read and write a latent.
"""

from __future__ import annotations

from typing import Any

from graphengine.kernels.recurrent.mamba2.mamba2_sizes import Mamba2Sizes
from graphengine.models.blocks.expert_names import ExpertNames
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.mamba2 import Mamba2
from graphengine.models.blocks.mlp import Mlp
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import NEMOTRON_KEYS, HfConfig, Key, unsupported
from graphengine.models.hf.decoder_config import (
    composed,
    corrected_router,
    expert_count,
    read_attention,
)
from graphengine.models.hf.mamba_config import time_step_limits, with_plain_limits
from graphengine.models.sublayers import Block, Sublayer

_EXPERT_KEYS = (
    Key("num_experts_per_tok", "integer", (1, 2**16), default=2),
    Key("moe_intermediate_size", "integer", (1, 2**22), default=7688),
    Key("routed_scaling_factor", "number", (1e-6, 1e6), default=1.0),
    Key("n_group", "integer", (1, 2**16), default=1),
    Key("topk_group", "integer", (1, 2**16), default=1),
    Key("norm_topk_prob", "flag", default=True),
)
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=4096, keys=NEMOTRON_KEYS + _EXPERT_KEYS, routes=True, biases=("mlp_bias",)
)
NAMES = ExpertNames(
    products=("experts.{}.up_proj", "experts.{}.down_proj"),
    # As transformers has them in memory.
    other=ExpertNames(products=("experts.up_proj", "experts.down_proj"), ending=""),
)
_HEAD_DIM, _EXPERTS, _SHARED_WIDTH = 128, 8, 7688
# Kinds of layers: their letters in a pattern, and their names in a list.
_MAMBA, _ATTENTION, _MLP, _MOE = "M", "*", "-", "E"
_KNOWN = f"{_MAMBA}, {_ATTENTION}, {_MLP}, {_MOE}"
_LETTERS = {
    "linear_attention": _MAMBA,
    "mamba": _MAMBA,
    "full_attention": _ATTENTION,
    "attention": _ATTENTION,
    "mlp": _MLP,
    "moe": _MOE,
}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `NemotronHForCausalLM` checkpoint."""
    pattern = _pattern(config)
    settings = _read_settings(config, pattern)
    hidden, eps = settings["hidden_size"], settings["layer_norm_epsilon"]
    blocks: dict[str, Block] = {
        _ATTENTION: read_attention(settings, norm_eps=eps),
        _MAMBA: Mamba2(
            hidden_size=hidden,
            sizes=_mamba_sizes(settings),
            norm_eps=eps,
            gate_eps=eps,
            bias=settings["use_bias"],
            conv_bias=settings["use_conv_bias"],
            state_dtype=hf_config.state_dtype(settings, "mamba_ssm_cache_dtype"),
        ),
        _MLP: Mlp(
            hidden_size=hidden,
            ffn_size=settings["intermediate_size"],
            norm_eps=eps,
            bias=settings["mlp_bias"],
        ),
    }
    if _MOE in pattern:
        blocks[_MOE] = _experts(settings)
    return composed(
        settings,
        architecture,
        tuple((Sublayer("norm", "mixer.", blocks[letter]),) for letter in pattern),
        norm_eps=eps,
        rope=None,
        embedding_name="model.embeddings",
        final_norm_name="model.norm_f",
    )


def _pattern(config: HfConfig) -> str:
    """A letter for each layer."""
    types, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    types = config.get("layer_types") if types is None else types
    if types is not None:
        letters = types if isinstance(types, list) else [types]
        letters = [_LETTERS.get(kind, "?") if isinstance(kind, str) else "?" for kind in letters]
        name, given, known = "layers_block_type", types, ", ".join(map(repr, _LETTERS))
    else:
        letters = list(pattern) if isinstance(pattern, str) else ["?"]
        name, given, known = "hybrid_override_pattern", pattern, _KNOWN
    if any(letter not in _LETTERS.values() for letter in letters) or _ATTENTION not in letters:
        raise unsupported(name, given, f"{known} for each layer, one that attends among them")
    layers = config.get("num_hidden_layers")
    if layers not in (None, len(letters)):
        raise unsupported("num_hidden_layers", layers, f"{len(letters)}, as {name} has")
    return "".join(letters)


def _read_settings(config: HfConfig, pattern: str) -> dict[str, Any]:
    """The settings, without the layer pattern."""
    told = with_plain_limits(config)
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        told.pop(name, None)
    told["num_hidden_layers"] = len(pattern)
    if told.get("head_dim") is None:
        told["head_dim"] = told.get("attention_head_dim") or _HEAD_DIM
    settings = hf_config.read_settings(told, DEFAULTS)
    for name, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if settings[name] != only:
            raise unsupported(name, settings[name], repr(only))
    if settings["mamba_proj_bias"] and not settings["use_bias"]:
        # transformers ignores this key.
        raise unsupported("mamba_proj_bias", True, "False, or use_bias=True")
    return settings


def _experts(settings: dict[str, Any]) -> Experts:
    """The experts, and the shared one, which there always is."""
    if settings["n_shared_experts"] not in (None, 1):
        raise unsupported("n_shared_experts", settings["n_shared_experts"], "null or 1")
    if settings["mlp_bias"]:
        raise unsupported("mlp_bias", True, "False in a model with experts")
    if settings["n_routed_experts"] is None:
        settings["n_routed_experts"] = _EXPERTS
    hidden, eps = settings["hidden_size"], settings["layer_norm_epsilon"]
    count = expert_count(settings, "n_routed_experts")
    return Experts(
        hidden_size=hidden,
        ffn_size=settings["moe_intermediate_size"],
        experts=count,
        router=corrected_router(settings, count),
        norm_eps=eps,
        gated=False,
        latent=settings["moe_latent_size"] or 0,
        corrected=True,
        shared=Mlp(
            hidden_size=hidden,
            ffn_size=settings["moe_shared_expert_intermediate_size"] or _SHARED_WIDTH,
            norm_eps=eps,
            role="shared_",
        ),
        names=NAMES,
    )


def _mamba_sizes(settings: dict[str, Any]) -> Mamba2Sizes:
    heads, groups = settings["mamba_num_heads"], settings["n_groups"]
    if heads % groups:
        raise ValueError(
            f"config.json has mamba_num_heads={heads}, no multiple of n_groups={groups}"
        )
    return Mamba2Sizes(
        heads=heads,
        head_dim=settings["mamba_head_dim"],
        groups=groups,
        state_size=settings["ssm_state_size"],
        width=settings["conv_kernel"],
        **time_step_limits(settings),
    )
