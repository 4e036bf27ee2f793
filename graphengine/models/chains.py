"""The linears of a few layers, one after the other, to measure how best to cut them.

A chain is a model of like layers, with which its decode step can be run without attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from graphengine.models.contract import PLAIN, Model, ModelConfig
from graphengine.models.decoder import DecoderConfig, DecoderModel


class Chain(Model, Protocol):
    """A model whose layers have the same linears each, which can be asked for."""

    def linear(self, layer: int, name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weight, bias and next norm of one of `config.linears`; a norm where it is a residual."""
        ...


def new_chain(
    config: ModelConfig, *, layers: int, dtype: torch.dtype, device: torch.device
) -> Chain:
    """A chain of this many layers with uninitialised weights; its embedding is lm_head's weight.

    ValueError for a model whose layers differ from each other.
    """
    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"the layers of a {config.architecture} are not all alike: there is no chain of them"
        )
    config = replace(config, num_layers=layers, tie_embeddings=True, forms=PLAIN)
    weights = config.allocate(device=str(device), dtype=dtype)
    return DecoderModel(weights, max_seq_len=1)
