"""The keys of `config.json`: which ones are read, and which values the others may have.

A key is read, must have a neutral value, or is harmless. Any other key is unknown and is logged:
it may change the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from graphengine.models.hf.harmless_keys import HARMLESS, HARMLESS_OF_ROPE, OF_IMAGES
from graphengine.models.hf.neutral_keys import NEUTRAL
from graphengine.options.checks import INT32_MAX, shown

Kind = Literal["integer", "integers", "number", "numbers", "flag", "text", "texts", "object"]
HfConfig = Mapping[str, Any]

REQUIRED: Any = object()
"""Stands in place of a default: the key is required."""

_NAMES = {
    "integer": "an integer",
    "integers": "a list of integers",
    "number": "a finite number",
    "numbers": "a list of numbers",
    "flag": "true or false",
    "text": "a string",
    "texts": "a list of strings",
    "object": "a JSON object",
}


class Key(NamedTuple):
    """A key that is read.

    bounds   least and most of a number, or of each number of a list
    default  value where the key is missing: transformers' default, unless `models/` says otherwise
    null     whether null is allowed, and means the default
    """

    name: str
    kind: Kind
    bounds: tuple[float, float] | None = None
    default: Any = REQUIRED
    null: bool = False


# The bounds of sizes keep the bytes of every tensor within 63 bits, and catch damaged configs.
KEYS = (
    Key("architectures", "texts", default=(), null=True),
    Key("model_type", "text", default=None, null=True),
    Key("vocab_size", "integer", (1, INT32_MAX)),
    Key("hidden_size", "integer", (1, 2**20)),
    Key("intermediate_size", "integer", (1, 2**22)),
    Key("num_hidden_layers", "integer", (1, 1024)),
    Key("num_attention_heads", "integer", (1, 4096)),
    # None: as many as query heads.
    Key("num_key_value_heads", "integer", (1, 4096), default=None, null=True),
    # None: the family's.
    Key("head_dim", "integer", (1, 4096), default=None, null=True),
    Key("max_position_embeddings", "integer", (1, INT32_MAX), default=None),
    Key("hidden_act", "text", default="silu"),
    Key("rms_norm_eps", "number", (0, 1), default=1e-6),
    Key("tie_word_embeddings", "flag", default=False, null=True),
    Key("attention_bias", "flag", default=False, null=True),
    Key("mlp_bias", "flag", default=False, null=True),
    Key("rope_theta", "number", (1.01, 1e30), default=10_000.0),
    Key("rope_parameters", "object", default=None, null=True),
    Key("rope_scaling", "object", default=None, null=True),
    Key("original_max_position_embeddings", "integer", (1, INT32_MAX), default=None, null=True),
    Key("partial_rotary_factor", "number", (0, 1), default=1.0, null=True),
    # None: only the family knows whether a window is used.
    Key("use_sliding_window", "flag", default=None, null=True),
    Key("sliding_window", "integer", (-1, INT32_MAX), default=None, null=True),
    # Layers below this index have no window.
    Key("max_window_layers", "integer", (0, 1024), default=28, null=True),
    Key("layer_types", "texts", default=None, null=True),
    Key("mlp_layer_types", "texts", default=None, null=True),
)
"""The keys of `config.json` that are read for every family."""

EXPERT_KEYS = (
    # transformers writes one of these two names.
    Key("num_experts", "integer", (0, 2**16), default=None, null=True),
    Key("num_local_experts", "integer", (0, 2**16), default=None, null=True),
    Key("num_experts_per_tok", "integer", (1, 2**16), default=8),
    Key("moe_intermediate_size", "integer", (1, 2**22), default=768),
    Key("norm_topk_prob", "flag", default=False),
    Key("decoder_sparse_step", "integer", (1, 1024), default=1),
    Key("mlp_only_layers", "integers", (0, INT32_MAX), default=(), null=True),
)
"""The keys of `config.json` that are read for models with Qwen3-MoE's kind of experts."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""The values of `layer_types`; RoPE may have separate settings for each."""

