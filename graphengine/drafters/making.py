"""Makes the drafter of a mode's options for a checkpoint, or says why none fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphengine.config import EngineConfig
from graphengine.drafters.base import Drafter
from graphengine.drafters.block.drafter import make_dflash
from graphengine.drafters.draft_model import make_draft_model
from graphengine.drafters.eagle3.module import make_eagle3
from graphengine.drafters.hidden_states import HiddenStatesDrafter
from graphengine.drafters.jump_forward import make_jump_forward
from graphengine.drafters.mtp.making import make_mtp
from graphengine.drafters.needs import DraftNeeds
from graphengine.drafters.ngram import NGramDrafter
from graphengine.drafters.none import NoDrafter
from graphengine.drafters.suffix.drafter import make_suffix
from graphengine.drafters.target import Target
from graphengine.drafters.user import UserDrafter
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.contract import ModelConfig
from graphengine.models.launches import WHOLE, Share
from graphengine.options.drafts.jump_forward import JumpForward
from graphengine.options.drafts.mode import Mode
from graphengine.speculative import (
    MTP,
    DFlash,
    DraftModel,
    Eagle3,
    NGram,
    SaveHiddenStates,
    Suffix,
    UserProvided,
)

Maker = Callable[[Any, Target], Drafter]


def make_drafter(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, share: Share = WHOLE
) -> Drafter:
    """The drafter of `config.speculative` for the target in `checkpoint`, nothing allocated yet.

    share  this rank's share of the target; `model` has its sizes

    `NoDrafter` where the engine does not speculate. ValueError says why a mode does not fit.
    """
    mode = config.mode
    if mode is None:
        return NoDrafter()
    maker = MAKERS.get(type(mode))
    if maker is None:
        raise ValueError(f"speculative={mode!r}: no drafter is made of a {type(mode).__name__}")
    drafter = maker(mode, Target(config, checkpoint, model, share))
    _check_agreement(mode, drafter.needs)
    return drafter


def _check_agreement(mode: Mode, needs: DraftNeeds) -> None:
    """Assert that mode and needs agree: the config follows the mode, the engine the needs."""
    assert needs.length == mode.k, f"{needs.length=} of {mode=}"
    assert needs.guided == mode.guided, f"{needs.guided=} of {mode=}"
    assert needs.prompts_only == mode.whole_prompts, f"{needs.prompts_only=} of {mode=}"
    assert mode.lockstep or not needs.lockstep, f"{needs=} of {mode=}, which has no lockstep"


MAKERS: dict[type[Mode], Maker] = {
    MTP: make_mtp,
    NGram: lambda options, target: NGramDrafter(options.k, options.max_n),
    Suffix: make_suffix,
    DraftModel: make_draft_model,
    Eagle3: make_eagle3,
    DFlash: make_dflash,
    JumpForward: make_jump_forward,
    UserProvided: lambda options, target: UserDrafter(options.k),
    SaveHiddenStates: lambda options, target: HiddenStatesDrafter(options, target.model),
}
"""The drafter of each mode's options."""
