"""`load_format="dummy"`: random weights, which a checkpoint of the same values would have given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.few_layers import few_layers
from engines.small_engine import LONG, PROMPT, greedy, open_engine
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.random_values import random_values
from graphengine.models.checkpoints.tensor_files import TensorSlice
from graphengine.profiles.benchmark.stored_shape import write_hole

PROMPTS = [PROMPT, LONG]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The few layers with the random values that their names stand for."""
    folder = tmp_path_factory.mktemp("dummy") / "stored"
    shutil.copytree(few_layers(), folder)
    tensors = load_file(folder / "model.safetensors")
    drawn = {
        name: random_values(name, each.shape, each.dtype, "cpu") for name, each in tensors.items()
    }
    save_file(drawn, folder / "model.safetensors")
    return folder


def tokens(path: Path, **options: Any) -> list[tuple[int, ...]]:
    with open_engine(path, device="cpu", **options) as engine:
        return [each.token_ids for each in engine.generate(PROMPTS, greedy(ignore_eos=True))]


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_weights_are_random_values_of_their_names(stored: Path, quantize: str | None) -> None:
    dummy = tokens(few_layers(), load_format="dummy", quantize=quantize)
    assert dummy == tokens(stored, quantize=quantize) != tokens(few_layers(), quantize=quantize)


def test_values_in_files_are_not_read(stored: Path, tmp_path: Path) -> None:
    """They may be a hole."""
    shutil.copytree(few_layers(), tmp_path / "hole")
    file = tmp_path / "hole" / "model.safetensors"
    shapes = {name: [*each.shape] for name, each in load_file(file).items()}
    write_hole(file, shapes)
    assert not any(bool(each.any()) for each in load_file(file).values())
    with open_engine(tmp_path / "hole", device="cpu", dtype="bfloat16", load_format="dummy") as one:
        found = one.generate(PROMPTS, greedy(ignore_eos=True))
        assert len({each.token_ids for each in found}) == 2
        one.update_weights(few_layers())
        updated = [each.token_ids for each in one.generate(PROMPTS, greedy(ignore_eos=True))]
    assert updated == tokens(few_layers(), dtype="bfloat16")


def test_scales_of_kv_are_not_drawn(tmp_path: Path) -> None:
    """They are read where weights are, and 1 where these are nobody's."""
    shutil.copytree(few_layers(), tmp_path / "scaled")
    file = tmp_path / "scaled" / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        for kind in "kv":
            name = f"model.layers.{layer}.self_attn.{kind}_scale"
            tensors[name] = torch.tensor(0.02)
    save_file(tensors, file)
    plain = tokens(few_layers(), load_format="dummy", kv_dtype="fp8")
    assert tokens(tmp_path / "scaled", load_format="dummy", kv_dtype="fp8") == plain
    assert tokens(tmp_path / "scaled", kv_dtype="fp8") != tokens(few_layers(), kv_dtype="fp8")


def test_a_part_is_that_of_the_whole() -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    checkpoint = Checkpoint.open(few_layers()).drawn("cpu")
    whole = checkpoint.mapped()[name]
    rows, columns = whole.shape
    part = checkpoint.cut({name: TensorSlice(1, ((8, 16), (40, 8)), columns)})
    target = torch.empty(rows, 24, dtype=whole.dtype)
    part.load({name: target})
    assert torch.equal(target, torch.cat([whole[:, 8:24], whole[:, 40:48]], 1))
    assert torch.equal(part.mapped()[name], target)


def test_what_cannot_be_drawn_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(few_layers(), tmp_path / "packed")
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    file.write_text(json.dumps(config))
    message = r"load_format='dummy' draws weights of 16 or 32 bits, and those of .*packed are quant"
    with pytest.raises(ValueError, match=message):
        open_engine(tmp_path / "packed", device="cpu", load_format="dummy")
    save_file({"order": torch.arange(3)}, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(ValueError, match=r"drawn in F32, F16, BF16, and order of .*packed is I64"):
        Checkpoint.open(tmp_path / "packed").drawn("cpu").mapped()["order"]
