"""Process groups on a CPU: all have the sum in the order of the ranks, or an error in time."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from events import GENEROUS_S
from torch import Tensor

from graphengine.models.launches import Share
from graphengine.parallel.collectives import exchange, process_group
from graphengine.parallel.collectives.exchange import Exchange
from graphengine.parallel.collectives.process_group import ProcessGroup
from graphengine.parallel.collectives.rendezvous import GroupError, Rendezvous
from timelines.fake_clock import Clock

Result = TypeVar("Result")
CPU = torch.device("cpu")


def on_all_ranks(
    folder: Path,
    ranks: int,
    work: Callable[[int, ProcessGroup], Result],
    limit_s: float = GENEROUS_S,
) -> list[Result]:
    def rank_of(rank: int) -> Result:
        group = ProcessGroup(str(folder / "rendezvous"), Share(rank, ranks), CPU, limit_s)
        result = work(rank, group)
        group.close()
        return result

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank_of, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_have_the_sum_in_the_order_of_the_ranks(tmp_path: Path, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    parts = [torch.randn(3, 50, generator=generator) * 10**rank for rank in range(ranks)]

    def work(rank: int, group: ProcessGroup) -> list[Tensor]:
        return [
            group.reduce(parts[rank].to(dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ]

    results = on_all_ranks(tmp_path, ranks, work)
    for found, *others in zip(*results, strict=True):
        total = torch.zeros(3, 50)
        for part in parts:
            total = total + part.to(found.dtype).float()
        assert torch.equal(found, total.to(found.dtype))
        assert all(torch.equal(found, other) for other in others)
    # The host program's group is its own.
    assert not torch.distributed.is_initialized()


def test_parts_that_no_socket_holds_are_exchanged(tmp_path: Path) -> None:
    parts = torch.arange(3 * 3 * 500_000, dtype=torch.float32).view(3, 3, 1, -1)
    results = on_all_ranks(tmp_path, 3, lambda rank, group: group.sum_own(parts[rank]))
    for rank, found in enumerate(results):
        assert torch.equal(found, parts[0][rank] + parts[1][rank] + parts[2][rank])


def test_each_has_the_sum_of_what_all_have_for_it(tmp_path: Path) -> None:
    parts = [torch.randn(3, 2, 2) * 10**rank for rank in range(3)]
    results = on_all_ranks(tmp_path, 3, lambda rank, group: group.sum_own(parts[rank]))
    for rank, found in enumerate(results):
        assert torch.equal(found, parts[0][rank] + parts[1][rank] + parts[2][rank])


# What a rank says that waits in vain.


def failure_of(work: Callable[[], object]) -> str:
    with pytest.raises(GroupError) as error:
        work()
    return str(error.value)


def test_a_rank_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the one that comes; both see that it leaves at last."""
    comes, failed, poll = threading.Event(), threading.Event(), exchange._poll

    def waiting(peers: list[Any], seconds: float) -> None:
        if {peer.rank for peer in peers} == {0, 1}:
            # The last rank's parts have left.
            comes.set()
        poll(peers, seconds)

    def work(rank: int, group: ProcessGroup) -> str:
        assert group.add_own is None
        group.gather(torch.ones(1, 4))
        if rank == 2:
            monkeypatch.setattr(exchange, "_poll", waiting)
        if rank == 1:
            assert failed.wait(GENEROUS_S)
            return ""
        if rank == 0:
            assert comes.wait(GENEROUS_S)
            group.limit_s = 0.2
        text = failure_of(lambda: group.sum_own(torch.ones(3, 1, 4)))
        failed.set()
        return text

    first, _, last = on_all_ranks(tmp_path, 3, work)
    assert first == "rank 0 of 3 waited 0.2 s for rank 1 in exchange 2, sum of own of 16 bytes"
    assert re.match("rank 2 of 3 lost rank [01] in exchange 2, sum of own of 16 bytes: ", last)


