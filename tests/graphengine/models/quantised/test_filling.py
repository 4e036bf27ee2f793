"""Packed weights are filled one after the other, where they lie."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from graphengine.kernels.linear.packed import empty_packed, packed_form
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.quantised import filling
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.weights import StoredLinear

FORM = packed_form(KIND_FORMATS["int8"], torch.float32)


def linears(*names: str, device: str = "cpu") -> list[StoredLinear]:
    return [
        StoredLinear(empty_packed(FORM, (24, 64), swiglu=False, device=device), ((name, 24),))
        for name in names
    ]


def test_what_a_linear_was_read_into_is_gone_before_the_next() -> None:
    held: list[weakref.ref[Tensor]] = []

    def read(linear: StoredLinear, device: torch.device) -> filling.Read:
        assert all(codes() is None for codes in held)
        weight = quantise(torch.randn(24, 64), FORM.format)
        held.append(weakref.ref(weight.codes))
        return filling.Read(weight, (linear.parts[0][0],))

    told: list[tuple[str, ...]] = []
    filled = filling.fill_packed(Path("here"), linears("a", "b", "c"), read, told.append)
    assert filled == {"a", "b", "c"}
    assert told == [("a",), ("b",), ("c",)]
    assert all(codes() is None for codes in held)


class Seen(Exception):
    """The tensors that a weight is read from."""


def test_tensors_go_to_the_device_before_anything_is_done_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that are only asked for."""
    save_file({"a.weight": torch.ones(24, 64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    quantisation = read_quantisation({"quantization_config": {"quant_method": "fp8"}})
    assert quantisation is not None

    def stop(scheme: Any, tensors: Mapping[str, Tensor], *others: Any) -> None:
        assert "a.weight" in tensors and "a.weight_scale" not in tensors
        assert list(tensors) == ["a.weight"] and len(tensors) == 1
        raise Seen(tensors["a.weight"].device)

    monkeypatch.setattr(filling, "read_weight", stop)
    read = filling.stored_reader(Checkpoint.open(tmp_path), quantisation)
    (linear,) = linears("a", device="meta")
    with pytest.raises(Seen, match="meta"):
        read(linear, torch.device("meta"))
