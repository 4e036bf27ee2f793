"""`graphengine chat`: commands, interrupts and errors of a conversation, with scripted input."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphengine import Engine, SamplingParams
from graphengine.cli import typed_lines as typed
from graphengine.cli.commands.chat import HELP, ChatOutput, Conversation, converse, interrupts
from graphengine.cli.main import main
from graphengine.cli.typed_lines import typed_lines
from graphengine.demo import checkpoint_path

PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", device="cpu", max_batch=1, max_seq_len=96) as engine:
        yield engine


@pytest.fixture
def conversation(engine: Engine) -> Iterator[Conversation]:
    with engine.session() as session:
        yield Conversation(engine, session, PARAMS)


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


def answers(
    conversation: Conversation, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[Any]]:
    """Status and the JSON that a program gets for its lines."""
    status = converse(conversation, lines, ChatOutput(json=True))
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_rewound_turn_is_as_if_it_had_not_been(
    conversation: Conversation, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["def f(", "x = 1", "y = 2", "/rewind 2", "x = 1"]
    status, (first, second, _, notice, again) = answers(conversation, lines, capsys)
    assert status == 0 and notice == {"notice": "(turns left: 1)"}
    assert again["token_ids"] == second["token_ids"]
    assert again["prompt_token_ids"] == second["prompt_token_ids"]
    assert roles(conversation) == ["user", "assistant"] * 2
    said = [{"role": "user", "content": "def f("}, {"role": "assistant", "content": first["text"]}]
    assert conversation.messages[:2] == said
    prompt = [*said, {"role": "user", "content": "x = 1"}]
    assert engine.generate(prompt, PARAMS).text == second["text"]


def test_the_demo_goes_on_with_the_text(
    conversation: Conversation, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    _, (answer,) = answers(conversation, ["def f("], capsys)
    assert answer["text"] == engine.generate("def f(\n", PARAMS).text


def test_errors_of_a_turn_leave_the_conversation_as_it_was(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    status, (first, error, second) = answers(
        conversation, ["def f(", "word " * 200, "x = 1"], capsys
    )
    assert status == 2 and "max_seq_len=96" in error["error"]
    assert len(second["prompt_token_ids"]) < 96 and conversation.turns == 2
    assert first["text"] and second["text"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/rewind", "/rewind 1: turns that can be forgotten: 0"),
        ("/rewind 0", "/rewind 0: turns that can be forgotten: 0"),
        ("/rewind all", "/rewind all: must be a number of turns"),
        ("/save", "/save FILE: name a file"),
        ("/save none/there.json", "/save none/there.json: No such file or directory"),
        ("/halp", "/halp is no command: /help lists them"),
    ],
)
def test_commands_say_what_is_wrong(
    conversation: Conversation,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    line: str,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert converse(conversation, [line, "/help"], ChatOutput(json=False)) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"graphengine: error: {expected}") and out == HELP + "\n"
    assert conversation.messages == []


def test_what_was_saved_is_a_prompt(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "chat.json"
    with engine.session() as session:
        conversation = Conversation(engine, session, PARAMS, system="# Grüße")
        status, _ = answers(conversation, ["//a", "", f"/save {saved}", "/quit", "b"], capsys)
    assert status == 0 and roles(conversation) == ["system", "user", "assistant"]
    messages = json.loads(saved.read_text("utf-8"))
    assert messages == conversation.messages and messages[1]["content"] == "/a"
    with pytest.raises(ValueError, match="/rewind 2: turns that can be forgotten: 1"):
        conversation.rewind(2)
    assert engine.generate(messages, PARAMS).token_ids


def test_an_interrupt_ends_the_reply_alone(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ChatOutput):
        def say(self, text: str) -> None:
            super().say(text)
            if conversation.turns == 0 and not interrupted:
                interrupted.append(text)
                signal.raise_signal(signal.SIGINT)

    interrupted: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    assert converse(conversation, ["def f(", "x = 1"], Interrupted(json=False)) == 0
    assert signal.getsignal(signal.SIGINT) is before
    out = capsys.readouterr().out
    assert out.count("(cancelled)") == 1
    first, second = conversation.messages[1], conversation.messages[3]
    assert first["content"].startswith(interrupted[0]) and second["content"]
    assert out == f"{first['content']}\n(cancelled)\n{second['content']}\n(length)\n"


def test_a_second_interrupt_ends_the_program() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        signal.raise_signal(signal.SIGINT)


# Input.


def scripted(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> list[str]:
    """`input` gives these lines, then ends; the prompts that it showed."""
    script, prompts = iter(lines), list[str]()

    def read(prompt: str) -> str:
        prompts.append(prompt)
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    return prompts


def at_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool = True) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)


def test_an_interrupt_at_a_terminal_drops_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    at_terminal(monkeypatch)
    monkeypatch.setattr(typed, "find_spec", lambda name: None)
    prompts = scripted(monkeypatch, "a", KeyboardInterrupt, "b")
    assert [*typed_lines(quiet=False)] == ["a", "b"] and prompts == ["> "] * 4


def test_an_interrupt_of_a_pipe_ends_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    at_terminal(monkeypatch, False)
    prompts = scripted(monkeypatch, "a", KeyboardInterrupt)
    lines = typed_lines(quiet=True)
    assert next(lines) == "a"
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    assert prompts == ["", ""]


def test_lines_are_edited_with_prompt_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    application = pytest.importorskip("prompt_toolkit.application")
    inputs = pytest.importorskip("prompt_toolkit.input")
    outputs = pytest.importorskip("prompt_toolkit.output")
    at_terminal(monkeypatch)
    left, end_of_input, interrupt = "\x1b[D", "\x04", "\x03"
    with (
        inputs.create_pipe_input() as pipe,
        application.create_app_session(input=pipe, output=outputs.DummyOutput()),
    ):
        lines = typed_lines(quiet=False)
        pipe.send_text(f"ac{left}b\r")
        assert next(lines) == "abc"
        pipe.send_text(f"dropped{interrupt}")
        pipe.send_text("d\r")
        assert next(lines) == "d"
        pipe.send_text(end_of_input)
        assert [*lines] == []


def test_a_chat_with_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, "def f(", "/rewind", "/quit", "never said")
    options = ["--device", "cpu", "--max-batch", "1", "--max-seq-len", "64", "--max-tokens", "3"]
    assert main(["chat", *options]) == 0
    out, err = capsys.readouterr()
    first, *rest = out.splitlines()
    assert first == "demo on cpu. /help lists commands, /quit or Ctrl-D ends."
    assert out.endswith("\n(turns left: 0)\n") and len(rest[0]) > 0 and err == ""


def test_the_commands_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "60")
    ChatOutput(json=False).notice(HELP)
    shown = capsys.readouterr().out
    assert shown.split() == HELP.split()
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60 < max(map(len, HELP.splitlines()))
    assert [line[:13] for line in lines if line[0] == " "] == [" " * 13] * 3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {"temperature": 0.6, "top_k": 20}),
        (("--top-k", "5"), {"temperature": 0.6, "top_k": 5}),
        (("--sampling-defaults", "engine"), {}),
    ],
)
def test_sampling_is_as_the_checkpoint_recommends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...], expected: Any
) -> None:
    folder, asked = tmp_path / "model", []
    shutil.copytree(checkpoint_path(), folder)
    told = {"eos_token_id": [0], "temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(told))

    def note(conversation: Conversation, lines: object, output: object) -> int:
        asked.append(conversation._params)
        return 0

    monkeypatch.setattr("graphengine.cli.commands.chat.converse", note)
    sizes = ("--device", "cpu", "--max-batch", "1", "--max-seq-len", "96")
    assert main(["chat", "--checkpoint", str(folder), *sizes, *flags]) == 0
    assert asked == [SamplingParams(**expected)]
