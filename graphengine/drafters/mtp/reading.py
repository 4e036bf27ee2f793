"""Reads and checks draft modules: a checkpoint's `config.json`, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from graphengine.drafters.mtp.layer import LAYOUTS, MtpConfig, MtpLayout, allocate_mtp_weights
from graphengine.models.blocks.mla import LatentAttention
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.kv_scales import is_kv_scale
from graphengine.models.composition import attention_of, experts_of
from graphengine.models.contract import ModelConfig
from graphengine.models.decoder import as_decoder
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import MTP_KEYS, language_model, read_keys, unsupported
from graphengine.models.quantised.config import quantisation_of
from graphengine.models.quantised.filling import names_of_packed
from graphengine.models.quantised.forms import stored_forms
from graphengine.options.checks import some

_LATENT, _EXPERTS = "latent attention (MLA)", "experts (MoE)"
# Tensor names in a decoder layer that show which parts it has.
_KINDS = {
    "self_attn.kv_a_proj": _LATENT,
    "self_attn.kv_b_proj": _LATENT,
    "self_attn.q_a_proj": _LATENT,
    "mlp.experts.": _EXPERTS,
    "mlp.shared_expert": _EXPERTS,
    "mlp.gate.": _EXPERTS,
}


def read_mtp_config(checkpoint: Checkpoint) -> MtpConfig:
    """The draft modules of a checkpoint, from its `config.json` and the names of its tensors.

    ValueError, with the expected names and the names found, if there is no module, if modules are
    missing or incomplete, or if they have tensors that a decoder layer does not have.
    """
    names = checkpoint.tensors
    target = read_model_config(checkpoint.config)
    layers = target.num_layers
    found = {layout.name: layout.prefixes(names, layers) for layout in LAYOUTS}
    layout = next((layout for layout in LAYOUTS if found[layout.name]), None)
    if layout is None:
        raise ValueError(_no_module(checkpoint, target))
    prefixes = found[layout.name]
    settings = read_keys(language_model(checkpoint.config), MTP_KEYS)
    _check_settings(checkpoint, settings, layout, len(prefixes))
    experts = _expert_modules(checkpoint, target, layout, prefixes)
    _check_feed_forwards(settings["mtp_mlp_layer_types"], experts, len(prefixes))
    # `_check_settings` has refused other types.
    full = settings["mtp_layer_types"] is not None
    mtp = MtpConfig.of_target(target, layout, prefixes, experts, full_attention=full)
    mtp = mtp.named_as(names)
    quantisation = quantisation_of(checkpoint)
    if quantisation is not None:
        linears = allocate_mtp_weights(mtp, device="meta", dtype=torch.float32).linears()
        mtp = mtp.stored_as(stored_forms(checkpoint, quantisation, linears, may_be_plain=True))
    _check_names(checkpoint, mtp)
    return mtp


def _no_module(checkpoint: Checkpoint, target: ModelConfig) -> str:
    layers = target.num_layers
    wanted = " or ".join(f"{layout.first_name(layers)} ({layout.name})" for layout in LAYOUTS)
    own = target.allocate(device="meta", dtype=torch.float32).named()
    beside = sorted(checkpoint.tensors.keys() - own.keys())
    return (
        f"{checkpoint.path} has no draft module (MTP): neither {wanted}; it is a "
        f"{target.architecture} of {layers} layers, and beside its own weights it has "
        f"{some(beside) if beside else 'nothing'}"
    )


def _check_settings(
    checkpoint: Checkpoint, settings: Mapping[str, Any], layout: MtpLayout, found: int
) -> None:
    """Raise ValueError if `config.json` describes other modules than those that were found."""
    told = settings["num_nextn_predict_layers"]
    if told is not None and told != found:
        raise ValueError(
            f"{checkpoint.path} has {found} draft modules of the layout {layout.name}, but "
            f"num_nextn_predict_layers={told!r}"
        )
    for name, supported in (
        ("mtp_hidden_states_first", layout.hidden_first),
        ("mtp_use_dedicated_embeddings", False),
    ):
        if settings[name] not in (None, supported):
            raise unsupported(name, settings[name], f"{supported} in the layout {layout.name}")
    if settings["chain_hidden_post_norm"] is not None:
        # A config with this key, whatever its value, has no separate norm after each module.
        raise unsupported(
            "chain_hidden_post_norm",
            settings["chain_hidden_post_norm"],
            f"null: the layout {layout.name} hands on what each module's own norm makes",
        )
    types = settings["mtp_layer_types"]
    if any(given != "full_attention" for given in types or ()):
        raise unsupported("mtp_layer_types", types, "'full_attention' in every layer")


def _expert_modules(
    checkpoint: Checkpoint, target: ModelConfig, layout: MtpLayout, prefixes: tuple[str, ...]
) -> tuple[int, ...]:
    """The modules that have experts.

    ValueError for parts whose sizes the target does not have: it gives the reason, rather than a
    list of names.
    """
    there, decoder = set(), as_decoder(target)
    if decoder is not None:
        there |= set() if experts_of(decoder) is None else {_EXPERTS}
        there |= {_LATENT} if isinstance(attention_of(decoder), LatentAttention) else set()
    found: list[int] = []
    for index, prefix in enumerate(prefixes):
        layer = prefix + layout.layer
        for part, kind in _KINDS.items():
            names = [name for name in checkpoint.tensors if name.startswith(layer + part)]
            if names and kind not in there:
                raise ValueError(
                    f"{checkpoint.path} has a draft module with {kind}, and its target, a "
                    f"{target.architecture}, has no layer with them: {some(sorted(names))}"
                )
            if names and kind == _EXPERTS and index not in found:
                found.append(index)
    return tuple(found)


def _check_feed_forwards(told: list[str] | None, experts: Collection[int], modules: int) -> None:
    """Raise ValueError if `config.json` gives modules other feed-forwards than they have.

    experts  the modules that have experts
    """
    found = ["sparse" if index in experts else "dense" for index in range(modules)]
    if told is not None and told != found:
        raise unsupported("mtp_mlp_layer_types", told, f"{found}, as the tensors have it")


def _check_names(checkpoint: Checkpoint, config: MtpConfig) -> None:
    """Raise ValueError unless every tensor of the modules exists and every one found is understood.

    A tensor that nothing reads means that the module computes something else.
    """
    layout, names = config.layout, checkpoint.tensors
    weights = allocate_mtp_weights(config, device="meta", dtype=torch.float32)
    wanted = weights.named().keys()
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(
            f"{checkpoint.path} has an incomplete draft module of the layout {layout.name}: it "
            f"lacks {some(missing)}"
        )
    packed = names_of_packed(checkpoint, weights.linears())
    # Copies of the target's tensors may be in any format: they are not read.
    ignored = {
        (prefix + name).rpartition(".")[0] for prefix in config.prefixes for name in layout.ignored
    }
    unknown = [
        name
        for name in names
        if name.startswith(config.prefixes)
        and name not in wanted
        and name not in packed
        and name.rpartition(".")[0] not in ignored
        and not is_kv_scale(name)
    ]
    if unknown:
        raise ValueError(
            f"{checkpoint.path} has a draft module of the layout {layout.name} with tensors that "
            f"a {config.decoder.architecture} layer does not have: {some(sorted(unknown))}"
        )
