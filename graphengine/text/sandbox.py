"""Where chat templates run: jinja2's immutable sandbox, with a limit on what a rendering may take.

It has the additions that transformers makes (`raise_exception`, `strftime_now`, `tojson`, loop
controls, the `generation` tag). Unlike there, a rendering has a budget of MAX_STEPS steps. They are
counted, not timed: the same template and messages stop at the same place on every machine.

What is promised:
- Every operation whose time grows with its operands is charged before it runs, in proportion to its
  work: each turn of a loop, call, filter, test, comparison, operator, slice, output. A step is
  about the time of one turn of a loop, and pays for 4 to 4096 characters or items, depending on the
  operation (`graphengine.text.template_costs`). So a rendering ends after a few seconds at most.
- No text, list or integer is kept that exceeds MAX_SIZE or MAX_BITS. Where the size of a result
  follows from the operands, it is refused before it is made. Elsewhere it is at most a few times as
  large as the operands, and is refused afterwards.
- Where a whole value is traversed, it nests at most MAX_DEPTH deep.
- Names that jinja2's rules forbid to a template, and methods that pad to a width, are refused.

The time to compile a source of any length is not bounded, and neither is memory: a hostile template
can hold a few gigabytes, in texts each within MAX_SIZE.
"""

from __future__ import annotations

import json
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    Set,
    ValuesView,
)
from datetime import datetime
from functools import wraps
from itertools import chain
from typing import Any, cast

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from graphengine.text import template_costs
from graphengine.text.template_costs import COPY, ITEMS, SCAN, Prepare

MAX_STEPS = 1_000_000
"""Steps of one rendering."""
MAX_SIZE = 16_000_000
"""Characters of a text, or items of a list, that a template may make."""
MAX_WRITTEN = 4 * MAX_SIZE
"""Characters that it may write, into the prompt or into the result of a macro or a block."""
MAX_BITS = 4096
"""Bits of an integer that it may compute."""
MAX_DEPTH = 500
"""Depth of nested lists that it may hold."""

