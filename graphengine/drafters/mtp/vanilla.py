"""K MTP modules in a row, each with its own KV: module m drafts the m-th token.

Module m's row at position p takes the token at p + m. After a verified step each module takes in
the emitted tokens; then come m - 1 rows of the previous modules' drafts, which the next step
overwrites. `MTP.feed` says which hidden state goes with the token:

chained  module m - 1's output for its row at p, down to the target's hidden state at p for the
         first module. DeepSeek-V3 trains its modules this way (arXiv:2412.19437, equations 21 to
         23), and transformers' `MtpModel` runs them so. The first row that a step takes in needs
         the previous module's output for the row before the step, which is therefore kept by slot,
         next to the KV.
target   the target's hidden state at p + m - 1 where that position is verified, as in
         TensorRT-LLM's vanilla MTP; the drafted rows are chained all the same. Only the KV is kept
         of a step.

With one module both are the same, and DeepSeek-V3, GLM-4.5 and MiMo-7B were published with only
one: no published checkpoint that is read here tells the rules apart.

Letters: S slots, R rows, W lanes of a row, N = R * W lanes, T tokens of a chunk, H hidden,
K drafts, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import DraftSetting, FieldSizes, Prefilled, Verified
from graphengine.drafters.head import Hidden
from graphengine.drafters.modules.base import ModuleDrafter
from graphengine.drafters.mtp.module import MtpModules, OpenMtp
from graphengine.drafters.needs import DraftNeeds
from graphengine.kernels.core.lanes import write_rows
from graphengine.kernels.draft.draft import combine_hidden, commit_draft
from graphengine.kernels.draft.vanilla import (
    Emitted,
    ModuleRun,
    Recycled,
    advance_vanilla_draft,
    begin_vanilla_draft,
    new_draft_chain,
)
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.launches import DecodeLaunch
from graphengine.speculative import Feed


class VanillaDrafter(ModuleDrafter):
    """`MTP(k, style="vanilla")`: the checkpoint's first K modules.

    modules  of the checkpoint
    length   K: as many as there are
    feed     which hidden states the modules after the first read
    """

    modules: MtpModules
    _opened: OpenMtp

    def __init__(self, modules: MtpModules, length: int, feed: Feed = "chained") -> None:
        assert length == modules.config.modules, f"{length=} {modules.config.modules=}"
        # The last module's row at p takes the token at p + K, and its launches are the widest.
        needs = DraftNeeds(
            tokens_after=length, own_lanes=vanilla_lanes(length), prompt_lanes=length
        )
        super().__init__(modules, length, needs)
        self._chained = feed == "chained" and length > 1
        self._kept: Tensor | None = None

    def fields(self, sizes: FieldSizes) -> list[Field]:
        if not self._chained:
            return []
        width = self.modules.config.hidden_size
        return [
            Field(
                name="module_hidden",
                shape=(sizes.slots, self.length - 1, width),
                dtype=sizes.dtype,
                owner="device",
                meaning="output of each module's last row whose token is true",
            ),
            Field(
                name="module_epoch",
                shape=(sizes.slots,),
                dtype=torch.int32,
                owner="device",
                meaning="stay that they belong to",
            ),
        ]

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        super().open(setting, cache)
        if self._chained:
            self._kept = setting.buffers["module_hidden"]
            self._kept_epoch = setting.buffers["module_epoch"]
            self._epoch = setting.buffers["epoch"]

    def prepare(self, prefilled: Prefilled) -> None:
        assert prefilled.hidden is not None, "a module reads hidden states"
        chunk, hidden, following = prefilled.chunk, prefilled.hidden, prefilled.following
        if self._kept is None:
            lowest = torch.zeros_like(chunk.last)
            runs = [
                self._prefill(index, prefilled, following, hidden, lowest)
                for index in range(self.length)
            ]
        else:
            runs = self._prefill_chained(prefilled, following, self._kept)
        # As after a step that fed the prompt's last token. No PDL: torch kernels run in between.
        last = prefilled.last_lane(chunk.token)
        emitted = Emitted(
            token_N=prefilled.token,
            count_R=(prefilled.final != 0).to(torch.int32),
            lanes=last,
            hidden=hidden.index_select(0, chunk.last),
        )
        drafted = runs[0].index_select(0, chunk.last)
        launch = replace(self._opened.launch, pdl=False)
        self._draft(emitted, last, last, None, drafted, launch, filtered=True)

    def propose(self, verified: Verified) -> None:
        step, lanes, opened = verified.step, verified.lanes, self._opened
        token_N, count_R, launch = step.token_N, step.count_R, opened.launch
        emitted = Emitted(token_N, count_R, lanes, verified.hidden, opened.target_eps)
        first, output = opened.take_in(token_N, count_R, lanes, verified.hidden, verified.drafts)
        hidden = output.normed
        if verified.drafts:
            self._draft(
                emitted,
                first.lanes,
                first.rows,
                first.source,
                hidden,
                launch,
                filtered=verified.filtered,
            )
        else:
            self._take_in(emitted, hidden, launch)

    def _prefill_chained(
        self, prefilled: Prefilled, following: Tensor, kept_SDH: Tensor
    ) -> list[Tensor]:
        """Run all modules on the chunks, each on the previous one's output; returns their outputs.

        For each module but the last it keeps the output of each chunk's last row. After a prompt's
        last chunk, drafting begins as if a step had fed the prompt's last token, so there it keeps
        the output of the row before that token.
        """
        assert prefilled.hidden is not None, "a module reads hidden states"
        chunk, final = prefilled.chunk, (prefilled.final != 0)[:, None]
        slot = chunk.slot_of_chunk.clamp(min=0)
        epoch, fed = self._epoch.index_select(0, slot), self._kept_epoch.index_select(0, slot)
        kept_PDH = kept_SDH.index_select(0, slot)
        # Before the first chunk there are only the rows of a reused prefix, or none.
        lowest = torch.where(fed == epoch, 0, chunk.start_of_chunk)
        runs, kept = [self._prefill(0, prefilled, following, prefilled.hidden, lowest)], []
        for index in range(1, self.length):
            hidden = chunk.preceded_by(runs[-1], kept_PDH[:, index - 1])
            last, newest = (rows.index_select(0, chunk.last) for rows in (hidden, runs[-1]))
            kept.append(torch.where(final, last, newest))
            runs.append(self._prefill(index, prefilled, following, hidden, lowest))
        write_rows(kept_SDH, chunk.slot_of_chunk, torch.stack(kept, dim=1))
        write_rows(self._kept_epoch, chunk.slot_of_chunk, epoch)
        return runs

    def _prefill(
        self, index: int, prefilled: Prefilled, following: Tensor, hidden: Tensor, lowest: Tensor
    ) -> Tensor:
        """Run module `index` on the chunks, without positions below each one's `lowest` [P];
        returns its output [T, H].
        """
        chunk, segments = _shifted(prefilled.chunk, index, lowest)
        attention = partial(prefilled.attention, **segments._asdict())
        token, fusion = prefilled.embedded(following, self._opened.fusions[index])
        combined = combine_hidden(token, chunk.slot, hidden, None, fusion)
        return self._opened.run_chunk(index, combined, chunk, attention)

    def _take_in(self, emitted: Emitted, hidden: Hidden, launch: DecodeLaunch) -> None:
        """Take the emitted tokens into the KV of all modules after the first, whose output is
        `hidden`.
        """
        recycled = None
        for index in range(1, self.length):
            residual = self._opened.new_stream(emitted.token_N.numel())
            if self._kept is not None:
                recycled = Recycled(hidden, self._kept, self._opened.config.output_eps)
            taken = begin_vanilla_draft(
                emitted,
                self._opened.fusions[index],
                module=index + 1,
                residual=residual,
                recycled=recycled,
                # The launch before may still be writing the recycled hidden state.
                pdl=launch.pdl and recycled is None,
            )
            hidden = self._opened.run(index, taken.combined, residual, taken.lanes, launch).normed

    def _draft(
        self,
        emitted: Emitted,
        lanes: DecodeLanes,
        rows: DecodeLanes,
        source: Tensor | None,
        hidden: Hidden,
        launch: DecodeLaunch,
        *,
        filtered: bool,
    ) -> None:
        """Draft from the first module's run, whose output is `hidden`, and run the others.

        lanes   of that run
        rows    the last lane of each row
        source  int32 [R]: the index of each row's last lane in `lanes`; None for a lane a row
        """
        count = emitted.count_R.numel()
        width = emitted.token_N.numel() // count
        chain = new_draft_chain(
            count,
            self.length,
            self.modules.config.hidden_size,
            dtype=self._opened.dtype,
            device=emitted.token_N.device,
        )
        for index in range(1, self.length):
            tiles = self._opened.head.tiles(
                hidden, lanes, launch, ahead=index + 1, filtered=filtered
            )
            residual = self._opened.new_stream(count * (width + index))
            following = advance_vanilla_draft(
                ModuleRun(tiles, rows, source, hidden, self._opened.config.output_eps),
                emitted,
                chain,
                self._opened.fusions[index],
                self._draft_tokens,
                module=index + 1,
                residual=residual,
                kept=self._kept,
                pdl=launch.pdl,
            )
            lanes, rows, source, combined = following
            several = replace(launch, tokens_per_row=width + index)
            hidden = self._opened.run(index, combined, residual, lanes, several).normed
        commit_draft(
            self._opened.head.tiles(
                hidden, lanes, launch, ahead=self.length + 1, filtered=filtered
            ),
            rows,
            self._draft_tokens,
            index=self.length - 1,
            limit=self._limit,
            source_R=source,
            pdl=launch.pdl,
        )


def vanilla_lanes(length: int) -> int:
    """Lanes of a row in the last of `length` modules: the step's W, then the chain of drafts."""
    return 2 * length


class _Segments(NamedTuple):
    """The segments of `paged_prefill_attention`."""

    query_start_P1: Tensor
    slot_P: Tensor
    position_P: Tensor


def _shifted(chunk: PrefillLanes, shift: int, lowest_P: Tensor) -> tuple[PrefillLanes, _Segments]:
    """The chunks `shift` positions earlier, with lanes below their chunk's `lowest` padded, and the
    segments of the other lanes.

    A segment of padded lanes is before each chunk's own, except the first one's.
    """
    position, start = chunk.position - shift, chunk.start_of_chunk - shift
    begin, end = chunk.query_start[:-1], chunk.query_start[1:]
    first = torch.minimum(begin + (lowest_P - start).clamp(min=0), end)
    slot, highest = chunk.slot_of_chunk, torch.maximum(start, lowest_P)
    begins, slots, positions = (
        torch.stack(pair, dim=1).flatten()[1:]
        for pair in ((begin, first), (torch.full_like(slot, -1), slot), (highest, highest))
    )
    segments = _Segments(torch.cat([begins, end[-1:]]), slots, positions)
    live = position >= lowest_P.index_select(0, chunk.chunk_of_lane)
    return chunk._replace(slot=chunk.slot.where(live, -1), position=position), segments
