"""The memory of another rank that the driver maps: the rank's mailboxes, its drafts, and a flag
that says that the rank has waited in vain.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.inventory import RingShape
from graphengine.opening.records import RecordMemory, record_bytes


class SharedRecords(NamedTuple):
    """The memory that one rank shares with the driver.

    mailboxes  memory for `new_records`
    drafts     int32 `[S, K]`, a copy of the table from when the driver last asked for it
    watch      int64 `[2]`, the `watch` of the rank's `ProcessGroup`
    """

    mailboxes: RecordMemory
    drafts: Tensor
    watch: Tensor

    @classmethod
    def of_rank(
        cls,
        rendezvous: str,
        rank: int,
        config: EngineConfig,
        memory: MemoryPlan,
        *,
        written: bool = False,
    ) -> SharedRecords:
        """Map a rank's memory in a file next to the `rendezvous`. Raises like `RecordMemory`.

        written  whether this process's graphs write the memory, as the rank's own do
        """
        slots, drafts = config.max_batch, memory.tokens_per_step - 1
        # In 64-bit words of two int32 drafts.
        table, watch = RingShape(1, slots, -(-drafts // 2)), RingShape(1, 1, 2)
        path = Path(rendezvous).with_name(f"records-{rank}")
        device = memory.device if written and memory.device.type == "cuda" else None
        nbytes = watch.nbytes + table.nbytes + record_bytes(config, memory)
        shared = RecordMemory(path, nbytes, device)
        watched = shared.take(watch).view(2)
        words = shared.take(table).view(torch.int32).view(slots, 2 * table.items)
        return cls(shared, words[:, :drafts], watched)
