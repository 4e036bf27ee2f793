"""GPT-J: blocks side by side after one LayerNorm, RoPE that pairs neighbouring values of a part of
each head, and a bias of lm_head.
"""

from __future__ import annotations

from graphengine.models.blocks.mlp import Mlp
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.gpt2 import spelled_out
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import GPTJ_KEYS, HfConfig, read_keys, unsupported
from graphengine.models.hf.decoder_config import composed, read_attention, ungated_activation
from graphengine.models.sublayers import Sublayer

DEFAULTS = hf_config.FamilyDefaults(max_positions=2048, keys=GPTJ_KEYS, rotated=None)
# transformers' defaults for missing keys.
_MISSING = {
    "vocab_size": 50_400,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_positions": 2048,
    "tie_word_embeddings": False,
}
_NORM, _ROPE = "ln_1", {"rope_type": "gptj"}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `GPTJForCausalLM` checkpoint."""
    given = {**_MISSING, **config}
    for name in ("rope_scaling", "rope_parameters"):
        # transformers ignores them; published files give the values that the family has anyway.
        scaling = given.pop(name, None)
        if scaling not in (None, _ROPE):
            raise unsupported(name, scaling, f"null or {_ROPE}")
    told = spelled_out(given)
    own = read_keys(told, GPTJ_KEYS)
    head_dim = told["hidden_size"] // told["num_attention_heads"]
    told |= {"partial_rotary_factor": own["rotary_dim"] / head_dim}
    settings = hf_config.read_settings(told, DEFAULTS)
    rope, eps = hf_config.rope(settings), own["layer_norm_epsilon"]
    # After rows are reordered so that partners are half a head apart, the rotated values come first
    # in each half.
    attention = read_attention(settings, norm_eps=eps, interleaved=True, names=("out_proj", "norm"))
    mlp = Mlp(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        norm_eps=eps,
        bias=True,
        activation=ungated_activation("activation_function", own["activation_function"]),
        names=("fc_in", "fc_out"),
    )
    layer = (Sublayer(_NORM, "attn.", attention), Sublayer(_NORM, "mlp.", mlp, parallel=True))
    return composed(
        settings,
        architecture,
        (layer,) * settings["num_hidden_layers"],
        norm_eps=eps,
        norms="layer_biased",
        rope=rope,
        head_bias=True,
        embedding_name="model.wte",
        final_norm_name="model.ln_f",
    )
