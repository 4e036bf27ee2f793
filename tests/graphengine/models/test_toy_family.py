"""A family with a paged, a recurrent and a stateless layer, which only the registry's table names:
it opens, decodes, pauses and keeps sessions as every other does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import toy_family
from engines.small_engine import assert_idle, greedy, run, sampled, step_until
from graphengine import Engine, Request, SamplingParams, SessionSnapshot
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_reference
from graphengine.models.families import registry
from graphengine.models.states import recurrent_field
from graphengine.speculative import SaveHiddenStates

STATE = recurrent_field(*toy_family.RECURRENT)
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], list(range(40)), [60, 59, 2, 2, 2]]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line."""
    monkeypatch.setitem(registry.FAMILIES, toy_family.ARCHITECTURE, toy_family.read_config)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_family.write_checkpoint(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="module")
def tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def open_toy(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 3, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (4, 16)}
    return Engine.from_pretrained(path, device="cpu", **sizes | options)


def expected(
    tensors: dict[str, Tensor], prompt: Sequence[int], params: SamplingParams
) -> list[int]:
    """What the formula says after a prompt, in float64."""
    tokens = list(prompt)
    zero = torch.zeros(1, dtype=torch.int32)
    sampling = SamplingTensors.neutral(1)._replace(
        temperature=torch.tensor([params.temperature]), seed=torch.tensor([params.seed or 0])
    )
    for _ in range(params.max_tokens or 0):
        logits = toy_family.reference_logits(tensors, tokens)[-1:].float()
        position = zero + len(tokens) - 1
        tokens.append(int(sample_reference(logits, zero, position, sampling)))
    return tokens[len(prompt) :]


def some_params(tokens: int = 9) -> list[SamplingParams]:
    return [greedy(tokens, ignore_eos=True), *(sampled(tokens, seed=seed) for seed in (1, 2, 3))]


def test_tokens_are_those_of_the_formula(path: Path, tensors: dict[str, Tensor]) -> None:
    """Greedy and sampled; more requests than slots, so that slots are used again."""
    with open_toy(path) as engine:
        params = some_params(20)
        results = engine.generate(PROMPTS, params)
        found = [list(result.token_ids) for result in results]
        assert engine.counters["slot_reuses"] > 0
    assert found == [expected(tensors, *pair) for pair in zip(PROMPTS, params, strict=True)]
    # Tokens that are all alike would hide a wrong state.
    assert all(len(set(tokens)) > 4 for tokens in found)


@pytest.mark.parametrize(
    "options",
    [
        {"lookahead": 0},
        {"lookahead": 1, "buckets": (1, 2, 3)},
        {"lookahead": 1, "buckets": (3,)},
        {"max_batch": 1, "row_family": "dot"},
        {"max_prefill_tokens_per_step": 4, "prefill_buckets": (4,)},
    ],
)
def test_tokens_do_not_depend_on_buckets_neighbours_and_lookahead(
    path: Path, tensors: dict[str, Tensor], options: dict[str, Any]
) -> None:
    with open_toy(path, **options) as engine:
        params = some_params()
        requests = [engine.submit(*pair) for pair in zip(PROMPTS, params, strict=True)]
        # One comes while others decode, and one goes.
        late = engine.submit([1, 2, 3], greedy(40))
        step_until(engine, lambda: len(late.token_ids) > 1)
        late.cancel()
        run(engine)
        assert_idle(engine)
    found = [request.token_ids for request in requests]
    assert found == [expected(tensors, *pair) for pair in zip(PROMPTS, params, strict=True)]


def test_the_state_is_where_the_tokens_left_it_and_nobody_else_touches_it(
    path: Path, tensors: dict[str, Tensor]
) -> None:
    """The first token finds zeros, whatever lies there; slots without a request keep their bits."""
    with open_toy(path, buckets=(3,)) as engine:
        state = engine.runtime.buffers[STATE]
        assert state.shape == (3, 1, toy_family.WIDTH) and state.dtype == torch.float32
        state.fill_(torch.nan)
        params = greedy(6, ignore_eos=True)
        result = engine.generate(PROMPTS[1], params)
        assert list(result.token_ids) == expected(tensors, PROMPTS[1], params)
        assert not state[0].isnan().any() and state[1:].isnan().all()
        kept = state[0].clone()
        # A row that has stopped is padded in what was launched ahead, and so is every other.
        others = [engine.submit(prompt, params) for prompt in PROMPTS[:2]]
        run(engine)
        assert [each.token_ids for each in others] == [
            expected(tensors, prompt, params) for prompt in PROMPTS[:2]
        ]
        # The second ran the same in another slot, and there are three.
        assert torch.equal(state[1], kept) and state[2].isnan().all()


