"""The results of a decode step's last kernel, and its plain twin.

Letters as in `finish.py`, and: L live rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.sample.sampling import token_of_tiles_reference
from graphengine.kernels.step.publish import publish_tokens_reference
from graphengine.kernels.step.state import (
    EMITTED,
    INVALID,
    STOP,
    DecodeLanes,
    SlotState,
    StopSequences,
    StopTensors,
    commit_flags_reference,
    commit_tokens_reference,
)
from graphengine.kernels.step.stop_sequences import stop_sequence_of_tokens_reference
from graphengine.kernels.step.walk import AcceptedPath, fed_depths_reference, walk_reference


class FinishedStep(NamedTuple):
    """A decode step's tokens and flags, in new tensors; undefined in padded lanes."""

    token_N: torch.Tensor
    """int32: the token after each lane, past the row's count too; -1 without valid logits. With
    trees the lanes are those of `path`."""
    flags_R: torch.Tensor
    """int32: EMITTED | STOP | LENGTH or INVALID, 0 for a padded row."""
    count_R: torch.Tensor
    """int32: tokens emitted, those of the row's first lanes; 0 for a padded row."""
    path: AcceptedPath | None = None
    """With trees: the lanes of the emitted tokens, P a row."""


def verify_commit_publish_reference(
    best_NC: torch.Tensor,
    health_NC: torch.Tensor,
    lanes: DecodeLanes,
    state: SlotState,
    limits: StopTensors,
    mailbox_items: torch.Tensor,
    *,
    num_speculative_tokens: int = 0,
    relaxed_N: torch.Tensor | None = None,
    forced: int | None = None,
    draft_SK: torch.Tensor | None = None,
    sequences: StopSequences | None = None,
    history_SP: torch.Tensor | None = None,
    tree: TreeLanes | None = None,
) -> FinishedStep:
    """Plain twin of `verify_commit_publish`, which needs no arrivals."""
    width = num_speculative_tokens + 1
    token_RW = token_of_tiles_reference(best_NC, health_NC).view(-1, width)
    slot_RW, fed_RW = lanes.slot.view(-1, width), lanes.token.view(-1, width)
    path_RP = None
    if tree is None:
        relaxed_RW = None if relaxed_N is None else relaxed_N.view(-1, width)
        token_RW, accepted_R = _verify_reference(token_RW, fed_RW, slot_RW >= 0, relaxed_RW, forced)
        fed_R = (slot_RW >= 0).sum(dim=1)
    else:
        token_RW, path_RP = walk_reference(token_RW, lanes, tree, forced)
        accepted_R = (path_RP > 0).sum(dim=1)
        fed_R = fed_depths_reference(lanes, tree, width)

    slot_R = slot_RW[:, 0]
    live = slot_R >= 0
    slot = slot_R[live].long()
    token_LW, accepted_L = token_RW[live], accepted_R[live]
    j = torch.arange(token_RW.shape[1], dtype=torch.int32, device=token_RW.device)
    flags_LW = commit_flags_reference(
        token_LW, state.kv_len[slot][:, None] + 1 + j, slot[:, None], limits
    )
    if sequences is not None and history_SP is not None:
        flags_LW = _stops_reference(flags_LW, token_LW, slot, state, sequences, history_SP)
    ends = (flags_LW != EMITTED) | (j == accepted_L[:, None])
    end = ends.int().argmax(dim=1)
    count = (end + (flags_LW.gather(1, end[:, None])[:, 0] != INVALID)).to(torch.int32)
    state.kv_len[slot] += count.clamp(min=1)
    last = token_LW.gather(1, (count.long() - 1).clamp(min=0)[:, None])[:, 0]

    flags_R, count_R = torch.zeros_like(slot_R), torch.zeros_like(slot_R)
    count_R[live] = count
    flags_L = commit_tokens_reference(state, last, slot, limits)
    stopped = flags_LW.gather(1, (count.long() - 1).clamp(min=0)[:, None])[:, 0] & STOP
    flags_R[live] = flags_L | stopped.where(flags_L & EMITTED != 0, 0)
    state.running[slot] *= flags_R[live] == EMITTED
    if draft_SK is not None:
        draft_SK[slot] = -1
    rows = slot_R.numel()
    publish_tokens_reference(
        mailbox_items[:, :rows], state, token_RW, flags_R, count_R, fed_R, slot_R
    )
    path = None if path_RP is None else _path_reference(path_RP, count_R, lanes, width)
    return FinishedStep(token_RW.flatten(), flags_R, count_R, path)


def _path_reference(
    path_RP: torch.Tensor, count_R: torch.Tensor, lanes: DecodeLanes, width: int
) -> AcceptedPath:
    """The lanes of the nodes that emitted a token."""
    rows, length = path_RP.shape
    number_P = torch.arange(length, device=path_RP.device)
    emitted = number_P < count_R[:, None]
    first_R = torch.arange(rows, device=path_RP.device) * width
    source = (first_R[:, None] + path_RP.where(emitted, 0)).flatten()
    token, slot, position = (field[source] for field in lanes)
    return AcceptedPath(
        DecodeLanes(token, slot.where(emitted.flatten(), -1), position), source.to(torch.int32)
    )


def _verify_reference(
    token_RW: torch.Tensor,
    fed_RW: torch.Tensor,
    live_RW: torch.Tensor,
    relaxed_RW: torch.Tensor | None,
    forced: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token of each lane, accepted drafts of each row, int64), before limits are applied."""
    fed = live_RW[:, 1:].long().cumprod(dim=1)
    if forced is not None:
        return token_RW, fed.sum(dim=1).clamp(max=forced)
    token, draft = token_RW[:, :-1], fed_RW[:, 1:]
    relaxed = torch.zeros_like(draft, dtype=torch.bool)
    if relaxed_RW is not None:
        relaxed = (relaxed_RW[:, :-1] != 0) & (token >= 0)
    accepted = (fed * (relaxed | (token == draft))).cumprod(dim=1)
    taken = draft.where(relaxed & (accepted != 0), token)
    return torch.cat([taken, token_RW[:, -1:]], dim=1), accepted.sum(dim=1)


def _stops_reference(
    flags_LW: torch.Tensor,
    token_LW: torch.Tensor,
    slot: torch.Tensor,
    state: SlotState,
    sequences: StopSequences,
    history_SP: torch.Tensor,
) -> torch.Tensor:
    """Add STOP to the flags of tokens that complete a stop sequence."""
    completed = [
        stop_sequence_of_tokens_reference(tokens, at, position, history_SP, sequences)
        for tokens, at, position in zip(
            token_LW.tolist(), slot.tolist(), state.kv_len[slot].tolist(), strict=True
        )
    ]
    stops = torch.tensor(completed, device=flags_LW.device).view_as(flags_LW) >= 0
    return torch.where(stops & (flags_LW & EMITTED != 0), flags_LW | STOP, flags_LW)
