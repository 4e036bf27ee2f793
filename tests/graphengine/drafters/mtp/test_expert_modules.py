"""Draft modules with experts and with latents: they change no token and no record of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from checkpoints.mtp_chains import HAS_CHAINS, VOCAB, Chains
from extent import extent
from graphengine import Engine, Result, SamplingParams
from graphengine.models.states import cache_shape
from graphengine.speculative import MTP, GateOptions

pytestmark = pytest.mark.skipif(
    not HAS_CHAINS, reason="this version of transformers cannot run one module by itself"
)

K = 3
KINDS = ("qwen3-moe", "deepseek-v3")
MODES = {"eagle": MTP(k=K), "vanilla": MTP(k=K, style="vanilla")}


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chains]:
    folder = tmp_path_factory.mktemp("chains")
    return {kind: Chains(folder / kind, kind, K) for kind in KINDS}


def prompts() -> list[list[int]]:
    dice = np.random.default_rng(1)
    return [dice.integers(VOCAB, size=size).tolist() for size in (1, 9, 41, 30)]


def jobs(max_tokens: int = 20) -> list[SamplingParams]:
    """Greedy ones, and one that is sampled."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    greedy = SamplingParams(temperature=0.0, **options)
    return [greedy, greedy, greedy, SamplingParams(seed=5, **options)]


def open_engine(chains: Chains, device: str, **options: Any) -> Engine:
    usual: dict[str, Any] = {"max_batch": 4, "max_seq_len": 96, "dtype": "float32"}
    usual |= {"block_size": 8, "prefill_buckets": (8, 32), "row_family": "dot", "device": device}
    return Engine.from_pretrained(chains.path, **(usual | options))


