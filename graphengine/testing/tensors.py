"""Tensors by name: read from their owner, saved, restored, and compared bit by bit."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard

import torch

from graphengine.testing.arguments import require_end

if TYPE_CHECKING:
    from graphengine.buckets import StaticBuffers

Buffers: TypeAlias = "Mapping[str, torch.Tensor] | StaticBuffers | torch.nn.Module"
"""Tensors by name: a mapping, static buffers by field, or a module's parameters and buffers."""


class Replayable(Protocol):
    """A captured graph: `torch.cuda.CUDAGraph`, `CapturedGraph`, or anything of that kind."""

    def replay(self) -> object: ...


def is_static(buffers: object) -> TypeGuard[StaticBuffers]:
    """Whether `buffers` are StaticBuffers, whose module needs numpy and is not imported to ask."""
    static = sys.modules.get("graphengine.buckets.static")
    return static is not None and isinstance(buffers, static.StaticBuffers)


def named_tensors(buffers: Buffers) -> dict[str, torch.Tensor]:
    """The tensors that `buffers` holds now, not copied; ValueError for other objects."""
    if is_static(buffers):
        return {field.name: buffers[field.name] for field in buffers.fields}
    if isinstance(buffers, torch.nn.Module):
        return {**dict(buffers.named_parameters()), **dict(buffers.named_buffers())}
    return _of_mapping(buffers)


def _of_mapping(buffers: object) -> dict[str, torch.Tensor]:
    if not isinstance(buffers, Mapping):
        raise ValueError(
            f"the buffers are of type {type(buffers).__name__}: give tensors by name, such as "
            '{"x": x}, StaticBuffers or a torch.nn.Module'
        )
    for name, tensor in buffers.items():
        if not isinstance(name, str):
            raise ValueError(f"buffer {name!r} is named by a {type(name).__name__}, not by text")
        require_tensor(f"buffer {name!r}", tensor)
    return dict(buffers)


def require_tensor(what: str, value: object) -> None:
    """ValueError unless `value` is a tensor whose elements are in memory."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what} is of type {type(value).__name__}, not a torch.Tensor")
    if value.layout != torch.strided or value.is_meta:
        kind = "on the device meta" if value.is_meta else f"of the layout {value.layout}"
        raise ValueError(f"{what} ({describe(value)}) is {kind}: only dense ones can be compared")


def require_writable(tensors: Mapping[str, torch.Tensor]) -> None:
    """ValueError, with the name, for a tensor whose elements cannot be written one by one."""
    for name, tensor in tensors.items():
        if any(
            stride == 0 and size > 1
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            why = "expanded: many of its elements are one in memory"
        elif tensor.is_conj() or tensor.is_neg():
            why = "a lazy conjugate or negative of another tensor"
        elif tensor.is_inference() and not torch.is_inference_mode_enabled():
            why = "an inference tensor, which can be written inside of torch.inference_mode() only"
        else:
            continue
        raise ValueError(f"buffer {name!r} ({describe(tensor)}) is {why}")


def returned_tensors(value: object, path: str = "returned") -> dict[str, torch.Tensor]:
    """The tensors in what a step returned, by their path.

    They are looked for in nested tuples, lists, mappings and dataclasses; ValueError for an
    iterator, which would be used up by looking.
    """
    return dict(_find_tensors(value, path))


def _find_tensors(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        require_tensor(path, value)
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _find_tensors(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _find_tensors(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, Iterator):
        raise ValueError(f"{path} is a {type(value).__name__}: return a list or a tuple instead")


def outside_of(
    buffers: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors in `found` whose elements are not all in the memory of one buffer."""
    spans = [span(tensor) for tensor in buffers.values()]

    def inside(tensor: torch.Tensor) -> bool:
        first, end = span(tensor)
        return any(begin <= first and end <= stop for begin, stop in spans)

    return {name: tensor for name, tensor in found.items() if tensor.numel() and not inside(tensor)}


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of a tensor, and of the byte after its last."""
    if not tensor.numel():
        return 0, 0
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    last = sum(stride * (size - 1) for stride, size in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def cuda_in_use() -> bool:
    """Whether this process has used CUDA already; asking does not start it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def wait_for_device() -> None:
    """Wait for all streams of the current CUDA device, if CUDA is in use."""
    if cuda_in_use():
        torch.cuda.synchronize()


