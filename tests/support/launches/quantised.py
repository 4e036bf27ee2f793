"""Quantised weights of random codes, of every kind that the kernels serve."""

from __future__ import annotations

import torch

from graphengine.kernels.linear.packed import PackedWeight
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat, format_of

FORMATS: dict[str, tuple[WeightFormat, torch.dtype]] = {
    "e4m3": (WeightFormat("e4m3", 1, 0), torch.float32),
    "e4m3 of one scale": (WeightFormat("e4m3", 0, 0), torch.bfloat16),
    "e4m3 in blocks": (WeightFormat("e4m3", 128, 128), torch.float32),
    "int8": (WeightFormat("int8", 1, 0), torch.float16),
    "int8 with a zero a row": (WeightFormat("int8", 1, 0, True), torch.float32),
    "int8 in groups": (WeightFormat("int8", 1, 32, True), torch.bfloat16),
    "int4": (WeightFormat("int4", 1, 128), torch.bfloat16),
    "int4 with zeros": (WeightFormat("int4", 1, 64, True), torch.float16),
    "int4 in small groups": (WeightFormat("int4", 1, 32), torch.float32),
    "mxfp4": (WeightFormat("e2m1", 1, 32), torch.uint8),
    "nvfp4": (WeightFormat("e2m1", 1, 16), torch.float8_e4m3fn),
    "q4_1": (format_of("q4_1"), torch.float16),
    "q2_k": (format_of("q4_k", columns=16), torch.int8),
    "q4_k": (format_of("q4_k"), torch.int8),
    "q5_k": (format_of("q5_k"), torch.int8),
    "q6_k": (format_of("q6_k"), torch.int8),
    "int4 with minimums": (WeightFormat("int4", 1, 64, has_minimums=True), torch.bfloat16),
    "int8 in groups of 16": (WeightFormat("int8", 1, 16), torch.float32),
    "int8 with minimums of 16": (WeightFormat("int8", 1, 16, False, True, 256), torch.int8),
}
"""By name: a format, and the dtype of its scales."""
COMMON = [name for name, (kind, _) in sorted(FORMATS.items()) if kind.is_common]
"""Formats that all kernels take."""
SIGNED = ("int4 in small groups",)
"""Formats whose scales may be negative or 0, as in GGUF files."""


def random_quantised(name: str, M: int, K: int, *, seed: int = 0) -> QuantisedWeight:
    """A random weight of one of `FORMATS`; every code but NaN occurs, and the whole of NVFP4 is not
    1.
    """
    kind, dtype = FORMATS[name]
    random = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.uint8)

    codes = integers(0, 1 << kind.bits, M, K)
    if kind.code == "e4m3":
        codes[codes & 127 == 127] = 3
    if kind.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    groups, factors = kind.groups(M, K), None
    if kind.has_minimums:
        groups = (*groups, 2)
    if dtype == torch.uint8:
        scales = integers(118, 125, *groups)
    elif dtype == torch.int8:
        scales = integers(0, 256, *groups).view(torch.int8)
        blocks = (groups[0], -(-K // kind.block), *groups[2:])
        factors = (torch.rand(blocks, generator=random) / 4096).half()
    else:
        scales = (torch.rand(groups, generator=random) / 16 + 2**-7).to(dtype)
    if name in SIGNED:
        scales = scales * (integers(0, 3, *groups).to(dtype) - 1)
    zeros = integers(0, 1 << kind.bits, *groups) if kind.has_zeros else None
    whole = torch.tensor(0.7) if name == "nvfp4" else None
    return QuantisedWeight(kind, codes, scales, whole, zeros, factors=factors)


def to_device(weight: PackedWeight, device: str) -> PackedWeight:
    return PackedWeight(*(p.to(device) if isinstance(p, torch.Tensor) else p for p in weight))


def inputs_of(weight: torch.Tensor, lanes: int, dtype: torch.dtype) -> torch.Tensor:
    """Whose products with the weight are of order 1."""
    K = weight.shape[1]
    x = torch.randn(lanes, K, generator=torch.Generator().manual_seed(lanes))
    return (x / (weight.square().mean().sqrt() * K**0.5)).to(dtype)
