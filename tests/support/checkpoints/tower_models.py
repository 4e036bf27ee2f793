"""Small random models of transformers with a vision tower, of each architecture that has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from engines.towers import IMAGE, VISION, text

VIDEO, START, END = 251, 252, 253
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
PATCH = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}


SCALED = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _llava() -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision = VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
    config = LlavaConfig(
        text_config=text(model_type="llama"), vision_config=vision, image_token_index=IMAGE
    )
    return LlavaForConditionalGeneration(config)


def _smolvlm() -> Any:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    words = text(model_type="llama", tie_word_embeddings=True)
    config = SmolVLMConfig(
        text_config=words,
        vision_config=VISION,
        scale_factor=2,
        image_token_id=IMAGE,
        tie_word_embeddings=True,
    )
    return SmolVLMForConditionalGeneration(config)


def _idefics3() -> Any:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    words = text(model_type="llama")
    config = Idefics3Config(
        text_config=words, vision_config=VISION, scale_factor=2, image_token_id=IMAGE
    )
    return Idefics3ForConditionalGeneration(config)


def _lfm2_vl() -> Any:
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    types = ["conv", "full_attention", "conv"]
    words = text(model_type="lfm2", layer_types=types)
    vision = VISION | {"model_type": "siglip2_vision_model", "num_patches": 16}
    config = Lfm2VlConfig(
        text_config=words, vision_config=vision, image_token_id=IMAGE, projector_hidden_size=48
    )
    return Lfm2VlForConditionalGeneration(config)


def _mistral3(family: str = "mistral", **keys: Any) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    words = text(model_type=family, head_dim=64, **keys)
    vision = VISION | {"model_type": "pixtral", "head_dim": 16}
    config = Mistral3Config(text_config=words, vision_config=vision, image_token_index=IMAGE)
    return Mistral3ForConditionalGeneration(config)


def _kimi_k25() -> Any:
    latent = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    # Its model reads another embedding at its image token, which it must not say.
    words = text(
        vocab_size=IMAGE, model_type="deepseek_v3", num_key_value_heads=3, v_head_dim=10,
        first_k_dense_replace=1, n_group=1, topk_group=1, **latent, **experts,
    )  # fmt: skip
    vision = {name: size for name, size in VISION.items() if name != "image_size"}
    vision |= {"pos_emb_height": 4, "pos_emb_width": 4}
    config = transformers.Kimi_K25Config(
        text_config=words, vision_config=vision, image_token_id=IMAGE, projection_hidden_size=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Kimi_K25ForConditionalGeneration(config)


TOWERS: dict[str, Callable[[], Any]] = {
    "llava": _llava,
    "smolvlm": _smolvlm,
    "idefics3": _idefics3,
    "lfm2_vl": _lfm2_vl,
    "mistral3": _mistral3,
    "ministral3": lambda: _mistral3("ministral3", rope_parameters=SCALED),
}
"""Models whose images take places as tokens do."""
if hasattr(transformers, "Kimi_K25ForConditionalGeneration"):
    # Older versions lack it.
    TOWERS["kimi_k25"] = _kimi_k25


def _qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 192, "num_heads": 2, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=_text([8, 11, 13]), vision_config=vision | PATCH, **IDS)
    )


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 192, "num_heads": 2}
    vision |= {"intermediate_size": 40, "window_size": 16, "tokens_per_second": 3}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=_text([16, 8, 8]), vision_config=vision | PATCH, **IDS)
    )


def _text(sections: list[int]) -> dict[str, Any]:
    """A language model's config, with as many pairs of a head for each axis."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return text(rope_parameters=rope)


def _qwen3_5(experts: bool = False) -> Any:
    words = _text([6, 5, 5]) | {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    words["rope_parameters"] |= {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
    words |= {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
    words |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    words |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 192, "num_heads": 2}
    vision |= {"intermediate_size": 40, "num_position_embeddings": 64}
    if not experts:
        from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

        return Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(text_config=words, vision_config=vision | PATCH, **IDS)
        )
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    words |= {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
    words |= {"shared_expert_intermediate_size": 28}
    return Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=words, vision_config=vision | PATCH, **IDS)
    )


def _qwen3_vl(experts: bool = False, **keys: Any) -> Any:
    """Features of two levels of the tower are added after the first two of three layers."""
    words = _text([12, 10, 10]) | {"head_dim": 64, "num_attention_heads": 4} | keys
    words["num_key_value_heads"] = 2
    vision = {"depth": 3, "hidden_size": 32, "out_hidden_size": 192, "num_heads": 2}
    vision |= {"intermediate_size": 40, "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [0, 2]} | PATCH
    if not experts:
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        return Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(text_config=words, vision_config=vision, **IDS)
        )
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    words |= {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
    return Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config=words, vision_config=vision, **IDS)
    )


GRIDS: dict[str, Callable[..., Any]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": lambda: _qwen3_5(experts=True),
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": lambda: _qwen3_vl(experts=True),
}
"""Models whose positions have three axes (M-RoPE)."""


FULL, SLIDING = "full_attention", "sliding_attention"
PLACES = 25
"""Embeddings of one of Gemma 3's images: twice as many as a window has."""


def _gemma3(**keys: Any) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    words = text(
        head_dim=64,
        layer_types=[SLIDING, FULL, SLIDING],
        sliding_window=12,
        query_pre_attn_scalar=48,
        tie_word_embeddings=False,
        **keys,
    )
    config = Gemma3Config(
        text_config=words,
        vision_config=VISION | {"image_size": 40},
        mm_tokens_per_image=PLACES,
        image_token_index=IMAGE,
        boi_token_index=251,
        eoi_token_index=252,
        tie_word_embeddings=False,
    )
    return Gemma3ForConditionalGeneration(config)


def _gemma4() -> Any:
    """Its last layers reuse the keys of others, and layers have inputs."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

    words = Gemma4TextConfig(
        **_GEMMA4,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=263,
        num_kv_shared_layers=2,
    )
    vision = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16,
    }  # fmt: skip
    config = Gemma4Config(
        text_config=words.to_dict(), vision_config=vision, audio_config=None, **_OTHERS
    )
    return Gemma4ForConditionalGeneration(config)


def _gemma4_unified() -> Any:
    """Its keys are its values in layers without a window."""
    from transformers import (
        Gemma4UnifiedConfig,
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedTextConfig,
    )

    equal = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    words = Gemma4UnifiedTextConfig(**_GEMMA4 | equal).to_dict()
    config = Gemma4UnifiedConfig(
        text_config=words, vision_config=None, audio_config=None, **_OTHERS
    )
    return Gemma4UnifiedForConditionalGeneration(config)


_OTHERS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 252}
_GEMMA4: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 54, "intermediate_size": 76, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 40, "sliding_window": 19,
    "max_position_embeddings": 512, "pad_token_id": 0, "final_logit_softcapping": 30.0,
    "num_hidden_layers": 5, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "use_bidirectional_attention": "vision",
}  # fmt: skip
SEEN: dict[str, Callable[..., Any]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
}
"""Models whose images are seen as a whole: attention within one goes in both directions."""
