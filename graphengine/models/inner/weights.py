"""The weights of an inner decoder, and what each of them is in a checkpoint.

Letters: K codes of a frame, V codes of a codebook, H the model's hidden size, I the inner
decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.models.decoder_layer import LayerWeights, allocate_layer
from graphengine.models.inner.inner_decoder import InnerDecoder
from graphengine.models.linears import PLAIN
from graphengine.models.weights import Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerWeights:
    """All weights of an inner decoder, in the model's dtype.

    frames      `[K * V, H]`: row k * V + c is that of code c at place k of a frame
    codes       the same as the inner decoder reads it; the same tensor where they are tied
    projection  `[I, H]`
    norm        `[I]`, after the last layer
    heads       `[K - 1, V, I]`: head k - 1 gives code k
    """

    config: InnerDecoder
    frames: Tensor
    codes: Tensor
    projection: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    heads: Tensor

    def stored(self) -> dict[str, Weight]:
        """Every tensor, by its name in a checkpoint."""
        config, names = self.config, self.config.names
        embeddings = {f"{names.frames}.weight": self.frames, f"{names.codes}.weight": self.codes}
        if config.tied:
            stored = config.stored or (f"{names.frames}.weight",)
            embeddings = dict.fromkeys(stored, self.frames)
        found = {
            **embeddings,
            f"{names.projection}.weight": self.projection,
            f"{names.norm}.weight": self.norm,
            # The checkpoint has columns where each head has rows.
            f"{names.heads}.weight": self.heads.transpose(1, 2),
        }
        tensors = {name: Weight(tensor) for name, tensor in found.items()}
        return {
            **tensors,
            **{name: each for layer in self.layers for name, each in layer.stored().items()},
        }

    def tensors(self) -> list[Tensor]:
        """Every weight tensor, tied ones twice."""
        of_layers = [tensor for layer in self.layers for tensor in layer.tensors()]
        return [self.frames, self.codes, self.projection, self.norm, self.heads, *of_layers]


def allocate_inner(config: InnerDecoder, *, device: str, dtype: torch.dtype) -> InnerWeights:
    """Uninitialised weights; `device="meta"` allocates nothing."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden, rows = config.hidden_size, config.steps * config.codes
    frames = new(rows, config.width)
    return InnerWeights(
        config=config,
        frames=frames,
        codes=frames if config.tied else new(rows, config.width),
        projection=new(hidden, config.width),
        layers=tuple(
            allocate_layer(
                f"{config.names.layers}{index}.", layer, hidden, PLAIN, device=device, dtype=dtype
            )
            for index, layer in enumerate(config.layers)
        ),
        norm=new(hidden),
        heads=new(config.steps - 1, config.codes, hidden),
    )
