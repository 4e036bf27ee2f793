"""Reads a corpus that drafts are looked up in: a text, or tokens."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from graphengine.kernels.draft.suffix import MAX_CORPUS
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.paths import expand_user, read_text
from graphengine.text.tokenizer import Tokenizer


def read_corpus(path: str | os.PathLike[str], checkpoint: Checkpoint, vocab_size: int) -> Tensor:
    """The corpus's tokens: int32 [C] on the CPU.

    A file whose name ends in `.npy` holds integers [C] as NumPy saves them, any other a text in
    UTF-8, which the checkpoint's tokenizer splits. ValueError names the file and the fault;
    FileNotFoundError where there is none.
    """
    name, file = os.fspath(path), expand_user(path)
    ids = _saved_ids(name, file) if file.suffix.lower() == ".npy" else _text_ids(name, checkpoint)
    if not 1 <= ids.size <= MAX_CORPUS:
        raise ValueError(f"corpus {name} has {ids.size} tokens, not 1 to {MAX_CORPUS}")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        at = int(outside[0])
        raise ValueError(
            f"corpus {name} has token {ids[at]} at index {at}, the vocabulary has {vocab_size}"
        )
    return torch.from_numpy(ids.astype(np.int32))


def _saved_ids(name: str, file: Path) -> np.ndarray:
    try:
        ids = np.load(file, allow_pickle=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"corpus {name}: there is no such file") from error
    except OSError as error:
        raise ValueError(f"corpus {name}: {error}") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"corpus {name} is no array of integers as NumPy saves one") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        kind = f"{ids.dtype} {ids.shape}" if isinstance(ids, np.ndarray) else "an archive"
        raise ValueError(f"corpus {name} must be integers [C], not {kind}")
    return ids


def _text_ids(name: str, checkpoint: Checkpoint) -> np.ndarray:
    if not checkpoint.has_tokenizer:
        raise ValueError(f"{checkpoint.path} has no tokenizer.json to split corpus {name} with")
    text = read_text(name, "corpus")
    return np.array(Tokenizer.from_directory(checkpoint.path).encode(text), dtype=np.int64)
