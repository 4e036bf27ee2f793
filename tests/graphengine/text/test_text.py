from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from graphengine.text.chat import ChatTemplate
from graphengine.text.sandbox import MAX_SIZE
from graphengine.text.stopping import StopStrings
from graphengine.text.tokenizer import IncrementalDecoder, TextStream, Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog barks",
    "naïve café, schön, größer, über, déjà vu",
    "日本語の文章と中文的句子 한국어",
    "emoji 😀 👍🏽 👩‍👩‍👧 🇩🇪 and e\u0301 combined",
    "def f(x):\n    return x  # spaces   and\ttabs",
]
SPECIAL = ["<s>", "</s>", "<|user|>"]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Text that is hard to cut: ZWJ sequences, combining marks, flags, what is not in any vocabulary.
HARD_TEXTS = st.one_of(
    st.text(max_size=30),
    st.text(alphabet="ab e\u0301\u200d😀👩🇩🇪日é \n\u2581\ufffd", max_size=30),
    st.lists(st.sampled_from([word for line in CORPUS for word in line.split(" ")])).map(" ".join),
)


def byte_level() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens(["<tool call>", "größe"])
    return library


def with_bytes(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Give a trained model the 256 byte tokens that sentencepiece would have given it."""
    description = json.loads(library.to_str())
    model = description["model"]
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if model["type"] == "Unigram":
        model["vocab"] += [[name, -20.0] for name in names]
    else:
        model["vocab"] |= {name: len(model["vocab"]) + i for i, name in enumerate(names)}
    model["byte_fallback"] = True
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def llama_bpe() -> tokenizers.Tokenizer:
    """Llama 2's: spaces are "▁", one is put before the text, and one is taken from it again."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", *SPECIAL], limit_alphabet=40, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library = with_bytes(library)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return library


def unigram() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=["<unk>", *SPECIAL],
        unk_token="<unk>",
        show_progress=False,
    )
    library.train_from_iterator(CORPUS[:1], trainer)
    library = with_bytes(library)
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return library


def metaspace_only() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=250, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def word_piece() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def word_suffix() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=250,
        special_tokens=["<unk>", *SPECIAL],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def without_decoder() -> tokenizers.Tokenizer:
    library = metaspace_only()
    library.decoder = None  # type: ignore[assignment]
    return library


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "llama_bpe": llama_bpe,
    "unigram": unigram,
    "metaspace_only": metaspace_only,
    "word_piece": word_piece,
    "word_suffix": word_suffix,
    "without_decoder": without_decoder,
}
TOKENIZERS = {name: Tokenizer(make()) for name, make in KINDS.items()}
BYTE_FALLBACK = ["llama_bpe", "unigram"]

any_kind = pytest.mark.parametrize("kind", KINDS)
byte_fallback = pytest.mark.parametrize("kind", BYTE_FALLBACK)


