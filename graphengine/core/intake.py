"""Checks prompts and parameters, and makes requests of them."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from graphengine.automata.token_automaton import TokenAutomaton
from graphengine.config import EngineConfig
from graphengine.drafters import DraftNeeds
from graphengine.models.contract import ModelConfig
from graphengine.models.inner.drawn import FrameCoder
from graphengine.models.weights import RoutedExperts
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.options.checks import (
    check_at_least,
    check_callable,
    is_finite,
    is_int,
    is_number,
    shown,
)
from graphengine.options.prefill_cut import PrefillCut
from graphengine.program.fields import takes_grids, takes_images
from graphengine.prompt_embeds import EmbedsSpec, PromptTokens
from graphengine.prompts import Prompt, read_prompt, token_id, token_ids_of
from graphengine.requests.adapters import Adapters
from graphengine.requests.caller_drafts import CallerDrafts
from graphengine.requests.context import SharedPrompt
from graphengine.requests.frames import (
    check_frame_prompt,
    given_frames,
    new_streamed_rows,
    read_frame_params,
)
from graphengine.requests.grammar_pool import DeviceGuide, GrammarPool, TableGuide
from graphengine.requests.grammars import Grammars, Guide
from graphengine.requests.job import Job
from graphengine.requests.misplaced import QUEUE_OPTIONS, check_names
from graphengine.requests.processing import (
    Processing,
    check_prompt_rows,
    check_something_is_left,
    make_processing,
)
from graphengine.requests.request import Event, Request
from graphengine.requests.routes import RecordedRoutes
from graphengine.requests.stop_tokens import Stops
from graphengine.routing_record import Ids
from graphengine.sampling_params import SamplingParams
from graphengine.text.tokenizer import TextStream, Tokenizer
from graphengine.text.tokenizer_files import WRITE_TOKENIZER

log = logging.getLogger(__name__)

SEEDS = 2**63
"""Seeds are below this."""


class QueueOptions(TypedDict, total=False):
    """Options of a request in the queue; `Engine.submit` documents them."""

    priority: int
    deadline_s: float | None
    adapter: str | None
    prompt_logprobs_out: Tensor | None


def check_queue_options(method: str, options: QueueOptions) -> None:
    """TypeError for a keyword argument that `method` does not have."""
    check_names(method, options, QUEUE_OPTIONS)


def check_one_prompt(requests: int, options: Mapping[str, Any]) -> None:
    """ValueError if several requests would write their log-probabilities to one memory."""
    if requests > 1 and options.get("prompt_logprobs_out") is not None:
        raise ValueError(f"prompt_logprobs_out has room for one request, not for {requests}")


MOST_SAMPLES = 65_536
"""Most samples of a prompt: each is a request that the host makes at once."""


def check_samples(n: object) -> None:
    """ValueError unless `n` is a number of samples."""
    check_at_least("n", n, 1, MOST_SAMPLES)


class Intake:
    """Makes requests for an engine of `config` and `memory`, numbered from 1.

    vocabulary    number of ids that can be sampled, the first of the model's `vocab_size`
    eos_ids       tokens that end every request, unless it ignores them
    prompts_only  whether every request has just one new token
    routed        the model's experts; None if it has none
    inner         the model's inner decoder; None: a step emits tokens
    embeds        shape and dtype of embeddings in prompts; None: they are not allowed
    device        the engine's, with its number
    cancelled     the list that requests add themselves to when they are cancelled
    defaults      sampling options of requests that have no parameters; None: the usual ones
    grammar_pool  the pool on the device for automata of grammars; None: there is none

    `tokenizer` may be set to None: requests made from then on have no text.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: MemoryPlan,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_prompt: int,
        vocabulary: int,
        eos_ids: tuple[int, ...],
        prompts_only: bool,
        routed: RoutedExperts | None = None,
        inner: FrameCoder | None = None,
        embeds: EmbedsSpec | None = None,
        cancelled: list[Request],
        device: torch.device,
        defaults: Mapping[str, Any] | None = None,
        grammar_pool: GrammarPool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.usual_params = SamplingParams(**(defaults or {}))
        if prompts_only:
            self.usual_params = replace(self.usual_params, max_tokens=1)
        self.made = 0
        self.adapters = Adapters(config.adapter_slots)
        self.weight_version = 0
        self._config = config
        self._device = device
        self._max_seq_len = memory.max_seq_len
        self._vocab_size = vocab_size
        self._max_prompt = max_prompt
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._prompts_only = prompts_only
        self._routed = routed
        self.inner = inner
        self.embeds = embeds
        self._recorded = memory.routed
        self._block_size = memory.block_size
        self._dtype = memory.dtype
        self._cancelled = cancelled
        self._seeds = random.Random(config.seed)
        self._grammars = Grammars(
            width=memory.tokens_per_step,
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            pool_bytes=config.grammar_pool_mib * 2**20,
        )
        self._grammar_pool = grammar_pool

    def prompt(self, prompt: Prompt, params: SamplingParams) -> PromptTokens:
        """The prompt's tokens; ValueError for a prompt that cannot be served."""
        _check_params(params)
        return self.session_prompt(prompt, (), params.add_bos, room=params.room)

    def session_prompt(
        self, prompt: Prompt, before: Sequence[int], add_bos: bool | None = None, room: int = 1
    ) -> PromptTokens:
        """The prompt's tokens alone, to follow a session's tokens `before`; ValueError for a prompt
        that cannot be served there.
        """
        return read_prompt(
            prompt,
            tokenizer=self.tokenizer,
            vocab_size=self._vocab_size,
            max_seq_len=self._max_seq_len,
            embeds=self.embeds,
            add_bos=add_bos,
            before=before,
            room=room,
        )

    def turn(
        self,
        prompt: PromptTokens,
        params: SamplingParams | None,
        callback: Callable[[Event], None] | None,
        *,
        submitted: float,
        **options: Unpack[QueueOptions],
    ) -> Request:
        """A request whose prompt is a session's tokens; ValueError if it cannot be served."""
        params = self.usual_params if params is None else params
        _check_params(params)
        if params.add_bos is not None:
            raise ValueError(f"add_bos={params.add_bos} is for the `append` of a session")
        return self.request(prompt, params, callback, submitted=submitted, **options)

    def request(
        self,
        prompt: PromptTokens,
        params: SamplingParams,
        callback: Callable[[Event], None] | None = None,
        *,
        submitted: float,
        priority: int = 0,
        deadline_s: float | None = None,
        adapter: str | None = None,
        prompt_logprobs_out: Tensor | None = None,
    ) -> Request:
        """A request, not queued yet; ValueError for parameters that cannot be served.

        submitted  time of the caller's call, by `time.perf_counter`
        """
        check_callable("on_event", callback)
        _check_queueing(priority, deadline_s)
        loaded = self.adapters.find(adapter)
        drawn_codes = read_frame_params(params, self.inner)
        check_frame_prompt(prompt.ids, self.inner)
        streamed = new_streamed_rows(params.feed, self.inner, self._dtype)
        stops = self._stops(params)
        self._check_new_tokens(params)
        self._check_length(len(prompt.ids))
        rope_shift = self._rope_shift(prompt, params.room)
        processing = make_processing(
            params,
            prompt_len=len(prompt.ids),
            vocabulary=self._vocabulary,
            tokenizer=self.tokenizer,
            config=self._config,
        )
        check_something_is_left(params, processing, stops.ids)
        self._check_prompt_rows(prompt_logprobs_out, len(prompt.ids), params)
        guide = self._guide(params, processing)
        given_routes = self._given_routes(params)
        max_len = self._max_len(len(prompt.ids), params, rope_shift)
        given_codes = given_frames(params, self.inner, max_len - len(prompt.ids))
        self.made += 1
        return Request(
            request_id=self.made,
            prompt_token_ids=prompt.ids,
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            submitted=submitted,
            cancelled=self._cancelled,
            callback=callback,
            priority=int(priority),
            weight_version=self.weight_version,
            job=Job(
                prompt_len=len(prompt.ids),
                max_len=max_len,
                min_tokens=params.min_tokens,
                embeds=prompt.embeds,
                rope_shift=rope_shift,
                adapter=loaded,
                stops=stops,
                processing=processing,
                full=params.filtered
                or processing is not None
                or any(code.filtered for code in drawn_codes),
                deadline=None if deadline_s is None else submitted + float(deadline_s),
                stream=self._stream(params, prompt.ids),
                guide=guide,
                forcible=params.forced_tokens,
                prompt_rows=prompt_logprobs_out,
                given_routes=given_routes,
                routes=self._new_routes(),
                scores=not params.room,
                codes=None if self.inner is None else [],
                codes_logprobs=None if self.inner is None or params.logprobs is None else [],
                frame_size=0 if self.inner is None else self.inner.steps,
                given_codes=given_codes,
                drawn_codes=drawn_codes,
                streamed=streamed,
            ),
        )

    def _rope_shift(self, prompt: PromptTokens, room: int) -> int:
        """The row of RoPE's tables minus the position, past a prompt.

        ValueError for grids of embeddings that leave the tables no rows for `room` tokens more.
        """
        if not prompt.embeds.has_grids():
            return 0
        shift, last = prompt.embeds.shift(), prompt.embeds.last_row()
        last = max(last, len(prompt.ids) + shift + room - 1)
        if last >= self._max_seq_len:
            raise ValueError(
                f"the grids of embeddings in the prompt take RoPE to row {last}, past "
                f"max_seq_len={self._max_seq_len}"
            )
        return shift

    def samples(
        self,
        prompt: PromptTokens,
        params: SamplingParams,
        callback: Callable[[Event], None] | None,
        n: int,
        *,
        submitted: float,
        **options: Unpack[QueueOptions],
    ) -> list[Request]:
        """`n` requests of one prompt, not queued yet; ValueError as in `request`.

        Sample i has the first one's seed plus i, modulo 2**63.
        """
        check_samples(n)
        check_one_prompt(n, options)
        requests = [
            self.request(prompt, params, callback, submitted=submitted, **options) for _ in range(n)
        ]
        # Log-probabilities of a prompt, and replayed experts, need every token to be fed.
        whole = params.prompt_logprobs is not None or params.routing is not None
        shared = (
            None if n == 1 or whole else SharedPrompt(waiting={request.id for request in requests})
        )
        for number, request in enumerate(requests):
            request.seed = (requests[0].seed + number) % SEEDS
            request.job.shared = shared
        return requests

    def _stops(self, params: SamplingParams) -> Stops:
        """The tokens that end a request; ValueError for too many, and for an id without a token."""
        eos = () if params.ignore_eos else self._eos_ids
        given = (
            token_id(token, self._vocab_size, "stop_token_ids") for token in params.stop_tokens
        )
        ids = tuple(dict.fromkeys((*eos, *given)))
        limit = self._config.max_stop_ids
        if len(ids) > limit:
            raise ValueError(
                f"{len(ids)} end-of-sequence and stop token ids exceed max_stop_ids={limit}"
            )
        return Stops(
            ids=ids,
            eos_ids=eos,
            tokens=params.stop_tokens,
            sequences=tuple(map(tuple, params.stop_token_sequences)),
            in_text=params.include_stop_str_in_output,
        )

    def _check_new_tokens(self, params: SamplingParams) -> None:
        """ValueError for stop strings without a tokenizer, and for too many new tokens where each
        prompt has one.
        """
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer; the checkpoint has no tokenizer.json. "
                f"{WRITE_TOKENIZER}"
            )
        if self._prompts_only and params.max_tokens not in (None, 1):
            raise ValueError(
                f"max_tokens={params.max_tokens}: with {self._config.speculative} a prompt has one "
                f"new token, max_tokens=1"
            )

    def _check_length(self, tokens: int) -> None:
        if tokens > self._max_prompt:
            raise ValueError(
                f"prompt of {tokens} tokens exceeds max_position_embeddings={self._max_prompt}: "
                f"RoPE of type 'dynamic' turns a longer prompt by its length, which tables cannot; "
                f"replies may go on from there"
            )

    def _max_len(self, prompt_len: int, params: SamplingParams, rope_shift: int = 0) -> int:
        """Length of the whole sequence, prompt included, at which a request ends.

        A video may take RoPE further than its positions: `rope_shift` rows, which are no room.
        """
        # A prefill always samples a token. A prompt that is only scored drops it: it may lie past
        # the last position, as nothing is written for it.
        if self._prompts_only or not params.room:
            return prompt_len + 1
        room = self._max_seq_len - prompt_len - max(rope_shift, 0)
        most = room if params.max_tokens is None else params.max_tokens
        return prompt_len + min(room, most)

    def _guide(self, params: SamplingParams, processing: Processing | None) -> Guide | None:
        """The guide for a request's grammar, None without one; ValueError if there can be none."""
        self._check_forcible(params)
        if params.structured_outputs is None:
            return None
        if self._config.forced_acceptance is not None:
            raise ValueError(
                f"structured_outputs: an engine with forced_acceptance="
                f"{self._config.forced_acceptance} takes drafts that a grammar forbids"
            )
        assert processing is not None, "a grammar has a mask"
        return self._grammars.guide(params, self.tokenizer, processing.mask)

    def place_grammar(self, request: Request, counters: Counter[str]) -> None:
        """Have the device follow a request's grammar, if its automaton fits the pool.

        Otherwise the host makes its masks, and the guide says why.
        """
        pool, job = self._grammar_pool, request.job
        guide = job.guide
        if pool is None or not isinstance(guide, Guide):
            return
        compiled, processing = guide.compiled, job.processing
        assert processing is not None, "a grammar has a mask"
        if compiled is not None and isinstance(compiled.outcome, TokenAutomaton):
            start = pool.take(compiled.digest, compiled.outcome)
            if start is not None:
                job.guide = DeviceGuide(
                    compiled.outcome,
                    pool,
                    compiled.digest,
                    counters if self._config.jumps else None,
                )
                job.processing = processing.with_automaton(start)
                counters["guided/device"] += 1
                return
            reason = (
                f"its automaton takes {compiled.outcome.nbytes} bytes, and {4 * pool.used_words} "
                f"of the pool's {4 * pool.words} are in use"
            )
            guide = job.guide = TableGuide(compiled.outcome, len(guide.masks), reason)
        counters["guided/host"] += 1
        log.info("request %d: the host follows its grammar: %s", request.id, guide.reason)

    def _check_forcible(self, params: SamplingParams) -> None:
        """ValueError for options that could contradict a token that a caller forces."""
        if not params.forced_tokens:
            return
        for name in ("bad_words", "structured_outputs"):
            if getattr(params, name):
                raise ValueError(f"forced_tokens=True: {name} could forbid a forced token")
        if self._config.forced_acceptance is not None:
            raise ValueError(
                f"forced_tokens=True: an engine with forced_acceptance="
                f"{self._config.forced_acceptance} takes drafts instead"
            )

    def force(self, request: Request, token: int, *, unfinished: bool, ahead: bool) -> None:
        """Have a request's next step emit a token; it replaces an earlier one.

        unfinished  whether the request is waiting or active in this engine
        ahead       whether a step that samples for it is in flight

        ValueError for a request that cannot have any, and for a token that it cannot sample.
        """
        if not isinstance(request, Request) or not request.job.forcible:
            raise ValueError(f"{request!r} was submitted without forced_tokens=True")
        if request.finish_reason is not None:
            raise ValueError(f"{request!r} has ended: it emits no other token")
        if not unfinished:
            raise ValueError(f"{request!r} is no request of this engine")
        if ahead:
            raise ValueError(f"a step of {request!r} is in flight: step() until it has been read")
        job, params = request.job, request.params
        forced = token_id(token, self._vocabulary, "force")
        if (params.logit_bias or {}).get(forced) == -math.inf:
            raise ValueError(f"token {forced} cannot be forced: its logit_bias is -inf")
        if forced in job.stops.ids and len(job.tokens) < job.min_tokens:
            raise ValueError(
                f"token {forced} cannot be forced: it would end the request after "
                f"{len(job.tokens)} tokens, before min_tokens={job.min_tokens}"
            )
        job.forced = forced

    def _check_prompt_rows(self, out: object, tokens: int, params: SamplingParams) -> None:
        """ValueError for memory that a prompt's log-probabilities cannot be written to."""
        if out is None:
            return
        if not self._config.prompt_logprobs_out:
            raise ValueError(
                "prompt_logprobs_out is for an engine that is opened with prompt_logprobs_out=True"
            )
        if params.prompt_logprobs is None:
            raise ValueError("prompt_logprobs_out is for requests with prompt_logprobs, such as 0")
        check_prompt_rows(out, tokens, self._vocabulary, self._device)

    def _given_routes(self, params: SamplingParams) -> Ids | None:
        """The ids of the experts that a request replays; None if it replays none. ValueError if
        they do not fit the model or the engine.
        """
        record, routed = params.routing_record, self._routed
        if record is None:
            return None
        if routed is None:
            raise ValueError("routing is for a model with experts: this one has none")
        record.check(routed.layers, routed.experts, routed.chosen)
        if self._recorded is None:
            raise ValueError("routing is for an engine that is opened with record_routing=True")
        return record.ids[: self._max_seq_len]

    def _new_routes(self) -> RecordedRoutes | None:
        """The record of the experts of a request's tokens; None if the engine records none."""
        recorded = self._recorded
        if recorded is None:
            return None
        return RecordedRoutes(self._block_size, recorded.layers, recorded.chosen)

    def draft(
        self,
        request: Request,
        token_ids: Sequence[int],
        needs: DraftNeeds,
        *,
        unfinished: bool,
    ) -> None:
        """Give a request drafts of its next tokens; they replace earlier ones.

        unfinished  whether the request is waiting or active in this engine

        ValueError if there are too many, if the request cannot have any, and for anything that is
        not token ids.
        """
        if not needs.host_drafts:
            raise ValueError(
                f"speculative={self._config.speculative!r}: only UserProvided takes drafts"
            )
        if isinstance(request, Request) and request.finish_reason is not None:
            raise ValueError(f"{request!r} has ended: nothing verifies its drafts")
        if not unfinished:
            raise ValueError(f"{request!r} is no request of this engine")
        length = needs.length
        ids = token_ids_of(
            token_ids,
            self._vocab_size,
            "drafts are token ids",
            limit=length,
            too_many=lambda count: f"{count} drafts for a request, k={length}",
        )
        request.job.drafts = CallerDrafts(ids, len(request.job.tokens))

    def _stream(self, params: SamplingParams, prompt_ids: Sequence[int]) -> TextStream | None:
        tokenizer = self.tokenizer
        if tokenizer is None or self.inner is not None:
            # Frames have no text.
            return None
        hidden = self._eos_ids if params.remove_eos else ()
        silent = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        # Text that follows a grammar keeps its leading space, whatever text precedes it.
        continues = params.structured_outputs is not None or tokenizer.continues(
            prompt_ids, silent.union(hidden)
        )
        return TextStream(
            tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            hidden=hidden,
            continues=continues,
            min_tokens=params.min_tokens,
        )


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {shown(params)}")


def _check_queueing(priority: int, deadline_s: float | None) -> None:
    if not is_int(priority):
        raise ValueError(f"priority={shown(priority)} must be an integer; the lowest goes first")
    if deadline_s is None:
        return
    if not is_number(deadline_s) or not (deadline_s > 0 and is_finite(deadline_s)):
        raise ValueError(
            f"deadline_s={shown(deadline_s)} must be positive, finite seconds from now on, or None"
        )


def embeds_spec(
    config: EngineConfig, memory: MemoryPlan, model: ModelConfig, cut: PrefillCut
) -> EmbedsSpec | None:
    """Shape and dtype of embeddings in prompts; None for an engine that takes none."""
    if not config.prompt_embeds:
        return None
    return EmbedsSpec(
        model.hidden_size,
        memory.dtype,
        grids=takes_grids(config, model),
        images=cut if takes_images(config, model) else None,
        levels=model.deepstack,
    )
