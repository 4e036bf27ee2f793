"""Every program of examples/ runs on the demo model."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import itertools
import json
import pickle
import secrets
import sys
import threading
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from events import GENEROUS_S
from forked_pytest import run_apart
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from graphengine import Chat, Engine, Event, Policy, Request, SamplingParams
from graphengine.demo import checkpoint_path

pytest_plugins = ["pytester"]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ON_GPU = torch.cuda.is_available()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    del sys.modules[spec.name]  # so that Ray sends what the file defines, and not the name
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


@pytest.mark.skipif(not hasattr(transformers, "PI0Config"), reason="this transformers has no pi0")
def test_the_robot_plans_while_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk begins with the actions that were planned for the time of planning."""
    acted: list[tuple[Any, torch.Tensor]] = []
    act = Policy.act

    def recorded(policy: Policy, prefix: Any, state: Any, **options: Any) -> torch.Tensor:
        chunk = act(policy, prefix, state, **options).clone()
        acted.append((options["fixed"], chunk.cpu()))
        return chunk

    monkeypatch.setattr(Policy, "act", recorded)
    example = load("robot_policy")
    monkeypatch.setattr(example, "TICK_S", 0.0)
    actions = example.main(ticks=12)
    assert len(actions) == 12 and len(acted) == 3
    assert [len(fixed) for fixed, _ in acted] == [0, 2, 2]
    for (_, before), (fixed, chunk) in itertools.pairwise(acted):
        assert torch.equal(fixed, before[5:7]) and torch.equal(chunk[:2], fixed)
    assert torch.equal(torch.stack(actions[5:10]), acted[1][1][:5])


def test_the_voice_agent_is_interrupted_and_goes_on() -> None:
    heard, said = load("voice_agent").main()
    assert heard and said and heard not in said[:1]


def test_the_voice_goes_on_from_what_was_heard(tmp_path: Path) -> None:
    talk = load("talking_loop").main(str(tmp_path / "talk.wav"))
    first, second = talk.turns
    assert first.shape == (6, 4) and second.shape == (20, 4)
    # Whole blocks of the 4 tokens and of the 6 frames.
    assert talk.kept == [0, 8]
    with wave.open(str(tmp_path / "talk.wav")) as file:
        assert file.getnframes() == len(talk.sound) > 0 and file.getframerate() == 240


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


def test_a_tower_sees_pictures_for_the_language_model(tmp_path: Path) -> None:
    """The first turn says what transformers' whole model says after the same pixels."""
    example = load("vision_language")
    first, second = example.main()
    assert [each.prompt_token_ids.count(-1) for each in (first, second)] == [24, 33]
    assert first.cached_tokens == 0 and second.cached_tokens >= 30
    model = example.tiny_model(str(tmp_path))
    picture = torch.rand(3, 32, 48)
    patches, grid = [], []

    class Kept:
        def get_image_features(self, *given: Any) -> Any:
            patches.append(given[0])
            grid.append(given[1])
            return model.model.get_image_features(*given)

    assert example.seen(Kept(), picture).grid == (1, 4, 6)
    ids = [5, 17, example.BEGIN, *[250] * 24, example.END, 9, 31]
    kinds = [int(each == 250) for each in ids]
    made = model.generate(
        input_ids=torch.tensor([ids]), mm_token_type_ids=torch.tensor([kinds]),
        pixel_values=patches[0], image_grid_thw=grid[0], max_new_tokens=12, do_sample=False,
    )  # fmt: skip
    assert made[0, len(ids) :].tolist() == list(first.token_ids)


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