@pytest.mark.parametrize("prefilling", [False, True])
def test_paused_requests_go_on_with_their_states(
    path: Path, tensors: dict[str, Tensor], prefilling: bool
) -> None:
    """A paused request keeps its slot, and its state lies there; so in the midst of a prompt."""
    params = [greedy(30, ignore_eos=True), *(sampled(30, seed=seed) for seed in (1, 2))]
    prompts = [PROMPTS[0], PROMPTS[3], list(range(56))]
    buckets = (4,) if prefilling else (4, 16)
    with open_toy(path, kv_blocks=11, swap_blocks=24, prefill_buckets=buckets) as engine:
        requests = [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
        paused = []
        while engine.busy:
            engine.step()
            now = engine.last_step().paused
            paused += [(each.id, bool(each.token_ids)) for each in requests if each.id in now]
        assert paused[0] == (requests[2].id, not prefilling)
        assert engine.counters["resumes"] == len(paused)
        assert_idle(engine)
    found = [request.token_ids for request in requests]
    assert found == [expected(tensors, *pair) for pair in zip(prompts, params, strict=True)]


# What needs the tokens that it would skip.


def turn(session: Any, appended: list[int], params: SamplingParams) -> tuple[list[int], Any]:
    """The prompt of a turn, and its result."""
    session.append(appended)
    return list(session.token_ids), session.generate(params)


def test_sessions_without_kept_states_prefill_every_turn_as_a_whole(
    path: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    params = greedy(10, ignore_eos=True)
    with open_toy(path, session_states=0) as engine, engine.session() as session:
        for appended in (PROMPTS[1], [5, 5], [6]):
            prompt, result = turn(session, appended, params)
            assert list(result.token_ids) == expected(tensors, prompt, params)
            assert result.cached_tokens == session.cached_tokens == 0
        session.rewind(9)
        fork = session.fork()
        kept = session.snapshot(tmp_path / "session")
        assert kept.blocks == 0 and kept.token_ids == session.token_ids
        prompt, result = turn(fork, [1], params)
        assert list(result.token_ids) == expected(tensors, prompt, params)
        assert engine.counters["sessions/reused_tokens"] == 0
        assert engine.stats()["kv"]["session_blocks"] == 0
        assert_idle(engine)
    with open_toy(path, session_states=0) as engine:
        for source in (kept, tmp_path / "session"):
            with engine.restore_session(source) as session:
                assert session.token_ids == kept.token_ids
                prompt, result = turn(session, [8, 9], params)
                assert list(result.token_ids) == expected(tensors, prompt, params)
                assert result.cached_tokens == 0
        assert_idle(engine)


def test_snapshots_know_the_model(path: Path, tmp_path: Path) -> None:
    other = toy_family.write_checkpoint(tmp_path / "other", seed=1)
    with open_toy(path) as engine, engine.session() as session:
        session.append([1, 2])
        kept: SessionSnapshot = session.snapshot()
    with open_toy(other) as engine, pytest.raises(ValueError, match="is of model="):
        engine.restore_session(kept)


def test_prefix_caching_without_kept_states_is_refused(path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a ToyFor.* has 1 recurrent .*session_states=0 keeps none"
    ):
        open_toy(path, prefix_caching=True, session_states=0)


def test_hidden_states_of_prompts_can_be_saved(
    path: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    saving = SaveHiddenStates(tmp_path / "states", layers=[1])
    with open_toy(path, speculative=saving) as engine:
        request: Request = engine.submit(PROMPTS[2], greedy(1))
        run(engine)
        assert request.token_ids == expected(tensors, PROMPTS[2], greedy(1))
    (file,) = (tmp_path / "states").iterdir()
    saved = load_file(file)
    logits = saved["hidden_states"].double() @ tensors["lm_head.weight"].double().T
    wanted = toy_family.reference_logits(tensors, PROMPTS[2])
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert saved["aux_hidden_states"].shape == saved["hidden_states"].shape


def test_the_budget_has_the_state(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_family, "WIDTH", 5000)
    with open_toy(toy_family.write_checkpoint(path.parent / "wide")) as engine:
        said = {line.name: line.bytes for line in engine.memory.budget.lines}
        buffers, tables = engine.runtime.buffers, engine.model.config.table_bytes(96)
        assert buffers[STATE].nbytes == 3 * 4 * 5000
        assert buffers.nbytes <= said["state and tables"] + said["request options"] - tables
