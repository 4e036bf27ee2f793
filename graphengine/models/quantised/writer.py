"""Writes compressed-tensors checkpoints from checkpoints of 16 bits.

Weights have the values that `rounding` gives them; activations are not quantised.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from graphengine.config import RoundedKind
from graphengine.kernels.linear.kinds import CODES, KINDS
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.checkpoints.gguf.file import is_gguf
from graphengine.models.contract import ModelConfig
from graphengine.models.hf.config_schema import unsupported
from graphengine.models.quantised.config import quantisation_of
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.quantised.schemes import HEAD
from graphengine.options.checks import some

_INDEX = "model.safetensors.index.json"
_KEY = "quantization_config"
# Endings of files with weights, in this format or others.
_WEIGHT_FILES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
    ".index.json",
)


class Written(NamedTuple):
    """A summary of what was written.

    quantised     names of the quantised linears
    bytes_before  bytes of all tensors of the source
    bytes_after   bytes of all tensors that were written
    """

    quantised: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def write_quantised(
    source: Checkpoint,
    out: Path,
    kind: RoundedKind,
    *,
    group_size: int = 128,
    head: bool = False,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write a checkpoint with quantised linears, split into files like `source`.

    group_size  columns that share a scale, for a kind of which there are several
    head        whether lm_head is quantised, too
    device      where weights are rounded, one at a time
    progress    called with (bytes read, bytes to read)

    The folder `out` appears whole or not at all. Files that hold no weights are copied, folders are
    not. ValueError if `out` exists, or the source cannot be quantised like this.
    """
    if out.exists():
        raise ValueError(f"{out} is there already: a checkpoint is written to a new folder")
    quantisation = quantisation_of(source)
    if is_gguf(source.path):
        advice = f"quantize={kind!r} rounds it while loading"
        if quantisation is not None:
            advice = (
                "its weights are in 8 or 4 bits already, so open it as it is; to round them to "
                f"{kind}, take the model's safetensors checkpoint of 16 bits"
            )
        raise ValueError(
            f"{source.path} is a GGUF file, which has no folder to write one like it: {advice}"
        )
    config = read_model(source)
    if quantisation is not None:
        raise ValueError(
            f"{source.path} has quantised weights ({quantisation.method}): those of 16 or 32 bits "
            f"can become {kind}"
        )
    _check_names(source, config, kind)
    form = KIND_FORMATS[kind]
    if KINDS[kind].groups:
        form = form._replace(columns=group_size)
    linears = _linears(source, config, form, head)
    written_config = _config(source, form, linears)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    unfinished.mkdir()
    try:
        for file in sorted(source.path.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
                shutil.copy(file, unfinished)
        text = json.dumps(written_config, indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")
        size = _write_tensors(source, unfinished, form, linears, device, progress)
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    before = sum(info.nbytes for info in source.tensors.values())
    return Written(tuple(linears), before, size)


def _check_names(source: Checkpoint, config: ModelConfig, kind: RoundedKind) -> None:
    """Raise ValueError for stacked experts and linears that are interleaved by head.

    The format has no names for them.
    """
    parts = [name for name, info in source.tensors.items() if info.cut is not None]
    if parts:
        raise ValueError(
            f"{source.path} has {len(parts)} tensors that are parts of others, interleaved by head "
            f"({some(parts)}): quantize={kind!r} rounds them while loading"
        )
    routed = config.allocate(device="meta", dtype=torch.bfloat16).routed
    if routed is not None and routed.stacked:
        raise ValueError(
            f"a {config.architecture} has the {routed.experts} experts of a layer in one tensor, "
            f"which compressed-tensors cannot hold: quantize={kind!r} rounds them while loading"
        )


def _linears(
    source: Checkpoint, config: ModelConfig, form: WeightFormat, head: bool
) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights to quantise, by the names of their linears."""
    weights = config.allocate(device="meta", dtype=torch.float32)
    ends = ".weight"
    tied = f"{HEAD}{ends}" not in weights.named() or f"{HEAD}{ends}" not in source.tensors
    if head and tied:
        raise ValueError(f"{source.path} has no {HEAD} of its own: it is its embedding")
    names = [name for linear in weights.linears() if not linear.plain for name, _ in linear.parts]
    linears = {
        name: source.tensors[f"{name}{ends}"].shape
        for name in names
        if f"{name}{ends}" in source.tensors and (head or name != HEAD)
    }
    wrong = [f"{name} {list(shape)}" for name, shape in linears.items() if _is_odd(shape, form)]
    if wrong:
        raise ValueError(
            f"{source.path} has {len(wrong)} linears whose columns are no multiple of "
            f"{form.columns}, which share a scale: {some(wrong)}"
        )
    return linears


def _is_odd(shape: tuple[int, ...], form: WeightFormat) -> bool:
    return form.columns > 0 and shape[1] % form.columns != 0


def _config(source: Checkpoint, form: WeightFormat, linears: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` with the quantisation as compressed-tensors writes it."""
    weights: dict[str, Any] = {
        "num_bits": form.bits,
        "type": CODES[form.code].type,
        "strategy": "group" if form.columns else "channel",
        "group_size": form.columns or None,
        "symmetric": True,
        "dynamic": False,
    }
    # Everything else that could be a linear: vLLM and transformers find linears by their class.
    matrices = [
        name.removesuffix(".weight")
        for name, info in source.tensors.items()
        if name.endswith(".weight") and len(info.shape) == 2
    ]
    others = {HEAD, *matrices} - linears.keys()
    layout = "float-quantized" if CODES[form.code].type == "float" else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "format": layout}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(name for name in others if not name.endswith("embed_tokens")),
        "kv_cache_scheme": _kv_scheme(source),
    }
    return {**source.config, _KEY: quantization}


