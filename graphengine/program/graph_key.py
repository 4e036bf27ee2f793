"""The key of each graph that an engine captures.

A key is data. Its name is for people (reports, files, counters); nothing parses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple, get_args

from graphengine.buckets import BucketLadder
from graphengine.host.step_plan import PrefillChunk
from graphengine.requests.request import Request

Sampler = Literal["fast", "full"]
"""`fast`: greedy or by temperature, folded into lm_head. `full`: also top-k, top-p, min-p and every
other option on a request's logits."""

PrefillKind = Literal["fast", "full", "prompt"]
"""`fast`: for requests without options on their logits. `full`: for others. `prompt`: for requests
that ask for log-probabilities of their prompts."""


def samplers(*, relaxed: bool) -> tuple[Sampler, ...]:
    """The samplers to capture decode graphs with; only `full` if relaxed, as that reads logits."""
    return ("full",) if relaxed else get_args(Sampler)


GraphKind = Literal["prefill", "decode"]


class GraphKey(NamedTuple):
    """One captured graph.

    kind     "prefill" feeds a prompt's chunk, "decode" advances rows
    size     tokens of a prefill bucket, or rows of a decode bucket
    drafts   drafts that a decode graph verifies in each row
    variant  sampler of a decode graph; for a prefill its `PrefillKind`, or "note" for tokens whose
             KV already exists
    steps    decode steps that one launch of the graph runs in a row
    """

    kind: GraphKind
    size: int
    drafts: int = 0
    variant: Literal["fast", "full", "prompt", "note"] = "fast"
    steps: int = 1

    @property
    def name(self) -> str:
        """Its name in reports and files: "decode/8/k3/fast", "decode/8/x16/fast" (16 steps a
        launch), "prefill/64", "prefill/64/note".
        """
        parts = [self.kind, str(self.size)]
        if self.drafts:
            parts.append(f"k{self.drafts}")
        if self.steps > 1:
            parts.append(f"x{self.steps}")
        if self.kind == "decode" or self.variant != "fast":
            parts.append(self.variant)
        return "/".join(parts)

    @property
    def counter(self) -> str:
        """The name of the counter of its replays."""
        return f"replays/{self.name}"


@cache
def decode_key(rows: int, drafts: int = 0, sampler: Sampler = "fast", steps: int = 1) -> GraphKey:
    """The decode graph of `rows` rows that verifies `drafts` drafts of each in a step."""
    return GraphKey("decode", rows, drafts, sampler, steps)


def prefill_key(tokens: int, kind: PrefillKind = "fast") -> GraphKey:
    """The graph that feeds up to `tokens` tokens; every kind samples with all filters."""
    return GraphKey("prefill", tokens, variant=kind)


def note_key(tokens: int) -> GraphKey:
    """The graph that notes up to this many prompt tokens whose KV already exists."""
    return GraphKey("prefill", tokens, variant="note")


def _prefill_kind(request: Request) -> PrefillKind:
    """The kind of prefill graph that the request needs."""
    if request.job.processing is None:
        return "fast"
    return "full" if request.prompt_logprobs is None else "prompt"


def chunk_key(
    chunk: PrefillChunk, ladder: BucketLadder, packed: Sequence[PrefillChunk] = ()
) -> GraphKey:
    """The graph for a chunk and those packed with it, among the captured token buckets."""
    if chunk.noted:
        return note_key(ladder.sizes[-1])
    tokens = chunk.count + sum(other.count for other in packed)
    return prefill_key(ladder.pick(tokens), _prefill_kind(chunk.request))
