"""Log-probabilities of a frame's codes, for requests that want them.

Letters: N lanes, R rows, S slots, K codes of a frame, V codes of a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphengine.buckets import StaticBuffers
from graphengine.kernels.frames.logprobs import code_logprobs, publish_code_logprobs
from graphengine.kernels.logits.logprobs import LogprobTensors
from graphengine.kernels.logits.sampled_logits import write_sampled_logits
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.step.state import DecodeLanes


class CodeLogprobs:
    """Writes and publishes log-probabilities of codes in the steps of an engine.

    Nothing changes the logits of a code before it is drawn, so raw and processed ones are the same.

    sampling  how the code at each place is drawn, K of them
    mailbox   receives them, K items for each lane
    sampled   whether requests may ask for log-probabilities of the distribution that codes are
              drawn from
    """

    def __init__(
        self,
        buffers: StaticBuffers,
        sampling: Sequence[SamplingTensors],
        mailbox: Tensor,
        *,
        sampled: bool,
    ) -> None:
        self._wants = LogprobTensors(buffers["logprobs_wanted"], buffers["logprobs_raw"])
        self._sampling, self._sampled = tuple(sampling), sampled
        self._mailbox, self._sequence = mailbox, buffers["sequence"]

    def new(self, lanes: int) -> Tensor:
        """Uninitialised float32 [K, N] for the codes of a frame."""
        shape, device = (len(self._sampling), lanes), self._sequence.device
        return torch.empty(shape, dtype=torch.float32, device=device)

    def note(
        self,
        place: int,
        logits_NV: Tensor,
        code_N: Tensor,
        lanes: DecodeLanes,
        out_KN: Tensor,
        *,
        pdl: bool,
    ) -> None:
        """Write the log-probabilities of the codes that the lanes have at this place."""
        drawn_from = None
        if self._sampled:
            drawn_from = torch.empty_like(logits_NV)
            write_sampled_logits(
                logits_NV,
                lanes.slot,
                lanes.position,
                self._sampling[place],
                self._wants,
                out_NV=drawn_from,
                pdl=pdl,
            )
        code_logprobs(
            logits_NV,
            code_N,
            lanes.slot,
            self._wants,
            out_KN[place],
            sampled_NV=drawn_from,
            pdl=pdl,
        )

    def publish(self, value_KN: Tensor, count_R: Tensor, slot_R: Tensor, *, pdl: bool) -> None:
        """Publish the log-probabilities of rows that have a frame; the step itself has
        published.
        """
        publish_code_logprobs(
            self._mailbox, self._sequence, count_R, slot_R, self._wants, value_KN, pdl=pdl
        )
