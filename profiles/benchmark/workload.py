"""The workload of `graphengine profile`: requests that decode in an engine of a shape or a
checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphengine import Engine
from graphengine.profiles.benchmark.engines import build_engine, engine_options, freed
from graphengine.profiles.benchmark.measure import Work
from graphengine.profiles.benchmark.shapes import Subject

ENGINE_OPTIONS = ("device", "dtype", "lookahead", "max_batch", "max_seq_len")
SPARE_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`work` on an engine of `subject`; `options` are `EngineConfig`'s."""

    subject: Subject
    work: Work
    options: dict[str, Any]

    @classmethod
    def read(cls, options: argparse.Namespace) -> Workload:
        """Read the options of `graphengine profile`. ValueError for bad ones."""
        if options.shape is not None and options.checkpoint is not None:
            raise ValueError(
                f"--shape {options.shape} and --checkpoint {options.checkpoint}: give one"
            )
        if options.checkpoint is None:
            subject = Subject.of_shape(options.shape or "demo")
        else:
            subject = Subject.of_checkpoint(options.checkpoint)
        work = Work(
            live=options.live,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            runs=1,
            sampler=options.sampler,
        )
        wanted = {name: getattr(options, name) for name in ENGINE_OPTIONS}
        wanted["pdl"] = False if options.no_pdl else None
        if wanted["max_batch"] is None:
            wanted["max_batch"] = work.live
        if wanted["max_seq_len"] is None:
            wanted["max_seq_len"] = work.prompt_tokens + work.new_tokens + SPARE_TOKENS
        return cls(subject=subject, work=work, options=engine_options(wanted))

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """The engine, warmed up: the work was done once."""
        engine, _ = build_engine(self.subject, self.options)
        with freed(engine):
            self.run(engine)
            yield engine

    def run(self, engine: Engine) -> None:
        """Run all requests to their ends."""
        prompts = self.work.prompts(engine.model.config.vocab_size)
        engine.generate(prompts, self.work.params())


def profiled_range(engine: Engine) -> AbstractContextManager[Any]:
    """The range that nsys collects with --capture-range=cudaProfilerApi; empty on a CPU."""
    return _cuda_range() if engine.memory.device.type == "cuda" else _nothing()


@contextmanager
def _cuda_range() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def recorded(engine: Engine, path: Path | None) -> Iterator[None]:
    """Record `engine` inside the block and write it to `path`; does nothing without a path."""
    if path is None:
        yield
        return
    engine.recorder.start()
    try:
        yield
    finally:
        engine.recorder.stop()
        engine.recorder.write(path)
