"""The steps of an engine over tensors without memory, to list its launches before it is allocated.

Recording them takes milliseconds, and gives the launches that the engine's own steps would make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.drafters import Drafter
from graphengine.kernels.comm.layout import PeerLayout, PeerTensors
from graphengine.kernels.core.devices import overlaps_launches
from graphengine.models.contract import ModelConfig
from graphengine.models.launches import Share
from graphengine.models.splitting.pushes import Pushes
from graphengine.models.splitting.stages import ALONE, Place, stage_of_rank
from graphengine.opening.allocation import allocate, graph_steps
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.budget.workspace import most_groups
from graphengine.program.graph_key import GraphKey
from graphengine.program.step import StepProgram

_META = torch.device("meta")


class Sketch(NamedTuple):
    """The program of an engine over tensors without memory, and the step of each of its graphs.

    caches  KV caches, layers first: the target's and then the drafter's
    """

    program: StepProgram
    caches: tuple[Tensor, ...]
    steps: Mapping[GraphKey, Callable[[], object]]


def sketch_steps(
    model: ModelConfig,
    memory: MemoryPlan,
    config: EngineConfig,
    drafter: Drafter,
    place: Place = ALONE,
) -> Mapping[GraphKey, Callable[[], object]]:
    """The steps of `sketch`."""
    return sketch(model, memory, config, drafter, place).steps


def sketch(
    model: ModelConfig,
    memory: MemoryPlan,
    config: EngineConfig,
    drafter: Drafter,
    place: Place = ALONE,
) -> Sketch:
    """The step of every graph that a rank with this plan has, over tensors of the meta device.

    Call it, and run the steps, inside `assumed`: they record that GPU's launches, with its plans.
    Ranks push their parts, as on GPUs that map each other's memory. `model` and `drafter` are the
    rank's at `place`.
    """
    # Opening a drafter changes it.
    drafter = copy(drafter)
    sizes = replace(memory, device=_META, kv_blocks=memory.table_blocks, swap_blocks=0)
    weights = model.allocate(device="meta", dtype=memory.dtype)
    drafter.allocate(_META, memory.dtype, config.family, config.chain_family)
    opened = weights.open(max_seq_len=memory.max_seq_len)
    pdl = config.pdl and overlaps_launches(_META)
    group = _pushes(place.shard, memory, pdl=pdl) if place.shard.ranks > 1 else None
    stages = _Stages(place.pipe, model.hidden_size) if place.pipe.ranks > 1 else None
    held = allocate(opened, sizes, config, drafter, group, stages)
    caches = (*(cache for cache, _ in held.caches), *(r.cache for r in held.program.states.rings))
    return Sketch(held.program, caches, graph_steps(held.program, sizes))


def _pushes(share: Share, memory: MemoryPlan, *, pdl: bool) -> Pushes:
    """The other ranks' pushed memory, as tensors without memory."""
    layout = PeerLayout.of(share.ranks, memory.push_units, memory.summed_words)
    words = torch.empty(layout.nbytes // 4, dtype=torch.int32, device=_META)
    return Pushes(PeerTensors.over(share.rank, layout, words, [0] * share.ranks), pdl=pdl)


class _Stages:
    """A `StageGroup` without other stages; each send or receive becomes one call of torch."""

    def __init__(self, pipe: Share, hidden: int) -> None:
        self.share, self._hidden = stage_of_rank(pipe), hidden

    def receive(self, tensor: Tensor) -> None:
        tensor.zero_()

    def send(self, tensor: Tensor) -> None:
        tensor.clone()

    def spread(self, tensor: Tensor) -> None:
        rank, stages = self.share
        if rank < stages - 1:
            return self.receive(tensor)
        for _ in range(stages - 1):
            self.send(tensor)

    def receive_count(self, device: torch.device) -> int:
        return most_groups(self._hidden)

    def send_count(self, count: int, device: torch.device) -> None:
        pass
