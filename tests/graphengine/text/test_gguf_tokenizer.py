"""Tokenizers of GGUF files against those they are made from, and against transformers' reading."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.tokenization_utils_base import generate_merges

from graphengine.demo import checkpoint_path
from graphengine.models.checkpoints.gguf.file import read_gguf
from graphengine.models.checkpoints.gguf.tensors import GgufModel
from graphengine.text.gguf_tokenizer import read_gguf_tokenizer
from graphengine.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")

from checkpoints.gguf_files import vocabulary, vocabulary_file  # noqa: E402

TEXTS = (checkpoint_path().parent / "heldout.txt").read_text().split("\n\n")[:400]
WORDS = (
    "Zwölf Boxkämpfer jagen Viktor. МОСКВА 東京タワー 12345 don't I'M 3.14\r\n\n\tx+=1;  ﬁ ½ é "
    "e\u0301 🙂"
)
SPECIAL, BOS, EOS = ["<|begin|>", "<|end|>", "<|im_start|>"], "<|begin|>", "<|end|>"
DEFINED = ["<think>", "<tool call>", "    "]
# As the models' tokenizer.json files have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
PATTERNS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (LLAMA3,),
    "dbrx": (LLAMA3,),
    "qwen2": (QWEN2,),
    "stablelm2": (QWEN2,),
    "qwen35": (QWEN35,),
    "tekken": (TEKKEN,),
    "gpt-4o": (GPT4O,),
    "seed-coder": (SEED_CODER,),
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-coder": DEEPSEEK_CODER,
}
COMPOSED = ("qwen2", "qwen35", "stablelm2")
BYTE_LEVEL = ("gpt-2", "smollm", *PATTERNS)
WHOLE = ("llama-bpe", "tekken")
ROLES = {"bos": BOS, "eos": EOS, "padding": EOS}

texts = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from([*WORDS.split(" "), " ", "  ", "\n", "0", "Ab", "'S", *SPECIAL, *DEFINED]),
        max_size=12,
    ).map("".join),
)


class Pair(NamedTuple):
    """A tokenizer as a model's files have it, and the same from a GGUF file."""

    original: tokenizers.Tokenizer
    read: Tokenizer
    file: Path


def byte_level(pre: str) -> tokenizers.Tokenizer:
    """A small tokenizer, trained as those of models with this pre-tokenizer are made."""
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in WHOLE))
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in PATTERNS)
    before: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in PATTERNS.get(pre, ())
    ]
    if pre == "smollm":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    if pre in COMPOSED:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence([*before, in_bytes])
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([*TEXTS, WORDS * 20], trainer)
    # Added tokens come last, as in most models.
    library.add_special_tokens([AddedToken(each, normalized=False) for each in SPECIAL])
    library.add_tokens([AddedToken(each, normalized=False) for each in DEFINED])
    if pre in WHOLE:
        bos = library.token_to_id(BOS)
        library.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, bos)]
        )
    return library


