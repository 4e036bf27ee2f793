"""A shape as a checkpoint, for engines whose ranks draw their parts of its weights.

The file says which tensors there are. Their values are a hole in the file, which takes no room on a
disk: `load_format="dummy"` draws them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from graphengine.profiles.benchmark.shapes import Subject


@contextmanager
def stored_shape(subject: Subject) -> Iterator[Subject]:
    """Store the shape as a checkpoint of bfloat16 weights, in a directory that lasts for the block.

    ValueError for a shape whose weights are packed.
    """
    weights = subject.model.allocate(device="meta", dtype=torch.bfloat16)
    packed = [each.parts[0][0] for each in weights.linears() if not isinstance(each.weight, Tensor)]
    if packed:
        raise ValueError(
            f"{subject.name} has {len(packed)} linears in 8 or 4 bits, such as {packed[0]}: ranks "
            f"draw a shape's weights in bfloat16"
        )
    shapes = {
        name: [*(given if isinstance(given, Tensor) else given[0]).shape]
        for name, given in weights.named().items()
    }
    config = {**subject.hf_config, "dtype": "bfloat16"}
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    with tempfile.TemporaryDirectory(prefix="graphengine-shape-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        write_hole(folder / "model.safetensors", shapes)
        yield replace(subject, checkpoint=folder, drawn=True)


def write_hole(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of bfloat16 tensors, whose values are never written."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
