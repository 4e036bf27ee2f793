"""The steps of an engine over tensors without memory: what it will launch, before it is allocated.

Recording them takes milliseconds, and gives the launches that the engine's own steps would make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace

import torch

from graphengine.config import EngineConfig
from graphengine.drafters import Drafter
from graphengine.models.contract import ModelConfig
from graphengine.opening.allocation import allocate, graph_steps
from graphengine.opening.budget.memory import MemoryPlan
from graphengine.program.graph_key import GraphKey

_META = torch.device("meta")


def sketch_steps(
    model: ModelConfig, memory: MemoryPlan, config: EngineConfig, drafter: Drafter
) -> Mapping[GraphKey, Callable[[], object]]:
    """The step of every graph that an engine with this plan has, over tensors of the meta device.

    Call it, and run the steps, inside `assumed`: they launch what that GPU would be given, with its
    plans. It is for an engine of one rank.
    """
    # Opening a drafter changes it.
    drafter = copy(drafter)
    sizes = replace(memory, device=_META, kv_blocks=memory.table_blocks, swap_blocks=0)
    weights = model.allocate(device="meta", dtype=memory.dtype)
    drafter.allocate(_META, memory.dtype, config.family, config.chain_family)
    opened = weights.open(max_seq_len=memory.max_seq_len)
    return graph_steps(allocate(opened, sizes, config, drafter).program, sizes)
