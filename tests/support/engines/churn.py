"""Callers that submit and end requests at random, and a check of each request's tokens."""

from __future__ import annotations

import dataclasses
import random
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engines.logit_options import HAS_GRAMMARS, consistent, random_options
from graphengine import Engine, Event, Request, Result, SamplingParams


def write_tokenizer(folder: Path, size: int, eos: int | None = None) -> None:
    """A byte-level tokenizer of this many ids, with letters and digits among the first."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((known, _),) = level.pre_tokenize_str(string.printable[:95] + "\n")
    tokens = [*known, *sorted({*level.alphabet()} - {*known})]
    merges = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    tokens += ["".join(pair) for pair in merges]
    if eos is not None:
        tokens.insert(eos, "<eos>")
    vocabulary = {token: index for index, token in enumerate(tokens[:size])}
    merges = [pair for pair in merges if "".join(pair) in vocabulary]
    library = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    library.pre_tokenizer, library.decoder = level, decoders.ByteLevel()
    if eos is not None:
        library.add_special_tokens(["<eos>"])
    library.save(str(folder / "tokenizer.json"))


class Owners:
    """All callers with requests in `engine`: they get events, end requests early, or let them run.

    `samples` says whether they also ask for several samples of a prompt. `requests` has all
    requests so far. `late` and `stopped` count those ended by a deadline and by
    the engine's `stop_callback`.
    """

    def __init__(self, engine: Engine, dice: random.Random, *, samples: bool = False) -> None:
        self._samples = samples
        self.requests: list[Request] = []
        self.stopped: set[int] = set()
        self._heard: dict[int, list[int]] = {}
        self._engine = engine
        self._dice = dice
        engine.stop_callback = self._stop_some

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> None:
        dice, options = self._dice, dict[str, Any]()
        if dice.random() < 0.3:
            options["priority"] = dice.randrange(-2, 3)
        if dice.random() < 0.3:
            # Far away: `disturb` decides which request is late, so that a slow machine changes
            # nothing.
            options["deadline_s"] = 1e6
        if dice.random() < 0.3:
            options["on_event"] = self._hear
        n = dice.randrange(2, 4) if self._samples and dice.random() < 0.2 else 1
        requests = self._engine.submit_many(list(prompt), params, n=n, **options)
        self.requests += requests
        if "on_event" in options:
            self._heard |= {request.id: [] for request in requests}

    def disturb(self) -> None:
        """Now and then cancel a request or make it late."""
        dice = self._dice
        unfinished = [request for request in self.requests if not request.finished]
        if unfinished and dice.random() < 0.1:
            dice.choice(unfinished).cancel()
        heap = self._engine.core.delivery.deadlines.heap
        if heap and dice.random() < 0.15:
            heap[0] = (time.perf_counter(), *heap[0][1:])

    def leave(self) -> None:
        """End the churn: requests that still wait for their first step are cancelled."""
        for request in [*self._engine.scheduler.waiting]:
            if not request.token_ids:
                request.cancel()

    @property
    def late(self) -> int:
        return sum(request.finish_reason == "deadline" for request in self.requests)

    def _hear(self, event: Event) -> None:
        self._heard[event.request.id] += event.token_ids

    def _stop_some(self, active: tuple[int, ...]) -> set[int]:
        ended = {self._dice.choice(active)} if self._dice.random() < 0.02 else set()
        self.stopped |= ended
        return ended

    def check(self, calm: Engine, at_once: int | None = None) -> None:
        """Each request has the tokens that it gets in a calm engine, or the first ones.

        There nothing pauses or ends early, and each request has other neighbours: one after the
        other would take several times as long.

        at_once  requests that run at the same time; None: as many as the engine takes
        """
        assert all(request.finished for request in self.requests)
        for request in self.requests:
            if request.id in self._heard:
                assert self._heard[request.id] == request.token_ids
        answered = [request for request in self.requests if request.token_ids]
        # In another order, so that none has the neighbours that it had.
        answered = answered[::-2] + answered[-2::-2]
        paused, results = calm.counters["pauses"], list[Result]()
        at_once = at_once or len(answered)
        for first in range(0, len(answered), at_once):
            some = answered[first : first + at_once]
            prompts = [list(request.prompt_token_ids) for request in some]
            results += calm.generate(prompts, [self._params_of(request) for request in some])
        assert calm.counters["pauses"] == paused
        for request, expected in zip(answered, results, strict=True):
            self._check_one(request, expected)

    def _params_of(self, request: Request) -> SamplingParams:
        """What the request is compared with: no longer than it got."""
        count, params = len(request.token_ids), request.params
        params = dataclasses.replace(params, seed=request.seed)
        if request.id in self.stopped or request.finish_reason in ("cancelled", "deadline"):
            # Its further tokens are not compared.
            least = min(params.min_tokens, count)
            params = dataclasses.replace(params, max_tokens=count, min_tokens=least)
        return params

    def _check_one(self, request: Request, expected: Result) -> None:
        count = len(request.token_ids)
        assert tuple(request.token_ids) == expected.token_ids[:count], f"{request}"
        if expected.codes is not None:
            assert np.array_equal(request.result().codes, expected.codes[:count]), f"{request}"
        if request.id in self.stopped:
            assert request.finish_reason == "stop" and request.stop_reason is None
        elif request.finish_reason not in ("cancelled", "deadline"):
            assert count == len(expected.token_ids), f"{request}"
            for name in ("text", "finish_reason", "stop_reason"):
                assert getattr(request, name) == getattr(expected, name), f"{request}: {name}"
        # Where a prompt is cut changes the last bits.
        if expected.logprobs is not None and not request.cached_tokens:
            assert request.logprobs == list(expected.logprobs[:count]), f"{request}"
        if expected.prompt_logprobs is not None:
            assert request.prompt_logprobs == list(expected.prompt_logprobs), f"{request}"

    def unasked(self) -> list[str]:
        """Options that no request with tokens had, and ways to end that no request took."""
        usual = SamplingParams()
        asked = [request.params for request in self.requests if request.token_ids]
        # Prompts are token ids here, no model has experts or frames, and nobody forces tokens.
        left_out = {"add_bos", "seed", "routing", "forced_tokens", "codes", "forced_codes", "feed"}
        if not HAS_GRAMMARS:
            left_out.add("structured_outputs")
        options = [each.name for each in dataclasses.fields(SamplingParams)]
        return [
            *(
                name
                for name in options
                if name not in left_out
                and all(getattr(params, name) == getattr(usual, name) for params in asked)
            ),
            *(name for name in ("late", "stopped") if not getattr(self, name)),
        ]


COUNTED = ("pauses", "resumes", "finished/cancelled", "slot_reuses")


def random_params(dice: random.Random, vocab_size: int) -> SamplingParams:
    """Greedy or sampled, some with options on logits."""
    options: dict[str, Any] = {"max_tokens": dice.randrange(1, 50)}
    if dice.random() < 0.4:
        options |= random_options(dice, vocab_size, grammars=HAS_GRAMMARS)
    if dice.random() < 0.5:
        options["temperature"] = 0.0
    else:
        options |= {"top_k": dice.choice([0, 20]), "top_p": dice.choice([1.0, 0.8])}
    return SamplingParams(**consistent(options))


def come_and_go(
    owners: Owners,
    engine: Engine,
    dice: random.Random,
    *,
    tokens: int,
    stepped: Callable[[], None] = lambda: None,
    rested: Callable[[], None] = lambda: None,
) -> None:
    """Submit, step and disturb until the engine has so many tokens, and each of `COUNTED` came.

    `stepped` is called after each step, `rested` after some of them. The last requests go on.
    """
    counters, vocab = engine.counters, engine.model.config.vocab_size
    for _ in range(200):
        if counters["tokens"] > tokens and all(counters[name] for name in COUNTED):
            break
        for _ in range(dice.randrange(8)):
            prompt = [dice.randrange(vocab) for _ in range(dice.randrange(1, 60))]
            owners.submit(prompt, random_params(dice, vocab))
        for _ in range(dice.randrange(20)):
            engine.step(timeout=dice.choice([None, 0]))
            owners.disturb()
            stepped()
        rested()
    assert all(counters[name] for name in COUNTED), counters
