"""Drafts of forced text: the automaton's forced tokens take the place of a drafter's drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.draft import forced as forced_module
from graphengine.kernels.draft.forced import draft_forced, draft_forced_reference
from graphengine.kernels.logits.automata import GrammarAutomata
from graphengine.kernels.step.noted import FollowedAutomata
from launches.automata import HUGE, SLOTS, Pool, ints
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> tuple[bool, str]:
    if request.param == "reference":
        return True, "cpu"
    return False, request.getfixturevalue("device")


def expected_drafts(forced: list[int], made: list[int]) -> list[int]:
    """Forced tokens, then what the drafter made if it had made these too."""
    count = len(forced)
    kept = made[count:] if made[:count] == forced else [-1] * (len(made) - count)
    return forced + kept


@settings(deadline=None, max_examples=extent(25, 200), derandomize=True)
@given(data=st.data())
def test_forced_tokens_come_first(twin: tuple[bool, str], data: st.DataObject) -> None:
    K, width = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.sampled_from([1, 3]))
    reference, device = twin
    pool = Pool.draw(data.draw(st.integers(0, 99)), 40, device)
    states = pool.automata.state.tolist()
    made = []
    for slot in range(SLOTS):
        tables = pool.held[slot]
        known = [] if tables is None else tables.forced_from(states[slot], K)
        # A drafter that is right for a while.
        known = known[: data.draw(st.integers(0, K))]
        rest = st.lists(st.integers(-1, 39), min_size=K, max_size=K)
        made.append((known + data.draw(rest))[:K])
    order = [*data.draw(st.permutations(range(SLOTS)))[:4]]
    order.insert(data.draw(st.integers(0, 4)), -1)
    # Only a row's first lane counts.
    slots = [slot if j == 0 else HUGE for slot in order for j in range(width)]
    drafts, before = ints(made, device), [tensor.clone() for tensor in pool.automata]
    op: Callable[..., None] = draft_forced_reference if reference else draft_forced
    op(FollowedAutomata(pool.automata, pool.flags), ints(slots, device), drafts, width=width)
    for slot, row in enumerate(made):
        tables = pool.held[slot] if slot in order else None
        if tables is not None:
            row = expected_drafts(tables.forced_from(states[slot], K), row)
        assert drafts[slot].tolist() == row
    assert all(torch.equal(*pair) for pair in zip(before, pool.automata, strict=True))


def test_some_chains_are_long() -> None:
    """The automata above force several tokens, and one, and none."""
    lengths = set()
    for seed in range(20):
        pool = Pool.draw(seed, 40, "cpu")
        for slot, tables in enumerate(pool.held):
            if tables is not None:
                lengths.add(len(tables.forced_from(int(pool.automata.state[slot]), 5)))
    assert {0, 1, 3, 5} <= lengths


def test_what_does_not_fit_is_refused() -> None:
    pool = Pool.draw(1, 40, "cpu")
    good: dict[str, Any] = {
        "followed": FollowedAutomata(pool.automata, pool.flags),
        "slot_N": ints([0, 1, 2, 3], "cpu"),
        "draft_SK": ints([[-1] * 2] * SLOTS, "cpu"),
    }
    draft_forced(**good, width=2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"width": 3}, "4 lanes must be rows of width=3"),
        ({"width": 0}, "4 lanes must be rows of width=0"),
        ({"slot_N": ints([], "cpu")}, "0 lanes must be rows of width=1"),
        ({"slot_N": torch.zeros(4)}, "slot must be int32, not torch.float32"),
        ({"draft_SK": torch.zeros(SLOTS, 2)}, r"dense int32 \[S, K\], not torch.float32"),
        ({"draft_SK": ints([[-1]], "cpu")}, r"start must be a dense \[1\], not \(5,\)"),
        (
            {"followed": FollowedAutomata(pool.automata, ints([0], "cpu"))},
            r"flags must be a dense \[5\], not \(1,\)",
        ),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            draft_forced(**good | change)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_states_and_drafts_are_read_after_the_wait() -> None:
    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    automata = GrammarAutomata(new(2**20), new(4), new(4))

    def run() -> None:
        draft_forced(FollowedAutomata(automata, new(4)), new(8), new(4, 3), width=4, pdl=True)

    ptx, names = compile_launch(record_launch(forced_module, run))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    early = {load.argument for load in loads if not load.after_wait}
    assert early <= {"slot_ptr", "flags_ptr", "automata.start", "automata.tables"}
    assert {"automata.state", "draft_ptr"} <= {load.argument for load in loads if load.after_wait}
