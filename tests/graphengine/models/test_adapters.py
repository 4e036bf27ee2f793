"""Requests with adapters against transformers with the adapter in its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from checkpoints.adapters import ALL, ATTENTION, FUSED, MLP, linears_of, merged, write_adapter
from checkpoints.family_models import MODELS
from checkpoints.quantised_models import KINDS, write_model
from engines.family_checks import assert_replies
from engines.small_engine import run
from extent import extent
from graphengine import Engine, SamplingParams
from graphengine.speculative import NGram

PROMPT_LENGTHS = extent((1, 17, 75), (1, 17, 90, 300))
TOKENS = extent(20, 64)


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, **options: Any) -> Engine:
    options = {
        "max_batch": 4,
        "max_seq_len": extent(160, 384),
        "dtype": "float32",
        "block_size": 8,
    } | options
    return Engine.from_pretrained(path, **{"prefill_buckets": (16, 64)} | options)


def with_adapter(base: Any, folder: Path, targets: Sequence[str] = ALL, **options: Any) -> Any:
    """The folder of a new adapter, and the oracle of the model with it."""
    adapter = write_adapter(folder / "adapter", base.model, targets, **options)
    merged(base.model, adapter).save_pretrained(folder / "merged")
    return adapter, type(base)(folder / "merged")


@pytest.fixture
def dense(
    checkpoints: dict[str, Any],
    dense_checkpoints: dict[str, Any],
    glm_checkpoints: dict[str, Any],
) -> Callable[[str], Any]:
    return lambda name: (checkpoints | dense_checkpoints | glm_checkpoints)[name]


@pytest.mark.parametrize(
    ("name", "targets", "options"),
    [
        ("llama-biases", ALL, {"rank": 5}),
        ("qwen3-biases", ("q_proj", "v_proj"), {"rank": 8, "use_rslora": True}),
        ("qwen3-tied-128", ALL, {"layers": [1], "rank": 3, "dtype": torch.float16}),
        (
            "llama-tied-yarn",
            (*MLP, "o_proj"),
            {"rank_pattern": {"down_proj": 9, r"layers\.1\.mlp\.up_proj": 2},
             "alpha_pattern": {"o_proj": 30}},
        ),
        ("olmo3", ALL, {"rank": 4}),
        ("phi3", FUSED, {"rank": 6}),
        ("smollm3", ATTENTION, {"rank": 6}),
        # Rows of queries and keys are in another order than in the checkpoint.
        ("glm-norms-biases", ATTENTION, {"rank": 6}),
    ],
)  # fmt: skip
def test_logits_and_greedy_tokens(
    dense: Callable[[str], Any],
    device: str,
    eager: Callable[[Engine], Any],
    tmp_path: Path,
    name: str,
    targets: Sequence[str],
    options: dict[str, Any],
) -> None:
    base = dense(name)
    adapter, oracle = with_adapter(base, tmp_path, targets, **options)
    with open_engine(
        base.path, device=device, lookahead=0, adapters={"a": adapter}, max_adapter_rank=9
    ) as engine:
        assert_replies(engine, oracle, eager, PROMPT_LENGTHS, tokens=TOKENS, adapter="a")
        for result in engine.generate(base.prompts(PROMPT_LENGTHS), greedy()):
            base.assert_greedy(result)


# Names of the linears, which peft takes for GPT-2 transposed, and for GPT-NeoX three as one.
OF_GPT = {
    "GPT2LMHeadModel": ("c_attn", "c_proj", "c_fc"),
    "GPTBigCodeForCausalLM": ("c_attn", "c_proj", "c_fc"),
    "GPTNeoXForCausalLM": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "GPTJForCausalLM": ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"),
}


@pytest.mark.parametrize("architecture", OF_GPT)
def test_linears_by_the_names_of_gpt(
    write_model: Callable[..., Any], device: str, tmp_path: Path, architecture: str
) -> None:
    """In slots and merged, with ranks and scales of their own by full names, as peft fits them."""
    base = write_model(MODELS[architecture][0].make, tmp_path / "base", 3)
    targets = OF_GPT[architecture]
    one, other, *_ = (name for name in linears_of(base.model) if name.endswith(targets[0]))
    options = {
        "fan_in_fan_out": architecture == "GPT2LMHeadModel",
        "rank_pattern": {f"^{one}": 3, other: 4},
        "alpha_pattern": {f"^{other}": 30},
    }
    adapter, oracle = with_adapter(base, tmp_path, targets, rank=6, **options)
    prompts = base.prompts((1, 17, 40))
    sizes = {"device": device, "max_adapter_rank": 6}
    with open_engine(base.path, adapters={"a": adapter}, **sizes) as engine:
        for prompt in prompts:
            with_it, plain = (engine.submit(prompt, greedy(), adapter=name) for name in ("a", None))
            engine.drain()
            oracle.assert_greedy(with_it.result())
            base.assert_greedy(plain.result())
            assert with_it.token_ids != plain.token_ids
    with open_engine(base.path, device=device, merge_adapter=adapter) as engine:
        for result in engine.generate(prompts, greedy()):
            oracle.assert_greedy(result)


def test_norms_after_blocks(write_model: Callable[..., Any], device: str, tmp_path: Path) -> None:
    """Gemma 3 has norms between its products and the stream, and windows of 5 tokens."""
    config = Gemma3TextConfig(
        vocab_size=263, hidden_size=72, intermediate_size=100, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=5,
        max_position_embeddings=512, query_pre_attn_scalar=37,
    )  # fmt: skip
    base = write_model(lambda: Gemma3ForCausalLM(config), tmp_path / "base", 3)
    adapter, oracle = with_adapter(base, tmp_path)
    with open_engine(base.path, device=device, adapters={"a": adapter}) as engine:
        prompts = base.prompts(PROMPT_LENGTHS)
        for result in engine.generate(prompts, greedy(), adapter="a"):
            oracle.assert_greedy(result)


@pytest.mark.parametrize("kind", ["awq", "fp8"])
def test_quantised_bases(device: str, tmp_path: Path, kind: str) -> None:
    """The adapter is added to what the stored weights mean, as QLoRA trains it."""
    name = next(each for each in KINDS if each.startswith(kind))
    written = write_model(tmp_path / "base", KINDS[name])
    adapter = write_adapter(tmp_path / "adapter", written.model)
    with_it = merged(written.model, adapter)
    with open_engine(
        written.path, device=device, max_seq_len=extent(96, 256), adapters={"a": adapter}
    ) as engine:
        for prompt in ([5, 3, 80], [*range(1, 72, 3)] * extent(1, 7)):
            result = engine.generate(prompt, greedy(), adapter="a")
            assert result.token_ids != engine.generate(prompt, greedy()).token_ids
            assert_best(with_it, result)


@torch.no_grad()
def assert_best(model: Any, result: Any) -> None:
    """Each token is the best, or within rounding of it."""
    sequence = torch.tensor([[*result.prompt_token_ids, *result.token_ids]])
    logits = model(sequence).logits[0, len(result.prompt_token_ids) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    assert ((logits.amax(1) - chosen) / logits.abs().amax(1)).max() <= 2e-4


def test_different_adapters_in_one_step(
    checkpoints: dict[str, Any], device: str, tmp_path: Path
) -> None:
    """No chunk, neighbour, pause or n-gram draft changes a token, with an adapter or without."""
    base = checkpoints["qwen3-biases"]
    first, one = with_adapter(base, tmp_path / "1", seed=1)
    second, two = with_adapter(base, tmp_path / "2", ATTENTION, seed=2, rank=8)
    given = {"adapters": {"one": first, "two": second}, "device": device}
    prompts = base.prompts((9, 30, 41, 65))
    # What n-grams find again.
    prompts[1] = prompts[0] * 4
    oracles = {"one": one, "two": two, None: base}
    asked = ["one", "two", None, "one"]
    with open_engine(base.path, **given) as engine:
        alone = [
            engine.generate(prompt, greedy(24), adapter=name)
            for prompt, name in zip(prompts, asked, strict=True)
        ]
        for result in alone:
            oracles[result.adapter].assert_greedy(result)
    expected = [result.token_ids for result in alone]
    pool = {"max_seq_len": 96, "kv_blocks": 17, "swap_blocks": 60}
    for options in ({}, {"speculative": NGram(k=3)}, pool, {"max_batch": 3}):
        with open_engine(base.path, **given, **options) as engine:
            requests = [
                engine.submit(prompt, greedy(24), adapter=name)
                for prompt, name in zip(prompts, asked, strict=True)
            ]
            run(engine)
            assert [request.result().token_ids for request in requests] == expected, options
            assert engine.counters["pauses"] >= 1 or options is not pool
            if "speculative" in options:
                assert 0 < engine.acceptance.accepted < engine.acceptance.proposed


def test_without_an_adapter_bits_are_those_of_an_engine_without_any(
    checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], Any],
    tmp_path: Path,
) -> None:
    """Logits are equal to the last bit, next to a request with an adapter, too."""
    base = checkpoints["llama-biases"]
    adapter, _ = with_adapter(base, tmp_path)
    prompts = base.prompts((5, 20, 33))

    def logits(engine: Engine, asked: Sequence[str | None]) -> dict[tuple[int, int], Any]:
        seen = eager(engine)
        requests = [
            engine.submit(prompt, greedy(8), adapter=name)
            for prompt, name in zip(prompts, asked, strict=True)
        ]
        run(engine)
        slots = {}
        for slot, (request, name) in enumerate(zip(requests, asked, strict=True)):
            assert request.finished
            slots[slot] = name
        return {key: row for key, row in seen.items() if slots[key[0]] is None}

    options = {"device": device, "lookahead": 0}
    with open_engine(base.path, **options) as engine:
        plain = logits(engine, [None] * 3)
    with open_engine(base.path, **options, adapters={"a": adapter}) as engine:
        for asked in ([None] * 3, [None, "a", None]):
            found = logits(engine, asked)
            assert found and all(torch.equal(row, plain[key]) for key, row in found.items())


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_merged_while_loading(
    checkpoints: dict[str, Any], device: str, tmp_path: Path, quantize: Any
) -> None:
    """The engine computes what one of the merged checkpoint does, rounded or not."""
    base = checkpoints["qwen3-biases"]
    adapter, oracle = with_adapter(base, tmp_path)
    prompts, options = base.prompts((5, 40)), {"device": device, "quantize": quantize}
    with open_engine(base.path, merge_adapter=adapter, **options) as engine:
        found = engine.generate(prompts, greedy())
    with open_engine(oracle.path, **options) as engine:
        expected = engine.generate(prompts, greedy())
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    if quantize is None:
        for result in found:
            oracle.assert_greedy(result)
