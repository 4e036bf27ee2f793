"""llama.cpp's architectures: the model of each, and the names of its tensors and keys.

The architectures and their keys are those of llama.cpp, as the package `gguf` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from graphengine.models.checkpoints.gguf.file import GgufFile
from graphengine.models.checkpoints.gguf.mixtures import (
    convolutions,
    gated_delta,
    granite_hybrid,
    latents,
    nemotron,
)

_NONE: Mapping[str, Any] = MappingProxyType({})


class GgufFamily(NamedTuple):
    """How one of llama.cpp's architectures is called, and stored.

    architecture  the class in `config.json`
    keys          the metadata keys that only this architecture has, and their names there
    fixed         keys that no metadata gives
    only          metadata keys without a name there, and the value that is computed
    modules       names of modules outside of layers that differ from `MODULES`
    layer         names of a layer's modules that differ from `LAYER`; several: their rows follow
                  each other, as many of each. The rows of several tensors with one name follow each
                  other, too, in the order of their names
    paired        whether each head's rows of q and k alternate between the two halves that RoPE
                  pairs
    plus_one      whether norms are stored plus 1, which the model adds
    transposed    whether linears of layers have their inputs first in a checkpoint
    more          function of the file, its keys and the config, for values that several metadata
                  keys give together
    read          metadata keys that only `more` reads
    scaling       metadata keys of scaled RoPE, their names in its settings, and their factors
    rope          settings of scaled RoPE that no metadata gives
    rotated       key of the part of a head that RoPE rotates, where a missing one is not 1
    biases        keys that say whether there is a tensor, and that tensor in the first layer
    older         the class of older models whose files look alike; `more` tells them apart
    """

    architecture: str
    keys: Mapping[str, str] = _NONE
    fixed: Mapping[str, Any] = _NONE
    only: Mapping[str, Any] = _NONE
    modules: Mapping[str, str] = _NONE
    layer: Mapping[str, str | tuple[str, ...]] = _NONE
    paired: bool = False
    plus_one: bool = False
    transposed: bool = False
    more: Callable[[GgufFile, Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = (
        None
    )
    read: tuple[str, ...] = ()
    scaling: Mapping[str, tuple[tuple[str, ...], float]] = _NONE
    rope: Mapping[str, Any] = _NONE
    rotated: str = ""
    biases: Mapping[str, str] = _NONE
    older: str = ""


COUNT, USED, WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"
_NORM = "attention.layer_norm_epsilon"
# Files give only one of two numbers, which are equal in all published models.
_LOG_MULTIPLIER, _MSCALES = "rope.scaling.yarn_log_multiplier", ("mscale", "mscale_all_dim")
_SIGMOID = {"expert_gating_func": 2}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_MODULES = {
    "token_embd": "model.wte",
    "position_embd": "model.wpe",
    "output_norm": "model.ln_f",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_KEYS = {"feed_forward_length": "n_inner", _NORM: "layer_norm_epsilon"}
_MIXTRAL_LAYER = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_MAMBA_KEYS = ("ssm.inner_size", "ssm.time_step_rank")
# Names in recurrent layers, below their prefix.
_MAMBA_LAYER = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_NEMOTRON_KEYS = {
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
}
_NEMOTRON_MODULES = {"token_embd": "model.embeddings", "output_norm": "model.norm_f"}
_NEMOTRON_LAYER = {
    "attn_norm": "norm",
    **{key: f"mixer.{name}" for key, name in _MAMBA_LAYER.items()},
    **{f"attn_{letter}": f"mixer.{letter}_proj" for letter in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_ROUTED_KEYS = {
    COUNT: "n_routed_experts",
    USED: "num_experts_per_tok",
    WIDTH: "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_QWEN_KEYS = {
    COUNT: "num_experts",
    USED: "num_experts_per_tok",
    WIDTH: "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_LFM2_KEYS = {
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "shortconv.l_cache": "conv_L_cache",
}
_LFM2_LAYER = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}

FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(
        "LlamaForCausalLM",
        paired=True,
        biases={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_gate.bias"},
    ),
    "mistral3": GgufFamily(
        "Ministral3ForCausalLM",
        # transformers takes missing settings for those of a released model.
        fixed={"rope_parameters": None},
        scaling={
            _LOG_MULTIPLIER: (_MSCALES, 1),
            "attention.temperature_scale": (("llama_4_scaling_beta",), 1),
        },
        paired=True,
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM",
        keys=_QWEN_KEYS,
        fixed={"norm_topk_prob": False},
        biases={"qkv_bias": "attn_q.bias"},
    ),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        keys={COUNT: "num_experts", USED: "num_experts_per_tok", WIDTH: "moe_intermediate_size"},
        fixed={"norm_topk_prob": True},
    ),
    "phi2": GgufFamily(
        "PhiForCausalLM",
        keys={_NORM: "layer_norm_eps"},
        modules={"output_norm": "model.final_layernorm"},
        layer={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        rotated="partial_rotary_factor",
    ),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        keys={"attention.sliding_window": "sliding_window"},
        layer={"ffn_up": "mlp.gate_up_proj"},
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        keys=_GRANITE_KEYS,
        paired=True,
    ),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM",
        keys={
            **_GRANITE_KEYS,
            COUNT: "num_local_experts",
            USED: "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
        },
        # Models with RoPE have no recurrent layers, and another architecture.
        fixed={"position_embedding_type": "nope", "num_local_experts": 0},
        layer={
            **{key: f"mamba.{name}" for key, name in _MAMBA_LAYER.items()},
            "ffn_gate": "shared_mlp.input_linear",
            "ffn_up": "shared_mlp.input_linear",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
            "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
            "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
            "ffn_gate_shexp": "shared_mlp.input_linear",
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        paired=True,
        more=granite_hybrid,
        read=_MAMBA_KEYS,
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", fixed={"no_rope_layer_interval": 4}, paired=True),
    "gemma": GgufFamily("GemmaForCausalLM", plus_one=True),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        keys={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        layer=_GEMMA_NORMS,
        plus_one=True,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        keys={
            "attention.sliding_window": "sliding_window",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        layer=_GEMMA_NORMS,
        plus_one=True,
    ),
    "lfm2": GgufFamily(
        "Lfm2ForCausalLM",
        keys=_LFM2_KEYS,
        fixed={"block_auto_adjust_ff_dim": False},
        layer=_LFM2_LAYER,
        more=convolutions,
    ),
    "lfm2moe": GgufFamily(
        "Lfm2MoeForCausalLM",
        keys={
            **_LFM2_KEYS,
            COUNT: "num_experts",
            USED: "num_experts_per_tok",
            WIDTH: "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        fixed={"norm_topk_prob": True, "use_expert_bias": True},
        only=_SIGMOID,
        layer={
            **_LFM2_LAYER,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b": "feed_forward.expert_bias",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
        },
        more=convolutions,
    ),
    "seed_oss": GgufFamily(
        "SeedOssForCausalLM",
        layer={"post_attention_norm": "post_attention_layernorm"},
        biases={
            "attention_bias": "attn_q.bias",
            "attention_out_bias": "attn_output.bias",
            "mlp_bias": "ffn_gate.bias",
        },
    ),
    "olmo": GgufFamily(
        "OlmoForCausalLM",
        keys={"attention.clamp_kqv": "clip_qkv", _NORM: "rms_norm_eps"},
        paired=True,
    ),
    "olmo2": GgufFamily(
        "Olmo2ForCausalLM", layer=_NORMS_AFTER, biases={"attention_bias": "attn_q.bias"}
    ),
    "exaone4": GgufFamily(
        "Exaone4ForCausalLM",
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "layer_types",
        },
        # transformers takes a missing window for one of 4096.
        fixed={"sliding_window": None},
        layer=_NORMS_AFTER,
    ),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", biases={"use_bias": "attn_q.bias"}),
    "hunyuan-dense": GgufFamily(
        "HunYuanDenseV1ForCausalLM",
        layer={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        biases={"attention_bias": "attn_q.bias"},
    ),
    "gpt2": GgufFamily(
        "GPT2LMHeadModel",
        keys=_GPT2_KEYS,
        modules=_GPT2_MODULES,
        layer=_GPT2_LAYER,
        transposed=True,
    ),
    "starcoder": GgufFamily(
        "GPTBigCodeForCausalLM",
        keys=_GPT2_KEYS,
        modules=_GPT2_MODULES,
        layer=_GPT2_LAYER,
    ),
    "gptneox": GgufFamily(
        "GPTNeoXForCausalLM",
        keys={_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        modules={"token_embd": "model.embed_in", "output_norm": "model.final_layer_norm"},
        layer={
            "attn_qkv": tuple(f"attention.{letter}_proj" for letter in "qkv"),
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        rotated="rotary_pct",
    ),
    "starcoder2": GgufFamily(
        "Starcoder2ForCausalLM",
        keys={_NORM: "norm_epsilon"},
        layer={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biases={"use_bias": "attn_q.bias"},
    ),
    "stablelm": GgufFamily(
        "StableLmForCausalLM",
        keys={_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        rotated="partial_rotary_factor",
        biases={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
    ),
    "command-r": GgufFamily(
        "CohereForCausalLM",
        keys={_NORM: "layer_norm_eps", "logit_scale": "logit_scale"},
        biases={"use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": GgufFamily(
        "Cohere2ForCausalLM",
        keys={
            _NORM: "layer_norm_eps",
            "logit_scale": "logit_scale",
            "attention.sliding_window": "sliding_window",
        },
    ),
    "minimax-m2": GgufFamily(
        "MiniMaxM2ForCausalLM",
        keys={
            COUNT: "num_local_experts",
            USED: "num_experts_per_tok",
            WIDTH: "intermediate_size",
        },
        only=_SIGMOID,
        layer={**_MIXTRAL_LAYER, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
        rotated="partial_rotary_factor",
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        keys=_ROUTED_KEYS,
        only=_SIGMOID,
        layer={
            "post_attention_norm": "post_attention_layernorm",
            **_SHARED_EXPERTS,
        },
        rotated="partial_rotary_factor",
        biases={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    ),
    "deepseek2": GgufFamily(
        "DeepseekV3ForCausalLM",
        older="DeepseekV2ForCausalLM",
        keys={
            **_ROUTED_KEYS,
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.q_lora_rank": "q_lora_rank",
            "attention.key_length_mla": "qk_head_dim",
            "attention.value_length_mla": "v_head_dim",
            "expert_gating_func": "scoring_func",
        },
        # Values that files leave out.
        fixed={
            "n_routed_experts": 0,
            "n_shared_experts": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
        layer={
            **_SHARED_EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.kv_b_proj",
            "attn_v_b": "self_attn.kv_b_proj",
        },
        more=latents,
        scaling={_LOG_MULTIPLIER: (_MSCALES, 10)},
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        keys={
            COUNT: "num_local_experts",
            USED: "num_experts_per_tok",
            WIDTH: "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        layer={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        rope={"truncate": False},
    ),
    "qwen3next": GgufFamily(
        "Qwen3NextForCausalLM",
        keys={
            **_QWEN_KEYS,
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "full_attention_interval": "full_attention_interval",
        },
        fixed={"norm_topk_prob": True},
        layer={
            **{
                key: f"linear_attn.{name}"
                for key, name in _MAMBA_LAYER.items()
                if key not in ("ssm_in", "ssm_d")
            },
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        },
        plus_one=True,
        rotated="partial_rotary_factor",
        more=gated_delta,
        read=_MAMBA_KEYS,
    ),
    "nemotron_h": GgufFamily(
        "NemotronHForCausalLM",
        keys=_NEMOTRON_KEYS,
        modules=_NEMOTRON_MODULES,
        layer=_NEMOTRON_LAYER,
        paired=True,
        more=nemotron,
        read=_MAMBA_KEYS,
    ),
    "nemotron_h_moe": GgufFamily(
        "NemotronHForCausalLM",
        keys={
            **_NEMOTRON_KEYS,
            **_ROUTED_KEYS,
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "moe_latent_size": "moe_latent_size",
        },
        modules=_NEMOTRON_MODULES,
        layer={
            **_NEMOTRON_LAYER,
            "ffn_gate_inp": "mixer.gate",
            "exp_probs_b": "mixer.gate.e_score_correction_bias",
            "ffn_up_exps": "mixer.experts.{}.up_proj",
            "ffn_down_exps": "mixer.experts.{}.down_proj",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        paired=True,
        more=nemotron,
        read=_MAMBA_KEYS,
    ),
}
"""The architectures that are read, by the name in `general.architecture`."""

WITH_EXPERTS: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(
        "MixtralForCausalLM",
        keys={COUNT: "num_local_experts", USED: "num_experts_per_tok"},
        layer=_MIXTRAL_LAYER,
        paired=True,
    ),
}
"""Names that stand for a dense model and for one with experts: here the latter."""

MODULES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Names of the modules outside of layers."""

LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
"""Names of a layer's modules; {} is the number of an expert, all of which are one tensor."""

WITHOUT_END = frozenset(("exp_probs_b", "attn_sinks", "ssm_a", "ssm_d", "ssm_dt"))
"""Modules of a layer whose one tensor has neither ".weight" nor ".bias" in a checkpoint."""
