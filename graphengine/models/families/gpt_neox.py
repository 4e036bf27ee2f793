"""GPT-NeoX (Pythia): blocks side by side, LayerNorms, biases, and RoPE on a part of each head."""

from __future__ import annotations

from graphengine.models.blocks.mlp import Mlp
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import GPT_NEOX_KEYS, HfConfig, read_keys
from graphengine.models.hf.decoder_config import composed, read_attention, ungated_activation
from graphengine.models.sublayers import Sublayer

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=2048, keys=GPT_NEOX_KEYS, rotated=(0.25, 0.5, 1.0)
)
# transformers' defaults for missing keys.
_MISSING = {
    "vocab_size": 50_432,
    "hidden_size": 6144,
    "intermediate_size": 24_576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "attention_bias": True,
}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `GPTNeoXForCausalLM` checkpoint."""
    # transformers ignores these.
    told = _MISSING | dict(config) | {"num_key_value_heads": None, "head_dim": None}
    own = read_keys(told, GPT_NEOX_KEYS)
    activation = ungated_activation("hidden_act", told.pop("hidden_act"))
    told |= {"rope_theta": own["rotary_emb_base"], "partial_rotary_factor": own["rotary_pct"]}
    settings = hf_config.read_settings(told, DEFAULTS)
    rope, eps = hf_config.rope(settings), own["layer_norm_eps"]
    attention = read_attention(
        settings, norm_eps=eps, rotated=rope.rotated, names=("dense", "norm")
    )
    mlp = Mlp(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        norm_eps=eps,
        bias=True,
        activation=activation,
        names=("dense_h_to_4h", "dense_4h_to_h"),
    )
    parallel = own["use_parallel_residual"]
    layer = (
        Sublayer("input_layernorm", "attention.", attention),
        Sublayer("post_attention_layernorm", "mlp.", mlp, parallel=parallel),
    )
    return composed(
        settings,
        architecture,
        (layer,) * settings["num_hidden_layers"],
        norm_eps=eps,
        norms="layer_biased",
        rope=rope,
        embedding_name="model.embed_in",
        final_norm_name="model.final_layer_norm",
    )
