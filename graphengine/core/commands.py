"""Commands: what a host asks of the ranks, as small records of an operation's arguments.

A command travels like this. A method of the driver's runtime makes the record and gives it to
`run`. That writes it into a ring of shared memory (`parallel/link.py`), from which the process of
every other rank takes it, and then executes it on the driver's own rank. All ranks execute it by
the same table, `operations` of their runtime. So an operation is written once: its record here, and
its function in that table. Without other ranks, `run` only executes.

Fields without a default travel: numbers, a graph's key, and bytes, a path or block numbers as data.
Those with a default stay on the driver, as other ranks get their values in another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from graphengine.buckets import HostQueue, StaticBuffers
from graphengine.host.masks import MaskTable
from graphengine.host.routes import Routing
from graphengine.host.state_checkpoints import BlockCopy, Copy, StateCopy
from graphengine.models.checkpoints.given_tensors import GivenTensors
from graphengine.program.graph_key import GraphKey
from graphengine.requests.request import Request

Data: TypeAlias = bytes | memoryview


class Load(NamedTuple):
    """Repeat a load of the driver's buffers; see `StaticBuffers.repeat`.

    acknowledged  the last replay that the driver knows to have published
    """

    group: int
    start: int
    stop: int
    sequence: int
    acknowledged: int
    data: Data


class PutRoutes(NamedTuple):
    """Store expert ids, int16, in a slot's record from index `start` on; see `RouteTable.put`."""

    slot: int
    start: int
    ids: Data


class Swap(NamedTuple):
    """Copy the first `out` of `swap_pairs` to the swap area, or `back` from it."""

    out: int
    back: int


class ReplayGraph(NamedTuple):
    """Replay a graph."""

    key: GraphKey


class FetchDrafts(NamedTuple):
    """Copy the drafts of all slots to memory that the driver maps."""


class ReadBlocks(NamedTuple):
    """Copy KV blocks to the driver's host memory, in the layout of one model."""

    blocks: tuple[int, ...]


class WriteBlocks(NamedTuple):
    """Copy what `ReadBlocks` returned into these blocks."""

    blocks: tuple[int, ...]
    whole: Sequence[Tensor] | None = None


class ReadStates(NamedTuple):
    """Copy the states kept at a place to the driver's host memory, in the layout of one model."""

    place: int


class WriteStates(NamedTuple):
    """Copy what `ReadStates` returned to a place."""

    place: int
    whole: Sequence[Tensor] | None = None


class ReadScales(NamedTuple):
    """Digest the fp8 cache scales as a single rank would hold them."""


class UpdateWeights(NamedTuple):
    """Fill the weights with the tensors of the checkpoint in this folder.

    temporary  whether the driver has made the folder for this update
    drafts     whether they are of a drafter with a checkpoint of its own
    given      the tensors, where they need not be read
    """

    folder: str
    temporary: bool
    drafts: bool
    given: GivenTensors | None = None


class LoadAdapter(NamedTuple):
    """Copy the adapter in this folder into a slot."""

    slot: int
    folder: str


class SaveMemory(NamedTuple):
    """Copy the weights to the host before they leave the device.

    drop  only those that no update of all weights brings
    """

    drop: bool


class ReleaseMemory(NamedTuple):
    """Give the memory of the saved weights back to the device.

    cache  that of the KV cache as well
    """

    cache: bool


class RestoreMemory(NamedTuple):
    """Have the memory of the weights again, and what was saved of them.

    cache  that of the KV cache instead, which is then 0
    """

    cache: bool


class DigestState(NamedTuple):
    """Digest the state that is equal on all ranks."""


class Close(NamedTuple):
    """End the rank."""


Command: TypeAlias = (
    Load
    | PutRoutes
    | Swap
    | StateCopy
    | BlockCopy
    | ReplayGraph
    | FetchDrafts
    | ReadBlocks
    | WriteBlocks
    | ReadStates
    | WriteStates
    | ReadScales
    | UpdateWeights
    | LoadAdapter
    | SaveMemory
    | ReleaseMemory
    | RestoreMemory
    | DigestState
    | Close
)
COMMANDS: tuple[type[Command], ...] = get_args(Command)
"""All commands; the index of one is its number on the way to other ranks."""

OfSlots: TypeAlias = Load | PutRoutes | Swap | StateCopy | BlockCopy
"""Commands about the requests in a rank's slots, which other ranks may not share."""


class SlotOperations:
    """What a host does with the requests in a rank's slots, whichever process has the rank.

    buffers    the host-owned fields of the slots
    masks      the host's side of the masks for grammars and allowed ids
    routing    experts recorded of tokens, and experts for tokens to replay; None if experts are not
               recorded
    data_room  bytes of data that one command carries, at most
    """

    buffers: StaticBuffers
    masks: MaskTable
    routing: Routing | None
    data_room: int
    # Whether ranks of other processes have these slots too, and repeat what is loaded.
    _repeated: ClassVar[bool] = False
    # The stream or queue that takes the copies of loads.
    _copies: torch.cuda.Stream | HostQueue | None = None

    def run(self, command: Command) -> Any:
        """Execute a command on all ranks that have these slots."""
        raise NotImplementedError

    def _send(self, command: Command) -> None:
        """Send a command to ranks of other processes that have these slots."""
        raise NotImplementedError

    @property
    def next_replay(self) -> int:
        """The sequence number of the next replay."""
        raise NotImplementedError

    def load(self, updates: Mapping[str, Any]) -> None:
        """Copy host-owned fields that changed to the device: one staging block, one copy."""
        buffers, sequence = self.buffers, self.next_replay
        acknowledged = buffers.acknowledged
        copies = buffers.load(updates, sequence=sequence, stream=self._copies)
        for copied in copies if self._repeated else ():
            self._send(Load(*copied, sequence, acknowledged, buffers.image(copied)))

    def load_routes(self, slots: Sequence[Request | None]) -> dict[str, Any]:
        """Store the expert routes that the slots' requests replay; returns the fields to load."""
        if self.routing is None:
            return {}
        table = self.routing.table
        updates = table.updates(slots)
        for slot in table.written if self._repeated else ():
            ids = table.record(slot, updates["routing_len"][slot])
            most = self.data_room // ids.itemsize
            for start in range(0, len(ids), most):
                piece = ids[start : start + most].view(np.uint8)
                self._send(PutRoutes(slot, start, piece.data))
        return updates

    def swap(self, out: int, back: int) -> None:
        """Queue the copy of the first `out` of `swap_pairs` to the swap area, or `back` from it."""
        self.run(Swap(out, back))

    def copy_states(self, copies: list[Copy]) -> None:
        """Queue these copies, and empty the list."""
        for each in copies:
            self.run(each)
        copies.clear()
