"""Steps of 31 drafts a row, which are the most."""

from __future__ import annotations

import pytest

from engines.small_engine import greedy
from engines.speculation import ENDLESS, Job, open_plain, open_speculating, script, serve, step_with
from graphengine import Result
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.step.record import MAX_DRAFTS
from graphengine.speculative import NGram, UserProvided

PROMPT = "def join(paths):\n    return paths\n" * 2
JOBS = [Job(PROMPT, greedy(66, logprobs=2, **ENDLESS)), Job(PROMPT[:-9], greedy(40, **ENDLESS))]
SIZES = {"device": "cpu", "max_batch": 2, "max_seq_len": 256}


@pytest.fixture(scope="module")
def known() -> list[Result]:
    """What each job is answered without drafts."""
    with open_plain(**SIZES) as engine:
        return [engine.generate(job.prompt, job.params) for job in JOBS]


def test_ngrams_of_31_drafts_change_no_token(known: list[Result]) -> None:
    with open_speculating(NGram(k=MAX_DRAFTS), **SIZES) as engine:
        requests = serve(engine, JOBS)
    assert [tuple(r.token_ids) for r in requests] == [answer.token_ids for answer in known]
    # A prompt that repeats itself has drafts up to the last position.
    assert len(engine.acceptance.proposed_per_position) == MAX_DRAFTS


def test_31_drafts_of_the_caller_become_32_tokens_a_step(known: list[Result]) -> None:
    answers = [answer.token_ids for answer in known]
    with open_speculating(UserProvided(k=MAX_DRAFTS), **SIZES) as engine:
        vocab_size = engine.model.config.vocab_size
        requests = serve(engine, JOBS, script("right", answers, MAX_DRAFTS, vocab_size).of)
        assert [tuple(r.token_ids) for r in requests] == answers
        # The prompt's last chunk gives one token, and steps of 32 the others.
        assert requests[0].acceptance.tokens == 65 and requests[0].acceptance.steps == 3
        assert requests[0].logprobs is not None and len(requests[0].logprobs) == 66

        # A stop sequence in the midst of a step's 32 tokens.
        ended = answers[0][20:23]
        params = greedy(66, stop_token_sequences=[ended], **ENDLESS)
        request = engine.submit(PROMPT, params)
        drafts = script("right", answers[:1], MAX_DRAFTS, vocab_size).of([request])
        while engine.busy:
            step_with(engine, drafts)
        first = next(end for end in range(3, 24) if answers[0][end - 3 : end] == ended)
        assert tuple(request.token_ids) == answers[0][:first]
        assert request.finish_reason == "stop"


def test_three_rows_of_32_tokens_do_not_fit() -> None:
    sizes = SIZES | {"max_batch": 3}
    with pytest.raises(ValueError, match=f"3 rows with k=31 drafts feed 96 .* at most {MAX_LANES}"):
        open_speculating(NGram(k=MAX_DRAFTS), **sizes)
