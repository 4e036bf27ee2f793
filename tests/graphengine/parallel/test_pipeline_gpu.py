"""Stages on a GPU each: NCCL carries what they pass on, as part of the graphs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from engines.small_engine import LONG, OTHER, PROMPT, greedy, open_engine
from graphengine import Engine
from graphengine.parallel.pipelining import PipelineRuntime
from graphengine.parallel.ranks import RankFailed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPTS = [PROMPT, OTHER, LONG]


def open_stages(**options: object) -> Engine:
    small = {"device": "cuda:0", "dtype": "float32", "max_batch": 2, "wait_limit_s": 60.0}
    return open_engine(pipeline_parallel=2, **small | options)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_stages() as engine:
        yield engine


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(PROMPTS, greedy(16))]


def runtime_of(engine: Engine) -> PipelineRuntime:
    assert isinstance(engine.runtime, PipelineRuntime)
    return engine.runtime


def test_stages_say_what_one_process_says(engine: Engine) -> None:
    with open_engine(device="cpu", max_batch=2) as alone:
        expected = tokens(alone)
    assert tokens(engine) == expected
    assert len(set(runtime_of(engine).digests())) == 1
    assert tokens(engine) == expected


def test_a_cancelled_request_leaves_stages_in_step(engine: Engine) -> None:
    expected = tokens(engine)
    for _ in range(3):
        request = engine.submit(LONG, greedy(40))
        engine.step()
        engine.step()
        request.cancel()
    assert tokens(engine) == expected
    assert len(set(runtime_of(engine).digests())) == 1


def test_a_stage_that_is_gone_ends_the_engine() -> None:
    with open_stages(wait_limit_s=5.0) as engine:
        engine.submit(PROMPT, greedy(60, ignore_eos=True))
        engine.step()
        (pid,) = runtime_of(engine).ranks.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailed):
            while engine.busy:
                engine.step()
    assert torch.ones(4, device="cuda").sum().item() == 4
