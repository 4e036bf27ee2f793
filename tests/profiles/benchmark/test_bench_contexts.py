"""Steps at contexts: rows whose KV is there already, their cells, and what does not fit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graphengine import Engine, EngineConfig
from graphengine.drafters import NoDrafter
from graphengine.opening.budget import memory_plan as memory
from graphengine.profiles import bench
from graphengine.profiles.benchmark import context_rows
from graphengine.profiles.benchmark.context_rows import (
    ContextRows,
    fill_blocks,
    kv_scales,
    standing_rows,
)
from graphengine.profiles.benchmark.contexts import Contexts, measure_contexts
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.floor.ceiling import ReadCeiling
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.tables import text
from graphengine.speculative import MTP
from timelines.small_bench import Bench, bench_command, tiny_work

# Two layers of two heads of 64, keys and values, in float32.
TOKEN_BYTES = 2 * 2 * 2 * 64 * 4
OPTIONS = {"device": "cpu", "max_batch": 3, "max_seq_len": 96, "speculative": MTP(k=1)}
BEHIND = tiny_work(prompt_tokens=60, new_tokens=6)
SHORT = ("--shape", "tiny", "--new-tokens", "5", "--runs", "1", "--ttft-tokens", "5")


@pytest.fixture(scope="module")
def drafting() -> Iterator[Engine]:
    """An engine with two caches: the target's, and its module's."""
    engine, _ = build_engine(Subject.of_shape("tiny"), OPTIONS)
    with engine:
        yield engine


@pytest.fixture
def run_bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    return bench_command(capsys)


# Rows at contexts.


def test_random_blocks_are_as_large_as_those_of_a_prompt(drafting: Engine) -> None:
    """By layer, keys apart from values, in each cache; no other block is touched."""
    pool = drafting.scheduler.pool
    scales = kv_scales(drafting, BEHIND)
    assert [tuple(scale.shape) for scale in scales] == [(2, 2), (1, 2)]
    blocks = pool.take(4)
    pool.give_back(list(blocks))
    before = [cache.clone() for cache, _ in drafting.runtime.caches]
    fill_blocks(drafting, blocks, scales, seed=7)
    for (cache, _), scale, old in zip(drafting.runtime.caches, scales, before, strict=True):
        drawn = cache[:, blocks]
        assert torch.allclose(drawn.transpose(1, 2).flatten(2).std(-1), scale, rtol=0.05)
        assert abs(float(drawn.mean())) < 0.02 * float(scale.max())
        others = [block for block in range(cache.shape[1]) if block not in blocks]
        assert torch.equal(cache[:, others], old[:, others])


def test_random_kv_follows_from_the_seed_and_the_place(
    drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So engines of other pools, with or without a drafter, decode after the same KV."""
    runtime, scales = drafting.runtime, kv_scales(drafting, BEHIND)
    fill_blocks(drafting, [3, 1, 5], scales, seed=1)
    first = [part.clone() for part in runtime.read_blocks([3, 1, 5])]
    monkeypatch.setattr(context_rows, "DRAWN_BLOCKS", 3)
    fill_blocks(drafting, [2, 4, 6], scales, seed=1)
    assert all(map(torch.equal, first, runtime.read_blocks([2, 4, 6])))
    fill_blocks(drafting, [2, 4, 6], scales, seed=2)
    assert not any(map(torch.equal, first, runtime.read_blocks([2, 4, 6])))
    monkeypatch.setattr(runtime, "caches", runtime.caches[:1])
    fill_blocks(drafting, [2, 4, 6], scales[:1], seed=1)
    assert torch.equal(first[0], runtime.read_blocks([2, 4, 6])[0])


