"""StarCoder 2: LayerNorms and biases, grouped-query attention, and a feed-forward without gates."""

from __future__ import annotations

from graphengine.models.blocks.mlp import Mlp
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import STARCODER2_KEYS, HfConfig, read_keys
from graphengine.models.hf.decoder_config import composed, read_attention, ungated_activation
from graphengine.models.sublayers import usual_layer

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=4096,
    windows="all",
    keys=STARCODER2_KEYS,
    fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
)
# transformers' defaults for missing keys.
_MISSING = {
    "vocab_size": 49_152,
    "hidden_size": 3072,
    "intermediate_size": 12_288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": None,
}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Starcoder2ForCausalLM` checkpoint."""
    told = _MISSING | dict(config)
    for name in ("activation_function", "layer_norm_epsilon"):
        # Published configs have other names beside the ones that transformers reads.
        told.pop(name, None)
    own = read_keys(told, STARCODER2_KEYS)
    activation = ungated_activation("hidden_act", told.pop("hidden_act"))
    settings = hf_config.read_settings(told, DEFAULTS)
    eps, bias = own["norm_epsilon"], own["use_bias"]
    mlp = Mlp(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        norm_eps=eps,
        bias=bias,
        activation=activation,
        names=("c_fc", "c_proj"),
    )
    layers = tuple(
        usual_layer(
            read_attention(settings, norm_eps=eps, qkv_bias=bias, output_bias=bias, window=window),
            mlp,
            post_norms=False,
        )
        for window in settings["windows"] or (0,) * settings["num_hidden_layers"]
    )
    return composed(settings, architecture, layers, norm_eps=eps, norms="layer_biased")
