"""The captured step itself: replay against eager, padding, buckets, and what a replay may cost.

An engine is brought to the brink of a step, everything that the step can see is copied, and the
step is run from that state as often as a test needs. "Equal" means equal bits, NaNs included.
"""

from __future__ import annotations

import gc
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from engines.named_graphs import graph_names, graph_of, replace_graph
from graphengine import Engine, Request, SamplingParams
from graphengine.buckets.captured import CHECK_EVERY
from graphengine.config import EngineConfig
from graphengine.demo import checkpoint_path
from graphengine.host.step_plan import Plan
from graphengine.program.graph_key import Sampler, prefill_key
from graphengine.program.step import StepOutputs
from graphengine.requests.processing import processing_fields
from graphengine.sampling_params import SAMPLER_FIELDS

Tensors = dict[str, torch.Tensor]

# (device, checkpoint, dtype): float32 with random weights, and the demo model in bfloat16.
FLOAT32_ON_GPU = pytest.param(
    ("cuda", "llama-biases", "float32"), marks=pytest.mark.gpu, id="cuda-float32"
)
BFLOAT16_ON_GPU = pytest.param(("cuda", "demo", "bfloat16"), marks=pytest.mark.gpu, id="cuda-bf16")
GPU_CASES = [FLOAT32_ON_GPU, BFLOAT16_ON_GPU]
CASES = [pytest.param(("cpu", "qwen3-biases", "float32"), id="cpu"), *GPU_CASES]
OTHER_LAYERS = ("qwen", "nemotron", "granite", "lfm2", "moe-even")
"""Checkpoints with gated delta nets, Mamba2, short convolutions, experts."""
Case = tuple[str, str, str]
SAMPLERS = get_args(Sampler)
# By max_batch: what an engine of so many slots is to compute with.
FAMILIES = {2: "fma", 8: "dot"}


def sized(max_batch: int) -> dict[str, Any]:
    """Options of an engine of `FAMILIES`."""
    return {"max_batch": max_batch, "row_family": FAMILIES[max_batch]}


MAX_TOKENS = 100
# Every sampler setting; all run on to MAX_TOKENS, the last because no stop id may come before.
MIXED = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 1, "ignore_eos": True},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2, "ignore_eos": True},
    {"temperature": 1.3, "min_p": 0.02, "seed": 3, "ignore_eos": True},
    {"temperature": 1.0, "seed": 4, "min_tokens": MAX_TOKENS, "stop_token_ids": (3, 4, 5)},
    {
        "temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "logit_bias": {5: 1.5, 9: -2.0}, "bad_words": ((3, 4), (7,)), "logprobs": 3,
        "allowed_token_ids": tuple(range(0, 250, 2)), "stop_token_sequences": ((1, 2, 1),),
        "ignore_eos": True,
    },
)  # fmt: skip
# For the fast sampler.
UNFILTERED: dict[str, Any] = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "logit_bias": None, "bad_words": None, "logprobs": None, "allowed_token_ids": None,
    "stop_token_sequences": (),
}  # fmt: skip

HUGE = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}
SLOT_PARAMETERS = (
    "block_table",
    *SAMPLER_FIELDS,
    "stop_ids",
    "min_len",
    "max_len",
    *(
        field.name
        for field in processing_fields(
            EngineConfig(device="cpu"), vocab_size=1, max_seq_len=2, width=1
        )
    ),
)
SLOT_STATE = ("next_token", "kv_len", "running")
# What a step of the full sampler notes of its live slots.
NOTED = ("counts", "history")


@pytest.fixture
def all_checkpoints(
    checkpoints: dict[str, Any], hybrids: dict[str, Any], expert_checkpoints: dict[str, Any]
) -> dict[str, Any]:
    return checkpoints | hybrids | expert_checkpoints


def open_engine(case: Case, checkpoints: dict[str, Any], **options: Any) -> Engine:
    device, name, dtype = case
    sizes = {"max_batch": 8, "max_seq_len": 256, "block_size": 8, "prefill_buckets": (16, 64)}
    path = checkpoint_path() if name == "demo" else checkpoints[name].path
    return Engine.from_pretrained(
        path, device=device, dtype=dtype, **(sizes | {"lookahead": 0} | options)
    )