@pytest.mark.parametrize("options", [{"kv_dtype": "fp8"}, {"dtype": "float16"}], ids=["fp8", "16"])
def test_random_kv_ends_at_the_largest_number_of_its_dtype(options: dict[str, Any]) -> None:
    """After a calibration KV reaches 448, the largest of e4m3, and some draws are larger."""
    engine, _ = build_engine(Subject.of_shape("tiny"), OPTIONS | options)
    with engine:
        caches = [cache for cache, _ in engine.runtime.caches]
        most = torch.finfo(caches[0].dtype).max
        # [layers, parts] of [layers, blocks, parts, ...].
        scales = [torch.full(cache.shape[:3:2], most / 2) for cache in caches]
        fill_blocks(engine, [1, 2], scales, seed=1)
        for part in engine.runtime.read_blocks([1, 2]):
            drawn = part.float()
            assert not drawn.isnan().any() and (drawn.min(), drawn.max()) == (-most, most)
            # 4.6% of normal values lie beyond two standard deviations, and some are rounded up.
            share = float((drawn.abs() == most).float().mean())
            assert share == pytest.approx(0.046, abs=0.02)


@pytest.mark.parametrize("prefilled", [False, True])
def test_rows_begin_after_their_contexts(drafting: Engine, prefilled: bool) -> None:
    """At true lengths on the device, and again from the same KV; then all blocks are vacant."""
    pool = drafting.scheduler.pool
    with standing_rows(drafting, BEHIND, prefilled=prefilled) as rows:
        assert rows.kept_tokens == 48
        requests = rows.submit(BEHIND.params())
        while not all(len(request.token_ids) > 1 for request in requests):
            drafting.step()
        lengths = drafting.runtime.buffers["kv_len"].tolist()
        assert all(60 < length < 66 for length in lengths)
        while drafting.busy:
            drafting.step()
        assert [request.cached_tokens for request in requests] == [48] * 3
        again = rows.run(BEHIND.params())
        assert [result.token_ids for result in again] == [
            request.result().token_ids for request in requests
        ]
        assert rows.run(BEHIND.params()[:1])[0].token_ids == again[0].token_ids
    assert pool.vacant == pool.count
    whole = drafting.generate(BEHIND.prompts(256), BEHIND.params())
    same = [result.token_ids for result in whole] == [result.token_ids for result in again]
    assert same == prefilled, "only what was prefilled continues the prompts"


def test_a_context_of_less_than_a_block_is_fed_as_a_whole(drafting: Engine) -> None:
    with standing_rows(drafting, tiny_work(prompt_tokens=16), prefilled=False) as rows:
        assert rows.kept_tokens == 0
        assert [len(result.token_ids) for result in rows.run(BEHIND.params())] == [6] * 3


def test_rows_of_recurrent_layers_begin_with_their_states() -> None:
    """States are equal in every run; a prefill would leave none there."""
    subject = Subject.of_shape("tiny-delta")
    contexts = Contexts(lengths=(60,), limit=96)
    contexts.check([BEHIND], subject)
    with pytest.raises(ValueError, match="has recurrent states, and a prefill leaves none"):
        dataclasses.replace(contexts, prefilled=True).check([BEHIND], subject)
    sizes = contexts.options(BEHIND, 60)
    engine, _ = build_engine(subject, {"device": "cpu"} | sizes)
    with engine, standing_rows(engine, BEHIND, prefilled=False) as rows:
        kept = rows.kept_tokens
        first = rows.run(BEHIND.params())
        assert [result.cached_tokens for result in first] == [kept] * 3 == [48] * 3
        again = rows.run(BEHIND.params())
        assert [one.token_ids for one in first] == [one.token_ids for one in again]
        assert engine.counters["sessions/evicted"] == engine.counters["pauses"] == 0


def test_rows_without_their_kv_are_refused(drafting: Engine) -> None:
    """They would decode at the same lengths, but nothing says where their KV came from."""
    with standing_rows(drafting, BEHIND, prefilled=False) as rows:
        rows._sessions[1].rewind(20)
        rows._sessions[1].append([1] * 20)
        with pytest.raises(RuntimeError, match=r"of 48 kept tokens the rows found \[48, 32, 48\]"):
            rows.run(BEHIND.params())


