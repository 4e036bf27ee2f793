"""A program of two ranks on a CPU that push as ranks on GPUs do, for torchrun.

    TRITON_INTERPRET=1 torchrun --standalone --nproc-per-node 2 pushing_ranks.py CHECKPOINT

Triton's interpreter runs the kernels of pushes, over a file that both processes map; all else are
the plain twins. It prints the ranks that agree, and tokens.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphengine import Engine, SamplingParams
from graphengine.kernels.comm.items import UNIT as PUSH_UNIT
from graphengine.kernels.comm.items import PeerItems, Peers
from graphengine.kernels.comm.layout import PeerTensors
from graphengine.models.launches import Share
from graphengine.models.splitting.pushes import Pushes
from graphengine.parallel import process_groups
from graphengine.parallel.collectives.process_group import ProcessGroup
from graphengine.parallel.driver_runtime import DriverRuntime
from launches.interpreted import prepare_interpreter

PROMPTS = ["def fib(n):", "class Tree:\n"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=3),
    SamplingParams(temperature=0.8, seed=3, top_k=20, max_tokens=3),
]
SIZES: dict[str, Any] = {
    "device": "cpu", "max_batch": 2, "max_seq_len": 64, "block_size": 8, "prefill_buckets": (16,),
}  # fmt: skip


class FileMemory:
    """In place of `PeerMemory`: the items of each rank are a file beside that of the rendezvous."""

    def __init__(self, folder: Path, share: Share, units: int) -> None:
        self.problem = ""
        shape = (2, share.ranks, units, PUSH_UNIT)
        path = folder / f"items{share.rank}"
        made = path.with_suffix(".new")
        made.touch()
        # A file without zeros of its own reads as zeros.
        with made.open("r+b") as file:
            file.truncate(8 * int(np.prod(shape)))
        made.rename(path)
        self._items = [_mapped(folder / f"items{rank}", shape) for rank in range(share.ranks)]
        addresses = [items.data_ptr() for items in self._items]
        tensors = PeerItems.over_items(share.rank, self._items[share.rank], addresses)
        # In polls, as the interpreter has no clock.
        tensors.watch[1] = 2**50
        self.tensors: PeerTensors | None = PeerTensors(Peers(share.rank, tensors), None, None)

    def leave(self) -> None:
        self.tensors = None

    def close(self) -> None:
        self.leave()


def _mapped(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    while not path.exists():
        time.sleep(0.01)
    return torch.from_numpy(np.memmap(path, dtype=np.int64, mode="r+", shape=shape))


class PushingGroup(ProcessGroup):
    """One where all is pushed, but by no product: their plain twins push nothing."""

    limit_s = 60.0
    pushes = None

    def __init__(self, file: str, share: Share, device: torch.device, **options: Any) -> None:
        self.share, self._on_gpu = share, False
        self._group = self._exchange = self._ending = None
        # So few that logits take several launches.
        self._memory = FileMemory(Path(file).parent, share, units=4)
        assert self._memory.tensors is not None
        self._own_pushes = Pushes(self._memory.tensors, pdl=False)
        self._watch = self._own_pushes.peers.tensors.watch.numpy()

    def _pushes(self, part: torch.Tensor) -> Pushes:
        return self._own_pushes


def run_plain_twins() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("graphengine.kernels.") and hasattr(module, "use_triton"):
            module.use_triton = lambda tensor: False


def main(checkpoint: str) -> None:
    run_plain_twins()
    prepare_interpreter()
    torch.set_num_threads(1)
    process_groups.ProcessGroup = PushingGroup  # type: ignore[misc]
    options = SIZES | {"tensor_parallel": 2, "wait_limit_s": 60.0}
    with Engine.from_pretrained(checkpoint, **options) as engine:
        cancelled = engine.submit(PROMPTS[1], PARAMS[0])
        engine.step()
        cancelled.cancel()
        results = engine.generate(PROMPTS, PARAMS)
        assert isinstance(engine.runtime, DriverRuntime)
        digests = engine.runtime.digests()
    print("ranks", len(digests), "states", len(set(digests)))
    for result in results:
        print("tokens", *result.token_ids)


if __name__ == "__main__":
    main(sys.argv[1])
