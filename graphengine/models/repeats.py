"""Run blocks that differ only in the memory of their tensors once in a trace of a step.

Most layers of a model are alike: over tensors without memory they launch the same kernels with the
same sizes, and differ in which weights and caches they read. So in a trace only the first of
several such calls runs. For each of the others the tracer learns which memory takes the place of
the first call's. Outside of a trace every block runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from graphengine.kernels.core.launching import Launch
from graphengine.models.sublayers import BlockWeights

Result = TypeVar("Result")

# A kernel may ask how the addresses of its tensors are aligned, up to this many bytes.
_ALIGNMENT = 256
# torch's weak references to memory compare this key, too.
_IDENTITY: Callable[[torch.UntypedStorage], Any] = torch.UntypedStorage._cdata.__get__


Moved = Mapping[int, tuple[int, Tensor]]
"""For each allocation of the first of several like calls: the byte at which its tensors begin, and
the tensor that begins at the corresponding byte in a later call."""


class Tracer(Protocol):
    """Receives the calls of a trace."""

    def begin(self) -> None:
        """A call begins that later calls may repeat. Calls nest."""

    def end(self) -> object:
        """The call that began last has ended. Returns its effects, for `repeat`."""

    def repeat(self, done: Any, moved: Callable[[], Moved]) -> None:
        """Count a call like the one whose effects are `done`; it is not run."""


class Runner(Protocol):
    """Runs a function, or has the tracer repeat an earlier call's effects."""

    def __call__(
        self, function: Callable[..., Result], given: tuple[Any, ...], fixed: tuple[Any, ...] = ()
    ) -> Result:
        """The result of `function(*given, *fixed)`.

        fixed  the same objects in all calls of this runner
        """
        ...


_trace: ContextVar[_Trace | None] = ContextVar("trace", default=None)


@contextmanager
def repeats_told(tracer: Tracer) -> Iterator[None]:
    """Inside this context, a call on tensors without memory runs only if no earlier call was like
    it.

    Models whose steps run inside must be made before it begins and kept until it ends.
    """
    token = _trace.set(_Trace(tracer, {}, {}))
    try:
        yield
    finally:
        _trace.reset(token)


def block_runner(*, alike: bool = True) -> Runner:
    """The function that runs the blocks of one pass through a model's layers.

    alike  whether blocks with weights and arguments of equal form launch the same
    """
    trace = _trace.get()
    return _run if trace is None or not alike else _Repeats(trace, {}).run


def model_runner(*, alike: bool = True) -> Runner:
    """The function that runs all layers of a model; steps of several graphs may share a call."""
    trace = _trace.get()
    return _run if trace is None or not alike else _Repeats(trace, trace.calls).run


def memory_of(tensor: Tensor) -> int:
    """The identity of a tensor's allocation, which views of it share."""
    identity: int = _IDENTITY(tensor.untyped_storage())
    return identity


def start_of(tensor: Tensor) -> int:
    """The byte of its allocation at which a tensor begins."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def _run(
    function: Callable[..., Result], given: tuple[Any, ...], fixed: tuple[Any, ...] = ()
) -> Result:
    return function(*given, *fixed)


class _Trace(NamedTuple):
    """One trace: its tracer, forms of the weights met so far by identity, and whole-model calls."""

    tracer: Tracer
    weights: dict[int, _Form]
    calls: dict[Hashable, _Call]


class _Call(NamedTuple):
    """A call that was run.

    done    the call's effects, as the tracer returned them
    held    identity of each allocation in its arguments, and the byte at which tensors begin there
    result  with a `_View` in place of each tensor
    made    bytes of each allocation that the result has and the arguments have not
    """

    done: object
    held: tuple[tuple[int, int], ...]
    result: Any
    made: Mapping[int, int]


class _Repeats:
    """Calls by their form. Objects without a form stay there as long as this does."""

    def __init__(self, trace: _Trace, calls: dict[Hashable, _Call]) -> None:
        self._tracer, self._weights, _ = trace
        self._calls = calls
        # The fixed arguments, their key, and their allocations.
        self._fixed: tuple[tuple[Any, ...], Hashable, _Forms] = (), None, _Forms(self._weights)

    def run(
        self, function: Callable[..., Result], given: tuple[Any, ...], fixed: tuple[Any, ...] = ()
    ) -> Result:
        with torch._C.DisableTorchFunction():
            key, held = self._form_of(function, given, fixed)
        known = self._calls.get(key)
        if known is not None:
            return cast(Result, self._repeat(known, held))
        self._tracer.begin()
        result = function(*given, *fixed)
        done = self._tracer.end()
        starts = {each.memory: each.start for each in held}
        with torch._C.DisableTorchFunction():
            forms = _Forms({})
            forms.key_of(result)
            made = {
                each.memory: each.tensor.untyped_storage().nbytes()
                for each in forms.held
                if each.memory not in starts
            }
            self._calls[key] = _Call(done, tuple(starts.items()), _described(result), made)
        return result

    def _form_of(
        self, function: Callable[..., Any], given: tuple[Any, ...], fixed: tuple[Any, ...]
    ) -> tuple[Hashable, list[_Place]]:
        """A call's form, which leaves out where its tensors lie, and the places of its tensors."""
        before, key, forms = self._fixed
        if len(before) != len(fixed) or any(map(operator.is_not, before, fixed)):
            forms = _Forms(self._weights)
            key = forms.key_of(fixed)
            self._fixed = fixed, key, forms
        forms = forms.copied()
        return (key, forms.key_of(function), *map(forms.key_of, given)), forms.held

    def _repeat(self, known: _Call, held: Sequence[_Place]) -> object:
        places = zip(known.held, held, strict=True)
        moved = {memory: (start, now.tensor) for (memory, start), now in places}

        def with_results() -> Moved:
            for memory in known.made.keys() - moved.keys():
                nbytes = known.made[memory]
                moved[memory] = 0, torch.empty(nbytes, dtype=torch.uint8, device="meta")
            return moved

        self._tracer.repeat(known.done, with_results)
        if known.result is None:
            return None
        found = with_results()
        with torch._C.DisableTorchFunction():
            return _restored(known.result, found)


