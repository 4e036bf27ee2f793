"""`graphengine bench --speculative`: the cost of a speculative step, and when it pays.

For each draft length K one engine accepts drafts as the target says; its tokens must be those of
plain decoding in the same row family before any number is reported. Then engines that accept n
drafts whatever they are (or all if fewer were proposed) show the cost of a step: their text is
nonsense.

Each is compared with two plain engines of the same batch: one of the same row family, and the
fastest, whose family follows from the batch alone. A ratio of step times is also the number of
tokens a step at which speculation breaks even.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from graphengine import Engine, EngineConfig, Result
from graphengine.drafters.base import StepSizes
from graphengine.kernels.linear.plans import RowFamily
from graphengine.options.drafts.mode import Mode
from graphengine.profiles.arguments import integers
from graphengine.profiles.benchmark import measure
from graphengine.profiles.benchmark.eager import comparable, drain, with_launches
from graphengine.profiles.benchmark.engines import engine_options, random_drafter
from graphengine.profiles.benchmark.floor.experts_read import step_experts
from graphengine.profiles.benchmark.measure import Run, Work
from graphengine.profiles.benchmark.shapes import Subject, step_bytes
from graphengine.speculative import (
    FORCE_ACCEPTED,
    Auto,
    Speculative,
    describe,
    resolve_auto,
)
from graphengine.speculative_text import (
    parse_draft_vocabulary,
    parse_speculative,
    with_draft_vocabulary,
)

Open = Callable[[dict[str, Any]], AbstractContextManager[Engine]]
"""Opens an engine with these options and those of every engine; it is closed at the end."""

RESULT = ("ms_per_step", "tokens_per_step", "tokens_per_s", "itl_ms", "checked")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The engines of a row.

    mode          the drafter; its length is replaced by those of the sweep
    lengths       draft lengths, 0 for plain decoding; None: that of the mode
    forced        drafts accepted by force, up to K; None: 0 to K
    random_vocab  random tokens from which a shape's module drafts; None: all
    """

    mode: Speculative
    lengths: tuple[int, ...] | None
    forced: tuple[int, ...] | None
    random_vocab: int | None

    def modes(self, max_batch: int) -> list[Mode | None]:
        """The mode at each draft length; None for length 0."""
        mode = resolve_auto(max_batch) if isinstance(self.mode, Auto) else self.mode
        assert mode.k, f"{mode=} has no length to choose"
        if self.lengths is None:
            return [mode]
        return [mode.with_options(k=length) if length else None for length in self.lengths]

    def forced_of(self, length: int) -> list[int]:
        every = range(length + 1) if self.forced is None else self.forced
        return [accepted for accepted in every if accepted <= length]


def read_sweep(options: argparse.Namespace, subject: Subject) -> Sweep | None:
    """The options, checked; None without options for speculation."""
    mode = None if options.speculative is None else parse_speculative(options.speculative)
    if mode is None:
        for name in ("drafts", "force_accepted", "draft_vocab"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} goes with --speculative")
        return None
    random_vocab = None
    if options.draft_vocab is not None:
        if subject.checkpoint is not None:
            mode = with_draft_vocabulary(mode, parse_draft_vocabulary(options.draft_vocab))
        elif not (isinstance(mode, Mode) and mode.trims_vocabulary):
            raise ValueError(f"--draft-vocab is for mtp and eagle3, not for {describe(mode)}")
        else:
            random_vocab, *more = integers(options.draft_vocab, "draft-vocab")
            if more:
                raise ValueError(f"--draft-vocab {options.draft_vocab}: name one size")
    lengths, forced = options.drafts, options.force_accepted
    return Sweep(
        mode=mode,
        lengths=None if lengths is None else _unique(lengths, "drafts"),
        forced=None if forced is None else _unique(forced, "force-accepted"),
        random_vocab=random_vocab,
    )


def _unique(text: str, name: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(integers(text, name, least=0)))