def stream(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Deltas of the pushes, and of the flush at the end."""
    decoder = IncrementalDecoder(tokenizer)
    return [*map(decoder.push, ids), decoder.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    if tokenizer.has_byte_fallback:
        ids = [tokenizer.byte_id(byte) for byte in data]
    else:
        by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        ids = [by_byte[bytes([byte])] for byte in data]
    return [index for index in ids if index is not None]


# Decoding, token by token.


@any_kind
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_deltas_of_any_tokens_are_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    # Ids past the vocabulary too: a model's own may be padded.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    for special in SPECIAL:
        assert special not in "".join(deltas)


WITH_A_SPACE = ["llama_bpe", "unigram", "metaspace_only"]


@pytest.mark.parametrize("kind", WITH_A_SPACE)
@pytest.mark.parametrize("text", ["the", " the", "  the", "fox jumps", " dog,"])
def test_a_text_after_another_gets_no_space_and_loses_none(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    before = tokenizer.encode("the quick")
    ids = tokenizer.encode_after(text, before)
    decoder = IncrementalDecoder(tokenizer, continues=True)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == text
    assert tokenizer.decode([*before, *ids]) == "the quick" + text
    # At the beginning, and after nothing that has text, it is as ever.
    assert tokenizer.encode_after(text, []) == tokenizer.encode(text)
    assert tokenizer.encode_after(text, [tokenizer.token_to_id("<s>"), -1]) == tokenizer.encode(
        text
    )


def test_a_text_after_an_added_token_is_encoded_as_the_whole_is() -> None:
    first = metaspace_only()
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    for tokenizer in (*(TOKENIZERS[kind] for kind in WITH_A_SPACE), Tokenizer(first)):
        whole = tokenizer.encode("the fox</s>dog", add_special_tokens=False)
        before = tokenizer.encode("the fox</s>", add_special_tokens=False)
        assert [*before, *tokenizer.encode_after("dog", before)] == whole


def test_other_tokenizers_encode_alike_everywhere() -> None:
    for kind in ("byte_level", "word_piece", "word_suffix"):
        tokenizer = TOKENIZERS[kind]
        before = tokenizer.encode("the")
        assert tokenizer.encode_after(" fox", before) == tokenizer.encode(" fox")
    spaced = byte_level()
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = Tokenizer(spaced)
    ids = tokenizer.encode_after("fox", tokenizer.encode("the"))
    assert tokenizer.decode(tokenizer.encode("fox")) == " fox" and tokenizer.decode(ids) == "fox"


@any_kind
@settings(max_examples=60, deadline=None)
@given(text=HARD_TEXTS)
def test_deltas_of_a_text_are_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids)) == tokenizer._library.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", *BYTE_FALLBACK])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_deltas_of_any_bytes_are_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    pieces = st.one_of(
        HARD_TEXTS.map(str.encode),
        st.binary(max_size=4),
        st.sampled_from([b"\xf0\x9f", b"\x98\x80", b"\xe2\x82", b"\xed\xa0\x80", b"\xc0\x80"]),
    )
    ids: list[int] = []
    for piece in data.draw(st.lists(pieces, max_size=8)):
        ids += byte_ids(tokenizer, piece)
        ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_byte_level_text_is_the_librarys(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    ids += byte_ids(tokenizer, data.draw(st.binary(max_size=12)))
    assert tokenizer.decode(ids) == tokenizer._library.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer._library.decode(
        ids, skip_special_tokens=False
    )


@byte_fallback
@settings(max_examples=100, deadline=None)
@given(text=HARD_TEXTS, data=st.data())
def test_characters_in_bytes_are_the_librarys(kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids: list[int] = []
    for character in text:
        ids += byte_ids(tokenizer, character.encode())
        ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 257), max_size=1))
    expected = tokenizer._library.decode(ids)
    assert tokenizer.decode(ids) == expected
    assert "".join(stream(tokenizer, ids)) == expected


@byte_fallback
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x80", REPLACEMENT),
        (b"\xf0\x9f", REPLACEMENT * 2),
        ("é".encode() + b"\x80", "é" + REPLACEMENT),
        ("😀".encode() + b"\xf0\x9f\x98" + "é".encode(), "😀" + REPLACEMENT * 3 + "é"),
        (b"\xed\xa0\x80" + "\ufffd".encode() + b"a", REPLACEMENT * 4 + "a"),
    ],
)
def test_characters_beside_broken_bytes_are_kept(kind: str, data: bytes, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = byte_ids(tokenizer, data)
    assert tokenizer.decode(ids) == text
    assert "".join(stream(tokenizer, ids)) == text
    assert tokenizer.decode([*ids, *tokenizer.encode("the")]) in (text + " the", text + "▁the")


@byte_fallback
def test_a_broken_byte_begins_the_text(kind: str) -> None:
    """The space of the first word is no longer the first one of the text."""
    tokenizer = TOKENIZERS[kind]
    the = tokenizer.encode("the")
    assert tokenizer.decode(the) == "the"
    ids = [*byte_ids(tokenizer, b"\xff"), *the]
    assert "".join(stream(tokenizer, ids)) == tokenizer._library.decode(ids) == "\ufffd the"


def test_a_broken_byte_begins_the_text_of_a_vocabulary_without_ascii() -> None:
    vocab = {"<unk>": 0, "<0xFF>": 1, "▁a": 2}
    library = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ids = [1, *[2] * 6, 1]
    assert "".join(stream(Tokenizer(library), ids)) == library.decode(ids)
    assert library.decode(ids) == "\ufffd a a a a a a\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", *BYTE_FALLBACK])
@pytest.mark.parametrize("text", ["é", "日", "😀"])
def test_a_character_comes_with_its_last_byte(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    data = text.encode()
    assert stream(tokenizer, byte_ids(tokenizer, data)) == [""] * (len(data) - 1) + [text, ""]


@any_kind
@settings(max_examples=60, deadline=None)
@given(text=HARD_TEXTS)
def test_no_half_character_is_ever_emitted(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    deltas = stream(tokenizer, ids)
    assert sum(delta.count(REPLACEMENT) for delta in deltas) == whole.count(REPLACEMENT)
    assert not any("\ud800" <= character <= "\udfff" for character in "".join(deltas))


@any_kind
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_little_is_held_back(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    decoder = IncrementalDecoder(tokenizer)
    emitted = ""
    for count, token_id in enumerate(ids, start=1):
        emitted += decoder.push(token_id)
        so_far = tokenizer.decode(ids[:count])
        assert so_far.startswith(emitted)
        assert set(so_far[len(emitted) :]) <= {REPLACEMENT}
        assert len(so_far) - len(emitted) <= 3


class CountingLibrary:
    """Passes everything on and keeps the sizes of what was decoded."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self.decoded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded.append(len(ids))
        return self._library.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["byte_level", "llama_bpe", "unigram", "metaspace_only"])
