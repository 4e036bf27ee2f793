"""The options of `graphengine bench` of a policy."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from graphengine.models.policies import PolicyConfig, read_policy_config
from graphengine.options.devices import DTYPES, check_device, usual_device
from graphengine.profiles.shape_configs import POLICIES, PolicyShape

GPU_RUNS, CPU_RUNS = 5, 2
GPU_CHUNKS, CPU_CHUNKS = 40, 3
_TAKEN = ("shape", "runs", "device", "dtype", "out", "json", "verbose", "command")
# Defaults of options of engines; other options that are left out are None, 0, false or empty.
_DEFAULTS: dict[str, Any] = {"prompt_tokens": 128, "sampler": "fast"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBench:
    """One invocation: the policy, and how often its chunks are measured.

    runs    how often
    chunks  of a run
    """

    name: str
    shape: PolicyShape
    config: PolicyConfig
    runs: int
    chunks: int
    device: torch.device
    dtype: torch.dtype


def read_policy_options(options: argparse.Namespace) -> PolicyBench:
    """The options of a policy's benchmark. ValueError for those of engines, and for bad ones."""
    for name, value in vars(options).items():
        usual = _DEFAULTS.get(name)
        if name not in _TAKEN and value not in (usual, None, 0, False, []):
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} {value} is for engines: --shape {options.shape} is a policy, whose "
                f"chunks take {', '.join(f'--{each}' for each in _TAKEN[1:6])}"
            )
    device = options.device or usual_device()
    check_device(device)
    on_cpu = device == "cpu"
    runs = options.runs
    if runs is None:
        runs = CPU_RUNS if on_cpu else GPU_RUNS
    if runs < 1:
        raise ValueError(f"runs={runs} must be at least 1")
    shape = POLICIES[options.shape]
    return PolicyBench(
        name=options.shape,
        shape=shape,
        config=read_policy_config(shape.config),
        runs=runs,
        chunks=CPU_CHUNKS if on_cpu else GPU_CHUNKS,
        device=torch.device(device),
        dtype=DTYPES[options.dtype or ("float32" if on_cpu else "bfloat16")],
    )
