"""Checkpoints whose next token depends only on the last one, with draft modules that know it, and
an EAGLE3 head that does.

A token's successor is the next of its group of `PERIOD`, cyclically. Layers add nothing, so a
module returns what its projection gives it: its drafts are wrong only if its inputs are wrong.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from checkpoints.eagle3_heads import HEAD_DIM, PREFIX, write_head
from checkpoints.mtp_modules import HIDDEN, SIZES, Tensors, random_tensors, write_checkpoint
from checkpoints.vanilla_modules import layout

PERIOD = 8
TOKENS = 64
# With this the successor is about as probable as all others together.
SHARPNESS = 0.5

# Folder of the EAGLE3 head, and the layers that it reads.
HEAD, HEAD_LAYERS = "eagle3", (0, 1)

Half = Literal["hidden", "token"]


def successor(token: int) -> int:
    return token // PERIOD * PERIOD + (token + 1) % PERIOD


def continuation(token: int, count: int) -> list[int]:
    """The greedy successor of a token."""
    tokens = [token]
    for _ in range(count):
        tokens.append(successor(tokens[-1]))
    return tokens[1:]


def write_successors(folder: Path, half: Half, modules: int = 3) -> Path:
    """A target and its modules, which read only one half of their input; in a folder of it
    `HEAD`, an EAGLE3 head that does.

    hidden  each knows the successor of the token that its hidden state stands for, so they agree
            with the target where it is greedy
    token   each knows the token that it is fed, as the target does, so they agree with it at any
            temperature
    """
    tensors = random_tensors(layout(modules))
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(value)
        elif "norm" in name:
            tensors[name] = torch.ones_like(value)
    identity = torch.eye(TOKENS, HIDDEN)
    following = [successor(token) for token in range(TOKENS)]
    tensors["model.embed_tokens.weight"] = identity.clone()
    lm_head = torch.zeros(TOKENS, HIDDEN)
    lm_head[following] = SHARPNESS * identity
    tensors["lm_head.weight"] = lm_head
    step = torch.zeros(HIDDEN, HIDDEN)
    step[following, range(TOKENS)] = 1.0
    nothing = torch.zeros(HIDDEN, HIDDEN)
    # The hidden state's half is the first, as in MiMo.
    halves = [step, nothing] if half == "hidden" else [nothing, torch.eye(HIDDEN)]
    projection: Tensors = {
        name: torch.cat(halves, dim=1) for name in tensors if name.endswith("input_proj.weight")
    }
    sizes: dict[str, Any] = {"vocab_size": TOKENS}
    write_head(folder / HEAD, _head_config(half), _head_tensors(half, step))
    return write_checkpoint(folder, SIZES | layout(modules).config | sizes, tensors | projection)


def _head_config(half: Half) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": TOKENS, "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-6,
        # By which the last pairs of a head hardly turn.
        "rope_theta": 1e9, "max_position_embeddings": 512,
        # The stream starts with a normed hidden state, which is 0.
        "norm_before_residual": half == "token",
    }  # fmt: skip


def _head_tensors(half: Half, step: Tensor) -> Tensors:
    """The target's own embedding and lm_head, of which embeddings are rows of the identity.

    hidden  the feed-forward makes of a token its successor
    token   attention finds the token that is fed, by its number's bits
    """
    nothing, identity = torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)
    scale = HIDDEN**0.5
    bits = torch.zeros(HEAD_DIM, HIDDEN)
    for bit in range(6):
        signs = [1.0 if token >> bit & 1 else -1.0 for token in range(TOKENS)]
        bits[HEAD_DIM // 2 - 1 - bit, :TOKENS] = 2 * torch.tensor(signs)
    likeness = torch.cat([bits, torch.zeros_like(bits)], dim=1)
    value = torch.eye(HEAD_DIM, 2 * HIDDEN)
    tensors = {
        # What either layer left.
        "fc.weight": torch.cat([identity, identity], dim=1) / 2,
        f"{PREFIX}self_attn.q_proj.weight": likeness,
        f"{PREFIX}self_attn.k_proj.weight": likeness,
        f"{PREFIX}self_attn.v_proj.weight": value,
        f"{PREFIX}self_attn.o_proj.weight": torch.zeros(HIDDEN, HEAD_DIM),
        f"{PREFIX}mlp.gate_proj.weight": identity,
        f"{PREFIX}mlp.up_proj.weight": identity,
        f"{PREFIX}mlp.down_proj.weight": nothing,
        "norm.weight": torch.ones(HIDDEN),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors |= {f"{PREFIX}{name}.weight": torch.ones(HIDDEN) for name in norms}
    if half == "hidden":
        # Of a normed row of the identity, silu(gate) * up is about HIDDEN.
        down = (step - identity) / HIDDEN
        tensors[f"{PREFIX}mlp.down_proj.weight"] = down * (1 + math.exp(-scale))
    else:
        tensors[f"{PREFIX}self_attn.o_proj.weight"] = torch.eye(HIDDEN, HEAD_DIM)
        tensors[f"{PREFIX}hidden_norm.weight"] = torch.zeros(HIDDEN)
    return tensors
