"""Fills a model's weights of 8 and 4 bits from a checkpoint, one linear at a time.

Besides the filled weights, the device holds one linear as stored and as laid out, and the
temporaries that undoing a format's own layout takes. The host maps files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.packed import PackedWeight, pack
from graphengine.kernels.linear.quantised import QuantisedWeight, dequantise
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.kv_scales import is_kv_scale
from graphengine.models.checkpoints.tensor_files import TensorSlice
from graphengine.models.quantised.concatenate import concatenate, in_order
from graphengine.models.quantised.config import quantisation_of
from graphengine.models.quantised.cutting import part_of
from graphengine.models.quantised.readers import is_plain, read_weight
from graphengine.models.quantised.rounding import quantise
from graphengine.models.quantised.schemes import HEAD, Quantisation
from graphengine.models.weights import Stack, StoredLinear

STACKED_ENDS = ("_blocks", "_scales")
"""Endings of tensors with the codes and scales of all experts, after their name in 16 bits."""


class Read(NamedTuple):
    """A weight, and the names of the checkpoint's tensors that it was made from."""

    weight: QuantisedWeight
    names: tuple[str, ...]


Reader = Callable[[StoredLinear, torch.device], Read]
"""Reads the weight for a linear; all work on it is done on the device."""


class ChangedTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors; `change` is applied to each when it is looked up."""

    def __init__(
        self, tensors: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor]
    ) -> None:
        self._tensors, self._change = tensors, change

    def __getitem__(self, name: str) -> Tensor:
        return self._change(name, self._tensors[name])

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def of_stack(tensors: Mapping[str, Tensor], stack: Stack | None) -> Mapping[str, Tensor]:
    """The tensors as one linear sees them. Look-ups raise ValueError if experts differ in number.

    stack  the linear's place in them; None: they are its own
    """
    if stack is None:
        return tensors
    expert, experts = stack[:2]

    def part(name: str, tensor: Tensor) -> Tensor:
        if tensor.shape[:1] != (experts,):
            raise ValueError(f"{name} has shape {[*tensor.shape]}, and there are {experts} experts")
        return tensor[expert]

    return ChangedTensors(tensors, part)


def stored_reader(checkpoint: Checkpoint, quantisation: Quantisation) -> Reader:
    """A reader of quantised weights, as they are stored."""
    tensors = checkpoint.mapped()

    def read(linear: StoredLinear, device: torch.device) -> Read:
        parts: list[QuantisedWeight] = []
        names: list[str] = []
        for (name, rows), cut in zip(linear.parts, cuts_of(linear), strict=True):
            shape = (rows, linear.shape[1]) if cut is None else _whole(rows, linear.shape[1], cut)
            scheme = quantisation.scheme(name)
            assert scheme is not None, f"{name=} has a form and no scheme"
            there = ChangedTensors(of_stack(tensors, linear.stack), lambda _, each: each.to(device))
            try:
                found = read_weight(scheme, there, name, shape)
                parts.append(_part(found.weight, cut, linear.weight))
            except ValueError as error:
                raise ValueError(f"{checkpoint.path}: {error}") from error
            names += found.names
        return Read(concatenate(parts), tuple(names))

    return read


def cuts_of(linear: StoredLinear) -> Sequence[TensorSlice | None]:
    """The cut of each part; None for a whole part."""
    return linear.cuts or [None] * len(linear.parts)


def _whole(rows: int, columns: int, cut: TensorSlice) -> tuple[int, int]:
    return (cut.whole, columns) if cut.axis == 0 else (rows, cut.whole)


def _part(whole: QuantisedWeight, cut: TensorSlice | None, target: AnyWeight) -> QuantisedWeight:
    """A rank's part, with scales for as many rows as in the target, or for each row."""
    if cut is None:
        return whole
    return part_of(whole, cut, 1 if isinstance(target, Tensor) else target.format.rows)


def rounded_names(linear: StoredLinear, stored: Collection[str], embedding: str) -> list[str]:
    """The tensors of 16 or 32 bits that the weight of a linear is made of.

    stored     names of the stored tensors
    embedding  the embedding's name without ".weight"; it replaces an lm_head that is not stored
    """
    ending = ".weight" if linear.stack is None else linear.stack.ending
    names = [name + ending for name, _ in linear.parts]
    if names == [f"{HEAD}.weight"] and names[0] not in stored:
        return [f"{embedding}.weight"]
    return names


