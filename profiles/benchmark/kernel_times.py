"""The time of a decode step or a prompt, kernel by kernel, as CUPTI sees graph nodes.

For decode steps this is meaningful only without programmatic dependent launch: with it kernels
overlap, and the sum of their times exceeds the step's.

A kernel's inputs are not guessed from its name: the kernels of a replay must be the launches that
were recorded of the graph's step, in the same order.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from graphengine import Engine, Request, SamplingParams
from graphengine.core.recorded_rows import record_rows
from graphengine.kernels.core.op import own_kernels
from graphengine.models.contract import ModelConfig
from graphengine.observe.op_table import KV, OpRow, align
from graphengine.options.prefill_cut import PrefillCut
from graphengine.profiles.benchmark.eager import drain, launches
from graphengine.profiles.benchmark.measure import Work, random_prompt
from graphengine.profiles.benchmark.shapes import attention_layers, kv_bytes, layer_windows
from graphengine.program.graph_key import GraphKey

REPLAYS = 20

Submit = Callable[[Sequence[SamplingParams]], list[Request]]
"""Submits a request for each row of a work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """Launches of one kernel that do the same part of a step.

    part        the linear whose weight it reads, by its name in plans, or "KV" for attention; None
                for other kernels
    grid        programs, by axis
    count       launches a step; `mean_us` is the time of one, `step_us` of all launches of a step
    read_bytes  of the weight, or of a layer's KV, in one launch; None without a part, and if
                unknown: how many experts a step reads follows from its lanes
    tb_s        `read_bytes` over the time, in 10**12 bytes a second
    """

    name: str
    part: str | None
    grid: list[int]
    count: int
    mean_us: float
    step_us: float
    read_bytes: int | None
    tb_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """Rows that decode, with nothing in flight.

    graph   the graph that serves them
    tokens  tokens of all rows, whose KV a replay reads
    """

    graph: GraphKey
    tokens: int
    requests: Sequence[Request]


def decode_launches(engine: Engine) -> dict[GraphKey, list[OpRow]]:
    """The launches of each decode graph of a new engine, for `kernel_times`; empty on a CPU device.

    An engine that has served anything can only be closed afterwards: see `record_rows`.
    """
    if engine.runtime.stream is None:
        return {}
    graphs = [key for key in engine.memory.graphs if key.kind == "decode"]
    return record_rows(engine.runtime, engine.memory, graphs)


def kernel_times(
    engine: Engine,
    work: Work,
    launched: Mapping[GraphKey, Sequence[OpRow]],
    submit: Submit | None = None,
) -> list[KernelTime] | None:
    """Profile `REPLAYS` replays of the decode graph that serves `work`; None on a CPU device.

    launched  the engine's `decode_launches`, recorded before it served anything
    submit    submits the rows, if not with the prompts of `work`; they are cancelled at the end
    """
    if engine.runtime.stream is None:
        return None
    decoding = start_decoding(engine, work, submit)
    events = _trace(engine, decoding.graph)
    stop_decoding(engine, decoding)
    model, step = engine.model.config, launched[decoding.graph]
    # One replay warms up; each replay makes each row one token longer.
    tokens = decoding.tokens + work.live * (1 + (REPLAYS - 1) / 2)
    kv = kv_bytes(model, rows=work.live, tokens=tokens, itemsize=engine.cache.element_size())
    return summarise(
        events,
        REPLAYS,
        step,
        expert_reads(model) | {KV: layer_kv_bytes(model, kv, step)},
    )


def prefill_kernel_times(engine: Engine, tokens: int) -> list[KernelTime] | None:
    """Profile `REPLAYS` replays of the graph of a prompt's last chunk; None on a CPU device.

    Afterwards the engine can only be closed.
    """
    if engine.runtime.stream is None:
        return None
    graph = feed_prompt(engine, tokens)
    events = _trace(engine, graph)
    launched = record_rows(engine.runtime, engine.memory, [graph])
    sizes = expert_reads(engine.model.config) | {KV: None}
    return summarise(events, REPLAYS, launched[graph], sizes)


def expert_reads(model: ModelConfig) -> dict[str, int | None]:
    """Bytes that a launch reads of each linear of experts: unknown, as its lanes choose some."""
    return {name: None for name, linear in model.linears.items() if linear.experts}


def layer_kv_bytes(model: ModelConfig, kv: int, rows: Sequence[OpRow]) -> int | None:
    """Bytes that one launch of attention reads, where the layers of a step read `kv` bytes.

    None if not every launch reads one layer's KV, or if layers differ in their windows: an average
    would describe none of them.
    """
    launched = sum(row.part == KV for row in rows)
    alike = len({*layer_windows(model)}) == 1
    return round(kv / launched) if alike and launched == attention_layers(model) else None


