"""Checkpoints in the layouts that transformers reads, and tensors that nobody here understands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from engines.small_engine import greedy, open_engine
from graphengine.demo import checkpoint_path
from graphengine.drafters.mtp.reading import read_mtp_config
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, read_eos_ids, read_model
from graphengine.models.contract import ModelConfig
from graphengine.models.quantised.writer import write_quantised
from graphengine.speculative import DraftModel, SaveHiddenStates

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def llama_config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128,
    }
    return LlamaConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with tied embeddings."""
    torch.manual_seed(1)
    path: Path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(llama_config(initializer_range=0.3)).save_pretrained(path)
    return path


def changed(source: Path, folder: Path, edit: Edit) -> Path:
    """A copy of a checkpoint whose config and tensors `edit` has changed."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The model as the engine reads it, by transformers' names."""
    checkpoint = Checkpoint.open(path)
    config = read_model(checkpoint)
    weights = config.allocate(device="cpu", dtype=torch.float32)
    for tensor in weights.tensors():
        tensor.fill_(torch.nan)
    checkpoint.load(destinations(checkpoint, weights))
    return config, weights.named() | {HEAD: weights.lm_head}


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


def without_prefix(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    rename(tensors, "model.", "")


def only_the_head(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def equal_head(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def other_head(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous()


def buffers(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    prefix = "model.layers.1.self_attn."
    tensors[f"{prefix}rotary_emb.inv_freq"] = torch.ones(32, dtype=torch.float64)
    tensors[f"{prefix}masked_bias"] = torch.tensor(-1e4)
    tensors[f"{prefix}bias"] = torch.ones(4, 4, dtype=torch.bool)
    tensors["position_ids"] = torch.arange(4, dtype=torch.int32)


def no_architecture(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del config["architectures"]


LAYOUTS: dict[str, tuple[Edit, bool]] = {
    "as saved": (lambda config, tensors: None, True),
    "without prefix": (without_prefix, True),
    "head alone": (only_the_head, True),
    "equal head": (equal_head, True),
    "another head": (other_head, False),
    "buffers": (buffers, True),
    "no architecture": (no_architecture, True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_as_transformers_reads_it(
    source: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit, tied = LAYOUTS[name]
    path = changed(source, tmp_path, edit)
    config, weights = loaded(path)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    assert weights.keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        assert torch.equal(weights[tensor_name], tensor), tensor_name
    assert config.tie_embeddings is tied
    assert (f"{HEAD} differs from {EMBEDDING}: both are used" in caplog.text) is not tied


def test_a_base_model_says_what_transformers_says(tmp_path: Path) -> None:
    """Through the engine: a `LlamaModel` saved alone, whose head is its embedding."""
    torch.manual_seed(2)
    LlamaModel(llama_config(initializer_range=0.3)).save_pretrained(tmp_path)
    assert "layers.0.input_layernorm.weight" in load_file(tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = [3, 1, 4, 1, 5]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with open_engine(tmp_path, device="cpu", max_batch=1, dtype="auto") as engine:
        assert engine.memory.dtype == torch.float32
        result = engine.generate(prompt, greedy(6, ignore_eos=True))
    assert list(result.token_ids) == expected[0, len(prompt) :].tolist()


def test_an_untied_model_without_its_head_is_refused(source: Path, tmp_path: Path) -> None:
    """transformers draws a random one."""
    path = changed(source, tmp_path, lambda config, _: config.update(tie_word_embeddings=False))
    with pytest.raises(ValueError, match=r"lacks 1 of \d+ tensors: lm_head\.weight$"):
        read_model(Checkpoint.open(path))


def test_a_head_of_another_shape_is_named(source: Path, tmp_path: Path) -> None:
    path = changed(source, tmp_path, lambda _, tensors: tensors.update({HEAD: torch.ones(50, 64)}))
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \[50, 64\], not \[48, 64\]"):
        read_model(Checkpoint.open(path))


def test_an_adapter_beside_the_weights_is_told(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(source, tmp_path, lambda config, tensors: None)
    read_model(Checkpoint.open(path))
    assert "adapter" not in caplog.text
    (path / "adapter_config.json").write_text("{}")
    read_model(Checkpoint.open(path))
    assert "has adapter_config.json beside its weights: they are used as they are" in caplog.text


def test_a_quantised_head_is_no_embedding(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is used, whatever the config says of embeddings that are tied."""
    for folder in ("plain", "tied"):
        (tmp_path / folder).mkdir()

    def untie(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        other_head(config, tensors)
        config["tie_word_embeddings"] = False

    plain = Checkpoint.open(changed(source, tmp_path / "plain", untie))
    write_quantised(plain, tmp_path / "untied", "int8", head=True)
    tied = changed(
        tmp_path / "untied",
        tmp_path / "tied",
        lambda config, _: config.update(tie_word_embeddings=True),
    )
    said = []
    for path in (tmp_path / "untied", tied):
        config = read_model(Checkpoint.open(path))
        assert not config.tie_embeddings and "lm_head" in config.forms
        with open_engine(path, device="cpu", max_batch=1, dtype="float32") as engine:
            said.append(engine.generate([3, 1, 4], greedy(6, ignore_eos=True)).token_ids)
    assert said[0] == said[1]
    message = "tie_word_embeddings=true, but lm_head.weight_scale is stored: lm_head is not model."
    assert caplog.text.count(message) == 2


# Tensors that change the arithmetic.

LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            f"{LAYER}mlp.up_proj.weight_scale_inv",
            torch.ones(1),
            "quantised weights, and its configs say nothing of quantised weights",
        ),
        (f"{LAYER}mlp.up_proj.qweight", torch.ones(2, dtype=torch.int32), "quantised weights"),
        (f"{LAYER}mlp.up_proj.g_idx", torch.ones(2, dtype=torch.int32), "quantised weights"),
        ("lm_head.weight_scale", torch.ones(()), "quantised weights"),
        (f"{LAYER}self_attn.sinks", torch.ones(1), "that a LlamaForCausalLM of this config does"),
        (f"{LAYER}mlp.experts.0.up_proj.weight", torch.ones(2, 2), "of this config does not have"),
        (f"{LAYER}self_attn.q_proj.bias", torch.ones(64), "of this config does not have"),
        (f"{LAYER}mlp.extra", torch.ones(2, dtype=torch.int8), "of this config does not have"),
        ("model.norm.bias", torch.ones(64), "of this config does not have"),
        ("foo", torch.ones(1), "of this config does not have"),
        ("foo.bar", torch.ones(1, dtype=torch.int64), "of this config does not have"),
        ("model.embed_positions.weight", torch.ones(2, 2), "of this config does not have"),
        ("model.visuals.weight", torch.ones(2, 2), "of this config does not have"),
        ("model.layers.2.norm.weight", torch.ones(2), "does not have, with num_hidden_layers=2"),
        ("model.layers.1.eh_proj.weight", torch.ones(2), "of this config does not have"),
    ],
)
def test_a_tensor_that_nobody_reads_is_refused(
    source: Path, tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    path = changed(source, tmp_path, lambda _, tensors: tensors.update({name: tensor}))
    with pytest.raises(ValueError, match=f"has 1 tensors .*{message}.*: {name}$"):
        read_model(Checkpoint.open(path))


def test_weights_of_another_dtype_are_named(source: Path, tmp_path: Path) -> None:
    name = f"{LAYER}mlp.up_proj.weight"
    eighth = torch.ones(40, 64).to(torch.float8_e4m3fn)
    path = changed(source, tmp_path, lambda _, tensors: tensors.update({name: eighth}))
    message = rf"1 weights of another dtype than F32, F16, BF16: {name} in F8_E4M3$"
    with pytest.raises(ValueError, match=message):
        read_model(Checkpoint.open(path))


def test_what_stands_beside_the_layers_is_no_obstacle(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["scale_sinks"] = 2
        tensors["mtp.fc.weight_scale_inv"] = torch.ones(1)
        beside = ("medusa.0.weight", "visual.merger.weight", "model.vision_tower.x", "v_head.bias")
        buffers = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")
        for name in (*beside, *buffers, "model.layers.0.self_attn.k_scale"):
            tensors[name] = torch.ones(1)
        tensors["d2t"] = torch.zeros(1, dtype=torch.int64)
        # A draft module, as DeepSeek has it.
        for name in ("eh_proj.weight", "mlp.up_proj.weight_scale_inv"):
            tensors[f"model.layers.2.{name}"] = torch.ones(1)

    config = read_model(Checkpoint.open(changed(source, tmp_path, edit)))
    assert config.num_layers == 2
    assert "config.json has unknown keys: scale_sinks" in caplog.text


def test_layers_that_a_config_leaves_out_are_named(source: Path, tmp_path: Path) -> None:
    path = changed(source, tmp_path, lambda config, _: config.update(num_hidden_layers=1))
    message = r"has 9 tensors .* does not have, with num_hidden_layers=1: model\.layers\.1\."
    with pytest.raises(ValueError, match=message):
        read_model(Checkpoint.open(path))


# Sizes that are refused before anything of them is allocated.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be"),
        ({"num_hidden_layers": 1000}, r"lacks \d+ of \d+ tensors: model\.layers\.2\."),
        ({"vocab_size": 10**18}, "vocab_size=10{18}: must be"),
        ({"vocab_size": 2**31 - 1}, r"has shape \[48, 64\], not \[2147483647, 64\]"),
    ],
)
def test_a_size_that_no_model_has_is_refused_at_once(
    source: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = changed(source, tmp_path, lambda config, _: config.update(changes))
    with pytest.raises(ValueError, match=message):
        open_engine(path, device="cpu")


# Drafters read checkpoints too.


def test_a_draft_models_config_is_read_like_a_targets(edited: Callable[..., Path]) -> None:
    demo = checkpoint_path()
    path = edited(demo, config={"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(
        ValueError, match=r"config\.json has quantization_config\.bits=None: supported: 4, 8"
    ):
        open_engine(demo, device="cpu", speculative=DraftModel(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0: supported: null or 0"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers=True: must be an integer"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True: supported"),
        ({"mtp_hidden_states_first": True}, "mtp_hidden_states_first=True: supported: False in"),
        ({"mtp_layer_types": ["sliding_attention"]}, "mtp_layer_types=.*'full_attention' in every"),
    ],
)
def test_keys_of_draft_modules_are_read(
    edited: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    path = edited(checkpoint_path(), config=changes)
    with pytest.raises(ValueError, match=f"config.json has {message}"):
        read_mtp_config(Checkpoint.open(path))


@pytest.mark.parametrize("mode", [DraftModel("~no-such-user/x"), SaveHiddenStates("~no-such-user")])
def test_a_drafters_path_of_no_user_is_named(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"path '~no-such-user(/x)?': .*home directory"):
        open_engine(checkpoint_path(), device="cpu", speculative=mode)


# Ends of sequences.


def test_ids_that_are_never_said_are_left_out(
    edited: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    for told, expected in ((-1, ()), ([5, 4096, -1, 2**31 - 1], (5,)), ([5, 0], (5, 0))):
        path = edited(
            checkpoint_path(),
            generation_config={"eos_token_id": told},
            config={"eos_token_id": None},
        )
        checkpoint = Checkpoint.open(path)
        model = read_model(checkpoint)
        assert read_eos_ids(checkpoint, model) == expected
        assert read_eos_ids(checkpoint, model, 4096) == expected
        assert {*read_eos_ids(checkpoint, model, 0)} == {*expected, 0}
    assert "end-of-sequence ids [4096, 2147483647] are left out" in caplog.text
    assert "4096 tokens" in caplog.text


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (2**31, r"eos_token_id=2147483648: must be token ids, integers in \[0, 2147483647\]"),
        (list(range(17)), "17 end-of-sequence ids, .*max_stop_ids=16 .*max_stop_ids=17 holds them"),
    ],
)
def test_ends_that_no_request_can_have_are_refused_at_opening(
    edited: Callable[..., Path], told: Any, message: str
) -> None:
    path = edited(checkpoint_path(), generation_config={"eos_token_id": told})
    with pytest.raises(ValueError, match=message):
        open_engine(path, device="cpu")
