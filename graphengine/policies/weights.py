"""A policy's weights, and the names that they have in checkpoints.

transformers saves the names of the published files (`paligemma_with_expert.`...); its own modules
have others (`model.vlm.`...). Both are read. The vision tower and its projector are left out: the
caller gives their output as embeddings.

Letters: H width of the expert, D values of an action, S values of a state.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.contract import ModelWeights
from graphengine.models.policies import PolicyConfig
from graphengine.options.checks import some

log = logging.getLogger(__name__)

_EMBEDDING = "embed_tokens.weight"
# Beginnings of names in the files, and the ones used here. The first that fits counts.
_PREFIXES = (
    (r"paligemma_with_expert\.paligemma\.lm_head\.weight", f"prefix.{_EMBEDDING}"),
    (r"(paligemma_with_expert\.paligemma\.model|vlm)\.language_model\.(model\.)?", "prefix."),
    (r"(paligemma_with_expert\.gemma_expert\.model|dit)\.", "expert."),
    (r"(embed_action_time\.)?(?=state_proj|action_in_proj|action_time_mlp_|action_out_proj)", ""),
)
# Tensors that the model's actions do not depend on. Normalising with LeRobot's statistics is up to
# the caller.
_BESIDE = re.compile(
    r"(paligemma_with_expert\.paligemma\.model|vlm)\.(vision_tower|multi_modal_projector)\..*|"
    r"paligemma_with_expert\.gemma_expert\.lm_head\.weight|expert\.embed_tokens\.weight|"
    r".*rotary_emb\.inv_freq|(un)?normalize_\w+\..*"
)


class Projection(NamedTuple):
    """A linear with a bias."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyWeights:
    """All weights of a policy, in its dtype.

    prefix, expert  the two models
    state           the state's embedding, [H, S]
    action          the actions' embedding, [H, D]
    joined          reads the embeddings of actions and of time beside each other, [H, 2 * H]
    mixed           computes the expert's input from the result, [H, H]
    velocity        reads the expert's output, [D, H]
    """

    prefix: ModelWeights
    expert: ModelWeights
    state: Projection
    action: Projection
    joined: Projection
    mixed: Projection
    velocity: Projection

    @classmethod
    def allocate(cls, config: PolicyConfig, *, device: str, dtype: torch.dtype) -> Self:
        """Uninitialised weights."""
        H = config.expert.hidden_size

        def new(rows: int, columns: int) -> Projection:
            weight = torch.empty(rows, columns, device=device, dtype=dtype)
            return Projection(weight, torch.empty(rows, device=device, dtype=dtype))

        return cls(
            prefix=config.prefix.allocate(device=device, dtype=dtype),
            expert=config.expert.allocate(device=device, dtype=dtype),
            state=new(H, config.state_dim),
            action=new(H, config.action_dim),
            joined=new(H, 2 * H),
            mixed=new(H, H),
            velocity=new(config.action_dim, H),
        )

    def named(self) -> dict[str, Tensor]:
        """The tensor of each name, as `readable` has them."""
        projections = {
            "state_proj": self.state,
            "action_in_proj": self.action,
            "action_time_mlp_in": self.joined,
            "action_time_mlp_out": self.mixed,
            "action_out_proj": self.velocity,
        }
        found = {
            f"{name}.{part}": tensor
            for name, projection in projections.items()
            for part, tensor in projection._asdict().items()
        }
        for name, weights in {"prefix": self.prefix, "expert": self.expert}.items():
            for stored, tensor in weights.destinations().items():
                assert isinstance(tensor, Tensor), f"{stored} is stored as it is used"
                found[f"{name}.{stored.removeprefix('model.')}"] = tensor
        # Actions have no tokens.
        del found[f"expert.{_EMBEDDING}"]
        return found

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill the weights. ValueError for tensors that are missing, unknown or of other shapes."""
        checkpoint = readable(checkpoint)
        unused = checkpoint.load(self.named())
        unknown = [name for name in unused if _BESIDE.fullmatch(name) is None]
        if unknown:
            raise ValueError(
                f"{checkpoint.path} has {len(unknown)} tensors that no part of this policy reads: "
                f"{some(unknown)}"
            )
        log.debug("tensors beside the policy: %s", ", ".join(unused))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.named().values())


def readable(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with one name for each tensor, whichever of the two it has in its files."""
    tensors = {}
    stored: dict[str, str] = {}
    for name, info in checkpoint.tensors.items():
        new = _renamed(name)
        if new in tensors:
            raise ValueError(f"{checkpoint.path} has {new} twice: as {stored[new]} and {name}")
        tensors[new], stored[new] = info, checkpoint.stored_names.get(name, name)
    changed: Mapping[str, str] = {new: old for new, old in stored.items() if new != old}
    return replace(
        checkpoint,
        tensors=MappingProxyType(tensors),
        stored_names=MappingProxyType(dict(changed)),
    )


def _renamed(name: str) -> str:
    inner = name.removeprefix("model.")
    for pattern, new in _PREFIXES:
        found = re.match(pattern, inner)
        if found is not None:
            return new + inner[found.end() :]
    return inner
