"""gpt-oss against transformers: sinks, windows, biases, clamped SwiGLUs, stacked experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints.small_decoders import block_in
from engines.family_checks import (
    assert_half_precision_replays,
    assert_replies,
    assert_rewinds,
    assert_same_in_any_company,
)
from extent import extent
from graphengine import Engine, SamplingParams
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.linear.quantised import dequantise
from graphengine.kernels.norm_rope.activation import ClampedSwiglu
from graphengine.models.blocks.experts import Experts, ExpertsWeights
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, load_weights, read_model
from graphengine.models.composition import windows_of
from graphengine.models.decoder import DecoderConfig, DecoderWeights
from graphengine.models.families.registry import read_model_config
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.quantised.writer import write_quantised
from graphengine.speculative import DraftModel, NGram

TOKENS = 64
YARN = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip


def _gpt_oss(**options: Any) -> GptOssForCausalLM:
    config = GptOssConfig(
        max_position_embeddings=512, head_dim=64, rope_parameters=YARN, pad_token_id=0, **options
    )
    return GptOssForCausalLM._from_config(config, experts_implementation="eager")


# Windows: in a block of 8 tokens, and longer than most prompts. Many gates and ups are clamped.
MODELS: dict[str, Callable[[], GptOssForCausalLM]] = {
    "short": lambda: _gpt_oss(
        vocab_size=263, hidden_size=72, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=3,
        sliding_window=5, swiglu_limit=0.5, eos_token_id=7,
    ),
    "long": lambda: _gpt_oss(
        vocab_size=257, hidden_size=48, intermediate_size=33, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=50, layer_types=["full_attention", "sliding_attention"],
        swiglu_alpha=1.3, tie_word_embeddings=True, eos_token_id=[2, 3],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def oracles(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    written = {}
    for name, make in MODELS.items():
        written[name] = write_model(make, folder / name, len(name))
        model = written[name].model
        for layer in model.model.layers:
            # Before 5.18 transformers had these numbers in its code, whatever the config says.
            layer.mlp.experts.limit = getattr(model.config, "swiglu_limit", 7.0)
            layer.mlp.experts.alpha = getattr(model.config, "swiglu_alpha", 1.702)
    return written


def greedy(max_tokens: int = TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def open_engine(oracle: Any, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(oracle.path, **options)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(
    oracles: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    oracle = oracles[name]
    with open_engine(oracle, device=device, prefill_buckets=(16, 64), lookahead=0) as engine:
        assert_replies(engine, oracle, eager, (1, 17, 75))


def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    oracles: dict[str, Any], device: str
) -> None:
    oracle = oracles["short"]
    assert_same_in_any_company(partial(open_engine, oracle, device=device), oracle)


@pytest.mark.parametrize(
    ("name", "rings"),
    extent(
        [("short", True), ("long", True), ("short", False)],
        [(name, rings) for name in MODELS for rings in (True, False)],
    ),
)
def test_sessions_rewind_across_the_windows_edge(
    oracles: dict[str, Any], device: str, tmp_path: Path, name: str, rings: bool
) -> None:
    oracle, file = oracles[name], tmp_path / "session.safetensors"
    options = {"device": device, "window_rings": rings, "prefill_buckets": (4, 13)}
    with open_engine(oracle, **options) as engine:
        assert bool(engine.memory.rings) == rings
        again = assert_rewinds(engine, oracle, file)
    with open_engine(oracle, **options) as engine, engine.restore_session(file) as session:
        assert (session.cached_tokens == 0) == rings
        assert session.generate(greedy(30)).token_ids == again


def test_an_fp8_cache(oracles: dict[str, Any], device: str, eager: Callable[..., Any]) -> None:
    """Its rounding alone is seen, and in any company, and by drafts, the same."""
    oracle = oracles["short"]
    prompts = oracle.prompts((9, 30, 41))
    prompts[1] = prompts[0] * 4
    options: dict[str, Any] = {"device": device, "kv_dtype": "fp8", "prefill_buckets": (64,)}
    with open_engine(oracle, **options, lookahead=0) as engine:
        alone = [engine.generate(prompt, greedy(24)).token_ids for prompt in prompts]
        seen = eager(engine)
        result = engine.generate(prompts[2], greedy(8))
        expected = oracle.logits([*prompts[2], *result.token_ids])
        errors = [
            (row - expected[place]).abs().max() / expected[place].abs().max()
            for (_, place), row in seen.items()
        ]
        assert 1e-4 < max(errors) < 0.15
    for mode in (None, NGram(k=3)):
        with open_engine(oracle, **options, speculative=mode) as engine:
            together = engine.generate(prompts, greedy(24))
        assert [each.token_ids for each in together] == alone
        assert mode is None or sum(each.acceptance.accepted for each in together) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_half_precision_replays_what_it_computes_eagerly(
    oracles: dict[str, Any], eager: Callable[[Engine], Any], kv_dtype: str
) -> None:
    opened = partial(open_engine, oracles["short"])
    assert_half_precision_replays(opened, oracles["short"], eager, kv_dtype)


@pytest.mark.parametrize("name", MODELS)
def test_it_drafts_for_itself(oracles: dict[str, Any], device: str, name: str) -> None:
    """With windows of its own: past their edge, all of its drafts are taken still."""
    oracle = oracles[name]
    options = {"device": device, "row_family": "dot", "prefill_buckets": (64,)}
    prompts = oracle.prompts((9, 30))
    with open_engine(oracle, **options) as engine:
        expected = [result.token_ids for result in engine.generate(prompts, greedy(40))]
    with open_engine(oracle, **options, speculative=DraftModel(oracle.path, k=3)) as engine:
        drafted = engine.generate(prompts, greedy(40))
        assert engine.acceptance.accepted == engine.acceptance.proposed > 40
    assert [result.token_ids for result in drafted] == expected


def test_any_end_of_a_generation_config_ends_a_reply(
    oracles: dict[str, Any], edited: Callable[..., Path], device: str
) -> None:
    """gpt-oss has several, and config.json names another one, which is one, too."""
    oracle = oracles["short"]
    (prompt,) = oracle.prompts((12,))
    named = json.loads((oracle.path / "config.json").read_text())["eos_token_id"]
    with open_engine(oracle, device=device) as engine:
        said = engine.generate(prompt, greedy(40)).token_ids
    new = [index for index in range(2, 40) if said[index] not in said[:index]]
    first, later = new[len(new) // 2], new[-1]
    assert first < later
    for ids in ([said[later], said[first]], [said[first], 7, said[later]]):
        path = edited(oracle.path, generation_config={"eos_token_id": ids})
        with Engine.from_pretrained(path, **small(device=device)) as engine:
            assert engine.eos_ids == tuple(dict.fromkeys((*ids, named)))
            result = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=40))
        assert result.finish_reason == "stop" and result.token_ids == said[: first + 1]


@torch.no_grad()
def test_a_record_has_the_experts_of_transformers(oracles: dict[str, Any], device: str) -> None:
    oracle = oracles["short"]
    (prompt,) = oracle.prompts((20,))
    with open_engine(oracle, device=device, record_routing=True) as engine:
        result = engine.generate(prompt, greedy(12))
    tokens = [*prompt, *result.token_ids][:-1]
    output = oracle.model(torch.tensor([tokens]), output_router_logits=True)
    assert result.routing is not None and len(result.routing) == len(tokens)
    for layer, logits in enumerate(output.router_logits):
        chosen = logits.view(len(tokens), -1).topk(3).indices.sort().values
        recorded = torch.from_numpy(result.routing[:, layer].astype("int64")).sort().values
        assert torch.equal(recorded, chosen), f"{layer=}"


@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_turn_that_replays_a_record_leaves_the_sessions_ring_alone(
    oracles: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    max_batch: int,
) -> None:
    """What the next turn sees in its windows is what the router itself leads to."""
    oracle = oracles["short"]
    first, second, third = oracle.prompts((33, 3, 1))
    options: dict[str, Any] = {"device": device, "max_batch": max_batch, "record_routing": True}
    with open_engine(oracle, **options, prefill_buckets=(4, 13), lookahead=0) as engine:
        assert engine.memory.rings
        with engine.session() as session:
            session.append(first)
            session.generate(greedy(8))
            session.append(second)
            other = [[[(token + i) % 5 for i in range(3)]] * 3 for token in range(len(session) + 4)]
            session.generate(greedy(4, routing=other))
            session.rewind(7)
            session.append(third)
            seen = eager(engine)
            result = session.generate(greedy(8))
        # Where there is one ring, the replay has taken it.
        assert result.cached_tokens == (40 if max_batch > 1 else 0)
        oracle.assert_logits(result, seen)


def read_config(changes: dict[str, Any]) -> DecoderConfig:
    config = GptOssConfig().to_dict() | {"architectures": ["GptOssForCausalLM"]} | changes
    model = read_model_config(config)
    assert isinstance(model, DecoderConfig)
    return model


def test_what_is_missing_is_transformers_default() -> None:
    oracle = GptOssConfig()
    told = read_config({})
    bare = read_model_config({"architectures": ["GptOssForCausalLM"]})
    assert bare == told and isinstance(bare, DecoderConfig)
    attention, experts = block_in(bare, GroupedQueryAttention), block_in(bare, Experts)
    window = oracle.sliding_window
    assert windows_of(bare) == tuple(
        window if kind == "sliding_attention" else 0 for kind in oracle.layer_types
    )
    assert (attention.num_heads, attention.num_kv_heads) == (64, oracle.num_key_value_heads)
    assert (attention.head_dim, bare.norm_eps) == (oracle.head_dim, oracle.rms_norm_eps)
    assert attention.qkv_bias == attention.output_bias == oracle.attention_bias
    assert attention.sinks and experts.experts == oracle.num_local_experts
    assert experts.router.top_k == oracle.num_experts_per_tok
    clamped = experts.gating
    assert isinstance(clamped, ClampedSwiglu) and clamped.limit == oracle.swiglu_limit
    assert clamped.slope == oracle.swiglu_alpha
    assert bare.rope and bare.rope.kind == "yarn" and not bare.rope.truncate
    assert bare.rope.theta == oracle.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 0.0}, "swiglu_limit=0.0: must be a finite number in"),
        ({"swiglu_alpha": "1"}, "swiglu_alpha='1': must be a finite number"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': supported"),
        ({"num_local_experts": 600}, "num_local_experts=600: supported: at most 512"),
        ({"num_experts": 5}, "num_experts=5: supported: as num_local_experts is"),
        ({"num_experts_per_tok": 129}, "supported: 1 to num_local_experts=128"),
        ({"experts_per_token": 3}, "experts_per_token=3: supported: null or 4"),
        ({"sliding_window": None}, "sliding_window=None: supported: an integer"),
        ({"layer_types": 5}, "layer_types=5: supported: a list of 'full_attention' and"),
        ({"use_sliding_window": False}, "use_sliding_window=False: supported: null or True"),
    ],
)
def test_configs_that_are_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(changes)


def test_parameters_and_tensors_nobody_reads(oracles: dict[str, Any], tmp_path: Path) -> None:
    oracle = oracles["short"]
    model = read_model(Checkpoint.open(oracle.path))
    weights = model.allocate(device="meta", dtype=torch.float32)
    assert weights.parameters == oracle.model.num_parameters()
    for file in oracle.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((oracle.path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    with pytest.raises(ValueError, match=r"experts.gate_up_proj has shape \[5, 72, 80\], not \["):
        read_model(Checkpoint.open(tmp_path))


CODES = ("gate_up_proj", "down_proj")


def packed_checkpoint(source: Path, target: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A checkpoint with random MXFP4 experts in place of its own; all that was written."""
    generator = torch.Generator().manual_seed(4)
    stored = Checkpoint.open(source)
    tensors = {name: tensor.clone() for name, tensor in stored.mapped().items()}
    for name in [name for name in tensors if name.endswith(CODES)]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        codes = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    quantisation = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
    }  # fmt: skip
    config = json.loads((source / "config.json").read_text())
    target.mkdir()
    told = config | {"quantization_config": quantisation} | changes
    (target / "config.json").write_text(json.dumps(told))
    save_file(tensors, target / "model.safetensors")
    return tensors


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]) -> Any:
    """Sizes of which MXFP4's blocks are parts."""
    return write_model(
        lambda: _in_blocks(hidden_size=64, intermediate_size=32),
        tmp_path_factory.mktemp("even") / "model",
        3,
    )


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Any]) -> Any:
    """A checkpoint whose widths are no multiple of the columns that kernels multiply at a time."""
    return write_model(
        lambda: _in_blocks(hidden_size=160, intermediate_size=96),
        tmp_path_factory.mktemp("odd") / "model",
        4,
    )


