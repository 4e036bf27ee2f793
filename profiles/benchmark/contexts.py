"""`graphengine bench --context`: decode steps of each batch at contexts of these lengths.

A row is a turn of a session (`Engine.session`) that keeps the KV of its prompt, except for the last
tokens, at most a block of them, which the turn prefills. So positions, block tables, and all that
attention reads are those of a prompt of this length. `context_rows.py` says where the KV comes
from.

An engine serves all contexts of one batch. Its `max_seq_len`, which grids and workspaces may depend
on, is what the longest of them needs, and its pool holds every row at that length. If memory is too
short for that, the context is skipped, with the numbers, and the next shorter one is tried.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from graphengine import Engine, EngineConfig
from graphengine.buckets import OutOfBudget
from graphengine.kernels.linear.plans import RowFamily
from graphengine.models.states import recurrent_states
from graphengine.profiles.arguments import integers
from graphengine.profiles.benchmark import measure
from graphengine.profiles.benchmark.context_rows import ContextRows, standing_rows
from graphengine.profiles.benchmark.engines import engine_options
from graphengine.profiles.benchmark.floor.ceiling import ReadCeiling, floor_and_share
from graphengine.profiles.benchmark.floor.experts_read import experts_read
from graphengine.profiles.benchmark.kernel_times import decode_launches, kernel_times, least_room
from graphengine.profiles.benchmark.measure import CHECKED_FIRST_TOKENS, Work
from graphengine.profiles.benchmark.shapes import Subject, kv_bytes, state_bytes, weight_bytes
from graphengine.profiles.benchmark.speculation import (
    Open,
    Plain,
    PlainEngines,
    Sweep,
    measure_drafts,
)
from graphengine.profiles.tables.percentiles import rounded
from graphengine.speculative import describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Contexts:
    """The contexts at which each batch is measured, and the sizes of its engines.

    lengths      tokens of a row when its turn begins, ascending
    limit        tokens of a row when it ends, at most: at a longer context it begins earlier
    max_batch    slots of every engine; None: the rows of the batch
    max_seq_len  of every engine; None: the length that its longest context needs
    prefilled    whether the KV is prefilled; otherwise it is random
    """

    lengths: tuple[int, ...]
    limit: int
    max_batch: int | None = None
    max_seq_len: int | None = None
    prefilled: bool = False

    def check(self, works: Sequence[Work], subject: Subject) -> None:
        """ValueError unless every context is possible if there is memory enough."""
        if self.prefilled and recurrent_states(subject.model.states):
            raise ValueError(
                f"--context: a {subject.model.architecture} has recurrent states, and a prefill "
                f"leaves none where the rows begin: take random KV"
            )
        if self.lengths[-1] > self.limit:
            raise ValueError(f"--context {self.lengths[-1]} exceeds max_seq_len={self.limit}")
        new = max(work.new_tokens for work in works)
        if new >= self.limit:
            raise ValueError(f"{new} new tokens leave no context in max_seq_len={self.limit}")

    def work(self, work: Work, context: int) -> Work:
        """The work of a batch at a context of `context` tokens."""
        return replace(work, prompt_tokens=min(context, self.limit - work.new_tokens))

    def options(self, work: Work, context: int) -> dict[str, Any]:
        """Sizes of an engine whose pool holds every row of `work` at its longest.

        A session may keep a block more than its turn begins with. No row is ever paused.
        """
        at_context = self.work(work, context)
        need = at_context.prompt_tokens + at_context.new_tokens
        slots = work.live if self.max_batch is None else self.max_batch
        table_blocks = -(-need // EngineConfig(device="cpu").block_size)
        return {
            "max_batch": slots,
            "max_seq_len": need if self.max_seq_len is None else self.max_seq_len,
            "kv_blocks": work.live * (table_blocks + 1),
            "swap_blocks": 0,
            # Where a row begins, and where its turn ends.
            "session_states": 2 * work.live,
            # Every row begins with the KV that a session keeps; a ring cannot be shared by rows.
            "window_rings": False,
            "buckets": tuple(sorted({work.live, slots})),
        }

    @contextmanager
    def engine(
        self,
        work: Work,
        lengths: Sequence[int],
        wanted: Mapping[str, Any],
        open_engine: Open,
        left_out: list[dict[str, Any]],
    ) -> Iterator[tuple[Engine | None, list[int]]]:
        """An engine for the lengths that fit in memory, and these lengths; None if none fits.

        The other lengths are added to `left_out`. `wanted` are options besides the sizes.
        """
        left = list(lengths)
        with ExitStack() as stack:
            engine = None
            while left and engine is None:
                options = self.options(work, left[-1]) | dict(wanted)
                try:
                    engine = stack.enter_context(open_engine(options))
                except OutOfBudget as error:
                    mode = options.get("speculative")
                    drafter = None if mode is None else describe(mode)
                    needed = f"{options['kv_blocks']} KV blocks"
                    left_out.append(skipped(work.live, left.pop(), needed, error, drafter))
            yield engine, left


def read_contexts(options: argparse.Namespace, subject: Subject) -> Contexts | None:
    """The options, checked; None without contexts."""
    if options.context is None:
        if options.prefill_context:
            raise ValueError("--prefill-context goes with --context")
        return None
    for name in ("long", "record", "peer"):
        if getattr(options, name):
            raise ValueError(f"--{name} is for rows, which --context {options.context} replaces")
    limit = options.max_seq_len
    return Contexts(
        lengths=tuple(sorted({*integers(options.context, "context")})),
        limit=subject.model.max_positions if limit is None else limit,
        max_batch=options.max_batch,
        max_seq_len=limit,
        prefilled=options.prefill_context,
    )


def skipped(
    live: int, context: int, what: str, error: OutOfBudget, speculative: str | None = None
) -> dict[str, Any]:
    """An entry for a measurement that does not fit in memory: `what`, and the first line of the
    error.
    """
    short, _, _ = str(error).partition("\n")
    return {
        "live": live,
        "context": context,
        "speculative": speculative,
        "reason": f"{what}. {short}",
    }


def measure_contexts(
    contexts: Contexts,
    works: Sequence[Work],
    options: Mapping[str, Any],
    sweep: Sweep | None,
    ceiling: ReadCeiling | None,
    open_engine: Open,
    *,
    first_tokens: Sequence[int] = (),
) -> Iterator[dict[str, Any]]:
    """Measure batch by batch; yields the document's section, which grows.

    kv       how the contexts came about: "random" or "prefilled"
    cells    each batch at each context (`_cell`), with the entries of its speculating engines
    skipped  batches and contexts that do not fit in memory, with the numbers
    first_tokens
             times to first token after prompts of these lengths, if there are any

    `options` are those of every engine, without sizes. Acceptance is forced only for the numbers of
    drafts that the sweep names.
    """
    section: dict[str, Any] = {
        "kv": "prefilled" if contexts.prefilled else "random",
        "cells": [],
        "skipped": [],
    }
    for work in works:
        cells: dict[int, dict[str, Any]] = {}
        plains: dict[int, PlainEngines] = {}
        for wanted, needed in _variants(contexts, work, options, sweep):
            # If the plain engine to compare with was skipped, so are the engines compared with it.
            has = [each for each, plain in plains.items() if needed in (None, *plain.found)]
            lengths = has if wanted else contexts.lengths
            opened = contexts.engine(work, lengths, wanted, open_engine, section["skipped"])
            with opened as (engine, left):
                for context in left:
                    assert engine is not None, f"{left=}"
                    at_context = contexts.work(work, context)
                    with standing_rows(engine, at_context, prefilled=contexts.prefilled) as rows:
                        if not wanted:
                            plains[context] = PlainEngines(engine.row_family)
                            cells[context] = {}
                        found = _measure(engine, at_context, rows, plains[context], sweep)
                    if not wanted:
                        cells[context] |= _cell(engine, at_context, context, found, ceiling)
                        section["cells"].append(cells[context])
                    elif "speculative" in wanted:
                        cells[context]["speculation"].append(rounded(found))
                    yield section
            yield section
    if first_tokens:
        try:
            section["first_tokens"] = _first_tokens(contexts, first_tokens, works[0], open_engine)
        except OutOfBudget as error:
            what = "time to first token"
            section["skipped"].append(skipped(1, max(first_tokens), what, error))
        yield section


def _first_tokens(
    contexts: Contexts, lengths: Sequence[int], work: Work, open_engine: Open
) -> dict[str, Any]:
    """Measure TTFT on an idle engine of one slot that holds the longest of the prompts."""
    need = min(max(lengths) + CHECKED_FIRST_TOKENS, contexts.limit)
    sizes = {"max_batch": 1, "max_seq_len": contexts.max_seq_len or need}
    with open_engine(sizes) as engine:
        times, checked = measure.time_to_first_token(
            engine, lengths, runs=work.runs, sampler=work.sampler
        )
        described = engine.core.description
    return {"ttft_ms": rounded(times), "checked": checked, "engine": described}


def _variants(
    contexts: Contexts, work: Work, options: Mapping[str, Any], sweep: Sweep | None
) -> list[tuple[dict[str, Any], RowFamily | None]]:
    """Options of a batch's engines, and the row family of the plain engine each is compared with.

    The first engine is the plain one, which is compared with none. Speculating engines of another
    row family come after a plain engine of that family.
    """
    sizes = {**options, **contexts.options(work, contexts.lengths[-1])}
    found: list[tuple[dict[str, Any], RowFamily | None]] = [({}, None)]
    families = {EngineConfig(**engine_options(sizes)).family}
    for mode in [] if sweep is None else sweep.modes(sizes["max_batch"]):
        if sweep is None or mode is None:
            continue
        family = EngineConfig(**engine_options({**sizes, "speculative": mode})).family
        if family not in families:
            families.add(family)
            found.append(({"row_family": family}, None))
        forced = [] if sweep.forced is None else sweep.forced_of(mode.k)
        found += [
            ({"speculative": mode, "forced_acceptance": accepted}, family)
            for accepted in (None, *forced)
        ]
    return found


def _measure(
    engine: Engine, work: Work, rows: ContextRows, plains: PlainEngines, sweep: Sweep | None
) -> dict[str, Any]:
    """The figures of an engine; a plain one's are kept for the speculating engines."""
    if engine.config.mode is not None:
        return measure_drafts(engine, work, plains, run=rows.run, drafts_off=False)
    figures = measure.decode(engine, work, run=rows.run)
    if sweep is not None:
        plains.found[engine.row_family] = Plain.of(engine, work, figures, rows.run)
    return figures


