"""The demo model's byte-level BPE tokenizer: training, saving and encoding."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo_training.corpus import END_OF_TEXT, Document

END_OF_TEXT_ID = 0
SAMPLE_CHARACTERS = 40_000_000
ENCODE_BATCH = 512

# Qwen2's pattern: for a qwen3 model AutoTokenizer takes transformers' Qwen2Tokenizer, which
# replaces our pattern by its own, so ours must be the same. Newlines never merge with the
# indentation after them, so a prompt may end at either.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# A toy, so that chats can be tried: the model was trained on source code and knows no roles, so a
# conversation is the text of its messages, and a reply is a continuation.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def train_tokenizer(documents: Sequence[Document], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` ids if the text has that many merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(documents), trainer)
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    return tokenizer


def sample(documents: Sequence[Document]) -> Iterator[str]:
    """Every n-th document, so that about SAMPLE_CHARACTERS are counted."""
    total = sum(len(document.text) for document in documents)
    for document in documents[:: max(1, round(total / SAMPLE_CHARACTERS))]:
        yield document.text


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_positions: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> torch.Tensor:
    """int32 [tokens]: documents separated, preceded and followed by an end-of-text token."""
    texts = [document.text for document in documents]
    separator = np.array([END_OF_TEXT_ID], dtype=np.int32)
    parts = [separator]
    # In batches: an Encoding also holds offsets and masks, many times the size of its ids.
    for start in range(0, len(texts), ENCODE_BATCH):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + ENCODE_BATCH]):
            parts += [np.asarray(encoding.ids, dtype=np.int32), separator]
    return torch.from_numpy(np.concatenate(parts))
