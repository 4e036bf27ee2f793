"""Copies a step's masks to the device, and the drafts that they depend on back to the host.

`allowed_bits` has W masks for each slot, one for each lane of its row. Masks of `allowed_token_ids`
are written once, when the request is admitted. Masks of a grammar are written before each decode
step of the request, as they depend on its last tokens and on the drafts after them; in trees, on
the drafts along the path to each lane. If the device drafts, its table of drafts is copied to
pinned memory after the replays of each launch with such a request, and once the host has read the
launch it waits for that copy, too. Later launches, without the request, leave its drafts as they
are. Otherwise nothing is copied, and nothing waits. A token that a caller forces is a mask as well:
for one step, the first lane allows nothing else.

Letters: S slots, W tokens of a row in the widest step, K = W - 1 drafts, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphengine.buckets import LaneUpdate, StaticBuffers
from graphengine.buckets.mailbox import BLOCK_SECONDS, WaitMode
from graphengine.host.step_plan import Plan
from graphengine.kernels.logits.logits_triton import USES_GRAMMAR, USES_MASK
from graphengine.requests.grammars import HostGuide
from graphengine.requests.job import Job
from graphengine.requests.request import Request


class MaskTable:
    """The host's side of `allowed_bits`.

    buffers      the engine's buffers; held until it closes
    host_drafts  whether the host writes the drafts, so that none are copied from the device
    parents      the lane that each draft follows: the same in every step, or int32 [S, K] on the
                 device, which change with the drafts; None: the previous lane
    """

    def __init__(
        self,
        buffers: StaticBuffers,
        *,
        host_drafts: bool,
        parents: Sequence[int] | torch.Tensor | None = None,
    ) -> None:
        self._fixed_parents = None if isinstance(parents, torch.Tensor) else parents
        # Pairs of device and host tensors that are copied together.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        field = buffers["allowed_bits"]
        self._table: NDArray[np.int32] = np.full(tuple(field.shape), -1, dtype=np.int32)
        # The id of the request whose masks the table has, by slot: an id keeps no request alive.
        self._held: list[int | None] = [None] * len(self._table)
        # Slots whose mask forces a token.
        self._forced: set[int] = set()
        # Copies that may not have arrived, oldest first: the replay before each, and its event.
        self._fetched: deque[tuple[int, Any]] = deque()
        self._spare: list[Any] = []
        self._on_gpu = field.device.type == "cuda"
        if self._table.shape[1] > 1 and not host_drafts:
            copied = [buffers["draft_tokens"]]
            if isinstance(parents, torch.Tensor):
                copied.append(parents)
            self._copies = [(part, _host_copy(part, pinned=self._on_gpu)) for part in copied]

    def updates(self, plan: Plan, slots: Sequence[Request | None]) -> dict[str, Any]:
        """The field's values for the plan's step; empty if they have not changed.

        Call it once `wait` has returned True, and before the host's drafts are used up. The values
        are a view of the table: load them at once.
        """
        changed: list[int] = []
        if plan.options_changed:
            changed += [slot for slot, held in enumerate(slots) if self._hold(slot, held)]
        for request in plan.rows:
            guide = request.job.guide
            if isinstance(guide, HostGuide):
                if plan.width > 1:
                    drafts, parents = self._drafts_of(request)
                    guide.follow(drafts[: plan.width - 1], parents)
                slot = request.job.placed.slot
                self._table[slot] = guide.masks
                changed.append(slot)
        chunk = plan.prefill
        sampling = plan.rows if chunk is None or not chunk.final else (*plan.rows, chunk.request)
        for request in sampling:
            if request.job.forcible and self._force(request.job):
                changed.append(request.job.placed.slot)
        if not changed:
            return {}
        first = min(changed)
        return {"allowed_bits": LaneUpdate(first, self._table[first : max(changed) + 1])}

    def _force(self, job: Job) -> bool:
        """Have the request's next step emit the token that its caller forces, if any; False if the
        masks stay as they are.
        """
        slot, token = job.placed.slot, job.forced
        if token is None and slot not in self._forced:
            return False
        self._forced.discard(slot)
        mask_V = self._table[slot, 0]
        mask_V[:] = -1
        if token is not None:
            mask_V[:] = 0
            mask_V.view(np.uint32)[token // 32] = np.uint32(1 << token % 32)
            self._forced.add(slot)
            job.forced = None
        elif job.processing is not None and job.processing.mask is not None:
            mask_V[: job.processing.mask.size] = job.processing.mask
        return True

    def _hold(self, slot: int, request: Request | None) -> bool:
        """Write the masks of a slot's request into the table; False if it has them already."""
        processing = None if request is None else request.job.processing
        if processing is None or not processing.flags & (USES_MASK | USES_GRAMMAR):
            request = None
        number = None if request is None else request.id
        if number == self._held[slot]:
            return False
        self._held[slot] = number
        self._forced.discard(slot)
        masks_WV = self._table[slot]
        masks_WV[:] = -1
        guide = None if request is None else request.job.guide
        if isinstance(guide, HostGuide):
            masks_WV[:] = guide.masks
        elif processing is not None and processing.mask is not None:
            masks_WV[:, : processing.mask.size] = processing.mask
        return True

    def _drafts_of(self, request: Request) -> tuple[Sequence[int], Sequence[int] | None]:
        """Drafts of the request's next step, and their parents."""
        if not self._copies:
            return request.job.drafts.after(request.job.tokens), self._fixed_parents
        slot = request.job.placed.slot
        drafts, *parents = (host[slot].tolist() for _, host in self._copies)
        return drafts, parents[0] if parents else self._fixed_parents

    def fetch_drafts(self, sequence: int) -> None:
        """Queue the copy of the device's drafts after replay `sequence` on the current stream,
        which replays run on.
        """
        for device, host in self._copies:
            host.copy_(device, non_blocking=True)
        if self._copies and self._on_gpu:
            make: Any = torch.cuda.Event
            event = self._spare.pop() if self._spare else make()
            event.record()
            self._fetched.append((sequence, event))

    def wait(
        self,
        read: int,
        *,
        timeout: float | None,
        limit: float,
        mode: WaitMode,
    ) -> bool | None:
        """True once the drafts that were fetched after replays up to `read` have arrived; None if
        they have not within `timeout` seconds (None: no timeout but `limit`).

        TimeoutError after `limit` seconds; errors of the device are raised.
        """
        started = time.perf_counter()
        while self._fetched and self._fetched[0][0] <= read:
            sequence, event = self._fetched[0]
            if event.query():
                self._spare.append(self._fetched.popleft()[1])
                continue
            waited = time.perf_counter() - started
            if timeout is not None and waited >= timeout:
                return None
            if waited >= limit:
                raise TimeoutError(f"waited {limit:g} s for the drafts of replay {sequence}")
            if mode != "spin":
                time.sleep(BLOCK_SECONDS if mode == "block" else 0)
        return True


def _host_copy(tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    """Host memory for a copy of the tensor, filled with -1."""
    return torch.full(tuple(tensor.shape), -1, dtype=tensor.dtype, pin_memory=pinned)
