"""Mailboxes of other ranks, which the driver reads where the ranks write them."""

from __future__ import annotations

from pathlib import Path

from graphengine.config import EngineConfig
from graphengine.opening.memory import MemoryPlan
from graphengine.opening.records import RecordMemory, record_bytes


def records_of(meeting: str, rank: int, config: EngineConfig, memory: MemoryPlan) -> RecordMemory:
    """Those of a rank, in a file beside that of the ranks' `meeting`."""
    return RecordMemory(Path(meeting).with_name(f"records-{rank}"), record_bytes(config, memory))
