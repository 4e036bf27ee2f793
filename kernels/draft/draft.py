"""Kernels around the runs of a draft module: make its input, and commit its drafts.

    decode    begin_module_draft -> (module, lm_head) -> advance_module_draft -> (module, lm_head)
              -> ... -> commit_draft
    prefill   combine_hidden -> (module, lm_head of the last lane) -> advance_module_draft -> ...

A module's run at position p takes the hidden state at p and the token at p + 1, as
`[norm_e(E(token)); norm_h(hidden)]` (DeepSeek-V3, arXiv:2412.19437, section 2.2), and drafts the
token at position p + 2. The kernels between runs fold all the small work of a chain into one launch
(`draft_triton.py`): reduce the tiles of the run before to a draft, store the draft, embed it,
normalise.

Letters: S slots, R rows, W lanes of a row, N = R * W lanes, M lanes of the run before, C tiles of
the draft vocabulary, D its size, V vocabulary, H hidden, T groups of columns, K drafts.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    check_lanes,
    check_rows,
    check_weight,
    live_lanes,
    output_rows,
    sum_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.draft.draft_triton import (
    CommitArgs,
    FusionArgs,
    advance_kernel,
    begin_kernel,
    combine_kernel,
    commit_kernel,
)
from graphengine.kernels.linear.residual import Residual, check_squares
from graphengine.kernels.norm_rope.embedding import embed_reference
from graphengine.kernels.sample.sampling import check_tiles, token_of_tiles_reference
from graphengine.kernels.step.state import DecodeLanes

Hidden = Residual | torch.Tensor
"""Hidden states: a stream that is scaled for its final norm but not yet divided by its root mean
square, or plain rows [M, H]. Padded lanes hold arbitrary values."""

Start = Literal["zeros", "hidden", "normed"]
"""Start of a module's residual stream: zeros, to which its projection is added; the hidden state;
or the hidden state's half of the input, before it is rounded."""
START_CODES = {start: code for code, start in enumerate(get_args(Start))}


class Fusion(NamedTuple):
    """How the input of a draft module is made from a token and a hidden state."""

    embedding: torch.Tensor
    """The target's: float [V, H], dense rows; may exceed 2**31 elements."""
    embedding_norm: torch.Tensor
    """float [H]"""
    hidden_norm: torch.Tensor
    """float [H]"""
    eps: float
    """The epsilon of both norms."""
    hidden_first: bool = False
    """Whether the hidden state's half comes before the token's."""
    start: Start = "zeros"


class FirstDraft(NamedTuple):
    """The first run of a module after a verified step; valid until the next replay."""

    lanes: DecodeLanes
    """N lanes: those that emitted a token, each with its token; the rest are padded."""
    rows: DecodeLanes
    """R lanes: the last live one of each row; padded if the row emitted nothing."""
    source: torch.Tensor
    """int32 [R]: the number of that lane among the N; a row's first if it emitted nothing."""
    combined: torch.Tensor
    """[N, 2H]: the module's input."""


class NextDraft(NamedTuple):
    """A later run of a module: one lane per row; valid until the next replay."""

    lanes: DecodeLanes
    combined: torch.Tensor
    """[R, 2H]: the module's input."""


class DraftTiles(NamedTuple):
    """The drafts of a run, before they are reduced over the vocabulary."""

    best: torch.Tensor
    """int64 [M, C]; like `health`, from an lm_head with the sampler folded in."""
    health: torch.Tensor
    """int32 [M, C]"""


