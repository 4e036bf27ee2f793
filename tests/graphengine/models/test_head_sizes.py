"""Heads of every even size against transformers, as test models and small ones have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engines.family_checks import assert_replies, assert_rewinds, assert_same_in_any_company
from graphengine import Engine, SamplingParams
from graphengine.kernels.core.paged import FP8_KV

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TIED = {"tie_word_embeddings": True}
WINDOW = {"sliding_window": 23}
HEADS: dict[int, tuple[str, dict[str, Any]]] = {
    2: ("Qwen2", {"hidden_size": 8, "intermediate_size": 32}),
    4: ("Llama", TIED | {"attention_bias": True, "num_key_value_heads": 4}),
    8: ("Qwen3", TIED),
    12: ("Mistral", WINDOW | {"num_key_value_heads": 1}),
    20: ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    40: ("Qwen3", {"num_attention_heads": 6}),
    48: ("Llama", {"hidden_size": 288, "num_attention_heads": 6, "num_key_value_heads": 6}),
    56: ("Mistral", TIED | WINDOW),
    100: ("Llama", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    112: ("Qwen3", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    120: ("Mistral", {"sliding_window": None}),
    160: ("Qwen3", {"num_attention_heads": 5, "num_key_value_heads": 1}),
    254: ("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
}
"""Sizes that no kernel is tuned for, each with a family and what its config has instead."""


def write(head_dim: int, write_model: Callable[..., Any], folder: Path) -> Any:
    family, changes = HEADS[head_dim]
    sizes = SIZES | {"head_dim": head_dim} | changes
    if family == "Qwen2":
        # Its heads have hidden_size over num_attention_heads.
        del sizes["head_dim"]
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")
    return write_model(lambda: model(config), folder, head_dim)


def open_engine(oracle: Any, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(oracle.path, **options)


@pytest.mark.parametrize("head_dim", HEADS)
def test_logits_and_greedy_tokens(
    write_model: Callable[..., Any],
    tmp_path: Path,
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    head_dim: int,
) -> None:
    oracle = write(head_dim, write_model, tmp_path)
    with open_engine(oracle, device=device, prefill_buckets=(16, 64), lookahead=0) as engine:
        assert engine.cache.shape[-1] == head_dim, "no padding is stored"
        assert_replies(engine, oracle, eager, (1, 17, 90))


@pytest.mark.parametrize("head_dim", [8, 12])
def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    write_model: Callable[..., Any], tmp_path: Path, device: str, head_dim: int
) -> None:
    oracle = write(head_dim, write_model, tmp_path)
    assert_same_in_any_company(partial(open_engine, oracle, device=device), oracle)


@pytest.mark.parametrize("head_dim", [4, 100])
def test_sessions(
    write_model: Callable[..., Any], tmp_path: Path, device: str, head_dim: int
) -> None:
    oracle = write(head_dim, write_model, tmp_path / "model")
    with open_engine(oracle, device=device, prefix_caching=True) as engine:
        assert_rewinds(engine, oracle, tmp_path / "session.safetensors")


@pytest.mark.parametrize("head_dim", [2, 20])
def test_a_cache_in_fp8(
    write_model: Callable[..., Any], tmp_path: Path, device: str, head_dim: int
) -> None:
    """Whatever nobody wrote is in its blocks, replies are the same."""
    oracle = write(head_dim, write_model, tmp_path)
    prompt, greedy = oracle.prompts((40,))[0], SamplingParams(max_tokens=24, temperature=0)
    with open_engine(oracle, device=device, kv_dtype="fp8", kv_calibration=prompt) as engine:
        expected = engine.generate(prompt, greedy).token_ids
        for cache, _ in engine.runtime.caches:
            assert cache.dtype == FP8_KV
            cache.view(torch.uint8).fill_(0x7F)
        assert engine.generate(prompt, greedy).token_ids == expected
