"""Builds a tokenizer from the metadata of a GGUF file, as the model's `tokenizer.json` has it.

The kinds and their names are llama.cpp's. Byte-level BPE ("gpt2") splits texts as its pre-tokenizer
says; SentencePiece's BPE ("llama") merges what makes the piece with the best score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from graphengine.models.checkpoints.gguf.file import GgufFile, read_gguf
from graphengine.models.checkpoints.gguf.splittings import SPLITTINGS, unknown_tokenizer
from graphengine.options.checks import shown
from graphengine.text.tokenizer_files import TokenizerFiles, library_errors, read_tokenizer_files

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
# llama.cpp's types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SPACE = "\u2581"
# Architectures whose pieces merge in the order of their ids, whatever their scores.
_BY_ID = ("gemma3",)


class _Vocabulary(NamedTuple):
    """The tokens of a file by id, with their types, and the ids that have a role."""

    file: GgufFile
    tokens: Sequence[str]
    types: Sequence[int]
    roles: Mapping[str, str]

    def of(self, *types: int) -> Iterator[tuple[int, str]]:
        """Ids and tokens of these types."""
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in types:
                yield index, token


def read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer of a GGUF file, or that of the `tokenizer.json` beside it if the file's own is
    not known. ValueError names the key at fault.
    """
    file = read_gguf(path)
    vocabulary = _vocabulary(file)
    if unknown_tokenizer(file) is not None and (path.parent / "tokenizer.json").is_file():
        return _read_beside(vocabulary)
    kind = file.value(f"{_KEY}model", str)
    with library_errors(f"{path} has no valid tokenizer"):
        if kind == "gpt2":
            library, begins = _byte_level(vocabulary)
        elif kind == "llama":
            library, begins = _sentencepiece(vocabulary)
        else:
            raise ValueError(
                f"{path} has {_KEY}model={shown(kind)}: 'gpt2' (byte-level BPE) and 'llama' "
                f"(SentencePiece) are read"
            )
        _add_tokens(library, vocabulary)
    add_bos = _flag(file, "add_bos_token", begins)
    return TokenizerFiles(
        library=library,
        special_tokens=vocabulary.roles,
        chat_templates=_templates(file),
        add_bos=add_bos and "bos_token" in vocabulary.roles,
        add_eos=_flag(file, "add_eos_token", False) and "eos_token" in vocabulary.roles,
    )


def _read_beside(vocabulary: _Vocabulary) -> TokenizerFiles:
    """The tokenizer of the files beside a GGUF file, with roles and templates that they lack.

    ValueError for a tokenizer of another model.
    """
    path = vocabulary.file.path
    read = read_tokenizer_files(path.parent)
    for index, token in vocabulary.of(_NORMAL):
        found = read.library.id_to_token(index)
        if found != token:
            raise ValueError(
                f"{path.parent / 'tokenizer.json'} is of another model than {path}: id {index} is "
                f"{shown(found)} in it, and {shown(token)} in {_KEY}tokens"
            )
    return replace(
        read,
        special_tokens={**vocabulary.roles, **read.special_tokens},
        chat_templates={**_templates(vocabulary.file), **read.chat_templates},
    )


def _vocabulary(file: GgufFile) -> _Vocabulary:
    tokens = _list(file, "tokens", str)
    types = _list(file, "token_type", int) if f"{_KEY}token_type" in file.metadata else None
    types = [_NORMAL] * len(tokens) if types is None else types
    _check_length(file, "token_type", types, tokens)
    roles = {}
    for role, key in _ROLES.items():
        index = file.metadata.get(_KEY + key)
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise ValueError(
                f"{file.path} has {_KEY}{key}={shown(index)}: must be one of {len(tokens)} ids"
            )
        roles[role] = tokens[index]
    return _Vocabulary(file, tokens, types, roles)


def _list(file: GgufFile, name: str, kind: type) -> list[Any]:
    values: list[Any] = file.value(_KEY + name, list)
    if not values or not all(type(value) is kind for value in values):
        raise ValueError(f"{file.path} has {_KEY}{name}, which is no list of {kind.__name__}")
    return values