def test_ranks_that_are_at_different_exchanges_are_told(tmp_path: Path) -> None:
    def work(rank: int, group: ProcessGroup) -> str:
        if rank == 0:
            return failure_of(lambda: group.gather(torch.ones(1, 4)))
        return failure_of(lambda: group.sum_own(torch.ones(2, 1, 2)))

    gather, own = "exchange 1, gather of 16 bytes", "exchange 1, sum of own of 8 bytes"
    assert on_all_ranks(tmp_path, 2, work) == [
        f"rank 0 of 2 is at {gather}, and rank 1 at {own}",
        f"rank 1 of 2 is at {own}, and rank 0 at {gather}",
    ]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (signal.SIGSTOP, "rank 0 of 2 waited 0.2 s for rank 1 in exchange 1, gather of 4000000"),
        (signal.SIGKILL, "rank 0 of 2 lost rank 1 in exchange 1, gather of 4000000 bytes: "),
    ],
)
def test_a_rank_that_answers_no_more_is_named(
    tmp_path: Path, sent: signal.Signals, said: str
) -> None:
    """It stands, or is gone, between two exchanges."""

    def other() -> None:
        group = ProcessGroup(str(tmp_path / "rendezvous"), Share(1, 2), CPU, GENEROUS_S)
        os.kill(os.getpid(), sent)
        group.close()

    process = multiprocessing.get_context("fork").Process(target=other)
    process.start()
    group = ProcessGroup(str(tmp_path / "rendezvous"), Share(0, 2), CPU, GENEROUS_S)
    group.limit_s = 0.2 if sent is signal.SIGSTOP else GENEROUS_S
    text = failure_of(lambda: group.gather(torch.ones(1, 1_000_000)))
    process.kill()
    process.join()
    group.close()
    assert text.startswith(said) and "\n" not in text


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2"), (1, "rank 0"), (2, "rank 0")])
def test_a_rank_that_does_not_join_is_named(tmp_path: Path, rank: int, missing: str) -> None:
    text = failure_of(lambda: ProcessGroup(str(tmp_path / "rendezvous"), Share(rank, 3), CPU, 0.05))
    assert text == f"rank {rank} of 3 waited 0.05 s for {missing} at the rendezvous"


@pytest.mark.parametrize("where", ["socket", "store"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_looks_whether_the_others_will_come(tmp_path: Path, rank: int, where: str) -> None:
    """Every now and then, and at once."""
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise RuntimeError("they will not")

    rendezvous = Rendezvous(str(tmp_path / "rendezvous"), Share(rank, 2), GENEROUS_S, look)
    with pytest.raises(RuntimeError, match="they will not"):
        if where == "socket":
            Exchange(rendezvous)
        else:
            rendezvous.exchange("name", b"own")
    assert looks == 3


def test_ranks_exchange_values(tmp_path: Path) -> None:
    def values(rank: int) -> list[bytes]:
        rendezvous = Rendezvous(str(tmp_path / "rendezvous"), Share(rank, 3), GENEROUS_S)
        return rendezvous.exchange("name", b"%d" % rank) + rendezvous.exchange("other", b"x")

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(values, range(3))] == [[b"0", b"1", b"2", b"x", b"x", b"x"]] * 3


def test_a_rank_that_is_gone_when_others_join_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(Exchange, "_reach", lambda *_: ours)
    text = failure_of(
        lambda: ProcessGroup(str(tmp_path / "rendezvous"), Share(1, 2), CPU, GENEROUS_S)
    )
    assert text.startswith("rank 1 of 2 lost rank 0 at the rendezvous: ") and ours.fileno() == -1


def test_a_rank_without_the_others_stages_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Connection reset by peer\nand where")

    monkeypatch.setattr(process_group, "_gloo_group", fail)
    text = failure_of(
        lambda: ProcessGroup(str(tmp_path / "rendezvous"), Share(0, 1), CPU, 9, stages=True)
    )
    assert text == (
        "rank 0 of 1 waited, for at most 9 s, to connect with the other stages by gloo: "
        "Connection reset by peer"
    )


def test_nothing_is_met_once_it_is_closed(tmp_path: Path) -> None:
    def work(rank: int, group: ProcessGroup) -> None:
        group.close()
        with pytest.raises(AssertionError, match="it is closed"):
            group.gather(torch.ones(1, 4))

    on_all_ranks(tmp_path, 2, work)


def test_a_rank_knows_for_how_long_it_has_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank comes once the first one waits, for 3 seconds of this clock."""
    clock, poll = Clock(), exchange._poll
    second, waits = threading.Event(), threading.Event()

    def waiting(peers: list[Any], seconds: float) -> None:
        if second.is_set() and peers[0].rank == 1 and not waits.is_set():
            clock.now += 3.0
            waits.set()
        poll(peers, seconds)

    monkeypatch.setattr(exchange, "time", clock.module)
    monkeypatch.setattr(exchange, "_poll", waiting)

    def work(rank: int, group: ProcessGroup) -> float | None:
        assert group.waited_s == 0.0
        group.reduce(torch.ones(1, 4))
        if rank == 1:
            second.set()
            assert waits.wait(GENEROUS_S)
        assert second.wait(GENEROUS_S)
        group.gather(torch.ones(1, 4))
        return group.waited_s

    assert on_all_ranks(tmp_path, 2, work) == [3.0, 0.0]
