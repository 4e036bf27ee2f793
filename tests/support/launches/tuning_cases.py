"""A small model, plans and keys, for the tests of tables of plans and of the search."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch
from hypothesis import strategies as st

from checkpoints.small_decoders import small_decoder
from graphengine.kernels.linear.plans import LinearKind, LinearPlan, RowFamily
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.decoder import DecoderConfig
from graphengine.models.plans.tuning_tables import TuningKey

FAMILIES: tuple[RowFamily, ...] = get_args(RowFamily)
KINDS: tuple[LinearKind, ...] = get_args(LinearKind)
BF16 = torch.bfloat16

ATTENTION = GroupedQueryAttention(
    hidden_size=72, num_heads=6, num_kv_heads=2, head_dim=80, norm_eps=1e-5
)


def small_model(
    layers: int = 2, *, hidden_size: int = 72, ffn_size: int = 100, biases: bool = False
) -> DecoderConfig:
    """A small Llama."""
    attention = replace(ATTENTION, hidden_size=hidden_size, qkv_bias=biases, output_bias=biases)
    mlp = Swiglu(hidden_size=hidden_size, ffn_size=ffn_size, norm_eps=1e-5, bias=biases)
    return small_decoder(attention, (mlp,) * layers, vocab_size=331, max_positions=512)


MODEL = small_model()

FORMATS = [
    *(WeightFormat("e4m3", 0, 0), WeightFormat("e4m3", 1, 0), WeightFormat("e4m3", 128, 128)),
    *(WeightFormat("int8", 1, 0), WeightFormat("int8", 1, 32, True), WeightFormat("int4", 1, 128)),
    *(WeightFormat("int4", 1, 64, True), WeightFormat("e2m1", 1, 32), WeightFormat("e2m1", 1, 16)),
]

FMA = LinearPlan("fma", block_m=4, block_k=128, warps=2)
DOT = LinearPlan("dot", block_m=32, block_k=32, splits=2, stages=3, warps=8)


DENSE = ("down", "gate_up", "qkv", "output", "lm_head")
"""The linears of a model without experts, in the order of the search."""


def keys() -> st.SearchStrategy[TuningKey]:
    """Keys of linears of all kinds, and of experts."""
    return _keys(st.sampled_from(KINDS), st.just(False)) | _keys(
        st.sampled_from(("swiglu", "residual")), st.just(True)
    )


def _keys(
    kinds: st.SearchStrategy[LinearKind], expert: st.SearchStrategy[bool]
) -> st.SearchStrategy[TuningKey]:
    return st.builds(
        TuningKey,
        st.sampled_from(FAMILIES),
        kinds,
        st.integers(1, 70_000).map(lambda half: 2 * half),
        st.integers(1, 16_384),
        st.sampled_from([torch.float32, torch.float16, BF16]),
        st.none() | st.sampled_from(FORMATS),
        expert,
    )


def key_of(linear: str, family: RowFamily = "fma") -> TuningKey:
    return TuningKey.of(MODEL.linears[linear], family, BF16)
