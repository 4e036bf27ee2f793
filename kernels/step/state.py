"""The per-slot state that advances itself: commands in, lanes out, tokens committed.

    prefill   apply_commands -> gather_prefill -> (model, sample) -> commit_prefill -> publish
    decode    gather_and_embed -> (model, sample) -> verify_commit_publish

The decode ops are one kernel each and have modules of their own, `begin` and `finish`; so does
`publish`, and `record` has the host's codec. The rules that both phases share are here. These ops
are the only ones that write the device-owned state. The host never copies into it: it commands a
new epoch for a slot, and the slot is started afresh once. A row that stopped clears its slot's
`running`. So the next replay, which may be under way before the host has read this one, finds its
lane padded.

Lengths are counted one way: `kv_len` = tokens whose K and V are in the cache. `next_token` is not
among them: it sits at position `kv_len` and is the next replay's query.

With K drafts a step, a row has W = K + 1 lanes: lane r * W + j feeds row r's token at position
kv_len + j, the slot's next token at j = 0 and draft j after it. Where drafts are a tree, lane j is
its node j, and `core/tree.py` says at which position that is.

Letters: S slots, R rows of a bucket, N lanes (R * W), T tokens of a prefill bucket, E stop ids a
slot. Lanes with slot -1 are padded: nothing is read or written for them, and their other fields
hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_table, check_vector
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.step.record import MAX_DRAFTS

# Flags of a row's commit. STOP and LENGTH come with EMITTED, and may come together.
EMITTED = 1  # the row has a new token
STOP = 2  # the token is one of the slot's stop ids, or completes a stop sequence
LENGTH = 4  # the token fills the sequence up to the slot's max_len
INVALID = 8  # no token: the row's logits had a NaN, or no finite value

_EMITTED = tl.constexpr(EMITTED)
_STOP = tl.constexpr(STOP)
_LENGTH = tl.constexpr(LENGTH)
_INVALID = tl.constexpr(INVALID)

_BLOCK = 128


class SlotState(NamedTuple):
    """The device-owned state, updated in place by this module's ops."""

    next_token: torch.Tensor
    """int32 [S]: the last token, whose K and V are not in the cache yet."""
    kv_len: torch.Tensor
    """int32 [S]: tokens whose K and V are in the cache; the next query's position."""
    running: torch.Tensor
    """int32 [S]: 1 while the slot decodes; 0 before its prompt is in and after it stopped."""
    epoch: torch.Tensor
    """int32 [S]: the last command that was applied to the slot."""
    sequence: torch.Tensor
    """int64 [1]: replays published so far."""


class CommandedState(NamedTuple):
    """The fields of `SlotState` that a command sets."""

    epoch: torch.Tensor
    kv_len: torch.Tensor
    running: torch.Tensor
    next_token: torch.Tensor

    @classmethod
    def of(cls, state: SlotState) -> CommandedState:
        return cls(state.epoch, state.kv_len, state.running, state.next_token)


class StopTensors(NamedTuple):
    """When a slot's request ends; host-owned."""

    stop_ids: torch.Tensor
    """int32 [S, E]: tokens that end it; -1 for none."""
    max_len: torch.Tensor
    """int32 [S]: tokens of the whole sequence, prompt included, at which it ends."""


class StopSequences(NamedTuple):
    """Each slot's stop sequences; host-owned."""

    tokens: torch.Tensor
    """int32 [S, Q, L]: the last column has each sequence's last token; shorter sequences have -1 in
    front; -1 throughout for none."""
    start: torch.Tensor
    """int32 [S]: the first position that a match may include: the prompt's length, or 0."""
    min_len: torch.Tensor
    """int32 [S]: the lowest position at which a match may end, as in `SamplingTensors`."""


class DecodeLanes(NamedTuple):
    """The lanes that a decode launch feeds to the model. Padded lanes: slot -1, rest undefined.

    In a row that is not padded as a whole, the padded lanes come last; in a tree they may be any
    but the root.
    """

    token: torch.Tensor
    """int32 [N]"""
    slot: torch.Tensor
    """int32 [N]: -1 for a padded lane."""
    position: torch.Tensor
    """int32 [N]: absolute position of the token."""


