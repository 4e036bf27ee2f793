"""Checks that a replay computes the same results as a call of the step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from graphengine.buckets import CapturedGraph
from graphengine.testing.arguments import integers, number, require_callable
from graphengine.testing.errors import GraphCheckError, hide_frame
from graphengine.testing.filling import Fill, drawing
from graphengine.testing.regions import most_lanes
from graphengine.testing.tensors import (
    Buffers,
    Replayable,
    describe,
    describe_difference,
    differing,
    is_static,
    named_tensors,
    outside_of,
    random_state_kept,
    require_repeatable,
    require_writable,
    restore,
    returned_tensors,
    run_and_wait,
    save,
)

__tracebackhide__ = hide_frame

# Upper limit of a tolerance: with an infinite one, everything would be equal.
_LARGEST = sys.float_info.max


def assert_replay_matches_eager(
    step: Callable[[], object],
    buffers: Buffers,
    *,
    graph: Replayable | Callable[[], object] | None = None,
    returned: object = None,
    fill: Fill | None = None,
    draw: Mapping[str, range | None] | None = None,
    seeds: Iterable[int] = (0, 1, 2),
    live_sizes: Iterable[int] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """GraphCheckError if a replay of `graph` does not leave the same values as a call of `step`.

    `step` takes no arguments and works on `buffers`: the inputs, and all state and outputs that it
    writes in place. For every seed and live size the inputs are filled, the step is called, the
    buffers are restored, the graph is replayed, and both results are compared: all buffers, and
    what both returned. At the end the buffers hold what they held before.

    `graph` is an object with `replay()`. `returned` is then the step's result from its capture: the
    tensors (in tuples, lists, mappings, dataclasses) into which every replay writes; leave it out
    where outputs are buffers. Or `graph` is a callable that replays and returns the results, such
    as the result of torch.compile. Without `graph`, `step` is warmed up and captured here, on the
    current CUDA device; if the buffers are on a CPU, it is called a second time instead.

    `fill(seed, live)` writes the inputs, in place, and everything else that the step reads: a
    Python number that is frozen in the graph shows when it changes between two seeds. By default,
    floating-point tensors are drawn from a normal distribution. Which integers are valid only the
    caller knows: `draw` gives a range for each buffer of integers (or bools), as in `draw={"ids":
    range(vocabulary), "tokens": None}`. None leaves a buffer as it is, for buffers that are
    constant or only written: a graph that reads a copy of such a buffer is not noticed. In
    `StaticBuffers`, the lanes of host-owned fields from `live` on get the pad value. In both runs
    torch's random numbers start from the seed.

    Bits are compared unless `rtol` or `atol` allow a difference (see `torch.isclose`); a NaN equals
    one with the same bits. ValueError if there is nothing to compare, if the step returns tensors
    that are in no buffer and the replay returns none, for integers without `fill` and `draw`, for
    live sizes without a `fill` that knows what they mean, and where the step itself does not leave
    the same when it is called again.
    """
    require_callable("step", step)
    _require_graph(graph, returned)
    seeds = integers("seeds", seeds)
    sizes: tuple[int | None, ...] = (None,)
    if live_sizes is not None:
        sizes = integers("live_sizes", live_sizes, least=0)
    number("rtol", rtol, most=_LARGEST)
    number("atol", atol, most=_LARGEST)
    if fill is None:
        if live_sizes is not None:
            if not is_static(buffers):
                raise ValueError(
                    f"live_sizes={list(sizes)} without fill: which lanes of a buffer are live is "
                    "known of StaticBuffers only"
                )
            integers("live_sizes", sizes, most=most_lanes(buffers))
    elif draw is not None:
        raise ValueError(f"{draw=} with `fill`: the buffers are filled by one of the two")
    elif not callable(fill):
        raise ValueError(f"{fill=} is not callable: give a function of a seed and a live size")
    tensors = named_tensors(buffers)
    fill = fill or drawing(buffers, tensors, draw or {}, seeds)
    require_writable(tensors)
    original = save(tensors)
    first = True
    with random_state_kept(), _replaying(step, tensors, graph, returned) as replay:
        try:
            for seed in seeds:
                for live in sizes:
                    restore(tensors, original)
                    torch.manual_seed(seed)
                    fill(seed, live)
                    where = f"seed {seed}" + (f", live size {live}" if live is not None else "")
                    _compare_once(
                        step, replay, tensors, seed, where, twice=first, rtol=rtol, atol=atol
                    )
                    first = False
        finally:
            restore(tensors, original)


def _require_graph(graph: object, returned: object) -> None:
    if graph is None or callable(graph):
        if returned is not None:
            what = "no graph" if graph is None else "a callable"
            raise ValueError(
                f"`returned` with {what} would not be compared: it belongs to a graph with "
                "replay(), which is given as `graph=graph`, not `graph=graph.replay`"
            )
    elif not callable(getattr(graph, "replay", None)):
        raise ValueError(f"{graph=} is neither callable nor has it a replay()")


def _compare_once(
    step: Callable[[], object],
    replay: Callable[[], object],
    tensors: dict[str, torch.Tensor],
    seed: int,
    where: str,
    *,
    twice: bool,
    rtol: float,
    atol: float,
) -> None:
    """Compare a call of the step with a replay; before that, if `twice`, with another call."""
    filled = save(tensors)
    torch.manual_seed(seed)
    left = returned_tensors(run_and_wait(step))
    unseen = outside_of(tensors, left)
    expected_returned, expected = save(left), save(tensors)
    restore(tensors, filled)
    if twice:
        torch.manual_seed(seed)
        again = returned_tensors(run_and_wait(step))
        before, after = {**expected_returned, **expected}, {**again, **tensors}
        require_repeatable("step", before, after, rtol=rtol, atol=atol)
        restore(tensors, filled)
    torch.manual_seed(seed)
    actual_returned = returned_tensors(run_and_wait(replay))
    # A step that writes into buffers may also return them; the graph's side decides.
    if actual_returned:
        if actual_returned.keys() != expected_returned.keys():
            raise ValueError(
                f"the step returned {_names(expected_returned)}, the replay "
                f"{_names(actual_returned)}"
            )
        expected |= expected_returned
    elif unseen:
        named = ", ".join(f"{name} ({describe(tensor)})" for name, tensor in unseen.items())
        raise ValueError(
            f"the step returned tensors that are in no buffer, the replay none: {named}; give "
            "`returned`, which is what the step returned when it was captured"
        )
    if not any(tensor.numel() for tensor in expected.values()):
        raise ValueError(
            f"nothing to compare: the replay returns {_names(actual_returned)}, and the buffers "
            f"({_names(tensors)}) have no element"
        )
    for name, actual in (tensors | actual_returned).items():
        if (wanted := describe(expected[name])) != (found := describe(actual)):
            raise GraphCheckError(f"{name}: eager left {wanted}, the replay {found} ({where})")
        wrong = differing(expected[name], actual, rtol=rtol, atol=atol)
        if wrong.any():
            what = describe_difference(
                name, expected[name], actual, wrong, sides=("eager", "replay")
            )
            raise GraphCheckError(f"the replay differs from eager in {what} ({where})")


@contextmanager
def _replaying(
    step: Callable[[], object],
    tensors: dict[str, torch.Tensor],
    graph: Replayable | Callable[[], object] | None,
    returned: object,
) -> Iterator[Callable[[], object]]:
    """A function that replays and returns the replay's results; closes a graph captured here."""
    if graph is not None:
        yield graph if callable(graph) else functools.partial(_replay, graph, returned)
        return
    if not tensors:
        raise ValueError("without a graph, the step's inputs must be among the buffers")
    kept: object = None

    def keep() -> None:
        nonlocal kept
        kept = step()

    def replay_and_return() -> object:
        captured.replay()
        return kept  # on CUDA that of the capture: a replay does not call the step

    device = "cuda" if any(tensor.is_cuda for tensor in tensors.values()) else "cpu"
    captured = CapturedGraph(keep, name="of the test", device=device, warmups=1)
    saved = save(tensors)
    try:
        captured.capture()
        restore(tensors, saved)
        yield replay_and_return
    finally:
        captured.close()


def _replay(graph: Replayable, returned: object) -> object:
    graph.replay()
    return returned


def _names(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(tensors) or "no tensors"
