"""Frames whose codes are drawn together, each by a head of its own, one step later than the code
before it.

    spread_lanes    lanes -> a row for each code after the first, with its own sampling parameters
    take_frame      the tiles of all codes -> the codes that are not given, delayed, and the frame's
                    token

Code k of the frame that a sequence draws at its step t belongs to the sound's frame t - 1 - k: so
the first frames begin with codes that stand for no sound, and the last ones end with such. Those
that begin follow from t. Those that end follow from the first frame with an end code anywhere: the
frame after it has one end code at least, its first code, the next one two, and so on, until all are
end codes. That frame ends the request.

Letters: N lanes, S slots, K codes of a frame, J = K - 1 codes after the first, R = N * J rows, C
tiles of the first codebook, D tiles of the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.frames.codes import FrameToken, check_frame, new_token
from graphengine.kernels.frames.embed import check_code
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import (
    check_tiles,
    tile_of_token_reference,
    token_of_tiles_reference,
)
from graphengine.kernels.sample.tiles import tile_of_token, token_of_tiles

_MAX_BLOCK_C = 4096
_SPREAD = ("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "seed")


class Delays(NamedTuple):
    """The codes that fill delays, and the token of the frame that ends a request."""

    begin: int
    end: int
    token: int


class DelayState(NamedTuple):
    """Where each slot's delays begin and end."""

    start: torch.Tensor
    """int32 [S], host-owned: the position of the query that draws a sequence's first frame."""
    begun: torch.Tensor
    """int32 [S], host-owned: frames of the delay at the beginning that the prompt has already,
    counted from 1; 0: the first frame is all begin codes, and no other frame has any delay."""
    ending: torch.Tensor
    """int32 [S]: codes of the next frame that must be end codes; written by `take_frame`."""


class CodeRows(NamedTuple):
    """A row for each code after the first of each lane: row n * J + j is code j + 1 of lane n."""

    slot: torch.Tensor
    """int32 [R]: the row's own number, by which it finds its parameters; -1 in padded lanes."""
    position: torch.Tensor
    """int32 [R]: the lane's position plus (j + 1) times the stride."""
    sampling: SamplingTensors
    """Parameters by row."""


