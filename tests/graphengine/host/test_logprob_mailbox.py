"""Log-probabilities on their way from the mailbox to events, without a model."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import pytest
import torch

from graphengine import Request, SamplingParams
from graphengine.buckets.mailbox import MailboxBroken
from graphengine.host.logprobs import LogprobMailbox, Logprobs
from graphengine.host.step_plan import Replay
from graphengine.kernels.logits.logprobs_mailbox import logprob_items
from graphengine.kernels.step.record import pack_state
from graphengine.kernels.step.state import EMITTED
from graphengine.requests.job import Job
from graphengine.requests.result import Logprob

TOP, TOKENS, LANES, ENTRIES = 3, 2, 4, 4


def new_mailbox() -> LogprobMailbox:
    return LogprobMailbox(
        ENTRIES, LANES, TOKENS * logprob_items(TOP), TOP, device=torch.device("cpu")
    )


def request(logprobs: int | None) -> Request:
    return Request(
        request_id=1,
        prompt_token_ids=[1],
        params=SamplingParams(logprobs=logprobs),
        seed=0,
        submitted=0.0,
        cancelled=[],
        job=Job(prompt_len=1, max_len=9),
    )


def record(*tokens: int) -> tuple[int, ...]:
    """A lane of the first mailbox."""
    return (*tokens, *[0] * (TOKENS - len(tokens)), pack_state(0, 0, len(tokens), EMITTED))


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def write(
    mailbox: LogprobMailbox, sequence: int, lane: int, token: int, items: Sequence[int]
) -> None:
    start = token * mailbox.items_of_token
    for index, payload in enumerate(items, start):
        mailbox.tensor[sequence % ENTRIES, lane, index] = sequence << 32 | payload


def test_what_was_asked_for_is_read_and_nothing_else() -> None:
    mailbox, sequence = new_mailbox(), 5
    requests = (request(2), request(None), request(0), request(1))
    records = [record(70, 71), record(9), record(80), record()]
    replay = Replay(sequence, requests, (1, 2, 3, 4), TOKENS, full=True)
    best = (70, bits(-0.5), 3, bits(-1.5))
    write(mailbox, sequence, 0, 0, (bits(-0.5), 1, *best))
    write(mailbox, sequence, 0, 1, (bits(-4.0), 9, 3, bits(-0.25), 0xFFFFFFFF, bits(-math.inf)))
    logprobs = Logprobs(mailbox, None)
    assert logprobs.wait(replay, records, timeout=0) is None
    write(mailbox, sequence, 2, 0, (bits(-2.0), 4))
    found = logprobs.wait(replay, records, timeout=0)
    assert found == [
        ({70: Logprob(-0.5, 1), 3: Logprob(-1.5, 2)}, {71: Logprob(-4.0, 9), 3: Logprob(-0.25, 1)}),
        None,
        ({80: Logprob(-2.0, 4)},),
        None,
    ]
    assert [list(each) for each in found[0] or ()] == [[70, 3], [71, 3]]
    logprobs.clear()
    assert logprobs.wait(replay, records, timeout=0) is None


def test_equal_tokens_share_the_best_rank() -> None:
    mailbox = new_mailbox()
    best = (70, bits(-1.0), 3, bits(-1.0), 9, bits(-2.0))
    for token, rank in ((3, 1), (9, 3), (80, 5)):
        write(mailbox, 5, 0, 0, (bits(-1.0), rank, *best))
        found = mailbox.wait(5, [((token,), TOP)], timeout=0)
        assert found is not None and found[0] is not None
        ranks = {70: 1, 3: 1, 9: 3} | {token: rank}
        assert {each: logprob.rank for each, logprob in found[0][0].items()} == ranks


def test_an_item_is_believed_because_of_its_own_tag() -> None:
    mailbox = new_mailbox()
    items = (bits(-0.5), 1, 7, bits(-0.5))
    for missing in range(len(items)):
        write(mailbox, 5, 0, 0, items)
        mailbox.tensor[5 % ENTRIES, 0, missing] -= ENTRIES << 32
        assert mailbox.wait(5, [((7,), 1)], timeout=0) is None
    write(mailbox, 5, 0, 0, items)
    assert mailbox.wait(5, [((7,), 1)], timeout=0) is not None
    # The next replay of this entry has written nothing yet.
    assert mailbox.wait(5 + ENTRIES, [((7,), 1)], timeout=0) is None
    mailbox.clear()
    assert mailbox.wait(5, [((7,), 1)], timeout=0) is None


def test_nobody_waits_where_nothing_is_wanted() -> None:
    ended = request(1)
    ended.finish_reason = "cancelled"
    replay = Replay(5, (request(None), ended, request(3)), (1, 2, 3), TOKENS, full=True)
    records = [record(1), record(2), record()]
    found = Logprobs(new_mailbox(), None).wait(replay, records, timeout=0)
    assert found == [None] * 3


def test_waits_are_bounded() -> None:
    class Stream:
        def query(self) -> bool:
            return True

    mailbox = new_mailbox()
    with pytest.raises(TimeoutError, match="replay 5"):
        mailbox.wait(5, [((7,), 1)], limit=0.01)
    with pytest.raises(MailboxBroken, match="replay 5 finished without publishing"):
        mailbox.wait(5, [((7,), 1)], stream=Stream())
