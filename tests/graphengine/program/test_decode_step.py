"""The fused decode step: its two samplers, its row families, what it is made of, and its races.

Decode kernels overlap (`kernels/core/pdl.py`): each may start while the one before still runs.
Whether one reads too early is seen by poison: whatever a step allocates is filled with NaN and -1
before every replay, so that nothing is left over from the step before that could be taken for this
one's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.named_graphs import graph_names, graph_of, replace_graph
from extent import extent
from graphengine import Engine, Request, SamplingParams
from graphengine.buckets import inspect_graph, programmatic_edges
from graphengine.demo import checkpoint_path
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.models.blocks import gqa
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.contract import ModelConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.linears import LinearPlans, heuristic_plans
from graphengine.models.plans.tuning_tables import (
    TunedPlan,
    TuningKey,
    device_name,
    user_table_path,
    write_table,
)
from graphengine.options.devices import DTYPES
from graphengine.program.graph_key import Sampler, decode_key
from graphengine.program.step import StepOutputs, StepProgram
from graphengine.speculative import NGram

SAMPLERS = get_args(Sampler)
# (device, checkpoint, dtype): float32 with random weights, and the demo model in bfloat16.
Case = tuple[str, str, str]
FLOAT32_ON_GPU = pytest.param(
    ("cuda", "llama-biases", "float32"), marks=pytest.mark.gpu, id="cuda-float32"
)
BFLOAT16_ON_GPU = pytest.param(("cuda", "demo", "bfloat16"), marks=pytest.mark.gpu, id="cuda-bf16")
GPU_CASES = [FLOAT32_ON_GPU, BFLOAT16_ON_GPU]
CASES = [
    pytest.param(("cpu", "qwen3-biases", "float32"), id="cpu-random"),
    pytest.param(("cpu", "demo", "float32"), id="cpu-demo"),
    *GPU_CASES,
]


def checkpoint_of(case: Case, checkpoints: dict[str, Any]) -> Path:
    path: Path = checkpoint_path() if case[1] == "demo" else checkpoints[case[1]].path
    return path


def open_engine(case: Case, checkpoints: dict[str, Any], **options: Any) -> Engine:
    device, _, dtype = case
    sizes = {"max_batch": 4, "max_seq_len": 512, "block_size": 16, "prefill_buckets": (16, 64)}
    return Engine.from_pretrained(
        checkpoint_of(case, checkpoints), device=device, dtype=dtype, **(sizes | options)
    )


def random_prompt(engine: Engine, length: int) -> list[int]:
    dice = random.Random(length)
    return [dice.randrange(engine.model.config.vocab_size) for _ in range(length)]


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | options))


def replays(engine: Engine, suffix: str) -> int:
    """Replays of all buckets whose names end so."""
    return sum(count for name, count in engine.counters.items() if name.endswith(suffix))


Opened = Callable[[Case, int], Engine]


@pytest.fixture(scope="module")
def opened(checkpoints: dict[str, Any]) -> Iterator[Opened]:
    """`opened(case, max_batch)`: an engine that tests share, opened when it is first asked for."""
    engines: dict[tuple[Case, int], Engine] = {}

    def of(case: Case, max_batch: int) -> Engine:
        if (case, max_batch) not in engines:
            engines[case, max_batch] = open_engine(case, checkpoints, max_batch=max_batch)
        return engines[case, max_batch]

    yield of
    for engine in engines.values():
        engine.close()


# Two samplers.

UNFILTERED = {
    "greedy": {"temperature": 0.0},
    "greedy with filters": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
    "warm": {"temperature": 0.8, "seed": 5},
    "hot": {"temperature": 4.0, "seed": 6},
    # Stop ids are masked until the 28th token, and may come from then on.
    "late stop": {
        "temperature": 2.0, "seed": 7, "min_tokens": 28, "stop_token_ids": tuple(range(3, 19)),
    },
}  # fmt: skip
# Rows for either family of kernels, and settings.
ASKED = extent(
    [*zip((2, 4, 2, 4, 2), UNFILTERED, strict=True), (4, "warm")],
    [*product((2, 4), UNFILTERED)],
)


@pytest.mark.parametrize(("max_batch", "settings"), ASKED)
@pytest.mark.parametrize("case", CASES)
def test_both_samplers_give_a_request_the_same_tokens(
    case: Case, opened: Opened, max_batch: int, settings: str
) -> None:
    engine = opened(case, max_batch)
    prompt, mine = random_prompt(engine, 21), params(**({"max_tokens": 36} | UNFILTERED[settings]))
    fast, full = replays(engine, "/fast"), replays(engine, "/full")
    alone = engine.generate(prompt, mine)
    assert replays(engine, "/fast") > fast and replays(engine, "/full") == full

    # Beside one with a filter, from its first token to its last.
    neighbour = engine.submit(random_prompt(engine, 9), params(top_k=5, seed=1, max_tokens=99))
    while not neighbour.token_ids:
        engine.step()
    fast, full = replays(engine, "/fast"), replays(engine, "/full")
    request = engine.submit(prompt, mine)
    while not request.finished:
        engine.step()
    assert not neighbour.finished
    assert replays(engine, "/fast") == fast and replays(engine, "/full") > full
    assert request.result().token_ids == alone.token_ids
    neighbour.cancel()
    while engine.busy:
        engine.step()

    # And for a while only.
    fast, full = replays(engine, "/fast"), replays(engine, "/full")
    request = engine.submit(prompt, mine)
    while len(request.token_ids) < 8:
        engine.step()
    engine.submit(random_prompt(engine, 9), params(top_p=0.8, seed=2, max_tokens=6))
    while engine.busy:
        engine.step()
    assert replays(engine, "/fast") - fast > 20 and 5 <= replays(engine, "/full") - full <= 8
    assert request.result().token_ids == alone.token_ids


@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.02}])
@pytest.mark.parametrize("case", CASES)
def test_a_filtered_request_never_meets_the_fast_sampler(
    case: Case, opened: Opened, filters: dict[str, Any]
) -> None:
    engine = opened(case, 4)
    before = replays(engine, "/fast")
    options: dict[str, Any] = {"max_tokens": 24}
    prompt = random_prompt(engine, 21)
    alone = engine.generate(prompt, params(seed=3, **filters, **options))
    batch = [{"temperature": 0.0}, {"seed": 3, **filters}, {"seed": 4}]
    together = engine.generate([prompt] * 3, [params(**each, **options) for each in batch])
    assert together[1].token_ids == alone.token_ids
    # The one that is fed first decodes alone until the second is there.
    assert replays(engine, "/fast") - before <= 2


def test_the_fast_sampler_keeps_its_logits(checkpoints: dict[str, Any]) -> None:
    with open_engine(("cpu", "demo", "float32"), checkpoints, lookahead=0) as engine:
        fast, full = (engine.runtime.program.decode(2, sampler) for sampler in SAMPLERS)
        assert fast.logits is None
        assert full.logits is not None and full.logits.shape == (2, 4096)
        assert full.logits.dtype == torch.float32


# What one step may feed of a prompt.


@pytest.mark.parametrize("limit", [16, 40, 63, 64, 1000])
def test_no_step_feeds_more_than_its_limit(
    checkpoints: dict[str, Any], device: str, limit: int
) -> None:
    oracle = checkpoints["llama-biases"]
    case = (device, "llama-biases", "float32")
    buckets = {"prefill_buckets": (16, 64, 256)}
    lengths = (limit % 300, limit % 300 + 1, 15, 100, 230)
    prompts = oracle.prompts(lengths)
    greedy = params(temperature=0.0, max_tokens=12)
    with open_engine(case, checkpoints, **buckets) as engine:
        unlimited = [engine.generate(prompt, greedy) for prompt in prompts]
    with open_engine(case, checkpoints, max_prefill_tokens_per_step=limit, **buckets) as engine:
        sizes = {size for size in (16, 64, 256) if size < limit} | {min(limit, 256)}
        assert engine.memory.prefill_ladder.sizes == tuple(sorted(sizes))
        results = [engine.generate(prompt, greedy) for prompt in prompts]
        used = {name for name in engine.counters if name.startswith("replays/prefill/")}
        assert used <= {f"replays/prefill/{size}" for size in sizes}, engine.counters
        assert max(int(name.rpartition("/")[2]) for name in used) <= limit
        fed = sum(engine.counters[name] for name in used)
        assert fed == sum(-(-length // max(sizes)) for length in lengths)
    for result, other in zip(results, unlimited, strict=True):
        oracle.assert_greedy(result)
        # Chunks of other lengths are other matrix products, which round in other places.
        assert result.token_ids == other.token_ids or device == "cuda"


def test_who_decodes_gets_a_token_with_every_chunk_of_a_newcomer(
    checkpoints: dict[str, Any], device: str
) -> None:
    case = (device, "qwen3-biases", "float32")
    with open_engine(case, checkpoints, lookahead=0, max_prefill_tokens_per_step=16) as engine:
        running = engine.submit(random_prompt(engine, 5), params(temperature=0.0, max_tokens=90))
        while not running.token_ids:
            engine.step()
        newcomer = engine.submit(random_prompt(engine, 100), params(temperature=0.0))
        for chunk in range(1, 8):
            had = len(running.token_ids)
            events = engine.step()
            assert len(running.token_ids) == had + 1, f"chunk {chunk}: {events}"
            assert engine.counters["replays/prefill/16"] == 1 + chunk
            assert len(newcomer.token_ids) == (chunk == 7)


# Which kernels: families, plans and what they are called.


def plans_of(engine: Engine) -> LinearPlans:
    config, memory = engine.model.config, engine.memory
    return heuristic_plans(config.linears, memory.dtype, engine.row_family)


def write_user_table(
    config: ModelConfig, dtype: torch.dtype, device: str, plans: dict[str, Any]
) -> Path:
    """A table of the user's that has these of the fields of `LinearPlans`."""
    name = device_name(device)
    shapes = config.linears
    measured: dict[str, Any] = {"us": 1.0, "torch": "2", "triton": "3", "date": "2026-11-20"}
    table = {
        TuningKey.of(shapes[linear], plan.family, dtype): TunedPlan(plan, **measured)
        for linear, plan in plans.items()
    }
    path = user_table_path(name)
    write_table(path, name, table)
    return path


