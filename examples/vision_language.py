"""Pictures in prompts: a vision tower of transformers sees, and the engine's language model tells.

    python examples/vision_language.py

The model is a tiny Qwen2-VL with random weights, so that the words mean nothing; with a folder of
Qwen2-VL, Qwen2.5-VL or Qwen3-VL, `tower` and `Engine.from_pretrained` take that. The engine opens
the same folder and leaves the tower's tensors alone.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers

from graphengine import Engine, GridEmbeds, PromptParts, Result, SamplingParams

PATCH, MERGED = 4, 2  # pixels of a patch's side, patches of a place's side
BEGIN, END = 252, 253  # vision_start_token_id, and a token that ends a picture
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tiny_model(folder: str) -> Any:
    """A model with random weights, which it also saves."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 11, 13]}
    text: dict[str, Any] = {"vocab_size": 263, "hidden_size": 192, "intermediate_size": 76}
    text |= {"num_hidden_layers": 3}
    text |= {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 512}
    text |= {"bos_token_id": None, "eos_token_id": None, "rope_parameters": rope}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 192, "num_heads": 2, "mlp_ratio": 2}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGED, "temporal_patch_size": 1}
    library: Any = transformers
    config = library.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=250, vision_start_token_id=BEGIN
    )
    torch.manual_seed(0)
    model = library.Qwen2VLForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model


def seen(tower: Any, picture: torch.Tensor) -> GridEmbeds:
    """The tower's output for a picture [3, height, width]: rows for its places, and their grid.

    With a published model, its image processor makes patches and grid (`image_grid_thw`).
    """
    height, width = (side // (PATCH * MERGED) for side in picture.shape[1:])
    sides = picture.view(3, height, MERGED, PATCH, width, MERGED, PATCH)
    patches = sides.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * PATCH * PATCH)
    grid = torch.tensor([[1, height * MERGED, width * MERGED]])
    with torch.no_grad():
        found = tower.get_image_features(patches, grid)
    return GridEmbeds(torch.cat(tuple(found.pooler_output)), (1, height, width))


def main() -> list[Result]:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        tower = tiny_model(folder).model
        with (
            Engine.from_pretrained(
                folder, max_batch=1, max_seq_len=256, prompt_embeds=True, dtype="float32"
            ) as engine,
            engine.session() as session,
        ):
            first, second = torch.rand(3, 32, 48), torch.rand(3, 24, 24)
            session.append(PromptParts([5, 17, BEGIN], seen(tower, first), [END, 9, 31]))
            results.append(session.generate(PARAMS))
            # The next turn feeds its own tokens and picture alone.
            session.append(PromptParts([8, BEGIN], seen(tower, second), [END, 40]))
            results.append(session.generate(PARAMS))
    for result in results:
        places = result.prompt_token_ids.count(-1)
        print(
            f"{len(result.prompt_token_ids)} tokens, {places} of them seen, "
            f"{result.cached_tokens} kept: {list(result.token_ids)}"
        )
    return results


if __name__ == "__main__":
    main()
