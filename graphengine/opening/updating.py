"""Updates the weights of an open engine, with the code that loaded them.

Everything is checked before a value is written: names, dtypes and shapes against the checkpoint
that the engine was opened from, that weights to be rounded are complete, and that no value is NaN
or infinite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.models.checkpoints.checkpoint import Checkpoint, whole_names
from graphengine.models.checkpoints.destinations import load_weights, read_model, with_state_dtype
from graphengine.models.checkpoints.given_tensors import HANDED_OVER, GivenTensors
from graphengine.models.checkpoints.tensor_files import WEIGHT_DTYPES, ReorderedTensor, TensorInfo
from graphengine.models.contract import ModelConfig
from graphengine.models.quantised.config import quantisation_of
from graphengine.models.quantised.filling import rounded_names
from graphengine.models.quantised.schemes import HEAD
from graphengine.models.weights import Destinations, StoredLinear
from graphengine.opening.releasable import ReleasableMemory
from graphengine.options.checks import some

_HEAD = f"{HEAD}.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedWeights:
    """Where each tensor went when a checkpoint was loaded.

    checkpoint   the checkpoint as this rank read it
    whole        the model of all ranks
    wanted       destinations of the checkpoint's tensors, in the model and the drafter
    packed       linears whose weights are rounded or packed
    all_wanted   `wanted` of all ranks together; another rank's are on the device "meta"
    all_packed   `packed` of all ranks together; its linears may be on the device "meta"
    drafted      names of the tensors that only the drafter wants; packed ones are left out
    adaptable    the weights that adapters can change, with the cuts of this rank
    memory       the memory of all weights, if the engine can release it
    """

    checkpoint: Checkpoint
    whole: ModelConfig
    wanted: Destinations
    packed: Sequence[StoredLinear]
    all_wanted: Destinations
    all_packed: Sequence[StoredLinear]
    drafted: Collection[str] = ()
    adaptable: Sequence[StoredLinear] = ()
    memory: ReleasableMemory | None = None

    def read(self, path: str | PathLike[str], config: EngineConfig) -> GivenTensors:
        """All tensors of another checkpoint of the same model, checked.

        Raises FileNotFoundError and ValueError like `Checkpoint.open`, and ValueError, with both
        values, for another model.
        """
        checkpoint = Checkpoint.open(path)
        for each in (self.checkpoint, checkpoint):
            check_plain(each)
        found = read_model(checkpoint, config.quantize, head=config.quantize_lm_head)
        _check_same(self.whole, with_state_dtype(found, config.state_dtype), checkpoint.path)
        values = checkpoint.uncut().mapped()
        given = self.checked(values, checkpoint.path)
        missing = sorted(self._in_use(given.values) - given.values.keys())
        if missing:
            raise ValueError(
                f"{checkpoint.path} lacks {len(missing)} tensors that are in use: {some(missing)}"
            )
        return given

    def in_folder(self, path: Path) -> GivenTensors:
        """The tensors of a checkpoint whose values were checked before; it may have only some of
        them.
        """
        return self.checked(Checkpoint.open(path).uncut().mapped(), path, finite=True)

    def checked(
        self,
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        folder: Path | None = None,
        *,
        finite: bool = False,
    ) -> GivenTensors:
        """The tensors, once it is checked that all of them can be loaded.

        folder  the checkpoint that they are from; None: they are in memory
        finite  whether all values are known to be finite

        ValueError, with the name and both values, for a tensor that cannot be loaded. Nothing is
        changed.
        """
        check_plain(self.checkpoint)
        values = self._known(named_tensors(tensors))
        for name, value in values.items():
            known = name if name in self.checkpoint.tensors else self._other_of_tied(name)
            check_value(name, value, self.checkpoint.tensors[known].stored)
        values = self._untied(values)
        for linear in self._made_of(values, self.all_packed):
            self._check_parts(linear, values)
        if not finite:
            names = self._in_use(values)
            used = {name: value for name, value in values.items() if name in names}
            check_finite(used, self.all_wanted)
        return GivenTensors.in_place_of(self.checkpoint, values, folder)

    def load(self, given: GivenTensors) -> None:
        """Fill the weights with these tensors in place, on the current stream.

        Tensors that nothing uses are left out.
        """
        wanted = {name: self.wanted[name] for name in given.values if name in self.wanted}
        linears = self._made_of(given.values, self.packed)
        load_weights(given, wanted, linears, self.whole.embedding_name)

    def filled(self) -> list[Tensor]:
        """The tensors that a complete update fills, each of them whole."""
        tensors: list[Tensor] = []
        for found in self.wanted.values():
            several = [found] if isinstance(found, Tensor | ReorderedTensor) else found
            tensors += [
                each.tensor if isinstance(each, ReorderedTensor) else each for each in several
            ]
        for linear in self.packed:
            assert isinstance(linear.weight, PackedWeight), f"{linear.parts=}"
            tensors += [each for each in linear.weight if isinstance(each, Tensor)]
        return tensors

    def in_use(self) -> set[str]:
        """Names of all tensors that an update must bring to replace every weight."""
        return self._in_use(self.checkpoint.tensors)

    def used(self, given: GivenTensors) -> tuple[dict[str, Tensor], bool]:
        """The tensors that some rank uses, and whether they are all the tensors in use."""
        names = self._in_use(given.values)
        values = {name: value for name, value in given.values.items() if name in names}
        return values, len(values) == len(names)

    # Names.

    @property
    def _embedding(self) -> str:
        return f"{self.whole.embedding_name}.weight"

    def _sources(self, linear: StoredLinear, values: Collection[str]) -> list[str]:
        """Names of the tensors that a rounded weight is made from; for a tied lm_head, whichever of
        its two names is among the values.
        """
        stored = values if self.whole.tie_embeddings else self.checkpoint.tensors
        return rounded_names(linear, stored, self.whole.embedding_name)

    def _in_use(self, values: Collection[str]) -> set[str]:
        """Names of all tensors that some rank uses; of two tied weights, the one that is loaded."""
        packed = {name for each in self.all_packed for name in self._sources(each, values)}
        return packed | {*self.all_wanted}

    def _made_of(
        self, values: Mapping[str, Tensor], linears: Sequence[StoredLinear]
    ) -> list[StoredLinear]:
        """The packed linears that are made from any of the values."""
        return [
            linear
            for linear in linears
            if any(name in values for name in self._sources(linear, values))
        ]

    # Checks.

    def _known(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values by their names in the whole model. ValueError for names that its checkpoint
        does not have.
        """
        values = {name: given[old] for name, old in whole_names(HANDED_OVER, given).items()}
        tied = {self._embedding, _HEAD} if self.whole.tie_embeddings else set()
        known = self.checkpoint.tensors.keys() | tied
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(
                f"{len(unknown)} of {len(values)} tensors are not in {self.checkpoint.path}, which "
                f"the engine was opened from: {some(unknown)}"
            )
        return values

    def _other_of_tied(self, name: str) -> str:
        return self._embedding if name == _HEAD else _HEAD

    def _untied(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values, with each tied weight only once, under the name that is loaded. ValueError if
        its two values differ.
        """
        if not self.whole.tie_embeddings:
            return values
        loaded = self._embedding if self._embedding in self.checkpoint.tensors else _HEAD
        other = self._other_of_tied(loaded)
        if other not in values:
            return values
        value = values.pop(other)
        first = values.setdefault(loaded, value)
        if first is not value and not torch.equal(first.float(), value.float().to(first.device)):
            raise ValueError(
                f"{other} differs from {loaded}, and the engine was opened with the two tied"
            )
        return values

    def _check_parts(self, linear: StoredLinear, values: Mapping[str, Tensor]) -> None:
        """ValueError unless all parts of a weight rounded as a whole are given."""
        names = self._sources(linear, values)
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(
                f"{some(names)} are rounded together, and {len(missing)} of {len(names)} are "
                f"missing: {some(missing)}"
            )


def named_tensors(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> dict[str, Tensor]:
    """The tensors by name. ValueError for anything else, and for a name that comes twice."""
    if not isinstance(tensors, Iterable):
        raise ValueError(
            f"update_weights() takes tensors by their names, or the path of a checkpoint, not "
            f"{tensors!r:.99}"
        )
    pairs: Iterable[Any] = tensors.items() if isinstance(tensors, Mapping) else tensors
    named: dict[str, Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"update_weights() takes pairs of a name and a tensor, not {pair!r:.99}"
            )
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(
                f"update_weights() takes pairs of a name and a tensor, not {name!r:.99} and a "
                f"{type(tensor).__name__}"
            )
        if name in named:
            raise ValueError(f"{name} is there twice")
        named[name] = tensor.detach()
    return named


def check_value(name: str, value: Tensor, stored: TensorInfo) -> None:
    """ValueError unless the tensor can take the place of the one that a checkpoint has stored."""
    # Tables that are not weights are dropped later.
    if value.dtype not in (*WEIGHT_DTYPES, stored.dtype):
        dtypes = ", ".join(str(dtype) for dtype in WEIGHT_DTYPES)
        raise ValueError(f"{name} has dtype {value.dtype}: weights are in one of {dtypes}")
    if value.layout != torch.strided or value.is_meta or hasattr(value, "full_tensor"):
        raise ValueError(
            f"{name} is a {type(value).__name__} with layout {value.layout} on {value.device}: "
            f"weights are whole, dense tensors (of a DTensor its full_tensor())"
        )
    if tuple(value.shape) != stored.shape:
        raise ValueError(f"{name} has shape {[*value.shape]}, not {[*stored.shape]}")


def check_finite(values: Mapping[str, Tensor], wanted: Destinations) -> None:
    """ValueError, with names and counts, for tensors with a NaN or an infinite number, also once
    they are cast to the dtype of their destination.

    One reduction per tensor, on its device, and one copy to the host per device.
    """
    extremes: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in values.items():
        if value.is_floating_point() and value.numel():
            low, high = torch.aminmax(value)
            # Both are NaN if the tensor has a NaN.
            cast = torch.stack((low, high)).to(_dtype_of(name, value, wanted)).float()
            extremes.setdefault(value.device, {})[name] = cast
    wrong: list[str] = []
    for found in extremes.values():
        finite = torch.stack([*found.values()]).isfinite().all(dim=1).tolist()
        wrong += [name for name, each in zip(found, finite, strict=True) if not each]
    if wrong:
        counts = []
        for name in wrong:
            value, dtype = values[name], _dtype_of(name, values[name], wanted)
            count = int((~value.to(dtype).isfinite()).sum())
            kind = f" as {dtype}" if value.isfinite().all() else ""
            counts.append(f"{name} ({count} of {value.numel()} numbers{kind})")
        raise ValueError(
            f"{len(wrong)} of {len(values)} tensors have a NaN or an infinite number, and nothing "
            f"was changed: {some(counts)}"
        )


def _dtype_of(name: str, value: Tensor, wanted: Destinations) -> torch.dtype:
    """The dtype that a value is cast to; its own where nothing is cast, as before rounding."""
    found = wanted.get(name, value)
    first = found if isinstance(found, Tensor | ReorderedTensor) else next(iter(found), value)
    return (first.tensor if isinstance(first, ReorderedTensor) else first).dtype


def check_plain(checkpoint: Checkpoint) -> None:
    """ValueError for a checkpoint with weights of 8 or 4 bits."""
    quantisation = quantisation_of(checkpoint)
    if quantisation is not None:
        raise ValueError(
            f"weights of {checkpoint.path} are quantised ({quantisation.method}): only those of 16 "
            f"and 32 bits can be updated, and quantize= rounds them again"
        )


def _check_same(whole: ModelConfig, found: ModelConfig, path: Path) -> None:
    """ValueError, with the first value that differs, for another model."""
    if repr(whole) == repr(found):
        return
    if whole.architecture != found.architecture:
        raise ValueError(
            f"{path} is a {found.architecture}, the engine's model a {whole.architecture}"
        )
    name, other, own = _first_difference("config", found, whole)
    raise ValueError(
        f"{path} is another model than the engine's: its {name} is {other!r:.199}, the engine's "
        f"{own!r:.199}"
    )


def _first_difference(name: str, found: Any, whole: Any) -> tuple[str, Any, Any]:
    """The name of the first difference between two values called `name`, and the values there."""
    names: list[str] = []
    if is_dataclass(whole) and type(whole) is type(found):
        names = [field.name for field in fields(whole)]
    elif isinstance(whole, tuple) and type(whole) is type(found) and len(whole) == len(found):
        pairs = zip(found, whole, strict=True)
        index = next(index for index, (a, b) in enumerate(pairs) if repr(a) != repr(b))
        return _first_difference(f"{name}[{index}]", found[index], whole[index])
    for each in names:
        other, own = getattr(found, each), getattr(whole, each)
        if repr(other) != repr(own):
            return _first_difference(f"{name}.{each}", other, own)
    return name, found, whole
