"""Checks the prompt that sets the scales of an fp8 KV cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from graphengine.options.checks import INT32_MAX, is_int, shown


def read_calibration(prompt: object, max_seq_len: int) -> str | tuple[int, ...]:
    """`kv_calibration` as text or token ids. ValueError, with the value, for anything else."""
    if isinstance(prompt, str):
        return prompt
    # Bytes are sequences of integers, but they are not token ids.
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence):
        raise ValueError(f"kv_calibration={shown(prompt)} must be text or a list of token ids")
    # Checked before the ids are read: a range may have any number of them.
    check_calibration_length(prompt, prompt, max_seq_len)
    for index, token in enumerate(prompt):
        if not is_int(token) or not 0 <= token <= INT32_MAX:
            raise ValueError(
                f"kv_calibration={shown(prompt)} has {shown(token)} at index {index}: token "
                f"ids are integers in [0, {INT32_MAX}]"
            )
    return tuple(map(int, prompt))


def check_calibration_length(prompt: object, ids: Sequence[int], max_seq_len: int) -> None:
    """ValueError, with both numbers, unless a request could have the `ids` of `prompt`."""
    try:
        count = len(ids)
    except OverflowError:  # a range of more than an index can count
        count = sys.maxsize
    if not count:
        raise ValueError(f"kv_calibration={prompt!r} holds no token")
    if count >= max_seq_len:
        raise ValueError(
            f"kv_calibration={shown(prompt)} has {count} tokens: "
            f"max_seq_len={max_seq_len} has room for {max_seq_len - 1} and a new one"
        )
