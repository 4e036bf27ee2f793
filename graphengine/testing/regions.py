"""Which elements of which buffers are padding."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import TYPE_CHECKING

import torch

from graphengine.testing.arguments import integer
from graphengine.testing.tensors import Buffers, describe, is_static

if TYPE_CHECKING:
    from graphengine.buckets import StaticBuffers

Region = slice | torch.Tensor | EllipsisType | tuple[slice | int | EllipsisType, ...]
"""Indexes a tensor: a slice of its lanes, a bool mask, a tuple such as `(..., slice(5, None))`."""


def padding_masks(
    buffers: Buffers,
    tensors: Mapping[str, torch.Tensor],
    padding: Mapping[str, Region] | None,
    live: int | Mapping[str, int] | None,
) -> dict[str, torch.Tensor]:
    """Masks by name, bool of the tensor's shape: True in padding. `buffers` hold `tensors`.

    ValueError if no element is padding or all are, and if memory is padding in one buffer but not
    in another.
    """
    if padding is not None and not isinstance(padding, Mapping):
        raise ValueError(f"{padding=} is no mapping of buffers' names to regions")
    regions = dict(padding or {}) | _past_live(buffers, live)
    if unknown := regions.keys() - tensors.keys():
        raise ValueError(f"no buffer {sorted(unknown)}: the buffers are {', '.join(tensors)}")
    masks = {name: _mask(name, tensors[name], region) for name, region in regions.items()}
    if not any(mask.any() for mask in masks.values()):
        raise ValueError(f"nothing to poison: {padding=} and {live=} name no element")
    if all(name in masks and masks[name].all() for name in tensors):
        raise ValueError("nothing to compare: all of all buffers is padding")
    _require_same_padding(tensors, masks)
    return masks


def _past_live(buffers: Buffers, live: int | Mapping[str, int] | None) -> dict[str, Region]:
    if live is None:
        return {}
    if not is_static(buffers):
        raise ValueError(f"{live=}: lanes are known of StaticBuffers only, so give `padding`")
    if isinstance(live, Mapping):
        lanes = {field.name: lanes_of(buffers, field.name) for field in buffers.fields}
        if unknown := live.keys() - lanes.keys():
            raise ValueError(f"{live=}: no field {sorted(unknown)}, there are {', '.join(lanes)}")
        counts = {
            name: integer(f"live[{name!r}]", count, least=0, most=lanes[name])
            for name, count in live.items()
        }
    else:
        count = integer("live", live, least=0, most=most_lanes(buffers))
        counts = {field.name: count for field in buffers.fields if field.owner == "host"}
    return {name: slice(count, None) for name, count in counts.items()}


def most_lanes(buffers: StaticBuffers) -> int:
    """The largest number of lanes of a host-owned field."""
    lanes = (lanes_of(buffers, field.name) for field in buffers.fields if field.owner == "host")
    return max(lanes, default=0)


def lanes_of(buffers: StaticBuffers, name: str) -> int:
    return len(buffers[name]) if buffers[name].dim() else 0


def _mask(name: str, tensor: torch.Tensor, region: object) -> torch.Tensor:
    """A mask, bool of the tensor's shape: True in the region."""
    where = f"padding of {name!r} ({describe(tensor)})"
    if not _is_region(region):
        raise ValueError(
            f"{where}: {region!r} is no region: give a slice, a bool mask (torch.Tensor), ..., or "
            "a tuple of slices, integers and ..."
        )
    mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    try:
        mask[region] = True  # type: ignore[index]
    except (IndexError, TypeError) as cause:
        raise ValueError(f"{where}: {region!r} does not index it: {cause}") from cause
    return mask


def _is_region(region: object) -> bool:
    if isinstance(region, tuple):
        kinds = slice | EllipsisType | int
        return all(isinstance(part, kinds) and not isinstance(part, bool) for part in region)
    if isinstance(region, torch.Tensor):
        return region.dtype == torch.bool
    return isinstance(region, slice | EllipsisType)


def _require_same_padding(
    tensors: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]
) -> None:
    """ValueError if memory is padding in one buffer but not in another."""
    for name, mask in masks.items():
        memory = tensors[name].untyped_storage()
        others = {
            other: tensor
            for other, tensor in tensors.items()
            if other != name and tensor.untyped_storage().data_ptr() == memory.data_ptr()
        }
        if not others or not tensors[name].numel():
            continue
        painted = torch.zeros(memory.nbytes(), dtype=torch.bool, device=mask.device)
        _bytes_of(painted, tensors[name])[mask] = True
        for other, tensor in others.items():
            shared = _bytes_of(painted, tensor).any(-1)
            wrong = shared & ~masks[other] if other in masks else shared
            if wrong.any():
                place = [int(index) for index in wrong.nonzero()[0]]
                raise ValueError(
                    f"{int(wrong.sum())} elements of {other!r} ({describe(tensor)}), first at "
                    f"{place}, are memory of the padding of {name!r}: name them in the "
                    f"padding of {other!r}, too, or leave {other!r} out"
                )


def _bytes_of(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, [..., width], from `memory`, the bytes of the tensor's storage."""
    width = tensor.element_size()
    strides = [stride * width for stride in tensor.stride()]
    return memory.as_strided((*tensor.shape, width), (*strides, 1), tensor.storage_offset() * width)
