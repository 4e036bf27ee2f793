"""BucketLadder: its default sizes, its checks, and pick against a linear search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphengine.buckets import BucketLadder


@pytest.mark.parametrize(
    ("max_batch", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (16, (1, 2, 4, 8, 16)),
        (30, (1, 2, 4, 8, 16, 24, 30)),
    ],
)
def test_default_sizes(max_batch: int, sizes: tuple[int, ...]) -> None:
    assert BucketLadder(max_batch).sizes == sizes


@given(max_batch=st.integers(1, 300), data=st.data())
def test_pick_is_the_smallest_size_that_holds_the_rows(max_batch: int, data: st.DataObject) -> None:
    custom = st.lists(st.integers(1, max_batch)).map(lambda sizes: [*sizes, max_batch])
    ladder = BucketLadder(max_batch, data.draw(st.none() | custom))
    assert ladder.sizes[-1] == max_batch
    assert list(ladder.sizes) == sorted(set(ladder.sizes))
    rows = data.draw(st.integers(1, max_batch))
    assert ladder.pick(rows) == min(size for size in ladder.sizes if size >= rows)


def test_custom_sizes_are_sorted_and_deduplicated() -> None:
    assert BucketLadder(8, [8, 2, 2, 1]).sizes == (1, 2, 8)


@pytest.mark.parametrize("rows", [0, -1, 9])
def test_rows_that_no_bucket_holds(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"{rows} rows.* 8$"):
        BucketLadder(8).pick(rows)


@pytest.mark.parametrize("sizes", [[0, 8], [-1, 8], [1.5, 8], [True, 8], ["4", 8]])
def test_sizes_that_are_no_row_counts(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="positive int, got"):
        BucketLadder(8, sizes)


@pytest.mark.parametrize("sizes", [[1, 4], [1, 16], []])
def test_sizes_must_end_at_max_batch(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="max_batch=8"):
        BucketLadder(8, sizes)


@pytest.mark.parametrize("max_batch", [0, -3, 2.0, True])
def test_max_batch_must_be_a_positive_int(max_batch: int) -> None:
    with pytest.raises(ValueError, match="max_batch must be a positive int"):
        BucketLadder(max_batch)
