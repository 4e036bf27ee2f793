"""Process groups on GPUs, with stand-ins for what a GPU does: all map all, or all do without."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from graphengine.config import EngineConfig
from graphengine.kernels.comm.items import UNIT as PUSH_UNIT
from graphengine.kernels.comm.layout import PeerLayout
from graphengine.kernels.comm.push_lanes import ExpertLanes
from graphengine.kernels.comm.push_residual import push_own_to_residual
from graphengine.models.launches import Share
from graphengine.models.splitting import pushes
from graphengine.parallel.collectives import peer_memory, process_group
from graphengine.parallel.collectives.process_group import OPENING_LIMIT_S, ProcessGroup
from graphengine.parallel.collectives.rendezvous import GroupError, Rendezvous
from graphengine.parallel.ranks import ONE_DEVICE, rank_devices

Result = TypeVar("Result")
UNITS = 5
WATCHERS = (
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


class Exported:
    """Memory of this process, by its address."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=torch.int64)
        self.address = self.tensor.data_ptr()
        self.handle = self.address.to_bytes(8, "little")
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Mapped:
    def __init__(self, handle: bytes, device: torch.device) -> None:
        if handle == b"none":
            raise RuntimeError("a handle of nothing")
        self.address = int.from_bytes(handle, "little")

    def close(self) -> None:
        raise RuntimeError("the device is broken")


class NoMemory:
    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        raise RuntimeError("cudaMalloc: cudaErrorMemoryAllocation")


class Group:
    """In place of NCCL's.

    aborting, aborted  that it was told to end, and has: not while there is a graph that has it
    watchers           what the environment said of torch's when it was made
    """

    def __init__(self) -> None:
        self.aborting, self.aborted = threading.Event(), 0
        self.graphs_closed = threading.Event()
        self.watchers = [os.environ[name] for name in WATCHERS]

    def abort(self) -> None:
        self.aborting.set()
        self.graphs_closed.wait(20.0)
        self.aborted += 1

    def alltoall_base(self, received: Any, sent: Any, *sizes: list[int]) -> Done:
        """Pretend that the other rank had sent nothing."""
        assert sizes == ([], []) and received.dtype == sent.dtype == torch.uint8
        received.zero_()
        return Done("exchanged")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The GPU of each rank."""
    named = {0: "GPU-a", 1: "GPU-b"}

    def devices_of(rendezvous: Rendezvous, device: torch.device) -> list[str]:
        return [named[rank] for rank in range(rendezvous.share.ranks)]

    monkeypatch.setattr(peer_memory, "ExportedMemory", Exported)
    monkeypatch.setattr(peer_memory, "MappedMemory", Mapped)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(process_group, "devices_of", devices_of)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NcclStandIn, raising=False)
    for name in WATCHERS:
        monkeypatch.delenv(name, raising=False)
    return named


class NcclStandIn:
    Options = dict

    def __new__(cls, *args: Any) -> Any:
        return Group()


def on_two_ranks(
    folder: Path, work: Callable[[ProcessGroup], Result], **options: Any
) -> list[Result]:
    def rank_of(rank: int) -> Result:
        file, place = str(folder / "rendezvous"), torch.device("cuda", rank)
        return work(ProcessGroup(file, Share(rank, 2), place, 20.0, units=UNITS, **options))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank_of, range(2)))


def test_stages_push_what_is_small(
    devices: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("push_sum", "push_gather", "push_own_sum", "push_lanes", "_nccl_gather"):
        module = process_group if name == "_nccl_gather" else pushes
        monkeypatch.setattr(module, name, lambda *args, name=name, **options: Done(name))
    monkeypatch.setattr(process_group, "sum_parts", lambda parts: "summed")
    small, large = torch.zeros(UNITS, PUSH_UNIT), torch.zeros(UNITS, PUSH_UNIT + 1)

    def work(group: ProcessGroup) -> tuple[Any, ...]:
        peers = group.peers
        assert peers is not None and peers.rank == group.share.rank
        # Its own is last, and in it what this rank stores.
        assert peers.tensors.outboxes[1] == peers.tensors.items[0, peers.rank].data_ptr()
        assert peers.tensors.watch.tolist() == [0, 20 * 10**9]
        peers.tensors.waited.fill_(2_500_000)
        assert group.waited_s == 0.0025
        group.limit_s = 0.5
        assert peers.tensors.watch[1] == 5 * 10**8
        assert group.reduce(small) == Done("push_sum")
        assert group.gather(small) == Done("push_gather")
        assert group.add_own.func is push_own_to_residual and group.add_own.args == (peers,)
        assert group.sum_own(small.repeat(2, 1, 1)) == Done("push_own_sum")
        assert group.sum_own(large.repeat(2, 1, 1)) == "summed"
        # Five tensors, each of which begins a unit of its own.
        assert group.push_lanes(lanes_of(32, torch.zeros(1, 32))) == Done("push_lanes")
        assert group.push_lanes(lanes_of(33, torch.zeros(1, 33))) is None
        assert group.reduce(large) == "summed"
        assert group.gather(large).shape == (2, *large.shape)
        return peers.tensors, group

    (first, group), (second, _) = on_two_ranks(tmp_path, work, stages=True)
    assert first.outboxes[0] == second.items[0, 0].data_ptr()
    assert second.outboxes[0] == first.items[0, 1].data_ptr()
    group.check()
    group.abandon()
    with pytest.raises(GroupError, match=r"rank 0 of 2 waited 0\.5 s for the others' parts"):
        group.check()
    torch_group = group.torch_group
    assert torch_group.aborting.wait(20.0) and not torch_group.aborted
    group.leave()
    group.check()
    assert group._memory._own is not None and not group._memory._own.closed
    torch_group.graphs_closed.set()
    group.close()
    assert group._memory._own is None and group.torch_group is None
    assert torch_group.aborted == 1 and torch_group.watchers == ["0", "0", "0"]
    assert not {*WATCHERS} & {*os.environ}


def test_nccl_that_does_not_end_is_not_waited_for(
    devices: dict[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(process_group, "_END_LIMIT_S", 0.01)
    monkeypatch.setenv(WATCHERS[1], "7")
    group, other = on_two_ranks(tmp_path, lambda group: group, stages=True)
    assert [os.environ.get(name) for name in WATCHERS] == [None, "7", None]
    torch_group = group.torch_group
    group.close()
    assert caplog.messages == ["NCCL has not let go of its memory within 0.01 s"]
    for each in (torch_group, other.torch_group):
        each.graphs_closed.set()
    other.close()
    assert len(caplog.messages) == 1


def lanes_of(lanes: int, squares: torch.Tensor | None) -> ExpertLanes:
    pairs = torch.zeros(lanes, 2, dtype=torch.int32)
    slot = torch.zeros(lanes, dtype=torch.int32)
    return ExpertLanes(torch.zeros(lanes, 8), slot, pairs, pairs.float(), squares)


class Done(str):
    """A name, and a work of NCCL's that is done."""

    def wait(self) -> None:
        pass


