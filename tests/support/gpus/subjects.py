"""Engines that launch, among them, all kernels of one GPU: published widths, with few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphengine import Engine
from graphengine.options.drafts.jump_forward import JumpForward
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import DEMO, SHAPES, Subject
from graphengine.speculative import MTP, NGram, Suffix

SIZES: Mapping[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "max_seq_len": 512,
    "prefill_buckets": (64,),
    "swap_blocks": 0,
}
ONE_ROW: Mapping[str, Any] = {"max_batch": 1, "row_family": "fma"}
ROWS: Mapping[str, Any] = {"max_batch": 16, "buckets": (1, 16)}
# Layers of every kind, and as many tokens and experts as plans need.
FEW = {"num_hidden_layers": 1, "vocab_size": 16_384}
EXPERTS = {"num_experts": 8, "num_hidden_layers": 1, "vocab_size": 16_384}
DELTA = {"full_attention_interval": 2, "num_hidden_layers": 2, "vocab_size": 16_384}
LATENT = {"n_routed_experts": 8, "num_hidden_layers": 2, "vocab_size": 16_384}
GEMMA = {"sliding_window_pattern": 2, "num_hidden_layers": 2, "vocab_size": 16_384}
GPT_OSS = {"num_local_experts": 4, "num_hidden_layers": 2, "vocab_size": 16_384}
GRANITE = {
    "layer_types": ["mamba", "attention"],
    "num_hidden_layers": 2,
    "vocab_size": 16_384,
}

SUBJECTS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "llama-8b, one row": ("llama-8b", FEW, ONE_ROW),
    "llama-8b": ("llama-8b", FEW, ROWS),
    "llama-8b, fp8 weights": ("llama-8b", FEW, {**ROWS, "quantize": "fp8"}),
    "llama-8b in fp8": (
        "llama-8b",
        FEW,
        {**ROWS, "quantize": "fp8", "activations": "fp8", "kv_dtype": "fp8"},
    ),
    "llama-8b in int4": ("llama-8b", FEW, {**ROWS, "quantize": "int4", "quantize_lm_head": True}),
    "llama-1b, drafts": ("llama-1b", FEW, {**ROWS, "speculative": MTP(k=3)}),
    "gemma-3-4b": ("gemma-3-4b", GEMMA, ROWS),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", EXPERTS, ROWS),
    "qwen3-30b-a3b in fp8": ("qwen3-30b-a3b", EXPERTS, {**ROWS, "quantize": "fp8"}),
    "deepseek-v2-lite": ("deepseek-v2-lite", LATENT, ROWS),
    "gpt-oss-20b": ("gpt-oss-20b", GPT_OSS, ROWS),
    "granite-4-h-1b": ("granite-4-h-1b", GRANITE, ROWS),
    "qwen3.5-4b": ("qwen3.5-4b", DELTA, ROWS),
    "demo, a tree": (DEMO, {}, {**ROWS, "speculative": MTP(tree=[[0], [1], [0, 0]])}),
    "demo, n-grams": (DEMO, {}, {**ROWS, "speculative": NGram(k=3)}),
    "demo, forced text": (
        DEMO,
        {},
        {**ROWS, "speculative": JumpForward(k=3), "grammar_pool_mib": 1},
    ),
    "demo, suffixes": (DEMO, {}, {**ROWS, "speculative": Suffix(k=3)}),
}
"""By a name: the shape, what its config has instead, and the engine's options."""


def open_subject(name: str) -> Engine:
    """On the CPU, with random weights; the demo model has its own."""
    shape, instead, options = SUBJECTS[name]
    subject = Subject.of_shape(shape)
    if instead:
        subject = Subject.of_config({**SHAPES[shape], **instead}, name=shape)
    engine, _ = build_engine(subject, {**SIZES, **options})
    return engine
