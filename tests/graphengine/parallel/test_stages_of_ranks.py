"""Pipelines whose stages are groups of ranks that split each layer, on the CPU.

What they compute is what the ranks of one stage compute, so tokens and log-probabilities are equal
to those, to the bit; with one process they have the tokens in common.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from events import GENEROUS_S

from checkpoints.few_layers import few_layers
from checkpoints.hybrids import A, M, qwen
from engines.failing_ranks import limit_waits, stop
from engines.family_checks import assert_rewinds
from extent import extent
from graphengine import Engine, EngineConfig, Result, SamplingParams
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.launches import Share
from graphengine.models.splitting.stages import Place, place_of_rank
from graphengine.opening.loading import read_checkpoint
from graphengine.parallel.pipelining import PipelineRuntime
from graphengine.parallel.ranks import RankFailed
from graphengine.speculative import MTP, DraftModel, Speculative

pytestmark = pytest.mark.usefixtures("forked_ranks")

LENGTHS = (1, 3, 17, 50)
TEXTS = ["def fib(n):", "class Tree:\n", "import os\n"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)


def open_engine(path: Path, ranks: int, stages: int, **options: Any) -> Engine:
    sizes = {"max_batch": 4, "max_seq_len": 160, "block_size": 8, "prefill_buckets": (8, 32)}
    fixed = {
        "device": "cpu",
        "dtype": "float32",
        "wait_limit_s": GENEROUS_S,
        "prompt_logprobs": True,
    }
    options = fixed | sizes | options
    return Engine.from_pretrained(path, tensor_parallel=ranks, pipeline_parallel=stages, **options)


def said(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.logprobs, result.prompt_logprobs


def replies(engine: Engine, prompts: list[list[int]]) -> list[tuple[Any, ...]]:
    sampled = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, top_p=0.9, prompt_logprobs=2)
    return [said(result) for result in engine.generate(prompts, [GREEDY, sampled] * 2)]


def assert_equal_ranks(engine: Engine) -> None:
    """What a step feeds is the same on all ranks, to the bit."""
    assert isinstance(engine.runtime, PipelineRuntime)
    found = engine.runtime.digests()
    assert len(found) == engine.config.ranks and len(set(found)) == 1


def assert_goes_on(kept: Any, engine: Engine, more: list[int], expected: tuple[int, ...]) -> None:
    """The session of a snapshot, in this engine."""
    with engine.restore_session(kept) as session:
        session.append(more)
        result = session.generate(GREEDY)
        assert result.token_ids == expected and result.cached_tokens > 0


def kept_after(engine: Engine, prompt: list[int], more: list[int]) -> tuple[Any, tuple[int, ...]]:
    """A session's snapshot, and how the session goes on."""
    with engine.session() as session:
        session.append(prompt)
        session.generate(GREEDY)
        kept = session.snapshot()
        session.append(more)
        return kept, session.generate(GREEDY).token_ids


# Who is where.


