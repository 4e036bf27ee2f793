"""A smaller model drafts, with its own layers and KV, in the target's graphs.

As in Leviathan, Kalman, Matias (arXiv:2211.17192); `head.py` says how drafts are drawn. The model
is fed the last two tokens after each verified step, since the last draft of the previous step was
never fed to it, and then its own drafts. With recurrent layers, prefill leaves out a prompt's last
token, which that run then feeds: a state cannot take in a token twice. Each rank has the whole
model: it is small, and all-reduces would take about as long as the reads that splitting it saves.

Letters: R rows, W lanes of a row, N = R * W lanes, T tokens of a chunk, K drafts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import Drafter, DraftSetting, FieldSizes, Prefilled, Verified
from graphengine.drafters.chain_plans import ChainPlans
from graphengine.drafters.confidence import EveryDraft, drafts_from
from graphengine.drafters.head import DraftHead
from graphengine.drafters.needs import DraftNeeds
from graphengine.drafters.target import Target
from graphengine.kernels.draft.draft import DraftTiles, commit_draft
from graphengine.kernels.draft.model_draft import advance_model_draft, begin_model_draft
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, load_weights, read_model
from graphengine.models.contract import ModelConfig, ModelWeights
from graphengine.models.launches import WHOLE, DecodeLaunch
from graphengine.models.linears import Linears, stream_groups
from graphengine.models.states import (
    StateTensors,
    recurrent_fields,
    recurrent_tensors,
    side_by_side,
)
from graphengine.models.weights import Destinations
from graphengine.speculative import DraftModel
from graphengine.text.tokenizer import Tokenizer

_WHOSE = "draft_"
"""Prefix of the names of its static fields."""


class _LastInput(NamedTuple):
    """The lanes that the model was fed last, and its stream after them."""

    lanes: DecodeLanes
    rows: DecodeLanes
    """R lanes: the last token of each row."""
    source: Tensor | None
    """int32 [R]: indices of `rows` in `lanes`; None: the two are the same lanes."""
    hidden: Residual


class DraftModelDrafter(Drafter):
    """`DraftModel(path, k)`.

    config      of the draft model
    length      K
    checkpoint  where its weights are read from
    """

    weights: ModelWeights
    own_checkpoint: Checkpoint

    def __init__(
        self,
        config: ModelConfig,
        length: int,
        checkpoint: Checkpoint,
        choice: EveryDraft | None = None,
    ) -> None:
        self.config = config
        self._choice = choice or EveryDraft()
        self.needs = DraftNeeds(
            length=length,
            states=config.states,
            # The chain's last run is K positions after the last verified one.
            reserve=length,
            # After a prompt its last token is fed again, by the decode kernels.
            tokens_after=1,
            prompt_lanes=self.lanes_of(1),
            withholds=self._choice.withholds,
        )
        self.own_checkpoint = checkpoint

    def allocate(
        self,
        device: torch.device,
        dtype: torch.dtype,
        family: RowFamily,
        chain_family: RowFamily,
    ) -> Destinations:
        self.weights = self.config.allocate(device=str(device), dtype=dtype)
        self.plans = ChainPlans.chosen(
            self.config.linears, dtype, device, family=family, chain_family=chain_family
        )
        own = self.own_checkpoint
        name = self.weights.config.embedding_name
        if device.type != "meta":
            load_weights(own, destinations(own, self.weights), self.weights.linears(), name)
        return {}

    def own_destinations(self) -> Destinations:
        return destinations(self.own_checkpoint, self.weights)

    def filled(self, names: Collection[str]) -> None:
        self._model.refresh()

    @staticmethod
    def lanes_of(rows: int) -> int:
        """Lanes of its widest launch, which feeds the last two tokens of each row."""
        return 2 * rows

    @property
    def chunk_linears(self) -> Linears:
        return self.config.linears

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return self.config.allocate(device="meta", dtype=dtype).nbytes

    def table_bytes(self, max_seq_len: int) -> int:
        return self.config.table_bytes(max_seq_len)

    def fields(self, sizes: FieldSizes) -> list[Field]:
        width = 1 + self.length
        states = recurrent_fields(self.config.states, sizes.slots, width, sizes.dtype, _WHOSE)
        return states + self._choice.fields(sizes)

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        self._model = self.weights.open(max_seq_len=setting.limit)
        buffers = setting.buffers
        self._states = StateTensors(
            cache,
            buffers["block_table"],
            recurrent_tensors(self.config.states, buffers, _WHOSE),
            apart=side_by_side(self.config.states),
        )
        head = DraftHead(
            self.weights.lm_head,
            None,
            setting,
            linear="lm_head",
            eps=self.config.norm_eps,
            cap=self.config.logits_cap,
            bias=self._model.head_bias,
        )
        self._drafts = self._choice.opened(head, buffers)
        self._launch = replace(
            setting.launch,
            plans=self.plans.first,
            split_tokens=self.config.split_tokens(
                self.plans.first.family, self._model.dtype, self._model.max_seq_len
            ),
            reduce=None,
            split=None,
            peers=None,
            share=WHOLE,
        )
        self._limit = setting.limit
        self._draft_tokens = setting.buffers["draft_tokens"]

    def prepare(self, prefilled: Prefilled) -> None:
        chunk = prefilled.chunk
        fed = _without_last(prefilled) if self._states.recurrent else chunk
        self._model.prefill(fed, self._states, prefilled.attention, launch=self._launch.prefill)
        # As after a step that fed the prompt's last token. No PDL: torch kernels run in between.
        emitted = (prefilled.final != 0).to(torch.int32)
        launch = replace(self._launch, pdl=False)
        last = prefilled.last_lane(chunk.token)
        self._drafts.begin(last)
        self._draft(prefilled.token, emitted, last, self.length, launch, filtered=True)

    def propose(self, verified: Verified) -> None:
        step = verified.step
        if verified.drafts:
            self._drafts.follow(step.count_R, verified.lanes, self._launch)
        self._draft(
            step.token_N,
            step.count_R,
            verified.lanes,
            verified.drafts,
            self._launch,
            filtered=verified.filtered,
        )

    def _draft(
        self,
        token_N: Tensor,
        count_R: Tensor,
        lanes: DecodeLanes,
        length: int,
        launch: DecodeLaunch,
        *,
        filtered: bool,
    ) -> None:
        """Feed each row's last two tokens, then draft `length` times."""
        fed = self._feed(token_N, count_R, lanes, launch)
        chain = self._drafts.new_chain(count_R.numel())
        for index in range(length):
            tiles = self._drafts.tiles(
                fed.hidden,
                fed.lanes,
                launch,
                ahead=1,
                rows=fed.rows,
                source=fed.source,
                index=index,
                chain=chain,
                filtered=filtered,
            )
            if index + 1 < length:
                launch = replace(launch, plans=self.plans.later)
                fed = self._feed_draft(tiles, fed, index, launch)
                continue
            commit_draft(
                tiles,
                fed.rows,
                self._draft_tokens,
                index=index,
                limit=self._limit,
                source_R=fed.source,
                pdl=launch.pdl,
            )

    def _feed(
        self, token_N: Tensor, count_R: Tensor, lanes: DecodeLanes, launch: DecodeLaunch
    ) -> _LastInput:
        """Run the model on each row's last two tokens."""
        model = self._model
        residual = self._new_stream(self.lanes_of(count_R.numel()), launch)
        first = begin_model_draft(
            token_N,
            count_R,
            lanes,
            model.weights.embedding,
            model.first_norm,
            residual,
            limit=self._limit,
            embedding_scale=model.weights.embedding_scale,
            pdl=launch.pdl,
        )
        two = replace(launch, tokens_per_row=2)
        hidden = model.decode(first.lanes, residual, self._states, two)
        return _LastInput(first.lanes, first.rows, first.source, hidden)

    def _feed_draft(
        self, tiles: DraftTiles, fed: _LastInput, index: int, launch: DecodeLaunch
    ) -> _LastInput:
        """Take draft `index` out of its tiles, and run the model on it."""
        model = self._model
        residual = self._new_stream(fed.rows.slot.numel(), launch)
        rows = advance_model_draft(
            tiles,
            fed.rows,
            self._draft_tokens,
            model.weights.embedding,
            model.first_norm,
            residual,
            index=index,
            limit=self._limit,
            source_R=fed.source,
            embedding_scale=model.weights.embedding_scale,
            pdl=launch.pdl,
        )
        return _LastInput(rows, rows, None, model.decode(rows, residual, self._states, launch))

    def _new_stream(self, lanes: int, launch: DecodeLaunch) -> Residual:
        config = self.config
        return new_residual(
            lanes,
            config.hidden_size,
            stream_groups(config.linears, launch.plans),
            dtype=self._model.dtype,
            device=self._states.cache.device,
        )