class PrefillLanes(NamedTuple):
    """The lanes that the chunks of P prompts feed to the model. Padded lanes: slot -1, rest
    undefined.
    """

    token: torch.Tensor
    """int32 [T]"""
    slot: torch.Tensor
    """int32 [T]: -1 past the chunks."""
    position: torch.Tensor
    """int32 [T]: absolute position of each token."""
    query_start: torch.Tensor
    """int32 [P + 1]: lane where each chunk begins, then the number of live lanes; the segments of
    paged_prefill_attention."""
    last: torch.Tensor
    """int32 [P]: each chunk's last live lane, which is sampled; 0 if none is live."""

    @property
    def chunk_of_lane(self) -> torch.Tensor:
        """int64 [T]: the number of each lane's chunk; past the chunks any."""
        return _chunks_of_lanes(self.query_start[1:], _numbered(self.token))

    @property
    def slot_of_chunk(self) -> torch.Tensor:
        """int32 [P]: -1 for a chunk without lanes."""
        live = self.query_start[1:] > self.query_start[:-1]
        return self.slot.index_select(0, self.last).where(live, -1)

    @property
    def start_of_chunk(self) -> torch.Tensor:
        """int32 [P]: the position of each chunk's first token; any for a chunk without lanes."""
        return self.position.index_select(0, self.query_start[:-1].clamp(max=len(self.token) - 1))

    def followed_by(self, next_P: torch.Tensor) -> torch.Tensor:
        """int32 [T]: the token after each lane's; after each chunk's last lane that of `next_P`."""
        chunk = self._chunk_if_several
        is_last = _numbered(self.token) == _of_lanes(self.last, chunk)
        return torch.where(is_last, _of_lanes(next_P, chunk), self.token.roll(-1))

    def preceded_by(self, rows_TH: torch.Tensor, before_PH: torch.Tensor) -> torch.Tensor:
        """[T, H]: the row of the lane before each; for each chunk's first lane that of `before`."""
        chunk = self._chunk_if_several
        is_first = _numbered(self.token) == _of_lanes(self.query_start[:-1], chunk)
        return torch.where(is_first[:, None], _of_lanes(before_PH, chunk), rows_TH.roll(1, dims=0))

    @property
    def _chunk_if_several(self) -> torch.Tensor | None:
        """`chunk_of_lane`; None for a step of one chunk, which need not look."""
        return None if len(self.last) == 1 else self.chunk_of_lane


def _of_lanes(values_P: torch.Tensor, chunk_T: torch.Tensor | None) -> torch.Tensor:
    """[T, ...]: the value of each lane's chunk; [1, ...], that of the only chunk, without any."""
    return values_P if chunk_T is None else values_P.index_select(0, chunk_T)


def _numbered(lanes_T: torch.Tensor) -> torch.Tensor:
    """int32 [T]: the lanes' numbers."""
    return torch.arange(len(lanes_T), dtype=torch.int32, device=lanes_T.device)


def _chunks_of_lanes(end_P: torch.Tensor, lane_T: torch.Tensor) -> torch.Tensor:
    """int64 [T]: the number of the chunk that each lane is in; past the chunks any.

    end_P  int32, the lane after each chunk
    """
    return torch.searchsorted(end_P, lane_T, right=True).clamp(max=len(end_P) - 1)


def apply_commands(state: SlotState, command_epoch_S: torch.Tensor) -> None:
    """Start afresh, in place, every slot whose epoch differs from the one the host commands.

    The slot gets kv_len = running = next_token = 0 and the commanded epoch; so a command works
    once, however many replays see it.

    Args:
        state: updated in place.
        command_epoch_S: int32 [S], host-owned.
    """
    slots = check_state(state)
    check_lanes(slots, command_epoch=command_epoch_S)
    if not use_triton(state.epoch):
        apply_commands_reference(state, command_epoch_S)
        return
    launcher(_apply_commands_kernel, (triton.cdiv(slots, _BLOCK),))(
        command_epoch_S,
        CommandedState.of(state),
        slots,
        BLOCK=_BLOCK,
    )


def apply_commands_reference(state: SlotState, command_epoch_S: torch.Tensor) -> None:
    """Plain twin of `apply_commands`."""
    pending = command_epoch_S != state.epoch
    for field in (state.kv_len, state.running, state.next_token):
        field.masked_fill_(pending, 0)
    state.epoch.copy_(command_epoch_S)


