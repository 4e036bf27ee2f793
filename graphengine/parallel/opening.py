"""Opens a checkpoint on as many ranks as a config asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from graphengine.config import EngineConfig
from graphengine.opening.loading import Opened, open_checkpoint
from graphengine.parallel.data_parallel.runtime import DataParallelRuntime
from graphengine.parallel.driver_runtime import DriverRuntime, open_with_ranks
from graphengine.parallel.pipelining import open_pipeline


def open_on_ranks(
    path: str | Path, config: EngineConfig, progress: Callable[[int, int], None] | None
) -> tuple[Opened, DriverRuntime | None]:
    """The parts of an engine, and the runtime that drives its ranks; None: there is one rank.

    Arguments and errors as in `open_checkpoint`, `open_pipeline` and `open_with_ranks`.
    """
    if config.pipeline_parallel > 1:
        return open_pipeline(path, config, progress)
    if config.ranks > 1:
        kind = DataParallelRuntime if config.data_parallel > 1 else DriverRuntime
        return open_with_ranks(path, config, progress, kind)
    return open_checkpoint(path, config, progress), None
