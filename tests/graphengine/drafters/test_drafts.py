"""The drafts themselves, every one of a step: those of a plain forward, and right where they must.

An engine's tokens are the same with any drafts, so nothing but this file and the counts of
acceptance would see wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.mtp_modules import SIZES, Module
from checkpoints.successors import (
    HEAD,
    HEAD_LAYERS,
    PERIOD,
    Half,
    continuation,
    write_successors,
)
from checkpoints.vanilla_modules import (
    MODULES,
    agreeing_tensors,
    layout,
    target_model,
    write_agreeing,
)
from engines.small_engine import greedy
from engines.speculation import ENDLESS, open_speculating, run_with
from graphengine import Engine, Request, SamplingParams
from graphengine.drafters.draft_model import DraftModelDrafter
from graphengine.drafters.modules import chain as eagle
from graphengine.drafters.modules.chain import EagleDrafter
from graphengine.drafters.mtp.vanilla import VanillaDrafter
from graphengine.drafters.ngram import NGramDrafter
from graphengine.speculative import MTP, DraftModel, Eagle3, NGram, Speculative, UserProvided

K = 3
SMALL: dict[str, Any] = {
    "max_batch": 3, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16),
}  # fmt: skip


@pytest.fixture(scope="module")
def successors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("successors")
    halves: tuple[Half, ...] = ("hidden", "token")
    return {half: write_successors(folder / half, half) for half in halves}


# Drafters that cannot be wrong.

SURE: dict[str, tuple[Callable[[Path], Speculative], tuple[str, ...]]] = {
    "eagle": (lambda path: MTP(K), ("hidden", "token")),
    "vanilla": (lambda path: MTP(K, style="vanilla"), ("hidden", "token")),
    "eagle3": (lambda path: Eagle3(path / HEAD, K, layers=HEAD_LAYERS), ("hidden", "token")),
    "model": (lambda path: DraftModel(path, K), ("token",)),
    "ngram": (lambda path: NGram(K), ("hidden",)),
    "user": (lambda path: UserProvided(K), ("hidden",)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "half"), [(name, half) for name, (_, halves) in SURE.items() for half in halves]
)
def test_all_drafts_of_who_cannot_be_wrong_are_accepted(
    device: str, successors: dict[str, Path], name: str, half: str
) -> None:
    """At each of the K positions, after prompts of one chunk and of several.

    Greedily; and sampled with the target's noise, where the drafter has the target's odds. The
    prompts go round their period, so that n-grams have seen what comes.
    """
    make, path = SURE[name][0], successors[half]
    temperature = 1.0 if half == "token" else 0.0
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=22, **ENDLESS)
    prompts = [
        [first, *continuation(first, length - 1)]
        for first, length in ((3, PERIOD + 1), (21, 2 * PERIOD), (40, 5 * PERIOD + 3), (63, 12))
    ]
    options: dict[str, Any] = SMALL | {"device": device, "dtype": "float32"}
    with open_speculating(make(path), path, **options) as engine:
        requests = [engine.submit(prompt, params) for prompt in prompts]

        def known(request: Request) -> list[int]:
            return continuation(request.token_ids[-1], K)

        run_with(engine, known if name == "user" else None)
        assert engine.acceptance.rates == [1.0] * K, f"{engine.acceptance}"
        for request in requests:
            # The first token is the prompt's; then 4 a step.
            assert request.acceptance.steps == 6, f"{request.acceptance}"
            greedily = continuation(request.prompt_token_ids[-1], 22)
            assert (request.token_ids == greedily) == (temperature == 0.0)


# The eagle module, against its formulae.


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agreeing(tmp_path_factory.mktemp("agreeing"))


def check_drafts(module: Module, u: torch.Tensor, last: int, drafts: list[int]) -> None:
    """Chain the module from its output `u` at position `last`: each draft must be its best token,
    or as good as that. Its cache gets the chain's rows.
    """
    for index, draft in enumerate(drafts):
        logits = module.logits(u)
        near = 1e-4 * float(logits.abs().max())
        assert float(logits[draft]) >= float(logits.max()) - near, f"draft {index} of {drafts}"
        if index + 1 < len(drafts):
            u = module.run(draft, u, last + 1 + index)


def check_cache(engine: Engine, request: Request, module: Module, length: int) -> None:
    """Keys and values of `length` positions, the chain's among them."""
    kv, table = (
        engine.runtime.caches[1][0][0],
        engine.runtime.buffers["block_table"][request.job.placed.slot],
    )
    position = torch.arange(length)
    entries = kv[table[position // 8].long(), :, position % 8]
    expected = torch.stack([torch.stack(module.cache[p]) for p in range(length)])
    error = (entries - expected).abs().amax(dim=(1, 2, 3)) / expected.abs().max()
    assert error.max() <= 1e-4, f"{error=}"


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 21])
def test_eagle_drafts_are_those_of_a_plain_forward(agreeing: Path, length: int) -> None:
    """After every step, whatever was accepted, beside a row that goes its own way."""
    target, tensors = target_model(), agreeing_tensors(MODULES)
    module = Module(layout(MODULES), tensors, layout(MODULES).prefixes[0])
    generator = torch.Generator().manual_seed(length)
    prompt, other = torch.randint(SIZES["vocab_size"], (2, length), generator=generator).tolist()
    counts = set()
    with open_speculating(MTP(K), agreeing, **SMALL, device="cpu", lookahead=0) as engine:
        request = engine.submit(prompt, greedy(24, **ENDLESS))
        engine.submit(other, greedy(24, **ENDLESS))
        committed = 0
        while not request.finished:
            before = len(request.token_ids)
            engine.step()
            count = len(request.token_ids) - before
            if request.finished or not count:
                continue
            sequence = [*prompt, *request.token_ids]
            end = len(sequence) - 1
            hidden = target.model(torch.tensor([sequence[:-1]])).last_hidden_state[0]
            for position in range(committed, end):
                u = module.run(sequence[position + 1], hidden[position], position)
            committed = end
            drafts = engine.runtime.buffers["draft_tokens"][request.job.placed.slot].tolist()
            check_drafts(module, u, end - 1, drafts)
            check_cache(engine, request, module, end + K - 1)
            counts.add(count)
    assert 1 in counts and max(counts) >= K, f"steps that accept none, and many: {counts}"