def _check_length(file: GgufFile, name: str, values: Sequence[Any], tokens: Sequence[Any]) -> None:
    if len(values) != len(tokens):
        raise ValueError(
            f"{file.path} has {len(values)} values in {_KEY}{name}, and {len(tokens)} tokens"
        )


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    if _KEY + name not in file.metadata:
        return default
    return bool(file.value(_KEY + name, bool))


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether BOS comes first by default."""
    file = vocabulary.file
    name = file.value(f"{_KEY}pre", str)
    if name not in SPLITTINGS:
        raise ValueError(
            f"{file.path} has {_KEY}pre={shown(name)}: the pre-tokenizers "
            f"{', '.join(SPLITTINGS)} are known. With the model's own tokenizer.json beside the "
            f"file, that one is read"
        )
    splitting = SPLITTINGS[name]
    library = Tokenizer(
        models.BPE(_ids(vocabulary), _stored_merges(file), ignore_merges=splitting.whole)
    )
    if splitting.composed:
        library.normalizer = normalizers.NFC()
    words: list[Any] = []
    if splitting.digits:
        words = [pre_tokenizers.Digits(individual_digits=True)]
    words += [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns
    ]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.patterns)
    library.pre_tokenizer = pre_tokenizers.Sequence([*words, in_bytes])
    library.decoder = decoders.ByteLevel()
    return library, splitting.begins


def _ids(vocabulary: _Vocabulary) -> dict[str, int]:
    """Ids of all tokens; those that only fill up the vocabulary have no text."""
    filling = {index for index, token in vocabulary.of(_UNUSED) if token == f"[PAD{index}]"}
    return {token: index for index, token in enumerate(vocabulary.tokens) if index not in filling}


def _stored_merges(file: GgufFile) -> list[tuple[str, str]]:
    """The merges of a file, the first first: two tokens with a space between."""
    merges = []
    for merge in _list(file, "merges", str):
        at = merge.find(" ", 1)
        if at < 0:
            raise ValueError(f"{file.path} has the merge {shown(merge)}: two tokens are needed")
        merges.append((merge[:at], merge[at + 1 :]))
    return merges


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, and whether BOS comes first by default."""
    file = vocabulary.file
    tokens = [_piece(*each) for each in zip(vocabulary.tokens, vocabulary.types, strict=True)]
    ids = _ids(vocabulary._replace(tokens=tokens))
    prefix = _flag(file, "add_space_prefix", True)
    library = Tokenizer(
        models.BPE(
            ids,
            _merges(vocabulary._replace(tokens=tokens)),
            unk_token=vocabulary.roles.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    library.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    )
    first = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *first]
    )
    return library, True


def _piece(token: str, kind: int) -> str:
    """A token as merges make it: files have runs of spaces as spaces."""
    return _SPACE * len(token) if kind == _USER_DEFINED and not token.strip(" ") else token


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best piece first."""
    file = vocabulary.file
    if f"{_KEY}merges" in file.metadata:
        return _stored_merges(file)
    if file.metadata.get("general.architecture") in _BY_ID:
        scores: Sequence[float] = range(0, -len(vocabulary.tokens), -1)
    else:
        scores = _list(file, "scores", float)
        _check_length(file, "scores", scores, vocabulary.tokens)
    pieces = {token: scores[index] for index, token in vocabulary.of(_NORMAL, _USER_DEFINED)}
    merges = [
        (score, at, len(piece) - at, piece)
        for piece, score in pieces.items()
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(piece[:at], piece[at:]) for _, at, _, piece in merges]


def _add_tokens(library: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add the tokens that are found in texts before anything else is."""
    special = [token for _, token in vocabulary.of(_CONTROL, _UNKNOWN)]
    special += [token for token in vocabulary.roles.values() if token not in special]
    library.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special if token]
    )
    found = [token for _, token in vocabulary.of(_USER_DEFINED) if token.strip(" ")]
    if isinstance(library.decoder, decoders.ByteLevel):
        found = [token for _, token in vocabulary.of(_USER_DEFINED) if token]
    library.add_tokens([AddedToken(token, normalized=False) for token in found])


def _templates(file: GgufFile) -> dict[str, str]:
    """Chat templates by name."""
    templates = {}
    for key in file.metadata:
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            name = key.removeprefix(_TEMPLATE).lstrip(".") or "default"
            templates[name] = file.value(key, str)
    return templates
