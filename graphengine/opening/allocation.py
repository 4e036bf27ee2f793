"""Allocates everything an engine holds, once, and makes the steps that its graphs capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from graphengine.buckets import Mailbox, StaticBuffers, prefer_cache
from graphengine.config import EngineConfig
from graphengine.drafters import Drafter, DraftSetting, FieldSizes
from graphengine.host.logprobs import Logprobs
from graphengine.host.masks import MaskTable
from graphengine.host.rings import WindowRing, layers_in_rings
from graphengine.host.routes import FrameCodes, Routing
from graphengine.kernels.attention.decode import TREE_SPLIT
from graphengine.kernels.core.devices import overlaps_launches
from graphengine.kernels.core.launching import KernelCompilation, compile_kernels
from graphengine.kernels.core.triton_versions import warn_if_untried
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.norm_rope.embedding import GivenRows
from graphengine.kernels.norm_rope.rope import RopeRows
from graphengine.kernels.step.swap import copy_blocks
from graphengine.models.adapters.table import AdapterTable, LaneAdapters
from graphengine.models.contract import Model
from graphengine.models.launches import WHOLE, DecodeLaunch, RankGroup
from graphengine.models.linears import LinearPlans
from graphengine.models.plans.choosing import PlanOrigins, choose_plans
from graphengine.models.states import (
    RingTensors,
    StateTensors,
    cache_shape,
    paged_states,
    recurrent_tensors,
    side_by_side,
)
from graphengine.models.vocabulary import vocabulary_of
from graphengine.observe.tracing import span
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.records import RecordMemory, Records, new_records
from graphengine.opening.releasable import ReleasableMemory, allocating, releasable_memory
from graphengine.opening.state_checkpoint_tensors import StateCheckpointTensors
from graphengine.program.early_stage import EarlyStage
from graphengine.program.fields import (
    ADAPTER_OF_CHUNK,
    ADAPTER_OF_SLOT,
    EMBEDS_FIELD,
    PROMPT_ROWS,
    ROPE_ROWS,
    ROPE_SHIFT,
    SEEN_FIELD,
    engine_fields,
    takes_grids,
    takes_images,
)
from graphengine.program.frame_step import FrameStep
from graphengine.program.frames import new_frame_step
from graphengine.program.graph_key import GraphKey
from graphengine.program.logits_step import LogitsStep
from graphengine.program.relaxed import Relaxation
from graphengine.program.routing_step import RoutingStep
from graphengine.program.stages import StageFlow, StageGroup
from graphengine.program.step import StepProgram
from graphengine.requests.grammar_pool import GrammarPool
from graphengine.requests.processing import AUTOMATON_TABLES, grammar_automata

log = logging.getLogger(__name__)

PagedCache = tuple[Tensor, Tensor]
"""KV of every block of a pool, including the dummy block 0, and its swap area."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Every tensor a replay can see, and the host's side of them.

    caches   the target's, then the drafter's if it has one
    routing  records of experts; None if they are not recorded
    codes    codes of frames; None where a step emits tokens
    state_checkpoints
             places for the states of recurrent layers
    adapters slots of adapters; None: there are none
    grammar_pool
             the pool for automata of grammars; None: there is none
    cache_memory  the memory of all KV caches, if the engine can release it
    stream   the stream of all replays and copies; None on a CPU
    """

    plans: LinearPlans
    plan_sources: PlanOrigins
    buffers: StaticBuffers
    mailbox: Mailbox
    logprobs: Logprobs
    masks: MaskTable
    routing: Routing | None
    codes: FrameCodes | None
    caches: tuple[PagedCache, ...]
    state_checkpoints: StateCheckpointTensors
    program: StepProgram
    adapters: AdapterTable | None
    grammar_pool: GrammarPool | None
    cache_memory: ReleasableMemory | None
    stream: torch.cuda.Stream | None


def allocate(
    model: Model,
    memory: MemoryPlan,
    config: EngineConfig,
    drafter: Drafter,
    group: RankGroup | None = None,
    stages: StageGroup | None = None,
    records: RecordMemory | None = None,
) -> Allocation:
    """Allocate everything that `memory` planned, and open the drafter, whose weights are loaded.

    group    the model's ranks; None: there is one
    stages   the pipeline's stages, of which the model is one; None: there is no pipeline
    records  memory for the mailboxes; None: they allocate their own
    """
    plans, plan_sources = choose_plans(
        model.config.linears, memory.dtype, config.family, memory.device
    )
    buffers = _new_buffers(model, memory, config, drafter)
    held = new_records(config, memory, records)
    cache_memory = releasable_memory(memory.device, releasable=config.releasable)
    with allocating(cache_memory):
        target, own = _new_caches(model, memory, drafter)
        states = _new_states(model, memory, buffers, target[0])
    setting = _new_setting(model, memory, config, drafter, plans, buffers, group)
    drafter.open(setting, own[0])
    adapters = _new_adapters(model, memory)
    program = _new_program(
        config, drafter, setting, states, held, _new_flow(setting, drafter, stages), adapters
    )
    stream = _new_stream(memory.device)
    # The target's cache is listed even if it has no layers, as when all its KV is in rings.
    caches = (target, own) if len(own[0]) else (target,)
    return Allocation(
        plans=plans,
        plan_sources=plan_sources,
        buffers=buffers,
        mailbox=held.mailbox,
        logprobs=held.logprobs,
        masks=MaskTable(
            buffers,
            host_drafts=drafter.needs.host_drafts,
            parents=drafter.parents if drafter.needs.depth else None,
        ),
        routing=held.routing,
        codes=held.codes,
        caches=caches,
        state_checkpoints=StateCheckpointTensors(
            model.config.states, buffers, memory.state_places, [cache for cache, _ in caches]
        ),
        program=program,
        adapters=adapters,
        grammar_pool=(
            GrammarPool(buffers[AUTOMATON_TABLES], stream) if config.grammar_pool_mib else None
        ),
        cache_memory=cache_memory,
        stream=stream,
    )


def _new_setting(
    model: Model,
    memory: MemoryPlan,
    config: EngineConfig,
    drafter: Drafter,
    plans: LinearPlans,
    buffers: StaticBuffers,
    group: RankGroup | None,
) -> DraftSetting:
    """How the engine's kernels are launched, for the target and its drafter."""
    experts = None
    if config.data_parallel > 1:
        # Ranks communicate for experts only.
        experts, group = group, None
    split_tokens = model.config.split_tokens(plans.family, memory.dtype, memory.max_seq_len)
    most_split = TREE_SPLIT if drafter.needs.depth else None
    if most_split is not None:
        # The same in all graphs: sampled tokens must not depend on whether a step has drafts.
        split_tokens = min(split_tokens, most_split)
    launch = DecodeLaunch(
        plans=plans,
        split_tokens=split_tokens,
        arrivals=buffers["arrivals"],
        pdl=config.pdl and overlaps_launches(memory.device),
        reduce=None if group is None else group.reduce,
        split=None if group is None else group.split_stream,
        peers=None if group is None else group.peers,
        share=WHOLE if group is None else group.share,
        experts=experts,
        activations=memory.activations,
        any_lanes=config.prompts_per_prefill > 1,
    )
    return DraftSetting(model, buffers, launch, group, most_split)


