"""The shapes to measure, and random weights for them.

A shape is a Hugging Face `config.json`: graphengine reads it as it would a checkpoint's, and peers
build their own model from the same one. Weights are drawn by name, so that a tensor of one name,
shape, dtype and device always gets the same values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphengine.demo import checkpoint_path
from graphengine.drafters.eagle3.layer import Eagle3Config
from graphengine.drafters.eagle3.reading import Eagle3Checkpoint
from graphengine.drafters.mtp.layer import LAYOUTS, MtpConfig
from graphengine.kernels.linear.kinds import CODES, KINDS
from graphengine.kernels.linear.packed import POWER_FACTOR, PackedWeight, packed_form
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.checkpoints.random_values import (
    SEED,
    WEIGHT_SCALE,
    generator_of,
    random_values,
)
from graphengine.models.contract import ModelConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.inner.weights import InnerWeights
from graphengine.models.linears import WeightForms
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.states import Paged, recurrent_states
from graphengine.models.weights import StoredLinear
from graphengine.profiles.shape_configs import DEMO, NAMES, SHAPES

HEAD_TOKENS = 32000
"""Size of the draft vocabulary that most EAGLE3 heads are published with."""
# Random scales where these are integers, with factors on them.
_INTEGER_SCALE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model to measure: a shape with random weights, or a checkpoint where `checkpoint` is set.

    drawn  whether its weights are random like a shape's, in spite of `checkpoint`
    """

    name: str
    hf_config: Mapping[str, Any]
    model: ModelConfig
    checkpoint: Path | None = None
    drawn: bool = False

    @classmethod
    def of_shape(cls, name: str) -> Subject:
        """A shape of `NAMES`; ValueError lists them."""
        if name == DEMO:
            return cls.of_checkpoint(checkpoint_path(), name=DEMO)
        if name not in SHAPES:
            raise ValueError(f"unknown shape {name!r}; known: {', '.join(NAMES)}")
        return cls.of_config(SHAPES[name], name=name)

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, name: str) -> Subject:
        """A shape with the values of a `config.json`; ValueError as for a checkpoint's."""
        return cls(name=name, hf_config=config, model=_as_told(read_model_config(config), config))

    @classmethod
    def of_checkpoint(cls, path: str | Path, *, name: str | None = None) -> Subject:
        """A directory in Hugging Face layout or a hub id; `name` is its name in reports."""
        checkpoint = Checkpoint.open(path)
        return cls(
            name=name or checkpoint.path.name,
            hf_config=dict(checkpoint.config),
            model=read_model(checkpoint),
            checkpoint=checkpoint.path,
        )


def random_module(model: ModelConfig) -> MtpConfig:
    """One draft module for a model of random weights, as Qwen3 has it: `mtp.*`."""
    layout = next(layout for layout in LAYOUTS if layout.name == "qwen3")
    return MtpConfig.of_target(model, layout, (layout.module_prefix(model.num_layers, 0),))


def random_head(model: ModelConfig, vocab_size: int | None = None) -> Eagle3Checkpoint:
    """An EAGLE3 head for a model of random weights, which drafts from `vocab_size` random tokens;
    None: from `HEAD_TOKENS`, or from all if there are fewer.
    """
    drafted = min(HEAD_TOKENS, model.vocab_size) if vocab_size is None else vocab_size
    ids = None if drafted == model.vocab_size else random_tokens(model.vocab_size, drafted)
    return Eagle3Checkpoint(Eagle3Config.of_target(model, drafted), ids, None)


def random_tokens(vocab_size: int, size: int, seed: int = SEED) -> Tensor:
    """A draft vocabulary of `size` random tokens: int64, ascending, on the CPU."""
    if not 1 <= size <= vocab_size:
        raise ValueError(f"a draft vocabulary of {size} tokens of {vocab_size}")
    drawn = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return drawn[:size].sort().values


def _as_told(model: ModelConfig, config: Mapping[str, Any]) -> ModelConfig:
    """The model with weights in its config's format."""
    quantisation = read_quantisation(config)
    if quantisation is None:
        return model
    linears = model.allocate(device="meta", dtype=torch.float32).linears()
    firsts = dict.fromkeys(linear.parts[0][0] for linear in linears)
    schemes = {name: quantisation.scheme(name) for name in firsts}
    forms = {}
    for name, scheme in schemes.items():
        if scheme is not None:
            kind = KINDS[scheme.kind]
            forms[name] = packed_form(scheme.format, kind.scales[0], whole=kind.whole)
    return model.stored_as(WeightForms(forms))


def model_shape(name: str) -> ModelConfig:
    """The model of a shape of `NAMES`; ValueError lists them."""
    return Subject.of_shape(name).model


