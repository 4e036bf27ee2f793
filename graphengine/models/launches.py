"""What the engine provides to a model for a launch: settings, attention of a chunk, other ranks.

Letters: N or T lanes, S slots, H hidden, B blocks of a slot's table, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graphengine.kernels.comm.items import Peers
from graphengine.kernels.comm.push_lanes import ExpertLanes
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.linear.call import AnyWeight, LinearCall
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.prefill.lane_codes import ActivationKind
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.embedding import GivenRows
from graphengine.kernels.norm_rope.rope import RopeRows
from graphengine.kernels.step.state import PrefillLanes
from graphengine.models.adapters.table import LaneAdapters
from graphengine.models.linears import (
    LinearPlans,
    linear_name,
)
from graphengine.models.routing import StepRoutes

Reduce = Callable[[Tensor], Tensor]
"""All-reduces this rank's part `[N, H]` of a product. It sums in rank order, so all ranks get the
same bits. It may return another tensor or change the one it gets."""


class SplitStream(Protocol):
    """A chunk's residual stream, split by lanes over the ranks. All ranks have the normed stream,
    which layers read.

    This is the sequence parallelism of Megatron-LM.
    """

    @property
    def normed_NH(self) -> Tensor:
        """`[N, H]`: the normed stream that layers read, for all lanes.

        Between two calls of `add` this rank may read and write it: other ranks store into it only
        once this rank has begun its next `add`.
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
        """Add the sum of all ranks' parts, and the bias, to this rank's lanes of `stream`.

        The stream changes in place; `normed_NH` becomes the stream after `next_norm`, in all lanes.
        A part, `[N, H]`, must not lie in `normed_NH`. The sum is rounded to the parts' dtype; all
        ranks have the same bits. Other ranks' lanes of `stream`, float32 `[N, H]`, are neither read
        nor written. Padded lanes stay as they are.
        """
        ...

    def gather_lane(self, stream_NH: Tensor, index_1: Tensor) -> Tensor:
        """One lane of the stream, new `[1, H]` on all ranks; every rank must call it."""
        ...


OpenSplit = Callable[[int, int, torch.dtype], SplitStream | None]
"""Opens a chunk's `SplitStream` from its lanes, its values per lane, and the dtype that layers
read. None: all ranks keep all lanes instead."""


class AddOwn(Protocol):
    """Adds the sum of all ranks' results for this rank's lanes to the residual stream."""

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
        """Like `add_to_residual` with the sum of `parts_RNH` plus `own_NH`, but with other groups
        of squares.
        """
        ...


class Share(NamedTuple):
    """The part of a model that rank `rank` of `ranks` has."""

    rank: int
    ranks: int


WHOLE = Share(0, 1)
"""The whole model, on one rank."""


