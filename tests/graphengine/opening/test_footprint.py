"""What steps take besides what an engine holds, from the list of their launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.vanilla_modules import write_agreeing
from engines.family_configs import CONFIGS, config_of
from graphengine import EngineConfig
from graphengine.buckets import GraphStructure
from graphengine.demo import block_path, checkpoint_path, eagle3_path
from graphengine.drafters import Drafter, NoDrafter
from graphengine.kernels.core.devices import H200, assumed
from graphengine.models.contract import ModelConfig
from graphengine.models.launches import WHOLE, Share
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.models.splitting.stages import Place
from graphengine.opening.budget import footprint as footprints
from graphengine.opening.budget import memory_plan as memory
from graphengine.opening.budget.footprint import plan_with_footprint, trace_footprint
from graphengine.opening.budget.memory_plan import MemoryPlan, plan_memory
from graphengine.opening.budget.sketch import sketch_steps
from graphengine.opening.budget.workspace import Footprint, exchanged_bytes
from graphengine.opening.engine_shape import EngineShape
from graphengine.opening.loading import read_checkpoint
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import DEMO, Subject
from graphengine.program.graph_key import GraphKey
from graphengine.program.launch_lists import record_schedule
from graphengine.speculative import (
    MTP,
    DFlash,
    DraftModel,
    Eagle3,
    Feed,
    NGram,
    RelaxedAcceptance,
    SaveHiddenStates,
    UserProvided,
)
from launches.compilation import graph_kernels
from launches.step_rules import planned, record, steps_of

GOLDEN = Path(__file__).parents[1] / "program" / "__snapshots__" / "test_golden_graphs"
SIZES: Mapping[str, Any] = {
    "device": "cpu", "dtype": "bfloat16", "max_batch": 2, "buckets": (2,), "max_seq_len": 256,
    "prefill_buckets": (16, 64),
}  # fmt: skip
THINKING = RelaxedAcceptance(begin_token_ids=[5], end_token_ids=[6, 7])
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "mtp": {"speculative": MTP(k=3)},
    "vanilla": {"speculative": MTP(k=1, style="vanilla")},
    "relaxed": {"speculative": MTP(k=2), "relaxed_acceptance": THINKING},
    "draft vocabulary": {"speculative": "d2t"},
    "draft model": {"speculative": DraftModel(checkpoint_path(), k=2)},
    "hidden states": {"speculative": "hidden"},
    "a caller's drafts": {"speculative": UserProvided(k=3)},
    "n-grams": {"speculative": NGram(k=3)},
    "a head": {"speculative": Eagle3(eagle3_path(), k=3)},
    "blocks": {"speculative": DFlash(block_path(), k=3)},
    "embeddings": {
        "prompt_embeds": True,
        "prompt_logprobs": True,
        "prompt_logprobs_out": True,
        "max_logprobs": 4,
    },
    "fp8": {"quantize": "fp8", "kv_dtype": "fp8", "activations": "fp8"},
}


@pytest.fixture
def named(tmp_path: Path) -> dict[str, Any]:
    text = tmp_path / "text"
    text.write_text("def read_lines(path): return open(path)", encoding="utf-8")
    return {
        "d2t": MTP(k=2, draft_vocab=DraftVocabulary(text=text, size=40)),
        "hidden": SaveHiddenStates(tmp_path, layers=[0, 1]),
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_a_sketch_launches_what_the_engine_launches(name: str, named: dict[str, Any]) -> None:
    options = {**SIZES, **OPTIONS[name]}
    mode = options.get("speculative")
    options["speculative"] = named[mode] if isinstance(mode, str) else mode
    subject = Subject.of_shape(DEMO)
    engine, _ = build_engine(subject, options)
    with engine:
        expected = graph_kernels(engine)
    with assumed(H200):
        sketched = {key.name: record(step) for key, step in steps_of(subject, options).items()}
    kernels = {
        name: [each.name for each in step if hasattr(each, "kernel")]
        for name, step in sketched.items()
    }
    assert kernels == {name: [each.name for each in step] for name, step in expected.items()}


@pytest.mark.parametrize(
    ("case", "shape", "options"),
    [
        ("fma", DEMO, {"max_batch": 1, "buckets": (1,)}),
        ("dot", DEMO, {"max_batch": 8, "buckets": (1, 8)}),
        ("mtp", DEMO, {"speculative": MTP(k=3)}),
        ("tiny-delta", "tiny-delta", {"speculative": MTP(k=3)}),
        ("tiny-hybrid", "tiny-hybrid", {"max_batch": 1, "buckets": (1,)}),
        ("tiny-moe", "tiny-moe", {"max_batch": 8, "buckets": (8,)}),
    ],
)
def test_graphs_on_file_have_no_more_nodes(case: str, shape: str, options: dict[str, Any]) -> None:
    """And not many fewer: torch's calls count twice."""
    with assumed(H200):
        steps = steps_of(Subject.of_shape(shape), {**SIZES, **options})
        footprint = trace_footprint(steps)
    (folder,) = GOLDEN.iterdir()
    nodes = 0
    for key in steps:
        (file,) = folder.glob(f"test_captured-{case}-{key.name.replace('/', '-')}-??????????.json")
        nodes += len(GraphStructure.from_json(file.read_text()).nodes)
    assert nodes <= footprint.nodes <= 1.5 * nodes


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("feed", ["chained", "target"])
def test_several_draft_modules_have_what_their_steps_take(
    feed: Feed, prompts: int, tmp_path: Path
) -> None:
    write_agreeing(tmp_path)
    mode = MTP(k=3, style="vanilla", feed=feed)
    options = {**SIZES, "speculative": mode, "prompts_per_prefill": prompts}
    subject = Subject.of_checkpoint(tmp_path)
    model, drafter, plan = planned(subject, options)
    with assumed(H200):
        steps = sketch_steps(model, plan, EngineConfig(**options), drafter)
        footprint = trace_footprint(steps)
    workspace, _ = sizes(plan)
    assert workspace >= footprint.workspace > 0


