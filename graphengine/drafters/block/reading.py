"""Reads and checks published DFlash and DSpark checkpoints against their target.

A checkpoint has the config of a Qwen3 with few layers, and its tensors without the prefix "model.":

    fc.weight, hidden_norm.weight, norm.weight, layers.N...
    embed_tokens.weight, lm_head.weight                      DeepSpec only; z-lab uses the target's
    markov_head.markov_w1.weight, markov_head.markov_w2.weight       [V, markov_rank]
    confidence_head.proj.weight, confidence_head.proj.bias           not read

The architecture says which lanes of a block make drafts. A `DFlashDraftModel` (z-lab/dflash) has a
block of `block_size` tokens including the newest one, and drafts one fewer: a mask's output is the
token at its own position. A `Qwen3DSparkModel` (deepseek-ai/DeepSpec, including its DFlash
checkpoints, which have `markov_rank` 0) drafts as many tokens as its block has lanes: a lane's
output is the token after it. So does a `DSparkDraftModel` of SpecForge and SGLang whose
`model_type` is "qwen3", as vLLM takes it. z-lab's config has `block_size`, `mask_token_id` and
`target_layer_ids` in `dflash_config` or at the top level; `dflash_config` takes precedence.
DeepSpec's has them at the top level.

`target_layer_ids` count the target's layers from 0: the stream after each is read. The last layer
is refused, since transformers returns its stream after the final norm and other engines do not. By
default a layer of `sliding_attention` is causal, and one of full attention sees the whole block;
`is_causal` sets the same for all layers (z-lab/dflash, SGLang). DFlash 2, heads of the kinds
`gated` and `rnn`, draft vocabularies and DeepSpec's Gemma 4 are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphengine.drafters.block.layers import DFlashConfig, allocate_dflash_weights
from graphengine.kernels.draft.markov import MAX_RANK
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.kv_scales import is_kv_scale
from graphengine.models.composition import has_local_tables, windows_of
from graphengine.models.contract import ModelConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import Key, read_keys, unsupported
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp
from graphengine.options.checks import INT32_MAX, some

log = logging.getLogger(__name__)

_DSPARK = "DSparkDraftModel"
_FROM_NEWEST = {"DFlashDraftModel": False, "Qwen3DSparkModel": True, _DSPARK: True}
# Keys of the top level and of `dflash_config`.
_BLOCK_KEYS = (
    Key("block_size", "integer", (1, 1024), default=None, null=True),
    Key("mask_token_id", "integer", (0, INT32_MAX), default=None, null=True),
    Key("target_layer_ids", "integers", (-1, 1024), default=None, null=True),
    Key("input_embedding_scale", "number", (0, 1e6), default=None, null=True),
    Key("output_multiplier", "number", (0, 1e6), default=None, null=True),
    Key("final_logit_softcapping", "number", (0, 1e6), default=None, null=True),
)
_KEYS = (
    *_BLOCK_KEYS,
    Key("dflash_config", "object", default=None, null=True),
    Key("num_target_layers", "integer", (1, 1024), default=None, null=True),
    Key("is_causal", "flag", default=None, null=True),
    Key("markov_rank", "integer", (0, MAX_RANK), default=0, null=True),
    Key("markov_head_type", "text", default="vanilla", null=True),
    Key("draft_vocab_size", "integer", (1, INT32_MAX), default=None, null=True),
)
_KINDS = (
    Key("architectures", "texts", default=(), null=True),
    Key("model_type", "text", default=None, null=True),
)
_NEUTRAL = {
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
}
_WANTED = ("block_size", "mask_token_id", "target_layer_ids")
_LAYERS = hf_config.FamilyDefaults(
    max_positions=32768, head_dim=128, windows="switched", keys=_KEYS
)
_CONFIDENCE = "confidence_head."


def read_dflash(
    checkpoint: Checkpoint, target: ModelConfig, layers: Sequence[int] | None = None
) -> DFlashConfig:
    """Read a block drafter's checkpoint for this target.

    layers  target layers after which the stream is read; None: those that the config names

    ValueError, with names and numbers, for a checkpoint that is no block drafter's, lacks tensors
    or has unknown ones, or does not fit the target. Shapes of weights are checked here too.
    """
    path, stored = checkpoint.path, checkpoint.tensors
    from_newest = _from_newest(checkpoint)
    values = hf_config.read_settings(hf_config.of_one_axis(checkpoint.config), _LAYERS)
    settings = _settings(checkpoint, values)
    chosen = settings["target_layer_ids"] if layers is None else tuple(layers)
    attention = read_attention(values, qk_norm=True)
    decoder = decoder_config(values, "DFlash", attention, read_mlp(values))
    embedding, own_head = stored.get("model.embed_tokens.weight"), "lm_head.weight" in stored
    cap, rank = settings["final_logit_softcapping"], _rank(values, from_newest)
    if cap is None:
        cap = 0.0 if own_head else target.logits_cap
    if cap and rank:
        raise unsupported("final_logit_softcapping", cap, f"0 with markov_rank={rank}")
    config = DFlashConfig(
        decoder=replace(decoder, tie_embeddings=False, logits_cap=cap),
        causal=_causal(values, from_newest),
        layers=chosen,
        target_width=target.hidden_size,
        mask_token=settings["mask_token_id"],
        trained_block=settings["block_size"],
        from_newest=from_newest,
        rank=rank,
        embedding_rows=0 if embedding is None else embedding.shape[0],
        own_head=own_head,
    )
    _check_layers(checkpoint, config, target, values)
    _check_sizes(checkpoint, config, target, values)
    _check_tensors(checkpoint, config)
    log.info("%s reads the target's stream after layers %s", path, ", ".join(map(str, chosen)))
    return config


def _from_newest(checkpoint: Checkpoint) -> bool:
    names = read_keys(checkpoint.config, _KINDS)
    architectures: tuple[str, ...] = tuple(names["architectures"])
    known = [_FROM_NEWEST[name] for name in architectures if name in _FROM_NEWEST]
    if len(architectures) != 1 or not known:
        raise ValueError(
            f"{checkpoint.path} has architectures={list(architectures)}: block drafters are "
            f"{' or '.join(_FROM_NEWEST)}"
        )
    if _DSPARK in architectures and names["model_type"] != "qwen3":
        # Drafters with DeepSeek's layers have this name, too.
        raise unsupported("model_type", names["model_type"], f"'qwen3' of a {_DSPARK}")
    return known[0]


def _settings(checkpoint: Checkpoint, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `_BLOCK_KEYS`; `dflash_config` takes precedence."""
    inside = read_keys(values["dflash_config"] or {}, _BLOCK_KEYS, inside="dflash_config")
    settings = {key.name: values[key.name] for key in _BLOCK_KEYS}
    settings |= {name: value for name, value in inside.items() if value is not None}
    missing = [name for name in _WANTED if settings[name] is None]
    if missing:
        raise ValueError(
            f"{checkpoint.path} is no block drafter's checkpoint: its config lacks "
            f"{' and '.join(missing)}"
        )
    for name, neutral in _NEUTRAL.items():
        if settings[name] not in neutral:
            raise unsupported(name, settings[name], " or ".join(map(repr, neutral)))
    return settings


