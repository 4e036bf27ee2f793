"""Engines whose stages are processes, each with some layers: against one process with all of them.

What stages compute is what one process computes, so tokens and log-probabilities are equal to the
bit.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from events import GENEROUS_S, until
from transformers import LlamaConfig

from checkpoints import toy_family
from checkpoints.few_layers import few_layers
from engines.churn import Owners, come_and_go, write_tokenizer
from engines.failing_ranks import limit_waits, stop
from engines.family_checks import assert_rewinds
from engines.logit_options import HAS_GRAMMARS
from engines.small_engine import assert_idle, run
from graphengine import (
    Engine,
    EngineConfig,
    Result,
    SamplingParams,
    StructuredOutputsParams,
)
from graphengine.host.state_checkpoints import BlockCopy
from graphengine.models.families.registry import read_model_config
from graphengine.models.launches import Share
from graphengine.models.splitting.stages import of_stage, stage_spans
from graphengine.models.states import recurrent_states
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.loading import plan_checkpoint, read_checkpoint, stage_contents
from graphengine.parallel.collectives.rendezvous import GroupError
from graphengine.parallel.pipelining import PipelineRuntime, plan_stages
from graphengine.parallel.ranks import RankFailed, rank_devices
from graphengine.parallel.stage_link import StageLink
from graphengine.speculative import (
    MTP,
    DFlash,
    DraftModel,
    Eagle3,
    SaveHiddenStates,
    Speculative,
    UserProvided,
)

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPT_LENGTHS = (1, 3, 17, 70)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)


def greedy(max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, stages: int, **options: Any) -> Engine:
    sizes = {"max_batch": 4, "max_seq_len": 160, "block_size": 8, "prefill_buckets": (8, 32)}
    options = (
        {"device": "cpu", "wait_limit_s": GENEROUS_S, "prompt_logprobs": True} | sizes | options
    )
    return Engine.from_pretrained(path, pipeline_parallel=stages, **options)


def runtime_of(engine: Engine) -> PipelineRuntime:
    assert isinstance(engine.runtime, PipelineRuntime)
    return engine.runtime


def assert_equal_stages(engine: Engine) -> None:
    """What a step feeds is the same on all stages, to the bit."""
    found = runtime_of(engine).digests()
    assert len(found) == engine.config.pipeline_parallel and len(set(found)) == 1


def said(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.logprobs, result.prompt_logprobs


def replies(engine: Engine, prompts: list[list[int]]) -> list[tuple[Any, ...]]:
    """What greedy and sampled requests get, with records of log-probabilities."""
    usual = SamplingParams(max_tokens=24, ignore_eos=True, seed=3, top_p=0.9, prompt_logprobs=2)
    params = [GREEDY, usual, GREEDY, usual]
    return [said(result) for result in engine.generate(prompts, params)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("checkpoints", "llama-tied-yarn"),
        ("expert_checkpoints", "moe-some-layers"),
        # No norm lies between its stages.
        ("dense_checkpoints", "olmo2"),
        # Only the first has positions.
        ("dense_checkpoints", "gpt2"),
    ],
)
def test_two_stages_say_what_one_process_says(
    request: pytest.FixtureRequest, kind: str, name: str
) -> None:
    """Three layers are on two stages. A driver that is busy for longer than it waits itself is
    waited for: when a request has ended, what was queued after it is still to be done.
    """
    oracle = request.getfixturevalue(kind)[name]
    prompts = oracle.prompts(PROMPT_LENGTHS)
    with open_engine(oracle.path, 1) as alone:
        expected = replies(alone, prompts)
    limit_s = 0.2 if kind == "checkpoints" else GENEROUS_S
    with open_engine(oracle.path, 2, wait_limit_s=limit_s) as engine:
        limit_waits(engine, GENEROUS_S)
        assert replies(engine, prompts) == expected
        if kind == "checkpoints":
            time.sleep(0.3)
            assert replies(engine, prompts) == expected
        assert_equal_stages(engine)


def test_each_stage_holds_its_part(checkpoints: dict[str, Any]) -> None:
    """Weights and KV of all stages are those of the model; only what is tied is there twice."""
    for name, stages in (("llama-tied-yarn", 2), ("llama-biases", 2), ("llama-tied-yarn", 3)):
        config = EngineConfig(device="cpu", max_batch=2, max_seq_len=64, pipeline_parallel=stages)
        alone = replace(config, pipeline_parallel=1)
        path = checkpoints[name].path
        whole = read_checkpoint(path, alone)
        weights = whole.model.allocate(device="meta", dtype=torch.float32)
        found = read_checkpoint(path, config, Share(0, stages))
        held = [
            stage_contents(found, Share(rank, stages)).model.allocate(
                device="meta", dtype=torch.float32
            )
            for rank in range(stages)
        ]
        names = [name for part in held for name in part.named()]
        assert set(names) == set(weights.named())
        doubled = {name for name in names if names.count(name) > 1}
        between = {f"model.layers.{each}.input_layernorm.weight" for each in range(1, 3)}
        tied = {"model.embed_tokens.weight"} if whole.model.tie_embeddings else set()
        assert tied <= doubled <= tied | between
        extra = sum(weights.named()[name].nbytes for name in doubled)
        # Where there is no embedding there is a row.
        rows = sum(part.embedding.nbytes for part in held if len(part.embedding) == 1)
        assert sum(part.nbytes for part in held) == weights.nbytes + extra + rows
        plans, plan = plan_stages(found, config), plan_checkpoint(whole, alone)
        assert sum(each.block_bytes for each in plans) == plan.block_bytes
        assert {each.kv_blocks for each in plans} == {plan.kv_blocks}
        assert [lines(each)["weights"] for each in plans] == [part.nbytes for part in held]
        kept = [value for each in plans for key, value in lines(each).items() if "KV" in key]
        assert sum(kept) == next(value for key, value in lines(plan).items() if "KV" in key)


@pytest.mark.parametrize("places", [0, 4])
def test_stages_without_states_know_of_those_of_others(
    hybrids: dict[str, Any], places: int
) -> None:
    """Else KV would be kept for a request whose states are not."""
    sizes: dict[str, Any] = {"max_batch": 2, "max_seq_len": 64, "session_states": places}
    config = EngineConfig(device="cpu", pipeline_parallel=2, **sizes)
    found = read_checkpoint(hybrids["qwen-half-tied"].path, config, Share(0, 2))
    recur = [
        bool(recurrent_states(stage_contents(found, Share(rank, 2)).model.states))
        for rank in range(2)
    ]
    assert sorted(recur) == [False, True]
    for plan in plan_stages(found, config):
        assert plan.recurrent and plan.state_places == places


def lines(memory: MemoryPlan) -> dict[str, int]:
    return {line.name: line.bytes for line in memory.budget.lines}


def test_layers_are_balanced_by_their_bytes() -> None:
    """The heaviest stage is as light as it can be, the embedding and lm_head among the weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 64}
    sizes |= {"num_hidden_layers": 9, "num_key_value_heads": 2, "tie_word_embeddings": False}

    def spans(vocab_size: int, stages: int) -> list[tuple[int, int]]:
        config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=64, **sizes)
        model = read_model_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
        return [(span.first, span.stop) for span in stage_spans(model, stages)]

    assert spans(16, 3) == [(0, 3), (3, 6), (6, 9)]
    assert spans(16, 2) == [(0, 5), (5, 9)]
    # An embedding as heavy as three layers, and a head like it.
    assert spans(3456, 3) == [(0, 2), (2, 7), (7, 9)]
    assert spans(16, 9) == [(layer, layer + 1) for layer in range(9)]


