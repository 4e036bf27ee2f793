"""Phi-1, 1.5 and 2: lm_head has a bias, which all that reads logits gets; sizes and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.published import PUBLISHED
from checkpoints.small_decoders import composed
from engines.family_checks import assert_rewinds
from graphengine import Engine, SamplingParams
from graphengine.kernels.linear.quantised import dequantise
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.families.registry import read_model_config
from graphengine.models.launches import Share
from graphengine.models.quantised.rounding import KIND_FORMATS, quantise
from graphengine.models.splitting.stages import of_stage
from graphengine.speculative import DraftModel

PHI = PUBLISHED["microsoft/phi-1"].config


def greedy(max_tokens: int = 16, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 3, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **options)


def log_probabilities(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    rows: torch.Tensor = oracle.logits(token_ids).log_softmax(1)
    return rows


def test_the_bias_matters(dense_checkpoints: dict[str, Any]) -> None:
    """Without it most tokens would be others: what the tests below compare shows it."""
    model = dense_checkpoints["phi"].model
    (prompt,) = dense_checkpoints["phi"].prompts((40,))
    logits = dense_checkpoints["phi"].logits(prompt)
    others = (logits - model.lm_head.bias).argmax(1) != logits.argmax(1)
    assert others.float().mean() > 0.2


def test_log_probabilities_of_new_tokens_and_of_prompts(
    dense_checkpoints: dict[str, Any], device: str
) -> None:
    """Those that are reported, and those of the whole vocabulary."""
    oracle = dense_checkpoints["phi"]
    options = {"prompt_logprobs": True, "prompt_logprobs_out": True, "prefill_buckets": (16,)}
    with open_engine(oracle.path, device=device, **options) as engine:
        for prompt in oracle.prompts((5, 41)):
            head = engine.model.lm_head
            rows = torch.zeros(len(prompt), len(head), device=head.device)
            asked = greedy(6, logprobs=3, prompt_logprobs=2)
            result = engine.generate(prompt, asked, prompt_logprobs_out=rows)
            oracle.assert_greedy(result)
            expected = log_probabilities(oracle, [*prompt, *result.token_ids])
            torch.testing.assert_close(rows.cpu(), expected[: len(prompt)], rtol=0, atol=5e-5)
            assert result.prompt_logprobs is not None and result.logprobs is not None
            reported = [*result.prompt_logprobs[1:], *result.logprobs]
            for row, entry in zip(expected, reported, strict=False):
                assert entry is not None and len(entry) >= 2
                for token, each in entry.items():
                    assert each.logprob == pytest.approx(row[token].item(), abs=5e-5)


def test_a_model_drafts_for_itself(dense_checkpoints: dict[str, Any], device: str) -> None:
    path = dense_checkpoints["phi"].path
    options = {"device": device, "row_family": "dot", "speculative": DraftModel(path, k=3)}
    with open_engine(path, **options) as engine:
        engine.generate(dense_checkpoints["phi"].prompts((21,)), greedy(24))
        assert engine.acceptance.accepted == engine.acceptance.proposed > 10


def test_sessions_rewind(dense_checkpoints: dict[str, Any], device: str) -> None:
    with open_engine(dense_checkpoints["phi"].path, device=device) as engine:
        assert_rewinds(engine, dense_checkpoints["phi"])


def test_only_the_last_stage_has_the_bias(dense_checkpoints: dict[str, Any]) -> None:
    model = read_model(Checkpoint.open(dense_checkpoints["phi"].path))
    biased = [composed(of_stage(model, Share(rank, 2))).head_bias for rank in range(2)]
    assert biased == [False, True]


def test_new_weights(dense_checkpoints: dict[str, Any], device: str) -> None:
    path, prompts = dense_checkpoints["phi"].path, dense_checkpoints["phi"].prompts((9, 40))
    files = sorted(path.glob("*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    with open_engine(path, device=device) as engine:
        before = [each.token_ids for each in engine.generate(prompts, greedy())]
        engine.update_weights({"lm_head.bias": stored["lm_head.bias"].flip(0)})
        between = [each.token_ids for each in engine.generate(prompts, greedy())]
        engine.update_weights(stored)
        after = [each.token_ids for each in engine.generate(prompts, greedy())]
        with pytest.raises(ValueError, match=r"lm_head\.bias has shape \[3\], not \[263\]"):
            engine.update_weights({"lm_head.bias": stored["lm_head.bias"][:3]})
    assert after == before != between


def test_a_packed_lm_head_keeps_its_bias(
    tmp_path: Path, write_model: Callable[..., Any], eager: Callable[[Engine], Any]
) -> None:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = transformers.PhiConfig(vocab_size=264, num_attention_heads=2, **sizes)
    oracle = write_model(lambda: transformers.PhiForCausalLM(config), tmp_path / "phi", 3)
    with torch.no_grad():
        for name, weight in oracle.model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.copy_(dequantise(quantise(weight, KIND_FORMATS["int8"])))
    options = {"quantize": "int8", "quantize_lm_head": True, "lookahead": 0}
    with open_engine(oracle.path, device="cpu", **options) as engine:
        for prompt in oracle.prompts((3, 70)):
            seen = eager(engine)
            oracle.assert_logits(engine.generate(prompt, greedy(12)), seen)


# Configs.


def test_parameters_are_as_many_as_published() -> None:
    """Phi-1 has 1.3 billion, Phi-2 2.7."""
    two = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32}
    two |= {"partial_rotary_factor": 0.4, "vocab_size": 51200}
    for changes, billions in (({}, 1.414), (two, 2.7797)):
        model = composed(read_model_config({**PHI, **changes}))
        weights = model.allocate(device="meta", dtype=torch.bfloat16)
        assert weights.parameters == pytest.approx(billions * 1e9, rel=1e-3)
        assert model.rope is not None and model.head_bias
        assert model.rope.rotated == changes.get("partial_rotary_factor", 0.5)
    assert model.attending_decoder() is None, "draft modules share no lm_head with a bias"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_layernorm": True}, "qk_layernorm=True: supported: False"),
        ({"rotary_dim": 16}, "rotary_dim=16: supported: null or 32"),
        ({"hidden_act": "silu"}, "hidden_act='silu': supported: 'gelu'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({"layer_norm_eps": 2}, "layer_norm_eps=2"),
    ],
)
def test_what_it_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(PHI | changes)
