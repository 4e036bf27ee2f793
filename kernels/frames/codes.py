"""Codes of a frame: each is drawn, noted, and embedded for the next position of an inner decoder.

    take_code    the tiles of code k -> the code, unless it is given, and its embedding
    end_frame    the tiles of the last code -> the frame's token

A frame has a token, which the kernels of all steps commit and publish: its first code, or the
token that stands for the frame that ends a request. A frame with a code that could not be drawn
(its logits have a NaN, or nothing finite) has none.

Letters: N lanes, S slots, K codes of a frame, V codes of a codebook, M = K * V rows of the table, C
tiles of the codebook, H hidden, I hidden of the inner decoder, J streams.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.frames.embed import check_codes
from graphengine.kernels.sample.sampling import (
    check_tiles,
    tile_of_token_reference,
    token_of_tiles_reference,
)
from graphengine.kernels.sample.tiles import tile_of_token, token_of_tiles

_MAX_BLOCK_C = 4096


class FrameEnd(NamedTuple):
    """When a frame ends its request, and the token that it then has."""

    code: int
    judged: int
    """A frame whose first `judged` codes are all `code` ends the request; at least 1."""
    token: int


class FrameToken(NamedTuple):
    """The token of each lane's frame; valid until the next replay."""

    best: torch.Tensor
    """int64 [N, 1]; like `health`, a tile from which `token_of_tiles` makes the token."""
    health: torch.Tensor
    """int32 [N, 1]"""
    token: torch.Tensor
    """int32 [N]: -1 for a frame without one; undefined in padded lanes."""


