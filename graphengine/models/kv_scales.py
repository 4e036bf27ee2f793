"""Scales of an fp8 KV cache: from a checkpoint, or from the KV of a prompt.

Checkpoints whose KV was calibrated have a scale for the keys and one for the values of each layer,
or of each of its kv heads. compressed-tensors and vLLM name them `self_attn.k_scale`, ModelOpt
`self_attn.k_proj.k_scale`. What is stored is a key divided by its scale.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from graphengine.checks import shown
from graphengine.kernels import FP8_MAX
from graphengine.models.checkpoint import Checkpoint
from graphengine.models.contract import WHOLE, RankGroup, Share
from graphengine.models.tensor_files import spans_of
from graphengine.models.weights import StoredWeights

# Below the prefix of a layer's attention, for keys and for values.
_NAMES = (("k_scale", "k_proj.k_scale"), ("v_scale", "v_proj.v_scale"))
_KINDS = ("keys", "values")
# The largest key or value is 448 times a scale. None is near 4e-6, or near 4e6, where float16 is
# long at its end: such a scale is damage, or means something else.
_RANGE = (1e-8, 1e4)
_ENDINGS = tuple(f".self_attn.{name}" for names in _NAMES for name in names)


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a scale of a layer's KV."""
    return name.endswith(_ENDINGS)


def load_kv_scales(
    checkpoint: Checkpoint, weights: StoredWeights, heads: Sequence[int], share: Share = WHOLE
) -> int:
    """Read the scales that a checkpoint has for layers of `weights`; returns for how many layers.

    heads  kv heads of each layer on all ranks, of which this one has a share

    ValueError, with names and values, for a layer that has one for its keys or its values alone, or
    different ones under both names, and for scales of another shape than one number, or one a kv
    head, or that no model has.
    """
    read: dict[str, Tensor] = {}
    rows: list[tuple[list[str], int, Tensor]] = []
    for (prefix, scales_2G), count in zip(weights.kv_scales().items(), heads, strict=True):
        found = [
            [prefix + name for name in names if prefix + name in checkpoint.tensors]
            for names in _NAMES
        ]
        if not any(found):
            continue
        for names, row, kind in zip(found, scales_2G, _KINDS, strict=True):
            if not names:
                raise ValueError(
                    f"{checkpoint.path} has {' and '.join(chain(*found))}, but no scale for the "
                    f"{kind} of {prefix.rstrip('.')}"
                )
            read |= {name: _to_read(checkpoint, name, heads=count) for name in names}
            rows.append((names, count, row))
    checkpoint.load(read)
    for names, count, row in rows:
        for name in names:
            _check_values(checkpoint, name, read[name])
        first, last = names[0], names[-1]
        values = read[first].flatten()
        if bool((values != read[last].flatten()).any()):
            raise ValueError(
                f"{checkpoint.path} has two scales for the same KV, and they differ: "
                f"{first}={shown(read[first].tolist())}, {last}={shown(read[last].tolist())}"
            )
        ((start, length),) = spans_of([count], [len(row)], *share)
        row.copy_(values.expand(count)[start : start + length])
    return len(rows) // 2


def _to_read(checkpoint: Checkpoint, name: str, heads: int) -> Tensor:
    """Where a stored scale goes. ValueError unless it is one number, or one for each head."""
    shape = checkpoint.tensors[name].shape
    if math.prod(shape) not in (1, heads):
        raise ValueError(
            f"{checkpoint.path} has {name} of shape {list(shape)}: a scale is one number, or one "
            f"for each of {heads} kv heads"
        )
    return torch.empty(shape, dtype=torch.float32)


def _check_values(checkpoint: Checkpoint, name: str, scale: Tensor) -> None:
    least, most = _RANGE
    # NaN is in no range.
    wrong = next((each for each in scale.flatten().tolist() if not least <= each <= most), None)
    if wrong is not None:
        raise ValueError(
            f"{checkpoint.path} has {name} with {wrong:.7g}: a scale is positive, in "
            f"[{least:g}, {most:g}]"
        )


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


def scales_of_ranks(weights: StoredWeights, group: RankGroup | None) -> Tensor:
    """Float32 `[ranks, L, 2, G]` on the host: those of each layer, as each rank has them. All ranks
    call it.
    """
    own = torch.stack([*weights.kv_scales().values()])
    if group is None:
        return own[None].cpu()
    return group.gather(own.flatten(1)).cpu().view(-1, *own.shape)


def scales_id(scales_L2G: Iterable[Tensor]) -> str:
    """12 hexadecimal digits of the scales of these layers."""
    digest = hashlib.blake2b(digest_size=6)
    for scales in scales_L2G:
        digest.update(scales.contiguous().numpy().tobytes())
    return digest.hexdigest()