ROUTED_KEYS = (
    Key("n_routed_experts", "integer", (0, 2**16), default=None, null=True),
    Key("n_shared_experts", "integer", (0, 1024), default=None, null=True),
    Key("num_experts_per_tok", "integer", (1, 2**16), default=None, null=True),
    Key("moe_intermediate_size", "integer", (1, 2**22), default=None, null=True),
    Key("first_k_dense_replace", "integer", (0, 1024), default=None, null=True),
    Key("moe_layer_freq", "integer", (1, 1024), default=1, null=True),
    Key("n_group", "integer", (1, 2**16), default=None, null=True),
    Key("topk_group", "integer", (1, 2**16), default=None, null=True),
    Key("topk_method", "text", default=None, null=True),
    Key("scoring_func", "text", default=None, null=True),
    # None: the family's. transformers takes null for false.
    Key("norm_topk_prob", "flag", default=None),
    Key("routed_scaling_factor", "number", (1e-6, 1e6), default=None, null=True),
)
"""The keys of `config.json` that are read for models with DeepSeek's experts."""

LATENT_KEYS = (
    Key("kv_lora_rank", "integer", (1, 2**16), default=512),
    # None: queries have no latent.
    Key("q_lora_rank", "integer", (1, 2**16), default=1536, null=False),
    Key("qk_nope_head_dim", "integer", (1, 4096), default=128),
    Key("qk_rope_head_dim", "integer", (1, 4096), default=64),
    Key("v_head_dim", "integer", (1, 4096), default=128, null=True),
    Key("rope_interleave", "flag", default=True),
    *ROUTED_KEYS,
)
"""The keys of `config.json` that are read for models with DeepSeek's latent attention."""

GPT_OSS_KEYS = (
    Key("num_experts", "integer", (1, 2**16), default=None, null=True),
    Key("num_local_experts", "integer", (1, 2**16)),
    Key("num_experts_per_tok", "integer", (1, 2**16), default=4),
    # The name of `num_experts_per_tok` in older files.
    Key("experts_per_token", "integer", (1, 2**16), default=None, null=True),
    Key("swiglu_limit", "number", (1e-6, 1e6), default=7.0),
    Key("swiglu_alpha", "number", (1e-6, 1e6), default=1.702),
)
"""The keys of `config.json` that are read for gpt-oss."""

GEMMA_KEYS = (
    Key("hidden_activation", "text", default="gelu_pytorch_tanh"),
    Key("query_pre_attn_scalar", "number", (1e-6, 1e6), default=256.0),
    # Every n-th layer has no window; read where there are no `layer_types`.
    Key("sliding_window_pattern", "integer", (1, 1024), default=6),
    Key("rope_local_base_freq", "number", (1.01, 1e30), default=None, null=True),
)
"""The keys of `config.json` that are read for Gemma 3."""

GEMMA2_KEYS = (
    *GEMMA_KEYS[:2],
    # None: no cap, as transformers takes null; the family has values for missing keys.
    Key("attn_logit_softcapping", "number", (0, 1e6), default=0.0, null=True),
    Key("final_logit_softcapping", "number", (0, 1e6), default=0.0, null=True),
)
"""The keys of `config.json` that are read for Gemma 2."""

GEMMA4_KEYS = (
    GEMMA_KEYS[0],
    Key("final_logit_softcapping", "number", (0, 1e6), default=0.0, null=True),
    # For the layers without a window.
    Key("global_head_dim", "integer", (1, 4096), default=512),
    Key("num_global_key_value_heads", "integer", (1, 4096), default=None, null=True),
    # In newer files, by the layers' indices.
    Key("per_layer_config", "object", default=None, null=True),
    Key("attention_k_eq_v", "flag", default=False),
    Key("num_kv_shared_layers", "integer", (0, 1024), default=0),
    Key("use_double_wide_mlp", "flag", default=False),
    Key("hidden_size_per_layer_input", "integer", (0, 2**16), default=256),
    Key("vocab_size_per_layer_input", "integer", (1, INT32_MAX), default=262_144),
    # Positions without a token use its row of the table of per-layer embeddings.
    Key("pad_token_id", "integer", (0, INT32_MAX), default=0, null=True),
    Key("enable_moe_block", "flag", default=False, null=True),
    Key("num_experts", "integer", (1, 2**16), default=None, null=True),
    Key("top_k_experts", "integer", (1, 2**16), default=None, null=True),
    Key("moe_intermediate_size", "integer", (1, 2**22), default=None, null=True),
    Key("use_bidirectional_attention", "text", default=None, null=True),
)
"""The keys of `config.json` that are read for Gemma 4."""

