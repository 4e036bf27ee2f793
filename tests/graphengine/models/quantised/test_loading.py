"""Weights that are rounded while they are loaded, what they take, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from checkpoints.quantised_models import (
    HEAD,
    KINDS,
    Tensors,
    fp8_kind,
    save,
    write_model,
)
from graphengine import Engine, SamplingParams
from graphengine.cli.main import main
from graphengine.demo import checkpoint_path
from graphengine.drafters.head import head_bytes
from graphengine.drafters.mtp.reading import read_mtp_config
from graphengine.kernels.linear.packed import PackedWeight, pack, packed_form, select_rows
from graphengine.models.checkpoints.checkpoint import Checkpoint, stored_dtype
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.linears import WeightForms
from graphengine.speculative import MTP
from launches.quantised import FORMATS, random_quantised

PROMPT = [5, 3, 80, 22]
KIND_NAMES = ("fp8", "int8", "int4")


def open_engine(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 1, "max_seq_len": 64, "block_size": 8, "prefill_buckets": (8,)}
    return Engine.from_pretrained(path, **(sizes | {"device": "cpu", "dtype": "float32"} | options))


def said(engine: Engine, tokens: int = 12) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return tuple(engine.generate(PROMPT, params).token_ids)


def plain_model(folder: Path, **options: Any) -> Path:
    """A checkpoint in bfloat16."""

    def unquantised(config: dict[str, Any], tensors: Tensors) -> None:
        del config["quantization_config"]
        if config["tie_word_embeddings"]:
            del tensors["lm_head.weight"]

    return write_model(folder, KINDS["fp8 tensor"], plain=("",), edit=unquantised, **options).path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_model(tmp_path_factory.mktemp("source") / "in")


# What is rounded.


class Opened(NamedTuple):
    tokens: tuple[int, ...]
    numerics: str
    weights: int


def opened(path: Path, **options: Any) -> Opened:
    """Open an engine, and check that its weights take what its budget says."""
    with open_engine(path, **options) as engine:
        held = {id(tensor): tensor.nbytes for tensor in engine.model.weights.tensors()}
        assert weights_in(budget_of(engine)) == sum(held.values())
        return Opened(said(engine), engine.numerics_id, sum(held.values()))


def budget_of(engine: Engine) -> dict[str, int]:
    return {line.name: line.bytes for line in engine.memory.budget.lines}


def weights_in(lines: dict[str, int]) -> int:
    """The sum of a budget's lines of weights, of which each kind has one."""
    return sum(size for name, size in lines.items() if name.split(" in ")[0] == "weights")


@pytest.mark.parametrize("head", [False, True])
def test_rounding_on_the_way_means_what_the_writer_writes(
    source: Path, tmp_path: Path, head: bool
) -> None:
    """Tokens, numerics and bytes are those of the written checkpoint, and of one kind alone."""
    plain = opened(source)
    found = [plain]
    for kind in KIND_NAMES:
        out = tmp_path / kind
        arguments = ["quantize", str(source), str(out), "--kind", kind, *["--lm-head"] * head]
        assert main(arguments) == 0
        rounded = opened(source, quantize=kind, quantize_lm_head=head)
        assert rounded == opened(out)
        found.append(rounded)
    assert len({each.numerics for each in found}) == 4
    assert len({each.tokens for each in found}) > 1
    assert found[3].weights < found[2].weights == found[1].weights < plain.weights


def test_lm_head_is_rounded_apart_from_a_tied_embedding(tmp_path: Path) -> None:
    """Its codes are those of a separate lm_head with the embedding's values."""
    tied = plain_model(tmp_path / "tied", tie_word_embeddings=True)
    config = json.loads((tied / "config.json").read_text())
    tensors = dict(Checkpoint.open(tied).mapped())
    assert f"{HEAD}.weight" not in tensors
    tensors[f"{HEAD}.weight"] = tensors["model.embed_tokens.weight"].clone()
    save(tmp_path / "untied", config | {"tie_word_embeddings": False}, tensors)
    save(tmp_path / "both", config, tensors)
    rounded = {"quantize": "int8", "quantize_lm_head": True}
    apart = opened(tmp_path / "untied", **rounded)
    assert opened(tied, **rounded) == opened(tmp_path / "both", **rounded) == apart
    alone = opened(tied, quantize="int8")
    assert alone.weights < apart.weights
    assert alone.numerics != apart.numerics


@pytest.mark.parametrize("quantize", KIND_NAMES)
def test_weights_of_a_draft_module_are_in_the_budget(quantize: Any) -> None:
    options = {"speculative": MTP(2), "row_family": "dot", "quantize": quantize}
    with open_engine(checkpoint_path(), **options) as engine:
        drafter = engine.runtime.program.drafter
        assert budget_of(engine)["drafter's weights"] == drafter.weights.nbytes
        assert weights_in(budget_of(engine)) == engine.model.weights.nbytes


