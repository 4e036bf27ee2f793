"""Drafts the tokens that followed an earlier occurrence of the request's last tokens.

Prompt lookup decoding, matched on the device: nothing is computed but the search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import Drafter, DraftSetting, FieldSizes, Prefilled, Verified
from graphengine.drafters.needs import DraftNeeds
from graphengine.kernels.draft.ngram import ngram_prompt, ngram_propose


class NGramDrafter(Drafter):
    """`NGram(k, max_n)`. `ngram_unmatched` counts the proposals of a slot without a match.

    length  K
    max_n   tokens of the longest suffix that is looked for
    """

    def __init__(self, length: int, max_n: int) -> None:
        self.needs = DraftNeeds(length=length, notes=True)
        self.max_n = max_n

    def fields(self, sizes: FieldSizes) -> list[Field]:
        return history_fields(sizes, "ngram_unmatched")

    def counters(self) -> dict[str, int]:
        return {"ngram/unmatched": int(self._unmatched.sum())}

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        buffers = setting.buffers
        self._history = buffers["token_history"]
        self._unmatched = buffers["ngram_unmatched"]
        self._draft_tokens = buffers["draft_tokens"]
        self._pdl = setting.launch.pdl

    def prepare(self, prefilled: Prefilled) -> None:
        ngram_prompt(
            self._history,
            prefilled.chunk,
            prefilled.token,
            prefilled.final,
            self._draft_tokens,
            max_n=self.max_n,
            num_speculative_tokens=self.length,
            unmatched_S=self._unmatched,
        )

    def note(self, noted: Prefilled) -> None:
        # A noted chunk is never the last one, so this only takes it in.
        self.prepare(noted)

    def propose(self, verified: Verified) -> None:
        ngram_propose(
            self._history,
            verified.step.token_N,
            verified.step.count_R,
            verified.lanes,
            self._draft_tokens,
            max_n=self.max_n,
            num_speculative_tokens=self.length if verified.drafts else 0,
            unmatched_S=self._unmatched,
            pdl=self._pdl,
        )


def history_fields(sizes: FieldSizes, unmatched: str) -> list[Field]:
    """The tokens to search, and the counts of searches without a match, named `unmatched`."""
    int32 = torch.int32
    return [
        Field(
            name="token_history",
            shape=(sizes.slots, sizes.max_seq_len),
            dtype=int32,
            owner="device",
            meaning="the slot's tokens by position",
        ),
        Field(
            name=unmatched,
            shape=(sizes.slots,),
            dtype=int32,
            owner="device",
            meaning="proposals without a match",
        ),
    ]
