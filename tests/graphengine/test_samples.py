"""Samples of one prompt: one prefill, and the tokens of requests that have their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from checkpoints import toy_family
from checkpoints.mtp_modules import SIZES
from engines.small_engine import LONG, OTHER, PROMPT, assert_idle, open_engine, run, sampled
from engines.speculation import open_speculating
from graphengine import Engine, Request, SamplingParams
from graphengine.models.families import registry
from graphengine.speculative import MTP, NGram

# Several chunks of 32 and a rest that fills no block.
TEXT = LONG + "x"
ASKED = sampled(9, seed=2**63 - 2)


def alone(engine: Engine, prompt: Any, params: SamplingParams, n: int) -> list[tuple[int, ...]]:
    """What requests with the seeds of `n` samples say."""
    assert params.seed is not None
    seeds = [(params.seed + i) % 2**63 for i in range(n)]
    return [engine.generate(prompt, replace(params, seed=seed)).token_ids for seed in seeds]


def said(requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [request.result().token_ids for request in requests]


def fed_tokens(engine: Engine, before: dict[str, int]) -> int:
    """Prefill replays since then, of any size."""
    return sum(
        count - before.get(name, 0)
        for name, count in engine.counters.items()
        if name.startswith("replays/prefill") and not name.endswith("note")
    )


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("n", [2, 5])
def test_they_say_what_requests_with_their_seeds_say(
    device: str, n: int, prefix_caching: bool
) -> None:
    """Also where there are more of them than slots."""
    with open_engine(device=device, dtype="float32") as plain:
        expected = alone(plain, TEXT, ASKED, n)
    assert len(set(expected)) == n
    with open_engine(device=device, dtype="float32", prefix_caching=prefix_caching) as engine:
        neighbour = engine.submit(OTHER, sampled(30, seed=1))
        before = dict(engine.counters)
        requests = engine.submit_many(TEXT, ASKED, n=n)
        assert [request.seed for request in requests] == [(2**63 - 2 + i) % 2**63 for i in range(n)]
        run(engine)
        assert said(requests) == expected
        whole = (len(requests[0].prompt_token_ids) - 1) // 8 * 8
        assert [each.cached_tokens for each in requests] == [0] + [whole] * (n - 1)
        chunks = -(-len(requests[0].prompt_token_ids) // 32)
        # That of the neighbour, the first one's, and one each for the others' last tokens.
        assert fed_tokens(engine, before) == 1 + chunks + n - 1
        assert neighbour.finished
        if not prefix_caching:
            assert_idle(engine)
            assert not engine.scheduler.pool.idle and not engine.scheduler.reuse.contexts


def test_blocks_are_shared_while_they_run(device: str) -> None:
    with open_engine(device=device, kv_blocks=40) as engine:
        requests = engine.submit_many(TEXT, sampled(12, seed=3), n=3)
        while not all(request.token_ids for request in requests):
            engine.step()
        blocks = [request.job.placed.blocks for request in requests]
        whole = (len(requests[0].prompt_token_ids) - 1) // 8
        assert whole > 3
        assert blocks[0][:whole] == blocks[1][:whole] == blocks[2][:whole]
        own = [{*each[whole:]} for each in blocks]
        assert not own[0] & own[1] and not own[1] & own[2]
        run(engine)
        assert_idle(engine)


@pytest.mark.parametrize(
    "speculative", [NGram(3), MTP(k=2), MTP(tree=[[0], [1], [0, 0]])], ids=["ngram", "mtp", "tree"]
)
def test_drafts(device: str, speculative: Any) -> None:
    options: dict[str, Any] = {"device": device, "dtype": "float32"}
    with open_engine(row_family="dot", **options) as plain:
        expected = alone(plain, TEXT, ASKED, 4)
    with open_speculating(speculative, **options) as engine:
        requests = engine.submit_many(TEXT, replace(ASKED, repetition_penalty=1.0), n=4)
        run(engine)
        assert said(requests) == expected
        assert all(each.cached_tokens for each in requests[1:])
        assert_idle(engine)


def test_penalties_count_the_tokens_that_are_shared(device: str) -> None:
    params = replace(ASKED, repetition_penalty=1.4, logprobs=2)
    with open_engine(device=device, dtype="float32") as engine:
        expected = alone(engine, TEXT, params, 3)
        requests = engine.submit_many(TEXT, params, n=3)
        run(engine)
        assert said(requests) == expected and requests[1].cached_tokens


@pytest.mark.parametrize("states", [4, 1, 0])
@pytest.mark.parametrize("speculative", [None, NGram(3)], ids=["plain", "ngram"])
def test_recurrent_states_are_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, states: int, speculative: Any
) -> None:
    monkeypatch.setitem(registry.FAMILIES, toy_family.ARCHITECTURE, toy_family.read_config)
    toy_family.write_checkpoint(tmp_path / "toy")
    options: dict[str, Any] = {
        "device": "cpu", "max_batch": 3, "max_seq_len": 160, "block_size": 8,
        "prefill_buckets": (4, 16), "row_family": "dot",
    }  # fmt: skip
    prompt = [(7 * index) % 59 for index in range(45)]
    with Engine.from_pretrained(tmp_path / "toy", session_states=0, **options) as plain:
        expected = alone(plain, prompt, ASKED, 4)
    with Engine.from_pretrained(
        tmp_path / "toy", session_states=states, speculative=speculative, **options
    ) as engine:
        requests = engine.submit_many(prompt, ASKED, n=4)
        run(engine)
        assert said(requests) == expected
        cached = [each.cached_tokens for each in requests]
        assert cached == ([0, 40, 40, 40] if states else [0] * 4)
        assert not engine.scheduler.reuse.states.held
        assert_idle(engine)


def test_windows_in_rings_feed_the_prompt_again(tmp_path: Path) -> None:
    sizes = SIZES | {"sliding_window": 9, "head_dim": 64, "tie_word_embeddings": True}
    layers = SIZES["num_hidden_layers"]
    kinds = (["sliding_attention", "full_attention"] * layers)[:layers]
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds)).save_pretrained(tmp_path)
    prompt = [(5 * index) % 31 for index in range(60)]
    with open_engine(tmp_path, device="cpu") as engine:
        assert engine.memory.rings
        expected = alone(engine, prompt, ASKED, 3)
        requests = engine.submit_many(prompt, ASKED, n=3)
        run(engine)
        assert said(requests) == expected
        assert not any(each.cached_tokens for each in requests)
        assert_idle(engine)


def test_two_ranks() -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "lookahead": 0}
    with open_engine(**options, tensor_parallel=2) as engine:
        expected = alone(engine, TEXT, ASKED, 3)
        requests = engine.submit_many(TEXT, ASKED, n=3)
        run(engine)
        assert said(requests) == expected
        assert all(each.cached_tokens for each in requests[1:])


def test_the_first_may_be_cancelled_at_any_time(device: str) -> None:
    with open_engine(device=device, dtype="float32") as engine:
        expected = alone(engine, TEXT, ASKED, 4)
        for steps in range(6):
            requests = engine.submit_many(TEXT, ASKED, n=4)
            for _ in range(steps):
                engine.step()
            requests[0].cancel()
            run(engine)
            assert said(requests[1:]) == expected[1:]
            assert_idle(engine)
            assert not engine.scheduler.reuse.contexts
        requests = engine.submit_many(TEXT, ASKED, n=4)
        for request in requests:
            request.cancel()
        run(engine)
        assert_idle(engine)


def test_a_short_pool_pauses_and_evicts(device: str) -> None:
    with open_engine(device=device, dtype="float32", kv_blocks=17, max_batch=3) as engine:
        params = replace(ASKED, max_tokens=40)
        expected = alone(engine, TEXT, params, 3)
        requests = engine.submit_many(TEXT, params, n=3)
        run(engine)
        assert said(requests) == expected
        assert_idle(engine)


def test_results_come_by_prompt(device: str) -> None:
    with open_engine(device=device, dtype="float32") as engine:
        found = engine.generate_many([PROMPT, OTHER], [ASKED, replace(ASKED, seed=4)], n=2)
        assert [[each.token_ids for each in row] for row in found] == [
            alone(engine, PROMPT, ASKED, 2), alone(engine, OTHER, replace(ASKED, seed=4), 2),
        ]  # fmt: skip
        row = engine.generate_many(PROMPT, replace(ASKED, seed=None), n=3)
        assert [each.seed - row[0].seed for each in row] == [0, 1, 2]
        (one,) = engine.generate_many(PROMPT, ASKED, n=1)
        assert one.token_ids == found[0][0].token_ids
        both = engine.generate_many("x", n=2, params=sampled(1))
        assert len(both) == 2


def test_what_needs_the_whole_prompt_gets_it(device: str) -> None:
    with open_engine(device=device, prompt_logprobs=True) as engine:
        params = replace(ASKED, prompt_logprobs=1)
        requests = engine.submit_many(TEXT, params, n=3)
        run(engine)
        rows = [request.result().prompt_logprobs for request in requests]
        assert rows[0] == rows[1] == rows[2] and rows[0] is not None
        assert not any(request.cached_tokens for request in requests)


def test_what_is_wrong_is_refused(device: str) -> None:
    with open_engine(device=device, max_waiting=1, max_batch=2) as engine:
        for wrong in (0, -1, 2.5, "2", True, None, 65_537):
            for call in (engine.submit_many, engine.generate_many):
                with pytest.raises(ValueError, match=rf"n={wrong!r} must be .* in \[1, 65536\]"):
                    call(PROMPT, ASKED, n=wrong)  # type: ignore[arg-type, operator]
        with pytest.raises(RuntimeError, match="max_waiting=1"):
            engine.submit_many(PROMPT, ASKED, n=4)
        assert not engine.busy
        with engine.session() as session:
            session.append(PROMPT)
            with pytest.raises(TypeError, match=r"'n': submit_many and generate_many take it"):
                session.generate(ASKED, n=2)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"'n': submit_many and generate_many take it"):
            engine.generate(PROMPT, ASKED, n=2)  # type: ignore[call-overload]
