"""Checkpoints with random weights, written by transformers, and the oracle that reads them back.

Tests of the engine run on the CPU, and again on a GPU under the mark `gpu`: the fixture `device`
stands for both.
"""

from __future__ import annotations

import functools
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine import Engine, Result
from graphengine.demo import checkpoint_path
from graphengine.program.graph_key import GraphKey

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from checkpoints.few_layers import few_layers
from checkpoints.hybrids import MODELS as HYBRIDS
from checkpoints.random_models import MODELS as RANDOM_MODELS
from engines.small_engine import open_engine
from launches.rounding_bounds import assert_best, in_float64, room_of

TOLERANCE = 1e-4
"""Tolerance of float32 logits, relative to a token's largest."""

CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def _llama(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=512, **options))


def _qwen3(**options: Any) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(max_position_embeddings=512, **options))


def _qwen3_moe(**options: Any) -> Qwen3MoeForCausalLM:
    # Transformers' own loop over experts, in every dtype.
    config = Qwen3MoeConfig(max_position_embeddings=512, **options)
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager")


def _mixtral(**options: Any) -> PreTrainedModel:
    import transformers

    config = transformers.MixtralConfig(max_position_embeddings=512, **options)
    model: PreTrainedModel = transformers.MixtralForCausalLM._from_config(
        config, experts_implementation="eager"
    )
    return model


def _deepseek_v2(**options: Any) -> DeepseekV2ForCausalLM:
    config = DeepseekV2Config(max_position_embeddings=512, **options)
    return DeepseekV2ForCausalLM._from_config(config, experts_implementation="eager")


def _deepseek_v3(**options: Any) -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(max_position_embeddings=512, **options)
    return DeepseekV3ForCausalLM._from_config(config, experts_implementation="eager")


def _glm4_moe(**options: Any) -> Glm4MoeForCausalLM:
    config = Glm4MoeConfig(max_position_embeddings=512, **options)
    return Glm4MoeForCausalLM._from_config(config, experts_implementation="eager")


def _phi3(**options: Any) -> PreTrainedModel:
    import transformers

    sizes = {"vocab_size": 271, "hidden_size": 64 * options["num_attention_heads"]}
    sizes |= {"intermediate_size": 100, "max_position_embeddings": 512, "pad_token_id": 0}
    sizes |= {"bos_token_id": 2}
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes | options))


def _smollm3(**options: Any) -> PreTrainedModel:
    # The oldest transformers that is admitted has no such classes.
    import transformers

    heads = options["num_attention_heads"]
    sizes = {"vocab_size": 271, "hidden_size": 64 * heads, "intermediate_size": 100}
    sizes |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 2}
    return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**sizes | options))


def _gemma2(**options: Any) -> PreTrainedModel:
    import transformers

    sizes = {"vocab_size": 263, "max_position_embeddings": 512, "bos_token_id": 2}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes | options))


def _starcoder2(**options: Any) -> PreTrainedModel:
    import transformers

    sizes = {"vocab_size": 263, "max_position_embeddings": 512, "bos_token_id": 2}
    return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**sizes | options))


def _gpt2(**options: Any) -> PreTrainedModel:
    import transformers

    sizes = {"vocab_size": 263, "bos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | options))


def _gpt_bigcode(**options: Any) -> PreTrainedModel:
    import transformers

    sizes = {"vocab_size": 263, "bos_token_id": 2}
    return transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(**sizes | options))


def _gptj(**options: Any) -> PreTrainedModel:
    import transformers

    sizes = {"vocab_size": 263, "n_positions": 512, "bos_token_id": 2}
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes | options))


def _phi(**options: Any) -> PreTrainedModel:
    import transformers

    sizes = {"vocab_size": 263, "max_position_embeddings": 512, "bos_token_id": 2}
    return transformers.PhiForCausalLM(transformers.PhiConfig(**sizes | options))


def _gpt_neox(**options: Any) -> PreTrainedModel:
    import transformers

    sizes = {"vocab_size": 263, "max_position_embeddings": 512, "bos_token_id": 2}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes | options))


def _cohere2(**options: Any) -> PreTrainedModel:
    import transformers

    sizes = {"vocab_size": 263, "max_position_embeddings": 512, "bos_token_id": 2}
    return transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**sizes | options))


def _olmo(version: int, **options: Any) -> PreTrainedModel:
    import transformers

    heads = options["num_attention_heads"]
    sizes = {"vocab_size": 271, "hidden_size": 64 * heads, "intermediate_size": 100}
    sizes |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 2}
    config = getattr(transformers, f"Olmo{version}Config")(**sizes | options)
    model: PreTrainedModel = getattr(transformers, f"Olmo{version}ForCausalLM")(config)
    return model


