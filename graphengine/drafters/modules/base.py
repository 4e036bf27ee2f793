"""Code shared by module drafters: the modules, before and after they are opened.

A module reads hidden states of the target besides tokens, has KV of its own, and drafts the token
after the one that it is fed. The folders `mtp/` and `eagle3/` have the two kinds; `chain.py` here
and `mtp/vanilla.py` say how they are chained.

Letters: R rows, W lanes of a row, N = R * W lanes, T tokens of a chunk, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import (
    Drafter,
    DraftSetting,
    FieldSizes,
    PathLanes,
    Prefilled,
    StepSizes,
)
from graphengine.drafters.chain_plans import ChainPlans
from graphengine.drafters.head import DraftHead, Hidden
from graphengine.drafters.needs import DraftNeeds
from graphengine.kernels.draft.draft import FirstDraft, Fusion, begin_module_draft
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import LinearPlans, Linears
from graphengine.models.states import LayerStates
from graphengine.models.weights import Destinations, StoredLinear, StoredWeights


class ModulesConfig(Protocol):
    """Sizes of modules, known before anything is allocated."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """The states that each module keeps."""
        ...

    @property
    def output_eps(self) -> float:
        """The epsilon of each module's final norm."""
        ...


class ModuleOutput(NamedTuple):
    """The output of a module's run, by lane.

    normed    after the final norm, which lm_head reads
    recycled  the lane's hidden state for the next run of a chain
    """

    normed: Hidden
    recycled: Hidden

    def at(self, lane_P: Tensor) -> ModuleOutput:
        """The outputs of these lanes; only for plain rows."""
        normed, recycled = self
        assert isinstance(normed, Tensor) and isinstance(recycled, Tensor), "plain rows"
        of_normed = normed.index_select(0, lane_P)
        if recycled is normed:
            return ModuleOutput(of_normed, of_normed)
        return ModuleOutput(of_normed, recycled.index_select(0, lane_P))


class TargetHidden(NamedTuple):
    """The target's hidden states of a step, as the first module reads them.

    rows   the hidden state of each of the N lanes
    fresh  whether the launch before may still be writing them
    """

    rows: Hidden
    fresh: bool = False


class DraftModules(ABC):
    """The modules of a checkpoint. The methods are a `Drafter`'s; nothing changes except the
    weights, which `allocate` makes.
    """

    config: ModulesConfig
    whole: ModulesConfig
    """Config of the modules on all ranks together; `config` has this rank's part."""
    weights: StoredWeights
    own_checkpoint: Checkpoint | None = None
    """The checkpoint that `weights` are read from; None: the target's."""
    whole_checkpoint: Checkpoint | None = None
    """See `Drafter.whole_checkpoint`."""
    wants_hidden: bool = True
    """Whether prefill must run all lanes through all of the target's layers."""
    reads_output: bool = True
    """Whether the first module reads the target's hidden state after the final norm."""
    reads_streams: bool = False
    """Whether the first module reads the target's residual stream after some layers."""

    def filled(self, names: Collection[str]) -> None:  # noqa: B027
        """See `Drafter.filled`."""

    @property
    @abstractmethod
    def linears(self) -> Linears:
        """The linears of one module's run, lm_head included."""

    @abstractmethod
    def weight_bytes(self, dtype: torch.dtype) -> int: ...

    def table_bytes(self, max_seq_len: int) -> int:
        return 0

    def bytes_read(self, length: int, step: StepSizes) -> int | None:
        """See `Drafter.bytes_read`; `length` drafts are made."""
        return None

    def fields(self, sizes: FieldSizes, lanes: int) -> list[Field]:
        """The modules' static fields; `lanes` are those of the widest step."""
        return []

    @abstractmethod
    def allocate(self, device: torch.device, dtype: torch.dtype) -> Destinations: ...

    def whole_weights(self, dtype: torch.dtype) -> StoredWeights | None:
        """See `Drafter.whole_weights`."""
        return None

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        """The target's checkpoint, its tensors that `allocate` named cut to this rank's part."""
        return checkpoint

    def stored_linears(self) -> list[StoredLinear]:
        """Its linear weights that are read from the target's checkpoint, once allocated."""
        return []

    @abstractmethod
    def open(self, setting: DraftSetting, cache: Tensor, plans: LinearPlans) -> OpenModules: ...


