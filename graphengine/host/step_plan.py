"""What the scheduler decides about one step, as data: who runs, in which graph, what is copied.

A replay in flight is data, too: what the host remembers of it until its record is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphengine.requests.request import Phase, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """Prompt tokens `start .. start + count - 1` of one request; the last chunk samples a token.

    noted  whether their KV exists already: the tokens are then only noted, for kernels that read a
           prompt's tokens
    """

    request: Request
    start: int
    count: int
    noted: bool = False

    @property
    def final(self) -> bool:
        return self.start + self.count == self.request.job.prompt_len


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One launch: copies between pool and swap area, then a prefill replay, then a decode replay.

    `rows[i]` runs in decode row i, in epoch `epochs[i]`; `bucket` is the number of rows of the
    graph that serves them, 0 if no request decodes. `full` says whether one of them needs a graph
    of the full sampler. A plan swaps out or in, never both. The other flags say which host-owned
    fields differ from those of the previous plan; `masks_changed` is set with `guided`, otherwise
    it equals `options_changed`. In steady state, where nothing differs, every plan is the same
    object. `width` is the number of tokens that a decode row feeds. The decode replay runs `steps`
    steps of these rows; it is 1 where there is a prefill replay. The prefill replay feeds `prefill`
    and the chunks of other prompts that are `packed` with it. `guided` says whether it samples for
    a request whose next step waits until the host has read the token.
    """

    rows: tuple[Request, ...]
    bucket: int
    epochs: tuple[int, ...]
    width: int
    full: bool
    prefill: PrefillChunk | None
    swap_out: tuple[tuple[int, int], ...]
    swap_in: tuple[tuple[int, int], ...]
    rows_changed: bool
    slots_changed: bool
    tables_changed: bool
    options_changed: bool
    masks_changed: bool
    guided: bool = False
    steps: int = 1
    packed: tuple[PrefillChunk, ...] = ()

    @property
    def chunks(self) -> tuple[PrefillChunk, ...]:
        """All chunks of the prefill replay, in the order of their lanes."""
        return () if self.prefill is None else (self.prefill, *self.packed)


NOTHING = Plan(
    rows=(),
    bucket=0,
    epochs=(),
    width=1,
    full=False,
    prefill=None,
    swap_out=(),
    swap_in=(),
    rows_changed=False,
    slots_changed=False,
    tables_changed=False,
    options_changed=False,
    masks_changed=False,
)
"""The plan before the first one."""


def must_read(active: Iterable[Request]) -> bool:
    """Whether the next launch waits until the host has read what is in flight: all requests that
    run need their last tokens read before their next steps, and one of them has an unread token.

    So these requests stay in step with each other.
    """
    waits = False
    for request in active:
        if request.phase is Phase.PAUSED:
            continue
        if not request.job.guided:
            return False
        waits = waits or request.job.waits
    return waits


def sitting_out(requests: Iterable[Request]) -> int:
    """How many of the requests decode, but have no next step until the host has read their last."""
    jobs = (request.job for request in requests if request.phase is Phase.DECODE)
    return sum(job.can_sample and job.waits for job in jobs)


def samples_guided(rows: Sequence[Request], chunks: Sequence[PrefillChunk]) -> bool:
    """Whether a plan of these samples for a request whose tokens are read before its next step."""
    sampling = [*rows, *(chunk.request for chunk in chunks if chunk.final)]
    return any(request.job.guided for request in sampling)


@dataclass(kw_only=True, slots=True)
class Changes:
    """What the next plan changes, as `Plan` names it."""

    slots: bool = False
    tables: bool = False
    options: bool = False
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


def count_launch(plan: Plan) -> None:
    """Count the tokens that the plan's launch samples: in each step one for each row, and up to one
    more for each of its drafts.
    """
    steps = plan.steps
    if plan.width == 1:
        for request in plan.rows:
            job = request.job
            placement = job.placement
            assert placement is not None
            least, most = placement.least + steps, job.max_new_tokens
            placement.least = least if least < most else most
        return
    for request in plan.rows:
        request.job.placed.least += steps
        request.job.placed.in_doubt += steps * (plan.width - 1)


class Replay(NamedTuple):
    """One step in flight: lane i of its mailbox entry belongs to `requests[i]` in `epochs[i]`.

    A row emits up to `width` tokens: 1, and one more for each draft that was verified. A prefill
    fed `chunk`, and the chunks `packed` with it, a lane each; a decode ran in a bucket of `rows`. A
    `full` replay may have published log-probabilities. The mailbox is that of `rank`. Its launch
    runs `later` more steps after it.
    """

    sequence: int
    requests: tuple[Request, ...]
    epochs: tuple[int, ...]
    width: int
    rows: int = 0
    chunk: PrefillChunk | None = None
    full: bool = False
    rank: int = 0
    later: int = 0
    packed: tuple[PrefillChunk, ...] = ()

    @property
    def chunks(self) -> tuple[PrefillChunk, ...]:
        """The chunks of a prefill, in the order of its lanes."""
        return () if self.chunk is None else (self.chunk, *self.packed)

    def following(self) -> list[Replay]:
        """The later steps of its launch."""
        return [
            self._replace(sequence=self.sequence + step, later=self.later - step)
            for step in range(1, 1 + self.later)
        ]


def prefill_replay(plan: Plan, sequence: int) -> Replay:
    """The prefill replay of a plan that has one."""
    chunk = plan.prefill
    assert chunk is not None, "a plan without a prefill"
    requests = tuple(each.request for each in plan.chunks)
    epochs = tuple(request.job.placed.epoch for request in requests)
    full = chunk.request.job.processing is not None and not chunk.noted
    return Replay(sequence, requests, epochs, 1, chunk=chunk, full=full, packed=plan.packed)
