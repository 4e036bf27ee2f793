"""Automata on the device: masks after drafts, and states that follow what slots say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.logits import logits as logits_module
from graphengine.kernels.logits.automata import DEAD, GrammarAutomata, region
from graphengine.kernels.logits.logits import (
    LogitsTensors,
    process_logits,
    process_logits_reference,
)
from graphengine.kernels.step import noted as noted_module
from graphengine.kernels.step.noted import (
    FollowedAutomata,
    note_prompt,
    note_prompt_reference,
    note_tokens,
    note_tokens_reference,
)
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from launches.automata import HUGE, SLOTS, Pool, Tables, ints
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)
from launches.trees import Shape, shapes


def logits_tensors(pool: Pool, vocabulary: int, device: str) -> LogitsTensors:
    """No other option changes anything; their tables are empty."""
    S = SLOTS
    zeros = torch.zeros(S, device=device)
    return LogitsTensors(
        pool.flags, zeros + 1, zeros, zeros,
        bias_ids=ints([[-1]] * S, device), bias_values=torch.zeros(S, 1, device=device),
        bitmask=torch.zeros(S, 1, -(-vocabulary // 32), dtype=torch.int32, device=device),
        bad_words=ints([[[-1]]] * S, device), bad_words_start=ints([0] * S, device),
        counts=torch.zeros(S, vocabulary, dtype=torch.int32, device=device),
        history=torch.zeros(S, 40, dtype=torch.int32, device=device),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> tuple[bool, str]:
    if request.param == "reference":
        return True, "cpu"
    return False, request.getfixturevalue("device")


Fed = list[tuple[int, list[int]]]


def run_process(
    twin: tuple[bool, str], pool: Pool, rows: Fed, width: int, vocabulary: int, tree: Any = None
) -> np.ndarray:
    """Which ids of each lane are allowed; rows of (slot, tokens of the lanes), -1 for padded."""
    reference, device = twin
    op: Callable[..., None] = process_logits_reference if reference else process_logits
    slots = [slot if slot >= 0 and j < len(fed) else -1 for slot, fed in rows for j in range(width)]
    tokens = [fed[j] if j < len(fed) else HUGE for _, fed in rows for j in range(width)]
    lanes = DecodeLanes(*(ints(part, device) for part in (tokens, slots, [3] * len(slots))))
    logits = torch.ones(len(slots), vocabulary, device=device)
    op(
        logits,
        lanes,
        logits_tensors(pool, vocabulary, device),
        num_speculative_tokens=width - 1,
        tree=tree,
        automata=pool.automata,
    )
    found: np.ndarray = logits.cpu().numpy()
    return np.isfinite(found)


@settings(deadline=None, max_examples=extent(12, 60), derandomize=True)
@given(data=st.data())
def test_masks_are_those_after_the_drafts(twin: tuple[bool, str], data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from([1, 31, 33, 100, 300]))
    width = data.draw(st.sampled_from([1, 2, 4]))
    pool = Pool.draw(data.draw(st.integers(0, 99)), vocabulary, twin[1])
    before = [tensor.clone() for tensor in pool.automata]
    drafts = st.lists(
        st.integers(0, vocabulary - 1) | st.sampled_from([-5, vocabulary, HUGE]), max_size=width - 1
    )
    rows: Fed = [(slot, [7, *data.draw(drafts)]) for slot in data.draw(st.permutations(range(5)))]
    rows.insert(data.draw(st.integers(0, 5)), (-1, []))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_module, "_BLOCK", data.draw(st.sampled_from([16, 64, 2048])))
        allowed = run_process(twin, pool, rows, width, vocabulary)
    for row, (slot, fed) in enumerate(rows):
        for j in range(width):
            tables = pool.held[slot] if slot >= 0 and j < len(fed) else None
            expected = np.ones(vocabulary, dtype=bool)
            if tables is not None:
                state = tables.follow(int(pool.automata.state[slot]), fed[1 : j + 1])
                expected = tables.allows(state)
            np.testing.assert_array_equal(allowed[row * width + j], expected)
    for old, new in zip(before, pool.automata, strict=True):
        assert torch.equal(old, new)


@settings(deadline=None, max_examples=extent(8, 40), derandomize=True)
@given(shape=shapes(), seed=st.integers(0, 99))
def test_masks_of_a_tree_follow_its_paths(twin: tuple[bool, str], shape: Shape, seed: int) -> None:
    vocabulary = 40
    pool = Pool.draw(seed, vocabulary, twin[1])
    rng = np.random.default_rng(seed)
    fed = rng.integers(0, vocabulary, shape.width).tolist()
    tree: TreeLanes = shape.lanes(2, twin[1])
    allowed = run_process(twin, pool, [(4, fed), (-1, [])], shape.width, vocabulary, tree)
    tables = pool.held[4]
    assert tables is not None
    for node in range(shape.width):
        path = [fed[each] for each in shape.path(node)[1:]]
        state = tables.follow(int(pool.automata.state[4]), path)
        np.testing.assert_array_equal(allowed[node], tables.allows(state))


@settings(deadline=None, max_examples=extent(12, 60), derandomize=True)
@given(data=st.data())
def test_states_follow_what_is_said(twin: tuple[bool, str], data: st.DataObject) -> None:
    vocabulary, width = 50, data.draw(st.sampled_from([1, 3, 4]))
    pool = Pool.draw(data.draw(st.integers(0, 99)), vocabulary, twin[1])
    said = st.lists(st.integers(0, vocabulary - 1), max_size=width)
    rows = [(slot, data.draw(said)) for slot in data.draw(st.permutations(range(5)))[:4]]
    rows.insert(1, (-1, []))
    before = pool.automata.state.tolist()
    reference, device = twin
    tokens = [fed[j] if j < len(fed) else HUGE for _, fed in rows for j in range(width)]
    slots = [slot if j == 0 else -1 for slot, _ in rows for j in range(width)]
    lanes = DecodeLanes(*(ints(part, device) for part in (tokens, slots, [3] * len(slots))))
    op: Callable[..., None] = note_tokens_reference if reference else note_tokens
    tables = [torch.zeros(SLOTS, size, dtype=torch.int32, device=device) for size in (50, 40)]
    op(
        ints(tokens, device),
        ints([len(fed) for _, fed in rows], device),
        lanes,
        *tables,
        followed=FollowedAutomata(pool.automata, pool.flags),
    )
    expected = list(before)
    for slot, fed in rows:
        held = pool.held[slot] if slot >= 0 else None
        if held is not None:
            expected[slot] = held.follow(before[slot], fed)
    assert pool.automata.state.tolist() == expected
    # What is noted besides is what is noted without automata.
    others = [torch.zeros_like(table) for table in tables]
    op(ints(tokens, device), ints([len(fed) for _, fed in rows], device), lanes, *others)
    assert all(torch.equal(one, other) for one, other in zip(tables, others, strict=True))


def test_a_prompt_begins_anew(twin: tuple[bool, str]) -> None:
    reference, device = twin
    op: Callable[..., None] = note_prompt_reference if reference else note_prompt
    for position, expected in ((0, 0), (4, DEAD)):
        pool = Pool.draw(1, 50, device)
        before = pool.automata.state.tolist()
        assert before[3] == DEAD
        chunk = PrefillLanes(
            *(ints(part, device) for part in ([1, 2, 9], [3, 3, -1])),
            ints([position, position + 1, 0], device),
            ints([0, 2], device),
            ints([1], device),
        )
        tables = [torch.zeros(SLOTS, 50, dtype=torch.int32, device=device) for _ in range(2)]
        op(chunk, *tables, followed=FollowedAutomata(pool.automata, pool.flags))
        before[3] = expected
        assert pool.automata.state.tolist() == before


def test_what_does_not_fit_is_refused() -> None:
    pool = Pool.draw(1, 50, "cpu")
    good: dict[str, Any] = {
        "logits_NV": torch.zeros(1, 50),
        "lanes": DecodeLanes(*(ints([0], "cpu") for _ in range(3))),
        "tensors": logits_tensors(pool, 50, "cpu"),
    }
    process_logits(**good, automata=pool.automata)
    wrong = (
        ({"tables": pool.automata.tables.long()}, r"tables of automata must be .* torch.int64"),
        ({"tables": pool.automata.tables[None]}, r"must be a dense int32 \[P\], .* \[1, [0-9]+\]"),
        ({"start": ints([0], "cpu")}, r"start must be a dense \[5\], not \(1,\)"),
        ({"state": torch.zeros(5)}, "state must be int32, not torch.float32"),
    )
    for change, message in wrong:
        automata = pool.automata._replace(**change)
        with pytest.raises(ValueError, match=message):
            process_logits(**good, automata=automata)
        tables = [torch.zeros(5, 50, dtype=torch.int32) for _ in range(2)]
        with pytest.raises(ValueError, match=message):
            note_tokens(
                ints([0], "cpu"),
                ints([1], "cpu"),
                good["lanes"],
                *tables,
                followed=FollowedAutomata(automata, pool.flags),
            )
    with pytest.raises(ValueError, match="70000 states and 1 classes: at most 65535 have numbers"):
        tables = Tables.draw(0, 50, 70_000, 1)
        region(*tables)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("depth", [0, 3])
def test_automata_wait_for_what_may_still_change(depth: int) -> None:
    """A mask's state is read before the wait, as nothing has written it lately; what was said is
    read after it."""
    V, N, S, W = 128_256, 8, 4, 4

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    automata = GrammarAutomata(new(2**20), new(S), new(S))
    floats = [new(S, dtype=torch.float32) for _ in range(3)]
    tensors = LogitsTensors(
        new(S), *floats, new(S, 3), new(S, 3, dtype=torch.float32), new(S, W, V // 32),
        new(S, 2, 2), new(S), new(S, V), new(S, 8192),
    )  # fmt: skip
    lanes = DecodeLanes(new(N), new(N), new(N))
    tree = TreeLanes(new(N), new(N), new(N, depth)) if depth else None

    def process() -> None:
        logits = new(N, V, dtype=torch.float32)
        process_logits(
            logits, lanes, tensors, num_speculative_tokens=W - 1, tree=tree, automata=automata,
            pdl=True,
        )  # fmt: skip

    ptx, names = compile_launch(record_launch(logits_module, process))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    early = {load.argument for load in loads if not load.after_wait}
    known = {"lane_slot_ptr", "lane_token_ptr", "tensors.flags", "automata.start"}
    known |= {"automata.state", "automata.tables"} | (
        {"depth_ptr", "ancestor_ptr"} if depth else set()
    )
    assert early <= known and {"automata.start", "automata.state"} <= early
    # Host-owned fields alone may come from L1.
    assert all(
        load.past_l1
        for load in loads
        if not load.after_wait and load.argument not in ("tensors.flags", "automata.start")
    )

    def note() -> None:
        followed = FollowedAutomata(automata, new(S))
        note_tokens(new(N), new(2), lanes, new(S, V), new(S, 8192), followed=followed, pdl=True)

    ptx, names = compile_launch(record_launch(noted_module, note))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    late = {load.argument for load in loads if load.after_wait}
    assert {"token_ptr", "count_ptr", "automata.state"} <= late
    early = {load.argument for load in loads if not load.after_wait}
    assert "automata.state" not in early and "token_ptr" not in early
