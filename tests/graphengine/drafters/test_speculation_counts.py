"""What a caller sees of drafts: events, streams, and counts, against a plain recount."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.device_cases import alternately, pairwise_here
from engines.small_engine import OTHER, PROMPT, events_of, greedy, run, tokens_of
from engines.speculation import (
    DEMO,
    DRAFTING,
    ENDLESS,
    Tokens,
    demo_jobs,
    dtype_of,
    open_plain,
    open_speculating,
    run_with,
    script,
)
from graphengine import Engine, Event, Request, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_reference
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.speculative import FORCE_ACCEPTED, MTP, DraftModel, NGram, UserProvided


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE_ACCEPTED, raising=False)


# Events and timings.


@pytest.mark.parametrize(
    ("device", "name", "lookahead"),
    pairwise_here(alternately(dict.fromkeys(DRAFTING, (0, 1))), (0, 1)),
)
def test_an_event_has_the_tokens_of_a_step(device: str, name: str, lookahead: int) -> None:
    called: list[Event] = []
    options = {"device": device, "lookahead": lookahead, **dtype_of(name)}
    with open_speculating(DRAFTING[name], **options) as engine:
        requests = [
            engine.submit(job.prompt, job.params, on_event=called.append) for job in demo_jobs()
        ]
        events = run(engine)
        assert events == called
        for request in requests:
            own = events_of(request, events)
            assert tokens_of(own) == tuple(request.token_ids)
            assert "".join(event.text for event in own) == request.text
            assert [event.finish_reason for event in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == request.finish_reason
            # The prompt's step has one token; the others up to one more than drafts.
            assert len(own[0].token_ids) == 1
            assert all(1 <= len(event.token_ids) <= 4 for event in own)
            # Tokens of a step arrive at one time.
            times = [event.time for event in own for _ in event.token_ids]
            assert request.timings.tokens == times == sorted(times)
            assert len(request.timings.inter_token) == len(request.token_ids) - 1
        assert any(len(event.token_ids) > 1 for event in events)
        assert sum(len(request.token_ids) for request in requests) == engine.counters["tokens"]


def test_a_stream_yields_several_tokens_at_once(device: str) -> None:
    with open_speculating(MTP(k=3), device=device) as engine:
        expected = engine.generate(PROMPT, greedy(20))
        events = list(engine.stream(PROMPT, greedy(20)))
        assert tokens_of(events) == expected.token_ids
        assert "".join(event.text for event in events) == expected.text
        assert max(len(event.token_ids) for event in events) > 1


# Counts, against a plain recount.


@dataclass
class Recount:
    """What became of the drafts of one request, counted one step after the other."""

    steps: list[Tokens] = field(default_factory=list)
    proposed: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def run(self, request: Request, propose: Callable[[Tokens], Sequence[int]], k: int) -> None:
        """Replay a request that ends by its length: `propose` gets all tokens so far."""
        said, prompt = tuple(request.token_ids), request.prompt_token_ids
        done = 1
        while done < len(said):
            # After the last draft comes a token of the step's own, which must fit in too.
            room = request.job.max_new_tokens - done - 1
            drafts = list(propose((*prompt, *said[:done])))[: min(k, room)]
            right = 0
            while right < len(drafts) and drafts[right] == said[done + right]:
                right += 1
            self.proposed.update(range(len(drafts)))
            self.accepted.update(range(right))
            self.steps.append(said[done : done + right + 1])
            done += right + 1

    def check(self, acceptance: dict[str, Any]) -> None:
        assert acceptance["steps"] == len(self.steps)
        assert acceptance["tokens"] == sum(map(len, self.steps))
        for name, counted in (("accepted", self.accepted), ("proposed", self.proposed)):
            assert acceptance[name] == counted.total(), f"{name}: {acceptance}, {counted}"
        for name, counted in (
            ("per_position", self.accepted),
            ("proposed_per_position", self.proposed),
        ):
            listed = acceptance[name]
            assert listed == [counted[p] for p in range(len(listed))], f"{name}: {counted}"
        rates = [self.accepted[p] / self.proposed[p] for p in range(len(acceptance["rates"]))]
        assert acceptance["rates"] == rates
        if self.steps:
            assert acceptance["mean_length"] == sum(map(len, self.steps)) / len(self.steps)


def assert_counts(
    engine: Engine,
    requests: Iterable[Request],
    events: list[Event],
    propose: Callable[[Tokens], Sequence[int]],
    k: int,
) -> None:
    everything = Recount()
    for request in requests:
        assert request.finish_reason == "length"
        recount = Recount()
        for each in (recount, everything):
            each.run(request, propose, k)
        steps = [event.token_ids for event in events_of(request, events)]
        assert steps[1:] == recount.steps, f"{request}"
        recount.check(request.acceptance.as_dict())
        recount.check(request.result().acceptance.as_dict())
    everything.check(engine.stats()["acceptance"])


def ngram(tokens: Tokens, k: int, max_n: int) -> list[int]:
    for n in range(min(max_n, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return list(tokens[start + n : start + n + k])
    return [tokens[-1]] * k


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("k", "max_n"), [(3, 5), (5, 1)])
def test_counts_of_ngrams(device: str, k: int, max_n: int, lookahead: int) -> None:
    mode = NGram(k, max_n=max_n)
    # The whole demo repeats itself: its n-grams find drafts that are right.
    with open_speculating(mode, checkpoint_path(), device=device, lookahead=lookahead) as engine:
        requests = [
            engine.submit(prompt, SamplingParams(seed=1, max_tokens=tokens, **options, **ENDLESS))
            for prompt, tokens, options in (
                (PROMPT, 41, {"temperature": 0.0}),
                (OTHER * 3, 30, {"temperature": 0.5}),
                ("a = 1\nb = 2\na = 1\n", 23, {"temperature": 1.0, "top_k": 3}),
                # It says "000000": of what follows the last occurrence one token is known.
                (" " * 32, 20, {"temperature": 0.0}),
                ("x", 2, {"temperature": 0.0}),
                ("x", 1, {"temperature": 0.0}),
            )
        ]
        events = run(engine)
        assert_counts(engine, requests, events, lambda said: ngram(said, k, max_n), k)
        assert engine.acceptance.accepted > 10


def nearly(oracle: Any, folder: Path) -> Any:
    """A model that mostly agrees with the oracle's."""
    model = deepcopy(oracle.model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.07 * parameter.std(unbiased=False))
    model.save_pretrained(folder)
    return type(oracle)(folder)


