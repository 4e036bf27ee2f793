"""Rollouts for reinforcement learning: replicas of the engine as Ray actors.

    pip install ray                       # which the extra `test` has
    python examples/ray_rollouts.py

Each replica is an engine in a process of its own, on this machine or on any of the Ray cluster that
RAY_ADDRESS names. Prompts are spread over them. A rollout is a `Result`: tokens, the
log-probability of each, and with `record_routing=True` the experts that every token took. After a
training step the trainer's tensors go into the weights of all replicas, in place: graphs stay as
they are, and KV of the older weights is dropped.

A trainer on GPUs sends weights with NCCL; what each replica receives may go to
`engine.update_weights` where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file

from graphengine import Engine, Result, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.prompts import Prompt

PROMPTS = ["def fib(n):", "class Stack:", "import os\n", "for line in "]
PARAMS = SamplingParams(max_tokens=12, logprobs=0)
PIECE_BYTES = 1 << 30


class Replica:
    """One engine; Ray makes an actor of it. `version` is the trainer's name for its weights."""

    def __init__(self, checkpoint: str, **options: Any) -> None:
        self.engine = Engine.from_pretrained(checkpoint, **options)
        self.version = 0

    def rollouts(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> tuple[int, list[Result]]:
        """The version of the weights, and a result for each prompt."""
        return self.version, self.engine.generate(prompts, params)

    def update(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Take some of a version's tensors."""
        self.engine.update_weights(tensors)
        self.version = version


class Replicas:
    """Actors with `gpus` each, as many as `tensor_parallel` takes; options are those of
    `Engine.from_pretrained`.
    """

    def __init__(self, count: int, checkpoint: str, *, gpus: int = 0, **options: Any) -> None:
        actor = ray.remote(num_gpus=gpus)(Replica)
        self.actors: list[Any] = [actor.remote(checkpoint, **options) for _ in range(count)]

    def rollouts(
        self, prompts: Sequence[Prompt], params: SamplingParams, seed: int
    ) -> tuple[int, list[Result]]:
        """The version of the weights, which all replicas have, and results in the prompts' order.

        Seeds follow from `seed` and the prompt's place, so that rollouts do not depend on the
        number of replicas.
        """
        seeded = [replace(params, seed=seed + place) for place in range(len(prompts))]
        count = len(self.actors)
        parts = ray.get(
            [
                actor.rollouts.remote(prompts[first::count], seeded[first::count])
                for first, actor in enumerate(self.actors)
            ]
        )
        (version,) = {version for version, _ in parts}
        return version, [parts[place % count][1][place // count] for place in range(len(prompts))]

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Send tensors to all replicas, some at a time.

        A piece is put into Ray's object store once, from where each machine fetches it once.
        """
        for piece in _pieces(tensors):
            stored = ray.put(piece)
            ray.get([actor.update.remote(stored, version) for actor in self.actors])


def _pieces(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors on the host, about `PIECE_BYTES` at a time."""
    piece: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        piece[name] = tensor.detach().cpu()
        if sum(each.nbytes for each in piece.values()) >= PIECE_BYTES:
            yield piece
            piece = {}
    if piece:
        yield piece


def train(weights: dict[str, torch.Tensor], rollouts: Sequence[Result]) -> None:
    """Stands in for a training step: adds a little noise."""
    generator = torch.Generator().manual_seed(len(rollouts))
    for weight in weights.values():
        noise = torch.randn(weight.shape, generator=generator)
        weight.add_(noise * 0.05 * weight.float().std(correction=0))


def main() -> list[tuple[int, list[Result]]]:
    ray.init(include_dashboard=False)
    try:
        weights = load_file(Path(checkpoint_path()) / "model.safetensors")
        replicas = Replicas(2, "demo", device="cpu", max_batch=2, max_seq_len=64)
        found = []
        for step in range(1, 3):
            version, rollouts = replicas.rollouts(PROMPTS, PARAMS, seed=100)
            found.append((version, rollouts))
            for rollout in rollouts:
                print(f"version {version}: {rollout.cumulative_logprob:7.2f} {rollout.text!r}")
            train(weights, rollouts)
            replicas.update(weights.items(), version=step)
        return found
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
