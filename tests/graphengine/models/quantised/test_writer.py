"""`graphengine quantize`: checkpoints that transformers opens, and folders that are whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from graphengine.cli.main import main
from graphengine.kernels.linear.quantised import dequantise
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.quantised import writer
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.quantised.readers import read_weight
from graphengine.models.quantised.rounding import KIND_FORMATS, RoundedKind, quantise

PROJECTIONS = 7
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of two layers in several files, with a folder and weights of other formats."""
    torch.manual_seed(1)
    path: Path = tmp_path_factory.mktemp("llama") / "in"
    config = LlamaConfig(
        vocab_size=40, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=64,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(path, max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    (path / "tokenizer.json").write_text("{}")
    (path / "original").mkdir()
    (path / "pytorch_model.bin").write_bytes(b"weights")
    return path


def run(*arguments: object) -> int:
    return main(["quantize", *map(str, arguments)])


@pytest.mark.parametrize(
    ("kind", "group", "head"),
    [("int4", 128, False), ("int4", 32, True), ("int8", 128, False), ("fp8", 128, True)],
)
def test_transformers_opens_what_is_written(
    source: Path, tmp_path: Path, kind: RoundedKind, group: int, head: bool, capsys: Any
) -> None:
    """Its weights, its logits, and what is read here are those of `quantise`."""
    out = tmp_path / "out"
    options = ["--kind", kind, "--group-size", group, *["--lm-head"] * head]
    assert run(source, out, *options) == 0
    count = 2 * PROJECTIONS + head
    assert f"{count} linears in {kind}" in capsys.readouterr().out
    written, original = Checkpoint.open(out), Checkpoint.open(source)
    expected = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    quantisation = read_quantisation(written.config)
    assert quantisation is not None
    assert quantisation.notes == ()
    form = KIND_FORMATS[kind]
    form = form._replace(columns=group) if form.columns else form
    used: set[str] = set()
    stored = written.mapped()
    for name, module in expected.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        scheme = quantisation.scheme(name)
        assert (scheme is None) == (name == "lm_head" and not head)
        if scheme is None:
            continue
        weight, names = read_weight(scheme, stored, name, tuple(module.weight.shape))
        used.update(names)
        rounded = quantise(original.mapped()[f"{name}.weight"], form)
        assert weight.format == form
        assert torch.equal(dequantise(weight), dequantise(rounded))
        module.weight.data = dequantise(rounded)
    for name in stored.keys() - used:
        assert torch.equal(stored[name], original.mapped()[name])
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        logits, wanted = theirs(PROMPT).logits, expected(PROMPT).logits
    # The package rounds a product with a scale of bfloat16 to bfloat16.
    rounding = 2**-8 if kind == "int4" else 0
    for name, module in expected.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = theirs.get_submodule(name).weight.float()
            torch.testing.assert_close(weight, module.weight, rtol=rounding, atol=0)
    torch.testing.assert_close(logits, wanted, atol=0.05 if rounding else 1e-4, rtol=0)
    assert wanted.std() > 1


def test_files_are_as_the_sources(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(source, out, "--kind", "fp8") == 0
    names = {path.name for path in source.iterdir()} - {"original", "pytorch_model.bin"}
    assert {path.name for path in out.iterdir()} == names
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = {
        name: (file.name, tensor.nbytes)
        for file in out.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
    assert index["metadata"]["total_size"] == sum(size for _, size in stored.values())
    assert list(tmp_path.iterdir()) == [out]


def test_one_file_stays_one(source: Path, tmp_path: Path) -> None:
    """And a draft module's matrices stay as they are, which the config says."""
    tensors = dict(Checkpoint.open(source).mapped())
    tensors["mtp.fc.weight"] = torch.ones(128, 256).bfloat16()
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_text((source / "config.json").read_text())
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, whole / "model.safetensors"
    )
    assert run(whole, tmp_path / "out") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    written = Checkpoint.open(tmp_path / "out")
    quantisation = read_quantisation(written.config)
    assert quantisation is not None
    assert quantisation.scheme("mtp.fc") is None
    assert written.config["quantization_config"]["ignore"] == ["lm_head", "mtp.fc"]
    assert torch.equal(written.mapped()["mtp.fc.weight"], tensors["mtp.fc.weight"])


def test_nothing_is_left_of_what_failed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(writer, "save_file", broken)
    assert run(source, tmp_path / "out") == 2
    assert "no space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def changed(source: Path, folder: Path, edit: Any) -> Path:
    """The source in one file, its config and tensors changed."""
    config = json.loads((source / "config.json").read_text())
    tensors = {name: tensor.clone() for name, tensor in Checkpoint.open(source).mapped().items()}
    edit(config, tensors)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def spoil(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan


def tie(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["tie_word_embeddings"] = True
    del tensors["lm_head.weight"]


def widen(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["intermediate_size"] = 257
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp."
        for name in ("gate", "up"):
            tensors[f"{prefix}{name}_proj.weight"] = torch.ones(257, 128)
        tensors[f"{prefix}down_proj.weight"] = torch.ones(128, 257)


def modelopt(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["quantization_config"] = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (spoil, (), r"layers\.1\.mlp\.up_proj\.weight: row 3 of a weight \[256, 128\]"),
        (tie, ("--lm-head",), "has no lm_head of its own: it is its embedding"),
        (modelopt, (), "quantization_config=.*supported: null, or KV of compressed-tensors"),
        (widen, (), r"has 2 linears whose columns are no multiple of 128, .*: model\.layers\.0\.mlp"
         r"\.down_proj \[128, 257\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_said(
    source: Path, tmp_path: Path, capsys: Any, edit: Any, options: tuple[str, ...], message: str
) -> None:
    path = changed(source, tmp_path / "in", edit)
    assert run(path, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_quantised_weights_are_not_quantised_again(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(source, tmp_path / "once", "--kind", "int8") == 0
    for options in ((), ("--lm-head",)):
        assert run(tmp_path / "once", tmp_path / "twice", *options) == 2
        error = capsys.readouterr().err
        assert "once has quantised weights (compressed-tensors): those of 16 or 32 bits" in error
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


def test_a_folder_that_is_there_is_not_touched(source: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(source, tmp_path) == 2
    assert "is there already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    assert run(source, tmp_path / "file") == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_kv_of_compressed_tensors_stays(source: Path, tmp_path: Path) -> None:
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}

    def quantise_kv(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": scheme,
        }
        for name in "kv":
            tensors[f"model.layers.0.self_attn.{name}_scale"] = torch.tensor(0.5)

    path = changed(source, tmp_path / "in", quantise_kv)
    assert run(path, tmp_path / "out") == 0
    written = Checkpoint.open(tmp_path / "out")
    assert written.config["quantization_config"]["kv_cache_scheme"] == scheme
    assert float(written.mapped()["model.layers.0.self_attn.k_scale"]) == 0.5