def submit(engine: Engine, length: int, **options: Any) -> Request:
    """A random prompt of `length` tokens under the next of the MIXED settings."""
    number = engine.core.intake.made
    dice = random.Random(1000 * number + length)
    prompt = [dice.randrange(engine.model.config.vocab_size) for _ in range(length)]
    settings = {"max_tokens": MAX_TOKENS} | MIXED[number % len(MIXED)] | options
    return engine.submit(prompt, SamplingParams(**settings))


def decode_some(
    engine: Engine, lengths: tuple[int, ...], steps: int = 3, **options: Any
) -> list[Request]:
    """Requests with prompts of these lengths, all in the middle of decoding."""
    requests = [submit(engine, length, **options) for length in lengths]
    while not all(request.token_ids for request in requests):
        engine.step()
    for _ in range(steps):
        engine.step()
    assert not any(request.finished for request in requests)
    return requests


@contextmanager
def planned_step(engine: Engine) -> Iterator[Plan]:
    """The next step, planned and loaded, but neither replayed nor ever to be replayed."""
    plan = engine.scheduler.plan()
    assert plan is not None
    assert not plan.swap_out and not plan.swap_in
    with engine.runtime.on_stream():
        engine.core.load(plan)
        yield plan
        settle(engine)


def settle(engine: Engine) -> None:
    if engine.runtime.stream is not None:
        engine.runtime.stream.synchronize()


def visible(engine: Engine) -> Tensors:
    """Every tensor that a step can write, and the host-owned ones that it must not."""
    fields = {
        field.name: engine.runtime.buffers[field.name] for field in engine.runtime.buffers.fields
    }
    mailboxes = {
        "mailbox": engine.runtime.mailbox.tensor,
        "logprobs": engine.runtime.logprobs.tokens.tensor,
    }
    return fields | {"cache": engine.cache} | mailboxes


def snapshot(engine: Engine) -> Tensors:
    settle(engine)
    copies = {name: tensor.clone() for name, tensor in visible(engine).items()}
    settle(engine)
    return copies


def restore(engine: Engine, saved: Tensors) -> None:
    settle(engine)
    for name, tensor in visible(engine).items():
        tensor.copy_(saved[name])
    settle(engine)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(bits(left), bits(right))


