"""What may be set of speculation: forced acceptance, the gate, relaxed acceptance, errors."""

from __future__ import annotations

import logging
import math
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints.mtp_modules import (
    LAYOUTS,
    SIZES,
    VOCAB,
    random_tensors,
    write_checkpoint,
    write_random,
)
from engines.device_cases import alternately, pairwise_here
from engines.logit_options import processors
from engines.small_engine import OTHER, PROMPT, assert_idle, events_of, greedy, open_engine, run
from engines.speculation import (
    DEMO,
    DRAFTING,
    ENDLESS,
    Job,
    Outcome,
    Tokens,
    demo_jobs,
    open_plain,
    open_speculating,
    outcome,
    outcomes,
    random_jobs,
    step_with,
    write_draft_model,
)
from extent import extent
from graphengine import Engine, EngineConfig, Request, SamplingParams
from graphengine.host.gate import Gate
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.speculative import (
    FORCE_ACCEPTED,
    MTP,
    Auto,
    DraftModel,
    GateOptions,
    NGram,
    RelaxedAcceptance,
    Speculative,
    UserProvided,
)


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE_ACCEPTED, raising=False)


# Forced acceptance.


@pytest.fixture(scope="module")
def said_plainly() -> Callable[[str], list[Outcome]]:
    """By device, what plain decoding makes of the demo's jobs."""

    @cache
    def of(device: str) -> list[Outcome]:
        with open_plain(device=device) as engine:
            return outcomes(engine, demo_jobs())

    return of


@pytest.mark.parametrize(
    ("device", "name", "forced"),
    pairwise_here({"mtp": (0, 1, 2, 3), "ngram": (2, 99), "model": (1, 99)}, (0, 1, 2, 3, 99)),
)
def test_forced_steps_take_so_many_drafts(
    device: str, caplog: pytest.LogCaptureFixture, name: str, forced: int
) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="graphengine"),
        open_speculating(DRAFTING[name], device=device, forced_acceptance=forced) as engine,
    ):
        warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert any(f"forced_acceptance={forced}: EVERY STEP" in r.getMessage() for r in warnings)
        requests = [engine.submit(prompt, greedy(31, **ENDLESS)) for prompt in (PROMPT, OTHER)]
        events = run(engine)
        a_step = min(forced, 3) + 1
        for request in requests:
            counts = [len(event.token_ids) for event in events_of(request, events)]
            if name == "ngram":
                # A continuation may end before the third token; what is absent is not taken.
                assert max(counts) == a_step
            else:
                full, rest = divmod(30, a_step)
                assert counts == [1, *[a_step] * full, *([rest] if rest else [])]
            assert request.acceptance.steps == len(counts) - 1
            assert request.acceptance.tokens == 30
            # Nobody judged a draft.
            assert request.acceptance.proposed == request.acceptance.accepted == 0
            assert request.acceptance.per_position == [] and request.acceptance.rate is None
        assert engine.stats()["acceptance"]["proposed"] == 0
        assert_idle(engine)


def test_forced_steps_without_a_draft_say_what_the_target_says(
    device: str, said_plainly: Callable[[str], list[Outcome]]
) -> None:
    """With n = 0 every row takes its own token alone, which is that of plain decoding."""
    with open_speculating(MTP(k=2), device=device, forced_acceptance=0) as engine:
        assert outcomes(engine, demo_jobs()) == said_plainly(device)
        assert engine.acceptance.mean_length == 1.0


def test_the_environment_forces_acceptance(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FORCE_ACCEPTED, "2")
    with (
        caplog.at_level(logging.WARNING),
        open_speculating(MTP(k=3), device="cpu", forced_acceptance=1) as engine,
    ):
        assert engine.config.forced_acceptance == 2
        assert any(FORCE_ACCEPTED in record.getMessage() for record in caplog.records)
        engine.generate(PROMPT, greedy(31, **ENDLESS))
        assert engine.acceptance.mean_length == 3.0
    monkeypatch.setenv(FORCE_ACCEPTED, "two")
    with pytest.raises(ValueError, match=f"{FORCE_ACCEPTED}='two' must be an integer from 0 up"):
        EngineConfig(device="cpu", speculative=NGram())
    # It concerns nobody who does not draft.
    assert EngineConfig(device="cpu").forced_acceptance is None


def test_forced_stops_still_end_a_request(device: str) -> None:
    """Every emitted token is looked at, not the last of a step alone."""
    with open_speculating(MTP(k=3), device=device, forced_acceptance=3) as engine:
        whole = engine.generate(PROMPT, greedy(40, **ENDLESS)).token_ids
        ends = [i for i in range(1, 30) if whole[i] not in whole[:i]]
        for end in ends[:8]:
            params = greedy(40, stop_token_ids=[whole[end]], **ENDLESS)
            result = engine.generate(PROMPT, params)
            assert result.token_ids == whole[: end + 1] and result.finish_reason == "stop"


