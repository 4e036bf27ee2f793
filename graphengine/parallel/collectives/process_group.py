"""Communication between ranks: all-reduces and gathers with the same bits on every rank.

Parts are added up in the order of the ranks, by each rank or by one that sends the sum to the
others, so the sum depends on neither the library's algorithm nor the number of rows. On a CPU,
sockets carry the parts (`exchange.py`), and gloo carries the tensors between pipeline stages. On
GPUs, kernels push parts into memory that all ranks map: small parts, as in a decode step, as items,
and a chunk's parts with flags. Where memory cannot be mapped, NCCL carries all parts. NCCL also
carries the tensors between stages; it refuses ranks that share a GPU. Pushes and NCCL are both
captured into the graphs.
The ranks have a group of their own: torch.distributed's default group stays the host program's.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphengine.kernels.comm.items import Peers
from graphengine.kernels.comm.push_lanes import ExpertLanes
from graphengine.kernels.comm.sums import sum_parts
from graphengine.models.launches import AddOwn, Share, SplitStream
from graphengine.models.splitting.pushes import Pushes
from graphengine.models.splitting.split_stream import GatheredStream
from graphengine.parallel.collectives.exchange import Exchange
from graphengine.parallel.collectives.peer_memory import PeerMemory, devices_of
from graphengine.parallel.collectives.rendezvous import GroupError, Rendezvous

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
# Torch starts a watchdog thread for each NCCL group, unless these are "0" in the environment. It
# ends the process when NCCL waits for long or has failed, and polls the store for such reports of
# other ranks. Here the store's file is removed once all ranks have joined, and ranks report
# failures in another way.
_WATCHERS = (
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
_environment = threading.Lock()
# Longest wait for NCCL's communicator to end, which takes half a second.
_END_LIMIT_S = 30.0


OPENING_LIMIT_S = 120.0
"""Seconds that a rank waits for the others while they open."""


class ProcessGroup:
    """The group of ranks that rendezvous through the same file; waits until all have joined.

    units         units of memory for pushes, on GPUs
    summed_words  words of the largest part that pushes sum
    pdl           whether launches of pushes may overlap the launches before them
    watch         int64 [2], where kernels note that this rank has waited in vain; given where
                  another process reads it. None: in memory of its own
    stages        whether ranks also send tensors to other stages, by NCCL or gloo
    check         see `Rendezvous`

    It has `pushes`, the collectives by pushes: None on a CPU, where memory cannot be mapped, and
    once this rank has left.

    Raises GroupError where a rank is gone or does not come to the rendezvous, and where
    ranks share a GPU and cannot map each other's memory.
    """

    def __init__(
        self,
        file: str,
        share: Share,
        device: torch.device,
        limit_s: float = OPENING_LIMIT_S,
        *,
        units: int = 1,
        summed_words: int = 0,
        pdl: bool = False,
        watch: Tensor | None = None,
        stages: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.share, rendezvous = share, Rendezvous(file, share, limit_s, check)
        self._on_gpu = device.type == "cuda"
        self.pushes: Pushes | None = None
        self._memory: PeerMemory | None = None
        self._torch_group: Any = None
        self._exchange: Exchange | None = None
        self._ending: threading.Thread | None = None
        if self._on_gpu:
            self._memory = PeerMemory(rendezvous, device, units, watch, summed_words=summed_words)
            problem = self._memory.problem
            if self._memory.tensors is not None:
                self.pushes = Pushes(self._memory.tensors, pdl=pdl)
            if problem or stages:
                self._torch_group = _nccl_group(rendezvous, device, problem)
        else:
            self._exchange = Exchange(rendezvous)
            if stages:
                self._torch_group = self._connect_stages(rendezvous)
        peers = self.peers
        # The host reads it through NumPy: reading an element of a tensor takes microseconds.
        self._watch = None if peers is None else peers.tensors.watch.numpy()
        self.limit_s = limit_s

    def _connect_stages(self, rendezvous: Rendezvous) -> Any:
        """Gloo's group. GroupError where a rank does not connect to gloo, too."""
        assert self._exchange is not None
        try:
            return _gloo_group(rendezvous)
        except RuntimeError as error:
            self._exchange.close()
            raise GroupError(
                f"rank {self.share.rank} of {self.share.ranks} waited, for at most "
                f"{rendezvous.limit_s:g} s, to connect with the other stages by gloo: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error

    @property
    def limit_s(self) -> float:
        """Seconds that a rank waits for the other ranks' parts.

        On GPUs the limit holds for pushes, from the next wait on; NCCL waits until it is aborted.
        """
        return self._limit_s

    @limit_s.setter
    def limit_s(self, seconds: float) -> None:
        self._limit_s = seconds
        if self._exchange is not None:
            self._exchange.limit_s = seconds
        if self._watch is not None:
            self._watch[1] = int(seconds * 1e9)

    @property
    def waited_s(self) -> float | None:
        """Seconds that this rank has waited for the others' parts since it joined; waits for its
        GPU.

        On a GPU it counts the wait of the first program of each push, and not NCCL's waits; None
        where NCCL carries everything.
        """
        if not self._on_gpu:
            return 0.0 if self._exchange is None else self._exchange.waited_s
        peers = self.peers
        return None if peers is None else peers.tensors.waited.item() / 1e9

    @property
    def peers(self) -> Peers | None:
        """Peer memory that kernels push into; None where memory cannot be mapped."""
        return None if self.pushes is None else self.pushes.peers

    @property
    def torch_group(self) -> Any:
        """Torch's process group, of gloo or NCCL; None where there is none, and after `close`."""
        return self._torch_group

    def reduce(self, part_NH: Tensor) -> Tensor:
        """All-reduce into a new tensor; see `Reduce`.

        On a CPU it raises GroupError like `Exchange.swap`.
        """
        pushes = self._pushes(part_NH)
        return sum_parts(self.gather(part_NH)) if pushes is None else pushes.reduce(part_NH)

    def split_stream(self, lanes: int, hidden: int, dtype: torch.dtype) -> SplitStream | None:
        """The residual stream of a chunk split over ranks, see `OpenSplit`; None where all ranks
        keep all lanes, as two GPUs do for small chunks.
        """
        if not self._on_gpu:
            normed = torch.zeros(lanes, hidden, dtype=dtype)
            return GatheredStream(self.share, normed, self.reduce, self.gather)
        return None if self.pushes is None else self.pushes.split_stream(lanes, hidden, dtype)

    def gather(self, part_NC: Tensor) -> Tensor:
        """All-gather into a new `[ranks, N, C]`, in rank order.

        On a CPU it raises GroupError like `Exchange.swap`.
        """
        part_NC = part_NC.contiguous()
        pushes = self._pushes(part_NC)
        if pushes is not None:
            return pushes.gather(part_NC)
        gathered = part_NC.new_empty((self.share.ranks, *part_NC.shape))
        if self._on_gpu:
            _nccl_gather(self._torch_group, gathered.flatten(0, 1), part_NC).wait()
        else:
            self._swap("gather", [part_NC] * self.share.ranks, gathered)
        return gathered

    def sum_own(self, parts_RNC: Tensor) -> Tensor:
        """Reduce-scatter into a new `[N, C]`: all ranks' parts for this rank, summed in rank order.

        On a CPU it raises GroupError like `Exchange.swap`.
        """
        parts_RNC = parts_RNC.contiguous()
        pushes = self._pushes(parts_RNC[0])
        if pushes is not None:
            return pushes.sum_own(parts_RNC)
        exchanged = torch.empty_like(parts_RNC)
        if self._on_gpu:
            sent, received = parts_RNC.view(torch.uint8), exchanged.view(torch.uint8)
            self._torch_group.alltoall_base(received, sent, [], []).wait()
        else:
            self._swap("sum of own", parts_RNC.unbind(), exchanged)
        return sum_parts(exchanged)

    @property
    def add_own(self) -> AddOwn | None:
        """A kernel that pushes ranks' parts for each other in a decode step, and adds the sum to
        the residual stream; None where nothing is pushed.
        """
        return None if self.pushes is None else self.pushes.add_own

    def push_candidates(self, best_NC: Tensor, health_NC: Tensor) -> tuple[Tensor, Tensor] | None:
        """The candidates of all ranks, in one launch; None where nothing is pushed."""
        return None if self.pushes is None else self.pushes.push_candidates(best_NC, health_NC)

    def push_lanes(self, lanes: ExpertLanes) -> ExpertLanes | None:
        """The lanes of all ranks, in one launch; None where nothing is pushed, or the memory is too
        small for them.
        """
        return None if self.pushes is None else self.pushes.push_lanes(lanes)

    def _swap(self, name: str, sent: Sequence[Tensor], received: Tensor) -> None:
        assert self._exchange is not None, "a GPU's parts go another way"
        self._exchange.swap(name, sent, received.unbind())

    def _pushes(self, part: Tensor) -> Pushes | None:
        """The pushes of this part; None where it is not pushed."""
        pushes = self.pushes
        if pushes is None or self._torch_group is None:
            return pushes
        return pushes if pushes.peers.hold(part) else None

    def check(self) -> None:
        """Raise GroupError once this rank has waited in vain: its results since are invalid."""
        if self._watch is not None:
            check_watch(self._watch, self.share, self.limit_s)

    def abandon(self) -> None:
        """End the communication under way, which other ranks may never answer."""
        if self._watch is not None:
            self._watch[0] = 1
        self._end_nccl()

    def leave(self) -> None:
        """Unmap the other ranks' memory, once nothing is under way."""
        if self._memory is not None:
            self._memory.leave()
        self._watch = self.pushes = None

    def close(self) -> None:
        """Free this rank's memory, once other ranks have unmapped it and no graph uses it."""
        self.leave()
        self._end_nccl()
        if self._ending is not None:
            self._ending.join(_END_LIMIT_S)
            if self._ending.is_alive():
                log.warning("NCCL has not let go of its memory within %g s", _END_LIMIT_S)
        self._torch_group = None
        if self._exchange is not None:
            self._exchange.close()
        if self._memory is not None:
            self._memory.close()

    def _end_nccl(self) -> None:
        """End NCCL's kernels and then its communicator, in a thread: NCCL waits until no captured
        graph uses it.
        """
        if self._on_gpu and self._torch_group is not None and self._ending is None:
            self._ending = threading.Thread(target=self._torch_group.abort, daemon=True)
            self._ending.start()


def check_watch(watch: NDArray[np.int64], share: Share, limit_s: float) -> None:
    """Raise GroupError once a rank has waited in vain: its results since are invalid."""
    if watch[0]:
        raise GroupError(
            f"rank {share.rank} of {share.ranks} waited {limit_s:g} s for the others' parts"
        )


def _gloo_group(rendezvous: Rendezvous) -> Any:
    options = torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    device = torch.distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK)
    # torch has no public names for these. By default it takes the interface that the host's name
    # resolves to.
    setattr(options, "_devices", [device])  # noqa: B010
    setattr(options, "_timeout", timedelta(seconds=rendezvous.limit_s))  # noqa: B010
    return torch.distributed.ProcessGroupGloo(rendezvous.store, *rendezvous.share, options)


