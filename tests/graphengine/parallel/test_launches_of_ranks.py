"""Launches of several steps on several ranks: tokens, and what all ranks keep, are as with one."""

from __future__ import annotations

from typing import Any

import pytest

from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, open_engine, run, sampled
from extent import some_of
from graphengine import Engine
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.speculative import MTP, NGram

pytestmark = pytest.mark.usefixtures("forked_ranks")

CASES: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2, "speculative": NGram(k=2)},
    {"tensor_parallel": 2, "speculative": MTP(k=2)},
    {"pipeline_parallel": 2},
]


def results(engine: Engine) -> list[tuple[Any, ...]]:
    params = [sampled(10 + 9 * at, seed=at, logprobs=1) for at in range(4)]
    found = engine.generate([PROMPT, OTHER, LONG, PROMPT], params)
    run(engine)
    assert_idle(engine)
    assert isinstance(engine.runtime, DriverRuntime)
    (_,) = {*engine.runtime.digests()}
    return [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in found]


@pytest.mark.parametrize("options", some_of(CASES, 0, 1), ids=str)
def test_ranks_run_the_steps_of_a_launch_together(options: dict[str, Any]) -> None:
    with open_engine(device="cpu", **options) as engine:
        expected = results(engine)
    with open_engine(device="cpu", **options, steps_per_launch=6, lookahead=2) as engine:
        assert results(engine) == expected
        assert sum(n for name, n in engine.counters.items() if "/x6/" in name) > 4
