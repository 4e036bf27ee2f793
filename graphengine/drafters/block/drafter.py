"""Drafts a whole block at once: DFlash and DSpark.

The target leaves its residual stream after the chosen layers in one static field, side by side, as
fc reads it. A step's verified tokens go into the drafter's KV, and then a single run over a block,
the newest token followed by mask tokens, makes all drafts. All of it is in the step's graph.

Letters: N lanes, R rows, B lanes of a block, K drafts, H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.demo import block_path
from graphengine.drafters.base import Drafter, DraftSetting, FieldSizes, Prefilled, Verified
from graphengine.drafters.block.layers import (
    DFlashConfig,
    DFlashWeights,
    allocate_dflash_weights,
    dflash_chunk_context,
    dflash_context,
    keep_context,
    run_block,
)
from graphengine.drafters.block.reading import read_dflash
from graphengine.drafters.head import DraftHead
from graphengine.drafters.needs import DraftNeeds
from graphengine.drafters.target import Target
from graphengine.kernels.draft.block import BlockDraft, begin_block_draft, commit_block_draft
from graphengine.kernels.draft.draft import DraftTiles, commit_draft
from graphengine.kernels.draft.markov import MarkovHead, markov_draft, markov_logits
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.finding import DEMO
from graphengine.models.contract import ModelConfig
from graphengine.models.launches import (
    WHOLE,
    DecodeLaunch,
    PrefillLaunch,
    Share,
)
from graphengine.models.linears import Linears, in_formats
from graphengine.models.plans.choosing import choose_plans
from graphengine.models.quantised.schemes import HEAD
from graphengine.models.splitting.rank_cuts import checkpoint_of_rank
from graphengine.models.states import LayerStates, all_lanes_reach
from graphengine.models.weights import Destinations
from graphengine.speculative import DFlash

_STREAMS = "block_streams"


class BlockDrafter(Drafter):
    """`DFlash(path, k)`.

    read        the config that was read from the checkpoint
    checkpoint  where its weights are; None: the caller of `allocate` fills them
    target      the target's config
    length      K
    share       this rank's share of the layers, as in the target; `config` has its sizes
    """

    weights: DFlashWeights

    def __init__(
        self,
        read: DFlashConfig,
        checkpoint: Checkpoint | None,
        target: ModelConfig,
        length: int,
        share: Share = WHOLE,
    ) -> None:
        self.config = config = read.of_rank(share)
        self._whole = read
        self.whole_checkpoint = checkpoint
        if checkpoint is not None:
            self.own_checkpoint = checkpoint_of_rank(
                checkpoint, allocate_dflash_weights, read, config, share
            )
        self._head_form = target.forms.format_of(HEAD) if HEAD in target.forms else None
        self._width = config.block_of(length)
        # A block begins one position after the last verified one.
        self.needs = DraftNeeds(
            length=length,
            states=config.states,
            reserve=self._width,
            prompt_lanes=self._width,
            wants_hidden=not all_lanes_reach(target.states, max(config.layers)),
            reads_streams=True,
        )

    def whole_weights(self, dtype: torch.dtype) -> DFlashWeights:
        return allocate_dflash_weights(self._whole, device="meta", dtype=dtype)

    @property
    def whole_states(self) -> tuple[LayerStates, ...]:
        return self._whole.states

    @property
    def chunk_linears(self) -> Linears:
        linears = self.config.linears()
        shared = not self.config.own_head
        formats = {name: [None] for name in linears} | {HEAD: [self._head_form if shared else None]}
        return in_formats(linears, formats)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return allocate_dflash_weights(self.config, device="meta", dtype=dtype).nbytes

    def table_bytes(self, max_seq_len: int) -> int:
        return self.config.table_bytes(max_seq_len)

    def fields(self, sizes: FieldSizes) -> list[Field]:
        lanes = max(sizes.prefill_tokens, sizes.slots * (1 + self.length))
        layers = ", ".join(map(str, self.config.layers))
        return [
            Field(
                name=_STREAMS,
                shape=(lanes, self.config.streams_width),
                dtype=sizes.dtype,
                owner="device",
                meaning=f"the target's stream after layers {layers}",
                # Padded lanes of a chunk hold anything.
                replicated=False,
            )
        ]

    def allocate(
        self,
        device: torch.device,
        dtype: torch.dtype,
        family: RowFamily,
        chain_family: RowFamily,
    ) -> Destinations:
        self.weights = allocate_dflash_weights(self.config, device=str(device), dtype=dtype)
        self.plans, _ = choose_plans(self.chunk_linears, dtype, family, device)
        if self.own_checkpoint is None:
            return self.weights.destinations()
        self.own_checkpoint.load(self.weights.destinations())
        return {}

    def own_destinations(self) -> Destinations:
        return self.weights.destinations() if self.own_checkpoint is not None else {}

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        config, weights, target = self.config, self.weights, setting.model.weights
        own = weights.embedding
        self._embedding = target.embedding if own is None else own
        device = self._embedding.device
        head: AnyWeight = target.lm_head if weights.lm_head is None else weights.lm_head
        plans = self.plans
        self._head = DraftHead(
            head,
            None,
            setting,
            linear=HEAD,
            eps=config.output_eps,
            cap=config.decoder.logits_cap,
            group=setting.group,
        )
        self._sampling, self._limit = setting.sampling, setting.limit
        self._launch = setting.launch_with(plans)
        self._cache = list(cache)
        self._tables = config.tables(setting.limit, device)
        self._block_table = setting.buffers["block_table"]
        self._draft_tokens = setting.buffers["draft_tokens"]
        self._rows = setting.buffers[_STREAMS]
        parts = torch.split(self._rows, config.target_width, dim=1)
        self.streams = self.step_streams = dict(zip(config.layers, parts, strict=True))

    def prepare(self, prefilled: Prefilled) -> None:
        chunk, launch = prefilled.chunk, self._launch.prefill
        streams = self._rows[: chunk.slot.numel()]
        context = dflash_chunk_context(self.weights, streams, chunk.slot, launch)
        self._keep(context, chunk.slot, chunk.position, launch)
        # As after a step that fed the prompt's last token. No PDL: torch kernels run in between.
        last, alone = prefilled.last_lane(chunk.token), replace(self._launch, pdl=False)
        count = (prefilled.final != 0).to(torch.int32)
        begun, residual = self._begin(prefilled.token, count, last, alone)
        self._draft(begun, residual, alone, filtered=True)

    def propose(self, verified: Verified) -> None:
        step, lanes, launch = verified.step, verified.lanes, self._launch
        begun = None
        if verified.drafts:
            begun, residual = self._begin(step.token_N, step.count_R, lanes, launch)
        streams = self._rows[: lanes.slot.numel()]
        context = dflash_context(self.weights, streams, lanes.slot, launch)
        slot = lanes.slot if begun is None else begun.context_slot
        self._keep(context, slot, lanes.position, launch)
        if begun is not None:
            self._draft(begun, residual, launch, filtered=verified.filtered)

    def _keep(
        self, context: Tensor, slot: Tensor, position: Tensor, launch: DecodeLaunch | PrefillLaunch
    ) -> None:
        cache, table = self._cache, self._block_table
        keep_context(self.weights, context, slot, position, cache, table, self._tables, launch)

    def _begin(
        self, token_N: Tensor, count_R: Tensor, lanes: DecodeLanes, launch: DecodeLaunch
    ) -> tuple[BlockDraft, Residual]:
        """Begin each row's block after the row's emitted tokens, with `begin_block_draft`."""
        table, rows = self._embedding, count_R.numel()
        residual = new_residual(
            rows * self._width, table.shape[1], 1, dtype=table.dtype, device=table.device
        )
        begun = begin_block_draft(
            token_N,
            count_R,
            lanes,
            table,
            self.weights.layers[0].input_norm,
            residual,
            width=self._width,
            mask_token=self.config.mask_token,
            limit=self._limit,
            pdl=launch.pdl,
        )
        return begun, residual

    def _draft(
        self, begun: BlockDraft, residual: Residual, launch: DecodeLaunch, *, filtered: bool
    ) -> None:
        """Run the blocks, and write their drafts."""
        weights, lanes = self.weights, begun.lanes
        output = run_block(
            weights, begun, residual, self._cache, self._block_table, self._tables, launch
        )
        if weights.markov is None:
            ahead = int(self.config.from_newest)
            tiles = self._head.tiles(output, lanes, launch, ahead=ahead, filtered=filtered)
            rows = begun.rows.slot.numel()
            commit_block_draft(tiles, lanes, self._draft_tokens, rows=rows, pdl=launch.pdl)
            return
        logits = self._head.logits(output, lanes, launch)
        newest = begun.rows
        for index in range(self.length):
            tiles = self._following(logits, weights.markov, newest, launch, index, filtered)
            newest = commit_draft(
                tiles, newest, self._draft_tokens, index=index, limit=self._limit, pdl=launch.pdl
            )

    def _following(
        self,
        logits: Tensor,
        markov: MarkovHead,
        newest: DecodeLanes,
        launch: DecodeLaunch,
        index: int,
        filtered: bool,
    ) -> DraftTiles:
        """Each row's draft after `newest`, by its block's lane `index` and the sequential head."""
        pdl = launch.pdl
        if not filtered:
            return markov_draft(logits, markov, newest, self._sampling, index=index, pdl=pdl)
        following = markov_logits(logits, markov, newest, index=index, pdl=pdl)
        return self._head.drawn(following, newest, launch, ahead=1)


def make_dflash(options: DFlash, target: Target) -> Drafter:
    """The drafter of a DFlash or DSpark checkpoint. ValueError where it does not fit the target."""
    checkpoint = Checkpoint.open(block_path() if options.path == DEMO else options.path)
    read = read_dflash(checkpoint, target.model, options.layers)
    if options.k > read.most_drafts:
        raise ValueError(
            f"k={options.k} drafts a step, and {checkpoint.path} is trained for blocks of "
            f"{read.trained_block} tokens, which draft {read.most_drafts}"
        )
    return BlockDrafter(read, checkpoint, target.model, options.k, target.share)
