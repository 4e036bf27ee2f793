"""The demo model in plain PyTorch, for training and as its own oracle: Qwen3 with one MTP module.

Parameter names are those of the exported checkpoint. Shapes: B windows of a batch, T tokens of a
window, H hidden, Q query heads, G key/value heads, D head_dim, V vocabulary, M anchors.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# Recursive steps of the MTP module in training: the draft length it is meant for.
DEPTH = 3

# Muon and Adam do not depend on a loss's scale, so the MTP module's own matrices still learn at
# full rate; small weights limit its influence on what it shares with the target model.
MTP_WEIGHTS = (0.15, 0.10, 0.08)
assert len(MTP_WEIGHTS) == DEPTH

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 7
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn_size: int = 768
    rope_theta: float = 10000.0
    max_positions: int = 2048
    eps: float = 1e-6


class Linear(nn.Module):
    """A bias-free product in the activations' dtype; the weight itself stays float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (0.5 / inputs**0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Statistics in float32, then rounded, then times w, as Qwen3 does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


class Rope(NamedTuple):
    """cos and sin, float32 [rows, D/2], of the rows' positions."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, config: DemoConfig, positions: torch.Tensor) -> "Rope":
        half = torch.arange(0, config.head_dim, 2, device=positions.device)
        frequencies = config.rope_theta ** (-half.float() / config.head_dim)
        angles = positions.float()[:, None] * frequencies
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[..., rows, D] with pairs (i, i + D/2)."""
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [B,Q,T,D], k and v [B,G,T,D] -> [B,Q,T,D]."""
    return grouped_attention(q, k, v, None)


def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen_TS: torch.Tensor | None
) -> torch.Tensor:
    """q [B,Q,T,D], k and v [B,G,S,D] -> [B,Q,T,D].

    seen_TS  which keys each query sees; None: those of its own row and earlier ones
    """
    # Repeated explicitly: every attention backend of every torch version supports that.
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TS, is_causal=seen_TS is None)


class DraftAttention:
    """Attention for the rows of drafts, with the same cache as at inference.

    A row sees the window's rows up to its anchor, which are made from the target's hidden states,
    and the rows of its own draft. A call appends the rows that it is fed.

    k, v       [B,G,T,D] of the window
    anchors_R  int64, ascending: the anchor of each row that is fed. Rows of one anchor are one
               draft.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, anchors_R: torch.Tensor) -> None:
        self.k, self.v = k, v
        rows = torch.arange(k.shape[2], device=k.device)
        self.seen = rows <= anchors_R[:, None]
        self.own = anchors_R == anchors_R[:, None]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.k, self.v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.seen = torch.cat((self.seen, self.own), dim=1)
        return grouped_attention(q, self.k, self.v, self.seen)


class Attention(nn.Module):
    """Qwen3's attention; Llama's without `head_norms`. It is fed `inputs` columns; 0: H."""

    def __init__(self, config: DemoConfig, *, inputs: int = 0, head_norms: bool = True) -> None:
        super().__init__()
        inputs, size = inputs or config.hidden_size, config.head_dim
        self.size = size
        self.q_proj = Linear(inputs, config.heads * size)
        self.k_proj = Linear(inputs, config.kv_heads * size)
        self.v_proj = Linear(inputs, config.kv_heads * size)
        self.o_proj = Linear(config.heads * size, config.hidden_size)
        self.q_norm = RMSNorm(size, config.eps) if head_norms else nn.Identity()
        self.k_norm = RMSNorm(size, config.eps) if head_norms else nn.Identity()

    def forward(
        self, x: torch.Tensor, rope: Rope, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, and the rows' keys and values."""
        q = rope.rotate(self.q_norm(self._heads(self.q_proj(x))))
        k, v = self.keys_and_values(x, rope)
        out = attend(q, k, v).transpose(1, 2).flatten(2)
        return self.o_proj(out), k, v

    def keys_and_values(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' keys and values, [B,G,T,D] each."""
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return rope.rotate(self.k_norm(k)), v

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B,T,heads*D] -> [B,heads,T,D]."""
        heads = x.shape[-1] // self.size
        return x.view(*x.shape[:-1], heads, self.size).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.ffn_size)
        self.up_proj = Linear(config.hidden_size, config.ffn_size)
        self.down_proj = Linear(config.ffn_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: DemoConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.mlp = MLP(config)
        self.dropout = dropout

    def forward(
        self, x: torch.Tensor, rope: Rope, attend: Attend = causal_attention
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, and the rows' keys and values."""
        out, k, v = self.self_attn(self.input_layernorm(x), rope, attend)
        x = x + F.dropout(out, self.dropout, self.training)
        out = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(out, self.dropout, self.training), k, v


class Trunk(nn.Module):
    def __init__(self, config: DemoConfig, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.04)
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)


