"""Random checkpoints of policies, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

IMAGE = 119
"""The id that stands for a place of an image."""


def policy_config(**changes: Any) -> dict[str, Any]:
    """A small pi0 of odd sizes. Changes may be for `text`, `expert`, or the policy."""
    text, expert = changes.pop("text", {}), changes.pop("expert", {})
    shared = {
        "model_type": "gemma",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "vocab_size": 120,
        "max_position_embeddings": 512,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 8,
        "image_size": 32,
        "vision_use_head": False,
    }
    text = {**shared, "hidden_size": 56, "intermediate_size": 76, **text}
    return {
        "vlm_config": {
            "model_type": "paligemma",
            "text_config": text,
            "vision_config": vision,
            "projection_dim": text["hidden_size"],
            "image_token_id": IMAGE,
        },
        "dit_config": {**shared, "hidden_size": 44, "intermediate_size": 60, **expert},
        "chunk_size": 7,
        "max_state_dim": 5,
        "max_action_dim": 6,
        "num_inference_steps": 3,
    } | changes


def save_policy(folder: Path, **changes: Any) -> Any:
    """A random policy of transformers, saved in `folder` under the names of published files.

    Skips the test where transformers has no pi0.
    """
    if not hasattr(transformers, "PI0Config"):
        pytest.skip("this transformers has no pi0")
    torch.manual_seed(5)
    config = transformers.PI0Config(**policy_config(**changes))
    model = transformers.PI0ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "norm" in name:
                values.normal_(std=0.3)
            elif "vision" not in name and values.dim() == 2:
                # Larger than usual: so that actions depend on what they attend to.
                values.normal_(std=values.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return model
