"""Every program of examples/ runs on the demo model."""

from __future__ import annotations

import importlib.util
import json
import pickle
import secrets
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from events import GENEROUS_S
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from graphengine import Engine, Request
from graphengine.demo import checkpoint_path

pytest_plugins = ["pytester"]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ON_GPU = torch.cuda.is_available()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test_and_a_line_on_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    tests = Path(__file__).read_text("utf-8")
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert names and [n for n in names if f"`{n}.py`" not in page or f'"{n}' not in tests] == []


def test_the_robot_cancels_what_is_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Engine.submit

    def without_hurry(*arguments: Any, deadline_s: float) -> Request:
        return submit(*arguments, deadline_s=GENEROUS_S)

    monkeypatch.setattr(Engine, "submit", without_hurry)
    first, second = load("robot_loop").main()
    assert first.finish_reason in ("cancelled", "length", "stop")
    assert second.finish_reason in ("length", "stop") and second.text
    assert second.request_id == first.request_id + 1


def test_the_voice_agent_is_interrupted_and_goes_on() -> None:
    heard, said = load("voice_agent").main()
    assert heard and said and heard not in said[:1]


def test_output_is_typed() -> None:
    pytest.importorskip("llguidance")
    command = load("typed_output").main()
    assert command.keys() == {"action", "centimetres"}
    assert command["action"] in ("move", "grip", "wait") and 0 <= command["centimetres"] <= 99


def test_sessions_go_back_branch_and_are_restored() -> None:
    first, second, branch, restored = load("sessions").main()
    assert first.cached_tokens == 0
    assert min(turn.cached_tokens for turn in (second, branch, restored)) > 0
    assert restored.prompt_token_ids == second.prompt_token_ids
    assert restored.token_ids == second.token_ids or ON_GPU, "up to last bits on a GPU"


def test_a_prompt_has_what_an_encoder_sees() -> None:
    first, second, alone = load("prompt_embeddings").main()
    assert [each.prompt_token_ids.count(-1) for each in (first, second, alone)] == [16, 16, 16]
    assert first.cached_tokens == 0 and second.cached_tokens >= 16
    assert len(alone.prompt_token_ids) == 16 and alone.token_ids


def test_rollouts_of_two_replicas_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise Ray writes one into the home directory.
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    example = load("ray_rollouts")
    (first, rollouts), (second, later) = example.main()
    assert (first, second) == (0, 1)
    weights = load_file(checkpoint_path() / "model.safetensors")
    options = {"device": "cpu", "max_batch": 2, "max_seq_len": 64}
    seeds = [replace(example.PARAMS, seed=100 + place) for place in range(len(rollouts))]
    with Engine.from_pretrained("demo", **options) as engine:
        for found in (rollouts, later):
            expected = engine.generate(example.PROMPTS, seeds)
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]
            assert [each.logprobs for each in found] == [each.logprobs for each in expected]
            example.train(weights, found)
            engine.update_weights(weights)
    assert rollouts[0].logprobs != later[0].logprobs


def test_rollouts_have_routing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, num_experts=8,
        num_experts_per_tok=4,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    example = load("ray_rollouts")
    options = {"device": "cpu", "max_batch": 2, "max_seq_len": 64, "record_routing": True}
    replica = example.Replica(str(tmp_path), **options)
    with replica.engine:
        _, results = replica.rollouts([[5, 6, 7]], [example.PARAMS])
    (sent,) = pickle.loads(pickle.dumps(results))  # as Ray does
    assert sent.routing.shape == (3 + len(sent.token_ids) - 1, 2, 4)
    assert sent == results[0] and (sent.routing == results[0].routing).all()


