"""The weights of an inner decoder, and the checkpoint tensors that they come from.

Letters: K codes of a frame, V codes of a codebook, W rows of a codebook's embedding, U of the first
one, H the model's hidden size, I the inner decoder's, P codes that stream in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.models.blocks.gqa import AttentionWeights
from graphengine.models.blocks.streams import tensors_of
from graphengine.models.decoder_layer import LayerWeights, allocate_layer
from graphengine.models.inner.inner_decoder import InnerDecoder
from graphengine.models.inner.stacked_layers import StackedLayer, allocate_stack
from graphengine.models.linears import PLAIN
from graphengine.models.weights import Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerWeights:
    """All weights of an inner decoder, in the model's dtype.

    first_book  `[U, H]`, the model's embedding, where it is the first codebook's; else None
    frames      `[K * W, H]`: row k * W + c is that of code c at place k of a frame; where there is
                `first_book`, `[(K - 1) * W, H]` without the first codebook
    codes       these embeddings as the inner decoder reads them; the same tensor where they are
                tied. With weights of each run `[(K - 2) * W, I]`, without the last codebook
    own_first   `[U, I]`, the first codebook as the inner decoder reads it; None: `first_book`
    fed_codes   `[P * W, H]`, the embeddings of codes that stream in, or None
    projection  `[I, H]`; the identity where the inner decoder has none; `[K - 1, I, H]` with
                weights of each run
    projection_bias  `[I]`, or None
    layers      of the first run
    stacks      the layers of all runs, where each has its own; else empty
    norm        `[I]`, after the last layer; ones where there is none
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
    own_first: Tensor | None = None
    fed_codes: Tensor | None = None
    stacks: tuple[StackedLayer, ...] = ()

    def projection_of(self, run: int) -> Tensor:
        """`[I, H]`"""
        return self.projection[run] if self.stacks else self.projection

    def layers_of(self, run: int) -> tuple[LayerWeights, ...]:
        """The layers of a run."""
        if not self.stacks:
            return self.layers
        return tuple(stack.of_run(run) for stack in self.stacks)

    def stored(self) -> dict[str, Weight]:
        """Every tensor, by its name in a checkpoint."""
        names = self.config.names
        found = self._embeddings()
        if names.projection:
            found[f"{names.projection}.weight"] = self.projection
        if self.projection_bias is not None:
            found[f"{names.projection}.bias"] = self.projection_bias
        if names.norm:
            found[f"{names.norm}.weight"] = self.norm
        if "{}" in names.heads:
            found |= {f"{names.heads.format(k)}.weight": head for k, head in enumerate(self.heads)}
        elif self.stacks:
            found[f"{names.heads}.weight"] = self.heads
        else:
            # The checkpoint has columns where each head has rows.
            found[f"{names.heads}.weight"] = self.heads.transpose(1, 2)
        tensors = {name: Weight(tensor) for name, tensor in found.items()}
        return {
            **tensors,
            **{
                name: each
                for layer in self.stacks or self.layers
                for name, each in layer.stored().items()
            },
        }

    def _embeddings(self) -> dict[str, Tensor]:
        """The embeddings of codes, by name; the model's own are not among them."""
        config, names = self.config, self.config.names
        if "{}" in names.frames:
            rows = config.book_rows
            books = [*torch.split(self.frames, rows)]
            books += [] if self.fed_codes is None else torch.split(self.fed_codes, rows)
            found = {f"{names.frames.format(k)}.weight": book for k, book in enumerate(books)}
            if self.own_first is not None:
                found[f"{names.first}.weight"] = self.own_first
            if self.codes is not self.frames:
                own = torch.split(self.codes, rows)
                found |= {f"{names.codes.format(k)}.weight": book for k, book in enumerate(own)}
            return found
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
        if self.stacks:
            own = sum(tensor.nbytes for each in self.stacks for tensor in each.linears())
            norms = sum(norm.nbytes for each in self.stacks for norm in each.norms())
            own += self.projection.nbytes + self.heads.nbytes
            return own + self.config.runs * norms
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
        of_layers = [tensor for layer in self.stacks or self.layers for tensor in layer.tensors()]
        own = [self.frames, self.codes, self.projection, self.norm, self.heads]
        own += tensors_of(self.projection_bias, self.own_first, self.fed_codes)
        return [*own, *of_layers]


def allocate_inner(
    config: InnerDecoder, embedding: Tensor, *, device: str, dtype: torch.dtype
) -> InnerWeights:
    """Uninitialised weights; `device="meta"` allocates nothing.

    embedding  the model's, which may be the first codebook's
    """

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden, first = config.hidden_size, embedding if config.first_codes else None
    rows = (config.steps - (first is not None)) * config.book_rows
    frames = new(rows, config.width)
    norm, heads = new(hidden), new(config.steps - 1, config.codes, hidden)
    if not config.names.norm:
        norm.fill_(1)
    if config.per_run:
        assert first is not None and config.names.first, f"{config=}"
        stacks = tuple(
            allocate_stack(
                f"{config.names.layers}{index}.", layer, hidden, config.runs,
                device=device, dtype=dtype,
            )
            for index, layer in enumerate(config.layers)
        )  # fmt: skip
        fed = config.fed_books * config.book_rows
        return InnerWeights(
            config=config,
            frames=frames,
            codes=new(rows - config.book_rows, hidden),
            projection=new(config.runs, hidden, config.width),
            layers=tuple(stack.of_run(0) for stack in stacks),
            stacks=stacks,
            norm=norm,
            heads=heads,
            first_book=first,
            own_first=new(len(first), hidden),
            fed_codes=new(fed, config.width) if fed else None,
        )
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
        norm=norm,
        heads=heads,
        first_book=first,
        projection_bias=new(hidden) if config.projection_bias else None,
    )
