"""What every drafter that reads the target's streams must do, whatever its layers are.

Each test of one follows an engine with a plain drafter, and compares after every step.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from checkpoints import hybrids
from checkpoints.mtp_chains import SIZES, VOCAB
from engines.small_engine import greedy, open_engine, run, sampled
from engines.speculation import ENDLESS, Job, open_plain, open_speculating, outcomes
from graphengine import Engine, Request
from graphengine.speculative import GateOptions, Speculative

LAYERS = 8
SMALL: dict[str, Any] = {
    "max_batch": 3, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16),
    "dtype": "float32",
}  # fmt: skip
IN_STEP: dict[str, Any] = SMALL | {"device": "cpu", "lookahead": 0}
"""After each step of such an engine its buffers hold what the step has left."""


class Follower(Protocol):
    """A plain drafter that goes along with a request of an engine."""

    def check(self, count: int, *, drafted: bool) -> None:
        """The drafts, where there are some, and the cache after a step of this many tokens."""


FollowerT = TypeVar("FollowerT", bound=Follower, covariant=True)


class Pair(Protocol[FollowerT]):
    """A target with a drafter beside it, and the paths of both."""

    @property
    def path(self) -> Path: ...
    @property
    def drafter_path(self) -> Path: ...
    def mode(self) -> Speculative: ...
    def follower(self, engine: Engine, request: Request) -> FollowerT: ...
    def _replace(self, *, drafter_path: Path) -> Self: ...


def llama(*unlikely: int) -> Any:
    """Its next token follows mostly from the last one; embeddings of `unlikely` ids are zero."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": LAYERS})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.05)
        model.model.embed_tokens.weight.mul_(6)
        for token in unlikely:
            model.model.embed_tokens.weight[token] = 0
            model.lm_head.weight[token] = 0
    return model


def gemma3() -> Any:
    sizes = SIZES | {"sliding_window": 5, "sliding_window_pattern": 2, "pad_token_id": 0}
    torch.manual_seed(2)
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).eval()


def hybrid(kind: str) -> Any:
    torch.manual_seed(2)
    return hybrids.MODELS[kind]().eval()


def prompts_of(length: int, *others: int, below: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randint(1, below, (count,), generator=generator).tolist()
        for count in (length, *others)
    ]


def without_drafts(engine: Engine) -> int:
    """Steps that verified none, and made none."""
    names = [f"replays/decode/{rows}/fast" for rows in range(1, 1 + SMALL["max_batch"])]
    return sum(engine.counters[name] for name in names)


def follow(
    pair: Pair[FollowerT],
    engine: Engine,
    requests: list[Request],
    after_check: Callable[[int, FollowerT], object] = lambda index, follower: None,
) -> list[FollowerT]:
    """Step the requests to their end, with a check after every step of each.

    after_check  called with a request's index after its checks
    """
    followers = [pair.follower(engine, request) for request in requests]
    lengths = [0] * len(requests)
    while engine.busy:
        before = without_drafts(engine)
        engine.step()
        drafted = without_drafts(engine) == before
        for index, follower in enumerate(followers):
            request, count = requests[index], len(requests[index].token_ids) - lengths[index]
            lengths[index] += count
            if count and not request.finished and request in engine.scheduler.active:
                follower.check(count, drafted=drafted)
                after_check(index, follower)
    return followers


def check_pauses(pair: Pair[Any], prompts: list[list[int]], *, tokens: int, blocks: int) -> None:
    """Rows that gave their KV away, the drafter's too, go on with the drafts they had."""
    options = IN_STEP | {"kv_blocks": blocks, "swap_blocks": 40}
    with open_speculating(pair.mode(), pair.path, **options) as engine:
        requests = [engine.submit(prompt, greedy(tokens, **ENDLESS)) for prompt in prompts]
        follow(pair, engine, requests)
        assert engine.counters["pauses"] > 0 and engine.counters["resumes"] > 0


def check_gate(pair: Pair[Any], prompts: list[list[int]], *, tokens: int, enough: float) -> None:
    """While nothing is drafted, the drafter takes in what was emitted; later drafts are right."""
    gate = GateOptions(window=6, off_below=enough, on_above=enough, probe_every=5)
    with open_speculating(pair.mode(), pair.path, **IN_STEP, gate=gate) as engine:
        requests = [engine.submit(prompt, greedy(tokens, **ENDLESS)) for prompt in prompts]
        follow(pair, engine, requests)
        assert without_drafts(engine) > 4 and engine.counters["gate/probes"] > 1


