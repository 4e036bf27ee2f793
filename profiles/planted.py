"""Runs with a planted cause of slow tokens, for the guide and the tests of the report.

Each is a loop as in an embedding program: `engine.step()`, and the caller's code in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from graphengine import Engine, Request, SamplingParams
from graphengine.profiles.benchmark.engines import build_engine, freed
from graphengine.profiles.benchmark.measure import random_prompt
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.flags.profile import CAUSES

MAX_BATCH = 32
PROMPT_TOKENS = 16
LONG_PROMPT = 192
MAX_SEQ_LEN = 512
STALL_EVERY, SYNC_EVERY, JOIN_EVERY = 50, 20, 60
STALL_STEPS = 10
WARM_STEPS = 40


@contextmanager
def planted_engine(
    cause: str, *, shape: str = "demo", device: str | None = None
) -> Iterator[Engine]:
    """An engine that shows `cause`. ValueError for a cause that this machine cannot show."""
    if cause not in CAUSES:
        raise ValueError(f"cause {cause!r}: known are {', '.join(CAUSES)}")
    options: dict[str, Any] = {"max_batch": MAX_BATCH, "max_seq_len": MAX_SEQ_LEN}
    if cause == "bucket":
        options["buckets"] = (1, MAX_BATCH)
    if device is not None:
        options["device"] = device
    engine, _ = build_engine(Subject.of_shape(shape), options)
    with freed(engine):
        if cause == "sync" and engine.memory.device.type != "cuda":
            raise ValueError("cause 'sync': a CPU has nothing to wait for; it needs a GPU")
        yield engine


def run_planted(engine: Engine, cause: str, steps: int) -> None:
    """Warm up, then record `steps` steps with `engine.recorder`, which is left stopped."""
    usual = _step_seconds(engine)
    between = _between(engine, cause, usual)
    engine.recorder.start()
    try:
        request = _decoder(engine, seed=0)
        for step in range(1, steps + 1):
            if request.finished:
                request = _decoder(engine, seed=step)
            engine.step()
            between(step)
    finally:
        engine.recorder.stop()
    _drain(engine)


def _decoder(engine: Engine, seed: int) -> Request:
    prompt = random_prompt(engine.model.config.vocab_size, PROMPT_TOKENS, seed)
    tokens = engine.memory.max_seq_len - PROMPT_TOKENS
    return engine.submit(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))


def _step_seconds(engine: Engine) -> float:
    """Seconds of a usual step; also warms up."""
    _decoder(engine, seed=0)
    times = []
    for _ in range(WARM_STEPS):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    _drain(engine)
    return median(times)


def _drain(engine: Engine) -> None:
    for request in [*engine.scheduler.active, *engine.scheduler.waiting]:
        request.cancel()
    while engine.busy:
        engine.step()


def _between(engine: Engine, cause: str, usual: float) -> Callable[[int], None]:
    """The caller's work after step number n."""

    def stall(step: int) -> None:
        if step % STALL_EVERY == 0:
            time.sleep(STALL_STEPS * usual)

    def sync(step: int) -> None:
        if step % SYNC_EVERY == 0:
            torch.cuda.synchronize(engine.memory.device)

    def join(step: int) -> None:
        if step % JOIN_EVERY == 0:
            tokens, new = (PROMPT_TOKENS, 8) if cause == "bucket" else (LONG_PROMPT, 1)
            prompt = random_prompt(engine.model.config.vocab_size, tokens, step)
            engine.submit(prompt, SamplingParams(max_tokens=new, ignore_eos=True))

    def nothing(step: int) -> None:
        pass

    causes = {"stall": stall, "sync": sync, "bucket": join, "prefill": join}
    return causes.get(cause, nothing)
