"""A SwiGLU feed-forward: down(silu(gate x) * up x), or with another activation in place of silu.

`SwigluByKind` is two of them side by side, one for sound and one for text; each lane takes the one
of its kind. Decode steps feed only sound. All lanes of a prompt's chunk run through both, and each
keeps the result of its kind, so a chunk's products cost twice those of one SwiGLU.

Letters: N lanes, H hidden, F ffn width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import StoreSwiglu
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.prefill.linear_swiglu import fuses_swiglu, linear_swiglu
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.activation import Activation, swiglu
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks.norms import NextNorm, NormsByKind
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk,
    add_chunk_product,
    add_product,
    new_weights,
    part_product,
    tensors_of,
)
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.weights import StoredLinear, Weight

PLAIN_NAMES = ("gate_proj", "up_proj", "down_proj")
"""The names of gates, ups and down in checkpoints of Llama's lineage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swiglu:
    """Sizes and switches of the block; `norm_eps` is the epsilon of the norms around it.

    normed      whether there is a norm before the block
    role        prefix of its linears' names
    names       of gates, ups and down in a checkpoint
    one_linear  whether a checkpoint has gates and ups in one linear without biases, which has the
                first of the names; the second is not used
    """

    hidden_size: int
    ffn_size: int
    norm_eps: float
    bias: bool = False
    activation: Activation = "silu"
    role: str = ""
    names: tuple[str, str, str] = PLAIN_NAMES
    one_linear: bool = False
    normed: bool = True

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step."""
        return {
            f"{self.role}gate_up": Linear(
                "swiglu", 2 * self.ffn_size, self.hidden_size, shard="rows"
            ),
            f"{self.role}down": Linear(
                "residual", self.hidden_size, self.ffn_size, shard="columns"
            ),
        }

    @property
    def first_linears(self) -> Mapping[str, str]:
        """First checkpoint linear fused into each weight."""
        return dict(zip((f"{self.role}gate_up", f"{self.role}down"), self.names[::2], strict=True))

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch` where nothing is fused."""
        return 2 * self.ffn_size

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> SwigluWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        weight = new_weights(forms, prefix, self.first_linears, device=device, dtype=dtype)
        hidden, ffn = self.hidden_size, self.ffn_size
        return SwigluWeights(
            block=self,
            prefix=prefix,
            gate_up=weight(f"{self.role}gate_up", 2 * ffn, hidden, swiglu=True),
            gate_up_bias=new(2 * ffn) if self.bias else None,
            down=weight(f"{self.role}down", hidden, ffn),
            down_bias=new(hidden) if self.bias else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SwigluWeights:
    """The block's weights; gate and up are one matrix `[gate F | up F]`.

    prefix  of the names in the checkpoint: those of Hugging Face's decoders of Llama's lineage
    """

    block: Swiglu
    prefix: str
    gate_up: AnyWeight
    gate_up_bias: Tensor | None
    down: AnyWeight
    down_bias: Tensor | None

    def linears(self) -> list[StoredLinear]:
        """The block's products."""
        prefix, ffn = self.prefix, self.block.ffn_size
        gate, down = (prefix + name for name in self.block.first_linears.values())
        gate_up: tuple[tuple[str, int], ...] = ((gate, ffn), (prefix + self.block.names[1], ffn))
        pieces: dict[str, tuple[int, ...]] = {}
        if self.block.one_linear:
            gate_up, pieces = ((gate, 2 * ffn),), {gate: (ffn, ffn)}
        return [
            StoredLinear(self.gate_up, gate_up, swiglu=True, axis=0, pieces=pieces),
            StoredLinear(self.down, ((down, self.block.hidden_size),), axis=1),
        ]

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        names = {name: view for each in self.linears() for name, view in each.views().items()}
        if self.gate_up_bias is not None:
            gate, up = self.gate_up_bias.chunk(2)
            names[f"{self.prefix}gate_proj.bias"] = Weight(gate, 0)
            names[f"{self.prefix}up_proj.bias"] = Weight(up, 0)
        if self.down_bias is not None:
            names[f"{self.prefix}down_proj.bias"] = Weight(self.down_bias)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return tensors_of(self.gate_up, self.down, self.gate_up_bias, self.down_bias)

    def is_fused(self, lanes: int | None) -> bool:
        """Whether a chunk of this many lanes has gate, up and SwiGLU in one kernel; None: the same
        for all numbers of lanes.
        """
        if not isinstance(self.gate_up, Tensor):
            return True
        return self.gate_up_bias is None and fuses_swiglu(self.gate_up, lanes)

    def chunk_width(self, lanes: int | None) -> int:
        """Values of a lane in `PrefillScratch`, in a chunk of as many lanes as for `is_fused`."""
        return self.block.ffn_size if self.is_fused(lanes) else self.block.prefill_width

    def decode(
        self, row: DecodeLanes, residual: Residual, next_norm: NextNorm, launch: DecodeLaunch
    ) -> Residual:
        """Run the block on `row`'s tokens: two kernels.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place except for its squares.
        """
        gated = self.inner(row, residual, launch)
        return self.add(gated, row, residual, next_norm, launch)

    def inner(self, row: DecodeLanes, residual: Residual, launch: DecodeLaunch) -> Tensor:
        """Run the first half, whose result `add` multiplies by down. `residual` is scaled for the
        block's norm.
        """
        block = self.block
        call = launch.call(
            f"{block.role}gate_up",
            residual if block.normed else residual.scaled,
            self.gate_up,
            row.slot,
            eps=block.norm_eps,
            bias=self.gate_up_bias,
        )
        return linear(call, StoreSwiglu(activation=block.activation))

    def add(
        self,
        gated: Tensor,
        row: DecodeLanes,
        residual: Residual,
        next_norm: NextNorm,
        launch: DecodeLaunch,
    ) -> Residual:
        """Run the other half: add the block's output to `residual`, scaled for `next_norm`."""
        call = launch.call(
            f"{self.block.role}down", gated, self.down, row.slot, bias=self.down_bias
        )
        return add_product(call, residual, next_norm, launch)

    def part(self, gated: Tensor, row: DecodeLanes, launch: DecodeLaunch) -> Tensor:
        """This rank's part of the block's output, as `part_product` returns it."""
        return part_product(launch.call(f"{self.block.role}down", gated, self.down, row.slot))

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
        ffn, h, pdl = self.block.ffn_size, scratch.h, scratch.launch.pdl
        activation = self.block.activation
        if not isinstance(self.gate_up, Tensor):
            gated = scratch.take(ffn, after=after)
            return scratch.product(
                h, self.gate_up, self.gate_up_bias, out=gated, swiglu=True, activation=activation
            )
        if self.is_fused(None if scratch.launch.any_lanes else len(h)):
            gated = scratch.take(ffn, after=after)
            delta = scratch.delta(h, self.gate_up)
            return linear_swiglu(
                h, self.gate_up, activation=activation, out=gated, pdl=pdl, delta_NM=delta
            )
        gate_up = scratch.take(2 * ffn, after=after)
        scratch.product(h, self.gate_up, self.gate_up_bias, out=gate_up)
        return swiglu(gate_up, slot, activation=activation, out=gate_up[:, :ffn], pdl=pdl)


@dataclass(frozen=True, kw_only=True, slots=True)
class SwigluByKind(Swiglu):
    """Sizes and switches of both; the block itself is the one for sound.

    own_prefix, text_prefix  of the tensors for sound and for text, below the layer's prefix
    """

    own_prefix: str
    text_prefix: str

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`: including the text block's output."""
        return 2 * self.ffn_size + self.hidden_size

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> SwigluByKindWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the tensors for sound in the checkpoint
        """
        of_text = prefix.removesuffix(self.own_prefix) + self.text_prefix
        sound, text = (
            Swiglu.allocate(self, each, forms, device=device, dtype=dtype)
            for each in (prefix, of_text)
        )
        return SwigluByKindWeights(
            block=self,
            prefix=prefix,
            gate_up=sound.gate_up,
            gate_up_bias=sound.gate_up_bias,
            down=sound.down,
            down_bias=sound.down_bias,
            text=text,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SwigluByKindWeights(SwigluWeights):
    """The weights of both; the block itself has those for sound."""

    text: SwigluWeights

    def linears(self) -> list[StoredLinear]:
        """The products of both."""
        return [*SwigluWeights.linears(self), *self.text.linears()]

    def stored(self) -> dict[str, Weight]:
        """The tensors of both, by name."""
        return SwigluWeights.stored(self) | self.text.stored()

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return [*SwigluWeights.tensors(self), *self.text.tensors()]

    def chunk_width(self, lanes: int | None) -> int:
        """Values of a lane in `PrefillScratch`: including the text block's output."""
        return SwigluWeights.chunk_width(self, lanes) + self.block.hidden_size

    def prefill(
        self, stream: Tensor, next_norm: NextNorm, slot: Tensor, scratch: PrefillScratch
    ) -> None:
        """Run a chunk's lanes, whose normed stream is `scratch.h`, each through the block of its
        kind.

        `stream`, float32, is updated in place, and written to `scratch.h`, normed by `next_norm`.
        """
        kinds, eps = scratch.kinds, self.block.norm_eps
        assert kinds is not None, "the lanes' kinds are known"
        own_width = SwigluWeights.chunk_width(self, len(stream))
        of_text = scratch.take(self.block.hidden_size, after=own_width)
        # The second product overwrites the input of both.
        for weights, out in ((self.text, of_text), (self, scratch.h)):
            gated = SwigluWeights.inner_chunk(weights, slot, scratch)
            scratch.product(gated, weights.down, weights.down_bias, out=out)
        norms = next_norm if isinstance(next_norm, NormsByKind) else (next_norm, next_norm)
        for whole, norm, of_kind in zip((scratch.h, of_text), norms, kinds, strict=True):
            add_chunk(whole, stream, norm, of_kind, scratch, eps=eps)
