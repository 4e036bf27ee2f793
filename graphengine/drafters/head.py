"""A drafter's logits, from all of lm_head or the rows of it that are kept, and its drafts.

A draft is drawn as the target will draw the token at its position: with the request's temperature
and with the noise of that position. Where both agree on the distribution they agree on the token,
at any temperature. Verification asks only whether they did, so a draft's odds do not matter.

Graphs of the full sampler, and those of prompts, also draw a draft through the request's filters,
after its allowed ids, biases and penalties: the target does, and a token that it filters out is
never accepted. Penalties count emitted tokens, without the chain's own drafts. Bad words are not
applied. Neither are grammar masks: the host makes the mask after a token only once it has read that
token, and both the newest token and the drafts come from this very replay.

Source: the Gumbel coupling of M. Daliri, C. Musco, A. T. Suresh, "Coupling without Communication
and Drafter-Invariant Speculative Decoding", arXiv:2408.07978.

Letters: N lanes, H hidden, V vocabulary of the target, D draft vocabulary, C tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.drafters.base import DraftSetting
from graphengine.kernels.draft.defer import defer_filtered
from graphengine.kernels.draft.draft import DraftTiles
from graphengine.kernels.draft.spread import spread_logits
from graphengine.kernels.draft.trees.top_drafts import TopDrafts, top_drafts
from graphengine.kernels.linear.call import AnyWeight, LinearCall
from graphengine.kernels.linear.epilogues import SampleTiles, StoreLogits
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import empty_packed, select_rows
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.logits.logits import process_logits
from graphengine.kernels.logits.logits_triton import (
    USES_BIAS,
    USES_COUNTS,
    USES_MASK,
    USES_REPETITION,
)
from graphengine.kernels.sample.sampling import sample_tiles
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.launches import DecodeLaunch, RankGroup
from graphengine.models.linears import WeightForms, refill
from graphengine.models.vocabulary import vocabulary_of

Hidden = Residual | Tensor
"""A stream scaled for its final norm, or plain rows."""

# The processing that the logits of drafts get.
_STEPS = USES_MASK | USES_BIAS | USES_REPETITION | USES_COUNTS


def head_bytes(forms: WeightForms, rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of this many rows of lm_head and of their ids, int32."""
    form = forms.get("lm_head")
    if form is None or not rows:
        return rows * (hidden * dtype.itemsize + 4)
    # `select_rows` leaves each row scales of its own.
    kind = form.format._replace(rows=1)
    head = empty_packed(form._replace(format=kind), (rows, hidden), swiglu=False, device="meta")
    return head.nbytes + 4 * rows


def trimmed(
    weight: AnyWeight, ids: Tensor | None, device: torch.device
) -> tuple[AnyWeight, Tensor | None]:
    """Copies of the rows `ids` of an lm_head, and their `token_ids`, on its device. Without `ids`
    the lm_head itself, and None.

    ids  int64 [D], ascending
    """
    if ids is None:
        return weight, None
    ids = ids.to(device)
    rows = weight.index_select(0, ids) if isinstance(weight, Tensor) else select_rows(weight, ids)
    return rows, ids.int()


def trim_again(rows: AnyWeight, weight: AnyWeight, ids: Tensor | None) -> None:
    """Refill the copies that `trimmed` made, if it made any, with the rows as they are now."""
    if ids is None:
        return
    device = weight.device if isinstance(weight, Tensor) else weight.codes.device
    made, _ = trimmed(weight, ids, device)
    held, found = ([each] if isinstance(each, Tensor) else each.tensors for each in (rows, made))
    refill(held, found)


