"""A checkpoint's model: its configuration and its tensors, checked against each other.

If the tensors contradict the config, or if nothing here reads tensors that the model computes with,
an error is raised before anything is allocated.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence

import torch

from graphengine.config import RoundedKind, StateDtype
from graphengine.models.checkpoints.checkpoint import Checkpoint, Progress, eos_token_ids
from graphengine.models.checkpoints.gguf.config import with_metadata_keys
from graphengine.models.checkpoints.gguf.file import is_gguf
from graphengine.models.checkpoints.kv_scales import is_kv_scale
from graphengine.models.contract import ModelConfig, ModelWeights
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.quantised.config import quantisation_of
from graphengine.models.quantised.filling import (
    Reader,
    dequantised_names,
    fill_packed,
    names_of_packed,
    packed_names,
    rounding_reader,
    stored_reader,
)
from graphengine.models.quantised.forms import parted_names, rounded_forms, stored_forms
from graphengine.models.quantised.schemes import HEAD, Quantisation
from graphengine.models.weights import Destinations, StoredLinear
from graphengine.options.checks import some
from graphengine.options.devices import DTYPES

log = logging.getLogger(__name__)

_HEAD = f"{HEAD}.weight"
# Tensors that the usual formats store along with quantised weights.
_QUANTISED = re.compile(
    r"(.*_)?scales?(_inv|_\d)?|weight_scale.*|.*_?zero_points?|weight_(packed|shape|g_idx)|qweight|"
    r"qzeros|g_idx|SCB|weight_format|absmax|quant_map|quant_state.*|nested_(absmax|quant_map)"
)
# Buffers that old checkpoints store along with weights: functions of the config, or masks.
_BUFFERS = re.compile(
    r"(.*\.)?rotary_emb\..*|.*\.masked_bias|(.*\.)?position_ids|.*\.attn\.bias|.*\.attention\.bias"
)
_BUFFER_DTYPES = (torch.bool, torch.int16, torch.int32, torch.int64)
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d{1,9})\.")
# In a layer past the model's own, this name marks a draft module, as in DeepSeek's checkpoints.
_DRAFT_LAYER = re.compile(_LAYER.pattern + r"eh_proj\.")
_DRAFT_MODULES = ("mtp.", "model.mtp_layers.", "medusa.", "medusa_head.")
# Tensors next to a language model that do not affect its tokens: towers for images and sound and
# their projectors, codecs that turn codes into sound, heads of text of models that say sound alone,
# value heads of reinforcement learning, and a draft vocabulary.
_BESIDE = re.compile(
    r"(thinker|code2wav|(talker\.)?(text|hidden)_projection|speaker_encoder)\..*|"
    r"model\.text_embedding\..*|audio_encoder\..*|"
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|audio_model|multi_modal_projector|mm_projector|"
    r"connector|codec_model|embed_vision|embed_audio|vision_embedder)\..*|"
    r"text_lm_head\..*|v_head\..*|d2t|t2d"
)


def _read_config(checkpoint: Checkpoint) -> ModelConfig:
    """The config that the checkpoint states. ValueError names the keys, those of GGUF too."""
    try:
        return read_model_config(checkpoint.config)
    except ValueError as error:
        if not is_gguf(checkpoint.path):
            raise
        message = with_metadata_keys(str(error), checkpoint.config)
        raise ValueError(f"{checkpoint.path}: {message}") from error


def read_model(
    checkpoint: Checkpoint, quantize: RoundedKind | None = None, *, head: bool = False
) -> ModelConfig:
    """The model's configuration, checked against the names, shapes and dtypes of its tensors.

    quantize  format that weights will be rounded to; with `head` also lm_head

    Logs unknown keys of `config.json`, and a LoRA adapter in the same folder. ValueError names what
    is missing, unsupported or contradictory.
    """
    config = _read_config(checkpoint).named_as(checkpoint.tensors)
    quantisation = quantisation_of(checkpoint)
    packed: list[StoredLinear] = []
    if quantisation is not None:
        for note in quantisation.notes:
            log.info("%s: %s", checkpoint.path, note)
        config = _with_own_head(checkpoint, quantisation, config)
        config = config.parted(parted_names(quantisation, _meta(config).linears()))
        linears = _meta(config).linears()
        config = config.stored_as(stored_forms(checkpoint, quantisation, linears))
        packed = _meta(config).linears()
    if quantisation is not None and quantize is not None:
        raise ValueError(
            f"quantize={quantize!r} is for weights of 16 or 32 bits, and those of "
            f"{checkpoint.path} are quantised ({quantisation.method})"
        )
    unknown = unknown_keys(checkpoint.config)
    if unknown:
        log.warning("%s: config.json has unknown keys: %s", checkpoint.path, ", ".join(unknown))
    if checkpoint.has_adapter:
        log.warning(
            "%s has adapter_config.json beside its weights: they are used as they are, without the "
            "LoRA adapter",
            checkpoint.path,
        )
    stored = checkpoint.tensors
    used = destinations(checkpoint, _meta(config))
    used = _without(used, dequantised_names(checkpoint, packed))
    unused = sorted(stored.keys() - used.keys() - names_of_packed(checkpoint, packed))
    # Checked first: an unread scale explains more than the weights that are missing in its place.
    _refuse_quantised(checkpoint, quantisation, config, unused)
    checkpoint.check(used)
    empty = _empty_biases(checkpoint, packed_names(packed), unused)
    _refuse_unknown(checkpoint, config, [name for name in unused if name not in empty])
    if config.tie_embeddings and _embedding(config) in stored and _HEAD in stored:
        config = _tied_or_not(checkpoint, config)
    if quantize is not None:
        config = _rounded(checkpoint, config, quantize, head)
    return config


def with_state_dtype(config: ModelConfig, dtype: StateDtype) -> ModelConfig:
    """The model with the states of its recurrent heads in this dtype; "auto": unchanged.

    ValueError for a model without such states.
    """
    if dtype == "auto":
        return config
    changed = config.with_state_dtype(DTYPES[dtype])
    if changed is config:
        raise ValueError(
            f"state_dtype={dtype!r}, but no layer of this {config.architecture} has heads with "
            f"states"
        )
    return changed


def _rounded(
    checkpoint: Checkpoint, config: ModelConfig, quantize: RoundedKind, head: bool
) -> ModelConfig:
    try:
        return config.stored_as(rounded_forms(_meta(config).linears(), quantize, head=head))
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error


def _meta(config: ModelConfig) -> ModelWeights:
    """The model's weights on the meta device, for their names, shapes and kinds."""
    return config.allocate(device="meta", dtype=torch.float32)


