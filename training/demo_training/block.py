"""A block drafter for the demo model in plain PyTorch, DFlash's or DSpark's: for training, and its
checkpoint.

The formulae are those of `graphengine.drafters.block.layers`, and parameters have the names of
published checkpoints. Trained as DFlash (arXiv:2602.06036) and DSpark (deepseek-ai/DeepSpec) are:
at anchors anywhere in a window, blocks of a known token and masks are run at once; DSpark's
sequential head is fed the text's own tokens.

Shapes are those of `demo_training.drafting`, and L lanes of a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from demo_training.checkpoint import rounded, save_weights
from demo_training.drafting import UNSURE, DemoDrafter, DrafterConfig, Reading
from demo_training.model import (
    DemoConfig,
    DemoModel,
    DraftAttention,
    Layer,
    Linear,
    RMSNorm,
    Rope,
)

KINDS = ("dflash", "dspark")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockConfig(DrafterConfig):
    """Sizes of a block drafter.

    kind      one of KINDS
    layers    layers of the target after which its stream is read, ascending
    depth     drafts of a block
    count     layers of the drafter
    ffn_size  feed-forward size of each layer
    rank      of DSpark's sequential head; DFlash has none
    """

    kind: str = "dspark"
    layers: tuple[int, ...] = (1, 3, 5)
    depth: int = 7
    count: int = 2
    ffn_size: int = 640
    rank: int = 32

    @property
    def from_newest(self) -> bool:
        """Whether the known token's lane makes a draft."""
        return self.kind == "dspark"

    @property
    def lanes(self) -> int:
        """L, the lanes of a block."""
        return self.depth if self.from_newest else self.depth + 1

    @property
    def card(self) -> Path:
        return Path(__file__).with_name("block_card_template.md")

    @property
    def card_values(self) -> Mapping[str, Any]:
        spark = f"`Qwen3DSparkModel`, as DeepSpec publishes; rank {self.rank} of its Markov head"
        flash = "`DFlashDraftModel`, as z-lab publishes"
        return {
            "kind": self.kind,
            "format": spark if self.from_newest else flash,
            "count": self.count,
            "lanes": self.lanes,
        }

    def check(self, target: DemoConfig) -> None:
        # Some implementations give the last layer's output only after the norm.
        self.check_numbers(0, target.layers - 2)
        if self.kind not in KINDS:
            raise ValueError(f"--kind {self.kind!r} is none of {', '.join(KINDS)}")
        if self.count < 1 or self.rank < 1:
            raise ValueError(f"{self.count} layers and rank {self.rank}: at least one is needed")

    def build(self, target: DemoConfig, tokens: torch.Tensor) -> "BlockDrafter":
        """A new drafter, whose mask is the text's rarest token."""
        counts = torch.bincount(tokens.long(), minlength=target.vocab_size)
        return BlockDrafter(self, target, mask=int(counts.argmin()))


class MarkovHead(nn.Module):
    """Adds to a draft's logits by the token before it; it adds nothing at first."""

    def __init__(self, tokens: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = Linear(rank, tokens)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # The gradient of an embedding sorts; that of `index_select` adds, which a graph can hold.
        rows = self.markov_w1.weight.index_select(0, before.flatten()).to(dtype)
        added: torch.Tensor = self.markov_w2(rows)
        return added.float().view(*before.shape, -1)


class BlockDrafter(DemoDrafter):
    """The drafter for a target of this shape; its layers differ only in the feed-forward size. It
    shares the target's embedding and lm_head.

    mask  the token whose embedding stands for unknown tokens
    """

    def __init__(self, config: BlockConfig, target: DemoConfig, *, mask: int) -> None:
        super().__init__(config.layers, config.depth)
        self.config, self.mask, self.target_layers = config, mask, target.layers
        self.shape = shape = replace(target, ffn_size=config.ffn_size, layers=config.count)
        self.fc = Linear(len(config.layers) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.eps)
        self.layers = nn.ModuleList(Layer(shape, 0.0) for _ in range(config.count))
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        self.markov_head = MarkovHead(shape.vocab_size, config.rank) if config.from_newest else None

    @torch.no_grad()
    def begin_as(self, target: DemoModel) -> None:
        """Copy the target's last norm, scaled to be less sure."""
        self.norm.weight.copy_(UNSURE * target.model.norm.weight)

    def outputs(self, reading: Reading, anchors_M: torch.Tensor, target: DemoModel) -> torch.Tensor:
        """Hidden states [B,M,L,H] of the blocks after these anchors, after the last norm."""
        lanes = self.config.lanes
        rows = torch.arange(reading.streams.shape[1], device=anchors_M.device)
        positions = anchors_M[:, None] + 1 + torch.arange(lanes, device=anchors_M.device)
        rope, context_rope = Rope.of(self.shape, positions.flatten()), Rope.of(self.shape, rows)
        context = self.hidden_norm(self.fc(reading.streams))
        # The token after an anchor is the one that is known.
        known = reading.embedding.index_select(1, anchors_M)[:, :, None]
        mask = target.model.embed_tokens.weight[self.mask].to(known.dtype)
        masks = mask.expand(*known.shape[:2], lanes - 1, -1)
        x = torch.cat((known, masks), dim=2).flatten(1, 2)
        lane_anchors = anchors_M[:, None].expand(-1, lanes).flatten()
        for layer in self.layers:
            assert isinstance(layer, Layer), f"{layer=}"
            k, v = layer.self_attn.keys_and_values(context, context_rope)
            x, _, _ = layer(x, rope, DraftAttention(k, v, lane_anchors))
        out: torch.Tensor = self.norm(x)
        return out.view(len(out), len(anchors_M), lanes, -1)

    def draft_logits(
        self, reading: Reading, anchors_M: torch.Tensor, target: DemoModel
    ) -> Sequence[torch.Tensor]:
        outputs = self.outputs(reading, anchors_M, target)[:, :, self.config.lanes - self.depth :]
        found = [target.logits(output).float() for output in outputs.unbind(2)]
        if self.markov_head is None:
            return found
        before = [
            reading.following.index_select(1, anchors_M + index) for index in range(self.depth)
        ]
        return [
            logits + self.markov_head(tokens, outputs.dtype)
            for logits, tokens in zip(found, before, strict=True)
        ]

    def save(self, folder: Path) -> None:
        save_weights(folder, rounded(self.state_dict()), block_json(self))


def block_json(drafter: BlockDrafter) -> dict[str, Any]:
    """config.json, as published drafters have it."""
    config, shape = drafter.config, drafter.shape
    of_block = {"mask_token_id": drafter.mask, "target_layer_ids": list(config.layers)}
    common = {
        "architectures": ["Qwen3DSparkModel" if config.from_newest else "DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": config.lanes,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": config.ffn_size,
        "layer_types": ["full_attention"] * config.count,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": config.count,
        "num_key_value_heads": shape.kv_heads,
        "num_target_layers": drafter.target_layers,
        "rms_norm_eps": shape.eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }
    if config.from_newest:
        return common | of_block | {"markov_head_type": "vanilla", "markov_rank": config.rank}
    return common | {"dflash_config": of_block}
