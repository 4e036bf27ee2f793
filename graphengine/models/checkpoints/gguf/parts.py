"""Translates a GGUF file's tensors to a Hugging Face checkpoint's: names, shapes, and the order of
rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphengine.models.checkpoints.gguf.blocks import FORMS, GroupForm, joined_form
from graphengine.models.checkpoints.gguf.config import ROPE_FACTORS
from graphengine.models.checkpoints.gguf.families import (
    LAYER,
    MODULES,
    WITHOUT_END,
    GgufFamily,
)
from graphengine.models.checkpoints.gguf.file import GgufFile, GgufTensor, gguf_package
from graphengine.models.checkpoints.tensor_files import TensorInfo
from graphengine.options.checks import shown

Role = Literal["values", "codes", "scales", "factors"]
Make = Callable[[Sequence[Tensor]], Tensor]
"""Computes a tensor of the checkpoint from the values of the file's tensors."""
FLOATS: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The formats that are read as they are."""
_LAYER_NAME = re.compile(r"blk\.(\d{1,9})\.([\w.]+?)(?:\.(weight|bias))?")
# Linears that are fused, and so are packed in one form.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    *(("gate_proj", "up_proj"), ("w1", "w3")),
)
# The taps of a convolution have a row for each channel.
_TAPS = ("shortconv.conv", "ssm_conv1d")
# Tensors of recurrent layers that are stored with one axis more than a checkpoint has.
_FLAT = ("ssm_a", "ssm_d", "ssm_norm")
# The two parts of one linear of DeepSeek's attention: keys, transposed, and values of each head.
_KEYS_OF_HEADS, _VALUES_OF_HEADS = "attn_k_b", "attn_v_b"
# Matrices that are not packed.
_UNPACKED = ("token_embd", "position_embd", "ffn_gate_inp", "ffn_gate_inp_shexp", "attn_kv_b")


class Part(NamedTuple):
    """How a tensor of the checkpoint follows from those in the file.

    stored  their names in the file; without `make` the rows of several follow each other
    role    its values, or a component of them: codes, scales or factors
    form    form in which components are kept; None: values
    heads   heads whose rows alternate between two halves; 0: rows are as they are
    rows    the (start, length) of each span of rows that it takes from a tensor; none: it takes all
    expert  its place in a stack of experts; None: it is not stacked
    make    computes it from their values; None: values stay as they are
    shape   of the result of `make`
    """

    stored: tuple[str, ...]
    role: Role = "values"
    form: GroupForm | None = None
    heads: int = 0
    rows: tuple[tuple[int, int], ...] = ()
    expert: int | None = None
    make: Make | None = None
    shape: tuple[int, ...] = ()


def parts_of(file: GgufFile, family: GgufFamily, config: Mapping[str, Any]) -> dict[str, Part]:
    """The checkpoint's tensors by name, and how each follows from those in the file.

    A tensor without a name in the checkpoint keeps its own. ValueError, with numbers, for tensors
    that contradict the config, or that the package `gguf` does not read.
    """
    heads = {"attn_q": config["num_attention_heads"]}
    heads["attn_k"] = config.get("num_key_value_heads", heads["attn_q"])
    parts: dict[str, Part] = {}
    for stored, tensor in file.tensors.items():
        if stored in ROPE_FACTORS:
            continue
        check_kind(file, stored, tensor)
        names, module = _names(stored, family)
        part = _made(Part((stored,)), tensor, module, family)
        if family.paired and module in heads:
            part = part._replace(heads=_checked_heads(file, stored, tensor, heads[module]))
        if "{}" in names[0]:
            parts |= _of_experts(file, stored, part, names[0], config)
        elif len(names) > 1:
            parts |= _of_rows(file, stored, part, names, _heads_of(module, config))
        else:
            parts[names[0]] = _joined(file, parts.get(names[0]), part)
    return parts


def _heads_of(module: str, config: Mapping[str, Any]) -> int:
    """Number of heads if each head has rows of several linears; 1: rows do not alternate by
    head.
    """
    heads: int = config["linear_num_key_heads"] if module == "ssm_ba" else 1
    return heads


def _joined(file: GgufFile, other: Part | None, part: Part) -> Part:
    """A part with the tensors of another one of the same name, if there is one."""
    if other is None:
        return part
    stored = tuple(sorted((*other.stored, *part.stored)))
    if not stored[0].endswith(f".{_KEYS_OF_HEADS}.weight"):
        return part._replace(stored=stored)
    (heads, latent, keys), (other_heads, values, other_latent) = (
        file.tensors[name].shape for name in stored
    )
    if (heads, latent) != (other_heads, other_latent):
        raise ValueError(
            f"{file.path} has {' and '.join(stored)} of {heads} and {other_heads} heads and of "
            f"latents of {latent} and {other_latent} values: they must be equal"
        )

    def make(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat((parts[0].transpose(1, 2), parts[1]), dim=1).flatten(0, 1)

    return part._replace(stored=stored, make=make, shape=(heads * (keys + values), latent))


def _made(part: Part, tensor: GgufTensor, module: str, family: GgufFamily) -> Part:
    """The part, with a `make` if its values must change."""
    shape = tensor.shape
    if module == "ssm_a":
        count = math.prod(shape)
        return part._replace(make=lambda values: (-values[0]).log().flatten(), shape=(count,))
    if module in _FLAT and len(shape) > 1:
        return part._replace(make=lambda values: values[0].flatten(), shape=(math.prod(shape),))
    if family.plus_one and module.endswith("_norm") and module not in _FLAT:
        return part._replace(make=lambda values: values[0] - 1, shape=shape)
    if module in _TAPS and len(shape) == 2:
        return part._replace(make=lambda values: values[0][:, None], shape=(shape[0], 1, shape[1]))
    if module == "ffn_gate_inp_shexp" and len(shape) == 1:
        return part._replace(make=lambda values: values[0][None], shape=(1, *shape))
    if family.transposed and len(shape) == 2 and module in family.layer:
        return part._replace(make=lambda values: values[0].t(), shape=shape[::-1])
    return part


def _of_experts(
    file: GgufFile, stored: str, part: Part, name: str, config: Mapping[str, Any]
) -> dict[str, Part]:
    """A part for each expert of a stack."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    wanted = next((config[key] for key in keys if key in config), None)
    count = file.tensors[stored].shape[0]
    if count != wanted:
        raise ValueError(
            f"{file.path} has tensor {stored} of {count} experts: expert_count is {shown(wanted)}"
        )
    return {name.format(expert): part._replace(expert=expert) for expert in range(count)}