@pytest.mark.parametrize("pathology", ["lone bytes", "specials", "spaces", "text", "replacement"])
def test_the_window_is_bounded(kind: str, pathology: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    has_bytes = tokenizer.is_byte_level or tokenizer.has_byte_fallback
    ids = {
        "lone bytes": lambda: byte_ids(tokenizer, b"\x80") if has_bytes else [0],
        "specials": lambda: [tokenizer.token_to_id("<s>")],
        "spaces": lambda: tokenizer.encode(" ") or [0],
        "text": lambda: tokenizer.encode("the quick 😀"),
        "replacement": lambda: byte_ids(tokenizer, "\ufffd".encode()) if has_bytes else [0],
    }[pathology]()
    repeated = [index for index in ids if index is not None] * (2000 // len(ids))
    expected = tokenizer.decode(repeated)
    counting = CountingLibrary(tokenizer._library)
    tokenizer._library = counting  # type: ignore[assignment]
    assert "".join(stream(tokenizer, repeated)) == expected
    assert max(counting.decoded, default=0) <= 32
    assert len(counting.decoded) <= 3 * len(repeated) + 3


def test_an_unknown_mixture_of_decoders_is_streamed_by_window() -> None:
    library = byte_level()
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("fox", "cat")])
    tokenizer = Tokenizer(library)
    assert not tokenizer.is_byte_level
    ids = tokenizer.encode("the 😀 schön 日本語")
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == "the 😀 schön 日本語"
    assert not any(REPLACEMENT in delta for delta in deltas)


def test_special_tokens_can_be_kept() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("<s>fox</s>")
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == "<s>fox</s>"
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>fox</s>"


def test_added_tokens_may_be_written_in_any_characters() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a<tool call>b")
    assert "<tool call>" in map(tokenizer.id_to_token, ids)
    assert "".join(stream(tokenizer, ids)) == "a<tool call>b"


@pytest.mark.parametrize("token_id", [-1, 2**32, "a", None, 1.0])
def test_what_is_no_token_id_is_refused(token_id: Any) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    with pytest.raises(ValueError, match=r"token id .* is not an integer in \[0, 2\*\*32\)"):
        tokenizer.decode([token_id])
    with pytest.raises(ValueError, match=r"token id .* is not an integer in \[0, 2\*\*32\)"):
        IncrementalDecoder(tokenizer).push(token_id)


# Stop strings.


def naive_stop(
    text: str, stops: Sequence[str], include: bool = False, unarmed: int = 0
) -> tuple[str, str | None]:
    """The match that ends first, of those the first of the list, by trying every place.

    Those that end in the first `unarmed` characters are none.
    """
    for end in range(unarmed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - len(found[0])], found[0]
    return text, None


def naive_held(text: str, stops: Sequence[str]) -> int:
    """Characters at the end that could still become a stop string."""
    lengths = (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text(alphabet="ab\n", max_size=6), max_size=8)


