"""A LoRA adapter's folder: its config, and its matrices, checked against the base model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphengine.models.adapters.adapter_config import AdapterConfig
from graphengine.models.checkpoints.checkpoint import whole_names
from graphengine.models.checkpoints.tensor_files import WEIGHT_DTYPES, TensorInfo, read_header
from graphengine.options.checks import shown, some
from graphengine.paths import expand_user

WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class AdapterPart(NamedTuple):
    """The matrices for one linear of the base model: y += scale * up (down x).

    down    [r, columns], dense, on the host
    up      [rows, r]; if the base model stores several linears in one tensor, the rows of all of
            them: for each head the rows of each linear
    place   the linear's place among them
    places  how many they are
    """

    down: Tensor
    up: Tensor
    scale: float
    place: int = 0
    places: int = 1

    def own_up(self, head_rows: int) -> Tensor:
        """The linear's own rows of `up`, of which a head has `head_rows`."""
        if self.places == 1:
            return self.up
        heads = self.up.view(-1, self.places, head_rows, self.up.shape[1])
        return heads[:, self.place].flatten(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter's folder. Holds no open file; matrices are read by `parts`.

    stored   the stem of the names of each changed linear's two matrices, by the linear's name in
             the whole language model
    tensors  all matrices, by their names in the file
    """

    folder: Path
    config: AdapterConfig
    stored: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Adapter:
        """Read the config and the header of the weights.

        FileNotFoundError where there is no such folder or no config in it; ValueError for anything
        that is damaged or not understood.
        """
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"adapter {shown(path)} must be the path of a folder")
        folder = expand_user(os.fspath(path))
        if not folder.is_dir():
            raise FileNotFoundError(f"no adapter {os.fspath(path)!r}: there is no such folder")
        config, weights = AdapterConfig.read(folder), folder / WEIGHTS_FILE
        if not weights.is_file():
            others = sorted(each.name for each in folder.iterdir() if each.suffix != ".json")
            raise ValueError(
                f"{folder} has no {WEIGHTS_FILE} ({some(others) if others else 'nothing else'}): "
                f"only safetensors are read, so save it again with safe_serialization=True"
            )
        tensors = read_header(weights)
        return cls(folder=folder, config=config, stored=_stems(weights, tensors), tensors=tensors)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linears it changes, as the whole language model has them."""
        return tuple(self.stored)

    @property
    def rank(self) -> int:
        """The highest rank of its matrices."""
        return max(self.rank_of(linear) for linear in self.stored)

    def rank_of(self, linear: str) -> int:
        """The rank of a linear's matrices."""
        return self._of(linear)[0].shape[0]

    def places_of(self, linear: str) -> int:
        """The linears that share its matrices, because one tensor of the base model has all of
        them.
        """
        return len(self._sharing(linear))

    def _named(self, linear: str) -> str:
        """A linear's full name in the model it was trained on: patterns of ranks and scales fit it.

        It may differ from the name in the whole language model, as behind a vision tower.
        """
        return self.stored[linear].removeprefix(_PREFIX)

    def _sharing(self, linear: str) -> list[str]:
        return [name for name, stem in self.stored.items() if stem == self.stored[linear]]

    def _of(self, linear: str) -> tuple[TensorInfo, TensorInfo]:
        stem = self.stored[linear]
        return self.tensors[stem + _DOWN], self.tensors[stem + _UP]

    def check(self, shapes: Mapping[str, tuple[int, int]], other: Collection[str]) -> None:
        """ValueError, with names and numbers, unless it fits linears of the base model.

        shapes  (rows, columns) of the linears that it may change, by name
        other   names of all other modules of the model that have weights
        """
        refused = [name for name in self.stored if name not in shapes and name in other]
        if refused:
            raise ValueError(
                f"{self.folder} changes {len(refused)} of {len(self.stored)} linears that adapters "
                f"cannot change here: {some(refused)}"
            )
        unknown = [name for name in self.stored if name not in shapes]
        if unknown:
            raise ValueError(
                f"{self.folder} changes {len(unknown)} of {len(self.stored)} linears that the base "
                f"model does not have: {some(unknown)}"
            )
        for name in self.stored:
            self._check_part(name, shapes[name])

    def check_rank(self, most: int) -> None:
        """ValueError, with both ranks, for a rank above `most`."""
        for name in self.stored:
            if (rank := self.rank_of(name)) > most:
                raise ValueError(
                    f"{self.folder}: {name} has rank {rank}, and max_adapter_rank={most}"
                )

    def _check_part(self, name: str, shape: tuple[int, int]) -> None:
        down, up = (each.shape for each in self._of(name))
        rank, (rows, columns) = self.config.rank_of(self._named(name)), shape
        if down != (rank, columns) or up != (rows, rank):
            raise ValueError(
                f"{self.folder}: {name} has matrices {[*down]} and {[*up]}, not {[rank, columns]} "
                f"and {[rows, rank]}: it is an adapter of another base model, or of another rank "
                f"than r={rank}"
            )

    def parts(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, AdapterPart]]:
        """Each changed linear's matrices, on the host, in the file's dtype.

        dtype  that they will be cast to; None: they are not cast to a narrower one

        ValueError for values that are not finite, also after the cast, and for a file that cannot
        be read.
        """
        file = self.folder / WEIGHTS_FILE
        try:
            with safe_open(file, framework="pt", device="cpu") as weights:
                for name, stem in self.stored.items():
                    down, up = weights.get_tensor(stem + _DOWN), weights.get_tensor(stem + _UP)
                    for matrix, ending in ((down, _DOWN), (up, _UP)):
                        check_finite_as(matrix, dtype or matrix.dtype, f"{file}: {stem}{ending}")
                    sharing, scale = self._sharing(name), self.config.scale_of(self._named(name))
                    place = sharing.index(name)
                    yield name, AdapterPart(down, up, scale, place, len(sharing))
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error


