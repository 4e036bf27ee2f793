"""EAGLE3 checkpoints: what is read of them as they are published, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.eagle3_heads import (
    PREFIX,
    Shape,
    Tensors,
    as_speculators,
    head_config,
    head_tensors,
    shuffled,
    write_head,
)
from graphengine import EngineConfig
from graphengine.drafters import make_drafter
from graphengine.drafters.eagle3.reading import Eagle3Checkpoint, read_eagle3
from graphengine.drafters.modules.chain import EagleDrafter
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.families.registry import read_model_config
from graphengine.speculative import Eagle3

VOCAB, HIDDEN, LAYERS = 97, 72, 8
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": 56, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
IDS = "eagle_aux_hidden_state_layer_ids"


def tensors_of(shape: Shape) -> Tensors:
    return head_tensors(shape, EMBEDDING, EMBEDDING)


def config_of(shape: Shape, **changes: Any) -> dict[str, Any]:
    return head_config(shape, EMBEDDING) | changes


def read(
    folder: Path,
    config: dict[str, Any],
    tensors: Tensors,
    layers: tuple[int, ...] | None = None,
    **target: Any,
) -> Eagle3Checkpoint:
    checkpoint = Checkpoint.open(write_head(folder, config, tensors))
    return read_eagle3(checkpoint, read_model_config(TARGET | target), layers)


# What is read.


@pytest.mark.parametrize("prefix", [PREFIX, "layers.0.", "model.layers.0.", "model.midlayer."])
def test_names_of_the_layer(tmp_path: Path, prefix: str) -> None:
    """Checkpoints have them with and without "model."; the other tensors too."""
    shape = Shape(narrower=50, bias=True)
    tensors = tensors_of(shape)
    if prefix.startswith("model."):
        beside = {"lm_head.weight", "d2t", "t2d"}
        tensors = {
            name if name in beside or name.startswith(PREFIX) else f"model.{name}": tensor
            for name, tensor in tensors.items()
        }
    tensors = {name.replace(PREFIX, prefix): tensor for name, tensor in tensors.items()}
    config = read(tmp_path, config_of(shape), tensors).config
    assert config.fc_bias and config.embedding_rows == VOCAB and config.hidden_size == 50
    assert config.streams_width == 3 * HIDDEN and config.attention.fed_size == 100


def test_a_draft_vocabulary_in_any_order(tmp_path: Path) -> None:
    shape, ids = Shape(drafted=40), shuffled(40, VOCAB)
    found = read(tmp_path, config_of(shape), tensors_of(shape))
    assert found.token_ids is not None and found.order is not None
    assert torch.equal(found.token_ids, ids.sort().values)
    assert torch.equal(ids[found.order], found.token_ids)
    ascending = tensors_of(shape) | {"d2t": ids.sort().values - torch.arange(40)}
    found = read(tmp_path / "ascending", config_of(shape), ascending)
    assert found.order is None
    found = read(tmp_path / "whole", config_of(Shape(drafted=0)), tensors_of(Shape(drafted=0)))
    assert found.token_ids is None and found.order is None


@pytest.mark.parametrize(
    ("ids", "given", "layers"),
    [
        (None, None, (1, 3, 4)),
        # The first layer's number is the lowest: ids are of layers.
        ([1, 3, 6], None, (1, 3, 6)),
        # Else they count the embedding.
        ([2, 4, 8], None, (1, 3, 7)),
        ([5, 2, 3], None, (4, 1, 2)),
        ([2, 4, 8], (0, 1, 2), (0, 1, 2)),
    ],
)
def test_layers_of_the_target(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ids: Any, given: Any, layers: Any
) -> None:
    """Whether the ids are in `eagle_config` or beside it; those of `Eagle3` go before them."""
    shape = Shape()
    places: tuple[dict[str, Any], ...] = ({},)
    if ids is not None:
        places = ({IDS: ids}, {"eagle_config": {IDS: ids}})
    for index, place in enumerate(places):
        caplog.clear()
        with caplog.at_level("INFO", "graphengine"):
            found = read(tmp_path / str(index), config_of(shape) | place, tensors_of(shape), given)
        assert found.config.layers == layers
        assert f"after layers {', '.join(map(str, layers))}" in caplog.text


@pytest.mark.parametrize("told", [None, False, True])
def test_what_the_layer_adds_to(tmp_path: Path, told: bool | None) -> None:
    """Speculators' configs that do not say mean the normed state; others do not."""
    shape = Shape()
    config, tensors = config_of(shape), tensors_of(shape)
    if told is not None:
        config["norm_before_residual"] = told
    assert read(tmp_path / "a", config, tensors).config.normed_stream == bool(told)
    config, tensors = as_speculators(config, tensors)
    if told is None:
        del config["norm_before_residual"]
    expected = told in (None, True)
    assert read(tmp_path / "b", config, tensors).config.normed_stream == expected


