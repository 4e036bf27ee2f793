"""Phi-1, 1.5 and 2: blocks side by side after one LayerNorm, biases in all linears, lm_head's too,
and RoPE on a part of each head.
"""

from __future__ import annotations

from graphengine.models.blocks.mlp import Mlp
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, Key, read_keys, unsupported
from graphengine.models.hf.decoder_config import composed, read_attention, ungated_activation
from graphengine.models.sublayers import ATTENTION, MLP, Sublayer

_KEYS = (
    Key("layer_norm_eps", "number", (0, 1), default=1e-5),
    Key("qk_layernorm", "flag", default=False),
    # The number of rotated values of a head, which `partial_rotary_factor` also gives; transformers
    # ignores it.
    Key("rotary_dim", "integer", (1, 4096), default=None, null=True),
)
DEFAULTS = hf_config.FamilyDefaults(max_positions=2048, keys=_KEYS, rotated=None)
# transformers' defaults for missing keys.
_MISSING = {
    "vocab_size": 51_200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "gelu_new",
    "partial_rotary_factor": 0.5,
}
_NORM = "input_layernorm"


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `PhiForCausalLM` checkpoint."""
    told = _MISSING | dict(config)
    own = read_keys(told, _KEYS)
    if own["qk_layernorm"]:
        raise unsupported("qk_layernorm", True, "False")
    activation = ungated_activation("hidden_act", told.pop("hidden_act"))
    settings = hf_config.read_settings(told, DEFAULTS)
    rope, eps = hf_config.rope(settings), own["layer_norm_eps"]
    rotated = round(rope.rotated * settings["head_dim"])
    if own["rotary_dim"] not in (None, rotated):
        raise unsupported("rotary_dim", own["rotary_dim"], f"null or {rotated}")
    attention = read_attention(
        settings,
        norm_eps=eps,
        rotated=rope.rotated,
        qkv_bias=True,
        output_bias=True,
        names=("dense", "norm"),
    )
    mlp = Mlp(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        norm_eps=eps,
        bias=True,
        activation=activation,
        names=("fc1", "fc2"),
    )
    layer = (Sublayer(_NORM, ATTENTION, attention), Sublayer(_NORM, MLP, mlp, parallel=True))
    return composed(
        settings,
        architecture,
        (layer,) * settings["num_hidden_layers"],
        norm_eps=eps,
        norms="layer_biased",
        rope=rope,
        head_bias=True,
        final_norm_name="model.final_layernorm",
    )
