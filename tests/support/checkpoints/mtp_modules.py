"""Random checkpoints with draft modules, one of each layout, and their formulae in plain PyTorch.

The forward pass here is independent of the engine's: one row at a time, float32, keys and values in
a dict by position.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]

# Odd on purpose: sizes that no tile divides.
VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 97, 72, 56, 2, 4, 2, 64
EPS, THETA = 1e-5, 10000.0
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
}


@dataclass(frozen=True)
class Layout:
    """Names of a layout's modules, and features of its family's layers."""

    config: dict[str, Any]
    prefixes: tuple[str, ...]
    embedding_norm: str
    hidden_norm: str
    projection: str
    layer: str
    final_norm: str
    hidden_first: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    copies: tuple[str, ...] = ()


LAYOUTS = {
    "qwen3": Layout(
        config={"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
        prefixes=("mtp.",),
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        layer="layers.0.",
        final_norm="norm",
        qk_norm=True,
    ),
    "mimo": Layout(
        config={
            "architectures": ["MiMoForCausalLM"], "attention_bias": True,
            "num_nextn_predict_layers": 2, "use_sliding_window": False,
        },
        prefixes=("model.mtp_layers.0.", "model.mtp_layers.1."),
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        layer="",
        final_norm="final_layernorm",
        hidden_first=True,
        qkv_bias=True,
    ),
    # With the layers of a Llama in place of latent attention and experts.
    "deepseek": Layout(
        config={
            "architectures": ["LlamaForCausalLM"], "attention_bias": True,
            "num_nextn_predict_layers": 2,
        },
        prefixes=("model.layers.2.", "model.layers.3."),
        embedding_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        layer="",
        final_norm="shared_head.norm",
        qkv_bias=True,
        output_bias=True,
        copies=("embed_tokens", "shared_head.head"),
    ),
}  # fmt: skip


def random_tensors(layout: Layout) -> Tensors:
    """A target model and its draft modules; with such weights logits spread."""
    generator = torch.Generator().manual_seed(len(layout.projection))
    tensors: Tensors = {}

    def new(name: str, *shape: int) -> None:
        scale = 0.3 if len(shape) == 1 else 0.15
        value = torch.randn(shape, generator=generator) * scale
        tensors[name] = 1 + value if "norm" in name else value

    def new_layer(prefix: str) -> None:
        sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, size in sizes.items():
            new(f"{prefix}self_attn.{name}_proj.weight", size, HIDDEN)
            if layout.qkv_bias:
                new(f"{prefix}self_attn.{name}_proj.bias", size)
        for name in ("q_norm", "k_norm") if layout.qk_norm else ():
            new(f"{prefix}self_attn.{name}.weight", HEAD_DIM)
        new(f"{prefix}self_attn.o_proj.weight", HIDDEN, sizes["q"])
        if layout.output_bias:
            new(f"{prefix}self_attn.o_proj.bias", HIDDEN)
        new(f"{prefix}mlp.gate_proj.weight", FFN, HIDDEN)
        new(f"{prefix}mlp.up_proj.weight", FFN, HIDDEN)
        new(f"{prefix}mlp.down_proj.weight", HIDDEN, FFN)
        new(f"{prefix}input_layernorm.weight", HIDDEN)
        new(f"{prefix}post_attention_layernorm.weight", HIDDEN)

    new("model.embed_tokens.weight", VOCAB, HIDDEN)
    new("model.norm.weight", HIDDEN)
    if not layout.config.get("tie_word_embeddings"):
        new("lm_head.weight", VOCAB, HIDDEN)
    for index in range(LAYERS):
        new_layer(f"model.layers.{index}.")
    for prefix in layout.prefixes:
        for norm in (layout.embedding_norm, layout.hidden_norm, layout.final_norm):
            new(f"{prefix}{norm}.weight", HIDDEN)
        new(f"{prefix}{layout.projection}.weight", HIDDEN, 2 * HIDDEN)
        new_layer(prefix + layout.layer)
        for name in layout.copies:
            # Their values differ from those they are a copy of, as nothing may read them.
            new(f"{prefix}{name}.weight", VOCAB, HIDDEN)
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_random(folder: Path, name: str) -> Path:
    """A checkpoint of `LAYOUTS[name]`."""
    layout = LAYOUTS[name]
    return write_checkpoint(folder, SIZES | layout.config, random_tensors(layout))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """[heads, D]: pairs (i, i + D/2) as complex numbers."""
    half = HEAD_DIM // 2
    angle = position * THETA ** (-torch.arange(half).double() * 2 / HEAD_DIM)
    turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(
        torch.ones(half, dtype=torch.float64), angle
    )
    return torch.cat([turned.real, turned.imag], dim=1).float()


@dataclass
class Module:
    """One draft module of one request, by its formulae."""

    layout: Layout
    tensors: Tensors
    prefix: str
    cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def run(self, token: int, hidden: Tensor, position: int) -> Tensor:
        """u `[H]` of the row at `position`, which is fed `token` and `hidden`."""
        embedding = self.tensors["model.embed_tokens.weight"][token]
        halves = [
            rms(embedding, self[self.layout.embedding_norm]),
            rms(hidden, self[self.layout.hidden_norm]),
        ]
        if self.layout.hidden_first:
            halves.reverse()
        x = self[self.layout.projection] @ torch.cat(halves)
        layer = self.layout.layer
        x = x + self._attention(rms(x, self[f"{layer}input_layernorm"]), position)
        h = rms(x, self[f"{layer}post_attention_layernorm"])
        gated = F.silu(self[f"{layer}mlp.gate_proj"] @ h) * (self[f"{layer}mlp.up_proj"] @ h)
        return rms(x + self[f"{layer}mlp.down_proj"] @ gated, self[self.layout.final_norm])

    def _project(self, name: str, h: Tensor) -> Tensor:
        name = f"{self.layout.layer}self_attn.{name}_proj"
        bias = self.tensors.get(f"{self.prefix}{name}.bias")
        y = self[name] @ h
        return y if bias is None else y + bias

    def _attention(self, h: Tensor, position: int) -> Tensor:
        q, k, v = (self._project(name, h).view(-1, HEAD_DIM) for name in "qkv")
        if self.layout.qk_norm:
            q = rms(q, self[f"{self.layout.layer}self_attn.q_norm"])
            k = rms(k, self[f"{self.layout.layer}self_attn.k_norm"])
        self.cache[position] = (rotate(k, position), v)
        seen = [self.cache[p] for p in sorted(self.cache) if p <= position]
        keys, values = (torch.stack(part) for part in zip(*seen, strict=True))
        outputs = []
        for head, query in enumerate(rotate(q, position)):
            group = head // (HEADS // KV_HEADS)
            weights = (keys[:, group] @ query / HEAD_DIM**0.5).softmax(0)
            outputs.append(weights @ values[:, group])
        return self._project("o", torch.cat(outputs))

    def logits(self, u: Tensor) -> Tensor:
        embedding = self.tensors["model.embed_tokens.weight"]
        return self.tensors.get("lm_head.weight", embedding) @ u
