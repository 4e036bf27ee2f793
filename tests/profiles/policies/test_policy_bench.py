"""`graphengine bench --shape pi0`: the bytes of a chunk, and a benchmark of a tiny policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine import Policy
from graphengine.cli import main as cli
from graphengine.models.policies import read_policy_config
from graphengine.profiles.policies import chunks
from graphengine.profiles.policies.floor import PolicyBytes
from graphengine.profiles.shape_configs import POLICIES

TINY = ["bench", "--shape", "tiny-pi0", "--device", "cpu", "--runs", "1"]


def bytes_of(name: str, dtype: torch.dtype, l2: int | None = None, steps: int = 10) -> PolicyBytes:
    shape = POLICIES[name]
    config = read_policy_config(shape.config)
    return PolicyBytes.of(config, shape.prefix_tokens, steps, dtype, l2)


def test_the_published_sizes() -> None:
    """PaliGemma's 2B, an expert of 300M, three images, 50 actions, ten steps."""
    shape = POLICIES["pi0"]
    config = read_policy_config(shape.config)
    assert (shape.images, shape.image_tokens, shape.prefix_tokens) == (3, 256, 816)
    assert (config.horizon, config.steps, config.action_dim, config.state_dim) == (50, 10, 32, 32)
    heads, width, layers = 8, 256, 18
    qkv, norms = (heads + 2) * width, 2
    read = bytes_of("pi0", torch.bfloat16)
    for found, hidden, feed in ((read.prefix, 2048, 16_384), (read.state, 1024, 4096)):
        layer = hidden * (qkv + heads * width + 3 * feed + norms)
        last = hidden * (qkv + 1)
        numbers = (layers - 1) * layer + last
        if hidden == 1024:
            layer_of_expert, numbers = layer, numbers + 32 * hidden + hidden
        assert found == 2 * numbers
    of_actions = 1024 * (32 + 1) + 2 * 1024 * 1024 + 1024 + 32 * (1024 + 1)
    assert read.expert == 2 * (layers * layer_of_expert + 1024 + of_actions)
    assert read.kv == (816 + 1 + 50) * layers * 2 * width * 2
    assert read.prefix_tflop == pytest.approx(816 * read.prefix / 1e12)
    assert (read.expert_reads, read.fits_l2) == (10, False)
    assert read.chunk == read.prefix + read.state + 10 * (read.expert + read.kv)
    # That is 2.5 ms at 4.4 TB/s.
    assert 10.5e9 < read.chunk < 11e9


def test_an_expert_that_fits_into_l2_counts_once() -> None:
    need = bytes_of("tiny-pi0", torch.float32)
    least = need.expert + need.kv
    for l2, reads in ((least, 1), (least - 1, 7), (None, 7)):
        read = bytes_of("tiny-pi0", torch.float32, l2, steps=7)
        assert read.expert_reads == reads
        assert read.denoiser == reads * least
        assert read.chunk == read.prefix + read.state + reads * least
    halved = bytes_of("tiny-pi0", torch.bfloat16)
    assert (2 * halved.expert, 2 * halved.kv) == (need.expert, need.kv)


def test_a_tiny_policy_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "policy.json"
    assert cli.main([*TINY, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    found, floor = document["policy"], document["policy"]["floor"]
    assert (document["schema"], document["shape"], document["ceiling"]) == (1, "tiny-pi0", None)
    assert (found["prefix_tokens"], found["horizon"], found["steps"]) == (20, 6, 4)
    assert found["chunk_ms"]["n"] == 3 and found["checked"] == {"equal_chunks": 3, "steps": [1, 4]}
    step = found["ms_per_step"]
    assert found["denoiser_ms"] == pytest.approx(4 * step, abs=1e-3)
    whole = found["denoiser_ms"] + found["prefix_ms"]
    assert whole == pytest.approx(found["ms_per_chunk"], abs=1e-3)
    read = bytes_of("tiny-pi0", torch.float32, steps=4)
    assert (floor["chunk_bytes"], floor["expert_reads"]) == (read.chunk, 4)
    assert floor["chunk_ms"] is None and floor["denoiser_share"] is None
    printed = capsys.readouterr().out
    assert "a prefix of 20 positions, 6 actions, 4 denoising steps; 3 chunks" in printed
    assert "each step; a chunk" in printed and "p99" in printed


def test_floors_are_shown_with_a_ceiling() -> None:
    from graphengine.profiles.tables.text import describe_document

    read = bytes_of("pi0", torch.bfloat16)
    ceiling: Any = type("Ceiling", (), {"milliseconds": lambda _, size: size / 4.4e9})()
    floors = chunks._floors(read, ceiling, 5.0, 2.5)
    assert floors["chunk_ms"] == pytest.approx(read.chunk / 4.4e9)
    assert floors["chunk_share"] == pytest.approx(read.chunk / 4.4e9 / 5)
    assert floors["denoiser_share"] == pytest.approx(read.denoiser / 4.4e9 / 2.5)
    percentiles = {"p50": 5.0, "p99": 6.0, "max": 6.0, "n": 200, "unsupported": []}
    document = {
        "shape": "pi0", "ceiling": {"tb_s": 4.4}, "environment": {"device": "H200"},
        "policy": {
            "dtype": "bfloat16", "prefix_tokens": 816, "horizon": 50, "steps": 10,
            "chunk_ms": percentiles, "denoiser_ms": 2.5, "ms_per_step": 0.25, "prefix_ms": 2.5,
            "floor": floors,
        },
    }  # fmt: skip
    lines = describe_document(document).splitlines()
    assert lines[0] == "pi0, bfloat16, on H200: read ceiling 4.40 TB/s"
    assert lines[2].endswith("floor 2.450, a share of 49%")
    assert lines[3] == "denoiser   2.500, 0.250 a step; floor 1.462, a share of 58%"
    assert "prefix 3.75 GB once (3.1 TFLOP), state 0.59 GB, expert 0.63 GB" in lines[5]
    floors["expert_reads"] = 1
    assert "once, from L2 after that" in describe_document(document)


def test_chunks_of_one_seed_that_differ_are_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    act, calls = Policy.act, []

    def drifting(self: Policy, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return act(self, *args, **options) + len(calls)

    monkeypatch.setattr(Policy, "act", drifting)
    with pytest.raises(RuntimeError, match="steps=1: chunks of one seed differ"):
        cli.main(TINY)
    for change, _ in ((torch.nan, 0), (0.0, 1)):
        monkeypatch.setattr(
            Policy,
            "act",
            lambda self, *_, **__: torch.full((6, 7), change),  # noqa: B023
        )
        with pytest.raises(RuntimeError, match="steps=1: actions must be finite, and others for"):
            cli.main(TINY)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "1"], "--batch 1 is for engines: --shape tiny-pi0 is a policy, whose chunks"),
        (["--context", "128"], "--context 128 is for engines"),
        (["--prompt-tokens", "64"], "--prompt-tokens 64 is for engines"),
        (["--quantize", "int4"], "--quantize int4 is for engines"),
        (["--peer", "vllm"], r"--peer \['vllm'\] is for engines"),
        (["--kernels"], "--kernels True is for engines"),
        (["--checkpoint", "demo"], "--checkpoint demo is for engines"),
        (["--runs", "0"], "runs=0 must be at least 1"),
        (["--device", "tpu"], "device='tpu'"),
    ],
)
def test_options_that_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["bench", "--shape", "tiny-pi0", *options]) == 2
    import re

    assert re.search(message, capsys.readouterr().err)
