"""What drafters for the demo model share: the loss they are trained by, what they are measured by,
and what a training script must know of them.

After an anchor, a position of a window up to which the target has been, a drafter makes as many
drafts as its depth. Draft d after anchor p, counted from 1, is a token for position p+1+d, towards
what the target says at position p+d.

Shapes: B windows, T tokens of a window, H hidden, A layers of the target that are read, M anchors,
V vocabulary, D draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from graphengine.demo.evaluate import windows
from graphengine.demo.model import DemoConfig, DemoModel

# A later draft counts only where all before it were right.
DECAY = 0.8
# Scale of the first logits: before it has learned anything a drafter should not be sure of it.
UNSURE = 0.25
# Part of the loss that is the distance of the distributions, as DSpark is trained: what is accepted
# depends on it. The rest is cross entropy, from which a drafter that knows nothing learns.
DISTANCE = 0.9
# Of a held-out window every so many positions are looked at.
STRIDE = 4


class Reading(NamedTuple):
    """What drafters are fed of windows.

    hidden     [B,T,H], of which the target makes its logits
    streams    [B,T,A*H], what the target's chosen layers leave, side by side
    following  int64 [B,T], the token after each
    embedding  [B,T,H], of those
    """

    hidden: torch.Tensor
    streams: torch.Tensor
    following: torch.Tensor
    embedding: torch.Tensor


@torch.no_grad()
def read_target(target: DemoModel, windows_BT1: torch.Tensor, layers: Collection[int]) -> Reading:
    """Of these layers' streams."""
    following = windows_BT1[:, 1:]
    hidden, streams = target.hidden_and_streams(windows_BT1[:, :-1], layers)
    return Reading(hidden, torch.cat(streams, dim=-1), following, target.embed(following))


class DemoDrafter(nn.Module, ABC):
    """A drafter beside a target.

    read_layers  of the target, ascending, after which its stream is read
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
        """Float32 [B,M,D] of each draft, where those before it are the text's tokens.

        Anchors are at most T - 1 - depth.
        """

    @abstractmethod
    def begin_as(self, target: DemoModel) -> None:
        """Take what is at first as the target has it."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """config.json and model.safetensors, as published; the weights are rounded to bfloat16."""

    def drafted(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Of the whole vocabulary's values along `dim` those of the draft vocabulary."""
        return values if self.ids is None else values.index_select(dim, self.ids)

    def tokens(self, drafts: torch.Tensor) -> torch.Tensor:
        """The target's ids of the draft vocabulary's."""
        return drafts if self.ids is None else self.ids[drafts]


class DrafterConfig(ABC):
    """What a drafter is, but for the target's sizes.

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
        """Of the template, beside what a card of every drafter has."""

    @abstractmethod
    def build(self, target: DemoConfig, tokens: torch.Tensor) -> DemoDrafter:
        """The drafter, new; `tokens` is text to count."""

    @abstractmethod
    def check(self, target: DemoConfig) -> None:
        """ValueError for what a checkpoint cannot say, or the target does not have."""

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

    Both parts of the loss are of the target's own distribution over the draft vocabulary, at those
    positions where that has the target's best token.
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
    tokens_per_step  1 and the drafts before the first that differs, where the text is what follows
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
