"""LoRA adapters with random matrices, as peft saves them, and what they mean: W + scale * B A."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from graphengine.models.checkpoints.checkpoint import Checkpoint

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)
FUSED = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
_NAME = re.compile(r"base_model\.model\.(.*)\.lora_A\.weight")


def linears_of(model: nn.Module | Path) -> dict[str, tuple[int, ...]]:
    """Rows and columns of the linears of a model, or of a checkpoint's folder, by name."""
    if isinstance(model, Path):
        stored = Checkpoint.open(model).tensors.items()
        return {name.removesuffix(".weight"): info.shape for name, info in stored}
    modules = [*model.named_modules()]
    found = {name: tuple(m.weight.shape) for name, m in modules if isinstance(m, nn.Linear)}
    # GPT-2's linears have columns where others have rows.
    return found | {
        name: tuple(m.weight.shape[::-1]) for name, m in modules if isinstance(m, Conv1D)
    }


def write_adapter(
    folder: Path,
    model: nn.Module | Path,
    targets: Collection[str] = ALL,
    *,
    rank: int = 5,
    alpha: float = 8,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """An adapter of the model's linears with these names, strong enough to change its tokens.

    targets  last parts of names, or whole names
    layers  the layers that have it; None: all
    config  further keys of `adapter_config.json`
    """
    random = torch.Generator().manual_seed(seed)
    ranks: Mapping[str, int] = config.get("rank_pattern") or {}
    tensors: dict[str, Tensor] = {}
    for name, shape in linears_of(model).items():
        layer = re.search(r"layers\.(\d+)\.", name)
        if not {name, name.rpartition(".")[2]} & {*targets} or not _is_layers(name):
            continue
        if layers is not None and (layer is None or int(layer[1]) not in layers):
            continue
        own = _pattern(ranks, name, rank)
        rows, columns = shape
        down = torch.randn(own, columns, generator=random) / columns**0.5
        up = torch.randn(rows, own, generator=random) * 0.4
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [*targets]}
    usual |= {"bias": "none", "task_type": "CAUSAL_LM", "lora_dropout": 0.1, "use_rslora": False}
    (folder / "adapter_config.json").write_text(json.dumps(usual | config))
    return folder


def _is_layers(name: str) -> bool:
    """Whether a linear is of the language model's layers."""
    return re.match(r"(model|gpt_neox|transformer)\.(layers|h)\.", name) is not None


def matrices(folder: Path) -> dict[str, tuple[Tensor, Tensor, float]]:
    """A, B and the scale for each linear of an adapter."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for stored in tensors:
        if match := _NAME.fullmatch(stored):
            name = match[1]
            down = tensors[stored]
            up = tensors[stored.replace("lora_A", "lora_B")]
            alpha = _pattern(config.get("alpha_pattern") or {}, name, config["lora_alpha"])
            root = math.sqrt(len(down)) if config["use_rslora"] else len(down)
            found[name] = (down, up, alpha / root)
    return found


def merged(model: nn.Module, folder: Path) -> Any:
    """A copy of the model with the adapter in its weights, computed in float64."""
    model = deepcopy(model)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, (down, up, scale) in matrices(folder).items():
            weight = modules[name].weight
            assert isinstance(weight, Tensor)
            product = scale * (up.double() @ down.double())
            product = product.t() if isinstance(modules[name], Conv1D) else product
            weight.copy_(weight.double() + product)
    return model


def _pattern(patterns: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """The value of the pattern that the end of the name fits."""
    found = [each for each in patterns if re.fullmatch(rf"(.*\.)?({each})", name)]
    return patterns[found[0]] if found else otherwise
