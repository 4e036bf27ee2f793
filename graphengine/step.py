"""The captured programs: what one replay does, in order.

    decode    command -> gather -> model -> sample -> commit -> publish
    prefill   command -> gather -> model -> sample -> commit -> publish

Both end with the buffers holding what the next replay needs. Host-owned fields are only read, and
device-owned ones only written here, so that a replay may be launched before the last one was read.

Letters: R rows of the bucket, T tokens of the prefill bucket, S slots.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from graphengine.buckets import Mailbox, StaticBuffers
from graphengine.kernels import (
    SamplingTensors,
    SlotState,
    StopTensors,
    apply_commands,
    commit_decode,
    commit_prefill,
    gather_decode,
    gather_prefill,
    linear,
    paged_attention,
    paged_prefill_attention,
    publish,
    sample,
)
from graphengine.models.dense import DenseModel, Lanes, Phase, wide_linear


class StepOutputs(NamedTuple):
    """What a step computed before it published; valid until the next step of the same pool."""

    logits: Tensor
    token: Tensor
    flags: Tensor


class StepProgram:
    """The decode and prefill steps over one set of static tensors; allocates only intermediates."""

    def __init__(
        self,
        model: DenseModel,
        buffers: StaticBuffers,
        cache: Tensor,
        mailbox: Mailbox,
        *,
        max_seq_len: int,
    ) -> None:
        self.model = model
        self.buffers = buffers
        self.cache = cache
        self.mailbox = mailbox
        self.max_seq_len = max_seq_len
        self.state = SlotState(*(buffers[name] for name in SlotState._fields))
        self.sampling = SamplingTensors(*(buffers[name] for name in SamplingTensors._fields))
        self.stopping = StopTensors(buffers["stop_ids"], buffers["max_len"])

    def decode(self, rows: int) -> StepOutputs:
        """Advance the requests of rows `0 .. rows - 1` by one token each."""
        buffers, block_table = self.buffers, self.buffers["block_table"]
        apply_commands(self.state, buffers["command_epoch"])
        row = gather_decode(self.state, buffers["slot_of_row"][:rows])
        lanes = Lanes(row.token, row.slot, row.position)
        attend = partial(
            paged_attention,
            block_table_SB=block_table,
            slot_N=lanes.slot,
            position_N=lanes.position,
            scale=self.model.config.attention_scale,
            max_seq_len=self.max_seq_len,
        )
        x = self.model.forward(lanes, self.cache, block_table, Phase(linear, attend))
        logits = self.model.logits(x, lanes.slot)
        token = sample(logits, lanes.slot, lanes.position, self.sampling)
        flags = commit_decode(self.state, token, lanes.slot, self.stopping)
        publish(self.mailbox.tensor, self.state, token, flags, lanes.slot)
        return StepOutputs(logits, token, flags)

    def prefill(self, tokens: int) -> StepOutputs:
        """Feed one request's prompt chunk of at most `tokens`; the final one samples its token."""
        buffers, block_table = self.buffers, self.buffers["block_table"]
        slot, start = buffers["prefill_slot"], buffers["prefill_start"]
        count, final = buffers["prefill_count"], buffers["prefill_final"]
        apply_commands(self.state, buffers["command_epoch"])
        chunk = gather_prefill(buffers["prefill_tokens"][:tokens], slot, start, count)
        attend = partial(
            paged_prefill_attention,
            block_table_SB=block_table,
            query_start_P1=chunk.query_start,
            slot_P=slot,
            position_P=start,
            scale=self.model.config.attention_scale,
        )
        lanes = Lanes(chunk.token, chunk.slot, chunk.position)
        x = self.model.forward(lanes, self.cache, block_table, Phase(wide_linear, attend))
        logits = self.model.logits(x, slot, row_of_lane=chunk.last)
        position = chunk.position.index_select(0, chunk.last)
        sampled = sample(logits, slot, position, self.sampling)
        flags = commit_prefill(self.state, sampled, slot, start, count, final, self.stopping)
        publish(self.mailbox.tensor, self.state, sampled, flags, slot)
        return StepOutputs(logits, sampled, flags)
