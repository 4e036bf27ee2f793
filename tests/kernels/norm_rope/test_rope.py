"""RoPE: tables and rotation against transformers, and the contract on padding, cache and bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.paged import FP8_KV, quantise
from graphengine.kernels.norm_rope.rope import rope_append, rope_append_reference
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_frequencies, rope_tables

NATIVE = torch.cuda.is_available() and not INTERPRETED
SENTINEL = -555.0
HUGE = (2**31 - 1, -(2**31), 10**9, -7)
SETTINGS = settings(deadline=None, max_examples=extent(8, 40), derandomize=not NATIVE)
EPS = 1e-6

Op = tuple[Callable[..., torch.Tensor], str]

LLAMA3 = RopeConfig(
    kind="llama3",
    theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = RopeConfig(
    kind="yarn", theta=1_000_000.0, factor=4.0, original_max_position_embeddings=32768
)
LONGROPE = RopeConfig(kind="longrope", factor=32.0, original_max_position_embeddings=500)
DYNAMIC = RopeConfig(kind="dynamic", factor=2.5, original_max_position_embeddings=131072)
CONFIGS = {
    "default": RopeConfig(theta=500_000.0),
    "linear": RopeConfig(kind="linear", factor=3.0),
    "llama3": LLAMA3,
    "llama3-short": replace(LLAMA3, factor=32.0, original_max_position_embeddings=64),
    "yarn": YARN,
    "yarn-untruncated": replace(YARN, truncate=False),
    "yarn-betas": replace(YARN, beta_fast=16.0, beta_slow=2.0),
    "yarn-mscale": replace(YARN, factor=40.0, mscale=1.0, mscale_all_dim=0.7),
    "yarn-attention-factor": replace(YARN, attention_factor=1.25),
    "yarn-no-stretch": replace(YARN, factor=1.0),
    "yarn-tiny": replace(YARN, original_max_position_embeddings=4),
    "longrope-short": LONGROPE,
    "longrope-long": replace(LONGROPE, original_max_position_embeddings=499),
    "longrope-factor": replace(LONGROPE, factor=0.5),
    "longrope-attention-factor": replace(LONGROPE, attention_factor=1.25),
    "dynamic": DYNAMIC,
}


def of_heads(config: RopeConfig, head_dim: int) -> RopeConfig:
    """The config with as many factors as heads of this size have pairs."""
    if config.kind != "longrope":
        return config
    short = [1 + index / 16 for index in range(head_dim // 2)]
    long = tuple(3 * factor for factor in short)
    return replace(config, short_factor=tuple(short), long_factor=long)


def transformers_config(config: RopeConfig, head_dim: int, most: int = 131072) -> Any:
    """A LlamaConfig that says the same."""
    transformers = pytest.importorskip("transformers")
    fields_of = {
        "default": [],
        "linear": ["factor"],
        "llama3": [
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ],
        "yarn": [
            "factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "original_max_position_embeddings",
        ],
        "longrope": [
            "factor",
            "attention_factor",
            "short_factor",
            "long_factor",
            "original_max_position_embeddings",
        ],
        "dynamic": ["factor"],
    }
    parameters = {name: getattr(config, name) for name in fields_of[config.kind]}
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=most,
        rope_parameters={"rope_type": config.kind, "rope_theta": config.theta}
        | {name: value for name, value in parameters.items() if value is not None},
    )


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_tables_equal_transformers(config: RopeConfig, head_dim: int) -> None:
    config = of_heads(config, head_dim)
    theirs = transformers_config(config, head_dim)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if config.kind != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[config.kind](theirs, device="cpu")
        ours, our_factor = rope_frequencies(config, head_dim=head_dim)
        assert torch.equal(ours, frequencies)
        assert our_factor == factor

    positions = 500
    cos, sin = rope_tables(config, head_dim=head_dim, max_positions=positions, device="cpu")
    assert cos.shape == sin.shape == (positions, head_dim // 2)
    full_cos, full_sin = LlamaRotaryEmbedding(theirs)(
        torch.zeros(1, 1, 1), torch.arange(positions)[None]
    )
    assert torch.equal(torch.cat((cos, cos), dim=-1), full_cos[0])
    assert torch.equal(torch.cat((sin, sin), dim=-1), full_sin[0])


@pytest.mark.parametrize("factor", [1.1, 4.0])
def test_dynamic_tables_equal_a_cache_that_grows(factor: float) -> None:
    """A prompt as long as the trained context at most, then a token at a time."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = replace(DYNAMIC, factor=factor, original_max_position_embeddings=50)
    cos, sin = rope_tables(config, head_dim=24, max_positions=160, device="cpu")
    rope = LlamaRotaryEmbedding(transformers_config(config, 24, most=50))
    for prompt in (50, 7):
        chunks = [torch.arange(prompt), *torch.arange(prompt, 160).split(1)]
        for rows in chunks:
            theirs = rope(torch.zeros(1, 1, 1), rows[None])
            for ours, expected in zip((cos, sin), theirs, strict=True):
                torch.testing.assert_close(ours[rows], expected[0, :, :12], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["default", "llama3", "yarn-attention-factor"])
