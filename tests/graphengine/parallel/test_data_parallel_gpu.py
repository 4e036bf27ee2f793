"""Two ranks with requests of their own that share a GPU, which gives each its time in turn."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.mtp_chains import HAS_CHAINS, VOCAB, Chains
from engines.churn import Owners, come_and_go, write_tokenizer
from engines.eager_steps import Eager
from engines.small_engine import greedy, open_engine, run, sampled, step_until
from graphengine import Engine, Request, SamplingParams
from graphengine.host.rank_schedulers import RankSchedulers
from graphengine.parallel.data_parallel.runtime import DataParallelRuntime
from graphengine.parallel.ranks import ONE_DEVICE, RankFailed
from graphengine.speculative import MTP, NGram

pytestmark = pytest.mark.gpu


def open_ranks(path: Path, **options: Any) -> Engine:
    small = {"device": "cuda", "dtype": "float32", "max_batch": 2, "wait_limit_s": 60.0}
    return open_engine(path, data_parallel=2, **small | options)


@pytest.fixture(autouse=True)
def on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv(ONE_DEVICE, "1")


@pytest.fixture(scope="module")
def oracle(glm_checkpoints: dict[str, Any]) -> Any:
    """A model of ten experts and a shared one, with a first layer without any."""
    return glm_checkpoints["glm-norms-biases"]


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a tokenizer, for grammars and words."""
    path = tmp_path_factory.mktemp("shared")
    for file in oracle.path.iterdir():
        (path / file.name).symlink_to(file)
    write_tokenizer(path, json.loads((path / "config.json").read_text())["vocab_size"], eos=7)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """It drafts, and its pools are too small for its slots."""
    options = {"kv_blocks": 17, "swap_blocks": 400, "prompt_logprobs": True}
    options |= {"record_routing": True, "speculative": NGram(k=2)}
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() < 2:
            patch.setenv(ONE_DEVICE, "1")
        with open_ranks(folder, **options) as engine:
            yield engine


def runtime_of(engine: Engine) -> DataParallelRuntime:
    assert isinstance(engine.runtime, DataParallelRuntime)
    return engine.runtime


def rank_of(engine: Engine, request: Request) -> int:
    assert isinstance(engine.scheduler, RankSchedulers)
    ranks = engine.scheduler.ranks
    (rank,) = (rank for rank, each in enumerate(ranks) if request in each.active)
    return rank


@pytest.mark.parametrize("max_batch", [1, 4])
def test_tokens_are_those_of_transformers(oracle: Any, max_batch: int) -> None:
    """Both row families; pairs one by one and grouped, and those of chunks."""
    with open_ranks(oracle.path, max_batch=max_batch) as ranks:
        results = ranks.generate(oracle.prompts((3, 40, 17, 1, 20)), greedy(24, ignore_eos=True))
        for result in results:
            oracle.assert_greedy(result)


def test_tokens_are_those_of_one_rank(engine: Engine, oracle: Any) -> None:
    prompts = oracle.prompts((5, 40, 33, 1))
    params = [sampled(24, seed=seed) for seed in range(4)]
    with open_engine(oracle.path, device="cuda", dtype="float32", max_batch=2) as alone:
        expected = [each.token_ids for each in alone.generate(prompts, params)]
    assert [each.token_ids for each in engine.generate(prompts, params)] == expected


def test_bits_are_those_beside_an_idle_rank(engine: Engine, oracle: Any) -> None:
    """On each rank, beside idle ones and busy ones."""
    prompt, *others = oracle.prompts((35, 3, 40))
    params = sampled(16, seed=3, logprobs=3, prompt_logprobs=2)
    alone = engine.generate(prompt, params)
    for rank, neighbours in ((1, others[:1]), (0, others)):
        for each in neighbours:
            engine.submit(each, greedy(30, ignore_eos=True))
        request = engine.submit(prompt, params)
        step_until(engine, lambda request=request: request.token_ids != [])
        assert rank_of(engine, request) == rank
        run(engine)
        found = request.result()
        assert found.token_ids == alone.token_ids and found.logprobs == alone.logprobs
        assert found.prompt_logprobs == alone.prompt_logprobs and alone.prompt_logprobs
        assert (found.routing == alone.routing).all()


