"""Text to token ids, and token ids to text as they come."""

from __future__ import annotations

import codecs
import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Self

import tokenizers

from graphengine.models.checkpoints.gguf.file import is_gguf
from graphengine.text.chat import ChatTemplate, Messages, Tools
from graphengine.text.continuing import continuing
from graphengine.text.decoders import (
    REPLACEMENT,
    TextDecoder,
    byte_level_bytes,
    decoder_members,
    text_decoder,
)
from graphengine.text.gguf_tokenizer import read_gguf_tokenizer
from graphengine.text.stopping import StopStrings
from graphengine.text.tokenizer_files import library_errors, read_tokenizer_files


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
        """Takes ownership of `library`: truncation and padding are switched off.

        special_tokens  by role: {"bos_token": "<s>", ...}; what chat templates see
        chat_templates  jinja source by name: "default", "tool_use", ...
        add_bos         whether `encode` adds BOS; None: as the post-processor does
        """
        library.no_truncation()
        library.no_padding()
        self._library = library
        # Tokenizers for text after text, and for text after an added token; made when used.
        self._continuing: dict[bool, tokenizers.Tokenizer] = {}
        self.special_tokens = dict(special_tokens or {})
        self._templates = {
            name: ChatTemplate(source, name) for name, source in (chat_templates or {}).items()
        }
        self._affixes = self._explicit_affixes(add_bos, add_eos)

        added = library.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        kinds = [member["type"] for member in decoder_members(library)]
        self.is_byte_level = kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}
        self.has_byte_fallback = "ByteFallback" in kinds
        self._byte_ids = self._find_byte_ids() if self.has_byte_fallback else {}
        self._byte_of_id = {index: byte for byte, index in self._byte_ids.items()}
        # What a byte-level token adds to a text, by whether special tokens are skipped. All
        # requests share it; it is filled as tokens come.
        self.known_bytes: dict[bool, dict[int, bytes]] = {False: {}, True: {}}
        # The same of text, for tokens of whole characters: see `IncrementalDecoder.known`.
        self.known_text: dict[bool, dict[int, str]] = {False: {}, True: {}}

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Read a Hugging Face directory: `tokenizer.json`, and where present
        `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`,
        `chat_template.jinja` and `additional_chat_templates/*.jinja`; or a GGUF file. ValueError
        names the file at fault.
        """
        path = Path(path)
        read = read_gguf_tokenizer(path) if is_gguf(path) else read_tokenizer_files(path)
        return cls(
            read.library,
            special_tokens=read.special_tokens,
            chat_templates=read.chat_templates,
            add_bos=read.add_bos,
            add_eos=read.add_eos,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens, the added ones included. A model's vocabulary may be larger (padding)."""
        return self._library.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, the added ones included."""
        return dict(self._library.get_vocab(with_added_tokens=True))

    @property
    def largest_id(self) -> int:
        """The last id that has a token; a model's vocabulary may have more ids after it."""
        return max(self.vocabulary.values(), default=-1)

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
        _check_text(text)
        if self._affixes is None or not add_special_tokens:
            ids = self._encoding(text, add_special_tokens).ids
        else:
            before, after = self._affixes
            ids = [*before, *self._encoding(text, False).ids, *after]
        return ids if add_bos is None else self._with_bos(ids, add_bos)

    def encode_after(self, text: str, before: Sequence[int]) -> list[int]:
        """Token ids of `text` where it follows the tokens `before`, without special tokens.

        After text it gets no space that belongs only to the beginning of a text. An id below 0
        stands for an embedding.
        """
        if not self.has_text(before, self.special_ids):
            return self.encode(text, add_special_tokens=False)
        return self.encode_inside(text, after_added=self._ends_with_added(before))

    def continues(self, before: Sequence[int], hidden: Collection[int]) -> bool:
        """Whether a text that follows the tokens `before` continues one; `hidden` have no text.

        Otherwise the space that `encode_after` puts before it is not text. With some tokenizers
        that is so right after an added token, too: a chat's next turn encodes a reply that way.
        """
        if not self.has_text(before, hidden):
            return False
        return not (self._ends_with_added(before) and self._begins_after_added)

    def _ends_with_added(self, before: Sequence[int]) -> bool:
        return before[-1] < 0 or before[-1] in self._added_ids

    @cached_property
    def _begins_after_added(self) -> bool:
        """Whether a text right after an added token is encoded as the beginning of one."""
        return self.encode_inside("a", after_added=True) != self.encode_inside("a")

    def encode_inside(self, text: str, *, after_added: bool = False) -> list[int]:
        """Token ids of `text` in the middle of another; see `continuing` for `after_added`."""
        _check_text(text)
        if after_added not in self._continuing:
            made = continuing(self._library, after_added=after_added)
            self._continuing[after_added] = made
        return self._encoding(text, False, self._continuing[after_added]).ids

    def has_text(self, ids: Sequence[int], hidden: Collection[int]) -> bool:
        """Whether one of `ids` has text: neither a hidden token nor an embedding, below 0."""
        return any(
            token >= 0 and token not in hidden and self.id_to_token(token) is not None
            for token in reversed(ids)
        )

    def _encoding(
        self, text: str, add_special_tokens: bool, library: tokenizers.Tokenizer | None = None
    ) -> tokenizers.Encoding:
        library = self._library if library is None else library
        with library_errors(f"a text of {len(text)} characters cannot be encoded"):
            return library.encode(text, add_special_tokens=add_special_tokens)

    def _with_bos(self, ids: list[int], wanted: bool) -> list[int]:
        """`ids` with exactly one BOS token before them, or with none."""
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

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, remove_eos: bool = False
    ) -> str:
        """The text of `ids` as `tokenizers` decodes them, with one exception.

        remove_eos  the tokenizer's EOS has no text anywhere, even where special tokens have text
                    (`remove_EOD` of Megatron's text generation controller)

        Where a run of byte fallback tokens is not UTF-8, `tokenizers` replaces every byte of the
        run, complete characters included; here those are kept, as streamed text cannot be taken
        back, and each byte that belongs to no character becomes U+FFFD.

        ValueError where the library fails.
        """
        ids = [_checked_id(token_id) for token_id in ids]
        if remove_eos:
            ids = [token_id for token_id in ids if token_id != self.eos_token_id]
        with library_errors(f"{len(ids)} tokens cannot be decoded"):
            text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        if not (self.has_byte_fallback and REPLACEMENT in text):
            return text
        decoder = IncrementalDecoder(self, skip_special_tokens=skip_special_tokens)
        return "".join(map(decoder.push, ids)) + decoder.flush()

    def text_decoder(self, *, continues: bool = False) -> TextDecoder:
        """The decoder for one text, a token at a time; `continues` where it follows other text."""
        return text_decoder(self._library, continues=continues)

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation as the checkpoint's template writes it.

        messages                dicts with "role", and "content" (text, a list of dicts, or None);
                                more keys may follow
        add_generation_prompt   with the beginning of the assistant's answer
        tools                   JSON schemas of functions; the template "tool_use" is taken where
                                there is one
        continue_final_message  end with the text of the last message, which the model then goes on
                                with. ValueError together with `add_generation_prompt`, for a last
                                message without text, and where the template does not write it out
        template_variables      further variables of the template, such as `enable_thinking`: JSON
                                values by name. ValueError for a name that every template gets
        """
        text = self.render_chat(
            messages, add_generation_prompt, tools, continue_final_message, template_variables
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
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
            template_variables=template_variables,
        )

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None where it stands for text."""
        if self.has_byte_fallback:
            byte = self._byte_of_id.get(token_id)
            return None if byte is None else bytes([byte])
        token = self._library.id_to_token(token_id) if self.is_byte_level else None
        return None if token is None else byte_level_bytes(token)

    def byte_id(self, byte: int) -> int | None:
        """The byte fallback token of `byte`."""
        return self._byte_ids.get(byte)

    def _id_of_role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._library.token_to_id(token)

    def _explicit_affixes(
        self, add_bos: bool | None, add_eos: bool | None
    ) -> tuple[list[int], list[int]] | None:
        """Tokens to add before and after a text; None where the post-processor adds them."""
        if add_bos is None and add_eos is None:
            return None
        affixes: list[list[int]] = []
        for role, wanted, automatic in zip(
            ("bos_token", "eos_token"), (add_bos, add_eos), self._automatic_affixes(), strict=True
        ):
            token = self._id_of_role(role)
            if wanted and token is None:
                raise ValueError(
                    f"tokenizer_config.json asks for add_{role}, but {role} is "
                    f"{self.special_tokens.get(role)!r}, which is not in the vocabulary"
                )
            present = token in automatic if wanted is None else wanted
            affixes.append([token] if present and token is not None else [])
        return affixes[0], affixes[1]

    def _automatic_affixes(self) -> tuple[list[int], list[int]]:
        """Tokens that the post-processor puts before and after a text.

        They are found by encoding a text of at least one token, from the first tokens of the
        vocabulary. If there is no such text, all tokens of an empty text count as both.
        """
        vocabulary = self._library.get_vocab(with_added_tokens=False)
        for text in ("a", " ", *islice(vocabulary, 16)):
            with suppress(ValueError):
                encoding = self._encoding(text, True)
                added = encoding.special_tokens_mask
                if 0 in added:
                    first, last = added.index(0), len(added) - added[::-1].index(0)
                    return encoding.ids[:first], encoding.ids[last:]
        try:
            ids = self._encoding("", True).ids
        except ValueError as error:
            raise ValueError(
                f"tokenizer.json: its post-processor fails at any text: {error}"
            ) from (error)
        return ids, ids

    def _find_byte_ids(self) -> dict[int, int]:
        ids = ((byte, self._library.token_to_id(f"<0x{byte:02X}>")) for byte in range(256))
        return {byte: index for byte, index in ids if index is not None}