def test_what_does_not_turn_stays_as_it_is(name: str) -> None:
    """A head whose first half turns has the frequencies of a head half as long."""
    config = CONFIGS[name]
    half = rope_tables(config, head_dim=40, max_positions=9, device="cpu")
    found = rope_tables(replace(config, rotated=0.5), head_dim=80, max_positions=9, device="cpu")
    for table, expected, still in zip(found, half, (1.0, 0.0), strict=True):
        assert torch.equal(table[:, :20], expected)
        assert torch.equal(table[:, 20:], torch.full((9, 20), still))


@pytest.mark.parametrize(("head_dim", "part"), [(512, 0.25), (40, 0.25), (60, 0.25), (64, 1.0)])
def test_proportional_rope_has_the_frequencies_of_a_whole_head(head_dim: int, part: float) -> None:
    """The pairs that rotate are those of a whole head, from the first one on."""
    modeling = pytest.importorskip("transformers.modeling_rope_utils")
    if "proportional" not in modeling.ROPE_INIT_FUNCTIONS:
        pytest.skip("transformers has no proportional RoPE")
    config = RopeConfig(kind="proportional", theta=1e6, factor=2.0, rotated=part)
    theirs = transformers_config(replace(config, kind="linear"), head_dim)
    parameters = {"rope_type": "proportional", "rope_theta": 1e6, "factor": 2.0}
    theirs.rope_parameters = parameters | {"partial_rotary_factor": part}
    frequencies, _ = modeling.ROPE_INIT_FUNCTIONS["proportional"](theirs, device="cpu")
    angles = torch.arange(500).float()[:, None] * frequencies
    found = rope_tables(config, head_dim=head_dim, max_positions=500, device="cpu")
    for table, expected in zip(found, (angles.cos(), angles.sin()), strict=True):
        assert torch.equal(table, expected)


def test_longrope_has_a_factor_for_each_pair() -> None:
    config = replace(of_heads(LONGROPE, 48), rotated=0.75)
    assert len(rope_tables(config, head_dim=64, max_positions=4, device="cpu")[0]) == 4
    with pytest.raises(ValueError, match="short_factor has 24 numbers, but 18 pairs turn in heads"):
        rope_tables(config, head_dim=48, max_positions=4, device="cpu")
    with pytest.raises(ValueError, match="'dynamic' needs 4 values that turn, not 2"):
        rope_tables(DYNAMIC, head_dim=2, max_positions=4, device="cpu")


