"""What the drafters of MTP modules have in common: weights, plans, KV, and a module's run."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graphengine.drafters.base import Drafter, DraftSetting
from graphengine.drafters.head import DraftHead, head_bytes
from graphengine.drafters.needs import DraftNeeds
from graphengine.kernels import (
    DecodeLanes,
    Fusion,
    PrefillLanes,
    Residual,
    RowFamily,
    new_residual,
)
from graphengine.models.contract import (
    ChunkAttention,
    DecodeLaunch,
    Destinations,
    StoredLinear,
    arrival_counters,
    most_arrival_counters,
)
from graphengine.models.linears import Linears, linear_name
from graphengine.models.mtp import (
    MtpConfig,
    MtpWeights,
    allocate_mtp_weights,
    mtp_decode,
    mtp_prefill,
    rope_of,
)
from graphengine.models.tuning import choose_plans


class ModuleDrafter(Drafter):
    """The modules of `config`, each with a layer of KV; how they are chained is the subclass's.

    config      of the modules that are run
    length      K
    vocabulary  int64 [D], ascending: the target ids that may be drafted; None: all
    needs       what the subclass adds to them
    """

    weights: MtpWeights

    def __init__(
        self, config: MtpConfig, length: int, vocabulary: Tensor | None, needs: DraftNeeds
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.needs = replace(needs, length=length, states=config.states, wants_hidden=True)

    def allocate(self, device: torch.device, dtype: torch.dtype, family: RowFamily) -> Destinations:
        self.weights = allocate_mtp_weights(self.config, device=str(device), dtype=dtype)
        self.plans, self.plan_sources = choose_plans(self._linears, dtype, family, device)
        return self.weights.named()

    def linears(self) -> list[StoredLinear]:
        return self.weights.linears()

    @property
    def _linears(self) -> Linears:
        return self.config.linears(None if self.vocabulary is None else self.vocabulary.numel())

    def weight_bytes(self, dtype: torch.dtype) -> int:
        own = allocate_mtp_weights(self.config, device="meta", dtype=dtype).nbytes
        rows = 0 if self.vocabulary is None else self.vocabulary.numel()
        # The rows of lm_head that it keeps, and their ids.
        return own + head_bytes(self.config.forms, rows, self.config.hidden_size, dtype)

    def table_bytes(self, max_seq_len: int) -> int:
        return self.config.table_bytes

    def arrivals(self, rows: int, lanes: int) -> int:
        widest = max(lanes, lanes // (1 + self.length) * self.needs.lanes_of_row)
        return arrival_counters(self.config, self._linears, self.plans, widest)

    def arrivals_at_most(self, lanes: int) -> int:
        return most_arrival_counters(self.config, self._linears, lanes)

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        target = setting.model
        self._modules = self.weights.opened()
        self._kv = cache
        self._fusions = [
            Fusion(
                embedding=target.weights.embedding,
                embedding_norm=module.embedding_norm,
                hidden_norm=module.hidden_norm,
                eps=self.config.norm_eps,
                hidden_first=self.config.hidden_first,
            )
            for module in self._modules
        ]
        self._head = DraftHead(
            target.weights.lm_head,
            self.vocabulary,
            setting.sampling,
            plan=self.plans[linear_name("lm_head", target.weights.lm_head)],
            eps=self.config.output_eps,
            group=setting.group,
        )
        self._tables = rope_of(target)
        self._launch = replace(setting.launch, plans=self.plans)
        self._target_eps = target.config.norm_eps
        self._limit = setting.limit
        self._block_table = setting.buffers["block_table"]
        self._draft_tokens = setting.buffers["draft_tokens"]

    def _run(
        self,
        index: int,
        combined: Tensor,
        residual: Residual,
        lanes: DecodeLanes,
        launch: DecodeLaunch,
    ) -> Residual:
        """Module `index` for decode lanes: its output, scaled for its final norm."""
        return mtp_decode(
            self._modules[index],
            combined,
            residual,
            lanes,
            self._kv[index],
            self._block_table,
            self._tables,
            launch,
        )

    def _run_chunk(
        self, index: int, combined: Tensor, chunk: PrefillLanes, attention: ChunkAttention
    ) -> Tensor:
        """Module `index` for a chunk's lanes: its output [T, H]."""
        return mtp_prefill(
            self.config,
            self._modules[index],
            combined,
            chunk,
            self._kv[index],
            self._block_table,
            self._tables,
            attention,
            launch=self._launch.prefill,
        )

    def _new_stream(self, lanes: int) -> Residual:
        """A residual stream whose sums of squares the projection makes anew."""
        norm = self.weights.modules[0].final_norm
        return new_residual(
            lanes,
            self.config.hidden_size,
            1,
            dtype=norm.dtype,
            device=norm.device,
        )