CPU: Case = ("cpu", "demo", "float32")


def numerics_of(checkpoints: dict[str, Any], case: Case = CPU, **options: Any) -> tuple[str, str]:
    """Row family and numerics id of an engine, which its report shows."""
    with open_engine(case, checkpoints, **options) as engine:
        report = str(engine.report())
        assert f"row family {engine.row_family} " in report
        assert f"numerics {engine.numerics_id}" in report
        assert len(engine.numerics_id) == 12 and int(engine.numerics_id, 16) >= 0
        return engine.row_family, engine.numerics_id


def test_the_numerics_id_names_what_the_bits_depend_on(checkpoints: dict[str, Any]) -> None:
    family, expected = numerics_of(checkpoints)
    assert family == "dot"
    same: list[dict[str, Any]] = [{}, {"max_batch": 8}, {"lookahead": 0}, {"seed": 1}]
    for options in same:
        assert numerics_of(checkpoints, **options) == ("dot", expected), options
    # What was asked for and what follows from max_batch are the same family.
    assert numerics_of(checkpoints, max_batch=1, row_family="dot") == ("dot", expected)
    fma = numerics_of(checkpoints, max_batch=1)
    assert fma == numerics_of(checkpoints, max_batch=2, row_family="fma")
    assert fma[0] == "fma" and fma[1] != expected
    other: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"prefill_buckets": (16, 128)},
        # The largest prefill bucket, too, says where a prompt is cut.
        {"max_prefill_tokens_per_step": 32},
    ]
    ids = [expected, fma[1]]
    for options in other:
        case = (CPU[0], CPU[1], options.pop("dtype", CPU[2]))
        ids.append(numerics_of(checkpoints, case, **options)[1])
    assert len(set(ids)) == len(ids), ids


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("case", [pytest.param(CPU, id="cpu"), BFLOAT16_ON_GPU])
def test_the_report_says_which_kernels_run_and_why(
    case: Case, checkpoints: dict[str, Any], pdl: bool
) -> None:
    on = "on" if pdl and case[0] == "cuda" else "off"
    for options, why in (
        ({"max_batch": 1}, "fma (for max_batch 1)"),
        ({"max_batch": 3}, "dot (for max_batch 3)"),
        ({"max_batch": 1, "row_family": "dot"}, "dot (asked for)"),
        ({"max_batch": 1, "speculative": NGram(k=3)}, "dot (for 4 lanes)"),
    ):
        with open_engine(case, checkpoints, pdl=pdl, **options) as engine:
            expected = f"row family {why}, plans {engine.runtime.plan_sources}, PDL {on}, numerics "
            assert expected in str(engine.report())
            assert engine.runtime.program.launch.pdl == (on == "on")