_TIME_STEP_LIMIT = Key("time_step_limit", "numbers", (0, math.inf), default=(), null=True)
GRANITE_MULTIPLIERS = (
    Key("embedding_multiplier", "number", (1e-6, 1e6), default=1.0),
    Key("residual_multiplier", "number", (1e-6, 1e6), default=1.0),
    Key("attention_multiplier", "number", (1e-6, 1e6), default=1.0),
    Key("logits_scaling", "number", (1e-6, 1e6), default=1.0),
)
"""The keys of `config.json` that are read for Granite besides Llama's."""

GRANITE_KEYS = (
    Key("num_local_experts", "integer", (0, 2**16), default=8),
    Key("num_experts_per_tok", "integer", (0, 2**16), default=2),
    Key("shared_intermediate_size", "integer", (1, 2**22), default=1024),
    *GRANITE_MULTIPLIERS,
    Key("position_embedding_type", "text", default=None, null=True),
    # The older name of `layer_types`.
    Key("layers_block_type", "texts", default=None, null=True),
    Key("mamba_n_heads", "integer", (1, 2**16), default=128, null=True),
    Key("mamba_n_groups", "integer", (1, 2**16), default=1, null=True),
    Key("mamba_d_state", "integer", (1, 256), default=256, null=True),
    # None: `mamba_expand` gives the size of all heads together.
    Key("mamba_d_head", "integer", (1, 2**16), default=None, null=True),
    Key("mamba_d_conv", "integer", (2, 8), default=4, null=True),
    Key("mamba_expand", "integer", (1, 64), default=2, null=True),
    Key("mamba_conv_bias", "flag", default=True),
    Key("mamba_proj_bias", "flag", default=False, null=True),
    _TIME_STEP_LIMIT,
)
"""The keys of `config.json` that are read for Granite 4's hybrids."""

NEMOTRON_KEYS = (
    Key("hybrid_override_pattern", "text", default=None, null=True),
    Key("layers_block_type", "texts", default=None, null=True),
    Key("attention_head_dim", "integer", (1, 4096), default=None, null=True),
    Key("mlp_hidden_act", "text", default="relu2"),
    Key("mamba_hidden_act", "text", default="silu"),
    Key("layer_norm_epsilon", "number", (0, 1), default=1e-5),
    Key("ssm_state_size", "integer", (1, 256), default=128),
    Key("mamba_num_heads", "integer", (1, 2**16), default=128),
    Key("mamba_head_dim", "integer", (1, 2**16), default=64),
    Key("n_groups", "integer", (1, 2**16), default=8),
    Key("conv_kernel", "integer", (2, 8), default=4),
    Key("use_bias", "flag", default=False),
    Key("use_conv_bias", "flag", default=True),
    Key("mamba_proj_bias", "flag", default=False),
    Key("mamba_ssm_cache_dtype", "text", default="float32", null=True),
    # For layers with experts; the pattern names such layers.
    Key("n_routed_experts", "integer", (0, 2**16), default=None, null=True),
    Key("n_shared_experts", "integer", (0, 2**16), default=None, null=True),
    Key("moe_shared_expert_intermediate_size", "integer", (1, 2**22), default=None, null=True),
    Key("moe_latent_size", "integer", (1, 2**22), default=None, null=True),
    _TIME_STEP_LIMIT,
)
"""The keys of `config.json` that are read for Nemotron-H."""

QWEN3_5_KEYS = (
    Key("linear_num_key_heads", "integer", (1, 4096), default=16),
    Key("linear_num_value_heads", "integer", (1, 4096), default=32),
    Key("linear_key_head_dim", "integer", (1, 256), default=128),
    Key("linear_value_head_dim", "integer", (1, 256), default=128),
    Key("linear_conv_kernel_dim", "integer", (2, 8), default=4),
    Key("full_attention_interval", "integer", (1, 1024), default=4),
    Key("attn_output_gate", "flag", default=True, null=True),
    # Dtype of the recurrent states.
    Key("mamba_ssm_dtype", "text", default="float32", null=True),
)
"""The keys of `config.json` that are read for Qwen3.5."""

