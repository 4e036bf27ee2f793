"""Vanilla MTP in an engine: tokens as without it, and drafts as by a plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.mtp_modules import SIZES, Module
from checkpoints.vanilla_modules import (
    MODULES,
    agreeing_tensors,
    layout,
    target_model,
    write_agreeing,
)
from graphengine import Engine, Request, SamplingParams
from graphengine.demo import checkpoint_path, heldout_text
from graphengine.speculative import MTP, Feed

SMALL: dict[str, Any] = {
    "max_batch": 3, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of modules."""
    folder = tmp_path_factory.mktemp("vanilla")
    return {modules: write_agreeing(folder / str(modules), modules) for modules in (2, MODULES)}


FEEDS: tuple[Feed, ...] = ("chained", "target")


def open_engine(path: Path, k: int, feed: Feed = "chained", **options: Any) -> Engine:
    speculative = MTP(k, style="vanilla", feed=feed) if k else None
    return Engine.from_pretrained(
        path, device="cpu", **SMALL | {"speculative": speculative} | options
    )


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    vocab = SIZES["vocab_size"]
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


GREEDY = SamplingParams(max_tokens=40, temperature=0.0)


@pytest.mark.parametrize("modules, k", [(2, 1), (2, 2), (3, 2), (3, 3)])
def test_tokens_are_those_without_it(checkpoints: dict[int, Path], modules: int, k: int) -> None:
    """Prompts shorter than there are modules, and of several chunks; more of them than rows."""
    asked = prompts((1, 2, 3, 5, 17, 33))
    with open_engine(checkpoints[modules], 0, row_family="dot") as engine:
        expected = [result.token_ids for result in engine.generate(asked, GREEDY)]
    with open_engine(checkpoints[modules], k, row_family="dot") as engine:
        assert [result.token_ids for result in engine.generate(asked, GREEDY)] == expected
        # Else nothing but first tokens was shown.
        assert all(count > 0 for count in engine.acceptance.per_position)
        assert len(engine.acceptance.per_position) == k


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_tokens_are_those_without_it(
    checkpoints: dict[int, Path], temperature: float
) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=5, top_k=40)
    asked = prompts((2, 9, 20, 4))
    with open_engine(checkpoints[3], 0, row_family="dot") as engine:
        expected = [result.token_ids for result in engine.generate(asked, params)]
    with open_engine(checkpoints[3], 3, row_family="dot") as engine:
        assert [result.token_ids for result in engine.generate(asked, params)] == expected


@dataclass
class Pools:
    """Section 3 of the specification for one request, by the modules' formulae: the last `size`
    tokens and hidden states go through the modules, the tokens shifted by one in between.

    With `feed` "target" the hidden states are shifted, too; "chained" modules read those of the
    module before.
    """

    modules: list[Module]
    size: int
    feed: Feed
    tokens: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)

    def append(self, tokens: Sequence[int], hidden: Sequence[torch.Tensor]) -> None:
        """What the target has in its cache by now, after what it had."""
        self.tokens = [*self.tokens, *tokens][-self.size :]
        self.hidden = [*self.hidden, *hidden][-self.size :]

    def propose(self, last: int, end: int) -> list[int]:
        """The drafts after token `last`, at position `end`."""
        ids, hidden, drafts = [*self.tokens[1:], last], self.hidden, []
        start = end - len(hidden)
        for module in self.modules:
            rows = enumerate(zip(ids, hidden, strict=True))
            made = [module.run(token, state, start + index) for index, (token, state) in rows]
            drafts.append(int(module.logits(made[-1]).argmax()))
            ids = [*ids[1:], drafts[-1]]
            hidden = made if self.feed == "chained" else [*hidden[1:], made[-1]]
        return drafts


def drafts_of(engine: Engine, request: Request) -> list[int]:
    return engine.runtime.buffers["draft_tokens"][request.job.placed.slot].tolist()


