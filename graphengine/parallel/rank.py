"""The process of a rank: a runtime in a loop. The driver decides; a rank repeats its actions."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
import torch

from graphengine.buckets import Copied
from graphengine.config import EngineConfig
from graphengine.core.runtime import Runtime
from graphengine.host.kept_states import BlockCopy, StateCopy
from graphengine.models.contract import Share
from graphengine.opening.calibration import calibrate
from graphengine.opening.loading import load_checkpoint, read_checkpoint
from graphengine.opening.memory import MemoryPlan, available_bytes
from graphengine.opening.updating import LoadedWeights
from graphengine.parallel.joined import Joined
from graphengine.parallel.kept_parts import KeptParts
from graphengine.parallel.link import ALL, Command, Kind, LinkMemory, RankEnd, Stage
from graphengine.parallel.processes import is_running
from graphengine.parallel.shared_records import SharedRecords
from graphengine.parallel.stage_parts import StageParts
from graphengine.program.graph_key import GraphKey

# A rank on a GPU polls for its next command without a pause for so long, as a launch must not wait.
# On a CPU it does not spin: the other ranks compute meanwhile.
_SPIN_S = 2e-3
# Pause between two polls afterwards; the longer one once no command has come for a while.
_PAUSE_S, _LONG_PAUSE_S, _IDLE_AFTER_S = 50e-6, 1e-3, 0.1

# How long a stage on a CPU waits for others. Its driver may be busy with other things, and itself
# waits for stages no longer than the engine's limit. A process that is gone is noticed at once.
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
    meeting  the file through which ranks find each other
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
    meeting: str
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
    end = RankEnd(start.link, start.share.rank)
    rank = _Rank(start, end)
    try:
        rank.run()
        end.reach(Stage.ENDED)
    except BaseException as error:
        rank.fail(error)
    # Exit at once: wait for nothing under way, and let the others see that this rank is gone.
    os._exit(0)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"


class _Rank:
    """Loads its part, joins the others and follows the driver."""

    def __init__(self, start: RankStart, end: RankEnd) -> None:
        self._start, self._end = start, end
        self._spin = _SPIN_S if start.memory.device.type == "cuda" else 0.0
        self._acknowledged = 0
        # The driver's folders, which it removes unless it is killed: the meeting's, and the one
        # with an update's values.
        self._folders = [Path(start.meeting).parent]
        self._failing = threading.Lock()

    def fail(self, error: BaseException) -> NoReturn:
        """Leave the reason for the driver to read, and end the process at once.

        If two threads fail, the first one does this, and the other one blocks.
        """
        self._failing.acquire()
        when = time.monotonic_ns()
        if not self._start.spawned:
            # The driver may not get to report it: torchrun ends all processes once one has ended.
            traceback.print_exception(error)
        self._end.fail(_described(error), when)
        if not (self._start.spawned and self._start.driver_stays()):
            # The driver is gone, or torchrun may end it before it can remove them.
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
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
        found = read_checkpoint(self._start.path, config, share)
        if found.checkpoint.digest != self._start.digest:
            raise ValueError(
                f"rank {share.rank} of {share.ranks} finds other configs or tensors in "
                f"{found.checkpoint.path} than the driver has read"
            )
        loaded = load_checkpoint(found, memory, config)
        self._end.reach(Stage.LOADED)
        self._wait(lambda: self._end.allowed() >= Stage.LOADED or None)
        shared = None
        if config.data_parallel > 1:
            file = self._start.meeting
            shared = SharedRecords.of_rank(file, share.rank, config, memory, written=True)
        watch = None if shared is None else shared.watch
        joined = Joined(self._start.meeting, share, memory, config, watch)
        if found.calibration:
            ids = found.calibration
            calibrate(loaded.model, memory, config, loaded.drafter, ids, joined.group)
        runtime = Runtime(
            loaded.model,
            memory,
            config,
            loaded.drafter,
            group=joined.group,
            stages=joined.stages,
            records=None if shared is None else shared.mailboxes,
        )
        joined.wait_up_to(config.wait_limit_s if joined.stages is None else _STAGE_LIMIT_S)
        self._end.reach(Stage.FOLLOWING)
        opened.set()
        parts = joined.kept_parts(runtime, found)
        self._follow(runtime, joined, parts, loaded.loaded, shared)
        runtime.close()
        # Other ranks may still map this rank's own memory: the end of the process frees it.
        joined.leave()
        if shared is not None:
            shared.mailboxes.close()

    def _follow(
        self,
        runtime: Runtime,
        joined: Joined,
        parts: KeptParts | StageParts,
        loaded: LoadedWeights,
        shared: SharedRecords | None,
    ) -> None:
        """Repeat the driver's actions, command by command, until it closes."""

        def due() -> Command | None:
            joined.check()
            return self._end.take()

        graphs = self._start.memory.graphs
        while True:
            kind, numbers, data, to = self._wait(due)
            if to not in (ALL, self._start.share.rank):
                self._end.finish()
                continue
            if kind is Kind.CLOSE:
                return
            if kind is Kind.LOAD:
                self._load(runtime, numbers, data)
            elif kind is Kind.ROUTES:
                assert runtime.routing is not None, f"{numbers=}"
                ids = np.frombuffer(data, dtype=np.int16)
                runtime.routing.table.put(numbers[0], numbers[1], ids)
            elif kind is Kind.SWAP:
                runtime.swap(numbers[0], numbers[1])
            elif kind is Kind.COPY_STATE:
                place, slot, position, back = numbers[:4]
                runtime.copy_kept([StateCopy(place, slot, position, bool(back))])
            elif kind is Kind.COPY_BLOCK:
                runtime.copy_kept([BlockCopy(numbers[0], numbers[1])])
            elif kind is Kind.REPLAY:
                self._replay(runtime, graphs[numbers[0]])
            elif kind is Kind.READ_BLOCKS:
                parts.read_blocks(_blocks(data))
            elif kind is Kind.WRITE_BLOCKS:
                parts.write_blocks(_blocks(data), None)
            elif kind is Kind.READ_STATES:
                parts.read_states(numbers[0])
            elif kind is Kind.WRITE_STATES:
                parts.write_states(numbers[0], None)
            elif kind is Kind.DRAFTS:
                assert shared is not None, "these ranks have one driver's requests"
                with runtime.on_stream():
                    shared.drafts.copy_(runtime.buffers["draft_tokens"])
            elif kind is Kind.READ_SCALES:
                assert isinstance(parts, KeptParts), "stages have no fp8 KV"
                parts.scales_id()
            elif kind is Kind.UPDATE:
                folder = Path(os.fsdecode(data))
                self._folders[1:] = [folder] if numbers[0] else []
                runtime.update_weights(loaded, loaded.in_folder(folder))
            elif kind is Kind.TELL:
                runtime.synchronize()
                with runtime.on_stream():
                    runtime.program.flow.begin()
                runtime.synchronize()
                self._end.say(state_digest(runtime))
            self._end.finish()

    def _load(self, runtime: Runtime, numbers: tuple[int, ...], data: bytes) -> None:
        group, first, stop, sequence, acknowledged = numbers
        if acknowledged > self._acknowledged:
            # This rank has published the replay that the driver has read, or is about to.
            runtime.wait_tokens(acknowledged, 1, None)
            runtime.buffers.acknowledge(acknowledged)
            self._acknowledged = acknowledged
        copied = Copied(group, first, stop)
        runtime.buffers.repeat(copied, data, sequence=sequence, stream=runtime.stream)

    def _replay(self, runtime: Runtime, key: GraphKey) -> None:
        """Replay, and note when this device could begin: a GPU after launch, a CPU before it."""
        number, on_gpu = runtime.launched + 1, runtime.stream is not None
        if not on_gpu:
            self._end.launched(number, time.perf_counter_ns())
        runtime.replay(key)
        if on_gpu:
            self._end.launched(number, time.perf_counter_ns())

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


def _blocks(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, dtype=np.int32).tolist()
    return found


def state_digest(runtime: Runtime) -> str:
    """SHA-256 of every device-owned field that is equal on all ranks, in hexadecimal digits; waits
    for the current stream.
    """
    digest, buffers = hashlib.sha256(), runtime.buffers
    for field in buffers.fields:
        if runtime.program.flow.is_common(field):
            values = buffers[field.name].cpu().contiguous().view(torch.uint8)
            digest.update(field.name.encode() + values.numpy().tobytes())
    return digest.hexdigest()
