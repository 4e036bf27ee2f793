"""Waits for records of replays, of this process or of another whose mailboxes are mapped."""

from __future__ import annotations

import time

from graphengine.buckets import Mailbox
from graphengine.buckets.mailbox import Payloads, Queryable, WaitMode
from graphengine.host.logprobs import Logprobs
from graphengine.host.routes import FrameCodes, Routing
from graphengine.host.step_plan import Replay
from graphengine.requests.result import TokenLogprobs


def deadline_after(timeout: float | None) -> float | None:
    """The time, by `time.perf_counter()`, at which a timeout of some seconds ends; None: never."""
    return None if timeout is None else time.perf_counter() + timeout


def seconds_to(deadline: float | None) -> float | None:
    """What is left of a timeout, in seconds, at least 0; None: there is no deadline."""
    return None if deadline is None else max(0.0, deadline - time.perf_counter())


class Waits:
    """Waits on a rank's mailboxes.

    Each wait returns None if its data have not arrived within `timeout` seconds (None: up to the
    engine's `wait_limit_s`; 0: look once). It raises TimeoutError at that limit and MailboxBroken
    if the device failed.
    """

    mailbox: Mailbox
    logprobs: Logprobs
    routing: Routing | None
    # Only of a model whose steps emit frames: one attribute more would make every step slower.
    codes: FrameCodes | None = None
    _mode: WaitMode
    _limit: float
    # The stream, or a stand-in for one, that the waits query.
    _watched: Queryable | None

    def wait_tokens(self, sequence: int, lanes: int, timeout: float | None) -> Payloads | None:
        """The first `lanes` lanes published by replay `sequence`."""
        return self.mailbox.wait(
            sequence,
            lanes,
            timeout=timeout,
            mode=self._mode,
            limit=self._limit,
            stream=self._watched,
        )

    def wait_logprobs(
        self, replay: Replay, record: Payloads, timeout: float | None
    ) -> list[tuple[TokenLogprobs, ...] | None] | None:
        """The log-probabilities of each lane of a replay that published `record`."""
        return self.logprobs.wait(
            replay,
            record,
            timeout=timeout,
            mode=self._mode,
            limit=self._limit,
            stream=self._watched,
        )

    def wait_routes(self, replay: Replay, record: Payloads, timeout: float | None) -> bool | None:
        """True once the requests of a replay that published `record` have their tokens' experts."""
        return True if self.routing is None else self._given(self.routing, replay, record, timeout)

    def wait_codes(self, replay: Replay, record: Payloads, timeout: float | None) -> bool | None:
        """True once the requests of a replay that published `record` have their frames' codes."""
        assert self.codes is not None, "a step emits tokens"
        return self._given(self.codes, replay, record, timeout)

    def _given(
        self, ids: Routing | FrameCodes, replay: Replay, record: Payloads, timeout: float | None
    ) -> bool | None:
        """True once the requests of a replay have what a mailbox of ids has for their tokens."""
        arrived = ids.wait(
            replay,
            record,
            timeout=timeout,
            mode=self._mode,
            limit=self._limit,
            stream=self._watched,
        )
        return arrived or None
