"""Decode and prefill attention in plain PyTorch: the twins of `decode.py` and `prefill.py`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from graphengine.kernels.attention.scores import first_key_of, softmax_reference
from graphengine.kernels.core.paged import (
    checked_output,
    gather_cache,
    gather_entries,
    position_limit,
    token_capacity,
)
from graphengine.kernels.core.tree import TreeLanes, ancestors_of
from graphengine.kernels.norm_rope.activation import soft_capped_reference
from graphengine.kernels.norm_rope.rope import rope_append_reference


class DecodeCall(NamedTuple):
    """Arguments of `decode_attention`, except how it is cut and launched; the reference takes them
    by the same names.
    """

    qkv_NX: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    kv: torch.Tensor
    block_table_SB: torch.Tensor
    slot_N: torch.Tensor
    position_N: torch.Tensor
    num_heads: int
    num_kv_heads: int
    scale: float
    max_seq_len: int
    q_norm_weight: torch.Tensor | None
    k_norm_weight: torch.Tensor | None
    eps: float
    norm_after: bool
    kv_scales: torch.Tensor | None
    window: int
    sinks: torch.Tensor | None
    softcap: float
    tree: TreeLanes | None
    rope_shift_S: torch.Tensor | None

    @property
    def lanes(self) -> int:
        return self.qkv_NX.shape[0]

    @property
    def head_dim(self) -> int:
        return self.kv.shape[4]

    @property
    def depth(self) -> int:
        """The greatest depth of the trees; 0 without trees."""
        return 0 if self.tree is None else self.tree.ancestor.shape[-1]


def decode_attention_reference(
    qkv_NX: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    max_seq_len: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_after: bool = False,
    kv_scales: torch.Tensor | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    tree: TreeLanes | None = None,
    rope_shift_S: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_attention` in plain PyTorch, lane by lane so that no lane's bits depend on others.

    Rows may have any length: all lanes append before the first attends, and each lane is rotated by
    itself anyway.
    """
    head_dim = kv.shape[4]
    out = checked_output(out, (qkv_NX.shape[0], num_heads * head_dim), like=qkv_NX)
    limit = position_limit(cos, kv, block_table_SB, max_seq_len)
    slots, positions = slot_N.tolist(), position_N.tolist()
    shifts = None if rope_shift_S is None else rope_shift_S.tolist()
    sinks_GH = None if sinks is None else sinks.view(num_kv_heads, -1)
    paths: dict[int, list[int]] = {}
    length_of: dict[tuple[int, int], int] = {}
    for lane, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot < 0:
            continue
        path = [] if tree is None else _path_entries(tree, lane, position)
        row = position if shifts is None else position + shifts[slot]
        if not 0 <= position < limit or max(path, default=0) >= limit or not 0 <= row < len(cos):
            out[lane] = math.nan
            continue
        first = first_key_of(position, window)
        paths[lane] = path[first - position - 1 :]
        length_of[slot, first] = max(length_of.get((slot, first), 0), position + 1)
    if not paths:
        return out
    lanes = torch.tensor(list(paths), device=kv.device)
    last = [path[-1] if path else positions[lane] for lane, path in paths.items()]
    q_NQD = rope_append_reference(
        qkv_NX[lanes],
        cos,
        sin,
        kv,
        block_table_SB,
        slot_N[lanes],
        position_N[lanes],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
        eps=eps,
        norm_after=norm_after,
        kv_scales=kv_scales,
        shift_S=rope_shift_S,
        entry_N=torch.tensor(last, device=kv.device),
    )
    # Lanes of one slot with the same first key read parts of the same copy.
    gathered = {
        (slot, first): gather_cache(kv, block_table_SB, slot, length, kv_scales, first=first)
        for (slot, first), length in length_of.items()
    }
    for (lane, path), q_QD in zip(paths.items(), q_NQD.float(), strict=True):
        first = first_key_of(positions[lane], window)
        keys, values = gathered[slots[lane], first]
        keys, values = (each[: positions[lane] + 1 - first] for each in (keys, values))
        if path:
            entries = torch.tensor(path, device=kv.device)
            on_path = gather_entries(kv, block_table_SB, slots[lane], entries, kv_scales)
            before = len(keys) - len(path)
            keys, values = (
                torch.cat((each[:before], own))
                for each, own in zip((keys, values), on_path, strict=True)
            )
        # [G, group, D] x [G, D, keys].
        q = q_QD.view(num_kv_heads, -1, head_dim)
        scores = soft_capped_reference(q @ keys.permute(1, 2, 0) * scale, softcap)
        weights = softmax_reference(scores, sinks_GH)
        out[lane] = (weights @ values.transpose(0, 1)).view(-1).to(out.dtype)
    return out


