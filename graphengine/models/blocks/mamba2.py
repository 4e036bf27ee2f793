"""A Mamba2 mixer: out(norm(scan(conv(x, B, C), dt), z)) of one projection to z, x, B, C and dt.

Decode has two products, and between them a kernel for convolution and state, and another one for
the norm where heads are in several groups.

Letters: N lanes, T lanes of a chunk, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import STORE
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.recurrent.conv import causal_conv_chunk
from graphengine.kernels.recurrent.mamba2.mamba2 import (
    mamba2_decode,
    mamba2_decode_gated,
    mamba2_norm,
    mamba2_prefill,
)
from graphengine.kernels.recurrent.mamba2.mamba2_sizes import Mamba2Params, Mamba2Sizes
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.norms import NextNorm
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk_product,
    add_product,
    new_weights,
    tensors_of,
)
from graphengine.models.launches import DecodeLaunch, PrefillLaunch, Reduce
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.states import LayerStates, Recurrent
from graphengine.models.weights import StoredLinear, Weight

RING, STATE = "conv", "ssm"
"""Names of the states that a layer keeps: the convolution's inputs, and the heads' states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2:
    """Sizes and switches of the block.

    norm_eps     epsilon of the norm of the block's input
    gate_eps     epsilon of the norm before the output's product, which is over each group
    bias         whether the products have biases
    conv_bias    whether the convolution has one
    state_dtype  what a head's state is rounded to after each token
    norm_ranks   ranks that split the heads of one group, whose norm is over all of them
    """

    hidden_size: int
    sizes: Mamba2Sizes
    norm_eps: float
    gate_eps: float
    bias: bool = False
    conv_bias: bool = True
    state_dtype: torch.dtype = torch.float32
    norm_ranks: int = 1

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step. Ranks split heads, and groups with them; a single group
        is on all ranks.
        """
        return {
            "mamba_in": Linear("store", self.sizes.projected, self.hidden_size, shard="rows"),
            "mamba_out": Linear("residual", self.hidden_size, self.sizes.inner, shard="columns"),
        }

    @property
    def first_linears(self) -> Mapping[str, str]:
        """The checkpoint linear of each weight."""
        return {"mamba_in": "in_proj", "mamba_out": "out_proj"}

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels of x, B and C."""
        of_groups = self.sizes.groups * self.sizes.state_size
        return self.sizes.inner, of_groups, of_groups

    @property
    def projected(self) -> tuple[int, ...]:
        """Values of z, x, B, C and dt."""
        return self.sizes.inner, *self.convolved, self.sizes.heads

    @property
    def states(self) -> LayerStates:
        """The convolution's newest inputs, and a state for each head."""
        sizes = self.sizes
        ring = Recurrent(
            RING,
            (sizes.channels,),
            None,
            depth=sizes.width - 1,
            apart=True,
            pieces=self.convolved,
        )
        return ring, Recurrent(STATE, sizes.state_shape, self.state_dtype)

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`."""
        return self.sizes.projected + self.sizes.channels + self.sizes.inner

    def scan_bytes(self, lanes: int, prompts: int | None) -> int:
        """Bytes that the kernels of a chunk, or of those of `prompts` prompts, pass to each other,
        and of a norm across ranks.
        """
        gated = 4 * lanes * self.sizes.inner if self.norm_ranks > 1 else 0
        return self.sizes.scan_bytes(lanes, prompts) + gated

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> Mamba2Weights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        def of_heads() -> Tensor:
            return torch.empty(sizes.heads, device=device)

        weight = new_weights(forms, prefix, self.first_linears, device=device, dtype=dtype)
        hidden, sizes = self.hidden_size, self.sizes
        return Mamba2Weights(
            block=self,
            prefix=prefix,
            projection=weight("mamba_in", sizes.projected, hidden),
            projection_bias=new(sizes.projected) if self.bias else None,
            params=Mamba2Params(
                new(sizes.channels, sizes.width),
                new(sizes.channels) if self.conv_bias else None,
                dt_bias=of_heads(),
                a_log=of_heads(),
                skip=of_heads(),
            ),
            gate_norm=new(sizes.inner),
            output=weight("mamba_out", hidden, sizes.inner),
            output_bias=new(hidden) if self.bias else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Weights:
    """The block's weights; the heads' parameters are float32.

    prefix  of the names in the checkpoint: those of Hugging Face's Mamba2
    """

    block: Mamba2
    prefix: str
    projection: AnyWeight
    projection_bias: Tensor | None
    params: Mamba2Params
    gate_norm: Tensor
    output: AnyWeight
    output_bias: Tensor | None

    def linears(self) -> list[StoredLinear]:
        """The block's products."""
        block, prefix = self.block, self.prefix
        projection = ((f"{prefix}in_proj", block.sizes.projected),)
        output = ((f"{prefix}out_proj", block.hidden_size),)
        pieces = {f"{prefix}in_proj": block.projected}
        return [
            StoredLinear(self.projection, projection, axis=0, pieces=pieces),
            StoredLinear(self.output, output, axis=1),
        ]

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        prefix, params = self.prefix, self.params
        names = {name: view for each in self.linears() for name, view in each.views().items()}
        for name, tensor, axis, pieces in (
            ("in_proj.bias", self.projection_bias, 0, self.block.projected),
            ("conv1d.weight", params.conv_weight[:, None], 0, self.block.convolved),
            ("conv1d.bias", params.conv_bias, 0, self.block.convolved),
            ("dt_bias", params.dt_bias, 0, ()),
            ("A_log", params.a_log, 0, ()),
            ("D", params.skip, 0, ()),
            ("norm.weight", self.gate_norm, 0, ()),
            ("out_proj.bias", self.output_bias, None, ()),
        ):
            if tensor is not None:
                names[prefix + name] = Weight(tensor, axis, pieces)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        biases = (self.projection_bias, self.output_bias)
        return tensors_of(self.projection, self.output, *biases, *self.params, self.gate_norm)

    def decode(
        self,
        row: DecodeLanes,
        residual: Residual,
        next_norm: NextNorm,
        states: Mapping[str, Tensor],
        launch: DecodeLaunch,
    ) -> Residual:
        """Run the block on `row`'s tokens: three kernels, or four with several groups.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place except for its squares. `states` are the layer's, by name: each token leaves an entry.
        """
        block, sizes = self.block, self.block.sizes
        bias = self.projection_bias
        call = launch.call(
            "mamba_in", residual, self.projection, row.slot, eps=block.norm_eps, bias=bias
        )
        projected = linear(call, STORE)
        kept, pdl = (states[RING], states[STATE]), launch.pdl
        lanes, tokens = (row.slot, row.position), launch.tokens_per_row
        squares = None
        if sizes.groups == 1:
            inputs, squares = mamba2_decode_gated(
                projected,
                *kept,
                *lanes,
                self.params,
                self.gate_norm,
                sizes,
                tokens_per_row=tokens,
                pdl=pdl,
            )
            squares = self._squares_of_all(squares, launch.reduce)
        else:
            inputs = mamba2_norm(
                mamba2_decode(
                    projected, *kept, *lanes, self.params, sizes, tokens_per_row=tokens, pdl=pdl
                ),
                projected[:, : sizes.inner],
                self.gate_norm,
                row.slot,
                groups=sizes.groups,
                eps=block.gate_eps,
                out_dtype=projected.dtype,
                pdl=pdl,
            )
        call = launch.call("mamba_out", inputs, self.output, row.slot, bias=self.output_bias)
        call = call._replace(squares_TN=squares, eps=block.gate_eps)
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
        block, sizes, pdl = self.block, self.block.sizes, scratch.launch.pdl
        starts = scratch.launch.chunk_starts(lanes)
        projected = scratch.take(sizes.projected)
        scratch.product(scratch.h, self.projection, self.projection_bias, out=projected)
        parts = [sizes.inner, sizes.channels, sizes.heads]
        z, inputs, dt = torch.split(projected, parts, dim=1)
        xbc = causal_conv_chunk(
            inputs,
            self.params.conv_weight,
            self.params.conv_bias,
            states[RING],
            lanes.slot,
            lanes.position,
            query_start_P1=starts,
            activation="silu",
            out=scratch.take(sizes.channels, after=sizes.projected),
            pdl=pdl,
        )
        scanned = mamba2_prefill(
            xbc,
            dt,
            states[STATE],
            lanes.slot,
            lanes.position,
            self.params,
            sizes,
            query_start=starts,
            out=scratch.take(sizes.inner, after=sizes.projected + sizes.channels),
            pdl=pdl,
        )
        add_chunk_product(
            self._norm_chunk(scanned, z, lanes.slot, scratch.launch),
            self.output,
            self.output_bias,
            stream,
            next_norm,
            lanes.slot,
            scratch,
            eps=block.norm_eps,
            out=scratch.h,
        )

    def _norm_chunk(
        self, scanned: Tensor, z: Tensor, slot: Tensor, launch: PrefillLaunch
    ) -> Tensor:
        """The gated norm of a chunk's lanes, in place."""
        block = self.block
        if block.norm_ranks == 1:
            return mamba2_norm(
                scanned,
                z,
                self.gate_norm,
                slot,
                groups=block.sizes.groups,
                eps=block.gate_eps,
                out_dtype=scanned.dtype,
                out=scanned,
                pdl=launch.pdl,
            )
        gated = silu(z.to(torch.float32, copy=True), inplace=True).mul_(scanned)
        own = torch.linalg.vector_norm(gated, dim=1).square()
        squares = self._squares_of_all(own[None], launch.reduce)
        factor = torch.rsqrt(squares[0] / block.sizes.inner + block.gate_eps)
        return scanned.copy_(gated.mul_(factor[:, None]).mul_(self.gate_norm))

    def _squares_of_all(self, squares_TN: Tensor, reduce: Reduce | None) -> Tensor:
        """Sums of squares averaged over the ranks of the one group, `[1, N]`; `squares_TN` where
        one rank has all. Divided by this rank's number of values they give the mean over all ranks.
        """
        ranks = self.block.norm_ranks
        if ranks == 1:
            return squares_TN
        assert reduce is not None, f"{ranks=} and nowhere to meet"
        return (reduce(squares_TN.sum(0)[:, None]) / ranks).view(1, -1)
