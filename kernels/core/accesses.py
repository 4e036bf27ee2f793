"""Which of its arguments a kernel reads and which it writes, found in its source.

A kernel's body is followed once, with the known facts about its arguments: a tensor is an address,
and anything computed at run time is a number. Compile-time values are known, so branches that a
launch does not compile are left out. Calls of other kernel functions are followed too. An address
that reaches a load is read, one that reaches a store is written, and one that reaches an atomic
operation is both. An address that is handed to a function that is not listed here is an error:
nothing is guessed. Nothing is compiled, and no GPU is needed.

The sets are upper bounds: at run time a branch or mask may leave accesses out. Memory whose address
a kernel loads, such as another rank's, is called "*x" after the argument x that holds the address.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Accesses(NamedTuple):
    """Names of arguments, "tuple.field" for those in a tuple.

    reads, writes              arguments that a launch may read and write
    early_reads, early_writes  arguments accessed before the launch has waited for the one before
                               (`core.pdl`); all, if it does not wait
    """

    reads: frozenset[str]
    writes: frozenset[str]
    early_reads: frozenset[str]
    early_writes: frozenset[str]


class UnclearAccess(TypeError):
    """A kernel does something with an address that may be a read, a write or neither."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A value that is known when a kernel is compiled."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Computed:
    """A value that only a running kernel knows.

    places    arguments that it may be an address in; none: it is a number
    loaded    arguments from whose memory it was computed
    optional  whether it may also be None
    """

    places: frozenset[str] = frozenset()
    loaded: frozenset[str] = frozenset()
    optional: bool = False


@dataclass(frozen=True, slots=True)
class _Tuple:
    items: tuple[_Value, ...]
    fields: tuple[str, ...] = ()


_Value = _Known | _Computed | _Tuple

_NUMBER = _Computed()
_NONE = _Known(None)

# Names of functions that read and write memory, as kernels call them; some are in
# `core.triton_versions`.
_LOADS = {"load", "load_async", "load_tile"}
_STORES = {"store", "store_tile"}
# Functions and methods that turn an address into another one.
_ADDRESSES = {"max_contiguous", "multiple_of", "to", "where"}
# Attributes of an address that are not addresses.
_DESCRIPTIONS = {"block_shape", "dtype", "layout", "shape", "type"}
# Functions of Python that make compile-time values.
_BUILTINS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each for each in (abs, bool, float, int, len, max, min, sum, tuple)
}
_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.USub: operator.neg, ast.Not: operator.not_, ast.Invert: operator.invert,
}  # fmt: skip


def accesses_of(kernel: Any, arguments: Mapping[str, Any]) -> Accesses:
    """The arguments that a launch of a Triton or Gluon kernel with these values may read and write.

    Kept for each kernel and its compile-time values. UnclearAccess, with the line of the kernel's
    source, for an address whose use is not known.
    """
    constants = _constants_of(kernel.fn)
    values = (_given(name, value, name in constants) for name, value in arguments.items())
    return _accesses(kernel.fn, tuple(zip(arguments, values, strict=True)))


@functools.cache
def _accesses(fn: Any, arguments: tuple[tuple[str, _Value], ...]) -> Accesses:
    found = _AccessesSoFar()
    _Body(fn, dict(arguments), found).follow()
    return Accesses(
        frozenset(found.reads),
        frozenset(found.writes),
        frozenset(found.early_reads),
        frozenset(found.early_writes),
    )


def _given(name: str, value: Any, constant: bool) -> _Value:
    """The known facts about an argument."""
    if isinstance(value, torch.Tensor | TensorDescriptor):
        return _Computed(frozenset([name]))
    if isinstance(value, tuple) and not constant:
        fields = getattr(value, "_fields", ())
        names = fields or range(len(value))
        items = (_given(f"{name}.{n}", each, False) for n, each in zip(names, value, strict=True))
        return _Tuple(tuple(items), fields)
    if constant or value is None or isinstance(value, tl.constexpr):
        return _known(value)
    return _NUMBER


def _known(value: Any) -> _Value:
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, list | tuple):
        return _Tuple(tuple(map(_known, value)), getattr(value, "_fields", ()))
    try:
        hash(value)
    except TypeError:
        return _NUMBER
    return _Known(value)


@functools.cache
def _definition(fn: Any) -> ast.FunctionDef:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(fn))).body
    assert isinstance(definition, ast.FunctionDef), f"{fn=}"
    return definition


@functools.cache
def _constants_of(fn: Any) -> frozenset[str]:
    """Names of the parameters that are compile-time values."""
    return frozenset(
        each.arg
        for each in _definition(fn).args.args
        if each.annotation is not None and ast.unparse(each.annotation).endswith("constexpr")
    )


