"""The self-advancing state against a model of it in plain Python, for both twins of every op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.kernels import state as state_ops
from graphengine.kernels.state import (
    EMITTED,
    INVALID,
    LENGTH,
    STOP,
    SlotState,
    StopTensors,
)

HUGE, LOWEST = 2**31 - 1, -(2**31)
# More rows than one program of a kernel serves.
SLOTS = 150
STOP_IDS = 3


@dataclass(frozen=True)
class Ops:
    """One twin of every op, and the device it runs on."""

    device: str
    name: Callable[[str], str]

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return getattr(state_ops, self.name(op))

    def ints(self, values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def state(self, slots: int = SLOTS, sequence: int = 0) -> SlotState:
        fields = (torch.zeros(slots, dtype=torch.int32, device=self.device) for _ in range(4))
        return SlotState(*fields, sequence=self.ints([sequence], torch.int64))

    def limits(self, slots: int = SLOTS, max_len: int = HUGE) -> StopTensors:
        return StopTensors(
            stop_ids=torch.full((slots, STOP_IDS), -1, dtype=torch.int32, device=self.device),
            max_len=torch.full((slots,), max_len, dtype=torch.int32, device=self.device),
        )


@pytest.fixture(scope="module", params=["reference", "kernel"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return Ops("cpu", lambda op: f"{op}_reference")
    return Ops(request.getfixturevalue("device"), lambda op: op)


def test_a_command_is_applied_once(ops: Ops):
    state = ops.state()
    for tensor in (state.kv_len, state.running, state.next_token):
        tensor.fill_(5)
    command = torch.zeros(SLOTS, dtype=torch.int32, device=ops.device)
    command[7], command[149] = 3, -1

    ops.apply_commands(state, command)
    for tensor in (state.kv_len, state.running, state.next_token):
        assert (tensor == 0).nonzero().flatten().tolist() == [7, 149]
        assert tensor.sum().item() == 5 * (SLOTS - 2)
    assert state.epoch.tolist() == command.tolist()

    state.kv_len[7] = 11
    ops.apply_commands(state, command)
    assert state.kv_len[7].item() == 11, "a stale command must not start the slot afresh again"


def test_gather_takes_running_slots_alone(ops: Ops):
    state = ops.state()
    state.next_token.copy_(torch.arange(SLOTS) + 1000)
    state.kv_len.copy_(torch.arange(SLOTS) + 2000)
    state.running[::2] = 1
    slot_of_row = [4, -1, 3, 148, HUGE, 0, LOWEST, SLOTS, *range(6, 146, 2)]
    expected = [4, -1, -1, 148, -1, 0, -1, -1, *range(6, 146, 2)]

    lanes = ops.gather_decode(state, ops.ints(slot_of_row))
    assert lanes.slot.tolist() == expected
    for row, slot in enumerate(expected):
        if slot >= 0:
            assert lanes.token[row].item() == 1000 + slot
            assert lanes.position[row].item() == 2000 + slot


@pytest.mark.parametrize(
    ("slot", "count", "live"), [(5, 200, 200), (5, 1, 1), (5, 0, 0), (-1, 9, 0), (5, HUGE, 256)]
)
def test_gather_prefill_lanes(ops: Ops, slot: int, count: int, live: int):
    tokens = [*range(100, 100 + live), *[HUGE, LOWEST] * 128][:256]
    lanes = ops.gather_prefill(
        ops.ints(tokens), ops.ints([slot]), ops.ints([30]), ops.ints([count])
    )
    assert lanes.slot.tolist() == [slot] * live + [-1] * (256 - live)
    assert lanes.token[:live].tolist() == tokens[:live]
    assert lanes.position[:live].tolist() == list(range(30, 30 + live))
    assert lanes.query_start.tolist() == [0, live]
    assert lanes.last.tolist() == [max(live - 1, 0)]


def test_commit_flags(ops: Ops):
    state, limits = ops.state(), ops.limits()
    state.running.fill_(1)
    state.kv_len.fill_(9)
    state.next_token.fill_(77)
    limits.stop_ids[2] = ops.ints([-1, 50, 60])
    limits.stop_ids[3] = ops.ints([50, -1, -1])
    # Ten cached tokens and the new one make eleven.
    limits.max_len[3:6] = ops.ints([11, 12, 11])
    slots, tokens, flags = zip(
        (1, 50, EMITTED),
        (2, 60, EMITTED | STOP),
        (3, 50, EMITTED | STOP | LENGTH),
        (4, 0, EMITTED),
        (5, 0, EMITTED | LENGTH),
        (6, -1, INVALID),
        (-1, 50, 0),
        (LOWEST, HUGE, 0),
        strict=True,
    )
    assert ops.commit_decode(state, ops.ints(tokens), ops.ints(slots), limits).tolist() == [*flags]

    running, kv_len, next_token = [1] * SLOTS, [9] * SLOTS, [77] * SLOTS
    for slot, token, flag in zip(slots[:6], tokens, flags, strict=False):
        running[slot] = int(flag == EMITTED)
        kv_len[slot] = 10
        next_token[slot] = token if flag != INVALID else 77
    assert state.running.tolist() == running
    assert state.kv_len.tolist() == kv_len
    assert state.next_token.tolist() == next_token


@pytest.mark.parametrize(
    ("slot", "count", "final", "token", "flag"),
    [
        (2, 10, 1, 40, EMITTED),
        (2, 10, 1, 50, EMITTED | STOP),
        (2, 29, 1, 40, EMITTED | LENGTH),
        (2, 29, 1, 50, EMITTED | STOP | LENGTH),
        (2, 10, 1, -1, INVALID),
        (2, 10, 0, 50, 0),
        (2, 0, 1, 50, 0),
        (-1, 10, 1, 50, 0),
    ],
)
def test_commit_prefill(ops: Ops, slot: int, count: int, final: int, token: int, flag: int):
    state, limits = ops.state(), ops.limits(max_len=50)
    limits.stop_ids[2] = ops.ints([-1, -1, 50])
    scalars = (ops.ints([value]) for value in (token, slot, 20, count, final))
    assert ops.commit_prefill(state, *scalars, limits).tolist() == [flag]

    expected = [[0] * SLOTS for _ in range(3)]
    if slot >= 0 and count > 0:
        kv_len, running, next_token = expected
        kv_len[slot] = 20 + count
        running[slot] = int(flag == EMITTED)
        next_token[slot] = token if flag & EMITTED else 0
    assert [state.kv_len.tolist(), state.running.tolist(), state.next_token.tolist()] == expected


def test_without_stop_ids_only_the_length_stops(ops: Ops):
    state = ops.state()
    limits = ops.limits(max_len=2)._replace(
        stop_ids=torch.empty((SLOTS, 0), dtype=torch.int32, device=ops.device)
    )
    assert ops.commit_decode(state, ops.ints([0]), ops.ints([3]), limits).tolist() == [
        EMITTED | LENGTH
    ]


def _mailbox(ops: Ops, entries: int, lanes: int) -> torch.Tensor:
    """As the engine has it: in pinned host memory where there is a GPU."""
    return torch.full((entries, lanes, 2), -1, dtype=torch.int64, pin_memory=ops.device == "cuda")


def _read(ops: Ops, mailbox: torch.Tensor) -> list[list[tuple[int, int, int, int]]]:
    """(tag, token, epoch, flags) of every lane of every entry."""
    if ops.device == "cuda":
        torch.cuda.synchronize()
    records = []
    for entry in mailbox.tolist():
        lanes = []
        for first, second in entry:
            tag = first >> 32 & 0xFFFFFFFF
            assert tag == second >> 32 & 0xFFFFFFFF
            lanes.append((tag, first & 0xFFFFFFFF, second >> 8 & 0xFFFFFF, second & 0xFF))
        records.append(lanes)
    return records


def test_publish_layout(ops: Ops):
    state = ops.state()
    state.epoch[9], state.epoch[4] = 0x1234567, -1
    mailbox = _mailbox(ops, entries=3, lanes=6)
    untouched = [(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFF, 0xFF)] * 6
    tokens, flags = ops.ints([123456, HUGE, LOWEST, -1]), ops.ints([EMITTED, HUGE, -1, INVALID])
    ops.publish(mailbox, state, tokens, flags, ops.ints([9, -1, LOWEST, 4]))

    assert state.sequence.tolist() == [1]
    assert _read(ops, mailbox) == [
        untouched,
        [
            (1, 123456, 0x234567, EMITTED),
            (1, 0, 0, 0),
            (1, 0, 0, 0),
            (1, 0xFFFFFFFF, 0xFFFFFF, INVALID),
            (1, 0, 0, 0),
            (1, 0, 0, 0),
        ],
        untouched,
    ]


def test_sequence_tags_wrap(ops: Ops):
    """The entry follows the whole sequence number, the tag its low 32 bits."""
    state = ops.state(sequence=2**32 - 3)
    mailbox = _mailbox(ops, entries=5, lanes=2)
    token, flags, slot = ops.ints([1]), ops.ints([EMITTED]), ops.ints([0])
    for sequence in range(2**32 - 2, 2**32 + 3):
        ops.publish(mailbox, state, token, flags, slot)
        assert state.sequence.tolist() == [sequence]
        assert _read(ops, mailbox)[sequence % 5] == [
            (sequence % 2**32, 1, 0, EMITTED),
            (sequence % 2**32, 0, 0, 0),
        ]


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


@given(data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_requests_live_and_die_as_in_plain_python(ops: Ops, data: st.DataObject):
    slots = [Slot() for _ in range(4)]
    state, limits = ops.state(len(slots)), ops.limits(len(slots))
    sequence = data.draw(st.sampled_from([0, 2**32 - 3]))
    state.sequence.fill_(sequence)
    mailbox = _mailbox(ops, entries=3, lanes=6)
    garbage = st.sampled_from([HUGE, LOWEST, -1, 0])
    token_ids = st.integers(-1, 6)
    commands = [0] * len(slots)

    def published(tokens: list[int], flags: list[int], rows: list[int]) -> None:
        nonlocal sequence
        sequence += 1
        live = [
            (sequence % 2**32, token & 0xFFFFFFFF, slots[slot].epoch, flag)
            if slot >= 0
            else (sequence % 2**32, 0, 0, 0)
            for token, flag, slot in zip(tokens, flags, rows, strict=True)
        ]
        rest = [(sequence % 2**32, 0, 0, 0)] * (6 - len(rows))
        assert _read(ops, mailbox)[sequence % 3] == live + rest

    for _ in range(6):
        # The host admits a new request to a slot, or cancels one: a new epoch either way.
        for number in data.draw(st.sets(st.integers(0, 3), max_size=2)):
            commands[number] += 1
            stop_ids = data.draw(st.lists(token_ids, min_size=STOP_IDS, max_size=STOP_IDS))
            max_len = data.draw(st.integers(1, 12))
            slots[number] = Slot(commands[number], stop_ids=stop_ids, max_len=max_len)
            limits.stop_ids[number] = ops.ints(stop_ids)
            limits.max_len[number] = max_len
        ops.apply_commands(state, ops.ints(commands))
        _check(state, slots)

        # One chunk of one prompt, of a slot that does not run, or none.
        number = data.draw(st.integers(-1, 3))
        if number >= 0 and slots[number].running:
            number = -1
        count = data.draw(st.integers(1, 4))
        start = slots[number].kv_len if number >= 0 else data.draw(garbage)
        final, token = data.draw(st.integers(0, 1)), data.draw(token_ids)
        chunk = [ops.ints([number]), ops.ints([start]), ops.ints([count])]
        lanes = ops.gather_prefill(ops.ints([HUGE] * 8), *chunk)
        assert lanes.slot.tolist() == [number] * (count * (number >= 0)) + [-1] * (
            8 - count * (number >= 0)
        )
        flags = ops.commit_prefill(state, ops.ints([token]), *chunk, ops.ints([final]), limits)
        expected = 0
        if number >= 0:
            slots[number].kv_len += count
            if final:
                slots[number].running = True
                expected = slots[number].commit(token)
        assert flags.tolist() == [expected]
        _check(state, slots)
        ops.publish(mailbox, state, ops.ints([token]), flags, chunk[0])
        published([token], [expected], [number])

        # A decode step over the slots in any order, with padded rows between.
        rows = data.draw(st.permutations([0, 1, 2, 3, -1, HUGE]))
        lanes = ops.gather_decode(state, ops.ints(rows))
        live = [row if 0 <= row < 4 and slots[row].running else -1 for row in rows]
        assert lanes.slot.tolist() == live
        for row, slot in enumerate(live):
            if slot >= 0:
                assert lanes.token[row].item() == slots[slot].next_token
                assert lanes.position[row].item() == slots[slot].kv_len
        tokens = [data.draw(token_ids if slot >= 0 else garbage) for slot in live]
        flags = ops.commit_decode(state, ops.ints(tokens), lanes.slot, limits)
        expected_flags = []
        for slot, token in zip(live, tokens, strict=True):
            if slot >= 0:
                slots[slot].kv_len += 1
            expected_flags.append(slots[slot].commit(token) if slot >= 0 else 0)
        assert flags.tolist() == expected_flags
        _check(state, slots)
        ops.publish(mailbox, state, ops.ints(tokens), flags, lanes.slot)
        published(tokens, expected_flags, live)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_captured_step_advances_by_replays_alone():
    ops = Ops("cuda", lambda op: op)
    state, limits = ops.state(4), ops.limits(4, max_len=13)
    state.running.fill_(1)
    state.kv_len.copy_(torch.arange(4))
    mailbox = _mailbox(ops, entries=3, lanes=4)
    command, rows = ops.ints([0, 0, 0, 0]), ops.ints([3, 0, -1, 1])

    def step() -> None:
        ops.apply_commands(state, command)
        lanes = ops.gather_decode(state, rows)
        # The next token is the position: any function of the lanes alone will do here.
        flags = ops.commit_decode(state, lanes.position, lanes.slot, limits)
        ops.publish(mailbox, state, lanes.position, flags, lanes.slot)

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
    # Slot 3 began three tokens on, so it reached max_len a step before the end.
    assert state.kv_len.tolist() == [10, 11, 2, 12]
    assert state.running.tolist() == [1, 1, 1, 0]
    assert state.next_token.tolist() == [9, 10, 0, 11]
    assert _read(ops, mailbox)[10 % 3] == [
        (10, 0, 0, 0),
        (10, 9, 0, EMITTED),
        (10, 0, 0, 0),
        (10, 10, 0, EMITTED),
    ]


def _good_arguments() -> Iterator[tuple[str, tuple[Any, ...]]]:
    ops = Ops("cpu", lambda op: op)
    state, limits = ops.state(4), ops.limits(4)
    lanes, one = ops.ints([0, 1, 2]), ops.ints([0])
    yield "apply_commands", (state, ops.ints([0] * 4))
    yield "gather_decode", (state, lanes)
    yield "gather_prefill", (lanes, one, one, one)
    yield "commit_decode", (state, lanes, lanes, limits)
    yield "commit_prefill", (state, one, one, one, one, one, limits)
    yield "publish", (torch.zeros(2, 3, 2, dtype=torch.int64), state, lanes, lanes, lanes)


@pytest.mark.parametrize(("op", "arguments"), list(_good_arguments()))
def test_wrong_dtypes_and_shapes_are_refused(op: str, arguments: tuple[Any, ...]):
    for number, argument in enumerate(arguments):
        wrong: list[Any] = []
        if isinstance(argument, torch.Tensor):
            wrong += [argument.float(), argument[None], argument[..., None]]
        else:
            for name, tensor in argument._asdict().items():
                wrong.append(argument._replace(**{name: tensor.double()}))
                wrong.append(argument._replace(**{name: tensor[None]}))
        for value in wrong:
            with pytest.raises(ValueError, match=r"must be"):
                getattr(state_ops, op)(*arguments[:number], value, *arguments[number + 1 :])


def test_more_rows_than_mailbox_lanes_is_refused():
    ops = Ops("cpu", lambda op: op)
    lanes = ops.ints([0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"4 rows do not fit a mailbox of 2 entries x 3 lanes"):
        mailbox = torch.zeros(2, 3, 2, dtype=torch.int64)
        ops.publish(mailbox, ops.state(4), lanes, lanes, lanes)