# The gate.


def replays(engine: Engine, ending: str) -> int:
    names = [name for name in engine.counters if name.startswith("replays/decode/")]
    return sum(engine.counters[name] for name in names if name.endswith(ending))


def lengths_of(engine: Engine, script_of: Any, request: Request) -> list[int]:
    """The draft length of each decode replay, in order."""
    lengths = []
    before = (replays(engine, "/k3/fast"), replays(engine, "1/fast"))
    for _ in range(500):
        if request.finished:
            return lengths
        step_with(engine, script_of)
        after = (replays(engine, "/k3/fast"), replays(engine, "1/fast"))
        lengths += [3] * (after[0] - before[0]) + [0] * (after[1] - before[1])
        before = after
    raise AssertionError(f"{request} goes on")


def test_the_gate_goes_off_probes_and_comes_back(device: str) -> None:
    """A caller who is wrong for the first 60 tokens, and right from then on; step by step."""
    with open_plain(device=device) as engine:
        expected = outcome(engine.generate(PROMPT, greedy(110, **ENDLESS)))
    known = expected[0]
    gate = GateOptions(window=4, off_below=0.3, on_above=0.5, probe_every=10)
    with open_speculating(UserProvided(3), device=device, gate=gate) as engine:
        request = engine.submit(PROMPT, greedy(110, **ENDLESS))

        def drafts(each: Request) -> Tokens:
            done = len(each.token_ids)
            ahead = (*known[done : done + 3], 0, 0, 0)[:3]
            return ahead if done > 60 else ((ahead[0] + 1) % 4096, *ahead[1:])

        lengths = lengths_of(engine, drafts, request)
        assert outcome(request) == expected
        counters = engine.counters
        # Four wrong steps, ten plain ones, and again: the fifth probe is the first that pays.
        assert lengths[:70] == [*[3] * 4, *[0] * 10] * 5
        assert set(lengths[70:]) == {3}, f"{lengths}"
        assert counters["gate/off"] == 1 and counters["gate/on"] == 1
        assert counters["gate/probes"] == 5
        assert replays(engine, "/k3/fast") == lengths.count(3)
        assert replays(engine, "decode/1/fast") == lengths.count(0)
        assert engine.stats()["gate"] == {"drafts": 3}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_ngrams_on_random_text_are_given_up(
    device: str, checkpoints: dict[str, Any], lookahead: int
) -> None:
    path = checkpoints["qwen3-biases"].path
    options: dict[str, Any] = {"device": device, "dtype": "float32", "lookahead": lookahead}
    jobs = [
        Job(job.prompt, SamplingParams(seed=seed, max_tokens=60, **ENDLESS))
        for seed, job in enumerate(random_jobs(307))
    ]
    with open_plain(path, **options) as engine:
        expected = outcomes(engine, jobs)
    gate = GateOptions(window=12, off_below=0.3, on_above=0.5, probe_every=40)
    with open_speculating(NGram(k=3), path, **options, gate=gate) as engine:
        assert outcomes(engine, jobs) == expected
        counters = engine.counters
        assert counters["gate/off"] == 1 and counters["gate/on"] == 0
        assert counters["gate/probes"] >= 1
        assert 0 < replays(engine, "/k3/fast") < replays(engine, "/fast") / 2
        assert engine.stats()["gate"]["drafts"] in (0, 3)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("name", ["mtp", "ngram"])
def test_the_gate_counts_steps_that_decode(device: str, name: str, lookahead: int) -> None:
    """A step that feeds a prompt alone, or none at all, is nobody's record."""
    gate = GateOptions(window=4, off_below=0.0, on_above=0.0, probe_every=1000)
    with open_speculating(DRAFTING[name], device=device, gate=gate, lookahead=lookahead) as engine:
        for prompt in (PROMPT, OTHER * 12, PROMPT):
            engine.generate(prompt, greedy(9))
        steps = {n: engine.counters[f"gate/steps/{n}"] for n in (0, 3)}
        assert steps == {0: replays(engine, "decode/1/fast"), 3: replays(engine, "/k3/fast")}


def test_auto_drafts_for_few_requests_alone(device: str) -> None:
    with open_engine(device=device, speculative=Auto(), max_batch=4) as engine:
        assert engine.config.mode == NGram(k=5, max_n=3)
        assert engine.gate is not None and engine.gate.max_live == 4
        engine.generate([PROMPT] * 4, greedy(8))
        assert engine.counters["gate/overloaded"] == engine.counters["gate/off"] == 0
        assert replays(engine, "/k5/fast") > 0