def gather_prefill(
    tokens_T: torch.Tensor,
    prefill_slot_P: torch.Tensor,
    prefill_start_P: torch.Tensor,
    prefill_count_P: torch.Tensor,
) -> PrefillLanes:
    """The lanes of the chunks of P prompts, one after the other, in new tensors.

    The lanes of chunk p are live, at positions start[p] .. start[p] + count[p] - 1 of its slot. It
    has no lane if its slot is -1 or its count 0. Lanes past T do not exist: counts end there.

    Args:
        tokens_T: int32 [T], the chunks, then anything.
        prefill_slot_P, prefill_start_P, prefill_count_P: int32 [P].
    """
    tokens, prompts = tokens_T.numel(), prefill_slot_P.numel()
    check_lanes(tokens, prefill_tokens=tokens_T)
    check_lanes(
        prompts,
        prefill_slot=prefill_slot_P,
        prefill_start=prefill_start_P,
        prefill_count=prefill_count_P,
    )
    if not use_triton(tokens_T):
        return gather_prefill_reference(tokens_T, prefill_slot_P, prefill_start_P, prefill_count_P)
    lanes = PrefillLanes(
        token=torch.empty_like(tokens_T),
        slot=torch.empty_like(tokens_T),
        position=torch.empty_like(tokens_T),
        query_start=tokens_T.new_empty(prompts + 1),
        last=tokens_T.new_empty(prompts),
    )
    launcher(_gather_prefill_kernel, (triton.cdiv(tokens, _BLOCK),))(
        tokens_T,
        prefill_slot_P,
        prefill_start_P,
        prefill_count_P,
        *lanes,
        tokens,
        PROMPTS=prompts,
        BLOCK=_BLOCK,
    )
    return lanes


def gather_prefill_reference(
    tokens_T: torch.Tensor,
    prefill_slot_P: torch.Tensor,
    prefill_start_P: torch.Tensor,
    prefill_count_P: torch.Tensor,
) -> PrefillLanes:
    """Plain twin of `gather_prefill`."""
    tokens = tokens_T.numel()
    counts = prefill_count_P.clamp(0, tokens).where(prefill_slot_P >= 0, 0)
    end = counts.cumsum(0, dtype=torch.int32).clamp(max=tokens)
    begin = torch.cat([end.new_zeros(1), end[:-1]])
    lane = _numbered(tokens_T)
    chunk = _chunks_of_lanes(end, lane)
    return PrefillLanes(
        token=tokens_T.clone(),
        slot=prefill_slot_P[chunk].where(lane < end[-1], -1),
        position=prefill_start_P[chunk] + lane - begin[chunk],
        query_start=torch.cat([begin, end[-1:]]),
        last=(end - 1).where(end > begin, 0),
    )


def commit_prefill(
    state: SlotState,
    token_P: torch.Tensor,
    prefill_slot_P: torch.Tensor,
    prefill_start_P: torch.Tensor,
    prefill_count_P: torch.Tensor,
    prefill_final_P: torch.Tensor,
    limits: StopTensors,
    sequences: StopSequences | None = None,
) -> torch.Tensor:
    """Take the chunks of P prompts into the states of their slots, in place: kv_len = start +
    count. Slots differ.

    After a prompt's final chunk the sampled token becomes the slot's next query, under the same
    rules as in `verify_commit_publish`, and the slot runs unless that token already stopped it.
    Before the final chunk the token means nothing and the flags are 0. A slot of -1 or a count of 0
    changes nothing.

    Args:
        state: next_token, kv_len and running are updated in place.
        token_P: int32 [P], from `sample`; read only after the final chunk.
        prefill_slot_P, prefill_start_P, prefill_count_P: int32 [P], as for `gather_prefill`.
        prefill_final_P: int32 [P], not 0 for the prompt's last chunk.
        limits: host-owned.
        sequences: stop sequences by slot, host-owned; the token can only complete sequences of one
            token.

    Returns:
        flags_P: new int32 [P], as in `verify_commit_publish`; 0 if nothing was emitted.
    """
    slots = check_state(state)
    stop_ids = check_limits(limits, slots)
    chunk = (prefill_slot_P, prefill_start_P, prefill_count_P, prefill_final_P)
    prompts = prefill_slot_P.numel()
    check_lanes(
        prompts,
        token=token_P,
        prefill_slot=prefill_slot_P,
        prefill_start=prefill_start_P,
        prefill_count=prefill_count_P,
        prefill_final=prefill_final_P,
    )
    Q, L = (0, 1) if sequences is None else _sizes_of_sequences(sequences, slots)
    if not use_triton(token_P):
        return commit_prefill_reference(state, token_P, *chunk, limits, sequences)
    flags_P = torch.empty_like(token_P)
    launcher(_commit_prefill_kernel, (prompts,))(
        token_P,
        *chunk,
        state.next_token,
        state.kv_len,
        state.running,
        limits.stop_ids,
        limits.max_len,
        sequences,
        flags_P,
        stop_ids,
        Q=Q,
        L=L,
        BLOCK_E=stop_ids_block(stop_ids),
        BLOCK_Q=triton.next_power_of_2(max(Q, 1)),
        num_warps=1,
    )
    return flags_P


