"""Where chat templates run: jinja2's immutable sandbox, with limits on time and memory.

A template is a program that comes with a downloaded checkpoint. What it may do to the process that
renders it:

    run code, read files, reach attributes   no: it gets JSON values and has no loader, and jinja2's
                                             sandbox refuses names with an underscore and methods
                                             that change a list or a dictionary
    compute for long                         MAX_SECONDS of the thread's processor time
    take memory                              MAX_SIZE for a value, MAX_TOTAL for all it makes
    write any prompt                         yes, as the weights may compute any token

The time is checked between two operations: at each turn of a loop, call, filter, test, comparison,
operator, subscript and output. That needs no thread and no signal, but every operation must end
soon by itself: within about 3 seconds for the largest operands, usually within milliseconds. It
does because no value exceeds MAX_SIZE, together with all that it holds. Where a result may be much
larger than the operands, its size is computed first. Filters and methods that take more than about
linear time are refused, and so are those that a later jinja2 may add. Chat templates have no use
for them. A source of MAX_SOURCE characters compiles within about 4 seconds.

It has the additions that transformers makes (`raise_exception`, `strftime_now`, `tojson`, loop
controls, the `generation` tag).
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from datetime import datetime
from functools import wraps
from itertools import chain
from string import Formatter
from typing import Any, cast

from jinja2 import Template, filters, nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
"""Processor time of one rendering."""
MAX_SOURCE = 200_000
"""Characters of a template."""
MAX_SIZE = 16_000_000
"""Characters in all that a value holds; each value in it counts as ITEM more. Also those that are
written, into the prompt or into the result of a macro or a block.
"""
ITEM = 16
MAX_TOTAL = 1 << 30
"""Characters and items that a rendering may make in all, kept or not; an item counts as ITEM."""
MAX_BITS = 4096
"""Bits of an integer that it may compute."""
MAX_DEPTH = 500
"""Depth of nested lists that it may hold."""
MAX_DIGITS = 1024
"""Decimal places, of either sign, that `round` may be asked for."""
MAX_PATTERN = 100
"""Characters of a text that a slow search looks for, and of a format of `strftime_now`."""

FILTERS = """
    abs attr batch capitalize count d default dictsort e escape filesizeformat first float
    forceescape format groupby indent int items join last length list lower map max min random
    reject rejectattr replace reverse round safe select selectattr slice sort string sum title
    tojson trim truncate unique upper urlencode wordcount xmlattr
"""
"""The filters that a template may use."""
TESTS = """
    != < <= == > >= boolean callable defined divisibleby eq equalto escaped even false filter float
    ge greaterthan gt in integer iterable le lessthan lower lt mapping ne none number odd sameas
    sequence string test true undefined upper
