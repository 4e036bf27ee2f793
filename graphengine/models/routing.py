"""The experts that a step's lanes are routed to: how they are observed, recorded and prescribed.

Letters: N lanes, L layers with experts, E experts, k experts chosen for a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from graphengine.kernels.experts.router import Routes

Observer = Callable[[Routes, Tensor], None]
"""Called with the routes of a layer's lanes, and their slots `[N]`, -1 for a padded lane."""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed_routes(observer: Observer) -> Iterator[None]:
    """Call `observer` in each layer of decode steps that run eagerly inside the `with` block.

    Replays of graphs that were captured before do not call it.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def tell_routes(routes: Routes, slot_N: Tensor) -> None:
    """Call the observer, if there is one."""
    observer = _observer.get()
    if observer is not None:
        observer(routes, slot_N)


class StepRoutes:
    """The experts of one step, filled layer by layer as the layers are launched.

    expert  int32 [L, N, k], which the layers write; padded lanes hold anything
    given   int32 [L, N, k]: expert ids that replace the router's choice; -1: none is given
    """

    def __init__(self, given: Tensor) -> None:
        self.given = given
        self.expert = torch.empty_like(given)
        self._layer = 0

    def next_layer(self) -> tuple[Tensor, Tensor]:
        """Ids given to the next layer, and where it writes its own: int32 [N, k] each."""
        layer, self._layer = self._layer, self._layer + 1
        assert layer < len(self.given), f"{layer=} of {len(self.given)} layers with experts"
        return self.given[layer], self.expert[layer]

    def of_last_layer(self, lane_1: Tensor) -> StepRoutes:
        """Routes for the last layer with experts when it is run again for one lane, int32 [1]."""
        return StepRoutes(self.given[-1:].index_select(1, lane_1))

    def replace_last_layer(self, routes: StepRoutes, lane_1: Tensor) -> None:
        """Copy back the routes of `of_last_layer`, if its layer was run at all."""
        if routes._layer:
            self.expert[-1].index_copy_(0, lane_1.long(), routes.expert[0])


def layer_ids(routes: StepRoutes | None) -> tuple[Tensor | None, Tensor | None]:
    """`next_layer` of `routes`; (None, None) if the step keeps no routes."""
    return (None, None) if routes is None else routes.next_layer()
