"""Log-probabilities of a prompt's whole vocabulary, in memory of the caller's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engines.small_engine import assert_idle, greedy, open_engine, run, step_until
from graphengine import Engine, EngineConfig, PromptParts, Request

UNTOUCHED = 77.0
SIZES = {"prefill_buckets": (4, 16), "max_seq_len": 96, "max_logprobs": 3}
OPEN: dict[str, Any] = SIZES | {"prompt_logprobs": True, "prompt_logprobs_out": True}
SCORING = greedy(1, prompt_logprobs=3, logprobs=3)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine(device="cpu", prefix_caching=True, **OPEN) as engine:
        yield engine


def memory(engine: Engine, tokens: int, beside: int = 0) -> torch.Tensor:
    """Rows for a prompt of this many tokens, `beside` values apart."""
    weight = engine.model.lm_head
    rows = torch.full((tokens, len(weight) + beside), UNTOUCHED, device=weight.device)
    return rows[:, : len(weight)]


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied-128", "demo"])
def test_they_are_those_of_transformers(
    checkpoints: dict[str, Any], device: str, name: str
) -> None:
    """One chunk, a full one and several; the rest of the caller's rows stays as it was."""
    oracle = checkpoints[name]
    with open_engine(oracle.path, device=device, dtype="float32", **OPEN) as engine:
        for prompt in oracle.prompts((1, 2, 4, 17, 45)):
            rows = memory(engine, len(prompt), beside=3)
            request = engine.submit(prompt, SCORING, prompt_logprobs_out=rows)
            run(engine)
            with torch.no_grad():
                logits = oracle.model(torch.tensor([prompt])).logits[0]
            # Sums of another order: logits of 20 differ by a few units in the last place, 2e-6.
            torch.testing.assert_close(rows.cpu(), logits.log_softmax(1), rtol=2e-6, atol=2e-5)
            assert (rows._base[:, len(rows[0]) :] == UNTOUCHED).all()  # type: ignore[index]
            assert_consistent(request, rows)
        run(engine)
        assert_idle(engine)


def assert_consistent(request: Request, rows: torch.Tensor) -> None:
    """What is reported of prompt tokens is in the rows, bit for bit."""
    reported = request.prompt_logprobs
    assert reported is not None and len(reported) == len(rows)
    for row, entry in zip(rows[:-1], reported[1:], strict=True):
        if entry is not None:
            assert all(row[token].item() == each.logprob for token, each in entry.items())
            best = max(entry.values(), key=lambda each: each.logprob)
            assert row.max().item() == best.logprob
    if request.logprobs:
        (entry,) = request.logprobs
        for token, each in entry.items():
            assert rows[-1, token].item() == pytest.approx(each.logprob, abs=2e-5)


def test_prefixes_and_sessions_skip_no_row(engine: Engine) -> None:
    with engine.session() as session:
        session.append([5, *range(20, 50)])
        session.generate(greedy(3))
        session.append(range(60, 70))
        prompt = session.token_ids
        rows, expected = memory(engine, len(prompt)), memory(engine, len(prompt))
        list(session.stream(SCORING, prompt_logprobs_out=rows))
    assert engine.generate(prompt, greedy(1)).cached_tokens
    result = engine.generate(prompt, SCORING, prompt_logprobs_out=expected)
    assert (expected <= 0).all() and result.cached_tokens == 0
    assert torch.equal(rows, expected)


def test_embeddings_have_rows_too(device: str) -> None:
    """After each position of theirs, whatever follows; also where a chunk has nothing else."""
    prompt = list(range(40, 64))
    with open_engine(device=device, prompt_embeds=True, **OPEN) as engine:
        expected, rows = memory(engine, len(prompt)), memory(engine, len(prompt))
        engine.generate(prompt, SCORING, prompt_logprobs_out=expected)
        embeds = engine.model.weights.embedding[prompt]
        for parts in ([prompt[:2], embeds[2:22], prompt[22:]], [prompt[:3], embeds[3:]]):
            rows.fill_(UNTOUCHED)
            request = engine.submit(PromptParts(*parts), SCORING, prompt_logprobs_out=rows)
            run(engine)
            assert torch.equal(rows, expected)
            assert_consistent(request, rows)