def combine_hidden(
    token_N: torch.Tensor,
    slot_N: torch.Tensor,
    hidden: Hidden,
    source_N: torch.Tensor | None,
    fusion: Fusion,
    *,
    hidden_eps: float = 0.0,
    residual: Residual | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Make the input of a draft module for each live lane: both halves normed, side by side.

    norm(v) = v / sqrt(mean(v**2) + eps) * weight in float32, rounded once. The hidden state of a
    stream is rounded once before that, as a model does after its final norm.

    Args:
        token_N, slot_N: int32; lanes of a prefill chunk or of decode.
        hidden: M >= N lanes, or any number with `source_N`.
        source_N: int32, the lane of `hidden` that each lane takes; None: its own.
        hidden_eps: epsilon of the final norm that a `hidden` stream is scaled for; unused with
            plain rows.
        residual: the module's stream: `x` of the live lanes is set to `fusion.start`.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. Of the inputs,
            that one may write only `token_N`.

    Returns:
        New [N, 2H] of the embedding's dtype. A live lane whose token is outside 0..V-1 becomes NaN;
        padded lanes are not written. ValueError for a shape or dtype that does not fit.
    """
    lanes = token_N.numel()
    check_lanes(lanes, token=token_N, slot=slot_N)
    sources = {} if source_N is None else {"source": source_N}
    check_lanes(lanes, **sources)
    check_hidden(hidden, fusion, None if sources else lanes)
    check_stream(residual, lanes, fusion)
    if not use_triton(token_N):
        return combine_hidden_reference(
            token_N, slot_N, hidden, source_N, fusion, hidden_eps=hidden_eps, residual=residual
        )
    args, options = fusion_args(hidden, fusion, hidden_eps, lanes, residual)
    launcher(combine_kernel, (lanes,))(
        token_N, slot_N, source_N, args, **options, **launch_options(pdl)
    )
    return args.combined


def combine_hidden_reference(
    token_N: torch.Tensor,
    slot_N: torch.Tensor,
    hidden: Hidden,
    source_N: torch.Tensor | None,
    fusion: Fusion,
    *,
    hidden_eps: float = 0.0,
    residual: Residual | None = None,
) -> torch.Tensor:
    """`combine_hidden` in plain PyTorch: on a CPU too, a lane's bits depend only on that lane."""
    live = live_lanes(slot_N)
    source = live if source_N is None else source_N[live].long()
    value = hidden_rows(hidden, source, hidden_eps)
    token = token_N[live]
    embedded = embed_reference(token, fusion.embedding, torch.zeros_like(token))
    half = _normed_rows(value.float(), fusion.hidden_norm, fusion.eps)
    parts = [_normed_rows(embedded, fusion.embedding_norm, fusion.eps), half]
    unknown = (token < 0) | (token >= fusion.embedding.shape[0])
    row = torch.cat(parts[::-1] if fusion.hidden_first else parts, dim=1)
    combined = fusion.embedding.new_empty(token_N.numel(), row.shape[1])
    combined[live] = row.masked_fill(unknown[:, None], math.nan).to(combined.dtype)
    if residual is not None:
        starts = {"zeros": torch.zeros_like(half), "hidden": value.float(), "normed": half}
        residual.x[live] = starts[fusion.start]
    return combined


def begin_module_draft(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    hidden: Hidden,
    fusion: Fusion,
    *,
    source_N: torch.Tensor | None = None,
    hidden_eps: float = 0.0,
    residual: Residual,
    pdl: bool = False,
) -> FirstDraft:
    """Make the lanes and the input of a module's first run after a verified step; one launch.

    Lane j of a row pairs the target's hidden state at its position with the target's token after
    it, so that the module's cache gets the verified tokens. In a row that emitted `count` tokens
    lanes 0 .. count - 1 are live, and drafting continues after the last of them.

    Args:
        token_N: int32, the target's token after each lane; read where the lane is live.
        count_R: int32, tokens that each row emitted, at most its live lanes; N is W * R.
        lanes: the lanes that the target was fed; after a tree those of the accepted path.
        hidden: the target's, N lanes, or any number with `source_N`.
        source_N: int32, the lane of `hidden` that each lane takes, as in `combine_hidden`; read
            where the lane is live. It is as old as the lanes.
        hidden_eps, residual: as in `combine_hidden`.
        pdl: as in `combine_hidden`; the launch before may also write `count_R`.

    Returns:
        New tensors. ValueError for a shape or dtype that does not fit.
    """
    N = check_steps(token_N, count_R, lanes)
    check_lanes(N, **({} if source_N is None else {"source": source_N}))
    check_hidden(hidden, fusion, N if source_N is None else None)
    check_stream(residual, N, fusion)
    if not use_triton(token_N):
        return begin_module_draft_reference(
            token_N,
            count_R,
            lanes,
            hidden,
            fusion,
            source_N=source_N,
            hidden_eps=hidden_eps,
            residual=residual,
        )
    args, options = fusion_args(hidden, fusion, hidden_eps, N, residual)
    draft = FirstDraft(
        lanes=new_lanes(N, token_N),
        rows=new_lanes(count_R.numel(), token_N),
        source=torch.empty_like(count_R),
        combined=args.combined,
    )
    launcher(begin_kernel, (N,))(
        token_N,
        count_R,
        lanes.slot,
        lanes.position,
        source_N,
        *draft.lanes,
        *draft.rows,
        draft.source,
        args,
        W=N // count_R.numel(),
        **options,
        **launch_options(pdl),
    )
    return draft


def begin_module_draft_reference(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    hidden: Hidden,
    fusion: Fusion,
    *,
    source_N: torch.Tensor | None = None,
    hidden_eps: float = 0.0,
    residual: Residual,
) -> FirstDraft:
    """`begin_module_draft` in plain PyTorch."""
    rows = count_R.numel()
    W = token_N.numel() // rows
    slot_RW = lanes.slot.view(rows, W)
    number_W = torch.arange(W, dtype=torch.int32, device=token_N.device)
    fed_RW = (slot_RW >= 0) & (number_W < count_R[:, None])
    fed = DecodeLanes(
        token=token_N.clone(),
        slot=slot_RW.where(fed_RW, -1).flatten(),
        position=lanes.position.clone(),
    )
    first_R = torch.arange(rows, dtype=torch.int32, device=token_N.device) * W
    source = (first_R + count_R - 1).where(fed_RW[:, 0], first_R)
    combined = combine_hidden_reference(
        fed.token, fed.slot, hidden, source_N, fusion, hidden_eps=hidden_eps, residual=residual
    )
    rows_of = DecodeLanes(*(field[source.long()] for field in fed))
    return FirstDraft(fed, rows_of, source, combined)


def advance_module_draft(
    tiles: DraftTiles,
    rows: DecodeLanes,
    hidden: Hidden,
    fusion: Fusion,
    draft_SK: torch.Tensor,
    *,
    index: int,
    limit: int,
    source_R: torch.Tensor | None = None,
    hidden_eps: float = 0.0,
    residual: Residual,
    pdl: bool = False,
) -> NextDraft:
    """Commit each row's draft, then make it and its hidden state the module's next input.

    This is `commit_draft` and `combine_hidden` in one launch: the row's next lane takes the draft,
    and the hidden state of the lane that made it.

    Args:
        tiles, rows, draft_SK, index, limit, source_R: as in `commit_draft`.
        hidden: output of the run before, M lanes like its tiles. hidden_eps: epsilon of the norm
            after that run.
        residual: R lanes, as in `combine_hidden`.
        pdl: as in `combine_hidden`, but the launch before may write only the tiles.

    Returns:
        New tensors. ValueError for a shape or dtype that does not fit.
    """
    count = check_commit(tiles, rows, draft_SK, index, source_R)
    check_hidden(hidden, fusion, tiles.best.shape[0])
    check_stream(residual, count, fusion)
    if not use_triton(rows.slot):
        lanes = commit_draft_reference(
            tiles, rows, draft_SK, index=index, limit=limit, source_R=source_R
        )
        combined = combine_hidden_reference(
            lanes.token,
            lanes.slot,
            hidden,
            source_R,
            fusion,
            hidden_eps=hidden_eps,
            residual=residual,
        )
        return NextDraft(lanes, combined)
    lanes = new_lanes(count, rows.slot)
    args, options = fusion_args(hidden, fusion, hidden_eps, count, residual)
    launcher(advance_kernel, (count,))(
        commit_args(tiles, rows, draft_SK, source_R, lanes),
        index,
        limit,
        args,
        **commit_blocks(tiles, draft_SK, options["num_warps"]),
        **options,
        **launch_options(pdl),
    )
    return NextDraft(lanes, args.combined)


def commit_draft(
    tiles: DraftTiles,
    rows: DecodeLanes,
    draft_SK: torch.Tensor,
    *,
    index: int,
    limit: int,
    source_R: torch.Tensor | None = None,
    pdl: bool = False,
) -> DecodeLanes:
    """Write each live row's draft into `draft_SK[slot, index]`; later drafts become -1 (none).

    The draft is also -1 if the run had no valid logits.

    Args:
        tiles: those of M lanes.
        rows: the lanes that the drafts follow, one per row; their tokens are not read.
        draft_SK: int32 [S, K], updated in place.
        index: 0 <= index < K.
        limit: positions that the cache has; no lane is put at or past it.
        source_R: int32, the lane of the tiles for each row; None: row r uses lane r, and M is R.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. Of the inputs,
            that one may write only the tiles.

    Returns:
        New lanes for the next run: the draft, at the next position. Padded where the row is, where
        there is no draft, and where the position would reach the limit. ValueError for a shape or
        dtype that does not fit.
    """
    count = check_commit(tiles, rows, draft_SK, index, source_R)
    if not use_triton(rows.slot):
        return commit_draft_reference(
            tiles, rows, draft_SK, index=index, limit=limit, source_R=source_R
        )
    lanes = new_lanes(count, rows.slot)
    warps = min(max(triton.next_power_of_2(tiles.best.shape[1]) // 256, 1), 16)
    launcher(commit_kernel, (count,))(
        commit_args(tiles, rows, draft_SK, source_R, lanes),
        index,
        limit,
        **commit_blocks(tiles, draft_SK, warps),
        num_warps=warps,
        **launch_options(pdl),
    )
    return lanes


def commit_draft_reference(
    tiles: DraftTiles,
    rows: DecodeLanes,
    draft_SK: torch.Tensor,
    *,
    index: int,
    limit: int,
    source_R: torch.Tensor | None = None,
) -> DecodeLanes:
    """`commit_draft` in plain PyTorch."""
    live = live_lanes(rows.slot)
    source = live if source_R is None else source_R[live].long()
    draft = token_of_tiles_reference(tiles.best[source], tiles.health[source])
    slot = rows.slot[live].long()
    draft_SK[slot, index:] = -1
    draft_SK[slot, index] = draft
    lanes = DecodeLanes(
        token=rows.slot.clone(), slot=torch.full_like(rows.slot, -1), position=rows.position + 1
    )
    lanes.token[live] = draft
    goes_on = (draft >= 0) & (lanes.position[live] < limit)
    lanes.slot[live] = rows.slot[live].where(goes_on, -1)
    return lanes


def new_lanes(count: int, like: torch.Tensor) -> DecodeLanes:
    """Uninitialised lanes on `like`'s device."""
    return DecodeLanes(*(like.new_empty(count, dtype=torch.int32) for _ in DecodeLanes._fields))


def check_steps(token_N: torch.Tensor, count_R: torch.Tensor, lanes: DecodeLanes) -> int:
    """Return N; ValueError unless the results of a verified step fit its lanes and rows."""
    N, rows = token_N.numel(), count_R.numel()
    check_lanes(N, token=token_N, **{f"lanes.{name}": x for name, x in lanes._asdict().items()})
    check_lanes(rows, count=count_R)
    if rows < 1 or N < 1 or N % rows:
        raise ValueError(f"{N} lanes are no whole number of lanes for each of {rows} rows")
    return N


def check_draft_table(draft_SK: torch.Tensor) -> int:
    """Return K; ValueError unless the table is dense int32 [S, K] with K >= 1."""
    shape, dtype = tuple(draft_SK.shape), draft_SK.dtype
    if len(shape) != 2 or 0 in shape or dtype != torch.int32 or not draft_SK.is_contiguous():
        raise ValueError(f"draft_tokens must be a dense int32 [S, K], not {dtype} {shape}")
    return shape[1]


def check_commit(
    tiles: DraftTiles,
    rows: DecodeLanes,
    draft_SK: torch.Tensor,
    index: int,
    source_R: torch.Tensor | None,
) -> int:
    """Return R; ValueError unless the operands of a commit fit each other."""
    count = rows.slot.numel()
    check_lanes(count, **{f"rows.{name}": field for name, field in rows._asdict().items()})
    if source_R is not None:
        check_lanes(count, source=source_R)
    check_tiles(tiles.best, tiles.health, count if source_R is None else tiles.best.shape[0])
    columns = check_draft_table(draft_SK)
    if not 0 <= index < columns:
        raise ValueError(f"draft index {index} is not in a table of {columns} drafts a slot")
    return count


def check_hidden(hidden: Hidden, fusion: Fusion, lanes: int | None) -> None:
    """Raise ValueError unless `hidden` has the fusion's width and at least `lanes` lanes."""
    check_rows(embedding=fusion.embedding)
    H = fusion.embedding.shape[1]
    for name in ("embedding_norm", "hidden_norm"):
        check_weight(name, getattr(fusion, name), H)
    value = hidden.scaled if isinstance(hidden, Residual) else hidden
    check_rows(hidden=value)
    rows, width = value.shape
    if width != H or (lanes is not None and rows < lanes):
        raise ValueError(f"hidden must be [{lanes or 'M'} or more, {H}], not {[rows, width]}")
    if isinstance(hidden, Residual):
        check_squares(hidden.squares, rows)


def check_stream(residual: Residual | None, lanes: int, fusion: Fusion) -> None:
    """Raise ValueError unless the module's stream has this many lanes."""
    if residual is not None:
        x = residual.x
        output_rows(x, (lanes, fusion.embedding.shape[1]), dtype=torch.float32, like=x)


def hidden_rows(hidden: Hidden, source: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows `source` of hidden states after their norm, in the model's dtype."""
    if not isinstance(hidden, Residual):
        return hidden[source]
    value = hidden.scaled[source]
    total = sum_rows(hidden.squares.t()[source].contiguous())
    scale = 1 / torch.sqrt(total / value.shape[1] + eps)
    return (value.float() * scale[:, None]).to(value.dtype)


def _normed_rows(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm each row: float32 x / sqrt(mean(x**2) + eps) * weight."""
    scale = 1 / torch.sqrt(sum_rows(x.square()) / x.shape[1] + eps)
    return x * scale[:, None] * weight_H.float()


def fusion_args(
    hidden: Hidden, fusion: Fusion, hidden_eps: float, lanes: int, residual: Residual | None
) -> tuple[FusionArgs, dict[str, Any]]:
    """Operands with a new `combined`, and sizes and warps of a launch, which follow from H."""
    squares = hidden.squares if isinstance(hidden, Residual) else None
    value = hidden.scaled if isinstance(hidden, Residual) else hidden
    V, H = fusion.embedding.shape
    args = FusionArgs(
        hidden=value,
        squares=squares,
        embedding=fusion.embedding,
        embedding_norm=fusion.embedding_norm,
        hidden_norm=fusion.hidden_norm,
        combined=fusion.embedding.new_empty(lanes, 2 * H),
        x=None if residual is None else residual.x,
        hidden_lanes=value.shape[0],
        hidden_stride=value.stride(0),
        embedding_stride=fusion.embedding.stride(0),
        x_stride=0 if residual is None else residual.x.stride(0),
        V=V,
        eps=fusion.eps,
        hidden_eps=hidden_eps,
    )
    groups = 0 if squares is None else squares.shape[0]
    block_h = triton.next_power_of_2(H)
    options = {
        "H": H,
        "GROUPS": groups,
        "HIDDEN_FIRST": fusion.hidden_first,
        "START": START_CODES[fusion.start],
        "BLOCK_H": block_h,
        "BLOCK_T": triton.next_power_of_2(max(groups, 1)),
        # Few numbers per thread: latency matters.
        "num_warps": min(max(block_h // 256, 4), 16),
    }
    return args, options


def commit_args(
    tiles: DraftTiles,
    rows: DecodeLanes,
    draft_SK: torch.Tensor,
    source_R: torch.Tensor | None,
    lanes: DecodeLanes,
) -> CommitArgs:
    """Operands of `commit_lane`, which writes `lanes`."""
    return CommitArgs(
        best=tiles.best,
        health=tiles.health,
        source=source_R,
        row_slot=rows.slot,
        row_position=rows.position,
        draft=draft_SK,
        token=lanes.token,
        slot=lanes.slot,
        position=lanes.position,
        tiles=tiles.best.shape[1],
        columns=draft_SK.shape[1],
    )


def commit_blocks(tiles: DraftTiles, draft_SK: torch.Tensor, warps: int) -> dict[str, int]:
    """Tile sizes for `commit_lane` in a kernel of this many warps: at most 16 tiles per thread."""
    return {
        "BLOCK_C": min(triton.next_power_of_2(tiles.best.shape[1]), 512 * warps),
        "BLOCK_K": triton.next_power_of_2(draft_SK.shape[1]),
    }
