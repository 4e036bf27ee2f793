"""Fingerprints: a few digits that identify weights, on any device and in any file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from graphengine.kernels.core.lanes import BITS
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.models.weights import StoredLinear, StoredWeights

_SAMPLES = 1024


def fingerprint(weights: StoredWeights) -> str:
    """Fingerprint of the configuration and of up to 1,024 elements of each weight."""
    packed = [
        (f"{name} {index}", tensor)
        for name, linear in packed_linears(weights).items()
        if isinstance(linear.weight, PackedWeight)
        for index, tensor in enumerate(linear.weight.tensors)
    ]
    return fingerprint_of(weights.config, [*sorted(weights.named().items()), *packed])


def packed_linears(weights: StoredWeights) -> dict[str, StoredLinear]:
    """The linears with packed weights, under names made for this, sorted by name."""
    named = {
        f"{linear.parts[0][0]}{'' if linear.stack is None else linear.stack.expert}": linear
        for linear in weights.linears()
        if isinstance(linear.weight, PackedWeight)
    }
    return dict(sorted(named.items()))


def fingerprint_of(config: object, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """16 hexadecimal digits for a configuration and tensors by name. Each tensor may be freed once
    the next one is taken from the iterable.
    """
    digest = hashlib.sha256(repr(config).encode())
    samples: list[Tensor] = []
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.flatten()
        some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        samples.append(some.to(torch.float32, copy=True))
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def updated_fingerprint(before: str, config: object, values: Mapping[str, Tensor]) -> str:
    """Fingerprint after an update with these values, made from the sum of each tensor's bits and
    from samples.

    before  the fingerprint before the update; "" if the update has all weights
    """
    named = sorted(values.items())
    sums = [int(_bits(value).sum()) for _, value in named]
    samples = fingerprint_of(config, named) if named else ""
    return hashlib.sha256(f"{before} {samples} {sums}".encode()).hexdigest()[:16]


def _bits(tensor: Tensor) -> Tensor:
    """A weight's values as integers, whose sum does not depend on the order."""
    return tensor.contiguous().view(BITS[tensor.element_size()])