@pytest.mark.parametrize("name", FORMATS)
def test_kept_rows_of_lm_head_are_in_the_budget(name: str) -> None:
    weight = random_quantised(name, 97, 192)
    kind, scales = FORMATS[name]
    forms = WeightForms({HEAD: packed_form(kind, scales, whole=weight.whole is not None)})
    kept = select_rows(pack(weight), torch.tensor([0, *range(40, 63)]))
    assert head_bytes(forms, 24, 192, torch.bfloat16) == kept.nbytes + 4 * 24


def test_scales_do_not_tell_the_dtype(tmp_path: Path) -> None:
    """Where the config does not tell it either: safetensors has them before other tensors."""

    def forget(config: dict[str, Any], tensors: Tensors) -> None:
        config.pop("dtype", None)
        config.pop("torch_dtype", None)

    checkpoint = Checkpoint.open(write_model(tmp_path, KINDS["fp8 blocks"], edit=forget).path)
    first = next(iter(checkpoint.tensors.values()))
    assert first.dtype == torch.float32
    assert stored_dtype(checkpoint) == torch.bfloat16


PROGRESS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptq desc_act", {}),
    "sharded fp8": ("fp8 blocks", {"files": 2}),
    "KV scales": ("modelopt FP8", {}),
}


@pytest.mark.parametrize("name", PROGRESS)
def test_progress_ends_at_its_total(tmp_path: Path, name: str) -> None:
    kind, options = PROGRESS[name]
    check_progress(write_model(tmp_path, KINDS[kind], **options).path)


@pytest.mark.parametrize("options", [{}, {"quantize_lm_head": True}])
@pytest.mark.parametrize("tied", [False, True])
def test_progress_of_rounding(tmp_path: Path, tied: bool, options: dict[str, Any]) -> None:
    path = plain_model(tmp_path, tie_word_embeddings=tied)
    check_progress(path, quantize="int4", **options)


def check_progress(path: Path, **options: Any) -> None:
    seen: list[tuple[int, int]] = []
    with open_engine(path, progress=lambda *given: seen.append(given), **options):
        pass
    done, totals = zip(*seen, strict=True)
    assert done[0] == 0 and list(done) == sorted(done)
    assert set(totals) == {done[-1]}
    stored = Checkpoint.open(path).tensors
    scales = sum(info.nbytes for name, info in stored.items() if re.search(r"[kv]_scale$", name))
    assert done[-1] == sum(info.nbytes for info in stored.values()) - scales


@pytest.mark.parametrize(("kind", "quantize"), [("packed int4 of 32", None), (None, "int8")])
def test_info_says_what_weights_take(
    source: Path, tmp_path: Path, capsys: Any, kind: str | None, quantize: Any
) -> None:
    path = source if kind is None else write_model(tmp_path, KINDS[kind]).path
    arguments = ["info", "--checkpoint", str(path), "--device", "cpu", "--json"]
    assert main([*arguments, *(["--quantize", quantize] if quantize else [])]) == 0
    budget = json.loads(capsys.readouterr().out)["budget"]
    lines = {line["name"]: line["bytes"] for line in budget}
    assert weights_in(lines) == opened(path, quantize=quantize).weights
    with open_engine(path, quantize=quantize) as engine:
        kinds = engine.core.description["weights"]
        label = "int4-1x32" if kind else "int8-1x0"
        assert list(kinds) == ["float32", label]
        assert [lines[f"weights in {name}"] for name in kinds] == [*kinds.values()]
        packed = [each.weight for each in engine.model.weights.linears()]
        assert kinds[label] == sum(each.nbytes for each in packed if isinstance(each, PackedWeight))


# What is refused.

Edit = Callable[[dict[str, Any], Tensors], object]
UP = "model.layers.1.mlp.up_proj"
Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return edit


def without(name: str) -> Edit:
    return lambda config, tensors: tensors.pop(name)


def added(name: str, value: Tensor) -> Edit:
    return lambda config, tensors: tensors.update({name: value})


def with_nan(scales: Tensor) -> Tensor:
    scales.view(-1)[3] = torch.nan
    return scales


def says(**changes: Any) -> Edit:
    return lambda config, tensors: config["quantization_config"].update(changes)


def groups_of_64(config: dict[str, Any], tensors: Tensors) -> None:
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["group_size"] = 64


