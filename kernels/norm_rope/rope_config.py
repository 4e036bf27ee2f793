"""RoPE's frequencies and tables, as a checkpoint's `rope_parameters` give them.

D is head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """How rotation frequencies follow from a checkpoint's `rope_parameters` (transformers' names).

    `kind` picks the fields that count. linear: `factor`. llama3: `factor`, `low_freq_factor`,
    `high_freq_factor`, `original_max_position_embeddings`. yarn: `factor`, `beta_fast`,
    `beta_slow`, `truncate`, `original_max_position_embeddings`, and the attention factor, which
    follows from `factor` (and `mscale` over `mscale_all_dim` where both are given) unless stated.
    longrope: `short_factor` and `long_factor`, one number per rotated pair,
    `original_max_position_embeddings`, and the attention factor, which follows from it and `factor`
    unless stated. dynamic: `factor`, and `original_max_position_embeddings`, the tokens up to which
    it is as default. proportional: `factor`; frequencies are those of a whole head, whatever part
    of it is `rotated`, and pairs are half a head apart.

    `rotated` is the rotated part of a head; its other pairs stay as they are. `sections` are the
    pairs that rotate by time, height and width (M-RoPE), one section after the other, or, where
    they are `interleaved`, alternately until height and width have theirs; None: positions have one
    axis.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    rotated: float = 1.0
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rotated <= 1:
            raise ValueError(f"rotated={self.rotated} must be above 0, and at most 1")
        if self.kind not in get_args(RopeKind):
            raise ValueError(f"rope kind {self.kind!r} is not one of {get_args(RopeKind)}")
        if not self.theta > 0 or not self.factor > 0:
            raise ValueError(f"theta={self.theta} and factor={self.factor} must be above 0")
        # LongRoPE's attention factor divides by its logarithm.
        least = {"default": 0, "linear": 0, "proportional": 0, "longrope": 2}.get(self.kind, 1)
        if (self.original_max_position_embeddings or 0) < least:
            raise ValueError(
                f"rope kind {self.kind!r} needs original_max_position_embeddings, "
                f"got {self.original_max_position_embeddings}"
            )
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def pairs(self, head_dim: int) -> int:
        """Rotated pairs of a head. ValueError if the settings do not fit heads of this size."""
        rotated = int(head_dim * self.rotated)
        if self.kind == "proportional":
            rotated -= rotated % 2
        if rotated % 2 or rotated == 0:
            raise ValueError(f"{rotated} of head_dim={head_dim} values turn: must be even, not 0")
        if self.kind == "dynamic" and rotated == 2:
            raise ValueError(f"RoPE of type 'dynamic' needs 4 values that turn, not {rotated}")
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            given = len(getattr(self, name))
            if given != rotated // 2:
                raise ValueError(
                    f"RoPE's {name} has {given} numbers, but {rotated // 2} pairs turn in heads of "
                    f"{head_dim}"
                )
        return rotated // 2

    def is_long(self, max_positions: int) -> bool:
        """Whether tables of this many positions have longrope's long factors, in all rows."""
        return self.kind == "longrope" and max_positions > (
            self.original_max_position_embeddings or 0
        )

    @property
    def most_at_once(self) -> int | None:
        """Most tokens of a prompt; None: any number.

        transformers gives a longer one frequencies that follow from its length.
        """
        return self.original_max_position_embeddings if self.kind == "dynamic" else None

    def most_positions(self, trained: int) -> int:
        """Tokens of the longest sequence, for a model whose config says `trained`."""
        return max(trained, int(trained * self.factor)) if self.kind == "dynamic" else trained


