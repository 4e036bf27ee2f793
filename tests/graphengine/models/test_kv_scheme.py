"""What configs say of quantised KV: what is read, and what is refused by key and value."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.few_layers import few_layers
from engines.small_engine import open_engine

SCHEME = {
    "type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False,
    "group_size": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "ignore": ["lm_head"],
    "kv_cache_scheme": SCHEME,
    "sparsity_config": {},
}
MODELOPT = {
    "quant_method": "modelopt",
    "ignore": [],
    "producer": {"name": "modelopt", "version": "0.35.0"},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
QUANT_FILE = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": []},
}


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The demo of few layers with scales for its first."""
    folder = tmp_path / "demo"
    shutil.copytree(few_layers(), folder)
    file = folder / "model.safetensors"
    scales = {
        f"model.layers.0.self_attn.{name}_proj.{name}_scale": torch.tensor(0.25) for name in "kv"
    }
    save_file(load_file(file) | scales, file)
    return folder


def write(demo: Path, quantization: Any, quant_file: Any = None) -> None:
    config = json.loads((few_layers() / "config.json").read_text())
    (demo / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    if quant_file is not None:
        (demo / "hf_quant_config.json").write_text(json.dumps(quant_file))


def first_scale(demo: Path) -> float:
    with open_engine(demo, device="cpu", kv_dtype="fp8") as engine:
        return float(next(iter(engine.model.weights.kv_scales().values()))[0, 0])


@pytest.mark.parametrize(
    ("quantization", "quant_file"),
    [
        (COMPRESSED, None),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}, None),
        (COMPRESSED | {"sparsity_config": {"format": "dense", "targets": []}}, None),
        (MODELOPT, QUANT_FILE),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, None),
        ({"quant_method": "modelopt", **QUANT_FILE}, None),
        (None, QUANT_FILE),
        (None, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}),
    ],
    ids=["compressed", "heads", "dense", "modelopt", "algorithm", "nested", "file", "nothing"],
)
def test_plain_scales_of_e4m3_are_read(demo: Path, quantization: Any, quant_file: Any) -> None:
    write(demo, quantization, quant_file)
    assert first_scale(demo) == 0.25


KV = "config.json has quantization_config.kv_cache_scheme"
PLAIN = "supported: null: weights in other formats are not supported"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_cache_scheme": SCHEME | {"symmetric": False}}, f"{KV}.symmetric=False: supported: True"),
    (
        {"kv_cache_scheme": SCHEME | {"strategy": "token"}},
        f"{KV}.strategy='token': supported: 'tensor', 'attn_head', null",
    ),
    ({"kv_cache_scheme": SCHEME | {"strategy": "channel"}}, f"{KV}.strategy='channel'"),
    ({"kv_cache_scheme": SCHEME | {"dynamic": True}}, f"{KV}.dynamic=True: supported: False, null"),
    ({"kv_cache_scheme": SCHEME | {"dynamic": "local"}}, f"{KV}.dynamic='local'"),
    ({"kv_cache_scheme": SCHEME | {"num_bits": 4}}, f"{KV}.num_bits=4: supported: 8"),
    ({"kv_cache_scheme": SCHEME | {"type": "int"}}, f"{KV}.type='int': supported: 'float'"),
    ({"kv_cache_scheme": {"num_bits": 8}}, f"{KV}.type=None: supported: 'float'"),
    ({"kv_cache_scheme": SCHEME | {"group_size": 64}}, f"{KV}.group_size=64: supported: null"),
    ({"kv_cache_scheme": "fp8"}, f"{KV}='fp8': supported: a JSON object, 'FP8', null"),
    (
        {"config_groups": {"group_0": {"weights": {}}}},
        "config.json has quantization_config.format=None: supported: 'float-quantized'",
    ),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "quantization_config.sparsity_config="),
    ({"transform_config": {"config_groups": {"R3": {}}}}, "quantization_config.transform_config="),
    ({"quant_algo": "FP8"}, f"config.json has quantization_config.quant_algo='FP8': {PLAIN}"),
    (
        {"kv_cache_quant_algo": "NVFP4"},
        "config.json has quantization_config.kv_cache_quant_algo='NVFP4': supported: 'FP8', null",
    ),
    (
        {"quantization": {"kv_cache_quant_algo": "INT8"}},
        "config.json has quantization_config.quantization.kv_cache_quant_algo='INT8'",
    ),
    # These name no kind of weights either.
    ({"kv_cache_scheme": None}, "quantization_config.config_groups={}: supported: a JSON object"),
    (
        {"quant_method": "awq"},
        "quantization_config.ignore=['lm_head']: supported: null, or the keys",
    ),
]


def refused(demo: Path, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_engine(demo, device="cpu", kv_dtype="fp8", progress=pytest.fail)
    assert message in str(caught.value)


def test_other_kinds_of_kv_and_other_weights_are_named(demo: Path) -> None:
    for change, message in REFUSED:
        write(demo, COMPRESSED | change)
        refused(demo, message)


def test_the_file_of_modelopt_is_named(demo: Path) -> None:
    for change, message in (
        ({"quant_algo": "W4A8"}, "has quantization.quant_algo='W4A8': supported: 'FP8', 'NVFP4'"),
        ({"kv_cache_quant_algo": "NVFP4"}, "has quantization.kv_cache_quant_algo='NVFP4': support"),
    ):
        write(demo, None, QUANT_FILE | {"quantization": QUANT_FILE["quantization"] | change})
        refused(demo, f"hf_quant_config.json {message}")
    write(demo, None, {"producer": {"name": "modelopt"}})
    refused(demo, "hf_quant_config.json has quantization=None: supported: a JSON object")
