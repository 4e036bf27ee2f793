"""The memory of steps and their graphs, beyond what an engine holds.

On GPUs it follows from the list of the steps' launches (`footprint.py`). On a CPU, where references
run in place of kernels, it is estimated from the model's sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphengine.buckets import BucketLadder
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.prefill.lane_codes import code_bytes
from graphengine.models.contract import ModelConfig
from graphengine.models.plans.plan_limits import MAX_SPLITS
from graphengine.opening.engine_shape import EngineShape
from graphengine.opening.requirements import coded_linears

# Measured cost of one captured node in the driver and in torch, rounded up.
_GRAPH_NODE_BYTES = 8 * 1024
# Least number of columns whose squares one program sums, in a product of several lanes.
_LEAST_SUMMED = 16
# Memory that cuBLAS keeps for one handle and stream on Hopper.
_CUBLAS_WORKSPACE_BYTES = 32 * 2**20
# Bytes that torch's allocator takes beyond those in use at once: blocks from 1 to 10 MiB lie in
# segments of 20 MiB, and smaller ones in segments of 2 MiB, which both prefill and decode add.
_SEGMENT_BYTES = 24 * 2**20


class Footprint(NamedTuple):
    """Memory and nodes of an engine's steps, from the list of their launches.

    workspace  most bytes of a step's intermediates at the same time
    nodes      nodes of all graphs, at most
    counters   arrival counters that launches share: the most that any of them uses
    products   whether the BLAS computes some of their products
    """

    workspace: int
    nodes: int
    counters: int
    products: bool

    @property
    def pool_bytes(self) -> int:
        """Bytes that torch reserves for the intermediates of captured graphs."""
        return self.workspace + _SEGMENT_BYTES

    @property
    def graph_bytes(self) -> int:
        """Bytes that the driver, torch and the BLAS keep for all captured graphs."""
        blas = _CUBLAS_WORKSPACE_BYTES if self.products else 0
        return self.nodes * _GRAPH_NODE_BYTES + blas


def most_groups(hidden: int) -> int:
    """Most groups of sums of squares that a product can write with a stream of this width."""
    return -(-hidden // _LEAST_SUMMED)


UNLISTED = Footprint(0, 0, counters=2**24, products=False)
"""For listing an engine's launches without memory: more counters than any launch uses."""


def workspace_bytes(shape: EngineShape) -> int:
    """Bytes that the largest step takes on a CPU, including the ranks' exchanges."""
    needs, model, chunk = shape.drafter.needs, shape.model, shape.chunk
    lanes = _decode_lanes(shape)
    workspace = step_bytes(
        model,
        lanes,
        shape.prefill_ladder,
        shape.dtype,
        shape.max_seq_len,
        modules=needs.wants_hidden or needs.reads_streams or shape.recorded is not None,
        drafts=bool(needs.states),
        prompts=shape.config.packed_prompts if shape.config.prompts_per_prefill > 1 else None,
    )
    if shape.config.prompt_embeds and shape.config.mode is not None:
        # The embeddings of a chunk's tokens, in float32 and then as draft modules read them.
        workspace += chunk * (4 + shape.dtype.itemsize) * model.hidden_size
    if shape.recorded is not None:
        # The experts that a step chooses and those that it is given, as 32-bit ids.
        ids = shape.recorded.layers * shape.recorded.chosen
        workspace += 2 * 4 * max(lanes, chunk) * ids
    if shape.config.activations is not None:
        workspace += code_bytes(chunk, max(linear.columns for linear in coded_linears(model)))
    return workspace + _stage_bytes(shape, lanes) + exchanged_bytes(shape)


def _decode_lanes(shape: EngineShape) -> int:
    """Lanes of the largest decode graph, or of the part of a prompt whose logits are computed."""
    config = shape.config
    needs = shape.drafter.needs
    lanes = max(
        config.max_batch,
        config.draft_rows * needs.lanes_of_row,
        config.packed_prompts * needs.lanes_of_prompt,
    )
    if config.prompt_logprobs:
        lanes = max(lanes, min(MAX_LANES, shape.chunk))
    return lanes


def _stage_bytes(shape: EngineShape, lanes: int) -> int:
    """Bytes of the residual stream that a stage receives, and of the sent streams that the next
    stage has not taken yet.
    """
    if shape.config.pipeline_parallel == 1:
        return 0
    streams = 1 + shape.config.sends_in_flight
    return streams * 4 * max(lanes, shape.chunk) * shape.model.hidden_size


def exchanged_bytes(shape: EngineShape) -> int:
    """Bytes that the ranks of one stage receive from each other where they gather parts: on a CPU,
    and by NCCL on GPUs that cannot map each other's memory.
    """
    lanes = _decode_lanes(shape)
    shards = shape.config.ranks // shape.config.pipeline_parallel
    if shards == 1:
        return 0
    # The parts of all ranks, and their sum: of a decode product in float32, of a chunk in `dtype`.
    widest_step = max(4 * lanes, shape.dtype.itemsize * shape.chunk)
    # With experts, there is also the part of the shared experts.
    parts = shards + (1 if shape.weights.routed is None else 2)
    if shape.config.data_parallel > 1:
        # Lanes of all ranks, as they arrive and as experts read them, and sums for all, two ways.
        parts = 5 * shards
    # Logits as gathered from the ranks, and then joined.
    logits = 2 * 4 * lanes * shape.model.vocab_size
    return parts * widest_step * shape.model.hidden_size + logits


def step_bytes(
    model: ModelConfig,
    rows: int,
    prefill: BucketLadder,
    dtype: torch.dtype,
    max_seq_len: int,
    *,
    modules: bool = False,
    drafts: bool = False,
    prompts: int | None = None,
) -> int:
    """Bytes of intermediates of the largest bucket: a layer's activations, attention partials, what
    the kernels of a recurrent layer pass to each other, logits.

    rows     lanes of the largest decode graph
    modules  whether there are draft modules: while a module computes, the target's hidden states of
             a chunk are kept, alone and concatenated with the embeddings
    drafts   whether a head drafts, and not n-grams or the caller
    prompts  prompts whose chunks a prefill takes; None: it takes one chunk

    It includes the float32 [splits, N, M] of one split-K product at a time. Plans are chosen later,
    so it counts the most that a table may ask for: 15 MB at 8 rows of an 8B model.
    """
    lanes = max(rows, prefill.sizes[-1])
    hidden = model.hidden_size * (4 if modules else 1)
    activations = dtype.itemsize * (hidden + model.prefill_width)
    partials = model.attention_bytes(rows, max_seq_len)
    # lm_head is never split.
    widest = max(linear.rows for linear in model.linears.values() if linear.kind != "sample")
    parts = 4 * MAX_SPLITS * rows * widest
    # Float32 logits, raw and processed, and the sampler's keys: all of one size. The logits of
    # drafts have that size, too, and exist while the target's are kept.
    sampling = (5 if drafts else 3) * 4 * rows * model.vocab_size
    scan = model.scan_bytes(prefill.sizes[-1], prompts)
    return lanes * (4 * model.hidden_size + activations) + partials + parts + scan + sampling