def test_a_drafter_is_made_of_it(tmp_path: Path) -> None:
    shape = Shape()
    path = write_head(tmp_path / "head", config_of(shape), tensors_of(shape))
    target = Checkpoint.open(write_head(tmp_path / "target", TARGET, {"x": EMBEDDING}))
    config = EngineConfig(speculative=Eagle3(path, 4), device="cpu")
    drafter = make_drafter(config, target, read_model_config(TARGET))
    assert type(drafter) is EagleDrafter
    assert (drafter.length, drafter.needs.reserve, drafter.needs.tokens_after) == (4, 3, 1)
    assert drafter.needs.reads_streams and not drafter.needs.wants_hidden
    # The last layer's stream is that of all lanes only where they all go all the way.
    mode = Eagle3(path, 4, layers=(0, 3, 7))
    config = EngineConfig(speculative=mode, device="cpu")
    assert make_drafter(config, target, read_model_config(TARGET)).needs.wants_hidden


def test_rope_of_several_axes_is_that_of_one_for_text(tmp_path: Path) -> None:
    """Heads for Qwen's models with a vision tower have several axes."""
    shape = Shape()
    axes = {"mrope_section": [16, 24, 24], "mrope_interleaved": True}
    told = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0} | axes},
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    ]
    plain = read(tmp_path / "plain", config_of(shape), tensors_of(shape)).config
    for index, ropes in enumerate(told):
        config = config_of(shape, **ropes)
        found = read(tmp_path / f"{index}", config, tensors_of(shape)).config
        assert found == plain


# What is refused.

Change = Callable[[dict[str, Any], Tensors], None]


def without(name: str) -> Change:
    return lambda config, tensors: tensors.__delitem__(name)


