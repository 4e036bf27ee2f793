"""Chat templates: the jinja program in a checkpoint that turns messages into a prompt.

Like the checkpoint, a template is untrusted: `graphengine.text.sandbox` limits what it may do,
and how much.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from graphengine.options.checks import shown
from graphengine.text.sandbox import Sandbox

MAX_MESSAGE = 1000
"""Characters of a failing template's message that are shown."""
MAX_LINE = 200
"""Characters of the line where a template failed that are shown."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """One template, compiled when it is first used. Not for use from two threads at once.

    name  its name in the checkpoint, for errors
    """

    def __init__(self, source: str, name: str = "default") -> None:
        self.source = source
        self._title = "the chat template" + ("" if name == "default" else f" {name!r}")
        self._sandbox = Sandbox()

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        special_tokens: Mapping[str, str] | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Every error in the messages or the template is a ValueError.

        special_tokens          what the template sees as `bos_token`, `eos_token`, ...
        continue_final_message  end with the text of the last message, as in transformers
        template_variables      what else the template sees, by name
        """
        plain = _plain_messages(messages)
        for name, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={shown(value)} must be True or False")
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError(
                    "continue_final_message goes on with the last message, add_generation_prompt "
                    "begins another one: only one of them can be True"
                )
            final = _mark_final(plain)
        variables = {
            **(special_tokens or {}),
            "messages": plain,
            "tools": _plain_tools(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables |= _plain_variables(template_variables, {*variables, *self._sandbox.globals})
        template = self._template
        self._sandbox.reset()
        try:
            text = template.render(variables)
        except Exception as error:
            # A template may raise anything: KeyError, RecursionError, MemoryError, ...
            number = _line_of(error)
            where = "" if number is None else f" (line {number}: {self._line(number)})"
            raise ValueError(f"{self._title} failed: {_describe(error)}{where}") from error
        finally:
            # It holds what was rendered.
            self._sandbox.reset()
        return _up_to_mark(text, final) if continue_final_message else text

    @cached_property
    def _template(self) -> Template:
        try:
            return self._sandbox.compile_counted(self.source)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"{self._title} is not valid jinja: line {error.lineno}: {error.message}: "
                f"{self._line(error.lineno)}"
            ) from error
        except Exception as error:
            raise ValueError(f"{self._title} does not compile: {_describe(error)}") from error

    def _line(self, number: int) -> str:
        """The beginning of a line of the source; "" if there is no such line."""
        lines = self.source.splitlines()
        line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy in plain JSON types, since objects have methods that the sandbox does not know.

    Keys whose value is None are dropped, as in transformers: templates would write "None".
    Reasoning is copied to the names that templates read.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"chat messages must be a list that is not empty, got {messages!r}")
    for index, message in enumerate(messages):
        _check_message(index, message)
    kept = [
        _with_reasoning({key: value for key, value in message.items() if value is not None})
        for message in messages
    ]
    plain: list[dict[str, Any]] = _plain_json("chat messages", kept)
    return plain


# What a message's reasoning is called, the usual name first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the first two names, in transformers' order of keys."""
    given = [message[name] for name in _REASONING if name in message]
    if not given:
        return message
    filled = {"thinking": given[0], **message}
    filled.setdefault("reasoning_content", given[0])
    return filled


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"chat message {index} must be a dict, got {shown(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"chat message {index} has role={shown(role)}: must be a string: {shown(message)}"
        )
    # A template may do without content: of calls, of reasoning, or of a role alone.
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, (list, tuple)) or not all(isinstance(p, Mapping) for p in content):
        raise ValueError(
            f"chat message {index} has content={shown(content)}: "
            f"must be a string or a list of dicts"
        )


# Added after the last message's text during rendering. The space shows whether the template strips.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Add the mark after the text of the last message; returns that text."""
    message = messages[-1]
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    for part in reversed(content or []):
        if isinstance(text := part.get("text"), str):
            part["text"] = text + _MARK
            return text
    raise ValueError(f"continue_final_message: the last message has no text: {message!r}")


def _up_to_mark(text: str, final: str) -> str:
    """`text` up to the end of the last message, whose text is `final`."""
    end = text.rfind(_MARK.strip())
    if end < 0 or final.strip() not in text:
        raise ValueError(
            f"continue_final_message: the chat template does not write out the last message: "
            f"{final!r}"
        )
    kept = text[:end]
    return kept if text.startswith(_MARK, end) else kept.rstrip()


def _plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(t, Mapping) for t in tools):
        raise ValueError(f"tools must be a list of dicts (JSON schemas), got {tools!r}")
    plain: list[dict[str, Any]] = _plain_json("tools", list(tools))
    return plain


def _plain_variables(variables: Any, taken: Collection[str]) -> dict[str, Any]:
    """A copy in plain JSON types. ValueError for names that are `taken`, or are no strings."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise ValueError(f"template_variables must map names to values, got {variables!r}")
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"template_variables: no template has a variable named {name!r}")
        if name == "continue_final_message":
            raise ValueError(f"template_variables cannot set {name!r}: it is an option of its own")
        if name in taken:
            raise ValueError(
                f"template_variables cannot set {name!r}: every template gets it already"
            )
    plain: dict[str, Any] = _plain_json("template_variables", dict(variables))
    return plain


def _plain_json(what: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} must hold plain JSON values: {error}") from error


def _line_of(error: Exception) -> int | None:
    """The line of the template that raised; None if it is not known.

    jinja2 puts the template's lines into the traceback, in place of those of the compiled code.
    """
    lines = [
        number
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]
    return lines[-1] if lines else None


def _describe(error: Exception) -> str:
    """The exception's message, with its name unless jinja2 or the template wrote the message."""
    spoken = isinstance(error, TemplateError)
    message = str(error) if spoken else f"{type(error).__name__}: {error}"
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
