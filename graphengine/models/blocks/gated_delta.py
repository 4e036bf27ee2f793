"""A gated delta net's mixer: out(norm(delta(conv(q, k, v), b, a)) * silu(z)) of one projection.

Decode has four kernels: two products, and between them one for convolution and state and one for
the norm. A checkpoint may store the parts of the projection in different formats: then each run of
parts in one format is a product of its own.

Letters: N lanes, T lanes of a chunk, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import Store
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.recurrent.conv import causal_conv_chunk
from graphengine.kernels.recurrent.gated_delta.gated_delta import (
    gated_delta_decode,
    gated_delta_prefill,
)
from graphengine.kernels.recurrent.gated_delta.gated_delta_sizes import (
    GatedDeltaParams,
    GatedDeltaSizes,
)
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

RING, STATE = "conv", "delta"
"""Names of the states that a layer keeps: the convolution's inputs, and the heads' states."""
_PROJECTED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """Sizes and switches of the block.

    norm_eps     epsilon of the norm of the block's input, and of each head's norm
    state_dtype  what a head's state is rounded to after each token
    products     checkpoint linears that each product of the inputs computes, in their order
    """

    hidden_size: int
    sizes: GatedDeltaSizes
    norm_eps: float
    state_dtype: torch.dtype = torch.float32
    products: tuple[tuple[str, ...], ...] = (_PROJECTED,)

    def parted(self, beginning: Collection[str]) -> GatedDelta:
        """A copy in which each of these linears begins a product of its own."""
        starts = [i for i, name in enumerate(_PROJECTED) if i == 0 or name in beginning]
        ends = [*starts[1:], len(_PROJECTED)]
        products = tuple(_PROJECTED[i:j] for i, j in zip(starts, ends, strict=True))
        return replace(self, products=products)

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step. Ranks split heads; key and value heads stay together."""
        rows = self.part_rows
        inputs = {
            name: Linear("store", sum(rows[part] for part in parts), self.hidden_size, shard="rows")
            for name, parts in self._named_products.items()
        }
        output = Linear("residual", self.hidden_size, self.sizes.inner, shard="columns")
        return {**inputs, "delta_out": output}

    @property
    def first_linears(self) -> Mapping[str, str]:
        """First checkpoint linear fused into each weight."""
        inputs = {name: parts[0] for name, parts in self._named_products.items()}
        return {**inputs, "delta_out": "out_proj"}

    @property
    def _named_products(self) -> dict[str, tuple[str, ...]]:
        """`products` by their names in `linears`: "delta_in", or "delta_in.qkv_z" of some parts."""
        if len(self.products) == 1:
            return {"delta_in": self.products[0]}
        return {
            "delta_in." + "_".join(part.removeprefix("in_proj_") for part in parts): parts
            for parts in self.products
        }

    @property
    def part_rows(self) -> Mapping[str, int]:
        sizes = self.sizes
        counts = (sizes.channels, sizes.inner, sizes.value_heads, sizes.value_heads)
        return dict(zip(_PROJECTED, counts, strict=True))

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.sizes.key_heads * self.sizes.key_dim
        return keys, keys, self.sizes.inner

    @property
    def states(self) -> LayerStates:
        """The convolution's newest inputs, and a state for each head."""
        sizes = self.sizes
        ring = Recurrent(
            RING,
            (sizes.channels,),
            None,
            depth=sizes.taps - 1,
            apart=True,
            pieces=self.convolved,
        )
        return ring, Recurrent(STATE, sizes.state_shape, self.state_dtype)

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`."""
        return self.sizes.projected + self.sizes.channels + self.sizes.inner

    def scan_bytes(self, lanes: int, prompts: int | None) -> int:
        """Bytes that the kernels of one chunk, or of `prompts` chunks, pass to each other."""
        return self.sizes.scan_bytes(lanes, prompts)

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> GatedDeltaWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        def of_heads() -> Tensor:
            return torch.empty(sizes.value_heads, device=device)

        weight = new_weights(forms, prefix, self.first_linears, device=device, dtype=dtype)
        sizes = self.sizes
        return GatedDeltaWeights(
            block=self,
            prefix=prefix,
            projections=tuple(
                weight(name, *self.linears[name][1:3]) for name in self._named_products
            ),
            params=GatedDeltaParams(
                new(sizes.channels, sizes.taps),
                a_log=of_heads(),
                dt_bias=of_heads(),
                norm=new(sizes.value_dim),
            ),
            output=weight("delta_out", *self.linears["delta_out"][1:3]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaWeights:
    """The block's weights; the projections together produce [q | k | v | z | b | a].

    prefix  of the names in the checkpoint: those of Hugging Face's Qwen3.5
    """

    block: GatedDelta
    prefix: str
    projections: tuple[AnyWeight, ...]
    params: GatedDeltaParams
    output: AnyWeight

    def linears(self) -> list[StoredLinear]:
        """The block's products."""
        block = self.block
        rows = block.part_rows
        pieces = {f"{self.prefix}in_proj_qkv": block.convolved}
        inputs = [
            StoredLinear(
                weight,
                tuple((self.prefix + part, rows[part]) for part in parts),
                axis=0,
                pieces=pieces,
            )
            for weight, parts in zip(self.projections, block.products, strict=True)
        ]
        output = ((f"{self.prefix}out_proj", block.hidden_size),)
        return [*inputs, StoredLinear(self.output, output, axis=1)]

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        prefix, params = self.prefix, self.params
        names = {name: view for each in self.linears() for name, view in each.views().items()}
        return names | {
            f"{prefix}conv1d.weight": Weight(params.conv_weight[:, None], 0, self.block.convolved),
            f"{prefix}A_log": Weight(params.a_log, 0),
            f"{prefix}dt_bias": Weight(params.dt_bias, 0),
            f"{prefix}norm.weight": Weight(params.norm),
        }

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return tensors_of(*self.projections, self.output, *self.params)

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        next_norm: NextNorm,
        states: Mapping[str, Tensor],
        launch: DecodeLaunch,
    ) -> Residual:
        """Run the block on `row`'s tokens: four kernels.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place except for its squares. `states` are the layer's, by name: each token leaves an entry.
        """
        block = self.block
        projected = self._project(row, residual, launch)
        mixed = gated_delta_decode(
            projected,
            states[RING],
            states[STATE],
            row.slot,
            row.position,
            self.params,
            block.sizes,
            eps=block.norm_eps,
            tokens_per_row=launch.tokens_per_row,
            pdl=launch.pdl,
        )
        call = launch.call("delta_out", mixed, self.output, row.slot)
        return add_product(call, residual, next_norm, launch)

    def _project(self, row: DecodeLanes, residual: Residual, launch: DecodeLaunch) -> Tensor:
        """`[N, projected]`: all products of the block's normed inputs."""
        x, block = residual.scaled, self.block
        projected = x.new_empty(len(x), block.sizes.projected)
        for name, weight, out in zip(
            block.linears, self.projections, self._columns(projected), strict=False
        ):
            call = launch.call(name, residual, weight, row.slot, eps=block.norm_eps)
            linear(call, Store(out=out))
        return projected

    def _columns(self, projected: Tensor) -> tuple[Tensor, ...]:
        """The columns that each projection writes."""
        return torch.split(projected, [each.shape[0] for each in self.projections], dim=1)

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
        block, sizes, pdl = self.block, self.block.sizes, scratch.launch.pdl
        starts = scratch.launch.chunk_starts(lanes)
        projected = scratch.take(sizes.projected)
        for weight, out in zip(self.projections, self._columns(projected), strict=True):
            scratch.product(scratch.h, weight, None, out=out)
        qkv = causal_conv_chunk(
            projected[:, : sizes.channels],
            self.params.conv_weight,
            None,
            states[RING],
            lanes.slot,
            lanes.position,
            query_start_P1=starts,
            activation="silu",
            out=scratch.take(sizes.channels, after=sizes.projected),
            pdl=pdl,
        )
        mixed = gated_delta_prefill(
            qkv,
            projected,
            states[STATE],
            lanes.slot,
            lanes.position,
            self.params,
            sizes,
            eps=block.norm_eps,
            query_start_P1=starts,
            out=scratch.take(sizes.inner, after=sizes.projected + sizes.channels),
            pdl=pdl,
        )
        add_chunk_product(
            mixed,
            self.output,
            None,
            stream,
            next_norm,
            lanes.slot,
            scratch,
            eps=block.norm_eps,
            out=scratch.h,
        )
