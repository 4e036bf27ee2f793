"""Weights of torchao: the values that the package gives them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from graphengine.kernels.linear.quantised import dequantise
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.quantised.config import quantisation_of
from graphengine.models.quantised.readers import read_weight

INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}
CODES, SCALES, ZEROS = "x._weight_qdata", "x._weight_scale", "x._weight_zero_point"


def stored(
    folder: Path, tensors: dict[str, Tensor], quant_type: Any = None, **metadata: str
) -> Checkpoint:
    config = {"quant_method": "torchao", "quant_type": quant_type or {"default": INT8}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, folder / "model.safetensors", metadata)
    return Checkpoint.open(folder)


def label(checkpoint: Checkpoint) -> str:
    quantisation = quantisation_of(checkpoint)
    assert quantisation is not None
    scheme = quantisation.scheme("x")
    assert scheme is not None
    return scheme.format.label


def int8(*groups: int, zero: int = 0) -> dict[str, Tensor]:
    zeros = torch.full(groups, zero, dtype=torch.int8)
    codes = torch.ones(64, 96, dtype=torch.int8)
    return {CODES: codes, SCALES: torch.ones(groups), ZEROS: zeros}


@pytest.mark.parametrize("name", ["fp8 rows", "int8 rows", "int8 groups", "int8 whole"])
def test_values_are_those_of_the_package(tmp_path: Path, name: str) -> None:
    package = pytest.importorskip("torchao.quantization", reason="needs torchao")
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    config, expected = {
        "fp8 rows": (package.Float8WeightOnlyConfig(), "e4m3-1x0"),
        "int8 rows": (package.Int8WeightOnlyConfig(version=2), "int8-1x0"),
        "int8 groups": (
            package.Int8WeightOnlyConfig(version=2, granularity=package.PerGroup(64)),
            "int8-1x64",
        ),
        "int8 whole": (
            package.Int8WeightOnlyConfig(version=2, granularity=package.PerTensor()),
            "int8-0x0",
        ),
    }[name]
    module = torch.nn.ModuleDict({"x": torch.nn.Linear(256, 128, bias=False).bfloat16()})
    package.quantize_(module, config)
    tensors, metadata = flatten_tensor_state_dict(module.state_dict())
    checkpoint = stored(tmp_path, tensors, {"default": config_to_dict(config)}, **metadata)
    assert label(checkpoint) == expected
    quantisation = quantisation_of(checkpoint)
    scheme = quantisation and quantisation.scheme("x")
    assert scheme
    weight = read_weight(scheme, checkpoint.mapped(), "x", (128, 256)).weight
    assert torch.equal(dequantise(weight).bfloat16(), module["x"].weight.dequantize())


@pytest.mark.parametrize(
    ("groups", "zero", "expected"),
    [
        ((64, 1), 0, "int8-1x0"),
        ((64, 3), 0, "int8-1x32"),
        ((64, 3), 5, "int8-1x32-zeros"),
        ((1, 1), 0, "int8-0x0"),
        ((2, 1), 0, "int8-32x0"),
    ],
)
def test_groups_are_those_of_the_shapes(
    tmp_path: Path, groups: tuple[int, int], zero: int, expected: str
) -> None:
    assert label(stored(tmp_path, int8(*groups, zero=zero))) == expected


def test_zero_points_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the config is asked for; a copy reads its own."""
    checkpoint = stored(tmp_path, int8(64, 1, zero=5))
    assert label(checkpoint) == "int8-1x0-zeros"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "mapped", lambda self: pytest.fail("tensors were read"))
        assert label(checkpoint) == "int8-1x0-zeros"
    first, *_ = checkpoint.mapped().values()
    of_zeros = replace(checkpoint)
    with monkeypatch.context() as patch:
        zeros = dict.fromkeys(checkpoint.tensors, torch.zeros_like(first))
        patch.setattr(Checkpoint, "mapped", lambda self: zeros)
        assert label(of_zeros) == "int8-1x0"


def test_what_is_refused(tmp_path: Path) -> None:
    def refused(message: str, tensors: dict[str, Tensor], quant_type: Any = None) -> None:
        checkpoint = stored(tmp_path, tensors, quant_type)
        with pytest.raises(ValueError, match=message):
            quantisation_of(checkpoint)

    whole = int8(64, 1)
    refused(r"_weight_scale of shape \[64, 5\]: .* no groups of codes \[64, 96\]", int8(64, 5))
    refused(r"_weight_scale of shape \[0, 1\]: .* no groups of codes \[64, 96\]", int8(0, 1))
    refused(r"lacks x\._weight_scale", {CODES: whole[CODES], ZEROS: whole[ZEROS]})
    refused(
        r"x\._weight_qdata in U8: of torchao's formats those in F8_E4M3, I8 are read",
        whole | {CODES: whole[CODES].view(torch.uint8)},
    )
    refused("no tensor's name ends with _weight_qdata", {"x.weight": torch.ones(2)})
    int4 = {"_type": "Int4WeightOnlyConfig", "_data": {}}
    refused(r"quant_type='Int4WeightOnlyConfig'.*Float8Weight", whole, {"default": int4})
    nested = {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"x": int4}}}
    refused(r"quant_type='Int4WeightOnlyConfig'", whole, {"default": nested})


def test_floats_have_no_zero_points(tmp_path: Path) -> None:
    tensors = int8(64, 1, zero=1)
    tensors[CODES] = tensors[CODES].to(torch.float8_e4m3fn)
    checkpoint = stored(tmp_path, tensors)
    quantisation = quantisation_of(checkpoint)
    scheme = quantisation and quantisation.scheme("x")
    assert scheme
    with pytest.raises(ValueError, match=r"64 zero points of a symmetric format out of range"):
        read_weight(scheme, checkpoint.mapped(), "x", (64, 96))
