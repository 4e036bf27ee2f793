"""Makes the drafter of one module: of chains, or of the trees that its options name."""

from __future__ import annotations

from graphengine.config import EngineConfig
from graphengine.drafters.base import Drafter
from graphengine.drafters.confidence import drafts_from
from graphengine.drafters.modules.base import DraftModules
from graphengine.drafters.modules.chain import EagleDrafter
from graphengine.drafters.modules.dynamic_growth import DynamicGrowth
from graphengine.drafters.modules.tree import TreeEagle
from graphengine.drafters.modules.tree_growth import StaticGrowth
from graphengine.models.contract import ModelConfig
from graphengine.models.states import paged_states, recurrent_states
from graphengine.options.drafts.draft_trees import DynamicTree, Tree
from graphengine.speculative import ModuleMode


def module_drafter(
    modules: DraftModules,
    options: ModuleMode,
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
        return EagleDrafter(modules, options.k, drafts_from(options.min_confidence))
    _check_trees(config, model)
    _check_ranks(tree, vocabulary)
    if isinstance(tree, DynamicTree):
        return TreeEagle(modules, DynamicGrowth(tree, config.drafted_rows))
    return TreeEagle(modules, StaticGrowth(tree, config.drafted_rows))


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