def _causal(values: Mapping[str, Any], from_newest: bool) -> tuple[bool, ...]:
    """Whether each layer is causal."""
    count: int = values["num_hidden_layers"]
    types = values["layer_types"] or ["full_attention"] * count
    if len(types) != count:
        raise ValueError(f"config.json has {len(types)} layer_types for num_hidden_layers={count}")
    sliding = tuple(kind == "sliding_attention" for kind in types)
    if from_newest:
        if any(sliding):
            raise unsupported("layer_types", types, "'full_attention' in every layer of DSpark's")
        return (False,) * count
    told: bool | None = values["is_causal"]
    return sliding if told is None else (told,) * count


def _rank(values: Mapping[str, Any], from_newest: bool) -> int:
    rank: int = values["markov_rank"] or 0
    if rank and not from_newest:
        raise unsupported("markov_rank", rank, "0 of a DFlashDraftModel")
    if rank and values["markov_head_type"] not in (None, "vanilla"):
        raise unsupported("markov_head_type", values["markov_head_type"], "'vanilla'")
    return rank


def _check_layers(
    checkpoint: Checkpoint, config: DFlashConfig, target: ModelConfig, values: Mapping[str, Any]
) -> None:
    path, layers, count = checkpoint.path, config.layers, target.num_layers
    told = values["num_target_layers"]
    if told not in (None, count):
        raise ValueError(
            f"{path} has num_target_layers={told}, the {target.architecture} has {count} layers"
        )
    beyond = [layer for layer in layers if not 0 <= layer < count - 1]
    if beyond or len(set(layers)) < len(layers) or not layers:
        raise ValueError(
            f"{path} reads the target's stream after layers {list(layers)}: they must differ, and "
            f"be of 0 to {count - 2}, all but the last of the {target.architecture}'s; `layers` of "
            f"DFlash sets others"
        )


