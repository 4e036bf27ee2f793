"""The bytes that a chunk of a policy must read: those of the prefix's model once, and of the expert
once for the state and once for each denoising step.

Where the expert and the KV that a step reads fit together into a GPU's L2 cache, they count once in
a chunk. The prefix has hundreds of positions, so that its products may take longer than reading its
weights: `prefix_tflop` says how much they multiply.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from graphengine.models.policies import PolicyConfig
from graphengine.models.states import Paged
from graphengine.policies.weights import PolicyWeights, Projection

_BEFORE_KV = re.compile(r"input_layernorm|[qkv]_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBytes:
    """The bytes that a chunk reads.

    prefix   weights of the prefix's model: of its last layer only queries, keys and values, and no
             embedding, of which a chunk reads a few rows
    state    weights for the state: its projection, and those of the expert up to the last KV
    expert   weights of one denoising step: all layers, and the projections of actions
    kv       KV that a denoising step reads
    steps    denoising steps
    l2       bytes of the device's L2 cache; None where it is not known
    prefix_tflop  10**12 operations of the prefix's linears
    """

    prefix: int
    state: int
    expert: int
    kv: int
    steps: int
    l2: int | None
    prefix_tflop: float

    @classmethod
    def of(
        cls,
        config: PolicyConfig,
        prefix_tokens: int,
        steps: int,
        dtype: torch.dtype,
        l2: int | None,
    ) -> Self:
        """The bytes of a chunk after a prefix of this many positions."""
        weights = PolicyWeights.allocate(config, device="meta", dtype=dtype)
        tensors = weights.named()
        prefix = _layers(tensors, "prefix", config.prefix.num_layers)
        expert = _layers(tensors, "expert", config.expert.num_layers)
        H = config.expert.hidden_size
        # The half of `joined` that reads time is left out: its product is computed once.
        joined = weights.joined.weight[:, :H].numel() * dtype.itemsize
        of_actions = sum(map(_nbytes, (weights.action, weights.mixed, weights.velocity)))
        values = sum(
            math.prod(state.block_shape(1))
            for layer in config.prefix.states
            for state in layer
            if isinstance(state, Paged)
        )
        seen = prefix_tokens + 1 + config.horizon
        return cls(
            prefix=prefix.kept,
            state=expert.kept + _nbytes(weights.state),
            expert=expert.whole + joined + of_actions,
            kv=seen * values * dtype.itemsize,
            steps=steps,
            l2=l2,
            prefix_tflop=2 * prefix_tokens * prefix.kept / dtype.itemsize / 1e12,
        )

    @property
    def fits_l2(self) -> bool:
        """Whether all denoising steps may read the expert and the KV from L2."""
        return self.l2 is not None and self.expert + self.kv <= self.l2

    @property
    def expert_reads(self) -> int:
        """How often a chunk's denoising steps read the expert from memory."""
        return 1 if self.fits_l2 else self.steps

    @property
    def denoiser(self) -> int:
        """Bytes of all denoising steps."""
        return self.expert_reads * (self.expert + self.kv)

    @property
    def chunk(self) -> int:
        """Bytes of a chunk."""
        return self.prefix + self.state + self.denoiser


class _Layers(NamedTuple):
    """Bytes of a model's layers and final norm, and of the part up to the last layer's KV."""

    whole: int
    kept: int


def _layers(tensors: Mapping[str, Tensor], model: str, layers: int) -> _Layers:
    """Sum up the policy's tensors of this model."""
    prefix, last = f"{model}.layers.", f"{model}.layers.{layers - 1}."
    whole = {
        name: tensor.nbytes
        for name, tensor in tensors.items()
        if name.startswith((prefix, f"{model}.norm."))
    }
    kept = [
        size
        for name, size in whole.items()
        if name.startswith(prefix) and (not name.startswith(last) or _BEFORE_KV.search(name))
    ]
    return _Layers(sum(whole.values()), sum(kept))


def _nbytes(projection: Projection) -> int:
    return projection.weight.nbytes + projection.bias.nbytes
