"""How many experts a decode step reads, for the floor of a model with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from torch import Tensor

from graphengine import Engine
from graphengine.buckets import CapturedGraph
from graphengine.kernels.experts.router import Routes
from graphengine.models.routing import observed_routes
from graphengine.profiles.benchmark.eager import EagerStep, drain
from graphengine.profiles.benchmark.measure import Work
from graphengine.program.graph_key import GraphKey

_PROMPT_TOKENS = 128
_NEW_TOKENS = 32


class StepExperts(NamedTuple):
    """Different experts that a decode step reads on average.

    layer    in a layer of the target, by all its lanes
    drafter  in all runs of draft modules together
    """

    layer: float
    drafter: float


class _NotedStep(EagerStep):
    """An eager step that begins a note, which then has all experts read, also by drafts."""

    def __init__(self, graph: CapturedGraph, begin: Callable[[], None]) -> None:
        super().__init__(graph)
        self._begin = begin

    def replay(self) -> None:
        self._begin()
        super().replay()


def experts_read(engine: Engine, work: Work) -> float | None:
    """Different experts that a layer reads on average, with all rows of `work` decoding.

    None for a model without experts. Measured by `step_experts`.
    """
    found = step_experts(engine, work)
    return None if found is None else found.layer


def step_experts(engine: Engine, work: Work) -> StepExperts | None:
    """Experts that steps read with all rows of `work` decoding; None for a model without experts.

    The rows decode a few tokens after short prompts, in eager steps. RuntimeError if no step has
    all rows.
    """
    routed = engine.model.weights.routed
    if routed is None:
        return None
    # For each step, for each layer that is run: rows and experts.
    steps: list[list[tuple[int, int]]] = []

    def note(routes: Routes, slot_N: Tensor) -> None:
        live = slot_N >= 0
        rows = len({*slot_N[live].tolist()})
        steps[-1].append((rows, len({*routes.expert[live].flatten().tolist()})))

    def stand_in(key: GraphKey, graph: CapturedGraph) -> EagerStep:
        return _NotedStep(graph, begin[key.kind])

    # The drafts after a prompt belong to no step.
    begin: dict[str, Callable[[], None]] = {
        "decode": lambda: steps.append([]),
        "prefill": lambda: steps.append([(0, 0)]),
    }
    short = replace(
        work,
        prompt_tokens=min(work.prompt_tokens, _PROMPT_TOKENS),
        # Rows begin one after another.
        new_tokens=min(work.new_tokens, work.live + _NEW_TOKENS),
    )
    drain(engine)
    with engine.runtime.replaced(stand_in), observed_routes(note):
        engine.generate(short.prompts(engine.model.config.vocab_size), short.params())
        drain(engine)
    full = [step for step in steps if step and step[0][0] == work.live]
    if not full:
        raise RuntimeError(f"{work.live} rows were never live in the same step: {short}")
    counts = [[count for _, count in step] for step in full]
    return StepExperts(
        layer=fmean(count for step in counts for count in step[: routed.layers]),
        drafter=fmean(sum(step[routed.layers :]) for step in counts),
    )
