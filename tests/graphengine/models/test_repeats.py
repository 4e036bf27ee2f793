"""Blocks that a trace repeats launch what they launch when they run, in every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from engines.family_configs import CONFIGS, config_of
from graphengine.kernels.core.devices import H200, assumed
from graphengine.models import repeats
from graphengine.models.composition import Composition
from graphengine.models.repeats import memory_of
from graphengine.opening.budget import footprint
from graphengine.opening.budget.footprint import trace_footprint
from graphengine.profiles.benchmark.shapes import DEMO, Subject
from graphengine.program.graph_key import GraphKey
from graphengine.program.step import StepProgram
from graphengine.speculative import MTP, Eagle3
from launches.listing import Row, list_launches
from launches.step_rules import steps_of

SIZES: Mapping[str, Any] = {
    "device": "cpu", "dtype": "bfloat16", "max_batch": 4, "buckets": (4,), "max_seq_len": 256,
    "prefill_buckets": (64,),
}  # fmt: skip
OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "drafts": (DEMO, {"speculative": MTP(k=3)}),
    "streams that are kept": ("tiny", {"speculative": Eagle3("random", k=2)}),
    "fp8": (DEMO, {"quantize": "fp8", "activations": "fp8", "kv_dtype": "fp8"}),
    "experts in fp8": ("tiny-moe", {"quantize": "fp8"}),
    "one row": (DEMO, {"max_batch": 1, "buckets": (1,)}),
    "routes that are kept": ("tiny-moe", {"record_routing": True}),
}
Steps = Mapping[GraphKey, Callable[[], object]]


def deep(subject: Subject) -> Subject:
    """The shape with each of its layers three times."""
    model = cast(Composition, subject.model)
    return replace(subject, model=replace(model, layers=model.layers * 3))


def deep_steps(name: str) -> Steps:
    shape, options = OPTIONS.get(name, (name, {}))
    subject = (
        Subject.of_shape(shape)
        if name in OPTIONS
        else Subject.of_config(config_of(name), name=name)
    )
    return steps_of(subject if shape == DEMO else deep(subject), {**SIZES, **options})


def held_by(steps: Steps) -> set[int]:
    """The allocations of an engine's weights, caches and fields."""
    step = cast("partial[None]", next(iter(steps.values())))
    program: StepProgram = step.args[0]
    states = program.states
    tensors = [*program.model.weights.tensors(), states.cache, *states.recurrent.values()]
    return {memory_of(each) for each in tensors}


def lists(steps: Steps, **options: bool) -> tuple[list[Row], int]:
    return list_launches([*steps.values()], held=held_by(steps), **options)


def differences(steps: Steps) -> list[int]:
    """Which launches of steps with repeated calls differ from those of steps that run."""
    (short, _), (whole, none) = lists(steps), lists(steps, repeats=False)
    assert none == 0
    return [place for place, row in enumerate(whole) if short[place : place + 1] != [row]]


@pytest.mark.parametrize("name", [*CONFIGS, *OPTIONS])
def test_repeated_blocks_launch_what_they_launch_when_they_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with assumed(H200):
        steps = deep_steps(name)
        assert differences(steps) == []
        (_, repeated), found = lists(steps), trace_footprint(steps)
        # Experts whose routes are kept always run.
        assert repeated > 0 or name == "routes that are kept"
        monkeypatch.setattr(footprint, "repeats_told", lambda tracer: assumed(H200))
        monkeypatch.setattr(footprint, "known_result", lambda *call: None)
        assert trace_footprint(steps) == found


@pytest.mark.parametrize(
    ("architecture", "hidden"),
    [("Gemma3ForCausalLM", "block"), ("LlamaForCausalLM", "memory")],
)
def test_blocks_that_pass_for_alike_and_are_not_are_found(
    architecture: str, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: windows make no difference to what is alike; all layers have the first one's KV."""
    if hidden == "block":
        form_of = repeats._form_of_weights

        def without_block(block: repeats.BlockWeights) -> Any:
            form = form_of(block)
            kind, _, tensors = cast("tuple[Any, ...]", form.key)
            return form._replace(key=(kind, tensors))

        monkeypatch.setattr(repeats, "_form_of_weights", without_block)
    else:
        monkeypatch.setattr(repeats, "start_of", lambda tensor: 0)
    with assumed(H200):
        assert differences(deep_steps(architecture))
