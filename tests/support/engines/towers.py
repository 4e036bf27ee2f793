"""Random checkpoints of language models beside vision towers, and transformers' own towers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IMAGE = 250
"""The id that stands for a place of an image among a prompt's ids."""
SAID = 24
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def text(**keys: Any) -> dict[str, Any]:
    """A small language model's config, of odd sizes, with these keys."""
    return {
        "vocab_size": 263,
        "hidden_size": 192,
        "intermediate_size": 76,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | keys


@dataclass(frozen=True)
class Tower:
    """A model of transformers, as it is in its folder."""

    model: Any
    path: Path

    def features(self, **pixels: Any) -> Tensor:
        """The tower's embeddings of some pixels, [n, H]."""
        with torch.no_grad():
            found = self.model.model.get_image_features(**pixels).pooler_output
        found = torch.cat(tuple(found)) if isinstance(found, tuple | list) else found
        return found.reshape(-1, found.shape[-1])

    def says(self, ids: Sequence[int], tokens: int = SAID, **inputs: Any) -> list[int]:
        """Greedy tokens after these ids, among which `IMAGE` are places."""
        with torch.no_grad():
            made = self.model.generate(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                **inputs,
            )
        said: list[int] = made[0, len(ids) :].tolist()
        return said


def new_tower(
    build: Callable[[], Any], folder: Path, seed: int = 7, *, embedding_std: float = 0.2
) -> Tower:
    """The model that `build` makes, with random weights that say more than one token."""
    torch.manual_seed(seed)
    model = build().eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            is_text = "language_model" in name or "text_model" in name or "lm_head" in name
            std = 0.2 if is_text else 0.3
            torch.nn.init.normal_(weight, std=embedding_std if "embed_tokens" in name else std)
    model.save_pretrained(folder)
    return Tower(model, folder)
