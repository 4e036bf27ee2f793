"""Checks, before anything is loaded, that a model, its weights and a GPU support the options."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphengine.config import EngineConfig
from graphengine.drafters import Drafter, DraftNeeds
from graphengine.kernels.core.devices import device_of
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.packed_cut import PACKED_COLUMNS
from graphengine.kernels.linear.prefill.lane_codes import ActivationKind
from graphengine.kernels.linear.prefill.packed_chunk_fp8 import takes_fp8
from graphengine.models.contract import ModelConfig
from graphengine.models.linears import Linear
from graphengine.models.states import LayerStates, paged_states, recurrent_states, side_by_side
from graphengine.models.weights import RoutedExperts
from graphengine.opening.inventory import state_places
from graphengine.options.checks import some


def check_requirements(
    model: ModelConfig,
    config: EngineConfig,
    needs: DraftNeeds,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """ValueError for prefix caching of a model whose recurrent states are not kept, for an fp8 KV
    cache or fp8 activations on a GPU that cannot convert them, for an fp8 cache of layers without
    scales, for packed weights that the kernels of a GPU do not take, and for fp8 activations if no
    linear takes them.

    dtype  dtype of weights and activations
    """
    _check_prefixes(model, config, needs)
    if config.kv_dtype == "fp8":
        check_fp8("kv_dtype", device)
        for states in (model.states, needs.states):
            check_fp8_states(model.architecture, states)
    check_packed(model, device, dtype)
    if config.activations is not None:
        check_fp8("activations", device)
        check_coded(model, config.activations, dtype)


def _check_prefixes(model: ModelConfig, config: EngineConfig, needs: DraftNeeds) -> None:
    """ValueError for prefix caching with recurrent layers whose states are not kept."""
    recurrent = recurrent_states(model.states)
    # With prefix caching, no layer has rings.
    if config.prefix_caching and recurrent and not state_places(model, config, needs, ()):
        why = "session_states=0 keeps none of them: that needs 1 or more"
        if config.session_states:
            own = len(recurrent_states(needs.states))
            why = f"beside a drafter with {own} of its own none of them is kept"
        raise ValueError(
            f"prefix_caching=True, but a {model.architecture} has {len(recurrent)} recurrent "
            f"states, which follow from every token of a prompt, and {why}"
        )


def check_packing(
    model: ModelConfig,
    config: EngineConfig,
    drafter: Drafter,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """ValueError where one prefill replay cannot take chunks of several prompts.

    In such an engine a lane's bits must not depend on the number of lanes of its chunk. Not all
    prefill kernels ensure that.
    """
    if config.prompts_per_prefill == 1:
        return
    asked = f"prompts_per_prefill={config.prompts_per_prefill}"
    refused = {
        "speculative": config.mode is not None and not config.mode.packs_prompts,
        "pipeline_parallel": config.pipeline_parallel > 1,
        "data_parallel": config.data_parallel > 1,
    }
    for name, given in refused.items():
        if given:
            value = getattr(config, name)
            raise ValueError(f"{asked} is for engines without {name}={value!r:.99}")
    if model.inner:
        has = "has frames of codes, and feeds one prompt"
        raise ValueError(f"{asked}: a {model.architecture} {has}")
    _check_drafts_of_prompts(drafter.needs, config, asked)
    gpu = device_of(device)
    if gpu is None:
        return
    if not gpu.has_wgmma or dtype == torch.float32:
        raise ValueError(
            f"{asked} needs a GPU of compute capability 9.0 and 16 bits: {device} has "
            f"{'.'.join(map(str, gpu.capability))}, and dtype={dtype}"
        )
    drafts = {f"the drafter's {name}": each for name, each in drafter.chunk_linears.items()}
    for name, linear in {**model.linears, **drafts}.items():
        chunked = linear.weight is None and linear.kind != "sample" and not linear.experts
        if chunked and (linear.rows % 8 or linear.columns % 8):
            raise ValueError(
                f"{asked}: {name} has {linear.rows} rows and {linear.columns} columns, and a GPU "
                f"takes multiples of 8"
            )


def _check_drafts_of_prompts(needs: DraftNeeds, config: EngineConfig, asked: str) -> None:
    """ValueError where a drafter does not take as many prompts at once."""
    recurrent, prompts = recurrent_states(needs.states), config.packed_prompts
    if recurrent:
        raise ValueError(
            f"{asked} is for drafters without recurrent states: speculative={config.mode!r:.99} "
            f"has {len(recurrent)}, and feeds one prompt"
        )
    lanes = needs.lanes_of_prompt
    if prompts * lanes > MAX_LANES:
        raise ValueError(
            f"{asked} drafts with {prompts * lanes} lanes after {prompts} prompts, {lanes} for "
            f"each, and at most {MAX_LANES} fit: prompts_per_prefill={MAX_LANES // lanes} does"
        )


def check_frames(model: ModelConfig, config: EngineConfig) -> None:
    """ValueError for options that an engine whose steps emit frames does not have."""
    inner = model.inner
    if inner is None:
        return
    given = {
        "speculative": config.mode is not None,
        "tensor_parallel": config.tensor_parallel > 1,
        "pipeline_parallel": config.pipeline_parallel > 1,
        "data_parallel": config.data_parallel > 1,
        "adapters": config.adapters is not None,
        "max_adapters": config.max_adapters is not None,
        "merge_adapter": config.merge_adapter is not None,
        "quantize": config.quantize is not None,
        "kv_dtype": config.kv_dtype == "fp8",
        "prompt_logprobs": config.prompt_logprobs,
        "grammar_pool_mib": config.grammar_pool_mib > 0,
    }
    for name, there in given.items():
        if there:
            raise ValueError(
                f"{name}={getattr(config, name)!r:.99}: a {model.architecture}, each step of which "
                f"emits a frame of {inner.steps} codes, is served without it"
            )
    if model.forms:
        raise ValueError(
            f"a {model.architecture} with quantised weights ({some(sorted(model.forms))}): models "
            f"whose steps emit frames are served in 16 or 32 bits"
        )


def recorded_experts(
    model: ModelConfig, config: EngineConfig, routed: RoutedExperts | None
) -> RoutedExperts | None:
    """The model's experts if they are to be recorded, else None; ValueError if it has none."""
    if not config.record_routing:
        return None
    if routed is None:
        raise ValueError(
            f"record_routing=True, but no layer of this {model.architecture} has experts"
        )
    return routed


