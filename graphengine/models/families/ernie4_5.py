"""ERNIE 4.5 without experts: Llama whose RoPE rotates pairs of neighbouring values."""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, Key
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=131_072,
    head_dim=128,
    keys=(Key("use_bias", "flag", default=False, null=True),),
    biases=(),
)
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of an `Ernie4_5ForCausalLM` checkpoint."""
    given = {**_MISSING, **config}
    settings = hf_config.read_settings(given, DEFAULTS)
    if "head_dim" in given and given["head_dim"] is None:
        # Only a missing key means 128.
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    bias = settings["use_bias"]
    attention = read_attention(settings, qkv_bias=bias, output_bias=bias, interleaved=True)
    return decoder_config(settings, architecture, attention, read_mlp(settings, bias=bias))