def commit_prefill_reference(
    state: SlotState,
    token_P: torch.Tensor,
    prefill_slot_P: torch.Tensor,
    prefill_start_P: torch.Tensor,
    prefill_count_P: torch.Tensor,
    prefill_final_P: torch.Tensor,
    limits: StopTensors,
    sequences: StopSequences | None = None,
) -> torch.Tensor:
    """Plain twin of `commit_prefill`."""
    live = (prefill_slot_P >= 0) & (prefill_count_P > 0)
    slot = prefill_slot_P[live].long()
    state.kv_len[slot] = (prefill_start_P + prefill_count_P)[live]
    flags_P = torch.zeros_like(token_P)
    final = live & (prefill_final_P != 0)
    slot = prefill_slot_P[final].long()
    state.running[slot] = 1
    flags_P[final] = commit_tokens_reference(state, token_P[final], slot, limits)
    if sequences is not None:
        for place in (final & (flags_P & EMITTED != 0)).nonzero()[:, 0]:
            where = prefill_slot_P[place].long()
            wanted = sequences.tokens[where]
            alone = wanted[(wanted[:, :-1] < 0).all(dim=1), -1]
            first = max(int(sequences.start[where]), int(sequences.min_len[where]))
            if bool((alone == token_P[place]).any()) and int(state.kv_len[where]) >= first:
                flags_P[place] |= STOP
                state.running[where] = 0
    return flags_P


def _sizes_of_sequences(sequences: StopSequences, slots: int) -> tuple[int, int]:
    """(Q, L); ValueError unless all shapes and dtypes fit the slots."""
    check_lanes(slots, start=sequences.start, min_len=sequences.min_len)
    check_table("stop sequences", sequences.tokens, slots, 3)
    return sequences.tokens.shape[1], sequences.tokens.shape[2]


def commit_flags_reference(
    token: torch.Tensor, kv_len: torch.Tensor, slot: torch.Tensor, limits: StopTensors
) -> torch.Tensor:
    """Flags of each token, if its slot emits it next; new int32, `token`'s shape.

    `kv_len` counts the query. A token ends the request if it is a stop id or if the sequence with
    it, kv_len + 1 tokens, reaches max_len. A token below 0 means that the logits were not valid.
    """
    valid = token >= 0
    stop = valid & (token[..., None] == limits.stop_ids[slot]).any(dim=-1)
    length = valid & (kv_len + 1 >= limits.max_len[slot])
    flags = torch.where(valid, EMITTED, INVALID) + STOP * stop + LENGTH * length
    return flags.to(token.dtype)


def commit_tokens_reference(
    state: SlotState, token: torch.Tensor, slot: torch.Tensor, limits: StopTensors
) -> torch.Tensor:
    """Update next_token and running of live rows, whose kv_len counts the query; return the flags.

    A row whose token is below 0 stops with only the flag INVALID, and its next_token stays.
    """
    flags = commit_flags_reference(token, state.kv_len[slot], slot, limits)
    state.next_token[slot] = token.where(token >= 0, state.next_token[slot])
    state.running[slot] *= flags == EMITTED
    return flags


def check_state(state: SlotState) -> int:
    """The number of slots; ValueError unless every field of `state` fits it."""
    slots = state.next_token.numel()
    check_lanes(
        slots,
        next_token=state.next_token,
        kv_len=state.kv_len,
        running=state.running,
        epoch=state.epoch,
    )
    check_vector("sequence", state.sequence, 1, torch.int64)
    return slots


