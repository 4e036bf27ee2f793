"""An EAGLE3 head for the demo model in plain PyTorch: for training, and its checkpoint.

The formulae are those of `graphengine.drafters.eagle3.layer`, and parameters have the names of
published checkpoints. Trained by training-time test (Y. Li et al., "EAGLE-3", arXiv:2503.01840):
several runs are unrolled, and in each the head reads its own output of the run before.

Shapes are those of `demo_training.drafting`; a run makes a draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from demo_training.checkpoint import rounded, save_weights
from demo_training.drafting import UNSURE, DemoDrafter, DrafterConfig, Reading
from demo_training.model import (
    MLP,
    Attend,
    Attention,
    DemoConfig,
    DemoModel,
    DraftAttention,
    Linear,
    RMSNorm,
    Rope,
    causal_attention,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig(DrafterConfig):
    """Sizes of a head, and how it is trained.

    layers    layers of the target after which its stream is read, ascending
    ffn_size  feed-forward size of the head's layer
    depth     runs that are unrolled
    drafted   tokens of the draft vocabulary, for which the head has an lm_head of its own; 0: it
              shares the target's
    """

    layers: tuple[int, ...] = (1, 3, 6)
    ffn_size: int = 768
    depth: int = 7
    drafted: int = 0

    @property
    def card(self) -> Path:
        return Path(__file__).with_name("eagle3_card_template.md")

    @property
    def card_values(self) -> Mapping[str, Any]:
        own = f"its own, for the {self.drafted} most frequent tokens (`d2t`, `t2d`)"
        return {"lm_head": own if self.drafted else "the target's"}

    def check(self, target: DemoConfig) -> None:
        self.check_numbers(1, target.layers - 1)
        if not 0 <= self.drafted <= target.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.drafted} tokens, the target has {target.vocab_size}"
            )

    def build(self, target: DemoConfig, tokens: torch.Tensor) -> "Eagle3Head":
        return Eagle3Head(self, target, frequent_ids(tokens, self.drafted, target.vocab_size))


class HeadLayer(nn.Module):
    """A Llama's layer whose attention reads the token and the hidden state side by side."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, inputs=2 * hidden, head_norms=False)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(config)

    def forward(
        self, embedding: torch.Tensor, g: torch.Tensor, rope: Rope, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """y, and the rows' keys and values."""
        fed = torch.cat((self.input_layernorm(embedding), self.hidden_norm(g)), dim=-1)
        out, k, v = self.self_attn(fed, rope, attend)
        r = g + out
        return r + self.mlp(self.post_attention_layernorm(r)), k, v


class Eagle3Head(DemoDrafter):
    """The head for a target of this shape; its layer differs only in the feed-forward size.

    ids  int64 [D], ascending: the draft vocabulary; None: all, by the target's lm_head
    """

    def __init__(
        self, config: HeadConfig, target: DemoConfig, ids: torch.Tensor | None = None
    ) -> None:
        super().__init__(config.layers, config.depth, ids)
        self.config = config
        self.shape = shape = replace(target, ffn_size=config.ffn_size)
        self.fc = Linear(len(config.layers) * shape.hidden_size, shape.hidden_size)
        self.midlayer = HeadLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        # An nn.Embedding, which the optimiser does not treat as a matrix of a layer.
        self.lm_head = None if ids is None else nn.Embedding(len(ids), shape.hidden_size)

    @torch.no_grad()
    def begin_as(self, target: DemoModel) -> None:
        """Copy the target's last norm, scaled to be less sure, and lm_head if the head has one."""
        self.norm.weight.copy_(UNSURE * target.model.norm.weight)
        if self.lm_head is not None:
            self.lm_head.weight.copy_(self.drafted(target.model.embed_tokens.weight, dim=0))

    def draft_logits(
        self, reading: Reading, anchors_M: torch.Tensor, target: DemoModel
    ) -> Sequence[torch.Tensor]:
        outputs = self.outputs(reading.embedding, reading.streams, anchors_M)
        return [self.logits(output, target) for output in outputs]

    def save(self, folder: Path) -> None:
        stored = rounded(self.state_dict())
        if self.ids is not None:
            ids = self.ids.cpu()
            stored["d2t"] = ids - torch.arange(len(ids))
            stored["t2d"] = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
            stored["t2d"][ids] = True
        save_weights(folder, stored, head_json(self))

    def logits(self, output: torch.Tensor, target: DemoModel) -> torch.Tensor:
        """Logits of an output of `outputs`, float32 [..., D]."""
        if self.lm_head is None:
            return target.logits(output).float()
        return F.linear(output, self.lm_head.weight.to(output.dtype)).float()

    def outputs(
        self, following_BTH: torch.Tensor, streams_BTS: torch.Tensor, anchors_M: torch.Tensor
    ) -> list[torch.Tensor]:
        """Hidden states [B,M,H] after the last norm, for each of `depth` runs.

        Run s at anchor p is at position p+s, is fed the embedding of token p+s+1, which is row p+s
        of `following_BTH`, with fc of the target's streams at p (s = 0) or the y of run s-1, and
        its logits predict token p+s+2. Anchors are at most T - 1 - depth.
        """
        rows = torch.arange(following_BTH.shape[1], device=following_BTH.device)
        y, k, v = self.midlayer(
            following_BTH, self.fc(streams_BTS), Rope.of(self.shape, rows), causal_attention
        )
        y = y.index_select(1, anchors_M)
        outputs, attend = [self.norm(y)], DraftAttention(k, v, anchors_M)
        for run in range(1, self.config.depth):
            rows = anchors_M + run
            embedding = following_BTH.index_select(1, rows)
            y, _, _ = self.midlayer(embedding, y, Rope.of(self.shape, rows), attend)
            outputs.append(self.norm(y))
        return outputs


def frequent_ids(tokens: torch.Tensor, count: int, vocab_size: int) -> torch.Tensor | None:
    """int64 [count], ascending: the most frequent ids of a text; None for a count of 0."""
    if not count:
        return None
    often = torch.bincount(tokens.long(), minlength=vocab_size)
    return often.argsort(descending=True, stable=True)[:count].sort().values


def head_json(head: Eagle3Head) -> dict[str, Any]:
    """config.json, as published heads have it."""
    config, shape = head.config, head.shape
    # Ids whose lowest is not 1 count the embedding as 0.
    shift = 0 if config.layers[0] == 1 else 1
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": None,
        "draft_vocab_size": config.drafted or shape.vocab_size,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer + shift for layer in config.layers],
            "use_aux_hidden_state": True,
        },
        "eos_token_id": 0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "target_hidden_size": shape.hidden_size,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
    }
