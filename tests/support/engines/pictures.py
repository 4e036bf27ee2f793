"""Random pictures for transformers' vision towers, and what the towers make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from checkpoints.tower_models import PATCH
from engines.towers import IMAGE
from graphengine import GridEmbeds, ImageEmbeds
from launches.rounding_bounds import in_float64

GRIDS = ((1, 3, 5), (1, 4, 2))
"""Times, rows and columns of the embeddings of two pictures whose places are a grid."""


def pixels_of(model: Any, seed: int) -> list[dict[str, Tensor]]:
    """Two random pictures, each as transformers' model takes it."""
    dice = torch.Generator().manual_seed(seed)
    kind = model.config.model_type
    if kind.startswith("qwen"):
        width = 3 * PATCH["temporal_patch_size"] * PATCH["patch_size"] ** 2
        sizes = [torch.tensor([[time, 2 * rows, 2 * columns]]) for time, rows, columns in GRIDS]
        pixels = [torch.randn(int(each.prod()), width, generator=dice) for each in sizes]
        return [
            {"pixel_values": each, "image_grid_thw": size}
            for each, size in zip(pixels, sizes, strict=True)
        ]
    if kind == "lfm2_vl":
        return [
            {
                "pixel_values": torch.randn(1, 16, 3 * 64, generator=dice),
                "spatial_shapes": torch.tensor([[2, 8]]),
                "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int64),
            }
            for _ in range(2)
        ]
    if kind == "kimi_k25":
        sizes = [torch.tensor([[1, 4, columns]]) for columns in (6, 4)]
        return [
            {
                "pixel_values": torch.randn(int(each.prod()), 3, 8, 8, generator=dice),
                "image_grid_thw": each,
            }
            for each in sizes
        ]
    size = 40 if kind == "gemma3" else 32
    pictures = [torch.randn(1, 3, size, size, generator=dice) for _ in range(2)]
    if kind == "mistral3":
        sizes = torch.tensor([[32, 16]])
        return [{"pixel_values": each[:, :, :, :16], "image_sizes": sizes} for each in pictures]
    return [{"pixel_values": each} for each in pictures]


def joined(model: Any, pixels: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Several pictures of one sequence; in Idefics' form all of a sequence's are in one row."""
    found = {name: torch.cat([each[name] for each in pixels]) for name in pixels[0]}
    if model.config.model_type in ("idefics3", "smolvlm"):
        found["pixel_values"] = found["pixel_values"][None]
    return found


class Pictures:
    """Two pictures as parts of a prompt, and transformers' logits of sequences with them.

    parts   what stands for each in a prompt, in float32
    places  embeddings of each
    """

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.wide = model, in_float64(model)
        self.kind = model.config.model_type
        self.pixels = [] if self.kind.startswith("gemma4") else pixels_of(model, seed)
        rows = self._random_rows(seed) if not self.pixels else None
        self.rows, deepstack = (rows, [None, None]) if rows else self._features()
        self.places = [len(each) for each in self.rows]
        self.parts = [self._part(index, deepstack[index]) for index in range(2)]

    def _random_rows(self, seed: int) -> list[Tensor]:
        """In place of a tower's: transformers takes them, too."""
        dice = torch.Generator().manual_seed(seed)
        width = self.model.config.get_text_config().hidden_size
        return [torch.randn(places, width, generator=dice) for places in (11, 14)]

    @torch.no_grad()
    def _features(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The tower's embeddings of each picture in float64, and features of its levels."""
        rows, levels = [], []
        for pixels in self.pixels:
            made = self.wide.model.get_image_features(**joined(self.model, [_wide(pixels)]))
            found = made.pooler_output
            found = torch.cat(tuple(found)) if isinstance(found, tuple | list) else found
            rows.append(found.reshape(-1, found.shape[-1]))
            deep = getattr(made, "deepstack_features", None)
            parts = [each if torch.is_tensor(each) else torch.cat(each) for each in deep or ()]
            levels.append(torch.stack(parts) if parts else None)
        return rows, levels

    def _part(self, index: int, deepstack: Tensor | None) -> Any:
        rows = self.rows[index].float()
        if self.kind.startswith("qwen"):
            deepstack = None if deepstack is None else deepstack.float()
            return GridEmbeds(rows, GRIDS[index], deepstack=deepstack)
        return ImageEmbeds(rows) if self.kind.startswith("gemma") else rows

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Float64 [T, V] for a sequence in which -1 stands for places of the first pictures."""
        there = sum(each < 0 for each in ids)
        count = [0, self.places[0], sum(self.places)].index(there)
        inputs: dict[str, Any] = {}
        if count and self.pixels:
            inputs = joined(self.model, [_wide(each) for each in self.pixels[:count]])
        elif count:
            from transformers.modeling_outputs import BaseModelOutputWithPooling

            rows = [each.double() for each in self.rows[:count]]
            inputs["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=rows)}
        shown = torch.tensor([[IMAGE if each < 0 else each for each in ids]])
        kinds = "token_type_ids" if self.kind == "gemma3" else "mm_token_type_ids"
        if self.kind.startswith(("qwen", "gemma")):
            inputs[kinds] = (shown == IMAGE).long()
        if self.kind == "gemma4_unified":
            inputs["attention_mask"] = self._masks(inputs[kinds])
        found: Tensor = self.wide(input_ids=shown, **inputs).logits[0]
        return found

    def _masks(self, kinds_1T: Tensor) -> dict[str, Tensor]:
        """The masks of transformers' `generate`, whose plain forward of this form has others."""
        config = self.model.config
        width = config.get_text_config().hidden_size
        found: dict[str, Tensor] = self.wide.create_masks_for_generate(
            config,
            inputs_embeds=torch.zeros(1, kinds_1T.shape[1], width, dtype=torch.float64),
            attention_mask=None,
            past_key_values=None,
            position_ids=torch.arange(kinds_1T.shape[1])[None],
            mm_token_type_ids=kinds_1T,
        )
        return found


def _wide(pixels: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: each.double() if each.is_floating_point() else each for name, each in pixels.items()
    }
