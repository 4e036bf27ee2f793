"""Reads the files next to a `tokenizer.json`: roles, added tokens, flags, chat templates.

The files are untrusted. The type of each value is checked where it is read, and a ValueError names
the file and the key at fault.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

log = logging.getLogger(__name__)

WRITE_TOKENIZER = (
    "transformers writes that file, also for a folder with a tokenizer.model: "
    'python -c "from transformers import AutoTokenizer as T; '
    "T.from_pretrained('FOLDER').save_pretrained('FOLDER')\""
)
"""How to get a `tokenizer.json`."""
_CONFIG = "tokenizer_config.json"
_ADDED = "added_tokens.json"
_MAP = "special_tokens_map.json"
_ROLES = frozenset(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_TOKEN_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """A directory's tokenizer as its files describe it.

    special_tokens  by role: {"bos_token": "<s>", ...}
    chat_templates  jinja source by name
    add_bos         whether texts begin with BOS; None: as the post-processor does
    """

    library: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    add_bos: bool | None
    add_eos: bool | None


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read `tokenizer.json` and the other files that exist. ValueError names the file at fault.

    Tokens in `added_tokens_decoder` (in `tokenizer_config.json`), or without it in
    `added_tokens.json`, are added where `tokenizer.json` lacks them, as in transformers: in the
    order of their ids, which must directly follow those of `tokenizer.json`.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{directory} has no tokenizer.json")
    with library_errors(f"{file} is not a tokenizer"):
        library = tokenizers.Tokenizer.from_file(str(file))
    config = _read_json_object(directory / _CONFIG)
    named = _read_json_object(directory / _MAP) | config
    roles = {
        role: content
        for role, token in named.items()
        if role.endswith("_token") and (content := _role_content(role, token)) is not None
    }
    special = [*roles.values(), *_unnamed_special_tokens(named)]
    with library_errors(f"{file} cannot take the added tokens of the files beside it"):
        _add_tokens(library, _added_tokens(directory, config, special))
        _mark_special(library, special)
    return TokenizerFiles(
        library=library,
        special_tokens=roles,
        chat_templates=_read_chat_templates(directory, config),
        add_bos=_optional_flag(config, "add_bos_token"),
        add_eos=_optional_flag(config, "add_eos_token"),
    )


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn whatever `tokenizers` raises in the block into a ValueError that begins with `what`.

    It raises plain Exception, and where its Rust code panics a BaseException, which `except
    Exception` does not catch. Exceptions of the user or the interpreter pass through, and so does a
    ValueError that already says what is wrong.
    """
    try:
        yield
    except BaseException as error:
        panics = type(error).__name__ == "PanicException"
        if type(error) is ValueError or not (panics or isinstance(error, Exception)):
            raise
        said = f"tokenizers panicked: {error}" if panics else str(error)
        raise ValueError(f"{what}: {said}") from error


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def _read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty where there is no such file."""
    if not file.is_file():
        return {}
    text = _read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds {type(value).__name__}")
    return value


def _wrong(file: str, key: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"{file} has {key}={value!r}: must be {wanted}")


def _content(token: Any) -> str | None:
    """A special token's text: it is written as a string or as an object with flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _role_content(role: str, token: Any) -> str | None:
    """The text of a role's token; None if it has none. Keys like `add_bos_token` are not roles."""
    content = _content(token)
    if content is None and token is not None and role in _ROLES:
        raise _wrong(_CONFIG, role, token, "a string, an object with `content`, or null")
    return content


def _unnamed_special_tokens(named: Mapping[str, Any]) -> list[str]:
    """Special tokens without a role."""
    contents = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        group = named.get(key)
        tokens = list(group.values()) if isinstance(group, dict) else group
        if tokens is None:
            continue
        found = [_content(token) for token in tokens] if isinstance(tokens, list) else [None]
        if None in found:
            raise _wrong(_CONFIG, key, group, "a list of strings or of objects with `content`")
        contents += [content for content in found if content is not None]
    return contents


def _added_tokens(
    directory: Path, config: Mapping[str, Any], special: Sequence[str]
) -> dict[int, tokenizers.AddedToken]:
    """Tokens to add to those of `tokenizer.json`, by id."""
    described = config.get("added_tokens_decoder")
    if described is None:
        listed = _read_json_object(directory / _ADDED)
        return {
            _token_id(_ADDED, name, index): tokenizers.AddedToken(
                name, special=name in special, normalized=name not in special
            )
            for name, index in listed.items()
        }
    if not isinstance(described, dict):
        raise _wrong(_CONFIG, "added_tokens_decoder", described, "an object of tokens by id")
    return {
        _token_id(_CONFIG, "added_tokens_decoder", index): _added_token(index, token)
        for index, token in described.items()
    }


def _token_id(file: str, key: str, index: Any) -> int:
    if isinstance(index, str) and index.isascii() and index.isdecimal() and len(index) <= 10:
        index = int(index)
    if type(index) is not int or not 0 <= index < 2**32:
        raise _wrong(file, key, index, "a token id in [0, 2**32)")
    return index


def _added_token(index: str, token: Any) -> tokenizers.AddedToken:
    where = f"added_tokens_decoder[{index}]"
    content = _content(token)
    if content is None or not isinstance(token, dict):
        raise _wrong(_CONFIG, where, token, "an object with `content`")
    flags = {flag: token[flag] for flag in _TOKEN_FLAGS if flag in token}
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise _wrong(_CONFIG, f"{where}.{flag}", value, "true or false")
    return tokenizers.AddedToken(content, **flags)


def _add_tokens(library: tokenizers.Tokenizer, tokens: Mapping[int, tokenizers.AddedToken]) -> None:
    """Add the tokens that are missing or have other flags."""
    there = {repr(token) for token in library.get_added_tokens_decoder().values()}
    missing = {index: token for index, token in sorted(tokens.items()) if repr(token) not in there}
    library.add_tokens(list(missing.values()))
    for index, token in missing.items():
        given = library.token_to_id(token.content)
        if given != index and token.content:
            log.warning(
                "added token %r is to have id %d, but in tokenizer.json it comes to %s",
                token.content,
                index,
                given,
            )


def _mark_special(library: tokenizers.Tokenizer, tokens: Sequence[str]) -> None:
    """Make tokens of the vocabulary special; tokens that a model cannot know are left out."""
    known = {
        token.content for token in library.get_added_tokens_decoder().values() if token.special
    }
    missing = [
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token in dict.fromkeys(tokens)
        if token not in known and library.token_to_id(token) is not None
    ]
    library.add_special_tokens(missing)


def _optional_flag(config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(_CONFIG, key, value, "true or false")
    return value


def _read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Sources by name. Files take precedence over `tokenizer_config.json`, as in transformers."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in directory.glob("additional_chat_templates/*.jinja")}
    templates = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    if templates:
        return templates
    written = config.get("chat_template")
    if written is None:
        return {}
    if isinstance(written, str):
        return {"default": written}
    for entry in written if isinstance(written, list) else [written]:
        named = entry if isinstance(written, list) and isinstance(entry, dict) else {}
        if not all(isinstance(named.get(key), str) for key in ("name", "template")):
            raise _wrong(
                _CONFIG,
                "chat_template",
                written,
                "a string or a list of objects with name and template",
            )
    return {entry["name"]: entry["template"] for entry in written}
