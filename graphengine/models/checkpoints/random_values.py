"""Random values of a tensor, determined by its name, its shape and a seed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

WEIGHT_SCALE = 0.02
"""Standard deviation of values around 0."""
NORM_SCALE = 0.1
"""Standard deviation of norm weights around 1."""
SEED = 0


def generator_of(name: str, device: torch.device | str, seed: int = SEED) -> torch.Generator:
    """A new generator, seeded by `name` and `seed`."""
    generator = torch.Generator(device)
    generator.manual_seed(seed + zlib.crc32(name.encode()))
    return generator


def random_values(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = SEED,
) -> Tensor:
    """A new tensor of a float dtype: around 1 in norms, and around 0 in all others.

    The values depend on the kind of device: a CPU's generator draws other values than a GPU's.
    """
    drawn = torch.empty(tuple(shape), dtype=dtype, device=device)
    drawn.normal_(0.0, WEIGHT_SCALE, generator=generator_of(name, device, seed))
    if "norm" in name and drawn.ndim == 1:
        drawn.mul_(NORM_SCALE / WEIGHT_SCALE).add_(1.0)
    return drawn