@settings(max_examples=500, deadline=None)
@given(stops=STOPS, pieces=PIECES, include=st.booleans(), unarmed=st.integers(0, 3))
@example(stops=["abab", "b\n"], pieces=["aab", "ab\n"], include=False, unarmed=0)
@example(stops=["aab"], pieces=["aaaab"], include=False, unarmed=0)
@example(stops=["aa"], pieces=["aa", "a"], include=True, unarmed=1)
def test_stop_strings_equal_a_search_of_the_whole_text(
    stops: list[str], pieces: list[str], include: bool, unarmed: int
) -> None:
    """Nothing matches in the first `unarmed` pieces; it may begin there, even inside a match."""
    characters = len("".join(pieces[:unarmed]))
    expected, matched = naive_stop("".join(pieces), stops, include, characters)
    stop_strings = StopStrings(stops, include=include)
    emitted, seen = "", ""
    for index, piece in enumerate(pieces):
        seen += piece
        text, found = stop_strings.push(piece, armed=index >= unarmed)
        emitted += text
        assert found == stop_strings.matched
        if found is None:
            held = 0 if include else naive_held(seen, stops)
            assert len(seen) - len(emitted) == held
    assert stop_strings.matched == matched
    assert emitted + stop_strings.flush() == expected


def test_stop_strings_end_the_text() -> None:
    stops = StopStrings(["\n\n", "END"])
    assert stops.push("some E") == ("some ", None)
    assert stops.push("N or") == ("EN or", None)
    assert stops.push("\n") == ("", None)
    assert stops.push("\nmore") == ("", "\n\n")
    assert stops.push("more") == ("", "\n\n")
    assert stops.flush() == ""


