"""Two ranks, or four, on a GPU each; where there is one, two share it, and take turns."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from checkpoints.few_layers import block_drafter, few_layers
from engines.churn import Owners, come_and_go
from engines.eager_steps import Eager
from engines.small_engine import LONG, OTHER, PROMPT, greedy, open_engine, sampled
from graphengine import Engine
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.parallel.ranks import ONE_DEVICE, RankFailed
from graphengine.speculative import MTP, DFlash, DraftModel, Speculative
from graphengine.testing import no_alloc, no_sync

pytestmark = pytest.mark.gpu

RANKS = 4 if torch.cuda.device_count() > 3 else 2
PROMPTS = [PROMPT, OTHER, LONG]
CHUNK = LONG * 3


def open_ranks(**options: object) -> Engine:
    small = {"device": "cuda", "dtype": "float32", "max_batch": 2, "wait_limit_s": 60.0}
    return open_engine(tensor_parallel=RANKS, **small | options)


@pytest.fixture(autouse=True)
def on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv(ONE_DEVICE, "1")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() < 2:
            patch.setenv(ONE_DEVICE, "1")
        with open_ranks() as engine:
            yield engine


def runtime_of(engine: Engine) -> DriverRuntime:
    assert isinstance(engine.runtime, DriverRuntime)
    return engine.runtime


def assert_equal_ranks(engine: Engine) -> None:
    digests = runtime_of(engine).digests()
    assert len(digests) == engine.config.tensor_parallel and len(set(digests)) == 1


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(PROMPTS, greedy(16))]


def test_ranks_say_what_one_says(engine: Engine) -> None:
    with open_engine(device="cpu", max_batch=2) as alone:
        expected = tokens(alone)
    assert tokens(engine) == expected
    assert_equal_ranks(engine)


@pytest.mark.parametrize(
    "mode",
    [
        MTP(k=3, min_confidence=0.3),
        MTP(tree=[[0], [1], [0, 0]]),
        DFlash(block_drafter(), k=3),
        DraftModel(few_layers(), k=2),
    ],
    ids=lambda mode: type(mode).__name__ + ("-tree" if getattr(mode, "tree", None) else ""),
)
def test_drafts_change_no_token(engine: Engine, mode: Speculative) -> None:
    expected = tokens(engine)
    with open_ranks(speculative=mode) as drafting:
        assert tokens(drafting) == expected
        assert drafting.acceptance.accepted > 0
        assert_equal_ranks(drafting)


def test_ranks_have_fp8_caches_and_time_chunks() -> None:
    options = {"kv_dtype": "fp8", "kv_calibration": LONG, "max_prefill_ms_per_step": 1000.0}
    with open_ranks(**options) as engine:
        said = tokens(engine)
        assert engine.runtime.chunk_times is not None
        assert_equal_ranks(engine)
        assert tokens(engine) == said


@pytest.mark.parametrize("max_batch", [1, 4])
def test_ranks_have_some_experts_each(glm_checkpoints: dict[str, Any], max_batch: int) -> None:
    """Pairs one by one in both row families, grouped, and those of chunks."""
    oracle = glm_checkpoints["glm-norms-biases"]
    options = {"device": "cuda", "dtype": "float32", "max_batch": max_batch, "wait_limit_s": 60.0}
    # Ten experts are two ranks', wherever there are more.
    options |= {"tensor_parallel": 2, "expert_parallel": True}
    with open_engine(oracle.path, **options) as engine:
        for result in engine.generate(oracle.prompts((3, 40, 17)), greedy(24, ignore_eos=True)):
            oracle.assert_greedy(result)
        assert_equal_ranks(engine)


def test_replays_are_what_eager_steps_are(engine: Engine) -> None:
    """The driver's steps are eager, those of the other ranks are replays."""
    params = sampled(12, seed=3, top_k=20)
    expected = [result.token_ids for result in engine.generate(PROMPTS, params)]
    with runtime_of(engine).replaced(Eager):
        assert [result.token_ids for result in engine.generate(PROMPTS, params)] == expected
        assert_equal_ranks(engine)
    assert [result.token_ids for result in engine.generate(PROMPTS, params)] == expected


def test_a_rank_that_is_late_is_waited_for(engine: Engine) -> None:
    expected = engine.generate(PROMPT, greedy()).token_ids
    request = engine.submit(PROMPT, greedy())
    engine.step()
    pid, *_ = runtime_of(engine).ranks.pids
    os.kill(pid, signal.SIGSTOP)
    subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -CONT {pid}"])
    while engine.busy:
        engine.step()
    assert tuple(request.token_ids) == expected
    assert_equal_ranks(engine)