def _nccl_group(rendezvous: Rendezvous, device: torch.device, problem: str) -> Any:
    """The NCCL group of ranks that have a GPU each; None where some share one.

    problem  why ranks cannot push; "": they can
    """
    share, devices = rendezvous.share, devices_of(rendezvous, device)
    if len(set(devices)) < share.ranks:
        if problem:
            raise GroupError(
                f"{share.ranks} ranks on {len(set(devices))} GPUs communicate by mapped memory "
                f"alone: {problem}"
            )
        return None
    if problem:
        log.warning("NCCL carries the sums of all steps: %s", problem)
    options = torch.distributed.ProcessGroupNCCL.Options()
    with _unwatched():
        return torch.distributed.ProcessGroupNCCL(rendezvous.store, *share, options)


@contextmanager
def _unwatched() -> Iterator[None]:
    """Inside, torch makes NCCL groups without its `_WATCHERS`."""
    with _environment:
        before = {name: os.environ.get(name) for name in _WATCHERS}
        os.environ.update(dict.fromkeys(_WATCHERS, "0"))
        try:
            yield
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value


def _nccl_gather(group: Any, gathered: Tensor, part: Tensor) -> Any:
    return torch.distributed.ProcessGroupNCCL._allgather_base(  # type: ignore[attr-defined]
        group, gathered, part
    )