def _path_entries(tree: TreeLanes, lane: int, position: int) -> list[int]:
    """Entries that hold the keys of a lane's last positions: those of its ancestors and its own.

    They are in the order of a chain: `core/tree.py` says why.
    """
    root = position - int(tree.depth[lane])
    return [root + node for node in (*ancestors_of(tree, lane), int(tree.node[lane]))]


class PrefillCall(NamedTuple):
    """Arguments of `paged_prefill_attention`, except how it is launched; the reference takes them
    by the same names.
    """

    q_NQD: torch.Tensor
    kv: torch.Tensor
    block_table_SB: torch.Tensor
    query_start_P1: torch.Tensor
    slot_P: torch.Tensor
    position_P: torch.Tensor
    scale: float
    seen_P: torch.Tensor | None
    seen_N: torch.Tensor | None
    kv_scales: torch.Tensor | None
    window: int
    sinks: torch.Tensor | None
    softcap: float

    @property
    def segments(self) -> int:
        return self.slot_P.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.kv.shape[3]

    @property
    def plain(self) -> bool:
        """Whether scores are only scaled, and a token sees all keys up to its own."""
        scored = self.window or self.sinks is not None or self.softcap
        return not scored and self.causal

    @property
    def causal(self) -> bool:
        """Whether no token sees keys after its own."""
        return self.seen_P is None and self.seen_N is None


def paged_prefill_attention_reference(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    *,
    query_start_P1: torch.Tensor,
    slot_P: torch.Tensor,
    position_P: torch.Tensor,
    scale: float,
    seen_P: torch.Tensor | None = None,
    seen_N: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_prefill_attention` in plain PyTorch, segment by segment."""
    lanes, heads, head_dim = q_NQD.shape
    out = checked_output(out, (lanes, heads * head_dim), like=q_NQD)
    starts = query_start_P1.tolist()
    for segment, (slot, first_position) in enumerate(
        zip(slot_P.tolist(), position_P.tolist(), strict=True)
    ):
        first, last = starts[segment], starts[segment + 1]
        if slot < 0 or last <= first:
            continue
        position_T = first_position + torch.arange(last - first, device=q_NQD.device)
        seen_T = position_T + 1 if seen_N is None else seen_N[first:last]
        if seen_P is not None:
            seen_T = seen_P[segment].expand(last - first)
        out[first:last] = _segment_reference(
            q_NQD[first:last],
            kv,
            block_table_SB,
            slot,
            position_T,
            seen_T,
            scale=scale,
            kv_scales=kv_scales,
            window=window,
            sinks=sinks,
            softcap=softcap,
        ).to(out.dtype)
    return out


def _segment_reference(
    q_TQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot: int,
    position_T: torch.Tensor,
    seen_T: torch.Tensor,
    *,
    scale: float,
    kv_scales: torch.Tensor | None,
    window: int,
    sinks: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Float32 [T, Q * D] for the T tokens of one segment, which see the keys below `seen_T`."""
    tokens, heads, head_dim = q_TQD.shape
    capacity = token_capacity(kv, block_table_SB)
    first_position = int(position_T[0])
    length = min(int(seen_T.max()), capacity)
    # No token sees keys before those of the first one.
    first_key = min(first_key_of(first_position, window), max(length, 0))
    keys, values = gather_cache(
        kv, block_table_SB, slot, max(length, 0), kv_scales, first=first_key
    )
    group = heads // keys.shape[1]
    key_position = first_key + torch.arange(len(keys), device=q_TQD.device)
    hidden = key_position[None, :] >= seen_T[:, None]
    if window:
        hidden |= key_position[None, :] <= position_T[:, None] - window

    q = q_TQD.float().transpose(0, 1)
    keys = keys.transpose(0, 1).repeat_interleave(group, dim=0)
    values = values.transpose(0, 1).repeat_interleave(group, dim=0)
    scores = soft_capped_reference(q @ keys.transpose(1, 2) * scale, softcap)
    scores = scores.masked_fill(hidden, -math.inf)
    weights = softmax_reference(scores, None if sinks is None else sinks[:, None])
    result = (weights @ values).transpose(0, 1)
    outside = (position_T < 0) | (position_T >= capacity)
    return result.masked_fill(outside[:, None, None], math.nan).reshape(tokens, heads * head_dim)
