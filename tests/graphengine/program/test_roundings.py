"""What tests grant to float32: as much as any order of summation costs, and no fault's worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from launches.rounding_bounds import assert_best, condition, in_float64, room_of


def linear_of(columns: Tensor | None) -> Any:
    """F.linear that sums in the order of these columns; of None with one accumulator."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if columns is not None:
            order = columns[columns < weight.shape[1]]
            y = x[..., order] @ weight[:, order].T
        else:
            y = x.new_zeros(*x.shape[:-1], weight.shape[0])
            for k in range(weight.shape[1]):
                y = torch.addcmul(y, x[..., k, None], weight[:, k])
        return y if bias is None else y + bias

    return linear


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied-128", "demo"])
def test_orders_of_summation_stay_within_the_room(
    checkpoints: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoints[name].model
    (prompt,) = checkpoints[name].prompts((40,))
    exact = in_float64(model)(torch.tensor([prompt])).logits[0]
    room = room_of(model, exact)[:, None]
    generator = torch.Generator().manual_seed(0)
    for order in (None, *(torch.randperm(1024, generator=generator) for _ in range(2))):
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", linear_of(order))
            found = model(torch.tensor([prompt])).logits[0].double()
        for errors in (found - exact, found.log_softmax(-1) - exact.log_softmax(-1)):
            worst = float((errors.abs() / room).max())
            # Too large a room would hide faults.
            assert 0.02 < worst < 0.6, f"{worst=} of the room, {order=}"


def test_the_condition_is_a_number_of_the_model(checkpoints: dict[str, Any]) -> None:
    model = checkpoints["llama-biases"].model
    assert condition(model) == pytest.approx(condition.__wrapped__(model), rel=1e-6)
    doubled = room_of(model, torch.tensor([[3.0, -4.0], [1.0, -torch.inf]])) * 2
    assert torch.equal(doubled, room_of(model, torch.tensor([[8.0, 0.0], [0.0, 2.0]])))


def test_near_ties_are_bounded_and_counted() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0 - 1e-5], [5.0, 5.0 - 1e-5, 0.0]], dtype=torch.float64)
    room = torch.full((2,), 6e-6)
    for tokens in ((1, 0), (2, 0), (1, 1)):
        assert_best(tokens, scores, room, "these")
    with pytest.raises(AssertionError, match=r"these: 2 of 2 tokens are not the best"):
        assert_best((2, 1), scores, room, "these")
    with pytest.raises(AssertionError, match=r"these: token 1 is 1, 1e-05 less than the best"):
        assert_best((1, 1), scores, room / 2, "these")
    with pytest.raises(AssertionError, match=r"token 0 is 0, 1 less"):
        assert_best((0, 0), scores, room, "these")