LFM2_KEYS = (
    Key("norm_eps", "number", (0, 1), default=1e-5),
    Key("conv_bias", "flag", default=False),
    Key("conv_L_cache", "integer", (2, 8), default=3),
    Key("block_multiple_of", "integer", (1, 2**20), default=256),
    Key("block_ffn_dim_multiplier", "number", (1e-3, 1e3), default=1.0, null=True),
    Key("block_auto_adjust_ff_dim", "flag", default=True),
    Key("full_attn_idxs", "integers", (0, 1023), default=None, null=True),
    # Older names of `tie_word_embeddings` and `intermediate_size`.
    Key("tie_embedding", "flag", default=None, null=True),
    Key("block_ff_dim", "integer", (1, 2**22), default=None, null=True),
)
"""The keys of `config.json` that are read for LFM2."""

LFM2_MOE_KEYS = (
    Key("num_experts", "integer", (1, 2**16), default=32),
    Key("num_experts_per_tok", "integer", (1, 2**16), default=4),
    Key("moe_intermediate_size", "integer", (1, 2**22), default=1792),
    Key("num_dense_layers", "integer", (0, 1024), default=2),
    Key("norm_topk_prob", "flag", default=True),
    Key("routed_scaling_factor", "number", (1e-3, 1e3), default=1.0),
    Key("use_expert_bias", "flag", default=True),
)
"""The keys of `config.json` that are read for LFM2 with experts, besides LFM2's."""

GPT2_KEYS = (
    Key("n_embd", "integer", (1, 2**20), default=768),
    Key("n_layer", "integer", (1, 1024), default=12),
    Key("n_head", "integer", (1, 4096), default=12),
    Key("n_positions", "integer", (1, INT32_MAX), default=1024),
    # None: four times n_embd.
    Key("n_inner", "integer", (1, 2**22), default=None, null=True),
    Key("activation_function", "text", default="gelu_new"),
    Key("layer_norm_epsilon", "number", (0, 1), default=1e-5),
    Key("scale_attn_weights", "flag", default=True),
)
"""The keys of `config.json` that are read for GPT-2."""

GPT_BIGCODE_KEYS = (
    *GPT2_KEYS,
    # Whether all heads share the keys and values of one.
    Key("multi_query", "flag", default=True),
)
"""The keys of `config.json` that are read for GPTBigCode."""

GPTJ_KEYS = (
    *GPT2_KEYS[:-1],
    # Values of a head that RoPE rotates.
    Key("rotary_dim", "integer", (1, 4096), default=64),
)
"""The keys of `config.json` that are read for GPT-J."""

COHERE_KEYS = (
    Key("layer_norm_eps", "number", (0, 1), default=1e-5),
    Key("logit_scale", "number", (1e-6, 1e6), default=0.0625),
)
"""The keys of `config.json` that are read for Cohere."""

COHERE2_KEYS = (
    *COHERE_KEYS,
    # Every n-th layer has no window; read where there are no `layer_types`.
    Key("sliding_window_pattern", "integer", (1, 1024), default=4),
    Key("position_embedding_type", "text", default=None, null=True),
    Key("order_of_interleaved_layers", "text", default=None, null=True),
    Key("use_gated_activation", "flag", default=True),
    Key("use_parallel_block", "flag", default=True),
)
"""The keys of `config.json` that are read for Cohere 2."""

GPT_NEOX_KEYS = (
    Key("layer_norm_eps", "number", (0, 1), default=1e-5),
    Key("use_parallel_residual", "flag", default=True),
    Key("rotary_pct", "number", (0, 1), default=0.25),
    Key("rotary_emb_base", "number", (1.01, 1e30), default=10_000.0),
)
"""The keys of `config.json` that are read for GPT-NeoX."""

