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
from typing import Any, TypeVar

import pytest
import torch
from events import GENEROUS_S
from torch import Tensor

from checkpoints.small_decoders import expert_layers, small_decoder
from graphengine.drafters.mtp.layer import (
    LAYOUTS,
    MtpConfig,
    MtpWeights,
    allocate_mtp_weights,
    mtp_decode,
    mtp_prefill,
)
from graphengine.kernels.attention.prefill import paged_prefill_attention
from graphengine.kernels.experts.router import Router, Routes
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import LOGITS
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.norm_rope.activation import ClampedSwiglu
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes, gather_prefill
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mla import LatentAttention
from graphengine.models.blocks.streams import add_product
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.contract import ModelWeights
from graphengine.models.decoder import DecoderConfig, DecoderModel
from graphengine.models.families.gpt_oss import NAMES
from graphengine.models.launches import (
    WHOLE,
    ChunkAttention,
    DecodeLaunch,
    PrefillLaunch,
    Reduce,
    Share,
    SplitStream,
)
from graphengine.models.linears import heuristic_plans, stream_groups
from graphengine.models.routing import observed_routes
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.models.splitting.split_stream import GatheredStream
from graphengine.models.states import StateTensors, cache_shape
from graphengine.models.weights import StoredWeights

RANKS, SLOTS, BLOCK, LENGTH = 2, 2, 8, 32
ATTENTION = GroupedQueryAttention(
    hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    qkv_bias=True,
    output_bias=True,
    qk_norm=True,
)
MLP = Swiglu(hidden_size=48, ffn_size=64, norm_eps=1e-5, bias=True)
VALUES = {"vocab_size": 50, "max_positions": LENGTH, "mlp": MLP}
CONFIG = small_decoder(ATTENTION, (MLP, MLP), **VALUES)
GELU = replace(MLP, activation="gelu_tanh")
SANDWICHED = small_decoder(ATTENTION, (GELU, GELU), post_norms=True, norms_plus_one=True, **VALUES)
# As gpt-oss: what down adds of each chosen expert is biased, and weighted.
OF_GPT_OSS = Experts(
    hidden_size=48,
    ffn_size=24,
    experts=6,
    router=Router(top_k=3, scores="softmax_of_chosen"),
    norm_eps=1e-5,
    bias=True,
    gating=ClampedSwiglu(limit=0.5),
    names=NAMES,
)
EXPERTS = small_decoder(replace(ATTENTION, sinks=True), (OF_GPT_OSS, OF_GPT_OSS), **VALUES)
# As DeepSeek-V3, with a dense layer.
LATENT = LatentAttention(
    hidden_size=48,
    num_heads=4,
    kv_rank=24,
    q_rank=20,
    plain_dim=12,
    rotated_dim=8,
    value_dim=10,
    scale=0.2,
    norm_eps=1e-5,
)
OF_DEEPSEEK = Experts(
    hidden_size=48,
    ffn_size=16,
    experts=6,
    router=Router(top_k=2, scores="sigmoid", normalised=True, scale=1.5),
    norm_eps=1e-5,
    shared=Swiglu(hidden_size=48, ffn_size=32, norm_eps=1e-5, role="shared_"),
    corrected=True,
)
LATENTS = small_decoder(LATENT, (MLP, OF_DEEPSEEK), **VALUES)
# Rows of heads' queries lie beside those of latents.
LATENTS_ALONE = small_decoder(replace(LATENT, q_rank=None), (MLP, OF_DEEPSEEK), **VALUES)

Result = TypeVar("Result")


def fill(weights: StoredWeights) -> None:
    generator = torch.Generator().manual_seed(len(weights.tensors()))
    for name, tensor in weights.named().items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + ("norm" in name))


def split(whole: StoredWeights, parts: StoredWeights, rank: int) -> None:
    """Give a rank its part of each tensor, along the axis that the contract names."""
    stored = whole.stored()
    # Others may have experts that this one has not.
    assert parts.stored().keys() <= stored.keys()
    for name, part in parts.stored().items():
        tensor, axis = stored[name].tensor, part.axis
        given = tensor if axis is None else tensor.chunk(RANKS, axis)[rank]
        assert given.shape == part.tensor.shape, name
        part.tensor.copy_(given)


