"""Drafters propose the tokens that a speculative step verifies; each has a file of its own.

`base` has the interface; `make_drafter` turns the options of `graphengine.speculative` into one
that fits a checkpoint, or says why none does.
"""

from __future__ import annotations

from graphengine.drafters.base import Drafter, DraftSetting, FieldSizes, Prefilled, Verified
from graphengine.drafters.draft_model import DraftModelDrafter
from graphengine.drafters.eagle import EagleDrafter
from graphengine.drafters.hidden_states import HiddenStatesDrafter
from graphengine.drafters.making import make_drafter
from graphengine.drafters.needs import DraftNeeds
from graphengine.drafters.ngram import NGramDrafter
from graphengine.drafters.none import NoDrafter
from graphengine.drafters.own_graph import OwnGraphEagle
from graphengine.drafters.user import UserDrafter
from graphengine.drafters.vanilla import VanillaDrafter

__all__ = [
    "DraftModelDrafter",
    "DraftNeeds",
    "DraftSetting",
    "Drafter",
    "EagleDrafter",
    "FieldSizes",
    "HiddenStatesDrafter",
    "NGramDrafter",
    "NoDrafter",
    "OwnGraphEagle",
    "Prefilled",
    "UserDrafter",
    "VanillaDrafter",
    "Verified",
    "make_drafter",
]
