"""Kernels around the runs of several draft modules, each with its own KV cache.

    decode    begin_module_draft -> (module 1, lm_head) -> advance_vanilla_draft -> (module 2,
              lm_head) -> ... -> commit_draft
    K = 0     begin_module_draft -> (module 1) -> begin_vanilla_draft -> (module 2) -> ...

Module m's run at position p takes the token at p + m, so that after a step the last run of every
module is at the same position. After a step that fed W lanes from position L on and emitted `count`
tokens, module m runs

- the emitted lanes, j < count, at L + j - (m - 1), with true tokens;
- m - 1 lanes after them, with the drafts of the modules before. The next step's lanes overwrite
  these positions with tokens that are true by then.

All have consecutive positions. After a prompt shorter than m - 1 some are below 0: these are
padded.

Besides its token a run takes a hidden state. If modules are chained (DeepSeek-V3, arXiv:2412.19437,
equation 21), this is always module m - 1's output at p. That module ran one lane less, from one
position later on. So lane j takes that module's lane j - 1, and the first lane takes an output kept
from the step before: that of the last run whose token was true. With the target's hidden states (as
in TensorRT-LLM's vanilla MTP) an emitted lane takes the target's at p + m - 1 instead, and nothing
is kept.

Letters: S slots, R rows, W lanes of a row, N = R * W lanes, M lanes of the run before, H hidden,
K drafts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_vector
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import (
    DraftTiles,
    FirstDraft,
    Fusion,
    Hidden,
    check_commit,
    check_hidden,
    check_steps,
    check_stream,
    combine_hidden_reference,
    commit_args,
    commit_blocks,
    commit_draft_reference,
    fusion_args,
    hidden_rows,
    new_lanes,
)
from graphengine.kernels.draft.draft_triton import (
    StreamArgs,
    commit_lane,
    load_hidden,
    load_row,
    load_weight,
    normed,
    store_combined,
    store_lane,
    stream_start,
)
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes

_NO_LIMIT = 2**31 - 1


class Emitted(NamedTuple):
    """Results of a verified step that the modules take in."""

    token_N: torch.Tensor
    """int32: the target's token after each lane; read where it was emitted."""
    count_R: torch.Tensor
    """int32: tokens that each row emitted, at most its live lanes; N is W * R."""
    lanes: DecodeLanes
    """The lanes that the target was fed; in a live row lane r * W + j has lane r * W's position
    plus j."""
    hidden: Hidden
    """The target's hidden states, N lanes."""
    eps: float = 0.0
    """Epsilon of the final norm that a `hidden` stream is scaled for; unused with plain rows."""


class ModuleRun(NamedTuple):
    """The previous module's output for its lanes."""

    tiles: DraftTiles
    """Tiles of the M lanes."""
    rows: DecodeLanes
    """R lanes, the last of each row; padded where the row is, or where nothing was drafted."""
    source: torch.Tensor | None
    """int32 [R]: the number of each row's lane among the M; None: lane r for row r, and M is R."""
    hidden: Hidden
    """The module's output, M lanes."""
    eps: float = 0.0
    """Epsilon of the norm for `hidden`, as in `Emitted`."""


class DraftChain(NamedTuple):
    """The drafts of this step so far, and the hidden states they were drafted from; updated in
    place."""

    token: torch.Tensor
    """int32 [R, K - 1]"""
    hidden: torch.Tensor
    """model dtype [R, K - 1, H], after the module's norm; neither read nor written if modules are
    chained."""


class Recycled(NamedTuple):
    """The outputs of the previous module that a chained module reads."""

    hidden: Hidden
    """The previous module's output in this step, N lanes."""
    kept: torch.Tensor
    """model dtype [S, K - 1, H], updated in place: the output, after the final norm, of each
    module's last run whose token was true."""
    eps: float = 0.0
    """Epsilon of the norm for `hidden`, as in `Emitted`."""


class ModuleInput(NamedTuple):
    """Lanes and input of a module's run without drafts after it; valid until the next replay."""

    lanes: DecodeLanes
    """N lanes."""
    combined: torch.Tensor
    """[N, 2H]"""


