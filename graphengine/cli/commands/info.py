"""`graphengine info`: the memory and graphs that an engine would allocate and capture."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from graphengine.cli.given import read_engine_options
from graphengine.cli.terminal import columns, fit
from graphengine.config import EngineConfig
from graphengine.core.chunk_times import longest_prompt
from graphengine.models.contract import ModelWeights
from graphengine.models.inner.drawn import FrameCoder
from graphengine.models.launches import Share
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.loading import plan_checkpoint, read_checkpoint
from graphengine.opening.sampling_defaults import recommended_sampling
from graphengine.options.prefill_cut import PrefillCut
from graphengine.parallel.pipelining import plan_stages
from graphengine.speculative import describe


def _frame(inner: FrameCoder | None) -> dict[str, Any]:
    """The numbers of codes of a frame and of a codebook; empty for models that emit tokens."""
    return {} if inner is None else {"frame_codes": inner.steps, "codebook": inner.codes}


def info(options: argparse.Namespace) -> None:
    """Show the memory and graphs of each rank, or of one rank of each stage, without allocating or
    capturing anything.
    """
    config = EngineConfig(**read_engine_options(options))
    contents = read_checkpoint(options.checkpoint, config, Share(0, config.ranks))
    memories, model = [plan_checkpoint(contents, config)], contents.model
    if config.pipeline_parallel > 1:
        last, *others = plan_stages(contents, config)
        memories, model = [*others, last], contents.split
    memory = memories[-1]
    facts: dict[str, Any] = {
        "architecture": model.architecture,
        "layers": model.num_layers,
        **_parameters(model.allocate(device="meta", dtype=memory.dtype)),
        "vocabulary": model.vocab_size,
        **_frame(model.inner),
        "device": str(memory.device),
        "tensor_parallel": config.tensor_parallel,
        "data_parallel": config.data_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "dtype": str(memory.dtype).removeprefix("torch."),
        "kv_dtype": str(memory.kv_dtype).removeprefix("torch."),
        "activations": memory.activations,
        "max_batch": memory.ladder.sizes[-1],
        "max_seq_len": memory.max_seq_len,
        "decode_buckets": memory.ladder.sizes,
        "prefill_buckets": memory.prefill_ladder.sizes,
        "prefill_cut": _prefill_cut(config, memory),
        "row_family": config.family,
        "lookahead": config.launched_ahead,
        "steps_per_launch": config.steps_per_launch,
        "prompts_per_prefill": config.packed_prompts,
        "speculative": describe(config.mode),
        "draft_lengths": memory.draft_lengths,
        "graphs": len(memory.graphs),
        "sampling_defaults": config.sampling_defaults,
        "generation_config": recommended_sampling(contents.checkpoint),
    }
    kv = {
        "kv_bytes_per_1000_tokens": sum(each.kv_bytes(1000) for each in memories),
        "kv_tokens": memory.kv_blocks * memory.block_size,
        "kv_requests": memory.whole_requests,
        "kv_ring_bytes_per_slot": memory.ring_bytes,
    }
    if options.json:
        budgets = [[asdict(line) for line in each.budget.lines] for each in memories]
        held = {"budget": budgets[0]} if len(budgets) == 1 else {"budgets": budgets}
        print(json.dumps(facts | kv | held))
        return
    width = columns()
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{option}={number}" for option, number in value.items()) or "none"
        shown = f"{value:,}" if "parameters" in name else shown
        print(fit(f"{name.replace('_', ' '):<17} {shown}", width))
    for stage, each in enumerate(memories):
        title = f"stage {stage}\n" if len(memories) > 1 else ""
        print(f"\n{title}{each.budget.table(width)}\n{fit(each.describe_kv(), width)}")


def _parameters(weights: ModelWeights) -> dict[str, int]:
    """The number of parameters, and with experts the number that a token uses."""
    routed, parameters = weights.routed, weights.parameters
    if routed is None:
        return {"parameters": parameters}
    return {"parameters": parameters, "active_parameters": parameters - routed.idle}


def _prefill_cut(config: EngineConfig, memory: MemoryPlan) -> str:
    """Where prompts will be cut, as far as that is known before anything is measured."""
    if config.max_prefill_ms_per_step is not None:
        return f"measured at opening, within {config.max_prefill_ms_per_step:g} ms"
    largest = memory.prefill_ladder.sizes[-1]
    cut = PrefillCut(config.prefill_cut or ((0, largest),))
    return str(cut.within(longest_prompt(memory), largest))
