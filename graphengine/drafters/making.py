"""Makes the drafter of a mode's options for a checkpoint, or says why none fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphengine.config import EngineConfig
from graphengine.demo import block_path, eagle3_path
from graphengine.drafters.base import Drafter
from graphengine.drafters.block import BlockDrafter
from graphengine.drafters.confidence import drafts_from
from graphengine.drafters.corpus import read_corpus
from graphengine.drafters.draft_model import DraftModelDrafter
from graphengine.drafters.dynamic_growth import DynamicGrowth
from graphengine.drafters.eagle import EagleDrafter
from graphengine.drafters.eagle3 import Eagle3Module
from graphengine.drafters.hidden_states import HiddenStatesDrafter
from graphengine.drafters.modules import DraftModules
from graphengine.drafters.mtp import MtpModules
from graphengine.drafters.needs import DraftNeeds
from graphengine.drafters.ngram import NGramDrafter
from graphengine.drafters.none import NoDrafter
from graphengine.drafters.own_graph import OwnGraphEagle
from graphengine.drafters.suffix import SuffixDrafter, supported_drafts
from graphengine.drafters.tree_eagle import TreeEagle
from graphengine.drafters.tree_growth import StaticGrowth
from graphengine.drafters.user import UserDrafter
from graphengine.drafters.vanilla import VanillaDrafter, vanilla_lanes
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.models.checkpoints.checkpoint import DEMO, Checkpoint
from graphengine.models.checkpoints.stored import read_eos_ids, read_model
from graphengine.models.contract import WHOLE, ModelConfig, Share
from graphengine.models.drafting.dflash_reading import read_dflash
from graphengine.models.drafting.eagle3_reading import read_eagle3
from graphengine.models.drafting.mtp import MtpConfig, allocate_mtp_weights
from graphengine.models.drafting.mtp_reading import read_mtp_config
from graphengine.models.linears import WeightForms
from graphengine.models.quantised.forms import rounded_forms
from graphengine.models.quantised.schemes import HEAD
from graphengine.models.states import paged_states, recurrent_states
from graphengine.options.draft_trees import DynamicTree, Tree
from graphengine.options.draft_vocabulary import (
    DraftVocabulary,
    frequent_tokens,
    read_offsets,
    target_ids,
)
from graphengine.paths import read_text
from graphengine.speculative import (
    MTP,
    DFlash,
    DraftModel,
    Eagle3,
    Mode,
    NGram,
    SaveHiddenStates,
    Suffix,
    UserProvided,
)
from graphengine.text.tokenizer import Tokenizer


class Target(NamedTuple):
    """What a drafter is made for.

    share  this rank's share of the model; `model` has its sizes
    """

    config: EngineConfig
    checkpoint: Checkpoint
    model: ModelConfig
    share: Share = WHOLE

    @property
    def split(self) -> Share:
        """This rank's share of layers without experts."""
        return WHOLE if self.config.data_parallel > 1 else self.share

    def modules(self, config: MtpConfig, vocabulary: Tensor | None) -> MtpModules:
        """This rank's part of the draft modules."""
        return MtpModules(
            config,
            vocabulary,
            self.share,
            expert_parallel=self.config.expert_parallel,
            data_parallel=self.config.data_parallel > 1,
        )


Maker = Callable[[Any, Target], Drafter]


def make_drafter(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, share: Share = WHOLE
) -> Drafter:
    """The drafter of `config.speculative` for the target in `checkpoint`, nothing allocated yet.

    share  this rank's share of the target; `model` has its sizes

    `NoDrafter` where the engine does not speculate. ValueError says why a mode does not fit.
    """
    mode = config.mode
    if mode is None:
        return NoDrafter()
    maker = MAKERS.get(type(mode))
    if maker is None:
        raise ValueError(f"speculative={mode!r}: no drafter is made of a {type(mode).__name__}")
    drafter = maker(mode, Target(config, checkpoint, model, share))
    _check_agreement(mode, drafter.needs)
    return drafter


