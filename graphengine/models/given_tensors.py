"""Tensors that somebody hands over, in the place of a checkpoint's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

from torch import Tensor

from graphengine.models.checkpoint import Checkpoint
from graphengine.models.quantised.filling import Changed


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTensors(Checkpoint):
    """What is loaded from it are `values`, by the names of the whole language model.

    `tensors` say how they are read: as those of a checkpoint with the same names and shapes, of
    which a rank may read parts.
    """

    values: Mapping[str, Tensor]

    @classmethod
    def in_place_of(
        cls, checkpoint: Checkpoint, values: Mapping[str, Tensor], source: Path
    ) -> Self:
        """The values, each in the place of the checkpoint's tensor of its name and shape.

        source  where they are from, for errors
        """
        tensors = {
            name: replace(checkpoint.tensors[name], dtype=value.dtype)
            for name, value in values.items()
        }
        return cls(
            path=source,
            config=checkpoint.config,
            generation_config=checkpoint.generation_config,
            tensors=MappingProxyType(tensors),
            quant_config=checkpoint.quant_config,
            values=values,
        )

    def mapped(self) -> Mapping[str, Tensor]:
        """What is read of each value, when it is looked up."""
        return Changed(self.values, self._part)

    def _read(self, file: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self._part(name, self.values[name])

    def _check_unchanged(self, file: Path, names: Sequence[str]) -> None:
        """No file is read."""

    def _part(self, name: str, value: Tensor) -> Tensor:
        cut = self.tensors[name].cut
        return value if cut is None else cut.part(value)
