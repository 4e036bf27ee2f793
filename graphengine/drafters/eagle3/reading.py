"""Reads and checks published EAGLE3 checkpoints against the target they are for.

Two formats are read. SafeAILab's and SpecForge's is a Llama config with `draft_vocab_size` and
perhaps an `eagle_config`; that of vLLM's speculators has the layer's config in
`transformer_layer_config`. Tensor names are the same in both, except for the layer's prefix.

`eagle_aux_hidden_state_layer_ids` names the target layers to read, in one of two ways. If the
lowest id is 1, id i is the output of layer i, as in SpecForge and SGLang. Otherwise id 0 is the
embedding's output and id i the output of layer i - 1, as in vLLM and speculators. SGLang tells the
two apart in the same way. Without ids the checkpoint was trained on the outputs of layers 1, n // 2
- 1 and n - 4 of n, the default that SafeAILab, vLLM and SGLang write as 2, n // 2 and n - 3. Wrong
layers raise no error, they only lower acceptance. So the log says which layers are read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphengine.drafters.eagle3.layer import (
    Eagle3Config,
    Eagle3Names,
    allocate_eagle3_weights,
    usual_layers,
)
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.kv_scales import is_kv_scale
from graphengine.models.contract import ModelConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, Key, read_keys, unsupported
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp
from graphengine.options.checks import INT32_MAX, some
from graphengine.options.drafts.draft_vocabulary import offset_ids

log = logging.getLogger(__name__)

_IDS = "eagle_aux_hidden_state_layer_ids"
# Keys of the top level and of `eagle_config`.
_KEYS = (
    Key("draft_vocab_size", "integer", (1, INT32_MAX), default=None, null=True),
    Key("target_hidden_size", "integer", (1, 2**20), default=None, null=True),
    Key("norm_before_residual", "flag", default=None, null=True),
    Key("norm_output", "flag", default=None, null=True),
    Key("norm_before_fc", "flag", default=None, null=True),
    Key("fc_norm", "flag", default=None, null=True),
    Key("parallel_drafting", "flag", default=None, null=True),
    Key("use_aux_hidden_state", "flag", default=None, null=True),
    Key(_IDS, "integers", (0, 1024), default=None, null=True),
    Key("eagle_config", "object", default=None, null=True),
    Key("transformer_layer_config", "object", default=None, null=True),
    Key("architectures", "texts", default=(), null=True),
    Key("speculators_model_type", "text", default=None, null=True),
)
_SUPPORTED = {
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
}
# Defaults of a Llama's config.
_DEFAULTS = hf_config.FamilyDefaults(max_positions=2048, biases=("attention_bias", "mlp_bias"))
_LAYER, _OFFSETS, _MASK = "layers.0.", "d2t", "t2d"
# P-EAGLE checkpoints have the same tensor names, but draft all tokens at once.
_PARALLEL = "PEagle"


class _Chosen(NamedTuple):
    """Target layers after which the stream is read; `told` says where they come from."""

    layers: tuple[int, ...]
    told: str


class Eagle3Checkpoint(NamedTuple):
    """The config, tokens and names that were read from an EAGLE3 checkpoint.

    token_ids  int64 [D], ascending: the target's ids that may be drafted; None: all
    order      int64 [D]: the row of each of these tokens in the checkpoint's lm_head; None: the
               rows already have this order
    """

    config: Eagle3Config
    token_ids: Tensor | None
    order: Tensor | None


def read_eagle3(
    checkpoint: Checkpoint, target: ModelConfig, layers: Sequence[int] | None = None
) -> Eagle3Checkpoint:
    """Read an EAGLE3 checkpoint for this target.

    layers  target layers after which the stream is read; None: those that the config names

    ValueError, with names and numbers, for a checkpoint that is no EAGLE3 one, lacks tensors or has
    unknown ones, or does not fit the target. Shapes of weights are checked here too.
    """
    names, path = _names(checkpoint), checkpoint.path
    settings = _settings(checkpoint.config)
    _check_kind(path, settings)
    of_layer = settings["transformer_layer_config"]
    values = _layer_settings(checkpoint.config if of_layer is None else of_layer)
    if "fc.weight" not in names:
        raise ValueError(
            f"{path} is no EAGLE3 checkpoint: it lacks fc.weight, and has "
            f"{some(sorted(checkpoint.tensors))}"
        )
    drafted = settings["draft_vocab_size"] or target.vocab_size
    mlp = read_mlp(values, bias=values["mlp_bias"])
    decoder = decoder_config(values, "Eagle3", read_attention(values), mlp)
    chosen = _chosen(settings, target, layers)
    _check_layers(path, chosen, target)
    embedding = names.get("embed_tokens.weight")
    config = Eagle3Config(
        layer=replace(decoder, vocab_size=drafted),
        names=_stored_names(names, _stream_norms(settings, len(chosen.layers))),
        layers=chosen.layers,
        target_width=target.hidden_size,
        embedding_rows=0 if embedding is None else checkpoint.tensors[embedding].shape[0],
        fc_bias="fc.bias" in names,
        normed_stream=bool(settings["norm_before_residual"]),
        normed_output=bool(settings["norm_output"]),
    )
    _check_widths(checkpoint, config, target, settings)
    _check_tensors(checkpoint, config, names)
    ids, order = _vocabulary(checkpoint, config, target, names)
    after = ", ".join(map(str, chosen.layers))
    log.info("%s %s: the target's stream is read after layers %s", path, chosen.told, after)
    return Eagle3Checkpoint(config, ids, order)


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """The names of the checkpoint's tensors, by names that are the same for every layout."""
    found: dict[str, str] = {}
    for name in checkpoint.tensors:
        plain = name.removeprefix("model.")
        if plain.startswith("midlayer."):
            plain = _LAYER + plain.removeprefix("midlayer.")
        if plain in found:
            raise ValueError(f"{checkpoint.path} has both {found[plain]} and {name}")
        found[plain] = name
    return found