@pytest.mark.parametrize("max_batch", [1, 4])
def test_a_users_table_decides_the_plans_and_the_id(
    checkpoints: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_batch: int
) -> None:
    with open_engine(CPU, checkpoints, max_batch=max_batch) as engine:
        assert str(engine.runtime.plan_sources) == "heuristic"
        config, dtype, id_before = engine.model.config, engine.memory.dtype, engine.numerics_id
        before = engine.runtime.plans
        assert before == plans_of(engine)
        expected = engine.generate("def f(", params(temperature=0.0)).token_ids

    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path))
    changed = before["down"]._replace(warps=before["down"].warps * 2)
    path = write_user_table(config, dtype, "cpu", {"down": changed})
    assert path.parent == tmp_path
    with open_engine(CPU, checkpoints, max_batch=max_batch) as engine:
        assert engine.runtime.plans == before.replace({"down": changed})
        assert engine.runtime.plan_sources == dict.fromkeys(before, "heuristic") | {"down": "user"}
        assert "down user" in str(engine.report())
        assert engine.numerics_id != id_before
        # A CPU has no use for plans.
        assert engine.generate("def f(", params(temperature=0.0)).token_ids == expected

    # The plans are part of the numerics, where they come from is not.
    write_user_table(config, dtype, "cpu", dict(before))
    with open_engine(CPU, checkpoints, max_batch=max_batch) as engine:
        assert set(engine.runtime.plan_sources.values()) == {"user"} and "plans user," in str(
            engine.report()
        )
        assert engine.numerics_id == id_before
        # A table of the other family is none for this one.
        other = {"max_batch": 2, "row_family": "dot" if max_batch == 1 else "fma"}
    with open_engine(CPU, checkpoints, **other) as engine:
        assert set(engine.runtime.plan_sources.values()) == {"heuristic"}

    path.write_text("{")
    with pytest.raises(ValueError, match=path.name):
        open_engine(CPU, checkpoints, max_batch=max_batch)


