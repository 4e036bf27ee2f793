"""Functions of tensors as CUDA graphs: the kernels here are small, and launching them is slow.

A capture takes about a second, where a compiler takes a minute, which for a training of a few
minutes is too long.
"""

from collections.abc import Callable
from typing import Any

import torch

from demo_training.logs import log
from graphengine.buckets.captured import no_garbage_collection

WARM_UP = 3


class Replayed:
    """Computes the result of `function` by a CUDA graph that reads tensors like `fed`.

    Results are overwritten by the next call. The function must not wait for the device. The
    constructor calls it a few times to warm up.
    """

    def __init__(self, function: Callable[..., Any], *fed: torch.Tensor) -> None:
        self.fed = [tensor.clone() for tensor in fed]
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                function(*self.fed)
        current.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with no_garbage_collection(), torch.cuda.graph(self.graph):
            self.results = function(*self.fed)

    def __call__(self, *fed: torch.Tensor) -> Any:
        for own, given in zip(self.fed, fed, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.results


def replayed(function: Callable[..., Any], *fed: torch.Tensor) -> Callable[..., Any]:
    """The function as `Replayed`; itself on a CPU, or where it cannot be captured."""
    if not fed[0].is_cuda:
        return function
    try:
        graph = Replayed(function, *fed)
    except Exception as error:  # any failure of a capture; the plain function still works
        log(f"no CUDA graph, going on without: {type(error).__name__}: {str(error)[:500]}")
        return function
    return graph