class Client:
    """Asks the shim, a connection each time."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, data: bytes | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GENEROUS_S)
        connection.request(method, f"/v1/{path}", data)
        answer = connection.getresponse()
        with contextlib.closing(connection):
            return answer.status, answer.read().decode()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        status, text = self.ask("POST", path, json.dumps(body).encode())
        return status, json.loads(text)

    def stream(self, path: str, **body: Any) -> list[Any]:
        """The chunks; the stream has to end as it should."""
        status, text = self.ask("POST", path, json.dumps({**body, "stream": True}).encode())
        *lines, last, empty = text.split("\n\n")
        assert (status, last, empty) == (200, "data: [DONE]", "")
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture(scope="module")
def shim() -> Iterator[tuple[Client, Any]]:
    """A client, and `expected(prompt, **params)`: what the engine itself answers."""
    example = load("openai_shim")
    ready, answers = threading.Event(), {}

    def run() -> None:
        with Engine.from_pretrained("demo", max_batch=4, max_seq_len=64, max_waiting=2) as engine:
            for seed in (None, 7, 8):
                params = SamplingParams(temperature=int(seed is not None), max_tokens=4, seed=seed)
                for prompt in ("def fib(", "class A", (Chat(messages=HELLO))):
                    key = prompt if isinstance(prompt, str) else "chat"
                    answers[key, seed] = engine.generate(prompt, params)
            answers["loop"], answers["server"] = example.serve(engine, port=0)
            ready.set()
            answers["loop"].run()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(GENEROUS_S)
    loop, server = answers["loop"], answers["server"]
    try:
        yield Client(server.server_port), answers
    finally:
        loop.stopping.set()
        thread.join()
        server.shutdown()
        server.server_close()


HELLO: Any = [{"role": "user", "content": "def fib("}]
FIB = {"prompt": "def fib(", "max_tokens": 4, "temperature": 0}
CHAT = {"model": "demo", "messages": HELLO, "max_completion_tokens": 4, "temperature": 0}


def test_the_shim_completes(shim: tuple[Client, Any]) -> None:
    client, expected = shim
    alone = expected["def fib(", None]
    status, answer = client.post("completions", **FIB)
    (choice,) = answer["choices"]
    assert status == 200 and answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "demo")
    assert (choice["text"], choice["finish_reason"]) == (alone.text, "length")
    count = len(alone.prompt_token_ids)
    usage = {"prompt_tokens": count, "completion_tokens": 4, "total_tokens": count + 4}
    assert answer["usage"] == usage

    options = {"stream_options": {"include_usage": True}}
    *chunks, last = client.stream("completions", **FIB, **options)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert len({chunk["id"] for chunk in chunks}) == 1 < len(chunks)
    assert "".join(part["text"] for part in parts) == alone.text
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert (last["choices"], last["usage"]) == ([], usage)

    # Several prompts, each with two choices; one of the prompts by its ids.
    ids = list(expected["class A", 7].prompt_token_ids)
    several = {"prompt": [FIB["prompt"], "class A"], "n": 2, "seed": 7, "max_tokens": 4}
    wanted = [expected[key, seed].text for key in several["prompt"] for seed in (7, 8)]
    status, answer = client.post("completions", **several)
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == count + len(ids)
    said = dict.fromkeys(range(2), "")
    for chunk in client.stream("completions", **{**several, "prompt": ids}):
        said[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(said.values()) == wanted[2:]


def test_the_shim_tells_logprobs(shim: tuple[Client, Any]) -> None:
    client, expected = shim
    _, answer = client.post("completions", **FIB, logprobs=2)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"] == expected["def fib(", None].text
    ends = [len(token) for token in found["tokens"]]
    assert found["text_offset"] == [sum(ends[:place]) for place in range(4)]
    for token, logprob, best in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert len(best) == 2 and best[token] == max(best.values()) == logprob <= 0  # greedy
    _, answer = client.post("completions", **{**FIB, "temperature": 1, "seed": 7}, logprobs=0)
    found = answer["choices"][0]["logprobs"]
    pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
    assert found["top_logprobs"] == [{token: logprob} for token, logprob in pairs]
    # A part of a character, which alone is no text, has a name, and no place in the text.
    part = {"logit_bias": {"130": 100}, "max_tokens": 2}
    _, answer = client.post("completions", **{**FIB, **part}, logprobs=0)
    found = answer["choices"][0]["logprobs"]
    assert (found["tokens"], found["text_offset"]) == (["bytes:\\xc5"] * 2, [0, 0])
    _, answer = client.post("chat/completions", **CHAT, logprobs=True, top_logprobs=2)
    (choice,) = answer["choices"]
    tokens = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens) == choice["message"]["content"]
    assert all(bytes(each["bytes"]).decode() == each["token"] for each in tokens)
    assert all(each["top_logprobs"][0]["logprob"] == each["logprob"] for each in tokens)
    streamed = client.stream("chat/completions", **CHAT, logprobs=True)
    parts = [chunk["choices"][0]["logprobs"]["content"] for chunk in streamed]
    assert [each["token"] for part in parts for each in part] == [each["token"] for each in tokens]


def test_the_shim_chats(shim: tuple[Client, Any]) -> None:
    client, expected = shim
    said = {"role": "assistant", "content": expected["chat", None].text}
    status, answer = client.post("chat/completions", **CHAT)
    (choice,) = answer["choices"]
    assert status == 200 and answer["id"].startswith("chatcmpl-")
    assert (answer["object"], choice["message"]) == ("chat.completion", said)
    assert answer["usage"]["completion_tokens"] == 4
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "def fib("}]}]}
    assert client.post("chat/completions", **{**CHAT, **parts})[1]["choices"] == [choice]
    # The client's dumps of messages have null for what is not there.
    parts = {"messages": [{"role": "user", "content": "def fib(", "tool_calls": None}]}
    assert client.post("chat/completions", **{**CHAT, **parts})[1]["choices"] == [choice]
    chunks = client.stream("chat/completions", **CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta["content"] for delta in deltas) == said["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_shim_lists_its_model(shim: tuple[Client, Any]) -> None:
    client, _ = shim
    status, text = client.ask("GET", "models")
    (card,) = json.loads(text)["data"]
    assert (status, card["id"], card["object"]) == (200, "demo", "model")
    status, text = client.ask("GET", "models/demo")
    assert (status, json.loads(text)) == (200, card)


@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [
        ("completions", {"prompt": None}, "prompt", "prompt=None is neither text nor token ids"),
        ("completions", {"prompt": [["a"]]}, "prompt", "prompt: ['a'] is neither text nor token"),
        ("completions", {"max_tokens": -1}, None, "max_tokens=-1 must be at least 1"),
        ("completions", {"temperature": "hot"}, None, "temperature='hot'"),
        ("completions", {"n": 0}, "n", "n=0 must be an integer in [1, 32]"),
        (
            "completions",
            {"n": 17, "prompt": ["a", "b"]},
            "n",
            "2 prompts with n=17 are above 32 choices",
        ),
        ("completions", {"logprobs": True}, "logprobs", "logprobs=True must be an integer"),
        ("completions", {"echo": True}, "echo", "echo=True is not supported"),
        ("completions", {"best_of": 3}, "best_of", "best_of=3 is not supported"),
        ("completions", {"stream": "yes"}, "stream", "stream='yes' must be true or false"),
        ("completions", {"top_k": 3}, "top_k", "top_k=3 is not supported"),
        ("completions", {"logit_bias": {"a": 1}}, "logit_bias", "logit_bias={'a': 1} is not"),
        ("completions", {"logit_bias": {"5": "x"}}, None, "logit_bias[5]='x' must be a number"),
        ("completions", {"stream_options": {"a": 1}}, "stream_options", "{'a': 1} is not supp"),
        ("completions", {"model": "gpt"}, "model", "model='gpt': this server has 'demo' alone"),
        (
            "completions",
            {"prompt": "x " * 99},
            None,
            "leaves no room for a new one in max_seq_len=64",
        ),
        ("completions", {"prompt": [10**6]}, None, "1000000"),
        ("chat/completions", {"messages": "hi"}, "messages", "messages='hi' is not a list of"),
        ("chat/completions", {"tools": [{}]}, "tools", "tools=[{}] is not supported"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ("chat/completions", {"max_tokens": 2}, "max_tokens", "are the same limit"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a", "name": "b"}]},
            "messages",
            "messages: name='b' is not supported",
        ),
        ("chat/completions", {"messages": [{"content": "a"}]}, None, "role=None: must be a string"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "{'type': 'image_url'} is not a part of text",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_shim_refuses_what_it_lacks(
    shim: tuple[Client, Any], path: str, change: Any, param: str | None, message: str, stream: bool
) -> None:
    """In a stream as well, where the status comes before the first chunk."""
    body = {"stream": stream, **(FIB if path == "completions" else CHAT), **change}
    status, answer = shim[0].post(path, **body)
    error = answer["error"]
    assert message in error["message"]
    found = (status, error["type"], error["param"], error["code"])
    assert found == (400, "invalid_request_error", param, None)


def test_the_shim_answers_other_errors_in_the_same_form(shim: tuple[Client, Any]) -> None:
    client, _ = shim
    for data in (b"", b"{", b"[]", b"[" * 200_000):
        status, text = client.ask("POST", "completions", data)
        assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")
    status, answer = client.post("embeddings", input="a")
    assert status == 404 and "/v1/embeddings is not here" in answer["error"]["message"]
    status, text = client.ask("DELETE", "models/demo")
    assert (status, json.loads(text)["error"]["type"]) == (501, "invalid_request_error")
    options = {"stream_options": {"include_usage": True}}
    status, answer = client.post("completions", **FIB, **options)
    assert (status, answer["error"]["param"]) == (400, "stream_options")
    # Two may wait. Those that were submitted before are cancelled, and the next is served.
    status, answer = client.post("completions", **FIB, n=8)
    assert (status, answer["error"]["type"]) == (503, "server_error")
    assert client.post("completions", **FIB)[0] == 200
    # What asks for nothing is taken.
    nothing = {"echo": False, "suffix": None, "best_of": 1, "user": "me", "model": "demo"}
    assert client.post("completions", **FIB, **nothing)[0] == 200


class Endless:
    """Stands in for an engine whose requests never end."""

    busy = False

    def submit(self, prompt: str, params: SamplingParams, *, on_event: Any) -> Any:
        self.busy, self.on_event, self.cancelled = True, on_event, threading.Event()
        return SimpleNamespace(cancel=self.cancelled.set)

    def step(self) -> None:
        self.busy = not self.cancelled.wait(0.001)
        self.on_event(Event(SimpleNamespace(), (5,), "a", None, 0.0))


def test_the_shim_cancels_what_nobody_reads() -> None:
    engine = Endless()
    loop, server = load("openai_shim").serve(engine, port=0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=GENEROUS_S)
    connection.request("POST", "/v1/completions", json.dumps({**FIB, "stream": True}))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: {") and not engine.cancelled.is_set()
    answer.close()
    connection.close()
    assert engine.cancelled.wait(GENEROUS_S)
    loop.stopping.set()
    thread.join()
    server.shutdown()
    server.server_close()
    with pytest.raises(RuntimeError, match="the server is stopping"):
        next(loop.submit([("def fib(", SamplingParams())]))


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
def test_graph_tests_pass(name: str, end: str, pytester: pytest.Pytester) -> None:
    options = ["--rootdir", str(EXAMPLES), "--import-mode=importlib", "-p", "no:cacheprovider"]
    result = run_apart(pytester, "-q", "-c", "/dev/null", *options, str(EXAMPLES / f"{name}.py"))
    assert result.ret == 0 and end in result.stdout.str()