def check_finite_as(value: Tensor, dtype: torch.dtype, name: str) -> None:
    """ValueError, with the count, for numbers that are not finite once they are cast to `dtype`."""
    wrong = int((~value.to(dtype).isfinite()).sum())
    if wrong:
        raise ValueError(
            f"{name} has {wrong} of {value.numel()} numbers that are not finite as {dtype}"
        )


def _stems(file: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The stem of each linear's two tensors, by the linear's name in the whole language model."""
    stems = [name.removesuffix(_DOWN) for name in tensors if name.endswith(_DOWN)]
    known = {stem + ending for stem in stems for ending in (_DOWN, _UP)}
    unknown = [name for name in tensors if name not in known]
    if unknown:
        has_base = any(name.endswith(".base_layer.weight") for name in unknown)
        hint = ": save it again with save_embedding_layers=False, without weights of the base"
        raise ValueError(
            f"{file} has {len(unknown)} of {len(tensors)} tensors that are no matrices of linears: "
            f"{some(unknown)}{hint if has_base else ''}"
        )
    missing = sorted(known - tensors.keys())
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} of {len(known)} matrices: {some(missing)}")
    wrong = [name for name in tensors if tensors[name].dtype not in WEIGHT_DTYPES]
    if wrong:
        raise ValueError(
            f"{file} has {len(wrong)} matrices in {tensors[wrong[0]].dtype}, not in 16 or 32 bits: "
            f"{some(wrong)}"
        )
    # Names of tensors that have several linears end with the next part's dot.
    names: dict[str, str] = {}
    for stem in stems:
        name = f"{stem.removeprefix(_PREFIX)}."
        if (twin := names.get(name)) is not None:
            raise ValueError(
                f"{file} has the matrices of one linear twice: {twin}{_DOWN} and {stem}{_DOWN}"
            )
        names[name] = stem
    whole = whole_names(file, names).items()
    return {name.removesuffix("."): names[given] for name, given in whole}