def test_the_earliest_end_wins_then_the_first_of_the_list() -> None:
    assert StopStrings(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopStrings(["c", "abc", "bc"]).push("xabc") == ("xab", "c")
    assert StopStrings(["abc", "c", "bc"]).push("xabc") == ("x", "abc")
    assert StopStrings("abc").push("xabc") == ("x", "abc")


def test_stop_strings_are_found_in_linear_time() -> None:
    """Text that nearly matches over and over: a search from every place would take minutes."""
    stops = StopStrings("a" * 50_000 + "b")
    emitted = "".join(stops.push("a" * 100)[0] for _ in range(2000))
    assert emitted == "a" * 150_000
    assert stops.push("b") == ("", "a" * 50_000 + "b")


@pytest.mark.parametrize("stops", [[""], ["a", ""], "", [3], [None]])
def test_empty_stop_strings_are_refused(stops: Any) -> None:
    with pytest.raises(ValueError, match="a stop string must be a string that is not empty, got"):
        StopStrings(stops)


def test_a_text_stream_stops_inside_a_character_of_tokens() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text_stream = TextStream(tokenizer, ["😀!"])
    results = [text_stream.push(index) for index in byte_ids(tokenizer, "hi 😀!x".encode())]
    assert "".join(text for text, _ in results) + text_stream.flush() == "hi "
    assert [stopped for _, stopped in results] == [None] * 7 + ["😀!", "😀!"]


def test_a_text_stream_flushes_both_of_its_parts() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text_stream = TextStream(tokenizer, ["abc"])
    deltas = [text_stream.push(index)[0] for index in byte_ids(tokenizer, b"xab\xf0\x9f")]
    assert deltas == ["x", "", "", "", ""]
    assert text_stream.flush() == "ab\ufffd"


# Reading a directory.


def save(directory: Path, library: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
    """A tokenizer directory; files by name without their ending, as objects."""
    (library or byte_level()).save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the fox 😀"}]


def test_a_directory_without_configs_is_enough(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(save(tmp_path))
    ids = tokenizer.encode("the quick brown fox")
    assert tokenizer.decode(ids) == "the quick brown fox"
    assert tokenizer.vocab_size == byte_level().get_vocab_size()
    assert tokenizer.bos_token_id is tokenizer.eos_token_id is tokenizer.pad_token_id is None
    assert tokenizer.token_to_id("</s>") == 1
    assert tokenizer.id_to_token(1) == "</s>"
    assert tokenizer.id_to_token(10**6) is None
    assert not tokenizer.has_chat_template


def test_special_tokens_come_from_both_configs(tmp_path: Path) -> None:
    save(
        tmp_path,
        special_tokens_map={"bos_token": "fox", "pad_token": {"content": "<s>", "lstrip": False}},
        tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None},
    )
    tokenizer = Tokenizer.from_directory(str(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 0)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}


def test_tokens_that_a_config_calls_special_are_special(tmp_path: Path) -> None:
    library = byte_level()
    library.add_tokens(["<|a|>", "<|b|>", "<|c|>", "<|d|>"])
    tokens = {str(library.token_to_id("<|c|>")): {"content": "<|c|>", "special": True}}
    config = {
        "eos_token": "<|a|>",
        "additional_special_tokens": ["<|b|>", {"content": "<not there>"}],
        "added_tokens_decoder": tokens,
    }
    tokenizer = Tokenizer.from_directory(save(tmp_path, library, tokenizer_config=config))
    ids = tokenizer.encode("x<|a|><|b|><|c|><|d|>y")
    assert len(ids) == 6
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "x<|d|>y"
    assert tokenizer.vocab_size == library.get_vocab_size()


def with_bos(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return library


@pytest.mark.parametrize(
    ("flags", "begins", "ends"),
    [
        ({}, True, False),
        ({"add_bos_token": None}, True, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_eos_token": True}, True, True),
        ({"add_bos_token": False, "add_eos_token": True}, False, True),
    ],
)
def test_bos_and_eos_are_added_as_configured(
    tmp_path: Path, flags: dict[str, bool], begins: bool, ends: bool
) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", **flags}
    save(tmp_path, with_bos(byte_level()), tokenizer_config=config)
    tokenizer = Tokenizer.from_directory(tmp_path)
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.decode(plain, skip_special_tokens=False) == "the fox"
    assert tokenizer.encode("the fox") == [0] * begins + plain + [1] * ends


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(4)
    library.enable_padding(length=8)
    tokenizer = Tokenizer.from_directory(save(tmp_path, library))
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]
    assert len(tokenizer.encode("a")) == 1


def test_text_that_cannot_be_encoded_is_named() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    with pytest.raises(ValueError, match="text to encode must be a string, got 3"):
        tokenizer.encode(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has a lone surrogate '\\ud83d' at 2"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize(
    ("files", "pattern"),
    [
        ({"tokenizer.json": None}, r"has no tokenizer.json"),
        ({"tokenizer.json": "{}"}, r"tokenizer.json is not a tokenizer: "),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config.json is not valid JSON: .*line 1"),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config.json must hold a JSON object, it ho"),
        ({"special_tokens_map.json": "3"}, r"special_tokens_map.json must hold a JSON object"),
        ({"tokenizer_config.json": '{"add_bos_token": 1}'}, r"add_bos_token=1: must be true or"),
        (
            {"tokenizer_config.json": '{"add_eos_token": true, "eos_token": "<nowhere>"}'},
            r"asks for add_eos_token, but eos_token is '<nowhere>', which is not in the vocab",
        ),
        ({"tokenizer_config.json": '{"chat_template": 3}'}, r"has chat_template=3: must be a str"),
        (
            {"tokenizer_config.json": '{"chat_template": [{"name": "default"}]}'},
            r"must be a string or a list of objects with name and template",
        ),
        ({"chat_template.jinja": b"\xff"}, r"chat_template.jinja is not UTF-8 text"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, files: dict[str, str | bytes | None], pattern: str
) -> None:
    save(tmp_path)
    for name, content in files.items():
        if content is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=pattern):
        Tokenizer.from_directory(tmp_path)


# Chat templates.


def test_a_conversation_becomes_tokens(tmp_path: Path) -> None:
    save(tmp_path, with_bos(byte_level()), tokenizer_config={"chat_template": TEMPLATE})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.has_chat_template
    text = "<|user|>user: the fox 😀</s><|user|>assistant:"
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.render_chat(MESSAGES) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == tokenizer.token_to_id("<|user|>")
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == (
        "<|user|>user: the fox 😀</s>"
    )


def test_template_files_go_before_the_config(tmp_path: Path) -> None:
    save(tmp_path, tokenizer_config={"chat_template": "config"})
    (tmp_path / "chat_template.jinja").write_text("file {{ tools is none }}")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ tools | tojson }}")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.render_chat(MESSAGES) == "file True"
    tools = [{"type": "function", "function": {"name": "größe<>"}}]
    assert tokenizer.render_chat(MESSAGES, tools=tools) == json.dumps(tools, ensure_ascii=False)


def test_named_templates_of_the_config(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    save(tmp_path, tokenizer_config={"chat_template": templates})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.render_chat(MESSAGES) == "d"
    assert tokenizer.render_chat(MESSAGES, tools=[]) == "t"


def test_a_missing_template_is_said(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    with pytest.raises(ValueError, match="the checkpoint has no chat template: give text or token"):
        tokenizer.apply_chat_template(MESSAGES)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("x")
    tokenizer = Tokenizer.from_directory(save(tmp_path))
    with pytest.raises(ValueError, match=r"no chat template; it has templates named \['rag'\]"):
        tokenizer.apply_chat_template(MESSAGES)


PARITY_TEMPLATE = """\
{%- if not messages %}{{ raise_exception("none") }}{% endif %}
{{ bos_token }}{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if loop.last %}last of {{ loop.length }}{% endif %}
    {{ loop.index }}{{ loop.nextitem is defined }}{{ loop.cycle('odd', 'even') }}
    {%- set ns.count = ns.count + 1 %}
<|{{ message['role'] }}|>{{ message.content | trim | upper ~ '!' }} {{ message.content.split(' ') }}
{% generation %}{{ message.content }}{% endgeneration %}
{% filter upper | trim %} abc {% endfilter %}{{ message | tojson(indent=1) }}
{% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{% for key, value in messages[0].items() if key != 'z' %}{{ key }}{{ value }}{% endfor %}
{% for x in nothing %}{% else %}empty{% endfor %}{{ '%s-%d' % ('a', ns.count) }}{{ 'ab' * 3 }}
{%- macro twice(text) %}{{ text }}{{ text }}{% endmacro %}{{ twice('<b>') }}{{ [1] + [2] }}
{%- for part in [1, [2, 3]] recursive %}{{ part if part is number else loop(part) }}{% endfor %}
{{- messages | map(attribute='role') | join(',') }}{{ tools }}{{ documents }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""


def test_templates_render_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    save(tmp_path, tokenizer_config=config)
    (tmp_path / "chat_template.jinja").write_text(PARITY_TEMPLATE)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    messages = [
        {"role": "system", "content": " be <brief> & 'kind' "},
        {"role": "skip", "content": ""},
        {"role": "user", "content": "größe 😀 the fox"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for options in ({}, {"tools": tools}, {"add_generation_prompt": False}):
        wanted: dict[str, Any] = {"add_generation_prompt": True, **options}
        text = oracle.apply_chat_template(messages, tokenize=False, **wanted)
        assert tokenizer.render_chat(messages, **options) == text
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.apply_chat_template(messages, **options) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_strftime_now_is_the_local_date() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') | length }}").render(MESSAGES)
    assert text == "4"


def test_messages_may_carry_more_than_text() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    parts = {"role": "user", "content": ({"type": "text", "text": "hi"},)}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    assert template.render([parts, call]) == (
        '{"role": "user", "content": [{"type": "text", "text": "hi"}]}'
        '{"role": "assistant", "tool_calls": [{"name": "f"}]}'
    )


@pytest.mark.parametrize(
    ("messages", "pattern"),
    [
        ("hello", "chat messages must be a list that is not empty, got 'hello'"),
        ([], r"chat messages must be a list that is not empty, got \[\]"),
        ({"role": "user"}, "chat messages must be a list that is not empty, got {'role'"),
        (["hi"], "chat message 0 must be a dict, got 'hi'"),
        ([{"content": "x"}], "chat message 0 has role=None: must be a string: {'content': 'x'}"),
        ([*MESSAGES, {"role": 3, "content": "x"}], "chat message 1 has role=3"),
        ([{"role": "user", "content": 3}], "has content=3: must be a string or a list of dicts"),
        ([{"role": "user", "content": ["x"]}], r"has content=\['x'\]"),
        ([{"role": "user", "content": "x", "y": {1, 2}}], "chat messages must hold plain JSON val"),
    ],
)
def test_bad_messages_are_named(messages: Any, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        ChatTemplate(TEMPLATE).render(messages)


@pytest.mark.parametrize(
    ("tools", "pattern"),
    [
        ({"name": "f"}, "tools must be a list of dicts"),
        ([print], "tools must be a list of dicts"),
        ([{"f": print}], "tools must hold plain JSON values"),
    ],
)
def test_bad_tools_are_named(tools: Any, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        ChatTemplate(TEMPLATE).render(MESSAGES, tools=tools)


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("{{ raise_exception('roles must alternate') }}", "failed: roles must alternate"),
        ("{{ raise_exception('x' * 100000) }}", r"failed: x{1000}\.\.\. \(line 1: \{\{ ra"),
        ("{% if %}", "not valid jinja: line 1: Expected an expression"),
        ("\n{{ x | nosuchfilter }}", "not valid jinja: line 2: No filter named"),
        ("{{ messages[0].content.foo.bar }}", "failed: 'str object' has no attribute 'foo'"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError: division by zero"),
        ("{% include 'x' %}", "failed: TypeError: no loader"),
        # What only an attacker writes.
        ("{{ ''.__class__.__mro__ }}", "failed: access to attribute '__class__' .* is unsafe"),
        (
            "{{ ''['__class__']['__mro__'] }}",
            "failed: access to attribute '__class__' .* is unsafe",
        ),
        ("{{ (''|attr('__class__')).__mro__ }}", "failed: access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__ }}", "failed: access to attribute '__init__'"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "failed: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "failed: access to attribute 'append' of 'list' object"),
        ("{{ namespace(__class__=1) }}", "failed: a namespace cannot hold '__class__'"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "failed: a namespace cannot hold '_x'"),
        ("{{ lipsum(100000) }}", "failed: 'lipsum' is undefined"),
        # What would take the host's time or memory.
        ("{% for i in range(10**9) %}{% endfor %}", "failed: OverflowError: Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "failed: it took more than 0.3 seconds",
        ),
        (
            "{% for i in range(99999) recursive %}{{ loop(range(99999)) if depth is not defined "
            "and loop.depth < 2 }}{% endfor %}",
            "failed: it took more than 0.3 seconds",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(50) }}",
            "failed: it took more than 0.3 seconds",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: RecursionError"),
        ("{{ 'ab' * 10**9 }}", f"2000000000 characters or items exceed the limit of {MAX_SIZE}"),
        ("{{ 10**9 * [1] }}", "1000000000 characters or items exceed"),
        ("{{ 10**(10**9) }}", "an integer of 3000000001 bits or more exceeds the limit of 4096"),
        (
            "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}"
            "{% endfor %}",
            r"it made an integer of \d+ bits, the limit is 4096",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
            "{% endfor %}",
            rf"\d+ characters or items exceed the limit of {MAX_SIZE}",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
            "{% endfor %}",
            rf"\d+ characters or items exceed the limit of {MAX_SIZE}",
        ),
        (
            "{% set x = 'ab' * 1000000 %}{{ x.replace('a', 'aaaaaaaaaaaaaaaaaaaa') }}",
            rf"21000000 characters or items exceed the limit of {MAX_SIZE}",
        ),
        ("{{ 'a'.ljust(10**9) }}", "failed: access to attribute 'ljust'"),
        (
            "{% set x = 'a' * 100000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
            f"failed: it wrote more than {MAX_SIZE} characters",
        ),
    ],
)
def test_faults_and_attacks_of_templates_are_value_errors(
    source: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphengine.text.sandbox.MAX_SECONDS", 0.3)
    with pytest.raises(ValueError, match=pattern):
        ChatTemplate(source).render(MESSAGES)


def test_an_error_names_the_template_and_the_line() -> None:
    source = "{% set x = 1 %}\n{% for m in messages %}\n  {{ m.content.foo.bar }}\n{% endfor %}"
    with pytest.raises(ValueError, match=r"'foo' \(line 3: \{\{ m\.content\.foo\.bar \}\}\)$"):
        ChatTemplate(source).render(MESSAGES)
    message = r"^the chat template 'rag' is not valid jinja: line 2: .*'endfor'.*: \{% endfor %\}$"
    with pytest.raises(ValueError, match=message):
        ChatTemplate("{% if x %}\n{% endfor %}\n", "rag").render(MESSAGES)
    called = "{% macro f(x) %}\n{{ x / 0 }}{% endmacro %}\n\n{{ f(1) }}"
    with pytest.raises(ValueError, match=r"ZeroDivisionError.* \(line 2: \{\{ x / 0 \}\}"):
        ChatTemplate(called).render(MESSAGES)
    with pytest.raises(ValueError, match=r"\(line 1: \{\{ y+\.\.\.\)$"):
        ChatTemplate("{{ " + "y" * 999 + ".z }}").render(MESSAGES)


def test_a_failed_rendering_leaves_the_template_usable() -> None:
    template = ChatTemplate("{{ messages[0].content * (messages[0].times | int) }}")
    with pytest.raises(ValueError, match="exceed the limit"):
        template.render([{"role": "user", "content": "ab", "times": 10**9}])
    for _ in range(3):
        assert template.render([{"role": "user", "content": "ab", "times": 2}]) == "abab"
