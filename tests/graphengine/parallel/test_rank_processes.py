"""Processes of ranks: how they end, and that they can be ended."""

from __future__ import annotations

import subprocess
import sys
import threading

from graphengine.parallel.process_handles import ForeignRank, is_running

SLEEPS = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]


def test_a_process_of_somebody_else_is_watched_and_ended() -> None:
    with subprocess.Popen(SLEEPS, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        rank = ForeignRank(process.pid)
        assert rank.pid == process.pid and rank.ending() is None and is_running(rank.pid)
        rank.join(0.05)
        assert rank.ending() is None
        rank.kill()
        # Whoever started it reaps it.
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        rank.join()
        reaper.join()
        assert rank.ending() == "has ended" and not is_running(rank.pid)
        rank.kill()
        rank.close()
