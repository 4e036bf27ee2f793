"""Trimmed draft vocabularies: the part of a vocabulary that a draft module scores.

It is a choice of N target ids, ascending, one for each row of a smaller lm_head, and is written
down as EAGLE3 checkpoints do: `target = draft + d2t[draft]`.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from graphengine.options.checks import check_at_least, check_path, is_int, keep_plain_numbers

PathName = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """The part of the vocabulary that a draft module scores: either a text's or a checkpoint's.

    text    a UTF-8 file; its `size` most frequent tokens are taken
    size    number of tokens; only with `text`
    tensor  name of the checkpoint's tensor of offsets, `d2t`; int64, one for each draft id
    """

    text: PathName | None = None
    size: int | None = None
    tensor: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tensor is None):
            raise ValueError(
                f"a draft vocabulary is of a text or of a tensor, one of them: "
                f"text={self.text!r}, tensor={self.tensor!r}"
            )
        if self.tensor is not None:
            if not isinstance(self.tensor, str) or not self.tensor:
                raise ValueError(f"tensor={self.tensor!r} must be the name of a tensor")
            if self.size is not None:
                raise ValueError(f"size={self.size!r} is for a text: the tensor has its own")
            return
        check_path("text", self.text)
        check_at_least("size", self.size, 1)
        keep_plain_numbers(self)


def describe_vocabulary(vocabulary: DraftVocabulary) -> str:
    """Text for reports: the tensor's name, or the number of tokens and the text's name."""
    if vocabulary.text is None:
        return f"draft vocabulary {vocabulary.tensor}"
    return f"draft vocabulary of {vocabulary.size} tokens from {Path(vocabulary.text).name}"


def frequent_tokens(
    token_ids: Iterable[int], size: int, vocab_size: int, always: Iterable[int] = ()
) -> torch.Tensor:
    """The `size` most frequent ids of a tokenized text, ascending: int64 [size] on the CPU.

    Among equally frequent ids the lower one goes first. If the text has too few different tokens,
    the lowest remaining ids make up for them.

    Args:
        token_ids: the text's, in any order.
        size: how many to take, at most `vocab_size`.
        vocab_size: ids are 0 .. vocab_size - 1; ValueError for any other.
        always: ids that are taken in any case, end-of-sequence ids above all. ValueError if there
            are more of them than `size`.
    """
    if not is_int(size) or not 1 <= size <= vocab_size:
        raise ValueError(f"size={size!r} must be an integer in [1, {vocab_size}], the vocabulary")
    chosen = set(always)
    counts = Counter(token_ids)
    for name, ids in (("always", chosen), ("the text", counts.keys())):
        for token in ids:
            if not is_int(token) or not 0 <= token < vocab_size:
                raise ValueError(f"{name} has token {token!r}, the vocabulary has {vocab_size}")
    if len(chosen) > size:
        raise ValueError(f"always has {len(chosen)} tokens, more than size={size}")

    for token in chosen:
        counts.pop(token, None)
    ranked = heapq.nsmallest(
        size - len(chosen), counts.items(), key=lambda item: (-item[1], item[0])
    )
    chosen.update(token for token, _ in ranked)
    for token in range(vocab_size):
        if len(chosen) == size:
            break
        chosen.add(token)
    return torch.tensor(sorted(int(token) for token in chosen), dtype=torch.int64)


def target_ids(d2t: torch.Tensor, vocab_size: int, name: str = "d2t") -> torch.Tensor:
    """The target id of each draft id, `draft + d2t[draft]`: new int64 [N], ascending.

    ValueError, which calls the tensor `name`, unless `d2t` is int64 [N] and the targets are
    strictly ascending and within the vocabulary.
    """
    ids = offset_ids(d2t, vocab_size, name)
    falling = torch.nonzero(ids[1:] <= ids[:-1])
    if falling.numel():
        draft = int(falling[0])
        raise ValueError(
            f"{name} maps drafts {draft} and {draft + 1} to tokens {int(ids[draft])} and "
            f"{int(ids[draft + 1])}: they must ascend"
        )
    return ids


def offset_ids(d2t: torch.Tensor, vocab_size: int, name: str = "d2t") -> torch.Tensor:
    """Like `target_ids`, but the ids need not ascend."""
    shape = tuple(d2t.shape)
    if d2t.dtype != torch.int64 or len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"{name} must be int64 [N], not {d2t.dtype} {shape}")
    ids = d2t + torch.arange(d2t.numel(), device=d2t.device)
    outside = torch.nonzero((ids < 0) | (ids >= vocab_size))
    if outside.numel():
        draft = int(outside[0])
        raise ValueError(
            f"{name} maps draft {draft} to token {int(ids[draft])}, the vocabulary has {vocab_size}"
        )
    return ids


def read_offsets(file: str | os.PathLike[str], name: str, vocab_size: int) -> torch.Tensor:
    """The tensor of offsets `name` of a safetensors file, checked as by `target_ids`; on the CPU.

    ValueError names the file.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            if name not in tensors.keys():  # noqa: SIM118  (no mapping: it has only the method)
                raise ValueError(f"{os.fspath(file)} has no tensor {name}")
            d2t: torch.Tensor = tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{os.fspath(file)} cannot be read: {error}") from error
    target_ids(d2t, vocab_size, f"{os.fspath(file)}: {name}")
    return d2t