def check_stop_ids(stop_ids_SE: torch.Tensor, slots: int) -> int:
    """The number of stop ids a slot; ValueError unless `stop_ids_SE` is dense int32 [slots, E]."""
    shape = tuple(stop_ids_SE.shape)
    dense = stop_ids_SE.dtype == torch.int32 and stop_ids_SE.is_contiguous()
    if len(shape) != 2 or shape[0] != slots or not dense:
        raise ValueError(
            f"stop_ids must be a dense int32 [{slots}, E], not {stop_ids_SE.dtype} {shape}"
        )
    return shape[1]


def check_limits(limits: StopTensors, slots: int) -> int:
    """The number of stop ids a slot; ValueError unless `limits` are those of `slots` slots."""
    check_lanes(slots, max_len=limits.max_len)
    return check_stop_ids(limits.stop_ids, slots)


def check_draft_count(num_speculative_tokens: int) -> int:
    """Tokens a row, W = K + 1; ValueError unless K is 0 to MAX_DRAFTS."""
    if not 0 <= num_speculative_tokens <= MAX_DRAFTS:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens}, not 0..{MAX_DRAFTS}")
    return num_speculative_tokens + 1


def check_draft_table(draft_SK: torch.Tensor, slots: int, drafts: int = 1) -> int:
    """The table's columns; ValueError unless it is int32 [slots, drafts or more], dense rows."""
    shape, dtype = tuple(draft_SK.shape), draft_SK.dtype
    fits = len(shape) == 2 and shape[0] == slots and shape[1] >= drafts and draft_SK.stride(1) == 1
    if not fits or dtype != torch.int32:
        raise ValueError(
            f"draft must be int32 [{slots}, {drafts} or more] with dense rows, "
            f"not {dtype} {shape} with strides {draft_SK.stride()}"
        )
    return shape[1]


def stop_ids_block(stop_ids: int) -> int:
    """The size of a kernel's tile for a slot's stop ids, of which there may be none."""
    return int(triton.next_power_of_2(max(stop_ids, 1)))


