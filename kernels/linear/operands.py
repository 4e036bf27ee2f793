"""Operands that kernels get as one argument: the stream that a product is added to, or its
substitute, and the sampler of logits.

Kernels of dense and packed linears, in Triton and Gluon, and those of experts take them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from graphengine.kernels.linear.residual import Residual


class ResidualArgs(NamedTuple):
    """The residual stream that a product is added to, and its outputs (`residual.Residual`)."""

    x: torch.Tensor
    next_norm: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor


class KeepingArgs(NamedTuple):
    """`ResidualArgs`, and where the stream is also stored (`residual.StreamCopy`)."""

    x: torch.Tensor
    next_norm: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor
    kept: torch.Tensor
    kept_stride: int
    kept_scale: float


class ProductArgs(NamedTuple):
    """In place of a stream: x becomes the product itself (`residual.Product`)."""

    x: torch.Tensor
    squares: torch.Tensor


class SumArgs(NamedTuple):
    """In place of a stream: x, float32 [N, H], becomes the sum alone."""

    x: torch.Tensor


StreamArgs = ResidualArgs | KeepingArgs
# A kernel tells them apart by their number of fields: it cannot compare a tuple with None in it
# with None.
STREAM_FIELDS = tl.constexpr(len(ResidualArgs._fields))
KEEPING_FIELDS = tl.constexpr(len(KeepingArgs._fields))


def stream_args(residual: Residual, next_norm: torch.Tensor) -> StreamArgs:
    """The stream as a kernel's operand."""
    args = ResidualArgs(residual.x, next_norm, residual.scaled, residual.squares)
    if residual.kept is None:
        return args
    rows, scale = residual.kept
    return KeepingArgs(*args, rows, rows.stride(0), float(scale))


class SamplerArgs(NamedTuple):
    """The fast sampler's inputs for each slot, and its outputs, the best of each tile."""

    position: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    stop_ids: torch.Tensor
    min_len: torch.Tensor
    best: torch.Tensor
    health: torch.Tensor


class CappedSamplerArgs(NamedTuple):
    """`SamplerArgs` for logits with a soft cap."""

    position: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    stop_ids: torch.Tensor
    min_len: torch.Tensor
    best: torch.Tensor
    health: torch.Tensor
    cap: float


class CapArgs(NamedTuple):
    """In place of a sampler: logits with a soft cap are stored."""

    cap: float


LogitsArgs = SamplerArgs | CappedSamplerArgs | CapArgs
SAMPLER_FIELDS = tl.constexpr(len(SamplerArgs._fields))
