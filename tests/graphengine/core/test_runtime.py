"""What a runtime promises by itself: an empty mailbox at first, and waits that end in time."""

from __future__ import annotations

from collections import deque

import pytest

from engines.small_engine import open_engine


class Never:
    """An event that does not come."""

    def query(self) -> bool:
        return False


def test_what_capture_published_is_forgotten_and_waits_end_in_time(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(device=device, wait_limit_s=0.5) as engine:
        runtime = engine.runtime
        assert runtime.launched == 0 and not runtime.mailbox.ready(1, 1)
        assert not runtime.mailbox.tensor.any() and not runtime.logprobs.tokens.tensor.any()
        assert runtime.wait_drafts(None) is True
        monkeypatch.setattr(runtime.masks, "_fetched", deque([(0, Never()), (1, Never())]))
        assert runtime.wait_drafts(0.01) is None
        with pytest.raises(TimeoutError, match=r"waited 0\.5 s for the drafts of replay 0"):
            runtime.wait_drafts(None)
        # Replay 1 has not been read.
        runtime.masks._fetched.popleft()
        assert runtime.wait_drafts(None) is True
        monkeypatch.undo()
