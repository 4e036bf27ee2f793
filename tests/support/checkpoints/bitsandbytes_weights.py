"""Linears as bitsandbytes stores them, and the weights that they stand for, by plain formulae."""

from __future__ import annotations

import json

import torch
from torch import Tensor

# The 16 numbers of NF4, rounded: the files bring their own.
NF4 = (-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56)
NF4 = (*NF4, 0.72, 1.0)


def int8_tensors(M: int, K: int, size: float) -> tuple[dict[str, Tensor], Tensor]:
    """LLM.int8: codes, and the largest magnitude of each row."""
    codes = torch.randint(-127, 128, (M, K), dtype=torch.int8)
    largest = size * (0.5 + torch.rand(M))
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0).byte()}
    return tensors, codes.float() * largest[:, None] / 127


def four_bit_tensors(
    M: int, K: int, size: float, *, nested: bool, block: int = 64, dtype: str = "float32"
) -> tuple[dict[str, Tensor], Tensor]:
    """NF4 with a scale per block of values, or with scales in 8 bits that have scales."""
    count = M * K
    codes = torch.randint(0, 16, (-(-count // 2) * 2,), dtype=torch.uint8)
    blocks = -(-count // block)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": dtype, "shape": [M, K]}
    table = torch.tensor(NF4)
    if nested:
        coded = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        map_, outer = torch.linspace(-1, 1, 256), size * torch.rand(-(-blocks // 256)) / 2
        scales = map_[coded.long()] * outer.repeat_interleave(256)[:blocks] + size
        beside = {"absmax": coded, "nested_absmax": outer, "nested_quant_map": map_}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": size}
    else:
        scales = size * (0.5 + torch.rand(blocks))
        beside = {"absmax": scales}
    meant = table[codes[:count].long()] * scales.repeat_interleave(block)[:count]
    packed = (codes[::2] << 4 | codes[1::2])[:, None]
    text = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    beside |= {"quant_map": table, "quant_state.bitsandbytes__nf4": text}
    tensors = {"weight": packed} | {f"weight.{end}": each for end, each in beside.items()}
    return tensors, meant.reshape(M, K)
