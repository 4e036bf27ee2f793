"""Results of torch's functions for tensors without memory, by rules of our own.

Torch computes the shapes of such results in Python. The first of these computations imports its
compiler, which takes a second, more than all else that an engine does before it loads weights. So
the functions that steps use most have a rule here; torch itself answers for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Functions of tensors and numbers that compute each element by itself.
_COMPARISONS = ("__eq__", "__ne__", "eq", "ne", "ge", "gt", "le", "lt")
_ELEMENTWISE = ("__and__", "__or__", "__invert__", "__add__", "__mul__", "add", "mul")
_IN_PLACE = ("add_", "mul_")


def known_result(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
    """The result of a call whose tensors have no memory; None: there is no rule for it."""
    out = options.get("out")
    rule = _RULES.get(func)
    if rule is None and out is None:
        return None
    if any(isinstance(each, Tensor) and not each.is_meta for each in (*args, out)):
        return None
    if isinstance(out, Tensor):
        return out
    return None if rule is None else rule(*args, **options)


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _like(tensor: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor | None:
    dense = tensor.is_contiguous() and not options
    return _new(tensor.shape, dtype or tensor.dtype) if dense else None


def _rolled(tensor: Tensor, shifts: int, dims: int | None = None) -> Tensor | None:
    return _like(tensor)


def _elements(*values: Any) -> list[int] | None:
    """The shape of results by element; None unless the tensors are dense, with as many axes."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(each.dim() != tensors[0].dim() or not each.is_contiguous() for each in tensors):
        return None
    sizes = [{*axis} - {1} for axis in zip(*(each.shape for each in tensors), strict=True)]
    return None if any(len(size) > 1 for size in sizes) else [max({1} | size) for size in sizes]


def _compared(*values: Any) -> Tensor | None:
    shape = _elements(*values)
    return None if shape is None else _new(shape, torch.bool)


def _combined(*values: Any) -> Tensor | None:
    shape = _elements(*values)
    if shape is None:
        return None
    dtype = values[0].dtype if len(values) == 1 else torch.result_type(*values)
    return _new(shape, dtype)


def _changed(tensor: Tensor, *values: Any) -> Tensor:
    return tensor


def _chosen(condition: Tensor, *values: Any) -> Tensor | None:
    shape = _elements(condition, *values)
    return None if shape is None or len(values) != 2 else _new(shape, torch.result_type(*values))


def _counted(end: Any, *, dtype: torch.dtype = torch.int64, **options: Any) -> Tensor | None:
    on_meta = torch.device(options.get("device", "cpu")).type == "meta"
    return _new([end], dtype) if on_meta and isinstance(end, int) else None


def _batched(first: Tensor, second: Tensor) -> Tensor | None:
    return _new([*first.shape[:-1], second.shape[-1]], first.dtype)


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first, *others = tensors
    if dim or any(each.dtype != first.dtype for each in others) or not first.is_contiguous():
        return None
    return _new([sum(len(each) for each in tensors), *first.shape[1:]], first.dtype)


def _named(names: Sequence[str], rule: Callable[..., Tensor | None]) -> dict[Any, Any]:
    """The rule for torch's functions, and its tensors' methods, of these names."""
    owners = (torch, Tensor)
    return {
        getattr(owner, name): rule for name in names for owner in owners if hasattr(owner, name)
    }


_RULES: Mapping[Any, Callable[..., Tensor | None]] = {
    **_named(("empty_like", "zeros_like"), _like),
    **_named(("roll",), _rolled),
    **_named(_COMPARISONS, _compared),
    **_named(_ELEMENTWISE, _combined),
    **_named(_IN_PLACE, _changed),
    **_named(("bmm", "mm"), _batched),
    torch.where: _chosen,
    torch.arange: _counted,
    torch.cat: _joined,
}
