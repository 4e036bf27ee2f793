"""Mailboxes in a file: whoever maps it has the same ones."""

from __future__ import annotations

from pathlib import Path

import torch

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
