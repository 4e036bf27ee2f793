"""The runs of an inner decoder in a captured step, one position after the other.

Letters: N lanes, S slots, K codes of a frame, V codes of a codebook, H the model's hidden size, I
the inner decoder's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import AddResidual
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import attention_split
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks.gqa import AttentionWeights
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.decoder_layer import decode_layer
from graphengine.models.inner.weights import InnerWeights
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import LinearPlans


class InnerSteps:
    """An inner decoder that is ready to run, with its cache.

    cache  `InnerDecoder.cache_shape(slots)`, in the model's dtype. A step writes each position
           before it reads it, so nothing of an earlier step is read, and nothing need be cleared
    slots  S
    """

    def __init__(self, weights: InnerWeights, cache: Tensor, slots: int) -> None:
        self.weights, self.config = weights, weights.config
        config, device = self.config, cache.device
        self._cache = cache
        first = torch.arange(slots, dtype=torch.int32, device=device)[:, None] * config.blocks
        block = torch.arange(config.blocks, dtype=torch.int32, device=device)
        # Block 0 belongs to no slot.
        self._block_table = 1 + first + block
        place = torch.arange(config.steps, dtype=torch.int32, device=device)
        self._positions = place[:, None].repeat(1, slots)
        sizes: dict[str, Any] = {
            "head_dim": config.attention.table_dim,
            "max_seq_len": config.steps,
            "device": device,
        }
        still = config.attention.nope
        self.tables = RopeTables.still(**sizes) if still else RopeTables.of(config.rope, **sizes)
        self._layers = [weights.layers_of(run) for run in range(config.runs)]

    def launch_with(self, launch: DecodeLaunch, plans: LinearPlans) -> DecodeLaunch:
        """How the runs are launched; `launch` is the model's."""
        config = self.config
        split = attention_split(
            plans.family, config.attention.head_dim, self.weights.norm.dtype, config.steps
        )
        return replace(
            launch,
            plans=plans,
            split_tokens=split,
            tokens_per_row=1,
            tree=None,
            routes=None,
            rope_shift=None,
            adapters=None,
        )

    def lanes_at(self, place: int, slot_N: Tensor) -> DecodeLanes:
        """The lanes of these slots at a position; their tokens are not read."""
        check_lanes(slot_N.numel(), slot=slot_N)
        return DecodeLanes(slot_N, slot_N, self._positions[place, : slot_N.numel()])

    def begin(
        self,
        hidden: Residual | Tensor,
        eps: float,
        slot_N: Tensor,
        x_NI: Tensor,
        launch: DecodeLaunch,
    ) -> None:
        """Run position 0, which reads the model's output: only its keys and values are left.

        hidden  the model's stream, scaled for its final norm of epsilon `eps`, or `[N, H]` after it
        x_NI    float32, zeros in live lanes; overwritten
        """
        lanes = self.lanes_at(0, slot_N)
        residual = self._projected(0, hidden, eps, slot_N, x_NI, launch)
        last = len(self.weights.layers) - 1
        residual = self._through(0, last, lanes, residual, launch)
        # Nothing after the last layer's keys and values is read.
        attention = self.weights.layers[last].attention
        assert isinstance(attention, AttentionWeights), f"{attention=}"
        attention.attend_rows(
            attention.qkv_product(residual, slot_N, launch),
            lanes,
            self._cache[last],
            self._block_table,
            self.tables,
            launch,
        )

    def run(
        self, place: int, embedded_NH: Tensor, slot_N: Tensor, x_NI: Tensor, launch: DecodeLaunch
    ) -> Residual:
        """Run a later position on the embeddings of code `place` - 1: its output, scaled for the
        final norm.

        x_NI  float32, zeros in live lanes; updated in place
        """
        lanes = self.lanes_at(place, slot_N)
        residual = self._projected(place, embedded_NH, 0.0, slot_N, x_NI, launch)
        return self._through(place, len(self.weights.layers), lanes, residual, launch)

    def run_own(
        self,
        place: int,
        hidden: Residual | Tensor,
        eps: float,
        slot_N: Tensor,
        x_NI: Tensor,
        launch: DecodeLaunch,
    ) -> Residual:
        """Run the position that gives code `place`, 1 to K - 1, with the weights of this run: its
        output. `hidden` and `eps` as in `begin`.

        x_NI  float32, the embeddings of code `place` - 1 in live lanes; updated in place
        """
        run = place - 1
        lanes = self.lanes_at(run, slot_N)
        residual = self._projected(run, hidden, eps, slot_N, x_NI, launch)
        return self._through(run, len(self.weights.layers), lanes, residual, launch)

    def _through(
        self, run: int, count: int, lanes: DecodeLanes, residual: Residual, launch: DecodeLaunch
    ) -> Residual:
        """The stream after a run's first `count` layers, scaled for the norm that follows them."""
        layers = self._layers[run]
        norms = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        for index, (layer, norm) in enumerate(zip(layers[:count], norms, strict=False)):
            residual = decode_layer(
                layer,
                norm,
                lanes,
                residual,
                self._cache[index],
                self._block_table,
                self.tables,
                launch,
            )
        return residual

    def head(
        self, place: int, residual: Residual, slot_N: Tensor, launch: DecodeLaunch
    ) -> LinearCall:
        """The product that gives the logits `[N, V]` of code `place`, 1 to K - 1, of the output of
        this position.
        """
        weight, eps = self.weights.heads[place - 1], self.config.norm_eps
        output = residual if self.config.names.norm else residual.scaled
        return launch.call("head", output, weight, slot_N, eps=eps)

    def _projected(
        self,
        run: int,
        inputs: Residual | Tensor,
        eps: float,
        slot_N: Tensor,
        x_NI: Tensor,
        launch: DecodeLaunch,
    ) -> Residual:
        """Add a run's projection of `inputs` to its stream."""
        stream = Residual(
            x_NI,
            torch.empty_like(x_NI, dtype=self.weights.norm.dtype),
            x_NI.new_empty(1, x_NI.shape[0]),
        )
        weights = self.weights
        call = launch.call(
            "projection",
            inputs,
            weights.projection_of(run),
            slot_N,
            eps=eps,
            bias=weights.projection_bias,
        )
        return linear(call, AddResidual(stream, self._layers[run][0].input_norm))
