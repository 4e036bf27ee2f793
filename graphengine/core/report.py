"""Reports: what an engine holds, what its capture cost, and what a step did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphengine.buckets import CaptureReport, format_bytes
from graphengine.config import EngineConfig
from graphengine.core.runtime import Runtime
from graphengine.drafters import Drafter
from graphengine.host.gate import Gate
from graphengine.host.scheduling import Scheduling
from graphengine.host.step_plan import Replay
from graphengine.kernels.core.devices import Device, device_of, overlaps_launches
from graphengine.kernels.core.launching import KernelCompilation
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.options.prefill_cut import ChunkTimes, PrefillCut
from graphengine.requests.acceptance import Acceptance
from graphengine.requests.context import Context
from graphengine.requests.request import Phase
from graphengine.speculative import describe


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """Budget, kernels, ladder, captures and counters of an engine; `str()` is the table.

    kv           blocks of the pool, as in `Engine.stats`
    compilation  kernels compiled or read from disk at opening; None on a CPU
    prefill_cut  where prompts are cut
    chunk_times  the times that the cut was chosen by; None if nothing was measured
    ranks        number of the engine's processes; all but `counters` and `kv` is of the first one
    stages       number of pipeline stages; the first rank has the last stage
    """

    memory: MemoryPlan
    kernels: str
    kv: Mapping[str, int | None]
    compilation: KernelCompilation | None
    prefill_cut: PrefillCut
    chunk_times: ChunkTimes | None
    captures: tuple[CaptureReport, ...]
    counters: Mapping[str, int]
    ranks: int = 1
    stages: int = 1

    def __str__(self) -> str:
        memory = self.memory
        device, shards = f"device {memory.device}", self.ranks // self.stages
        if shards > 1:
            device += f", the first of {shards} ranks"
        if self.stages > 1:
            device += f"{' of' if shards > 1 else ','} the last of {self.stages} stages"
        graphs = _column((capture.name for capture in self.captures), 18)
        lines = [
            f"{device}, {memory.describe_dtypes()}, max_seq_len {memory.max_seq_len}",
            self.kernels,
            *_describe_compilation(self.compilation),
            f"decode buckets  {', '.join(map(str, memory.ladder.sizes))}",
            f"prefill buckets {', '.join(map(str, memory.prefill_ladder.sizes))}",
            f"prefill cut     {self.prefill_cut}",
            *_describe_times(self.chunk_times),
            "",
            memory.budget.table(),
            memory.describe_kv(),
            _describe_kv(self.kv),
            *_describe_states(self.kv, memory),
            "",
            f"{'graph':<{graphs}}{'nodes':>8}{'capture ms':>12}{'MiB':>10}",
        ]
        for capture in self.captures:
            nodes = "-" if capture.nodes is None else str(capture.nodes)
            lines.append(
                f"{capture.name:<{graphs}}{nodes:>8}{capture.capture_ms:>12.1f}"
                f"{capture.bytes / 2**20:>10.2f}"
            )
        if self.counters:
            lines += ["", "counters"]
            width = _column(self.counters, 24)
            lines += [f"  {name:<{width}}{count}" for name, count in sorted(self.counters.items())]
        return "\n".join(lines)


def _column(names: Iterable[str], least: int) -> int:
    """Width of a column of these names, with a blank after the longest."""
    return max([least, *(len(name) + 1 for name in names)])


def make_report(
    config: EngineConfig, memory: MemoryPlan, runtime: Runtime, scheduler: Scheduling
) -> EngineReport:
    """The report of an engine with these parts; it may be closed."""
    pdl = config.pdl and overlaps_launches(memory.device)
    return EngineReport(
        memory=memory,
        kernels=(
            f"row family {runtime.plans.family} ({_why(config, memory)}), "
            f"plans {runtime.plan_sources}, PDL {'on' if pdl else 'off'}, "
            f"numerics {runtime.numerics_id}{_stand_ins(device_of(memory.device))}"
        ),
        kv=_kv_blocks(scheduler),
        compilation=runtime.compilation,
        prefill_cut=runtime.prefill_cut,
        chunk_times=runtime.chunk_times,
        captures=runtime.captures,
        counters=dict(scheduler.counters),
        ranks=config.ranks,
        stages=config.pipeline_parallel,
    )


def _stand_ins(device: Device | None) -> str:
    """A line on the portable kernels that a GPU uses instead of fast ones it cannot run; or ""."""
    if device is None or device.has_wgmma:
        return ""
    capability = ".".join(map(str, device.capability))
    if device.copies_async:
        parts = ["prefill attention in Triton", "prefill of packed weights by the kernel of decode"]
        if not device.holds_attention_ring:
            parts.append("decode attention in Triton")
    else:
        parts = ["attention and linears in Triton", "prefill of packed weights in PyTorch"]
    return f"\nfor compute capability {capability}: {', '.join(parts)}"


def _why(config: EngineConfig, memory: MemoryPlan) -> str:
    """Why an engine has its row family."""
    if config.row_family:
        return "asked for"
    if config.device_defaults.row_family:
        return f"for a {memory.device.type.upper()}"
    return f"for {config.lanes} lanes" if config.drafts else f"for max_batch {config.max_batch}"


def statistics(
    scheduler: Scheduling,
    acceptance: Acceptance,
    gate: Gate | None,
    drafter: Drafter,
) -> dict[str, Any]:
    """Implements `Engine.stats`."""
    return {
        "acceptance": acceptance.as_dict(),
        "gate": None if gate is None else {"drafts": gate.drafts},
        "kv": _kv_blocks(scheduler),
        "counters": dict(scheduler.counters) | drafter.counters(),
    }


def _kv_blocks(scheduler: Scheduling) -> dict[str, int | None]:
    """Block counts, summed over data parallel ranks; `session_blocks` is the limit of each rank."""
    pools = scheduler.pools
    return {
        "blocks": sum(pool.count for pool in pools),
        "vacant": sum(pool.vacant for pool in pools),
        "idle": sum(len(pool.idle) for pool in pools),
        "session_blocks": pools[0].max_idle,
    } | _states(scheduler)


def _states(scheduler: Scheduling) -> dict[str, int | None]:
    """Counts of state checkpoints, only for models with recurrent layers; those have no experts
    that data parallel ranks could share.
    """
    states = scheduler.home(Context()).reuse.states
    return {"session_states": states.count, "states": len(states.held)} if states else {}


def _describe_states(kv: Mapping[str, int | None], memory: MemoryPlan) -> list[str]:
    if "states" not in kv:
        return []
    return [
        f"state checkpoints {kv['states']} of {kv['session_states']}, of "
        f"{format_bytes(memory.state_bytes)} each: sessions and prefixes go on from there"
    ]


def _describe_compilation(compilation: KernelCompilation | None) -> list[str]:
    if compilation is None:
        return []
    return [
        f"kernels {compilation.compiled} compiled, {compilation.loaded} read from disk, in "
        f"{compilation.seconds:.2f} s"
    ]


def _describe_times(times: ChunkTimes | None) -> list[str]:
    """The measured chunk times, a line for each bucket."""
    return [
        f"  {tokens} tokens took "
        + ", ".join(f"{took:.3f} ms after {start}" for start, took in points)
        for tokens, points in sorted((times or {}).items())
    ]


def _describe_kv(kv: Mapping[str, int | None]) -> str:
    most = "any number" if kv["session_blocks"] is None else f"at most {kv['session_blocks']}"
    return (
        f"KV blocks {kv['blocks']}: {kv['vacant']} vacant, {kv['idle']} kept by idle sessions and "
        f"prefixes ({most})"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Ids of requests, each in the order in which it happened, and the graph that decoded.

    active    in a slot and not paused when the report was made
    paused    paused by the step, to make room for older requests
    resumed   resumed by the step; a request may be paused and resumed in the same step
    finished  ended by the step, for any reason
    bucket    rows of the decode graph that the step launched last, including unused ones; 0: none
    graph_request_count  requests that this launch serves, on all data parallel ranks
    """

    active: tuple[int, ...]
    paused: tuple[int, ...]
    resumed: tuple[int, ...]
    finished: tuple[int, ...]
    bucket: int = 0
    graph_request_count: int = 0


