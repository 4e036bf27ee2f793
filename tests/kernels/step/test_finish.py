"""The last kernel of a decode step, and the life of requests from first to last kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.step.begin import gather_and_embed
from graphengine.kernels.step.finish import verify_commit_publish
from graphengine.kernels.step.publish import publish, publish_reference
from graphengine.kernels.step.state import (
    EMITTED,
    INVALID,
    LENGTH,
    STOP,
    SlotState,
    apply_commands,
    apply_commands_reference,
    commit_prefill,
    commit_prefill_reference,
    gather_prefill,
    gather_prefill_reference,
)
from launches.finish import (
    HUGE,
    LAST_ID,
    LOWEST,
    STOP_IDS,
    UNTOUCHED,
    Record,
    Twin,
    read_entry,
)


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin("cpu", reference=True)
    return Twin(request.getfixturevalue("device"), reference=False)


def _record(tag: int, token: int | None, epoch: int, flags: int) -> Record:
    """The record of a row of one token, None for a padded one."""
    if token is None:
        return Record(tag, (), 0, 0)
    return Record(tag, (token,) * (flags & EMITTED), epoch, flags)


def test_flags_state_and_records(twin: Twin):
    slots = 150
    state, limits = twin.state(slots), twin.limits(slots)
    state.running.fill_(1)
    state.kv_len.fill_(9)
    state.next_token.fill_(77)
    state.epoch[1], state.epoch[149] = 0x1234567, -1
    limits.stop_ids[2] = twin.ints([-1, 50, 60])
    limits.stop_ids[3] = twin.ints([50, -1, -1])
    # Ten cached tokens and the new one make eleven.
    limits.max_len[3:6] = twin.ints([11, 12, 11])
    rows: list[tuple[int, int | None, int]] = [
        (1, 50, EMITTED),
        (2, 60, EMITTED | STOP),
        (-1, None, 0),
        (3, 50, EMITTED | STOP | LENGTH),
        (4, 0, EMITTED),
        (149, 123456, EMITTED),
        (5, 0, EMITTED | LENGTH),
        (LOWEST, None, 0),
        (6, -1, INVALID),
        (7, -1, INVALID),
    ]
    slot, tokens, expected = (list(column) for column in zip(*rows, strict=True))
    mailbox = twin.mailbox(entries=3, lanes=12)
    token, flags, count = twin.finish(*twin.tiles(tokens), twin.lanes(slot), state, limits, mailbox)
    assert [t for t, s in zip(token, slot, strict=True) if s >= 0] == [
        t for t in tokens if t is not None
    ]
    assert flags == expected
    assert count == [flag & EMITTED for flag in expected]

    running, kv_len, next_token = [1] * slots, [9] * slots, [77] * slots
    for number, new, flag in rows:
        if new is not None:
            running[number] = int(flag == EMITTED)
            kv_len[number] = 10
            next_token[number] = new if flag != INVALID else 77
    assert state.running.tolist() == running
    assert state.kv_len.tolist() == kv_len
    assert state.next_token.tolist() == next_token
    assert state.sequence.tolist() == [1]

    epochs = {1: 0x4567, 149: 0xFFFF}
    assert read_entry(mailbox, 1) == [
        *(_record(1, new, epochs.get(number, 0), flag) for number, new, flag in rows),
        None,
        None,
    ]
    assert read_entry(mailbox, 0) == read_entry(mailbox, 2) == [None] * 12


@pytest.mark.parametrize("tiles", [1, 2, 100, 4097, 8200])
def test_any_number_of_tiles(twin: Twin, tiles: int):
    tokens = [LAST_ID - 5, -1, None, 3, -1, 70_000]
    slot = [0, 1, -1, 2, 3, 4]
    state = twin.state(5)
    state.next_token.fill_(9)
    mailbox = twin.mailbox(2, 6)
    best, health = twin.tiles(tokens, tiles)
    # Of equal values the lowest id wins, in whatever tile it is.
    best[3, -1], best[3, 0] = 1 << 32 | (LAST_ID - 2), 1 << 32 | (LAST_ID - (2, 8)[tiles > 1])
    token, *_ = twin.finish(best, health, twin.lanes(slot), state, twin.limits(5), mailbox)
    assert [token[row] for row in (0, 1, 3, 4, 5)] == [LAST_ID - 5, -1, 2, -1, 70_000]
    assert state.next_token.tolist() == [LAST_ID - 5, 9, 2, 9, 70_000]


@pytest.mark.parametrize("tiles", [4, 4097, 8200])
def test_rounding_errors_decide_between_tiles_of_one_huge_value(twin: Twin, tiles: int):
    """Then the lower id; a larger error of a smaller value counts for nothing."""
    keys = {"2048": 0x45000000, "-2048": ~0x45000000, "below": 0x44FFFFFF, "largest": 0x7F7FFFFF}
    best = torch.full((5, tiles), -(2**63), dtype=torch.int64)
    health = torch.zeros(5, tiles, dtype=torch.int32)
    for lane, key in enumerate([*keys.values(), keys["2048"]]):
        # Below 2048, and at the largest float, no tile has an error.
        ids, errors = (7, 9, 8, 6), (0, 0, 0, 128) if lane in (2, 3) else (-64, 64, 64, 128)
        for tile, (i, error) in enumerate(zip(ids, errors, strict=True)):
            at = (tile * (tiles - 1)) // 3
            best[lane, at] = key - (tile == 3) << 32 | (LAST_ID - i)
            health[lane, at] = error | 1
    health[4, 0] |= 2
    state = twin.state(5)
    tensors = [best.to(twin.device), health.to(twin.device)]
    token, *_ = twin.finish(
        *tensors, twin.lanes([*range(5)]), state, twin.limits(5), twin.mailbox(2, 5)
    )
    assert token == [8, 8, 7, 7, -1]


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_the_sequence_moves_once_and_tags_wrap(twin: Twin, rows: int):
    """The entry follows the whole sequence number, the tag its low 32 bits."""
    state, limits = twin.state(rows, sequence=2**32 - 3), twin.limits(rows)
    mailbox = twin.mailbox(entries=5, lanes=64)
    slot = [row if row % 3 != 1 else -1 for row in range(rows)]
    tiles = twin.tiles([row if row >= 0 else None for row in slot])
    for sequence in range(2**32 - 2, 2**32 + 3):
        twin.finish(*tiles, twin.lanes(slot), state, limits, mailbox)
        assert state.sequence.tolist() == [sequence]
        tag = sequence % 2**32
        assert read_entry(mailbox, sequence % 5) == [
            *(_record(tag, row if row >= 0 else None, 0, EMITTED) for row in slot),
            *[None] * (64 - rows),
        ]


@pytest.mark.parametrize("stop_ids", [0, 1, 5])
def test_any_number_of_stop_ids(twin: Twin, stop_ids: int):
    state, limits = twin.state(3), twin.limits(3, max_len=2, stop_ids=stop_ids)
    if stop_ids:
        limits.stop_ids[1, -1] = 4
    tiles = twin.tiles([4, 4])
    step = twin.finish(*tiles, twin.lanes([1, 2]), state, limits, twin.mailbox(2, 2))
    assert step.flags == [EMITTED | LENGTH | STOP * bool(stop_ids), EMITTED | LENGTH]


# A request's whole life, many at once, against plain Python.


@dataclass
class Slot:
    epoch: int = 0
    kv_len: int = 0
    running: bool = False
    next_token: int = 0
    stop_ids: list[int] = field(default_factory=lambda: [-1] * STOP_IDS)
    max_len: int = HUGE

    def commit(self, token: int) -> int:
        if token < 0:
            self.running = False
            return INVALID
        flags = EMITTED
        flags |= STOP * (token in self.stop_ids)
        flags |= LENGTH * (self.kv_len + 1 >= self.max_len)
        self.next_token = token
        self.running = flags == EMITTED
        return flags


def _check(state: SlotState, slots: list[Slot]) -> None:
    assert state.epoch.tolist() == [slot.epoch for slot in slots]
    assert state.kv_len.tolist() == [slot.kv_len for slot in slots]
    assert state.running.tolist() == [slot.running for slot in slots]
    assert state.next_token.tolist() == [slot.next_token for slot in slots]


def _prefill_ops(twin: Twin) -> list[Callable[..., Any]]:
    if twin.reference:
        return [
            apply_commands_reference,
            gather_prefill_reference,
            commit_prefill_reference,
            publish_reference,
        ]
    return [apply_commands, gather_prefill, commit_prefill, publish]


@given(data=st.data())
@settings(max_examples=extent(12, 40), deadline=None, derandomize=True)
def test_chunks_of_several_prompts_are_as_those_of_one_each(twin: Twin, data: st.DataObject):
    """Their lanes follow each other; chunks without lanes, and lanes past the bucket, are none."""
    _, gather_chunks, commit_chunks, _ = _prefill_ops(twin)
    tokens, prompts = 200, data.draw(st.sampled_from([1, 2, 5]))
    drawn_slots = data.draw(st.permutations([0, 1, 2, 3, 4, 5]))[:prompts]
    slots = [data.draw(st.sampled_from([slot, slot, -1])) for slot in drawn_slots]
    counts = [data.draw(st.sampled_from([0, 1, 3, 70, 140, HUGE])) for _ in slots]
    starts = [data.draw(st.sampled_from([0, 5, 1000])) for _ in slots]
    finals, drawn = ([data.draw(st.integers(-1, 3)) for _ in slots] for _ in range(2))
    chunks = [twin.ints(each) for each in (slots, starts, counts)]
    lanes = gather_chunks(twin.ints([*range(tokens)]), *chunks)
    begin, expected = 0, []
    for slot, start, count in zip(slots, starts, counts, strict=True):
        held = min(count, tokens - begin) if slot >= 0 else 0
        expected.append((begin, begin + held - 1 if held else 0))
        own = slice(begin, begin + held)
        assert lanes.slot[own].tolist() == [slot] * held
        assert lanes.position[own].tolist() == [*range(start, start + held)]
        assert lanes.token[own].tolist() == [*range(tokens)[own]]
        begin += held
    assert (lanes.slot[begin:] == -1).all()
    assert lanes.query_start.tolist() == [first for first, _ in expected] + [begin]
    assert lanes.last.tolist() == [last for _, last in expected]

    counts = [min(count, tokens) for count in counts]
    several, single = twin.state(6), twin.state(6)
    limits = twin.limits(6, max_len=1004)
    limits.stop_ids[:, 0] = 2
    parts = [drawn, slots, starts, counts, [max(final, 0) for final in finals]]
    found = commit_chunks(several, *(twin.ints(part) for part in parts), limits).tolist()
    one_by_one = [
        commit_chunks(single, *(twin.ints([part[index]]) for part in parts), limits).item()
        for index in range(prompts)
    ]
    assert found == one_by_one
    for name in SlotState._fields:
        assert torch.equal(getattr(several, name), getattr(single, name)), name


@given(data=st.data())
@settings(max_examples=extent(8, 15), deadline=None, derandomize=True)
def test_requests_live_and_die_as_in_plain_python(twin: Twin, data: st.DataObject):
    slots = [Slot() for _ in range(4)]
    state, limits = twin.state(len(slots)), twin.limits(len(slots))
    sequence = data.draw(st.sampled_from([0, 2**32 - 3]))
    state.sequence.fill_(sequence)
    mailbox = twin.mailbox(entries=3, lanes=6)
    apply_command, gather_chunk, commit_chunk, publish_chunk = _prefill_ops(twin)
    embedding, weight = torch.ones(7, 4, device=twin.device), torch.ones(4, device=twin.device)
    garbage = st.sampled_from([HUGE, LOWEST, -1, 0])
    token_ids = st.integers(-1, 6)
    commands = [0] * len(slots)

    def new_commands() -> torch.Tensor:
        """The host admits a new request to a slot, or cancels one: a new epoch either way."""
        for number in data.draw(st.sets(st.integers(0, 3), max_size=2)):
            commands[number] += 1
            stop_ids = data.draw(st.lists(token_ids, min_size=STOP_IDS, max_size=STOP_IDS))
            max_len = data.draw(st.integers(1, 12))
            slots[number] = Slot(commands[number], stop_ids=stop_ids, max_len=max_len)
            limits.stop_ids[number] = twin.ints(stop_ids)
            limits.max_len[number] = max_len
        return twin.ints(commands)

    def record(token: int, flags: int, slot: int) -> Record:
        live = slot >= 0
        epoch = slots[slot].epoch if live else 0
        return _record(sequence % 2**32, token if live else None, epoch, flags)

    for _ in range(6):
        # One chunk of one prompt, of a slot that does not run, or none.
        apply_command(state, new_commands())
        _check(state, slots)
        number = data.draw(st.integers(-1, 3))
        if number >= 0 and slots[number].running:
            number = -1
        count = data.draw(st.integers(1, 4))
        start = slots[number].kv_len if number >= 0 else data.draw(garbage)
        final, token = data.draw(st.integers(0, 1)), data.draw(token_ids)
        chunk = [twin.ints([number]), twin.ints([start]), twin.ints([count])]
        live = count if number >= 0 else 0
        lanes = gather_chunk(twin.ints([HUGE] * 8), *chunk)
        assert lanes.slot.tolist() == [number] * live + [-1] * (8 - live)
        flags = commit_chunk(state, twin.ints([token]), *chunk, twin.ints([final]), limits)
        expected = 0
        if number >= 0:
            slots[number].kv_len += count
            if final:
                slots[number].running = True
                expected = slots[number].commit(token)
        assert flags.tolist() == [expected]
        _check(state, slots)
        publish_chunk(mailbox, state, twin.ints([token]), flags, chunk[0])
        sequence += 1
        assert read_entry(mailbox, sequence % 3) == [
            record(token, expected, number),
            *[record(0, 0, -1)] * 5,
        ]

        # A decode step over the slots in any order, with padded rows between.
        command = new_commands()
        rows = data.draw(st.permutations([0, 1, 2, 3, -1, HUGE]))[: data.draw(st.integers(1, 6))]
        residual = new_residual(len(rows), 4, 2, dtype=torch.float32, device=twin.device)
        decode_lanes = twin.begin(state, command, twin.ints(rows), embedding, weight, residual)
        _check(state, slots)
        of_row = [row if 0 <= row < 4 and slots[row].running else -1 for row in rows]
        assert decode_lanes.slot.tolist() == of_row
        for row, slot in enumerate(of_row):
            if slot >= 0:
                assert decode_lanes.token[row].item() == slots[slot].next_token
                assert decode_lanes.position[row].item() == slots[slot].kv_len
        tokens = [data.draw(token_ids) if slot >= 0 else None for slot in of_row]
        mailbox.fill_(UNTOUCHED)
        tiles = twin.tiles(tokens, tiles=data.draw(st.integers(1, 5)))
        found = twin.finish(*tiles, decode_lanes, state, limits, mailbox).flags
        sequence += 1
        records: list[Record | None] = []
        for slot, new in zip(of_row, tokens, strict=True):
            flag = 0
            if new is not None:
                slots[slot].kv_len += 1
                flag = slots[slot].commit(new)
            records.append(record(new or 0, flag, slot))
        assert found == [record.flags for record in records if record is not None]
        _check(state, slots)
        assert state.sequence.tolist() == [sequence]
        assert read_entry(mailbox, sequence % 3) == [*records, *[None] * (6 - len(rows))]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_step_advances_by_replays_alone(pdl: bool):
    twin = Twin("cuda", reference=False)
    state, limits = twin.state(4), twin.limits(4, max_len=13)
    state.running.fill_(1)
    state.kv_len.copy_(torch.arange(4))
    mailbox = twin.mailbox(entries=3, lanes=4)
    command, rows = twin.ints([0, 0, 0, 0]), twin.ints([3, 0, -1, 1])
    arrivals = twin.ints([0])
    launch = Launch(arrivals=arrivals, pdl=pdl)
    embedding, weight = torch.ones(100, 8, device="cuda"), torch.ones(8, device="cuda")
    residual = new_residual(4, 8, 1, dtype=torch.float32, device="cuda")
    health = torch.ones(4, 1, dtype=torch.int32, device="cuda")

    def step() -> None:
        lanes = gather_and_embed(state, command, rows, embedding, weight, residual, pdl=pdl)
        # The next token is the position: any function of the lanes alone will do here.
        best = (LAST_ID - lanes.position.long())[:, None]
        verify_commit_publish(best, health, lanes, state, limits, mailbox, launch)

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for _ in range(9):
        graph.replay()
    torch.cuda.synchronize()
    assert state.sequence.tolist() == [10]
    assert arrivals.tolist() == [0]
    # Slot 3 began three tokens on, so it reached max_len a step before the end.
    assert state.kv_len.tolist() == [10, 11, 2, 12]
    assert state.running.tolist() == [1, 1, 1, 0]
    assert state.next_token.tolist() == [9, 10, 0, 11]
    assert read_entry(mailbox, 10 % 3) == [
        (10, (), 0, 0),
        (10, (9,), 0, EMITTED),
        (10, (), 0, 0),
        (10, (10,), 0, EMITTED),
    ]


def _good_arguments() -> list[Any]:
    twin = Twin("cpu", reference=False)
    return [
        *twin.tiles([1, 2]),
        twin.lanes([0, 1]),
        twin.state(4),
        twin.limits(4),
        twin.mailbox(2, 3),
        Launch(arrivals=twin.ints([0])),
    ]


@pytest.mark.parametrize("number", range(6))
def test_wrong_dtypes_and_shapes_are_refused(number: int):
    arguments = _good_arguments()
    argument = arguments[number]
    wrong: list[Any] = []
    if isinstance(argument, torch.Tensor):
        wrong.append(argument.double())
        if argument.dim() > 1:
            wrong += [argument[None], argument[..., None], argument[..., :0]]
    else:
        for name, tensor in argument._asdict().items():
            wrong.append(argument._replace(**{name: tensor.double()}))
            wrong.append(argument._replace(**{name: tensor[None]}))
    for value in wrong:
        with pytest.raises(ValueError, match=r"must be"):
            verify_commit_publish(*arguments[:number], value, *arguments[number + 1 :])


def test_more_rows_than_mailbox_lanes_is_refused():
    arguments = _good_arguments()
    arguments[5] = torch.zeros(2, 1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"2 rows do not fit a mailbox of 2 entries x 1 lanes"):
        verify_commit_publish(*arguments)
