"""The memory between a driver and its ranks: commands arrive whole, in order, and not too early."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.core.commands import (
    COMMANDS,
    Close,
    Command,
    Data,
    Load,
    ReadBlocks,
    ReplayGraph,
    UpdateWeights,
    WriteStates,
)
from graphengine.opening.inventory import LinkShape
from graphengine.parallel.command_codec import CommandCodec, Encoded
from graphengine.parallel.link import ALL, DriverEnd, LinkMemory, RankEnd, ReceivedCommand, Stage
from graphengine.parallel.worker import WorkerRuntime
from graphengine.program.graph_key import GraphKey

CONTEXT = multiprocessing.get_context("spawn")
RANKS, ROOM = 2, 24
SHAPE = LinkShape.of_loads(RANKS, ROOM - 3)
ENTRIES = SHAPE.commands
GRAPHS = (GraphKey("prefill", 16), GraphKey("decode", 2), GraphKey("decode", 2, variant="full"))


def linked() -> tuple[LinkMemory, DriverEnd, list[RankEnd]]:
    memory = LinkMemory.allocate(CONTEXT, SHAPE)
    return memory, DriverEnd(memory, GRAPHS), [RankEnd(memory, rank, GRAPHS) for rank in (1, 2)]


VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    bool: st.booleans(),
    GraphKey: st.sampled_from(GRAPHS),
    Data: st.binary(max_size=ROOM),
    str: st.text(st.characters(codec="utf-8"), max_size=ROOM // 4),
    tuple[int, ...]: st.lists(st.integers(0, 2**31 - 1), max_size=ROOM // 4).map(tuple),
}


def commands_of(kind: type[Command]) -> st.SearchStrategy[Command]:
    """Commands of a kind, as they arrive: without the values that stay on the driver."""
    hints = get_type_hints(kind)
    names = [name for name in kind._fields if name not in kind._field_defaults]
    return st.tuples(*(VALUES[hints[name]] for name in names)).map(lambda values: kind(*values))


takings = st.builds(
    ReceivedCommand, st.sampled_from(COMMANDS).flatmap(commands_of), st.integers(0, RANKS)
)


@settings(max_examples=extent(12, 30), deadline=None)
@given(sent=st.lists(takings, max_size=3 * ENTRIES), data=st.data())
def test_every_rank_takes_every_command_once(
    sent: list[ReceivedCommand], data: st.DataObject
) -> None:
    _, driver, ranks = linked()
    taken: list[list[ReceivedCommand]] = [[], []]
    waiting = list(sent)
    while waiting or any(len(each) < len(sent) for each in taken):
        who = data.draw(st.integers(0, 2))
        if who == 0 and waiting and driver.has_room():
            command, to = waiting.pop(0)
            number = driver.send(command, to=to)
            assert number == driver.sent == len(sent) - len(waiting)
            continue
        end, mine = ranks[who - 1], taken[who - 1]
        due = end.take()
        if due is None:
            assert len(mine) == driver.sent
            continue
        assert end.take() == due, "it is there until it is finished"
        mine.append(due)
        end.finish()
        assert driver.done(1 + ranks.index(end)) == len(mine)
    for mine in taken:
        assert mine == sent
        # Tuples of two kinds may be equal.
        assert [type(each.command) for each in mine] == [type(each.command) for each in sent]
    assert driver.least_done() == len(sent)


def test_a_rank_executes_every_command() -> None:
    assert {*COMMANDS} == {*WorkerRuntime.operations, Close}


def test_values_of_the_driver_do_not_travel() -> None:
    codec, nothing = CommandCodec(GRAPHS), None
    tensors: Any = object()
    for command in (WriteStates(3, tensors), UpdateWeights("/there", True, False, tensors)):
        assert codec.decode(codec.encode(command)) == (*command[:-1], nothing)


def test_what_no_command_has_is_an_error() -> None:
    codec = CommandCodec(GRAPHS)
    with pytest.raises(KeyError, match="size=3"):
        codec.encode(ReplayGraph(GraphKey("decode", 3)))
    with pytest.raises(IndexError):
        codec.decode(Encoded(COMMANDS.index(ReplayGraph), [len(GRAPHS)], b""))
    with pytest.raises(IndexError):
        codec.decode(Encoded(len(COMMANDS), [], b""))
    blocks = codec.encode(ReadBlocks((1, 2)))
    with pytest.raises(ValueError, match="buffer size must be a multiple"):
        codec.decode(blocks._replace(data=bytes(blocks.data)[:-1]))


def test_a_ring_is_full_while_one_rank_lags() -> None:
    _, driver, (first, second) = linked()
    for number in range(ENTRIES):
        assert driver.has_room()
        driver.send(ReplayGraph(GRAPHS[number % len(GRAPHS)]))
        assert first.take() is not None
        first.finish()
    assert not driver.has_room() and driver.least_done() == 0
    assert second.take() == ReceivedCommand(ReplayGraph(GRAPHS[0]), ALL)
    second.finish()
    assert driver.has_room()


@pytest.mark.parametrize("word", range(1, 13))
def test_a_damaged_command_is_never_there(word: int) -> None:
    """Wherever a bit of it differs; once all of it has arrived, it is."""
    memory, driver, (end, _) = linked()
    load = Load(1, 2, 3, 4, 5, b"123456789abcdefghijklmno")
    driver.send(load, to=2)
    entry = np.frombuffer(memory.words, dtype=np.int64)[-ENTRIES * 13 :].reshape(ENTRIES, 13)[1]
    assert entry[0] == 1 and entry[1] == COMMANDS.index(Load)
    entry[word] ^= 1 << 17
    assert end.take() is None
    entry[word] ^= 1 << 17
    assert end.take() == ReceivedCommand(load, 2)


def test_stages_and_texts() -> None:
    _, driver, (first, second) = linked()
    assert driver.stage(1) is Stage.STARTING and first.allowed() is Stage.STARTING
    first.reach(Stage.LOADED)
    assert driver.stage(1) is Stage.LOADED and driver.stage(2) is Stage.STARTING
    driver.let(Stage.LOADED)
    assert second.allowed() is Stage.LOADED
    second.say("né")
    first.fail("x" * 9000, 77)
    assert driver.text(2) == "né" and driver.text(1) == "x" * 8192
    assert driver.failed_at(1) == 77 and driver.stage(1) is Stage.FAILED
    assert SHAPE.words == 3 * 4 + 2 * (1024 + 64) + ENTRIES * 13


def test_a_file_without_room_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a rank maps it, which does not ask again."""

    def allocate(file: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    LinkMemory.of_file(tmp_path / "driver's", SHAPE)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    LinkMemory.of_file(tmp_path / "driver's", SHAPE)
    message = f"No space left on device: commands to ranks take {8 * SHAPE.words} bytes: '.*/none'"
    with pytest.raises(OSError, match=message):
        LinkMemory.of_file(tmp_path / "none", SHAPE)


HOURS = 3_600_000_000_000


@pytest.mark.parametrize("when", [0, 12345, 78 * HOURS, 2**48 - 100, 900 * HOURS])
@pytest.mark.parametrize("number", [1, 64, 0x7FFF, 0x8000, 10**12])
def test_launches_are_signed_times_after_the_drivers(number: int, when: int) -> None:
    _, driver, (first, second) = linked()
    first.launched(number, when + 300)
    assert driver.launched_after(number, when) is None, "the second one has not launched it"
    second.launched(number, max(0, when - 4 * HOURS))
    assert driver.launched_after(number, when) == [300, -min(when, 4 * HOURS)]


def test_a_launch_is_forgotten_once_its_ring_has_wrapped() -> None:
    _, driver, ranks = linked()
    for number in range(1, 1 + 3 * SHAPE.launches):
        for rank, end in enumerate(ranks, start=1):
            end.launched(number, 1000 * number + rank)
    kept = [number for number in range(1, number + 1) if driver.launched_after(number, 0)]
    assert kept == list(range(1 + 2 * SHAPE.launches, 1 + 3 * SHAPE.launches))
    assert driver.launched_after(number, 1000 * number) == [1, 2]
    assert driver.launched_after(number + 1, 0) is None, "nobody has launched it yet"
