"""Code shared by the sampler's kernels: parameters by slot, and the value of a row's candidate.

A logit is masked, scaled, and mapped to an integer key that keeps the order. `sampling.py` says
what is sampled.

Letters: S slots, E stop ids a slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from graphengine.kernels.core.lanes import check_lanes, check_vector
from graphengine.kernels.step.state import check_stop_ids

LARGEST = tl.constexpr(float(np.finfo(np.float32).max))

# A cut_id that leaves out no id, as `id <= cut_id` always holds; also 2^31 - 1 in the packed order.
LAST_ID = tl.constexpr(2**31 - 1)
# The sortable key of -inf: below the key of every candidate, and of mass 0.
NO_KEY = tl.constexpr(-2139095041)
# Mass 1 of the fixed point.
MASS_SCALE = tl.constexpr(2.0**40)
# From here on float32 is too coarse for noise: it rounds by up to 2^-13, and rounding errors decide
# between equal sums.
COARSE = tl.constexpr(2.0**11)


class SamplingTensors(NamedTuple):
    """Sampling parameters by slot; host-owned."""

    temperature: torch.Tensor
    """float32 [S]: 0 for greedy."""
    top_k: torch.Tensor
    """int32 [S]: 0 for off."""
    top_p: torch.Tensor
    """float32 [S]: 1 for off."""
    min_p: torch.Tensor
    """float32 [S]: 0 for off."""
    top_n_sigma: torch.Tensor
    """float32 [S]: 0 for off."""
    seed: torch.Tensor
    """int64 [S]"""
    stop_ids: torch.Tensor
    """int32 [S, E]: -1 for none."""
    min_len: torch.Tensor
    """int32 [S]: tokens of the sequence, prompt included, before which no stop id is sampled."""

    @classmethod
    def neutral(
        cls, slots: int, *, stop_ids: int = 1, device: torch.device | str = "cpu"
    ) -> SamplingTensors:
        """New tensors for slots that ask for nothing: greedy, without filters and stop ids."""
        none = torch.full((slots, stop_ids), -1, dtype=torch.int32, device=device)
        numbers = {
            name: torch.full((slots,), value, dtype=dtype, device=device)
            for name, (dtype, value) in _NUMBERS.items()
        }
        return cls(**numbers, stop_ids=none)


# The parameters that are one number a slot: dtype, and the neutral value.
_NUMBERS: dict[str, tuple[torch.dtype, int]] = {
    "temperature": (torch.float32, 0),
    "top_k": (torch.int32, 0),
    "top_p": (torch.float32, 1),
    "min_p": (torch.float32, 0),
    "top_n_sigma": (torch.float32, 0),
    "seed": (torch.int64, 0),
    "min_len": (torch.int32, 0),
}


def check_parameters(params: SamplingTensors) -> int:
    """The number of stop ids a slot; ValueError unless all are dense and of one number of slots."""
    slots = params.temperature.numel()
    for name, (dtype, _) in _NUMBERS.items():
        if dtype == torch.int32:
            check_lanes(slots, **{name: getattr(params, name)})
        else:
            check_vector(name, getattr(params, name), slots, dtype)
    return check_stop_ids(params.stop_ids, slots)


def unfiltered(params: SamplingTensors) -> SamplingTensors:
    """Parameters without top-k, top-p, min-p and top-n-sigma, which the fast sampler ignores."""
    return params._replace(
        top_k=torch.zeros_like(params.top_k),
        top_p=torch.ones_like(params.top_p),
        min_p=torch.zeros_like(params.min_p),
        top_n_sigma=torch.zeros_like(params.top_n_sigma),
    )


@triton.jit
def sortable_key(value):
    """int32 in the order of the float32 `value`, which is no NaN; -0 and +0 share a key."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(key):
    """The float32 of a `sortable_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_coarse(value):
    """Whether float32 is so coarse at `value` that rounding errors matter.

    They do not at the largest floats, which represent everything beyond, nor at NaN.
    """
    size = tl.abs(value)
    return (size >= COARSE) & (size < LARGEST)


@triton.jit
def mask_stop_ids(logits, ids, waits, stop_ids_ptr, stop_ids):
    """Set stop ids to -inf in rows that wait for their min_len; broadcasts like its operands."""
    for i in range(stop_ids):
        stop_id = tl.load(stop_ids_ptr + i, mask=waits, other=-1)
        logits = tl.where(ids == stop_id, float("-inf"), logits)
    return logits


@triton.jit
def scaled_tile(logits, temperature):
    """l = logits / temperature, within the finite floats; -inf and NaN give -inf."""
    scaled = tl.div_rn(logits, temperature)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    return tl.where(logits > float("-inf"), scaled, float("-inf"))


class CandidateRow(NamedTuple):
    """A row's candidates, for a kernel."""

    logits: Any
    """Pointer to float32 [V]."""
    vocabulary: Any
    """V"""
    width: Any
    """V in whole blocks."""
    temperature: Any
    waits: Any
    """Whether it has not reached min_len, so that its stop ids are no candidates."""
    stop_ids: Any
    """Pointer to int32 [E]."""
    stop_count: Any
    """E"""


@triton.jit
def row_tile(row, start, BLOCK: tl.constexpr):
    """Logits of the ids start .. start + BLOCK - 1, maybe NaN; -inf where there is no candidate."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row.logits + ids, mask=ids < row.vocabulary, other=float("-inf"))
    if row.waits:
        logits = mask_stop_ids(logits, ids, True, row.stop_ids, row.stop_count)
    return logits
