"""Tokens that a caller chooses: `Engine.force` in place of what would be sampled next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engines.small_engine import OTHER, PROMPT, assert_idle, open_engine, run, sampled
from engines.speculation import open_speculating
from graphengine import Engine, Request, SamplingParams, StructuredOutputsParams
from graphengine.speculative import MTP, NGram

ASKED = SamplingParams(
    temperature=0.0, max_tokens=12, ignore_eos=True, forced_tokens=True, logprobs=0
)
CHOICES = {0: 77, 3: 31, 4: 32, 9: 4095}
"""Forced tokens by their place in the output; bit 31 of a word is one of them."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with open_engine(device=request.param, dtype="float32", row_family="dot") as opened:
        yield opened


def steer(engine: Engine, request: Request, choices: dict[int, int]) -> None:
    """Step to the request's end, and force the tokens at these places of its output."""
    for _ in range(100):
        if request.finished:
            return
        if len(request.token_ids) in choices:
            engine.force(request, choices[len(request.token_ids)])
        engine.step()
    raise AssertionError(f"{request!r} does not end")


def expected(engine: Engine, prompt: list[int], choices: dict[int, int]) -> list[int]:
    """The tokens of requests that each begin with all tokens before."""
    said: list[int] = []
    plain = replace(ASKED, forced_tokens=False, max_tokens=1)
    while len(said) < 12:
        token = choices.get(len(said))
        if token is None:
            (token,) = engine.generate([*prompt, *said], plain).token_ids
        said.append(token)
    return said


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_follows_follows_the_forced_token(engine: Engine, lookahead: int) -> None:
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(PROMPT)
    wanted = expected(engine, prompt, CHOICES)
    free = engine.generate(OTHER, sampled(20, seed=2)).token_ids
    with open_engine(
        device=str(engine.memory.device), dtype="float32", row_family="dot", lookahead=lookahead
    ) as other:
        neighbour = other.submit(OTHER, sampled(20, seed=2))
        other.step()
        request = other.submit(prompt, ASKED)
        steer(other, request, CHOICES)
        assert other.scheduler.lookahead == lookahead
        run(other)
        assert request.token_ids == wanted
        assert tuple(neighbour.token_ids) == free
        assert request.text == other.tokenizer.decode(wanted)  # type: ignore[union-attr]
        # Of the model's own distribution.
        values = [row[token].logprob for token, row in zip(wanted, request.logprobs, strict=True)]
        assert all(values[place] < -1 for place in CHOICES)
        assert_idle(other)


@pytest.mark.parametrize(
    "speculative", [NGram(3), MTP(k=2), MTP(tree=[[0], [1], [0, 0]])], ids=["ngram", "mtp", "tree"]
)
def test_drafts_go_on_after_it(engine: Engine, speculative: Any) -> None:
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(PROMPT * 3)
    choices = {0: 77}
    with open_speculating(speculative, device=str(engine.memory.device), dtype="float32") as other:
        request = other.submit(prompt, ASKED)
        other.force(request, 77)
        while len(request.token_ids) < 6:
            other.step()
        # A step emits several tokens: what is forced comes after them.
        choices[len(request.token_ids)] = 5
        other.force(request, 6)
        other.force(request, 5)
        steer(other, request, {})
        assert_idle(other)
    assert request.token_ids == expected(engine, prompt, choices)


def test_a_request_without_forced_tokens_is_as_any(engine: Engine) -> None:
    plain = sampled(15, seed=3, top_k=20)
    free = engine.generate(PROMPT, plain)
    assert engine.generate(PROMPT, replace(plain, forced_tokens=True)).token_ids == free.token_ids
    limited = replace(plain, allowed_token_ids=range(300, 330))
    wanted = engine.generate(PROMPT, limited).token_ids
    request = engine.submit(PROMPT, replace(limited, forced_tokens=True))
    while not request.token_ids:
        engine.step()
    # Not one of those that are allowed, and only this once.
    engine.force(request, 7)
    run(engine)
    said = request.token_ids
    assert said[0] == wanted[0] and said[1] == 7 and {*said[2:]} <= {*range(300, 330)}


def test_it_may_end_the_request(engine: Engine) -> None:
    request = engine.submit(PROMPT, replace(ASKED, stop_token_ids=[9]))
    steer(engine, request, {2: 9})
    assert request.token_ids[2:] == [9]
    assert (request.finish_reason, request.stop_reason) == ("stop", 9)
    # The next request in its slot is not forced.
    free = engine.generate(PROMPT, replace(ASKED, forced_tokens=False))
    request = engine.submit(PROMPT, ASKED)
    engine.force(request, 1)
    request.cancel()
    run(engine)
    assert engine.generate(PROMPT, ASKED).token_ids == free.token_ids


def test_a_step_in_flight_keeps_its_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = engine.submit(PROMPT, ASKED)
    engine.step()
    before = request.token_ids
    with monkeypatch.context() as patch:
        # Not done in time.
        patch.setattr(engine.core, "collect", lambda timeout: None)
        assert engine.step(timeout=0) == []
        with pytest.raises(ValueError, match=r"is in flight: step\(\) until it has been read"):
            engine.force(request, 5)
    engine.step()
    assert request.token_ids[:-1] == before
    engine.force(request, 5)
    engine.step()
    assert request.token_ids[-1] == 5
    request.cancel()
    run(engine)


def test_what_cannot_be_forced_is_refused(engine: Engine) -> None:
    options: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": [9]}
    request = engine.submit(PROMPT, replace(ASKED, **options, logit_bias={8: float("-inf")}))
    for token, message in {
        -1: "-1",
        4096: "4096",
        8: "token 8 cannot be forced: its logit_bias is -inf",
        9: r"token 9 cannot be forced: it would end the request after 0 tokens, before min_tok",
    }.items():
        with pytest.raises(ValueError, match=message):
            engine.force(request, token)
    plain = engine.submit(PROMPT, sampled(2))
    with pytest.raises(ValueError, match="was submitted without forced_tokens=True"):
        engine.force(plain, 5)
    run(engine)
    with pytest.raises(ValueError, match="has ended: it emits no other token"):
        engine.force(request, 5)
    with open_engine(device="cpu") as other:
        foreign = other.submit(PROMPT, ASKED)
        with pytest.raises(ValueError, match="is no request of this engine"):
            engine.force(foreign, 5)
        other.drain()
    for beside in (
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ):
        with pytest.raises(ValueError, match=f"forced_tokens=True: {next(iter(beside))} could"):
            engine.submit(PROMPT, replace(ASKED, **beside))
    with (
        open_engine(device="cpu", speculative=NGram(2), forced_acceptance=1) as forcing,
        pytest.raises(ValueError, match="takes drafts instead"),
    ):
        forcing.submit(PROMPT, ASKED)
