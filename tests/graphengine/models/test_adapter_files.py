"""Folders of adapters: what is read of them, and what is refused, with names and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.adapters import ALL, matrices, write_adapter
from graphengine import Engine
from graphengine.models.adapters.adapter import Adapter
from graphengine.models.adapters.adapter_config import AdapterConfig
from graphengine.models.adapters.merging import with_merged
from graphengine.models.checkpoints.checkpoint import Checkpoint

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAME = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def base(checkpoints: dict[str, Any]) -> Any:
    return checkpoints["qwen3-biases"]


@pytest.fixture
def folder(base: Any, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base.model, rank=4)


def open_with(base: Any, folder: Path, **options: Any) -> None:
    sizes = {"max_batch": 1, "max_seq_len": 64, "device": "cpu", "dtype": "float32"}
    Engine.from_pretrained(base.path, **sizes | {"adapters": {"a": folder}} | options).close()


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / WEIGHTS)


def test_parts_and_scales(base: Any, tmp_path: Path) -> None:
    """Patterns name the end of a linear's name, or are regular expressions, as in peft."""
    folder = write_adapter(
        tmp_path / "a", base.model, rank=4, alpha=6, use_rslora=True,
        rank_pattern={"mlp.up_proj": 7, r"layers\.1\..*": 2}, alpha_pattern={"up_proj": 9},
    )  # fmt: skip
    adapter, expected = Adapter.open(folder), matrices(folder)
    assert adapter.rank == 7 and len(adapter.linears) == len(ALL) * 2
    found = dict(adapter.parts())
    assert found.keys() == expected.keys()
    for name, (down, up, scale, *_) in found.items():
        assert torch.equal(down, expected[name][0]) and torch.equal(up, expected[name][1])
        assert scale == pytest.approx(expected[name][2], rel=1e-12)


@pytest.mark.parametrize("prefix", ["model.language_model.layers", "layers"])
def test_names_of_language_models_and_of_bases_alone(folder: Path, prefix: str) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.layers", prefix)] = tensors.pop(name)

    known = Adapter.open(folder).linears
    change_tensors(folder, rename)
    assert sorted(Adapter.open(folder).linears) == sorted(known)


PATTERNS = [
    ("model.language_model.layers", "model.language_model.layers.1.self_attn.q_proj", True),
    ("model.language_model.layers", r"^model\.language_model\.layers\.1\.self_attn\.q_proj", True),
    ("model.language_model.layers", r"language_model\.layers\.\d+\.self_attn.q_proj", True),
    # The name in the whole language model, which the adapter's own model does not have.
    ("model.language_model.layers", "model.layers.1.self_attn.q_proj", False),
    ("language_model.model.layers", "^language_model.model.layers.1.self_attn.q_proj", True),
    ("transformer.h", "^transformer.h.1.self_attn.q_proj", True),
    ("transformer.h", "model.layers.1.self_attn.q_proj", False),
    ("layers", "^layers.1.self_attn.q_proj", True),
    ("layers", "^model.layers.1.self_attn.q_proj", False),
    ("model.layers", "self_attn.q_proj", True),
    # A pattern begins after a dot, and reaches the end.
    ("model.layers", "attn.q_proj", False),
    ("model.layers", "layers.1.self_attn", False),
]


