"""The weights of an inner decoder, and what each of them is in a checkpoint.

Letters: K codes of a frame, V codes of a codebook, U of the first one, H the model's hidden size, I
the inner decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.models.blocks.gqa import AttentionWeights
from graphengine.models.blocks.streams import tensors_of
from graphengine.models.decoder_layer import LayerWeights, allocate_layer
from graphengine.models.inner.inner_decoder import InnerDecoder
from graphengine.models.linears import PLAIN
from graphengine.models.weights import Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerWeights:
    """All weights of an inner decoder, in the model's dtype.

    first_book  `[U, H]`, the model's embedding, where it is the first codebook's; else None
    frames      `[K * V, H]`: row k * V + c is that of code c at place k of a frame; where there is
                `first_book`, `[(K - 1) * V, H]` without the first codebook
    codes       the same as the inner decoder reads it; the same tensor where they are tied
    projection  `[I, H]`; the identity where the inner decoder has none
    projection_bias  `[I]`, or None
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
    first_book: Tensor | None = None
    projection_bias: Tensor | None = None

    def stored(self) -> dict[str, Weight]:
        """Every tensor, by its name in a checkpoint."""
        names = self.config.names
        found = self._embeddings()
        if names.projection:
            found[f"{names.projection}.weight"] = self.projection
        if self.projection_bias is not None:
            found[f"{names.projection}.bias"] = self.projection_bias
        found[f"{names.norm}.weight"] = self.norm
        if "{}" in names.heads:
            found |= {f"{names.heads.format(k)}.weight": head for k, head in enumerate(self.heads)}
        else:
            # The checkpoint has columns where each head has rows.
            found[f"{names.heads}.weight"] = self.heads.transpose(1, 2)
        tensors = {name: Weight(tensor) for name, tensor in found.items()}
        return {
            **tensors,
            **{name: each for layer in self.layers for name, each in layer.stored().items()},
        }

    def _embeddings(self) -> dict[str, Tensor]:
        """The embeddings of codes, by name; the model's own are not among them."""
        config, names = self.config, self.config.names
        if "{}" in names.frames:
            books = self.frames.chunk(len(self.frames) // config.codes)
            return {f"{names.frames.format(k)}.weight": book for k, book in enumerate(books)}
        if config.tied:
            stored = config.stored or (f"{names.frames}.weight",)
            return dict.fromkeys(stored, self.frames)
        return {f"{names.frames}.weight": self.frames, f"{names.codes}.weight": self.codes}

    @property
    def step_nbytes(self) -> int:
        """Bytes of weights that all runs of a step read: layers and projection in each run, and a
        head in each but the first, in which the last layer ends with its keys and values.

        Of the embeddings of codes a step reads a few rows, which do not count.
        """
        runs, last = self.config.steps, self.layers[-1]
        layers = sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())
        attention = last.attention
        assert isinstance(attention, AttentionWeights), f"{attention=}"
        at_first = (last.input_norm, attention.qkv, attention.qkv_bias)
        left_out = sum(tensor.nbytes for tensor in last.tensors())
        left_out -= sum(tensor.nbytes for tensor in at_first if tensor is not None)
        later = (runs - 1) * self.norm.nbytes + self.heads.nbytes
        return runs * (layers + self.projection.nbytes) - left_out + later

    def tensors(self) -> list[Tensor]:
        """Every weight tensor but `first_book`, tied ones twice."""
        of_layers = [tensor for layer in self.layers for tensor in layer.tensors()]
        own = [self.frames, self.codes, self.projection, self.norm, self.heads]
        return [*own, *tensors_of(self.projection_bias), *of_layers]


def allocate_inner(
    config: InnerDecoder, embedding: Tensor, *, device: str, dtype: torch.dtype
) -> InnerWeights:
    """Uninitialised weights; `device="meta"` allocates nothing.

    embedding  the model's, which may be the first codebook's
    """

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden, first = config.hidden_size, embedding if config.first_codes else None
    rows = (config.steps - (first is not None)) * config.codes
    frames = new(rows, config.width)
    projection = new(hidden, config.width)
    if not config.names.projection:
        assert hidden == config.width, f"{config=} has no projection"
        torch.nn.init.eye_(projection)
    return InnerWeights(
        config=config,
        frames=frames,
        codes=frames if config.tied else new(rows, config.width),
        projection=projection,
        layers=tuple(
            allocate_layer(
                f"{config.names.layers}{index}.", layer, hidden, PLAIN, device=device, dtype=dtype
            )
            for index, layer in enumerate(config.layers)
        ),
        norm=new(hidden),
        heads=new(config.steps - 1, config.codes, hidden),
        first_book=first,
        projection_bias=new(hidden) if config.projection_bias else None,
    )
