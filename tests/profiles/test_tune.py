"""The search for plans with an injected timer, its chain on references, and its command."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from checkpoints.small_decoders import block_in, composed
from graphengine import EngineConfig
from graphengine.cli import main as cli
from graphengine.kernels.core.devices import H200, SHARED_BYTES, Device, assumed
from graphengine.kernels.experts.plans import expert_plan
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import Epilogue, SampleTiles
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.kernels.linear.packed_cut import packed_bytes, packed_plan
from graphengine.kernels.linear.plans import (
    LinearKind,
    LinearPlan,
    RowFamily,
    dot_bytes,
    heuristic_plan,
)
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks import gqa
from graphengine.models.blocks.experts import Experts, ExpertsWeights
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mlp import Mlp
from graphengine.models.blocks.swiglu import SwigluWeights
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.inner.inner_decoder import InnerDecoder
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import LinearPlans, heuristic_linear_plan, heuristic_plans
from graphengine.models.plans import plan_limits, tuning_tables
from graphengine.models.plans.chains import chain_length, chain_linear, inner_model, new_chain
from graphengine.models.plans.tuning_tables import TuningKey
from graphengine.models.quantised.rounding import ROUNDED_KINDS
from graphengine.models.routing import StepRoutes
from graphengine.models.states import StateTensors
from graphengine.profiles import tune
from graphengine.profiles.benchmark.engines import rounded_model
from graphengine.profiles.benchmark.shapes import model_shape
from graphengine.profiles.tuning import candidates, chain_bench
from graphengine.profiles.tuning.chain_bench import ChainBench, Times
from graphengine.profiles.tuning.search import Step, search
from launches.tuning_cases import (
    ATTENTION,
    BF16,
    DENSE,
    DOT,
    FAMILIES,
    KINDS,
    MODEL,
    key_of,
    keys,
    small_model,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the user's own tables."""
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Candidates.

SHIPPED = tuning_tables.shipped_table("NVIDIA H200")


@settings(max_examples=60, deadline=None)
@given(key=keys())
def test_every_candidate_fits_a_small_gpu(key: TuningKey) -> None:
    small = Device((8, 7), processors=16, shared_bytes=SHARED_BYTES[8, 6])
    for plan in candidates.candidate_plans(key, small):
        plan_limits.check_plan(
            plan,
            key.kind,
            key.K,
            key.dtype,
            key.weight,
            expert=key.expert,
            most_shared=small.shared_bytes,
        )
    if key.weight is None and not key.expert:
        assert candidates.candidate_plans(key, small)


