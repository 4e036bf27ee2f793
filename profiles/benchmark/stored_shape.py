"""A shape as a checkpoint, for engines whose ranks read their parts of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphengine.profiles.benchmark.shapes import Subject, fill_random


@contextmanager
def stored_shape(subject: Subject, device: str) -> Iterator[Subject]:
    """Inside, the shape with its random weights in a checkpoint, in bfloat16: in a temporary
    directory (`TMPDIR`), which needs room for them, as does the host's memory.

    device  what draws them

    ValueError for a shape whose weights are packed.
    """
    weights = subject.model.allocate(device="meta", dtype=torch.bfloat16)
    packed = [each.parts[0][0] for each in weights.linears() if not isinstance(each.weight, Tensor)]
    if packed:
        raise ValueError(
            f"{subject.name} has {len(packed)} linears in 8 or 4 bits, such as {packed[0]}: ranks "
            f"read a shape from a checkpoint, which is written in bfloat16"
        )
    with tempfile.TemporaryDirectory(prefix="graphengine-shape-") as name:
        folder = Path(name)
        _write(subject, device, folder)
        yield replace(subject, checkpoint=folder, drawn=True)


def _write(subject: Subject, device: str, folder: Path) -> None:
    weights = subject.model.allocate(device=device, dtype=torch.bfloat16)
    fill_random(weights.named(), weights.linears())
    stored: dict[str, Tensor] = {}
    for name, given in weights.named().items():
        tensor = given if isinstance(given, Tensor) else given[0]
        stored[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    config = {**subject.hf_config, "dtype": "bfloat16"}
    if config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
