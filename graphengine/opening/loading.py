"""Opens a checkpoint: reads it, plans the memory of an engine, and loads the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from graphengine.config import EngineConfig
from graphengine.drafters import Drafter, RemoteDrafter, make_drafter
from graphengine.kernels.core.paged import FP8_KV
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.models.adapters.adapter import Adapter
from graphengine.models.adapters.merging import with_merged
from graphengine.models.adapters.table import AdapterSizes
from graphengine.models.checkpoints.checkpoint import Checkpoint, stored_dtype
from graphengine.models.checkpoints.destinations import (
    destinations,
    load_weights,
    read_eos_ids,
    read_model,
    with_state_dtype,
)
from graphengine.models.checkpoints.kv_scales import is_kv_scale
from graphengine.models.contract import Model, ModelConfig, ModelWeights
from graphengine.models.launches import WHOLE, Share
from graphengine.models.quantised.config import quantisation_of
from graphengine.models.splitting.rank_cuts import cut_linears, cut_to
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.models.splitting.stages import Place, of_stage, place_of_rank, stage_of_rank
from graphengine.models.weights import StoredLinear
from graphengine.observe.tracing import span
from graphengine.opening.adapters import adapter_sizes, whole_weights
from graphengine.opening.budget.footprint import plan_with_footprint
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.budget.workspace import Footprint
from graphengine.opening.calibration import calibrate, calibration_ids, read_kv_scales
from graphengine.opening.releasable import allocating, releasable_memory
from graphengine.opening.requirements import check_frames
from graphengine.opening.updating import LoadedWeights
from graphengine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class CheckpointContents(NamedTuple):
    """A checkpoint's contents, and the model made from them, before anything is allocated.

    place        this rank's place among all ranks; `model` has its share of each layer of its stage
    whole        the model with all layers, not split
    split        the model with this share of all layers
    whole_stage  the layers of `model`, not split: only some layers in a pipeline
    calibration  token ids of the prompt that sets the scales of an fp8 KV cache
    adapters     number and sizes of the slots for adapters; None: none
    """

    checkpoint: Checkpoint
    place: Place
    whole: ModelConfig
    split: ModelConfig
    whole_stage: ModelConfig
    model: ModelConfig
    drafter: Drafter
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    calibration: Sequence[int]
    adapters: AdapterSizes | None = None


class Opened(NamedTuple):
    """The parts of an engine: weights are loaded, nothing else is allocated.

    loaded  which tensor each weight came from
    """

    model: Model
    memory: MemoryPlan
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    drafter: Drafter
    loaded: LoadedWeights


def open_checkpoint(
    path: str | Path, config: EngineConfig, progress: Callable[[int, int], None] | None
) -> Opened:
    """Read a checkpoint as `config` says; `progress` is called with (bytes loaded, all bytes)."""
    contents = read_checkpoint(path, config)
    return load_checkpoint(contents, plan_checkpoint(contents, config), config, progress)


def read_checkpoint(
    path: str | Path, config: EngineConfig, share: Share = WHOLE
) -> CheckpointContents:
    """Read a checkpoint's configs and tokenizer, for this rank's share or stage."""
    checkpoint = Checkpoint.open(path)
    if config.load_format == "dummy":
        checkpoint = _drawn(checkpoint, config.device)
    model = read_model(checkpoint, config.quantize, head=config.quantize_lm_head)
    model = with_state_dtype(model, config.state_dtype)
    check_frames(model, config)
    if config.merge_adapter is not None:
        # On a CPU without a dtype an engine computes in float32, which holds all that is stored.
        checkpoint = with_merged(
            checkpoint,
            Adapter.open(config.merge_adapter),
            _transposed_linears(model),
            config.torch_dtype,
        )
    tokenizer = Tokenizer.from_directory(checkpoint.path) if checkpoint.has_tokenizer else None
    named = None if tokenizer is None else tokenizer.eos_token_id
    inner = model.inner
    if inner is None:
        found = read_eos_ids(checkpoint, model, named)
    elif inner.end_token >= 0:
        found = (inner.end_token,)
    else:
        # The tokenizer's end-of-sequence id does not apply to codes of frames.
        found = read_eos_ids(checkpoint, model)
    eos_ids = config.check_eos_ids(found)
    whole, place = model, place_of_rank(share, config.pipeline_parallel)
    model = of_rank(
        whole,
        place.shard,
        expert_parallel=config.expert_parallel,
        data_parallel=config.data_parallel > 1,
    )
    drafter = make_drafter(config, checkpoint, model, place.shard)
    calibration = calibration_ids(config, model, tokenizer)
    contents = CheckpointContents(
        checkpoint=checkpoint,
        place=Place(place.shard, WHOLE),
        whole=whole,
        split=model,
        whole_stage=whole,
        model=model,
        drafter=drafter,
        tokenizer=tokenizer,
        eos_ids=tuple(eos_ids),
        calibration=calibration,
        adapters=adapter_sizes(config, whole),
    )
    return stage_contents(contents, place.pipe) if config.pipeline_parallel > 1 else contents


def _transposed_linears(model: ModelConfig) -> frozenset[str]:
    """Names of the linears that checkpoints store transposed."""
    linears = whole_weights(model).linears()
    return frozenset(name for each in linears if each.transposed for name, _ in each.parts)


def _drawn(checkpoint: Checkpoint, device: str) -> Checkpoint:
    if quantisation_of(checkpoint) is not None:
        raise ValueError(
            f"load_format='dummy' draws weights of 16 or 32 bits, and those of {checkpoint.path} "
            f"are quantised"
        )
    return checkpoint.drawn(device)


def stage_contents(contents: CheckpointContents, pipe: Share) -> CheckpointContents:
    """The contents for one rank of a pipeline: its stage, with its share of each layer; see
    `stage_of_rank`.

    Raises ValueError like `of_stage`.
    """
    stage = stage_of_rank(pipe)
    early = stage.rank < stage.ranks - 1
    # Draft modules of the model's checkpoint need the embedding, for the tokens they draft.
    embeds = (
        not early
        and bool(contents.drafter.needs.states)
        and contents.drafter.own_checkpoint is None
    )
    whole, model = (
        of_stage(each, stage, whole=contents.whole, embeds=embeds)
        for each in (contents.whole, contents.split)
    )
    drafter = RemoteDrafter(contents.drafter) if early else contents.drafter
    place = contents.place._replace(pipe=pipe)
    return contents._replace(place=place, whole_stage=whole, model=model, drafter=drafter)


def plan_checkpoint(
    contents: CheckpointContents, config: EngineConfig, footprint: Footprint | None = None
) -> MemoryPlan:
    """Plan the memory that an engine will hold, within the memory that is free now.

    footprint  memory of the steps, if known; None: it is traced, on a GPU
    """
    memory = plan_with_footprint(
        contents.model,
        config,
        checkpoint_dtype=stored_dtype(contents.checkpoint),
        drafter=contents.drafter,
        calibration_tokens=len(contents.calibration),
        adapters=contents.adapters,
        place=contents.place,
        footprint=footprint,
    )
    log.info("memory budget\n%s\n%s", memory.budget.table(), memory.describe_kv())
    return memory


def load_checkpoint(
    contents: CheckpointContents,
    memory: MemoryPlan,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
) -> Opened:
    """Allocate the weights, and load them; `progress` as in `open_checkpoint`.

    With several ranks, the caller has all of them `calibrate` together afterwards.
    """
    checkpoint, whole, model_config = contents.checkpoint, contents.whole, contents.model
    share = contents.place.shard
    drafter, ids = contents.drafter, contents.calibration
    tokenizer, eos_ids = contents.tokenizer, contents.eos_ids
    held = releasable_memory(memory.device, releasable=config.releasable)
    with span("load"):
        with allocating(held):
            weights = model_config.allocate(device=config.device, dtype=memory.dtype)
            families = config.family, config.chain_family
            drafted_wanted = drafter.allocate(memory.device, memory.dtype, *families)
        wanted = destinations(checkpoint, weights)
        targets = {*wanted}
        wanted |= drafted_wanted
        linears = weights.linears()
        all_wanted, all_linears = {**wanted}, linears + drafter.linears()
        if model_config is not whole:
            of_all, drafted = whole.allocate(device="meta", dtype=memory.dtype), None
            if drafter.own_checkpoint is None:
                drafted = drafter.whole_weights(memory.dtype)
            all_wanted = {
                **destinations(checkpoint, of_all),
                **(drafted.named() if drafted else {}),
                **wanted,
            }
            targets |= {*destinations(checkpoint, of_all)}
            all_linears = of_all.linears() + (drafted.linears() if drafted else [])
            if share != WHOLE:
                linears = cut_linears(of_all, weights, share)
                checkpoint = drafter.cut(cut_to(checkpoint, of_all, weights, share))
        linears += drafter.linears()
        unused = load_weights(checkpoint, wanted, linears, model_config.embedding_name, progress)
        if checkpoint.drawn_on is not None and memory.device.type == "cuda":
            # Each tensor was drawn whole, though a rank may keep only a part.
            torch.cuda.empty_cache()
        if memory.kv_dtype == FP8_KV and config.kv_calibration is None:
            # Random weights have no scales of their own.
            if checkpoint.drawn_on is None:
                read_kv_scales(checkpoint, weights, drafter, whole, share)
            unused = [name for name in unused if not is_kv_scale(name)]
    # A pipeline's stage leaves most tensors to the other stages.
    if unused and config.pipeline_parallel == 1:
        log.info("tensors of the checkpoint that the model does not use: %s", ", ".join(unused))
    # Codes are not tokens of the tokenizer.
    largest = None if model_config.inner is not None or tokenizer is None else tokenizer.largest_id
    model = weights.open(
        max_seq_len=memory.max_seq_len,
        vocabulary=0 if largest is None else 1 + max((largest, *eos_ids)),
    )
    if ids and share == WHOLE:
        calibrate(model, memory, config, drafter, ids)
    loaded = LoadedWeights(
        checkpoint=checkpoint,
        whole=whole,
        wanted=wanted,
        packed=_packed(linears),
        all_wanted=all_wanted,
        all_packed=_packed(all_linears),
        drafted=all_wanted.keys() - targets,
        adaptable=_adaptable(weights, linears),
        memory=held,
    )
    return Opened(model, memory, tokenizer, eos_ids, drafter, loaded)


def _adaptable(weights: ModelWeights, linears: Sequence[StoredLinear]) -> list[StoredLinear]:
    """The weights that adapters can change: of all linears, those that this rank has."""
    changed = {id(linear.weight) for linear in weights.adaptable()}
    return [linear for linear in linears if id(linear.weight) in changed]


def _packed(linears: Sequence[StoredLinear]) -> list[StoredLinear]:
    return [linear for linear in linears if isinstance(linear.weight, PackedWeight)]
