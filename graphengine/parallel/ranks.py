"""The other ranks' processes, seen from the driver: starts, commands, watches and ends them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from graphengine.buckets import MailboxBroken
from graphengine.config import EngineConfig
from graphengine.core.commands import Close, Command
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.launches import Share
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.inventory import LinkShape
from graphengine.parallel.collectives.rendezvous import GroupError
from graphengine.parallel.link import ALL, DriverEnd, LinkMemory, Stage
from graphengine.parallel.process_handles import RankProcess, SpawnedRank, check_may_start
from graphengine.parallel.torchrun import lead
from graphengine.parallel.worker import RankStart, run_rank

# Longest wait for a rank that loads or captures longer than the driver.
_LOAD_LIMIT_S = 600.0
# Least rate at which any rank reads and rounds new weights; when the driver begins to wait, it has
# done its own part.
_UPDATE_BYTES_PER_S = 2**27
# Longest waits: for a rank's reason after others noticed its failure, and for a rank to close.
_GRACE_S, _CLOSE_S = 2.0, 5.0
_PAUSE_S = 1e-3
_LOOK_S = 0.5
# Linux keeps files in memory there.
_MEMORY = Path("/dev/shm")
# Errors that the driver gets when a rank has ended.
_ABOUT_RANKS = (GroupError, MailboxBroken, TimeoutError)


ONE_DEVICE = "GRAPHENGINE_RANKS_ON_ONE_DEVICE"
"""For tests: if this is in the environment, all ranks run on the driver's GPU, which time-slices
them. That shows that they decode, and is slow."""


class RankFailed(RuntimeError):
    """A rank has ended, raised or stopped; the message includes the rank's own words."""


def rank_devices(config: EngineConfig) -> list[str]:
    """The device of each rank, the driver's first. ValueError where there are too few.

    All ranks get the same device if the environment has `ONE_DEVICE`.
    """
    ranks, device = config.ranks, torch.device(config.device)
    if device.type == "cpu":
        return ["cpu"] * ranks
    first = torch.cuda.current_device() if device.index is None else device.index
    if ONE_DEVICE in os.environ:
        return [f"cuda:{first}"] * ranks
    found = torch.cuda.device_count()
    if first + ranks > found:
        raise ValueError(
            f"{config.ranks_option} from device cuda:{first} on takes {ranks} devices: torch "
            f"finds {found}, of which {found - first} are left"
        )
    return [f"cuda:{first + rank}" for rank in range(ranks)]


