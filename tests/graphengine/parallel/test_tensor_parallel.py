"""Engines of several ranks, each a process: against transformers, and against themselves."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from events import GENEROUS_S
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from checkpoints.few_layers import few_layers
from engines.churn import Owners, come_and_go, write_tokenizer
from engines.family_checks import assert_rewinds
from engines.small_engine import assert_idle, run
from graphengine import Engine, SamplingParams
from graphengine.kernels.comm.items import UNIT as PUSH_UNIT
from graphengine.kernels.comm.items import PeerItems, Peers
from graphengine.kernels.comm.layout import PeerTensors
from graphengine.kernels.comm.push_residual import push_units
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.models.splitting.pushes import Pushes
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.speculative import MTP, NGram, Speculative, UserProvided
from launches.compilation import graph_kernels

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPT_LENGTHS = (1, 3, 17, 40)
SIZES: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 64, "intermediate_size": 72, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "num_hidden_layers": 2,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0,
}  # fmt: skip


def _gemma3() -> PreTrainedModel:
    sizes = SIZES | {"head_dim": 64, "sliding_window": 9, "tie_word_embeddings": True}
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds))


def _gemma2() -> PreTrainedModel:
    """Each rank caps its own logits."""
    caps = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 2.5}
    sizes = SIZES | {"head_dim": 64, "sliding_window": 9, "tie_word_embeddings": True}
    return Gemma2ForCausalLM(Gemma2Config(**sizes | caps))


def _gpt_neox() -> PreTrainedModel:
    """Each rank has some heads of a fused linear."""
    config = GPTNeoXConfig(**SIZES)
    return GPTNeoXForCausalLM(config)


WRITTEN: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES | {"hidden_size": 256})),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=64, sliding_window=19)),
    "gemma3": _gemma3,
    "gemma2": _gemma2,
    "gpt-neox": _gpt_neox,
}
FAMILIES = [
    ("llama-biases", 2),
    ("llama-linear-96", 4),  # One KV head is on all four ranks.
    ("qwen3-biases", 2),
    ("qwen2", 2),
    ("mistral", 2),
    ("gemma3", 2),
    ("gemma2", 2),
    ("gpt-neox", 4),
]


def open_engine(path: Path, ranks: int, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "block_size": 8, "lookahead": 0} | options
    options = {"prefill_buckets": (8, 32), "wait_limit_s": GENEROUS_S, "device": "cpu"} | options
    return Engine.from_pretrained(path, tensor_parallel=ranks, **options)


def greedy(max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def digests(engine: Engine) -> list[str]:
    runtime = engine.runtime
    assert isinstance(runtime, DriverRuntime)
    found = runtime.digests()
    assert len(found) == engine.config.tensor_parallel
    return found


def assert_equal_ranks(engine: Engine) -> None:
    """The state of all ranks is the same to the bit."""
    assert len(set(digests(engine))) == 1


def test_a_bit_that_differs_is_seen(engine: Engine) -> None:
    """Else ranks would be equal whatever they have."""
    buffers = engine.runtime.buffers
    names = {field.name for field in buffers.fields if field.owner == "device" and field.replicated}
    assert {"next_token", "kv_len", "running", "epoch", "sequence"} <= names
    assert_equal_ranks(engine)
    for name in names:
        first = buffers[name].view(torch.uint8).view(-1)[:1]
        first ^= 1
        assert len(set(digests(engine))) == engine.config.tensor_parallel, name
        first ^= 1
    assert_equal_ranks(engine)


@pytest.mark.parametrize(("name", "ranks"), FAMILIES)
def test_families_are_those_of_transformers(
    checkpoints: dict[str, Any],
    write_model: Callable[..., Any],
    tmp_path: Path,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
    ranks: int,
) -> None:
    oracle = checkpoints.get(name) or write_model(WRITTEN[name], tmp_path, len(name))
    with open_engine(oracle.path, ranks) as engine:
        whole = oracle.model.num_parameters()
        assert engine.model.weights.parameters < whole, "a part is what it says"
        results = engine.generate(oracle.prompts(PROMPT_LENGTHS), greedy())
        for result in results:
            oracle.assert_greedy(result)
        assert_equal_ranks(engine)
        # The driver's steps now keep their logits; the other ranks replay theirs beside them, with
        # the sampler that has logits.
        for result in results[1:3]:
            seen = eager(engine)
            again = engine.generate(result.prompt_token_ids, replace(greedy(), logprobs=0))
            assert again.token_ids == result.token_ids
            oracle.assert_logits(again, seen)
        assert_equal_ranks(engine)


@pytest.fixture(scope="module")
def folder(checkpoints: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, for grammars."""
    path = tmp_path_factory.mktemp("ranks")
    for file in checkpoints["qwen3-biases"].path.iterdir():
        (path / file.name).symlink_to(file)
    write_tokenizer(path, 307, eos=11)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """An engine of two ranks, whose pool is too small for its slots."""
    pool = {"max_seq_len": 128, "kv_blocks": 17, "swap_blocks": 400}
    with open_engine(folder, 2, lookahead=1, prompt_logprobs=True, **pool) as engine:
        yield engine


