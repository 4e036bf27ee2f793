"""Encode text that follows other text, without what a tokenizer does at a text's beginning."""

from __future__ import annotations

import json
from typing import Any

import tokenizers


def continuing(library: tokenizers.Tokenizer, *, after_added: bool) -> tokenizers.Tokenizer:
    """The tokenizer for a text in the middle of another; `library` itself where nothing differs.

    after_added  whether an added token, such as end-of-sequence, comes right before it. `library`
                 splits a text at added tokens, and some members treat each part as a beginning:
                 Llama 2's `Prepend`, Metaspace's "always". These still do so then; Metaspace's
                 "first" does not
    """
    changed: dict[str, Any] = {}
    for name in ("normalizer", "pre_tokenizer"):
        member = getattr(library, name)
        before = None if member is None else json.loads(member.__getstate__())
        after = None if before is None else _continued(before, after_added)
        if after != before:
            changed[name] = after
    if not changed:
        return library
    return tokenizers.Tokenizer.from_str(json.dumps(json.loads(library.to_str()) | changed))


def _continued(member: dict[str, Any], after_added: bool) -> dict[str, Any] | None:
    """The description of a member that adds or strips nothing at the beginning; None: no member."""
    match member:
        case {"type": "Sequence"}:
            key = "normalizers" if "normalizers" in member else "pretokenizers"
            kept = (_continued(each, after_added) for each in member[key])
            return member | {key: [each for each in kept if each is not None]}
        case {"type": "Metaspace", "prepend_scheme": "first"}:
            return member | {"prepend_scheme": "never"}
        case _ if after_added:
            return member
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return member | {"prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return member | {"add_prefix_space": False}
        case {"type": "Strip", "strip_left": True}:
            return member | {"strip_left": False}
    return member
