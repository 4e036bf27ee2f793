"""The command line, in process and once as users start it."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints.few_layers import few_layers
from graphengine import Engine, EngineConfig, SamplingParams
from graphengine.cli.main import COMMANDS_ABOVE, main
from graphengine.cli.option_files import PAGE_TABLES
from graphengine.cli.option_flags import flag_facts
from graphengine.demo import checkpoint_path
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.options.table import rows
from graphengine.text.tokenizer import Tokenizer

PROMPT = "def fib(n):"
SMALL = ("--max-batch", "2", "--max-seq-len", "96")
RESULT_KEYS = {
    "request_id", "prompt_token_ids", "token_ids", "text", "segments", "finish_reason",
    "stop_reason", "seed", "timings", "cached_tokens", "weight_version", "adapter",
    "acceptance", "logprobs",
    "prompt_logprobs", "routing", "codes", "codes_logprobs",
}  # fmt: skip
# Besides those of `Result.to_dict()`.
SUMMARY_KEYS = {
    "prompt_tokens",
    "new_tokens",
    "ttft_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "replays",
    "device",
}


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`cli("info", "--json")` -> (exit status, stdout, stderr); a small engine on the CPU.

    Text is greedy unless the arguments have another temperature, and that of a few of the demo's
    layers unless they name a checkpoint.
    """

    def call(command: str, *arguments: str, device: str = "cpu") -> tuple[int, str, str]:
        capsys.readouterr()
        small = ("--temperature", "0", "--checkpoint", str(few_layers()))
        options = (*SMALL, *small) if command in ("generate", "chat") else SMALL
        status = main([command, "--device", device, *options, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


Cli = Callable[..., tuple[int, str, str]]


def greedy_text(prompt: Any, path: Path | None = None, max_tokens: int = 12) -> str:
    """What an engine of the same options makes of `prompt`."""
    options: dict[str, Any] = {"device": "cpu", "max_batch": 2, "max_seq_len": 96}
    with Engine.from_pretrained(path or few_layers(), **options) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        text: str = engine.generate(prompt, params).text
        return text


def prompt_len() -> int:
    return len(Tokenizer.from_directory(checkpoint_path()).encode(PROMPT))


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def assert_error(outcome: tuple[int, str, str], pattern: str) -> None:
    status, out, err = outcome
    assert status == 2 and out == ""
    assert err.startswith("graphengine: error: ") and err.endswith("\n")
    assert re.search(pattern, err), err
    assert "Traceback" not in err


# generate


def test_generate_streams_text_and_sums_up(cli: Cli) -> None:
    status, out, err = cli("generate", "--prompt", PROMPT, "--max-tokens", "12", "--seed", "7")
    assert status == 0 and out == greedy_text(PROMPT) + "\n", "a file gets the text alone"
    summary = err
    assert f"{prompt_len()} prompt + 12 new tokens on cpu, finished by length, seed 7" in summary
    latencies = r"time to first token [\d.]+ ms, inter-token p50 [\d.]+ ms, p99 [\d.]+ ms"
    assert re.search(latencies, summary)
    assert re.search(r"buckets: prefill/16 x1, decode/1/fast x\d+", summary)


class Pieces(io.StringIO):
    """A terminal that remembers what it showed at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def flush(self) -> None:
        self.shown.append(self.getvalue())


def test_generate_shows_text_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Pieces()
    monkeypatch.setattr(sys, "stdout", terminal)
    arguments = ["--prompt", PROMPT, "--max-tokens", "12", "--device", "cpu", *SMALL]
    arguments += ["--temperature", "0", "--checkpoint", str(few_layers())]
    assert main(["generate", *arguments]) == 0
    text = greedy_text(PROMPT)
    partial = {shown for shown in terminal.shown if shown and text.startswith(shown)}
    assert len(partial) > 5


def test_generate_prints_json(cli: Cli, device: str) -> None:
    arguments = ("--prompt", PROMPT, "--max-tokens", "9", "--json", "--dtype", "float32")
    status, out, err = cli("generate", *arguments, device=device)
    assert status == 0 and err == ""
    (line,) = out.splitlines()
    document = json.loads(line, parse_constant=pytest.fail)
    assert document.keys() == SUMMARY_KEYS | RESULT_KEYS
    assert document["new_tokens"] == len(document["token_ids"]) == 9
    assert document["prompt_tokens"] == prompt_len()
    assert document["finish_reason"] == "length"
    assert document["device"].startswith(device)
    assert document["ttft_ms"] > 0 and 0 <= document["itl_p50_ms"] <= document["itl_p99_ms"]
    assert document["replays"].keys() == {"prefill/16", "decode/1/fast"}
    assert document["replays"]["prefill/16"] == 1 and document["replays"]["decode/1/fast"] >= 8
    if device == "cpu":
        assert document["text"] == greedy_text(PROMPT, max_tokens=9)


def test_as_many_tokens_as_fit(cli: Cli) -> None:
    """The default is 256, so None has a spelling of its own."""
    arguments = ("--prompt", PROMPT, "--max-tokens", "none", "--max-seq-len", "300", "--json")
    status, out, _ = cli("generate", *arguments, "--ignore-eos")
    result = json.loads(out)
    assert status == 0 and len(result["token_ids"]) == 300 - len(result["prompt_token_ids"])
    assert len(result["token_ids"]) > 256


def test_a_single_token_has_no_gaps(cli: Cli) -> None:
    arguments = ("--prompt", PROMPT, "--max-tokens", "1")
    status, out, _ = cli("generate", *arguments, "--json")
    document = json.loads(out)
    assert status == 0 and document["new_tokens"] == 1
    assert document["itl_p50_ms"] is None and document["itl_p99_ms"] is None
    status, _, err = cli("generate", *arguments)
    assert status == 0 and "time to first token" in err
    assert "None" not in err and "nan" not in err


def test_generate_prints_several_samples(cli: Cli) -> None:
    arguments = ("generate", "--prompt", PROMPT, "--max-tokens", "6", "--seed", "7")
    status, out, err = cli(*arguments, "--samples", "3")
    assert (status, out.count("--- seed ")) == (0, 3)
    status, lines, _ = cli(*arguments, "--samples", "3", "--json")
    results = [json.loads(line) for line in lines.splitlines()]
    assert [each["seed"] for each in results] == [7, 8, 9]
    assert out == "".join(f"--- seed {each['seed']}\n{each['text']}\n" for each in results)
    assert results[0]["text"] + "\n" == cli(*arguments)[1]
    status, _, err = cli(*arguments, "--samples", "0")
    assert status == 2 and "n=0 must be an integer in [1, 65536]" in err


def test_generate_reads_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# two lines\n" + PROMPT
    say(monkeypatch, text)
    status, out, _ = cli("generate", "--prompt", "-", "--max-tokens", "12", "--json")
    assert status == 0
    assert json.loads(out)["text"] == greedy_text(text)


def test_sampling_options_reach_the_engine(cli: Cli) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        arguments = ("--prompt", PROMPT, "--max-tokens", "20", "--json", *arguments)
        status, out, _ = cli("generate", *arguments)
        assert status == 0
        document: dict[str, Any] = json.loads(out)
        return document

    greedy = run()
    hot = run("--temperature", "1.5", "--seed", "3")
    assert hot["seed"] == 3 and hot["token_ids"] != greedy["token_ids"]
    assert run("--temperature", "1.5", "--seed", "3")["token_ids"] == hot["token_ids"]
    drawn = run("--temperature", "1.5")
    again = ("--temperature", "1.5", "--seed", str(drawn["seed"]))
    assert run(*again)["token_ids"] == run("--temperature", "1.5")["token_ids"]
    other = run("--temperature", "1.5", "--engine-seed", "1")
    assert other["seed"] != drawn["seed"]
    assert run("--temperature", "1.5", "--top-k", "1")["token_ids"] == greedy["token_ids"]
    assert run("--temperature", "1.5", "--top-p", "1e-6")["token_ids"] == greedy["token_ids"]
    assert run("--temperature", "1.5", "--min-p", "1")["token_ids"] == greedy["token_ids"]
    assert run("--temperature", "1.5", "--top-n-sigma", "1e-9")["token_ids"] == greedy["token_ids"]
    # A filter takes the sampler that knows filters; greedy needs none.
    assert "decode/1/fast" in hot["replays"] and "decode/1/full" not in hot["replays"]
    filtered = run("--temperature", "1.5", "--top-k", "9")["replays"]
    assert "decode/1/full" in filtered and "decode/1/fast" not in filtered
    assert run("--top-k", "9")["replays"].keys() == greedy["replays"].keys()
    stop = greedy["text"][5:8]
    stopped = run("--stop", "never in the text", "--stop", stop)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == greedy["text"][: greedy["text"].find(stop)]
    assert stopped["stop_reason"] == stop and greedy["stop_reason"] is None
    included = run("--stop", stop, "--include-stop")
    assert included["text"] == greedy["text"][: greedy["text"].find(stop) + len(stop)]
    assert run("--deadline", "1e-9")["finish_reason"] == "deadline"
    assert run("--min-tokens", "20", "--ignore-eos")["new_tokens"] == 20


def test_what_is_asked_of_logits_reaches_the_engine(cli: Cli) -> None:
    # A few of its layers say no words.
    demo = ("generate", "--checkpoint", "demo", "--prompt", PROMPT)

    def run(*options: str) -> dict[str, Any]:
        status, out, _ = cli(*demo, "--max-tokens", "20", "--json", "--ignore-eos", *options)
        assert status == 0
        document: dict[str, Any] = json.loads(out)
        return document

    greedy = run()
    said = greedy["token_ids"]
    assert greedy["logprobs"] is None
    for name, value in (("repetition", "1.5"), ("frequency", "2"), ("presence", "2")):
        assert run(f"--{name}-penalty", value)["token_ids"] != said, name
    biases = ("--logit-bias", f"{said[0]}=-inf", "--logit-bias", "5=1e3")
    assert set(run(*biases)["token_ids"]) == {5}
    word = greedy["text"].split()[0]
    assert word not in run("--bad-word", "never", "--bad-word", word)["text"].split()
    found = run("--logprobs", "2")
    assert found["token_ids"] == said
    assert [entries[0]["token_id"] for entries in found["logprobs"]] == said
    assert all(len(entries) in (2, 3) for entries in found["logprobs"])
    status, out, err = cli(*demo, "--max-tokens", "3", "--logprobs", "1")
    lines = [line for line in err.splitlines() if " rank " in line]
    assert (
        status == 0 and " rank " not in out and [int(line.split()[0]) for line in lines] == said[:3]
    )


def test_prompts_are_scored_and_ids_end_the_text(cli: Cli) -> None:
    generate = ("generate", "--prompt", PROMPT, "--max-tokens", "12")
    said = json.loads(cli(*generate, "--json")[1])["token_ids"]
    two = next(i for i in range(len(said)) if said.index(said[i]) == i and i > 1)
    ids = f"{said[two - 1]},{said[two]}"
    options = ("--stop-token-sequence", "1,2,3", "--stop-token-sequence", ids)
    found = json.loads(cli(*generate, *options, "--prompt-logprobs", "1", "--json")[1])
    assert found["token_ids"] == said[: two + 1]
    assert found["stop_reason"] == said[two - 1 : two + 1]
    first, *scored = found["prompt_logprobs"]
    assert first is None and len(scored) == prompt_len() - 1
    assert found["prompt_token_ids"][1:] == [entries[0]["token_id"] for entries in scored]
    status, _, err = cli(*generate, "--stop-token-ids", ids, "--prompt-logprobs", "0")
    assert status == 0 and "finished by stop" in err
    lines = err[err.index(f"{found['prompt_token_ids'][0]:>7}\n") :].splitlines()
    assert [int(line.split()[0]) for line in lines[: prompt_len()]] == found["prompt_token_ids"]


def test_a_prompt_is_scored_alone(cli: Cli) -> None:
    scored = ("--prompt", PROMPT, "--max-tokens", "0", "--prompt-logprobs", "0")
    status, out, err = cli("generate", *scored)
    assert status == 0 and f"{prompt_len()} prompt + 0 new tokens" in err
    assert "None" not in out + err and len(re.findall(" rank ", err)) == prompt_len() - 1


def test_drafts_by_live_requests_are_a_flag(cli: Cli) -> None:
    options = ("--speculative", "mtp:3", "--max-batch", "8", "--draft-len-schedule", "1:3,4:1")
    assert json.loads(cli("info", "--json", *options)[1])["draft_lengths"] == [0, 1, 3]


def test_hidden_states_are_saved(cli: Cli, tmp_path: Path) -> None:
    options = ("--prompt", PROMPT, "--max-tokens", "1", "--speculative", f"save-hidden:{tmp_path}")
    assert cli("generate", *options)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["00000001.safetensors"]


def test_options_that_no_command_line_has_are_few() -> None:
    """Each is set by another flag, is for several requests or calls, or sizes a table."""
    missing = {row.name for table in PAGE_TABLES.values() for row in rows(table) if not row.flag}
    assert missing == {
        "structured_outputs", "routing", "gate", "prompt_logprobs", "prompt_logprobs_out",
        "logprobs_mode", "forced_tokens", "releasable", "codes", "forced_codes", "feed",
        "max_waiting", "max_stop_ids", "max_logit_bias", "max_bad_words", "max_bad_word_tokens",
        "max_stop_sequences", "max_stop_sequence_tokens", "max_logprobs", "forced_acceptance",
        "wait_limit_s", "collect_while_waiting",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", ["5", "x=1", "5=", "=1", "5=y"])
def test_a_bias_is_an_id_and_a_number(capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--prompt", "x", "--logit-bias", wrong])
    assert "must be ID=V" in capsys.readouterr().err


def test_adapters_have_names_of_their_own(cli: Cli) -> None:
    status, _, err = cli("info", "--adapter", "a=one", "--adapter", "b=x", "--adapter", "a=two")
    assert status == 2 and "adapter 'a' is there twice, as 'one' and as 'two'" in err


def test_engine_options_reach_the_engine(cli: Cli) -> None:
    options = ("--block-size", "8", "--lookahead", "0", "--wait", "block", "--dtype", "float32")
    status, out, _ = cli("generate", "--prompt", PROMPT, "--max-tokens", "5", "--json", *options)
    assert status == 0
    # Without lookahead no replay runs for nothing.
    assert json.loads(out)["replays"] == {"prefill/16": 1, "decode/1/fast": 4}


def test_token_buckets_and_their_cut_are_flags(
    cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--prefill-buckets", "8,32", "--prefill-cut", "0:32,64:8")
    prompt = ("--prompt", "f(x) = " * 20, "--max-tokens", "1", "--json")
    status, out, _ = cli("generate", *prompt, *sizes)
    document = json.loads(out)
    assert status == 0 and 64 < document["prompt_tokens"] <= 95
    rest = -(-(document["prompt_tokens"] - 64) // 8)
    assert document["replays"] == {"prefill/32": 2, "prefill/8": rest}
    for options, cut in (
        (sizes[:2], "32 from 0 on"),
        (sizes, "32 from 0 on, 8 from 64 on"),
        (("--max-prefill-ms-per-step", "2.5"), "measured at opening, within 2.5 ms"),
    ):
        status, out, _ = cli("info", "--json", *options)
        assert status == 0 and json.loads(out)["prefill_cut"] == cut
    for flag, wrong, must in (
        ("--prefill-buckets", "8,x", "'8,x' must be integers with commas between them"),
        ("--prefill-buckets", "", "'' must be integers"),
        ("--prefill-cut", "0:32,64", "'0:32,64' must be pairs of integers, a:b, with commas"),
        ("--prefill-cut", "0:", "'0:' must be pairs"),
        ("--prefill-cut", "0:\u0663", "must be pairs"),
        ("--max-prefill-ms-per-step", "soon", "invalid float value: 'soon'"),
    ):
        with pytest.raises(SystemExit):
            main(["info", flag, wrong])
        assert must in capsys.readouterr().err


# Speculation.


@pytest.mark.parametrize("mode", ["mtp:2", "ngram:3:2", "auto"])
def test_speculation_changes_no_token_and_is_summed_up(cli: Cli, mode: str) -> None:
    arguments = ("--prompt", PROMPT, "--max-tokens", "24", "--ignore-eos", "--json")
    status, out, _ = cli("generate", *arguments)
    plain = json.loads(out)
    assert status == 0 and plain["acceptance"]["steps"] == 0
    status, out, err = cli("generate", *arguments, "--speculative", mode)
    assert status == 0 and err == ""
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["token_ids"] == plain["token_ids"]
    acceptance = document["acceptance"]
    # The first token comes with the prompt.
    assert acceptance["tokens"] == 23 and 1 <= acceptance["steps"] <= 23
    assert 0 < document["itl_p50_ms"] <= document["itl_p99_ms"], "gaps are those between steps"
    assert any(re.fullmatch(r"decode/1/k\d/fast", name) for name in document["replays"])


def test_the_summary_says_what_became_of_the_drafts(cli: Cli) -> None:
    arguments = ("--prompt", PROMPT, "--max-tokens", "24", "--ignore-eos")
    vocabulary = ("--draft-vocab", f"{Path(__file__)}:512")
    status, out, err = cli("generate", *arguments, "--speculative", "mtp:2", *vocabulary)
    assert status == 0 and "speculation" not in out
    shown = r"speculation: [\d.]+ tokens a step \(.* of 2.00 drafts; .* by position\) in \d+ steps"
    # A request's last steps may verify fewer.
    assert re.search(shown.replace("2.00", r"[\d.]+"), err), err
    status, _, err = cli("generate", *arguments, "--speculative", "off")
    assert status == 0 and "speculation" not in err


def test_max_live_leaves_larger_buckets_without_drafts(cli: Cli) -> None:
    arguments = ("--speculative", "mtp:3", "--max-batch", "64", "--max-live", "16", "--json")
    status, out, err = cli("info", *arguments)
    assert status == 0 and err == ""
    facts = json.loads(out)
    sizes = facts["decode_buckets"]
    drafting = [size for size in sizes if size <= 16]
    assert 16 in drafting and sizes[-1] == 64
    # k=3 in these and k=0 in all, each with two samplers.
    assert facts["graphs"] == 1 + 2 * (len(drafting) + len(sizes) + len(facts["prefill_buckets"]))


# chat


def test_chat_needs_a_template(cli: Cli, edited: Callable[..., Path]) -> None:
    path = str(edited(checkpoint_path(), tokenizer_config={"chat_template": None}))
    assert_error(cli("chat", "--checkpoint", path), f"{path} has no chat template")


def test_the_template_of_a_chat_sees_variables(
    cli: Cli,
    edited: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(monkeypatch, "def f(\n")
    template = "{{ messages[0].content }}{{ [thinking, effort, note] | tojson }}"
    path = edited(checkpoint_path(), tokenizer_config={"chat_template": template})
    given = ("thinking=false", "effort=low", 'note=["a=b"]')
    options = [part for each in given for part in ("--template-variable", each)]
    status, out, _ = cli("chat", "--checkpoint", str(path), *options, "--max-tokens", "1", "--json")
    assert status == 0
    said = Tokenizer.from_directory(path).decode(json.loads(out)["prompt_token_ids"])
    assert said == 'def f([false, "low", ["a=b"]]'
    with pytest.raises(SystemExit):
        cli("chat", "--template-variable", "=3")
    assert "--template-variable: '=3' must be NAME=VALUE" in capsys.readouterr().err
    # As text it would be true.
    with pytest.raises(SystemExit):
        cli("chat", "--template-variable", "thinking=False")
    assert "'thinking=False': JSON has false, null and true" in capsys.readouterr().err


def test_chat_needs_a_tokenizer(cli: Cli, checkpoints: dict[str, Any]) -> None:
    path = str(checkpoints["qwen3-biases"].path)
    assert_error(cli("chat", "--checkpoint", path), "has no chat template")


@pytest.mark.parametrize("system", [None, "You write Python."])
def test_chat_remembers_what_was_said(
    cli: Cli, chat_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, system: str | None
) -> None:
    say(monkeypatch, "a function\nanother one\n")
    options = ("--checkpoint", str(chat_checkpoint), "--max-tokens", "12")
    options += () if system is None else ("--system", system)
    status, out, _ = cli("chat", *options, "--json")
    assert status == 0
    first, second = (json.loads(line) for line in out.splitlines())
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": "a function"})
    assert first["text"] == greedy_text(messages, chat_checkpoint)
    messages.append({"role": "assistant", "content": first["text"]})
    messages.append({"role": "user", "content": "another one"})
    assert second["text"] == greedy_text(messages, chat_checkpoint)
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["new_tokens"]
    # The session keeps whole blocks of what the template left as it was.
    assert first["cached_tokens"] == 0 and second["cached_tokens"] % 16 == 0

    say(monkeypatch, "a function\nanother one\n")
    status, out, _ = cli("chat", *options)
    assert status == 0
    assert first["text"] in out and second["text"] in out
    assert out.count("> ") >= 2


def test_each_turn_reports_its_own_buckets(
    cli: Cli, chat_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "one\ntwo\nthree\n")
    options = ("--checkpoint", str(chat_checkpoint), "--max-tokens", "6", "--json")
    status, out, _ = cli("chat", *options)
    assert status == 0
    for line in out.splitlines():
        replays = json.loads(line)["replays"]["decode/1/fast"]
        assert 5 <= replays <= 7, "five after the prefill, one or two ahead of the end"


def test_a_chat_that_outgrows_the_engine_says_so(
    cli: Cli, chat_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "word " * 200 + "\n")
    status, _, err = cli("chat", "--checkpoint", str(chat_checkpoint))
    assert status == 2
    assert re.search(r"graphengine: error: .*\d+ tokens .*max_seq_len=96", err)


# info


@pytest.fixture
def nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        pytest.fail("`info` only plans")

    monkeypatch.setattr(Engine, "__init__", forbidden)
    monkeypatch.setattr(Engine, "from_pretrained", forbidden)
    monkeypatch.setattr(Checkpoint, "load", forbidden)
    monkeypatch.setattr("graphengine.core.runtime.capture_all", forbidden)


def demo_parameters() -> int:
    """Values of the demo's tensors, its draft module aside."""
    tensors = Checkpoint.open(checkpoint_path()).tensors.items()
    return sum(math.prod(info.shape) for name, info in tensors if not name.startswith("mtp."))


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_shows_the_parameters_that_a_token_meets(
    expert_checkpoints: dict[str, Any], cli: Cli
) -> None:
    oracle = expert_checkpoints["moe-every-layer"]
    status, out, _ = cli("info", "--json", "--checkpoint", str(oracle.path))
    assert status == 0
    document = json.loads(out)
    assert document["parameters"] == oracle.model.num_parameters()
    # Two of the five experts of each of 2 layers are another token's.
    idle = 2 * 2 * 3 * 33 * 48
    assert document["active_parameters"] == document["parameters"] - idle
    status, out, _ = cli("info", "--checkpoint", str(oracle.path))
    assert f"active parameters {document['active_parameters']:,}\n" in out


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_shows_what_would_be_captured(cli: Cli) -> None:
    status, out, err = cli("info", "--max-batch", "12")
    assert status == 0 and err == ""
    for name, value in {
        "architecture": "Qwen3ForCausalLM",
        "layers": "7",
        "parameters": f"{demo_parameters():,}",
        "vocabulary": "4096",
        "device": "cpu",
        "dtype": "float32",
        "max batch": "12",
        "max seq len": "96",
        "decode buckets": "1, 2, 4, 8, 12",
        "prefill buckets": "16, 64, 96",
        # Each bucket with both samplers.
        "graphs": "17",
    }.items():
        assert re.search(rf"^{name} +{value}$", out, re.MULTILINE), (name, out)
    for part in ("weights", "KV cache", "swap", "total"):
        assert part in out
    assert out.endswith(
        "KV takes 6.8 MiB per 1,000 tokens; the pool holds 1,152 tokens: 12 of 12 requests of "
        "max_seq_len 96\n"
    )


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_shows_what_the_checkpoint_recommends(cli: Cli, tmp_path: Path) -> None:
    assert re.search(r"^generation config none$", cli("info")[1], re.MULTILINE)
    path = tmp_path / "model"
    shutil.copytree(checkpoint_path(), path)
    told = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [0]}
    (path / "generation_config.json").write_text(json.dumps(told))
    status, out, _ = cli("info", "--checkpoint", str(path))
    assert status == 0 and re.search(r"^sampling defaults engine$", out, re.MULTILINE)
    assert re.search(r"^generation config temperature=0\.6, top_p=0\.9$", out, re.MULTILINE)
    options = ("--checkpoint", str(path), "--sampling-defaults", "checkpoint", "--json")
    document = json.loads(cli("info", *options)[1])
    assert document["sampling_defaults"] == "checkpoint"
    assert document["generation_config"] == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_fits_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    status, whole, _ = cli("info", "--max-batch", "64")
    # As for a terminal: a file keeps its lines.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    _, fitted, _ = cli("info", "--max-batch", "64")
    assert status == 0 and max(map(len, whole.splitlines())) > 60
    assert max(map(len, fitted.splitlines())) <= 60
    assert sorted(fitted.replace("-", "").split()) == sorted(whole.replace("-", "").split())
    assert re.search(r"^KV cache .*\d MiB\n  \S", fitted, re.MULTILINE), fitted


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_prints_json(cli: Cli) -> None:
    status, out, err = cli("info", "--json", "--dtype", "bfloat16")
    assert status == 0 and err == ""
    document = json.loads(out)
    assert document["architecture"] == "Qwen3ForCausalLM"
    assert document["decode_buckets"] == [1, 2] and document["prefill_buckets"] == [16, 64, 96]
    assert document["graphs"] == 11 and document["dtype"] == "bfloat16"
    assert all(line.keys() == {"name", "bytes", "where"} for line in document["budget"])
    tensors = Checkpoint.open(checkpoint_path()).tensors.items()
    weights = sum(info.nbytes for name, info in tensors if not name.startswith("mtp."))
    (line,) = (line for line in document["budget"] if line["name"] == "weights")
    assert line["bytes"] == weights and line["where"] == "host"
    (cache,) = (line for line in document["budget"] if line["name"].startswith("KV cache"))
    # 12 blocks of 16 tokens, and the dummy.
    assert document["kv_tokens"] == 2 * 96 and document["kv_requests"] == 2
    assert document["kv_ring_bytes_per_slot"] == 0
    assert document["kv_bytes_per_1000_tokens"] == 1000 * cache["bytes"] // (13 * 16)
    short = ("info", "--json", "--kv-dtype", "fp8")
    document = json.loads(cli(*short)[1])
    assert document["kv_bytes_per_1000_tokens"] == 1000 * cache["bytes"] // (2 * 13 * 16)


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_shows_what_prefill_rounds(cli: Cli) -> None:
    flags = ("info", "--json", "--quantize", "fp8")
    assert json.loads(cli(*flags)[1])["activations"] is None
    assert json.loads(cli(*flags, "--activations", "fp8")[1])["activations"] == "fp8"
    status, _, err = cli("info", "--activations", "fp8")
    assert status == 2 and "those of this Qwen3ForCausalLM are in float32" in err


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_shows_what_each_stage_would_hold(cli: Cli) -> None:
    whole, cut = (
        json.loads(cli("info", "--json", "--pipeline-parallel", stages)[1]) for stages in ("1", "3")
    )
    for name in ("layers", "parameters", "kv_bytes_per_1000_tokens", "kv_tokens"):
        assert cut[name] == whole[name], name
    assert (whole["pipeline_parallel"], cut["pipeline_parallel"]) == (1, 3)
    assert "budgets" not in whole and "budget" not in cut and len(cut["budgets"]) == 3
    (weights,) = (line["bytes"] for line in whole["budget"] if line["name"] == "weights")
    for budget in cut["budgets"]:
        (part,) = (line["bytes"] for line in budget if line["name"] == "weights")
        assert part < 0.5 * weights
    status, out, _ = cli("info", "--pipeline-parallel", "3")
    assert status == 0 and re.findall(r"^stage \d$", out, re.MULTILINE) == [
        "stage 0", "stage 1", "stage 2"
    ]  # fmt: skip


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_counts_the_drafter(cli: Cli) -> None:
    plain, mtp = (
        json.loads(cli("info", "--json", "--speculative", mode)[1]) for mode in ("off", "mtp:3")
    )
    assert (plain["speculative"], plain["draft_lengths"]) == ("off", [0])
    assert (mtp["speculative"], mtp["draft_lengths"]) == ("mtp eagle, k=3", [0, 3])
    # Two decode buckets with two samplers, of each draft length.
    assert mtp["graphs"] - plain["graphs"] == 4
    tensors = Checkpoint.open(checkpoint_path()).tensors.items()
    module = sum(info.nbytes for name, info in tensors if name.startswith("mtp."))
    (line,) = (line for line in mtp["budget"] if line["name"] == "drafter's weights")
    # Stored in bfloat16; a CPU computes in float32.
    assert line["bytes"] == 2 * module
    status, out, _ = cli("info", "--speculative", "mtp:3")
    assert status == 0 and re.search(r"^draft lengths +0, 3$", out, re.MULTILINE)


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_counts_what_a_calibration_takes(cli: Cli, checkpoints: dict[str, Any]) -> None:
    fp8 = ("--kv-dtype", "fp8", "--kv-calibration")
    status, out, _ = cli("info", *fp8, PROMPT)
    tokens = f"calibration (KV of {prompt_len()} tokens in float32, beyond the caches)"
    assert status == 0 and tokens in out
    path = str(checkpoints["llama-biases"].path)
    assert_error(cli("info", "--checkpoint", path, *fp8, "x"), "has no tokenizer.json: give token")
    assert_error(cli("info", *fp8, "x = 1\n" * 99), r"tokens: max_seq_len=96 has room for 95 and a")


@pytest.mark.usefixtures("nothing_is_captured")
def test_info_needs_no_tokenizer(cli: Cli, checkpoints: dict[str, Any]) -> None:
    path = str(checkpoints["llama-biases"].path)
    status, out, _ = cli("info", "--checkpoint", path, "--json")
    assert status == 0 and json.loads(out)["architecture"] == "LlamaForCausalLM"


# Errors.


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("--checkpoint", "/absent/checkpoint"), "/absent/checkpoint"),
        (("--checkpoint", "graphengine/no-such-model"), "graphengine/no-such-model.*hub"),
        (("--max-seq-len", "2049"), "max_seq_len=2049 .*2048"),
        (("--max-batch", "0"), "max_batch=0"),
        (("--block-size", "12"), "block_size=12"),
        (("--lookahead", "3"), "lookahead=3"),
        (("--dtype", "int3"), "dtype=int3"),
        (("--checkpoint", "~no-such-user/x"), "path '~no-such-user/x': .*home directory"),
        (("--memory-fraction", "1e-9"), "(?s)available.*KV cache.*total"),
        (("--speculative", "mtp:x"), r"speculative='mtp:x' must be off, auto, mtp\[:K"),
        (("--speculative", "mtp:0"), "k=0 drafts"),
        (("--speculative", "mtp:14", "--max-batch", "8"), "feed 120 tokens a step"),
        (("--max-live", "3"), "gate is for an engine with drafts, not speculative=None"),
        (("--speculative", "mtp", "--max-live", "0"), "max_live=0 must be an integer in"),
        (("--speculative", "mtp", "--draft-vocab", "512"), "must be TEXT:SIZE"),
        (("--speculative", "ngram", "--draft-vocab", "x.txt:512"), "a draft vocabulary is for mtp"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "info"])
