"""`graphengine bench`: how fast an engine decodes a shape, compared with the memory it must read.

Each row of the result is an engine of its own. Before a figure is reported its tokens are checked
against eager steps, which `eager.py` explains; `checked` says how many. The function that takes a
figure says what it means; these are in `measure.py`, `contexts.py`, `recording.py`,
`speculation.py`, `engines.py`, `ceiling.py`, `kernel_times.py` and `peers.py`. All but the
`speculation` of a row or a context comes from engines that do not speculate. Figures that only a
GPU has are null on a CPU. Chunks of a policy are measured in `policies/`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from graphengine import Engine, EngineConfig
from graphengine.cli.terminal import columns
from graphengine.observe.environment import environment
from graphengine.profiles.arguments import check_apart, check_out, tell_written
from graphengine.profiles.benchmark import measure
from graphengine.profiles.benchmark.collectives import collective_times
from graphengine.profiles.benchmark.contexts import measure_context_kernels, measure_contexts
from graphengine.profiles.benchmark.engines import (
    StartUp,
    build_engine,
    engine_options,
    freed,
)
from graphengine.profiles.benchmark.floor.ceiling import (
    ReadCeiling,
    floor_and_share,
    measure_read_ceiling,
)
from graphengine.profiles.benchmark.floor.experts_read import experts_read
from graphengine.profiles.benchmark.kernel_times import (
    decode_launches,
    kernel_times,
    last_chunk,
    prefill_kernel_times,
)
from graphengine.profiles.benchmark.measure import Work
from graphengine.profiles.benchmark.options import DEFAULT_SLOTS, Bench, read_options
from graphengine.profiles.benchmark.peers import run_peer
from graphengine.profiles.benchmark.recording import record
from graphengine.profiles.benchmark.shapes import step_bytes
from graphengine.profiles.benchmark.speculation import measure_sweep
from graphengine.profiles.benchmark.stored_shape import stored_shape
from graphengine.profiles.policies.asked import read_policy_options
from graphengine.profiles.policies.chunks import measure_policy
from graphengine.profiles.progress import Progress, told
from graphengine.profiles.shape_configs import POLICIES
from graphengine.profiles.tables.percentiles import rounded
from graphengine.profiles.tables.text import describe_document
from graphengine.speculative import describe

SCHEMA = 1


def bench(options: argparse.Namespace) -> None:
    """Measure, print, write. ValueError for bad options, before anything is measured."""
    outputs = {"--out": options.out, "--record": options.record}
    check_apart({}, outputs)
    for option, path in outputs.items():
        if path is not None:
            check_out(path, option)
    policy = read_policy_options(options) if options.shape in POLICIES else None
    wanted = read_options(options) if policy is None else None

    def save(document: dict[str, Any]) -> None:
        if options.out is not None:
            options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    with told(quiet=options.json) as progress:
        if policy is not None:
            document = {"schema": SCHEMA} | measure_policy(policy, progress)
            save(document)
        else:
            assert wanted is not None, f"{policy=}"
            with _of_ranks(wanted) as found:
                document = measure_all(found, progress=progress, save=save)
    shown = json.dumps(document, indent=2) if options.json else None
    print(shown or describe_document(document, columns()), flush=True)
    tell_written(options.out, options.record)


@contextmanager
def _of_ranks(bench: Bench) -> Iterator[Bench]:
    """The benchmark, with its shape stored as a checkpoint where ranks must draw its weights."""
    if max(bench.ranks) == 1 or bench.lone_rank or bench.subject.checkpoint is not None:
        yield bench
        return
    with stored_shape(bench.subject) as subject:
        yield replace(bench, subject=subject)


def measure_all(
    bench: Bench, *, progress: Progress, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run everything that `bench` asks for; returns the JSON document.

    `progress` is told the current measurement and the steps' speed. `save` is called with the
    document after each measurement, so that a late failure loses nothing.
    """
    ceiling = measure_read_ceiling(bench.device)
    model = bench.subject.model
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(bench.device),
        "shape": bench.subject.name,
        "random_weights": bench.subject.checkpoint is None or bench.subject.drawn,
        "config": dict(bench.subject.hf_config),
        "vocab_size": model.vocab_size,
        "ceiling": None if ceiling is None else asdict(ceiling) | {"tb_s_after": None},
        "rows": [],
        "contexts": None,
        "admission": None,
        "kernels": None,
        "prefill_kernels": None,
        "peers": {},
    }
    for work, sizes in bench.rows():
        row = rounded(_measure_row(bench, work, sizes, ceiling, progress))
        document["rows"].append(row)
        progress.done(f"{_live(row)}: {row['ms_per_step']} ms/step")
        save(document)
        for entries in _measure_speculation(bench, work, sizes, row, ceiling, progress):
            progress.done(f"{_live(row)}, {_drafts(entries[-1])}")
            save(document)
    for section in _measure_contexts(bench, ceiling, progress):
        document["contexts"] = section
        save(document)
    if ceiling is not None:
        _measure_ceiling_again(bench, document, ceiling)
        save(document)
    if bench.admission:
        document["admission"] = rounded(_measure_admission(bench, progress))
        save(document)
    if bench.kernels:
        document["kernels"] = []
        for found in _all_kernels(bench, progress):
            document["kernels"].append(rounded(found))
            save(document)
        document["prefill_kernels"] = [
            rounded(_measure_prefill_kernels(bench, tokens, progress))
            for tokens in bench.first_tokens
        ]
        save(document)
    for peer in bench.peers:
        progress.doing(f"waiting for {peer}")
        document["peers"][peer] = _measure_peer(bench, peer, document["rows"])
        save(document)
    return document


