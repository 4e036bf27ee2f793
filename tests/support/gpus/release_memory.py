"""Releases and restores an engine's memory on a GPU, and says how much and how long.

python tests/support/gpus/release_memory.py CHECKPOINT [drop]     # such as demo
"""

from __future__ import annotations

import sys
import time

import torch

from graphengine import Engine, SamplingParams
from graphengine.models.checkpoints.checkpoint import Checkpoint

ASKED = SamplingParams(max_tokens=64, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def main(path: str, dropped: bool) -> None:
    with Engine.from_pretrained(path, device="cuda", releasable=True) as engine:
        prompt = list(range(10, 60))
        expected, graphs = engine.generate(prompt, ASKED), dict(engine.runtime.graphs)
        pointers = [tensor.data_ptr() for tensor in (*engine.model.weights.tensors(), engine.cache)]
        for turn in range(3):
            before, start = free_bytes(), time.perf_counter()
            released = engine.release_memory(weights="drop" if dropped else "host")
            took = time.perf_counter() - start
            grown, start = free_bytes() - before, time.perf_counter()
            engine.restore_memory()
            back = time.perf_counter() - start
            if dropped:
                engine.update_weights(Checkpoint.open(path).mapped())
            found = engine.generate(prompt, ASKED)
            assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
            assert engine.runtime.graphs == graphs
            tensors = (*engine.model.weights.tensors(), engine.cache)
            assert [tensor.data_ptr() for tensor in tensors] == pointers
            print(
                f"{turn}: released {released} bytes in {took:.2f} s, the GPU has {grown} more; "
                f"restored in {back:.2f} s; the same tokens"
            )


if __name__ == "__main__":
    main(sys.argv[1], "drop" in sys.argv[2:])
