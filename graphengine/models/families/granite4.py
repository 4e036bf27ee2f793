"""Granite 4's hybrids: Mamba2 or attention, then a SwiGLU or experts, and multipliers.

Each block's output is multiplied by `residual_multiplier` r before it is added. Here the stream is
kept divided by r instead: embeddings are divided, and outputs are added as they are. RMSNorms give
the same result with an epsilon of eps / r**2, so r costs neither a kernel nor a rounding of
weights.
"""

from __future__ import annotations

from typing import Any

from graphengine.kernels.experts.router import Router
from graphengine.kernels.recurrent.mamba2.mamba2_sizes import Mamba2Sizes
from graphengine.models.blocks.expert_names import ExpertNames
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.mamba2 import Mamba2
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.granite import composed, read_attention, stream_eps
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import GRANITE_KEYS, HfConfig, unsupported
from graphengine.models.hf.decoder_config import expert_count
from graphengine.models.hf.mamba_config import time_step_limits, with_plain_limits
from graphengine.models.sublayers import Sublayer

DEFAULTS = hf_config.FamilyDefaults(max_positions=2048, keys=GRANITE_KEYS)
# Names of the routed experts and of the shared ones, which run side by side in a layer.
_ROUTER, _SHARED = "block_sparse_moe.router.layer", "shared_mlp."
EXPERT_NAMES = ExpertNames(
    router=_ROUTER,
    products=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    shared=_SHARED,
    # As GGUF files have them.
    other=ExpertNames(
        router=_ROUTER,
        products=tuple(
            f"block_sparse_moe.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")
        ),
        shared=_SHARED,
    ),
)
_MAMBA, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `GraniteMoeHybridForCausalLM` checkpoint."""
    settings = _read_settings(config)
    types = _layer_types(config, settings)
    eps = stream_eps(settings)
    positions = settings["position_embedding_type"]
    if positions not in (None, "nope", "rope"):
        raise unsupported("position_embedding_type", positions, "null, 'nope', 'rope'")
    mamba = Mamba2(
        hidden_size=settings["hidden_size"],
        sizes=_mamba_sizes(settings),
        norm_eps=eps,
        gate_eps=settings["rms_norm_eps"],
        bias=settings["mamba_proj_bias"],
        conv_bias=settings["mamba_conv_bias"],
    )
    after = _feed_forward(settings, eps)
    mixers = {
        True: Sublayer("input_layernorm", "self_attn.", read_attention(settings)),
        False: Sublayer("input_layernorm", "mamba.", mamba),
    }
    layers = tuple((mixers[kind in _ATTENTION], after) for kind in types)
    rope = hf_config.rope(settings) if positions == "rope" else None
    return composed(settings, architecture, layers, rope=rope)


def _read_settings(config: HfConfig) -> dict[str, Any]:
    """The settings without the layer types, which differ from those of other families."""
    told = with_plain_limits(config)
    for name in ("layer_types", "layers_block_type"):
        told.pop(name, None)
    if not told.get("num_local_experts", 1):
        # The width of routed experts, which this model has none of.
        told["intermediate_size"] = told.get("intermediate_size") or 1
    if told.get("mamba_d_head") == "auto":
        told["mamba_d_head"] = None
    return hf_config.read_settings(told, DEFAULTS)


def _feed_forward(settings: dict[str, Any], eps: float) -> Sublayer:
    """A SwiGLU. With routed experts it is the shared feed-forward, which every token takes."""
    count = expert_count(settings, "num_local_experts")
    mlp = Swiglu(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["shared_intermediate_size"],
        norm_eps=eps,
        role="shared_" if count else "",
        names=("input_linear", "", "output_linear"),
        one_linear=True,
    )
    if not count:
        return Sublayer("post_attention_layernorm", EXPERT_NAMES.shared, mlp)
    experts = Experts(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        experts=count,
        router=Router(top_k=settings["num_experts_per_tok"], scores="softmax_of_chosen"),
        norm_eps=eps,
        shared=mlp,
        names=EXPERT_NAMES,
    )
    return Sublayer("post_attention_layernorm", "", experts)


def _layer_types(config: HfConfig, settings: dict[str, Any]) -> list[str]:
    types = config.get("layer_types") or config.get("layers_block_type")
    return hf_config.types_of_layers(types, settings, (*_MAMBA, *_ATTENTION), _ATTENTION)


def _mamba_sizes(settings: dict[str, Any]) -> Mamba2Sizes:
    heads, inner = settings["mamba_n_heads"], settings["mamba_expand"] * settings["hidden_size"]
    head_dim = settings["mamba_d_head"] or inner // heads
    if heads * head_dim != inner:
        raise ValueError(
            f"config.json has mamba_n_heads={heads} of mamba_d_head={head_dim}, which are not "
            f"mamba_expand * hidden_size = {inner}"
        )
    if heads % settings["mamba_n_groups"]:
        raise ValueError(
            f"config.json has mamba_n_heads={heads}, no multiple of "
            f"mamba_n_groups={settings['mamba_n_groups']}"
        )
    return Mamba2Sizes(
        heads=heads,
        head_dim=head_dim,
        groups=settings["mamba_n_groups"],
        state_size=settings["mamba_d_state"],
        width=settings["mamba_d_conv"],
        **time_step_limits(settings),
    )