# The same tests, of drafters of which only the first draft is right.

GARBAGE = 7
WRITERS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "eagle": (EagleDrafter, ("_chain",)),
    "vanilla": (VanillaDrafter, ("prepare", "propose")),
    "eagle3": (EagleDrafter, ("_chain",)),
    "model": (DraftModelDrafter, ("prepare", "propose")),
    "ngram": (NGramDrafter, ("prepare", "propose")),
}


@pytest.mark.parametrize("name", SURE)
def test_garbage_after_the_first_draft_is_found(
    monkeypatch: pytest.MonkeyPatch, successors: dict[str, Path], name: str
) -> None:
    """Which no engine's tokens show."""
    if name == "user":
        told = Engine.draft

        def tell(engine: Engine, request: Request, token_ids: list[int]) -> None:
            told(engine, request, [*token_ids[:1], *[GARBAGE] * (K - 1)])

        monkeypatch.setattr(Engine, "draft", tell)
    else:
        drafter, methods = WRITERS[name]
        for method in methods:
            monkeypatch.setattr(drafter, method, _spoiled(getattr(drafter, method)))
    half = SURE[name][1][0]
    with pytest.raises(AssertionError, match=r"assert \[1\.0, 0\.\d+, 0\.\d+\] == "):
        test_all_drafts_of_who_cannot_be_wrong_are_accepted("cpu", successors, name, half)


def _spoiled(write: Callable[..., None]) -> Callable[..., None]:
    def spoil(drafter: Any, *operands: Any, **options: Any) -> None:
        write(drafter, *operands, **options)
        later = drafter._draft_tokens[:, 1:]
        later[later >= 0] = GARBAGE

    return spoil


@pytest.mark.parametrize("writer", ["advance_module_draft", "commit_draft"])
def test_a_later_draft_that_is_garbage_is_no_plain_forward_s(
    monkeypatch: pytest.MonkeyPatch, agreeing: Path, writer: str
) -> None:
    """Where the chain goes on from the draft that it should have, and only the row is wrong."""
    write = getattr(eagle, writer)

    def spoiled(*operands: Any, index: int, **options: Any) -> Any:
        written = write(*operands, index=index, **options)
        rows, tokens = operands[1], operands[-1]
        if index:
            tokens[rows.slot[rows.slot >= 0].long(), index] = GARBAGE
        return written

    monkeypatch.setattr(eagle, writer, spoiled)
    with pytest.raises(AssertionError, match=r"draft [12] of \["):
        test_eagle_drafts_are_those_of_a_plain_forward(agreeing, 21)
