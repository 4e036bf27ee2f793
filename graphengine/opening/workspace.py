"""What steps and their graphs take beside what an engine holds, estimated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphengine.buckets import BucketLadder
from graphengine.kernels import MAX_LANES, code_bytes
from graphengine.models.contract import ModelConfig
from graphengine.models.plan_limits import MAX_SPLITS
from graphengine.opening.engine_shape import EngineShape
from graphengine.opening.requirements import coded_linears
from graphengine.program.graph_key import GraphKey

# What one captured node was seen to cost in the driver and in torch, rounded up.
_GRAPH_NODE_BYTES = 8 * 1024
_KERNELS_PER_LAYER = 12
# For the log-probabilities of as many prompt tokens as one product of logits takes.
_KERNELS_PER_PROMPT_PART = 8
# Memory that cuBLAS keeps for one handle and stream on Hopper.
_CUBLAS_WORKSPACE_BYTES = 32 * 2**20


def workspace_bytes(shape: EngineShape) -> int:
    """What the largest step takes while it runs, and what ranks leave to each other in it."""
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
    )
    if shape.config.prompt_embeds and shape.config.mode is not None:
        # The embeddings of a chunk's tokens as modules read them, in float32 before.
        workspace += chunk * (4 + shape.dtype.itemsize) * model.hidden_size
    if shape.recorded is not None:
        # What a step takes and what it is given, as 32-bit ids.
        ids = shape.recorded.layers * shape.recorded.chosen
        workspace += 2 * 4 * max(lanes, chunk) * ids
    if shape.config.activations is not None:
        workspace += code_bytes(chunk, max(linear.columns for linear in coded_linears(model)))
    return workspace + _stage_bytes(shape, lanes) + _shard_bytes(shape, lanes)


def _decode_lanes(shape: EngineShape) -> int:
    """Lanes of the largest decode graph, or of a part of a prompt whose logits are computed."""
    config = shape.config
    lanes = max(config.max_batch, config.draft_rows * shape.drafter.needs.lanes_of_row)
    if config.prompt_logprobs:
        lanes = max(lanes, min(MAX_LANES, shape.chunk))
    return lanes


def _stage_bytes(shape: EngineShape, lanes: int) -> int:
    """The streams that come to a stage, and those that wait until the stage after takes them."""
    if shape.config.pipeline_parallel == 1:
        return 0
    streams = 1 + shape.config.mailbox_entries
    return streams * 4 * max(lanes, shape.chunk) * shape.model.hidden_size


def _shard_bytes(shape: EngineShape, lanes: int) -> int:
    """What the ranks of one stage get of each other."""
    shards = shape.config.ranks // shape.config.pipeline_parallel
    if shards == 1:
        return 0
    # The parts of all ranks, and their sum: of a product in float32, or in `dtype` of a chunk.
    widest_step = max(4 * lanes, shape.dtype.itemsize * shape.chunk)
    # Experts have shared ones' part beside their own.
    parts = shards + (1 if shape.weights.routed is None else 2)
    if shape.config.data_parallel > 1:
        # Lanes of all ranks, as they come and as experts read them, and sums for all, two ways.
        parts = 5 * shards
    # Logits of ranks side by side, and put together.
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


def graph_bytes(model: ModelConfig, graphs: Sequence[GraphKey], device: torch.device) -> int:
    """What the driver and torch keep of all captured graphs."""
    if device.type == "cpu":
        return 0
    nodes = (model.num_layers * _KERNELS_PER_LAYER + 12) * len(graphs)
    parts = sum(-(-key.size // MAX_LANES) for key in graphs if key.variant == "prompt")
    nodes += _KERNELS_PER_PROMPT_PART * parts
    return nodes * _GRAPH_NODE_BYTES + _CUBLAS_WORKSPACE_BYTES