def check_sweep(sweep: Sweep, subject: Subject, options: Mapping[str, Any]) -> None:
    """ValueError unless every engine of a row is possible: its rows fit, its drafter has weights.

    `options` are those of the row's plain engine.
    """
    for mode in sweep.modes(options["max_batch"]):
        config = EngineConfig(**engine_options({**options, "speculative": mode}))
        if config.forced_acceptance is not None:
            raise ValueError(f"{FORCE_ACCEPTED} is set: no tokens could be checked")
        if subject.checkpoint is None:
            random_drafter(subject, config, sweep.random_vocab)


def measure_sweep(
    sweep: Sweep, work: Work, options: Mapping[str, Any], open_engine: Open
) -> Iterator[dict[str, Any]]:
    """Measure one engine after the other; yields the entries of a row's table.

    `options` are those of the row's plain engine; an entry's are described by `measure_drafts`.
    """
    # The graphs that serve the work are enough.
    options = {**options, "buckets": tuple(sorted({work.live, options["max_batch"]}))}
    plain = _PlainEngines(work, options, open_engine)
    for mode in sweep.modes(options["max_batch"]):
        if mode is None:
            yield plain.fastest.entry(plain)
            continue
        for forced in (None, *sweep.forced_of(mode.k)):
            wanted = {**options, "speculative": mode, "forced_acceptance": forced}
            family = EngineConfig(**engine_options({**options, "speculative": mode})).family
            plain.need(family)
            with open_engine(wanted) as engine:
                entry = measure_drafts(engine, work, plain)
            yield entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """A plain engine's figures, and the tokens that the drafts must not change."""

    family: RowFamily
    numerics_id: str
    figures: dict[str, Any]
    launches: dict[str, int]
    results: list[Result]
    read: dict[str, Any]

    @classmethod
    def of(cls, engine: Engine, work: Work, figures: Mapping[str, Any], run: Run) -> Plain:
        """Made from the figures of `measure.decode` and one more run."""
        results, launches = _one_run(engine, work, run)
        return cls(
            family=engine.row_family,
            numerics_id=engine.numerics_id,
            figures={name: figures[name] for name in RESULT},
            launches=launches,
            results=results,
            read=_bytes_read(engine, work),
        )

    def entry(self, plains: PlainEngines) -> dict[str, Any]:
        """This engine's row in the table, with K = 0."""
        described = {
            "k": 0,
            "forced": None,
            "row_family": self.family,
            "numerics_id": self.numerics_id,
            "launches": self.launches,
            "acceptance": None,
            "drafts_off_ms": None,
        }
        return (
            described
            | self.read
            | self.figures
            | plains.compare(self.family, self.figures["ms_per_step"])
        )


class PlainEngines:
    """The plain engines of one batch by row family; the fastest is of the family `best`."""

    def __init__(self, best: RowFamily) -> None:
        self.found: dict[RowFamily, Plain] = {}
        self._best = best

    @property
    def fastest(self) -> Plain:
        """The plain engine of the family that the batch's size selects."""
        return self.need(self._best)

    def need(self, family: RowFamily) -> Plain:
        return self.found[family]

    def compare(self, family: RowFamily, ms_per_step: float) -> dict[str, Any]:
        """Step times of both plain engines, and this step's time over each of them."""
        held = {"same_family": self.need(family), "fastest": self.fastest}
        times = {name: plain.figures["ms_per_step"] for name, plain in held.items()}
        ratios = {name: ms_per_step / time for name, time in times.items()}
        return {"plain_ms": times, "ratio": ratios, "break_even_tokens": ratios["fastest"]}


class _PlainEngines(PlainEngines):
    """Plain engines that are measured when they are first needed."""

    def __init__(self, work: Work, options: Mapping[str, Any], open_engine: Open) -> None:
        usual = {**options, "row_family": None}
        super().__init__(EngineConfig(**engine_options(usual)).family)
        self._work, self._options, self._open = work, options, open_engine

    def need(self, family: RowFamily) -> Plain:
        if family not in self.found:
            with self._open({**self._options, "row_family": family}) as engine:
                figures = measure.decode(engine, self._work)
                run = measure.run_of(engine, self._work)
                self.found[family] = Plain.of(engine, self._work, figures, run)
        return self.found[family]


