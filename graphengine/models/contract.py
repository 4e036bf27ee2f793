"""What a model tells the engine about itself, and what the engine lends it.

A family writes a `ModelConfig`, `ModelWeights` and a `Model`, and lists in them

    linears   the weights that a decode step multiplies by: plans, their sources in the tuning
              tables, arrival counters and workspaces go by these names
    states    what each layer keeps of a sequence: caches, swap, recurrent fields and the budget
              follow from them
    weights   the checkpoint's tensors, and along which dimension ranks split each of them

so that no code outside `models/` needs to know which layers a family has.

Letters: N or T lanes, S slots, H hidden, V vocabulary, B blocks of a slot's table, P positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from graphengine.kernels import (
    ActivationKind,
    AnyWeight,
    DecodeLanes,
    ExpertLanes,
    GivenRows,
    Launch,
    LinearPlan,
    PackedExperts,
    Peers,
    PrefillLanes,
    Residual,
    RowFamily,
    TreeLanes,
)
from graphengine.models.linears import (
    LinearPlans,
    Linears,
    WeightForms,
    linear_arrivals,
    linear_name,
)
from graphengine.models.routing import StepRoutes
from graphengine.models.states import LayerStates, StateTensors
from graphengine.models.weights import StoredWeights

# What the engine lends a model for a launch.

Reduce = Callable[[Tensor], Tensor]
"""From this rank's part of a product `[N, H]` to the sum of all ranks' parts, in the order of the
ranks, so that all have the same bits. It may return another tensor or change the one it gets."""


class SplitStream(Protocol):
    """A chunk's residual stream of which each rank has some lanes, while all have what layers read:
    the sequence parallelism of Megatron-LM.
    """

    @property
    def normed_NH(self) -> Tensor:
        """`[N, H]`: what layers read, of all lanes. Between two calls of `add` it is this rank's to
        read and to write: others store into it only once this rank has begun the next one.
        """
        ...

    def add(
        self,
        part_NH: Tensor,
        stream_NH: Tensor,
        next_norm_H: Tensor,
        slot_N: Tensor,
        bias_H: Tensor | None,
        eps: float,
    ) -> None:
        """`stream` plus the sum of all ranks' parts and the bias, in place, of this rank's lanes;
        and what `next_norm` makes of it, of all lanes.

        A part, `[N, H]`, does not lie in `normed_NH`. The sum is rounded to the parts' dtype; all
        ranks have the same bits. Other ranks' lanes of `stream`, float32 `[N, H]`, are neither read
        nor written. Padded lanes stay as they are.
        """
        ...

    def gather_lane(self, stream_NH: Tensor, index_1: Tensor) -> Tensor:
        """New `[1, H]` on all ranks, which all call it: one lane of the stream, whoever has it."""
        ...


OpenSplit = Callable[[int, int, torch.dtype], SplitStream | None]
"""That of a chunk of so many lanes, of so many values each, which layers read in this dtype; None
where all ranks rather have all lanes."""


class AddOwn(Protocol):
    """Where the sum of what all ranks have for this one's lanes is added to the residual stream."""

    def __call__(
        self,
        parts_RNH: Tensor,
        slot_N: Tensor,
        residual: Residual,
        next_norm_H: Tensor,
        *,
        own_NH: Tensor | None = None,
        pdl: bool = False,
    ) -> Residual:
        """As `add_to_residual` of that sum and `own_NH`, but for groups of squares."""
        ...


class Share(NamedTuple):
    """The part of a model that rank `rank` of `ranks` has."""

    rank: int
    ranks: int


WHOLE = Share(0, 1)
"""All of it."""