@settings(max_examples=150, deadline=None)
@given(key=keys())
def test_every_candidate_is_valid(key: TuningKey) -> None:
    plans = candidates.candidate_plans(key)
    heuristic = heuristic_linear_plan(key.linear, key.dtype, key.family)
    assert len(set(plans)) == len(plans) <= 100
    for plan in plans:
        plan_limits.check_plan(plan, key.kind, key.K, key.dtype, key.weight, expert=key.expert)
        if key.weight is not None:
            assert plan.family == ("dot" if key.expert else key.family)
            continue
        registers = plan_limits.weight_registers(plan, key.K, key.dtype)
        tiles = -(-key.K // plan.block_k)
        if plan == heuristic:
            continue
        if plan.family == "fma":
            assert 12 <= registers <= 96
            assert plan.block_m >= (4 if key.kind == "sample" else 1)
        else:
            assert dot_bytes(plan, key.dtype) <= candidates.DOT_SHARED_BYTES
            assert plan.splits == 1 or key.K % (plan.block_k * plan.splits) == 0
            assert -(-tiles // plan.splits) >= plan.stages - 1


@pytest.mark.parametrize("weight", [WeightFormat("e4m3", 1, 0), WeightFormat("int4", 1, 128)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("M, K", [(6144, 4096), (4096, 14336), (28672, 4096), (128256, 4096)])
def test_packed_weights_have_many_plans(
    weight: WeightFormat, family: RowFamily, M: int, K: int
) -> None:
    """None has more programs, or takes more memory, than leaves room for the next launch."""
    kind: LinearKind = "sample" if M == 128256 else "store"
    key = TuningKey(family, kind, M, K, BF16, weight)
    heuristic, *others = candidates.candidate_plans(key)
    assert heuristic == packed_plan(weight, M, K, family) and len(others) > 5
    lanes = 1 if family == "fma" else 8
    for plan in others:
        assert packed_bytes(plan, weight, K, lanes, weight.scale_bytes) <= 200 * 1024
        assert -(-M // plan.block_m) * plan.splits >= 90
        assert kind != "sample" or plan.splits == 1
    assert len({plan.block_m for plan in others}) >= (1 if kind == "sample" else 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("M, K", [(5760, 2880), (2880, 2880), (1536, 2048), (2048, 768)])
def test_packed_experts_have_many_plans(family: RowFamily, M: int, K: int) -> None:
    """None is another one with stages that it does not reach, and all leave room on an SM."""
    weight = WeightFormat("e2m1", 1, 32)
    kind: LinearKind = "swiglu" if M > K and M != 2048 else "residual"
    key = TuningKey(family, kind, M, K, BF16, weight, True)
    heuristic, *others = candidates.candidate_plans(key)
    assert heuristic == expert_plan(kind, M, K, BF16, family, weight) and len(others) > 20
    for plan in others:
        assert plan.family == "dot" and plan.splits == 1
        assert plan.stages <= max(2, -(-K // plan.block_k))
        assert (
            packed_bytes(plan, weight, K, 8, weight.scale_bytes) <= candidates.PACKED_SHARED_BYTES
        )
    assert len({plan.block_m for plan in others}) >= 3


@pytest.mark.parametrize("key", SHIPPED, ids=str)
def test_the_grid_holds_the_plans_that_won(key: TuningKey) -> None:
    plans = candidates.candidate_plans(key)
    assert SHIPPED[key].plan in plans
    assert 5 <= len(plans) <= 100


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("M", "K"), [(2, 1), (6, 73), (330, 72), (32, 4097), (2560, 9728)])
def test_odd_shapes_have_a_plan(kind: LinearKind, M: int, K: int, family: RowFamily) -> None:
    plans = candidates.candidate_plans(TuningKey(family, kind, M, K, BF16))
    assert plans[0] == heuristic_plan(kind, M, K, BF16, family)


def test_a_chain_exceeds_the_cache_and_is_no_longer_than_the_model() -> None:
    assert chain_bench.chain_layers(model_shape("llama-1b"), BF16) == 9
    assert chain_bench.chain_layers(model_shape("llama-8b"), BF16) == 3
    assert chain_bench.chain_layers(MODEL, BF16) == 2
    assert chain_bench.chain_layers(small_model(1), BF16) == 2
    assert chain_bench.chain_layers(small_model(30), BF16) == 30


def test_targets_of_a_model() -> None:
    targets = candidates.targets_of(MODEL, BF16, "fma")
    assert [target.names for target in targets] == [(name,) for name in DENSE]
    assert [target.key for target in targets] == [key_of(name) for name in DENSE]
    some = candidates.targets_of(MODEL, BF16, "dot", ["qkv", "down"])
    assert [target.names for target in some] == [("down",), ("qkv",)]
    # Linears of one shape share the entry of a table.
    square = small_model(ffn_size=ATTENTION.q_size)
    shared = candidates.targets_of(square, BF16, "dot", ["output"])[0]
    assert shared.names == ("down", "output")
    plans = heuristic_plans(square.linears, BF16, "dot")
    variants = shared.variants(plans)
    assert next(iter(variants.items())) == (plans["down"], plans)
    for plan, variant in variants.items():
        assert variant == plans.replace({"down": plan, "output": plan})


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_an_inner_decoder(family: RowFamily) -> None:
    """Plans are found by a linear's shape: those of its layers and of a head, which are read once
    for each code, and in CSM and Moshi not those of the projection.
    """
    moshi = read_model_config({"architectures": ["MoshiForConditionalGeneration"]})
    shapes = model_shape("csm-1b"), model_shape("qwen3-tts-1.7b"), moshi
    for config, missing in zip(shapes, ({"projection"}, set(), {"projection"}), strict=True):
        assert isinstance(config, DecoderConfig) and isinstance(config.inner, InnerDecoder)
        inner = inner_model(config)
        assert inner is not None and inner_model(inner) is None
        keys = {target.key for target in candidates.targets_of(inner, BF16, family)}
        wanted = config.inner.linears.items()
        left = {name for name, of in wanted if TuningKey.of(of, family, BF16) not in keys}
        assert left == missing
        chain = new_chain(inner, layers=2, dtype=BF16, device=torch.device("meta"))
        assert chain_length(chain.config) == 2
    assert inner_model(MODEL) is None


# The search.


class FakeBench(ChainBench):
    """Times from a function; plans that it gives a string are refused with that."""

    def __init__(self, time_of: Callable[[LinearPlans], Times | str]) -> None:
        self.time_of = time_of
        self.prepared: list[LinearPlans] = []
        self.timed: list[tuple[LinearPlans, bool]] = []

    def prepare(self, variants: Sequence[LinearPlans], *, seconds: float) -> dict[LinearPlans, str]:
        self.prepared += variants
        answers = {plans: self.time_of(plans) for plans in variants}
        return {plans: answer for plans, answer in answers.items() if isinstance(answer, str)}

    def times(self, variants: Sequence[LinearPlans], *, head: bool) -> list[Times]:
        assert set(variants) <= set(self.prepared)
        self.timed += [(plans, head) for plans in variants]
        answers = []
        for plans in variants:
            answer = self.time_of(plans)
            assert not isinstance(answer, str)
            answers.append(answer)
        return answers


LLAMA = model_shape("llama-1b")


def run_search(
    time_of: Callable[[LinearPlans], Times | str],
    family: RowFamily = "dot",
    only: Sequence[str] = DENSE,
    **options: Any,
) -> tuple[LinearPlans, list[Step], FakeBench]:
    bench, steps = FakeBench(time_of), list[Step]()
    plans = search(
        candidates.targets_of(LLAMA, BF16, family, only),
        heuristic_plans(LLAMA.linears, BF16, family),
        bench,
        report=steps.append,
        **{"seconds": math.inf} | options,
    )
    return plans, steps, bench


def distance(plan: LinearPlan, other: LinearPlan) -> float:
    """Doublings between two plans, and one for another `overlap`."""
    sizes, other_sizes = plan._replace(overlap=True)[1:], other._replace(overlap=True)[1:]
    doublings = sum(abs(math.log2(a / b)) for a, b in zip(sizes, other_sizes, strict=True))
    return doublings + (plan.overlap != other.overlap)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_best_of_each_linear_is_found(family: RowFamily) -> None:
    best = LinearPlans(
        {
            name: SHIPPED[TuningKey.of(shape, family, BF16)].plan
            for name, shape in LLAMA.linears.items()
        }
    )
    rows = tune.DEFAULT_ROWS[family]

    def time_of(plans: LinearPlans) -> Times:
        return (10 + sum(map(distance, plans.values(), best.values())),) * len(rows)

    plans, steps, bench = run_search(time_of, family)
    assert plans == best
    # A second round finds nothing better; where it meets what it has seen it measures nothing.
    assert tuple(step.target.names[0] for step in steps[:5]) == DENSE
    assert 6 <= len(steps) < 10
    assert {step.gain for step in steps[5:]} == {0.0}
    assert {head for _, head in bench.timed} == {False, True}
    assert bench.prepared[0] == heuristic_plans(LLAMA.linears, BF16, family)


def test_neighbours_are_in_place() -> None:
    """A plan of qkv that is good with one of down only: the second round finds the pair."""
    start = heuristic_plans(LLAMA.linears, BF16, "dot")
    qkv, output = (
        next(p for p in candidates.candidate_plans(key) if p != start[name])
        for name in ("qkv", "output")
        for key in [TuningKey.of(LLAMA.linears[name], "dot", BF16)]
    )

    def time_of(plans: LinearPlans) -> Times:
        if plans["output"] == output:
            return (80.0, 80.0) if plans["qkv"] == qkv else (90.0, 90.0)
        return (120.0, 120.0) if plans["qkv"] == qkv else (100.0, 100.0)

    plans, steps, bench = run_search(time_of)
    assert plans == start.replace({"qkv": qkv, "output": output})
    gains = [(step.target.names[0], round(step.gain, 3)) for step in steps if step.gain]
    assert gains == [("output", 0.1), ("qkv", 0.111)]
    # One linear differs from those in use, in everything that is measured.
    for timed, _ in bench.timed:
        assert any(
            sum(a != b for a, b in zip(timed, used, strict=True)) <= 1
            for used in (start, start.replace({"output": output}), plans)
        )


def test_rounds_are_limited() -> None:
    """Each step finds something: there is no third round."""
    clock = iter(range(10_000))
    _, steps, _ = run_search(lambda plans: (1000.0 / (1 + next(clock)),) * 2)
    assert len(steps) == 10


@pytest.mark.parametrize(("gain", "kept"), [(0.05, False), (0.15, False), (0.3, True), (5, True)])
def test_a_plan_stays_unless_it_is_clearly_beaten(gain: float, kept: bool) -> None:
    start = heuristic_plans(LLAMA.linears, BF16, "dot")
    better = candidates.candidate_plans(key_of_llama("down"))[3]

    def time_of(plans: LinearPlans) -> Times:
        return (100.0 - gain,) * 2 if plans["down"] == better else (100.0,) * 2

    plans, steps, _ = run_search(time_of, only=["down"])
    assert plans["down"] == (better if kept else start["down"])
    assert len(steps) == 1, "with the same neighbours a second round finds nothing new"
    table = steps[0].table((8, 32))
    starred = [line for line in table.splitlines() if line.startswith("* ")]
    assert len(starred) == 1
    assert f"{-gain if kept else 0:+.2f}%" in starred[0]
    assert "us at 8" in table
    assert "us at 32" in table


def key_of_llama(linear: str) -> TuningKey:
    return TuningKey.of(LLAMA.linears[linear], "dot", BF16)


def test_every_number_of_rows_counts_the_same() -> None:
    first, second = candidates.candidate_plans(key_of_llama("down"))[3:5]
    times = {first: (9.0, 111.0), second: (11.0, 80.0)}
    plans, _, _ = run_search(lambda p: times.get(p["down"], (10.0, 100.0)), only=["down"])
    assert plans["down"] == second


def test_plans_that_are_refused_do_not_win() -> None:
    fast = candidates.candidate_plans(key_of_llama("gate_up"))[2:6]

    def time_of(plans: LinearPlans) -> Times | str:
        return "gate_up is off by 7\nand so on" if plans["gate_up"] in fast else (5.0, 5.0)

    plans, steps, bench = run_search(time_of, only=["gate_up"])
    assert plans == heuristic_plans(LLAMA.linears, BF16, "dot")
    assert not {timed["gate_up"] for timed, _ in bench.timed} & set(fast)
    assert set(steps[0].refused) == set(fast)
    assert "4 refused, 0 not tried" in steps[0].table((8, 32))
    assert steps[0].table((8, 32)).endswith("  refused: gate_up is off by 7")


def test_plans_to_start_from_must_work() -> None:
    with pytest.raises(RuntimeError, match=r"LinearPlans\(.* cannot be measured: down: broken"):
        run_search(lambda plans: "down: broken")


def test_the_time_is_bounded() -> None:
    clock: Iterator[int] = iter(range(1000))
    _, steps, bench = run_search(
        lambda plans: (float(plans["down"].block_m),) * 2, seconds=5, clock=lambda: next(clock)
    )
    # Until 5: what begins a search, what begins a step, one batch, and no more.
    (step,) = steps
    assert step.target.names == ("down",)
    assert len(bench.timed) == len(step.times) == 17
    assert step.untried == len(candidates.candidate_plans(step.target.key)) - 17
    assert f"{step.untried} not tried" in step.table((8, 32))


def test_without_time_nothing_changes() -> None:
    start = heuristic_plans(LLAMA.linears, BF16, "dot")
    plans, steps, _ = run_search(lambda plans: (1.0, 1.0), seconds=0.0)
    assert (plans, steps) == (start, [])


def test_a_step_without_time_has_a_table() -> None:
    clock = iter([0, 0, 0, 0, 9, 9, 9, 9, 9, 9])
    start = heuristic_plans(LLAMA.linears, BF16, "dot")
    plans, (step,), bench = run_search(lambda p: (1.0, 1.0), seconds=5, clock=lambda: next(clock))
    assert plans == start
    assert not bench.timed
    assert "0 plans measured" in step.table((8, 32))


# The chain, and the checks, on references.


def bench_of(rows: tuple[int, ...] = (1, 20), processes: int = 0, **changes: Any) -> ChainBench:
    config, dtype = small_model(**changes), torch.float32
    model = chain_bench.chain_model(config, dtype, torch.device("cpu"), layers=2)
    assert chain_length(model.config) == 2
    return ChainBench(model, rows, processes=processes)


PLANS = LinearPlans(dict.fromkeys(LLAMA.linears, DOT))


@pytest.mark.parametrize("biases", [False, True])
def test_a_chain_is_a_decode_step_without_attention(
    biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(biases=biases)
    results = list(bench.launches(PLANS, 20, layers=2, head=True))
    assert [name for name, _ in results] == ["qkv", "output", "gate_up", "down"] * 2 + ["lm_head"]
    q_size = ATTENTION.q_size
    monkeypatch.setattr(gqa, "decode_attention", lambda qkv, *_, **__: qkv[:, :q_size])
    slot = torch.arange(20, dtype=torch.int32)
    x = bench._x.clone()
    start = Residual(x, x.clone(), x.square().sum(dim=1)[None])
    out = bench.model.decode(
        DecodeLanes(**dict.fromkeys(DecodeLanes._fields, slot)),
        start,
        StateTensors(
            torch.empty(2, 1, 2, 1, ATTENTION.num_kv_heads, ATTENTION.head_dim),
            torch.zeros((20, 1), dtype=torch.int32),
        ),
        DecodeLaunch(plans=PLANS, split_tokens=64, arrivals=slot),
    )
    chain = results[7][1]
    torch.testing.assert_close(chain.x, out.x)
    torch.testing.assert_close(chain.scaled, out.scaled)
    # And again the same: replays start where the first one did.
    *_, (_, again), _ = bench.launches(PLANS, 20, layers=2, head=True)
    assert torch.equal(again.x, chain.x)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_a_chain_of_packed_weights(kind: Any, head: bool) -> None:
    """It has each linear under the name of its format, and notices a damaged code."""
    options = EngineConfig(device="cpu", quantize=kind, quantize_lm_head=head)
    model = rounded_model(small_model(3), options)
    chain = chain_bench.chain_model(model, torch.float32, torch.device("cpu"), layers=2)
    bench = ChainBench(chain, (1, 20))
    targets = candidates.targets_of(model, BF16, "dot")
    names = [name for target in targets for name in target.names]
    assert [name.partition(".")[0] for name in names] == [*DENSE]
    assert sorted(names) == sorted(chain.config.linears) and (names[-1] != "lm_head") == head
    plans = heuristic_plans(model.linears, torch.float32, "dot")
    assert bench.prepare([plans], seconds=1) == {}
    launched = [name for name, _ in bench.launches(plans, 20, layers=2, head=True)]
    assert launched == [*[*model.linears][:-1] * 2, [*model.linears][-1]]
    # What was expected is kept; other codes are other products.
    weight, _, _ = chain_linear(chain, 0, names[0])
    assert isinstance(weight, PackedWeight)
    weight.codes[:4] ^= 0x1111
    other = plans.replace({names[1]: plans[names[1]]._replace(stages=3)})
    refused = bench.prepare([other], seconds=1)
    assert refused[other].startswith(f"{names[0]} of 1 rows is off by ")


MOE = composed(model_shape("tiny-moe"))


def expert_bench() -> ChainBench:
    routed = MOE.layers[0]
    dense = (routed[0], routed[1]._replace(block=MOE.mlp))
    config = replace(MOE, layers=(dense, routed, routed))
    chain = chain_bench.chain_model(config, torch.float32, torch.device("cpu"), layers=2)
    assert chain_length(chain.config) == 2
    return ChainBench(chain, (1, 20))


def test_a_chain_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a decode step of the layers that have experts, whichever are chosen."""
    bench = expert_bench()
    config = bench.model.config
    targets = [target.names for target in candidates.targets_of(config, BF16, "fma")]
    assert targets == [("expert_down",), ("expert_gate_up",), ("qkv",), ("output",), ("lm_head",)]
    plans = heuristic_plans(config.linears, torch.float32, "dot")
    assert bench.prepare([plans], seconds=1) == {}
    results = list(bench.launches(plans, 20, layers=2, head=True))
    assert [name for name, _ in results] == ["qkv", "output", "expert_down"] * 2 + ["lm_head"]
    attention = block_in(config, GroupedQueryAttention)
    q_size = attention.q_size
    monkeypatch.setattr(gqa, "decode_attention", lambda qkv, *_, **__: qkv[:, :q_size])
    slot = torch.arange(20, dtype=torch.int32)
    x = bench._x.clone()
    kv = torch.empty(2, 1, 2, 1, attention.num_kv_heads, attention.head_dim)
    out = bench.model.decode(
        DecodeLanes(slot, slot, slot),
        Residual(x, x.clone(), x.square().sum(dim=1)[None]),
        StateTensors(kv, torch.zeros((20, 1), dtype=torch.int32)),
        DecodeLaunch(
            plans=plans,
            split_tokens=64,
            arrivals=slot,
            routes=StepRoutes(bench._chosen.repeat(2, 1, 1)),
        ),
    )
    torch.testing.assert_close(results[5][1].x, out.x)


def test_a_chain_notices_a_damaged_expert() -> None:
    bench = expert_bench()
    plans = heuristic_plans(bench.model.config.linears, torch.float32, "dot")
    assert bench.prepare([plans], seconds=1) == {}
    blocks = bench.model.weights.blocks()
    experts = next(each for each in blocks if isinstance(each, ExpertsWeights))
    assert isinstance(experts.down, torch.Tensor)
    experts.down[bench._chosen[0, 0]] += 1
    other = plans.replace({"expert_down": plans["expert_down"]._replace(stages=4)})
    assert bench.prepare([other], seconds=1)[other].startswith("expert_down of 1 rows is off by ")


OF_EXPERTS = {
    **{"vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "max_position_embeddings": 128},
}
WITH_SHARED = {
    "Qwen2MoeForCausalLM": {"num_experts": 6, "shared_expert_intermediate_size": 40},
    "DeepseekV2ForCausalLM": {
        **{"n_routed_experts": 6, "n_shared_experts": 2, "kv_lora_rank": 40, "q_lora_rank": None},
        **{"qk_nope_head_dim": 18, "qk_rope_head_dim": 10, "v_head_dim": 22},
        **{"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    },
    "DeepseekV3ForCausalLM": {
        **{"n_routed_experts": 6, "n_shared_experts": 1, "kv_lora_rank": 40, "q_lora_rank": 30},
        **{"qk_nope_head_dim": 18, "qk_rope_head_dim": 10, "v_head_dim": 22},
        **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    },
}


@pytest.mark.parametrize("architecture", WITH_SHARED)
def test_a_chain_of_shared_experts(architecture: str) -> None:
    """Each linear is searched, latents' too; a damaged shared one, or its gate, is noticed."""
    told = OF_EXPERTS | WITH_SHARED[architecture] | {"architectures": [architecture]}
    config = composed(read_model_config(told))
    chain = chain_bench.chain_model(config, torch.float32, torch.device("cpu"), layers=2)
    bench, linears = ChainBench(chain, (1, 20)), chain.config.linears
    targets = candidates.targets_of(chain.config, BF16, "dot")
    assert {name for target in targets for name in target.names} == linears.keys()
    assert {"shared_gate_up", "shared_down", "expert_gate_up", "expert_down"} <= linears.keys()
    experts = next(each for each in chain.weights.blocks() if isinstance(each, ExpertsWeights))
    assert isinstance(experts.shared, SwigluWeights)
    assert isinstance(experts.shared.down, torch.Tensor)
    # So that what they add is no small part of the stream.
    experts.shared.down.mul_(50)
    plans = heuristic_plans(linears, torch.float32, "dot")
    assert bench.prepare([plans], seconds=1) == {}
    launched = [name for name, _ in bench.launches(plans, 20, layers=2, head=True)]
    before = {
        "Qwen2MoeForCausalLM": ["qkv", "output"],
        "DeepseekV2ForCausalLM": ["q_kv_a", "output"],
        "DeepseekV3ForCausalLM": ["q_kv_a", "q_b", "output"],
    }[architecture]
    assert launched == [*before, "expert_down"] * 2 + ["lm_head"]
    damaged = experts.shared.down if experts.shared_gate is None else experts.shared_gate
    assert isinstance(damaged, torch.Tensor)
    damaged.add_(10)
    other = plans.replace({"shared_down": plans["shared_down"]._replace(stages=3)})
    assert bench.prepare([other], seconds=1)[other].startswith("expert_down of 1 rows is off by ")


def test_chains_that_there_are_not() -> None:
    """Values longer than keys, and shared experts without gates."""
    told = OF_EXPERTS | WITH_SHARED["DeepseekV3ForCausalLM"] | {"v_head_dim": 64}
    long = read_model_config(told | {"architectures": ["DeepseekV3ForCausalLM"]})
    experts = next(
        each.block for layer in MOE.layers for each in layer if isinstance(each.block, Experts)
    )
    mlp = Mlp(hidden_size=experts.hidden_size, ffn_size=32, norm_eps=1e-6, role="shared_")
    ungated = MOE.with_blocks(
        lambda block: replace(block, shared=mlp) if isinstance(block, Experts) else block
    )
    for config in (long, ungated):
        with pytest.raises(ValueError, match=r"of latents whose values are longer than their keys"):
            chain_bench.chain_layers(config, BF16)


def test_right_results_pass() -> None:
    bench = bench_of()
    other = PLANS.replace({"down": DOT._replace(block_m=16)})
    assert bench.prepare([PLANS, other], seconds=1) == {}


@pytest.mark.parametrize("named", ["qkv", "gate_up", "output", "down", "lm_head"])
@pytest.mark.parametrize("spoil", ["value", "nan"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_wrong_results_are_refused(
    named: str, part: int, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong row of 20 in one plan of two."""
    bench = bench_of()
    changed = DOT._replace(block_m=16)

    def wrong(call: LinearCall, epilogue: Epilogue[Any]) -> Any:
        result = linear(call, epilogue)
        if call.plan != changed or call.lanes < 20:
            return result
        if isinstance(epilogue, SampleTiles):
            # Another token of the row, or none.
            best, health = result
            best[-1] = best[-1] ^ 5 if spoil == "value" else best[-1]
            health[-1] = 1 if spoil == "value" else 2
            return best, health
        target = result[part] if isinstance(result, Residual) else result
        target[..., -1] += 0.25 * target.abs().max() if spoil == "value" else math.nan
        return result

    monkeypatch.setattr(chain_bench, "linear", wrong)
    variant = PLANS.replace({named: changed})
    refused = bench.prepare([PLANS, variant], seconds=1)
    assert list(refused) == [variant]
    assert refused[variant].startswith(f"{named} of 20 rows is off by ")


def test_a_plan_that_does_not_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*operands: Any, **options: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(chain_bench, "linear", fail)
    assert bench_of().prepare([PLANS], seconds=1) == {PLANS: "PassManager::run failed"}


@pytest.mark.slow
def test_plans_are_compiled_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(processes=1)
    try:
        assert bench.prepare([PLANS], seconds=math.inf) == {}
        # What is not begun in time is not used, and not held against the plan later on.
        many = [PLANS.replace({"down": DOT._replace(stages=n)}) for n in range(1, 9)]
        late = bench.prepare(many, seconds=0)
        assert set(late.values()) == {"not compiled in time"}
        assert many[-1] in late
        assert bench.prepare(many, seconds=math.inf) == {}
    finally:
        bench.close()


# The command.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "rows='0' must be positive integers"),
        (["--rows", "1,x"], "rows='1,x' must be positive integers"),
        (["--rows", "65", "--family", "dot"], "--rows 65: dot serves up to 64"),
        (["--rows", "8"], "--rows 8: fma serves up to 2"),
        (["--seconds", "0"], "--seconds 0.0 must be positive"),
        (["--device", "cpu"], "tuning measures on an NVIDIA GPU, and --device is 'cpu'"),
    ],
)
def test_options_are_checked(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--checkpoint", "demo", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--family", "gemm"], ["--only", "qkv", "head"], ["--dtype", "int8"]]
)
def test_names_are_checked(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["tune", "--checkpoint", "demo", *options])
    assert exit_.value.code == 2
    assert f"invalid choice: '{options[-1]}'" in capsys.readouterr().err


def test_help_comes_through_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["tune", "--help"])
    assert exit_.value.code == 0
    assert "--seconds" in capsys.readouterr().out


@pytest.fixture
def on_an_h200() -> Iterator[None]:
    with assumed(H200):
        yield


def test_a_command_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    on_an_h200: None,
) -> None:
    """All but the measurement."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(tune, "compile_processes", lambda model: 3)
    monkeypatch.setattr(tune, "chain_model", lambda *setting, layers: setting)

    class Timer(FakeBench):
        def __init__(self, model: Any, rows: tuple[int, ...], *, processes: int) -> None:
            assert processes == 3
            super().__init__(lambda plans: tuple(float(r + plans["down"].block_m) for r in rows))

        def times(self, variants: Sequence[LinearPlans], *, head: bool) -> list[Times]:
            found = super().times(variants, head=head)
            return [tuple(us + 7 * head for us in times) for times in found]

        def close(self) -> None:
            closed.append(self)

    closed: list[Timer] = []
    monkeypatch.setattr(tune, "ChainBench", Timer)
    path = tuning_tables.user_table_path("NVIDIA Test")
    assert cli.main(["tune", "--shape", "llama-1b", "--dtype", "float16"]) == 0
    table = tuning_tables.read_table(path, "NVIDIA Test")
    assert table.keys() == {
        TuningKey.of(shape, family, torch.float16)
        for family in FAMILIES
        for shape in LLAMA.linears.values()
    }
    assert len(closed) == 2
    down, lm_head = (LLAMA.linears[name] for name in ("down", "lm_head"))
    entry = table[TuningKey.of(down, "dot", torch.float16)]
    assert entry.plan.block_m == 32
    # At 8 rows, and shared among 9 layers.
    assert entry.us == round((8 + 32) / 9, 1)
    assert table[TuningKey.of(lm_head, "dot", torch.float16)].us == 7.0
    assert entry.torch == torch.__version__
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert "dot, 32 rows: 7.1 us a layer, 7.0 us lm_head" in printed

    out = tmp_path / "more" / "table.json"
    options = ["--only", "down", "--family", "fma", "--rows", "2,1", "--out", str(out)]
    assert cli.main(["tune", "--shape", "llama-1b", *options]) == 0
    ((key, entry),) = tuning_tables.read_table(out, "NVIDIA Test").items()
    assert key == TuningKey.of(down, "fma", BF16)
    assert entry.us == round((2 + entry.plan.block_m) / 9, 1)

    # What a rank has of its columns.
    out = tmp_path / "more" / "ranks.json"
    options = ["--only", "down", "--family", "fma", "--tensor-parallel", "4", "--out", str(out)]
    assert cli.main(["tune", "--shape", "llama-1b", *options]) == 0
    (key,) = tuning_tables.read_table(out, "NVIDIA Test")
    part = down._replace(columns=down.columns // 4)
    assert key == TuningKey.of(part, "fma", BF16)

    # A frame's codes are drawn by a decoder of its own.
    out = tmp_path / "more" / "frames.json"
    options = ["--family", "dot", "--out", str(out)]
    assert cli.main(["tune", "--shape", "csm-1b", *options]) == 0
    found = {(key.kind, key.M, key.K) for key in tuning_tables.read_table(out, "NVIDIA Test")}
    assert {("swiglu", 16384, 2048), ("swiglu", 16384, 1024), ("sample", 2051, 1024)} <= found
    assert "the inner decoder of CsmForConditionalGeneration" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--checkpoint", "demo"]) == 2
    assert "tuning measures on an NVIDIA GPU, and torch finds none" in capsys.readouterr().err


@pytest.mark.gpu
def test_tunes_the_demo_model(tmp_path: Path) -> None:
    """A search in each family writes what an engine then takes.

    How many plans it measures in its seconds depends on the machine.
    """
    out = tmp_path / "table.json"
    options = ["--checkpoint", "demo", "--dtype", "bfloat16", "--only", "output", "lm_head"]
    assert cli.main(["tune", *options, "--seconds", "20", "--out", str(out)]) == 0
    table = tuning_tables.read_table(out, tuning_tables.device_name("cuda"))
    assert {key.family for key in table} == set(FAMILIES)
    assert {key.kind for key in table} == {"residual", "sample"}
    assert all(entry.us > 0 for entry in table.values())


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_heuristic_plans_agree_with_the_reference(family: RowFamily, dtype: torch.dtype) -> None:
    config = small_model(hidden_size=584, ffn_size=1026)
    model = chain_bench.chain_model(config, dtype, torch.device("cuda"), layers=2)
    bench = ChainBench(model, tune.DEFAULT_ROWS[family])
    plans = heuristic_plans(config.linears, dtype, family)
    assert bench.prepare([plans], seconds=math.inf) == {}
    (chain,), (whole,) = (bench.times([plans], head=head) for head in (False, True))
    assert all(0 < a < b < 10_000 for a, b in zip(chain, whole, strict=True))