class RankGroup(Protocol):
    """The ranks of a model, and how one of them communicates with the others in a step."""

    @property
    def share(self) -> Share: ...

    def reduce(self, part_NH: Tensor, /) -> Tensor:
        """All-reduce this rank's part; see `Reduce`."""
        ...

    def split_stream(self, lanes: int, hidden: int, dtype: torch.dtype, /) -> SplitStream | None:
        """Open a chunk's split stream; see `OpenSplit`."""
        ...

    @property
    def waited_s(self) -> float | None:
        """Seconds that this rank has spent waiting for the others in all; None: not known.

        Reading it waits for the rank's device.
        """
        ...

    @property
    def peers(self) -> Peers | None:
        """Peer memory with which kernels sum as `reduce` does; None where they cannot."""
        ...

    def gather(self, part_NC: Tensor, /) -> Tensor:
        """New `[ranks, N, C]`: all ranks' parts in rank order, of one shape and any dtype."""
        ...

    def sum_own(self, parts_RNC: Tensor, /) -> Tensor:
        """Reduce-scatter: new `[N, C]`, the sum in rank order of all ranks' parts for this rank.

        `parts_RNC[r]` is for rank r; all ranks have the same shape and float dtype.
        """
        ...

    @property
    def add_own(self) -> AddOwn | None:
        """A kernel for `sum_own` and the residual stream; None where there is none."""
        ...

    def push_candidates(
        self, best_NC: Tensor, health_NC: Tensor, /
    ) -> tuple[Tensor, Tensor] | None:
        """`[N, ranks]` each, by one kernel: each rank's tiles become one.

        None where there is no kernel for it.
        """
        ...

    def push_lanes(self, lanes: ExpertLanes, /) -> ExpertLanes | None:
        """All ranks' lanes in rank order, by one kernel; None where no kernel takes this many."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunch(Launch):
    """How the kernels of a chunk are launched.

    reduce       the all-reduce of its ranks; None: there is one rank
    split        opens a stream split over ranks by lanes; None: every rank has all lanes
    share        the part of the model that this rank has
    experts      the ranks that the experts are spread over, each with its own lanes; None: every
                 rank has all lanes
    activations  format to which inputs are rounded for linears that support it; None: none
    routes       keeps the experts of each lane, and may prescribe them; None: nothing does
    given        embeddings of lanes that have no token; None: every lane has a token
    rope_rows    the rows of RoPE's tables that rotate the lanes; None: the lanes' positions
    deepstack    rows of each level that are added to lanes without a token, after the first layers
    adapters     adapters of the chunks, which add to their products; None: there are no adapters
    any_lanes    whether no bit of a lane may depend on the number of lanes, so that chunks of
                 several prompts may be fed together; the BLAS is then not used
    """

    reduce: Reduce | None = None
    split: OpenSplit | None = None
    share: Share = WHOLE
    experts: RankGroup | None = None
    activations: ActivationKind | None = None
    routes: StepRoutes | None = None
    given: GivenRows | None = None
    rope_rows: RopeRows | None = None
    deepstack: tuple[GivenRows, ...] = ()
    adapters: LaneAdapters | None = None
    any_lanes: bool = False

    def chunk_starts(self, lanes: PrefillLanes) -> Tensor | None:
        """int32 [P + 1]: where the chunks begin that may be of several prompts; None: it is one."""
        return lanes.query_start if self.any_lanes else None


ONE_RANK = PrefillLaunch()
"""Kernels of one rank, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch(Launch):
    """Settings that the decode kernels of one engine share, besides the model.

    `split_tokens` is attention's, except in layers with a window. Every `tokens_per_row` lanes are
    tokens of one slot: at consecutive positions, or the nodes of its tree, which `tree` describes
    (see `kernels/core/tree.py`). Only grouped-query attention supports trees. `reduce` sums the
    ranks' parts of a product before it is added to the residual stream; None: there is one rank.
    With `peers` one kernel does a product and the sum of its parts. `share` is this rank's part of
    the model. With `experts` each rank has its own lanes, and ranks communicate only in layers with
    experts. `activations` and `split` are for prefill: decode does not round inputs, and all ranks
    have all lanes. `routes` belong to one decode step: chunks have their own. `rope_shift`, int32
    [S], is added to a slot's positions to find their rows of RoPE's tables; None: positions are
    rows. `adapters` add to the products of the weights that they change; None: there are no
    adapters. `any_lanes` is for prefill, as in decode no bit depends on the number of lanes.
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
    rope_shift: Tensor | None = None
    adapters: LaneAdapters | None = None
    any_lanes: bool = False

    def plan(self, name: str, weight: AnyWeight | PackedExperts) -> LinearPlan:
        """The plan of a linear, by its name and by how its weight is stored."""
        return self.plans[linear_name(name, weight)]

    def call(
        self,
        name: str,
        inputs: Tensor | Residual,
        weight: AnyWeight,
        slot: Tensor,
        *,
        eps: float = 0.0,
        bias: Tensor | None = None,
    ) -> LinearCall:
        """A product with the weight of a linear, by its name.

        inputs  `[N, K]`, or the stream that was scaled for a norm before the linear
        eps     of that norm
        """
        plan = self.plan(name, weight)
        x, squares = (
            (inputs, None) if isinstance(inputs, Tensor) else (inputs.scaled, inputs.squares)
        )
        call = LinearCall(x, weight, slot, squares, eps, bias, plan=plan, launch=self)
        return call if self.adapters is None else self.adapters.added(call)

    @property
    def prefill(self) -> PrefillLaunch:
        """These settings for the kernels of a chunk."""
        return PrefillLaunch(
            pdl=self.pdl,
            reduce=self.reduce,
            split=self.split,
            share=self.share,
            experts=self.experts,
            activations=self.activations,
            adapters=self.adapters,
            any_lanes=self.any_lanes,
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
        softcap: float = 0.0,
        out: Tensor,
    ) -> Tensor:
        """Fill and return `out`, `[N, Q*D]`.

        `kv` is `[blocks, 2, block_size, G, D]`; an fp8 cache has scales. Each lane sees `window`
        tokens including its own; 0: all tokens up to its own. `sinks`: float32 `[Q]`, one extra
        score per head. `softcap`: of scores; 0: none.
        """
        ...
