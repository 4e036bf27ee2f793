"""Tokens before numbers: the graphs must give the same tokens as their step programs run eagerly.

An eager step, of prefill or of decoding, is the captured function called from Python: the same
kernels with the same plans, on the same buffers, under the same scheduler. The comparison shows
that capture and replay lose nothing: no frozen scalar, no stale buffer, no missing edge. It does
not show that the kernels or the scheduler are right; tests compare the kernels with references and
transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import torch

from graphengine import Engine, Result, SamplingParams
from graphengine.buckets import CapturedGraph
from graphengine.program.graph_key import GraphKey
from graphengine.speculative import describe

Answer = TypeVar("Answer")


class EagerStep:
    """Stands in for a captured graph: a replay calls the captured step on its stream."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._step = graph.step
        self._stream = graph.stream
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._step()


def both_ways(engine: Engine, run: Callable[[], Answer]) -> tuple[Answer, Answer]:
    """The results of `run` with the captured graphs, and with eager steps in their places.

    RuntimeError if a replay of the second run was not an eager step: then graphs would have been
    compared with themselves.
    """
    drain(engine)
    replayed = run()
    drain(engine)
    with engine.runtime.replaced(lambda key, graph: EagerStep(graph)) as stand_ins:
        eager, launched = with_launches(engine, run)
    ran = {key: stand_in.replays for key, stand_in in stand_ins.items() if stand_in.replays}
    if ran != launched or not ran:
        shown = [{key.name: count for key, count in each.items()} for each in (launched, ran)]
        raise RuntimeError(f"the engine launched {shown[0]}, and eagerly ran only {shown[1]}")
    return replayed, eager


def with_launches(engine: Engine, run: Callable[[], Answer]) -> tuple[Answer, dict[GraphKey, int]]:
    """The result of `run`, and how often each graph was launched for it."""
    drain(engine)
    before = Counter(engine.counters)
    answer = run()
    drain(engine)
    return answer, launches(engine, engine.counters - before)


def launches(engine: Engine, counters: Mapping[str, int]) -> dict[GraphKey, int]:
    """How often each launched graph was launched, from `counters`."""
    found = {key: counters.get(key.counter, 0) for key in engine.runtime.graphs}
    return {key: count for key, count in found.items() if count}


def drain(engine: Engine) -> None:
    """Collect the launches after the last request's end."""
    while engine.busy:
        engine.step()


def check_against_eager(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Result]:
    """The results of eager steps. RuntimeError unless graphs give the same tokens."""
    return check_run(engine, lambda: engine.generate(prompts, params))


def check_run(engine: Engine, run: Callable[[], list[Result]]) -> list[Result]:
    """`check_against_eager` for the requests that `run` makes; results in the order of prompts."""
    replayed, eager = both_ways(engine, run)
    for index, pair in enumerate(zip(eager, replayed, strict=True)):
        require_equal(pair, f"the eager step and the graphs, prompt {index}:")
    return eager


def require_begins(result: Result, beginning: Result, what: str) -> None:
    """RuntimeError unless the tokens of `result` begin with those of `beginning`."""
    begun = result.token_ids[: len(beginning.token_ids)]
    require_equal([beginning, replace(result, token_ids=begun)], what)


def comparable(engine: Engine, plain_numerics: str) -> bool:
    """Whether the engine's tokens must be those of plain decoding with these numerics.

    An engine with a tree of drafts attends in other splits in half precision, so its tokens may
    differ where two are nearly equal. RuntimeError for any other drafter whose numerics differ.
    """
    if engine.numerics_id == plain_numerics:
        return True
    mode = engine.config.mode
    if getattr(mode, "tree", None) is None:
        raise RuntimeError(
            f"{describe(mode)} has numerics {engine.numerics_id}, plain decoding in row family "
            f"{engine.row_family} {plain_numerics}: their tokens cannot be compared"
        )
    return False


def require_equal(results: Sequence[Result], what: str) -> None:
    """RuntimeError, with the first difference, unless these results have the same tokens."""
    expected = results[0].token_ids
    for index, result in enumerate(results):
        if result.token_ids != expected:
            pairs = zip(result.token_ids, expected, strict=False)
            same = next((i for i, (got, want) in enumerate(pairs) if got != want), "all")
            raise RuntimeError(
                f"{what} runs 0 and {index} differ after {same} equal tokens "
                f"({len(expected)} and {len(result.token_ids)} in all)"
            )
