"""Drafts the tokens that followed the longest match of the last tokens, in the request's text or a
corpus.

It drafts only as many tokens as the match supports, so a step feeds fewer tokens where little is
known. As in SuffixDecoding (G. Oliaro et al., arXiv:2411.04975), a match of n tokens supports
`factor` times n drafts. A turn's text begins with the earlier turns of its session.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import Drafter, DraftSetting, FieldSizes, Prefilled, Verified
from graphengine.drafters.needs import DraftNeeds
from graphengine.drafters.ngram import history_fields
from graphengine.drafters.suffix.corpus import read_corpus
from graphengine.drafters.target import Target
from graphengine.kernels.draft.ngram import ngram_prompt, ngram_propose
from graphengine.kernels.draft.suffix import suffix_propose
from graphengine.kernels.step.state import DecodeLanes
from graphengine.speculative import Suffix


class SuffixDrafter(Drafter):
    """`Suffix(k, ...)`. `suffix_unmatched` counts the proposals of a slot without a match.

    length     K
    supported  int32 [M + 1], on the CPU, as in `suffix_propose`
    corpus     int32 [C], on the CPU; None: there is none
    """

    def __init__(self, length: int, supported: Tensor, corpus: Tensor | None) -> None:
        self.needs = DraftNeeds(length=length, notes=True, withholds=True)
        self._supported, self._corpus = supported, corpus

    def table_bytes(self, max_seq_len: int) -> int:
        return sum(table.nbytes for table in (self._supported, self._corpus) if table is not None)

    def fields(self, sizes: FieldSizes) -> list[Field]:
        return history_fields(sizes, "suffix_unmatched")

    def counters(self) -> dict[str, int]:
        return {"suffix/unmatched": int(self._unmatched.sum())}

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        buffers = setting.buffers
        self._history = buffers["token_history"]
        self._unmatched = buffers["suffix_unmatched"]
        self._draft_tokens = buffers["draft_tokens"]
        self._supported = self._supported.to(buffers.device)
        if self._corpus is not None:
            self._corpus = self._corpus.to(buffers.device)
        self._pdl = setting.launch.pdl

    def prepare(self, prefilled: Prefilled) -> None:
        self.note(prefilled)
        # As after a step that fed the prompt's last token. No PDL: torch kernels run in between.
        emitted = (prefilled.final != 0) & (prefilled.token >= 0)
        lanes = prefilled.last_lane(prefilled.chunk.token)
        self._search(prefilled.token, emitted.to(torch.int32), lanes, pdl=False)

    def note(self, noted: Prefilled) -> None:
        ngram_prompt(
            self._history,
            noted.chunk,
            noted.token,
            noted.final,
            self._draft_tokens,
            max_n=1,
            num_speculative_tokens=0,
        )

    def propose(self, verified: Verified) -> None:
        step, lanes = verified.step, verified.lanes
        if verified.drafts:
            self._search(step.token_N, step.count_R, lanes, pdl=self._pdl)
            return
        ngram_propose(
            self._history,
            step.token_N,
            step.count_R,
            lanes,
            self._draft_tokens,
            max_n=1,
            num_speculative_tokens=0,
            pdl=self._pdl,
        )

    def _search(self, token_N: Tensor, count_R: Tensor, lanes: DecodeLanes, *, pdl: bool) -> None:
        suffix_propose(
            self._history,
            self._corpus,
            self._supported,
            token_N,
            count_R,
            lanes,
            self._draft_tokens,
            unmatched_S=self._unmatched,
            pdl=pdl,
        )


def supported_drafts(length: int, factor: float, most: int) -> Tensor:
    """int32 [most + 1]: the drafts that a match of each length supports, at most `length`."""
    counts = [min(length, math.floor(factor * matched)) for matched in range(most + 1)]
    return torch.tensor(counts, dtype=torch.int32)


def make_suffix(options: Suffix, target: Target) -> Drafter:
    """The drafter, with its corpus read."""
    corpus = None
    if options.corpus is not None:
        corpus = read_corpus(options.corpus, target.checkpoint, target.model.vocab_size)
    supported = supported_drafts(options.k, options.factor, options.max_match)
    return SuffixDrafter(options.k, supported, corpus)
