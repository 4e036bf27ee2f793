"""Random hybrids of each family, with odd sizes and patterns of layers.

A family's classes are looked up when a model of it is made: the oldest transformers that the
package admits has not all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

GRANITE: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "shared_intermediate_size": 76, "num_local_experts": 0, "max_position_embeddings": 512,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "rms_norm_eps": 1e-5,
    "mamba_d_state": 24,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 54, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "intermediate_size": 76, "max_position_embeddings": 512, "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0, "ssm_state_size": 24,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 54, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 76, "max_position_embeddings": 512, "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0, "linear_key_head_dim": 20, "linear_value_head_dim": 24,
}  # fmt: skip
LFM2: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 90, "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
M, A, F, C, E = "linear_attention", "full_attention", "mlp", "conv", "moe"


def granite(types: list[str], **options: Any) -> PreTrainedModel:
    sizes = GRANITE | {"num_hidden_layers": len(types), "layer_types": types}
    config = transformers.GraniteMoeHybridConfig(**sizes | options)
    return with_time_steps(transformers.GraniteMoeHybridForCausalLM(config))


def granite_groups() -> int:
    """2; 1 where transformers is older than its norm of each group by itself."""
    module = transformers.models.granitemoehybrid.modeling_granitemoehybrid
    norm = inspect.signature(module.GraniteMoeHybridRMSNormGated.__init__)
    return 2 if "group_size" in norm.parameters else 1


def nemotron(types: list[str], **options: Any) -> PreTrainedModel:
    config = transformers.NemotronHConfig(**NEMOTRON | {"layers_block_type": types} | options)
    return with_corrections(with_time_steps(transformers.NemotronHForCausalLM(config)))


def qwen(types: list[str], **options: Any) -> PreTrainedModel:
    sizes = QWEN | {"num_hidden_layers": len(types), "layer_types": types}
    config = transformers.Qwen3_5TextConfig(**sizes | options)
    return with_time_steps(transformers.Qwen3_5ForCausalLM(config))


def qwen_experts(types: list[str], **options: Any) -> PreTrainedModel:
    sizes = {name: value for name, value in QWEN.items() if name != "intermediate_size"}
    sizes |= {"num_hidden_layers": len(types), "layer_types": types}
    config = transformers.Qwen3_5MoeTextConfig(**sizes | options)
    return with_time_steps(transformers.Qwen3_5MoeForCausalLM(config))


def qwen_next(types: list[str], **options: Any) -> PreTrainedModel:
    sizes = QWEN | {"num_hidden_layers": len(types), "layer_types": types}
    config = transformers.Qwen3NextConfig(**sizes | options)
    return with_time_steps(transformers.Qwen3NextForCausalLM(config))


def granite_dense(**options: Any) -> PreTrainedModel:
    sizes = {name: GRANITE[name] for name in GRANITE if not name.startswith(("mamba", "shared"))}
    sizes |= {"intermediate_size": 76}
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes | options))


def lfm2_experts(types: list[str], **options: Any) -> PreTrainedModel:
    sizes = LFM2 | {"num_hidden_layers": len(types), "layer_types": types}
    model = transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**sizes | options))
    return with_corrections(model)


def lfm2(types: list[str], **options: Any) -> PreTrainedModel:
    sizes = LFM2 | {"num_hidden_layers": len(types), "layer_types": types}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes | options))


def with_corrections(model: PreTrainedModel) -> PreTrainedModel:
    """Corrections of routers' scores that change which experts are chosen."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.uniform_(-0.3, 0.3)
    return model


