"""Ranks with requests of their own, which share experts: against transformers, and themselves."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from events import GENEROUS_S
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from checkpoints.eagle3_heads import Shape, head_config, head_tensors, write_head
from checkpoints.few_layers import few_layers
from checkpoints.mtp_chains import HAS_CHAINS, VOCAB, Chains
from checkpoints.small_decoders import expert_layers
from engines.churn import Owners, write_tokenizer
from engines.failing_ranks import limit_waits, ranks_of, stop
from engines.family_checks import assert_rewinds
from engines.logit_options import HAS_GRAMMARS, consistent, random_options
from engines.small_engine import run, step_until
from extent import extent
from graphengine import Engine, EngineConfig, Request, Result, SamplingParams
from graphengine.host.rank_schedulers import RankSchedulers
from graphengine.kernels.comm.items import UNIT as PUSH_UNIT
from graphengine.kernels.comm.items import PeerItems, Peers
from graphengine.kernels.comm.layout import PeerTensors
from graphengine.kernels.comm.push_residual import push_units
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.splitting.pushes import Pushes
from graphengine.parallel import ranks
from graphengine.parallel.data_parallel.core import DataParallelCore
from graphengine.parallel.data_parallel.runtime import DataParallelRuntime
from graphengine.parallel.ranks import RankFailed, rank_devices
from graphengine.speculative import MTP, Eagle3, NGram, UserProvided
from launches.compilation import graph_kernels

pytestmark = pytest.mark.usefixtures("forked_ranks")

VOCABULARY = 263
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0,
}  # fmt: skip


def qwen3_moe(**sizes: int) -> Qwen3MoeForCausalLM:
    """With a layer without experts."""
    config = Qwen3MoeConfig(
        **SIZES | sizes, hidden_size=72, intermediate_size=60, moe_intermediate_size=40,
        num_experts=6, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[0],
    )  # fmt: skip
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager")


def gpt_oss() -> GptOssForCausalLM:
    config = GptOssConfig(
        **SIZES, hidden_size=72, intermediate_size=40, num_local_experts=6, num_experts_per_tok=3,
        sliding_window=11,
    )  # fmt: skip
    return GptOssForCausalLM._from_config(config, experts_implementation="eager")


def open_engine(path: Path, ranks: int, **options: Any) -> Engine:
    options = {"max_batch": 2, "max_seq_len": 160, "block_size": 8, "wait": "block"} | options
    options = {"prefill_buckets": (8, 32), "wait_limit_s": GENEROUS_S, "device": "cpu"} | options
    return Engine.from_pretrained(path, data_parallel=ranks, **options)


def greedy(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def schedulers(engine: Engine) -> RankSchedulers:
    assert isinstance(engine.scheduler, RankSchedulers)
    return engine.scheduler


def rank_of(engine: Engine, request: Request) -> int:
    """The rank whose slot it holds."""
    (rank,) = (rank for rank, each in enumerate(schedulers(engine).ranks) if request in each.active)
    return rank


def assert_idle(engine: Engine) -> None:
    """Nothing is left of any request on any rank."""
    assert not engine.busy
    for each in schedulers(engine).ranks:
        assert each.pool.free == each.pool.count and each.swap.free == each.swap.count
        assert not any(each.slots) and not each.active and not each.waiting


@pytest.fixture(scope="module")
def oracle(write_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of six experts, with a tokenizer for grammars."""
    path = tmp_path_factory.mktemp("shared")
    found = write_model(qwen3_moe, path, 5)
    write_tokenizer(path, VOCABULARY, eos=7)
    return found


@pytest.fixture(scope="module")
def engine(oracle: Any) -> Iterator[Engine]:
    """An engine of two ranks, whose pools are too small for their slots; it drafts."""
    pool = {"max_seq_len": 128, "kv_blocks": 17, "swap_blocks": 400}
    options = {"prompt_logprobs": True, "record_routing": True, "speculative": NGram(k=2)}
    with open_engine(oracle.path, 2, **options, **pool) as engine:
        yield engine


