"""The lines of a recorder's file, as objects: one for each capture, replay and request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphengine.buckets import CaptureReport
from graphengine.observe.processor_use import ProcessorUse
from graphengine.observe.ring import FINISHED, KINDS, NEVER, REASONS, REPLAY, STAMPS
from graphengine.program.graph_key import GraphKey

SCHEMA = 1
"""The file's version. Adding keys does not change it."""


def capture_object(key: GraphKey, capture: CaptureReport) -> dict[str, Any]:
    return {
        "bucket": capture.name,
        "type": key.kind,
        "rows": key.size,
        "seconds": round(capture.capture_ms / 1e3, 6),
        "warm_up_seconds": round(capture.warm_up_ms / 1e3, 6),
        "bytes": capture.bytes,
        "nodes": capture.nodes,
    }


def replay_object(
    record: np.void,
    ids: NDArray[np.int64],
    tokens: NDArray[np.uint8],
    buckets: Sequence[str],
    origin: int,
    *,
    ranks: int,
) -> dict[str, Any]:
    """The line of a `REPLAY` record and its lanes; times from `origin`, None where missing.

    With several `ranks`, it includes their launches.
    """
    values = dict(zip(REPLAY.names or (), record.item(), strict=True))
    lanes, kind, microseconds = (values.pop(name) for name in ("lanes", "kind", "device_us"))
    skew, last = values.pop("skew_us"), values.pop("last_rank")
    launches = {"skew_us": _known(skew), "last_rank": _counted(last)}
    used = {name: _counted(values.pop(name)) for name in ProcessorUse._fields}
    return {
        "kind": "replay",
        **values,
        "bucket": buckets[values["bucket"]],
        "type": KINDS[kind],
        "device_us": _known(microseconds),
        **{name: _since(values[name], origin) for name in STAMPS},
        **(launches if ranks > 1 else {}),
        **used,
        "lanes": np.stack([ids[:lanes], tokens[:lanes]], axis=1).tolist(),
    }


def request_object(record: np.void, origin: int) -> dict[str, Any]:
    """The line of a `FINISHED` record, with times as in a replay's line."""
    values = dict(zip(FINISHED.names or (), record.item(), strict=True))
    times = {name: _since(values[name], origin) for name in ("submitted", "first", "finished")}
    return {"kind": "request", **values, **times, "reason": REASONS[values["reason"]]}


def _known(microseconds: float) -> float | None:
    return None if math.isnan(microseconds) else round(microseconds, 3)


def _counted(value: int) -> int | None:
    return None if value == NEVER else value


def _since(time: int, origin: int) -> int | None:
    return None if time == NEVER else time - origin
