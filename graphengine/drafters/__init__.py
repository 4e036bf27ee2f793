"""Drafters propose the tokens that a speculative step verifies; each has a file of its own.

A new one takes three things, and nothing else changes:

1. options in `graphengine/speculative.py`: a `Mode`, named in `MODES`, for users to pass. Command
   lines find it once `speculative_text.py` has a word for it;
2. a file here with a `Drafter` (`base.py`): its `needs` (`needs.py` lists what can be asked for),
   `prepare` for prompts and `propose` after a step, which write `draft_tokens`, and whatever else
   its weights or fields need. `ngram.py` is a short example;
3. a row in `MAKERS` (`making.py`): a function that makes the drafter from its options for a
   checkpoint, or says why it does not fit.
"""

from __future__ import annotations

from graphengine.drafters.base import (
    Drafter,
    DraftSetting,
    FieldSizes,
    OfTree,
    Prefilled,
    Verified,
)
from graphengine.drafters.draft_model import DraftModelDrafter
from graphengine.drafters.eagle import EagleDrafter
from graphengine.drafters.hidden_states import HiddenStatesDrafter
from graphengine.drafters.making import make_drafter
from graphengine.drafters.needs import DraftNeeds
from graphengine.drafters.ngram import NGramDrafter
from graphengine.drafters.none import NoDrafter
from graphengine.drafters.own_graph import OwnGraphEagle
from graphengine.drafters.remote import RemoteDrafter
from graphengine.drafters.suffix import SuffixDrafter
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
    "OfTree",
    "OwnGraphEagle",
    "Prefilled",
    "RemoteDrafter",
    "SuffixDrafter",
    "UserDrafter",
    "VanillaDrafter",
    "Verified",
    "make_drafter",
]
