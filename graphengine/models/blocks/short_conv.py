"""A short convolution's mixer, as LFM2 has it: out(c * conv(b * x)) of one projection.

Decode has three kernels: two products, and between them the convolution with its gates.

Letters: N lanes, T lanes of a chunk, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import STORE
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.recurrent.short_conv import short_conv_decode, short_conv_prefill
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.norms import NextNorm
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    new_weights,
    tensors_of,
)
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.states import LayerStates, Recurrent
from graphengine.models.weights import StoredLinear, Weight

RING = "conv"
"""Name of the state that a layer keeps: the convolution's inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConv:
    """Sizes and switches of the block.

    channels  convolved channels: hidden_size, or this rank's part of it
    taps      inputs that each output of the convolution sums
    norm_eps  epsilon of the norm of the block's input
    bias      whether the products and the convolution have biases
    """

    hidden_size: int
    channels: int
    taps: int
    norm_eps: float
    bias: bool = False

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step. Ranks split channels."""
        return {
            "conv_in": Linear("store", 3 * self.channels, self.hidden_size, shard="rows"),
            "conv_out": Linear("residual", self.hidden_size, self.channels, shard="columns"),
        }

    @property
    def first_linears(self) -> Mapping[str, str]:
        """The checkpoint linear of each weight."""
        return {"conv_in": "in_proj", "conv_out": "out_proj"}

    @property
    def states(self) -> LayerStates:
        """The convolution's newest inputs, in the model's dtype."""
        return (Recurrent(RING, (self.channels,), None, depth=self.taps - 1),)

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`."""
        return 4 * self.channels

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> ShortConvWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        weight = new_weights(forms, prefix, self.first_linears, device=device, dtype=dtype)
        hidden, channels = self.hidden_size, self.channels
        return ShortConvWeights(
            block=self,
            prefix=prefix,
            projection=weight("conv_in", 3 * channels, hidden),
            projection_bias=new(3 * channels) if self.bias else None,
            conv_weight=new(channels, self.taps),
            conv_bias=new(channels) if self.bias else None,
            output=weight("conv_out", hidden, channels),
            output_bias=new(hidden) if self.bias else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvWeights:
    """The block's weights; the projection produces [b | c | x].

    prefix  of the names in the checkpoint: those of Hugging Face's LFM2
    """

    block: ShortConv
    prefix: str
    projection: AnyWeight
    projection_bias: Tensor | None
    conv_weight: Tensor
    conv_bias: Tensor | None
    output: AnyWeight
    output_bias: Tensor | None

    def linears(self) -> list[StoredLinear]:
        """The block's products."""
        block, name = self.block, f"{self.prefix}in_proj"
        projection, pieces = ((name, 3 * block.channels),), {name: (block.channels,) * 3}
        output = ((f"{self.prefix}out_proj", block.hidden_size),)
        return [
            StoredLinear(self.projection, projection, axis=0, pieces=pieces),
            StoredLinear(self.output, output, axis=1),
        ]

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        names = {name: view for each in self.linears() for name, view in each.views().items()}
        pieces = (self.block.channels,) * 3
        for name, tensor, axis, split in (
            ("in_proj.bias", self.projection_bias, 0, pieces),
            ("conv.weight", self.conv_weight[:, None], 0, ()),
            ("conv.bias", self.conv_bias, 0, ()),
            ("out_proj.bias", self.output_bias, None, ()),
        ):
            if tensor is not None:
                names[self.prefix + name] = Weight(tensor, axis, split)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        biases = (self.projection_bias, self.conv_bias, self.output_bias)
        return tensors_of(self.projection, self.output, self.conv_weight, *biases)

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        next_norm: NextNorm,
        states: Mapping[str, Tensor],
        launch: DecodeLaunch,
    ) -> Residual:
        """Run the block on `row`'s tokens: three kernels.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place except for its squares. `states` are the layer's, by name: each token leaves an entry.
        """
        eps, bias = self.block.norm_eps, self.projection_bias
        call = launch.call("conv_in", residual, self.projection, row.slot, eps=eps, bias=bias)
        projected = linear(call, STORE)
        mixed = short_conv_decode(
            projected,
            self.conv_weight,
            self.conv_bias,
            states[RING],
            row.slot,
            row.position,
            tokens_per_row=launch.tokens_per_row,
            pdl=launch.pdl,
        )
        call = launch.call("conv_out", mixed, self.output, row.slot, bias=self.output_bias)
        return add_product(call, residual, next_norm, launch)

    def prefill(
        self,
        lanes: PrefillLanes,
        stream: Tensor,
        next_norm: NextNorm,
        states: Mapping[str, Tensor],
        scratch: PrefillScratch,
    ) -> None:
        """Run the block on a chunk, or on those of several prompts, whose normed stream is
        `scratch.h`.

        `stream`, float32, is updated in place, and written to `scratch.h`, normed by `next_norm`.
        The newest entries of `states` are those of each chunk's last tokens.
        """
        channels = self.block.channels
        projected = scratch.take(3 * channels)
        scratch.product(scratch.h, self.projection, self.projection_bias, out=projected)
        mixed = short_conv_prefill(
            projected,
            self.conv_weight,
            self.conv_bias,
            states[RING],
            lanes.slot,
            lanes.position,
            query_start_P1=scratch.launch.chunk_starts(lanes),
            out=scratch.take(channels, after=3 * channels),
            pdl=scratch.launch.pdl,
        )
        add_chunk_product(
            mixed,
            self.output,
            self.output_bias,
            stream,
            next_norm,
            lanes.slot,
            scratch,
            eps=self.block.norm_eps,
            out=scratch.h,
        )