def describe_step(scheduler: Scheduling, newest: Sequence[Replay]) -> StepReport:
    """The report of the last step that `scheduler` planned; `newest` are its last replays."""
    decodes = [replay for replay in newest if replay.chunk is None]
    moved = {
        kind: tuple(number for move, number in scheduler.moves if move == kind)
        for kind in ("paused", "resumed", "finished")
    }
    active = (request.id for request in scheduler.active if request.phase is not Phase.PAUSED)
    return StepReport(
        active=tuple(active),
        **moved,
        bucket=max((replay.rows for replay in decodes), default=0),
        graph_request_count=sum(len(replay.requests) for replay in decodes),
    )


def describe_engine(config: EngineConfig, memory: MemoryPlan, runtime: Runtime) -> dict[str, Any]:
    """What latency and numerics depend on.

    `weights` are bytes per storage format, without the drafter's weights.

    `plan_sources` says where the plan of each linear of a decode step came from: "user", "shipped"
    or "heuristic". On a CPU no kernel uses the plans.
    """
    return {
        "architecture": runtime.model.config.architecture,
        "device": str(memory.device),
        "tensor_parallel": config.tensor_parallel,
        "data_parallel": config.data_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "dtype": str(memory.dtype).removeprefix("torch."),
        "weights": runtime.model.weights.bytes_by_kind(memory.dtype),
        "kv_dtype": str(memory.kv_dtype).removeprefix("torch."),
        "activations": memory.activations,
        "max_batch": config.max_batch,
        "max_seq_len": memory.max_seq_len,
        "buckets": list(memory.ladder.sizes),
        "prefill_buckets": list(memory.prefill_ladder.sizes),
        "block_size": memory.block_size,
        "kv_blocks": memory.kv_blocks,
        "rings": [[ring.window, ring.blocks] for ring in memory.rings],
        "lookahead": config.launched_ahead,
        "steps_per_launch": config.steps_per_launch,
        "prompts_per_prefill": config.packed_prompts,
        "wait": config.wait,
        "collect_while_waiting": config.collect_while_waiting,
        "pdl": config.pdl,
        "row_family": runtime.plans.family,
        "plan_sources": dict(runtime.plan_sources),
        "numerics_id": runtime.numerics_id,
        "max_prefill_tokens_per_step": config.max_prefill_tokens_per_step,
        "max_prefill_ms_per_step": config.max_prefill_ms_per_step,
        "prefill_cut": list(map(list, runtime.prefill_cut.steps)),
        "speculative": describe(config.mode),
    }
