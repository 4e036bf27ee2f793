"""Records of experts: what is refused, how requests end that are cut short, what it all takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engines.small_engine import open_engine as open_dense
from graphengine import Engine, Result, SamplingParams
from graphengine.opening.inventory import mailboxes

NAME = "moe-every-layer"
LAYERS, EXPERTS, TOP_K = 2, 5, 3


def greedy(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def open_engine(oracle: Any, **options: Any) -> Engine:
    usual = {"device": "cpu", "max_batch": 2, "max_seq_len": 96, "dtype": "float32"}
    usual |= {"block_size": 8, "prefill_buckets": (16,), "record_routing": True}
    return Engine.from_pretrained(oracle.path, **(usual | options))


def record(tokens: int, layers: int = LAYERS, top_k: int = TOP_K) -> NDArray[np.int64]:
    return np.zeros((tokens, layers, top_k), np.int64) + np.arange(top_k)


def with_value(value: int, *where: int) -> NDArray[np.int64]:
    changed = record(4)
    changed[where] = value
    return changed


@pytest.fixture(scope="module")
def shared(expert_checkpoints: dict[str, Any]) -> Iterator[Engine]:
    with open_engine(expert_checkpoints[NAME]) as engine:
        yield engine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            record(4)[0],
            r"routing=.* must be \[tokens, layers with experts, .*: it is of shape \(2, 3\)",
        ),
        (record(0), r"routing=.* must be \[tokens, .*none of them 0: it is of shape \(0, 2, 3\)"),
        (record(4).astype(float), "must be integers, not float64"),
        (record(4) > 0, "must be integers, not bool"),
        ([[[0, 1], [2]]], r"routing=\[\[\[0, 1\], \[2\]\]\] must be expert ids: "),
        ("0 1 2", r"routing='0 1 2' must be .*: it is of shape \(\)"),
        (with_value(-2, 1, 0, 2), "must be expert ids, which -2 is not"),
        (with_value(2**16, 1, 0, 2), "must be expert ids, which 65536 is not"),
        (torch.zeros(3, 2, 3, device="meta"), "must be expert ids: Cannot copy out of meta tensor"),
    ],
)
def test_what_is_no_record_is_refused_where_parameters_are_made(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + message):
        SamplingParams(routing=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            record(4, layers=3),
            r"routing of shape \(4, 3, 3\) has 3 layers of a token: the model has 2 layers with "
            r"experts, and takes 3 in each",
        ),
        (record(4, top_k=2), r"routing of shape \(4, 2, 2\) has 2 ids of a token: .* takes 3"),
        (with_value(5, 2, 1, 0), r"routing\[2\]\[1\] holds 5: a layer has 5 experts"),
        (with_value(2, 3, 0, 1), r"routing\[3\]\[0\] holds an expert twice: \[0, 2, 2\]"),
        (
            with_value(-1, 1, 1, 0),
            r"routing\[1\]\[1\] holds -1, .* not known: then all of them are -1",
        ),
    ],
)
def test_a_record_of_another_model_is_refused_before_anything_runs(
    shared: Engine, given: Any, message: str
) -> None:
    launched = shared.runtime.launched
    good, wrong = greedy(routing=record(4)), greedy(routing=given)
    with pytest.raises(ValueError, match=message):
        shared.generate([[1, 2], [3, 4]], [good, wrong])
    with pytest.raises(ValueError, match=message):
        shared.submit([1, 2], wrong)
    with shared.session() as session:
        session.append([1, 2])
        with pytest.raises(ValueError, match=message):
            session.submit(wrong)
    assert not shared.busy and shared.runtime.launched == launched


def test_engines_that_cannot_record_say_so(expert_checkpoints: dict[str, Any]) -> None:
    with open_engine(expert_checkpoints[NAME], record_routing=False) as engine:
        message = "routing is for an engine that is opened with record_routing=True"
        with pytest.raises(ValueError, match=message):
            engine.submit([1, 2], greedy(routing=record(2)))
    with (
        open_dense(device="cpu") as engine,
        pytest.raises(ValueError, match="routing is for a model with experts: this one has none"),
    ):
        engine.submit([1, 2], greedy(routing=record(2)))
    message = "record_routing=True, but no layer of this Qwen3ForCausalLM has experts"
    with pytest.raises(ValueError, match=message):
        open_dense(device="cpu", record_routing=True)


def test_an_engine_without_records_is_as_it_was(
    expert_checkpoints: dict[str, Any], shared: Engine
) -> None:
    with open_engine(expert_checkpoints[NAME], record_routing=False) as engine:
        result = engine.generate([1, 2, 3], greedy())
        assert result.routing is None and result.to_dict()["routing"] is None
        runtime = engine.runtime
        assert runtime.routing is None and runtime.program.routing is None
        assert "routing_len" not in runtime.buffers.describe()
        assert not [line for line in lines(engine) if "experts" in line]
        assert engine.numerics_id == shared.numerics_id
    assert shared.generate([1, 2, 3], greedy()).token_ids == result.token_ids


def lines(engine: Engine) -> dict[str, int]:
    """Bytes by the names of the budget's lines."""
    return {line.name: line.bytes for line in engine.memory.budget.lines}


