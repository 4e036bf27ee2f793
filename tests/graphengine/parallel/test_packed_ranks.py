"""Engines of several ranks with packed weights: against one rank, which others compare with
transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor

pytest.importorskip("compressed_tensors")
from events import GENEROUS_S

from checkpoints.few_layers import HEAD_LAYERS, eagle3_head, few_layers
from checkpoints.quantised_models import HEAD, KINDS, write_model
from graphengine import Engine, SamplingParams
from graphengine.core.runtime import Runtime
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.speculative import Eagle3

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPTS = [[5, 3, 80], [*range(1, 72, 3)]]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def with_the_head(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Nothing is excepted, lm_head neither."""
    config["quantization_config"]["ignore"] = []


# Of 128 x 128 blocks a rank has half of those of the keys: each row of qkv gets its own scale.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "fp8 blocks": {"num_key_value_heads": 2},
    "packed int4 of 64 zeros": {"num_key_value_heads": 1, "plain": (), "edit": with_the_head},
}


# Experts are packed, and so are latents; what heads have of them is dequantised, and then cut.
LATENTS: dict[str, Any] = {
    "family": "deepseek-v3", "num_key_value_heads": 4, "head_dim": 16, "first_k_dense_replace": 1,
    "moe_intermediate_size": 256, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 96, "kv_lora_rank": 136, "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16, "v_head_dim": 64,
}  # fmt: skip


def open_engine(path: Path, ranks: int, **options: Any) -> Engine:
    sizes = {"max_batch": 2, "max_seq_len": 128, "block_size": 8, "prefill_buckets": (4, 32)}
    options = {"device": "cpu", "dtype": "float32", "wait_limit_s": GENEROUS_S} | sizes | options
    return Engine.from_pretrained(path, tensor_parallel=ranks, **options)


def assert_equal_ranks(runtime: Runtime) -> None:
    assert isinstance(runtime, DriverRuntime) and len(set(runtime.digests())) == 1


def packed_bytes(engine: Engine) -> int:
    kinds = engine.model.weights.bytes_by_kind(engine.memory.dtype)
    return sum(size for kind, size in kinds.items() if kind != "float32")


def assert_as_one(
    path: Path,
    prompts: list[Any],
    max_tokens: int,
    *,
    expert_parallel: bool = False,
    **options: Any,
) -> None:
    """Two ranks say what one says, with about half of its codes each."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with open_engine(path, 1, **options) as alone:
        expected = [each.token_ids for each in alone.generate(prompts, greedy)]
        accepted, size = alone.acceptance.accepted, packed_bytes(alone)
        with alone.session() as session:
            session.append(prompts[1])
            session.generate(replace(greedy, max_tokens=4))
            kept = session.snapshot()
    assert len(set(expected[1])) > 4
    with open_engine(path, 2, expert_parallel=expert_parallel, **options) as engine:
        found = [each.token_ids for each in engine.generate(prompts, greedy)]
        assert found == expected
        assert engine.acceptance.accepted == accepted
        assert_equal_ranks(engine.runtime)
        # The weights are found to be the same, whoever has them.
        with engine.restore_session(kept) as restored:
            whole_blocks = kept.blocks * engine.memory.block_size
            # A recurrent model goes on from the state that was kept.
            expected_tokens = len(restored) - 1 if engine.memory.recurrent else whole_blocks
            assert restored.cached_tokens == expected_tokens
        assert packed_bytes(engine) < 0.7 * size or not size


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_as_people_have_them(tmp_path: Path, name: str) -> None:
    assert_as_one(write_model(tmp_path, KINDS[name], **SIZES | CHECKPOINTS[name]).path, PROMPTS, 16)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_latents_and_experts_in_codes(tmp_path: Path, expert_parallel: bool) -> None:
    path = write_model(tmp_path, KINDS["fp8 blocks"], **SIZES | LATENTS).path
    assert_as_one(path, PROMPTS, 16, expert_parallel=expert_parallel)


@pytest.mark.skipif(not hasattr(transformers, "Qwen3_5ForCausalLM"), reason="an older transformers")
def test_products_of_a_gated_delta_net_in_several_formats(tmp_path: Path) -> None:
    def leave_out(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["quantization_config"]["modules_to_not_convert"] = ["in_proj_a", "in_proj_b"]

    plain = (HEAD, "in_proj_a", "in_proj_b")
    options = {"family": "qwen3.5", "plain": plain, "edit": leave_out}
    options |= {"linear_value_head_dim": 64, "head_dim": 256}
    path = write_model(tmp_path, KINDS["fp8 blocks"], **SIZES | options).path
    assert_as_one(path, PROMPTS, 16)


def test_an_eagle3_head_is_split() -> None:
    prompts = ["def fib(n):", "class Tree:\n"]
    assert_as_one(
        few_layers(), prompts, 16, speculative=Eagle3(eagle3_head(), k=2, layers=HEAD_LAYERS)
    )


def test_what_does_not_divide_is_told_before_a_process_starts(tmp_path: Path) -> None:
    odd = write_model(tmp_path / "odd", KINDS["awq of 128"], intermediate_size=384)
    message = (
        r"tensor_parallel=2: model\.layers\.0\.self_attn\.o_proj: columns 0 to 64 of 128 part some "
        r"of the 128 that share a scale or a byte in int4-1x128-zeros"
    )
    with pytest.raises(ValueError, match=message):
        open_engine(odd.path, 2)
    ordered = write_model(tmp_path / "ordered", KINDS["gptq desc_act"], **SIZES)
    message = r"o_proj: 128 of 256 columns, which are in the order of their groups \(g_idx\)"
    with pytest.raises(ValueError, match=message):
        open_engine(ordered.path, 2)