def spread_lanes(
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    drawn: SamplingTensors,
    neutral: SamplingTensors,
    *,
    stride: int,
    pdl: bool = False,
) -> CodeRows:
    """A row for each code after the first; one launch.

    Args:
        slot_N: int32, -1 = padded lane.
        position_N: int32.
        params: by slot: `min_p`, `top_n_sigma` and `seed` are those of all codes.
        drawn: `temperature`, `top_k` and `top_p` are [J, S or more], of each code after the first.
        neutral: of R rows or more, on the same device: `stop_ids` and `min_len` of the rows.
        stride: positions between the noise of a code and that of the next one.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    lanes = slot_N.numel()
    check_lanes(lanes, slot=slot_N, position=position_N)
    codes, slots = drawn.temperature.shape
    for name in ("temperature", "top_k", "top_p"):
        tensor = getattr(drawn, name)
        if tensor.shape != (codes, slots) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} of codes must be a dense [{codes}, {slots}], not {list(tensor.shape)}"
            )
    rows = lanes * codes
    if len(neutral.min_len) < rows:
        raise ValueError(f"neutral parameters of {len(neutral.min_len)} rows for {rows}")
    made = CodeRows(
        slot_N.new_empty(rows),
        slot_N.new_empty(rows),
        SamplingTensors(
            **{name: getattr(params, name).new_empty(rows) for name in _SPREAD},
            stop_ids=neutral.stop_ids[:rows],
            min_len=neutral.min_len[:rows],
        ),
    )
    if not use_triton(slot_N):
        _spread_reference(slot_N, position_N, params, drawn, made, stride)
        return made
    launcher(_spread_kernel, (lanes,))(
        slot_N,
        position_N,
        drawn.temperature,
        drawn.top_k,
        drawn.top_p,
        params.min_p,
        params.top_n_sigma,
        params.seed,
        made.slot,
        made.position,
        *(getattr(made.sampling, name) for name in _SPREAD),
        slots,
        stride,
        J=codes,
        BLOCK_J=triton.next_power_of_2(codes),
        num_warps=1,
        **launch_options(pdl),
    )
    return made


def _spread_reference(
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    drawn: SamplingTensors,
    made: CodeRows,
    stride: int,
) -> None:
    """Plain twin of `spread_lanes`."""
    codes = len(drawn.temperature)
    live = live_lanes(slot_N)
    slot = slot_N[live].long()
    row = torch.arange(made.slot.numel(), dtype=torch.int32, device=slot_N.device)
    made.slot.view(-1, codes)[:] = -1
    made.slot.view(-1, codes)[live] = row.view(-1, codes)[live]
    ahead = stride * torch.arange(1, codes + 1, dtype=torch.int32, device=slot_N.device)
    made.position.view(-1, codes)[live] = position_N[live, None] + ahead
    for name in _SPREAD:
        rows = getattr(made.sampling, name).view(-1, codes)
        own = getattr(drawn, name)
        if name in ("temperature", "top_k", "top_p"):
            rows[live] = own[:, slot].T
        else:
            rows[live] = getattr(params, name)[slot, None].expand(-1, codes)


def take_frame(
    best_NC: torch.Tensor,
    health_NC: torch.Tensor,
    best_RD: torch.Tensor,
    health_RD: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    frame_KN: torch.Tensor,
    code_SK: torch.Tensor,
    state: DelayState,
    delays: Delays,
    *,
    pdl: bool = False,
) -> FrameToken:
    """Draw all codes of each live lane's frame, delay and note them, and give the frame its token;
    one launch. A code that is given is neither drawn nor delayed.

    Args:
        best_NC, health_NC: tiles of the first codes, from a head with the sampler folded in or
            from `sample_tiles`.
        best_RD, health_RD: those of the others, by the rows of `spread_lanes`; with one code of a
            frame they are not read.
        slot_N: int32, -1 = padded lane.
        position_N: int32, of the query.
        frame_KN: int32, dense: the codes that live lanes are given, from `given_codes`, or numbers
            below 0; they become the frames' codes, -1 where none could be drawn.
        code_SK: int32, dense: the same for the lanes' slots.
        state: `ending` of the lanes' slots is updated.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    A frame of end codes has `delays.token`, others their first code, and one with a code that could
    not be drawn -1. ValueError for a shape or dtype that does not fit.
    """
    lanes = slot_N.numel()
    check_lanes(lanes, slot=slot_N, position=position_N)
    slots, places = check_code(code_SK)
    check_frame(frame_KN, places, lanes)
    check_lanes(slots, **state._asdict())
    tiles = check_tiles(best_NC, health_NC, lanes)
    others = check_tiles(best_RD, health_RD, lanes * (places - 1)) if places > 1 else 1
    if not use_triton(slot_N):
        return take_frame_reference(
            best_NC,
            health_NC,
            best_RD,
            health_RD,
            slot_N,
            position_N,
            frame_KN,
            code_SK,
            state,
            delays,
        )
    token = new_token(best_NC, health_NC, slot_N)
    launcher(_take_frame_kernel, (lanes,))(
        best_NC,
        health_NC,
        best_RD,
        health_RD,
        slot_N,
        position_N,
        frame_KN,
        code_SK,
        state,
        token,
        tiles,
        others,
        lanes,
        K=places,
        BEGIN=delays.begin,
        END=delays.end,
        TOKEN=delays.token,
        BLOCK_C=min(triton.next_power_of_2(tiles), _MAX_BLOCK_C),
        BLOCK_D=min(triton.next_power_of_2(others), _MAX_BLOCK_C),
        num_warps=1,
        **launch_options(pdl),
    )
    return token


def take_frame_reference(
    best_NC: torch.Tensor,
    health_NC: torch.Tensor,
    best_RD: torch.Tensor,
    health_RD: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    frame_KN: torch.Tensor,
    code_SK: torch.Tensor,
    state: DelayState,
    delays: Delays,
) -> FrameToken:
    """Plain twin of `take_frame`."""
    live, places = live_lanes(slot_N), code_SK.shape[1]
    slot = slot_N[live].long()
    drawn = [token_of_tiles_reference(best_NC[live], health_NC[live])]
    for place in range(places - 1):
        row = live * (places - 1) + place
        drawn.append(token_of_tiles_reference(best_RD[row], health_RD[row]))
    drawn_KL = torch.stack(drawn)

    step_L = position_N[live] - state.start[slot]
    ending_L = state.ending[slot].where(step_L > 0, 0)
    begun_L = state.begun[slot]
    place_K1 = torch.arange(places, dtype=torch.int32, device=slot_N.device)[:, None]
    first_L = torch.where(step_L == 0, 0, places)
    first_L = (begun_L + step_L - 1).where(begun_L > 0, first_L)
    code_KL = drawn_KL.where(place_K1 >= ending_L, delays.end)
    code_KL = code_KL.where(place_K1 < first_L, delays.begin).where(drawn_KL >= 0, -1)
    given_KL = frame_KN[:, live]
    code_KL = given_KL.where(given_KL >= 0, code_KL).to(torch.int32)

    has_end_L = (code_KL == delays.end).any(dim=0)
    valid_L = (code_KL >= 0).all(dim=0)
    ends_L = (code_KL == delays.end).all(dim=0)
    state.ending[slot] = torch.where((ending_L > 0) | has_end_L, ending_L + 1, 0).to(torch.int32)
    frame_KN[:, live] = code_KL
    code_SK[slot] = code_KL.T
    token_L = torch.where(ends_L, delays.token, code_KL[0]).where(valid_L, -1).to(torch.int32)
    made = new_token(best_NC, health_NC, slot_N)
    best_L, health_L = tile_of_token_reference(token_L, valid_L)
    made.best[live, 0], made.health[live, 0], made.token[live] = best_L, health_L, token_L
    return made


@triton.jit
def _spread_kernel(
    slot_ptr,
    position_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    top_n_sigma_ptr,
    seed_ptr,
    row_slot_ptr,
    row_position_ptr,
    row_temperature_ptr,
    row_top_k_ptr,
    row_top_p_ptr,
    row_min_p_ptr,
    row_top_n_sigma_ptr,
    row_seed_ptr,
    slots,
    stride,
    J: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + lane).to(tl.int64)
    live = slot >= 0
    position = tl.load(position_ptr + lane, mask=live, other=0)
    j = tl.arange(0, BLOCK_J)
    inside, row = j < J, lane * J + j
    mask = live & inside
    tl.store(row_slot_ptr + row, tl.where(live, row, -1), mask=inside)
    tl.store(row_position_ptr + row, position + (j + 1) * stride, mask=mask)

    own = j * slots + slot
    temperature = tl.load(temperature_ptr + own, mask=mask, other=0.0)
    tl.store(row_temperature_ptr + row, temperature, mask=mask)
    tl.store(row_top_k_ptr + row, tl.load(top_k_ptr + own, mask=mask, other=0), mask=mask)
    tl.store(row_top_p_ptr + row, tl.load(top_p_ptr + own, mask=mask, other=0.0), mask=mask)

    shared = slot + 0 * j
    tl.store(row_min_p_ptr + row, tl.load(min_p_ptr + shared, mask=mask, other=0.0), mask=mask)
    sigma = tl.load(top_n_sigma_ptr + shared, mask=mask, other=0.0)
    tl.store(row_top_n_sigma_ptr + row, sigma, mask=mask)
    tl.store(row_seed_ptr + row, tl.load(seed_ptr + shared, mask=mask, other=0), mask=mask)


@triton.jit
def _take_frame_kernel(
    best_ptr,
    health_ptr,
    row_best_ptr,
    row_health_ptr,
    slot_ptr,
    position_ptr,
    frame_ptr,
    code_ptr,
    state,
    made,
    tiles,
    others,
    lanes,
    K: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    TOKEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + lane).to(tl.int64)
    live = slot >= 0
    step = tl.load(position_ptr + lane, mask=live, other=0)
    step -= tl.load(state.start + slot, mask=live, other=0)
    begun = tl.load(state.begun + slot, mask=live, other=0)
    ending = tl.load(state.ending + slot, mask=live, other=0)
    ending = tl.where(step > 0, ending, 0)
    # The first code that must be a begin code.
    first = tl.where(begun > 0, begun + step - 1, tl.where(step == 0, 0, K))

    leading = 0
    lowest = 0
    ends = 0
    for place in tl.static_range(K):
        if place == 0:
            drawn = token_of_tiles(best_ptr, health_ptr, lane, tiles, live, BLOCK_C)
        else:
            row = lane * (K - 1) + place - 1
            drawn = token_of_tiles(row_best_ptr, row_health_ptr, row, others, live, BLOCK_D)
        code = tl.where(place < ending, END, drawn)
        code = tl.where(place >= first, BEGIN, code)
        code = tl.where(drawn >= 0, code, -1)
        given = tl.load(frame_ptr + place * lanes + lane, mask=live, other=-1)
        code = tl.where(given >= 0, given, code)
        tl.store(frame_ptr + place * lanes + lane, code, mask=live)
        tl.store(code_ptr + slot * K + place, code, mask=live)
        if place == 0:
            leading = code
        lowest = tl.minimum(lowest, code)
        ends += (code == END).to(tl.int32)

    following = tl.where((ending > 0) | (ends > 0), ending + 1, 0)
    tl.store(state.ending + slot, following, mask=live)
    valid = lowest >= 0
    token = tl.where(valid, tl.where(ends == K, TOKEN, leading), -1)
    best, health = tile_of_token(token, valid)
    tl.store(made.best + lane, best, mask=live)
    tl.store(made.health + lane, health, mask=live)
    tl.store(made.token + lane, token, mask=live)
