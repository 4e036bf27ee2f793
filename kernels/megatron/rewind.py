"""Rewind to the last accepted token: a KV cache's block bookkeeping, and recurrent states.

This is the other half of `verify`, whose conventions hold here. Letters: N rows, K drafts,
L layers, M slots; d accepted drafts of a row, 0..K.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import BITS, FLOAT_DTYPES
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.megatron.verify import (
    Count,
    add_errors,
    check_count,
    check_drafts,
    check_error_count,
    check_indices,
    check_table,
    count_errors,
    load_count,
)

# The prefill_status of a row whose prompt came in; every other value means decode.
_PREFILL = tl.constexpr(1)

_BLOCK = 128
_CHUNK_BYTES = 8192


def rewind_kv_cache(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    last_kv_block_offset: torch.Tensor,
    kv_length_offsets: torch.Tensor,
    kv_block_counts: torch.Tensor,
    last_kv_block_id: torch.Tensor,
    kv_block_ids: torch.Tensor,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: Count | None = None,
    error_count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the rejected drafts out of the block bookkeeping, in place; at most one block a row.

    A decode row goes back by r = K - d tokens, a prefill row by none. If a row thereby leaves its
    last block, the caller has to release the block:

        blocks_to_release, remove_mask = rewind_kv_cache(...)
        release(blocks_to_release[remove_mask])

    Args:
        accepted_counts: [N], d; not read for prefill rows. Its length is the number of rows; the
            other vectors have N entries or more, int32 or int64 each.
        prefill_status: 1 for a prefill row, anything else for a decode row.
        last_kv_block_offset: index, in its block, of the last token fed; becomes
            (offset - r) mod block_size.
        kv_length_offsets: tokens cached before the step's query; becomes less by r, and may become
            negative, because the caller adds the query's K + 1 later.
        kv_block_counts: blocks in use, less by 1 where one is removed.
        last_kv_block_id: the last block's id; where one is removed, the id of the one before.
        kv_block_ids: [N or more, max_blocks], dense rows, however far apart; the removed id
            becomes -1.
        num_speculative_tokens: K < block_size_tokens.
        num_active_requests: live rows, which come first; None means N.
        error_count: [1], to which the number of skipped rows is added.

    Returns:
        blocks_to_release: new [N], dtype of last_kv_block_id: the old last block, removed or not;
            0, a valid id as well, for a padded row.
        remove_mask: new bool [N]; False for a padded row.

    Padded rows are neither read nor changed. A live row with d outside 0..K, or with no block in
    the table to remove, is skipped on a GPU, as if padded, and counted; on the CPU it is a
    ValueError and nothing changes. ValueError also for wrong dtypes, shapes, devices and counts.
    """
    operands = (
        accepted_counts,
        prefill_status,
        last_kv_block_offset,
        kv_length_offsets,
        kv_block_counts,
        last_kv_block_id,
        kv_block_ids,
        num_speculative_tokens,
        block_size_tokens,
        num_active_requests,
        error_count,
    )
    _check_rewind(*operands)
    if not accepted_counts.is_cuda:
        _raise_for_wrong_rewind(
            accepted_counts,
            prefill_status,
            last_kv_block_offset,
            kv_block_counts,
            kv_block_ids.shape[1],
            num_speculative_tokens,
            num_active_requests,
        )
    if use_triton(accepted_counts):
        return _launch_rewind(*operands)
    return rewind_kv_cache_reference(*operands)


