"""What tests of models whose steps emit frames of codes share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.small_engine import greedy, open_engine


def of_place(options: dict[str, Any], place: int) -> dict[str, Any]:
    """The options of the code at a place of the frame."""
    own = {name: value for name, value in options.items() if name != "codes"}
    codes = options.get("codes")
    if place and codes is not None:
        for name in ("temperature", "top_k", "top_p"):
            value = getattr(codes, name)
            if value is not None:
                own[name] = value[place - 1] if isinstance(value, tuple) else value
    return own | {"top_k": max(own.get("top_k", 0), 0)}


def assert_frames_paused(
    path: Path,
    prompts: Sequence[list[int]],
    wanted: Sequence[NDArray[Any]],
    frames: int,
    *,
    spare: int,
    **options: Any,
) -> None:
    """Requests that pause in the middle of their frames, as the pool has room for their prompts and
    `spare` blocks, have these frames.
    """
    blocks = sum(-(-len(prompt) // 8) for prompt in prompts) + spare
    pool = {"kv_blocks": blocks, "swap_blocks": 2 * blocks, "max_seq_len": 96}
    with open_engine(path, **options | pool) as engine:
        results = engine.generate(prompts, greedy(frames))
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
        for result, expected in zip(results, wanted, strict=True):
            assert np.array_equal(result.codes, expected)