class Ranks:
    """The processes of all ranks but rank 0, the driver's.

    checkpoint      the checkpoint that the driver has read
    memories        each rank's plan, rank 0 first; `load_bytes` is the same in all
    launched        whether torchrun has started the processes; else they are spawned
    broken          whether driver and ranks may disagree; then `close` ends the ranks without
                    asking them
    before_waiting  called when the slowest rank has no room for a command: does work that the
                    driver has postponed and that ranks wait for

    ValueError, before anything is started, in a process that may have no children.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        memories: Sequence[MemoryPlan],
        devices: Sequence[str],
        *,
        launched: bool = False,
    ) -> None:
        if not launched:
            check_may_start(config)
        self.broken = False
        self.before_waiting: Callable[[], object] = lambda: None
        self._limit = config.wait_limit_s
        self._folder = Path(tempfile.mkdtemp(prefix="graphengine-ranks-", dir=_place(config)))
        self.rendezvous = str(self._folder / "rendezvous")
        self._devices = list(devices)
        self._processes: list[RankProcess] = []
        # At the end of the program this runs before multiprocessing waits for its children.
        atexit.register(self._kill)
        try:
            if launched:
                link, joined = lead(self._folder, checkpoint, memories[0], len(devices))
                self._processes += joined
            else:
                link = self._spawn(checkpoint, config, memories)
        except BaseException:
            self.broken = True
            self.close()
            raise
        self._end = DriverEnd(link, memories[0].graphs)

    def _spawn(
        self, checkpoint: Checkpoint, config: EngineConfig, memories: Sequence[MemoryPlan]
    ) -> LinkMemory:
        """Start a process for each other rank."""
        context = multiprocessing.get_context("spawn")
        ranks = len(self._devices)
        shape = LinkShape.of_loads(ranks - 1, memories[0].load_bytes)
        link = LinkMemory.allocate(context, shape)
        for rank, device in enumerate(self._devices[1:], start=1):
            start = RankStart(
                share=Share(rank, ranks),
                path=os.fspath(checkpoint.path),
                digest=checkpoint.digest,
                config=config.of_rank(device),
                memory=replace(memories[rank], device=torch.device(device)),
                link=link,
                rendezvous=self.rendezvous,
                driver=os.getpid(),
                threads=torch.get_num_threads(),
            )
            name = f"graphengine rank {rank}"
            process = context.Process(target=run_rank, args=(start,), name=name, daemon=True)
            process.start()
            self._processes.append(SpawnedRank(process))
        return link

    @property
    def pids(self) -> list[int]:
        """Process ids, rank 1 first."""
        return [process.pid for process in self._processes]

    # Commands.

    def send(self, command: Command, *, to: int = ALL) -> int:
        """Write a command, for all ranks or one, once the slowest rank has room for it, and return
        its number. RankFailed after the limit.
        """
        if not self._end.has_room():
            self.before_waiting()
            self._wait(self._end.has_room, self._limit, f"room for command {self._end.sent + 1}")
        return self._end.send(command, to=to)

    def let(self, stage: Stage) -> None:
        """Let all ranks go on to this stage."""
        self._end.let(stage)

    def remove_folder(self) -> None:
        """Remove the folder of the rendezvous, once all ranks have joined."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait_for(self, stage: Stage) -> None:
        """Wait until all ranks have reached this stage. RankFailed if one never will."""
        ranks = range(1, 1 + len(self._processes))
        self._wait(
            lambda: all(self._end.stage(rank) >= stage for rank in ranks),
            _LOAD_LIMIT_S,
            f"ranks to be {stage.name.lower()}",
        )
        self.check()

    def wait_until_updated(self, nbytes: int) -> None:
        """Wait until all ranks have done the last command, an update of this many bytes of weights.

        RankFailed if one never will, or has not within the limit plus the time to read the bytes.
        """
        number, reading = self._end.sent, nbytes / _UPDATE_BYTES_PER_S
        self._wait(
            lambda: self._end.least_done() >= number,
            self._limit + reading,
            f"command {number}, an update of {nbytes} bytes of weights (wait_limit_s="
            f"{self._limit:g} and {reading:.3g} s for the bytes)",
        )

    def texts(self) -> list[str]:
        """The texts that the last command, which returns one, has on all other ranks."""
        number = self._end.sent
        self._wait(lambda: self._end.least_done() >= number, self._limit, f"command {number}")
        return [self._end.text(rank) for rank in range(1, 1 + len(self._processes))]

    def wait_done(self, rank: int, number: int, timeout: float | None) -> bool:
        """Whether a rank does the command of this number within `timeout` seconds.

        None: waits up to the limit, and raises RankFailed after it. Always RankFailed if the rank
        never will.
        """

        def done() -> bool:
            return self._end.done(rank) >= number

        if timeout is None:
            self._wait(done, self._limit, f"rank {rank} to have done command {number}")
            return True
        deadline = time.perf_counter() + timeout
        while not done():
            self.check()
            if time.perf_counter() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    # State of the ranks.

    def done(self, rank: int) -> int:
        """How many of the commands sent a rank has done."""
        return self._end.done(rank)

    def last_launch(self, number: int, when: int) -> tuple[int, int] | None:
        """Nanoseconds from `when` until the last rank launched replay `number`, and that rank; None
        where a time is missing. See `DriverEnd.launched_after`.
        """
        after = self._end.launched_after(number, when)
        return None if after is None else max(zip(after, range(1, 1 + len(after)), strict=True))

    def check(self) -> None:
        """RankFailed if a rank has ended or raised."""
        reason = self._failure()
        if reason is not None:
            raise RankFailed(reason)

    @contextmanager
    def watched(self, on_failure: Callable[[], object]) -> Iterator[None]:
        """Inside, a thread looks at the ranks, and calls `on_failure` once one has failed.

        For work that waits for the ranks inside a library or a kernel, where `check` is not called.
        """
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOK_S):
                if self._failure() is not None:
                    on_failure()
                    return

        watcher = threading.Thread(target=watch, name="graphengine ranks", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Inside, an error caused by the end of a rank becomes a RankFailed that says so.

        Any error sets `broken`: driver and ranks may disagree.
        """
        try:
            yield
        except BaseException as error:
            self.broken = True
            reason = self._reason(error)
            if reason is None:
                raise
            raise RankFailed(reason) from error

    def _reason(self, error: BaseException) -> str | None:
        """The failure of a rank that caused this error; None: no rank caused it."""
        if not isinstance(error, Exception) or isinstance(error, RankFailed):
            return None
        about_ranks = any(isinstance(each, _ABOUT_RANKS) for each in _chain(error))
        deadline = time.perf_counter() + (_GRACE_S if about_ranks else 0.0)
        while True:
            late = time.perf_counter() >= deadline
            reason = self._failure(consequences=late)
            if reason is not None or late:
                break
            time.sleep(_PAUSE_S)
        if reason is None and about_ranks:
            return f"ranks did not come within {self._limit:g} s: {self._progress()}; {error}"
        return reason

    def _failure(self, *, consequences: bool = True) -> str | None:
        """Why the first rank that failed has ended; None while all ranks run.

        consequences  whether to accept a rank that failed only because another one was gone, if
                      there is no better reason
        """
        reasons: list[tuple[bool, int, str]] = []
        for rank, process in enumerate(self._processes, start=1):
            # Ask for the ending first: a text that the rank left before it ended is then visible.
            ending = process.ending()
            if self._end.stage(rank) is Stage.FAILED:
                text = self._end.text(rank)
                follows = text.startswith(GroupError.__name__)
                what = f"{self._named(rank)} failed: {text}"
                reasons.append((follows, self._end.failed_at(rank), what))
            elif ending is not None:
                what = f"{self._named(rank)} {ending}"
                reasons.append((False, 0, what + self._unguarded(rank)))
        follows, _, reason = min(reasons, default=(True, 0, None))
        return None if follows and not consequences else reason

    def _unguarded(self, rank: int) -> str:
        """Advice where importing the caller's program has ended a rank; "" for other endings."""
        if self._end.stage(rank) is not Stage.STARTING or not self._processes[rank - 1].raised:
            return ""
        return (
            " before it began: ranks import the program that starts them, so it is a file, and "
            'opens such an engine under `if __name__ == "__main__":`'
        )

    def _named(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank - 1].pid}, {self._devices[rank]})"

    def _progress(self) -> str:
        """How far each rank is, for a message."""
        return ", ".join(
            f"{self._named(rank)} has done {self.done(rank)} of {self._end.sent} commands"
            for rank in range(1, 1 + len(self._processes))
        )

    def _wait(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait until the condition holds. RankFailed if a rank fails, or after the limit."""
        deadline = time.perf_counter() + limit_s
        while not condition():
            self.check()
            if time.perf_counter() >= deadline:
                raise RankFailed(f"waited {limit_s:g} s for {what}: {self._progress()}")
            time.sleep(_PAUSE_S)

    # End of the ranks.

    def close(self) -> None:
        """End all ranks and wait until they have ended; kills them at once if `broken`."""
        atexit.unregister(self._kill)
        if not self.broken:
            with suppress(RankFailed):
                self.send(Close())
            deadline = time.perf_counter() + _CLOSE_S
            for process in self._processes:
                process.join(max(0.0, deadline - time.perf_counter()))
        self._kill()
        for process in self._processes:
            process.join()
            process.close()
        self._processes.clear()
        self.remove_folder()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def _place(config: EngineConfig) -> Path | None:
    """The folder for the ranks' files: in memory if kernels write into them; None: the default.

    CUDA may refuse pages of a file on disk.
    """
    written = config.data_parallel > 1 and torch.device(config.device).type == "cuda"
    return _MEMORY if written and _MEMORY.is_dir() else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__