def _without_last(prefilled: Prefilled) -> PrefillLanes:
    """The chunk; if it is the prompt's last one, its last lane is padded."""
    chunk, final = prefilled.chunk, prefilled.final != 0
    lane = torch.arange(len(chunk.slot), dtype=chunk.last.dtype, device=chunk.last.device)
    slot = torch.where(final & (lane == chunk.last), -1, chunk.slot)
    last = torch.where(final, chunk.last - 1, chunk.last).clamp(min=0)
    return chunk._replace(slot=slot, last=last)


def make_draft_model(options: DraftModel, target: Target) -> Drafter:
    """The drafter of a smaller model. ValueError where it does not fit the target."""
    config, target_checkpoint, model, _ = target
    checkpoint = Checkpoint.open(options.path)
    if config.prompt_embeds:
        raise ValueError(
            f"prompt_embeds=True, but the draft model {checkpoint.path} has its own embeddings, "
            f"and cannot read a prompt's: other drafters can"
        )
    draft = read_model(checkpoint)
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"the draft model {checkpoint.path} has {draft.vocab_size} tokens, the target "
            f"{model.vocab_size}: they must share a tokenizer"
        )
    if _token_ids(checkpoint) != _token_ids(target_checkpoint):
        raise ValueError(
            f"the draft model {checkpoint.path} has another tokenizer than "
            f"{target_checkpoint.path}: a token id must mean the same to both"
        )
    wanted = config.sequence_limit(model.max_positions)
    if draft.max_positions < wanted:
        raise ValueError(
            f"the draft model {checkpoint.path} has max_position_embeddings="
            f"{draft.max_positions}, and max_seq_len is {wanted}"
        )
    lanes = DraftModelDrafter.lanes_of(config.max_batch)
    if lanes > MAX_LANES:
        raise ValueError(
            f"a draft model reads two tokens of each row, {lanes} of max_batch={config.max_batch}, "
            f"and at most {MAX_LANES} fit, whatever the gate: max_batch={MAX_LANES // 2} does"
        )
    return DraftModelDrafter(draft, options.k, checkpoint, drafts_from(options.min_confidence))


def _token_ids(checkpoint: Checkpoint) -> dict[str, int] | None:
    """The ids of a tokenizer's tokens; None where there is none."""
    if not checkpoint.has_tokenizer:
        return None
    return Tokenizer.from_directory(checkpoint.path).vocabulary
