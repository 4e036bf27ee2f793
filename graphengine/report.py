"""What an engine holds and what its capture cost, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphengine.buckets import CaptureReport
from graphengine.memory import MemoryPlan
from graphengine.speculative import describe

if TYPE_CHECKING:
    from graphengine.engine import Engine


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


def describe_engine(engine: Engine) -> dict[str, Any]:
    """What latency and numerics depend on."""
    memory, config = engine.memory, engine.config
    return {
        "architecture": engine.model.config.architecture,
        "device": str(memory.device),
        "dtype": str(memory.dtype).removeprefix("torch."),
        "max_batch": config.max_batch,
        "max_seq_len": memory.max_seq_len,
        "buckets": list(memory.ladder.sizes),
        "prefill_buckets": list(memory.prefill_ladder.sizes),
        "block_size": memory.block_size,
        "kv_blocks": memory.kv_blocks,
        "lookahead": config.lookahead,
        "wait": config.wait,
        "pdl": config.pdl,
        "row_family": engine.row_family,
        "numerics_id": engine.numerics_id,
        "max_prefill_tokens_per_step": config.max_prefill_tokens_per_step,
        "speculative": describe(config.mode),
    }
