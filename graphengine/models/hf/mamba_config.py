"""Keys of `config.json` that all families with Mamba2 layers read alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from graphengine.models.hf.config_schema import HfConfig, unsupported

# How transformers 5 writes infinity.
_INFINITY = {"__float__": "Infinity"}
_MOST_FLOAT32 = 3.4028234663852886e38


def with_plain_limits(config: HfConfig) -> dict[str, Any]:
    """The config with infinite time step limits as floats."""
    limits = config.get("time_step_limit")
    if not isinstance(limits, list):
        return dict(config)
    return dict(config) | {
        "time_step_limit": [math.inf if each == _INFINITY else each for each in limits]
    }


def time_step_limits(settings: Mapping[str, Any]) -> dict[str, float]:
    """`dt_min` and `dt_max` of `Mamba2Sizes`.

    `time_step_min` is not a limit: it bounds the values that a model is initialised with, as in the
    authors' Mamba2. transformers 5.23 clamps Nemotron-H's time steps to it, but not in
    steps of one token.
    """
    limits: Sequence[float] = settings["time_step_limit"] or (0.0, math.inf)
    if len(limits) != 2 or limits[0] > limits[1]:
        raise unsupported("time_step_limit", list(limits), "a least time step, and a most")
    # Nemotron 3 Ultra's config has 1e308 for infinity.
    most = math.inf if limits[1] > _MOST_FLOAT32 else float(limits[1])
    return {"dt_min": float(limits[0]), "dt_max": most}
