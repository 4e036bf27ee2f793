"""Tests of several folders at a time, each folder's in a process of its own: `--workers 2`.

Processes are forked once everything is imported and collected: torch, transformers and the engine
take ten seconds of each process that imports them by itself. A folder's tests run in the order
in which they are collected, and see nothing that tests of other folders left behind.

With a GPU the option does nothing, as a fork has no CUDA.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=1, help="run the tests of so many folders at a time"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    workers: int = config.getoption("workers")
    leave = config.option.collectonly or session.testsfailed or torch.cuda.is_available()
    if workers < 2 or leave:
        return None
    Pool(session, workers).run(by_folder(session.items, config.rootpath / "tests"))
    return True


# They begin first, so that all workers end at about the same time.
LONGEST = ("graphengine/models", "graphengine/drafters", "kernels", "graphengine/parallel")


def by_folder(items: Sequence[pytest.Item], root: Path) -> list[list[pytest.Item]]:
    """The tests of each folder of `root`, and of each of `root/graphengine`; the longest first."""
    folders: dict[str, list[pytest.Item]] = {}
    for item in items:
        parts = item.path.relative_to(root).parent.parts
        name = "/".join(parts[: 2 if parts[:1] == ("graphengine",) else 1])
        folders.setdefault(name, []).append(item)
    names = sorted(folders, key=lambda name: (name not in LONGEST, -len(folders[name])))
    return [folders[name] for name in names]


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that runs tests, and what it reports of them."""

    process: int
    reports: Connection
    items: list[pytest.Item]


class Pool:
    """Runs tests in forked processes and has this one tell of them."""

    def __init__(self, session: pytest.Session, workers: int) -> None:
        self._session, self._workers = session, workers
        self._running: dict[Connection, Worker] = {}
        self._reported: set[str] = set()

    def run(self, folders: Sequence[list[pytest.Item]]) -> None:
        """To the end, or until pytest wants no more of them."""
        session = self._session
        # One folder of all processes, which this one removes when it is old.
        session.config._tmp_path_factory.getbasetemp()
        waiting = deque(folders)
        try:
            while (waiting or self._running) and not (session.shouldfail or session.shouldstop):
                while waiting and len(self._running) < self._workers:
                    self._start(waiting.popleft())
                for reports in wait([*self._running]):
                    assert isinstance(reports, Connection)
                    self._receive(self._running[reports])
        finally:
            for worker in self._running.values():
                os.kill(worker.process, 15)
                os.waitpid(worker.process, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _start(self, items: list[pytest.Item]) -> None:
        read, write = os.pipe()
        capture = self._session.config.pluginmanager.getplugin("capturemanager")
        # What is captured lies in files that a child would share.
        if capture is not None:
            capture.suspend_global_capture()
            capture.stop_global_capturing()
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if capture is not None:
            capture.start_global_capturing()
        if process == 0:
            os.close(read)
            _work(self._session, items, Connection(write, readable=False))
        os.close(write)
        reports = Connection(read, writable=False)
        self._running[reports] = Worker(process, reports, items)

    def _receive(self, worker: Worker) -> None:
        """Tell of a report of this worker, or of its end."""
        hook = self._session.config.hook
        try:
            data = worker.reports.recv()
        except (EOFError, OSError):
            data = None
        if data is None:
            self._ended(worker)
            return
        report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
        hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            self._reported.add(report.nodeid)
            hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def _ended(self, worker: Worker) -> None:
        """A worker that ended early failed in the first test that it did not report."""
        del self._running[worker.reports]
        worker.reports.close()
        _, status = os.waitpid(worker.process, 0)
        left = [item for item in worker.items if item.nodeid not in self._reported]
        if not left:
            return
        item, code = left[0], os.waitstatus_to_exitcode(status)
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"its process ended with status {code}; {len(left) - 1} tests did not run",
            when="call",
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)


class _Sender:
    """Has each report sent to the process that forked this one."""

    def __init__(self, config: pytest.Config, reports: Connection) -> None:
        self._config, self._reports = config, reports

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._reports.send(hook.pytest_report_to_serializable(config=self._config, report=report))


def _work(session: pytest.Session, items: list[pytest.Item], reports: Connection) -> NoReturn:
    """Run these tests and end, without what the forking process does when it ends."""
    status = 1
    try:
        gc.freeze()
        plugins = session.config.pluginmanager
        plugins.unregister(plugins.getplugin("terminalreporter"))
        plugins.register(_Sender(session.config, reports))
        for item, following in zip(items, [*items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        # Forks that tests left behind may hold the pipe open.
        reports.send(None)
        status = 0
    finally:
        os._exit(status)
