"""The door: prompts and parameters are checked, and requests are made of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from graphengine.config import EngineConfig
from graphengine.memory import MemoryPlan
from graphengine.processing import make_processing, single_stop_ids
from graphengine.prompts import Prompt, prompt_ids, token_id
from graphengine.request import Event, Request
from graphengine.sampling_params import SamplingParams
from graphengine.text import TextStream, Tokenizer


class Intake:
    """Makes requests for an engine of `config` and `memory`, numbered from 1.

    vocabulary    ids that can be sampled, the first of the `vocab_size` of the model
    eos_ids       tokens that end every request, unless it ignores them
    prompts_only  a request has one new token
    cancelled     where requests put themselves that their owners end

    `tokenizer` may be taken away: requests made from then on have no text.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: MemoryPlan,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        vocabulary: int,
        eos_ids: tuple[int, ...],
        prompts_only: bool,
        cancelled: list[Request],
    ) -> None:
        self.tokenizer = tokenizer
        self.usual_params = SamplingParams(max_tokens=1) if prompts_only else SamplingParams()
        self.made = 0
        self._config = config
        self._max_seq_len = memory.max_seq_len
        self._vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._prompts_only = prompts_only
        self._cancelled = cancelled
        self._seeds = random.Random(config.seed)

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's tokens; ValueError for what cannot be served."""
        return prompt_ids(
            prompt,
            tokenizer=self.tokenizer,
            vocab_size=self._vocab_size,
            max_seq_len=self._max_seq_len,
        )

    def request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        callback: Callable[[Event], None] | None = None,
    ) -> Request:
        """A request, not queued yet; ValueError for parameters that cannot be served."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {params!r}")
        eos = () if params.ignore_eos else self._eos_ids
        stops = (*params.stop_token_ids, *single_stop_ids(params))
        given = (token_id(token, self._vocab_size) for token in stops)
        stop_ids = tuple(dict.fromkeys((*eos, *given)))
        limit = self._config.max_stop_ids
        if len(stop_ids) > limit:
            raise ValueError(
                f"{len(stop_ids)} end-of-sequence and stop token ids exceed max_stop_ids={limit}"
            )
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; the checkpoint has no tokenizer.json")
        if self._prompts_only and params.max_tokens not in (None, 1):
            raise ValueError(
                f"max_tokens={params.max_tokens}: with {self._config.speculative} a prompt has one "
                f"new token, max_tokens=1"
            )
        processing = make_processing(
            params,
            prompt_len=len(ids),
            vocabulary=self._vocabulary,
            tokenizer=self.tokenizer,
            config=self._config,
        )
        room = 1 if self._prompts_only else self._max_seq_len - len(ids)
        self.made += 1
        return Request(
            request_id=self.made,
            prompt_token_ids=ids,
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            stop_ids=stop_ids,
            max_len=len(ids) + min(room, params.max_tokens or room),
            submitted=time.perf_counter(),
            cancelled=self._cancelled,
            stream=TextStream(self.tokenizer, params.stop_strings) if self.tokenizer else None,
            callback=callback,
            processing=processing,
        )
