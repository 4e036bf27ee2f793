"""`config.json` of each shape that commands measure. Nothing here imports torch, as `--help` lists
the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

DEMO = "demo"


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama(**sizes: Any) -> dict[str, Any]:
    fixed = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    return {"architectures": ["LlamaForCausalLM"], **fixed, **sizes}


def _qwen3(**sizes: Any) -> dict[str, Any]:
    fixed = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    return {"architectures": ["Qwen3ForCausalLM"]} | fixed | sizes


def _qwen3_moe(**sizes: Any) -> dict[str, Any]:
    fixed = {"model_type": "qwen3_moe", "norm_topk_prob": True, "tie_word_embeddings": False}
    return _qwen3(**fixed, **sizes) | {"architectures": ["Qwen3MoeForCausalLM"]}


def _deepseek_v2(**sizes: Any) -> dict[str, Any]:
    fixed = {
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "q_lora_rank": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    }
    return {"architectures": ["DeepseekV2ForCausalLM"], **fixed, **sizes}


def _csm(depth: Mapping[str, Any], **sizes: Any) -> dict[str, Any]:
    """A model whose step emits a frame of codes, as CSM does; `depth` is its inner decoder."""
    shared = {name: sizes[name] for name in ("num_codebooks", "vocab_size")}
    fixed = {"model_type": "csm", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    of_depth = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "backbone_hidden_size": sizes["hidden_size"],
        "max_position_embeddings": shared["num_codebooks"] + 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    return {
        "architectures": ["CsmForConditionalGeneration"],
        **fixed,
        "codebook_eos_token_id": 0,
        "tie_codebooks_embeddings": True,
        **sizes,
        "depth_decoder_config": {**of_depth, **shared, **depth},
    }


def _gemma3(**sizes: Any) -> dict[str, Any]:
    """The language model alone, as `text_config` of the published files has it."""
    fixed = {
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    }
    return {"architectures": ["Gemma3ForCausalLM"]} | fixed | sizes


def _granite4(layers: int, attention: tuple[int, ...], **sizes: Any) -> dict[str, Any]:
    """A model of Mamba2 layers, except for the `attention` layers."""
    fixed = {
        "model_type": "granitemoehybrid",
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": layers,
        "layer_types": ["attention" if i in attention else "mamba" for i in range(layers)],
        "num_local_experts": 0,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    }
    return {"architectures": ["GraniteMoeHybridForCausalLM"]} | fixed | sizes


def _qwen3_5(**sizes: Any) -> dict[str, Any]:
    """The language model alone, as `text_config` of the published files has it."""
    fixed = {
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
        },
    }
    return {"architectures": ["Qwen3_5ForCausalLM"]} | fixed | sizes


def _nemotron_h(pattern: str, **sizes: Any) -> dict[str, Any]:
    fixed = {
        "model_type": "nemotron_h",
        "layer_norm_epsilon": 1e-5,
        "hybrid_override_pattern": pattern,
        "tie_word_embeddings": False,
    }
    return {"architectures": ["NemotronHForCausalLM"]} | fixed | sizes


def _gpt_oss() -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu",
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "attention_bias": True, "rms_norm_eps": 1e-5, "swiglu_limit": 7.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-1b": _llama(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True,
        max_position_embeddings=131072, rope_parameters=_llama3_rope(32.0),
    ),
    "llama-8b": _llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, tie_word_embeddings=False,
        max_position_embeddings=131072, rope_parameters=_llama3_rope(8.0),
    ),
    "llama-70b": _llama(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, tie_word_embeddings=False,
        max_position_embeddings=131072, rope_parameters=_llama3_rope(8.0),
    ),
    "qwen3-0.6b": _qwen3(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
    ),
    "qwen3-4b": _qwen3(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
    ),
    "qwen3-30b-a3b": _qwen3_moe(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "deepseek-v2-lite": _deepseek_v2(
        hidden_size=2048, intermediate_size=10944, num_hidden_layers=27, num_attention_heads=16,
        num_key_value_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408,
        vocab_size=102400,
    ),
    "gemma-3-4b": _gemma3(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, vocab_size=262208, query_pre_attn_scalar=256,
        sliding_window=1024, max_position_embeddings=131072,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "tiny-gemma": _gemma3(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=256, query_pre_attn_scalar=64,
        sliding_window=20, sliding_window_pattern=2, max_position_embeddings=512,
    ),
    "gpt-oss-20b": _gpt_oss() | {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    "granite-4-h-1b": _granite4(
        40, (5, 15, 25, 35), hidden_size=1536, shared_intermediate_size=4096, vocab_size=100352,
        num_attention_heads=12, num_key_value_heads=4, mamba_n_heads=48, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_expand=2, attention_multiplier=0.0078125,
        logits_scaling=6, max_position_embeddings=131072,
    ),
    "nemotron-h-8b": _nemotron_h(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", hidden_size=4096,
        intermediate_size=21504, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128,
        vocab_size=131072, max_position_embeddings=8192,
    ),
    "qwen3.5-0.8b": _qwen3_5(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, linear_num_key_heads=16, linear_num_value_heads=16,
    ),
    "qwen3.5-4b": _qwen3_5(
        hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, linear_num_key_heads=16, linear_num_value_heads=32,
    ),
    "tiny-delta": _qwen3_5(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, full_attention_interval=2, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        vocab_size=256, max_position_embeddings=512,
    ),
    "tiny-hybrid": _nemotron_h(
        "M-*", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, mamba_num_heads=4, mamba_head_dim=32, n_groups=2, ssm_state_size=16,
        vocab_size=256, max_position_embeddings=512,
    ),
    "gpt-oss-20b-bf16": _gpt_oss(),
    "csm-1b": _csm(
        {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=2051, text_vocab_size=128256,
        num_codebooks=32, max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    # The sizes of Qwen3-TTS 1.7B in the form of CSM: all codebooks have as many codes.
    "qwen3-tts-1.7b": _csm(
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=2048, text_vocab_size=151936,
        num_codebooks=16, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "tiny-csm": _csm(
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=64, text_vocab_size=256,
        num_codebooks=4, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "tiny-moe": _qwen3_moe(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=256, max_position_embeddings=512,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "tiny": _llama(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=256, tie_word_embeddings=False,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip
"""`config.json` of each shape; `demo` is the checkpoint in the package."""

NAMES = (*SHAPES, DEMO)
"""All shapes, and the checkpoint in the package."""


class PolicyShape(NamedTuple):
    """A robot's policy with random weights, and the prefix of its chunks."""

    config: Mapping[str, Any]
    images: int
    image_tokens: int
    """Embeddings of an image."""
    text_tokens: int

    @property
    def prefix_tokens(self) -> int:
        return self.images * self.image_tokens + self.text_tokens


_TINY_LAYERS = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
POLICIES: Mapping[str, PolicyShape] = {
    # Three cameras of 224 x 224 pixels, and openpi's longest instruction.
    "pi0": PolicyShape({"type": "pi0"}, images=3, image_tokens=256, text_tokens=48),
    "tiny-pi0": PolicyShape(
        {
            "model_type": "pi0", "chunk_size": 6, "max_state_dim": 5, "max_action_dim": 7,
            "num_inference_steps": 4,
            "vlm_config": {"text_config": {
                **_TINY_LAYERS, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256,
                "max_position_embeddings": 512,
            }},
            "dit_config": {**_TINY_LAYERS, "hidden_size": 32, "intermediate_size": 48,
                           "max_position_embeddings": 512},
        },
        images=2, image_tokens=8, text_tokens=4,
    ),
}  # fmt: skip
"""Policies that `bench` measures."""
