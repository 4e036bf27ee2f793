"""The runtime of the driver's own rank, which sends its commands to the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from graphengine.config import EngineConfig
from graphengine.core.commands import (
    Command,
    DigestState,
    LoadAdapter,
    ReleaseMemory,
    RestoreMemory,
    SaveMemory,
    UpdateWeights,
)
from graphengine.models.adapters.adapter import AdapterPart
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.given_tensors import GivenTensors, as_checkpoint
from graphengine.models.launches import Share
from graphengine.models.weights import StoredWeights
from graphengine.observe.rank_times import UNKNOWN_LAUNCH
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.loading import (
    CheckpointContents,
    Opened,
    load_checkpoint,
    plan_checkpoint,
    read_checkpoint,
)
from graphengine.opening.updating import LoadedWeights
from graphengine.parallel.link import Stage
from graphengine.parallel.process_groups import ProcessGroups
from graphengine.parallel.rank_runtime import RankRuntime
from graphengine.parallel.ranks import Ranks, rank_devices
from graphengine.parallel.torchrun import follow, launched_share
from graphengine.parallel.watched_waits import WatchedStream, WatchedWaits
from graphengine.parallel.whole_weights import whole_fingerprint


def open_with_ranks(
    path: str | Path,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None,
    kind: type[DriverRuntime],
) -> tuple[Opened, DriverRuntime]:
    """Open a checkpoint as rank 0 of `config.ranks`, like `open_checkpoint`, with a runtime of this
    `kind`, which drives all ranks.

    In a process that torchrun has started for another rank it does not return, but ends the
    process. ValueError, before a process is started, for a model that cannot be split; RankFailed
    if a rank fails.
    """
    devices, share = rank_devices(config), launched_share(config)
    if share is not None and share.rank:
        follow(path, config, share, devices)
    contents = read_checkpoint(path, config, Share(0, config.ranks))
    memories = [plan_checkpoint(contents, config)] * config.ranks
    launched = share is not None
    ranks = Ranks(contents.checkpoint, config, memories, devices, launched=launched)
    return lead_ranks(ranks, contents, memories[0], config, progress, kind)


def lead_ranks(
    ranks: Ranks,
    contents: CheckpointContents,
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
            opened = load_checkpoint(contents, memory, config, progress)
            ranks.wait_for(Stage.LOADED)
            ranks.let(Stage.LOADED)
            return opened, kind(opened, memory, config, ranks, contents)
    except BaseException:
        ranks.broken = True
        ranks.close()
        raise


class DriverRuntime(WatchedWaits, RankRuntime):
    """The runtime of rank 0, which sends each command to `ranks` before it executes it itself.

    Its waits watch the ranks, too: RankFailed once a rank has ended.
    """

    def __init__(
        self,
        opened: Opened,
        memory: MemoryPlan,
        config: EngineConfig,
        ranks: Ranks,
        contents: CheckpointContents,
    ) -> None:
        self.ranks = ranks
        share = Share(0, config.ranks)
        groups = ProcessGroups(ranks.rendezvous, share, memory, config, check=ranks.check)
        try:
            with ranks.watched(groups.abandon):
                super().__init__(opened, contents, config, groups)
            ranks.wait_for(Stage.FOLLOWING)
        except BaseException:
            groups.abandon()
            groups.close()
            raise
        ranks.remove_folder()
        groups.wait_up_to(config.wait_limit_s)
        self._contents, self._dtype = contents, memory.dtype
        self._fingerprints: dict[str, str] = {}
        self.rank_times = _Times(ranks, groups, config)
        if self.stream is not None:
            self._watched = WatchedStream(ranks, self.stream)

    def _around_capture(self, name: str) -> AbstractContextManager[object]:
        self.ranks.check()
        return super()._around_capture(name)

    # Commands.

    _repeated = True

    def run(self, command: Command) -> Any:
        """Execute a command on all ranks; returns its result on this one."""
        with self.ranks.explained():
            self._send(command)
            found = super().run(command)
            self.check_group()
            return found

    def _send(self, command: Command) -> None:
        """Send a command to all other ranks."""
        with self.ranks.explained():
            self.ranks.send(command)

    def load(self, updates: Mapping[str, Any]) -> None:
        """Copy host-owned fields that changed to the devices of all ranks."""
        with self.ranks.explained():
            super().load(updates)

    def update_weights(self, loaded: LoadedWeights, given: GivenTensors) -> None:
        """Fill the weights of all ranks, each with its part of the values."""
        self._update(given, drafts=False)

    def update_drafts(self, given: GivenTensors) -> None:
        """Fill the weights of the drafter on all ranks that have a part of it."""
        self._update(given, drafts=True)

    def _update(self, given: GivenTensors, *, drafts: bool) -> None:
        with as_checkpoint(given) as folder, self.ranks.explained():
            self.run(UpdateWeights(os.fspath(folder), given.folder is None, drafts, given))
            self.ranks.wait_until_updated(given.nbytes)

    def load_adapter(
        self, loaded: LoadedWeights, slot: int, folder: Path, parts: Mapping[str, AdapterPart]
    ) -> None:
        """Copy an adapter into a slot on all ranks, each of which reads its part."""
        with self.ranks.explained():
            self.run(LoadAdapter(slot, os.fspath(folder.absolute())))
            nbytes = sum(part.down.nbytes + part.up.nbytes for part in parts.values())
            self.ranks.wait_until_updated(nbytes)

    def save_memory(self, loaded: LoadedWeights, *, drop: bool) -> None:
        """Copy the weights of all ranks to the host. RuntimeError if ranks lack memory, with the
        amounts.
        """
        self._change_memory(loaded, SaveMemory(drop))

    def release_memory(self, loaded: LoadedWeights, *, cache: bool) -> int:
        """Give the memory of all ranks back; returns how many bytes."""
        return self._change_memory(loaded, ReleaseMemory(cache))

    def restore_memory(self, loaded: LoadedWeights, *, cache: bool) -> None:
        """Restore the memory of all ranks. RuntimeError if ranks lack memory, with the amounts.
        Restored ranks keep theirs, and the call can be repeated.
        """
        self._change_memory(loaded, RestoreMemory(cache))

    def _change_memory(
        self, loaded: LoadedWeights, command: SaveMemory | ReleaseMemory | RestoreMemory
    ) -> int:
        """The sum of the bytes that ranks report."""
        assert loaded.memory is not None, "not opened with releasable=True"
        with self.ranks.explained():
            own = self.run(command)
            self.ranks.wait_until_updated(loaded.memory.nbytes)
            said = [own, *self.ranks.texts()]
        failed = [f"rank {rank}: {each}" for rank, each in enumerate(said) if not each.isdigit()]
        if failed:
            raise RuntimeError(
                f"memory of {len(failed)} of {len(said)} ranks is as it was: {'; '.join(failed)}"
            )
        return sum(map(int, said))

    def digests(self) -> list[str]:
        """SHA-256 of the device-owned state that all ranks share, for each rank, after all queued
        work is done.

        All digests must be equal.
        """
        with self.ranks.explained():
            return [self.run(DigestState()), *self.ranks.texts()]

    def check_group(self) -> None:
        """Raise GroupError once this rank has waited in vain for the others."""
        self.groups.check()

    # Fingerprints.

    def _model_fingerprint(self) -> str:
        """Fingerprint of all weights, as one rank would have it; the first call reads them again.

        ValueError where the checkpoint has changed.
        """
        if "model" not in self._fingerprints:
            whole = self._contents.whole.allocate(device="meta", dtype=self._dtype)
            source = self._contents.checkpoint
            self._fingerprints["model"] = self._whole_fingerprint(whole, source)
        return self._fingerprints["model"]

    def _drafter_fingerprint(self) -> str:
        """The fingerprint of the drafter's whole weights, or of this rank's weights if the whole
        ones cannot be read from a checkpoint.
        """
        drafted = self._contents.drafter.whole_weights(self._dtype)
        if drafted is None:
            return super()._drafter_fingerprint()
        if "drafter" not in self._fingerprints:
            source = self._contents.drafter.whole_checkpoint or self._contents.checkpoint
            self._fingerprints["drafter"] = self._whole_fingerprint(drafted, source)
        return self._fingerprints["drafter"]

    def _whole_fingerprint(self, weights: StoredWeights, source: Checkpoint) -> str:
        name = self._contents.whole.embedding_name
        return whole_fingerprint(weights, source, name, self.device)

    def close(self) -> None:
        """End the other ranks, and free this rank's resources. No other call works afterwards."""
        if self.ranks.broken:
            # A replay may wait for ranks that are gone.
            self.ranks.close()
            self.groups.abandon()
        super().close()
        self.groups.leave()
        self.ranks.close()
        self.groups.close()


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
