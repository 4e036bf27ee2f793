"""How byte-level tokenizers of GGUF files cut texts into words, by the name of the pre-tokenizer.

The names are llama.cpp's. The rules are those of the models' own `tokenizer.json`, where they
differ. A name is listed only if its rules and its normalisation of texts are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from graphengine.models.checkpoints.gguf.file import GgufFile
from graphengine.options.checks import shown

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _CASED_SYMBOLS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_SYMBOLS}|{_REST}"
)
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{_CASED_SYMBOLS}|{_REST}"
)
# DeepSeek-V3: digits by threes, then Chinese and Japanese, then everything else.
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
)
# DeepSeek-LLM and V2 list cased letters one range after the other.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CHINESE,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}"


class Splitting(NamedTuple):
    """How a byte-level tokenizer cuts a text into words.

    patterns       regular expressions of words; each is applied to the text that the one before it
                   left between its words. None: GPT-2's, built into `tokenizers`
    digits         whether each digit is a word
    whole          whether a word that is a token is not merged from smaller ones
    composed       whether texts are normalised to NFC
    begins         whether BOS comes first where the file does not say
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    whole: bool = False
    composed: bool = False
    begins: bool = False


_OF_LLAMA3 = Splitting((_LLAMA3,), whole=True, begins=True)
SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), Splitting()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), Splitting(digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "pixtral"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting((_LLAMA3,))),
    **dict.fromkeys(("glm4", "chatglm-bpe"), Splitting((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Splitting((_QWEN2,), composed=True)),
    "qwen35": Splitting((_QWEN35,), composed=True),
    "tekken": Splitting((_TEKKEN,), whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Splitting((_GPT4O,))),
    "stablelm2": Splitting((_QWEN2,), composed=True),
    "deepseek-llm": Splitting(_DEEPSEEK),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "deepseek-v3": Splitting(_DEEPSEEK3),
    "seed-coder": Splitting((_SEED,)),
}
"""Rules by the value of `tokenizer.ggml.pre`."""


def unknown_tokenizer(file: GgufFile) -> str | None:
    """Text that names a file's unknown tokenizer; None: the tokenizer is known, or there is
    none.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in file.metadata or kind == "llama":
        return None
    if kind != "gpt2":
        return f"tokenizer.ggml.model={shown(kind)}"
    # Old files lack the name.
    name = file.metadata.get("tokenizer.ggml.pre")
    known = isinstance(name, str) and name in SPLITTINGS
    return None if known else f"tokenizer.ggml.pre={shown(name)}"
