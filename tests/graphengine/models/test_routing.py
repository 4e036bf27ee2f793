"""Records of the experts that tokens take, against transformers' own router, and their replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from graphengine import Engine, Result, SamplingParams
from graphengine.speculative import NGram

NAMES = ("moe-some-layers", "moe-every-layer", "moe-every-second-layer")
CLOSE = 1e-3
"""Scores that are closer may be in another order on another machine."""


def greedy(max_tokens: int = 32, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def open_engine(oracle: Any, **options: Any) -> Engine:
    usual = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8}
    usual |= {"prefill_buckets": (16, 64), "record_routing": True}
    return Engine.from_pretrained(oracle.path, **(usual | options))


def fed_tokens(result: Result) -> list[int]:
    return [*result.prompt_token_ids, *result.token_ids][:-1]


def assert_recorded(oracle: Any, result: Result) -> None:
    """The record has what transformers' router chooses, for all tokens that were fed."""
    found = result.routing
    assert found is not None and found.dtype == np.int16
    tokens = fed_tokens(result)
    with torch.no_grad():
        output = oracle.model(torch.tensor([tokens]), output_router_logits=True)
    top_k = oracle.model.config.num_experts_per_tok
    assert found.shape == (len(tokens), len(output.router_logits), top_k)
    for layer, logits in enumerate(output.router_logits):
        best, order = logits.float().sort(dim=1, descending=True)
        chosen = torch.from_numpy(found[:, layer].copy()).long()
        torch.testing.assert_close(
            logits.float().gather(1, chosen), best[:, :top_k], atol=CLOSE, rtol=0
        )
        clear = (best[:, :top_k] - best[:, 1 : top_k + 1] > CLOSE).all(dim=1)
        assert clear.float().mean() > 0.9
        assert torch.equal(chosen[clear], order[clear, :top_k])


def ids(result: Result) -> NDArray[np.int16]:
    assert result.routing is not None
    return result.routing


def assert_same(results: Sequence[Result], expected: Sequence[Result]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert result.token_ids == wanted.token_ids
        np.testing.assert_array_equal(ids(result), ids(wanted))


@pytest.mark.parametrize("name", NAMES)
def test_records_are_transformers_own_routes(
    expert_checkpoints: dict[str, Any], device: str, name: str
) -> None:
    """Alone, in a batch, in chunks, with drafts, and paused: of each token that was fed."""
    oracle = expert_checkpoints[name]
    prompts = oracle.prompts((9, 17, 65, 40))
    # What n-grams find again.
    prompts[3] = prompts[1] * 3
    with open_engine(oracle, device=device) as engine:
        alone = [engine.generate(prompt, greedy()) for prompt in prompts]
        together = engine.generate(prompts, greedy())
    for result in alone:
        assert_recorded(oracle, result)
    assert_same(together, alone)
    with open_engine(oracle, device=device, speculative=NGram(k=3)) as engine:
        drafted = engine.generate(prompts, greedy())
        # Of the drafts that were wrong no row is left.
        assert 0 < engine.acceptance.accepted < engine.acceptance.proposed
    assert_same(drafted, alone)
    # Half a pool.
    with open_engine(oracle, device=device, kv_blocks=20, swap_blocks=60) as engine:
        paused = engine.generate(prompts, greedy())
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
    assert_same(paused, alone)


@contextmanager
def given_experts(oracle: Any, record: NDArray[np.int16]) -> Iterator[None]:
    """Transformers' routers take these experts for the first tokens, by their own scores."""
    gates = [each for each in oracle.model.modules() if hasattr(each, "norm_topk_prob")]
    assert len(gates) == record.shape[1]

    def hook(layer: int) -> Any:
        def replace(gate: Any, _: Any, output: Any) -> Any:
            logits, scores, chosen = output
            given = torch.from_numpy(record[: len(chosen), layer].copy()).long()
            weights = logits[: len(given)].float().softmax(dim=1).gather(1, given)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(dim=1, keepdim=True)
            chosen, scores = chosen.clone(), scores.clone()
            chosen[: len(given)], scores[: len(given)] = given, weights
            return logits, scores, chosen

        return replace

    handles = [gate.register_forward_hook(hook(layer)) for layer, gate in enumerate(gates)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def changed(record: NDArray[np.int16], experts: int, seed: int = 0) -> NDArray[np.int16]:
    """Other experts of every second token."""
    generator = np.random.default_rng(seed)
    tokens, layers, top_k = record.shape
    random = np.argsort(generator.random((tokens, layers, experts)), axis=2)[..., :top_k]
    return np.where(np.arange(tokens)[:, None, None] % 2 == 0, random, record).astype(np.int16)


@pytest.mark.parametrize("name", NAMES)
def test_a_replayed_record_gives_the_same_tokens_and_a_changed_one_transformers_own(
    expert_checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    oracle = expert_checkpoints[name]
    prompts = oracle.prompts((1, 17, 75, 40))
    with open_engine(oracle, device=device) as engine:
        free = engine.generate(prompts, greedy())
        replayed = engine.generate(prompts, [greedy(routing=ids(each)) for each in free])
        assert_same(replayed, free)
        records = [changed(ids(each), oracle.model.config.num_experts) for each in free]
        # Beside one that is free, and one whose record ends within its prompt.
        records[2] = records[2][:20]
        params = [greedy(routing=record) for record in records]
        params[3] = greedy()
        others = engine.generate(prompts, params)
        assert_same(others[3:], free[3:])
        assert others[0].token_ids != free[0].token_ids
    with open_engine(oracle, device=device, lookahead=0) as engine:
        for prompt, record, beside in zip(prompts[:3], records, others, strict=False):
            seen = eager(engine)
            result = engine.generate(prompt, greedy(routing=record))
            assert_same([result], [beside])
            np.testing.assert_array_equal(ids(result)[: len(record)], record)
            with given_experts(oracle, record):
                oracle.assert_logits(result, seen)
