"""Shapes whose steps emit frames: what a step must read, and a benchmark of a tiny one."""

from __future__ import annotations

import json

import pytest
import torch

from graphengine.cli import main as cli
from graphengine.models.inner.weights import InnerWeights
from graphengine.profiles.benchmark.shapes import Subject, model_shape, weight_bytes


def linear_numbers(hidden: int, feed: int, heads: int, groups: int, width: int) -> tuple[int, int]:
    """Numbers of a layer's qkv, and of all its products."""
    qkv = (heads + 2 * groups) * width * hidden
    return qkv, qkv + heads * width * hidden + 3 * hidden * feed


@pytest.mark.parametrize(
    ("name", "depth", "layers", "codes", "vocabulary", "backbone"),
    [
        ("csm-1b", (1024, 8192, 8, 2, 128), 4, 32, 2051, (16, (2048, 8192, 32, 8, 64))),
        ("qwen3-tts-1.7b", (1024, 3072, 16, 8, 128), 5, 16, 2048, (28, (2048, 6144, 16, 8, 128))),
    ],
)
def test_inner_weights_count_once_for_each_run(
    name: str,
    depth: tuple[int, ...],
    layers: int,
    codes: int,
    vocabulary: int,
    backbone: tuple[int, tuple[int, ...]],
) -> None:
    """Position 0 stops after the last layer's keys and values, and has no head."""
    model = model_shape(name)
    inner = model.allocate(device="meta", dtype=torch.bfloat16).inner_weights
    assert isinstance(inner, InnerWeights)
    qkv, layer = linear_numbers(*depth)
    hidden = depth[0]
    norms = codes * 2 * layers * hidden + (codes - 1) * hidden - hidden
    numbers = codes * layers * layer - (layer - qkv) + codes * 2048 * hidden
    numbers += (codes - 1) * vocabulary * hidden + norms
    assert inner.step_nbytes == pytest.approx(2 * numbers, rel=1e-4)
    count, sizes = backbone
    of_backbone = count * linear_numbers(*sizes)[1] + vocabulary * 2048
    wanted = 2 * (numbers + of_backbone)
    assert weight_bytes(model, torch.bfloat16) == pytest.approx(wanted, rel=1e-3)


def test_a_tiny_shape_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Also the check of its tokens by eager steps."""
    assert Subject.of_shape("tiny-csm").model.inner is not None
    options = "--shape tiny-csm --device cpu --batch 1 --new-tokens 4 --prompt-tokens 4 --runs 1"
    assert cli.main(["bench", *options.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    row = document["rows"][0]
    read = weight_bytes(model_shape("tiny-csm"), torch.float32)
    assert row["step_bytes"] >= read
