"""What goes silently wrong with captured graphs: small programs, and the check that catches each.

None of these programs raises by itself; each just computes something else than it reads like. Where
no GPU is needed to go wrong, they run on the CPU too, in a recording that keeps what a CUDA graph
keeps: operations, their tensors, and every Python value as it was.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphengine.testing import (
    GraphCheckError,
    assert_outputs_written,
    assert_pointers_stable,
    assert_replay_matches_eager,
    assert_rng_advances,
    no_alloc,
    no_sync,
    poison_padding,
)


class Recording(TorchDispatchMode):
    """A graph of CPU operations, as `torch.cuda.CUDAGraph` is one: recorded while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        self._calls.append((function, arguments, options or {}, result))
        return result

    def replay(self) -> None:
        """Call all again; a result goes to where it was when it was recorded."""
        for function, arguments, options, result in self._calls:
            again = function(*arguments, **options)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


Graph = torch.cuda.CUDAGraph | Recording


@contextlib.contextmanager
def capturing(device: str) -> Iterator[Graph]:
    if device == "cpu":
        with Recording() as recording:
            yield recording
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph


def capture(step: Callable[[], object], device: str) -> Graph:
    step()  # so that the capture needs to compile and to allocate nothing
    with capturing(device) as graph:
        step()
    return graph


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_recording_is_replayed_like_a_graph(device: str) -> None:
    """Not a footgun: what the others rely on."""
    x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept[:] = [(x + 1).view(2, 2).sum(0)]
        torch.mul(x, 2, out=y)

    graph = capture(step, device)
    x.fill_(3)
    graph.replay()
    assert (y.tolist(), kept[0].tolist()) == ([6] * 4, [8, 8])


def test_a_python_number_is_frozen(device: str) -> None:
    """The graph holds the number, not the variable. Put what changes into a tensor."""
    x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
    temperature = 1.0

    def step() -> None:
        torch.div(x, temperature, out=y)

    graph = capture(step, device)

    def fill(seed: int, live: int | None) -> None:
        nonlocal temperature
        x.normal_()
        temperature = 1.0 + seed

    with pytest.raises(GraphCheckError, match=r"differs from eager in y .* \(seed 1\)"):
        assert_replay_matches_eager(step, {"x": x, "y": y}, graph=graph, fill=fill)


def test_an_output_is_overwritten_by_the_next_replay(device: str) -> None:
    """Each replay writes into the same tensor, also those of results that are still held. Copy."""
    inputs = torch.zeros(2, 4, device=device)
    x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
    graph = capture(lambda: torch.square(x, out=y), device)

    def predict(values: torch.Tensor) -> torch.Tensor:
        x.copy_(values)
        graph.replay()
        return y

    with pytest.raises(GraphCheckError, match=r"differs from eager in returned\[0\]"):
        assert_replay_matches_eager(
            lambda: [torch.square(values) for values in inputs],
            {"inputs": inputs},
            graph=lambda: [predict(values) for values in inputs],
        )


def test_a_result_of_the_warm_up_is_taken_for_one_of_a_replay(device: str) -> None:
    """A graph that writes too little looks right as long as nobody clears its outputs."""
    x, y = torch.ones(8, device=device), torch.zeros(8, device=device)

    def step(rows: int) -> None:
        torch.mul(x[:rows], 2, out=y[:rows])

    step(8)
    graph = capture(lambda: step(5), device)
    graph.replay()
    assert y.tolist() == [2] * 8, "which is right, though the graph wrote 5 of them"
    with pytest.raises(GraphCheckError, match=r"did not write 3 of 8 elements of y .* at \[5\]"):
        assert_outputs_written(graph.replay, {"y": y})