def test_the_budget_has_lines_for_what_records_take(shared: Engine) -> None:
    memory, routing = shared.memory, shared.runtime.routing
    assert routing is not None
    rings = mailboxes(shared.config, tokens_per_step=1, prefill_tokens=16, routed=memory.routed)
    assert rings.routes is not None and rings.prompt_routes is not None
    # Six ids of a token, two in an item.
    assert rings.routes == (shared.config.mailbox_entries, 2, 3)
    assert rings.prompt_routes == (shared.config.mailbox_entries, 16, 3)
    found = lines(shared)
    assert found["experts of tokens"] == sum(
        mailbox.tensor.nbytes for mailbox in (routing.tokens, routing.prompts)
    )
    assert found["experts that requests replay"] == routing.table.tensor.nbytes
    assert routing.table.tensor.shape == (2, 96, LAYERS, TOP_K)
    pages = (memory.kv_blocks + 2 * memory.table_blocks) * 8 * LAYERS * TOP_K * 2
    assert found["experts of tokens on the device and of requests (at most)"] == pages


def fed(result: Result) -> int:
    assert result.routing is not None
    assert (result.routing >= 0).all()
    return len(result.routing)


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def test_requests_that_are_cut_short_have_what_was_fed(shared: Engine) -> None:
    prompt = list(range(3, 43))
    whole = shared.generate(prompt, greedy(20))
    assert whole.routing is not None and fed(whole) == 59
    # A prompt of three chunks, of which none, one or two were read.
    for steps in range(3):
        request = shared.submit(prompt, greedy(20))
        for _ in range(steps):
            shared.step()
        request.cancel()
        run(shared)
        result = request.result()
        assert fed(result) == 16 * steps and not result.token_ids
        np.testing.assert_array_equal(result.routing, whole.routing[: 16 * steps])
    request = shared.submit(prompt, greedy(20))
    while len(request.token_ids) < 5:
        shared.step()
    request.cancel()
    run(shared)
    result = request.result()
    assert fed(result) == 40 + len(result.token_ids) - 1
    np.testing.assert_array_equal(result.routing, whole.routing[: fed(result)])
    single = shared.generate(prompt, greedy(1))
    assert fed(single) == 40
    # Cancelled before it had a slot.
    request = shared.submit(prompt, greedy(20))
    request.cancel()
    run(shared)
    assert request.result().routing.shape == (0, LAYERS, TOP_K)


def test_stops_end_a_record_with_the_token_before_the_last(shared: Engine) -> None:
    prompt = list(range(3, 43))
    whole = shared.generate(prompt, greedy(20))
    assert whole.routing is not None
    last = whole.token_ids[6]
    count = whole.token_ids.index(last) + 1
    stopped = shared.generate(prompt, greedy(20, stop_token_ids=[last]))
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) == count
    assert fed(stopped) == 40 + count - 1
    np.testing.assert_array_equal(stopped.routing, whole.routing[: fed(stopped)])


def test_records_in_results_are_plain_and_records_in_parameters_cannot_change(
    shared: Engine,
) -> None:
    result = shared.generate([1, 2, 3], greedy(4))
    assert result.routing is not None
    listed = json.loads(json.dumps(result.to_dict()))["routing"]
    assert listed == result.routing.tolist()
    params, same = greedy(4, routing=result.routing), greedy(4, routing=listed)
    assert params == same and hash(params) == hash(same)
    assert params != greedy(4, routing=result.routing[:2]) and params != greedy(4)
    result.routing[:] = 0
    assert shared.generate([1, 2, 3], params).routing.tolist() == listed


def test_a_longer_record_than_a_request_is_cut(shared: Engine) -> None:
    result = shared.generate([1, 2, 3], greedy(4))
    assert result.routing is not None
    longer = np.concatenate([result.routing] * 40)
    replayed = shared.generate([1, 2, 3], greedy(4, routing=longer))
    assert replayed.token_ids == result.token_ids and fed(replayed) == 6