def _measure_ceiling_again(bench: Bench, document: dict[str, Any], first: ReadCeiling) -> None:
    """Measure the ceiling again after the rows, on a device that is now warm.

    `tb_s_of_shares` is the larger rate; the rows' floors and shares are recomputed from it. With
    the lower one a step would look closer to the limit than it is.
    """
    after = measure_read_ceiling(bench.device)
    assert after is not None, f"{first=}"
    best = max(first, after, key=lambda ceiling: ceiling.tb_s)
    document["ceiling"] |= {"tb_s_after": after.tb_s, "tb_s_of_shares": best.tb_s}
    cells = (document["contexts"] or {"cells": []})["cells"]
    entries = [
        entry
        for row in document["rows"]
        for entry in (row["speculation"] or {"entries": []})["entries"]
    ]
    for row in [*document["rows"], *cells, *entries]:
        row |= rounded(_floor(best, row))


def _floor(ceiling: ReadCeiling | None, row: dict[str, Any]) -> dict[str, float | None]:
    """`floor_and_share` of a step; None if it is unknown how many bytes the step reads."""
    known = ceiling if row["step_bytes"] is not None else None
    return floor_and_share(known, row["step_bytes"] or 0, row["ms_per_step"])


def _measure_row(
    bench: Bench,
    work: Work,
    sizes: dict[str, Any],
    ceiling: ReadCeiling | None,
    progress: Progress,
) -> dict[str, Any]:
    """Measure one engine: its start, its steps, its first tokens, its host time."""
    with _engine(bench, sizes, progress) as (engine, start):
        row: dict[str, Any] = {
            "live": work.live,
            "max_batch": engine.config.max_batch,
            "ranks": engine.config.ranks,
            "lone_rank": bench.lone_rank,
            "sampler": work.sampler,
            "prompt_tokens": work.prompt_tokens,
            "new_tokens": work.new_tokens,
            "runs": work.runs,
        }
        row |= measure.decode(engine, work, progress=progress)
        row["waited_us"] = measure.waited_us(engine, work)
        row["collectives"] = None
        if bench.lone_rank:
            row["collectives"] = [each._asdict() for each in collective_times(engine)]
        row |= _against_floor(engine, work, row["ms_per_step"], ceiling)
        # The engine of the default sizes may be shorter than those of the other rows.
        held = [tokens for tokens in bench.first_tokens if tokens < engine.memory.max_seq_len]
        progress.doing(f"{_live(row)}: first tokens")
        row["ttft_ms"], row["checked"]["first_tokens"] = measure.time_to_first_token(
            engine, held, runs=work.runs, sampler=work.sampler
        )
        on_gpu = engine.memory.device.type == "cuda"
        row["host"] = measure.host_time(engine, work) if on_gpu else None
        # With one live row, in the engine that was sized for it.
        wants_long = bench.long_tokens and work.live == 1 and sizes.get("max_seq_len") is not None
        row["long_plain"] = row["long"] = None
        if wants_long:
            progress.doing(f"{_live(row)}: {bench.long_tokens} tokens, twice")
            row["long_plain"] = measure.long_run(engine, work, bench.long_tokens, kept_objects=0)
            row["long"] = measure.long_run(engine, work, bench.long_tokens)
        row["record"] = None
        if bench.record is not None:
            tokens = bench.long_tokens or work.live * work.new_tokens * work.runs
            progress.doing(f"{_live(row)}: recording, and what it costs")
            row["record"] = record(engine, work, bench.record, tokens)
        row["start"] = asdict(start)
        row["engine"] = engine.core.description
        row["speculation"] = None
    return row


