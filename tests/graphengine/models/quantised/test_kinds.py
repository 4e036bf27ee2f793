"""The table of the kinds of weights: a new kind is a row, a line of a reader and a decoder."""

from __future__ import annotations

from typing import Any, cast, get_args

import pytest
import torch

from graphengine.config import RoundedKind
from graphengine.kernels.linear.kinds import CODES, KINDS, Code, CodeKind, Kind, KindName
from graphengine.kernels.linear.packed import empty_packed, pack, packed_form, unpack
from graphengine.kernels.linear.quantised import WeightFormat, dequantise, unpacked_codes
from graphengine.models.quantised import config as readers
from graphengine.models.quantised.readers import read_weight
from graphengine.models.quantised.rounding import KIND_FORMATS
from graphengine.models.weights import StoredLinear
from graphengine.profiles.benchmark.shapes import fill_random

THIRDS = Code(
    name=cast(CodeKind, "thirds"),
    bits=4,
    type="float",
    values=lambda codes: codes.float() / 3 - 2.5,
    stored=None,
    size=1.54,
)


@pytest.fixture
def toy_kind(monkeypatch: pytest.MonkeyPatch) -> Kind:
    """A code of 4 bits with scales for 32 columns in float16, and a factor on them."""
    kind = Kind(code=THIRDS, columns=32, scales=(torch.float16,), whole=True)
    monkeypatch.setitem(cast(Any, CODES), THIRDS.name, THIRDS)
    monkeypatch.setitem(cast(Any, KINDS), "toy", kind)
    monkeypatch.setitem(cast(Any, readers._MODELOPT_KINDS), "TOY", cast(KindName, "toy"))
    return kind


def test_a_new_kind_is_read_laid_out_and_drawn(toy_kind: Kind) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "TOY", "group_size": 32}
    quantisation = readers.read_quantisation({"quantization_config": config})
    assert quantisation is not None
    scheme = quantisation.scheme("up")
    assert scheme is not None
    form = WeightFormat(THIRDS.name, 1, 32)
    assert scheme.format == form == WeightFormat.of_label("thirds-1x32")
    tensors = {
        "up.weight": torch.randint(0, 256, (48, 32), dtype=torch.uint8),
        "up.weight_scale": torch.rand(48, 2).half() + 0.5,
        "up.weight_scale_2": torch.tensor(0.25),
    }
    weight = read_weight(scheme, tensors, "up", (48, 64)).weight
    scales = tensors["up.weight_scale"].float().repeat_interleave(32, dim=1) / 4
    values = dequantise(weight)
    assert torch.equal(values, (unpacked_codes(weight) / 3 - 2.5) * scales)
    assert torch.equal(dequantise(unpack(pack(weight))), values)
    with pytest.raises(ValueError, match=r"scales, .* must be in float16"):
        read_weight(scheme, tensors | {"up.weight_scale": torch.rand(48, 2)}, "up", (48, 64))

    planned = packed_form(form, toy_kind.scales[0], whole=toy_kind.whole)
    held = empty_packed(planned, (48, 64), swiglu=False, device="cpu")
    assert held.nbytes == pack(weight).nbytes == 48 * 32 + 48 * 2 * 2 + 48 * 4
    fill_random({}, [StoredLinear(held, (("up", 48),), False)])
    assert 0.01 < float(dequantise(unpack(held)).std()) < 0.04


def test_the_options_value_names_the_kinds_that_can_be_made() -> None:
    assert get_args(RoundedKind) == tuple(name for name, kind in KINDS.items() if kind.rounded)
    assert [*KIND_FORMATS] == [*get_args(RoundedKind)]


def test_codes_that_kinds_share_are_one() -> None:
    assert (get_args(KindName), get_args(CodeKind)) == ((*KINDS,), (*CODES,))
    assert all(CODES[kind.code.name] is kind.code for kind in KINDS.values())
    assert {code.bits for code in CODES.values()} == {4, 8}


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)
def test_sizes_of_random_codes_are_about_those_of_the_table(code: Code) -> None:
    drawn = torch.arange(1 << code.bits, dtype=torch.uint8) & code.drawn
    assert float(code.values(drawn).square().mean().sqrt()) == pytest.approx(code.size, rel=0.4)
