"""The part of a step in which parallel heads draw all codes of a frame at once.

One product gives the logits of all codes after the first, one sampler draws them, each row with its
own parameters and noise, and one kernel applies the delays.

Letters: N lanes, S slots, K codes of a frame, J = K - 1, R = N * J rows, V codes of a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphengine.buckets import Field, StaticBuffers
from graphengine.drafters import FieldSizes
from graphengine.kernels.frames.delays import Delays, DelayState, spread_lanes, take_frame
from graphengine.kernels.frames.given import given_codes
from graphengine.kernels.linear.epilogues import LOGITS
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_tiles
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.inner.parallel_heads import HeadsWeights, ParallelHeads
from graphengine.models.launches import DecodeLaunch
from graphengine.models.plans.choosing import choose_plans
from graphengine.program.frame_step import ALIGNED, CODE_STRIDE, DRAWN_FIELDS, Frame, FrameStep
from graphengine.program.graph_key import Sampler
from graphengine.requests.request import Request

START_FIELD, ENDING_FIELD = "delay_start", "delay_ending"


def delay_fields(sizes: FieldSizes) -> list[Field]:
    """Where each slot's delays begin and end."""
    return [
        Field(
            name=START_FIELD,
            shape=(2, -(-sizes.slots // ALIGNED) * ALIGNED),
            dtype=torch.int32,
            owner="host",
            pad=0,
            meaning="position of the last prompt token, and frames begun in the prompt, by slot",
            # Copied only when the requests in the slots change.
            group="codes",
        ),
        Field(
            name=ENDING_FIELD,
            shape=(sizes.slots,),
            dtype=torch.int32,
            owner="device",
            pad=0,
            meaning="codes of the slot's next frame that must be end codes",
        ),
    ]


def delay_updates(
    requests: Sequence[Request | None], config: ParallelHeads
) -> dict[str, NDArray[Any]]:
    """The host's field of delays, where a plan changes the requests in the slots."""
    found = np.zeros((2, -(-len(requests) // ALIGNED) * ALIGNED), np.int32)
    for slot, request in enumerate(requests):
        if request is not None:
            prompt = request.prompt_token_ids
            found[:, slot] = len(prompt) - 1, config.begun(prompt)
    return {START_FIELD: found}


class HeadsStep(FrameStep):
    """Parallel heads in the steps of their model."""

    def _prepare(self, weights: HeadsWeights, buffers: StaticBuffers, family: RowFamily) -> None:
        config, slots, device = weights.config, len(self._codes), buffers.device
        self.config, self._weights = config, weights
        self._delays = Delays(config.begin_code, config.end_code, config.end_token)
        start, begun = buffers[START_FIELD][:, :slots]
        self._state = DelayState(start, begun, buffers[ENDING_FIELD])
        self.plans, _ = choose_plans(config.linears, weights.heads.dtype, family, device)
        self._launch = replace(self._launch, plans=self.plans, adapters=None, routes=None)
        if config.steps > 1:
            drawn = {option: buffers[name] for option, name in DRAWN_FIELDS.items()}
            self._drawn = self._sampling._replace(**drawn)
            rows = slots * (config.steps - 1)
            self._neutral = SamplingTensors.neutral(rows, device=device)

    def draw(
        self,
        best_NC: Tensor,
        health_NC: Tensor,
        lanes: DecodeLanes,
        hidden: Residual | Tensor,
        *,
        sampler: Sampler,
        logits: Tensor | None,
        pdl: bool,
    ) -> Frame:
        """Draw a frame of codes that do not depend on one another."""
        slot, position, places = lanes.slot, lanes.position, self.config.steps
        frame = given_codes(self._given, self._given_until, slot, position, pdl=pdl)
        others, of_others = (best_NC, health_NC), None
        if places > 1:
            others, of_others = self._others(lanes, hidden, replace(self._launch, pdl=pdl))
        token = take_frame(
            best_NC,
            health_NC,
            *others,
            slot,
            position,
            frame,
            self._codes,
            self._state,
            self._delays,
            pdl=pdl,
        )
        logprob = None
        if logits is not None:
            logprob = self._logprobs.new(slot.numel())
            for place in range(places):
                if place and of_others is not None:
                    logits = of_others[:, place - 1]
                self._note(place, logits, frame, lanes, logprob, pdl)
        return Frame(token, frame, logprob)

    def _others(
        self, lanes: DecodeLanes, hidden: Residual | Tensor, launch: DecodeLaunch
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Tiles of the codes after the first, a row for each; and their logits `[N, J, V]`."""
        rows = spread_lanes(
            lanes.slot,
            lanes.position,
            self._sampling,
            self._drawn,
            self._neutral,
            stride=CODE_STRIDE,
            pdl=launch.pdl,
        )
        call = launch.call("heads", hidden, self._weights.later, lanes.slot, eps=self._eps)
        logits = linear(call, LOGITS)
        codes = self.config.codes
        tiles = sample_tiles(logits.view(-1, codes), *rows, pdl=launch.pdl)
        return tiles, logits.view(len(logits), -1, codes)
