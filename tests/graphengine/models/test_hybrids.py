"""Hybrids against transformers: Mamba2, gated delta nets or short convolutions, and attention."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from checkpoints.hybrids import MODELS, A, C, E, F, M, granite, nemotron, qwen_next
from checkpoints.small_decoders import block_in, expert_layers
from engines.family_checks import assert_replies
from engines.small_engine import run
from engines.speculation import script, step_with
from extent import extent, some_of
from graphengine import Engine, Request, SamplingParams, Session
from graphengine.config import RoundedKind
from graphengine.drafters.mtp.layer import LAYOUTS, MtpConfig
from graphengine.kernels.linear.packed import unpack
from graphengine.kernels.linear.quantised import dequantise
from graphengine.kernels.recurrent import short_conv_reference
from graphengine.models.blocks import gated_delta as delta
from graphengine.models.blocks import mamba2
from graphengine.models.blocks.experts import Experts, ExpertsWeights
from graphengine.models.blocks.mamba2 import RING, STATE
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations, read_model
from graphengine.models.checkpoints.tensor_files import TensorSlice
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.launches import Share
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.quantised.writer import write_quantised
from graphengine.models.splitting.rank_cuts import cut_to
from graphengine.models.splitting.rank_sizes import of_rank
from graphengine.models.states import Paged, Recurrent, recurrent_field, recurrent_states
from graphengine.speculative import DraftModel, NGram, SaveHiddenStates, UserProvided
from launches.compilation import graph_kernels

# Several blocks of 8.
TOKENS = 24
# One of each kind of state; granite's is nemotron's.
KINDS = extent(("nemotron", "qwen", "lfm2"), ("granite", "nemotron", "qwen", "lfm2"))
# Each kind of layer, with experts and without them.
LAYERS = extent(
    ("granite-experts", "nemotron", "qwen", "qwen-next-experts", "lfm2-biases", "lfm2-experts"),
    tuple(MODELS),
)


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 3, "max_seq_len": 400, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **({"prefill_buckets": (16, 64)} | options))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(
    hybrids: dict[str, Any], device: str, eager: Callable[[Engine], Any], name: str
) -> None:
    oracle = hybrids[name]
    with open_engine(oracle.path, device=device, lookahead=0) as engine:
        # Tokens that are all alike would hide a wrong state.
        for result in assert_replies(engine, oracle, eager, (1, 3, 67)):
            assert len(set(result.token_ids)) > 4


@pytest.mark.parametrize("name", MODELS)
def test_half_precision(hybrids: dict[str, Any], device: str, name: str) -> None:
    """In bfloat16 a batch says what each request says alone, and about what transformers says."""
    if device == "cuda" and not name.endswith(("experts", "dense")):
        pytest.skip("in half precision on a GPU by other tests")
    oracle = hybrids[name]
    prompts = oracle.prompts((1, 20, 37))
    with open_engine(oracle.path, device=device, dtype="bfloat16") as engine:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
        together = engine.generate(prompts, params)
        alone = [engine.generate(prompt, params) for prompt in prompts]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    for prompt, result in zip(prompts, alone, strict=True):
        logits = oracle.logits([*prompt, *result.token_ids[:1]])[len(prompt) - 1]
        assert result.logprobs is not None
        found = result.logprobs[0][result.token_ids[0]].logprob
        assert abs(found - logits.log_softmax(0)[result.token_ids[0]].item()) < 0.25


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_stacked_experts_are_rounded_while_they_are_read(
    hybrids: dict[str, Any], device: str, eager: Callable[[Engine], Any], kind: RoundedKind
) -> None:
    """Granite keeps a layer's experts in one tensor, gates before ups, as linears have them."""
    oracle = hybrids["granite-experts"]
    rows = []
    # Of packed weights a GPU computes in half precision alone.
    dtype = "float32" if device == "cpu" else "float16"
    for quantize in (None, kind):
        options = {"device": device, "dtype": dtype, "quantize": quantize, "lookahead": 0}
        with open_engine(oracle.path, **options) as engine:
            seen = eager(engine)
            engine.generate([5, 9, 77, 3], greedy(2))
            rows.append(torch.stack([*seen.values()][:1]))
            blocks = engine.model.weights.blocks()
            experts = [block for block in blocks if isinstance(block, ExpertsWeights)]
            packed = [not isinstance(block.gate_up, torch.Tensor) for block in experts]
            assert packed == [quantize is not None] * 3
    plain, rounded = rows
    error = (rounded - plain).abs().max() / plain.abs().max()
    assert 0 < error < 0.1


def test_granite_without_experts_may_choose_none(
    hybrids: dict[str, Any], edited: Callable[..., Path]
) -> None:
    path = edited(hybrids["granite"].path, config={"num_experts_per_tok": 0})
    assert read_model_config(Checkpoint.open(path).config).num_layers == 4
    path = edited(hybrids["granite-experts"].path, config={"num_experts_per_tok": 0})
    with pytest.raises(ValueError, match="num_experts_per_tok=0: supported: 1 to num_local_exp"):
        read_model_config(Checkpoint.open(path).config)
    path = edited(hybrids["granite-experts"].path, config={"intermediate_size": None})
    with pytest.raises(ValueError, match="intermediate_size"):
        read_model_config(Checkpoint.open(path).config)


