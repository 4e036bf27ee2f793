"""The options of LoRA adapters: their names, and the folders that they are loaded from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from graphengine.options.checks import check_path, shown

USUAL_ADAPTERS = 4
"""Default number of adapters that an engine with adapters holds at the same time."""


def read_adapters(given: object) -> dict[str, str]:
    """The folder of each adapter by its name. ValueError unless it is a mapping of them."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"adapters={shown(given)} must map names to the folders of adapters")
    for name, path in given.items():
        check_adapter_name(name)
        check_path(f"adapters[{name!r}]", path)
    return {name: os.fspath(path) for name, path in given.items()}


def check_adapter_name(name: object) -> None:
    """ValueError unless it is a name that an adapter may have."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"adapter {shown(name)} must be a name: text that is not empty")


def adapter_pair(text: str) -> tuple[str, str]:
    """Read a flag's "name=folder". ValueError for anything else."""
    name, sign, path = text.partition("=")
    if not (name and sign and path):
        raise ValueError(f"{shown(text)} must be NAME=PATH")
    return name, path


def adapters_of_pairs(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The folder of each adapter by its name. ValueError, with both folders, for a name that comes
    twice.
    """
    found: dict[str, str] = {}
    for name, path in pairs:
        if name in found:
            raise ValueError(
                f"adapter {shown(name)} is there twice, as {shown(found[name])} and as "
                f"{shown(path)}: each adapter has a name of its own"
            )
        found[name] = path
    return found
