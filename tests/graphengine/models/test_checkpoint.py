from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from graphengine.models.checkpoints.checkpoint import Checkpoint, eos_token_ids, stored_dtype
from graphengine.models.checkpoints.tensor_files import TensorInfo, TensorSlice

INDEX = "model.safetensors.index.json"


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


def small_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(4, 6, generator=generator),
        "b.weight": torch.randn(8, generator=generator).to(torch.bfloat16),
        "c.weight": torch.randn(3, 2, 5, generator=generator).to(torch.float16),
        "scale": torch.tensor(2.5),
    }


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    save_file(small_tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards; the first holds "a.weight" and "b.weight"."""
    write_json(tmp_path / "config.json", {})
    tensors = small_tensors()
    shards = {"one.safetensors": ["a.weight", "b.weight"], "two.safetensors": ["c.weight", "scale"]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    write_json(tmp_path / INDEX, {"metadata": {}, "weight_map": weight_map})
    return tmp_path


def edit_index(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    edit(index)
    write_json(directory / INDEX, index)


def edit_header(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


# Reading what is there.


def test_a_single_file_is_read_without_its_data(single: Path) -> None:
    write_json(single / "generation_config.json", {"temperature": 0.6})
    checkpoint = Checkpoint.open(single)
    file = single / "model.safetensors"
    assert checkpoint.path == single
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"temperature": 0.6}
    assert checkpoint.tensors == {
        "a.weight": TensorInfo(shape=(4, 6), dtype=torch.float32, file=file),
        "b.weight": TensorInfo(shape=(8,), dtype=torch.bfloat16, file=file),
        "c.weight": TensorInfo(shape=(3, 2, 5), dtype=torch.float16, file=file),
        "scale": TensorInfo(shape=(), dtype=torch.float32, file=file),
    }
    assert [info.nbytes for _, info in sorted(checkpoint.tensors.items())] == [96, 16, 60, 4]
    assert not checkpoint.has_tokenizer


def test_generation_config_is_optional(single: Path) -> None:
    assert Checkpoint.open(str(single)).generation_config == {}


def test_shards_are_read_by_the_index(sharded: Path) -> None:
    tensors = Checkpoint.open(sharded).tensors
    assert {name: info.file.name for name, info in tensors.items()} == {
        "a.weight": "one.safetensors",
        "b.weight": "one.safetensors",
        "c.weight": "two.safetensors",
        "scale": "two.safetensors",
    }


def test_what_transformers_shards_is_read_whole(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    checkpoint = Checkpoint.open(tmp_path)
    expected = model.state_dict()
    assert len({info.file for info in checkpoint.tensors.values()}) > 2
    assert checkpoint.config["model_type"] == "llama"
    loaded = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    assert checkpoint.load(loaded) == []
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


# Loading.


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_norms_and_biases_are_finite(single: Path, value: float) -> None:
    """Tensors of one dimension are searched for numbers that are not finite, larger ones not."""
    tensors = small_tensors()
    loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    tensors["a.weight"][1, 1] = value
    save_file(tensors, single / "model.safetensors")
    Checkpoint.open(single).load(loaded)
    tensors["b.weight"][2] = value
    save_file(tensors, single / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: b\.weight has 1 of 8 numbers that"):
        Checkpoint.open(single).load(loaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_load_casts_to_the_destination(sharded: Path, dtype: torch.dtype) -> None:
    expected = small_tensors()
    loaded = {name: torch.empty(tensor.shape, dtype=dtype) for name, tensor in expected.items()}
    assert Checkpoint.open(sharded).load(loaded) == []
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor.to(dtype)), name


def test_load_fills_views_several_destinations_and_parameters(single: Path) -> None:
    expected = small_tensors()
    fused = torch.zeros(6, 10)
    parameter = torch.nn.Parameter(torch.zeros(8))
    tied = torch.zeros(4, 6)
    unused = Checkpoint.open(single).load(
        {"a.weight": [fused[1:5, 2:8], tied], "b.weight": parameter}
    )
    assert unused == ["c.weight", "scale"]
    assert torch.equal(fused[1:5, 2:8], expected["a.weight"])
    assert torch.equal(tied, expected["a.weight"])
    assert fused.count_nonzero() == 24
    assert torch.equal(parameter, expected["b.weight"].float())
    assert parameter.requires_grad


def test_load_copies_large_tensors_in_parts(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphengine.models.checkpoints.checkpoint._COPY_BYTES", 50)
    expected = small_tensors()
    loaded = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    calls: list[tuple[int, int]] = []
    Checkpoint.open(single).load(loaded, lambda done, total: calls.append((done, total)))
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    assert calls[0] == (0, 176)
    assert calls[-1] == (176, 176)
    assert calls == sorted(set(calls))
    assert len(calls) > 1 + len(expected)


def test_progress_counts_only_what_is_asked_for(sharded: Path) -> None:
    calls: list[tuple[int, int]] = []
    Checkpoint.open(sharded).load(
        {"scale": torch.empty(()), "b.weight": torch.empty(8)},
        lambda done, total: calls.append((done, total)),
    )
    assert [total for _, total in calls] == [20] * 3
    assert [done for done, _ in calls][::2] == [0, 20]


def test_load_takes_empty_tensors_and_no_tensors(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    save_file({"empty": torch.empty(0, 4), "x": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.load({"empty": torch.empty(0, 4)}) == ["x"]
    assert checkpoint.load({}) == ["empty", "x"]


def test_load_keeps_one_shard_at_a_time_in_memory(tmp_path: Path) -> None:
    shards, megabyte = 8, 1 << 20
    write_json(tmp_path / "config.json", {})
    for index in range(shards):
        weight = torch.full((16, megabyte // 4), float(index))
        save_file({f"w{index}": weight}, tmp_path / f"{index}.safetensors")
    weight_map = {f"w{index}": f"{index}.safetensors" for index in range(shards)}
    write_json(tmp_path / INDEX, {"weight_map": weight_map})
    checkpoint = Checkpoint.open(tmp_path)
    # All go into the same memory: what grows is what reading takes.
    destination = torch.zeros(16, megabyte // 4)
    resident: list[int] = []
    checkpoint.load(
        dict.fromkeys(weight_map, destination),
        lambda done, total: resident.append(resident_bytes()),
    )
    assert destination[0, 0] == shards - 1
    assert max(resident) - resident[0] < 3 * 16 * megabyte


def resident_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc/self/status")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def test_missing_tensors_are_named_before_anything_is_read(single: Path) -> None:
    destinations = {"a.weight": torch.zeros(4, 6)} | {f"m{i}": torch.zeros(1) for i in range(7)}
    with pytest.raises(ValueError, match=r"lacks 7 of 8 tensors: m0, m1, m2, m3, m4 and 2 more$"):
        Checkpoint.open(single).load(destinations)
    assert not destinations["a.weight"].any()


def test_rows_may_have_several_dimensions_and_so_another_order(single: Path) -> None:
    """Each destination is contiguous only as what it is a view of."""
    checkpoint = Checkpoint.open(single)
    expected = {"a.weight": torch.empty(4, 6), "b.weight": torch.empty(8)}
    plain = {name: tensor.clone() for name, tensor in expected.items()}
    checkpoint.load(plain)
    checkpoint.load(
        {
            "a.weight": expected["a.weight"].view(1, 2, 2, 6).transpose(1, 2),
            "b.weight": expected["b.weight"].view(1, 2, 2, 2).transpose(1, 2),
        }
    )
    assert torch.equal(expected["a.weight"], plain["a.weight"][[0, 2, 1, 3]])
    assert torch.equal(expected["b.weight"], plain["b.weight"][[0, 1, 4, 5, 2, 3, 6, 7]])
    for shape in ((1, 2, 2, 5), (1, 3, 2, 6), (2, 2, 6)):
        message = rf"a.weight has shape \[4, 6\], not \[{', '.join(map(str, shape))}\]"
        with pytest.raises(ValueError, match=message):
            checkpoint.check({"a.weight": torch.empty(shape)})


def test_wrong_shapes_are_named_with_both_shapes(single: Path) -> None:
    destinations = {"a.weight": [torch.zeros(4, 6), torch.zeros(6, 4)], "b.weight": torch.zeros(8)}
    with pytest.raises(
        ValueError, match=r"1 tensors .*: a.weight has shape \[4, 6\], not \[6, 4\]"
    ):
        Checkpoint.open(single).load(destinations)
    assert not destinations["b.weight"].any()


def test_weights_are_not_cast_to_integers(single: Path) -> None:
    with pytest.raises(ValueError, match=r"cast to floats, not b.weight to torch.int32"):
        Checkpoint.open(single).load({"b.weight": torch.zeros(8, dtype=torch.int32)})


def test_an_error_in_the_progress_callback_reaches_the_caller(single: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoint.open(single).load({"b.weight": torch.zeros(8)}, stop)


def test_a_file_truncated_after_open_is_found_before_anything_is_read(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    file = sharded / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    destinations = {"a.weight": torch.zeros(4, 6), "scale": torch.zeros(())}
    with pytest.raises(ValueError, match=r"two.safetensors is truncated"):
        checkpoint.load(destinations)
    assert not destinations["a.weight"].any()


def test_what_only_safetensors_finds_wrong_names_the_file(single: Path) -> None:
    edit_header(single / "model.safetensors", lambda header: header.update(__metadata__={"a": 1}))
    checkpoint = Checkpoint.open(single)
    with pytest.raises(
        ValueError, match=r"model.safetensors cannot be read: .*deserializing header"
    ):
        checkpoint.load({"b.weight": torch.zeros(8)})


def test_a_file_replaced_after_open_is_found(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    save_file({"a.weight": torch.zeros(6, 4)}, single / "model.safetensors")
    with pytest.raises(ValueError, match=r"has changed since it was opened: tensor a.weight"):
        checkpoint.load({"a.weight": torch.zeros(4, 6)})


# Damage.


@pytest.mark.parametrize("cut", [1, 64, 170])
def test_truncated_data_is_named_with_numbers(single: Path, cut: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    pattern = rf"model.safetensors is truncated: tensor \S+ ends at byte \d+ .* has {176 - cut}$"
    with pytest.raises(ValueError, match=pattern):
        Checkpoint.open(single)


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_file_shorter_than_its_header_is_named_with_numbers(single: Path, size: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"truncated or no safetensors file: it has {size} bytes"):
        Checkpoint.open(single)


def test_a_header_length_beyond_the_file_is_named(single: Path) -> None:
    (single / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=rf"it has 64 bytes, 8 and a header of {2**64 - 1} are"):
        Checkpoint.open(single)


def test_a_giant_header_is_refused(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphengine.models.checkpoints.tensor_files._MAX_HEADER_BYTES", 100)
    with pytest.raises(ValueError, match=r"has a header of \d+ bytes, the limit is 100"):
        Checkpoint.open(single)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_corrupt_header_is_named(single: Path, text: bytes) -> None:
    (single / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match=r"the header of .*model.safetensors is not valid JSON"):
        Checkpoint.open(single)


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [
        (lambda h: h["b.weight"].update(dtype="F4"), r"tensor b.weight in F4 with shape"),
        (lambda h: h["b.weight"].update(dtype="C64"), r"must be one of F32, F16, BF16, I64"),
        (lambda h: h["b.weight"].update(shape=[9]), r"b.weight 16 bytes, .* \[9\] takes 18"),
        (lambda h: h["b.weight"].update(shape=[-8]), r"describes tensor b.weight as .*-8"),
        (lambda h: h["b.weight"].update(shape="8"), r"not a safetensors entry"),
        (lambda h: h["b.weight"].update(data_offsets=[0]), r"not a safetensors entry"),
        (lambda h: h["b.weight"].pop("dtype"), r"describes tensor b.weight as"),
        (lambda h: h.update({"b.weight": 3}), r"describes tensor b.weight as 3"),
        (
            lambda h: h.pop("b.weight"),
            r"at byte \d+ of the data: expected \d+|of data, its tensors",
        ),
        (lambda h: h.update({"d": h["b.weight"]}), r"puts tensor d at byte \d+ of the data"),
        (lambda h: h.clear(), r"model.safetensors holds no tensor"),
    ],
)
def test_a_wrong_header_is_named(
    single: Path, edit: Callable[[dict[str, Any]], object], pattern: str
) -> None:
    edit_header(single / "model.safetensors", edit)
    with pytest.raises(ValueError, match=pattern):
        Checkpoint.open(single)


def test_data_after_the_last_tensor_is_refused(single: Path) -> None:
    with (single / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 3)
    with pytest.raises(ValueError, match=r"has 179 bytes of data, its tensors take 176"):
        Checkpoint.open(single)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_value_error_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    write_json(directory / "config.json", {})
    save_file({"w": torch.ones(3, 2), "v": torch.ones(2)}, directory / "model.safetensors")
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        checkpoint = Checkpoint.open(directory)
    except ValueError as error:
        assert str(file) in str(error)
    else:
        destinations = {name: torch.empty(i.shape) for name, i in checkpoint.tensors.items()}
        assert checkpoint.load(destinations) == []


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names two.safetensors for 2 tensors, but there is no"):
        Checkpoint.open(sharded)


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update(scale="one.safetensors"))
    with pytest.raises(ValueError, match=r"1 tensors that are not there: scale in one.safetensors"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "shard",
    [
        "../one.safetensors",
        "/etc/one.safetensors",
        "sub/one.safetensors",
        "..\\one.safetensors",
        "one.bin",
        "..",
        "",
        3,
        None,
    ],
)
def test_the_index_names_only_safetensors_beside_it(sharded: Path, shard: object) -> None:
    save_file({"scale": torch.ones(())}, sharded.parent / "one.safetensors")
    edit_index(sharded, lambda index: index["weight_map"].update(scale=shard))
    with pytest.raises(ValueError, match=r"puts tensor scale into .*beside the index"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_weight_map_is_refused(sharded: Path, weight_map: object) -> None:
    edit_index(sharded, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(ValueError, match=r"index.json has no weight_map"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_corrupt_json_is_named(sharded: Path, name: str) -> None:
    (sharded / name).write_text('{"a": ')
    with pytest.raises(ValueError, match=rf"{name} is not valid JSON: .*line 1 column"):
        Checkpoint.open(sharded)
    (sharded / name).write_text("[1]")
    with pytest.raises(ValueError, match=rf"{name} must be a JSON object, it is list"):
        Checkpoint.open(sharded)


# What is no checkpoint.


def test_pickles_are_never_read(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ValueError, match=r"has pytorch_model.bin: only safetensors are read"):
        Checkpoint.open(tmp_path)


def test_the_command_that_converts_pickles_works(tmp_path: Path) -> None:
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    model.save_pretrained(tmp_path / "FOLDER")
    (tmp_path / "FOLDER" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "FOLDER" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="If you trust the files, this writes") as error:
        Checkpoint.open(tmp_path / "FOLDER")
    code = str(error.value).partition('python -c "')[2].partition('"')[0]
    for name in ("FOLDER", "NEW"):
        code = code.replace(f"'{name}'", repr(str(tmp_path / name)))
    exec(code, {})
    assert Checkpoint.open(tmp_path / "NEW").tensors.keys() >= {"lm_head.weight"}


def test_a_directory_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        Checkpoint.open(tmp_path)
    write_json(tmp_path / "config.json", {})
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.in"):
        Checkpoint.open(tmp_path)


def test_what_a_directory_without_a_config_is_instead(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": "org/base"})
    message = (
        r"has no config.json, but adapter_config.json: it is a LoRA adapter of 'org/base'. Open "
        r"that model with adapters="
    )
    with pytest.raises(FileNotFoundError, match=message):
        Checkpoint.open(tmp_path)
    write_json(tmp_path / "adapter_config.json", {})
    message = r"it is a LoRA adapter. Open its model with adapters=\{name: folder\} or merge"
    with pytest.raises(FileNotFoundError, match=message):
        Checkpoint.open(tmp_path)


def test_a_file_is_no_checkpoint(single: Path) -> None:
    with pytest.raises(ValueError, match=r"model.safetensors is a file: a checkpoint is a direct"):
        Checkpoint.open(single / "model.safetensors")


@pytest.mark.parametrize("name", ["nowhere", "./org/name", "/no/such", "a/b/c", "../up", ""])
def test_what_cannot_be_a_hub_id_is_not_looked_up(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if not name:
        name = "org/"
    match = r"no such directory or file, and it does not look like a hub id"
    with pytest.raises(FileNotFoundError, match=match):
        Checkpoint.open(name)


@pytest.mark.parametrize("name", ["~no-such-user", "~no-such-user/x", "x" * 300, 5, None])
def test_a_path_that_nobody_can_have_is_a_value_error(name: Any) -> None:
    with pytest.raises(ValueError, match=r"path '~no-such-user|no checkpoint 'xxx|must be a path"):
        Checkpoint.open(name)


# The hub.


def fake_hub(monkeypatch: pytest.MonkeyPatch, snapshot_download: Callable[..., str]) -> None:
    hub = types.ModuleType("huggingface_hub")
    constants = types.SimpleNamespace(HF_HUB_OFFLINE=True, HF_HUB_CACHE="/cache/of/hub")
    vars(hub).update(snapshot_download=snapshot_download, constants=constants)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_hub_id_is_taken_from_the_hubs_cache(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(single)

    fake_hub(monkeypatch, snapshot_download)
    checkpoint = Checkpoint.open("org/name-1.5B")
    assert checkpoint.path == single
    assert asked["repo_id"] == "org/name-1.5B"
    assert asked["allow_patterns"] == ["*.json", "*.jinja", "*.safetensors", "*.txt"]
    (single / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"no config.json, and its name says GGUF: GGUF files are not downl"
    ):
        Checkpoint.open("org/name-GGUF")


def test_a_local_directory_goes_before_the_hub(
    tmp_path: Path, single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to(single)
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.open("org/name").path == Path("org/name")


def test_a_missing_hub_checkpoint_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: object) -> str:
        raise ConnectionError("no route")

    fake_hub(monkeypatch, snapshot_download)
    pattern = (
        r"no checkpoint 'org/name': there is no such directory, and huggingface_hub could not "
        r"provide it \(cache /cache/of/hub, HF_HUB_OFFLINE is set\): ConnectionError: no route"
    )
    with pytest.raises(ValueError, match=pattern):
        Checkpoint.open("org/name")


def test_a_hub_id_without_huggingface_hub_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ValueError, match=r"'org/name'.*needs huggingface_hub: pip install '\.\[hub\]' in"
    ):
        Checkpoint.open("org/name")


def test_the_real_hub_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"no checkpoint 'org/name'.*huggingface_hub could not"):
        Checkpoint.open("org/name")


# Reading configs.


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 9}, (3, 9)),
        ({"eos_token_id": [3, 9]}, {"eos_token_id": 9}, (3, 9)),
        ({"eos_token_id": []}, {"eos_token_id": 9}, (9,)),
        ({"eos_token_id": [5, 3, 5]}, {}, (5, 3)),
        ({}, {"eos_token_id": [9, 0]}, (9, 0)),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (9,)),
        ({"eos_token_id": -1}, {"eos_token_id": 9}, (9,)),
        ({"eos_token_id": -1}, {"eos_token_id": [-1]}, ()),
        ({"eos_token_id": [4, -1, 2**31 - 1]}, {}, (4, 2**31 - 1)),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": 4}}, (4,)),
        ({}, {"text_config": None}, ()),
        ({}, {}, ()),
    ],
)
def test_eos_token_ids(
    single: Path, generation_config: object, config: object, expected: tuple[int, ...]
) -> None:
    write_json(single / "generation_config.json", generation_config)
    write_json(single / "config.json", config)
    assert eos_token_ids(Checkpoint.open(single)) == expected


@pytest.mark.parametrize("value", ["</s>", -2, 2**31, 10**400, True, [1, "2"], [[1]], {}, 1.5])
def test_wrong_eos_token_ids_are_named(single: Path, value: object) -> None:
    write_json(single / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(ValueError, match=r"generation_config.json has eos_token_id=.*token ids"):
        eos_token_ids(Checkpoint.open(single))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"dtype": "auto"}, torch.float32),
        ({"dtype": "auto", "torch_dtype": "bfloat16"}, torch.float32),
        ({"dtype": 5}, torch.float32),
        ({"dtype": {"": "bfloat16"}}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_stored_dtype(tmp_path: Path, config: object, expected: torch.dtype) -> None:
    write_json(tmp_path / "config.json", config)
    # What is no weight has no say.
    masks = {"a": torch.ones(2, dtype=torch.bool), "b": torch.ones(2, dtype=torch.float64)}
    save_file(masks | {"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert stored_dtype(Checkpoint.open(tmp_path)) is expected


def test_a_checkpoint_without_weights_has_no_dtype(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    save_file({"w": torch.ones(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has no weight in one of F32, F16, BF16"):
        stored_dtype(Checkpoint.open(tmp_path))


# Models saved alone.


def test_two_tensors_that_would_be_one_are_named(tmp_path: Path) -> None:
    prefixes = ("backbone.", "model.language_model.")
    tensors = {f"{prefix}norm.weight": torch.ones(2) for prefix in prefixes}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    message = (
        r"two tensors that are model\.norm\.weight of the language model: "
        r"backbone\.norm\.weight and model\.language_model\.norm\.weight"
    )
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(tmp_path)


def test_tensors_of_a_base_model_have_the_names_of_the_whole_one(tmp_path: Path) -> None:
    names = ["embed_tokens.weight", "layers.0.a", "norm.weight", "lm_head.weight", "normal"]
    tensors = {name: torch.full((2,), float(index)) for index, name in enumerate(names)}
    # Where both are there, each is its own.
    both = {"layers.1.a": torch.ones(2), "model.layers.1.a": torch.zeros(2)}
    write_json(tmp_path / "config.json", {})
    save_file(tensors | both, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    whole = {f"model.{name}": tensors[name] for name in names[:3]}
    whole |= {name: tensors[name] for name in names[3:]} | both
    assert checkpoint.tensors.keys() == whole.keys()
    loaded = {name: torch.empty(2) for name in whole}
    assert checkpoint.load(loaded) == []
    for name, tensor in whole.items():
        assert torch.equal(loaded[name], tensor), name


def test_weights_are_compared_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphengine.models.checkpoints.checkpoint._COPY_BYTES", 40)
    one = torch.randn(6, 4)
    last = one.clone()
    last[5, 3] += 1
    write_json(tmp_path / "config.json", {})
    tensors = {"one": one, "same": one.clone(), "last": last, "wide": one.reshape(4, 6).clone()}
    save_file(tensors | {"half": one.half()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    equal = [name for name in checkpoint.tensors if checkpoint.have_equal_values("one", name)]
    assert sorted(equal) == ["one", "same"]


def test_tensors_are_mapped_as_they_are_stored(tmp_path: Path) -> None:
    """From files in turn, in dtypes that `load` does not read."""
    (tmp_path / "config.json").write_text("{}")
    files = [
        {
            "a.weight": torch.arange(6).view(2, 3).to(torch.float8_e4m3fn),
            "a.g_idx": torch.arange(3),
        },
        {"a.scale": torch.ones(2), "b.weight": torch.zeros(4, dtype=torch.uint8)},
        {"b.scale": torch.ones(4).bfloat16()},
    ]
    for number, tensors in enumerate(files):
        save_file(tensors, tmp_path / f"{number}.safetensors")
    places = {name: f"{number}.safetensors" for number, each in enumerate(files) for name in each}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    mapped = Checkpoint.open(tmp_path).mapped()
    assert mapped.keys() == places.keys()
    for names in (sorted(places), sorted(places, reverse=True)):
        held = {name: mapped[name] for name in names}
        for tensors in files:
            for name, tensor in tensors.items():
                assert held[name].dtype == tensor.dtype
                assert torch.equal(held[name].float(), tensor.float())
    with pytest.raises(KeyError):
        mapped["c.weight"]


def test_a_mapped_file_that_was_replaced_is_found(single: Path) -> None:
    mapped = Checkpoint.open(single).mapped()
    save_file({"a.weight": torch.zeros(6, 4)}, single / "model.safetensors")
    with pytest.raises(ValueError, match=r"has changed since it was opened: tensor a.weight"):
        mapped["b.weight"]


def test_a_base_models_tensors_are_mapped_by_their_whole_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"layers.0.a.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert torch.equal(Checkpoint.open(tmp_path).mapped()["model.layers.0.a.weight"], torch.ones(3))


# Parts of tensors.


@pytest.mark.parametrize(("axis", "start", "length"), [(0, 1, 2), (1, 4, 2), (1, 0, 6)])
def test_a_part_of_a_tensor_is_read(sharded: Path, axis: int, start: int, length: int) -> None:
    whole = small_tensors()["a.weight"]
    part = whole.narrow(axis, start, length)
    checkpoint = Checkpoint.open(sharded).cut(
        {"a.weight": TensorSlice(axis, ((start, length),), whole.shape[axis])}
    )
    read, other = torch.empty(part.shape), torch.empty(8)
    noted: list[tuple[int, int]] = []
    unused = checkpoint.load({"a.weight": read, "b.weight": other}, lambda *at: noted.append(at))
    assert torch.equal(read, part) and unused == ["c.weight", "scale"]
    assert torch.equal(other, small_tensors()["b.weight"].float())
    # What is left out is not counted.
    assert noted[-1] == (part.numel() * 4 + 16,) * 2
    assert torch.equal(checkpoint.mapped()["a.weight"], part)
    assert checkpoint.tensors["a.weight"].stored == Checkpoint.open(sharded).tensors["a.weight"]


def test_a_part_of_a_tensor_that_has_changed_is_an_error(single: Path) -> None:
    checkpoint = Checkpoint.open(single).cut({"a.weight": TensorSlice(0, ((2, 2),), 4)})
    save_file({"a.weight": torch.zeros(2, 6)}, single / "model.safetensors")
    with pytest.raises(ValueError, match=r"has changed since it was opened: tensor a\.weight"):
        checkpoint.load({"a.weight": torch.empty(2, 6)})