def test_another_process_may_read_whether_a_rank_has_waited_in_vain(
    devices: dict[int, str], tmp_path: Path
) -> None:
    watch = torch.zeros(2, 2, dtype=torch.int64)

    def rank_of(rank: int) -> ProcessGroup:
        share, place = Share(rank, 2), torch.device("cuda", rank)
        return ProcessGroup(
            str(tmp_path / "rendezvous"), share, place, units=UNITS, watch=watch[rank]
        )

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(rank_of, range(2)))
    assert watch.tolist() == [[0, int(OPENING_LIMIT_S * 1e9)]] * 2
    groups[1].abandon()
    groups[0].check()
    assert watch[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("share_a_gpu", [False, True])
def test_ranks_push_all(
    devices: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share_a_gpu: bool
) -> None:
    """What is larger than their items is summed with flags; NCCL is not begun."""
    if share_a_gpu:
        devices[1] = devices[0]
    for name in ("push_sum", "push_own_sum", "all_reduce"):
        monkeypatch.setattr(pushes, name, lambda *args, name=name, **options: (name, args))
    small, large = torch.zeros(UNITS, PUSH_UNIT), torch.zeros(UNITS, PUSH_UNIT + 1)

    def work(group: ProcessGroup) -> tuple[Any, ...]:
        assert group._memory is not None and group.torch_group is None
        memory = group._memory.tensors
        assert memory is not None
        assert group.reduce(small) == ("push_sum", (memory.peers, small))
        assert group.reduce(large) == ("all_reduce", (memory.peers, memory.summing, large))
        assert group.sum_own(large.repeat(2, 1, 1))[0] == "push_own_sum"
        return memory.peers.tensors.items, memory.summing, memory.split, group

    (items, own, split, group), (_, *others, _) = on_two_ranks(tmp_path, work, summed_words=3000)
    # Behind the items, at the others first.
    for kept, other in zip((own, split), others, strict=True):
        assert kept.boxes.tolist() == [other.own.data_ptr(), kept.own.data_ptr()]
        assert not kept.own.any() and not kept.tags.any()
    assert own.own.data_ptr() == items.data_ptr() + items.nbytes
    assert split.own.data_ptr() == own.own.data_ptr() + own.own.nbytes
    assert own.size == 128 * 4096 and split.size == 3000
    exported, layout = group._memory._own.tensor, PeerLayout.of(2, UNITS, 3000)
    assert exported.nbytes == layout.nbytes == items.nbytes + own.own.nbytes + split.own.nbytes
    group.close()
    assert group._memory.tensors is group.pushes is None
    assert group.split_stream(6, 1000, torch.bfloat16) is None


def test_streams_are_split_where_parts_are_too_large_for_items(
    devices: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two ranks begin later.
    assert pushes._LEAST_SPLIT > 2 * 26 * 100
    monkeypatch.setattr(pushes, "_LEAST_SPLIT", 2 * 26 * 100)

    def work(group: ProcessGroup) -> None:
        # Items hold 1,280 words, and a lane has 50.
        assert group.split_stream(25, 100, torch.bfloat16) is None
        stream = group.split_stream(26, 100, torch.bfloat16)
        assert stream is not None and group._memory is not None
        assert group._memory.tensors is not None
        split = group._memory.tensors.split
        assert split is not None
        assert stream.normed_NH.data_ptr() == split.own.data_ptr() + 4 * 3000
        assert stream.normed_NH.shape == (26, 100)
        # 3,000 words, of one lane more.
        assert group.split_stream(61, 100, torch.bfloat16) is None

    on_two_ranks(tmp_path, work, summed_words=3000)
    others = [tmp_path / "late", tmp_path / "none"]
    for each in others:
        each.mkdir()
    monkeypatch.setattr(pushes, "_LEAST_SPLIT", 2 * 26 * 100 + 1)
    for folder, words in zip(others, (3000, 0), strict=True):
        found = on_two_ranks(
            folder,
            lambda group: group.split_stream(26, 100, torch.bfloat16),
            summed_words=words,
        )
        assert found == [None, None]


def test_without_chunks_all_is_pushed_in_pieces(
    devices: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "push_sum", lambda *args, **options: "pushed")
    large = torch.zeros(UNITS, PUSH_UNIT + 1)
    assert on_two_ranks(tmp_path, lambda group: group.reduce(large)) == ["pushed"] * 2


def test_what_one_cannot_map_nobody_uses(
    devices: dict[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[Exported] = []

    def export(shape: tuple[int, ...], device: torch.device) -> Exported:
        if device.index == 1:
            NoMemory(shape, device)
        made.append(Exported(shape, device))
        return made[-1]

    monkeypatch.setattr(peer_memory, "ExportedMemory", export)
    reason = "rank 0 (cuda:0) cannot map the memory of rank 1: a handle of nothing"
    for group in on_two_ranks(tmp_path, lambda group: group, summed_words=3000):
        assert (
            group.peers is None
            and group.add_own is None
            and group.push_lanes(lanes_of(1, None)) is None
            and group._memory.problem == reason
        )
        group.limit_s = 1.0
        group.check()
    assert [each.closed for each in made] == [True]
    assert caplog.messages == [f"NCCL carries the sums of all steps: {reason}"] * 2
    devices[1] = devices[0]
    message = r"2 ranks on 1 GPUs communicate by mapped memory alone: rank 0 \(cuda:0\) cannot map"
    with pytest.raises(GroupError, match=message):
        on_two_ranks(tmp_path / "..", lambda group: group)


def test_ranks_may_be_put_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONE_DEVICE, "1")
    for name, value in (("is_available", True), ("device_count", 4)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert rank_devices(EngineConfig(device="cuda:2", tensor_parallel=2)) == ["cuda:2"] * 2
