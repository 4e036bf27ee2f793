"""Replies of small engines of one model, each held against transformers in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoints.small_decoders import composed
from engines.small_engine import run
from graphengine import Engine, NGram, Result, SamplingParams
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.composition import windows_of
from launches.rounding_bounds import assert_best, in_float64, room_of

MAX_SEQ_LEN = 400
BLOCK = 8

Wanted = Callable[[Result], torch.Tensor]
"""transformers' logits for each token of a reply, float64 [n, V]."""


@dataclass
class Seen:
    """What has happened in all engines of a case, so that none of it passes for nothing."""

    replies: int = 0
    tokens: set[int] = field(default_factory=set)
    chunks: int = 0
    pauses: int = 0
    accepted: int = 0
    proposed: int = 0

    def assert_varied(self) -> None:
        """Prompts were cut and paused, drafts refused, and tokens are not all alike."""
        assert len(self.tokens) >= 16, f"{self.replies} replies of {len(self.tokens)} ids"
        assert self.accepted < self.proposed, f"{self.accepted} of {self.proposed} drafts"
        assert self.pauses and self.chunks

    def __str__(self) -> str:
        return (
            f"{self.replies} replies of {len(self.tokens)} ids, {self.chunks} chunks, "
            f"{self.pauses} pauses, {self.accepted} of {self.proposed} drafts"
        )


@dataclass
class Family:
    """A model of transformers, the folder it was saved in, and what its engines are opened with.

    logits   transformers' logits, float64 [T, V], of a sequence of ids; ids of -1 are places of
             the prompt's embeddings
    allowed  ids below this one alone are said: those above stand for pictures; None: all are
    """

    model: Any
    path: Path
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    logits: Callable[[Sequence[int]], torch.Tensor] | None = None
    allowed: int | None = None
    seen: Seen = field(default_factory=Seen)

    def greedy(self, tokens: int) -> SamplingParams:
        ids = None if self.allowed is None else range(self.allowed)
        return SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, allowed_token_ids=ids
        )

    def open(self, **options: Any) -> Engine:
        """An engine of four slots; with the other seed no step is launched ahead."""
        usual = {
            "device": "cpu", "dtype": "float32", "max_batch": 4, "block_size": BLOCK,
            "max_seq_len": MAX_SEQ_LEN, "prefill_buckets": (320,),
            "lookahead": (1, 0)[self.seed % 2],
        }  # fmt: skip
        return Engine.from_pretrained(self.path, **usual | self.options | options)

    @property
    def rows(self) -> dict[str, Any]:
        """Options for a seed's row family: "fma" takes two rows at most."""
        return ({"row_family": "dot"}, {"row_family": "fma", "max_batch": 2})[self.seed % 2]

    def check(self, results: Sequence[Result]) -> None:
        """Each token of these replies is transformers' best."""
        for result in results:
            ids = [*result.prompt_token_ids, *result.token_ids]
            first = len(result.prompt_token_ids) - 1
            logits = self._logits(ids)[first:-1, : self.allowed]
            what = f"{self.path.name}: after {first + 1} tokens"
            assert_best(result.token_ids, logits, room_of(self.model, logits), what)
            self.seen.replies += 1
            self.seen.tokens |= {*result.token_ids}

    @torch.no_grad()
    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        if self.logits is not None:
            return self.logits(ids)
        found: torch.Tensor = in_float64(self.model)(torch.tensor([ids])).logits[0]
        return found


