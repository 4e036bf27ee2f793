"""The files beside tokenizer.json, whatever they hold."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from graphengine.text.tokenizer import IncrementalDecoder, Tokenizer

SPECIAL = ["<s>", "</s>", "<|user|>"]


def byte_level() -> tokenizers.Tokenizer:
    """A token a byte, and some that were added."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {name: index for index, name in enumerate(names)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    library.add_tokens(["<tool call>", "fox"])
    return library


SMALL = byte_level()


def save(directory: Path, library: tokenizers.Tokenizer, **files: Any) -> Path:
    """A tokenizer directory; files by name without their ending, as objects."""
    library.save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*map(decoder.push, ids), decoder.flush()]


# Added tokens that tokenizer.json lacks.

NEW = ["<|new|>", "<|think|>", "▁word"]


def added_tokens_decoder(library: tokenizers.Tokenizer) -> dict[str, dict[str, Any]]:
    first = library.get_vocab_size()
    described = {
        first: {"content": NEW[0], "special": True, "normalized": False, "lstrip": True},
        first + 1: {"content": NEW[1], "special": False, "rstrip": True},
        first + 2: {"content": NEW[2], "single_word": True},
        # There already, but to take the spaces around it.
        library.token_to_id("<tool call>"): {"content": "<tool call>", "lstrip": True},
    }
    return {str(index): token for index, token in reversed(described.items())}


@pytest.mark.parametrize("where", ["added_tokens_decoder", "added_tokens.json", "both"])
def test_added_tokens_of_the_other_files_are_transformers(tmp_path: Path, where: str) -> None:
    library = byte_level()
    first = library.get_vocab_size()
    config: dict[str, Any] = {"eos_token": "<|new|>"}
    files: dict[str, Any] = {}
    if where != "added_tokens.json":
        config["added_tokens_decoder"] = added_tokens_decoder(library)
    if where != "added_tokens_decoder":
        files["added_tokens"] = {name: first + 2 - index for index, name in enumerate(NEW)}
    save(tmp_path, library, tokenizer_config=config, **files)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    text = "the <|new|> fox <|think|> ▁word x▁word <tool call> y"
    ids = theirs.encode(text)
    assert set(range(first, first + 3)) <= set(ids)
    assert ours.encode(text) == ids
    assert ours.vocab_size == first + 3 and ours.largest_id == first + 2
    assert (ours.eos_token_id, ours.special_ids) == (
        theirs.eos_token_id,
        {0, 1, 2, ours.eos_token_id},
    )
    for skip in (True, False):
        decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == decoded
    assert "".join(stream(ours, ids)) == ours.decode(ids)
    again = Tokenizer(tokenizers.Tokenizer.from_str(ours.to_json()))
    assert again.encode(text) == ids


def test_an_added_token_that_comes_to_another_id_is_said(tmp_path: Path, caplog: Any) -> None:
    library = byte_level()
    first = library.get_vocab_size()
    save(tmp_path, library, added_tokens={"<|new|>": first + 5})
    assert Tokenizer.from_directory(tmp_path).token_to_id("<|new|>") == first
    assert f"'<|new|>' is to have id {first + 5}, but in tokenizer.json it comes to {first}" in (
        caplog.text
    )


# Files of any kind.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from(["<s>", "fox", "content", "7", "{{ x }}", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["content", "special", "lstrip", "name", "template", "0", "x", "999"]),
        inner,
        max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip
KEYS = ["bos_token", "eos_token", "other_token", "add_bos_token", "add_eos_token"]
KEYS += ["additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"]
KEYS += ["chat_template"]
PARTS = ["normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "added_tokens"]
PARTS += ["truncation", "padding", "version"]


@settings(max_examples=60, deadline=None)
@given(
    config=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=2),
    named=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=2) | JSON,
    added=st.dictionaries(st.sampled_from(["<|new|>", "fox", ""]), JSON, max_size=2) | JSON,
    parts=st.dictionaries(st.sampled_from(PARTS), JSON, max_size=1),
)
@example(config={"additional_special_tokens": 5}, named={}, added={}, parts={})
@example(config={"added_tokens_decoder": [1]}, named={}, added={}, parts={})
@example(config={"added_tokens_decoder": {"7": {"content": 3}}}, named={}, added={}, parts={})
@example(config={"extra_special_tokens": [[{}]]}, named={}, added={}, parts={})
@example(config={"chat_template": {"name": "a", "template": "b"}}, named={}, added={}, parts={})
@example(config={"bos_token": "\ud800"}, named={}, added={}, parts={})
def test_any_json_opens_or_is_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, config: Any, named: Any, added: Any, parts: Any
) -> None:
    directory = tmp_path_factory.mktemp("any")
    save(directory, SMALL, tokenizer_config=config, special_tokens_map=named, added_tokens=added)
    if parts:
        file = directory / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    try:
        tokenizer = Tokenizer.from_directory(directory)
    except ValueError:
        return
    with suppress(ValueError):
        tokenizer.decode(tokenizer.encode("the fox"))


@pytest.mark.parametrize(
    ("files", "pattern"),
    [
        ({"tokenizer_config": {"additional_special_tokens": 5}}, "additional_special_tokens=5: mu"),
        ({"tokenizer_config": {"extra_special_tokens": {"a": 5}}}, "must be a list of strings or"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, r"added_tokens_decoder=\[1\]: must "),
        ({"tokenizer_config": {"added_tokens_decoder": {"a": {}}}}, "'a': must be a token id in"),
        ({"tokenizer_config": {"added_tokens_decoder": {"7": "x"}}}, r"r\[7\]='x': must be an obj"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"7": {"content": "x", "special": 1}}}},
            r"added_tokens_decoder\[7\].special=1: must be true or false",
        ),
        ({"tokenizer_config": {"eos_token": 5}}, "has eos_token=5: must be a string, an object"),
        ({"added_tokens": {"x": -1}}, r"added_tokens.json has x=-1: must be a token id in \[0, 2"),
        ({"tokenizer_config": {"chat_template": {"default": "x"}}}, "has chat_template={'default'"),
    ],
)
def test_values_of_another_kind_are_named(
    tmp_path: Path, files: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(ValueError, match=pattern):
        Tokenizer.from_directory(save(tmp_path, SMALL, **files))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {
            "model": {
                "type": "BPE",
                "vocab": {"é": 0, "a": 1, "éa": 2},
                "merges": ["é a"],
                "continuing_subword_prefix": "##",
            }
        },
    ],
    ids=["normalizer", "merges"],
)
def test_a_file_that_makes_the_library_panic_is_named(
    tmp_path: Path, parts: dict[str, Any]
) -> None:
    file = save(tmp_path, SMALL) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer: tokenizers panicked"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_what_the_interpreter_raises_passes(
    interruption: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise interruption

    tokenizer = Tokenizer(SMALL)
    for name in ("encode", "decode"):
        stub = SimpleNamespace(**{name: interrupted})
        monkeypatch.setattr(tokenizer, "_library", stub)
        with pytest.raises(interruption):
            tokenizer.encode("a") if name == "encode" else tokenizer.decode([1])
