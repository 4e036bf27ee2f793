"""Updates the weights of an open engine in place, dropping kept KV and states; loads adapters."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Literal

from torch import Tensor

from graphengine.core.engine_core import EngineCore
from graphengine.observe.tracing import span
from graphengine.opening.adapters import open_adapter, whole_weights
from graphengine.opening.draft_updating import checked_drafts
from graphengine.opening.updating import LoadedWeights
from graphengine.options.checks import is_int, shown, some
from graphengine.requests.adapters import LoadedAdapter

log = logging.getLogger(__name__)

StaleDrafts = Literal["off", "keep"]
WeightSource = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | os.PathLike[str]
"""Tensors by their names in a checkpoint, or the directory of a whole one."""


def update_weights(
    core: EngineCore,
    loaded: LoadedWeights | None,
    source: WeightSource,
    version: int | None,
    stale_drafts: StaleDrafts,
    draft_weights: WeightSource | None = None,
) -> None:
    """Implements `Engine.update_weights`."""
    core.settle("update_weights")
    if loaded is None:
        raise ValueError("update_weights() is for engines that from_pretrained has opened")
    if version is not None and (not is_int(version) or version < 0):
        raise ValueError(f"version={shown(version)} must be an integer from 0 up, or None")
    if stale_drafts not in ("off", "keep"):
        raise ValueError(f"stale_drafts={shown(stale_drafts)} must be 'off' or 'keep'")
    if isinstance(source, str | os.PathLike):
        given = loaded.read(source, core.config)
    else:
        given = loaded.checked(source)
    drafts = None if draft_weights is None else checked_drafts(core.drafter, draft_weights)
    if not given.values and not (drafts and drafts.values):
        return  # Nothing is outdated.
    if given.values:
        core.runtime.note_update(loaded, given)
    if drafts is not None:
        core.runtime.note_draft_update(drafts)
    core.drop_cached_kv()
    try:
        with span("update weights"):
            if given.values:
                core.runtime.update_weights(loaded, given)
            if drafts is not None:
                core.runtime.update_drafts(drafts)
    except BaseException as error:
        core.broken = f"{type(error).__name__}: {error}, while weights were updated"
        raise
    core.counters["weights/updates"] += 1
    state = core.weights
    if version is None and not given.values:
        version = state.version  # The model is as it was.
    state.updated(given.values.keys(), None if version is None else int(version))
    state.given_drafts.update(() if drafts is None else drafts.values)
    core.intake.weight_version = state.version
    state.stale_drafts = _stale_drafts(core, loaded)
    if state.drafts_off:
        core.scheduler.width = core.memory.tokens_per_step
    state.drafts_off = state.stale_drafts is not None and stale_drafts == "off"
    if state.stale_drafts is not None:
        done = "go on"
        if state.drafts_off:
            done = "are off until it is updated as well (stale_drafts='keep' keeps them)"
        log.warning("version %d: %s: drafts %s", state.version, state.stale_drafts, done)


def _stale_drafts(core: EngineCore, loaded: LoadedWeights) -> str | None:
    """Why the drafter's weights are older than the model's; None if they are not."""
    drafter, state = core.drafter, core.weights
    if drafter.own_checkpoint is not None:
        missing = sorted(drafter.own_destinations().keys() - state.given_drafts)
        if len(missing) == len(drafter.own_destinations()):
            return f"the drafter of {drafter.own_checkpoint.path} keeps its weights"
    else:
        missing = sorted(set(loaded.drafted) - state.given)
    if not missing:
        return None
    return f"{len(missing)} tensors of the drafter were not in the update, {some(missing)}"


def load_adapter(
    core: EngineCore, loaded: LoadedWeights | None, name: str, path: str | os.PathLike[str]
) -> LoadedAdapter:
    """Implements `Engine.load_adapter`."""
    core.check_open()
    if loaded is None:
        raise ValueError("load_adapter() is for engines that from_pretrained has opened")
    sizes, adapters = core.memory.adapters, core.intake.adapters
    if sizes is None:
        raise ValueError(
            f"load_adapter({name!r}) wants a slot, and the engine was opened without adapters: "
            f"max_adapters=0"
        )
    slot = adapters.next_slot(name)
    adapter = open_adapter(path, whole_weights(loaded.whole), sizes)
    parts = dict(adapter.parts())
    with span("load adapter"):
        core.runtime.load_adapter(loaded, slot, adapter.folder, parts)
    core.counters["adapters/loads"] += 1
    return adapters.add(name, os.fspath(path), slot, adapter.rank)


def unload_adapter(core: EngineCore, name: str) -> None:
    """Implements `Engine.unload_adapter`."""
    core.check_open()
    unfinished = (*core.scheduler.active, *core.scheduler.waiting)
    core.intake.adapters.remove(name, [(each.id, each.job.adapter) for each in unfinished])
