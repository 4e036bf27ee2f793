"""Engines of two ranks whose models have recurrent layers: against transformers.

Each rank has some of a layer's heads or channels, with their states. Of the models with Mamba2,
"granite" and "nemotron-biases" have one group, whose norm is of all ranks' heads, and the other one
has a group for each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from events import GENEROUS_S

from checkpoints.mtp_chains import HAS_CHAINS, Chains
from engines.family_checks import assert_rewinds
from extent import some_of
from graphengine import Engine, SamplingParams
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.contract import ModelConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.launches import Share
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.speculative import MTP, NGram

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
FEW = replace(GREEDY, max_tokens=8)
NAMES = [
    "granite-rope-limits", "granite-experts", "nemotron-biases", "qwen", "lfm2-biases",
    "qwen-experts", "lfm2-experts", "nemotron-experts", "nemotron-latents",
    "qwen-next-experts",
]  # fmt: skip


def open_engine(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 3, "max_seq_len": 160, "block_size": 8, "prefill_buckets": (8, 32)}
    options = {
        "device": "cpu",
        "dtype": "float32",
        "lookahead": 0,
        "wait_limit_s": GENEROUS_S,
    } | options
    return Engine.from_pretrained(path, **{"tensor_parallel": 2} | sizes | options)


def assert_equal_ranks(engine: Engine) -> None:
    runtime = engine.runtime
    assert isinstance(runtime, DriverRuntime) and len(set(runtime.digests())) == 1


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_compute_what_transformers_does(
    hybrids: dict[str, Any], eager: Callable[[Engine], Any], name: str
) -> None:
    oracle = hybrids[name]
    with open_engine(oracle.path) as engine:
        whole = oracle.model.num_parameters()
        assert engine.model.weights.parameters < whole
        results = engine.generate(oracle.prompts((1, 3, 70)), GREEDY)
        for result in results:
            oracle.assert_greedy(result)
            assert len(set(result.token_ids)) > 4
        assert_equal_ranks(engine)
        seen = eager(engine)
        few = replace(GREEDY, max_tokens=12, logprobs=0)
        again = engine.generate(results[2].prompt_token_ids, few)
        assert again.token_ids == results[2].token_ids[:12]
        oracle.assert_logits(again, seen)
        assert_equal_ranks(engine)


@pytest.mark.parametrize(
    ("name", "options", "values"),
    some_of(
        [
            ("granite-experts", {"expert_parallel": True}, 3 * 3 * 48 * 128),
            ("granite-experts", {"tensor_parallel": 1, "data_parallel": 2}, 3 * 3 * 48 * 128),
            ("nemotron-experts", {"expert_parallel": True}, 6 * 2 * 36 * 54),
            ("nemotron-experts", {"tensor_parallel": 1, "data_parallel": 2}, 6 * 2 * 36 * 54),
        ],
        *(1, 2),
    ),
)
def test_ranks_have_whole_experts(
    hybrids: dict[str, Any], name: str, options: dict[str, Any], values: int
) -> None:
    """`values` of each layer, half of them all."""
    oracle = hybrids[name]
    with open_engine(oracle.path, **options) as engine:
        held = engine.model.weights.routed
        assert held is not None
        prompts = oracle.prompts((1, 3, 40))
        for result in engine.generate(prompts, FEW):
            oracle.assert_greedy(result)
        assert held.nbytes == held.layers * values * 4


def test_drafts_sessions_and_prefixes(hybrids: dict[str, Any]) -> None:
    """State checkpoints are those of each rank; drafts change no token."""
    oracle = hybrids["granite"]
    options: dict[str, Any] = {"prefix_caching": True, "session_states": 6}
    with open_engine(oracle.path, speculative=NGram(k=3), **options) as engine:
        assert_rewinds(engine, oracle)
        prompt = oracle.prompts((37,))[0]
        first = engine.generate(prompt * 2, GREEDY)
        oracle.assert_greedy(first)
        again = engine.generate(prompt * 2, FEW)
        assert again.token_ids == first.token_ids[:8]
        assert again.cached_tokens > 0 and engine.counters["states/kept"] > 2
        assert engine.acceptance.accepted > 0
        assert_equal_ranks(engine)
        assert_restores(engine, prompt)


def assert_restores(engine: Engine, prompt: list[int]) -> None:
    """A snapshot has the states of all heads; the session that is restored goes on from them."""
    with engine.session() as session:
        session.append(prompt)
        session.generate(FEW)
        kept = session.snapshot()
        session.append(prompt[:5])
        expected = session.generate(FEW)
    # 6 heads, and a convolution of x, B and C.
    assert [tuple(state.shape) for state in kept.states[:2]] == [(3, 432), (1, 6, 64, 24)]
    with engine.restore_session(kept) as restored:
        again = restored.snapshot()
        pairs = zip(again.states + again.caches, kept.states + kept.caches, strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        restored.append(prompt[:5])
        assert restored.generate(FEW).token_ids == expected.token_ids
    assert_equal_ranks(engine)


@pytest.mark.skipif(not HAS_CHAINS, reason="needs transformers with chains of modules")
def test_a_draft_module_beside_packed_heads(tmp_path: Path) -> None:
    """Pieces of packed projections are cut one by one, and the module's layer is split, too."""
    path = Chains(tmp_path, "qwen3.5", 1).path
    prompts = [[5, 3, 80], [*range(1, 72, 3)]]
    found = []
    for ranks in (1, 2):
        options = {"quantize": "int8", "speculative": MTP(k=2), "tensor_parallel": ranks}
        with open_engine(path, **options) as engine:
            results = engine.generate(prompts, GREEDY)
            found.append(([each.token_ids for each in results], engine.acceptance.accepted))
            if ranks > 1:
                assert_equal_ranks(engine)
    assert found[0] == found[1] and found[0][1] > 0


def config(name: str, hybrids: dict[str, Any]) -> ModelConfig:
    return read_model_config(Checkpoint.open(hybrids[name].path).config)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("granite", 4, "tensor_parallel=4 does not divide the 6 Mamba2 heads"),
        ("nemotron", 2, "tensor_parallel=2 does not divide the 3 groups of Mamba2 heads"),
        (
            "qwen-half-tied",
            2,
            "tensor_parallel=2 neither divides the 3 heads of keys nor is",
        ),
        ("lfm2", 3, "tensor_parallel=3 does not divide the 128 channels"),
    ],
)
def test_what_does_not_divide(hybrids: dict[str, Any], name: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_rank(config(name, hybrids), Share(0, ranks))