def test_requests_that_come_and_go_have_their_own_tokens(engine: Engine) -> None:
    """With pauses and cancels, however long the driver is busy with other things between steps."""
    dice = random.Random(3)
    owners = Owners(engine, dice)

    def rested() -> None:
        if dice.random() < 0.2:
            time.sleep(dice.random() * 0.1)

    equal = partial(assert_equal_ranks, engine)
    come_and_go(owners, engine, dice, tokens=150, stepped=equal, rested=rested)
    owners.leave()
    run(engine)
    assert_idle(engine)
    engine.stop_callback = None
    owners.check(engine, at_once=1)
    assert any(request.params.temperature for request in owners.requests)
    assert_equal_ranks(engine)


def test_sessions_go_on(
    engine: Engine, folder: Path, checkpoints: dict[str, Any], tmp_path: Path
) -> None:
    """A snapshot has the KV as one rank has it; the session that is restored goes on from it."""
    oracle = checkpoints["qwen3-biases"]
    assert_rewinds(engine, oracle)
    assert_equal_ranks(engine)
    prompt, more = oracle.prompts((37, 5))
    with engine.session() as session:
        session.append(prompt)
        session.generate(greedy(12))
        kept = session.snapshot(tmp_path / "session")
        session.append(more)
        expected = session.generate(greedy(12))
        cached = expected.cached_tokens
    with engine.restore_session(tmp_path / "session") as restored:
        again = restored.snapshot()
        assert all(map(torch.equal, again.caches, kept.caches))
        restored.append(more)
        result = restored.generate(greedy(12))
        assert result.token_ids == expected.token_ids
        assert result.cached_tokens == cached >= 48
    assert_equal_ranks(engine)
    with open_engine(folder, 1, max_seq_len=128) as alone, alone.session() as session:
        session.append(prompt)
        session.generate(greedy(12))
        whole = session.snapshot()
        assert whole.origin.caches == kept.origin.caches
        for found, cache in zip(kept.caches, whole.caches, strict=True):
            torch.testing.assert_close(found, cache, rtol=1e-4, atol=1e-4)
        assert whole.origin.model == kept.origin.model
        # Of any number of ranks.
        with alone.restore_session(kept) as restored:
            restored.append(more)
            result = restored.generate(greedy(12))
            assert result.token_ids == expected.token_ids and result.cached_tokens == cached
    with engine.restore_session(whole) as restored:
        restored.append(more)
        assert restored.generate(greedy(12)).token_ids == expected.token_ids
    assert_equal_ranks(engine)


@pytest.mark.parametrize("mode", [NGram(k=3), UserProvided(k=2)], ids=["ngram", "user"])
def test_drafts_change_no_token(
    engine: Engine, folder: Path, checkpoints: dict[str, Any], mode: Speculative
) -> None:
    prompts = [prompt * 3 for prompt in checkpoints["qwen3-biases"].prompts((5, 11, 20))]
    params = [SamplingParams(max_tokens=16, seed=5), greedy(), greedy()]
    expected = [each.token_ids for each in engine.generate(prompts, params)]
    with open_engine(folder, 2, speculative=mode) as drafting:
        requests = [drafting.submit(*each) for each in zip(prompts, params, strict=True)]
        while drafting.busy:
            drafting.step()
            for request, tokens in zip(requests, expected, strict=True):
                done = len(request.token_ids)
                if isinstance(mode, UserProvided) and done and not request.finished:
                    drafting.draft(request, tokens[done : done + 2])
        assert [tuple(request.token_ids) for request in requests] == expected
        assert drafting.acceptance.accepted > 0
        assert_equal_ranks(drafting)


