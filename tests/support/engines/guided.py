"""Grammars, and the sampling with which requests follow them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WORDS = r"[a-z]{3,9}(, [a-z]{1,5}){2}\."
CHOICE = ("yes", "no", "not at all")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"seed": 5},
    {"seed": 6, "top_k": 40, "top_p": 0.95, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 0},
)


def schema(required: Sequence[str]) -> dict[str, Any]:
    """A JSON schema of a closed object with a string, an integer and an array."""
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "size": {"type": "integer", "minimum": -5, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["x", "yz", 1, None]}, "maxItems": 3},
        },
        "required": [*required],
        "additionalProperties": False,
    }
