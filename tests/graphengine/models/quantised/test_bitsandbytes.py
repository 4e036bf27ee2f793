"""Weights of bitsandbytes in 4 bits: their values, and descriptions that are refused."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.bitsandbytes_weights import four_bit_tensors, int8_tensors
from checkpoints.quantised_models import KINDS, save, write_model
from graphengine import Engine, SamplingParams
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.quantised.readers import read_weight

STATE = "x.weight.quant_state.bitsandbytes__nf4"


def stored(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save(folder, {"architectures": ["LlamaForCausalLM"]}, tensors)
    return Checkpoint.open(folder)


def of_x(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"x.{end}": tensor for end, tensor in tensors.items()}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("M", "K"), [(64, 256), (3, 37), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_rounded_once(tmp_path: Path, nested: bool, M: int, K: int, dtype: str) -> None:
    torch.manual_seed(M)
    tensors, meant = four_bit_tensors(M, K, 0.25, nested=nested, dtype=dtype)
    checkpoint = stored(tmp_path, of_x(tensors))
    assert [*checkpoint.tensors] == ["x.weight"]
    assert torch.equal(checkpoint.mapped()["x.weight"], meant.to(getattr(torch, dtype)))
    target = torch.empty(M, K)
    assert checkpoint.load({"x.weight": target}) == []
    assert torch.equal(target, meant.to(getattr(torch, dtype)).float())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_values_are_those_of_the_package(
    tmp_path: Path, kind: str, nested: bool, storage: torch.dtype
) -> None:
    # Its CPU code is wrong where a block holds values of two rows.
    package = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed, state = package.quantize_4bit(
        weight, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    beside = {f"x.weight.{end}": each for end, each in state.as_dict(packed=True).items()}
    checkpoint = stored(tmp_path, beside | {"x.weight": packed})
    assert torch.equal(checkpoint.mapped()["x.weight"], package.dequantize_4bit(packed, state))


def test_they_may_be_rounded_again_and_the_log_says_what_they_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = write_model(tmp_path, KINDS["bitsandbytes nf4"])
    sizes: dict[str, Any] = {"max_batch": 1, "max_seq_len": 64, "dtype": "float32"}
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with caplog.at_level(logging.INFO, "graphengine"):
        for quantize in ("none", "int8"):
            options = {} if quantize == "none" else {"quantize": quantize}
            with Engine.from_pretrained(written.path, device="cpu", **sizes, **options) as engine:
                assert len(engine.generate([5, 6, 7], greedy).token_ids) == 4
    text = "14 weights of bitsandbytes in 4 bits are widened to 16 bits or rounded again: 0.1 MiB"
    assert text in caplog.text
    assert read_model(Checkpoint.open(written.path), "int8").vocab_size == 97


def replaced(**changes: Any) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        state = json.loads(bytes(tensors[STATE].tolist())) | changes
        tensors[STATE] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)

    return edit


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors[STATE.replace("nf4", "nf3")] = tensors.pop(STATE)


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "shape": (replaced(shape=[0, 5]), r"has shape=\[0, 5\]: must be sizes in \[1, 2147483647\]"),
    "huge shape": (replaced(shape=[10**400]), r"has shape=\[1000.*: must be sizes in"),
    "shape and codes": (replaced(shape=[9, 37]), r"x.weight.absmax has 2 values .* takes 6 in"),
    "same blocks": (replaced(shape=[3, 38]), r"x.weight has 56 bytes: .*\[3, 38\].* takes 57 byt"),
    "dtype": (replaced(dtype="int8"), "has dtype='int8': must be one of float32, bfloat16"),
    "list": (replaced(dtype=[]), r"has dtype=\[\]: must be one of float32, bfloat16"),
    "block": (replaced(blocksize=0), r"has blocksize=0: must be in \[1, 65536\]"),
    "huge block": (replaced(blocksize=1 << 40), r"has blocksize=1099511627776: must be in"),
    "offset": (replaced(nested_offset="1"), "has nested_offset='1': must be a finite number"),
    "huge offset": (replaced(nested_offset=10**400), "has nested_offset=1000.*: must be a finite"),
    "two kinds": (
        lambda each: each.update({STATE.replace("nf4", "fp4"): each[STATE].clone()}),
        "x.weight is in nf4 and fp4: only one can be true",
    ),
    "nested": (replaced(nested_blocksize=256), "absmax has 2 values in torch.float32: .*uint8"),
    "kind": (renamed, "is in 'nf3': nf4 and fp4 are read"),
    "no JSON": (lambda each: each.update({STATE: torch.zeros(5).byte()}), "is not valid JSON: "),
    "no object": (lambda each: each.update({STATE: torch.tensor([49]).byte()}), "is int"),
    "long": (lambda each: each.update({STATE: torch.zeros(5000).byte()}), "has 5000 bytes in"),
    "no codes": (lambda each: each.pop("x.weight"), "x.weight is missing: a weight .3, 37. in 4"),
    "no table": (lambda each: each.pop("x.weight.quant_map"), "x.weight.quant_map is missing: it"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_descriptions(tmp_path: Path, name: str) -> None:
    tensors = of_x(four_bit_tensors(3, 37, 0.25, nested=False)[0])
    damage, message = DAMAGES[name]
    damage(tensors)
    with pytest.raises(ValueError, match=message):
        stored(tmp_path, {**tensors, "y.weight": torch.ones(2)})


@pytest.mark.parametrize("end", ["absmax", "quant_map"])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, end: str) -> None:
    tensors = of_x(four_bit_tensors(3, 37, 0.25, nested=False)[0])
    count = tensors[f"x.weight.{end}"].numel()
    tensors[f"x.weight.{end}"][1] = math.nan
    message = rf"x\.weight\.{end} has 1 of {count} numbers that are not finite"
    with pytest.raises(ValueError, match=message):
        stored(tmp_path, tensors).load({"x.weight": torch.empty(3, 37)})


def test_codes_in_other_layouts_than_rows_are_refused(tmp_path: Path) -> None:
    tensors = of_x(int8_tensors(64, 32, 0.25)[0]) | {"x.weight_format": torch.tensor(2).byte()}
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    save(tmp_path, config, tensors)
    quantisation = read_quantisation(config)
    scheme = quantisation and quantisation.scheme("x")
    assert scheme
    message = r"x\.weight_format has 1 codes for other layouts than rows .* the first 2\.0 at \[\]"
    with pytest.raises(ValueError, match=message):
        read_weight(scheme, Checkpoint.open(tmp_path).mapped(), "x", (64, 32))


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    tensors = of_x(four_bit_tensors(3, 37, 0.25, nested=False)[0])
    checkpoint = stored(tmp_path, tensors)
    save(tmp_path, {}, tensors | {"x.weight.absmax": torch.ones(5)})
    with pytest.raises(ValueError, match=r"changed since it was opened: tensor x\.weight\.absmax"):
        checkpoint.load({"x.weight": torch.empty(3, 37)})
