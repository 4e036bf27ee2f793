"""Deadlines of frames of sound, for a player that plays each frame for its own length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from graphengine.options.checks import is_finite, is_number

Floats = NDArray[np.float64]


def check_frame_ms(frame_ms: object, name: str) -> float:
    """The length of a frame in milliseconds; ValueError, with the option's name, for none."""
    if not is_number(frame_ms) or not (is_finite(frame_ms) and frame_ms > 0):
        raise ValueError(f"{name}={frame_ms!r} must be a positive number of milliseconds")
    return float(frame_ms)


def player_slack(arrived: Floats, frame: float) -> Floats:
    """How long before its deadline each frame of a request arrived, without the first frame, which
    has no deadline; negative for a late frame.

    The player begins with the first frame. A frame is due when the one before it has been played.
    The player waits for a late frame, and later frames are then due that much later. `arrived` has
    the times of all frames in order, in the unit of `frame`, the length of each.
    """
    slack = np.empty(max(len(arrived) - 1, 0))
    played = arrived[0] if len(arrived) else 0.0
    for index, moment in enumerate(arrived[1:].tolist()):
        due = played + frame
        slack[index] = due - moment
        played = max(due, moment)
    return slack
