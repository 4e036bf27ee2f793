"""DFlash and DSpark checkpoints: what is read as they are published, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.block_drafters import BlockShape, block_config, block_tensors
from checkpoints.eagle3_heads import Tensors, write_head
from graphengine import DFlash, EngineConfig
from graphengine.drafters import make_drafter
from graphengine.drafters.block.drafter import BlockDrafter
from graphengine.drafters.block.layers import DFlashConfig, allocate_dflash_weights
from graphengine.drafters.block.reading import read_dflash
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.composition import windows_of
from graphengine.models.families.registry import read_model_config

VOCAB, HIDDEN, LAYERS = 97, 72, 8
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": 56, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
DFLASH, DSPARK = BlockShape(), BlockShape(dspark=True, rank=16, block=7)
# As `Checkpoint` names what a base model has, and as it is stored.
LAYER, STORED = "model.layers.0.", "layers.0."


def tensors_of(shape: BlockShape) -> Tensors:
    return block_tensors(shape, EMBEDDING, EMBEDDING)


def config_of(shape: BlockShape) -> dict[str, Any]:
    return block_config(shape, EMBEDDING, LAYERS)


def read(
    folder: Path,
    config: dict[str, Any],
    tensors: Tensors,
    layers: tuple[int, ...] | None = None,
    **target: Any,
) -> DFlashConfig:
    checkpoint = Checkpoint.open(write_head(folder, config, tensors))
    return read_dflash(checkpoint, read_model_config(TARGET | target), layers)


# What is read.


def test_a_dflash_as_z_lab_publishes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It shares what the target has; its block is of 7 masks after the newest token."""
    with caplog.at_level("INFO", "graphengine"):
        found = read(tmp_path, config_of(DFLASH), tensors_of(DFLASH))
    assert "reads the target's stream after layers 1, 4, 6" in caplog.text
    assert (found.layers, found.mask_token, found.trained_block) == ((1, 4, 6), 96, 8)
    assert (found.most_drafts, found.block_of(3), found.from_newest) == (7, 4, False)
    assert (found.rank, found.embedding_rows, found.own_head) == (0, 0, False)
    assert found.causal == (False, False) and windows_of(found.decoder) == (0, 0)


def test_what_is_inside_goes_first(tmp_path: Path) -> None:
    config = config_of(DFLASH)
    inside = config["dflash_config"] | {"block_size": 16}
    beside = {"mask_token_id": 3, "target_layer_ids": [0]}
    found = read(tmp_path, config | beside | {"dflash_config": inside}, tensors_of(DFLASH))
    assert (found.trained_block, found.mask_token, found.layers) == (16, 96, (1, 4, 6))


def test_a_dspark_as_deepspec_publishes_it(tmp_path: Path) -> None:
    found = read(tmp_path, config_of(DSPARK), tensors_of(DSPARK))
    # SpecForge's name for the same.
    renamed = config_of(DSPARK) | {"architectures": ["DSparkDraftModel"]}
    assert read(tmp_path / "renamed", renamed, tensors_of(DSPARK)) == found
    assert (found.most_drafts, found.block_of(3), found.from_newest) == (7, 3, True)
    assert (found.rank, found.embedding_rows, found.own_head) == (16, VOCAB, True)
    # Every name but those of the confidence head, which is not read.
    names = allocate_dflash_weights(found, device="meta", dtype=torch.float32).named()
    stored = {name for name in tensors_of(DSPARK) if not name.startswith("confidence")}
    assert {name.removeprefix("model.") for name in names} == stored


@pytest.mark.parametrize(
    ("windows", "told", "causal"),
    [
        ((9, 0), None, (True, False)),
        ((9, 0), False, (False, False)),
        ((0, 0), True, (True, True)),
    ],
)
def test_which_layers_are_causal(
    tmp_path: Path, windows: tuple[int, ...], told: bool | None, causal: tuple[bool, ...]
) -> None:
    shape = BlockShape(windows=windows, causal=told)
    found = read(tmp_path, config_of(shape), tensors_of(shape))
    assert found.causal == causal
    assert windows_of(found.decoder) == windows


