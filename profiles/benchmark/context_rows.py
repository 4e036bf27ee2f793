"""Rows that begin at a context: turns of sessions that keep its KV.

The KV is either prefilled, by a prompt of random tokens for each row, or random: normal values,
drawn on the device with the standard deviation that the keys, and the values, of the same layer
have after a real prompt. Recurrent states, which have the same size at any context, are those after
this prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from graphengine import Engine, Request, Result, SamplingParams
from graphengine.core.snapshots import SessionSnapshot
from graphengine.profiles.benchmark.measure import Work, random_prompt, sampling
from graphengine.sessions import Session, session_of

SCALE_TOKENS = 256
"""Tokens of the prompt whose KV sets the scale of random values."""
DRAWN_BLOCKS = 1024
"""Blocks of a layer that are drawn at a time, as their values take memory outside the budget."""


class ContextRows:
    """Rows that begin after the prompts of `work`, from the same KV in every run.

    kept_tokens  tokens of each prompt whose KV its session keeps
    """

    def __init__(self, engine: Engine, work: Work, *, prefilled: bool) -> None:
        self._engine = engine
        size = engine.memory.block_size
        # A drafter's entries may depend on later tokens. A plain engine keeps as many blocks, so
        # that turns of both prefill the same tokens.
        blocks = (work.prompt_tokens - max(1, engine.core.needs.tokens_after)) // size
        self.kept_tokens = blocks * size
        self._turns: list[Session] = []
        self._sessions: list[Session] = []
        example = None if prefilled or not blocks else _example(engine, work)
        try:
            for row, prompt in enumerate(work.prompts(engine.model.config.vocab_size)):
                session = (
                    _random_session(engine, prompt, blocks, example, seed=row)
                    if example is not None
                    else _prefilled_session(engine, prompt)
                )
                self._sessions.append(session)
        except BaseException:
            self.close()
            raise

    def submit(self, params: Sequence[SamplingParams]) -> list[Request]:
        """Begin the turns of the first `len(params)` rows; earlier turns must be over."""
        self._end_turns()
        for session, _ in zip(self._sessions, params, strict=False):
            self._turns.append(session.fork())
        return [turn.submit(each) for turn, each in zip(self._turns, params, strict=True)]

    def run(self, params: Sequence[SamplingParams]) -> list[Result]:
        """Run turns to their end, as a `measure.Run`.

        RuntimeError if a turn did not find the KV that its session keeps.
        """
        requests = self.submit(params)
        while not all(request.finished for request in requests):
            self._engine.step()
        self._end_turns()
        found = [request.cached_tokens for request in requests]
        if found != [self.kept_tokens] * len(requests):
            raise RuntimeError(f"of {self.kept_tokens} kept tokens the rows found {found}")
        return [request.result() for request in requests]

    def _end_turns(self) -> None:
        while self._turns:
            self._turns.pop().close()

    def close(self) -> None:
        """Give the blocks back to the pool."""
        self._end_turns()
        while self._sessions:
            self._sessions.pop().close()


@contextmanager
def standing_rows(engine: Engine, work: Work, *, prefilled: bool) -> Iterator[ContextRows]:
    """The rows of `work`, closed at the end."""
    rows = ContextRows(engine, work, prefilled=prefilled)
    try:
        yield rows
    finally:
        rows.close()


def _prefilled_session(engine: Engine, prompt: list[int]) -> Session:
    session = engine.session()
    session.append(prompt)
    session.generate(sampling("fast", 1, seed=0))
    session.rewind(1)
    return session


def _random_session(
    engine: Engine, prompt: list[int], blocks: int, example: SessionSnapshot, *, seed: int
) -> Session:
    scales, states = _scales_of(example), example.states

    def fill(taken: list[int]) -> None:
        fill_blocks(engine, taken, scales, seed=seed)

    position = blocks * engine.memory.block_size if states else 0
    return session_of(engine.core, prompt, blocks, fill, position=position, states=states)


def _example(engine: Engine, work: Work) -> SessionSnapshot:
    """A snapshot of a session after a real prompt."""
    tokens = min(SCALE_TOKENS, work.prompt_tokens)
    with engine.session() as session:
        session.append(random_prompt(engine.model.config.vocab_size, tokens, seed=0))
        session.generate(sampling("fast", 1, seed=0))
        return session.snapshot()


def _scales_of(example: SessionSnapshot) -> list[Tensor]:
    return [cache.float().transpose(1, 2).flatten(2).std(-1) for cache in example.caches]


def kv_scales(engine: Engine, work: Work) -> list[Tensor]:
    """Standard deviations after a real prompt, float32 `[layers, parts]` for each cache.

    A cache has two parts: keys and values.
    """
    return _scales_of(_example(engine, work))


@torch.no_grad()
def fill_blocks(
    engine: Engine, blocks: Sequence[int], scales: Sequence[Tensor], *, seed: int
) -> None:
    """Draw the KV of these blocks in every cache, after everything that was queued.

    The values depend on the seed and on a block's place in the list, not on its number.
    """
    with engine.runtime.on_stream():
        for number, ((cache, _), scale) in enumerate(
            zip(engine.runtime.caches, scales, strict=True)
        ):
            generator = torch.Generator(cache.device)
            # The target's cache gets the same values, whether there is a drafter's or not.
            generator.manual_seed((number << 32) + seed)
            for layer, deviation_P in zip(cache, scale.to(cache.device), strict=True):
                deviation = deviation_P.view(1, -1, *[1] * (layer.dim() - 2))
                largest = torch.finfo(layer.dtype).max
                for start in range(0, len(blocks), DRAWN_BLOCKS):
                    part = blocks[start : start + DRAWN_BLOCKS]
                    drawn = torch.empty((len(part), *layer.shape[1:]), device=cache.device)
                    drawn.normal_(generator=generator).mul_(deviation)
                    # In some versions of torch a cast makes larger values infinite, or NaN in e4m3.
                    drawn.clamp_(-largest, largest)
                    layer[torch.tensor(part, device=cache.device)] = drawn.to(layer.dtype)