def test_errors_are_one_message(
    cli: Cli, command: str, arguments: tuple[str, ...], pattern: str
) -> None:
    prompt = ("--prompt", PROMPT) if command == "generate" else ()
    assert_error(cli(command, *prompt, *arguments), pattern)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("--prompt", ""), "prompt is empty"),
        (("--prompt", "x = 1\n" * 60), r"max_seq_len=96"),
        (("--prompt", PROMPT, "--temperature", "nan"), "temperature=nan"),
        (("--prompt", PROMPT, "--temperature", "-1"), "temperature=-1"),
        (("--prompt", PROMPT, "--top-p", "1.5"), r"top_p=1.5 .*\[0, 1\]"),
        (("--prompt", PROMPT, "--max-tokens", "0"), "max_tokens=0"),
        (("--prompt", PROMPT, "--stop", ""), "stop="),
        (("--prompt", PROMPT, "--seed", "-1"), "seed=-1"),
        (("--prompt", PROMPT, "--logprobs", "21"), r"logprobs=21 .*\[0, 20\]"),
        (("--prompt", PROMPT, "--presence-penalty", "3"), r"presence_penalty=3.0 .*\[-2, 2\]"),
        (("--prompt", PROMPT, "--logit-bias", "9999=1"), "9999 is outside the vocabulary"),
        (("--prompt", PROMPT, "--bad-word", ""), "bad_words="),
        (("--prompt", PROMPT, "--relaxed-acceptance", "1:2"), "relaxed_acceptance is for an eng"),
    ],
)
def test_requests_that_cannot_be_served_are_errors(
    cli: Cli, arguments: tuple[str, ...], pattern: str
) -> None:
    assert_error(cli("generate", *arguments), pattern)
    assert_error(cli("generate", *arguments, "--json"), pattern)


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["generate"], ["generate", "--prompt", "a", "--top-k", "x"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    # The error is seen below a usage of a few lines.
    assert "usage: graphengine" in said and len(said.splitlines()) <= 3


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["generate", "--promt", "x"], "unrecognized argument --promt: did you mean --prompt?"),
        (["chat", "--temprature=1"], "unrecognized argument --temprature: did you mean --temp"),
        (["info", "a b"], "unrecognized argument a b: did you mean --checkpoint 'a b'?\n"),
        (
            ["ops", "demo", "--json"],
            "unrecognized argument demo: did you mean --checkpoint demo or --shape demo?\n",
        ),
        (["bench", "x"], "unrecognized argument x: did you mean --checkpoint x or --shape x?\n"),
        (["doctor", "x"], "unrecognized argument x\n"),
        (["info", "--nothing-like-it"], "unrecognized argument --nothing-like-it\n"),
    ],
)
def test_an_option_that_does_not_exist_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before one that is missing, which it may stand for."""
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"error: {said}" in capsys.readouterr().err


def test_a_missing_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr("graphengine.cli.main.import_module", missing)
    for arguments in (["generate", "--prompt", "x"], ["bench"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err == (
            "graphengine: error: No module named 'torch': `graphengine doctor` tells what is "
            "missing\n"
        )


def test_an_interrupt_is_no_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)
    status, _, err = cli("generate", "--prompt", PROMPT)
    assert status == 130 and "Traceback" not in err


def test_an_interrupt_ends_the_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell's prompt does not stick to the text."""

    def interrupted(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(text="a be", request=None)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)
    assert cli("generate", "--prompt", PROMPT)[:2] == (130, "a be\n")
    assert cli("generate", "--prompt", PROMPT, "--json")[:2] == (130, "")