def _measure_speculation(
    bench: Bench,
    work: Work,
    sizes: dict[str, Any],
    row: dict[str, Any],
    ceiling: ReadCeiling | None,
    progress: Progress,
) -> Iterator[list[dict[str, Any]]]:
    """Yields the entries of `row["speculation"]` after each new one."""
    if bench.sweep is None:
        return
    entries: list[dict[str, Any]] = []
    row["speculation"] = {
        "mode": describe(bench.sweep.mode),
        "random_vocab": bench.sweep.random_vocab,
        "entries": entries,
    }

    options = bench.options | engine_options(sizes)
    opened = partial(_opened, bench, progress)
    for entry in measure_sweep(bench.sweep, work, options, opened):
        entries.append(rounded(entry | _floor(ceiling, entry)))
        yield entries


def _measure_contexts(
    bench: Bench, ceiling: ReadCeiling | None, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Yields the section of the document after each figure."""
    contexts, shown = bench.contexts, 0
    if contexts is None:
        return
    measured = measure_contexts(
        contexts,
        bench.works,
        bench.options,
        bench.sweep,
        ceiling,
        partial(_opened, bench, progress),
        first_tokens=bench.first_tokens,
    )
    for section in measured:
        for cell in section["cells"][shown:]:
            progress.done(
                f"{_live(cell)} at {cell['context']} tokens: {cell['ms_per_step']} ms/step"
            )
            shown += 1
        yield section


def _against_floor(
    engine: Engine, work: Work, ms_per_step: float, ceiling: ReadCeiling | None
) -> dict[str, Any]:
    """`step_bytes`, the least time to read them, and its share of the step's time.

    `experts_read` is how many of a layer's experts are among them; None for a model without.
    """
    experts = experts_read(engine, work)
    size = step_bytes(
        engine.model.config,
        context=work.prompt_tokens + work.new_tokens / 2,
        rows=work.live,
        dtype=engine.memory.dtype,
        kv_dtype=engine.memory.kv_dtype,
        experts=experts,
    )
    return {"step_bytes": size, "experts_read": experts} | floor_and_share(
        ceiling, size, ms_per_step
    )


def _measure_admission(bench: Bench, progress: Progress) -> dict[str, Any]:
    """Admit a prompt while seven requests decode in an engine of eight slots."""
    work = bench.works[0]
    with _engine(bench, bench.admission_sizes, progress) as (engine, _):
        found = measure.admission(
            engine, work, decoding=DEFAULT_SLOTS - 1, admitted_tokens=bench.admission
        )
        return found | {"engine": engine.core.description}


def _all_kernels(bench: Bench, progress: Progress) -> Iterator[dict[str, Any]]:
    """Yield the kernels of each batch, or of each batch at each context."""
    if bench.contexts is not None:
        opened = partial(_opened, bench, progress)
        yield from measure_context_kernels(bench.contexts, bench.works, opened)
        return
    for work in bench.works:
        yield _measure_kernels(bench, work, progress)


def _measure_kernels(bench: Bench, work: Work, progress: Progress) -> dict[str, Any]:
    """Times kernel by kernel, in an engine that launches them one after another."""
    with _engine(bench, bench.kernel_sizes(work) | {"pdl": False}, progress) as (engine, _):
        progress.doing(f"times of kernels, {work.live} live")
        launched = decode_launches(engine)
        step = measure.decode(engine, replace(work, runs=1))["ms_per_step"]
        times = kernel_times(engine, work, launched)
        return {
            "live": work.live,
            "max_batch": engine.config.max_batch,
            "sampler": work.sampler,
            "pdl": engine.config.pdl,
            "ms_per_step": step,
            "kernels": None if times is None else [asdict(time) for time in times],
        }


def _measure_prefill_kernels(bench: Bench, tokens: int, progress: Progress) -> dict[str, Any]:
    """The kernels of a prompt's last chunk, in an engine of one slot, and its time to first token.

    Most prompts have one chunk.
    """
    with _engine(bench, bench.prefill_sizes(tokens), progress) as (engine, _):
        first, _ = measure.time_to_first_token(engine, (tokens,), runs=1)
        times = prefill_kernel_times(engine, tokens)
        return {
            "prompt_tokens": tokens,
            "chunk_tokens": last_chunk(tokens, engine.runtime.prefill_cut),
            "ttft_ms": first[str(tokens)],
            "kernels": None if times is None else [asdict(time) for time in times],
        }


def _measure_peer(bench: Bench, peer: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The peer's figures; `ratio` is its time a step over our engine's at the same batch."""
    work = bench.works[0]
    dtype = rows[0]["engine"]["dtype"]
    answer = run_peer(
        peer,
        bench.subject,
        device=bench.device,
        dtype=dtype,
        batches=[work.live for work in bench.works],
        prompt_tokens=work.prompt_tokens,
        new_tokens=work.new_tokens,
        runs=work.runs,
    )
    ours = {row["live"]: row["ms_per_step"] for row in reversed(rows)}
    for row in answer["rows"]:
        row["ratio"] = round(row["ms_per_step"] / ours[row["live"]], 3)
    return answer


@contextmanager
def _engine(
    bench: Bench, sizes: dict[str, Any], progress: Progress
) -> Iterator[tuple[Engine, StartUp]]:
    """An engine for one measurement; when it ends, the device's memory is free for the next."""
    vocab = None if bench.sweep is None else bench.sweep.random_vocab
    options = bench.options | engine_options(sizes)
    name = f"{bench.subject.name}, max_batch={EngineConfig(**options).max_batch}"
    progress.doing(f"{name}: opening the engine")
    engine, start = build_engine(
        bench.subject, options, random_vocab=vocab, lone_rank=bench.lone_rank
    )
    progress.doing(f"{name}: measuring")
    with freed(engine):
        yield engine, start


@contextmanager
def _opened(bench: Bench, progress: Progress, options: dict[str, Any]) -> Iterator[Engine]:
    """`_engine` without the cost of its start."""
    with _engine(bench, options, progress) as (engine, _):
        yield engine


def _live(row: dict[str, Any]) -> str:
    return f"{row['live']} live of {row['max_batch']}"


def _drafts(entry: dict[str, Any]) -> str:
    forced = "" if entry["forced"] is None else f", {entry['forced']} accepted by force"
    return f"{entry['k']} drafts{forced}: {entry['ms_per_step']} ms/step"
