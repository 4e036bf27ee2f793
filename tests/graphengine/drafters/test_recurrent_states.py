"""Drafts over recurrent states: a model with such layers as a target, and as a draft model.

What a refused draft left in a state would show in tokens only now and then, so the states
themselves are compared with those of a request that never had a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import toy_family
from engines.small_engine import assert_idle, greedy, run, sampled
from engines.speculation import SCRIPTS, script, step_with, write_draft_model
from extent import extent
from graphengine import Engine, Request, SamplingParams
from graphengine.models.families import registry
from graphengine.models.states import recurrent_field
from graphengine.speculative import Auto, DraftModel, GateOptions, NGram, UserProvided

STATE = recurrent_field(*toy_family.RECURRENT)
VOCAB = toy_family.CONFIG["vocab_size"]
# The last one repeats itself, so that n-grams are found.
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], list(range(40)), [1, 2, 3, 4, 5] * 5]
TOKENS = 25
LENGTHS = extent((1, 2, 5), (1, 2, 3, 4, 5))
"""Kinds of drafts, each with its own number of states that a slot keeps."""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, toy_family.ARCHITECTURE, toy_family.read_config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two toys, and a dense model with the same tokens."""
    folder = tmp_path_factory.mktemp("models")
    toy_family.write_checkpoint(folder / "toy")
    toy_family.write_checkpoint(folder / "other", seed=1)
    write_draft_model(folder / "dense", "llama", VOCAB, None)
    return folder


def open_model(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 3, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16)}
    return Engine.from_pretrained(path, device="cpu", row_family="dot", **(sizes | options))


