"""`graphengine bench`: its JSON, its tables, its errors, and the page made from its results."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch

from graphengine import EngineConfig
from graphengine.cli import main as cli
from graphengine.cli.parser import CommandParser
from graphengine.kernels.linear.plans import RowFamily
from graphengine.options.devices import DTYPES
from graphengine.profiles import bench, flags
from graphengine.profiles.benchmark import options as bench_options
from graphengine.profiles.benchmark.floor.ceiling import ReadCeiling
from graphengine.profiles.benchmark.options import read_options
from graphengine.profiles.benchmark.peers import PEERS
from graphengine.profiles.benchmark.shapes import model_shape, step_bytes
from graphengine.profiles.flags import acceptance as flags_of_acceptance
from graphengine.profiles.flags import bench as flags_of_bench
from graphengine.profiles.progress import Progress
from graphengine.profiles.tables import pages as table
from graphengine.profiles.tables import text
from graphengine.profiles.tables.summary import FIGURES
from timelines.small_bench import Bench, bench_command

ROW_KEYS = {
    "live", "max_batch", "sampler", "prompt_tokens", "new_tokens", "runs", "ms_per_step",
    "tokens_per_step", "tokens_per_s", "itl_ms", "itl_admission_ms", "checked", "step_bytes",
    "experts_read", "floor_ms", "share", "ttft_ms", "host", "long_plain", "long", "record",
    "start", "engine", "speculation", "ranks", "lone_rank", "waited_us", "collectives",
}  # fmt: skip
ENVIRONMENT_KEYS = {
    "device", "driver", "cuda", "torch", "triton", "python", "threads", "commit",
    "uncommitted_changes", "date",
}  # fmt: skip

LONG_PLAIN = "| tiny | 1 | 10,200 | events | frozen | 0 / 0 / 0 | - / - / - | 1.050 | 0.900 | 1 |"
LONG = "| tiny | 1 | 10,200 | 16 cyclic | frozen | 250 / 23 / 0 | 0.120 / 0.840 / - | 1.250 | 0.900"


@pytest.fixture
def run_bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    return bench_command(capsys)


def test_the_document_holds_what_was_measured_and_on_what(run_bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    options = ("--long", "20", "--admission", "40", "--kernels", "--ttft-tokens", "5,600")
    status, printed, _ = run_bench("--shape", "tiny", "--batch", "1,3", *options, "--out", str(out))
    assert status == 0
    document = json.loads(out.read_text())
    assert document["schema"] == bench.SCHEMA
    assert document["environment"].keys() == ENVIRONMENT_KEYS
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", document["environment"]["date"])
    assert (document["shape"], document["config"]["hidden_size"]) == ("tiny", 64)
    assert document["random_weights"] and document["ceiling"] is None

    # The last is one live row in an engine of the default sizes.
    rows = document["rows"]
    assert [(row["live"], row["max_batch"]) for row in rows] == [(1, 1), (3, 3), (1, 8)]
    for name, kept in (("long_plain", 0), ("long", 16)):
        assert [row[name] is None for row in rows] == [False, True, True], name
        assert rows[0][name]["kept_objects"] == kept
    first, second = re.findall(r"gaps of \d+ requests, (.*), slots 1, collector on", printed)
    assert (first, second) == ("events kept", "16 containers a token kept in reference cycles")
    for row in rows:
        assert row.keys() == ROW_KEYS
        assert row["ms_per_step"] > 0 and row["step_bytes"] > 0
        assert row["experts_read"] is None, "a dense model has none"
        itl = row["itl_ms"]
        assert 0 < itl["p50"] <= itl["p90"] <= itl["p99"] <= itl["p99.9"] <= itl["max"]
        assert itl["unsupported"] == ["p99", "p99.9"]
        # A prompt of 600 tokens is more than the model can hold.
        assert row["ttft_ms"].keys() == {"5"}
        for name in ("floor_ms", "share", "host"):
            assert row[name] is None, name
        assert row["start"]["capture_s"] is None and row["start"]["total_s"] > 0
        assert row["engine"]["dtype"] == "float32"

    # The whole first run of the admission, and of each row what it was told to check.
    checked = document["admission"]["checked"]
    assert document["admission"]["decoding"] == 7 and checked["equal_runs"] == 3
    assert checked["eager_tokens"] == checked["tokens"] >= 7 * 8 + 2
    assert [row["checked"]["eager_tokens"] for row in rows] == [14, 42, 14]
    assert [row["checked"]["first_tokens"] for row in rows] == [{"5": 4}] * 3
    assert "Tokens checked: 14 of 14 by eager steps, 4 after 5 prompt tokens; all" in printed
    assert "heuristic plans" not in printed
    titles = next(line for line in printed.splitlines() if "ms/step" in line)
    assert "share   TTFT 5  ITL p50" in titles, "a column for each length that was measured"
    assert [entry["kernels"] for entry in document["kernels"]] == [None, None]
    (prefill,) = document["prefill_kernels"]
    assert (prefill["prompt_tokens"], prefill["chunk_tokens"], prefill["kernels"]) == (5, 5, None)
    assert "kernels of a prompt of 5 tokens: none on this device" in printed
    document["prefill_kernels"] = [prefill | {"prompt_tokens": 2053}]
    shown = text.describe_document(document)
    assert "kernels of the last chunk, 5 tokens, of a prompt of 2053: none" in shown
    assert document["peers"] == {}
    assert "tiny, float32, on" in printed and "7 requests decode, a prompt of 40" in printed
    assert "* too few values for this percentile" in printed


def test_the_kind_of_kv_is_an_option(run_bench: Bench) -> None:
    sizes = ("--batch", "1", "--max-seq-len", "32", "--ttft-tokens", "5", "--runs", "1")
    read = []
    for kind in ("auto", "fp8"):
        status, printed, _ = run_bench("--shape", "tiny", *sizes, "--kv-dtype", kind, "--json")
        assert status == 0
        (row,) = json.loads(printed)["rows"]
        read.append((row["engine"]["kv_dtype"], row["step_bytes"]))
    assert [kind for kind, _ in read] == ["float32", "float8_e4m3fn"]
    # 9 tokens and half of 14: keys and values of 2 layers, 2 heads of 64, a byte for four.
    assert read[0][1] - read[1][1] == 2 * 2 * 2 * 64 * 16 * 3


def test_the_floor_counts_the_experts_that_are_read(run_bench: Bench) -> None:
    sizes = ("--batch", "1,3", "--max-seq-len", "48", "--ttft-tokens", "5", "--runs", "1")
    status, printed, _ = run_bench("--shape", "tiny-moe", *sizes, "--json")
    assert status == 0
    one, three = json.loads(printed)["rows"]
    assert one["experts_read"] == 2, "those that a token chooses"
    # Rows share some, though not in every layer of every step.
    assert 2 < three["experts_read"] < 6
    model = model_shape("tiny-moe")
    for row in (one, three):
        read = step_bytes(
            model,
            context=row["prompt_tokens"] + row["new_tokens"] / 2,
            rows=row["live"],
            dtype=torch.float32,
            experts=row["experts_read"],
        )
        # The figure is rounded to 4 digits: of 2 layers' experts of 3 * 32 * 64 values.
        assert row["step_bytes"] == pytest.approx(read, abs=2 * 3 * 32 * 64 * 4 * 1e-4)


@pytest.mark.gpu
def test_a_gpu_fills_the_cells_of_contexts(run_bench: Bench) -> None:
    """And reads the KV that a kernel is said to read at each of them."""
    options = ("--batch", "1,3", "--context", "40,300", "--new-tokens", "40", "--kernels")
    arguments = ("--ttft-tokens", "5", "--speculative", "mtp:2", "--device", "cuda", "--json")
    status, printed, _ = run_bench("--shape", "tiny", *options, *arguments)
    assert status == 0
    document = json.loads(printed)
    cells = document["contexts"]["cells"]
    assert len(cells) == 4 and document["contexts"]["first_tokens"]["ttft_ms"]["5"] > 0
    for cell in cells:
        assert cell["tb_s"] > 0 and len(cell["speculation"]) == 1
        # A share of less than half a percent, as on a busy machine, is rounded to 0.
        assert cell["floor_ms"] > 0
        assert cell["share"] == pytest.approx(cell["floor_ms"] / cell["ms_per_step"], abs=5e-3)
    for found in document["kernels"]:
        (attention,) = [time for time in found["kernels"] if time["part"] == "KV"]
        # Two layers of two heads of 64 in bfloat16; a row grows while it is traced.
        tokens = attention["read_bytes"] / (2 * 2 * 64 * 2) / found["live"]
        assert found["context"] < tokens < found["context"] + 40
        assert attention["count"] == 2


@pytest.mark.gpu
def test_a_gpu_fills_every_field(run_bench: Bench) -> None:
    options = ("--batch", "1,3", "--kernels", "--admission", "40", "--ttft-tokens", "5", "--json")
    status, printed, _ = run_bench("--shape", "tiny", *options, "--device", "cuda")
    assert status == 0
    document = json.loads(printed)
    assert document["ceiling"]["tb_s"] > 0.05 and document["environment"]["cuda"]
    for row in document["rows"]:
        assert row["engine"]["dtype"] == "bfloat16"
        # The floor of so small a model is a few of the digits that it is rounded to.
        assert 0 < row["share"] == pytest.approx(row["floor_ms"] / row["ms_per_step"], abs=5e-3)
        assert min(row["host"].values()) >= 0 and row["host"]["host_us"] > 0
        start = row["start"]
        assert start["capture_s"] > 0 and start["pool_mib"] > 0 and start["graphs_mib"] >= 0
        assert start["capture_mib"] == pytest.approx(start["pool_mib"] + start["graphs_mib"])
        assert start["compile_s"] > 0 and min(start["compiled"], start["loaded"]) >= 0
    for name in ("kernels", "prefill_kernels"):
        assert document[name] and all(entry["kernels"] for entry in document[name])


def test_what_is_done_is_told_and_the_table_printed_once(run_bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ("--shape", "tiny", "--batch", "3", "--ttft-tokens", "5", "--out", str(out))
    status, printed, told = run_bench(*arguments)
    (row,) = json.loads(out.read_text())["rows"]
    assert status == 0 and told.splitlines() == [
        "tiny, max_batch=3: opening the engine ...",
        "tiny, max_batch=3: measuring ...",
        "3 live of 3: checking tokens by eager steps ...",
        "3 live of 3: warming up ...",
        "3 live of 3: run 1 of 2 ...",
        "3 live of 3: run 2 of 2 ...",
        "3 live of 3: first tokens ...",
        f"3 live of 3: {row['ms_per_step']} ms/step",
        f"wrote {out}",
    ]
    assert printed.count("ITL p50") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    progress = Progress(terminal)
    progress.doing("something that is long")
    progress.done("it took 3 ms")
    progress.end()
    clear = "\r\x1b[K"
    assert terminal.getvalue() == f"{clear}something that is l{clear}it took 3 ms\n{clear}"


def test_json_alone_is_printed_when_asked_for(run_bench: Bench) -> None:
    arguments = ("--shape", "tiny", "--batch", "2", "--max-batch", "4", "--sampler", "full")
    status, printed, errors = run_bench(*arguments, "--ttft-tokens", "5", "--json")
    assert status == 0 and errors == ""
    (row,) = json.loads(printed)["rows"]
    assert (row["live"], row["max_batch"], row["sampler"]) == (2, 4, "full")


def test_first_tokens_are_timed_in_the_engines_that_hold_the_prompt(
    run_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine of the default sizes may be too short for a long prompt."""

    def limit(config: EngineConfig, most: int) -> int:
        return config.max_seq_len or 64

    monkeypatch.setattr(EngineConfig, "sequence_limit", limit)
    arguments = ("--batch", "1", "--runs", "1", "--ttft-tokens", "5,70", "--json")
    status, printed, _ = run_bench("--shape", "tiny", *arguments)
    assert status == 0
    found = [
        (row["engine"]["max_seq_len"], [*row["ttft_ms"]]) for row in json.loads(printed)["rows"]
    ]
    assert found == [(74, ["5", "70"]), (64, ["5"])]