# What a decode graph is made of.


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("max_batch", [1, 2, 8])
@pytest.mark.parametrize("case", GPU_CASES)
def test_a_decode_graph_is_one_chain_of_kernels(
    case: Case, checkpoints: dict[str, Any], max_batch: int, pdl: bool
) -> None:
    pytest.importorskip("cuda.bindings.driver")
    with open_engine(case, checkpoints, max_batch=max_batch, pdl=pdl) as engine:
        assert engine.row_family == ("fma" if max_batch == 1 else "dot")
        layers = engine.model.config.num_layers
        for rows, sampler in product(engine.memory.ladder.sizes, SAMPLERS):
            captured = graph_of(engine, f"decode/{rows}/{sampler}")
            assert captured.graph is not None
            structure = inspect_graph(captured.graph)
            # begin, five a layer, lm_head, finish; the full sampler adds its cutoff and its tiles,
            # and for what requests ask one in front of them and five after finish.
            kernels = 5 * layers + (3 if sampler == "fast" else 11)
            shown = f"{captured.name}, pdl={pdl}\n{structure}"
            assert structure.count() == {"kernel": kernels}, shown
            assert captured.report.nodes == kernels
            edges = [(edge.source, edge.target) for edge in structure.edges]
            assert edges == list(pairwise(range(kernels))), shown
            programmatic = kernels - 1 if pdl else 0
            assert programmatic_edges(captured.graph) == (programmatic, kernels - 1), shown


# Races.

POISON = 0xFF
"""A byte of which NaN is made in every float type, and -1 in every integer type."""


class Span(NamedTuple):
    """Memory that a captured step has allocated; `kept` holds on to it."""

    what: str
    address: int
    nbytes: int
    kept: torch.Tensor | None

    def bytes(self) -> torch.Tensor:
        """The memory as uint8, on the GPU and in place, whatever owns it."""
        interface = {
            "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 2
        }  # fmt: skip
        holder = type("Memory", (), {"__cuda_array_interface__": interface})()
        tensor = torch.as_tensor(holder, device="cuda")
        assert tensor.data_ptr() == self.address and tensor.nbytes == self.nbytes
        return tensor


