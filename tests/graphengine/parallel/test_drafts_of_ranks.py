"""Drafters under two ranks: they draft what they draft on one, and change no token.

A rank's weights of a drafter are a part of it, or all where it is not split; what is drawn and how
sure a drafter is of it follow from logits that are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from events import GENEROUS_S
from safetensors.torch import load_file

from checkpoints.block_drafters import write_random
from checkpoints.few_layers import HEAD_LAYERS, block_drafter, eagle3_head, few_layers
from extent import extent
from graphengine import Engine, PromptParts, SamplingParams
from graphengine.options.drafts.draft_trees import DynamicTree
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.speculative import (
    MTP,
    DFlash,
    DraftModel,
    Eagle3,
    SaveHiddenStates,
    Speculative,
    Suffix,
)

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPTS = ["def fib(n):", "class Tree:\n", "import os\n"]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 3
# One of them draws through filters, as its drafts of a chain do.
PARAMS = [
    GREEDY[0],
    SamplingParams(seed=5, max_tokens=12, ignore_eos=True, top_k=20),
    SamplingParams(seed=7, max_tokens=12, ignore_eos=True),
]
DYNAMIC = DynamicTree(nodes=6, top_k=3, depth=3)
Said = tuple[list[tuple[int, ...]], list[list[list[int]]]]
"""The tokens of each request, and the drafts of all slots after each step."""


def _random_blocks(folder: Path) -> Speculative:
    return DFlash(write_random(folder, few_layers()), k=3)


MODES: dict[str, Callable[[Path], Speculative]] = {
    "static tree": lambda _: MTP(tree=[[0], [1], [0, 0], [0, 1], [0, 0, 0]]),
    "sure module": lambda _: MTP(k=3, min_confidence=0.5),
    "dynamic tree of a head": lambda _: Eagle3(eagle3_head(), tree=DYNAMIC, layers=HEAD_LAYERS),
    "blocks": _random_blocks,
    "sequential blocks": lambda _: DFlash(block_drafter(), k=3),
    "model": lambda _: DraftModel(few_layers(), k=2, min_confidence=0.3),
    "suffix": lambda _: Suffix(k=4),
}


def open_engine(ranks: int, **options: Any) -> Engine:
    options = {"max_batch": 3, "max_seq_len": 128, "block_size": 8, "lookahead": 1} | options
    options = {"prefill_buckets": (8, 32), "wait_limit_s": GENEROUS_S, "device": "cpu"} | options
    return Engine.from_pretrained(few_layers(), tensor_parallel=ranks, **options)


def run(engine: Engine, params: Sequence[SamplingParams]) -> Said:
    requests = [engine.submit(*each) for each in zip(PROMPTS, params, strict=True)]
    drafts = []
    while engine.busy:
        engine.step()
        if engine.config.drafts:
            drafts.append(engine.runtime.buffers["draft_tokens"].tolist())
    return [tuple(request.token_ids) for request in requests], drafts


def assert_equal_ranks(engine: Engine) -> None:
    """The state of all ranks is the same to the bit."""
    runtime = engine.runtime
    assert isinstance(runtime, DriverRuntime) and len(set(runtime.digests())) == 1


@pytest.fixture(scope="module")
def undrafted() -> list[list[tuple[int, ...]]]:
    """What two ranks say without drafts, greedily and as `PARAMS` draw."""
    with open_engine(2) as engine:
        return [run(engine, params)[0] for params in (GREEDY, PARAMS)]


# Trained blocks are met with embeddings below, too.
NAMES = extent([name for name in MODES if name != "sequential blocks"], list(MODES))


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_draft_what_one_does(
    undrafted: list[list[tuple[int, ...]]], tmp_path: Path, name: str
) -> None:
    mode = MODES[name](tmp_path)
    with open_engine(1, speculative=mode) as alone:
        tokens, drafts = run(alone, GREEDY)
        expected = alone.acceptance.as_dict()
        with alone.session() as session:
            session.append(PROMPTS[0])
            session.generate(GREEDY[0])
            kept = session.snapshot()
    assert tokens == undrafted[0]
    assert len({draft for step in drafts for slot in step for draft in slot}) > 4
    with open_engine(2, speculative=mode) as engine:
        assert run(engine, GREEDY) == (tokens, drafts)
        assert engine.acceptance.as_dict() == expected
        assert_equal_ranks(engine)
        assert run(engine, PARAMS)[0] == undrafted[1]
        assert_equal_ranks(engine)
        # What one rank kept, of the drafter's KV, too, is of any number.
        with engine.restore_session(kept) as restored:
            assert restored.cached_tokens == kept.blocks * engine.memory.block_size > 0


def test_hidden_states_are_those_of_one_rank(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        mode = SaveHiddenStates(folder, layers=(0, 1))
        with open_engine(ranks, speculative=mode) as engine:
            engine.generate(PROMPTS, SamplingParams(max_tokens=1))
            if ranks > 1:
                assert_equal_ranks(engine)
        found.append([load_file(file) for file in sorted(folder.iterdir())])
    assert len(found[0]) == len(found[1]) == len(PROMPTS)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.pop("input_ids"), other.pop("input_ids")) and len(one) == 2
        for name, states in one.items():
            torch.testing.assert_close(other[name], states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [MTP(k=2), DFlash(block_drafter(), k=3)])
def test_embeddings_go_to_all_ranks(mode: Speculative) -> None:
    """Between tokens, and in prompts of several chunks; their drafters read them, too."""
    dice = torch.Generator().manual_seed(3)
    found = []
    for ranks in (1, 2):
        options: dict[str, Any] = {"prompt_embeds": True, "speculative": mode}
        with open_engine(ranks, **options) as engine:
            table = engine.model.weights.embedding
            given = torch.randn(40, table.shape[1], generator=dice.manual_seed(3)) * table.std()
            prompts = [PromptParts(given[:5]), PromptParts([5, 3, 80], given, [8, 9])]
            results = engine.generate(prompts, GREEDY[:2])
            found.append(([each.token_ids for each in results], engine.acceptance))
            if ranks > 1:
                assert_equal_ranks(engine)
    assert found[0] == found[1]