def test_a_recording_tells_who_was_late(engine: Engine) -> None:
    recorder = engine.recorder
    recorder.start()
    engine.submit(PROMPT, greedy(40, ignore_eos=True))
    for _ in range(5):
        engine.step()
    pid, *_ = runtime_of(engine).ranks.pids
    os.kill(pid, signal.SIGSTOP)
    subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -CONT {pid}"])
    while engine.busy:
        engine.step()
    recorder.stop()
    records = recorder.replays()
    known = records[records["last_rank"] >= 0]
    latest = known[known["skew_us"].argmax()]
    assert len(known) > 30 and latest["last_rank"] == 1 and latest["skew_us"] > 0.2e6
    waited = recorder.header()["ranks"]
    assert 0.2 < waited["waited_s"] < waited["seconds"]
    recorder.clear()


def test_a_cancelled_request_leaves_ranks_in_step(engine: Engine) -> None:
    expected = tokens(engine)
    for _ in range(3):
        request = engine.submit(LONG, greedy(40))
        engine.step()
        engine.step()
        request.cancel()
    assert tokens(engine) == expected
    assert_equal_ranks(engine)


def test_ten_thousand_tokens_come_and_go() -> None:
    """With pauses and cancels, on two GPUs; ranks that share one take turns, and have fewer."""
    dice, steps = random.Random(9), count()
    pool = {"max_batch": 4, "kv_blocks": 29, "swap_blocks": 400, "prompt_logprobs": True}
    tokens = 10_000 if torch.cuda.device_count() > 1 else 500
    with open_ranks(**pool) as engine:

        def stepped() -> None:
            if next(steps) % 50 == 0:
                assert_equal_ranks(engine)

        owners = Owners(engine, dice)
        for reached in range(500, tokens + 1, 500):
            come_and_go(owners, engine, dice, tokens=reached, stepped=stepped)
        owners.leave()
        while engine.busy:
            engine.step()
        engine.stop_callback = None
        assert engine.counters["tokens"] > tokens
        owners.check(engine, at_once=1)
        assert_equal_ranks(engine)


def test_steady_steps_neither_wait_nor_allocate(engine: Engine) -> None:
    """What the driver does between replays; other ranks do the same, but decide nothing."""
    engine.submit(PROMPT, greedy(60, ignore_eos=True))
    for _ in range(8):
        engine.step()
    with no_sync(), no_alloc():
        for _ in range(20):
            engine.step()
    while engine.busy:
        engine.step()


def open_chunks(**options: object) -> Engine:
    """With chunks of more lanes than are pushed whole."""
    options |= {"prefill_buckets": (8, 96), "max_seq_len": 256, "prompt_logprobs": True}
    return open_ranks(**options)


def test_chunks_are_what_they_are_in_one_rank_and_end() -> None:
    prompts = [CHUNK + PROMPT, CHUNK + OTHER]
    with open_engine(device="cpu", max_batch=2, max_seq_len=256) as alone:
        expected = [each.token_ids for each in alone.generate(prompts, greedy())]
    with open_chunks() as engine:
        group = runtime_of(engine).groups.tensor
        assert group is not None and group.peers is not None and group._torch_group is None
        assert not group.peers.hold(torch.zeros(96, engine.model.config.hidden_size))
        _, summed, split = group._memory.tensors
        assert summed is not None and split is not None

        def tags() -> tuple[int, int]:
            return int(split.tags[0]), int(summed.tags[0])

        # Of such small chunks more than two ranks have some lanes each, unless all are asked for.
        split_before, summed_before = tags()
        assert [each.token_ids for each in engine.generate(prompts, greedy())] == expected
        assert_equal_ranks(engine)
        split_after, summed_after = tags()
        assert (split_after > split_before) == (RANKS > 2) == (summed_after == summed_before)
        scored = replace(greedy(), prompt_logprobs=0)
        assert [each.token_ids for each in engine.generate(prompts, scored)] == expected
        assert tags()[0] == split_after and tags()[1] > summed_after


def assert_fails(engine: Engine) -> None:
    """A rank of the engine is gone."""
    with pytest.raises(RankFailed):
        while engine.busy:
            engine.step()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_in_a_chunk_ends_the_engine(fault: signal.Signals) -> None:
    with open_chunks(wait_limit_s=5.0) as engine:
        pid, *_ = runtime_of(engine).ranks.pids
        engine.generate(CHUNK, greedy(2))
        os.kill(pid, fault)
        engine.submit(CHUNK, greedy(60, ignore_eos=True))
        assert_fails(engine)
    assert torch.ones(4, device="cuda").sum().item() == 4


@pytest.mark.alone  # Others change how much memory is free.
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_engine(fault: signal.Signals) -> None:
    free, _ = torch.cuda.mem_get_info()
    with open_ranks(wait_limit_s=5.0) as engine:
        engine.submit(PROMPT, greedy(60, ignore_eos=True))
        engine.step()
        pid, *_ = runtime_of(engine).ranks.pids
        os.kill(pid, fault)
        assert_fails(engine)
    # The device is as it was.
    assert torch.ones(4, device="cuda").sum().item() == 4
    with open_engine(device="cuda", dtype="float32", max_batch=2) as alone:
        assert len(tokens(alone)) == len(PROMPTS)
    assert torch.cuda.mem_get_info()[0] > free - 2**30
