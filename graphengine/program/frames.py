"""Fields of frames, their updates, and the `FrameStep` that draws frames for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from graphengine.buckets import Field, StaticBuffers
from graphengine.drafters import FieldSizes
from graphengine.models.inner.drawn import FrameCoder, FrameWeights
from graphengine.models.inner.parallel_heads import HeadsWeights, ParallelHeads
from graphengine.models.launches import DecodeLaunch
from graphengine.program.frame_step import FrameStep, InnerStep, drawn_updates, inner_fields
from graphengine.program.heads_step import HeadsStep, delay_fields, delay_updates
from graphengine.requests.request import Request


def frame_fields(config: FrameCoder, sizes: FieldSizes) -> list[Field]:
    """The static fields of frames."""
    fields = inner_fields(config, sizes)
    return fields + (delay_fields(sizes) if isinstance(config, ParallelHeads) else [])


def frame_updates(
    requests: Sequence[Request | None], config: FrameCoder
) -> dict[str, NDArray[Any]]:
    """The host's fields of frames, where a plan changes the requests in the slots."""
    updates = drawn_updates(requests, config)
    if isinstance(config, ParallelHeads):
        updates |= delay_updates(requests, config)
    return updates


def new_frame_step(
    weights: FrameWeights, buffers: StaticBuffers, launch: DecodeLaunch, **options: Any
) -> FrameStep:
    """The `FrameStep` for these weights; arguments as in `FrameStep`."""
    kind = HeadsStep if isinstance(weights, HeadsWeights) else InnerStep
    return kind(weights, buffers, launch, **options)
