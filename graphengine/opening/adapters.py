"""The adapters of an engine: which sizes its slots have, and whether a folder fits them."""

from __future__ import annotations

import os

import torch

from graphengine.config import EngineConfig
from graphengine.models.adapters.adapter import Adapter
from graphengine.models.adapters.table import AdapterSizes
from graphengine.models.contract import ModelConfig, ModelWeights
from graphengine.options.adapters import read_adapters
from graphengine.options.checks import some


def adapter_sizes(config: EngineConfig, model: ModelConfig) -> AdapterSizes | None:
    """The slots for adapters that a config asks for; None: none.

    Slots are next to the linears that the config's adapters change, or next to all that adapters
    can change if it names none.

    model  with all layers, not split

    FileNotFoundError and ValueError for adapters that cannot be read, or do not fit the model.
    """
    if not config.adapter_slots:
        return None
    weights = whole_weights(model)
    if not weights.adaptable():
        raise ValueError(
            f"max_adapters={config.adapter_slots}, but adapters can change no linear of this "
            f"{model.architecture}"
        )
    sizes = AdapterSizes(config.adapter_slots, config.max_adapter_rank)
    targets: set[str] = set()
    for path in read_adapters(config.adapters).values():
        adapter = open_adapter(path, weights, sizes)
        targets |= {name.rpartition(".")[2] for name in adapter.linears}
    return sizes._replace(targets=frozenset(targets))


def open_adapter(
    path: str | os.PathLike[str], weights: ModelWeights, sizes: AdapterSizes
) -> Adapter:
    """An adapter's folder, checked against the whole model and the slots for adapters."""
    adapter = Adapter.open(path)
    place = {name: linear for linear in weights.adaptable() for name, _ in linear.parts}
    shapes = {
        name: (rows, linear.shape[1]) for linear in place.values() for name, rows in linear.parts
    }
    for name in shapes.keys() & adapter.stored.keys():
        rows, columns = shapes[name]
        shapes[name] = (rows * adapter.places_of(name), columns)
    others = {name for linear in weights.linears() for name, _ in linear.parts}
    others |= {name.removesuffix(".weight") for name in weights.stored()}
    adapter.check(shapes, others)
    adapter.check_rank(sizes.rank)
    outside = [name for name in adapter.linears if not sizes.touches(place[name])]
    if outside:
        raise ValueError(
            f"{adapter.folder} changes {len(outside)} of {len(adapter.linears)} linears without "
            f"slots for adapters: {some(outside)}. The engine was opened for adapters of "
            f"{', '.join(sorted(sizes.targets))}"
        )
    return adapter


def whole_weights(model: ModelConfig) -> ModelWeights:
    """The weights of a model without memory, for names and shapes."""
    return model.allocate(device="meta", dtype=torch.float32)
