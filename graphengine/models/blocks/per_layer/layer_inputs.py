"""Per-layer embeddings, as Gemma 4 has them: a table with an input for each layer, and the block
that takes it.

    inputs of all layers = f(linear of the token's embedding, the token's row of the table)
    block of layer l     = projection(gelu(gate x) * input of layer l)

Every rank has the table and the linear for all layers; ranks split the values of an input between
gates and projections.

Letters: N lanes, H hidden, L layers, P values of an input, S values of a rank's share, V rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import STORE, Store
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.activation import Activation, swiglu
from graphengine.kernels.norm_rope.layer_inputs import layer_inputs, rounded
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks.norms import NextNorm
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    chunk_product,
    new_weight,
    new_weights,
    tensors_of,
)
from graphengine.models.launches import DecodeLaunch, PrefillLaunch
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.weights import StoredLinear, Weight

LINEAR = "layer_inputs"
"""The name of the linear that makes the inputs of all layers."""
PROJECTION = "model.per_layer_model_projection"
"""Its name in a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInputs:
    """Sizes of the inputs of all layers.

    size  P
    rows  V
    pad   the row of positions that have an embedding in place of a token
    """

    size: int
    rows: int
    pad: int
    norm_eps: float

    def linear(self, layers: int, hidden: int) -> Linear:
        """The linear that makes them; every rank has all of it."""
        return Linear("store", layers * self.size, hidden)

    def allocate(
        self, layers: int, hidden: int, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> LayerInputsWeights:
        """Uninitialised weights; `device="meta"` allocates nothing."""
        width = layers * self.size
        return LayerInputsWeights(
            config=self,
            table=torch.empty(self.rows, width, device=device, dtype=dtype),
            projection=new_weight(forms, PROJECTION, (width, hidden), device=device, dtype=dtype),
            norm=torch.empty(self.size, device=device, dtype=dtype),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInputsWeights:
    """The table `[V, L * P]`, the linear `[L * P, H]`, and the norm `[P]` of its outputs."""

    config: LayerInputs
    table: Tensor
    projection: AnyWeight
    norm: Tensor

    def linears(self) -> list[StoredLinear]:
        """The linear of all layers."""
        return [StoredLinear(self.projection, ((PROJECTION, self.projection.shape[0]),))]

    def names(self) -> Mapping[str, str]:
        """The name in `Linears` of the checkpoint's linear."""
        return {PROJECTION: LINEAR}

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        names = self.linears()[0].views()
        names["model.embed_tokens_per_layer.weight"] = Weight(self.table)
        return names | {"model.per_layer_projection_norm.weight": Weight(self.norm)}

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return tensors_of(self.table, self.projection, self.norm)

    def made(
        self, x: Tensor, token: Tensor, slot: Tensor, launch: DecodeLaunch | PrefillLaunch, own: int
    ) -> Tensor:
        """Compute `[N, L, 2 * S]` from the lanes' embeddings `x`, float32 `[N, H]`: for each layer,
        room for gates, then its input.

        own  S
        """
        config, share = self.config, launch.share
        if x.dtype != self.table.dtype:
            x = rounded(x, slot, self.table.dtype, pdl=launch.pdl)
        if isinstance(launch, DecodeLaunch):
            product = linear(launch.call(LINEAR, x, self.projection, slot), STORE)
        else:
            product = x.new_empty(len(x), self.projection.shape[0])
            any_lanes = launch.any_lanes
            chunk_product(
                x, self.projection, None, out=product, pdl=launch.pdl, any_lanes=any_lanes
            )
        table_scale = torch.tensor(config.size**0.5, dtype=self.table.dtype).item()
        return layer_inputs(
            product,
            self.table,
            self.norm,
            token,
            slot,
            product_scale=x.shape[1] ** -0.5,
            table_scale=table_scale,
            eps=config.norm_eps,
            pad=config.pad,
            first=share.rank * own if own < config.size else 0,
            count=own,
            pdl=launch.pdl,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInput:
    """Sizes of the block; `norm_eps` is the epsilon of the norm after it.

    size  S
    """

    hidden_size: int
    size: int
    norm_eps: float
    activation: Activation = "gelu_tanh"

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step."""
        gate = Linear("store", self.size, self.hidden_size, shard="rows")
        down = Linear("residual", self.hidden_size, self.size, shard="columns")
        return {"input_gate": gate, "input_down": down}

    @property
    def first_linears(self) -> Mapping[str, str]:
        """First checkpoint linear fused into each weight."""
        return {"input_gate": "per_layer_input_gate", "input_down": "per_layer_projection"}

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`."""
        return 0

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> LayerInputWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """
        weight = new_weights(forms, prefix, self.first_linears, device=device, dtype=dtype)
        return LayerInputWeights(
            block=self,
            prefix=prefix,
            gate=weight("input_gate", self.size, self.hidden_size),
            down=weight("input_down", self.hidden_size, self.size),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInputWeights:
    """The block's weights; `prefix` begins their names in the checkpoint."""

    block: LayerInput
    prefix: str
    gate: AnyWeight
    down: AnyWeight

    def linears(self) -> list[StoredLinear]:
        """The block's products."""
        gate, down = (self.prefix + name for name in self.block.first_linears.values())
        return [
            StoredLinear(self.gate, ((gate, self.block.size),), axis=0),
            StoredLinear(self.down, ((down, self.block.hidden_size),), axis=1),
        ]

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        return {name: view for each in self.linears() for name, view in each.views().items()}

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return tensors_of(self.gate, self.down)

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        next_norm: NextNorm,
        given: Tensor,
        launch: DecodeLaunch,
    ) -> Residual:
        """Run the block on `row`'s tokens: four kernels.

        `residual` is not scaled for a norm, and comes back scaled for `next_norm`, updated in place
        except for its squares. `given`, `[N, 2 * S]`, is the layer's input after room for its
        gates, which are written there.
        """
        gates = given[:, : self.block.size]
        linear(launch.call("input_gate", residual.scaled, self.gate, row.slot), Store(out=gates))
        self._gate(given, row.slot, pdl=launch.pdl)
        call = launch.call("input_down", gates, self.down, row.slot)
        return add_product(call, residual, next_norm, launch)

    def prefill(
        self,
        stream: Tensor,
        next_norm: NextNorm,
        given: Tensor,
        slot: Tensor,
        scratch: PrefillScratch,
    ) -> None:
        """Run the block on a chunk, whose stream is also `scratch.h`, with `given` as in `decode`.

        `stream`, float32, is updated in place, and written to `scratch.h`, normed by `next_norm`.
        """
        gates, eps = given[:, : self.block.size], self.block.norm_eps
        scratch.product(scratch.h, self.gate, None, out=gates)
        self._gate(given, slot, pdl=scratch.launch.pdl)
        add_chunk_product(
            gates, self.down, None, stream, next_norm, slot, scratch, eps=eps, out=scratch.h
        )

    def _gate(self, given: Tensor, slot: Tensor, *, pdl: bool) -> None:
        """Multiply the input by its activated gates, in place of these."""
        gates = given[:, : self.block.size]
        swiglu(given, slot, activation=self.block.activation, out=gates, pdl=pdl)