@pytest.mark.parametrize("name", ["granite", "nemotron-latents", "qwen", "lfm2"])
def test_prompts_of_many_lengths(
    hybrids: dict[str, Any], device: str, eager: Callable[[Engine], Any], name: str
) -> None:
    """About as long as the convolution, a piece and a chunk, and longer than several of them."""
    oracle = hybrids[name]
    with open_engine(oracle.path, device=device, lookahead=0) as engine:
        assert_replies(engine, oracle, eager, (2, 4, 5, 63, 64, 65, 128, 300), tokens=3)


@pytest.mark.parametrize("name", LAYERS)
def test_chunks_and_batches(hybrids: dict[str, Any], device: str, name: str) -> None:
    """Prompts in one chunk and in many; in a batch a request says what it says alone."""
    oracle = hybrids[name]
    prompts = oracle.prompts((1, 20, 70, 3))
    results = []
    for buckets in ((8,), (16, 128)):
        with open_engine(oracle.path, device=device, prefill_buckets=buckets) as engine:
            together = engine.generate(prompts, greedy(6))
            alone = [engine.generate(prompt, greedy(6)) for prompt in prompts]
            assert engine.counters["slot_reuses"] > 0
        assert [each.token_ids for each in together] == [each.token_ids for each in alone]
        results += together
    for result in results:
        oracle.assert_greedy(result)


@pytest.mark.parametrize("name", KINDS)
def test_paused_requests_resume_with_the_same_tokens(
    hybrids: dict[str, Any], device: str, name: str
) -> None:
    oracle = hybrids[name]
    prompts = oracle.prompts((9, 30, 41))
    with open_engine(oracle.path, device=device) as engine:
        expected = [engine.generate(prompt, greedy()).token_ids for prompt in prompts]
    options = {"max_seq_len": 96, "kv_blocks": 14, "swap_blocks": 60}
    with open_engine(oracle.path, device=device, **options) as engine:
        results = engine.generate(prompts, greedy())
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(
    ("name", "k"),
    extent(
        [("granite", 0), ("nemotron-latents", 3), ("qwen-next-experts", 3), ("lfm2", 0)],
        [(name, k) for name in KINDS for k in (0, 3)],
    ),
)
def test_a_session_goes_on(
    hybrids: dict[str, Any], device: str, tmp_path: Path, name: str, k: int
) -> None:
    """It goes on from state checkpoints: its own, a fork's, and those of a file, with other drafts.
    Each reply is the best that transformers knows of the whole conversation.
    """
    oracle = hybrids[name]
    first, second, third = oracle.prompts((45, 6, 21))
    options = {"device": device, "row_family": "dot"}

    def say(session: Session, prompt: list[int], tokens: int, cached: int) -> None:
        session.append(prompt)
        result = session.generate(greedy(tokens))
        assert result.cached_tokens == cached
        oracle.assert_greedy(result)

    drafts = NGram(k=k) if k else None
    with open_engine(oracle.path, **options, speculative=drafts) as engine:
        with engine.session() as session:
            say(session, first, 20, 0)
            say(session, second, 30, 64)
            # Back to within the second reply: to the end of its prompt.
            session.rewind(23)
            with session.fork() as fork:
                say(session, third, 17, 71)
                say(fork, second, 17, 71)
                assert fork.cached_tokens == len(fork) - 1
            session.snapshot(tmp_path / "session")
            length = len(session)
        assert engine.counters["states/rewound_past"] == 78 - 71
    with (
        open_engine(oracle.path, **options, speculative=NGram(k=5 - k)) as engine,
        engine.restore_session(tmp_path / "session") as session,
    ):
        say(session, second, 17, length - 1)


@pytest.mark.parametrize("name", KINDS)
def test_prompts_go_on_from_those_of_others(
    hybrids: dict[str, Any], device: str, name: str
) -> None:
    oracle = hybrids[name]
    head, one, other = oracle.prompts((150, 5, 9))
    options = {"device": device, "prefix_caching": True, "session_states": 8}
    with open_engine(oracle.path, **options) as engine:
        for prompt, cached in (
            (head, 0),
            (head + one, 150),
            (head[:140] + other, 128),
            (head[:70] + other, 64),
        ):
            result = engine.generate(prompt, greedy(12))
            assert result.cached_tokens == cached
            oracle.assert_greedy(result)


@pytest.mark.parametrize("name", ["granite", "nemotron-latents", "qwen-next-experts", "lfm2"])
def test_drafts_change_no_token(hybrids: dict[str, Any], device: str, name: str) -> None:
    """Drafts of repeated prompts, some of which are right, and drafts of another model."""
    oracle = hybrids[name]
    prompts = [prompt * 3 for prompt in oracle.prompts((5, 11, 14))]
    plain = {"device": device, "row_family": "dot"}
    with open_engine(oracle.path, **plain) as engine:
        expected = [each.token_ids for each in engine.generate(prompts, greedy())]
    for mode in (NGram(k=4), DraftModel(hybrids["nemotron-biases"].path, k=3)):
        with open_engine(oracle.path, **plain, speculative=mode) as engine:
            results = engine.generate(prompts, greedy())
            assert engine.acceptance.proposed > 0
        assert [each.token_ids for each in results] == expected


@pytest.mark.parametrize("name", KINDS)
def test_a_model_drafts_for_itself(hybrids: dict[str, Any], device: str, name: str) -> None:
    """All drafts are right, so that the draft model computes what the target does."""
    path = hybrids[name].path
    options = {"device": device, "row_family": "dot", "speculative": DraftModel(path, k=3)}
    with open_engine(path, **options) as engine:
        engine.generate(hybrids[name].prompts((21,)), greedy(32))
        assert engine.acceptance.accepted == engine.acceptance.proposed > 20


