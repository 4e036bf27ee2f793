"""The process of a rank: a runtime in a loop. The driver decides; a rank executes its commands."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch

from graphengine.buckets import CopiedRange
from graphengine.config import EngineConfig
from graphengine.core.commands import Close, Command, FetchDrafts, Load, PutRoutes, ReplayGraph
from graphengine.core.runtime import Operation
from graphengine.models.launches import Share
from graphengine.opening.budget.memory_plan import MemoryPlan, available_bytes
from graphengine.opening.loading import CheckpointContents, Opened, load_checkpoint, read_checkpoint
from graphengine.parallel.data_parallel.shared_records import SharedRecords
from graphengine.parallel.link import ALL, LinkMemory, RankEnd, ReceivedCommand, Stage
from graphengine.parallel.process_groups import ProcessGroups
from graphengine.parallel.process_handles import is_running
from graphengine.parallel.rank_runtime import RankRuntime

# How long a rank on a GPU polls for its next command without a pause, as a launch must not wait. On
# a CPU it does not spin: the other ranks compute meanwhile.
_SPIN_S = 2e-3
# Pause between two polls afterwards; the longer one once no command has come for a while.
_PAUSE_S, _LONG_PAUSE_S, _IDLE_AFTER_S = 50e-6, 1e-3, 0.1

# How long a stage on a CPU waits for others. The driver may be busy with other things, and the
# driver itself waits for stages no longer than the engine's limit. A process that is gone is
# noticed at once.
_STAGE_LIMIT_S = 1e7
_LONG_LOOK_S = 0.2
"""Seconds between two checks of the driver while the engine opens."""
_DRIVER_STAYS_S = 2.0
"""Seconds after a rank's failure; a driver that still runs then did not cause the failure."""

Thing = TypeVar("Thing")


class RankStart(NamedTuple):
    """The arguments of a rank's process.

    path     the checkpoint
    digest   the checkpoint's digest, as the driver has read it
    config   the engine's config, with this rank's device
    memory   the driver's plan, with this rank's device
    rendezvous  the file through which ranks find each other
    driver   the driver's process id
    threads  torch's threads, as many as the driver's: sums on a CPU may depend on their number
    spawned  whether the driver has started this process
    """

    share: Share
    path: str
    digest: str
    config: EngineConfig
    memory: MemoryPlan
    link: LinkMemory
    rendezvous: str
    driver: int
    threads: int
    spawned: bool = True

    def driver_is_there(self) -> bool:
        return os.getppid() == self.driver if self.spawned else is_running(self.driver)

    def driver_stays(self) -> bool:
        """Whether the driver keeps running for a while: its connections end before its process."""
        deadline = time.monotonic() + _DRIVER_STAYS_S
        while self.driver_is_there():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.01)
        return False


class DriverGone(RuntimeError):
    """The driver's process has ended."""


def run_rank(start: RankStart) -> NoReturn:
    """Run the rank until its process ends; an error is left for the driver to read."""
    # Ctrl-C reaches all processes of a terminal: only the driver handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The driver has logged the same messages.
    logging.disable(logging.WARNING)
    torch.set_num_threads(start.threads)
    end = RankEnd(start.link, start.share.rank, start.memory.graphs)
    worker = _Worker(start, end)
    try:
        worker.run()
        end.reach(Stage.ENDED)
    except BaseException as error:
        worker.fail(error)
    # Exit at once: wait for nothing under way, and let the others see that this rank is gone.
    os._exit(0)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"


class WorkerRuntime(RankRuntime):
    """The runtime of a rank whose process is not the driver's.

    end     tells the driver when this rank launched each replay
    shared  memory that the driver maps; None where all requests are the driver's
    """

    def __init__(
        self,
        opened: Opened,
        contents: CheckpointContents,
        config: EngineConfig,
        groups: ProcessGroups,
        end: RankEnd,
        shared: SharedRecords | None,
    ) -> None:
        self._end, self._shared = end, shared
        mailboxes = None if shared is None else shared.mailboxes
        super().__init__(opened, contents, config, groups, records=mailboxes)

    def _repeat_load(self, command: Load) -> None:
        acknowledged, buffers = command.acknowledged, self.buffers
        if acknowledged > buffers.acknowledged:
            # This rank has published the replay that the driver has read, or is about to.
            self.wait_tokens(acknowledged, 1, None)
            buffers.acknowledge(acknowledged)
        copied = CopiedRange(command.group, command.start, command.stop)
        sequence, stream = command.sequence, self.stream
        buffers.repeat(copied, command.data, sequence=sequence, stream=stream)

    def _put_routes(self, command: PutRoutes) -> None:
        assert self.routing is not None, f"{command.slot=}"
        ids = np.frombuffer(command.ids, dtype=np.int16)
        self.routing.table.put(command.slot, command.start, ids)

    def _timed_replay(self, command: ReplayGraph) -> None:
        """Replay, and note when this device could begin: a GPU once launched, a CPU before it."""
        number, on_gpu = self.next_replay, self.stream is not None
        if not on_gpu:
            self._end.launched(number, time.perf_counter_ns())
        self._replay(command)
        if on_gpu:
            self._end.launched(number, time.perf_counter_ns())

    def _fetch_drafts(self, command: FetchDrafts) -> None:
        assert self._shared is not None, "these ranks have one driver's requests"
        with self.on_stream():
            self._shared.drafts.copy_(self.buffers["draft_tokens"])

    operations: ClassVar[dict[type[Command], Operation]] = RankRuntime.operations | {
        Load: _repeat_load,
        PutRoutes: _put_routes,
        ReplayGraph: _timed_replay,
        FetchDrafts: _fetch_drafts,
    }


