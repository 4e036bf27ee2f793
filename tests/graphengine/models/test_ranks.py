"""Two ranks, each a thread with half of every weight that the contract says is split, compute what
one rank with all of it does: they meet where a block's product is added to the residual stream, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from graphengine.kernels import (
    DecodeLanes,
    RopeConfig,
    gather_prefill,
    linear,
    new_residual,
    paged_prefill_attention,
)
from graphengine.models.blocks.streams import add_product
from graphengine.models.contract import DecodeLaunch, ModelWeights, Reduce, StoredWeights
from graphengine.models.decoder import DecoderConfig, DecoderModel
from graphengine.models.linears import heuristic_plans, stream_groups
from graphengine.models.mtp import (
    LAYOUTS,
    MtpConfig,
    MtpWeights,
    allocate_mtp_weights,
    mtp_decode,
    mtp_prefill,
    rope_of,
)
from graphengine.models.states import StateTensors, cache_shape

RANKS, SLOTS, BLOCK, LENGTH = 2, 2, 8, 32
CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=50,
    hidden_size=48,
    ffn_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    max_positions=LENGTH,
    rope=RopeConfig(),
    attention_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
SANDWICHED = replace(CONFIG, post_norms=True, norms_plus_one=True, activation="gelu_tanh")
MODULES = MtpConfig.of_target(CONFIG, LAYOUTS[0], ("mtp.",))

Result = TypeVar("Result")


def of_a_rank(config: DecoderConfig) -> DecoderConfig:
    """A rank's half of the heads and of the feed-forward's width."""
    return replace(
        config,
        num_heads=config.num_heads // RANKS,
        num_kv_heads=config.num_kv_heads // RANKS,
        ffn_size=config.ffn_size // RANKS,
    )


def fill(weights: StoredWeights) -> None:
    generator = torch.Generator().manual_seed(len(weights.tensors()))
    for name, tensor in weights.named().items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + ("norm" in name))


def split(whole: StoredWeights, parts: StoredWeights, rank: int) -> None:
    """Give a rank its part of each tensor, along the axis that the contract names."""
    stored = whole.stored()
    assert stored.keys() == parts.stored().keys()
    for name, part in parts.stored().items():
        tensor, axis, _ = stored[name]
        assert part.axis == axis
        given = tensor if axis is None else tensor.chunk(RANKS, axis)[rank]
        assert given.shape == part.tensor.shape, name
        part.tensor.copy_(given)


class Meeting:
    """Where the ranks' parts of a product meet: each adds all of them up, in the ranks' order."""

    def __init__(self) -> None:
        self._barrier = Barrier(RANKS, timeout=60)
        self._parts: list[Tensor] = [torch.empty(0)] * RANKS
        self.count = 0

    def reduce(self, rank: int, part: Tensor) -> Tensor:
        self._parts[rank] = part
        if self._barrier.wait() == 0:
            self.count += 1
        whole = torch.zeros_like(part)
        for other in self._parts:
            whole += other
        self._barrier.wait()
        return whole


def on_all_ranks(work: Callable[[int, Reduce], Result]) -> tuple[list[Result], int]:
    """What each rank makes of it, and how often they met."""
    meeting = Meeting()
    with ThreadPoolExecutor(RANKS) as pool:
        futures = [pool.submit(work, rank, partial(meeting.reduce, rank)) for rank in range(RANKS)]
        return [future.result() for future in futures], meeting.count


def decoder(whole: bool = True, rank: int = 0, config: DecoderConfig = CONFIG) -> DecoderModel:
    weights: ModelWeights = config.allocate(device="cpu", dtype=torch.float32)
    fill(weights)
    if not whole:
        parts = of_a_rank(config).allocate(device="cpu", dtype=torch.float32)
        split(weights, parts, rank)
        weights = parts
    model = weights.open(max_seq_len=LENGTH)
    assert isinstance(model, DecoderModel)
    return model


def modules(whole: bool = True, rank: int = 0) -> MtpWeights:
    weights = allocate_mtp_weights(MODULES, device="cpu", dtype=torch.float32)
    fill(weights)
    if not whole:
        config = replace(MODULES, layer=of_a_rank(MODULES.layer))
        parts = allocate_mtp_weights(config, device="cpu", dtype=torch.float32)
        split(weights, parts, rank)
        weights = parts
    return weights


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(model: DecoderModel, drafter: MtpWeights, reduce: Reduce | None) -> dict[str, Tensor]:
    """A chunk of a prompt, its logits, two decode steps after it, and a module beside them."""
    config, module = model.config, drafter.modules[0]
    blocks = LENGTH // BLOCK
    table = torch.arange(1, SLOTS * blocks + 1, dtype=torch.int32).view(SLOTS, blocks)
    layers, *block = cache_shape(config.states, BLOCK)
    states = StateTensors(torch.zeros(layers, SLOTS * blocks + 1, *block), table)
    kv = torch.zeros(SLOTS * blocks + 1, *block)
    linears = {**config.linears, **drafter.config.linears()}
    launch = DecodeLaunch(
        plans=heuristic_plans(linears, torch.float32, "dot"),
        split_tokens=64,
        arrivals=int32(*[0] * 1024),
        reduce=reduce,
    )
    found = {}
    generator = torch.Generator().manual_seed(5)
    # Of eight lanes five are live.
    tokens = torch.randint(0, config.vocab_size, (8,), generator=generator).int()
    chunk = gather_prefill(tokens, int32(1), int32(0), int32(5))
    attention = partial(
        paged_prefill_attention,
        block_table_SB=table,
        query_start_P1=chunk.query_start,
        slot_P=int32(1),
        position_P=int32(0),
    )
    end = model.prefill(chunk, states, attention, all_lanes=True, launch=launch.prefill)
    assert end.hidden is not None
    found["hidden"] = end.hidden[:5]
    found["logits"] = model.prefill_logits(end, int32(1), launch=launch.prefill)
    combined = torch.randn(8, 2 * config.hidden_size, generator=generator)
    found["module's chunk"] = mtp_prefill(
        drafter.config,
        module,
        combined,
        chunk,
        kv,
        table,
        rope_of(model),
        attention,
        launch=launch.prefill,
    )[:5]
    for position in (5, 6):
        rows = DecodeLanes(int32(7, position), int32(-1, 1), int32(2**30, position))
        residual = new_residual(
            2,
            config.hidden_size,
            stream_groups(config.linears, launch.plans),
            dtype=torch.float32,
            device="cpu",
        )
        for part in residual[:3]:
            part.fill_(torch.nan)
        x = model.weights.embedding[position]
        residual.x[1], residual.scaled[1] = x, x * model.first_norm
        residual.squares[:, 1] = 0
        residual.squares[0, 1] = x.square().sum()
        out = model.decode(rows, residual, states, launch)
        assert out.x[0].isnan().all() and out.scaled[0].isnan().all()
        found[f"step {position}"] = torch.cat([out.scaled[1], out.squares[:, 1].sum()[None]])
        stream = new_residual(2, config.hidden_size, 1, dtype=torch.float32, device="cpu")
        stream.x[1] = 0
        drafted = mtp_decode(module, combined[:2], stream, rows, kv, table, rope_of(model), launch)
        found[f"module's step {position}"] = drafted.scaled[1]
    return found


@pytest.mark.parametrize("config", [CONFIG, SANDWICHED], ids=["norms before", "norms around"])
def test_two_ranks_compute_what_one_does(config: DecoderConfig) -> None:
    whole = run(decoder(config=config), modules(), None)
    ranks, met = on_all_ranks(
        lambda rank, reduce: run(decoder(False, rank, config), modules(False, rank), reduce)
    )
    for name, expected in whole.items():
        first, second = (found[name] for found in ranks)
        assert torch.equal(first, second), name
        torch.testing.assert_close(first, expected, rtol=2e-5, atol=2e-5, msg=name)
    # Twice a layer: in the chunk, whose last layer runs for all lanes and for the sampled one
    # again, and in two steps; and so the module, whose projection each rank has as a whole.
    layers = CONFIG.num_layers
    assert met == 2 * (layers + 1) + 2 * 2 * layers + 2 * (1 + 2)


@pytest.mark.parametrize("copies", [1, 3])
def test_a_sum_of_too_few_or_too_many_parts_is_seen(copies: int) -> None:
    """What a rank has alone, or some parts once more, is not what the test above lets pass."""
    whole = run(decoder(), modules(), None)
    ranks, _ = on_all_ranks(
        lambda rank, reduce: run(
            decoder(False, rank),
            modules(False, rank),
            lambda part: part if copies < RANKS else reduce(part) + part,
        )
    )
    assert (ranks[0]["hidden"] - whole["hidden"]).abs().max() > 0.01


def test_one_rank_that_reduces_computes_what_the_fused_kernel_does() -> None:
    """The steps apart give the same bits: product, sum over the one rank, bias and epilogue."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, weight, bias, norm, stream = (
        random(3, 40), random(48, 40), random(48), random(48), random(3, 48),
    )  # fmt: skip
    slot, found = int32(2, -1, 0), []
    plans = heuristic_plans(CONFIG.linears, torch.float32, "dot")
    for reduce in (None, torch.clone):
        residual = new_residual(3, 48, 1, dtype=torch.float32, device="cpu")
        residual.x.copy_(stream)
        residual.scaled.zero_()
        launch = DecodeLaunch(
            plans=plans, split_tokens=64, arrivals=int32(*[0] * 1024), reduce=reduce
        )
        out = add_product(
            x, weight, slot, residual, norm, bias=bias, plan=plans["down"], launch=launch
        )
        assert torch.equal(out.x[1], stream[1])
        # Their kernels have groups of columns of their own.
        squares = out.squares[:, [0, 2]].sum(0)
        found.append([squares if part is out.squares else part for part in out[:3]])
    product = linear(x, weight, slot, out_dtype=torch.float32)
    torch.testing.assert_close(found[0][0][0], stream[0] + product[0] + bias)
    for fused, apart in zip(*found, strict=True):
        torch.testing.assert_close(fused, apart, rtol=1e-6, atol=1e-6)


def test_the_list_of_linears_says_how_weights_are_split() -> None:
    """A linear and the checkpoint's tensors that it is made of name the same axis."""
    axes = {"rows": 0, "columns": 1, None: None}
    stored = CONFIG.allocate(device="meta", dtype=torch.float32).stored()
    made_of = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    for name, parts in made_of.items():
        assert {stored[f"model.layers.1.{part}.weight"].axis for part in parts} == {
            axes[CONFIG.linears[name].shard]
        }
    assert stored["lm_head.weight"].axis is axes[CONFIG.linears["lm_head"].shard] is None
    # A bias of what is summed is added once.
    assert stored["model.layers.0.mlp.down_proj.bias"].axis is None
    assert stored["model.layers.0.self_attn.o_proj.bias"].axis is None
    assert stored["model.layers.0.self_attn.k_proj.bias"].axis == 0
