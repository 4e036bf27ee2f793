"""Reads a checkpoint's JSON files, each of which must be an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a file. ValueError, with the file's name, for anything else."""
    return parse_json_object(file.read_bytes(), str(file))


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """Parse a text that is a JSON object. A ValueError, which begins with `what`, for anything
    else.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, it is {type(value).__name__}")
    return value
