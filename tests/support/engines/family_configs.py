"""A `config.json` of each architecture: published widths where a shape has them, few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphengine.models.families.registry import FAMILIES
from graphengine.profiles.benchmark.shapes import SHAPES

Config = Mapping[str, Any]

_FEW = {"num_hidden_layers": 2, "vocab_size": 16_384}
_DENSE: Config = {
    "vocab_size": 16_384, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
_EXPERTS: Config = {
    **_DENSE, "moe_intermediate_size": 512, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1, "n_routed_experts": 8,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 128,
           "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
_KIMI = {**_EXPERTS, **_LATENT, "num_key_value_heads": 8, "model_type": "kimi_k2"}
_GEMMA = {**SHAPES["gemma-3-4b"], **_FEW, "sliding_window_pattern": 2}
_GEMMA4 = {
    **_DENSE, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
    "head_dim": 256, "global_head_dim": 512, "sliding_window": 256, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 16_384,
}  # fmt: skip
_GEMMA4_EQUAL = {
    **_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
}  # fmt: skip
_QWEN = {**SHAPES["qwen3.5-4b"], **_FEW, "full_attention_interval": 2}
_AXES = {
    "text_config": {**_DENSE, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
}
_TYPES = {"layer_types": ["conv", "full_attention"]}
_MOE = {**_QWEN, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512}  # fmt: skip
_TALKER: Config = {
    "num_code_groups": 4, "codec_eos_token_id": 2150,
    "text_config": {**_DENSE, "vocab_size": 3072, "num_experts": 8, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 384, "shared_expert_intermediate_size": 768},
    "code_predictor_config": {**_DENSE, "vocab_size": 2048, "num_code_groups": 4},
}  # fmt: skip

CONFIGS: Mapping[str, Config] = {
    "CohereForCausalLM": _DENSE,
    "Cohere2ForCausalLM": {**_DENSE, "sliding_window": 256, "sliding_window_pattern": 2},
    "CsmForConditionalGeneration": {
        **_DENSE, "vocab_size": 2051, "text_vocab_size": 16_384, "num_codebooks": 4,
        "depth_decoder_config": {
            **_DENSE, "vocab_size": 2051, "hidden_size": 512, "num_codebooks": 4,
            "backbone_hidden_size": 1024, "max_position_embeddings": 33,
        },
    },
    "HiggsAudioV2ForConditionalGeneration": {
        **_DENSE, "num_codebooks": 4, "codebook_size": 1026,
    },
    "DeepseekV2ForCausalLM": {**SHAPES["deepseek-v2-lite"], **_FEW, "n_routed_experts": 8},
    "DeepseekV3ForCausalLM": {
        **_EXPERTS, **_LATENT, "num_key_value_heads": 8, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "Gemma2ForCausalLM": {**_DENSE, "head_dim": 128, "sliding_window": 256},
    "Ernie4_5ForCausalLM": {**_DENSE, "use_bias": True},
    "Exaone4ForCausalLM": {**_DENSE, "sliding_window": 256, "sliding_window_pattern": 2},
    "GemmaForCausalLM": {**_DENSE, "head_dim": 128},
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": {"text_config": {**_GEMMA, "model_type": "gemma3_text"}},
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": {"text_config": {
        **_GEMMA4_EQUAL, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
        "moe_intermediate_size": 512,
    }},
    "Gemma4UnifiedForCausalLM": _GEMMA4_EQUAL,
    "Gemma4UnifiedForConditionalGeneration": {"text_config": _GEMMA4_EQUAL},
    "Glm4MoeForCausalLM": {**_EXPERTS, "head_dim": 128, "attention_bias": True,
                           "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "Glm4MoeLiteForCausalLM": {**_EXPERTS, **_LATENT, "num_key_value_heads": 8,
                               "qk_nope_head_dim": 192, "v_head_dim": 256},
    "GPT2LMHeadModel": {"n_embd": 512, "n_layer": 2, "n_head": 8, "vocab_size": 16_384},
    "GPTBigCodeForCausalLM": {"n_embd": 512, "n_layer": 2, "n_head": 8, "vocab_size": 16_384},
    "GPTJForCausalLM": {"n_embd": 512, "n_layer": 2, "n_head": 4, "vocab_size": 16_384},
    "GPTNeoXForCausalLM": {**_DENSE, "num_key_value_heads": None, "rotary_pct": 0.25},
    "GptOssForCausalLM": {**SHAPES["gpt-oss-20b"], **_FEW, "num_local_experts": 4},
    "GraniteForCausalLM": {**_DENSE, "embedding_multiplier": 12, "residual_multiplier": 0.22,
                           "attention_multiplier": 0.0625, "logits_scaling": 6},
    "GraniteMoeHybridForCausalLM": {
        **SHAPES["granite-4-h-1b"], **_FEW, "layer_types": ["mamba", "attention"],
    },
    "HunYuanDenseV1ForCausalLM": {
        **_DENSE, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "HunYuanMoEV1ForCausalLM": {**_DENSE, "num_experts": 8, "moe_topk": 2},
    "Idefics3ForConditionalGeneration": {"text_config": _DENSE},
    "InternLM3ForCausalLM": {**_DENSE, "qkv_bias": True, "bias": True},
    "KimiK25ForConditionalGeneration": {"text_config": _KIMI},
    "Kimi_K25ForConditionalGeneration": {"text_config": _KIMI},
    "Lfm2ForCausalLM": {**_DENSE, **_TYPES, "conv_L_cache": 3},
    "Lfm2MoeForCausalLM": {**_DENSE, **_TYPES, "conv_L_cache": 3, "num_experts": 8,
                           "num_experts_per_tok": 2, "moe_intermediate_size": 512,
                           "num_dense_layers": 1, "use_expert_bias": True},
    "Lfm2VlForConditionalGeneration": {
        "text_config": {**_DENSE, **_TYPES, "conv_L_cache": 3, "model_type": "lfm2"},
    },
    "LlamaForCausalLM": {**SHAPES["llama-8b"], **_FEW},
    "LlavaForConditionalGeneration": {"text_config": {**_DENSE, "model_type": "llama"}},
    "MiMoForCausalLM": _DENSE,
    "Ministral3ForCausalLM": _DENSE,
    "Mistral3ForConditionalGeneration": {"text_config": {**_DENSE, "model_type": "ministral3"}},
    "MiniMaxM2ForCausalLM": {**_DENSE, "num_local_experts": 8, "rotary_dim": 64},
    "MistralForCausalLM": _DENSE,
    "MixtralForCausalLM": {**_DENSE, "num_local_experts": 4},
    "NemotronHForCausalLM": {
        **SHAPES["tiny-hybrid"], "hybrid_override_pattern": "M-*E", "n_routed_experts": 8,
        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    },
    "OlmoForCausalLM": _DENSE,
    "Olmo2ForCausalLM": _DENSE,
    "Olmo3ForCausalLM": {**_DENSE, "sliding_window": 256,
                         "layer_types": ["sliding_attention", "full_attention"]},
    "PhiForCausalLM": _DENSE,
    "Phi3ForCausalLM": {**_DENSE, "sliding_window": 256},
    "Qwen2ForCausalLM": _DENSE,
    "Qwen2MoeForCausalLM": {**_DENSE, "num_experts": 8, "num_experts_per_tok": 2,
                            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "Qwen2VLForConditionalGeneration": _AXES,
    "Qwen2_5_VLForConditionalGeneration": _AXES,
    "Qwen3ForCausalLM": {**SHAPES["qwen3-4b"], **_FEW},
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": {"text_config": {**_QWEN, "model_type": "qwen3_5_text"}},
    "Qwen3_5MoeForCausalLM": _MOE,
    "Qwen3_5MoeForConditionalGeneration": {
        "text_config": {**_MOE, "model_type": "qwen3_5_moe_text"},
    },
    "MoshiForConditionalGeneration": {
        **_DENSE, "ffn_dim": 4096, "vocab_size": 16_384, "num_codebooks": 4, "sliding_window": None,
        "depth_decoder_config": {
            **_DENSE, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
            "head_dim": 64, "ffn_dim": 2048, "vocab_size": 16_384, "input_size": 1024,
            "num_codebooks": 4,
        },
    },
    "Qwen3OmniMoeForConditionalGeneration": {"talker_config": _TALKER},
    "Qwen3OmniMoeTalkerForConditionalGeneration": _TALKER,
    "Qwen3TTSForConditionalGeneration": {"talker_config": {
        **_DENSE, "vocab_size": 3072, "num_code_groups": 4, "codec_eos_token_id": 2150,
        "code_predictor_config": {
            **_DENSE, "vocab_size": 2048, "hidden_size": 512, "num_code_groups": 4,
        },
    }},
    "Qwen3NextForCausalLM": _MOE,
    "Qwen3MoeForCausalLM": {**SHAPES["qwen3-30b-a3b"], **_FEW, "num_experts": 8},
    "SeedOssForCausalLM": {**_DENSE, "attention_out_bias": True},
    "Qwen3VLForConditionalGeneration": {
        "text_config": {**SHAPES["qwen3-4b"], **_FEW, "num_hidden_layers": 4},
        "vision_config": {"deepstack_visual_indexes": [1]},
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": {**SHAPES["qwen3-30b-a3b"], **_FEW, "num_experts": 8},
        "vision_config": {"deepstack_visual_indexes": [1]},
    },
    "SmolLM3ForCausalLM": _DENSE,
    "StableLmForCausalLM": _DENSE,
    "Starcoder2ForCausalLM": {**_DENSE, "sliding_window": 256},
    "SmolVLMForConditionalGeneration": {"text_config": {**_DENSE, "model_type": "llama"}},
}  # fmt: skip
assert CONFIGS.keys() == FAMILIES.keys(), CONFIGS.keys() ^ FAMILIES.keys()


def config_of(architecture: str) -> dict[str, Any]:
    return {**CONFIGS[architecture], "architectures": [architecture]}