def jobs() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled, with stop ids that may come within drafts."""
    stops = {"stop_token_ids": [11, 23, 37, 50]}
    params = [
        greedy(TOKENS, ignore_eos=True),
        sampled(TOKENS, seed=1),
        sampled(TOKENS, seed=2, **stops),
        greedy(TOKENS, **stops),
    ]
    return list(zip(PROMPTS, params, strict=True))


def tokens_of(engine: Engine) -> list[tuple[tuple[int, ...], str | None]]:
    requests = [engine.submit(*job) for job in jobs()]
    run(engine)
    assert_idle(engine)
    return [(tuple(request.token_ids), request.finish_reason) for request in requests]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str], list[Any]]:
    """What a model of the folder says without drafts."""
    known: dict[str, list[Any]] = {}

    def of(name: str) -> list[Any]:
        if name not in known:
            with open_model(folder / name) as engine:
                known[name] = tokens_of(engine)
        return known[name]

    return of


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize(
    "mode",
    [
        lambda folder, k: NGram(k=k, max_n=3),
        lambda folder, k: DraftModel(folder / "dense", k=k),
        lambda folder, k: DraftModel(folder / "other", k=k),
    ],
    ids=["ngram", "dense", "recurrent"],
)
def test_drafts_change_no_token(folder: Path, plain: Any, mode: Any, k: int) -> None:
    with open_model(folder / "toy", speculative=mode(folder, k), lookahead=k % 2) as engine:
        assert engine.runtime.buffers[STATE].shape[1] == 1 + k
        assert tokens_of(engine) == plain("toy")
        drafted = engine.acceptance
        assert 0 < drafted.accepted < drafted.proposed


@pytest.mark.parametrize("k", [2, 5])
def test_paused_requests_go_on_with_their_states(folder: Path, k: int) -> None:
    params = [greedy(60, ignore_eos=True), *(sampled(60, seed=seed) for seed in (1, 2))]
    prompts = [PROMPTS[0], PROMPTS[1], [60, 59, 2, 2, 2]]
    with open_model(folder / "toy") as engine:
        known = [result.token_ids for result in engine.generate(prompts, params)]
    pool = {"kv_blocks": 12, "swap_blocks": 30, "speculative": DraftModel(folder / "other", k=k)}
    with open_model(folder / "toy", **pool) as engine:
        found = [result.token_ids for result in engine.generate(prompts, params)]
        assert engine.counters["pauses"] == engine.counters["resumes"] > 0
    assert found == known


@pytest.mark.parametrize("options", [{"lookahead": 0}, {"buckets": (3,)}, {"max_batch": 2}])
def test_a_gate_that_comes_and_goes_changes_no_token(
    folder: Path, plain: Any, options: dict[str, Any]
) -> None:
    """Steps with drafts, and steps without, whose states lie in the same entries."""
    gate = GateOptions(window=3, off_below=0.9, on_above=1.5, probe_every=4)
    mode = DraftModel(folder / "other", k=3)
    with open_model(folder / "toy", speculative=mode, gate=gate, **options) as engine:
        assert tokens_of(engine) == plain("toy")
        assert min(engine.counters["gate/steps/0"], engine.counters["gate/steps/3"]) > 0


def test_lengths_that_follow_the_rows_change_no_token(folder: Path, plain: Any) -> None:
    with open_model(folder / "toy", speculative=Auto()) as engine:
        assert tokens_of(engine) == plain("toy")


@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_model_that_drafts_for_itself_is_always_right(folder: Path, plain: Any, k: int) -> None:
    """After prompts of one token too, whose state the draft model has from its decode kernels."""
    with open_model(folder / "toy", speculative=DraftModel(folder / "toy", k=k)) as engine:
        assert tokens_of(engine) == plain("toy")
        assert engine.acceptance.rate == 1.0


@pytest.mark.parametrize("k", [1, 3])
def test_it_drafts_for_a_dense_model(folder: Path, plain: Any, k: int) -> None:
    with open_model(folder / "dense", speculative=DraftModel(folder / "toy", k=k)) as engine:
        assert tokens_of(engine) == plain("dense")


def chain(tensors: dict[str, Tensor], sequence: list[int], count: int) -> list[int]:
    """The most probable tokens after a sequence, in float64."""
    drafts: list[int] = []
    for _ in range(count):
        logits = toy_family.reference_logits(tensors, sequence + drafts)[-1]
        drafts.append(int(logits.argmax()))
    return drafts


@pytest.mark.parametrize("target", ["toy", "dense"])
def test_drafts_are_those_of_the_formula(folder: Path, target: str) -> None:
    """A draft model with a state is checked after each step, however many were accepted."""
    tensors = load_file(folder / "other" / "model.safetensors")
    mode = DraftModel(folder / "other", k=3)
    with open_model(folder / target, speculative=mode, lookahead=0) as engine:
        requests = [engine.submit(prompt, greedy(14, ignore_eos=True)) for prompt in PROMPTS[:3]]
        steps = 0
        while engine.busy:
            engine.step()
            for request in requests:
                if request.token_ids and not request.finished:
                    slot = request.job.placed.slot
                    found = engine.runtime.buffers["draft_tokens"][slot].tolist()
                    sequence = [*request.prompt_token_ids, *request.token_ids]
                    assert found == chain(tensors, sequence, 3)
                    steps += 1
        assert steps > 20


# The states.


def follow_states(
    folder: Path, prompt: list[int], name: str, k: int
) -> tuple[list[Tensor], list[Tensor]]:
    """After each step of a request with such drafts its state; and that after as many tokens which
    were fed one by one.
    """

    def state_of(engine: Engine, request: Request) -> tuple[int, Tensor]:
        slot = request.job.placed.slot
        length = int(engine.runtime.buffers["kv_len"][slot])
        states = engine.runtime.buffers[STATE][slot]
        return length, states[(length - 1) % len(states)].clone()

    params = greedy(TOKENS, ignore_eos=True)
    with open_model(folder / "toy", lookahead=0) as engine:
        request = engine.submit(prompt, params)
        alone = {}
        while engine.busy:
            engine.step()
            if request.token_ids and not request.finished:
                length, state = state_of(engine, request)
                alone[length] = state
        known = tuple(request.token_ids)
    found, wanted = [], []
    with open_model(folder / "toy", speculative=UserProvided(k=k)) as engine:
        request = engine.submit(prompt, params)
        drafts = script(name, [known], k, VOCAB).of([request])
        while engine.busy:
            step_with(engine, drafts)
            if request.token_ids and not request.finished:
                length, state = state_of(engine, request)
                found.append(state)
                wanted.append(alone[length])
        assert tuple(request.token_ids) == known
    return found, wanted


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_states_are_those_of_tokens_fed_one_by_one(folder: Path, name: str, k: int) -> None:
    for prompt in PROMPTS[:2]:
        found, wanted = follow_states(folder, prompt, name, k)
        assert len(found) >= 4
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


def one_too_early(state: Tensor, slot: Tensor, position: Tensor) -> Tensor:
    return READ(state, slot, position - 1)


def the_newest_written(state: Tensor, slot: Tensor, position: Tensor) -> Tensor:
    """Pretend that what was fed last had been accepted."""
    entries = state.shape[1]
    last = torch.where(position > 9, position + entries - 1, position)
    return torch.where(
        (position < 0)[:, None], 0.0, state[slot.long().clamp(min=0), last % entries]
    )


READ = toy_family._read


@pytest.mark.parametrize("fault", [one_too_early, the_newest_written])
def test_faults_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Tensor]
) -> None:
    """The index off by one, and the state of a refused draft, are seen in states and in tokens."""
    known = follow_states(folder, PROMPTS[1], "partly", 3)
    assert all(map(torch.equal, *known))
    monkeypatch.setattr(toy_family, "_read", fault)
    with pytest.raises(AssertionError):
        found, wanted = follow_states(folder, PROMPTS[1], "partly", 3)
        assert all(map(torch.equal, found, wanted))
