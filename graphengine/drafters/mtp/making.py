"""Makes the drafters of MTP modules from a mode's options, or says why none fits."""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.drafters.base import Drafter
from graphengine.drafters.modules.making import module_drafter
from graphengine.drafters.mtp.layer import MtpConfig, allocate_mtp_weights
from graphengine.drafters.mtp.module import MtpModules
from graphengine.drafters.mtp.reading import read_mtp_config
from graphengine.drafters.mtp.vanilla import VanillaDrafter, vanilla_lanes
from graphengine.drafters.target import Target
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_eos_ids
from graphengine.models.contract import ModelConfig
from graphengine.models.linears import WeightForms
from graphengine.models.quantised.forms import rounded_forms
from graphengine.models.quantised.schemes import HEAD
from graphengine.options.drafts.draft_vocabulary import (
    DraftVocabulary,
    frequent_tokens,
    read_offsets,
    target_ids,
)
from graphengine.paths import read_text
from graphengine.speculative import MTP
from graphengine.text.tokenizer import Tokenizer


def make_mtp(options: MTP, target: Target) -> Drafter:
    """The drafter of the modules that the target's checkpoint has."""
    mtp = beside_target(read_mtp_config(target.checkpoint), target.config, target.model)
    if options.style == "vanilla":
        _check_vanilla(options.k, mtp.modules, target.config.draft_rows)
    wanted, vocabulary = options.draft_vocab, None
    if wanted is not None:
        vocabulary = draft_vocabulary(wanted, target.checkpoint, target.model)
    if options.style == "vanilla":
        modules = _modules(target, mtp.first(options.k), vocabulary)
        return VanillaDrafter(modules, options.k, options.feed)
    size = target.model.vocab_size if vocabulary is None else vocabulary.numel()
    modules = _modules(target, mtp.first(1), vocabulary)
    return module_drafter(modules, options, target.config, target.model, size)


def _modules(target: Target, config: MtpConfig, vocabulary: Tensor | None) -> MtpModules:
    """This rank's part of the draft modules."""
    return MtpModules(
        config,
        vocabulary,
        target.share,
        expert_parallel=target.config.expert_parallel,
        data_parallel=target.config.data_parallel > 1,
    )


def beside_target(mtp: MtpConfig, config: EngineConfig, model: ModelConfig) -> MtpConfig:
    """The modules, with weights rounded if the target's are, and lm_head stored as the target's."""
    forms = dict(mtp.forms)
    if config.quantize is not None:
        linears = allocate_mtp_weights(mtp, device="meta", dtype=torch.float32).linears()
        forms |= rounded_forms(linears, config.quantize, head=False)
    if HEAD in model.forms:
        forms[HEAD] = model.forms[HEAD]
    return mtp.stored_as(WeightForms(forms))


def _check_vanilla(k: int, modules: int, rows: int) -> None:
    """ValueError unless there are k modules, and the kernels hold the lanes of the last one."""
    if k > modules:
        raise ValueError(
            f"vanilla MTP with k={k} needs {k} modules, the checkpoint has {modules}; "
            f"style='eagle' runs one of them k times"
        )
    width = vanilla_lanes(k)
    if rows * width > MAX_LANES:
        fitting = MAX_LANES // width
        raise ValueError(
            f"vanilla MTP with k={k} feeds {rows * width} tokens of {rows} rows to the last "
            f"module, {width} a row, and at most {MAX_LANES} fit: max_batch={fitting} does with "
            f"k={k}, or a larger one with a bucket of at most {fitting} rows and a gate whose "
            f"max_live it serves"
        )


def draft_vocabulary(
    options: DraftVocabulary, checkpoint: Checkpoint, model: ModelConfig
) -> Tensor:
    """The target ids that may be drafted: int64 [D] on the CPU, ascending."""
    if options.tensor is not None:
        info = checkpoint.tensors.get(options.tensor)
        if info is None:
            raise ValueError(f"{checkpoint.path} has no tensor {options.tensor!r} of offsets")
        offsets = read_offsets(info.file, options.tensor, model.vocab_size)
        return target_ids(offsets, model.vocab_size, options.tensor)
    assert options.text is not None and options.size is not None
    if not checkpoint.has_tokenizer:
        raise ValueError(f"{checkpoint.path} has no tokenizer.json to split {options.text} with")
    text = read_text(options.text, "draft_vocab text")
    tokenizer = Tokenizer.from_directory(checkpoint.path)
    ids = tokenizer.encode(text)
    always = read_eos_ids(checkpoint, model, tokenizer.eos_token_id)
    return frequent_tokens(ids, options.size, model.vocab_size, always=always)