# Odd on purpose: sizes that no tile divides, head_dim independent of hidden_size / heads.
MODELS = {
    "llama-biases": lambda: _llama(
        vocab_size=331, hidden_size=72, intermediate_size=100, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=80, attention_bias=True,
        mlp_bias=True, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE, eos_token_id=7,
    ),
    "llama-tied-yarn": lambda: _llama(
        vocab_size=257, hidden_size=42, intermediate_size=88, num_hidden_layers=3,
        num_attention_heads=3, num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
        rope_parameters=YARN_ROPE, eos_token_id=[3, 9],
    ),
    "llama-linear-96": lambda: _llama(
        vocab_size=301, hidden_size=56, intermediate_size=72, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=1, head_dim=96, tie_word_embeddings=False,
        rope_parameters=LINEAR_ROPE, eos_token_id=5,
    ),
    "qwen3-biases": lambda: _qwen3(
        vocab_size=307, hidden_size=80, intermediate_size=120, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, attention_bias=True,
        tie_word_embeddings=False, eos_token_id=11,
    ),
    "qwen3-tied-128": lambda: _qwen3(
        vocab_size=263, hidden_size=48, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=5, num_key_value_heads=1, head_dim=128, tie_word_embeddings=True,
        eos_token_id=2,
    ),
}  # fmt: skip


EXPERT_MODELS = {
    "moe-some-layers": lambda: _qwen3_moe(
        vocab_size=283, hidden_size=72, intermediate_size=100, moe_intermediate_size=40,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=5, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1],
        tie_word_embeddings=False, eos_token_id=7,
    ),
    "moe-every-layer": lambda: _qwen3_moe(
        vocab_size=269, hidden_size=48, intermediate_size=36, moe_intermediate_size=33,
        num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=80,
        num_experts=5, num_experts_per_tok=3, norm_topk_prob=False, tie_word_embeddings=True,
        eos_token_id=2,
    ),
    "moe-every-second-layer": lambda: _qwen3_moe(
        vocab_size=271, hidden_size=40, intermediate_size=52, moe_intermediate_size=24,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        num_experts=9, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=2,
        attention_bias=True, tie_word_embeddings=False, eos_token_id=3,
    ),
    "mixtral": lambda: _mixtral(
        vocab_size=277, hidden_size=72, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_local_experts=6,
        num_experts_per_tok=2, sliding_window=23, tie_word_embeddings=False, eos_token_id=7,
    ),
    # Sizes that tiles divide.
    "moe-even": lambda: _qwen3_moe(
        vocab_size=256, hidden_size=128, intermediate_size=64, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, tie_word_embeddings=False,
        eos_token_id=3,
    ),
}  # fmt: skip


