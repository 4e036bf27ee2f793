"""Times of a policy's chunks, with random weights of its sizes.

A chunk is timed from the call of `act` until its actions are on the host. The same policy with one
denoising step, over the same weights, says what the others take: what is left of a chunk without
its denoising steps is the prefix, the state, and the way to the device and back.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor

from graphengine import Policy, PromptParts
from graphengine.buckets import BucketLadder
from graphengine.observe.environment import environment
from graphengine.policies.weights import PolicyWeights
from graphengine.profiles.benchmark.floor.ceiling import ReadCeiling, measure_read_ceiling
from graphengine.profiles.benchmark.measure import random_prompt
from graphengine.profiles.benchmark.shapes import fill_random
from graphengine.profiles.policies.asked import PolicyBench
from graphengine.profiles.policies.floor import PolicyBytes
from graphengine.profiles.progress import Progress
from graphengine.profiles.tables.percentiles import percentiles, rounded

_WARM_UPS = 2


def measure_policy(bench: PolicyBench, progress: Progress) -> dict[str, Any]:
    """Check and measure; returns the JSON document, but for its schema.

    Milliseconds. `denoiser_ms` is that of all denoising steps, `prefix_ms` the rest of a chunk.
    `floor` has `PolicyBytes`, and the least times to read them; None without a read ceiling.

    RuntimeError if chunks of one seed differ, chunks of two seeds are equal, or actions are not
    finite.
    """
    ceiling = measure_read_ceiling(bench.device)
    config, steps = bench.config, bench.config.steps
    read = PolicyBytes.of(
        config, bench.shape.prefix_tokens, steps, bench.dtype, _l2_bytes(bench.device)
    )
    progress.doing(f"{bench.name}: drawing weights")
    weights = PolicyWeights.allocate(config, device=str(bench.device), dtype=bench.dtype)
    fill_random(weights.named())
    times = _chunk_ms(bench, weights, sorted({steps, 1}), progress)
    whole, one = median(times[steps]), median(times[1])
    # A policy of one step has nothing to compare with.
    step = (whole - one) / (steps - 1) if steps > 1 else None
    found: dict[str, Any] = {
        "images": bench.shape.images,
        "image_tokens": bench.shape.image_tokens,
        "text_tokens": bench.shape.text_tokens,
        "prefix_tokens": bench.shape.prefix_tokens,
        "horizon": config.horizon,
        "steps": steps,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "runs": bench.runs,
        "ms_per_chunk": whole,
        "chunk_ms": percentiles(times[steps]),
        "ms_per_step": step,
        "denoiser_ms": None if step is None else steps * step,
        "prefix_ms": None if step is None else whole - steps * step,
        "floor": _floors(read, ceiling, whole, None if step is None else steps * step),
        "checked": {"equal_chunks": bench.runs * bench.chunks, "steps": sorted(times)},
    }
    progress.done(f"{bench.name}: {whole:.3f} ms/chunk")
    return {
        "environment": environment(str(bench.device)),
        "shape": bench.name,
        "random_weights": True,
        "config": dict(bench.shape.config),
        "ceiling": None if ceiling is None else asdict(ceiling),
        "policy": rounded(found),
    }


def _floors(
    read: PolicyBytes, ceiling: ReadCeiling | None, chunk_ms: float, denoiser_ms: float | None
) -> dict[str, Any]:
    def least(size: int) -> float | None:
        return None if ceiling is None else ceiling.milliseconds(size)

    def share(size: int, took: float | None) -> float | None:
        floor = least(size)
        return None if floor is None or took is None else floor / took

    return {
        "prefix_bytes": read.prefix,
        "state_bytes": read.state,
        "expert_bytes": read.expert,
        "kv_bytes": read.kv,
        "l2_bytes": read.l2,
        "expert_reads": read.expert_reads,
        "denoiser_bytes": read.denoiser,
        "chunk_bytes": read.chunk,
        "prefix_tflop": read.prefix_tflop,
        "chunk_ms": least(read.chunk),
        "chunk_share": share(read.chunk, chunk_ms),
        "denoiser_ms": least(read.denoiser),
        "denoiser_share": share(read.denoiser, denoiser_ms),
    }


def _l2_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _chunk_ms(
    bench: PolicyBench, weights: PolicyWeights, counts: Sequence[int], progress: Progress
) -> dict[int, list[float]]:
    """Milliseconds of each chunk, by the number of denoising steps, once they are checked.

    Runs with these numbers alternate, so that a device that slows down slows all of them.
    """
    clock, chunks = time.perf_counter, bench.chunks
    times: dict[int, list[float]] = {steps: [] for steps in counts}
    with ExitStack() as stack:
        acts: dict[int, Callable[[int], Tensor]] = {}
        for steps in counts:
            policy = stack.enter_context(_opened(bench, weights, steps))
            acts[steps] = _act(bench, policy)
        progress.doing(f"{bench.name}: warming up")
        firsts = {steps: _checked(act, steps) for steps, act in acts.items()}
        for run in range(bench.runs):
            progress.doing(f"{bench.name}: run {run + 1} of {bench.runs}")
            for steps, act in acts.items():
                for _ in range(chunks):
                    begun = clock()
                    actions = act(0)
                    times[steps].append(1e3 * (clock() - begun))
                    if not torch.equal(actions, firsts[steps]):
                        raise RuntimeError(f"steps={steps}: chunks of one seed differ")
    return times


def _act(bench: PolicyBench, policy: Policy) -> Callable[[int], Tensor]:
    """Denoises a chunk by its seed, of the same prefix and state; the actions are on the host."""
    prefix, state = _inputs(bench)
    return lambda seed: policy.act(prefix, state, seed=seed).cpu().clone()


def _checked(act: Callable[[int], Tensor], steps: int) -> Tensor:
    """The chunk of seed 0, after a few; RuntimeError if it is not finite, or that of seed 1."""
    for _ in range(_WARM_UPS):
        other, first = act(1), act(0)
    if not first.isfinite().all() or torch.equal(first, other):
        raise RuntimeError(f"steps={steps}: actions must be finite, and others for another seed")
    return first


def _inputs(bench: PolicyBench) -> tuple[PromptParts, Tensor]:
    """A prefix of random images, on the device, and text; and a state."""
    shape, config = bench.shape, bench.config
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(
        shape.images * shape.image_tokens, config.prefix.hidden_size, generator=generator
    )
    text = random_prompt(config.prefix.vocab_size, shape.text_tokens, seed=0)
    state = torch.randn(config.state_dim, generator=generator)
    return PromptParts(images.to(bench.device, bench.dtype), text), state


@contextmanager
def _opened(bench: PolicyBench, weights: PolicyWeights, steps: int) -> Iterator[Policy]:
    """A policy over these weights, with a graph only for the prefix's length."""
    tokens = bench.shape.prefix_tokens
    policy = Policy(
        bench.config,
        weights,
        None,
        buckets=BucketLadder(tokens, [tokens]),
        steps=steps,
        device=bench.device,
    )
    try:
        yield policy
    finally:
        policy.close()
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
