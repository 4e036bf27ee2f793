"""What an engine will hold, in bytes, decided before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphengine.buckets import BucketLadder, MemoryBudget, Where
from graphengine.config import EngineConfig
from graphengine.models.dense import DenseConfig, allocate_weights

# What one captured node was seen to cost in the driver and in torch, rounded up.
_GRAPH_NODE_BYTES = 8 * 1024
_KERNELS_PER_LAYER = 14
# Memory that cuBLAS keeps for one handle and stream on Hopper.
_CUBLAS_WORKSPACE_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The sizes that follow from a model, an `EngineConfig` and the memory at hand.

    kv_blocks    pool blocks without the dummy; `table_blocks` of them serve one longest request
    swap_blocks  pinned host blocks
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
    budget: MemoryBudget


def available_bytes(device: torch.device) -> int:
    """Bytes that an allocation could get now: free device memory, or the host's MemAvailable."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def plan_memory(
    model: DenseConfig, config: EngineConfig, *, checkpoint_dtype: torch.dtype
) -> MemoryPlan:
    """Sizes and budget of an engine. OutOfBudget carries the table if they do not fit.

    `checkpoint_dtype` is used on a GPU where the config names no dtype; a CPU computes in float32.
    """
    device = torch.device(config.device)
    dtype = config.torch_dtype or (checkpoint_dtype if device.type == "cuda" else torch.float32)
    max_seq_len = _max_seq_len(model, config)
    ladder = BucketLadder(config.max_batch, config.buckets)
    prefill_sizes = {min(size, max_seq_len) for size in config.prefill_buckets}
    prefill_ladder = BucketLadder(max(prefill_sizes), tuple(sorted(prefill_sizes)))
    table_blocks = -(-max_seq_len // config.block_size)
    block_bytes = (
        model.num_layers * 2 * config.block_size * model.kv_size * torch.empty((), dtype=dtype).itemsize
    )

    where: Where = "device" if device.type == "cuda" else "host"
    budget = MemoryBudget()
    budget.add("weights", allocate_weights(model, device="meta", dtype=dtype).nbytes, where)
    budget.add("workspace (estimate)", _workspace(model, ladder, prefill_ladder, dtype), where)
    budget.add("graphs (estimate)", _graph_bytes(model, ladder, prefill_ladder, device), where)
    available = int(available_bytes(device) * config.memory_fraction)
    left = available - budget.total(where)
    kv_blocks = config.kv_blocks
    if kv_blocks is None:
        fitting = min(config.max_batch * table_blocks, left // block_bytes - 1)
        kv_blocks = max(fitting, table_blocks)
    budget.add(
        f"KV cache ({kv_blocks} blocks of {config.block_size} tokens, and a dummy)",
        (kv_blocks + 1) * block_bytes,
        where,
    )
    budget.check(available, where)
    swap_blocks = config.swap_blocks
    if swap_blocks is None:
        short = kv_blocks < config.max_batch * table_blocks
        swap_blocks = (config.max_batch - 1) * table_blocks if short else 0
        if device.type == "cuda":
            host = int(available_bytes(torch.device("cpu")) * config.memory_fraction / 2)
            swap_blocks = min(swap_blocks, host // block_bytes)
    swap_where: Where = "pinned" if device.type == "cuda" else "host"
    budget.add(f"swap ({swap_blocks} blocks)", swap_blocks * block_bytes, swap_where)
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
        budget=budget,
    )


def _max_seq_len(model: DenseConfig, config: EngineConfig) -> int:
    if config.max_seq_len is None:
        return min(model.max_positions, 4096)
    if config.max_seq_len > model.max_positions:
        raise ValueError(
            f"max_seq_len={config.max_seq_len} exceeds the model's "
            f"max_position_embeddings={model.max_positions}"
        )
    return config.max_seq_len


def _workspace(
    model: DenseConfig, ladder: BucketLadder, prefill: BucketLadder, dtype: torch.dtype
) -> int:
    """Intermediates of the largest prefill bucket or the largest decode bucket, whichever is more."""
    itemsize = torch.empty((), dtype=dtype).itemsize
    qkv = model.q_size + 2 * model.kv_size
    lane = 4 * model.hidden_size + itemsize * (
        2 * model.hidden_size + qkv + 2 * model.q_size + 3 * model.ffn_size
    )
    rows = ladder.sizes[-1]
    return max(prefill.sizes[-1] * lane, rows * lane) + rows * model.vocab_size * 4


def _graph_bytes(
    model: DenseConfig, ladder: BucketLadder, prefill: BucketLadder, device: torch.device
) -> int:
    if device.type == "cpu":
        return 0
    nodes = (model.num_layers * _KERNELS_PER_LAYER + 12) * (len(ladder.sizes) + len(prefill.sizes))
    return nodes * _GRAPH_NODE_BYTES + _CUBLAS_WORKSPACE_BYTES