def _merged(values: Iterable[_Value], *, optional: bool = False) -> _Computed:
    """One value that may be any of these, or computed from them."""
    places, loaded = frozenset[str](), frozenset[str]()
    for value in values:
        flat = _merged(value.items) if isinstance(value, _Tuple) else value
        if isinstance(flat, _Computed):
            places, loaded = places | flat.places, loaded | flat.loaded
    return _Computed(places, loaded, optional)


def _either(one: _Value, other: _Value) -> _Value:
    """The value of a variable after two branches."""
    if one == other:
        return one
    if isinstance(one, _Tuple) and isinstance(other, _Tuple) and len(one.items) == len(other.items):
        return _Tuple(tuple(map(_either, one.items, other.items)), one.fields or other.fields)
    return _merged((one, other), optional=_may_be_none(one) or _may_be_none(other))


def _may_be_none(value: _Value) -> bool:
    return value == _NONE or (isinstance(value, _Computed) and value.optional)


def _truth(value: _Value) -> bool | None:
    """Whether the value counts as true; None: only a running kernel knows."""
    if isinstance(value, _Known):
        return bool(value.value)
    return bool(value.items) if isinstance(value, _Tuple) else None


def _plain(value: _Value) -> Any:
    """The value itself. LookupError if only a running kernel knows it."""
    if isinstance(value, _Tuple):
        return [_plain(each) for each in value.items]
    if isinstance(value, _Known):
        return value.value
    raise LookupError(value)


def _computed(compute: Callable[..., Any], *args: _Value, **named: _Value) -> _Value:
    """The result of a function of compile-time values; a number if an argument is unknown."""
    try:
        plain = {name: _plain(value) for name, value in named.items()}
        return _known(compute(*map(_plain, args), **plain))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return _NUMBER


@dataclass(slots=True)
class _AccessesSoFar:
    """Accesses so far.

    waited   whether the launch has waited for the one before
    results  for each function, its arguments and whether the launch had waited before the call: the
             returned value, and whether the launch has waited after it
    """

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    early_reads: set[str] = field(default_factory=set)
    early_writes: set[str] = field(default_factory=set)
    waited: bool = False
    results: dict[Any, tuple[_Value, bool]] = field(default_factory=dict)

    def read(self, places: frozenset[str]) -> None:
        self.reads |= places
        if not self.waited:
            self.early_reads |= places

    def write(self, places: frozenset[str]) -> None:
        self.writes |= places
        if not self.waited:
            self.early_writes |= places


