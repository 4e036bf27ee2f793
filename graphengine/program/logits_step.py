"""Work on logits in the `full` graphs other than sampling, for requests that ask for it.

    process         before the sampler: bans, biases, penalties
    report          after the tokens are published: their log-probabilities; notes the tokens
    draft_forced    after the drafter: the text that grammars force, as drafts
    report_prompt   log-probabilities of a prompt's tokens

Letters: R rows, W lanes of a row, N = R * W lanes, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.buckets import StaticBuffers
from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.draft.forced import draft_forced
from graphengine.kernels.linear.call import MAX_LANES, LinearCall
from graphengine.kernels.linear.epilogues import StoreLogits
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.logits.automata import GrammarAutomata
from graphengine.kernels.logits.logits import process_logits
from graphengine.kernels.logits.logprobs import (
    LogprobTensors,
    RankedLogits,
    TokenLogprobs,
    rank_logits,
    token_log_probabilities,
)
from graphengine.kernels.logits.logprobs_mailbox import publish_logprobs
from graphengine.kernels.logits.sampled_logits import write_sampled_logits
from graphengine.kernels.logits.whole_vocabulary import write_prompt_rows
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.step.noted import FollowedAutomata, note_prompt, note_tokens
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes, StopSequences
from graphengine.kernels.step.walk import AcceptedPath
from graphengine.models.contract import Model
from graphengine.options.logits_params import LogprobsMode
from graphengine.requests.processing import logits_tensors

# Fields of `processing.py` whose name in the kernels differs.
_FIELDS = {
    "tokens": "stop_sequences",
    "start": "output_start",
    "wanted": "logprobs_wanted",
    "raw": "logprobs_raw",
}


class Processed(NamedTuple):
    """Logits of a step; valid until the next step of the same pool."""

    logits: Tensor
    """float32 [N, V], processed: the sampler reads these."""
    raw: Tensor | None
    """float32 [N, V], unprocessed; set in the lanes whose log-probabilities come from them. If
    log-probabilities of the sampling distribution are wanted, `report` writes that distribution
    here."""
    lanes: DecodeLanes


class LogitsStep:
    """How the step's graphs use the fields of `processing.py`.

    mailbox   receives log-probabilities, and `prompt_mailbox` those of prompts; both have room for
              the `top` most probable tokens
    mode      the engine's `logprobs_mode`: which logits are kept for log-probabilities
    rows      int64 [2]: where a prompt's log-probabilities of the whole vocabulary go; None: no
              request may ask for them
    automata  automata of requests' grammars; None: there is no pool for them
    drafts    drafts by slot, which the text that grammars force may replace; None: there are none
    """

    def __init__(
        self,
        buffers: StaticBuffers,
        mailbox: Tensor,
        prompt_mailbox: Tensor | None,
        *,
        top: int,
        mode: LogprobsMode,
        rows: Tensor | None = None,
        automata: GrammarAutomata | None = None,
        drafts: Tensor | None = None,
    ) -> None:
        def fields(names: tuple[str, ...]) -> list[Tensor]:
            return [buffers[_FIELDS.get(name, name)] for name in names]

        self.stops = StopSequences(*fields(StopSequences._fields))
        self.history = buffers["history"]
        self._tensors = logits_tensors(buffers)
        self._wants = LogprobTensors(*fields(LogprobTensors._fields))
        self._prompt_wants = self._wants._replace(wanted=buffers["prompt_logprobs_wanted"])
        self._mailbox = mailbox
        self._prompt_mailbox = prompt_mailbox
        self._rows = rows
        self._automata = automata
        self._followed = None
        if automata is not None:
            self._followed = FollowedAutomata(automata, self._tensors.flags)
        self._drafts = drafts
        self._sequence = buffers["sequence"]
        self._top = top
        self._keep_raw = mode != "processed_logprobs"
        # The distribution that tokens are drawn from; None where no request may ask for it.
        self._sampling: SamplingTensors | None = None
        if mode == "sampled_logprobs":
            self._sampling = SamplingTensors(*(buffers[name] for name in SamplingTensors._fields))

    @property
    def writes_rows(self) -> bool:
        """Whether a request may ask for a prompt's log-probabilities of the whole vocabulary."""
        return self._rows is not None

    def note_prompt(self, chunk: PrefillLanes) -> None:
        """Note a prompt chunk, before its last lane's logits are processed."""
        note_prompt(chunk, self._tensors.counts, self.history, followed=self._followed)

    def process(
        self,
        logits: Tensor,
        lanes: DecodeLanes,
        drafts: int = 0,
        *,
        tree: TreeLanes | None = None,
        pdl: bool = False,
    ) -> Processed:
        """Process `logits` in place; each row has 1 + `drafts` lanes, as a chain or a tree."""
        raw = torch.empty_like(logits) if self._keep_raw else None
        process_logits(
            logits,
            lanes,
            self._tensors,
            num_speculative_tokens=drafts,
            tree=tree,
            raw_NV=raw,
            wants=None if raw is None else self._wants,
            automata=self._automata,
            pdl=pdl,
        )
        return Processed(logits, raw, lanes)

    def report(
        self,
        processed: Processed,
        token: Tensor,
        count: Tensor,
        *,
        path: AcceptedPath | None = None,
        pdl: bool = False,
    ) -> None:
        """Publish the log-probabilities of the step's tokens, int32 [N], `count` of them in each
        row, and note the tokens. The step itself has already published. With trees, `path` has the
        N lanes.
        """
        logits, raw, lanes = processed
        if self._sampling is not None:
            assert raw is not None, "kept in every mode but that of processed logits"
            write_sampled_logits(
                logits,
                lanes.slot,
                lanes.position,
                self._sampling,
                self._wants,
                out_NV=raw,
                pdl=pdl,
            )
        source = None
        if path is not None:
            lanes, source = path.lanes, path.source
        slot = lanes.slot
        ranked = rank_logits(logits, slot, self._wants, raw_NV=raw, source_N=source, pdl=pdl)
        tokens = token_log_probabilities(
            logits, token, count, slot, self._wants, ranked, raw_NV=raw, source_N=source, pdl=pdl
        )
        publish_logprobs(
            self._mailbox,
            self._sequence,
            count,
            slot,
            self._wants,
            ranked,
            tokens,
            top=self._top,
            pdl=pdl,
        )
        self.note(lanes, token, count, pdl=pdl)

    def note(self, lanes: DecodeLanes, token: Tensor, count: Tensor, *, pdl: bool = False) -> None:
        """Note the step's tokens, as `report` does: penalties and bans of later ones read them."""
        tables = (self._tensors.counts, self.history)
        note_tokens(token, count, lanes, *tables, followed=self._followed, pdl=pdl)

    def draft_forced(
        self, slot: Tensor, *, final: Tensor | None = None, width: int = 1, pdl: bool = False
    ) -> None:
        """Replace drafts by the text that grammars force after the tokens that `report` noted.

        slot   int32 [R * width]: of each lane; -1 for padded rows
        final  int32 [1]: 0 where no lane has sampled a token; None: all lanes have
        """
        if self._drafts is not None:
            assert self._followed is not None, "a pool has automata"
            if final is not None:
                slot = torch.where(final != 0, slot, -1)
            draft_forced(self._followed, slot, self._drafts, width=width, pdl=pdl)

    def report_prompt(
        self,
        chunk: PrefillLanes,
        hidden: Tensor,
        model: Model,
        following: Tensor,
        final: Tensor,
    ) -> None:
        """Publish the log-probabilities of `following`, int32 [T]: the token after each lane, -1
        for none.

        hidden  [T, H] after the final norm
        final   int32 [1]: not 0 where the last lane is the prompt's last token

        Lanes without a token are left out, unless the whole vocabulary's log-probabilities may be
        written. Then every lane publishes, which tells the host that its row is written.
        """
        assert self._prompt_mailbox is not None, "an engine without prompt_logprobs"
        wants = self._prompt_wants
        lane = torch.arange(len(following), dtype=torch.int32, device=following.device)
        ends = (final != 0) & (lane == chunk.last)
        live = chunk.slot >= 0
        if self._rows is None:
            live = live & ~ends
        count = live.to(torch.int32)
        parts, epilogue = [], StoreLogits(cap=model.config.logits_cap)
        # One product takes at most MAX_LANES lanes, and there is room for as many.
        for start in range(0, len(following), MAX_LANES):
            part = slice(start, start + MAX_LANES)
            slot = chunk.slot[part]
            call = LinearCall(hidden[part], model.lm_head, slot, bias=model.head_bias)
            logits = linear(call, epilogue)
            ranked = rank_logits(logits, slot, wants)
            tokens = token_log_probabilities(
                logits, following[part], count[part], slot, wants, ranked
            )
            if self._rows is not None:
                write_prompt_rows(logits, slot, chunk.position[part], ranked, self._rows)
            parts.append((*ranked, *tokens))
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        publish_logprobs(
            self._prompt_mailbox,
            self._sequence,
            count,
            chunk.slot,
            wants,
            RankedLogits(*columns[:4]),
            TokenLogprobs(*columns[4:]),
            top=self._top,
        )
