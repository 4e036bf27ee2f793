"""Cohere (Command R, Aya 23): blocks side by side after one LayerNorm without a bias.

RoPE rotates pairs of neighbouring values. Norms of queries and keys (Command R+) are LayerNorms of
each head's own weights, which are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import COHERE_KEYS, HfConfig, unsupported
from graphengine.models.hf.decoder_config import composed, read_attention, read_mlp
from graphengine.models.sublayers import ATTENTION, MLP, Sublayer

DEFAULTS = hf_config.FamilyDefaults(max_positions=8192, keys=COHERE_KEYS)
MISSING: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "tie_word_embeddings": True,
}
"""transformers' defaults for missing keys, of Cohere and Cohere 2."""
_THETA = 500_000.0
_NORM = "input_layernorm"


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `CohereForCausalLM` checkpoint."""
    told = MISSING | {"rope_theta": _THETA} | dict(config)
    settings = hf_config.read_settings(told, DEFAULTS)
    return side_by_side(settings, architecture, [0] * settings["num_hidden_layers"])


def side_by_side(
    settings: dict[str, Any], architecture: str, windows: Sequence[int], *, nope: bool = False
) -> DecoderConfig:
    """The model whose layers have these windows; 0: none.

    nope  whether layers without a window have no RoPE
    """
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    if settings["head_dim"] != hidden // heads:
        raise unsupported("head_dim", settings["head_dim"], f"{hidden} / {heads} heads")
    eps = settings["layer_norm_eps"]
    mlp = read_mlp(settings, norm_eps=eps)
    layers = tuple(
        (
            Sublayer(
                _NORM,
                ATTENTION,
                read_attention(
                    settings,
                    norm_eps=eps,
                    interleaved=True,
                    window=window,
                    nope=nope and not window,
                ),
            ),
            Sublayer(_NORM, MLP, mlp, parallel=True),
        )
        for window in windows
    )
    return composed(
        settings,
        architecture,
        layers,
        norm_eps=eps,
        norms="layer",
        logits_scale=settings["logit_scale"],
    )
