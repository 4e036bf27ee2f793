"""What follows from a model's lists: of its linears, its layers' states, and its weights."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from checkpoints import toy_family
from graphengine.drafters.mtp.layer import LAYOUTS, MtpConfig
from graphengine.kernels.linear.plans import LinearPlan, residual_groups
from graphengine.models.families.registry import FAMILIES, read_model_config
from graphengine.models.linears import (
    ByLinear,
    Linear,
    LinearPlans,
    heuristic_plans,
    stream_groups,
)
from graphengine.models.plans.chains import new_chain
from graphengine.models.states import Paged, Recurrent, cache_shape, recurrent_states

TIED = {"num_hidden_layers": 2, "head_dim": 64, "tie_word_embeddings": True}
LINEARS = {"up": Linear("store", 4096, 512), "down": Linear("residual", 512, 4096)}


def test_values_are_found_by_name_in_the_order_of_the_step() -> None:
    plans = heuristic_plans(LINEARS, torch.bfloat16, "dot")
    assert list(plans) == ["up", "down"] and len(plans) == 2
    assert plans.family == "dot" and all(plan.family == "dot" for plan in plans.values())
    assert repr(plans).startswith("LinearPlans(up=LinearPlan(family='dot'")


def test_equal_values_are_equal_and_hash_alike() -> None:
    plans = heuristic_plans(LINEARS, torch.bfloat16, "dot")
    same = LinearPlans({name: plans[name] for name in ("down", "up")})
    other = plans.replace({"up": LinearPlan("dot", block_m=16, block_k=16)})
    assert plans == same and hash(plans) == hash(same)
    assert plans != other and len({plans, same, other}) == 2
    assert pickle.loads(pickle.dumps(plans)) == plans


def test_a_copy_changes_what_is_there_and_nothing_else() -> None:
    values = ByLinear({"up": 1, "down": 2})
    assert values.replace({"down": 3}) == {"up": 1, "down": 3} and values["down"] == 2
    with pytest.raises(KeyError, match=r"no linear head, side; there are up, down"):
        values.replace({"side": 1, "head": 2})


def test_the_stream_has_the_groups_that_its_last_writer_leaves() -> None:
    plans = LinearPlans(
        {
            "up": LinearPlan("dot", block_m=128, block_k=64),
            "down": LinearPlan("dot", block_m=64, block_k=64),
        }
    )
    assert stream_groups(LINEARS, plans) == residual_groups(plans["down"], 512)
    later = LINEARS | {"out": Linear("residual", 512, 64)}
    wide = LinearPlans({**plans, "out": LinearPlan("dot", block_m=256, block_k=64)})
    assert stream_groups(later, wide) == residual_groups(wide["out"], 512)
    assert stream_groups(later, wide) != stream_groups(LINEARS, plans)
    assert stream_groups({"up": LINEARS["up"]}, plans) == 1


KV = Paged(2, (4, 64))


def test_a_block_of_the_cache_is_of_all_paged_layers() -> None:
    state = Recurrent("state", (3, 5))
    hybrid = ((KV,), (state,), (), (KV, Recurrent("conv", (7,), torch.bfloat16)))
    assert cache_shape(hybrid, 16) == (2, 2, 16, 4, 64)
    # As latent attention has it: one entry a token.
    assert cache_shape(((Paged(1, (576,)),),), 64) == (1, 1, 64, 576)
    assert recurrent_states(hybrid) == {
        (1, "state"): state,
        (3, "conv"): Recurrent("conv", (7,), torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("states", "named"),
    [
        (((KV,), (Paged(2, (4, 80)),)), r"2 layers have .*\(4, 64\).*\(4, 80\)"),
        (((), (Recurrent("state", (1,)),)), "2 layers have none"),
    ],
)
def test_layers_of_several_shapes_or_none_share_no_cache(states: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"must share one shape of blocks.* {named}"):
        cache_shape(states, 16)


def test_a_weight_that_is_used_twice_counts_once() -> None:
    config = read_model_config(toy_family.CONFIG | {"architectures": ["LlamaForCausalLM"], **TIED})
    weights = config.allocate(device="meta", dtype=torch.float16)
    assert weights.lm_head is weights.embedding
    assert weights.nbytes == sum(tensor.nbytes for tensor in weights.named().values())
    untied = config.untied().allocate(device="meta", dtype=torch.float16)
    assert untied.nbytes - weights.nbytes == weights.embedding.nbytes
    assert untied.named().keys() - weights.named().keys() == {"lm_head.weight"}


def test_what_only_like_layers_have_is_refused_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft modules and the chains that tuning measures."""
    monkeypatch.setitem(FAMILIES, toy_family.ARCHITECTURE, toy_family.read_config)
    config = read_model_config(toy_family.CONFIG)
    with pytest.raises(ValueError, match=r"draft modules \(MTP\) of a ToyForCausalLM are not"):
        MtpConfig.of_target(config, LAYOUTS[0], ("mtp.",))
    with pytest.raises(ValueError, match=r"ToyForCausalLM with the linears .* not stored alike"):
        new_chain(config, layers=2, dtype=torch.float32, device=torch.device("cpu"))
