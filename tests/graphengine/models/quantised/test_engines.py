"""Engines over quantised checkpoints, against transformers' model of what their weights mean."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.compressed import config_of, weight_args
from checkpoints.mtp_modules import LAYOUTS, random_tensors
from checkpoints.mtp_modules import SIZES as MTP_SIZES
from checkpoints.quantised_models import (
    HEAD,
    KINDS,
    Kind,
    Tensors,
    Written,
    beside_a_tower,
    compressed_kind,
    gptq_kind,
    mixed_modelopt_kind,
    save,
    write_model,
)
from checkpoints.successors import continuation, write_successors
from graphengine import Engine, Result, SamplingParams
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.quantised.rounding import quantise
from graphengine.models.quantised.writer import compressed_tensors
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.speculative import MTP, DraftModel

Eager = Callable[[Engine], dict[tuple[int, int], Tensor]]

TOLERANCE = 1e-4
"""Tolerance of float32 logits, relative to a token's largest."""
# The long prompt is prefilled in two chunks.
PROMPTS = ([5, 3, 80], [*range(1, 72, 3)])


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 1, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16)}
    return Engine.from_pretrained(path, **(sizes | {"device": "cpu", "dtype": "float32"} | options))


@torch.no_grad()
def expected_logits(written: Written, result: Result, vocabulary: int | None = None) -> Tensor:
    """The logits from which each new token was chosen."""
    sequence = torch.tensor([[*result.prompt_token_ids, *result.token_ids]])
    logits: Tensor = written.model(sequence).logits[0, :, :vocabulary]
    return logits[len(result.prompt_token_ids) - 1 : -1]


def assert_greedy(written: Written, result: Result, vocabulary: int | None = None) -> None:
    """Each token is the best, or as good as the best within the tolerance of both logits."""
    logits = expected_logits(written, result, vocabulary)
    chosen = logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    lost = (logits.amax(1) - chosen) / logits.abs().amax(1)
    assert lost.max() <= 2 * TOLERANCE, f"{lost=}"
    assert len(set(result.token_ids)) > len(result.token_ids) // 8, "logits do not spread"


def assert_parity(
    written: Written, eager: Eager, tokens: int, vocabulary: int | None = None, **options: Any
) -> None:
    """Logits and greedy tokens, of a prompt of one chunk and of one of two."""
    with open_engine(written.path, **options) as engine:
        seen = eager(engine)
        for prompt, count in zip(PROMPTS, (tokens, 1), strict=True):
            seen.clear()
            result = engine.generate(list(prompt), greedy(count))
            assert len(result.token_ids) == count
            assert_greedy(written, result, vocabulary)
            logits = expected_logits(written, result, vocabulary)
            for step, row in enumerate(logits):
                found = seen[0, len(prompt) - 1 + step]
                error = (found - row).abs().max() / row.abs().max()
                assert error <= TOLERANCE, f"{step=} of {len(prompt)=}: {error=}"


def packed(engine: Engine) -> dict[str, WeightFormat]:
    """Formats of the packed weights, by the name of the first linear of each."""
    linears = engine.model.weights.linears()
    return {
        each.parts[0][0]: each.weight.format
        for each in linears
        if isinstance(each.weight, PackedWeight)
    }


# Checkpoints as people have them.


def ignore(*names: str, key: str = "ignore") -> Callable[[dict[str, Any], Tensors], None]:
    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        config["quantization_config"][key] = list(names)

    return edit


