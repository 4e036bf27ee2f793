"""The shapes to measure, and random weights for them.

A shape is a Hugging Face `config.json`: graphengine reads it as it would a checkpoint's, and peers
build their own model from the same one. Weights are drawn by name, so that a tensor of one name,
shape, dtype and device always gets the same values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphengine.demo import checkpoint_path
from graphengine.drafters.eagle3.layer import Eagle3Config
from graphengine.drafters.eagle3.reading import Eagle3Checkpoint
from graphengine.drafters.mtp.layer import LAYOUTS, MtpConfig
from graphengine.kernels.linear.kinds import CODES, KINDS
from graphengine.kernels.linear.packed import POWER_FACTOR, PackedWeight, packed_form
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.random_values import (
    SEED,
    WEIGHT_SCALE,
    generator_of,
    random_values,
)
from graphengine.models.checkpoints.stored import read_model
from graphengine.models.contract import ModelConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.linears import WeightForms
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.states import Paged, recurrent_states
from graphengine.models.weights import StoredLinear

DEMO = "demo"
HEAD_TOKENS = 32000
"""Size of the draft vocabulary that most EAGLE3 heads are published with."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is measured: a shape with random weights, or a checkpoint where `checkpoint` is set.

    drawn  whether its weights are random like a shape's, in spite of `checkpoint`
    """

    name: str
    hf_config: Mapping[str, Any]
    model: ModelConfig
    checkpoint: Path | None = None
    drawn: bool = False

    @classmethod
    def of_shape(cls, name: str) -> Subject:
        """A shape of `NAMES`; ValueError lists them."""
        if name == DEMO:
            return cls.of_checkpoint(checkpoint_path(), name=DEMO)
        if name not in SHAPES:
            raise ValueError(f"unknown shape {name!r}; known: {', '.join(NAMES)}")
        return cls.of_config(SHAPES[name], name=name)

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, name: str) -> Subject:
        """A shape with the values of a `config.json`; ValueError as for a checkpoint's."""
        return cls(name=name, hf_config=config, model=_as_told(read_model_config(config), config))

    @classmethod
    def of_checkpoint(cls, path: str | Path, *, name: str | None = None) -> Subject:
        """A directory in Hugging Face layout or a hub id; `name` is its name in reports."""
        checkpoint = Checkpoint.open(path)
        return cls(
            name=name or checkpoint.path.name,
            hf_config=dict(checkpoint.config),
            model=read_model(checkpoint),
            checkpoint=checkpoint.path,
        )


def random_module(model: ModelConfig) -> MtpConfig:
    """One draft module for a model of random weights, as Qwen3 has it: `mtp.*`."""
    layout = next(layout for layout in LAYOUTS if layout.name == "qwen3")
    return MtpConfig.of_target(model, layout, (layout.module_prefix(model.num_layers, 0),))


def random_head(model: ModelConfig, vocab_size: int | None = None) -> Eagle3Checkpoint:
    """An EAGLE3 head for a model of random weights, which drafts from `vocab_size` random tokens;
    None: from `HEAD_TOKENS`, or from all if there are fewer.
    """
    drafted = min(HEAD_TOKENS, model.vocab_size) if vocab_size is None else vocab_size
    ids = None if drafted == model.vocab_size else random_tokens(model.vocab_size, drafted)
    return Eagle3Checkpoint(Eagle3Config.of_target(model, drafted), ids, None)


def random_tokens(vocab_size: int, size: int, seed: int = SEED) -> Tensor:
    """A draft vocabulary of `size` random tokens: int64, ascending, on the CPU."""
    if not 1 <= size <= vocab_size:
        raise ValueError(f"a draft vocabulary of {size} tokens of {vocab_size}")
    drawn = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return drawn[:size].sort().values


def _as_told(model: ModelConfig, config: Mapping[str, Any]) -> ModelConfig:
    """The model with weights in its config's format."""
    quantisation = read_quantisation(config)
    if quantisation is None:
        return model
    linears = model.allocate(device="meta", dtype=torch.float32).linears()
    firsts = dict.fromkeys(linear.parts[0][0] for linear in linears)
    schemes = {name: quantisation.scheme(name) for name in firsts}
    forms = {}
    for name, scheme in schemes.items():
        if scheme is not None:
            kind = KINDS[scheme.kind]
            forms[name] = packed_form(scheme.format, kind.scales[0], whole=kind.whole)
    return model.stored_as(WeightForms(forms))


def model_shape(name: str) -> ModelConfig:
    """The model of a shape of `NAMES`; ValueError lists them."""
    return Subject.of_shape(name).model


