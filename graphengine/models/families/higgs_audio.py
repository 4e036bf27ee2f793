"""Higgs Audio v2: Llama with feed-forwards of text and of sound, whose steps draw all codes of a
frame at once.

A chunk of a prompt has norms and feed-forwards by the kind of each position: sound where there is
an embedding, text where there is a token. Decode steps feed sound. The codec between frames and
sound is not read, nor is the head of text, which transformers does not use either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphengine.models.blocks.swiglu import SwigluByKind
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HIGGS_KEYS, HfConfig, unsupported
from graphengine.models.hf.decoder_config import composed, read_attention, read_mlp
from graphengine.models.inner.parallel_heads import ParallelHeads
from graphengine.models.sublayers import ATTENTION, Sublayer

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=2048, head_dim=128, biases=("attention_bias", "mlp_bias"), keys=HIGGS_KEYS
)
# transformers' defaults, where they are not the usual ones.
_SIZES: Mapping[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "high_freq_factor": 0.5,
    "low_freq_factor": 0.125,
    "original_max_position_embeddings": 1024,
}
_SOUND, _TEXT = "audio_mlp.", "mlp."
# Codes travel to the host as 16 bits.
_MOST_CODES = 2**15 - 1


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `HiggsAudioV2ForConditionalGeneration` checkpoint."""
    rope = {} if config.get("rope_parameters") else {"rope_parameters": _ROPE}
    settings = hf_config.read_settings(
        {**_SIZES, **config, **rope, "tie_word_embeddings": False}, DEFAULTS
    )
    mlp = read_mlp(settings, bias=settings["mlp_bias"])
    by_kind = SwigluByKind(
        hidden_size=mlp.hidden_size,
        ffn_size=mlp.ffn_size,
        norm_eps=mlp.norm_eps,
        bias=mlp.bias,
        own_prefix=_SOUND,
        text_prefix=_TEXT,
    )
    attention = read_attention(settings)
    layer = (
        Sublayer("audio_input_layernorm", ATTENTION, attention, text_norm="input_layernorm"),
        Sublayer(
            "audio_post_attention_layernorm",
            _SOUND,
            by_kind,
            text_norm="post_attention_layernorm",
        ),
    )
    layers = (layer,) * settings["num_hidden_layers"]
    return composed(settings, architecture, layers, inner=_heads(settings))


def _heads(settings: Mapping[str, Any]) -> ParallelHeads:
    """The heads; ValueError for codes that do not fit."""
    codes, text = settings["codebook_size"], settings["vocab_size"]
    if codes > _MOST_CODES:
        raise unsupported("codebook_size", codes, f"at most {_MOST_CODES} codes of a codebook")
    if text <= codes:
        # The id after the codes stands for the frame that ends a request.
        raise unsupported("vocab_size", text, f"more than codebook_size={codes}")
    begin, end = settings["audio_stream_bos_id"], settings["audio_stream_eos_id"]
    for name, code in (("audio_stream_bos_id", begin), ("audio_stream_eos_id", end)):
        if not 1 <= code < codes:
            raise unsupported(name, code, f"1 to {codes - 1}, one of the codes")
    if begin == end:
        raise unsupported("audio_stream_eos_id", end, f"another than audio_stream_bos_id={begin}")
    return ParallelHeads(
        steps=settings["num_codebooks"],
        codes=codes,
        width=settings["hidden_size"],
        begin_code=begin,
        end_code=end,
        begin_id=settings["audio_bos_token_id"],
        place_ids=(settings["audio_token_id"], settings["audio_delay_token_id"]),
        frames="model.embed_audio_tokens.embed_audio_tokens",
        heads="audio_lm_head",
    )
