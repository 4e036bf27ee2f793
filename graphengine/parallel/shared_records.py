"""The memory of another rank that the driver maps: the rank's mailboxes, and its drafts."""

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
    """

    mailboxes: RecordMemory
    drafts: Tensor

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
        table = RingShape(1, slots, -(-drafts // 2))
        path = Path(meeting).with_name(f"records-{rank}")
        device = memory.device if written and memory.device.type == "cuda" else None
        shared = RecordMemory(path, table.nbytes + record_bytes(config, memory), device)
        words = shared.take(table).view(torch.int32).view(slots, 2 * table.items)
        return cls(shared, words[:, :drafts])
