"""Work that waits in a queue: it is done in its order, as far as somebody asks."""

from __future__ import annotations

import pytest
import torch

from graphengine.buckets import Field, HostQueue, StaticBuffers


def test_work_is_done_in_its_order() -> None:
    queue, done = HostQueue(), list[int]()
    for number in range(5):
        queue.add(lambda number=number: done.append(number))
    assert (queue.done, queue.queued) == (0, 5)
    queue.run(2)
    assert done == [0, 1] and (queue.done, queue.queued) == (2, 5)
    queue.run(1)
    assert done == [0, 1]
    queue.run()
    assert done == [*range(5)] and queue.done == queue.queued == 5


def test_after_an_error_nothing_is_done() -> None:
    queue, done = HostQueue(), list[int]()
    queue.add(lambda: 1 // 0)
    queue.add(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        queue.run()
    with pytest.raises(RuntimeError, match="call 1 of 2 has failed before: ZeroDivisionError"):
        queue.run()
    assert not done and (queue.done, queue.queued) == (1, 2)
    queue.run(1)


def test_loads_keep_what_they_were_given() -> None:
    """The copy of a load is made later, of the values that it had then."""
    field = Field(name="tokens", shape=(2,), dtype=torch.int32, pad=-1)
    buffers, queue, seen = StaticBuffers([field], "cpu"), HostQueue(), list[list[int]]()
    for sequence in (1, 2):
        buffers.load({"tokens": [sequence]}, sequence=sequence, stream=queue)
        queue.add(lambda: seen.append(buffers["tokens"].tolist()))
    assert buffers["tokens"].tolist() == [-1, -1]
    queue.run()
    assert seen == [[1, -1], [2, -1]]
    buffers.close()
