"""The linears of a few layers, one after the other, to measure how best to cut them.

A chain is a model of like layers, with which its decode step can be run without attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from graphengine.kernels import AnyWeight
from graphengine.models.contract import Model, ModelConfig, WeightForms
from graphengine.models.decoder import HEAD, DecoderConfig, DecoderModel, layer_prefix


class Chain(Model, Protocol):
    """A model whose layers have the same linears each, which can be asked for."""

    def linear(self, layer: int, name: str) -> tuple[AnyWeight, Tensor | None, Tensor | None]:
        """Weight, bias and next norm of one of `config.linears`; a norm where it is a residual."""
        ...


def new_chain(
    config: ModelConfig, *, layers: int, dtype: torch.dtype, device: torch.device
) -> Chain:
    """A chain of this many layers with uninitialised weights, stored as the first layer's are.

    Its embedding is lm_head's weight, where that is not packed. ValueError for a model whose layers
    differ from each other.
    """
    bases = {name.partition(".")[0] for name in config.linears}
    if (
        not isinstance(config, DecoderConfig)
        or config.expert_layers
        or config.latent
        or len(bases) < len(config.linears)
    ):
        raise ValueError(
            f"the layers of a {config.architecture} with the linears {', '.join(config.linears)} "
            f"are not all alike, or have latents, or have experts: there is no chain of them"
        )
    first = {
        name.removeprefix(layer_prefix(0)): form
        for name, form in config.forms.items()
        if name.startswith(layer_prefix(0))
    }
    forms = {
        layer_prefix(layer) + name: form for layer in range(layers) for name, form in first.items()
    }
    if HEAD in config.forms:
        forms[HEAD] = config.forms[HEAD]
    config = replace(config, num_layers=layers, tie_embeddings=True, forms=WeightForms(forms))
    weights = config.allocate(device=str(device), dtype=dtype)
    return DecoderModel(weights, max_seq_len=1)