LATENT_MODELS = {
    # Queries have no latent, as in DeepSeek-V2-Lite.
    "latent-lite": lambda: _deepseek_v2(
        vocab_size=277, hidden_size=70, intermediate_size=100, moe_intermediate_size=36,
        num_hidden_layers=3, num_attention_heads=5, kv_lora_rank=48, q_lora_rank=None,
        qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, first_k_dense_replace=1,
        n_routed_experts=5, num_experts_per_tok=3, n_shared_experts=2, topk_method="greedy",
        routed_scaling_factor=1.0, tie_word_embeddings=False, eos_token_id=7,
        rope_parameters=YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "latent-groups": lambda: _deepseek_v2(
        vocab_size=261, hidden_size=57, intermediate_size=60, moe_intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=3, kv_lora_rank=40, q_lora_rank=36,
        qk_nope_head_dim=16, qk_rope_head_dim=10, v_head_dim=28, first_k_dense_replace=0,
        n_routed_experts=9, num_experts_per_tok=3, n_shared_experts=1, n_group=3, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=1.7,
        # Norms of latents do not have it.
        rms_norm_eps=1e-3, tie_word_embeddings=True, eos_token_id=2,
    ),
    "latent-corrected": lambda: _deepseek_v3(
        vocab_size=269, hidden_size=64, intermediate_size=68, moe_intermediate_size=28,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=48,
        q_lora_rank=44, qk_nope_head_dim=20, qk_rope_head_dim=16, v_head_dim=24,
        first_k_dense_replace=1, n_routed_experts=10, num_experts_per_tok=3, n_shared_experts=1,
        n_group=5, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        tie_word_embeddings=False, eos_token_id=3,
        rope_parameters=YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "latent-five-experts": lambda: _deepseek_v3(
        vocab_size=259, hidden_size=48, intermediate_size=52, moe_intermediate_size=20,
        num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=5, kv_lora_rank=32,
        q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=1, n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=1,
        n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.3,
        tie_word_embeddings=False, eos_token_id=3,
    ),
}  # fmt: skip


# RoPE turns half of each head.
GLM_MODELS = {
    # As GLM-4.5: biases, and norms of queries and keys.
    "glm-norms-biases": lambda: _glm4_moe(
        vocab_size=271, hidden_size=72, intermediate_size=100, moe_intermediate_size=36,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        attention_bias=True, use_qk_norm=True, n_routed_experts=10, num_experts_per_tok=3,
        n_shared_experts=1, n_group=5, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5, first_k_dense_replace=1, tie_word_embeddings=False,
        eos_token_id=7,
    ),
    # As GLM-4.5-Air: neither; here with scaled RoPE, and heads of another size.
    "glm-plain-yarn": lambda: _glm4_moe(
        vocab_size=259, hidden_size=48, intermediate_size=52, moe_intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, head_dim=80,
        n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=2, norm_topk_prob=False,
        routed_scaling_factor=1.3, first_k_dense_replace=0, tie_word_embeddings=True,
        eos_token_id=3, rope_parameters=YARN_ROPE | {"partial_rotary_factor": 0.5},
    ),
}  # fmt: skip


DENSE_MODELS = {
    # Caps that change scores and logits by a lot.
    "gemma2": lambda: _gemma2(
        hidden_size=54, intermediate_size=76, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, eos_token_id=[1, 107], sliding_window=19,
        query_pre_attn_scalar=37, attn_logit_softcapping=0.7, final_logit_softcapping=2.5,
    ),
    "gemma2-types": lambda: _gemma2(
        hidden_size=57, intermediate_size=33, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, head_dim=96, eos_token_id=3, sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=False, attention_bias=True, attn_logit_softcapping=None,
    ),
    "smollm3": lambda: _smollm3(
        num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, attention_bias=True,
        mlp_bias=True, tie_word_embeddings=False, eos_token_id=7,
    ),
    "smollm3-marked": lambda: _smollm3(
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        no_rope_layers=[0, 1, 0], tie_word_embeddings=True, eos_token_id=3,
        rope_parameters=YARN_ROPE,
    ),
    "phi3": lambda: _phi3(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, eos_token_id=7,
        sliding_window=23,
    ),
    "phi3-96": lambda: _phi3(
        num_hidden_layers=2, hidden_size=192, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=True, eos_token_id=3,
    ),
    "starcoder2": lambda: _starcoder2(
        hidden_size=132, intermediate_size=75, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, eos_token_id=7, sliding_window=19,
    ),
    "starcoder2-plain": lambda: _starcoder2(
        hidden_size=72, intermediate_size=100, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=3, use_bias=False, hidden_act="gelu",
        tie_word_embeddings=False, norm_epsilon=1e-3,
    ),
    "gpt2": lambda: _gpt2(n_embd=66, n_layer=3, n_head=3, n_positions=170, eos_token_id=7),
    "gpt2-plain": lambda: _gpt2(
        n_embd=64, n_layer=2, n_head=2, n_positions=300, n_inner=75, eos_token_id=3,
        activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
    ),
    "gpt-neox": lambda: _gpt_neox(
        hidden_size=96, intermediate_size=75, num_hidden_layers=3, num_attention_heads=3,
        eos_token_id=7,
    ),
    "gpt-neox-serial": lambda: _gpt_neox(
        hidden_size=72, intermediate_size=100, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=3, use_parallel_residual=False, attention_bias=False, rotary_pct=0.5,
        hidden_act="gelu_fast", tie_word_embeddings=True, layer_norm_eps=1e-3,
    ),
    "cohere2": lambda: _cohere2(
        hidden_size=88, intermediate_size=75, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=7, sliding_window=19, logit_scale=0.3,
    ),
    "cohere2-types": lambda: _cohere2(
        hidden_size=72, intermediate_size=100, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=3, layer_types=["full_attention", "sliding_attention"], attention_bias=True,
        tie_word_embeddings=False, layer_norm_eps=1e-3, sliding_window=5,
    ),
    "olmo2": lambda: _olmo(
        2, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, eos_token_id=7,
        attention_bias=True, tie_word_embeddings=True,
    ),
    "olmo3": lambda: _olmo(
        3, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=2, eos_token_id=3,
        sliding_window=23,
        rope_parameters={
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # Seeds follow the order.
    "phi": lambda: _phi(
        hidden_size=96, intermediate_size=75, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=7, partial_rotary_factor=0.5,
    ),
    # A part of a head as Phi-2 has it.
    "phi-tied": lambda: _phi(
        hidden_size=80, intermediate_size=100, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=3, partial_rotary_factor=0.4, hidden_act="gelu", tie_word_embeddings=True,
        layer_norm_eps=1e-3,
    ),
    "gpt-bigcode": lambda: _gpt_bigcode(
        n_embd=66, n_layer=3, n_head=3, n_positions=170, n_inner=75, eos_token_id=7,
    ),
    "gptj": lambda: _gptj(
        n_embd=96, n_layer=3, n_head=3, n_inner=75, eos_token_id=7, rotary_dim=10,
    ),
}  # fmt: skip


# Tests get the same reply of a prompt from engines of other sizes.
@functools.lru_cache(maxsize=64)
@torch.no_grad()
def _logits(model: PreTrainedModel, token_ids: tuple[int, ...]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


@functools.cache
@torch.no_grad()
def _assert_greedy(
    model: PreTrainedModel, prompt: tuple[int, ...], token_ids: tuple[int, ...]
) -> None:
    known, sequence = len(prompt), torch.tensor([[*prompt, *token_ids]])
    logits = in_float64(model)(sequence).logits[0, known - 1 : -1]
    assert_best(token_ids, logits, room_of(model, logits), f"{known=}")


@dataclass(frozen=True)
class Oracle:
    """A checkpoint directory and transformers' float32 reading of it on the CPU."""

    path: Path

    @cached_property
    def model(self) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        if any(hasattr(model.config, name) for name in ("num_experts_per_tok", "top_k_experts")):
            model.set_experts_implementation("eager")
        if getattr(model.config, "attn_logit_softcapping", None):
            # transformers before 5.18 leaves these scores uncapped by default.
            model.set_attn_implementation("eager")
        return model

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Float32 `[tokens, V]` for the whole sequence in one pass."""
        return _logits(self.model, tuple(token_ids))

    def prompts(self, lengths: tuple[int, ...]) -> list[list[int]]:
        """A random prompt of each length."""
        vocab = self.model.config.vocab_size
        generator = random.Random(len(lengths))
        return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]

    def assert_greedy(self, result: Result) -> None:
        """Each token is the best in float64; one may be what rounding takes for the best."""
        _assert_greedy(self.model, result.prompt_token_ids, result.token_ids)

    def assert_logits(
        self,
        result: Result,
        seen: Mapping[tuple[int, int], torch.Tensor],
        tolerance: float = TOLERANCE,
        flips: float = 0.0,
    ) -> None:
        """What `run_eagerly` saw while this request ran alone: at least a row for each token.

        flips  the share of positions that may be further off, as rounding may choose other experts
        """
        expected = self.logits([*result.prompt_token_ids, *result.token_ids])
        assert len(seen) >= len(result.token_ids)
        errors = {
            position: ((logits - expected[position]).abs().max() / expected[position].abs().max())
            for (_, position), logits in seen.items()
        }
        far = {position: error for position, error in errors.items() if not error <= tolerance}
        assert len(far) <= flips * len(seen), f"after {len(result.prompt_token_ids)} tokens: {far}"

    def __hash__(self) -> int:
        return hash(self.path)


def write_checkpoint(name: str, path: Path) -> Oracle:
    """A checkpoint of the model of this name."""
    return write_random_model(
        (MODELS | EXPERT_MODELS | LATENT_MODELS | GLM_MODELS)[name], path, len(name)
    )


def write_random_model(make: Callable[[], PreTrainedModel], path: Path, seed: int) -> Oracle:
    """A checkpoint of a model whose random weights make its logits spread."""
    torch.manual_seed(seed)
    model = make().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in parameter_name or "bias" in parameter_name else 0.15
            parameter.add_(torch.randn_like(parameter) * scale)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(path, max_shard_size="60KB")
    return Oracle(path)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    folder = tmp_path_factory.mktemp("checkpoints")
    written = {name: write_checkpoint(name, folder / name) for name in MODELS}
    return written | {"demo": Oracle(checkpoint_path())}


@pytest.fixture(scope="session")
def expert_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    folder = tmp_path_factory.mktemp("experts")
    return {name: write_checkpoint(name, folder / name) for name in EXPERT_MODELS}


@pytest.fixture(scope="session")
def write_model() -> Callable[..., Oracle]:
    """`write_random_model`."""
    return write_random_model


@pytest.fixture(scope="session")
def latent_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    folder = tmp_path_factory.mktemp("latents")
    return {name: write_checkpoint(name, folder / name) for name in LATENT_MODELS}


@pytest.fixture(scope="session")
def glm_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    folder = tmp_path_factory.mktemp("glm")
    return {name: write_checkpoint(name, folder / name) for name in GLM_MODELS}


@pytest.fixture(scope="session")
def dense_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    folder = tmp_path_factory.mktemp("dense")
    return {
        name: write_random_model(make, folder / name, seed)
        for seed, (name, make) in enumerate(DENSE_MODELS.items())
    }


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    folder = tmp_path_factory.mktemp("hybrids")
    return {
        name: write_random_model(make, folder / name, seed)
        for seed, (name, make) in enumerate(HYBRIDS.items())
    }


@pytest.fixture(scope="session")
def random_oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    folder = tmp_path_factory.mktemp("random")
    return {
        name: write_random_model(make, folder / name, seed)
        for seed, (name, make) in enumerate(RANDOM_MODELS.items())
    }


@pytest.fixture(params=list(MODELS))
def oracle(request: pytest.FixtureRequest, checkpoints: dict[str, Oracle]) -> Oracle:
    return checkpoints[request.param]


@pytest.fixture(scope="session")
def demo_oracle() -> Oracle:
    return Oracle(checkpoint_path())


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """`edited(source, config={"hidden_act": "gelu"})`: a checkpoint like `source` but for that.

    Its JSON files are copies that may be given other values; all other files are links.
    """

    def edit(source: Path, **changes: dict[str, Any]) -> Path:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        for file in source.iterdir():
            (folder / file.name).symlink_to(file)
        for stem, values in changes.items():
            file = folder / f"{stem}.json"
            content = json.loads(file.read_text()) | values
            file.unlink()
            file.write_text(json.dumps(content))
        return folder

    return edit


@pytest.fixture
def chat_checkpoint(edited: Callable[..., Path]) -> Path:
    """A few of the demo's layers with another chat template, which names the roles."""
    return edited(few_layers(), tokenizer_config={"chat_template": CHAT_TEMPLATE})


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, Engine]]:
    """`open_engine` for each device, opened when it is first asked for."""
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine(device: str, shared: dict[str, Engine]) -> Iterator[Engine]:
    """The shared engine, idle; what a failed test leaves behind is cancelled."""
    if device not in shared:
        shared[device] = open_engine(device=device)
    engine = shared[device]
    yield engine
    try:
        for request in [*engine.scheduler.active, *engine.scheduler.waiting]:
            request.cancel()
        for _ in range(500):
            if engine.busy:
                engine.step()
        assert not engine.busy, f"busy after 500 steps: {engine.scheduler.active}"
    except Exception:
        shared.pop(device).close()
        raise


class EagerGraph:
    """Stands in for a captured graph: runs the step eagerly and keeps the logits of live lanes.

    `seen[(slot, position)]` is the last float32 `[V]` row computed for the token at `position`.
    """

    def __init__(self, engine: Engine, key: GraphKey, seen: dict[tuple[int, int], torch.Tensor]):
        self.engine, self.key, self.seen = engine, key, seen

    def replay(self) -> None:
        with self.engine.runtime.on_stream():
            self._run()

    def _run(self) -> None:
        program, buffers = self.engine.runtime.program, self.engine.runtime.buffers
        size = self.key.size
        if self.key.kind == "decode":
            slots = buffers["slot_of_row"][:size].tolist()
            # The fast sampler keeps logits to itself; the full one takes the same tokens.
            outputs = program.decode(size, "full")
        else:
            slots = buffers["prefill_slot"].tolist()
            assert self.key.variant != "note"
            outputs = program.prefill(size, self.key.variant)
        assert outputs.logits is not None
        for row, slot in enumerate(slots):
            if slot >= 0 and int(outputs.flags[row]):
                position = int(program.state.kv_len[slot]) - 1
                self.seen[slot, position] = outputs.logits[row].float().cpu().clone()


def run_eagerly(engine: Engine) -> dict[tuple[int, int], torch.Tensor]:
    """Replace the engine's graphs by their eager steps; returns the logits they will see."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for key in engine.runtime.graphs:
        engine.runtime.graphs[key] = EagerGraph(engine, key, seen)
    return seen


@pytest.fixture
def eager() -> Callable[[Engine], dict[tuple[int, int], torch.Tensor]]:
    return run_eagerly
