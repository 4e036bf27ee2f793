"""The first kernel of a decode step: commands applied, the rows' queries gathered and embedded.

Letters: S slots, R rows, V vocabulary, H hidden, T groups of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.dispatch import use_triton
from graphengine.kernels.embedding import embed_reference
from graphengine.kernels.lanes import (
    FLOAT_DTYPES,
    check_lanes,
    check_rows,
    check_vector,
    live_lanes,
    output_rows,
)
from graphengine.kernels.pdl import launch_options, wait_for_inputs
from graphengine.kernels.residual import Residual
from graphengine.kernels.state import (
    DecodeLanes,
    SlotState,
    apply_commands_reference,
    check_state,
    start_afresh,
)

_BLOCK_S = 64


def begin_decode(
    state: SlotState,
    command_epoch_S: torch.Tensor,
    slot_of_row_R: torch.Tensor,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    pdl: bool = False,
) -> DecodeLanes:
    """Apply every pending command, then fetch and embed the query of each row's slot; one launch.

    As `apply_commands`, a slot whose epoch differs from the commanded one is started afresh: named
    by a row or not, it has no query in this step. A lane is live where `slot_of_row` names a slot
    that runs: -1, a number past the last slot, or a slot that stopped or starts make a padded lane.
    No slot may be named twice.

    Args:
        state: updated in place.
        command_epoch_S, slot_of_row_R: int32, host-owned.
        embedding_VH: any float dtype, dense rows; may exceed 2**31 elements.
        norm_weight_H: any float dtype: the weight of the first RMSNorm.
        residual: R lanes, written in place: x the embedding, scaled = x * norm_weight rounded once,
            squares the sum of x * x and then zeros. A live lane whose token is outside 0..V-1
            becomes NaN; padded lanes are not written.
        pdl: the launch may overlap the one before, by the rules of `kernels.pdl`.

    Returns:
        New tensors. ValueError for a shape or dtype that does not fit.
    """
    slots = check_state(state)
    check_lanes(slots, command_epoch=command_epoch_S)
    rows = slot_of_row_R.numel()
    check_lanes(rows, slot_of_row=slot_of_row_R)
    groups = _check_floats(embedding_VH, norm_weight_H, residual, rows)
    if not use_triton(slot_of_row_R):
        return begin_decode_reference(
            state, command_epoch_S, slot_of_row_R, embedding_VH, norm_weight_H, residual
        )
    lanes = DecodeLanes(*(torch.empty_like(slot_of_row_R) for _ in DecodeLanes._fields))
    V, H = embedding_VH.shape
    block_h = triton.next_power_of_2(H)
    _begin_decode_kernel[(rows + triton.cdiv(slots, _BLOCK_S),)](
        command_epoch_S,
        slot_of_row_R,
        state.epoch,
        state.kv_len,
        state.running,
        state.next_token,
        *lanes,
        embedding_VH,
        norm_weight_H,
        *residual,
        embedding_VH.stride(0),
        residual.x.stride(0),
        residual.scaled.stride(0),
        rows,
        slots,
        V,
        H=H,
        T=groups,
        BLOCK_H=block_h,
        BLOCK_T=triton.next_power_of_2(groups),
        BLOCK_R=triton.next_power_of_2(rows),
        BLOCK_S=_BLOCK_S,
        num_warps=min(max(block_h // 512, 4), 16),
        **launch_options(pdl),
    )
    return lanes


def begin_decode_reference(
    state: SlotState,
    command_epoch_S: torch.Tensor,
    slot_of_row_R: torch.Tensor,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
) -> DecodeLanes:
    """Plain twin of `begin_decode`."""
    apply_commands_reference(state, command_epoch_S)
    lanes = _gather_reference(state, slot_of_row_R)
    embed_reference(lanes.token, embedding_VH, lanes.slot, out=residual.x)
    live = live_lanes(lanes.slot)
    x = residual.x[live]
    residual.scaled[live] = (x * norm_weight_H.float()).to(residual.scaled.dtype)
    residual.squares[:, live] = 0
    residual.squares[0, live] = (x * x).sum(dim=1)
    return lanes


def _gather_reference(state: SlotState, slot_of_row_R: torch.Tensor) -> DecodeLanes:
    """The query of each row's slot."""
    slots = state.running.shape[0]
    named = (slot_of_row_R >= 0) & (slot_of_row_R < slots)
    slot = slot_of_row_R.where(named, 0).long()
    live = named & (state.running[slot] != 0)
    return DecodeLanes(
        token=state.next_token[slot],
        slot=slot_of_row_R.where(live, -1),
        position=state.kv_len[slot],
    )


