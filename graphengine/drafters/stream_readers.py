"""Common code of drafters that read the target's residual stream after some of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from graphengine.kernels.linear.plans import RowFamily
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.composition import is_composed
from graphengine.models.contract import ModelConfig
from graphengine.models.decoder import DecoderConfig


class StreamReaders(ABC):
    """Sizes of a drafter's layers that read the target's residual stream.

    layers        target layers after which the stream is read, in the order of fc's columns
    target_width  columns of that stream
    """

    __slots__ = ()

    layers: tuple[int, ...]
    target_width: int

    @property
    @abstractmethod
    def sizes(self) -> DecoderConfig:
        """The sizes of a decoder made of these layers."""

    @property
    @abstractmethod
    def attention(self) -> GroupedQueryAttention:
        """The attention of every layer, apart from its window."""

    @property
    def hidden_size(self) -> int:
        return self.sizes.hidden_size

    @property
    def output_eps(self) -> float:
        """The epsilon of every norm."""
        return self.sizes.norm_eps

    @property
    def streams_width(self) -> int:
        """Columns of fc's input."""
        return len(self.layers) * self.target_width

    def arrivals(self, lanes: int) -> int:
        """Arrival counters that attention uses."""
        return self.attention.arrivals(lanes)

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        """Tokens that a program of decode attention reads, for sequences of up to `tokens`."""
        return self.attention.split_tokens(family, dtype, tokens)

    def tables(self, max_seq_len: int, device: torch.device) -> RopeTables:
        """The layers' cosines and sines, which are not the target's."""
        return RopeTables.of(
            self.sizes.rope,
            head_dim=self.attention.table_dim,
            max_seq_len=max_seq_len,
            device=device,
        )

    def table_bytes(self, max_seq_len: int) -> int:
        """Bytes of the cosines and sines of this many positions."""
        return RopeTables.nbytes(self.attention.table_dim, max_seq_len)


def layers_like(
    target: ModelConfig,
    what: str,
    *,
    architecture: str,
    vocab_size: int,
    num_layers: int = 1,
    qk_norm: bool = False,
) -> DecoderConfig:
    """Dense layers of the target's sizes, for a drafter.

    ValueError, naming the drafter by `what`, if the target's layers are of a kind that none has.
    """
    decoder = target.attending_decoder() if is_composed(target) else target
    if not isinstance(decoder, DecoderConfig) or decoder.latent is not None:
        raise ValueError(f"no {what} has the sizes of a {target.architecture}")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=decoder.hidden_size,
        ffn_size=decoder.ffn_size,
        num_layers=num_layers,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        norm_eps=decoder.norm_eps,
        max_positions=decoder.max_positions,
        rope=decoder.rope,
        qk_norm=qk_norm,
    )