def step(size: int) -> Iterator[None]:
    """One tensor of 4 KB that is read by a product, then two of 2 KB at the same time."""
    matrix = torch.empty(32, size, device="meta")
    del matrix
    first, second = (torch.empty(16, size, device="meta") for _ in range(2))
    second.copy_(first)
    kept = torch.mm(first, second.t())
    del first
    yield
    kept.zero_()


def test_what_is_not_there_at_the_same_time_shares_memory() -> None:
    keys = [GraphKey("decode", size, 0, "fast") for size in (32, 8)]
    steps = {key: lambda key=key: [*step(key.size)] for key in keys}
    other = GraphKey("prefill", 1, 0, "")
    footprint = trace_footprint({**steps, other: lambda: None})
    # copy, product and fill, for each of two graphs; the product has 16 x 16.
    assert footprint == Footprint(2 * 2048 + 1024, 2 * 3 * 2, 0, products=True)
    assert trace_footprint({other: lambda: None}) == Footprint(0, 0, 0, products=False)


def test_a_graph_of_several_steps_has_the_nodes_of_each_and_the_memory_of_one() -> None:
    one, several = GraphKey("decode", 8), GraphKey("decode", 8, steps=5)

    def once() -> None:
        [*step(8)]

    def refused() -> None:
        raise AssertionError("the steps of a launch are alike: one is traced")

    found = trace_footprint({several: refused, one: once})
    assert found == trace_footprint({one: once})._replace(nodes=6 * 2 * 3)


def sizes(plan: MemoryPlan) -> tuple[int, int]:
    found = {line.name: line.bytes for line in plan.budget.lines}
    return found["workspace (estimate)"], found["graphs (estimate)"]


def test_a_plan_for_a_gpu_has_what_its_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 80 * 2**30)
    model = Subject.of_shape("tiny-moe").model
    given: dict[str, Any] = {"checkpoint_dtype": torch.bfloat16, "drafter": NoDrafter()}
    with assumed(H200):
        config = EngineConfig(**{**SIZES, "device": "cuda"})
        estimated = plan_memory(model, config, **given)
        traced = plan_with_footprint(model, config, **given)
        footprint = trace_footprint(steps_of(Subject.of_shape("tiny-moe"), SIZES))
    assert sizes(traced) == (footprint.pool_bytes, footprint.graph_bytes)
    assert sizes(traced) != sizes(estimated) and traced.graphs == estimated.graphs
    assert traced.counters == footprint.counters
    config = EngineConfig(**SIZES)
    assert sizes(plan_with_footprint(model, config, **given)) == sizes(
        plan_memory(model, config, **given)
    )


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_estimate_of_workspace_is_no_less(architecture: str) -> None:
    """It is for a CPU, and compared with a GPU's steps, which can be listed."""
    subject = Subject.of_config(config_of(architecture), name=architecture)
    model, drafter, plan = planned(subject, SIZES)
    with assumed(H200):
        steps = sketch_steps(model, plan, EngineConfig(**SIZES), drafter)
        footprint = trace_footprint(steps)
    workspace, _ = sizes(plan)
    assert workspace >= footprint.workspace > 0
    assert plan.counters >= footprint.counters > 0


