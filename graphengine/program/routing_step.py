"""Records which experts a step's tokens take, and replays the experts of a record.

Letters: S slots, P positions, N lanes, L layers with experts, k experts of a lane.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.buckets import StaticBuffers
from graphengine.kernels.experts.records import given_routes, publish_routes
from graphengine.kernels.step.state import PrefillLanes
from graphengine.models.routing import StepRoutes


class RoutingStep:
    """The mailboxes of expert ids and the table of records, as the step's graphs use them.

    mailbox  receives the ids of new tokens, and `prompt_mailbox` those of prompts
    table    int16 [S, P, L, k] in host memory: the records that slots replay
    """

    def __init__(
        self, buffers: StaticBuffers, mailbox: Tensor, prompt_mailbox: Tensor, table: Tensor
    ) -> None:
        self._mailbox, self._prompt_mailbox = mailbox, prompt_mailbox
        self._table, self._length = table, buffers["routing_len"]
        self._sequence = buffers["sequence"]

    def begin(self, slot: Tensor, position: Tensor, *, pdl: bool = False) -> StepRoutes:
        """Begin a step's routes, before the model runs; slots and positions are int32 [N]."""
        return StepRoutes(given_routes(self._table, self._length, slot, position, pdl=pdl))

    def publish(
        self, routes: StepRoutes, count: Tensor, slot: Tensor, *, pdl: bool = False
    ) -> None:
        """Publish the expert ids of the tokens that rows took in, `count` of each row. The step
        itself has already published.
        """
        publish_routes(self._mailbox, self._sequence, count, slot, routes.expert, pdl=pdl)

    def publish_prompt(self, routes: StepRoutes, chunk: PrefillLanes) -> None:
        """Publish the expert ids of a prompt's chunk; the step itself has already published."""
        count = (chunk.slot >= 0).to(torch.int32)
        publish_routes(self._prompt_mailbox, self._sequence, count, chunk.slot, routes.expert)