def _of_rows(
    file: GgufFile, stored: str, part: Part, names: Sequence[str], heads: int
) -> dict[str, Part]:
    """A part for each of several linears, which all have the same number of rows for each head."""
    rows, count = file.tensors[stored].shape[0], len(names)
    if rows % (count * heads):
        raise ValueError(
            f"{file.path} has tensor {stored} with {rows} rows, which are not {count * heads} "
            f"times as many"
        )
    each = rows // (count * heads)
    return {
        name: part._replace(rows=tuple((each * (head * count + i), each) for head in range(heads)))
        for i, name in enumerate(names)
    }


def _names(stored: str, family: GgufFamily) -> tuple[tuple[str, ...], str]:
    """A tensor's names in the checkpoint, its own if it has none, and its module's here."""
    found = _LAYER_NAME.fullmatch(stored)
    if found is None:
        module, _, end = stored.rpartition(".")
        name = {**MODULES, **family.modules}.get(module)
        return (f"{name}.{end}" if name else stored,), module
    layer, module, end = found.groups()
    names = {**LAYER, **family.layer}.get(module)
    if names is None or (end is None and module not in WITHOUT_END):
        return (stored,), module
    ending = "" if module in WITHOUT_END else f".{end}"
    several = (names,) if isinstance(names, str) else names
    return tuple(f"model.layers.{int(layer)}.{name}{ending}" for name in several), module


def check_kind(file: GgufFile, name: str, tensor: GgufTensor) -> None:
    """Raise ValueError for a format that the package `gguf` does not dequantise."""
    if tensor.kind not in FLOATS and not _is_read(file.path, tensor.kind):
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


def kept_forms(file: GgufFile, parts: Mapping[str, Part]) -> dict[str, GroupForm]:
    """The linears whose codes are kept, and in which form.

    Embeddings and routers are excluded. Linears that are fused have one form.
    """
    found = {
        name.removesuffix(".weight"): part
        for name, part in parts.items()
        if name.endswith(".weight") and part.make is None
        if all(_may_be_packed(file, stored) for stored in part.stored)
    }

    def form(name: str) -> GroupForm | None:
        module, _, last = name.rpartition(".")
        together = next((names for names in _TOGETHER if last in names), (last,))
        beside = [f"{module}.{each}".lstrip(".") for each in together]
        kinds = [
            file.tensors[stored].kind
            for each in beside
            if each in found
            for stored in found[each].stored
        ]
        forms = [FORMS.get(kind) for kind in kinds]
        known = [each for each in forms if each is not None]
        return joined_form(known) if len(known) == len(forms) else None

    forms = {name: form(name) for name in found}
    return {name: each for name, each in forms.items() if each is not None}


def _may_be_packed(file: GgufFile, stored: str) -> bool:
    is_matrix = len(file.tensors[stored].shape) > 1
    return is_matrix and not stored.removesuffix(".weight").endswith(_UNPACKED)


def info_of(file: GgufFile, part: Part) -> TensorInfo:
    """The shape and dtype of a part."""
    tensors = [file.tensors[stored] for stored in part.stored]
    dtypes = {FLOATS.get(tensor.kind, torch.float32) for tensor in tensors}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    shape = part.shape if part.make else _shape(tensors, part)
    form = part.form
    if form is not None and part.role == "codes":
        dtype = torch.int8 if form.bits == 8 else torch.uint8
        shape = (*shape[:-1], shape[-1] * form.bits // 8)
    elif form is not None and part.role == "scales":
        dtype, shape = form.scales, (*shape[:-1], shape[-1] // form.columns, *form.pair)
    elif form is not None:
        dtype, shape = torch.float16, (*shape[:-1], shape[-1] // form.block, *form.pair)
    return TensorInfo(shape=shape, dtype=dtype, file=file.path)


def _shape(tensors: Sequence[GgufTensor], part: Part) -> tuple[int, ...]:
    shapes = [each.shape if part.expert is None else each.shape[1:] for each in tensors]
    rows = sum(length for _, length in part.rows) or sum(shape[0] for shape in shapes)
    return (rows, *shapes[0][1:])
