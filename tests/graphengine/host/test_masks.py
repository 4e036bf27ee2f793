"""Waits for drafts that are copied to the host, as on a GPU: by events, which a test plays."""

from __future__ import annotations

import pytest
import torch

from graphengine.buckets import Field, StaticBuffers
from graphengine.host.masks import MaskTable


class PlayedEvent:
    """Stands in for an event of CUDA: it is `done` when a test says so."""

    def __init__(self) -> None:
        self.done = False

    def record(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def masks_of(monkeypatch: pytest.MonkeyPatch, made: list[PlayedEvent]) -> MaskTable:
    """The masks of an engine whose device drafts; the events that it records go to `made`."""

    def event() -> PlayedEvent:
        made.append(PlayedEvent())
        return made[-1]

    def field(name: str, *shape: int) -> Field:
        return Field(
            name=name, shape=shape, dtype=torch.int32, owner="device", pad=0, meaning="of a test"
        )

    monkeypatch.setattr(torch.cuda, "Event", event)
    fields = [field("allowed_bits", 2, 3, 4), field("draft_tokens", 2, 2)]
    masks = MaskTable(StaticBuffers(fields, "cpu"), host_drafts=False)
    masks._on_gpu = True
    return masks


def test_drafts_of_replays_that_were_read_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the newest of them, too, but of no later one."""
    made: list[PlayedEvent] = []
    masks = masks_of(monkeypatch, made)

    def arrived(read: int) -> bool | None:
        return masks.wait(read, timeout=0, limit=1.0, mode="spin")

    for sequence in (3, 5):
        masks.fetch_drafts(sequence)
    third, fifth = made
    assert arrived(2) is True
    assert arrived(3) is None
    third.done = True
    assert arrived(4) is True and arrived(5) is None
    # An event whose copy has arrived is recorded again.
    masks.fetch_drafts(6)
    fifth.done = True
    assert arrived(5) is True and arrived(6) is None and len(made) == 2
    with pytest.raises(TimeoutError, match="waited 0 s for the drafts of replay 6"):
        masks.wait(6, timeout=None, limit=0.0, mode="spin")
