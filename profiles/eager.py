"""Tokens before numbers: the graphs must give what their step programs give when run eagerly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch

from graphengine import Engine, Result, SamplingParams
from graphengine.buckets import CapturedGraph


class EagerStep:
    """Stands in for a captured graph: a replay calls, on its stream, the step that was captured."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._step = graph._open_step()
        self._stream = graph.stream
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._step()


@contextmanager
def eager_steps(engine: Engine) -> Iterator[dict[str, EagerStep]]:
    """Inside, every step of the engine runs eagerly; yields the stand-ins by bucket name.

    Enter and leave with no replay in flight.
    """
    captured = engine._graphs
    stand_ins = {name: EagerStep(graph) for name, graph in captured.items()}
    engine._graphs = cast(dict[str, Any], stand_ins)
    try:
        yield stand_ins
    finally:
        engine._graphs = captured


def check_against_eager(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> int:
    """RuntimeError unless graphs and eager steps give the same tokens; returns how many were equal.

    Also if the eager steps were never called: then the graphs would have been compared with
    themselves.
    """
    replayed = engine.generate(prompts, params)
    with eager_steps(engine) as stand_ins:
        eager = engine.generate(prompts, params)
    used = {name for name, stand_in in stand_ins.items() if stand_in.replays}
    for kind in ("prefill", "decode"):
        if not any(name.startswith(kind) for name in used):
            raise RuntimeError(f"no {kind} step ran eagerly: only {sorted(used)} did")
    for index, pair in enumerate(zip(eager, replayed, strict=True)):
        require_equal(pair, f"the eager step and the graphs, prompt {index}:")
    return sum(len(result.token_ids) for result in replayed)


def require_equal(results: Sequence[Result], what: str) -> None:
    """RuntimeError, with the place where they part, unless these results have the same tokens."""
    expected = results[0].token_ids
    for index, result in enumerate(results):
        if result.token_ids != expected:
            pairs = zip(result.token_ids, expected, strict=False)
            same = next((i for i, (got, want) in enumerate(pairs) if got != want), "all")
            raise RuntimeError(
                f"{what} runs 0 and {index} differ after {same} equal tokens "
                f"({len(expected)} and {len(result.token_ids)} in all)"
            )
