"""Check the values that a load gives a field, and make them arrays of the field's dtype."""

from __future__ import annotations

import operator
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphengine.buckets.fields import NUMPY_DTYPES, Field


class LaneValues:
    """Reads values for a host-owned field's lanes. ValueError if its pad value does not fit."""

    __slots__ = ("dtype", "field", "lane_shape", "lanes")

    def __init__(self, field: Field) -> None:
        self.field = field
        self.dtype = NUMPY_DTYPES[field.dtype]
        self.lanes = field.shape[0]
        self.lane_shape = field.shape[1:]
        self._cast(np.asarray(field.pad))

    def read(self, value: Any) -> NDArray[Any]:
        """`value` as [n, *lane_shape] in the field's dtype, n <= lanes; ValueError if it is not."""
        plain = self._plain_numbers(value) if not self.lane_shape else self._plain_lists(value)
        if plain is not None:
            return plain
        array = _as_array(value)
        if array is None and not self.lane_shape:
            array = _as_array([self.field.pad if item is None else item for item in value])
        if array is None:
            return self._read_ragged(list(value))
        if array.ndim == 0 and self.field.shape == (1,):
            array = array.reshape(1)
        if array.ndim == 0:
            raise self.error(f"takes a list of up to {self.lanes} lanes, got {value!r}")
        self._require_lanes(len(array))
        if len(array) == 0:
            return np.empty((0, *self.lane_shape), self.dtype)
        if array.shape[1:] == self.lane_shape:
            return self._cast(array)
        return self._padded(array, self.field.shape)

    def _plain_numbers(self, value: Any) -> NDArray[Any] | None:
        """`value` as an array if it is a list of Python's numbers and None, for a field of numbers.

        Most loads have such values: a check with arrays takes 10 us a field, and a request that
        starts sets 15 fields. None for all else, and for values that may be out of range.
        """
        if not isinstance(value, list | tuple) or len(value) > self.lanes:
            return None
        types = set(map(type, value))
        if NoneType in types:
            value = [self.field.pad if item is None else item for item in value]
            types = set(map(type, value))
        dtype = self.dtype
        plain = {int, float} if dtype == np.float32 else {int} if dtype.kind == "i" else set()
        if not types or not types <= plain:
            return None
        # NaN is not below anything, and an array holds no integers of more than 64 bits.
        if dtype.kind == "f" and not all(abs(item) < 2**63 for item in value):
            return None
        try:
            return np.array(value, dtype)
        except OverflowError:
            return None

    def _plain_lists(self, value: Any) -> NDArray[Any] | None:
        """`value` as an array if it is a list of lists of Python's integers, or None, that fit.

        Block tables are such lists. None for all else.
        """
        if not isinstance(value, list) or not 0 < len(value) <= self.lanes:
            return None
        values = np.full((len(value), *self.lane_shape), self.field.pad, dtype=self.dtype)
        lanes = zip(values, value, strict=True)
        fits = (item is None or self._store_integers(lane, item) for lane, item in lanes)
        return values if all(fits) else None

    def _read_ragged(self, items: list[Any]) -> NDArray[Any]:
        self._require_lanes(len(items))
        values = np.full((len(items), *self.lane_shape), self.field.pad, dtype=self.dtype)
        for lane, item in enumerate(items):
            if item is None:
                continue
            array = _as_array(item)
            if array is None:
                raise self.error(f"lane {lane} is no array of numbers: {item!r}")
            values[lane] = self._padded(array, self.lane_shape)
        return values

    def _store_integers(self, lane: NDArray[Any], item: Any) -> bool:
        """Put a list of integers that fits into its lane; False for all else.

        A check with arrays takes 6 us a lane.
        """
        if not isinstance(item, list | tuple) or lane.ndim != 1 or lane.dtype.kind not in "iu":
            return False
        if len(item) > len(lane) or any(type(value) is not int for value in item):
            return False
        try:
            lane[: len(item)] = item
        except OverflowError:
            return False
        return True

    def _padded(self, array: NDArray[Any], room: tuple[int, ...]) -> NDArray[Any]:
        """`array`, cast, in the corner of a padded array that is as wide as `room` allows."""
        values = np.full(room, self.field.pad, dtype=self.dtype)
        if array.size > 0:
            if array.ndim != len(room) or any(map(operator.gt, array.shape, room)):
                raise self.error(f"values of shape {array.shape} do not fit in {room}")
            values[tuple(slice(extent) for extent in array.shape)] = self._cast(array)
        return values

    def _require_lanes(self, count: int) -> None:
        if count > self.lanes:
            raise self.error(f"has {self.lanes} lanes, got {count}")

    def _cast(self, array: NDArray[Any]) -> NDArray[Any]:
        dtype = self.dtype
        if array.dtype == dtype:
            return array
        if array.dtype.kind not in ("biuf" if dtype.kind == "f" else "biu"):
            raise self.error(f"takes {dtype}, got {array.dtype} such as {array.flat[0]!r}")
        with np.errstate(over="ignore"):
            values = array.astype(dtype)
        if not np.can_cast(array.dtype, dtype):
            lost = np.isinf(values) & ~np.isinf(array) if dtype.kind == "f" else values != array
            if lost.any():
                raise self.error(f"takes {dtype}, {array[lost][0]} is outside its range")
        return values

    def error(self, what: str) -> ValueError:
        """An error about the field."""
        return ValueError(f"field {self.field.name!r} {what}")


def _as_array(value: Any) -> NDArray[Any] | None:
    """`value` as an array; None if numpy cannot make a rectangular array of numbers of it."""
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return None if array.dtype == object and array.ndim > 0 else array
