"""CSM: a Llama backbone whose step gives a frame's first code, and a depth decoder for the others.

Its prompts are text, by embeddings of their own, and frames, by the sums of their codes'
embeddings. The codec between frames and sound is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import CSM_KEYS, HfConfig, unsupported
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp
from graphengine.models.inner.inner_decoder import InnerDecoder, InnerNames
from graphengine.models.sublayers import usual_layer

_BIASES = ("attention_bias", "mlp_bias")
BACKBONE = hf_config.FamilyDefaults(max_positions=2048, biases=_BIASES, keys=CSM_KEYS)
DEPTH = hf_config.FamilyDefaults(max_positions=33, biases=_BIASES, keys=CSM_KEYS)
# transformers' defaults, where they are not the usual ones.
_SIZES: Mapping[str, Any] = {
    "vocab_size": 2051,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_BACKBONE_SIZES: Mapping[str, Any] = {
    **_SIZES,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_DEPTH_SIZES: Mapping[str, Any] = {
    **_SIZES,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
NAMES = InnerNames(
    frames="model.embed_tokens.embed_audio_tokens",
    codes="depth_decoder.model.embed_tokens",
    projection="depth_decoder.model.inputs_embeds_projector",
    layers="depth_decoder.model.layers.",
    norm="depth_decoder.model.norm",
    heads="depth_decoder.codebooks_head",
)
# Codes travel to the host as 16 bits.
_MOST_CODES = 2**15 - 1


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `CsmForConditionalGeneration` checkpoint, with its inner decoder."""
    settings = _settings(config, _BACKBONE_SIZES, BACKBONE)
    codes, text = settings["vocab_size"], settings["text_vocab_size"]
    if codes > _MOST_CODES:
        raise unsupported("vocab_size", codes, f"at most {_MOST_CODES} codes of a codebook")
    if text <= codes:
        # The id after the codes stands for the frame that ends a request.
        raise unsupported("text_vocab_size", text, f"more than vocab_size={codes}")
    mlp = read_mlp(settings, bias=settings["mlp_bias"])
    return decoder_config(
        settings,
        architecture,
        read_attention(settings),
        mlp,
        vocab_size=text,
        embedding_name="embed_text_tokens",
        inner=_inner(settings),
    )


def _inner(settings: Mapping[str, Any]) -> InnerDecoder:
    """The depth decoder, by the backbone's settings; ValueError if the two do not fit."""
    depth = _settings(settings["depth_decoder_config"] or {}, _DEPTH_SIZES, DEPTH)
    steps, end = settings["num_codebooks"], settings["codebook_eos_token_id"]
    for name, wanted in (
        ("num_codebooks", steps),
        ("vocab_size", settings["vocab_size"]),
        ("backbone_hidden_size", settings["hidden_size"]),
    ):
        if depth[name] != wanted:
            raise unsupported(
                f"depth_decoder_config.{name}", depth[name], f"{wanted}, the backbone's"
            )
    positions = depth["max_position_embeddings"]
    if positions < steps:
        raise unsupported(
            "depth_decoder_config.max_position_embeddings", positions, f"num_codebooks={steps}"
        )
    if end >= settings["vocab_size"]:
        raise unsupported("codebook_eos_token_id", end, "one of the codes")
    layer = usual_layer(
        read_attention(depth), read_mlp(depth, bias=depth["mlp_bias"]), post_norms=False
    )
    return InnerDecoder(
        steps=steps,
        codes=settings["vocab_size"],
        width=settings["hidden_size"],
        hidden_size=depth["hidden_size"],
        norm_eps=depth["rms_norm_eps"],
        layers=(layer,) * depth["num_hidden_layers"],
        rope=hf_config.rope(depth),
        end_code=end,
        # As in transformers, the last code does not count.
        judged=steps - 1,
        names=NAMES,
        tied=settings["tie_codebooks_embeddings"],
    )


def _settings(
    config: HfConfig, sizes: Mapping[str, Any], family: hf_config.FamilyDefaults
) -> dict[str, Any]:
    """The settings of one of the two decoders; neither has its head tied to its embedding."""
    return hf_config.read_settings({**sizes, **config, "tie_word_embeddings": False}, family)