@torch.no_grad()
def fill_random(
    tensors: Mapping[str, Tensor], linears: Sequence[StoredLinear] = (), seed: int = SEED
) -> None:
    """Draw every tensor in place, on its device: matrices and biases around 0, norms around 1.

    Each has a generator of its own, seeded by its name; the tensors may be strided views. Packed
    weights among the `linears` get random codes of numbers as large as a matrix's.
    """
    for linear in linears:
        if isinstance(linear.weight, PackedWeight):
            name = linear.parts[0][0]
            if linear.stack is not None:
                name = f"{name}.{linear.stack.expert}"
            generator = generator_of(name, linear.weight.codes.device, seed)
            _fill_packed(linear.weight, generator)
    for name, tensor in tensors.items():
        # Drawn in one piece: an element's value must not depend on its stride.
        tensor.copy_(random_values(name, tensor.shape, tensor.dtype, tensor.device, seed))


def _fill_packed(weight: PackedWeight, generator: torch.Generator) -> None:
    """Draw random codes; all groups have one scale, and a minimum that is the codes' mean."""
    codes, code = weight.codes.view(torch.uint8), CODES[weight.format.code]
    codes.random_(0, 256, generator=generator)
    codes &= code.drawn
    drawn = code.values(torch.arange(1 << code.bits, dtype=torch.uint8) & code.drawn)
    # Subtracting a minimum does not change the spread of codes.
    size = float(drawn.std()) if weight.format.has_minimums else code.size
    scale = WEIGHT_SCALE / size
    if weight.row_scales is not None:
        weight.row_scales.fill_(scale if weight.scales is None else 1.0)
    if weight.scales is not None and weight.scales.dtype == torch.uint8:
        # Exponents, of which the whole weight's factor is a part.
        assert weight.row_scales is not None
        weight.row_scales.fill_(POWER_FACTOR)
        weight.scales.fill_(127 + round(math.log2(scale)))
    elif weight.scales is not None:
        of_groups = weight.scales
        if weight.factors is not None:
            weight.scales.fill_(_INTEGER_SCALE)
            scale, of_groups = scale / _INTEGER_SCALE, weight.factors
        of_groups.copy_(torch.full_like(of_groups, scale, dtype=torch.float32))
        if weight.format.has_minimums:
            of_groups[:, :, 1] = scale * float(drawn.mean())
    if weight.zeros is not None:
        weight.zeros.random_(*code.drawn_zeros, generator=generator)
    if weight.order is not None:
        weight.order.copy_(
            torch.randperm(len(weight.order), generator=generator, device=codes.device)
        )


def weight_bytes(model: ModelConfig, dtype: torch.dtype, *, experts: float | None = None) -> int:
    """Bytes of the weights that a decode step must read; `dtype` is the model's.

    An embedding counts only if it is lm_head, too; else a step reads just a few of its rows. An
    inner decoder's weights count once for each of its runs in a step: as many as a frame has codes.

    experts  experts that a layer reads on average; None: all of them
    """
    weights = model.allocate(device="meta", dtype=dtype)
    embedding = 0 if weights.lm_head is weights.embedding else weights.embedding.nbytes
    read = float(weights.nbytes - embedding)
    if isinstance(weights.inner_weights, InnerWeights):
        once = {id(tensor): tensor.nbytes for tensor in weights.inner_weights.tensors()}
        read += weights.inner_weights.step_nbytes - sum(once.values())
    if weights.routed is not None and experts is not None:
        read -= weights.routed.nbytes * (1 - experts / weights.routed.experts)
    return round(read)


def kv_bytes(model: ModelConfig, *, rows: int, tokens: float, itemsize: int) -> int:
    """Bytes of the KV that a step reads in all layers, for rows of `tokens` tokens together.

    A layer with a window reads no more than its window of each row; all rows have the same length.
    """
    return round(
        sum(
            (min(tokens, rows * state.window) if state.window else tokens)
            * math.prod(state.block_shape(1))
            for state in _paged(model)
        )
        * itemsize
    )


def layer_windows(model: ModelConfig) -> list[int]:
    """The window of each layer that keeps KV; 0: it has none."""
    return [state.window for state in _paged(model)]


def attention_layers(model: ModelConfig) -> int:
    """Layers that keep KV."""
    return len(_paged(model))


def _paged(model: ModelConfig) -> list[Paged]:
    return [state for layer in model.states for state in layer if isinstance(state, Paged)]


def state_bytes(model: ModelConfig, *, rows: int, dtype: torch.dtype) -> int:
    """Bytes of the recurrent states that a step reads in all layers; `dtype` is the model's."""
    return rows * sum(
        state.depth * math.prod(state.shape) * (state.dtype or dtype).itemsize
        for state in recurrent_states(model.states).values()
    )


def step_bytes(
    model: ModelConfig,
    *,
    context: float,
    rows: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    experts: float | None = None,
) -> int:
    """Bytes that a decode step must read: all weights once, each row's recurrent states and its KV,
    within its window where a layer has one.

    `context` is the mean number of tokens that a row attends to. `kv_dtype` is that of the KV
    cache; None: `dtype`, the model's. See `weight_bytes` for `experts`.
    """
    itemsize = (kv_dtype or dtype).itemsize
    kv = kv_bytes(model, rows=rows, tokens=rows * context, itemsize=itemsize)
    states = state_bytes(model, rows=rows, dtype=dtype)
    return weight_bytes(model, dtype, experts=experts) + kv + states
