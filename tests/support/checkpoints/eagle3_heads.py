"""EAGLE3 checkpoints for the tests' targets, and their formulae in plain PyTorch.

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

HEAD_DIM, EPS, THETA, FFN = 64, 1e-6, 50000.0, 44
PREFIX = "midlayer."
USUAL = (1, 3, 4)
"""Layers of a target of 8 that a head reads whose config names none."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a head beside a target.

    layers    of the target, after which its stream is read
    drafted   tokens of the draft vocabulary; 0: it has no lm_head and no offsets of its own
    narrower  the head's own width; 0: it is the target's, and so is the embedding
    norms     names of the norms of what fc reads, each of an equal share
    """

    layers: tuple[int, ...] = USUAL
    drafted: int = 61
    narrower: int = 0
    bias: bool = False
    normed_stream: bool = False
    normed_output: bool = False
    norms: tuple[str, ...] = ()


def shuffled(count: int, of: int) -> Tensor:
    """Tokens of a draft vocabulary, int64 [count], in no order."""
    return torch.randperm(of, generator=torch.Generator().manual_seed(count))[:count]


def head_tensors(shape: Shape, embedding: Tensor, lm_head: Tensor) -> Tensors:
    """A head that agrees with a target whose next token follows mostly from the last one.

    Attention finds the token that is fed among all, and takes away what the hidden state had.
    """
    generator = torch.Generator().manual_seed(3)

    def noise(*size: int, scale: float = 0.1) -> Tensor:
        return torch.randn(size, generator=generator) * scale

    tokens, width = embedding.shape
    hidden = shape.narrower or width
    heads = -(-hidden // HEAD_DIM)
    inner = heads * HEAD_DIM
    values = torch.eye(inner, hidden)
    likeness = noise(inner, hidden, scale=0.3)
    tensors = {
        "fc.weight": noise(hidden, len(shape.layers) * width, scale=0.3 / width**0.5),
        f"{PREFIX}self_attn.q_proj.weight": torch.cat([likeness, noise(inner, hidden)], dim=1),
        f"{PREFIX}self_attn.k_proj.weight": torch.cat([likeness, noise(inner, hidden)], dim=1),
        f"{PREFIX}self_attn.v_proj.weight": torch.cat([values, -values], dim=1)
        + noise(inner, 2 * hidden, scale=0.02),
        f"{PREFIX}self_attn.o_proj.weight": values.t() + noise(hidden, inner, scale=0.02),
        f"{PREFIX}mlp.gate_proj.weight": noise(FFN, hidden),
        f"{PREFIX}mlp.up_proj.weight": noise(FFN, hidden),
        f"{PREFIX}mlp.down_proj.weight": noise(hidden, FFN),
        f"{PREFIX}hidden_norm.weight": 1 + noise(hidden),
        f"{PREFIX}input_layernorm.weight": 1 + noise(hidden),
        f"{PREFIX}post_attention_layernorm.weight": 1 + noise(hidden),
        "norm.weight": 1 + noise(hidden),
    }
    if shape.bias:
        tensors["fc.bias"] = noise(hidden)
    for name in shape.norms:
        tensors[f"{name}.weight"] = 1 + noise(len(shape.layers) * width // len(shape.norms))
    if shape.narrower:
        tensors["embed_tokens.weight"] = embedding[:, :hidden].clone()
        lm_head = lm_head[:, :hidden]
    if shape.drafted:
        ids = shuffled(shape.drafted, tokens)
        tensors["lm_head.weight"] = lm_head[ids].clone()
        tensors["d2t"] = ids - torch.arange(shape.drafted)
        tensors["t2d"] = torch.zeros(tokens, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def head_config(shape: Shape, embedding: Tensor) -> dict[str, Any]:
    """The config as SafeAILab and SpecForge write it."""
    tokens, width = embedding.shape
    hidden = shape.narrower or width
    heads = -(-hidden // HEAD_DIM)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": tokens,
        "hidden_size": hidden, "intermediate_size": FFN, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "torch_dtype": "float32", "target_hidden_size": width,
        "draft_vocab_size": shape.drafted or None,
        "eagle_config": {"use_aux_hidden_state": True},
    }  # fmt: skip
    if shape.layers != USUAL and min(shape.layers) > 0:
        # Counted from the embedding; where the lowest is 1, ids would count from the first layer.
        ids = [layer + 1 for layer in shape.layers]
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    if shape.normed_stream:
        config["norm_before_residual"] = True
    if shape.normed_output:
        config["norm_output"] = True
    if shape.norms:
        config["norm_before_fc" if shape.norms == ("input_norm",) else "fc_norm"] = True
    return config


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def as_speculators(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The head as vLLM's speculators write it."""
    of_layer = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
                "rope_theta", "max_position_embeddings", "model_type"}  # fmt: skip
    whole = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {name: config[name] for name in of_layer},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
        **config["eagle_config"],
    }
    renamed = {name.replace(PREFIX, "layers.0."): tensor for name, tensor in tensors.items()}
    return whole, renamed


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
class Head:
    """One EAGLE3 head for one request, by its formulae.

    embedding, lm_head  the target's, used where the head has none
    """

    shape: Shape
    tensors: Tensors
    embedding: Tensor
    lm_head: Tensor
    cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def fuse(self, streams: Tensor) -> Tensor:
        """g of a token, whose streams lie side by side."""
        if self.shape.norms:
            shares = streams.chunk(len(self.shape.norms))
            norms = [self[name] for name in self.shape.norms]
            streams = torch.cat([rms(x, norm) for x, norm in zip(shares, norms, strict=True)])
        g = self["fc"] @ streams
        return g + self.tensors["fc.bias"] if self.shape.bias else g

    def run(self, token: int, g: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Run the row at `position`: what lm_head reads, and what the next row is fed as g."""
        embedding = self.tensors.get("embed_tokens.weight", self.embedding)[token]
        normed = rms(g, self[f"{PREFIX}hidden_norm"])
        fed = torch.cat([rms(embedding, self[f"{PREFIX}input_layernorm"]), normed])
        r = (normed if self.shape.normed_stream else g) + self._attention(fed, position)
        h = rms(r, self[f"{PREFIX}post_attention_layernorm"])
        gate, up = (self[f"{PREFIX}mlp.{name}_proj"] @ h for name in ("gate", "up"))
        y = r + self[f"{PREFIX}mlp.down_proj"] @ (F.silu(gate) * up)
        output = rms(y, self["norm"])
        return output, output if self.shape.normed_output else y

    def logits(self, output: Tensor) -> Tensor:
        """[V]: -inf for tokens that are not drafted."""
        logits = self.tensors.get("lm_head.weight", self.lm_head) @ output
        if "d2t" not in self.tensors:
            return logits
        ids = self.tensors["d2t"] + torch.arange(len(logits))
        return torch.full((len(self.embedding),), -torch.inf).index_copy(0, ids, logits)

    def _attention(self, fed: Tensor, position: int) -> Tensor:
        q, k, v = (
            (self[f"{PREFIX}self_attn.{name}_proj"] @ fed).view(-1, HEAD_DIM) for name in "qkv"
        )
        self.cache[position] = (rotate(k, position), v)
        seen = [self.cache[p] for p in sorted(self.cache) if p <= position]
        keys, values = (torch.stack(part) for part in zip(*seen, strict=True))
        scores = torch.einsum("phd,hd->hp", keys, rotate(q, position)) / HEAD_DIM**0.5
        attended = torch.einsum("hp,phd->hd", scores.softmax(1), values)
        return self[f"{PREFIX}self_attn.o_proj"] @ attended.flatten()


@torch.no_grad()
def streams_of(model: Any, sequence: list[int], layers: tuple[int, ...]) -> Tensor:
    """[P, A * H]: the sums that these layers of a transformers' model leave, side by side."""
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            found[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    hooks = [decoder.layers[layer].register_forward_hook(keep(layer)) for layer in set(layers)]
    model(torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    return torch.cat([found[layer].view(len(sequence), -1) for layer in layers], dim=1)
