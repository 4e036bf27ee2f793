"""The error allowed for float32, whatever the order of its sums.

A BLAS sums in an order that depends on the CPU's vector unit, a GPU in another one. So tests
compare float32 with transformers' model in float64, and allow the error of the arithmetic, not what
one machine shows. The model runs again in float64 with a random error in place of each rounding of
float32 (Monte Carlo arithmetic: D. S. Parker, 1997). The spread of its logits is its condition:
about the same number on every machine.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

UNIT = 2.0**-24
"""The unit roundoff of float32: the largest relative error of one result."""

DEVIATIONS = 8
"""Standard deviations that are allowed. Real orders of summation reach a quarter of them."""

AROUND = 16
"""Roundings outside the model: of penalties, log-sum-exp, and an exponential on a GPU."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_EXACT = ("clone", "_to_copy", "cat", "neg", "embedding", "where", "masked_fill", "zeros", "arange")


class Roundings(TorchDispatchMode):
    """Arithmetic in float64 with errors as large as those of float32 with one accumulator.

    In a sum of K terms, each of the K partial sums is rounded, and each is about as large as the
    root of the terms' squares. All other operations round their results once.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.dtype != torch.float64:
            return result
        name = func.overloadpacket.__name__
        if func.is_view or name in _EXACT:
            return result
        noise = torch.randn(result.shape, generator=self._generator, dtype=torch.float64)
        if name in _PRODUCTS:
            left, right = args[-2:]
            squares = torch.matmul(left.square(), right.square())
            return result + UNIT * (left.shape[-1] * squares).sqrt() * noise
        return result * (1 + UNIT * noise / 3**0.5)


@functools.cache
def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).double()


@functools.cache
@torch.no_grad()
def condition(model: PreTrainedModel, tokens: int = 40, copies: int = 4) -> float:
    """The standard deviation of the model's logits and log-probabilities in float32.

    In units of `UNIT` times the largest logit of a position, over random tokens.
    """
    wide = copy.deepcopy(in_float64(model))
    # Attention as products, each of which rounds.
    wide.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, tokens), generator=generator)
    exact = wide(ids).logits
    with Roundings(seed=0):
        noisy = wide(ids.expand(copies, -1)).logits
    room = UNIT * exact.abs().amax(-1, keepdim=True)
    errors = (noisy - exact, noisy.log_softmax(-1) - exact.log_softmax(-1))
    return max(float((error / room).square().mean().sqrt()) for error in errors)


def room_of(model: PreTrainedModel, *logits_TV: Tensor) -> Tensor:
    """Float64 `[T]`: the error allowed for a logit or log-probability of these in float32.

    Of several tensors, such as logits before and after penalties, the largest logit counts.
    """
    largest = [each.nan_to_num(neginf=0.0).abs().amax(-1) for each in logits_TV]
    granted = DEVIATIONS * condition(model) + AROUND
    return UNIT * granted * torch.stack(largest).amax(0).double()


def assert_best(token_ids: Sequence[int], scores_TV: Tensor, room_T: Tensor, what: object) -> None:
    """Each token has the best score; at most one has a score that rounding may make the best.

    Two scores nearer than twice their room are seen once in thousands of tokens.
    """
    assert len(token_ids) == len(scores_TV)
    if not token_ids:
        return
    scores = scores_TV.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    gap_T = scores_TV.amax(1) - scores
    for index, (token, gap, room) in enumerate(zip(token_ids, gap_T, room_T, strict=True)):
        best, ids = scores_TV[index].topk(min(2, scores_TV.shape[1]))
        assert gap <= 2 * room, (
            f"{what}: token {index} is {token}, {gap:.3g} less than the best where {room:.1g} is "
            f"granted: those are {ids.tolist()}, {best.tolist()}"
        )
    ties = int((gap_T > 0).sum())
    assert ties <= 1, f"{what}: {ties} of {len(token_ids)} tokens are not the best"