def assert_equal(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.shape == expected.shape, f"{what}: {got.shape} != {expected.shape}"
    if not equal(got, expected):
        flat = [bits(t).view(*t.shape, t.element_size()) for t in (got, expected)]
        where = (flat[0] != flat[1]).any(-1).nonzero()
        raise AssertionError(f"{what}: {len(where)} differ, first at {where[:5].tolist()}")


def assert_same_state(got: Tensors, expected: Tensors, what: str) -> None:
    for name, tensor in expected.items():
        assert_equal(got[name], tensor, f"{what}: {name}")


def run_step(engine: Engine, bucket: str) -> Any:
    """The eager step of a bucket; the engine's stream is the current one."""
    kind, size, *sampler = bucket.split("/")
    program: Any = engine.runtime.program
    if sampler == ["note"]:
        return program.note(int(size))
    step = program.decode if kind == "decode" else program.prefill
    return step(int(size), *sampler)


# Replay and eager step.


class CheckedGraph:
    """Stands in for a captured graph: each replay is repeated eagerly from the same state."""

    def __init__(self, engine: Engine, name: str, checked: Counter[str]) -> None:
        self.engine, self.name, self.checked = engine, name, checked
        self.graph = graph_of(engine, name)

    def replay(self) -> None:
        with self.engine.runtime.on_stream():
            self._replay_and_repeat()

    def _replay_and_repeat(self) -> None:
        before = snapshot(self.engine)
        self.graph.replay()
        replayed = snapshot(self.engine)
        assert not equal(replayed["mailbox"], before["mailbox"]), f"{self.name} did not publish"
        restore(self.engine, before)
        run_step(self.engine, self.name)
        assert_same_state(snapshot(self.engine), replayed, f"{self.name}, eager and replayed")
        self.checked[self.name] += 1


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", FAMILIES)
@pytest.mark.parametrize(
    ("case", "weights"),
    [
        pytest.param(FLOAT32_ON_GPU.values[0], {}, id="float32"),
        *(
            pytest.param(BFLOAT16_ON_GPU.values[0], {"quantize": kind}, id=f"bfloat16-{kind}")
            for kind in (None, "fp8", "int8", "int4")
        ),
        pytest.param(
            BFLOAT16_ON_GPU.values[0],
            {"quantize": "fp8", "activations": "fp8"},
            id="bfloat16-fp8-activations",
        ),
        *(
            pytest.param(("cuda", name, "bfloat16"), {}, id=f"bfloat16-{name}")
            for name in OTHER_LAYERS
        ),
    ],
)
def test_a_replay_equals_the_eager_step(
    case: Case, all_checkpoints: dict[str, Any], max_batch: int, weights: dict[str, Any]
) -> None:
    checked: Counter[str] = Counter()
    options = sized(max_batch) | {"prefill_buckets": (8, 32)} | weights
    with open_engine(case, all_checkpoints, **options) as engine:
        assert engine.row_family == FAMILIES[max_batch]
        for name in graph_names(engine):
            replace_graph(engine, name, CheckedGraph(engine, name, checked))
        # Prompts of one chunk and of several, full and padded. They end one after the other, so
        # that the rows shrink through every bucket, some with padding, over slots that are dead.
        lengths = (3, 8, 9, 31, 32, 33, 70, 64)
        asking = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2}
        for filters in (UNFILTERED, {"temperature": 0.9, "top_k": 30}, UNFILTERED | asking):
            requests = [
                submit(engine, length, max_tokens=12 + 3 * index, min_tokens=0, **filters)
                for index, length in enumerate(lengths)
            ]
            while engine.busy:
                engine.step()
            assert all(request.finish_reason in ("length", "stop") for request in requests)
        # A second turn whose penalties see the first, which is noted and not fed again.
        with engine.session() as session:
            for length in (70, 9):
                session.append([1 + index % 50 for index in range(length)])
                session.generate(SamplingParams(max_tokens=4, ignore_eos=True, **asking))
        missing = set(graph_names(engine)) - set(checked)
        assert not missing, f"{missing} not replayed: {checked}"


# Nothing allocated, nothing waited for.

REPLAYS = 1000
TRACED_STEPS = 200
# One block less than all slots can need: blocks are handed out, and tables loaded, on the way.
LONG = {"max_batch": 4, "max_seq_len": 1280, "block_size": 16, "kv_blocks": 4 * 80 - 1}

# Calls that wait for the device; not the ...Async ones.
WAITS = re.compile(r"(?<!A)sync|Memcpy(?!\w*Async)|Memset(?!\w*Async)", re.IGNORECASE)
ALLOCATES = re.compile(r"Malloc|Free|MemAlloc|HostAlloc|MemCreate|HostRegister")
LAUNCH = "cudaGraphLaunch"


def decode_for_long(
    case: Case, checkpoints: dict[str, Any], lookahead: int, sampler: str = "full"
) -> Engine:
    """An engine whose four rows will decode for more than REPLAYS steps with one sampler."""
    engine = open_engine(case, checkpoints, **LONG, lookahead=lookahead)
    filters = UNFILTERED if sampler == "fast" else {}
    options = {"stop_token_ids": (), "ignore_eos": True, **filters}
    requests = [
        submit(engine, length, max_tokens=REPLAYS + 100, **options) for length in (5, 30, 90, 130)
    ]
    while not all(len(request.token_ids) >= 8 for request in requests):
        engine.step()
    return engine


def allocations() -> dict[str, int]:
    """Counters of torch's allocators, device and pinned, that only ever grow."""
    device = {f"device {key}": value for key, value in torch.cuda.memory_stats().items()}
    pinned = {f"pinned {key}": value for key, value in torch.cuda.host_memory_stats().items()}
    return {
        key: value
        for key, value in (device | pinned).items()
        if key.endswith((".allocated", ".freed")) or " num_" in key
    }


