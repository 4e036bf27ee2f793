"""The decoders of `tokenizers`, one token at a time.

The library decodes all tokens at once: each member of a decoder turns a list of texts into another
list, and the last list is joined. Here each member that a language model's decoder has is a stage,
which takes the texts in pieces and passes on what later tokens can no longer change. Everything
that a stage passes on, `flush` included, equals what the library makes of the same texts. What each
stage holds back:

    ByteFallback  an incomplete character: up to three bytes
    Strip         characters at the end of a joined text that may be stripped
    Replace       what may begin the pattern at the end of a joined text

Decoders with another member, such as BERT's, are streamed by the library's `DecodeStream`. It does
not serve the members above: it fails where a broken byte follows a line break that is a byte
fallback token, too, and of a run of broken bytes it shows nothing, in quadratic time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import tokenizers
from tokenizers import decoders

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Piece(NamedTuple):
    """A part of one text of a list; `begins` and `ends` say whether it is the first and the last.

    A whole text is one piece with both set.
    """

    text: str
    begins: bool = True
    ends: bool = True


class Stage(Protocol):
    """A member of a decoder."""

    @property
    def settled(self) -> bool:
        """Whether what comes next neither begins a text nor continues one that is held back: what
        becomes of it, up to the next settled state, depends on nothing before it.
        """

    def push(self, piece: Piece) -> Iterable[Piece]:
        """The pieces that this one made certain."""

    def flush(self) -> Iterable[Piece]:
        """The remaining pieces, as no more will come. Call it once."""


class TextDecoder(Protocol):
    """Turns one text's tokens into text."""

    @property
    def settled(self) -> bool:
        """Whether a token's text depends on that token alone, if this is still true after it."""

    def push(self, token: str) -> str:
        """The text that this token made certain."""

    def flush(self) -> str:
        """The rest of the text. Call it once."""


def text_decoder(library: tokenizers.Tokenizer, *, continues: bool = False) -> TextDecoder:
    """The decoder of a tokenizer. ValueError and panics of the library pass through.

    continues  whether the text follows other text: no stage then treats it as a beginning. The
               library's own stream sees only the new text
    """
    members = decoder_members(library)
    stages: list[Stage] = []
    first = not continues
    for member in members:
        stage = _make_stage(member, first=first, begins=not continues)
        if stage is None:
            return LibraryStream(library)
        stages.append(stage)
        # A joined text begins with what came before.
        first |= isinstance(stage, _Concatenated)
    return Pipeline(stages) if stages else LibraryStream(library)


class Pipeline:
    """The stages of a decoder, each of which takes what the one before it passes on."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._began = False

    @property
    def settled(self) -> bool:
        return all(stage.settled for stage in self._stages)

    def push(self, token: str) -> str:
        self._began = True
        return self._through([Piece(token)], 0)

    def flush(self) -> str:
        if not self._began:
            return ""
        return "".join(
            self._through(stage.flush(), index) for index, stage in enumerate(self._stages, start=1)
        )

    def _through(self, pieces: Iterable[Piece], first: int) -> str:
        for stage in self._stages[first:]:
            pieces = [made for piece in pieces for made in stage.push(piece)]
        return "".join(piece.text for piece in pieces)


class LibraryStream:
    """The library's stream, which holds back a text that ends in U+FFFD.

    It fails where a token changes text that was passed on, as no token of BERT does.
    """

    # What its tokens make depends on those before them.
    settled = False

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._stream = decoders.DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._pieces: list[str] = []

    def push(self, token: str) -> str:
        index = self._library.token_to_id(token)
        assert index is not None, f"{token=}"
        text = self._stream.step(self._library, index) or ""
        self._ids.append(index)
        self._pieces.append(text)
        return text

    def flush(self) -> str:
        whole: str = self._library.decode(self._ids, skip_special_tokens=False) if self._ids else ""
        so_far = "".join(self._pieces)
        if not whole.startswith(so_far):
            raise ValueError(f"{len(so_far)} characters were passed on that {len(whole)} replace")
        return whole[len(so_far) :]


def decoder_members(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Descriptions of the decoder's members in order, with nested sequences flattened."""
    if library.decoder is None:
        return []
    return list(_flatten(json.loads(library.decoder.__getstate__())))


