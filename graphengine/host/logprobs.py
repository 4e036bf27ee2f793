"""Reads log-probabilities, for requests that ask for them, from a mailbox of their own.

`kernels/logits/logprobs_mailbox.py` has the layout. Only the items of an entry that a replay has
written are read; the replay's record in the mailbox of tokens, and its requests' options, tell
which.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from graphengine.buckets import Mailbox
from graphengine.buckets.mailbox import TAG_MASK, Payloads
from graphengine.host.step_plan import Replay
from graphengine.kernels.logits.logprobs_mailbox import logprob_items
from graphengine.kernels.step.record import unpack_state
from graphengine.requests.request import Request
from graphengine.requests.result import Logprob, TokenLogprobs

_NO_ID = 0xFFFF_FFFF
_NO_TOKEN = -1


Wanted = tuple[tuple[int, ...], int]
"""For a lane: its tokens, and how many of the most probable tokens each has besides its own."""


class LogprobMailbox:
    """A ring whose entries and tags match those of the engine's mailbox of tokens.

    items  items of a lane, a multiple of `logprob_items(top)`
    top    largest number of most probable tokens that a request may ask for
    """

    def __init__(
        self,
        entries: int,
        lanes: int,
        items: int,
        top: int,
        *,
        device: torch.device,
        words: torch.Tensor | None = None,
    ) -> None:
        self.items_of_token = logprob_items(top)
        self._mailbox = PartialMailbox(entries, lanes, items, device=device, words=words)

    @property
    def tensor(self) -> torch.Tensor:
        """The memory that `publish_logprobs` writes."""
        return self._mailbox.tensor

    def clear(self) -> None:
        """Forget everything; only with no replay in flight."""
        self._mailbox.clear()

    def wait(
        self, sequence: int, lanes: Sequence[Wanted], **how: Any
    ) -> list[tuple[TokenLogprobs, ...] | None] | None:
        """The log-probabilities of each lane's tokens; None for a lane without tokens. Waits like
        `Mailbox.wait`: None if something has not arrived in time.
        """
        found: list[tuple[TokenLogprobs, ...] | None] = [None] * len(lanes)
        self._mailbox.written = [
            (lane, [self.items_of_token * j for j in range(len(tokens))], 2 + 2 * top)
            for lane, (tokens, top) in enumerate(lanes)
            if tokens
        ]
        if not self._mailbox.written:
            return found
        payloads = self._mailbox.wait(sequence, len(lanes), **how)
        if payloads is None:
            return None
        for (lane, _, count), items in zip(self._mailbox.written, payloads, strict=True):
            starts = range(0, len(items), count)
            found[lane] = tuple(
                _token_logprobs(token, items[start : start + count])
                for token, start in zip(lanes[lane][0], starts, strict=True)
            )
        return found


class Logprobs:
    """All log-probabilities of an engine: of new tokens and, with `prompts`, of prompts.

    In `prompts`, a lane is a token of a prompt's chunk, and has the log-probabilities of the next
    token.
    """

    def __init__(self, tokens: LogprobMailbox, prompts: LogprobMailbox | None) -> None:
        self.tokens, self.prompts = tokens, prompts

    def clear(self) -> None:
        """Forget everything; only with no replay in flight."""
        for mailbox in filter(None, (self.tokens, self.prompts)):
            mailbox.clear()

    def wait(
        self, replay: Replay, record: Payloads, **how: Any
    ) -> list[tuple[TokenLogprobs, ...] | None] | None:
        """The log-probabilities of the tokens of each lane of a replay with this record; None for a
        lane whose request wants none. Those of a prompt go to the request. Waits like
        `Mailbox.wait`: None if something has not arrived in time.
        """
        sequence = replay.sequence
        lanes = [_wanted(*lane) for lane in zip(replay.requests, record, strict=True)]
        found = self.tokens.wait(sequence, lanes, **how)
        chunk = replay.chunk
        if found is None or chunk is None or chunk.request.params.prompt_logprobs is None:
            return found
        request, top = chunk.request, chunk.request.params.prompt_logprobs
        rows, ended = request.job.prompt_rows, request.finish_reason is not None
        # The caller's memory must stay until its rows are written, also after a cancel.
        if ended and rows is None:
            return found
        assert self.prompts is not None and request.prompt_logprobs is not None
        first = chunk.start + 1
        following = request.prompt_token_ids[first : first + chunk.count]
        if rows is not None and chunk.final:
            following += (_NO_TOKEN,)
        # An embedding has no probability. Something is published for its lane once its row has been
        # written, also for the prompt's last lane.
        wanted = [((token,) if token >= 0 or rows is not None else (), top) for token in following]
        logprobs = self.prompts.wait(sequence, wanted, **how)
        if logprobs is None:
            return None
        for position, (token, each) in enumerate(zip(following, logprobs, strict=True), first):
            if token >= 0 and not ended:
                (request.prompt_logprobs[position],) = each or (None,)
        return found


def _wanted(request: Request, items: tuple[int, ...]) -> Wanted:
    """The log-probabilities that were written for a lane with this record."""
    top = request.params.logprobs
    if request.job.codes is not None:
        # Log-probabilities of codes have a mailbox of their own.
        return (), 0
    # Nothing is read for a request that has ended: its slot may have another request by now.
    if top is None or request.finish_reason is not None:
        return (), 0
    return items[: unpack_state(items[-1]).emitted], top


class PartialMailbox(Mailbox):
    """A mailbox whose entries are written only in part; `written` says which part a replay writes.

    `written` has, for each lane, its number, the first item of each token, and how many items from
    there on are written.
    """

    written: Sequence[tuple[int, list[int], int]] = ()

    def ready(self, sequence: int, lanes: int) -> bool:
        """True if everything written has arrived."""
        return self._take(sequence, lanes) is not None

    def _take(self, sequence: int, lanes: int) -> Payloads | None:
        entry = self._items[sequence % self.entries]
        tag = sequence & TAG_MASK
        payloads: Payloads = []
        for lane, starts, count in self.written:
            found: list[int] = []
            for start in starts:
                # Copied first, then checked, as in the mailbox of tokens.
                found += entry[lane, start : start + count].tolist()
            if any(word >> 32 != tag for word in found):
                return None
            payloads.append(tuple(word & 0xFFFF_FFFF for word in found))
        return payloads


def _token_logprobs(token: int, payloads: tuple[int, ...]) -> TokenLogprobs:
    """Entries for a token and the most probable tokens, in this order, without duplicates.

    Most probable tokens with equal log-probabilities share a rank, and so does the token itself.
    """
    found = {token: Logprob(_float(payloads[0]), payloads[1])}
    rank, last = 1, None
    for place, (top_id, value) in enumerate(zip(payloads[2::2], payloads[3::2], strict=True), 1):
        if top_id == _NO_ID:
            continue
        if value != last:
            rank, last = place, value
        found.setdefault(top_id, Logprob(_float(value), rank))
    return found


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value
