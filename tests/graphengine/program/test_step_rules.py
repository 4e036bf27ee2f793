"""Rules for the launches of every family's steps, read off the list of what an H200 would be given.

No engine is opened: the tensors have no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from engines.family_configs import CONFIGS, config_of
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.op import Op
from graphengine.kernels.core.pdl import EARLY, wait_for_inputs
from graphengine.profiles.benchmark.shapes import DEMO, SHAPES, Subject
from graphengine.speculative import MTP, DFlash, Eagle3, NGram, Suffix
from launches.step_rules import TorchCall, faults, record, steps_of

SIZES: Mapping[str, Any] = {
    "device": "cpu", "dtype": "bfloat16", "max_batch": 4, "buckets": (4,), "max_seq_len": 256,
    "prefill_buckets": (64,),
}  # fmt: skip
OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one row": (DEMO, {"max_batch": 1, "buckets": (1,)}),
    "many rows": (DEMO, {"max_batch": 32, "buckets": (32,)}),
    "drafts": (DEMO, {"speculative": MTP(k=3)}),
    "vanilla": ("tiny", {"speculative": MTP(k=1)}),
    "a tree": (DEMO, {"speculative": MTP(tree=[[0], [1], [0, 0]])}),
    "n-grams": (DEMO, {"speculative": NGram(k=3)}),
    "suffixes": (DEMO, {"speculative": Suffix(k=3)}),
    "eagle3": ("tiny", {"speculative": Eagle3("random", k=2)}),
    "dflash": ("tiny", {"speculative": DFlash("random", k=3)}),
    "dspark": ("tiny", {"speculative": DFlash("random-dspark", k=3)}),
    "drafts of experts": ("tiny-moe", {"speculative": MTP(k=2)}),
    "drafts of a hybrid": ("tiny-delta", {"speculative": MTP(k=2)}),
    "fp8": ("llama-1b", {"quantize": "fp8", "activations": "fp8", "kv_dtype": "fp8"}),
    "int4": ("llama-1b", {"quantize": "int4", "quantize_lm_head": True}),
    "experts in fp8": ("tiny-moe", {"quantize": "fp8"}),
    "log-probabilities": (
        DEMO,
        {"max_logprobs": 5, "prompt_logprobs": True, "prompt_logprobs_out": True},
    ),
    "embeddings": (DEMO, {"prompt_embeds": True}),
    "adapters": ("llama-1b", {"max_adapters": 2, "max_adapter_rank": 8}),
    "adapters of one row": ("llama-1b", {"max_adapters": 2, "max_batch": 1, "buckets": (1,)}),
    "adapters and drafts": ("tiny", {"max_adapters": 2, "speculative": NGram(k=3)}),
    "pictures": ("Qwen2VLForConditionalGeneration", {"prompt_embeds": True}),
    "packed prompts": ("llama-1b", {"prompts_per_prefill": 3}),
    "packed prompts of int8": ("tiny", {"prompts_per_prefill": 3, "quantize": "int8"}),
    "packed prompts of experts": ("tiny-moe", {"prompts_per_prefill": 3}),
    "packed prompts of latents": ("Glm4MoeLiteForCausalLM", {"prompts_per_prefill": 3}),
    "packed prompts of a delta net": ("tiny-delta", {"prompts_per_prefill": 3}),
    "packed prompts of Mamba2": ("GraniteMoeHybridForCausalLM", {"prompts_per_prefill": 3}),
    "packed prompts of convolutions": ("Lfm2ForCausalLM", {"prompts_per_prefill": 3}),
    "packed prompts of n-grams": ("tiny", {"prompts_per_prefill": 3, "speculative": NGram(k=3)}),
    "packed prompts of a module": (DEMO, {"prompts_per_prefill": 3, "speculative": MTP(k=3)}),
    "packed prompts of a tree": (
        DEMO,
        {"prompts_per_prefill": 3, "speculative": MTP(tree=[[0], [1], [0, 0]])},
    ),
    "packed prompts of eagle3": (
        "tiny",
        {"prompts_per_prefill": 3, "speculative": Eagle3("random", k=2)},
    ),
    "packed prompts of dflash": (
        "tiny",
        {"prompts_per_prefill": 3, "speculative": DFlash("random", k=3)},
    ),
    "packed prompts of dspark": (
        "tiny",
        {"prompts_per_prefill": 3, "speculative": DFlash("random-dspark", k=3)},
    ),
    "packed prompts of modules with experts": (
        "tiny-moe",
        {"prompts_per_prefill": 3, "speculative": MTP(k=2)},
    ),
    "packed prompts of GELUs": ("tiny-gemma", {"prompts_per_prefill": 3}),
    "packed prompts with adapters": ("llama-1b", {"prompts_per_prefill": 3, "max_adapters": 2}),
    "packed prompts with routing": ("tiny-moe", {"prompts_per_prefill": 3, "record_routing": True}),
    "packed prompts with pictures": (
        "Qwen2VLForConditionalGeneration",
        {"prompts_per_prefill": 3, "prompt_embeds": True},
    ),
    "several steps": (DEMO, {"steps_per_launch": 3}),
    "several steps of one row": (DEMO, {"steps_per_launch": 2, "max_batch": 1, "buckets": (1,)}),
    "several steps with drafts": (DEMO, {"steps_per_launch": 2, "speculative": MTP(k=3)}),
    "several steps of n-grams": (DEMO, {"steps_per_launch": 2, "speculative": NGram(k=3)}),
    "several steps of trees": (
        DEMO,
        {"steps_per_launch": 2, "speculative": MTP(tree=[[0], [1], [0, 0]])},
    ),
    "several steps of a hybrid": ("tiny-delta", {"steps_per_launch": 2}),
    "several steps of experts": ("tiny-moe", {"steps_per_launch": 2}),
    "several steps with adapters": ("tiny", {"steps_per_launch": 2, "max_adapters": 2}),
    "several steps with log-probabilities": (DEMO, {"steps_per_launch": 2, "max_logprobs": 5}),
}


def subject_of(name: str) -> tuple[Subject, Mapping[str, Any]]:
    shape, options = OPTIONS.get(name, (name, {}))
    if shape in CONFIGS:
        return Subject.of_config(config_of(shape), name=shape), {**SIZES, **options}
    if shape.startswith("llama"):
        few = {**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 16_384}
        return Subject.of_config(few, name=shape), {**SIZES, **options}
    return Subject.of_shape(shape), {**SIZES, **options}


@pytest.mark.parametrize("name", [*CONFIGS, *OPTIONS])
def test_every_launch_obeys_the_rules(name: str) -> None:
    with assumed(H200):
        found = {
            key: [*faults(record(step), decode=key.kind != "prefill")]
            for key, step in steps_of(*subject_of(name)).items()
        }
    assert found and not any(found.values()), found


PACKED = [name for name in OPTIONS if name.startswith("packed prompts")]
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "__matmul__", "linear", "einsum"}
"""Functions of torch by which a BLAS multiplies; its order of sums depends on the number of lanes.
"""


@pytest.mark.parametrize("name", PACKED)
def test_packed_prompts_leave_no_product_to_a_blas(name: str) -> None:
    """A chunk has other lanes alone than with others; without packing a BLAS is free to choose."""
    subject, options = subject_of(name)
    with assumed(H200):
        packed = torch_calls(subject, options)
        alone = torch_calls(subject, {**options, "prompts_per_prefill": 1})
    assert not packed & PRODUCTS
    assert alone & PRODUCTS or "quantize" in options


def torch_calls(subject: Subject, options: Mapping[str, Any]) -> set[str]:
    """The functions of torch that the prefills of an engine call."""
    steps = steps_of(subject, options)
    found = (each for key in steps if key.kind == "prefill" for each in record(steps[key]))
    return {each.name for each in found if isinstance(each, TorchCall)}


# Planted faults.


class Outputs(NamedTuple):
    x: Any


@triton.jit
def _copy_kernel(slot_ptr, x_ptr, outputs, out_ptr, EARLY: tl.constexpr, PDL: tl.constexpr):
    if EARLY == 1:
        x = tl.load(x_ptr)
    if EARLY == 2:
        tl.store(out_ptr, 0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr)
    if slot_ptr is not None:
        x += tl.load(slot_ptr)
    if outputs is not None:
        tl.store(outputs.x, x)
    tl.store(out_ptr, x)


@triton.jit
def _take_sums_kernel(slot_ptr, x_ptr, out_ptr, PDL: tl.constexpr):
    tl.store(out_ptr, tl.load(x_ptr) + tl.load(slot_ptr))
    wait_for_inputs(PDL, OVERLAP=False)


def tensor(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(4, dtype=dtype, device="meta")


def made(result: torch.Tensor) -> TorchCall:
    return TorchCall("empty", [], result)


def op(x: torch.Tensor, out: torch.Tensor, **other: Any) -> Op:
    given = {"slot_ptr": tensor(torch.int32), "outputs": None, "EARLY": 0, "PDL": True} | other
    return Op(_copy_kernel, (1,), {"x_ptr": x, "out_ptr": out, **given}, {}, pdl=given["PDL"])


def starting_early(x: torch.Tensor, out: torch.Tensor) -> Op:
    return op(x, out, PDL=EARLY)


def storing_early(x: torch.Tensor, out: torch.Tensor) -> Op:
    given = {"slot_ptr": tensor(torch.int32), "x_ptr": x, "out_ptr": out, "PDL": True}
    return Op(_take_sums_kernel, (1,), given, {}, pdl=True)


def test_planted_faults_are_found() -> None:
    x, y, z, w = tensor(), tensor(), tensor(), tensor()
    same = {"slot_ptr": tensor(torch.int32)}
    waiting = op(x, y)
    given = {name: value for name, value in waiting.arguments.items() if name != "PDL"}
    without_pdl = replace(waiting, arguments=given, pdl=False)
    cases = [
        ([op(x, y), op(y, z)], []),
        ([made(y), op(y, z)], ["reads x_ptr, which nothing has written"]),
        (
            [made(y), op(x, y, **same), op(x, y, **same)],
            ["writes out_ptr, which nothing has read since"],
        ),
        # Lanes of another kind.
        ([made(y), op(x, y, **same), op(x, y)], []),
        ([op(x, y), op(x, y)], []),
        ([made(y), op(x, z, outputs=Outputs(y)), op(y, z), op(x, y)], []),
        ([op(x, y), op(y, z, EARLY=1)], ["reads x_ptr early, which a launch writes that may"]),
        ([op(x, y), op(x, w), op(y, z, EARLY=1)], []),
        ([op(x, y), starting_early(x, w), op(y, z, EARLY=1)], ["which a launch writes that may"]),
        ([op(x, y), starting_early(x, w), op(w, z, EARLY=1)], ["which a launch writes that may"]),
        ([op(x, y), starting_early(x, w), op(x, w), op(y, z, EARLY=1)], []),
        ([op(x, y), op(x, z), op(y, x, EARLY=1)], []),
        ([op(x, y, EARLY=2)], ["writes out_ptr before it waits"]),
        ([op(x, y, EARLY=2, PDL=False)], []),
        ([op(x, y), storing_early(x, z)], []),
        ([starting_early(x, y), storing_early(x, z)], ["and what is older may still be read"]),
        ([without_pdl], ["does not wait for the launch before"]),
        ([op(x, y, slot_ptr=None)], ["does not know which lanes are padded"]),
        ([TorchCall("mm", [x], y)], ["torch computes mm in a decode graph"]),
    ]
    for step, expected in cases:
        found = [*faults(step, decode=True)]  # type: ignore[arg-type]
        assert len(found) == len(expected), found
        assert all(part in each for part, each in zip(expected, found, strict=True)), found
    assert [*faults([TorchCall("mm", [x], y), op(x, y, slot_ptr=None)], decode=False)] == []