@pytest.mark.parametrize(
    ("fixture", "name", "ranks"),
    [
        ("", "gpt-oss", 2),
        ("expert_checkpoints", "moe-even", 4),
        ("latent_checkpoints", "latent-corrected", 2),
    ],
)
def test_families_are_those_of_transformers(
    request: pytest.FixtureRequest,
    write_model: Callable[..., Any],
    tmp_path: Path,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    fixture: str,
    name: str,
    ranks: int,
) -> None:
    """Requests of all ranks; logits are those of one beside ranks that have none."""
    found = request.getfixturevalue(fixture)[name] if fixture else write_model(gpt_oss, tmp_path, 7)
    prompts = found.prompts((3, 40))
    with open_engine(found.path, ranks, lookahead=0) as engine:
        whole = Checkpoint.open(found.path)
        held = engine.model.weights.nbytes
        assert held < sum(tensor.nbytes for tensor in whole.tensors.values())
        planned = {line.name: line.bytes for line in engine.memory.budget.lines}
        assert planned["weights"] == held
        others = f"{ranks - 1} other rank{'s' * (ranks > 2)}"
        assert planned[f"link to {others}"] and planned[f"fields of {others}"]
        results = engine.generate(prompts, greedy(20))
        for result in results:
            found.assert_greedy(result)
        seen = eager(engine)
        again = engine.generate(prompts[1], greedy(12, logprobs=0))
        assert again.token_ids == results[1].token_ids[:12]
        found.assert_logits(again, seen)


def test_tokens_are_those_of_transformers_and_of_one_process(engine: Engine, oracle: Any) -> None:
    prompts = oracle.prompts((5, 40, 33, 1, 20))
    params = [greedy(), *[SamplingParams(max_tokens=16, seed=seed) for seed in range(4)]]
    found = engine.generate(prompts, params)
    oracle.assert_greedy(found[0])
    with open_engine(oracle.path, 1) as alone:
        expected = alone.generate(prompts, params)
        assert alone.numerics_id != engine.numerics_id
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def on_rank(
    engine: Engine, rank: int, neighbours: list[list[int]], prompt: list[int], params: Any
) -> Result:
    """What a request gets there, beside others with these prompts."""
    others = [engine.submit(each, greedy(20)) for each in neighbours]
    request = engine.submit(prompt, params)
    step_until(engine, lambda: request.token_ids != [])
    assert rank_of(engine, request) == rank
    step_until(engine, lambda: request.finished)
    for other in others:
        other.cancel()
    run(engine)
    return request.result()


