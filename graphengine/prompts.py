"""What a caller may give as a prompt, and its token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from graphengine.text import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def prompt_ids(
    prompt: Prompt, *, tokenizer: Tokenizer | None, vocab_size: int, max_seq_len: int
) -> tuple[int, ...]:
    """Token ids of text, of chat messages, or of ids given as they are.

    ValueError, with the value and the limit, for a prompt that cannot be served.
    """
    if _is_chat(prompt) or isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json: give token ids as prompts")
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt)
        else:
            prompt = tokenizer.apply_chat_template(cast(Sequence[Message], prompt))
    ids = token_ids_of(prompt, vocab_size, "a prompt is text, token ids or chat messages")
    if not ids:
        raise ValueError("the prompt is empty: it holds no token")
    if len(ids) >= max_seq_len:
        raise ValueError(
            f"prompt of {len(ids)} tokens leaves no room for a new one in max_seq_len={max_seq_len}"
        )
    return ids


def token_ids_of(tokens: object, vocab_size: int, what: str) -> tuple[int, ...]:
    """`tokens` as ids. ValueError where they are none, which says `what` they are to be."""
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes | Mapping):
        raise ValueError(f"{what}, not {tokens!r}")
    return tuple(token_id(token, vocab_size) for token in tokens)


def token_id(token: object, vocab_size: int) -> int:
    """`token` as an id, from NumPy's and torch's integers too. ValueError if it is none."""
    index = -1
    if hasattr(token, "__index__") and not isinstance(token, bool):
        with suppress(TypeError):  # an array of several
            index = operator.index(token)
    if not 0 <= index < vocab_size:
        raise ValueError(f"token id {token!r} is outside the vocabulary of {vocab_size}")
    return index


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_batch(prompts: object) -> bool:
    """Whether `prompts` is a list of prompts, rather than one: text, token ids or chat messages."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not prompts:
        return False
    first = prompts[0]
    # A tensor of no dimension is a token id that only claims to be iterable.
    return (
        isinstance(first, Iterable)
        and not isinstance(first, Mapping)
        and getattr(first, "ndim", 1) > 0
    )