def test_a_drafter_is_made(tmp_path: Path) -> None:
    path = write_head(tmp_path / "block", config_of(DSPARK), tensors_of(DSPARK))
    target = Checkpoint.open(write_head(tmp_path / "target", TARGET, {"a": torch.zeros(1)}))

    def make(**options: Any) -> Any:
        config = EngineConfig(speculative=DFlash(path, **options), max_batch=2, device="cpu")
        return make_drafter(config, target, read_model_config(TARGET))

    drafter = make(k=4)
    assert isinstance(drafter, BlockDrafter)
    assert (drafter.length, drafter.needs.reserve, drafter.needs.tokens_after) == (4, 4, 0)
    assert drafter.needs.reads_streams and not drafter.needs.wants_hidden
    assert make(k=7, layers=(0, 2, 5)).config.layers == (0, 2, 5)
    message = "k=8 drafts a step, and .* is trained for blocks of 7 tokens, which draft 7"
    with pytest.raises(ValueError, match=message):
        make(k=8)
    path = write_head(tmp_path / "dflash", config_of(DFLASH), tensors_of(DFLASH))
    assert make(k=7).needs.reserve == 8
    with pytest.raises(ValueError, match="trained for blocks of 8 tokens, which draft 7"):
        make(k=8)


# What is refused.

Change = Callable[[dict[str, Any], Tensors], None]


def without(name: str) -> Change:
    return lambda config, tensors: tensors.__delitem__(name)


