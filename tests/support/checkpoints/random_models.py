"""Random models of families that `AutoModelForCausalLM` opens, of odd sizes.

A family's classes are looked up when a model of it is made: the oldest transformers that the
package admits has not all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedModel

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
SIZES: dict[str, Any] = {
    "vocab_size": 271, "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": 7,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def make(family: str, **options: Any) -> PreTrainedModel:
    """A model of the family with this name in transformers' classes."""
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    kind = getattr(transformers, f"{family}ForCausalLM")
    routed = {"experts_implementation": "eager"} if "num_experts_per_tok" in options else {}
    model: PreTrainedModel = kind._from_config(config, **routed)
    return model


# transformers before 5.18 does not read MiniMax's `rotary_dim`.
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "glm-lite": lambda: make(
        "Glm4MoeLite", hidden_size=64, intermediate_size=68, moe_intermediate_size=28,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=48,
        q_lora_rank=44, qk_nope_head_dim=20, qk_rope_head_dim=16, v_head_dim=26,
        n_routed_experts=10, num_experts_per_tok=3, n_group=5, topk_group=2, rms_norm_eps=1e-3,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    # Queries without a latent, and experts where a list says so.
    "glm-lite-marked": lambda: make(
        "Glm4MoeLite", hidden_size=48, intermediate_size=52, moe_intermediate_size=20,
        num_hidden_layers=4, num_attention_heads=5, num_key_value_heads=5, kv_lora_rank=32,
        q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=2, norm_topk_prob=False,
        mlp_layer_types=["sparse", "dense", "dense", "sparse"], tie_word_embeddings=True,
    ),
    "seed": lambda: make(
        "SeedOss", hidden_size=72, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-3,
    ),
    "seed-biases": lambda: make(
        "SeedOss", hidden_size=56, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=80, attention_bias=False,
        attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=YARN,
    ),
    # Its window ends within the longer prompts; the last layer has none, and no RoPE.
    "exaone": lambda: make(
        "Exaone4", hidden_size=192, intermediate_size=100, num_hidden_layers=4,
        num_attention_heads=3, num_key_value_heads=1, sliding_window=23, rms_norm_eps=1e-3,
        rope_parameters=YARN,
    ),
    "exaone-full": lambda: make(
        "Exaone4", hidden_size=160, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, sliding_window=None,
        layer_types=["full_attention"] * 2, tie_word_embeddings=True,
    ),
    "ernie": lambda: make(
        "Ernie4_5", hidden_size=72, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, use_bias=True,
    ),
    "ernie-tied": lambda: make(
        "Ernie4_5", hidden_size=56, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=80, tie_word_embeddings=True,
        rope_parameters=YARN,
    ),
    "minimax": lambda: make(
        "MiniMaxM2", hidden_size=72, intermediate_size=36, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, num_local_experts=7,
        num_experts_per_tok=3, rotary_dim=32, rms_norm_eps=1e-3,
        rope_parameters=HALF,
    ),
    "minimax-whole": lambda: make(
        "MiniMaxM2", hidden_size=56, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=80, num_local_experts=5,
        num_experts_per_tok=2, tie_word_embeddings=True,
        rope_parameters=YARN | {"partial_rotary_factor": 1.0},
    ),
    "hunyuan": lambda: make(
        "HunYuanDenseV1", hidden_size=72, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-3,
        rope_parameters=ALPHA,
    ),
    "hunyuan-biases": lambda: make(
        "HunYuanDenseV1", hidden_size=88, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=1, head_dim=80, attention_bias=True,
    ),
    "hunyuan-moe": lambda: make(
        "HunYuanMoEV1", hidden_size=56, intermediate_size=36, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=7, moe_topk=3,
        num_experts_per_tok=3, rope_parameters=ALPHA,
    ),
    "qwen2-moe": lambda: make(
        "Qwen2Moe", hidden_size=128, intermediate_size=60, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, moe_intermediate_size=20,
        shared_expert_intermediate_size=44, num_experts=7, num_experts_per_tok=3,
        mlp_only_layers=[1],
    ),
    "qwen2-moe-second": lambda: make(
        "Qwen2Moe", hidden_size=120, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=3, moe_intermediate_size=28,
        shared_expert_intermediate_size=36, num_experts=5, num_experts_per_tok=2,
        norm_topk_prob=True, decoder_sparse_step=2, qkv_bias=False, tie_word_embeddings=True,
    ),
    "gemma": lambda: make(
        "Gemma", hidden_size=72, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    ),
    "gemma-biases": lambda: make(
        "Gemma", hidden_size=54, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=80, attention_bias=True,
        rope_parameters=YARN,
    ),
    "stablelm": lambda: make(
        "StableLm", hidden_size=192, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=1, use_qkv_bias=True, layer_norm_eps=1e-3,
    ),
    "stablelm-side-by-side": lambda: make(
        "StableLm", hidden_size=160, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, use_parallel_residual=True,
        tie_word_embeddings=True, partial_rotary_factor=0.5,
    ),
    "cohere": lambda: make(
        "Cohere", hidden_size=192, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=1, logit_scale=0.3, layer_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    "cohere-biases": lambda: make(
        "Cohere", hidden_size=160, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, attention_bias=True,
    ),
    "olmo": lambda: make(
        "Olmo", hidden_size=192, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=1,
    ),
    "olmo-biases": lambda: make(
        "Olmo", hidden_size=160, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, attention_bias=True,
    ),
}  # fmt: skip
