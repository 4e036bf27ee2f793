"""The tensors of a GGUF file under the names and in the layouts of a Hugging Face checkpoint.

Formats of an integer times a group's scale, some of them less a minimum, keep their codes
(`blocks.py`). Other formats of fewer than 16 bits become float32, which loading casts to the
model's dtype, or rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from graphengine.models.checkpoints.gguf.blocks import (
    FORMS,
    GroupForm,
    codes_of,
    dequantised,
    factors_of,
    scales_of,
)
from graphengine.models.checkpoints.gguf.config import (
    ROPE_FACTORS,
    family_of,
    read_gguf_config,
)
from graphengine.models.checkpoints.gguf.file import GgufFile, GgufTensor, read_gguf
from graphengine.models.checkpoints.gguf.parts import (
    FLOATS,
    Part,
    Role,
    check_kind,
    info_of,
    kept_forms,
    parts_of,
)
from graphengine.models.checkpoints.gguf.splittings import unknown_tokenizer
from graphengine.models.checkpoints.tensor_files import TensorInfo
from graphengine.options.checks import some

log = logging.getLogger(__name__)

FACTORS = "weight_factor"
"""Name of the factors on a linear's scales, below the linear's name."""
_MIB = 2**20


class GgufModel(NamedTuple):
    """A GGUF file as a checkpoint: its `config.json`, and its tensors by name."""

    file: GgufFile
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    parts: dict[str, Part]

    @property
    def tokenizer_file(self) -> Path | None:
        """The file, or the `tokenizer.json` beside it if its own tokenizer is not known.

        None where there is no tokenizer that can be read; a warning says so for one that is not
        known.
        """
        path = self.file.path
        unknown = unknown_tokenizer(self.file)
        if unknown is None:
            return path if "tokenizer.ggml.tokens" in self.file.metadata else None
        beside = path.parent / "tokenizer.json"
        if beside.is_file():
            return beside
        log.warning(
            "%s has %s, which is not known: without a tokenizer prompts and results are token ids. "
            "With the model's own tokenizer.json beside the file, they may be texts",
            path,
            unknown,
        )
        return None


def read_gguf_model(path: Path) -> GgufModel:
    """Read a file's header. ValueError, with numbers, for a file that is damaged or not
    supported.
    """
    file = read_gguf(path)
    stored = {name: Part((name,)) for name in ROPE_FACTORS if name in file.tensors}
    for name in stored:
        check_kind(file, name, file.tensors[name])
    opened = GgufTensors(file, stored)
    factors = {name: opened.get_tensor(name).flatten().tolist() for name in stored}
    config = read_gguf_config(file, factors)
    parts = parts_of(file, family_of(file), config)
    config["dtype"] = _dtype(file)
    for name, form in kept_forms(file, parts).items():
        whole = parts[f"{name}.weight"]._replace(form=form)
        parts[f"{name}.weight"] = whole._replace(role="codes")
        parts[f"{name}.weight_scale"] = whole._replace(role="scales")
        if form.block:
            parts[f"{name}.{FACTORS}"] = whole._replace(role="factors")
    tensors = {name: info_of(file, part) for name, part in parts.items()}
    return GgufModel(file, config, tensors, parts)


def log_widened(model: GgufModel) -> None:
    """Log the formats that take more memory than in the file, and how much. They are widened, or
    share a form with other formats.
    """
    widened: dict[tuple[str, str], list[str]] = {}
    for name, part in model.parts.items():
        kinds = {model.file.tensors[stored].kind for stored in part.stored}
        for kind in kinds:
            if part.form is not None and part.form != FORMS[kind]:
                what = "are kept in one form with others that are computed with them"
                widened.setdefault((what, kind), []).append(name)
            elif part.form is None and kind not in FLOATS:
                widened.setdefault(("are widened to 16 bits or rounded again", kind), []).append(
                    name
                )
    for (what, kind), names in sorted(widened.items(), key=lambda each: each[0][::-1]):
        stored = {
            each
            for name in names
            for each in model.parts[name].stored
            if model.file.tensors[each].kind == kind
        }
        before = sum(model.file.tensors[name].nbytes for name in stored)
        after = sum(
            model.tensors[name].nbytes // (1 if model.parts[name].form else 2) for name in names
        )
        log.info(
            "%s: %d tensors in %s %s: %.1f MiB become %.1f (%s)",
            model.file.path,
            len(stored),
            kind,
            what,
            before / _MIB,
            after / _MIB,
            some(sorted(names), 2),
        )


def _dtype(file: GgufFile) -> str:
    """The dtype of most weights; bfloat16 if most have fewer than 16 bits."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.nbytes
    most = max(sizes, key=lambda kind: sizes[kind])
    return str(FLOATS.get(most, torch.bfloat16)).removeprefix("torch.")


class GgufTensors:
    """An open file, with its other parts, like `safe_open` for safetensors."""

    def __init__(self, file: GgufFile, parts: Mapping[str, Part]) -> None:
        self._file, self._parts = file, parts
        self._data: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Mapped memory is freed with the last tensor that uses it."""

    def get_tensor(self, name: str) -> Tensor:
        """A tensor by its name in the checkpoint, on the CPU; it may share the file's memory."""
        part = self._parts[name]
        tensors = [self._read(self._file.tensors[stored], part) for stored in part.stored]
        if part.make is not None:
            return part.make(tensors)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _read(self, tensor: GgufTensor, part: Part) -> Tensor:
        """A part's rows of a tensor in the file."""
        if tensor.file not in self._data:
            self._data[tensor.file] = np.memmap(tensor.file, dtype=np.uint8, mode="c")
        rows = self._data[tensor.file][tensor.start : tensor.start + tensor.nbytes]
        if part.heads:
            # The rows of a head alternate between its first and its second half.
            size = tensor.nbytes // tensor.shape[0]
            rows = rows.reshape(part.heads, -1, 2, size).swapaxes(1, 2)
        vectors = len(tensor.shape) == 1
        rows = rows.reshape(*tensor.shape[: 0 if vectors else -1], -1)
        if part.expert is not None:
            rows = rows[part.expert]
        if part.form is not None:
            if part.rows:
                rows = np.concatenate([rows[start : start + count] for start, count in part.rows])
            return _kept_tensor(self._file.path, rows, tensor, part.role, part.form)
        values = _values(self._file.path, rows, tensor)
        if not part.rows:
            return values
        return torch.cat([values[start : start + count] for start, count in part.rows])


def open_gguf(path: Path) -> GgufTensors:
    """Open a file to read its tensors. ValueError as in `read_gguf_model`."""
    model = read_gguf_model(path)
    return GgufTensors(model.file, model.parts)


def _values(path: Path, rows: Any, tensor: GgufTensor) -> Tensor:
    if tensor.kind in FLOATS:
        flat = torch.from_numpy(np.ascontiguousarray(rows)).view(FLOATS[tensor.kind])
        return flat.reshape(*rows.shape[:-1], tensor.shape[-1])
    return dequantised(path, rows, tensor.kind)


def _kept_tensor(path: Path, rows: Any, tensor: GgufTensor, role: Role, form: GroupForm) -> Tensor:
    """Codes, scales or factors of rows of blocks."""
    blocks = rows.reshape(rows.shape[0], tensor.shape[-1] // tensor.block, -1)
    if role == "factors":
        return factors_of(blocks, tensor.kind, form)
    of = codes_of if role == "codes" else scales_of
    return of(path, blocks, tensor.kind, form)