class OpenModules(ABC):
    """Modules that can be run, in captured steps.

    fusions     how each module's input is made
    launch      with plans of their linears
    target_eps  of the target's final norm
    dtype       of their results
    streams, step_streams  as in a `Drafter`
    """

    streams: Mapping[int, Tensor] = MappingProxyType({})
    step_streams: Mapping[int, Tensor] = MappingProxyType({})

    def __init__(
        self,
        config: ModulesConfig,
        fusions: list[Fusion],
        head: DraftHead,
        launch: DecodeLaunch,
        target_eps: float,
    ) -> None:
        self.config, self.fusions, self.head = config, fusions, head
        self.launch, self.target_eps = launch, target_eps
        self.dtype = fusions[0].embedding.dtype

    def refresh(self) -> None:  # noqa: B027
        """See `Drafter.refresh`. By default nothing is made from the target's checkpoint."""

    def read(self, hidden: Hidden | None, lanes: DecodeLanes) -> TargetHidden:
        """The first module's input from the lanes that the target was fed.

        hidden  after the target's final norm, where the modules read that
        """
        assert hidden is not None, "these modules read the target's output"
        return TargetHidden(hidden)

    @abstractmethod
    def run(
        self,
        index: int,
        combined: Tensor,
        residual: Residual,
        lanes: DecodeLanes,
        launch: DecodeLaunch,
    ) -> ModuleOutput:
        """Run module `index` on decode lanes."""

    @abstractmethod
    def take_in_chunk(self, prefilled: Prefilled, following: Tensor) -> ModuleOutput:
        """Run the first module on a chunk's lanes and the tokens [T] after them; plain rows."""

    def take_in(
        self,
        token_N: Tensor,
        count_R: Tensor,
        lanes: DecodeLanes,
        hidden: Hidden | None,
        drafts: int,
        of_tree: PathLanes | None = None,
    ) -> tuple[FirstDraft, ModuleOutput]:
        """Run the first module on the tokens that a step with this many drafts emitted.

        hidden   as in `read`
        of_tree  as in `Verified`
        the others as in `begin_module_draft`
        """
        fed = lanes if of_tree is None else of_tree.fed
        launch, (rows, fresh) = self.launch, self.read(hidden, fed)
        residual = self.new_stream(lanes.slot.numel())
        first = begin_module_draft(
            token_N,
            count_R,
            lanes,
            rows,
            self.fusions[0],
            source_N=None if of_tree is None else of_tree.source,
            hidden_eps=self.target_eps,
            residual=residual,
            pdl=launch.pdl and not fresh,
        )
        several = replace(launch, tokens_per_row=1 + drafts)
        return first, self.run(0, first.combined, residual, first.lanes, several)

    def new_stream(self, lanes: int) -> Residual:
        """A new residual stream, whose sums of squares the first product computes."""
        embedding = self.fusions[0].embedding
        return new_residual(
            lanes, self.config.hidden_size, 1, dtype=self.dtype, device=embedding.device
        )


class ModuleDrafter(Drafter):
    """The drafter of `modules`; subclasses chain them.

    length  K
    needs   of the subclass, in addition to the modules' needs
    """

    def __init__(self, modules: DraftModules, length: int, needs: DraftNeeds) -> None:
        self.modules = modules
        self.own_checkpoint = modules.own_checkpoint
        self.whole_checkpoint = modules.whole_checkpoint
        self.needs = replace(
            needs,
            length=length,
            states=modules.config.states,
            wants_hidden=modules.wants_hidden,
            reads_streams=modules.reads_streams,
        )

    def whole_weights(self, dtype: torch.dtype) -> StoredWeights | None:
        return self.modules.whole_weights(dtype)

    @property
    def whole_states(self) -> tuple[LayerStates, ...]:
        return self.modules.whole.states

    def allocate(
        self,
        device: torch.device,
        dtype: torch.dtype,
        family: RowFamily,
        chain_family: RowFamily,
    ) -> Destinations:
        wanted = self.modules.allocate(device, dtype)
        self.weights = self.modules.weights
        self.plans = ChainPlans.chosen(
            self.modules.linears, dtype, device, family=family, chain_family=chain_family
        )
        return wanted

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        return self.modules.cut(checkpoint)

    def linears(self) -> list[StoredLinear]:
        return self.modules.stored_linears()

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return self.modules.weight_bytes(dtype)

    def table_bytes(self, max_seq_len: int) -> int:
        return self.modules.table_bytes(max_seq_len)

    @property
    def chunk_linears(self) -> Linears:
        return self.modules.linears

    def bytes_read(self, step: StepSizes) -> int | None:
        return self.modules.bytes_read(self.length, step)

    def fields(self, sizes: FieldSizes) -> list[Field]:
        return self.modules.fields(sizes, sizes.slots * (1 + self.length))

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        self._opened = opened = self.modules.open(setting, cache, self.plans.first)
        self._chain_launch = replace(opened.launch, plans=self.plans.later)
        self.streams, self.step_streams = opened.streams, opened.step_streams
        self._limit = setting.limit
        self._draft_tokens = setting.buffers["draft_tokens"]

    def own_destinations(self) -> Destinations:
        return self.modules.weights.destinations() if self.own_checkpoint is not None else {}

    def filled(self, names: Collection[str]) -> None:
        self.modules.filled(names)

    def refresh(self) -> None:
        self._opened.refresh()
