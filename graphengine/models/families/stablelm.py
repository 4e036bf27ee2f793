"""StableLM: Llama's blocks after LayerNorms, one after the other or side by side.

RoPE rotates a quarter of each head.
"""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import STABLELM_KEYS, HfConfig
from graphengine.models.hf.decoder_config import composed, read_attention, read_mlp
from graphengine.models.sublayers import ATTENTION, MLP, Sublayer

DEFAULTS = hf_config.FamilyDefaults(max_positions=4096, keys=STABLELM_KEYS, rotated=None, biases=())
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {
    "vocab_size": 50_304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
}
_NORM = "input_layernorm"


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `StableLmForCausalLM` checkpoint."""
    # The size of a head follows from hidden_size alone.
    told = _MISSING | dict(config) | {"head_dim": None}
    settings = hf_config.read_settings(told, DEFAULTS)
    rope, eps = hf_config.rope(settings), settings["layer_norm_eps"]
    attention = read_attention(
        settings, norm_eps=eps, rotated=rope.rotated, qkv_bias=settings["use_qkv_bias"]
    )
    parallel = settings["use_parallel_residual"]
    norm = _NORM if parallel else "post_attention_layernorm"
    layer = (
        Sublayer(_NORM, ATTENTION, attention),
        Sublayer(norm, MLP, read_mlp(settings, norm_eps=eps), parallel=parallel),
    )
    layers = (layer,) * settings["num_hidden_layers"]
    return composed(settings, architecture, layers, norm_eps=eps, norms="layer_biased", rope=rope)
