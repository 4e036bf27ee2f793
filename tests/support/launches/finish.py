"""Shared by the tests of a step's last kernel: both twins of it, its inputs, its mailbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphengine.kernels.core.launching import Launch
from graphengine.kernels.step.begin import gather_and_embed, gather_and_embed_reference
from graphengine.kernels.step.finish import verify_commit_publish
from graphengine.kernels.step.finish_reference import verify_commit_publish_reference
from graphengine.kernels.step.record import unpack_state
from graphengine.kernels.step.state import DecodeLanes, SlotState, StopTensors

HUGE, LOWEST = 2**31 - 1, -(2**31)
STOP_IDS = 3
LAST_ID = 2**31 - 1
NOTHING = -(2**63)
FINITE, NAN = 1, 2
UNTOUCHED = -3


class Record(NamedTuple):
    """The contents of one lane of a mailbox entry."""

    tag: int
    tokens: tuple[int, ...]
    epoch: int
    flags: int


def new_mailbox(entries: int, lanes: int, items: int = 2, device: str = "cpu") -> torch.Tensor:
    """An empty mailbox as in the engine, in pinned host memory if there is a GPU."""
    pinned = device == "cuda"
    return torch.full((entries, lanes, items), UNTOUCHED, dtype=torch.int64, pin_memory=pinned)


def read_entry(mailbox: torch.Tensor, entry: int) -> list[Record | None]:
    """Every lane of an entry; None for a lane without writes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    records: list[Record | None] = []
    for items in mailbox[entry].tolist():
        if all(item == UNTOUCHED for item in items):
            records.append(None)
            continue
        (tag,) = {item >> 32 & 0xFFFFFFFF for item in items}
        *payloads, last = (item & 0xFFFFFFFF for item in items)
        state = unpack_state(last)
        assert not any(payloads[state.emitted :]), f"{payloads=} past {state.emitted}"
        assert state.emitted <= state.fed, f"more tokens than lanes: {state}"
        records.append(Record(tag, tuple(payloads[: state.emitted]), state.epoch, state.flags))
    return records


class Finished(NamedTuple):
    """A `FinishedStep` as lists."""

    token: list[int]
    flags: list[int]
    count: list[int]


@dataclass(frozen=True)
class Twin:
    """One twin of a decode step's first and last kernel, and the device it runs on."""

    device: str
    reference: bool

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def state(self, slots: int, sequence: int = 0) -> SlotState:
        fields = (torch.zeros(slots, dtype=torch.int32, device=self.device) for _ in range(4))
        return SlotState(*fields, sequence=self.ints([sequence], torch.int64))

    def limits(self, slots: int, max_len: int = HUGE, stop_ids: int = STOP_IDS) -> StopTensors:
        return StopTensors(
            stop_ids=torch.full((slots, stop_ids), -1, dtype=torch.int32, device=self.device),
            max_len=torch.full((slots,), max_len, dtype=torch.int32, device=self.device),
        )

    def lanes(self, slot: Sequence[int], token: Sequence[int] = ()) -> DecodeLanes:
        """The token of a padded lane and the positions of all lanes are poison."""
        garbage = self.ints([HUGE] * len(slot))
        return DecodeLanes(self.ints(token) if token else garbage, self.ints(slot), garbage)

    def mailbox(self, entries: int, lanes: int, items: int = 2) -> torch.Tensor:
        return new_mailbox(entries, lanes, items, self.device)

    def tiles(self, tokens: Sequence[int | None], tiles: int = 3) -> list[torch.Tensor]:
        """Best and health of lanes that yield these tokens; None for a padded one, full of poison.

        The best tile differs from lane to lane, and all others lose by their values.
        """
        best = torch.full((len(tokens), tiles), NOTHING, dtype=torch.int64)
        health = torch.zeros((len(tokens), tiles), dtype=torch.int32)
        for lane, token in enumerate(tokens):
            for tile in range(tiles):
                best[lane, tile] = (tile - tiles - 7) << 32 | (LAST_ID - tile)
            if token is None:
                best[lane], health[lane] = 2**63 - 1, NAN
            elif token < 0:
                health[lane, (5 * lane) % tiles] = (0, NAN)[lane % 2]
            else:
                best[lane, (7 * lane) % tiles] = 1 << 32 | (LAST_ID - token)
                health[lane, (5 * lane) % tiles] = FINITE
        return [best.to(self.device), health.to(self.device)]

    def begin(self, *arguments: Any, **options: Any) -> DecodeLanes:
        begin = gather_and_embed_reference if self.reference else gather_and_embed
        return begin(*arguments, **options)

    def finish(self, *arguments: Any, **options: Any) -> Finished:
        """All arguments but the arrivals, which must be as they were."""
        if self.reference:
            step = verify_commit_publish_reference(*arguments, **options)
        else:
            arrivals = self.ints([0, 77])
            step = verify_commit_publish(*arguments, Launch(arrivals=arrivals), **options)
            assert arrivals.tolist() == [0, 77]
        return Finished(*(tensor.tolist() for tensor in step[:3]))
