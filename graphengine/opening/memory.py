"""What an engine will hold, in bytes, decided before anything is allocated."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphengine.buckets import (
    BucketLadder,
    MemoryBudget,
    OutOfBudget,
    Where,
    buffer_bytes,
    field_groups,
    format_bytes,
)
from graphengine.config import EngineConfig
from graphengine.drafters import Drafter, FieldSizes
from graphengine.host.rings import WindowRing
from graphengine.kernels import (
    FP8_KV,
    MAX_LANES,
    ActivationKind,
    code_bytes,
    item_bytes,
    lane_units,
    push_units,
)
from graphengine.models.contract import ModelConfig, most_arrival_counters
from graphengine.models.plan_limits import MAX_SPLITS
from graphengine.models.states import (
    cache_shape,
    kept_bytes,
    kv_scale_bytes,
    recurrent_states,
)
from graphengine.models.weights import RoutedExperts
from graphengine.opening.host_memory import available_host_bytes
from graphengine.opening.inventory import (
    LinkShape,
    graph_keys,
    mailboxes,
    prefill_ladder,
    window_rings,
)
from graphengine.opening.requirements import (
    check_coded,
    check_fp8,
    check_fp8_states,
    check_packed,
    coded_linears,
    recorded_experts,
)
from graphengine.prefill_cut import PrefillCut
from graphengine.program.fields import EMBEDS_FIELD, engine_fields
from graphengine.program.graph_key import GraphKey
from graphengine.requests.processing import processing_fields

# What one captured node was seen to cost in the driver and in torch, rounded up.
_GRAPH_NODE_BYTES = 8 * 1024
_KERNELS_PER_LAYER = 12
# For the log-probabilities of as many prompt tokens as one product of logits takes.
_KERNELS_PER_PROMPT_PART = 8
# Memory that cuBLAS keeps for one handle and stream on Hopper.
_CUBLAS_WORKSPACE_BYTES = 32 * 2**20
# Channels and buffers of a group of one host, rounded up.
_NCCL_BYTES = 512 * 2**20
# Columns whose squares a program sums, at least, of a product of several lanes.
_LEAST_SUMMED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The sizes that follow from a model, an `EngineConfig` and the memory at hand.

    dtype          of weights and activations; `kv_dtype` of the caches
    activations    what prefill rounds the inputs of linears to that take it; None: nothing
    block_bytes    of one block of the pool in all caches, the target's and the drafter's; 0 where
                   all KV is in rings
    kv_blocks      pool blocks without the dummy; `table_blocks` of them serve one longest request
    rings          how layers with a window keep the newest tokens alone; their KV is not in the
                   pool. Each slot has a ring of each
    ring_bytes     of a slot's rings
    swap_blocks    pinned host blocks
    draft_lengths  drafts that the decode graphs verify, ascending: (0,) of an engine that has none
    graphs         all that are captured, in that order
    routed         the model's experts, where they are recorded
    recurrent      whether some layer of the model, or of any of its stages, recurs
    state_places   points at which states of recurrent layers are kept; `state_bytes` of each
    load_bytes     of the largest copy of what the host owns
    push_units     of memory in which ranks on GPUs get each other's parts: those of a decode step,
                   in float32; stages have none. 0 where there are no ranks
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
    rings: tuple[WindowRing, ...] = ()
    ring_bytes: int = 0
    recurrent: bool = False
    state_places: int = 0
    state_bytes: int = 0
    load_bytes: int = 0
    push_units: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a row in the widest decode graph: one, and its drafts."""
        return 1 + self.draft_lengths[-1]

    def describe_dtypes(self) -> str:
        """Of weights, of KV where it has one of its own, and of what prefill rounds."""
        weights, kv = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_dtype))
        described = weights if kv == weights else f"{weights}, KV {kv}"
        return described if self.activations is None else f"{described}, prefill {self.activations}"

    @property
    def whole_requests(self) -> int:
        """Slots whose requests of `max_seq_len` tokens the pool holds at the same time."""
        return min(self.ladder.max_batch, self.kv_blocks // self.table_blocks)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of so many tokens in the caches of the pool."""
        return tokens * self.block_bytes // self.block_size

    def describe_kv(self) -> str:
        """What tokens cost in the caches, and how many of them the pool holds, for a reader."""
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
    """Bytes that an allocation could get now: free device memory, or what the host and the
    limits of containers leave.
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
) -> MemoryPlan:
    """Sizes and budget of an engine, as `_plan` has it, with rings where they are smaller.

    The pool is shared by all slots, and may have less than each could need; each slot has its own
    ring. So layers get rings if these have no more blocks than the pool would have for them.
    """

    def plan(rings: tuple[WindowRing, ...]) -> MemoryPlan:
        return _plan(
            model,
            config,
            rings,
            checkpoint_dtype=checkpoint_dtype,
            drafter=drafter,
            calibration_tokens=calibration_tokens,
        )

    rings = window_rings(model, config, drafter.needs.length)
    try:
        whole = plan(())
    except OutOfBudget:
        if not rings:
            raise
        return plan(rings)
    rings = tuple(ring for ring in rings if config.max_batch * ring.blocks <= whole.kv_blocks)
    return plan(rings) if rings else whole


def _plan(
    model: ModelConfig,
    config: EngineConfig,
    rings: tuple[WindowRing, ...],
    *,
    checkpoint_dtype: torch.dtype,
    drafter: Drafter,
    calibration_tokens: int,
) -> MemoryPlan:
    """Sizes and budget with these rings. OutOfBudget carries the table if they do not fit.

    ValueError for prefix caching of a model whose recurrent layers need every token, and for an
    fp8 KV cache on a GPU that cannot convert it. Also for packed weights that the kernels of a GPU
    do not take in this dtype, or not with so many columns, and for fp8 activations where no linear
    takes them.

    checkpoint_dtype    used on a GPU where the config names no dtype; a CPU computes in float32
    calibration_tokens  of `kv_calibration`: their KV is in `dtype`, and freed before the caches are
                        allocated, so the budget has a line for what it takes beyond these
    """
    recurrent = recurrent_states(model.states)
    state_places = 0
    # A draft model's own states are kept for nobody.
    if recurrent and not rings and not recurrent_states(drafter.needs.states):
        state_places = config.session_states
    if config.prefix_caching and recurrent and not state_places:
        raise ValueError(
            f"prefix_caching=True, but a {model.architecture} has {len(recurrent)} recurrent "
            f"states, which follow from every token of a prompt, and none are kept: that needs "
            f"session_states above 0, and a drafter without such states"
        )
    device = torch.device(config.device)
    dtype = config.torch_dtype or (checkpoint_dtype if device.type == "cuda" else torch.float32)
    kv_dtype = FP8_KV if config.kv_dtype == "fp8" else dtype
    if kv_dtype == FP8_KV:
        check_fp8(device)
        check_fp8_states(model.architecture, (*model.states, *drafter.needs.states))
    check_packed(model, device, dtype)
    if config.activations is not None:
        check_coded(model, config.activations, dtype)
    max_seq_len = config.sequence_limit(model.max_positions)
    ladder = BucketLadder(config.max_batch, config.buckets)
    chunks = prefill_ladder(config, max_seq_len)
    if config.prefill_cut is not None:
        PrefillCut(config.prefill_cut).check_sizes(chunks.sizes)
    table_blocks = -(-max_seq_len // config.block_size)
    layers, *block = cache_shape(model.states, config.block_size)
    layer_bytes = math.prod(block) * kv_dtype.itemsize
    own_block_bytes = (layers - sum(len(ring.layers) for ring in rings)) * layer_bytes
    needs = drafter.needs
    drafter_block = math.prod(needs.kv_block_shape(config.block_size)) * kv_dtype.itemsize
    block_bytes = own_block_bytes + drafter_block
    draft_lengths = config.draft_lengths

    on_gpu = device.type == "cuda"
    where: Where = "device" if on_gpu else "host"
    pinned: Where = "pinned" if on_gpu else "host"
    budget = MemoryBudget()
    weights = model.allocate(device="meta", dtype=dtype)
    routed = recorded_experts(model, config, weights.routed)
    kinds = weights.bytes_by_kind(dtype)
    for kind, size in kinds.items():
        budget.add("weights" if len(kinds) == 1 else f"weights in {kind}", size, where)
    sizes = FieldSizes(config.max_batch, max_seq_len, chunks.sizes[-1], dtype)
    load_bytes = _add_state(
        budget, model, config, drafter, sizes, table_blocks, on_gpu, routed, rings
    )
    state_bytes = kept_bytes(model.states, dtype)
    if state_places:
        name = f"states of recurrent layers ({state_places} of sessions and prefixes)"
        budget.add(name, state_places * state_bytes, where)
    if config.mode is not None:
        # What was asked for has its lines, also where it holds nothing.
        budget.add("drafter's weights", drafter.weight_bytes(dtype), where)
    lanes = max(config.max_batch, config.draft_rows * needs.lanes_of_row)
    if config.prompt_logprobs:
        lanes = max(lanes, min(MAX_LANES, chunks.sizes[-1]))
    workspace = _workspace_bytes(
        model,
        lanes,
        chunks,
        dtype,
        max_seq_len,
        modules=needs.wants_hidden or needs.reads_streams or routed is not None,
        drafts=bool(needs.states),
    )
    if config.prompt_embeds and config.mode is not None:
        # The embeddings of a chunk's tokens as modules read them, in float32 before.
        workspace += chunks.sizes[-1] * (4 + dtype.itemsize) * model.hidden_size
    if routed is not None:
        # What a step takes and what it is given, as 32-bit ids.
        widest_step = max(lanes, chunks.sizes[-1])
        workspace += 2 * 4 * widest_step * routed.layers * routed.chosen
    ranks, shards = config.ranks, config.ranks // config.pipeline_parallel
    units = 0
    if config.pipeline_parallel > 1:
        # The streams that come, and those that wait until the stage after takes them.
        streams = 1 + config.mailbox_entries
        workspace += streams * 4 * max(lanes, chunks.sizes[-1]) * model.hidden_size
    if shards > 1:
        # The parts of all ranks, and their sum: of a product in float32, or in `dtype` of a chunk.
        widest_step = max(4 * lanes, dtype.itemsize * chunks.sizes[-1])
        # Experts have shared ones' part beside their own.
        parts = shards + (1 if weights.routed is None else 2)
        if config.data_parallel > 1:
            # Lanes of all ranks, as they come and as experts read them, and sums for all, two ways.
            parts = 5 * shards
        workspace += parts * widest_step * model.hidden_size
        # Logits of ranks side by side, and put together.
        workspace += 2 * 4 * lanes * model.vocab_size
    if ranks > 1:
        if on_gpu:
            budget.add("NCCL (estimate)", _NCCL_BYTES, where)
            units = 1
            if config.pipeline_parallel == 1:
                units = push_units(MAX_LANES, model.hidden_size, torch.float32)
            if config.data_parallel > 1:
                assert weights.routed is not None, "ranks share experts"
                chosen = weights.routed.chosen
                units = max(units, _units_of_lanes(model.hidden_size, dtype, chosen))
            budget.add("parts of all ranks", item_bytes(ranks, units), where)
        link = LinkShape.of_loads(ranks - 1, load_bytes)
        budget.add(f"link to {ranks - 1} other rank{'s' * (ranks > 2)}", 8 * link.words, "host")
    if config.activations is not None:
        widest = max(linear.columns for linear in coded_linears(model))
        workspace += code_bytes(chunks.sizes[-1], widest)
    budget.add("workspace (estimate)", workspace, where)
    graphs = graph_keys(config, ladder, chunks, draft_lengths, own_graph=needs.own_graph)
    budget.add("graphs (estimate)", _graph_bytes(model, graphs, device), where)
    # Ranks share what the host has.
    of_host = config.memory_fraction / ranks
    available = int(available_bytes(device) * (config.memory_fraction if on_gpu else of_host))
    kind = "fp8 blocks" if kv_dtype == FP8_KV else "blocks"
    in_rings = 0
    for ring in rings:
        name = f"KV of window {ring.window} ({config.max_batch} rings of {ring.blocks} {kind}"
        size = (config.max_batch * ring.blocks + 1) * len(ring.layers) * layer_bytes
        budget.add(f"{name} of {config.block_size} tokens, and a dummy)", size, where)
        in_rings += size
    kv_blocks = config.kv_blocks
    left = available - budget.total(where)
    if not block_bytes:
        # Its blocks are only counted.
        kv_blocks = config.max_batch * table_blocks
    elif kv_blocks is None:
        fitting = left // block_bytes - 1
        kv_blocks = max(table_blocks, min(config.max_batch * table_blocks, fitting))
    if block_bytes:
        kv_name = f"KV cache ({kv_blocks} {kind} of {config.block_size} tokens, and a dummy)"
        budget.add(kv_name, (kv_blocks + 1) * block_bytes, where)
    if config.kv_blocks is None and block_bytes:
        _check_one_request(config, max_seq_len, block_bytes, left, budget, where)
    budget.check(available, where)
    areas = [own_block_bytes, drafter_block]
    on_host = int(available_host_bytes() * of_host)
    swap_blocks = config.swap_blocks
    if swap_blocks is None:
        most = min(on_host // 2, on_host - budget.total(pinned))
        swap_blocks = _swap_blocks(config, kv_blocks, table_blocks, areas, most, on_gpu)
    swap_bytes = _swap_bytes(swap_blocks, areas, on_gpu)
    budget.add(f"swap ({swap_blocks} blocks)", swap_bytes, pinned)
    if calibration_tokens:
        blocks = 1 + calibration_blocks(calibration_tokens, config.block_size)
        # Without rings.
        whole_bytes = layers * layer_bytes + drafter_block
        then = blocks * whole_bytes * dtype.itemsize // kv_dtype.itemsize
        later = (kv_blocks + 1) * block_bytes + in_rings + (0 if on_gpu else swap_bytes)
        name = f"calibration (KV of {calibration_tokens} tokens in {dtype}, beyond the caches)"
        budget.add(name.replace("torch.", ""), max(0, then - later), where)
        budget.check(available, where)
    if routed is not None:
        # Pages of requests, and those of kept blocks.
        tokens = (kv_blocks + config.max_batch * table_blocks) * config.block_size
        name = "experts of tokens on the device and of requests (at most)"
        budget.add(name, tokens * routed.layers * routed.chosen * 2, "host")
    budget.check(on_host, pinned)
    return MemoryPlan(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        activations=config.activations,
        max_seq_len=max_seq_len,
        ladder=ladder,
        prefill_ladder=chunks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        table_blocks=table_blocks,
        kv_blocks=kv_blocks,
        swap_blocks=swap_blocks,
        draft_lengths=draft_lengths,
        graphs=graphs,
        budget=budget,
        routed=routed,
        rings=rings,
        recurrent=bool(recurrent),
        state_places=state_places,
        state_bytes=state_bytes if state_places else 0,
        load_bytes=load_bytes,
        push_units=units,
        ring_bytes=sum(ring.blocks * len(ring.layers) for ring in rings) * layer_bytes,
    )


def _units_of_lanes(hidden: int, dtype: torch.dtype, chosen: int) -> int:
    """Units in which a rank's lanes of a decode step, with their experts, come to all ranks."""
    return lane_units(MAX_LANES, hidden, dtype, chosen, -(-hidden // _LEAST_SUMMED))


def calibration_blocks(tokens: int, block_size: int) -> int:
    """Blocks, without the dummy, of the cache that a prompt of so many tokens is calibrated in."""
    return -(-tokens // block_size)


def _check_one_request(
    config: EngineConfig,
    max_seq_len: int,
    block_bytes: int,
    left: int,
    budget: MemoryBudget,
    where: Where,
) -> None:
    """OutOfBudget, with the numbers, if the `left` bytes hold no request of `max_seq_len` tokens.

    It is another error if there is nothing left for KV at all.
    """
    size = config.block_size
    blocks, fitting = -(-max_seq_len // size), left // block_bytes - 1
    if left < 0 or fitting >= blocks:
        return
    one, every = blocks * block_bytes, config.max_batch * blocks * block_bytes
    hint = f"; max_seq_len={fitting * size} fits" if fitting > 0 else ""
    raise OutOfBudget(
        f"max_seq_len={max_seq_len}: the KV of one request needs {blocks} blocks of {size} tokens, "
        f"{format_bytes(one)} ({_per_1000_tokens(block_bytes, size)}), of max_batch="
        f"{config.max_batch} requests {format_bytes(every)}; beside the rest {format_bytes(left)} "
        f"of {where} memory are left for KV{hint}\n{budget.table()}"
    )


def _per_1000_tokens(block_bytes: int, block_size: int) -> str:
    return f"{format_bytes(1000 * block_bytes // block_size)} per 1,000 tokens"


def _swap_blocks(
    config: EngineConfig,
    kv_blocks: int,
    table_blocks: int,
    areas: list[int],
    most: int,
    on_gpu: bool,
) -> int:
    """What a short pool can need, every request but the oldest paused, within `most` bytes,
    which is half of what may be planned there.
    """
    if kv_blocks >= config.max_batch * table_blocks:
        return 0
    needed = range(1, (config.max_batch - 1) * table_blocks + 1)
    return bisect_right(needed, most, key=lambda blocks: _swap_bytes(blocks, areas, on_gpu))


def _swap_bytes(blocks: int, areas: list[int], on_gpu: bool) -> int:
    """Of the areas, each an allocation with so many bytes a block."""
    return sum(_host_bytes(blocks * area, on_gpu) for area in areas)


def _host_bytes(size: int, pinned: bool) -> int:
    """What an allocation on the host takes: torch rounds pinned ones up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size


def _add_state(
    budget: MemoryBudget,
    model: ModelConfig,
    config: EngineConfig,
    drafter: Drafter,
    sizes: FieldSizes,
    table_blocks: int,
    on_gpu: bool,
    routed: RoutedExperts | None,
    of_windows: tuple[WindowRing, ...],
) -> int:
    """What `allocate` makes beside weights and caches, up to the longest possible swap.

    Returns the bytes of the largest copy of what the host owns.
    """
    where: Where = "device" if on_gpu else "host"
    pinned: Where = "pinned" if on_gpu else "host"
    length = drafter.needs.length
    swap_pairs = config.max_batch * table_blocks
    if config.swap_blocks is not None:
        swap_pairs = max(1, min(swap_pairs, config.swap_blocks))
    lanes = max(config.lanes, 2 * config.max_batch)
    widest = max(lanes, config.max_batch * drafter.needs.lanes_of_row)
    arrivals = max(
        most_arrival_counters(model, model.linears, lanes), drafter.arrivals_at_most(widest)
    )
    tables = model.table_bytes(sizes.max_seq_len) + drafter.table_bytes(sizes.max_seq_len)
    tables += kv_scale_bytes(model.states) + kv_scale_bytes(drafter.needs.states)
    relaxed = config.relaxed_acceptance
    if relaxed is not None:
        tables += 4 * (len(relaxed.begin_token_ids) + len(relaxed.end_token_ids))
    fields = engine_fields(
        config,
        drafter,
        sizes,
        states=model.states,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        table_blocks=table_blocks,
        rings=of_windows,
        swap_pairs=swap_pairs,
        arrivals=arrivals,
    )
    on_device, _ = buffer_bytes(fields)
    options = processing_fields(
        config, vocab_size=model.vocab_size, max_seq_len=sizes.max_seq_len, width=1 + length
    )
    apart = {"request options": sum(field.nbytes for field in options)}
    if config.mode is not None:
        apart["drafter's state"] = sum(field.nbytes for field in drafter.fields(sizes))
    if config.prompt_embeds:
        apart["prompt embeddings"] = next(
            field.nbytes for field in fields if field.name == EMBEDS_FIELD
        )
    budget.add("state and tables", on_device - sum(apart.values()) + tables, where)
    for name, size in apart.items():
        budget.add(name, size, where)
    # Each group is an allocation; its image lies in ordinary memory.
    groups = [buffer_bytes(group)[1] for group in field_groups(fields)]
    staged = sum(_host_bytes(size, on_gpu) for size in groups)
    budget.add("staging", config.staging_blocks * staged, pinned)
    masks = config.max_batch * (1 + length) * -(-model.vocab_size // 32) * 4
    budget.add("images of what the host owns", sum(groups) + masks, "host")
    rings = mailboxes(
        config,
        tokens_per_step=1 + length,
        prefill_tokens=sizes.prefill_tokens,
        routed=routed,
    )
    # With the table of drafts that the masks of a grammar follow.
    held = [rings.tokens.nbytes, 4 * config.max_batch * length]
    budget.add("mailbox", sum(_host_bytes(size, on_gpu) for size in held), pinned)
    reported = [ring.nbytes for ring in (rings.logprobs, rings.prompt_logprobs) if ring]
    logprob_bytes = sum(_host_bytes(size, on_gpu) for size in reported)
    budget.add("log-probabilities", logprob_bytes, pinned)
    if routed is not None:
        ids = routed.layers * routed.chosen
        published = [ring.nbytes for ring in (rings.routes, rings.prompt_routes) if ring]
        route_bytes = sum(_host_bytes(size, on_gpu) for size in published)
        budget.add("experts of tokens", route_bytes, pinned)
        table = 2 * config.max_batch * sizes.max_seq_len * ids
        budget.add("experts that requests replay", _host_bytes(table, on_gpu), pinned)
    others = config.data_parallel - 1
    if others:
        # Of each the driver has what the host owns, staged, too, and what requests replay.
        copies = (2 + config.staging_blocks) * sum(groups) + masks
        copies += 0 if routed is None else table
        budget.add(f"fields of {others} other rank{'s' * (others > 1)}", others * copies, "host")
    return max(groups)


def _workspace_bytes(
    model: ModelConfig,
    rows: int,
    prefill: BucketLadder,
    dtype: torch.dtype,
    max_seq_len: int,
    *,
    modules: bool = False,
    drafts: bool = False,
) -> int:
    """Intermediates of the largest bucket: a layer's activations, attention partials, what the
    kernels of a recurrent layer leave to each other, logits.

    `rows` are the lanes of the largest decode graph. With draft `modules` the target's hidden
    states of a chunk are kept, and those with the embeddings beside them, while a module computes.
    `drafts`: by a head, not by n-grams or the caller.

    And the float32 [splits, N, M] of one product at a time that splits K. Plans are chosen later,
    so it counts as the most that a table may ask for: 15 MB at 8 rows of an 8B model.
    """
    lanes = max(rows, prefill.sizes[-1])
    hidden = model.hidden_size * (4 if modules else 1)
    activations = dtype.itemsize * (hidden + model.prefill_width)
    partials = model.attention_bytes(rows, max_seq_len)
    # lm_head is never split.
    widest = max(linear.rows for linear in model.linears.values() if linear.kind != "sample")
    parts = 4 * MAX_SPLITS * rows * widest
    # Float32 logits, as they were and as they are processed, and the sampler's keys: of one size.
    # So are the logits of drafts, as those of the target's tokens, while the target's are kept.
    sampling = (5 if drafts else 3) * 4 * rows * model.vocab_size
    scan = model.scan_bytes(prefill.sizes[-1])
    return lanes * (4 * model.hidden_size + activations) + partials + parts + scan + sampling


def _graph_bytes(model: ModelConfig, graphs: Sequence[GraphKey], device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    nodes = (model.num_layers * _KERNELS_PER_LAYER + 12) * len(graphs)
    parts = sum(-(-key.size // MAX_LANES) for key in graphs if key.variant == "prompt")
    nodes += _KERNELS_PER_PROMPT_PART * parts
    return nodes * _GRAPH_NODE_BYTES + _CUBLAS_WORKSPACE_BYTES
