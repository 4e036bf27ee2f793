"""Common code of drafters that read the target's residual stream after some of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from graphengine.kernels.linear.plans import RowFamily
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.composition import attention_of
from graphengine.models.contract import ModelConfig
from graphengine.models.decoder import DecoderConfig, as_decoder
from graphengine.models.sublayers import usual_layer


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

    def split_tokens(self, family: RowFamily, dtype: torch.dtype, tokens: int) -> int:
        """Tokens that a program of decode attention reads, for sequences of up to `tokens`."""
        return self.attention.split_tokens(family, dtype, tokens)

    def tables(self, max_seq_len: int, device: torch.device) -> RopeTables:
        """The layers' cosines and sines, which are not the target's."""
        rope = self.sizes.rope
        assert rope is not None, "the layers know positions"
        return RopeTables.of(
            rope,
            head_dim=self.attention.table_dim,
            max_seq_len=max_seq_len,
            device=device,
        )

    def table_bytes(self, max_seq_len: int) -> int:
        """Bytes of the cosines and sines of this many positions."""
        return RopeTables.nbytes(self.attention.table_dim, max_seq_len)


def grouped_attention(config: DecoderConfig) -> GroupedQueryAttention:
    """The attention of every layer of a drafter, apart from its window."""
    attention = attention_of(config)
    assert isinstance(attention, GroupedQueryAttention), f"{attention=}"
    return attention


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
    decoder = as_decoder(target)
    like = None if decoder is None else decoder.attending_decoder()
    attention = None if like is None else attention_of(like)
    if like is None or like.mlp is None or not isinstance(attention, GroupedQueryAttention):
        raise ValueError(f"no {what} has the sizes of a {target.architecture}")
    hidden, eps = like.hidden_size, like.norm_eps
    plain = GroupedQueryAttention(
        hidden_size=hidden,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        norm_eps=eps,
        qk_norm=qk_norm,
        rotated=attention.rotated,
    )
    mlp = Swiglu(hidden_size=hidden, ffn_size=like.mlp.ffn_size, norm_eps=eps)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        norm_eps=eps,
        max_positions=like.max_positions,
        layers=(usual_layer(plain, mlp, post_norms=False),) * num_layers,
        mlp=mlp,
        rope=like.rope,
    )
