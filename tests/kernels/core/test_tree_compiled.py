"""What rows of trees add to the kernels of a step, compiled for sm_90: it keeps the rules of PDL.

Chains have none of it: their kernels read no table of a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from graphengine.kernels.attention import decode
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.tree import TreeLanes, TreeTables
from graphengine.kernels.draft import defer, draft
from graphengine.kernels.draft.trees import dynamic_tree, top_drafts, tree
from graphengine.kernels.draft.trees.tree_candidates import Candidates, Children
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.logits import logits, logprobs
from graphengine.kernels.sample import cutoff
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.step import begin, finish, move
from graphengine.kernels.step.state import DecodeLanes, SlotState, StopTensors
from graphengine.kernels.step.walk import AcceptedPath
from launches.compilation import (
    Op,
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")

R, W, DEPTH, S, H, V, P = 2, 5, 2, 4, 64, 3000, 3
N = R * W


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def lanes(count: int) -> DecodeLanes:
    return DecodeLanes(ints(count), ints(count), ints(count))


def tree_lanes(count: int) -> TreeLanes:
    return TreeLanes(ints(count), ints(count), ints(count, DEPTH))


STATE = SlotState(ints(S), ints(S), ints(S), ints(S), torch.zeros(1, dtype=torch.int64))
ARRIVALS = Launch(arrivals=ints(1024), pdl=True)


def attend(tokens_per_row: int) -> None:
    decode.decode_attention(
        torch.zeros(N, 8 * 64, dtype=torch.float16), torch.zeros(99, 32), torch.zeros(99, 32),
        torch.zeros(9, 2, 16, 2, 64, dtype=torch.float16), ints(S, 6), ints(N), ints(N),
        ARRIVALS, num_heads=4, num_kv_heads=2, scale=1.0, max_seq_len=90,
        tokens_per_row=tokens_per_row, tree=tree_lanes(N),
    )  # fmt: skip


def gather() -> None:
    tables = TreeTables(ints(S, W), ints(S, W, DEPTH))
    begin.gather_and_embed(
        STATE, ints(S), ints(R), torch.zeros(V, H), torch.zeros(H),
        new_residual(N, H, 2, dtype=torch.float32, device=torch.device("cpu")),
        draft_SK=ints(S, W - 1), max_len_S=ints(S), num_speculative_tokens=W - 1,
        trees=begin.RowTrees(tables, tree_lanes(N), 90), pdl=True,
    )  # fmt: skip


def verify() -> None:
    finish.verify_commit_publish(
        torch.zeros(N, 7, dtype=torch.int64), ints(N, 7), lanes(N), STATE,
        StopTensors(ints(S, 2), ints(S)), torch.zeros(3, R, W + 1, dtype=torch.int64), ARRIVALS,
        num_speculative_tokens=W - 1, draft_SK=ints(S, W - 1), tree=tree_lanes(N),
    )  # fmt: skip


def move_entries() -> None:
    path = AcceptedPath(lanes(R * P), ints(R * P))
    cache = torch.zeros(3, 9, 2, 16, 2, 64, dtype=torch.float16)
    move.move_path(cache, ints(S, 6), path, rows=R, width=W, pdl=True)


def process() -> None:
    floats = torch.zeros(S)
    tensors = logits.LogitsTensors(
        ints(S), floats, floats, floats, ints(S, 4), torch.zeros(S, 4), ints(S, W, V // 32 + 1),
        ints(S, 3, 4), ints(S), ints(S, V), ints(S, 99),
    )  # fmt: skip
    logits.process_logits(
        torch.zeros(N, V), lanes(N), tensors, num_speculative_tokens=W - 1, tree=tree_lanes(N),
        pdl=True,
    )  # fmt: skip


def rank() -> None:
    wants = logprobs.LogprobTensors(ints(S), ints(S))
    logprobs.rank_logits(
        torch.zeros(N, V), ints(R * P), wants, source_N=ints(R * P), pdl=True
    )  # fmt: skip


def best() -> None:
    params = SamplingTensors.neutral(S)
    top_drafts.top_drafts(
        torch.zeros(N, V), ints(N), ints(N), params, count=3, ahead=2, token_ids=ints(V), pdl=True
    )


def leave_for_last() -> None:
    params = SamplingTensors.neutral(S)
    defer.defer_filtered(torch.zeros(N, V), ints(N), ints(N), params, ahead=2, pdl=True)


def fusion() -> draft.Fusion:
    return draft.Fusion(torch.zeros(V, H), torch.zeros(H), torch.zeros(H), 1e-6)


def take_in() -> None:
    residual = new_residual(R * P, H, 1, dtype=torch.float32, device=torch.device("cpu"))
    draft.begin_module_draft(
        ints(R * P), ints(R), lanes(R * P), torch.zeros(N, H), fusion(), source_N=ints(R * P),
        residual=residual, pdl=True,
    )  # fmt: skip


def grow(inner: int) -> None:
    level = tree.TreeLevel(ints(4), ints(4), ints(4), ints(inner))
    residual = new_residual(R * inner, H, 1, dtype=torch.float32, device=torch.device("cpu"))
    tree.grow_tree(
        tree.ParentRun(ints(R * P, 3), torch.zeros(R * P, H), 0.0, ints(R)), lanes(R), lanes(R),
        level, ints(S, W - 1), fusion(), limit=90, residual=residual if inner else None, pdl=True,
    )  # fmt: skip


def children(depth: int) -> Children:
    """Launches for 3 drafts a lane: after lanes of a run of more at depth 1, then after 3 lanes a
    row.
    """
    if depth == 1:
        of_run = top_drafts.TopDrafts(ints(N, 3), torch.zeros(N, 3))
        return Children(of_run, lanes(R), None, ints(R))
    of_run = top_drafts.TopDrafts(ints(3 * R, 3), torch.zeros(3 * R, 3))
    return Children(of_run, lanes(3 * R), torch.zeros(3 * R))


def expand(depth: int) -> None:
    found = Candidates.new(R, 3, 3, torch.device("cpu"))
    above = None if depth == 1 else TreeLanes(ints(3 * R), ints(3 * R), ints(3 * R, 3))
    dynamic_tree.expand_tree(
        children(depth), torch.zeros(N, H), lanes(R), found,
        TreeLanes(ints(3 * R), ints(3 * R), ints(3 * R, 3)), fusion(), depth=depth, limit=90,
        residual=new_residual(3 * R, H, 1, dtype=torch.float32, device=torch.device("cpu")),
        above=above, pdl=True,
    )  # fmt: skip


def keep() -> None:
    found = Candidates.new(R, 3, 3, torch.device("cpu"))
    tables = TreeTables(ints(S, W), ints(S, W, 3))
    trees = dynamic_tree.DraftedTrees(ints(S, W - 1), ints(S, W - 1), tables)
    dynamic_tree.keep_best(children(3), lanes(R), found, trees, pdl=True)


class Case(NamedTuple):
    call: Callable[[], None]
    modules: tuple[ModuleType, ...]
    late: set[str]
    """Arguments that are read after the wait alone, though a step wrote them."""


CASES = {
    "attention of a tree": Case(lambda: attend(W), (decode,), {"qkv_ptr"}),
    "attention of a level": Case(lambda: attend(1), (decode,), {"qkv_ptr"}),
    "verify": Case(verify, (finish,), {"best_ptr", "health_ptr"}),
    "move": Case(move_entries, (move,), {"slot_ptr", "position_ptr", "source_ptr", "cache_ptr"}),
    "process": Case(process, (logits,), {"logits_ptr", "depth_ptr", "ancestor_ptr"}),
    "rank": Case(rank, (logprobs,), {"source_ptr"}),
    "best": Case(best, (top_drafts,), {"logits_ptr"}),
    "defer": Case(leave_for_last, (defer, cutoff), {"logits_ptr", "cut_key_ptr", "cut_id_ptr"}),
    "take in": Case(take_in, (draft,), {"target_ptr", "count_ptr"}),
    "grow": Case(lambda: grow(2), (tree,), {"grow.token"}),
    "grow the last level": Case(lambda: grow(0), (tree,), {"grow.token"}),
    "expand the root": Case(
        lambda: expand(1), (dynamic_tree,), {"children.token", "children.value"}
    ),
    "expand a run": Case(lambda: expand(2), (dynamic_tree,), {"children.token", "children.value"}),
    "keep the best": Case(keep, (dynamic_tree,), {"children.token", "children.value"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_new_is_read_after_the_wait(name: str) -> None:
    case = CASES[name]
    launches: list[Op] = []
    with launches_handed_to(launches.append, *case.modules):
        case.call()
    read: set[str] = set()
    for launch in launches:
        ptx, names = compile_launch(launch)
        assert_waits_before_it_shows(ptx)
        loads = list(global_loads(ptx, names))
        read |= {load.argument for load in loads}
        early = {load.argument for load in loads if not load.after_wait}
        assert early.isdisjoint(case.late), launch.kernel.__name__
    assert read >= case.late


def test_the_gather_of_trees_compiles() -> None:
    """It waits in two branches, of rows and of slots without one."""
    launches: list[Op] = []
    with launches_handed_to(launches.append, begin):
        gather()
    (launch,) = launches
    ptx, names = compile_launch(launch)
    assert ptx.count("griddepcontrol.wait") == 2
    read = {load.argument for load in global_loads(ptx, names)}
    assert read >= {"draft_ptr", "trees.depth", "trees.ancestor"}


CHAINS: dict[str, tuple[Callable[[], None], ModuleType, tuple[str, ...]]] = {
    "attention": (
        lambda: decode.decode_attention(
            torch.zeros(N, 8 * 64, dtype=torch.float16), torch.zeros(99, 32), torch.zeros(99, 32),
            torch.zeros(9, 2, 16, 2, 64, dtype=torch.float16), ints(S, 6), ints(N), ints(N),
            ARRIVALS, num_heads=4, num_kv_heads=2, scale=1.0, max_seq_len=90, tokens_per_row=W,
        ),
        decode,
        ("tree",),
    ),
    "verify": (
        lambda: finish.verify_commit_publish(
            torch.zeros(N, 7, dtype=torch.int64), ints(N, 7), lanes(N), STATE,
            StopTensors(ints(S, 2), ints(S)), torch.zeros(3, R, W + 1, dtype=torch.int64),
            ARRIVALS, num_speculative_tokens=W - 1,
        ),
        finish,
        ("depth_ptr", "ancestor_ptr"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_chains_read_nothing_of_trees(name: str) -> None:
    call, module, operands = CHAINS[name]
    launches: list[Op] = []
    with launches_handed_to(launches.append, module):
        call()
    (launch,) = launches
    assert all(launch.arguments[operand] is None for operand in operands)