class LayerSpan(NamedTuple):
    """The layers from `first` on, up to and without `stop`, of a model of `layers`: what a stage of
    a pipeline has.

    embeds  whether it has the embedding all the same where that is not before its layers
    """

    first: int
    stop: int
    layers: int
    embeds: bool = False

    @property
    def begins(self) -> bool:
        """Whether the embedding is before them."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """Whether lm_head is after them."""
        return self.stop == self.layers


class RankGroup(Protocol):
    """The ranks of a model, as one of them meets the others in a step."""

    @property
    def share(self) -> Share: ...

    def reduce(self, part_NH: Tensor, /) -> Tensor:
        """As `Reduce` says."""
        ...

    def split_stream(self, lanes: int, hidden: int, dtype: torch.dtype, /) -> SplitStream | None:
        """As `OpenSplit` says."""
        ...

    @property
    def waited_s(self) -> float | None:
        """For which this rank has waited for the others in all; waits for its device. None: not
        known.
        """
        ...

    @property
    def peers(self) -> Peers | None:
        """With what kernels sum up as `reduce` does; None where they cannot."""
        ...

    def gather(self, part_NC: Tensor, /) -> Tensor:
        """New `[ranks, N, C]`: the parts of all ranks, of one shape and any dtype, in order."""
        ...

    def sum_own(self, parts_RNC: Tensor, /) -> Tensor:
        """New `[N, C]`: the sum, in the order of the ranks, of what each has for this one, where
        `parts_RNC[r]` is for rank r; of one shape and float dtype on all ranks.
        """
        ...

    @property
    def add_own(self) -> AddOwn | None:
        """A kernel for that sum and the residual stream; None where there is none."""
        ...

    def push_candidates(
        self, best_NC: Tensor, health_NC: Tensor, /
    ) -> tuple[Tensor, Tensor] | None:
        """`[N, ranks]`: of each rank one tile in place of its own, by one kernel; None where there
        is none.
        """
        ...

    def push_lanes(self, lanes: ExpertLanes, /) -> ExpertLanes | None:
        """Those of all ranks, in their order, by one kernel; None where none takes so many."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunch(Launch):
    """How the kernels of a chunk are launched.

    reduce       where its ranks meet; None: there is one
    split        what gives each rank some lanes of the stream; None: all have all lanes
    share        of the model, that this rank has
    experts      the ranks that the experts are spread over, each of which has lanes of its own;
                 None: all lanes are on all ranks
    activations  what inputs of linears are rounded to that take it; None: nothing
    routes       what keeps, and may give, the experts of each lane; None: nothing does
    given        embeddings of lanes that have no token; None: every lane has one
    """

    reduce: Reduce | None = None
    split: OpenSplit | None = None
    share: Share = WHOLE
    experts: RankGroup | None = None
    activations: ActivationKind | None = None
    routes: StepRoutes | None = None
    given: GivenRows | None = None


