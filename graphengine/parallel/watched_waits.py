"""Waits of the driver that watch the ranks meanwhile."""

from __future__ import annotations

from graphengine.buckets.mailbox import Payloads, Queryable
from graphengine.core.waits import Waits
from graphengine.host.step_plan import Replay
from graphengine.parallel.ranks import Ranks
from graphengine.requests.result import TokenLogprobs


class WatchedWaits(Waits):
    """`Waits` that raise RankFailed once one of `ranks` has ended, or has waited in vain."""

    ranks: Ranks

    def check_group(self) -> None:
        """Raise GroupError once the rank of these mailboxes has waited in vain for the others."""
        raise NotImplementedError

    def wait_tokens(self, sequence: int, lanes: int, timeout: float | None) -> Payloads | None:
        """The first `lanes` lanes published by replay `sequence`."""
        with self.ranks.explained():
            found = super().wait_tokens(sequence, lanes, timeout)
            self.check_group()
            return found

    def wait_logprobs(
        self, replay: Replay, record: Payloads, timeout: float | None
    ) -> list[tuple[TokenLogprobs, ...] | None] | None:
        """The log-probabilities of each lane of a replay that published `record`."""
        with self.ranks.explained():
            found = super().wait_logprobs(replay, record, timeout)
            self.check_group()
            return found

    def wait_routes(self, replay: Replay, record: Payloads, timeout: float | None) -> bool | None:
        """True once the requests of a replay that published `record` have their tokens' experts."""
        with self.ranks.explained():
            return super().wait_routes(replay, record, timeout)


class WatchedStream:
    """A stream for the mailbox to query, which raises RankFailed once a rank has failed.

    stream  None: it is never idle
    """

    def __init__(self, ranks: Ranks, stream: Queryable | None = None) -> None:
        self._ranks, self._stream = ranks, stream

    def query(self) -> bool:
        self._ranks.check()
        return self._stream is not None and self._stream.query()