@pytest.mark.parametrize(
    ("max_batch", "buckets", "max_live", "draft_rows"),
    [(4, None, 4, 4), (16, None, 16, 16), (64, None, 16, 16), (20, (1, 6, 20), 6, 6)],
)
def test_auto_drafts_for_as_many_as_fit(
    max_batch: int, buckets: tuple[int, ...] | None, max_live: int, draft_rows: int
) -> None:
    config = EngineConfig(speculative=Auto(), max_batch=max_batch, buckets=buckets, device="cpu")
    assert config.gate_options is not None and config.gate_options.max_live == max_live
    assert config.draft_rows == draft_rows
    assert config.lanes == max(max_batch, draft_rows * (1 + config.drafts))


def test_more_requests_than_may_bring_drafts(device: str) -> None:
    """18 rows of 4 tokens are more than the kernels take: then each feeds one."""
    jobs = [Job(f"def f{n}(", greedy(24 + n, **ENDLESS)) for n in range(18)]
    sizes: dict[str, Any] = {"device": device, "max_batch": 18, "buckets": (2, 16, 18)}
    with open_plain(**sizes) as engine:
        expected = outcomes(engine, jobs)
    for mode in (Auto(), MTP(k=3)):
        gate = None if mode == Auto() else GateOptions(max_live=9, off_below=0, on_above=0)
        with open_speculating(mode, gate=gate, **sizes) as engine:
            assert engine.config.draft_rows == 16
            assert outcomes(engine, jobs) == expected
            assert replays(engine, "decode/18/fast") > 0 == replays(engine, "decode/18/k3/fast")
            assert replays(engine, "decode/16/k3/fast") > 0 < replays(engine, "decode/2/k3/fast")


@pytest.mark.parametrize("name", ["mtp", "model"])
def test_above_so_many_requests_nothing_is_drafted(device: str, name: str) -> None:
    jobs = [Job(f"def f{n}(", greedy(20 + n, **ENDLESS)) for n in range(4)]
    with open_plain(device=device, max_batch=4) as engine:
        expected = outcomes(engine, jobs)
    gate = GateOptions(window=4, off_below=0.0, on_above=0.0, max_live=2)
    with open_speculating(DRAFTING[name], device=device, max_batch=4, gate=gate) as engine:
        assert engine.config.draft_rows == 2
        assert not any(key[:2] == ("decode", 4) and key.drafts for key in engine.runtime.graphs)
        assert outcomes(engine, jobs) == expected
        counters = engine.counters
        assert counters["gate/overloaded"] > 0
        for rows in (3, 4):
            assert counters[f"replays/decode/{rows}/k3/fast"] == 0
        assert counters["replays/decode/4/fast"] > 0
        assert counters["replays/decode/1/k3/fast"] > 0


class Plan(Gate):
    """A gate that does as it is told."""

    def __init__(self, plan: Iterable[int]) -> None:
        super().__init__(lengths=(0, 3), window=1, off_below=0, on_above=0, probe_every=1)
        self._plan = deque(plan)

    def record(self, accepted: int, steps: int) -> None:
        pass

    def next_drafts(self, live_rows: int) -> int:
        return self._plan[0] if self._plan else 3

    def launched(self, live_rows: int, steps: int = 1) -> None:
        if self._plan:
            self._plan.popleft()


def drafts_by_length(engine: Engine, prompt: str, tokens: int) -> dict[int, list[int]]:
    """What is proposed after the first so many tokens, as it stands between two steps."""
    request = engine.submit(prompt, greedy(tokens, **ENDLESS))
    found: dict[int, list[int]] = {}
    while engine.busy:
        engine.step()
        if not request.finished and request.job.placement is not None:
            slot = request.job.placement.slot
            length = request.job.prompt_len + len(request.token_ids)
            if request.token_ids:
                if engine.memory.device.type == "cuda":
                    # A step has published before it drafts.
                    torch.cuda.synchronize()
                found[length] = engine.runtime.buffers["draft_tokens"][slot].tolist()
    return found