# Help.


def shown_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> str:
    """What a command prints for these on a terminal of 60 columns."""
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "chat", "info", "graph dump"])
def test_help_is_a_screenful_and_all_of_it_has_every_flag(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, whole = (
        shown_help(capsys, monkeypatch, *command.split(), flag) for flag in ("--help", "--help-all")
    )
    assert len(short.splitlines()) < 60 and "more options, and more about these" in short
    for flag in ("--checkpoint", "--device", "--max-batch", "--speculative", "--help-all"):
        assert f"  {flag}" in short, flag
    tables = [EngineConfig, SamplingParams] if command == "generate" else [EngineConfig]
    flags = [each for table in tables for each in flag_facts(table)]
    assert len(whole.splitlines()) > 3 * len(flags)
    for flag in flags:
        assert (f"  --{flag.flag}" in short) == flag.common, flag.flag
        assert f"  --{flag.flag}" in whole, flag.flag
        # No word is broken, nor a flag at its hyphens.
        assert {*flag.help.split()} <= {*whole.split()}
    for line in short.splitlines():
        assert len(line) <= 60, line


# As users start it.


def test_help_and_errors_of_arguments_do_not_wait_for_torch() -> None:
    calls = [
        ["--version"], ["--help"], ["nothing"], ["generate"], ["generate", "--help-all"],
        ["generate", "--prompt", "x", "--top-k", "x"], ["chat", "--buckets", "1,x"],
        ["info", "--quantize", "int3"], ["graph", "dump"], ["graph", "diff", "--help"],
        ["quantize", "in"], ["doctor", "--help"], ["ops", "--help"],
        *([name, "--help"] for name in COMMANDS_ABOVE), ["bench", "--runs", "x"], ["tune"],
    ]  # fmt: skip
    code = f"""
import sys
from graphengine.cli.main import COMMANDS_ABOVE, main
for arguments in {calls!r}:
    try:
        main(arguments)
    except SystemExit:
        print("imported", *({{"torch", "numpy", "triton"}} & {{*sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("imported")]
    assert said == ["imported"] * len(calls)


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    """From any folder, without a checkout in the way; JSON alone on stdout, the log on stderr."""
    command = [sys.executable, "-P", "-m", "graphengine", "generate", "--device", "cpu", *SMALL]
    command += ["--prompt", PROMPT, "--max-tokens", "12", "--json", "--verbose"]
    command += ["--temperature", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.keys() == SUMMARY_KEYS | RESULT_KEYS
    assert document["text"] == greedy_text(PROMPT, checkpoint_path()), "the demo is the default"
    assert "KV cache" in done.stderr and "decode/2/full" in done.stderr


# Grammars.


def test_text_of_a_grammar(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text('{"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], '
                      '"additionalProperties": false}')  # fmt: skip
    grammar.write_text('start: "[" /[a-z]{2}/ "]"')
    for arguments, pattern in (
        (("--json-schema", str(schema), "--no-whitespace"), r'\{"a":7\}'),
        (("--regex", "[0-9]{3}x", "--speculative", "ngram:2"), "[0-9]{3}x"),
        (("--choice", "yes,no,not at all"), "yes|no|not at all"),
        (("--grammar", str(grammar)), r"\[[a-z]{2}\]"),
    ):
        status, out, _ = cli("generate", "--prompt", PROMPT, "--json", *arguments)
        result = json.loads(out)
        assert status == 0 and result["finish_reason"] == "stop"
        assert re.fullmatch(pattern, result["text"]), result["text"]


def test_what_is_no_grammar(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    assert_error(cli("generate", "--prompt", "x", "--regex", "a["), "regex='a\\[' cannot be served")
    assert_error(cli("generate", "--prompt", "x", "--no-whitespace"), "is for --json-schema")
    missing = str(tmp_path / "none.json")
    assert_error(cli("generate", "--prompt", "x", "--json-schema", missing), "No such file")
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"title": "\xe9"}')
    said = rf"--json-schema {re.escape(str(latin))}: .*can't decode byte 0xe9"
    assert_error(cli("generate", "--prompt", "x", "--json-schema", str(latin)), said)
    with pytest.raises(SystemExit):
        cli("generate", "--prompt", "x", "--regex", "a", "--choice", "a,b")
