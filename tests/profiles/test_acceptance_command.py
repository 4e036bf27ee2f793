"""`graphengine acceptance`: prompts from a text, drafters on them, checks, and then figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphengine import Engine
from graphengine.cli import main as cli
from graphengine.demo import heldout_text
from graphengine.profiles import acceptance
from graphengine.profiles.acceptance import prompt_starts, repeated_grams
from graphengine.speculative import FORCE_ACCEPTED

SMALL = ("--device", "cpu", "--prompts", "2", "--prompt-tokens", "12", "--new-tokens", "12")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("--speculative", "mtp:2")` -> (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main(["acceptance", *SMALL, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


# Prompts and loops.


@given(
    st.integers(0, 400), st.integers(1, 40), st.integers(1, 40), st.integers(1, 50),
    st.none() | st.integers(1, 12),
)  # fmt: skip
def test_prompts_and_what_follows_lie_in_the_text(
    tokens: int, prompt: int, new: int, stride: int, most: int | None
) -> None:
    if tokens < prompt + new:
        with pytest.raises(ValueError, match=f"a text of {tokens} tokens is too short"):
            prompt_starts(tokens, prompt, new, stride=stride, most=most)
        return
    starts = prompt_starts(tokens, prompt, new, stride=stride, most=most)
    every = [start for start in range(0, tokens, stride) if start + prompt + new <= tokens]
    assert starts[0] == 0 and starts == sorted({*starts}) and {*starts} <= {*every}
    assert len(starts) == (len(every) if most is None else min(most, len(every)))


def test_a_few_prompts_are_spread_over_the_text() -> None:
    assert prompt_starts(1000, 50, 50, stride=100, most=3) == [0, 300, 600]


def test_repeated_grams_are_counted_within_a_text() -> None:
    assert repeated_grams([[1, 2, 3, 4, 5]]) == 0
    assert repeated_grams([[7] * 10]) == 6 / 7
    assert repeated_grams([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0, "another text is no loop"
    assert repeated_grams([[1, 2, 1, 2, 1, 2, 1], [9]]) == 2 / 4
    assert repeated_grams([[1, 2, 3], []]) is None


# The command.


def test_each_drafter_is_measured_at_each_temperature(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "acceptance.json"
    modes = ("--speculative", "mtp:2", "--speculative", "ngram:2:3", "--speculative", "mtp:2")
    filters = ("--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--new-tokens", "8")
    status, printed, progress = run(*modes, *filters, "--max-batch", "2,1", "--out", str(out))
    assert status == 0
    document = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert (document["schema"], document["checkpoint"]) == (acceptance.SCHEMA, "demo")
    assert document["environment"]["torch"] and document["prompts"] == 2
    assert 0 <= document["text_repeated_4grams"] < 0.5
    assert document["filters"] == {"top_k": 40, "top_p": 0.95, "min_p": 0.01}
    rows = document["rows"]
    assert [(row["max_batch"], row["speculative"], row["temperature"]) for row in rows] == [
        (batch, mode, heat)
        for batch in (2, 1)
        for mode in ("mtp:2", "ngram:2:3")
        for heat in (0, 1)
    ]
    for row in rows:
        found = row["acceptance"]
        assert 1 <= found["mean_length"] <= 3 and len(found["rates"]) == 2
        # The first token of each comes with its prompt.
        assert found["tokens"] == row["equal_tokens"] - 2
        assert row["tokens_per_s"] > 0 and row["plain_tokens_per_s"] > 0
        assert 0 < row["ms_per_token"] < 1e3 and row["plain_ms_per_token"] > 0
        assert row["row_family"] == "dot"
    # The tokens follow from the temperature, not from the drafter, nor from the batch.
    for heat in (0, 1):
        assert len({row["repeated_4grams"] for row in rows[heat::2]}) == 1
    assert len({row["numerics_id"] for row in rows}) == 1
    assert "2 prompts of 12 tokens from the demo's held-out text" in printed
    # The table comes once, at the end; until then each step is told.
    assert printed.count("ngram:2:3") == 4 and "tok/step" not in progress
    lines = progress.splitlines()
    assert lines[:3] == [
        "demo, max_batch=2, off: opening the engine ...",
        "off, temperature 0: warming up ...",
        "off, temperature 0: 2 continuations ...",
    ]
    assert lines[-1] == f"wrote {out}"
    told = [line for line in lines if line.endswith("tokens a step")]
    assert told == [
        f"{row['speculative']}, batch {row['max_batch']}, temperature {row['temperature']:g}: "
        f"{row['acceptance']['mean_length']:.2f} tokens a step"
        for row in rows
    ]
    assert "top_k 40, top_p 0.95, min_p 0.01" in printed


def test_the_demo_s_own_drafters_draft(run: Run) -> None:
    """The drafters in the package, by their short names; a head of another model is hardly ever
    right.
    """
    chosen = ("--speculative", "eagle3:demo:3", "--speculative", "dflash:demo:4")
    sizes = ("--prompts", "2", "--new-tokens", "32", "--temperature", "0")
    status, out, _ = run(*sizes, *chosen, "--json")
    assert status == 0
    lengths = {
        row["speculative"]: row["acceptance"]["mean_length"] for row in json.loads(out)["rows"]
    }
    assert lengths["eagle3:demo:3"] > 1.6 and lengths["dflash:demo:4"] > 1.7


def test_json_alone_is_printed_when_asked_for(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "some.py"
    text.write_text("a = 1\n" * 100)
    arguments = ("--text", str(text), "--speculative", "ngram:3", "--temperature", "0")
    status, out, err = run(*arguments, "--json")
    assert status == 0 and err == ""
    document = json.loads(out)
    assert document["text"] == "some.py" and document["text_repeated_4grams"] > 0.2
    assert [row["mode"] for row in document["rows"]] == ["n-gram, k=3, max_n=5"]


def test_a_cpu_takes_a_few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    studies: list[Any] = []

    def keep(study: Any, say: Any) -> Any:
        studies.append(study)
        raise ValueError("enough")

    monkeypatch.setattr(acceptance, "measure", keep)
    assert cli.main(["acceptance", "--device", "cpu"]) == 2
    (study,) = studies
    assert len(study.prompts) == len(study.following) == acceptance.CPU_PROMPTS
    assert list(study.modes) == list(acceptance.MODES) and study.temperatures == (0.0, 1.0)
    assert {len(prompt) for prompt in study.prompts} == {128}
    assert study.options["max_seq_len"] == 256
    assert study.prompts[0][:1] != study.prompts[1][:1] and heldout_text()


def test_tokens_that_differ_stop_the_measurement(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def other_seeds(engine: Engine, prompts: Any, params: Any = None) -> Any:
        if engine.core.needs.length and isinstance(params, list):
            params = params[::-1]
        return generate(engine, prompts, params)

    monkeypatch.setattr(Engine, "generate", other_seeds)
    with pytest.raises(RuntimeError, match=r"prompt 0 at temperature 3.0, plain and n-gram, k=2"):
        run("--speculative", "ngram:2", "--temperature", "3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speculative", "mtp:x"), "speculative='mtp:x' must be off, auto"),
        (("--speculative", "off"), "--speculative off accepts nothing"),
        (("--temperature", "0,hot"), "--temperature '0,hot' must be numbers"),
        (("--temperature", "-1"), "temperature=-1"),
        (("--stride", "0"), "--stride 0 must be at least 1"),
        (("--prompts", "0"), "--prompts 0 must be at least 1"),
        (("--prompt-tokens", "0"), "--prompt-tokens 0 must be at least 1"),
        (("--prompt-tokens", "999999"), "is too short for a prompt of 999999"),
        (("--text", "no/such/file"), "--text no/such/file"),
        (("--out", "no/such/folder/x.json"), "no such folder"),
        (("--checkpoint", "no/such/checkpoint"), "no/such/checkpoint"),
        (("--max-batch", "1,32"), "feed 128 tokens a step"),
        (("--max-batch", "0,8"), "max_batch='0,8' must be positive integers"),
        (("--top-p", "1.5"), "top_p=1.5"),
        (("--row-family", "fma"), "row_family='fma' serves up to 2 lanes"),
    ],
)
def test_errors_come_before_anything_is_measured(
    run: Run, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "measure", None)
    status, printed, errors = run(*arguments)
    assert status == 2 and printed == "" and message in errors


def test_forced_from_outside_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_ACCEPTED, "2")
    status, _, errors = run("--speculative", "ngram:2")
    assert status == 2 and f"{FORCE_ACCEPTED} is set" in errors
