"""Text of which the demo model wrote a part itself: what its drafter will meet.

A drafter drafts what its target writes, which is not what the target was trained on; greedily it
repeats itself. EAGLE-3 is trained on its target's own answers for that reason.

Shapes: B windows, T tokens of a window, C tokens fed at once, Q query heads, G key/value heads, D
head_dim.
"""

import time

import torch
import torch.nn.functional as F

from graphengine.demo.model import DemoConfig, DemoModel, Rope

STRETCH = 128


class CachedAttention:
    """Attention of rows that are fed piece by piece. Calling it appends theirs."""

    def __init__(
        self, config: DemoConfig, windows: int, length: int, *, like: torch.Tensor
    ) -> None:
        shape = (windows, config.kv_heads, length, config.head_dim)
        self.k, self.v = like.new_empty(shape), like.new_empty(shape)
        self.rows = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B,Q,C,D], k and v [B,G,C,D] -> [B,Q,C,D]."""
        fed = k.shape[2]
        begin, self.rows = self.rows, self.rows + fed
        self.k[:, :, begin : self.rows], self.v[:, :, begin : self.rows] = k, v
        row = torch.arange(self.rows, device=q.device)
        groups = q.shape[1] // k.shape[1]
        seen = (row <= row[begin:, None]).repeat(groups, 1) if fed > 1 else None
        # Query heads of one key head go as its further rows.
        out = F.scaled_dot_product_attention(
            q.reshape(*k.shape[:2], groups * fed, q.shape[3]),
            self.k[:, :, : self.rows],
            self.v[:, :, : self.rows],
            attn_mask=seen,
        )
        return out.reshape(q.shape)


@torch.no_grad()
def continued(
    model: DemoModel, text_BT: torch.Tensor, heat_B: torch.Tensor, *, stretch: int = STRETCH
) -> torch.Tensor:
    """Windows of text with every other stretch of tokens replaced by the model's own, new.

    heat_B  float32: the temperature of each window's own tokens; 0: greedy
    """
    tokens = text_BT.clone()
    windows, length = tokens.shape
    like = model.embed(tokens[:1, :1])
    caches = [CachedAttention(model.config, windows, length, like=like) for _ in model.model.layers]
    for given in range(0, length, 2 * stretch):
        begin = min(given + stretch, length)
        logits = _logits(model, tokens, given, begin, caches)
        for position in range(begin, min(begin + stretch, length)):
            noise = -torch.empty_like(logits).exponential_().log()
            tokens[:, position] = (logits + heat_B[:, None] * noise).argmax(-1)
            logits = _logits(model, tokens, position, position + 1, caches)
    return tokens


def _logits(
    model: DemoModel, tokens_BT: torch.Tensor, begin: int, end: int, caches: list[CachedAttention]
) -> torch.Tensor:
    """Float32 [B, vocabulary] after the last of the tokens that are fed."""
    x = model.embed(tokens_BT[:, begin:end])
    rope = Rope.of(model.config, torch.arange(begin, end, device=x.device))
    for layer, attend in zip(model.model.layers, caches, strict=True):
        x, _, _ = layer(x, rope, attend)
    return model.logits(model.model.norm(x[:, -1])).float()


def own_text(
    model: DemoModel, tokens: torch.Tensor, *, windows: int, length: int, seconds: float
) -> torch.Tensor:
    """int32 [rounds * windows, length]: `continued` pieces of a text, half of them greedily and
    half at temperature 1. Rounds are begun for this time, one at least.
    """
    began, found = time.monotonic(), list[torch.Tensor]()
    heat = (torch.arange(windows, device=tokens.device) % 2).float()
    place = torch.arange(length, device=tokens.device)
    while not found or time.monotonic() - began < seconds:
        starts = torch.randint(len(tokens) - length + 1, (windows, 1), device=tokens.device)
        found.append(continued(model, tokens[starts + place].long(), heat).int())
        # So that the time that passes is that of the device.
        found[-1][0, 0].item()
    return torch.cat(found)
