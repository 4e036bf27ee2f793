"""Random models of every architecture in the registry, of odd sizes: one of each kind or more.

A family's classes are looked up when a model of it is made: the oldest transformers that the
package admits has not all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from checkpoints.hybrids import MODELS as HYBRIDS
from checkpoints.random_models import MODELS as RANDOM
from checkpoints.random_models import YARN, make
from checkpoints.tower_models import GRIDS, SEEN, TOWERS

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 40, "qk_nope_head_dim": 18, "qk_rope_head_dim": 10, "v_head_dim": 22,
    "n_routed_experts": 9, "moe_intermediate_size": 27, "n_group": 3, "topk_group": 2,
}  # fmt: skip
_GEMMA4 = {
    "hidden_size": 54, "intermediate_size": 76, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 40, "final_logit_softcapping": 30.0, "sliding_window": 19,
    "num_hidden_layers": 5, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "tie_word_embeddings": True,
}  # fmt: skip
_EQUAL = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_INPUTS = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 271,
           "num_kv_shared_layers": 2, "use_double_wide_mlp": True}  # fmt: skip
_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
            "moe_intermediate_size": 22}  # fmt: skip


@dataclass(frozen=True)
class FamilyModel:
    """One architecture's random model.

    make  makes transformers' model
    keys  keys of `config.json` that take the place of those transformers writes; None: none
    embedding  factor of the embedding's noise, where tokens would be nearly all alike without it
    """

    make: Callable[[], Any]
    keys: Mapping[str, Any] = field(default_factory=dict)
    embedding: float = 1

    def write(self, folder: Path, seed: int) -> Any:
        """transformers' model with random weights whose logits spread, saved in the folder."""
        torch.manual_seed(seed)
        model = self.make().eval().float()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                scale = 0.3 if "norm" in name or "bias" in name else 0.15
                if name.endswith(("embed_tokens.weight", "embed_in.weight")):
                    scale *= self.embedding
                weight.add_(torch.randn_like(weight) * scale)
            for name, buffer in model.named_buffers():
                if name.endswith(("e_score_correction_bias", "expert_bias")):
                    buffer.add_(torch.randn_like(buffer) * 0.3)
        _compute_as_written(model)
        model.save_pretrained(folder)
        if self.keys:
            file = folder / "config.json"
            config = json.loads(file.read_text()) | self.keys
            file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return model


def _compute_as_written(model: Any) -> None:
    """Experts in a loop; caps of scores and numbers of experts as the config says."""
    config = model.config.get_text_config()
    # Gemma 4's name is the second one; None: the model has no experts.
    if any(getattr(config, name, None) for name in ("num_experts_per_tok", "top_k_experts")):
        model.set_experts_implementation("eager")
    if getattr(config, "attn_logit_softcapping", None):
        # transformers before 5.18 leaves these scores uncapped by default.
        model.set_attn_implementation("eager")


def _of(*makes: Callable[[], Any]) -> tuple[FamilyModel, ...]:
    return tuple(FamilyModel(each) for each in makes)


def _named(names: str) -> tuple[FamilyModel, ...]:
    """Models that other tests have, too."""
    known = RANDOM | HYBRIDS
    return tuple(FamilyModel(known[name]) for name in names.split())


def _new(family: str, *, embedding: float = 1, **options: Any) -> FamilyModel:
    return FamilyModel(lambda: make(family, **options), embedding=embedding)


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=263, n_embd=66, n_layer=3, n_head=3, n_positions=420, bos_token_id=2,
        eos_token_id=7,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _kimi_k25(architecture: str) -> FamilyModel:
    """The name of transformers' class, or the one that is published."""
    return FamilyModel(lambda: TOWERS["kimi_k25"](), {"architectures": [architecture]})


def _qwen2(**options: Any) -> Any:
    return make(
        "Qwen2", hidden_size=192, intermediate_size=76, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=1, **options,
    )  # fmt: skip


