"""Drafters under two ranks: they draft what they draft on one, and change no token.

A rank's weights of a drafter are a part of it, or all where it is not split; what is drawn and how
sure a drafter is of it follow from logits that are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from checkpoints.few_layers import HEAD_LAYERS, eagle3_head, few_layers
from graphengine import Engine, SamplingParams
from graphengine.draft_trees import DynamicTree
from graphengine.parallel.leading import LeadingRuntime
from graphengine.speculative import MTP, Eagle3, Speculative

PROMPTS = ["def fib(n):", "class Tree:\n", "import os\n"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
# One of them draws through filters, as its drafts of a chain do.
PARAMS = [
    GREEDY,
    SamplingParams(seed=5, max_tokens=24, ignore_eos=True, top_k=20),
    SamplingParams(seed=7, max_tokens=24, ignore_eos=True),
]
DYNAMIC = DynamicTree(nodes=6, top_k=3, depth=3)
MODES: dict[str, Speculative] = {
    "static tree": MTP(tree=[[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
    "sure module": MTP(k=3, min_confidence=0.5),
    "dynamic tree of a head": Eagle3(eagle3_head(), tree=DYNAMIC, layers=HEAD_LAYERS),
    "sure head": Eagle3(eagle3_head(), k=3, min_confidence=0.4, layers=HEAD_LAYERS),
}


def open_engine(ranks: int, **options: Any) -> Engine:
    options = {"max_batch": 3, "max_seq_len": 128, "block_size": 8, "lookahead": 1} | options
    options = {"prefill_buckets": (8, 32), "wait_limit_s": 60.0, "device": "cpu"} | options
    return Engine.from_pretrained(few_layers(), tensor_parallel=ranks, **options)


def tokens_of(engine: Engine, params: Any) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate(PROMPTS, params)]


def assert_equal_ranks(engine: Engine) -> None:
    """The state of all ranks is the same to the bit."""
    runtime = engine.runtime
    assert isinstance(runtime, LeadingRuntime) and len(set(runtime.digests())) == 1


@pytest.fixture(scope="module")
def undrafted() -> Iterator[list[list[tuple[int, ...]]]]:
    """What two ranks say without drafts, greedily and as `PARAMS` draw."""
    with open_engine(2) as engine:
        yield [tokens_of(engine, params) for params in (GREEDY, PARAMS)]


@pytest.mark.parametrize("name", MODES)
def test_two_ranks_draft_what_one_does(undrafted: list[list[tuple[int, ...]]], name: str) -> None:
    mode = MODES[name]
    with open_engine(1, speculative=mode) as alone:
        assert tokens_of(alone, GREEDY) == undrafted[0]
        expected = alone.acceptance
    with open_engine(2, speculative=mode) as engine:
        assert tokens_of(engine, GREEDY) == undrafted[0]
        assert engine.acceptance == expected and expected.accepted > 0
        assert_equal_ranks(engine)
        assert tokens_of(engine, PARAMS) == undrafted[1]
        assert_equal_ranks(engine)
