"""Chat templates: the jinja program a checkpoint brings to turn messages into a prompt.

A template comes with the weights from a stranger, so it runs in jinja2's immutable sandbox with the
additions that transformers makes (`raise_exception`, `strftime_now`, `tojson`, loop controls, the
`generation` tag) and, unlike there, within bounds: loop iterations, calls, filters and operators
are counted, and the size of what each of them made is limited. The bounds end a template that runs
away. One operation is checked after it is done: they are no shield against a host that is short of
memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
"""Loop iterations, calls, filters and operators of one rendering, plus one per `CHARGE` of size."""
MAX_SIZE = 16_000_000
"""Characters of a text, or items of a list, that a template may make."""
CHARGE = 4096
MAX_BITS = 4096
"""Bits of an integer that a template may compute."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """One template, compiled when it is first used. Not for use from two threads at once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._sandbox = _Sandbox()

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        special_tokens: Mapping[str, str] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt's text. Every fault of the messages or the template is a ValueError.

        special_tokens          what the template sees as `bos_token`, `eos_token`, ...
        continue_final_message  end with the text of the last message, as in transformers
        """
        plain = _plain_messages(messages)
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
        template = self._template
        self._sandbox.steps = 0
        try:
            text = "".join(self._sandbox.limited(template.generate(variables)))
        except Exception as error:
            # What a template raises is its own affair: KeyError, RecursionError, MemoryError, ...
            raise ValueError(f"the chat template failed: {_describe(error)}") from error
        return _up_to_mark(text, final) if continue_final_message else text

    @cached_property
    def _template(self) -> Template:
        try:
            program = self._sandbox.parse(self.source)
            return self._sandbox.from_string(_Counted(self._sandbox).visit(program))
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid jinja: line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:
            raise ValueError(f"the chat template does not compile: {_describe(error)}") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with transformers' vocabulary, counting `steps`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.steps = 0
        self.filters |= {"tojson": _tojson, "_spend": self.spend, "_counted": self.counted}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _PlainNamespace,
        }
        del self.globals["lipsum"]

    def spend(self, made: Any) -> Any:
        """Count one step, that made `made`."""
        size = len(made) if isinstance(made, (str, list, tuple, dict)) else 0
        if size > MAX_SIZE:
            raise SecurityError(f"it made {size} characters or items, the limit is {MAX_SIZE}")
        if isinstance(made, int) and made.bit_length() > MAX_BITS:
            raise SecurityError(
                f"it made an integer of {made.bit_length()} bits, the limit is {MAX_BITS}"
            )
        self.steps += 1 + size // CHARGE
        if self.steps > MAX_STEPS:
            raise SecurityError(f"it took more than {MAX_STEPS} steps")
        return made

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(None)
            yield item

    def limited(self, pieces: Iterable[str]) -> Iterator[str]:
        """The rendered pieces, up to MAX_SIZE characters."""
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_SIZE:
                raise SecurityError(f"it wrote more than {MAX_SIZE} characters")
            yield piece

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, LoopContext) and args:
            args = (self.counted(args[0]), *args[1:])
        return self.spend(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        return self.spend(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and attr not in _PADDING_METHODS


# A width is all these need to make a text of any size.
_PADDING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})


def _check_product(operator: str, left: Any, right: Any) -> None:
    """Refuse before it is computed what `spend` would refuse only afterwards."""
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right
        if bits > MAX_BITS:
            raise SecurityError(f"an integer of {bits} bits exceeds the limit of {MAX_BITS}")
    for items, times in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(times, int):
            size = len(items) * times
            if size > MAX_SIZE:
                raise SecurityError(
                    f"a product of {size} characters or items exceeds the limit of {MAX_SIZE}"
                )


class _Counted(NodeTransformer):
    """Rewrites a template so that its loops, filters and `~` go through the sandbox's counters.

    Calls and arithmetic need no rewriting: jinja2's sandbox has hooks for them.
    """

    def __init__(self, sandbox: _Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("_counted", node.iter)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_spend", node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_spend", node)

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(
            node, name, [], [], None, None, lineno=node.lineno, environment=self._sandbox
        )


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part, for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """A namespace that cannot pretend to be something else by way of `__class__` and the like."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute_name(name)
        super().__setitem__(name, value)


def _check_attribute_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy in plain JSON types, since objects have methods that no sandbox knows.

    Keys whose value is None are dropped, as transformers does: templates write out "None".
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"chat messages must be a list that is not empty, got {messages!r}")
    for index, message in enumerate(messages):
        _check_message(index, message)
    kept = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    plain: list[dict[str, Any]] = _plain_json("chat messages", kept)
    return plain


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"chat message {index} must be a dict, got {message!r}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"chat message {index} has role={role!r}: must be a string: {message!r}")
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, str):
        return
    if not isinstance(content, (list, tuple)) or not all(isinstance(p, Mapping) for p in content):
        raise ValueError(
            f"chat message {index} has content={content!r}: "
            f"must be a string or a list of dicts: {message!r}"
        )


# Behind the last message's text while it is rendered. The space shows whether the template strips.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Put the mark behind the text of the last message; returns that text."""
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


def _plain_json(what: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} must hold plain JSON values: {error}") from error


def _describe(error: Exception) -> str:
    """The message; with the exception's name where neither jinja2 nor the template speaks."""
    if isinstance(error, TemplateError):
        return str(error)
    return f"{type(error).__name__}: {error}"
