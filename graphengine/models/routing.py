"""The experts that a step's lanes are routed to: how they are observed, recorded and prescribed.

Letters: N lanes, P chunks of prompts, L layers with experts, E experts, k experts chosen for a
lane.
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

    def of_last_layer(self, lane_P: Tensor) -> StepRoutes:
        """Routes for the last layer with experts when it is run again for P lanes, int32 [P]."""
        return StepRoutes(self.given[-1:].index_select(1, lane_P))

    def replace_last_layer(self, routes: StepRoutes, lane_P: Tensor, slot_P: Tensor) -> None:
        """Copy back the routes of `of_last_layer`, if its layer was run at all.

        slot_P  int32: the lanes' slots, -1 for those that are not copied; the first one is live
        """
        if not routes._layer:
            return
        expert_Pk, lane_P = routes.expert[0], lane_P.long()
        if len(lane_P) > 1:
            # Padded lanes copy what the first one copies: all writes to a lane are the same.
            live_P = slot_P >= 0
            lane_P = lane_P.where(live_P, lane_P[:1])
            expert_Pk = expert_Pk.where(live_P[:, None], expert_Pk[:1])
        self.expert[-1].index_copy_(0, lane_P, expert_Pk)


def layer_ids(routes: StepRoutes | None) -> tuple[Tensor | None, Tensor | None]:
    """`next_layer` of `routes`; (None, None) if the step keeps no routes."""
    return (None, None) if routes is None else routes.next_layer()
