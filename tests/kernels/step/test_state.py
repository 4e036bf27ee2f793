"""The ops of the self-advancing state, both twins of each; `test_finish` has whole requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphengine.kernels.step import state as state_ops
from graphengine.kernels.step.publish import publish, publish_reference
from graphengine.kernels.step.state import (
    EMITTED,
    INVALID,
    LENGTH,
    STOP,
    SlotState,
    StopSequences,
    StopTensors,
)
from launches.finish import new_mailbox, read_entry

HUGE, LOWEST = 2**31 - 1, -(2**31)
# More rows than one program of a kernel serves.
SLOTS = 150
STOP_IDS = 3


def find_op(name: str) -> Callable[..., Any]:
    ops = vars(state_ops) | {"publish": publish, "publish_reference": publish_reference}
    op: Callable[..., Any] = ops[name]
    return op


@dataclass(frozen=True)
class Ops:
    """One twin of every op, and the device it runs on."""

    device: str
    name: Callable[[str], str]

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return find_op(self.name(op))

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


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("token", "start", "min_len", "final", "flag"),
    [
        (50, 30, 30, 1, EMITTED | STOP),
        (60, 0, 0, 1, EMITTED | STOP),
        (50, 31, 0, 1, EMITTED),
        (50, 0, 31, 1, EMITTED),
        (70, 0, 0, 1, EMITTED),
        (-1, 0, 0, 1, INVALID),
        (50, 0, 0, 0, 0),
    ],
)
def test_the_first_token_may_be_a_stop_sequence(
    ops: Ops, length: int, token: int, start: int, min_len: int, final: int, flag: int
):
    """At position 30. Only a sequence of one token can end there; the other slots' are poison."""
    state, limits = ops.state(), ops.limits()
    table = torch.full((SLOTS, 5, length), 50, dtype=torch.int32, device=ops.device)
    table[2] = -1
    table[2, 1:3, -1] = ops.ints([50, 60])
    if length > 1:
        table[2, 3, -2:] = ops.ints([30, 70])
    at = [ops.ints([LOWEST] * SLOTS) for _ in range(2)]
    at[0][2], at[1][2] = start, min_len
    scalars = (ops.ints([value]) for value in (token, 2, 20, 10, final))
    sequences = StopSequences(table, *at)
    assert ops.commit_prefill(state, *scalars, limits, sequences).tolist() == [flag]
    assert state.running[2].item() == (flag == EMITTED)
    assert state.next_token[2].item() == (token if flag & EMITTED else 0)


def test_without_stop_ids_only_the_length_stops(ops: Ops):
    state = ops.state()
    limits = ops.limits(max_len=2)._replace(
        stop_ids=torch.empty((SLOTS, 0), dtype=torch.int32, device=ops.device)
    )
    scalars = (ops.ints([value]) for value in (0, 3, 0, 1, 1))
    assert ops.commit_prefill(state, *scalars, limits).tolist() == [EMITTED | LENGTH]


@pytest.mark.parametrize("items", [2, 3, 5, 16])
def test_publish_layout(ops: Ops, items: int):
    state = ops.state()
    state.epoch[9], state.epoch[4] = 0x1234567, -1
    mailbox = new_mailbox(3, 7, items, ops.device)
    tokens = ops.ints([123456, HUGE, LOWEST, -1, 77])
    flags = ops.ints([EMITTED | STOP, HUGE, -1, INVALID, 0])
    ops.publish(mailbox, state, tokens, flags, ops.ints([9, -1, LOWEST, 4, 5]))

    assert state.sequence.tolist() == [1]
    assert read_entry(mailbox, 1) == [
        (1, (123456,), 0x4567, EMITTED | STOP),
        (1, (), 0, 0),
        (1, (), 0, 0),
        (1, (), 0xFFFF, INVALID),
        (1, (), 0, 0),
        (1, (), 0, 0),
        (1, (), 0, 0),
    ]
    assert read_entry(mailbox, 0) == read_entry(mailbox, 2) == [None] * 7
    # To the bit, once.
    state_item = 0x4567 << 16 | 1 << 10 | 1 << 4 | EMITTED | STOP
    assert mailbox[1, 0, 0].item() == 1 << 32 | 123456
    assert mailbox[1, 0, -1].item() == 1 << 32 | state_item


def test_sequence_tags_wrap(ops: Ops):
    """The entry follows the whole sequence number, the tag its low 32 bits."""
    state = ops.state(sequence=2**32 - 3)
    mailbox = new_mailbox(5, 2, 3, ops.device)
    token, flags, slot = ops.ints([1]), ops.ints([EMITTED]), ops.ints([0])
    for sequence in range(2**32 - 2, 2**32 + 3):
        ops.publish(mailbox, state, token, flags, slot)
        assert state.sequence.tolist() == [sequence]
        assert read_entry(mailbox, sequence % 5) == [
            (sequence % 2**32, (1,), 0, EMITTED),
            (sequence % 2**32, (), 0, 0),
        ]


def _good_arguments() -> Iterator[tuple[str, tuple[Any, ...]]]:
    ops = Ops("cpu", lambda op: op)
    state, limits = ops.state(4), ops.limits(4)
    lanes, one = ops.ints([0, 1, 2]), ops.ints([0])
    yield "apply_commands", (state, ops.ints([0] * 4))
    yield "gather_prefill", (lanes, one, one, one)
    sequences = StopSequences(torch.zeros(4, 2, 3, dtype=torch.int32), *[ops.ints([0] * 4)] * 2)
    yield "commit_prefill", (state, one, one, one, one, one, limits, sequences)
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
                find_op(op)(*arguments[:number], value, *arguments[number + 1 :])


def test_a_mailbox_without_room_is_refused():
    ops = Ops("cpu", lambda op: op)
    lanes = ops.ints([0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"4 rows do not fit a mailbox of 2 entries x 3 lanes"):
        mailbox = torch.zeros(2, 3, 2, dtype=torch.int64)
        ops.publish(mailbox, ops.state(4), lanes, lanes, lanes)
    message = r"a mailbox must be of 2 items a lane or more for 1 tokens and the state, not 1"
    with pytest.raises(ValueError, match=message):
        mailbox = torch.zeros(2, 4, 1, dtype=torch.int64)
        ops.publish(mailbox, ops.state(4), lanes, lanes, lanes)
