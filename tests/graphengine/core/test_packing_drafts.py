"""Prefills that feed several prompts, with drafts of their own text, of grammars, of the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints.family_models import FamilyModel
from checkpoints.hybrids import A, C, lfm2
from engines.packed_replies import prompt_of, replies, same
from engines.small_engine import greedy, open_engine, run
from extent import some_of
from graphengine import (
    DraftModel,
    Engine,
    NGram,
    SaveHiddenStates,
    StructuredOutputsParams,
    Suffix,
    UserProvided,
)
from graphengine.options.drafts.jump_forward import JumpForward
from graphengine.options.drafts.mode import Mode

PACKED = {"device": "cpu", "prompts_per_prefill": 3, "max_batch": 4}
LENGTHS = (5, 20, 1, 40, 9, 12)


def prompts_that_repeat() -> list[list[int]]:
    """Each says the same few tokens again and again, so that drafts are found."""
    found = [(prompt_of(-(-length // 3)) * 3)[:length] for length in LENGTHS]
    return [found[1], found[1][:16] + found[0], *found]


def noted_chunks(engine: Engine) -> list[list[bool]]:
    """Filled as the engine steps: which chunks of each prefill are only noted."""
    found: list[list[bool]] = []
    plan = engine.core.plan

    def planned() -> Any:
        made = plan()
        if made is not None and made.prefill is not None:
            found.append([chunk.noted for chunk in made.chunks])
        return made

    engine.core.plan = planned  # type: ignore[method-assign]
    return found


CASES = [
    (NGram(k=3), {"prefix_caching": True}),
    (Suffix(k=4), {}),
    (NGram(k=3), {}),
    (Suffix(k=4), {"prefix_caching": True}),
]


@pytest.mark.parametrize("mode, options", some_of(CASES, 0, 1), ids=str)
def test_drafts_of_packed_prompts_change_no_bit(mode: Mode, options: dict[str, Any]) -> None:
    """Also where a prompt begins like an older one, and its first tokens are only noted; and they
    are the same drafts.
    """
    prompts = prompts_that_repeat()
    options = PACKED | {"speculative": mode} | options
    with open_engine(**options) as engine:
        alone = [replies(engine, [prompt])[0] for prompt in prompts]
        assert not engine.counters["packed_chunks"]
        expected = engine.acceptance
        assert expected.accepted > 0
    with open_engine(**options) as engine:
        noted = noted_chunks(engine)
        together = replies(engine, prompts)
        assert engine.counters["packed_chunks"] >= 2
        assert engine.acceptance == expected
    # What is only noted is in a replay of its own.
    assert ([True] in noted) == ("prefix_caching" in options), noted
    assert all(chunks == [True] for chunks in noted if True in chunks), noted
    for one, other in zip(alone, together, strict=True):
        assert same(one, other)


def test_drafts_of_the_caller_follow_packed_prompts() -> None:
    prompts = [prompt_of(length) for length in LENGTHS[:4]]
    with open_engine(device="cpu", max_batch=4) as engine:
        expected = [engine.generate(prompt, greedy(8)).token_ids for prompt in prompts]
    with open_engine(**PACKED, speculative=UserProvided(k=3)) as engine:
        requests = [engine.submit(prompt, greedy(8)) for prompt in prompts]
        while engine.busy:
            engine.step()
            for request, tokens in zip(requests, expected, strict=True):
                done = len(request.token_ids)
                if done and not request.finished:
                    engine.draft(request, tokens[done : done + 3])
        assert engine.counters["packed_chunks"] >= 2
        assert [request.result().token_ids for request in requests] == expected
        assert engine.acceptance.accepted == engine.acceptance.proposed > 0


def test_text_that_grammars_force_is_drafted_beside_packed_prompts() -> None:
    """A prompt with a grammar is fed alone, those before and after it together."""
    pytest.importorskip("llguidance")
    grammar = StructuredOutputsParams(choice=["return the first element of this list"])
    forced = greedy(24, structured_outputs=grammar)
    jobs = [(prompt_of(length), greedy(6)) for length in (5, 7, 9, 4, 6)]
    jobs[2] = (jobs[2][0], forced)
    options = PACKED | {"speculative": JumpForward(k=4), "grammar_pool_mib": 1, "max_batch": 5}
    with open_engine(**options) as engine:
        alone = [engine.generate(*job).token_ids for job in jobs]
        accepted = engine.acceptance.accepted
        assert accepted > 3 and not engine.counters["packed_chunks"]
        requests = [engine.submit(*job) for job in jobs]
        run(engine)
        assert engine.counters["packed_chunks"] == 2
        assert [request.result().token_ids for request in requests] == alone
        assert engine.acceptance.accepted == 2 * accepted


def test_saved_hidden_states_are_of_one_prompt(tmp_path: Path) -> None:
    message = r"=3 is for engines without speculative=SaveHiddenStates\(directory="
    with pytest.raises(ValueError, match=message):
        open_engine(**PACKED, speculative=SaveHiddenStates(tmp_path))


def test_draft_models_with_recurrent_layers_follow_one_prompt(tmp_path: Path) -> None:
    FamilyModel(lambda: lfm2([C, A])).write(tmp_path, 0)
    message = (
        r"prompts_per_prefill=3 is for drafters without recurrent states: speculative=DraftModel"
        r"\(path=.* has 1, and feeds one prompt"
    )
    with pytest.raises(ValueError, match=message):
        open_engine(tmp_path, **PACKED, speculative=DraftModel(tmp_path))