class Meeting:
    """Where the ranks' parts of a product meet: each adds all of them up, in the ranks' order."""

    def __init__(self) -> None:
        self._barrier = Barrier(RANKS, timeout=GENEROUS_S)
        self._parts: list[Tensor] = [torch.empty(0)] * RANKS
        self.count = 0

    def reduce(self, rank: int, part: Tensor) -> Tensor:
        whole = torch.zeros_like(part)
        for other in self.gather(rank, part):
            whole += other
        return whole

    def gather(self, rank: int, part: Tensor) -> Tensor:
        self._parts[rank] = part
        if self._barrier.wait() == 0:
            self.count += 1
        parts = torch.stack(self._parts)
        self._barrier.wait()
        return parts


def on_all_ranks(work: Callable[[int, Reduce], Result]) -> tuple[list[Result], int]:
    """What each rank makes of it, and how often they met."""
    meeting = Meeting()
    with ThreadPoolExecutor(RANKS) as pool:
        futures = [pool.submit(work, rank, partial(meeting.reduce, rank)) for rank in range(RANKS)]
        return [future.result() for future in futures], meeting.count


def decoder(
    whole: bool = True, rank: int = 0, config: DecoderConfig = CONFIG, **how: bool
) -> DecoderModel:
    weights: ModelWeights = config.allocate(device="cpu", dtype=torch.float32)
    fill(weights)
    if not whole:
        parts = of_rank(config, Share(rank, RANKS), **how).allocate(
            device="cpu", dtype=torch.float32
        )
        split(weights, parts, rank)
        weights = parts
    model = weights.open(max_seq_len=LENGTH)
    assert isinstance(model, DecoderModel)
    return model


def modules(
    whole: bool = True, rank: int = 0, config: DecoderConfig = CONFIG, **how: bool
) -> MtpWeights:
    of_all = MtpConfig.of_target(config, LAYOUTS[0], ("mtp.",))
    weights = allocate_mtp_weights(of_all, device="cpu", dtype=torch.float32)
    fill(weights)
    if not whole:
        of_one = of_all.of_rank(Share(rank, RANKS), **how)
        parts = allocate_mtp_weights(of_one, device="cpu", dtype=torch.float32)
        split(weights, parts, rank)
        weights = parts
    return weights


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fed_chunk(config: DecoderConfig) -> tuple[StateTensors, PrefillLanes, ChunkAttention]:
    """An empty cache, and five tokens of slot 1 in a chunk of eight lanes."""
    blocks = LENGTH // BLOCK
    table = torch.arange(1, SLOTS * blocks + 1, dtype=torch.int32).view(SLOTS, blocks)
    layers, *block = cache_shape(config.states, BLOCK)
    states = StateTensors(torch.zeros(layers, SLOTS * blocks + 1, *block), table)
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, config.vocab_size, (8,), generator=generator).int()
    chunk = gather_prefill(tokens, int32(1), int32(0), int32(5))
    attention = partial(
        paged_prefill_attention,
        block_table_SB=table,
        query_start_P1=chunk.query_start,
        slot_P=int32(1),
        position_P=int32(0),
    )
    return states, chunk, attention