def test_an_odd_part_of_a_head_does_not_turn() -> None:
    config = RopeConfig(rotated=0.3)
    with pytest.raises(ValueError, match="19 of head_dim=64 values turn: must be even"):
        rope_tables(config, head_dim=64, max_positions=4, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotated": 0.0}, "rotated=0.0 must be above 0, and at most 1"),
        ({"rotated": 1.5}, "rotated=1.5 must be above 0"),
        ({"kind": "su"}, "'su' is not one of"),
        (
            {"kind": "longrope", "original_max_position_embeddings": 1},
            "'longrope' needs original_max_position_embeddings, got 1",
        ),
        ({"kind": "dynamic"}, "'dynamic' needs original_max_position_embeddings, got None"),
        ({"factor": 0.0}, "factor=0.0 must be above 0"),
        ({"kind": "yarn"}, "'yarn' needs original_max_position_embeddings, got None"),
        (
            {"kind": "llama3", "original_max_position_embeddings": 8, "high_freq_factor": 1.0},
            "low_freq_factor=1.0 must be below high_freq_factor=1.0",
        ),
    ],
)
def test_wrong_configs_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig(**change)


def test_odd_head_dim_is_named() -> None:
    with pytest.raises(ValueError, match="head_dim=63"):
        rope_tables(RopeConfig(), head_dim=63, max_positions=4, device="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Slots with `lengths` cached tokens each; a slot's lane appends the next one."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 8
    normed: bool = True
    plus_one: bool = False
    """Norms are Gemma 3's: 1 and a weight, in float32."""
    after: bool = False
    """Norms are Hunyuan's: after the rotation."""
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def draw(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        return torch.randn(shape, generator=generator).to(self.dtype)

    def qkv_SX(self) -> torch.Tensor:
        return self.draw(len(self.lengths), (self.heads + 2 * self.kv_heads) * self.head_dim)

    def norm_weights(self) -> dict[str, torch.Tensor]:
        if not self.normed:
            return {}
        weights = 0.2 * self.draw(2, self.head_dim)
        weights = 1 + (weights.float() if self.plus_one else weights)
        return {"q_norm_weight": weights[0].contiguous(), "k_norm_weight": weights[1].contiguous()}


@dataclass(frozen=True, slots=True)
class Appended:
    q_NQD: torch.Tensor
    key_SGD: torch.Tensor
    value_SGD: torch.Tensor


def append(
    op: Op,
    place_cache: Callable[..., Any],
    problem: Problem,
    lanes: Sequence[int],
    *,
    placement: int = 0,
    poison: bool = False,
) -> Appended:
    """Append one token for each live lane, and assert that nothing else changed."""
    function, device = op
    longest = max(1, *problem.lengths)
    cached = (len(problem.lengths), longest, problem.kv_heads, problem.head_dim)
    cache = place_cache(
        problem.draw(*cached).to(device),
        problem.draw(*cached, 1).squeeze(-1).to(device),
        problem.lengths,
        block_size=problem.block_size,
        placement=placement,
        poison=poison,
        room=1,
    )
    before = cache.all_layers.clone()
    cos, sin = rope_tables(
        LLAMA3, head_dim=problem.head_dim, max_positions=longest + 1, device=device
    )

    qkv_SX = problem.qkv_SX()
    qkv_NX = torch.full((len(lanes), qkv_SX.shape[1]), torch.nan if poison else 0.0)
    qkv_NX = qkv_NX.to(problem.dtype)
    position = [0] * len(lanes)
    for lane, slot in enumerate(lanes):
        if slot >= 0:
            qkv_NX[lane] = qkv_SX[slot]
            position[lane] = problem.lengths[slot]
        elif poison:
            position[lane] = HUGE[lane % len(HUGE)]
    out = torch.full(
        (len(lanes), problem.heads, problem.head_dim), SENTINEL, dtype=problem.dtype, device=device
    )
    result = function(
        qkv_NX.to(device),
        cos,
        sin,
        cache.kv,
        cache.block_table_SB,
        torch.tensor(lanes, dtype=torch.int32, device=device),
        torch.tensor(position, dtype=torch.int32, device=device),
        num_heads=problem.heads,
        num_kv_heads=problem.kv_heads,
        eps=EPS,
        norm_after=problem.after,
        out=out,
        **{name: weight.to(device) for name, weight in problem.norm_weights().items()},
    )
    assert result.data_ptr() == out.data_ptr()
    padded = (torch.tensor(lanes) < 0).to(device)
    assert bool((out[padded] == SENTINEL).all()), "a padded lane was written"

    # Take the appended entries out of the cache; what remains must be as it was.
    appended = torch.full((2, *cached[:1], *cached[2:]), torch.nan).to(out)
    for slot in {slot for slot in lanes if slot >= 0}:
        length = problem.lengths[slot]
        block = int(cache.block_table_SB[slot, length // problem.block_size])
        entry = (block, slice(None), length % problem.block_size)
        appended[:, slot] = cache.kv[entry]
        cache.kv[entry] = before[:, 1][entry]
    unchanged = torch.equal(cache.all_layers.view(torch.uint8), before.view(torch.uint8))
    assert unchanged, "an entry that is no lane's was written"
    return Appended(result, appended[0], appended[1])


def transformers_append(problem: Problem) -> Appended:
    """What transformers' Qwen3 norm and rotation append, in float64 after the norm."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    heads = problem.qkv_SX().view(len(problem.lengths), -1, problem.head_dim)
    q, k, v = heads.tensor_split([problem.heads, problem.heads + problem.kv_heads], dim=1)
    rotary = LlamaRotaryEmbedding(transformers_config(LLAMA3, problem.head_dim))
    angles = [
        each[0].double()
        for each in rotary(torch.zeros(1, 1, 1), torch.tensor(problem.lengths)[None])
    ]
    if problem.after:
        q, k = (x.to(problem.dtype) for x in apply_rotary_pos_emb(q.double(), k.double(), *angles))
    if problem.normed:
        for name, weight in problem.norm_weights().items():
            norm = Qwen3RMSNorm(problem.head_dim, eps=EPS)
            norm.weight.data = weight
            if problem.plus_one:
                norm = Gemma3RMSNorm(problem.head_dim, eps=EPS)
                norm.weight.data = weight - 1
            if name == "q_norm_weight":
                q = norm(q).detach()
            else:
                k = norm(k).detach()
    q, k = q.double(), k.double()
    if not problem.after:
        q, k = apply_rotary_pos_emb(q, k, *angles)
    return Appended(q, k, v)


@pytest.fixture(scope="module", params=["triton", "reference"])
def op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return rope_append_reference, "cpu"
    return rope_append, request.getfixturevalue("device")


@pytest.fixture(scope="module")
def op_dtypes(op: Op, request: pytest.FixtureRequest) -> tuple[torch.dtype, ...]:
    if op[0] is rope_append_reference:
        return (torch.float32, torch.float16, torch.bfloat16)
    return tuple(request.getfixturevalue("dtypes"))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Problem(
        lengths=tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))),
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 12, 24, 64, 80, 96, 100, 128, 256])),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        normed=draw(st.booleans()),
        plus_one=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


@SETTINGS
@given(problem=problems())
@example(problem=Problem(lengths=(3, 17), head_dim=256, plus_one=True))
@example(problem=Problem(lengths=(3, 17, 40), head_dim=80, heads=6, after=True))
def test_equals_transformers(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], problem: Problem
) -> None:
    pytest.importorskip("transformers")
    for dtype in op_dtypes:
        typed = replace(problem, dtype=dtype)
        lanes = range(len(problem.lengths))
        ours = append(op, place_cache, typed, lanes, placement=problem.seed, poison=True)
        theirs = transformers_append(typed)
        assert torch.equal(ours.value_SGD.cpu(), theirs.value_SGD)
        # One rounding, and where the norm's statistics round the other way, one more unit of it.
        tolerance = 4 * torch.finfo(dtype).eps
        for mine, yours in ((ours.q_NQD, theirs.q_NQD), (ours.key_SGD, theirs.key_SGD)):
            torch.testing.assert_close(
                mine.cpu().double(), yours, rtol=tolerance, atol=2 * tolerance
            )


@pytest.mark.parametrize("lanes_total", [1, 3, 8, 32])
@pytest.mark.parametrize("normed", [True, False, "after"])
def test_a_lane_has_the_same_bits_anywhere(
    op: Op,
    op_dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    lanes_total: int,
    normed: bool | str,
) -> None:
    lengths = (30, 0, 7, 8, 1)
    for dtype in op_dtypes:
        norms = {"normed": bool(normed), "after": normed == "after"}
        problem = Problem(lengths=lengths, dtype=dtype, **norms)
        alone = {slot: append(op, place_cache, problem, [slot]) for slot in range(len(lengths))}
        shuffle = random.Random(lanes_total)
        lanes = [*alone, *[-1] * 32][:lanes_total]
        shuffle.shuffle(lanes)
        crowd = append(op, place_cache, problem, lanes, placement=lanes_total, poison=True)
        for lane, slot in enumerate(lanes):
            if slot >= 0:
                assert torch.equal(crowd.q_NQD[lane], alone[slot].q_NQD[0])
                assert torch.equal(crowd.key_SGD[slot], alone[slot].key_SGD[slot])
                assert torch.equal(crowd.value_SGD[slot], alone[slot].value_SGD[slot])


def test_every_lane_padded(op: Op, place_cache: Callable[..., Any]) -> None:
    append(op, place_cache, Problem(lengths=(3,)), [-1] * 5, poison=True)


@pytest.mark.parametrize("position", [-1, 16, 20, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("table_positions", [16, 64])
def test_a_live_lane_out_of_bounds_appends_nothing(
    op: Op, position: int, table_positions: int
) -> None:
    """Beyond the angles (16) or beyond the block table (2 blocks of 8)."""
    function, device = op
    cos, sin = rope_tables(RopeConfig(), head_dim=64, max_positions=table_positions, device=device)
    kv = torch.full((3, 2, 8, 1, 64), SENTINEL, device=device)
    table = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    result = function(
        torch.randn(1, 4 * 64, device=device),
        cos,
        sin,
        kv,
        table,
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.tensor([position], dtype=torch.int32, device=device),
        num_heads=2,
        num_kv_heads=1,
    )
    assert bool(result.isnan().all())
    assert bool((kv == SENTINEL).all())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_values_pass_unrotated(op: Op) -> None:
    """Whatever they are: an infinity times a zero sine would be NaN. 20 heads fill two programs."""
    function, device = op
    cos, sin = rope_tables(RopeConfig(), head_dim=128, max_positions=16, device=device)
    heads = torch.randn(1, 20, 128, generator=torch.Generator().manual_seed(0))
    heads[:, 16:] = torch.inf
    kv = torch.zeros(2, 2, 8, 4, 128, device=device)
    q = function(
        heads.view(1, -1).to(device),
        cos,
        sin,
        kv,
        torch.ones(1, 1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.full((1,), 5, dtype=torch.int32, device=device),
        num_heads=12,
        num_kv_heads=4,
    )
    assert bool(q.isfinite().all())
    assert bool(kv[1, 0, 5].isfinite().all())
    assert bool((kv[1, 1, 5] == torch.inf).all())


def test_queries_alone(op: Op) -> None:
    """Of a layer that reuses another's keys: the values are the same, and the cache stays."""
    function, device = op
    cos, sin = rope_tables(RopeConfig(), head_dim=64, max_positions=16, device=device)
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 8 * 64, generator=draw).to(device)
    norm = (1 + 0.1 * torch.randn(64, generator=draw)).to(device)
    slot = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    position = torch.tensor([3, 0, 9], dtype=torch.int32, device=device)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    options = {"num_heads": 4, "q_norm_weight": norm, "k_norm_weight": norm, "eps": EPS}
    found = []
    for heads in (2, 0):
        kv = torch.full((5, 2, 8, 2, 64), SENTINEL, device=device)
        made = qkv if heads else qkv[:, : 4 * 64]
        out = torch.full((3, 4, 64), SENTINEL, device=device)
        lanes = (kv, table, slot, position)
        found.append(function(made, cos, sin, *lanes, num_kv_heads=heads, out=out, **options))
        assert bool((kv == SENTINEL).all()) == (heads == 0)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert bool((found[1][1] == SENTINEL).all())


def test_keys_and_values_alone(op: Op) -> None:
    """Lanes without queries have the bits of lanes with some."""
    function, device = op
    cos, sin = rope_tables(RopeConfig(), head_dim=64, max_positions=16, device=device)
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 8 * 64, generator=draw).to(device)
    norms = (1 + 0.1 * torch.randn(2, 64, generator=draw)).to(device)
    caches = []
    for heads in (4, 0):
        kv = torch.zeros(3, 2, 8, 2, 64, device=device)
        function(
            qkv[:, (4 - heads) * 64 :],
            cos,
            sin,
            kv,
            torch.tensor([[1, 2]], dtype=torch.int32, device=device),
            torch.tensor([0, -1, 0], dtype=torch.int32, device=device),
            torch.tensor([5, 6, 9], dtype=torch.int32, device=device),
            num_heads=heads,
            num_kv_heads=2,
            q_norm_weight=norms[0],
            k_norm_weight=norms[1],
            eps=1e-6,
        )
        caches.append(kv)
    assert (
        torch.equal(*caches) and bool(caches[0][1, :, 5].any()) and bool(caches[0][2, :, 1].any())
    )


def test_strided_lanes_and_several_tokens_of_a_slot(op: Op) -> None:
    """Prefill: the lanes are consecutive tokens of one slot, and qkv a view of a wider tensor."""
    function, device = op
    tokens = 11
    cos, sin = rope_tables(RopeConfig(), head_dim=64, max_positions=64, device=device)
    wide = torch.randn(tokens, 5 * 64, generator=torch.Generator().manual_seed(0)).to(device)
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    slot = torch.zeros(tokens, dtype=torch.int32, device=device)
    position = torch.arange(2, 2 + tokens, dtype=torch.int32, device=device)

    def run(qkv: torch.Tensor, chosen: slice, kv: torch.Tensor) -> torch.Tensor:
        lanes = (slot[chosen].contiguous(), position[chosen].contiguous())
        return function(qkv[chosen], cos, sin, kv, table, *lanes, num_heads=2, num_kv_heads=1)

    together, one_by_one = (torch.zeros(4, 2, 8, 1, 64, device=device) for _ in range(2))
    q = run(wide[:, 64:], slice(None), together)
    for token in range(tokens):
        alone = run(wide[:, 64:].contiguous(), slice(token, token + 1), one_by_one)
        assert torch.equal(alone[0], q[token])
    assert torch.equal(together, one_by_one)


@pytest.mark.parametrize("normed", [True, False])
def test_an_fp8_cache_holds_the_rounded_keys_and_values_over_their_scales(
    op: Op, op_dtypes: tuple[torch.dtype, ...], normed: bool
) -> None:
    """What a cache of the queries' dtype gets, quantised; scales small enough for saturation."""
    function, device = op
    tokens, heads, kv_heads, head_dim = 11, 6, 3, 80
    cos, sin = rope_tables(RopeConfig(), head_dim=head_dim, max_positions=64, device=device)
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[0.001, 0.02, 1.0], [3.0, 0.002, 0.03]], device=device)
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    slot = torch.zeros(tokens, dtype=torch.int32, device=device)
    slot[4] = -1
    position = torch.arange(2, 2 + tokens, dtype=torch.int32, device=device)
    for dtype in op_dtypes:
        width = (heads + 2 * kv_heads) * head_dim
        qkv = torch.randn(tokens, width, generator=generator).to(device, dtype)
        weights = (1 + torch.rand(2, head_dim, generator=generator)).to(device, dtype)
        norms = {"q_norm_weight": weights[0], "k_norm_weight": weights[1], "eps": EPS}
        options = {"num_heads": heads, "num_kv_heads": kv_heads, **(norms if normed else {})}
        plain = torch.zeros(4, 2, 8, kv_heads, head_dim, device=device, dtype=dtype)
        fp8 = plain.to(FP8_KV)
        arguments = (table, slot, position)
        wanted = function(qkv, cos, sin, plain, *arguments, **options)
        q = function(qkv, cos, sin, fp8, *arguments, **options, kv_scales=scales)
        live = slot >= 0
        stored = quantise(plain, scales[None, :, None, :, None])
        if device == "cpu":
            assert torch.equal(q[live], wanted[live])
            assert torch.equal(fp8.view(torch.uint8), stored.view(torch.uint8))
        else:
            # They are two kernels, whose multiplications and additions the compiler fuses as it
            # likes: a key may differ in its last bit, and then be rounded to the next code.
            ulps = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(q[live], wanted[live], rtol=ulps, atol=ulps)
            apart = (fp8.view(torch.uint8).int() - stored.view(torch.uint8).int()).abs()
            assert int(apart.max()) <= 1 and float(apart.float().mean()) < 0.01
        assert int((stored.float().abs() == 448).sum()) > 50, "nothing was saturated"


