"""Language models of other families, beside a vision tower: Llava, Idefics3, SmolVLM, LFM2-VL,
Mistral 3 and Kimi K2.5.

`text_config` is the language model's own config, and its `model_type` names the family. Embeddings
of the tower stand in prompts like tokens: attention over them is causal, and positions have one
axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families import deepseek, lfm2, llama, ministral3, mistral, qwen2, qwen3
from graphengine.models.hf.config_schema import HfConfig, checked_language_model, unsupported

_READERS: Mapping[str, Callable[[HfConfig, str], DecoderConfig]] = {
    "deepseek_v3": deepseek.read_v3,
    "kimi_k2": deepseek.read_v3,
    "lfm2": lfm2.read_config,
    "lfm2_moe": lfm2.read_moe,
    "llama": llama.read_config,
    "ministral3": ministral3.read_config,
    "mistral": mistral.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}
_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
# transformers' defaults for sizes that a `text_config` may leave out; other models' configs must
# have them.
_SIZES: Mapping[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14_336, "num_key_value_heads": 8},
}
# The family of a `text_config` that names none, and whether lm_head is tied where no key says so.
_DEFAULTS = {
    "Idefics3ForConditionalGeneration": ("llama", False),
    "KimiK25ForConditionalGeneration": ("deepseek_v3", True),
    "Kimi_K25ForConditionalGeneration": ("deepseek_v3", True),
    "Lfm2VlForConditionalGeneration": ("lfm2", True),
    "LlavaForConditionalGeneration": ("llama", False),
    "Mistral3ForConditionalGeneration": ("mistral", True),
    "SmolVLMForConditionalGeneration": ("llama", False),
}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """The language model's config, as its own family reads it."""
    family, tied = _DEFAULTS[architecture]
    text = checked_language_model(config)
    if text is config:
        raise unsupported("text_config", None, "the language model's config, a JSON object")
    kind = text.get("model_type", family)
    if not isinstance(kind, str) or kind not in _READERS:
        raise unsupported("text_config.model_type", kind, ", ".join(map(repr, _READERS)))
    told = {**_SIZES.get(kind, {}), **text}
    told["tie_word_embeddings"] = _is_tied(config, text, architecture, tied)
    # An older name of the same key, which LFM2 would read.
    told.pop("tie_embedding", None)
    return _READERS[kind](told, architecture)


def _is_tied(config: HfConfig, text: HfConfig, architecture: str, default: bool) -> Any:
    """Whether lm_head is the embedding: transformers reads it beside `text_config`."""
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", default))
    if architecture == "LlavaForConditionalGeneration":
        return tied or text.get("tie_word_embeddings", False)
    return tied
