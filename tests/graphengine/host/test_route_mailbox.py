"""Experts on their way from the mailboxes to requests, and records on theirs to the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from graphengine import Request, SamplingParams
from graphengine.buckets.mailbox import MailboxBroken
from graphengine.host.routes import RouteMailbox, RouteTable, Routing
from graphengine.host.step_plan import PrefillChunk, Replay
from graphengine.kernels.experts.records import route_items
from graphengine.kernels.step.record import pack_state
from graphengine.kernels.step.state import EMITTED
from graphengine.models.weights import RoutedExperts
from graphengine.requests.job import Job
from graphengine.requests.routes import RecordedRoutes

CPU = torch.device("cpu")
# An odd number of ids.
ROUTED = RoutedExperts(layers=1, experts=9, chosen=3, parameters=1, nbytes=2)
ITEMS = route_items(ROUTED.layers, ROUTED.chosen)
ENTRIES, LANES, WIDTH, CHUNK, EPOCH = 4, 3, 2, 5, 6


def new_routing() -> Routing:
    return Routing(
        RouteMailbox(ENTRIES, LANES, WIDTH * ITEMS, (ROUTED.layers, ROUTED.chosen), device=CPU),
        RouteMailbox(ENTRIES, CHUNK, ITEMS, (ROUTED.layers, ROUTED.chosen), device=CPU),
        RouteTable(LANES, 8, ROUTED, device=CPU),
    )


def request(prompt_len: int = 1, given: Sequence[Sequence[int]] | None = None) -> Request:
    job = Job(prompt_len=prompt_len, max_len=prompt_len + 8, routes=RecordedRoutes(4, 1, 3))
    if given is not None:
        job.given_routes = np.array(given, np.int16)[:, None]
    return Request(
        request_id=1,
        prompt_token_ids=range(prompt_len),
        params=SamplingParams(),
        seed=0,
        submitted=0.0,
        cancelled=[],
        job=job,
    )


def record(count: int, epoch: int = EPOCH) -> tuple[int, ...]:
    """A lane of the first mailbox."""
    return (*[0] * WIDTH, pack_state(epoch, count, count, EMITTED if count else 0))


def write(mailbox: RouteMailbox, sequence: int, lane: int, token: int, ids: Sequence[int]) -> None:
    words = (ids[0] | ids[1] << 16, ids[2] | 0xFFFF << 16)
    for index, payload in enumerate(words, token * ITEMS):
        mailbox.tensor[sequence % ENTRIES, lane, index] = sequence << 32 | payload


def recorded(one: Request) -> list[list[int]]:
    routes = one.job.routes
    assert routes is not None
    return [ids[0] for ids in routes.array(routes.fed).tolist()]


def test_what_rows_have_emitted_is_read_and_nothing_else() -> None:
    routing, sequence = new_routing(), 5
    two, none, ended = request(), request(), request()
    two.job.tokens.append(7)
    ended.cancel()
    replay = Replay(sequence, (two, none, ended), (EPOCH,) * 3, WIDTH, LANES)
    records = [record(2), record(0), record(2)]
    write(routing.tokens, sequence, 0, 0, (8, 0, 3))
    # That of two replays before has another tag.
    write(routing.tokens, sequence - ENTRIES, 0, 1, (1, 2, 3))
    assert not routing.wait(replay, records, timeout=0)
    write(routing.tokens, sequence, 0, 1, (5, 6, 7))
    for _ in range(2):
        assert routing.wait(replay, records, timeout=0)
        assert recorded(two) == [[-1, -1, -1], [8, 0, 3], [5, 6, 7]]
    assert recorded(none) == recorded(ended) == []
    # A row of a slot's earlier request is nobody's.
    late = Replay(sequence + 1, (none,), (EPOCH,), WIDTH, LANES)
    assert routing.wait(late, [record(2, EPOCH - 1)], timeout=0) and recorded(none) == []
    routing.clear()
    assert not routing.wait(replay, records, timeout=0)


def test_a_chunk_fills_its_positions_once_all_of_it_is_there() -> None:
    routing, sequence = new_routing(), 3
    one = request(prompt_len=20)
    chunk = PrefillChunk(request=one, start=3, count=4)
    replay = Replay(sequence, (one,), (EPOCH,), 1, chunk=chunk)
    for token in (0, 1, 3):
        write(routing.prompts, sequence, token, 0, (token, 7, 8))
    assert not routing.wait(replay, [record(0)], timeout=0)
    write(routing.prompts, sequence, 2, 0, (2, 7, 8))
    assert routing.wait(replay, [record(0)], timeout=0)
    assert recorded(one) == [[-1] * 3] * 3 + [[token, 7, 8] for token in range(4)]
    # What is only noted is fed to no layer, and publishes nothing.
    noted = PrefillChunk(request=one, start=0, count=3, noted=True)
    assert routing.wait(Replay(4, (one,), (EPOCH,), 1, chunk=noted), [record(0)], timeout=0)
    assert recorded(one)[:3] == [[-1] * 3] * 3


def test_a_step_that_never_publishes_its_experts_is_an_error() -> None:
    class Idle:
        def query(self) -> bool:
            return True

    routing = new_routing()
    replay = Replay(2, (request(),), (EPOCH,), WIDTH, LANES)
    routing.tokens._stream_checked_at = 0.0
    with pytest.raises(MailboxBroken, match="replay 2 finished without publishing"):
        routing.wait(replay, [record(1)], stream=Idle(), limit=60.0)


def test_the_table_has_the_record_of_the_request_in_the_slot() -> None:
    table = RouteTable(3, 8, ROUTED, device=CPU)
    one, free = request(given=[(1, 2, 3), (4, 5, 6)]), request()
    assert table.updates([None, one, free]) == {"routing_len": [0, 2, 0]}
    assert table.tensor[1, :2, 0].tolist() == [[1, 2, 3], [4, 5, 6]]
    other = request(given=[(6, 7, 8)])
    assert table.updates([None, other, None]) == {"routing_len": [0, 1, 0]}
    assert table.tensor[1, :2, 0].tolist() == [[6, 7, 8], [4, 5, 6]]