def test_the_shim_answers_over_http() -> None:
    shim = load("openai_shim")

    def post(body: dict[str, Any]) -> tuple[int, Any]:
        request = urllib.request.Request(url, json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=GENEROUS_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    with Engine.from_pretrained("demo", max_batch=2, max_seq_len=64) as engine:
        loop, server = shim.serve(engine, port=0)
        url = f"http://127.0.0.1:{server.server_port}/v1/completions"
        answers: list[tuple[int, Any]] = []

        def client() -> None:
            greedy = {"prompt": "def fib(", "max_tokens": 4, "temperature": 0}
            bodies = [greedy, {"max_tokens": 4}, greedy | {"max_tokens": -1}]
            answers.extend(map(post, bodies))
            loop.stopping.set()

        thread = threading.Thread(target=client)
        thread.start()
        loop.run()
        thread.join()
        server.shutdown()
        server.server_close()
    assert [status for status, _ in answers] == [200, 400, 400]
    (choice,) = answers[0][1]["choices"]
    assert choice["text"] and choice["finish_reason"] == "length"
    assert "prompt" in answers[1][1]["error"]["message"]
    assert "max_tokens=-1 must be at least 1" in answers[2][1]["error"]["message"]


# What somebody could break in the runner, and a test of the example that must see it.
BROKEN = [
    (
        "self.ids[: len(ids)] = torch.tensor(ids, device=DEVICE)",
        "self.ids = torch.tensor([*ids, *self.ids[len(ids) :].tolist()], device=DEVICE)",
        "test_a_batch_leaves_the_buffers_where_they_were",
    ),
    (
        "self.graphs[rows].replay()",
        "self.logits = self.logits.clone(); self.graphs[rows].replay()",
        "test_a_batch_leaves_the_buffers_where_they_were",
    ),
    (
        "self.ids[: len(ids)] = torch.tensor(ids, device=DEVICE)",
        "pass",
        "test_a_row_is_that_of_its_token_in_every_bucket",
    ),
    (
        "return self.logits[: len(ids)]",
        "return self.logits[rows - len(ids) : rows]",
        "test_a_row_is_that_of_its_token_in_every_bucket",
    ),
    (
        "if bucket >= len(ids)",
        "if bucket > len(ids)",
        "test_a_batch_goes_to_the_smallest_bucket_that_holds_it",
    ),
    (
        "self.graphs[rows].replay()",
        "self.step(rows)",
        "test_a_batch_goes_to_the_smallest_bucket_that_holds_it",
    ),
    (
        "return Eager(lambda: self.step(rows))",
        "ids = self.ids.clone(); return Eager(lambda: torch.matmul(self.table[ids[:rows]]"
        " / self.lengths[:rows, None], self.head, out=self.logits[:rows]))",
        "test_a_replay_computes_what_the_step_computes",
    ),
    (
        "return Eager(lambda: self.step(rows))",
        "return Eager(lambda: None)",
        "test_every_row_of_the_bucket_is_written",
    ),
    (
        "torch.matmul(hidden, self.head, out=self.logits[:rows])",
        "torch.matmul(hidden[:-1], self.head, out=self.logits[: rows - 1])",
        "test_every_row_of_the_bucket_is_written",
    ),
    (
        "torch.matmul(hidden, self.head,",
        "torch.matmul(hidden - hidden.mean(0), self.head,",
        "test_padded_rows_change_nothing",
    ),
    (
        "torch.matmul(hidden, self.head,",
        "torch.matmul(hidden + self.ids.max(), self.head,",
        "test_padded_rows_change_nothing",
    ),
]


@pytest.mark.skipif(ON_GPU, reason="some faults are planted in what stands in for a graph")
@pytest.mark.parametrize(("sound", "broken", "test"), BROKEN, ids=[b for _, b, _ in BROKEN])
def test_the_runners_tests_see_what_is_broken(
    sound: str, broken: str, test: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (EXAMPLES / "test_bucket_runner.py").read_text("utf-8")
    assert source.count(sound) == 1
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    pytester.makepyfile(test_runner=source.replace(sound, broken))
    result = pytester.runpytest_inprocess("-p", "no:hypothesispytest")
    result.stdout.fnmatch_lines([f"FAILED test_runner.py::{test}*"])


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("test_bucket_runner", "10 passed"),
        ("test_compiled_model", "5 passed" if ON_GPU else "5 skipped"),
    ],
)
def test_graph_tests_pass(name: str, end: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    options = ["--rootdir", str(EXAMPLES), "--import-mode=importlib"]
    done = subprocess.run(
        [*command, *options, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert end in done.stdout