STARCODER2_KEYS = (
    Key("norm_epsilon", "number", (0, 1), default=1e-5),
    Key("use_bias", "flag", default=True),
    Key("mlp_type", "text", default="default"),
    Key("norm_type", "text", default="layer_norm"),
)
"""The keys of `config.json` that are read for StarCoder 2 besides Llama's."""

STABLELM_KEYS = (
    Key("layer_norm_eps", "number", (0, 1), default=1e-5),
    Key("use_qkv_bias", "flag", default=False),
    Key("use_parallel_residual", "flag", default=False),
)
"""The keys of `config.json` that are read for StableLM."""

HUNYUAN_MOE_KEYS = frozenset(
    ("moe_topk", "num_shared_expert", "use_mixed_mlp_moe", "moe_layer_num_skipped")
)
"""The keys of `config.json` that are read for Hunyuan's experts alone, as numbers or as lists."""

SMOLLM3_KEYS = (
    Key("no_rope_layers", "integers", (0, 1), default=None, null=True),
    Key("no_rope_layer_interval", "integer", (1, 1024), default=4),
)
"""The keys of `config.json` that are read for SmolLM3 besides Llama's."""

CSM_KEYS = (
    Key("num_codebooks", "integer", (2, 256), default=32, null=True),
    Key("text_vocab_size", "integer", (1, INT32_MAX), default=128_256),
    Key("codebook_eos_token_id", "integer", (0, INT32_MAX), default=0),
    Key("tie_codebooks_embeddings", "flag", default=True, null=True),
    Key("depth_decoder_config", "object", default=None, null=True),
    # Of the depth decoder alone.
    Key("backbone_hidden_size", "integer", (1, 2**20), default=2048),
)
"""The keys of `config.json` that are read for CSM besides Llama's, and for its depth decoder."""

HIGGS_KEYS = (
    Key("num_codebooks", "integer", (1, 127), default=8),
    Key("codebook_size", "integer", (1, INT32_MAX), default=1024),
    Key("audio_token_id", "integer", (0, INT32_MAX), default=128_016),
    Key("audio_bos_token_id", "integer", (0, INT32_MAX), default=128_013),
    Key("audio_delay_token_id", "integer", (0, INT32_MAX), default=128_014),
    Key("audio_stream_bos_id", "integer", (0, INT32_MAX), default=1024),
    Key("audio_stream_eos_id", "integer", (0, INT32_MAX), default=1025),
)
"""The keys of `config.json` that are read for Higgs Audio besides Llama's."""

TALKER_KEYS = (
    # Keys of the whole model.
    Key("talker_config", "object", default=None, null=True),
    Key("text_config", "object", default=None, null=True),
    Key("code_predictor_config", "object", default=None, null=True),
    Key("num_code_groups", "integer", (2, 127), default=32),
    Key("codec_eos_token_id", "integer", (0, INT32_MAX), default=4198),
)
"""The keys of Qwen3-Omni's talker that are read beside those of its two decoders."""

MOSHI_KEYS = (
    Key("num_codebooks", "integer", (2, 126), default=8),
    # None: the codec's size.
    Key("audio_vocab_size", "integer", (1, INT32_MAX), default=None, null=True),
    Key("ffn_dim", "integer", (2, 2**23), default=22_528),
    Key("audio_encoder_config", "object", default=None, null=True),
    Key("depth_decoder_config", "object", default=None, null=True),
    # Of the depth decoder alone.
    Key("input_size", "integer", (1, 2**20), default=4096),
)
"""The keys of `config.json` that are read for Moshi besides Llama's, and for its depth decoder."""

ROPE_KEYS = (
    Key("rope_type", "text", default=None),
    Key("type", "text", default=None, null=True),
    Key("rope_theta", "number", (1.01, 1e30), default=None),
    Key("factor", "number", (1e-6, 1e6), default=None, null=True),
    Key("low_freq_factor", "number", (1e-6, 1e6), default=None, null=True),
    Key("high_freq_factor", "number", (1e-6, 1e6), default=None, null=True),
    Key("original_max_position_embeddings", "integer", (1, INT32_MAX), default=None),
    Key("beta_fast", "number", (0, 1e6), default=None, null=True),
    Key("beta_slow", "number", (0, 1e6), default=None, null=True),
    Key("attention_factor", "number", (1e-6, 1e6), default=None, null=True),
    Key("mscale", "number", (0, 1e6), default=None, null=True),
    Key("mscale_all_dim", "number", (0, 1e6), default=None, null=True),
    Key("truncate", "flag", default=True),
    Key("short_factor", "numbers", (1e-6, 1e6), default=None, null=True),
    Key("long_factor", "numbers", (1e-6, 1e6), default=None, null=True),
    Key("partial_rotary_factor", "number", (0, 1), default=None, null=True),
)
"""The keys of `rope_parameters` and `rope_scaling`; which of them count follows from the type."""

