"""The captured programs: what one replay does, in order.

    decode    command, gather, embed -> layers -> lm_head, sample -> commit, publish
    prefill   command -> gather -> embed, layers, lm_head -> sample -> commit -> publish

Both end with the buffers holding what the next replay needs. Host-owned fields are only read, and
device-owned ones only written here, so that a replay may be launched before the last one was read.

Letters: R rows of the bucket, T tokens of the prefill bucket, S slots.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from graphengine.buckets import Mailbox, StaticBuffers
from graphengine.kernels import (
    SamplingTensors,
    SlotState,
    StopTensors,
    apply_commands,
    begin_decode,
    commit_prefill,
    finish_decode,
    gather_prefill,
    linear,
    linear_sample,
    new_residual,
    paged_prefill_attention,
    publish,
    residual_groups,
    sample,
    sample_tiles,
)
from graphengine.models.dense import DecodeLaunch, DenseModel

Sampler = Literal["fast", "full"]
"""`fast`: greedy or by temperature, folded into lm_head. `full`: top-k, top-p and min-p as well."""


class StepOutputs(NamedTuple):
    """What a step computed before it published; valid until the next step of the same pool.

    `logits` is None where the fast sampler keeps them out of memory.
    """

    logits: Tensor | None
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
        launch: DecodeLaunch,
    ) -> None:
        self.model = model
        self.buffers = buffers
        self.cache = cache
        self.mailbox = mailbox
        self.launch = launch
        self.state = SlotState(*(buffers[name] for name in SlotState._fields))
        self.sampling = SamplingTensors(*(buffers[name] for name in SamplingTensors._fields))
        self.stopping = StopTensors(buffers["stop_ids"], buffers["max_len"])

    def decode(self, rows: int, sampler: Sampler) -> StepOutputs:
        """Advance the requests of rows `0 .. rows - 1` by one token each."""
        buffers, model, pdl = self.buffers, self.model, self.launch.pdl
        config, weights, plans = model.config, model.weights, self.launch.plans
        residual = new_residual(
            rows,
            config.hidden_size,
            residual_groups(plans.down, config.hidden_size),
            dtype=model.dtype,
            device=buffers.device,
        )
        row = begin_decode(
            self.state,
            buffers["command_epoch"],
            buffers["slot_of_row"][:rows],
            weights.embedding,
            model.norm_behind(-1),
            residual,
            pdl=pdl,
        )
        residual = model.decode(row, residual, self.cache, buffers["block_table"], self.launch)
        logits = None
        x, lm_head = residual.scaled, weights.lm_head
        shared: Any = {
            "squares_TN": residual.squares,
            "eps": config.norm_eps,
            "plan": plans.lm_head,
            "arrivals": self.launch.arrivals,
            "pdl": pdl,
        }
        if sampler == "fast":
            best, health = linear_sample(
                x, lm_head, row.slot, row.position, self.sampling, **shared
            )
        else:
            logits = linear(x, lm_head, row.slot, out_dtype=torch.float32, **shared)
            best, health = sample_tiles(logits, row.slot, row.position, self.sampling, pdl=pdl)
        token, flags = finish_decode(
            best,
            health,
            row,
            self.state,
            self.stopping,
            self.mailbox.tensor,
            self.launch.arrivals,
            pdl=pdl,
        )
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
        x = self.model.prefill(chunk, self.cache, block_table, attend)
        logits = self.model.prefill_logits(x, slot, chunk.last)
        position = chunk.position.index_select(0, chunk.last)
        sampled = sample(logits, slot, position, self.sampling)
        flags = commit_prefill(self.state, sampled, slot, start, count, final, self.stopping)
        publish(self.mailbox.tensor, self.state, sampled, flags, slot)
        return StepOutputs(logits, sampled, flags)
