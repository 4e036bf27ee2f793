"""An EAGLE3 head for the demo model in plain PyTorch: for training, and its checkpoint.

The formulae are those of `graphengine.models.eagle3`, and parameters have the names of published
checkpoints. Trained by training-time test (Y. Li et al., "EAGLE-3", arXiv:2503.01840): several runs
are unrolled, in each of which the head reads what it left in the run before.

Shapes: B windows, T tokens of a window, H hidden, A layers of the target that are read, M anchors,
V vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from graphengine.demo.checkpoint import write_json
from graphengine.demo.evaluate import windows
from graphengine.demo.model import (
    MLP,
    Attend,
    Attention,
    ChainAttention,
    DemoConfig,
    DemoModel,
    Linear,
    RMSNorm,
    Rope,
    causal_attention,
)

# A later draft counts only where all before it were right.
DECAY = 0.8
# Scale of the first logits: before it has learned anything a head should not be sure of it.
UNSURE = 0.25
# Of a held-out window every so many positions are looked at.
STRIDE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Sizes of a head, and how it is trained.

    layers    of the target, ascending, after which its stream is read
    ffn_size  of the head's layer
    depth     runs that are unrolled
    drafted   tokens of the draft vocabulary, for which the head has an lm_head of its own; 0: it
              shares the target's
    """

    layers: tuple[int, ...] = (1, 3, 6)
    ffn_size: int = 768
    depth: int = 7
    drafted: int = 0

    def check(self, target: DemoConfig) -> None:
        """ValueError for what a checkpoint cannot say, or the target does not have."""
        layers, last = self.layers, target.layers - 1
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] > last:
            raise ValueError(f"layers {list(layers)} must ascend, from 1 to at most {last}")
        if not 0 <= self.drafted <= target.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.drafted} tokens, the target has {target.vocab_size}"
            )
        if self.depth < 1:
            raise ValueError(f"depth {self.depth}: at least one run is needed")


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


class Eagle3Head(nn.Module):
    """The head beside a target of this shape, which its layer has but for the feed-forward size.

    ids  int64 [D], ascending: the draft vocabulary; None: all, by the target's lm_head
    """

    ids: torch.Tensor | None

    def __init__(
        self, config: HeadConfig, target: DemoConfig, ids: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.shape = shape = replace(target, ffn_size=config.ffn_size)
        self.fc = Linear(len(config.layers) * shape.hidden_size, shape.hidden_size)
        self.midlayer = HeadLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        # An embedding to the optimiser, which takes matrices of layers otherwise.
        self.lm_head = None if ids is None else nn.Embedding(len(ids), shape.hidden_size)
        self.register_buffer("ids", ids, persistent=False)

    @torch.no_grad()
    def begin_as(self, target: DemoModel) -> None:
        """Its last norm and lm_head are at first those of the target, but less sure."""
        self.norm.weight.copy_(UNSURE * target.model.norm.weight)
        if self.lm_head is not None:
            self.lm_head.weight.copy_(self.drafted(target.model.embed_tokens.weight, dim=0))

    def drafted(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Of the whole vocabulary's values along `dim` those of the draft vocabulary."""
        return values if self.ids is None else values.index_select(dim, self.ids)

    def tokens(self, drafts: torch.Tensor) -> torch.Tensor:
        """The target's ids of the draft vocabulary's."""
        return drafts if self.ids is None else self.ids[drafts]

    def logits(self, output: torch.Tensor, target: DemoModel) -> torch.Tensor:
        """Float32 [..., D] of what `outputs` gives."""
        if self.lm_head is None:
            return target.logits(output).float()
        return F.linear(output, self.lm_head.weight.to(output.dtype)).float()

    def outputs(
        self, following_BTH: torch.Tensor, streams_BTS: torch.Tensor, anchors_M: torch.Tensor
    ) -> list[torch.Tensor]:
        """[B,M,H] after the last norm, for each of `depth` runs.

        Run s at anchor p is at position p+s, is fed the embedding of token p+s+1, which is row p+s
        of `following_BTH`, with fc of the target's streams at p (s = 0) or the y of run s-1, and
        its logits predict token p+s+2. Anchors are at most T - 1 - depth.
        """
        rows = torch.arange(following_BTH.shape[1], device=following_BTH.device)
        y, k, v = self.midlayer(
            following_BTH, self.fc(streams_BTS), Rope.of(self.shape, rows), causal_attention
        )
        y = y.index_select(1, anchors_M)
        outputs, attend = [self.norm(y)], ChainAttention(k, v, anchors_M)
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


def read_target(
    head: Eagle3Head, target: DemoModel, windows_BT1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of windows: hidden states [B,T,H], streams [B,T,A*H], embeddings [B,T,H] of what follows."""
    hidden, streams = target.hidden_and_streams(windows_BT1[:, :-1], head.config.layers)
    return hidden, torch.cat(streams, dim=-1), target.embed(windows_BT1[:, 1:])


def head_losses(
    head: Eagle3Head, target: DemoModel, windows_BT1: torch.Tensor, anchors_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss to minimise, and its parts: mean cross entropies in nats of each run, [depth].

    Each is of the target's own distribution over the draft vocabulary, at those positions where
    that has the target's best token.
    """
    with torch.no_grad():
        hidden, streams, following = read_target(head, target, windows_BT1)
    losses = []
    for run, output in enumerate(head.outputs(following, streams, anchors_M)):
        with torch.no_grad():
            logits = target.logits(hidden.index_select(1, anchors_M + (run + 1))).float()
            wanted = head.drafted(logits)
            counts = (wanted.amax(-1) == logits.amax(-1)).flatten().float()
        draft = head.logits(output, target).flatten(0, 1)
        each = F.cross_entropy(draft, wanted.softmax(-1).flatten(0, 1), reduction="none")
        losses.append((each * counts).sum() / counts.sum().clamp(min=1))
    weighted = [DECAY**run * loss for run, loss in enumerate(losses)]
    return torch.stack(weighted).sum(), torch.stack(losses).detach()


@torch.no_grad()
def agreement(
    head: Eagle3Head, target: DemoModel, tokens: torch.Tensor, *, length: int, batch: int
) -> dict[str, Any]:
    """How often the head's token is the target's, by run, teacher-forced over a text.

    greedy   both take their best token
    sampled  both draw at temperature 1 with the same Gumbel noise, as the engine does
    tokens_per_step  1 and the drafts before the first that differs, where the text is what follows
    """
    depth = head.config.depth
    parts: dict[str, list[torch.Tensor]] = {"greedy": [], "sampled": []}
    for piece in windows(tokens, length=length, batch=batch):
        anchors = torch.arange(0, max(0, piece.shape[1] - 1 - depth), STRIDE, device=tokens.device)
        hidden, streams, following = read_target(head, target, piece.long())
        equal: dict[str, list[torch.Tensor]] = {name: [] for name in parts}
        for run, output in enumerate(head.outputs(following, streams, anchors)):
            wanted = target.logits(hidden.index_select(1, anchors + (run + 1))).float()
            draft = head.logits(output, target)
            noise = -torch.empty_like(wanted).exponential_().log()
            for name, heat in (("greedy", 0.0), ("sampled", 1.0)):
                drafted = head.tokens((draft + heat * head.drafted(noise)).argmax(-1))
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


def save_head(folder: Path, head: Eagle3Head) -> None:
    """config.json and model.safetensors; the weights are rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if head.ids is not None:
        ids = head.ids.cpu()
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
        stored["t2d"][ids] = True
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes the file readable only by its owner.
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / "config.json", head_json(head))
