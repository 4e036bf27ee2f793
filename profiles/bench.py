"""`graphengine bench`: how fast an engine decodes a shape, compared with the memory it must read.

Each row of the result is an engine of its own. Before a figure is reported its tokens are checked
against eager steps, which `eager.py` explains; `checked` says how many. The function that takes a
figure says what it means; these are in `measure.py`, `contexts.py`, `recording.py`,
`speculation.py`, `engines.py`, `ceiling.py`, `kernel_times.py` and `peers.py`. All but the
`speculation` of a row or a context comes from engines that do not speculate. What only a GPU has is
null on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphengine import Engine, EngineConfig
from graphengine.cli.option_flags import add_flags
from graphengine.devices import DTYPES
from graphengine.observe.environment import environment
from graphengine.profiles.arguments import check_apart, check_out, integers
from graphengine.profiles.benchmark import measure, speculation
from graphengine.profiles.benchmark.ceiling import (
    ReadCeiling,
    floor_and_share,
    measure_read_ceiling,
)
from graphengine.profiles.benchmark.contexts import (
    Contexts,
    kernel_work,
    measure_context_kernels,
    measure_contexts,
    read_contexts,
)
from graphengine.profiles.benchmark.contexts import add_arguments as add_context_arguments
from graphengine.profiles.benchmark.engines import (
    StartUp,
    build_engine,
    engine_options,
    freed,
)
from graphengine.profiles.benchmark.experts_read import experts_read
from graphengine.profiles.benchmark.kernel_times import (
    kernel_times,
    last_chunk,
    prefill_kernel_times,
)
from graphengine.profiles.benchmark.measure import (
    ADMITTED_NEW_TOKENS,
    CHECKED_FIRST_TOKENS,
    SAMPLERS,
    Work,
)
from graphengine.profiles.benchmark.peers import PEERS, require_peer, run_peer
from graphengine.profiles.benchmark.recording import record
from graphengine.profiles.benchmark.shapes import DEMO, NAMES, Subject, step_bytes
from graphengine.profiles.benchmark.speculation import Sweep, check_sweep, measure_sweep, read_sweep
from graphengine.profiles.percentiles import rounded
from graphengine.profiles.text import (
    CONTEXT_COLUMNS,
    SWEEP_COLUMNS,
    describe_document,
    row_columns,
    text_table,
)
from graphengine.speculative import describe

SCHEMA = 1
TTFT_TOKENS = (128, 1024)
ENGINE_FLAGS = (
    *("device", "row_family", "prefill_buckets"),
    *("max_prefill_tokens_per_step", "max_prefill_ms_per_step", "kv_dtype"),
    "state_dtype",
    *("quantize", "quantize_lm_head", "activations"),
)
DEFAULT_SLOTS = EngineConfig(device="cpu").max_batch
DEFAULT_SEQ_LEN = 4096
"""`max_seq_len` of an engine by default, for a model with at least as many positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """One invocation: what is measured, on which engines.

    options         options of every engine, except the sizes that each measurement chooses
    default_engine  add a row with one live request in an engine of the default sizes
    ttft_tokens     prompt lengths; those that the model cannot hold are left out
    long_tokens     gaps to measure in the sized engines with one live request; 0: none
    record          file for a recording; then there is one row
    admission       length of a prompt that is admitted while seven requests decode; 0: none
    sweep           the speculative engines to compare with each row's plain one
    contexts        the tokens before the steps of each batch; None: there are rows instead
    """

    subject: Subject
    options: dict[str, Any]
    works: tuple[Work, ...]
    max_batch: int | None
    max_seq_len: int | None
    default_engine: bool
    ttft_tokens: tuple[int, ...]
    long_tokens: int
    record: Path | None
    admission: int
    kernels: bool
    peers: tuple[str, ...]
    sweep: Sweep | None
    contexts: Contexts | None

    @property
    def device(self) -> str:
        return str(self.options.get("device", EngineConfig().device))

    @property
    def limit(self) -> int:
        """Prompt and new tokens of a request in the engines of the rows."""
        return _given(self.max_seq_len, self.subject.model.max_positions)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """The `ttft_tokens` that the engines of the rows hold."""
        return tuple(tokens for tokens in self.ttft_tokens if tokens < self.limit)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `graphengine bench`."""
    add = parser.add_argument
    add("--shape", help=f"{', '.join(NAMES)} (default: demo); random weights but for demo")
    add("--checkpoint", help="directory or hub id, in place of a shape")
    add("--batch", help="live requests, a row each (default: 1,8,32; with drafts 1,8; recorded 1)")
    add_context_arguments(parser)
    add("--prompt-tokens", type=int, default=128)
    add("--new-tokens", type=int, default=256)
    add("--runs", type=int, default=5, help="runs of each row, after one to warm up")
    add("--sampler", choices=SAMPLERS, default="fast", help="greedy, or top-k 50")
    add("--max-batch", type=int, help="slots of every engine (default: the row's batch)")
    add("--max-seq-len", type=int, help="of every engine (default: what the row needs)")
    add("--ttft-tokens", help="prompt lengths (default: 128,1024 where the model holds them)")
    add_flags(parser, EngineConfig, only=ENGINE_FLAGS)
    add("--dtype", choices=tuple(DTYPES), help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--no-pdl", action="store_true", help="without programmatic dependent launch")
    add(
        "--long",
        type=int,
        default=0,
        metavar="N",
        help="gaps of N tokens, for batch 1; again while Python's collector has more to do",
    )
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="JSON lines of every replay of N tokens (of the runs without --long), of one batch; "
        "tells what recording costs",
    )
    add(
        "--admission",
        type=int,
        nargs="?",
        const=1024,
        default=0,
        metavar="N",
        help="gaps of 7 requests while a prompt of N tokens (1024) is admitted",
    )
    speculation.add_arguments(parser)
    add("--kernels", action="store_true", help="time of each kernel, without PDL; on a GPU")
    add("--peer", action="append", default=[], help=f"compare with: {', '.join(PEERS)}")
    add("--out", type=Path, help="JSON file to write")
    add("--json", action="store_true", help="print the JSON instead of tables")
    add("--verbose", action="store_true", help="log budget and captures")


def bench(options: argparse.Namespace) -> None:
    """Measure, print, write. ValueError for bad options, before anything is measured."""
    outputs = {"--out": options.out, "--record": options.record}
    check_apart({}, outputs)
    for option, path in outputs.items():
        if path is not None:
            check_out(path, option)
    wanted = _read_options(options)

    def save(document: dict[str, Any]) -> None:
        if options.out is not None:
            options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    document = measure_all(wanted, say=_silent if options.json else _say, save=save)
    print(json.dumps(document, indent=2) if options.json else describe_document(document))


def _read_options(options: argparse.Namespace) -> Bench:
    """The options, checked as far as can be done before anything is built."""
    if options.shape is not None and options.checkpoint is not None:
        raise ValueError(f"--shape {options.shape} and --checkpoint {options.checkpoint}: give one")
    for peer in options.peer:
        require_peer(peer)
    if options.peer and options.sampler != "fast":
        raise ValueError(f"--peer {options.peer[0]} decodes greedily, not --sampler full")
    for name in ("long", "admission"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name} {getattr(options, name)} must not be negative")
    # As everywhere, the checkpoint 'demo' is the packaged model; it is one of the shapes here.
    if options.checkpoint in (None, DEMO):
        subject = Subject.of_shape(options.shape or DEMO)
    else:
        subject = Subject.of_checkpoint(options.checkpoint)
    sweep = read_sweep(options, subject)
    usual = "1" if options.record is not None else "1,8,32" if sweep is None else "1,8"
    batches = integers(options.batch or usual, "batch")
    if options.record is not None and len(batches) > 1:
        raise ValueError(f"--record {options.record} takes one batch, not {options.batch}")
    if options.max_batch is not None and options.max_batch < max(batches):
        raise ValueError(f"--max-batch {options.max_batch} is less than a batch of {max(batches)}")
    lengths = integers(options.ttft_tokens, "ttft-tokens") if options.ttft_tokens else TTFT_TOKENS
    wanted = {name: getattr(options, name) for name in (*ENGINE_FLAGS, "dtype")}
    wanted["pdl"] = False if options.no_pdl else None
    # There is no row for the engine of default sizes if sizes are given, if it would be too short,
    # or if a row is recorded.
    sized = (options.max_batch, options.max_seq_len) != (None, None) or options.record is not None
    too_long = options.prompt_tokens + options.new_tokens > DEFAULT_SEQ_LEN
    works = tuple(
        Work(
            live=batch,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            runs=options.runs,
            sampler=options.sampler,
        )
        for batch in batches
    )
    asked = Bench(
        subject=subject,
        options=engine_options(wanted),
        works=works,
        max_batch=options.max_batch,
        max_seq_len=options.max_seq_len,
        default_engine=1 in batches
        and not (sized or too_long or sweep is not None or options.row_family == "fma"),
        contexts=read_contexts(options, subject),
        ttft_tokens=tuple(lengths),
        long_tokens=options.long,
        record=options.record,
        admission=options.admission,
        kernels=options.kernels,
        peers=tuple(dict.fromkeys(options.peer)),
        sweep=sweep,
    )
    _check_engines(asked)
    return asked


def _check_engines(bench: Bench) -> None:
    """ValueError unless the config of each engine of `bench` is large enough for its work."""
    sizes = [sizes for _, sizes in _rows(bench)]
    contexts = bench.contexts
    if contexts is not None:
        kernels = map(kernel_work, bench.works) if bench.kernels else ()
        contexts.check([*bench.works, *kernels], bench.subject)
        longest = contexts.lengths[-1]
        sizes = [contexts.options(work, longest) for work in bench.works]
    rows = tuple(sizes)
    if bench.admission:
        sizes.append(_admission_sizes(bench))
    if bench.kernels and contexts is None:
        sizes += [_kernel_sizes(bench, work) for work in bench.works]
    for chosen in sizes:
        EngineConfig(**bench.options | engine_options(chosen))
    if bench.sweep is not None:
        for chosen in rows:
            check_sweep(bench.sweep, bench.subject, bench.options | engine_options(chosen))
    _check_device(bench.device)
    most, limit = bench.subject.model.max_positions, bench.limit
    if limit > most:
        raise ValueError(f"--max-seq-len {limit} exceeds the {most} positions of the model")
    work = bench.works[0]
    tokens = work.prompt_tokens + work.new_tokens
    if tokens > limit and contexts is None:
        raise ValueError(
            f"{work.prompt_tokens} prompt and {work.new_tokens} new tokens exceed "
            f"max_seq_len={limit}"
        )
    limit = _given(bench.max_seq_len, min(most, DEFAULT_SEQ_LEN))
    if bench.admission and max(tokens, bench.admission + ADMITTED_NEW_TOKENS) > limit:
        raise ValueError(
            f"--admission {bench.admission}: that prompt with {ADMITTED_NEW_TOKENS} new tokens, "
            f"and {tokens} tokens of each other request, must fit into max_seq_len={limit}"
        )


def _check_device(name: str) -> None:
    """ValueError unless torch has this device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: must be 'cpu', 'cuda' or 'cuda:N'") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device={name!r}, but torch finds {count} CUDA devices")


