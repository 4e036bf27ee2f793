"""The runtime of the driver's own rank, which leads the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphengine.buckets import Copied
from graphengine.buckets.mailbox import Payloads, Queryable
from graphengine.config import EngineConfig
from graphengine.core.runtime import Runtime
from graphengine.host.kept_states import Copy, StateCopy
from graphengine.host.plan import Replay
from graphengine.host.routes import RouteTable
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.given_tensors import GivenTensors, as_checkpoint
from graphengine.models.contract import Share
from graphengine.models.weights import StoredWeights
from graphengine.observe.rank_times import UNKNOWN_LAUNCH
from graphengine.opening.calibration import calibrate
from graphengine.opening.loading import (
    Found,
    Opened,
    load_checkpoint,
    plan_checkpoint,
    read_checkpoint,
)
from graphengine.opening.memory import MemoryPlan
from graphengine.opening.updating import LoadedWeights
from graphengine.parallel.kept_parts import KeptParts
from graphengine.parallel.link import ALL, Kind, Stage
from graphengine.parallel.process_groups import ProcessGroups
from graphengine.parallel.ranks import Ranks, rank_devices
from graphengine.parallel.torchrun import follow, launched_share
from graphengine.parallel.whole_weights import whole_fingerprint
from graphengine.parallel.worker import state_digest
from graphengine.program.graph_key import GraphKey
from graphengine.requests.request import Request
from graphengine.requests.result import TokenLogprobs


def open_with_ranks(
    path: str | Path,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None,
    kind: type[DriverRuntime],
) -> tuple[Opened, DriverRuntime]:
    """Open a checkpoint as rank 0 of `config.ranks`, like `open_checkpoint`, with a runtime of this
    `kind` that leads all ranks.

    In a process that torchrun has started for another rank it does not return, but ends the
    process. ValueError, before a process is started, for a model that cannot be split; RankFailed
    if a rank fails.
    """
    devices, share = rank_devices(config), launched_share(config)
    if share is not None and share.rank:
        follow(path, config, share, devices)
    found = read_checkpoint(path, config, Share(0, config.ranks))
    memories = [plan_checkpoint(found, config)] * config.ranks
    launched = share is not None
    ranks = Ranks(found.checkpoint, config, memories, devices, launched=launched)
    return lead_ranks(ranks, found, memories[0], config, progress, kind)


def lead_ranks(
    ranks: Ranks,
    found: Found,
    memory: MemoryPlan,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None,
    kind: type[DriverRuntime],
) -> tuple[Opened, DriverRuntime]:
    """Load rank 0's weights, and open its runtime once all ranks have loaded theirs. RankFailed if
    a rank fails; any error ends all ranks.
    """
    try:
        with ranks.explained():
            opened = load_checkpoint(found, memory, config, progress)
            ranks.wait_for(Stage.LOADED)
            ranks.let(Stage.LOADED)
            return opened, kind(opened, memory, config, ranks, found)
    except BaseException:
        ranks.broken = True
        ranks.close()
        raise


class DriverRuntime(Runtime):
    """A runtime that sends `ranks` each load, swap and replay, before or while it does the same.

    Its waits watch the ranks, too: RankFailed once a rank has ended.

    record_piece  ids of a routing record that one command carries, at most
    """

    def __init__(
        self,
        opened: Opened,
        memory: MemoryPlan,
        config: EngineConfig,
        ranks: Ranks,
        found: Found,
    ) -> None:
        self.ranks = ranks
        self.groups = groups = ProcessGroups(
            ranks.rendezvous, Share(0, config.ranks), memory, config
        )
        group, stages = groups.tensor, groups.stages
        try:
            if found.calibration:
                ids = found.calibration
                calibrate(opened.model, memory, config, opened.drafter, ids, group)
            super().__init__(
                opened.model, memory, config, opened.drafter, group=group, stages=stages
            )
            ranks.wait_for(Stage.FOLLOWING)
        except BaseException:
            groups.abandon()
            groups.close()
            raise
        ranks.remove_folder()
        groups.wait_up_to(config.wait_limit_s)
        # The ids are int16, and a command carries no more bytes than the largest load.
        self.record_piece = memory.load_bytes // 2
        self._found, self._dtype = found, memory.dtype
        self._fingerprints: dict[str, str] = {}
        self._parts = groups.kept_parts(self, found)
        self.rank_times = _Times(ranks, groups, config)
        self._numbers = {key: number for number, key in enumerate(memory.graphs)}
        if self.stream is not None:
            self._watched = _Watched(self.stream, ranks)

    def load(self, updates: Mapping[str, Any]) -> list[Copied]:
        """Copy host-owned fields that changed to the devices of all ranks."""
        sequence, acknowledged = self.launched + 1, self.buffers.acknowledged
        with self.ranks.explained():
            copied = super().load(updates)
            for each in copied:
                numbers = (*each, sequence, acknowledged)
                self.ranks.send(Kind.LOAD, numbers, self.buffers.image(each))
        return copied

    def load_routes(self, slots: Sequence[Request | None]) -> dict[str, Any]:
        """Store the expert routes that requests replay on all ranks; returns the fields to load."""
        updates = super().load_routes(slots)
        if self.routing is not None:
            with self.ranks.explained():
                for slot in self.routing.table.written:
                    self.send_record(self.routing.table, slot, updates["routing_len"][slot])
        return updates

    def send_record(self, table: RouteTable, slot: int, length: int, *, to: int = ALL) -> None:
        """Send the routes that a slot's request replays, from this table, to all ranks or one."""
        ids = table.record(slot, length)
        for start in range(0, len(ids), self.record_piece):
            piece = ids[start : start + self.record_piece]
            self.ranks.send(Kind.ROUTES, (slot, start), piece.tobytes(), to=to)

    def swap(self, out: int, back: int) -> None:
        """Queue the copies of `Runtime.swap` on all ranks."""
        with self.ranks.explained():
            self.ranks.send(Kind.SWAP, (out, back))
            super().swap(out, back)

    def copy_kept(self, copies: list[Copy]) -> None:
        """Queue the copies of `Runtime.copy_kept` on all ranks."""
        with self.ranks.explained():
            for each in copies:
                kind = Kind.COPY_STATE if isinstance(each, StateCopy) else Kind.COPY_BLOCK
                self.ranks.send(kind, tuple(map(int, each)))
            super().copy_kept(copies)

    def _model_fingerprint(self) -> str:
        """Fingerprint of all weights, as one rank would have it; the first call reads them again.

        ValueError where the checkpoint has changed.
        """
        if "model" not in self._fingerprints:
            whole = self._found.whole.allocate(device="meta", dtype=self._dtype)
            source = self._found.checkpoint
            self._fingerprints["model"] = self._whole_fingerprint(whole, source)
        return self._fingerprints["model"]

    def _drafter_fingerprint(self) -> str:
        """The fingerprint of the drafter's whole weights; of this rank's weights where they cannot
        be read as they are from a checkpoint.
        """
        drafted = self._found.drafter.whole_weights(self._dtype)
        if drafted is None:
            return super()._drafter_fingerprint()
        if "drafter" not in self._fingerprints:
            source = self._found.drafter.whole_checkpoint or self._found.checkpoint
            self._fingerprints["drafter"] = self._whole_fingerprint(drafted, source)
        return self._fingerprints["drafter"]

    def _whole_fingerprint(self, weights: StoredWeights, source: Checkpoint) -> str:
        name = self._found.whole.embedding_name
        return whole_fingerprint(weights, source, name, self.device)

    def update_weights(self, loaded: LoadedWeights, given: GivenTensors) -> None:
        """Fill the weights of all ranks, each with its part of the values."""
        with as_checkpoint(given) as folder, self.ranks.explained():
            temporary = given.folder is None
            self.ranks.send(Kind.UPDATE, (temporary,), os.fsencode(folder))
            super().update_weights(loaded, given)
            self.ranks.wait_until_updated(given.nbytes)

    def scales_id(self) -> str:
        """Digest of the scales that one rank with all heads would have; waits for all ranks."""
        with self.ranks.explained():
            self.ranks.send(Kind.READ_SCALES)
            assert isinstance(self._parts, KeptParts), "stages have no fp8 KV"
            found = self._parts.scales_id()
            self.groups.check()
            return found

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a block of each cache in `read_blocks`, layers first."""
        return self._parts.block_shapes

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors that `read_states` returns."""
        return self._parts.state_shapes

    @property
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the tensors that `read_states` returns."""
        return self._parts.state_dtypes

    def read_blocks(self, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """Copy KV blocks to the host, in the layout of one model; waits for all ranks."""
        with self.ranks.explained():
            self.ranks.send(Kind.READ_BLOCKS, data=_packed(blocks))
            found = self._parts.read_blocks(blocks)
            self.groups.check()
            return found

    def write_blocks(self, blocks: Sequence[int], kept: Sequence[Tensor]) -> None:
        """Copy what `read_blocks` returned into these blocks; each rank takes its part."""
        with self.ranks.explained():
            self.ranks.send(Kind.WRITE_BLOCKS, data=_packed(blocks))
            self._parts.write_blocks(blocks, kept)
            self.groups.check()

    def read_states(self, place: int) -> tuple[Tensor, ...]:
        """Copy the states kept at this place to the host, in the layout of one model."""
        with self.ranks.explained():
            self.ranks.send(Kind.READ_STATES, (place,))
            found = self._parts.read_states(place)
            self.groups.check()
            return found

    def write_states(self, place: int, parts: Sequence[Tensor]) -> None:
        """Copy what `read_states` returned to this place; each rank takes its part."""
        with self.ranks.explained():
            self.ranks.send(Kind.WRITE_STATES, (place,))
            self._parts.write_states(place, parts)
            self.groups.check()

    def replay(self, key: GraphKey) -> None:
        """Queue a graph on all ranks; on a CPU they run it together."""
        with self.ranks.explained():
            self.ranks.send(Kind.REPLAY, (self._numbers[key],))
            super().replay(key)

    def wait_tokens(self, sequence: int, lanes: int, timeout: float | None) -> Payloads | None:
        """The first `lanes` lanes published by replay `sequence`."""
        with self.ranks.explained():
            found = super().wait_tokens(sequence, lanes, timeout)
            self.groups.check()
            return found

    def wait_logprobs(
        self, replay: Replay, record: Payloads, timeout: float | None
    ) -> list[tuple[TokenLogprobs, ...] | None] | None:
        """The log-probabilities of each lane of a replay that published `record`."""
        with self.ranks.explained():
            found = super().wait_logprobs(replay, record, timeout)
            self.groups.check()
            return found

    def digests(self) -> list[str]:
        """SHA-256 of the device-owned state that all ranks share, for each rank, after all queued
        work is done.

        The digests are equal, or something is wrong.
        """
        with self.ranks.explained():
            self.synchronize()
            with self.on_stream():
                self.program.flow.begin()
            others = self.ranks.tell()
            return [state_digest(self), *others]

    def close(self) -> None:
        """End the other ranks, and free what this one holds. Nothing works afterwards."""
        if self.ranks.broken:
            # A replay may wait for ranks that are gone.
            self.ranks.close()
            self.groups.abandon()
        super().close()
        self.groups.leave()
        self.ranks.close()
        self.groups.close()


def _packed(blocks: Sequence[int]) -> bytes:
    """Block numbers as the data of a command; no longer than the largest load, which has the block
    tables of all slots.
    """
    return np.asarray(blocks, dtype=np.int32).tobytes()


class _Times:
    """Times of the other ranks, for the recorder; see `RankTimes`."""

    def __init__(self, ranks: Ranks, groups: ProcessGroups, config: EngineConfig) -> None:
        self._ranks, self._groups = ranks, groups
        self.count, self.option = config.ranks, config.ranks_option

    def last_launch(self, sequence: int, when: int) -> tuple[float, int]:
        found = self._ranks.last_launch(sequence, when)
        return UNKNOWN_LAUNCH if found is None else (found[0] / 1e3, found[1])

    def waited_s(self) -> float | None:
        # Do not read a device that has failed, or that waits for a rank that is gone.
        return None if self._ranks.broken else self._groups.waited_s()


class _Watched:
    """A stream for the mailbox to query; the query raises RankFailed once a rank has failed."""

    def __init__(self, stream: torch.cuda.Stream, ranks: Ranks) -> None:
        self._stream: Queryable = stream
        self._ranks = ranks

    def query(self) -> bool:
        self._ranks.check()
        return self._stream.query()