def new_draft_chain(
    rows: int, drafts: int, hidden: int, *, dtype: torch.dtype, device: torch.device | str
) -> DraftChain:
    """An uninitialised chain for K = `drafts` drafts of `rows` rows."""
    shape = (rows, max(drafts - 1, 0))
    return DraftChain(
        token=torch.empty(shape, dtype=torch.int32, device=device),
        hidden=torch.empty((*shape, hidden), dtype=dtype, device=device),
    )


def begin_vanilla_draft(
    emitted: Emitted,
    fusion: Fusion,
    *,
    module: int,
    residual: Residual,
    recycled: Recycled | None = None,
    pdl: bool = False,
) -> ModuleInput:
    """Make a module's emitted lanes and its input, without drafts after them; one launch.

    Args:
        module: m, 2 or more; `begin_module_draft` is for the first.
        recycled: output of module m - 1, if modules are chained; None: this one reads the target's
            hidden states.
        residual: the stream that the module's projection is added to, N lanes: `x` of the live ones
            is set to `fusion.start`.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. All its inputs
            must then have been written at least two launches earlier.

    Returns:
        New tensors. A lane is padded if it emitted nothing, or if its position - (m - 1) is below
        0. ValueError for a shape or dtype that does not fit.
    """
    N, rows = _check_emitted(emitted, fusion, module)
    check_stream(residual, N, fusion)
    if recycled is not None:
        check_hidden(recycled.hidden, fusion, N)
        _check_kept(recycled.kept, recycled.hidden, fusion, module)
    if not use_triton(emitted.token_N):
        return begin_vanilla_draft_reference(
            emitted, fusion, module=module, residual=residual, recycled=recycled
        )
    lanes = new_lanes(N, emitted.token_N)
    args, options = fusion_args(emitted.hidden, fusion, emitted.eps, N, residual)
    options |= dict.fromkeys(_CHAIN_ARGUMENTS)
    if recycled is not None:
        options |= _run_options(recycled.hidden, recycled.eps, recycled.kept, N // rows)
    _launch(emitted, lanes, args, options, module, 0, pdl)
    return ModuleInput(lanes, args.combined)


def begin_vanilla_draft_reference(
    emitted: Emitted,
    fusion: Fusion,
    *,
    module: int,
    residual: Residual,
    recycled: Recycled | None = None,
) -> ModuleInput:
    """`begin_vanilla_draft` in plain PyTorch."""
    fed, shift = emitted.lanes, module - 1
    live = _emitted_RW(emitted).flatten() & (fed.position >= shift)
    lanes = DecodeLanes(emitted.token_N.clone(), fed.slot.where(live, -1), fed.position - shift)
    hidden, eps = emitted.hidden, emitted.eps
    if recycled is not None:
        W = emitted.token_N.numel() // emitted.count_R.numel()
        hidden, eps = _recycled_rows(emitted, recycled, W, W, module), 0.0
    combined = combine_hidden_reference(
        lanes.token, lanes.slot, hidden, None, fusion, hidden_eps=eps, residual=residual
    )
    return ModuleInput(lanes, combined)


def _recycled_rows(
    emitted: Emitted, recycled: Recycled, ran: int, lanes: int, module: int
) -> torch.Tensor:
    """The hidden states that the lanes of a chained module read, [R * lanes, H]; updates `kept`.

    ran  lanes per row of module m - 1: `lanes`, or one less
    """
    kept, live_RW = recycled.kept[:, module - 2], _emitted_RW(emitted)
    rows = len(live_RW)
    every = torch.arange(rows * ran, device=kept.device)
    made = hidden_rows(recycled.hidden, every, recycled.eps).view(rows, ran, -1)
    slot = emitted.lanes.slot.view(rows, -1)[:, 0].clamp(min=0).long()
    hidden = torch.cat([kept[slot, None], made[:, : lanes - 1]], dim=1)
    live, count = live_RW[:, 0], live_RW.sum(dim=1)
    kept[slot[live]] = made[live, count[live] - 1]
    return hidden.flatten(0, 1)


def advance_vanilla_draft(
    run: ModuleRun,
    emitted: Emitted,
    chain: DraftChain,
    fusion: Fusion,
    draft_SK: torch.Tensor,
    *,
    module: int,
    residual: Residual,
    kept: torch.Tensor | None = None,
    pdl: bool = False,
) -> FirstDraft:
    """Commit draft m - 1 of each row, then make the lanes and the input of module m; one launch.

    The draft is written to `draft_SK[slot, m - 2]` as by `commit_draft`, which commits the last
    module's draft. A row of module m has W + m - 1 lanes: lane j < count is an emitted one, at
    position L + j - (m - 1), and lane count + i, i < m - 1, takes draft i + 1 with the hidden state
    that it was drafted from. Where there is no draft, the row's lanes after its emitted ones are
    padded, and no later module drafts.

    Args:
        run: the run of module m - 1.
        emitted: the step of the same rows.
        chain: holds drafts 1 .. m - 2, and gets draft m - 1. Updated in place.
        fusion: that of module m.
        draft_SK: int32 [S, K], updated in place.
        module: m, 2 .. K.
        residual: the stream that the module's projection is added to, R * (W + m - 1) lanes: `x` of
            the live ones is set to `fusion.start`.
        kept: as in `Recycled`, for a chained module, which reads the output of `run`; None: the
            module reads the target's hidden states.
        pdl: as in `begin_vanilla_draft`, but the launch before may write the tiles.

    Returns:
        New tensors for R * (W + m - 1) lanes; `rows` and `source` name each row's last live lane,
        which has the same position in every module. ValueError for a shape or dtype that does not
        fit.
    """
    N, rows = _check_emitted(emitted, fusion, module)
    _check_run(run, fusion, draft_SK, rows, module)
    _check_chain(chain, run.hidden, fusion, rows, module)
    lanes_in_all = N + rows * (module - 1)
    check_stream(residual, lanes_in_all, fusion)
    if kept is not None:
        check_hidden(run.hidden, fusion, lanes_in_all - rows)
        _check_kept(kept, run.hidden, fusion, module)
    if not use_triton(emitted.token_N):
        return advance_vanilla_draft_reference(
            run, emitted, chain, fusion, draft_SK, module=module, residual=residual, kept=kept
        )
    like = emitted.token_N
    lanes, last, source = new_lanes(lanes_in_all, like), new_lanes(rows, like), like.new_empty(rows)
    args, options = fusion_args(emitted.hidden, fusion, emitted.eps, lanes_in_all, residual)
    options |= {
        "commit": commit_args(run.tiles, run.rows, draft_SK, run.source, last),
        "source_ptr": source,
        "chain_token_ptr": chain.token,
        "chain_hidden_ptr": chain.hidden,
        "DEPTH": chain.token.shape[1],
        **_run_options(run.hidden, run.eps, kept, lanes_in_all // rows - 1),
        **commit_blocks(run.tiles, draft_SK, options["num_warps"]),
    }
    _launch(emitted, lanes, args, options, module, module - 1, pdl)
    return FirstDraft(lanes, last, source, args.combined)


def advance_vanilla_draft_reference(
    run: ModuleRun,
    emitted: Emitted,
    chain: DraftChain,
    fusion: Fusion,
    draft_SK: torch.Tensor,
    *,
    module: int,
    residual: Residual,
    kept: torch.Tensor | None = None,
) -> FirstDraft:
    """`advance_vanilla_draft` in plain PyTorch."""
    shift, rows = module - 1, emitted.count_R.numel()
    source_R = torch.arange(rows, device=emitted.count_R.device)
    if run.source is not None:
        source_R = run.source.where(run.rows.slot >= 0, 0).long()
    # The last lane of every module's row is at the same position.
    before = run.rows._replace(position=run.rows.position - 1)
    last = commit_draft_reference(
        run.tiles, before, draft_SK, index=shift - 1, limit=_NO_LIMIT, source_R=run.source
    )
    live_R = last.slot >= 0
    chain.token[live_R, shift - 1] = last.token[live_R]
    if kept is None:
        chain.hidden[live_R, shift - 1] = hidden_rows(run.hidden, source_R[live_R], run.eps)

    emitted_RW = _emitted_RW(emitted)
    W = emitted_RW.shape[1]
    count_R1 = emitted_RW.sum(dim=1, keepdim=True)
    j = torch.arange(W + shift, device=count_R1.device)
    step_RX = (j - count_R1).clamp(max=shift - 1)
    is_emitted = step_RX < 0
    row_R1 = torch.arange(rows, device=j.device)[:, None]
    # Index of a lane's token and hidden state: among the N, or in the chain after them.
    depth = chain.token.shape[1]
    at_RX = torch.where(is_emitted, row_R1 * W + j, rows * W + row_R1 * depth + step_RX)
    fed = DecodeLanes(*(field.view(rows, W)[:, :1] for field in emitted.lanes))
    position_RX = fed.position + j.int() - shift
    drafted = (run.rows.slot >= 0)[:, None] & (j < count_R1 + shift)
    # The newest draft may be missing.
    drafted &= live_R[:, None] | (step_RX < shift - 1)
    live = (fed.slot >= 0) & (position_RX >= 0) & (is_emitted | drafted)
    tokens = torch.cat([emitted.token_N, chain.token.flatten()])
    lanes = DecodeLanes(
        token=tokens[at_RX].flatten(),
        slot=fed.slot.where(live, -1).flatten(),
        position=position_RX.flatten(),
    )
    if kept is None:
        every = torch.arange(rows * W, device=j.device)
        parts = [hidden_rows(emitted.hidden, every, emitted.eps), chain.hidden.flatten(0, 1)]
        hidden = torch.cat(parts)[at_RX.flatten()]
    else:
        recycled = Recycled(run.hidden, kept, run.eps)
        hidden = _recycled_rows(emitted, recycled, W + shift - 1, W + shift, module)
    combined = combine_hidden_reference(
        lanes.token, lanes.slot, hidden, None, fusion, residual=residual
    )
    source = (row_R1 * (W + shift) + count_R1 + shift - 1).flatten().int()
    return FirstDraft(lanes, last, source, combined)


def _emitted_RW(emitted: Emitted) -> torch.Tensor:
    """bool [R, W]: which lanes emitted a token."""
    rows = emitted.count_R.numel()
    slot_RW = emitted.lanes.slot.view(rows, -1)
    j = torch.arange(slot_RW.shape[1], device=slot_RW.device)
    return (slot_RW >= 0) & (j < emitted.count_R[:, None])


def _check_emitted(emitted: Emitted, fusion: Fusion, module: int) -> tuple[int, int]:
    """Return (N, R); ValueError unless the step's parts fit each other."""
    N = check_steps(emitted.token_N, emitted.count_R, emitted.lanes)
    check_hidden(emitted.hidden, fusion, N)
    if module < 2:
        raise ValueError(f"module={module} must be 2 or more: the first begins the draft")
    return N, emitted.count_R.numel()


def _check_run(
    run: ModuleRun, fusion: Fusion, draft_SK: torch.Tensor, rows: int, module: int
) -> None:
    """Raise ValueError unless the previous module's run fits the rows and the table."""
    count = check_commit(run.tiles, run.rows, draft_SK, module - 2, run.source)
    if count != rows:
        raise ValueError(f"{count} rows were drafted for, and {rows} emitted")
    check_hidden(run.hidden, fusion, run.tiles.best.shape[0])


def _check_chain(chain: DraftChain, hidden: Hidden, fusion: Fusion, rows: int, module: int) -> None:
    """Raise ValueError unless the chain is dense and has room for draft m - 1."""
    shape = tuple(chain.token.shape)
    if len(shape) != 2 or shape[0] != rows or shape[1] < module - 1:
        raise ValueError(f"chain.token must be [{rows}, {module - 1} or more], not {shape}")
    H = fusion.embedding.shape[1]
    check_vector("chain.token", chain.token.flatten(), chain.token.numel(), torch.int32)
    if tuple(chain.hidden.shape) != (*shape, H):
        raise ValueError(f"chain.hidden must be {[*shape, H]}, not {list(chain.hidden.shape)}")
    wanted = hidden.scaled.dtype if isinstance(hidden, Residual) else hidden.dtype
    if chain.hidden.dtype != wanted:
        raise ValueError(f"chain.hidden is {chain.hidden.dtype}, the hidden states {wanted}")
    if not (chain.token.is_contiguous() and chain.hidden.is_contiguous()):
        raise ValueError("chain.token and chain.hidden must be dense")


def _check_kept(kept: torch.Tensor, hidden: Hidden, fusion: Fusion, module: int) -> None:
    """Raise ValueError unless `kept` is dense and has room for the output of module m - 1."""
    shape, H = tuple(kept.shape), fusion.embedding.shape[1]
    if len(shape) != 3 or shape[1] < module - 1 or shape[2] != H:
        raise ValueError(f"kept must be [slots, {module - 1} or more, {H}], not {list(shape)}")
    wanted = hidden.scaled.dtype if isinstance(hidden, Residual) else hidden.dtype
    if kept.dtype != wanted:
        raise ValueError(f"kept is {kept.dtype}, the hidden states {wanted}")
    if not kept.is_contiguous():
        raise ValueError("kept must be dense")


# Arguments that a launch without drafts and without a previous module leaves out.
_CHAIN_ARGUMENTS = (
    "commit",
    "run",
    "source_ptr",
    "chain_token_ptr",
    "chain_hidden_ptr",
    "kept_ptr",
    "DEPTH",
    "RUN_LANES",
    "KEPT",
    "RUN_GROUPS",
    "BLOCK_RUN",
    "BLOCK_C",
    "BLOCK_K",
)


def _run_options(
    hidden: Hidden, eps: float, kept: torch.Tensor | None, lanes: int
) -> dict[str, Any]:
    """Kernel arguments for the output of the module before, which has `lanes` lanes per row."""
    stream = hidden if isinstance(hidden, Residual) else None
    value = hidden.scaled if isinstance(hidden, Residual) else hidden
    groups = 0 if stream is None else stream.squares.shape[0]
    run = StreamArgs(
        hidden=value,
        squares=None if stream is None else stream.squares,
        hidden_lanes=value.shape[0],
        hidden_stride=value.stride(0),
        hidden_eps=eps,
    )
    return {
        "run": run,
        "kept_ptr": kept,
        "KEPT": 0 if kept is None else kept.shape[1],
        "RUN_LANES": lanes,
        "RUN_GROUPS": groups,
        "BLOCK_RUN": triton.next_power_of_2(max(groups, 1)),
    }


def _launch(
    emitted: Emitted,
    lanes: DecodeLanes,
    fusion: Any,
    options: dict[str, Any],
    module: int,
    drafts: int,
    pdl: bool,
) -> None:
    launcher(_vanilla_kernel, (lanes.slot.numel(),))(
        emitted.token_N,
        emitted.count_R,
        emitted.lanes.slot,
        emitted.lanes.position,
        *lanes,
        module - 1,
        fusion,
        W=emitted.token_N.numel() // emitted.count_R.numel(),
        DRAFTS=drafts,
        **options,
        **launch_options(pdl),
    )


@triton.jit(do_not_specialize=["shift"])
def _vanilla_kernel(
    target_ptr,
    count_ptr,
    fed_slot_ptr,
    fed_position_ptr,
    token_ptr,
    slot_ptr,
    position_ptr,
    shift,
    fusion,
    commit,
    run,
    source_ptr,
    chain_token_ptr,
    chain_hidden_ptr,
    kept_ptr,
    W: tl.constexpr,
    DRAFTS: tl.constexpr,
    DEPTH: tl.constexpr,
    RUN_LANES: tl.constexpr,
    KEPT: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN_GROUPS: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    START: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_RUN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane; the program of a row's newest draft commits it and writes where the row
    continues.

    DRAFTS lanes of a row follow those that may emit: 0, or `shift`. Only the tiles may come from
    the launch before. With `kept_ptr` modules are chained: the program of a row's first lane reads
    the kept output of the module before, and then replaces it for the next step.
    """
    lane = tl.program_id(0)
    row = lane // (W + DRAFTS)
    j = lane % (W + DRAFTS)
    fed = row * W
    slot = tl.load(fed_slot_ptr + fed, cache_modifier=".cg")
    row_live = slot >= 0
    position = tl.load(fed_position_ptr + fed, mask=row_live, other=0, cache_modifier=".cg")
    position += j - shift
    count = tl.load(count_ptr + row, mask=row_live, other=0, cache_modifier=".cg")
    live = (j < count) & (position >= 0)
    token = tl.load(target_ptr + fed + j, mask=live, other=0, cache_modifier=".cg")
    h = tl.arange(0, BLOCK_H)
    if kept_ptr is None:
        value = load_hidden(fusion, fed + j, live, H, GROUPS, BLOCK_H, BLOCK_T)
    else:
        ran = row * RUN_LANES
        is_first = row_live & (j == 0)
        keeps = is_first & (count > 0)
        at_kept = kept_ptr + (slot.to(tl.int64) * KEPT + shift - 1) * H + h
        value = load_hidden(run, ran + j - 1, row_live & (j > 0), H, RUN_GROUPS, BLOCK_H, BLOCK_RUN)
        before = tl.load(at_kept, mask=is_first & (h < H), other=0.0, cache_modifier=".cg")
        value = tl.where(is_first, before.to(tl.float32), value)
        next_kept = load_hidden(run, ran + count - 1, keeps, H, RUN_GROUPS, BLOCK_H, BLOCK_RUN)
    if DRAFTS > 0:
        row_slot, row_position, source = load_row(commit, row)
        goes_on = row_slot >= 0
        step = j - count
        is_newest = step == DRAFTS - 1
        if kept_ptr is None:
            newest = load_hidden(
                run, source, goes_on & is_newest, H, RUN_GROUPS, BLOCK_H, BLOCK_RUN
            )
            value = tl.where(is_newest, newest, value)
        if DRAFTS > 1:
            older = goes_on & (step >= 0) & (step < DRAFTS - 1) & (position >= 0)
            at = row * DEPTH + step
            older_token = tl.load(chain_token_ptr + at, mask=older, other=0, cache_modifier=".cg")
            token = tl.where(older, older_token, token)
            if kept_ptr is None:
                older_ptr = chain_hidden_ptr + at.to(tl.int64) * H + h
                drafted = tl.load(older_ptr, mask=older & (h < H), other=0.0, cache_modifier=".cg")
                value = tl.where(older, drafted.to(tl.float32), value)
            live = live | older
    hidden_weight = load_weight(fusion.hidden_norm, H, BLOCK_H)
    hidden = normed(value, hidden_weight, fusion.eps, H)
    start = stream_start(value, hidden, START)
    weight = load_weight(fusion.embedding_norm, H, BLOCK_H)
    wait_for_inputs(PDL)

    if kept_ptr is not None:
        tl.store(at_kept, next_kept.to(kept_ptr.dtype.element_ty), mask=keeps & (h < H))
    if DRAFTS > 0:  # noqa: SIM102  (the outer one is decided as the kernel compiles)
        if is_newest:
            # The last lane of every module's row is at the same position.
            token, live = commit_lane(
                commit,
                row,
                row_slot,
                row_position - 1,
                source,
                DRAFTS - 1,
                row_position + 1,
                BLOCK_C,
                BLOCK_K,
            )
            tl.store(source_ptr + row, lane)
            newest_at = row * DEPTH + DRAFTS - 1
            tl.store(chain_token_ptr + newest_at, token, mask=live)
            if kept_ptr is None:
                newest_ptr = chain_hidden_ptr + newest_at.to(tl.int64) * H + h
                rounded = value.to(chain_hidden_ptr.dtype.element_ty)
                tl.store(newest_ptr, rounded, mask=live & (h < H))
    store_lane(token_ptr, slot_ptr, position_ptr, lane, token, slot, position, live)
    store_combined(fusion, hidden, start, weight, token, lane, live, H, HIDDEN_FIRST, BLOCK_H)
