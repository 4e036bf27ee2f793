"""What a chunk of actions takes: all of it, its denoising steps, and how evenly chunks come.

    python tests/support/gpus/policy_times.py --out policy.json
    python tests/support/gpus/policy_times.py --tiny --device cpu

Random weights of pi0's sizes. The prefix is three images of 256 embeddings and 32 tokens. A policy
with fewer denoising steps, in the same process, says what a step takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphengine import Policy, PromptParts
from graphengine.buckets import BucketLadder
from graphengine.models.policies import read_policy_config
from graphengine.observe.environment import environment
from graphengine.policies.weights import PolicyWeights

IMAGES, IMAGE_TOKENS, TEXT = 3, 256, 32
WARMUPS, CHUNKS = 5, 200
TINY: Mapping[str, Any] = {
    "model_type": "pi0",
    "vlm_config": {
        "text_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    },
    "dit_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
}


def open_policy(config: Mapping[str, Any], steps: int, device: str, positions: int) -> Policy:
    """A policy with random weights, and one bucket."""
    read = read_policy_config(config)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    weights = PolicyWeights.allocate(read, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(1)
    for name, tensor in weights.named().items():
        if tensor.dim() == 1:
            tensor.zero_()
        else:
            scale = 1.0 if "embed" in name else tensor.shape[1] ** -0.5
            tensor.normal_(std=scale, generator=generator)
    ladder = BucketLadder(positions, [positions])
    return Policy(read, weights, None, buckets=ladder, steps=steps, device=torch.device(device))


def chunk_ms(policy: Policy, cameras: int, tokens: int, text: int) -> list[float]:
    """Milliseconds of each chunk, from the call until the actions are on the host."""
    width = policy.config.prefix.hidden_size
    images = torch.randn(cameras * tokens, width, device=policy.device, dtype=policy.dtype)
    prefix = PromptParts(images, [*range(5, 5 + text)])
    state = torch.randn(policy.config.state_dim)
    times = []
    for seed in range(WARMUPS + CHUNKS):
        begun = time.perf_counter()
        policy.act(prefix, state, seed=seed).cpu()
        times.append(1e3 * (time.perf_counter() - begun))
    return times[WARMUPS:]


def measure(config: Mapping[str, Any], device: str, tokens: int) -> dict[str, Any]:
    """Medians and tails of a chunk with 10 denoising steps and with 2, and what a step takes."""
    positions = IMAGES * tokens + TEXT
    found: dict[str, Any] = {"prefix": positions}
    for steps in (10, 2):
        with open_policy(config, steps, device, positions) as policy:
            times = sorted(chunk_ms(policy, IMAGES, tokens, TEXT))
        found[f"steps_{steps}"] = {
            "p50_ms": round(statistics.median(times), 4),
            "p99_ms": round(times[len(times) * 99 // 100], 4),
            "largest_ms": round(times[-1], 4),
        }
    step = (found["steps_10"]["p50_ms"] - found["steps_2"]["p50_ms"]) / 8
    return found | {"step_ms": round(step, 4), "environment": environment(device)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a policy that a CPU runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    config, tokens = (TINY, 8) if options.tiny else ({"type": "pi0"}, IMAGE_TOKENS)
    text = json.dumps(measure(config, options.device, tokens), indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
