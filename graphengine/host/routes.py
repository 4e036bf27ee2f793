"""Expert routes on the host: mailboxes of the experts that tokens took, and the table of experts
that tokens are to take. Codes of frames come in a mailbox of the same layout.

`kernels/experts/records.py` has the layouts. Only the items that a replay has written are read; the
replay's record in the mailbox of tokens, and its chunk, tell which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphengine.buckets import Mailbox
from graphengine.buckets.mailbox import TAG_MASK, Payloads
from graphengine.host.logprobs import PartialMailbox
from graphengine.host.step_plan import Replay
from graphengine.kernels.experts.records import route_items
from graphengine.kernels.step.record import EPOCH_MASK, EPOCH_SHIFT, unpack_state
from graphengine.models.weights import RoutedExperts
from graphengine.requests.job import Job
from graphengine.requests.request import Request
from graphengine.requests.routes import RecordedRoutes


class RouteMailbox(Mailbox):
    """A ring whose entries and tags match those of the engine's mailbox of tokens.

    items  items of a lane
    ids    (L, k): a token has the ids of k chosen experts in each of L layers
    """

    def __init__(
        self,
        entries: int,
        lanes: int,
        items: int,
        ids: tuple[int, int],
        *,
        device: torch.device,
        words: torch.Tensor | None = None,
    ) -> None:
        super().__init__(entries, lanes, items, device=device, words=words)
        self._shape = ids
        self._of_token = route_items(*self._shape)
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._ids: NDArray[np.int16] = np.zeros(0, np.int16)

    def wait_ids(
        self, sequence: int, counts: Sequence[int], **how: Any
    ) -> NDArray[np.int16] | None:
        """The ids [lanes, tokens, L, k]; lane i has `counts[i]` tokens, and ids past them are
        undefined. Waits like `Mailbox.wait`: None if something has not arrived in time.
        """
        self._counts = np.asarray(counts)
        if not self._counts.any():
            return np.zeros((len(counts), 0, *self._shape), np.int16)
        return None if self.wait(sequence, len(counts), **how) is None else self._ids

    def ready(self, sequence: int, lanes: int) -> bool:
        """True if everything written has arrived."""
        return self._take(sequence, lanes) is not None

    def _take(self, sequence: int, lanes: int) -> Payloads | None:
        width, tag = int(self._counts.max()), sequence & TAG_MASK
        entry = self._items[sequence % self.entries, :lanes, : width * self._of_token]
        last = int(self._counts.nonzero()[0][-1])
        if int(entry[last, self._counts[last] * self._of_token - 1]) >> 32 != tag:
            # Checking the last item first avoids copying a chunk again and again while it arrives.
            return None
        # Copied first, then checked, as in the mailbox of tokens.
        halves = entry.copy().view(np.uint32).reshape(lanes, width, self._of_token, 2)
        written = np.arange(width) < self._counts[:, None]
        if (halves[..., 1] != tag)[written].any():
            return None
        ids = np.ascontiguousarray(halves[..., 0]).view(np.int16)
        layers, top_k = self._shape
        found = ids.reshape(lanes, width, -1)[..., : layers * top_k]
        self._ids = found.reshape(lanes, width, layers, top_k)
        return []


class RouteTable:
    """The records that slots replay: `tensor`, int16 [S, P, L, k], which the device only reads.

    Pinned for a CUDA device. Replays in flight may read a slot's record while the next request's is
    written: the tokens of a request that has left the slot are discarded.

    written  slots whose records the last `updates` has written
    """

    def __init__(
        self, slots: int, positions: int, routed: RoutedExperts, *, device: torch.device
    ) -> None:
        self.tensor = torch.zeros(
            (slots, positions, routed.layers, routed.chosen),
            dtype=torch.int16,
            pin_memory=device.type == "cuda",
        )
        self._records: NDArray[np.int16] = self.tensor.numpy()
        self._held: list[Request | None] = [None] * slots
        self.written: list[int] = []

    def updates(self, slots: Sequence[Request | None]) -> dict[str, Any]:
        """Write the requests' records into the table; returns the fields to load."""
        lengths = []
        self.written.clear()
        for slot, request in enumerate(slots):
            given = None if request is None else request.job.given_routes
            length = 0 if given is None else len(given)
            if given is not None and self._held[slot] is not request:
                self._records[slot, :length] = given
                self.written.append(slot)
            self._held[slot] = request
            lengths.append(length)
        return {"routing_len": lengths}

    def record(self, slot: int, length: int) -> NDArray[np.int16]:
        """The ids of the first `length` positions of a slot, flattened; a view."""
        return self._records[slot, :length].reshape(-1)

    def put(self, slot: int, start: int, ids: NDArray[np.int16]) -> None:
        """Write part of another table's `record`, from the id at index `start` on."""
        self._records[slot].reshape(-1)[start : start + len(ids)] = ids