def test_a_checkpoint_is_measured(run_bench: Bench) -> None:
    """The demo is the default shape, and a folder may be given in its place."""
    arguments = ("--batch", "2", "--ttft-tokens", "5", "--json")
    status, printed, _ = run_bench(*arguments)
    assert status == 0
    document = json.loads(printed)
    assert document["shape"] == "demo" and not document["random_weights"]
    assert document["rows"][0]["engine"]["architecture"] == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "llama-2b"), "unknown shape 'llama-2b'; known: llama-1b, llama-8b"),
        (("--shape", "tiny", "--checkpoint", "x"), "give one"),
        (("--checkpoint", "no/such/folder/here"), "no/such/folder/here"),
        (("--shape", "tiny", "--batch", "1,,2"), "batch='1,,2' must be positive integers"),
        (("--shape", "tiny", "--batch", "0"), "batch='0' must be positive integers"),
        (("--shape", "tiny", "--batch", "4", "--max-batch", "2"), "less than a batch of 4"),
        (("--shape", "tiny", "--batch", "1,65"), "max_batch=65 must be in [1, 64]"),
        (("--shape", "tiny", "--batch", "2", "--max-batch", "65"), "max_batch=65 must be in"),
        (("--shape", "tiny", "--batch", "1,4", "--row-family", "fma"), "not the 4 of max_batch=4"),
        (("--shape", "tiny", "--runs", "0"), "runs=0 must be at least 1"),
        (("--shape", "tiny", "--prompt-tokens", "0"), "prompt_tokens=0 must be at least 1"),
        (("--shape", "tiny", "--new-tokens", "0"), "new_tokens=0: a steady step needs"),
        (("--shape", "tiny", "--new-tokens", "2"), "new_tokens=2"),
        (
            ("--shape", "tiny", "--max-prefill-tokens-per-step", "0"),
            "max_prefill_tokens_per_step=0 must be at least 1",
        ),
        (("--shape", "tiny", "--max-seq-len", "0"), "max_seq_len=0 must be at least 2"),
        (("--shape", "tiny", "--max-seq-len", "513"), "513 exceeds the 512 positions"),
        (
            ("--shape", "tiny", "--admission", "511"),
            "--admission 511: that prompt with 2 new tokens, and 23 tokens of each other "
            "request, must fit into max_seq_len=512",
        ),
        (
            ("--shape", "tiny", "--admission", "40", "--max-seq-len", "41"),
            "must fit into max_seq_len=41",
        ),
        (
            ("--shape", "tiny", "--batch", "1", "--row-family", "fma", "--admission", "40"),
            "row_family='fma' serves up to 2 lanes a step, not the 8 of max_batch=8",
        ),
        (("--shape", "tiny", "--device", "foo"), "device='foo': must be 'cpu', 'cuda'"),
        (("--shape", "tiny", "--device", "cpu:x"), "device='cpu:x': must be 'cpu', 'cuda'"),
        (("--shape", "tiny", "--new-tokens", "900"), "900 new tokens exceed max_seq_len=512"),
        (("--shape", "tiny", "--max-seq-len", "22"), "14 new tokens exceed max_seq_len=22"),
        (("--shape", "tiny", "--peer", "llama.cpp"), "known: transformers, vllm"),
        (
            ("--shape", "tiny", "--peer", "transformers", "--sampler", "full"),
            "--peer transformers decodes greedily, not --sampler full",
        ),
        (("--shape", "tiny", "--long", "-1"), "--long -1"),
        (("--shape", "tiny", "--ttft-tokens", "x"), "ttft-tokens='x'"),
        (("--shape", "tiny", "--out", "no/such/folder/x.json"), "no such folder"),
        (("--shape", "tiny", "--out", "/"), "--out / is a folder: name a file in it"),
        # Nobody can make a file there, not even root.
        (("--shape", "tiny", "--out", "/proc/x.json"), "--out /proc/x.json cannot be written"),
    ],
)
def test_errors_say_what_is_wrong(
    run_bench: Bench,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And say it before anything is measured."""
    monkeypatch.setattr(bench, "measure_all", None)
    status, printed, errors = run_bench(*arguments)
    assert status == 2 and printed == ""
    assert errors.startswith("graphengine: error: ") and message in errors


@pytest.mark.parametrize(("available", "count"), [(False, 0), (True, 2)])
def test_a_gpu_that_is_not_there_is_an_error_at_once(
    run_bench: Bench, monkeypatch: pytest.MonkeyPatch, available: bool, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(bench, "measure_all", None)
    status, _, errors = run_bench("--shape", "tiny", "--device", "cuda:7")
    found = "2 CUDA devices" if available else "no CUDA device"
    assert status == 2 and f"device='cuda:7', but torch finds {found}" in errors


@pytest.mark.parametrize("before", [None, "what another run measured"])
def test_checking_out_leaves_the_file_as_it_is(
    run_bench: Bench, tmp_path: Path, before: str | None
) -> None:
    out = tmp_path / "bench.json"
    if before is not None:
        out.write_text(before)
    assert run_bench("--shape", "tiny", "--runs", "0", "--out", str(out))[0] == 2
    assert (out.read_text() if out.exists() else None) == before


def test_what_fails_late_takes_nothing_with_it(
    run_bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(bench_options, "require_peer", lambda name: None)
    monkeypatch.setattr(bench, "run_peer", fail)
    out = tmp_path / "bench.json"
    sizes = ("--shape", "tiny", "--batch", "2", "--ttft-tokens", "5")
    with pytest.raises(RuntimeError, match="out of luck"):
        run_bench(*sizes, "--peer", "vllm", "--out", str(out))
    document = json.loads(out.read_text())
    assert len(document["rows"]) == 1 and document["peers"] == {}


# The arrow of the design: graphengine/ does not depend on what lies above it.


def test_importing_the_command_line_imports_nothing_above_it() -> None:
    code = "import sys, graphengine.cli.main as c; c._parser('info')\nprint(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "graphengine.cli.main" in modules
    assert not [name for name in modules if name.startswith("graphengine.profiles")]


def test_one_line_names_the_folder_above() -> None:
    """It is a string that the layering test cannot see: so it may stand in one place only."""
    folder = Path(cli.__file__).resolve().parents[1]
    named = [
        f"{path.relative_to(folder)}: {node.value}"
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"\.*(graphengine)?\.?profiles[\w.]*", node.value)
    ]
    assert named == ["cli/main.py: graphengine.profiles"]


def test_commands_above_have_what_the_command_line_calls() -> None:
    for name in cli.COMMANDS_ABOVE:
        module = import_module(f"{cli.FOLDER_ABOVE}.{name}")
        module_flags = import_module(f"{cli.FOLDER_ABOVE}.flags.{name}")
        assert callable(module_flags.add_arguments) and callable(getattr(module, name))


def test_flags_name_what_the_commands_know() -> None:
    assert (*flags.DTYPE_NAMES,) == (*DTYPES,)
    assert (*flags.FAMILIES,) == get_args(RowFamily)
    assert (*PEERS,) == flags_of_bench.PEERS


@pytest.mark.parametrize("given", [[], ["--speculative", "ngram:2"], ["--record", "x.jsonl"]])
def test_on_a_cpu_bench_is_short_unless_told_otherwise(given: list[str]) -> None:
    parser = CommandParser()
    flags_of_bench.add_arguments(parser)
    short = read_options(parser.parse_args([*given, "--device", "cpu"]))
    assert [(work.live, work.new_tokens, work.runs) for work in short.works] == [(1, 32, 2)]
    assert short.ttft_tokens == (128,)
    asked = ["--batch", "2", "--new-tokens", "9", "--runs", "1", "--ttft-tokens", "5,6"]
    told = read_options(parser.parse_args([*given, "--device", "cpu", *asked]))
    assert [(work.live, work.new_tokens, work.runs) for work in told.works] == [(2, 9, 1)]
    assert told.ttft_tokens == (5, 6)


def test_help_lists_the_commands_above(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "bench" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["bench", "acceptance"])
def test_help_of_a_command_is_a_screenful(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main([command, flag])
        shown.append(capsys.readouterr().out)
    short, whole = shown
    assert len(short.splitlines()) <= 50 and "more options, and more about these" in short
    assert "  --out" in short and "  --dtype" in short and "  --row-family" not in short
    assert "  --row-family" in whole
    assert not re.search(r"\([^)]*\(default", short), "a default is whole"
    with pytest.raises(SystemExit):
        cli.main([command, "--nothing"])
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_table_is_as_wide_as_its_terminal() -> None:
    """Columns that do not fit follow below, with the first one again."""
    columns = [text.Column(f"c{i}", lambda row, i=i: str(row[f"c{i}"])) for i in range(7)]
    row = {f"c{i}": 100 + i for i in range(7)}
    assert len(text.text_table(columns, [row]).splitlines()) == 2
    narrow = text.text_table(columns, [row], width=40)
    assert max(map(len, narrow.splitlines())) <= 40
    blocks = [[line.split() for line in part.splitlines()] for part in narrow.split("\n\n")]
    assert [titles for titles, _ in blocks] == [["c0", "c1", "c2", "c3"], ["c0", "c4", "c5", "c6"]]
    assert [cells for _, cells in blocks] == [
        ["100", "101", "102", "103"],
        ["100", "104", "105", "106"],
    ]


# The page of numbers.


def test_the_page_shows_the_committed_results() -> None:
    """If it does not: `python -m graphengine.profiles.tables.pages`."""
    assert table.main(["--check"]) == 0


def test_the_page_begins_with_ten_figures_of_the_results() -> None:
    text = table.SUMMARY_PAGE.read_text("utf-8")
    head = text.partition("\n## ")[0]
    rows = [line.split(" | ") for line in head.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(FIGURES) == 10
    step = json.loads((table.RESULTS / "bench-llama-8b-2-gpus-h200.json").read_text())["rows"][0]
    assert ["2 x H200", f"{step['ms_per_step']:.3g} ms a step"] in [row[1:3] for row in rows]
    for row in rows:
        command = row[3].removesuffix(" |").strip("`").split()
        parser = CommandParser(exit_on_error=False)
        module = {"bench": flags_of_bench, "acceptance": flags_of_acceptance}[command[1]]
        module.add_arguments(parser)
        parser.parse_args(command[2:])


def test_the_table_is_made_from_every_result(run_bench: Bench, tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "numbers.md"
    results.mkdir()
    options = ("--batch", "1", "--long", "20", "--admission", "40", "--ttft-tokens", "5")
    options += ("--prefill-buckets", "8,32", "--max-prefill-ms-per-step", "1e9")
    out = ("--out", str(results / "bench-tiny.json"))
    status, printed, _ = run_bench("--shape", "tiny", *options, *out)
    assert status == 0
    document = json.loads((results / "bench-tiny.json").read_text())
    engine = document["admission"]["engine"]
    assert (engine["prefill_buckets"], engine["prefill_cut"]) == ([8, 32], [[0, 32]])
    assert re.search(r"\(undisturbed [\d.]+; -?[\d.]+ longer, 1e\+09 are allowed\)", printed)
    # What only a GPU has, and a peer.
    document["ceiling"] = {"tb_s": 4.4}
    document["rows"][0] |= {"share": 0.84, "floor_ms": 0.56, "host": {"host_us": 12.34}}
    document["rows"][0]["ttft_ms"] = {"128": 1.5, "1024": 4.25, "8192": 210.5}
    document["rows"][0]["ms_per_step"] = 0.66
    itl = document["rows"][0]["long"]["itl_ms"]
    found = {"p99.9/p50": 1.25, "itl_ms": itl | {"n": 10_200, "max": 0.9}}
    found |= {"collections": [250, 23, 0], "pauses_ms": [0.12, 0.84, None]}
    document["rows"][0]["long"] |= found
    found |= {"p99.9/p50": 1.05, "collections": [0, 0, 0], "pauses_ms": [None, None, None]}
    document["rows"][0]["long_plain"] |= found
    document["peers"] = {
        "vllm": {"version": "1", "rows": [{"live": 1, "ms_per_step": 1.457, "ratio": 2.208}]}
    }
    (results / "bench-tiny.json").write_text(json.dumps(document))
    page.write_text(f"before\n{table.BEGIN}\nstale\n{table.END}\nafter\n")
    arguments = ["--page", str(page), "--results", str(results)]
    assert table.main([*arguments, "--check"]) == 1
    assert "stale" in page.read_text()
    assert table.main(arguments) == 0
    assert table.main([*arguments, "--check"]) == 0

    shown = page.read_text()
    assert shown.startswith("before\n") and shown.endswith("after\n") and "stale" not in shown
    assert "| tiny | 1/1 | fast | fma | 0.660 | 84% | 1.50 | 4.25 |" in shown
    assert len(re.findall(r"\| tiny \| \d+/\d+ \|", shown)) == 2 and "| 12.3 | 1 |" in shown
    # What has a column needs no note.
    assert "a prompt of 128 tokens" not in shown and "a prompt of 1,024 tokens" not in shown
    assert "- tiny: TTFT after a prompt of 8,192 tokens is 210.50 ms (file 1)." in shown
    assert "- tiny, batch 1: vllm 1 takes 1.457 ms a step, 2.2 times as long (file 1)." in shown
    assert ", 4.40 TB/s, " in shown and "1. `profiles/results/bench-tiny.json`" in shown
    assert "decoding after 9 tokens each: admitting a prompt of 40 tokens" in shown
    assert " ms with `max_prefill_ms_per_step=1e+09`; its own first token takes " in shown
    assert ", at most 1e+09 ms of prefill a step" in shown
    for line in (LONG_PLAIN, LONG):
        assert line in shown
    # Each percentile that so few gaps do not support is marked, and not in italics.
    assert r"\*" in shown and not re.search(r"\d\*", shown)


def test_contexts_have_a_table_of_their_own(run_bench: Bench, tmp_path: Path) -> None:
    """With the engines that speculate, first tokens, and what was skipped."""
    options = ("--batch", "2", "--context", "8", "--ttft-tokens", "5", "--speculative", "mtp:1")
    out = tmp_path / "bench-tiny.json"
    assert run_bench("--shape", "tiny", *options, "--runs", "1", "--out", str(out))[0] == 0
    document = json.loads(out.read_text())
    (cell,) = document["contexts"]["cells"]
    cell |= {"context": 8192, "ms_per_step": 6.896, "share": 0.754, "p99.9/p50": 1.0149}
    cell["itl_ms"] |= {"p99": 7.125, "unsupported": []}
    cell["speculation"][0]["ratio"]["fastest"] = 1.375
    document["contexts"]["first_tokens"]["ttft_ms"] = {"32768": 1080.25}
    entry = {"live": 8, "context": 131072, "speculative": None, "reason": "65,600 KV blocks. Short"}
    document["contexts"]["skipped"] = [entry, entry | {"speculative": "mtp eagle, k=1"}]
    out.write_text(json.dumps(document))
    shown = table.markdown(tmp_path)
    figures = "6.896 | 75% | 7.125 | 1.015 | 1: 1.38 | 1 |"
    assert f"| tiny | 2 x 8,192 | float32 | 22 | {figures}" in shown
    for line in (
        "- tiny: TTFT after a prompt of 32,768 tokens is 1,080.25 ms (file 1).",
        "- tiny, 8 rows at a context of 131,072 tokens were not measured, because they do not fit",
        "131,072 tokens with mtp eagle, k=1 were not measured, because they do not fit: 65,600 KV",
        ", float32, contexts of random KV and 14 new tokens, 1 run.",
    ):
        assert line in shown


def test_the_committed_results_lack_no_figure_that_tables_need() -> None:
    """They are older than the pool's share of a capture, which is left out."""
    paths = sorted(table.RESULTS.glob("bench-*.json"))
    assert paths
    for path in paths:
        document = json.loads(path.read_text())
        shown = text.describe_document(document)
        assert document["shape"] in shown
        assert ("pool MiB" if document["rows"] else "KV GB") in shown
        assert not document["environment"]["uncommitted_changes"], path.name


def test_every_figure_names_its_file(tmp_path: Path) -> None:
    """Two files of one shape, as numbers of the list at the end; a note says so, too."""
    source = json.loads((table.RESULTS / "bench-llama-1b-h200.json").read_text())
    for name, milliseconds in (("bench-a.json", 0.111), ("bench-b.json", 0.222)):
        source["rows"] = [source["rows"][0] | {"ms_per_step": milliseconds}]
        (tmp_path / name).write_text(json.dumps(source))
    shown = table.markdown(tmp_path)
    assert re.search(r"\| 0\.111 \|.*\| 1 \|\n", shown)
    assert re.search(r"\| 0\.222 \|.*\| 2 \|\n", shown)
    assert re.search(r"\| 10,200 \| events \|.*\| 2 \|\n", shown)
    assert shown.index("\n1. `profiles/results/bench-a.json`") < shown.index("\n2. `profiles/")
    # What the files share is told once.
    assert shown.count("Device and versions of all of these: NVIDIA H200, driver ") == 1
    assert shown.count("NVIDIA H200") == 1
    source["environment"]["device"] = "NVIDIA H100 80GB HBM3"
    (tmp_path / "bench-b.json").write_text(json.dumps(source))
    apart = table.markdown(tmp_path)
    assert "of all of these" not in apart
    assert "bench-b.json`: NVIDIA H100 80GB HBM3, driver " in apart
    # In a row, and in those of thousands of tokens in a row.
    assert apart.count("| llama-1b H100 | 1/1 |") == 1
    assert apart.count("| llama-1b H100 |") == 3


@pytest.mark.parametrize(("first", "second"), [(4.0, 4.4), (4.4, 4.0)])
def test_shares_are_of_the_larger_read_ceiling(
    run_bench: Bench, monkeypatch: pytest.MonkeyPatch, first: float, second: float
) -> None:
    """It is measured in front of the rows and after them; a share of the lower would be larger."""
    rates = iter([first, second])

    def measured(device: str) -> ReadCeiling:
        return ReadCeiling(tb_s=next(rates), buffer_bytes=1, block=1, programs=1, warps=1)

    monkeypatch.setattr(bench, "measure_read_ceiling", measured)
    # So large a step that digits are left of its floor.
    monkeypatch.setattr(bench, "step_bytes", lambda *arguments, **options: 44 * 10**9)
    arguments = ("--shape", "tiny", "--batch", "2", "--ttft-tokens", "5", "--max-batch", "2")
    _, printed, _ = run_bench(*arguments, "--json")
    document = json.loads(printed)
    ceiling, (row,) = document["ceiling"], document["rows"]
    assert (ceiling["tb_s"], ceiling["tb_s_after"], ceiling["tb_s_of_shares"]) == (
        first, second, 4.4,
    )  # fmt: skip
    assert row["floor_ms"] == pytest.approx(10.0)
    assert row["share"] == pytest.approx(10.0 / row["ms_per_step"], rel=1e-3)
    both = f"{first:.2f} TB/s before the rows and {second:.2f} after, shares of the larger"
    assert f"read ceiling {both}" in text.describe_document(document)


def test_a_document_of_a_run_that_failed_has_the_first_ceiling() -> None:
    ceiling = {"tb_s": 4.25, "tb_s_after": None}
    assert text.read_ceiling(ceiling) == text.read_ceiling({"tb_s": 4.25}) == "4.25 TB/s"


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"device": "cuda:0", "qkv": "heuristic", "down": "heuristic"}, "all linears (dot)"),
        ({"device": "cuda:0", "qkv": "shipped", "down": "heuristic"}, "down (dot)"),
        ({"device": "cuda:0", "qkv": "user", "down": "shipped"}, ""),
        ({"device": "cpu", "qkv": "heuristic", "down": "heuristic"}, ""),
        ({"device": "cuda:0"}, ""),
    ],
)
def test_plans_that_nobody_measured_are_told(
    tmp_path: Path, engine: dict[str, str], told: str
) -> None:
    """Older results do not say where their plans came from."""
    document = json.loads((table.RESULTS / "bench-llama-1b-h200.json").read_text())
    described = {"device": engine.pop("device"), "row_family": "dot"}
    described |= {"plan_sources": engine} if engine else {}
    for row in document["rows"]:
        row["engine"] |= described
    (tmp_path / "bench-x.json").write_text(json.dumps(document))
    line = f"heuristic plans of {told}: `graphengine tune` measures them\n"
    assert text.heuristic_plans(document["rows"][0]) == told
    assert (line in text.describe_document(document)) == bool(told)
    shown = table.markdown(tmp_path)
    assert shown.endswith(f"5 runs. Untuned: {told}." if told else "5 runs.")


