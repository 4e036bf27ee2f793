"""`graphengine chat`: a conversation, and the commands that a line of input may be."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphengine.cli.given import first_adapter, open_engine, read_sampling
from graphengine.cli.output import print_logprobs, summarise
from graphengine.cli.terminal import columns, fit
from graphengine.cli.typed_lines import typed_lines
from graphengine.engine import Engine
from graphengine.prompts import Chat
from graphengine.requests.result import Result
from graphengine.sampling_params import SamplingParams
from graphengine.sessions import Session

HELP = """\
/help        this list
/rewind [N]  forget the last N turns, each a line and its reply (default: 1)
/save FILE   write the messages as JSON, a list that `Engine.submit` takes as a prompt
/quit        end the conversation, as the end of the input does
//...        a line that begins with one /
Ctrl-C ends a reply; what has been said of it stays in the conversation."""


def chat(options: argparse.Namespace) -> int:
    """A conversation through the checkpoint's chat template; one line of input is one turn.

    Ctrl-C ends a reply, /help lists commands. Status 2 after a turn that could not be served.
    """
    read_sampling(options)  # Errors come before the engine is opened.
    with open_engine(options) as engine, engine.session(adapter=first_adapter(engine)) as session:
        params = read_sampling(options, engine.default_params)
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise ValueError(f"{options.checkpoint} has no chat template: use `generate`")
        conversation = Conversation(
            engine,
            session,
            params,
            system=options.system,
            deadline_s=options.deadline,
            template_variables=dict(options.template_variable),
        )
        output = ChatOutput(options.json)
        output.begin(options.checkpoint, str(engine.memory.device))
        return converse(conversation, typed_lines(options.json), output)


class Conversation:
    """Messages, and a session that keeps their KV.

    A turn prefills only tokens that the chat template has changed or added since the turn before.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session,
        params: SamplingParams,
        *,
        system: str | None = None,
        deadline_s: float | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`deadline_s` applies to each turn, `template_variables` to each rendering."""
        self._engine = engine
        self._session = session
        self._params = params
        self._deadline_s = deadline_s
        self._variables = template_variables
        self.messages: list[dict[str, str]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self._before_turns = len(self.messages)

    @property
    def turns(self) -> int:
        return (len(self.messages) - self._before_turns) // 2

    def reply(self, line: str, say: Callable[[str], None]) -> tuple[Result, dict[str, Any]]:
        """The reply to a line, and its summary; `say` gets its text as it comes.

        Ctrl-C cancels the reply; the part that was said stays. ValueError for a turn that cannot be
        served, which leaves the conversation as it was.
        """
        engine, before = self._engine, Counter(self._engine.counters)
        asked = [*self.messages, {"role": "user", "content": line}]
        self._session.update(Chat(messages=asked, template_variables=self._variables))
        request = self._session.submit(
            self._params, on_event=lambda event: say(event.text), deadline_s=self._deadline_s
        )
        with interrupts() as interrupted:
            while not request.finished:
                if interrupted.is_set():
                    request.cancel()
                engine.step()
        result = request.result()
        self.messages = [*asked, {"role": "assistant", "content": result.text}]
        return result, summarise(engine, result, engine.counters - before)

    def rewind(self, turns: int) -> None:
        """Forget the last turns. ValueError, with both numbers, for more than there are."""
        if not 1 <= turns <= self.turns:
            raise ValueError(f"/rewind {turns}: turns that can be forgotten: {self.turns}")
        del self.messages[-2 * turns :]

    def save(self, path: Path) -> None:
        """Write the messages as JSON. ValueError if the file cannot be written."""
        text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        try:
            path.write_bytes(text.encode())
        except OSError as cause:
            raise ValueError(f"/save {path}: {cause.strerror}") from cause


class ChatOutput:
    """The output for a user or, with `json`, an object for each line of input."""

    def __init__(self, json: bool) -> None:
        self._json = json

    def begin(self, model: str, device: str) -> None:
        """Print who answers, and how to leave; nothing with `json`."""
        if not self._json:
            self.notice(f"{model} on {device}. /help lists commands, /quit or Ctrl-D ends.")

    def say(self, text: str) -> None:
        """Print a piece of a reply."""
        if not self._json:
            print(text, end="", flush=True)

    def end_turn(self, result: Result, summary: dict[str, Any]) -> None:
        if self._json:
            print(json.dumps(summary | result.to_dict()), flush=True)
            return
        print(flush=True)
        print_logprobs(result)
        if result.finish_reason != "stop":
            print(f"({result.finish_reason})")

    def notice(self, text: str) -> None:
        """Print the result of a command."""
        shown = json.dumps({"notice": text}) if self._json else fit(text, columns())
        print(shown, flush=True)

    def error(self, error: ValueError) -> None:
        if self._json:
            print(json.dumps({"error": str(error)}), flush=True)
        else:
            print(f"graphengine: error: {error}", file=sys.stderr)


def converse(conversation: Conversation, lines: Iterable[str], output: ChatOutput) -> int:
    """Answer each line or run its command; an error ends neither.

    Status 2 if a line was not answered. A command that failed was only reported: the next line may
    repeat it.
    """
    status = 0
    for line in lines:
        if line.strip() == "/quit":
            break
        is_command = line.startswith("/") and not line.startswith("//")
        try:
            if is_command:
                output.notice(_command(conversation, line))
            elif line.strip():
                text = line.removeprefix("/") if line.startswith("//") else line
                output.end_turn(*conversation.reply(text, output.say))
        except ValueError as error:
            output.error(error)
            status = status if is_command else 2
    return status


def _command(conversation: Conversation, line: str) -> str:
    """Run a command and return a text about its result. ValueError if it is unknown, or fails."""
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    if name == "/help":
        return HELP
    if name == "/rewind":
        if argument and not argument.isdecimal():
            raise ValueError(f"/rewind {argument}: must be a number of turns")
        conversation.rewind(int(argument or 1))
        return f"(turns left: {conversation.turns})"
    if name == "/save":
        if not argument:
            raise ValueError("/save FILE: name a file")
        conversation.save(Path(argument).expanduser())
        return f"(messages in {argument}: {len(conversation.messages)})"
    raise ValueError(f"{name} is no command: /help lists them, and // begins a line with one /")


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C in the block sets; the second one is a KeyboardInterrupt.

    So a reply ends as a cancelled request, and its text so far is kept. For the main thread.
    """
    interrupted = threading.Event()

    def note(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