class Routing:
    """An engine's records of experts: the mailboxes of new tokens and of prompts, and the table.

    In `prompts`, a lane is a token of a prompt's chunk.
    """

    def __init__(self, tokens: RouteMailbox, prompts: RouteMailbox, table: RouteTable) -> None:
        self.tokens, self.prompts, self.table = tokens, prompts, table

    def clear(self) -> None:
        """Forget everything; only with no replay in flight."""
        self.tokens.clear()
        self.prompts.clear()

    def wait(self, replay: Replay, record: Payloads, **how: Any) -> bool:
        """Give the requests of a replay with this record the experts that their tokens took. Call
        it before they get the tokens; it may be called again. Waits like `Mailbox.wait`: False if
        something has not arrived in time.
        """
        lanes = zip(replay.requests, replay.epochs, record, strict=True)
        live = [is_live(*lane) for lane in lanes]
        if replay.chunk is not None:
            return self._wait_prompts(replay, live, how)
        counts = [
            unpack_state(items[-1]).emitted if lives else 0
            for items, lives in zip(record, live, strict=True)
        ]
        found = self.tokens.wait_ids(replay.sequence, counts, **how)
        if found is None:
            return False
        for request, count, ids in zip(replay.requests, counts, found, strict=True):
            if count:
                # The step fed the request's last token, read before, and the accepted drafts.
                start = request.job.prompt_len + len(request.job.tokens) - 1
                _routes_of(request).put(start, ids[:count])
        return True

    def _wait_prompts(self, replay: Replay, live: Sequence[bool], how: dict[str, Any]) -> bool:
        """Give the requests of a prefill's `live` chunks the experts that their prompts took; False
        if they have not arrived in time.
        """
        # A chunk that is only noted has not run through the layers.
        counts = [
            int(lives and not chunk.noted)
            for chunk, lives in zip(replay.chunks, live, strict=True)
            for _ in range(chunk.count)
        ]
        if not any(counts):
            return True
        found = self.prompts.wait_ids(replay.sequence, counts, **how)
        if found is None:
            return False
        lane = 0
        for chunk, lives in zip(replay.chunks, live, strict=True):
            if lives:
                ids = found[lane : lane + chunk.count, 0]
                _routes_of(chunk.request).put(chunk.start, ids)
            lane += chunk.count
        return True


def is_live(request: Request, epoch: int, items: tuple[int, ...]) -> bool:
    """Whether the lane's record is of this epoch of a request that has not ended."""
    if request.finish_reason is not None:
        return False
    # A chunk that is not a prompt's last emits nothing, but its record has the slot's epoch.
    return items[-1] >> EPOCH_SHIFT == epoch & EPOCH_MASK


def _routes_of(request: Request) -> RecordedRoutes:
    routes = request.job.routes
    assert routes is not None, f"{request!r} keeps no experts"
    return routes


class GivenCodeTable:
    """The codes that requests give: `tensor`, int16 [S, P, K], which the device only reads.

    Pinned for a CUDA device. As in `RouteTable`, replays in flight may read what is overwritten.
    """

    def __init__(self, slots: int, positions: int, places: int, *, device: torch.device) -> None:
        self.tensor = torch.full(
            (slots, positions, places), -1, dtype=torch.int16, pin_memory=device.type == "cuda"
        )
        self._codes: NDArray[np.int16] = self.tensor.numpy()
        self._held: list[Request | None] = [None] * slots

    def updates(self, slots: Sequence[Request | None]) -> list[int]:
        """Write the requests' codes into the table; returns where each slot's frames end."""
        ends = []
        for slot, request in enumerate(slots):
            given = None if request is None else request.job.given_codes
            end = 0
            if request is not None and given is not None:
                start = request.job.prompt_len
                end = start + len(given)
                if self._held[slot] is not request:
                    self._codes[slot, start:end] = given
            self._held[slot] = request
            ends.append(end)
        return ends


class FrameCodes:
    """The codes of frames, in the layout of experts' ids with K layers of one id each; and their
    log-probabilities, K items for each lane that `kernels/frames/logprobs.py` describes.

    given  the codes that requests give
    """

    def __init__(
        self, codes: RouteMailbox, logprobs: PartialMailbox, given: GivenCodeTable
    ) -> None:
        self._codes, self._logprobs, self.given = codes, logprobs, given

    @property
    def tensor(self) -> torch.Tensor:
        """The memory of the codes, which the steps write."""
        return self._codes.tensor

    @property
    def logprobs_tensor(self) -> torch.Tensor:
        """The memory of their log-probabilities, which the steps write."""
        return self._logprobs.tensor

    def clear(self) -> None:
        """Forget everything; only with no replay in flight."""
        self._codes.clear()
        self._logprobs.clear()

    def wait(self, replay: Replay, record: Payloads, **how: Any) -> bool:
        """Give the requests of a replay with this record the codes of their frames, and the
        log-probabilities that they want. Call it before they get the frames' tokens; it may be
        called again. Waits like `Mailbox.wait`: False if something has not arrived in time.
        """
        lanes = zip(replay.requests, replay.epochs, record, strict=True)
        counts = [unpack_state(lane[-1][-1]).emitted if is_live(*lane) else 0 for lane in lanes]
        if replay.chunk is not None and replay.chunk.noted:
            return True
        found = self._codes.wait_ids(replay.sequence, counts, **how)
        if found is None:
            return False
        jobs = [request.job for request in replay.requests]
        for job, count, ids in zip(jobs, counts, found, strict=True):
            if count and job.codes is not None:
                # The tokens that were read have frames; what follows is from an earlier call.
                del job.codes[len(job.tokens) :]
                job.codes.append(tuple(ids[0, :, 0].tolist()))
        return self._wait_logprobs(replay.sequence, jobs, counts, how)

    def _wait_logprobs(
        self, sequence: int, jobs: Sequence[Job], counts: Sequence[int], how: dict[str, Any]
    ) -> bool:
        """Give the lanes with a frame the log-probabilities that they want; False if they have not
        arrived in time.
        """
        wants = [
            (lane, job.codes_logprobs, job.frame_size)
            for lane, (job, count) in enumerate(zip(jobs, counts, strict=True))
            if count and job.codes_logprobs is not None
        ]
        if not wants:
            return True
        self._logprobs.written = [(lane, [0], size) for lane, _, size in wants]
        payloads = self._logprobs.wait(sequence, len(jobs), **how)
        if payloads is None:
            return False
        for (lane, kept, _), bits in zip(wants, payloads, strict=True):
            del kept[len(jobs[lane].tokens) :]
            kept.append(tuple(np.array(bits, np.uint32).view(np.float32).tolist()))
        return True