def valid_arguments() -> dict[str, Any]:
    return {
        "qkv_NX": torch.zeros(2, 8 * 64),
        "cos": torch.zeros(16, 32),
        "sin": torch.zeros(16, 32),
        "kv": torch.zeros(3, 2, 16, 2, 64),
        "block_table_SB": torch.zeros(2, 2, dtype=torch.int32),
        "slot_N": torch.full((2,), -1, dtype=torch.int32),
        "position_N": torch.zeros(2, dtype=torch.int32),
        "num_heads": 4,
        "num_kv_heads": 2,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_NX": torch.zeros(2, 8 * 64 + 1)}, r"\[N, D \* 8\]"),
        ({"qkv_NX": torch.zeros(2, 8 * 63)}, "head_dim=63 must be even"),
        ({"qkv_NX": torch.zeros(2, 8 * 64).half()}, "kv is torch.float32, qkv torch.float16"),
        ({"kv": torch.zeros(3, 2, 16, 2, 64).to(FP8_KV)}, r"kv_scales \[2, 2\], not None"),
        (
            {"kv": torch.zeros(3, 2, 16, 2, 64).to(FP8_KV), "kv_scales": torch.ones(2, 1)},
            r"a dense torch.float32 \[2, 2\], not torch.float32 \[2, 1\]",
        ),
        (
            {"kv": torch.zeros(3, 2, 16, 2, 64).to(FP8_KV), "kv_scales": torch.ones(2, 2).half()},
            r"a dense torch.float32 \[2, 2\], not torch.float16 \[2, 2\]",
        ),
        ({"kv_scales": torch.ones(2, 2)}, "a cache of torch.float8_e4m3fn, not of torch.float32"),
        ({"cos": torch.zeros(16, 64)}, r"cos must be float32 \[P, 32\]"),
        ({"sin": torch.zeros(16, 32).half()}, r"not torch.float16 \(16, 32\)"),
        ({"kv": torch.zeros(3, 2, 16, 2, 80)}, "2 heads of 80, expected 2 of 64"),
        ({"position_N": torch.zeros(3, dtype=torch.int32)}, r"position_N must be a dense \[2\]"),
        ({"q_norm_weight": torch.ones(64)}, "come together or not at all"),
        (
            {"q_norm_weight": torch.ones(64), "k_norm_weight": torch.ones(32)},
            r"k_norm_weight must be a dense torch.float32 \[64\]",
        ),
        ({"out": torch.zeros(2, 4, 65)}, r"\[2, 4, 64\], not torch.float32 \[2, 4, 65\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_append(**(valid_arguments() | change))
