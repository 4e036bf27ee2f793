"""The tensors of a GGUF file under the names and in the layouts of a Hugging Face checkpoint.

Formats that are an integer times a scale for a group of columns, less a minimum of some, stay so:
`gguf_blocks.py` has them. Other formats of fewer than 16 bits become float32, which loading
casts to the model's dtype, or rounds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from graphengine.models.checkpoints.gguf_blocks import (
    FORMS,
    GroupForm,
    codes_of,
    dequantised,
    factors_of,
    joined_form,
    scales_of,
)
from graphengine.models.checkpoints.gguf_config import (
    LAYER,
    MODULES,
    ROPE_FACTORS,
    GgufFamily,
    family_of,
    read_gguf_config,
)
from graphengine.models.checkpoints.gguf_file import (
    GgufFile,
    GgufTensor,
    gguf_package,
    read_gguf,
)
from graphengine.models.checkpoints.tensor_files import TensorInfo
from graphengine.options.checks import shown, some

log = logging.getLogger(__name__)

FACTORS = "weight_factor"
"""Name of the factors on a linear's scales, below its own."""
Role = Literal["values", "codes", "scales", "factors"]
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYER_NAME = re.compile(r"blk\.(\d{1,9})\.([\w.]+)\.(weight|bias)")
# Linears that are computed as one, and so are packed in one form.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
# Modules with matrices that are not packed; the last one has a row of taps for each channel.
_CONV = "shortconv.conv"
_UNPACKED = ("token_embd", "ffn_gate_inp", _CONV)
_MIB = 2**20


class _Part(NamedTuple):
    """How a tensor of the checkpoint follows from one in the file.

    stored    its name in the file
    role      its values, or what they are made of
    form      form in which these are kept; None: values
    heads     heads whose rows alternate between two halves; 0: rows are as they are
    expert    its place in a stack of experts; None: it is not stacked
    plus_one  whether 1 is subtracted
    taps      whether rows are those of a convolution, [M, 1, K] in the checkpoint
    """

    stored: str
    role: Role = "values"
    form: GroupForm | None = None
    heads: int = 0
    expert: int | None = None
    plus_one: bool = False
    taps: bool = False


class GgufModel(NamedTuple):
    """A GGUF file as a checkpoint: its `config.json`, and its tensors by name."""

    file: GgufFile
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    parts: dict[str, _Part]

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self.file.metadata


def read_gguf_model(path: Path) -> GgufModel:
    """Read a file's header. ValueError, with numbers, for what is damaged or not supported."""
    file = read_gguf(path)
    stored = {name: _Part(name) for name in ROPE_FACTORS if name in file.tensors}
    for name in stored:
        _check_kind(file, name, file.tensors[name])
    opened = GgufTensors(file, stored)
    factors = {name: opened.get_tensor(name).flatten().tolist() for name in stored}
    config = read_gguf_config(file, factors)
    parts = _parts(file, family_of(file), config)
    config["dtype"] = _dtype(file)
    for name, form in _kept(file, parts).items():
        whole = parts[f"{name}.weight"]._replace(form=form)
        parts[f"{name}.weight"] = whole._replace(role="codes")
        parts[f"{name}.weight_scale"] = whole._replace(role="scales")
        if form.block:
            parts[f"{name}.{FACTORS}"] = whole._replace(role="factors")
    tensors = {name: _info(file, part) for name, part in parts.items()}
    return GgufModel(file, config, tensors, parts)


def log_widened(model: GgufModel) -> None:
    """Log the formats that take more memory than in the file, and how much: those that are widened,
    and those that share a form with other formats.
    """
    widened: dict[tuple[str, str], list[str]] = {}
    for name, part in model.parts.items():
        kind = model.file.tensors[part.stored].kind
        if part.form is not None and part.form != FORMS[kind]:
            what = "are kept in one form with others that are computed with them"
            widened.setdefault((what, kind), []).append(name)
        elif part.form is None and kind not in _FLOATS:
            widened.setdefault(("are widened to 16 bits or rounded again", kind), []).append(name)
    for (what, kind), names in sorted(widened.items(), key=lambda each: each[0][::-1]):
        stored = {model.parts[name].stored for name in names}
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


def _parts(file: GgufFile, family: GgufFamily, config: Mapping[str, Any]) -> dict[str, _Part]:
    heads = {"attn_q": config["num_attention_heads"]}
    heads["attn_k"] = config.get("num_key_value_heads", heads["attn_q"])
    parts: dict[str, _Part] = {}
    for stored, tensor in file.tensors.items():
        if stored in ROPE_FACTORS:
            continue
        _check_kind(file, stored, tensor)
        name, module = _name(stored, family)
        plus_one = family.plus_one and module.endswith("_norm")
        part = _Part(stored, plus_one=plus_one, taps=module == _CONV and len(tensor.shape) == 2)
        if family.paired and module in heads:
            part = part._replace(heads=_checked_heads(file, stored, tensor, heads[module]))
        if "{}" in name:
            if tensor.shape[0] != config.get("num_experts"):
                raise ValueError(
                    f"{file.path} has tensor {stored} of {tensor.shape[0]} experts: expert_count "
                    f"is {shown(config.get('num_experts'))}"
                )
            for expert in range(tensor.shape[0]):
                parts[name.format(expert)] = part._replace(expert=expert)
        else:
            parts[name] = part
    return parts


def _name(stored: str, family: GgufFamily) -> tuple[str, str]:
    """A tensor's name in the checkpoint, unchanged if it is unknown, and its module's here."""
    found = _LAYER_NAME.fullmatch(stored)
    if found is not None:
        layer, module, end = found.groups()
        name = {**LAYER, **family.layer}.get(module)
        return (f"model.layers.{int(layer)}.{name}.{end}" if name else stored), module
    module, _, end = stored.rpartition(".")
    return (f"{MODULES[module]}.{end}" if module in MODULES else stored), module