def _new_flow(
    setting: DraftSetting, drafter: Drafter, stages: StageGroup | None
) -> StageFlow | None:
    """Where a pipeline stage's streams come from and go to; None without a pipeline."""
    if stages is None:
        return None
    device_drafts = drafter.needs.length > 0 and not drafter.needs.host_drafts
    hidden = setting.model.config.hidden_size
    return StageFlow(stages, setting.buffers, hidden, drafts=device_drafts)


def _new_program(
    config: EngineConfig,
    drafter: Drafter,
    setting: DraftSetting,
    states: StateTensors,
    records: Records,
    flow: StageFlow | None,
    adapters: AdapterTable | None,
) -> StepProgram:
    """The steps of a whole model or of the last stage, which sample, or of an earlier stage."""
    model, buffers = setting.model, setting.buffers
    samples = flow is None or flow.last
    relaxed = config.relaxed_acceptance
    launch, rope_rows = setting.launch, None
    given, *deepstack = _given_rows(model, buffers) if config.prompt_embeds else (None,)
    if takes_grids(config, model.config):
        # Only for the target: draft modules count positions in a picture as if it were text.
        launch = replace(launch, rope_shift=buffers[ROPE_SHIFT])
        rope_rows = _rope_rows(model, buffers)
    if adapters is not None:
        # Only for the target: draft modules draft with their own weights alone.
        lanes = (buffers[name] for name in (ADAPTER_OF_SLOT, ADAPTER_OF_CHUNK))
        launch = replace(launch, adapters=LaneAdapters(adapters, *lanes))
    return (StepProgram if samples else EarlyStage)(
        model,
        buffers,
        states,
        records.mailbox,
        launch,
        _logits_step(config, buffers, records.logprobs),
        vocabulary=vocabulary_of(
            model.lm_head, setting.group if samples else None, bias=model.head_bias
        ),
        drafter=drafter,
        relaxation=None if relaxed is None else Relaxation(relaxed, buffers),
        routing=_routing_step(buffers, records.routing),
        given=given,
        deepstack=deepstack,
        rope_rows=rope_rows,
        seen=buffers[SEEN_FIELD] if takes_images(config, model.config) else None,
        forced_acceptance=config.forced_acceptance,
        flow=flow,
        frames=_frame_step(setting, config, records.codes),
    )


