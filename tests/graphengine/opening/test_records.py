"""Mailboxes in a file: whoever maps it has the same ones."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from graphengine.opening import records
from graphengine.opening.inventory import RingShape
from graphengine.opening.records import RecordMemory


def test_who_takes_the_same_shapes_has_the_same_memory(tmp_path: Path) -> None:
    shapes = [RingShape(4, 2, 3), RingShape(1, 5, 1)]
    nbytes = sum(shape.nbytes for shape in shapes)
    writer, reader = (RecordMemory(tmp_path / "records", nbytes) for _ in range(2))
    written, read = ([each.take(shape) for shape in shapes] for each in (writer, reader))
    assert [tuple(each.shape) for each in written] == [*map(tuple, shapes)]
    assert not any(each.any() for each in read)
    for number, each in enumerate(written, start=1):
        each.fill_(number)
    assert all(map(torch.equal, read, written))


class Locked:
    """In place of page-locked memory."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self.nbytes, self.device, self.closed = memory.nbytes, device, 0

    def close(self) -> None:
        self.closed += 1


def test_what_kernels_write_is_page_locked_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Locked] = []

    def lock(*given: object) -> Locked:
        made.append(Locked(*given))
        return made[-1]

    monkeypatch.setattr(records, "PageLocked", lock)
    device = torch.device("cuda:1")
    RecordMemory(tmp_path / "read", 64).close()
    memory = RecordMemory(tmp_path / "written", 64, device)
    assert [(each.nbytes, each.device) for each in made] == [(64, device)]
    # Its blocks are there.
    assert (tmp_path / "written").stat().st_blocks
    memory.close()
    memory.close()
    assert made[0].closed == 1


@pytest.mark.parametrize("device", [None, torch.device("cuda")])
def test_a_file_without_room_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device | None
) -> None:
    def allocate(file: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    message = r"No space left on device: a rank's results take 64 bytes: '.*/written'"
    with pytest.raises(OSError, match=message):
        RecordMemory(tmp_path / "written", 64, device)
