"""How many experts a decode step reads: what the floor of a model with experts counts."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from torch import Tensor

from graphengine import Engine
from graphengine.kernels import Routes
from graphengine.models.routing import observed_routes
from graphengine.profiles.benchmark.eager import EagerStep, drain
from graphengine.profiles.benchmark.measure import Work

_PROMPT_TOKENS = 128
_NEW_TOKENS = 32


def experts_read(engine: Engine, work: Work) -> float | None:
    """Different experts that a layer reads on average, with all rows of `work` decoding.

    None for a model without experts. The rows decode a few tokens after short prompts, in eager
    steps. RuntimeError if they never do so all at the same time.
    """
    if engine.model.weights.routed is None:
        return None
    counts: list[int] = []

    def note(routes: Routes, slot_N: Tensor) -> None:
        live = slot_N >= 0
        if int(live.sum()) == work.live:
            counts.append(len({*routes.expert[live].flatten().tolist()}))

    short = replace(
        work,
        prompt_tokens=min(work.prompt_tokens, _PROMPT_TOKENS),
        # Rows begin one after another.
        new_tokens=min(work.new_tokens, work.live + _NEW_TOKENS),
    )
    drain(engine)
    with engine.runtime.replaced(lambda key, graph: EagerStep(graph)), observed_routes(note):
        engine.generate(short.prompts(engine.model.config.vocab_size), short.params())
        drain(engine)
    if not counts:
        raise RuntimeError(f"{work.live} rows were never live in the same step: {short}")
    return fmean(counts)
