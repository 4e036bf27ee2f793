"""The memory plan of an engine, in bytes, made before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from graphengine.buckets import BucketLadder, MemoryBudget, OutOfBudget, format_bytes
from graphengine.config import EngineConfig
from graphengine.drafters import Drafter
from graphengine.host.rings import WindowRing
from graphengine.kernels.comm.layout import PeerLayout
from graphengine.kernels.comm.push_lanes import lane_units
from graphengine.kernels.comm.push_residual import push_units
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.prefill.lane_codes import ActivationKind
from graphengine.models.adapters.table import AdapterSizes, AdapterTable
from graphengine.models.contract import ModelConfig
from graphengine.models.inner.drawn import FrameCoder
from graphengine.models.states import checkpoint_bytes, recurrent_states
from graphengine.models.weights import RoutedExperts
from graphengine.opening.budget.cache_budget import BlockBytes, FreeMemory, add_caches
from graphengine.opening.budget.host_memory import available_host_bytes
from graphengine.opening.budget.state_budget import add_state
from graphengine.opening.budget.workspace import (
    Footprint,
    exchanged_bytes,
    most_groups,
    workspace_bytes,
)
from graphengine.opening.engine_shape import EngineShape
from graphengine.opening.inventory import LinkShape, graph_keys, window_rings
from graphengine.program.graph_key import GraphKey

# Channels and buffers of NCCL for a group on one host, rounded up.
_NCCL_BYTES = 512 * 2**20
# Arrival counters on a CPU. References use none; this many suffice to list a GPU's launches.
_COUNTERS_OF_CPU = 2**18

UNLIMITED = FreeMemory(2**62, 2**62)
"""More memory than any machine has: for the sizes of an engine that need not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The sizes that follow from a model, an `EngineConfig` and the memory at hand.

    dtype          dtype of weights and activations
    kv_dtype       dtype of the caches
    activations    format that prefill rounds the inputs of linears to, if a linear takes it; None:
                   no rounding
    block_bytes    bytes of one block of the pool in the target's and the drafter's caches; 0 if all
                   KV is in rings
    kv_blocks      pool blocks without the dummy; the longest request takes `table_blocks` of them
    rings          rings in which layers with a window keep only the newest tokens; their KV is not
                   in the pool. Each slot has one of each
    ring_bytes     bytes of a slot's rings
    swap_blocks    pinned host blocks
    draft_lengths  drafts that the decode graphs verify, ascending: (0,) without drafts
    graphs         all graphs, in the order of capture
    routed         the model's experts, if they are recorded
    inner          the model's inner decoder; None: a step emits tokens
    recurrent      whether some layer of the model, or of any of its stages, is recurrent
    state_places   places for the states of recurrent layers, of `state_bytes` each
    load_bytes     bytes of the largest copy of host-owned fields
    push_units     units of memory in which ranks on GPUs receive each other's parts of a decode
                   step, in float32; stages push none. 0 with one rank
    summed_words   words of the largest part of a chunk that ranks on GPUs sum by pushes; 0: none
    adapters       number and sizes of the slots for adapters; None: there are none
    footprint      memory of the steps; None: it is estimated, as on a CPU
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    activations: ActivationKind | None
    max_seq_len: int
    ladder: BucketLadder
    prefill_ladder: BucketLadder
    block_size: int
    block_bytes: int
    table_blocks: int
    kv_blocks: int
    swap_blocks: int
    draft_lengths: tuple[int, ...]
    graphs: tuple[GraphKey, ...]
    budget: MemoryBudget
    routed: RoutedExperts | None = None
    inner: FrameCoder | None = None
    rings: tuple[WindowRing, ...] = ()
    ring_bytes: int = 0
    recurrent: bool = False
    state_places: int = 0
    state_bytes: int = 0
    load_bytes: int = 0
    push_units: int = 0
    summed_words: int = 0
    adapters: AdapterSizes | None = None
    footprint: Footprint | None = None

    @property
    def counters(self) -> int:
        """Arrival counters that the launches of a step share."""
        return _counters(self.footprint)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a row in the widest decode graph: one and its drafts."""
        return 1 + self.draft_lengths[-1]

    def describe_dtypes(self) -> str:
        """The dtype of weights, of KV if it differs, and of inputs that prefill rounds."""
        weights, kv = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_dtype))
        described = weights if kv == weights else f"{weights}, KV {kv}"
        return described if self.activations is None else f"{described}, prefill {self.activations}"

    @property
    def whole_requests(self) -> int:
        """How many slots' requests of `max_seq_len` tokens the pool holds at the same time."""
        return min(self.ladder.max_batch, self.kv_blocks // self.table_blocks)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of `tokens` tokens in the caches of the pool."""
        return tokens * self.block_bytes // self.block_size

    def describe_kv(self) -> str:
        """Text for reports: bytes per token in the caches, and how many tokens the pool holds."""
        slots, size, whole = self.ladder.max_batch, self.block_size, self.whole_requests
        holds = f"{whole} of {slots} requests of max_seq_len {self.max_seq_len:,}"
        if whole < slots:
            holds += f", or {slots} of {self.kv_blocks // slots * size:,} tokens"
        described = (
            f"KV takes {format_bytes(self.kv_bytes(1000))} per 1,000 tokens; the pool holds "
            f"{self.kv_blocks * size:,} tokens: {holds}"
        )
        if not self.rings:
            return described
        kept = ", ".join(
            f"{ring.blocks * size:,} tokens of {len(ring.layers)} "
            f"layer{'s' if len(ring.layers) > 1 else ''} with a window of {ring.window:,}"
            for ring in self.rings
        )
        if not self.block_bytes:
            described = f"KV takes no more for longer requests: the slots hold {holds}"
        return f"{described}; each slot keeps {kept}, in {format_bytes(self.ring_bytes)}"


def available_bytes(device: torch.device) -> int:
    """Bytes that an allocation could get now: free device memory, or free host memory within the
    limits of containers.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_host_bytes()


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    *,
    checkpoint_dtype: torch.dtype,
    drafter: Drafter,
    calibration_tokens: int = 0,
    footprint: Footprint | None = None,
    room: FreeMemory | None = None,
    adapters: AdapterSizes | None = None,
) -> MemoryPlan:
    """Sizes and budget of an engine, with rings where they are smaller.

    All slots share the pool, which may hold less than each could need; each slot has its own rings.
    So layers get rings if the rings have no more blocks in all than the pool would have for them.

    OutOfBudget carries the table if the engine does not fit; ValueError, like `EngineShape.of`, for
    options that do not suit this model or device.

    checkpoint_dtype    used on a GPU where the config names no dtype; a CPU computes in float32
    calibration_tokens  tokens of `kv_calibration`: their KV is in `dtype`, and freed before the
                        caches are allocated, so the budget has a line for what it takes beyond them
    footprint           memory of the steps; None, only on a CPU: it is estimated from the model's
                        sizes
    room                the memory that may be planned; None: the memory that is free now
    adapters            how many adapters there are slots for; None: none
    """
    rings = window_rings(model, config, drafter.needs.length)
    shape = EngineShape.of(model, config, drafter, checkpoint_dtype)
    plan = partial(
        _plan,
        calibration_tokens=calibration_tokens,
        footprint=footprint,
        room=room or _room(shape),
        adapters=adapters,
    )
    try:
        whole = plan(shape)
    except OutOfBudget:
        if not rings:
            raise
        return plan(replace(shape, rings=rings))
    rings = tuple(ring for ring in rings if config.max_batch * ring.blocks <= whole.kv_blocks)
    return plan(replace(shape, rings=rings)) if rings else whole


def _plan(
    shape: EngineShape,
    *,
    calibration_tokens: int,
    footprint: Footprint | None,
    adapters: AdapterSizes | None,
    room: FreeMemory,
) -> MemoryPlan:
    """Sizes and budget with the rings of this shape; OutOfBudget if the engine does not fit."""
    config, budget, block = shape.config, MemoryBudget(), BlockBytes.of(shape)
    _add_weights(budget, shape)
    _add_adapters(budget, shape, adapters)
    load_bytes = add_state(budget, shape, _counters(footprint))
    state_bytes = _add_state_checkpoints(budget, shape)
    _add_drafter(budget, shape)
    units, summed = _add_ranks(budget, shape, load_bytes)
    budget.add("workspace (estimate)", _workspace_bytes(shape, footprint), shape.where)
    graphs = _add_graphs(budget, shape, footprint)
    blocks = add_caches(budget, shape, block, room, calibration_tokens)
    _add_routes(budget, shape, blocks.pool)
    budget.check(room.on_host, shape.pinned)
    return MemoryPlan(
        device=shape.device,
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        activations=config.activations,
        max_seq_len=shape.max_seq_len,
        ladder=shape.ladder,
        prefill_ladder=shape.prefill_ladder,
        block_size=config.block_size,
        block_bytes=block.pool,
        table_blocks=shape.table_blocks,
        kv_blocks=blocks.pool,
        swap_blocks=blocks.swap,
        draft_lengths=config.draft_lengths,
        graphs=graphs,
        budget=budget,
        routed=shape.recorded,
        inner=shape.model.inner,
        rings=shape.rings,
        ring_bytes=sum(ring.blocks * block.of_ring(ring) for ring in shape.rings),
        recurrent=bool(recurrent_states(shape.model.states)),
        state_places=shape.state_places,
        state_bytes=state_bytes,
        load_bytes=load_bytes,
        push_units=units,
        summed_words=summed,
        adapters=adapters,
        footprint=footprint,
    )


def _counters(footprint: Footprint | None) -> int:
    """Arrival counters: a field has at least one element, even if no launch counts arrivals."""
    return _COUNTERS_OF_CPU if footprint is None else max(1, footprint.counters)


def _workspace_bytes(shape: EngineShape, footprint: Footprint | None) -> int:
    """Bytes of a step's intermediates.

    The recorded launches assume that ranks push their parts. Whether they can is known only once
    the ranks are connected, so this also leaves room for gathering the parts instead.
    """
    if footprint is None:
        return workspace_bytes(shape)
    return footprint.pool_bytes + exchanged_bytes(shape)


def _room(shape: EngineShape) -> FreeMemory:
    """The part of the free memory that may be planned. Ranks on one host share its memory."""
    of_host = shape.config.memory_fraction / shape.config.ranks
    fraction = shape.config.memory_fraction if shape.on_gpu else of_host
    return FreeMemory(
        int(available_bytes(shape.device) * fraction), int(available_host_bytes() * of_host)
    )


def _add_weights(budget: MemoryBudget, shape: EngineShape) -> None:
    """Add the model's weights, in a line for each format."""
    kinds = shape.weights.bytes_by_kind(shape.dtype)
    for kind, size in kinds.items():
        budget.add("weights" if len(kinds) == 1 else f"weights in {kind}", size, shape.where)


def _add_adapters(budget: MemoryBudget, shape: EngineShape, sizes: AdapterSizes | None) -> None:
    """Add the slots of adapters beside the weights."""
    if sizes is None:
        return
    linears = shape.weights.adaptable()
    table = AdapterTable(linears, sizes, torch.device("meta"), shape.dtype)
    name = f"adapters ({sizes.slots} of rank {sizes.rank} or less)"
    budget.add(name, table.nbytes, shape.where)


def _add_state_checkpoints(budget: MemoryBudget, shape: EngineShape) -> int:
    """Add the places for states of recurrent layers. Returns the bytes of one; 0 without places."""
    places = shape.state_places
    if not places:
        return 0
    size = checkpoint_bytes(shape.model.states, shape.dtype)
    name = f"states of recurrent layers ({places} of sessions and prefixes)"
    budget.add(name, places * size, shape.where)
    return size


def _add_drafter(budget: MemoryBudget, shape: EngineShape) -> None:
    """Add the drafter's weights: any drafter asked for has a line, even one without weights."""
    if shape.config.mode is not None:
        size = shape.drafter.weight_bytes(shape.dtype)
        budget.add("drafter's weights", size, shape.where)


def _add_ranks(budget: MemoryBudget, shape: EngineShape, load_bytes: int) -> tuple[int, int]:
    """Add the memory of communication between ranks. Returns `push_units` and `summed_words`."""
    ranks, units, summed = shape.config.ranks, 0, 0
    if ranks == 1:
        return units, summed
    if shape.on_gpu:
        if shape.config.pipeline_parallel > 1:
            budget.add("NCCL (estimate)", _NCCL_BYTES, shape.where)
        units, summed = _push_units(shape), _summed_words(shape)
        budget.add("parts of all ranks", PeerLayout.of(ranks, units, summed).nbytes, shape.where)
    link = LinkShape.of_loads(ranks - 1, load_bytes)
    budget.add(f"link to {ranks - 1} other rank{'s' * (ranks > 2)}", 8 * link.words, "host")
    return units, summed


def _summed_words(shape: EngineShape) -> int:
    """Words of the largest chunk's part, which tensor parallel ranks all-reduce; 0: none."""
    if shape.config.tensor_parallel == 1 or shape.config.pipeline_parallel > 1:
        return 0
    values = max(shape.prefill_ladder.sizes) * shape.model.hidden_size
    return -(-values * shape.dtype.itemsize // 4)


def _push_units(shape: EngineShape) -> int:
    """Units in which ranks on GPUs get each other's parts of a decode step; stages push none."""
    hidden = shape.model.hidden_size
    if shape.config.pipeline_parallel > 1:
        return 1
    units = push_units(MAX_LANES, hidden, torch.float32)
    if shape.config.data_parallel == 1:
        return units
    assert shape.weights.routed is not None, "ranks share experts"
    return max(units, _units_of_lanes(hidden, shape.dtype, shape.weights.routed.chosen))


def _units_of_lanes(hidden: int, dtype: torch.dtype, chosen: int) -> int:
    """Units in which all ranks receive a rank's lanes of a decode step, with their experts."""
    return lane_units(MAX_LANES, hidden, dtype, chosen, most_groups(hidden))


def _add_graphs(
    budget: MemoryBudget, shape: EngineShape, footprint: Footprint | None
) -> tuple[GraphKey, ...]:
    """Add the memory that captured graphs keep. Returns all graphs, in the order of capture."""
    graphs = graph_keys(
        shape.config,
        shape.ladder,
        shape.prefill_ladder,
        shape.config.draft_lengths,
    )
    size = 0 if footprint is None else footprint.graph_bytes
    budget.add("graphs (estimate)", size, shape.where)
    return graphs


def _add_routes(budget: MemoryBudget, shape: EngineShape, kv_blocks: int) -> None:
    """Add, if experts are recorded, the pages of requests and of kept blocks."""
    if shape.recorded is None:
        return
    tokens = (kv_blocks + shape.config.max_batch * shape.table_blocks) * shape.config.block_size
    name = "experts of tokens on the device and of requests (at most)"
    budget.add(name, tokens * shape.recorded.layers * shape.recorded.chosen * 2, "host")
