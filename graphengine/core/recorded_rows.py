"""The launches of an engine's graphs as tables, recorded by running their steps once more."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext

from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.core.runtime import Runtime
from graphengine.drafters import Drafter
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.models.contract import ModelConfig
from graphengine.models.weights import StoredWeights
from graphengine.observe.op_table import OpRow, row_maker
from graphengine.opening.allocation import graph_steps
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.budget.sketch import sketch
from graphengine.program.graph_key import GraphKey
from graphengine.program.launch_lists import describe_launches


def record_rows(
    runtime: Runtime, memory: MemoryPlan, graphs: Collection[GraphKey]
) -> dict[GraphKey, list[OpRow]]:
    """The launches of these graphs; on a CPU those that an H200 would be given.

    The engine must be new, or can only be closed afterwards: its static buffers are reset. It is
    one of a single rank: with several, a step would wait for ranks that record nothing.
    """
    states = runtime.program.states
    caches = [cache for cache, _ in runtime.caches] + [ring.cache for ring in states.rings]
    weights = runtime.model.weights
    describe = row_maker(_named_weights(weights), caches, weights.by_linear())
    steps = graph_steps(runtime.program, memory)
    on_gpu = memory.device.type == "cuda"
    with runtime.on_stream():
        with nullcontext() if on_gpu else assumed(H200):
            found = {key: describe_launches(steps[key], describe) for key in graphs}
        runtime.buffers.reset()
    runtime.synchronize()
    return found


def sketch_rows(
    model: ModelConfig,
    memory: MemoryPlan,
    config: EngineConfig,
    drafter: Drafter,
    graphs: Collection[GraphKey],
) -> dict[GraphKey, list[OpRow]]:
    """The launches of these graphs on an H200, of an engine whose tensors have no memory."""
    with assumed(H200):
        drawn = sketch(model, memory, config, drafter)
        weights = drawn.program.model.weights
        describe = row_maker(_named_weights(weights), drawn.caches, weights.by_linear())
        return {key: describe_launches(drawn.steps[key], describe) for key in graphs}


def _named_weights(held: StoredWeights) -> dict[str, Tensor]:
    """Every weight tensor of the model, by the name of the first checkpoint tensor in it."""
    named = dict(held.named())
    for linear in held.linears():
        if isinstance(linear.weight, PackedWeight):
            name = linear.parts[0][0]
            fields = zip(linear.weight._fields, linear.weight, strict=True)
            named |= {f"{name}.{field}": each for field, each in fields if isinstance(each, Tensor)}
    return named