def k_is_plain(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["ignore"] = [HEAD, K]


def k_has_other_groups(config: dict[str, Any], tensors: Tensors) -> None:
    groups = config["quantization_config"]["config_groups"]
    group = groups["group_0"]
    other = {**group, "targets": [K], "weights": {**group["weights"], "group_size": 64}}
    groups["group_1"] = other


def plain_up(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(f"{UP}.")]:
        del tensors[name]
    tensors[f"{UP}.weight"] = torch.zeros(256, 128, dtype=torch.bfloat16)


PACKED, GPTQ, BLOCKS = "packed int4 of 32", "gptq desc_act", "fp8 blocks"
HEADERS: dict[str, tuple[str, Edit, str]] = {
    "truncated scales": (
        BLOCKS, replaced(f"{UP}.weight_scale_inv", lambda scales: scales[:1]),
        rf"{UP}\.weight_scale_inv has shape \[1, 1\]: scales, one for 128 rows and 128 columns of "
        rf"a weight \[256, 128\], must have shape \[2, 1\]",
    ),
    "another group size": (
        PACKED, groups_of_64,
        rf"{Q}\.weight_scale has shape \[128, 4\]: .* 64 columns .* must have shape \[128, 2\]",
    ),
    "another dtype": (
        BLOCKS, replaced(f"{UP}.weight", lambda codes: codes.view(torch.int8)),
        rf"{UP}\.weight is in int8: codes of e4m3 must be in float8_e4m3fn",
    ),
    "no scales": (
        PACKED, without(f"{UP}.weight_scale"), rf"{UP} has no tensor: one of {UP}\.weight_scale is",
    ),
    "no codes": (
        PACKED, without(f"{UP}.weight_packed"),
        rf"{UP} has no tensor: one of {UP}\.weight_packed is",
    ),
    "no order": (GPTQ, without(f"{UP}.g_idx"), rf"{UP} has no tensor: one of {UP}\.g_idx is"),
    "a scale of nothing": (
        PACKED, added(f"{UP}.weight_global_scale", torch.ones(1)),
        rf"1 tensors of {UP} are none of its format, int4-1x32: {UP}\.weight_global_scale",
    ),
    "a scale of an ignored linear": (
        PACKED, added(f"{HEAD}.weight_scale", torch.ones(1)),
        rf"has 1 tensors of quantised weights, which are not those of the format that its configs "
        rf"tell \(compressed-tensors\): {HEAD}\.weight_scale",
    ),
    "plain weights": (
        PACKED, plain_up,
        rf"has {UP}\.weight in torch\.bfloat16, and nothing beside it, but config\.json says that "
        rf"it is quantised \(compressed-tensors\)",
    ),
    "q and k of different kinds": (
        PACKED, k_is_plain,
        rf"in different ways: {Q} as int4-1x32, {K} as the model's dtype, ",
    ),
    "q and k in different groups": (
        PACKED, k_has_other_groups,
        rf"in different ways: {Q} as int4-1x32, {K} as int4-1x64, ",
    ),
    "q and k in different orders": (
        GPTQ, replaced(f"{K}.g_idx", lambda groups: groups.flip(0)),
        rf"columns in different orders: g_idx of {Q} is not that of {K}",
    ),
    "a group too large": (
        GPTQ, replaced(f"{Q}.g_idx", lambda groups: groups // 2),
        rf"{Q}\.g_idx puts 64 columns into group 0 of 4: it is of 32",
    ),
    "biases of something": (
        GPTQ, added(f"{Q}.bias", torch.ones(128)), rf"does not have: {Q}\.bias",
    ),
    "a method that is not known": (
        PACKED, says(quant_method="exl2"), r"quantization_config\.quant_method='exl2'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_what_headers_contradict_is_refused(tmp_path: Path, name: str) -> None:
    """Before anything is allocated."""
    kind, edit, message = HEADERS[name]
    path = write_model(tmp_path, KINDS[kind], edit=edit).path
    with pytest.raises(ValueError, match=message) as error:
        read_model(Checkpoint.open(path))
    if name != "a method that is not known":
        assert str(error.value).startswith(str(path))


def test_groups_that_no_kernel_has(tmp_path: Path) -> None:
    path = write_model(tmp_path, fp8_kind(96)).path
    message = f"{path}: {Q}, {K}, .*: groups of 96 columns of e4m3: the kernels have powers of two"
    with pytest.raises(ValueError, match=message):
        read_model(Checkpoint.open(path))


def with_high_zero(words: Tensor) -> Tensor:
    """15 of GPTQ's first version is 16."""
    words[0, 2] |= 15
    return words


VALUES: dict[str, tuple[str, Edit, str]] = {
    "NaN": (
        PACKED, replaced(f"{UP}.weight_scale", with_nan),
        rf"{UP}\.weight_scale has 1 wrong of 1024 scales, the first nan at \[0, 3\]",
    ),
    "zero points out of range": (
        "gptq", replaced(f"{UP}.qzeros", with_high_zero),
        rf"{UP}\.qzeros has 1 zero points out of range, the first 16 at \[16, 0\]: they are in "
        rf"\[0, 15\]",
    ),
    "zero points of a symmetric format": (
        "gptq symmetric", replaced(f"{Q}.qzeros", torch.zeros_like),
        rf"{Q}\.qzeros has 256 zero points of a symmetric format out of range, the first 1 at",
    ),
    "another shape inside": (
        PACKED, replaced(f"{UP}.weight_shape", lambda shape: shape.flip(0)),
        rf"{UP}\.weight_shape says \[128, 256\]: its weight is \[256, 128\]",
    ),
    "a power that is too high": (
        "mxfp4", replaced(f"{UP}.weight_scales", lambda scales: torch.full_like(scales, 254)),
        rf"gate_proj, {UP}: a scale of 2 \*\* 127 exceeds 2 \*\* 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values_that_mean_nothing_are_refused(tmp_path: Path, name: str) -> None:
    kind, edit, message = VALUES[name]
    path = write_model(tmp_path, KINDS[kind], edit=edit).path
    with pytest.raises(ValueError, match=message) as error:
        open_engine(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int4"}, r"quantize='int4' is for weights of 16 or 32 bits, and those of "
         r".* are quantised \(compressed-tensors\)"),
        ({"quantize_lm_head": True}, "quantize_lm_head=True is for an engine with quantize"),
        ({"quantize": "int3"}, "quantize='int3'"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_model(tmp_path, KINDS[PACKED]).path
    with pytest.raises(ValueError, match=message):
        open_engine(path, **options)


def test_columns_that_cannot_be_rounded(tmp_path: Path) -> None:
    """They are seen before any weight has memory."""
    checkpoint = Checkpoint.open(plain_model(tmp_path / "m", intermediate_size=251))
    message = (
        r"quantize='int4': model\.layers\.0\.mlp\.down_proj: a weight of 251 columns cannot have "
        r"codes of 4 bits"
    )
    with pytest.raises(ValueError, match=message) as error:
        read_model(checkpoint, "int4")
    assert str(error.value).startswith(str(checkpoint.path))
    read_model(checkpoint, "int8")


def test_numbers_that_cannot_be_rounded(tmp_path: Path) -> None:
    source = plain_model(tmp_path / "in")
    tensors = {name: value.clone() for name, value in Checkpoint.open(source).mapped().items()}
    tensors[f"{UP}.weight"][7, 3] = torch.inf
    save(tmp_path / "m", json.loads((source / "config.json").read_text()), tensors)
    with pytest.raises(ValueError, match=r"row 263 of a weight \[512, 128\] has a number") as error:
        open_engine(tmp_path / "m", quantize="int4")
    assert str(error.value).startswith(f"{tmp_path / 'm'}: model.layers.1.mlp.gate_proj.weight, ")


MODULE = "mtp.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (added(f"{MODULE}.weight_scale_2", torch.ones(1)),
         rf"1 tensors of {MODULE} are none of its format, int8-1x0: {MODULE}\.weight_scale_2"),
        (added("mtp.norm.weight_scale", torch.ones(1)), r"does not have: mtp\.norm\.weight_scale"),
        (replaced(f"{MODULE}.weight_scale", lambda scales: scales[1:]),
         rf"{MODULE}\.weight_scale has shape \[127, 1\]"),
        (without(f"{MODULE}.weight_scale"), rf"one of {MODULE}\.weight_scale is needed"),
    ],
)  # fmt: skip
def test_a_draft_modules_tensors_are_checked(tmp_path: Path, edit: Edit, message: str) -> None:
    kind = KINDS["int-quantized channel"]

    def add_module(config: dict[str, Any], tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            tensors[name.replace("model.layers", "mtp.layers")] = tensors[name].clone()
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"mtp.{name}.weight"] = torch.ones(128)
        fc = kind.store("mtp.fc", 128, 256).tensors
        tensors.update({f"mtp.fc.{end}": tensor for end, tensor in fc.items()})

    def both(config: dict[str, Any], tensors: Tensors) -> None:
        add_module(config, tensors)
        edit(config, tensors)

    read_mtp_config(Checkpoint.open(write_model(tmp_path / "good", kind, edit=add_module).path))
    path = write_model(tmp_path / "bad", kind, edit=both).path
    with pytest.raises(ValueError, match=message) as error:
        read_mtp_config(Checkpoint.open(path))
    assert str(error.value).startswith(str(path))
