"""MTP modules, which come with the target's own checkpoint.

Letters: T tokens of a chunk, H hidden, D draft vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphengine.drafters.base import DraftSetting, Prefilled, StepSizes
from graphengine.drafters.head import DraftHead, head_bytes, trim_again, trimmed
from graphengine.drafters.modules.base import DraftModules, ModuleOutput, OpenModules
from graphengine.drafters.mtp.layer import (
    MtpConfig,
    MtpWeights,
    allocate_mtp_weights,
    mtp_decode,
    mtp_prefill,
)
from graphengine.kernels.draft.draft import Fusion, combine_hidden
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.launches import (
    WHOLE,
    ChunkAttention,
    DecodeLaunch,
    Share,
)
from graphengine.models.linears import LinearPlans, Linears
from graphengine.models.splitting.rank_cuts import cut_linears, cut_to
from graphengine.models.states import paged_states
from graphengine.models.weights import Destinations, StoredLinear


class MtpModules(DraftModules):
    """The modules of `config`, each with a layer of KV.

    whole       config of the modules that are run; `config` has the sizes of this rank's part
    vocabulary  int64 [D], ascending: the target ids that may be drafted; None: all
    share       this rank's share of them; with `expert_parallel` it has whole experts, and with
                `data_parallel` only experts are shared
    """

    config: MtpConfig
    whole: MtpConfig
    weights: MtpWeights

    def __init__(
        self,
        whole: MtpConfig,
        vocabulary: Tensor | None = None,
        share: Share = WHOLE,
        *,
        expert_parallel: bool = False,
        data_parallel: bool = False,
    ) -> None:
        self.whole, self.vocabulary, self.share = whole, vocabulary, share
        self.config = whole.of_rank(
            share, expert_parallel=expert_parallel, data_parallel=data_parallel
        )

    @property
    def linears(self) -> Linears:
        return self.config.linears(None if self.vocabulary is None else self.vocabulary.numel())

    def weight_bytes(self, dtype: torch.dtype) -> int:
        own = allocate_mtp_weights(self.config, device="meta", dtype=dtype).nbytes
        rows = 0 if self.vocabulary is None else self.vocabulary.numel()
        # Kept rows of lm_head, and their ids.
        return own + head_bytes(self.config.forms, rows, self.config.hidden_size, dtype)

    def table_bytes(self, max_seq_len: int) -> int:
        return self.config.table_bytes

    def bytes_read(self, length: int, step: StepSizes) -> int:
        """Each run reads a module's weights, the rows' KV and the kept rows of lm_head."""
        held, states = self.weights, paged_states(self.config.states)
        routed, rows = held.routed, len(step.lm_head)
        expert = 0 if routed is None else routed.nbytes // (routed.layers * routed.experts)
        weights = held.nbytes - (0 if routed is None else routed.nbytes)
        entries = sum(math.prod(state.block_shape(1)) for state in states)
        kv = step.rows * step.context * entries * step.kv_dtype.itemsize
        kept = rows if self.vocabulary is None else self.vocabulary.numel()
        head = step.lm_head.nbytes * kept // rows
        # With a module for each draft, each is run once.
        runs = length / self.config.modules
        return round(runs * (weights + kv) + step.experts * expert) + length * head

    def allocate(self, device: torch.device, dtype: torch.dtype) -> Destinations:
        self.weights = allocate_mtp_weights(self.config, device=str(device), dtype=dtype)
        return self.weights.destinations()

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        whole = self.whole_weights(torch.float32)
        return cut_to(checkpoint, whole, self.weights, self.share)

    def stored_linears(self) -> list[StoredLinear]:
        if self.share == WHOLE:
            return self.weights.linears()
        return cut_linears(self.whole_weights(torch.float32), self.weights, self.share)

    def whole_weights(self, dtype: torch.dtype) -> MtpWeights:
        return allocate_mtp_weights(self.whole, device="meta", dtype=dtype)

    def open(self, setting: DraftSetting, cache: Tensor, plans: LinearPlans) -> OpenMtp:
        return OpenMtp(self, setting, cache, plans)


class OpenMtp(OpenModules):
    """`MtpModules`, opened for the target of `setting`."""

    config: MtpConfig

    def __init__(
        self, modules: MtpModules, setting: DraftSetting, cache: Tensor, plans: LinearPlans
    ) -> None:
        target, config = setting.model.weights, modules.config
        self._weights, self._modules = modules.weights, modules.weights.opened()
        fusions = [
            Fusion(
                embedding=target.embedding,
                embedding_norm=module.embedding_norm,
                hidden_norm=module.hidden_norm,
                eps=config.norm_eps,
                hidden_first=config.hidden_first,
            )
            for module in self._modules
        ]
        self._target, self._ids = target, modules.vocabulary
        self._head, token_ids = trimmed(target.lm_head, self._ids, target.embedding.device)
        head = DraftHead(
            self._head,
            token_ids,
            setting,
            linear="lm_head",
            eps=config.output_eps,
            cap=setting.model.config.logits_cap,
            group=setting.group,
        )
        launch = setting.launch_with(plans)
        super().__init__(config, fusions, head, launch, setting.model.config.norm_eps)
        self._kv = cache
        self._tables = setting.model.tables
        self._block_table = setting.buffers["block_table"]

    def refresh(self) -> None:
        """Recompute its own norms, and its copies of the target's rows."""
        self._weights.refresh(self._modules)
        trim_again(self._head, self._target.lm_head, self._ids)

    def run(
        self,
        index: int,
        combined: Tensor,
        residual: Residual,
        lanes: DecodeLanes,
        launch: DecodeLaunch,
    ) -> ModuleOutput:
        output = mtp_decode(
            self._modules[index],
            combined,
            residual,
            lanes,
            self._kv[index],
            self._block_table,
            self._tables,
            launch,
        )
        return ModuleOutput(output, output)

    def take_in_chunk(self, prefilled: Prefilled, following: Tensor) -> ModuleOutput:
        chunk = prefilled.chunk
        assert prefilled.hidden is not None, "a module reads hidden states"
        token, fusion = prefilled.embedded(following, self.fusions[0])
        combined = combine_hidden(token, chunk.slot, prefilled.hidden, None, fusion)
        output = self.run_chunk(0, combined, chunk, prefilled.attention)
        return ModuleOutput(output, output)

    def run_chunk(
        self, index: int, combined: Tensor, chunk: PrefillLanes, attention: ChunkAttention
    ) -> Tensor:
        """Run module `index` on a chunk's lanes; returns its output [T, H]."""
        return mtp_prefill(
            self.config,
            self._modules[index],
            combined,
            chunk,
            self._kv[index],
            self._block_table,
            self._tables,
            attention,
            launch=self.launch.prefill,
        )
