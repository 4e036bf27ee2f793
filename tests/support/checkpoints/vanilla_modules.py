"""Random checkpoints with a draft module for each position, which agree with their target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from checkpoints.mtp_modules import (
    HIDDEN,
    LAYOUTS,
    SIZES,
    Layout,
    Tensors,
    random_tensors,
    write_checkpoint,
)

MODULES = 3


def layout(modules: int) -> Layout:
    prefixes = tuple(f"model.mtp_layers.{index}." for index in range(modules))
    mimo = LAYOUTS["mimo"]
    config = mimo.config | {"num_nextn_predict_layers": modules}
    return replace(mimo, config=config, prefixes=prefixes)


def agreeing_tensors(modules: int) -> Tensors:
    """Weights with which all modules mostly agree with the target, which reads the last token."""
    tensors = random_tensors(layout(modules))
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = 0.05 * value
        elif name.endswith("input_proj.weight"):
            embedding_half = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
            tensors[name] = 0.03 * value + embedding_half
        elif "norm" in name:
            tensors[name] = 1 + 0.2 * (value - 1)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * 6
    return tensors


def write_agreeing(folder: Path, modules: int = MODULES) -> Path:
    return write_checkpoint(folder, SIZES | layout(modules).config, agreeing_tensors(modules))


def target_model() -> Qwen2ForCausalLM:
    """The target in transformers: MiMo's layers are those of a Qwen2."""
    tensors = agreeing_tensors(MODULES)
    own = {name: value for name, value in tensors.items() if "mtp_layers" not in name}
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    model.load_state_dict(own)
    return model.eval()