@torch.no_grad()
def fill_random(
    tensors: Mapping[str, Tensor], linears: Sequence[StoredLinear] = (), seed: int = SEED
) -> None:
    """Draw every tensor in place, on its device: matrices and biases around 0, norms around 1.

    Each has a generator of its own, seeded by its name; the tensors may be strided views. Packed
    weights among the `linears` get random codes of numbers as large as a matrix's.
    """
    for linear in linears:
        if isinstance(linear.weight, PackedWeight):
            name = linear.parts[0][0]
            if linear.stack is not None:
                name = f"{name}.{linear.stack.expert}"
            generator = generator_of(name, linear.weight.codes.device, seed)
            _fill_packed(linear.weight, generator)
    for name, tensor in tensors.items():
        # Drawn in one piece: an element's value must not depend on its stride.
        tensor.copy_(random_values(name, tensor.shape, tensor.dtype, tensor.device, seed))


def _fill_packed(weight: PackedWeight, generator: torch.Generator) -> None:
    """Draw random codes; all groups have one scale."""
    codes, code = weight.codes.view(torch.uint8), CODES[weight.format.code]
    codes.random_(0, 256, generator=generator)
    codes &= code.drawn
    scale = WEIGHT_SCALE / code.size
    if weight.row_scales is not None:
        weight.row_scales.fill_(scale if weight.scales is None else 1.0)
    if weight.scales is not None and weight.scales.dtype == torch.uint8:
        # Exponents, of which the whole weight's factor is a part.
        assert weight.row_scales is not None
        weight.row_scales.fill_(POWER_FACTOR)
        weight.scales.fill_(127 + round(math.log2(scale)))
    elif weight.scales is not None:
        weight.scales.copy_(torch.full_like(weight.scales, scale, dtype=torch.float32))
    if weight.zeros is not None:
        weight.zeros.random_(*code.drawn_zeros, generator=generator)
    if weight.order is not None:
        weight.order.copy_(
            torch.randperm(len(weight.order), generator=generator, device=codes.device)
        )


def weight_bytes(model: ModelConfig, dtype: torch.dtype, *, experts: float | None = None) -> int:
    """Bytes of the weights that a decode step must read; `dtype` is the model's.

    An embedding counts only if it is lm_head, too; else a step reads just a few of its rows.

    experts  experts that a layer reads on average; None: all of them
    """
    weights = model.allocate(device="meta", dtype=dtype)
    embedding = 0 if weights.lm_head is weights.embedding else weights.embedding.nbytes
    read = float(weights.nbytes - embedding)
    if weights.routed is not None and experts is not None:
        read -= weights.routed.nbytes * (1 - experts / weights.routed.experts)
    return round(read)


def kv_bytes(model: ModelConfig, *, rows: int, tokens: float, itemsize: int) -> int:
    """Bytes of the KV that a step reads in all layers, for rows of `tokens` tokens together.

    A layer with a window reads no more than its window of each row; all rows have the same length.
    """
    return round(
        sum(
            (min(tokens, rows * state.window) if state.window else tokens)
            * math.prod(state.block_shape(1))
            for state in _paged(model)
        )
        * itemsize
    )


def layer_windows(model: ModelConfig) -> list[int]:
    """The window of each layer that keeps KV; 0: it has none."""
    return [state.window for state in _paged(model)]


def attention_layers(model: ModelConfig) -> int:
    """Layers that keep KV."""
    return len(_paged(model))


def _paged(model: ModelConfig) -> list[Paged]:
    return [state for layer in model.states for state in layer if isinstance(state, Paged)]


def state_bytes(model: ModelConfig, *, rows: int, dtype: torch.dtype) -> int:
    """Bytes of the recurrent states that a step reads in all layers; `dtype` is the model's."""
    return rows * sum(
        state.depth * math.prod(state.shape) * (state.dtype or dtype).itemsize
        for state in recurrent_states(model.states).values()
    )


def step_bytes(
    model: ModelConfig,
    *,
    context: float,
    rows: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    experts: float | None = None,
) -> int:
    """Bytes that a decode step must read: all weights once, each row's recurrent states and its KV,
    within its window where a layer has one.

    `context` is the mean number of tokens that a row attends to. `kv_dtype` is that of the KV
    cache; None: `dtype`, the model's. See `weight_bytes` for `experts`.
    """
    itemsize = (kv_dtype or dtype).itemsize
    kv = kv_bytes(model, rows=rows, tokens=rows * context, itemsize=itemsize)
    states = state_bytes(model, rows=rows, dtype=dtype)
    return weight_bytes(model, dtype, experts=experts) + kv + states
