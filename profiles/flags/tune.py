"""The flags of `graphengine tune`."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphengine.cli.option_flags import add_flags, kept_facts
from graphengine.profiles.flags import DTYPE_NAMES, FAMILIES
from graphengine.profiles.shape_configs import NAMES

ENGINE_FLAGS = ("quantize", "quantize_lm_head", "tensor_parallel", "expert_parallel")
ORDER = (
    "expert_down", "expert_gate_up", "expert_up", "shared_down", "shared_gate_up", "down",
    "gate_up", "up", "qkv", "q_kv_a", "q_b", "output", "delta_in", "delta_out",
    "mamba_in", "mamba_out", "conv_in", "conv_out", "lm_head",
)  # fmt: skip
"""The linears that are tuned, in this order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `graphengine tune`."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=NAMES, help="one of the shapes that `bench` measures")
    model.add_argument("--checkpoint", help="directory or hub id; 'demo' is the packaged model")
    add = parser.add_argument
    add("--family", nargs="+", choices=FAMILIES, default=FAMILIES, help="default: both")
    add("--only", nargs="+", choices=ORDER, default=ORDER, help="default: all linears")
    add("--rows", help="row counts to measure, such as 8,32 (default: 1 for fma; 8,32 for dot)")
    add("--dtype", choices=DTYPE_NAMES, help="default: the checkpoint's, or bfloat16")
    add_flags(parser, kept_facts("EngineConfig"), only=ENGINE_FLAGS)
    add(
        "--seconds",
        type=float,
        default=300.0,
        help="time limit per family, after which no more plans are tried",
    )
    add("--device", default="cuda", help="the GPU to measure on")
    add("--out", type=Path, help="table to add the plans to (default: the user's)")
