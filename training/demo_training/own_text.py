"""Text that the demo model wrote in part itself, like the text that its drafter will meet.

A drafter drafts text that its target writes, which differs from the target's training text: a
greedy target repeats itself. For that reason EAGLE-3 and DFlash are trained on their target's own
answers.

Shapes: B windows, T tokens of a window, C tokens fed at once, S rows of a cache, Q query heads, G
key/value heads, D head_dim, V vocabulary.
"""

import time

import torch
import torch.nn.functional as F

from demo_training.model import DemoConfig, DemoModel, Rope
from demo_training.replayed import replayed

STRETCH = 128
# Attention with masks wants mask rows aligned to this many columns.
ALIGNED = 8


class CachedAttention:
    """Attention with a cache, for rows that are fed piece by piece. A call stores its rows' KV.

    It reads the whole cache under a mask, since one graph, and one plan of attention, is for one
    shape.
    """

    def __init__(
        self, config: DemoConfig, windows: int, length: int, *, like: torch.Tensor
    ) -> None:
        rows = -(-length // ALIGNED) * ALIGNED
        shape = (windows, config.kv_heads, rows, config.head_dim)
        # Zeros, as masked values must still be numbers.
        self.k, self.v = like.new_zeros(shape), like.new_zeros(shape)

    def rows(self, row_C: torch.Tensor) -> "CachedAttention":
        """This attention, for calls that feed these rows, int64."""
        self.row_C = row_C
        return self

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B,Q,C,D], k and v [B,G,C,D] -> [B,Q,C,D]."""
        self.k.index_copy_(2, self.row_C, k)
        self.v.index_copy_(2, self.row_C, v)
        groups = q.shape[1] // k.shape[1]
        place_S = torch.arange(self.k.shape[2], device=q.device)
        seen = (place_S <= self.row_C[:, None]).repeat(groups, 1)
        # The query heads of a key head become further rows of it.
        folded = q.reshape(*k.shape[:2], groups * k.shape[2], q.shape[3])
        out = F.scaled_dot_product_attention(folded, self.k, self.v, attn_mask=seen)
        return out.reshape(q.shape)


class Writer:
    """Writes windows of tokens with a model; one CUDA graph writes one token of every window."""

    @torch.no_grad()
    def __init__(self, model: DemoModel, windows: int, length: int) -> None:
        self.model, like = model, model.model.embed_tokens.weight.to(model.dtype)
        self.caches = [
            CachedAttention(model.config, windows, length, like=like) for _ in model.model.layers
        ]
        logits = like.new_zeros(windows, model.config.vocab_size, dtype=torch.float32)
        row = torch.zeros(1, dtype=torch.long, device=like.device)
        self.advance = replayed(self._advance, logits, row, logits[:, 0])

    @torch.no_grad()
    def continued(
        self, text_BT: torch.Tensor, heat_B: torch.Tensor, *, stretch: int = STRETCH
    ) -> torch.Tensor:
        """Windows of text with every other stretch of tokens replaced by the model's own, new.

        heat_B  float32: the temperature of each window's own tokens; 0: greedy
        """
        tokens = text_BT.clone()
        rows = torch.arange(tokens.shape[1], device=tokens.device)
        for given in range(0, len(rows), 2 * stretch):
            begin = given + stretch
            logits = self._logits(tokens[:, given:begin], rows[given:begin])
            for position in range(begin, min(begin + stretch, len(rows))):
                newest, logits = self.advance(logits, rows[position : position + 1], heat_B)
                tokens[:, position] = newest
        return tokens

    def _advance(
        self, logits_BV: torch.Tensor, row_1: torch.Tensor, heat_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each window's token at this row, by the logits before it, and the logits after it."""
        noise = -torch.empty_like(logits_BV).exponential_().log()
        token_B = (logits_BV + heat_B[:, None] * noise).argmax(-1)
        return token_B, self._logits(token_B[:, None], row_1)

    def _logits(self, tokens_BC: torch.Tensor, row_C: torch.Tensor) -> torch.Tensor:
        """Float32 [B, V] after the last of the tokens that are fed."""
        x, rope = self.model.embed(tokens_BC), Rope.of(self.model.config, row_C)
        for layer, cache in zip(self.model.model.layers, self.caches, strict=True):
            x, _, _ = layer(x, rope, cache.rows(row_C))
        return self.model.logits(self.model.model.norm(x[:, -1])).float()


def own_text(
    model: DemoModel, tokens: torch.Tensor, *, windows: int, length: int, seconds: float
) -> torch.Tensor:
    """Pieces of a text that the model has `continued`: int32 [rounds * windows, length].

    Half of them are greedy and half at temperature 1. Rounds begin for `seconds`; there is at least
    one.
    """
    began, found = time.monotonic(), list[torch.Tensor]()
    writer = Writer(model, windows, length)
    heat = (torch.arange(windows, device=tokens.device) % 2).float()
    place = torch.arange(length, device=tokens.device)
    while not found or time.monotonic() - began < seconds:
        starts = torch.randint(len(tokens) - length + 1, (windows, 1), device=tokens.device)
        found.append(writer.continued(tokens[starts + place].long(), heat).int())
        # Wait for the device, so that its time counts.
        found[-1][0, 0].item()
    return torch.cat(found)