def sentencepiece(prefix: bool) -> tuple[tokenizers.Tokenizer, list[float]]:
    """A small tokenizer like Llama 2's, or like Gemma's without a prefix, and its scores."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    trained.train_from_iterator([*TEXTS, WORDS * 20], trainer)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    # Single characters come last, with the worst scores.
    tokens += sorted(
        (each for each in pieces if each not in tokens), key=lambda each: len(each) < 2
    )
    ids = {token: index for index, token in enumerate(tokens)}
    scores = [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)]
    by_token = {token: scores[ids[token]] for token in tokens[259:]}
    merges = generate_merges({token: ids[token] for token in by_token}, by_token)
    library = tokenizers.Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    before = [normalizers.Prepend("▁")] if prefix else []
    library.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.add_tokens([AddedToken("<think>", normalized=False)])
    if prefix:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return library, scores


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """`pair("qwen2")`: each is made once."""
    folder, made = tmp_path_factory.mktemp("vocabularies"), {}

    def get(pre: str) -> Pair:
        if pre in made:
            return made[pre]
        if pre in BYTE_LEVEL:
            library = byte_level(pre)
            # What a text begins with is left to the pre-tokenizer.
            add = vocabulary(library, pre=pre, roles=ROLES, rows=1024)
        else:
            library, scores = sentencepiece(pre == "prefix")
            roles = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"}
            more = (
                {}
                if pre == "prefix"
                else {
                    "ggml.add_space_prefix": False,
                    "ggml.add_bos_token": False,
                }
            )
            add = vocabulary(library, model="llama", scores=scores, roles=roles, more=more)
        file = vocabulary_file(add, folder / f"{pre}.gguf")
        made[pre] = Pair(library, Tokenizer.from_directory(file), file)
        return made[pre]

    return get


def assert_same(pair: Pair, text: str) -> None:
    ids = pair.original.encode(text).ids
    assert pair.read.encode(text) == ids
    assert (
        pair.read.encode(text, add_special_tokens=False)
        == pair.original.encode(text, add_special_tokens=False).ids
    )
    assert pair.read.decode(ids) == pair.original.decode(ids)
    assert pair.read.decode(ids, skip_special_tokens=False) == pair.original.decode(
        ids, skip_special_tokens=False
    )


@pytest.mark.parametrize("pre", [*BYTE_LEVEL, "prefix", "no prefix"])
def test_ids_and_texts_are_the_originals(pair: Callable[[str], Pair], pre: str) -> None:
    both = pair(pre)

    @given(texts)
    @example(WORDS)
    @example("  two spaces<think>  after <|im_start|> that\n\n\n12345678")
    def check(text: str) -> None:
        assert_same(both, text)

    check()
    for text in TEXTS[:40]:
        assert_same(both, text)
    assert both.read.vocabulary == both.original.get_vocab(with_added_tokens=True)


def test_words_of_deepseek_v2(tmp_path: Path) -> None:
    """Each rule also cuts the words of those before it: ASCII's letters are among punctuation, and
    Greek's later ones among Chinese.
    """
    library = byte_level("gpt-2")
    file = vocabulary_file(vocabulary(library, pre="deepseek-llm"), tmp_path / "x.gguf")
    pre_tokenizer = read_gguf_tokenizer(file).library.pre_tokenizer
    assert pre_tokenizer is not None
    text = "I don't: Größe \u1f7cΣ ԱՖ 12.5\r\n\n東京タワー! \u212a  "
    words = [text[slice(*place)] for _, place in pre_tokenizer.pre_tokenize_str(text)]
    assert words == [
        *("I", " don", "'", "t", ":", " Gr", "öß", "e", " ", "\u1f7c", "Σ", " ԱՖ", " "),
        *("1", "2", ".", "5", "\r", "\n", "\n", "東京タワー", "!", " ", "\u212a", "  "),
    ]


def save_beside(library: tokenizers.Tokenizer, folder: Path, pre: str | None = "viking") -> Path:
    """A GGUF file with a pre-tokenizer that is not known, and the tokenizer it is made from."""
    library.save(str(folder / "tokenizer.json"))
    template = {"chat_template": "{{ messages[0].content }}"}
    add = vocabulary(library, pre=pre, roles=ROLES, more=template)
    return vocabulary_file(add, folder / "x.gguf")


def tokenizer_file_of(file: Path) -> Path | None:
    return GgufModel(read_gguf(file), {}, {}, {}).tokenizer_file


@pytest.mark.parametrize("pre", ["viking", None])
def test_a_tokenizer_beside_the_file_takes_the_place_of_an_unknown_one(
    tmp_path: Path, pre: str | None
) -> None:
    library = byte_level("smollm")
    file = save_beside(library, tmp_path, pre)
    assert tokenizer_file_of(file) == tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_directory(file)
    for text in (*TEXTS[:20], WORDS, "12345<think>"):
        assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.eos_token_id == library.token_to_id(EOS)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"
    # A known pre-tokenizer needs no other file.
    assert tokenizer_file_of(save_beside(library, tmp_path, "gpt-2")) == file


def test_a_tokenizer_of_another_model_beside_the_file_is_refused(tmp_path: Path) -> None:
    file = save_beside(byte_level("smollm"), tmp_path)
    byte_level("llama-bpe").save(str(tmp_path / "tokenizer.json"))
    message = r"tokenizer\.json is of another model than .*x\.gguf: id \d+ is '.*' in it, and '"
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(file)


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2", "prefix"])
def test_transformers_reads_the_same(pair: Callable[[str], Pair], pre: str) -> None:
    both = pair(pre)
    theirs = transformers.AutoTokenizer.from_pretrained(both.file.parent, gguf_file=both.file.name)
    # It spells an added token of spaces otherwise, adds no prefix before a space, and adds GPT-2's
    # end-of-text.
    plain = [each for each in TEXTS if not re.search(r"^ | {4}|<\|endoftext\|>", each)]
    for text in [*plain, WORDS]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert both.read.encode(text, add_special_tokens=False) == ids


def test_roles_flags_and_templates(tmp_path: Path) -> None:
    library = byte_level("gpt-2")
    template, tools = "{{ messages[0].content }}{{ eos_token }}", "{{ tools | length }}"
    more = {
        "chat_template": template,
        "chat_template.tool_use": tools,
        "ggml.add_bos_token": True,
        "ggml.add_eos_token": True,
    }
    add = vocabulary(library, pre="gpt-2", roles=ROLES, more=more)
    tokenizer = Tokenizer.from_directory(vocabulary_file(add, tmp_path / "x.gguf"))
    bos, eos = library.token_to_id(BOS), library.token_to_id(EOS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        bos,
        eos,
        eos,
    )
    assert tokenizer.encode("a") == [bos, *library.encode("a").ids, eos]
    assert tokenizer.encode("a", add_bos=False)[:1] == library.encode("a").ids
    assert tokenizer.special_ids == {library.token_to_id(each) for each in SPECIAL}
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "hi<|end|>"
    assert tokenizer.render_chat(messages, tools=[{"a": 1}]) == "1"


def refused(tmp_path: Path, **changes: Any) -> Path:
    """A file whose vocabulary has other values of these keys of `tokenizer.ggml`."""
    library = byte_level("gpt-2")
    more = {f"ggml.{key}": value for key, value in changes.items()}
    pre = None if "pre" in changes else "gpt-2"
    model = changes.pop("model", "gpt2")
    more.pop("ggml.model", None)

    def add(writer: Any) -> None:
        vocabulary(library, model=model, pre=pre, roles=ROLES, more={})(writer)
        for key, value in more.items():
            writer.kv_data[0].pop(f"tokenizer.{key}", None)
            if value is not None:
                kind = gguf.GGUFValueType.get_type(value)
                writer.add_key_value(f"tokenizer.{key}", value, kind)

    return vocabulary_file(add, tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model='bert': 'gpt2' \(byte-level BPE\) and 'llama'"),
        ({"pre": "viking"}, r"tokenizer.ggml.pre='viking': the pre-tokenizers gpt-2, .*qwen2"),
        ({"pre": ["gpt-2"]}, r"tokenizer.ggml.pre=\['gpt-2'\]: must be str"),
        ({"pre": None}, r"lacks the metadata key tokenizer.ggml.pre"),
        ({"merges": None}, r"lacks the metadata key tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, r"has the merge 'ab': two tokens are needed"),
        ({"merges": ["a \u20ac"]}, r"has no valid tokenizer: .*out of vocabulary"),
        ({"tokens": [1, 2]}, r"tokenizer.ggml.tokens, which is no list of str"),
        ({"tokens": ["a", "b"]}, r"has \d+ values in tokenizer.ggml.token_type, and 2 tokens"),
        ({"bos_token_id": 5000}, r"tokenizer.ggml.bos_token_id=5000: must be one of \d+ ids"),
        ({"add_bos_token": "yes"}, r"tokenizer.ggml.add_bos_token='yes': must be bool"),
        ({"model": "llama", "merges": None}, r"lacks the metadata key tokenizer.ggml.scores"),
    ],
)
def test_refused_vocabularies(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(refused(tmp_path, **changes))
