"""Triton's interpreter as tests use it: three faults mended, and four times as fast.

It remembers what it otherwise works out again for each operation. Seen with triton 3.6 on tests of
decode attention: a sixth of the time went to patching the language for each launch and each call of
a device function, and nearly half to describing types and shapes. Of what was left, a quarter went
to overflow checks that nobody hears of.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def prepare_interpreter() -> None:
    """For the rest of the process, in which kernels are interpreted and none is compiled."""
    _mend_loops()
    _mend_masks()
    _check_nothing_in_vain()
    _patch_once()
    _remember_shapes()
    _remember_dtypes()
    _remember_promotions()
    _keep_what_fits()
    _multiply_in_double()


def _mend_loops() -> None:
    """numpy 2.4 refuses `int(array([3]))`, by which triton 3.6 reads a loop's bounds."""
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_index


def _mend_masks() -> None:
    """A block of a bool holds bools. The interpreter makes it one of what was compared to get the
    bool, and from triton 3.9 on it refuses that as a mask.
    """
    splat = interpreter.InterpreterBuilder.create_splat

    def splat_as_it_is(self: Any, kind: Any, value: Any) -> Any:
        if value.data.dtype != np.bool_:
            return splat(self, kind, value)
        return interpreter.TensorHandle(np.full(kind.shape, value.data), tl.int1)

    interpreter.InterpreterBuilder.create_splat = splat_as_it_is


def _check_nothing_in_vain() -> None:
    """Sums and products of integers are computed again in 64 bits for an assertion, which asserts
    in debug mode only.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once() -> None:
    """The language stays patched for good; Triton patches it for each launch, and device functions
    leave it patched anyway.
    """
    patch, patched, seen = interpreter._patch_lang, set[str](), set[Any]()

    def patch_lang(fn: Any) -> interpreter._LangPatchScope:
        if fn in seen:
            return interpreter._LangPatchScope()
        seen.add(fn)
        languages = {
            value.__name__
            for value in fn.__globals__.values()
            if inspect.ismodule(value) and value in (tl, core)
        }
        if not languages or languages - patched:
            patch(fn)
            patched.update(languages)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang


def _remember_dtypes() -> None:
    """NumPy's of scalars, pointers and blocks of them."""
    find, found = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind)
        return found[name]

    interpreter._get_np_dtype = np_dtype


def _remember_shapes() -> None:
    init_type, init_tensor = core.block_type.__init__, core.tensor.__init__
    with_element, to_ir = core.block_type.with_element_ty, core.block_type.to_ir
    equal = core.tuple.__eq__
    types: dict[Any, dict[str, Any]] = {}
    others, stored = dict[Any, Any](), dict[Any, Any]()
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def plain(values: Any) -> Any:
        """The values of one of Triton's tuples; anything else stays."""
        values = values.value if isinstance(values, core.constexpr) else values
        return values.values if isinstance(values, core.tuple) else values

    def named(element_ty: Any) -> tuple[str, int | None]:
        return element_ty.name, getattr(element_ty, "address_space", None)

    def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(core._unwrap_if_constexpr(size) for size in plain(shape))
        key = (*named(element_ty), sizes)
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    # `types` keeps every shape, so that its id is of no other.
    def block_with_element(self: Any, element_ty: Any) -> Any:
        key = (*named(element_ty), id(self.shape))
        if key not in others:
            others[key] = with_element(self, element_ty)
        return others[key]

    def block_to_ir(self: Any, builder: Any) -> Any:
        key = (*named(self.element_ty), id(self.shape))
        if key not in stored:
            stored[key] = to_ir(self, builder)
        return stored[key]

    def tensor_init(self: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape) if kind.is_block() else ()
        if sizes not in shapes:
            init_tensor(self, handle, kind)
            shapes[sizes] = (self.numel, self.shape)
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shapes[sizes]

    def tuple_eq(self: Any, other: Any) -> Any:
        other = plain(other)
        if isinstance(other, list | tuple):
            return core.constexpr(self.values == list(other))
        return equal(self, other)

    core.block_type.__init__ = block_type_init
    core.block_type.with_element_ty, core.block_type.to_ir = block_with_element, block_to_ir
    core.tensor.__init__ = tensor_init
    core.tuple.__eq__ = tuple_eq


def _remember_promotions() -> None:
    """The dtype in which an operation on two others is computed."""
    find, found = TritonSemantic.computation_type_impl, dict[Any, Any]()

    def computation_type(self: Any, left: Any, is_number: bool, right: Any, *others: bool) -> Any:
        key = (left.name, is_number, right.name, *others)
        if key not in found:
            found[key] = find(self, left, is_number, right, *others)
        return found[key]

    TritonSemantic.computation_type_impl = computation_type


def _keep_what_fits() -> None:
    """Tensors that have the dtype or the shape already: Triton finds so, too, but after long."""
    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value

    def cast_others(self: Any, tensor: Any, kind: Any, *options: Any, **named: Any) -> Any:
        return tensor if tensor.dtype is kind else cast(self, tensor, kind, *options, **named)

    def broadcast_others(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        # `_remember_shapes` has one object for each shape.
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    TritonSemantic.cast, TritonSemantic.broadcast_impl_value = cast_others, broadcast_others


def _multiply_in_double() -> None:
    """A row of a product has the same bits wherever it stands in a block, as on a GPU.

    NumPy's BLAS sums the rows at a block's end in another order on some processors. In float64 that
    order is lost when the sum is rounded to float32.
    """
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        # Floats of 8 bits are stored as integers.
        if d.data.dtype != np.float32 or not all(each.data.dtype.kind == "f" for each in (a, b)):
            return dot(self, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