def _check_agreement(mode: Mode, needs: DraftNeeds) -> None:
    """Assert that mode and needs agree: the config follows the mode, the engine the needs."""
    assert needs.length == mode.k, f"{needs.length=} of {mode=}"
    assert needs.prompts_only == mode.whole_prompts, f"{needs.prompts_only=} of {mode=}"
    assert mode.lockstep or not needs.lockstep, f"{needs=} of {mode=}, which has no lockstep"


def _ngram(options: NGram, target: Target) -> Drafter:
    return NGramDrafter(options.k, options.max_n)


def _suffix(options: Suffix, target: Target) -> Drafter:
    corpus = None
    if options.corpus is not None:
        corpus = read_corpus(options.corpus, target.checkpoint, target.model.vocab_size)
    supported = supported_drafts(options.k, options.factor, options.max_match)
    return SuffixDrafter(options.k, supported, corpus)


def _user(options: UserProvided, target: Target) -> Drafter:
    return UserDrafter(options.k)


def _hidden_states(options: SaveHiddenStates, target: Target) -> Drafter:
    return HiddenStatesDrafter(options, target.model)


def _mtp(options: MTP, target: Target) -> Drafter:
    mtp = beside_target(read_mtp_config(target.checkpoint), target.config, target.model)
    if options.style == "vanilla":
        _check_vanilla(options.k, mtp.modules, target.config.draft_rows)
    wanted, vocabulary = options.draft_vocab, None
    if wanted is not None:
        vocabulary = draft_vocabulary(wanted, target.checkpoint, target.model)
    if options.style == "vanilla":
        modules = target.modules(mtp.first(options.k), vocabulary)
        return VanillaDrafter(modules, options.k, options.feed)
    size = target.model.vocab_size if vocabulary is None else vocabulary.numel()
    modules = target.modules(mtp.first(1), vocabulary)
    return module_drafter(modules, options, target.config, target.model, size)


def module_drafter(
    modules: DraftModules,
    options: MTP | Eagle3,
    config: EngineConfig,
    model: ModelConfig,
    vocabulary: int,
) -> Drafter:
    """The drafter of one module that scores `vocabulary` tokens, with the options of its chain or
    tree.

    ValueError where the target's layers, the engine's options or the tokens do not go with trees.
    """
    tree = options.shape
    if tree is None:
        eagle = OwnGraphEagle if options.own_graph else EagleDrafter
        return eagle(modules, options.k, drafts_from(options.min_confidence))
    _check_trees(config, model)
    _check_ranks(tree, vocabulary)
    if isinstance(tree, DynamicTree):
        return TreeEagle(modules, DynamicGrowth(tree, config.draft_rows))
    return TreeEagle(modules, StaticGrowth(tree, config.draft_rows))


def beside_target(mtp: MtpConfig, config: EngineConfig, model: ModelConfig) -> MtpConfig:
    """The modules, with weights rounded if the target's are, and lm_head stored as the target's."""
    forms = dict(mtp.forms)
    if config.quantize is not None:
        linears = allocate_mtp_weights(mtp, device="meta", dtype=torch.float32).linears()
        forms |= rounded_forms(linears, config.quantize, head=False)
    if HEAD in model.forms:
        forms[HEAD] = model.forms[HEAD]
    return mtp.stored_as(WeightForms(forms))


