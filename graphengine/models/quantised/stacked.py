"""gpt-oss's experts in MXFP4: read in the model's dtype, as this engine computes with them.

The experts of a layer are two tensors, with their rows where a tensor in 16 bits has columns:
`NAME_blocks` uint8 [E, M, K / 32, 16], two codes in a byte, the lower half first, and
`NAME_scales` uint8 [E, M, K / 32], exponents of 2 from -127.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from graphengine.models.checkpoint import Checkpoint, some
from graphengine.models.contract import Destinations

_BLOCK = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ENDS = ("_blocks", "_scales")


def stacked_names(checkpoint: Checkpoint, wanted: Destinations) -> dict[str, tuple[str, str]]:
    """Those of `wanted` that are stored as blocks and scales, with the names of both."""
    pairs = {name: (name + _ENDS[0], name + _ENDS[1]) for name in wanted}
    tensors = checkpoint.tensors
    return {
        name: pair
        for name, pair in pairs.items()
        if name not in tensors and any(each in tensors for each in pair)
    }


def check_stacked(checkpoint: Checkpoint, wanted: Mapping[str, Tensor]) -> None:
    """ValueError, with names and shapes, unless blocks and scales fit the destinations."""
    for name, target in wanted.items():
        experts, columns, rows = _sizes(target)
        if columns % _BLOCK:
            raise ValueError(
                f"{checkpoint.path} has {name}{_ENDS[0]}, whose blocks have {_BLOCK} columns: "
                f"{columns} columns are no multiple of it"
            )
        shape = (experts, rows, columns // _BLOCK)
        for end, expected in zip(_ENDS, ((*shape, _BLOCK // 2), shape), strict=True):
            info = checkpoint.tensors.get(name + end)
            if info is None:
                raise ValueError(f"{checkpoint.path} lacks {name}{end}")
            if info.shape != expected or info.dtype != torch.uint8:
                raise ValueError(
                    f"{checkpoint.path} has {name}{end} of {info.dtype} {list(info.shape)}, not "
                    f"of {torch.uint8} {list(expected)}"
                )


def fill_stacked(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Tensor],
    progress: Callable[[tuple[str, str]], None],
) -> None:
    """Fill destinations such as `ExpertsWeights` has them, one expert after the other.

    progress  called with the names of each pair of tensors

    Beside its destination the device holds one expert.
    """
    check_stacked(checkpoint, wanted)
    tensors = checkpoint.mapped()
    for name, target in wanted.items():
        blocks, scales = tensors[name + _ENDS[0]], tensors[name + _ENDS[1]]
        if bool((scales == 255).any()):
            raise ValueError(f"{checkpoint.path} has {name}{_ENDS[1]} of 255, which is no number")
        with torch.no_grad():
            for into, codes, exponents in zip(target, blocks, scales, strict=True):
                weight_MK = _values(codes.to(target.device), exponents.to(target.device))
                into.copy_(weight_MK.t().reshape(into.shape))
        progress((name + _ENDS[0], name + _ENDS[1]))


def say_stacked(checkpoint: Checkpoint, names: Mapping[str, tuple[str, str]]) -> str:
    """For a log: what is read in more bits than it is stored in."""
    return (
        f"{checkpoint.path}: experts in MXFP4 are read in the model's dtype, which takes the bytes "
        f"of that dtype: {some(sorted(names))}"
    )


def _sizes(target: Tensor) -> tuple[int, int, int]:
    """Experts, columns and rows of a destination [E, K, M...]."""
    if target.dim() < 3:
        raise ValueError(f"blocks and scales are not of a weight {list(target.shape)}")
    experts, columns, *rows = target.shape
    return experts, columns, math.prod(rows)


def _values(codes: Tensor, exponents: Tensor) -> Tensor:
    """Float32 [M, K] of an expert's codes [M, K / 32, 16]: exact."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(2)
    ones = torch.ones(exponents.shape, device=codes.device)
    scales = torch.ldexp(ones, exponents.int() - 127)
    return (table[halves.int()] * scales[:, :, None]).flatten(1)