def rewind_kv_cache_reference(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    last_kv_block_offset: torch.Tensor,
    kv_length_offsets: torch.Tensor,
    kv_block_counts: torch.Tensor,
    last_kv_block_id: torch.Tensor,
    kv_block_ids: torch.Tensor,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: Count | None = None,
    error_count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain twin of `rewind_kv_cache`; skips and counts on any device."""
    rows, max_blocks = accepted_counts.numel(), kv_block_ids.shape[1]
    live, back, wrong = _rewound(
        accepted_counts,
        prefill_status,
        last_kv_block_offset,
        kv_block_counts,
        max_blocks,
        num_speculative_tokens,
        num_active_requests,
    )
    add_errors(error_count, wrong)
    live = live & ~wrong
    back = back.where(live, 0)
    blocks_to_release = last_kv_block_id[:rows].where(live, 0)

    offset = last_kv_block_offset[:rows] - back
    remove_mask = live & (offset < 0)
    last_kv_block_offset[:rows] = (offset % block_size_tokens).where(
        live, last_kv_block_offset[:rows]
    )
    kv_length_offsets[:rows] -= back.to(kv_length_offsets.dtype)
    kv_block_counts[:rows] -= remove_mask.to(kv_block_counts.dtype)

    row = torch.nonzero(remove_mask).squeeze(1)
    count = kv_block_counts[row].long()
    before = kv_block_ids[row, (count - 1).clamp(min=0)]
    last_kv_block_id[row] = before.to(last_kv_block_id.dtype)
    kv_block_ids[row, count.clamp(max=max_blocks - 1)] = -1
    return blocks_to_release, remove_mask


def mamba_state_selective_copy(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
    error_count: torch.Tensor | None = None,
) -> None:
    """Set each decode row's recurrent states to those after its last accepted token, in place.

        current_states[l, slot] = intermediate_states[l, slot, d]    for every l < num_layers

    Prefill rows and rows whose slot is -1 are skipped.

    Args:
        intermediate_states: [L, M, K + 1, *state], the states after each token of the step.
        current_states: [L, M, *state]. Both: any strides of layers, slots and positions, a dense
            state of any rank and size, and L >= num_layers. With the same dtype they are copied bit
            for bit, with two float dtypes cast.
        prefill_status: [N], 1 for a prefill row. Its length is the number of rows; the other
            vectors have N entries or more.
        state_idx: the slot of each row; rows that copy must all name different slots.
        accepted_counts: d.
        error_count: [1], to which the number of skipped rows is added.

    A row with d outside 0..K or a slot outside -1..M-1 is skipped on a GPU and counted; on the CPU
    it is a ValueError and nothing changes. ValueError also for dtypes and shapes that do not fit.
    """
    rows, device = prefill_status.numel(), prefill_status.device
    _check_states(intermediate_states, current_states, num_layers, device)
    check_indices(
        rows,
        device,
        prefill_status=prefill_status,
        state_idx=state_idx,
        accepted_counts=accepted_counts,
    )
    check_error_count(error_count, device)
    operands = (
        intermediate_states,
        current_states,
        prefill_status,
        state_idx,
        accepted_counts,
        num_layers,
        error_count,
    )
    if not prefill_status.is_cuda:
        _raise_for_wrong_state(*operands[:1], *operands[2:5])
    if use_triton(prefill_status):
        _launch_copy(*operands)
    else:
        mamba_state_selective_copy_reference(*operands)


def mamba_state_selective_copy_reference(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
    error_count: torch.Tensor | None = None,
) -> None:
    """Plain twin of `mamba_state_selective_copy`; skips and counts on any device."""
    copied, wrong = _copied(intermediate_states, prefill_status, state_idx, accepted_counts)
    add_errors(error_count, wrong)
    row = torch.nonzero(copied).squeeze(1)
    slot, accepted = state_idx[row].long(), accepted_counts[row].long()
    states = intermediate_states[:num_layers, slot, accepted]
    current_states[:num_layers, slot] = states.to(current_states.dtype)


def _check_rewind(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    last_kv_block_offset: torch.Tensor,
    kv_length_offsets: torch.Tensor,
    kv_block_counts: torch.Tensor,
    last_kv_block_id: torch.Tensor,
    kv_block_ids: torch.Tensor,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: Count | None,
    error_count: torch.Tensor | None,
) -> None:
    rows, device = accepted_counts.numel(), accepted_counts.device
    check_drafts(num_speculative_tokens)
    if num_speculative_tokens >= block_size_tokens:
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens} must be less than "
            f"block_size_tokens={block_size_tokens}: a row gives back one block at most"
        )
    check_indices(
        rows,
        device,
        accepted_counts=accepted_counts,
        prefill_status=prefill_status,
        last_kv_block_offset=last_kv_block_offset,
        kv_length_offsets=kv_length_offsets,
        kv_block_counts=kv_block_counts,
        last_kv_block_id=last_kv_block_id,
    )
    check_table("kv_block_ids", kv_block_ids, (rows, 1), device)
    if num_active_requests is not None:
        check_count("num_active_requests", num_active_requests, rows, device)
    check_error_count(error_count, device)


def _rewound(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    last_kv_block_offset: torch.Tensor,
    kv_block_counts: torch.Tensor,
    max_blocks: int,
    drafts: int,
    num_active_requests: Count | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row, [N]: whether it is live, how many tokens it goes back, whether it cannot."""
    rows = accepted_counts.numel()
    live = torch.ones_like(accepted_counts, dtype=torch.bool)
    if num_active_requests is not None:
        live = torch.arange(rows, device=live.device) < num_active_requests
    decode = live & (prefill_status[:rows] != _PREFILL.value)
    wrong = decode & ((accepted_counts < 0) | (accepted_counts > drafts))
    back = (drafts - accepted_counts).where(decode & ~wrong, 0)
    count = kv_block_counts[:rows]
    removed = live & (last_kv_block_offset[:rows] - back < 0)
    # Blocks that remain must be in the table, so that the last one's id can be read there.
    return live, back, wrong | (removed & ((count < 1) | (count > max_blocks + 1)))


def _raise_for_wrong_rewind(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    last_kv_block_offset: torch.Tensor,
    kv_block_counts: torch.Tensor,
    max_blocks: int,
    drafts: int,
    num_active_requests: Count | None,
) -> None:
    _, _, wrong = _rewound(
        accepted_counts,
        prefill_status,
        last_kv_block_offset,
        kv_block_counts,
        max_blocks,
        drafts,
        num_active_requests,
    )
    for row in wrong.nonzero().flatten().tolist():
        raise ValueError(
            f"row {row} cannot be rewound: accepted_counts={int(accepted_counts[row])} must be in "
            f"0..{drafts}, and kv_block_counts={int(kv_block_counts[row])} in 1..{max_blocks + 1} "
            "where a block is removed"
        )


def _check_states(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    num_layers: int,
    device: torch.device,
) -> None:
    shapes = tuple(intermediate_states.shape), tuple(current_states.shape)
    if len(shapes[0]) < 3 or shapes[0][:2] + shapes[0][3:] != shapes[1] or shapes[0][2] < 1:
        raise ValueError(
            "intermediate_states must be [layers, slots, K + 1, *state] and current_states "
            f"[layers, slots, *state], not {shapes[0]} and {shapes[1]}"
        )
    if not 0 <= num_layers <= shapes[0][0]:
        raise ValueError(f"num_layers={num_layers} is outside 0..{shapes[0][0]}, the layers given")
    for name, states, lead in (
        ("intermediate_states", intermediate_states, 3),
        ("current_states", current_states, 2),
    ):
        if states.device != device:
            raise ValueError(f"{name} is on {states.device}, other tensors are on {device}")
        if states.numel() and not states[(0,) * lead].is_contiguous():
            raise ValueError(f"{name} must be dense within a state: strides {states.stride()}")
    dtypes = intermediate_states.dtype, current_states.dtype
    if dtypes[0] != dtypes[1] and not set(dtypes) <= set(FLOAT_DTYPES):
        raise ValueError(f"states of {dtypes[0]} cannot be cast to {dtypes[1]}")
    if dtypes[0].itemsize not in BITS:
        raise ValueError(f"states of {dtypes[0]} cannot be copied")


def _copied(
    intermediate_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [N] each: the rows to copy, and those to skip for a wrong slot or count."""
    slots, positions = intermediate_states.shape[1:3]
    rows = prefill_status.numel()
    slot, accepted = state_idx[:rows], accepted_counts[:rows]
    decode = (prefill_status != _PREFILL.value) & (slot != -1)
    right = (slot >= 0) & (slot < slots) & (accepted >= 0) & (accepted < positions)
    return decode & right, decode & ~right


def _raise_for_wrong_state(
    intermediate_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
) -> None:
    slots, positions = intermediate_states.shape[1:3]
    _, wrong = _copied(intermediate_states, prefill_status, state_idx, accepted_counts)
    for row in wrong.nonzero().flatten().tolist():
        raise ValueError(
            f"row {row}: state_idx={int(state_idx[row])} must be in -1..{slots - 1} and "
            f"accepted_counts={int(accepted_counts[row])} in 0..{positions - 1}"
        )


def _launch_rewind(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    last_kv_block_offset: torch.Tensor,
    kv_length_offsets: torch.Tensor,
    kv_block_counts: torch.Tensor,
    last_kv_block_id: torch.Tensor,
    kv_block_ids: torch.Tensor,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: Count | None,
    error_count: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = accepted_counts.numel()
    blocks_to_release = last_kv_block_id.new_empty(rows)
    remove_mask = torch.empty(rows, dtype=torch.bool, device=accepted_counts.device)
    if rows:
        launcher(_rewind_kernel, (triton.cdiv(rows, _BLOCK),))(
            accepted_counts,
            prefill_status,
            last_kv_block_offset,
            kv_length_offsets,
            kv_block_counts,
            last_kv_block_id,
            kv_block_ids,
            blocks_to_release,
            remove_mask,
            error_count,
            rows if num_active_requests is None else num_active_requests,
            rows,
            kv_block_ids.shape[1],
            kv_block_ids.stride(0),
            K=num_speculative_tokens,
            BLOCK_SIZE=block_size_tokens,
            ON_DEVICE=isinstance(num_active_requests, torch.Tensor),
            BLOCK=_BLOCK,
        )
    return blocks_to_release, remove_mask


def _launch_copy(
    intermediate_states: torch.Tensor,
    current_states: torch.Tensor,
    prefill_status: torch.Tensor,
    state_idx: torch.Tensor,
    accepted_counts: torch.Tensor,
    num_layers: int,
    error_count: torch.Tensor | None,
) -> None:
    elements = math.prod(current_states.shape[2:])
    programs = prefill_status.numel() * num_layers * elements
    if programs == 0:
        return
    _, slots, positions = intermediate_states.shape[:3]
    if intermediate_states.dtype == current_states.dtype:
        # Copy integers, because a float may change its bits on the way (NaN payloads).
        bits = BITS[current_states.element_size()]
        intermediate_states, current_states = (
            intermediate_states.view(bits),
            current_states.view(bits),
        )
    chunk = _CHUNK_BYTES // current_states.element_size()
    chunk = triton.next_power_of_2(min(elements, chunk))
    launcher(_copy_kernel, (prefill_status.numel(), num_layers, triton.cdiv(elements, chunk)))(
        intermediate_states,
        current_states,
        prefill_status,
        state_idx,
        accepted_counts,
        error_count,
        *intermediate_states.stride()[:3],
        *current_states.stride()[:2],
        slots,
        positions,
        elements,
        CHUNK=chunk,
    )


@triton.jit(do_not_specialize=["num_active_requests", "rows"])
def _rewind_kernel(
    accepted_ptr,
    prefill_status_ptr,
    offset_ptr,
    length_ptr,
    block_count_ptr,
    last_id_ptr,
    ids_ptr,
    release_ptr,
    remove_ptr,
    error_count_ptr,
    num_active_requests,
    rows,
    max_blocks,
    ids_stride,
    K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < tl.minimum(load_count(num_active_requests, ON_DEVICE), rows)
    decode = live & (tl.load(prefill_status_ptr + row, mask=live, other=0) != _PREFILL)
    accepted = tl.load(accepted_ptr + row, mask=decode, other=K).to(tl.int64)
    offset = tl.load(offset_ptr + row, mask=live, other=0).to(tl.int64)
    length = tl.load(length_ptr + row, mask=live, other=0).to(tl.int64)
    count = tl.load(block_count_ptr + row, mask=live, other=1).to(tl.int64)
    last_id = tl.load(last_id_ptr + row, mask=live, other=0).to(tl.int64)

    wrong = (accepted < 0) | (accepted > K)
    back = tl.where(wrong, 0, K - accepted)
    offset -= back
    removed = live & (offset < 0)
    wrong = wrong | (removed & ((count < 1) | (count > max_blocks + 1)))
    live = live & (wrong == 0)
    removed = removed & live
    count -= removed.to(tl.int64)
    ids_ptr += row * ids_stride
    before = tl.load(ids_ptr + tl.maximum(count - 1, 0), mask=removed, other=0)
    count_errors(error_count_ptr, wrong)
    # Several threads may hold a row, and a last block's entry is first read, then cleared: all of
    # them must have read it by now.
    tl.debug_barrier()

    # The remainder of a negative number is negative in C.
    offset = offset % BLOCK_SIZE
    tl.store(offset_ptr + row, tl.where(offset < 0, offset + BLOCK_SIZE, offset), mask=live)
    tl.store(length_ptr + row, length - back, mask=live)
    tl.store(block_count_ptr + row, count, mask=removed)
    tl.store(last_id_ptr + row, before, mask=removed)
    tl.store(ids_ptr + tl.minimum(count, max_blocks - 1), -1, mask=removed)
    tl.store(release_ptr + row, tl.where(live, last_id, 0), mask=row < rows)
    tl.store(remove_ptr + row, removed, mask=row < rows)


@triton.jit
def _copy_kernel(
    intermediate_ptr,
    current_ptr,
    prefill_status_ptr,
    state_idx_ptr,
    accepted_ptr,
    error_count_ptr,
    from_layer_stride,
    from_slot_stride,
    from_position_stride,
    to_layer_stride,
    to_slot_stride,
    slots,
    positions,
    elements,
    CHUNK: tl.constexpr,
):
    """One program a row, layer and chunk of a state."""
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(2)
    slot = tl.load(state_idx_ptr + row).to(tl.int64)
    if (tl.load(prefill_status_ptr + row) == _PREFILL) | (slot == -1):
        return
    accepted = tl.load(accepted_ptr + row).to(tl.int64)
    if (slot < 0) | (slot >= slots) | (accepted < 0) | (accepted >= positions):
        if error_count_ptr is not None:
            tl.atomic_add(error_count_ptr, 1, mask=(layer == 0) & (chunk == 0))
        return
    element = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = element < elements
    intermediate_ptr += (
        layer * from_layer_stride + slot * from_slot_stride + accepted * from_position_stride
    )
    current_ptr += layer * to_layer_stride + slot * to_slot_stride
    tl.store(current_ptr + element, tl.load(intermediate_ptr + element, mask=mask), mask=mask)
