"""When a player needs frames, and the slack that the recorder tells."""

from __future__ import annotations

import numpy as np
import pytest

from engines.small_engine import greedy, open_engine, run
from graphengine.observe.playback import player_slack


@pytest.mark.parametrize(
    ("arrived", "slack"),
    [
        ([], []),
        ([5], []),
        # On time to the moment, then ahead, then a frame that uses the lead up.
        ([0, 80, 100, 180, 320], [0, 60, 60, 0]),
        # After a late frame the player goes on from when it came.
        ([0, 100, 180, 250, 400], [-20, 0, 10, -60]),
    ],
)
def test_a_player_waits_for_late_frames(arrived: list[float], slack: list[float]) -> None:
    assert player_slack(np.array(arrived, float), 80.0).tolist() == slack


def test_the_recorder_tells_slack(device: str) -> None:
    """Of the times at which the requests' tokens were read, as their results have them."""
    with open_engine(device=device) as engine:
        engine.recorder.start()
        requests = [engine.submit(prompt, greedy(6)) for prompt in ("def f(", "x = [")]
        run(engine)
        engine.recorder.stop()
        wanted = [player_slack(1e3 * np.array(request.timings.tokens), 3.0) for request in requests]
        found = engine.recorder.frame_slack_ms(3.0)
        assert len(found) == 10
        np.testing.assert_allclose(found, np.concatenate(wanted), atol=1e-3)
        for frame_ms in (0, True, "80", float("inf")):
            with pytest.raises(ValueError, match=r"frame_ms=.* must be a positive number"):
                engine.recorder.frame_slack_ms(frame_ms)
        engine.recorder.clear()
        assert not len(engine.recorder.frame_slack_ms(80))