ONE_RANK = PrefillLaunch()
"""Kernels of one rank, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch(Launch):
    """What the decode kernels of one engine share besides the model.

    `split_tokens` is attention's, but in layers with a window. Each `tokens_per_row` lanes are
    tokens of one slot, at consecutive positions, or the nodes of its tree: `tree` says which, and
    `kernels/core/tree.py` what that means. Only grouped-query attention knows trees. `reduce` is
    where the ranks' parts of a product meet before it is added to the residual stream; with None
    there is one rank. With `peers` kernels meet: a product and the sum of its parts are one.
    `share` is this rank's part of the model. With `experts` ranks have lanes of their own, and meet
    in layers with experts alone.
    `activations` and `split` are those of prefill: in decode inputs stay as they are, and all ranks
    have all lanes. `routes` are of one step: those of a chunk have their own.
    """

    plans: LinearPlans
    split_tokens: int
    tokens_per_row: int = 1
    tree: TreeLanes | None = None
    reduce: Reduce | None = None
    split: OpenSplit | None = None
    peers: Peers | None = None
    share: Share = WHOLE
    experts: RankGroup | None = None
    activations: ActivationKind | None = None
    routes: StepRoutes | None = None

    def plan(self, name: str, weight: AnyWeight | PackedExperts) -> LinearPlan:
        """Of the linear of this name, where its weight is stored so."""
        return self.plans[linear_name(name, weight)]

    @property
    def prefill(self) -> PrefillLaunch:
        """The same for the kernels of a chunk."""
        return PrefillLaunch(
            pdl=self.pdl,
            reduce=self.reduce,
            split=self.split,
            share=self.share,
            experts=self.experts,
            activations=self.activations,
        )


class ChunkAttention(Protocol):
    """Attention of a chunk over one layer's cache, which holds the lanes' own keys and values."""

    def __call__(
        self,
        q_NQD: Tensor,
        kv: Tensor,
        *,
        block_table_SB: Tensor,
        scale: float,
        kv_scales: Tensor | None = None,
        window: int = 0,
        sinks: Tensor | None = None,
        out: Tensor,
    ) -> Tensor:
        """`out` `[N, Q*D]`, of `kv = [blocks, 2, block_size, G, D]`; an fp8 one has scales.

        Each lane sees `window` tokens, its own among them; 0: all up to its own. `sinks`: float32
        `[Q]`, one more score of each head.
        """
        ...


class PrefillEnd(NamedTuple):
    """What `Model.prefill` leaves of a chunk of T lanes.

    last    of the chunk's last lane, what `prefill_logits` needs: the model's own affair
    hidden  the stream after the final norm `[T, H]` in the model's dtype, where it was asked for
    stream  float32 `[T, H]`: the stream itself, where `hidden` is there
    """

    last: tuple[Tensor, ...]
    hidden: Tensor | None
    stream: Tensor | None = None


# The model.


class ModelConfig(Protocol):
    """What is known of a model before anything is allocated, as a family reads it.

    Equal configs have equal `repr`, by which sessions tell models apart.
    """

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...

    @property
    def norm_eps(self) -> float:
        """Of the final norm."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the model is for."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Whether lm_head is the embedding."""
        ...

    @property
    def embedding_name(self) -> str:
        """The embedding's in a checkpoint, without ".weight"."""
        ...

    def untied(self) -> Self:
        """The same with a separate lm_head."""
        ...

    @property
    def forms(self) -> WeightForms:
        """How weights are stored that are not in the model's dtype."""
        ...

    def stored_as(self, forms: WeightForms) -> Self:
        """The same model with weights that are stored so."""
        ...

    @property
    def linears(self) -> Linears:
        """Of a decode step: those of the layers, and `lm_head`."""
        ...

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """What each layer keeps."""
        ...

    def arrivals(self, lanes: int) -> int:
        """Counters that its kernels need besides those of its linears, for `lanes` decode lanes."""
        ...

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        """Tokens that a program of decode attention reads; 0 where no layer attends."""
        ...

    def table_bytes(self, max_seq_len: int) -> int:
        """Bytes of the tables for this many positions that the model makes when it is opened."""
        ...

    def attention_bytes(self, rows: int, max_seq_len: int) -> int:
        """Bytes that the programs of its attention leave to each other, in the largest launch."""
        ...

    @property
    def prefill_width(self) -> int:
        """Values that prefill keeps of each lane at most, beside the stream and the normed one."""
        ...

    def scan_bytes(self, lanes: int) -> int:
        """Bytes that kernels of a recurrent layer leave to each other, in a chunk of so many."""
        ...

    def allocate(self, *, device: str, dtype: torch.dtype) -> ModelWeights:
        """Uninitialised weights; `device="meta"` allocates nothing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights(StoredWeights):
    """All weights of a model.

    embedding  `[V, H]`
    lm_head    `[V, H]`; where both are tied it is the embedding
    """

    config: ModelConfig
    embedding: Tensor
    lm_head: AnyWeight

    @property
    def embedding_scale(self) -> float:
        """What a token's embedding is multiplied by, the product being rounded to its dtype."""
        return 1.0

    @property
    def given_scale(self) -> float:
        """The same of embeddings that are given: what transformers does to `inputs_embeds`."""
        return self.embedding_scale

    @abstractmethod
    def open(self, *, max_seq_len: int, vocabulary: int = 0) -> Model:
        """The model of these weights, for sequences of at most this many tokens.

        vocabulary  ids that its logits have, the first of all; 0: every id
        """


