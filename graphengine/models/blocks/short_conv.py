"""A short convolution's mixer, as LFM2 has it: out(c * conv(b * x)) of one projection.

Decode has three kernels: two products, between them the convolution with its gates.

Letters: N lanes, T lanes of a chunk, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.kernels import (
    AnyWeight,
    DecodeLanes,
    PrefillLanes,
    Residual,
    linear,
    short_conv_decode,
    short_conv_prefill,
)
from graphengine.models.blocks.norms import NextNorm
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    new_weight,
    tensors_of,
)
from graphengine.models.contract import DecodeLaunch, Reduce, StoredLinear, Weight
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.states import LayerStates, Recurrent

RING = "conv"
"""Name of what a layer keeps: inputs of the convolution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConv:
    """Sizes and switches of the block.

    taps      inputs of a sum
    norm_eps  of the norm that the block's input needs
    bias      whether the products and the convolution have biases
    """

    hidden_size: int
    taps: int
    norm_eps: float
    bias: bool = False

    @property
    def linears(self) -> Linears:
        """In the order of a step. Ranks have no part of them: each has all."""
        return {
            "conv_in": Linear("store", 3 * self.hidden_size, self.hidden_size),
            "conv_out": Linear("residual", self.hidden_size, self.hidden_size),
        }

    @property
    def first_linears(self) -> Mapping[str, str]:
        """Of each weight, the linear of a checkpoint that it is."""
        return {"conv_in": "in_proj", "conv_out": "out_proj"}

    @property
    def states(self) -> LayerStates:
        """The convolution's newest inputs, in the model's dtype."""
        return (Recurrent(RING, (self.hidden_size,), None, depth=self.taps - 1),)

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`."""
        return 4 * self.hidden_size

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> ShortConvWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        def weight(name: str, rows: int) -> AnyWeight:
            first = prefix + self.first_linears[name]
            return new_weight(forms, first, (rows, hidden), device=device, dtype=dtype)

        hidden = self.hidden_size
        return ShortConvWeights(
            block=self,
            prefix=prefix,
            projection=weight("conv_in", 3 * hidden),
            projection_bias=new(3 * hidden) if self.bias else None,
            conv_weight=new(hidden, self.taps),
            conv_bias=new(hidden) if self.bias else None,
            output=weight("conv_out", hidden),
            output_bias=new(hidden) if self.bias else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvWeights:
    """The block's weights; the projection is to [b | c | x].

    prefix  of the names in the checkpoint, those of Hugging Face's LFM2
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
        hidden, prefix = self.block.hidden_size, self.prefix
        return [
            StoredLinear(self.projection, ((f"{prefix}in_proj", 3 * hidden),)),
            StoredLinear(self.output, ((f"{prefix}out_proj", hidden),)),
        ]

    def stored(self) -> dict[str, Weight]:
        """What is not packed, by its name."""
        names = {name: view for each in self.linears() for name, view in each.views().items()}
        for name, tensor in (
            ("in_proj.bias", self.projection_bias),
            ("conv.weight", self.conv_weight[:, None]),
            ("conv.bias", self.conv_bias),
            ("out_proj.bias", self.output_bias),
        ):
            if tensor is not None:
                names[self.prefix + name] = Weight(tensor)
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
        """The block for `row`'s tokens: three kernels.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place but for its squares. `states` are the layer's, by name: each token leaves an entry.
        """
        _check_ranks(launch.reduce)
        projected = linear(
            residual.scaled,
            self.projection,
            row.slot,
            squares_TN=residual.squares,
            eps=self.block.norm_eps,
            bias=self.projection_bias,
            plan=launch.plan("conv_in", self.projection),
            launch=launch,
        )
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
        return add_product(
            mixed,
            self.output,
            row.slot,
            residual,
            next_norm,
            bias=self.output_bias,
            plan=launch.plan("conv_out", self.output),
            launch=launch,
        )

    def prefill(
        self,
        lanes: PrefillLanes,
        stream: Tensor,
        next_norm: NextNorm,
        states: Mapping[str, Tensor],
        scratch: PrefillScratch,
    ) -> None:
        """The block for a chunk, of the normed `scratch.h`.

        `stream`, float32, is updated in place, and `scratch.h` becomes it after `next_norm`. Of
        `states`, the newest entries are those of the chunk's last tokens.
        """
        _check_ranks(scratch.launch.reduce)
        hidden = self.block.hidden_size
        projected = scratch.take(3 * hidden)
        scratch.product(scratch.h, self.projection, self.projection_bias, out=projected)
        mixed = short_conv_prefill(
            projected,
            self.conv_weight,
            self.conv_bias,
            states[RING],
            lanes.slot,
            lanes.position,
            out=scratch.take(hidden, after=3 * hidden),
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


def _check_ranks(reduce: Reduce | None) -> None:
    if reduce is not None:
        raise ValueError("ranks cannot split a short convolution: all channels are on one rank")
