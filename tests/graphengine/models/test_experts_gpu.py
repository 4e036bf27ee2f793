"""Engines with experts on a GPU: alone, in a crowd, drafted, paused and replayed they say the same.

Alone a request's pairs of lane and expert are taken one by one, in a crowd they are grouped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphengine import Engine, SamplingParams
from graphengine.kernels.experts.plans import groups_pairs
from graphengine.profiles.benchmark.eager import check_against_eager
from graphengine.speculative import NGram

pytestmark = pytest.mark.gpu

LENGTHS = (1, 9, 30, 41, 65, 130)
TOKENS = 40


def params(index: int, max_tokens: int = TOKENS) -> SamplingParams:
    """Greedy, or sampled, alternately."""
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": index} if index % 2 else {"temperature": 0}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampled)


def open_engine(oracle: Any, **options: Any) -> Engine:
    given = {"device": "cuda", "dtype": "bfloat16", "max_batch": 8, "max_seq_len": 256}
    given |= {"block_size": 8, "prefill_buckets": (16, 128)}
    return Engine.from_pretrained(oracle.path, **(given | options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["moe-even", "moe-some-layers"])
def test_a_crowd_drafts_and_pauses_change_no_token(
    expert_checkpoints: dict[str, Any], name: str, dtype: str
) -> None:
    oracle = expert_checkpoints[name]
    config = oracle.model.config
    chosen, experts = config.num_experts_per_tok, config.num_experts
    assert not groups_pairs(1, chosen, experts) and groups_pairs(6, chosen, experts)
    prompts = oracle.prompts(LENGTHS)
    prompts[2] = prompts[1] * 4
    jobs = [(prompt, params(index)) for index, prompt in enumerate(prompts)]
    with open_engine(oracle, dtype=dtype) as engine:
        alone = [engine.generate(*job).token_ids for job in jobs]
        crowd = engine.generate(prompts, [param for _, param in jobs])
    assert [result.token_ids for result in crowd] == alone
    pool = {"kv_blocks": 48, "swap_blocks": 200}
    with open_engine(oracle, dtype=dtype, **pool, speculative=NGram(k=3)) as engine:
        drafted = engine.generate(prompts, [param for _, param in jobs])
        assert engine.counters["pauses"] > 0 and engine.counters["resumes"] > 0
    assert [result.token_ids for result in drafted] == alone


@pytest.mark.parametrize("name", ["moe-even", "moe-some-layers"])
def test_records_of_a_crowd_with_drafts_and_pauses_are_those_of_requests_alone(
    expert_checkpoints: dict[str, Any], name: str
) -> None:
    oracle = expert_checkpoints[name]
    prompts = oracle.prompts(LENGTHS)
    prompts[2] = prompts[1] * 4
    jobs = [(prompt, params(index)) for index, prompt in enumerate(prompts)]
    with open_engine(oracle) as engine:
        unrecorded = [engine.generate(*job).token_ids for job in jobs]
    with open_engine(oracle, record_routing=True) as engine:
        alone = [engine.generate(*job) for job in jobs]
        crowd = engine.generate(prompts, [param for _, param in jobs])
    assert [result.token_ids for result in alone] == unrecorded
    pool = {"kv_blocks": 48, "swap_blocks": 200}
    options = {"record_routing": True, "speculative": NGram(k=3)}
    # The same ids are given back, and then others, of which the last tokens have none.
    given = [
        replace(param, routing=each.routing) for (_, param), each in zip(jobs, alone, strict=True)
    ]
    other = [
        replace(param, routing=each.routing[:-9, :, ::-1])
        for (_, param), each in zip(jobs, alone, strict=True)
    ]
    with open_engine(oracle, **pool, **options) as engine:
        drafted = engine.generate(prompts, [param for _, param in jobs])
        assert engine.counters["pauses"] > 0 and engine.counters["resumes"] > 0
        replayed = engine.generate(prompts, given)
        changed = engine.generate(prompts, other)
    for results in (crowd, drafted, replayed):
        assert [result.token_ids for result in results] == unrecorded
        for result, expected in zip(results, alone, strict=True):
            np.testing.assert_array_equal(result.routing, expected.routing)
    for result, param in zip(changed, other, strict=True):
        record = param.routing_record
        assert record is not None and result.routing is not None
        np.testing.assert_array_equal(result.routing[: len(record.ids)], record.ids)


@pytest.mark.parametrize("max_batch", [1, 8])
def test_a_replay_equals_the_eager_step(expert_checkpoints: dict[str, Any], max_batch: int) -> None:
    oracle = expert_checkpoints["moe-even"]
    prompts = oracle.prompts((9, 30, 130))
    with open_engine(oracle, max_batch=max_batch) as engine:
        assert engine.row_family == ("fma" if max_batch == 1 else "dot")
        check_against_eager(engine, prompts, [params(index) for index in range(3)])


def test_a_gpu_says_nearly_what_a_cpu_says(expert_checkpoints: dict[str, Any]) -> None:
    """In chunks of few and of many pairs, whose tiles are others; until two tokens are as good."""
    oracle = expert_checkpoints["moe-even"]
    for prompt in oracle.prompts((5, 120)):
        said = []
        for device, dtype in (("cuda", "float16"), ("cpu", "float32")):
            with open_engine(oracle, device=device, dtype=dtype) as engine:
                said.append(engine.generate(prompt, params(0, 16)).token_ids)
        agreed = [one == other for one, other in zip(*said, strict=True)]
        assert all(agreed[:4]), f"{len(prompt)=}: {said=}"
