"""Text in pieces against the library's own, for every decoder that it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from graphengine.text import decoders as text_decoders
from graphengine.text.tokenizer import IncrementalDecoder, Tokenizer

TOKENS = [
    *["x", "a", "🙂</w>", "é</w>", "</w>", "x</w>", "x</w>y", "</w></w>a", "▁", "▁a", "▁▁", "a▁b"],
    *["##ing", "##", "x##y", " .", "n't", " '", "do not", "|", "a|b", "<pad>", "a<pad>", "<pad>a"],
    *["<0x41>", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "<0x+F>", "<0xe9>", "<0x4>", "ab", "ba"],
    *["aa", "b", " ", "  ", "", "fo", "x fox", "Ġa", "Ċ", "ð", "ŁĻĤ", "Ã", "©", "\ufffd"],
]


def sequence(*members: Any) -> Any:
    return decoders.Sequence(list(members))


def fused(*members: Any) -> Any:
    return sequence(decoders.Fuse(), *members)


DECODERS: dict[str, Any] = {
    "byte level": decoders.ByteLevel(),
    "byte level, fused": sequence(decoders.ByteLevel(), decoders.Fuse()),
    "byte level, replaced": sequence(decoders.ByteLevel(), decoders.Replace("fox", "cat")),
    "replaced, byte level": sequence(decoders.Replace("a", "Ġ"), decoders.ByteLevel()),
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "bytes": decoders.ByteFallback(),
    "bytes, metaspace": sequence(decoders.ByteFallback(), decoders.Metaspace()),
    "fused": decoders.Fuse(),
    "fused, metaspace": fused(decoders.Metaspace()),
    "fused, bytes": fused(decoders.ByteFallback()),
    "fused, byte level": fused(decoders.ByteLevel()),
    "stripped at the beginning": decoders.Strip("a", 1, 0),
    "fused, stripped": fused(decoders.Strip("a", 2, 0)),
    "replaced": decoders.Replace("a", "bb"),
    "replaced by nothing": decoders.Replace("ab", ""),
    "fused, replaced": fused(decoders.Replace("aab", "x")),
    "fused, replaced twice": fused(decoders.Replace("ab", "b"), decoders.Replace("bb", "")),
    "llama": sequence(
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ),
    "in each other": sequence(
        decoders.Metaspace(), sequence(decoders.Fuse(), sequence(decoders.Strip("x", 1, 0)))
    ),
}
# What the library streams itself.
OTHERS: dict[str, Any] = {
    "none": None,
    "suffixed": decoders.BPEDecoder(),
    "suffixed, replaced": sequence(decoders.BPEDecoder(), decoders.Replace(" ", "▁")),
    "ctc": decoders.CTC(),
    "ctc, metaspace": sequence(decoders.CTC("<pad>", "|"), decoders.Metaspace()),
    "words": decoders.WordPiece(),
    "words without cleanup": decoders.WordPiece("", False),
    "by regex": decoders.Replace(tokenizers.Regex("a+|fo(?=x)"), "_"),
    "nothing replaced": decoders.Replace("", "-"),
}
# The library's own code fails for a text that is nothing but what is stripped from its end.
STRIPPED_AT_THE_END = {
    "stripped at the end": decoders.Strip("a", 0, 1),
    "fused, stripped at the end": fused(decoders.Strip("a", 1, 2)),
    "llama, stripped at the end": sequence(
        decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 3)
    ),
}


def with_decoder(decoder: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.decoder = decoder
    return Tokenizer(library)


TOKENIZERS = {
    name: with_decoder(made) for name, made in (DECODERS | OTHERS | STRIPPED_AT_THE_END).items()
}
IDS = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)


def ids_of(*tokens: str) -> list[int]:
    return [TOKENS.index(token) for token in tokens]


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    return "".join(map(decoder.push, ids)) + decoder.flush()


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=25, deadline=None)
@given(ids=IDS)
@example(ids=ids_of("🙂</w>", "é</w>", "x", "a", "</w>", "x</w>"))
@example(ids=ids_of("▁a", "a", "a", "", "a", "<pad>", "a", "▁a", "<0x41>", "<0x41>"))
@example(ids=ids_of("<0xE2>", "<0x82>", "<0xAC>", "<0xE2>", "<0x82>", "x"))
@example(ids=ids_of("aa", "b", "a", "ab", "b", "ba", "aa", "aa"))
def test_streamed_text_is_that_of_all_tokens(name: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    theirs = tokenizer._library.decode(ids)
    if not tokenizer.has_byte_fallback or text_decoders.REPLACEMENT not in theirs:
        assert tokenizer.decode(ids) == theirs


# What it does to a text depends on more than whether it is at the beginning.
CLEAR = [name for name in DECODERS if name != "fused, bytes"]


@pytest.mark.parametrize("name", CLEAR)
@settings(max_examples=25, deadline=None)
@given(ids=IDS)
@example(ids=ids_of("▁a", "a", "▁a"))
@example(ids=ids_of(" ", "  ", "x"))
@example(ids=ids_of("a", "aa", "x"))
def test_text_that_continues_is_that_of_all_tokens_but_the_first(name: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    first = ids_of("x")
    decoder = IncrementalDecoder(tokenizer, continues=True)
    text = "".join(map(decoder.push, ids)) + decoder.flush()
    assert tokenizer.decode(first) + text == tokenizer.decode([*first, *ids])


@pytest.mark.parametrize("name", STRIPPED_AT_THE_END)
@settings(max_examples=20, deadline=None)
@given(ids=IDS.map(lambda ids: [index for index in ids if TOKENS[index].strip(" a")]))
def test_what_is_stripped_from_the_end_is_held_back(name: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    # The shorter texts fail in the library.
    ids = [*ids_of("x"), *ids, *ids_of("x")]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    spaced = [*ids, *ids_of("  ", "  ", "b", " ", "  ")]
    if name == "llama, stripped at the end":
        assert streamed(tokenizer, spaced) == tokenizer.decode(spaced)
        assert tokenizer.decode(spaced).endswith("b")


def test_text_comes_as_soon_as_it_is_certain() -> None:
    for name, tokens, pieces in (
        ("fused, stripped", ["a", "aa", "b", "a"], ["", "a", "b", "a", ""]),
        ("fused, replaced", ["ba", "a", "a", "b", "a"], ["b", "", "a", "x", "", "a"]),
        ("suffixed", ["x</w>", "a", "x</w>"], ["x", " a", "x", ""]),
        ("byte level, replaced", ["ð", "ŁĻĤ", "fo", "a"], ["", "🙂", "", "foa", ""]),
    ):
        decoder = IncrementalDecoder(TOKENIZERS[name])
        found = [*(decoder.push(index) for index in ids_of(*tokens)), decoder.flush()]
        assert found == pieces, name


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=25, deadline=None)
@given(ids=IDS)
def test_the_library_streams_decoders_that_no_language_model_has(name: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    # A suffix is at the end of a token, if anywhere.
    ids = [index for index in ids if "</w>" not in TOKENS[index].removesuffix("</w>")]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", DECODERS | OTHERS)
@settings(max_examples=25, deadline=None)
@given(ids=IDS)
@example(ids=ids_of("x", "<0xE2>", "<0x82>", "a", "<0xAC>", "a", "▁a", "a"))
@example(ids=ids_of("x", "aa", "a", "b", "aa", "aa", "b", "  ", " ", "x"))
def test_known_text_is_what_the_decoder_makes(name: str, ids: list[int]) -> None:
    """Examples before this one have filled the table of known tokens."""
    tokenizer = TOKENIZERS[name]
    decoder, unknowing = IncrementalDecoder(tokenizer), IncrementalDecoder(tokenizer)
    for index in ids:
        try:
            made = unknowing._decode(index, True)
        except ValueError:
            # As with suffixes, which the library's stream sees inside tokens.
            with pytest.raises(ValueError, match="cannot be decoded"):
                decoder.push(index)
            return
        assert decoder.push(index) == made


def test_tokens_are_known_once_nothing_is_held_back() -> None:
    for name, tokens, known in (
        ("llama", ["x", "▁a", "<0x41>", "a", "b"], {"▁a": " a", "b": "b"}),
        ("byte level", ["x", "ð", "ŁĻĤ", "Ġa"], {"x": "x", "Ġa": " a"}),
        ("bytes, metaspace", ["▁a", "▁a"], {"▁a": " a"}),
        ("fused, replaced", ["x", "b", "a", "b"], {"b": "b"}),
        ("llama, stripped at the end", ["x", "b", "  ", "b"], {"b": "b"}),
        ("words", ["x", "a"], {}),
    ):
        tokenizer = with_decoder((DECODERS | OTHERS | STRIPPED_AT_THE_END)[name])
        streamed(tokenizer, ids_of(*tokens))
        expected = {ids_of(token)[0]: text for token, text in known.items()}
        assert tokenizer.known_text == {False: {}, True: expected}, name


def test_text_that_a_later_token_changes_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"token \d+ \('a'\) cannot be decoded: Invalid prefix"):
        streamed(TOKENIZERS["suffixed"], ids_of("x</w>y", "a"))
    decoder = text_decoders.text_decoder(TOKENIZERS["words"]._library)
    assert decoder.push("x") == "x"
    decoder._pieces.append("y")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="2 characters were passed on that 1 replace"):
        decoder.flush()


def test_what_the_librarys_stream_cannot_do() -> None:
    """Why the decoders of language models have stages here."""
    library = TOKENIZERS["llama"]._library
    stream = decoders.DecodeStream(skip_special_tokens=True)
    x, newline, broken = ids_of("x", "<0x41>", "<0xFF>")
    assert [stream.step(library, index) for index in (x, newline, broken)] == ["x", "A", None]
    with pytest.raises(Exception, match="Invalid prefix"):
        stream.step(library, x)
    assert streamed(TOKENIZERS["llama"], [x, newline, broken, x]) == "xA\ufffdx"

    library = TOKENIZERS["byte level"]._library
    stream = decoders.DecodeStream(skip_special_tokens=True)
    run = ids_of("ð") * 100
    assert not any(stream.step(library, index) for index in run)
    decoder = IncrementalDecoder(TOKENIZERS["byte level"])
    assert "".join(map(decoder.push, run)) == "\ufffd" * 99


def test_a_stream_without_tokens_is_empty() -> None:
    """The library would strip something even of no text at all."""
    for tokenizer in TOKENIZERS.values():
        assert IncrementalDecoder(tokenizer).flush() == ""