@torch.no_grad()
@pytest.mark.parametrize("name", ["granite", "nemotron"])
def test_hidden_states_are_those_of_transformers(
    hybrids: dict[str, Any], device: str, tmp_path: Path, name: str
) -> None:
    """Though Granite's stream is kept divided. After the last norm they are what lm_head reads."""
    oracle = hybrids[name]
    prompts = oracle.prompts((5, 70))
    mode = SaveHiddenStates(tmp_path / "states", layers=(0, 2), write_interval=1)
    with open_engine(oracle.path, device=device, speculative=mode) as engine:
        requests = [engine.submit(prompt) for prompt in prompts]
        run(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        found = load_file(tmp_path / "states" / f"{request.id:08d}.safetensors")
        outputs = oracle.model(torch.tensor([prompt]), output_hidden_states=True)
        states = [each[0] for each in outputs.hidden_states]
        scale = getattr(oracle.model.config, "logits_scaling", 1.0)
        for got, wanted in (
            (
                found["hidden_states"],
                states[-1] / scale,
            ),
            (found["aux_hidden_states"], torch.cat([states[1], states[3]], dim=1)),
        ):
            assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", ["granite", "nemotron"])
def test_log_probabilities_of_prompts(hybrids: dict[str, Any], device: str, name: str) -> None:
    oracle = hybrids[name]
    (prompt,) = oracle.prompts((70,))
    options = {"device": device, "prompt_logprobs": True, "max_logprobs": 1}
    with open_engine(oracle.path, **options) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1)
        result = engine.generate(prompt, params)
    wanted = oracle.logits(prompt).log_softmax(1)
    found = [
        each[token].logprob
        for token, each in zip(prompt[1:], (result.prompt_logprobs or [])[1:], strict=True)
    ]
    expected = wanted[torch.arange(69), prompt[1:]]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


