"""Tensors that a caller hands over in place of a checkpoint's files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Self

from safetensors import SafetensorError
from torch import Tensor

from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.tensor_files import save_whole
from graphengine.models.quantised.filling import ChangedTensors

HANDED_OVER = Path("update_weights()")
"""The source of tensors that are in no folder, for errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTensors(Checkpoint):
    """A checkpoint that loads `values`, by the names of the whole language model.

    `tensors` describe them like those of a checkpoint with the same names and shapes; a rank may
    read parts. `config` comes from that checkpoint, too.

    folder  a checkpoint that has the same values; None: they are only in memory
    """

    values: Mapping[str, Tensor]
    folder: Path | None

    @classmethod
    def in_place_of(
        cls, checkpoint: Checkpoint, values: Mapping[str, Tensor], folder: Path | None = None
    ) -> Self:
        """The values, each in place of the checkpoint's tensor with its name and shape."""
        tensors = {
            name: replace(checkpoint.tensors[name], dtype=value.dtype)
            for name, value in values.items()
        }
        return cls(
            path=folder or HANDED_OVER,
            config=checkpoint.config,
            generation_config=checkpoint.generation_config,
            tensors=MappingProxyType(tensors),
            quant_config=checkpoint.quant_config,
            values=values,
            folder=folder,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all values; a rank may read parts of them."""
        return sum(info.stored.nbytes for info in self.tensors.values())

    def mapped(self) -> Mapping[str, Tensor]:
        """All values by name; each is cut to the part that is read when it is looked up."""
        return ChangedTensors(self.values, self._part)

    def _read(self, file: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self._part(name, self.values[name])

    def _check_unchanged(self, names: Iterable[str]) -> None:
        """No file is read."""

    def _part(self, name: str, value: Tensor) -> Tensor:
        cut = self.tensors[name].cut
        return value if cut is None else cut.part(value)


@contextmanager
def as_checkpoint(given: GivenTensors) -> Iterator[Path]:
    """A checkpoint from which other processes can read the same values inside the `with` block.

    Values in memory are copied to the host and written to a temporary folder. OSError if it is
    full.
    """
    if given.folder is not None:
        yield given.folder.absolute()
        return
    with TemporaryDirectory(prefix="graphengine-weights-") as name:
        folder = Path(name)
        # Safetensors refuses tensors that share memory.
        values = {key: value.to("cpu", copy=True) for key, value in given.values.items()}
        dense = {key: value.contiguous() for key, value in values.items()}
        try:
            save_whole(dense, folder / "model.safetensors")
        except SafetensorError as error:
            raise OSError(
                f"{sum(value.nbytes for value in dense.values())} bytes of new weights, which the "
                f"other ranks read, do not go to {folder} (TMPDIR names another place): {error}"
            ) from error
        (folder / "config.json").write_text(json.dumps(given.config), encoding="utf-8")
        yield folder
