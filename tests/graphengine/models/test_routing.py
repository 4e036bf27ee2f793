"""Records of the experts that tokens take, against transformers' own router, and their replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from graphengine import Engine, Result, SamplingParams
from graphengine.kernels.experts.router import Router, route
from graphengine.models.routing import StepRoutes, layer_ids
from graphengine.speculative import NGram

NAME = "moe-every-layer"
CLOSE = 1e-3
"""Scores that are closer may be in another order on another machine."""


def greedy(max_tokens: int = 24, **options: Any) -> SamplingParams:
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


@pytest.mark.parametrize("name", ["moe-some-layers", "moe-every-second-layer"])
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
    pool = {"max_seq_len": 104, "kv_blocks": 17, "swap_blocks": 60}
    with open_engine(oracle, device=device, **pool) as engine:
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


@pytest.mark.parametrize("name", ["moe-every-layer", "moe-every-second-layer"])
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


def test_a_replay_is_drafted_paused_and_swapped_like_any_request(
    expert_checkpoints: dict[str, Any], device: str
) -> None:
    oracle = expert_checkpoints[NAME]
    prompts = oracle.prompts((9, 17, 65, 40))
    prompts[3] = prompts[1] * 3
    with open_engine(oracle, device=device) as engine:
        free = engine.generate(prompts, greedy())
        # The end of each is routed freely.
        records = [changed(ids(each), 5)[: 18 * index] for index, each in enumerate(free, 1)]
        params = [greedy(routing=record) for record in records]
        expected = [engine.generate(*pair) for pair in zip(prompts, params, strict=True)]
        # A slot's next request has no record.
        again = [engine.generate(prompt, greedy()) for prompt in prompts]
    assert_same(again, free)
    pool = {"max_seq_len": 104, "kv_blocks": 17, "swap_blocks": 60}
    with open_engine(oracle, device=device, **pool, speculative=NGram(k=3)) as engine:
        given = engine.generate(prompts, params)
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
        assert 0 < engine.acceptance.accepted < engine.acceptance.proposed
    assert_same(given, expected)
    for result, record in zip(given, records, strict=True):
        np.testing.assert_array_equal(ids(result)[: len(record)], record)


def test_the_last_part_of_a_record_may_be_unknown(
    expert_checkpoints: dict[str, Any], device: str
) -> None:
    """Tokens whose ids are all -1 are routed freely, in the layers where they are."""
    oracle = expert_checkpoints[NAME]
    (prompt,) = oracle.prompts((21,))
    with open_engine(oracle, device=device) as engine:
        free = engine.generate(prompt, greedy())
        unknown = ids(free).copy()
        unknown[3:7] = unknown[9:, 1] = -1
        assert_same([engine.generate(prompt, greedy(routing=unknown))], [free])
        nested = ids(free).tolist()
        assert_same([engine.generate(prompt, greedy(routing=nested))], [free])
        tensor = torch.from_numpy(ids(free)).long()
        assert_same([engine.generate(prompt, greedy(routing=tensor))], [free])


def test_kept_blocks_keep_what_was_recorded_when_they_were_computed(
    expert_checkpoints: dict[str, Any], device: str, tmp_path: Path
) -> None:
    oracle = expert_checkpoints[NAME]
    first, *more = oracle.prompts((37, 11, 5))
    with open_engine(oracle, device=device, prefix_caching=True) as engine:
        alone = [engine.generate([*first, *each], greedy(8)) for each in more]
        assert [result.cached_tokens for result in alone] == [0, 32]
        for result in alone:
            assert_recorded(oracle, result)
        with engine.session() as session:
            session.append(first)
            turns = [session.generate(greedy(20))]
            session.append(more[0])
            turns.append(session.generate(greedy(9)))
            fork = session.fork()
            session.rewind(30)
            session.append(more[1])
            turns.append(session.generate(greedy(7)))
            fork.append(more[1])
            turns.append(fork.generate(greedy(7)))
            snapshot = fork.snapshot()
        assert min(result.cached_tokens for result in turns) >= 32
        for turn in turns:
            assert_recorded(oracle, turn)
    with open_engine(oracle, device=device) as engine:
        # Whose blocks these were before does not matter.
        with engine.session() as session:
            session.append(more[0] * 8)
            session.generate(greedy(20))
        restored = engine.restore_session(snapshot)
        restored.append(more[0])
        result = restored.generate(greedy(4))
        known = result.cached_tokens
        assert known > 64 and (ids(result)[:known] == -1).all()
        whole = engine.generate(result.prompt_token_ids, greedy(4))
        np.testing.assert_array_equal(ids(result)[known:], ids(whole)[known:])


def test_prompts_that_share_a_prefix_at_the_same_time(
    expert_checkpoints: dict[str, Any], device: str
) -> None:
    """The second begins with blocks whose records have not been read yet."""
    oracle = expert_checkpoints[NAME]
    (prompt,) = oracle.prompts((61,))
    with open_engine(oracle, device=device, prefix_caching=True) as engine:
        both = engine.generate([prompt, [*prompt, 5]], greedy(6))
        assert [result.cached_tokens for result in both] == [0, 56]
        for result in both:
            assert_recorded(oracle, result)
        # Requests with a record neither find blocks nor leave any.
        given = changed(ids(both[0]), 5)
        replayed = engine.generate(prompt, greedy(6, routing=given))
        assert replayed.cached_tokens == 0
        np.testing.assert_array_equal(ids(replayed), given)
        assert_same([engine.generate(prompt, greedy(6))], both[:1])
        other = [7, *prompt]
        engine.generate(other, greedy(6, routing=np.insert(given, 0, given[0], axis=0)))
        after = engine.generate(other, greedy(6))
        assert after.cached_tokens == 0
        assert_recorded(oracle, after)


def test_a_session_goes_on_without_the_kv_of_a_replayed_turn(
    expert_checkpoints: dict[str, Any], device: str
) -> None:
    oracle = expert_checkpoints[NAME]
    prompt, more = oracle.prompts((40, 9))
    with open_engine(oracle, device=device) as engine, engine.session() as session:
        session.append(prompt)
        own = session.generate(greedy(10))
        session.append(more)
        tokens = len(prompt) + 10 + len(more)
        given = np.stack([ids(own)[0]] * tokens)
        replayed = session.generate(greedy(10, routing=given))
        np.testing.assert_array_equal(ids(replayed)[:tokens], given)
        session.append(more)
        after = session.generate(greedy(10))
        # The blocks of the first turn, and none of the second.
        assert after.cached_tokens == 48
        assert_recorded(oracle, after)
        whole = engine.generate(after.prompt_token_ids, greedy(10))
    assert after.token_ids == whole.token_ids


def test_a_chunks_last_lane_has_the_experts_that_its_logits_come_from(device: str) -> None:
    """The last layer is run twice for it; a model whose last layer has no experts runs it once."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 6, generator=generator).to(device)
    slot = torch.zeros(3, dtype=torch.int32, device=device)
    last = torch.tensor([2], dtype=torch.int32, device=device)
    router = Router(top_k=2)
    given = torch.full((2, 3, 2), -1, dtype=torch.int32, device=device)
    given[1, 1] = torch.tensor([5, 0])

    def routed(step: StepRoutes, logits: torch.Tensor) -> Any:
        own, kept = layer_ids(step)
        lanes = slot[: len(logits)]
        return route(logits, lanes, router, given_Nk=own, expert_Nk=kept).expert.tolist()

    for again in (False, True):
        step = StepRoutes(given)
        one = step.of_last_layer(last)
        chosen = [routed(step, layer[:3]) for layer in logits[:2]]
        assert chosen[1][1] == [5, 0]
        if again:
            other = routed(one, logits[2, 3:])
            assert other != chosen[1][2:]
            chosen[1][2:] = other
        step.replace_last_layer(one, last, slot[:1])
        assert step.expert.tolist() == chosen
    lane_1 = torch.tensor([1], dtype=torch.int32, device=device)
    one = step.of_last_layer(lane_1)
    assert routed(one, logits[2, :1]) == [[5, 0]]


def test_the_last_lanes_of_packed_chunks_have_their_own_experts(device: str) -> None:
    """Also beside padded chunks, whose last lane is 0, and where that is a chunk's only lane."""
    for lasts in ([0, 3, 0], [1, 0, 0], [0, 1, 3]):
        lane = torch.tensor(lasts, dtype=torch.int32, device=device)
        live = [index == 0 or last > 0 for index, last in enumerate(lasts)]
        slot = torch.tensor([2 if lives else -1 for lives in live], dtype=torch.int32)
        step = StepRoutes(torch.full((2, 4, 2), -1, dtype=torch.int32, device=device))
        again = step.of_last_layer(lane)
        layer_ids(again)
        step.expert.fill_(7)
        again.expert[0] = torch.arange(6, device=device).view(3, 2)
        step.replace_last_layer(again, lane, slot.to(device))
        expected = [[7, 7] for _ in range(4)]
        for index, last in enumerate(lasts):
            if live[index]:
                expected[last] = [2 * index, 2 * index + 1]
        assert step.expert.tolist() == [[[7, 7]] * 4, expected]