class _Body:
    """The body of one kernel function, with the values of its variables so far."""

    def __init__(self, fn: Any, variables: dict[str, _Value], found: _AccessesSoFar) -> None:
        self._fn, self._variables, self._found = fn, variables, found
        self._returned: _Value | None = None

    def follow(self) -> _Value:
        """Add the body's accesses to those found so far; returns the function's value."""
        self._block(_definition(self._fn).body)
        return _NONE if self._returned is None else self._returned

    def _block(self, statements: Sequence[ast.stmt]) -> bool:
        """Whether the function has certainly returned."""
        return any(self._statement(each) for each in statements)

    def _statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Return(value=returned):
                value = _NONE if returned is None else self._value(returned)
                before = self._returned
                self._returned = value if before is None else _either(before, value)
                return True
            case ast.If():
                return self._if(node)
            case ast.For():
                self._assign(node.target, _merged([self._value(node.iter)]))
                self._loop(node.body)
            case ast.While():
                self._value(node.test)
                self._loop(node.body, node.test)
            case ast.Assign(targets=targets):
                value = self._value(node.value)
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(value=ast.expr() as assigned):
                self._assign(node.target, self._value(assigned))
            case ast.AugAssign():
                operands = self._value(node.target), self._value(node.value)
                self._assign(node.target, _operation(type(node.op), *operands))
            case ast.Expr():
                self._value(node.value)
            case ast.Pass():
                pass
            case _:
                raise self._unclear(node)
        return False

    def _if(self, node: ast.If) -> bool:
        truth = _truth(self._value(node.test))
        if truth is not None:
            return self._block(node.body if truth else node.orelse)
        variables, waited = dict(self._variables), self._found.waited
        returned = self._block(node.body)
        variables, self._variables = self._variables, variables
        waited, self._found.waited = self._found.waited, waited
        returned_else = self._block(node.orelse)
        self._found.waited &= waited
        if returned_else:
            self._variables = variables
        elif not returned:
            self._merge(variables)
        return returned and returned_else

    def _loop(self, body: Sequence[ast.stmt], test: ast.expr | None = None) -> None:
        """Follow the body until the possible values of variables no longer grow."""
        before: dict[str, _Value] = {}
        while self._variables != before:
            before = dict(self._variables)
            self._block(body)
            if test is not None:
                self._value(test)
            self._merge(before)

    def _merge(self, others: Mapping[str, _Value]) -> None:
        own = self._variables
        for name, value in others.items():
            own[name] = _either(own[name], value) if name in own else value

    def _assign(self, target: ast.expr, value: _Value) -> None:
        if isinstance(target, ast.Name):
            self._variables[target.id] = value
        elif isinstance(target, ast.Tuple):
            for index, each in enumerate(target.elts):
                self._assign(each, _item(value, index))
        else:
            raise self._unclear(target)

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Constant(value=value):
                return _Known(value)
            case ast.Name(id=name):
                return self._variable(name)
            case ast.Attribute(attr=name):
                return _attribute(self._value(node.value), name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return _Tuple(tuple(map(self._value, parts)))
            case ast.Subscript():
                return self._subscript(node)
            case ast.BinOp(left=left, right=right):
                return _operation(type(node.op), self._value(left), self._value(right))
            case ast.UnaryOp(operand=operand):
                return _operation(type(node.op), self._value(operand))
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp():
                return self._both_or_either(node)
            case ast.IfExp():
                truth = _truth(self._value(node.test))
                if truth is not None:
                    return self._value(node.body if truth else node.orelse)
                return _either(self._value(node.body), self._value(node.orelse))
            case ast.Call():
                return self._call(node)
            case ast.JoinedStr():
                return _NUMBER
        raise self._unclear(node)

    def _variable(self, name: str) -> _Value:
        if name in self._variables:
            return self._variables[name]
        for scope in (inspect.getclosurevars(self._fn).nonlocals, self._fn.__globals__):
            if name in scope:
                return _known(scope[name])
        # Otherwise the name is assigned in a branch that is not compiled.
        return _known(getattr(builtins, name, 0))

    def _subscript(self, node: ast.Subscript) -> _Value:
        value = self._value(node.value)
        if isinstance(node.slice, ast.Slice):
            bounds = (node.slice.lower, node.slice.upper)
            start, stop = (_NONE if each is None else self._value(each) for each in bounds)
            if isinstance(value, _Tuple) and isinstance(start, _Known) and isinstance(stop, _Known):
                return _Tuple(value.items[start.value : stop.value])
            return _merged([value])
        if isinstance(node.slice, ast.Tuple):
            # A block with new dimensions: `x[:, None]`.
            return _merged([value])
        index = self._value(node.slice)
        if isinstance(value, _Known):
            return _computed(operator.getitem, value, index)
        return _item(value, index.value if isinstance(index, _Known) else None)

    def _compare(self, node: ast.Compare) -> _Value:
        values = [self._value(each) for each in (node.left, *node.comparators)]
        kind = type(node.ops[0])
        if all(isinstance(each, _Known) for each in values) and len(values) == 2:
            return _operation(kind, *values)
        if kind in (ast.Is, ast.IsNot) and _NONE in values:
            other = values[values[0] == _NONE]
            if not _may_be_none(other):
                return _Known(kind is ast.IsNot)
        return _Computed(loaded=_merged(values).loaded)

    def _both_or_either(self, node: ast.BoolOp) -> _Value:
        decisive = isinstance(node.op, ast.Or)
        values = []
        for each in node.values:
            value = self._value(each)
            truth = _truth(value)
            if truth is decisive:
                return value
            if truth is None:
                values.append(value)
        return _merged(values) if values else _Known(not decisive)

    def _call(self, node: ast.Call) -> _Value:
        owner = None
        if isinstance(node.func, ast.Attribute):
            owner, name = self._value(node.func.value), node.func.attr
            callee = _attribute(owner, name) if isinstance(owner, _Known) else _NUMBER
        else:
            callee, name = self._value(node.func), ast.unparse(node.func)
        args: list[_Value] = []
        for each in node.args:
            if isinstance(each, ast.Starred):
                spread = self._value(each.value)
                args += spread.items if isinstance(spread, _Tuple) else [spread]
            else:
                args.append(self._value(each))
        named = {str(each.arg): self._value(each.value) for each in node.keywords}
        if isinstance(callee, _Known):
            return self._call_known(callee.value, name, args, named, node)
        # A method of a run-time value: of a block, of shared memory, of an address.
        values = [*args, *named.values()] if owner is None else [owner, *args, *named.values()]
        touched = _merged(values)
        if name == "to" and not touched.places and "pointer_type" in ast.unparse(node.args[0]):
            return _Computed(frozenset(f"*{each}" for each in touched.loaded))
        return self._passed_on(touched, name, node)

    def _call_known(
        self,
        callee: Any,
        name: str,
        args: Sequence[_Value],
        named: Mapping[str, _Value],
        node: ast.Call,
    ) -> _Value:
        fn: Any = getattr(callee, "fn", None)
        if inspect.isfunction(fn) and not fn.__module__.startswith("triton."):
            # `constexpr_function` marks functions that the compiler itself calls.
            if type(callee).__name__ == "ConstexprFunction":
                return _computed(fn, *args, **named)
            return self._follow_call(fn, args, named)
        if hasattr(callee, "_fields"):
            return _new_tuple(callee, args, named)
        touched = _merged([*args, *named.values()])
        if name in _LOADS:
            self._found.read(touched.places)
            return _Computed(loaded=touched.places)
        if name in _STORES:
            self._found.write(touched.places)
            return _NUMBER
        if name.startswith("atomic_"):
            self._found.read(touched.places)
            self._found.write(touched.places)
            return _Computed(loaded=touched.places)
        if name == "inline_asm_elementwise":
            return self._assembled(args[0], touched, node)
        if name == "gdc_wait":
            self._found.waited = True
            return _NUMBER
        if name == "warp_specialize":
            for part in _items(args[0]):
                function, given = _items(part)
                self._follow_call(_plain(function).fn, _items(given), {})
            return _NUMBER
        if name == "constexpr":
            return args[0]
        if name == "len" and isinstance(args[0], _Tuple):
            return _Known(len(args[0].items))
        if name in _BUILTINS and callee is _BUILTINS[name]:
            return _computed(_BUILTINS[name], *args, **named)
        return self._passed_on(touched, name, node)

    def _assembled(self, text: _Value, touched: _Computed, node: ast.Call) -> _Value:
        """The result of inline assembly, which may read or write where it gets an address."""
        if not touched.places:
            return touched
        instructions = text.value if isinstance(text, _Known) else ""
        reads, writes = (
            re.search(rf"\b{opcode}\S*\.global\b", instructions) for opcode in ("(ld|cp)", "st")
        )
        if not reads and not writes:
            raise self._unclear(node)
        if reads:
            self._found.read(touched.places)
        if writes:
            self._found.write(touched.places)
        return _Computed(loaded=touched.places if reads else frozenset())

    def _passed_on(self, touched: _Computed, name: str, node: ast.Call) -> _Value:
        """The result of a function that accesses no memory."""
        if touched.places and name not in _ADDRESSES:
            raise self._unclear(node)
        return touched

    def _follow_call(self, fn: Any, args: Sequence[_Value], named: Mapping[str, _Value]) -> _Value:
        """Follow another kernel function, once for the same values."""
        parameters = inspect.signature(fn).parameters
        variables = {**dict(zip(parameters, args, strict=False)), **named}
        for each in parameters.values():
            if each.name not in variables:
                variables[each.name] = _known(each.default)
        found = self._found
        key = (fn, tuple(variables.items()), found.waited)
        if key not in found.results:
            result = _Body(fn, variables, found).follow()
            found.results[key] = result, found.waited
        result, found.waited = found.results[key]
        return result

    def _unclear(self, node: ast.expr | ast.stmt) -> UnclearAccess:
        line = inspect.getsourcelines(self._fn)[1] + node.lineno - 1
        file = inspect.getsourcefile(self._fn)
        return UnclearAccess(
            f"{file}:{line}: {self._fn.__name__} passes an address to what is neither a load nor "
            f"a store: {ast.unparse(node)}"
        )


def _operation(kind: type, *values: _Value) -> _Value:
    tuples = [each.items for each in values if isinstance(each, _Tuple)]
    if kind is ast.Add and len(tuples) == len(values):
        return _Tuple(sum(tuples, ()))
    if kind is ast.Not and (truth := _truth(values[0])) is not None:
        return _Known(not truth)
    if all(isinstance(each, _Known) for each in values):
        return _computed(_OPERATORS[kind], *values)
    return _merged(values)


def _attribute(value: _Value, name: str) -> _Value:
    if isinstance(value, _Known):
        return _known(getattr(value.value, name)) if hasattr(value.value, name) else _NUMBER
    if isinstance(value, _Tuple) and name in value.fields:
        return value.items[value.fields.index(name)]
    return _NUMBER if name in _DESCRIPTIONS else _merged([value])


def _items(value: _Value) -> tuple[_Value, ...]:
    assert isinstance(value, _Tuple), f"{value=}"
    return value.items


def _item(value: _Value, index: Any) -> _Value:
    if isinstance(value, _Tuple) and isinstance(index, int):
        return value.items[index]
    return _merged([value])


def _new_tuple(kind: Any, args: Sequence[_Value], named: Mapping[str, _Value]) -> _Value:
    """A named tuple that a kernel makes."""
    fields, defaults = kind._fields, getattr(kind, "_field_defaults", {})
    defaults = {name: _known(value) for name, value in defaults.items()}
    values = {**defaults, **dict(zip(fields, args, strict=False)), **named}
    return _Tuple(tuple(values[name] for name in fields), fields)
