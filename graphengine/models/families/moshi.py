"""Moshi: a Llama backbone whose step gives a frame's text token, and a depth decoder for the codes
of its sound, which has weights of its own for each code.

A position's input is the sum of the embeddings of the token, of Moshi's codes and of the user's
codes at that time. All codes of sound but the first of a frame come one frame late. The codec
between codes and sound is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    MOSHI_KEYS,
    HfConfig,
    read_key,
    read_keys,
    unsupported,
)
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp
from graphengine.models.inner.inner_decoder import InnerDecoder, InnerNames
from graphengine.models.sublayers import usual_layer

BACKBONE = hf_config.FamilyDefaults(max_positions=3000, biases=(), keys=MOSHI_KEYS)
DEPTH = hf_config.FamilyDefaults(max_positions=9, biases=(), keys=MOSHI_KEYS)
# transformers' defaults, where they are not the usual ones.
_SIZES: Mapping[str, Any] = {"vocab_size": 32_000, "rms_norm_eps": 1e-8}
_BACKBONE_SIZES: Mapping[str, Any] = {
    **_SIZES,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "sliding_window": 3000,
}
_DEPTH_SIZES: Mapping[str, Any] = {
    **_SIZES,
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "ffn_dim": 5632,
}
_DEPTH_WINDOW = 8
_CODES_OF_CODEC = 2048
_MLP_NAMES = ("fc1", "", "fc2")
NAMES = InnerNames(
    frames="model.embed_tokens.{}",
    codes="depth_decoder.embed_tokens.{}",
    projection="depth_decoder.input_projections",
    layers="depth_decoder.layers.",
    norm="",
    heads="depth_decoder.lm_heads",
    first="depth_decoder.text_embed_tokens",
)
# Codes travel to the host as 16 bits.
_MOST_CODES = 2**15 - 2


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `MoshiForConditionalGeneration` checkpoint, with its inner decoder."""
    settings = _settings(config, _BACKBONE_SIZES, BACKBONE)
    return decoder_config(
        settings,
        architecture,
        read_attention(settings),
        read_mlp(settings, names=_MLP_NAMES, one_linear=True),
        inner=_inner(settings),
    )


def _inner(settings: Mapping[str, Any]) -> InnerDecoder:
    """The depth decoder, by the backbone's settings; ValueError if the two do not fit."""
    given = settings["depth_decoder_config"] or {}
    codes, books = _codes(settings), settings["num_codebooks"]
    # A window that covers all positions of a frame hides nothing.
    window = read_key({"sliding_window": _DEPTH_WINDOW, **given}, "sliding_window")
    if window is not None and window < books:
        raise unsupported("depth_decoder_config.sliding_window", window, f"num_codebooks={books}")
    depth = _settings({**given, "sliding_window": None}, _DEPTH_SIZES, DEPTH)
    for name, found, wanted in (
        ("num_codebooks", depth["num_codebooks"], books),
        ("audio_vocab_size", depth["audio_vocab_size"] or codes, codes),
        ("vocab_size", depth["vocab_size"], settings["vocab_size"]),
        ("input_size", depth["input_size"], settings["hidden_size"]),
    ):
        if found != wanted:
            raise unsupported(f"depth_decoder_config.{name}", found, f"{wanted}, the backbone's")
    if depth["rope_parameters"] or depth["rope_scaling"]:
        rope = depth["rope_parameters"] or depth["rope_scaling"]
        raise unsupported("depth_decoder_config.rope_parameters", rope, "null: it has no RoPE")
    layer = usual_layer(
        read_attention(depth, nope=True),
        read_mlp(depth, names=_MLP_NAMES, one_linear=True),
        post_norms=False,
    )
    return InnerDecoder(
        steps=1 + books,
        codes=codes,
        first_codes=settings["vocab_size"],
        width=settings["hidden_size"],
        hidden_size=depth["hidden_size"],
        norm_eps=depth["rms_norm_eps"],
        layers=(layer,) * depth["num_hidden_layers"],
        rope=hf_config.rope(depth),
        end_code=-1,
        judged=1,
        names=NAMES,
        tied=False,
        fed=True,
        fed_books=books,
        begins=1,
        per_run=True,
    )


def _codes(settings: Mapping[str, Any]) -> int:
    """Codes of a codebook; ValueError for more than travel to the host."""
    codec = settings["audio_encoder_config"] or {}
    codes: int = settings["audio_vocab_size"] or codec.get("codebook_size", _CODES_OF_CODEC)
    for name, count in (("audio_vocab_size", codes), ("vocab_size", settings["vocab_size"])):
        if not isinstance(count, int) or not 1 <= count <= _MOST_CODES:
            raise unsupported(name, count, f"1 to {_MOST_CODES} codes of a codebook")
    return codes


def _settings(
    config: HfConfig, sizes: Mapping[str, Any], family: hf_config.FamilyDefaults
) -> dict[str, Any]:
    """The settings of one of the two decoders; neither has its head tied to its embedding."""
    told = {**sizes, **config, "tie_word_embeddings": False}
    width = read_keys(told, MOSHI_KEYS)["ffn_dim"]
    if width % 2:
        raise unsupported("ffn_dim", width, "an even number: gates and ups")
    return hf_config.read_settings({**told, "intermediate_size": width // 2}, family)
