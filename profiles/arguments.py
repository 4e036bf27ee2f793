"""Values of command-line options."""

from __future__ import annotations


def integers(text: str, name: str) -> list[int]:
    """Positive integers, comma-separated. ValueError names the option and shows the text."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name}={text!r} must be positive integers, comma-separated: 1,8,32")
    return [int(part) for part in parts]