def test_a_padded_lane_is_stale(device: str) -> None:
    """A graph works on all lanes, and padded ones hold an earlier batch. Reset or mask them."""
    x, y = torch.zeros(8, device=device), torch.zeros((), device=device)
    graph = capture(lambda: torch.amax(x, 0, out=y), device)

    def serve(batch: list[float]) -> float:
        x[: len(batch)] = torch.tensor(batch, device=device)
        graph.replay()
        return y.item()

    assert serve([1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert serve([1, 2, 3]) == 8, "silently wrong"
    with pytest.raises(GraphCheckError, match=r"in the padding of x changed y"):
        poison_padding({"x": x, "y": y}, graph.replay, padding={"x": slice(3, None)})


def test_a_random_number_is_frozen(device: str) -> None:
    """What the host draws while capturing is a number as any other. Draw on the device."""
    y = torch.zeros(4, device=device)
    graph = capture(lambda: y.fill_(random.random()), device)
    with pytest.raises(GraphCheckError, match="the random numbers are frozen"):
        assert_rng_advances(graph.replay, y)


def test_an_input_is_reallocated_between_capture_and_replay(device: str) -> None:
    """The graph reads where the tensor was when it was captured. Write in place."""
    inputs = {"x": torch.zeros(4, device=device)}
    y = torch.zeros(4, device=device)

    def step() -> None:
        torch.add(inputs["x"], 1, out=y)

    graph = capture(step, device)
    pointers = assert_pointers_stable(inputs)
    inputs["x"] = torch.ones(4, device=device)  # as by `inputs["x"] = batch.to(device)`
    with pytest.raises(GraphCheckError, match=r"1 of 1 buffers moved .*: x was .* at 0x"):
        pointers.check()
    with pytest.raises(GraphCheckError, match="differs from eager in y"):
        assert_replay_matches_eager(step, {**inputs, "y": y}, graph=graph)


def test_a_capture_is_interrupted_by_an_exception(device: str) -> None:
    """What was captured until then is a graph, and replays. Let no failed capture be used."""
    x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
    broken = False

    def step() -> None:
        torch.add(x, 1, out=y)
        if broken:
            raise ValueError("no plan for this shape")
        torch.mul(y, 2, out=y)

    step()
    broken = True
    with contextlib.suppress(ValueError), capturing(device) as graph:
        step()
    broken = False
    with pytest.raises(GraphCheckError, match="differs from eager in y"):
        assert_replay_matches_eager(step, {"x": x, "y": y}, graph=graph)


# From here on it takes a GPU to go wrong.


@pytest.mark.gpu
def test_graphs_that_share_a_pool_are_replayed_out_of_order() -> None:
    """The second graph's output takes memory that the first gave back. Replay in capture order."""
    x = torch.zeros(1024, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    torch.exp(x), torch.square(x)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=pool):
        result = torch.exp(x)
    del result
    with torch.cuda.graph(second, pool=pool):
        square = torch.square(x)

    class OutOfOrder:
        def replay(self) -> None:
            second.replay()
            first.replay()

    def step() -> torch.Tensor:
        return torch.square(x)

    assert_replay_matches_eager(step, {"x": x}, graph=second, returned=square)
    with pytest.raises(GraphCheckError, match="differs from eager in returned"):
        assert_replay_matches_eager(step, {"x": x}, graph=OutOfOrder(), returned=square)


@pytest.mark.gpu
def test_a_capture_allocates() -> None:
    """The graph keeps the memory of every temporary for as long as it lives. Write into tensors
    that are there before, or budget for it."""
    x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")

    def step() -> None:
        y.copy_(x * 2)

    step()
    graph = torch.cuda.CUDAGraph()
    message = "the allocator grew by 1 segments"
    with pytest.raises(GraphCheckError, match=message), torch.cuda.graph(graph), no_alloc():
        step()


@pytest.mark.gpu
def test_a_capture_synchronises() -> None:
    """CUDA refuses to wait inside of a capture, in words that do not say where. See where."""
    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def step() -> None:
        torch.mul(x, x.sum().item(), out=y)

    step()
    graph = torch.cuda.CUDAGraph()
    message = r"(?s)waits for the device.*x\.sum\(\)\.item\(\)"
    with pytest.raises(GraphCheckError, match=message), no_sync(), torch.cuda.graph(graph):
        step()


@pytest.mark.gpu
def test_the_host_waits_after_every_replay() -> None:
    """Nothing is wrong but the speed. Ask for results a replay later, or have the device tell."""
    x, y = torch.ones(4, device="cuda"), torch.zeros((), device="cuda")
    graph = capture(lambda: torch.sum(x, 0, out=y), "cuda")
    with (
        pytest.raises(GraphCheckError, match=r"(?s)waits for the device.*bool\(y > 0\)"),
        no_sync(),
    ):
        for _ in range(3):
            graph.replay()
            if bool(y > 0):
                break
