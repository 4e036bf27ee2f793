"""The whole weights, which no single rank has: read again, to take their fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from graphengine.core.fingerprints import fingerprint_of, packed_linears
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import reader_of
from graphengine.models.quantised.filling import Reader, dequantised_names, fill_packed
from graphengine.models.quantised.schemes import HEAD
from graphengine.models.weights import StoredLinear, StoredWeights


def whole_fingerprint(
    whole: StoredWeights, checkpoint: Checkpoint, embedding: str, device: torch.device
) -> str:
    """The `fingerprint` that these weights would have on one device; each packed weight is loaded
    for a moment.

    whole      the weights, on the device "meta"
    embedding  its name in the checkpoint without ".weight", which lm_head may stand for

    ValueError where the checkpoint has changed since it was opened.
    """
    reader = reader_of(checkpoint, embedding)
    tensors = chain(
        _plain(whole, checkpoint, reader, device), _packed(whole, checkpoint, reader, device)
    )
    return fingerprint_of(whole.config, tensors)


def _plain(
    whole: StoredWeights, checkpoint: Checkpoint, reader: Reader, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    tensors, linears = checkpoint.mapped(), whole.linears()
    in_codes = dequantised_names(checkpoint, linears)
    dequantised = {f"{each.parts[0][0]}.weight": each for each in linears if each.plain}
    for name, (meta, _, _, order) in sorted(whole.stored().items()):
        if name.removesuffix(".weight") in in_codes:
            filled = _filled(dequantised[name], checkpoint, reader, device)
            assert isinstance(filled, Tensor), f"{name=}"
            yield name, filled
            continue
        stored = tensors[name if name in checkpoint.tensors else f"{HEAD}.weight"]
        stored = stored if order is None else stored[order]
        yield name, stored.view(meta.shape).to(meta.dtype)


def _packed(
    whole: StoredWeights, checkpoint: Checkpoint, reader: Reader, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    for name, linear in packed_linears(whole).items():
        packed = _filled(linear, checkpoint, reader, device)
        assert isinstance(packed, PackedWeight), f"{name=}"
        for index, tensor in enumerate(packed.tensors):
            yield f"{name} {index}", tensor


def _filled(
    linear: StoredLinear, checkpoint: Checkpoint, reader: Reader, device: torch.device
) -> AnyWeight:
    """The weight of a packed linear, or of an unpacked one that the checkpoint stores in codes."""
    weight: AnyWeight
    if isinstance(linear.weight, Tensor):
        weight = torch.empty_like(linear.weight, device=device)
    else:
        weight = PackedWeight(*(_empty(each, device) for each in linear.weight))
    names = [name for name, _ in linear.parts]
    filled = linear._replace(weight=weight)
    fill_packed(checkpoint.path, [filled], reader, lambda read: None, names)
    return weight


def _empty(value: Any, device: torch.device) -> Any:
    """An empty tensor like this one, on this device; a value that is not a tensor is returned."""
    return torch.empty_like(value, device=device) if isinstance(value, Tensor) else value