MTP_KEYS = (
    Key("num_nextn_predict_layers", "integer", (0, 1024), default=None, null=True),
    Key("mtp_hidden_states_first", "flag", default=None, null=True),
    Key("mtp_use_dedicated_embeddings", "flag", default=None, null=True),
    Key("chain_hidden_post_norm", "flag", default=None, null=True),
    Key("mtp_layer_types", "texts", default=None, null=True),
    Key("mtp_mlp_layer_types", "texts", default=None, null=True),
)
"""The keys of `config.json` that are read when the checkpoint's draft modules draft."""

EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")
"""Names of the norms' epsilon; a family reads the last name in this order that it knows."""

NEUTRAL_ROPE: Mapping[str, tuple[Any, ...]] = {
    "mrope_section": (False,),
    "mrope_interleaved": (False,),
}
"""Keys of multi-axis RoPE (mrope), with the values besides null that mean a single axis."""
# Factors that other programs apply and transformers does not know.
_FACTORS_OF_ROPE: Mapping[str, tuple[Any, ...]] = {
    "attn_factor": (1,),
    "extrapolation_factor": (1,),
    "apply_yarn_scaling": (True,),
    "llama_4_scaling_beta": (0,),
    "alpha": (),
}


def unsupported(
    name: str, value: object, supported: str, *, file: str = "config.json"
) -> ValueError:
    """The error for a value that asks for a computation that is not implemented."""
    return ValueError(f"{file} has {name}={shown(value)}: supported: {supported}")


def language_model(config: HfConfig) -> HfConfig:
    """The language model's own config: `text_config` if there is a vision tower, else all."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def checked_language_model(config: HfConfig, known: Collection[str] = ()) -> HfConfig:
    """`language_model`, after a check of the keys beside it.

    known  keys beside it that the family understands

    ValueError for a `text_config` that is no object, and for a key that changes the computation.
    """
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise unsupported("text_config", text, "a JSON object")
    check_neutral({**config, "quantization_config": None}, known)
    return text


def read_key(config: HfConfig, name: str) -> Any:
    """The value of one of `KEYS`. ValueError names a key that is missing or has a wrong value."""
    return _read(config, next(key for key in KEYS if key.name == name), name)


def read_keys(config: HfConfig, keys: Sequence[Key] = KEYS, *, inside: str = "") -> dict[str, Any]:
    """The value or default of each key; `inside` is the key of `config.json` that holds `config`.

    ValueError names the first key that is missing or has a wrong value.
    """
    return {key.name: _read(config, key, f"{inside}.{key.name}".lstrip(".")) for key in keys}


def check_neutral(
    config: HfConfig,
    known: Collection[str] = (),
    table: Mapping[str, tuple[Any, ...]] = NEUTRAL,
) -> None:
    """Raise ValueError for a key that says the model computes something else.

    known  keys that the family understands besides `KEYS`
    """
    for name, neutral in table.items():
        value = config.get(name)
        if value is None or value in neutral or name in known:
            continue
        if name == "no_rope_layers" and _all_are(value, 1):
            # The list says for each layer whether it has RoPE.
            continue
        if name == "sliding_window_size" and value == config.get("sliding_window"):
            # Another name of the same in Gemma 2.
            continue
        raise unsupported(name, value, " or ".join(["null", *map(repr, neutral)]))
    for name in ("rope_parameters", "rope_scaling"):
        settings = config.get(name)
        if not isinstance(settings, dict):
            continue
        for key, neutral in {**NEUTRAL_ROPE, **_FACTORS_OF_ROPE}.items():
            if settings.get(key) not in (None, *neutral):
                shown_values = " or ".join(["null", *map(repr, neutral)])
                raise unsupported(f"{name}.{key}", settings[key], shown_values)


def check_epsilons(config: HfConfig, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if another name has a different epsilon than the name that is read."""
    own = [name for name in EPSILONS if name in settings][-1]
    for name in EPSILONS:
        if config.get(name) not in (None, settings[own]):
            raise unsupported(name, config[name], f"null, or {own}={settings[own]}")


