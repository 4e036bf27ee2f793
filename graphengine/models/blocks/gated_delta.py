"""A gated delta net's mixer: out(norm(delta(conv(q, k, v), b, a)) * silu(z)) of one projection.

Decode has four kernels: two products, between them one for convolution and state, and the norm.

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
    GatedDeltaParams,
    GatedDeltaSizes,
    PrefillLanes,
    Residual,
    causal_conv_chunk,
    gated_delta_decode,
    gated_delta_prefill,
    linear,
)
from graphengine.models.blocks.norms import NextNorm
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    new_weight,
    tensors_of,
)
from graphengine.models.contract import DecodeLaunch
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.states import LayerStates, Recurrent
from graphengine.models.weights import StoredLinear, Weight

RING, STATE = "conv", "delta"
"""Names of what a layer keeps: inputs of the convolution, and the heads' states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """Sizes and switches of the block.

    norm_eps     of the norm that the block's input needs, and of each head's
    state_dtype  what a head's state is rounded to after each token
    """

    hidden_size: int
    sizes: GatedDeltaSizes
    norm_eps: float
    state_dtype: torch.dtype = torch.float32

    @property
    def linears(self) -> Linears:
        """In the order of a step. Ranks split heads: those of keys stay with theirs of values."""
        return {
            "delta_in": Linear("store", self.sizes.projected, self.hidden_size, shard="rows"),
            "delta_out": Linear("residual", self.hidden_size, self.sizes.inner, shard="columns"),
        }

    @property
    def first_linears(self) -> Mapping[str, str]:
        """Of each weight, the first linear of a checkpoint whose rows it has."""
        return {"delta_in": "in_proj_qkv", "delta_out": "out_proj"}

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

    def scan_bytes(self, lanes: int) -> int:
        """Bytes that the kernels of a chunk leave to each other."""
        return self.sizes.scan_bytes(lanes)

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

        def weight(name: str, rows: int, columns: int) -> AnyWeight:
            first = prefix + self.first_linears[name]
            return new_weight(forms, first, (rows, columns), device=device, dtype=dtype)

        hidden, sizes = self.hidden_size, self.sizes
        return GatedDeltaWeights(
            block=self,
            prefix=prefix,
            projection=weight("delta_in", sizes.projected, hidden),
            params=GatedDeltaParams(
                new(sizes.channels, sizes.taps),
                a_log=of_heads(),
                dt_bias=of_heads(),
                norm=new(sizes.value_dim),
            ),
            output=weight("delta_out", hidden, sizes.inner),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaWeights:
    """The block's weights; the projection is to [q | k | v | z | b | a].

    prefix  of the names in the checkpoint, those of Hugging Face's Qwen3.5
    """

    block: GatedDelta
    prefix: str
    projection: AnyWeight
    params: GatedDeltaParams
    output: AnyWeight

    def linears(self) -> list[StoredLinear]:
        """The block's products."""
        block, sizes = self.block, self.block.sizes
        rows = {
            "in_proj_qkv": sizes.channels,
            "in_proj_z": sizes.inner,
            "in_proj_b": sizes.value_heads,
            "in_proj_a": sizes.value_heads,
        }
        projection = tuple((self.prefix + name, count) for name, count in rows.items())
        output = ((f"{self.prefix}out_proj", block.hidden_size),)
        pieces = {f"{self.prefix}in_proj_qkv": block.convolved}
        return [
            StoredLinear(self.projection, projection, axis=0, pieces=pieces),
            StoredLinear(self.output, output, axis=1),
        ]

    def stored(self) -> dict[str, Weight]:
        """What is not packed, by its name."""
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
        return tensors_of(self.projection, self.output, *self.params)

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        next_norm: NextNorm,
        states: Mapping[str, Tensor],
        launch: DecodeLaunch,
    ) -> Residual:
        """The block for `row`'s tokens: four kernels.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place but for its squares. `states` are the layer's, by name: each token leaves an entry.
        """
        block = self.block
        projected = linear(
            residual.scaled,
            self.projection,
            row.slot,
            squares_TN=residual.squares,
            eps=block.norm_eps,
            plan=launch.plan("delta_in", self.projection),
            launch=launch,
        )
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
        return add_product(
            mixed,
            self.output,
            row.slot,
            residual,
            next_norm,
            bias=None,
            plan=launch.plan("delta_out", self.output),
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
        block, sizes, pdl = self.block, self.block.sizes, scratch.launch.pdl
        projected = scratch.take(sizes.projected)
        scratch.product(scratch.h, self.projection, None, out=projected)
        qkv = causal_conv_chunk(
            projected[:, : sizes.channels],
            self.params.conv_weight,
            None,
            states[RING],
            lanes.slot,
            lanes.position,
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
