"""`graphengine bench --speculative`: its engines, its checks, and what it holds against what."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoints.small_decoders import composed
from graphengine import DynamicTree, Engine, EngineConfig, SamplingParams
from graphengine.drafters.block.drafter import BlockDrafter
from graphengine.drafters.block.layers import usual_layers
from graphengine.drafters.eagle3.module import Eagle3Module
from graphengine.drafters.modules.chain import EagleDrafter
from graphengine.drafters.mtp.layer import allocate_mtp_weights
from graphengine.drafters.mtp.module import MtpModules
from graphengine.profiles import bench
from graphengine.profiles.benchmark import measure
from graphengine.profiles.benchmark.eager import comparable
from graphengine.profiles.benchmark.engines import build_engine, random_drafter
from graphengine.profiles.benchmark.measure import Work
from graphengine.profiles.benchmark.shapes import Subject, random_module, random_tokens, step_bytes
from graphengine.profiles.benchmark.speculation import Sweep, measure_sweep, read_sweep
from graphengine.speculative import FORCE_ACCEPTED, MTP, Auto, DFlash, DraftModel, Eagle3, NGram
from timelines.fake_clock import result
from timelines.small_bench import Bench, bench_command, tiny_work

CPU = {"device": "cpu", "max_batch": 1, "max_seq_len": 64}
WORK = Work(live=1, prompt_tokens=9, new_tokens=16, runs=1)
SMALL = ("--prompt-tokens", "9", "--new-tokens", "16", "--runs", "1", "--device", "cpu")
# So short that no prefill bucket of many tokens is captured.
SHORT = ("--ttft-tokens", "5", "--max-seq-len", "64")
TINY = ("--shape", "tiny", *SHORT)


def sweep(**changes: Any) -> Sweep:
    plain = {"mode": MTP(k=2), "lengths": None, "forced": None, "random_vocab": None}
    return Sweep(**(plain | changes))


@contextmanager
def open_tiny(options: dict[str, Any]) -> Iterator[Engine]:
    engine, _ = build_engine(Subject.of_shape("tiny"), options)
    with engine:
        yield engine


# Steps of several tokens.


def test_steps_are_counted_not_tokens() -> None:
    """Three tokens a step; the last step is cut, which is no slower step and no fewer tokens."""
    found = measure.steady([result(1, 2, 2, 2, 3, 3, 3, 5, 5, 5, 6)])
    assert (found.steps, found.seconds, found.gaps) == (3, 4.0, [1.0, 2.0, 1.0])
    assert found.tokens_per_step == 3.0
    assert found.tokens_per_s == 3.0 * 3 / 4.0


def test_rows_that_accept_unequally_are_one_step() -> None:
    first, second = result(1, 2, 2, 3, 4, 4, 4, 5), result(1, 2, 3, 3, 4, 5, 5, 6)
    found = measure.steady([first, second])
    assert (found.steps, found.seconds) == (3, 3.0)
    assert found.tokens_per_step == (1 + 3 + 2 + 1) / 2


def test_a_single_step_is_too_few() -> None:
    with pytest.raises(ValueError, match="ask for more new tokens"):
        measure.steady([result(1, 1, 1)])
    with pytest.raises(ValueError, match="leave 1 steps"):
        measure.steady([result(1, 2, 2, 3)])


# Random drafters.


def test_a_shape_gets_a_module_of_its_layers() -> None:
    model = Subject.of_shape("llama-8b").model
    module = random_module(model)
    weights = allocate_mtp_weights(module, device="meta", dtype=torch.bfloat16).named()
    assert weights["mtp.fc.weight"].shape == (4096, 8192)
    assert weights["mtp.layers.0.mlp.down_proj.weight"].shape == (4096, 14336)
    assert (module.modules, module.decoder.num_layers, module.norm_eps) == (1, 1, model.norm_eps)


def test_random_draft_tokens_ascend() -> None:
    ids = random_tokens(256, 64)
    assert ids.dtype == torch.int64 and ids.tolist() == sorted({*ids.tolist()})
    assert ids.numel() == 64 and int(ids.min()) >= 0 and int(ids.max()) < 256
    assert torch.equal(ids, random_tokens(256, 64))
    assert torch.equal(random_tokens(8, 8), torch.arange(8))
    for size in (0, 257):
        with pytest.raises(ValueError, match=f"vocabulary of {size} tokens of 256"):
            random_tokens(256, size)


def test_an_engine_of_a_shape_drafts() -> None:
    options = CPU | {"speculative": MTP(k=2)}
    engine, _ = build_engine(Subject.of_shape("tiny"), options, random_vocab=32)
    with engine:
        assert isinstance(engine.core.drafter, EagleDrafter)
        modules = engine.core.drafter.modules
        assert isinstance(modules, MtpModules) and modules.vocabulary is not None
        assert modules.vocabulary.numel() == 32
        assert engine.memory.draft_lengths == (0, 2)
        assert engine.core.description["speculative"] == "mtp eagle, k=2"
        assert all(tensor.isfinite().all() for tensor in engine.core.drafter.weights.tensors())


@pytest.mark.parametrize("shape", ["tiny", "tiny-delta", "tiny-moe"])
def test_a_shape_may_have_an_eagle3_head(shape: str) -> None:
    """The head has the shape's sizes, and a draft vocabulary of its own."""
    options = CPU | {"speculative": Eagle3("random", 2)}
    engine, _ = build_engine(Subject.of_shape(shape), options, random_vocab=32)
    with engine:
        drafter = engine.core.drafter
        assert isinstance(drafter, EagleDrafter) and isinstance(drafter.modules, Eagle3Module)
        assert drafter.modules.config.draft_vocabulary == 32
        assert all(tensor.isfinite().all() for tensor in drafter.weights.tensors())
        (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(result.token_ids) == 9 and engine.acceptance.proposed > 0


@pytest.mark.parametrize("shape", ["tiny", "tiny-delta", "tiny-moe"])
@pytest.mark.parametrize("kind", ["random", "random-dspark"])
def test_a_shape_may_have_a_block_drafter(shape: str, kind: str) -> None:
    """The drafter has the shape's sizes, with layers and a head as they are published."""
    options = CPU | {"speculative": DFlash(kind, 3)}
    engine, _ = build_engine(Subject.of_shape(shape), options)
    with engine:
        drafter = engine.core.drafter
        assert isinstance(drafter, BlockDrafter)
        assert drafter.config.rank == (256 if kind == "random-dspark" else 0)
        assert drafter.config.decoder.num_layers == 5
        assert all(tensor.isfinite().all() for tensor in drafter.weights.tensors())
        (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(result.token_ids) == 9 and engine.acceptance.proposed > 0


BEST = DynamicTree(nodes=4, top_k=2, depth=3)


@pytest.mark.parametrize("mode", [MTP(tree=BEST), Eagle3("random", tree=[[0], [1], [0, 0]])])
def test_a_shape_may_draft_trees(mode: MTP | Eagle3) -> None:
    engine, _ = build_engine(Subject.of_shape("tiny"), CPU | {"speculative": mode})
    with engine:
        assert engine.core.needs.depth in (2, 3)
        (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(result.token_ids) == 9 and engine.acceptance.proposed > 0


def test_a_published_drafter_s_layers() -> None:
    """Layers of z-lab/Qwen3-8B-DFlash-b16 and of deepseek-ai/dspark_qwen3_8b_block7."""
    model = Subject.of_shape("llama-8b").model
    layer = composed(model).layers[:1]
    assert usual_layers(replace(composed(model), layers=layer * 36)) == (1, 9, 17, 25, 33)
    assert usual_layers(replace(composed(model), layers=layer * 2)) == (0,)


@pytest.mark.parametrize(
    "mode",
    [DraftModel("x"), Eagle3("x", 1), DFlash("x", 1), MTP(k=1, style="vanilla")],
    ids=["model", "eagle3", "dflash", "vanilla"],
)
def test_what_needs_a_checkpoint_says_so(mode: Any) -> None:
    config = EngineConfig(device="cpu", max_batch=1, speculative=mode)
    with pytest.raises(ValueError, match="needs a checkpoint, and tiny has random weights"):
        random_drafter(Subject.of_shape("tiny"), config)


# The sweep.


def test_each_length_has_its_engines() -> None:
    assert sweep().modes(1) == [MTP(k=2)]
    assert sweep(lengths=(0, 1, 5)).modes(1) == [None, MTP(k=1), MTP(k=5)]
    assert sweep(mode=NGram(max_n=4), lengths=(2,)).modes(1) == [NGram(k=2, max_n=4)]
    assert sweep(mode=Auto()).modes(4) == [NGram(k=5, max_n=3)]
    assert sweep().forced_of(2) == [0, 1, 2]
    assert sweep(forced=(0, 3)).forced_of(2) == [0]


@pytest.fixture(scope="module")
def entries() -> list[dict[str, Any]]:
    return list(measure_sweep(sweep(lengths=(0, 1, 2)), WORK, CPU, open_tiny))


def test_every_acceptance_of_every_length_is_measured(entries: list[dict[str, Any]]) -> None:
    assert [(entry["k"], entry["forced"]) for entry in entries] == [
        (0, None), (1, None), (1, 0), (1, 1), (2, None), (2, 0), (2, 1), (2, 2)
    ]  # fmt: skip
    assert len({frozenset(entry) for entry in entries}) == 1, "entries have the same fields"
    for entry in entries:
        assert entry["ms_per_step"] > 0 and entry["itl_ms"]["p50"] > 0
        if entry["forced"] is not None:
            assert entry["tokens_per_step"] == entry["forced"] + 1
            assert entry["acceptance"]["rate"] is None, "forced rows are no statistics"
        bucket = f"decode/1/k{entry['k']}/fast" if entry["k"] else "decode/1/fast"
        assert entry["launches"].keys() == {bucket}
        assert (entry["drafts_off_ms"] is None) == (entry["k"] == 0 or entry["forced"] is not None)


@contextmanager
def open_experts(options: dict[str, Any]) -> Iterator[Engine]:
    engine, _ = build_engine(Subject.of_shape("tiny-moe"), options)
    with engine:
        yield engine


def test_the_floor_of_drafts_counts_the_experts_of_all_lanes() -> None:
    work, options = tiny_work(live=2, new_tokens=12, runs=1), CPU | {"max_batch": 2}
    mode = MTP(k=3)
    plain, drafting = measure_sweep(
        sweep(mode=mode, lengths=(0, 3), forced=()), work, options, open_experts
    )
    assert 2 <= plain["experts_read"] < drafting["experts_read"] <= 8
    # Three runs: one of all lanes, and two of a lane a row, of which each takes two experts.
    assert 2 + 2 * 2 <= drafting["drafter_experts_read"] <= 8 + 2 * 4
    assert plain["drafter_experts_read"] == 0
    model = Subject.of_shape("tiny-moe").model
    expert, context = 3 * 32 * 64 * 4, work.prompt_tokens + work.new_tokens / 2
    module = allocate_mtp_weights(random_module(model), device="meta", dtype=torch.float32)
    kv = 2 * context * 2 * 2 * 64 * 4
    runs = 3 * (module.nbytes - 8 * expert + 256 * 64 * 4 + kv)
    for entry, drafts in ((plain, 0), (drafting, runs)):
        read = step_bytes(
            model, context=context, rows=2, dtype=torch.float32, experts=entry["experts_read"]
        )
        drafts += entry["drafter_experts_read"] * expert
        assert entry["step_bytes"] == pytest.approx(read + drafts, abs=2)


def test_drafts_of_no_weights_read_what_the_step_reads(entries: list[dict[str, Any]]) -> None:
    plain, one, *_ = entries
    assert plain["experts_read"] is plain["drafter_experts_read"] is None
    model = Subject.of_shape("tiny").model
    context = WORK.prompt_tokens + WORK.new_tokens / 2
    read = step_bytes(model, context=context, rows=1, dtype=torch.float32)
    assert plain["step_bytes"] == read < one["step_bytes"]
    (found,) = measure_sweep(sweep(mode=NGram(k=2), forced=()), WORK, CPU, open_tiny)
    assert found["step_bytes"] == read


def test_an_engine_may_have_more_slots_than_live_rows() -> None:
    """One plain and one speculating engine; each serves the row by the bucket of one."""
    work, options = tiny_work(live=1, new_tokens=6, runs=1), CPU | {"max_batch": 2}
    (entry,) = measure_sweep(sweep(mode=MTP(k=1), forced=()), work, options, open_tiny)
    assert [*entry["launches"]] == ["decode/1/k1/fast"]


@pytest.mark.parametrize(
    ("device", "fastest"),
    [("cpu", "dot"), pytest.param("cuda", "fma", marks=pytest.mark.gpu)],
)
@pytest.mark.usefixtures("cpu_defaults")
def test_the_fastest_plain_engine_is_what_the_device_takes_unasked(
    device: str, fastest: str
) -> None:
    """Whatever family the row asks for."""
    options: dict[str, Any] = {**CPU, "device": device, "row_family": "fma"}
    opened: list[str] = []

    @contextmanager
    def noted(options: dict[str, Any]) -> Iterator[Engine]:
        with open_tiny(options) as engine:
            opened.append(engine.row_family)
            yield engine

    (plain,) = measure_sweep(sweep(lengths=(0,), forced=()), WORK, options, noted)
    assert opened == [plain["row_family"]] == [fastest]


def test_steps_are_launches(entries: list[dict[str, Any]]) -> None:
    """15 tokens after the first: one replay is launched ahead of the end."""
    for entry in entries[1:]:
        if entry["forced"] is not None:
            (launches,) = entry["launches"].values()
            needed = -(-15 // (entry["forced"] + 1))
            assert needed <= launches <= needed + 1


def test_both_plain_engines_stand_beside_each_entry(entries: list[dict[str, Any]]) -> None:
    """One row is one lane, which takes `fma`; with drafts it has several, which take `dot`."""
    assert [entry["row_family"] for entry in entries] == ["fma"] + ["dot"] * 7
    plain = entries[0]
    assert plain["ratio"] == {"same_family": 1.0, "fastest": 1.0}
    for entry in entries:
        for name in ("same_family", "fastest"):
            ratio = entry["ms_per_step"] / entry["plain_ms"][name]
            assert entry["ratio"][name] == pytest.approx(ratio)
        assert entry["plain_ms"]["fastest"] == plain["ms_per_step"]
        same = entry["plain_ms"]["same_family"] == plain["ms_per_step"]
        assert same == (entry["row_family"] == "fma")
        assert entry["break_even_tokens"] == entry["ratio"]["fastest"]


def test_only_strict_tokens_are_held_against_plain_ones(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        strict = entry["k"] > 0 and entry["forced"] is None
        assert entry["checked"]["expected_tokens"] == (16 if strict else 0)


def test_tokens_that_differ_stop_the_measurement() -> None:
    """Every token of the plain engine's must come: the target's own are changed after them."""

    @contextmanager
    def other_weights(options: dict[str, Any]) -> Iterator[Engine]:
        with open_tiny(options) as engine:
            if engine.core.needs.length:
                engine.model.weights.lm_head.copy_(engine.model.weights.lm_head.flip(0))
            yield engine

    with pytest.raises(
        RuntimeError, match=r"prompt 0 of another engine, expected and here: .*differ"
    ):
        list(measure_sweep(sweep(), WORK, CPU, other_weights))


def test_other_numerics_are_not_compared() -> None:
    @contextmanager
    def other_blocks(options: dict[str, Any]) -> Iterator[Engine]:
        block_size = 8 if options.get("speculative") else 16
        with open_tiny(options | {"block_size": block_size}) as engine:
            yield engine

    with pytest.raises(RuntimeError, match="tokens cannot be compared"):
        list(measure_sweep(sweep(), WORK, CPU, other_blocks))


def test_a_tree_with_numerics_of_its_own_is_measured_without_a_comparison() -> None:
    tree = DynamicTree(nodes=3, top_k=2, depth=2)

    @contextmanager
    def other_blocks(options: dict[str, Any]) -> Iterator[Engine]:
        block_size = 8 if options.get("speculative") else 16
        with open_tiny(options | {"block_size": block_size}) as engine:
            assert comparable(engine, engine.numerics_id)
            yield engine

    entries = list(measure_sweep(sweep(mode=MTP(tree=tree), forced=()), WORK, CPU, other_blocks))
    assert [entry["k"] for entry in entries] == [3] and entries[0]["tokens_per_step"] >= 1


def test_steps_without_drafts_are_no_speculative_step() -> None:
    @contextmanager
    def narrow(options: dict[str, Any]) -> Iterator[Engine]:
        with open_tiny(options) as engine:
            engine.scheduler.width = 1
            yield engine

    with pytest.raises(RuntimeError, match=r"steps without 2 drafts were measured: \['decode/1/fa"):
        list(measure_sweep(sweep(), WORK, CPU, narrow))


# The command.


@pytest.fixture
def run_bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    return bench_command(capsys, SMALL)


def test_the_sweep_is_part_of_its_row(run_bench: Bench) -> None:
    options = ("--speculative", "mtp:3", "--drafts", "0,2", "--force-accepted", "2,3")
    sizes = ("--batch", "1,2", "--new-tokens", "14", "--draft-vocab", "40")
    status, out, _ = run_bench(*TINY, *sizes, *options, "--json")
    assert status == 0
    rows = json.loads(out)["rows"]
    assert [row["live"] for row in rows] == [1, 2], "no row of the default sizes"
    for row in rows:
        found = row["speculation"]
        assert (found["mode"], found["random_vocab"]) == ("mtp eagle, k=3", 40)
        accepted = [(entry["k"], entry["forced"]) for entry in found["entries"]]
        assert accepted == [(0, None), (2, None), (2, 2)]


def test_a_checkpoint_brings_its_own_modules(run_bench: Bench) -> None:
    options = ("--speculative", "mtp:1", "--draft-vocab", f"{__file__}:256")
    sizes = ("--force-accepted", "1", "--new-tokens", "8")
    status, out, _ = run_bench("--batch", "1", *SHORT, *options, *sizes)
    assert status == 0
    assert "mtp eagle, k=1, draft vocabulary of 256 tokens" in out
    assert "strict" in out and "force 1" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speculative", "mtp:x"), "speculative='mtp:x' must be off, auto, mtp"),
        (("--drafts", "1"), "--drafts goes with --speculative"),
        (("--force-accepted", "1", "--speculative", "off"), "--force-accepted goes with"),
        (("--draft-vocab", "9"), "--draft-vocab goes with --speculative"),
        (("--speculative", "mtp", "--drafts", "-1"), "drafts='-1' must be integers from 0 up"),
        (("--speculative", "mtp", "--drafts", "32"), "k=32 drafts"),
        (("--speculative", "mtp", "--draft-vocab", "x:9"), "draft-vocab='x:9' must be positive"),
        (("--speculative", "mtp", "--draft-vocab", "8,9"), "--draft-vocab 8,9: name one size"),
        (("--speculative", "mtp", "--draft-vocab", "257"), "vocabulary of 257 tokens of 256"),
        (("--speculative", "ngram", "--draft-vocab", "9"), "--draft-vocab is for mtp"),
        (("--speculative", "model:x"), "draft model x, k=3: this needs a checkpoint"),
        (("--speculative", "mtp", "--batch", "32"), "feed 128 tokens a step"),
        (("--speculative", "mtp", "--row-family", "fma"), "row_family='fma' serves up to 2 lanes"),
    ],
)
def test_errors_come_before_anything_is_measured(
    run_bench: Bench,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "measure_all", None)
    status, printed, errors = run_bench(*TINY, "--batch", "1", *arguments)
    assert status == 2 and printed == "" and message in errors


def test_forced_from_outside_is_refused(run_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_ACCEPTED, "1")
    monkeypatch.setattr(bench, "measure_all", None)
    status, _, errors = run_bench(*TINY, "--batch", "1", "--speculative", "mtp")
    assert status == 2 and f"{FORCE_ACCEPTED} is set" in errors


def test_a_checkpoints_vocabulary_is_a_texts() -> None:
    options = argparse.Namespace(
        speculative="mtp:2", drafts=None, force_accepted=None, draft_vocab="some.txt:9"
    )
    found = read_sweep(options, Subject.of_shape("demo"))
    assert found is not None and isinstance(found.mode, MTP)
    assert found.mode.draft_vocab is not None and found.mode.draft_vocab.size == 9
    assert found.random_vocab is None and found.lengths is None