def test_replays_are_what_eager_steps_are(engine: Engine, oracle: Any) -> None:
    """The driver's steps are eager, those of the other rank are replays."""
    prompts = oracle.prompts((5, 40, 33))
    params = sampled(12, seed=3, top_k=20)
    expected = [result.token_ids for result in engine.generate(prompts, params)]
    with runtime_of(engine).replaced(Eager):
        assert [result.token_ids for result in engine.generate(prompts, params)] == expected
    assert [result.token_ids for result in engine.generate(prompts, params)] == expected


def test_a_rank_that_is_late_is_waited_for(engine: Engine, oracle: Any) -> None:
    prompts, params = oracle.prompts((5, 9)), greedy(12, ignore_eos=True)
    expected = [each.token_ids for each in engine.generate(prompts, params)]
    requests = [engine.submit(prompt, params) for prompt in prompts]
    engine.step()
    (pid,) = runtime_of(engine).ranks.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        # Nothing of the other rank arrives meanwhile.
        engine.step(timeout=0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    run(engine)
    assert [tuple(request.token_ids) for request in requests] == expected


def test_requests_that_come_and_go_have_their_own_tokens(engine: Engine) -> None:
    """With pauses and cancels, and drafts."""
    dice = random.Random(5)
    owners = Owners(engine, dice)
    come_and_go(owners, engine, dice, tokens=engine.counters["tokens"] + 100)
    owners.leave()
    run(engine)
    assert isinstance(engine.scheduler, RankSchedulers)
    for each in engine.scheduler.ranks:
        assert each.pool.free == each.pool.count and not any(each.slots)
    engine.stop_callback = None
    owners.check(engine, at_once=1)


@pytest.mark.skipif(not HAS_CHAINS, reason="this version of transformers runs no module by itself")
def test_modules_with_experts_draft_beside_idle_ranks(tmp_path: Path) -> None:
    path = Chains(tmp_path, "glm4-moe", 2).path
    dice = random.Random(1)
    prompts = [[dice.randrange(VOCAB) for _ in range(size)] for size in (1, 9, 41)]
    params = [greedy(16, ignore_eos=True), sampled(16, seed=5), greedy(16, ignore_eos=True)]
    with open_ranks(path) as plain:
        expected = [each.token_ids for each in plain.generate(prompts, params)]
    with open_ranks(path, speculative=MTP(k=2)) as drafting:
        single = [drafting.generate(*each) for each in zip(prompts, params, strict=True)]
        together = drafting.generate(prompts, params)
        for found in (single, together):
            assert [each.token_ids for each in found] == expected
        assert drafting.acceptance.accepted > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_travel_as_they_are(oracle: Any, dtype: str) -> None:
    """Alone beside an idle rank, and beside others, with equal bits."""
    prompts = oracle.prompts((5, 40, 33))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    with open_ranks(oracle.path, dtype=dtype) as ranks:
        together = ranks.generate(prompts, params)
        for prompt, beside in zip(prompts, together, strict=True):
            alone = ranks.generate(prompt, params)
            assert alone.token_ids == beside.token_ids and alone.logprobs == beside.logprobs


@pytest.mark.alone  # Others change how much memory is free.
def test_a_rank_that_is_gone_ends_the_engine(oracle: Any) -> None:
    with open_ranks(oracle.path, wait_limit_s=5.0) as ranks:
        for prompt in oracle.prompts((5, 9)):
            ranks.submit(prompt, greedy(60, ignore_eos=True))
        ranks.step()
        (pid,) = runtime_of(ranks).ranks.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailed):
            while ranks.busy:
                ranks.step()
    assert torch.ones(4, device="cuda").sum().item() == 4
