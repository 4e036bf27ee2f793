"""The runtime of one rank of several: the code that the driver's rank and the others share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.core.commands import (
    Command,
    DigestState,
    LoadAdapter,
    ReadBlocks,
    ReadScales,
    ReadStates,
    ReleaseMemory,
    RestoreMemory,
    SaveMemory,
    UpdateWeights,
    WriteBlocks,
    WriteStates,
)
from graphengine.core.runtime import Operation, Runtime
from graphengine.models.adapters.adapter import Adapter
from graphengine.opening.calibration import calibrate
from graphengine.opening.draft_updating import drafts_in_folder
from graphengine.opening.loading import CheckpointContents, Opened
from graphengine.opening.records import RecordMemory
from graphengine.parallel.process_groups import ProcessGroups
from graphengine.parallel.sharded_state import ShardedState


class RankRuntime(Runtime):
    """The runtime of a rank that has joined the others in `groups`.

    contents   the checkpoint's contents, as this rank has read them
    records    see `Runtime`

    state      this rank's shard of KV and states
    temporary  the folder of the last update's tensors, if the driver made it only for the update
    """

    def __init__(
        self,
        opened: Opened,
        contents: CheckpointContents,
        config: EngineConfig,
        groups: ProcessGroups,
        records: RecordMemory | None = None,
    ) -> None:
        model, memory, drafter = opened.model, opened.memory, opened.drafter
        self.groups, self._loaded = groups, opened.loaded
        self.temporary: Path | None = None
        group, stages = groups.tensor, groups.stages
        if contents.calibration:
            calibrate(model, memory, config, drafter, contents.calibration, group)
        super().__init__(
            model, memory, config, drafter, group=group, stages=stages, records=records
        )
        self.state = ShardedState(self, contents, groups, memory.state_places)

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a block of each cache in `read_blocks`, layers first."""
        return self.state.block_shapes

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors that `read_states` returns."""
        return self.state.state_shapes

    @property
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the tensors that `read_states` returns."""
        return self.state.state_dtypes

    def _gather_blocks(self, command: ReadBlocks) -> tuple[Tensor, ...]:
        self.synchronize()
        return self.state.gather_blocks(self._read_blocks(command))

    def _scatter_blocks(self, command: WriteBlocks) -> None:
        self.synchronize()
        own = self.state.scatter_blocks(len(command.blocks), command.whole)
        self._write_blocks(command._replace(whole=own))

    def _gather_states(self, command: ReadStates) -> tuple[Tensor, ...]:
        self.synchronize()
        return self.state.gather_states(self._read_states(command))

    def _scatter_states(self, command: WriteStates) -> None:
        self.synchronize()
        self._write_states(command._replace(whole=self.state.scatter_states(command.whole)))

    def _gathered_scales_id(self, command: ReadScales) -> str:
        return self.state.scales_id()

    def _update_weights(self, command: UpdateWeights) -> None:
        folder = Path(command.folder)
        self.temporary = folder if command.temporary else None
        given, drafter = command.given, self.program.drafter
        if command.drafts and drafter.own_checkpoint is None:
            return  # The drafter is on the last stage alone.
        if given is None and command.drafts:
            given = drafts_in_folder(drafter, folder)
        elif given is None:
            given = self._loaded.in_folder(folder)
        self.synchronize()
        if command.drafts:
            Runtime.update_drafts(self, given)
        else:
            Runtime.update_weights(self, self._loaded, given)

    def _load_adapter(self, command: LoadAdapter) -> None:
        folder = Path(command.folder)
        parts = dict(Adapter.open(folder).parts())
        self.synchronize()
        Runtime.load_adapter(self, self._loaded, command.slot, folder, parts)

    def _save_memory(self, command: SaveMemory) -> str:
        self.synchronize()
        return _told(lambda: Runtime.save_memory(self, self._loaded, drop=command.drop))

    def _release_memory(self, command: ReleaseMemory) -> str:
        return str(Runtime.release_memory(self, self._loaded, cache=command.cache))

    def _restore_memory(self, command: RestoreMemory) -> str:
        self.synchronize()
        return _told(lambda: Runtime.restore_memory(self, self._loaded, cache=command.cache))

    def _digest_state(self, command: DigestState) -> str:
        """SHA-256 of every device-owned field that is equal on all ranks, in hexadecimal digits."""
        self.synchronize()
        digest, buffers = hashlib.sha256(), self.buffers
        with self.on_stream():
            self.program.flow.begin()
            for field in buffers.fields:
                if self.program.flow.is_common(field):
                    values = buffers[field.name].cpu().contiguous().view(torch.uint8)
                    digest.update(field.name.encode() + values.numpy().tobytes())
        return digest.hexdigest()

    operations: ClassVar[dict[type[Command], Operation]] = Runtime.operations | {
        ReadBlocks: _gather_blocks,
        WriteBlocks: _scatter_blocks,
        ReadStates: _gather_states,
        WriteStates: _scatter_states,
        ReadScales: _gathered_scales_id,
        UpdateWeights: _update_weights,
        LoadAdapter: _load_adapter,
        SaveMemory: _save_memory,
        ReleaseMemory: _release_memory,
        RestoreMemory: _restore_memory,
        DigestState: _digest_state,
    }


def _told(work: Callable[[], object]) -> str:
    """Do work that may lack memory. Reports "0" on success, else the missing memory; the rank goes
    on either way.
    """
    try:
        work()
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return "0"