def measure_all(
    bench: Bench, *, say: Callable[[str], None], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run everything that `bench` asks for; returns the JSON document.

    `say` is called with the rows as they come. `save` is called with the document after each
    measurement, so that a late failure loses nothing.
    """
    ceiling = measure_read_ceiling(bench.device)
    model = bench.subject.model
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(bench.device),
        "shape": bench.subject.name,
        "random_weights": bench.subject.checkpoint is None,
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
    for work, sizes in _rows(bench):
        row = rounded(_measure_row(bench, work, sizes, ceiling))
        document["rows"].append(row)
        say(text_table(row_columns([row]), [row], header=len(document["rows"]) == 1))
        save(document)
        for entries in _measure_speculation(bench, work, sizes, row, ceiling):
            say(text_table(SWEEP_COLUMNS, entries[-1:], header=len(entries) == 1))
            save(document)
    for section in _measure_contexts(bench, ceiling, say):
        document["contexts"] = section
        save(document)
    if ceiling is not None:
        _measure_ceiling_again(bench, document, ceiling)
        save(document)
    if bench.admission:
        document["admission"] = rounded(_measure_admission(bench))
        save(document)
    if bench.kernels:
        document["kernels"] = []
        for found in _all_kernels(bench):
            document["kernels"].append(rounded(found))
            save(document)
        document["prefill_kernels"] = [
            rounded(_measure_prefill_kernels(bench, tokens)) for tokens in bench.first_tokens
        ]
        save(document)
    for peer in bench.peers:
        say(f"waiting for {peer} ...")
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
    """`floor_and_share` of a step; None for one that reads nobody knows how much."""
    known = ceiling if row["step_bytes"] is not None else None
    return floor_and_share(known, row["step_bytes"] or 0, row["ms_per_step"])


def _rows(bench: Bench) -> Iterator[tuple[Work, dict[str, Any]]]:
    """The work of each row, and the sizes of its engine."""
    if bench.contexts is not None:
        return
    for work in bench.works:
        firsts = (min(n + CHECKED_FIRST_TOKENS, bench.limit) for n in bench.first_tokens)
        need = max([work.prompt_tokens + work.new_tokens, *firsts])
        sizes = {
            "max_batch": _given(bench.max_batch, work.live),
            "max_seq_len": _given(bench.max_seq_len, need),
        }
        yield work, sizes
    if bench.default_engine:
        yield replace(bench.works[0], live=1), {"max_batch": DEFAULT_SLOTS}


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _admission_sizes(bench: Bench) -> dict[str, Any]:
    return {"max_batch": DEFAULT_SLOTS, "max_seq_len": bench.max_seq_len}


def _kernel_sizes(bench: Bench, work: Work) -> dict[str, Any]:
    return {
        "max_batch": _given(bench.max_batch, work.live),
        "max_seq_len": _given(
            bench.max_seq_len,
            min(work.prompt_tokens + max(work.new_tokens, 128), bench.limit),
        ),
    }


def _measure_row(
    bench: Bench, work: Work, sizes: dict[str, Any], ceiling: ReadCeiling | None
) -> dict[str, Any]:
    """Measure one engine: its start, its steps, its first tokens, its host time."""
    with _engine(bench, sizes) as (engine, start):
        row: dict[str, Any] = {
            "live": work.live,
            "max_batch": engine.config.max_batch,
            "sampler": work.sampler,
            "prompt_tokens": work.prompt_tokens,
            "new_tokens": work.new_tokens,
            "runs": work.runs,
        }
        row |= measure.decode(engine, work)
        row |= _against_floor(engine, work, row["ms_per_step"], ceiling)
        # The engine of the default sizes may be shorter than those of the other rows.
        held = [tokens for tokens in bench.first_tokens if tokens < engine.memory.max_seq_len]
        row["ttft_ms"], row["checked"]["first_tokens"] = measure.time_to_first_token(
            engine, held, runs=work.runs, sampler=work.sampler
        )
        on_gpu = engine.memory.device.type == "cuda"
        row["host"] = measure.host_time(engine, work) if on_gpu else None
        # With one live row, in the engine that was sized for it.
        wants_long = bench.long_tokens and work.live == 1 and sizes.get("max_seq_len") is not None
        row["long_plain"] = row["long"] = None
        if wants_long:
            row["long_plain"] = measure.long_run(engine, work, bench.long_tokens, kept_objects=0)
            row["long"] = measure.long_run(engine, work, bench.long_tokens)
        row["record"] = None
        if bench.record is not None:
            tokens = bench.long_tokens or work.live * work.new_tokens * work.runs
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
    for entry in measure_sweep(bench.sweep, work, options, partial(_opened, bench)):
        entries.append(rounded(entry | _floor(ceiling, entry)))
        yield entries


def _measure_contexts(
    bench: Bench, ceiling: ReadCeiling | None, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yields the section of the document after each figure."""
    contexts, told = bench.contexts, 0
    if contexts is None:
        return
    measured = measure_contexts(
        contexts,
        bench.works,
        bench.options,
        bench.sweep,
        ceiling,
        partial(_opened, bench),
        first_tokens=bench.first_tokens,
    )
    for section in measured:
        for cell in section["cells"][told:]:
            say(text_table(CONTEXT_COLUMNS, [cell], header=not told))
            told += 1
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


def _measure_admission(bench: Bench) -> dict[str, Any]:
    """Admit a prompt while seven requests decode in an engine of eight slots."""
    work = bench.works[0]
    with _engine(bench, _admission_sizes(bench)) as (engine, _):
        found = measure.admission(
            engine, work, decoding=DEFAULT_SLOTS - 1, admitted_tokens=bench.admission
        )
        return found | {"engine": engine.core.description}


def _all_kernels(bench: Bench) -> Iterator[dict[str, Any]]:
    """The kernels of each batch, or of each at each context."""
    if bench.contexts is not None:
        yield from measure_context_kernels(bench.contexts, bench.works, partial(_opened, bench))
        return
    for work in bench.works:
        yield _measure_kernels(bench, work)


def _measure_kernels(bench: Bench, work: Work) -> dict[str, Any]:
    """Times kernel by kernel, in an engine that launches them one after another."""
    with _engine(bench, _kernel_sizes(bench, work) | {"pdl": False}) as (engine, _):
        step = measure.decode(engine, replace(work, runs=1))["ms_per_step"]
        times = kernel_times(engine, work)
        return {
            "live": work.live,
            "max_batch": engine.config.max_batch,
            "sampler": work.sampler,
            "pdl": engine.config.pdl,
            "ms_per_step": step,
            "kernels": None if times is None else [asdict(time) for time in times],
        }


def _measure_prefill_kernels(bench: Bench, tokens: int) -> dict[str, Any]:
    """The kernels of a prompt's last chunk, in an engine of one slot, and its time to first token.

    Most prompts have one chunk.
    """
    sizes = {"max_batch": 1, "max_seq_len": _given(bench.max_seq_len, tokens + 1), "lookahead": 0}
    with _engine(bench, sizes) as (engine, _):
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
def _engine(bench: Bench, sizes: dict[str, Any]) -> Iterator[tuple[Engine, StartUp]]:
    """An engine for one measurement; when it ends, the device's memory is free for the next."""
    vocab = None if bench.sweep is None else bench.sweep.random_vocab
    options = bench.options | engine_options(sizes)
    engine, start = build_engine(bench.subject, options, random_vocab=vocab)
    with freed(engine):
        yield engine, start


@contextmanager
def _opened(bench: Bench, options: dict[str, Any]) -> Iterator[Engine]:
    """The engine alone."""
    with _engine(bench, options) as (engine, _):
        yield engine


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    pass
