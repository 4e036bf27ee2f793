"""Relaxed acceptance in the step's graphs: which drafts pass, and which requests are thinking.

`kernels/draft/relaxed_acceptance.py` has the rule. The state, a threshold by slot, is on the
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.buckets import Field, StaticBuffers
from graphengine.drafters import Prefilled
from graphengine.kernels.draft.relaxed_acceptance import (
    relaxed_acceptance,
    relaxed_delta_prompt,
    update_relaxed_delta,
)
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.step.finish_reference import FinishedStep
from graphengine.kernels.step.state import DecodeLanes
from graphengine.speculative import RelaxedAcceptance


def relaxed_field(slots: int) -> Field:
    """The static field that `Relaxation` keeps."""
    return Field(
        name="relaxed_delta",
        shape=(slots,),
        dtype=torch.float32,
        owner="device",
        meaning="probability that a draft may lack; 0: strict",
    )


class Relaxation:
    """The relaxed rule of one engine, over its static buffers."""

    def __init__(self, options: RelaxedAcceptance, buffers: StaticBuffers) -> None:
        self.options = options
        self._delta = buffers["relaxed_delta"]
        self._begin, self._end = (
            torch.tensor(list(ids), dtype=torch.int32, device=buffers.device)
            for ids in (options.begin_token_ids, options.end_token_ids)
        )

    def judge(
        self, logits_NV: Tensor, lanes: DecodeLanes, params: SamplingTensors, drafts: int, pdl: bool
    ) -> Tensor:
        """int32 [N]: 1 where the next lane's draft passes, whatever this lane samples."""
        return relaxed_acceptance(
            logits_NV,
            lanes,
            self._delta,
            params,
            topk=self.options.topk,
            num_speculative_tokens=drafts,
            pdl=pdl,
        )

    def follow(self, step: FinishedStep, lanes: DecodeLanes, pdl: bool) -> None:
        """Update the state with a decode step's tokens."""
        update_relaxed_delta(
            step.token_N,
            step.count_R,
            lanes,
            self._delta,
            self._begin,
            self._end,
            self.options.delta,
            pdl=pdl,
        )

    def follow_prompt(self, prefilled: Prefilled) -> None:
        """Update the state with prompts' chunks, and the token sampled after each last one."""
        relaxed_delta_prompt(
            prefilled.chunk,
            prefilled.token,
            prefilled.final,
            self._delta,
            self._begin,
            self._end,
            self.options.delta,
        )
