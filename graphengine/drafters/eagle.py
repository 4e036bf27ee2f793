"""One MTP module, run K times: each run is fed what the one before it drafted, and its output.

So EAGLE drafts (arXiv:2401.15077), and DeepSeek-V3's single module where K > 1. The module keeps a
KV of its own, a row for each token but the newest. Behind a verified step its first run takes in
what was emitted, with the target's hidden states; each later one extends the chain by a draft, at
positions that the next step's first run overwrites.

Letters: R rows, W lanes of a row, N = R * W lanes, T tokens of a chunk, H hidden, K drafts,
D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.drafters.base import Drafter, DraftSetting, Prefilled, Verified
from graphengine.drafters.head import DraftHead
from graphengine.kernels import (
    DecodeLanes,
    Fusion,
    Residual,
    RowFamily,
    advance_module_draft,
    arrivals_needed,
    begin_module_draft,
    combine_hidden,
    commit_draft,
    new_residual,
)
from graphengine.models.dense import DecodeLaunch, Destinations, arrival_counters
from graphengine.models.mtp import MtpConfig, allocate_mtp_weights, mtp_decode, mtp_prefill
from graphengine.tuning import choose_mtp_plans


class EagleDrafter(Drafter):
    """`MTP(k, style="eagle")`: the checkpoint's first module.

    config      of the checkpoint's modules
    length      K
    vocabulary  int64 [D], ascending: the target ids that may be drafted; None: all
    """

    wants_hidden = True

    def __init__(self, config: MtpConfig, length: int, vocabulary: Tensor | None = None) -> None:
        self.config = config.first(1)
        self.length = length
        # The chain's last run stands K - 1 positions behind the last verified token.
        self.reserve = length - 1
        self.vocabulary = vocabulary

    def allocate(self, device: torch.device, dtype: torch.dtype, family: RowFamily) -> Destinations:
        self.weights = allocate_mtp_weights(self.config, device=str(device), dtype=dtype)
        drafted = None if self.vocabulary is None else self.vocabulary.numel()
        self.plans, self.plan_sources = choose_mtp_plans(
            self.config, dtype, family, device, draft_vocab_size=drafted
        )
        return self.weights.named(self.config)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        own = allocate_mtp_weights(self.config, device="meta", dtype=dtype).nbytes
        rows = 0 if self.vocabulary is None else self.vocabulary.numel()
        return own + rows * self.config.dense.hidden_size * dtype.itemsize

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        return (1, *self.config.dense.kv_block_shape(block_size))

    def arrivals(self, lanes: int) -> int:
        dense, plans = self.config.dense, self.plans
        projection = arrivals_needed(plans.projection, dense.hidden_size)
        return max(projection, arrival_counters(dense, plans.layer, lanes))

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        target, module, eps = setting.model, self.weights.modules[0], self.config.norm_eps
        self._kv = cache[0]
        self._module = module
        self._fusion = Fusion(
            embedding=target.weights.embedding,
            embedding_norm=module.embedding_norm,
            hidden_norm=module.hidden_norm,
            eps=eps,
            hidden_first=self.config.hidden_first,
        )
        self._head = DraftHead(
            target.weights.lm_head,
            self.vocabulary,
            plan=self.plans.lm_head,
            eps=self.config.dense.norm_eps,
            slots=setting.slots,
        )
        self._context = target.context._replace(config=self.config.dense)
        self._launch = setting.launch._replace(plans=self.plans.layer)
        self._target_eps = target.config.norm_eps
        self._limit = setting.limit
        self._block_table = setting.buffers["block_table"]
        self._draft_tokens = setting.buffers["draft_tokens"]

    def prepare(self, prefilled: Prefilled) -> None:
        assert prefilled.hidden is not None, "a module reads hidden states"
        chunk, token = prefilled.chunk, prefilled.following
        combined = combine_hidden(token, chunk.slot, prefilled.hidden, None, self._fusion)
        hidden = mtp_prefill(
            self._module,
            combined,
            chunk,
            self._kv,
            self._block_table,
            self._context,
            prefilled.attend(self.config.dense),
        )
        # PDL is for decode alone: here torch's own kernels stand in between.
        self._chain(
            prefilled.last_lane(token),
            hidden.index_select(0, chunk.last),
            self._launch._replace(pdl=False),
        )

    def propose(self, verified: Verified) -> None:
        step = verified.step
        self._take_in(step.token_N, step.count_R, verified.lanes, verified.hidden, verified.drafts)

    def _take_in(
        self,
        token_N: Tensor,
        count_R: Tensor,
        lanes: DecodeLanes,
        hidden: Residual | Tensor,
        drafts: int,
    ) -> None:
        """`propose`; `hidden` is the stream scaled for the final norm, or plain behind it."""
        launch = self._launch
        residual = self._new_stream(lanes.slot.numel())
        first = begin_module_draft(
            token_N,
            count_R,
            lanes,
            hidden,
            self._fusion,
            hidden_eps=self._target_eps,
            residual=residual,
            pdl=launch.pdl,
        )
        several = launch._replace(tokens_per_row=1 + drafts)
        output = self._run(first.combined, residual, first.lanes, several)
        if drafts:
            self._chain(first.rows, output, launch, fed=first.lanes, source=first.source)

    def _chain(
        self,
        rows: DecodeLanes,
        hidden: Residual | Tensor,
        launch: DecodeLaunch,
        *,
        fed: DecodeLanes | None = None,
        source: Tensor | None = None,
    ) -> None:
        """Draft from a run whose output is `hidden`, and K - 1 times from what was drafted.

        rows    the lanes behind which drafts stand, one a row
        fed     the lanes of that run, where they are more than `rows`
        source  int32 [R]: which of them each row's is
        """
        lanes = fed or rows
        for index in range(self.length):
            tiles = self._head.tiles(hidden, lanes, launch)
            if index + 1 == self.length:
                commit_draft(
                    tiles,
                    rows,
                    self._draft_tokens,
                    index=index,
                    limit=self._limit,
                    source_R=source,
                    pdl=launch.pdl,
                )
                return
            residual = self._new_stream(rows.slot.numel())
            following = advance_module_draft(
                tiles,
                rows,
                hidden,
                self._fusion,
                self._draft_tokens,
                index=index,
                limit=self._limit,
                source_R=source,
                hidden_eps=self.config.dense.norm_eps,
                residual=residual,
                pdl=launch.pdl,
            )
            lanes, source = following.lanes, None
            rows = lanes
            hidden = self._run(following.combined, residual, rows, launch)

    def _run(
        self, combined: Tensor, residual: Residual, lanes: DecodeLanes, launch: DecodeLaunch
    ) -> Residual:
        return mtp_decode(
            self._module,
            self.plans.projection,
            combined,
            residual,
            lanes,
            self._kv,
            self._block_table,
            self._context,
            launch,
        )

    def _new_stream(self, lanes: int) -> Residual:
        """A residual stream whose sums of squares the projection makes anew."""
        return new_residual(
            lanes,
            self.config.dense.hidden_size,
            1,
            dtype=self._module.projection.dtype,
            device=self._module.projection.device,
        )
