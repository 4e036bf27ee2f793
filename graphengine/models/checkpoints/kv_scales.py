"""Scales of an fp8 KV cache: from a checkpoint, or from the KV of a prompt.

Checkpoints whose KV was calibrated have a scale for the keys and one for the values of each layer,
or of each of its kv heads. compressed-tensors and vLLM name them `self_attn.k_scale`, ModelOpt
`self_attn.k_proj.k_scale`. The cache stores a key divided by its scale.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from graphengine.kernels.core.paged import FP8_MAX
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.tensor_files import spans_of
from graphengine.models.launches import WHOLE, RankGroup, Share
from graphengine.models.weights import StoredWeights
from graphengine.options.checks import shown

# Names under the prefix of a layer's attention, for keys and for values.
_NAMES = (("k_scale", "k_proj.k_scale"), ("v_scale", "v_proj.v_scale"))
_KINDS = ("keys", "values")
# The largest key or value is 448 times its scale. No real one is near 4e-6, or near 4e6, far beyond
# float16's range: a scale outside this range is damaged, or means something else.
_RANGE = (1e-8, 1e4)
_ENDINGS = tuple(f".self_attn.{name}" for names in _NAMES for name in names)


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a scale of a layer's KV."""
    return name.endswith(_ENDINGS)


def load_kv_scales(
    checkpoint: Checkpoint, weights: StoredWeights, heads: Sequence[int], share: Share = WHOLE
) -> int:
    """Read a checkpoint's KV scales into `weights`; returns the number of layers that have them.

    heads  kv heads of each layer over all ranks; this rank has a share of them

    ValueError, with names and values, if a layer has a scale for only its keys or only its values,
    or different scales under both names, or if a scale is neither one number nor one per kv head,
    or is out of the range that models have.
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
    """An empty tensor for a stored scale. ValueError unless that is one number, or one per head."""
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
    """Set each head's scale so that its largest absolute value in `cache` becomes e4m3's largest.

    cache  `[L, blocks, 2, block_size, G, D]` of `weights`, in a dtype of queries, all of it read.
           A head that is zero everywhere gets the scale 1
    """
    for (prefix, scales_2G), layer in zip(weights.kv_scales().items(), cache, strict=True):
        # abs() would take as much memory as the layer again.
        largest = torch.maximum(layer.amax(dim=(0, 2, 4)), -layer.amin(dim=(0, 2, 4))).float()
        if not bool(largest.isfinite().all()):
            raise ValueError(
                f"the calibration's keys and values of {prefix.rstrip('.')} reach "
                f"{float(largest.max())}: there is no scale for that"
            )
        scales_2G.copy_(torch.where(largest == 0, 1.0, largest / FP8_MAX))


def scales_of_ranks(weights: StoredWeights, group: RankGroup | None) -> Tensor:
    """Every rank's scales, float32 `[ranks, L, 2, G]` on the host. All ranks must call it."""
    own = torch.stack([*weights.kv_scales().values()])
    if group is None:
        return own[None].cpu()
    return group.gather(own.flatten(1)).cpu().view(-1, *own.shape)


def scales_id(scales_L2G: Iterable[Tensor]) -> str:
    """Fingerprint of these layers' scales: 12 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=6)
    for scales in scales_L2G:
        digest.update(scales.contiguous().numpy().tobytes())
    return digest.hexdigest()
