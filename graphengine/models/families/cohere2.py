"""Cohere 2 (Command R7B): blocks side by side after one LayerNorm without a bias, and windows.

Three layers of four have a window, and only these have RoPE, of pairs of neighbouring values.
"""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    COHERE2_KEYS,
    KEYS,
    LAYER_TYPES,
    HfConfig,
    read_keys,
    unsupported,
)
from graphengine.models.hf.decoder_config import composed, read_attention, read_mlp
from graphengine.models.sublayers import ATTENTION, MLP, Sublayer

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=8192,
    windows="switched",
    keys=COHERE2_KEYS,
    fixed={
        "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
        **dict.fromkeys(("use_gated_activation", "use_parallel_block"), (True,)),
    },
)
# transformers' defaults for missing keys.
_MISSING = {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "tie_word_embeddings": True,
}
_SLIDING = LAYER_TYPES[1]
_NORM = "input_layernorm"


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Cohere2ForCausalLM` checkpoint."""
    told = _MISSING | dict(config)
    hf_config.check_windows_on(told)
    given, own = read_keys(told, KEYS), read_keys(told, COHERE2_KEYS)
    types = given["layer_types"]
    if types is None:
        types = hf_config.periodic_types(given["num_hidden_layers"], own["sliding_window_pattern"])
    told |= {"layer_types": types, "use_sliding_window": _SLIDING in types}
    settings = hf_config.read_settings(told, DEFAULTS)
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    if settings["head_dim"] != hidden // heads:
        raise unsupported("head_dim", settings["head_dim"], f"{hidden} / {heads} heads")
    eps = own["layer_norm_eps"]
    mlp = read_mlp(settings, norm_eps=eps)
    layers = tuple(
        (
            Sublayer(
                _NORM,
                ATTENTION,
                read_attention(
                    settings, norm_eps=eps, interleaved=True, window=window, nope=not window
                ),
            ),
            Sublayer(_NORM, MLP, mlp, parallel=True),
        )
        for window in settings["windows"] or (0,) * settings["num_hidden_layers"]
    )
    return composed(
        settings,
        architecture,
        layers,
        norm_eps=eps,
        norms="layer",
        logits_scale=own["logit_scale"],
    )
