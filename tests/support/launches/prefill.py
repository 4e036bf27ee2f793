"""Problems of prefill attention: what a kernel is given, must find, and must leave alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from graphengine.kernels.core.paged import quantise

SENTINEL = -555.0
HUGE = (2**31 - 1, -(2**31), 10**9, -7)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

Op = tuple[Callable[..., torch.Tensor], str]
"""The implementation, and its device."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`tokens` queries of `slot` from `position` on; slot -1 is a padded segment."""

    slot: int
    position: int
    tokens: int


@st.composite
def segments_of(draw: st.DrawFn, lengths: Sequence[int]) -> list[Segment]:
    """A segment of each slot, which may be empty and need not reach the end of the slot's tokens,
    and a padded one among them.
    """
    segments = []
    for slot, length in enumerate(lengths):
        position = draw(st.integers(0, length - 1))
        segments.append(Segment(slot, position, draw(st.integers(0, length - position))))
    segments.insert(draw(st.integers(0, len(segments))), Segment(-1, 0, draw(st.integers(0, 5))))
    return segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Slots with `lengths` cached tokens each, every one of which has a query as well."""

    lengths: tuple[int, ...]
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    """Whether the cache is of e4m3, with scales of its own for each head."""
    window: int = 0
    softcap: float = 0.0
    sunk: bool = False
    """Whether each head has a sink."""
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def kv_scales(self) -> torch.Tensor | None:
        """Float32 [2, G] of an e4m3 cache."""
        generator = torch.Generator().manual_seed(self.seed)
        scales = 0.01 + 0.05 * torch.rand(2, self.kv_heads, generator=generator)
        return scales if self.fp8 else None

    def sinks(self) -> torch.Tensor | None:
        """Float32 [Q], some below all scores and some above them."""
        generator = torch.Generator().manual_seed(self.seed)
        sinks = 3 * torch.randn(self.kv_heads * self.group, generator=generator)
        return sinks if self.sunk else None

    def options(self, device: str) -> dict[str, Any]:
        """Options of the kernel that are not at their defaults."""
        options: dict[str, Any] = {"window": self.window, "softcap": self.softcap}
        options = {name: value for name, value in options.items() if value}
        for name, tensor in (("kv_scales", self.kv_scales()), ("sinks", self.sinks())):
            if tensor is not None:
                options[name] = tensor.to(device)
        return options

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [S, longest, Q, D], keys and values [S, longest, G, D]."""
        generator = torch.Generator().manual_seed(self.seed)
        slots, longest = len(self.lengths), max(self.lengths)
        heads = (self.kv_heads * self.group, self.kv_heads, self.kv_heads)
        q, k, v = (
            torch.randn(slots, longest, h, self.head_dim, generator=generator)
            .to(self.dtype)
            .to(device)
            for h in heads
        )
        return q, k, v


def dense_attention(problem: Problem) -> torch.Tensor:
    """The definition, in float64, for every token of every slot: [S, longest, Q * D]."""
    q, k, v = problem.tensors("cpu")
    scales = problem.kv_scales()
    if scales is not None:
        k, v = (
            quantise(t, scale[:, None]).double() * scale[:, None].double()
            for t, scale in zip((k, v), scales, strict=True)
        )
    q, k, v = (t.double() for t in (q, k, v))
    longest = q.shape[1]
    hidden = torch.ones(longest, longest, dtype=torch.bool).triu(1)
    if problem.window:
        hidden |= torch.ones(longest, longest, dtype=torch.bool).tril(-problem.window)
    k, v = (t.repeat_interleave(problem.group, dim=2) for t in (k, v))
    scores = torch.einsum("sthd,skhd->shtk", q, k) * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    sinks = problem.sinks()
    if sinks is not None:
        sinks = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :longest]
    return torch.einsum("shtk,skhd->sthd", weights, v).flatten(2)


def prefill(
    op: Op,
    place_cache: Callable[..., Any],
    problem: Problem,
    segments: Sequence[Segment],
    *,
    tail: int = 0,
    placement: int = 0,
    poison: bool = False,
    apart: int = 0,
) -> list[torch.Tensor]:
    """Each segment's [tokens, Q * D]; asserts that nothing else was written.

    Keys past a slot's last queried token are not in the cache: they are NaN under `poison`, as are
    those before the window of the first one.
    `tail` lanes after the last segment are in no segment. Lanes of the queries are `apart` values
    farther apart than they need to be.
    """
    function, device = op
    q_SLQD, keys, values = problem.tensors(device)
    scales = problem.kv_scales()
    if scales is not None:
        scales = scales.to(device)
        keys, values = (
            quantise(t, scale[:, None]) for t, scale in zip((keys, values), scales, strict=True)
        )
    filled = [0] * len(problem.lengths)
    for segment in segments:
        if segment.slot >= 0:
            end = segment.position + segment.tokens
            filled[segment.slot] = max(filled[segment.slot], end)
    cache = place_cache(
        keys,
        values,
        filled,
        block_size=problem.block_size,
        placement=placement,
        poison=poison,
    )
    if poison and problem.window:
        _poison_before_windows(problem, segments, cache)
    before = cache.all_layers.clone()
    lanes = sum(segment.tokens for segment in segments) + tail
    heads, head_dim = q_SLQD.shape[2:]
    wide = torch.full((lanes, heads * head_dim + apart), torch.nan if poison else 0.0).to(q_SLQD)
    q = wide[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    out = torch.full((lanes, heads * head_dim), SENTINEL).to(q)
    starts, positions = [0], []
    for index, segment in enumerate(segments):
        first = starts[-1]
        starts.append(first + segment.tokens)
        padded = segment.slot < 0
        positions.append(HUGE[index % len(HUGE)] if padded else segment.position)
        if not padded:
            last = segment.position + segment.tokens
            q[first : starts[-1]] = q_SLQD[segment.slot, segment.position : last]

    def on_device(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    result = function(
        q,
        cache.kv,
        cache.block_table_SB,
        query_start_P1=on_device(starts),
        slot_P=on_device([segment.slot for segment in segments]),
        position_P=on_device(positions),
        scale=problem.scale,
        out=out,
        **problem.options(device),
    )
    assert result.data_ptr() == out.data_ptr()
    # As bytes, so that a NaN equals itself.
    unchanged = torch.equal(cache.all_layers.view(torch.uint8), before.view(torch.uint8))
    assert unchanged, "attention wrote to the cache"
    assert bool((out[starts[-1] :] == SENTINEL).all()), "a lane in no segment was written"
    results = [result[a:b] for a, b in pairwise(starts)]
    for segment, rows in zip(segments, results, strict=True):
        assert segment.slot >= 0 or bool((rows == SENTINEL).all()), "a padded segment was written"
    return results


def _poison_before_windows(problem: Problem, segments: Sequence[Segment], cache: Any) -> None:
    """NaN for keys and values that no segment of their slot sees, huge numbers for their blocks."""
    for slot in range(len(problem.lengths)):
        positions = [each.position for each in segments if each.slot == slot and each.tokens]
        unseen = max(0, min(positions, default=0) - problem.window + 1)
        blocks, entries = divmod(unseen, problem.block_size)
        row = cache.block_table_SB[slot]
        if entries:
            cache.kv[int(row[blocks]), :, :entries] = torch.nan
        row[:blocks] = HUGE[slot % len(HUGE)]