def _check_trees(config: EngineConfig, model: ModelConfig) -> None:
    """ValueError unless the target's layers and the engine's options go with trees of drafts."""
    states = model.states
    recurrent, paged = recurrent_states(states), paged_states(states)
    reasons = {
        f"{len(recurrent)} recurrent states, which follow a chain": bool(recurrent),
        f"latent attention in {len(paged)} layers": any(not state.kv_heads for state in paged),
        f"windows of {max((state.window for state in paged), default=0)} tokens": any(
            state.window for state in paged
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(
                f"trees of drafts are for layers with keys and values of every token: a "
                f"{model.architecture} has {reason}"
            )
    if config.relaxed_acceptance is not None:
        raise ValueError("relaxed_acceptance is for chains of drafts, not for trees")
    if config.record_routing:
        raise ValueError("record_routing=True is for chains of drafts, not for trees")


def _check_ranks(tree: Tree, vocabulary: int) -> None:
    """ValueError if the tree has nodes of a higher rank than `vocabulary` tokens have."""
    if tree.drawn > vocabulary:
        raise ValueError(
            f"the tree has nodes of rank {tree.drawn - 1}, and the draft vocabulary {vocabulary} "
            f"tokens"
        )


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


def _draft_model(options: DraftModel, target: Target) -> Drafter:
    config, target_checkpoint, model, _ = target
    checkpoint = Checkpoint.open(options.path)
    if config.prompt_embeds:
        raise ValueError(
            f"prompt_embeds=True, but the draft model {checkpoint.path} has embeddings of its own, "
            f"and nothing for those of a prompt: other drafters take them"
        )
    draft = read_model(checkpoint)
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"the draft model {checkpoint.path} has {draft.vocab_size} tokens, the target "
            f"{model.vocab_size}: they must share a tokenizer"
        )
    if _token_ids(checkpoint) != _token_ids(target_checkpoint):
        raise ValueError(
            f"the draft model {checkpoint.path} has another tokenizer than "
            f"{target_checkpoint.path}: a token id must mean the same to both"
        )
    wanted = config.sequence_limit(model.max_positions)
    if draft.max_positions < wanted:
        raise ValueError(
            f"the draft model {checkpoint.path} has max_position_embeddings="
            f"{draft.max_positions}, and max_seq_len is {wanted}"
        )
    lanes = DraftModelDrafter.lanes_of(config.max_batch)
    if lanes > MAX_LANES:
        raise ValueError(
            f"a draft model reads two tokens of each row, {lanes} of max_batch={config.max_batch}, "
            f"and at most {MAX_LANES} fit, whatever the gate: max_batch={MAX_LANES // 2} does"
        )
    return DraftModelDrafter(draft, options.k, checkpoint, drafts_from(options.min_confidence))


def _eagle3(options: Eagle3, target: Target) -> Drafter:
    checkpoint = Checkpoint.open(eagle3_path() if options.path == DEMO else options.path)
    read = read_eagle3(checkpoint, target.model, options.layers)
    width, wanted = read.config.hidden_size, target.model.hidden_size
    if target.config.prompt_embeds and width != wanted:
        raise ValueError(
            f"prompt_embeds=True, but the embeddings of {checkpoint.path} have {width} values, and "
            f"those of a prompt {wanted}, as the model's: other drafters take them"
        )
    module = Eagle3Module(read, checkpoint, target.model, target.split)
    size = read.config.draft_vocabulary
    return module_drafter(module, options, target.config, target.model, size)


def _dflash(options: DFlash, target: Target) -> Drafter:
    checkpoint = Checkpoint.open(block_path() if options.path == DEMO else options.path)
    read = read_dflash(checkpoint, target.model, options.layers)
    if options.k > read.most_drafts:
        raise ValueError(
            f"k={options.k} drafts a step, and {checkpoint.path} is trained for blocks of "
            f"{read.trained_block} tokens, which draft {read.most_drafts}"
        )
    return BlockDrafter(read, checkpoint, target.model, options.k, target.share)


def _token_ids(checkpoint: Checkpoint) -> object:
    """The tokens of `tokenizer.json` with their ids; None where there is none."""
    if not checkpoint.has_tokenizer:
        return None
    parsed = json.loads((checkpoint.path / "tokenizer.json").read_text(encoding="utf-8"))
    return parsed.get("model", {}).get("vocab"), parsed.get("added_tokens")


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


MAKERS: dict[type[Mode], Maker] = {
    MTP: _mtp,
    NGram: _ngram,
    Suffix: _suffix,
    DraftModel: _draft_model,
    Eagle3: _eagle3,
    DFlash: _dflash,
    UserProvided: _user,
    SaveHiddenStates: _hidden_states,
}
"""The drafter of each mode's options."""
