"""The language models of Qwen2-VL and Qwen2.5-VL: Qwen2, with RoPE of three axes.

Published configs have the language model's keys beside `vision_config`, newer ones under
`text_config`. For text alone RoPE has one axis: a token has the same position on all of them.
"""

from __future__ import annotations

from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    HfConfig,
    checked_language_model,
)
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

DEFAULTS = hf_config.FamilyDefaults(max_positions=32768, windows="switched")
_BESIDE = ("vision_config", "text_config")


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen2VLForConditionalGeneration` or `Qwen2_5_VL...` checkpoint."""
    text = checked_language_model(config, ("rope_scaling",))
    told: dict[str, Any] = {name: value for name, value in text.items() if name not in _BESIDE}
    if text is not config:
        told["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    settings = hf_config.read_settings(hf_config.of_one_axis(told), DEFAULTS)
    attention = read_attention(settings, qkv_bias=True, output_bias=False)
    rope = hf_config.with_axes(hf_config.rope(settings), told)
    return decoder_config(settings, architecture, attention, read_mlp(settings), rope=rope)