class DraftHead:
    """lm_head with the fast sampler folded in.

    weight    [D, H], the rows of the draft vocabulary
    token_ids int32 [D], ascending: the token of each row; None: row v is token v
    setting   has the target's sampling parameters and options on logits, which apply
    linear    the name of its product, without its weight's format
    eps       of the norm that the stream fed to it is scaled for
    cap       soft cap of its logits; 0: none
    group     the ranks that share its rows; None: there is one
    bias      of the rows; None: they have none
    """

    def __init__(
        self,
        weight: AnyWeight,
        token_ids: Tensor | None,
        setting: DraftSetting,
        *,
        linear: str,
        eps: float,
        cap: float,
        group: RankGroup | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self._vocabulary = vocabulary_of(weight, group, token_ids, bias)
        self._sampling, self._options = setting.sampling, setting.options
        self._linear, self._eps, self._cap = linear, eps, cap
        self._token_ids, self._tokens = token_ids, self._options.counts.shape[1]

    def top(
        self,
        hidden: Hidden,
        lanes: DecodeLanes,
        launch: DecodeLaunch,
        *,
        count: int,
        ahead: int,
        filtered: bool = False,
    ) -> TopDrafts:
        """The `count` best drafts `ahead` positions after each lane; arguments as in `tiles`.

        Tokens that filters leave out rank after those that they keep.
        """
        logits, token_ids = self.logits(hidden, lanes, launch), self._token_ids
        slot, position = lanes.slot, lanes.position
        if filtered:
            logits = self._processed(logits, lanes, launch)
            token_ids = None
            defer_filtered(logits, slot, position, self._sampling, ahead=ahead, pdl=launch.pdl)
        return top_drafts(
            logits,
            slot,
            position,
            self._sampling,
            count=count,
            ahead=ahead,
            token_ids=token_ids,
            pdl=launch.pdl,
        )

    def _call(self, hidden: Hidden, lanes: DecodeLanes, launch: DecodeLaunch) -> LinearCall:
        head, bias = self._vocabulary.head, self._vocabulary.bias
        return launch.call(self._linear, hidden, head, lanes.slot, eps=self._eps, bias=bias)

    def logits(self, hidden: Hidden, lanes: DecodeLanes, launch: DecodeLaunch) -> Tensor:
        """Float32 [N, D], of all ranks; `hidden` as in `tiles`. Padded lanes hold anything."""
        call, epilogue = self._call(hidden, lanes, launch), StoreLogits(cap=self._cap)
        return self._vocabulary.logits(linear(call, epilogue))

    def tiles(
        self,
        hidden: Hidden,
        lanes: DecodeLanes,
        launch: DecodeLaunch,
        *,
        ahead: int,
        filtered: bool,
    ) -> DraftTiles:
        """The draft `ahead` positions after each lane, by tile.

        hidden    [N, H] after the final norm, or the stream scaled for it
        filtered  whether the request's filters and options on logits count
        """
        if filtered:
            return self._filtered(hidden, lanes, launch, ahead)
        sampling = SampleTiles(
            lanes.position,
            self._sampling,
            ahead=ahead,
            token_ids=self._vocabulary.token_ids,
            cap=self._cap,
        )
        best, health = linear(self._call(hidden, lanes, launch), sampling)
        return DraftTiles(*self._vocabulary.candidates(best, health))

    def _filtered(
        self, hidden: Hidden, lanes: DecodeLanes, launch: DecodeLaunch, ahead: int
    ) -> DraftTiles:
        logits = self.logits(hidden, lanes, launch)
        return self.drawn(logits, lanes, launch, ahead=ahead)

    def drawn(
        self, logits: Tensor, lanes: DecodeLanes, launch: DecodeLaunch, *, ahead: int
    ) -> DraftTiles:
        """The drafts `ahead` positions after each lane, as the target's full sampler draws tokens.

        logits  float32 [N, D], which may be overwritten. The launch before may still be writing
                them, but not `lanes`
        """
        processed = self._processed(logits, lanes, launch)
        drawn = sample_tiles(
            processed, lanes.slot, lanes.position, self._sampling, ahead=ahead, pdl=launch.pdl
        )
        return DraftTiles(*drawn)

    def _processed(self, logits: Tensor, lanes: DecodeLanes, launch: DecodeLaunch) -> Tensor:
        """Logits over the target's vocabulary, processed as the target's are."""
        if self._token_ids is not None or logits.shape[1] != self._tokens:
            logits = spread_logits(
                logits, self._token_ids, lanes.slot, vocabulary=self._tokens, pdl=launch.pdl
            )
        process_logits(logits, lanes, self._options, steps=_STEPS, pdl=launch.pdl)
        return logits
