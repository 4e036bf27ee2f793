"""GPT-2 and GPTBigCode: learned positions, LayerNorms and biases.

GPT-2's linears are stored transposed. GPTBigCode (StarCoder 1, SantaCoder) has one head of keys and
values.
"""

from __future__ import annotations

from typing import Any

from graphengine.models.blocks.mlp import Mlp
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    GPT2_KEYS,
    GPT_BIGCODE_KEYS,
    KEYS,
    HfConfig,
    read_keys,
    unsupported,
)
from graphengine.models.hf.decoder_config import composed, read_attention, ungated_activation
from graphengine.models.sublayers import Sublayer

DEFAULTS = hf_config.FamilyDefaults(max_positions=1024, keys=GPT2_KEYS)
_BIGCODE = hf_config.FamilyDefaults(max_positions=1024, keys=GPT_BIGCODE_KEYS)
# The usual names of GPT-2's keys; transformers reads both.
_USUAL = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}

_CUT = [key for key in KEYS if key.name in ("hidden_size", "num_attention_heads")]
"""The width, and the heads that divide it."""


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `GPT2LMHeadModel` checkpoint."""
    return _read(spelled_out(config), architecture, DEFAULTS, transposed=True)


def read_bigcode(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `GPTBigCodeForCausalLM` checkpoint."""
    if not read_keys(config, GPT_BIGCODE_KEYS)["multi_query"]:
        raise unsupported("multi_query", False, "True")
    told = spelled_out({"activation_function": "gelu_pytorch_tanh", **config})
    return _read(told | {"num_key_value_heads": 1}, architecture, _BIGCODE, transposed=False)


def _read(
    told: HfConfig, architecture: str, family: hf_config.FamilyDefaults, *, transposed: bool
) -> DecoderConfig:
    """The model of a config in the other families' keys.

    transposed  whether checkpoints have linears' columns where others have their rows
    """
    own = read_keys(told, GPT2_KEYS)
    settings = hf_config.read_settings(told, family)
    eps = own["layer_norm_epsilon"]
    attention = read_attention(
        settings,
        norm_eps=eps,
        qkv_bias=True,
        output_bias=True,
        scale_of=0.0 if own["scale_attn_weights"] else 1.0,
        names=("c_proj", "norm"),
        one_linear="c_attn",
        transposed=transposed,
    )
    mlp = Mlp(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        norm_eps=eps,
        bias=True,
        activation=ungated_activation("activation_function", own["activation_function"]),
        names=("c_fc", "c_proj"),
        transposed=transposed,
    )
    layer = (Sublayer("ln_1", "attn.", attention), Sublayer("ln_2", "mlp.", mlp))
    return composed(
        settings,
        architecture,
        (layer,) * settings["num_hidden_layers"],
        norm_eps=eps,
        norms="layer_biased",
        rope=None,
        embedding_name="model.wte",
        position_name="model.wpe",
        final_norm_name="model.ln_f",
    )


def spelled_out(config: HfConfig) -> dict[str, Any]:
    """A config with GPT-2's names for sizes, in the other families' keys.

    ValueError for a width that is no multiple of the number of heads.
    """
    told = {"vocab_size": 50_257, "tie_word_embeddings": True, **config}
    # transformers ignores these.
    told |= {"num_key_value_heads": None, "head_dim": None}
    own = read_keys(told, GPT2_KEYS)
    for name, usual in _USUAL.items():
        if name in told or usual not in told:
            told[usual] = own[name]
    hidden, heads = read_keys(told, _CUT).values()
    if hidden % heads:
        raise ValueError(f"n_embd={hidden} is not a multiple of n_head={heads}")
    if own["n_inner"] is not None:
        told["intermediate_size"] = own["n_inner"]
    else:
        told["intermediate_size"] = 4 * hidden
    return told