def test_a_cancelled_request_writes_what_was_launched(device: str) -> None:
    """Its memory stays alive until then, and the next request of the slot writes none of it."""
    with open_engine(device=device, max_batch=1, lookahead=1, **OPEN) as engine:
        prompt = list(range(10, 60))
        rows = memory(engine, len(prompt))
        request = engine.submit(prompt, SCORING, prompt_logprobs_out=rows)
        engine.step()
        request.cancel()
        step_until(engine, lambda: not engine.busy)
        written = (rows != UNTOUCHED).all(dim=1)
        count = int(written.sum())
        assert 16 <= count < len(prompt) and written[:count].all()
        assert (rows[count:] == UNTOUCHED).all()
        rows.fill_(UNTOUCHED)
        engine.generate(prompt, SCORING)
        assert (rows == UNTOUCHED).all()
        # The caller may drop the memory.
        engine.submit(prompt, SCORING, prompt_logprobs_out=rows)
        alive = weakref.ref(rows)
        del rows, request, written
        assert alive() is not None
        run(engine)
        engine.generate(prompt, greedy(1))
        gc.collect()
        assert alive() is None
        assert_idle(engine)


def test_the_rows_of_a_cancelled_request_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay publishes its token before it writes rows: the caller may free them after both."""
    with open_engine(device="cpu", max_batch=1, lookahead=1, **OPEN) as engine:
        prompt = list(range(10, 60))
        request = engine.submit(prompt, SCORING, prompt_logprobs_out=memory(engine, len(prompt)))
        engine.step()
        request.cancel()
        prompts = engine.runtime.logprobs.prompts
        assert prompts is not None
        with monkeypatch.context() as patch:
            patch.setattr(prompts, "wait", lambda *_, **__: None)
            step_until(engine, lambda: request.finished)
            assert engine.busy and engine.step(timeout=0) == [] and engine.busy
        step_until(engine, lambda: not engine.busy)
        assert_idle(engine)


def wrong_memory(engine: Engine) -> list[tuple[Any, str]]:
    rows = memory(engine, 4)
    size = rows.shape[1]
    wanted = rf"float32 \[4, {size}\] on cpu with dense rows"
    return [
        (5, f"prompt_logprobs_out=5 must be a tensor, {wanted}"),
        (rows.numpy(), f"must be a tensor, {wanted}"),
        (rows[:3], rf"must be {wanted}, not torch.float32 \[3, {size}\] on cpu"),
        (rows[:, 1:], rf"must be {wanted}, not torch.float32 \[4, {size - 1}\] on cpu"),
        (rows[0], rf"must be {wanted}, not torch.float32 \[{size}\] on cpu"),
        (rows.half(), rf"must be {wanted}, not torch.float16 \[4, {size}\] on cpu"),
        (rows.to("meta"), rf"must be {wanted}, not torch.float32 \[4, {size}\] on meta"),
        (rows.T.contiguous().T, rf"{wanted} that do not overlap, not with strides \(1, 4\)"),
        (rows[:1].expand(4, -1), r"that do not overlap, not with strides \(0, 1\)"),
        (rows.clone().requires_grad_(), "must not require gradients"),
    ]


def test_memory_that_cannot_be_written_is_refused(engine: Engine) -> None:
    for wrong, message in wrong_memory(engine):
        with pytest.raises(ValueError, match=message):
            engine.submit([1, 2, 3, 4], SCORING, prompt_logprobs_out=wrong)
    rows = memory(engine, 4)
    prompt: list[int] = [1, 2, 3, 4]
    with pytest.raises(ValueError, match="for requests with prompt_logprobs, such as 0"):
        engine.submit(prompt, greedy(1), prompt_logprobs_out=rows)
    for call in (engine.submit_many, engine.generate_many):
        with pytest.raises(ValueError, match="has room for one request, not for 3"):
            call(prompt, SCORING, n=3, prompt_logprobs_out=rows)
    with pytest.raises(ValueError, match="has room for one request, not for 2"):
        engine.generate([prompt, prompt], SCORING, prompt_logprobs_out=rows)
    assert (rows == UNTOUCHED).all() and not engine.busy


def test_an_engine_is_opened_for_it() -> None:
    with pytest.raises(ValueError, match="prompt_logprobs_out=True is for an engine with prompt_l"):
        EngineConfig(device="cpu", prompt_logprobs_out=True)
    for ranks in ("tensor_parallel", "data_parallel", "pipeline_parallel"):
        options: dict[str, Any] = {"prompt_logprobs": True, "prompt_logprobs_out": True, ranks: 2}
        message = f"prompt_logprobs_out=True is for an engine of one rank, not for {ranks}=2"
        with pytest.raises(ValueError, match=message):
            EngineConfig(device="cpu", **options)
    message = "prompt_logprobs_out is for an engine that is opened with prompt_logprobs_out=True"
    with (
        open_engine(device="cpu", prompt_logprobs=True, **SIZES) as engine,
        pytest.raises(ValueError, match=message),
    ):
        engine.submit([1], SCORING, prompt_logprobs_out=memory(engine, 1))
