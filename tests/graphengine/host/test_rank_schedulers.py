"""Ranks with requests of their own: who gets a request, and who waits for whom."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from graphengine import QueueFull, Request, SamplingParams
from graphengine.host.rank_schedulers import RankSchedulers
from graphengine.host.scheduler import Scheduler
from graphengine.requests.context import Context, SharedPrompt
from graphengine.requests.job import Job
from graphengine.requests.request import Phase


def ranks_of(
    count: int, slots: int, max_waiting: int | None = None, **sizes: int
) -> RankSchedulers:
    counters: Counter[str] = Counter()
    sizes = {"kv_blocks": 64, "swap_blocks": 0, "block_size": 4, "max_chunk": 8} | sizes
    ranks = [Scheduler(slots=slots, counters=counters, **sizes) for _ in range(count)]
    return RankSchedulers(ranks, max_waiting)


def make_request(
    number: int, *, priority: int = 0, prompt: int = 1, context: Context | None = None
) -> Request:
    request = Request(
        request_id=number,
        prompt_token_ids=range(prompt),
        params=SamplingParams(),
        seed=0,
        submitted=0.0,
        cancelled=[],
        priority=priority,
        job=Job(prompt_len=prompt, max_len=prompt + 8),
    )
    request.job.context = context
    return request


def held(schedulers: RankSchedulers) -> list[list[int]]:
    """Ids of each rank's requests, in the order in which they came."""
    return [[request.id for request in each.active] for each in schedulers.ranks]


def test_the_rank_with_the_fewest_requests_gets_the_next() -> None:
    schedulers = ranks_of(3, slots=2)
    requests = [make_request(number) for number in range(8)]
    for request in requests:
        schedulers.submit(request)
    assert schedulers.plan() is not None
    assert held(schedulers) == [[0, 3], [1, 4], [2, 5]]
    assert [request.id for request in schedulers.waiting] == [6, 7] and schedulers.busy
    for number in (4, 2, 5):
        schedulers.retire(requests[number])
    schedulers.plan()
    assert held(schedulers) == [[0, 3], [1], [6, 7]]
    assert not schedulers.waiting


def test_of_equal_ranks_the_one_with_more_free_blocks_gets_it() -> None:
    schedulers = ranks_of(2, slots=2)
    for request in (make_request(1, prompt=40), make_request(2), make_request(3)):
        schedulers.submit(request)
        schedulers.plan()
    assert held(schedulers) == [[1], [2, 3]]


def test_a_session_waits_for_its_rank_and_others_pass() -> None:
    schedulers = ranks_of(2, slots=1)
    context = Context()
    first = make_request(1, context=context)
    schedulers.submit(first)
    schedulers.plan()
    assert context.rank == 0 and schedulers.home(context) is schedulers.ranks[0]
    schedulers.submit(make_request(2, context=context))
    schedulers.submit(make_request(3))
    schedulers.plan()
    assert held(schedulers) == [[1], [3]]
    schedulers.retire(first)
    schedulers.plan()
    assert held(schedulers) == [[2], [3]]


def test_all_ranks_have_one_queue_with_one_limit() -> None:
    schedulers = ranks_of(2, slots=1, max_waiting=1)
    schedulers.check_queue(3)
    with pytest.raises(QueueFull, match=r"0 requests wait .* 4 more would exceed max_waiting=1"):
        schedulers.check_queue(4)
    for number in range(3):
        schedulers.submit(make_request(number))
    schedulers.plan()
    message = r"1 requests wait already: another one would exceed max_waiting=1$"
    with pytest.raises(QueueFull, match=message):
        schedulers.check_queue()
    early = make_request(9, priority=-1)
    schedulers.submit(early)
    assert [request.id for request in schedulers.waiting] == [9, 2]
    schedulers.retire(early)
    assert early.phase is Phase.FINISHED and ("finished", 9) in schedulers.moves
    message = r"a request of 108 tokens \(prompt 100 \+ 8 new\) needs 27 KV blocks .* has 20"
    with pytest.raises(ValueError, match=message):
        ranks_of(2, slots=1, kv_blocks=20).submit(make_request(1, prompt=100))


def test_nothing_is_left_of_requests_that_come_and_go() -> None:
    dice = random.Random(1)
    schedulers = ranks_of(3, slots=2)
    alive: list[Request] = []
    for number in range(300):
        if dice.random() < 0.5:
            alive.append(
                make_request(number, priority=dice.randrange(3), prompt=dice.randrange(1, 20))
            )
            schedulers.submit(alive[-1])
        if alive and dice.random() < 0.5:
            schedulers.retire(alive.pop(dice.randrange(len(alive))))
        schedulers.plan()
        assert {*schedulers.active, *schedulers.waiting} == {*alive}
        vacant = any(None in each.slots for each in schedulers.ranks)
        assert not (vacant and schedulers.waiting)
    assert len(alive) > 5
    schedulers.close()
    assert not schedulers.busy and not schedulers.active and not schedulers.waiting
    assert all(pool.free == pool.count for pool in schedulers.pools)


def samples_of(count: int) -> list[Request]:
    requests = [make_request(number, prompt=10) for number in range(count)]
    shared = SharedPrompt(waiting={request.id for request in requests})
    for request in requests:
        request.job.shared = shared
    return requests


def test_samples_of_a_prompt_go_to_its_rank_while_there_is_room() -> None:
    schedulers = ranks_of(2, slots=2)
    requests = samples_of(3)
    for request in requests:
        schedulers.submit(request)
    for _ in range(6):
        schedulers.plan()
    assert held(schedulers) == [[0, 1], [2]]
    assert [request.cached_tokens for request in requests] == [0, 8, 0]
    assert requests[2].job.shared is None
    # Those that have not begun end together with what they share.
    queued = samples_of(4)
    for request in queued:
        schedulers.submit(request)
    shared = queued[0].job.shared
    assert shared is not None
    for request in queued:
        request.cancel()
        schedulers.retire(request)
    assert shared.closed and not shared.waiting