@pytest.fixture(scope="module")
def folder(checkpoints: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, for grammars."""
    path = tmp_path_factory.mktemp("stages")
    for file in checkpoints["llama-tied-yarn"].path.iterdir():
        (path / file.name).symlink_to(file)
    write_tokenizer(path, 257, eos=3)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """An engine of three stages, whose pool is too small for its slots."""
    with open_engine(folder, 3, max_seq_len=128, kv_blocks=17, swap_blocks=400) as engine:
        yield engine


def test_three_stages_say_what_one_process_says(
    engine: Engine, folder: Path, checkpoints: dict[str, Any]
) -> None:
    prompts = checkpoints["llama-tied-yarn"].prompts((1, 3, 17, 60))
    with open_engine(folder, 1, max_seq_len=128) as alone:
        expected = replies(alone, prompts)
    assert replies(engine, prompts) == expected
    assert_equal_stages(engine)
    # Of these fields, and no fewer.
    fields, flow = engine.runtime.buffers.fields, engine.runtime.program.flow
    common = {field.name for field in fields if flow.is_common(field)}
    assert common == {"next_token", "kv_len", "running", "epoch"}


def test_a_stage_is_at_the_next_chunk_while_another_is_at_the_one_before(engine: Engine) -> None:
    """The first stage has fed two chunks before the second one has fed any, or the last begins."""
    ranks, queue = runtime_of(engine).ranks, runtime_of(engine).queue
    second = ranks.pids[1]
    prompt = [*range(10, 90)]
    expected = engine.generate(prompt, GREEDY)
    run(engine)
    assert_equal_stages(engine)
    request = engine.submit(prompt, GREEDY)
    core = engine.core
    before, begun = [ranks.done(rank) for rank in (1, 2)], queue.done
    assert begun == queue.queued
    stop(ranks, 2)
    try:
        for _ in range(2):
            plan = core.plan()
            assert plan is not None and plan.prefill is not None and not plan.prefill.final
            core.load(plan)
            core.replay(plan)
        # Copies of what was loaded, and two replays, are a command each.
        commands = queue.queued - begun
        until(lambda: ranks.done(1) - before[0] >= commands, f"the first stage to do {commands=}")
        assert ranks.done(2) == before[1] and queue.done == begun
    finally:
        os.kill(second, signal.SIGCONT)
    run(engine)
    assert tuple(request.token_ids) == expected.token_ids
    assert request.logprobs == list(expected.logprobs or ())
    assert_equal_stages(engine)


def test_ranks_with_a_full_ring_are_not_waited_for_in_vain(engine: Engine) -> None:
    """They wait for what the driver has put off: it does that before it waits for room."""
    expected = engine.generate([5, 6, 7], GREEDY).token_ids
    request = engine.submit([5, 6, 7], GREEDY)
    engine.step()
    plan = engine.core.plan()
    assert plan is not None and plan.rows
    engine.core.load(plan)
    engine.core.replay(plan)
    runtime_of(engine).copy_states([BlockCopy(0, 0) for _ in range(20)])
    run(engine)
    assert tuple(request.token_ids) == expected


def test_requests_that_come_and_go_have_their_own_tokens(engine: Engine, folder: Path) -> None:
    """With pauses and cancels; each has what it gets alone in one process."""
    dice = random.Random(5)
    owners = Owners(engine, dice)
    come_and_go(owners, engine, dice, tokens=200, rested=lambda: assert_equal_stages(engine))
    owners.leave()
    run(engine)
    assert_idle(engine)
    engine.stop_callback = None
    with open_engine(folder, 1, max_seq_len=128) as alone:
        owners.check(alone)
    assert_equal_stages(engine)


def test_sessions_go_on(
    engine: Engine, folder: Path, checkpoints: dict[str, Any], tmp_path: Path
) -> None:
    """A snapshot is that of one process, to the bit, and goes on in both."""
    oracle = checkpoints["llama-tied-yarn"]
    assert_rewinds(engine, oracle)
    prompt, more = oracle.prompts((37, 5))
    with engine.session() as session:
        session.append(prompt)
        session.generate(greedy(12))
        kept = session.snapshot(tmp_path / "session")
        session.append(more)
        expected = session.generate(greedy(12))
    with engine.restore_session(tmp_path / "session") as restored:
        restored.append(more)
        result = restored.generate(greedy(12))
        assert result.token_ids == expected.token_ids
        assert result.cached_tokens == expected.cached_tokens >= 48
    with open_engine(folder, 1, max_seq_len=128) as alone, alone.session() as session:
        session.append(prompt)
        session.generate(greedy(12))
        whole = session.snapshot()
        assert all(map(torch.equal, whole.caches, kept.caches))
        assert whole.origin.model == kept.origin.model
        with alone.restore_session(kept) as restored:
            restored.append(more)
            assert restored.generate(greedy(12)).token_ids == expected.token_ids
    with engine.restore_session(whole) as restored:
        restored.append(more)
        assert restored.generate(greedy(12)).token_ids == expected.token_ids
    assert_equal_stages(engine)


def test_a_hybrid_says_what_it_says_in_one_process(hybrids: dict[str, Any]) -> None:
    """States are kept by the stages whose layers recur, and drafts by n-grams change no token."""
    oracle = hybrids["qwen-half-tied"]
    options: dict[str, Any] = {"prefix_caching": True, "speculative": "ngram:3"}
    prompt = oracle.prompts((37,))[0] * 2
    found = []
    for stages in (1, 2):
        with open_engine(oracle.path, stages, **options) as engine:
            tokens = assert_rewinds(engine, oracle)
            first, again = (engine.generate(prompt, GREEDY) for _ in range(2))
            assert first.token_ids == again.token_ids and again.cached_tokens > 0
            assert engine.counters["states/kept"] > 2 and engine.acceptance.accepted > 0
            with engine.session() as session:
                session.append(prompt)
                session.generate(greedy(8))
                kept = session.snapshot()
            with engine.restore_session(kept) as restored:
                restored.append(prompt[:5])
                tokens += restored.generate(greedy(8)).token_ids
            found.append((tokens, said(first), said(again), kept))
            if stages > 1:
                assert_equal_stages(engine)
    assert found[0][:3] == found[1][:3]
    pairs = zip(*(kept.states + kept.caches for *_, kept in found), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


PROMPTS = ["def fib(n):", "class Tree:\n", "import os\n"]
ASKED = StructuredOutputsParams(regex="[a-z ]{40,60}")
GUIDED = SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=ASKED)


@pytest.mark.parametrize("name", ["module", "model"])
def test_drafts_are_those_of_one_process(name: str) -> None:
    """They are made where the last layer is. Masks of a grammar follow them while another row's
    next step is queued.
    """
    modes: dict[str, Speculative] = {
        "module": MTP(k=2, min_confidence=0.02),
        "model": DraftModel(few_layers(), k=2),
    }
    found = []
    for stages in (1, 2):
        with open_engine(few_layers(), stages, speculative=modes[name]) as engine:
            params = [greedy(), *([GUIDED] * HAS_GRAMMARS), *[greedy()] * 2]
            results = engine.generate(PROMPTS, params[: len(PROMPTS)])
            assert (engine.counters["guided/sat_out"] > 0) == HAS_GRAMMARS
            found.append(([said(result) for result in results], engine.acceptance.accepted))
            if stages > 1:
                assert_equal_stages(engine)
    assert found[0] == found[1] and found[0][1] > 0


def test_drafts_of_the_caller(spawned_ranks: None) -> None:
    """They come with loads, to all stages, which are started as users start them."""
    with open_engine(few_layers(), 1) as alone:
        expected = [each.token_ids for each in alone.generate(PROMPTS, greedy())]
    with open_engine(few_layers(), 2, speculative=UserProvided(k=2)) as engine:
        requests = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
        while engine.busy:
            engine.step()
            for request, tokens in zip(requests, expected, strict=True):
                done = len(request.token_ids)
                if done and not request.finished:
                    engine.draft(request, tokens[done : done + 2])
        assert [tuple(request.token_ids) for request in requests] == expected
        assert engine.acceptance.accepted > 0
        assert_an_interrupt_breaks(engine)


def assert_an_interrupt_breaks(engine: Engine) -> None:
    """In what the driver had put off; how far that had come is unknown."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    runtime_of(engine).queue.add(interrupt)
    request = engine.submit(PROMPTS[0], greedy())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(RuntimeError, match=r"call \d+ of \d+ has failed before: KeyboardInterrupt"):
        engine.step()
    with pytest.raises(RuntimeError, match="the engine is broken, close it"):
        engine.step()
    assert not request.finished


def test_a_stage_that_is_killed_is_the_next_calls_error(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"rank 2 \(process \d+, cpu\) was ended by signal 9 \(SIGKILL\)"
    monkeypatch.setattr("graphengine.parallel.ranks._GRACE_S", GENEROUS_S)
    with open_engine(few_layers(), 3, wait_limit_s=GENEROUS_S) as engine:
        pids = runtime_of(engine).ranks.pids
        assert len(engine.generate("def fib(n):", greedy(4)).token_ids) == 4
        engine.submit("def fib(n):", greedy(20))
        engine.step()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankFailed, match=message):
            while engine.busy:
                engine.step()
        with pytest.raises(RuntimeError, match="the engine is broken, close it: RankFailed: rank"):
            engine.step()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


REFUSED = [
    ({"data_parallel": 4}, "pipeline_parallel=2 and data_parallel=4: all ranks of a pipeline have"),
    ({"kv_dtype": "fp8"}, "kv_dtype='fp8' is for an engine of one stage, not for"),
    ({"max_prefill_ms_per_step": 5.0}, "max_prefill_ms_per_step=5.0 is for an engine of one stage"),
    ({"prompt_embeds": True}, "prompt_embeds=True is for an engine of one stage, not for pipel"),
    ({"record_routing": True}, "record_routing=True is for an engine of one stage, not for pipel"),
    ({"speculative": MTP(tree=[[0], [1]])}, "tree=.* is for an engine of one stage, not for"),
    (
        {"speculative": Eagle3("here", k=2)},
        "reads the stream after layers of several stages: it is",
    ),
    ({"speculative": DFlash("here", k=2)}, "DFlash.* reads the stream after layers of several"),
    ({"speculative": SaveHiddenStates("here")}, "Save.* reads the stream after layers of several"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_stages_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(device="cpu", pipeline_parallel=2, **options)


@pytest.mark.parametrize(
    ("kind", "name", "stages", "message"),
    [
        (
            "checkpoints",
            "llama-tied-yarn",
            4,
            "pipeline_parallel=4 is more than the 3 layers of",
        ),
        (
            "hybrids",
            "granite",
            2,
            "pipeline_parallel=2: each stage has a layer with attention, of",
        ),
    ],
)
def test_models_with_too_few_layers(
    request: pytest.FixtureRequest, kind: str, name: str, stages: int, message: str
) -> None:
    oracle = request.getfixturevalue(kind)[name]
    with pytest.raises(ValueError, match=message):
        open_engine(oracle.path, stages)


def test_stages_take_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 4), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    config = EngineConfig(device="cuda:1", pipeline_parallel=3)
    assert rank_devices(config) == ["cuda:1", "cuda:2", "cuda:3"]
    message = "tensor_parallel=2 and pipeline_parallel=3 is for ranks on a CPU, not for device='cu"
    with pytest.raises(ValueError, match=message):
        replace(config, tensor_parallel=2)
    message = "pipeline_parallel=4 from device cuda:2 on takes 4 devices: torch finds 4, of which 2"
    with pytest.raises(ValueError, match=message):
        rank_devices(replace(config, device="cuda:2", pipeline_parallel=4))
    shared: Any = SimpleNamespace(torch_group=None, share=Share(0, 3))
    with pytest.raises(GroupError, match="3 stages need a GPU each: they share one"):
        StageLink(shared, in_flight=1)


def test_an_engine_of_parts_has_one_stage() -> None:
    nothing: Any = None
    config = EngineConfig(device="cpu", pipeline_parallel=2)
    message = "pipeline_parallel=2: from_pretrained starts the other ranks"
    with pytest.raises(ValueError, match=message):
        Engine(nothing, nothing, config, drafter=nothing)


def test_a_family_that_has_no_stages() -> None:
    message = "each stage has a layer with attention, of which this ToyForCausalLM has 1"
    with pytest.raises(ValueError, match=f"pipeline_parallel=2: {message}"):
        of_stage(toy_family.read_config(toy_family.CONFIG, "ToyForCausalLM"), Share(0, 2))


def test_torchrun_starts_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="pipeline_parallel=2 starts processes of its own, and"):
        open_engine(few_layers(), 2)


def test_reports_say_so(engine: Engine) -> None:
    assert engine.core.description["pipeline_parallel"] == 3
    assert "device cpu, the last of 3 stages, float32" in str(engine.report())


def test_a_recording_tells_of_all_stages(engine: Engine) -> None:
    """Which do not wait for the driver's, the last one."""
    recorder = engine.recorder
    recorder.start()
    engine.generate([[5, 9, 3], list(range(8, 50))], greedy(4))
    recorder.stop()
    records = recorder.replays()
    assert len(records) > 3 and set(records["last_rank"].tolist()) <= {1, 2}
    header = recorder.header()["ranks"]
    assert (header["count"], header["option"]) == (3, "pipeline_parallel=3")
    assert header["waited_s"] is None, "no rank has a part of another's layers"
    recorder.clear()
