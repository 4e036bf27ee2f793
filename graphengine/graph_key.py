"""Which graph: the key of each one that an engine captures.

A key is data. Its name is made for people (reports, files, counters), and nothing reads it back.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Sampler = Literal["fast", "full"]
"""`fast`: greedy or by temperature, folded into lm_head. `full`: top-k, top-p and min-p as well,
and all else that a request asks of its logits."""

PrefillKind = Literal["fast", "full", "prompt"]
"""`fast`: of requests that ask nothing of their logits. `full`: of others. `prompt`: of those that
ask for log-probabilities of their prompts."""

GraphKind = Literal["prefill", "decode", "draft"]


class GraphKey(NamedTuple):
    """One captured graph.

    kind     "prefill" takes in a prompt's chunk, "decode" advances rows, "draft" is a drafter's own
             graph, which runs after the decode graph of the same rows and drafts
    size     tokens of a prefill bucket, or rows of another
    drafts   of each row that a decode graph verifies
    variant  a decode's sampler, or what a prefill does: its `PrefillKind`, or "note" for tokens
             whose KV is there already
    """

    kind: GraphKind
    size: int
    drafts: int = 0
    variant: Literal["fast", "full", "prompt", "note"] = "fast"

    @property
    def name(self) -> str:
        """As reports and files call it: "decode/8/k3/fast", "prefill/64", "prefill/64/note"."""
        parts = [self.kind, str(self.size)]
        if self.drafts or self.kind == "draft":
            parts.append(f"k{self.drafts}")
        if self.kind == "decode" or (self.kind == "prefill" and self.variant != "fast"):
            parts.append(self.variant)
        return "/".join(parts)

    @property
    def publishes(self) -> bool:
        """Whether it writes a record that the host waits for."""
        return self.kind != "draft"


def decode_key(rows: int, drafts: int = 0, sampler: Sampler = "fast") -> GraphKey:
    """The decode graph of `rows` rows that verifies `drafts` drafts of each."""
    return GraphKey("decode", rows, drafts, sampler)


def draft_key(rows: int, drafts: int) -> GraphKey:
    """The drafter's own graph after that of `decode_key`, where it has one."""
    return GraphKey("draft", rows, drafts)


def prefill_key(tokens: int, kind: PrefillKind = "fast") -> GraphKey:
    """The graph that takes in up to `tokens` tokens; that of each kind has all filters."""
    return GraphKey("prefill", tokens, variant=kind)


def note_key(tokens: int) -> GraphKey:
    """The graph that notes up to so many tokens of a prompt whose KV is there."""
    return GraphKey("prefill", tokens, variant="note")
