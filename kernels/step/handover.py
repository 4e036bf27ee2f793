"""A verified step left in static tensors, for a draft module that runs in a separate graph.

A step's results lie in its graph's pool, where the next graph may write; what is handed over does
not. The hidden states are written after their final norm, as plain rows.

Letters: R rows, W lanes of a row, N = R * W lanes, H hidden, T groups of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, live_lanes, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import check_steps, hidden_rows
from graphengine.kernels.draft.draft_triton import StreamArgs, load_hidden
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes


class HandOver(NamedTuple):
    """What a step leaves to the next graph; for a padded lane only the slot, -1."""

    token: torch.Tensor
    """int32 [N]: what the lane was fed."""
    slot: torch.Tensor
    """int32 [N]"""
    position: torch.Tensor
    """int32 [N]"""
    target: torch.Tensor
    """int32 [N]: the target's token after the lane."""
    emitted: torch.Tensor
    """int32 [R]: tokens that the row emitted; 0 for a padded row."""
    hidden: torch.Tensor | None
    """[N, H] in the model's dtype, dense rows: after the final norm. None: the module reads other
    hidden states, which the step left elsewhere."""

    @property
    def lanes(self) -> DecodeLanes:
        return DecodeLanes(self.token, self.slot, self.position)

    def first(self, rows: int, width: int) -> HandOver:
        """Views of the first `rows` rows, of `width` lanes each."""
        lanes = rows * width
        return HandOver(
            token=self.token[:lanes],
            slot=self.slot[:lanes],
            position=self.position[:lanes],
            target=self.target[:lanes],
            emitted=self.emitted[:rows],
            hidden=None if self.hidden is None else self.hidden[:lanes],
        )


def hand_over(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    hidden: Residual | None,
    into: HandOver,
    *,
    hidden_eps: float = 0.0,
    pdl: bool = False,
) -> None:
    """Write all of `into`, which has N lanes and R rows; one launch.

    Drafts that `begin_module_draft` begins from `into` have the same bits as those that it begins
    from the step itself.

    Args:
        token_N: int32, the target's token after each lane.
        count_R: int32, tokens that each row emitted; N is W * R.
        lanes: what the target was fed.
        hidden: the target's stream of N lanes, scaled for the final norm; None where `into` has no
            hidden states. hidden_eps: of that norm.
        into: overwritten: its reader must be done with it.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. Only `token_N`
            and `count_R` may be as new as that one.

    ValueError for a shape or dtype that does not fit.
    """
    N = check_steps(token_N, count_R, lanes)
    _check(N, hidden, into, count_R.numel())
    if not use_triton(token_N):
        hand_over_reference(token_N, count_R, lanes, hidden, into, hidden_eps=hidden_eps)
        return
    H = groups = stride = 0
    stream = None
    if hidden is not None and into.hidden is not None:
        H, groups, stride = hidden.scaled.shape[1], hidden.squares.shape[0], into.hidden.stride(0)
        stream = StreamArgs(
            hidden=hidden.scaled,
            squares=hidden.squares,
            hidden_lanes=N,
            hidden_stride=hidden.scaled.stride(0),
            hidden_eps=hidden_eps,
        )
    block_h = triton.next_power_of_2(max(H, 1))
    launcher(_hand_over_kernel, (N,))(
        token_N,
        count_R,
        *lanes,
        stream,
        into,
        stride,
        W=N // count_R.numel(),
        H=H,
        GROUPS=groups,
        BLOCK_H=block_h,
        BLOCK_T=triton.next_power_of_2(max(groups, 1)),
        # As in the kernels of `draft`: the sums of squares must be equal.
        num_warps=min(max(block_h // 256, 4), 16),
        **launch_options(pdl),
    )


def hand_over_reference(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    hidden: Residual | None,
    into: HandOver,
    *,
    hidden_eps: float = 0.0,
) -> None:
    """`hand_over` in plain PyTorch."""
    live = live_lanes(lanes.slot)
    into.slot.copy_(lanes.slot)
    into.token[live] = lanes.token[live]
    into.position[live] = lanes.position[live]
    into.target[live] = token_N[live]
    if hidden is not None and into.hidden is not None:
        into.hidden[live] = hidden_rows(hidden, live, hidden_eps)
    live_R = lanes.slot.view(count_R.numel(), -1)[:, 0] >= 0
    into.emitted.copy_(count_R.where(live_R, 0))


def _check(lanes: int, hidden: Residual | None, into: HandOver, rows: int) -> None:
    """ValueError unless the stream and the destination have these lanes and rows."""
    named = {name: value for name, value in into._asdict().items() if name != "hidden"}
    check_lanes(rows, emitted=named.pop("emitted"))
    check_lanes(lanes, **named)
    if hidden is None or into.hidden is None:
        if (hidden is None) != (into.hidden is None):
            given, room = ("no" if each is None else "some" for each in (hidden, into.hidden))
            raise ValueError(f"{given} hidden states are handed over, and there is {room} room")
        return
    scaled, squares = hidden.scaled, hidden.squares
    check_rows(hidden=scaled)
    shape = tuple(squares.shape)
    dense = squares.dtype == torch.float32 and squares.is_contiguous()
    if scaled.shape[0] != lanes or len(shape) != 2 or shape[0] < 1 or shape[1] != lanes:
        raise ValueError(
            f"hidden must be a stream of {lanes} lanes, not {list(scaled.shape)} with squares "
            f"{list(shape)}"
        )
    if not dense:
        raise ValueError(f"squares must be dense float32, not {squares.dtype}")
    output_rows(into.hidden, tuple(scaled.shape), dtype=scaled.dtype, like=scaled)


@triton.jit
def _hand_over_kernel(
    target_ptr,
    count_ptr,
    token_ptr,
    slot_ptr,
    position_ptr,
    stream,
    into,
    into_stride,
    W: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane; the program of a row's first lane also stores the row's count.

    Only the target's tokens and the counts may be written by the launch before.
    """
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    live = slot >= 0
    token = tl.load(token_ptr + lane, mask=live, other=0, cache_modifier=".cg")
    position = tl.load(position_ptr + lane, mask=live, other=0, cache_modifier=".cg")
    value = tl.zeros((BLOCK_H,), tl.float32)
    if H > 0:
        value = load_hidden(stream, lane, live, H, GROUPS, BLOCK_H, BLOCK_T)
    wait_for_inputs(PDL)

    target = tl.load(target_ptr + lane, mask=live, other=0)
    tl.store(into.slot + lane, tl.where(live, slot, -1))
    tl.store(into.token + lane, token, mask=live)
    tl.store(into.position + lane, position, mask=live)
    tl.store(into.target + lane, target, mask=live)
    if lane % W == 0:
        row = lane // W
        tl.store(into.emitted + row, tl.load(count_ptr + row, mask=live, other=0))
    if H > 0:
        h = tl.arange(0, BLOCK_H)
        rounded = value.to(into.hidden.dtype.element_ty)
        tl.store(into.hidden + lane.to(tl.int64) * into_stride + h, rounded, mask=live & (h < H))
