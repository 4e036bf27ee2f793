"""What an engine holds and what its capture cost, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphengine.buckets import CaptureReport
from graphengine.memory import MemoryPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """Budget, kernels, ladder, captures and counters of an engine; `str()` is the table."""

    memory: MemoryPlan
    kernels: str
    captures: tuple[CaptureReport, ...]
    counters: Mapping[str, int]

    def __str__(self) -> str:
        memory = self.memory
        lines = [
            f"device {memory.device}, {str(memory.dtype).removeprefix('torch.')}, "
            f"max_seq_len {memory.max_seq_len}",
            self.kernels,
            f"decode buckets  {', '.join(map(str, memory.ladder.sizes))}",
            f"prefill buckets {', '.join(map(str, memory.prefill_ladder.sizes))}",
            "",
            memory.budget.table(),
            "",
            f"{'graph':<18}{'nodes':>8}{'capture ms':>12}{'MiB':>10}",
        ]
        for capture in self.captures:
            nodes = "-" if capture.nodes is None else str(capture.nodes)
            lines.append(
                f"{capture.name:<18}{nodes:>8}{capture.capture_ms:>12.1f}"
                f"{capture.bytes / 2**20:>10.2f}"
            )
        if self.counters:
            lines += ["", "counters"]
            lines += [f"  {name:<24}{count}" for name, count in sorted(self.counters.items())]
        return "\n".join(lines)