def with_time_steps(model: PreTrainedModel) -> PreTrainedModel:
    """dt far above `time_step_min`, at which transformers cuts in long steps alone, and a memory
    that forgets more or less.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(-1.5, 1.0)
            if name.endswith("A_log"):
                parameter.uniform_(-2.5, 0.5)
    return model


# The epsilon of some is so large that where it is wrong shows in the logits.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    # As Granite 4 is published: no positions, multipliers that are no powers of two.
    "granite": lambda: granite(
        [M, M, A, M], mamba_n_heads=6, mamba_d_head=64, mamba_expand=3, mamba_n_groups=1,
        embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.015625,
        logits_scaling=6, position_embedding_type="nope", rms_norm_eps=0.05,
    ),
    "granite-rope-limits": lambda: granite(
        [A, M], mamba_n_heads=4, mamba_d_head=32, mamba_expand=1, mamba_n_groups=granite_groups(),
        mamba_d_conv=3,
        mamba_conv_bias=False, mamba_proj_bias=True, attention_bias=True,
        attention_multiplier=0.11, logits_scaling=4, position_embedding_type="rope",
        time_step_limit=(0.3, 0.9), tie_word_embeddings=True,
    ),
    "nemotron": lambda: nemotron(
        [M, F, M, A, F, M], mamba_num_heads=6, mamba_head_dim=20, n_groups=3, conv_kernel=4,
        layer_norm_epsilon=0.03,
    ),
    "nemotron-biases": lambda: nemotron(
        [F, A, M], mamba_num_heads=4, mamba_head_dim=12, n_groups=1, conv_kernel=2,
        use_bias=True, use_conv_bias=False, mlp_bias=True, layer_norm_epsilon=1e-3,
    ),
    # Of three groups of experts two are chosen.
    "nemotron-experts": lambda: nemotron(
        [M, E, A, E, M], mamba_num_heads=4, mamba_head_dim=12, n_groups=2, n_routed_experts=12,
        num_experts_per_tok=3, n_group=3, topk_group=2, moe_intermediate_size=36,
        moe_shared_expert_intermediate_size=44, routed_scaling_factor=2.5,
        layer_norm_epsilon=0.03,
    ),
    "qwen": lambda: qwen(
        [M, M, A, M], linear_num_key_heads=2, linear_num_value_heads=6, linear_conv_kernel_dim=4,
        rms_norm_eps=0.03,
    ),
    "qwen-half-tied": lambda: qwen(
        [A, M, A], linear_num_key_heads=3, linear_num_value_heads=3, linear_conv_kernel_dim=2,
        attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    ),
    "granite-experts": lambda: granite(
        [M, A, M], mamba_n_heads=4, mamba_d_head=32, mamba_expand=1, num_local_experts=6,
        num_experts_per_tok=3, intermediate_size=48, shared_intermediate_size=80,
        embedding_multiplier=12,
        residual_multiplier=0.22, attention_multiplier=0.015625, logits_scaling=6,
        position_embedding_type="nope", rms_norm_eps=0.05,
    ),
    # Without recurrent layers, but with the multipliers.
    "granite-dense": lambda: granite_dense(
        num_hidden_layers=3, embedding_multiplier=12, residual_multiplier=0.22,
        attention_multiplier=0.015625, logits_scaling=6, mlp_bias=True, rms_norm_eps=0.05,
    ),
    "lfm2-experts": lambda: lfm2_experts(
        [C, A, C, A], num_experts=7, num_experts_per_tok=3, moe_intermediate_size=36,
        num_dense_layers=1, routed_scaling_factor=1.7, norm_eps=0.03,
    ),
    "lfm2": lambda: lfm2([C, C, A, C], block_multiple_of=16, norm_eps=0.03),
    "lfm2-biases": lambda: lfm2(
        [A, C], conv_bias=True, conv_L_cache=5, block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False, norm_eps=1e-3,
    ),
    # Projections that are interleaved by head, and a layer without experts.
    "qwen-next-experts": lambda: qwen_next(
        [M, A, M], linear_num_key_heads=2, linear_num_value_heads=6, num_experts=7,
        num_experts_per_tok=3, moe_intermediate_size=36, shared_expert_intermediate_size=44,
        mlp_only_layers=[2], norm_topk_prob=False, rms_norm_eps=0.03,
    ),
    "qwen-experts": lambda: qwen_experts(
        [M, A, M], linear_num_key_heads=2, linear_num_value_heads=4, num_experts=7,
        num_experts_per_tok=3, moe_intermediate_size=36, shared_expert_intermediate_size=44,
        rms_norm_eps=0.03,
    ),
    # Seeds follow the order.
    # As Super and Ultra.
    "nemotron-latents": lambda: nemotron(
        [M, E, A, E, M], hidden_size=58, mamba_num_heads=4, mamba_head_dim=12, n_groups=2,
        n_routed_experts=7, num_experts_per_tok=3, moe_intermediate_size=36, moe_latent_size=22,
        moe_shared_expert_intermediate_size=44, routed_scaling_factor=2.5,
        layer_norm_epsilon=0.03,
    ),
}  # fmt: skip