def feed_prompt(engine: Engine, tokens: int) -> GraphKey:
    """Feed a prompt; returns the graph of its last chunk, which the buffers hold.

    ValueError unless the engine is idle, with lookahead 0: otherwise they would hold the next step.
    """
    ahead = engine.config.launched_ahead
    if engine.busy or ahead:
        raise ValueError(
            f"a prompt of {tokens} tokens on an engine of lookahead {ahead} that "
            f"is {'busy' if engine.busy else 'idle'}"
        )
    prompt = random_prompt(engine.model.config.vocab_size, tokens, seed=tokens)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    request = engine.submit(prompt, params)
    before = Counter(engine.counters)
    while not request.token_ids:
        before = Counter(engine.counters)
        engine.step()
    launched = launches(engine, engine.counters - before)
    (graph,) = (key for key in launched if key.kind == "prefill")
    return graph


def last_chunk(tokens: int, cut: PrefillCut) -> int:
    """Tokens of the last chunk of a prompt that is fed from its first token on."""
    start = 0
    while (end := cut.end(start, tokens)) < tokens:
        start = end
    return tokens - start


def _trace(engine: Engine, graph: GraphKey) -> list[dict[str, Any]]:
    """The kernels of `REPLAYS` replays of a graph, after one to warm up."""
    stream = engine.runtime.stream
    assert stream is not None, "a CPU runs no kernels"
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.cuda.stream(stream):
        stream.synchronize()
        engine.runtime.replay(graph)
        stream.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(REPLAYS):
                engine.runtime.replay(graph)
                stream.synchronize()
    return _kernel_events(profiler)


def least_room(work: Work) -> int:
    """New tokens that each row needs for the replays, as rows begin one after another."""
    return work.live + REPLAYS + 8


def start_decoding(engine: Engine, work: Work, submit: Submit | None = None) -> Decoding:
    """Bring all rows of `work` to decoding, until the host has read all that was launched.

    The scheduler does not know of later replays of their graph; `stop_decoding` ends the rows.
    """
    room = engine.memory.max_seq_len - work.prompt_tokens
    if room < least_room(work):
        raise ValueError(f"{room} new tokens a request do not last for {REPLAYS} replays")
    params: Sequence[SamplingParams] = work.params(room)
    if submit is None:
        prompts = work.prompts(engine.model.config.vocab_size)
        pairs = zip(prompts, params, strict=True)
        requests = [engine.submit(prompt, param) for prompt, param in pairs]
    else:
        requests = submit(params)
    before = Counter(engine.counters)
    while not all(len(request.token_ids) >= 2 for request in requests):
        before = Counter(engine.counters)
        engine.step()
    launched = launches(engine, engine.counters - before)
    (graph,) = (key for key in launched if key.kind == "decode")
    while engine.core.in_flight:
        engine.core.collect(None)
    # The last token of each row has no KV yet.
    tokens = sum(work.prompt_tokens + len(request.token_ids) - 1 for request in requests)
    return Decoding(graph=graph, tokens=tokens, requests=requests)


def stop_decoding(engine: Engine, decoding: Decoding) -> None:
    """Cancel the rows, so that replays unknown to the scheduler no longer matter."""
    for request in decoding.requests:
        request.cancel()
    drain(engine)


def _kernel_events(profiler: Any) -> list[dict[str, Any]]:
    """The trace's kernels, copies and fills on the device, in order of time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(found, key=lambda event: float(event["ts"]))


def summarise(
    events: Sequence[Mapping[str, Any]],
    replays: int,
    rows: Sequence[OpRow],
    sizes: Mapping[str, int | None],
) -> list[KernelTime]:
    """Group the launches of `replays` equal steps, in order of first appearance.

    `events` are a Chrome trace's: `name`, `dur` in microseconds, `args.grid`. `rows` are the step's
    launches. `sizes` has the bytes that one launch reads of the parts where that is not the whole
    weight; None: unknown. RuntimeError if the replays' events differ, or if their kernels are not
    the step's.
    """
    if not events or len(events) % replays:
        raise RuntimeError(f"{len(events)} kernels were traced in {replays} replays")
    length = len(events) // replays
    steps = [events[start : start + length] for start in range(0, len(events), length)]
    names = [event["name"] for event in steps[0]]
    if any([event["name"] for event in step] != names for step in steps):
        raise RuntimeError(f"the {replays} replays did not run the same {length} kernels")
    groups: dict[tuple[str, str | None, tuple[int, ...], int | None], list[float]]
    groups = defaultdict(list)
    parts = [_part(row, sizes) for row in align(names, rows, known=own_kernels())]
    for step in steps:
        for event, (part, size) in zip(step, parts, strict=True):
            grid = tuple(event.get("args", {}).get("grid", ()))
            groups[event["name"], part, grid, size].append(float(event["dur"]))
    found = []
    for (name, part, grid, size), times in groups.items():
        mean = fmean(times)
        time = KernelTime(
            name=name,
            part=part,
            grid=list(grid),
            count=len(times) // replays,
            mean_us=mean,
            step_us=sum(times) / replays,
            read_bytes=size,
            tb_s=None if size is None else size / mean / 1e6,
        )
        found.append(time)
    return found


def _part(row: OpRow | None, sizes: Mapping[str, int | None]) -> tuple[str | None, int | None]:
    """The part of a launch, and the bytes that it reads of it; None for a kernel of torch."""
    if row is None or not row.part:
        return None, None
    return row.part, sizes.get(row.part, row.part_bytes)