def _frame_step(
    setting: DraftSetting, config: EngineConfig, codes: FrameCodes | None
) -> FrameStep | None:
    """The `FrameStep` that draws the codes of frames; None where a step emits tokens."""
    model = setting.model
    inner = model.weights.inner_weights
    if inner is None:
        return None
    assert codes is not None, "frames have a mailbox"
    return new_frame_step(
        inner,
        setting.buffers,
        setting.launch,
        family=config.family,
        eps=model.config.norm_eps,
        given=codes.given.tensor,
        mailbox=codes.tensor,
        logprobs=codes.logprobs_tensor,
        sampled=config.logprobs_mode == "sampled_logprobs",
    )


def _new_adapters(model: Model, memory: MemoryPlan) -> AdapterTable | None:
    if memory.adapters is None:
        return None
    linears = model.weights.adaptable()
    return AdapterTable(linears, memory.adapters, memory.device, memory.dtype)


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The engine's stream, once the device has finished the work of other streams."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    return stream


def _logits_step(config: EngineConfig, buffers: StaticBuffers, logprobs: Logprobs) -> LogitsStep:
    return LogitsStep(
        buffers,
        logprobs.tokens.tensor,
        None if logprobs.prompts is None else logprobs.prompts.tensor,
        top=config.max_logprobs,
        mode=config.logprobs_mode,
        rows=buffers[PROMPT_ROWS] if config.prompt_logprobs_out else None,
        automata=grammar_automata(buffers) if config.grammar_pool_mib else None,
        drafts=buffers["draft_tokens"] if config.jumps else None,
    )


def _given_rows(model: Model, buffers: StaticBuffers) -> Iterator[GivenRows]:
    """The embeddings of a chunk's positions that have no token, then each level of features."""
    rows, H = buffers[EMBEDS_FIELD].view(model.dtype), model.config.hidden_size
    for level, part in enumerate(torch.split(rows, H, dim=1)):
        scale = 1.0 if level else model.weights.given_scale
        yield GivenRows(part, buffers["prefill_start"][:1], scale)


def _rope_rows(model: Model, buffers: StaticBuffers) -> RopeRows:
    """The rows of RoPE's tables for a chunk's lanes."""
    axes = torch.tensor(model.config.rope_axes, dtype=torch.int32, device=buffers.device)
    return RopeRows(buffers[ROPE_ROWS], axes)


def _new_buffers(
    model: Model, memory: MemoryPlan, config: EngineConfig, drafter: Drafter
) -> StaticBuffers:
    prefill_tokens = memory.prefill_ladder.sizes[-1]
    if config.relaxed_acceptance is not None:
        config.relaxed_acceptance.check_vocabulary(model.config.vocab_size)
    fields = engine_fields(
        config,
        drafter,
        FieldSizes(config.max_batch, memory.max_seq_len, prefill_tokens, memory.dtype),
        states=model.config.states,
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        table_blocks=memory.table_blocks,
        rings=memory.rings,
        grids=takes_grids(config, model.config),
        images=takes_images(config, model.config),
        deepstack=model.config.deepstack,
        inner=model.config.inner,
        # Requests that share a block each copy it: there may be more pairs than blocks.
        swap_pairs=max(1, min(config.max_batch * memory.table_blocks, memory.swap_blocks)),
        arrivals=memory.counters,
    )
    buffers = StaticBuffers(fields, memory.device, staging_blocks=config.staging_blocks)
    log.debug("static buffers\n%s", buffers.describe())
    return buffers


def _routing_step(buffers: StaticBuffers, routing: Routing | None) -> RoutingStep | None:
    if routing is None:
        return None
    tensors = (routing.tokens.tensor, routing.prompts.tensor, routing.table.tensor)
    return RoutingStep(buffers, *tensors)


