"""Opening an engine: checkpoints that can be served and those that cannot, memory, the report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.small_engine import (
    MAX_SEQ_LEN,
    PROMPT,
    assert_idle,
    greedy,
    open_engine,
    run,
)
from graphengine import EngineConfig
from graphengine.buckets import OutOfBudget
from graphengine.demo import checkpoint_path
from graphengine.drafters import NoDrafter
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.families.registry import read_model_config
from graphengine.opening.budget.memory_plan import plan_memory

# Opening a checkpoint.


@pytest.fixture
def source(checkpoints: dict[str, Any]) -> Path:
    """A sharded Qwen3 checkpoint."""
    path: Path = checkpoints["qwen3-biases"].path
    return path


def assert_refused(path: str | Path, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(path, device="cpu", **options)


ROPE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Llama.*, Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "x"}, "model_type='x'.*Llama.*, Qwen3ForCausalLM"),
        ({"rope_parameters": ROPE | {"rope_type": "longrope"}}, "'longrope' needs short_factor"),
        ({"rope_parameters": ROPE | {"rope_type": "ntk"}}, "ntk.*linear.*yarn.*dynamic"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0: .* 1 or more"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
        ({"head_dim": 73}, "head_dim=73.*even.*512"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 .*num_key_value_heads=3"),
        ({"num_hidden_layers": 3}, r"lacks \d+ of \d+ .*model\.layers\.2\."),
        ({"intermediate_size": 121}, r"mlp\.\w+\.weight has shape \[\d+, \d+\], not \[.*121"),
        ({"vocab_size": 400}, r"embed_tokens\.weight has shape \[307, 80\], not \[400, 80\]"),
        ({"attention_bias": False, "architectures": ["LlamaForCausalLM"], "mlp_bias": True},
         r"lacks .*mlp\..*bias"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_served_is_refused(
    edited: Callable[..., Path], source: Path, config: dict[str, Any], message: str
) -> None:
    changes = {"config": config}
    if "eos_token_id" in config:
        changes["generation_config"] = config
    assert_refused(edited(source, **changes), message)


def test_options_that_the_model_cannot_serve_are_refused(source: Path) -> None:
    assert_refused(
        source, "max_seq_len=513 .* 512 positions .max_position_embeddings", max_seq_len=513
    )
    assert_refused(source, "dtype=int8.*bfloat16", dtype="int8")
    assert_refused(source, r"dtype=torch\.int8.*bfloat16", dtype=torch.int8)


def test_a_missing_or_damaged_shard_is_named(edited: Callable[..., Path], source: Path) -> None:
    shard = sorted(source.glob("*.safetensors"))[1].name
    path = edited(source)
    (path / shard).unlink()
    assert_refused(path, shard)
    data = (source / shard).read_bytes()
    for size in (0, 5, len(data) // 2, len(data) - 1):
        (path / shard).write_bytes(data[:size])
        assert_refused(path, f"{shard}.*truncated")
    (path / shard).write_bytes(data)
    open_engine(path, device="cpu").close()


def test_a_missing_or_wrong_tensor_is_named(edited: Callable[..., Path], source: Path) -> None:
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.self_attn.k_proj.weight"
    shard = weight_map[name]
    tensors = load_file(source / shard)
    wrong: dict[str, tuple[torch.Tensor | None, str]] = {
        "missing": (None, name),
        "shape": (tensors[name][:-1], f"{name} has shape .127, 80., not .128, 80."),
        "dtype": (torch.zeros(128, 80, dtype=torch.int64), f"{name} in I64"),
    }
    for tensor, message in wrong.values():
        path = edited(source)
        (path / shard).unlink()
        rest = {key: value for key, value in tensors.items() if key != name}
        changed = rest if tensor is None else rest | {name: tensor.contiguous()}
        save_file(changed, path / shard)
        assert_refused(path, message)


def test_places_without_a_checkpoint_are_named(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "config.json"), (tmp_path / "absent", "absent")):
        with pytest.raises(FileNotFoundError, match=message):
            open_engine(path, device="cpu")
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", "is a file")


def test_a_hub_id_that_is_not_cached_is_a_clear_error_offline() -> None:
    # conftest.py has set HF_HUB_OFFLINE.
    assert_refused("graphengine/there-is-no-such-model", "graphengine/there-is-no-such-model.*hub")


def test_tensors_that_the_model_does_not_use_are_logged(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="graphengine")
    tensors = {"visual.merger.bias": torch.zeros(2)}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    open_engine(tmp_path, device="cpu").close()
    assert "the model does not use: visual.merger.bias\n" in caplog.text
    assert "KV cache" in caplog.text, "and the budget, before anything is captured"


def test_progress_reaches_the_total(device: str, source: Path) -> None:
    calls: list[tuple[int, int]] = []
    with open_engine(source, device=device, progress=lambda *call: calls.append(call)):
        checkpoint = Checkpoint.open(source)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    assert len(calls) > len(checkpoint.tensors) // 2
    done = [call[0] for call in calls]
    assert done == sorted(done) and {call[1] for call in calls} == {total}


def test_without_a_tokenizer_only_token_ids_work(source: Path, device: str) -> None:
    with open_engine(source, device=device) as engine:
        request = engine.submit([1, 2, 3], greedy(6, ignore_eos=True))
        assert all(event.text == "" for event in run(engine))
        assert len(request.token_ids) == 6 and request.text == ""
        for prompt in ("text", [{"role": "user", "content": "text"}], ["text", "text"]):
            with pytest.raises(ValueError, match=r"no tokenizer.*token ids"):
                engine.generate(prompt, greedy(2))
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            engine.submit([1, 2, 3], greedy(6, stop="\n"))
        stop = request.token_ids[0]
        result = engine.generate([1, 2, 3], greedy(6, stop_token_ids=[stop]))
        assert result.token_ids == (stop,) and result.finish_reason == "stop"


MEASURE_LOADING = """
import sys
from graphengine import Engine

