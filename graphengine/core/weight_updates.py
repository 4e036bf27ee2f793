"""Updates the weights of an open engine in place, and drops kept KV and states."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from torch import Tensor

from graphengine.core.engine_core import EngineCore
from graphengine.observe.tracing import span
from graphengine.opening.updating import LoadedWeights

WeightSource = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | os.PathLike[str]
"""Tensors by their names in a checkpoint, or the directory of a whole one."""


def update_weights(core: EngineCore, loaded: LoadedWeights | None, source: WeightSource) -> None:
    """Implements `Engine.update_weights`."""
    core.settle("update_weights")
    if loaded is None:
        raise ValueError("update_weights() is for engines that from_pretrained has opened")
    if isinstance(source, str | os.PathLike):
        given = loaded.read(source, core.config)
    else:
        given = loaded.checked(source)
    if not given.values:
        return  # Nothing is outdated.
    core.runtime.note_update(loaded, given)
    core.forget_kept()
    try:
        with span("update weights"):
            core.runtime.update_weights(loaded, given)
    except BaseException as error:
        core.broken = f"{type(error).__name__}: {error}, while weights were updated"
        raise
    core.counters["weights/updates"] += 1
