"""Engines whose stages are processes, each with some layers: against one process with all of them.

What stages compute is what one process computes, so tokens and log-probabilities are equal to the
bit. Engines are opened as seldom as can be, as their processes take seconds to start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphengine import Engine, Result, SamplingParams
from graphengine.parallel.pipelining import PipelineRuntime

PROMPT_LENGTHS = (1, 3, 17, 70)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=3)


def open_engine(path: Path, stages: int, **options: Any) -> Engine:
    sizes = {"max_batch": 4, "max_seq_len": 160, "block_size": 8, "prefill_buckets": (8, 32)}
    options = {"device": "cpu", "wait_limit_s": 60.0, "prompt_logprobs": True} | sizes | options
    return Engine.from_pretrained(path, pipeline_parallel=stages, **options)


def runtime_of(engine: Engine) -> PipelineRuntime:
    assert isinstance(engine.runtime, PipelineRuntime)
    return engine.runtime


def assert_equal_stages(engine: Engine) -> None:
    """What a step feeds is the same on all stages, to the bit."""
    found = runtime_of(engine).digests()
    assert len(found) == engine.config.pipeline_parallel and len(set(found)) == 1


def said(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.logprobs, result.prompt_logprobs


def replies(engine: Engine, prompts: list[list[int]]) -> list[tuple[Any, ...]]:
    """What greedy and sampled requests get, with records of log-probabilities."""
    usual = SamplingParams(max_tokens=64, ignore_eos=True, seed=3, top_p=0.9, prompt_logprobs=2)
    params = [GREEDY, usual, GREEDY, usual]
    return [said(result) for result in engine.generate(prompts, params)]


CASES = [
    ("checkpoints", "llama-tied-yarn", 2),
    ("checkpoints", "llama-tied-yarn", 3),
    ("expert_checkpoints", "moe-some-layers", 2),
    ("hybrids", "qwen-half-tied", 2),
]


@pytest.mark.parametrize(("kind", "name", "stages"), CASES)
def test_stages_say_what_one_process_says(
    request: pytest.FixtureRequest, kind: str, name: str, stages: int
) -> None:
    oracle = request.getfixturevalue(kind)[name]
    prompts = oracle.prompts(PROMPT_LENGTHS)
    with open_engine(oracle.path, 1) as alone:
        expected = replies(alone, prompts)
    with open_engine(oracle.path, stages) as engine:
        assert replies(engine, prompts) == expected
        assert_equal_stages(engine)