@pytest.mark.parametrize("name", DRAFTING)
def test_a_drafter_keeps_up_while_it_is_off(device: str, name: str) -> None:
    """Drafts follow from the tokens alone: with a past of plain steps they are what they are
    without, so its KV and tables were kept up.
    """
    options: dict[str, Any] = {"device": device, "lookahead": 0}
    more: list[list[int]] = [[0] * 17, [0, 3] * 30, [3, 3, 0] * 20]
    plans = ([], [3, 3, *[0] * 9], [0, 0, 0, 3, 3] * 12, *extent([], more))
    seen = []
    for plan in plans:
        gate = GateOptions(off_below=0.0, on_above=0.0)
        with open_speculating(DRAFTING[name], **options, gate=gate) as engine:
            engine.core.gate = Plan([3, *plan])
            seen.append(drafts_by_length(engine, PROMPT, extent(44, 60)))
            assert (replays(engine, "decode/1/fast") > 5) == (0 in plan)
    compared = 0
    for found in seen[1:]:
        for length in found.keys() & seen[0].keys():
            if found[length] != [-1, -1, -1]:
                assert found[length] == seen[0][length], f"{length=}"
                compared += 1
    assert compared >= extent(15, 30)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_acceptance_after_a_break_is_as_high_as_without(device: str, lookahead: int) -> None:
    """One step to make drafts in, and the module is as good as it was."""
    options: dict[str, Any] = {
        "device": device, "lookahead": lookahead, "gate": GateOptions(off_below=0.0, on_above=0.0),
    }  # fmt: skip
    lengths = []
    for plan in ([], [3] * 5 + [0] * 20):
        with open_speculating(MTP(k=3), **options) as engine:
            engine.core.gate = Plan(plan)
            request = engine.submit(PROMPT, greedy(100, **ENDLESS))
            events = run(engine)
            # The same part of the text, after the break.
            steps, done = [], 0
            for event in events_of(request, events):
                done += len(event.token_ids)
                if done > 60:
                    steps.append(len(event.token_ids))
            lengths.append(sum(steps) / len(steps))
    assert lengths[1] > lengths[0] - 0.4 and lengths[0] > 1.3, f"{lengths}"


# Relaxed acceptance.


MARKS = RelaxedAcceptance(topk=4, delta=0.3, begin_token_ids=(1, 2, 3), end_token_ids=(4, 5, 6))


@pytest.mark.parametrize(
    ("device", "name", "lookahead"),
    pairwise_here(alternately(dict.fromkeys(DRAFTING, (0, 1))), (0, 1)),
)
def test_without_slack_relaxed_is_strict(
    device: str, said_plainly: Callable[[str], list[Outcome]], name: str, lookahead: int
) -> None:
    """Thinking from the first token on, and never asked to take another token than the best."""
    relaxed = RelaxedAcceptance(
        topk=10, delta=0.0, begin_token_ids=tuple(range(1, 3000)), end_token_ids=(4000,)
    )
    options: dict[str, Any] = {"device": device, "lookahead": lookahead}
    with open_speculating(DRAFTING[name], **options, relaxed_acceptance=relaxed) as engine:
        assert outcomes(engine, demo_jobs()[:5]) == said_plainly(device)[:5]
        assert replays(engine, "/fast") == 0 and replays(engine, "/k3/full") > 0


def test_a_thinking_request_takes_more_drafts(device: str) -> None:
    """BEGIN in the prompt, END in it, both in either order, and a request that samples."""
    with open_plain(device=device) as engine:
        begin, end = engine.tokenizer.encode("<")[0], engine.tokenizer.encode(">")[0]
        text = engine.tokenizer.encode("def add(a, b):\n    return a")
    assert begin != end and not {begin, end} & set(text)
    relaxed = RelaxedAcceptance(
        topk=10, delta=1.0, begin_token_ids=[begin], end_token_ids=[end, 4000]
    )
    prompts = {
        "neither": text, "begin": [begin, *text], "closed": [begin, *text, end],
        "again": [end, *text, begin],
    }  # fmt: skip
    lengths, said = {}, {}
    with open_speculating(DraftModel(DEMO, 3), device=device, relaxed_acceptance=relaxed) as engine:
        for name, prompt in prompts.items():
            params = SamplingParams(temperature=0.0, max_tokens=30, **ENDLESS)
            result = engine.generate(prompt, params)
            lengths[name], said[name] = result.acceptance.mean_length, result.token_ids
        hot = SamplingParams(temperature=0.9, seed=3, max_tokens=30, **ENDLESS)
        sampled = engine.generate(prompts["begin"], hot).token_ids
    with open_plain(device=device) as engine:
        for name in ("neither", "closed"):
            params = SamplingParams(temperature=0.0, max_tokens=30, **ENDLESS)
            assert engine.generate(prompts[name], params).token_ids == said[name]
        assert engine.generate(prompts["begin"], hot).token_ids == sampled