def _cell(
    engine: Engine,
    work: Work,
    context: int,
    figures: Mapping[str, Any],
    ceiling: ReadCeiling | None,
) -> dict[str, Any]:
    """One batch at one context, in a plain engine.

    context                   as asked for; the rows begin after `prompt_tokens`
    weight_bytes, kv_bytes    read in a step, at the mean length of a row; `step_bytes` has them and
                              recurrent states
    floor_ms, share           the least time to read them, and its share of the step's time
    tb_s                      the rate of reading these bytes, in 10**12 bytes a second
    """
    model, itl, ms_per_step = engine.model.config, figures["itl_ms"], figures["ms_per_step"]
    experts = experts_read(engine, work)
    weights = weight_bytes(model, engine.memory.dtype, experts=experts)
    tokens = work.live * (work.prompt_tokens + work.new_tokens / 2)
    kv = kv_bytes(model, rows=work.live, tokens=tokens, itemsize=engine.cache.element_size())
    states = state_bytes(model, rows=work.live, dtype=engine.memory.dtype)
    found: dict[str, Any] = rounded(
        {
            "live": work.live,
            "max_batch": engine.config.max_batch,
            "sampler": work.sampler,
            "context": context,
            "prompt_tokens": work.prompt_tokens,
            "new_tokens": work.new_tokens,
            "runs": work.runs,
            **figures,
            "p99.9/p50": itl["p99.9"] / itl["p50"],
            "weight_bytes": weights,
            "experts_read": experts,
            "kv_bytes": kv,
            "step_bytes": weights + kv + states,
            "tb_s": (weights + kv + states) / ms_per_step / 1e9,
            **floor_and_share(ceiling, weights + kv + states, ms_per_step),
        }
    )
    return found | {"engine": engine.core.description, "speculation": []}