# Methods that make a text of any size from a width alone.
_PADDING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})
_VIEWS = (ItemsView, KeysView, ValuesView, Set)
_SCOPES = ("_loop_vars", "_block_vars")
# Syntax nodes in the body of a loop or macro that one step pays for.
_PARTS = 64


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template, with the counts of its rendering: a `Meter`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationTag],
            finalize=self._write,
        )
        self.steps = self.written = 0
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _PlainNamespace,
        }
        self.filters |= {"tojson": _tojson, "sum": self._sum}
        for table, costs in (
            (self.filters, template_costs.FILTERS),
            (self.tests, template_costs.TESTS),
        ):
            # What a later jinja2 adds is refused, as nobody has reviewed it.
            operations: dict[str, Any] = {name: table[name] for name in costs if name in table}
            table.clear()
            table |= {name: self._charged(operations[name], costs[name]) for name in operations}
        self.filters |= {
            f"_{hook.__name__}": pass_context(_without_context(hook))
            for hook in (
                self.body,
                self.copied,
                self.counted,
                self.handed,
                self.made,
                self.read,
                self.within,
            )
        }

    def reset(self) -> None:
        """Begin a rendering."""
        self.steps = self.written = 0

    def compile_counted(self, source: str) -> Template:
        """The template, rewritten so that everything it does is counted."""
        return self.from_string(_Counted(self).visit(self.parse(source)))

    # The meter.

    def charge(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise SecurityError(f"it took more than {MAX_STEPS} steps")

    def check_size(self, size: float) -> None:
        if size > MAX_SIZE:
            raise SecurityError(
                f"{size} characters or items exceed the limit of {MAX_SIZE} for what it makes"
            )

    def weigh(self, value: Any) -> int:
        if type(value) is str:
            return len(value)
        return self.measure(value)[0]

    def measure(self, value: Any) -> tuple[int, int, int]:
        weight = values = deepest = 0
        held: list[Iterator[Any]] = [iter((value,))]
        while held:
            for item in held[-1]:
                values += 1
                if values % 1024 == 0:
                    self.charge(512)
                if type(item) is str:
                    weight += 1 + len(item)
                    continue
                weight += 1 + _own_size(item)
                if isinstance(item, range):
                    # It holds no items, but iterating over it creates all of them.
                    self.charge(len(item) // 2)
                if (inner := _inside(item)) is not None:
                    held.append(inner)
                    break
            else:
                held.pop()
            deepest = max(deepest, len(held))
            if deepest > MAX_DEPTH:
                raise SecurityError(f"it nests values more than {MAX_DEPTH} deep")
        self.charge(values % 1024 // 2)
        return weight, values, deepest

    def counted(self, items: Iterable[Any], each: int = 1, weighed: bool = False) -> Iterator[Any]:
        for item in items:
            self.charge(each)
            if weighed:
                self.charge(self.weigh(item) // 16)
            yield item

    # What the rewritten template calls in addition to its own operations.

    def made(self, value: Any) -> Any:
        """A result, after a check of its size."""
        self.charge(1)
        if isinstance(value, (str, bytes, list, tuple, dict)):
            self.check_size(len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise SecurityError(
                f"it made an integer of {value.bit_length()} bits, the limit is {MAX_BITS}"
            )
        return value

    def read(self, value: Any) -> Any:
        """Charge for a value that is traversed: compared, hashed, made a text."""
        weight = self._go_through(value)
        self.check_size(weight)
        return value

    def _go_through(self, value: Any) -> int:
        """Charge for the value; returns its size."""
        weight = self.weigh(value)
        self.charge(weight // (COPY if isinstance(value, str) else SCAN))
        return weight

    def within(self, value: Any) -> Any:
        """Charge for a value that is searched."""
        if isinstance(value, Iterator):
            return self.counted(value)
        if not isinstance(value, Mapping):
            # In a short text every position is tried.
            self.charge(self.weigh(value) // (SCAN // 8))
        return value

    def copied(self, value: Any) -> Any:
        """Charge for a value that is sliced."""
        return template_costs.by_length(self, value)

    def handed(self, value: Any) -> Any:
        """Charge for a value whose items become arguments."""
        if isinstance(value, Iterator):
            return self.counted(value)
        if hasattr(value, "__len__"):
            self.charge(len(value))
        return value

    def body(self, parts: int, characters: int) -> str:
        """Charge for one run of a body of this many nodes, and for its text; writes nothing."""
        self.charge(parts // _PARTS)
        self._wrote(characters)
        return ""

    @pass_context
    def _write(self, _context: Context, value: Any) -> Any:
        """Charge for an output before it is made a text."""
        self.charge(1)
        self._wrote(self._go_through(value))
        return value

    def _wrote(self, characters: int) -> None:
        self.written += characters
        if self.written > MAX_WRITTEN:
            raise SecurityError(f"it wrote more than {MAX_WRITTEN} characters")

    def limited(self, pieces: Iterable[str]) -> Iterator[str]:
        """The rendered pieces, up to MAX_SIZE characters."""
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_SIZE:
                raise SecurityError(f"it wrote more than {MAX_SIZE} characters")
            yield piece

    def _charged(self, operation: Callable[..., Any], prepare: Prepare) -> Callable[..., Any]:
        """A filter or test with its charge. It takes the context, so none is a constant."""
        passed = getattr(operation, "jinja_pass_arg", None)

        @pass_context
        @wraps(operation, assigned=(), updated=())
        def charged(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            self.charge(1)
            for argument in chain(args, kwargs.values()):
                self.read(argument)
            value = prepare(self, value, *args, **kwargs)
            args = tuple(map(self._bounded, args))
            own = {"context": context, "eval_context": context.eval_ctx, "environment": self}
            first = () if passed is None else (own[passed.name],)
            return self.made(operation(*first, value, *args, **kwargs))

        return charged

    def _bounded(self, value: Any) -> Any:
        return self.counted(value) if isinstance(value, Iterator) else value

    # jinja2's own hooks.

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.charge(1)
        if isinstance(function, LoopContext):
            args = tuple(map(self.counted, args[:1])) + args[1:]
        elif not isinstance(function, (Macro, BlockReference)):
            args = self._prepared(function, args, kwargs)
        return self.made(super().call(context, function, *args, **kwargs))

    def _prepared(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments of a callable from outside the template, which is charged for."""
        # jinja2 adds arguments meant only for functions that take the context.
        kwargs = {name: kwargs[name] for name in kwargs if name not in _SCOPES}
        for argument in chain(args, kwargs.values()):
            self.read(argument)
        # jinja2 wraps the method `format`.
        method = getattr(function, "__wrapped__", function)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if name == "join" and isinstance(owner, (str, bytes)) and len(args) == 1:
            return (template_costs.joined(self, owner, args[0]),)
        args = tuple(map(self._bounded, args))
        if owner is not None:
            template_costs.method_cost(owner, name)(self, owner, *args, **kwargs)
        return args

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.charge(1)
        if operator == "%" and isinstance(left, (str, bytes)):
            given = right if isinstance(right, tuple) else (right,)
            template_costs.percent(self, left, *given)
        elif operator in ("*", "**"):
            self.charge(_check_product(operator, left, right))
        elif operator == "+":
            sized = [side for side in (left, right) if isinstance(side, (str, bytes, list, tuple))]
            size = sum(map(len, sized))
            self.check_size(size)
            self.charge(size // (COPY if isinstance(left, str) else ITEMS))
        elif isinstance(left, _VIEWS):
            self.charge((self.weigh(left) + self.weigh(right)) // 16)
        return self.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) not in (int, str):
            self.read(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and attr not in _PADDING_METHODS

    @pass_context
    def _sum(
        self, context: Context, iterable: Iterable[Any], attribute: Any = None, start: Any = 0
    ) -> Any:
        """jinja2's filter, but values that are not numbers are added by the sandbox's operator."""
        items = list(iterable)
        if attribute is not None:
            items = list(map(make_attrgetter(self, attribute), items))
        if isinstance(start, (str, bytes)) or all(isinstance(i, (int, float)) for i in items):
            return sum(items, start)
        for item in items:
            start = self.call_binop(context, "+", start, item)
        return start


def _without_context(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, taking the context, so that jinja2 runs it at each rendering."""
    return lambda _context, *args: hook(*args)


def _own_size(value: Any) -> int:
    """Number of characters or items of a value, without those of its items."""
    if isinstance(value, (str, bytes, range)):
        return len(value)
    return value.bit_length() // 3 if isinstance(value, int) else 0


def _inside(value: Any) -> Iterator[Any] | None:
    """The values that a value holds."""
    if isinstance(value, (list, tuple)):
        return iter(value)
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    if value is None or isinstance(value, (str, int, float)):
        return None
    return iter(value) if isinstance(value, _VIEWS) else None


def _check_product(operator: str, left: Any, right: Any) -> int:
    """Refuse in advance what `made` would refuse only afterwards; returns the steps it takes."""
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        # A lower bound: what passes has at most about twice the limit, and `made` counts its bits.
        bits = (left.bit_length() - 1) * right + 1
        if bits > MAX_BITS:
            raise SecurityError(
                f"an integer of {bits} bits or more exceeds the limit of {MAX_BITS}"
            )
    steps = 0
    for items, times in ((left, right), (right, left)):
        if isinstance(items, (str, bytes, list, tuple)) and isinstance(times, int):
            size = len(items) * times
            if size > MAX_SIZE:
                raise SecurityError(
                    f"a product of {size} characters or items exceeds the limit of {MAX_SIZE}"
                )
            steps = max(0, size) // (COPY if isinstance(items, (str, bytes)) else ITEMS)
    return steps


class _Counted(NodeTransformer):
    """Rewrites a template so that operations without a hook in jinja2 go through the sandbox.

    Filters and tests are charged for where they are looked up by name; calls, subscripts and
    arithmetic in hooks.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._begin(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._begin(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._begin(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._begin(node)

    def _begin(
        self,
        node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block,
    ) -> nodes.Node:
        """Make each run of its body charge for the body's nodes."""
        parts = sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        if isinstance(node, nodes.For):
            node.iter = self._through("_counted", cast(nodes.Expr, node.iter))
        if parts >= _PARTS:
            node.body.insert(0, self._run(node, parts, 0))
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        """The template's own text is written each time its output node runs."""
        self.generic_visit(node)
        data = (part.data for part in node.nodes if isinstance(part, nodes.TemplateData))
        characters = sum(map(len, data))
        return [self._run(node, 0, characters), node] if characters else [node]

    def _run(self, node: nodes.Node, parts: int, characters: int) -> nodes.Node:
        arguments = [nodes.Const(characters, lineno=node.lineno)]
        return nodes.ExprStmt(
            self._through("_body", nodes.Const(parts, lineno=node.lineno), arguments),
            lineno=node.lineno,
        )

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._read(part) for part in node.nodes]
        return self._through("_made", node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        if len(node.ops) == 1 and any(map(_is_small, operands)):
            # Comparing with a number or a short text is quick; searching for it is not.
            if node.ops[0].op in ("in", "notin"):
                node.ops[0].expr = self._through("_within", operands[1])
            return node
        node.expr = self._read(node.expr)
        for operand in node.ops:
            looked_in = operand.op in ("in", "notin")
            operand.expr = self._through("_within" if looked_in else "_read", operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = self._read(node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._through("_copied", node.node)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        return self._spread(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._spread(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return self._spread(node)

    def _spread(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = self._through("_handed", node.dyn_args)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = self._through("_handed", node.dyn_kwargs)
        return node

    def _read(self, node: nodes.Expr) -> nodes.Expr:
        return node if _is_small(node) else self._through("_read", node)

    def _through(
        self, name: str, node: nodes.Expr, args: Sequence[nodes.Expr] = ()
    ) -> nodes.Filter:
        return nodes.Filter(
            node, name, list(args), [], None, None, lineno=node.lineno, environment=self._sandbox
        )


def _is_small(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and _own_size(node.value) < SCAN


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


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without escapes: jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
