"""Lanes, live and padded, and the checks and outputs that all kernel wrappers share.

A launch has N lanes: a request's row in decode, one token of a chunk in prefill. `slot_N` (int32,
on the device) holds the slot that a lane works for, or -1 for a padded lane. Kernels read only the
slot of a padded lane and write nothing for it, and it cannot alter the bits of a live lane. Only
the device knows how many lanes are live.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by item size in bytes. Viewed as one, values of any dtype are copied bit for bit.
"""


def check_int32(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless every tensor is int32: kernels read them through bare pointers."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, not {tensor.dtype}")


def check_lanes(lanes: int, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless every tensor is int32 [lanes] and dense."""
    check_int32(**tensors)
    for name, tensor in tensors.items():
        if tensor.shape != (lanes,) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a dense [{lanes}], not {tuple(tensor.shape)}")


def check_rows(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless every tensor is a float matrix with dense rows, however far apart."""
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or 0 in tensor.shape or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be a matrix with dense rows, not {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, not one of {FLOAT_DTYPES}")


def check_vector(name: str, tensor: torch.Tensor, length: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless `tensor` is a dense `dtype` [length]."""
    if tensor.shape != (length,) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a dense {dtype} [{length}], not {tensor.dtype} {tuple(tensor.shape)}"
        )


def check_table(name: str, table: torch.Tensor, slots: int, dims: int) -> None:
    """Raise ValueError unless `table` is a dense int32 of `dims` dimensions, the first [slots]."""
    shape, dtype = tuple(table.shape), table.dtype
    if dtype != torch.int32 or len(shape) != dims or shape[0] != slots or not table.is_contiguous():
        raise ValueError(
            f"{name} must be a dense int32 of {dims} dimensions for {slots} slots, "
            f"not {dtype} {shape}"
        )


def check_weight(name: str, weight: torch.Tensor, length: int) -> None:
    """Raise ValueError unless `weight` is a dense vector [length] of any float dtype."""
    if weight.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be one of {FLOAT_DTYPES}, not {weight.dtype}")
    check_vector(name, weight, length, weight.dtype)


def output_rows(
    out: torch.Tensor | None, shape: Sequence[int], *, dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    """Return `out`, which must be a `dtype` matrix of `shape` with dense rows, or a new one.

    A new one is uninitialised and on `like`'s device; its padded lanes stay uninitialised.
    """
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype is {dtype}, not one of {FLOAT_DTYPES}")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if out.shape != tuple(shape) or out.dtype != dtype or out.stride(-1) != 1:
        raise ValueError(
            f"out must be {dtype} {list(shape)} with dense rows, not {out.dtype} "
            f"{list(out.shape)} with strides {out.stride()}"
        )
    return out


def live_lanes(slot_N: torch.Tensor) -> torch.Tensor:
    """Indices of the live lanes, for references: on a GPU this waits for the device."""
    return torch.nonzero(slot_N >= 0).squeeze(1)


def live_rows(slot_N: torch.Tensor) -> slice | torch.Tensor:
    """Index of the live lanes' rows, for references: a slice if the live lanes come first.

    In most steps they do. A slice yields a view, so the picked rows must not be written by
    accident.
    """
    slots = slot_N.tolist()
    count = sum(slot >= 0 for slot in slots)
    return slice(count) if min(slots[:count], default=0) >= 0 else live_lanes(slot_N)


def write_rows(table: torch.Tensor, slot_N: torch.Tensor, rows: torch.Tensor) -> None:
    """`table[slot] = row` for each live lane and its row; no two lanes have one slot.

    torch's own scatters have no padded lanes.
    """
    slot_S = torch.arange(len(table), dtype=torch.int32, device=table.device)
    is_own_SN = slot_S[:, None] == slot_N
    # The first lane of a slot, or any.
    row = rows.index_select(0, is_own_SN.to(torch.int32).argmax(dim=1))
    written = is_own_SN.any(dim=1).view(-1, *[1] * (table.dim() - 1))
    table.copy_(torch.where(written, row, table))


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum of each row of a matrix, for references: its bits do not depend on the other rows.

    torch splits a single long row among threads, but never one of two.
    """
    return torch.cat((x, x)).sum(dim=1)[: len(x)] if len(x) == 1 else x.sum(dim=1)