def _in_blocks(**sizes: int) -> GptOssForCausalLM:
    return _gpt_oss(
        vocab_size=251, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=5, num_experts_per_tok=2, sliding_window=9, eos_token_id=7, **sizes,
    )  # fmt: skip


def experts_of(engine: Engine, layer: int) -> ExpertsWeights:
    weights = engine.model.weights
    assert isinstance(weights, DecoderWeights)
    experts = weights.layers[layer].mlp
    assert isinstance(experts, ExpertsWeights)
    return experts


@pytest.mark.parametrize("shape", ["even", "odd"])
def test_mxfp4_experts_are_those_that_transformers_dequantises(
    even: Any,
    odd: Any,
    tmp_path: Path,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    shape: str,
) -> None:
    """They stay in 4 bits, and mean the same; alone, in a batch and with drafts."""
    oracle, plain = packed_and_plain({"even": even, "odd": odd}[shape], tmp_path)
    prompts, tokens = oracle.prompts((1, 21, 9)), 16 if shape == "even" else 8
    # What n-grams find again.
    prompts[1] = prompts[2] * 4
    packed, alone = tmp_path / "packed", []
    with Engine.from_pretrained(packed, **small(lookahead=0)) as engine:
        for layer in range(2):
            experts = experts_of(engine, layer)
            name = f"model.layers.{layer}.mlp.experts."
            assert isinstance(experts.gate_up, PackedExperts)
            assert isinstance(experts.down, PackedExperts)
            assert isinstance(experts.gate, torch.Tensor)
            for index in range(5):
                pairs = plain[f"{name}gate_up_proj"][index].t()
                expected = torch.cat((pairs[::2], pairs[1::2]))
                assert torch.equal(experts.gate_up.floats(index), expected)
                expected = plain[f"{name}down_proj"][index].t()
                assert torch.equal(experts.down.floats(index), expected)
        for prompt in prompts:
            seen = eager(engine)
            result = engine.generate(prompt, greedy(tokens))
            oracle.assert_greedy(result)
            oracle.assert_logits(result, seen)
            alone.append(result.token_ids)
        together = engine.generate(prompts, greedy(tokens))
    assert [result.token_ids for result in together] == alone
    with open_engine(oracle, device="cpu") as engine:
        assert [engine.generate(prompt, greedy(tokens)).token_ids for prompt in prompts] == alone
    with Engine.from_pretrained(packed, **small(speculative=NGram(k=3))) as engine:
        drafted = engine.generate(prompts, greedy(tokens))
        assert engine.acceptance.accepted > 0 or shape == "odd"
    assert [result.token_ids for result in drafted] == alone