def test_the_table_is_readable_as_text() -> None:
    lines = [line for line in table.markdown().splitlines() if line.startswith("|")]
    assert len(lines) > 2 and max(map(len, lines)) <= 110


def test_a_commit_that_was_set_afterwards_is_marked(run_bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "bench-tiny.json"
    options = ("--batch", "2", "--ttft-tokens", "5", "--no-pdl", "--out", str(out))
    limit = ("--max-prefill-tokens-per-step", "8")
    assert run_bench("--shape", "tiny", *options, *limit)[0] == 0
    shown = table.markdown(tmp_path)
    assert "2 runs, at most 8 prompt tokens a step, without PDL." in shown
    assert r"\*, " not in shown
    document = json.loads(out.read_text())
    recorded = {"commit": None, "uncommitted_changes": None}
    document["environment"] |= {"commit": "0123456789ab" * 3, "recorded": recorded}
    document["environment"]["uncommitted_changes"] = False
    out.write_text(json.dumps(document))
    assert r"commit 0123456789ab\*, " in table.markdown(tmp_path)


@pytest.mark.parametrize("page", ["none", f"{table.BEGIN}", f"{table.BEGIN * 2}{table.END}"])
def test_markers_must_be_there_once(page: str) -> None:
    with pytest.raises(ValueError, match="times the marker"):
        table.render(page, "")


def test_no_results_make_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        table.main(["--results", str(tmp_path)])
    assert "holds no bench-*.json" in capsys.readouterr().err
