"""Layers with separate weights for each run of an inner decoder, in one tensor per linear, as
Moshi's depth decoder has them. All runs share the norms.

Letters: R runs, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphengine.models.blocks.gqa import AttentionWeights
from graphengine.models.blocks.swiglu import SwigluWeights
from graphengine.models.decoder_layer import LayerWeights, allocate_layer
from graphengine.models.linears import PLAIN
from graphengine.models.sublayers import Layer
from graphengine.models.weights import StoredLinear, Weight

Stacks = tuple[Tensor, Tensor]
"""`[R, rows, columns]` of a block's first linear, which may be several fused ones, and of its
second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedLayer:
    """A layer of attention and a SwiGLU, for all runs.

    layer   of the first run: its weights are views of the stacks
    stacks  of each block, in the model's dtype
    """

    layer: LayerWeights
    stacks: tuple[Stacks, Stacks]

    def of_run(self, run: int) -> LayerWeights:
        """The layer of a run, whose weights are views of the stacks."""
        of_attention, of_mlp = self.layer.sublayers
        attention, mlp = of_attention.block, of_mlp.block
        assert isinstance(attention, AttentionWeights), f"{attention=}"
        assert isinstance(mlp, SwigluWeights), f"{mlp=}"
        (qkv, output), (gate_up, down) = self.stacks
        attention = replace(attention, qkv=qkv[run], output=output[run])
        mlp = replace(mlp, gate_up=gate_up[run], down=down[run])
        sublayers = replace(of_attention, block=attention), replace(of_mlp, block=mlp)
        return replace(self.layer, sublayers=sublayers)

    def linears(self) -> list[Tensor]:
        """The stacks, in the order of a run."""
        return [stack for stacks in self.stacks for stack in stacks]

    def norms(self) -> list[Tensor]:
        """The norms, which each run reads."""
        return [each.norm for each in self.layer.sublayers]

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return [*self.norms(), *self.linears()]

    def stored(self) -> dict[str, Weight]:
        """Every tensor, by its name in a checkpoint."""
        found = {
            f"{name}.weight": Weight(norm)
            for each in self.layer.sublayers
            for name, norm in each.norms().items()
        }
        for linear, stack in zip(self.layer.linears(), self.linears(), strict=True):
            found |= _views(linear, stack)
        return found


def _views(linear: StoredLinear, stack: Tensor) -> dict[str, Weight]:
    """The part of a stack that each of a checkpoint's tensors is."""
    assert linear.order is None and not linear.transposed, f"{linear.parts=}"
    rows = torch.split(stack, [count for _, count in linear.parts], dim=1)
    named = zip(linear.parts, rows, strict=True)
    return {f"{name}.weight": Weight(part) for (name, _), part in named}


def allocate_stack(
    prefix: str, layer: Layer, hidden: int, runs: int, *, device: str, dtype: torch.dtype
) -> StackedLayer:
    """Uninitialised weights of the layer with this prefix; `device="meta"` allocates nothing."""
    shell = allocate_layer(prefix, layer, hidden, PLAIN, device="meta", dtype=dtype)

    def new(linear: StoredLinear) -> Tensor:
        return torch.empty((runs, *linear.shape), device=device, dtype=dtype)

    qkv, output, gate_up, down = map(new, shell.linears())
    sublayers = tuple(
        replace(each, norm=torch.empty_like(each.norm, device=device)) for each in shell.sublayers
    )
    stacks = (qkv, output), (gate_up, down)
    made = StackedLayer(layer=replace(shell, sublayers=sublayers), stacks=stacks)
    return replace(made, layer=made.of_run(0))