def with_tensor(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.__setitem__(name, torch.zeros(shape))


def saying(**settings: Any) -> Change:
    return lambda config, tensors: config.update(settings)


def saying_inside(**settings: Any) -> Change:
    return lambda config, tensors: config["dflash_config"].update(settings)


WRONG: dict[str, tuple[BlockShape, Change, str]] = {
    "no fc": (DFLASH, without("fc.weight"), r"checkpoint of 2 layers that lacks fc.weight"),
    "types of fewer layers": (
        DFLASH, saying(layer_types=["full_attention"]),
        "config.json has 1 layer_types for num_hidden_layers=2",
    ),
    "no norm": (DFLASH, without("hidden_norm.weight"), r"lacks hidden_norm.weight"),
    "no final norm": (DFLASH, without("norm.weight"), r"lacks model.norm.weight"),
    "no product": (
        DFLASH, without(f"{STORED}self_attn.o_proj.weight"),
        rf"lacks {LAYER}self_attn.o_proj.weight",
    ),
    "no second factor": (
        DSPARK, without("markov_head.markov_w2.weight"), r"lacks markov_head.markov_w2.weight"
    ),
    "a factor of another rank": (
        DSPARK, with_tensor("markov_head.markov_w1.weight", VOCAB, 15),
        r"markov_w1.weight has shape \[97, 15\], not \[97, 16\]",
    ),
    "fc of other layers": (
        DFLASH, with_tensor("fc.weight", HIDDEN, 2 * HIDDEN),
        r"fc.weight has shape \[72, 144\], not \[72, 216\]",
    ),
    "keys of another width": (
        DFLASH, with_tensor(f"{STORED}self_attn.k_proj.weight", 64, HIDDEN),
        r"k_proj.weight has shape \[64, 72\], not \[128, 72\]",
    ),
    "another head": (
        DSPARK, with_tensor("lm_head.weight", 60, HIDDEN),
        r"lm_head.weight has shape \[60, 72\], not \[97, 72\]",
    ),
    "a tensor nobody reads": (
        DFLASH, with_tensor("candidate_selector.hidden_projection.weight", 4, HIDDEN),
        r"tensors that nobody reads in a block drafter's checkpoint of 2 layers: candidate_selec",
    ),
    "a third layer": (
        DFLASH, with_tensor("layers.2.mlp.up_proj.weight", 44, HIDDEN),
        r"nobody reads in a block drafter's checkpoint of 2 layers: model.layers.2.mlp.up_proj",
    ),
    "no mask": (
        DFLASH, saying(dflash_config={"target_layer_ids": [1, 4, 6]}),
        r"is no block drafter's checkpoint: its config lacks mask_token_id$",
    ),
    "nothing of a block": (
        DSPARK, saying(block_size=None, target_layer_ids=None),
        r"its config lacks block_size and target_layer_ids$",
    ),
    "a mask beyond": (
        DFLASH, saying_inside(mask_token_id=97),
        r"mask_token_id=97, and the embedding has 97 tokens",
    ),
    "a mask below": (DFLASH, saying_inside(mask_token_id=-1), r"mask_token_id=-1"),
    "layers that do not exist": (
        DFLASH, saying_inside(target_layer_ids=[1, 4, 8]),
        r"stream after layers \[1, 4, 8\]: they must differ, and be of 0 to 6, all but the last of "
        r"the LlamaForCausalLM's; `layers` of DFlash sets others",
    ),
    "the last layer": (
        DFLASH, saying_inside(target_layer_ids=[1, 4, 7]), r"\[1, 4, 7\]: .* be of 0 to 6, all but"
    ),
    "the embedding": (
        DSPARK, saying(target_layer_ids=[-1, 4, 6]), r"after layers \[-1, 4, 6\]: they must differ"
    ),
    "a layer twice": (
        DFLASH, saying_inside(target_layer_ids=[1, 4, 4]), r"\[1, 4, 4\]: they must differ"
    ),
    "no layers": (DFLASH, saying_inside(target_layer_ids=[]), r"after layers \[\]: they must"),
    "layers of another target": (
        DFLASH, saying(num_target_layers=36),
        r"num_target_layers=36, the LlamaForCausalLM has 8 layers",
    ),
    "another architecture": (
        DFLASH, saying(architectures=["DFlash2DraftModel"]),
        r"architectures=\['DFlash2DraftModel'\]: block drafters are DFlashDraftModel or Qwen3DSp",
    ),
    "DSpark of DeepSeek": (
        DSPARK, saying(architectures=["DSparkDraftModel"], model_type="deepseek_v4"),
        r"model_type='deepseek_v4': supported: 'qwen3' of a DSparkDraftModel",
    ),
    "no architecture": (DFLASH, saying(architectures=None), r"has architectures=\[\]: block draf"),
    "another vocabulary": (
        DFLASH, saying(vocab_size=96),
        r"vocab_size=96 and draft_vocab_size=None, the LlamaForCausalLM 97 tokens",
    ),
    "a draft vocabulary": (DSPARK, saying(draft_vocab_size=50), r"and draft_vocab_size=50, the"),
    "a block of one": (DFLASH, saying(block_size=1), r"block_size=1: a block of the newest token"),
    "a rank beyond": (DSPARK, saying(markov_rank=1025), r"markov_rank=1025"),
    "another kind of head": (
        DSPARK, saying(markov_head_type="gated"), r"markov_head_type='gated'.*'vanilla'"
    ),
    "a head of DFlash": (DFLASH, saying(markov_rank=16), r"markov_rank=16.*0 of a DFlashDraft"),
    "scaled embeddings": (DFLASH, saying_inside(input_embedding_scale=2.0), r"input_embedding"),
    "scaled logits": (DFLASH, saying_inside(output_multiplier=0.2), r"output_multiplier=0.2.*1.0"),
    "capped logits": (
        DSPARK, saying(final_logit_softcapping=20.0),
        r"final_logit_softcapping=20.0: supported: 0 with markov_rank=\d+",
    ),
    "windows of DSpark": (
        DSPARK, saying(
            layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=9
        ), r"layer_types=.*'full_attention' in every layer of DSpark's",
    ),
    "another activation": (DFLASH, saying(hidden_act="gelu"), r"hidden_act='gelu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_an_error_with_names_and_numbers(tmp_path: Path, name: str) -> None:
    shape, change, message = WRONG[name]
    config, tensors = config_of(shape), tensors_of(shape)
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, config, tensors)


def test_a_target_of_another_width(tmp_path: Path) -> None:
    """A drafter without an embedding and a head of its own has the target's width; else fc shows
    that it was trained beside another.
    """
    message = (
        "hidden_size=72, and shares an embedding or an lm_head with the LlamaForCausalLM, which "
        "has hidden_size=64"
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "dflash", config_of(DFLASH), tensors_of(DFLASH), hidden_size=64)
    with pytest.raises(ValueError, match=r"fc.weight has shape \[72, 216\], not \[72, 192\]"):
        read(tmp_path / "dspark", config_of(DSPARK), tensors_of(DSPARK), hidden_size=64)


def test_an_embedding_of_too_few(tmp_path: Path) -> None:
    tensors = tensors_of(DSPARK)
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][:90]
    with pytest.raises(ValueError, match="embedding of 90 tokens, the LlamaForCausalLM has 97"):
        read(tmp_path, config_of(DSPARK), tensors)


def test_windows_shorter_than_a_block(tmp_path: Path) -> None:
    shape = replace(DFLASH, windows=(5, 0))
    with pytest.raises(ValueError, match="sliding_window=5, less than block_size=8"):
        read(tmp_path, config_of(shape), tensors_of(shape))