def _new_caches(
    model: Model, memory: MemoryPlan, drafter: Drafter
) -> tuple[PagedCache, PagedCache]:
    """The caches of the target's layers without rings, and of the drafter's layers."""
    target = cache_shape(
        model.config.states, memory.block_size, without=layers_in_rings(memory.rings)
    )
    own = drafter.needs.kv_block_shape(memory.block_size)
    return _new_cache(memory, *target), _new_cache(memory, *own)


def _new_cache(memory: MemoryPlan, layers: int, *block: int) -> PagedCache:
    return (
        torch.zeros(
            (layers, memory.kv_blocks + 1, *block), dtype=memory.kv_dtype, device=memory.device
        ),
        torch.zeros(
            (layers, memory.swap_blocks, *block),
            dtype=memory.kv_dtype,
            pin_memory=memory.device.type == "cuda",
        ),
    )


def _new_states(
    model: Model, memory: MemoryPlan, buffers: StaticBuffers, cache: Tensor
) -> StateTensors:
    """The states that the target's layers keep; `cache` is that of the layers without rings."""
    states, size = model.config.states, memory.block_size
    paged = paged_states(states)
    return StateTensors(
        cache,
        buffers["block_table"],
        recurrent_tensors(states, buffers),
        tuple(
            _new_ring(memory, ring, buffers, *paged[ring.layers[0]].block_shape(size))
            for ring in memory.rings
        ),
        side_by_side(states, without=layers_in_rings(memory.rings)),
    )


def _new_ring(
    memory: MemoryPlan, ring: WindowRing, buffers: StaticBuffers, *block: int
) -> RingTensors:
    shape = (len(ring.layers), memory.ladder.max_batch * ring.blocks + 1, *block)
    cache = torch.zeros(shape, dtype=memory.kv_dtype, device=memory.device)
    return RingTensors(ring.layers, cache, buffers[ring.table])


def swap_blocks(caches: Sequence[PagedCache], buffers: StaticBuffers, out: int, back: int) -> None:
    """Copy the first `out` of `swap_pairs` from the pool to the swap area, or `back` from there.

    The cache has no layers, and nothing to copy, if all of a model's KV is in rings.
    """
    for cache, area in caches:
        if not len(cache):
            continue
        if out:
            copy_blocks(cache, area, buffers["swap_pairs"], out)
        if back:
            copy_blocks(area, cache, buffers["swap_pairs"], back)


def graph_steps(program: StepProgram, memory: MemoryPlan) -> dict[GraphKey, Callable[[], object]]:
    """The step of every graph, in the order of `memory.graphs`.

    On a CPU, where each replay calls the step, it runs in inference mode: autograd's bookkeeping
    costs an eighth of a small model's step.
    """
    run = torch.inference_mode()(_run) if memory.device.type == "cpu" else _run
    return {key: partial(run, program, key) for key in memory.graphs}


def _run(program: StepProgram, key: GraphKey) -> None:
    """The step of one graph."""
    if key.kind == "decode":
        assert key.variant in program.samplers, f"{key=}"
        for _ in range(key.steps):
            program.decode(key.size, key.variant, key.drafts)
    elif key.variant == "note":
        program.note(key.size)
    else:
        program.prefill(key.size, key.variant)


def ask_for_cache(
    family: RowFamily, device: torch.device, name: str, graph: torch.cuda.CUDAGraph
) -> None:
    """Have the kernels of a decode graph, not instantiated yet, leave a multiprocessor's memory to
    its cache, where weights go to registers by it. In the `dot` family they go to shared memory.
    """
    if family == "fma" and name.startswith("decode/"):
        prefer_cache(graph, device)


def compile_steps(
    steps: Mapping[GraphKey, Callable[[], object]],
    device: torch.device,
    others: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> KernelCompilation | None:
    """Compile the kernels that the steps and `others` launch, in parallel, before any step is
    captured; None on a CPU.

    Nothing may be in flight, and the caller must reset the static buffers afterwards.
    """
    if device.type != "cuda":
        return None
    warn_if_untried()
    # Prefill last. The other steps have the most kernels and no torch operations: each torch
    # operation releases the GIL, and has to wait for it while other threads compile.
    ordered = sorted(steps.items(), key=lambda step: step[0].kind == "prefill")
    with span("compile"):
        return compile_kernels({**others, **{key.name: step for key, step in ordered}})