class Model(Protocol):
    """A model that is ready to run: weights, tables, and its two programs.

    The programs launch kernels on the current stream, allocate only intermediates, and are captured
    into graphs: no value of a tensor reaches the host.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def weights(self) -> ModelWeights: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def max_seq_len(self) -> int: ...

    @property
    def lm_head(self) -> AnyWeight:
        """`[V, H]`, or the first rows of it."""
        ...

    @property
    def first_norm(self) -> Tensor:
        """Weight `[H]` of the RMSNorm that reads the embedding."""
        ...

    def numerics(self, prefill_sizes: Sequence[int]) -> Mapping[str, str]:
        """What the bits depend on besides plans and dtype, for chunks of these sizes."""
        ...

    def refresh(self) -> None:
        """Compute anew, in place, what was made of the weights when the model was opened.

        Queued on the current stream, once other values are in the weights.
        """
        ...

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        states: StateTensors,
        launch: DecodeLaunch,
        *,
        streams: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Residual:
        """The residual stream of `row`'s tokens after the last layer, scaled for the final norm.

        `residual` comes from the embedding, scaled for `first_norm`; it is updated in place. Each
        live lane's states are updated; padded lanes change nothing.

        `streams[layer]`, [N or more, H], receives the live lanes' stream after the layer, rounded
        to its dtype. No kernel is launched for that.
        """
        ...

    def prefill(
        self,
        lanes: PrefillLanes,
        states: StateTensors,
        attention: ChunkAttention,
        *,
        all_lanes: bool = False,
        streams: Mapping[int, Tensor] = MappingProxyType({}),
        stream: Tensor | None = None,
        launch: PrefillLaunch = ONE_RANK,
    ) -> PrefillEnd:
        """A prompt chunk through the layers, as far as the states and `prefill_logits` need it.

        `stream`, float32 [T, H], is what the layers before these have left, and is changed in
        place; None: they begin with the tokens' embeddings.

        The states are updated as in `decode`. With `all_lanes` every lane goes all the way, for
        the reader of `PrefillEnd.hidden`; the logits' bits do not depend on it.

        `streams[layer]`, [T or more, H], receives the residual stream after the layer, rounded to
        its dtype; that of the last layer with `all_lanes` only.
        """
        ...

    def prefill_logits(
        self,
        end: PrefillEnd,
        slot_1: Tensor,
        *,
        head: AnyWeight,
        launch: PrefillLaunch = ONE_RANK,
    ) -> Tensor:
        """Float32 `[1, V]` of the chunk's last lane, which works for `slot_1`; uses `end` up.

        head  `lm_head`, or some of its rows
        """
        ...


class NeedsArrivals(Protocol):
    """A model's config, or that of a draft module's layers."""

    def arrivals(self, lanes: int) -> int: ...


def arrival_counters(
    config: NeedsArrivals, linears: Linears, plans: LinearPlans, lanes: int
) -> int:
    """Counters that the kernels of a step share: what the neediest of them uses.

    linears  those of the step, a draft module's own among them
    """
    return max(config.arrivals(lanes), linear_arrivals(linears, plans))


# The fewest rows a program of a plan that splits.
_LEAST_SPLIT_ROWS = 16


def most_arrival_counters(config: NeedsArrivals, linears: Linears, lanes: int) -> int:
    """The most that `arrival_counters` can be, whatever the plans."""
    widest = max(linear.rows for linear in linears.values())
    return max(config.arrivals(lanes), 2 * -(-widest // _LEAST_SPLIT_ROWS))
