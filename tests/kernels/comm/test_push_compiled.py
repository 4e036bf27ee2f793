"""What pushes are compiled to for sm_90: whole items, loads past all caches, the rules of PDL."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from graphengine.kernels.comm.items import UNIT, PeerItems, Peers
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.residual import new_residual
from launches.compilation import (
    RecordedLaunch,
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")

push = importlib.import_module("graphengine.kernels.comm.push")
push_lanes = importlib.import_module("graphengine.kernels.comm.push_lanes")
push_residual = importlib.import_module("graphengine.kernels.comm.push_residual")


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def peers_of(ranks: int) -> Peers:
    items = new(2, ranks, 64, UNIT, dtype=torch.int64)
    return Peers(1, PeerItems.over_items(items, [items.data_ptr()] * ranks))


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
    looks = re.findall(r"\bld\.volatile\S*", ptx)
    items, watched = looks.count("ld.volatile.global.v2.b64"), looks.count("ld.volatile.global.b64")
    # Before the loop, in it, and of the rank's own; and the host's two words.
    assert items == 3 * ranks and watched == 2 and len(looks) == items + watched
    assert "%globaltimer" in ptx
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    assert early == {"peers.addresses"}


@pytest.mark.parametrize("ranks", [2, 8])
def test_polls_of_ranks_do_not_wait_for_each_other(ranks: int) -> None:
    """All loads of a look are asked for before the first is used."""
    ptx, _ = ptx_of("residual", ranks, torch.bfloat16)
    first = ptx.index("ld.volatile")
    assert ptx[first : ptx.index("bar.sync", first)].count("ld.volatile") == ranks