def check_cache(engine: Engine, request: Request, index: int, module: Module, length: int) -> None:
    """Keys and values of a module: drafts alone would hide much."""
    kv, table = (
        engine.runtime.caches[1][0][index],
        engine.runtime.buffers["block_table"][request.job.placed.slot],
    )
    assert sorted(module.cache) == list(range(length))
    position = torch.arange(length)
    entries = kv[table[position // 8].long(), :, position % 8]
    expected = torch.stack([torch.stack(module.cache[p]) for p in range(length)])
    error = (entries - expected).abs().amax(dim=(1, 2, 3)) / expected.abs().max()
    assert error.max() <= 1e-4, f"{index=} {error=}"


@torch.no_grad()
@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("length", [1, 2, 21])
def test_drafts_are_those_of_a_plain_forward(
    checkpoints: dict[int, Path], length: int, feed: Feed
) -> None:
    """After every step, whatever was accepted."""
    path = checkpoints[MODULES]
    target, tensors = target_model(), agreeing_tensors(MODULES)
    modules = [Module(layout(MODULES), tensors, prefix) for prefix in layout(MODULES).prefixes]
    # The pools of the prefill are the whole prompt.
    (prompt,) = prompts((length,))
    pools = Pools(modules, length, feed)
    lengths_seen = set()
    with open_engine(path, MODULES, feed, lookahead=0) as engine:
        request = engine.submit(prompt, SamplingParams(max_tokens=34, temperature=0.0))
        committed = 0
        while not request.finished:
            before = len(request.token_ids)
            engine.step()
            count = len(request.token_ids) - before
            if request.finished or not count:
                continue
            sequence = [*prompt, *request.token_ids]
            hidden = target.model(torch.tensor([sequence[:-1]])).last_hidden_state[0]
            pools.append(sequence[committed:-1], hidden[committed:])
            assert len(sequence) - 1 - committed == (count if committed else length)
            committed = len(sequence) - 1
            drafts = pools.propose(sequence[-1], committed)
            assert drafts_of(engine, request) == drafts, f"{sequence=}"
            for index, module in enumerate(modules):
                check_cache(engine, request, index, module, committed)
            lengths_seen.add(count)
            pools.size = 2 * MODULES
    assert {1, MODULES + 1} <= lengths_seen


@pytest.mark.parametrize("feed", FEEDS)
def test_steps_without_drafts_keep_the_modules_warm(
    checkpoints: dict[int, Path], feed: Feed
) -> None:
    """Graphs of K = 0 between those of K: then the drafts are those of an engine that never had
    one, as nothing in the modules' caches differs.
    """
    (prompt,) = prompts((7,))
    params = SamplingParams(max_tokens=60, temperature=0.0)
    by_length: list[dict[int, list[int]]] = []
    for pauses in (range(0), range(5, 9)):
        seen: dict[int, list[int]] = {}
        with open_engine(checkpoints[MODULES], MODULES, feed, lookahead=0) as engine:
            request = engine.submit(prompt, params)
            steps = 0
            while not request.finished:
                engine.scheduler.width = 1 if steps in pauses else 1 + MODULES
                engine.step()
                steps += 1
                if not request.finished and request.token_ids:
                    drafts = drafts_of(engine, request)
                    assert (drafts == [-1] * MODULES) == (steps - 1 in pauses)
                    if steps - 1 not in pauses:
                        seen[len(request.token_ids)] = drafts
            assert any(
                name.startswith("replays/decode/1/fast") for name in engine.counters
            ) == bool(pauses)
        by_length.append(seen)
    never, paused = by_length
    late = [length for length in never.keys() & paused.keys() if length > 15]
    assert len(late) > 3
    assert all(never[length] == paused[length] for length in late)


def test_the_demo_model_has_one_module() -> None:
    """With one, vanilla is eagle."""
    path = checkpoint_path()
    text = heldout_text()
    params = SamplingParams(max_tokens=40, temperature=0.0)
    asked = [text[start : start + 120] for start in (0, 900, 2000)]
    produced, accepted = [], []
    for mode in (None, MTP(1, style="vanilla"), MTP(1)):
        with open_engine(path, 0, speculative=mode, max_seq_len=128, row_family="dot") as engine:
            produced.append([result.token_ids for result in engine.generate(asked, params)])
            accepted.append(engine.acceptance.per_position)
    assert produced[0] == produced[1] == produced[2]
    assert accepted[1] == accepted[2]
    assert accepted[1][0] > 10


def test_more_drafts_than_modules_are_refused(checkpoints: dict[int, Path]) -> None:
    message = "vanilla MTP with k=3 needs 3 modules, the checkpoint has 2; style='eagle' runs one"
    with pytest.raises(ValueError, match=message):
        open_engine(checkpoints[2], 3)


def test_more_lanes_than_a_kernel_holds_are_refused(checkpoints: dict[int, Path]) -> None:
    message = (
        r"k=3 feeds 66 tokens of 11 rows to the last module, 6 a row, and at most 64 fit: "
        r"max_batch=10 does with k=3, or a larger one with a bucket of at most 10 rows"
    )
    with pytest.raises(ValueError, match=message):
        open_engine(checkpoints[MODULES], 3, max_batch=11)