"""
"""The tests that it may use."""

# Methods that make a text of any size from a width alone, or take more than linear time.
_REFUSED = {
    *("center", "encode", "expandtabs", "ljust", "rjust", "striptags", "to_bytes", "translate"),
    "zfill",
}
# Methods whose time grows with the pattern, too.
_SEARCHES = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"}
_COLLECTIONS = (list, tuple, dict, set)
_VIEWS = (ItemsView, KeysView, ValuesView)
# What jinja2 passes to functions that take the context.
_SCOPES = ("_loop_vars", "_block_vars")
_NESTED_KEY = re.compile(r"%\([^)]*\(")
_PERCENT = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+)?)?")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template, with the limits of its rendering."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # What is constant would be computed at each compilation.
            optimized=False,
            extensions=[LoopControlExtension, _GenerationTag],
            finalize=self._write,
        )
        self.reset()
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _PlainNamespace,
        }
        self.filters |= {
            "batch": self._batch,
            "format": self._format,
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": _round,
            "sum": self._sum,
            "tojson": self._tojson,
            "trim": _trim,
        }
        for table, names in ((self.filters, FILTERS), (self.tests, TESTS)):
            known: dict[str, Any] = {name: table[name] for name in names.split() if name in table}
            table.clear()
            table |= {name: self._with_checks(operation) for name, operation in known.items()}
        hooks = (self.checked, self.counted, self.made, self.wrote)
        self.filters |= {f"_{hook.__name__}": hook for hook in hooks}

    def reset(self) -> None:
        """Begin a rendering."""
        self.deadline = time.thread_time() + MAX_SECONDS
        self.total = self.written = 0
        # Size and depth of each collection, which is kept so that none takes its id.
        self._measured: dict[int, tuple[Any, int, int]] = {}

    def compile_counted(self, source: str) -> Template:
        """The template, rewritten so that everything it does is checked."""
        if len(source) > MAX_SOURCE:
            raise SecurityError(f"{len(source)} characters exceed the limit of {MAX_SOURCE}")
        return self.from_string(_Checked(self).visit(self.parse(source)))

    # The limits.

    def check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise SecurityError(f"it took more than {MAX_SECONDS} seconds")

    def check_size(self, size: float) -> None:
        if size > MAX_SIZE:
            raise SecurityError(
                f"{size} characters or items exceed the limit of {MAX_SIZE} for what it makes"
            )

    def size(self, value: Any) -> int:
        return self._measure(value)[0]

    def _measure(self, value: Any) -> tuple[int, int]:
        """Size and depth of a value: collections never change, so each is gone through once."""
        if isinstance(value, str):
            return ITEM + len(value), 0
        if isinstance(value, int):
            return ITEM + value.bit_length() // 3, 0
        if not isinstance(value, _COLLECTIONS + _VIEWS):
            return ITEM, 0
        if id(value) in self._measured:
            return self._measured[id(value)][1:]
        size, depth = ITEM, 0
        for item in chain(value, value.values() if isinstance(value, dict) else ()):
            its_size, its_depth = self._measure(item)
            size += its_size
            depth = max(depth, 1 + its_depth)
        self.check_size(size)
        if depth > MAX_DEPTH:
            raise SecurityError(f"it nests values more than {MAX_DEPTH} deep")
        self._measured[id(value)] = (value, size, depth)
        return size, depth

    # What the rewritten template calls in addition to its own operations.

    def checked(self, value: Any) -> Any:
        """The value, after a check of the time."""
        self.check_time()
        return value

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, with a check of the time before each."""
        for item in items:
            self.check_time()
            yield item

    def made(self, value: Any) -> Any:
        """A result, after a check of its size; a lazy one becomes a list.

        Lazy ones that read one another would take the interpreter's stack.
        """
        self.check_time()
        if isinstance(value, Iterator) and not isinstance(value, LoopContext):
            value = self._listed(value)
        if isinstance(value, str):
            self.check_size(len(value))
            self.total += sys.getsizeof(value)
        elif isinstance(value, _COLLECTIONS):
            self.check_size(ITEM * len(value))
            self._measure(value)
            self.total += ITEM * len(value)
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise SecurityError(
                f"it made an integer of {value.bit_length()} bits, the limit is {MAX_BITS}"
            )
        if self.total > MAX_TOTAL:
            raise SecurityError(f"it made more than {MAX_TOTAL} bytes of text or items")
        return value

    def _listed(self, items: Iterable[Any]) -> list[Any]:
        """The items as a list, whose size is checked as it grows."""
        listed: list[Any] = []
        for item in self.counted(items):
            listed.append(item)
            self.check_size(ITEM * len(listed))
        return listed

    def wrote(self, text: str) -> None:
        """Count a text that is written."""
        self.check_time()
        self.written += len(text)
        if self.written > MAX_SIZE:
            raise SecurityError(f"it wrote more than {MAX_SIZE} characters")

    @pass_context
    def _write(self, _context: Context, value: Any) -> str:
        """The text of an output. It takes the context, so that no output is a constant."""
        text = value if isinstance(value, str) else str(value)
        self.wrote(text)
        return text

    def _with_checks(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test with its checks."""

        @wraps(operation)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            return self.made(operation(*args, **kwargs))

        return checked

    # Filters that compute the size of their result first.

    def _batch(self, value: Any, linecount: int, fill_with: Any = None) -> Iterator[Any]:
        self.check_size(ITEM * linecount)
        return filters.do_batch(value, linecount, fill_with)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        text = value if isinstance(value, str) else str(value)
        self._check_percent(text, kwargs or args)
        return filters.do_format(text, *args, **kwargs)

    def _indent(
        self, s: str, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        margin = len(width) if isinstance(width, str) else width
        self.check_size(len(s) + margin * (1 + len(s.splitlines())))
        return filters.do_indent(s, width, first, blank)

    @pass_eval_context
    def _join(self, context: EvalContext, value: Any, d: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            value = map(filters.make_attrgetter(self, attribute), value)
        text: str = filters.do_join(context, self._joinable(d, value), d)
        return text

    def _joinable(self, separator: Any, items: Iterable[Any]) -> list[Any]:
        items = list(items)
        self.check_size(sum(map(self.size, items)) + len(items) * self.size(separator))
        return items

    @pass_eval_context
    def _replace(
        self, context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None
    ) -> str:
        self._check_replace(str(s), str(old), str(new))
        return filters.do_replace(context, s, old, new, count)

    def _check_replace(self, text: str, old: str, new: str, *_: Any) -> None:
        self.check_size(len(text) + text.count(old) * (len(new) - len(old)))

    def _sum(self, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        """jinja2's filter, but values that are not numbers are added one by one."""
        items = list(iterable)
        if attribute is not None:
            items = list(map(filters.make_attrgetter(self, attribute), items))
        if isinstance(start, str) or all(isinstance(item, (int, float)) for item in items):
            return sum(items, start)
        for item in items:
            start = self.made(start + item)
        return start

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without escapes: jinja2's own filter escapes HTML."""
        size, depth = self._measure(value)
        margin = len(indent) if isinstance(indent, str) else indent or 0
        self.check_size(size + size // ITEM * (depth * margin + self.size(separators)))
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _check_percent(self, text: str, given: Any) -> None:
        self.check_size(ITEM * text.count("%"))
        if _NESTED_KEY.search(text):
            raise SecurityError(f"a format whose key has parentheses: {text[:MAX_PATTERN]!r}")
        fields = [field for pair in _PERCENT.findall(text) for field in pair]
        if "*" in fields:
            raise SecurityError(f"a format whose width is an argument: {text[:MAX_PATTERN]!r}")
        self._check_format(text, fields, len(fields) // 2, given)

    def _check_braces(self, text: str, given: Any) -> None:
        self.check_size(ITEM * text.count("{"))
        specs = [spec or "" for _, name, spec, _ in Formatter().parse(text) if name is not None]
        if any("{" in spec for spec in specs):
            raise SecurityError(f"a format whose width is a field: {text[:MAX_PATTERN]!r}")
        widths = re.findall(r"\d+", " ".join(specs))
        self._check_format(text, widths, len(specs), given)

    def _check_format(self, text: str, widths: list[str], fields: int, given: Any) -> None:
        padding = sum(float(width or 0) for width in widths)
        self.check_size(len(text) + padding + fields * self.size(given))

    # jinja2's own hooks.

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        if isinstance(function, LoopContext):
            args = (self.counted(args[0]), *args[1:])
        elif not isinstance(function, (Macro, BlockReference)):
            # jinja2 wraps the method `format`.
            method = getattr(function, "__wrapped__", function)
            if isinstance(owner := getattr(method, "__self__", None), str):
                named = {name: kwargs[name] for name in kwargs if name not in _SCOPES}
                args = self._prepared(owner, method.__name__, args, named)
        return self.made(super().call(context, function, *args, **kwargs))

    def _prepared(
        self, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments of a text's method, after a check of the result's size."""
        if name == "join":
            return tuple(self._joinable(text, items) for items in args)
        if name == "replace":
            self._check_replace(text, *args)
        elif name in ("format", "format_map"):
            self._check_braces(text, (args, kwargs))
        elif name in _SEARCHES:
            _check_pattern(*args, *kwargs.values())
        return args

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, (str, list, tuple)) and isinstance(times, int):
                    self.check_size(len(items) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            # A lower bound: what passes has about twice the limit at most.
            bits = (left.bit_length() - 1) * right + 1
            if bits > MAX_BITS:
                raise SecurityError(
                    f"an integer of {bits} bits or more exceeds the limit of {MAX_BITS}"
                )
        return self.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and attr not in _REFUSED


class _Checked(NodeTransformer):
    """Rewrites a template so that what jinja2 has no hook for is checked, too."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("_counted", cast(nodes.Expr, node.iter))
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        """Count the template's own text each time it is written."""
        self.generic_visit(node)
        data = [part.data for part in node.nodes if isinstance(part, nodes.TemplateData)]
        hook = self._through("_wrote", nodes.Const("".join(data), lineno=node.lineno))
        return [nodes.ExprStmt(hook, lineno=node.lineno), node] if data else [node]

    def _visit_made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_made", node)

    visit_Dict = visit_List = _visit_made

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node.nodes = [self._through("_made", part) for part in node.nodes]
        return self._visit_made(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.generic_visit(node) if node.ctx == "store" else self._visit_made(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_checked", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_made", node) if isinstance(node.arg, nodes.Slice) else node

    def _through(self, name: str, node: nodes.Expr) -> nodes.Filter:
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
    """A namespace that cannot pretend to be another type through `__class__` and the like."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # Its values may refer to it.
        return "<Namespace>"


def _check_attribute_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _check_pattern(*patterns: Any) -> None:
    for pattern in patterns:
        if isinstance(pattern, str) and len(pattern) > MAX_PATTERN:
            raise SecurityError(
                f"a pattern of {len(pattern)} characters exceeds the limit of {MAX_PATTERN}"
            )


def _round(value: Any, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > MAX_DIGITS:
        raise SecurityError(
            f"a rounding to {precision} decimal places exceeds the limit of {MAX_DIGITS}"
        )
    if isinstance(value, str):
        # A text times ten to the power of the precision is a text.
        raise TypeError("must be real number, not str")
    return filters.do_round(value, precision, method)


def _trim(value: Any, chars: str | None = None) -> str:
    _check_pattern(chars)
    return filters.do_trim(value, chars)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    _check_pattern(format)
    return datetime.now().strftime(format)
