"""Seed-OSS: Llama, with biases of queries, keys and values, and in few models of the output."""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, Key
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=524_288,
    head_dim=128,
    keys=(Key("attention_out_bias", "flag", default=False),),
    biases=("attention_bias", "mlp_bias"),
)
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {"num_key_value_heads": 8, "attention_bias": True}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `SeedOssForCausalLM` checkpoint."""
    given = {**_MISSING, **config}
    settings = hf_config.read_settings(given, DEFAULTS)
    if "head_dim" in given and given["head_dim"] is None:
        # Only a missing key means 128.
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    attention = read_attention(settings, output_bias=settings["attention_out_bias"])
    mlp = read_mlp(settings, bias=settings["mlp_bias"])
    return decoder_config(settings, architecture, attention, mlp)