class Thinker:
    """A greedy request under the relaxed rule, from transformers' logits, one step at a time.

    They are changed by transformers' own processors as the request asks.
    """

    def __init__(self, oracle: Any, options: RelaxedAcceptance, request: Request) -> None:
        self.oracle, self.options = oracle, options
        self.said = list(request.prompt_token_ids)
        self.processors = processors(request.params, len(self.said))
        self.delta = 0.0
        self.scan(self.said)
        self.relaxed = self.forbidden = 0

    def scan(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token in self.options.begin_token_ids:
                self.delta = self.options.delta
            elif token in self.options.end_token_ids:
                self.delta = 0.0

    def probabilities(self, tokens: Sequence[int], raw: bool = False) -> torch.Tensor:
        logits = self.oracle.logits(list(tokens))[-1]
        if not raw:
            logits = self.processors(torch.tensor([list(tokens)]), logits[None])[0]
        return logits.softmax(0)

    def guess(self, dice: random.Random, k: int) -> list[int]:
        """Drafts that are mostly among the best few, now and then of the logits as they were."""
        drafts: list[int] = []
        while len(drafts) < k:
            raw = bool(self.processors) and dice.random() < 0.5
            p, ids = self.probabilities([*self.said, *drafts], raw).topk(6)
            near = [int(i) for q, i in zip(p, ids, strict=True) if abs(float(p[0] - q)) <= 0.4]
            drafts.append(dice.choice([int(ids[0]), *near, int(ids[5])]))
        return drafts

    def step(self, drafts: Sequence[int], room: int) -> list[int]:
        """What a step emits; raises where rounding could decide."""
        out: list[int] = []
        for draft in [*drafts, None][:room]:
            p, ids = self.probabilities([*self.said, *out]).sort(descending=True, stable=True)
            if draft is not None and len(out) + 1 < room:
                rank = ids.tolist().index(draft)
                allowed = float(p[rank]) > 0
                passes = rank == 0 or (
                    allowed and rank < self.options.topk and bool(p[rank] >= p[0] - self.delta)
                )
                near = abs(float(p[rank] - (p[0] - self.delta)))
                clear = rank == 0 or not allowed or self.delta == 1 or near > 1e-4
                assert clear, f"{near=}: too close to call"
                self.forbidden += not allowed
                if passes:
                    self.relaxed += rank > 0
                    out.append(draft)
                    continue
            out.append(int(ids[0]))
            break
        self.said += out
        self.scan(out)
        return out


def think(engine: Engine, thinker: Thinker, request: Request, dice: random.Random) -> int:
    """Run the request on the thinker's drafts, to what it expects; how many steps were strict."""
    while not request.token_ids:
        engine.step()
    thinker.said += request.token_ids
    thinker.scan(request.token_ids)
    strict = 0
    while not request.finished:
        drafts = thinker.guess(dice, 3)
        strict += thinker.delta == 0.0
        engine.draft(request, drafts)
        done = len(request.token_ids)
        expected = thinker.step(drafts, request.job.max_new_tokens - done)
        engine.step()
        assert request.token_ids[done:] == expected, f"{done=} {drafts=}"
    return strict


@pytest.mark.parametrize("length", [5, 40, 70])
def test_relaxed_steps_are_those_of_a_plain_simulation(
    device: str, checkpoints: dict[str, Any], length: int
) -> None:
    """The caller's drafts are near misses; a tenth of the vocabulary begins a phase or ends one.

    One slot, so that no request may find the state of the one before; prompts of 1 to 3 chunks.
    """
    oracle = checkpoints["llama-linear-96"]
    marks = list(range(301))
    random.Random(0).shuffle(marks)
    options = RelaxedAcceptance(
        topk=4, delta=0.25, begin_token_ids=marks[:15], end_token_ids=marks[15:30]
    )
    engine_options: dict[str, Any] = {"device": device, "dtype": "float32", "max_batch": 1}
    relaxed = strict = 0
    with open_speculating(
        UserProvided(3), oracle.path, **engine_options, relaxed_acceptance=options
    ) as engine:
        for seed in range(4):
            dice = random.Random(100 * length + seed)
            prompt = [dice.randrange(301) for _ in range(length)]
            request = engine.submit(prompt, greedy(24, **ENDLESS))
            thinker = Thinker(oracle, options, request)
            strict += think(engine, thinker, request, dice)
            relaxed += thinker.relaxed
            if seed == 0:
                # What it leaves behind: the next request must start strict.
                assert_idle(engine)
    assert relaxed > 3 and strict > 3, f"{relaxed=} {strict=}"


RELAXED_OPTIONS: dict[str, dict[str, Any]] = {
    # Fewer than there are candidates.
    "allowed": {"allowed_token_ids": [3, 50, 77]},
    "allowed by halves": {"allowed_token_ids": range(0, 301, 2)},
    "bad words": {"bad_words": [[token] for token in range(1, 301, 3)]},
    "bad pairs": {"bad_words": [[a, b] for a in (290, 295, 300) for b in range(3, 20)]},
    "bias": {"logit_bias": {token: -math.inf if token % 2 else 3.0 for token in range(100)}},
    "repetition": {"repetition_penalty": 2.0},
    "counts": {"frequency_penalty": 2.0, "presence_penalty": 1.0},
    "encouraged": {"frequency_penalty": -1.5},
    "all": {
        "allowed_token_ids": range(0, 301, 2), "bad_words": [[0], [2], [300, 4]],
        "logit_bias": {8: 4.0, 10: -math.inf}, "repetition_penalty": 1.5,
        "presence_penalty": 1.0, "frequency_penalty": 0.5,
    },
}  # fmt: skip
FORBIDDING = ("allowed", "allowed by halves", "bad words", "bias", "all")


@pytest.mark.parametrize("name", RELAXED_OPTIONS)
def test_a_forbidden_draft_is_never_accepted_and_penalties_are_seen(
    device: str, checkpoints: dict[str, Any], name: str
) -> None:
    """Thinking throughout; where something is forbidden, everything else passes."""
    oracle = checkpoints["llama-linear-96"]
    rule: dict[str, Any] = {"topk": 4, "delta": 0.25}
    if name in FORBIDDING:
        rule = {"topk": 301, "delta": 1.0}
    options = RelaxedAcceptance(**rule, begin_token_ids=tuple(range(300)), end_token_ids=(300,))
    engine_options: dict[str, Any] = {"device": device, "dtype": "float32", "max_batch": 1}
    relaxed = forbidden = 0
    with open_speculating(
        UserProvided(3), oracle.path, **engine_options, relaxed_acceptance=options,
        max_bad_words=128,
    ) as engine:  # fmt: skip
        for seed in range(3):
            dice = random.Random(seed)
            # Bad words of transformers may begin in the prompt.
            prompt = [dice.randrange(290) for _ in range(9 + 20 * seed)]
            asked = RELAXED_OPTIONS[name]
            request = engine.submit(prompt, greedy(24, **ENDLESS, logprobs=0, **asked))
            thinker = Thinker(oracle, options, request)
            think(engine, thinker, request, dice)
            relaxed, forbidden = relaxed + thinker.relaxed, forbidden + thinker.forbidden
            assert set(request.token_ids) <= set(asked.get("allowed_token_ids", range(301)))
            # Of the token that was taken, though it was not the target's own.
            assert request.logprobs is not None
            assert [next(iter(each)) for each in request.logprobs] == request.token_ids
    # Where the sampler's own token is repeated for ever, drafts seldom differ from it.
    assert relaxed > 1 and (forbidden > 1 or name not in FORBIDDING), f"{relaxed=} {forbidden=}"


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": 3}, r"speculative=3 must be one of MTP, NGram, .*or None"),
        ({"speculative": MTP}, r"speculative=<class.*must be one of"),
        ({"speculative": MTP(k=3), "max_batch": 17},
         r"17 rows with k=3 drafts feed 68 tokens a step, and at most 64 fit: max_batch=16 does "),
        ({"speculative": NGram(k=3), "max_batch": 40, "gate": GateOptions(max_live=17)},
         r"24 rows \(the bucket that serves max_live=17\) with k=3 drafts feed 96 tokens"),
        ({"speculative": Auto(), "max_batch": 20, "buckets": (20,)},
         r"20 rows .*max_live=16\) with k=3 .* 80 tok"),
        ({"speculative": NGram(k=3), "row_family": "fma"},
         r"row_family='fma' serves up to 2 lanes a step, not the 32 of 8 rows with 4 tokens each, "
         r"the newest one and k=3 drafts"),
        ({"speculative": NGram(k=2), "row_family": "fma", "max_batch": 1},
         r"row_family='fma' serves up to 2 lanes a step, not the 3 of 1 row with 3 tokens each, "),
        ({"gate": GateOptions()}, r"gate is for an engine with drafts, not speculative=None"),
        ({"gate": True, "speculative": NGram()}, r"gate=True must be GateOptions or None"),
        ({"forced_acceptance": 2}, r"forced_acceptance is for an engine with drafts, not"),
        ({"forced_acceptance": True, "speculative": NGram()}, r"forced_acceptance=True must"),
        ({"forced_acceptance": -1, "speculative": NGram()}, r"forced_acceptance=-1 must be an int"),
        ({"relaxed_acceptance": MARKS}, r"relaxed_acceptance is for an engine with drafts"),
        ({"relaxed_acceptance": 0.5, "speculative": NGram()}, r"relaxed_acceptance=0.5 must"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(device="cpu", **options)


def test_one_row_of_one_draft_may_be_served_by_fma() -> None:
    assert EngineConfig(device="cpu", max_batch=1, speculative=NGram(k=1)).family == "dot"
    fma: dict[str, Any] = {"max_batch": 1, "row_family": "fma"}
    with open_engine(device="cpu", **fma, speculative=MTP(k=1)) as engine:
        assert engine.row_family == "fma"
        result = engine.generate(PROMPT, greedy(30))
        assert engine.acceptance.accepted > 0
    with open_engine(device="cpu", **fma) as engine:
        assert outcome(engine.generate(PROMPT, greedy(30))) == outcome(result)


def test_a_callers_drafts_leave_no_lookahead() -> None:
    assert EngineConfig(device="cpu", speculative=UserProvided(2), lookahead=1).lookahead == 0


def refused(path: Path | None, mode: Speculative, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(path, device="cpu", speculative=mode, **options)


def test_a_checkpoint_without_modules_is_refused(checkpoints: dict[str, Any]) -> None:
    path = checkpoints["qwen3-biases"].path
    refused(path, MTP(k=3), r"mtp\.fc\.weight \(qwen3\) or model\.")


def test_vanilla_needs_a_module_for_each_draft(tmp_path: Path) -> None:
    refused(None, MTP(k=3, style="vanilla"), r"\b1\b.*\b3\b|\b3\b.*\b1\b")
    path = write_random(tmp_path / "mimo", "mimo")
    refused(path, MTP(k=3, style="vanilla"), r"\b2\b.*\b3\b|\b3\b.*\b2\b")


def test_a_draft_model_that_does_not_fit_is_refused(
    checkpoints: dict[str, Any], tmp_path: Path, edited: Callable[..., Path]
) -> None:
    target = checkpoints["qwen3-biases"].path
    refused(target, DraftModel(DEMO), r"has 4096 tokens, the target 307: .*share a tokenizer")
    stranger = write_draft_model(tmp_path / "no-tokenizer", "llama", 4096, None)
    refused(None, DraftModel(stranger), r"another tokenizer than .*demo")
    short = edited(write_draft_model(tmp_path / "short", "llama", 4096, DEMO),
                   config={"max_position_embeddings": 100})  # fmt: skip
    refused(None, DraftModel(short), r"max_position_embeddings=100, and max_seq_len is 128")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_engine(device="cpu", speculative=DraftModel(tmp_path / "nowhere"))
    refused(None, DraftModel(DEMO), r"two tokens of each row, 66 of max_batch=33, and at most 64 "
            r"fit, whatever the gate: max_batch=32 does",
            max_batch=33, gate=GateOptions(max_live=1))  # fmt: skip


def test_a_draft_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    def vocabulary(**options: Any) -> MTP:
        return MTP(k=3, draft_vocab=DraftVocabulary(**options))

    text = tmp_path / "text.txt"
    text.write_text("def f():\n    return 1\n" * 9)
    refused(None, vocabulary(text=text, size=4097), r"size=4097 must be an integer in \[1, 4096\]")
    with pytest.raises(FileNotFoundError, match=r"draft_vocab text .*none\.txt: there is no such"):
        open_engine(device="cpu", speculative=vocabulary(text=tmp_path / "none.txt", size=9))
    refused(None, vocabulary(tensor="d2t"), r"no tensor 'd2t' of offsets")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"\xff\xfe\xfa")
    refused(None, vocabulary(text=latin, size=9), r"draft_vocab text .*latin\.txt")
    path = write_random(tmp_path / "random", "qwen3")
    refused(path, vocabulary(text=text, size=9), r"no tokenizer\.json to split")


def test_offsets_of_a_checkpoint_trim_the_vocabulary(tmp_path: Path) -> None:
    """Drafts come from the tensor's targets alone, and the tokens are those of plain decoding."""
    tensors = random_tensors(LAYOUTS["mimo"])
    kept = torch.arange(0, VOCAB, 3)
    tensors["d2t"] = kept - torch.arange(kept.numel())
    path = write_checkpoint(tmp_path / "trimmed", SIZES | LAYOUTS["mimo"].config, tensors)
    jobs = random_jobs(VOCAB)
    with open_plain(path, device="cpu") as engine:
        expected = outcomes(engine, jobs)
    mode = MTP(k=3, draft_vocab=DraftVocabulary(tensor="d2t"))
    with open_speculating(mode, path, device="cpu", lookahead=0) as engine:
        requests = [engine.submit(job.prompt, job.params) for job in jobs]
        drafted: set[int] = set()
        while engine.busy:
            engine.step()
            drafted |= set(engine.runtime.buffers["draft_tokens"].flatten().tolist())
        assert [outcome(request) for request in requests] == expected
        drafted -= {-1, 0}
        assert len(drafted) > 5 and drafted <= set(kept.tolist())

    bad = tensors | {"d2t": torch.zeros(kept.numel() + VOCAB, dtype=torch.int64)}
    broken = tmp_path / "broken"
    write_checkpoint(broken, SIZES | LAYOUTS["mimo"].config, bad)
    refused(broken, mode, r"maps draft 97 to token 97, the vocabulary has 97")
    save_file(tensors | {"d2t": kept.int()}, broken / "model.safetensors")
    refused(broken, mode, r"d2t must be int64 \[N\], not torch\.int32 \(33,\)")


def test_marks_outside_of_the_vocabulary_are_refused() -> None:
    beyond = RelaxedAcceptance(begin_token_ids=(1,), end_token_ids=(2, 4096))
    with pytest.raises(ValueError, match=r"end_token_ids=\(2, 4096\) exceed .* of 4096 tokens"):
        open_engine(device="cpu", speculative=NGram(), relaxed_acceptance=beyond)


def test_drafts_that_cannot_be_are_refused() -> None:
    with open_speculating(UserProvided(2), device="cpu") as engine:
        request = engine.submit(PROMPT, greedy(9))
        engine.draft(request, [])
        engine.draft(request, [4095, 0])
        with pytest.raises(ValueError, match=r"3 drafts for a request, k=2"):
            engine.draft(request, [1, 2, 3])
        for wrong in ([4096], [-1], ["a"], [1.5], [True]):
            with pytest.raises(ValueError, match=str(wrong[0])):
                engine.draft(request, wrong)
        for nothing in (5, None, "12"):
            with pytest.raises(ValueError, match=f"drafts are token ids, not {nothing!r}"):
                engine.draft(request, nothing)  # type: ignore[arg-type]
        with open_speculating(UserProvided(2), device="cpu") as other:
            stranger = other.submit(PROMPT, greedy(9))
            for wrong_request in (stranger, None, 1):
                with pytest.raises(ValueError, match="is no request of this engine"):
                    engine.draft(wrong_request, [1])  # type: ignore[arg-type]
            assert stranger.job.drafts.token_ids == ()
        # What was refused changed nothing.
        assert request.job.drafts.token_ids == (4095, 0)
        run(engine)
        with pytest.raises(ValueError, match=r"id=1.* has ended: nothing verifies its drafts"):
            engine.draft(request, [1])
    with pytest.raises(ValueError, match="closed"):
        engine.draft(request, [1])
    for mode in (None, NGram(), MTP()):
        with open_engine(device="cpu", speculative=mode) as engine:
            request = engine.submit(PROMPT, greedy(3))
            with pytest.raises(ValueError, match="only UserProvided takes drafts"):
                engine.draft(request, [1])


def test_drafts_are_used_once(device: str) -> None:
    """A step without a word of the caller verifies nothing, whatever it verified before."""
    with open_plain(device=device) as engine:
        known = engine.generate(PROMPT, greedy(40, **ENDLESS)).token_ids
    with open_speculating(UserProvided(3), device=device) as engine:
        request = engine.submit(PROMPT, greedy(40, **ENDLESS))
        counts = []
        while not request.finished:
            done = len(request.token_ids)
            # Every other step of one that decodes, the same ones that the step before was told.
            if done and len(counts) % 3 == 1:
                engine.draft(request, known[done : done + 3])
            engine.step()
            counts.append(len(request.token_ids) - done)
        assert tuple(request.token_ids) == known
        assert counts[:7] == [1, 4, 1, 1, 4, 1, 1]


def test_the_report_names_the_speculative_graphs(device: str) -> None:
    with open_speculating(NGram(k=3), device=device) as engine:
        text = str(engine.report())
        for rows in engine.memory.ladder.sizes:
            for sampler in ("fast", "full"):
                assert f"decode/{rows}/k3/{sampler}" in text
                assert f"decode/{rows}/{sampler}" in text
        # Names of any length are apart from their numbers.
        engine.generate([[5, 6, 7]], SamplingParams(temperature=1.0, top_k=5, max_tokens=8))
        assert re.search(r"^  replays/decode/1/k3/full +[1-9]", str(engine.report()), re.MULTILINE)


def test_stats_count_proposals_without_a_match(device: str) -> None:
    """Prompts alone: there is a match where the sampled token was among the prompt's."""
    prompts = [[5], [300], list(range(100, 130)), [7] * 30]
    with open_speculating(NGram(k=2), device=device) as engine:
        results = engine.generate(prompts, greedy(1, ignore_eos=True))
        news = [result.token_ids[0] not in result.prompt_token_ids for result in results]
        assert engine.stats()["counters"]["ngram/unmatched"] == sum(news) > 0
    with open_speculating(MTP(k=1), device=device) as engine:
        assert "ngram/unmatched" not in engine.stats()["counters"]
