"""`graphengine ops --shape`: what an H200 would launch for a shape or a policy, whose tensors have
no memory.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from graphengine.cli import main as cli
from graphengine.core.recorded_rows import record_rows
from graphengine.kernels.attention.prefill import PREFILL_ARRIVALS
from graphengine.models.inner.weights import InnerWeights
from graphengine.models.policies import read_policy_config
from graphengine.policies.denoiser import counters_needed, denoiser_plans
from graphengine.policies.sketch import policy_rows
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject, model_shape

Rows = list[dict[str, Any]]


def rows_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Rows]:
    assert cli.main(["ops", "--json", *options]) == 0
    tables: dict[str, Rows] = json.loads(capsys.readouterr().out)
    return tables


@pytest.mark.parametrize("shape", ["tiny-csm", "tiny-hybrid"])
def test_the_launches_are_those_of_an_engine(
    capsys: pytest.CaptureFixture[str], shape: str
) -> None:
    """In all graphs: the same weights and caches in the same order, by the same kernels."""
    sizes = ("--max-batch", "1", "--max-seq-len", "64", "--row-family", "dot", "--dtype", "float16")
    tables = rows_of(capsys, "--shape", shape, *sizes)
    options = {
        "device": "cpu", "max_batch": 1, "max_seq_len": 64, "row_family": "dot",
        "dtype": "float16", "lookahead": 1,
    }  # fmt: skip
    engine, _ = build_engine(Subject.of_shape(shape), options)
    with engine:
        found = record_rows(engine.runtime, engine.memory, engine.memory.graphs)
    assert tables.keys() == {key.name for key in found}
    for key, wanted in found.items():
        rows = [(row["stage"], row["weight_bytes"]) for row in tables[key.name]]
        assert rows == [(row.stage, row.weight_bytes) for row in wanted], key.name
        # Products may have plans for a CPU there.
        kernels = [row["kernel"] for row in tables[key.name]]
        assert kernels == [row.kernel for row in wanted], key.name


@pytest.mark.parametrize(
    ("shape", "codes", "layers"), [("csm-1b", 32, 4), ("qwen3-tts-1.7b", 16, 5)]
)
def test_each_run_of_an_inner_decoder_is_listed(
    capsys: pytest.CaptureFixture[str], shape: str, codes: int, layers: int
) -> None:
    options = ("--shape", shape, "--max-batch", "1", "--graph", "decode/1/fast")
    (rows,) = rows_of(capsys, *options).values()
    inner = [row for row in rows if row["stage"].startswith("depth_decoder.")]
    count = Counter(row["stage"].split(", ")[0].removeprefix("depth_decoder.") for row in inner)
    assert count["codebooks_head"] == codes - 1
    assert count["model.inputs_embeds_projector"] == codes
    for layer in range(layers):
        # The first run ends with the last layer's keys and values.
        last = layer == layers - 1
        assert count[f"model.layers.{layer}.self_attn.q_proj"] == codes
        assert count[f"model.layers.{layer}.mlp.down_proj"] == codes - last
    weights = model_shape(shape).allocate(device="meta", dtype=torch.bfloat16).inner_weights
    assert isinstance(weights, InnerWeights)
    read = sum(row["weight_bytes"] for row in inner)
    assert read == pytest.approx(weights.step_nbytes, rel=1e-3)


def test_each_denoising_step_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    tables = rows_of(capsys, "--shape", "pi0")
    assert tables.keys() == {"chunk/816"}
    count = Counter(row["stage"].split(", ")[0] for row in tables["chunk/816"])
    kernels = Counter(row["kernel"] for row in tables["chunk/816"])
    assert kernels["_euler_kernel"] == 10 and count["prefix.embed_tokens"] == 1
    for layer in (0, 17):
        # The state and each step. The state ends with its last keys and values.
        last = layer == 17
        assert count[f"expert.layers.{layer}.self_attn.q_proj"] == 1 + 10
        assert count[f"expert.layers.{layer}.mlp.down_proj"] == 1 + 10 - last
        # Rotating keys and attending, for the prefix, the state and each step.
        assert count[f"KV {layer}"] == 2 * (1 + 1 + 10) - last
    assert count["KV 18"] == 0
    # Five programs share the keys of the state, and of each 16 of the actions' 400 rows.
    rows = tables["chunk/816"]
    grids = Counter(tuple(row["grid"]) for row in rows if row["kernel"].startswith("prefill_"))
    assert grids == {(1, 102, 1): 18, (1, 1, 5): 17, (1, 25, 5): 180}


def test_a_wider_expert_has_more_counters() -> None:
    """Its products are split, and need more counters than attention does."""
    config = read_policy_config({"type": "pi0", "action_expert_variant": "gemma_2b"})
    plans = denoiser_plans(config, torch.bfloat16, torch.device("meta"))
    assert counters_needed(config, plans) > PREFILL_ARRIVALS
    assert len(policy_rows(config, 64, torch.bfloat16)) > 1000


def test_text_says_on_which_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", "--shape", "tiny-pi0"]) == 0
    note, _, title, head, *rows = capsys.readouterr().out.splitlines()
    assert note == "as an H200 would launch them, with its plans"
    assert title.startswith(f"chunk/20: {len(rows)} launches, ") and head.startswith("stage")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tiny", "--checkpoint", "x"], "--shape tiny and --checkpoint x: give one"),
        (["tiny", "--graph", "decode/9"], "--graph decode/9: the graphs are "),
        (["tiny", "--tensor-parallel", "2"], "what one GPU launches, and 2 ranks were asked for"),
        (["pi0", "--graph", "decode/1"], "--graph decode/1: the graphs are chunk/816"),
        (["pi0", "--max-batch", "2"], "--max-batch is for engines: --shape pi0 is a policy"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["ops", "--shape", *options]) == 2
    assert message in capsys.readouterr().err
