"""Ranks of a model whose layers have heads of several sizes, inputs, and experts: Gemma 4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from graphengine import Engine, SamplingParams

pytest.importorskip("transformers.models.gemma4", reason="transformers has no Gemma 4")
pytestmark = pytest.mark.usefixtures("forked_ranks")

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 56, "intermediate_size": 72, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 40, "sliding_window": 9,
    "max_position_embeddings": 512, "eos_token_id": 7, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
# Ranks share the one KV head of layers without a window.
EQUAL = {
    "layer_types": [SLIDING, FULL], "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
INPUTS = {
    "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 263,
}  # fmt: skip
EXPERTS = EQUAL | {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20,
}  # fmt: skip


def new_model(options: dict[str, Any]) -> PreTrainedModel:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = SIZES | options | {"num_hidden_layers": len(options["layer_types"])}
    config = Gemma4TextConfig(**sizes)
    model: PreTrainedModel = Gemma4ForCausalLM._from_config(config, experts_implementation="eager")
    return model


def open_engine(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 2, "max_seq_len": 128, "block_size": 8, "prefill_buckets": (32,)}
    return Engine.from_pretrained(path, device="cpu", dtype="float32", **sizes, **options)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("options", [EQUAL, INPUTS, EXPERTS], ids=["equal", "inputs", "experts"])
def test_two_ranks_say_what_transformers_does(
    write_model: Callable[..., Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    """A session of two ranks is one of a single rank, too."""
    oracle = write_model(lambda: new_model(options), tmp_path / "gemma", 3)
    file, (prompt,) = tmp_path / "session.safetensors", oracle.prompts((45,))
    two = open_engine(oracle.path, tensor_parallel=2, window_rings=False)
    with two, two.session() as session:
        session.append(prompt)
        oracle.assert_greedy(session.generate(greedy(16)))
        session.snapshot(file)
        said = session.generate(greedy(8)).token_ids
    one = open_engine(oracle.path, window_rings=False)
    with one, one.restore_session(file) as session:
        assert session.cached_tokens > 40
        assert session.generate(greedy(8)).token_ids == said


@pytest.mark.parametrize("how", ["expert_parallel", "data_parallel"])
def test_ranks_may_have_whole_experts(
    write_model: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    oracle = write_model(lambda: new_model(EXPERTS), tmp_path / "gemma", 4)
    options: dict[str, Any] = {"tensor_parallel": 2, "expert_parallel": True}
    if how == "data_parallel":
        options = {"data_parallel": 2}
    with open_engine(oracle.path, **options) as engine:
        for result in engine.generate(oracle.prompts((5, 29)), greedy(12)):
            oracle.assert_greedy(result)
