"""logprob_agreement: the gaps that it reports, what it catches, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.small_engine import open_engine
from graphengine import Engine, SamplingParams
from graphengine.testing import GraphCheckError, logprob_agreement

PROMPTS = [[5, 3, 8, 1], [2] * 20]
FREE = {"max_tokens": 9, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, checkpoints: dict[str, Any]) -> Iterator[Engine]:
    path = checkpoints["llama-biases"].path
    mode: Any = "sampled_logprobs"
    with open_engine(path, device=request.param, dtype="float32", logprobs_mode=mode) as opened:
        yield opened


@pytest.fixture
def model(checkpoints: dict[str, Any]) -> Any:
    return checkpoints["llama-biases"].model


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 2.5},
        {"top_k": 5, "repetition_penalty": 1.3, "logprobs_mode": "raw_logprobs"},
        {"temperature": 0.7, "top_p": 0.8, "logprobs_mode": "processed_logprobs", "logprobs": 2},
    ],
    ids=str,
)  # fmt: skip
def test_an_engine_agrees_with_its_model(
    engine: Engine, model: Any, options: dict[str, Any]
) -> None:
    found = logprob_agreement(
        engine, model, PROMPTS, params=SamplingParams(**FREE, **options), max_gap=1e-3
    )
    assert found.tokens == 18 and found.mean > 0
    assert str(found).startswith(f"mean gap {found.mean:.3g}, max {found.max:.3g} over 18 tokens")


def test_a_request_that_failed_is_no_agreement(engine: Engine, model: Any) -> None:
    """Its tokens are missing: nothing says that they would have agreed."""
    result = SimpleNamespace(
        finish_reason="error", token_ids=(), logprobs=(), prompt_token_ids=(5,)
    )
    config, params = engine.config, engine.default_params
    failing = SimpleNamespace(
        config=config, default_params=params, generate=lambda prompts, params: [result]
    )
    with pytest.raises(GraphCheckError, match="prompt 0 ended with 'error' after 0 tokens"):
        logprob_agreement(failing, model, PROMPTS, params=SamplingParams(**FREE), max_gap=1e-3)


def test_empty_options_change_nothing(engine: Engine, model: Any) -> None:
    params = SamplingParams(**FREE, bad_words=[], logit_bias={})
    assert logprob_agreement(engine, model, PROMPTS, params=params, max_gap=1e-3).tokens == 18


def test_wrong_arguments_are_named(engine: Engine, model: Any) -> None:
    params = SamplingParams(**FREE)
    with pytest.raises(ValueError, match="must be a sequence of prompts, not one prompt"):
        logprob_agreement(engine, model, "ab", params=params, max_gap=1e-3)
    with pytest.raises(ValueError, match="model=None must be callable with ids"):
        logprob_agreement(engine, None, PROMPTS, params=params, max_gap=1e-3)
    small = lambda ids: model(ids).logits[..., :3]  # noqa: E731
    with pytest.raises(ValueError, match=r"logits are \[1, T, V\], of V above"):
        logprob_agreement(engine, small, PROMPTS, params=params, max_gap=1e-3)


def test_the_defaults_and_a_function_will_do(engine: Engine, model: Any) -> None:
    found = logprob_agreement(
        engine, lambda ids: model(ids).logits, PROMPTS, max_gap=1e-3, mean_gap=1e-4, max_tokens=5
    )
    assert 2 <= found.tokens <= 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits: logits * 1.5, r"above max_gap=0\.001$"),
        (lambda logits: torch.cat([logits[:, 1:], logits[:, :1]], 1), r"above max_gap=0\.001$"),
        (lambda logits: logits.clone().fill_(torch.nan), r"max nan .* above max_gap=0\.001$"),
    ],
    ids=["scaled", "shifted", "nan"],
)
def test_another_model_is_caught(
    engine: Engine, model: Any, change: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(GraphCheckError, match=message):
        logprob_agreement(
            engine, lambda ids: change(model(ids).logits), PROMPTS, max_gap=1e-3, max_tokens=5
        )


def test_the_mean_has_a_bound_of_its_own(engine: Engine, model: Any) -> None:
    def scaled(ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=model(ids).logits * 1.5)

    with pytest.raises(GraphCheckError, match=r"above mean_gap=0\.001$"):
        logprob_agreement(engine, scaled, PROMPTS, max_gap=99, mean_gap=1e-3)
    assert logprob_agreement(engine, scaled, PROMPTS, max_gap=99).max > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, r"top_k=5, .* change sampled_logprobs, and the model does not know them"),
        ({"min_tokens": 2}, "min_tokens=2 changes sampled_logprobs"),
        ({"logit_bias": {3: 1.0}, "logprobs_mode": "processed_logprobs"}, "logit_bias="),
        ({"presence_penalty": 0.5}, r"presence_penalty=0\.5 changes sampled_logprobs"),
    ],
    ids=str,
)
def test_what_the_model_cannot_know_is_refused(
    engine: Engine, model: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        params = SamplingParams(**FREE, **options)
        logprob_agreement(engine, model, PROMPTS, params=params, max_gap=1)


def test_what_compares_nothing_is_refused(engine: Engine, model: Any) -> None:
    with pytest.raises(ValueError, match="0 prompts gave no token to compare"):
        logprob_agreement(engine, model, [], max_gap=1)
    with pytest.raises(ValueError, match=r"max_gap=-1 must be at least 0"):
        logprob_agreement(engine, model, PROMPTS, max_gap=-1)
    with pytest.raises(ValueError, match=r"the model gave \(1, 2, 3\) for \d+ ids"):
        logprob_agreement(engine, lambda ids: torch.zeros(1, 2, 3), PROMPTS, max_gap=1)
