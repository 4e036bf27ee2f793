"""Norms of the stream: RMSNorm, LayerNorm, and norms on both sides of a block, as Gemma has them.

A block reads the residual stream after a norm. Where another norm follows it, the stream gets the
normed output: x += post(block(norm(x))). Experts beside a feed-forward have norms of their own:
the block is then

    after(experts(before(x))) + shared_after(feed-forward(norm(x)))

where the router reads x / rms(x) times a scale of its own, and each expert's weight has a factor.

Letters: N lanes, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.linear.residual import Product
from graphengine.kernels.norm_rope.norm import rms_norm
from graphengine.kernels.norm_rope.normed_sum import normed_sum
from graphengine.models.weights import Weight

NormKind = Literal["rms", "layer", "layer_biased", "layer_plain"]
"""RMSNorm; or LayerNorm without a bias, with one, or without weights too."""


class LayerNorm(NamedTuple):
    """The weights [H] of a LayerNorm that reads the stream."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class Sandwich(NamedTuple):
    """The weights [H] of the norm after a block, and of the one that reads the stream next.

    eps     of the first
    normed  whether the second norm exists; else the stream is read as it is, and `following` is all
            ones
    factor  `[1]`: factor of the stream between the two norms; None: none
    """

    post: Tensor
    following: Tensor
    eps: float
    normed: bool = True
    factor: Tensor | None = None


class NormsByKind(NamedTuple):
    """The weights [H] of two RMSNorms that read the stream: one of sound, one of text.

    Decode steps feed sound; a chunk of a prompt has lanes of both kinds (`LaneKinds`).
    """

    sound: Tensor
    text: Tensor


class LaneKinds(NamedTuple):
    """The lanes of a chunk by kind, as slots `[T]` in which lanes of the other kind are padded."""

    sound: Tensor
    text: Tensor


def lane_kinds(token_N: Tensor, slot_N: Tensor) -> LaneKinds:
    """Lanes with an embedding of their own are sound, lanes with a token text."""
    has_token_N = token_N >= 0
    return LaneKinds(slot_N.masked_fill(has_token_N, -1), slot_N.masked_fill(~has_token_N, -1))


ReadNorm = Tensor | LayerNorm | NormsByKind
"""The norm that reads the stream: an RMSNorm's weight, a LayerNorm, or an RMSNorm for each kind of
lane."""
NextNorm = ReadNorm | Sandwich
"""The norms between a block and the next one: the norm that reads the stream, or two norms."""


def plus_one(weight: Tensor) -> Tensor:
    """1 + weight in float32, as transformers computes it: the sum in 16 bits would lose the
    weight's last bits.
    """
    return weight.float() + 1.0


# Names of `ExpertNorms` in a checkpoint, below the layer's prefix.
_EXPERT_NAMES: Mapping[str, str] = {
    "router": "router.scale",
    "factor": "router.per_expert_scale",
    "before": "pre_feedforward_layernorm_2.weight",
    "after": "post_feedforward_layernorm_2.weight",
    "shared_after": "post_feedforward_layernorm_1.weight",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNorms:
    """The weights of the norms around experts and the feed-forward beside them.

    router        `[H]`, of the norm of the router's input. For computing it is divided by the
                  square root of H, in float32
    factor        `[E]`, factor of the weight of each chosen expert
    before        `[H]`, of the norm of the experts' input
    after         `[H]`, of the norm of their sum
    shared_after  `[H]`, of the norm of the feed-forward's output
    """

    router: Tensor
    factor: Tensor
    before: Tensor
    after: Tensor
    shared_after: Tensor

    @classmethod
    def empty(cls, hidden: int, experts: int, *, device: str, dtype: torch.dtype) -> ExpertNorms:
        """Uninitialised weights; `device="meta"` allocates nothing."""
        sizes = {name: experts if name == "factor" else hidden for name in _EXPERT_NAMES}
        return cls(
            **{name: torch.empty(n, device=device, dtype=dtype) for name, n in sizes.items()}
        )

    def to_compute_with(self) -> ExpertNorms:
        """These weights, with the router's divided by the square root of H."""
        return replace(self, router=self.router.float() * len(self.router) ** -0.5)

    def stored(self, prefix: str) -> dict[str, Weight]:
        """The tensors by name; every rank has all of them."""
        return {
            prefix + name: Weight(getattr(self, field)) for field, name in _EXPERT_NAMES.items()
        }

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return [getattr(self, each.name) for each in fields(self)]

    def router_input(
        self, x_NH: Tensor, slot: Tensor, *, eps: float, out: Tensor, pdl: bool
    ) -> Tensor:
        """Norm the stream for the router, into `out`, in its dtype."""
        return _normed(x_NH, self.router, slot, eps=eps, out=out, pdl=pdl)

    def expert_input(
        self, x_NH: Tensor, slot: Tensor, *, eps: float, out: Tensor, pdl: bool
    ) -> Tensor:
        """Norm the stream for the experts, into `out`, in its dtype."""
        return _normed(x_NH, self.before, slot, eps=eps, out=out, pdl=pdl)

    def summed(
        self,
        routed_NH: Tensor,
        shared_NH: Tensor,
        slot: Tensor,
        *,
        eps: float,
        out: Tensor | None = None,
        pdl: bool,
    ) -> Product:
        """Combine the experts' sum and the feed-forward's output into the block's output, `out`."""
        norms = self.after, self.shared_after
        return normed_sum(routed_NH, shared_NH, *norms, slot, eps=eps, out=out, pdl=pdl)


def _normed(
    x_NH: Tensor, norm_H: Tensor, slot: Tensor, *, eps: float, out: Tensor, pdl: bool
) -> Tensor:
    return rms_norm(x_NH, norm_H, slot, eps=eps, out_dtype=out.dtype, out=out, pdl=pdl)
