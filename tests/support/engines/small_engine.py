"""A small engine of a few of the demo's layers, and the ways in which its tests step it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from checkpoints.few_layers import few_layers
from graphengine import Engine, Event, Request, SamplingParams

# Prompts of the demo model; the long one is prefilled in several chunks of 32.
PROMPT = "def fib(n):"
OTHER = "class Tree:\n"
LONG = "import os\nimport sys\n\n\ndef main(arguments):\n    for name in arguments:\n" * 2
MAX_SEQ_LEN = 128
LIMIT = 500


def open_engine(path: Path | str | None = None, **options: Any) -> Engine:
    """A small engine, of a few of the demo's layers unless another checkpoint is named."""
    sizes = {"max_batch": 3, "max_seq_len": MAX_SEQ_LEN, "block_size": 8}
    options = sizes | {"prefill_buckets": (8, 32)} | options
    return Engine.from_pretrained(path or few_layers(), **options)


def greedy(max_tokens: int | None = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def sampled(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def run(engine: Engine) -> list[Event]:
    """Step until nothing is left to do; all events."""
    events = []
    for _ in range(LIMIT):
        if not engine.busy:
            return events
        events += engine.step()
    raise AssertionError(f"busy after {LIMIT} steps: {engine.scheduler.active}")


def step_until(engine: Engine, condition: Callable[[], bool]) -> list[Event]:
    events = []
    for _ in range(LIMIT):
        if condition():
            return events
        events += engine.step()
    raise AssertionError(f"not after {LIMIT} steps: {engine.scheduler.active}")


def events_of(request: Request, events: list[Event]) -> list[Event]:
    return [event for event in events if event.request is request]


def tokens_of(events: list[Event]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(event.token_ids for event in events))


def assert_idle(engine: Engine) -> None:
    """Nothing is left of any request."""
    assert not engine.busy
    scheduler = engine.scheduler
    assert scheduler.pool.free == scheduler.pool.count
    assert scheduler.swap.free == scheduler.swap.count
    assert not any(scheduler.slots) and not scheduler.active and not scheduler.waiting
