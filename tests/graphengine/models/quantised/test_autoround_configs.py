"""Configs of AutoRound's own format: which linears are quantised, and how."""

from __future__ import annotations

from typing import Any

import pytest

from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.quantised.schemes import WeightScheme

UP, QUERY = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"
CONFIG: dict[str, Any] = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "autoround_version": "0.9.2",
    "iters": 200,
}
OLDER = {key: value for key, value in CONFIG.items() if key != "packing_format"}
AWQ = "auto_round:auto_awq"


def schemes(config: dict[str, Any], *linears: str) -> list[WeightScheme | None]:
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    return [quantisation.scheme(linear) for linear in linears]


def formats(config: dict[str, Any], *linears: str) -> list[WeightFormat | None]:
    return [scheme and scheme.format for scheme in schemes(config, *linears)]


FOUR = WeightFormat("int4", 1, 128)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (CONFIG, "gptq"),
        (CONFIG | {"packing_format": "auto_round:gptq", "backend": "auto"}, "gptq"),
        (CONFIG | {"packing_format": AWQ}, "awq"),
        (CONFIG | {"packing_format": "auto_round:awq"}, "awq"),
        (OLDER, "gptq"),
        (OLDER | {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"},
         "gptq"),
    ],
)  # fmt: skip
def test_packings_are_those_of_gptq_and_awq(config: dict[str, Any], layout: str) -> None:
    scheme, head = schemes(config, UP, "lm_head")
    assert scheme is not None and head is None
    assert (scheme.layout, scheme.signed) == (layout, True)
    assert scheme.format == FOUR._replace(has_zeros=layout == "awq")


def test_layers_may_have_settings_of_their_own() -> None:
    layers = {
        QUERY: {"bits": 16, "data_type": "float"},
        UP: {"bits": 8, "group_size": 32},
        "lm_head": {"sym": False},
        r"layers\.[23]\..*o_proj": {"bits": 16},
        "model.layers.4.mlp.gate": {"bits": 16},
    }
    outputs = [f"model.layers.{layer}.self_attn.o_proj" for layer in (1, 2)]
    names = (QUERY, UP, "lm_head", *outputs, "model.layers.4.mlp.gate_proj")
    assert formats(CONFIG | {"extra_config": layers}, *names) == [
        None, WeightFormat("int8", 1, 32), FOUR._replace(has_zeros=True), FOUR, None, FOUR,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "blocks",
    [
        {"block_name_to_quantize": "model.layers"},
        {"block_name_to_quantize": "visual.blocks, model.language_model.layers"},
        {"to_quant_block_names": [["model.layers.0", "model.layers.1"], ["visual.blocks.0"]]},
        {"quant_block_list": ["language_model.model.layers"], "block_name_to_quantize": "x"},
    ],
)
def test_blocks_that_are_quantised(blocks: dict[str, Any]) -> None:
    names = (UP, "model.visual.merger.mlp.0", "mtp.layers.0.mlp.up_proj", "lm_head")
    assert formats(CONFIG | blocks, *names) == [FOUR, None, None, None]
    listed = CONFIG | blocks | {"extra_config": {"model.language_model.layers.1.mlp": {"bits": 16}}}
    assert formats(listed, UP, QUERY) == [None, FOUR]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing_format": "auto_round:fp8"}, "packing_format='auto_round:fp8': supported: 'au"),
        ({"packing_format": None, "backend": "auto_round:exllamav2"}, "backend='auto_round:exll"),
        ({"packing_format": AWQ, "bits": 8}, "bits=8: supported: 4"),
        ({"bits": 2}, "bits=2: supported: 4, 8"),
        ({"group_size": 48}, "group_size=48: supported: 16, 32"),
        ({"data_type": "mx_fp"}, "data_type='mx_fp': supported: 'int', null"),
        ({"act_bits": 8}, "act_bits=8: supported: 16, 32, null"),
        ({"super_bits": 6}, "super_bits=6: supported: null, or the keys"),
        ({"extra_config": [1]}, r"extra_config=\[1\]: supported: a JSON object, null"),
        ({"extra_config": {UP: 16}}, r"up_proj=16: supported: a JSON object"),
        ({"extra_config": {UP: {"bits": 3}}}, r"extra_config\.model.*up_proj\.bits=3: supported"),
        ({"extra_config": {"(": {"bits": 16}}}, r"extra_config='\(': supported: regular expr"),
        ({"block_name_to_quantize": [1]}, r"block_name_to_quantize=\[1\]: supported: names of bl"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config\.json.*{message}"):
        read_quantisation({"quantization_config": CONFIG | changes})
