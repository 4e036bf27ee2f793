"""Stop sequences inside the step's last kernel, against cutting after it what it emits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent, some_of
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.step import finish as finish_module
from graphengine.kernels.step.finish import verify_commit_publish
from graphengine.kernels.step.state import (
    EMITTED,
    INVALID,
    LENGTH,
    STOP,
    DecodeLanes,
    SlotState,
    StopTensors,
)
from graphengine.kernels.step.stop_sequences import StopSequences
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)
from launches.finish import Twin, read_entry

SLOTS, POSITIONS, LENGTH_OF_SEQUENCE = 5, 24, 3
HUGE = 2**31 - 1


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


def first_match(
    said: Sequence[int], emitted: Sequence[int], wanted: Sequence[Sequence[int]]
) -> int:
    """Tokens up to the one that completes a sequence; 0 where none does."""
    for kept in range(1, len(emitted) + 1):
        all_said = [*said, *emitted[:kept]]
        if any(tuple(all_said[-len(ids) :]) == tuple(ids) for ids in wanted):
            return kept
    return 0


def padded(ids: Sequence[int]) -> list[int]:
    return [-1] * (LENGTH_OF_SEQUENCE - len(ids)) + list(ids)


@given(st.data())
@settings(max_examples=extent(10, 28), deadline=None)
def test_a_row_ends_where_a_sequence_does(twin: Twin, data: st.DataObject) -> None:
    draw = data.draw
    width = draw(st.sampled_from([1, 2, 4]))
    slots = draw(st.permutations([-1, 0, 1, 2, 4]))
    token = st.integers(0, 2)
    state = twin.state(SLOTS)
    state.running.fill_(1)
    history = torch.full((SLOTS, POSITIONS), HUGE, dtype=torch.int32)
    sequences = torch.full((SLOTS, 2, LENGTH_OF_SEQUENCE), HUGE, dtype=torch.int32)
    sequences[3] = -1
    said, wanted, lanes, fed, sampled = {}, {}, [], [], []
    for slot in slots:
        drafts = draw(st.lists(token, min_size=width - 1, max_size=width - 1))
        lanes += [slot] * width
        sampled += draw(st.lists(st.integers(-1, 2), min_size=width, max_size=width))
        fed += [0, *drafts]
        if slot < 0:
            continue
        said[slot] = draw(st.lists(token, min_size=1, max_size=6))
        wanted[slot] = draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=2))
        rows = [padded(ids) for ids in wanted[slot]]
        rows += [[-1] * LENGTH_OF_SEQUENCE] * (2 - len(rows))
        sequences[slot] = torch.tensor(rows)
        history[slot, : len(said[slot])] = torch.tensor(said[slot])
        state.kv_len[slot] = len(said[slot]) - 1
    limits = twin.limits(SLOTS, max_len=draw(st.integers(4, 12)))
    tensors = StopSequences(
        sequences.to(twin.device), twin.ints([0] * SLOTS), twin.ints([0] * SLOTS)
    )
    tiles = twin.tiles([None if slot < 0 else t for slot, t in zip(lanes, sampled, strict=True)])

    def finish(cut: bool) -> tuple[list[int], list[int], list[int], list[int], list[object]]:
        mine = type(state)(*(tensor.clone() for tensor in state))
        mailbox = twin.mailbox(2, len(slots), width + 1)
        step = twin.finish(
            *tiles,
            twin.lanes(lanes, fed),
            mine,
            limits,
            mailbox,
            num_speculative_tokens=width - 1,
            sequences=tensors if cut else None,
            history_SP=history.to(twin.device) if cut else None,
        )
        alive = [mine.kv_len.tolist(), mine.running.tolist(), mine.next_token.tolist()]
        return step.flags, step.count, *alive[:2], [alive[2], step.token, read_entry(mailbox, 1)]

    flags, count, kv_len, running, (next_token, tokens, _) = finish(cut=False)
    got_flags, got_count, got_kv_len, got_running, (got_next, got_tokens, records) = finish(
        cut=True
    )
    for row, slot in enumerate(slots):
        if slot < 0:
            assert got_flags[row] == got_count[row] == 0
            continue
        emitted = tokens[row * width : row * width + count[row]]
        kept = first_match(said[slot], emitted, wanted[slot])
        assert got_tokens[row * width : row * width + count[row]] == emitted
        if not kept:
            assert got_flags[row] == flags[row] and got_count[row] == count[row]
            same = got_kv_len[slot], got_running[slot], got_next[slot]
            assert same == (kv_len[slot], running[slot], next_token[slot])
            continue
        also = flags[row] & LENGTH if kept == count[row] else 0
        assert got_flags[row] == EMITTED | STOP | also and not flags[row] & INVALID
        assert got_count[row] == kept and got_running[slot] == 0
        assert got_kv_len[slot] == len(said[slot]) - 1 + kept
        assert got_next[slot] == emitted[kept - 1]
        assert records[row].tokens == tuple(emitted[:kept])


def test_a_sequence_ends_a_row_of_32_lanes(twin: Twin) -> None:
    width, said = 32, [*range(100, 132)]
    state, mailbox = twin.state(1), twin.mailbox(2, 1, width + 1)
    state.running.fill_(1)
    sequences = StopSequences(twin.ints([[padded(said[19:22])]]), twin.ints([0]), twin.ints([0]))
    step = twin.finish(
        *twin.tiles(said),
        twin.lanes([0] * width, [0, *said[:-1]]),
        state,
        twin.limits(1),
        mailbox,
        num_speculative_tokens=width - 1,
        sequences=sequences,
        history_SP=twin.ints([[HUGE] * POSITIONS]),
    )
    assert (step.flags, step.count) == ([EMITTED | STOP], [22])
    assert read_entry(mailbox, 1) == [(1, tuple(said[:22]), 0, EMITTED | STOP)]


def test_one_without_the_other_is_refused() -> None:
    twin = Twin("cpu", reference=False)
    arguments = *twin.tiles([3]), twin.lanes([0], [1]), twin.state(2), twin.limits(2)
    mailbox = twin.mailbox(1, 1)
    history = torch.zeros((2, 4), dtype=torch.int32)
    with pytest.raises(ValueError, match="wanted together"):
        twin.finish(*arguments, mailbox, history_SP=history)
    three = StopSequences(
        torch.zeros((3, 1, 2), dtype=torch.int32), *torch.zeros((2, 3), dtype=torch.int32)
    )
    history = torch.zeros((3, 4), dtype=torch.int32)
    with pytest.raises(ValueError, match="stop sequences of 3 slots do not fit 2 slots"):
        twin.finish(*arguments, mailbox, history_SP=history, sequences=three)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(
    ("width", "cut"), some_of([(n, cut) for n in (1, 4, 32) for cut in (False, True)], 0, 1, 3, 4)
)
def test_history_is_read_past_the_first_cache(width: int, cut: bool) -> None:
    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    int64 = torch.int64

    def call() -> None:
        verify_commit_publish(
            new(2 * width, 9, dtype=int64),
            new(2 * width, 9),
            DecodeLanes(*(new(2 * width) for _ in range(3))),
            SlotState(*(new(SLOTS) for _ in range(4)), sequence=new(1, dtype=int64)),
            StopTensors(new(SLOTS, 16), new(SLOTS)),
            new(4, 2, width + 1, dtype=int64),
            Launch(arrivals=new(2), pdl=True),
            num_speculative_tokens=width - 1,
            sequences=StopSequences(new(SLOTS, 8, 16), new(SLOTS), new(SLOTS)) if cut else None,
            history_SP=new(SLOTS, 4096) if cut else None,
        )

    ptx, names = compile_launch(record_launch(finish_module, call))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    mine = {"history_ptr", "sequences.tokens", "sequences.start", "sequences.min_len"}
    assert {load.argument for load in loads} & mine == (mine if cut else set())
    assert all(load.past_l1 for load in loads if load.argument == "history_ptr")
