"""The texts of a tokenizer's tokens, as a tree of bytes that automata walk.

Letters: V ids of the model's vocabulary, N nodes of the tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Ints = NDArray[np.int32]


class Vocabulary(NamedTuple):
    """The tree of all texts. Node 0 is the empty text; a node's children have consecutive numbers,
    higher than its own, in order of their bytes."""

    byte: NDArray[np.uint8]
    """[N]: the last byte of the node's text; 0 for the root."""
    first_child: Ints
    """[N]"""
    children: Ints
    """[N]: how many it has."""
    node_of_token: Ints
    """[V]: -1 for tokens that have no text, or that grammars do not take for text."""
    eos_ids: tuple[int, ...]
    """Tokens that end a complete output."""
    digest: bytes
    """SHA-256 of the fields above."""

    @property
    def size(self) -> int:
        """V"""
        return len(self.node_of_token)

    @property
    def nodes(self) -> int:
        """N"""
        return len(self.byte)


def read_texts(tokenizer: LLTokenizer, size: int) -> list[bytes]:
    """The texts of the first `size` ids of a tokenizer; empty for those without one."""
    known = min(size, tokenizer.vocab_size)
    special = tokenizer.is_special_token
    texts = [b"" if special(token) else tokenizer.decode_bytes([token]) for token in range(known)]
    return texts + [b""] * (size - known)


def make_vocabulary(texts: Sequence[bytes], eos_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of tokens with these texts; an empty one stands for none."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    text = np.frombuffer(b"".join(texts), dtype=np.uint8)
    node_of_token = np.where(lengths > 0, 0, -1).astype(np.int32)
    node_of_token[list(eos_ids)] = -1
    # The node that each token has reached so far, level by level.
    left = np.flatnonzero(node_of_token == 0)
    bytes_, counts = [np.zeros(1, dtype=np.uint8)], [np.zeros(1, dtype=np.int32)]
    first, depth = 1, 0
    while left.size:
        before = node_of_token[left].astype(np.int64)
        keys, found = np.unique(before << 8 | text[starts[left] + depth], return_inverse=True)
        node_of_token[left] = first + found.reshape(-1)
        level = first - len(counts[-1])
        counts[-1] += np.bincount((keys >> 8) - level, minlength=len(counts[-1])).astype(np.int32)
        bytes_.append((keys & 255).astype(np.uint8))
        counts.append(np.zeros(len(keys), dtype=np.int32))
        first, depth = first + len(keys), depth + 1
        left = left[lengths[left] > depth]
    children = np.concatenate(counts)
    first_child = (1 + np.concatenate([[0], np.cumsum(children)[:-1]])).astype(np.int32)
    byte = np.concatenate(bytes_)
    digest = hashlib.sha256(repr(tuple(eos_ids)).encode())
    for part in (byte, children, node_of_token):
        digest.update(part.tobytes())
    return Vocabulary(byte, first_child, children, node_of_token, tuple(eos_ids), digest.digest())