def _flatten(description: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if description["type"] != "Sequence":
        yield description
        return
    for member in description["decoders"]:
        yield from _flatten(member)


def _make_stage(member: dict[str, Any], *, first: bool, begins: bool) -> Stage | None:
    """The stage of this member; None if there is none.

    first   whether the text that comes next is the first of the list
    begins  whether the next piece of a text in pieces is the first of that text
    """
    match member:
        case {"type": "ByteLevel"}:
            return _ByteLevel(begins=begins)
        case {"type": "ByteFallback"}:
            return _ByteFallback()
        case {"type": "Fuse"}:
            return _Fuse(begins=begins)
        case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme}:
            return _Metaspace(replacement, drops_first=first and scheme != "never")
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return _Strip(content, start, stop, begins=begins)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return _Replace(pattern, content, begins=begins) if pattern else None
    return None


class _WholeTexts:
    """A stage that needs the whole of each text."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    @property
    def settled(self) -> bool:
        return not self._parts

    def push(self, piece: Piece) -> Iterable[Piece]:
        self._parts.append(piece.text)
        if not piece.ends:
            return ()
        text = "".join(self._parts)
        self._parts.clear()
        return self.take(text)

    def take(self, text: str) -> Iterable[Piece]:
        """The pieces that the next text makes certain."""
        raise NotImplementedError


class _Concatenated(_WholeTexts):
    """A member that makes one text of all texts; it begins with the first piece that has text."""

    def __init__(self, *, begins: bool) -> None:
        super().__init__()
        self._begun = not begins

    @property
    def settled(self) -> bool:
        return self._begun and super().settled

    def grow(self, text: str) -> list[Piece]:
        """Add to the one text."""
        if not text:
            return []
        piece = Piece(text, not self._begun, False)
        self._begun = True
        return [piece]

    def flush(self) -> Iterable[Piece]:
        return [*self.grow(self.rest()), Piece("", not self._begun, True)]

    def rest(self) -> str:
        """The text that only the end makes certain."""
        return ""


class _Fuse(_Concatenated):
    def push(self, piece: Piece) -> Iterable[Piece]:
        return self.grow(piece.text)


class _ByteLevel(_Concatenated):
    def __init__(self, *, begins: bool) -> None:
        super().__init__(begins=begins)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def settled(self) -> bool:
        held, _ = self._utf8.getstate()
        return not held and super().settled

    def take(self, text: str) -> Iterable[Piece]:
        return self.grow(self._utf8.decode(byte_level_bytes(text)))

    def rest(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallback(_WholeTexts):
    """Texts like `<0xE2>` are bytes. A run of them is one text, if it is UTF-8.

    If a run is not UTF-8, the library replaces every byte of it, complete characters included. Here
    those are kept, as text that was passed on cannot be taken back: a byte that belongs to no
    character ends the text and is a text of its own.
    """

    _byte = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")

    def __init__(self) -> None:
        super().__init__()
        # Surrogates distinguish a byte that belongs to no character from U+FFFD in the text.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._running = False

    @property
    def settled(self) -> bool:
        held, _ = self._utf8.getstate()
        return not (held or self._running) and super().settled

    def take(self, text: str) -> Iterable[Piece]:
        if found := self._byte.fullmatch(text):
            return self._characters(self._utf8.decode(bytes([int(found[1], 16)])))
        return [*self.flush(), Piece(text)]

    def flush(self) -> list[Piece]:
        return [*self._characters(self._utf8.decode(b"", final=True)), *self._end_run()]

    def _characters(self, characters: str) -> list[Piece]:
        pieces: list[Piece] = []
        for character in characters:
            if "\udc80" <= character <= "\udcff":
                pieces += [*self._end_run(), Piece(REPLACEMENT)]
            else:
                pieces.append(Piece(character, not self._running, False))
                self._running = True
        return pieces

    def _end_run(self) -> list[Piece]:
        running, self._running = self._running, False
        return [Piece("", False, True)] * running


class _Metaspace:
    """The replacement character becomes a space, or nothing in the first text."""

    def __init__(self, replacement: str, *, drops_first: bool) -> None:
        self._replacement = replacement
        self._written = "" if drops_first else " "

    @property
    def settled(self) -> bool:
        return self._written == " "

    def push(self, piece: Piece) -> Iterable[Piece]:
        text = piece.text.replace(self._replacement, self._written)
        if piece.ends:
            self._written = " "
        return [Piece(text, piece.begins, piece.ends)]

    def flush(self) -> Iterable[Piece]:
        return ()


class _Replace:
    """A string that is not empty is replaced, from left to right."""

    def __init__(self, pattern: str, content: str, *, begins: bool) -> None:
        self._pattern = pattern
        self._content = content
        self._begins = begins
        self._rest = ""

    @property
    def settled(self) -> bool:
        return not (self._begins or self._rest)

    def push(self, piece: Piece) -> Iterable[Piece]:
        if piece.begins:
            self._begins = True
        *whole, rest = (self._rest + piece.text).split(self._pattern)
        kept = 0 if piece.ends else self._beginning(rest)
        text = "".join(part + self._content for part in whole) + rest[: len(rest) - kept]
        self._rest = rest[len(rest) - kept :]
        begins, self._begins = self._begins, False
        return [Piece(text, begins, piece.ends)]

    def _beginning(self, rest: str) -> int:
        """Number of characters at the end of `rest` with which the pattern begins."""
        longest = min(len(self._pattern) - 1, len(rest))
        return next((n for n in range(longest, 0, -1) if self._pattern.startswith(rest[-n:])), 0)

    def flush(self) -> Iterable[Piece]:
        return ()


class _Strip:
    """The content is stripped up to `start` times at the beginning and `stop` times at the end."""

    def __init__(self, content: str, start: int, stop: int, *, begins: bool) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._member = decoders.Strip(content, start, stop)
        # For a text in pieces: whether it had other characters yet, how often the content stood at
        # its beginning, then at its end, and how many of those were passed on.
        self._inside = not begins
        self._count = 0
        self._passed = 0

    @property
    def settled(self) -> bool:
        # The content at the end that was passed on can no longer be stripped.
        return self._inside and self._count == self._passed

    def push(self, piece: Piece) -> Iterable[Piece]:
        if piece.begins and piece.ends:
            return [Piece(self._member.decode([piece.text]))]
        if piece.begins:
            self._inside, self._count, self._passed = False, 0, 0
        text = self._grow(piece.text)
        if piece.ends and not self._inside:
            # The library's member decides what becomes of a text that holds nothing else.
            text += self._member.decode([self._content * self._count])[self._passed :]
        return [Piece(text, piece.begins, piece.ends)]

    def _grow(self, text: str) -> str:
        body = text.rstrip(self._content)
        tail = len(text) - len(body)
        if not body:
            self._count += tail
            return self._pass_on()
        if self._inside:
            body = self._content * (self._count - self._passed) + body
        else:
            stripped = body.lstrip(self._content)
            leading = self._count + len(body) - len(stripped)
            body = self._content * (max(0, leading - self._start) - self._passed) + stripped
        self._inside, self._count, self._passed = True, tail, 0
        return body + self._pass_on()

    def _pass_on(self) -> str:
        """The part of the content at the end that cannot be stripped."""
        taken = self._stop + (0 if self._inside else self._start)
        certain = max(0, self._count - taken) - self._passed
        self._passed += certain
        return self._content * certain

    def flush(self) -> Iterable[Piece]:
        return ()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, others from U+0100 on."""
    graphic = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(graphic))
    return {chr(byte): byte for byte in graphic} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_ALPHABET = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token.

    Added tokens may contain any characters, which stand for themselves.
    """
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()