def _check_floats(
    embedding_VH: torch.Tensor, norm_weight_H: torch.Tensor, residual: Residual, rows: int
) -> int:
    """The residual's number of groups; ValueError unless everything fits `rows` lanes."""
    check_rows(embedding_VH=embedding_VH)
    H = embedding_VH.shape[1]
    if norm_weight_H.dtype not in FLOAT_DTYPES:
        raise ValueError(f"norm_weight must be one of {FLOAT_DTYPES}, not {norm_weight_H.dtype}")
    check_vector("norm_weight", norm_weight_H, H, norm_weight_H.dtype)
    x, scaled, squares = residual
    output_rows(x, (rows, H), dtype=torch.float32, like=x)
    output_rows(scaled, (rows, H), dtype=scaled.dtype, like=scaled)
    shape = tuple(squares.shape)
    dense = squares.dtype == torch.float32 and squares.is_contiguous()
    if len(shape) != 2 or shape[0] < 1 or shape[1] != rows or not dense:
        raise ValueError(
            f"squares must be a dense float32 [T, {rows}], not {squares.dtype} {shape}"
        )
    return shape[0]


@triton.jit
def _begin_decode_kernel(
    command_epoch_ptr,
    slot_of_row_ptr,
    epoch_ptr,
    kv_len_ptr,
    running_ptr,
    next_token_ptr,
    token_ptr,
    slot_ptr,
    position_ptr,
    embedding_ptr,
    norm_weight_ptr,
    x_ptr,
    scaled_ptr,
    squares_ptr,
    embedding_stride,
    x_stride,
    scaled_stride,
    rows,
    slots,
    V,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row, which alone may write the slot that the row names; then one for every
    BLOCK_S slots, which sees to those that no row names."""
    row = tl.program_id(0)
    if row >= rows:
        _command_unnamed_slots(
            row - rows,
            command_epoch_ptr,
            slot_of_row_ptr,
            epoch_ptr,
            kv_len_ptr,
            running_ptr,
            next_token_ptr,
            rows,
            slots,
            BLOCK_R,
            BLOCK_S,
            PDL,
        )
    else:
        slot = tl.load(slot_of_row_ptr + row)
        named = (slot >= 0) & (slot < slots)
        command = tl.load(command_epoch_ptr + slot, mask=named, other=0)
        h = tl.arange(0, BLOCK_H)
        weight = tl.load(norm_weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        wait_for_inputs(PDL)

        pending = named & (command != tl.load(epoch_ptr + slot, mask=named, other=0))
        running = tl.load(running_ptr + slot, mask=named, other=0)
        token = tl.load(next_token_ptr + slot, mask=named, other=0)
        position = tl.load(kv_len_ptr + slot, mask=named, other=0)
        live = named & (running != 0) & (pending == 0)
        # Every warp has read the slot's state before one of them overwrites it.
        tl.debug_barrier()
        start_afresh(slot, command, pending, epoch_ptr, kv_len_ptr, running_ptr, next_token_ptr)
        tl.store(slot_ptr + row, tl.where(live, slot, -1))
        tl.store(token_ptr + row, token, mask=live)
        tl.store(position_ptr + row, position, mask=live)

        known = (token >= 0) & (token < V)
        mask = live & (h < H)
        source = embedding_ptr + token.to(tl.int64) * embedding_stride + h
        x = tl.load(source, mask=mask & known, other=float("nan")).to(tl.float32)
        lane = row.to(tl.int64)
        tl.store(x_ptr + lane * x_stride + h, x, mask=mask)
        scaled = (x * weight).to(scaled_ptr.dtype.element_ty)
        tl.store(scaled_ptr + lane * scaled_stride + h, scaled, mask=mask)
        square = tl.sum(tl.where(h < H, x * x, 0.0), 0)
        t = tl.arange(0, BLOCK_T)
        tl.store(squares_ptr + t * rows + row, tl.where(t == 0, square, 0.0), mask=live & (t < T))


@triton.jit
def _command_unnamed_slots(
    part,
    command_epoch_ptr,
    slot_of_row_ptr,
    epoch_ptr,
    kv_len_ptr,
    running_ptr,
    next_token_ptr,
    rows,
    slots,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Start afresh those of a part's slots that have a pending command and no row."""
    slot = part * BLOCK_S + tl.arange(0, BLOCK_S)
    r = tl.arange(0, BLOCK_R)
    slot_of_row = tl.load(slot_of_row_ptr + r, mask=r < rows, other=-1)
    named = tl.max((slot[:, None] == slot_of_row[None, :]).to(tl.int32), 1) != 0
    ours = (slot < slots) & (named == 0)
    command = tl.load(command_epoch_ptr + slot, mask=ours, other=0)
    wait_for_inputs(PDL)

    pending = ours & (command != tl.load(epoch_ptr + slot, mask=ours, other=0))
    # A slot may be held by several threads: all of them have read its epoch by now.
    tl.debug_barrier()
    start_afresh(slot, command, pending, epoch_ptr, kv_len_ptr, running_ptr, next_token_ptr)
