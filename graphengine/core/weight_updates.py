"""Updates the weights of an open engine in place, dropping kept KV and states; loads adapters;
releases the memory of weights and KV cache, and restores it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Literal

from torch import Tensor

from graphengine.core.engine_core import EngineCore
from graphengine.core.fingerprints import fingerprint_of
from graphengine.observe.tracing import span
from graphengine.opening.adapters import open_adapter, whole_weights
from graphengine.opening.draft_updating import checked_drafts
from graphengine.opening.updating import LoadedWeights, check_plain
from graphengine.options.checks import is_int, shown, some
from graphengine.requests.adapters import LoadedAdapter

log = logging.getLogger(__name__)

StaleDrafts = Literal["off", "keep"]
ReleasedWeights = Literal["host", "drop"]
WEIGHTS, KV_CACHE = "weights", "KV cache"
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
    if WEIGHTS in core.weights.released:
        core.weights.check_there()
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
    state.missing.difference_update(given.values)
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


def _check_droppable(loaded: LoadedWeights) -> None:
    """ValueError for weights that no update could bring back."""
    try:
        check_plain(loaded.checkpoint)
    except ValueError as error:
        raise ValueError(
            f"release_memory(weights='drop') keeps no weights, and update_weights could not bring "
            f"them back: {error}. weights='host' keeps a copy"
        ) from error


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


class MemoryCalls:
    """The calls of an engine that release the memory of weights and KV cache, and restore it."""

    core: EngineCore
    _loaded: LoadedWeights | None

    def release_memory(self, *, weights: ReleasedWeights = "host") -> int:
        """Give the memory of weights and KV cache back to the device; returns how many bytes.

        For a trainer on the same GPU, between two rollouts. All ranks release theirs, and the bytes
        are those of all of them. Graphs stay, and with them all addresses. What the engine keeps:
        graphs and their workspace, static fields, tables, and copies of adapters and of recurrent
        states.

        weights  "host" copies them to pinned memory, which the first release allocates and the
                 engine then keeps; `restore_memory` copies them back. "drop" copies nothing of a
                 checkpoint's: before the next request, `update_weights` has to bring all of its
                 tensors, in one call or in several. A drafter with a checkpoint of its own is
                 copied to the host all the same

        As with `update_weights`, kept KV is dropped: cached prefixes are forgotten, and sessions
        keep their tokens and are `evicted`, so that their next turn prefills them. Until
        `restore_memory`, calls that need the device are a ValueError, and tensors of weights or
        `cache` that a caller holds must not be touched: on a GPU that is an illegal address.

        ValueError in an engine that was opened without `releasable=True`, while requests are
        unfinished, if all is released already, and for "drop" with a quantised checkpoint.
        RuntimeError, with nothing released, if the host lacks the memory of a rank. It waits for
        the device.
        """
        core, state = self.core, self.core.weights
        core.settle("release_memory")
        loaded = _releasable(core, self._loaded, "release_memory")
        if weights not in ("host", "drop"):
            raise ValueError(f"weights={shown(weights)} must be 'host' or 'drop'")
        if WEIGHTS in state.released:
            raise ValueError("release_memory(): weights and KV cache are released already")
        if weights == "drop":
            _check_droppable(loaded)
        with span("release memory"):
            core.runtime.save_memory(loaded, drop=weights == "drop")
            core.drop_cached_kv()
            cache = KV_CACHE not in state.released
            released = core.runtime.release_memory(loaded, cache=cache)
        state.released = (WEIGHTS, KV_CACHE)
        if weights == "drop":
            state.missing = loaded.in_use()
        core.counters["memory/releases"] += 1
        return released

    def restore_memory(self, *, kv_cache: bool = True) -> None:
        """Undo `release_memory`, at the same addresses: the same graphs go on.

        kv_cache  False restores only the weights, so that a trainer can hand over new ones with
                  `update_weights` before it frees its own memory; another call restores the rest

        ValueError if nothing is released. RuntimeError if the device of a rank lacks the memory:
        what is missing is still released, and the call can be repeated. It waits for the device.
        """
        core, state = self.core, self.core.weights
        core.settle("restore_memory")
        loaded = _releasable(core, self._loaded, "restore_memory")
        if not isinstance(kv_cache, bool):
            raise ValueError(f"kv_cache={shown(kv_cache)} must be True or False")
        if not (state.released if kv_cache else WEIGHTS in state.released):
            raise ValueError("restore_memory(): nothing is released")
        with span("restore memory"):
            if WEIGHTS in state.released:
                core.runtime.restore_memory(loaded, cache=False)
                state.released = (KV_CACHE,)
            if kv_cache:
                core.runtime.restore_memory(loaded, cache=True)
                state.released = ()


def _releasable(core: EngineCore, loaded: LoadedWeights | None, call: str) -> LoadedWeights:
    """Where the weights came from, whose memory can be released."""
    if loaded is None or loaded.memory is None or core.runtime.cache_memory is None:
        raise ValueError(
            f"{call}() is for an engine that from_pretrained has opened with releasable=True"
        )
    return loaded


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
    parts = dict(adapter.parts(core.memory.dtype))
    with span("load adapter"):
        core.runtime.load_adapter(loaded, slot, adapter.folder, parts)
    core.counters["adapters/loads"] += 1
    matrices = {
        f"{linear} {kind}": getattr(part, kind)
        for linear, part in sorted(parts.items())
        for kind in ("down", "up")
    }
    scales = {linear: part.scale for linear, part in sorted(parts.items())}
    found = fingerprint_of(scales, matrices.items())
    return adapters.add(name, os.fspath(path), slot, adapter.rank, found)


def unload_adapter(core: EngineCore, name: str) -> None:
    """Implements `Engine.unload_adapter`."""
    core.check_open()
    unfinished = (*core.scheduler.active, *core.scheduler.waiting)
    uses = [(each.id, each.job.adapter, each.finish_reason == "cancelled") for each in unfinished]
    core.intake.adapters.remove(name, uses)