def tokens_of(results: list[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def plain(chains: dict[str, Chains]) -> Callable[[str, str], list[tuple[int, ...]]]:
    """What all jobs say without drafts, by kind and device."""

    @cache
    def of(kind: str, device: str) -> list[tuple[int, ...]]:
        with open_engine(chains[kind], device) as engine:
            return tokens_of(engine.generate(prompts(), jobs()))

    return of


@pytest.mark.parametrize("style", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes_and_some_drafts_are_taken(
    chains: dict[str, Chains],
    plain: Callable[[str, str], list[tuple[int, ...]]],
    device: str,
    kind: str,
    style: str,
) -> None:
    """Requests run together, alone, and paused."""
    expected = plain(kind, device)
    mode = {"speculative": MODES[style]}
    with open_engine(chains[kind], device, **mode) as engine:
        drafted = engine.generate(prompts(), jobs())
        alone = [engine.generate(prompts()[index], jobs()[index]) for index in (0, 3)]
        acceptance = engine.acceptance
        assert 0.1 * acceptance.proposed < acceptance.accepted < acceptance.proposed
    assert tokens_of(drafted) == expected
    assert tokens_of(alone) == [expected[0], expected[3]]
    with open_engine(chains[kind], device, **mode, kv_blocks=16, swap_blocks=40) as engine:
        paused = engine.generate(prompts(), jobs())
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
        assert engine.acceptance.accepted == sum(each.acceptance.accepted for each in drafted)
    assert tokens_of(paused) == expected


def test_a_gate_switches_them(chains: dict[str, Chains], device: str) -> None:
    options = {"speculative": MTP(k=2), "gate": GateOptions(max_live=2)}
    with open_engine(chains["deepseek-v3"], device) as engine:
        expected = tokens_of(engine.generate(prompts(), jobs(20)))
    with open_engine(chains["deepseek-v3"], device, **options) as engine:
        assert tokens_of(engine.generate(prompts(), jobs(20))) == expected
        # The gate lets no more than two rows draft.
        assert tokens_of(engine.generate(prompts()[1:3], jobs(20)[1:3])) == expected[1:3]
        assert 0 < engine.acceptance.accepted < engine.acceptance.proposed


def test_trees_of_modules_with_experts(chains: dict[str, Chains], device: str) -> None:
    """No token changes; what has latents, or is recorded, has no trees."""
    with open_engine(chains["qwen3-moe"], device) as engine:
        expected = tokens_of(engine.generate(prompts(), jobs()))
    mode = MTP(tree=[[0], [1], [0, 0], [0, 1], [1, 0]])
    with open_engine(chains["qwen3-moe"], device, speculative=mode) as engine:
        assert tokens_of(engine.generate(prompts(), jobs())) == expected
        assert engine.acceptance.accepted > 0.1 * engine.acceptance.proposed
    with pytest.raises(ValueError, match=r"a DeepseekV3ForCausalLM has latent attention in \d"):
        open_engine(chains["deepseek-v3"], device, speculative=mode)
    with pytest.raises(ValueError, match="record_routing=True is for chains of drafts, not for t"):
        open_engine(chains["qwen3-moe"], device, speculative=mode, record_routing=True)


@pytest.mark.parametrize(
    ("kind", "style"),
    extent([("qwen3-moe", "eagle"), ("deepseek-v3", "vanilla")], [*product(KINDS, MODES)]),
)
def test_a_record_has_the_targets_experts_alone(
    chains: dict[str, Chains], device: str, kind: str, style: str
) -> None:
    """The routes of modules are in no record, and a record that is replayed is not theirs."""
    with open_engine(chains[kind], device, record_routing=True) as engine:
        expected = engine.generate(prompts(), jobs(20))
    layers = 2 if kind == "qwen3-moe" else 1
    with open_engine(chains[kind], device, record_routing=True, speculative=MODES[style]) as engine:
        drafted = engine.generate(prompts(), jobs(20))
        assert 0 < engine.acceptance.accepted < engine.acceptance.proposed
        proposed = engine.acceptance.accepted
        # Replayed, a record of a model whose routers would choose so themselves changes nothing.
        replayed = engine.generate(
            prompts(),
            [
                SamplingParams(
                    temperature=job.temperature, seed=job.seed, max_tokens=20, ignore_eos=True,
                    routing=result.routing,
                )
                for job, result in zip(jobs(20), expected, strict=True)
            ],
        )  # fmt: skip
        assert engine.acceptance.accepted == 2 * proposed
    for results in (drafted, replayed):
        assert tokens_of(results) == tokens_of(expected)
        for result, wanted in zip(results, expected, strict=True):
            assert result.routing is not None and wanted.routing is not None
            assert result.routing.shape[1] == layers
            np.testing.assert_array_equal(result.routing, wanted.routing)


def test_the_modules_latents_are_in_the_budget(chains: dict[str, Chains]) -> None:
    mode = MODES["vanilla"]
    with (
        open_engine(chains["deepseek-v3"], "cpu", kv_blocks=12) as plain,
        open_engine(chains["deepseek-v3"], "cpu", kv_blocks=12, speculative=mode) as engine,
    ):
        drafter = engine.runtime.program.drafter
        assert cache_shape(drafter.needs.states, 8) == (K, 1, 8, 64)
        assert engine.memory.block_bytes - plain.memory.block_bytes == K * 8 * 64 * 4
        assert engine.runtime.caches[1][0].shape == (K, 13, 1, 8, 64)
        weights = drafter.weights
        assert weights is not None
        lines = {line.name: line.bytes for line in engine.memory.budget.lines}
        assert lines["drafter's weights"] == weights.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_rewind_and_are_restored_with_the_modules_state(
    chains: dict[str, Chains], device: str, kind: str
) -> None:
    """Each reply has the tokens of an engine without drafts, and drafts are taken in each."""
    head, tail = prompts()[2], prompts()[1]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    replies: list[list[tuple[int, ...]]] = []
    for mode in (None, MODES["eagle"], MODES["vanilla"]):
        with open_engine(chains[kind], device, speculative=mode) as engine:
            with engine.session() as session:
                session.append(head)
                first = session.generate(params)
                session.rewind(7)
                session.append(tail)
                kept = session.snapshot()
                second = session.generate(params)
            with engine.restore_session(kept) as copy:
                third = copy.generate(params)
        found = [first, second, third]
        replies.append(tokens_of(found))
        assert mode is None or all(each.acceptance.accepted for each in found)
        assert second.cached_tokens >= 40 and third.cached_tokens >= 40
    assert replies[0] == replies[1] == replies[2]
