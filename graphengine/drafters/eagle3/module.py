"""EAGLE3's layer as a module of an eagle drafter.

The target leaves its residual stream after the chosen layers in one static field, side by side, as
the layer's fc reads it: in decode the kernels that write the stream also write the field.

Letters: N lanes, T tokens of a chunk, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.demo import eagle3_path
from graphengine.drafters.base import Drafter, DraftSetting, FieldSizes, Prefilled
from graphengine.drafters.eagle3.layer import (
    Eagle3Config,
    Eagle3Weights,
    allocate_eagle3_weights,
    eagle3_decode,
    eagle3_prefill,
    fuse_chunk,
    fuse_streams,
)
from graphengine.drafters.eagle3.reading import Eagle3Checkpoint, read_eagle3
from graphengine.drafters.head import DraftHead, Hidden
from graphengine.drafters.modules.base import (
    DraftModules,
    ModuleOutput,
    OpenModules,
    TargetHidden,
)
from graphengine.drafters.modules.making import module_drafter
from graphengine.drafters.target import Target
from graphengine.kernels.draft.draft import Fusion, combine_hidden
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.finding import DEMO
from graphengine.models.contract import ModelConfig
from graphengine.models.launches import WHOLE, DecodeLaunch, Share
from graphengine.models.linears import LinearPlans, Linears, in_formats
from graphengine.models.quantised.schemes import HEAD
from graphengine.models.splitting.rank_cuts import checkpoint_of_rank
from graphengine.models.states import all_lanes_reach
from graphengine.models.weights import Destinations
from graphengine.speculative import Eagle3

_STREAMS = "eagle3_streams"


class Eagle3Module(DraftModules):
    """The layer of an EAGLE3 checkpoint.

    read        config, tokens and names that were read from the checkpoint
    checkpoint  where its weights are; None: the caller of `allocate` fills them, with lm_head's
                rows in the order of their tokens
    target      the target's config
    share       this rank's share of the layer, as in the target; `config` has its sizes
    """

    config: Eagle3Config
    whole: Eagle3Config
    weights: Eagle3Weights
    reads_output = False
    reads_streams = True

    def __init__(
        self,
        read: Eagle3Checkpoint,
        checkpoint: Checkpoint | None,
        target: ModelConfig,
        share: Share = WHOLE,
    ) -> None:
        self.whole, self.token_ids, self._order = read
        self.config = self.whole.of_rank(share)
        self.whole_checkpoint = checkpoint
        if checkpoint is not None:
            self.own_checkpoint = checkpoint_of_rank(
                checkpoint, allocate_eagle3_weights, self.whole, self.config, share
            )
        self._head_form = target.forms.format_of(HEAD) if HEAD in target.forms else None
        self.wants_hidden = not all_lanes_reach(target.states, max(self.config.layers))

    @property
    def linears(self) -> Linears:
        linears = self.config.linears()
        shared = self.config.names.lm_head is None
        formats = {name: [None] for name in linears} | {HEAD: [self._head_form if shared else None]}
        return in_formats(linears, formats)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        own = allocate_eagle3_weights(self.config, device="meta", dtype=dtype).nbytes
        return own + (0 if self.token_ids is None else 4 * self.token_ids.numel())

    def table_bytes(self, max_seq_len: int) -> int:
        return self.config.table_bytes(max_seq_len)

    def fields(self, sizes: FieldSizes, lanes: int) -> list[Field]:
        layers = ", ".join(map(str, self.config.layers))
        return [
            Field(
                name=_STREAMS,
                shape=(max(sizes.prefill_tokens, lanes), self.config.streams_width),
                dtype=sizes.dtype,
                owner="device",
                meaning=f"the target's stream after layers {layers}",
                # Padded lanes of a chunk hold anything.
                replicated=False,
            )
        ]

    def allocate(self, device: torch.device, dtype: torch.dtype) -> Destinations:
        self.weights = allocate_eagle3_weights(self.config, device=str(device), dtype=dtype)
        if self.own_checkpoint is None:
            return self.weights.destinations()
        named = self.weights.destinations()
        self.own_checkpoint.load(named)
        self.filled(named.keys())
        return {}

    def filled(self, names: Collection[str]) -> None:
        """Put the rows of lm_head, if it is among these tensors, into the order of their tokens."""
        head, order = self.weights.lm_head, self._order
        if (
            head is not None
            and order is not None
            and f"{self.config.names.lm_head}.weight" in names
        ):
            head.copy_(head.index_select(0, order.to(head.device)))

    def whole_weights(self, dtype: torch.dtype) -> Eagle3Weights | None:
        if self._order is not None:
            return None
        return allocate_eagle3_weights(self.whole, device="meta", dtype=dtype)

    def open(self, setting: DraftSetting, cache: Tensor, plans: LinearPlans) -> OpenEagle3:
        return OpenEagle3(self, setting, cache, plans)


class OpenEagle3(OpenModules):
    """`Eagle3Module`, opened for the target of `setting`."""

    config: Eagle3Config

    def __init__(
        self, module: Eagle3Module, setting: DraftSetting, cache: Tensor, plans: LinearPlans
    ) -> None:
        config, weights, target = module.config, module.weights, setting.model.weights
        fusion = Fusion(
            embedding=target.embedding if weights.embedding is None else weights.embedding,
            embedding_norm=weights.layer.input_norm,
            hidden_norm=weights.hidden_norm,
            eps=config.output_eps,
            start="normed" if config.normed_stream else "hidden",
        )
        weight: AnyWeight = target.lm_head if weights.lm_head is None else weights.lm_head
        device, ids = fusion.embedding.device, module.token_ids
        head = DraftHead(
            weight,
            None if ids is None else ids.to(device, torch.int32),
            setting,
            linear=HEAD,
            eps=config.output_eps,
            cap=setting.model.config.logits_cap if weights.lm_head is None else 0.0,
            group=setting.group,
        )
        split = config.split_tokens(plans.family, fusion.embedding.dtype, setting.limit)
        if setting.most_split is not None:
            split = min(split, setting.most_split)
        launch = replace(setting.launch_with(plans), split_tokens=split)
        super().__init__(config, [fusion], head, launch, setting.model.config.norm_eps)
        self._weights, (self._kv,) = weights, cache
        self._tables = config.tables(setting.limit, device)
        self._block_table = setting.buffers["block_table"]
        self._rows = setting.buffers[_STREAMS]
        parts = torch.split(self._rows, config.target_width, dim=1)
        self.streams = self.step_streams = dict(zip(config.layers, parts, strict=True))

    def read(self, hidden: Hidden | None, lanes: DecodeLanes) -> TargetHidden:
        """Apply fc to the target's stream after the chosen layers."""
        rows = self._rows[: lanes.slot.numel()]
        g = fuse_streams(self._weights, rows, lanes.slot, self.launch)
        return TargetHidden(g, fresh=True)

    def run(
        self,
        index: int,
        combined: Tensor,
        residual: Residual,
        lanes: DecodeLanes,
        launch: DecodeLaunch,
    ) -> ModuleOutput:
        output = eagle3_decode(
            self._weights,
            combined,
            residual,
            lanes,
            self._kv,
            self._block_table,
            self._tables,
            launch,
        )
        return ModuleOutput(output, output if self.config.normed_output else output.x)

    def take_in_chunk(self, prefilled: Prefilled, following: Tensor) -> ModuleOutput:
        chunk, weights = prefilled.chunk, self._weights
        lanes, launch = chunk.slot.numel(), self.launch.prefill
        g = fuse_chunk(weights, self._rows[:lanes], chunk.slot, launch)
        residual = self.new_stream(lanes)
        token, fusion = prefilled.embedded(following, self.fusions[0])
        combined = combine_hidden(token, chunk.slot, g, None, fusion, residual=residual)
        normed = eagle3_prefill(
            weights,
            combined,
            residual.x,
            chunk,
            self._kv,
            self._block_table,
            self._tables,
            prefilled.attention,
            launch=launch,
        )
        return ModuleOutput(normed, normed if self.config.normed_output else residual.x)


def make_eagle3(options: Eagle3, target: Target) -> Drafter:
    """The drafter of an EAGLE3 checkpoint. ValueError where it does not fit the target."""
    checkpoint = Checkpoint.open(eagle3_path() if options.path == DEMO else options.path)
    read = read_eagle3(checkpoint, target.model, options.layers)
    width, wanted = read.config.hidden_size, target.model.hidden_size
    if target.config.prompt_embeds and width != wanted:
        raise ValueError(
            f"prompt_embeds=True, but the embeddings of {checkpoint.path} have {width} values, and "
            f"those of a prompt {wanted}, as the model's: other drafters take them"
        )
    module = Eagle3Module(read, checkpoint, target.model, target.split)
    size = read.config.draft_vocabulary
    return module_drafter(module, options, target.config, target.model, size)