def kernel_work(work: Work) -> Work:
    """A batch's work in a single run, with new tokens enough for the replays of its kernels."""
    return replace(work, new_tokens=max(work.new_tokens, least_room(work)), runs=1)


def measure_context_kernels(
    contexts: Contexts, works: Sequence[Work], open_engine: Open
) -> Iterator[dict[str, Any]]:
    """Yields the kernels of each batch at each context, in engines without PDL.

    Measurements that do not fit in memory are left out.
    """
    for work in map(kernel_work, works):
        with contexts.engine(work, contexts.lengths, {"pdl": False}, open_engine, []) as opened:
            engine, left = opened
            launched = {} if engine is None else decode_launches(engine)
            for context in left:
                assert engine is not None, f"{left=}"
                at_context = contexts.work(work, context)
                with standing_rows(engine, at_context, prefilled=contexts.prefilled) as rows:
                    step = measure.decode(engine, at_context, run=rows.run)["ms_per_step"]
                    times = kernel_times(engine, at_context, launched, rows.submit)
                yield {
                    "live": work.live,
                    "max_batch": engine.config.max_batch,
                    "sampler": work.sampler,
                    "context": context,
                    "prompt_tokens": at_context.prompt_tokens,
                    "pdl": engine.config.pdl,
                    "ms_per_step": step,
                    "kernels": None if times is None else [asdict(time) for time in times],
                }
