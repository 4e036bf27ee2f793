"""What pushes are compiled to for sm_90: whole items, loads past all caches, the rules of PDL."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from graphengine.kernels.comm.items import UNIT, PeerItems, Peers
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.linear import arrivals_needed
from graphengine.kernels.linear.packed import pack
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.residual import new_residual
from launches.compilation import (
    RecordedLaunch,
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
    record_launch,
)
from launches.quantised import random_quantised

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")

linear = importlib.import_module("graphengine.kernels.linear.linear")
linear_gluon = importlib.import_module("graphengine.kernels.linear.linear_gluon")
packed_linear = importlib.import_module("graphengine.kernels.linear.packed_linear")
push = importlib.import_module("graphengine.kernels.comm.push")
push_lanes = importlib.import_module("graphengine.kernels.comm.push_lanes")
push_residual = importlib.import_module("graphengine.kernels.comm.push_residual")


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def peers_of(ranks: int) -> Peers:
    items = new(2, ranks, 64, UNIT, dtype=torch.int64)
    return Peers(1, PeerItems.over_items(1, items, [items.data_ptr()] * ranks))


def launch_pushes(name: str, ranks: int, dtype: torch.dtype) -> None:
    """One of each kind, of two lanes."""
    peers, part, slot = peers_of(ranks), new(2, 1024, dtype=dtype), new(2, dtype=torch.int32)
    parts = new(ranks, 2, 1024, dtype=dtype)
    if name == "residual":
        residual = new_residual(2, 1024, 1, dtype=torch.bfloat16, device="cpu")
        push_residual.push_to_residual(peers, part, slot, residual, new(1024), pdl=True)
    elif name == "own residual":
        residual, own = (
            new_residual(2, 1024, 1, dtype=torch.bfloat16, device="cpu"),
            new(2, 1024, dtype=torch.float32),
        )
        push_residual.push_own_to_residual(
            peers, parts, slot, residual, new(1024), own_NH=own, pdl=True
        )
    elif name == "lanes":
        pairs, floats = new(2, 4, dtype=torch.int32), new(2, 4, dtype=torch.float32)
        lanes = push_lanes.ExpertLanes(part, slot, pairs, floats, floats.view(4, 2))
        push_lanes.push_lanes(peers, lanes, pdl=True)
    else:
        given = parts if name == "push_own_sum" else part
        getattr(push, name)(peers, given, pdl=True)


def ptx_of(name: str, ranks: int, dtype: torch.dtype) -> tuple[str, list[str]]:
    launches: list[RecordedLaunch] = []
    with launches_handed_to(launches.append, push, push_residual, push_lanes):
        launch_pushes(name, ranks, dtype)
    (launch,) = launches
    return compile_launch(launch)


def assert_looks(ptx: str, ranks: int, pairs: int = 1, *, singles: int = 0) -> None:
    """A thread polls so many pairs of items, and single ones, of all ranks."""
    looks = re.findall(r"\bld\.volatile\S*", ptx)
    items, alone = looks.count("ld.volatile.global.v2.b64"), looks.count("ld.volatile.global.b64")
    # Before the loop, in it, and of the rank's own; and the host's two words.
    assert items == 3 * ranks * pairs and alone == 3 * ranks * singles + 2
    assert len(looks) == items + alone
    assert "%globaltimer" in ptx


CASES = [
    (name, ranks, dtype)
    for name in ("push_sum", "push_gather", "push_own_sum", "residual", "own residual", "lanes")
    for ranks, dtype in ((2, torch.bfloat16), (4, torch.float32), (8, torch.bfloat16))
]


@pytest.mark.parametrize(("name", "ranks", "dtype"), CASES)
def test_items_are_stored_and_loaded_whole(name: str, ranks: int, dtype: torch.dtype) -> None:
    ptx, names = ptx_of(name, ranks, dtype)
    assert_waits_before_it_shows(ptx)
    # Two items of a thread, each of which is one access by PTX's memory model.
    stores = re.findall(r"\bst\.global\S*", ptx)
    assert stores.count("st.global.v2.b64") >= ranks
    # Where waits are over the host is told; no other store has 64 bits.
    assert {each for each in stores if "b64" in each} <= {"st.global.v2.b64", "st.global.b64"}
    assert_looks(ptx, ranks)
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    assert early == {"peers.outboxes"}


@pytest.mark.parametrize("ranks", [2, 8])
def test_polls_of_ranks_do_not_wait_for_each_other(ranks: int) -> None:
    """All loads of a look are asked for before the first is used."""
    ptx, _ = ptx_of("residual", ranks, torch.bfloat16)
    first = ptx.index("ld.volatile")
    assert ptx[first : ptx.index("bar.sync", first)].count("ld.volatile") == ranks


PLANS = {
    "fma": LinearPlan("fma", block_m=4, block_k=512),
    "dot": LinearPlan("dot", block_m=64, block_k=128, stages=3),
    "split": LinearPlan("dot", block_m=64, block_k=128, splits=2, stages=3),
    "packed": LinearPlan("dot", block_m=32, block_k=128, stages=2),
}
# Of a thread, of a tile [16, 64] or [16, 32]. The 4 outputs of `fma` are fewer than threads.
PAIRS = {"fma": 0, "dot": 4, "split": 4, "packed": 2}


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_a_product_pushes_its_part(
    monkeypatch: pytest.MonkeyPatch, name: str, squares: bool
) -> None:
    """Stores and polls whole pairs, and before it waits for its inputs reads weights alone."""
    monkeypatch.setattr(linear_gluon, "_runs_on", lambda tensor: True)
    monkeypatch.setattr(packed_linear, "_is_launched", lambda tensor: True)
    plan, peers, lanes = PLANS[name], peers_of(2), 1 if name == "fma" else 9
    packed = name == "packed"
    module = packed_linear if packed else linear
    weight = pack(random_quantised("e4m3", 1024, 512)) if packed else new(1024, 512)
    residual = new_residual(lanes, 1024, 1, dtype=torch.bfloat16, device="cpu")
    counters = new(arrivals_needed(plan, 1024), dtype=torch.int32)
    kind = "squares" if squares else "residual"
    call = getattr(module, f"packed_linear_{kind}" if packed else f"linear_{kind}")
    launch = record_launch(
        module,
        lambda: call(
            *(new(lanes, 512), weight, new(lanes, dtype=torch.int32)),
            *(() if squares else (residual, new(1024))),
            bias=new(1024),
            peers=peers,
            plan=plan,
            launch=Launch(arrivals=counters, pdl=True),
        ),
        linear_gluon,
    )
    assert launch.kernel.is_gluon() == (name != "fma")
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    assert_looks(ptx, 2, PAIRS[name], singles=1 if name == "fma" else 0)
    stores = re.findall(r"\bst\.global\S*", ptx)
    assert stores.count("st.global.v2.b64") == 2 * PAIRS[name]
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    weights = {"weight.codes", "weight.row_scales"} if packed else {"weight_ptr"}
    assert early - {"bias_ptr", "residual.next_norm"} == weights
