"""Parallel heads: all codes of a frame are drawn from the model's output, each by its own head.

Code k comes k steps later than the first code of its frame of sound (`kernels/frames/delays.py`).
transformers' processor delays the codes of sound in prompts in the same way, and undoes the delays
of generated codes.

Letters: K codes of a frame, V codes of a codebook, J = K - 1, H the model's hidden size, n frames.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphengine.models.linears import Linear, Linears
from graphengine.models.weights import Weight

Codes = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelHeads:
    """Sizes and names of the heads, known before anything is allocated.

    steps       K
    codes       V, including the codes that fill delays
    width       H
    begin_code  fills the places of codes that come after their frame's first, at the beginning
    end_code    fills such places at the end; a frame of end codes ends a request
    begin_id    the id of a prompt after which sound begins
    place_ids   ids that stand for frames of sound in transformers' prompts
    frames      name of the embeddings of codes in a checkpoint, without ".weight"
    heads       name of the heads of all codes, in one linear
    """

    steps: int
    codes: int
    width: int
    begin_code: int
    end_code: int
    begin_id: int
    place_ids: tuple[int, ...]
    frames: str
    heads: str

    @property
    def end_token(self) -> int:
        """The id that stands for the frame that ends a request, among the model's ids."""
        return self.codes

    @property
    def first_codes(self) -> int:
        """0: the first codebook has as many codes as the others, and its own embeddings."""
        return 0

    @property
    def fed(self) -> bool:
        """False: nothing streams into frames."""
        return False

    @property
    def fed_books(self) -> int:
        """0: as nothing streams in, no codes do."""
        return 0

    @property
    def begins(self) -> int:
        """0: codes have delays of their own."""
        return 0

    @property
    def head_rows(self) -> int:
        """Codes that the first head knows."""
        return self.codes

    @property
    def codebooks(self) -> tuple[int, ...]:
        """Codes of each of the K codebooks."""
        return (self.codes,) * self.steps

    @property
    def linears(self) -> Linears:
        """The heads of the codes after the first, which are one linear."""
        if self.steps == 1:
            return {}
        return {"heads": Linear("sample", (self.steps - 1) * self.codes, self.width)}

    def named_as(self, tensors: Collection[str]) -> Self:
        """These heads: all checkpoints have the same names."""
        return self

    def table_bytes(self, slots: int) -> int:
        """Bytes of the parameters of rows that no request changes: a stop id and a length."""
        return _NEUTRAL_BYTES * slots * (self.steps - 1)

    def begun(self, prompt: Sequence[int]) -> int:
        """Frames that a prompt has since its begin id, counted from 1.

        0 where it has none among its last K ids: transformers then begins with one frame of begin
        codes and delays nothing.
        """
        for count in range(1, min(self.steps, len(prompt)) + 1):
            if prompt[-count] == self.begin_id:
                return count
        return 0

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """ValueError for an id that stands for a frame, which a prompt has as an embedding."""
        for index, token in enumerate(prompt):
            if token in self.place_ids:
                raise ValueError(
                    f"token {index} of the prompt is {token}, which stands for a frame of sound: "
                    f"give frames as embeddings (`Engine.embed_frames`)"
                )

    def delayed(self, sound: Codes) -> Codes:
        """Frames `[n + K + 1, K]` as prompts have them, of n frames of sound: delayed, between
        begin and end codes.
        """
        frames = np.full((len(sound) + self.steps + 1, self.steps), self.begin_code, np.int32)
        for place in range(self.steps):
            first = 1 + place
            frames[first : first + len(sound), place] = sound[:, place]
            frames[first + len(sound) :, place] = self.end_code
        return frames

    def undelayed(self, frames: Codes) -> Codes:
        """Whole frames of sound `[n, K]`, of frames as they are drawn, from the last one of begin
        codes alone to the first one of end codes alone.

        Codes past those that have a sound become `begin_code` - 1, as in transformers.
        """
        begins = np.flatnonzero((frames == self.begin_code).all(axis=1))
        if len(begins):
            frames = frames[begins[-1] + 1 :]
        ends = np.flatnonzero((frames == self.end_code).all(axis=1))
        if len(ends):
            frames = frames[: ends[0]]
        count = max(len(frames) - self.steps + 1, 0)
        whole = [frames[place : place + count, place] for place in range(self.steps)]
        return np.stack(whole, axis=1).clip(0, self.begin_code - 1).astype(np.int32)


# Of `SamplingTensors.neutral`: all parameters of a row.
_NEUTRAL_BYTES = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsWeights:
    """The weights of the heads, in the model's dtype.

    frames  `[K * V, H]`: row k * V + c embeds code c at place k of a frame
    heads   `[K * V, H]`: row k * V + c gives the logit of code c at place k. The first V rows are
            the model's lm_head
    """

    config: ParallelHeads
    frames: Tensor
    heads: Tensor

    @property
    def first_book(self) -> None:
        """None: `frames` has the embeddings of all codebooks."""
        return None

    @property
    def first(self) -> Tensor:
        """`[V, H]`, the head of the first code."""
        return self.heads[: self.config.codes]

    @property
    def later(self) -> Tensor:
        """`[J * V, H]`, the heads of the others."""
        return self.heads[self.config.codes :]

    def stored(self) -> dict[str, Weight]:
        """Every tensor, by its name in a checkpoint."""
        config = self.config
        return {
            f"{config.frames}.weight": Weight(self.frames),
            f"{config.heads}.weight": Weight(self.heads),
        }

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return [self.frames, self.heads]


def allocate_heads(config: ParallelHeads, *, device: str, dtype: torch.dtype) -> HeadsWeights:
    """Uninitialised weights; `device="meta"` allocates nothing."""
    shape = (config.steps * config.codes, config.width)
    frames, heads = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
    return HeadsWeights(config=config, frames=frames, heads=heads)