def _internlm3(biased: bool) -> FamilyModel:
    """Llama's model, with the keys that InternLM 3 has for biases."""
    made = lambda: make(  # noqa: E731
        "Llama", hidden_size=76, intermediate_size=92, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, attention_bias=biased,
        mlp_bias=biased,
    )  # fmt: skip
    own = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    return FamilyModel(
        made, own | {"qkv_bias": biased, "bias": biased, "attention_bias": None, "mlp_bias": None}
    )


MODELS: Mapping[str, tuple[FamilyModel, ...]] = {
    "CohereForCausalLM": _named("cohere cohere-biases"),
    "Cohere2ForCausalLM": (
        _new("Cohere2", hidden_size=88, intermediate_size=75, num_hidden_layers=5,
             num_attention_heads=4, num_key_value_heads=2, sliding_window=19, logit_scale=0.3),
    ),
    "DeepseekV2ForCausalLM": (
        _new("DeepseekV2", **_LATENT, hidden_size=57, intermediate_size=60, num_hidden_layers=3,
             num_attention_heads=3, num_key_value_heads=3, q_lora_rank=36,
             first_k_dense_replace=1, num_experts_per_tok=3, n_shared_experts=2,
             topk_method="group_limited_greedy", routed_scaling_factor=1.7),
        _new("DeepseekV2", **_LATENT | {"n_group": 1, "topk_group": 1}, hidden_size=70,
             intermediate_size=100, num_hidden_layers=2, num_attention_heads=5,
             num_key_value_heads=5, q_lora_rank=None, first_k_dense_replace=0,
             num_experts_per_tok=2, n_shared_experts=1, topk_method="greedy",
             rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}),
    ),
    "DeepseekV3ForCausalLM": (
        _new("DeepseekV3", **_LATENT, hidden_size=64, intermediate_size=68, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=4, q_lora_rank=44,
             first_k_dense_replace=1, num_experts_per_tok=3, n_shared_experts=1,
             norm_topk_prob=True, routed_scaling_factor=2.5,
             rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    ),
    "Ernie4_5ForCausalLM": _named("ernie ernie-tied"),
    "Exaone4ForCausalLM": _named("exaone exaone-full"),
    "GemmaForCausalLM": _named("gemma gemma-biases"),
    "Gemma2ForCausalLM": (
        _new("Gemma2", hidden_size=54, intermediate_size=76, num_hidden_layers=3,
             num_attention_heads=2, num_key_value_heads=1, head_dim=64, sliding_window=19,
             query_pre_attn_scalar=37, attn_logit_softcapping=0.7, final_logit_softcapping=2.5),
    ),
    "Gemma3ForCausalLM": (
        FamilyModel(lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(
            vocab_size=263, hidden_size=57, intermediate_size=76, num_hidden_layers=3,
            num_attention_heads=3, num_key_value_heads=3, head_dim=64,
            max_position_embeddings=512, layer_types=[SLIDING, FULL, SLIDING], sliding_window=19,
            query_pre_attn_scalar=37, tie_word_embeddings=False, rope_parameters={
                FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                SLIDING: {"rope_type": "default", "rope_theta": 300.0},
            },
        ))),
    ),
    "Gemma3ForConditionalGeneration": _of(SEEN["gemma3"]),
    "Gemma4ForCausalLM": tuple(
        FamilyModel(lambda keys=keys: _gemma4("Gemma4", **keys))
        for keys in (
            _EQUAL | {"hidden_size_per_layer_input": 0},
            _INPUTS,
            _EQUAL | _EXPERTS | {"hidden_size_per_layer_input": 0},
        )
    ),
    "Gemma4ForConditionalGeneration": _of(SEEN["gemma4"]),
    "Gemma4UnifiedForCausalLM": _of(lambda: _gemma4("Gemma4Unified", **_EQUAL)),
    "Gemma4UnifiedForConditionalGeneration": _of(SEEN["gemma4_unified"]),
    "Glm4MoeForCausalLM": (
        _new("Glm4Moe", hidden_size=72, intermediate_size=100, moe_intermediate_size=36,
             num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             attention_bias=True, use_qk_norm=True, n_routed_experts=10, num_experts_per_tok=3,
             n_shared_experts=1, n_group=5, topk_group=2, routed_scaling_factor=2.5,
             first_k_dense_replace=1),
        _new("Glm4Moe", hidden_size=48, intermediate_size=52, moe_intermediate_size=24,
             num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=80,
             n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=2, norm_topk_prob=False,
             first_k_dense_replace=0, rope_parameters=YARN | {"partial_rotary_factor": 0.5}),
    ),
    "Glm4MoeLiteForCausalLM": _named("glm-lite glm-lite-marked"),
    "GPT2LMHeadModel": _of(_gpt2),
    "GPTBigCodeForCausalLM": (
        _new("GPTBigCode", n_embd=132, n_layer=3, n_head=6, n_positions=420, n_inner=264),
    ),
    "GPTJForCausalLM": (
        _new("GPTJ", n_embd=96, n_layer=3, n_head=3, n_positions=512, n_inner=75, rotary_dim=10),
    ),
    "GPTNeoXForCausalLM": (
        _new("GPTNeoX", hidden_size=96, intermediate_size=75, num_hidden_layers=3,
             num_attention_heads=3),
        _new("GPTNeoX", hidden_size=72, intermediate_size=100, num_hidden_layers=2,
             num_attention_heads=2, use_parallel_residual=False, attention_bias=False,
             rotary_pct=0.5, embedding=8),
    ),
    "GptOssForCausalLM": (
        _new("GptOss", hidden_size=72, intermediate_size=40, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_local_experts=5,
             num_experts_per_tok=3, sliding_window=19,
             rope_parameters=YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}),
    ),
    "GraniteForCausalLM": _named("granite-dense"),
    "GraniteMoeHybridForCausalLM": _named("granite granite-rope-limits granite-experts"),
    "HunYuanDenseV1ForCausalLM": _named("hunyuan hunyuan-biases"),
    "HunYuanMoEV1ForCausalLM": _named("hunyuan-moe"),
    "InternLM3ForCausalLM": (_internlm3(True), _internlm3(False)),
    "Idefics3ForConditionalGeneration": _of(TOWERS["idefics3"]),
    "KimiK25ForConditionalGeneration": (_kimi_k25("KimiK25ForConditionalGeneration"),),
    "Kimi_K25ForConditionalGeneration": (_kimi_k25("Kimi_K25ForConditionalGeneration"),),
    "Lfm2ForCausalLM": _named("lfm2 lfm2-biases"),
    "Lfm2MoeForCausalLM": _named("lfm2-experts"),
    "Lfm2VlForConditionalGeneration": _of(TOWERS["lfm2_vl"]),
    "LlamaForCausalLM": (
        _new("Llama", hidden_size=72, intermediate_size=100, num_hidden_layers=2,
             num_attention_heads=6, num_key_value_heads=2, head_dim=80, attention_bias=True,
             mlp_bias=True, rope_parameters=LLAMA3),
        _new("Llama", hidden_size=42, intermediate_size=88, num_hidden_layers=3,
             num_attention_heads=3, num_key_value_heads=3, head_dim=64, tie_word_embeddings=True),
    ),
    "LlavaForConditionalGeneration": _of(TOWERS["llava"]),
    "MiMoForCausalLM": (
        FamilyModel(_qwen2, {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}),
    ),
    "Ministral3ForCausalLM": (
        # Queries would be scaled from position 512 on, where the engine ends.
        _new("Ministral3", hidden_size=76, intermediate_size=92, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=None,
             rope_parameters=YARN | {"original_max_position_embeddings": 512,
                                     "llama_4_scaling_beta": 0.1},
             max_position_embeddings=2048),
    ),
    "Mistral3ForConditionalGeneration": _of(TOWERS["mistral3"]),
    "MiniMaxM2ForCausalLM": _named("minimax minimax-whole"),
    "MistralForCausalLM": (
        _new("Mistral", hidden_size=52, intermediate_size=72, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=19),
        _new("Mistral", hidden_size=44, intermediate_size=60, num_hidden_layers=2,
             num_attention_heads=3, num_key_value_heads=1, head_dim=80, sliding_window=None),
    ),
    "MixtralForCausalLM": (
        _new("Mixtral", hidden_size=72, intermediate_size=44, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_local_experts=6,
             num_experts_per_tok=2, sliding_window=23),
    ),
    "NemotronHForCausalLM": _named("nemotron nemotron-biases nemotron-experts nemotron-latents"),
    "OlmoForCausalLM": _named("olmo olmo-biases"),
    "Olmo2ForCausalLM": (
        _new("Olmo2", hidden_size=192, intermediate_size=100, num_hidden_layers=3,
             num_attention_heads=3, num_key_value_heads=1, attention_bias=True, embedding=8),
    ),
    "Olmo3ForCausalLM": (
        _new("Olmo3", hidden_size=128, intermediate_size=100, num_hidden_layers=5,
             num_attention_heads=2, num_key_value_heads=2, sliding_window=23,
             rope_parameters={FULL: YARN, SLIDING: PLAIN}),
    ),
    "PhiForCausalLM": (
        _new("Phi", hidden_size=96, intermediate_size=75, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, partial_rotary_factor=0.5),
    ),
    "Phi3ForCausalLM": (
        _new("Phi3", hidden_size=256, intermediate_size=100, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, sliding_window=23),
    ),
    "Qwen2ForCausalLM": _of(
        _qwen2,
        lambda: _qwen2(
            use_sliding_window=True, sliding_window=19, layer_types=[FULL, SLIDING, FULL]
        ),
    ),
    "Qwen2MoeForCausalLM": _named("qwen2-moe qwen2-moe-second"),
    "Qwen2VLForConditionalGeneration": _of(GRIDS["qwen2_vl"]),
    "Qwen2_5_VLForConditionalGeneration": _of(GRIDS["qwen2_5_vl"]),
    "Qwen3ForCausalLM": (
        _new("Qwen3", hidden_size=80, intermediate_size=120, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=64, attention_bias=True),
    ),
    "Qwen3_5ForCausalLM": _named("qwen qwen-half-tied"),
    "Qwen3_5ForConditionalGeneration": _of(GRIDS["qwen3_5"]),
    "Qwen3_5MoeForCausalLM": _named("qwen-experts"),
    "Qwen3_5MoeForConditionalGeneration": _of(GRIDS["qwen3_5_moe"]),
    "Qwen3MoeForCausalLM": (
        _new("Qwen3Moe", hidden_size=72, intermediate_size=100, moe_intermediate_size=40,
             num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             num_experts=5, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1]),
    ),
    "Qwen3NextForCausalLM": _named("qwen-next-experts"),
    "SeedOssForCausalLM": _named("seed seed-biases"),
    "Qwen3VLForConditionalGeneration": _of(GRIDS["qwen3_vl"]),
    "Qwen3VLMoeForConditionalGeneration": _of(GRIDS["qwen3_vl_moe"]),
    "SmolLM3ForCausalLM": (
        _new("SmolLM3", hidden_size=256, intermediate_size=100, num_hidden_layers=5,
             num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    ),
    "StableLmForCausalLM": _named("stablelm stablelm-side-by-side"),
    "Starcoder2ForCausalLM": (
        _new("Starcoder2", hidden_size=132, intermediate_size=75, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, sliding_window=19),
    ),
    "SmolVLMForConditionalGeneration": _of(TOWERS["smolvlm"]),
}  # fmt: skip


def _gemma4(form: str, **keys: Any) -> Any:
    """Gemma 4's language model, whose layers are scaled."""
    config = getattr(transformers, f"{form}TextConfig")(
        vocab_size=263, max_position_embeddings=512, pad_token_id=0, **_GEMMA4 | keys
    )
    model = getattr(transformers, f"{form}ForCausalLM")(config)
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.5 + 0.25 * (index % 4))
    return model
