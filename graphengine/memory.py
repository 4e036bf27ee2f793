"""What an engine will hold, in bytes, decided before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from graphengine.buckets import BucketLadder, MemoryBudget, Where
from graphengine.config import EngineConfig
from graphengine.drafters import Drafter, FieldSizes
from graphengine.fields import field_table
from graphengine.kernels import (
    MAX_LANES,
    decode_attention_workspace_bytes,
    logprob_items,
    prefill_attention_workspace_bytes,
)
from graphengine.models.dense import (
    DenseConfig,
    allocate_weights,
    decode_shapes,
)
from graphengine.models.prefill import prefill_scratch_width
from graphengine.processing import PrefillKind, processing_fields
from graphengine.tuning import MAX_SPLITS

# What one captured node was seen to cost in the driver and in torch, rounded up.
_GRAPH_NODE_BYTES = 8 * 1024
_KERNELS_PER_LAYER = 12
# Each decode bucket is captured with two samplers.
_SAMPLERS = 2
# Memory that cuBLAS keeps for one handle and stream on Hopper.
_CUBLAS_WORKSPACE_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The sizes that follow from a model, an `EngineConfig` and the memory at hand.

    kv_blocks      pool blocks without the dummy; `table_blocks` of them serve one longest request
    swap_blocks    pinned host blocks
    draft_lengths  drafts that the decode graphs verify, ascending: (0,) of an engine that has none
    draft_rows     the largest bucket with a graph for each of them; larger ones verify none
    prefill_kinds  the prefill graphs of each token bucket
    graphs         how many are captured; with relaxed acceptance fewer
    """

    device: torch.device
    dtype: torch.dtype
    max_seq_len: int
    ladder: BucketLadder
    prefill_ladder: BucketLadder
    block_size: int
    table_blocks: int
    kv_blocks: int
    swap_blocks: int
    draft_lengths: tuple[int, ...]
    draft_rows: int
    prefill_kinds: tuple[PrefillKind, ...]
    graphs: int
    budget: MemoryBudget

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a row in the widest decode graph: one, and its drafts."""
        return 1 + self.draft_lengths[-1]

    @property
    def decode_shapes(self) -> list[tuple[int, int]]:
        """Rows and drafts of every decode graph, ascending."""
        return _decode_shapes(self.ladder, self.draft_lengths, self.draft_rows)


def available_bytes(device: torch.device) -> int:
    """Bytes that an allocation could get now: free device memory, or the host's MemAvailable."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def plan_memory(
    model: DenseConfig,
    config: EngineConfig,
    *,
    checkpoint_dtype: torch.dtype,
    drafter: Drafter | None = None,
) -> MemoryPlan:
    """Sizes and budget of an engine. OutOfBudget carries the table if they do not fit.

    `checkpoint_dtype` is used on a GPU where the config names no dtype; a CPU computes in float32.
    """
    device = torch.device(config.device)
    dtype = config.torch_dtype or (checkpoint_dtype if device.type == "cuda" else torch.float32)
    max_seq_len = config.sequence_limit(model.max_positions)
    ladder = BucketLadder(config.max_batch, config.buckets)
    longest_chunk = min(max_seq_len, config.max_prefill_tokens_per_step or max_seq_len)
    prefill_sizes = {min(size, longest_chunk) for size in config.prefill_buckets}
    prefill_ladder = BucketLadder(max(prefill_sizes), tuple(sorted(prefill_sizes)))
    table_blocks = -(-max_seq_len // config.block_size)
    block_elements = math.prod(model.kv_block_shape(config.block_size))
    block_bytes = model.num_layers * block_elements * dtype.itemsize
    draft_lengths = (0,) if drafter is None else tuple(sorted({0, drafter.length}))

    where: Where = "device" if device.type == "cuda" else "host"
    budget = MemoryBudget()
    budget.add("weights", allocate_weights(model, device="meta", dtype=dtype).nbytes, where)
    budget.add(
        "state and tables", _state_bytes(model, config, table_blocks, max_seq_len, drafter), where
    )
    options = processing_fields(
        config,
        vocab_size=model.vocab_size,
        max_seq_len=max_seq_len,
        width=1 + draft_lengths[-1],
    )
    budget.add("request options", sum(field.nbytes for field in options), where)
    reported = config.max_batch * (1 + draft_lengths[-1])
    if config.prompt_logprobs:
        reported += prefill_ladder.sizes[-1]
    # Of the entries of each mailbox, 64-bit items.
    logprob_bytes = 2 * (config.lookahead + 2) * reported * logprob_items(config.max_logprobs) * 8
    pinned: Where = "pinned" if device.type == "cuda" else "host"
    budget.add("log-probabilities", logprob_bytes, pinned)
    if drafter is not None:
        sizes = FieldSizes(config.max_batch, max_seq_len, prefill_ladder.sizes[-1], dtype)
        fields = drafter.fields(sizes)
        budget.add("drafter's weights", drafter.weight_bytes(dtype), where)
        budget.add("drafter's state", sum(field.nbytes for field in fields), where)
        block_bytes += math.prod(drafter.kv_block_shape(config.block_size)) * dtype.itemsize
    lanes = config.max_batch
    if drafter is not None:
        lanes = max(lanes, config.draft_rows * drafter.lanes_of_row)
    if config.prompt_logprobs:
        lanes = max(lanes, min(MAX_LANES, prefill_ladder.sizes[-1]))
    workspace = _workspace_bytes(model, lanes, prefill_ladder, dtype, max_seq_len)
    budget.add("workspace (estimate)", workspace, where)
    # A drafter may have a graph of its own beside each bucket's.
    own = drafter is not None and drafter.own_graph
    shapes = _decode_shapes(ladder, draft_lengths, config.draft_rows)
    kinds: tuple[PrefillKind, ...] = ("full", "fast")
    if config.prompt_logprobs:
        kinds = ("prompt", *kinds)
    # The last one is that which notes tokens.
    graphs = (_SAMPLERS + own) * len(shapes) + len(kinds) * len(prefill_ladder.sizes) + 1
    budget.add("graphs (estimate)", _graph_bytes(model, graphs, device), where)
    available = int(available_bytes(device) * config.memory_fraction)
    kv_blocks = config.kv_blocks
    if kv_blocks is None:
        fitting = (available - budget.total(where)) // block_bytes - 1
        kv_blocks = max(table_blocks, min(config.max_batch * table_blocks, fitting))
    kv_name = f"KV cache ({kv_blocks} blocks of {config.block_size} tokens, and a dummy)"
    budget.add(kv_name, (kv_blocks + 1) * block_bytes, where)
    budget.check(available, where)
    swap_blocks = config.swap_blocks
    if swap_blocks is None:
        swap_blocks = _swap_blocks(config, kv_blocks, table_blocks, block_bytes)
    budget.add(f"swap ({swap_blocks} blocks)", swap_blocks * block_bytes, pinned)
    host_bytes = available_bytes(torch.device("cpu"))
    budget.check(int(host_bytes * config.memory_fraction), pinned)
    return MemoryPlan(
        device=device,
        dtype=dtype,
        max_seq_len=max_seq_len,
        ladder=ladder,
        prefill_ladder=prefill_ladder,
        block_size=config.block_size,
        table_blocks=table_blocks,
        kv_blocks=kv_blocks,
        swap_blocks=swap_blocks,
        draft_lengths=draft_lengths,
        draft_rows=config.draft_rows,
        prefill_kinds=kinds,
        graphs=graphs,
        budget=budget,
    )


def _decode_shapes(
    ladder: BucketLadder, draft_lengths: tuple[int, ...], draft_rows: int
) -> list[tuple[int, int]]:
    return [
        (rows, drafts)
        for rows in ladder.sizes
        for drafts in draft_lengths
        if rows <= draft_rows or drafts == 0
    ]


def _swap_blocks(config: EngineConfig, kv_blocks: int, table_blocks: int, block_bytes: int) -> int:
    """What a short pool can need, every request but the oldest paused, within half the host."""
    if kv_blocks >= config.max_batch * table_blocks:
        return 0
    host_bytes = int(available_bytes(torch.device("cpu")) * config.memory_fraction / 2)
    return min((config.max_batch - 1) * table_blocks, host_bytes // block_bytes)


def _state_bytes(
    model: DenseConfig,
    config: EngineConfig,
    table_blocks: int,
    max_seq_len: int,
    drafter: Drafter | None,
) -> int:
    """Static buffers of the longest possible swap, and the RoPE tables."""
    fields = field_table(
        slots=config.max_batch,
        table_blocks=table_blocks,
        prefill_tokens=max(config.prefill_buckets),
        stop_ids=config.max_stop_ids,
        swap_pairs=config.max_batch * table_blocks,
        arrivals=1,
        drafts=0 if drafter is None else drafter.length,
    )
    return sum(field.nbytes for field in fields) + max_seq_len * model.head_dim * 4


def _workspace_bytes(
    model: DenseConfig,
    rows: int,
    prefill: BucketLadder,
    dtype: torch.dtype,
    max_seq_len: int,
) -> int:
    """Intermediates of the largest bucket: a layer's activations, attention partials, logits.

    `rows` are the lanes of the largest decode graph.

    And the float32 [splits, N, M] of one product at a time that splits K. Plans are chosen later,
    so it counts as the most that a table may ask for: 15 MB at 8 rows of an 8B model.
    """
    lanes = max(rows, prefill.sizes[-1])
    activations = dtype.itemsize * (model.hidden_size + prefill_scratch_width(model))
    partials = decode_attention_workspace_bytes(
        rows, num_heads=model.num_heads, head_dim=model.head_dim, max_seq_len=max_seq_len
    )
    partials = max(partials, prefill_attention_workspace_bytes(model.head_dim))
    # lm_head is never split.
    widest = max(M for kind, M, _ in decode_shapes(model).values() if kind != "sample")
    parts = 4 * MAX_SPLITS * rows * widest
    # Float32 logits, as they were and as they are processed, and the sampler's keys: of one size.
    sampling = 3 * 4 * rows * model.vocab_size
    return lanes * (4 * model.hidden_size + activations) + partials + parts + sampling


def _graph_bytes(model: DenseConfig, graphs: int, device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    nodes = (model.num_layers * _KERNELS_PER_LAYER + 12) * graphs
    return nodes * _GRAPH_NODE_BYTES + _CUBLAS_WORKSPACE_BYTES
