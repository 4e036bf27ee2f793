"""Updates the weights of a drafter that has a checkpoint of its own, in an open engine.

As with the target's weights, everything is checked before a value is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from graphengine.drafters import Drafter
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.given_tensors import GivenTensors
from graphengine.opening.updating import check_finite, check_plain, check_value, named_tensors
from graphengine.options.checks import some


def checked_drafts(
    drafter: Drafter,
    source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | PathLike[str],
) -> GivenTensors:
    """The tensors, once it is checked that all of them can be loaded into the drafter.

    source  tensors by their names in the drafter's checkpoint, all or some; or the directory of a
            checkpoint that has all tensors in use

    ValueError, with the name and both values, for a tensor that cannot be loaded. Nothing is
    changed.
    """
    own = drafter.own_checkpoint
    if own is None:
        raise ValueError(
            "draft_weights= is for a drafter with a checkpoint of its own, such as Eagle3: the "
            "others are updated with the model's tensors"
        )
    check_plain(own)
    if not isinstance(source, str | PathLike):
        read_as = {stored: name for name, stored in own.stored_names.items()}
        values = {read_as.get(name, name): each for name, each in named_tensors(source).items()}
        _check(drafter, own, values)
        return GivenTensors.in_place_of(own, values)
    checkpoint = Checkpoint.open(source)
    check_plain(checkpoint)
    values = dict(checkpoint.mapped())
    missing = sorted(drafter.own_destinations().keys() - values.keys())
    if missing:
        raise ValueError(
            f"{checkpoint.path} lacks {len(missing)} tensors of the drafter that are in use: "
            f"{some(missing)}"
        )
    _check(drafter, own, values)
    return GivenTensors.in_place_of(own, values, checkpoint.path)


def drafts_in_folder(drafter: Drafter, path: Path) -> GivenTensors:
    """The tensors of a checkpoint that another rank has checked; it may have only some of them."""
    assert drafter.own_checkpoint is not None, f"{drafter=} has no checkpoint"
    return GivenTensors.in_place_of(
        drafter.own_checkpoint, dict(Checkpoint.open(path).mapped()), path
    )


def load_drafts(drafter: Drafter, given: GivenTensors) -> None:
    """Fill the drafter's weights with these tensors in place, on the current stream."""
    wanted = drafter.own_destinations()
    filled = {name: wanted[name] for name in given.values if name in wanted}
    given.load(filled)
    drafter.filled(filled.keys())


def _check(drafter: Drafter, own: Checkpoint, values: Mapping[str, Tensor]) -> None:
    unknown = [name for name in values if name not in own.tensors]
    if unknown:
        raise ValueError(
            f"{len(unknown)} of {len(values)} draft tensors are not in {own.path}, which the "
            f"drafter was opened from: {some(unknown)}"
        )
    for name, value in values.items():
        check_value(name, value, own.tensors[name].stored)
    wanted = drafter.own_destinations()
    check_finite({name: value for name, value in values.items() if name in wanted}, wanted)
    stored = own.mapped()
    for name, value in values.items():
        # The captured graphs depend on which tokens the rows of lm_head are for.
        is_table = name not in wanted and not value.is_floating_point()
        if is_table and not torch.equal(value.cpu(), stored[name]):
            raise ValueError(f"{name} differs from {own.path}: an update cannot change it")
