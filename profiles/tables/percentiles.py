"""Percentiles, with the number of values that support them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

SHARES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}


def percentiles(values: ArrayLike, *, independent: int | None = None) -> dict[str, Any]:
    """Nearest-rank percentiles of `SHARES` and the maximum: observed values, none interpolated.

    n            number of values
    independent  number of values measured separately (rows of one step share its time); n if not
                 given
    unsupported  percentiles beyond which fewer than one independent value lies: they are in effect
                 the maximum, and another run may well show a larger value

    ValueError without values.
    """
    array = np.asarray(values, dtype=np.float64).ravel()
    if not array.size:
        raise ValueError("percentiles of no values")
    count = array.size if independent is None else independent
    found: dict[str, Any] = {
        name: float(np.percentile(array, share, method="inverted_cdf"))
        for name, share in SHARES.items()
    }
    found |= {"max": float(array.max()), "n": array.size, "independent": count}
    found["unsupported"] = [name for name, share in SHARES.items() if not supports(count, share)]
    return found


def supports(count: int, share: float) -> bool:
    """Whether at least one of `count` values is expected beyond the percentile `share`."""
    # Tenths of a percent are integers: 1000 values support 99.9, in floating point or not.
    return count * (1000 - round(share * 10)) >= 1000


def rounded(value: Any, digits: int = 4) -> Any:
    """`value` with every float in it rounded, also inside dicts and lists."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(item, digits) for item in value]
    return value
