"""What pushes are compiled to for sm_90: whole items, loads past all caches, the rules of PDL."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from extent import some_of
from graphengine.kernels.comm.flags import FlaggedMemory
from graphengine.kernels.comm.items import UNIT, PeerItems, Peers
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import AddResidual, StoreSquares
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import pack
from graphengine.kernels.linear.plans import LinearPlan, arrivals_needed
from graphengine.kernels.linear.residual import new_residual
from launches.compilation import (
    Op,
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
    record_launch,
)
from launches.quantised import random_quantised

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")

linear_launches = importlib.import_module("graphengine.kernels.linear.launches")
linear_gluon = importlib.import_module("graphengine.kernels.linear.gluon.linear_gluon")
pushed_sums = importlib.import_module("graphengine.kernels.linear.pushed_sums")
push = importlib.import_module("graphengine.kernels.comm.push")
push_candidates = importlib.import_module("graphengine.kernels.comm.push_candidates")
push_lanes = importlib.import_module("graphengine.kernels.comm.push_lanes")
push_residual = importlib.import_module("graphengine.kernels.comm.push_residual")
all_reduce = importlib.import_module("graphengine.kernels.comm.all_reduce")
add_parts_norm = importlib.import_module("graphengine.kernels.comm.add_parts_norm")


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
    launches: list[Op] = []
    with launches_handed_to(launches.append, push, push_residual, push_lanes):
        launch_pushes(name, ranks, dtype)
    (launch,) = launches
    return compile_launch(launch)


def assert_looks(ptx: str, ranks: int, pairs: int = 1) -> None:
    """A thread polls so many pairs of items of all ranks."""
    looks = re.findall(r"\bld\.volatile\S*", ptx)
    items, watched = looks.count("ld.volatile.global.v2.b64"), looks.count("ld.volatile.global.b64")
    # Before the loop, in it, and of the rank's own; and the host's two words.
    assert items == 3 * ranks * pairs and watched == 2 and len(looks) == items + watched
    assert "%globaltimer" in ptx


KINDS = ("push_sum", "push_gather", "push_own_sum", "residual", "own residual", "lanes")
NUMBERS = ((2, torch.bfloat16), (4, torch.float32), (8, torch.bfloat16))
CASES = [(name, *number) for name in KINDS for number in NUMBERS]
# Each kind, and each number of ranks of three kinds.
SOME = (0, 2, 4, 6, 7, 10, 11, 12, 17)


@pytest.mark.parametrize(("name", "ranks", "dtype"), some_of(CASES, *SOME))
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


@pytest.mark.parametrize("ranks", [2, 8])
def test_items_of_candidates_are_stored_and_loaded_whole(ranks: int) -> None:
    launches: list[Op] = []
    tiles = new(3, 4008, dtype=torch.int64)
    with launches_handed_to(launches.append, push_candidates):
        push_candidates.push_candidates(peers_of(ranks), tiles, tiles.int(), pdl=True)
    ptx, names = compile_launch(launches[0])
    assert launches[0].grid == (3,)
    assert_waits_before_it_shows(ptx)
    # One a thread, of four: before the loop, in it, and of the rank's own; and the host's words.
    assert re.findall(r"\bld\.volatile\S*", ptx).count("ld.volatile.global.b64") == 3 * ranks + 2
    assert re.findall(r"\bst\.global\S*", ptx).count("st.global.b64") >= ranks
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    assert early == {"peers.outboxes"}


PLANS = {
    "dot": LinearPlan("dot", block_m=64, block_k=128, stages=3),
    "split": LinearPlan("dot", block_m=64, block_k=128, splits=2, stages=3),
    "packed": LinearPlan("dot", block_m=32, block_k=128, stages=2),
}
# Of a thread, of a tile [16, 64] or [16, 32].
PAIRS = {"dot": 4, "split": 4, "packed": 2}


@pytest.mark.parametrize(
    ("name", "squares"),
    some_of([(name, each) for name in PLANS for each in (False, True)], 0, 3, 4),
)
def test_a_product_pushes_its_part(
    monkeypatch: pytest.MonkeyPatch, name: str, squares: int
) -> None:
    """Stores and polls whole pairs, and before it waits for its inputs reads weights alone."""
    monkeypatch.setattr(linear_gluon, "use_gluon", lambda tensor: True)
    plan, peers, lanes = PLANS[name], peers_of(2), 9
    packed = name == "packed"
    weight = pack(random_quantised("e4m3", 1024, 512)) if packed else new(1024, 512)
    residual = new_residual(lanes, 1024, 1, dtype=torch.bfloat16, device="cpu")
    counters = new(arrivals_needed(plan, 1024), dtype=torch.int32)
    call = LinearCall(
        *(new(lanes, 512), weight, new(lanes, dtype=torch.int32)),
        bias=new(1024),
        plan=plan,
        launch=Launch(arrivals=counters, pdl=True),
    )
    add = AddResidual(residual, new(1024), peers)
    epilogue = StoreSquares(peers=peers) if squares else add
    launch = record_launch(linear_launches, lambda: linear(call, epilogue), linear_gluon)
    assert launch.kernel.is_gluon()
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    assert_looks(ptx, 2, PAIRS[name])
    stores = re.findall(r"\bst\.global\S*", ptx)
    assert stores.count("st.global.v2.b64") == 2 * PAIRS[name]
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    weights = {"weight.codes", "weight.row_scales"} if packed else {"weight_ptr"}
    assert early - {"bias_ptr", "residual.next_norm"} == weights


@pytest.mark.parametrize("squares", [False, True])
def test_a_product_of_many_programs_leaves_the_wait_to_few(squares: bool) -> None:
    """Its kernel pushes and polls nothing; the next one takes what all ranks have pushed."""
    plan, peers, ops = LinearPlan("fma", block_m=1, block_k=512), peers_of(2), []
    residual = new_residual(1, 1024, 1, dtype=torch.bfloat16, device="cpu")
    operands = (new(1, 512), new(1024, 512), new(1, dtype=torch.int32))
    call = LinearCall(*operands, bias=new(1024), plan=plan, launch=Launch(pdl=True))
    add = AddResidual(residual, new(1024), peers)
    with launches_handed_to(ops.append, linear_launches, pushed_sums):
        linear(call, StoreSquares(peers=peers) if squares else add)
    product, sums = ops
    assert (product.kernel.__name__, product.grid) == ("fma_kernel", (1024,))
    ptx, names = compile_launch(product)
    assert_waits_before_it_shows(ptx)
    assert re.findall(r"\bst\.global\S*", ptx) == ["st.global.b64"] * 2 and "volatile" not in ptx
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    assert early == {"weight_ptr"}
    assert sums.grid == (1, 4)
    ptx, names = compile_launch(sums)
    assert_looks(ptx, 2)
    # The next launch begins first, and the product's end is waited for last, by all programs.
    before, _, after = ptx.rpartition("griddepcontrol.wait")
    assert "st.global" not in after and "ret;" not in before
    # Once more where waits are over: the product may not have stored its own part yet.
    assert before.count("griddepcontrol.wait") == 1
    first, rest = before.split("griddepcontrol.launch_dependents")
    assert "st.global" not in first and "st.global" in rest
    # What was written by kernels, which may still run on other multiprocessors, is read past L1.
    constant = {"bias_ptr", "next_ptr", "peers.outboxes"}
    loads = [load for load in global_loads(ptx, names) if load.argument not in constant]
    assert {load.argument for load in loads if not load.past_l1} <= {"peers.items", "peers.waited"}
    assert {load.argument for load in loads} >= {"slot_ptr", "peers.tags", "peers.over"}


FLAG = r"atom\.global\.sys\.relaxed\.exch|fence\.acq_rel\.sys|ld\.global\.sys\.acquire"


def meetings_of(found: list[str], ranks: int) -> list[tuple[int, int]]:
    """Where flags are stored, behind one fence for all of them, which is behind a barrier of the
    program's threads; and where the last one was seen. Behind each look the threads wait for the
    one that has looked.
    """
    fences = [at for at, each in enumerate(found) if each.startswith("fence")]
    seen = [at for at, each in enumerate(found) if each.endswith("acquire")]
    assert len(seen) == len(fences) * (ranks - 1)
    assert all(found[at + 1].startswith("bar") for at in seen)
    for at in fences:
        assert found[at - 1].startswith("bar")
        assert all(each.startswith("atom") for each in found[at + 1 : at + ranks])
    assert sum(each.startswith("atom") for each in found) == len(seen)
    return list(zip(fences, seen[ranks - 2 :: ranks - 1], strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("even", [False, True])
def test_an_all_reduce_is_wide_and_flags_come_last(ranks: int, even: bool) -> None:
    """Whole blocks go by 16 bytes a thread; flags are stored last and read first."""
    peers, part = peers_of(ranks), new(1024 if even else 1023, 4096 if even else 4098)
    own = new(all_reduce.all_reduce_words(part.nbytes // 4, ranks), dtype=torch.int32)
    memory = FlaggedMemory.over(1, own, [own.data_ptr()] * ranks, 128)
    launches: list[Op] = []
    with launches_handed_to(launches.append, all_reduce):
        all_reduce.all_reduce(peers, memory, part, pdl=True)
    ptx, _ = compile_launch(launches[0])
    assert_waits_before_it_shows(ptx)
    assert launches[0].grid == (128,)
    found = re.findall(rf"bar\.sync|{FLAG}|\bst\.global\.(?:v4|b32)", ptx)
    shots = 1 if ranks == 2 else 2
    meetings = meetings_of(found, ranks)
    assert len(meetings) == shots
    # The first barrier is for the word that waits are over, of which all threads get one look.
    assert found[: meetings[0][0] - 1] == ["bar.sync"] + ["st.global.v4"] * 2 * (ranks - 1)
    # The sum, and in two shots that of all others, too.
    rest = found[meetings[0][1] :]
    assert rest.count("st.global.v4") >= 2 * ((even + ranks - 1) if shots == 2 else even)
    assert even or rest.count("st.global.b32") >= 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_chunk_is_read_and_stored_wide_between_its_flags(ranks: int) -> None:
    peers, (lanes, hidden) = peers_of(ranks), (1024, 4096)
    own = new(add_parts_norm.split_words(lanes * hidden // 2, ranks), dtype=torch.int32)
    memory = FlaggedMemory.over(1, own, [own.data_ptr()] * ranks, 256)
    launches: list[Op] = []
    with launches_handed_to(launches.append, add_parts_norm):
        add_parts_norm.add_parts_rms_norm(
            peers,
            memory,
            new(lanes, hidden),
            new(lanes, hidden, dtype=torch.float32),
            new(hidden),
            new(lanes, dtype=torch.int32),
            eps=1e-5,
            pdl=True,
        )
    ptx, _ = compile_launch(launches[0])
    assert_waits_before_it_shows(ptx)
    assert launches[0].grid == (256,)
    wide = r"\bst\.global\.v4\.b32|\bld\.global\.v4\.b32"
    found = re.findall(rf"bar\.sync|{FLAG}|{wide}", ptx)
    (gave, had), (stored, _) = meetings_of(found, ranks)
    # The weight, for which nothing waits.
    assert len(re.findall(wide, ptx[: ptx.index("griddepcontrol.wait")])) == 2
    # Two pieces of 16 bytes of each other rank's part; of a lane as many of each part and target,
    # and four of the stream.
    loads, stores = "ld.global.v4.b32", "st.global.v4.b32"
    parts, lane = found[:gave], found[had:stored]
    assert parts.count(loads) == 2 + 2 * (ranks - 1) and parts.count(stores) == 2 * (ranks - 1)
    assert lane.count(loads) == 4 + 2 * ranks and lane.count(stores) == 4 + 2 * ranks
    assert not {loads, stores} & {*found[stored:]}
    # It waits for its turn before it gives parts, and looks at flags after them and at the end.
    turn, given, ended = (found.start() for found in re.finditer("nanosleep", ptx))
    assert turn < ptx.index(stores) < ptx.index("fence.acq_rel.sys") < given < ended
    assert "fma.rn.f32" not in ptx, "its bits are those of add_rms_norm, which fuses nothing"
