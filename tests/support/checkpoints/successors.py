"""Checkpoints whose next token depends only on the last one, with draft modules that know it.

A token's successor is the next of its group of `PERIOD`, cyclically. Layers add nothing, so a
module returns what its projection gives it: its drafts are wrong only if its inputs are wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from checkpoints.mtp_modules import HIDDEN, SIZES, Tensors, random_tensors, write_checkpoint
from checkpoints.vanilla_modules import layout

PERIOD = 8
TOKENS = 64
# With this the successor is about as probable as all others together.
SHARPNESS = 0.5

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
    """A target and its modules, which read only one half of their input.

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
    return write_checkpoint(folder, SIZES | layout(modules).config | sizes, tensors | projection)
