"""Text to token ids, and token ids to text as they come.

Decoders of the `tokenizers` library come in three kinds here:
    byte level      GPT-2's alphabet (Llama 3, Qwen): a token is bytes, the text is their UTF-8
    byte fallback   sentencepiece's: a token is text, or one byte of a character, `<0xE2>`
    by window       all others: a token's text follows from itself and the token before it
"""

from __future__ import annotations

import codecs
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from graphengine.chat import ChatTemplate, Messages, Tools
from graphengine.stopping import StopStrings

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Tokens (or whole characters of byte tokens) that a window shows the decoder before the new one.
_CONTEXT_UNITS = 4
# Tokens that are held back at most where a decoder of unknown kind ends in an incomplete character.
_HELD_TOKENS = 8


class Tokenizer:
    """A checkpoint's `tokenizer.json` with its special tokens and chat templates.

    Ids without a token have no text, as with `tokenizers`: a model's vocabulary may be padded.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ) -> None:
        """Takes `library` over: truncation and padding are switched off.

        special_tokens  by role: {"bos_token": "<s>", ...}; what chat templates see
        chat_templates  jinja source by name: "default", "tool_use", ...
        add_bos         whether `encode` puts the token there, None: as the post-processor does
        """
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.special_tokens = dict(special_tokens or {})
        self._templates = {
            name: ChatTemplate(source) for name, source in (chat_templates or {}).items()
        }
        self._affixes = self._explicit_affixes(add_bos, add_eos)

        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        kinds = _decoder_kinds(library)
        self.is_byte_level = kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}
        self.has_byte_fallback = "ByteFallback" in kinds
        self._byte_ids = self._find_byte_ids() if self.has_byte_fallback else {}
        self._byte_of_id = {index: byte for byte, index in self._byte_ids.items()}
        # What a byte-level token adds to a text, by whether special tokens are skipped; filled as
        # tokens come, for all requests.
        self.known_bytes: dict[bool, dict[int, bytes]] = {False: {}, True: {}}

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Read a Hugging Face directory: `tokenizer.json`, and where they are there
        `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja` and
        `additional_chat_templates/*.jinja`. ValueError names the file at fault.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{directory} has no tokenizer.json")
        try:
            library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        config = _read_json_object(directory / "tokenizer_config.json")
        named = _read_json_object(directory / "special_tokens_map.json") | config
        roles = {
            role: content
            for role, token in named.items()
            if role.endswith("_token") and (content := _content(token)) is not None
        }
        _mark_special(library, [*roles.values(), *_unnamed_special_tokens(named)])
        return cls(
            library,
            special_tokens=roles,
            chat_templates=_read_chat_templates(directory, config),
            add_bos=_optional_flag(config, "add_bos_token"),
            add_eos=_optional_flag(config, "add_eos_token"),
        )

    @property
    def vocab_size(self) -> int:
        """Tokens, the added ones included. A model's vocabulary may be larger (padding)."""
        return self._library.get_vocab_size(with_added_tokens=True)

    @property
    def largest_id(self) -> int:
        """The last id that has a token; a model's vocabulary may go on behind it."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of_role("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of_role("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of_role("pad_token")

    def to_json(self) -> str:
        """The content of a `tokenizer.json`, with the special tokens that other files name."""
        return str(self._library.to_str())

    def token_to_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._library.id_to_token(_checked_id(token_id))

    def encode(
        self, text: str, add_special_tokens: bool = True, add_bos: bool | None = None
    ) -> list[int]:
        """Token ids of `text`; names of special tokens in it become those tokens.

        add_special_tokens  with BOS and EOS as `tokenizer_config.json` says (`add_bos_token`,
                            `add_eos_token`), or as `tokenizer.json` does where it says nothing
        add_bos             True: exactly one BOS comes first, False: none does, whatever the text
                            and the configuration say, as in Megatron's text generation controller;
                            None: it is left as it is. ValueError for True without a BOS
        """
        if not isinstance(text, str):
            raise ValueError(f"text to encode must be a string, got {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text to encode has a lone surrogate {text[error.start]!r} at {error.start}"
            ) from error
        if self._affixes is None or not add_special_tokens:
            ids: list[int] = self._library.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            before, after = self._affixes
            ids = [*before, *self._library.encode(text, add_special_tokens=False).ids, *after]
        return ids if add_bos is None else self._with_bos(ids, add_bos)

    def _with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        """`ids` behind one BOS token, or behind none."""
        bos = self.bos_token_id
        if bos is None:
            if wanted:
                raise ValueError(
                    f"add_bos=True, but the tokenizer's bos_token is "
                    f"{self.special_tokens.get('bos_token')!r}, which is not in the vocabulary"
                )
            return ids
        first = next((index for index, token in enumerate(ids) if token != bos), len(ids))
        return [bos] * wanted + ids[first:]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`: what `tokenizers` makes of them, with one exception.

        Where a run of byte fallback tokens is not UTF-8, `tokenizers` replaces every byte of the
        run, complete characters included; here those are kept, as text that has been streamed
        cannot be called back, and each byte that belongs to none becomes U+FFFD.
        """
        ids = [_checked_id(token_id) for token_id in ids]
        text = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        if not (self.has_byte_fallback and REPLACEMENT in text):
            return text
        decoder = IncrementalDecoder(self, skip_special_tokens=skip_special_tokens)
        return "".join(map(decoder.push, ids)) + decoder.flush()

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation as the checkpoint's template writes it.

        messages                dicts with "role" and "content" (text, or a list of dicts); more
                                keys may follow
        add_generation_prompt   with the beginning of the assistant's answer
        tools                   JSON schemas of functions; the template "tool_use" is taken where
                                there is one
        continue_final_message  end with the text of the last message, which the model then goes on
                                with. ValueError together with `add_generation_prompt`, for a last
                                message without text, and where the template does not write it out
        """
        text = self.render_chat(messages, add_generation_prompt, tools, continue_final_message)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text that `apply_chat_template` encodes."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            others = f"; it has templates named {sorted(self._templates)}" * bool(self._templates)
            raise ValueError(f"the checkpoint has no chat template{others}: give text or token ids")
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self.special_tokens,
            continue_final_message=continue_final_message,
        )

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None where it stands for text."""
        if self.has_byte_fallback:
            byte = self._byte_of_id.get(token_id)
            return None if byte is None else bytes([byte])
        token = self._library.id_to_token(token_id) if self.is_byte_level else None
        return None if token is None else _byte_level_bytes(token)

    def byte_id(self, byte: int) -> int | None:
        """The byte fallback token of `byte`."""
        return self._byte_ids.get(byte)

    def _id_of_role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._library.token_to_id(token)

    def _explicit_affixes(
        self, add_bos: bool | None, add_eos: bool | None
    ) -> tuple[list[int], list[int]] | None:
        """Tokens before and after a text, or None where the post-processor knows them."""
        if add_bos is None and add_eos is None:
            return None
        automatic = self._library.encode("", add_special_tokens=True).ids
        affixes = []
        for role, wanted in (("bos_token", add_bos), ("eos_token", add_eos)):
            token = self._id_of_role(role)
            if wanted and token is None:
                raise ValueError(
                    f"tokenizer_config.json asks for add_{role}, but {role} is "
                    f"{self.special_tokens.get(role)!r}, which is not in the vocabulary"
                )
            present = token in automatic if wanted is None else wanted
            affixes.append([token] if present and token is not None else [])
        return affixes[0], affixes[1]

    def _find_byte_ids(self) -> dict[int, int]:
        ids = ((byte, self._library.token_to_id(f"<0x{byte:02X}>")) for byte in range(256))
        return {byte: index for byte, index in ids if index is not None}


