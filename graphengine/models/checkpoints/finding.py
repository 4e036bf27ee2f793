"""Finds a checkpoint: a directory, a GGUF file, or a repository of the Hugging Face hub.

A hub id is read from huggingface_hub's cache or downloaded into it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from graphengine.demo import checkpoint_path
from graphengine.models.checkpoints.gguf.file import is_gguf, one_gguf
from graphengine.models.checkpoints.json_files import read_json_object
from graphengine.options.checks import shown
from graphengine.paths import expand_user

DEMO = "demo"
"""Name of the packaged model wherever a path may stand; a folder of that name is "./demo"."""

ADAPTER = "adapter_config.json"
_GGUF_HINT = "GGUF files are not downloaded: fetch one, and open it by its path"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "*.txt"]
# The same weights in other layouts, which some repositories also hold.
_HUB_IGNORED = ["original/*", "onnx/*", "consolidated*"]


def find_local(path_or_hub_id: str | os.PathLike[str]) -> Path | None:
    """The directory or GGUF file, or None for a text that looks like a hub id.

    FileNotFoundError for a path that leads nowhere, ValueError for anything else.
    """
    if not isinstance(path_or_hub_id, str | os.PathLike):
        raise ValueError(f"checkpoint {path_or_hub_id!r} must be a path or a hub id")
    if path_or_hub_id == DEMO:
        return checkpoint_path()
    name = os.fspath(path_or_hub_id)
    path = expand_user(name)
    try:
        is_there, is_folder = path.exists(), path.is_dir()
    except OSError as error:
        raise ValueError(f"no checkpoint {name!r}: {error}") from error
    if is_folder or is_gguf(path):
        return path
    if is_there:
        raise ValueError(
            f"{name} is a file: a checkpoint is a directory with config.json, or a .gguf file"
        )
    if not isinstance(path_or_hub_id, str) or not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(
            f"no checkpoint {name!r}: there is no such directory or file, "
            "and it does not look like a hub id (org/name)"
        )
    return None


def told_instead(directory: Path, path_or_hub_id: str | os.PathLike[str]) -> str:
    """Text that says what a directory without `config.json` holds, and what to do; empty if
    unknown.
    """
    if (directory / ADAPTER).is_file():
        base = read_json_object(directory / ADAPTER).get("base_model_name_or_path")
        of, model = ("", "its") if base is None else (f" of {shown(base)}", "that")
        return (
            f", but {ADAPTER}: it is a LoRA adapter{of}. Open {model} model with "
            f"adapters={{name: folder}} or merge_adapter=folder"
        )
    # For a hub id these files are not downloaded.
    if find_local(path_or_hub_id) is None and "gguf" in os.fspath(path_or_hub_id).lower():
        return f", and its name says GGUF: {_GGUF_HINT}"
    return ""


def gguf_of(directory: Path) -> Path | None:
    """The one GGUF file of a directory without safetensors; None: there is none."""
    return None if any(directory.glob("*.safetensors")) else one_gguf(directory)


def find_directory(path_or_hub_id: str | os.PathLike[str]) -> Path:
    return find_local(path_or_hub_id) or _download(os.fspath(path_or_hub_id))


def _download(hub_id: str) -> Path:
    tried = f"no checkpoint {hub_id!r}: there is no such directory"
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        raise ValueError(
            f"{tried}, and a hub id needs huggingface_hub: pip install '.[hub]' in the "
            "checkout of graphengine, or pip install huggingface_hub"
        ) from error
    try:
        snapshot = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED
        )
    except Exception as error:  # network, HTTP, cache and permission errors share no base class
        offline = ", HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        raise ValueError(
            f"{tried}, and huggingface_hub could not provide it "
            f"(cache {constants.HF_HUB_CACHE}{offline}): {type(error).__name__}: {error}"
        ) from error
    return Path(snapshot)