def _check_kind(file: GgufFile, name: str, tensor: GgufTensor) -> None:
    if tensor.kind not in _FLOATS and not _is_read(file.path, tensor.kind):
        raise ValueError(
            f"{file.path} has tensor {name} in {tensor.kind}, which the package gguf does not "
            f"dequantise"
        )


@cache
def _is_read(path: Path, kind: str) -> bool:
    """Whether the package `gguf` dequantises a format."""
    package = gguf_package(path)
    number = package.GGMLQuantizationType[kind]
    _, nbytes = package.GGML_QUANT_SIZES[number]
    try:
        package.dequantize(np.zeros((1, nbytes), dtype=np.uint8), number)
    except NotImplementedError:
        return False
    return True


def _checked_heads(file: GgufFile, name: str, tensor: GgufTensor, heads: Any) -> int:
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise ValueError(
            f"{file.path} has tensor {name} with {tensor.shape[0]} rows, which are no pairs of "
            f"{heads} heads"
        )
    return heads


def _kept(file: GgufFile, parts: Mapping[str, _Part]) -> dict[str, GroupForm]:
    """The linears whose codes are kept, and in which form.

    Embeddings and routers are not linears of this kind. Linears that are computed as one have one
    form.
    """
    found = {
        name.removesuffix(".weight"): part
        for name, part in parts.items()
        if name.endswith(".weight") and len(file.tensors[part.stored].shape) > 1
        if not part.stored.removesuffix(".weight").endswith(_UNPACKED)
    }

    def form(name: str) -> GroupForm | None:
        module, _, last = name.rpartition(".")
        together = next((names for names in _TOGETHER if last in names), (last,))
        beside = [f"{module}.{each}".lstrip(".") for each in together]
        kinds = [file.tensors[found[each].stored].kind for each in beside if each in found]
        forms = [FORMS.get(kind) for kind in kinds]
        known = [each for each in forms if each is not None]
        return joined_form(known) if len(known) == len(forms) else None

    forms = {name: form(name) for name in found}
    return {name: each for name, each in forms.items() if each is not None}


def _dtype(file: GgufFile) -> str:
    """The dtype of most weights, bfloat16 if that is none of 16 bits or more."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.nbytes
    most = max(sizes, key=lambda kind: sizes[kind])
    return str(_FLOATS.get(most, torch.bfloat16)).removeprefix("torch.")


def _info(file: GgufFile, part: _Part) -> TensorInfo:
    tensor = file.tensors[part.stored]
    shape = tensor.shape if part.expert is None else tensor.shape[1:]
    if part.taps:
        shape = (shape[0], 1, shape[1])
    dtype = _FLOATS.get(tensor.kind, torch.float32)
    form = part.form
    if form is not None and part.role == "codes":
        dtype = torch.int8 if form.bits == 8 else torch.uint8
        shape = (*shape[:-1], shape[-1] * form.bits // 8)
    elif form is not None and part.role == "scales":
        dtype, shape = form.scales, (*shape[:-1], shape[-1] // form.columns, *form.pair)
    elif form is not None:
        dtype, shape = torch.float16, (*shape[:-1], shape[-1] // form.block, *form.pair)
    return TensorInfo(shape=shape, dtype=dtype, file=file.path)


class GgufTensors:
    """An open file, with its other parts: what `safe_open` is for safetensors."""

    def __init__(self, file: GgufFile, parts: Mapping[str, _Part]) -> None:
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
        tensor = self._file.tensors[part.stored]
        if tensor.file not in self._data:
            self._data[tensor.file] = np.memmap(tensor.file, dtype=np.uint8, mode="c")
        rows = self._data[tensor.file][tensor.start : tensor.start + tensor.nbytes]
        if part.heads:
            # Rows of a head: one of the first half, one of the second, and so on.
            size = tensor.nbytes // tensor.shape[0]
            rows = rows.reshape(part.heads, -1, 2, size).swapaxes(1, 2)
        rows = rows.reshape(*tensor.shape[:-1], -1)
        if part.expert is not None:
            rows = rows[part.expert]
        if part.form is not None:
            return _kept_tensor(self._file.path, rows, tensor, part.role, part.form)
        values = _values(self._file.path, rows, tensor)
        values = values[:, None] if part.taps else values
        return values - 1 if part.plus_one else values


def open_gguf(path: Path) -> GgufTensors:
    """Open a file to read its tensors. ValueError as in `read_gguf_model`."""
    model = read_gguf_model(path)
    return GgufTensors(model.file, model.parts)


def _values(path: Path, rows: Any, tensor: GgufTensor) -> Tensor:
    if tensor.kind in _FLOATS:
        flat = torch.from_numpy(np.ascontiguousarray(rows)).view(_FLOATS[tensor.kind])
        return flat.reshape(_shape(rows, tensor))
    return dequantised(path, rows, tensor.kind)


def _shape(rows: Any, tensor: GgufTensor) -> Sequence[int]:
    return (*rows.shape[:-1], tensor.shape[-1])


def _kept_tensor(path: Path, rows: Any, tensor: GgufTensor, role: Role, form: GroupForm) -> Tensor:
    """Codes, scales or factors of rows of blocks."""
    blocks = rows.reshape(rows.shape[0], tensor.shape[-1] // tensor.block, -1)
    if role == "factors":
        return factors_of(blocks, tensor.kind, form)
    of = codes_of if role == "codes" else scales_of
    return of(path, blocks, tensor.kind, form)
