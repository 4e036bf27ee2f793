"""A feed-forward without gates: down(act(up x)), with a squared ReLU or a gelu.

Letters: N lanes, H hidden, F ffn width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import STORE
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.activation import gelu, squared_relu
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks.norms import NextNorm
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    new_weights,
    part_product,
    tensors_of,
)
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.states import LayerStates
from graphengine.models.weights import StoredLinear, Weight

UngatedActivation = Literal["squared_relu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """Sizes and switches of the block; `norm_eps` is the epsilon of the norm of its input.

    activation  between up and down; `gelu_tanh` has the tanh approximation
    role        prefix of its linears' names
    names       of up and down in a checkpoint
    transposed  whether a checkpoint stores linears transposed, as GPT-2's Conv1D does
    """

    hidden_size: int
    ffn_size: int
    norm_eps: float
    bias: bool = False
    activation: UngatedActivation = "squared_relu"
    role: str = ""
    names: tuple[str, str] = ("up_proj", "down_proj")
    transposed: bool = False

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step."""
        return {
            f"{self.role}up": Linear("store", self.ffn_size, self.hidden_size, shard="rows"),
            f"{self.role}down": Linear(
                "residual", self.hidden_size, self.ffn_size, shard="columns"
            ),
        }

    @property
    def first_linears(self) -> Mapping[str, str]:
        """First checkpoint linear fused into each weight."""
        return dict(zip((f"{self.role}up", f"{self.role}down"), self.names, strict=True))

    @property
    def states(self) -> LayerStates:
        """It keeps no state."""
        return ()

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`."""
        return self.ffn_size

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> MlpWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """

        def bias(rows: int) -> Tensor | None:
            return torch.empty(rows, device=device, dtype=dtype) if self.bias else None

        weight = new_weights(forms, prefix, self.first_linears, device=device, dtype=dtype)
        hidden, ffn = self.hidden_size, self.ffn_size
        return MlpWeights(
            block=self,
            prefix=prefix,
            up=weight(f"{self.role}up", ffn, hidden),
            up_bias=bias(ffn),
            down=weight(f"{self.role}down", hidden, ffn),
            down_bias=bias(hidden),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpWeights:
    """The block's weights; `prefix` is of the names in the checkpoint."""

    block: Mlp
    prefix: str
    up: AnyWeight
    up_bias: Tensor | None
    down: AnyWeight
    down_bias: Tensor | None

    def linears(self) -> list[StoredLinear]:
        """The block's products."""
        block = self.block
        up, down = (self.prefix + name for name in block.names)
        of_up, of_down = ((up, block.ffn_size),), ((down, block.hidden_size),)
        return [
            StoredLinear(self.up, of_up, axis=0, transposed=block.transposed),
            StoredLinear(self.down, of_down, axis=1, transposed=block.transposed),
        ]

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        names = {name: view for each in self.linears() for name, view in each.views().items()}
        if self.up_bias is not None:
            names[f"{self.prefix}{self.block.names[0]}.bias"] = Weight(self.up_bias, 0)
        if self.down_bias is not None:
            names[f"{self.prefix}{self.block.names[1]}.bias"] = Weight(self.down_bias)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return tensors_of(self.up, self.down, self.up_bias, self.down_bias)

    def decode(
        self, row: DecodeLanes, residual: Residual, next_norm: NextNorm, launch: DecodeLaunch
    ) -> Residual:
        """Run the block on `row`'s tokens: three kernels.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place except for its squares.
        """
        return self.add(self.inner(row, residual, launch), row, residual, next_norm, launch)

    def inner(self, row: DecodeLanes, residual: Residual, launch: DecodeLaunch) -> Tensor:
        """Run the first half, whose result `add` multiplies by down. `residual` is scaled for the
        block's norm.
        """
        name, eps = f"{self.block.role}up", self.block.norm_eps
        call = launch.call(name, residual, self.up, row.slot, eps=eps, bias=self.up_bias)
        return self._activate(linear(call, STORE), row.slot, pdl=launch.pdl)

    def _activate(self, up: Tensor, slot: Tensor, *, pdl: bool) -> Tensor:
        """Apply the activation in place."""
        if self.block.activation == "squared_relu":
            return squared_relu(up, slot, out=up, pdl=pdl)
        return gelu(up, slot, tanh=self.block.activation == "gelu_tanh", out=up, pdl=pdl)

    def add(
        self,
        inner: Tensor,
        row: DecodeLanes,
        residual: Residual,
        next_norm: NextNorm,
        launch: DecodeLaunch,
    ) -> Residual:
        """Run the other half: add the block's output to `residual`, scaled for `next_norm`."""
        name = f"{self.block.role}down"
        call = launch.call(name, inner, self.down, row.slot, bias=self.down_bias)
        return add_product(call, residual, next_norm, launch)

    def part(self, inner: Tensor, row: DecodeLanes, launch: DecodeLaunch) -> Tensor:
        """This rank's part of the block's output, as `part_product` returns it."""
        return part_product(launch.call(f"{self.block.role}down", inner, self.down, row.slot))

    def prefill(
        self, stream: Tensor, next_norm: NextNorm, slot: Tensor, scratch: PrefillScratch
    ) -> None:
        """Run the block on a chunk, whose normed stream is `scratch.h`.

        `stream`, float32, is updated in place, and written to `scratch.h`, normed by `next_norm`.
        """
        add_chunk_product(
            self.inner_chunk(slot, scratch),
            self.down,
            self.down_bias,
            stream,
            next_norm,
            slot,
            scratch,
            eps=self.block.norm_eps,
            out=scratch.h,
        )

    def inner_chunk(self, slot: Tensor, scratch: PrefillScratch, *, after: int = 0) -> Tensor:
        """Run the first half on the normed `scratch.h`, into `scratch` past `after` columns."""
        up = scratch.take(self.block.ffn_size, after=after)
        scratch.product(scratch.h, self.up, self.up_bias, out=up)
        return self._activate(up, slot, pdl=scratch.launch.pdl)