@contextmanager
def errors_on_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_sync_debug_mode_sees_a_synchronisation() -> None:
    """The instrument of the test below, tried on something that must not pass."""
    value = torch.ones(1, device="cuda")
    with errors_on_sync(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("name", ["demo", "qwen", "nemotron", "moe-even"])
def test_steps_allocate_and_synchronise_nothing(
    all_checkpoints: dict[str, Any],
    edited: Callable[..., Path],
    name: str,
    lookahead: int,
    sampler: str,
) -> None:
    if name != "demo":
        path = all_checkpoints[name].path
        path = edited(path, config={"max_position_embeddings": LONG["max_seq_len"]})
        all_checkpoints[name] = replace(all_checkpoints[name], path=path)
    with decode_for_long(("cuda", name, "bfloat16"), all_checkpoints, lookahead, sampler) as engine:
        counter = f"replays/decode/4/{sampler}"
        replays = engine.counters[counter]
        # What earlier tests left to the collector must not be freed in the middle of this one.
        gc.collect()
        torch.cuda.synchronize()
        before, (free, _) = allocations(), torch.cuda.mem_get_info()
        assert any(before.values())
        with errors_on_sync():
            for _ in range(REPLAYS):
                engine.step()
        after, (free_after, _) = allocations(), torch.cuda.mem_get_info()
        changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
        assert not changed, f"allocator counters (before, after): {changed}"
        assert free_after == free, f"the driver's free memory changed by {free_after - free} bytes"
        assert engine.counters[counter] - replays == REPLAYS, dict(engine.counters)


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_trace_of_the_driver_shows_one_launch_a_step_and_no_wait(
    checkpoints: dict[str, Any], lookahead: int, tmp_path: Path
) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with decode_for_long(("cuda", "demo", "bfloat16"), checkpoints, lookahead) as engine:
        loaded = []
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(TRACED_STEPS):
                loads = engine.counters["loads"]
                engine.step()
                loaded.append(engine.counters["loads"] - loads)
            # A wait that the trace must show, or its silence about others means nothing.
            settle(engine)
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    calls = runtime_calls(tmp_path / "trace.json")
    launches = [index for index, name in enumerate(calls) if name.startswith(LAUNCH)]
    assert len(launches) == TRACED_STEPS, f"{len(launches)} launches among {Counter(calls)}"
    later = calls[launches[-1] + 1 :]
    assert any("StreamSynchronize" in name for name in later), f"not traced: {Counter(later)}"

    between = calls[launches[0] : launches[-1] + 1]
    for forbidden in (WAITS, ALLOCATES, re.compile("LaunchKernel")):
        found = Counter(name for name in between if forbidden.search(name))
        assert not found, f"{found} in {Counter(between)}"
    # A copy stands before the launch of a step that loads, and nowhere else.
    steps = zip(launches, launches[1:], loaded[1:], strict=False)
    for step, (previous, launch, loads) in enumerate(steps, start=1):
        copies = [name for name in calls[previous:launch] if "Memcpy" in name]
        assert len(copies) == loads, f"step {step} with {loads} loads: {copies}"
    assert 0 < sum(loaded) < TRACED_STEPS / 2, f"{sum(loaded)} steps with a load"
    print(f"\n{TRACED_STEPS} steps, lookahead {lookahead}: {dict(Counter(between))}")


def runtime_calls(trace: Path) -> list[str]:
    """Names of the traced runtime and driver calls, in the order in which they were made."""
    events = json.loads(trace.read_text())["traceEvents"]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return [str(event["name"]) for event in sorted(calls, key=lambda event: float(event["ts"]))]


@pytest.mark.parametrize(
    ("name", "waits", "allocates"),
    [
        ("cudaStreamSynchronize", True, False),
        ("cudaDeviceSynchronize", True, False),
        ("cudaEventSynchronize", True, False),
        ("cudaMemcpy", True, False),
        ("cuMemcpyDtoH_v2", True, False),
        ("cudaMemcpyAsync", False, False),
        ("cuMemcpyHtoDAsync_v2", False, False),
        ("cudaMemsetAsync", False, False),
        ("cudaStreamQuery", False, False),
        ("cudaGraphLaunch", False, False),
        ("cudaMalloc", False, True),
        ("cudaHostAlloc", False, True),
        ("cudaFree", False, True),
    ],
)
def test_the_names_of_waits(name: str, waits: bool, allocates: bool) -> None:
    assert bool(WAITS.search(name)) is waits
    assert bool(ALLOCATES.search(name)) is allocates


# Padding.


class Span:
    """What a step may know of a slot, positions below `start`, and write: `start .. end - 1`."""

    def __init__(self, engine: Engine, request: Request, start: int, end: int) -> None:
        self.slot, self.start, self.end = request.job.placed.slot, start, end
        block_size = engine.memory.block_size
        self.blocks = len(request.job.placed.blocks)
        position = torch.arange(end, device=engine.memory.device)
        blocks = torch.tensor(request.job.placed.blocks, device=engine.memory.device)
        self.block, self.offset = blocks[position // block_size], position % block_size

    def copy_known(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._copy(source, target, slice(0, self.start))

    def copy_written(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._copy(source, target, slice(self.start, self.end))

    def _copy(self, source: torch.Tensor, target: torch.Tensor, part: slice) -> None:
        block, offset = self.block[part], self.offset[part]
        target[:, block, :, offset] = source[:, block, :, offset]


def poison(engine: Engine, spans: list[Span], clean: Tensors) -> None:
    """Put NaN and huge integers wherever a step with these live slots has no business.

    One dead slot has a command pending, which is the one thing that may happen to a dead slot.
    """
    buffers = engine.runtime.buffers
    live = {span.slot: span for span in spans}
    for slot in range(engine.config.max_batch):
        if slot in live:
            buffers["block_table"][slot, live[slot].blocks :] = HUGE[torch.int32]
            continue
        for name in (*SLOT_PARAMETERS, *SLOT_STATE):
            tensor = buffers[name]
            tensor[slot] = float("nan") if tensor.is_floating_point() else HUGE[tensor.dtype]
        buffers["running"][slot] = 1
    commanded = next(slot for slot in range(engine.config.max_batch) if slot not in live)
    buffers["command_epoch"][commanded] = HUGE[torch.int32]
    buffers["swap_pairs"].fill_(HUGE[torch.int32])
    engine.cache.fill_(float("nan"))
    for span in spans:
        span.copy_known(clean["cache"], engine.cache)


def assert_padding_is_harmless(
    engine: Engine,
    bucket: str,
    spans: list[Span],
    poison_lanes: Callable[[], None],
) -> None:
    """The step, run clean and poisoned from one state: equal live lanes, and nothing else written.

    `poison_lanes` poisons the lanes of the bucket itself.
    """
    before = snapshot(engine)
    clean_outputs = run_step(engine, bucket)
    clean = snapshot(engine)

    restore(engine, before)
    poison(engine, spans, before)
    poison_lanes()
    poisoned = snapshot(engine)
    outputs = run_step(engine, bucket)
    after = snapshot(engine)

    rows = len(spans)
    for name, got, expected in zip(StepOutputs._fields, outputs, clean_outputs, strict=True):
        if expected is not None:
            assert_equal(got[:rows], expected[:rows], f"{bucket}: {name}")
    assert bool((outputs.token[:rows] >= 0).all())
    if outputs.logits is not None:
        assert bool(outputs.logits[:rows].isfinite().all())

    # What must be there now: the poison, but for what the clean step made of its live slots.
    expected = poisoned
    for span in spans:
        for name in (*SLOT_STATE, *NOTED, "epoch"):
            expected[name][span.slot] = clean[name][span.slot]
        span.copy_written(clean["cache"], expected["cache"])
    commands = poisoned["command_epoch"]
    for slot in {*range(engine.config.max_batch)} - {span.slot for span in spans}:
        if int(commands[slot]) != int(poisoned["epoch"][slot]):
            expected["epoch"][slot] = commands[slot]
            for name in SLOT_STATE:
                expected[name][slot] = 0
    for name in ("sequence", "mailbox", "logprobs"):
        expected[name] = clean[name]
    assert_same_state(after, expected, f"{bucket}, poisoned")
    restore(engine, before)


@pytest.mark.parametrize("padding", ["empty", "stopped"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("bucket", "max_batch"), [("decode/2", 2), ("decode/4", 8), ("decode/8", 8)]
)
@pytest.mark.parametrize("case", CASES)
def test_padded_rows_of_a_decode_step(
    case: Case,
    checkpoints: dict[str, Any],
    bucket: str,
    max_batch: int,
    sampler: str,
    padding: str,
) -> None:
    with open_engine(case, checkpoints, **sized(max_batch)) as engine:
        assert engine.row_family == FAMILIES[max_batch]
        requests = decode_some(engine, (5, 17, 30, 64, 90, 8)[:max_batch])
        for request in requests[1::2]:
            request.cancel()
        engine.step()
        rows = requests[::2]
        with planned_step(engine) as plan:
            live = len(rows)
            assert list(plan.rows) == rows and live == (1 if max_batch == 2 else 3)
            slots = [request.job.placed.slot for request in rows]
            padded = [-1] * (max_batch - live)
            assert engine.runtime.buffers["slot_of_row"].tolist() == [*slots, *padded]
            lengths = engine.runtime.program.state.kv_len.tolist()
            spans = [
                Span(engine, request, lengths[slot], lengths[slot] + 1)
                for request, slot in zip(rows, slots, strict=True)
            ]

            def poison_lanes() -> None:
                buffers = engine.runtime.buffers
                for name in ("prefill_tokens", "prefill_slot", "prefill_start", "prefill_count"):
                    buffers[name].fill_(HUGE[torch.int32])
                buffers["prefill_final"].fill_(1)
                if padding == "stopped":
                    # As after a lookahead: the host still plans rows that the device has ended.
                    dead = {*range(max_batch)} - {*slots}
                    for row, slot in zip(range(live, max_batch), dead, strict=True):
                        buffers["slot_of_row"][row] = slot
                        buffers["running"][slot] = 0

            assert_padding_is_harmless(engine, f"{bucket}/{sampler}", spans, poison_lanes)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("length", "first_chunks"), [(5, 0), (37, 0), (64, 0), (100, 0), (100, 1)])
@pytest.mark.parametrize("case", CASES)
def test_padded_lanes_of_a_prefill_step(
    case: Case, checkpoints: dict[str, Any], length: int, first_chunks: int, sampler: Sampler
) -> None:
    with open_engine(case, checkpoints) as engine:
        decode_some(engine, (5, 17, 30))
        newcomer = submit(engine, length, **({"logprobs": 2} if sampler == "full" else UNFILTERED))
        for _ in range(first_chunks):
            engine.step()
        with planned_step(engine) as plan:
            chunk = plan.prefill
            assert chunk is not None and chunk.request is newcomer
            assert len(plan.rows) == 3
            assert chunk.start == 64 * first_chunks
            bucket = prefill_key(engine.memory.prefill_ladder.pick(chunk.count), sampler).name
            span = Span(engine, newcomer, chunk.start, chunk.start + chunk.count)

            def poison_lanes() -> None:
                engine.runtime.buffers["prefill_tokens"][chunk.count :] = HUGE[torch.int32]
                engine.runtime.buffers["slot_of_row"].fill_(HUGE[torch.int32])

            assert_padding_is_harmless(engine, bucket, [span], poison_lanes)


# The same bits everywhere.


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("max_batch", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_a_rows_bits_do_not_depend_on_its_bucket_or_sampler(
    case: Case, checkpoints: dict[str, Any], max_batch: int, filtered: bool
) -> None:
    samplers: tuple[Sampler, ...] = ("full",) if filtered else SAMPLERS
    with open_engine(case, checkpoints, **sized(max_batch)) as engine:
        assert engine.row_family == FAMILIES[max_batch]
        lengths = (1, 5, 17, 40, 63, 64, 65, 90)[-max_batch:]
        requests = decode_some(engine, lengths, **({} if filtered else UNFILTERED))
        with planned_step(engine) as plan:
            assert list(plan.rows) == requests and len(requests) == max_batch
            slots = [request.job.placed.slot for request in plan.rows]
            before = snapshot(engine)
            lengths = before["kv_len"].tolist()
            spans = {
                slot: Span(engine, request, lengths[slot], lengths[slot] + 1)
                for slot, request in zip(slots, plan.rows, strict=True)
            }

            def run(bucket: int, slots: list[int], sampler: Sampler) -> dict[int, Tensors]:
                restore(engine, before)
                lanes = engine.runtime.buffers["slot_of_row"]
                lanes.fill_(-1)
                lanes[: len(slots)] = torch.tensor(slots, dtype=lanes.dtype)
                outputs = engine.runtime.program.decode(bucket, sampler)
                settle(engine)
                seen = {}
                for row, slot in enumerate(slots):
                    block, offset = spans[slot].block[-1], spans[slot].offset[-1]
                    seen[slot] = {
                        "token": outputs.token[row : row + 1],
                        "flags": outputs.flags[row : row + 1],
                        "kv": engine.cache[:, block, :, offset].clone(),
                    }
                    if outputs.logits is not None:
                        seen[slot]["logits"] = outputs.logits[row]
                return seen

            together = run(max_batch, slots, "full")
            assert len({int(seen["token"]) for seen in together.values()}) > 1
            assert len({seen["logits"].sum().item() for seen in together.values()}) == max_batch
            for rows in range(1, max_batch + 1):
                for bucket, sampler in product(engine.memory.ladder.sizes, samplers):
                    if rows > bucket:
                        continue
                    for chosen in (slots[:rows], slots[::-1][:rows]):
                        for slot, seen in run(bucket, chosen, sampler).items():
                            what = f"slot {slot} of {rows} rows in {bucket}/{sampler}"
                            assert ("logits" in seen) == (sampler == "full")
                            same = {name: together[slot][name] for name in seen}
                            assert_same_state(seen, same, what)


@pytest.mark.parametrize("case", CASES)
def test_prefill_does_not_depend_on_what_else_is_running(
    case: Case, checkpoints: dict[str, Any], eager: Callable[[Engine], dict[Any, torch.Tensor]]
) -> None:
    with open_engine(case, checkpoints, max_batch=4) as engine:
        seen = eager(engine)
        vocab = engine.model.config.vocab_size
        for length in (1, 5, 16, 37, 64, 100, 150):
            dice = random.Random(length)
            prompt = [dice.randrange(vocab) for _ in range(length)]
            params = SamplingParams(temperature=1.0, seed=length, max_tokens=8, ignore_eos=True)

            def prefilled(
                prompt: list[int] = prompt, params: SamplingParams = params
            ) -> tuple[Request, tuple[int, ...], Tensors]:
                request = engine.submit(prompt, params)
                while not request.token_ids:
                    engine.step()
                settle(engine)
                placed = request.job.placed
                # [L, blocks, 2, block_size, G, D] -> [L, 2, tokens, G, D]
                kv = engine.cache[:, placed.blocks].transpose(1, 2).flatten(2, 3)
                logits = seen[placed.slot, len(prompt) - 1]
                state = {"kv": kv[:, :, : len(prompt)].clone(), "logits": logits}
                return request, (placed.slot, *placed.blocks), state

            alone, place, expected = prefilled()
            first_token = alone.token_ids[0]
            while engine.busy:
                engine.step()
            others = decode_some(engine, (20, 70), steps=2)
            others.append(submit(engine, 90))
            crowded, other_place, got = prefilled()
            assert other_place != place
            assert_same_state(got, expected, f"prompt of {length} tokens")
            assert crowded.token_ids[0] == first_token
            for request in others:
                request.cancel()
            while engine.busy:
                engine.step()
            assert crowded.token_ids == alone.token_ids


# Buffers that move, memory, threads.


@pytest.mark.parametrize("name", ["kv_len", "block_table", "temperature"])
def test_a_buffer_that_moved_breaks_the_engine_by_name(
    device: str, checkpoints: dict[str, Any], name: str
) -> None:
    with open_engine((device, "qwen3-biases", "float32"), checkpoints) as engine:
        request = submit(engine, 5)
        engine.step()
        engine.runtime.buffers[name].data = engine.runtime.buffers[name].clone()
        with pytest.raises(RuntimeError, match=f"static buffer '{name}' moved from 0x"):
            engine.step()
        with pytest.raises(RuntimeError, match=f"engine is broken.*static buffer '{name}' moved"):
            engine.step()
        assert len(request.token_ids) == 1


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_buffer_that_moves_in_the_steady_state_is_found(
    device: str, checkpoints: dict[str, Any], lookahead: int
) -> None:
    """The addresses are looked at now and then: a replay in CHECK_EVERY of each graph."""
    case = (device, "qwen3-biases", "float32")
    with open_engine(case, checkpoints, lookahead=lookahead) as engine:
        request = submit(engine, 5, max_tokens=2 * CHECK_EVERY)
        while len(request.token_ids) < 8:
            engine.step()
        replays = engine.counters["replays/decode/1/fast"]
        engine.runtime.buffers["min_p"].data = engine.runtime.buffers["min_p"].clone()
        with pytest.raises(RuntimeError, match="static buffer 'min_p' moved from 0x"):
            while engine.busy:
                engine.step()
        assert engine.counters["replays/decode/1/fast"] - replays < CHECK_EVERY
        assert not request.finished


MIB = 2**20


def device_memory() -> tuple[int, int]:
    """Bytes that torch has live, and bytes in use as the driver counts them, caches emptied."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


@pytest.mark.gpu
@pytest.mark.alone
def test_an_engine_keeps_to_its_budget_and_gives_everything_back(
    checkpoints: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def use(engine: Engine) -> None:
        requests = [submit(engine, length, max_tokens=20) for length in (5, 40, 100)]
        while engine.busy:
            engine.step()
        assert all(len(request.token_ids) > 0 for request in requests)

    sizes = {"max_batch": 16, "max_seq_len": 1024, "prefill_buckets": (16, 256)}
    case = ("cuda", "demo", "bfloat16")
    # The first engine of a process also pays for what CUDA, cuBLAS and Triton load once.
    with open_engine(case, checkpoints, **sizes) as engine:
        use(engine)
    del engine
    held = [device_memory()]
    for _ in range(3):
        before = device_memory()[0]
        reserved = torch.cuda.memory_reserved()
        with open_engine(case, checkpoints, **sizes) as engine:
            use(engine)
            plan = engine.memory.budget
            allocated = torch.cuda.memory_allocated() - before
            least = engine.model.weights.nbytes + engine.cache.nbytes
            assert least <= allocated <= plan.total("device") + 4 * MIB, (
                f"{allocated} bytes live, weights and cache alone are {least}\n{plan.table()}"
            )
            grown = torch.cuda.memory_reserved() - reserved
            # torch reserves in steps of 20 MiB, for its own pool and for the graphs'.
            assert grown <= plan.total("device") + 64 * MIB, f"{grown} reserved\n{plan.table()}"
        del engine, plan
        held.append(device_memory())
    with capsys.disabled():
        figures = [(round(live / MIB, 2), round(used / MIB, 2)) for live, used in held]
        print(f"\nMiB (torch, driver) after each close: {figures}; open: {allocated / MIB:.1f}")
    live, used = zip(*held, strict=True)
    assert max(live) - live[0] <= MIB, f"bytes live after each close: {live}"
    assert max(used) - used[0] <= 16 * MIB, f"bytes in use after each close: {used}"


@pytest.mark.gpu
def test_other_threads_may_use_the_device_while_an_engine_is_made(
    checkpoints: dict[str, Any],
) -> None:
    case = ("cuda", "demo", "bfloat16")
    prompt, params = list(range(100, 140)), SamplingParams(seed=7, max_tokens=40, ignore_eos=True)
    with open_engine(case, checkpoints) as engine:
        expected = engine.generate(prompt, params).token_ids

    stop, started = threading.Event(), threading.Event()
    failures: list[BaseException] = []
    rounds: Counter[str] = Counter()

    def elsewhere() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    # Sizes that change, so that the allocator has to go to the driver.
                    size = 256 + 64 * (rounds["done"] % 32)
                    ones = torch.ones(size, size, device="cuda")
                    assert bool((ones @ ones == size).all().item())
                    rounds["done"] += 1
                    started.set()
        except BaseException as failure:
            failures.append(failure)
            started.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        assert started.wait(600)
        before = rounds["done"]
        with open_engine(case, checkpoints) as engine:
            during = rounds["done"] - before
            got = engine.generate(prompt, params).token_ids
    finally:
        stop.set()
        thread.join(600)
    assert not failures, f"the other thread: {failures[0]!r}"
    assert not thread.is_alive()
    assert during >= 5, f"{during} rounds while the engine was made"
    assert got == expected
