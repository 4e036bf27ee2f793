"""What follows from a model's lists: of its linears, its layers' states, and its weights."""

from __future__ import annotations

import pickle

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
from graphengine.models.states import (
    Paged,
    Recurrent,
    StateTensors,
    cache_shape,
    recurrent_states,
    side_by_side,
)

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


def test_blocks_of_several_shapes_lie_side_by_side() -> None:
    """A layer's part of them is a view with the layer's own shape."""
    wide, narrow = Paged(2, (2, 20), window=5), Paged(2, (1, 6))
    states = ((wide,), (narrow,), (wide,))
    assert cache_shape(states, 8) == (1, 2 * 8 * (40 + 6 + 40))
    assert cache_shape(states, 8, without={1}) == (2, 2, 8, 2, 20)
    assert cache_shape(states, 8, without={0, 2}) == (1, 2, 8, 1, 6)
    assert cache_shape(states, 8, without={0, 1, 2}) == (0, 2, 8, 2, 20)
    cache, table = torch.zeros(1, 3, 2 * 8 * 86), torch.zeros(2, 4, dtype=torch.int32)
    held = StateTensors(cache, table, apart=side_by_side(states))
    for value, (kv, _) in enumerate(held.paged(), 1):
        kv.fill_(value)
    assert [kv.shape[1:] for kv, _ in held.paged()] == [(2, 8, 2, 20), (2, 8, 1, 6), (2, 8, 2, 20)]
    assert cache[0, 1].unique_consecutive(return_counts=True)[1].tolist() == [640, 96, 640]
    assert [each.shape for each in held.dense()] == [(1, *kv.shape) for kv, _ in held.paged()]


def test_a_model_without_paged_layers_has_no_cache() -> None:
    with pytest.raises(ValueError, match="must have a paged layer: 2 layers have none"):
        cache_shape(((), (Recurrent("state", (1,)),)), 16)


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