def test_a_requests_bits_follow_from_itself_alone(engine: Engine, oracle: Any) -> None:
    """Beside idle ranks and busy ones, and on each rank, log-probabilities are equal to the bit."""
    prompt, *others = oracle.prompts((35, 3, 40, 7))
    params = SamplingParams(seed=3, max_tokens=16, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    alone = on_rank(engine, 0, [], prompt, params)
    for rank, neighbours in ((1, others[:1]), (0, others[:2]), (1, others)):
        found = on_rank(engine, rank, neighbours, prompt, params)
        assert found.token_ids == alone.token_ids
        assert found.logprobs == alone.logprobs and alone.logprobs
        assert found.prompt_logprobs == alone.prompt_logprobs and alone.prompt_logprobs
        np.testing.assert_array_equal(found.routing, alone.routing)


def test_chunks_take_the_graphs_of_their_own(engine: Engine, oracle: Any) -> None:
    """In a step whose ranks feed different sizes and kinds each has its launch, by all ranks."""
    short, long = oracle.prompts((4, 30))
    before = engine.counters.copy()
    plain = engine.submit(short, greedy(4))
    other = engine.submit(long, greedy(4, top_k=5, logprobs=1))
    engine.step()
    counted = engine.counters - before
    assert counted["replays/prefill/8"] == counted["replays/prefill/32/full"] == 1
    run(engine)
    for request in (plain, other):
        assert (
            request.result().token_ids
            == engine.generate(
                list(request.prompt_token_ids), replace(request.params, logprobs=None)
            ).token_ids
        )


def test_routes_are_replayed_on_any_rank(engine: Engine, oracle: Any) -> None:
    prompt, other = oracle.prompts((9, 12))
    given = np.random.default_rng(2).permuted(
        np.tile(np.arange(6, dtype=np.int16), (40, 1, 1)), axis=2
    )[..., :3]
    results = [
        on_rank(engine, rank, [other] * rank, prompt, greedy(24, routing=given)) for rank in (0, 1)
    ]
    assert results[0].token_ids == results[1].token_ids
    usual = engine.generate(prompt, greedy(24))
    assert usual.token_ids != results[0].token_ids
    assert usual.routing is not None and usual.routing.shape == (32, 1, 3)
    for result in results:
        np.testing.assert_array_equal(result.routing, given[:32])


def random_params(dice: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": dice.randrange(1, 40)}
    if dice.random() < 0.4:
        options |= random_options(dice, VOCABULARY, grammars=HAS_GRAMMARS)
    if dice.random() < 0.5:
        options["temperature"] = 0.0
    else:
        options |= {"top_k": dice.choice([0, 20]), "top_p": dice.choice([1.0, 0.8])}
    return SamplingParams(**consistent(options))


# With 8 all that is counted has happened early.
@pytest.mark.parametrize("seed", extent([8], [*range(3, 13)]))
def test_requests_that_come_and_go_have_their_own_tokens(engine: Engine, seed: int) -> None:
    """With pauses and cancels, and with drafts, on which the masks of grammars depend."""
    dice = random.Random(seed)
    owners, counters = Owners(engine, dice), engine.counters
    before = counters.copy()
    names = ["pauses", "resumes", "finished/cancelled", "slot_reuses"]
    names += ["guided/steps", "guided/sat_out"] * HAS_GRAMMARS

    def prompt_of(length: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(length)]

    # One for each slot: the pools of both ranks are too small for them.
    for _ in range(4):
        owners.submit(prompt_of(60), greedy(30))
    for _ in range(200):
        counted = counters - before
        if counted["tokens"] > 100 and all(counted[name] for name in names):
            break
        for _ in range(dice.randrange(6)):
            owners.submit(prompt_of(dice.randrange(1, 60)), random_params(dice))
        for _ in range(dice.randrange(20)):
            engine.step(timeout=dice.choice([None, 0]))
            owners.disturb()
    assert all((counters - before)[name] for name in names), counters
    owners.leave()
    run(engine)
    assert_idle(engine)
    engine.stop_callback = None
    # One a rank, as two do not fit its pool.
    owners.check(engine, at_once=2)
    assert any(request.params.temperature for request in owners.requests)
    assert engine.acceptance.accepted > 0


def test_sessions_stay_on_their_ranks(engine: Engine, oracle: Any, tmp_path: Path) -> None:
    assert_rewinds(engine, oracle)
    first, second, more = oracle.prompts((37, 30, 5))
    with engine.session() as one, engine.session() as two:
        turns = []
        for session, prompt in ((one, first), (two, second)):
            session.append(prompt)
            turns.append(session.submit(greedy(12)))
        engine.step()
        ranks = [rank_of(engine, turn) for turn in turns]
        assert sorted(ranks) == [0, 1]
        run(engine)
        # Others leave the second's rank with more requests than the first's.
        for session, rank in ((two, ranks[1]), (one, ranks[0])):
            session.append(more)
            turn = session.submit(greedy(12, frequency_penalty=0.5))
            engine.step()
            assert rank_of(engine, turn) == rank and turn.cached_tokens >= 40
            run(engine)
            whole = engine.generate(list(turn.prompt_token_ids), turn.params)
            assert turn.result().token_ids == whole.token_ids
        copy = one.fork()
        copy.append(more)
        turn = copy.submit(greedy(4))
        engine.step()
        assert rank_of(engine, turn) == ranks[0] and turn.cached_tokens >= 40
        run(engine)
        copy.close()
        message = "data_parallel=2: sessions stay on their ranks, without snapshots"
        with pytest.raises(ValueError, match=message):
            one.snapshot()
        with pytest.raises(ValueError, match=message):
            engine.restore_session(tmp_path / "none")


@pytest.mark.skipif(not HAS_CHAINS, reason="this version of transformers runs no module by itself")
def test_modules_with_experts_draft_beside_idle_ranks(tmp_path: Path) -> None:
    path = Chains(tmp_path, "glm4-moe", 2).path
    dice = np.random.default_rng(1)
    prompts = [dice.integers(VOCAB, size=size).tolist() for size in (1, 9, 41)]
    params = [greedy(12), SamplingParams(seed=5, max_tokens=12, ignore_eos=True), greedy(12)]
    with open_engine(path, 1, speculative=MTP(k=2)) as alone:
        expected = [each.token_ids for each in alone.generate(prompts, params)]
        accepted = alone.acceptance.accepted
    with open_engine(path, 2, speculative=MTP(k=2)) as engine:
        single = [engine.generate(*each).token_ids for each in zip(prompts, params, strict=True)]
        assert single == expected
        assert engine.acceptance.accepted == accepted > 0
    with open_engine(path, 2, speculative=MTP(k=2)) as engine:
        engine.recorder.start()
        requests = [engine.submit(*each) for each in zip(prompts, params, strict=True)]
        run(engine)
        assert [tuple(request.token_ids) for request in requests] == expected
        assert engine.acceptance.accepted == accepted
        # A launch of all ranks is one record.
        ids, tokens = engine.recorder.lanes()
        for request in requests:
            assert tokens[ids == request.id].sum() == len(request.token_ids)


def test_packed_experts_beside_drafters_without_any(
    write_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Each rank has all of an EAGLE3 head; drafts of the caller go to the rank of their request."""
    found = write_model(lambda: qwen3_moe(num_hidden_layers=3), tmp_path / "target", 5)
    prompts = found.prompts((5, 33, 12))
    tensors = Checkpoint.open(found.path).mapped()
    rows = (tensors[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    embedding, head = (each.clone() for each in rows)
    config = head_config(Shape(), embedding)
    written = write_head(tmp_path / "head", config, head_tensors(Shape(), embedding, head))
    mode = Eagle3(path=str(written), k=2, layers=(0, 1, 2))
    with open_engine(found.path, 1, quantize="int8", speculative=mode) as alone:
        expected = [each.token_ids for each in alone.generate(prompts, greedy(16))]
        counts, whole = alone.acceptance.as_dict(), alone.model.weights.nbytes
    with open_engine(found.path, 2, quantize="int8", speculative=mode) as engine:
        assert [each.token_ids for each in engine.generate(prompts, greedy(16))] == expected
        assert engine.acceptance.as_dict() == counts and engine.model.weights.nbytes < whole
    with open_engine(found.path, 2, quantize="int8", speculative=UserProvided(k=2)) as engine:
        requests = [engine.submit(prompt, greedy(16)) for prompt in prompts]
        while engine.busy:
            engine.step()
            for request, tokens in zip(requests, expected, strict=True):
                done = len(request.token_ids)
                if done and not request.finished:
                    engine.draft(request, tokens[done : done + 2])
        assert [tuple(request.token_ids) for request in requests] == expected
        assert engine.acceptance.accepted > 20


def test_the_queue_is_one(engine: Engine, oracle: Any) -> None:
    """Requests go to the rank that has the fewest, and wait for no rank in particular."""
    prompts = oracle.prompts((3,) * 7)
    requests = [engine.submit(prompt, greedy(6)) for prompt in prompts[:4]]
    last = engine.submit(prompts[4], greedy(6), priority=1)
    first = engine.submit(prompts[5], greedy(6), priority=-1)
    gone = engine.submit(prompts[6], greedy(6))
    gone.cancel()
    engine.step()
    assert rank_of(engine, first) == 0
    assert [rank_of(engine, request) for request in requests[:3]] == [1, 0, 1]
    assert list(schedulers(engine).waiting) == [requests[3], last]
    assert set(engine.requests) == {each.id for each in (*requests, first, last)}
    assert gone.finish_reason == "cancelled"
    run(engine)
    assert_idle(engine)


def test_weights_of_all_ranks_are_updated(
    engine: Engine, oracle: Any, write_model: Callable[..., Any], tmp_path: Path
) -> None:
    """What sessions have on any rank is forgotten with the older ones."""
    other = write_model(qwen3_moe, tmp_path, 8)
    prompts = oracle.prompts((20, 33))
    before = [each.token_ids for each in engine.generate(prompts, greedy(8))]
    with engine.session() as one, engine.session() as two:
        turns = []
        for session, prompt in zip((one, two), prompts, strict=True):
            session.append(prompt)
            turns.append(session.submit(greedy(4)))
        run(engine)
        assert one.cached_tokens and two.cached_tokens
        engine.update_weights(other.path)
        assert not one.cached_tokens and not two.cached_tokens
    for result in engine.generate(prompts, greedy(8)):
        other.assert_greedy(result)
    engine.update_weights(Checkpoint.open(oracle.path).mapped())
    assert [each.token_ids for each in engine.generate(prompts, greedy(8))] == before


def test_what_it_says_of_itself(engine: Engine) -> None:
    assert isinstance(engine.core, DataParallelCore)
    assert engine.core.description["data_parallel"] == 2
    assert "device cpu, the first of 2 ranks, float32" in str(engine.report())
    kv = engine.stats()["kv"]
    assert (kv["blocks"], kv["session_blocks"]) == (34, None)


def test_results_of_ranks_on_gpus_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write them there; who has no such memory, or no GPU, has them where files are."""
    for name, value in (("is_available", True), ("device_count", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    on_gpus = EngineConfig(device="cuda", data_parallel=2)
    assert rank_devices(replace(on_gpus, device="cuda:0")) == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(ranks, "_MEMORY", Path("/"))
    assert ranks._place(on_gpus) == Path("/")
    for other in (
        EngineConfig(device="cpu", data_parallel=2),
        EngineConfig(device="cuda", tensor_parallel=2),
    ):
        assert ranks._place(other) is None
    monkeypatch.setattr(ranks, "_MEMORY", Path("/none"))
    assert ranks._place(on_gpus) is None


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel is not looked up")
@pytest.mark.parametrize("family", ["glm_checkpoints", "expert_checkpoints"])
def test_what_a_step_on_gpus_launches(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """One kernel brings the lanes of all ranks to experts, and one adds up what those made."""
    names = {"glm_checkpoints": "glm-norms-biases", "expert_checkpoints": "moe-even"}
    path = request.getfixturevalue(family)[names[family]].path
    with open_engine(path, 2) as engine:
        assert isinstance(engine.runtime, DataParallelRuntime)
        hidden = engine.model.config.hidden_size
        units = push_units(MAX_LANES, hidden, torch.float32) + 2
        items = torch.zeros(2, 2, units, PUSH_UNIT, dtype=torch.int64)
        peers = Peers(0, PeerItems.over_items(0, items, [items.data_ptr()] * 2))
        with monkeypatch.context() as patch:
            pushes = Pushes(PeerTensors(peers, None, None), pdl=False)
            patch.setattr(engine.runtime.groups.tensor, "pushes", pushes)
            graphs = graph_kernels(engine)
        layers = len(expert_layers(engine.model.config))
        for name, kernels in graphs.items():
            pushes = [each.name for each in kernels if each.name.startswith("_push")]
            added = "_push_to_residual_kernel" if name.startswith("decode") else "_push_kernel"
            # What only notes a prompt computes no layer.
            met = 0 if name.endswith("/note") else layers
            assert pushes == ["_push_lanes_kernel", added] * met, name


# Faults.


def test_a_rank_that_is_gone_is_the_next_calls_error(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = oracle.prompts((5, 9))
    with open_engine(oracle.path, 2) as engine:
        assert isinstance(engine.runtime, DataParallelRuntime)
        requests = [engine.submit(prompt, greedy(60)) for prompt in prompts]
        step_until(engine, lambda: all(request.token_ids for request in requests))
        driven = ranks_of(engine)
        assert driven.wait_done(1, 1, None) and not driven.wait_done(1, 10**6, 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(driven, "_limit", 0.1)
            message = r"waited 0.1 s for rank 1 to have done command 1000000: rank 1 .* has done"
            with pytest.raises(RankFailed, match=message):
                driven.wait_done(1, 10**6, None)
        monkeypatch.setattr(ranks, "_GRACE_S", GENEROUS_S)
        os.kill(driven.pids[0], signal.SIGKILL)
        message = r"rank 1 \(process \d+, cpu\) was ended by signal 9 \(SIGKILL\)"
        with pytest.raises(RankFailed, match=message):
            while engine.busy:
                engine.step()
        with pytest.raises(RuntimeError, match="the engine is broken, close it: RankFailed"):
            engine.step()


def test_who_waits_for_a_rank_says_where(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 0.0)
    message = r"; rank 0 of 2 waited 0\.2 s for rank 1 in exchange \d+, gather of \d+ bytes$"
    with open_engine(oracle.path, 2, wait_limit_s=GENEROUS_S) as engine:
        requests = [engine.submit(prompt, greedy(60)) for prompt in oracle.prompts((5, 9))]
        step_until(engine, lambda: all(request.token_ids for request in requests))
        limit_waits(engine, 0.2)
        stop(ranks_of(engine))
        with pytest.raises(RankFailed, match=message):
            run(engine)


def test_what_a_rank_publishes_after_it_has_waited_in_vain_is_nothing(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 0.0)
    with open_engine(oracle.path, 2) as engine:
        assert isinstance(engine.runtime, DataParallelRuntime)
        requests = [engine.submit(prompt, greedy(60)) for prompt in oracle.prompts((5, 9))]
        step_until(engine, lambda: all(request.token_ids for request in requests))
        (other,) = engine.runtime.others
        # As the kernels of a rank on a GPU say it.
        other._waits[0] = 1
        with pytest.raises(RankFailed, match="ranks did not come within 600 s") as failed:
            run(engine)
        assert str(failed.value.__cause__) == "rank 1 of 2 waited 600 s for the others' parts"


def test_what_cannot_be_shared_is_an_error(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphengine.parallel.driver_runtime.Ranks", None)
    with pytest.raises(
        ValueError, match="data_parallel=4 does not divide the 6 experts of a layer"
    ):
        open_engine(oracle.path, 4)
    message = (
        "data_parallel=2 spreads the experts of a model over ranks, and this Qwen3ForCausalLM has "
        "none: 2 engines, each in a process of its own, serve it as well"
    )
    with pytest.raises(ValueError, match=message):
        open_engine(few_layers(), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel": 0}, "data_parallel=0 must be"),
        (
            {"tensor_parallel": 4},
            "data_parallel=2 and tensor_parallel=4: ranks either have requests of their own, or "
            "split all of them",
        ),
        (
            {"expert_parallel": True},
            "expert_parallel=True is for tensor_parallel: with data_parallel=2 ranks have whole "
            "experts anyway",
        ),
        (
            {"kv_dtype": "fp8"},
            "kv_dtype='fp8' is for ranks that have the same requests, not for data_parallel=2",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"device": "cpu", "data_parallel": 2} | options)


def test_a_recording_tells_of_all_ranks(oracle: Any, engine: Engine) -> None:
    recorder = engine.recorder
    recorder.start()
    engine.generate(oracle.prompts((5, 9, 3)), SamplingParams(temperature=0.0, max_tokens=4))
    recorder.stop()
    records = recorder.replays()
    assert len(records) > 3 and (records["last_rank"] == 1).all()
    assert (records["skew_us"] > 0).all(), "the driver is first on a CPU"
    header = recorder.header()["ranks"]
    assert header["option"] == "data_parallel=2" and 0 < header["waited_s"] < header["seconds"]
    recorder.clear()