def save(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, complete when this returns."""
    wait_for_device()
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    wait_for_device()
    return copies


def restore(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Write the values from `save` back in place, complete when this returns."""
    wait_for_device()
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    wait_for_device()


def run_and_wait(step: Callable[[], object]) -> object:
    """Call `step` after all earlier and before all later work of the device; returns its result.

    ValueError for a generator function or an `async def`, as a call of it runs nothing.
    """
    wait_for_device()
    result = step()
    wait_for_device()
    require_end(result)
    return result


@contextmanager
def random_state_kept() -> Iterator[None]:
    """The block may seed torch's generators; afterwards they are as they were."""
    devices = [torch.cuda.current_device()] if cuda_in_use() else []
    with torch.random.fork_rng(devices):
        yield


def differing(
    expected: torch.Tensor, actual: torch.Tensor, *, rtol: float = 0.0, atol: float = 0.0
) -> torch.Tensor:
    """Where two tensors differ: bool, of their shape.

    Without a tolerance bits are compared: a NaN equals itself and 0.0 is not -0.0. With one,
    |expected - actual| may be up to atol + rtol * |expected|, and every NaN equals every other.
    """
    expected, actual = (tensor.resolve_conj().resolve_neg() for tensor in (expected, actual))
    if (rtol or atol) and (expected.is_floating_point() or expected.is_complex()):
        # Numbers of one byte have no comparison of their own.
        wider = torch.float32 if expected.element_size() == 1 else expected.dtype
        pair = actual.to(wider), expected.to(wider)
        return ~torch.isclose(*pair, rtol=rtol, atol=atol, equal_nan=True)
    if expected.is_complex():
        pair = torch.view_as_real(expected), torch.view_as_real(actual)
        return differing(*pair).any(-1)
    return bits(expected.contiguous()) != bits(actual.contiguous())


def require_repeatable(
    what: str,
    first: Mapping[str, torch.Tensor],
    second: Mapping[str, torch.Tensor],
    *,
    masks: Mapping[str, torch.Tensor] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """ValueError if two calls of `what` from the same buffers left other values in a tensor.

    `masks` say where tensors may differ. Names that only one call left are ignored.
    """
    for name in first.keys() & second.keys():
        if describe(first[name]) != describe(second[name]):
            continue
        wrong = differing(first[name], second[name], rtol=rtol, atol=atol)
        if masks and name in masks:
            wrong &= ~masks[name]
        if wrong.any():
            sides = "the first", "the second"
            text = describe_difference(name, first[name], second[name], wrong, sides=sides)
            raise ValueError(
                f"`{what}` is not repeatable, so nothing can be said about it: two calls, each "
                f"with the buffers as they were, differ in {text}. If it keeps state in a tensor "
                "that is not among the buffers, name that, too; if it draws random numbers from a "
                "generator of its own, let it seed that"
            )


def describe_difference(
    name: str,
    expected: torch.Tensor,
    actual: torch.Tensor,
    wrong: torch.Tensor,
    *,
    sides: tuple[str, str],
) -> str:
    """The first element where `wrong` is True, each side's value there, and how many differ.

    `sides` names the sources of `expected` and `actual`.
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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor as integers of the same width; for elements of up to 8 bytes."""
    return tensor.detach().view(_BITS[tensor.element_size()])


def _show(element: torch.Tensor) -> str:
    """A value, with its bits if printing does not show everything: two NaNs may differ."""
    value = element.item()
    if isinstance(value, float) and value != value:
        return f"nan ({int(bits(element).item()):#x})"
    return repr(value)
