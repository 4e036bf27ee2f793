"""K MTP modules in a row, each with a KV of its own: module m drafts the m-th token.

As DeepSeek-V3 trains them (arXiv:2412.19437, section 2.2). Module m's row at position p pairs the
hidden state at p + m - 1 with the token at p + m. Of a verified step each module takes in what was
emitted, with the target's hidden states; behind that stand m - 1 rows of what the modules before
drafted, which the next step overwrites. So nothing is kept of a step but the KV.

Letters: R rows, W lanes of a row, N = R * W lanes, T tokens of a chunk, H hidden, K drafts,
D draft vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from graphengine.drafters.base import Prefilled, Verified
from graphengine.drafters.modules import ModuleDrafter
from graphengine.kernels import (
    DecodeLanes,
    Emitted,
    ModuleRun,
    PrefillLanes,
    Residual,
    advance_vanilla_draft,
    begin_module_draft,
    begin_vanilla_draft,
    combine_hidden,
    commit_draft,
    new_draft_chain,
)
from graphengine.models.dense import DecodeLaunch
from graphengine.models.mtp import MtpConfig, mtp_prefill


class VanillaDrafter(ModuleDrafter):
    """`MTP(k, style="vanilla")`: the checkpoint's first K modules.

    config      of the checkpoint's modules
    length      K, at most as many as there are
    vocabulary  int64 [D], ascending: the target ids that may be drafted; None: all
    """

    def __init__(self, config: MtpConfig, length: int, vocabulary: Tensor | None = None) -> None:
        assert 1 <= length <= config.modules, f"{length=} {config.modules=}"
        super().__init__(config.first(length), length, vocabulary)
        # The last module's row at p pairs the hidden state at p + K - 1 with the token at p + K.
        self.look_behind = length

    @property
    def lanes_of_row(self) -> int:
        # The last module's are the widest.
        return vanilla_lanes(self.length)

    def prepare(self, prefilled: Prefilled) -> None:
        assert prefilled.hidden is not None, "a module reads hidden states"
        chunk, hidden, following = prefilled.chunk, prefilled.hidden, prefilled.following
        runs = [self._prefill(index, prefilled, following, hidden) for index in range(self.length)]
        # As behind a step that fed the prompt's last token. No PDL: torch's kernels stand between.
        last = prefilled.last_lane(chunk.token)
        emitted = Emitted(
            token_N=prefilled.token,
            count_R=(prefilled.final != 0).to(torch.int32),
            lanes=last,
            hidden=hidden.index_select(0, chunk.last),
        )
        drafted = runs[0].index_select(0, chunk.last)
        self._draft(emitted, last, last, None, drafted, self._launch._replace(pdl=False))

    def propose(self, verified: Verified) -> None:
        step, lanes, launch = verified.step, verified.lanes, self._launch
        emitted = Emitted(step.token_N, step.count_R, lanes, verified.hidden, self._target_eps)
        residual = self._new_stream(lanes.slot.numel())
        first = begin_module_draft(
            step.token_N,
            step.count_R,
            lanes,
            verified.hidden,
            self._fusions[0],
            hidden_eps=self._target_eps,
            residual=residual,
            pdl=launch.pdl,
        )
        several = launch._replace(tokens_per_row=1 + verified.drafts)
        hidden = self._run(0, first.combined, residual, first.lanes, several)
        if verified.drafts:
            self._draft(emitted, first.lanes, first.rows, first.source, hidden, launch)
        else:
            self._take_in(emitted, launch)

    def _prefill(
        self, index: int, prefilled: Prefilled, following: Tensor, hidden: Tensor
    ) -> Tensor:
        """Module `index` for a chunk: its output [T, H]."""
        chunk, start = _shifted(prefilled.chunk, index)
        attend = partial(
            prefilled.attention,
            scale=self.config.dense.attention_scale,
            query_start_P1=chunk.query_start,
            position_P=start,
        )
        combined = combine_hidden(following, chunk.slot, hidden, None, self._fusions[index])
        return mtp_prefill(
            self._modules[index],
            combined,
            chunk,
            self._kv[index],
            self._block_table,
            self._context,
            attend,
            pdl=self._launch.pdl,
        )

    def _take_in(self, emitted: Emitted, launch: DecodeLaunch) -> None:
        """What was emitted, into the KV of all modules but the first."""
        for index in range(1, self.length):
            residual = self._new_stream(emitted.token_N.numel())
            taken = begin_vanilla_draft(
                emitted, self._fusions[index], module=index + 1, residual=residual, pdl=launch.pdl
            )
            self._run(index, taken.combined, residual, taken.lanes, launch)

    def _draft(
        self,
        emitted: Emitted,
        lanes: DecodeLanes,
        rows: DecodeLanes,
        source: Tensor | None,
        hidden: Residual | Tensor,
        launch: DecodeLaunch,
    ) -> None:
        """Draft from the first module's run, whose output is `hidden`, and run the others.

        lanes   of that run
        rows    the last of each row's
        source  int32 [R]: which of them that is; None for a lane a row
        """
        count = emitted.count_R.numel()
        width = emitted.token_N.numel() // count
        chain = new_draft_chain(
            count,
            self.length,
            self.config.dense.hidden_size,
            dtype=self._modules[0].projection.dtype,
            device=emitted.token_N.device,
        )
        for index in range(1, self.length):
            tiles = self._head.tiles(hidden, lanes, launch, ahead=index + 1)
            residual = self._new_stream(count * (width + index))
            following = advance_vanilla_draft(
                ModuleRun(tiles, rows, source, hidden, self.config.dense.norm_eps),
                emitted,
                chain,
                self._fusions[index],
                self._draft_tokens,
                module=index + 1,
                residual=residual,
                pdl=launch.pdl,
            )
            lanes, rows, source, combined = following
            several = launch._replace(tokens_per_row=width + index)
            hidden = self._run(index, combined, residual, lanes, several)
        commit_draft(
            self._head.tiles(hidden, lanes, launch, ahead=self.length + 1),
            rows,
            self._draft_tokens,
            index=self.length - 1,
            limit=self._limit,
            source_R=source,
            pdl=launch.pdl,
        )


def vanilla_lanes(length: int) -> int:
    """Lanes of a row in the last of `length` modules: W that emit, and its chain behind them."""
    return 2 * length


def _shifted(chunk: PrefillLanes, shift: int) -> tuple[PrefillLanes, Tensor]:
    """The chunk `shift` positions earlier, its lanes below 0 padded, and int32 [1]: the position of
    its first live lane.
    """
    position, end = chunk.position - shift, chunk.query_start[1:]
    below = (-position[:1]).clamp(min=0)
    shifted = chunk._replace(
        slot=chunk.slot.where(position >= 0, -1),
        position=position,
        query_start=torch.cat([torch.minimum(below, end), end]),
    )
    return shifted, position[:1].clamp(min=0)