def rope_axes(config: RopeConfig, *, head_dim: int) -> tuple[int, ...] | None:
    """The axis, 0..2, by which each pair of a head rotates; None where positions have one axis.

    Pairs that do not rotate have axis 0. ValueError where sections that follow one another do not
    add up to the rotated pairs.
    Source: `apply_multimodal_rotary_pos_emb` of transformers' Qwen2-VL, `apply_interleaved_mrope`
    of its Qwen3-VL.
    """
    sections = config.sections
    if sections is None:
        return None
    pairs = int(head_dim * config.rotated) // 2
    axes = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs)]
    if not config.interleaved:
        if sum(sections) != pairs:
            raise ValueError(f"RoPE's sections {sections} must add up to {pairs} pairs that turn")
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    return (*axes, *[0] * (head_dim // 2 - pairs))


def rope_tables(
    config: RopeConfig, *, head_dim: int, max_positions: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, float32 [max_positions, D/2] each.

    Pairs that do not rotate are last, and have the cosine 1 and the sine 0.

    The attention factor (YaRN, LongRoPE) is multiplied into both. Computed on the CPU whatever the
    device, so that every device rotates by the same bits. Equal to transformers' rotary embedding
    of `max_positions` tokens; with dynamic RoPE, to that of tokens fed one by one to a cache.
    """
    if head_dim % 2 or head_dim <= 0 or max_positions <= 0:
        raise ValueError(f"head_dim={head_dim} must be even, max_positions={max_positions} above 0")
    pairs = config.pairs(head_dim)
    if torch.device(device).type == "meta":
        empty = torch.empty(2, max_positions, head_dim // 2, device=device)
        return empty[0], empty[1]
    width = head_dim if config.kind == "proportional" else 2 * pairs
    frequencies, attention_factor = rope_frequencies(
        config, head_dim=width, long=config.is_long(max_positions)
    )
    frequencies = frequencies[:pairs]
    positions = torch.arange(max_positions)
    angles = positions.float()[:, None] * frequencies
    trained = config.original_max_position_embeddings
    if config.kind == "dynamic" and trained is not None and max_positions > trained:
        later = _dynamic_frequencies(config, positions[trained:] + 1, head_dim=2 * pairs)
        angles[trained:] = positions[trained:].float()[:, None] * later
    cos, sin = torch.ones(max_positions, head_dim // 2), torch.zeros(max_positions, head_dim // 2)
    cos[:, :pairs] = angles.cos() * attention_factor
    sin[:, :pairs] = angles.sin() * attention_factor
    return cos.to(device), sin.to(device)


def rope_frequencies(
    config: RopeConfig, *, head_dim: int, long: bool = False
) -> tuple[torch.Tensor, float]:
    """Radians a position, float32 [D/2] on the CPU, and the factor on cosines and sines.

    long  whether longrope takes its long factors

    The order of operations is that of transformers' `ROPE_INIT_FUNCTIONS`: the bits are the same.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    periods = torch.pow(config.theta, exponents)
    if config.kind in ("linear", "proportional"):
        return 1.0 / periods / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3_frequencies(config, 1.0 / periods), 1.0
    if config.kind == "yarn":
        return _yarn_frequencies(config, periods), _yarn_attention_factor(config)
    if config.kind == "longrope":
        factors = torch.tensor(config.long_factor if long else config.short_factor)
        return 1.0 / (factors * periods), _longrope_attention_factor(config)
    return 1.0 / periods, 1.0


def _dynamic_frequencies(
    config: RopeConfig, tokens_N: torch.Tensor, *, head_dim: int
) -> torch.Tensor:
    """NTK-aware scaling whose base grows with the sequence: [N, D/2] after this many tokens each.

    Source: `_compute_dynamic_ntk_parameters` of transformers, which computes the base in float32.
    One by one, as powers of whole vectors have other bits.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    factor, trained = config.factor, config.original_max_position_embeddings
    power = head_dim / (head_dim - 2)
    return torch.stack(
        [
            1.0 / (config.theta * (factor * tokens / trained - (factor - 1)) ** power) ** exponents
            for tokens in tokens_N
        ]
    )


def _longrope_attention_factor(config: RopeConfig) -> float:
    trained = config.original_max_position_embeddings
    assert trained is not None
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(trained))


def _llama3_frequencies(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's scaling: long waves slowed by `factor`, short ones kept, a ramp in between."""
    assert config.original_max_position_embeddings is not None
    trained = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    is_long = wavelengths > trained / low
    is_short = wavelengths < trained / high
    scaled = torch.where(is_long, frequencies / config.factor, frequencies)
    ramp = (trained / wavelengths - low) / (high - low)
    blended = (1 - ramp) * scaled / config.factor + ramp * scaled
    return torch.where(is_long | is_short, scaled, blended)


def _yarn_frequencies(config: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al. 2023): interpolate slow dimensions by `factor`, keep fast ones, ramp."""
    half = periods.shape[0]
    first, last = _yarn_ramp_bounds(config, head_dim=2 * half)
    # The ramp must not divide by zero where the two bounds meet.
    width = last - first if last != first else 0.001
    ramp = torch.clamp((torch.arange(half, dtype=torch.float32) - first) / width, 0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_ramp_bounds(config: RopeConfig, *, head_dim: int) -> tuple[float, float]:
    """Dimensions that turn `beta_fast` and `beta_slow` times over the trained context."""
    assert config.original_max_position_embeddings is not None
    trained = config.original_max_position_embeddings

    def dimension(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, head_dim - 1)


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
