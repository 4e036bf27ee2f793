"""The model and options that a drafter is made for."""

from __future__ import annotations

from typing import NamedTuple

from graphengine.config import EngineConfig
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.contract import ModelConfig
from graphengine.models.launches import WHOLE, Share


class Target(NamedTuple):
    """The model that verifies the drafts, and the engine's options.

    share  this rank's share of the model; `model` has its sizes
    """

    config: EngineConfig
    checkpoint: Checkpoint
    model: ModelConfig
    share: Share = WHOLE

    @property
    def split(self) -> Share:
        """This rank's share of layers without experts."""
        return WHOLE if self.config.data_parallel > 1 else self.share
