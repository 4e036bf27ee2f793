"""Checkpoints in Hugging Face layout: their contents, and loading their weights to the device.

Only JSON, safetensors and GGUF are read: nothing in a checkpoint is ever executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graphengine.models.checkpoints.bitsandbytes_tensors import (
    FourBits,
    four_bit_weights,
    log_four_bits,
    without_parts,
)
from graphengine.models.checkpoints.finding import ADAPTER, find_directory, gguf_of, told_instead
from graphengine.models.checkpoints.fused_heads import parts_of, read_names
from graphengine.models.checkpoints.gguf.file import is_gguf
from graphengine.models.checkpoints.gguf.tensors import log_widened, open_gguf, read_gguf_model
from graphengine.models.checkpoints.json_files import read_json_object
from graphengine.models.checkpoints.random_values import random_values
from graphengine.models.checkpoints.tensor_files import (
    DTYPE_NAMES,
    MOST_NAMED,
    WEIGHT_DTYPES,
    ReorderedTensor,
    TensorInfo,
    TensorSlice,
    find_tensors,
    read_header,
)
from graphengine.options.checks import INT32_MAX, is_int, some
from graphengine.options.devices import DTYPES

Progress = Callable[[int, int], None]
Destinations = Mapping[str, Tensor | ReorderedTensor | Sequence[Tensor]]
Merge = Callable[[str, Tensor, TensorSlice | None], Tensor]
"""Computes the value of a tensor from its name and its stored value, or from a part of that
value."""

_WEIGHT_NAMES = ", ".join(DTYPE_NAMES[dtype] for dtype in WEIGHT_DTYPES)
# A base model saved alone lacks this prefix in the names that begin with these parts.
_BASE_MODEL = "model."
_BASE_MODEL_PARTS = (
    *("embed_tokens.", "layers.", "norm.", "mtp_layers.", "embed_tokens_per_layer."),
    *("per_layer_model_projection.", "per_layer_projection_norm."),
    *("wte.", "wpe.", "ln_f.", "embed_in.", "final_layer_norm."),
)
# Prefixes of a language model's names in a checkpoint with a vision tower, and in one without; then
# those of Nemotron-H, CSM, GPT-NeoX, Qwen3-Omni's talker and Moshi, and of GPT-2 as a whole and as
# a base model saved alone.
_LANGUAGE_MODELS = {
    # transformers 5.23 saves Kimi K2.5 with this name; its published files have layers.
    "language_model.model.blocks.": "model.layers.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "backbone.": "model.",
    "backbone_model.": "model.",
    "gpt_neox.": "model.",
    "embed_out.": "lm_head.",
    "codec_head.": "lm_head.",
    "talker.codec_head.": "lm_head.",
    "talker.model.": "model.",
    "talker.code_predictor.": "code_predictor.",
    "decoder.model.": "model.",
    "decoder.lm_head.": "lm_head.",
    "transformer.h.": "model.layers.",
    "transformer.": "model.",
    "h.": "model.layers.",
}
# Moshi's names of attention's linears.
_WRAPPED = re.compile(r"((depth_)?decoder\..*self_attn\.[qkvo]_proj)\.linear(\.weight)")
# Destination bytes filled at a time: a cast on the way to a device needs that much host memory.
_COPY_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A directory with `config.json` and safetensors weights, or a GGUF file. Holds no open file.

    path               the directory, or the GGUF file
    tokenizer_file     `tokenizer.json`, or the GGUF file; None where no tokenizer can be read
    config             `config.json`
    generation_config  `generation_config.json`, empty where there is none
    quant_config       ModelOpt's `hf_quant_config.json`, None where there is none
    drawn_on           the device that draws random weights, seeded by their names, in place of
                       those in the files; None: the files are read
    merge              changes values as they are read; None: they are as stored
    tensors            by name; with an index, only what the index names. Tensors of a base model
                       saved alone ("layers.0."), and of a language model with a vision tower
                       ("language_model.model.layers.0."), have the names of the whole language
                       model ("model.layers.0.")
    stored_names       names in the files, where they differ
    four_bits          weights of bitsandbytes that are widened as they are read, by their names in
                       the files
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    stored_names: Mapping[str, str] = field(default_factory=dict)
    four_bits: Mapping[str, FourBits] = field(default_factory=dict)
    quant_config: dict[str, Any] | None = None
    drawn_on: str | None = None
    merge: Merge | None = None
    tokenizer_file: Path | None = None
    # Answers of `is_zero`. A copy has its own: it may have parts of the tensors.
    _zeros: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, path_or_hub_id: str | os.PathLike[str]) -> Self:
        """Read configs and headers of a local directory, a GGUF file, or a hub id ("org/name").

        A directory without safetensors may hold one GGUF file. "demo" is the packaged model. A hub
        id is read from huggingface_hub's cache or downloaded into it. FileNotFoundError where there
        is no directory or no `config.json`; ValueError if anything else is missing, damaged or in
        an unsupported format.
        """
        directory = find_directory(path_or_hub_id)
        gguf = directory if is_gguf(directory) else gguf_of(directory)
        if gguf is not None:
            return cls._of_gguf(gguf)
        config = directory / "config.json"
        if not config.is_file():
            raise FileNotFoundError(
                f"{directory} has no config.json{told_instead(directory, path_or_hub_id)}"
            )
        generation_config = directory / "generation_config.json"
        quant_config = directory / "hf_quant_config.json"
        tokenizer = directory / "tokenizer.json"
        stored = find_tensors(directory)
        four_bits = four_bit_weights(directory, stored, _read_tensor)
        log_four_bits(directory, four_bits)
        stored = without_parts(stored, four_bits)
        names, settings = whole_names(directory, stored), read_json_object(config)
        return cls(
            path=directory,
            config=settings,
            generation_config=(
                read_json_object(generation_config) if generation_config.is_file() else {}
            ),
            quant_config=read_json_object(quant_config) if quant_config.is_file() else None,
            tokenizer_file=tokenizer if tokenizer.is_file() else None,
            tensors=MappingProxyType(parts_of(directory, names, stored, settings)),
            stored_names=MappingProxyType(
                {name: old for name, old in names.items() if name != old}
            ),
            four_bits=MappingProxyType(four_bits),
        )

    @classmethod
    def _of_gguf(cls, file: Path) -> Self:
        model = read_gguf_model(file)
        log_widened(model)
        return cls(
            path=file,
            config=model.config,
            generation_config={},
            tensors=MappingProxyType(model.tensors),
            tokenizer_file=model.tokenizer_file,
        )

    @property
    def has_adapter(self) -> bool:
        """Whether a LoRA adapter lies next to the weights; only an option has it read."""
        return (self.path / ADAPTER).is_file()

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer_file is not None

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the configs and the list of tensors, not of their values."""
        tensors = {
            name: (list(info.stored.shape), str(info.dtype), info.file.name)
            for name, info in self.tensors.items()
        }
        told = [self.config, self.generation_config, self.quant_config, tensors]
        text = json.dumps(told, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def cut(self, cuts: Mapping[str, TensorSlice]) -> Self:
        """This checkpoint with only a part of each tensor that `cuts` names.

        Files are mapped, so no other byte of these tensors is read.
        """
        parts = {name: self.tensors[name].part(cut) for name, cut in cuts.items()}
        return replace(self, tensors=MappingProxyType({**self.tensors, **parts}))

    def uncut(self) -> Self:
        """This checkpoint with all of each tensor."""
        tensors = {name: info.stored for name, info in self.tensors.items()}
        return replace(self, tensors=MappingProxyType(tensors))

    def drawn(self, device: str) -> Self:
        """This checkpoint with random values in its tensors; see `random_values`."""
        return replace(self, drawn_on=device)

    def load(self, destinations: Destinations, progress: Progress | None = None) -> list[str]:
        """Fill tensors on any device, in any floating dtype, from the tensors of the checkpoint.

        destinations  for each name the tensor, or all tensors, that receive it whole; they may be
                      views of fused parameters. Values are cast to the destination's dtype. A
                      destination of four or more dimensions may split the rows over several of
                      them, and one of three or more the last dimension: so their order may differ.
                      A `ReorderedTensor` gives the order of its rows.
        progress      called with (bytes read, bytes to read), first with 0 read

        Returns the sorted names of the checkpoint's tensors without a destination. Names, shapes
        and file sizes are checked before anything is read. Norms and biases, which have one
        dimension, are searched for NaN and infinite numbers; larger tensors are not. Files are
        mapped into memory one after another: the host holds at most one file and a part of a
        tensor.
        """
        targets = self._check(destinations)
        names_by_file: dict[Path, list[str]] = {}
        for name in targets:
            names_by_file.setdefault(self.tensors[name].file, []).append(name)
        self._check_unchanged(targets)

        done, total = 0, sum(self.tensors[name].nbytes for name in targets)
        if progress is not None:
            progress(done, total)
        for file, names in names_by_file.items():
            for name, source in self._read(file, names):
                if source.ndim < 2 and self.drawn_on is None:
                    _check_finite(f"{file}: {name}", source)
                for part in _fill(targets[name], source):
                    done += part
                    if progress is not None:
                        progress(done, total)
        return sorted(self.tensors.keys() - targets.keys())

    def check(self, destinations: Destinations) -> None:
        """Raise the errors of `load` that follow from the names, shapes and dtypes of tensors."""
        self._check(destinations)

    def have_equal_values(self, one: str, other: str) -> bool:
        """Whether two weights are equal. ValueError if one cannot be read."""
        first, second = self.tensors[one], self.tensors[other]
        if first.shape != second.shape or {first.dtype, second.dtype} - set(WEIGHT_DTYPES):
            return False
        self._check_unchanged([one, other])
        equal = []
        for _, left in self._read(first.file, [one]):
            for _, right in self._read(second.file, [other]):
                same = (
                    torch.equal(left[rows].float(), right[rows].float())
                    for rows in _row_ranges(left, itemsize=4)
                )
                equal.append(all(same))
        return all(equal)

    def mapped(self) -> Mapping[str, Tensor]:
        """All tensors by name, as they are stored: each is mapped from its file, or drawn, when
        looked up.

        A look-up raises ValueError if the file has changed since `open`, or cannot be read.
        """
        return _MappedTensors(self)

    def is_zero(self, name: str) -> bool:
        """Whether a tensor has no other number than 0. It is read once.

        ValueError as in `mapped`.
        """
        if name not in self._zeros:
            self._zeros[name] = not bool(self.mapped()[name].any())
        return self._zeros[name]

    def _read(self, file: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors mapped from `file`, each valid until the next one is yielded."""
        if self.drawn_on is not None:
            for name in names:
                yield name, self._merged(name, self._draw(name, self.drawn_on))
            return
        try:
            with _open_tensors(file) as shard:
                for name in names:
                    yield (
                        name,
                        self._mapped(
                            name, lambda other: shard if other == file else _open_tensors(other)
                        ),
                    )
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error

    def _mapped(self, name: str, opened: Callable[[Path], Any]) -> Tensor:
        """A tensor, or the part that `tensors` has of it, from the files that `opened` returns."""
        info, stored = self.tensors[name], self.stored_names.get(name, name)
        whole: Tensor
        if stored in self.four_bits:
            whole = self.four_bits[stored].values(
                stored, lambda part, place: opened(place.file).get_tensor(part)
            )
        else:
            whole = opened(info.file).get_tensor(stored)
        return self._merged(name, whole if info.cut is None else info.cut.part(whole))

    def _merged(self, name: str, value: Tensor) -> Tensor:
        """The value that a tensor is read as; `value` is its stored value, or a part of it."""
        return value if self.merge is None else self.merge(name, value, self.tensors[name].cut)

    def _draw(self, name: str, device: str) -> Tensor:
        info = self.tensors[name]
        if info.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"random values are drawn in {_WEIGHT_NAMES}, and {name} of {self.path} is "
                f"{DTYPE_NAMES[info.dtype]}"
            )
        # Draw the whole tensor, so that parts have the values that a single rank has.
        whole = random_values(name, info.stored.shape, info.dtype, device)
        return whole if info.cut is None else info.cut.part(whole)

    def _check(self, destinations: Destinations) -> dict[str, tuple[Tensor | ReorderedTensor, ...]]:
        """The destinations of each name, checked against the stored tensors."""
        targets: dict[str, tuple[Tensor | ReorderedTensor, ...]] = {
            name: (wanted,) if isinstance(wanted, Tensor | ReorderedTensor) else tuple(wanted)
            for name, wanted in destinations.items()
        }
        missing = [name for name in targets if name not in self.tensors]
        if missing:
            raise ValueError(
                f"{self.path} lacks {len(missing)} of {len(targets)} tensors: "
                f"{some(missing, MOST_NAMED)}"
            )
        pairs = [
            (name, each.tensor if isinstance(each, ReorderedTensor) else each)
            for name, wanted in targets.items()
            for each in wanted
        ]
        unread = [
            f"{name} in {DTYPE_NAMES[self.tensors[name].dtype]}"
            for name in targets
            if self.tensors[name].dtype not in WEIGHT_DTYPES
        ]
        if unread:
            raise ValueError(
                f"{self.path} has {len(unread)} weights of another dtype than "
                f"{_WEIGHT_NAMES}: {some(unread, MOST_NAMED)}"
            )
        wrong = [
            f"{name} has shape {list(self.tensors[name].shape)}, not {list(tensor.shape)}"
            for name, tensor in pairs
            if not _fits(self.tensors[name].shape, tuple(tensor.shape))
        ]
        if wrong:
            raise ValueError(
                f"{self.path} has {len(wrong)} tensors of a wrong shape: {some(wrong, MOST_NAMED)}"
            )
        not_floating = [
            f"{name} to {tensor.dtype}" for name, tensor in pairs if not tensor.is_floating_point()
        ]
        if not_floating:
            raise ValueError(
                f"weights can only be cast to floats, not {some(not_floating, MOST_NAMED)}"
            )
        return targets

    def _check_unchanged(self, names: Iterable[str]) -> None:
        """Read headers again: a mapped file that has shrunk would kill the process."""
        wanted: dict[Path, dict[str, TensorInfo]] = {}
        for name in names:
            stored = self.stored_names.get(name, name)
            parts = {stored: self.tensors[name].stored}
            if stored in self.four_bits:
                weight = self.four_bits[stored]
                parts = {f"{stored}.{end}": info for end, info in weight.beside.items()}
                parts[stored] = weight.codes
            for part, info in parts.items():
                wanted.setdefault(info.file, {})[part] = info
        for file, infos in wanted.items():
            header = read_gguf_model(file).tensors if is_gguf(file) else read_header(file)
            for part, info in infos.items():
                if header.get(part) != info:
                    raise ValueError(f"{file} has changed since it was opened: tensor {part}")


class _MappedTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors by name; random values are drawn at each look-up.

    The last two files stay open: a weight's codes and scales may lie in two consecutive files.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[Path, Any] = {}
        self._checked: set[Path] = set()

    def __getitem__(self, name: str) -> Tensor:
        info, drawn_on = self._checkpoint.tensors[name], self._checkpoint.drawn_on
        if drawn_on is not None:
            return self._checkpoint._merged(name, self._checkpoint._draw(name, drawn_on))
        try:
            return self._checkpoint._mapped(name, self._open)
        except SafetensorError as error:
            raise ValueError(f"{info.file} cannot be read: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.tensors)

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            if file not in self._checked:
                tensors = self._checkpoint.tensors
                names = [name for name, info in tensors.items() if info.file == file]
                self._checkpoint._check_unchanged(names)
                self._checked.add(file)
            self._files[file] = _open_tensors(file)
            for older in list(self._files)[:-2]:
                del self._files[older]
        return self._files[file]


def _open_tensors(file: Path) -> Any:
    """The open file, whose `get_tensor` maps tensors by their stored names."""
    return open_gguf(file) if is_gguf(file) else safe_open(file, framework="pt", device="cpu")


def _read_tensor(name: str, info: TensorInfo) -> Tensor:
    """A small tensor by its name in its file. ValueError for a file that cannot be read."""
    try:
        with _open_tensors(info.file) as shard:
            tensor: Tensor = shard.get_tensor(name)
            return tensor
    except SafetensorError as error:
        raise ValueError(f"{info.file} cannot be read: {error}") from error


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """End-of-sequence ids that `generation_config.json` or `config.json` name, in this order.

    -1 stands for none, as in transformers. ValueError for anything else but token ids.
    """
    found: list[int] = []
    for source, config in (
        ("generation_config.json", checkpoint.generation_config),
        ("config.json", checkpoint.config),
        ("config.json's text_config", _text_config(checkpoint)),
    ):
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(item == -1 or (is_int(item) and 0 <= item <= INT32_MAX) for item in ids):
            raise ValueError(
                f"{checkpoint.path}: {source} has eos_token_id={value!r}: must be token ids, "
                f"integers in [0, {INT32_MAX}], or -1 for none"
            )
        found += [item for item in ids if item >= 0]
    return tuple(dict.fromkeys(found))


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that `config.json` names, else that of the first weight.

    ValueError if no tensor has the dtype of a weight.
    """
    for config in (checkpoint.config, _text_config(checkpoint)):
        named = config.get("dtype") or config.get("torch_dtype")
        if isinstance(named, str) and named in DTYPES:
            return DTYPES[named]
    floats = {
        name: tensor.dtype
        for name, tensor in checkpoint.tensors.items()
        if tensor.dtype in WEIGHT_DTYPES
    }
    if not floats:
        raise ValueError(f"{checkpoint.path} has no weight in one of {_WEIGHT_NAMES}")
    # Scales of quantised weights may be in another dtype, and come first.
    weights = [dtype for name, dtype in floats.items() if name.endswith(".weight")]
    return (weights or [*floats.values()])[0]


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The language model's part of a multimodal config."""
    nested = checkpoint.config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _fits(stored: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a stored tensor fits a destination, which may split its rows or its last dimension
    over several dimensions.
    """
    more = len(target) - len(stored)
    if more < 1 or not stored or len(target) < 3:
        return stored == target
    if (*target[: -more - 1], math.prod(target[-more - 1 :])) == stored:
        return True
    return len(target) > 3 and (math.prod(target[: more + 1]), *target[more + 1 :]) == stored


def _fill(wanted: Sequence[Tensor | ReorderedTensor], source: Tensor) -> Iterator[int]:
    """Copy `source` into every target, a few rows at a time; yields the bytes of each part."""
    ordered = [each for each in wanted if isinstance(each, ReorderedTensor)]
    targets = [each for each in wanted if isinstance(each, Tensor)]
    if source.ndim == 0:
        source, targets = source[None], [target[None] for target in targets]
    elif targets:
        source = source.view(targets[0].shape)
    tensors = [*targets, *(each.tensor for each in ordered)]
    widest = max((target.element_size() for target in tensors), default=source.element_size())
    for rows in _row_ranges(source, itemsize=widest):
        part = source[rows]
        with torch.no_grad():
            for target in targets:
                target[rows].copy_(part)
            for each in ordered:
                each.place(rows, part)
        yield part.nbytes


def _check_finite(name: str, value: Tensor) -> None:
    """ValueError, with the count, for a tensor with a NaN or an infinite number."""
    if value.dtype in WEIGHT_DTYPES and not bool(value.isfinite().all()):
        wrong = int((~value.isfinite()).sum())
        raise ValueError(f"{name} has {wrong} of {value.numel()} numbers that are not finite")


def _row_ranges(tensor: Tensor, *, itemsize: int) -> Iterator[slice]:
    """The rows of a tensor in parts of about `_COPY_BYTES`, at `itemsize` bytes a value."""
    rows = max(1, _COPY_BYTES // max(1, math.prod(tensor.shape[1:]) * itemsize))
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, start + rows)


def whole_names(source: Path, stored: Collection[str]) -> dict[str, str]:
    """The stored name of each tensor of the whole model; ValueError if two get the same name.

    A tensor that holds several linears gets the names of all of them.

    source  where they are stored, for errors
    """
    names: dict[str, str] = {}
    for name in stored:
        for whole in read_names(_whole_name(name, stored)):
            if whole in names:
                raise ValueError(
                    f"{source} has two tensors that are {whole} of the language model: "
                    f"{names[whole]} and {name}"
                )
            names[whole] = name
    return names


def _whole_name(name: str, names: Collection[str]) -> str:
    """A tensor's name in the whole language model.

    Adds the prefix that a base model lacks, as `AutoModelForCausalLM` does, and replaces the one
    that a checkpoint with a vision tower has.
    """
    name = _WRAPPED.sub(r"\1\3", name)
    for prefix, alone in _LANGUAGE_MODELS.items():
        if name.startswith(prefix) and alone + name.removeprefix(prefix) not in names:
            return alone + name.removeprefix(prefix)
    whole = _BASE_MODEL + name
    return whole if name.startswith(_BASE_MODEL_PARTS) and whole not in names else name
