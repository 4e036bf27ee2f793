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

from graphengine.demo import checkpoint_path

LAYERS = (0, 1, 6)
"""Of the demo. With the last one its text repeats itself less than with the first three alone."""


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