def test_a_window_that_is_not_taken_back_is_found(
    hybrids: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pretend that one more token, such as a refused draft, were in a convolution's window."""
    oracle, options = hybrids["lfm2"], {"device": "cpu", "row_family": "dot"}
    (prompt,) = oracle.prompts((14,))
    with open_engine(oracle.path, **options) as engine:
        expected = engine.generate(prompt * 3, greedy(40)).token_ids
    real = short_conv_reference.causal_conv_reference

    def faulty(x: torch.Tensor, weight: Any, bias: Any, ring: torch.Tensor, *where: Any) -> Any:
        y = real(x, weight, bias, ring.roll(-1, dims=1), *where)
        real(x, weight, bias, ring, *where)
        return y

    mode = NGram(k=4)
    with open_engine(oracle.path, **options, speculative=mode) as engine:
        assert engine.generate(prompt * 3, greedy(40)).token_ids == expected
    monkeypatch.setattr(short_conv_reference, "causal_conv_reference", faulty)
    with open_engine(oracle.path, **options, speculative=mode) as engine:
        assert engine.generate(prompt * 3, greedy(40)).token_ids != expected


@pytest.mark.parametrize(
    ("name", "block", "decode"),
    [
        ("granite", mamba2, "mamba2_decode_gated"),
        ("nemotron", mamba2, "mamba2_decode"),
        ("qwen", delta, "gated_delta_decode"),
    ],
)
def test_a_state_that_is_not_the_accepted_token_s_is_found(
    hybrids: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    block: ModuleType,
    decode: str,
) -> None:
    """An index that is off by one, and a step that goes on from where the one before ended."""
    oracle, options = hybrids[name], {"device": "cpu", "row_family": "dot", "lookahead": 0}
    (prompt,) = oracle.prompts((14,))
    real, ends = getattr(block, decode), dict[tuple[int, int], int]()

    def faulty(
        fault: str,
        x: torch.Tensor,
        ring: torch.Tensor,
        state: torch.Tensor,
        slot: torch.Tensor,
        position: torch.Tensor,
        *operands: Any,
        tokens_per_row: int,
        **others: Any,
    ) -> Any:
        entries = state.shape[1]
        for first in range(0, len(slot), tokens_per_row):
            owner, start = int(slot[first]), int(position[first])
            if owner >= 0:
                layer = state.data_ptr(), owner
                other = start - 2 if fault == "of the token before" else ends.get(layer, start - 1)
                state[owner, (start - 1) % entries] = state[owner, other % entries]
                live = int((slot[first : first + tokens_per_row] >= 0).sum())
                ends[layer] = start + live - 1
        where = (x, ring, state, slot, position)
        return real(*where, *operands, tokens_per_row=tokens_per_row, **others)

    def tokens(mode: NGram | None) -> list[int]:
        with open_engine(oracle.path, **options, speculative=mode) as engine:
            return engine.generate(prompt * 3, greedy()).token_ids

    expected, mode = tokens(None), NGram(k=4)
    assert tokens(mode) == expected
    for fault in ("of the token before", "of the last draft"):
        ends.clear()
        monkeypatch.setattr(block, decode, partial(faulty, fault))
        # Without drafts there is one entry, which is the right one.
        assert tokens(None) == expected
        assert tokens(mode) != expected, fault


def test_what_layers_keep(hybrids: dict[str, Any], device: str) -> None:
    """Nobody's slots stay as they are, and what an earlier request left there does no harm."""
    oracle = hybrids["nemotron"]
    (prompt,) = oracle.prompts((20,))
    with open_engine(oracle.path, device=device, lookahead=0) as engine:
        expected = engine.generate(prompt, greedy(8)).token_ids
        kept = [engine.runtime.buffers[recurrent_field(0, name)] for name in (RING, STATE)]
        assert [each.shape for each in kept] == [(3, 4, 120 + 2 * 3 * 24), (3, 1, 6, 20, 24)]
        assert all(each.dtype == torch.float32 for each in kept)
        for each in kept:
            each.fill_(torch.nan)
        assert engine.generate(prompt, greedy(8)).token_ids == expected
        for each in kept:
            assert not each[0].isnan().any() and each[1:].isnan().all()


def edit(oracle: Any, edited: Callable[..., Path], **changes: Any) -> Path:
    return edited(oracle.path, config=changes)


def test_states_may_be_in_half_precision(
    hybrids: dict[str, Any], edited: Callable[..., Path]
) -> None:
    path = edit(hybrids["nemotron"], edited, mamba_ssm_cache_dtype="bfloat16")
    prompts = hybrids["nemotron"].prompts((30, 70))
    with open_engine(path, device="cpu") as engine:
        assert engine.runtime.buffers[recurrent_field(0, STATE)].dtype == torch.bfloat16
        together = engine.generate(prompts, greedy(20))
        alone = [engine.generate(prompt, greedy(20)) for prompt in prompts]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


@pytest.mark.parametrize(
    ("family", "kind"),
    some_of(
        [
            (family, kind)
            for family in (
                "granite",
                "nemotron",
                "nemotron-experts",
                "qwen-next",
                "nemotron-latents",
            )
            for kind in ("fp8", "int4")
        ],
        *(0, 1, 4, 7, 8),
    ),
)
def test_rounded_weights(
    tmp_path: Path,
    write_model: Callable[..., Any],
    eager: Callable[[Engine], Any],
    kind: RoundedKind,
    family: str,
) -> None:
    """Against transformers with what the codes mean; Granite's gates and ups are one linear."""

    def make() -> PreTrainedModel:
        if family == "granite":
            return granite(
                [M, A], shared_intermediate_size=256, mamba_n_heads=4, mamba_expand=2,
                mamba_d_head=64, residual_multiplier=0.5,
            )  # fmt: skip
        if family == "qwen-next":
            return qwen_next(
                [M, A], hidden_size=128, intermediate_size=256, linear_num_key_heads=2,
                linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
                num_experts=5, num_experts_per_tok=2, moe_intermediate_size=128,
                shared_expert_intermediate_size=128,
            )  # fmt: skip
        return nemotron(
            [M, A, F if family == "nemotron" else E], hidden_size=128,
            moe_latent_size=64 if family == "nemotron-latents" else None,
            intermediate_size=256, mamba_num_heads=4, mamba_head_dim=64, n_groups=2,
            n_routed_experts=5, moe_intermediate_size=128, moe_shared_expert_intermediate_size=256,
        )  # fmt: skip

    oracle = write_model(make, tmp_path / family, 3)
    with torch.no_grad():
        for name, weight in oracle.model.named_parameters():
            linear = name.endswith(("_proj.weight", "_linear.weight")) or "in_proj_" in name
            if "conv" not in name and linear:
                weight.copy_(dequantise(quantise(weight, KIND_FORMATS[kind])))
            for expert in weight if ".experts." in name else ():
                expert.copy_(dequantise(quantise(expert, KIND_FORMATS[kind])))
    with open_engine(oracle.path, device="cpu", quantize=kind, lookahead=0) as engine:
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            result = engine.generate(prompt, greedy(12))
            oracle.assert_logits(result, seen)


def test_an_embedding_of_another_name_may_be_lm_head(
    tmp_path: Path, write_model: Callable[..., Any]
) -> None:
    """Nemotron-H's has a name of its own. transformers takes lm_head wherever it is stored."""

    def make() -> PreTrainedModel:
        return nemotron([M, A, F], tie_word_embeddings=True, hidden_size=128)

    oracle = write_model(make, tmp_path / "both", 4)
    with open_engine(oracle.path, device="cpu") as engine:
        oracle.assert_greedy(engine.generate(oracle.prompts((20,))[0], greedy(12)))
    tensors = {
        name: tensor
        for shard in oracle.path.glob("*.safetensors")
        for name, tensor in load_file(shard).items()
    }
    tensors.pop("lm_head.weight", None)
    tied = tmp_path / "tied"
    tied.mkdir()
    save_file(tensors, tied / "model.safetensors")
    (tied / "config.json").write_text((oracle.path / "config.json").read_text())
    embedding = tensors["backbone.embeddings.weight"]
    with open_engine(tied, device="cpu") as engine:
        assert torch.equal(engine.runtime.program.model.lm_head, embedding)
    with open_engine(tied, device="cpu", quantize="fp8", quantize_lm_head=True) as engine:
        rounded = dequantise(quantise(embedding, KIND_FORMATS["fp8"]))
        assert torch.equal(dequantise(unpack(engine.runtime.program.model.lm_head)), rounded)


def test_a_rank_reads_a_part_of_each_piece(hybrids: dict[str, Any]) -> None:
    """Granite's gates and ups are split each by themselves, and so are the parts of a projection;
    B and C of the one group are on each rank.
    """
    checkpoint = Checkpoint.open(hybrids["granite"].path)
    model = read_model_config(checkpoint.config)
    whole = model.allocate(device="cpu", dtype=torch.float32)
    part = of_rank(model, Share(0, 2)).allocate(device="cpu", dtype=torch.float32)
    cut = cut_to(checkpoint, whole, part, Share(1, 2))
    gates = cut.tensors["model.layers.0.shared_mlp.input_linear.weight"].cut
    assert gates == TensorSlice(0, ((38, 38), (76 + 38, 38)), 152)
    # 6 heads of 64 values, one group of 24.
    projected = cut.tensors["model.layers.0.mamba.in_proj.weight"].cut
    spans = ((192, 192), (384 + 192, 192), (768, 24), (792, 24), (816 + 3, 3))
    assert projected == TensorSlice(0, spans, 822)


def test_kernels_of_a_step(hybrids: dict[str, Any]) -> None:
    """Four of a Mamba2 layer, three of attention and of an MLP without gates."""
    sizes = {"device": "cpu", "dtype": "bfloat16", "row_family": "dot"}
    with open_engine(hybrids["nemotron"].path, **sizes) as engine:
        graphs = graph_kernels(engine)
    names = [kernel.name.lstrip("_") for kernel in graphs["decode/2/fast"]]
    mamba = ["dot_kernel", "decode_kernel", "norm_kernel", "dot_kernel"]
    mlp = ["dot_kernel", "squared_relu_kernel", "dot_kernel"]
    attention = ["dot_kernel", "decode_attention_kernel", "dot_kernel"]
    assert names[1:22] == [*mamba, *mlp, *mamba, *attention, *mlp, *mamba]
    chunk = [kernel.name for kernel in graphs["prefill/16"]]
    for name in ("pieces_kernel", "pass_kernel", "outputs_kernel", "norm_kernel"):
        assert chunk.count(name) == 3


@pytest.mark.parametrize(
    ("name", "mixer", "chunk"),
    [
        (
            "qwen",
            ["dot_kernel", "decode_kernel", "gated_norm_kernel", "dot_kernel"],
            {
                "conv_chunk_kernel": 3, "pieces_kernel": 3, "scan_kernel": 3, "outputs_kernel": 3,
                "gated_norm_kernel": 0, "gate_kernel": 1,
            },
        ),
        ("lfm2", ["dot_kernel", "decode_kernel", "dot_kernel"], {"conv_chunk_kernel": 3}),
    ],
)  # fmt: skip
def test_kernels_of_layers_with_feed_forwards(
    hybrids: dict[str, Any], name: str, mixer: list[str], chunk: dict[str, int]
) -> None:
    """Two mixers, and attention, which Qwen3.5 gates in a kernel of its own."""
    sizes = {"device": "cpu", "dtype": "bfloat16", "row_family": "dot"}
    with open_engine(hybrids[name].path, **sizes) as engine:
        graphs = graph_kernels(engine)
    names = [kernel.name.lstrip("_") for kernel in graphs["decode/2/fast"]]
    mlp = ["dot_kernel", "dot_kernel"]
    gates = ["gate_kernel"] if name == "qwen" else []
    attention = ["dot_kernel", "decode_attention_kernel", *gates, "dot_kernel"]
    wanted = [*mixer, *mlp, *mixer, *mlp, *attention, *mlp, *mixer, *mlp]
    assert names[1 : 1 + len(wanted)] == wanted
    launched = [kernel.name.lstrip("_") for kernel in graphs["prefill/16"]]
    assert {each: launched.count(each) for each in chunk} == chunk


def with_scripted_drafts(path: Path, prompt: list[int], known: list[int], **options: Any) -> None:
    """Run a request whose caller proposes drafts of which 0, 1, 2, 3 and so on are right."""
    with open_engine(path, row_family="dot", speculative=UserProvided(k=3), **options) as engine:
        request = engine.submit(prompt, greedy(len(known)))
        drafts = script("partly", [tuple(known)], 3, 263).of([request])
        while engine.busy:
            step_with(engine, drafts)
        assert list(request.token_ids) == known
        found = engine.acceptance
        assert 0 < found.accepted < found.proposed


@pytest.mark.parametrize("name", LAYERS)
def test_drafts_of_which_some_are_right_change_no_token(
    hybrids: dict[str, Any], device: str, name: str
) -> None:
    oracle = hybrids[name]
    (prompt,) = oracle.prompts((19,))
    with open_engine(oracle.path, device=device, row_family="dot") as engine:
        known = list(engine.generate(prompt, greedy()).token_ids)
    with_scripted_drafts(oracle.path, prompt, known, device=device)


def states_of(engine: Engine, request: Request) -> tuple[int, list[torch.Tensor]]:
    """How many tokens a running request has fed, and what its next one reads of each layer."""
    slot = request.job.placed.slot
    length = int(engine.runtime.buffers["kv_len"][slot])
    found = []
    for key, state in recurrent_states(engine.model.config.states).items():
        entries = engine.runtime.buffers[recurrent_field(*key)][slot]
        positions = torch.arange(max(0, length - state.depth), length)
        found.append(entries[positions % len(entries)].clone())
    return length, found


@pytest.mark.parametrize("name", ["granite", "nemotron", "qwen", "lfm2"])
def test_states_are_those_of_tokens_fed_one_by_one(hybrids: dict[str, Any], name: str) -> None:
    """Bit for bit, after any number of accepted drafts, of a sampled request."""
    oracle, options = hybrids[name], {"device": "cpu", "row_family": "dot", "lookahead": 0}
    (prompt,) = oracle.prompts((9,))
    params = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
    with open_engine(oracle.path, **options) as engine:
        request = engine.submit(prompt, params)
        alone = {}
        while engine.busy:
            engine.step()
            if request.token_ids and not request.finished:
                length, states = states_of(engine, request)
                alone[length] = states
        known = tuple(request.token_ids)
    for k in (1, 4):
        seen = set()
        with open_engine(oracle.path, **options, speculative=UserProvided(k=k)) as engine:
            request = engine.submit(prompt, params)
            drafts = script("partly", [known], k, 263).of([request])
            while engine.busy:
                step_with(engine, drafts)
                if request.token_ids and not request.finished:
                    length, states = states_of(engine, request)
                    assert all(map(torch.equal, states, alone[length])), f"{length=}"
                    seen.add(length)
            assert tuple(request.token_ids) == known
            assert 0 < engine.acceptance.accepted < engine.acceptance.proposed
        assert len(seen) > 4


@pytest.mark.parametrize("name", ["qwen", "nemotron"])
def test_states_in_half_the_bytes(hybrids: dict[str, Any], device: str, name: str) -> None:
    """Rounded after every token: drafts still change nothing, and logits come near."""
    oracle = hybrids[name]
    (prompt,) = oracle.prompts((31,))
    halved = {"device": device, "state_dtype": "bfloat16"}
    layer = STATE if name == "nemotron" else delta.STATE
    with open_engine(oracle.path, row_family="dot", **halved) as engine:
        known = list(engine.generate(prompt, greedy()).token_ids)
        assert engine.runtime.buffers[recurrent_field(0, layer)].dtype == torch.bfloat16
    with_scripted_drafts(oracle.path, prompt, known, **halved)
    with open_engine(oracle.path, device=device, row_family="dot") as engine:
        exact = engine.generate(prompt, greedy(1)).token_ids
    # The first token is that of a prompt, whose state is rounded once.
    assert list(exact) == known[:1]


def test_models_without_states_of_heads_take_no_dtype_of_them(hybrids: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="state_dtype='bfloat16', but no layer of this Lfm2For"):
        open_engine(hybrids["lfm2"].path, device="cpu", state_dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen", {"layer_types": [M, A, "conv", M]}, "layer_types=.*4 of 'linear_attention' or"),
        ("qwen", {"layer_types": [M, A]}, "layer_types=.*4 of"),
        ("qwen", {"layer_types": [M] * 4}, "one that attends among them"),
        ("qwen", {"linear_num_value_heads": 3}, "linear_num_value_heads=3, no multiple of .*=2"),
        ("qwen", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen", {"output_gate_type": "sigmoid"}, "type='sigmoid': supported: null or 'swish' or"),
        ("qwen", {"linear_conv_kernel_dim": 9}, r"linear_conv_kernel_dim=9: must be .*\[2, 8\]"),
        ("qwen", {"num_experts": 4}, "num_experts=4"),
        ("qwen", {"mamba_ssm_dtype": "half"}, "mamba_ssm_dtype='half': supported: 'float32', "),
        (
            "qwen",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.3}},
            "partial_rotary_factor=0.3",
        ),
        ("lfm2", {"layer_types": [C, C, M, C]}, "layer_types=.*4 of 'conv' or"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": []}, "one that attends among them"),
        ("lfm2", {"conv_L_cache": 1}, r"conv_L_cache=1: must be .*\[2, 8\]"),
        ("lfm2", {"num_experts": 4}, "num_experts=4"),
        ("lfm2", {"attention_bias": True}, "attention_bias=True: supported: null or False"),
        ("lfm2", {"mlp_bias": True}, "mlp_bias=True: supported: null or False"),
        ("qwen", {"mlp_bias": True}, "mlp_bias=True: supported: null or False"),
        ("granite", {"mlp_bias": True}, "mlp_bias=True: supported: null or False"),
    ],
)
def test_what_a_config_must_not_say(
    hybrids: dict[str, Any], name: str, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((hybrids[name].path / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        read_model_config(config | changes)


def test_types_of_layers_may_be_told_otherwise(hybrids: dict[str, Any]) -> None:
    """By intervals and by indices, as older files tell them."""
    configs = {
        name: json.loads((hybrids[name].path / "config.json").read_text())
        for name in ("qwen", "lfm2")
    }
    for config in configs.values():
        del config["layer_types"]
    by_interval = read_model_config(configs["qwen"] | {"full_attention_interval": 3})
    assert [len(states) for states in by_interval.states] == [2, 2, 1, 2]
    by_index = read_model_config(configs["lfm2"] | {"full_attn_idxs": [1, 2]})
    assert [state.name for (state,) in by_index.states if isinstance(state, Recurrent)] == 2 * [C]
    assert [isinstance(state, Paged) for (state,) in by_index.states] == [False, True, True, False]
    older = {"block_ff_dim": 192, "tie_embedding": False}
    renamed = read_model_config(configs["lfm2"] | {"full_attn_idxs": [0]} | older)
    assert renamed.linears["down"].columns == 128 and not renamed.tie_embeddings


def test_a_language_model_beside_a_vision_tower(hybrids: dict[str, Any], tmp_path: Path) -> None:
    """Its config is `text_config`, its tensors have another prefix, and nobody reads the tower's;
    RoPE of three axes is that of one for text.
    """
    path = hybrids["qwen"].path
    text = json.loads((path / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    # As Qwen3.6 has it.
    text["output_gate_type"] = "swish"
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 2},
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {"model.visual.patch_embed.proj.weight": torch.zeros(3, 4)}
    for file in path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            tensors[re.sub(r"^model\.", "model.language_model.", name)] = tensor
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (prompt,) = hybrids["qwen"].prompts((9,))
    found = []
    for each in (path, tmp_path):
        with open_engine(each, device="cpu") as engine:
            found.append(engine.generate(prompt, greedy(12)).token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "below", "firsts", "stacked"),
    [
        ("qwen-experts", "model.layers.{}.mlp.experts.", ("gate", "up"), "gate_up"),
        ("nemotron-experts", "backbone.layers.{}.mixer.experts.", ("up",), "up"),
    ],
)
def test_experts_in_one_tensor(
    hybrids: dict[str, Any],
    tmp_path: Path,
    name: str,
    below: str,
    firsts: tuple[str, ...],
    stacked: str,
) -> None:
    """Qwen3.5 is published with experts in one tensor; they are the weights that the others have
    one expert at a time.
    """
    oracle = hybrids[name]
    (tmp_path / "config.json").write_text((oracle.path / "config.json").read_text())
    tensors = {
        n: t for file in oracle.path.glob("*.safetensors") for n, t in load_file(file).items()
    }
    for layer in expert_layers(read_model_config(Checkpoint.open(oracle.path).config)):
        prefix = below.format(layer)
        count = sum(each.startswith(prefix) for each in tensors) // (len(firsts) + 1)
        *first, down = (
            torch.stack(
                [tensors.pop(f"{prefix}{index}.{each}_proj.weight") for index in range(count)]
            )
            for each in (*firsts, "down")
        )
        tensors[f"{prefix}{stacked}_proj"] = torch.cat(first, dim=1)
        tensors[f"{prefix}down_proj"] = down
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = []
    for path in (oracle.path, tmp_path):
        checkpoint = Checkpoint.open(path)
        loaded = read_model(checkpoint).allocate(device="cpu", dtype=torch.float32)
        for tensor in loaded.tensors():
            tensor.fill_(torch.nan)
        checkpoint.load(destinations(checkpoint, loaded))
        weights.append(loaded.tensors())
    for apart, together in zip(*weights, strict=True):
        assert torch.equal(apart, together)


def test_projections_that_are_interleaved_by_head(hybrids: dict[str, Any]) -> None:
    """Qwen3-Next's are read in the order that transformers brings them to; ranks read theirs."""
    oracle = hybrids["qwen-next-experts"]
    checkpoint = Checkpoint.open(oracle.path)
    prefix = "model.layers.0.linear_attn.in_proj_"
    names = [f"{prefix}{part}.weight" for part in ("qkv", "z", "b", "a")]
    assert f"{prefix}qkvz.weight" not in checkpoint.tensors
    rows = [checkpoint.mapped()[name] for name in names]
    # 2 key heads of 20 values, with 3 value heads of 24 each.
    qkvz, ba = (oracle.model.get_parameter(f"{prefix}{part}.weight") for part in ("qkvz", "ba"))
    by_head = [*qkvz.unflatten(0, (2, -1)).split([20, 20, 72, 72], 1)]
    by_head += ba.unflatten(0, (2, -1)).split([3, 3], 1)
    q, k, v, z, b, a = (each.flatten(0, 1) for each in by_head)
    for found, wanted in zip(rows, (torch.cat([q, k, v]), z, b, a), strict=True):
        assert torch.equal(found, wanted)
    model = read_model_config(checkpoint.config)
    whole = model.allocate(device="meta", dtype=torch.float32)
    part = of_rank(model, Share(1, 2)).allocate(device="meta", dtype=torch.float32)
    cut = cut_to(checkpoint, whole, part, Share(1, 2)).mapped()
    assert torch.equal(cut[names[0]], torch.cat([q[20:], k[20:], v[72:]]))
    assert torch.equal(cut[names[1]], z[72:]) and torch.equal(cut[names[3]], a[3:])


def test_interleaved_projections_are_not_written_anew(
    hybrids: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(hybrids["qwen-next-experts"].path)
    message = "8 tensors that are parts of others, interleaved by head .*quantize='int8' rounds"
    with pytest.raises(ValueError, match=message):
        write_quantised(checkpoint, tmp_path / "written", "int8")


def test_scales_of_interleaved_rows_are_read_with_them(tmp_path: Path) -> None:
    """A scale for every 32 rows, and one for all of them; others do not fit."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"} | sizes))
    name = "layers.0.in_proj_qkvz.weight_scale"
    scales = {"model.layers.1.in_proj_ba.s": torch.ones(1)}
    scales[f"model.{name}"] = torch.arange(12.0)[:, None]
    save_file(scales, tmp_path / "model.safetensors")
    found = Checkpoint.open(tmp_path).mapped()
    assert {*found} == {
        *(f"model.{name}".replace("qkvz", part) for part in ("qkv", "z")),
        *(f"model.layers.1.in_proj_{part}.s" for part in "ba"),
    }
    qkv = found[f"model.{name}".replace("qkvz", "qkv")]
    assert qkv.flatten().tolist() == [0, 6, 1, 7, 2, 3, 8, 9]
    assert found["model.layers.1.in_proj_b.s"].tolist() == [1]
    save_file({f"model.{name}": torch.ones(8, 1)}, tmp_path / "model.safetensors")
    message = r"in_proj_qkvz.weight_scale with shape \[8, 1\]: 2 key heads have 192 rows each"
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(tmp_path)


QWEN_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
    "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "use_cache": True,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
"""The keys of Qwen3-Next-80B-A3B."""


def test_qwen_next_as_it_is_published() -> None:
    assert unknown_keys(QWEN_NEXT) == []
    model = read_model_config(QWEN_NEXT)
    experts = block_in(model, Experts)
    assert expert_layers(model) == tuple(range(48)) and experts.shared_gate
    assert (experts.experts, experts.router.top_k, experts.router.normalised) == (512, 10, True)
    assert 79.5e9 < model.allocate(device="meta", dtype=torch.bfloat16).parameters < 79.8e9
    some = read_model_config(QWEN_NEXT | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert expert_layers(some) == tuple(range(3, 48, 2))
    assert expert_layers(read_model_config(QWEN_NEXT | {"num_experts": 0})) == ()
    for changes, message in (
        ({"num_experts_per_tok": 513}, "num_experts_per_tok=513: supported: 1 to num_experts=512"),
        ({"norm_topk_prob": None}, "norm_topk_prob=None"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads=24, no multiple of .*=16"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
    ):
        with pytest.raises(ValueError, match=message):
            read_model_config(QWEN_NEXT | changes)


QWEN_MOE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056,
    "model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": {"depth": 27},
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "layer_types": ["linear_attention", *["linear_attention"] * 2, "full_attention"] * 10,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type":
        "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512, "use_cache": True, "vocab_size": 248320,
        "mamba_ssm_dtype": "float32", "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip
"""The keys of Qwen3.5-35B-A3B."""


def test_qwen_with_experts_as_it_is_published() -> None:
    model = read_model_config(QWEN_MOE)
    experts = block_in(model, Experts)
    assert model.num_layers == 40 and expert_layers(model) == tuple(range(40))
    assert (experts.experts, experts.router.top_k, experts.ffn_size) == (256, 8, 512)
    assert experts.shared_gate and experts.shared.ffn_size == 512 and experts.router.normalised
    assert 34.6e9 < model.allocate(device="meta", dtype=torch.bfloat16).parameters < 34.8e9
    for changes, message in (
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok=257: supported: 1 to num_experts=256"),
    ):
        text = QWEN_MOE["text_config"] | changes
        with pytest.raises(ValueError, match=message):
            read_model_config(QWEN_MOE | {"text_config": text})


@pytest.mark.parametrize("name", ["granite", "nemotron", "lfm2"])
def test_families_without_draft_modules(hybrids: dict[str, Any], name: str) -> None:
    config = read_model_config(json.loads((hybrids[name].path / "config.json").read_text()))
    with pytest.raises(ValueError, match=f"of a {config.architecture} are not supported"):
        MtpConfig.of_target(config, LAYOUTS[0], ("mtp.",))


def test_a_checkpoint_with_other_names(hybrids: dict[str, Any]) -> None:
    """Nemotron-H's tensors begin with "backbone.": transformers reads them so, and writes them."""
    index = json.loads((hybrids["nemotron"].path / "model.safetensors.index.json").read_text())
    assert "backbone.embeddings.weight" in index["weight_map"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("family", ["fma", "dot"])
def test_half_precision_replays_what_it_computes_eagerly(
    hybrids: dict[str, Any], eager: Callable[[Engine], Any], name: str, family: str
) -> None:
    """The tokens of replays, of eager steps, alone and with drafts."""
    prompts = [prompt * 3 for prompt in hybrids[name].prompts((5, 40))]
    options = {"device": "cuda", "dtype": "bfloat16", "row_family": family, "max_batch": 2}
    path = hybrids[name].path
    with open_engine(path, **options, lookahead=0) as engine:
        replayed = [each.token_ids for each in engine.generate(prompts, greedy(48))]
        alone = [engine.generate(prompt, greedy(48)).token_ids for prompt in prompts]
        assert alone == replayed
        eager(engine)
        assert [each.token_ids for each in engine.generate(prompts, greedy(48))] == replayed
    if family == "dot":
        with open_engine(path, **options, speculative=NGram(k=4)) as engine:
            drafted = [each.token_ids for each in engine.generate(prompts, greedy(48))]
            assert drafted == replayed and engine.acceptance.proposed > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_near_float32(
    hybrids: dict[str, Any], eager: Callable[[Engine], Any], name: str
) -> None:
    """Transformers' own bfloat16 is as near: up to 0.08 of the largest logit away."""
    oracle = hybrids[name]
    options = {"device": "cuda", "dtype": "bfloat16", "row_family": "dot", "lookahead": 0}
    with open_engine(oracle.path, **options) as engine:
        # Where two experts are as good as each other, rounding chooses, and what follows is another
        # sequence: few positions of these prompts are such.
        routed = name.endswith(("experts", "latents"))
        flips, lengths = (0.25, (3, 20, 150)) if routed else (0.0, (3, 150))
        for prompt in oracle.prompts(lengths):
            seen = eager(engine)
            result = engine.generate(prompt, greedy(24))
            oracle.assert_logits(result, seen, tolerance=0.15, flips=flips)
