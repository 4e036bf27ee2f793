"""The demo model with three of its layers: it says other things than the demo, in a third of the
time. Its tokenizer and its draft module are the demo's, and some of the drafts are right.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from checkpoints.block_drafters import write_echo
from checkpoints.eagle3_heads import Shape, head_config, head_tensors, write_head
from graphengine.demo import checkpoint_path

LAYERS = (0, 1, 6)
"""Layers of the demo. With the last one its text repeats itself less than with the first three
alone.
"""
HEAD_LAYERS = (0, 2)
"""The layers among these whose streams the head of `eagle3_head` reads."""


@functools.cache
def few_layers() -> Path:
    """The folder of the checkpoint, which lives as long as this process."""
    holder = tempfile.TemporaryDirectory(prefix="few-layers-")
    _holders.append(holder)
    folder = Path(holder.name) / "demo"
    shutil.copytree(checkpoint_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = len(LAYERS)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(checkpoint_path() / "model.safetensors")
    kept = {new: tensors[name] for name in tensors if (new := _renamed(name)) is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


_holders: list[tempfile.TemporaryDirectory[str]] = []


def _renamed(name: str) -> str | None:
    """What a tensor of the demo is called here; None for those of the other layers."""
    if not name.startswith("model.layers."):
        return name
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    if int(layer) not in LAYERS:
        return None
    return f"model.layers.{LAYERS.index(int(layer))}.{rest}"


@functools.cache
def eagle3_head() -> Path:
    """The folder of an EAGLE3 head for it, of random weights, which reads `HEAD_LAYERS`."""
    holder = tempfile.TemporaryDirectory(prefix="eagle3-head-")
    _holders.append(holder)
    tensors = load_file(few_layers() / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].float()
    shape = Shape(layers=HEAD_LAYERS, drafted=0)
    head = head_tensors(shape, embedding, tensors.get("lm_head.weight", embedding).float())
    return write_head(Path(holder.name), head_config(shape, embedding), head)


@functools.cache
def block_drafter() -> Path:
    """The folder of a block drafter for it: `write_echo`'s."""
    holder = tempfile.TemporaryDirectory(prefix="block-drafter-")
    _holders.append(holder)
    return write_echo(Path(holder.name), few_layers())