def packed_and_plain(source: Any, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A checkpoint `folder / "packed"` with random MXFP4 experts like `source`; the model that
    transformers makes of it, and its tensors.
    """
    tensors = packed_checkpoint(source.path, folder / "packed")
    ends = ("_blocks", "_scales")
    plain = {name: each for name, each in tensors.items() if not name.endswith(ends)}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        plain[stem] = convert_moe_packed_tensors(
            tensors[name].clone(), tensors[f"{stem}_scales"].clone(), dtype=torch.float32
        ).contiguous()
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text((source.path / "config.json").read_text())
    save_file(plain, folder / "plain" / "model.safetensors")
    return type(source)(folder / "plain"), plain


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["fma", "dot"])
@pytest.mark.parametrize("shape", ["even", "odd"])
def test_mxfp4_experts_on_a_gpu(
    even: Any, odd: Any, tmp_path: Path, eager: Callable[[Engine], Any], shape: str, family: str
) -> None:
    """Tokens are the same in any company, and in replays. For most prompts the logits are near
    those of equal weights in bfloat16; for others a router's choice hangs on a rounding.
    """
    source, _ = packed_and_plain({"even": even, "odd": odd}[shape], tmp_path)
    options = small(device="cuda", dtype="bfloat16", max_batch=2, row_family=family, lookahead=0)
    prompts = source.prompts((1, 5, 9, 20, 40))
    last: dict[str, list[torch.Tensor]] = {"packed": [], "plain": []}
    for name, rows in last.items():
        with Engine.from_pretrained(tmp_path / name, **options) as engine:
            packed = isinstance(experts_of(engine, 0).gate_up, PackedExperts)
            assert packed == (name == "packed")
            together = [each.token_ids for each in engine.generate(prompts, greedy(24))]
            assert [engine.generate(each, greedy(24)).token_ids for each in prompts] == together
            seen = eager(engine)
            for prompt, tokens in zip(prompts, together, strict=True):
                seen.clear()
                assert engine.generate(prompt, greedy(24)).token_ids == tokens
                rows += [row for (_, place), row in seen.items() if place == len(prompt) - 1]
    errors = [
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(last["packed"], last["plain"], strict=True)
    ]
    assert len(errors) == 5 and sorted(errors)[2] < 0.03, errors


def test_a_budget_counts_mxfp4_experts_in_4_bits(even: Any, tmp_path: Path) -> None:
    """Codes of 4 bits, scales of 8 for 32 of them, and a factor in 32 bits for each row."""
    packed_checkpoint(even.path, tmp_path / "packed")
    config = read_model(Checkpoint.open(tmp_path / "packed"))
    weights = config.allocate(device="meta", dtype=torch.bfloat16)
    rows = {"gate_up": (64, 64), "down": (64, 32)}
    expected = sum(m * k // 2 + m * k // 32 + 4 * m for m, k in rows.values()) + 2 * (64 + 64)
    # Blocks of codes have 64 columns: half of those of down are empty.
    expected += 64 * 32 // 2
    assert weights.routed is not None and weights.routed.nbytes == 2 * 5 * expected
    labels = weights.bytes_by_kind(torch.bfloat16)
    assert labels["e2m1-1x32"] == 2 * 5 * (expected - 2 * (64 + 64))
    assert weights.parameters == even.model.num_parameters()


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_stacked_experts_are_rounded_while_loading(
    oracles: dict[str, Any], tmp_path: Path, kind: Any
) -> None:
    """The logits are those of transformers with the rounded numbers; the router stays as it is."""
    source = oracles["long" if kind != "int4" else "short"]
    tensors = {name: each.clone() for name, each in Checkpoint.open(source.path).mapped().items()}
    for name, tensor in tensors.items():
        if name.endswith(CODES):
            rounded = [dequantise(quantise(each.t(), KIND_FORMATS[kind])).t() for each in tensor]
            tensors[name] = torch.stack(rounded).contiguous()
        elif name.endswith("_proj.weight"):
            tensors[name] = dequantise(quantise(tensor, KIND_FORMATS[kind]))
    meant = tmp_path / "meant"
    meant.mkdir()
    (meant / "config.json").write_text((source.path / "config.json").read_text())
    save_file(tensors, meant / "model.safetensors")
    oracle = type(source)(meant)
    with open_engine(source, device="cpu", quantize=kind) as engine:
        experts = experts_of(engine, 0)
        assert isinstance(experts.gate_up, PackedExperts)
        assert experts.gate_up.format == KIND_FORMATS[kind]
        for prompt in oracle.prompts((4, 31)):
            oracle.assert_greedy(engine.generate(prompt, greedy(12)))


def small(**options: Any) -> dict[str, Any]:
    """Options of `open_engine`."""
    sizes = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8}
    return sizes | {"device": "cpu"} | options


def read_weights(path: Path) -> list[torch.Tensor]:
    checkpoint = Checkpoint.open(path)
    weights = read_model(checkpoint).allocate(device="cpu", dtype=torch.bfloat16)
    load_weights(
        checkpoint,
        destinations(checkpoint, weights),
        weights.linears(),
        weights.config.embedding_name,
    )
    return weights.tensors()


def test_mxfp4_experts_that_do_not_fit(even: Any, tmp_path: Path) -> None:
    tensors = packed_checkpoint(even.path, tmp_path / "packed")
    name = "model.layers.1.mlp.experts.down_proj"
    for changed, message in (
        ({f"{name}_scales": None}, f"one of .*, {name}_scales is needed"),
        ({f"{name}_blocks": None}, f"one of .*, {name}_blocks is needed"),
        (
            {f"{name}_blocks": tensors[f"{name}_blocks"][:4].contiguous()},
            rf"{name}_blocks has shape \[4, 64, 1, 16\], and there are 5 experts",
        ),
        (
            {f"{name}_scales": tensors[f"{name}_scales"][:, :3].contiguous()},
            rf"{name}_scales .*\[3, 1\].*\[64, 1\]",
        ),
        (
            {f"{name}_scales": torch.full((5, 64, 1), 255, dtype=torch.uint8)},
            "scales are positive and finite",
        ),
    ):
        kept = {k: v for k, v in (tensors | changed).items() if v is not None}
        save_file(kept, tmp_path / "packed" / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            read_weights(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(ValueError, match=r"configs say nothing of quantised weights"):
        read_weights(tmp_path / "packed")


def test_experts_in_one_tensor_are_not_written(oracles: dict[str, Any], tmp_path: Path) -> None:
    oracle = next(iter(oracles.values()))
    checkpoint = Checkpoint.open(oracle.path)
    message = r"has the \d+ experts of a layer in one tensor, .*: quantize='int8' rounds them while"
    with pytest.raises(ValueError, match=message):
        write_quantised(checkpoint, tmp_path / "out", "int8")