class IncrementalDecoder:
    """Turns token ids into text one at a time.

    All deltas together, `flush` included, are `tokenizer.decode` of all ids. A delta never ends in
    half a character: up to three bytes are held back until the character is complete or cannot
    be. A push costs the same however many came before it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._known_bytes = tokenizer.known_bytes[skip_special_tokens]
        # `tokenizers` writes one U+FFFD for each incomplete character of byte level tokens, but one
        # for each byte of fallback tokens; surrogates tell such a byte from U+FFFD in the text.
        errors = "replace" if tokenizer.is_byte_level else "surrogateescape"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        # A window's decoder sees the last units: a token, or the byte tokens of one character.
        self._context: list[list[int]] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often empty."""
        if self._tokenizer.is_byte_level:
            # 1.0 would find what 1 left.
            shown = self._known_bytes.get(token_id) if type(token_id) is int else None
            if shown is None:
                shown = self._known_bytes[token_id] = self._bytes_of(token_id) or b""
            return self._utf8.decode(shown)
        if self._is_silent(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if data is not None:
            return self._push_characters(self._utf8.decode(data))
        return self._end_bytes() + self._push_unit([token_id])

    def _is_silent(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is None or token_id in self._skipped

    def _bytes_of(self, token_id: int) -> bytes | None:
        return None if self._is_silent(token_id) else self._tokenizer.token_bytes(token_id)

    def flush(self) -> str:
        """The text still held back, an incomplete character as U+FFFD. No push may follow."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._end_bytes() + self._push_unit([], final=True)

    def _end_bytes(self) -> str:
        return self._push_characters(self._utf8.decode(b"", final=True))

    def _push_characters(self, characters: str) -> str:
        return "".join(map(self._push_character, characters))

    def _push_character(self, character: str) -> str:
        """A character of byte tokens, or a byte that belongs to none, as a surrogate."""
        if "\udc80" <= character <= "\udcff":
            text = self._push_unit([], final=True) + REPLACEMENT
            if not self._context and (anchor := self._any_graphic_byte()):
                # The text has begun: the decoder must not strip the next token's space.
                self._remember(anchor)
            return text
        ids = (self._tokenizer.byte_id(byte) for byte in character.encode())
        return self._push_unit([index for index in ids if index is not None], final=True)

    def _push_unit(self, unit: list[int], final: bool = False) -> str:
        """The text that `unit` adds to that of the context; `final`: it ends no half character."""
        self._held += unit
        text = self._decode([*self._context, self._held])
        if text.endswith(REPLACEMENT) and len(self._held) < _HELD_TOKENS and not final:
            return ""
        delta = text[len(self._context_text) :]
        # Tokens without text must not push out those that show the decoder that text has begun.
        if self._held and (delta or len(self._context) < _CONTEXT_UNITS):
            self._remember(self._held)
        self._held = []
        return delta

    def _remember(self, unit: list[int]) -> None:
        context = [*self._context, unit]
        if len(context) > _CONTEXT_UNITS:
            # To some decoders a run of byte tokens is one piece: it must not become the first one.
            begins_run = not self._is_bytes(context[0]) and self._is_bytes(context[1])
            del context[1 if begins_run else 0]
        self._context, self._context_text = context, self._decode(context)

    def _is_bytes(self, unit: list[int]) -> bool:
        return self._tokenizer.token_bytes(unit[0]) is not None

    def _decode(self, units: list[list[int]]) -> str:
        ids = [index for unit in units for index in unit]
        return self._tokenizer._library.decode(ids, skip_special_tokens=False)

    def _any_graphic_byte(self) -> list[int]:
        ids = (self._tokenizer.byte_id(byte) for byte in range(ord("!"), ord("~") + 1))
        return [index for index in ids if index is not None][:1]


class TextStream:
    """A request's text: token ids in, text out up to a stop string.

    include_stop         whether a stop string that ends the text stays in it
    skip_special_tokens  whether special tokens have no text
    min_tokens           a stop string that is complete with one of the first so many tokens is text

    `lengths[i]` counts the characters that became certain with token i, those of a stop string and
    of what follows it included. A push costs the same however many came before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.lengths: list[int] = []
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._silent = False

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(text that became certain, the stop string that has ended the text)."""
        text = self._decoder.push(token_id)
        self.lengths.append(len(text))
        if self._stops is None:
            return text, None
        return self._stops.push(text, armed=len(self.lengths) > self._min_tokens)

    def take(self, token_ids: Sequence[int], silent: bool = False) -> tuple[str, int, str | None]:
        """(text that became certain, tokens up to the end of the text, the stop string there).

        silent  the last token has no text
        """
        text = ""
        for taken, token_id in enumerate(token_ids[:-1] if silent else token_ids, start=1):
            piece, matched = self.push(token_id)
            text += piece
            if matched is not None:
                return text, taken, matched
        if silent:
            self.lengths.append(0)
            self._silent = True
        return text, len(token_ids), None

    def flush(self) -> str:
        """The text still held back; nothing after a stop string. To be called once, at the end."""
        text = self._decoder.flush()
        if text:
            self.lengths[-2 if self._silent else -1] += len(text)
        if self._stops is None:
            return text
        text, _ = self._stops.push(text, armed=len(self.lengths) > self._min_tokens)
        return text + self._stops.flush()


def _decoder_kinds(library: tokenizers.Tokenizer) -> list[str]:
    """Types of the decoder's members, in order."""
    if library.decoder is None:
        return []
    description = json.loads(library.decoder.__getstate__())
    return [member["type"] for member in description.get("decoders", [description])]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: graphic ones stand for themselves, others from U+0100 on."""
    graphic = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(graphic))
    return {chr(byte): byte for byte in graphic} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Added tokens may be written in any characters: those stand for themselves."""
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _checked_id(token_id: int) -> int:
    """`token_id` as an int, from NumPy's integers too."""
    try:
        value = operator.index(token_id)
    except TypeError:
        value = -1
    if not 0 <= value < 2**32:
        raise ValueError(f"token id {token_id!r} is not an integer in [0, 2**32)")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def _read_json_object(file: Path) -> dict[str, Any]:
    """The object in `file`; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds {type(value).__name__}")
    return value


def _content(token: Any) -> str | None:
    """A special token's text: it is written as a string or as an object with flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _unnamed_special_tokens(named: Mapping[str, Any]) -> list[str]:
    """Special tokens that have no role: listed ones and those that are flagged as special."""
    listed = [named.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    tokens = [
        token
        for group in listed
        if group
        for token in (group.values() if isinstance(group, dict) else group)
    ]
    flagged = (named.get("added_tokens_decoder") or {}).values()
    tokens += [token for token in flagged if isinstance(token, dict) and token.get("special")]
    return [content for token in tokens if (content := _content(token)) is not None]


def _mark_special(library: tokenizers.Tokenizer, tokens: Sequence[str]) -> None:
    """Make tokens of the vocabulary special; ones that a model cannot know are left out."""
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
        raise ValueError(f"tokenizer_config.json has {key}={value!r}: must be true or false")
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
    try:
        return {entry["name"]: str(entry["template"]) for entry in written}
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"tokenizer_config.json has chat_template={written!r}: "
            "must be a string or a list of objects with name and template"
        ) from error