class _Worker:
    """Loads its part of the weights, joins the others and executes the driver's commands."""

    def __init__(self, start: RankStart, end: RankEnd) -> None:
        self._start, self._end = start, end
        self._spin = _SPIN_S if start.memory.device.type == "cuda" else 0.0
        self._runtime: WorkerRuntime | None = None
        self._failing = threading.Lock()

    def fail(self, error: BaseException) -> NoReturn:
        """Leave the reason for the driver to read, and end the process at once.

        If two threads fail, the first one does this, and the second blocks.
        """
        self._failing.acquire()
        when = time.monotonic_ns()
        if not self._start.spawned:
            # The driver may not get to report it: torchrun ends all processes once one has ended.
            traceback.print_exception(error)
        self._end.fail(_described(error), when)
        if not (self._start.spawned and self._start.driver_stays()):
            # The driver is gone, or torchrun may end it before it can remove its folders.
            shutil.rmtree(Path(self._start.rendezvous).parent, ignore_errors=True)
            if self._runtime is not None and self._runtime.temporary is not None:
                shutil.rmtree(self._runtime.temporary, ignore_errors=True)
        os._exit(1)

    def _end_with_driver(self, opened: threading.Event) -> None:
        """Fail once the driver has ended, until `opened` is set: meanwhile this rank may wait for
        the driver inside a library.
        """
        while not opened.wait(_LONG_LOOK_S):
            if not self._start.driver_is_there():
                self.fail(self._driver_gone())

    def _driver_gone(self) -> DriverGone:
        return DriverGone(f"the driver, process {self._start.driver}, has ended")

    def run(self) -> None:
        opened = threading.Event()
        if self._start.spawned:
            threading.Thread(target=self._end_with_driver, args=(opened,), daemon=True).start()
        share, config, memory = self._start.share, self._start.config, self._start.memory
        if memory.device.type == "cuda":
            torch.cuda.set_device(memory.device)
            available = int(available_bytes(memory.device) * config.memory_fraction)
            memory.budget.check(available)
        contents = read_checkpoint(self._start.path, config, share)
        if contents.checkpoint.digest != self._start.digest:
            raise ValueError(
                f"rank {share.rank} of {share.ranks} finds other configs or tensors in "
                f"{contents.checkpoint.path} than the driver has read"
            )
        loaded = load_checkpoint(contents, memory, config)
        self._end.reach(Stage.LOADED)
        self._wait(lambda: self._end.allowed() >= Stage.LOADED or None)
        shared, rendezvous = None, self._start.rendezvous
        if config.data_parallel > 1:
            shared = SharedRecords.of_rank(rendezvous, share.rank, config, memory, written=True)
        watch = None if shared is None else shared.watch
        groups = ProcessGroups(rendezvous, share, memory, config, watch)
        runtime = WorkerRuntime(loaded, contents, config, groups, self._end, shared)
        groups.wait_up_to(config.wait_limit_s if groups.stages is None else _STAGE_LIMIT_S)
        self._runtime = runtime
        self._end.reach(Stage.FOLLOWING)
        opened.set()
        self._follow(runtime)
        runtime.close()
        # Other ranks may still map this rank's own memory: the end of the process frees it.
        groups.leave()
        if shared is not None:
            shared.mailboxes.close()

    def _follow(self, runtime: WorkerRuntime) -> None:
        """Execute the driver's commands until it closes."""

        def due() -> ReceivedCommand | None:
            runtime.groups.check()
            return self._end.take()

        while True:
            command, to = self._wait(due)
            if isinstance(command, Close):
                return
            if to in (ALL, self._start.share.rank):
                result = runtime.run(command)
                if isinstance(result, str):
                    self._end.say(result)
            self._end.finish()

    def _wait(self, look: Callable[[], Thing | None]) -> Thing:
        """Poll `look` until it finds something. DriverGone if the driver has ended."""
        started = time.perf_counter()
        while True:
            found = look()
            if found is not None:
                return found
            idle = time.perf_counter() - started
            if idle < self._spin:
                continue
            if not self._start.driver_is_there():
                raise self._driver_gone()
            time.sleep(_PAUSE_S if idle < _IDLE_AFTER_S else _LONG_PAUSE_S)