def take_code(
    best_NC: torch.Tensor,
    health_NC: torch.Tensor,
    slot_N: torch.Tensor,
    frame_KN: torch.Tensor,
    code_SK: torch.Tensor,
    table_MH: torch.Tensor,
    x_JNI: torch.Tensor,
    *,
    place: int,
    first_UH: torch.Tensor | None = None,
    book_rows: int = 0,
    seeds: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """Draw code `place` of each live lane's frame out of its tiles, note and embed it; one launch.

    Args:
        best_NC, health_NC: from `sample_tiles` or from a head with the sampler folded in.
        slot_N: int32, -1 = padded lane.
        frame_KN: int32, dense: row `place` has the code that a live lane is given, from
            `given_codes`, or a number below 0; it becomes the code, -1 where none could be drawn.
        code_SK: int32, dense: the same for the lanes' slots.
        table_MH: any float dtype, dense rows: row k * V + c embeds code c at place k.
        x_JNI: float32, dense: the next runs' streams; live lanes become 0.
        place: 0 to K - 2.
        first_UH: the first codebook, with a number of codes of its own; the table then has the
            others. None: the table has all.
        book_rows: rows that the table has for each codebook; it may then lack the last codebook,
            which is never embedded. 0: the table has all codebooks.
        seeds: the next run's stream, of which there is one, begins with the embedding instead of
            zeros; I is H then.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        New [N, H] of the table's dtype, or with `seeds` the stream x[0]; NaN where no code could be
        drawn. Padded lanes are not written. ValueError for a shape or dtype that does not fit.
    """
    lanes = slot_N.numel()
    codes = _check(best_NC, health_NC, slot_N, frame_KN, code_SK, table_MH, first_UH, book_rows)
    places = code_SK.shape[1]
    if not 0 <= place < places - 1:
        raise ValueError(f"{place=} of a frame of {places} codes: 0 to {places - 2} are embedded")
    _check_streams(x_JNI, lanes, table_MH.shape[1] if seeds else 0)
    if not use_triton(slot_N):
        return take_code_reference(
            best_NC,
            health_NC,
            slot_N,
            frame_KN,
            code_SK,
            table_MH,
            x_JNI,
            place=place,
            first_UH=first_UH,
            book_rows=book_rows,
            seeds=seeds,
        )
    book = place
    if first_UH is not None:
        book = max(0, place - 1)
        if place == 0:
            table_MH, codes = first_UH, first_UH.shape[0]
    H, tiles = table_MH.shape[1], best_NC.shape[1]
    streams, _, hidden = x_JNI.shape
    embedded_NH = x_JNI[0] if seeds else table_MH.new_empty(lanes, H)
    launcher(_take_code_kernel, (lanes,))(
        best_NC,
        health_NC,
        slot_N,
        frame_KN[place],
        code_SK,
        table_MH,
        x_JNI,
        embedded_NH,
        table_MH.stride(0),
        tiles,
        lanes,
        codes,
        PLACE=place,
        BOOK=book,
        K=places,
        H=H,
        # The embedding takes the place of the zeros.
        J=0 if seeds else streams,
        HIDDEN=hidden,
        BLOCK_H=triton.next_power_of_2(H),
        BLOCK_I=triton.next_power_of_2(hidden),
        BLOCK_C=min(triton.next_power_of_2(tiles), _MAX_BLOCK_C),
        num_warps=4,
        **launch_options(pdl),
    )
    return embedded_NH


def take_code_reference(
    best_NC: torch.Tensor,
    health_NC: torch.Tensor,
    slot_N: torch.Tensor,
    frame_KN: torch.Tensor,
    code_SK: torch.Tensor,
    table_MH: torch.Tensor,
    x_JNI: torch.Tensor,
    *,
    place: int,
    first_UH: torch.Tensor | None = None,
    book_rows: int = 0,
    seeds: bool = False,
) -> torch.Tensor:
    """Plain twin of `take_code`."""
    live = live_lanes(slot_N)
    code = _drawn_unless_given(best_NC, health_NC, frame_KN[place], live)
    frame_KN[place, live] = code
    code_SK[slot_N[live].long(), place] = code
    x_JNI[:, live] = 0
    own_first = [] if first_UH is None else [first_UH]
    rows = book_rows or len(table_MH) // (code_SK.shape[1] - len(own_first))
    table = [*own_first, *table_MH.split(rows)][place]
    known = (code >= 0) & (code < len(table))
    of_code = table[code.where(known, 0).long()]
    embedded_NH = x_JNI[0] if seeds else table_MH.new_empty(slot_N.numel(), table_MH.shape[1])
    embedded_NH[live] = of_code.masked_fill(~known[:, None], float("nan")).to(embedded_NH)
    return embedded_NH


def end_frame(
    best_NC: torch.Tensor,
    health_NC: torch.Tensor,
    slot_N: torch.Tensor,
    frame_KN: torch.Tensor,
    code_SK: torch.Tensor,
    end: FrameEnd,
    *,
    pdl: bool = False,
) -> FrameToken:
    """Draw the last code of each live lane's frame, note it, and give the frame its token; one
    launch.

    Args as in `take_code`, which has noted the codes before; `end` says which frames end requests.

    ValueError for a shape or dtype that does not fit.
    """
    lanes = slot_N.numel()
    _check(best_NC, health_NC, slot_N, frame_KN, code_SK)
    places = code_SK.shape[1]
    if not 1 <= end.judged <= places:
        raise ValueError(f"judged={end.judged} of a frame of {places} codes")
    if not use_triton(slot_N):
        return end_frame_reference(best_NC, health_NC, slot_N, frame_KN, code_SK, end)
    token = new_token(best_NC, health_NC, slot_N)
    tiles = best_NC.shape[1]
    launcher(_end_frame_kernel, (lanes,))(
        best_NC,
        health_NC,
        slot_N,
        frame_KN,
        frame_KN[places - 1],
        code_SK,
        token,
        tiles,
        lanes,
        K=places,
        END=end.code,
        JUDGED=end.judged,
        TOKEN=end.token,
        BLOCK_K=triton.next_power_of_2(places),
        BLOCK_C=min(triton.next_power_of_2(tiles), _MAX_BLOCK_C),
        num_warps=1,
        **launch_options(pdl),
    )
    return token


def end_frame_reference(
    best_NC: torch.Tensor,
    health_NC: torch.Tensor,
    slot_N: torch.Tensor,
    frame_KN: torch.Tensor,
    code_SK: torch.Tensor,
    end: FrameEnd,
) -> FrameToken:
    """Plain twin of `end_frame`."""
    live, last = live_lanes(slot_N), code_SK.shape[1] - 1
    frame_KN[last, live] = _drawn_unless_given(best_NC, health_NC, frame_KN[last], live)
    frame_KL = frame_KN[:, live]
    code_SK[slot_N[live].long(), last] = frame_KL[last]
    valid = (frame_KL >= 0).all(dim=0)
    ends = (frame_KL[: end.judged] == end.code).all(dim=0)
    token_L = torch.where(ends, end.token, frame_KL[0]).where(valid, -1).to(torch.int32)
    made = new_token(best_NC, health_NC, slot_N)
    best_L, health_L = tile_of_token_reference(token_L, valid)
    made.best[live, 0], made.health[live, 0], made.token[live] = best_L, health_L, token_L
    return made


def _drawn_unless_given(
    best_NC: torch.Tensor, health_NC: torch.Tensor, given_N: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """The code of each live lane: the given one, or that of its tiles."""
    drawn, given = token_of_tiles_reference(best_NC[live], health_NC[live]), given_N[live]
    return torch.where(given >= 0, given, drawn)


def new_token(best_NC: torch.Tensor, health_NC: torch.Tensor, slot_N: torch.Tensor) -> FrameToken:
    """Uninitialised tokens, one tile each."""
    lanes = slot_N.numel()
    return FrameToken(
        best_NC.new_empty(lanes, 1), health_NC.new_empty(lanes, 1), torch.empty_like(slot_N)
    )


def _check(
    best_NC: torch.Tensor,
    health_NC: torch.Tensor,
    slot_N: torch.Tensor,
    frame_KN: torch.Tensor,
    code_SK: torch.Tensor,
    table_MH: torch.Tensor | None = None,
    first_UH: torch.Tensor | None = None,
    book_rows: int = 0,
) -> int:
    """V, 0 without a table; ValueError unless everything fits."""
    lanes = slot_N.numel()
    check_lanes(lanes, slot=slot_N)
    check_tiles(best_NC, health_NC, lanes)
    codes = 0
    if table_MH is not None:
        check_rows(table=table_MH)
        codes = check_codes(code_SK, table_MH, first_UH, book_rows)
    check_frame(frame_KN, code_SK.shape[-1], lanes)
    return codes


def _check_streams(x_JNI: torch.Tensor, lanes: int, seeded: int) -> None:
    """ValueError unless these are streams of this many lanes, or one of `seeded` values, if any."""
    shape = tuple(x_JNI.shape)
    dense = x_JNI.dtype == torch.float32 and x_JNI.is_contiguous()
    if seeded and (shape != (1, lanes, seeded) or not dense):
        raise ValueError(
            f"x must be a dense float32 [1, {lanes}, {seeded}] to begin with embeddings, not "
            f"{x_JNI.dtype} {shape}"
        )
    if len(shape) != 3 or shape[1] != lanes or not dense:
        raise ValueError(f"x must be a dense float32 [J, {lanes}, I], not {x_JNI.dtype} {shape}")


def check_frame(frame_KN: torch.Tensor, places: int, lanes: int) -> None:
    """ValueError unless the frame is dense int32 [K, N] of this many places and lanes."""
    shape, dtype = tuple(frame_KN.shape), frame_KN.dtype
    if shape != (places, lanes) or dtype != torch.int32 or not frame_KN.is_contiguous():
        raise ValueError(f"frame must be a dense int32 [{places}, {lanes}], not {dtype} {shape}")


@triton.jit
def _take_code_kernel(
    best_ptr,
    health_ptr,
    slot_ptr,
    drawn_ptr,
    code_ptr,
    table_ptr,
    x_ptr,
    embedded_ptr,
    table_stride,
    tiles,
    lanes,
    codes,
    PLACE: tl.constexpr,
    BOOK: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + lane).to(tl.int64)
    live = slot >= 0
    given = tl.load(drawn_ptr + lane, mask=live, other=-1)
    code = token_of_tiles(best_ptr, health_ptr, lane, tiles, live, BLOCK_C)
    code = tl.where(given >= 0, given, code)
    tl.store(drawn_ptr + lane, code, mask=live)
    tl.store(code_ptr + slot * K + PLACE, code, mask=live)

    i = tl.arange(0, BLOCK_I)
    for stream in range(J):
        row = x_ptr + (stream * lanes + lane).to(tl.int64) * HIDDEN
        tl.store(row + i, tl.zeros([BLOCK_I], tl.float32), mask=live & (i < HIDDEN))

    h = tl.arange(0, BLOCK_H)
    known = live & (code >= 0) & (code < codes)
    source = table_ptr + (BOOK * codes + code).to(tl.int64) * table_stride + h
    row_H = tl.load(source, mask=known & (h < H), other=float("nan"))
    tl.store(embedded_ptr + lane.to(tl.int64) * H + h, row_H, mask=live & (h < H))


@triton.jit
def _end_frame_kernel(
    best_ptr,
    health_ptr,
    slot_ptr,
    frame_ptr,
    drawn_ptr,
    code_ptr,
    made,
    tiles,
    lanes,
    K: tl.constexpr,
    END: tl.constexpr,
    JUDGED: tl.constexpr,
    TOKEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + lane).to(tl.int64)
    live = slot >= 0
    given = tl.load(drawn_ptr + lane, mask=live, other=-1)
    last = token_of_tiles(best_ptr, health_ptr, lane, tiles, live, BLOCK_C)
    last = tl.where(given >= 0, given, last)
    k = tl.arange(0, BLOCK_K)
    before_K = tl.load(frame_ptr + k * lanes + lane, mask=live & (k < K - 1), other=0)
    frame_K = tl.where(k == K - 1, last, before_K)
    tl.store(drawn_ptr + lane, last, mask=live)
    tl.store(code_ptr + slot * K + K - 1, last, mask=live)

    valid = tl.min(tl.where(k < K, frame_K, 0), 0) >= 0
    ends = tl.max(tl.where(k < JUDGED, (frame_K != END).to(tl.int32), 0), 0) == 0
    first = tl.sum(tl.where(k == 0, frame_K, 0), 0)
    token = tl.where(valid, tl.where(ends, TOKEN, first), -1)
    best, health = tile_of_token(token, valid)
    tl.store(made.best + lane, best, mask=live)
    tl.store(made.health + lane, health, mask=live)
    tl.store(made.token + lane, token, mask=live)