def unknown_keys(config: HfConfig) -> list[str]:
    """Sorted names of the keys that are neither read nor listed as neutral or harmless."""
    of_families = (
        *(*EXPERT_KEYS, *LATENT_KEYS, *GEMMA_KEYS, *GPT_OSS_KEYS),
        *(*GRANITE_KEYS, *NEMOTRON_KEYS, *QWEN3_5_KEYS, *LFM2_KEYS, *LFM2_MOE_KEYS),
        *(*SMOLLM3_KEYS, *STARCODER2_KEYS, *GPT_BIGCODE_KEYS, *GPT_NEOX_KEYS),
        *(*COHERE2_KEYS, *STABLELM_KEYS, *GEMMA4_KEYS),
        *(*CSM_KEYS, *HIGGS_KEYS, *TALKER_KEYS, *MOSHI_KEYS),
    )
    read = {key.name for key in (*KEYS, *MTP_KEYS, *of_families)}
    known = read | NEUTRAL.keys() | HARMLESS | HUNYUAN_MOE_KEYS
    text = config.get("text_config")
    if isinstance(text, dict) or "vision_config" in config:
        # Keys of images, where only the language model is read.
        known |= {"text_config", *OF_IMAGES}
    names = [name for name in config if name not in known]
    if isinstance(text, dict):
        names += [f"text_config.{name}" for name in unknown_keys(text)]
    for inside in ("depth_decoder_config", "talker_config", "code_predictor_config"):
        nested = config.get(inside)
        if isinstance(nested, dict):
            names += [f"{inside}.{name}" for name in unknown_keys(nested)]
    rope_keys = {key.name for key in ROPE_KEYS} | {*LAYER_TYPES, *HARMLESS_OF_ROPE}
    rope_keys |= NEUTRAL_ROPE.keys() | _FACTORS_OF_ROPE.keys()
    for name in ("rope_parameters", "rope_scaling"):
        settings = config.get(name)
        if isinstance(settings, dict):
            names += [f"{name}.{key}" for key in settings if key not in rope_keys]
    return sorted(names)


def _read(config: HfConfig, key: Key, name: str) -> Any:
    if key.name not in config:
        if key.default is REQUIRED:
            raise ValueError(f"config.json lacks {name!r}")
        return key.default
    value = config[key.name]
    if value is None and key.null:
        return key.default
    if not _fits(value, key):
        wanted = _NAMES[key.kind]
        if key.bounds is not None:
            wanted += f" in [{key.bounds[0]:.15g}, {key.bounds[1]:.15g}]"
        wanted += ", or null" if key.null else ""
        raise ValueError(f"config.json has {name}={shown(value)}: must be {wanted}")
    if key.kind in ("integers", "numbers"):
        return tuple(value)
    return float(value) if key.kind == "number" else value


def _fits(value: object, key: Key) -> bool:
    match key.kind:
        case "flag":
            return isinstance(value, bool)
        case "text":
            return isinstance(value, str)
        case "texts":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "object":
            return isinstance(value, dict)
        case "integer" | "number":
            numbers = (int,) if key.kind == "integer" else (int, float)
            if not isinstance(value, numbers) or isinstance(value, bool):
                return False
            # NaN is in no range.
            least, most = key.bounds or (-math.inf, math.inf)
            return least <= value <= most
        case "integers" | "numbers":
            one = key._replace(kind="integer" if key.kind == "integers" else "number")
            return isinstance(value, list) and all(_fits(item, one) for item in value)


def _all_are(value: object, wanted: object) -> bool:
    return isinstance(value, Iterable) and all(item == wanted for item in value)
