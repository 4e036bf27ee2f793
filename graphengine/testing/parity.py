"""Does a replay compute what the step computes when it is called?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from graphengine.buckets import CapturedGraph, StaticBuffers
from graphengine.testing.errors import GraphCheckError, hide_frame
from graphengine.testing.tensors import (
    Buffers,
    Replayable,
    cuda_in_use,
    describe,
    describe_difference,
    differing,
    named_tensors,
    restore,
    returned_tensors,
    run_and_wait,
    save,
)

__tracebackhide__ = hide_frame

Fill = Callable[[int, int | None], object]
"""Called with a seed and a live size (None where there are none): writes a step's inputs."""


def assert_replay_matches_eager(
    step: Callable[[], object],
    buffers: Buffers,
    *,
    graph: Replayable | Callable[[], object] | None = None,
    returned: object = None,
    fill: Fill | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    live_sizes: Sequence[int] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """GraphCheckError where a replay of `graph` does not leave what calling `step` leaves.

    `step` takes no arguments and works on `buffers`: the inputs, and all state and outputs that it
    writes in place. For every seed and live size the inputs are filled, the step is called, the
    buffers are put back, the graph is replayed, and both results are compared: all buffers, and
    what both returned. In the end the buffers hold what they held before.

    `graph` is an object with `replay()`. `returned` is then what the step returned when it was
    captured: the tensors (in tuples, lists, mappings) into which every replay writes; leave it out
    where outputs are buffers. Or `graph` is a callable that replays and returns the results, such
    as what torch.compile gives. Left out, `step` is warmed up and captured here, on the current
    CUDA device; where the buffers are on a CPU, it is called a second time instead.

    `fill(seed, live)` writes the inputs, in place, and whatever else the step reads: a Python
    number that is frozen in the graph shows when it changes between two seeds. By default,
    floating-point tensors are drawn from a normal distribution and others left alone, since only
    the caller knows which integers are valid. Of `StaticBuffers` it is the host-owned fields, whose
    lanes from `live` on get the pad value. Random numbers of torch start from the seed, in both
    runs.

    Bits are compared unless `rtol` or `atol` allow a difference (see `torch.isclose`); a NaN equals
    one with the same bits. ValueError if there is nothing to compare, and for live sizes without a
    `fill` that knows what they mean.
    """
    if fill is None:
        if live_sizes is not None and not isinstance(buffers, StaticBuffers):
            raise ValueError(
                f"live_sizes={list(live_sizes)} without fill: which lanes of a buffer are live is "
                "known of StaticBuffers only"
            )
        fill = functools.partial(_fill, buffers)
    tensors = named_tensors(buffers)
    original = save(tensors)
    with _random_state_kept(), _replaying(step, tensors, graph, returned) as replay:
        try:
            for seed in seeds:
                for live in live_sizes if live_sizes is not None else [None]:
                    restore(tensors, original)
                    torch.manual_seed(seed)
                    fill(seed, live)
                    where = f"seed {seed}" + (f", live size {live}" if live is not None else "")
                    _compare_once(step, replay, tensors, seed, where, rtol=rtol, atol=atol)
        finally:
            restore(tensors, original)


def _compare_once(
    step: Callable[[], object],
    replay: Callable[[], object],
    tensors: dict[str, torch.Tensor],
    seed: int,
    where: str,
    *,
    rtol: float,
    atol: float,
) -> None:
    filled = save(tensors)
    torch.manual_seed(seed)
    expected_returned = save(returned_tensors(run_and_wait(step)))
    expected = save(tensors)
    restore(tensors, filled)
    torch.manual_seed(seed)
    actual_returned = returned_tensors(run_and_wait(replay))
    # A step that writes into buffers may return anything by the way; the graph's side decides.
    if actual_returned:
        if actual_returned.keys() != expected_returned.keys():
            raise ValueError(
                f"the step returned {_names(expected_returned)}, the replay "
                f"{_names(actual_returned)}"
            )
        expected |= expected_returned
    if not expected:
        raise ValueError("nothing to compare: no buffers, and the replay returns no tensors")
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
    """A function that replays and returns what the replay wrote; closes what is captured here."""
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
        return kept  # on CUDA of the capture: a replay does not call the step

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


def _fill(buffers: Buffers, seed: int, live: int | None) -> None:
    """The default `fill`; torch is seeded already."""
    if not isinstance(buffers, StaticBuffers):
        for tensor in named_tensors(buffers).values():
            if tensor.is_floating_point():
                tensor.detach().normal_()
        return
    for field in buffers.fields:
        if field.owner == "host":
            lanes = buffers[field.name]
            if field.dtype.is_floating_point:
                lanes.normal_()
            if live is not None:
                lanes[live:] = field.pad


@contextmanager
def _random_state_kept() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if cuda_in_use() else []
    with torch.random.fork_rng(devices):
        yield


def _names(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(tensors) or "no tensors"