class _View(NamedTuple):
    """A tensor as a view of its allocation, from a byte `start` on."""

    memory: int
    start: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def over(self, tensor: Tensor, start: int) -> Tensor:
        """This view over the allocation of `tensor`, from this byte on; `tensor` itself if it is
        equal.
        """
        if self._replace(memory=memory_of(tensor), start=start) == _view_of(tensor):
            return tensor
        view = torch.empty(0, dtype=self.dtype, device=tensor.device)
        offset = start // self.dtype.itemsize
        return view.set_(tensor.untyped_storage(), offset, self.size, self.stride)


def _view_of(tensor: Tensor) -> _View:
    size, stride = tuple(tensor.shape), tensor.stride()
    return _View(memory_of(tensor), start_of(tensor), tensor.dtype, size, stride)


class _Place(NamedTuple):
    """An allocation, by the first of its tensors that is met."""

    memory: int
    start: int
    tensor: Tensor


class _Form(NamedTuple):
    """A value's form, which leaves out where its tensors lie, and the places of its tensors."""

    key: Hashable
    held: list[_Place]


class _Forms:
    """Forms of values. `weights` keeps the forms of blocks' weights; new ones are added to it.

    Weights of blocks are alike whatever their names. An object of another class is alike only to
    itself.

    held  every allocation that was met
    """

    def __init__(self, weights: dict[int, _Form]) -> None:
        self.held: list[_Place] = []
        self._weights = weights
        # The number of each allocation, and where its first tensor begins.
        self._met: dict[int, tuple[int, int]] = {}

    def copied(self) -> _Forms:
        """A copy, to which further values may be added."""
        other = _Forms(self._weights)
        other.held, other._met = self.held.copy(), self._met.copy()
        return other

    def key_of(self, value: Any) -> Hashable:
        """A value's form, which leaves out where its tensors lie."""
        if isinstance(value, Tensor):
            place = _Place(memory_of(value), start_of(value), value)
            return self._number(place), value.dtype, value.shape, value.stride()
        if isinstance(value, tuple):
            return type(value), *map(self.key_of, value)
        if isinstance(value, BlockWeights):
            form = self._weights.get(id(value))
            if form is None:
                form = self._weights[id(value)] = _form_of_weights(value)
            return form.key, *map(self._number, form.held)
        if isinstance(value, dict | MappingProxyType):
            return tuple((name, self.key_of(each)) for name, each in value.items())
        if isinstance(value, float | int | str | None | torch.dtype):
            return value
        if isinstance(value, Launch):
            return type(value), *(self.key_of(getattr(value, each.name)) for each in fields(value))
        if isinstance(value, partial):
            return tuple(map(self.key_of, (value.func, value.args, value.keywords)))
        if isinstance(value, MethodType):
            return value.__func__, id(value.__self__)
        return id(value)

    def _number(self, place: _Place) -> Hashable:
        """The number of an allocation, and where in it a tensor begins after the first one."""
        memory, start, _ = place
        known = self._met.get(memory)
        if known is None:
            known = self._met[memory] = len(self.held), start
            self.held.append(place)
        return known[0], start - known[1], start % _ALIGNMENT


def _form_of_weights(block: BlockWeights) -> _Form:
    """The form of a block's weights, whatever their names."""
    names = [field.name for field in fields(block) if field.name not in ("block", "prefix")]
    forms = _Forms({})
    key = forms.key_of(tuple(getattr(block, name) for name in names))
    return _Form((type(block), block.block, key), forms.held)


def _described(value: Any) -> Any:
    """A result with a `_View` in place of each tensor."""
    if isinstance(value, Tensor):
        return _view_of(value)
    if isinstance(value, tuple):
        parts = [_described(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _restored(value: Any, moved: Moved) -> Any:
    """The result that `_described` describes, where its tensors are now."""
    if isinstance(value, _View):
        start, now = moved[value.memory]
        return value.over(now, value.start - start + start_of(now))
    if isinstance(value, tuple):
        parts = [_restored(each, moved) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