def run(
    model: DecoderModel, drafter: MtpWeights, reduce: Reduce | None, share: Share = WHOLE
) -> dict[str, Tensor]:
    """A chunk of a prompt, its logits, two decode steps after it, and a module beside them; the
    experts of the steps' live lane, and their weights.
    """
    config, module = model.config, drafter.modules[0]
    states, chunk, attention = fed_chunk(config)
    table, kv = states.block_table, torch.zeros_like(states.cache[0])
    linears = {**config.linears, **drafter.config.linears()}
    launch = DecodeLaunch(
        plans=heuristic_plans(linears, torch.float32, "dot"),
        split_tokens=64,
        arrivals=int32(*[0] * 1024),
        reduce=reduce,
        share=share,
    )
    found = {}

    def note(routes: Routes, slot: Tensor) -> None:
        for part, ids in zip(routes, ("experts", "weights"), strict=True):
            found[f"{ids} {len(found)}"] = part[1].float()

    end = model.prefill(chunk, states, attention, all_lanes=True, launch=launch.prefill)
    assert end.hidden is not None
    found["hidden"] = end.hidden[:5]
    found["logits"] = model.prefill_logits(end, int32(1), head=model.lm_head, launch=launch.prefill)
    generator = torch.Generator().manual_seed(5)
    combined = torch.randn(8, 2 * config.hidden_size, generator=generator)
    found["module's chunk"] = mtp_prefill(
        drafter.config,
        module,
        combined,
        chunk,
        kv,
        table,
        model.tables,
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
        with observed_routes(note):
            out = model.decode(rows, residual, states, launch)
        assert out.x[0].isnan().all() and out.scaled[0].isnan().all()
        found[f"step {position}"] = torch.cat([out.scaled[1], out.squares[:, 1].sum()[None]])
        stream = new_residual(2, config.hidden_size, 1, dtype=torch.float32, device="cpu")
        stream.x[1] = 0
        drafted = mtp_decode(module, combined[:2], stream, rows, kv, table, model.tables, launch)
        found[f"module's step {position}"] = drafted.scaled[1]
    return found


@pytest.mark.parametrize(
    ("config", "expert_parallel"),
    [
        (CONFIG, False),
        (SANDWICHED, False),
        (EXPERTS, False),
        (EXPERTS, True),
        (LATENTS, False),
        (LATENTS, True),
        (LATENTS_ALONE, False),
    ],
    ids=[
        "norms before", "norms around", "experts", "whole experts", "latents",
        "latents, whole experts", "latents alone",
    ],
)  # fmt: skip
def test_two_ranks_compute_what_one_does(config: DecoderConfig, expert_parallel: bool) -> None:
    of_modules = CONFIG if config is SANDWICHED else config
    whole = run(decoder(config=config), modules(config=of_modules), None)
    ranks, met = on_all_ranks(
        lambda rank, reduce: run(
            decoder(False, rank, config, expert_parallel=expert_parallel),
            modules(False, rank, of_modules, expert_parallel=expert_parallel),
            reduce,
            Share(rank, RANKS),
        )
    )
    assert sum(name.startswith("experts") for name in whole) == 2 * len(expert_layers(config))
    for name, expected in whole.items():
        first, second = (found[name] for found in ranks)
        assert torch.equal(first, second), name
        torch.testing.assert_close(first, expected, rtol=2e-5, atol=2e-5, msg=name)
    # Twice a layer: in the chunk, whose last layer runs for all lanes and for the sampled one
    # again, and in two steps; and so the module, whose projection each rank has as a whole.
    layers = CONFIG.num_layers
    assert met == 2 * (layers + 1) + 2 * 2 * layers + 2 * (1 + 2)


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        (CONFIG, True),
        (small_decoder(LATENT, (MLP, MLP), **VALUES), True),
        (SANDWICHED, False),
        (EXPERTS, False),
    ],
    ids=["norms before", "latents", "norms around", "experts"],
)
def test_a_stream_may_be_split_by_lanes(config: DecoderConfig, splits: bool) -> None:
    """Four of the fed lanes are the first rank's, and the last one is the second's."""
    meeting, given = Meeting(), []

    def work(rank: int, split: bool, **asked: Any) -> Tensor:
        share, reduce = Share(rank, RANKS), partial(meeting.reduce, rank)
        gather = partial(meeting.gather, rank)

        def split_stream(lanes: int, hidden: int, dtype: torch.dtype) -> SplitStream:
            normed = torch.full((lanes, hidden), torch.nan, dtype=dtype)
            given.append(GatheredStream(share, normed, reduce, gather))
            return given[-1]

        launch = PrefillLaunch(reduce=reduce, split=split_stream if split else None, share=share)
        model = decoder(False, rank, config)
        states, chunk, attention = fed_chunk(model.config)
        end = model.prefill(chunk, states, attention, launch=launch, **asked)
        found = model.prefill_logits(end, int32(1), head=model.lm_head, launch=launch)
        return torch.cat([found.flatten(), states.cache.flatten()])

    def both(split: bool, **asked: Any) -> list[Tensor]:
        with ThreadPoolExecutor(RANKS) as pool:
            futures = [pool.submit(work, rank, split, **asked) for rank in range(RANKS)]
            return [future.result() for future in futures]

    expected = both(False)
    assert not given
    for one, other in zip(both(True), expected, strict=True):
        assert torch.equal(one, other)
    assert len(given) == RANKS * splits
    given.clear()
    # Whoever else reads the stream finds all lanes of it on all ranks.
    both(True, all_lanes=True)
    both(True, streams={0: torch.zeros(8, config.hidden_size)})
    assert not given


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
            plans=plans,
            split_tokens=64,
            arrivals=int32(*[0] * 1024),
            reduce=reduce,
        )
        call = launch.call("down", x, weight, slot, bias=bias)
        out = add_product(call, residual, norm, launch)
        assert torch.equal(out.x[1], stream[1])
        # Their kernels have groups of columns of their own.
        squares = out.squares[:, [0, 2]].sum(0)
        found.append([squares if part is out.squares else part for part in out[:3]])
    product = linear(LinearCall(x, weight, slot), LOGITS)
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