def load_weights(
    checkpoint: Checkpoint,
    wanted: Destinations,
    linears: Sequence[StoredLinear],
    embedding: str,
    progress: Progress | None = None,
) -> list[str]:
    """Fill `wanted` and the packed linears from the checkpoint.

    embedding  the model's `embedding_name`
    progress   called with (bytes read, bytes to read), first with 0 read

    Packed weights are as stored, or rounded if they are stored in 16 or 32 bits. Linears that are
    `plain` but stored in 8 or 4 bits are dequantised, and rounded to their dtype.
    Returns the sorted names of the checkpoint's tensors that were not read. ValueError as in
    `Checkpoint.load` and `read_weight`.
    """
    sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    names = names_of_packed(checkpoint, linears)
    dequantised = dequantised_names(checkpoint, linears)
    wanted = _without(wanted, dequantised)
    plain, done = sum(sizes[name] for name in wanted if name in sizes), 0
    total = plain + sum(sizes[name] for name in names)

    def note(read: Sequence[str]) -> None:
        nonlocal done
        done += sum(sizes[name] for name in read)
        if progress is not None:
            progress(min(plain + done, total), total)

    unused = checkpoint.load(
        wanted, None if progress is None else lambda read, _: progress(read, total)
    )
    reader = reader_of(checkpoint, embedding)
    used = fill_packed(checkpoint.path, linears, reader, note, dequantised)
    return sorted(set(unused) - used)


def reader_of(checkpoint: Checkpoint, embedding: str) -> Reader:
    """A reader of packed weights: as stored, or rounded if they are stored in 16 or 32 bits.

    embedding  the model's `embedding_name`
    """
    quantisation = quantisation_of(checkpoint)
    if quantisation is None:
        return rounding_reader(checkpoint, embedding)
    return stored_reader(checkpoint, quantisation)


def _without(wanted: Destinations, linears: Collection[str]) -> Destinations:
    """The destinations that are not weights of these linears."""
    left_out = {f"{name}.weight" for name in linears}
    return {name: wanted[name] for name in wanted if name not in left_out}


def _embedding(config: ModelConfig) -> str:
    return f"{config.embedding_name}.weight"


def destinations(checkpoint: Checkpoint, weights: ModelWeights) -> Destinations:
    """Where the checkpoint's tensors go: the tensors of `weights`, by their stored names."""
    names = weights.destinations()
    name = _embedding(weights.config)
    if weights.config.tie_embeddings and name not in checkpoint.tensors:
        # Either of the two tensors is enough.
        embedding = names.pop(name)
        names[_HEAD if _HEAD in checkpoint.tensors else name] = embedding
    return names


