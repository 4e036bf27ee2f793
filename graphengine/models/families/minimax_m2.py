"""MiniMax-M2: experts in every layer, chosen by corrected sigmoids, and norms of all heads' queries
together, and of all keys. RoPE rotates half of each head.
"""

from __future__ import annotations

from typing import Any

from graphengine.kernels.experts.router import Router
from graphengine.models.blocks.experts import Experts
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.mixtral import NAMES
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, Key, unsupported
from graphengine.models.hf.decoder_config import composed, expert_count, read_attention, read_mlp
from graphengine.models.sublayers import Sublayer

_KEYS = (
    Key("num_local_experts", "integer", (1, 2**16), default=256),
    Key("num_experts_per_tok", "integer", (1, 2**16), default=8),
    # The older name of `partial_rotary_factor`, in values of a head.
    Key("rotary_dim", "integer", (1, 4096), default=None, null=True),
)
# Keys that other code for the model reads, and transformers does not.
_FIXED = {
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "use_routing_bias": (True,),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "shared_moe_mode": ("sigmoid",),
}
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=196_608,
    head_dim=128,
    keys=_KEYS,
    routes=True,
    rotated=None,
    biases=(),
    fixed=_FIXED,
)
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {"num_key_value_heads": 8, "rope_theta": 5e6}
_NAMES = NAMES._replace(correction="e_score_correction_bias")
_ATTENDS = 1


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `MiniMaxM2ForCausalLM` checkpoint."""
    told = {**_MISSING, **config}
    kinds = told.pop("attn_type_list", None)
    if kinds not in (None, [_ATTENDS] * len(kinds or ())):
        raise unsupported("attn_type_list", kinds, f"null, or {_ATTENDS} for every layer")
    settings = hf_config.read_settings(told, DEFAULTS)
    rope = hf_config.rope(_with_rotary_dim(settings))
    experts = Experts(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        experts=expert_count(settings, "num_local_experts"),
        router=Router(top_k=settings["num_experts_per_tok"], scores="sigmoid", normalised=True),
        norm_eps=settings["rms_norm_eps"],
        corrected=True,
        names=_NAMES,
    )
    attention = read_attention(settings, qk_norm=True, row_norm=True, rotated=rope.rotated)
    layer = (
        Sublayer("input_layernorm", "self_attn.", attention),
        Sublayer("post_attention_layernorm", "block_sparse_moe.", experts),
    )
    layers = (layer,) * settings["num_hidden_layers"]
    return composed(settings, architecture, layers, mlp=read_mlp(settings), rope=rope)


def _with_rotary_dim(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a `partial_rotary_factor` in place of a `rotary_dim`."""
    rotary_dim, head_dim = settings["rotary_dim"], settings["head_dim"]
    if rotary_dim is None:
        return settings
    return settings | {"partial_rotary_factor": rotary_dim / head_dim}
