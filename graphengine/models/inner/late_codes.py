"""Codes of sound that come late, as in Moshi: all codes of a frame but its first come with the next
frame. The token, which is a frame's first value, is not delayed.

Letters: n frames, K codes of a frame with its token, P codes of somebody else's frame.
"""

from __future__ import annotations

import numpy as np

from graphengine.models.inner.parallel_heads import Codes


def delayed(frames: Codes, own: int, *, begin: int) -> Codes:
    """`[n + 1, K]` or `[n + 1, K + P]`: frames as the model reads them.

    The late codes of the first frame are `begin`. The last frame has the late codes of the last
    given one, and -1 for all else, which is not known.

    frames  `[n, K]`, or `[n, K + P]` with those of another speaker
    own     K
    """
    found = np.full((len(frames) + 1, frames.shape[1]), -1, np.int32)
    # The token, and the first codes of either.
    prompt = [place for place in (0, 1, own) if place < frames.shape[1]]
    late = [place for place in range(frames.shape[1]) if place not in prompt]
    found[:-1, prompt] = frames[:, prompt]
    found[0, late] = begin
    found[1:, late] = frames[:, late]
    return found


def undelayed(frames: Codes) -> Codes:
    """Whole frames of sound `[n - 1, K - 1]`, without tokens, of frames as they are drawn."""
    return np.concatenate([frames[:-1, 1:2], frames[1:, 2:]], axis=1)
