"""Chains of hybrids: a block of each kind, whose linears `graphengine tune` measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine import EngineConfig
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.recurrent.gated_delta.gated_delta_sizes import GatedDeltaSizes
from graphengine.kernels.recurrent.mamba2.mamba2_sizes import Mamba2Sizes
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks import gated_delta, gqa, mamba2, mlp, short_conv
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.composition import attention_of
from graphengine.models.decoder import DecoderConfig, DecoderModel
from graphengine.models.families.registry import read_model_config
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import WeightForms, heuristic_plans
from graphengine.models.plans import choosing as tuning
from graphengine.models.plans.chains import chain_length, chain_linear
from graphengine.models.states import StateTensors
from graphengine.profiles.benchmark.engines import rounded_model
from graphengine.profiles.benchmark.shapes import model_shape
from graphengine.profiles.tuning import candidates, chain_bench
from graphengine.profiles.tuning.chain_bench import ChainBench

BF16 = torch.bfloat16
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 256, "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False, "max_position_embeddings": 512,
}  # fmt: skip
# The order in which the last blocks of their kinds run.
ORDERS = {
    "tiny-delta": ["delta_in", "delta_out", "qkv", "output", "gate_up", "down"],
    "tiny-hybrid": ["mamba_in", "mamba_out", "up", "down", "qkv", "output"],
    "lfm2": ["qkv", "output", "conv_in", "conv_out", "gate_up", "down"],
}


def shape(name: str) -> DecoderConfig:
    config = read_model_config(LFM2) if name == "lfm2" else model_shape(name)
    assert isinstance(config, DecoderConfig)
    return config


def bench_of(config: DecoderConfig) -> ChainBench:
    chain = chain_bench.chain_model(config, torch.float32, torch.device("cpu"), layers=2)
    assert chain_length(chain.config) == 2
    return ChainBench(chain, (1, 20))


def without_what_recurs(monkeypatch: pytest.MonkeyPatch, q_size: int) -> None:
    """What stands between two linears hands on the first columns of what it gets."""
    monkeypatch.setattr(gqa, "decode_attention", lambda qkv, *_, **__: qkv[:, :q_size])
    monkeypatch.setattr(gqa.AttentionWeights, "_gate", lambda *_, **__: None)
    monkeypatch.setattr(mlp, "squared_relu", lambda x, *_, **__: x)
    monkeypatch.setattr(mamba2, "mamba2_norm", lambda y, *_, **__: y)

    def first(projected: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        sizes = [each for each in given if isinstance(each, Mamba2Sizes | GatedDeltaSizes)]
        return projected[:, : sizes[0].inner if sizes else projected.shape[1] // 3]

    for module, name in (
        (mamba2, "mamba2_decode"), (gated_delta, "gated_delta_decode"),
        (short_conv, "short_conv_decode"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, first)


@pytest.mark.parametrize("name", ORDERS)
def test_a_chain_is_a_decode_step_of_a_block_of_each_kind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(shape(name))
    model, order = bench.model, ORDERS[name]
    assert isinstance(model, DecoderModel) and list(model.config.linears) == [*order, "lm_head"]
    plans = heuristic_plans(model.config.linears, torch.float32, "dot")
    assert bench.prepare([plans], seconds=1) == {}
    results = list(bench.launches(plans, 20, layers=2, head=True))
    assert [each for each, _ in results] == [*order * 2, "lm_head"]

    config = model.config
    attention = attention_of(config)
    assert isinstance(attention, GroupedQueryAttention)
    without_what_recurs(monkeypatch, attention.q_size)
    slot = torch.arange(20, dtype=torch.int32)
    x, unused = bench._x.clone(), torch.empty(0)
    recurrent = {
        (index, state.name): unused
        for index, states in enumerate(config.states)
        for state in states
        if hasattr(state, "name")
    }
    kv = torch.empty(2, 1, 2, 1, attention.num_kv_heads, attention.head_dim)
    out = model.decode(
        DecodeLanes(slot, slot, slot),
        Residual(x, x.clone(), x.square().sum(dim=1)[None]),
        StateTensors(kv, torch.zeros((20, 1), dtype=torch.int32), recurrent=recurrent),
        DecodeLaunch(plans=plans, split_tokens=64, arrivals=slot),
    )
    torch.testing.assert_close(results[2 * len(order) - 1][1].x, out.x)
    torch.testing.assert_close(results[2 * len(order) - 1][1].scaled, out.scaled)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("family", ["fma", "dot"])
def test_every_linear_is_a_target(name: str, family: Any) -> None:
    config = shape(name)
    found = [
        each for target in candidates.targets_of(config, BF16, family) for each in target.names
    ]
    assert sorted(found) == sorted([*ORDERS[name], "lm_head"])
    only = candidates.targets_of(config, BF16, family, [ORDERS[name][0]])
    assert [ORDERS[name][0] in target.names for target in only] == [True]


def test_a_chain_has_the_weights_of_a_gigabyte() -> None:
    """A link's weights are a gated delta net's, attention's and a feed-forward's."""
    config = shape("qwen3.5-4b")
    per_link = sum(
        2 * linear.rows * linear.columns
        for linear in config.linears.values()
        if linear.kind != "sample"
    )
    layers = chain_bench.chain_layers(config, BF16)
    assert (layers - 1) * per_link < chain_bench.CHAIN_BYTES <= layers * per_link


def test_packed_weights_of_a_hybrid() -> None:
    """A damaged code is noticed, of a block in the middle of a link."""
    model = rounded_model(shape("tiny-delta"), EngineConfig(device="cpu", quantize="int8"))
    assert isinstance(model, DecoderConfig)
    bench = bench_of(model)
    plans = heuristic_plans(bench.model.config.linears, torch.float32, "dot")
    assert bench.prepare([plans], seconds=1) == {}
    name = next(each for each in plans if each.startswith("output"))
    weight, _, norm = chain_linear(bench.model, 0, name)
    assert isinstance(weight, PackedWeight) and norm is not None
    weight.codes[0] ^= 0x1111
    other = plans.replace({name: plans[name]._replace(stages=3)})
    refused = bench.prepare([other], seconds=1)
    assert refused[other].startswith(f"{name} of 1 rows is off by ")


def test_blocks_that_are_stored_differently_have_no_chain() -> None:
    model = rounded_model(shape("tiny-delta"), EngineConfig(device="cpu", quantize="int8"))
    assert isinstance(model, DecoderConfig)
    forms = {name: form for name, form in model.forms.items() if "layers.0.mlp" not in name}
    assert len(forms) < len(model.forms)
    message = (
        r"Qwen3_5ForCausalLM with the linears .*gate_up, .*gate_up.int8-1x0.* not stored alike"
    )
    with pytest.raises(ValueError, match=message):
        bench_of(model.stored_as(WeightForms(forms)))


def test_what_is_not_there_is_an_error() -> None:
    model = bench_of(shape("tiny-hybrid")).model
    for link, name in ((0, "gate_up"), (2, "mamba_in")):
        with pytest.raises(KeyError, match=rf"no linear {name} in link={link}: mamba_in, "):
            chain_linear(model, link, name)


@pytest.mark.parametrize("family", ["fma", "dot"])
@pytest.mark.parametrize("shape", ["qwen3.5-0.8b", "qwen3.5-4b", "granite-4-h-1b"])
def test_an_engine_on_an_h200_takes_shipped_plans_of_hybrids(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str, family: RowFamily
) -> None:
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "device_name", lambda device: "NVIDIA H200")
    linears = model_shape(shape).linears
    _, sources = tuning.choose_plans(linears, torch.bfloat16, family, "cpu")
    assert dict(sources) == dict.fromkeys(linears, "shipped")