def measure_drafts(
    engine: Engine,
    work: Work,
    plains: PlainEngines,
    *,
    run: Run | None = None,
    drafts_off: bool = True,
) -> dict[str, Any]:
    """A speculative engine's figures, after the check of its tokens where they are comparable.

    k, forced          drafts verified, and accepted by force; None: as the target says
    tokens_per_step    for a row; `tokens_per_s` for all rows
    itl_ms             gaps between steps, as the tokens of a step come together
    acceptance         of one run of the work
    launches           decode replays of that run, including the one or two after the last token
    step_bytes         bytes that a step must read, drafts included; None for draft models
    experts_read       by a layer of the target; `drafter_experts_read`: by all runs of a draft
                       module together
    drafts_off_ms      a step of the same engine that drafts nothing but keeps its drafter's state
                       up to date, as with a gate; None if acceptance is forced, or not asked for
    plain_ms, ratio    step times of the plain engines, and this step's over them
    break_even_tokens  tokens a step above which it beats the fastest plain engine
    """
    run = run or measure.run_of(engine, work)
    config, same = engine.config, plains.need(engine.row_family)
    forced = config.forced_acceptance
    compared = comparable(engine, same.numerics_id)
    expected = same.results if forced is None and compared else None
    figures = measure.decode(engine, work, expected, run=run)
    engine.acceptance.reset()
    _, launches = _one_run(engine, work, run)
    acceptance = engine.acceptance.as_dict()
    wrong = [name for name in launches if f"/k{config.drafts}/" not in name]
    if wrong:
        raise RuntimeError(f"steps without {config.drafts} drafts were measured: {wrong}")
    off = _drafts_off(engine, work, expected) if forced is None and drafts_off else None
    return {
        "k": config.drafts,
        "forced": forced,
        "row_family": engine.row_family,
        "numerics_id": engine.numerics_id,
        "launches": launches,
        "acceptance": acceptance,
        "drafts_off_ms": off,
        **_bytes_read(engine, work),
        **{name: figures[name] for name in RESULT},
        **plains.compare(engine.row_family, figures["ms_per_step"]),
    }


def _bytes_read(engine: Engine, work: Work) -> dict[str, Any]:
    """`step_bytes` and the experts read; None for what does not exist or is not known."""
    memory, experts = engine.memory, step_experts(engine, work)
    context = work.prompt_tokens + work.new_tokens / 2
    size = step_bytes(
        engine.model.config,
        context=context,
        rows=work.live,
        dtype=memory.dtype,
        kv_dtype=memory.kv_dtype,
        experts=None if experts is None else experts.layer,
    )
    drafts = engine.core.drafter.bytes_read(
        StepSizes(
            rows=work.live,
            context=context,
            kv_dtype=memory.kv_dtype,
            lm_head=engine.model.weights.lm_head,
            experts=0.0 if experts is None else experts.drafter,
        )
    )
    return {
        "step_bytes": None if drafts is None else size + drafts,
        "experts_read": None if experts is None else experts.layer,
        "drafter_experts_read": None if experts is None else experts.drafter,
    }


def _one_run(engine: Engine, work: Work, run: Run) -> tuple[list[Result], dict[str, int]]:
    """The results of one run, and how often each decode graph was launched for it."""
    results, launches = with_launches(engine, lambda: run(work.params()))
    return results, {key.name: count for key, count in launches.items() if key.kind == "decode"}


def _drafts_off(engine: Engine, work: Work, expected: Sequence[Result] | None) -> float | None:
    """Milliseconds of a step at K = 0, by the engine's own graph for it."""
    if 0 not in engine.memory.draft_lengths or engine.gate is not None:
        return None
    drain(engine)
    width, engine.scheduler.width = engine.scheduler.width, 1
    try:
        found: float = measure.decode(engine, work, expected)["ms_per_step"]
        return found
    finally:
        drain(engine)
        engine.scheduler.width = width
