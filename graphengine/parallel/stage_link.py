"""Communication between pipeline stages: each sends to the next one, and the last one to all.

On a CPU, gloo carries the tensors over sockets of the loopback interface; on GPUs, NCCL does,
captured into the graphs. A send is not waited for, so a stage goes on with the next chunk of a
prompt while the stage after it is busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from graphengine.models.splitting.stages import rank_of_stage, stage_of_rank
from graphengine.parallel.collectives.process_group import ProcessGroup
from graphengine.parallel.collectives.rendezvous import GroupError


class StageLink:
    """One stage's side of the link, over the process `group` of the stages; see `StageGroup`.

    in_flight  sends that may be in flight before the next one waits for the oldest

    Raises GroupError where stages share a GPU.
    """

    def __init__(self, group: ProcessGroup, in_flight: int) -> None:
        self._group = group
        self.share = stage_of_rank(group.share)
        if group.torch_group is None:
            raise GroupError(f"{self.share.ranks} stages need a GPU each: they share one")
        self._most = in_flight
        # Sends in flight with their stages, and with their tensors, which a CPU still reads.
        self._sent: deque[tuple[Any, int, Tensor]] = deque()

    def receive(self, tensor: Tensor) -> None:
        """Receive from the previous stage; on a CPU, GroupError if it is gone or too late."""
        self.receive_from(self.share.rank - 1, tensor)

    def send(self, tensor: Tensor) -> None:
        """Send to the next stage, without waiting for it.

        On a CPU, GroupError if it is gone, or too late to take the oldest of too many sends.
        """
        self.send_to(self.share.rank + 1, tensor)

    def spread(self, tensor: Tensor) -> None:
        """Broadcast the last stage's tensor to all others.

        On a CPU it raises GroupError like `receive` and `send`.
        """
        rank, stages = self.share
        if rank < stages - 1:
            self.receive_from(stages - 1, tensor)
            return
        for stage in range(stages - 1):
            self.send_to(stage, tensor)

    def receive_count(self, device: torch.device) -> int:
        """A number from the previous stage, read from the device; errors as in `receive`."""
        count = torch.zeros(1, dtype=torch.int64, device=device)
        self.receive(count)
        return int(count)

    def send_count(self, count: int, device: torch.device) -> None:
        """Send a number to the next stage; errors as in `send`."""
        self.send(torch.tensor([count], device=device))

    def receive_from(self, stage: int, tensor: Tensor) -> None:
        """Receive a tensor from this stage; it has the shape and dtype of `tensor`."""
        with self._explained(f"what stage {stage} sends", tensor):
            work = self._group.torch_group.recv(
                [_bytes(tensor)], rank_of_stage(stage, self.share.ranks), 0
            )
            self._wait(work, tensor)

    def send_to(self, stage: int, tensor: Tensor) -> None:
        """Send to this stage, without waiting for it; the tensor must not change afterwards."""
        sent = _bytes(tensor.contiguous())
        with self._explained(f"stage {stage} to take a tensor", sent):
            work = self._group.torch_group.send([sent], rank_of_stage(stage, self.share.ranks), 0)
            if tensor.device.type == "cuda":
                self._wait(work, sent)
                return
        self._sent.append((work, stage, sent))
        while len(self._sent) > self._most:
            oldest, stage, sent = self._sent.popleft()
            with self._explained(f"stage {stage} to take a tensor", sent):
                self._wait(oldest, sent)

    def close(self) -> None:
        """Forget the sends in flight, so that the group's threads end with it."""
        self._sent.clear()

    @contextmanager
    def _explained(self, what: str, tensor: Tensor) -> Iterator[None]:
        """Inside, an error of gloo or NCCL becomes a GroupError that names what was awaited."""
        try:
            yield
        except RuntimeError as error:
            raise GroupError(
                f"stage {self.share.rank} of {self.share.ranks} waited, for at most "
                f"{self._group.limit_s:g} s, for {what}, {tensor.nbytes} bytes: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error

    def _wait(self, work: Any, tensor: Tensor) -> None:
        """Wait for a transfer of a tensor; on a GPU the current stream waits, not the host."""
        if tensor.device.type == "cuda":
            # With a limit, the host would wait.
            work.wait()
        else:
            work.wait(timedelta(seconds=self._group.limit_s))


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes: gloo does not know every dtype."""
    return tensor.view(torch.uint8)