# How a model is spread over two ranks, and kernels by which only this rank communicates.
RANKS: Mapping[str, tuple[Mapping[str, Any], set[str]]] = {
    "shares of layers": (
        {"tensor_parallel": 2},
        {"_push_candidates_kernel", "_push_kernel", "_all_reduce_kernel"},
    ),
    "shares and drafts": (
        {"tensor_parallel": 2, "speculative": MTP(k=2)},
        {"_push_candidates_kernel", "_push_kernel", "_all_reduce_kernel"},
    ),
    "experts": (
        {"tensor_parallel": 2, "expert_parallel": True},
        {"_push_candidates_kernel", "_push_kernel", "_push_to_residual_kernel"},
    ),
    "requests of their own": (
        {"data_parallel": 2},
        {"_push_lanes_kernel", "_push_to_residual_kernel", "_push_kernel"},
    ),
    "the last stage": ({"pipeline_parallel": 2}, set()),
    "the last stage and drafts": ({"pipeline_parallel": 2, "speculative": MTP(k=2)}, set()),
    "the first stage": ({"pipeline_parallel": 2}, set()),
    "the first stage and drafts": ({"pipeline_parallel": 2, "speculative": MTP(k=2)}, set()),
}


def rank_of(config: EngineConfig, share: Share) -> tuple[ModelConfig, Drafter, Place]:
    """The demo model, or one with experts where ranks spread them."""
    if not config.expert_parallel and config.data_parallel == 1:
        found = read_checkpoint(checkpoint_path(), config, share)
        return found.model, found.drafter, found.place
    model = of_rank(
        Subject.of_shape("tiny-moe").model,
        share,
        expert_parallel=config.expert_parallel,
        data_parallel=config.data_parallel > 1,
    )
    return model, NoDrafter(), Place(share, WHOLE)


@pytest.mark.parametrize("name", RANKS)
def test_several_ranks_have_what_their_steps_take(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 80 * 2**30)
    options, communicating = RANKS[name]
    config = EngineConfig(**{**SIZES, "device": "cuda", "prefill_buckets": (16, 256), **options})
    model, drafter, place = rank_of(config, Share(int("first" in name), 2))
    given: dict[str, Any] = {"checkpoint_dtype": torch.bfloat16, "drafter": drafter}
    with assumed(H200):
        plan = plan_with_footprint(model, config, **given, place=place)
        steps = sketch_steps(model, plan, config, drafter, place)
        footprint = trace_footprint(steps)
        names = {op.name for ops in record_schedule(steps).values() for op in ops}
        monkeypatch.setattr(footprints, "sketch_steps", None)
        again = plan_with_footprint(model, config, **given, place=place, footprint=plan.footprint)
    shape = EngineShape.of(model, config, drafter, torch.bfloat16)
    assert sizes(again) == sizes(plan) and again.counters == plan.counters
    assert sizes(plan) == (footprint.pool_bytes + exchanged_bytes(shape), footprint.graph_bytes)
    assert plan.counters == footprint.counters > 0
    assert {each for each in names if each.startswith(("_push", "_all_reduce"))} == communicating


def test_the_log_probabilities_of_prompts_take_nodes_by_their_length() -> None:
    nodes = []
    for largest in (128, 256):
        options = {**SIZES, "prefill_buckets": (16, largest), "prompt_logprobs": True}
        with assumed(H200):
            nodes.append(trace_footprint(steps_of(Subject.of_shape("tiny"), options)).nodes)
    assert nodes[1] > nodes[0]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (DEMO, {}),
        (DEMO, {"max_batch": 1, "buckets": (1,)}),
        (DEMO, {"speculative": MTP(k=3), "prompt_logprobs": True}),
        (DEMO, {"quantize": "fp8"}),
        (
            "llama-1b",
            {"max_batch": 32, "buckets": (32,), "max_seq_len": 4096, "prefill_buckets": (64, 1024)},
        ),
        ("tiny-moe", {}),
    ],
    ids=str,
)
def test_captured_graphs_take_no_more_than_was_planned(shape: str, options: Any) -> None:
    engine, _ = build_engine(Subject.of_shape(shape), {**SIZES, **options, "device": "cuda"})
    with engine:
        taken = sum(capture.bytes for capture in engine.report().captures)
        assert taken <= sum(sizes(engine.memory))
