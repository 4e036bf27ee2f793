"""What prompts give alone, and fed together with others in one prefill: tokens, and bits of KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engines.small_engine import run, sampled
from extent import extent
from graphengine import Engine, Request, SamplingParams
from graphengine.models.states import recurrent_states


def prompt_of(length: int, seed: int = 0, *, vocabulary: int = 4000) -> list[int]:
    """Random ids from 5 up to the end of the vocabulary."""
    drawn = torch.Generator().manual_seed(100 * length + seed)
    return torch.randint(5, vocabulary, (length,), generator=drawn).tolist()


def kv_of(engine: Engine, request: Request) -> list[torch.Tensor]:
    """The bits of the prompt's keys and values, [layers, 2, tokens, ...] of each cache."""
    tokens = request.job.prompt_len
    blocks = request.job.placed.blocks[: -(-tokens // engine.memory.block_size)]
    found = []
    for cache in engine.runtime.read_blocks(blocks):
        rows = cache.transpose(1, 2).flatten(2, 3)[:, :, :tokens]
        found.append(rows.clone())
    return found


def states_of(engine: Engine, request: Request) -> list[torch.Tensor]:
    """The bits of what recurrent layers keep of the prompt's tokens; empty where a step may already
    have decoded after it.
    """
    if engine.core.scheduler.lookahead:
        return []
    slot, end = request.job.placed.slot, request.job.prompt_len
    found = []
    for key, state in recurrent_states(engine.model.config.states).items():
        entries = engine.runtime.program.states.recurrent[key][slot]
        newest = range(max(0, end - state.depth), end)
        found += [entries[position % len(entries)].clone() for position in newest]
    return found


def without_embeds(engine: Engine) -> Engine:
    """An engine whose memory for embeddings is NaN wherever none is copied to."""
    engine.runtime.buffers["prefill_embeds"].fill_(-1)
    return engine


def params_of(
    prompt: Any, *, seed: int | None = None, tokens: int = 6, **options: Any
) -> SamplingParams:
    """What `replies` samples a prompt with; a prompt of tokens may do without a seed."""
    return sampled(tokens, seed=len(prompt) if seed is None else seed, **options)


def replies(
    engine: Engine, prompts: Sequence[Any], options: Sequence[dict[str, Any]] | None = None
) -> list[tuple[tuple[int, ...], Any]]:
    """Tokens of each prompt, and the bits of its KV and of its states once it decodes; and of the
    record of experts, if there is one. All are submitted at once.

    options  of each prompt's `params_of`, and its adapter
    """
    given = zip(prompts, map(dict, options or [{}] * len(prompts)), strict=True)
    requests = [
        engine.submit(prompt, adapter=own.pop("adapter", None), params=params_of(prompt, **own))
        for prompt, own in given
    ]
    bits: dict[int, list[torch.Tensor]] = {}
    while engine.busy:
        engine.step()
        for request in requests:
            if request.token_ids and not request.finished and request.id not in bits:
                bits[request.id] = kv_of(engine, request) + states_of(engine, request)
    for request in requests:
        routing = request.result().routing
        if routing is not None:
            bits[request.id].append(torch.from_numpy(routing))
    return [(request.result().token_ids, bits[request.id]) for request in requests]


def chunks_of(engine: Engine) -> list[list[tuple[int, int, int]]]:
    """(request, start, tokens) of each chunk of each prefill, until nothing is left to do."""
    found = []
    plan = engine.core.plan

    def noted() -> Any:
        made = plan()
        if made is not None and made.prefill is not None:
            found.append([(each.request.id, each.start, each.count) for each in made.chunks])
        return made

    engine.core.plan = noted  # type: ignore[method-assign]
    run(engine)
    first = min(chunk[0] for chunks in found for chunk in chunks)
    return [[(number - first, *rest) for number, *rest in chunks] for chunks in found]


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether two of `replies` have the same tokens and bits."""
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in pairs)


def assert_alike(
    opened: Callable[[], Engine],
    prompts: Sequence[Any],
    *,
    options: Sequence[dict[str, Any]] | None = None,
    packed: int = 1,
    various: int = 2,
    pauses: int = 0,
) -> None:
    """Each prompt gives the same alone as with the others, in the other order or, in a long run, in
    both.

    opened   opens an engine that packs
    options  as of `replies`
    packed   least chunks that are packed in each order
    various  least number of different tokens in all replies
    pauses   least pauses in each order
    """
    options = options or [{}] * len(prompts)
    with opened() as engine:
        alone = [
            replies(engine, [prompt], [own])[0]
            for prompt, own in zip(prompts, options, strict=True)
        ]
        assert not engine.counters["packed_chunks"]
    for order in extent((-1,), (1, -1)):
        with opened() as engine:
            together = replies(engine, prompts[::order], options[::order])[::order]
            assert engine.counters["packed_chunks"] >= packed, engine.counters
            assert engine.counters["pauses"] >= pauses, engine.counters
        for index, (one, other) in enumerate(zip(alone, together, strict=True)):
            assert same(one, other), f"prompt {index} of {len(prompts)}, {order=}"
    found = {token for tokens, _ in alone for token in tokens}
    assert len(found) >= various, found