def _kv_scheme(source: Checkpoint) -> Any:
    """The source's KV scheme, which is kept; its weights are not quantised."""
    given = source.config.get(_KEY) or {}
    if given and given.get("quant_method") != "compressed-tensors":
        raise unsupported(_KEY, given, "null, or KV of compressed-tensors")
    if source.quant_config is not None:
        raise ValueError(f"{source.path} has an hf_quant_config.json: supported: none")
    return given.get("kv_cache_scheme")


def _write_tensors(
    source: Checkpoint,
    folder: Path,
    form: WeightFormat,
    linears: Mapping[str, Any],
    device: str,
    progress: Callable[[int, int], None] | None,
) -> int:
    """Write files like the source's, indexed if several; returns the bytes of all tensors."""
    tensors = source.mapped()
    files: dict[Path, list[str]] = {}
    for name, info in source.tensors.items():
        files.setdefault(info.file, []).append(name)
    places: dict[str, str] = {}
    size, done = 0, 0
    total = sum(info.nbytes for info in source.tensors.values())
    for file, names in files.items():
        made: dict[str, Tensor] = {}
        for name in names:
            linear = name.removesuffix(".weight")
            if linear in linears and name != linear:
                made |= _quantised_tensors(tensors[name], linear, form, device)
            else:
                made[name] = tensors[name]
            done += source.tensors[name].nbytes
            if progress is not None:
                progress(done, total)
        try:
            save_file(made, folder / file.name, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder / file.name} cannot be written: {error}") from error
        places |= dict.fromkeys(made, file.name)
        size += sum(tensor.nbytes for tensor in made.values())
    if (source.path / _INDEX).is_file() and not (folder / "model.safetensors").is_file():
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return size


def _quantised_tensors(
    stored: Tensor, linear: str, form: WeightFormat, device: str
) -> dict[str, Tensor]:
    try:
        weight = quantise(stored.to(device), form)
    except ValueError as error:
        raise ValueError(f"{linear}.weight: {error}") from error
    return {f"{linear}.{name}": tensor.cpu() for name, tensor in compressed_tensors(weight).items()}


def compressed_tensors(weight: QuantisedWeight) -> dict[str, Tensor]:
    """A weight of `quantise` as compressed-tensors' tensors, by the last part of their names."""
    scales = {"weight_scale": weight.scales}
    code = CODES[weight.format.code]
    if code.type == "float":
        assert code.stored is not None, f"{code=}"
        return {"weight": weight.codes.view(code.stored), **scales}
    codes = weight.codes ^ code.flip
    words = F.pad(codes, (0, -codes.shape[1] % 4)).view(torch.int32)
    return {"weight_packed": words, "weight_shape": torch.tensor(weight.shape), **scales}
