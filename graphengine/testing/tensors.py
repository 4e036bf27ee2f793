"""Tensors by name: read from what holds them, saved, put back, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from graphengine.buckets import StaticBuffers

Buffers = Mapping[str, torch.Tensor] | StaticBuffers | torch.nn.Module
"""Tensors by name: a mapping, static buffers by field, or a module's parameters and buffers."""


class Replayable(Protocol):
    """A captured graph: `torch.cuda.CUDAGraph`, `CapturedGraph`, or anything of that kind."""

    def replay(self) -> object: ...


def named_tensors(buffers: Buffers) -> dict[str, torch.Tensor]:
    """The tensors as `buffers` holds them now, none of them copied."""
    if isinstance(buffers, StaticBuffers):
        return {field.name: buffers[field.name] for field in buffers.fields}
    if isinstance(buffers, torch.nn.Module):
        return {**dict(buffers.named_parameters()), **dict(buffers.named_buffers())}
    return dict(buffers)


def returned_tensors(value: object, path: str = "returned") -> dict[str, torch.Tensor]:
    """The tensors in what a step returned, in nested tuples, lists and mappings; by their path."""
    return dict(_find_tensors(value, path))


def _find_tensors(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _find_tensors(item, f"{path}[{index}]")


def cuda_in_use() -> bool:
    """Whether this process has used CUDA already; asking does not start it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def wait_for_device() -> None:
    """Wait for all streams of the current CUDA device, where CUDA is in use."""
    if cuda_in_use():
        torch.cuda.synchronize()


def save(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, complete when this returns."""
    wait_for_device()
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    wait_for_device()
    return copies


def restore(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Write what `save` returned back in place, complete when this returns."""
    wait_for_device()
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    wait_for_device()


def run_and_wait(step: Callable[[], object]) -> object:
    """Call `step` behind, and before, all other work of the device; what it returns."""
    wait_for_device()
    result = step()
    wait_for_device()
    return result


def differing(
    expected: torch.Tensor, actual: torch.Tensor, *, rtol: float = 0.0, atol: float = 0.0
) -> torch.Tensor:
    """bool, of the tensors' shape: where they differ.

    Without a tolerance bits are compared: a NaN equals itself and 0.0 is not -0.0. With one,
    |expected - actual| may be up to atol + rtol * |expected|, and every NaN equals every other.
    """
    if (rtol or atol) and (expected.is_floating_point() or expected.is_complex()):
        return ~torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    if expected.is_complex():
        pairs = torch.view_as_real(expected), torch.view_as_real(actual)
        return differing(*pairs).any(-1)
    return _bits(expected) != _bits(actual)


def describe_difference(
    name: str,
    expected: torch.Tensor,
    actual: torch.Tensor,
    wrong: torch.Tensor,
    *,
    sides: tuple[str, str],
) -> str:
    """The first element where `wrong` is True, what each side has there, and how many there are.

    `sides` says whose values `expected` and `actual` are.
    """
    place = tuple(int(index) for index in wrong.nonzero()[0])
    row = f"row {place[0]}, element {list(place)}" if place else "its only element"
    count = int(wrong.sum())
    return (
        f"{name} ({describe(expected)}), first at {row}: {sides[0]} {_show(expected[place])}, "
        f"{sides[1]} {_show(actual[place])}; {count} of {wrong.numel()} elements differ"
    )


def describe(tensor: torch.Tensor) -> str:
    """Type and shape, as in "float32 [8, 4]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()])


def _show(element: torch.Tensor) -> str:
    """A value, and its bits where printing does not tell all: two NaNs may differ."""
    value = element.item()
    if isinstance(value, float) and value != value:
        return f"nan ({int(_bits(element).item()):#x})"
    return repr(value)