def first_layer_alone(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization_config"]["dynamic"] = {r"-:.*\.layers\.1\..*": {}}


def tie(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def add_biases_of_zeros(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith(".qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1]).half()


WITH_HEAD = {"lm_head": True}
ODD = {"hidden_size": 72, "intermediate_size": 104}
NVFP4 = compressed_kind(
    "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
)
GPTQ = gptq_kind(32)
CHECKPOINTS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "three files": (KINDS["packed int4 of 64 zeros"], {"files": 3}),
    "nf4 in three files, odd": (
        KINDS["bitsandbytes nested nf4"], {"files": 3, "hidden_size": 70, "intermediate_size": 99},
    ),
    "a layer in bf16": (
        KINDS["fp8 blocks"],
        {"plain": ("layers.1.", HEAD),
         "edit": ignore("model.layers.1", key="modules_to_not_convert")},
    ),
    "an ignored layer": (
        KINDS["int-quantized channel"],
        {"plain": ("layers.0.", HEAD), "edit": ignore("lm_head", r"re:.*\.layers\.0\..*")},
    ),
    "a layer that is left out": (
        GPTQ, {"plain": ("layers.1.", HEAD), "edit": first_layer_alone, "files": 2},
    ),
    "ignored projections": (
        KINDS["packed int8 of 32"],
        {"plain": ("down_proj", "o_proj", HEAD), "edit": ignore("lm_head", "re:.*(down|o)_proj")},
    ),
    "a head of int8": (KINDS["int-quantized channel"], {"plain": (), "edit": ignore()}),
    "a head of int4": (KINDS["packed int4 of 128 zeros"], {"plain": (), "edit": ignore()}),
    "a head of NVFP4": (NVFP4, {"plain": (), "edit": ignore()}),
    "a head of GPTQ": (
        Kind(gptq_kind(32, desc_act=True).config | WITH_HEAD, gptq_kind(32, desc_act=True).store),
        {"plain": (), "vocab_size": 96},
    ),
    "tied": (KINDS["float-quantized channel"], {"edit": tie, "tie_word_embeddings": True}),
    "tied Qwen3": (
        KINDS["awq of 32"], {"edit": tie, "tie_word_embeddings": True, "family": "qwen3"},
    ),
    "odd rows and columns": (
        KINDS["int-quantized zeros"], {"hidden_size": 70, "intermediate_size": 99},
    ),
    "odd rows and columns of int4": (KINDS["packed int4 channel"], ODD),
    "blocks that end early": (
        KINDS["fp8 blocks"], {"hidden_size": 200, "intermediate_size": 136},
    ),
    "groups that end early": (GPTQ, ODD),
    "biases": (
        KINDS["float-quantized tensor"], {"attention_bias": True, "mlp_bias": True},
    ),
    "biases of zeros": (GPTQ, {"edit": add_biases_of_zeros}),
}  # fmt: skip


# One of each layout has 24 tokens.
LONG = ("fp8 blocks", "packed int4 of 128 zeros", "gptq desc_act", "awq of 32", "modelopt NVFP4")
FAMILY = dict(zip(KINDS, itertools.cycle(("llama", "qwen3")), strict=False))


# The others are those of `CHECKPOINTS`.
ALONE = [name for name in KINDS if KINDS[name] not in [kind for kind, _ in CHECKPOINTS.values()]]


@pytest.mark.parametrize("name", dict.fromkeys((*LONG, *ALONE)))
def test_logits_and_greedy_tokens(tmp_path: Path, eager: Eager, name: str) -> None:
    written = write_model(tmp_path, KINDS[name], family=FAMILY[name])
    assert_parity(written, eager, 24 if name in LONG else 4)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_as_people_have_them(tmp_path: Path, eager: Eager, name: str) -> None:
    kind, options = CHECKPOINTS[name]
    assert_parity(write_model(tmp_path, kind, **options), eager, 4)


def test_a_config_of_modelopts_own_file(tmp_path: Path, eager: Eager) -> None:
    def move(config: dict[str, Any], tensors: Tensors) -> None:
        said = config.pop("quantization_config")
        file = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": said["ignore"]}
        quantization = json.dumps({"producer": {"name": "modelopt"}, "quantization": file})
        (tmp_path / "hf_quant_config.json").write_text(quantization)

    assert_parity(write_model(tmp_path, KINDS["modelopt NVFP4"], edit=move), eager, 4)


# Qwen's own FP8 checkpoints list what is not quantised so, layer by layer.
DELTA = "layers.0.linear_attn"
LEFT_OUT = [f"model.language_model.{DELTA}.{name}" for name in ("conv1d", "in_proj_b", "in_proj_a")]
MIXED = {
    "in_proj_qkv": "MXFP8", "in_proj_z": "FP8", "in_proj_b": "MXFP8", "in_proj_a": "MXFP8",
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "out_proj"), "W4A16_NVFP4"),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "FP8"),
}  # fmt: skip
SKIPPED = {"modules_to_not_convert": [*LEFT_OUT, "model.visual", HEAD]}
HYBRIDS: dict[str, tuple[Kind, dict[str, Any], list[str]]] = {
    "fp8 blocks": (
        Kind(KINDS["fp8 blocks"].config | SKIPPED, KINDS["fp8 blocks"].store),
        {"plain": (HEAD, f"{DELTA}.in_proj_b", f"{DELTA}.in_proj_a"), "num_hidden_layers": 3,
         # RoPE's part of a head goes elsewhere among its rows, past those that share a scale.
         "head_dim": 256,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        # The other gated delta net is in one format.
        ["qkv z", "b a", "qkv z b a"],
    ),
    "formats of ModelOpt": (mixed_modelopt_kind(MIXED), {}, ["qkv", "z", "b a"]),
}  # fmt: skip


@pytest.mark.skipif(not hasattr(transformers, "Qwen3_5ForCausalLM"), reason="an older transformers")
@pytest.mark.parametrize("name", HYBRIDS)
def test_gated_delta_nets_in_several_formats(tmp_path: Path, eager: Eager, name: str) -> None:
    """Under the names that a language model has beside a vision tower."""
    kind, options, products = HYBRIDS[name]
    written = write_model(tmp_path, kind, family="qwen3.5", edit=beside_a_tower, **options)
    assert_parity(written, eager, 12)
    weights = read_model(Checkpoint.open(tmp_path)).allocate(device="meta", dtype=torch.float32)
    names = [[part for part, _ in each.parts] for each in weights.linears()]
    found = [" ".join(part.partition("in_proj_")[2] for part in parts) for parts in names]
    assert [parts for parts in found if parts.strip()] == products


def test_what_is_ignored_is_not_packed(tmp_path: Path) -> None:
    kind, options = CHECKPOINTS["an ignored layer"]
    with open_engine(write_model(tmp_path, kind, **options).path) as engine:
        assert len(packed(engine)) == 4
        assert all(name.startswith("model.layers.1.") for name in packed(engine))


@pytest.mark.parametrize("name", ["a head of int4", "a head of NVFP4", "fp8 blocks"])
def test_logits_end_with_the_tokenizers_vocabulary(tmp_path: Path, eager: Eager, name: str) -> None:
    kind, options = CHECKPOINTS.get(name, (KINDS.get(name, NVFP4), {}))
    written = write_model(tmp_path, kind, **options)
    vocabulary = {f"w{index}": index for index in range(83)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert_parity(written, eager, 4, vocabulary=83)


# Draft modules and draft models.

INT8 = WeightFormat("int8", 1, 0)


def rounded(
    source: Path, out: Path, *, plain: tuple[str, ...] = (HEAD,), more: Mapping[str, Tensor] = {}
) -> Path:
    """A checkpoint like `source` whose matrices, but these and the embedding, are in int8.

    more  tensors that are added
    """
    config = json.loads((source / "config.json").read_text())
    quantization = config_of("pack-quantized", weight_args({"strategy": "channel"}))
    ignored, tensors = [], dict(more)
    for name, value in load_file(source / "model.safetensors").items():
        linear, _, end = name.rpartition(".")
        matrix = end == "weight" and value.dim() == 2 and "embed_tokens" not in name
        if matrix and not any(part in name for part in plain):
            stored = compressed_tensors(quantise(value, INT8))
            tensors |= {f"{linear}.{each}": tensor for each, tensor in stored.items()}
            continue
        ignored += [linear] * matrix
        tensors[name] = value
    config["quantization_config"] = quantization | {"ignore": ignored}
    save(out, config, tensors)
    return out


SUCCESSORS = [9, 8, 30]
OF_DRAFTS = {"row_family": "dot", "max_batch": 2}


@pytest.fixture(scope="module")
def successors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose modules know the next token, in 32 bits."""
    return write_successors(tmp_path_factory.mktemp("successors"), "token", modules=2)


@pytest.mark.parametrize(
    ("style", "plain"),
    [
        ("eagle", (HEAD,)),
        ("vanilla", (HEAD, "mtp_layers")),
        ("eagle", ("mtp_layers",)),
        ("vanilla", ()),
    ],
)
def test_modules_draft_what_is_accepted(
    successors: Path, tmp_path: Path, style: Any, plain: tuple[str, ...]
) -> None:
    """With modules that are quantised, and ones that are not, beside either kind of lm_head."""
    path = rounded(successors, tmp_path, plain=plain)
    with open_engine(path, speculative=MTP(2, style=style), **OF_DRAFTS) as engine:
        result = engine.generate(SUCCESSORS, greedy(24))
        assert list(result.token_ids) == continuation(SUCCESSORS[-1], 24)
        assert result.acceptance.proposed == result.acceptance.accepted > 12
        of_modules = engine.runtime.program.drafter.linears()
        are_packed = {isinstance(each.weight, PackedWeight) for each in of_modules}
        assert are_packed == {"mtp_layers" not in plain}


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_modules_change_no_token(tmp_path: Path, name: str) -> None:
    """Nor does it matter that a config is silent about modules which are stored in 32 bits."""
    layout = LAYOUTS[name]
    save(tmp_path / "in", MTP_SIZES | layout.config, random_tensors(layout))
    path = rounded(tmp_path / "in", tmp_path / "out", plain=(HEAD, *layout.prefixes))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"] = [HEAD]
    (path / "config.json").write_text(json.dumps(config))
    # Both have the same target.
    both = rounded(tmp_path / "in", tmp_path / "both")
    said = []
    for folder, mode in ((path, None), (path, MTP(2)), (both, MTP(3))):
        with open_engine(folder, speculative=mode, **OF_DRAFTS) as engine:
            results = engine.generate([[1, 2, 3, 4, 5], [7] * 11], greedy(6))
            said.append([result.token_ids for result in results])
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("plain", [(HEAD,), ()])
def test_drafts_of_a_part_of_the_vocabulary(
    successors: Path, tmp_path: Path, plain: tuple[str, ...]
) -> None:
    """Only what continues the first half of the prompt can be drafted."""
    ids = torch.tensor([0, 2, *range(24, 32), 61])
    path = rounded(successors, tmp_path, plain=plain, more={"d2t": ids - torch.arange(len(ids))})
    mode = MTP(2, draft_vocab=DraftVocabulary(tensor="d2t"))
    with open_engine(path, speculative=mode, **OF_DRAFTS) as engine:
        inside, outside = engine.generate([[30], [40]], greedy(16))
        assert list(inside.token_ids) == continuation(30, 16)
        assert list(outside.token_ids) == continuation(40, 16)
        assert inside.acceptance.proposed == inside.acceptance.accepted > 8
        assert outside.acceptance.accepted == 0 < outside.acceptance.proposed


@pytest.mark.parametrize("which", ["draft", "target"])
def test_a_draft_model_may_be_quantised(tmp_path: Path, which: str) -> None:
    """The other one is what it means, so that they agree."""
    stored = write_model(tmp_path / "packed", KINDS["packed int4 of 32"])
    meant = plain_copy(stored, tmp_path / "plain")
    target, draft = {
        "draft": (meant, stored.path),
        "target": (stored.path, meant),
    }[which]
    with open_engine(target, speculative=DraftModel(draft, 2), **OF_DRAFTS) as engine:
        result = engine.generate(list(PROMPTS[0]), greedy(16))
        assert_greedy(stored, result)
        assert result.acceptance.proposed == result.acceptance.accepted > 8


def plain_copy(written: Written, folder: Path) -> Path:
    """A copy of the model in 32 bits."""
    config = json.loads((written.path / "config.json").read_text())
    del config["quantization_config"]
    state = {name: value.clone() for name, value in written.model.state_dict().items()}
    save(folder, config, state)
    return folder


# Pauses, prefixes, sessions.


def test_pauses_prefixes_and_sessions(tmp_path: Path) -> None:
    written = write_model(tmp_path / "m", KINDS["gptq desc_act"])
    prompts = [[index, *range(20, 37)] for index in (1, 2, 3)]
    shared = [*range(20, 37)]
    options = {"max_batch": 3, "kv_blocks": 14, "swap_blocks": 30, "prefix_caching": True}
    with open_engine(written.path, **options) as engine:
        results = engine.generate(prompts, greedy(24))
        assert engine.counters["pauses"] and engine.counters["resumes"]
        for result in results:
            assert_greedy(written, result)
        for _ in range(2):
            assert_greedy(written, engine.generate(shared, greedy(4)))
        assert engine.counters["prefix/hit_tokens"] == 16
        with engine.session() as session:
            session.append(list(PROMPTS[1]))
            session.generate(greedy(5))
            session.snapshot(tmp_path / "session")
            session.append([1, 5])
            second = session.generate(greedy(5))
            assert second.cached_tokens == 24
            assert_greedy(written, second)
    with (
        open_engine(written.path, **options) as engine,
        engine.restore_session(tmp_path / "session") as session,
    ):
        session.append([1, 5])
        assert session.generate(greedy(5)).token_ids == second.token_ids
