"""The measurement of packed weights: its plans, its search, and its file; nothing is timed here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.packed import unpack
from graphengine.kernels.linear.packed_linear import check_packed_plan
from graphengine.kernels.linear.quantised import dequantise
from graphengine.profiles import quantised_chain
from graphengine.profiles.benchmark.shapes import model_shape
from graphengine.profiles.tuning import packed_chain
from graphengine.profiles.tuning.packed_chain import (
    KINDS,
    SHARED_BYTES,
    PackedChain,
    candidate_plans,
    packed_plans,
    random_weight,
    shared_bytes,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swiglu", [False, True])
def test_random_weights_give_products_of_order_one(kind: str, swiglu: bool) -> None:
    weight = random_weight(KINDS[kind], 144, 512, swiglu=swiglu, device=CPU, seed=3)
    values = dequantise(unpack(weight))
    assert values.shape == (144, 512) and weight.swiglu == swiglu
    assert 0.3 < float(values.square().sum(dim=1).mean()) < 3


@pytest.mark.parametrize("kind", ["e4m3", "int4", "nvfp4"])
@pytest.mark.parametrize("family, lanes", [("fma", 1), ("dot", 8), ("dot", 32)])
@pytest.mark.parametrize("M, K", [(6144, 4096), (4096, 14336), (28672, 4096), (2048, 2048)])
def test_candidates_are_valid_and_fit(
    kind: str, family: quantised_chain.RowFamily, lanes: int, M: int, K: int
) -> None:
    plans = candidate_plans(KINDS[kind], M, K, family, lanes)
    assert len(plans) > 5 and len(set(plans)) == len(plans)
    for plan in plans:
        check_packed_plan(plan, KINDS[kind].format)
        assert plan.family == family
    assert all(shared_bytes(plan, KINDS[kind], K, lanes) <= SHARED_BYTES for plan in plans[1:])


def search_of(chain: PackedChain, *, limit: int = 4) -> quantised_chain.Search:
    return quantised_chain.Search(chain, KINDS["int4"], "fma", 1, limit)


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> PackedChain:
    if INTERPRETED:
        pytest.skip("references run")
    monkeypatch.setattr(packed_chain, "PROGRAMS", (1, 100))
    monkeypatch.setattr(packed_chain, "IN_FLIGHT_BYTES", 1)
    config = replace(model_shape("tiny"), hidden_size=256, ffn_size=256)
    return PackedChain(config, KINDS["int4"], torch.bfloat16, CPU, layers=2, rows=1)


def test_the_fastest_plan_stays(chain: PackedChain, monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of(chain)
    heuristic = search.plans["down"]
    offered = [plans["down"] for plans in search.candidates("down")]
    assert offered[0] == heuristic and 2 < len(offered) == len(set(offered)) <= 5
    # The later a chain, the faster it seems.
    monkeypatch.setattr(
        quantised_chain,
        "alternating_times",
        lambda runs, device: [9.0 - i for i in range(len(runs))],
    )
    search.step("down", float("inf"))
    assert search.plans["down"] == offered[-1]
    assert search.plans.replace({"down": heuristic}) == packed_plans(
        chain.config, KINDS["int4"].format, "fma"
    )
    assert {each.us for each in search.tried["down"]} == {
        (9.0 - i) / chain.layers for i in range(len(offered))
    }


def test_plans_that_are_wrong_are_refused(
    chain: PackedChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = search_of(chain)
    wrong, right = search.candidates("down")[1], search.plans
    error = chain.error
    assert error(right, 1) < 1e-6, "on a CPU both are references"
    monkeypatch.setattr(chain, "error", lambda plans, rows: float("inf") if plans == wrong else 0.0)
    found = {each.plans: each for each in search.measure([right, wrong])}
    assert found[right].refused is None and found[right].us is None
    assert found[wrong].refused == "off by inf > 0.03"


def test_an_error_is_the_largest_difference(
    chain: PackedChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = search_of(chain).plans
    assert chain.error(plans, 1) < 1e-6
    weight = chain.weights[0, "gate_up"]
    weight.codes[0] ^= 0x1111
    assert 0.01 < chain.error(plans, 1) < 10
    assert weight.scales is not None
    weight.scales[0, 0, 0] = float("nan")
    assert chain.error(plans, 1) == float("inf")


def test_nothing_is_measured_after_the_time(chain: PackedChain) -> None:
    search = search_of(chain)
    before = search.plans
    search.step("down", 0.0)
    assert search.plans == before and search.tried == {"down": []}


def test_the_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if INTERPRETED:
        pytest.skip("references run")
    file = tmp_path / "chain.json"
    common = ["--shape", "tiny", "--kind", "int4", "e4m3", "--device", "cpu", "--out", str(file)]
    quantised_chain.main([*common, "--family", "dot", "--rows", "1,3"])
    results = json.loads(file.read_text())
    assert [(each["kind"], each["rows"]) for each in results] == [
        ("int4", 1), ("int4", 3), ("e4m3", 1), ("e4m3", 3)
    ]  # fmt: skip
    for each in results:
        assert each["plain"]["us"] is None and each["packed"][0]["us"] is None
        assert not each["refused"] and each["plain"]["bytes"] > each["packed"][0]["bytes"]
        assert set(each["packed"][0]["plans"]) == {"qkv", "output", "gate_up", "down"}
    assert "tiny int4 dot 1 rows: not timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--family", "fma", "--rows", "3"], "--rows 3: fma serves up to 2"),
        (["--family", "dot", "--seconds", "0"], "seconds=0.0 and options.candidates=24 must be"),
        (["--family", "dot", "--out", "/nowhere/a.json"], "there is no such folder"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        quantised_chain.main(["--shape", "tiny", "--kind", "int4", *arguments])
    assert message in capsys.readouterr().err
