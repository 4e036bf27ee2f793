"""The results of finished requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphengine.requests.acceptance import Acceptance

# Characters of a text that a `repr` shows.
_SHOWN = 60

FinishReason = Literal["stop", "length", "cancelled", "error", "deadline"]


@dataclass(kw_only=True, slots=True)
class Timings:
    """Host times in seconds of `time.perf_counter()`; a token's is when it reached the host.

    `submitted` is the time of the caller's call: tokenising the prompt comes after it.
    """

    submitted: float
    tokens: list[float] = field(default_factory=list)
    finished: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return self.tokens[0] - self.submitted if self.tokens else None

    @property
    def inter_token(self) -> list[float]:
        """Gaps between consecutive tokens."""
        return [after - before for before, after in pairwise(self.tokens)]


class Logprob(NamedTuple):
    """A token's log-probability and its rank: 1, and one more for each token that is more probable.

    Equal tokens share a rank; the most probable ones have 1.
    """

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]
"""A position's entries by token id: first its own token, then the most probable ones in order."""


class Segment(NamedTuple):
    """The part of a text that one token made certain: characters `start` to `end`, without `end`.

    A character made of several tokens belongs to the token that completes it; a token without text
    of its own has an empty segment.
    """

    token_id: int
    text: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Result:
    """A finished request. `token_ids` end with the stop token where one ended the request.

    Its `repr` is one line, and a notebook shows it with its whole text; `to_dict` has everything.

    text_ends    number of characters of `text` up to and including each token; empty without a
                 tokenizer
    stop_reason  the stop string, the stop token id or the stop token sequence that ended it; None
                 for an end-of-sequence token, a `stop_callback` and every reason but "stop"
    acceptance   counts its verified and accepted drafts; empty without speculation
    cached_tokens  prompt tokens that were not prefilled, as their KV was kept: by a session, or
                 from another prompt that begins with them
    weight_version  version of the weights that its tokens came from: 0, or that of the last
                 `Engine.update_weights`
    adapter      name of the adapter that its tokens went through; None: the base model alone
    logprobs     an entry for each of `token_ids`, if the request asked for them
    prompt_logprobs  the same for the prompt's tokens; the first entry is None, as no token precedes
                     it
    routing      with `record_routing`, int16 [tokens, layers with experts, experts of a token]: ids
                 of the experts that each fed token took, best first. Fed tokens are the prompt's
                 and all new ones but the last. Prompt tokens that were not prefilled have the
                 experts of the prefill that their KV is from, or -1 if the engine does not know
                 them: in a restored session
    codes        of a model whose steps emit frames, int32 [frames, K]: the codes of each frame as
                 it was drawn, with its delays (`Engine.undelay_frames`); the one that ended the
                 request is the last. None for other models
    codes_logprobs  float32 [frames, K], the log-probability of each code, if the request asked for
                 `logprobs`; `logprobs` itself is None where steps emit frames
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    timings: Timings
    acceptance: Acceptance = field(default_factory=Acceptance)
    cached_tokens: int = 0
    weight_version: int = 0
    adapter: str | None = None
    stop_reason: str | int | tuple[int, ...] | None = None
    text_ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    routing: NDArray[np.int16] | None = field(default=None, compare=False)
    codes: NDArray[np.int32] | None = field(default=None, compare=False)
    codes_logprobs: NDArray[np.float32] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return (
            f"Result(request_id={self.request_id}, prompt={len(self.prompt_token_ids)}, "
            f"tokens={len(self.token_ids)}, finish_reason={self.finish_reason!r}, text={text!r})"
        )

    def _repr_html_(self) -> str:
        """HTML for a notebook: the text, and a line about it."""
        facts = [
            f"request {self.request_id}",
            f"{len(self.prompt_token_ids)} prompt + {len(self.token_ids)} new tokens",
            f"finished by {self.finish_reason}",
            f"seed {self.seed}",
        ]
        if self.cached_tokens:
            facts.insert(2, f"{self.cached_tokens} cached")
        if (first := self.timings.time_to_first_token) is not None:
            facts.append(f"first token after {first * 1e3:.1f} ms")
        return f"<pre>{escape(self.text)}</pre><small>{escape(', '.join(facts))}</small>"

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of all tokens, or codes; None without `logprobs`."""
        if self.codes_logprobs is not None:
            return float(self.codes_logprobs.sum(dtype=np.float64))
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(logprobs[token].logprob for token, logprobs in pairs)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """One segment a token; together they are `text`. Empty without a tokenizer."""
        starts = (0, *self.text_ends[:-1])
        spans = zip(self.token_ids, starts, self.text_ends, strict=False)
        return tuple(
            Segment(token_id, self.text[start:end], start, end) for token_id, start, end in spans
        )

    def to_dict(self) -> dict[str, Any]:
        """The result in plain JSON types. These names will not change; names may be added.

        request_id        number of the request in its engine, from 1
        prompt_token_ids  list of ids
        token_ids         list of ids, including what ended the request
        text              text of the tokens; empty without a tokenizer
        segments          list of {"token_id", "text", "start", "end"}, one for each token
        finish_reason     "stop", "length", "cancelled", "error" or "deadline"
        stop_reason       the stop string (text), stop token (id) or stop token sequence (list of
                          ids) that ended it, or null
        seed              seed of its random numbers, drawn by the engine if none was given
        timings           seconds from its submission: {"time_to_first_token" (null without one),
                          "tokens": when each reached the host, "finished"}
        cached_tokens     tokens of the prompt whose KV was kept from earlier
        adapter           name of its adapter; null: the base model alone
        weight_version    version of the weights, 0 before the first update
        acceptance        `Acceptance.as_dict()`: counts of its drafts
        logprobs          null, or for each token a list of {"token_id", "logprob", "rank"}: the
                          token's own entry, then those of the most probable tokens
        prompt_logprobs   null, or the same for the prompt's tokens, with null for the first
        routing           null, or for each token that was fed, for each layer with experts, the
                          list of their ids
        codes             null, or for each frame the list of its codes
        codes_logprobs    null, or for each frame the list of its codes' log-probabilities
        """
        submitted, finished = self.timings.submitted, self.timings.finished
        reason = self.stop_reason
        return {
            "request_id": self.request_id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": list(self.token_ids),
            "text": self.text,
            "segments": [segment._asdict() for segment in self.segments],
            "finish_reason": self.finish_reason,
            "stop_reason": list(reason) if isinstance(reason, tuple) else reason,
            "seed": self.seed,
            "timings": {
                "time_to_first_token": self.timings.time_to_first_token,
                "tokens": [time - submitted for time in self.timings.tokens],
                "finished": None if finished is None else finished - submitted,
            },
            "cached_tokens": self.cached_tokens,
            "weight_version": self.weight_version,
            "adapter": self.adapter,
            "acceptance": self.acceptance.as_dict(),
            "logprobs": _lists_of(self.logprobs),
            "prompt_logprobs": _lists_of(self.prompt_logprobs),
            "routing": None if self.routing is None else self.routing.tolist(),
            "codes": None if self.codes is None else self.codes.tolist(),
            "codes_logprobs": (
                None if self.codes_logprobs is None else self.codes_logprobs.tolist()
            ),
        }


def _lists_of(logprobs: Sequence[TokenLogprobs | None] | None) -> list[Any] | None:
    if logprobs is None:
        return None
    return [
        each and [{"token_id": token, **found._asdict()} for token, found in each.items()]
        for each in logprobs
    ]
