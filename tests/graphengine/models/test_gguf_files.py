"""Headers of GGUF files: what the package's own reader finds, and files that are damaged."""

from __future__ import annotations

import builtins
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.checkpoints.gguf.file import read_gguf

gguf = pytest.importorskip("gguf")

# A file's first bytes: the magic number, the version, and the numbers of tensors and keys.
VERSION, TENSORS, KEYS = 4, 8, 16
SIZES: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": 64,
    "block_count": 1,
    "feed_forward_length": 32,
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
LATENT = {
    **{"attention.key_length": 12, "attention.value_length": 8, "rope.dimension_count": 4},
    **{"attention.key_length_mla": 8, "attention.value_length_mla": 4},
}
SHAPES = {
    "token_embd.weight": (7, 64),
    "output_norm.weight": (64,),
    "blk.0.attn_norm.weight": (64,),
    "blk.0.attn_q.weight": (64, 64),
    "blk.0.attn_k.weight": (64, 64),
    "blk.0.attn_v.weight": (64, 64),
    "blk.0.attn_output.weight": (64, 64),
    "blk.0.ffn_norm.weight": (64,),
    "blk.0.ffn_gate.weight": (32, 64),
    "blk.0.ffn_up.weight": (32, 64),
    "blk.0.ffn_down.weight": (64, 32),
}


