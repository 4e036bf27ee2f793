"""The table of model families, by the architecture that a checkpoint's `config.json` names."""

from __future__ import annotations

from collections.abc import Callable

from graphengine.models.contract import ModelConfig
from graphengine.models.families import (
    beside_towers,
    cohere,
    cohere2,
    csm,
    deepseek,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite4,
    higgs_audio,
    hunyuan,
    internlm3,
    lfm2,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    moshi,
    nemotron_h,
    olmo,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen3_omni,
    qwen3_vl,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from graphengine.models.hf.config_schema import HfConfig, read_key
from graphengine.models.policies import is_policy

FAMILIES: dict[str, Callable[[HfConfig, str], ModelConfig]] = {
    "CohereForCausalLM": cohere.read_config,
    "Cohere2ForCausalLM": cohere2.read_config,
    "CsmForConditionalGeneration": csm.read_config,
    "DeepseekV2ForCausalLM": deepseek.read_v2,
    "DeepseekV3ForCausalLM": deepseek.read_v3,
    "Ernie4_5ForCausalLM": ernie4_5.read_config,
    "Exaone4ForCausalLM": exaone4.read_config,
    "GemmaForCausalLM": gemma.read_config,
    "Gemma2ForCausalLM": gemma2.read_config,
    "Gemma3ForCausalLM": gemma3.read_config,
    "Gemma3ForConditionalGeneration": gemma3.read_config,
    "Gemma4ForCausalLM": gemma4.read_config,
    "Gemma4ForConditionalGeneration": gemma4.read_config,
    "Gemma4UnifiedForCausalLM": gemma4.read_config,
    "Gemma4UnifiedForConditionalGeneration": gemma4.read_config,
    "Glm4MoeForCausalLM": glm4_moe.read_config,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite.read_config,
    "GPT2LMHeadModel": gpt2.read_config,
    "GPTBigCodeForCausalLM": gpt2.read_bigcode,
    "GPTJForCausalLM": gptj.read_config,
    "GPTNeoXForCausalLM": gpt_neox.read_config,
    "GptOssForCausalLM": gpt_oss.read_config,
    "GraniteForCausalLM": granite.read_config,
    "GraniteMoeHybridForCausalLM": granite4.read_config,
    "HiggsAudioV2ForConditionalGeneration": higgs_audio.read_config,
    "HunYuanDenseV1ForCausalLM": hunyuan.read_config,
    "HunYuanMoEV1ForCausalLM": hunyuan.read_moe,
    "InternLM3ForCausalLM": internlm3.read_config,
    "Idefics3ForConditionalGeneration": beside_towers.read_config,
    "KimiK25ForConditionalGeneration": beside_towers.read_config,
    "Kimi_K25ForConditionalGeneration": beside_towers.read_config,
    "Lfm2ForCausalLM": lfm2.read_config,
    "Lfm2MoeForCausalLM": lfm2.read_moe,
    "Lfm2VlForConditionalGeneration": beside_towers.read_config,
    "LlamaForCausalLM": llama.read_config,
    "LlavaForConditionalGeneration": beside_towers.read_config,
    "MiMoForCausalLM": qwen2.read_config,
    "Ministral3ForCausalLM": ministral3.read_config,
    "Mistral3ForConditionalGeneration": beside_towers.read_config,
    "MiniMaxM2ForCausalLM": minimax_m2.read_config,
    "MistralForCausalLM": mistral.read_config,
    "MixtralForCausalLM": mixtral.read_config,
    "MoshiForConditionalGeneration": moshi.read_config,
    "NemotronHForCausalLM": nemotron_h.read_config,
    "OlmoForCausalLM": olmo.read_v1,
    "Olmo2ForCausalLM": olmo.read_v2,
    "Olmo3ForCausalLM": olmo.read_v3,
    "PhiForCausalLM": phi.read_config,
    "Phi3ForCausalLM": phi3.read_config,
    "Qwen2ForCausalLM": qwen2.read_config,
    "Qwen2MoeForCausalLM": qwen2_moe.read_config,
    "Qwen2VLForConditionalGeneration": qwen2_vl.read_config,
    "Qwen2_5_VLForConditionalGeneration": qwen2_vl.read_config,
    "Qwen3ForCausalLM": qwen3.read_config,
    "Qwen3_5ForCausalLM": qwen3_5.read_config,
    "Qwen3_5ForConditionalGeneration": qwen3_5.read_config,
    "Qwen3_5MoeForCausalLM": qwen3_5.read_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5.read_moe,
    "Qwen3MoeForCausalLM": qwen3_moe.read_config,
    "Qwen3NextForCausalLM": qwen3_next.read_config,
    "Qwen3OmniMoeForConditionalGeneration": qwen3_omni.read_config,
    "Qwen3OmniMoeTalkerForConditionalGeneration": qwen3_omni.read_config,
    "Qwen3TTSForConditionalGeneration": qwen3_omni.read_tts,
    "SeedOssForCausalLM": seed_oss.read_config,
    "Qwen3VLForConditionalGeneration": qwen3_vl.read_config,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl.read_moe,
    "SmolLM3ForCausalLM": smollm3.read_config,
    "StableLmForCausalLM": stablelm.read_config,
    "Starcoder2ForCausalLM": starcoder2.read_config,
    "SmolVLMForConditionalGeneration": beside_towers.read_config,
}
"""The reader of each architecture's `config.json`; it also gets the architecture's name."""
_GEMMA4 = ("Gemma4", "Gemma4Unified")


def read_model_config(config: HfConfig) -> ModelConfig:
    """The model's configuration, from `config.json` alone.

    ValueError names what is wrong or not supported; for an unknown architecture also the known
    ones.
    """
    architecture = _architecture(config)
    return FAMILIES[architecture](config, architecture)


def _architecture(config: HfConfig) -> str:
    """One of `FAMILIES`, from `architectures`, or from `model_type` where there are none."""
    if is_policy(config):
        raise ValueError("config.json is that of a robot's policy: `Policy` opens it, not `Engine`")
    architectures, model_type = read_key(config, "architectures"), read_key(config, "model_type")
    known = ", ".join(sorted(FAMILIES))
    if architectures:
        # A base model, saved without lm_head, has all weights of the whole model if embeddings are
        # tied.
        base_models = {name.replace("ForCausalLM", "Model"): name for name in FAMILIES}
        base_models |= {"Gemma3TextModel": "Gemma3ForCausalLM", "GPT2Model": "GPT2LMHeadModel"}
        base_models |= {f"{name}TextModel": f"{name}ForCausalLM" for name in _GEMMA4}
        first: str = architectures[0]
        first = base_models.get(first, first)
        if first not in FAMILIES:
            raise ValueError(f"unknown architecture {first!r}; known: {known}")
        return first
    model_types = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}
    model_types |= {"gemma3text": "Gemma3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
    model_types |= {
        "hunyuanv1dense": "HunYuanDenseV1ForCausalLM",
        "hunyuanv1moe": "HunYuanMoEV1ForCausalLM",
    }
    model_types |= {f"{name.lower()}text": f"{name}ForCausalLM" for name in _GEMMA4}
    # "qwen3_moe" is the type of a Qwen3Moe.
    name = model_types.get((model_type or "").replace("_", ""), "")
    if not name:
        raise ValueError(
            f"unknown architecture: config.json has no architectures, and "
            f"model_type={model_type!r}; known: {known}"
        )
    return name
