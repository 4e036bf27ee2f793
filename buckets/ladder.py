"""The ladder of buckets: which captured graph serves a given number of rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class BucketLadder:
    """The sorted row counts that graphs are captured for; it ends at exactly `max_batch`.

    By default 1, 2, 4, 8, then steps of 8, then `max_batch`. `sizes` replaces these: positive ints
    in any order, duplicates allowed, the largest equal to `max_batch`. Immutable.

    Raises ValueError, with the numbers, for a size or `max_batch` that is not a positive int and
    for sizes that do not end at `max_batch`.
    """

    __slots__ = ("max_batch", "sizes")

    def __init__(self, max_batch: int, sizes: Iterable[int] | None = None) -> None:
        _require_positive("max_batch", max_batch)
        if sizes is None:
            sizes = [size for size in (1, 2, 4, *range(8, max_batch, 8)) if size < max_batch]
            sizes.append(max_batch)
        wanted = list(sizes)
        for size in wanted:
            _require_positive("bucket size", size)
        ladder = tuple(sorted(set(wanted)))
        if not ladder:
            raise ValueError(
                f"a ladder needs at least one size, the last one max_batch={max_batch}"
            )
        if ladder[-1] != max_batch:
            raise ValueError(f"buckets {ladder} end at {ladder[-1]}, not at max_batch={max_batch}")
        self.max_batch = max_batch
        self.sizes = ladder

    def pick(self, rows: int) -> int:
        """The smallest size that holds `rows`; ValueError with both numbers if there is none."""
        if not 1 <= rows <= self.max_batch:
            raise ValueError(f"{rows} rows: the buckets hold 1 to {self.max_batch}")
        return self.sizes[bisect_left(self.sizes, rows)]

    def __repr__(self) -> str:
        return f"BucketLadder(max_batch={self.max_batch}, sizes={self.sizes})"


def _require_positive(what: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{what} must be a positive int, got {number!r}")