def _check_kind(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint that says it is of another kind."""
    architectures, kind = settings["architectures"], settings["speculators_model_type"]
    parallel = any(name.startswith(_PARALLEL) for name in architectures)
    if parallel or kind not in (None, "eagle3"):
        raise ValueError(
            f"{path} has architectures={list(architectures)} and speculators_model_type={kind!r}: "
            f"it is no EAGLE3 head, which drafts token after token"
            + (", but a P-EAGLE one, which drafts all at once: not supported" if parallel else "")
        )


def _stream_norms(settings: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Names of the norms of fc's input, as in vLLM.

    There is one for each layer's stream (EAGLE 3.1), or one for all of them side by side, or none.
    """
    if settings["fc_norm"] and settings["norm_before_fc"]:
        raise unsupported("fc_norm", True, "False beside norm_before_fc=True")
    if settings["fc_norm"]:
        return tuple(f"fc_norm.{index}" for index in range(layers))
    return ("input_norm",) if settings["norm_before_fc"] else ()


def _stored_names(names: Mapping[str, str], stream_norms: tuple[str, ...]) -> Eagle3Names:
    def of(name: str) -> str | None:
        stored = names.get(f"{name}.weight")
        return None if stored is None else stored.removesuffix(".weight")

    in_layer = [stored for name, stored in names.items() if name.startswith(_LAYER)]
    prefixes = {"midlayer.", "model.midlayer.", "layers.0.", "model.layers.0."}
    layer = next((p for p in sorted(prefixes) if any(n.startswith(p) for n in in_layer)), _LAYER)
    return Eagle3Names(
        layer=layer,
        fc=of("fc") or "fc",
        final_norm=of("norm") or "norm",
        lm_head=of("lm_head"),
        embedding=of("embed_tokens"),
        stream_norms=tuple(of(norm) or norm for norm in stream_norms),
    )


def _settings(config: HfConfig) -> dict[str, Any]:
    """Settings other than the layer's sizes; `eagle_config` takes precedence."""
    settings = read_keys(config, _KEYS)
    inside = read_keys(settings["eagle_config"] or {}, _KEYS, inside="eagle_config")
    settings |= {name: value for name, value in inside.items() if value not in (None, ())}
    for name, supported in _SUPPORTED.items():
        if settings[name] not in (None, supported):
            raise unsupported(name, settings[name], f"{supported}")
    if settings["norm_before_residual"] is None:
        # vLLM's default for a speculators' config.
        settings["norm_before_residual"] = settings["transformer_layer_config"] is not None
    return settings


def _layer_settings(config: HfConfig) -> dict[str, Any]:
    """Settings of a Llama with one layer: the config may have the target's number of layers."""
    layer = hf_config.of_one_axis(config) | {"num_hidden_layers": 1}
    return hf_config.read_settings(layer, _DEFAULTS)


def _chosen(
    settings: Mapping[str, Any], target: ModelConfig, layers: Sequence[int] | None
) -> _Chosen:
    """The layers that the caller asked for, else those that the config names, else the usual
    ones.
    """
    if layers is not None:
        return _Chosen(tuple(layers), f"is given layers={[*layers]}")
    ids: tuple[int, ...] | None = settings[_IDS]
    if not ids:
        return _Chosen(usual_layers(target), f"has no {_IDS}")
    told = f"has {_IDS}={list(ids)}"
    if min(ids) == 1:
        return _Chosen(ids, told)
    return _Chosen(tuple(each - 1 for each in ids), f"{told}, of which 0 is the embedding")


def _check_layers(path: Path, chosen: _Chosen, target: ModelConfig) -> None:
    layers, count = chosen.layers, target.num_layers
    beyond = [layer for layer in layers if not 0 <= layer < count]
    if beyond or len(set(layers)) < len(layers) or not layers:
        raise ValueError(
            f"{path} {chosen.told}; the target's layers {list(layers)} must differ, and be of "
            f"the 0 to {count - 1} that the {target.architecture} has; `layers` of Eagle3 sets "
            f"others"
        )


def _check_widths(
    checkpoint: Checkpoint, config: Eagle3Config, target: ModelConfig, settings: Mapping[str, Any]
) -> None:
    path, hidden, width = checkpoint.path, config.hidden_size, target.hidden_size
    told = settings["target_hidden_size"]
    if told not in (None, width):
        raise ValueError(
            f"{path} has target_hidden_size={told}, the {target.architecture} hidden_size={width}"
        )
    names = config.names
    shared = [
        name
        for name, own in (("embedding", names.embedding), ("lm_head", names.lm_head))
        if own is None
    ]
    if shared and hidden != width:
        raise ValueError(
            f"{path} has hidden_size={hidden} and no {' and no '.join(shared)}: that of the "
            f"{target.architecture} has hidden_size={width}"
        )
    if names.embedding is not None and config.embedding_rows < target.vocab_size:
        raise ValueError(
            f"{path} has an embedding of {config.embedding_rows} tokens, the "
            f"{target.architecture} has {target.vocab_size}"
        )


def _check_tensors(checkpoint: Checkpoint, config: Eagle3Config, names: Mapping[str, str]) -> None:
    """Raise ValueError for missing tensors, wrong shapes, and tensors that are not read."""
    weights = allocate_eagle3_weights(config, device="meta", dtype=torch.float32)
    wanted = weights.named()
    missing = sorted(wanted.keys() - checkpoint.tensors.keys())
    if missing:
        raise ValueError(f"{checkpoint.path} is an EAGLE3 checkpoint that lacks {some(missing)}")
    checkpoint.check(wanted)
    unknown = [
        stored
        for name, stored in names.items()
        if stored not in wanted and name not in (_OFFSETS, _MASK) and not is_kv_scale(stored)
    ]
    if unknown:
        raise ValueError(
            f"{checkpoint.path} has tensors that nobody reads in an EAGLE3 checkpoint of one "
            f"layer: {some(sorted(unknown))}"
        )


def _vocabulary(
    checkpoint: Checkpoint, config: Eagle3Config, target: ModelConfig, names: Mapping[str, str]
) -> tuple[Tensor | None, Tensor | None]:
    """`token_ids` and `order` of `Eagle3Checkpoint`."""
    path, count = checkpoint.path, config.draft_vocabulary
    if config.names.lm_head is None and count != target.vocab_size:
        raise ValueError(
            f"{path} has no lm_head.weight, and draft_vocab_size={count} is not the "
            f"{target.vocab_size} tokens of the target, whose lm_head would be taken"
        )
    if _OFFSETS not in names:
        if count != target.vocab_size:
            raise ValueError(
                f"{path} lacks {_OFFSETS}: its draft vocabulary has {count} tokens, the target "
                f"{target.vocab_size}"
            )
        return None, None
    tensors = checkpoint.mapped()
    offsets = tensors[names[_OFFSETS]]
    if tuple(offsets.shape) != (count,):
        raise ValueError(
            f"{path} has {_OFFSETS} of shape {list(offsets.shape)}, and a draft vocabulary of "
            f"{count} tokens"
        )
    ids = offset_ids(offsets, target.vocab_size, f"{path}: {_OFFSETS}")
    ordered, order = ids.sort(stable=True)
    twice = torch.nonzero(ordered[1:] == ordered[:-1])
    if twice.numel():
        first = int(twice[0])
        raise ValueError(
            f"{path}: {_OFFSETS} maps drafts {int(order[first])} and {int(order[first + 1])} to "
            f"one token, {int(ordered[first])}"
        )
    if _MASK in names:
        _check_mask(path, tensors[names[_MASK]], ordered)
    in_order = bool((order == torch.arange(count)).all())
    if not in_order and config.names.lm_head is None:
        raise ValueError(f"{path}: {_OFFSETS} reorders the target's lm_head, which it shares")
    return ordered, None if in_order else order


def _check_mask(path: Path, mask: Tensor, ids: Tensor) -> None:
    """Raise ValueError unless `t2d`, a flag for each token of the target, agrees with `d2t`."""
    marked = torch.nonzero(mask.flatten() != 0).flatten()
    if torch.equal(marked, ids):
        return
    odd = sorted(set(marked.tolist()) ^ set(ids.tolist()))
    raise ValueError(
        f"{path}: {_MASK} marks {len(marked)} tokens, {_OFFSETS} has {len(ids)}; they disagree "
        f"about {len(odd)}, of which the first is token {odd[0]}"
    )