@triton.jit
def _apply_commands_kernel(command_epoch_ptr, state, slots, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < slots
    command = tl.load(command_epoch_ptr + slot, mask=inside, other=0)
    pending = command != tl.load(state.epoch + slot, mask=inside, other=0)
    start_afresh(state, slot, command, pending)


@triton.jit
def start_afresh(state, slot, command, pending):
    """Carry out commands for the slots where they are pending; `state` is a `CommandedState`.

    Every thread that depends on the old state must have read it by now.
    """
    tl.store(state.kv_len + slot, 0, mask=pending)
    tl.store(state.running + slot, 0, mask=pending)
    tl.store(state.next_token + slot, 0, mask=pending)
    tl.store(state.epoch + slot, command, mask=pending)


@triton.jit
def _gather_prefill_kernel(
    tokens_ptr,
    prefill_slot_ptr,
    prefill_start_ptr,
    prefill_count_ptr,
    token_ptr,
    slot_ptr,
    position_ptr,
    query_start_ptr,
    last_ptr,
    tokens,
    PROMPTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, position = tl.full([BLOCK], -1, tl.int32), lane
    begin = 0
    for prompt in range(PROMPTS):
        own_slot = tl.load(prefill_slot_ptr + prompt)
        start = tl.load(prefill_start_ptr + prompt)
        count = tl.minimum(tl.maximum(tl.load(prefill_count_ptr + prompt), 0), tokens - begin)
        count = tl.where(own_slot >= 0, count, 0)
        own = (lane >= begin) & (lane < begin + count)
        slot = tl.where(own, own_slot, slot)
        position = tl.where(own, start + lane - begin, position)
        if tl.program_id(0) == 0:
            tl.store(query_start_ptr + prompt, begin)
            tl.store(last_ptr + prompt, tl.where(count > 0, begin + count - 1, 0))
        begin += count
    live = lane < begin
    tl.store(slot_ptr + lane, slot, mask=lane < tokens)
    tl.store(token_ptr + lane, tl.load(tokens_ptr + lane, mask=live), mask=live)
    tl.store(position_ptr + lane, position, mask=live)
    if tl.program_id(0) == 0:
        tl.store(query_start_ptr + PROMPTS, begin)


@triton.jit
def commit_flags(token_W, kv_len_W, live_W, stop_ids_E, max_len):
    """Flags of each token of a row, if its slot emits it next; 0 where a lane is not live.

    `kv_len_W` counts the query; `stop_ids_E` and `max_len` are the slot's, as in `load_limits`.
    """
    valid = live_W & (token_W >= 0)
    # Unused stop ids are -1, which no valid token equals.
    is_stop_id = tl.max((token_W[:, None] == stop_ids_E[None, :]).to(tl.int32), 1) != 0
    length = kv_len_W + 1 >= max_len
    emitted = tl.where(is_stop_id, _STOP, 0) + tl.where(length, _LENGTH, 0) + _EMITTED
    return tl.where(valid, emitted, tl.where(live_W, _INVALID, 0))


@triton.jit
def load_limits(stop_ids_ptr, max_len_ptr, slot, live, stop_ids, BLOCK_E: tl.constexpr):
    """The slot's stop ids, -1 for none, and its max_len; nothing is read without `live`."""
    e = tl.arange(0, BLOCK_E)
    stop_ids_ptr += slot.to(tl.int64) * stop_ids
    stop_ids_E = tl.load(stop_ids_ptr + e, mask=live & (e < stop_ids), other=-1)
    return stop_ids_E, tl.load(max_len_ptr + slot, mask=live, other=0)


@triton.jit
def _commit_prefill_kernel(
    token_ptr,
    prefill_slot_ptr,
    prefill_start_ptr,
    prefill_count_ptr,
    prefill_final_ptr,
    next_token_ptr,
    kv_len_ptr,
    running_ptr,
    stop_ids_ptr,
    max_len_ptr,
    sequences,
    flags_ptr,
    stop_ids,
    Q: tl.constexpr,
    L: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    prompt = tl.program_id(0)
    slot = tl.load(prefill_slot_ptr + prompt)
    count = tl.load(prefill_count_ptr + prompt)
    live = (slot >= 0) & (count > 0)
    kv_len = tl.load(prefill_start_ptr + prompt) + count
    tl.store(kv_len_ptr + slot, kv_len, mask=live)
    final = live & (tl.load(prefill_final_ptr + prompt) != 0)
    one = tl.arange(0, 1)
    token_1 = tl.load(token_ptr + prompt + one, mask=final, other=0)
    stop_ids_E, max_len = load_limits(stop_ids_ptr, max_len_ptr, slot, final, stop_ids, BLOCK_E)
    flags_1 = commit_flags(token_1, kv_len, final, stop_ids_E, max_len)
    if sequences is not None:
        stops_1 = _is_sequence(token_1, kv_len, slot, final, sequences, Q, L, BLOCK_Q)
        flags_1 = tl.where(stops_1 & ((flags_1 & _EMITTED) != 0), flags_1 | _STOP, flags_1)
    tl.store(next_token_ptr + slot + one, token_1, mask=(flags_1 & _EMITTED) != 0)
    tl.store(running_ptr + slot + one, (flags_1 == _EMITTED).to(tl.int32), mask=final)
    tl.store(flags_ptr + prompt + one, flags_1)


@triton.jit
def _is_sequence(
    token_1,
    position,
    slot,
    live,
    sequences,
    Q: tl.constexpr,
    L: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Whether the token at this position is one of the slot's stop sequences of one token."""
    q = tl.arange(0, BLOCK_Q)
    inside = live & (q < Q)
    last_ptr = sequences.tokens + slot.to(tl.int64) * (Q * L) + q * L + (L - 1)
    alone_Q = tl.load(last_ptr, mask=inside, other=-1)
    if L > 1:
        before_Q = tl.load(last_ptr - 1, mask=inside, other=-1)
        alone_Q = tl.where(before_Q < 0, alone_Q, -1)
    start = tl.load(sequences.start + slot, mask=live, other=0)
    min_len = tl.load(sequences.min_len + slot, mask=live, other=0)
    same_1 = tl.max((token_1[:, None] == alone_Q[None, :]).to(tl.int32), 1) != 0
    return same_1 & (position >= start) & (position >= min_len)