class Loaded(Exception): pass

def kilobytes(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

readings = []
def progress(done, total):
    readings.append(kilobytes("VmRSS:"))
    if done == total:
        raise Loaded

try:
    Engine.from_pretrained(sys.argv[1], device=sys.argv[2], max_seq_len=16, progress=progress)
except Loaded:
    print(readings[0], max(readings))
"""


def test_loading_holds_one_shard_at_a_time(tmp_path: Path, device: str) -> None:
    """Peak host memory: one shard and a little, beside the weights where the device is the host."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc/self/status")
    mebibyte, layers, hidden = 2**20, 12, 512
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": hidden,
        "intermediate_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    matrices = {"self_attn.q_proj": (512, 512), "self_attn.k_proj": (512, 512),
                "self_attn.v_proj": (512, 512), "self_attn.o_proj": (512, 512),
                "mlp.gate_proj": (2048, 512), "mlp.up_proj": (2048, 512),
                "mlp.down_proj": (512, 2048)}  # fmt: skip
    weight_map = {}
    for index in range(layers):
        shard = {f"{name}.weight": torch.ones(shape) for name, shape in matrices.items()}
        shard |= {f"{name}.weight": torch.ones(hidden) for name in
                  ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
        shard = {f"model.layers.{index}.{name}": tensor for name, tensor in shard.items()}
        if index == 0:
            shard["model.embed_tokens.weight"] = torch.ones(64, hidden)
            shard["model.norm.weight"] = torch.ones(hidden)
        save_file(shard, tmp_path / f"{index}.safetensors")
        weight_map |= dict.fromkeys(shard, f"{index}.safetensors")
    index_file = tmp_path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))

    command = [sys.executable, "-c", textwrap.dedent(MEASURE_LOADING), str(tmp_path), device]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    before, peak = (int(number) * 1024 for number in done.stdout.split())
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    weights = sum(sizes) if device == "cpu" else 0
    assert sum(sizes) > 190 * mebibyte and max(sizes) < 20 * mebibyte
    assert peak - before - weights < max(sizes) + 64 * mebibyte


# Memory.


def test_too_little_memory_is_an_error_with_the_table(device: str) -> None:
    with pytest.raises(OutOfBudget) as caught:
        open_engine(device=device, memory_fraction=1e-9)
    message = str(caught.value)
    for part in ("weights", "KV cache", "workspace", "total", "planned", "available", "short"):
        assert part in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("option", ["kv_blocks", "swap_blocks"])
