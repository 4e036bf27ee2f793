"""Drafters propose the tokens that a speculative step verifies; each has a file or a folder here.

A small drafter is one file (`ngram.py` is a short example). One with weights is a folder: its
layers, how it reads checkpoints, its proposals. A new one takes three things, and nothing else
changes:

1. options in `graphengine/speculative.py`: a `Mode`, named in `MODES`, for users to pass. It says
   what the drafter can do, and no other file asks which mode it is. Command lines find it once
   `speculative_text.py` has a word for it;
2. a `Drafter` (`base.py`): its `needs` (`needs.py` lists what can be asked for), `prepare` for
   prompts and `propose` after a step, which write `draft_tokens`, and whatever else its weights or
   fields need;
3. a row in `MAKERS` (`making.py`): a function that makes the drafter from its options for a
   `Target`, or says why it does not fit.

Parts that several use: `head.py` (logits and drafts of an lm_head), `confidence.py` (which drafts
of a chain are verified), `chain_plans.py`, `stream_readers.py`, and `modules/` (chains and trees of
a module that reads hidden states).
"""

from __future__ import annotations

from graphengine.drafters.base import (
    Drafter,
    DraftSetting,
    FieldSizes,
    PathLanes,
    Prefilled,
    Verified,
)
from graphengine.drafters.making import make_drafter
from graphengine.drafters.needs import DraftNeeds
from graphengine.drafters.none import NoDrafter
from graphengine.drafters.remote import RemoteDrafter

__all__ = [
    "DraftNeeds",
    "DraftSetting",
    "Drafter",
    "FieldSizes",
    "NoDrafter",
    "PathLanes",
    "Prefilled",
    "RemoteDrafter",
    "Verified",
    "make_drafter",
]
