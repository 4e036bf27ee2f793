"""Block drafters' checkpoints for the tests' targets, and their formulae in plain PyTorch.

The forward pass here is independent of the engine's: float32, no cache, all positions at once, from
z-lab/dflash's and deepseek-ai/DeepSpec's definitions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.eagle3_heads import Tensors, rms, write_head

HEAD_DIM, EPS, THETA, FFN, HEADS, KV_HEADS = 64, 1e-6, 50000.0, 44, 4, 2


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Sizes of a block drafter beside a target.

    layers   of the target, after which its stream is read
    windows  of each layer, 0 for full attention
    causal   what `is_causal` says; None: nothing
    dspark   whether it is of DeepSpec's kind: with an embedding and a head of its own
    rank     of its sequential head
    block    the trained block
    """

    layers: tuple[int, ...] = (1, 4, 6)
    windows: tuple[int, ...] = (0, 0)
    causal: bool | None = None
    dspark: bool = False
    rank: int = 0
    block: int = 8
    mask: int = 96

    def sees(self, layer: int, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query's position sees a key's."""
        window = self.windows[layer]
        causal = bool(window) if self.causal is None else self.causal
        seen = key <= query if causal else torch.ones_like(key <= query)
        if window:
            seen = seen & (query - key < window) & (key - query < window)
        return seen

    def width(self, drafts: int) -> int:
        return drafts if self.dspark else drafts + 1


def block_tensors(shape: BlockShape, embedding: Tensor, lm_head: Tensor, seed: int = 3) -> Tensors:
    """Random weights: what the drafter drafts follows from all that it reads."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int, scale: float = 0.15) -> Tensor:
        return torch.randn(size, generator=generator) * scale

    tokens, hidden = embedding.shape
    inner, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "fc.weight": noise(hidden, len(shape.layers) * hidden, scale=hidden**-0.5),
        "hidden_norm.weight": 1 + noise(hidden),
        "norm.weight": 1 + noise(hidden),
    }
    for layer in range(len(shape.windows)):
        prefix = f"layers.{layer}."
        sizes = {"q_proj": (inner, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        for name, size in sizes.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = noise(*size)
        tensors[f"{prefix}self_attn.o_proj.weight"] = noise(hidden, inner)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = 1 + noise(HEAD_DIM)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + noise(hidden)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{name}.weight"] = noise(FFN, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = noise(hidden, FFN)
    if shape.dspark:
        tensors["embed_tokens.weight"] = embedding + noise(tokens, hidden)
        tensors["lm_head.weight"] = lm_head + noise(tokens, hidden)
        tensors["confidence_head.proj.weight"] = noise(1, hidden + shape.rank)
        tensors["confidence_head.proj.bias"] = noise(1)
    if shape.rank:
        tensors["markov_head.markov_w1.weight"] = noise(tokens, shape.rank, scale=1.0)
        tensors["markov_head.markov_w2.weight"] = noise(tokens, shape.rank, scale=1.0)
    return tensors


def agreeing_tensors(shape: BlockShape, embedding: Tensor, lm_head: Tensor) -> Tensors:
    """Weights of a drafter that agrees with a target whose next token follows mostly from the last
    one, for a token or, with a sequential head, for more.

    Each lane makes of its block what the newest token's embedding is: masks are zeros, and little
    is left of what was verified.
    """
    tensors = block_tensors(shape, embedding, lm_head)
    hidden, kv = embedding.shape[1], KV_HEADS * HEAD_DIM
    tensors["hidden_norm.weight"] *= 0.02
    tensors["norm.weight"] = torch.ones(hidden)
    values = torch.zeros(kv, hidden)
    values[:hidden] = torch.eye(hidden)
    # Of the query heads that share a kv head, the first takes its values.
    heads = torch.zeros(hidden, HEADS, HEAD_DIM)
    heads[:, :: HEADS // KV_HEADS] = values.t().view(hidden, KV_HEADS, HEAD_DIM)
    for layer in range(len(shape.windows)):
        prefix = f"layers.{layer}."
        tensors[f"{prefix}self_attn.v_proj.weight"] = values
        tensors[f"{prefix}self_attn.o_proj.weight"] = heads.flatten(1) * (0.0 if layer else 50.0)
        tensors[f"{prefix}mlp.down_proj.weight"] *= 0
        tensors[f"{prefix}input_layernorm.weight"] = torch.ones(hidden)
    if shape.dspark:
        tensors["embed_tokens.weight"] = embedding
        tensors["lm_head.weight"] = lm_head
    if shape.rank:
        assert shape.rank == hidden, "as wide as what it stands for"
        normed = rms(embedding, torch.ones(hidden))
        tensors["markov_head.markov_w1.weight"] = normed
        tensors["markov_head.markov_w2.weight"] = 3 * lm_head
    return tensors


def block_config(shape: BlockShape, embedding: Tensor, layers: int) -> dict[str, Any]:
    """The config that checkpoints have that are published beside a target of so many layers."""
    tokens, hidden = embedding.shape
    kinds = ["sliding_attention" if window else "full_attention" for window in shape.windows]
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": tokens,
        "hidden_size": hidden, "intermediate_size": FFN, "num_hidden_layers": len(shape.windows),
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "attention_bias": False, "layer_types": kinds,
        "num_target_layers": layers, "torch_dtype": "float32", "max_window_layers": 0,
    }  # fmt: skip
    if any(shape.windows):
        config |= {"use_sliding_window": True, "sliding_window": max(shape.windows)}
    if shape.causal is not None:
        config["is_causal"] = shape.causal
    of_block = {"mask_token_id": shape.mask, "target_layer_ids": list(shape.layers)}
    if shape.dspark:
        config |= of_block | {
            "architectures": ["Qwen3DSparkModel"], "block_size": shape.block,
            "markov_rank": shape.rank, "enable_confidence_head": True, "num_anchors": 512,
            "confidence_head_with_markov": True,
        }  # fmt: skip
        return config | ({"markov_head_type": "vanilla"} if shape.rank else {})
    return config | {"block_size": shape.block, "dflash_config": of_block}


def write_echo(folder: Path, target: Path) -> Path:
    """A DSpark drafter of random weights for the checkpoint in `target`, which reads all of its
    layers but the last. Its sequential head has each token follow itself, so that some of its
    drafts are right.
    """
    layers, embedding, lm_head = _of_target(target)
    shape = BlockShape(
        layers=tuple(range(layers - 1)), windows=(0,), dspark=True, rank=64, mask=len(embedding) - 1
    )
    drafter = block_tensors(shape, embedding, lm_head)
    drafter["lm_head.weight"] *= 0.1
    drafter["markov_head.markov_w2.weight"] = drafter["markov_head.markov_w1.weight"]
    return write_head(folder, block_config(shape, embedding, layers), drafter)


def write_random(folder: Path, target: Path) -> Path:
    """A DFlash drafter of random weights for the checkpoint in `target`, one of whose layers has a
    window: what it drafts follows from all that it reads, and is hardly ever right.
    """
    layers, embedding, lm_head = _of_target(target)
    shape = BlockShape(layers=tuple(range(layers - 1)), windows=(0, 9))
    tensors = block_tensors(shape, embedding, lm_head)
    return write_head(folder, block_config(shape, embedding, layers), tensors)


def _of_target(target: Path) -> tuple[int, Tensor, Tensor]:
    """The layers of the checkpoint in `target`, its embedding and its lm_head."""
    tensors = load_file(target / "model.safetensors")
    layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    embedding = tensors["model.embed_tokens.weight"].float()
    return layers, embedding, tensors.get("lm_head.weight", embedding).float()


@dataclass
class PlainDrafter:
    """A block drafter by its formulae.

    embedding, lm_head  the target's, used where the drafter has none
    """

    shape: BlockShape
    tensors: Tensors
    embedding: Tensor
    lm_head: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def context(self, streams: Tensor) -> Tensor:
        """[P, H] of the streams of P verified positions."""
        return rms(streams @ self["fc"].t(), self["hidden_norm"])

    def keys_and_values(self, layer: int, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """[P, G, D] each, of what lies at `first` and after it."""
        keys = self._heads(layer, "k", x)
        return rotate(keys, first), self._heads(layer, "v", x)

    def _heads(self, layer: int, name: str, x: Tensor) -> Tensor:
        made = x @ self[f"layers.{layer}.self_attn.{name}_proj"].t()
        heads = made.unflatten(1, (-1, HEAD_DIM))
        return heads if name == "v" else rms(heads, self[f"layers.{layer}.self_attn.{name}_norm"])

    @torch.no_grad()
    def logits(self, streams: Tensor, newest: int, width: int) -> Tensor:
        """[B, V] of a block after the verified positions, before the sequential head."""
        first, context = len(streams), self.context(streams)
        tokens = torch.tensor([newest, *[self.shape.mask] * (width - 1)])
        x = self.tensors.get("embed_tokens.weight", self.embedding)[tokens]
        position = torch.arange(first + width)
        for layer in range(len(self.shape.windows)):
            prefix = f"layers.{layer}."
            h = rms(x, self[f"{prefix}input_layernorm"])
            of_context = self.keys_and_values(layer, context, 0)
            of_block = self.keys_and_values(layer, h, first)
            group = HEADS // KV_HEADS
            keys, values = (
                torch.cat(both).repeat_interleave(group, dim=1)
                for both in zip(of_context, of_block, strict=True)
            )
            queries = rotate(self._heads(layer, "q", h), first)
            scores = torch.einsum("bhd,phd->hbp", queries, keys) / HEAD_DIM**0.5
            seen = self.shape.sees(layer, position[first:, None], position[None, :])
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            attended = torch.einsum("hbp,phd->bhd", weights, values).flatten(1)
            x = x + attended @ self[f"{prefix}self_attn.o_proj"].t()
            h = rms(x, self[f"{prefix}post_attention_layernorm"])
            gate, up = (h @ self[f"{prefix}mlp.{name}_proj"].t() for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self[f"{prefix}mlp.down_proj"].t()
        return rms(x, self["norm"]) @ self.tensors.get("lm_head.weight", self.lm_head).t()

    def draft_logits(self, block: Tensor, newest: int, drafts: list[int]) -> Tensor:
        """[K, V]: what each draft is drawn from, after those before it."""
        if not self.shape.rank:
            return block[len(block) - len(drafts) :]
        before = torch.tensor([newest, *drafts[:-1]])
        head = "markov_head.markov_"
        return block + self[f"{head}w1"][before] @ self[f"{head}w2"].t()


def rotate(x: Tensor, first: int) -> Tensor:
    """[P, heads, D] at positions from `first` on: pairs (i, i + D/2) as complex numbers."""
    half = HEAD_DIM // 2
    position = torch.arange(first, first + len(x), dtype=torch.float64)[:, None, None]
    angle = position * THETA ** (-torch.arange(half).double() * 2 / HEAD_DIM)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = turned * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1).float()
