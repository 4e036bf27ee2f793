"""The forms of a prompt, and its token ids."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

from torch import Tensor

from graphengine.options.checks import shown
from graphengine.prompt_embeds import (
    EMBEDDED,
    NO_EMBEDS,
    EmbedsSpec,
    PlacedEmbeds,
    PromptTokens,
    part_at,
)
from graphengine.text.chat import Messages, Tools
from graphengine.text.tokenizer import Tokenizer
from graphengine.text.tokenizer_files import WRITE_TOKENIZER


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A conversation as a prompt, where its messages alone do not say enough.

    messages                dicts with "role" and "content"
    tools                   JSON schemas of the functions that the model may call
    add_generation_prompt   end with the beginning of the assistant's answer; None: unless the last
                            message is continued
    continue_final_message  end with the text of the last message, for the model to go on with
    template_variables      further variables of the template by name, such as `enable_thinking`

    It is checked only when the prompt is used; then every error is a ValueError.
    """

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_variables: Mapping[str, Any] | None = None

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids by `tokenizer.apply_chat_template`."""
        _refuse_media(self.messages)
        generation = self.add_generation_prompt
        return tokenizer.apply_chat_template(
            self.messages,
            add_generation_prompt=not self.continue_final_message
            if generation is None
            else generation,
            tools=self.tools,
            continue_final_message=self.continue_final_message,
            template_variables=self.template_variables,
        )


_MEDIA = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")


def _refuse_media(messages: Any) -> None:
    """ValueError for pictures and sounds, for which a template would leave mere placeholders.

    Any other fault of the messages is reported by the template itself.
    """
    for index, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") in _MEDIA:
                raise ValueError(
                    f"chat message {index} has a part of type {part['type']!r}: only text is "
                    "supported"
                )


class PromptParts:
    """A prompt with embeddings: parts that follow one another, in an engine with `prompt_embeds`.

        PromptParts("Describe the picture: ", image, [13, 198])

    A part is text, token ids, a `Chat`, or a tensor [n, H] of floating point, on the CPU or a GPU.
    A tensor's rows replace the output of `embed_tokens`, like `inputs_embeds` of transformers. Each
    text is tokenised by itself. Only as the first part does it get special tokens, or what
    `add_bos` says; after other text it does not get the space that a tokenizer puts before a text.
    A `GridEmbeds` is such a tensor with the places of its rows in a picture, an `ImageEmbeds` one
    whose rows see each other. A `Chat` can only be first. Parts may be empty, but not all of them.
    A tensor alone is a prompt, too.

    Parts are checked only when the prompt is used; then every error is a ValueError.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: str | Sequence[int] | Chat | Tensor | PlacedEmbeds) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"PromptParts({', '.join(map(_short, self.parts))})"


def _short(part: object) -> str:
    return f"tensor{list(part.shape)}" if isinstance(part, Tensor) else repr(part)


Prompt = str | Sequence[int] | Messages | Chat | PromptParts | Tensor | PlacedEmbeds


def read_prompt(
    prompt: Prompt,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_seq_len: int,
    embeds: EmbedsSpec | None = None,
    add_bos: bool | None = None,
    before: Sequence[int] = (),
    room: int = 1,
) -> PromptTokens:
    """A prompt's tokens and embeddings; `embeds` is the form they must have, None: none are taken.

    The other arguments, and the errors, are those of `prompt_ids`.
    """
    if _is_embeddings(prompt):
        prompt = PromptParts(cast("Tensor | PlacedEmbeds", prompt))
    ids_of = partial(
        prompt_ids, tokenizer=tokenizer, vocab_size=vocab_size, max_seq_len=max_seq_len, room=room
    )
    if not isinstance(prompt, PromptParts):
        return PromptTokens(ids_of(prompt, add_bos=add_bos, before=before))
    known = len(before)
    ids: tuple[int, ...] = ()
    held = NO_EMBEDS
    for part in prompt.parts:
        at = known + len(ids)
        if isinstance(part, Sized) and not len(part):
            continue
        if _is_embeddings(part):
            if add_bos is not None and not ids:
                raise ValueError(
                    f"add_bos={add_bos} is for a prompt of text: this one begins with embeddings"
                )
            placed = part_at(cast("Tensor | PlacedEmbeds", part), at, embeds)
            held = held.then(placed)
            ids += (EMBEDDED,) * sum(len(run.rows) for run in placed.runs)
            if len(ids) > max_seq_len - known - room:
                raise ValueError(_too_long(len(ids), known, max_seq_len, room))
        else:
            bos = None if ids else add_bos
            ids += ids_of(cast(Prompt, part), add_bos=bos, before=(*before, *ids), earlier=len(ids))
    if not ids:
        raise ValueError("the prompt is empty: it holds no token")
    return PromptTokens(ids, held)


def _is_embeddings(prompt: object) -> bool:
    if isinstance(prompt, PlacedEmbeds):
        return True
    return isinstance(prompt, Tensor) and (prompt.dim() > 1 or prompt.is_floating_point())