def check_turns(
    pair: Pair[Any],
    other: Pair[Any],
    prompts: list[list[int]],
    folder: Path,
    *,
    kv_dtype: str,
    tokens: int,
    cached: int,
) -> None:
    """Blocks of earlier turns are used again, the drafter's among them, in another process too.
    The tokens are those without drafts.

    other   a drafter of other layers, which refuses the first one's snapshot
    cached  tokens that the turn after a rewind has at least
    """
    (first, second, third), options = prompts, IN_STEP | {"kv_dtype": kv_dtype}

    def turn(session: Any, engine: Engine, appended: list[int]) -> Request:
        session.append(appended)
        request: Request = session.submit(greedy(tokens, **ENDLESS))
        if kv_dtype == "auto" and engine.config.speculative is not None:
            follow(pair, engine, [request])
        else:
            run(engine)
        return request

    with open_plain(pair.path, **options) as engine, engine.session() as session:
        plain = [turn(session, engine, each).token_ids for each in (first, second)]
        session.rewind(13)
        plain.append(turn(session, engine, third).token_ids)
    with (
        open_speculating(pair.mode(), pair.path, **options) as engine,
        engine.session() as session,
    ):
        turns = [turn(session, engine, each) for each in (first, second)]
        assert turns[1].cached_tokens > 24
        session.rewind(13)
        session.snapshot(folder / "session")
        expected = turn(session, engine, third)
        assert expected.cached_tokens >= cached
        assert [each.token_ids for each in (*turns, expected)] == plain
        assert 0 < engine.acceptance.accepted < engine.acceptance.proposed
    moved = pair._replace(drafter_path=shutil.copytree(pair.drafter_path, folder / "moved"))
    with open_speculating(moved.mode(), pair.path, **options) as engine:
        session = engine.restore_session(folder / "session")
        with session:
            again = turn(session, engine, third)
            assert again.token_ids == expected.token_ids
            assert again.cached_tokens == expected.cached_tokens
    with (
        open_speculating(other.mode(), pair.path, **options) as engine,
        pytest.raises(ValueError, match=r"(caches|drafter|dtype)=.*, the engine of "),
    ):
        engine.restore_session(folder / "session")


def check_tokens(pair: Pair[Any], jobs: Sequence[Job], device: str, *, least: float) -> None:
    """Greedy ones and sampled ones, of more requests than slots, that end inside drafts.

    least  of all drafts, the share that is accepted at least
    """
    options = SMALL | {"device": device}
    with open_plain(pair.path, **options) as engine:
        expected = outcomes(engine, jobs)
    with open_speculating(pair.mode(), pair.path, **options) as engine:
        assert outcomes(engine, jobs) == expected
        rate = engine.acceptance.accepted / engine.acceptance.proposed
        assert least < rate < 1, f"{rate=}"


def check_one_row(pair: Pair[Any], one_draft: Speculative, prompts: list[list[int]]) -> None:
    """One row with a draft is of the family `fma`."""
    options, tokens = SMALL | {"max_batch": 1, "device": "cpu", "row_family": "fma"}, []
    for mode in (None, one_draft):
        with open_engine(pair.path, **options, speculative=mode) as engine:
            results = engine.generate(prompts, [greedy(20), sampled(20, seed=3)])
            tokens.append([result.token_ids for result in results])
    assert tokens[0] == tokens[1] and engine.acceptance.accepted > 0


def check_graphs(pair: Pair[Any], jobs: Sequence[Job], *, pdl: bool) -> None:
    """On a GPU, decode graphs hold kernels alone, and their tokens are those without drafts."""
    options = SMALL | {"device": "cuda", "dtype": "bfloat16", "pdl": pdl}
    with open_plain(pair.path, **options) as engine:
        expected = outcomes(engine, jobs)
    with open_speculating(pair.mode(), pair.path, **options) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.acceptance.accepted > 0
        for key, graph in engine.runtime.graphs.items():
            if key.kind != "prefill":
                assert graph.report.node_kinds is not None
                assert graph.report.node_kinds["kernel"] == graph.report.nodes, key