class IncrementalDecoder:
    """Turns token ids into text one at a time.

    All deltas together, `flush` included, are `tokenizer.decode` of all ids. A delta never ends in
    half a character: up to three bytes are held back until the character is complete or can no
    longer be completed. `graphengine.text.decoders` says what else a decoder holds back. The cost
    of a push does not depend on how many came before it.

    hidden     ids that have no text, in addition to the special ones if those are skipped
    continues  whether the text follows other text, as a reply follows its prompt: what the decoder
               strips at the beginning of a text then stays. `decode` has no such texts

    Most tokens add the same text wherever they stand, and leave nothing held back:

    settled    whether the next token's text depends on that token alone
    known      text of tokens, as far as they came, that leave a settled decoder settled: such a
               token need not be pushed. Decoders without `hidden` share it

    ValueError for a token that the library cannot decode.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        hidden: Collection[int] = (),
        continues: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._skipped = special.union(hidden)
        self._known_bytes = {} if hidden else tokenizer.known_bytes[skip_special_tokens]
        self.known = {} if hidden else tokenizer.known_text[skip_special_tokens]
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder = (
            None if tokenizer.is_byte_level else tokenizer.text_decoder(continues=continues)
        )
        self.settled = self._is_settled()

    def push(self, token_id: int) -> str:
        """The text that this token made certain; often empty."""
        # 1.0 would find the entry of 1.
        exact, settled = type(token_id) is int, self.settled
        text = self.known.get(token_id) if exact and settled else None
        if text is not None:
            return text
        text = self._decode(token_id, exact)
        self.settled = self._is_settled()
        if settled and self.settled and exact:
            self.known[token_id] = text
        return text

    def _is_settled(self) -> bool:
        if self._decoder is None:
            held, _ = self._utf8.getstate()
            return not held
        return self._decoder.settled

    def _decode(self, token_id: int, exact: bool) -> str:
        """`push`, whatever is known; `exact` if the id is an `int`."""
        if self._decoder is None:
            shown = self._known_bytes.get(token_id) if exact else None
            if shown is None:
                shown = self._known_bytes[token_id] = self._bytes_of(token_id) or b""
            return self._utf8.decode(shown)
        token = self._shown(token_id)
        if token is None:
            return ""
        with library_errors(f"token {token_id} ({token!r}) cannot be decoded"):
            return self._decoder.push(token)

    def _shown(self, token_id: int) -> str | None:
        """The token; None where it has no text."""
        token = self._tokenizer.id_to_token(token_id)
        return None if token_id in self._skipped else token

    def _bytes_of(self, token_id: int) -> bytes | None:
        token = self._shown(token_id)
        return None if token is None else byte_level_bytes(token)

    def flush(self) -> str:
        """The text still held back, an incomplete character as U+FFFD. No push may follow."""
        if self._decoder is None:
            return self._utf8.decode(b"", final=True)
        with library_errors("the end of the text cannot be decoded"):
            return self._decoder.flush()


class TextStream:
    """A request's text: token ids in, text out, up to a stop string.

    include_stop         whether a stop string that ends the text stays in it
    skip_special_tokens  whether special tokens have no text
    hidden               other ids without text
    continues            whether it follows other text
    min_tokens           a stop string that one of the first `min_tokens` tokens completes is text

    `text` is what all calls so far have returned. `made[i]` is the text that token i made certain,
    including a stop string and the text after it: `text` is the beginning of all of it, and without
    stop strings the whole. The cost of a push does not depend on how many came before it.

    `failure` says why a token could not be decoded. That token and all after it have no entry in
    `made`; text held back before it is lost.

    decoder  turns the tokens into text
    plain    whether there are no stop strings: a caller may then add what the decoder knows of a
             token to `made`, as `push` would
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        hidden: Collection[int] = (),
        continues: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.made: list[str] = []
        self.failure: ValueError | None = None
        self.plain = not stops
        self.decoder = IncrementalDecoder(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            hidden=hidden,
            continues=continues,
        )
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._silent = False
        # Characters that were returned, where stop strings may hold some back.
        self._returned = 0
        # What the first tokens made, joined, and how many tokens these are.
        self._joined, self._joined_tokens = "", 0

    @property
    def text(self) -> str:
        """The text so far. It is joined when this is read, if a push has added any."""
        if len(self.made) > self._joined_tokens:
            self._joined += "".join(self.made[self._joined_tokens :])
            self._joined_tokens = len(self.made)
        return self._joined if self.plain else self._joined[: self._returned]

    def ends(self) -> tuple[int, ...]:
        """Characters of `text` up to and including each token, once all text has come."""
        length = len(self.text)
        return tuple(min(end, length) for end in accumulate(map(len, self.made)))

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(text that became certain, the stop string that ended the text)."""
        try:
            text = self.decoder.push(token_id)
        except ValueError as error:
            self.failure = error
            return "", None
        self.made.append(text)
        if self._stops is None:
            return text, None
        text, matched = self._stops.push(text, armed=len(self.made) > self._min_tokens)
        self._returned += len(text)
        return text, matched

    def take(self, token_ids: Sequence[int], silent: bool = False) -> tuple[str, int, str | None]:
        """(text that became certain, tokens up to the end of the text, the stop string at its end).

        silent  the last token has no text
        """
        text = ""
        for taken, token_id in enumerate(token_ids[:-1] if silent else token_ids, start=1):
            piece, matched = self.push(token_id)
            text += piece
            if self.failure is not None:
                return text, taken - 1, None
            if matched is not None:
                return text, taken, matched
        if silent:
            self.made.append("")
            self._silent = True
        return text, len(token_ids), None

    def flush(self) -> str:
        """The text still held back; nothing after a stop string. Call it once, at the end."""
        if self.failure is not None:
            return ""
        try:
            text = self.decoder.flush()
        except ValueError as error:
            self.failure = error
            return ""
        if text:
            self.made[-2 if self._silent else -1] += text
            # A token whose text was joined may have got more.
            self._joined, self._joined_tokens = "", 0
        if self._stops is not None:
            text, _ = self._stops.push(text, armed=len(self.made) > self._min_tokens)
            text += self._stops.flush()
            self._returned += len(text)
        return text


def _check_text(text: object) -> None:
    """ValueError for what cannot be encoded."""
    if not isinstance(text, str):
        raise ValueError(f"text to encode must be a string, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text to encode has a lone surrogate {text[error.start]!r} at {error.start}"
        ) from error


def _checked_id(token_id: int) -> int:
    """`token_id` as an int, from NumPy's integers too."""
    try:
        value = operator.index(token_id)
    except TypeError:
        value = -1
    if not 0 <= value < 2**32:
        raise ValueError(f"token id {token_id!r} is not an integer in [0, 2**32)")
    return value