def _too_long(
    count: int | str, known: int, max_seq_len: int, room: int, *, earlier: int = 0
) -> str:
    """The error for a prompt, or its next part, that follows `known` tokens, of which the last
    `earlier` are in other parts of the prompt.
    """
    session = known - earlier
    of_parts = f"{earlier} in earlier parts" if earlier else ""
    of_session = f"{session} of the session" if session else ""
    after = " and ".join(filter(None, (of_session, of_parts)))
    after = f" after {after}" if after else ""
    lacks = "leaves no room for a new one in" if room else "exceeds"
    return f"prompt of {count} tokens{after} {lacks} max_seq_len={max_seq_len}"


def prompt_ids(
    prompt: Prompt,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_seq_len: int,
    add_bos: bool | None = None,
    before: Sequence[int] = (),
    room: int = 1,
    earlier: int = 0,
) -> tuple[int, ...]:
    """Token ids of text, of a conversation, or of ids given as they are.

    add_bos  as for `Tokenizer.encode`; only for text
    before   what the prompt follows: a session's tokens, or other parts; unless it is empty, text
             is encoded as `Tokenizer.encode_after` says, and chat messages are refused
    room     tokens that must be left in `max_seq_len`: 0 where nothing is generated
    earlier  how many tokens of `before` are in other parts of the prompt, for errors

    ValueError, with the value and the limit, for a prompt that cannot be served.
    """
    known = len(before)
    if _is_messages(prompt):
        prompt = Chat(messages=cast(Messages, prompt))
    if add_bos is not None and not isinstance(prompt, str):
        raise ValueError(
            f"add_bos={add_bos} is for a prompt of text: token ids and chat templates bring their "
            f"own"
        )
    if known and add_bos is not None:
        raise ValueError(f"add_bos={add_bos}, but {known} tokens are in front of the text")
    if known and isinstance(prompt, Chat):
        advice = "give all messages of a session to its `update`"
        if known == earlier:
            advice = "they must be the first part of `PromptParts`"
        raise ValueError(
            f"chat messages begin a conversation, but {known} tokens stand before them: {advice}"
        )
    if isinstance(prompt, str | Chat):
        if tokenizer is None:
            raise ValueError(
                "the checkpoint has no tokenizer.json: give token ids as prompts. "
                f"{WRITE_TOKENIZER}"
            )
        if isinstance(prompt, str) and known:
            prompt = tokenizer.encode_after(prompt, before)
        elif isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, add_bos=add_bos)
        else:
            prompt = prompt.token_ids(tokenizer)
    ids = token_ids_of(
        prompt,
        vocab_size,
        "a prompt is text, token ids or chat messages",
        limit=max_seq_len - known - room,
        too_many=lambda count: _too_long(count, known, max_seq_len, room, earlier=earlier),
    )
    if not ids:
        raise ValueError("the prompt is empty: it holds no token")
    return ids


def token_ids_of(
    tokens: object,
    vocab_size: int,
    what: str,
    *,
    limit: int,
    too_many: Callable[[str], str],
) -> tuple[int, ...]:
    """`tokens` as ids. ValueError if they are not ids; it says `what` they should be.

    At most `limit` + 1 ids are read from an iterator, which may have no end. If there are more than
    `limit`, `too_many(number)` is the message of the ValueError.
    """
    no_tokens = isinstance(tokens, str | bytes | Mapping) or getattr(tokens, "ndim", 1) != 1
    if no_tokens or not isinstance(tokens, Iterable):
        shape = getattr(tokens, "shape", ())
        given = f"{type(tokens).__name__} of shape {list(shape)}" if shape else shown(tokens)
        raise ValueError(f"{what}, not {given}")
    limit = max(limit, 0)
    if isinstance(tokens, Sized) and len(tokens) > limit:
        raise ValueError(too_many(str(len(tokens))))
    ids = tuple(islice(tokens, limit + 1))
    if len(ids) > limit:
        raise ValueError(too_many(f"more than {limit}"))
    # Checking the ids of a long prompt one by one would take a large part of its host time.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    return tuple(token_id(token, vocab_size) for token in ids)


def token_id(token: object, vocab_size: int, option: str = "") -> int:
    """`token` as an id, also from NumPy's and torch's integers. ValueError if it is no id."""
    where = f"{option}: " if option else ""
    index = None
    if hasattr(token, "__index__") and not isinstance(token, bool):
        with suppress(TypeError):  # an array of several
            index = operator.index(token)
    if index is None:
        raise ValueError(f"{where}token id {shown(token)} is not an integer")
    if not 0 <= index < vocab_size:
        raise ValueError(
            f"{where}token id {shown(token)} is outside the vocabulary of {vocab_size}"
        )
    return index


def _is_messages(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_batch(prompts: object) -> bool:
    """Whether `prompts` is a list of prompts, rather than one: text, token ids or chat messages.

    An empty list is a batch of no prompts.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        return False
    if not prompts:
        return True
    first = prompts[0]
    if isinstance(first, Chat | PromptParts):
        return True
    # A zero-dimensional tensor is a token id, though it has `__iter__`.
    return (
        isinstance(first, Iterable)
        and not isinstance(first, Mapping)
        and getattr(first, "ndim", 1) > 0
    )
