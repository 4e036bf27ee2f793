"""Fills a step's inputs so that they differ from seed to seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from graphengine.testing.tensors import Buffers, describe, is_static

Fill = Callable[[int, int | None], object]
"""Called with a seed and a live size (None without live sizes): writes a step's inputs."""

# Largest number of values that are drawn from: sums of two of them fit in an int64.
_MOST_VALUES = 2**62


def drawing(
    buffers: Buffers,
    tensors: Mapping[str, torch.Tensor],
    ranges: Mapping[str, range | None],
    seeds: Sequence[int],
) -> Fill:
    """A function that draws all of `tensors`, which `buffers` hold, once torch is seeded.

    ValueError for integers without an entry in `ranges`, and for a range that does not fit.
    """
    _check_ranges(tensors, ranges)
    pads = {}
    if is_static(buffers):
        pads = {field.name: field.pad for field in buffers.fields if field.owner == "host"}

    def fill(seed: int, live: int | None) -> None:
        for name, tensor in tensors.items():
            if name not in ranges:
                _draw_normal(tensor)
            elif (values := ranges[name]) is not None:
                _draw_integers(tensor, values, seeds.index(seed))
            if live is not None and name in pads and tensor.dim():
                tensor[live:] = pads[name]

    return fill


def _check_ranges(tensors: Mapping[str, torch.Tensor], ranges: Mapping[str, range | None]) -> None:
    if not isinstance(ranges, Mapping):
        raise ValueError(f"draw={ranges!r} is no mapping from names to ranges")
    if unknown := ranges.keys() - tensors.keys():
        raise ValueError(f"draw: no buffer {sorted(unknown)}, there are {', '.join(tensors)}")
    kept = {
        name: tensor for name, tensor in tensors.items() if tensor.numel() and not _is_real(tensor)
    }
    if missing := kept.keys() - ranges.keys():
        wanted = [name for name in kept if name in missing]
        named = ", ".join(f"{name} ({describe(kept[name])})" for name in wanted)
        count = 2 if kept[wanted[0]].dtype == torch.bool else 8
        raise ValueError(
            f"{named} would keep the values of now, so a graph that has a copy of them would pass: "
            f'say which are valid, as in draw={{"{wanted[0]}": range({count})}}, with None '
            "for what is constant or only written; or give `fill`"
        )
    for name, values in ranges.items():
        if values is not None:
            _check_range(name, tensors[name], values)


def _check_range(name: str, tensor: torch.Tensor, values: object) -> None:
    where = f"draw of {name!r} ({describe(tensor)})"
    if not isinstance(values, range):
        raise ValueError(f"{where}: {values!r} is neither a range nor None")
    if _is_real(tensor):
        raise ValueError(f"{where}: {values} is for integers; other numbers are drawn without it")
    if not values[1:]:
        raise ValueError(f"{where}: {values} has less than 2 values, so that nothing would change")
    limits = (0, 1)
    if tensor.dtype != torch.bool:
        limits = torch.iinfo(tensor.dtype).min, min(torch.iinfo(tensor.dtype).max, 2**63 - 1)
    for value in (values[0], values[-1]):
        if not limits[0] <= value <= limits[1]:
            raise ValueError(f"{where}: {value} is not within {limits[0]} to {limits[1]}")


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _draw_normal(tensor: torch.Tensor) -> None:
    if not _is_real(tensor):
        return  # without an element
    if tensor.element_size() > 1:
        tensor.detach().normal_()
    else:  # none of torch's kernels draws numbers of one byte
        tensor.detach().copy_(torch.randn(tensor.shape, device=tensor.device))


def _draw_integers(tensor: torch.Tensor, values: range, place: int) -> None:
    """Draw values of the range; each element's value differs from one place to the next."""
    count = min((values[-1] - values[0]) // values.step + 1, _MOST_VALUES)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, tensor.shape, generator=generator, dtype=torch.int64)
    tensor.copy_(values[0] + (drawn + place) % count * values.step)
