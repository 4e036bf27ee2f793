"""One rank of several by itself: it pushes to itself in place of the others' pushes.

It launches the kernels of a rank on the shapes of a rank, and waits for items as a rank does. Its
times lack the others: transfers between GPUs, and ranks that come late. Its tokens mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine import Engine, EngineConfig
from graphengine.core.runtime import Runtime
from graphengine.drafters import NoDrafter
from graphengine.kernels.comm.items import UNIT as PUSH_UNIT
from graphengine.kernels.comm.items import PeerItems, Peers
from graphengine.kernels.comm.push import push_gather, push_sum
from graphengine.kernels.comm.push_candidates import push_candidates
from graphengine.kernels.comm.push_lanes import ExpertLanes
from graphengine.models.contract import ModelConfig, ModelWeights
from graphengine.models.launches import AddOwn, Share
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.opening.budget.memory_plan import MemoryPlan

WAIT_LIMIT_S = 10.0


class LoneRank:
    """The group of rank 0 of `ranks` without the others. A sum that is not pushed, such as that of
    a long chunk, is this rank's part alone.

    peers  with `units` units of memory, on a GPU; None on a CPU
    """

    # For ranks that have requests of their own, which no lone rank has.
    add_own: AddOwn | None = None

    def __init__(self, ranks: int, device: torch.device, units: int, *, pdl: bool) -> None:
        self.share = Share(0, ranks)
        self.peers = _to_itself(ranks, device, units) if device.type == "cuda" else None
        self._pdl = pdl

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting, as `ProcessGroup.waited_s`."""
        return 0.0 if self.peers is None else self.peers.tensors.waited.item() / 1e9

    def reduce(self, part_NH: Tensor) -> Tensor:
        peers = self._pushes(part_NH)
        return part_NH if peers is None else push_sum(peers, part_NH.contiguous(), pdl=self._pdl)

    def split_stream(self, lanes: int, hidden: int, dtype: torch.dtype) -> None:
        return None

    def gather(self, part_NC: Tensor) -> Tensor:
        peers = self._pushes(part_NC)
        if peers is None:
            return part_NC.expand(self.share.ranks, *part_NC.shape).contiguous()
        return push_gather(peers, part_NC.contiguous(), pdl=self._pdl)

    def sum_own(self, parts_RNC: Tensor) -> Tensor:
        raise AssertionError("a lone rank has no requests of its own")

    def push_candidates(self, best_NC: Tensor, health_NC: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.peers is None:
            return None
        return push_candidates(self.peers, best_NC, health_NC, pdl=self._pdl)

    def push_lanes(self, lanes: ExpertLanes) -> ExpertLanes | None:
        return None

    def _pushes(self, part: Tensor) -> Peers | None:
        return self.peers if self.peers is not None and self.peers.hold(part) else None


def _to_itself(ranks: int, device: torch.device, units: int) -> Peers:
    items = torch.zeros(2, ranks, units, PUSH_UNIT, dtype=torch.int64, device=device)
    # Rank r would find this rank's items in the first of its rows; here they are in row r.
    addresses = [items[0, rank].data_ptr() for rank in range(ranks)]
    peers = Peers(0, PeerItems.over_items(0, items, addresses))
    peers.tensors.watch[1] = int(WAIT_LIMIT_S * 1e9)
    return peers


def share_of(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """Rank 0's share of a model. ValueError if the model cannot be split this way."""
    share = Share(0, config.tensor_parallel)
    return of_rank(model, share, expert_parallel=config.expert_parallel)


def lone_engine(weights: ModelWeights, memory: MemoryPlan, config: EngineConfig) -> Engine:
    """The engine of a lone rank; `weights` are of a `share_of` a model."""
    model = weights.open(max_seq_len=memory.max_seq_len)
    group = LoneRank(config.tensor_parallel, memory.device, memory.push_units, pdl=config.pdl)
    drafter = NoDrafter()
    runtime = Runtime(model, memory, config, drafter, group=group)
    return Engine(model, memory, config, drafter=drafter, runtime=runtime)