def test_blocks_beyond_the_memory_are_refused(option: str) -> None:
    """Before anything is allocated: 10^9 blocks would be 100 TB."""
    model = read_model_config(Checkpoint.open(checkpoint_path()).config)
    config = EngineConfig(device="cpu", **{option: 10**9})
    with pytest.raises(OutOfBudget, match="1000000000 blocks"):
        plan_memory(model, config, checkpoint_dtype=torch.bfloat16, drafter=NoDrafter())


def test_a_request_beyond_the_pool_is_refused(device: str) -> None:
    with open_engine(device=device, kv_blocks=4, swap_blocks=0) as engine:
        expected = engine.generate(PROMPT, greedy(20))
        request = engine.submit(PROMPT, greedy(20))
        engine.step()
        # The last token's keys and values are never needed: 33 of 34 tokens take a place.
        with pytest.raises(ValueError, match=r"34 tokens .*needs 5 KV blocks of 8.*pool has 4"):
            engine.submit([1] * 20, greedy(14))
        with pytest.raises(ValueError, match=r"128 tokens .*16 KV blocks.*pool has 4"):
            engine.generate([[2, 3], [1] * 20], [greedy(2), greedy(None)])
        run(engine)
        assert request.result().token_ids == expected.token_ids
        assert len(engine.generate([1] * 20, greedy(13, ignore_eos=True)).token_ids) == 13
        assert_idle(engine)


# Reports.


def test_the_report_holds_budget_ladder_and_captures(device: str) -> None:
    with open_engine(device=device, max_batch=4) as engine:
        engine.generate([PROMPT] * 4, greedy(6))
        report = engine.report()
        text = str(report)
        numerics_id = engine.numerics_id
        held = engine.cache.nbytes
        weights = engine.model.weights.nbytes
    assert report.memory.ladder.sizes == (1, 2, 4)
    lines = {line.name.split(" (")[0]: line for line in report.memory.budget.lines}
    assert lines["KV cache"].bytes == held
    assert lines["weights"].bytes == weights
    # Largest first, so that the others reuse its memory.
    assert [capture.name for capture in report.captures] == [
        "prefill/32/full", "prefill/32", "prefill/8/full", "prefill/8", "prefill/32/note",
        "decode/4/full", "decode/4/fast", "decode/2/full", "decode/2/fast", "decode/1/full",
        "decode/1/fast",
    ]  # fmt: skip
    for capture in report.captures:
        assert (capture.nodes is None) == (device == "cpu")
        assert capture.nodes != 0
    counters = report.counters
    assert counters["admitted"] == counters["finished/length"] == 4
    assert counters["tokens"] == 24
    assert counters["replays/decode/4/fast"] >= 2 and counters["replays/prefill/8"] == 4
    for part in ("weights", "KV cache", "swap", "total", "decode/4/full", "prefill/32", "counters"):
        assert part in text
    assert f"{report.memory.describe_kv()}\nKV blocks" in text
    assert "decode buckets  1, 2, 4" in text and "prefill buckets 8, 32" in text
    assert f"max_seq_len {MAX_SEQ_LEN}" in text and device in text
    pdl = "on" if device == "cuda" else "off"
    kernels = rf"^row family dot \(for max_batch 4\), plans .*, PDL {pdl}, numerics {numerics_id}$"
    assert re.search(kernels, text, re.MULTILINE), text
    # It is a picture of its moment.
    assert dict(counters) == dict(report.counters)


def test_weights_of_the_demo_are_in_the_budget() -> None:
    """Decided on tensors without storage, and still the truth."""
    checkpoint = Checkpoint.open(checkpoint_path())
    wanted = sum(
        info.nbytes for name, info in checkpoint.tensors.items() if not name.startswith("mtp.")
    )
    plan = plan_memory(
        read_model_config(checkpoint.config),
        EngineConfig(device="cpu", dtype="bfloat16"),
        checkpoint_dtype=torch.bfloat16,
        drafter=NoDrafter(),
    )
    assert plan.budget.lines[0].name == "weights" and plan.budget.lines[0].bytes == wanted


def test_no_thread_lives_after_the_captures(device: str) -> None:
    """This says nothing of torch's pool in C++: the first computation makes it, once."""
    before = threading.enumerate()
    with open_engine(device=device) as engine:
        engine.generate(PROMPT, greedy(2))
        assert threading.enumerate() == before