@pytest.mark.parametrize(("prefix", "pattern", "fits"), PATTERNS)
def test_patterns_fit_full_names(folder: Path, prefix: str, pattern: str, fits: bool) -> None:
    """peft's rule: (.*\\.)?(pattern)$, for a linear's name in the model that was trained."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.layers", prefix)] = tensors.pop(name)

    change_tensors(folder, rename)
    change_config(folder, alpha_pattern={"nothing": 3, pattern: 64, ".*": 5})
    scales = {name: part.scale for name, part in Adapter.open(folder).parts()}
    assert scales["model.layers.1.self_attn.q_proj"] == (16 if fits else 1.25)
    assert scales["model.layers.1.self_attn.k_proj"] == 1.25


@pytest.mark.parametrize(("prefix", "pattern", "fits"), PATTERNS)
def test_peft_fits_patterns_so(prefix: str, pattern: str, fits: bool) -> None:
    other = pytest.importorskip("peft.utils.other", reason="peft is not installed")
    key, name = f"({pattern})", f"{prefix}.1.self_attn.q_proj"
    assert (other.get_pattern_key([key], name) == key) == fits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3': only 'LORA' is read"),
        ({"use_dora": True}, "use_dora=True, which is not served: DoRA scales each row"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\], which is not served"),
        ({"bias": "all"}, "bias='all': adapters with biases are not read"),
        ({"lora_bias": True}, "lora_bias=True, which is not served: it adds a bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which changes the base model"),
        ({"init_lora_weights": "OLoRA"}, "'OLoRA', which changes the base model"),
        ({"use_qalora": True}, "use_qalora=True, .* nothing here knows what that changes"),
        ({"new_key": {"a": 1}}, r"new_key=\{'a': 1\}, .* nothing here knows"),
        ({"use_rslora": "false"}, "use_rslora='false': must be true or false"),
        ({"use_rslora": 1}, "use_rslora=1: must be true or false"),
        ({"r": 0}, "r=0: must be an integer from 1 up"),
        ({"lora_alpha": "x"}, "lora_alpha='x': must be a number"),
        ({"lora_alpha": 65_505}, r"lora_alpha=65505: must be a number in \[-65504, 65504\]"),
        ({"lora_alpha": 10**400}, "lora_alpha=1000.*: must be a number in"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern=\['q_proj'\]: must be an object"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern has '\(': "),
        ({"r": 6}, r"has matrices \[4, 120\] and \[80, 4\], not \[6, 120\] and \[80, 6\]"),
    ],
)
def test_configs_that_are_refused(
    base: Any, folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        open_with(base, folder)


def test_keys_that_say_nothing(base: Any, folder: Path) -> None:
    """Layers are told by the tensors; how training began does not matter."""
    change_config(
        folder, layers_to_transform=[0, 1], layers_pattern="layers", init_lora_weights="gaussian",
        revision="main", inference_mode=True, megatron_core="megatron.core", use_dora=False,
        fan_in_fan_out=True,
    )  # fmt: skip
    assert AdapterConfig.read(folder).scale_of("q_proj") == 2.0
    open_with(base, folder)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{NAME}.lora_B.weight"]


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NAME}.lora_A.weight"] = tensors[f"{NAME}.lora_A.weight"][:, 1:]


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NAME}.lora_B.weight"][3, 1] = torch.inf


def embed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 307)


def head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 80)
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.zeros(307, 4)


def whole_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.base_layer.weight"] = torch.zeros(307, 80)


def rename(tensors: dict[str, torch.Tensor]) -> None:
    for name in [*tensors]:
        tensors[name.replace("layers.1.", "layers.7.")] = tensors.pop(name)


def repeat(tensors: dict[str, torch.Tensor]) -> None:
    for name in (f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight"):
        tensors[name.removeprefix("base_model.model.")] = torch.full_like(tensors[name], torch.nan)


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NAME}.lora_A.weight"] = tensors[f"{NAME}.lora_A.weight"].to(torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"lacks 1 of 28 matrices: .*q_proj\.lora_B\.weight"),
        (narrow, r"q_proj has matrices \[4, 79\] and \[256, 4\], not \[4, 80\] .* another base"),
        (spoil, r"q_proj\.lora_B\.weight has 1 of 1024 numbers that are not finite as torch\.f"),
        (whole_head, r"1 of 29 tensors .*lm_head\.base_layer\.weight: save it again with save_emb"),
        (embed, r"has 1 of 29 tensors that are no matrices of linears: .*lora_embedding_A"),
        (head, r"changes 1 of 15 linears that adapters cannot change here: lm_head"),
        (rename, r"changes 7 of 14 linears that the base model does not have: model\.layers\.7"),
        (
            repeat,
            r"has the matrices of one linear twice: .*lora_A\.weight and .*lora_A\.weight",
        ),
        (shorten, r"has 1 matrices in torch.float64, not in 16 or 32 bits"),
    ],
)
def test_matrices_that_are_refused(
    base: Any, folder: Path, change: Callable[[Any], object], message: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        open_with(base, folder)


def large(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NAME}.lora_A.weight"][0, 3] = 1e6


def huge(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{NAME}.lora_A.weight"][:] = 1e30
    tensors[f"{NAME}.lora_B.weight"][5] = 1e30


def test_matrices_too_large_for_the_dtype(base: Any, folder: Path) -> None:
    """1e6 is finite in float32, and not in float16."""
    change_tensors(folder, large)
    open_with(base, folder)
    message = r"q_proj\.lora_A\.weight has 1 of 320 numbers that are not finite as torch\.float16"
    with pytest.raises(ValueError, match=message):
        open_with(base, folder, dtype="float16")


def test_merged_weights_too_large_for_the_dtype(base: Any, folder: Path) -> None:
    merge: dict[str, Any] = {"adapters": None, "merge_adapter": folder}
    change_tensors(folder, large)
    open_with(base, folder, **merge)
    message = (
        r"adapter merged into model\.layers\.0\.self_attn\.q_proj\.weight has \d+ of 20480 num"
    )
    with pytest.raises(ValueError, match=message + r".* not finite as torch\.float16"):
        open_with(base, folder, **merge | {"dtype": "float16"})
    change_tensors(folder, huge)
    with pytest.raises(ValueError, match=message + r".* not finite as torch\.float32"):
        open_with(base, folder, **merge)


def test_a_head_is_merged(base: Any, folder: Path) -> None:
    def fill(tensors: dict[str, torch.Tensor]) -> None:
        head(tensors)
        tensors["base_model.model.lm_head.lora_A.weight"][2, 5] = 3
        tensors["base_model.model.lm_head.lora_B.weight"][7, 2] = 4

    change_tensors(folder, fill)
    plain = Checkpoint.open(base.path)
    found = with_merged(plain, Adapter.open(folder)).mapped()["lm_head.weight"]
    expected = plain.mapped()["lm_head.weight"].clone()
    expected[7, 5] += 12 * AdapterConfig.read(folder).scale_of("lm_head")
    torch.testing.assert_close(found, expected)


def test_a_rank_above_the_slots(base: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"down_proj has rank 4, and max_adapter_rank=3"):
        open_with(base, folder, max_adapter_rank=3)


def test_folders_that_are_none(base: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no adapter '.*missing': there is"):
        open_with(base, tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json: it is no LoRA"):
        open_with(base, base.path)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"\(adapter_model\.bin\): only safetensors are read"):
        open_with(base, folder)


def test_experts_and_latents_are_refused_by_name(
    expert_checkpoints: dict[str, Any], latent_checkpoints: dict[str, Any], tmp_path: Path
) -> None:
    """Attention beside experts is served; products of experts and of latents are not."""
    experts = expert_checkpoints["moe-some-layers"]
    folder = write_adapter(tmp_path / "experts", experts.path, ("q_proj", "up_proj"), rank=2)
    with pytest.raises(ValueError, match=r"cannot change here: model\.layers\.\d\.mlp\.experts\.0"):
        open_with(experts, folder)
    open_with(experts, write_adapter(tmp_path / "attention", experts.path, ("q_proj",), rank=2))
    latent = latent_checkpoints["latent-lite"]
    folder = write_adapter(tmp_path / "latent", latent.path, ("q_proj",), rank=2)
    with pytest.raises(ValueError, match=r"cannot change here: .*\.self_attn\.q_proj"):
        open_with(latent, folder)


@pytest.mark.parametrize("change", [narrow, rename, spoil])
def test_merging_checks_the_same(base: Any, folder: Path, change: Callable[[Any], object]) -> None:
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=r"another base model|does not have|not finite"):
        open_with(base, folder, adapters=None, merge_adapter=folder)
