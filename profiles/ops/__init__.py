"""`graphengine ops`: the launches of an engine's, a shape's or a policy's steps, kernel by
kernel.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from graphengine.cli.commands import ops as of_engines
from graphengine.cli.given import read_engine_options
from graphengine.config import EngineConfig
from graphengine.core.recorded_rows import sketch_rows
from graphengine.models.policies import read_policy_config
from graphengine.observe.op_table import OpRow
from graphengine.opening.budget.footprint import plan_with_footprint
from graphengine.policies.sketch import policy_rows
from graphengine.profiles.benchmark.engines import random_drafter, rounded_model
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.shape_configs import DEMO, POLICIES

_NOTE = "as an H200 would launch them, with its plans"


def ops(options: argparse.Namespace) -> None:
    """Print the launches of each graph's step; none is made."""
    if options.shape is None:
        of_engines.ops(options)
        return
    if options.checkpoint != DEMO:
        raise ValueError(f"--shape {options.shape} and --checkpoint {options.checkpoint}: give one")
    if options.shape in POLICIES:
        tables = _of_policy(options)
    else:
        tables = _of_shape(options)
    of_engines.show_tables(tables, _NOTE, json_only=options.json)


def _of_shape(options: argparse.Namespace) -> dict[str, list[OpRow]]:
    """The graphs of an engine of a shape: its tensors have no memory, however many they are."""
    given: dict[str, Any] = {"dtype": "bfloat16", **read_engine_options(options)}
    config = EngineConfig(**given | {"device": "cpu"})
    if config.ranks > 1:
        raise ValueError(
            f"ops shows what one GPU launches, and {config.ranks} ranks were asked for"
        )
    subject = Subject.of_shape(options.shape)
    model, drafter = rounded_model(subject.model, config), random_drafter(subject, config)
    memory = plan_with_footprint(model, config, checkpoint_dtype=torch.bfloat16, drafter=drafter)
    graphs = of_engines.chosen_graphs(memory.graphs, options.graph)
    found = sketch_rows(model, memory, config, drafter, graphs)
    return {key.name: rows for key, rows in found.items()}


def _of_policy(options: argparse.Namespace) -> dict[str, list[OpRow]]:
    """The one graph of a policy, for the prefix of its shape."""
    given = [name.replace("_", "-") for name in read_engine_options(options)]
    if given:
        raise ValueError(f"--{given[0]} is for engines: --shape {options.shape} is a policy")
    shape, graph = POLICIES[options.shape], options.graph
    found = f"chunk/{shape.prefix_tokens}"
    if graph not in (None, found):
        raise ValueError(f"--graph {graph}: the graphs are {found}")
    config = read_policy_config(shape.config)
    return {found: policy_rows(config, shape.prefix_tokens, torch.bfloat16)}
