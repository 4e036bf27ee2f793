"""assert_outputs_written: which elements a replay writes, and whether it reads them first."""

from __future__ import annotations

import pytest
import torch

from graphengine.testing import GraphCheckError, assert_outputs_written

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_shows_what_was_not_written(dtype: torch.dtype) -> None:
    y, zeros = torch.zeros(2, 3).to(dtype), torch.zeros(2, 3).to(dtype)
    before = y.clone()
    assert_outputs_written(lambda: y.copy_(zeros), {"y": y})
    message = r"a replay did not write 3 of 6 elements of y .*, first at \[1, 0\]: they still hold"
    with pytest.raises(GraphCheckError, match=message):
        assert_outputs_written(lambda: y[:1].copy_(zeros[:1]), {"y": y})
    # The contents are put back, after an error too.
    assert torch.equal(y.view(torch.uint8), before.view(torch.uint8))


def test_padding_need_not_be_written() -> None:
    y = torch.zeros(8)
    assert_outputs_written(lambda: y[:5].fill_(1), {"y": y}, padding={"y": slice(5, None)})
    with pytest.raises(GraphCheckError, match=r"did not write 1 of 8 elements of y"):
        assert_outputs_written(lambda: y[:5].fill_(1), {"y": y}, padding={"y": slice(6, None)})


def test_an_output_that_is_read_first_is_told() -> None:
    y = torch.zeros(4)
    message = r"reads an output before it writes it: .* changed y \(float32 \[4\]\), first at row 0"
    with pytest.raises(GraphCheckError, match=message):
        assert_outputs_written(lambda: y.add_(1), {"y": y})


def test_state_is_restored_before_each_replay() -> None:
    y, position = torch.zeros(1), torch.zeros(1)

    def replay() -> None:
        position.add_(1)
        y.copy_(position)

    assert_outputs_written(replay, {"y": y}, state={"position": position})
    assert position.item() == 0
    with pytest.raises(
        GraphCheckError, match="Zero it in the captured step, or name it in `state`"
    ):
        assert_outputs_written(replay, {"y": y})


def test_random_numbers_are_the_same_in_both_replays() -> None:
    y = torch.zeros(8)
    torch.manual_seed(3)
    assert_outputs_written(y.uniform_, {"y": y})
    first = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(1)), "the program's own numbers go on as before"


def test_arguments_with_which_nothing_is_checked_are_refused() -> None:
    y = torch.zeros(4)
    with pytest.raises(ValueError, match="no outputs to poison: 1 tensors with 0 elements"):
        assert_outputs_written(lambda: None, {"y": y[:0]})
    with pytest.raises(ValueError, match="y cannot be both outputs and state"):
        assert_outputs_written(lambda: None, {"y": y}, state={"y": y})
    with pytest.raises(ValueError, match="replay=7 is not callable"):
        assert_outputs_written(7, {"y": y})  # type: ignore[arg-type]
