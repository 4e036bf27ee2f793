"""The memory of another rank that the driver maps: the rank's mailboxes, its drafts, and whether it
has waited in vain.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.opening.inventory import RingShape
from graphengine.opening.memory import MemoryPlan
from graphengine.opening.records import RecordMemory, record_bytes


class SharedRecords(NamedTuple):
    """Of one rank.

    mailboxes  for `new_records`
    drafts     int32 `[S, K]`, a copy of the table when the driver asked for it last
    watch      int64 `[2]`, of the rank's `Meeting`
    """

    mailboxes: RecordMemory
    drafts: Tensor
    watch: Tensor

    @classmethod
    def of_rank(
        cls,
        meeting: str,
        rank: int,
        config: EngineConfig,
        memory: MemoryPlan,
        *,
        written: bool = False,
    ) -> SharedRecords:
        """In a file beside that of the ranks' `meeting`, of which graphs write what is `written`:
        the rank's own. Errors as of `RecordMemory`.
        """
        slots, drafts = config.max_batch, memory.tokens_per_step - 1
        # In words of two.
        table, watch = RingShape(1, slots, -(-drafts // 2)), RingShape(1, 1, 2)
        path = Path(meeting).with_name(f"records-{rank}")
        device = memory.device if written and memory.device.type == "cuda" else None
        nbytes = watch.nbytes + table.nbytes + record_bytes(config, memory)
        shared = RecordMemory(path, nbytes, device)
        watched = shared.take(watch).view(2)
        words = shared.take(table).view(torch.int32).view(slots, 2 * table.items)
        return cls(shared, words[:, :drafts], watched)
