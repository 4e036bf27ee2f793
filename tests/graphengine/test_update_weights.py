"""Weights that are updated in place: against an engine that was opened on the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.mtp_chains import HAS_CHAINS, Chains
from graphengine import Engine, SamplingParams
from graphengine.models.checkpoint import Checkpoint
from graphengine.speculative import MTP

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
PROMPTS = [[5, 3, 80], [*range(1, 72, 3)]]


def open_engine(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 2, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (8, 32)}
    fixed = {"device": "cpu", "dtype": "float32", "wait_limit_s": 60.0}
    return Engine.from_pretrained(path, **sizes | fixed | options)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors by the names in its files."""
    checkpoint = Checkpoint.open(path)
    mapped = checkpoint.mapped()
    return {checkpoint.stored_names.get(name, name): mapped[name].clone() for name in mapped}


def other_weights(path: Path, folder: Path, seed: int = 1) -> Path:
    """A checkpoint of the same model with other random weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = tensors_of(path)
    tied = json.loads((path / "config.json").read_text()).get("tie_word_embeddings", False)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    if tied:
        tensors.pop("lm_head.weight", None)
    folder.mkdir()
    for file in path.glob("*.json"):
        if file.name != "model.safetensors.index.json":
            shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def said(engine: Engine) -> list[tuple[Any, ...]]:
    results = engine.generate(PROMPTS, GREEDY)
    return [(each.token_ids, each.logprobs) for each in results]


def held(engine: Engine) -> list[Tensor]:
    """Every weight, of the drafter, too, and the norms that the model has of its own."""
    drafter = engine.core.drafter
    model = engine.model
    tensors = model.weights.tensors()
    tensors += [] if drafter.weights is None else drafter.weights.tensors()
    return [*tensors, model.first_norm]


def assert_updates(path: Path, other: Path, **options: Any) -> None:
    with open_engine(other, **options) as engine:
        expected, accepted = said(engine), engine.acceptance.accepted
    with open_engine(path, **options) as engine:
        before = said(engine)
        assert before != expected
        addresses = [tensor.data_ptr() for tensor in held(engine)]
        engine.update_weights(tensors_of(other).items())
        found, drafted = engine.acceptance.accepted, said(engine)
        assert drafted == expected
        assert engine.acceptance.accepted - found == accepted
        assert [tensor.data_ptr() for tensor in held(engine)] == addresses
        engine.update_weights(str(path))
        assert said(engine) == before
        assert engine.counters["weights/updates"] == 2


FAMILIES = ["llama-biases", "llama-tied-yarn", "qwen3-biases"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_decoders(
    checkpoints: dict[str, Any], tmp_path: Path, name: str, quantize: str | None
) -> None:
    path = checkpoints[name].path
    head = quantize is not None
    options = {"quantize": quantize, "quantize_lm_head": head}
    assert_updates(path, other_weights(path, tmp_path / "other"), **options)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_experts(expert_checkpoints: dict[str, Any], tmp_path: Path, quantize: str | None) -> None:
    path = expert_checkpoints["moe-some-layers"].path
    assert_updates(path, other_weights(path, tmp_path / "other"), quantize=quantize)


def test_latents(latent_checkpoints: dict[str, Any], tmp_path: Path) -> None:
    path = latent_checkpoints["latent-groups"].path
    assert_updates(path, other_weights(path, tmp_path / "other"))


@pytest.mark.parametrize("name", ["granite-rope-limits", "nemotron-biases", "qwen", "lfm2-biases"])
def test_hybrids(hybrids: dict[str, Any], tmp_path: Path, name: str) -> None:
    path = hybrids[name].path
    assert_updates(path, other_weights(path, tmp_path / "other"))


@pytest.mark.skipif(not HAS_CHAINS, reason="needs transformers with chains of modules")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_draft_modules_of_the_checkpoint(tmp_path: Path, quantize: str | None) -> None:
    """With norms that lack 1: those that compute are made anew, of target and module."""
    path = Chains(tmp_path / "chains", "qwen3.5", 1).path
    other = other_weights(path, tmp_path / "other")
    assert_updates(path, other, speculative=MTP(k=2), quantize=quantize)