def read_eos_ids(
    checkpoint: Checkpoint, config: ModelConfig, of_tokenizer: int | None = None
) -> tuple[int, ...]:
    """The end-of-sequence ids in the model's vocabulary; others are left out, with a warning.

    They come from the configs and from `of_tokenizer`, the id of the tokenizer's `eos_token`: a
    checkpoint's files may name different ones. A tokenizer may have more tokens than the model:
    transformers loads both.
    """
    ids = [*eos_token_ids(checkpoint)]
    if of_tokenizer is not None and of_tokenizer not in ids:
        ids.append(of_tokenizer)
    beyond = [token for token in ids if token >= config.vocab_size]
    if beyond:
        log.warning(
            "%s: end-of-sequence ids %s are left out: the vocabulary has %d tokens",
            checkpoint.path,
            beyond,
            config.vocab_size,
        )
    return tuple(token for token in ids if token < config.vocab_size)


def _tied_or_not(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """The config if embedding and lm_head are both stored: tied if equal, as in transformers."""
    name = _embedding(config)
    if checkpoint.have_equal_values(name, _HEAD):
        return config
    log.warning(
        "%s: config.json has tie_word_embeddings=true, but %s differs from %s: both are used",
        checkpoint.path,
        _HEAD,
        name,
    )
    untied = config.untied()
    checkpoint.check(destinations(checkpoint, untied.allocate(device="meta", dtype=torch.float32)))
    return untied


def _with_own_head(
    checkpoint: Checkpoint, quantisation: Quantisation, config: ModelConfig
) -> ModelConfig:
    """The config, untied if a quantised lm_head is stored: the embedding is another tensor."""
    name = _HEAD.removesuffix(".weight")
    scheme = quantisation.scheme(name)
    scales = [] if scheme is None else [f"{name}.{end}" for end in scheme.scales]
    found = [each for each in scales if each in checkpoint.tensors]
    if not (config.tie_embeddings and found):
        return config
    log.warning(
        "%s: config.json has tie_word_embeddings=true, but %s is stored: %s is not %s",
        checkpoint.path,
        found[0],
        name,
        _embedding(config),
    )
    return config.untied()


def _refuse_quantised(
    checkpoint: Checkpoint,
    quantisation: Quantisation | None,
    config: ModelConfig,
    unused: Sequence[str],
) -> None:
    found = [
        name
        for name in unused
        if _QUANTISED.fullmatch(name.rpartition(".")[2])
        and not is_kv_scale(name)
        and not _BESIDE.fullmatch(name)
        and not name.startswith(_DRAFT_MODULES)
        and _layer(name) < config.num_layers
    ]
    if found:
        reason = (
            "and its configs say nothing of quantised weights"
            if quantisation is None
            else f"which are not those of the format that its configs tell ({quantisation.method})"
        )
        raise ValueError(
            f"{checkpoint.path} has {len(found)} tensors of quantised weights, {reason}: "
            f"{some(found)}"
        )


def _refuse_unknown(checkpoint: Checkpoint, config: ModelConfig, unused: Sequence[str]) -> None:
    """Raise ValueError for tensors that the model may need but nothing reads.

    That includes layers past the model's own, except draft modules.
    """
    modules = {
        _layer(name)
        for name in unused
        if _DRAFT_LAYER.match(name) and _layer(name) >= config.num_layers
    }
    unknown = [
        name
        for name in unused
        if _layer(name) not in modules
        and not name.startswith(_DRAFT_MODULES)
        and not _BESIDE.fullmatch(name)
        and not is_kv_scale(name)
        and not _BUFFERS.fullmatch(name)
        and not (_layer(name) >= 0 and checkpoint.tensors[name].dtype in _BUFFER_DTYPES)
        and not (name == _HEAD and config.tie_embeddings)
    ]
    if unknown:
        layers = config.num_layers
        beyond = any(_layer(name) >= layers for name in unknown)
        reason = f", with num_hidden_layers={layers}" if beyond else ""
        raise ValueError(
            f"{checkpoint.path} has {len(unknown)} tensors that a {config.architecture} of this "
            f"config does not have{reason}: {some(unknown)}"
        )


def _empty_biases(
    checkpoint: Checkpoint, linears: Collection[str], unused: Sequence[str]
) -> set[str]:
    """All-zero biases of these linears: GPTQ's tools write them for linears without a bias."""
    tensors = checkpoint.mapped()
    return {
        name
        for name in unused
        if name.endswith(".bias") and name.removesuffix(".bias") in linears
        if not bool(tensors[name].any())
    }


def _layer(name: str) -> int:
    """The layer that a tensor belongs to; -1 for none."""
    found = _LAYER.match(name)
    return int(found["layer"]) if found else -1