def test_rows_that_cannot_be_filled_leave_no_blocks(
    drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(engine: Engine, blocks: list[int], scales: list[torch.Tensor], *, seed: int) -> None:
        if seed == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(context_rows, "fill_blocks", fill)
    with pytest.raises(KeyboardInterrupt):
        ContextRows(drafting, BEHIND, prefilled=False)
    assert drafting.scheduler.pool.vacant == drafting.scheduler.pool.count


# Cells.


def test_one_command_fills_the_table(run_bench: Bench) -> None:
    arguments = ("--batch", "1", "--context", "300,40", "--speculative", "mtp:1", "--kernels")
    status, printed, _ = run_bench(*SHORT, *arguments, "--ttft-tokens", "5,90", "--json")
    assert status == 0
    document = json.loads(printed)
    section = document["contexts"]
    assert document["rows"] == [] and section["kv"] == "random" and section["skipped"] == []
    cells = section["cells"]
    assert [(cell["live"], cell["context"]) for cell in cells] == [(1, 40), (1, 300)]
    for cell in cells:
        engine = cell["engine"]
        assert (engine["max_seq_len"], engine["kv_blocks"]) == (305, 21)
        assert cell["prompt_tokens"] == cell["context"] and cell["checked"]["equal_runs"] == 2
        assert cell["kv_bytes"] == round((cell["context"] + 2.5) * TOKEN_BYTES)
        assert cell["step_bytes"] == cell["weight_bytes"] + cell["kv_bytes"]
        rate = cell["step_bytes"] / cell["ms_per_step"] / 1e9
        assert cell["tb_s"] == pytest.approx(rate, abs=1e-4)
        assert cell["p99.9/p50"] >= 1 and cell["floor_ms"] is None
        # Two lanes of a row have another arithmetic than one, and a plain engine for it.
        (entry,) = cell["speculation"]
        assert (engine["row_family"], entry["row_family"]) == ("fma", "dot")
        assert (entry["k"], entry["forced"]) == (1, None)
        assert entry["checked"]["expected_tokens"] == 5
        times = entry["plain_ms"]
        assert times["fastest"] == cell["ms_per_step"] != times["same_family"]
        ratio = entry["ms_per_step"] / times["fastest"]
        assert entry["ratio"]["fastest"] == pytest.approx(ratio, rel=1e-2)
    first = section["first_tokens"]
    assert first["ttft_ms"].keys() == {"5", "90"} and first["engine"]["max_seq_len"] == 94
    named = [(found["live"], found["context"]) for found in document["kernels"]]
    assert named == [(1, 40), (1, 300)]
    shown = text.describe_document(document)
    for part in (
        "contexts and 5 new tokens, 1 run; milliseconds. Tokens checked: 5 of 5 by eager steps",
        "steps of rows at contexts, random KV\n",
        "TTFT of one request, by the tokens of its prompt: ",
        "1 live of 1 at a context of 300 tokens, drafts over plain steps\n",
        "kernels, 1 live of 1, fast, at a context of 300 tokens: none on this device",
    ):
        assert part in shown


@contextmanager
def open_tiny(options: dict[str, Any]) -> Iterator[Engine]:
    engine, _ = build_engine(Subject.of_shape("tiny"), {"device": "cpu"} | options)
    with engine:
        yield engine


def planned_bytes(contexts: Contexts, live: int, context: int) -> int:
    options = contexts.options(tiny_work(live=live, new_tokens=5), context)
    config = EngineConfig(device="cpu", **options)
    plan = memory.plan_memory(
        Subject.of_shape("tiny").model, config, checkpoint_dtype=torch.bfloat16, drafter=NoDrafter()
    )
    return plan.budget.total("host")


def test_what_does_not_fit_is_skipped_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows fit at a context of 40 tokens, one at 400; an engine is as long as what fits."""
    contexts = Contexts(lengths=(40, 400), limit=512)
    limit = planned_bytes(contexts, 1, 400)
    assert planned_bytes(contexts, 2, 40) < limit < planned_bytes(contexts, 2, 400)
    works = [tiny_work(live=live, new_tokens=5, runs=1) for live in (2, 1)]
    monkeypatch.setattr(memory, "available_host_bytes", lambda: round(limit / 0.9) + 2)
    *_, section = measure_contexts(contexts, works, {"device": "cpu"}, None, None, open_tiny)
    found = [
        (cell["live"], cell["context"], cell["engine"]["max_seq_len"]) for cell in section["cells"]
    ]
    assert found == [(2, 40, 45), (1, 40, 405), (1, 400, 405)]
    (skipped,) = section["skipped"]
    assert (skipped["live"], skipped["context"], skipped["speculative"]) == (2, 400, None)
    reason = r"54 KV blocks\. host memory: .* planned, .* available, .* short"
    assert re.fullmatch(reason, skipped["reason"])


def test_a_run_in_which_nothing_fits_says_so(
    run_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1000)
    status, printed, _ = run_bench("--shape", "tiny", "--batch", "2", "--context", "8,40")
    assert status == 0
    for context, blocks in ((8, 6), (40, 10)):
        needed = (
            f"skipped: 2 live at a context of {context} tokens: {blocks} KV blocks. host memory: "
        )
        assert needed in printed
    assert "skipped: 1 live at a context of 128 tokens: time to first token. host memory" in printed


def test_a_context_of_all_positions_ends_with_the_last(run_bench: Bench) -> None:
    status, printed, _ = run_bench(*SHORT, "--batch", "1", "--context", "512", "--json")
    (cell,) = json.loads(printed)["contexts"]["cells"]
    assert status == 0
    assert (cell["context"], cell["prompt_tokens"], cell["engine"]["max_seq_len"]) == (
        512,
        507,
        512,
    )


def test_shares_of_contexts_are_of_the_larger_read_ceiling(
    run_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([4.0, 4.4])

    def measured(device: str) -> ReadCeiling:
        # So slow a memory that digits are left of the floor.
        return ReadCeiling(tb_s=next(rates) / 1e6, buffer_bytes=1, block=1, programs=1, warps=1)

    monkeypatch.setattr(bench, "measure_read_ceiling", measured)
    sizes = ("--batch", "1", "--context", "8", "--max-batch", "2", "--max-seq-len", "64")
    _, printed, _ = run_bench(*SHORT, *sizes, "--prefill-context", "--json")
    section = json.loads(printed)["contexts"]
    (cell,) = section["cells"]
    assert section["kv"] == "prefilled"
    assert (cell["max_batch"], cell["engine"]["max_seq_len"]) == (2, 64)
    floor = cell["step_bytes"] / 4.4 / 1e3
    assert cell["floor_ms"] == pytest.approx(floor, rel=1e-3)
    assert cell["share"] == pytest.approx(floor / cell["ms_per_step"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "8,x"), "context='8,x' must be positive integers"),
        (("--context", "513"), "--context 513 exceeds max_seq_len=512"),
        (("--context", "9,65", "--max-seq-len", "64"), "--context 65 exceeds max_seq_len=64"),
        (("--context", "9", "--new-tokens", "512"), "512 new tokens leave no context in"),
        (
            ("--context", "9", "--max-seq-len", "31", "--kernels", "--batch", "3"),
            "31 new tokens leave no context in max_seq_len=31",
        ),
        (("--context", "9", "--long", "9"), "--long is for rows, which --context 9 replaces"),
        (("--context", "9", "--peer", "vllm"), "vllm"),
        (("--context", "9", "--record", "x.jsonl"), "--record is for rows, which --context 9"),
        (("--prefill-context",), "--prefill-context goes with --context"),
        (("--context", "9", "--speculative", "mtp:3", "--batch", "32"), "max_batch"),
    ],
)
def test_errors_come_before_anything_is_measured(
    run_bench: Bench, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(bench, "measure_all", None)
    status, printed, errors = run_bench("--shape", "tiny", *arguments)
    assert status == 2 and printed == ""
    assert errors.startswith("graphengine: error: ") and message in errors
