"""What configs say of a model's linears, and what of a config is not understood."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints.published import PUBLISHED
from graphengine.kernels.linear.quantised import WeightFormat, format_of
from graphengine.models.quantised.config import read_quantisation
from graphengine.models.quantised.schemes import Quantisation

LAYER = "model.layers.1."
UP, QUERY = f"{LAYER}mlp.up_proj", f"{LAYER}self_attn.q_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "global_compression_ratio": 1.9,
    "version": "0.13.0",
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
KV = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
FILE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}


def read(config: dict[str, Any]) -> Quantisation:
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    return quantisation


def formats(config: dict[str, Any], *linears: str) -> list[WeightFormat | None]:
    quantisation = read(config)
    schemes = [quantisation.scheme(linear) for linear in linears]
    return [scheme and scheme.format for scheme in schemes]


def test_a_language_model_with_a_tower_may_have_it_in_its_own_config() -> None:
    """Kimi K2.5: experts in 4 bits; what stands beside it counts first."""
    config = PUBLISHED["moonshotai/Kimi-K2.5"].config
    found = read_quantisation(config)
    assert found is not None
    scheme = found.scheme(f"{LAYER}mlp.experts.3.up_proj")
    assert scheme is not None and scheme.format == format_of("int4", 1, 32)
    assert found.scheme(QUERY) is None and found.scheme("lm_head") is None
    beside = read_quantisation(config | {"quantization_config": FP8})
    assert beside is not None and beside.method == "fp8"


@pytest.mark.parametrize(
    "config",
    [None, {}, {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
     {"quant_method": "modelopt", "quantization": {"quant_algo": None}},
     {"quant_method": "compressed-tensors", "config_groups": {},
      "kv_cache_scheme": {"type": "float", "num_bits": 8}}],
)  # fmt: skip
def test_weights_may_not_be_quantised(config: Any) -> None:
    assert read_quantisation({"quantization_config": config}) is None
    assert read_quantisation({}, {"quantization": {"quant_algo": None}}) is None


@pytest.mark.parametrize(
    ("config", "linear"),
    [
        (FP8 | {"modules_to_not_convert": [QUERY]}, QUERY),
        (FP8 | {"modules_to_not_convert": ["self_attn.q_proj"]}, QUERY),
        (FP8 | {"modules_to_not_convert": ["model.layers.1"]}, QUERY),
        (FP8 | {"modules_to_not_convert": ["model.layers.*.self_attn"]}, QUERY),
        (FP8 | {"ignored_layers": [QUERY]}, QUERY),
        (FP8, "lm_head"),
        (AWQ | {"modules_to_not_convert": ["self_attn"]}, QUERY),
        (AWQ, "lm_head"),
        (GPTQ, "lm_head"),
        (GPTQ | {"lm_head": False}, "lm_head"),
        (GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.down_proj"]]}, QUERY),
        (GPTQ | {"dynamic": {r"-:.*\.self_attn\.": {}}}, QUERY),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, QUERY),
        (MODELOPT, "lm_head"),
        (MODELOPT | {"exclude_modules": ["*self_attn*"]}, QUERY),
        (MODELOPT | {"ignore": ["model.layers.1.self_attn"]}, QUERY),
        (COMPRESSED, "lm_head"),
        (COMPRESSED | {"ignore": ["re:.*self_attn.*"]}, QUERY),
        (COMPRESSED | {"ignore": [QUERY]}, QUERY),
        (COMPRESSED | {"ignore": ["Linear"]}, QUERY),
    ],
)
def test_linears_that_are_left_as_they_are(config: dict[str, Any], linear: str) -> None:
    found = read(config)
    assert found.scheme(linear) is None
    if config.get("ignore") != ["Linear"]:
        assert found.scheme(UP.replace("1", "11")) is not None


@pytest.mark.parametrize("config", [FP8, AWQ, GPTQ, COMPRESSED])
def test_how_it_was_made_changes_nothing(config: dict[str, Any]) -> None:
    made = {"provider": "auto-round", "autoround_version": "0.9.2", "iters": 200, "nsamples": 128,
            "quant_block_list": [["model.layers.0"]]}  # fmt: skip
    assert formats(config | made, UP, "lm_head") == formats(config, UP, "lm_head")


def test_an_older_status_of_compressed_weights() -> None:
    config = COMPRESSED | {"quantization_status": "frozen"}
    assert formats(config, UP) == [WeightFormat("int4", 1, 128)]


def test_groups_of_linears_have_schemes_of_their_own() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4},
        "b": {"targets": ["re:.*down_proj"], "weights": FLOAT8, "format": "float-quantized"},
        "c": {"targets": [f"{LAYER}mlp.down_proj"], "weights": INT4 | {"group_size": 32}},
        "d": {"targets": ["re:.*v_proj"], "input_activations": {"num_bits": 8}},
    }
    config = COMPRESSED | {"config_groups": groups}
    names = ("model.layers.0.mlp.down_proj", f"{LAYER}mlp.down_proj", UP, f"{LAYER}v_proj")
    assert formats(config, *names) == [
        WeightFormat("e4m3", 1, 0),
        WeightFormat("int4", 1, 32),
        WeightFormat("int4", 1, 128),
        None,
    ]


def test_dynamic_settings_of_gptq() -> None:
    dynamic = {r"+:.*\.up_proj": {"bits": 8, "group_size": 32}, r".*q_proj": {"sym": False}}
    config = GPTQ | {"dynamic": dynamic, "lm_head": True}
    assert formats(config, UP, QUERY, f"{LAYER}mlp.down_proj", "lm_head") == [
        WeightFormat("int8", 1, 32),
        WeightFormat("int4", 1, 128, True),
        WeightFormat("int4", 1, 128),
        WeightFormat("int4", 1, 128),
    ]


def test_layers_of_modelopt_with_formats_of_their_own() -> None:
    down = f"{LAYER}mlp.down_proj"
    layers = {
        QUERY: {"quant_algo": "FP8"},
        UP: {"quant_algo": "NVFP4", "group_size": 16},
        down: {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "MXFP8", "group_size": 32},
    }
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    assert formats(config, QUERY, UP, down, "lm_head", f"{LAYER}self_attn.o_proj") == [
        WeightFormat("e4m3", 0, 0),
        WeightFormat("e2m1", 1, 16),
        WeightFormat("e2m1", 1, 16),
        WeightFormat("e4m3", 1, 32),
        None,
    ]


def test_mxfp8_of_compressed_tensors_has_powers_of_two() -> None:
    weights = FLOAT8 | {"strategy": "group", "group_size": 32}
    groups = {"a": {"targets": ["Linear"], "weights": weights}}
    scheme = read(COMPRESSED | {"format": "mxfp8-quantized", "config_groups": groups}).scheme(UP)
    assert scheme is not None
    assert (scheme.format, scheme.kind) == (WeightFormat("e4m3", 1, 32), "mxfp8")


@pytest.mark.parametrize(
    "config",
    [FP8 | {"modules_to_not_convert": ["backbone.layers.1.self_attn"]},
     AWQ | {"modules_to_not_convert": ["backbone.layers.1.self_attn.q_proj"]},
     GPTQ | {"dynamic": {r"-:backbone\.layers\.1\.self_attn": {}}},
     MODELOPT | {"exclude_modules": ["backbone.layers.1.self_attn*"]},
     COMPRESSED | {"ignore": ["backbone.layers.1.self_attn.q_proj"]}],
    ids=lambda config: config["quant_method"],
)  # fmt: skip
def test_rules_may_have_the_names_of_the_files(config: dict[str, Any]) -> None:
    stored = {each: each.replace("model.", "backbone.") for each in (UP, QUERY)}
    found = read(config)
    renamed = found._replace(stored_names=stored)
    assert (found.scheme(QUERY) is None, renamed.scheme(QUERY) is None) == (False, True)
    assert renamed.scheme(UP) == found.scheme(UP) is not None


def test_the_file_of_modelopt_says_it_alone_or_beside_the_config() -> None:
    alone = read_quantisation({}, FILE)
    both = read_quantisation({"quantization_config": MODELOPT | FILE["quantization"]}, FILE)
    kv = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    for found in (alone, both, read_quantisation({"quantization_config": kv}, FILE)):
        assert found is not None
        scheme = found.scheme(UP)
        assert scheme is not None
        assert scheme.format == WeightFormat("e2m1", 1, 16)
    with pytest.raises(ValueError, match=r"quant_method='gptq': supported: 'modelopt', as in hf_q"):
        read_quantisation({"quantization_config": GPTQ}, FILE)


@pytest.mark.parametrize("config", [{}, {"quantization_config": FP8}], ids=["alone", "beside"])
def test_kv_of_modelopts_file_is_checked_whatever_says_how_weights_are(config: Any) -> None:
    file = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}}
    message = r"hf_quant_config.json has quantization.kv_cache_quant_algo='NVFP4': supported: 'FP8'"
    with pytest.raises(ValueError, match=message):
        read_quantisation(config, file)


def test_quantised_activations_are_noted() -> None:
    groups = {"a": {"targets": ["Linear"], "weights": FLOAT8, "input_activations": FLOAT8}}
    config = COMPRESSED | {"config_groups": groups, "format": "float-quantized"}
    (note,) = read(config).notes
    assert "config_groups.a" in note and note.startswith("input_activations are not quantised")
    (note,) = read(FP8 | {"activation_scheme": "dynamic"}).notes
    assert "activation_scheme='dynamic'" in note
    (note,) = read(MODELOPT).notes
    assert "quant_algo='FP8'" in note
    assert read(GPTQ).notes == read(COMPRESSED).notes == ()


@pytest.mark.parametrize(
    "config",
    [
        COMPRESSED | {"kv_cache_scheme": KV},
        MODELOPT | {"kv_cache_quant_algo": "FP8", "kv_cache_scheme": KV},
        FP8 | {"kv_cache_scheme": "static"},
    ],
)
def test_kv_may_be_quantised_beside_weights(config: dict[str, Any]) -> None:
    assert read(config).scheme(UP) is not None


def changed(weights: dict[str, Any], **top: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": INT4 | weights}}
    return COMPRESSED | {"config_groups": groups} | top


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gptq", "quantization_config='gptq': supported: a JSON object, null"),
        ({"quant_method": "hqq"}, "quant_method='hqq': supported: 'fp8', 'fbgemm_fp8', "
         "'bitsandbytes', 'compressed-tensors', 'awq', 'gptq', 'auto-round', 'intel/auto-round', "
         "'mxfp4', 'modelopt', 'modelopt_fp4', 'torchao'"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2': supported: 'e4m3'"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size=\[128\]: supported: \[rows, col"),
        (FP8 | {"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        (FP8 | {"rotation": "hadamard"}, "rotation='hadamard': supported: null, or the keys"),
        (FP8 | {"modules_to_not_convert": ["("]}, r"modules_to_not_convert='.*supported: regular"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "='lm_head': supported: a list of strings"),
        (AWQ | {"version": "gemv"}, "version='gemv': supported: 'gemm'"),
        (AWQ | {"bits": 8}, "bits=8: supported: 4"),
        (AWQ | {"group_size": 100}, "group_size=100: supported: 16, 32, 64, 128"),
        (GPTQ | {"bits": 3}, "bits=3: supported: 4, 8"),
        (GPTQ | {"bits": True}, "bits=True: supported: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin': supported: 'gptq', "
         "'gptq_v2', null"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True: supported: null"),
        (GPTQ | {"modules_in_block_to_quantize": True}, "to_quantize=True: supported: lists of st"),
        (GPTQ | {"modules_in_block_to_quantize": [[1]]}, r"to_quantize=\[\[1\]\]: supported: li"),
        (GPTQ | {"sym": "yes"}, "sym='yes': supported: True, False"),
        (GPTQ | {"dynamic": [1]}, r"dynamic=\[1\]: supported: a JSON object"),
        (GPTQ | {"dynamic": {"x": {"bits": 2}}}, r"dynamic\.x\.bits=2: supported: 4, 8"),
        (GPTQ | {"dynamic": {"x": {"rank": 2}}}, r"dynamic\.x\.rank=2"),
        (GPTQ | {"dynamic": {"-:(": {}}}, r"dynamic='\(': supported: regular expressions"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ': supported: 'FP8', 'NVFP4'"),
        (MODELOPT | {"quant_algo": ["FP8"]}, r"quant_algo=\['FP8'\]: supported: 'FP8', 'NVFP4'"),
        (MODELOPT | {"quant_algo": "NVFP4", "group_size": 32}, "group_size=32: supported: 16"),
        (MODELOPT | {"quant_algo": "MXFP8", "group_size": 16}, "group_size=16: supported: 32"),
        (COMPRESSED | {"format": "marlin-24"}, "format='marlin-24': supported: 'float-quantized', "
         "'int-quantized', 'naive-quantized', 'pack-quantized', 'nvfp4-pack-quantized', 'mxfp4-"),
        (COMPRESSED | {"format": "mixed-precision"}, r"group_0\.format=None: supported: 'float-q"),
        (COMPRESSED | {"quantization_status": "calibration"}, "status='calibration': suppor"),
        (COMPRESSED | {"config_groups": {}, "sparsity_config": {"format": "sparse-24-bitmask"}},
         "sparsity_config={.*supported: null"),
        (COMPRESSED | {"transform_config": {"a": 1}}, "transform_config={'a': 1}: supported"),
        (COMPRESSED | {"config_groups": [1]}, r"config_groups=\[1\]: supported: a JSON object"),
        (COMPRESSED | {"kv_cache_scheme": KV | {"num_bits": 4}}, r"kv_cache_scheme\.num_bits=4"),
        (MODELOPT | {"kv_cache_quant_algo": "INT8"}, "quant_algo='INT8': supported: 'FP8'"),
        (FP8 | {"kv_cache_scheme": "dynamic"}, "kv_cache_scheme='dynamic': supported: 'static'"),
        (changed({"num_bits": 3}), r"weights\.num_bits=3: supported: 4, 8"),
        (changed({"type": "float"}), r"weights\.type='float': supported: 'int'"),
        (changed({"group_size": 48}), r"weights\.group_size=48: supported: 16, 32"),
        (changed({"strategy": "block"}), r"weights\.strategy='block': supported: 'tensor', 'cha"),
        (changed({"strategy": "channel"}), r"weights\.group_size=128: supported: -1"),
        (changed({"dynamic": True}), r"weights\.dynamic=True: supported: False, null"),
        (changed({"codebook": 8}), r"weights\.codebook=8: supported: null, or the keys actorder"),
        (changed({"actorder": "x"}), r"weights\.actorder='x': supported: 'group', 'dynamic', True"),
        (changed({"type": "float", "num_bits": 8, "symmetric": False}, format="float-quantized"),
         r"weights\.symmetric=False: supported: True"),
        (changed({"type": "float", "group_size": 16}, format="nvfp4-pack-quantized"),
         r"weights\.strategy='group': supported: 'tensor_group'"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^(config\.json|hf_quant).*" + message):
        read_quantisation({"quantization_config": config})
