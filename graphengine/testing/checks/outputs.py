"""A check that a replay writes every element of its outputs, and reads none of them first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from graphengine.testing.arguments import require_callable
from graphengine.testing.checks.poison import POISONS, Poison, fill
from graphengine.testing.errors import GraphCheckError, hide_frame
from graphengine.testing.regions import Region, padding_masks
from graphengine.testing.tensors import (
    Buffers,
    describe,
    describe_difference,
    differing,
    named_tensors,
    random_state_kept,
    require_writable,
    restore,
    run_and_wait,
    save,
)

__tracebackhide__ = hide_frame

# The two differ in every dtype, bool included: an element that keeps both was not written. The
# second is finite, because adding to a NaN or an infinity leaves it unchanged.
_TWO = (POISONS[0], Poison(name="-1", floating=-1.0, integer=-1))

_SEED = 0


def assert_outputs_written(
    replay: Callable[[], object],
    outputs: Buffers,
    *,
    state: Buffers | None = None,
    padding: Mapping[str, Region] | None = None,
) -> None:
    """GraphCheckError if a replay leaves an element of `outputs` unwritten, or reads it first.

    A warm-up has left the right values in the outputs, so a graph that writes nothing still looks
    right. Here they are overwritten with NaN (integers: the largest) before one replay and with -1
    before another. An element that still has both poisons was not written. An element that differs
    between the replays was computed from its old contents, as by `atomic_add` into memory that is
    not zeroed.

    state    other tensors that a replay changes; restored before each replay, as are torch's
             random numbers. Leave out inputs that stay as they are.
    padding  the parts of outputs that need not be written, as for `poison_padding`

    At the end all tensors have their old contents. ValueError if there is nothing to write.
    """
    require_callable("replay", replay)
    tensors = named_tensors(outputs)
    others = {} if state is None else named_tensors(state)
    if not any(tensor.numel() for tensor in tensors.values()):
        raise ValueError(f"no outputs to poison: {len(tensors)} tensors with 0 elements")
    if twice := sorted(tensors.keys() & others.keys()):
        raise ValueError(f"{', '.join(twice)} cannot be both outputs and state")
    require_writable({**tensors, **others})
    excepted = {} if padding is None else padding_masks(outputs, tensors, padding, None)
    both = {**tensors, **others}
    original = save(both)
    with random_state_kept():
        try:
            runs = []
            for poison in _TWO:
                restore(both, original)
                runs.append(_left_by(replay, tensors, poison))
        finally:
            restore(both, original)
    for name in tensors:
        pairs = [(before[name], after[name]) for before, after in runs]
        _require_written(name, pairs, excepted.get(name))


Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""A tensor's contents before and after each of the two replays."""


def _left_by(
    replay: Callable[[], object], tensors: Mapping[str, torch.Tensor], poison: Poison
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All outputs as they were poisoned, and as a replay left them."""
    for tensor in tensors.values():
        fill(tensor, torch.ones_like(tensor, dtype=torch.bool), poison)
    before = save(tensors)
    torch.manual_seed(_SEED)
    run_and_wait(replay)
    return before, save(tensors)


def _require_written(name: str, pairs: Pairs, excepted: torch.Tensor | None) -> None:
    (poisoned, first), (poisoned_again, second) = pairs
    unwritten = ~differing(poisoned, first) & ~differing(poisoned_again, second)
    changed = differing(first, second)
    if excepted is not None:
        unwritten, changed = unwritten & ~excepted, changed & ~excepted
    if unwritten.any():
        place = [int(index) for index in unwritten.nonzero()[0]]
        raise GraphCheckError(
            f"a replay did not write {int(unwritten.sum())} of {unwritten.numel()} elements of "
            f"{name} ({describe(first)}), first at {place}: they still hold what they were "
            "poisoned with. What an earlier step left there is taken for a result; write them in "
            "the captured step, or name them in `padding`"
        )
    if changed.any():
        sides = tuple(f"over {poison.name!r}" for poison in _TWO)
        what = describe_difference(name, first, second, changed, sides=(sides[0], sides[1]))
        raise GraphCheckError(
            f"a replay reads an output before it writes it: what was there before changed {what}. "
            "Zero it in the captured step, or name it in `state` if it is carried on purpose"
        )
