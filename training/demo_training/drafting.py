"""Code shared by drafters for the demo model: their loss, their metric, and what a training script
must know of them.

An anchor is a position of a window up to which the target has run. After it a drafter makes as many
drafts as its depth. Draft d after anchor p, counted from 1, is a token for position p+1+d. It is
trained towards the target's distribution at position p+d.

Shapes: B windows, T tokens of a window, H hidden, A layers of the target that are read, M anchors,
V vocabulary, D draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from demo_training.evaluate import windows
from demo_training.model import DemoConfig, DemoModel

# A later draft counts only where all before it were right.
DECAY = 0.8
# Scale of the first logits: a drafter that has learned nothing yet should not be sure.
UNSURE = 0.25
# Share of the loss that is the distance of the distributions, as DSpark is trained: acceptance
# depends on it. The rest is cross entropy, from which an untrained drafter learns.
DISTANCE = 0.9
# Every STRIDE-th position of a held-out window is evaluated.
STRIDE = 4


class Reading(NamedTuple):
    """The inputs of drafters, for windows.

    hidden     [B,T,H], from which the target makes its logits
    streams    [B,T,A*H], outputs of the target's chosen layers, side by side
    following  int64 [B,T], the token after each
    embedding  [B,T,H], the embedding of `following`
    """

    hidden: torch.Tensor
    streams: torch.Tensor
    following: torch.Tensor
    embedding: torch.Tensor


@torch.no_grad()
def read_target(target: DemoModel, windows_BT1: torch.Tensor, layers: Collection[int]) -> Reading:
    """Run the target over windows and read the streams of these layers."""
    following = windows_BT1[:, 1:]
    hidden, streams = target.hidden_and_streams(windows_BT1[:, :-1], layers)
    return Reading(hidden, torch.cat(streams, dim=-1), following, target.embed(following))


class DemoDrafter(nn.Module, ABC):
    """A drafter for a target.

    read_layers  layers of the target after which its stream is read, ascending
    depth        drafts after an anchor
    ids          int64 [D], ascending: the draft vocabulary; None: all
    """

    ids: torch.Tensor | None

    def __init__(
        self, read_layers: tuple[int, ...], depth: int, ids: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.read_layers, self.depth = read_layers, depth
        self.register_buffer("ids", ids, persistent=False)

    @abstractmethod
    def draft_logits(
        self, reading: Reading, anchors_M: torch.Tensor, target: DemoModel
    ) -> Sequence[torch.Tensor]:
        """Logits of each draft, float32 [B,M,D], with the text's tokens as the drafts before it.

        Anchors are at most T - 1 - depth.
        """

    @abstractmethod
    def begin_as(self, target: DemoModel) -> None:
        """Copy the initial values that come from the target."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, as published, with weights in bfloat16."""

    def drafted(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The draft vocabulary's part of `values`, which has the whole vocabulary along `dim`."""
        return values if self.ids is None else values.index_select(dim, self.ids)

    def tokens(self, drafts: torch.Tensor) -> torch.Tensor:
        """The target's ids of `drafts`, which are ids of the draft vocabulary."""
        return drafts if self.ids is None else self.ids[drafts]


class DrafterConfig(ABC):
    """A drafter's options, without the target's sizes.

    layers, depth  as a drafter's `read_layers` and `depth`
    card           the template of its card
    """

    __slots__ = ()

    layers: tuple[int, ...]
    depth: int

    @property
    @abstractmethod
    def card(self) -> Path: ...

    @property
    @abstractmethod
    def card_values(self) -> Mapping[str, Any]:
        """Values of the template besides those that every drafter's card has."""

    @abstractmethod
    def build(self, target: DemoConfig, tokens: torch.Tensor) -> DemoDrafter:
        """A new drafter; `tokens` is text to count token frequencies in."""

    @abstractmethod
    def check(self, target: DemoConfig) -> None:
        """ValueError for options that a checkpoint cannot express, or the target does not have."""

    def check_numbers(self, first: int, last: int) -> None:
        """ValueError unless the layers ascend within these, and the depth is 1 or more."""
        layers = self.layers
        ascending = list(layers) == sorted(set(layers))
        if not layers or not ascending or layers[0] < first or layers[-1] > last:
            raise ValueError(f"layers {list(layers)} must ascend, from {first} to at most {last}")
        if self.depth < 1:
            raise ValueError(f"depth {self.depth}: at least one draft is needed")


def draft_losses(
    drafter: DemoDrafter, target: DemoModel, windows_BT1: torch.Tensor, anchors_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss to minimise, and the mean cross entropies in nats of each draft, [depth].

    Both parts of the loss are against the target's own distribution over the draft vocabulary, at
    the positions where that vocabulary has the target's best token.
    """
    reading = read_target(target, windows_BT1, drafter.read_layers)
    losses, entropies = [], []
    for index, draft in enumerate(drafter.draft_logits(reading, anchors_M, target)):
        with torch.no_grad():
            rows = reading.hidden.index_select(1, anchors_M + (index + 1))
            logits = target.logits(rows).float()
            wanted = drafter.drafted(logits)
            counts = (wanted.amax(-1) == logits.amax(-1)).float()
            counts /= counts.sum().clamp(min=1)
            wanted = wanted.softmax(-1)
        found = draft.log_softmax(-1)
        entropy = -((wanted * found).sum(-1) * counts).sum()
        distance = ((wanted - found.exp()).abs().sum(-1) * counts).sum()
        losses.append(DECAY**index * ((1 - DISTANCE) * entropy + DISTANCE * distance))
        entropies.append(entropy.detach())
    return torch.stack(losses).sum(), torch.stack(entropies)


@torch.no_grad()
def agreement(
    drafter: DemoDrafter, target: DemoModel, tokens: torch.Tensor, *, length: int, batch: int
) -> dict[str, Any]:
    """How often the drafter's token is the target's, by draft, teacher-forced over a text.

    greedy   both take their best token
    sampled  both draw at temperature 1 with the same Gumbel noise, as the engine does
    tokens_per_step  1 plus the drafts before the first that differs, along the given text
    """
    parts: dict[str, list[torch.Tensor]] = {"greedy": [], "sampled": []}
    for piece in windows(tokens, length=length, batch=batch):
        last = piece.shape[1] - 1 - drafter.depth
        if last <= 0:
            continue
        anchors = torch.arange(0, last, STRIDE, device=tokens.device)
        reading = read_target(target, piece.long(), drafter.read_layers)
        equal: dict[str, list[torch.Tensor]] = {name: [] for name in parts}
        for index, draft in enumerate(drafter.draft_logits(reading, anchors, target)):
            rows = reading.hidden.index_select(1, anchors + (index + 1))
            wanted = target.logits(rows).float()
            noise = -torch.empty_like(wanted).exponential_().log()
            for name, heat in (("greedy", 0.0), ("sampled", 1.0)):
                drafted = drafter.tokens((draft + heat * drafter.drafted(noise)).argmax(-1))
                equal[name].append(drafted == (wanted + heat * noise).argmax(-1))
        for name, found in equal.items():
            parts[name].append(torch.stack(found).flatten(1).float())
    shares = {name: torch.cat(found, dim=1) for name, found in parts.items()}
    return {"positions": shares["greedy"].shape[1]} | {
        name: {
            "agrees_with_target": [round(share, 4) for share in equal_DP.mean(1).tolist()],
            "tokens_per_step": round(1 + float(equal_DP.cumprod(0).sum(0).mean()), 4),
        }
        for name, equal_DP in shares.items()
    }
