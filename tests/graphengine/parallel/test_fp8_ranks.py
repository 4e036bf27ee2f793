"""Caches of e4m3 under two ranks: each has the scales of its own KV heads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from events import GENEROUS_S
from safetensors.torch import load_file, save_file

from checkpoints.few_layers import HEAD_LAYERS, eagle3_head, few_layers
from graphengine import Engine, SamplingParams, SessionSnapshot
from graphengine.config import EngineConfig
from graphengine.models.launches import Share
from graphengine.opening.loading import load_checkpoint, plan_checkpoint, read_checkpoint
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.speculative import MTP, Eagle3, Speculative

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPTS = ["def fib(n):", "class Tree:\n"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
FEW = replace(GREEDY, max_tokens=8)


def open_engine(path: Path, ranks: int, **options: Any) -> Engine:
    options = {"max_batch": 2, "max_seq_len": 128, "block_size": 8} | options
    options = {"prefill_buckets": (8, 32), "wait_limit_s": GENEROUS_S, "device": "cpu"} | options
    return Engine.from_pretrained(path, tensor_parallel=ranks, kv_dtype="fp8", **options)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo of few layers: scales of its first layer are of all heads, of others of each."""
    folder = tmp_path_factory.mktemp("scaled") / "demo"
    shutil.copytree(few_layers(), folder)
    file = folder / "model.safetensors"
    scales = {}
    for layer, shape in enumerate([(1,), (2,), (1, 2, 1), (2,)]):
        for name in ("k_proj.k_scale", "v_scale"):
            values = torch.tensor([0.02, 0.03][: max(shape)]).view(shape)
            scales[f"model.layers.{layer}.self_attn.{name}"] = values
    save_file(load_file(file) | scales, file)
    return folder


def scales_of(engine: Engine, heads: slice) -> list[Any]:
    weights = [engine.model.weights, engine.core.drafter.weights]
    found = [each.kv_scales().values() for each in weights if each is not None]
    return [scales[:, heads].tolist() for layers in found for scales in layers]


def say(engine: Engine) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate(PROMPTS, GREEDY)]


def go_on(engine: Engine, kept: SessionSnapshot) -> tuple[int, ...]:
    with engine.restore_session(kept) as session:
        session.append(PROMPTS[1])
        result = session.generate(FEW)
        assert result.cached_tokens == kept.blocks * 8 > 0
        return result.token_ids


def snapshot(engine: Engine) -> SessionSnapshot:
    with engine.session() as session:
        session.append(PROMPTS[0])
        session.generate(FEW)
        return session.snapshot()


def assert_equal_ranks(engine: Engine) -> None:
    runtime = engine.runtime
    assert isinstance(runtime, DriverRuntime) and len(set(runtime.digests())) == 1


def test_scales_of_a_checkpoint(scaled: Path) -> None:
    """Snapshots are restored with any number of ranks, as the scales are the same."""
    mode = MTP(k=2)
    with open_engine(scaled, 1, speculative=mode) as alone:
        expected, accepted = say(alone), alone.acceptance.accepted
        of_first = scales_of(alone, slice(1))
        of_one = snapshot(alone)
        then = go_on(alone, of_one)
        with open_engine(scaled, 2, speculative=mode) as engine:
            assert engine.cache.dtype == torch.float8_e4m3fn
            assert scales_of(engine, slice(None)) == of_first
            assert say(engine) == expected and engine.acceptance.accepted == accepted > 0
            assert_equal_ranks(engine)
            assert go_on(engine, of_one) == then
            of_two = snapshot(engine)
            assert of_two.origin.dtype == of_one.origin.dtype
        assert go_on(alone, of_two) == then


def test_scales_are_checked_as_those_of_all_heads(scaled: Path, tmp_path: Path) -> None:
    """Not as those of a rank, which has one of two heads."""
    folder = tmp_path / "demo"
    shutil.copytree(scaled, folder)
    file = folder / "model.safetensors"
    name = "model.layers.1.self_attn.v_scale"
    save_file(load_file(file) | {name: torch.ones(3)}, file)
    config = EngineConfig(device="cpu", kv_dtype="fp8", tensor_parallel=2, max_seq_len=64)
    found = read_checkpoint(folder, config, Share(1, 2))
    message = rf"has {name} of shape \[3\]: .* for each of 2 kv heads"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(found, plan_checkpoint(found, config), config)


def test_scales_of_a_prompt() -> None:
    """Ranks calibrate together: those of a prompt's KV are those of one rank."""
    mode: Speculative = Eagle3(eagle3_head(), k=2, layers=HEAD_LAYERS)
    options: dict[str, Any] = {"speculative": mode, "kv_calibration": PROMPTS[0] * 4}
    found = []
    for ranks in (1, 2):
        with open_engine(few_layers(), ranks, **options) as engine:
            found.append((say(engine), engine.acceptance.accepted))
            found.append(scales_of(engine, slice(1)))
            if ranks > 1:
                assert_equal_ranks(engine)
                kept = snapshot(engine)
                assert len(go_on(engine, kept)) == FEW.max_tokens
    assert found[0] == found[2] and found[0][1] > 0
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[3]))