def with_tensor(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.__setitem__(name, torch.zeros(shape))


def saying(**settings: Any) -> Change:
    return lambda config, tensors: config.update(settings)


def offset(draft: int, token: int) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["d2t"][draft] = token - draft

    return change


def marking(token: int) -> Change:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["t2d"][token] = ~tensors["t2d"][token]

    return change


ATTENTION = f"{PREFIX}self_attn."
WRONG: dict[str, tuple[Change, str]] = {
    "no fc": (without("fc.weight"), r"is no EAGLE3 checkpoint: it lacks fc.weight, and has d2t, "),
    "no norm": (without(f"{PREFIX}hidden_norm.weight"), r"lacks midlayer.hidden_norm.weight"),
    "no final norm": (without("norm.weight"), r"an EAGLE3 checkpoint that lacks norm.weight"),
    "no product": (without(f"{ATTENTION}o_proj.weight"), r"lacks midlayer.self_attn.o_proj.weight"),
    "fc of other layers": (
        with_tensor("fc.weight", HIDDEN, 2 * HIDDEN),
        r"fc.weight has shape \[72, 144\], not \[72, 216\]",
    ),
    "queries of the stream alone": (
        with_tensor(f"{ATTENTION}q_proj.weight", 128, HIDDEN),
        r"q_proj.weight has shape \[128, 72\], not \[128, 144\]",
    ),
    "another head": (
        with_tensor("lm_head.weight", 60, HIDDEN),
        r"lm_head.weight has shape \[60, 72\], not \[61, 72\]",
    ),
    "another target": (
        saying(target_hidden_size=64), r"target_hidden_size=64, the LlamaForCausalLM hidden_size=72"
    ),
    "a tensor nobody reads": (
        with_tensor(f"{ATTENTION}q_norm.weight", 64),
        r"tensors that nobody reads in an EAGLE3 checkpoint of one layer: "
        r"midlayer.self_attn.q_norm.weight",
    ),
    "a second layer": (
        with_tensor("layers.1.mlp.up_proj.weight", 44, HIDDEN),
        r"nobody reads in an EAGLE3 checkpoint of one layer: model.layers.1.mlp.up_proj.weight",
    ),
    "both names": (
        with_tensor("layers.0.hidden_norm.weight", HIDDEN),
        r"has both (midlayer|model.layers.0).hidden_norm.weight and ",
    ),
    "offsets below": (
        offset(5, -1), r"d2t maps draft 5 to token -1, the vocabulary has 97",
    ),
    "offsets beyond": (
        offset(7, VOCAB), r"d2t maps draft 7 to token 97, the vocabulary has 97",
    ),
    "a token twice": (
        offset(9, int(shuffled(61, VOCAB)[3])),
        rf"d2t maps drafts 3 and 9 to one token, {int(shuffled(61, VOCAB)[3])}",
    ),
    "offsets of floats": (
        with_tensor("d2t", 61), r"d2t must be int64 \[N\], not torch.float32 \(61,\)"
    ),
    "fewer offsets": (
        with_tensor("d2t", 60), r"d2t of shape \[60\], and a draft vocabulary of 61 tokens"
    ),
    "no offsets": (
        without("d2t"), r"lacks d2t: its draft vocabulary has 61 tokens, the target 97"
    ),
    "another mask": (
        marking(3), r"t2d marks 6[02] tokens, d2t has 61; they disagree about 1, of which the "
        r"first is token 3",
    ),
    "no head": (
        without("lm_head.weight"), r"no lm_head.weight, and draft_vocab_size=61 is not the 97"
    ),
    "layers that do not exist": (
        saying(**{IDS: [2, 5, 9]}),
        rf"has {IDS}=\[2, 5, 9\], of which 0 is the embedding; the target's layers \[1, 4, 8\] "
        r"must differ, and be of the 0 to 7 that the LlamaForCausalLM has; `layers` of Eagle3 sets "
        r"others",
    ),
    "layers by their numbers": (
        saying(**{IDS: [1, 5, 8]}),
        rf"has {IDS}=\[1, 5, 8\]; the target's layers \[1, 5, 8\] must differ",
    ),
    "layers inside": (
        saying(eagle_config={IDS: [2, 5, 9]}),
        rf"has {IDS}=\[2, 5, 9\], of which 0 is the embedding; the target's layers \[1, 4, 8\] ",
    ),
    "the embedding": (
        saying(**{IDS: [0, 5, 6]}),
        r"=\[0, 5, 6\], of which 0 is the embedding; the target's layers \[-1, 4, 5\] must differ",
    ),
    "a layer twice": (
        saying(**{IDS: [2, 5, 5]}),
        r"=\[2, 5, 5\], of which 0 is the embedding; the target's layers \[1, 4, 4\] must differ",
    ),
    "no layers": (saying(**{IDS: [1.5]}), rf"{IDS}=\[1.5\]: must be a list of integers"),
    "no norm of the streams": (
        saying(norm_before_fc=True), r"an EAGLE3 checkpoint that lacks input_norm.weight"
    ),
    "no norms of the streams": (
        saying(eagle_config={"fc_norm": True}),
        r"lacks fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight",
    ),
    "norms of both kinds": (
        saying(fc_norm=True, norm_before_fc=True), r"fc_norm=True: supported: False beside norm_be"
    ),
    "norms that the config does not name": (
        with_tensor("fc_norm.0.weight", HIDDEN), r"that nobody reads .*: fc_norm.0.weight"
    ),
    "P-EAGLE": (
        saying(architectures=["PEagleDraftModel"]),
        r"architectures=\['PEagleDraftModel'\] .*drafts all at once: not supported",
    ),
    "P-EAGLE of speculators": (
        saying(speculators_model_type="peagle"), r"_model_type='peagle': it is no EAGLE3 head"
    ),
    "the last layer's": (
        saying(eagle_config={"use_aux_hidden_state": False}), r"use_aux_hidden_state=False.*True"
    ),
    "parallel drafts": (saying(parallel_drafting=True), r"parallel_drafting=True.*False"),
    "another activation": (saying(hidden_act="gelu"), r"hidden_act='gelu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_an_error_with_names_and_numbers(tmp_path: Path, name: str) -> None:
    change, message = WRONG[name]
    config, tensors = config_of(Shape()), tensors_of(Shape())
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, config, tensors)


def test_a_narrower_head_has_all_of_its_own(tmp_path: Path) -> None:
    shape = Shape(narrower=50)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors = tensors_of(shape)
        del tensors[name]
        missing = "embedding" if "embed" in name else "lm_head"
        message = rf"hidden_size=50 and no {missing}: that of the LlamaForCausalLM has hidden_size="
        with pytest.raises(ValueError, match=message):
            read(tmp_path / missing, config_of(shape), tensors)
    short = tensors_of(shape)
    short["embed_tokens.weight"] = short["embed_tokens.weight"][:90]
    with pytest.raises(ValueError, match="embedding of 90 tokens, the LlamaForCausalLM has 97"):
        read(tmp_path / "short", config_of(shape), short)


def test_a_target_too_shallow_for_the_usual_layers(tmp_path: Path) -> None:
    shape = Shape()
    message = rf"has no {IDS}; the target's layers \[1, 1, 0\] must differ, and be of the 0 to 3 "
    with pytest.raises(ValueError, match=message):
        read(tmp_path, config_of(shape), tensors_of(shape), num_hidden_layers=4)
    message = r"is given layers=\[1, 4\]; the target's layers \[1, 4\] must differ"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, config_of(shape), tensors_of(shape), (1, 4), num_hidden_layers=4)


def test_a_shared_head_is_not_reordered(tmp_path: Path) -> None:
    """One that is whole, and in another order than the target's."""
    tensors = tensors_of(replace(Shape(), drafted=VOCAB))
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="d2t reorders the target's lm_head, which it shares"):
        read(tmp_path, config_of(Shape(drafted=VOCAB)), tensors)


def test_weights_of_another_format(tmp_path: Path) -> None:
    """The format in which SafeAILab published its own heads."""
    folder = write_head(tmp_path, config_of(Shape()), tensors_of(Shape()))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: only safetensors are read"):
        Checkpoint.open(folder)
