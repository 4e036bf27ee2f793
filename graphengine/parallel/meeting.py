"""Where ranks meet: the sum of what all have, with the same bits on each.

All parts go to all ranks, and each rank adds them up in the order of the ranks: the sum depends on
neither the library's algorithm nor the number of rows. On a CPU gloo carries the parts, over
sockets of the loopback interface; on GPUs it is NCCL, whose kernels are captured into the graphs.
A rank's group is its own: torch.distributed's default group stays the host program's.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from graphengine.kernels import sum_parts
from graphengine.models.contract import Share

_LOOPBACK = "127.0.0.1"


class MeetingFailed(RuntimeError):
    """A rank is gone, or did not come in time."""


OPENING_LIMIT_S = 120.0
"""For which a rank waits for the others while they open."""


class Meeting:
    """Joins the other ranks, through a file that all of them name.

    limit_s  for which a rank waits for the others' parts on a CPU; on a GPU the mailbox's wait ends
             a replay that does not come to its end
    """

    def __init__(
        self, file: str, share: Share, device: torch.device, limit_s: float = OPENING_LIMIT_S
    ) -> None:
        self.limit_s = limit_s
        self.share = share
        limit = timedelta(seconds=limit_s)
        self._on_gpu = device.type == "cuda"
        store = torch.distributed.FileStore(file, share.ranks)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        if self._on_gpu:
            self._group = _nccl_group(store, share)
        else:
            self._group = _gloo_group(store, share, limit)

    def reduce(self, part_NH: Tensor) -> Tensor:
        """A new tensor, the sum of all ranks' parts; see `Reduce`. MeetingFailed on a CPU."""
        return sum_parts(self.gather(part_NH))

    def gather(self, part_NC: Tensor) -> Tensor:
        """New `[ranks, N, C]`, the parts of all ranks in their order. MeetingFailed on a CPU."""
        lanes, columns = part_NC.shape
        part_NC = part_NC.contiguous()
        gathered = part_NC.new_empty((self.share.ranks, lanes, columns))
        if self._on_gpu:
            _nccl_gather(self._group, gathered.flatten(0, 1), part_NC).wait()
            return gathered
        # Gloo knows bytes of every dtype.
        parts = list(gathered.view(torch.uint8).unbind())
        try:
            work = self._group.allgather([parts], [part_NC.view(torch.uint8)])
            work.wait(timedelta(seconds=self.limit_s))
        except RuntimeError as error:
            raise MeetingFailed(str(error).partition("\n")[0]) from error
        return gathered

    def close(self, *, broken: bool) -> None:
        """Leave the others. With `broken` nobody waits for what is under way."""
        if broken and self._on_gpu:
            self._group.abort()
        self._group = None


def _gloo_group(store: Any, share: Share, limit: timedelta) -> Any:
    options = torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    device = torch.distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK)
    # torch has no public names for these. Its own choice is what the host's name leads to.
    setattr(options, "_devices", [device])  # noqa: B010
    setattr(options, "_timeout", limit)  # noqa: B010
    return torch.distributed.ProcessGroupGloo(store, share.rank, share.ranks, options)


def _nccl_group(store: Any, share: Share) -> Any:
    options = torch.distributed.ProcessGroupNCCL.Options()
    return torch.distributed.ProcessGroupNCCL(store, share.rank, share.ranks, options)


def _nccl_gather(group: Any, gathered: Tensor, part: Tensor) -> Any:
    return torch.distributed.ProcessGroupNCCL._allgather_base(  # type: ignore[attr-defined]
        group, gathered, part
    )