def test_modules_draft_what_they_draft_on_one_rank() -> None:
    """Their layers are split like the target's."""
    prompts = ["def fib(n):", "class Tree:\n", "import os\n"]
    with open_engine(few_layers(), 1, speculative=MTP(k=2)) as alone:
        expected = [each.token_ids for each in alone.generate(prompts, greedy())]
        accepted = alone.acceptance.accepted
        whole = alone.core.drafter.weights
    with open_engine(few_layers(), 2, speculative=MTP(k=2)) as engine:
        found = [each.token_ids for each in engine.generate(prompts, greedy())]
        assert found == expected and engine.acceptance.accepted == accepted > 0
        part = engine.core.drafter.weights
        assert part is not None and whole is not None and part.nbytes < whole.nbytes
        assert_equal_ranks(engine)


def test_reports_say_so(engine: Engine, folder: Path) -> None:
    assert engine.core.description["tensor_parallel"] == 2
    assert "device cpu, the first of 2 ranks, float32" in str(engine.report())
    with open_engine(folder, 1) as alone:
        assert "ranks" not in str(alone.report())
        assert alone.numerics_id != engine.numerics_id


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel is not looked up")
def test_a_step_on_gpus_launches_what_one_ranks_does(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of ranks is in the kernel of its product; apart are gathers of logits."""
    assert isinstance(engine.runtime, DriverRuntime)
    group = engine.runtime.groups.tensor
    assert group is not None
    units = push_units(MAX_LANES, engine.model.config.hidden_size, torch.float32)
    items = torch.zeros(2, group.share.ranks, units, PUSH_UNIT, dtype=torch.int64)
    tensors = PeerItems.over_items(0, items, [items.data_ptr()] * group.share.ranks)
    with monkeypatch.context() as patch:
        peers, program = Peers(0, tensors), engine.runtime.program
        patch.setattr(group, "pushes", Pushes(PeerTensors(peers, None, None), pdl=False))
        patch.setattr(program, "launch", replace(program.launch, peers=peers))
        ranks = graph_kernels(engine)
    with open_engine(folder, 1) as alone:
        one = graph_kernels(alone)
    decode = [name for name in one if name.startswith("decode")]
    assert decode
    for name in decode:
        found = [each.name for each in ranks[name]]
        own = [each.name for each in one[name]]
        # The best candidate of each rank, or the logits of other samplers.
        gather = "_push_candidates_kernel" if name.endswith("/fast") else "_push_kernel"
        assert [each for each in found if each not in own] == [gather], name
        assert [each for each in found if each in own] == own


def test_an_engine_that_is_interrupted_when_its_ranks_are_open_ends_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphengine.engine.EngineCore", interrupt)
    others = {*multiprocessing.active_children()}
    with pytest.raises(KeyboardInterrupt):
        open_engine(folder, 2)
    assert {*multiprocessing.active_children()} == others


def test_ranks_time_chunks_together(folder: Path, checkpoints: dict[str, Any]) -> None:
    """The slowest one counts, and the driver cuts prompts: a short bound is an error there."""
    prompts = checkpoints["qwen3-biases"].prompts((3, 100))
    options: dict[str, Any] = {"prefill_buckets": (8, 16, 32), "max_seq_len": 128}
    found = []
    for bound in (None, 1e6):
        with open_engine(folder, 2, max_prefill_ms_per_step=bound, **options) as engine:
            times = engine.runtime.chunk_times
            assert (times is None) == (bound is None)
            found.append([each.token_ids for each in engine.generate(prompts, greedy())])
            assert_equal_ranks(engine)
    assert found[0] == found[1]
    assert times is not None and all(ms > 0 for point in times.values() for _, ms in point)
    with pytest.raises(ValueError, match="max_prefill_ms_per_step=1e-05 is too short: a chunk of"):
        open_engine(folder, 2, max_prefill_ms_per_step=1e-5, **options)
