"""Scales of an fp8 KV cache, set before the cache exists: from a checkpoint, or from a prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from graphengine.buckets import clear_blas_workspaces
from graphengine.config import EngineConfig
from graphengine.drafters import Drafter
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.kv_scales import calibrate_kv_scales, load_kv_scales
from graphengine.models.contract import Model, ModelConfig
from graphengine.models.launches import RankGroup, Share
from graphengine.models.states import paged_states
from graphengine.models.weights import StoredWeights
from graphengine.observe.tracing import span
from graphengine.opening.allocation import Allocation, allocate
from graphengine.opening.budget.cache_budget import calibration_blocks
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.options.calibration import check_calibration_length
from graphengine.options.checks import shown
from graphengine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def read_kv_scales(
    checkpoint: Checkpoint,
    weights: StoredWeights,
    drafter: Drafter,
    whole: ModelConfig,
    share: Share,
) -> None:
    """Set the KV scales of the model and its drafter that their checkpoints have.

    whole  the whole model, of which this rank has a share
    """
    held = [("the model", checkpoint, weights, whole.states)]
    if drafter.weights is not None:
        source = drafter.own_checkpoint or checkpoint
        held.append(("the drafter", source, drafter.weights, drafter.whole_states))
    for whose, source, each, states in held:
        heads = [state.kv_heads for state in paged_states(states)]
        found = load_kv_scales(source, each, heads, share)
        layers = len(each.kv_scales())
        log.info(
            "fp8 KV of %s: scales of %d of %d layers from %s, of the others 1.0",
            whose,
            found,
            layers,
            source.path,
        )


def calibration_ids(
    config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The token ids of `config.kv_calibration`; none without it.

    ValueError for a prompt that no request could have, which is checked without any weights.
    """
    prompt = config.kv_calibration
    if prompt is None:
        return ()
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"kv_calibration={shown(prompt)} is text, but the checkpoint has no "
                f"tokenizer.json: give token ids"
            )
        try:
            prompt = tuple(tokenizer.encode(prompt))
        except ValueError as error:
            raise ValueError(f"kv_calibration: {error}") from error
    check_calibration_length(
        config.kv_calibration, prompt, config.sequence_limit(model.max_positions)
    )
    for index, token in enumerate(prompt):
        if token >= model.vocab_size:
            raise ValueError(
                f"kv_calibration={shown(config.kv_calibration)} has token id {token} at index "
                f"{index}: the vocabulary has {model.vocab_size}"
            )
    return prompt


def calibrate(
    model: Model,
    memory: MemoryPlan,
    config: EngineConfig,
    drafter: Drafter,
    ids: Sequence[int],
    group: RankGroup | None = None,
) -> None:
    """Set the scales by the `calibration_ids`, which are prefilled with KV in `memory.dtype`.

    `group` has the model's ranks, all of which call this; None: there is one.

    Everything an engine holds is allocated for this, with KV for these ids only, and freed again;
    `memory.budget` counts what this KV takes beyond the engine's own. Nothing is captured.
    `drafter` itself is not opened; a copy with the same weights is.
    """
    with span("calibrate"):
        _measure(model, memory, config, copy(drafter), ids, group)
        if memory.device.type == "cuda":
            # The engine uses another stream, for which torch would not reuse this memory.
            clear_blas_workspaces()
            torch.cuda.empty_cache()
    log.info("fp8 KV: scales from a prompt of %d tokens", len(ids))


def _measure(
    model: Model,
    memory: MemoryPlan,
    config: EngineConfig,
    drafter: Drafter,
    ids: Sequence[int],
    group: RankGroup | None,
) -> None:
    """Allocate, prefill and set the scales; everything allocated here is freed on return."""
    blocks = calibration_blocks(len(ids), memory.block_size)
    plan = replace(memory, kv_dtype=memory.dtype, kv_blocks=blocks, swap_blocks=0, rings=())
    held = allocate(model, plan, config, drafter, group)
    with _on_stream(held):
        held.buffers.reset()
        _prefill(held, plan, ids)
        # Block 0 is the dummy: drafts past the prompt's blocks went there.
        pools = [cache[:, 1:] for cache, _ in held.caches]
        calibrate_kv_scales(model.weights, pools[0])
        if len(pools) > 1:
            assert drafter.weights is not None, "a drafter with KV has weights"
            calibrate_kv_scales(drafter.weights, pools[1])
        _synchronize(held)


def _prefill(held: Allocation, plan: MemoryPlan, ids: Sequence[int]) -> None:
    """Feed the prompt to slot 0, in chunks of the largest token bucket."""
    buffers, longest = held.buffers, plan.prefill_ladder.sizes[-1]
    names = {field.name for field in buffers.fields}
    for sequence, start in enumerate(range(0, len(ids), longest), 1):
        chunk = ids[start : start + longest]
        end = start + len(chunk)
        updates: dict[str, Any] = {
            "prefill_tokens": chunk,
            "prefill_slot": [0],
            "prefill_start": [start],
            "prefill_count": [len(chunk)],
            "prefill_final": [int(end == len(ids))],
        }
        if start == 0:
            updates |= {
                "block_table": [list(range(1, plan.kv_blocks + 1))],
                "command_epoch": [1],
                "max_len": [plan.max_seq_len],
            }
        if "prefill_next" in names:
            updates["prefill_next"] = ids[end : end + 1] or [-1]
        buffers.load(updates, sequence=sequence, stream=held.stream)
        held.program.prefill(plan.prefill_ladder.pick(len(chunk)))
        _synchronize(held)
        buffers.acknowledge(sequence)


def _on_stream(held: Allocation) -> AbstractContextManager[Any]:
    return nullcontext() if held.stream is None else torch.cuda.stream(held.stream)


def _synchronize(held: Allocation) -> None:
    if held.stream is not None:
        held.stream.synchronize()