def rounding_reader(checkpoint: Checkpoint, embedding: str) -> Reader:
    """A reader that rounds 16 or 32 bits to the nearest code; `embedding` as in `rounded_names`."""
    tensors = checkpoint.mapped()

    def read(linear: StoredLinear, device: torch.device) -> Read:
        assert isinstance(linear.weight, PackedWeight)
        stack, names = linear.stack, rounded_names(linear, checkpoint.tensors, embedding)
        parts = [of_stack(tensors, stack)[name].to(device) for name in names]
        if linear.transposed or (stack is not None and stack.transposed):
            parts = [part.t() for part in parts]
        by_columns = None
        if linear.cuts and linear.axis == 0:
            parts = [cut.part(each) for each, cut in zip(parts, linear.cuts, strict=True)]
        elif linear.cuts:
            # The whole weight is rounded, then cut: scales of a rank's rows depend on all columns.
            (by_columns,) = linear.cuts
        try:
            rounded = quantise(torch.cat(parts), linear.weight.format)
            return Read(_part(rounded, by_columns, linear.weight), tuple(names))
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {', '.join(names)}: {error}") from error

    return read


def fill_packed(
    path: Path,
    linears: Sequence[StoredLinear],
    read: Reader,
    progress: Callable[[tuple[str, ...]], None],
    dequantised: Collection[str] = (),
) -> set[str]:
    """Fill the packed weights; returns the names of the tensors that were read.

    path         the checkpoint's, for errors
    progress     called with the names read for each linear
    dequantised  names of linears whose weights are filled though they are in the model's dtype

    ValueError, with names and numbers, for a weight that does not have its planned form.
    """
    used: set[str] = set()
    for linear in linears:
        if isinstance(linear.weight, PackedWeight) or linear.parts[0][0] in dequantised:
            names = _fill(path, linear, read)
            # Tensors that several experts share are reported once.
            progress(tuple(name for name in names if name not in used))
            used |= set(names)
    return used


def _fill(path: Path, linear: StoredLinear, read: Reader) -> tuple[str, ...]:
    """Fill one weight; returns the names read. Temporaries are freed before the next linear."""
    target = linear.weight
    if isinstance(target, Tensor):
        found = read(linear, target.device)
        with torch.no_grad():
            target.copy_(dequantise(in_order(found.weight, linear.order)))
        return found.names
    found = read(linear, target.codes.device)
    try:
        packed = pack(in_order(found.weight, linear.order), swiglu=linear.swiglu)
    except ValueError as error:
        names = ", ".join(name for name, _ in linear.parts)
        raise ValueError(f"{path}: {names}: {error}") from error
    for name, into, source in zip(target._fields, target, packed, strict=True):
        if isinstance(into, Tensor):
            _copy(into, source, f"{name} of {linear.parts[0][0]}")
    return found.names


def names_of_packed(checkpoint: Checkpoint, linears: Sequence[StoredLinear]) -> set[str]:
    """The checkpoint's tensors of weights that are packed, or dequantised while they are read."""
    packed = packed_names(linears) | dequantised_names(checkpoint, linears)
    stacked = {name for each in linears if each.stack is not None for name, _ in each.parts}
    stacked = {name + end for name in packed & stacked for end in ("", *STACKED_ENDS)}
    return {
        name
        for name in checkpoint.tensors
        if name in stacked or (name.rpartition(".")[0] in packed and is_of_weight(name))
    }


def packed_names(linears: Sequence[StoredLinear]) -> set[str]:
    """Names of the linears whose weights are packed."""
    packed = [linear for linear in linears if isinstance(linear.weight, PackedWeight)]
    return {name for linear in packed for name, _ in linear.parts}


def dequantised_names(checkpoint: Checkpoint, linears: Sequence[StoredLinear]) -> set[str]:
    """Names of the linears in the model's dtype that the checkpoint has in 8 or 4 bits."""
    names = {name for linear in linears if linear.plain for name, _ in linear.parts}
    quantisation = quantisation_of(checkpoint) if names else None
    if quantisation is None:
        return set()
    dtypes = {name: info.dtype for name, info in checkpoint.tensors.items()}
    schemes = {name: quantisation.scheme(name) for name in names}
    return {
        name
        for name, scheme in schemes.items()
        if scheme is not None and not is_plain(scheme, dtypes, name)
    }


def is_of_weight(name: str) -> bool:
    """Whether a tensor under a linear's name belongs to its weight; KV scales may be there, too."""
    return not name.endswith(".bias") and not is_kv_scale(name)


def _copy(into: Tensor, source: object, what: str) -> None:
    if not isinstance(source, Tensor) or (source.shape, source.dtype) != (into.shape, into.dtype):
        shown = "none" if not isinstance(source, Tensor) else f"{source.dtype} {[*source.shape]}"
        raise ValueError(f"{what}: {into.dtype} {[*into.shape]} was planned, and there is {shown}")
    into.copy_(source)
