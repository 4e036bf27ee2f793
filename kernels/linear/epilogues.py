"""Epilogues: all that `linear` can do with its product.

    Store          y itself, rounded once
    StoreLogits    y in float32, with a soft cap
    StoreSwiglu    silu(gate) * up of its halves, rounded once
    AddResidual    residual += y, and the inputs of the next norm
    StoreSquares   y in float32 and its sums of squares, for a norm of its own
    SampleTiles    the best token of each tile of logits, which never reach memory

Letters: N lanes, L live lanes, M weight rows, V weight rows of lm_head, F ffn width, T groups of
columns, C tiles of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
import triton

from graphengine.kernels.comm.items import PeerItems, Peers
from graphengine.kernels.core.lanes import check_lanes, check_vector, check_weight, output_rows
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.operands import (
    CapArgs,
    CappedSamplerArgs,
    LogitsArgs,
    ProductArgs,
    SamplerArgs,
    StreamArgs,
    stream_args,
)
from graphengine.kernels.linear.plans import LinearKind, residual_groups
from graphengine.kernels.linear.pushed_sums import BLOCK_H
from graphengine.kernels.linear.residual import (
    Product,
    Residual,
    add_live_rows,
    check_residual,
    new_product,
    sums_of_squares,
)
from graphengine.kernels.norm_rope.activation import (
    Activation,
    activated_reference,
    gate_code,
    soft_capped_reference,
)
from graphengine.kernels.sample.candidates import SamplingTensors, check_parameters, unfiltered
from graphengine.kernels.sample.sampling import sample_tiles_reference

Result = TypeVar("Result")
Live = slice | torch.Tensor
"""Index of the live lanes' rows."""


class Targets(NamedTuple):
    """Where a kernel leaves a product: one of `out`, `stream` and `sampler` is given, or a cap in
    the latter's place besides `out`.

    gate   0, or the `gate_code` of a SwiGLU
    peers  as in `AddResidual`
    """

    out: torch.Tensor | None = None
    stream: StreamArgs | ProductArgs | None = None
    sampler: LogitsArgs | None = None
    token_ids: torch.Tensor | None = None
    stop_ids: int = 0
    ahead: int = 1
    gate: int = 0
    peers: Peers | None = None

    @property
    def pushed(self) -> PeerItems | None:
        """The memory of `peers`."""
        return None if self.peers is None else self.peers.tensors