def test_places() -> None:
    assert [place_of_rank(Share(rank, 6), 3) for rank in range(6)] == [
        Place(Share(shard, 2), Share(pipe, 3)) for pipe in range(3) for shard in range(2)
    ]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its stages have attention each, and recurrent heads for two ranks."""
    path = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(3)
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    qwen([A, M, A, M], linear_conv_kernel_dim=4, **heads).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["llama-biases", "hybrid"])
def test_each_rank_has_its_share_of_its_stage(
    checkpoints: dict[str, Any], hybrid: Path, kind: str
) -> None:
    """Weights of one rank in each stage are those of a rank that has all layers."""
    path = hybrid if kind == "hybrid" else checkpoints[kind].path
    config = EngineConfig(
        device="cpu", max_batch=2, max_seq_len=64, tensor_parallel=2, pipeline_parallel=2
    )
    for shard in range(2):
        found = [read_checkpoint(path, config, Share(shard + place, 4)) for place in (0, 2)]
        split = found[0].split.allocate(device="meta", dtype=torch.float32).named()
        held: dict[str, Any] = {}
        for each in found:
            assert each.place.shard == Share(shard, 2) and each.split == found[0].split
            held |= each.model.allocate(device="meta", dtype=torch.float32).named()
        assert {name: value.shape for name, value in held.items()} == {
            name: value.shape for name, value in split.items()
        }


# What they say.


def test_two_stages_of_two_ranks(checkpoints: dict[str, Any]) -> None:
    """Sessions go on from snapshots of one process, and the other way round."""
    oracle = checkpoints["llama-biases"]
    prompts = oracle.prompts(LENGTHS)
    prompt, more = prompts[3], prompts[2]
    with open_engine(oracle.path, 2, 1) as engine:
        expected = replies(engine, prompts)
    with open_engine(oracle.path, 2, 2) as engine, open_engine(oracle.path, 1, 1) as alone:
        said_by_all = "device cpu, the first of 2 ranks of the last of 2 stages, "
        assert said_by_all in str(engine.report())
        assert_rewinds(engine, oracle)
        assert replies(engine, prompts) == expected
        assert tokens_of(expected) == tokens_of(replies(alone, prompts))
        (ours, after), (theirs, afterwards) = (
            kept_after(each, prompt, more) for each in (engine, alone)
        )
        assert after == afterwards
        for one, other in zip(ours.caches, theirs.caches, strict=True):
            torch.testing.assert_close(one, other)
        for kept in (ours, theirs):
            for each in (engine, alone):
                assert_goes_on(kept, each, more, after)
        assert_equal_ranks(engine)
        assert_updates(engine, alone, oracle.path, prompts)


def tokens_of(found: list[tuple[Any, ...]]) -> list[tuple[int, ...]]:
    return [tokens for tokens, *_ in found]


def assert_updates(engine: Engine, alone: Engine, path: Path, prompts: list[list[int]]) -> None:
    """New weights, and the first ones again."""
    before = replies(engine, prompts)
    generator = torch.Generator().manual_seed(2)
    mapped = Checkpoint.open(path).mapped()
    values = {
        name: mapped[name] + 0.05 * torch.randn(mapped[name].shape, generator=generator)
        for name in mapped
    }
    for each in (engine, alone):
        each.update_weights(values)
    updated = tokens_of(replies(engine, prompts))
    assert updated == tokens_of(replies(alone, prompts)) != tokens_of(before)
    engine.update_weights(path)
    assert replies(engine, prompts) == before
    assert_equal_ranks(engine)


def test_a_hybrid(hybrid: Path) -> None:
    """With states that are kept, drafts by n-grams, and snapshots of states."""
    options: dict[str, Any] = {"prefix_caching": True, "speculative": "ngram:3"}
    prompt, more = [*range(5, 79, 2)] * 2, [7, 3, 80]
    found = []
    for stages in (1, 2):
        with open_engine(hybrid, 2, stages, **options) as engine:
            first, again = (engine.generate(prompt, GREEDY) for _ in range(2))
            assert first.token_ids == again.token_ids and again.cached_tokens > 0
            assert engine.counters["states/kept"] > 2 and engine.acceptance.accepted > 0
            kept, expected = kept_after(engine, prompt, more)
            assert_goes_on(kept, engine, more, expected)
            found.append((said(first), said(again), expected, kept))
            if stages > 1:
                assert_equal_ranks(engine)
    assert found[0][:3] == found[1][:3]
    pairs = zip(*(kept.states + kept.caches for *_, kept in found), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_whole_experts_in_codes(expert_checkpoints: dict[str, Any]) -> None:
    oracle = expert_checkpoints["moe-even"]
    prompts = oracle.prompts(LENGTHS)
    options: dict[str, Any] = {"expert_parallel": True, "quantize": "int8"}
    with open_engine(oracle.path, 2, 1, **options) as engine:
        expected = replies(engine, prompts)
    with open_engine(oracle.path, 2, 2, **options) as engine:
        assert replies(engine, prompts) == expected
        assert_equal_ranks(engine)


# A model's drafts meet stages in test_pipeline.py, and ranks in test_drafts_of_ranks.py.
@pytest.mark.parametrize("name", extent(["module"], ["module", "model"]))
def test_drafts_are_those_of_one_stage(name: str) -> None:
    """They are made by the ranks that have the last layer. Stages of one and of two layers are put
    together in snapshots, beside what drafts keep.
    """
    modes: dict[str, Speculative] = {
        "module": MTP(k=2, min_confidence=0.02),
        "model": DraftModel(few_layers(), k=2),
    }
    found, snapshots = [], list[tuple[Any, tuple[int, ...]]]()
    for stages in (1, 2):
        with open_engine(few_layers(), 2, stages, speculative=modes[name]) as engine:
            results = engine.generate(TEXTS, GREEDY)
            found.append(([said(result) for result in results], engine.acceptance.accepted))
            kept, expected = kept_after(engine, [5, 3, 80] * 4, [7, 3])
            assert_goes_on(kept, engine, [7, 3], expected)
            snapshots.append((kept, expected))
            if stages > 1:
                assert_goes_on(snapshots[0][0], engine, [7, 3], snapshots[0][1])
                assert_equal_ranks(engine)
    assert found[0] == found[1] and found[0][1] > 0
    (one, after), (other, afterwards) = snapshots
    assert after == afterwards and all(map(torch.equal, one.caches, other.caches))


# When one of them fails.


@pytest.mark.parametrize(
    ("rank", "sent", "message"),
    [
        (1, signal.SIGKILL, r"^rank 1 \(process \d+, cpu\) was ended by signal 9 \(SIGKILL\)"),
        (3, signal.SIGKILL, r"^rank 3 \(process \d+, cpu\) was ended by signal 9 \(SIGKILL\)"),
        (
            3,
            signal.SIGSTOP,
            r"^ranks did not come within 0\.5 s: rank 1 .* rank 3 \(.*; stage 1 of 2 waited, "
            r"for at most 0\.5 s, for what stage 0 sends, \d+ bytes: ",
        ),
    ],
)
def test_a_rank_that_fails_is_the_next_calls_error(
    monkeypatch: pytest.MonkeyPatch, rank: int, sent: signal.Signals, message: str
) -> None:
    """Beside the driver, or in another stage and with none that the driver meets."""
    grace_s = 0.0 if sent is signal.SIGSTOP else GENEROUS_S
    monkeypatch.setattr("graphengine.parallel.ranks._GRACE_S", grace_s)
    with open_engine(few_layers(), 2, 2, wait_limit_s=GENEROUS_S) as engine:
        assert isinstance(engine.runtime, PipelineRuntime)
        pids = engine.runtime.ranks.pids
        assert len(engine.generate(TEXTS[0], replace(GREEDY, max_tokens=2)).token_ids) == 2
        engine.submit(TEXTS[0], GREEDY)
        engine.step()
        if sent is signal.SIGSTOP:
            limit_waits(engine, 0.5)
            stop(engine.runtime.ranks, rank)
        else:
            os.kill(pids[rank - 1], sent)
        with pytest.raises(RankFailed, match=message):
            while engine.busy:
                engine.step()
        with pytest.raises(RuntimeError, match="the engine is broken, close it: RankFailed: rank"):
            engine.step()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
