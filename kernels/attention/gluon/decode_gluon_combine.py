"""How `decode_gluon.py` stores the results of splits and combines them.

Letters as in `decode_gluon.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.attention.gluon.decode_gluon_units import first_split, heads_of
from graphengine.kernels.core.triton_versions import sync_threads

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3e38)
"""Finite and below every score: the largest score of no tokens."""


class SplitResults(NamedTuple):
    """Results of splits, float32: sums [..., D], largest scores, sums of weights."""

    acc: Any
    max: Any
    sum: Any


@gluon.constexpr_function
def sums_layout(columns):
    """Layout of float32 [rows, D'] with 16 bytes per thread."""
    across = min(columns // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _store_rows(out_ptr, result, unit, row, shape):
    """Store rows of a unit's result [rows, D'] for the live lanes."""
    dim = gl.arange(0, shape.padded, gl.SliceLayout(0, result.type.layout))
    head, _, live = heads_of(unit, row, shape)
    ptrs = (out_ptr + head.to(gl.int64) * shape.D)[:, None] + dim[None, :]
    mask = live[:, None] & (dim < shape.D)[None, :]
    gl.store(ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _store_result(out_ptr, state, sinks_ptr, unit, row, shape):
    """Divide sums [rows, D'] by their sums of weights [rows], and store them by `_store_rows`."""
    acc, largest, total = state
    if sinks_ptr is not None:
        head, _, live = heads_of(unit, row, shape)
        sink = gl.load(sinks_ptr + head % shape.Q, mask=live, other=0.0)
        total += gl.exp2(sink * LOG2E - largest)
    _store_rows(out_ptr, acc / total[:, None], unit, row, shape)


@gluon.jit
def _store_part(parts, state, part, live, shape):
    """Store sums [rows, D'], largest scores and sums of weights [rows] as parts number `part`."""
    acc, largest, total = state
    dim = gl.arange(0, shape.padded, gl.SliceLayout(0, acc.type.layout))
    ptrs = (parts.acc + part * shape.D)[:, None] + dim[None, :]
    gl.store(ptrs, acc, mask=live[:, None] & (dim < shape.D)[None, :])
    gl.store(parts.max + part, largest, mask=live)
    gl.store(parts.sum + part, total, mask=live)


@gluon.jit
def _is_last(counter_ptr, arriving, expected):
    """Whether these arrivals complete the expected ones; if so, reset the counter."""
    # Orders the stores of all threads before the one thread's release.
    sync_threads()
    last = gl.atomic_add(counter_ptr, arriving, sem="acq_rel") + arriving == expected
    if last:
        gl.store(counter_ptr, 0)
    return last


@gluon.jit
def keep_split(results, state, unit, rows, waiting, u, end, shape):
    """Store the result of unit number `u`, or keep it as a part; return how many parts now wait.

    Parts of a program arrive together: with the last unit before `end`, of a head, or of a group of
    `super` splits. `rows` are the product's rows, their heads, and which of them are live.
    """
    row, head, live = rows
    parts, _, _, out_ptr, sinks_ptr, splits, _ = results
    if unit.row_splits - first_split(unit, shape) == 1:
        _store_result(out_ptr, state, sinks_ptr, unit, row, shape)
    else:
        part = head.to(gl.int64) * splits + unit.split
        _store_part(parts, state, part, live, shape)
        waiting += 1
        after = unit.split + 1
        if (after == unit.row_splits) | (after % shape.super == 0) | (u + 1 == end):
            _arrive(results, waiting, unit, shape)
            waiting = 0
    return waiting


@gluon.jit
def _arrive(results, arriving, unit, shape):
    """Report that `arriving` splits, up to the unit's, are done; the last program combines them.

    More than `super` splits are first combined in groups of `super`.
    """
    _, _, arrivals_ptr, _, _, _, supers = results
    head = unit.row * (shape.G * shape.row_tiles) + unit.head
    counters_ptr = arrivals_ptr + head * (supers + 1)
    at = unit.split // shape.super
    expected = gl.minimum(unit.row_splits - at * shape.super, shape.super)
    if shape.window > 0:
        # With a window there is one group of splits.
        expected -= first_split(unit, shape)
    CHUNKS: gl.constexpr = shape.rows // shape.combine_rows
    if _is_last(counters_ptr + at, arriving, expected):
        for chunk in gl.static_range(CHUNKS):
            _combine_splits(results, unit, chunk, shape)
        row_supers = (unit.row_splits + shape.super - 1) // shape.super
        # Not `and`, which would evaluate both sides: `_is_last` changes the counter.
        whole = False
        if row_supers > 1:
            whole = _is_last(counters_ptr + supers, 1, row_supers)
        if whole:
            for chunk in gl.static_range(CHUNKS):
                _combine_supers(results, unit, chunk, shape)


@gluon.jit
def _combine_splits(results, unit, chunk, shape):
    """Combine some rows of the unit's group of `super` splits into the result or a part of it."""
    parts, super_parts, _, out_ptr, sinks_ptr, splits, supers = results
    layout: gl.constexpr = sums_layout(shape.padded)
    first_row = chunk * shape.combine_rows
    row = first_row + gl.arange(0, shape.combine_rows, gl.SliceLayout(1, layout))
    head, position, live = heads_of(unit, row, shape)
    at = unit.split // shape.super
    first = at * shape.super
    count = gl.minimum(unit.row_splits - first, shape.super)
    used = gl.where(live, position // shape.split + 1 - first, 0)
    part = head.to(gl.int64) * splits + first
    begin = first_split(unit, shape)
    acc, largest, total = _combine(parts, part, used, begin, count, shape)
    if unit.row_splits <= shape.super:
        _store_result(out_ptr, (acc, largest, total), sinks_ptr, unit, row, shape)
    else:
        super_part = head.to(gl.int64) * supers + at
        _store_part(super_parts, (acc, largest, total), super_part, live & (used > 0), shape)


@gluon.jit
def _combine_supers(results, unit, chunk, shape):
    """Combine some rows of all parts that `_combine_splits` left for the unit's head."""
    _, super_parts, _, out_ptr, sinks_ptr, _, supers = results
    layout: gl.constexpr = sums_layout(shape.padded)
    first_row = chunk * shape.combine_rows
    row = first_row + gl.arange(0, shape.combine_rows, gl.SliceLayout(1, layout))
    head, position, live = heads_of(unit, row, shape)
    used = gl.where(live, position // (shape.split * shape.super) + 1, 0)
    count = (unit.row_splits + shape.super - 1) // shape.super
    state = _combine(super_parts, head.to(gl.int64) * supers, used, 0, count, shape)
    _store_result(out_ptr, state, sinks_ptr, unit, row, shape)


@gluon.jit
def _combine(parts, part, used, begin, count, shape):
    """Weigh the `used` parts of each row, from `part` on, by their largest scores, in order.

    Parts before `begin` do not exist, and no row has more than `count`. `combine_splits` parts at a
    time share a maximum, so their loads do not wait for each other.
    """
    layout: gl.constexpr = sums_layout(shape.padded)
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    dim = gl.arange(0, shape.padded, gl.SliceLayout(0, layout))
    running_max = gl.full([shape.combine_rows], LOWEST, gl.float32, of_row)
    running_sum = gl.zeros([shape.combine_rows], gl.float32, of_row)
    acc = gl.zeros([shape.combine_rows, shape.padded], gl.float32, layout)
    if shape.window > 0:
        # So that a row's bits do not depend on where others begin.
        start_at = begin // shape.combine_splits * shape.combine_splits
    else:
        start_at = 0
    for start in range(start_at, count, shape.combine_splits):
        maxima = ()
        sums = ()
        accs = ()
        for i in gl.static_range(shape.combine_splits):
            there = start + i < used
            if shape.window > 0:
                there &= start + i >= begin
            at = part + start + i
            ptrs = (parts.acc + at * shape.D)[:, None] + dim[None, :]
            mask = there[:, None] & (dim < shape.D)[None, :]
            largest = gl.load(parts.max + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            total = gl.load(parts.sum + at, mask=there, other=0.0, cache_modifier=".cg")
            part_acc = gl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
            maxima += (largest,)  # type: ignore[assignment]
            sums += (total,)  # type: ignore[assignment]
            accs += (part_acc,)  # type: ignore[assignment]
        new_max = running_max
        for i in gl.static_range(shape.combine_splits):
            new_max = gl.maximum(new_max, maxima[i])
        rescale = gl.exp2(running_max - new_max)
        running_sum *= rescale
        acc *= rescale[:, None]
        for i in gl.static_range(shape.combine_splits):
            weight = gl.exp2(maxima[i] - new_max)
            running_sum += weight * sums[i]
            acc += weight[:, None] * accs[i]
        running_max = new_max
    return acc, running_max, running_sum
