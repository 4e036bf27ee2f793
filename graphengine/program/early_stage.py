"""The steps of a pipeline stage before the last one: its layers, and nothing that needs logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphengine.program.graph_key import PrefillKind, Sampler
from graphengine.program.stages import StageFlow
from graphengine.program.step import StepOutputs, StepProgram


class EarlyStage(StepProgram):
    """An early stage publishes only that a replay is done; the last stage publishes tokens."""

    flow: StageFlow

    def decode(self, rows: int, sampler: Sampler, drafts: int = 0) -> StepOutputs:
        """Advance the states of this stage's layers by 1 + `drafts` tokens of each row."""
        lanes, residual = self._enter(rows, drafts)
        launch = replace(self.launch, tokens_per_row=1 + drafts)
        residual = self.model.decode(lanes, residual, self.states, launch)
        self.flow.leave(residual)
        return self._finish()

    def prefill(self, tokens: int, kind: PrefillKind = "fast") -> StepOutputs:
        """Feed one request's prompt chunk of at most `tokens`."""
        fed = self._chunks_of(kind)
        chunk = self._enter_chunk(tokens, fed)
        end = self.model.prefill(
            chunk,
            self.states,
            self._prefill_attention(chunk, fed),
            all_lanes=True,
            stream=self.flow.arrive_chunk(chunk),
            launch=replace(self.launch.prefill, rope_rows=self._rows_of(chunk)),
        )
        assert end.stream is not None, "the stream of all lanes was asked for"
        self.flow.leave_chunk(end.stream)
        return self._finish()

    def note(self, tokens: int) -> None:
        """Take in a part of a prompt whose KV already exists: nothing here reads its tokens."""
        self._enter_chunk(tokens, self._chunks_of("full"))
        self._finish()

    def _finish(self) -> StepOutputs:
        nothing = self._publish_nothing(self._chunks_of("full").slot)
        return StepOutputs(None, nothing, torch.zeros_like(nothing))