class MTP(nn.Module):
    def __init__(self, config: DemoConfig, dropout: float) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.eps)
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.eps)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, dropout)])
        self.norm = RMSNorm(config.hidden_size, config.eps)

    def fuse(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = (self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden))
        out: torch.Tensor = self.fc(torch.cat(parts, dim=-1))
        return out


class DemoModel(nn.Module):
    """Tied embedding. Computes in `dtype`, with parameters in float32."""

    def __init__(
        self, config: DemoConfig, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = Trunk(config, dropout)
        self.mtp = MTP(config, dropout)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embedding: torch.Tensor = self.model.embed_tokens(tokens).to(self.dtype)
        return embedding

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))

    def hidden(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """[B,T,H] after the final norm: the input of lm_head and the MTP module."""
        return self.hidden_and_streams(tokens_BT, ())[0]

    def hidden_and_streams(
        self, tokens_BT: torch.Tensor, layers: Collection[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`hidden`, and the output [B,T,H] of each of these layers, before any norm."""
        x = self.embed(tokens_BT)
        rope = Rope.of(self.config, torch.arange(x.shape[1], device=x.device))
        streams = []
        for index, layer in enumerate(self.model.layers):
            x, _, _ = layer(x, rope)
            if index in layers:
                streams.append(x)
        return self.model.norm(x), streams

    def drafts(
        self, hidden_BTH: torch.Tensor, next_BT: torch.Tensor, anchors_M: torch.Tensor
    ) -> list[torch.Tensor]:
        """The MTP module's outputs u at each anchor, [B,M,H] for each of DEPTH steps.

        Step s at anchor p is at position p+s, is fed token p+s+1 of the text (`next_BT` is the text
        moved left by one) with the hidden state at p (s = 0) or the u of step s-1, and its logits
        predict token p+s+2. Anchors are at most T - 1 - DEPTH. Keys and values are the ones that
        the one-module drafter of the engine reads at inference.
        """
        layer = self.mtp.layers[0]
        embedding = self.embed(next_BT)
        rows = torch.arange(embedding.shape[1], device=embedding.device)
        fused = self.mtp.fuse(embedding, hidden_BTH)
        y, k, v = layer(fused, Rope.of(self.config, rows))
        outputs = [self.mtp.norm(y.index_select(1, anchors_M))]
        attend = DraftAttention(k, v, anchors_M)
        for step in range(1, DEPTH):
            rows = anchors_M + step
            x = self.mtp.fuse(embedding.index_select(1, rows), outputs[-1])
            y, _, _ = layer(x, Rope.of(self.config, rows), attend)
            outputs.append(self.mtp.norm(y))
        return outputs


def training_losses(
    model: DemoModel, windows_BT1: torch.Tensor, anchors_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss to minimise, and its parts: mean cross entropies in nats, float32 [1 + DEPTH], the
    model's, then of each MTP step.

    An MTP step is trained towards the model's own distribution of the same token, not the text:
    this distribution decides whether a draft is accepted.
    """
    tokens, targets = windows_BT1[:, :-1], windows_BT1[:, 1:]
    hidden = model.hidden(tokens)
    logits = model.logits(hidden)
    losses = [F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())]
    for step, output in enumerate(model.drafts(hidden, targets, anchors_M)):
        wanted = logits.detach().index_select(1, anchors_M + (step + 1)).float().softmax(-1)
        draft = model.logits(output).float()
        losses.append(F.cross_entropy(draft.flatten(0, 1), wanted.flatten(0, 1)))
    # Weighted by Python numbers: a tensor of weights would need a copy that waits for the device.
    weighted = [weight * loss for weight, loss in zip(MTP_WEIGHTS, losses[1:], strict=True)]
    return torch.stack([losses[0], *weighted]).sum(), torch.stack(losses).detach()