def small(
    folder: Path,
    *,
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    general: Callable[[gguf.GGUFWriter], None] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    kind: str = "F32",
    name: str = "small.gguf",
    **options: Any,
) -> Path:
    """A file of zeros; metadata that is None is left out."""
    writer = gguf.GGUFWriter(folder / name, arch, **options)
    for key, value in (SIZES | (metadata or {})).items():
        if value is not None:
            form = gguf.GGUFValueType.get_type(value)
            form = gguf.GGUFValueType.UINT32 if form == gguf.GGUFValueType.INT32 else form
            writer.add_key_value(f"{arch}.{key}", value, form)
    if general is not None:
        general(writer)
    for tensor, shape in (SHAPES | (shapes or {})).items():
        data = np.zeros(shape, dtype=np.float32)
        number = gguf.GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
        writer.add_tensor(tensor, gguf.quantize(data, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / name


def changed(file: Path, at: int, form: str, value: int) -> Path:
    """The file with another number at this byte."""
    content = bytearray(file.read_bytes())
    struct.pack_into(f"<{form}", content, at, value)
    file.write_bytes(content)
    return file


def place_of(file: Path, name: str) -> int:
    """The byte after a name in the header."""
    return file.read_bytes().index(name.encode()) + len(name)


def test_the_header_is_what_the_package_reads(tmp_path: Path) -> None:
    def general(writer: gguf.GGUFWriter) -> None:
        writer.add_array("some.strings", ["a", "", "\u20ac"])
        writer.add_array("some.numbers", [1.5, -2.5])
        writer.add_int64("some.large", -(2**62))
        writer.add_bool("some.flag", True)
        writer.add_custom_alignment(128)

    file = small(tmp_path, general=general, kind="Q8_0")
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    fields = {key: each for key, each in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == {key: field.contents() for key, field in fields.items()}
    assert {
        name: (*each.shape, each.kind, each.start, each.nbytes)
        for name, each in ours.tensors.items()
    } == {
        each.name: (
            *each.shape[::-1].tolist(),
            each.tensor_type.name,
            each.data_offset,
            each.n_bytes,
        )
        for each in theirs.tensors
    }
    checkpoint = Checkpoint.open(file)
    assert not checkpoint.has_tokenizer and checkpoint.config["num_hidden_layers"] == 1


def test_errors_of_the_config_name_the_metadata_keys(tmp_path: Path) -> None:
    file = small(tmp_path, metadata={"attention.layer_norm_rms_epsilon": 2.0})
    message = (
        r"small\.gguf: config\.json has rms_norm_eps=2\.0: must be .* \(the config is made of the "
        r"file's metadata: rms_norm_eps from llama\.attention\.layer_norm_rms_epsilon\)$"
    )
    with pytest.raises(ValueError, match=message):
        read_model(Checkpoint.open(file))
    file = small(tmp_path, metadata={"rope.scaling.type": "su"})
    with pytest.raises(ValueError, match=r"'su'.* \(the config is made of the file's metadata\)$"):
        read_model(Checkpoint.open(file))
    # `deepseek2` is the name of two classes.
    metadata = {"attention.kv_lora_rank": 8, "attention.layer_norm_rms_epsilon": 2.0, **LATENT}
    file = small(tmp_path, arch="deepseek2", metadata=metadata)
    with pytest.raises(ValueError, match=r"rms_norm_eps from deepseek2\.attention\.layer_norm_rms"):
        read_model(Checkpoint.open(file))


def test_the_package_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = small(tmp_path), builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"small.gguf is a GGUF file.*pip install '.\[gguf\]'"):
        Checkpoint.open(file)


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "I", 0, r"small.gguf is no GGUF file: it begins with b'\\x00\\x00\\x00\\x00'"),
        (VERSION, "I", 1, r"has GGUF version 1: 2 and 3 are read"),
        (VERSION, "I", 4, r"has GGUF version 4: 2 and 3 are read"),
        (
            TENSORS,
            "Q",
            2**60,
            r"the number of tensors is 1152921504606846976, which takes \d+ bytes",
        ),
        (KEYS, "Q", 2**63, r"the number of metadata keys is 9223372036854775808"),
        (24, "Q", 2**40, r"the length of a metadata key is 1099511627776, which takes"),
    ],
)
def test_damaged_beginnings(tmp_path: Path, at: int, form: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(changed(small(tmp_path), at, form, value))


@pytest.mark.parametrize(
    ("name", "at", "form", "value", "message"),
    [
        ("llama.context_length", 0, "I", 8, r"the length of llama.context_length is"),
        ("llama.context_length", 0, "I", 9, r"has llama.context_length of the metadata type \d+"),
        ("llama.context_length", 0, "I", 13, r"of the metadata type 13: 0 to 12 are known"),
        ("blk.0.attn_q.weight", 0, "I", 5, r"gives tensor 'blk.0.attn_q.weight' 5 dimensions"),
        ("blk.0.attn_q.weight", 0, "I", 0, r"0 dimensions: 1 to 4 are possible"),
        (
            "blk.0.attn_q.weight",
            4,
            "Q",
            0,
            r"with shape \[64, 0\]: rows of F32 take a multiple of 1",
        ),
        ("blk.0.attn_q.weight", 4, "Q", 2**62, r"is truncated: tensor 'blk.0.attn_q.weight' ends"),
        ("blk.0.attn_q.weight", 20, "I", 4, r"of the unknown type 4; gguf knows F32 \(0\), .*Q8_0"),
        (
            "blk.0.attn_q.weight",
            20,
            "I",
            2,
            r"puts tensor .* of the data: expected \d+, after 'blk.0.attn_q.weight'",
        ),
        ("blk.0.attn_q.weight", 20, "I", 26, r"attn_q.weight in I32, which the package gguf does"),
        ("blk.0.attn_q.weight", 24, "Q", 1, r"puts tensor .* at byte 1 of the data: expected"),
        ("blk.0.attn_q.weight", 24, "Q", 0, r"puts tensor .* at byte 0 of the data"),
        ("blk.0.attn_q.weight", 24, "Q", 2**60, r"puts tensor .* at byte \d+ of the data"),
    ],
)
def test_damaged_entries(
    tmp_path: Path, name: str, at: int, form: str, value: int, message: str
) -> None:
    file = small(tmp_path)
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(changed(file, place_of(file, name) + at, form, value))


def test_other_files_that_are_refused(tmp_path: Path) -> None:
    for options, message in (
        (
            {"arch": "mamba"},
            r"general.architecture='mamba': GGUF files are read of llama, ",
        ),
        ({"endianess": gguf.GGUFEndian.BIG}, r"is a big-endian GGUF file"),
        ({"name": "x-00002-of-00003.gguf"}, r"part 2 of 3 of a split.*open x-00001-of-00003.gguf"),
        ({"metadata": {"block_count": None}}, r"lacks the metadata keys llama.block_count"),
        (
            {"metadata": {"attention.layer_norm_rms_epsilon": None}},
            r"lacks the metadata keys llama.attention.layer_norm_rms_epsilon",
        ),
        (
            {"metadata": {"attention.clamp_kqv": 8.0}},
            r"not understood.*llama.attention.clamp_kqv=8.0",
        ),
        (
            {"metadata": {"expert_shared_count": 8}},
            r"1 metadata keys that are not unders.*expert_shared_count=8",
        ),
        (
            {"metadata": {"expert_count": 8}},
            r"lacks 25 of 33 tensors: model.layers.0.block_sparse_moe.gate.weight, ",
        ),
        (
            {"arch": "minimax-m2", "metadata": {"expert_gating_func": 1}},
            r"not understood.*minimax-m2.expert_gating_func=1",
        ),
        (
            {"arch": "glm4moe", "metadata": {"nextn_predict_layers": 1}},
            r"glm4moe.nextn_predict_layers=1: must be an integer from 0 to 0, as block_count=1",
        ),
        (
            {
                "arch": "gptneox",
                "metadata": {"attention.layer_norm_epsilon": 1e-5},
                "shapes": {"blk.0.attn_qkv.weight": (100, 64)},
            },
            r"blk.0.attn_qkv.weight with 100 rows, which are not 3 times as many",
        ),
        (
            {"arch": "lfm2", "metadata": {"attention.head_count_kv": [1, 0], "block_count": 3}},
            r"has attention.head_count_kv=\[1, 0\]: must be a number for each of 3 layers",
        ),
        (
            {"arch": "qwen3next", "metadata": {"ssm.time_step_rank": 3, "ssm.inner_size": 64}},
            r"has ssm.inner_size=64: must be a multiple of 3",
        ),
        (
            {
                "arch": "qwen3next",
                "metadata": {
                    **{"ssm.time_step_rank": 2, "ssm.inner_size": 64, "ssm.group_count": 0},
                },
            },
            r"has ssm.group_count=0: must be an integer of 1 or more",
        ),
        (
            {"arch": "nemotron_h", "metadata": {"ssm.inner_size": 64}},
            r"has ssm.time_step_rank=None: must be an integer of 1 or more",
        ),
        (
            {
                "arch": "deepseek2",
                "metadata": {"attention.kv_lora_rank": 8, **LATENT},
                "shapes": {"blk.0.attn_k_b.weight": (2, 8, 4), "blk.0.attn_v_b.weight": (1, 4, 8)},
            },
            r"attn_k_b.weight and .*attn_v_b.weight of 2 and 1 heads and of latents of 8 and 8 val",
        ),
        (
            {
                "arch": "deepseek2",
                "metadata": {"attention.kv_lora_rank": 8, "expert_gating_func": [1, 2], **LATENT},
            },
            r"has expert_gating_func=\[1, 2\]: must be 1 \(softmax\) or 2 \(sigmoid\)",
        ),
        ({"arch": "gpt2"}, r"lacks the metadata keys gpt2.attention.layer_norm_epsilon"),
        (
            {"metadata": {"attention.key_length": 64, "attention.value_length": 128}},
            "must be equal",
        ),
        ({"metadata": {"rope.scaling.type": "longrope"}}, r"longrope' needs short_factor"),
        (
            {"metadata": {"attention.head_count": [1, 2]}},
            r"llama.attention.head_count=\[1, 2\]: must be an integer of 1 or more",
        ),
        ({"metadata": {"attention.head_count": 6}}, r"attn_q.weight with 64 rows, which are no pa"),
        ({"metadata": {"rope.dimension_count": "x"}}, r"rope.dimension_count='x': must be an int"),
        ({"metadata": {"attention.key_length": math.nan}}, r"attention.key_length=nan: must be an"),
        ({"metadata": {"embedding_length": 0}}, r"llama.embedding_length=0: must be an integer"),
        (
            {"general": lambda writer: writer.add_array("tokenizer.ggml.eos_token_id", [1, 2])},
            r"tokenizer.ggml.eos_token_id=\[1, 2\]: must be int",
        ),
        (
            {
                "shapes": {f"rope_factors_{name}.weight": (32,) for name in ("short", "long")},
                "metadata": {"rope.scaling.type": "none"},
            },
            r"llama.rope.scaling.type='none' and the tensors rope_factors_short.* 'longrope'",
        ),
        ({"metadata": {"rope.dimension_count": 32}}, r"partial_rotary_factor=0.5"),
        (
            {"general": lambda writer: writer.add_uint32("split.count", 3)},
            r"part 1 of 3 of a split GGUF file: its name must end with -00001-of-00003.gguf",
        ),
        ({"general": lambda writer: writer.add_uint32("general.alignment", 33)}, r"alignment=33"),
        ({"shapes": {"blk.0.attn_sinks.weight": (4,)}}, r"does not have: blk.0.attn_sinks.weight"),
        (
            {"shapes": {"blk.1.attn_norm.weight": (64,)}},
            r"with num_hidden_layers=1: model.layers.1",
        ),
        (
            {"shapes": {"blk.0.ffn_up_exps.weight": (3, 4, 32)}},
            r"blk.0.ffn_up_exps.weight of 3 experts: expert_count is None",
        ),
        ({"shapes": {"blk.0.attn_q.weight": (64, 32)}}, r"shape \[64, 32\], not \[64, 64\]"),
    ):
        file = small(tmp_path, **options)
        with pytest.raises(ValueError, match=message):
            read_model(Checkpoint.open(file))
    nothing = tmp_path / "nothing.gguf"
    nothing.write_bytes(b"")
    with pytest.raises(ValueError, match=r"is truncated: 0 bytes, a header takes 24"):
        Checkpoint.open(nothing)


def split(folder: Path, number: int, count: int, shapes: Any = None, total: int = 0) -> Path:
    """A part of a split file; the first one has the tensors of `SHAPES`."""

    def general(writer: gguf.GGUFWriter) -> None:
        writer.add_uint16("split.no", number - 1)
        writer.add_uint16("split.count", count)
        if total:
            writer.add_int32("split.tensors.count", total)

    name = f"x-{number:05}-of-{count:05}.gguf"
    return small(folder, general=general, shapes=shapes, name=name)


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Checkpoint.open(first)

    first = split(tmp_path, 1, 3)
    refused(r"lacks 2 of 2 other parts: x-00002-of-00003.gguf, x-00003-of-00003.gguf")
    split(tmp_path, 2, 3).rename(tmp_path / "x-00003-of-00003.gguf")
    split(tmp_path, 2, 3)
    refused(r"x-00002-of-00003.gguf has tensors of an earlier part again: blk.0.attn_k.weight")
    first = split(tmp_path, 1, 2, total=40)
    file = split(tmp_path, 2, 2, {"z.weight": (2, 2)})
    content = file.read_bytes()
    for name in SHAPES:
        # Other names of the same lengths.
        content = content.replace(name.encode(), f"y{name[1:]}".encode())
    file.write_bytes(content)
    refused(r"the 2 parts of .* have 23 tensors: split.tensors.count is 40")
    split(tmp_path, 1, 2).rename(file)
    split(tmp_path, 1, 2)
    refused(r"x-00002-of-00002.gguf has split.no=0 and split.count=2: part 2 of 2 has 1 and 2")
    first = split(tmp_path, 1, 1)
    changed(first, place_of(first, "split.count") + 4, "H", 0)
    refused(r"has split.count=0 and split.no=0: a first part has 1 to 10000, and 0")


def test_neutral_keys_are_accepted(tmp_path: Path) -> None:
    keys = {
        "expert_count": 0,
        "attention.causal": True,
        "tensor_data_layout": "Meta AI original pth",
    }
    keys |= {"rope.scaling.finetuned": False, "vocab_size": 9, "rope.scaling.type": "none"}
    assert read_model(Checkpoint.open(small(tmp_path, metadata=keys))).vocab_size == 7


@given(data=st.data())
def test_no_damage_is_more_than_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(small(folder, kind="Q8_0").read_bytes())
    header = 1100
    if data.draw(st.booleans(), "cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1), "length")]
    else:
        for _ in range(data.draw(st.integers(1, 3), "changes")):
            at = data.draw(st.integers(0, header), "at")
            content[at] = data.draw(st.integers(0, 255), "byte")
    file = folder / "damaged.gguf"
    file.write_bytes(content)
    try:
        checkpoint = Checkpoint.open(file)
        for name in checkpoint.mapped():
            checkpoint.mapped()[name]
        read_model(checkpoint)
    except ValueError as error:
        assert str(error)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    file = small(tmp_path)
    checkpoint = Checkpoint.open(file)
    small(tmp_path, kind="F16")
    with pytest.raises(ValueError, match=r"has changed since it was opened: tensor model.embed"):
        checkpoint.mapped()["model.embed_tokens.weight"]