def check_fp8(option: str, device: torch.device) -> None:
    """Raise ValueError where an option asks for e4m3 values and the GPU cannot convert any."""
    gpu = device_of(device)
    if gpu is not None and not gpu.converts_fp8:
        raise ValueError(
            f"{option}='fp8' needs a GPU of compute capability 8.9 or more: {device} has "
            f"{'.'.join(map(str, gpu.capability))}"
        )


def check_fp8_states(architecture: str, layers: Sequence[LayerStates]) -> None:
    """ValueError for layers whose caches have no scales."""
    latent = next((state for state in paged_states(layers) if not state.kv_heads), None)
    if latent is not None:
        raise ValueError(
            f"kv_dtype='fp8' is for caches of keys and values: layers of this {architecture} keep "
            f"latents of {math.prod(latent.entry)} values, which have no scales"
        )
    apart = {state.entry for state in side_by_side(layers)}
    if apart:
        shapes = " and ".join(f"{heads} heads of {size}" for heads, size in sorted(apart))
        raise ValueError(
            f"kv_dtype='fp8' is for layers whose keys and values have one shape: those of this "
            f"{architecture} have {shapes}"
        )


def check_packed(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """ValueError, before anything is loaded, for packed weights that a GPU's kernels refuse."""
    packed = {name: linear for name, linear in model.linears.items() if linear.weight is not None}
    if device.type != "cuda" or not packed:
        return
    if dtype == torch.float32:
        raise ValueError(
            f"dtype={dtype}: with packed weights ({', '.join(packed)}) a GPU computes in float16 "
            f"or bfloat16"
        )
    for name, linear in packed.items():
        if linear.columns % PACKED_COLUMNS:
            raise ValueError(
                f"{name} is packed, with {linear.columns} columns: a GPU takes a multiple of "
                f"{PACKED_COLUMNS}"
            )


def coded_linears(model: ModelConfig) -> list[Linear]:
    """Linears whose inputs prefill rounds with fp8 activations; never lm_head or experts."""
    return [
        linear
        for linear in model.linears.values()
        if linear.kind != "sample"
        and linear.weight is not None
        and not linear.experts
        and takes_fp8(linear.weight, linear.columns)
    ]


def check_coded(model: ModelConfig, activations: ActivationKind, dtype: torch.dtype) -> None:
    """ValueError unless some linear takes rounded inputs."""
    if not coded_linears(model):
        raise ValueError(
            f"activations={activations!r} is for linears in e4m3 with a scale a row or for "
            f"128 columns: those of this {model.architecture} are in {_formats(model, dtype)}"
        )


def _formats(model: ModelConfig, dtype: torch.dtype) -> str:
    """The formats that the linears of the layers are stored in."""
    weights = [linear.weight for linear in model.linears.values() if linear.kind != "sample"]
    plain = str(dtype).removeprefix("torch.")
    return ", ".join(dict.fromkeys(plain if weight is None else weight.label for weight in weights))