def prompts_of(vocab_size: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random prompts; those of 90 tokens say the same 30 three times, which n-grams find again."""
    dice = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        size = 30 if length == 90 else length
        piece = torch.randint(vocab_size, (size,), generator=dice).tolist()
        made.append(piece * (length // size))
    return made


def _submitted(
    family: Family,
    engine: Engine,
    prompts: Sequence[Any],
    tokens: int,
    asked: Mapping[int, str] | None = None,
) -> list[Result]:
    """All replies; the requests run side by side, each with the adapter that `asked` names."""
    requests = [
        engine.submit(prompt, family.greedy(tokens), adapter=(asked or {}).get(index))
        for index, prompt in enumerate(prompts)
    ]
    run_all(engine)
    return [request.result() for request in requests]


def run_all(engine: Engine) -> None:
    while engine.busy:
        run(engine)


def assert_whole_and_in_chunks(
    family: Family, prompts: Sequence[Any], tokens: int, longest: int
) -> None:
    """Prompts in one chunk each, and cut into chunks of at most 32 tokens."""
    for buckets in ((320,), (8, 32)):
        with family.open(prefill_buckets=buckets, **family.rows) as engine:
            family.check(_submitted(family, engine, prompts, tokens))
            chunks = sum(
                count
                for name, count in engine.counters.items()
                if name.startswith("replays/prefill/")
            )
        least = len(prompts) if len(buckets) == 1 else len(prompts) + -(-longest // 32) - 1
        assert chunks >= least, f"{chunks} chunks of {longest} tokens and less"
        family.seen.chunks += chunks


def small_pool(family: Family, lengths: Sequence[int], tokens: int) -> dict[str, Any]:
    """Options for room for all of these prompts, and not for all of their replies."""
    blocks = sum(-(-length // BLOCK) for length in lengths) + 5
    blocks = max(blocks, -(-(max(lengths) + tokens) // BLOCK) + 1)
    longest = min(MAX_SEQ_LEN, BLOCK * (blocks - 1))
    pool = {"kv_blocks": blocks, "swap_blocks": 2 * blocks, "max_seq_len": longest}
    if all(windows_of(composed(read_model(Checkpoint.open(family.path))))):
        # If all layers had rings, no request would take a block.
        pool["window_rings"] = False
    return pool


def assert_paused(
    family: Family, prompts: Sequence[Any], lengths: Sequence[int], tokens: int
) -> None:
    """Requests pause where there is no room for their replies, and go on as they were.

    prompts  the longest one first, so that the others come while it still has room
    """
    pool = small_pool(family, lengths, tokens)
    with family.open(**pool, prefill_buckets=(8, 64)) as engine:
        family.check(_submitted(family, engine, prompts, tokens))
        pauses, resumes = engine.counters["pauses"], engine.counters["resumes"]
    assert pauses >= 1 and resumes >= 1, f"{pauses} pauses of {lengths} in {pool}"
    family.seen.pauses += pauses


def assert_drafted(family: Family, prompts: Sequence[Any], tokens: int) -> None:
    """With n-gram drafts, and prompts in chunks."""
    with family.open(speculative=NGram(k=3), prefill_buckets=(16, 64)) as engine:
        family.check(_submitted(family, engine, prompts, tokens))
        accepted, proposed = engine.acceptance.accepted, engine.acceptance.proposed
    family.seen.accepted += accepted
    family.seen.proposed += proposed


def assert_packed(family: Family, prompts: Sequence[Any], tokens: int) -> None:
    """Chunks of several prompts in one prefill."""
    with family.open(prefill_buckets=(16, 64), prompts_per_prefill=4) as engine:
        family.check(_submitted(family, engine, prompts, tokens))
        packed = engine.counters["packed_chunks"]
    assert packed >= 1, f"{packed} of the chunks of {[len(prompt) for prompt in prompts]}"


def assert_session(
    family: Family, parts: Sequence[Any], kept: int, tokens: int, **options: Any
) -> None:
    """Turns, a rewind into a reply, a fork, and a rewind to the first `kept` tokens."""
    first, second, third = parts
    with family.open(prefill_buckets=(16, 64), **options) as engine, engine.session() as session:
        session.append(first)
        turns = [session.generate(family.greedy(tokens))]
        session.append(second)
        turns.append(session.generate(family.greedy(24)))
        assert turns[-1].cached_tokens > 0
        session.rewind(9)
        session.append(third)
        with session.fork() as fork:
            fork.append(third)
            turns.append(fork.generate(family.greedy(12)))
        turns.append(session.generate(family.greedy(tokens)))
        assert turns[-1].cached_tokens > 0
        session.rewind(len(session) - kept)
        session.append(second)
        turns.append(session.generate(family.greedy(tokens)))
        run_all(engine)
    family.check(turns)
