"""Codes that requests give, in place of drawn ones.

They are in a host table, by slot and by the position of the frame. One launch at the start of a
frame fetches those of all lanes, because each read goes to the host.

Letters: N lanes, S slots, P positions, K codes of a frame.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs


def given_codes(
    table_SPK: torch.Tensor,
    until_S: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Fetch the codes that each lane's next frame is given: new int32 [K, N], -1 for a code that is
    drawn. One launch.

    Args:
        table_SPK: int16 [S, P, K], dense; the device's memory or pinned host memory: the codes of
            the frame at each position, -1 for those that are drawn.
        until_S: int32, the position at which a slot's given frames end, at most P; 0 for none.
        slot_N: int32, -1 = padded lane, whose codes are undefined.
        position_N: int32, of the query: the frame's own position is one more.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    lanes, slots = slot_N.numel(), until_S.numel()
    check_lanes(lanes, slot=slot_N, position=position_N)
    check_lanes(slots, until=until_S)
    shape, dtype = tuple(table_SPK.shape), table_SPK.dtype
    dense = dtype == torch.int16 and table_SPK.is_contiguous()
    if len(shape) != 3 or shape[0] != slots or 0 in shape or not dense:
        raise ValueError(f"table must be a dense int16 [{slots}, P, K], not {dtype} {shape}")
    if not use_triton(slot_N):
        return given_codes_reference(table_SPK, until_S, slot_N, position_N)
    _, positions, places = shape
    frame_KN = slot_N.new_empty(places, lanes)
    launcher(_given_codes_kernel, (lanes,))(
        table_SPK,
        until_S,
        slot_N,
        position_N,
        frame_KN,
        lanes,
        positions,
        K=places,
        BLOCK_K=triton.next_power_of_2(places),
        num_warps=1,
        **launch_options(pdl),
    )
    return frame_KN


def given_codes_reference(
    table_SPK: torch.Tensor,
    until_S: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
) -> torch.Tensor:
    """Plain twin of `given_codes`."""
    frame_KN = slot_N.new_empty(table_SPK.shape[2], slot_N.numel())
    for lane in live_lanes(slot_N).tolist():
        slot, position = int(slot_N[lane]), int(position_N[lane]) + 1
        given = position < int(until_S[slot])
        frame_KN[:, lane] = table_SPK[slot, position].to(frame_KN) if given else -1
    return frame_KN


@triton.jit
def _given_codes_kernel(
    table_ptr,
    until_ptr,
    slot_ptr,
    position_ptr,
    frame_ptr,
    lanes,
    positions,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + lane).to(tl.int64)
    live = slot >= 0
    position = tl.load(position_ptr + lane, mask=live, other=0) + 1
    given = live & (position < tl.load(until_ptr + slot, mask=live, other=0))
    k = tl.arange(0, BLOCK_K)
    source = table_ptr + (slot * positions + position) * K + k
    code_K = tl.load(source, mask=given & (k < K), other=-1).to(tl.int32)
    tl.store(frame_ptr + k * lanes + lane, code_K, mask=live & (k < K))