class Intermediates(TorchDispatchMode):
    """Within it, records every allocation of torch.

    With `keep` the tensors live on, so that none gets the memory of an earlier one. Without it a
    captured graph has its memory as it has it in use: what follows takes over what is done with.
    """

    def __init__(self, *, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self.spans: list[Span] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Views and what is returned by operations in place share memory with an argument.
        given = {storage_of(leaf) for leaf in tensors_in((args, kwargs))}
        for leaf in tensors_in(result):
            nbytes = leaf.untyped_storage().nbytes()
            if nbytes and storage_of(leaf) not in given:
                what = f"{len(self.spans)}: {func} {leaf.dtype} {list(leaf.shape)}"
                kept = leaf if self.keep else None
                self.spans.append(Span(what, storage_of(leaf), nbytes, kept))
        return result


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_the_recorder_sees_what_a_step_allocates(checkpoints: dict[str, Any]) -> None:
    """The instrument of the tests below, on a step that runs here."""
    with open_engine(CPU, checkpoints) as engine:
        recorder = Intermediates(keep=True)
        with recorder:
            outputs = engine.runtime.program.decode(2, "full")
        found = {span.address for span in recorder.spans}
        assert {storage_of(tensor) for tensor in outputs} <= found
        static = [engine.runtime.buffers[field.name] for field in engine.runtime.buffers.fields]
        static += [engine.cache, engine.runtime.mailbox.tensor, *engine.model.weights.tensors()]
        assert not found & {storage_of(tensor) for tensor in static}
        # At least residual, product, attention and SwiGLU of each layer.
        assert len(recorder.spans) >= 4 * engine.model.config.num_layers


@contextmanager
def recorded_captures(*, keep: bool) -> Iterator[dict[str, Intermediates]]:
    """Engines opened within it leave here the intermediates of their decode graphs, by name."""
    found: dict[str, Intermediates] = {}
    original = StepProgram.decode

    def decode(self: StepProgram, rows: int, sampler: Sampler, drafts: int = 0) -> StepOutputs:
        recorder = Intermediates(keep=keep)
        with recorder:
            outputs = original(self, rows, sampler, drafts)
        if torch.cuda.is_current_stream_capturing():
            found[decode_key(rows, drafts, sampler).name] = recorder
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepProgram, "decode", decode)
        yield found


class PoisonedGraph:
    """Stands in for a captured graph: before each replay its intermediates are poison."""

    def __init__(self, engine: Engine, name: str, intermediates: Intermediates) -> None:
        self.engine, self.name = engine, name
        self.graph = graph_of(engine, name)
        self.spans = intermediates.spans
        self.memory = [span.bytes() for span in self.spans]
        self.replays = 0
        assert self.memory, f"nothing was recorded of {name}"

    def replay(self) -> None:
        with self.engine.runtime.on_stream():
            for memory in self.memory:
                memory.fill_(POISON)
        self.graph.replay()
        self.replays += 1


def open_poisoned(
    case: Case, checkpoints: dict[str, Any], *, keep: bool, **options: Any
) -> tuple[Engine, dict[str, PoisonedGraph]]:
    """An engine whose decode graphs are replayed on poison, and these graphs."""
    with recorded_captures(keep=keep) as recorded:
        engine = open_engine(case, checkpoints, **options)
    names = {name for name in graph_names(engine) if name.startswith("decode/")}
    assert recorded.keys() == names
    stand_ins = {name: PoisonedGraph(engine, name, recorded[name]) for name in names}
    for name, stand_in in stand_ins.items():
        replace_graph(engine, name, stand_in)
    return engine, stand_ins


STEPS = 64
# Step of the submission, prompt tokens, parameters. Some wait for a slot; one outlasts the run. Of
# 300 tokens attention has three splits.
ARRIVALS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (0, 5, {"temperature": 0.0, "max_tokens": 99}),
    (3, 140, {"temperature": 0.9, "seed": 1, "max_tokens": 14}),
    (6, 17, {"temperature": 1.0, "seed": 2, "max_tokens": 5}),
    (20, 300, {"temperature": 0.8, "top_k": 20, "seed": 3, "max_tokens": 12}),
    (21, 33, {"temperature": 1.0, "top_p": 0.9, "seed": 4, "max_tokens": 9}),
    (23, 9, {"temperature": 0.0, "max_tokens": 20}),
    (46, 129, {"temperature": 1.2, "min_p": 0.05, "seed": 5, "max_tokens": 8}),
    (55, 64, {"temperature": 0.7, "seed": 6, "max_tokens": 30}),
)

Tokens = list[tuple[tuple[int, ...], str | None]]


