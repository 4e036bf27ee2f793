"""Scales of an fp8 KV cache: from a checkpoint, or from the KV of a prompt.

Checkpoints whose KV was calibrated have a scale for the keys and one for the values of each layer,
or of each of its kv heads. compressed-tensors and vLLM name them `self_attn.k_scale`, ModelOpt
`self_attn.k_proj.k_scale`. What is stored is a key divided by its scale.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from graphengine.kernels import FP8_MAX
from graphengine.models.checkpoint import Checkpoint
from graphengine.models.contract import StoredWeights

# Below the prefix of a layer's attention, for keys and for values.
_NAMES = (("k_scale", "k_proj.k_scale"), ("v_scale", "v_proj.v_scale"))
_KINDS = ("keys", "values")
_ENDINGS = tuple(f".self_attn.{name}" for names in _NAMES for name in names)


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a scale of a layer's KV."""
    return name.endswith(_ENDINGS)


def load_kv_scales(checkpoint: Checkpoint, weights: StoredWeights) -> int:
    """Read the scales that a checkpoint has for layers of `weights`; returns for how many layers.

    ValueError for a layer that has one for its keys or its values alone, and for scales of another
    shape than one number, or one a kv head, or that are not positive and finite.
    """
    read: dict[str, Tensor] = {}
    rows: list[tuple[str, Tensor]] = []
    for prefix, scales_2G in weights.kv_scales().items():
        found = [_stored_name(checkpoint, prefix, names) for names in _NAMES]
        if not any(found):
            continue
        for name, row, kind in zip(found, scales_2G, _KINDS, strict=True):
            if name is None:
                raise ValueError(
                    f"{checkpoint.path} has {' and '.join(filter(None, found))}, but no scale for "
                    f"the {kind} of {prefix.rstrip('.')}"
                )
            shape = checkpoint.tensors[name].shape
            read[name] = torch.empty(shape, dtype=torch.float32)
            if read[name].numel() not in (1, len(row)):
                raise ValueError(
                    f"{checkpoint.path} has {name} of shape {list(shape)}: a scale is one number, "
                    f"or one for each of {len(row)} kv heads"
                )
            rows.append((name, row))
    checkpoint.load(read)
    for name, row in rows:
        wrong = [each for each in read[name].flatten().tolist() if not 0 < each < math.inf]
        if wrong:
            raise ValueError(
                f"{checkpoint.path} has {name} with {wrong[0]}: a scale is positive and finite"
            )
        row.copy_(read[name].flatten())
    return len(rows) // 2


def calibrate_kv_scales(weights: StoredWeights, cache: Tensor) -> None:
    """Scales by which the largest of each head in `cache` becomes the largest of e4m3.

    cache  `[L, blocks, 2, block_size, G, D]` of `weights`, in a dtype of queries; all of it counts.
           A head that is zero everywhere gets the scale 1
    """
    for (prefix, scales_2G), layer in zip(weights.kv_scales().items(), cache, strict=True):
        # The absolute values of a layer would take as much memory again.
        largest = torch.maximum(layer.amax(dim=(0, 2, 4)), -layer.amin(dim=(0, 2, 4))).float()
        if not bool(largest.isfinite().all()):
            raise ValueError(
                f"the calibration's keys and values of {prefix.rstrip('.')} reach "
                f"{float(largest.max())}: there is no scale for that"
            )
        scales_2G.copy_(torch.where(largest == 0, 1.0, largest / FP8_MAX))


def scales_id(weights: Iterable[StoredWeights]) -> str:
    """12 hexadecimal digits of the scales of all layers."""
    digest = hashlib.blake2b(digest_size=6)
    for each in weights:
        for scales_2G in each.kv_scales().values():
            digest.update(scales_2G.cpu().numpy().tobytes())
    return digest.hexdigest()


def _stored_name(checkpoint: Checkpoint, prefix: str, names: Iterable[str]) -> str | None:
    whole = (prefix + name for name in names)
    return next((name for name in whole if name in checkpoint.tensors), None)