def _check_sizes(
    checkpoint: Checkpoint, config: DFlashConfig, target: ModelConfig, values: Mapping[str, Any]
) -> None:
    path, decoder = checkpoint.path, config.decoder
    hidden, width, tokens = config.hidden_size, target.hidden_size, target.vocab_size
    if hidden != width and not (config.embedding_rows and config.own_head):
        raise ValueError(
            f"{path} has hidden_size={hidden}, and shares an embedding or an lm_head with the "
            f"{target.architecture}, which has hidden_size={width}"
        )
    if decoder.vocab_size != tokens or values["draft_vocab_size"] not in (None, tokens):
        raise ValueError(
            f"{path} has vocab_size={decoder.vocab_size} and "
            f"draft_vocab_size={values['draft_vocab_size']}, the {target.architecture} {tokens} "
            f"tokens: a block drafter drafts all of them"
        )
    rows = config.embedding_rows or tokens
    if rows < tokens:
        raise ValueError(
            f"{path} has an embedding of {rows} tokens, the {target.architecture} has {tokens}"
        )
    if config.mask_token >= rows:
        raise ValueError(
            f"{path} has mask_token_id={config.mask_token}, and the embedding has {rows} tokens"
        )
    if config.most_drafts < 1:
        raise ValueError(
            f"{path} has block_size={config.trained_block}: a block of the newest token alone "
            f"drafts nothing"
        )
    if has_local_tables(decoder):
        raise unsupported("rope_parameters", values["rope_parameters"], "one RoPE for all layers")
    least = min((window for window in windows_of(decoder) if window), default=config.trained_block)
    if least < config.trained_block:
        raise ValueError(
            f"{path} has sliding_window={least}, less than block_size={config.trained_block}"
        )


def _check_tensors(checkpoint: Checkpoint, config: DFlashConfig) -> None:
    """Raise ValueError for missing tensors, wrong shapes, and tensors that are not read."""
    path, stored = checkpoint.path, checkpoint.tensors
    wanted = allocate_dflash_weights(config, device="meta", dtype=torch.float32).named()
    missing = sorted(wanted.keys() - stored.keys())
    if missing:
        raise ValueError(
            f"{path} is a block drafter's checkpoint of {config.decoder.num_layers} layers that "
            f"lacks {some(missing)}"
        )
    checkpoint.check(wanted)
    unknown = [
        name
        for name in stored
        if name not in wanted and not name.startswith(_CONFIDENCE) and not is_kv_scale(name)
    ]
    if unknown:
        raise ValueError(
            f"{path} has tensors that nobody reads in a block drafter's checkpoint of "
            f"{config.decoder.num_layers} layers: {some(sorted(unknown))}"
        )