def play(
    engines: Sequence[Engine],
    after_step: Callable[[int], None] = lambda step: None,
    *,
    to_the_end: bool = True,
) -> list[Tokens]:
    """Step the engines side by side through ARRIVALS; each request's tokens and end, by engine.

    Unless some may end early by an error, every bucket and sampler must be used.
    """
    requests: list[list[Request]] = [[] for _ in engines]
    for step in range(STEPS):
        for _, length, options in (arrival for arrival in ARRIVALS if arrival[0] == step):
            for engine, own in zip(engines, requests, strict=True):
                prompt = random_prompt(engine, length)
                own.append(engine.submit(prompt, params(**options)))
        for engine in engines:
            engine.step()
        after_step(step)
    for engine in engines if to_the_end else ():
        assert replays(engine, "/fast") > 10 and replays(engine, "/full") > 10, engine.counters
        for rows in engine.memory.ladder.sizes:
            used = sum(engine.counters[f"replays/decode/{rows}/{name}"] for name in SAMPLERS)
            assert used > 0, f"bucket {rows} was never used: {engine.counters}"
    return [
        [(tuple(request.token_ids), request.finish_reason) for request in own] for own in requests
    ]


class Kernels(NamedTuple):
    """Which kernels a test runs: slots, and by that the family, and whether K is split."""

    max_batch: int
    split: bool = False


KERNELS = {"fma": Kernels(2), "dot": Kernels(4), "dot-split": Kernels(4, split=True)}


@pytest.fixture(params=list(KERNELS))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return KERNELS[request.param]


@pytest.fixture
def use_kernels(
    checkpoints: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Case, Kernels], dict[str, Any]]:
    """`use_kernels(case, kernels)`: the options of an engine that runs them.

    Plans that split K come from a user's table: small models get none by themselves, and lm_head
    never does.
    """

    def use(case: Case, kernels: Kernels) -> dict[str, Any]:
        if kernels.split:
            monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path))
            config = read_model_config(Checkpoint.open(checkpoint_of(case, checkpoints)).config)
            dtype = DTYPES[case[2]]
            plans = heuristic_plans(config.linears, dtype, "dot")
            split = {
                name: plan._replace(splits=2) for name, plan in plans.items() if name != "lm_head"
            }
            write_user_table(config, dtype, case[0], split)
        family = "fma" if kernels.max_batch == 2 else "dot"
        return {"max_batch": kernels.max_batch, "row_family": family}

    return use


UseKernels = Callable[[Case, Kernels], dict[str, Any]]


def assert_kernels(engine: Engine, kernels: Kernels) -> None:
    assert engine.row_family == ("fma" if kernels.max_batch == 2 else "dot")
    splits = [plan.splits for plan in engine.runtime.plans.values()]
    assert splits == [2, 2, 2, 2, 1] or not kernels.split, f"{engine.runtime.plans}"


def assert_same_bytes(name: str, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got, expected):
        places = (got != expected).nonzero().flatten()
        first = places[:8]
        raise AssertionError(
            f"{name}, {what}: {len(places)} of {got.numel()} bytes differ, first at "
            f"{first.tolist()}: {got[first].tolist()}, not {expected[first].tolist()}"
        )


@pytest.mark.parametrize("case", GPU_CASES)
def test_overlapping_kernels_compute_the_bits_of_kernels_in_turn(
    case: Case, checkpoints: dict[str, Any], kernels: Kernels, use_kernels: UseKernels
) -> None:
    """Not a byte that a step computes differs between PDL on and off: logits, and all before them.

    Every intermediate has memory of its own, so that what one kernel wrote is still there after
    the step, and poison where nothing was written.
    """
    options = use_kernels(case, kernels) | {"lookahead": 0}
    opened = [
        open_poisoned(case, checkpoints, keep=True, pdl=pdl, **options) for pdl in (True, False)
    ]
    (engine, overlapping), (other, in_turn) = opened
    with engine, other:
        assert_kernels(engine, kernels)
        assert engine.runtime.program.launch.pdl and not other.runtime.program.launch.pdl
        assert engine.numerics_id == other.numerics_id
        seen = dict.fromkeys(overlapping, 0)

        def compare(step: int) -> None:
            torch.cuda.synchronize()
            for name, graph in overlapping.items():
                assert graph.replays == in_turn[name].replays
                if graph.replays == seen[name]:
                    continue
                seen[name] = graph.replays
                assert [span.what for span in graph.spans] == [
                    span.what for span in in_turn[name].spans
                ]
                for span, got, expected in zip(
                    graph.spans, graph.memory, in_turn[name].memory, strict=True
                ):
                    assert_same_bytes(name, f"step {step}, intermediate {span.what}", got, expected)

        tokens, expected = play([engine, other], compare)
        assert tokens == expected
        assert {end for _, end in tokens} == {None, "length"}
        assert_same_bytes(
            "cache",
            "after the last step",
            engine.cache.flatten().view(torch.uint8),
            other.cache.flatten().view(torch.uint8),
        )
        for field in engine.runtime.buffers.fields:
            got, wanted = (each.runtime.buffers[field.name].flatten() for each in (engine, other))
            assert_same_bytes(
                field.name, "after the last step", *(t.view(torch.uint8) for t in (got, wanted))
            )
        assert not engine.runtime.buffers["arrivals"].any()


