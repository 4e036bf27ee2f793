"""`mamba2.py` in plain PyTorch, one token after the other; letters as there.

A row's bits do not depend on other rows: each row is summed by itself.
"""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import live_lanes, sum_rows
from graphengine.kernels.linear.residual import sums_of_squares
from graphengine.kernels.norm_rope.activation import silu_reference
from graphengine.kernels.recurrent.mamba2.mamba2_sizes import Mamba2Params, Mamba2Sizes
from graphengine.kernels.recurrent.softplus import exp_reference, softplus_reference


def mamba2_decode_reference(
    projected_NX: torch.Tensor,
    ring_SFC: torch.Tensor,
    state_SEHPK: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: Mamba2Params,
    sizes: Mamba2Sizes,
    *,
    tokens_per_row: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """`mamba2_decode` into `out`."""
    ring_entries, entries = ring_SFC.shape[1], state_SEHPK.shape[1]
    parts = (sizes.inner, sizes.channels, sizes.heads)
    _, inputs_NC, dt_NH = projected_NX.split(parts, dim=1)
    rows = live_lanes(slot_N[::tokens_per_row]) * tokens_per_row
    slot, position = slot_N[rows].long(), position_N[rows].long()
    h = _before(state_SEHPK, slot, position)
    for token in range(tokens_per_row):
        # Draft tokens that do not exist come last.
        lives = torch.nonzero(slot_N[rows + token] >= 0).squeeze(1)
        rows, slot, position, h = rows[lives], slot[lives], position[lives], h[lives]
        lanes, here = rows + token, position + token
        total = torch.zeros(len(rows), sizes.channels, device=out.device)
        if params.conv_bias is not None:
            total += params.conv_bias.float()
        for tap, weight in enumerate(params.conv_weight.float().unbind(1)):
            back = sizes.width - 1 - tap
            if token >= back:
                seen = inputs_NC[lanes - back].float()
            else:
                kept = ring_SFC[slot, (here - back) % ring_entries].float()
                seen = torch.where((here >= back)[:, None], kept, 0.0)
            total += seen * weight
        ring_SFC[slot, here % ring_entries] = inputs_NC[lanes].to(ring_SFC.dtype)
        x, b, c = _parts(silu_reference(total), sizes)
        dt, decay = _time_steps(dt_NH[lanes], params, sizes)
        h = _advanced(h, x, b, dt, decay).to(state_SEHPK.dtype)
        state_SEHPK[slot, here % entries] = h
        h = h.float()
        out[lanes] = _read(h, x, c, params).flatten(1).to(out.dtype)
    return out


def mamba2_prefill_reference(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    state_SEHPK: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    params: Mamba2Params,
    sizes: Mamba2Sizes,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """`mamba2_prefill` into `out`."""
    lanes = live_lanes(slot_T)
    if not len(lanes):
        return out
    slot, position = slot_T[:1].long(), position_T[lanes].long()
    h = _before(state_SEHPK, slot, position[:1])
    x, b, c = _parts(xbc_TC[lanes], sizes)
    dt, decay = _time_steps(dt_TH[lanes], params, sizes)
    for index in range(len(lanes)):
        one = slice(index, index + 1)
        h = _advanced(h, x[one], b[one], dt[one], decay[one])
        out[index] = _read(h, x[one], c[one], params).flatten().to(out.dtype)
    state_SEHPK[slot, position[-1:] % state_SEHPK.shape[1]] = h.to(state_SEHPK.dtype)
    return out


def mamba2_gate_reference(
    y_NI: torch.Tensor,
    z_NI: torch.Tensor,
    norm_I: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    out: torch.Tensor,
    squares_TN: torch.Tensor,
) -> None:
    """Gate y as `mamba2_decode_gated` does, into both of its tensors."""
    live = live_lanes(slot_N)
    u = y_NI[live].float() * silu_reference(z_NI[live].float())
    out[live] = (u * norm_I.float()).to(out.dtype)
    squares_TN[:, live] = sums_of_squares(u, squares_TN.shape[0])


def mamba2_norm_reference(
    y_NI: torch.Tensor,
    z_NI: torch.Tensor,
    weight_I: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    groups: int,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """`mamba2_norm` into `out`."""
    live = live_lanes(slot_N)
    u = y_NI[live].float() * silu_reference(z_NI[live].float())
    parts = u.view(len(live) * groups, u.shape[1] // groups)
    mean = sum_rows(parts.square()) / parts.shape[1]
    normed = (parts * torch.rsqrt(mean + eps)[:, None]).view_as(u)
    out[live] = (normed * weight_I.float()).to(out.dtype)
    return out


def _before(
    state_SEHPK: torch.Tensor, slot_R: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    """Float32 `[R, H, P, K]`: the state before the tokens at these positions."""
    entries = state_SEHPK.shape[1]
    found = state_SEHPK[slot_R, (position_R - 1) % entries].float()
    return torch.where((position_R > 0)[:, None, None, None], found, 0.0)


def _parts(
    xbc_NC: torch.Tensor, sizes: Mamba2Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 x `[N, H, P]`; B and C `[N, H, K]`, each head with those of its group."""
    heads, groups = sizes.heads, sizes.groups
    of_groups = groups * sizes.state_size
    x, b, c = xbc_NC.float().split((sizes.inner, of_groups, of_groups), dim=1)
    b, c = (
        part.unflatten(1, (groups, sizes.state_size)).repeat_interleave(heads // groups, dim=1)
        for part in (b, c)
    )
    return x.unflatten(1, (heads, sizes.head_dim)), b, c


def _time_steps(
    dt_NH: torch.Tensor, params: Mamba2Params, sizes: Mamba2Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """dt, and the factor by which a state decays, float32 `[N, H]` each."""
    x = dt_NH.float() + params.dt_bias.float()
    dt = softplus_reference(x).clamp(sizes.dt_min, sizes.dt_max)
    return dt, exp_reference(dt * -exp_reference(params.a_log.float()))


def _advanced(
    h: torch.Tensor, x: torch.Tensor, b: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    return decay[:, :, None, None] * h + (dt[:, :, None] * x)[..., None] * b[:, :, None]


def _read(h: torch.Tensor, x: torch.Tensor, c: torch.Tensor, params: Mamba2Params) -> torch.Tensor:
    met = h * c[:, :, None]
    return sum_rows(met.flatten(0, 2)).view_as(x) + params.skip.float()[:, None] * x
