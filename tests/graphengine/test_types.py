"""What a type checker knows of the calls that people write: one run of mypy over all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
from collections.abc import Sequence

from graphengine import (Chat, Engine, SamplingParams)
from graphengine.prompts import Prompt

params = SamplingParams(max_tokens=1)
ids: list[int] = [1, 2]
pair: tuple[int, int] = (1, 2)
messages: list[dict[str, str]] = [{"role": "user", "content": "x"}]
conversation = Chat(messages=messages)


def use(engine: Engine, prompt: Prompt, batch: Sequence[Prompt], both: Prompt | list[str]) -> None:
"""

RESULT, EVENT = "graphengine.requests.result.Result", "graphengine.requests.request.Event"
ONE, MANY = RESULT, f"list[{RESULT}]"
REVEALED = {
    # One prompt, in each of its forms.
    'engine.generate("x")': ONE,
    "engine.generate([1, 2])": ONE,
    "engine.generate(ids)": ONE,
    "engine.generate(pair)": ONE,
    "engine.generate(range(3))": ONE,
    "engine.generate(messages)": ONE,
    'engine.generate([{"role": "user", "content": "x"}])': ONE,
    "engine.generate(conversation)": ONE,
    "engine.generate(prompt, params, priority=1)": ONE,
    # A batch of each.
    'engine.generate(["x", "y"])': MANY,
    'engine.generate(("x", "y"), [params, params])': MANY,
    "engine.generate([[1, 2], [3]])": MANY,
    "engine.generate([ids, pair])": MANY,
    "engine.generate([messages])": MANY,
    "engine.generate([conversation, messages])": MANY,
    'engine.generate(["x", [1, 2], conversation])': MANY,
    "engine.generate(batch)": MANY,
    # What may be both.
    "engine.generate(both)": f"{ONE} | {MANY}",
    # The other calls.
    'engine.stream("x")': f"typing.Iterator[{EVENT}]",
    'engine.astream("x", params)': f"typing.AsyncIterator[{EVENT}]",
    'engine.submit("x")': "graphengine.requests.request.Request",
    'Engine.from_pretrained("path", max_batch=2, wait="block")': "graphengine.engine.Engine",
}
"""By expression, what mypy reveals of it."""

WRONG = {
    "engine.generate(5)": "call-overload",
    "engine.generate([1.5])": "arg-type",
    "engine.generate([5, ids])": "arg-type",
    'engine.generate("x", priority="high")': "call-overload",
    'Engine.from_pretrained("path", max_batches=2)': "call-arg",
    'Engine.from_pretrained("path", max_batch="2")': "arg-type",
    'Engine.from_pretrained("path", wait="sleep")': "arg-type",
    'SamplingParams(temperature="hot")': "arg-type",
    "SamplingParams(top_q=0.5)": "call-arg",
}
"""By expression, the error that mypy has for it."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What mypy says of each line, by the expression on it."""
    folder = tmp_path_factory.mktemp("types")
    expressions = [*REVEALED, *WRONG]
    lines = [f"    reveal_type({each})" for each in REVEALED] + [f"    {each}" for each in WRONG]
    (folder / "program.py").write_text(HEAD + "\n".join(lines) + "\n")
    # Kept, as the first run reads all of torch; not that of `make types`, which may run meanwhile.
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += [
        "--cache-dir",
        str(ROOT / ".mypy_cache" / "of-tests"),
        "--no-error-summary",
        "--no-pretty",
    ]
    done = subprocess.run(
        [*command, "program.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    first, found = HEAD.count("\n"), dict[str, str]()
    for line in done.stdout.splitlines():
        match = re.match(r"program\.py:(\d+): (.*)", line)
        assert match is not None and int(match[1]) > first, line
        found.setdefault(expressions[int(match[1]) - first - 1], match[2])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("expression", REVEALED)
def test_what_is_revealed(said: dict[str, str], expression: str) -> None:
    revealed = said[expression].replace('"', "")
    # A named tuple is shown with its items.
    revealed = re.sub(r"\[tuple\[.*fallback=([\w.]+)\]\]$", r"[\1]", revealed)
    assert revealed == f"note: Revealed type is {REVEALED[expression]}"


@pytest.mark.slow
@pytest.mark.parametrize("expression", WRONG)
def test_what_is_refused(said: dict[str, str], expression: str) -> None:
    assert said[expression].startswith("error: ")
    assert said[expression].endswith(f"[{WRONG[expression]}]"), said[expression]