@pytest.mark.parametrize("keep", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_poisoned_intermediates_change_no_token(
    case: Case, checkpoints: dict[str, Any], kernels: Kernels, use_kernels: UseKernels, keep: bool
) -> None:
    """With the memory of a graph in use ("shared"), and with memory of its own for each tensor."""
    options = use_kernels(case, kernels)
    with open_engine(case, checkpoints, **options) as engine:
        assert_kernels(engine, kernels)
        (expected,) = play([engine])
    assert {end for _, end in expected} == {None, "length"}
    engine, stand_ins = open_poisoned(case, checkpoints, keep=keep, **options)
    with engine:
        assert engine.runtime.program.launch.pdl
        (tokens,) = play([engine])
        used = sum(graph.replays for graph in stand_ins.values())
        assert used == replays(engine, "/fast") + replays(engine, "/full")
    assert tokens == expected


@triton.jit
def _slow_copy(source_ptr, target_ptr, count, one, rounds, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """target = source, long after the next kernel may have started."""
    wait_for_inputs(PDL)
    index = tl.arange(0, BLOCK)
    value = tl.load(source_ptr + index, mask=index < count).to(tl.float32)
    # Each round needs the one before, and no compiler knows that one is 1.
    for _ in range(rounds):
        one = one * one
    tl.store(target_ptr + index, (value * one).to(target_ptr.dtype.element_ty), mask=index < count)


@triton.jit
def _copy(
    source_ptr, target_ptr, count, RACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """target = source; with RACES it reads what the kernel before writes, and then waits for it."""
    index = tl.arange(0, BLOCK)
    if RACES:
        value = tl.load(source_ptr + index, mask=index < count)
        wait_for_inputs(PDL)
    else:
        wait_for_inputs(PDL)
        value = tl.load(source_ptr + index, mask=index < count)
    tl.store(target_ptr + index, value, mask=index < count)


@pytest.mark.parametrize("races", [True, False])
@pytest.mark.parametrize("case", [BFLOAT16_ON_GPU])
def test_a_kernel_that_reads_before_its_wait_is_caught(
    case: Case, checkpoints: dict[str, Any], monkeypatch: pytest.MonkeyPatch, races: bool
) -> None:
    """What the poison is for does happen. Every layer gets two more kernels; one may race."""
    with open_engine(case, checkpoints) as engine:
        (expected,) = play([engine])
    attention = gqa.decode_attention

    def attention_and_copies(*args: Any, **options: Any) -> torch.Tensor:
        attended = attention(*args, **options)
        if attended.is_meta:
            return attended
        (pdl,) = (each.pdl for each in args if isinstance(each, Launch))
        middle, copy = torch.empty_like(attended), torch.empty_like(attended)
        count = attended.numel()
        shared: dict[str, Any] = {"BLOCK": triton.next_power_of_2(count), **launch_options(pdl)}
        # 4 cycles a round: some 10 us.
        _slow_copy[(1,)](attended, middle, count, 1.0, 4_000, **shared)
        _copy[(1,)](middle, copy, count, RACES=races, **shared)
        return copy

    monkeypatch.setattr(gqa, "decode_attention", attention_and_copies)
    engine, _ = open_poisoned(case, checkpoints, keep=True)
    with engine:
        assert engine.runtime.program.launch.pdl
        (tokens,) = play([engine], to_the_end=not races)
    assert (tokens != expected) == races, f"{races=}: {tokens}, undisturbed {expected}"