class Epilogue(ABC, Generic[Result]):
    """An operation on a linear's product: store, gate, add or sample."""

    __slots__ = ()
    kind: ClassVar[LinearKind]

    @property
    def peers(self) -> Peers | None:
        """The ranks whose parts of the product are added up; None: it is whole."""
        return None

    @abstractmethod
    def outputs(self, call: LinearCall) -> Result:
        """The result, to be filled in. ValueError for arguments that do not fit the call."""

    @abstractmethod
    def targets(self, outputs: Result) -> Targets:
        """The outputs as a kernel's operands."""

    @abstractmethod
    def finish(self, y_LM: torch.Tensor, live: Live, call: LinearCall) -> Result:
        """The result of a product of the live lanes, float32, in plain PyTorch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store(Epilogue[torch.Tensor]):
    """y in [N, M], rounded once.

    dtype  of the output; None: x's
    out    dense rows; must not overlap x. None: new memory
    """

    dtype: torch.dtype | None = None
    out: torch.Tensor | None = None
    kind: ClassVar[LinearKind] = "store"

    def outputs(self, call: LinearCall) -> torch.Tensor:
        return self._rows(call, call.rows)

    def targets(self, outputs: torch.Tensor) -> Targets:
        return Targets(out=outputs)

    def finish(self, y_LM: torch.Tensor, live: Live, call: LinearCall) -> torch.Tensor:
        out = self.outputs(call)
        out[live] = y_LM.to(out.dtype)
        return out

    def _rows(self, call: LinearCall, columns: int) -> torch.Tensor:
        dtype, shape = self.dtype or call.x_NK.dtype, (call.lanes, columns)
        return output_rows(self.out, shape, dtype=dtype, like=call.x_NK)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLogits(Store):
    """Logits in [N, V], float32.

    cap  soft cap: a logit y becomes cap * tanh(y / cap), as Gemma 2 has it; 0: it stays
    """

    dtype: torch.dtype | None = torch.float32
    cap: float = 0.0

    def targets(self, outputs: torch.Tensor) -> Targets:
        return Targets(out=outputs, sampler=CapArgs(self.cap) if self.cap else None)

    def finish(self, y_LM: torch.Tensor, live: Live, call: LinearCall) -> torch.Tensor:
        return Store.finish(self, soft_capped_reference(y_LM, self.cap), live, call)


STORE = Store()
LOGITS = StoreLogits()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSwiglu(Store):
    """activation(gate) * up in [N, F], rounded once; the weight's rows are F gates, then F ups.

    dtype, out as in `Store`.
    """

    activation: Activation = "silu"
    kind: ClassVar[LinearKind] = "swiglu"

    def outputs(self, call: LinearCall) -> torch.Tensor:
        return self._rows(call, call.rows // 2)

    def targets(self, outputs: torch.Tensor) -> Targets:
        return Targets(out=outputs, gate=gate_code(self.activation))

    def finish(self, y_LM: torch.Tensor, live: Live, call: LinearCall) -> torch.Tensor:
        gate, up = y_LM.chunk(2, dim=1)
        gated = activated_reference(gate, self.activation) * up
        return Store.finish(self, gated, live, call)


@dataclass(frozen=True, slots=True)
class AddResidual(Epilogue[Residual]):
    """Add y to the residual stream, and write the inputs of the norm after it.

    The result has the same `x` and `scaled`, with new `squares` [residual_groups(plan, M), N]; with
    `peers` the number of groups may differ.

    residual     `x` is updated and `scaled` written, both in place; `squares` is not read. The new
                 `x` goes to `kept` too, if there is one
    next_norm_M  weight of the RMSNorm that reads the stream next, of any float dtype
    peers        x @ weight^T / rms is this rank's float32 part of a product, and the bias is added
                 once. All ranks call it with the same numbers of lanes and outputs, after the same
                 calls. Parts are summed in the order of the ranks: all get the same bits, those of
                 `push_sum`. None: it is the whole product
    """

    residual: Residual
    next_norm_M: torch.Tensor
    peers: Peers | None = None
    kind: ClassVar[LinearKind] = "residual"

    def outputs(self, call: LinearCall) -> Residual:
        check_residual(self.residual, (call.lanes, call.rows), call.x_NK.dtype)
        check_weight("next_norm", self.next_norm_M, call.rows)
        squares = self.residual.x.new_empty(_groups(call, self.peers), call.lanes)
        return self.residual._replace(squares=squares)

    def targets(self, outputs: Residual) -> Targets:
        return Targets(stream=stream_args(outputs, self.next_norm_M), peers=self.peers)

    def finish(self, y_LM: torch.Tensor, live: Live, call: LinearCall) -> Residual:
        return add_live_rows(y_LM, live, self.outputs(call), self.next_norm_M)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSquares(Epilogue[Product]):
    """Store the very y that `AddResidual` adds, in float32, with the squares it leaves.

    peers as in `AddResidual`.
    """

    peers: Peers | None = None
    kind: ClassVar[LinearKind] = "residual"

    def outputs(self, call: LinearCall) -> Product:
        return new_product(call.x_NK, call.rows, _groups(call, self.peers))

    def targets(self, outputs: Product) -> Targets:
        return Targets(stream=ProductArgs(outputs.y, outputs.squares), peers=self.peers)

    def finish(self, y_LM: torch.Tensor, live: Live, call: LinearCall) -> Product:
        product = self.outputs(call)
        product.y[live] = y_LM
        product.squares[:, live] = sums_of_squares(y_LM, product.squares.shape[0])
        return product


def _groups(call: LinearCall, peers: Peers | None) -> int:
    """T of the squares that a launch leaves; `take_sums` has groups of its own."""
    if takes_sums(call, peers):
        return -(-call.rows // BLOCK_H)
    return residual_groups(call.cut, call.rows)


def takes_sums(call: LinearCall, peers: Peers | None) -> bool:
    """Whether the product only pushes this rank's part, and `take_sums` does the rest.

    An `fma` product has more programs than can be resident.
    """
    return (
        peers is not None and call.cut.family == "fma" and isinstance(call.weight_MK, torch.Tensor)
    )


@dataclass(frozen=True, slots=True)
class SampleTiles(Epilogue[tuple[torch.Tensor, torch.Tensor]]):
    """The fast sampler folded into lm_head: greedy or by temperature, no top-k, top-p or min-p.

    The result is new best int64 [N, C] and health int32 [N, C] of each tile of `plan.block_m`
    logits, as `sample_tiles` leaves them: the same token as from the logits of `StoreLogits` with
    the same plan and cap.

    position_N  int32, of the query
    params      by slot; the filters among them are checked, but not used
    ahead       positions from the query to the sampled token, whose position determines its noise
    token_ids   int32 [V], ascending: the token of each weight row, where there are fewer rows than
                tokens; None: row v is token v
    cap         soft cap of the logits, as in `StoreLogits`
    """

    position_N: torch.Tensor
    params: SamplingTensors
    _: KW_ONLY
    ahead: int = 1
    token_ids: torch.Tensor | None = None
    cap: float = 0.0
    kind: ClassVar[LinearKind] = "sample"

    def outputs(self, call: LinearCall) -> tuple[torch.Tensor, torch.Tensor]:
        self._check(call)
        shape = (call.lanes, triton.cdiv(call.rows, call.cut.block_m))
        best = torch.empty(shape, dtype=torch.int64, device=call.x_NK.device)
        return best, call.slot_N.new_empty(shape)

    def targets(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> Targets:
        given = self.params
        options = (given.temperature, given.seed, given.stop_ids, given.min_len)
        plain = SamplerArgs(self.position_N, *options, *outputs)
        return Targets(
            sampler=CappedSamplerArgs(*plain, self.cap) if self.cap else plain,
            token_ids=self.token_ids,
            stop_ids=check_parameters(given),
            ahead=self.ahead,
        )

    def _check(self, call: LinearCall) -> None:
        check_lanes(call.lanes, position=self.position_N)
        if self.token_ids is not None:
            check_vector("token_ids", self.token_ids, call.rows, torch.int32)
        check_parameters(self.params)

    def finish(
        self, y_LM: torch.Tensor, live: Live, call: LinearCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check(call)
        return sample_tiles_reference(
            StoreLogits(cap=self.cap).finish(y_LM, live, call),
            call.slot_N,
            self.position_N,
            unfiltered(self.params),
            tile=call.cut.block_m,
            ahead=self.ahead,
            token_ids=self.token_ids,
        )