def one_slot(params: SamplingParams) -> SamplingTensors:
    """The parameters of a request without filters and stops."""
    return SamplingTensors.neutral(1)._replace(
        temperature=torch.tensor([params.temperature]), seed=torch.tensor([params.seed])
    )


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0])
def test_counts_of_a_model_that_drafts(
    device: str, checkpoints: dict[str, Any], tmp_path: Path, temperature: float
) -> None:
    """It draws its drafts as the target draws its tokens, from logits as transformers sees them."""
    target, k = checkpoints["llama-linear-96"], 3
    drafter = nearly(target, tmp_path)
    options: dict[str, Any] = {"device": device, "dtype": "float32"}
    with open_speculating(DraftModel(drafter.path, k), target.path, **options) as engine:
        dice = random.Random(1)
        requests = [
            engine.submit(
                [dice.randrange(301) for _ in range(length)],
                SamplingParams(seed=7, temperature=temperature, max_tokens=25, **ENDLESS),
            )
            for length in (3, 12, 40)
        ]
        events = run(engine)
        slot = torch.zeros(1, dtype=torch.int32)

        def propose(said: Tokens) -> list[int]:
            drafts: list[int] = []
            while len(drafts) < k:
                logits = drafter.logits([*said, *drafts])[-1:]
                position = slot + len(said) + len(drafts) - 1
                params = one_slot(requests[0].params)
                drafts.append(int(sample_reference(logits, slot, position, params)))
            return drafts

        assert_counts(engine, requests, events, propose, k)
        assert 0.1 < engine.acceptance.rate < 0.95


@pytest.mark.parametrize("sampler", ["fast", "full"])
def test_a_model_that_drafts_for_itself_is_always_right(device: str, sampler: str) -> None:
    """At any temperature, as it draws with the target's noise."""
    filters: dict[str, Any] = {"top_p": 0.9999} if sampler == "full" else {}
    # In bfloat16 two logits may tie but for the order in which their sums were added up.
    with open_speculating(DraftModel(DEMO, 3), device=device, dtype="float32") as engine:
        asked = [
            SamplingParams(temperature=each, max_tokens=25, min_tokens=25, seed=3, **filters)
            for each in (0.0, 0.5, 1.0, 2.0)
        ]
        for params, result in zip(asked, engine.generate([PROMPT] * 4, asked), strict=True):
            # A sampled token may hang on a last bit, which the two models need not share.
            least = 1.0 if params.temperature == 0.0 else 0.97
            assert result.acceptance.rate >= least, f"{params.temperature=} {result.acceptance}"
            assert min(result.acceptance.rates) > 0.9, f"{params.temperature=} {result.acceptance}"


FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_n_sigma": 1.0},
    {"logit_bias": {11: 8.0, 300: 8.0}},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "logit_bias": {11: 8.0}},
    {"allowed_token_ids": range(0, 4096, 2)},
)


def test_drafts_are_drawn_through_filters_and_biases(device: str) -> None:
    """A model that drafts for itself is then always right."""
    # On a GPU a sampled token may hang on a last bit, which the two models need not share.
    least = 1.0 if device == "cpu" else 0.97
    with (
        open_plain(device=device, dtype="float32") as plain,
        open_speculating(DraftModel(DEMO, 3), device=device, dtype="float32") as engine,
    ):
        for filters in FILTERS:
            asked = [
                SamplingParams(temperature=heat, max_tokens=16, min_tokens=16, seed=7, **filters)
                for heat in (0.8, 1.2)
            ]
            expected = plain.generate([PROMPT] * 2, asked)
            results = engine.generate([PROMPT] * 2, asked)
            for result, wanted in zip(results, expected, strict=True):
                assert result.token_ids == wanted.token_ids, f"{filters=}"
                assert result.acceptance.rate >= least, f"{filters=} {result.acceptance}"


def test_a_trimmed_vocabulary_is_filtered_as_a_whole_one(device: str, tmp_path: Path) -> None:
    """One that leaves nothing out drafts the same."""
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x\n")
    named = DraftVocabulary(text=text, size=4096)
    asked = [
        SamplingParams(temperature=1.0, max_tokens=24, seed=seed, ignore_eos=True, **FILTERS[index])
        for seed, index in enumerate((1, 5))
    ]
    counted = []
    for mode in (MTP(3), MTP(3, draft_vocab=named)):
        with open_speculating(mode, device=device, dtype="float32", max_batch=2) as engine:
            results = engine.generate([PROMPT] * 2, asked)
            counted.append([(result.token_ids, result.acceptance) for result in results])
    assert counted[0] == counted[1]
    assert all(acceptance.rate > 0.2 for _, acceptance in counted[0])


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_absent_drafts_count_as_none(device: str, count: int) -> None:
    """A drafter that proposes two of three is not charged for the third."""
    with open_plain(device=device) as engine:
        known = engine.generate(PROMPT, greedy(30, **ENDLESS)).token_ids
    with open_speculating(UserProvided(3), device=device) as engine:
        request = engine.submit(PROMPT, greedy(30, **ENDLESS))

        def propose(said: Tokens) -> list[int]:
            done = len(said) - request.job.prompt_len
            return list(known[done : done + count])

        events = run_with(engine, lambda each: propose((*each.prompt_token_ids, *each.token_ids)))
        assert_counts(engine, [request], events, propose, 3)
        assert engine.acceptance.rate == (1.0 if count else None)


def test_drafts_after_a_stop_count_as_none(device: str) -> None:
    """A step that a stop token ends judged the drafts up to it alone."""
    with open_plain(device=device) as engine:
        known = engine.generate(OTHER, greedy(30, **ENDLESS)).token_ids
    first = [i for i in range(1, 14) if known[i] not in known[:i]]
    with open_speculating(UserProvided(3), device=device) as engine:
        for end in first:
            params = greedy(30, stop_token_ids=[known[end]], **ENDLESS)
            request = engine.submit(OTHER, params)
            run_with(engine, script("right", [known], 3, 4096).of([request]))
            assert tuple(request.token_ids) == known[: end + 1]
            steps = -(-end // 4)
            assert request.acceptance.steps == steps and request.acceptance.tokens == end
            assert request.acceptance.proposed == request.acceptance.accepted == end - steps


def test_stats_and_reports_name_the_acceptance(device: str) -> None:
    with open_speculating(MTP(k=3), device=device) as engine:
        assert engine.stats()["acceptance"]["steps"] == 0
        result = engine.generate(PROMPT, greedy(20))
        stats = engine.stats()
        assert stats["acceptance"] == result.acceptance.as_dict() == engine.acceptance.as_dict()
        assert stats["gate"] is None
        assert stats["counters"]["tokens"] == 20
        stats["counters"]["tokens"] = stats["acceptance"]["steps"] = 0
        assert engine.stats()["counters"]["tokens"] == 20
        assert engine.stats()["acceptance"]["steps"] > 0
    with open_plain(device=device) as engine:
        assert engine.generate(PROMPT, greedy(5)).acceptance.as_dict()["steps"] == 0
        assert engine.stats()["acceptance"]["steps"] == 0
